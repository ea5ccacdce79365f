"""How far from the truth a result may be: the one rule of the tests and of the command line.

The truth is `cufa.reference`, in float64 (for float64 results in numpy.longdouble). The measure is what
standard attention computed in the same dtype gets wrong: a result may be `OUTPUT_FACTOR` times as far
off, a gradient `GRADIENT_FACTOR` times, and `ROUNDINGS` roundings more.

8-bit inputs count as what their descales make of them, and there is no standard attention in 8 bits to
compare with: a result may be off by `ROUNDINGS` roundings alone.

float32 with precision="tf32" is held to standard attention in tf32: every matrix, the inputs among them, is
rounded to the 10 bits of mantissa that tensor cores take, and sums are float32.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import reference
from cufa.problem import FLOAT8, INPUT_DTYPES, accumulator_dtype, four_axes
from cufa.score_mod import ElementSlope

Array: TypeAlias = npt.NDArray[Any]

TF32_MANTISSA_BITS = 10

OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3
# Errors evenly spread up to one rounding deviate by 1 / sqrt(3) of it: three are more than five deviations,
# which one in a million elements would pass.
ROUNDINGS = 3
# Hopper keeps this much of a sum of 8-bit products, relative to its largest term; the LSE shows it.
FLOAT8_SUM_ERROR = 2.0**-12


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
        return self.factor * self.standard + ROUNDINGS * self.rounding

    def __str__(self) -> str:
        """The worst element and the arithmetic of what is allowed."""
        return (
            f"{self.worst}: off by {self.error:.3g}, allowed {self.allowed:.3g} = {self.factor} * "
            f"{self.standard:.3g} (standard {self.dtype} attention) + {ROUNDINGS} * {self.rounding:.3g} "
            f"(rounding); {self.wrong} of {self.size} elements are too far off"
        )


def compare(
    actual: Array,
    exact: Array,
    standard: Array,
    factor: float,
    what: str,
    rounding_of_sums: float = 0.0,
) -> Comparison:
    """Hold `actual` to |actual - exact| <= factor * max |standard - exact| + ROUNDINGS * rounding.

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
    good = np.where(finite, error <= factor * off + ROUNDINGS * rounding, error == 0)
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
    dtype_name: str, q: Array, k: Array, v: Array, precision: str = "ieee", **rules: Any
) -> tuple[Array, Array]:
    """Attention by whole matrices in one dtype: out in that dtype, lse as kernels have it.

    S, P, O and what is between them are each rounded to the dtype; products and sums are float32 (float64
    for float64), as in tensor cores and BLAS. NaN and Inf count as 0: it is rounding that is measured.
    Shapes and rules are those of `cufa.reference.attention`.
    """
    rounded = Rounded(dtype_name, precision)
    inputs = map(rounded, finite(q, k, v))
    out, lse = reference.attention(*inputs, dtype=rounded.sums, rounded=rounded, **with_finite_bias(rules))
    return out.astype(rounded.dtype), lse


def standard_attention_backward(
    dtype_name: str, dout: Array, q: Array, k: Array, v: Array, precision: str = "ieee", **rules: Any
) -> tuple[Array, ...]:
    """Gradients by whole matrices in one dtype: P, dP, dS and the results are each rounded to it."""
    rounded = Rounded(dtype_name, precision)
    inputs = map(rounded, finite(dout, q, k, v))
    gradients = reference.attention_backward(
        *inputs, dtype=rounded.sums, rounded=rounded, **with_finite_bias(rules)
    )
    results = dict(zip(gradient_names(rules), gradients, strict=True))
    dtypes = dict.fromkeys(results, rounded.dtype)
    if "dbias" in results:
        dtypes["dbias"] = rules["bias"].dtype
    if "dsink" in results:
        dtypes["dsink"] = rounded.sums
    dtypes |= {f"d{name}": x.dtype for name, x in _differentiable(rules).items()}
    return tuple(result.astype(dtypes[what]) for what, result in results.items())


def compare_results(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    results: Mapping[str, Array],
    *,
    precision: str = "ieee",
    dlse: Array | None = None,
    **rules: Any,
) -> list[Comparison]:
    """Hold results to the rule: those of out, lse, dq, dk, dv, dbias, dsink and dscore_mod[i] that are there.

    Of packed sequences only tokens that are in one count. Shapes and rules are those of
    `cufa.reference.attention_backward`; q, k and v of 8 bits may have descales among the rules.
    """
    dtype_name = str(q.dtype)
    inputs, rules = as_multiplied(q, k, v, rules)
    rules_of_gradients = {"dlse": dlse, **rules}
    rules_of_gradients |= {f"return_{what}": what in results for what in ("dbias", "dsink")}
    rules_of_gradients["return_dscore_mod"] = any(what.startswith("dscore_mod") for what in results)
    rounding = rounding_of_sums(dtype_name, *inputs, dout, precision=precision, **rules_of_gradients)
    exact: dict[str, Array] = {}
    standard: dict[str, Array] = {}
    if "out" in results or "lse" in results:
        names: tuple[str, ...] = ("out", "lse")
        truth: tuple[Array, ...] = reference.attention(*inputs, dtype=judge(dtype_name), **rules)
        exact |= zip(names, truth, strict=True)
        baseline: tuple[Array, ...] = truth
        if dtype_name != FLOAT8:
            baseline = standard_attention(dtype_name, *inputs, precision=precision, **rules)
        standard |= zip(names, baseline, strict=True)
        rounding["lse"] += rounding_of_lse(dtype_name, exact["lse"])
    if results.keys() - {"out", "lse"}:
        inputs_and_dout, names = (dout, *inputs), gradient_names(rules_of_gradients)
        truth = reference.attention_backward(*inputs_and_dout, dtype=judge(dtype_name), **rules_of_gradients)
        exact |= zip(names, truth, strict=True)
        baseline = standard_attention_backward(
            dtype_name, *inputs_and_dout, precision=precision, **rules_of_gradients
        )
        standard |= zip(names, baseline, strict=True)
    tokens = {what: _tokens(what, rules) for what in results}
    return [
        compare(
            actual[tokens[what]],
            exact[what][tokens[what]],
            standard[what][tokens[what]],
            factor(what),
            what,
            rounding[what],
        )
        for what, actual in results.items()
    ]


def as_multiplied(
    q: Array, k: Array, v: Array, rules: Mapping[str, Any]
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    """Q, K and V, those of 8 bits in float32 and times their descales, and the other rules."""
    others = dict(rules)
    descales = [others.pop(f"{name}_descale", None) for name in "qkv"]
    if str(q.dtype) != FLOAT8:
        return (q, k, v), others
    kv_heads = k.shape[-2]
    ends = [others.get(f"cu_seqlens_{side}") for side in "qkk"]
    table = others.get("block_table") if any(by is not None for by in descales[1:]) else None
    if table is not None:
        # What a page is multiplied with is a sequence's own, and others may have the page, too.
        (batch, pages), page_size = table.shape, k.shape[1]
        shape = batch, pages * page_size
        k, v = (x[table.clip(0, len(x) - 1)].reshape(*shape, *x.shape[2:]) for x in (k, v))
    q, k, v = (_descaled(x, by, kv_heads, at) for x, by, at in zip((q, k, v), descales, ends, strict=True))
    if table is not None:
        k, v = (x.reshape(table.size, page_size, *x.shape[2:]) for x in (k, v))
        others["block_table"] = np.arange(table.size, dtype=table.dtype).reshape(table.shape)
    return (q, k, v), others


def _descaled(x: Array, descale: Array | None, kv_heads: int, cu_seqlens: Array | None = None) -> Array:
    """An array of 8 bits in float32.

    Args:
        x: (batch, seqlen, heads, dim), or (tokens, heads, dim).
        descale: (batch, kv_heads), what it is multiplied with; None for 1.
        kv_heads: what heads is a multiple of.
        cu_seqlens: where packed sequences begin, and the last one ends.
    """
    x = x.astype(np.float32)
    if descale is None:
        return x
    by_head = np.repeat(descale, x.shape[-2] // max(1, kv_heads), axis=1)[..., None]
    if cu_seqlens is None:
        x *= by_head[:, None]
    else:
        for of_sequence, (begin, end) in zip(by_head, itertools.pairwise(cu_seqlens), strict=True):
            x[begin:end] *= of_sequence
    return x


def rounding_of_lse(dtype_name: str, lse: Array) -> float:
    """What tensor cores add to the rounding of an LSE whose scores are sums of 8-bit products."""
    largest = np.abs(lse).max(where=np.isfinite(lse), initial=1)
    return FLOAT8_SUM_ERROR * float(largest) if dtype_name == FLOAT8 else 0.0


def factor(what: str) -> float:
    """How many times as far off as standard attention a result may be."""
    return OUTPUT_FACTOR if what in ("out", "lse") else GRADIENT_FACTOR


def gradient_names(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """What `attention_backward` returns when it is called with these arguments."""
    asked = (what for what in ("dbias", "dsink") if rules.get(f"return_{what}"))
    of_arrays = _differentiable(rules) if rules.get("return_dscore_mod") else ()
    return "dq", "dk", "dv", *asked, *(f"d{name}" for name in of_arrays)


def _differentiable(rules: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a score_mod that have gradients, by their names in a call."""
    score_mod = rules.get("score_mod")
    return {} if score_mod is None else score_mod.differentiable


def _tokens(what: str, rules: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a result has those tokens that are in a sequence; what others have is nobody's promise."""
    side = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}.get(what)
    ends = rules.get(f"cu_seqlens_{side}")
    if ends is None:
        return (...,)
    tokens = slice(int(ends[0]), int(ends[-1]))
    return (..., tokens) if what == "lse" else (tokens,)


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
) -> dict[str, float]:
    """How far rounding alone moves each result of any algorithm, however well it goes about it.

    The roundings of the terms of a sum are independent, so it is their squares that add up. The arguments
    are those of `cufa.reference.attention_backward`.

    Returns:
        A figure for each of out, lse, dq, dk and dv, and for dbias, dsink and dscore_mod[i] if asked for.
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
        squares |= {f"d{name}": np.zeros(x.shape) for name, x in _differentiable(rules).items()}
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
    return {
        what: math.sqrt(square.max(initial=0, where=np.isfinite(square))) for what, square in squares.items()
    }


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
    """What rounding moves by at most, element by element, squared.

    The matrices that products take are rounded to the dtype of the problem, or to tf32; S and LSE are rounded
    to the dtype of the sums, which moves P = exp(S - LSE) by as much relative to P.

    Args:
        rounded: the dtypes.
        head: which rows and keys these are.
        Q: (rows, head_dim), float64, as are all of these.
        K: (keys, head_dim).
        V: (keys, value_dim).
        O: (rows, value_dim).
        dO: (rows, value_dim).
        lse: (rows,).
        dlse: (rows,).

    Returns:
        A matrix for each of out, dq, dk and dv, for "lse" what S - LSE moves by, for "dbias" and "dsink" what
        each score and each row adds to them, and for "dscore_mod" what the gradient of a new score moves by.
    """
    S, slopes = head.scores(Q, K)
    lse, dlse = lse[:, None], dlse[:, None]
    size_lse, size_S = (np.where(np.isneginf(x), 0, np.abs(x)) for x in (lse, S))
    size_product = abs(head.scale) * np.sqrt(Q**2 @ K.T**2)
    exponent2 = (_half_epsilon(rounded.sums) * (size_S + size_product + size_lse)) ** 2
    exponent2 += 2 * (rounded.input_error * size_product) ** 2
    exponent2 *= np.maximum(1, slopes.modified**2)
    P2 = head.probabilities(S, lse) ** 2 * (rounded.error**2 + exponent2)
    weights2 = P2 * head.kept**2
    D2 = (dO**2 * O**2).sum(axis=1, keepdims=True) + dlse**2
    dmodified2 = P2 * (head.kept**2 * (dO**2 @ V.T**2) + D2)
    dS2 = dmodified2 * slopes.modified**2
    # The slope is 1 - tanh^2, and tanh is rounded.
    dproduct2 = head.scale**2 * dS2 * (slopes.capped**2 + (2 * (1 - slopes.capped)) ** 2)
    sink2 = (_half_epsilon(rounded.sums) * (np.abs(head.sink) + size_lse)) ** 2
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
    """Rounds to one dtype, or to tf32, what is kept in the dtype that products are summed in.

    `error` is the largest relative error of that, `input_error` what the inputs suffer of it.
    """

    def __init__(self, dtype_name: str, precision: str = "ieee") -> None:
        self.dtype = INPUT_DTYPES[dtype_name]
        self.sums = accumulator_dtype(dtype_name)
        self.tf32 = precision == "tf32"
        self.error = 2.0**-TF32_MANTISSA_BITS / 2 if self.tf32 else _half_epsilon(self.dtype)
        self.input_error = self.error if self.tf32 else 0.0

    def __call__(self, x: Array) -> Array:
        """`x` as it is after it was stored in the dtype."""
        if self.tf32:
            return _to_tf32(x.astype(self.sums))
        return x.astype(self.dtype).astype(self.sums)


def _to_tf32(x: Array) -> Array:
    """The nearest float32 with the mantissa of tf32; ties go away from 0, as tensor cores' operands do."""
    dropped = np.finfo(np.float32).nmant - TF32_MANTISSA_BITS
    half = np.uint32(1 << (dropped - 1))
    bits = x.view(np.uint32) + np.where(np.isfinite(x), half, np.uint32(0))
    rounded: Array = (bits & ~np.uint32((1 << dropped) - 1)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def finite(*arrays: Array) -> list[Array]:
    """0 for NaN and Inf."""
    return [np.where(np.isfinite(x), x, np.zeros((), x.dtype)) for x in arrays]


def with_finite_bias(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The rules with 0 for NaN and +Inf in the bias; -Inf is a score that one may want."""
    bias = rules.get("bias")
    if bias is None:
        return dict(rules)
    return {**rules, "bias": np.where(np.isnan(bias) | np.isposinf(bias), np.zeros((), bias.dtype), bias)}


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
