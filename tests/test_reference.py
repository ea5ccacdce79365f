"""The reference against finite differences and plain Python loops, and the error rule itself."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerance import (
    DTYPES,
    Array,
    Problem,
    assert_attention,
    assert_close,
    assert_gradients,
    random_problem,
    standard_attention,
    standard_attention_backward,
)

from cufa import reference

SEQLENS = [
    pytest.param((4, 4), id="square"),
    pytest.param((2, 5), id="more keys"),
    pytest.param((5, 2), id="empty rows under causal"),
    pytest.param((1, 4), id="one query"),
]


def small_problem(seqlens: tuple[int, int], batch: int) -> Problem:
    seqlen_q, seqlen_k = seqlens
    return random_problem(
        np.random.default_rng(1),
        "float64",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        heads=4,
        kv_heads=2,
        head_dim=3,
        head_dim_v=2,
    )


def loop_attention(q: Array, k: Array, v: Array, causal: bool, softmax_scale: float) -> tuple[Array, Array]:
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    out = np.zeros((batch, seqlen_q, heads, head_dim_v))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    for b, i, h in np.ndindex(batch, seqlen_q, heads):
        kv = h // (heads // kv_heads)
        seen = [j for j in range(seqlen_k) if not causal or j - seqlen_k <= i - seqlen_q]
        weights = []
        for j in seen:
            dot = sum(float(q[b, i, h, d]) * float(k[b, j, kv, d]) for d in range(head_dim))
            weights.append(math.exp(softmax_scale * dot))
        if seen:
            lse[b, h, i] = math.log(sum(weights))
        for weight, j in zip(weights, seen, strict=True):
            for d in range(head_dim_v):
                out[b, i, h, d] += weight / sum(weights) * float(v[b, j, kv, d])
    return out, lse


def finite_difference(loss: Callable[[], Any], x: Array) -> Array:
    """The gradient of loss() by x, which it reads, by central differences in long double."""
    step = np.longdouble(1e-6)
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + step
        above = loss()
        x[index] = kept - step
        below = loss()
        x[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.3, -1.5])
def test_attention_is_the_loop(seqlens: tuple[int, int], causal: bool, softmax_scale: float | None) -> None:
    problem = small_problem(seqlens, batch=2)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    scale = 1 / math.sqrt(3) if softmax_scale is None else softmax_scale
    expected_out, expected_lse = loop_attention(q, k, v, causal, scale)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_gradients_are_finite_differences(
    seqlens: tuple[int, int], causal: bool, softmax_scale: float | None
) -> None:
    problem = small_problem(seqlens, batch=1)
    arrays = problem.dout, problem.q, problem.k, problem.v
    dout, q, k, v = (x.astype(np.longdouble) for x in arrays)

    def loss() -> Any:
        out, _ = reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=np.longdouble)
        return (dout * out).sum()

    gradients = reference.attention_backward(dout, q, k, v, causal=causal, softmax_scale=softmax_scale)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.dtype == np.float64
        np.testing.assert_allclose(
            gradient, finite_difference(loss, x).astype(np.float64), rtol=1e-9, atol=1e-10
        )


def test_rows_that_see_nothing_are_zero() -> None:
    problem = random_problem(np.random.default_rng(2), "float64", seqlen_q=5, seqlen_k=2)
    out, lse = reference.attention(problem.q, problem.k, problem.v, causal=True)
    dq, _, _ = reference.attention_backward(problem.dout, problem.q, problem.k, problem.v, causal=True)
    assert np.all(out[:, :3] == 0)
    assert np.all(dq[:, :3] == 0)
    assert np.all(lse[:, :, :3] == -np.inf)
    assert np.all(np.isfinite(lse[:, :, 3:]))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_zero(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    problem = random_problem(
        np.random.default_rng(3), "float32", seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=4
    )
    inputs = problem.q, problem.k, problem.v
    out, lse = reference.attention(*inputs, causal=causal)
    gradients = reference.attention_backward(problem.dout, *inputs, causal=causal)
    assert out.shape == problem.q.shape
    assert np.all(out == 0)
    assert lse.shape == (1, 1, seqlen_q)
    assert np.all(lse == -np.inf)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert np.all(gradient == 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_masked_contributes_nothing(bad: float) -> None:
    """Row i sees keys 0 to i, so only rows after a bad one may know of it."""
    problem = random_problem(np.random.default_rng(4), "float64", seqlen_q=6, seqlen_k=6)
    inputs = problem.q, problem.k, problem.v
    clean_out, clean_lse = reference.attention(*inputs, causal=True)
    clean_dq, clean_dk, clean_dv = reference.attention_backward(problem.dout, *inputs, causal=True)

    problem.k[:, 4] = problem.v[:, 4] = bad
    out, lse = reference.attention(*inputs, causal=True)
    dq, _, _ = reference.attention_backward(problem.dout, *inputs, causal=True)
    np.testing.assert_array_equal(out[:, :4], clean_out[:, :4])
    np.testing.assert_array_equal(lse[:, :, :4], clean_lse[:, :, :4])
    np.testing.assert_array_equal(dq[:, :4], clean_dq[:, :4])
    assert not np.isfinite(out[:, 4:]).any()

    problem = random_problem(np.random.default_rng(4), "float64", seqlen_q=6, seqlen_k=6)
    problem.q[:, 1] = problem.dout[:, 1] = bad
    _, dk, dv = reference.attention_backward(problem.dout, problem.q, problem.k, problem.v, causal=True)
    np.testing.assert_array_equal(dk[:, 2:], clean_dk[:, 2:])
    np.testing.assert_array_equal(dv[:, 2:], clean_dv[:, 2:])
    assert not np.isfinite(dk[:, :2]).any()


def test_large_logits_do_not_overflow() -> None:
    problem = random_problem(np.random.default_rng(5), "float64", seqlen_q=5, seqlen_k=7, logit_scale=1e4)
    out, lse = reference.attention(problem.q, problem.k, problem.v)
    assert np.isfinite(out).all()
    assert lse.max() > math.log(np.finfo(np.float64).max)


def test_dtype_is_that_of_the_computation() -> None:
    problem = random_problem(np.random.default_rng(6), "bfloat16", seqlen_q=3, seqlen_k=4)
    inputs = problem.q, problem.k, problem.v
    for dtype in (np.float32, np.float64, np.longdouble):
        outputs = reference.attention(*inputs, dtype=dtype)
        gradients = reference.attention_backward(problem.dout, *inputs, dtype=dtype)
        assert {x.dtype for x in (*outputs, *gradients)} == {np.dtype(dtype)}


def test_softmax() -> None:
    x = np.array([[1.0, 2.0, 4.0], [-np.inf, 0.0, -np.inf], [-np.inf] * 3, [1e300, 0.0, -1e300]])
    e1, e2, e4 = math.exp(1), math.exp(2), math.exp(4)
    total = e1 + e2 + e4
    expected = np.array([[e1 / total, e2 / total, e4 / total], [0, 1, 0], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(reference.softmax(x), expected, rtol=1e-15)
    assert np.isnan(reference.softmax(np.array([1.0, np.nan]))).all()
    assert reference.softmax(np.empty((3, 0))).shape == (3, 0)
    assert reference.softmax(x, dtype=np.float32).dtype == np.float32


def test_masked_matmul_writes_into_out() -> None:
    rng = np.random.default_rng(7)
    visible = np.tril(np.ones((3, 3), bool))
    weights = np.where(visible, rng.standard_normal((3, 3)), 0)
    values = rng.standard_normal((3, 2))
    expected = weights @ values
    values[2, 1] = np.nan
    expected[2, 1] = np.nan
    out = np.empty((3, 2))
    assert reference.masked_matmul(weights, values, visible, out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-14)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_the_error_rule_passes_standard_attention_and_fails_what_is_worse(dtype_name: str) -> None:
    rng = np.random.default_rng(8)
    problem = random_problem(rng, dtype_name, seqlen_q=30, seqlen_k=40, heads=4, kv_heads=2)
    inputs = problem.q, problem.k, problem.v
    out, lse = standard_attention(dtype_name, *inputs, causal=True)
    gradients = standard_attention_backward(dtype_name, problem.dout, *inputs, causal=True)
    assert_attention(out, lse, problem, causal=True)
    assert_gradients(gradients, problem, causal=True)

    with pytest.raises(AssertionError, match=r"^out\[.* is .*, should be .*: off by"):
        assert_attention(out, lse, problem, causal=False)
    with pytest.raises(AssertionError, match=r"^dq\["):
        assert_gradients(gradients, problem, causal=False)
    worst = np.unravel_index(np.argmax(np.abs(out)), out.shape)
    out[worst] *= 1.1
    with pytest.raises(AssertionError, match=r"^out\[.*; 1 of 7680 elements are too far off$"):
        assert_attention(out, lse, problem, causal=True)


@pytest.mark.parametrize(
    ("actual", "exact"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (-np.inf, np.inf)]
)
def test_the_error_rule_fails_nan_and_infinity_in_the_wrong_place(actual: float, exact: float) -> None:
    ones = np.ones(3)
    with pytest.raises(AssertionError, match=r"^x\[1\]"):
        assert_close(np.array([1, actual, 1]), np.array([1, exact, 1]), ones, 1e9, "x")
    same = np.array([1, exact, 1])
    assert_close(same, same, ones, 2, "x")


def test_the_error_rule_leaves_room_for_rounding_only() -> None:
    exact = np.array([1 + 2.0**-25])
    assert_close(np.array([1.0], np.float32), exact, exact, 2, "x")
    with pytest.raises(AssertionError, match="off by"):
        assert_close(np.array([1 + 2.0**-22], np.float32), exact, exact, 2, "x")
