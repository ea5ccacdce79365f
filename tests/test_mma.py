"""fwd_5_mma and bwd_3_mma on GPUs that need not be here: what the plan's tiles take of registers."""

from dataclasses import replace

import numpy as np
import pytest

import cufa
from cufa import jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.problem import Features, Problem

# With all of a thread's registers in use, ptxas spills words that stay the same from tile to tile: they are
# loaded once a tile, which takes a hundred times as long. More than a few bytes are sums.
# (arch, kernel, dtype, head_dim, causal, bytes): where spills were seen, or where shared memory leaves the
# plan least choice. The bytes are the most that NVRTC 13.0 and 13.5 were seen to spill.
TIGHT = [
    ("sm_75", "bwd_3_mma", "float16", 256, True, 0),
    ("sm_80", "fwd_5_mma", "float16", 64, False, 0),
    ("sm_80", "fwd_5_mma", "float16", 128, True, 0),
    ("sm_80", "bwd_3_mma", "bfloat16", 64, True, 0),
    ("sm_80", "bwd_3_mma", "float16", 256, True, 0),
    ("sm_86", "fwd_5_mma", "bfloat16", 64, True, 0),
    ("sm_86", "bwd_3_mma", "float32", 256, True, 12),
    ("sm_86", "bwd_3_mma", "float16", 112, True, 0),
    ("sm_86", "bwd_3_mma", "float16", 160, True, 0),
    ("sm_87", "bwd_3_mma", "float16", 128, True, 0),
    ("sm_89", "fwd_5_mma", "float16", 128, True, 0),
    ("sm_89", "fwd_5_mma", "bfloat16", 256, True, 0),
    ("sm_90a", "fwd_5_mma", "float16", 64, False, 0),
    ("sm_90a", "fwd_5_mma", "float32", 64, True, 0),
    ("sm_90a", "fwd_5_mma", "float32", 128, False, 0),
    ("sm_90a", "bwd_3_mma", "float16", 64, True, 0),
    ("sm_90a", "bwd_3_mma", "float16", 256, True, 0),
    ("sm_90a", "bwd_3_mma", "float64", 256, True, 100),
    ("sm_100a", "fwd_5_mma", "float16", 64, False, 0),
    ("sm_100a", "bwd_3_mma", "float16", 64, False, 0),
    ("sm_100a", "bwd_3_mma", "bfloat16", 64, True, 8),
    ("sm_103a", "fwd_5_mma", "float16", 128, True, 0),
    ("sm_103a", "bwd_3_mma", "float16", 128, True, 0),
    ("sm_120a", "bwd_3_mma", "float16", 112, False, 0),
    ("sm_120a", "bwd_3_mma", "float16", 256, True, 0),
    ("sm_121a", "fwd_5_mma", "bfloat16", 64, False, 0),
    ("sm_75", "bwd_3_mma", "float16", 448, True, 0),
    ("sm_80", "bwd_3_mma", "bfloat16", 512, True, 0),
    ("sm_86", "bwd_3_mma", "float16", 512, False, 0),
    ("sm_90a", "bwd_3_mma", "float16", 320, False, 16),
    ("sm_90a", "bwd_3_mma", "float16", 512, True, 0),
    ("sm_90a", "bwd_3_mma", "float32", 512, True, 16),
    ("sm_100a", "bwd_3_mma", "float32", 512, False, 180),
    ("sm_120a", "bwd_3_mma", "bfloat16", 320, False, 0),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("arch", "kernel", "dtype", "head_dim", "causal", "most_bytes"), TIGHT)
def test_no_sums_are_spilled(arch, kernel, dtype, head_dim, causal, most_bytes):
    problem = Problem(KERNELS[kernel].direction, dtype, 2, 4096, 4096, 8, 8, head_dim, head_dim, causal)
    build = jit.build(make_plan(problem, Device.of(arch), kernel).variant)
    assert max(used.spill_stores for used in build.resources.values()) <= most_bytes


# The largest head dims. The bytes are the most that NVRTC 13.5 was seen to spill, and a few more.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arch", "kernel", "dtype", "most_bytes"),
    [
        *((arch, "bwd_2_flash_v2", "float32", 12) for arch in ("sm_75", "sm_90a")),
        *((arch, "bwd_2_flash_v2", "float64", 24) for arch in ("sm_75", "sm_90a")),
        *((arch, "bwd_3_mma", "bfloat16", 0) for arch in ("sm_80", "sm_86", "sm_90a", "sm_120a")),
        ("sm_90a", "bwd_3_mma", "float32", 40),
    ],
)
def test_no_sums_of_the_widest_heads_are_spilled(arch, kernel, dtype, most_bytes):
    features = Features(deterministic=kernel == "bwd_2_flash_v2")
    problem = Problem("backward", dtype, 2, 4096, 4096, 8, 8, 576, 512, True, features=features)
    build = jit.build(make_plan(problem, Device.of(arch), kernel).variant)
    assert max(used.spill_stores for used in build.resources.values()) <= most_bytes


# The keys of a tile are the fewest that are enough. The bytes are the most that NVRTC 13.5 was seen to spill
# outside of loops, and a few more.
@pytest.mark.parametrize(
    ("arch", "dtype", "keys", "head_dim", "block_n", "most_bytes"),
    [
        *(
            (arch, "float16", *sizes)
            for arch in ("sm_75", "sm_80", "sm_90a", "sm_120a")
            for sizes in ((16, 32, 16, 32), (30, 64, 32, 24), (64, 64, 64, 8))
        ),
        ("sm_75", "float16", 49, 128, 64, 120),  # its copies go through registers
        ("sm_86", "float16", 49, 128, 64, 16),
        ("sm_80", "float32", 64, 128, 64, 16),
        ("sm_90a", "float32", 64, 128, 64, 16),
    ],
)
def test_blocks_have_all_keys_of_short_sequences(arch, dtype, keys, head_dim, block_n, most_bytes):
    plan = make_plan(
        Problem("backward", dtype, 500, 77, keys, 8, 2, head_dim, head_dim), Device.of(arch), "bwd_3_mma"
    )
    assert [launch.entry for launch in plan.launches] == ["key_tiles"]
    assert (plan.launches[0].grid, plan.tiles["block_n"], plan.workspace_bytes) == (1000, block_n, 0)
    assert jit.build(plan.variant).resources["key_tiles"].spill_stores <= most_bytes


@pytest.mark.parametrize(("keys", "whole"), [(256, True), (257, False), (4096, False)])
def test_tiles_of_more_keys_than_the_plan_chooses(keys, whole):
    tiles = {"block_m": 32, "block_n": 256, "threads": 512, "stages": 1, "split": 1}
    problem = Problem("backward", "bfloat16", 4, 512, keys, 8, 8, 64, 64)
    plan = make_plan(problem, Device.of("sm_90a"), "bwd_3_mma", tiles)
    assert (len(plan.launches) == 1) == whole
    assert jit.build(plan.variant).resources


def test_blocks_have_all_keys_of_packed_sequences_if_the_call_says_how_many():
    packed = Problem(
        *("backward", "bfloat16", 5, 300, 300, 8, 2, 64, 64), features=Features(packed=True), max_seqlen_k=64
    )
    h200 = Device.of("sm_90a")
    plan = make_plan(packed, h200)
    assert plan.kernel == "bwd_3_mma"
    # The four heads that share keys are so many parts.
    launches = [(launch.entry, launch.grid) for launch in plan.launches]
    assert launches == [("key_tiles", 40), ("round_keys", 150)]
    assert {part.name for part in plan.scratch} == {"dQ sums", "parts of dK and dV"}
    for other in (replace(packed, max_seqlen_k=129), replace(packed, max_seqlen_k=None)):
        assert make_plan(other, h200).kernel == "bwd_4_wgmma"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_few_queries_for_each_of_the_warps_that_share_keys(dtype):
    """Half a step of a product, and half of one for each two warps."""
    tiles = {"block_n": 16, "threads": 128, "stages": 1, "split": 4}
    problem = Problem("backward", dtype, 2, 4096, 4096, 8, 8, 64, 64)
    for block_m in (32, 16):
        chosen = {**tiles, "block_m": block_m}
        plan = make_plan(problem, Device.of("sm_90a"), "bwd_3_mma", chosen)
        assert plan.tiles == {**chosen, "head_parts": 1}
        assert jit.build(plan.variant).resources
    with pytest.raises(ValueError, match=r"block_m must be a multiple of split \* 8, or 16 with split 4"):
        make_plan(problem, Device.of("sm_90a"), "bwd_3_mma", {**tiles, "block_m": 48})


@pytest.mark.parametrize("keys", [0, 1, 16, 17])
@pytest.mark.parametrize("head_dim", [241, 256])
def test_few_keys_of_heads_whose_outputs_do_not_fit_beside_them(head_dim, keys):
    q, k = (np.empty((2, 64, 4, head_dim)), np.empty((2, keys, 4, head_dim)))
    plan = cufa.plan(q, k, k, backward=True, arch="sm_80")
    assert plan.kernel == "bwd_3_mma"
    assert all(launch.smem_bytes <= 166_912 for launch in plan.launches)


@pytest.mark.parametrize(
    ("arch", "dtype", "most", "needed", "offered"),
    [("sm_75", "float16", 448, 68_608, 65_536), ("sm_86", "float32", 384, 117_760, 101_376)],
)
def test_gradients_of_heads_that_do_not_fit_are_made_on_cuda_cores(arch, dtype, most, needed, offered):
    def plan_of(dim):
        call = Problem("backward", dtype, 2, 300, 300, 2, 2, dim, dim, features=Features(tf32=True))
        return make_plan(call, Device.of(arch))

    assert plan_of(most).kernel == "bwd_3_mma"
    plan = plan_of(most + 1)
    assert plan.kernel == "bwd_2_flash_v2"
    reason = f"bwd_3_mma needs {needed:,} bytes of shared memory for head dim {most + 1}, and {arch} has "
    assert f"{reason}{offered:,}" in plan.reasons


# Those that an H200 is fastest with if no more blocks share an SM than in 100 KB of shared memory. Where
# copies go through registers, or products take three of tf32, a few warps wait more.
@pytest.mark.parametrize(
    ("arch", "direction", "dtype", "head_dim", "tiles"),
    [
        ("sm_89", "backward", "bfloat16", 64, (64, 128, 256)),
        ("sm_89", "backward", "bfloat16", 96, (64, 64, 128)),
        ("sm_86", "backward", "float16", 112, (64, 64, 128)),
        ("sm_120a", "backward", "bfloat16", 160, (32, 64, 128)),
        ("sm_89", "forward", "bfloat16", 128, (128, 32, 128)),
        ("sm_120a", "forward", "float16", 192, (64, 64, 128)),
        ("sm_89", "forward", "bfloat16", 256, (64, 64, 128)),
        ("sm_89", "backward", "float32", 96, (32, 64, 256)),
        ("sm_89", "forward", "float32", 128, (128, 32, 256)),
        ("sm_75", "forward", "float16", 96, (64, 32, 128)),
    ],
)
def test_a_few_warps_are_enough_for_products_in_16_bits(arch, direction, dtype, head_dim, tiles):
    problem = Problem(direction, dtype, 2, 2048, 2048, 16, 16, head_dim, head_dim)
    kernel = {"forward": "fwd_5_mma", "backward": "bwd_3_mma"}[direction]
    plan = make_plan(problem, Device.of(arch), kernel)
    assert tuple(plan.tiles[name] for name in ("block_m", "block_n", "threads")) == tiles


@pytest.mark.parametrize(
    ("front", "options", "matrices"),
    [((1, 1), {}, 1), ((2, 1), {}, 2), ((1, 4), {}, 4), ((2, 4), {}, 8), ((), {"seqused_k": 2}, 2)],
)
def test_what_a_mask_shows_is_found_as_often_as_it_is_another(front, options, matrices):
    """In whole tiles; where sequences have keys of their own number, of each.

    If all rows are alike, of tiles of keys: two bits of each, 32 tiles side by side, and a bit of each key.
    """
    q = np.empty((2, 300, 4, 64), np.float16)
    arrays = {name: np.zeros(size, np.int32) for name, size in options.items()}
    masks = np.empty((*front, 300, 300), bool), np.empty((*front, 1, 38), np.uint8)
    for mask, of_matrix in zip(masks, (5 * 5 * 2, 2 * 4 + 5 * 64 // 8), strict=True):
        tiles = {"block_m": 64, "block_n": 64}
        plan = cufa.plan(q, q, q, mask=mask, **arrays, kernel="fwd_5_mma", tiles=tiles, arch="sm_90a")
        assert [launch.entry for launch in plan.launches] == ["seen_tiles", "fwd_5_mma"]
        assert plan.workspace_bytes == -(-matrices * of_matrix // 8) * 8  # whole words are read
        backward = cufa.plan(q, q, q, mask=mask, **arrays, backward=True, kernel="bwd_3_mma", arch="sm_90a")
        # Where queries that share keys see the same of them, blocks ask for their own.
        assert (backward.launches[0].entry == "seen_tiles") == (mask.shape[-2] > 1)


@pytest.mark.parametrize("kernel", ["fwd_5_mma", "fwd_6_wgmma", "bwd_3_mma", "bwd_4_wgmma"])
@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0)])
def test_nobody_looks_at_a_mask_for_no_sequence_or_no_head(kernel, batch, heads):
    q = np.empty((batch, 300, heads, 64), np.float16)
    options = {"kernel": kernel, "backward": kernel.startswith("bwd"), "arch": "sm_90a"}
    assert cufa.plan(q, q, q, mask=np.empty((300, 300), bool), **options).launches == ()


@pytest.mark.parametrize("kernel", ["fwd_5_mma", "fwd_8_split_kv"])
def test_tiles_with_more_keys_than_a_word_has_bits_are_refused_under_a_mask(kernel):
    q = np.empty((1, 300, 4, 64), np.float16)
    options = {"tiles": {"block_n": 144}, "kernel": kernel, "arch": "sm_80"}
    assert cufa.plan(q, q, q, **options).tiles["block_n"] == 144
    with pytest.raises(ValueError, match="with a mask or a mask_mod block_n may be at most 128"):
        cufa.plan(q, q, q, mask=np.empty((300, 300), bool), **options)


@pytest.mark.parametrize(
    ("arch", "heads", "kv_heads", "causal", "parts"),
    [
        ("sm_80", 32, 1, True, 4),
        ("sm_80", 32, 8, False, 1),
        ("sm_120a", 8, 1, False, 8),
        ("sm_90a", 8, 8, True, 1),
    ],
)
def test_heads_that_share_keys_are_in_parts_where_tiles_are_few(arch, heads, kv_heads, causal, parts):
    problem = Problem("backward", "float16", 1, 8192, 8192, heads, kv_heads, 128, 128, causal)
    plan = make_plan(problem, Device.of(arch), "bwd_3_mma")
    assert plan.tiles["head_parts"] == parts
    assert ("to fill the SMs" in str(plan)) == (parts > 1)
    grids = {launch.entry: launch.grid for launch in plan.launches}
    assert grids["key_tiles"] == parts * kv_heads * 8192 // plan.tiles["block_n"]
    assert ("round_keys" in grids) == (parts > 1)
    with pytest.raises(ValueError, match="head_parts must divide"):
        make_plan(problem, Device.of(arch), "bwd_3_mma", {"head_parts": 3})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("fwd_5_mma", "float16"),
        ("fwd_5_mma", "float32"),
        ("fwd_8_split_kv", "float16"),
        ("fwd_9_float32", "float32"),
    ],
)
@pytest.mark.parametrize("block_n", [144, 160, 256])
def test_tiles_of_more_keys_than_a_mask_has_bits_for_in_a_word(kernel, dtype, block_n):
    """Whatever tiles the plan takes can be compiled; with a mask it does not take them."""
    problem = Problem("forward", dtype, 1, 70, 300, 2, 2, 32, 32)
    masked = replace(problem, features=Features(mask=(1, 1, 70, 300)))
    tiles = {"block_n": block_n}
    with pytest.raises(ValueError, match=r"block_n|shared memory|registers"):
        make_plan(masked, Device.of("sm_90a"), kernel, tiles)
    if kernel != "fwd_9_float32" or block_n == 160:
        assert jit.build(make_plan(problem, Device.of("sm_90a"), kernel, tiles).variant).resources
