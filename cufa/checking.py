"""How far from the truth a result may be: the one rule of the tests and of the command line.

The truth is `cufa.reference`, in float64 (for float64 results in numpy.longdouble). The measure is what
standard attention computed in the same dtype gets wrong: a result may be `OUTPUT_FACTOR` times as far
off, a gradient `GRADIENT_FACTOR` times, and `ROUNDINGS` roundings more.

8-bit inputs count as what their descales make of them. There is no standard attention in 8 bits to compare
with: a result may be off by `ROUNDINGS` roundings alone. Where only keys and values are of 8 bits, standard
attention takes them in the dtype of the queries.

float32 with precision="tf32" is held to standard attention in tf32: every matrix, the inputs among them, is
rounded to the 10 bits of mantissa that tensor cores take, and sums are float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import reference
from cufa.problem import FLOAT8
from cufa.rounding_errors import (
    Rounded,
    differentiable_arrays,
    finite,
    half_ulp,
    rounding_of_lse,
    rounding_of_sums,
    with_finite_bias,
)

Array: TypeAlias = npt.NDArray[Any]

OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3
# Errors evenly spread up to one rounding deviate by 1 / sqrt(3) of it: three are more than five deviations,
# which one in a million elements would pass.
ROUNDINGS = 3


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
    rounding = rounding_of_sums + half_ulp(np.abs(exact).max(where=finite, initial=0), actual.dtype)
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
    dtypes |= {f"d{name}": x.dtype for name, x in differentiable_arrays(rules).items()}
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
    if str(k.dtype) != FLOAT8:
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
    """An array in float32.

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


def factor(what: str) -> float:
    """How many times as far off as standard attention a result may be."""
    return OUTPUT_FACTOR if what in ("out", "lse") else GRADIENT_FACTOR


def gradient_names(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """What `attention_backward` returns when it is called with these arguments."""
    asked = (what for what in ("dbias", "dsink") if rules.get(f"return_{what}"))
    of_arrays = differentiable_arrays(rules) if rules.get("return_dscore_mod") else ()
    return "dq", "dk", "dv", *asked, *(f"d{name}" for name in of_arrays)


def _tokens(what: str, rules: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a result has those tokens that are in a sequence; what others have is nobody's promise."""
    side = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}.get(what)
    ends = rules.get(f"cu_seqlens_{side}")
    if ends is None:
        return (...,)
    tokens = slice(int(ends[0]), int(ends[-1]))
    return (..., tokens) if what == "lse" else (tokens,)


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
