"""How far from the truth a result may be: the one rule of the tests and of the command line.

The truth is `cufa.reference`, in float64 (for float64 results in numpy.longdouble). The measure is what
standard attention computed in the same dtype gets wrong: a result may be `OUTPUT_FACTOR` times as far
off, a gradient `GRADIENT_FACTOR` times, and two roundings more.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.problem import DTYPES, accumulator_dtype

Array: TypeAlias = npt.NDArray[Any]

OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3


@dataclass(frozen=True)
class Comparison:
    """How far one result is from the truth, and from what it may be.

    `error` is the largest |actual - exact|, infinite where one of them alone is NaN or infinite.
    `standard` is that of standard attention, `rounding` that of the truth itself; `wrong` of the `size`
    elements are too far off. `worst` is the element that is furthest off, in words.
    """

    what: str
    dtype: str
    error: float
    standard: float
    rounding: float
    factor: float
    wrong: int
    size: int
    worst: str

    @property
    def ok(self) -> bool:
        """Whether every element is as near to the truth as it must be."""
        return self.wrong == 0

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return self.factor * self.standard + 2 * self.rounding

    def __str__(self) -> str:
        """The worst element and the arithmetic of what is allowed."""
        return (
            f"{self.worst}: off by {self.error:.3g}, allowed {self.allowed:.3g} = {self.factor} * "
            f"{self.standard:.3g} (standard {self.dtype} attention) + 2 * {self.rounding:.3g} (rounding); "
            f"{self.wrong} of {self.size} elements are too far off"
        )


def compare(
    actual: Array,
    exact: Array,
    standard: Array,
    factor: float,
    what: str,
    rounding_of_sums: float = 0.0,
) -> Comparison:
    """Hold `actual` to |actual - exact| <= factor * max |standard - exact| + 2 * rounding.

    The rounding is that of the truth itself: half a unit in the last place of its largest element, in the
    dtype of `actual`, and the rounding of what that element is a sum of. Without them, a baseline that
    happens to be exact would leave no room at all. Where exact is NaN or infinite, actual must be the
    same; anywhere else NaN and infinity are wrong.

    Args:
        actual: what was computed, any shape.
        exact: the truth, of the same shape.
        standard: what standard attention in the dtype of `actual` gets, of the same shape.
        factor: how many times as far off as `standard` it may be.
        what: its name, for messages.
        rounding_of_sums: from `rounding_of_sums`.

    Raises:
        ValueError: the shapes differ.
    """
    if not actual.shape == exact.shape == standard.shape:
        raise ValueError(
            f"{what} has shape {actual.shape}, the truth {exact.shape}, standard attention {standard.shape}"
        )
    finite = np.isfinite(exact)
    error = _distance(actual, exact)
    rounding = rounding_of_sums + _half_ulp(np.abs(exact).max(where=finite, initial=0), actual.dtype)
    off = float(_distance(standard, exact).max(where=finite, initial=0))
    good = np.where(finite, error <= factor * off + 2 * rounding, error == 0)
    worst = what
    if good.size:
        index = np.unravel_index(np.argmax(np.where(good, -1, error)), error.shape)
        worst = f"{what}{[int(i) for i in index]} is {actual[index]}, should be {exact[index]}"
    return Comparison(
        what=what,
        dtype=actual.dtype.name,
        error=float(error.max(initial=0)),
        standard=off,
        rounding=rounding,
        factor=factor,
        wrong=int(np.count_nonzero(~good)),
        size=good.size,
        worst=worst,
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

    S, P and O are each rounded to the dtype; products and sums are float32 (float64 for float64), as in
    tensor cores and BLAS. NaN and Inf count as 0: it is rounding that is measured. Shapes are those of
    `cufa.reference.attention`.
    """
    rounded = Rounded(dtype_name)
    Q, K, V = (_by_head(x, q.shape[2], rounded.sums) for x in (q, k, v))
    P, lse = _softmax_and_lse(rounded(_scores(Q, K, causal, softmax_scale)))
    O = rounded(rounded(P) @ V)  # noqa: E741
    return O.transpose(0, 2, 1, 3).astype(rounded.dtype), lse


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
    rounded = Rounded(dtype_name)
    Q, K, V, dO = (_by_head(x, q.shape[2], rounded.sums) for x in (q, k, v, dout))
    P, _ = _softmax_and_lse(rounded(_scores(Q, K, causal, softmax_scale)))
    P = rounded(P)
    dP = rounded(dO @ _t(V))
    dS = rounded(P * (dP - (P * dP).sum(axis=3, keepdims=True)))
    scale = _scale(softmax_scale, q)
    dq = _by_position(scale * (dS @ K), q.shape)
    dk = _by_position(scale * (_t(dS) @ Q), k.shape)
    dv = _by_position(_t(P) @ dO, v.shape)
    return dq.astype(rounded.dtype), dk.astype(rounded.dtype), dv.astype(rounded.dtype)


def rounding_of_sums(
    dtype_name: str,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    causal: bool,
    softmax_scale: float | None = None,
) -> dict[str, float]:
    """How far rounding alone moves each result of any algorithm, however well it goes about it.

    The roundings of the terms of a sum are independent, so it is their squares that add up.

    Returns:
        A figure for each of out, lse, dq, dk and dv.
    """
    Q, K, V, dO = (_by_head(x, q.shape[2], np.float64) for x in (q, k, v, dout))
    scale = _scale(softmax_scale, q)
    S = _scores(Q, K, causal, softmax_scale)
    P, lse = _softmax_and_lse(S)
    exponent2, P2, dS2 = squared_roundings(
        Rounded(dtype_name), Q, K, V, P @ V, dO, S, lse[..., None], P, scale
    )
    squares = {
        "out": P2 @ V**2,
        "lse": exponent2,
        "dq": scale**2 * (dS2 @ K**2),
        "dk": scale**2 * _by_position(_t(dS2) @ Q**2, k.shape),
        "dv": _by_position(_t(P2) @ dO**2, v.shape),
    }
    return {what: math.sqrt(square.max(initial=0)) for what, square in squares.items()}


def squared_roundings(
    rounded: Rounded,
    Q: Array,
    K: Array,
    V: Array,
    O: Array,  # noqa: E741
    dO: Array,
    S: Array,
    lse: Array,
    P: Array,
    scale: float,
) -> tuple[Array, Array, Array]:
    """What rounding moves S - LSE, P and dS by at most, element by element, squared.

    The matrices that products take are rounded to the dtype of the problem; S and LSE are rounded to the
    dtype of the sums, which moves P = exp(S - LSE) by as much relative to P.

    Args:
        rounded: the dtypes.
        Q: (..., rows, head_dim), float64, as are all of these.
        K: (..., keys, head_dim).
        V: (..., keys, value_dim).
        O: (..., rows, value_dim).
        dO: (..., rows, value_dim).
        S: (..., rows, keys); -inf where it is masked.
        lse: (..., rows, 1).
        P: (..., rows, keys).
        scale: the factor on Q K^T.
    """
    size_S, size_lse = (np.where(np.isneginf(x), 0, np.abs(x)) for x in (S, lse))
    size_S += scale * np.sqrt(Q**2 @ _t(K**2))
    exponent2 = (_half_epsilon(rounded.sums) * (size_S + size_lse)) ** 2
    P2 = P**2 * (_half_epsilon(rounded.dtype) ** 2 + exponent2)
    dS2 = P2 * (dO**2 @ _t(V**2) + (dO**2 * O**2).sum(axis=-1, keepdims=True))
    return exponent2, P2, dS2


class Rounded:
    """Rounds to one dtype what is kept in the dtype that products are summed in."""

    def __init__(self, dtype_name: str) -> None:
        self.dtype = DTYPES[dtype_name]
        self.sums = accumulator_dtype(dtype_name)

    def __call__(self, x: Array) -> Array:
        """`x` as it is after it was stored in the dtype."""
        return x.astype(self.dtype).astype(self.sums)


def _by_head(x: Array, heads: int, dtype: npt.DTypeLike) -> Array:
    """(batch, heads, seqlen, head_dim) with KV heads repeated, and 0 for NaN and Inf."""
    finite = np.where(np.isfinite(x), x, 0).astype(dtype)
    group = heads // x.shape[2] if x.shape[2] else 1
    return np.transpose(np.repeat(finite, group, axis=2), (0, 2, 1, 3))


def _by_position(x: Array, shape: tuple[int, ...]) -> Array:
    """(batch, seqlen, heads, head_dim) again, summed over the heads that share a KV head."""
    batch, seqlen, heads, head_dim = shape
    group = x.shape[1] // heads if heads else 1
    shared = x.transpose(0, 2, 1, 3).reshape(batch, seqlen, heads, group, head_dim)
    summed: Array = np.sum(shared, axis=3)
    return summed


def _t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


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
        distance: Array = np.abs(actual - exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    distance[same] = 0
    distance[np.isnan(distance)] = np.inf
    return distance


def _half_ulp(magnitude: Any, dtype: npt.DTypeLike) -> float:
    return float(np.spacing(np.asarray(magnitude).astype(dtype))) / 2


def _half_epsilon(dtype: npt.DTypeLike) -> float:
    return _half_ulp(1, dtype)
