"""The Hopper forward of 8-bit operands on the emulator: its twins alone, and whole calls.

The tests of twins also run on a GPU of sm_90 with `pytest -m gpu`: there, it is they that are tested.
"""

import itertools
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError, calls
from feature_cases import HOPPER_PAGE_SIZES, draw_case, feature_id, hide_nan, pairwise
from float8 import assert_float8, random_descales, with_values_transposed
from test_emulator import planted
from test_emulator_hopper import (
    BEYOND_FLOATS,
    CHUNK_BYTES,
    LARGE,
    SWIZZLE_ROWS,
    WARPGROUP,
    assert_products,
    folder,
    launch,
    product_results,
    swizzled,
    with_leaps,
)
from tolerance import random_problem

from cufa.integers import round_up
from cufa.problem import FLOAT8

__all__ = ["folder", "launch"]  # fixtures

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DEPTH, STEP = 128, 32


def fragments(matrix):
    """The registers of A, (depth / 32, thread, byte): PTX ISA, "Register Fragments" of wgmma."""
    thread, byte = np.arange(WARPGROUP)[:, None], np.arange(16)
    row = thread // 32 * 16 + thread % 32 // 4 + byte // 4 % 2 * 8
    column = thread % 4 * 4 + byte % 4 + byte // 8 * 16
    return np.stack([matrix[row, k + column] for k in range(0, DEPTH, STEP)])


def units(matrix):
    """A matrix (across, depth) where nothing is swizzled; its description at 0, the step of 32 in depth.

    Chunks of eight rows lie together, then those of the next eight, then those of the next depth.
    """
    across = len(matrix)
    chunks = matrix.reshape(across, DEPTH // CHUNK_BYTES, CHUNK_BYTES).swapaxes(0, 1)
    depth_stride, eights_stride = across * CHUNK_BYTES, SWIZZLE_ROWS * CHUNK_BYTES
    step = STEP // CHUNK_BYTES * depth_stride
    return np.ascontiguousarray(chunks), eights_stride // 16 << 32 | depth_stride // 16 << 16, step // 16


def panel(matrix):
    """The same with the 128-byte swizzle."""
    return swizzled(matrix), 1 << 62 | SWIZZLE_ROWS * DEPTH // 16 << 32, STEP // 16


@pytest.mark.parametrize("lying", [units, panel])
@pytest.mark.parametrize("columns", [16, 128, 256])
def test_products(launch, rng, columns, lying):
    a, b = (rng.standard_normal((across, DEPTH)).astype(E4M3) for across in (64, columns))
    (a_memory, a_description, a_step), (b_memory, b_description, b_step) = panel(a), lying(b)
    arrays = {
        "a": a_memory,
        "b": b_memory,
        "fragments": fragments(a),
        **product_results(columns),
    }
    numbers = struct.pack("4Q", a_description, b_description, a_step, b_step)
    fields = ["a", "b", "fragments", "shared", "registers", numbers]
    sizes = {"A_BYTES": a_memory.nbytes, "B_BYTES": b_memory.nbytes}
    launch("products", WARPGROUP, fields, arrays, PRODUCT_COLUMNS=columns, E4M3=True, **sizes)
    # Hopper keeps fewer bits of a sum of such products than float32 has.
    assert_products(arrays, a, b, error=2**-10)


def test_packing(launch, rng):
    codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    halfway = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate(
        [codes, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 500), [449, 1e30]]
    )
    values = np.concatenate([values, -values, rng.standard_normal(2000), [np.inf, -np.inf, np.nan]])
    values = np.resize(values, len(values) // 4 * 4 + 4).astype(np.float32)
    arrays = {"values": values, "packed": np.zeros(len(values), np.uint8)}
    launch("packed", 64, ["values", "packed", len(values) // 4], arrays)
    nearest = np.clip(values, -448, 448).astype(E4M3)  # clip leaves NaN as it is
    np.testing.assert_array_equal(arrays["packed"] & 0x7F == 0x7F, np.isnan(values))
    seen = ~np.isnan(values)
    np.testing.assert_array_equal(arrays["packed"][seen], nearest.view(np.uint8)[seen])


# ---- whole calls ----

KERNEL = "fwd_7_fp8"
# So few SMs that a persistent block takes several tiles.
DEVICE = replace(calls.DEVICE, sm_count=3)
FEATURES = ("causal", "window", "softcap", "sink", "seqused_k", "packed", "block_table")
DIMS = [(64, 64), (128, 48)]


def run(problem, descales=None, device=DEVICE, **options):
    """Out and LSE, held to the rule; `options` are `calls.attention`'s."""
    out, lse = calls.attention(
        problem.q, problem.k, problem.v, kernel=KERNEL, device=device, **(descales or {}), **options
    )
    rules = {name: value for name, value in options.items() if name in ("causal", "window")}
    assert_float8(out, lse, problem, descales, **rules)
    return out, lse


def draw(rng, seqlen_q, seqlen_k, dims=(64, 64), **shape):
    shape = {"heads": 2, "kv_heads": 1, **shape}
    return random_problem(
        rng, FLOAT8, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=dims[0], head_dim_v=dims[1], **shape
    )


# Under a causal mask and with 128 dims, a warpgroup leaves out halves of first tiles.
@pytest.mark.parametrize(("dims", "causal"), [((80, 128), True), ((128, 80), False), ((80, 256), True)])
def test_lengths(rng, dims, causal):
    for lengths in [(1, 65), (130, 129), (300, 100), (250, 310)]:
        problem = draw(rng, *lengths, dims=dims)
        run(problem, random_descales(rng, 1, 1), causal=causal)


# Of values that lie transposed: panels of 96 and 128 keys, one and two of them, and dims that fill no unit.
@pytest.mark.parametrize(
    ("dims", "causal", "tiles"),
    [
        ((64, 64), True, {}),
        ((128, 80), False, {"block_m": 128, "block_n": 96, "stages": 2}),
        ((80, 72), True, {"block_m": 128, "block_n": 192, "stages": 2, "query_stages": 1}),
    ],
)
def test_transposed_values(rng, dims, causal, tiles):
    for lengths in [(1, 64), (130, 128), (200, 100), (140, 312)]:
        problem = with_values_transposed(draw(rng, *lengths, dims=dims, batch=2, heads=2, kv_heads=2))
        run(problem, random_descales(rng, 2, 2), causal=causal, tiles=tiles)


# Warps beside the producer, and a warpgroup of their own.
HELPERS = [3, 4]


@pytest.mark.parametrize("helpers", HELPERS)
def test_nan_in_transposed_values(rng, helpers):
    problem = draw(rng, 200, 212)
    problem.v[:, 100, 0, 3], problem.v[:, 180, 0, 5] = np.nan, np.nan  # seen from rows 88 and 168 on
    problem = with_values_transposed(problem)
    tiles = {"block_m": 128, "helpers": helpers}
    out, _ = run(problem, causal=True, tiles=tiles)
    assert np.isfinite(out[:, :88]).all()
    run(problem, tiles=tiles)


# Head dims, lengths, whether values lie transposed, and into how many parts keys are parted; in every part
# some row sees NaN, of which other rows know nothing.
IN_PARTS = [
    ((64, 64), (200, 500), True, False, 3),
    ((128, 80), (140, 400), False, True, 2),
    ((80, 128), (140, 500), True, True, 4),
]


@pytest.mark.parametrize(("dims", "lengths", "causal", "transposes", "parts"), IN_PARTS)
def test_keys_in_parts(rng, dims, lengths, causal, transposes, parts):
    problem = draw(rng, *lengths, dims=dims)
    options = {"causal": causal, "tiles": {"key_parts": parts}}
    descales = random_descales(rng, 1, 1)
    for nan_at in ((), (10, lengths[1] - lengths[0] // 2, lengths[1] - 1)):
        for key in nan_at:
            problem.v[0, key, 0, 3] = np.nan
        drawn = with_values_transposed(problem) if transposes else problem
        results = [run(drawn, descales, **options) for _ in range(2)]
        for now, expected in zip(*results, strict=True):
            np.testing.assert_array_equal(now.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("dims", "parts", "features"),
    [((64, 64), 3, {"packed", "causal", "sink"}), ((128, 48), 4, {"block_table", "seqused_k"})],
)
def test_keys_in_parts_whose_number_is_not_known(rng, dims, parts, features):
    sizes = {"seqlen_q": 150, "seqlen_k": 500, "head_dim": dims[0], "head_dim_v": dims[1]}
    check_features(rng, features, sizes, tiles={"key_parts": parts})


def test_groups_batches_and_strides(rng):
    problem = draw(rng, 100, 150, batch=2, heads=6, kv_heads=2, layout="packed")
    run(problem, random_descales(rng, 2, 2))


def test_descales_of_packed_sequences(rng):
    case = draw_case(rng, FLOAT8, {"packed", "causal"}, seqlen_q=150, seqlen_k=200, head_dim=64)
    q, k, v = case.problem.q, case.problem.k, case.problem.v
    descales = random_descales(rng, len(case.arrays["cu_seqlens_q"]) - 1, k.shape[1])
    out, lse = calls.attention(q, k, v, kernel=KERNEL, device=DEVICE, **case.emulator_forward, **descales)
    assert_float8(out, lse, case.problem, descales, **case.forward)


@pytest.mark.parametrize(("factor", "causal"), [(LARGE, True), (BEYOND_FLOATS, False)])
def test_scores_that_leap(rng, factor, causal):
    run(with_leaps(draw(rng, 200, 400), factor), causal=causal)


def test_empty_problems(rng):
    for batch, seqlen_q, seqlen_k in [(0, 5, 5), (2, 0, 5), (2, 5, 0)]:
        run(draw(rng, seqlen_q, seqlen_k, batch=batch))


def test_output_in_float16(rng):
    problem = draw(rng, 70, 80)
    out, _ = run(problem, out_dtype=np.float16)
    assert out.dtype == np.float16


@pytest.mark.parametrize("helpers", HELPERS)
def test_nan_reaches_those_who_see_it(rng, helpers):
    problem = draw(rng, 200, 210)
    problem.k[:, 100], problem.v[:, 100, 0, 3] = np.nan, np.nan  # seen from row 90 on
    problem.v[:, 180, 0, 5] = np.nan  # seen from row 170 on
    tiles = {"block_m": 128, "helpers": helpers}
    out, _ = run(problem, causal=True, tiles=tiles)
    assert np.isfinite(out[:, :90]).all()
    run(problem, tiles=tiles)  # every row sees them, without a search


def test_weights_that_are_almost_nothing(rng):
    """A score far above the others: what is left of theirs must not be lost, and none overflows."""
    problem = draw(rng, 64, 2048, heads=1)
    problem.k[:, 0] = problem.q[:, 0] * 4
    run(problem)
    problem.k[:] = problem.k[:, ::-1].copy()  # the maximum is raised at the last tile
    run(problem)


# What is wrong in a copy of which file, and what is said about it.
PLANTED = {
    "values turned before a product has read the last": (
        "fp8_turned_values.cuh",
        "smem.helpers.ring.wait_empty(at);",
        "",
        r"one arrival too many at the barrier|race: writes 16 bytes of shared memory",
    ),
    "values turned before they are there": (
        "wgmma_forward_copies.cuh",
        "value_ring(smem).wait_full(at); handle(!keys",
        "handle(!keys",
        r"one arrival too many at the barrier|race: reads 16 bytes of shared memory",
    ),
    "turned values of which wgmma is not told": (
        "fp8_turned_values.cuh",
        "ptx::proxy_fence(); __syncwarp(); if (thread % 32 == 0) { smem.helpers.nan",
        "__syncwarp(); if (thread % 32 == 0) { smem.helpers.nan",
        r"which thread \d+ writes with no proxy fence between\n(?s:.*)issue_product_pv",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_seen(rng, tmp_path, what):
    file, right, wrong, message = PLANTED[what]
    problem = draw(rng, 100, 400, heads=1)
    tiles = {"block_m": 128, "block_n": 64, "stages": 2, "query_stages": 1, "store_cols": 64}
    with pytest.raises(EmulatorError, match=message):
        run(problem, folder=planted(tmp_path, file, right, wrong), tiles=tiles)


def test_rows_that_see_few_keys_at_first_need_not_raise_their_maxima(rng, tmp_path):
    """In this copy of the kernel the output is NaN where maxima are raised."""
    raising = "if (softmax.shrink_weights(s, sums, shrink)) return;"
    spoiling = "shrink[0] = shrink[1] = __int_as_float(0x7fffffff); return;"
    folder = planted(tmp_path, "wgmma_forward.cuh", raising, spoiling)
    run(draw(rng, 300, 300), causal=True, folder=folder)


TRANSPOSED_PLANTED = {
    "values looked at before they are there": (
        "wgmma_forward_copies.cuh",
        "value_ring(smem).wait_full(at); handle(!keys",
        "handle(!keys",
        r"race: reads \d+ bytes of shared memory",
    ),
    "NaN taken out before it was looked for": (
        "wgmma_inspected_values.cuh",
        "wait_for(smem.helpers.done[v_at.stage], v_at.parity, v_at.stage);",
        "",
        r"race: reads 4 bytes of shared memory|which no thread has written",
    ),
    "zeros of which wgmma is not told": (
        "wgmma_inspected_values.cuh",
        "ptx::proxy_fence(); ptx::named_barrier_sync",
        "ptx::named_barrier_sync",
        r"which thread \d+ writes with no proxy fence between\n(?s:.*)issue_product_pv",
    ),
}


@pytest.mark.parametrize("what", TRANSPOSED_PLANTED)
def test_a_mistake_about_transposed_values_is_seen(rng, tmp_path, what):
    file, right, wrong, message = TRANSPOSED_PLANTED[what]
    problem = draw(rng, 100, 400, heads=1)
    problem.v[:, 390] = np.nan
    tiles = {"block_m": 128, "block_n": 64, "stages": 2, "query_stages": 1, "store_cols": 64}
    with pytest.raises(EmulatorError, match=message):
        run(
            with_values_transposed(problem),
            causal=True,
            folder=planted(tmp_path, file, right, wrong),
            tiles=tiles,
        )


# Each set with head dims in turn: compiling takes most of the time. Pages have both as the others have.
@pytest.mark.parametrize(
    ("dims", "features"),
    [
        *zip(itertools.cycle(DIMS), pairwise(FEATURES), strict=False),
        (DIMS[0], frozenset(("block_table", "window"))),
    ],
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else str(value),
)
def test_features(rng, dims, features):
    check_features(rng, features, drawn_sizes(rng, dims))


@pytest.mark.parametrize(
    "features", [{"window", "sink"}, {"softcap", "seqused_k"}, {"causal", "seqused_k"}], ids=feature_id
)
def test_features_with_transposed_values(rng, features):
    sizes = drawn_sizes(rng, DIMS[1])
    sizes["seqlen_k"] = round_up(sizes["seqlen_k"], 4)
    check_features(rng, features, sizes, transposed=True)


def drawn_sizes(rng, dims):
    """Random lengths, and these head dims."""
    seqlen_q, seqlen_k = (int(length) for length in rng.integers(1, 280, 2))
    return {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}


def check_features(rng, features, sizes, transposed=False, tiles=None):
    """Run a drawn case of these features, clean and with NaN in the unseen."""
    case = draw_case(rng, FLOAT8, features, page_sizes=HOPPER_PAGE_SIZES, heads=2, kv_heads=1, **sizes)
    for hidden in (False, True):
        if hidden:
            hide_nan(case)
        problem = with_values_transposed(case.problem) if transposed else case.problem
        with np.errstate(invalid="ignore"):
            out, lse = calls.attention(
                *(problem.q, problem.k, problem.v),
                kernel=KERNEL,
                tiles=tiles,
                device=DEVICE,
                **case.emulator_forward,
            )
            assert_float8(out, lse, problem, **case.forward)
