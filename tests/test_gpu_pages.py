"""Keys and values in pages on a GPU: what a plan chooses for prompts, for decoding and for both."""

import numpy as np
import pytest
from feature_cases import draw_case, hide_nan, in_pages
from gpu_calls import check_forward, on_gpu, tensors

import cufa

pytestmark = pytest.mark.gpu

SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "batch": 3}
# (seqlen_q, seqlen_k)
DECODING, PROMPT = (1, 3001), (700, 1300)
MASKS = ("causal", "window", "sink", "packed", "seqused_k")


def draw(rng, dtype, features, lengths, page_size, **sizes):
    case = draw_case(rng, dtype, features, seqlen_q=lengths[0], seqlen_k=lengths[1], **(SIZES | sizes))
    if "seqused_k" in features:
        case.arrays["seqused_k"][:2] = 0, lengths[1]
    case = in_pages(rng, case, page_size)
    hide_nan(case)
    return case


@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
@pytest.mark.parametrize("lengths", [DECODING, PROMPT], ids=["decoding", "prompt"])
def test_page_sizes(cupy, rng, lengths, page_size):
    for features in (("causal", "seqused_k"), MASKS):
        check_forward(cupy, draw(rng, "bfloat16", features, lengths, page_size))


@pytest.mark.parametrize(
    ("kernel", "dtype", "dims", "page_size"),
    [
        ("fwd_8_split_kv", "float16", (64, 64), 16),
        ("fwd_6_wgmma", "float16", (64, 64), 8),
        ("fwd_6_wgmma", "float16", (64, 64), 16),
        ("fwd_6_wgmma", "bfloat16", (128, 72), 48),
        ("fwd_6_wgmma", "bfloat16", (256, 256), 128),
        ("fwd_8_split_kv", "float16", (80, 33), 3),
        ("fwd_8_split_kv", "bfloat16", (256, 192), 64),
        ("fwd_5_mma", "float16", (64, 64), 64),
        ("fwd_5_mma", "float32", (72, 40), 16),
        ("fwd_5_mma", "float64", (40, 24), 24),
        ("fwd_5_mma", "bfloat16", (256, 512), 32),
        ("fwd_4_flash_v2", "float32", (64, 64), 20),
    ],
)
def test_kernels(cupy, rng, kernel, dtype, dims, page_size):
    head_dim, value_dim = dims
    for lengths in ((5, 900), (130, 200)):
        sizes = {"head_dim": head_dim, "head_dim_v": value_dim}
        check_forward(cupy, draw(rng, dtype, MASKS, lengths, page_size, **sizes), kernel=kernel)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 192)])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_in_parts(cupy, rng, dims, packed):
    """Of which only the GPU knows how many there are, in pages or not: as the plan chooses, and otherwise."""
    sizes = {"head_dim": dims[0], "head_dim_v": dims[1], "batch": 2}
    for features in (("causal", "seqused_k", "sink"), ("softcap",)):
        features += ("packed",) * packed
        for tiles in (None, {"key_parts": 2}, {"key_parts": 4}):
            options = {"kernel": "fwd_6_wgmma", "tiles": tiles}
            check_forward(cupy, draw(rng, "bfloat16", features, (300, 5000), 16, **sizes), **options)
            lengths = {"seqlen_q": 300, "seqlen_k": 5000}
            case = draw_case(rng, "float16", {*features, "seqused_k"}, **(SIZES | sizes | lengths))
            hide_nan(case)
            check_forward(cupy, case, **options)


@pytest.mark.parametrize("features", [("bias", "alibi_slopes", "softcap"), ("mask_bits", "dropout")], ids=str)
def test_features_of_scores(cupy, rng, features):
    for lengths in ((3, 500), (90, 130)):
        check_forward(cupy, draw(rng, "float16", (*features, "causal"), lengths, 16))


def test_prompts_and_decoding_in_one_call(cupy, rng):
    """One query of some sequences and many of others, packed, as a server batches them."""
    case = draw(rng, "bfloat16", ("packed", "causal"), (600, 900), 16, batch=4)
    ends = case.arrays["cu_seqlens_q"]
    ends[:] = ends[0] + np.array([0, 1, 2, 599, 600])
    check_forward(cupy, case)


def test_a_table_that_is_part_of_another(cupy, rng):
    """It is read where it lies; and a later call reads it anew."""
    case = draw(rng, "bfloat16", ("causal",), DECODING, 16)
    q, k, v, _ = tensors(cupy, case)
    options = on_gpu(cupy, case.forward)
    table = options["block_table"]
    wide = cupy.full((len(table), table.shape[1] + 7), -1, np.int32)
    expected = cufa.attention(q, k, v, **options)
    options["block_table"] = wide[:, 3 : 3 + table.shape[1]]
    options["block_table"][...] = table
    np.testing.assert_array_equal(
        cufa.attention(q, k, v, **options).view(np.uint16).get(), expected.view(np.uint16).get()
    )
