"""The Hopper forward: plans, and what the compiler makes of the kernel. None of it needs a GPU."""

import itertools
from dataclasses import asdict, replace

import machine_code
import numpy as np
import pytest
from machine_code import EXPONENTIAL, WAIT
from rungs import best_kernel

from cufa import jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.plan.fwd_6_tiles import CUT_PACES, MOST_VALUE_DIM, PACES, Tiles, candidates, parts_leave_registers
from cufa.plan.pace import keys_of_tile
from cufa.plan.parting import numbers_of_parts
from cufa.plan.record import NOT_PARTED, Parting
from cufa.plan.tile_sizes import query_tiles
from cufa.problem import Features, Problem
from cufa.score_mod import MaskMod

H200 = Device.of("sm_90a")
NAME = "fwd_6_wgmma"
SEE = MaskMod(lambda b, h, q_idx, kv_idx, x: x[q_idx] != x[kv_idx], np.zeros(9, np.int32)).written
LENGTHS = [512, 4096]


def problem(head_dim=128, value_dim=None, causal=False, seqlen=4096, dtype="bfloat16", align_bytes=16):
    value_dim = value_dim or head_dim
    return Problem(
        "forward", dtype, 2, seqlen, seqlen, 4, 2, head_dim, value_dim, causal, align_bytes=align_bytes
    )


def plan_of(call, **tiles):
    return make_plan(call, H200, NAME, tiles)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_dim", "causal", "tiles"),
    [
        (head_dim, causal, tiles)
        for causal, paces in ((False, PACES), (True, CUT_PACES))
        for head_dim in paces
        for tiles in paces[head_dim]
    ],
    ids=str,
)
def test_no_spill_and_no_product_in_series(head_dim, causal, tiles):
    value_dim = MOST_VALUE_DIM if head_dim > MOST_VALUE_DIM and tiles.block_n == 128 else head_dim
    build = jit.build(plan_of(problem(head_dim, value_dim, causal), **asdict(tiles)).variant)
    assert build.warnings == ()


@pytest.mark.parametrize(("head_dim", "short", "long"), [(64, 64, 256), (128, 64, 128)])
def test_tiles_of_packed_sequences_are_for_the_length_that_most_tokens_are_in(head_dim, short, long):
    """64 sequences of 128, and one of 8,192 that only the caller knows of."""
    call = replace(problem(head_dim, causal=True, seqlen=16_384), batch=65, heads=16, kv_heads=16)
    call = replace(call, features=Features(packed=True))
    told = {length: plan_of(replace(call, max_seqlen_q=length)) for length in (None, 252, 300, 8_192)}
    assert {length: plan.tiles["block_m"] for length, plan in told.items()} == {
        None: short,
        252: short,
        300: short,
        8_192: long,
    }


def test_sequences_that_can_only_be_equally_long_have_as_many_tiles_as_their_length_takes():
    """16 of 1,024 are four tiles of 256 queries each, but six of 192."""
    call = replace(
        problem(64, seqlen=16_384), batch=16, heads=32, kv_heads=32, features=Features(packed=True)
    )
    rows = {length: plan_of(replace(call, max_seqlen_q=length)).tiles["block_m"] for length in (None, 1_024)}
    assert rows == {None: 192, 1_024: 256}


def test_the_longest_sequence_can_be_no_shorter_than_the_mean_nor_longer_than_all():
    call = replace(problem(seqlen=1_000), batch=10, features=Features(packed=True))
    batches = {length: replace(call, max_seqlen_q=length).typical.batch for length in (0, 100, 550, 2_000)}
    assert batches == {0: 10, 100: 10, 550: 3, 2_000: 1}
    assert call.typical is call
    assert replace(call, seqlen_q=0, max_seqlen_q=5).typical.batch == 10
    assert replace(call, batch=1, max_seqlen_q=5).typical.batch == 1
    backward = replace(call, direction="backward", max_seqlen_k=550)
    assert backward.typical == replace(backward, batch=3)  # of keys


def biased(dtype):
    return Features(bias=(1, 4, 4096, 4096), bias_dtype=dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "features",
    [Features(packed=True), Features(packed=True, softcap=True), Features(seqused_k=True, alibi=True)],
    ids=str,
)
def test_no_spill_where_lengths_vary(head_dim, features):
    """Not even with many consumers, unless a range mask cuts tiles."""
    call = replace(problem(head_dim), features=features)
    many = [tiles for tiles in candidates(call.kind) if tiles.consumers > 2]
    assert many
    for tiles in many:
        assert jit.build(plan_of(call, **asdict(tiles)).variant).warnings == ()


@pytest.mark.parametrize("features", [Features(packed=True), Features(seqused_k=True)], ids=str)
def test_hardly_a_spill_where_lengths_vary_under_a_causal_mask(features):
    call = replace(problem(64, causal=True), features=features)
    many = [tiles for tiles in candidates(call.kind) if tiles.consumers > 3]
    assert many
    for tiles in many:
        assert jit.build(plan_of(call, **asdict(tiles)).variant).resources[NAME].spill_stores <= 16


@pytest.mark.parametrize(
    ("head_dim", "bits"), [(40, True), (64, False), (72, False), (96, True), (128, False)]
)
def test_no_spill_where_all_rows_see_the_same_keys(head_dim, bits):
    """With three or more consumers, or several blocks on an SM; but NVRTC 13.0 spills two words of 256x64."""
    mask = Features(mask=(2, 1, 1, 4096), mask_bits=bits)
    call = replace(problem(head_dim), features=mask)
    many = [tiles for tiles in candidates(call.kind) if tiles.consumers > 2 or tiles.blocks_per_sm > 1]
    each_own = replace(call, features=replace(mask, mask=(2, 1, 4096, 4096)))
    assert many
    assert all(tiles.consumers <= 2 for tiles in candidates(each_own.kind))
    for tiles in many:
        assert jit.build(plan_of(call, **asdict(tiles)).variant).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("causal", "features"),
    [
        (False, Features(mask_mod=SEE)),
        (True, Features(mask_mod=SEE, softcap=True)),
        (True, Features(mask_mod=SEE, seqused_k=True)),
        (False, Features(mask=(1, 1, 4096, 4096), packed=True)),
        (True, Features(mask=(1, 4, 4096, 4096), mask_bits=True)),
    ],
    ids=str,
)
def test_no_spill_in_small_blocks_under_a_mask(head_dim, causal, features):
    """But NVRTC 13.0 spills up to 16 bytes in the smallest."""
    call = replace(problem(head_dim, causal=causal), features=features)
    small = [tiles for tiles in candidates(call.kind) if tiles.blocks_per_sm > 1]
    assert small
    for tiles in small:
        assert jit.build(plan_of(call, **asdict(tiles)).variant).warnings == ()


@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen", "blocks_per_sm"),
    [(64, 4, 4096, 3), (64, 2, 8192, 1), (128, 4, 4096, 1), (128, 16, 1024, 2)],
)
def test_tiles_under_a_mask_mod_are_for_rows_that_see_few_keys(head_dim, batch, seqlen, blocks_per_sm):
    """For as many scores without one, an SM has one block."""
    call = replace(problem(head_dim, seqlen=seqlen), batch=batch, heads=16, kv_heads=16)
    windowed = replace(call, features=Features(mask_mod=SEE))
    assert plan_of(call).tiles["blocks_per_sm"] == 1
    assert plan_of(windowed).tiles["blocks_per_sm"] == blocks_per_sm
    assert best_kernel(windowed, H200).name == NAME


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_dim", "causal", "features"),
    [
        (64, False, Features(alibi=True)),
        (128, True, Features(alibi=True)),
        (64, True, biased("bfloat16")),
        (128, False, biased("float32")),
        (256, False, biased("bfloat16")),
        (128, False, Features(mask_mod=SEE)),
        (64, True, Features(mask=(1, 1, 4096, 4096), softcap=True)),
        (128, False, Features(mask=(1, 1, 4096, 4096))),
        (256, False, Features(mask=(4, 1, 1, 4096), mask_bits=True)),
        (128, True, Features(mask=(4, 1, 1, 4096), seqused_k=True, dropout=True)),
        (128, True, Features(mask=(4, 1, 1, 4096), alibi=True)),
    ],
)
def test_no_spill_with_features(head_dim, causal, features):
    """Keys in pages, of which a producer looks up the most, are in test_mixed.py."""
    call = replace(problem(head_dim, causal=causal), features=features)
    assert best_kernel(call, H200).name == NAME
    assert jit.build(plan_of(call).variant).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"),
    [
        ("float16", 8, 8),
        ("bfloat16", 40, 200),
        ("float16", 96, 80),
        ("bfloat16", 192, 128),
        ("float16", 7, 255),
    ],
)
def test_any_head_dims_compile(dtype, head_dim, value_dim):
    build = jit.build(plan_of(problem(head_dim, value_dim, True, dtype=dtype)).variant)
    assert not [line for line in build.warnings if "spill" not in line]


def runs_of(head_dim):
    """The products, waits for products and exponentials of the kernel."""
    return machine_code.runs(jit.build(plan_of(problem(head_dim)).variant), "HGMMA", WAIT, EXPONENTIAL)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_are_issued_together(head_dim):
    """Within a run of products there is no wait, which the compiler would put in if it had doubts."""
    products = [length for mark, length in runs_of(head_dim) if mark == "HGMMA"]
    tiles = plan_of(problem(head_dim)).tiles
    assert max(products) == head_dim // 16 + tiles["block_n"] // 16
    assert min(products) >= min(head_dim, tiles["block_n"]) // 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_exponentials_are_computed_while_the_output_is_multiplied(head_dim):
    """They stand where they were written: after the wait for a tile's scores, before that for the output."""
    runs = runs_of(head_dim)
    of_loop = max(range(len(runs)), key=lambda at: (runs[at][0] == "HGMMA") * runs[at][1])
    (wait, _), (exponentials, count), (last_wait, _) = runs[of_loop + 1 :][:3]
    assert (wait[-1], exponentials, last_wait[-1]) == ("1", "MUFU.EX2", "0")
    # Of 64 rows by 128 threads; ptxas may move one past the wait.
    assert count >= plan_of(problem(head_dim)).tiles["block_n"] * 64 // 128 - 1


@pytest.mark.parametrize("seqlen", [64, *LENGTHS])
def test_registers_are_those_of_the_block(seqlen):
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        plan = plan_of(problem(head_dim, causal=causal, seqlen=seqlen))
        macros = dict(plan.macros)
        (launch,) = plan.launches
        consumers, blocks = plan.tiles["block_m"] // 64, plan.tiles["blocks_per_sm"]
        taken = consumers * macros["CONSUMER_REGISTERS"] + macros["PRODUCER_REGISTERS"]
        at_start = H200.registers_per_sm // (blocks * launch.block) // 8 * 8
        # More than all begin with, and the consumers would wait for ever.
        assert taken == at_start * (consumers + 1)
        assert macros["CONSUMER_REGISTERS"] % 8 == macros["PRODUCER_REGISTERS"] % 8 == 0
        assert launch.grid <= blocks * H200.sm_count


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        (Problem("forward", "bfloat16", 24, 73, 5, 24, 12, 80, 80, causal=True), "fwd_5_mma"),
        (Problem("forward", "bfloat16", 1, 1024, 65536, 8, 8, 64, 64, causal=True), NAME),
        (Problem("forward", "bfloat16", 96, 64, 5, 24, 12, 112, 112), NAME),
    ],
    ids=["keys for a part of a tile", "many more keys than queries", "one tile of keys"],
)
def test_the_rung_that_was_the_fastest(shape, kernel):
    assert best_kernel(shape, H200).name == kernel


@pytest.mark.parametrize("head_dim", [72, 96, 120])
def test_short_sequences_under_a_mask_have_no_product_in_series(head_dim):
    plan = plan_of(replace(problem(head_dim, causal=True, seqlen=64), batch=1024))
    assert plan.tiles["blocks_per_sm"] == 2
    assert jit.build(plan.variant).warnings == ()


def test_blocks_are_as_many_as_run_at_once():
    short = replace(problem(64, seqlen=64), batch=1024)
    small = {"block_m": 64, "block_n": 64, "stages": 2, "query_stages": 1, "blocks_per_sm": 3}
    assert plan_of(short, **small).launches[0].grid == 3 * H200.sm_count
    # Registers for three, shared memory for two.
    assert plan_of(short, **small | {"stages": 4}).launches[0].grid == 2 * H200.sm_count


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"block_m": 96}, "block_m must be a multiple of 64"),
        ({"block_n": 72}, "block_n must be a multiple of 16"),
        ({"block_n": 272}, "up to 256"),
        ({"store_cols": 32}, "store_cols must be a multiple of 64"),
        ({"stages": 9}, "bytes of shared memory"),
        ({"block_m": 64, "blocks_per_sm": 1}, "blocks_per_sm must be larger"),
        ({"block_m": 64, "block_n": 64, "blocks_per_sm": 4}, r"a thread needs about \d+ registers"),
        ({"block_m": 192, "block_n": 128, "stages": 1}, r"a thread needs about \d+ registers"),
        ({"lanes": 2}, "tiles has lanes"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles, message):
    with pytest.raises(ValueError, match=message):
        plan_of(problem(), **tiles)


def test_what_it_does_not_support_it_says():
    kernel = KERNELS[NAME]
    assert best_kernel(problem(), H200) is kernel
    unaligned = problem(align_bytes=8)
    assert "multiples of 16 bytes" in kernel.unsupported(unaligned, H200)
    assert best_kernel(unaligned, H200).name == "fwd_5_mma"
    backwards = replace(problem(), ascending=False)
    assert "needs strides that are not negative" in kernel.unsupported(backwards, H200)
    assert best_kernel(backwards, H200).name == "fwd_5_mma"
    assert "needs sm_90a" in kernel.unsupported(problem(), Device.of("sm_100a"))
    assert "needs sm_90a" in kernel.unsupported(problem(), Device.of("sm_90"))
    assert "supports float16" in kernel.unsupported(problem(dtype="float32"), H200)


def test_more_tiles_than_a_counter_holds_are_refused():
    with pytest.raises(ValueError, match="more than a launch can count"):
        plan_of(replace(problem(), batch=2**25, heads=64, kv_heads=64))
    one_each = replace(problem(), heads=64, kv_heads=64, seqlen_q=1)
    assert plan_of(replace(one_each, batch=2**25 - 5)).launches
    with pytest.raises(ValueError, match="more than a launch can count"):
        plan_of(replace(one_each, batch=2**25 - 4))  # and those that each block asks for in vain


def test_nothing_to_compute_is_no_launch():
    for parts in ({}, {"key_parts": 2}):
        assert plan_of(replace(problem(), seqlen_q=0), **parts).launches == ()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim", "block_m"),
    [
        (512, 12, 128, 64, 128),  # one tile of a head, half of which larger ones would leave empty
        (64, 12, 197, 64, 256),
        (1, 8, 4096, 64, 256),  # a round for 132 SMs, where smaller ones take two
        (4, 32, 4096, 64, 192),
        (64, 16, 256, 128, 128),
        (1, 8, 4096, 128, 128),
        (4, 16, 4096, 128, 192),
    ],
)
def test_tiles_are_those_with_which_all_sms_are_done_first(batch, heads, seqlen, head_dim, block_m):
    call = replace(problem(head_dim, seqlen=seqlen), batch=batch, heads=heads, kv_heads=heads)
    assert plan_of(call).tiles["block_m"] == block_m


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "kernel"),
    [
        (1024, 64, 64, NAME),
        (1024, 16, 64, "fwd_5_mma"),
        (1024, 128, 128, NAME),
        (1024, 128, 1024, NAME),
        (2, 16, 8192, "fwd_8_split_kv"),
    ],
)
def test_many_short_sequences_go_to_small_blocks(batch, queries, keys, kernel):
    call = replace(problem(64), batch=batch, seqlen_q=queries, seqlen_k=keys, kv_heads=4)
    plan = make_plan(call, H200)
    assert plan.kernel == kernel
    assert plan.reasons[0].startswith(f"{kernel}: about ")


@pytest.mark.parametrize(("head_dim", "block_m"), [(72, 192), (80, 128), (88, 192), (96, 128), (104, 192)])
def test_tiles_of_rows_that_end_within_a_sector(head_dim, block_m):
    """More queries share their keys under a mask, where there are registers for it."""
    call = replace(problem(head_dim, causal=True), batch=4, heads=16)
    assert plan_of(call).tiles["block_m"] == block_m
    biased_call = replace(call, features=biased("bfloat16"))
    assert plan_of(biased_call).tiles["block_m"] == 128


def seen_score_bytes(seqlen, mask_mod=SEE, mask=None, **options):
    """Bytes of the workspace that say which scores are seen."""
    features = Features(mask_mod=mask_mod, mask=mask)
    plan = plan_of(replace(problem(seqlen=seqlen), features=features), **options)
    parts = {part.name: part for part in plan.scratch}
    return 4 * parts["seen scores"].shape[0] if "seen scores" in parts else 0


def test_scores_seen_are_written_where_they_take_no_more_than_the_output():
    assert seen_score_bytes(1024) == 1024**2 / 8
    output_row_bytes = 2 * 4 * 128 * 2  # of all heads
    assert seen_score_bytes(8 * output_row_bytes) == (8 * output_row_bytes) ** 2 / 8
    assert seen_score_bytes(16 * output_row_bytes) == 0
    assert seen_score_bytes(1024, block_n=48) == 0
    without_arrays = MaskMod(lambda b, h, q_idx, kv_idx: q_idx > kv_idx).written
    assert seen_score_bytes(1024, without_arrays) == 0


def test_scores_seen_are_always_written_of_a_mask():
    length = 16 * 2 * 4 * 128 * 2
    assert seen_score_bytes(length, None, mask=(1, 1, length, length)) == length**2 / 8
    assert seen_score_bytes(1024, None, mask=(1, 4, 1024, 1024)) == 4 * 1024**2 / 8
    # Of keys alone, if all rows are alike.
    for front, rows in (((1, 1), 1), ((2, 1), 2), ((1, 4), 4), ((2, 4), 8)):
        assert seen_score_bytes(length, None, mask=(*front, 1, length)) == rows * length / 8
    assert seen_score_bytes(1024, mask=(1, 1, 1, 1024)) == 1024**2 / 8
    with pytest.raises(ValueError, match="with a mask block_n must be a multiple of 32"):
        seen_score_bytes(1024, mask=(1, 1, 1, 1024), block_n=48)


# ---- keys in parts ----


def long_problem(batch, heads, seqlen, head_dim, causal):
    call = problem(head_dim, causal=causal, seqlen=seqlen)
    return replace(call, batch=batch, heads=heads, kv_heads=heads)


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim", "causal", "parts"),
    [
        (1, 16, 16384, 128, False, 2),  # 56 tiles in the eleventh round
        (1, 5, 8192, 64, False, 3),
        (4, 16, 4096, 128, False, 1),  # 88, which two thirds of a round would take
        (1, 8, 16384, 256, False, 1),
        (1, 4, 4096, 128, True, 2),
        (1, 8, 4096, 128, True, 1),
        (4, 16, 4096, 128, True, 1),
    ],
)
def test_keys_are_parted_where_sms_would_be_idle(batch, heads, seqlen, head_dim, causal, parts):
    plan = plan_of(long_problem(batch, heads, seqlen, head_dim, causal))
    assert plan.tiles["key_parts"] == parts
    assert (plan.parting == NOT_PARTED) == (parts == 1)
    assert [launch.entry for launch in plan.launches] == ["clear_counts", NAME][parts == 1 :]
    assert (plan.workspace_bytes > 0) == (parts > 1)


@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (1024, 5120), (5120, 1024)])
def test_rows_before_the_first_key_see_none(queries, keys):
    call = replace(problem(causal=True), seqlen_q=queries, seqlen_k=keys)
    tiles = Tiles(128, 64, 2, 1, 64)
    ends = [max(0, min(queries, row + 128) + keys - queries) for row in range(0, queries, 128)]
    in_whole_tiles = sum(-(-end // 64) * 64 for end in ends) / len(ends)
    assert keys_of_tile(call, tiles) == pytest.approx(in_whole_tiles, rel=0.1)


def test_many_tiles_are_not_parted_where_most_rows_see_no_key():
    """Parts would take several times the memory of the output."""
    call = replace(long_problem(200, 64, 8192, 128, causal=True), seqlen_k=100)
    assert plan_of(call).workspace_bytes == 0


@pytest.mark.parametrize(
    "features",
    [
        Features(window=(100, 0)),
        Features(mask=(1, 1, 4096, 4096)),
        Features(mask_mod=SEE),
        Features(alibi=True),
        biased("bfloat16"),
        Features(dropout=True),
    ],
    ids=str,
)
def test_keys_are_not_parted_beside_what_hides_keys_or_takes_registers(features):
    call = replace(long_problem(1, 4, 4096, 128, causal=True), features=features)
    assert plan_of(call).tiles["key_parts"] == 1


@pytest.mark.parametrize(
    ("features", "batch", "queries", "keys", "parts"),
    [
        (Features(seqused_k=True, page_size=16), 1, 512, 8192, 4),  # a prompt's chunk
        (Features(seqused_k=True, page_size=16, packed=True), 1, 512, 8192, 4),
        (Features(page_size=16), 1, 512, 8192, 4),
        (Features(seqused_k=True), 2, 512, 8192, 2),
        (Features(seqused_k=True), 4, 512, 8192, 1),  # enough tiles for all SMs
        (Features(packed=True), 3, 6000, 6000, 1),  # may be short
    ],
    ids=str,
)
def test_keys_whose_number_is_not_known_are_parted(features, batch, queries, keys, parts):
    call = Problem("forward", "bfloat16", batch, queries, keys, 8, 1, 128, 128, True, features=features)
    plan = plan_of(call)
    assert plan.tiles["key_parts"] == parts
    if parts > 1:
        assert plan.parting == Parting(0, parts, query_tiles(call, Tiles(**plan.tiles)) * parts)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (1000, 5000), (5000, 1000), (129, 4000)])
def test_parts_under_a_causal_mask_are_all_there_and_the_longest_come_first(queries, keys, parts):
    call = replace(problem(causal=True), seqlen_q=queries, seqlen_k=keys)
    plan = plan_of(call, block_m=128, block_n=128, blocks_per_sm=1, key_parts=parts)
    places = plan.parting.places
    assert plan.parting.count == call.batch * call.heads * len(places)
    # Both warpgroups of a block count the parts of their rows.
    assert [part.shape for part in plan.scratch if part.name == "parts there"] == [(2 * plan.parting.count,)]
    of_tiles = {}
    for number, (tile, part, count, first) in enumerate(sorted(places)):
        assert first + part == number
        assert of_tiles.setdefault(tile, count) == count
    assert list(of_tiles) == list(range(-(-queries // 128)))

    def key_tiles(tile):
        return -(-max(0, min(queries, 128 * tile + 128) + keys - queries) // 128)

    lengths = [-(-key_tiles(tile) // count) for tile, _, count, _ in places]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-key_tiles(max(of_tiles)) // parts)
    # Who waits for another part waits for one that was handed out before.
    for tile in of_tiles:
        in_order = [part for of, part, _, _ in places if of == tile]
        assert in_order == sorted(in_order)


CUT_IN_TWO = {"block_m": 128, "block_n": 128, "key_parts": 2}


@pytest.mark.parametrize(
    ("call", "tiles", "message"),
    [
        (problem(), {"key_parts": 17}, "key_parts must be 1 to 16"),
        (problem(seqlen=200), {"block_n": 128, "key_parts": 3}, "2 tiles of keys cannot be split so"),
        (replace(problem(), features=Features(window=(9, 9))), {"key_parts": 2}, "not split under a window"),
        (replace(problem(), features=Features(mask_mod=SEE)), {"key_parts": 2}, "not split under a window"),
        (problem(causal=True, seqlen=16385), CUT_IN_TWO, "the tiles of a head would have 193 parts; .* 192$"),
    ],
)
def test_parts_that_cannot_be_are_refused(call, tiles, message):
    with pytest.raises(ValueError, match=message):
        plan_of(call, **tiles)


def test_tiles_that_a_caller_asks_for_come_without_parts():
    """They may not allow those of the plan's tiles."""
    call = long_problem(1, 2, 8192, 64, causal=True)
    small = {"block_m": 64, "block_n": 64, "stages": 2, "query_stages": 1, "blocks_per_sm": 2}
    assert plan_of(call).tiles["key_parts"] == 3
    assert plan_of(call, **small).tiles["key_parts"] == 1
    with pytest.raises(ValueError, match="the tiles of a head would have 255 parts"):
        plan_of(call, **small, key_parts=3)


def test_only_known_numbers_of_keys_limit_the_parts():
    """Blocks see how many parts a tile has, which no list says."""
    for call, tiles in [
        (problem(seqlen=200), {"block_n": 128, "key_parts": 3}),
        (problem(causal=True, seqlen=16385), CUT_IN_TWO),
    ]:
        plan = plan_of(replace(call, features=Features(seqused_k=True)), **tiles)
        parts = tiles["key_parts"]
        assert plan.parting == Parting(0, parts, query_tiles(call, Tiles(**plan.tiles)) * parts)


def test_each_tile_of_keys_may_be_a_part_of_its_own():
    assert plan_of(problem(seqlen=512), block_n=128, key_parts=4).tiles["key_parts"] == 4


def test_as_many_parts_of_a_head_as_can_be_listed():
    assert len(plan_of(problem(causal=True, seqlen=16384), **CUT_IN_TWO).parting.places) == 192


@pytest.mark.parametrize("keys", [1, 2, 5, 16, 100])
def test_only_parts_that_are_shorter_than_fewer_ones_are_tried(keys):
    def longest(parts):
        return -(-keys // parts)

    for parts in range(2, 17):
        shorter = all(longest(parts) < longest(fewer) for fewer in range(1, parts))
        assert (parts in numbers_of_parts(keys, 16)) == shorter


PARTED = [
    (head_dim, causal, tiles)
    for causal, paces in ((False, PACES), (True, CUT_PACES))
    for head_dim in paces
    for tiles in paces[head_dim]
    if parts_leave_registers(problem(head_dim, causal=causal), tiles)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("features", [Features(packed=True), Features(seqused_k=True, page_size=64)], ids=str)
def test_no_spill_in_parts_of_unknown_length(head_dim, features):
    call = replace(problem(head_dim, causal=True), features=features)
    assert jit.build(plan_of(call, key_parts=2).variant).warnings == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("head_dim", "causal", "tiles"), PARTED, ids=str)
def test_no_spill_in_parts(head_dim, causal, tiles):
    value_dim = MOST_VALUE_DIM if head_dim > MOST_VALUE_DIM and tiles.block_n == 128 else head_dim
    features = Features(softcap=causal, sink=True)
    call = replace(problem(head_dim, value_dim, causal), features=features)
    assert jit.build(plan_of(call, **asdict(replace(tiles, key_parts=2))).variant).warnings == ()
