"""The tiled CPU path against the reference, by the error rule."""

import itertools
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import threadpoolctl
from forks import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import (
    DTYPES,
    LAYOUTS,
    Array,
    Problem,
    assert_attention,
    assert_close,
    assert_gradients,
    poisoned,
    random_problem,
    stored,
)

from cufa import cpu, reference, threads
from cufa.checking import OUTPUT_FACTOR, judge
from cufa.cpu import stacks, tiles
from cufa.score_rules import Rules
from cufa.threads import in_threads

Gradients = tuple[Array, Array, Array]


@pytest.fixture(scope="module", autouse=True, params=["tiles", "stacks"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """All by tiles, or heads in stacks where they are short."""
    most = stacks.MOST_SCORES if request.param == "stacks" else 0
    with mock.patch.object(stacks, "MOST_SCORES", most):
        yield request.param


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with mock.patch.multiple(tiles, Q_TILE=8, KV_TILE=16):
        yield


def forward(
    problem: Problem,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    layout: str = "contiguous",
) -> tuple[Array, Array]:
    out = poisoned(problem.dout, layout)
    wide = np.float64 if problem.dtype_name == "float64" else np.float32
    lse = np.full(problem.lse_shape, np.nan, wide)
    scale = problem.q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    cpu.attention(problem.q, problem.k, problem.v, out, lse, causal=causal, softmax_scale=scale)
    return out, lse


def backward(
    problem: Problem,
    out: Array,
    lse: Array,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    layout: str = "contiguous",
) -> Gradients:
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = poisoned(q, layout), poisoned(k, layout), poisoned(v, layout)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    cpu.attention_backward(problem.dout, q, k, v, out, lse, dq, dk, dv, causal=causal, softmax_scale=scale)
    return dq, dk, dv


def check(
    problem: Problem,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    layout: str = "contiguous",
) -> None:
    for x in (problem.q, problem.k, problem.v, problem.dout):
        x.flags.writeable = False
    out, lse = forward(problem, causal=causal, softmax_scale=softmax_scale, layout=layout)
    assert_attention(out, lse, problem, causal=causal, softmax_scale=softmax_scale)
    gradients = backward(problem, out, lse, causal=causal, softmax_scale=softmax_scale, layout=layout)
    assert_gradients(gradients, problem, causal=causal, softmax_scale=softmax_scale)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    def integer(low: int, high: int, what: str) -> int:
        return data.draw(st.integers(low, high), label=what)

    kv_heads = integer(1, 2, "kv_heads")
    seed, dtype = integer(0, 2**32, "seed"), data.draw(st.sampled_from(DTYPES), label="dtype")
    problem = random_problem(
        np.random.default_rng(seed),
        dtype,
        batch=integer(0, 2, "batch"),
        seqlen_q=integer(0, 70, "seqlen_q"),
        seqlen_k=integer(0, 70, "seqlen_k"),
        heads=kv_heads * integer(1, 3, "group"),
        kv_heads=kv_heads,
        head_dim=integer(1, 40, "head_dim"),
        head_dim_v=integer(1, 40, "head_dim_v"),
        layout=data.draw(st.sampled_from(LAYOUTS), label="layout"),
    )
    # Of smaller tiles there are so many, added one after another, that float64 is further off than allowed.
    least = 4 if dtype == "float64" else 1
    with mock.patch.multiple(
        tiles, Q_TILE=integer(least, 24, "Q_TILE"), KV_TILE=integer(least, 24, "KV_TILE")
    ):
        check(
            problem,
            causal=data.draw(st.booleans(), label="causal"),
            softmax_scale=data.draw(st.sampled_from([None, 0.7, 0.0, -0.2]), label="scale"),
            layout=data.draw(st.sampled_from(LAYOUTS), label="layout of the results"),
        )


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        (tiles.Q_TILE - 1, tiles.KV_TILE + 1),
        (tiles.Q_TILE, tiles.KV_TILE),
        (tiles.Q_TILE + 1, tiles.KV_TILE - 1),
        (2 * tiles.Q_TILE + 1, tiles.Q_TILE),
    ],
)
def test_lengths_around_the_tiles(dtype_name: str, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    rng = np.random.default_rng(1)
    head_dim = 8  # small, as products in long double are slow
    problem = random_problem(rng, dtype_name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim)
    check(problem, causal=causal)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_grouped_queries(dtype_name: str) -> None:
    rng = np.random.default_rng(2)
    problem = random_problem(
        rng, dtype_name, batch=2, seqlen_q=33, seqlen_k=47, heads=6, kv_heads=2, head_dim=24
    )
    check(problem, causal=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(257, 300), (576, 512), (72, 384)])
@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.usefixtures("small_tiles")
def test_wide_heads(dtype_name: str, head_dim: int, head_dim_v: int) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    for causal in (False, True):
        rng = np.random.default_rng(20)
        problem = random_problem(rng, dtype_name, seqlen_q=19, seqlen_k=37, heads=2, kv_heads=1, **dims)
        check(problem, causal=causal)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("small_tiles")
def test_layouts_do_not_change_a_bit(dtype_name: str, layout: str) -> None:
    problems = [
        random_problem(
            np.random.default_rng(3),
            dtype_name,
            batch=2,
            seqlen_q=37,
            seqlen_k=41,
            heads=4,
            kv_heads=2,
            head_dim=12,
            layout=name,
        )
        for name in ("contiguous", layout)
    ]
    results = []
    for problem, name in zip(problems, ("contiguous", layout), strict=True):
        out, lse = forward(problem, causal=True, layout=name)
        results.append((out, lse, *backward(problem, out, lse, causal=True, layout=name)))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.usefixtures("small_tiles")
def test_strided_last_axis() -> None:
    problem = random_problem(np.random.default_rng(4), "float32", seqlen_q=20, seqlen_k=35)
    spread = Problem(
        q=np.repeat(problem.q, 2, axis=3)[..., ::2],
        k=np.asfortranarray(problem.k),
        v=np.repeat(problem.v, 2, axis=3)[..., ::2],
        dout=problem.dout[..., ::-1],
    )
    check(spread, causal=True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_lengths_of_zero(seqlen_q: int, seqlen_k: int, causal: bool, dtype_name: str) -> None:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, dtype_name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=2, head_dim=4)
    out, lse = forward(problem, causal=causal)
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    for gradient in backward(problem, out, lse, causal=causal):
        assert np.all(gradient == 0)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.usefixtures("small_tiles")
def test_rows_that_see_nothing(dtype_name: str, bad: float) -> None:
    """What stands in a query that sees no key is nobody's business."""
    problem = random_problem(np.random.default_rng(6), dtype_name, seqlen_q=43, seqlen_k=30, head_dim=5)
    problem.q[:, :13] = problem.dout[:, :13] = bad
    out, lse = forward(problem, causal=True)
    dq, dk, dv = backward(problem, out, lse, causal=True)
    assert np.all(out[:, :13] == 0)
    assert np.all(lse[:, :, :13] == -np.inf)
    assert np.all(dq[:, :13] == 0)
    assert_attention(out, lse, problem, causal=True)
    assert_gradients((dq, dk, dv), problem, causal=True)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.usefixtures("small_tiles")
def test_rows_whose_scores_are_all_minus_infinity(dtype_name: str) -> None:
    problem = random_problem(
        np.random.default_rng(18), dtype_name, seqlen_q=20, seqlen_k=20, head_dim=1, head_dim_v=3
    )
    problem.q[...] = np.abs(problem.q)
    problem.k[...] = -np.inf
    out, lse = forward(problem, causal=False)
    _, _, dv = backward(problem, out, lse, causal=False)
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    assert np.all(dv == 0)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.usefixtures("small_tiles")
def test_a_row_with_a_score_of_infinity_is_nan(dtype_name: str) -> None:
    problem = random_problem(np.random.default_rng(19), dtype_name, seqlen_q=20, seqlen_k=20, head_dim=1)
    problem.q[...] = np.abs(problem.q)
    problem.k[:, 11] = np.inf
    out, lse = forward(problem, causal=True)
    assert np.isfinite(out[:, :11]).all()
    assert np.isfinite(lse[..., :11]).all()
    assert np.isnan(out[:, 11:]).all()
    assert np.isnan(lse[..., 11:]).all()


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", [0, 15, 16, 20, 38])
@pytest.mark.usefixtures("small_tiles")
def test_bad_keys_reach_only_the_rows_that_see_them(dtype_name: str, bad: float, key: int) -> None:
    problem = random_problem(np.random.default_rng(7), dtype_name, seqlen_q=37, seqlen_k=39, head_dim=5)
    clean_out, clean_lse = forward(problem, causal=True)
    clean_dq, _, _ = backward(problem, clean_out, clean_lse, causal=True)

    problem.k[:, key] = problem.v[:, key] = bad
    out, lse = forward(problem, causal=True)
    dq, _, _ = backward(problem, out, lse, causal=True)
    blind = max(0, key - 2)  # query i sees the keys up to i + 2
    np.testing.assert_array_equal(out[:, :blind], clean_out[:, :blind])
    np.testing.assert_array_equal(lse[:, :, :blind], clean_lse[:, :, :blind])
    np.testing.assert_array_equal(dq[:, :blind], clean_dq[:, :blind])
    assert not np.isfinite(out[:, blind:]).any()


# What is exponentiated as it is, what is just not, and what must not be.
@pytest.mark.parametrize("score", [f * tiles.MOST_UNSHIFTED_SCORE for f in (0.99, 1.01, 10)])
@pytest.mark.parametrize(
    "value",
    [1, *(f * tiles.MOST_UNSHIFTED_VALUE for f in (0.2, 1e15)), *(f * 1e-15 for f in (1, 1e-15, 1e-18))],
)
@pytest.mark.usefixtures("small_tiles")
def test_the_smallest_scores_and_the_largest(score: float, value: float) -> None:
    """Some rows see the former alone, others both."""
    problem = random_problem(np.random.default_rng(3), "float32", seqlen_q=37, seqlen_k=37, head_dim=4)
    problem.q[...] = math.sqrt(score / 2)  # of four dims, which softmax_scale divides by 2
    problem.k[...] = problem.q * np.where(np.arange(37) < 20, -1, 1)[:, None, None]
    problem.v[...] *= value
    for causal in (False, True):
        out, lse = forward(problem, causal=causal)
        assert_attention(out, lse, problem, causal=causal)


@pytest.mark.parametrize(
    ("allowed", "most"), [("", 8), ("1", 1), ("3,2", 3), ("99", 8), ("0", 8), ("many", 8)], ids=str
)
def test_threads_are_as_many_as_openmp_may_have(
    allowed: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert threads.most_threads() == most


@pytest.mark.parametrize("large", ["q", "k"])
def test_the_squares_of_finite_vectors_may_be_infinite(large: str) -> None:
    problem = random_problem(np.random.default_rng(4), "float32", seqlen_q=20, seqlen_k=30, head_dim=8)
    for name in ("q", "k"):
        array = getattr(problem, name)
        array *= 1e25 if name == large else 200e-25
    out, lse = forward(problem, causal=False)
    assert_attention(out, lse, problem, causal=False)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 7, 8, 12, 36])
@pytest.mark.usefixtures("small_tiles")
def test_bad_queries_reach_only_the_keys_that_they_see(dtype_name: str, bad: float, row: int) -> None:
    problem = random_problem(np.random.default_rng(8), dtype_name, seqlen_q=37, seqlen_k=39, head_dim=5)
    clean_out, clean_lse = forward(problem, causal=True)
    _, clean_dk, clean_dv = backward(problem, clean_out, clean_lse, causal=True)

    problem.q[:, row] = problem.dout[:, row] = bad
    out, lse = forward(problem, causal=True)
    _, dk, dv = backward(problem, out, lse, causal=True)
    seen = row + 3
    np.testing.assert_array_equal(dk[:, seen:], clean_dk[:, seen:])
    np.testing.assert_array_equal(dv[:, seen:], clean_dv[:, seen:])
    assert not np.isfinite(dk[:, :seen]).any()
    np.testing.assert_array_equal(np.delete(out, row, axis=1), np.delete(clean_out, row, axis=1))


def test_bad_keys_with_good_values_reach_only_the_rows_that_see_them() -> None:
    problem = random_problem(
        np.random.default_rng(20), "float32", seqlen_q=4, seqlen_k=4, heads=2, head_dim=8
    )
    problem.k[:, 3] = np.nan
    dq, _, _ = backward(problem, *forward(problem, causal=True), causal=True)
    assert np.isfinite(dq[:, :3]).all()
    assert np.isnan(dq[:, 3]).all()


def test_bad_gradients_of_good_queries_reach_only_the_keys_that_these_see() -> None:
    problem = random_problem(
        np.random.default_rng(21), "float32", seqlen_q=4, seqlen_k=4, heads=2, head_dim=8
    )
    problem.dout[:, 0] = np.nan
    _, dk, dv = backward(problem, *forward(problem, causal=True), causal=True)
    for gradient in (dk, dv):
        assert np.isfinite(gradient[:, 1:]).all()
        assert np.isnan(gradient[:, 0]).all()


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.usefixtures("small_tiles")
def test_nan_spreads_as_in_the_reference(dtype_name: str) -> None:
    problem = random_problem(np.random.default_rng(9), dtype_name, seqlen_q=37, seqlen_k=39, head_dim=5)
    problem.v[:, 36, :, 2] = np.nan
    problem.k[:, 38, :, 0] = np.nan
    problem.dout[:, 1, :, 3] = np.nan
    check(problem, causal=True)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_large_logits(dtype_name: str, causal: bool) -> None:
    """exp of these is infinite in float32, and in float64 for float64."""
    logit_scale = 2000.0 if dtype_name == "float64" else 200.0
    problem = random_problem(
        np.random.default_rng(10),
        dtype_name,
        seqlen_q=45,
        seqlen_k=50,
        head_dim=16,
        logit_scale=logit_scale,
    )
    check(problem, causal=causal)


@pytest.mark.usefixtures("small_tiles")
def test_logits_that_grow_with_every_tile() -> None:
    """Each tile raises the maximum so far that what came before vanishes; and the other way."""
    problem = random_problem(np.random.default_rng(11), "float32", seqlen_q=20, seqlen_k=64, head_dim=4)
    problem.q[...] = np.abs(problem.q)
    ramp = np.linspace(-300, 300, 64, dtype=np.float32)[None, :, None, None]
    for k in (ramp, ramp[:, ::-1]):
        check(replace(problem, k=np.broadcast_to(k, problem.k.shape)), causal=False)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_repeats_to_the_bit(dtype_name: str) -> None:
    problem = random_problem(
        np.random.default_rng(12), dtype_name, seqlen_q=300, seqlen_k=600, heads=2, head_dim=64
    )
    first = forward(problem, causal=True)
    first_gradients = backward(problem, *first, causal=True)
    for _ in range(3):
        again = forward(problem, causal=True)
        again_gradients = backward(problem, *again, causal=True)
        for expected, actual in zip(first + first_gradients, again + again_gradients, strict=True):
            assert actual.tobytes() == expected.tobytes()


def test_lse_is_optional() -> None:
    problem = random_problem(np.random.default_rng(13), "float32", seqlen_q=9, seqlen_k=11)
    expected, _ = forward(problem, causal=True)
    out = poisoned(expected)
    cpu.attention(problem.q, problem.k, problem.v, out, None, causal=True, softmax_scale=64**-0.5)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("heads", "seqlen", "options", "stacked"),
    [
        (8, 64, {}, True),
        (8, 64, {"softcap": 20.0, "window": (9, 9)}, True),
        (1, 64, {}, False),
        (2, 400, {}, True),
        (2, 400, {"window": (9, 9)}, False),
        (2, 520, {}, False),
        (8, 64, {"dropout_p": 0.1, "seed": 3, "offset": 0}, False),
        (8, 64, {"seqused_k": np.array([60], np.int32)}, True),
        (8, 64, {"seqused_k": np.array([0], np.int32)}, False),
    ],
)
def test_short_heads_are_stacked(
    way: str, heads: int, seqlen: int, options: dict[str, Any], stacked: bool
) -> None:
    rng = np.random.default_rng(21)
    problem = random_problem(rng, "float32", seqlen_q=seqlen, seqlen_k=seqlen, heads=heads)
    rules = Rules(softmax_scale=1.0, **options)
    sequences = rules.sequences(problem.q, problem.k)
    assert stacks.suit(problem.q, problem.k, rules, sequences) == (stacked and way == "stacks")


def assert_every_head_is_in_one(parts: list[stacks._Stack], sequences: int, kv_heads: int) -> None:
    taken = np.zeros((sequences, kv_heads), int)
    for part in parts:
        taken[part.sequences.numbers, part.kv_heads] += 1
    assert (taken == 1).all()


def packed_zeros(lengths: list[int], heads: int) -> tuple[Array, Rules]:
    """Q, K or V of packed sequences, and their rules."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    rules = Rules(softmax_scale=1.0, cu_seqlens_q=starts, cu_seqlens_k=starts)
    return np.zeros((starts[-1], heads, 8), np.float32), rules


@pytest.mark.parametrize("threads", [1, 2, 5, 8])
def test_every_head_is_in_one_stack(threads: int) -> None:
    q, k = np.zeros((3, 50, 6, 8), np.float32), np.zeros((3, 40, 2, 8), np.float32)
    rules = Rules(softmax_scale=1.0)
    parts = list(stacks._stacks(rules.sequences(q, k), q, k, rules, threads))
    assert_every_head_is_in_one(parts, sequences=3, kv_heads=2)
    assert len(parts) >= min(threads, 3 * 2)


@pytest.mark.parametrize(("threads", "heads"), [(1, 1), (2, 4), (4, 4), (5, 16)])
@pytest.mark.parametrize("own_lengths", [False, True])
def test_stacks_are_larger_for_many_threads(threads: int, heads: int, own_lengths: bool) -> None:
    q = np.zeros((2, 256, 100, 16), np.float32)
    rules = Rules(softmax_scale=1.0, seqused_k=np.full(2, 256, np.int32) if own_lengths else None)
    parts = list(stacks._stacks(rules.sequences(q, q), q, q, rules, threads))
    assert max(part.kv_heads.stop - part.kv_heads.start for part in parts) == heads


@pytest.mark.parametrize("lengths", [[512], [16, 512, 100]], ids=str)
@pytest.mark.parametrize("threads", [4, 5, 8])
def test_stacks_of_packed_sequences_leave_no_thread_idle(threads: int, lengths: list[int]) -> None:
    q, rules = packed_zeros(lengths, heads=8)
    parts = list(stacks._stacks(rules.sequences(q, q), q, q, rules, threads))
    assert_every_head_is_in_one(parts, len(lengths), kv_heads=8)
    assert sum(part.alike.rows == 512 for part in parts) >= threads


@pytest.mark.parametrize(
    ("heads", "seqlen", "threads"), [(255, 64, 1), (256, 64, 4), (1, 1024, 4), (2, 1024, 8), (1, 4096, 32)]
)
def test_threads_are_no_more_than_have_work(
    heads: int, seqlen: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = mock.Mock(wraps=in_threads)
    for module in (stacks, tiles):
        monkeypatch.setattr(module, "in_threads", used)
    monkeypatch.setattr(cpu, "most_threads", lambda: 32)
    rng = np.random.default_rng(22)
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "kv_heads": heads, "head_dim": 8}
    forward(random_problem(rng, "float32", **sizes), causal=False)
    assert used.call_args.args[2] == threads


@pytest.mark.parametrize(
    ("lengths", "heads", "threads", "sizes"),
    [
        ([16384], 1, 4, (256, 1024)),
        ([16384], 1, 5, (512, 2048)),
        ([4096], 1, 8, (512, 2048)),
        ([4096], 1, 9, (256, 4096)),  # eight would have a tile
        ([300, 0, 600], 4, 12, (512, 2048)),
    ],
)
def test_tiles_are_larger_for_many_threads(
    lengths: list[int], heads: int, threads: int, sizes: tuple[int, int]
) -> None:
    q, rules = packed_zeros(lengths, heads)
    shares = list(tiles._shares(rules.sequences(q, q), rules, q, q, q, threads))
    rows = {tile.stop - tile.start for share in shares for _, tile in share.tiles}
    assert (max(rows), {share.kv_tile for share in shares}) == (sizes[0], {sizes[1]})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threads", [4, 16])
def test_many_threads(threads: int, causal: bool) -> None:
    problem = random_problem(np.random.default_rng(31), "float32", seqlen_q=90, seqlen_k=100, heads=4)
    with (
        mock.patch.multiple(tiles, Q_TILE=8, KV_TILE=16),
        mock.patch.multiple(cpu, PARALLEL_SCORES=0, SCORES_OF_THREAD=1, most_threads=lambda: threads),
    ):
        check(problem, causal=causal)


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float32"])
def test_memory_does_not_grow_with_the_square(dtype_name: str) -> None:
    seqlen = 4096
    problem = random_problem(
        np.random.default_rng(14), dtype_name, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16
    )
    tracemalloc.start()
    with mock.patch.object(cpu, "most_threads", return_value=2):  # each of whose threads has tiles of its own
        out, lse = forward(problem, causal=True)
        backward(problem, out, lse, causal=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one_matrix = seqlen * seqlen * np.dtype(np.float32).itemsize
    assert peak < one_matrix / 8


def softmax(x: Array, passes: int) -> Array:
    out = np.full_like(x, np.nan)
    cpu.softmax(x, out, passes)
    return out


def assert_softmax(out: Array, x: Array) -> None:
    dtype_name = str(x.dtype)
    wide = np.float64 if dtype_name == "float64" else np.float32
    exact = reference.softmax(x, judge(dtype_name))
    standard = reference.softmax(x, wide).astype(x.dtype)
    assert_close(out, exact, standard, OUTPUT_FACTOR, "softmax")


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("shape", [(1,), (50,), (9, 16), (8, 17), (2, 3, 11, 33), (3, 0), (0, 4)])
@pytest.mark.usefixtures("small_tiles")
def test_softmax(dtype_name: str, passes: int, shape: tuple[int, ...]) -> None:
    x = (4 * np.random.default_rng(15).standard_normal(shape)).astype(dtype_name)
    assert_softmax(softmax(x, passes), x)


def blas_threads() -> list[int]:
    libraries = threadpoolctl.threadpool_info()
    return [library["num_threads"] for library in libraries if library["user_api"] == "blas"]


def set_blas_threads(number: int) -> None:
    threadpoolctl.threadpool_limits(number, "blas")


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_that_overlap_leave_blas_with_as_many_threads_as_it_had(threads: int) -> None:
    """In between it has one, however many a call has: the bits of a product depend on it."""
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = blas_threads()
        calls = [in_threads(lambda share: share, iter(range(2)), threads) for _ in range(2)]
        for call in calls:
            next(call)
            assert set(blas_threads()) == {1}
        for call in calls:
            list(call)
        assert blas_threads() == before


def test_blas_has_its_threads_again_whichever_thread_is_last() -> None:
    """Though that one did not set the number, and the one that did goes on with something else."""

    def run(call: Iterator[int]) -> list[int]:
        return [*call]

    before = blas_threads()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as last, ThreadPoolExecutor(1) as users:
        users.submit(set_blas_threads, 2).result()
        calls = [in_threads(lambda share: share, iter(range(2)), threads=1) for _ in range(2)]
        for pool, call in zip((first, last), calls, strict=True):
            assert pool.submit(next, call).result() == 0
            assert set(blas_threads()) == {1}
        for pool, call in zip((first, last), calls, strict=True):
            assert pool.submit(run, call).result() == [1]
        assert set(blas_threads()) == {2}
        users.submit(set_blas_threads, before[0]).result()
        assert blas_threads() == before


def test_an_interrupt_at_any_point_leaves_blas_as_it_was() -> None:
    """Python hears of it as a function begins, which may be the one that restores the number."""
    begun = 0

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal begun
        if frame.f_code.co_filename in (threads.__file__, threadpoolctl.__file__):
            begun += 1
            if begun == ending:
                raise KeyboardInterrupt

    with threadpoolctl.threadpool_limits(2, "blas"):
        before, tracing = blas_threads(), sys.gettrace()
        assert list(in_threads(abs, iter(range(2)), threads=1)) == [0, 1]  # finds the library, once
        for ending in itertools.count(1):
            begun = 0
            try:
                sys.settrace(trace)
                assert list(in_threads(abs, iter(range(2)), threads=1)) == [0, 1]
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(tracing)
            assert blas_threads() == before
            if begun < ending:
                break
    assert ending > 5


def test_a_thread_that_outlives_the_main_one_computes() -> None:
    script = """
import threading
from cufa.threads import in_threads
def work():
    threading.main_thread().join()
    print(list(in_threads(str, iter(range(3)), 2)))
threading.Thread(target=work).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['0', '1', '2']\n"


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.usefixtures("small_tiles")
def test_softmax_of_infinite_nan_and_large_values(passes: int) -> None:
    x = np.random.default_rng(16).standard_normal((6, 40)).astype(np.float32)
    x[0] = -np.inf
    x[1, :20] = -np.inf
    x[2, 20:] = -np.inf
    x[3, 35] = np.nan
    x[4] *= 1e30
    out = softmax(x, passes)
    assert np.all(out[0] == 0)
    assert np.isnan(out[3]).all()
    assert_softmax(out, x)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.usefixtures("small_tiles")
def test_softmax_takes_any_strides_and_works_in_place(passes: int) -> None:
    x = np.random.default_rng(17).standard_normal((2, 40, 3, 20)).astype(np.float32)
    expected = softmax(x, passes)
    np.testing.assert_array_equal(softmax(stored(x, "packed"), passes), expected)
    np.testing.assert_array_equal(softmax(stored(x, "bhsd"), passes), expected)
    np.testing.assert_array_equal(softmax(np.asfortranarray(x), passes), expected)
    cpu.softmax(x, x, passes)
    np.testing.assert_array_equal(x, expected)


def test_softmax_refuses_other_passes() -> None:
    x = np.zeros(3)
    with pytest.raises(ValueError, match="passes is 4; it may be 2 or 3"):
        cpu.softmax(x, x, passes=4)


def test_a_child_that_is_forked_amid_a_call_has_blas_as_it_was() -> None:
    """And a lock that a thread of its parent held does not stop it."""

    def computes() -> bool:
        return blas_threads() == before and list(in_threads(str, iter(range(2)), 2)) == ["0", "1"]

    with threadpoolctl.threadpool_limits(2, "blas"):
        before = blas_threads()
        call = in_threads(lambda share: share, iter(range(2)), threads=2)
        next(call)
        with threads._one_blas_thread._lock:
            assert in_child(computes)
        assert set(blas_threads()) == {1}
        assert list(call) == [1]
        assert blas_threads() == before
