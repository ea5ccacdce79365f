"""Keys and values in pages on the emulator: by kernels that look up tiles ahead, and by one that does not."""

import pytest
from emulator_checks import check_forward
from feature_cases import draw_case, in_pages

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

SPLIT_TILES = {"block_m": 16, "block_n": 16, "threads": 64, "stages": 3, "key_parts": 2}
TEAM_TILES = {"block_m": 64, "block_n": 64, "threads": 128, "stages": 2, "key_parts": 1}
MMA_TILES = {"block_m": 32, "block_n": 16, "threads": 64}
CORE_TILES = {"block_m": 16, "block_n": 16, "threads": 64, "lanes": 8}
SIZES = {"heads": 6, "kv_heads": 2, "head_dim": 24, "head_dim_v": 40}
MASKS = ("causal", "window", "sink", "packed", "seqused_k")


# A page for several tiles, several for a tile, neither, more than a warp has lanes for each.
@pytest.mark.parametrize(
    ("kernel", "dtype", "tiles", "page_size"),
    [
        ("fwd_8_split_kv", "float16", SPLIT_TILES, 32),
        ("fwd_8_split_kv", "float16", SPLIT_TILES, 7),
        ("fwd_8_split_kv", "bfloat16", TEAM_TILES, 1),
        ("fwd_8_split_kv", "bfloat16", TEAM_TILES, 16),
        ("fwd_8_split_kv", "float16", SPLIT_TILES | {"block_n": 64}, 8),
        ("fwd_5_mma", "bfloat16", MMA_TILES, 16),
        ("fwd_5_mma", "float32", MMA_TILES, 3),
        ("fwd_6_wgmma", "float16", None, 8),
        ("fwd_6_wgmma", "float16", None, 48),
        ("fwd_6_wgmma", "bfloat16", None, 256),
        ("fwd_4_flash_v2", "float32", CORE_TILES, 5),
    ],
)
def test_masks_and_lengths(rng, kernel, dtype, tiles, page_size):
    for seqlen_q, seqlen_k in [(7, 150), (53, 7), (1, 0)]:
        case = draw_case(rng, dtype, MASKS, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=3, **SIZES)
        case.arrays["seqused_k"][:] = 0, 1, seqlen_k
        check_forward(in_pages(rng, case, page_size), kernel, tiles)
