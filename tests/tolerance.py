"""How far from the truth a result may be: the one rule of every test, on the CPU and on the GPU.

The truth is `cufa.reference`, in float64 (for float64 results in numpy.longdouble). The measure is
what standard attention computed in the same dtype gets wrong: a result may be `OUTPUT_FACTOR` times
as far off, a gradient `GRADIENT_FACTOR` times, and two roundings more. A test should call
`assert_attention` and `assert_gradients`.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401 - makes numpy.dtype("bfloat16") known
import numpy as np
import numpy.typing as npt

from cufa import reference

Array: TypeAlias = npt.NDArray[Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("contiguous", "packed", "bhsd", "reversed")
OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3


@dataclass(frozen=True)
class Problem:
    """q (batch, seqlen_q, heads, head_dim), k and v with kv_heads and seqlen_k, dout like out."""

    q: Array
    k: Array
    v: Array
    dout: Array

    @property
    def dtype_name(self) -> str:
        return str(self.q.dtype)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        batch, seqlen_q, heads, _ = self.q.shape
        return batch, heads, seqlen_q


def random_problem(
    rng: np.random.Generator,
    dtype_name: str,
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    logit_scale: float = 1.0,
) -> Problem:
    """Normal random arrays; `logit_scale` multiplies q, and so the logits."""
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return stored((scale * rng.standard_normal(shape)).astype(dtype_name), layout)

    return Problem(
        q=normal(batch, seqlen_q, heads, head_dim, scale=logit_scale),
        k=normal(batch, seqlen_k, kv_heads, head_dim),
        v=normal(batch, seqlen_k, kv_heads, head_dim_v),
        dout=normal(batch, seqlen_q, heads, head_dim_v),
    )


def stored(values: Array, layout: str) -> Array:
    """The values in memory laid out as one of `LAYOUTS`; what lies between them is NaN."""
    batch, seqlen, heads, head_dim = values.shape
    dtype = values.dtype
    view: Array
    if layout == "contiguous":
        view = np.empty(values.shape, dtype)
    elif layout == "packed":
        view = np.full((batch, seqlen, 3, heads, head_dim), np.nan, dtype)[:, :, 1]
    elif layout == "bhsd":
        view = np.empty((batch, heads, seqlen, head_dim), dtype).transpose(0, 2, 1, 3)
    elif layout == "reversed":
        view = np.empty(values.shape, dtype)[:, ::-1]
    else:
        raise ValueError(f"layout is {layout!r}; it may be one of {LAYOUTS}")
    view[...] = values
    return view


def poisoned(like: Array, layout: str = "contiguous") -> Array:
    """NaN in the shape and dtype of an array, for a result to overwrite."""
    return stored(np.full(like.shape, np.nan, like.dtype), layout)


def assert_attention(
    out: Array,
    lse: Array | None,
    problem: Problem,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> None:
    """Hold out and lse to the rule."""
    inputs = problem.q, problem.k, problem.v
    exact_out, exact_lse = reference.attention(
        *inputs, causal=causal, softmax_scale=softmax_scale, dtype=judge(problem.dtype_name)
    )
    standard_out, standard_lse = standard_attention(problem.dtype_name, *inputs, causal, softmax_scale)
    rounding = _rounding_of_sums(problem, causal, softmax_scale)
    assert_close(out, exact_out, standard_out, OUTPUT_FACTOR, "out", rounding["out"])
    if lse is not None:
        assert_close(lse, exact_lse, standard_lse, OUTPUT_FACTOR, "lse", rounding["lse"])


def assert_gradients(
    gradients: tuple[Array, Array, Array],
    problem: Problem,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> None:
    """Hold (dq, dk, dv) to the rule."""
    inputs = problem.dout, problem.q, problem.k, problem.v
    exact = reference.attention_backward(
        *inputs, causal=causal, softmax_scale=softmax_scale, dtype=judge(problem.dtype_name)
    )
    standard = standard_attention_backward(problem.dtype_name, *inputs, causal, softmax_scale)
    rounding = _rounding_of_sums(problem, causal, softmax_scale)
    for i, what in enumerate(("dq", "dk", "dv")):
        assert_close(gradients[i], exact[i], standard[i], GRADIENT_FACTOR, what, rounding[what])


def assert_close(
    actual: Array,
    exact: Array,
    baseline: Array,
    factor: float,
    what: str,
    rounding_of_sums: float = 0.0,
) -> None:
    """Fail if max |actual - exact| > factor * max |baseline - exact| + 2 * rounding.

    The rounding is that of the truth itself: half a unit in the last place of its largest element,
    in the dtype of `actual`, and the rounding of what that element is a sum of. Without them, a
    baseline that happens to be exact would leave no room at all. Where exact is NaN or infinite,
    actual must be the same; anywhere else NaN and infinity fail.
    """
    assert actual.shape == exact.shape == baseline.shape, (
        f"{what} has shape {actual.shape}, exact {exact.shape}, baseline {baseline.shape}"
    )
    finite = np.isfinite(exact)
    error = _distance(actual, exact)
    rounding = rounding_of_sums + _half_ulp(np.abs(exact).max(where=finite, initial=0), actual.dtype)
    standard = _distance(baseline, exact).max(where=finite, initial=0)
    allowed = factor * standard + 2 * rounding
    good = np.where(finite, error <= allowed, error == 0)
    if good.all():
        return
    worst = np.unravel_index(np.argmax(np.where(good, -1, error)), error.shape)
    raise AssertionError(
        f"{what}{[int(i) for i in worst]} is {actual[worst]}, should be {exact[worst]}: "
        f"off by {error[worst]:.3g}, allowed {allowed:.3g} = {factor} * {standard:.3g} (standard "
        f"{actual.dtype.name} attention) + 2 * {rounding:.3g} (rounding); "
        f"{np.count_nonzero(~good)} of {good.size} elements are too far off"
    )


def judge(dtype_name: str) -> npt.DTypeLike:
    """The dtype in which the truth about a dtype is computed."""
    return np.longdouble if dtype_name == "float64" else np.float64


def standard_attention(
    dtype_name: str,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    softmax_scale: float | None = None,
) -> tuple[Array, Array]:
    """Attention by whole matrices in one dtype: out in that dtype, lse as kernels have it.

    S, P and O are each rounded to the dtype; products and sums are float32 (float64 for float64),
    as in tensor cores and BLAS. NaN and Inf count as 0: it is rounding that is measured.
    """
    rounded = _Rounded(dtype_name)
    Q, K, V = (_by_head(x, q.shape[2], rounded.sums) for x in (q, k, v))
    P, lse = _softmax_and_lse(rounded(_scores(Q, K, causal, softmax_scale)))
    O = rounded(rounded(P) @ V)  # noqa: E741
    return O.transpose(0, 2, 1, 3).astype(dtype_name), lse


def standard_attention_backward(
    dtype_name: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    softmax_scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients by whole matrices in one dtype: P, dP, dS and dq, dk, dv are each rounded to it."""
    rounded = _Rounded(dtype_name)
    Q, K, V, dO = (_by_head(x, q.shape[2], rounded.sums) for x in (q, k, v, dout))
    P, _ = _softmax_and_lse(rounded(_scores(Q, K, causal, softmax_scale)))
    P = rounded(P)
    dP = rounded(dO @ _t(V))
    dS = rounded(P * (dP - (P * dP).sum(axis=3, keepdims=True)))
    scale = _scale(softmax_scale, q)
    dq = _by_position(scale * (dS @ K), q.shape)
    dk = _by_position(scale * (_t(dS) @ Q), k.shape)
    dv = _by_position(_t(P) @ dO, v.shape)
    return dq.astype(dtype_name), dk.astype(dtype_name), dv.astype(dtype_name)


def _rounding_of_sums(problem: Problem, causal: bool, softmax_scale: float | None) -> dict[str, float]:
    """How far rounding alone moves each result of any algorithm, however well it goes about it.

    The matrices that products take are rounded to the dtype of the problem. S, LSE and the partial
    sums are rounded to the dtype of the sums; S and LSE move P = exp(S - LSE) relative to P.
    Roundings are independent of each other, so it is their squares that add up.
    """
    rounded = _Rounded(problem.dtype_name)
    heads, kv_heads = problem.q.shape[2], problem.k.shape[2]
    arrays = problem.q, problem.k, problem.v, problem.dout
    Q, K, V, dO = (_by_head(x, heads, np.float64) for x in arrays)
    S = _scores(Q, K, causal, softmax_scale)
    P, lse = _softmax_and_lse(S)
    scale2 = _scale(softmax_scale, problem.q) ** 2
    size_S, size_lse = (np.where(np.isneginf(x), 0, np.abs(x)) for x in (S, lse[..., None]))
    size_S += np.sqrt(scale2 * (Q**2 @ _t(K**2)))
    unit2, sum_unit2 = (_half_ulp(1, dtype) ** 2 for dtype in (rounded.dtype, rounded.sums))
    exponent2 = sum_unit2 * (size_S + size_lse) ** 2

    def P2(terms: int) -> Array:  # noqa: N802
        return P**2 * (unit2 + exponent2 + terms * sum_unit2)

    queries, keys, head_dim_v = Q.shape[2] * (heads // kv_heads), K.shape[2], V.shape[3]
    dP2 = dO**2 @ _t(V**2) + (dO**2 * (P @ V) ** 2).sum(axis=3, keepdims=True)
    dq2 = (P2(head_dim_v + keys) * dP2) @ K**2
    dk2 = _t(P2(head_dim_v + queries) * dP2) @ Q**2
    squares = {
        "out": P2(keys) @ V**2,
        "lse": exponent2,
        "dq": scale2 * dq2,
        "dk": scale2 * _by_position(dk2, problem.k.shape),
        "dv": _by_position(_t(P2(queries)) @ dO**2, problem.v.shape),
    }
    return {what: math.sqrt(square.max(initial=0)) for what, square in squares.items()}


class _Rounded:
    """Rounds to one dtype what is kept in the dtype that products are summed in."""

    def __init__(self, dtype_name: str) -> None:
        self.dtype = np.dtype(dtype_name)
        self.sums = np.dtype(np.float64 if dtype_name == "float64" else np.float32)

    def __call__(self, x: Array) -> Array:
        return x.astype(self.dtype).astype(self.sums)


def _by_head(x: Array, heads: int, dtype: npt.DTypeLike) -> Array:
    """(batch, heads, seqlen, head_dim) with KV heads repeated, and 0 for NaN and Inf."""
    finite = np.where(np.isfinite(x), x, 0).astype(dtype)
    return np.transpose(np.repeat(finite, heads // x.shape[2], axis=2), (0, 2, 1, 3))


def _by_position(x: Array, shape: tuple[int, ...]) -> Array:
    """(batch, seqlen, heads, head_dim) again, summed over the heads that share a KV head."""
    batch, seqlen, heads, head_dim = shape
    group = x.shape[1] // heads
    by_group = x.reshape(batch, heads, group, seqlen, head_dim)
    return np.transpose(by_group.sum(axis=2), (0, 2, 1, 3))


def _t(x: Array) -> Array:
    return np.swapaxes(x, 2, 3)


def _scores(Q: Array, K: Array, causal: bool, softmax_scale: float | None) -> Array:
    S = _scale(softmax_scale, Q) * (Q @ _t(K))
    if causal:
        seqlen_q, seqlen_k = S.shape[2:]
        visible = np.tril(np.ones((seqlen_q, seqlen_k), bool), seqlen_k - seqlen_q)
        S = np.where(visible, S, -np.inf)
    return S


def _softmax_and_lse(S: Array) -> tuple[Array, Array]:
    m = S.max(axis=3, keepdims=True, initial=-np.inf)
    m = np.where(np.isneginf(m), 0, m)
    exp = np.exp(S - m)
    total = exp.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):  # log(0) of an empty row
        lse = m + np.log(total)
    return exp / np.where(total == 0, 1, total), lse[..., 0]


def _scale(softmax_scale: float | None, q: Array) -> float:
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


def _distance(actual: Array, exact: Array) -> Array:
    """|actual - exact|; 0 where both are NaN or the same infinity, infinite where one is NaN."""
    actual = actual.astype(np.longdouble)
    exact = exact.astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        distance = np.abs(actual - exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    return np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))


def _half_ulp(magnitude: Any, dtype: npt.DTypeLike) -> float:
    return float(np.spacing(np.asarray(magnitude).astype(dtype))) / 2
