"""How much rounding alone changes the results of attention, whatever the algorithm."""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import reference
from cufa.problem import FLOAT8, INPUT_DTYPES, accumulator_dtype, four_axes
from cufa.score_mod import ElementSlope

Array: TypeAlias = npt.NDArray[Any]

TF32_MANTISSA_BITS = 10
# 8-bit weights are rounded relative to the largest weight known by then, up to this many times the largest.
FLOAT8_LARGEST_WEIGHT = 4
# Hopper sums 8-bit products with this error, relative to the largest term; it shows in the LSE.
FLOAT8_SUM_ERROR = 2.0**-12


@np.errstate(all="ignore")
def rounding_of_sums(
    dtype_name: str,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    precision: str = "ieee",
    dlse: Array | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_mod: bool = False,
    **rules: Any,
) -> dict[str, Any]:
    """Estimate how much rounding alone changes each result, for any algorithm.

    The roundings of the terms of a sum are independent, so their squares add up. The arguments are those of
    `cufa.reference.attention_backward`.

    Returns:
        A number for each of out, lse, dq, dk and dv and, if requested, dbias, dsink and dscore_mod[i]: what
        `largest_or_each` makes of its elements.
    """
    q, k, v, dout = (x.astype(np.float64) for x in finite(q, k, v, dout))
    rules = with_finite_bias(rules)
    rounded = Rounded(dtype_name, precision)
    squares: dict[str, Any] = {"lse": np.zeros(())}
    squares |= {what: np.zeros(x.shape) for what, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}
    if return_dbias:
        squares["dbias"] = np.zeros(four_axes(rules["bias"].shape))
    if return_dsink:
        squares["dsink"] = np.zeros(q.shape[-2])
    if return_dscore_mod:
        squares |= {f"d{name}": np.zeros(x.shape) for name, x in differentiable_arrays(rules).items()}
    for head in reference.Rules(**rules).heads(q, k):
        Q, K, V, dO = q[head.queries], k[head.keys], v[head.keys], dout[head.queries]
        S, slopes = head.scores(Q, K)
        P, lse = head.softmax(S)
        dL = np.zeros_like(lse) if dlse is None else dlse[head.lse].astype(np.float64)
        of_head = squared_roundings(rounded, head, Q, K, V, head.output(P, V), dO, lse, dL)
        squares["lse"] = np.maximum(squares["lse"], of_head["lse"].max(initial=0))
        squares["out"][head.queries] = of_head["out"]
        squares["dq"][head.queries] = of_head["dq"]
        squares["dk"][head.keys] += of_head["dk"]
        squares["dv"][head.keys] += of_head["dv"]
        if return_dbias:
            head.add_as_broadcast(of_head["dbias"], squares["dbias"])
        if return_dsink:
            squares["dsink"][head.number] += of_head["dsink"].sum()
        for name, slope, indices in slopes.elements if return_dscore_mod else ():
            ElementSlope(name, slope**2, indices).add_to(
                squares[f"d{name}"], of_head["dscore_mod"], head.visible
            )
    return {what: largest_or_each(dtype_name, what, square) for what, square in squares.items()}


def largest_or_each(dtype_name: str, what: str, squares: Array) -> Any:
    """How much rounding changes the elements of a result: the most that it changes one.

    Of an output for 8-bit inputs, an array: how much it changes each. There is no standard attention that
    says how large errors are, and by the few weights of a causal row's first keys they are 30 times as large
    as by many.
    """
    if dtype_name == FLOAT8 and what == "out":
        return np.sqrt(np.where(np.isfinite(squares), squares, 0))
    return math.sqrt(np.max(squares, initial=0, where=np.isfinite(squares)))


def squared_roundings(
    rounded: Rounded,
    head: reference.Head,
    Q: Array,
    K: Array,
    V: Array,
    O: Array,  # noqa: E741
    dO: Array,
    lse: Array,
    dlse: Array,
) -> dict[str, Array]:
    """Compute the largest squared change by rounding of every element.

    Operands of products are rounded to the dtype of the problem, or to tf32. S and LSE are rounded to the
    dtype of sums, which changes P = exp(S - LSE) by as much relative to P.

    Args:
        rounded: the dtypes.
        head: the rows and keys.
        Q: (rows, head_dim), float64, as are all others.
        K: (keys, head_dim).
        V: (keys, value_dim).
        O: (rows, value_dim).
        dO: (rows, value_dim).
        lse: (rows,).
        dlse: (rows,).

    Returns:
        A matrix for each of out, dq, dk and dv; for "lse" the change of S - LSE; for "dbias" and "dsink" the
        contribution of each score and each row; for "dscore_mod" the change of a new score's gradient.
    """
    S, slopes = head.scores(Q, K)
    lse, dlse = lse[:, None], dlse[:, None]
    size_lse, size_S = (np.where(np.isneginf(x), 0, np.abs(x)) for x in (lse, S))
    size_product = abs(head.scale) * np.sqrt(Q**2 @ K.T**2)
    exponent2 = (half_epsilon(rounded.sums) * (size_S + size_product + size_lse)) ** 2
    exponent2 += 2 * (rounded.input_error * size_product) ** 2
    exponent2 *= np.maximum(1, slopes.modified**2)
    P = head.probabilities(S, lse)
    P2 = P**2 * (rounded.error**2 + exponent2)
    if rounded.least_error:
        P2 += (rounded.least_error * P.max(axis=1, keepdims=True, initial=0)) ** 2 * (P > 0)
    weights2 = P2 * head.kept**2
    D2 = (dO**2 * O**2).sum(axis=1, keepdims=True) + dlse**2
    dmodified2 = P2 * (head.kept**2 * (dO**2 @ V.T**2) + D2)
    dS2 = dmodified2 * slopes.modified**2
    # The slope is 1 - tanh^2, and tanh is rounded.
    dproduct2 = np.square(head.scale) * dS2 * (slopes.capped**2 + (2 * (1 - slopes.capped)) ** 2)
    sink2 = (half_epsilon(rounded.sums) * (np.abs(head.sink) + size_lse)) ** 2
    sink2 = head.sink_probability(lse) ** 2 * (rounded.error**2 + sink2)
    return {
        "out": weights2 @ V**2,
        "lse": exponent2,
        "dq": dproduct2 @ K**2,
        "dk": dproduct2.T @ Q**2,
        "dv": weights2.T @ dO**2,
        "dbias": dS2,
        "dsink": sink2 * D2,
        "dscore_mod": dmodified2,
    }


class Rounded:
    """Rounds to one dtype, or to tf32; values keep the dtype in which products are summed.

    `error` is the largest relative error of this rounding, `input_error` that of rounding the inputs.
    8-bit weights have at least an error of `least_error` times the largest of their row.
    """

    def __init__(self, dtype_name: str, precision: str = "ieee") -> None:
        self.dtype = INPUT_DTYPES[dtype_name]
        self.sums = accumulator_dtype(dtype_name)
        self.tf32 = precision == "tf32"
        self.error = 2.0**-TF32_MANTISSA_BITS / 2 if self.tf32 else half_epsilon(self.dtype)
        self.input_error = self.error if self.tf32 else 0.0
        self.least_error = FLOAT8_LARGEST_WEIGHT * half_ulp(0, self.dtype) if dtype_name == FLOAT8 else 0.0

    def __call__(self, x: Array) -> Array:
        """`x` after being stored in the dtype."""
        if self.tf32:
            return _to_tf32(x.astype(self.sums))
        return x.astype(self.dtype).astype(self.sums)


def _to_tf32(x: Array) -> Array:
    """Round to the nearest number with tf32's mantissa; ties away from 0, like operands of tensor cores."""
    dropped = np.finfo(np.float32).nmant - TF32_MANTISSA_BITS
    half = np.uint32(1 << (dropped - 1))
    bits = x.view(np.uint32) + np.where(np.isfinite(x), half, np.uint32(0))
    rounded: Array = (bits & ~np.uint32((1 << dropped) - 1)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def finite(*arrays: Array) -> list[Array]:
    """Replace NaN and Inf by 0."""
    return [np.where(np.isfinite(x), x, np.zeros((), x.dtype)) for x in arrays]


def with_finite_bias(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and +Inf in the bias by 0; -Inf may be intended."""
    bias = rules.get("bias")
    if bias is None:
        return dict(rules)
    return {**rules, "bias": np.where(np.isnan(bias) | np.isposinf(bias), np.zeros((), bias.dtype), bias)}


def rounding_of_lse(dtype_name: str, lse: Array) -> float:
    """The extra rounding of an LSE: of scores that tensor cores sum from 8-bit products, or of a sum near 1.

    The logarithm of a sum is off by the sum's relative error, however small the logarithm is. Where an LSE is
    of size 1 or more, its own rounding is as large.
    """
    largest = float(np.abs(lse).max(where=np.isfinite(lse), initial=0))
    if dtype_name == FLOAT8:
        return FLOAT8_SUM_ERROR * max(1, largest)
    return half_epsilon(accumulator_dtype(dtype_name)) if largest < 1 else 0.0


def differentiable_arrays(rules: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a score_mod that have gradients, by the names they have in a call."""
    score_mod = rules.get("score_mod")
    return {} if score_mod is None else score_mod.differentiable


@np.errstate(all="ignore")
def half_ulp(magnitude: Any, dtype: npt.DTypeLike) -> Any:
    """The largest rounding error of a number of this size, or of each of an array."""
    ulp = np.spacing(np.asarray(magnitude).astype(dtype)).astype(np.float64)
    return ulp / 2 if np.ndim(magnitude) else float(ulp) / 2


def half_epsilon(dtype: npt.DTypeLike) -> float:
    """The largest rounding error of 1."""
    return float(half_ulp(1, dtype))
