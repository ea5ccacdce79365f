"""Plans of the kernel for few queries: who gets it, how many parts its keys have, what it compiles to."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cufa import jit
from cufa.device import Device
from cufa.plan import make_plan
from cufa.plan.fwd_8_split_kv import price
from cufa.problem import FLOAT8, Features, Problem
from cufa.score_mod import MaskMod, ScoreMod

KERNEL = "fwd_8_split_kv"
H200 = Device.of("sm_90a")
DECODING = Problem("forward", "bfloat16", 1, 1, 8192, 32, 8, 128, 128)

# A score_mod that reads a table at the distances of queries and keys.
ADDS_DISTANCES = ScoreMod(
    lambda score, b, h, q_idx, kv_idx, table: score + table[h, q_idx - kv_idx + 8191], np.zeros((32, 8192))
).written.with_adjacent({"score_mod[0]"})


NEAR = MaskMod(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= 64)


def plan_of(problem, arch="sm_90a", **tiles):
    return make_plan(problem, Device.of(arch), KERNEL, tiles)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_few_queries_get_it(arch):
    device = Device.of(arch)
    assert make_plan(DECODING, device).kernel == KERNEL
    many = replace(DECODING, seqlen_q=8192)
    plan = make_plan(many, device)
    assert plan.kernel != KERNEL
    assert f"{KERNEL} " in plan.reasons[0]  # its price is higher


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "dim", "name"),
    [
        (1, 32, 1, 8192, 128, KERNEL),
        (4, 8, 2, 8192, 128, KERNEL),
        (64, 1, 8, 2048, 256, KERNEL),
        (4, 8, 33, 4096, 96, "fwd_6_wgmma"),
        (1, 32, 64, 20000, 96, "fwd_6_wgmma"),
    ],
)
def test_heads_with_keys_of_their_own(batch, heads, queries, keys, dim, name):
    """Reading keys takes most of the time; fwd_6_wgmma would merge parts of them afterwards."""
    sizes = {"seqlen_q": queries, "seqlen_k": keys, "head_dim": dim, "value_dim": dim}
    problem = replace(DECODING, batch=batch, heads=heads, kv_heads=heads, **sizes)
    assert make_plan(problem, H200).kernel == name


def test_packed_sequences_count_as_if_they_were_equally_long():
    packed = replace(DECODING, batch=64, seqlen_q=64, seqlen_k=64 * 8192, features=Features(packed=True))
    assert make_plan(packed, H200).kernel == KERNEL
    assert make_plan(replace(packed, batch=1, seqlen_q=64 * 64), H200).kernel != KERNEL


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "split"),
    [
        (1, 8, 8, 64, 16384, True),
        (4, 8, 8, 128, 16384, False),  # fwd_6_wgmma has their keys in parts
        (1, 32, 8, 128, 16384, False),
        (1, 1, 1, 4096, 4096, False),
        (1, 32, 32, 256, 16384, False),
        (1, 8, 8, 64, 128, False),
        (4, 32, 32, 64, 16384, False),
        (4, 32, 8, 96, 16384, False),
        (2, 16, 16, 4096, 4096, False),
    ],
)
def test_few_heads_get_it_where_sms_would_be_idle(batch, heads, kv_heads, queries, keys, split):
    problem = replace(
        DECODING, batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=queries, seqlen_k=keys, causal=True
    )
    plan = make_plan(problem, H200)
    assert (plan.kernel == KERNEL) == split
    assert "the cheapest" in plan.reasons[0]
    assert make_plan(problem, replace(H200, sm_count=4)).kernel != KERNEL


@pytest.mark.parametrize(
    ("sizes", "features", "kernel"),
    [
        ((8, 256, 8192, 4, 4, 32), {"bias": (1, 1, 256, 8192), "bias_dtype": "bfloat16"}, "fwd_6_wgmma"),
        ((8, 32, 2048, 64, 8, 256), {"dropout": True}, "fwd_5_mma"),
        ((8, 256, 2048, 8, 8, 128), {"window": (64, 0)}, "fwd_6_wgmma"),
        ((64, 2, 65536, 4, 1, 32), {"window": (256, 0)}, KERNEL),
        ((4, 64, 65536, 16, 4, 64), {"mask_mod": NEAR.written}, "fwd_6_wgmma"),
        ((4, 32, 128, 4, 4, 64), {"mask": (1, 1, 32, 128)}, KERNEL),
    ],
)
def test_features_decide_which_rung_is_the_cheapest(sizes, features, kernel):
    """As measured on an H200: a bias costs much here, dropout there, and of a window only a part is read."""
    batch, seqlen_q, seqlen_k, heads, kv_heads, dim = sizes
    problem = Problem("forward", "bfloat16", batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim)
    assert make_plan(replace(problem, features=Features(**features)), H200).kernel == kernel


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float32"}, {"features": Features(dropout=True)}, {"dtype": "float64"}],
    ids=str,
)
def test_what_it_does_not_support_goes_elsewhere(other):
    assert make_plan(replace(DECODING, **other), H200).kernel != KERNEL


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "rows"),
    [
        (2, 65536, 128, 16),
        (16, 65536, 128, 64),
        (32, 65536, 128, 128),
        (32, 2048, 128, 64),
        (32, 65536, 256, 64),
    ],
)
def test_rows_of_a_tile(queries, keys, head_dim, rows):
    """More only where they are used, registers suffice and there are keys enough to make up for the start."""
    problem = replace(
        DECODING, batch=1, seqlen_q=queries, seqlen_k=keys, head_dim=head_dim, value_dim=head_dim
    )
    plan = plan_of(problem)
    assert plan.tiles["block_m"] == rows
    assert jit.build(plan.variant).warnings == ()


@pytest.mark.parametrize("seqlen_k", [4096, 8192, 65536, 524288])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_keys_are_split_among_as_many_blocks_as_use_the_bandwidth(kv_heads, seqlen_k):
    plan = plan_of(replace(DECODING, kv_heads=kv_heads, seqlen_k=seqlen_k))
    split, merge = plan.launches
    assert split.grid == merge.grid == kv_heads * plan.tiles["key_parts"]
    assert split.grid >= min(H200.sm_count // 2, kv_heads * seqlen_k // 256)
    assert f"split into {plan.tiles['key_parts']} parts each" in str(plan)
    parts = 32 * plan.tiles["key_parts"]
    assert plan.workspace_bytes == parts * (128 + 4) * 4


@pytest.mark.parametrize("sizes", [{"seqlen_k": 40}, {"batch": 64}, {"seqlen_k": 0}], ids=str)
def test_keys_that_are_few_or_of_many_sequences_stay_in_one_part(sizes):
    plan = plan_of(replace(DECODING, **sizes))
    assert [launch.entry for launch in plan.launches] == [KERNEL]
    assert plan.workspace_bytes == 0
    assert "keys not split" in str(plan)


def used(**changes):
    return replace(DECODING, features=Features(seqused_k=True), **changes)


@pytest.mark.parametrize("batch", [3, 16, 64])
def test_keys_of_unknown_lengths_are_shared_out(batch):
    plan = plan_of(used(batch=batch))
    attend, merge = plan.launches
    assert attend.grid == plan.tiles["shares"] == 2 * H200.sm_count
    assert merge.grid % attend.grid == 0
    assert f"{8 * batch} tiles of rows divided evenly among {attend.grid} blocks" in str(plan)
    assert plan.workspace_bytes == attend.grid * 2 * 16 * (128 + 4) * 4


@pytest.mark.parametrize(
    "problem",
    [
        used(),
        used(batch=512, seqlen_k=4096),
        used(batch=64, seqlen_k=512),
        replace(DECODING, batch=16),
        used(batch=16, seqlen_k=0),
    ],
    ids=["one sequence", "many tiles", "short", "known lengths", "no keys"],
)
def test_keys_are_not_shared_out_where_it_saves_less_than_it_costs(problem):
    assert plan_of(problem).tiles["shares"] == 1


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"batch": 2}, 16),
        ({"batch": 4, "kv_heads": 1, "seqlen_k": 65536}, 33),  # as many as if lengths were known
        ({"batch": 2, "seqlen_k": 1536}, 8),  # too few keys for more to pay
        ({"batch": 2, "seqlen_q": 8, "seqlen_k": 4096}, 16),  # of 32 rows
        ({"batch": 4, "seqlen_q": 16}, 8),
        ({"batch": 33, "kv_heads": 1, "seqlen_q": 2}, 8),  # as many as run at once
    ],
    ids=str,
)
def test_few_tiles_with_keys_of_unknown_lengths_have_many_parts(sizes, parts):
    plan = plan_of(used(**sizes))
    tiles = sizes["batch"] * sizes.get("kv_heads", DECODING.kv_heads)
    assert (plan.tiles["key_parts"], plan.tiles["shares"]) == (parts, 1)
    assert plan.launches[0].grid == tiles * parts


def test_a_window_counts_as_the_keys_in_it():
    windowed = replace(DECODING, features=Features(window=(63, 0)))
    assert plan_of(windowed).tiles["key_parts"] == plan_of(replace(DECODING, seqlen_k=64)).tiles["key_parts"]


def test_how_many_parts_there_are_is_not_compiled():
    a, b, one = (plan_of(DECODING, key_parts=parts) for parts in (2, 30, 1))
    assert a.variant == b.variant != one.variant


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"block_m": 48}, "block_m must be"),
        ({"block_m": 40}, "block_m must be a multiple of 16, and"),
        ({"block_n": 24}, "block_n must be a multiple of 16"),
        ({"stages": 1}, "stages may be 2 to 4"),
        ({"threads": 512}, "a block may have up to 8 teams, not 16"),
        ({"threads": 288}, "a block may have up to 8 teams, not 9"),
        ({"key_parts": 0}, "key_parts is 0; sizes must be positive"),
        ({"key_parts": 2, "shares": 2}, "key_parts and shares cannot both be over 1"),
        ({"column_warps": 3}, "column_warps may be 1, 2 or 4"),
        ({"threads": 64, "column_warps": 4}, "a team has 4 warps for every 16 rows: "),
    ],
    ids=str,
)
def test_tiles_that_the_kernel_has_no_way_to_take(tiles, message):
    with pytest.raises(ValueError, match=message):
        plan_of(DECODING, **tiles)


def test_more_rows_than_can_be_counted_are_refused():
    with pytest.raises(ValueError, match="rows of queries, more than"):
        plan_of(replace(DECODING, seqlen_q=2**30))
    with pytest.raises(ValueError, match="rows of queries, more than"):
        plan_of(replace(DECODING, seqlen_q=2**29 - 1))  # and as many as a tile has do not fit beside them


def test_more_rounds_than_can_be_counted_are_not_shared_out():
    packed, tiles = Features(packed=True), {"block_m": 128, "block_n": 32, "threads": 128}
    keys = 32 * ((2**31 - 1) // (4 * (8192 + 2)))  # of as many rounds as those tiles of rows may have
    few = replace(DECODING, batch=2, heads=64, kv_heads=4, seqlen_q=65536, seqlen_k=keys, features=packed)
    many = replace(few, seqlen_k=few.seqlen_k + 1)
    assert plan_of(few, **tiles, shares=264).tiles["shares"] == 264
    assert plan_of(many, **tiles).tiles["shares"] == 1
    with pytest.raises(ValueError, match="no shares of more than 2,147,483,647 rounds of keys"):
        plan_of(many, **tiles, shares=264)


def test_a_sequence_has_no_more_keys_than_its_own_pages():
    """Only the sum of packed sequences' keys is known otherwise, all of which could be of one sequence."""
    paged = Features(packed=True, page_size=64, seqused_k=True)
    call = replace(DECODING, batch=512, seqlen_q=512, seqlen_k=512 * 131072, features=paged)
    assert plan_of(call).tiles["shares"] == 2 * H200.sm_count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
# The bytes are the most that NVRTC 13.5 was seen to spill where keys are shared out.
@pytest.mark.parametrize(
    ("features", "most_bytes"),
    [
        (Features(softcap=True, alibi=True, sink=True), 0),
        (Features(mask=(1, 1, 1, 8192)), 48),
        (Features(mask=(1, 32, 1, 1024), mask_bits=True, seqused_k=True), 0),
        (Features(score_mod=ADDS_DISTANCES), 0),
    ],
    ids=["numbers", "mask", "bits", "score_mod"],
)
def test_it_does_not_spill(arch, head_dim, features, most_bytes):
    problem = replace(DECODING, head_dim=head_dim, value_dim=head_dim, causal=True, features=features)
    for parts, most in (({"key_parts": 2}, 0), ({"shares": 2}, most_bytes)):
        build = jit.build(plan_of(problem, arch, **parts).variant)
        assert build.resources[KERNEL].spill_stores <= most
        assert all("spill stores" in line for line in build.warnings)


# The heads of Gemma's and of multi-head latent attention.
WIDE = [
    replace(DECODING, heads=16, kv_heads=2, head_dim=512, value_dim=512),
    replace(DECODING, heads=16, kv_heads=1, head_dim=576, value_dim=512),
    replace(DECODING, heads=48, kv_heads=1, head_dim=576, value_dim=512, values_in_keys=True),
    replace(DECODING, heads=40, kv_heads=1, head_dim=300, value_dim=272, kv_dtype=FLOAT8),
]


# Each arch with two of them.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        (arch, WIDE[(i + further) % len(WIDE)])
        for i, arch in enumerate(("sm_80", "sm_89", "sm_90a", "sm_120"))
        for further in (0, 1)
    ],
    ids=str,
)
def test_warps_divide_wide_heads(arch, problem):
    """In tiles for which there is room, also where an SM has little shared memory."""
    if problem.kv_dtype == FLOAT8 and arch == "sm_80":
        problem = replace(problem, kv_dtype=None)
    for parts in ({}, {"key_parts": 1, "shares": 2}):
        plan = plan_of(problem, arch, **parts)
        assert plan.tiles["column_warps"] == 2
        assert jit.build(plan.variant).warnings == ()
    assert make_plan(problem, Device.of(arch)).kernel == KERNEL


def test_values_that_are_the_beginnings_of_keys_are_copied_once():
    apart, together = (replace(WIDE[1], values_in_keys=in_keys) for in_keys in (False, True))
    tiles = {"block_n": 16, "threads": 128, "stages": 2}
    ((bytes_apart, *_), (bytes_together, *_)) = (
        [launch.smem_bytes for launch in plan_of(problem, **tiles).launches] for problem in (apart, together)
    )
    teams, keys = 2, 16
    assert bytes_apart - bytes_together == 2 * teams * keys * 512 * 2
    assert price(together, H200) < price(apart, H200)
    assert "which alone are read" in plan_of(together).reasons[-1]
    assert "which alone are read" not in plan_of(apart).reasons[-1]


@pytest.mark.parametrize("dims", [(512, 480), (512, 272), (272, 272), (64, 24)], ids=str)
def test_values_in_swizzled_keys_are_read_if_warps_find_their_columns(dims):
    head_dim, value_dim = dims
    problem = replace(WIDE[1], head_dim=head_dim, value_dim=value_dim, values_in_keys=True)
    lines = head_dim != 512  # or a warp's columns begin within one
    assert ("VALUES_IN_KEYS", lines) in plan_of(problem).variant.macros


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dims", [(256, 256), (300, 300), (512, 64), (512, 128), (576, 512)], ids=str)
def test_what_is_chosen_fits(arch, dims):
    """Whatever the number of rows."""
    for dtype, kv_dtype, queries, heads in product(
        ("float16", FLOAT8, "float32"), (None, FLOAT8), (1, 40, 500, 4096), (8, 32)
    ):
        if (FLOAT8 in (dtype, kv_dtype) and arch in ("sm_80", "sm_86")) or (kv_dtype and dtype != "float16"):
            continue
        sizes = {"head_dim": dims[0], "value_dim": dims[1], "seqlen_q": queries, "heads": heads}
        for tf32 in (False, True) if dtype == "float32" else (False,):
            features = Features(tf32=tf32)
            problem = replace(DECODING, dtype=dtype, kv_dtype=kv_dtype, features=features, **sizes)
            device = Device.of(arch)
            launch = make_plan(problem, device).launches[0]
            assert launch.smem_bytes <= device.smem_per_block
