"""The command line's check of calls with features: all of their results, and a sample of them."""

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from feature_cases import Case, draw_case, feature_id, sets_of, sets_with_dtypes
from tolerance import DTYPES, Array

import cufa
from cufa.cli import check
from cufa.problem import FLOAT8, INPUT_DTYPES

SETS = sets_of()


def solved(features: frozenset[str], dtype: str) -> tuple[Case, dict[str, Array]]:
    """A case, and what the CPU path makes of it."""
    sizes = {"batch": 3, "seqlen_q": 70, "seqlen_k": 90, "heads": 4, "kv_heads": 2, "head_dim": 12}
    case = draw_case(np.random.default_rng(1), dtype, features, **sizes, head_dim_v=7)
    problem = case.problem
    inputs = problem.q, problem.k, problem.v
    results = {"out": np.zeros_like(problem.dout)}
    results["lse"] = np.zeros(problem.lse_shape, np.float64 if dtype == "float64" else np.float32)
    cufa.attention(*inputs, **case.forward, **results, backend="numpy")
    like = {"q": problem.q, "k": problem.k, "v": problem.v, **case.arrays}
    gradients = {f"d{name}": np.zeros_like(like[name]) for name in ("q", "k", "v", *case.gradients)}
    cufa.attention_backward(problem.dout, *inputs, **results, **case.backward, **gradients, backend="numpy")
    return case, results | gradients


def checked(case: Case, results: dict[str, Array], max_scores: int) -> check.Check:
    rules: dict[str, Any] = {"layout": "bshd", "rng": np.random.default_rng(2), **case.forward}
    inputs = vars(case.problem) | ({} if case.dlse is None else {"dlse": case.dlse})
    with mock.patch.object(check, "MAX_SCORES", max_scores):
        return check.check(inputs, results, **rules)


def test_the_gradient_of_the_lse_counts() -> None:
    case, results = solved(frozenset(("dlse", "dsink")), "float32")
    without = Case(case.problem, case.numbers, case.arrays, None, case.gradients, case.deterministic)
    for max_scores in (2**30, 2000):
        wrong = [each.what for each in checked(without, results, max_scores).comparisons if not each.ok]
        assert wrong == ["dq", "dk", "dsink"]


@pytest.mark.parametrize(
    ("features", "dtype"),
    sets_with_dtypes(),
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else value,
)
def test_what_is_right_passes(features: frozenset[str], dtype: str) -> None:
    case, results = solved(features, dtype)
    for max_scores, coverage in ((2**30, "every element"), (2000, "a random sample")):
        verdict = checked(case, results, max_scores)
        assert verdict.coverage.startswith(coverage)
        assert verdict.ok, [str(each) for each in verdict.comparisons if not each.ok]
        assert [each.what for each in verdict.comparisons] == list(results)


@pytest.mark.parametrize(
    ("features", "dtype"),
    list(zip(SETS, itertools.cycle(DTYPES), strict=False)),
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else value,
)
def test_a_sample_finds_what_is_wrong(features: frozenset[str], dtype: str) -> None:
    case, results = solved(features, dtype)
    for name, result in results.items():
        finite = np.isfinite(result)
        wrong = result.copy()
        wrong[finite] += (0.1 * np.abs(result[finite]).max()).astype(result.dtype)
        verdict = checked(case, results | {name: wrong}, 10000)
        assert not {each.what: each.ok for each in verdict.comparisons}[name], name


def test_the_sample_says_what_it_covers() -> None:
    case, results = solved(frozenset(("dbias", "dsink")), "float32")
    case.arrays["bias"] = np.zeros((70, 90), np.float32)
    results["dbias"] = np.zeros((70, 90), np.float32)
    coverage = checked(case, results, 12 * 4 * 25).coverage
    expected = "4 x 3 of 840 rows, 4 x 2 of 540 keys, 4 x 5 x 5 of the bias's 6,300 elements"
    assert coverage == f"a random sample: {expected}"


@pytest.mark.parametrize("causal", [False, True])
def test_wrong_descales_of_8_bits_are_found(causal: bool) -> None:
    """Rounding changes outputs for 8-bit inputs by 2 or 3 %, and those of few keys by more than of many."""
    rng = np.random.default_rng(4)
    q, k, v = (
        rng.standard_normal((1, 400, 2, 32)).astype(np.float32).astype(INPUT_DTYPES[FLOAT8]) for _ in "qkv"
    )
    right = {f"{name}_descale": np.full((1, 2), 1.1, np.float32) for name in "qkv"}
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True, **right, backend="numpy")
    inputs, results = {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}
    wrong = right | {"v_descale": right["v_descale"] * np.float32(1.15)}
    for max_scores, size in ((2**30, out.size), (50_000, None)):
        with mock.patch.object(check, "MAX_SCORES", max_scores):
            options: dict[str, Any] = {"layout": "bshd", "causal": causal}
            assert check.check(inputs, results, rng=rng, **options, **right).ok
            of_out, of_lse = check.check(inputs, results, rng=rng, **options, **wrong).comparisons
        assert of_out.wrong
        assert of_lse.ok
        assert size in (None, of_out.size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_lse_near_0_may_be_off_by_the_rounding_of_a_sum_near_1(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for scale in rng.uniform(-0.3, 0.3, 300):
        q, k, v = (np.full((1, 1, 1, 1), x, dtype) for x in (scale, 1, 1))
        out, lse = cufa.attention(q, k, v, softmax_scale=1, return_lse=True, backend="numpy")
        inputs, results = {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}
        assert check.check(inputs, results, rng=rng, layout="bshd", softmax_scale=1).ok
        results["lse"] = lse + 8 * np.finfo(dtype).eps
        assert not check.check(inputs, results, rng=rng, layout="bshd", softmax_scale=1).ok
