"""The Hopper backward: plans, and what the compiler makes of the kernels. None of it needs a GPU."""

from dataclasses import replace

import machine_code
import pytest
from machine_code import WAIT
from rungs import best_kernel

from cufa import jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.plan.suited import unsuited
from cufa.problem import Features, Problem
from cufa.score_mod import ScoreMod

H200 = Device.of("sm_90a")
NARROW, WIDE, PAIR = "bwd_4_wgmma", "bwd_5_wgmma_wide", "bwd_8_wgmma_pair"


def problem(head_dim=128, value_dim=None, causal=False, seqlen=4096, batch=2, dtype="bfloat16"):
    value_dim = value_dim or head_dim
    return Problem("backward", dtype, batch, seqlen, seqlen, 4, 2, head_dim, value_dim, causal)


def plan_of(call, **tiles):
    return make_plan(call, H200, best_kernel(call, H200).name, tiles)


def deterministic(call):
    return replace(call, features=Features(deterministic=True))


def unshared(call):
    return replace(call, kv_heads=call.heads)


def adding(plan):
    return dict(plan.macros)["ADDING"]


def takes_whole_heads(plan):
    return adding(plan) == "kAlone"


def rounds(plan):
    """Whether the last block to add to a tile of dQ rounds it, so that no launch does."""
    assert (
        any(why.endswith(("rounds dQ", "rounds it")) for why in plan.reasons) == dict(plan.macros)["ROUNDS"]
    )
    assert any(launch.entry == "round_queries" for launch in plan.launches) != dict(plan.macros)["ROUNDS"]
    return dict(plan.macros)["ROUNDS"]


def launch_of(plan, entry):
    return next(launch for launch in plan.launches if launch.entry == entry)


# So many KV heads, and so short, that a block works on all keys of one; and so few that it does not.
BATCHES_AND_LENGTHS = [(66, 256), (4, 4096)]


def shared_by(heads, kv_heads, *, head_dim=128, causal=True, batch=1, seqlen=8192, **features):
    """A call in which so many query heads share so many KV heads."""
    call = problem(head_dim, causal=causal, batch=batch, seqlen=seqlen)
    return replace(call, heads=heads, kv_heads=kv_heads, features=Features(**features))


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (shared_by(32, 1), 8),
        (shared_by(32, 8), 1),
        (shared_by(8, 1), 4),
        (shared_by(1, 1), 1),
        (shared_by(7, 1), 7),
        (shared_by(32, 1, batch=4, packed=True), 4),
        (shared_by(8, 1, causal=False), 2),
        (shared_by(8, 1, causal=False, head_dim=256), 1),
        (shared_by(8, 1, head_dim=256), 2),
        (shared_by(8, 1, head_dim=64, softcap=True), 4),
        (shared_by(8, 4, seqlen=100), 1),
        (shared_by(32, 1, window=(100, 0)), 2),
    ],
    ids=str,
)
def test_heads_are_in_parts_where_tiles_of_keys_are_few(call, parts):
    plan = plan_of(call, row_parts=1)
    assert plan.tiles["head_parts"] == dict(plan.macros)["HEAD_PARTS"] == parts
    assert ("to fill the SMs" in str(plan)) == (parts > 1)
    assert any(launch.entry == "round_keys" for launch in plan.launches) == (parts > 1)


@pytest.mark.parametrize(
    ("call", "row_parts"),
    [
        (shared_by(4, 4, seqlen=4096), 2),
        (shared_by(4, 4, seqlen=2048), 3),
        (shared_by(8, 8, seqlen=4096), 1),
        (shared_by(1, 1, seqlen=16384, head_dim=64), 2),
        (shared_by(4, 4, seqlen=4096, deterministic=True), 1),
        (shared_by(2, 2, seqlen=1024), 4),
        (shared_by(16, 16, seqlen=1024), 1),  # few tiles of keys in a head add in order
        (shared_by(5, 5, seqlen=4096, causal=False), 4),
        (shared_by(4, 4, seqlen=300, causal=False), 1),  # five tiles of queries
        (shared_by(4, 4, seqlen=2048, head_dim=256), 2),
        (shared_by(4, 4, seqlen=2048, head_dim=256, causal=False), 1),
        (shared_by(8, 1, seqlen=1024, causal=False), 2),
        (shared_by(32, 1, seqlen=512, causal=False), 1),
    ],
    ids=str,
)
def test_rows_are_in_parts_where_heads_are_few_too(call, row_parts):
    plan = plan_of(call)
    assert plan.tiles["row_parts"] == dict(plan.macros)["ROW_PARTS"] == row_parts
    assert ("that see a tile of keys are split" in str(plan)) == (row_parts > 1)
    assert plan.tiles["head_parts"] == dict(plan.macros)["HEAD_PARTS"]
    if plan.tiles["head_parts"] > 1:
        assert plan_of(call, head_parts=plan.tiles["head_parts"]).tiles["row_parts"] == 1


def test_parts_are_of_whole_heads():
    why = "head_parts must divide the 8 query heads that share a KV head"
    with pytest.raises(ValueError, match=f"^tiles 80x128, stages 2, head_parts 3: {why}$"):
        plan_of(shared_by(8, 1), head_parts=3)
    assert plan_of(shared_by(8, 1), head_parts=8).tiles["head_parts"] == 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "call",
    [
        shared_by(heads, 1, head_dim=head_dim, seqlen=seqlen)
        for heads, seqlen in ((8, 8192), (1, 2048))
        for head_dim in (64, 128, 256)
    ],
    ids=str,
)
def test_no_spill_in_parts(call):
    plan = plan_of(call)
    assert plan.tiles["head_parts"] * plan.tiles["row_parts"] > 1
    assert jit.build(plan.variant).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), BATCHES_AND_LENGTHS)
def test_no_spill_where_keys_have_more_head_dims_than_values(causal, batch, seqlen):
    call = problem(192, 128, causal=causal, batch=batch, seqlen=seqlen)
    for plan in (plan_of(call), plan_of(deterministic(call))):
        assert plan.kernel == NARROW
        assert jit.build(plan.variant).warnings == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen"),
    [(dim, *each) for dim in (64, 128, 192, 256) for each in BATCHES_AND_LENGTHS],
)
def test_no_spill_and_no_product_in_series(head_dim, causal, batch, seqlen):
    build = jit.build(plan_of(problem(head_dim, causal=causal, batch=batch, seqlen=seqlen)).variant)
    assert build.warnings == ()


# Of each head dim two of the features, and of each feature two head dims.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "features"),
    [
        (64, 64, Features(window=(100, 20))),
        (64, 64, Features(window=(64, 64))),
        (40, 64, Features(window=(64, 64), softcap=True)),
        (64, 64, Features(packed=True, seqused_k=True)),
        (128, 128, Features(softcap=True)),
        (128, 128, Features(sink=True, gradients=("sink",))),
        (192, 128, Features(window=(100, 20))),
        (192, 128, Features(sink=True, gradients=("sink",))),
        (64, 64, Features(alibi=True)),
        (128, 128, Features(alibi=True)),
        (128, 128, Features(mask=(1, 1, 4096, 4096))),
        (64, 64, Features(mask=(2, 1, 1, 4096))),
        (128, 128, Features(mask=(2, 1, 1, 4096), deterministic=True)),
        (256, 256, Features(mask=(2, 1, 1, 4096))),
        (256, 256, Features(softcap=True)),
        (256, 256, Features(packed=True, seqused_k=True)),
    ],
    ids=lambda value: "+".join(value.names) if isinstance(value, Features) else str(value),
)
def test_no_spill_with_features(head_dim, value_dim, features):
    plan = plan_of(replace(problem(head_dim, value_dim), features=features))
    build = jit.build(plan.variant)
    # Those that copy have few registers for where a sequence lies.
    few = features.packed and plan.kernel == NARROW
    assert all(few and "bytes spill" in line for line in build.warnings)


def test_packed_sequences_have_tiles_of_their_own():
    plan = plan_of(replace(problem(seqlen=4096, batch=3), features=Features(packed=True)))
    tiles = 4096 // plan.tiles["block_m"] + 3
    assert [part.shape[0] for part in plan.scratch] == [4 * tiles, 4 * tiles, 1]
    assert [launch.grid for launch in plan.launches] == [4 * tiles, 2 * (4096 // 128 + 3), 4 * tiles]
    assert not takes_whole_heads(plan_of(replace(problem(seqlen=129), features=Features(packed=True))))


# Many tiles of keys, at head dims over 128 of few sequences, whose sums the L2 cache holds; and few tiles.
TAKING_TURNS = [
    *[(64, 4, 4096), (128, 4, 4096), (192, 2, 4096), (256, 2, 4096)],
    *((dim, 80, 512) for dim in (64, 128, 192, 256, 512)),
]


# A mask or none in turn: compiling takes most of the time.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen", "causal"), [(*each, i % 2 == 0) for i, each in enumerate(TAKING_TURNS)]
)
def test_no_spill_if_blocks_take_turns(head_dim, batch, seqlen, causal):
    call = problem(head_dim, causal=causal, batch=batch, seqlen=seqlen)
    for plan in (plan_of(call), plan_of(deterministic(call))):
        assert jit.build(plan.variant).warnings == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"),
    [
        ("float16", 8, 8),
        ("bfloat16", 40, 200),
        ("float16", 96, 80),
        ("bfloat16", 192, 128),
        ("float16", 7, 255),
        ("float16", 512, 392),
    ],
)
def test_any_head_dims_compile(dtype, head_dim, value_dim):
    build = jit.build(plan_of(problem(head_dim, value_dim, True, dtype=dtype)).variant)
    assert not [line for line in build.warnings if "spill" not in line]


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)]
)
def test_products_are_issued_together(head_dim, value_dim):
    """Between the parts of a product there is no wait, which the compiler would put in if it had doubts."""
    plan = plan_of(problem(head_dim, value_dim))
    runs = machine_code.runs(jit.build(plan.variant), "HGMMA", WAIT)
    parts = min(head_dim, plan.tiles["block_m"], plan.tiles["block_n"]) // 16
    assert min(length for mark, length in runs if mark == "HGMMA") >= parts


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "name"),
    [
        *[(64, 64, NARROW), (128, 40, NARROW), (129, 64, NARROW), (192, 128, NARROW)],
        *[(64, 192, WIDE), (192, 129, PAIR), (193, 128, PAIR), (256, 256, PAIR), (512, 512, WIDE)],
        (576, 512, "bwd_3_mma"),
    ],
)
def test_head_dims_choose_the_kernel(head_dim, value_dim, name):
    call = problem(head_dim, value_dim)
    assert best_kernel(call, H200).name == name
    capped = best_kernel(replace(call, features=Features(softcap=True)), H200).name
    assert capped == (WIDE if name in (NARROW, PAIR) and head_dim > 128 else name)


@pytest.mark.parametrize(
    ("call", "device", "reason"),
    [
        (problem(dtype="float32"), H200, "supports float16 or bfloat16, and the arrays are float32"),
        (replace(problem(), align_bytes=8), H200, "multiples of 16 bytes, not of 8"),
        (problem(), Device.of("sm_90"), "needs sm_90a, and the arch is sm_90"),
        (problem(), Device.of("sm_80"), "needs sm_90a, and the arch is sm_80"),
    ],
)
@pytest.mark.parametrize("name", [NARROW, WIDE, PAIR])
def test_what_is_not_supported_has_a_reason(name, call, device, reason):
    assert reason in KERNELS[name].unsupported(call, device)
    assert best_kernel(call, device).name not in (NARROW, WIDE, PAIR)


def test_head_dims_have_their_kernel():
    assert "supports head dims up to 192, and this is 256" in KERNELS[NARROW].unsupported(problem(256), H200)
    assert "values up to 128, and this is 136" in KERNELS[NARROW].unsupported(problem(192, 136), H200)
    capped = replace(problem(192, 128), features=Features(softcap=True))
    assert "to 128 with softcap, and this is 192" in KERNELS[NARROW].unsupported(capped, H200)
    biased = replace(capped, features=Features(bias=(1, 1, 1, 1), bias_dtype="bfloat16"))
    assert "to 128 with bias, and this is 192" in KERNELS[NARROW].unsupported(biased, H200)
    assert best_kernel(biased, H200).name == WIDE
    assert "supports head dims from 129, and this is 128" in KERNELS[WIDE].unsupported(problem(128), H200)
    assert KERNELS[WIDE].unsupported(problem(192, 128), H200) is None
    assert "half as many keys at a time" in unsuited(KERNELS[WIDE], problem(192, 128), H200)
    assert unsuited(KERNELS[WIDE], problem(192), H200) is None


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "features"),
    [
        (448, 320, Features()),  # seven panels, of which a warpgroup has four
        (384, 512, Features(mask=(1, 1, 4096, 4096), dropout=True)),
        (512, 512, Features(softcap=True, bias=(1, 1, 1, 1), bias_dtype="bfloat16", packed=True)),
    ],
)
def test_few_bytes_spill_in_pairs(head_dim, value_dim, features):
    plan = plan_of(replace(problem(head_dim, value_dim, causal=True), features=features))
    assert jit.build(plan.variant).resources["key_tiles"].spill_stores <= 96


def test_two_blocks_share_wide_heads():
    plan = plan_of(problem(512, causal=True))
    products = next(launch for launch in plan.launches if launch.entry == "key_tiles")
    assert products.cluster == 2
    assert products.grid == 2 * 4 * 4096 // 64
    assert "key_tiles: grid 512 in clusters of 2, block 384" in str(plan)
    assert {launch.cluster for launch in plan.launches if launch is not products} == {1}
    assert any("two blocks share a tile of keys" in reason for reason in plan.reasons)
    # With fewer panels there is room for longer tiles of queries.
    assert [plan_of(problem(dim)).tiles["block_m"] for dim in (256, 384, 392)] == [64, 64, 48]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (problem(192, 128), "where bwd_4_wgmma needs one"),
        (problem(128, 256), "up to head dim 128"),
        *((problem(256, seqlen=length), "for so few queries or keys") for length in (150, 192)),
        (replace(problem(192, seqlen=64, batch=67), seqlen_q=300), "for so few queries or keys"),
        (replace(problem(256), seqlen_q=64), "for so few queries or keys"),
        (replace(problem(192), seqlen_q=128), "for so few queries or keys"),
        (problem(192, seqlen=32), "slower than the mma.sync rungs"),
        (replace(problem(192), features=Features(window=(1000, 0))), "in so narrow a window"),
        (replace(problem(256), features=Features(window=(500, 0))), "in so narrow a window"),
    ],
)
def test_where_pairs_are_slower(call, why):
    assert KERNELS[PAIR].unsupported(call, H200) is None
    assert why in unsuited(KERNELS[PAIR], call, H200)
    assert best_kernel(call, H200).name != PAIR


@pytest.mark.parametrize(
    "call",
    [
        *(problem(256, seqlen=length) for length in (128, 200)),
        problem(192, seqlen=256),
        replace(problem(256), features=Features(window=(1000, 0))),
        replace(problem(192, seqlen=10 * 300, batch=10), features=Features(packed=True)),
    ],
)
def test_where_pairs_are_faster(call):
    plan = plan_of(call)
    assert plan.kernel == PAIR
    assert "two blocks share a tile of keys: one has K and Q, the other V and dO" in plan.reasons
    assert launch_of(plan, "key_tiles").cluster == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("features", "most_bytes"),
    [
        (Features(mask=(4, 1, 1, 4096)), 0),
        (Features(alibi=True, sink=True), 0),
        (Features(window=(700, 0)), 0),
        (Features(packed=True, deterministic=True), 10),
    ],
)
def test_hardly_a_spill_where_blocks_divide_products(features, most_bytes):
    plan = plan_of(replace(problem(256, causal=True, batch=4), features=features))
    assert plan.kernel == PAIR
    build = jit.build(plan.variant)
    assert build.resources["key_tiles"].spill_stores <= most_bytes
    assert all("bytes spill" in line for line in build.warnings)


@pytest.mark.parametrize("call", [problem(256, seqlen=64, batch=66), problem(192, seqlen=128)], ids=str)
def test_few_keys_go_to_pairs_where_sms_would_be_idle_or_are_enough_for_one(call):
    assert best_kernel(call, H200).name == PAIR


def test_few_short_sequences_under_a_mask_have_another():
    masked = replace(problem(256, seqlen=64), features=Features(mask=(1, 1, 64, 64)))
    assert best_kernel(masked, H200).name == "bwd_3_mma"
    assert "for so few queries and keys" in unsuited(KERNELS[WIDE], masked, H200)
    for other in (
        replace(masked, batch=34),
        replace(masked, seqlen_k=81),
    ):
        assert best_kernel(other, H200).name == WIDE
    assert best_kernel(replace(masked, features=Features()), H200).name == PAIR


@pytest.mark.parametrize(
    ("dtype", "kernel"), [("bfloat16", NARROW), ("float16", NARROW), ("float32", "bwd_3_mma")]
)
def test_a_bias_in_32_bits_is_left_to_others(dtype, kernel):
    call = replace(problem(), features=Features(bias=(1, 1, 1, 1), bias_dtype=dtype))
    assert KERNELS[NARROW].unsupported(call, H200) is None
    assert best_kernel(call, H200).name == kernel
    with_gradient = replace(call, features=replace(call.features, gradients=("bias",)))
    assert best_kernel(with_gradient, H200).name == kernel


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (80, 128), (256, 256), (96, 256)])
def test_a_block_fits_on_an_sm(head_dim, value_dim):
    plan = plan_of(problem(head_dim, value_dim))
    assert launch_of(plan, "key_tiles").smem_bytes <= H200.smem_per_block


def test_a_block_has_a_tile_of_keys_or_a_whole_head():
    few = plan_of(problem(64))
    assert not takes_whole_heads(few)
    assert launch_of(few, "key_tiles").grid == 2 * 2 * 4096 // 128 < H200.sm_count
    many = plan_of(problem(64, batch=66, seqlen=256))
    assert takes_whole_heads(many)
    assert launch_of(many, "key_tiles").grid == 66 * 2 == H200.sm_count
    assert "all keys of a head" in str(many)


def test_blocks_stay_unless_they_hold_one_tile_of_keys():
    for call, blocks in [
        (problem(128), 2 * 2 * 4096 // 128),
        (problem(128, batch=8), H200.sm_count),
        (deterministic(problem(128, batch=8)), H200.sm_count),
        (problem(64, 256, batch=8), 8 * 2 * 4096 // 64),
        (problem(256, batch=8), 2 * (8 * 2 * 4096 // 128)),
    ]:
        plan = plan_of(call)
        assert launch_of(plan, "key_tiles").grid == blocks
        assert (", then the next" in str(plan)) == (blocks <= H200.sm_count)


def test_whole_heads_must_fill_the_gpu_and_fit_in_its_l2_cache():
    assert not takes_whole_heads(plan_of(problem(64, batch=66, seqlen=1024)))
    assert not takes_whole_heads(plan_of(problem(64, batch=40, seqlen=256)))
    assert takes_whole_heads(make_plan(problem(64, batch=1, seqlen=128), H200, NARROW))


def test_no_block_has_a_part_of_the_rows_and_all_keys():
    """Which rows those are depends on the keys: several blocks would write a query's gradient."""
    packed = replace(problem(64, batch=67, seqlen=6700), max_seqlen_k=128, features=Features(packed=True))
    for call in (problem(64, batch=66, seqlen=256), packed):
        assert takes_whole_heads(plan_of(call))
        assert not takes_whole_heads(plan_of(call, row_parts=2))


def windowed(head_dim, window, *, batch=80, **sizes):
    return replace(problem(head_dim, batch=batch, **sizes), features=Features(window=window))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (problem(64, batch=80), "kAsTheyCome"),
        (problem(96, batch=80), "kAsTheyCome"),
        # Few tiles of keys, without a mask and under one.
        (problem(96, seqlen=2048, batch=80), "kAfterFirst"),
        (problem(96, seqlen=2049, batch=80), "kAsTheyCome"),
        (problem(64, seqlen=2048, batch=80), "kAfterFirst"),
        (unshared(problem(64, seqlen=2048, batch=80)), "kAsTheyCome"),
        (problem(64, causal=True, seqlen=4096, batch=80), "kAfterFirst"),
        (problem(64, causal=True, seqlen=4097, batch=80), "kAsTheyCome"),
        (problem(64, 192, batch=80), "kAfterFirst"),
        (problem(64, 256, causal=True, batch=80), "kAfterFirst"),
        # By pairs of blocks.
        (problem(192, batch=80), "kAsTheyCome"),
        (problem(256, seqlen=1024, batch=80), "kAfterFirst"),
        (problem(256, seqlen=1025, batch=80), "kAsTheyCome"),
        (problem(256, causal=True, batch=80), "kAsTheyCome"),
        (problem(256, causal=True, seqlen=2048, batch=80), "kAfterFirst"),
        # Blocks that share keys, if the L2 cache holds the sums and if not.
        (problem(64, 192, batch=4, seqlen=4096), "kAsTheyCome"),
        (problem(64, 192, batch=16, seqlen=1024), "kAfterFirst"),
        # All blocks begin at once.
        (problem(128, seqlen=512), "kAsTheyCome"),
        (problem(256, seqlen=512), "kAsTheyCome"),
        (problem(128, causal=True), "kAsTheyCome"),
        # Long tiles.
        (problem(128, batch=80), "kAfterFirst"),
        (problem(128, seqlen=4097, batch=80), "kAsTheyCome"),
        (problem(128, causal=True, seqlen=16384, batch=80), "kAfterFirst"),
        (replace(problem(128, seqlen=512, batch=80), seqlen_q=2048), "kAfterFirst"),
        # In a window: few tiles of keys, and many.
        (windowed(64, (100, 20)), "kInOrder"),
        (windowed(128, (1023, 0)), "kInOrder"),
        (windowed(64, (1300, 0)), "kAsTheyCome"),
        # Most blocks begin with the last queries.
        (windowed(64, (200, 200), seqlen=512), "kInOrder"),
        (windowed(64, (400, 400), seqlen=512), "kAsTheyCome"),
        # Few heads, so that many blocks of one run at the same time, for a short while or longer.
        (windowed(64, (64, 64), batch=4), "kAsTheyCome"),
        (windowed(64, (512, 512), batch=4), "kInOrder"),
        # Wide and long tiles.
        (windowed(256, (100, 20)), "kAsTheyCome"),
        (windowed(128, (2046, 0), seqlen=8192), "kAsTheyCome"),
        # One tile of keys.
        (problem(128, seqlen=100), "kAlone"),
        (problem(256, seqlen=64), "kAlone"),
    ],
)
def test_how_the_sums_of_dq_come_about(call, expected):
    plan = plan_of(call)
    assert adding(plan) == expected
    turns = expected in ("kAfterFirst", "kInOrder")
    query_tiles = call.batch * call.heads * -(-call.seqlen_q // plan.tiles["block_m"])
    added = [part.shape for part in plan.scratch if part.name == "blocks added"]
    warpgroups = 2 * launch_of(plan, "key_tiles").cluster
    assert added == [(query_tiles, warpgroups)] * turns
    assert ("after the block with the first keys" in str(plan)) == (expected == "kAfterFirst")
    assert adding(plan_of(deterministic(replace(call, features=Features())))) in ("kAlone", "kInOrder")


def test_as_many_heads_in_work_as_the_l2_cache_holds_windows_of():
    def least_heads(call):
        return dict(plan_of(call).macros)["LEAST_ORDERED_HEADS"]

    narrow = windowed(64, (64, 64))
    assert least_heads(narrow) == H200.sm_count // 2
    few = -(-H200.sm_count // 8)
    assert least_heads(windowed(128, (1023, 0))) == least_heads(replace(narrow, heads=128)) == few
    assert least_heads(problem(64, causal=True)) == H200.sm_count // 4


def test_windows_of_packed_sequences():
    """Few heads of long sequences, many queries on the same keys, and short sequences."""
    for window, sequences, expected in [
        ((64, 64), 2, "kAsTheyCome"),
        ((512, 512), 2, "kInOrder"),
        ((64, 64), 80, "kInOrder"),
    ]:
        call = replace(problem(64, batch=sequences), features=Features(window=window, packed=True))
        assert adding(plan_of(call)) == expected


@pytest.mark.parametrize(
    ("head_dim", "causal", "sequences", "length", "expected"),
    [
        (128, False, 512, 128, "kInOrder"),
        (128, False, 512, 129, "kAfterFirst"),
        (96, False, 128, 2049, "kAsTheyCome"),
        (128, True, 64, 1024, "kInOrder"),
        (128, True, 64, 1025, "kAfterFirst"),
        (64, False, 512, 128, "kInOrder"),
        (64, True, 32, 4096, "kAfterFirst"),
        (64, True, 32, 4097, "kAsTheyCome"),
    ],
)
def test_packed_sequences_add_as_batches_of_their_mean_length(head_dim, causal, sequences, length, expected):
    call = problem(head_dim, causal=causal, batch=sequences, seqlen=sequences * length)
    plan = plan_of(replace(call, features=Features(packed=True)))
    assert adding(plan) == expected
    assert rounds(plan) == (expected == "kInOrder")


@pytest.mark.parametrize(
    ("head_dim", "most", "alone"), [(64, 128, True), (64, 129, False), (128, 100, True), (256, 64, True)]
)
def test_packed_sequences_of_few_keys_are_a_blocks_alone(head_dim, most, alone):
    """As far as the caller says: parts of rows, which may then not be apart, are not there."""
    for sequences in (67, 512):
        call = replace(problem(head_dim, batch=sequences, seqlen=sequences * 100), max_seqlen_k=most)
        plan = plan_of(replace(call, features=Features(packed=True)))
        assert takes_whole_heads(plan) == alone
        assert not alone or (rounds(plan) and plan.tiles["row_parts"] == 1)
        assert not takes_whole_heads(plan_of(replace(plan.problem, max_seqlen_k=None)))


@pytest.mark.parametrize(
    ("longest", "expected"), [(None, "kInOrder"), (8_192, "kAfterFirst"), (10**6, "kAfterFirst")]
)
def test_packed_sequences_add_as_those_that_have_most_tokens(longest, expected):
    """One of 8,192 and 64 of 128: half of the tokens, and nearly all of the work, are in the longest."""
    call = replace(problem(128, causal=True, batch=65, seqlen=16_384), features=Features(packed=True))
    plan = plan_of(replace(call, max_seqlen_k=longest))
    assert adding(plan) == expected
    assert plan.tiles["block_m"] == (64 if longest is None else 80)
    whole = plan_of(replace(call, max_seqlen_k=longest, features=Features(packed=True, deterministic=True)))
    assert adding(whole) == "kInOrder"
    # What addresses memory counts all sequences.
    query_tiles = 4 * (16_384 // plan.tiles["block_m"] + 65)
    assert plan.scratch[0].shape[0] == query_tiles


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_deterministic_blocks_add_in_order(head_dim):
    plan = plan_of(deterministic(problem(head_dim)))
    assert adding(plan) == "kInOrder"
    assert "deterministic: blocks add to each tile of dQ in the order of their keys" in str(plan)


@pytest.mark.parametrize(
    ("call", "in_order"),
    [
        (problem(128, causal=True, seqlen=1024, batch=8), True),
        (problem(128, causal=True, seqlen=1025, batch=8), False),
        (problem(128, causal=True, seqlen=1024), False),  # parts of rows fill the SMs
        (problem(96, causal=True, seqlen=512, batch=8), True),
        (problem(64, causal=True, seqlen=1024, batch=8), True),
        (problem(64, causal=True, seqlen=1025, batch=8), False),
        # In many rounds it takes longer until a head's last block has added.
        (unshared(problem(64, causal=True, seqlen=1024, batch=8)), True),
        (unshared(problem(64, causal=True, seqlen=1024, batch=80)), False),
        # Without a mask, also if query heads share keys.
        (unshared(problem(128, seqlen=512, batch=8)), True),
        (unshared(problem(128, seqlen=513, batch=8)), False),
        (problem(128, seqlen=256, batch=16), True),
        (problem(128, seqlen=257, batch=16), False),
        (problem(128, seqlen=129, batch=80), False),
        (unshared(problem(192, 128, seqlen=257, batch=80)), False),
        (problem(256, causal=True, batch=64, seqlen=1024), True),
        (problem(256, causal=True, batch=64, seqlen=1025), False),
        (problem(64, 256, causal=True, batch=200, seqlen=512), False),  # products run during additions
        # Queries are the last of as many as there are keys, of which they see most.
        (replace(problem(128, causal=True, seqlen=512, batch=8), seqlen_q=400), False),
        (replace(problem(128, causal=True, seqlen=512, batch=8), seqlen_q=4096), True),
    ],
)
def test_few_blocks_add_in_order_though_they_need_not_and_round(call, in_order):
    plan = plan_of(call)
    assert (adding(plan) == "kInOrder") == in_order
    assert (
        "few blocks share dQ: blocks add to each tile of dQ in the order of their keys" in str(plan)
    ) == in_order
    assert rounds(plan) == in_order
    # It is the variant of deterministic calls.
    assert (plan.variant == plan_of(deterministic(call)).variant) == in_order


@pytest.mark.parametrize(
    ("dims", "seqlen", "rounded"),
    [
        *[((64, 64), 256, True), ((96, 96), 100, True), ((128, 128), 128, True)],
        *[((256, 256), 64, True), ((256, 256), 128, True), ((64, 256), 65, False)],
    ],
)
def test_a_block_that_has_a_head_to_itself_rounds_dq(dims, seqlen, rounded):
    plan = plan_of(problem(*dims, batch=66, seqlen=seqlen))
    assert takes_whole_heads(plan)
    assert rounds(plan) == rounded


@pytest.mark.parametrize(
    ("call", "long"),
    [
        (replace(problem(128, seqlen=4096), kv_heads=4), True),
        (replace(problem(128, seqlen=1024), kv_heads=4), False),
        (replace(problem(128, causal=True, seqlen=4096), kv_heads=4), True),
        (replace(problem(128, causal=True, seqlen=2048), kv_heads=4), False),
        (replace(problem(128, causal=True, seqlen=1239), kv_heads=1), True),  # of all heads, more do
        (replace(problem(128, causal=True, seqlen=1238), kv_heads=1), False),
        (replace(problem(128, seqlen=4096), kv_heads=4, features=Features(window=(100, 100))), False),
        (replace(problem(128, seqlen=4096), features=Features(softcap=True)), False),
        (problem(64, seqlen=16384), False),
        (problem(64, 128, seqlen=16384), False),
    ],
)
def test_where_many_queries_see_a_key_their_tiles_are_long(call, long):
    plan = plan_of(call)
    macros = dict(plan.macros)
    assert (plan.tiles["block_m"] == 80) == long
    assert (macros["KEY_STAGES"], macros["HAS_OUTBOXES"]) == ((1, True) if long else (2, False))
    assert ("the copy engine adds to dQ" in str(plan)) == long
    assert dict(plan_of(deterministic(call)).macros)["HAS_OUTBOXES"] is False


@pytest.mark.parametrize(
    ("call", "whole", "sends"),
    [
        (problem(80, seqlen=4096), True, True),
        (problem(112, seqlen=4096), True, True),
        (replace(problem(96, seqlen=16384), seqlen_k=512), True, True),
        (problem(80, causal=True, seqlen=4096), True, False),
        (problem(96, seqlen=1024), True, False),
        (problem(96, 128, seqlen=1024), True, False),
        (problem(112, 128, seqlen=600), False, False),
        (problem(120, seqlen=4096), False, True),
        (problem(64, seqlen=4096), False, False),
        (replace(problem(64, seqlen=4096), features=Features(window=(64, 64))), True, False),
        (replace(problem(64, seqlen=4096), features=Features(window=(64, 64), softcap=True)), True, False),
        (replace(problem(80, seqlen=4096), features=Features(softcap=True)), False, False),
        (replace(problem(96, seqlen=4096), features=Features(dropout=True)), True, False),
        (replace(problem(104, seqlen=4096), features=Features(dropout=True)), False, False),
    ],
)
def test_where_no_dims_pad_a_panel_warpgroups_make_whole_tiles_of_dq(call, whole, sends):
    plan = plan_of(call)
    macros = dict(plan.macros)
    assert (macros["WHOLE_QUERIES"], macros["HAS_OUTBOXES"]) == (whole, sends)
    assert not whole or plan.tiles["block_m"] == 64
    assert dict(plan_of(deterministic(call)).macros)["HAS_OUTBOXES"] is False


@pytest.mark.parametrize(
    ("head_dim", "window", "block_m"),
    [
        (64, (64, 64), 64),
        (40, (0, 64), 64),
        (64, (65, 64), 128),
        (64, (64, None), 128),
        (64, (127, 0), 128),
        (64, (None, None), 128),
        (128, (64, 64), 64),
    ],
)
def test_tiles_of_queries_are_short_in_a_window_that_is(head_dim, window, block_m):
    assert plan_of(windowed(head_dim, window)).tiles["block_m"] == block_m


@pytest.mark.parametrize(("head_dim", "padded"), [(7, 16), (72, 80), (80, 80), (128, 128)])
def test_sums_of_dq_are_padded_to_tiles_and_to_the_dims_of_a_warp(head_dim, padded):
    plan = plan_of(problem(head_dim, 80, seqlen=100))
    sums, statistics, *_ = plan.scratch
    assert sums.shape == (2 * 4 * 2, padded, 64)
    assert statistics.shape == (2 * 4 * 2, 2 * 64 + 4)


@pytest.mark.parametrize(("head_dim", "padded"), [(40, 48), (129, 144), (192, 192), (193, 208)])
def test_wide_sums_of_dq_are_padded_to_the_dims_of_a_warp(head_dim, padded):
    sums, *_ = plan_of(problem(head_dim, 200, seqlen=100)).scratch
    assert sums.shape == (2 * 4 * 2, padded, 64)


@pytest.mark.parametrize("block_m", [32, 64, 96])
def test_sums_of_dq_are_those_of_the_tiles_that_were_chosen(block_m):
    """Each warpgroup has half of the queries of one panel."""
    plan = plan_of(problem(40, 72, seqlen=100), block_m=block_m)
    assert plan.scratch[0].shape[1:] == (48, block_m)
    assert jit.build(plan.variant).warnings == ()


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 5), (2, 0)])
def test_nothing_is_launched_for_nothing(batch, seqlen):
    assert plan_of(problem(batch=batch, seqlen=seqlen)).launches == ()


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "tiles", "reason"),
    [
        (128, 128, {"block_m": 60}, "block_m must be a multiple of 16 up to 256"),
        (128, 128, {"block_n": 64}, "block_n must be 128, 64 for a warpgroup's rows"),
        (64, 64, {"block_m": 80}, "block_m must be a multiple of 32, 16 for half a warpgroup's dQ"),
        (64, 128, {"block_m": 128}, "a thread needs about 256 registers, and there are 240"),
        (192, 128, {"block_m": 48}, "block_m must be a multiple of 32, 16 for half a warpgroup's dQ"),
        (128, 128, {"stages": 1}, "stages must be at least 2: one tile of queries and the next"),
        (256, 256, {"stages": 1}, "stages must be at least 2: one tile of queries and the next"),
        (128, 256, {"stages": 3}, "bytes of shared memory"),
        (256, 256, {"stages": 4}, "bytes of shared memory"),
        (256, 256, {"stages": 2}, "stages must be at least 3: dK is made 2 tiles of queries later"),
        (256, 256, {"block_m": 48}, "block_m must be 64: a warp sends its rows of one panel of P or dS"),
        (64, 64, {"threads": 128}, "tiles has threads"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(head_dim, value_dim, tiles, reason):
    with pytest.raises(ValueError, match=reason):
        plan_of(problem(head_dim, value_dim), **tiles)


def test_tiles_that_another_kernel_cannot_have():
    """In a near window those of bwd_4 are best which bwd_8 begins with."""
    near = replace(problem(64), features=Features(window=(64, 0)))
    assert make_plan(near, H200, NARROW).tiles == plan_of(problem(256)).tiles
    assert make_plan(near, H200, NARROW, {"stages": 2}).tiles["stages"] == 2


def test_a_pair_has_a_panel_of_keys_for_each_warpgroup():
    assert KERNELS[PAIR].unsupported(problem(65, 192), H200) is None
    assert "head_dim of at least 65, and this is 64" in KERNELS[PAIR].unsupported(problem(64, 192), H200)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88])
def test_warpgroups_of_blocks_for_one_tile_of_keys_add_themselves(head_dim):
    """The copy engine, which adds as it comes, is bwd_4's."""
    call = replace(problem(head_dim, 136, seqlen=8192, batch=8), heads=4, kv_heads=4)
    assert adding(make_plan(call, H200, WIDE)) == "kAfterFirst"


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (problem(64, batch=1, seqlen=64), "bwd_3_mma"),
        (problem(64, batch=1024, seqlen=65), NARROW),
        (replace(problem(64, batch=1, seqlen=64), seqlen_q=129), NARROW),
        (replace(problem(64, batch=67, seqlen=64), seqlen_q=129), "bwd_3_mma"),
        (problem(192, batch=1024, seqlen=64), WIDE),
        (problem(160, batch=1, seqlen=64), "bwd_3_mma"),
        (replace(problem(160, batch=1, seqlen=64), seqlen_q=80), "bwd_3_mma"),
        (replace(problem(160, batch=1, seqlen=64), seqlen_q=81), PAIR),
        (replace(problem(160, batch=66, seqlen=64), seqlen_q=256), "bwd_3_mma"),
        (replace(problem(160, batch=66, seqlen=65), seqlen_q=129), PAIR),
        (
            replace(problem(160, batch=1, seqlen=65), seqlen_q=128, features=Features(dropout=True)),
            "bwd_3_mma",
        ),
        (replace(problem(64, batch=1, seqlen=64), features=Features(mask=(1, 1, 1, 64))), "bwd_3_mma"),
        *[
            (replace(problem(64, batch=batch, seqlen=batch * seqlen), features=Features(packed=True)), kernel)
            for batch, seqlen, kernel in [(1024, 32, "bwd_3_mma"), (1024, 33, NARROW), (8, 32, NARROW)]
        ],
    ],
    ids=str,
)
def test_short_sequences_go_to_small_blocks(call, kernel):
    """Of packed ones it is not known that none is longer, so there must be many, or all keys fit a block."""
    assert best_kernel(call, H200).name == kernel


def sized(sizes, *, causal=False, **features):
    """A call of batch, seqlen_q, seqlen_k, heads, kv_heads and head dim."""
    *lengths_and_heads, dim = sizes
    call = Problem("backward", "bfloat16", *lengths_and_heads, dim, dim)
    return replace(call, causal=causal, features=Features(**features))


ADDS_ONE = ScoreMod(lambda score, b, h, q_idx, kv_idx: score + 1).written


@pytest.mark.parametrize(
    ("sizes", "features", "kernel"),
    [
        # few keys that many share
        ((1, 49, 48, 64, 8, 256), {}, PAIR),
        ((1, 20, 70, 64, 8, 256), {}, PAIR),
        ((1, 48, 48, 8, 8, 256), {}, PAIR),
        # few keys up to head dim 192
        ((8, 77, 64, 16, 16, 193), {}, PAIR),
        ((16, 256, 64, 16, 4, 192), {}, "bwd_3_mma"),
        ((4, 80, 77, 1, 1, 192), {"causal": True}, PAIR),
        # a rule for each score, or for each key
        ((8, 128, 128, 8, 2, 192), {"bias": (1, 1, 128, 128), "bias_dtype": "bfloat16"}, "bwd_3_mma"),
        ((8, 128, 128, 8, 2, 192), {"score_mod": ADDS_ONE}, "bwd_3_mma"),
        ((8, 128, 128, 8, 2, 192), {"mask": (8, 1, 1, 128)}, PAIR),
        ((16, 257, 128, 8, 8, 192), {"mask": (16, 1, 257, 128)}, WIDE),
        # of queries, those that see a key
        ((4, 512, 48, 8, 1, 192), {"window": (3, 32)}, "bwd_3_mma"),
        ((4, 512, 48, 8, 1, 192), {"window": (3, 33)}, PAIR),
        ((4, 512, 48, 8, 1, 192), {"window": (3, None)}, PAIR),
        # few rows under a mask
        ((64, 129, 4096, 8, 8, 64), {"mask": (64, 1, 129, 4096)}, NARROW),
        ((64, 16, 4096, 8, 8, 64), {"mask": (64, 1, 1, 4096)}, "bwd_3_mma"),
        ((64, 16, 4096, 64, 4, 64), {"mask": (64, 1, 1, 4096)}, "bwd_3_mma"),
        ((64, 16, 4096, 64, 4, 64), {}, NARROW),
    ],
)
def test_what_limits_short_calls_go_by(sizes, features, kernel):
    assert best_kernel(sized(sizes, **features), H200).name == kernel


@pytest.mark.parametrize(("batch", "kernel"), [(2, "bwd_3_mma"), (3, PAIR)])
@pytest.mark.parametrize("packed", [False, True])
def test_short_heads_of_all_sequences_count(batch, kernel, packed):
    """Where many share few keys, small blocks are faster if no SM has two heads."""
    seqlen = batch * 48 if packed else 48
    call = shared_by(64, 8, head_dim=256, causal=False, batch=batch, seqlen=seqlen, packed=packed)
    assert best_kernel(replace(call, max_seqlen_k=48 if packed else None), H200).name == kernel


@pytest.mark.parametrize(
    ("sizes", "feature", "kernel"),
    [
        ((1, 77, 64, 64, 16, 32), "none", "bwd_3_mma"),
        ((16, 384, 77, 8, 8, 32), "none", NARROW),
        ((128, 16, 77, 8, 8, 64), "none", "bwd_3_mma"),
        ((32, 100, 100, 1, 1, 64), "none", "bwd_3_mma"),
        ((32, 100, 100, 8, 4, 64), "none", NARROW),
        ((4, 77, 77, 16, 4, 64), "none", "bwd_3_mma"),
        ((32, 77, 77, 16, 4, 64), "none", NARROW),
        ((4, 128, 64, 32, 4, 128), "none", "bwd_3_mma"),
        ((4, 129, 64, 16, 4, 64), "none", NARROW),
        ((32, 256, 64, 16, 4, 64), "none", "bwd_3_mma"),
        ((128, 77, 128, 2, 2, 64), "mask", "bwd_3_mma"),
        ((1, 1024, 77, 2, 2, 128), "mask", NARROW),
        ((16, 77, 77, 8, 8, 128), "none", "bwd_3_mma"),
        ((16, 77, 77, 4, 1, 128), "none", "bwd_3_mma"),
        ((64, 77, 77, 4, 1, 128), "none", NARROW),
        ((4, 16, 4096, 2, 2, 64), "none", "bwd_3_mma"),
        ((1, 64, 1024, 16, 2, 64), "none", "bwd_3_mma"),
        ((4, 64, 1024, 16, 4, 64), "none", NARROW),
        ((32, 100, 4096, 8, 8, 64), "none", NARROW),
        ((128, 256, 64, 32, 16, 64), "none", "bwd_3_mma"),
        ((2, 512, 64, 16, 16, 128), "none", NARROW),
        ((128, 128, 128, 16, 16, 32), "none", NARROW),
        ((64, 16, 16, 4, 4, 192), "none", "bwd_3_mma"),
        ((128, 64, 64, 32, 8, 256), "none", PAIR),
        ((128, 64, 64, 2, 2, 256), "none", WIDE),
        ((8, 48, 77, 4, 4, 256), "none", PAIR),
        ((4, 48, 4096, 8, 8, 256), "none", WIDE),
        ((8, 77, 64, 16, 16, 192), "none", "bwd_3_mma"),
        ((16, 256, 77, 16, 4, 192), "none", PAIR),
        ((16, 256, 77, 16, 4, 192), "causal", "bwd_3_mma"),
        ((4, 128, 64, 1, 1, 192), "none", PAIR),
        ((4, 128, 64, 1, 1, 192), "causal", "bwd_3_mma"),
        ((32, 128, 64, 4, 2, 192), "none", "bwd_3_mma"),
        ((64, 256, 64, 32, 8, 192), "none", WIDE),
        ((1, 48, 48, 64, 8, 256), "none", "bwd_3_mma"),
        ((4, 48, 48, 64, 8, 256), "none", PAIR),
        ((8, 128, 128, 8, 2, 192), "softcap", "bwd_3_mma"),
        ((8, 256, 128, 8, 2, 192), "mask", WIDE),
        ((16, 256, 128, 8, 8, 192), "mask", "bwd_3_mma"),
        ((64, 64, 4096, 8, 8, 64), "mask", "bwd_3_mma"),
        ((128, 128, 4096, 2, 1, 64), "mask", "bwd_3_mma"),
        ((2, 128, 256, 128, 16, 64), "mask", NARROW),
        ((1, 32, 1024, 16, 2, 128), "mask", "bwd_3_mma"),
        ((128, 16, 4096, 1, 1, 96), "mask", NARROW),
        ((16, 128, 128, 16, 2, 128), "mask", "bwd_3_mma"),
    ],
)
def test_the_fastest_rung_of_few_queries_or_keys(sizes, feature, kernel):
    """As measured on an H200."""
    batch, seqlen_q, seqlen_k, *_ = sizes
    of_feature = {
        "none": {},
        "causal": {"causal": True},
        "softcap": {"softcap": True},
        "mask": {"mask": (batch, 1, seqlen_q, seqlen_k)},
    }
    assert best_kernel(sized(sizes, **of_feature[feature]), H200).name == kernel
