"""How large an error a result may have: the single rule of the tests and of the command line.

The exact result is `cufa.reference` in float64 (for float64 results in numpy.longdouble). The measure is the
error of standard attention computed in the same dtype: a result may have `OUTPUT_FACTOR` times that error, a
gradient `GRADIENT_FACTOR` times, plus `ROUNDINGS` roundings.

8-bit inputs count as multiplied by their descales. There is no standard attention in 8 bits to compare with,
so a result may be off only by `ROUNDINGS` roundings, each element of the output by its own. If only keys and
values have 8 bits, standard attention takes them in the dtype of the queries.

float32 with precision="tf32" is compared with standard attention in tf32: every matrix, including the inputs,
is rounded to the 10 bits of mantissa that tensor cores take, and sums are float32.
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
# Errors spread evenly up to one rounding have a standard deviation of 1 / sqrt(3) of it. Three roundings are
# more than five deviations, which one in a million elements would exceed.
ROUNDINGS = 3


@dataclass(frozen=True)
class Comparison:
    """The error of one result, and how large it may be.

    `error` is |actual - exact| of the worst element, infinite if only one of the two is NaN or infinite.
    `standard` is the error of standard attention, `rounding` that of the exact result itself. `wrong` of the
    `size` elements have too large an error. `not_finite` are NaN or the same infinity in both, and so have
    none. `worst` describes the worst element.
    """

    what: str
    dtype: str
    error: float
    standard: float
    rounding: float
    factor: float
    wrong: int
    not_finite: int
    size: int
    worst: str

    @property
    def ok(self) -> bool:
        """Whether every element's error is small enough."""
        return self.wrong == 0

    @property
    def allowed(self) -> float:
        """The largest allowed error."""
        return self.factor * self.standard + ROUNDINGS * self.rounding

    def __str__(self) -> str:
        """The worst element, and the arithmetic of the allowed error."""
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
    rounding_of_sums: Any = 0.0,
) -> Comparison:
    """Check that |actual - exact| <= factor * max |standard - exact| + ROUNDINGS * rounding.

    The rounding is that of the exact result: half a unit in the last place of its largest element, in the
    dtype of `actual`, plus the rounding of the terms that this element sums. Without it, a baseline that
    happens to be exact would allow no error at all. If there is a rounding for each element's terms, then
    also of its own size. Where exact is NaN or infinite, actual must be the
    same; anywhere else NaN and infinity are wrong.

    Args:
        actual: the computed result, any shape.
        exact: the exact result, same shape.
        standard: the result of standard attention in the dtype of `actual`, same shape.
        factor: how many times the error of `standard` is allowed.
        what: the result's name, for messages.
        rounding_of_sums: from `rounding_of_sums`, a number or of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if not actual.shape == exact.shape == standard.shape:
        raise ValueError(
            f"{what} has shape {actual.shape}, the truth {exact.shape}, standard attention {standard.shape}"
        )
    finite = np.isfinite(exact)
    sizes = np.where(finite, np.abs(exact), 0)
    of_each = np.ndim(rounding_of_sums) > 0
    rounding = rounding_of_sums + half_ulp(sizes if of_each else sizes.max(initial=0), actual.dtype)
    rounding = np.broadcast_to(rounding, exact.shape)
    off = float(_distance(standard, exact).max(where=finite, initial=0))
    error = _distance(actual, exact)
    allowed = np.where(finite, factor * off + ROUNDINGS * rounding, 0)
    good = error <= allowed
    worst, of_worst = what, (0.0, 0.0)
    if good.size:
        looked_at = error if good.all() else np.where(good, -1, error)
        index = np.unravel_index(np.argmax(looked_at), error.shape)
        worst = f"{what}{[int(i) for i in index]} is {actual[index]}, should be {exact[index]}"
        of_worst = float(error[index]), float(rounding[index])
    return Comparison(
        what=what,
        dtype=actual.dtype.name,
        error=of_worst[0],
        standard=off,
        rounding=of_worst[1],
        factor=factor,
        wrong=int(np.count_nonzero(~good)),
        not_finite=int(np.count_nonzero(good & ~finite)),
        size=good.size,
        worst=worst,
    )


def judge(dtype_name: str) -> npt.DTypeLike:
    """The dtype in which exact results for a dtype are computed."""
    return np.longdouble if dtype_name == "float64" else np.float64


def standard_attention(
    dtype_name: str, q: Array, k: Array, v: Array, precision: str = "ieee", **rules: Any
) -> tuple[Array, Array]:
    """Compute attention by whole matrices in one dtype: out in that dtype, lse in the dtype of kernels.

    S, P, O and the matrices between them are each rounded to the dtype. Products and sums are float32
    (float64 for float64), as in tensor cores and BLAS. NaN and Inf count as 0, to measure only rounding.
    Shapes and rules are as in `cufa.reference.attention`.
    """
    rounded = Rounded(dtype_name, precision)
    inputs = map(rounded, finite(q, k, v))
    out, lse = reference.attention(*inputs, dtype=rounded.sums, rounded=rounded, **with_finite_bias(rules))
    return out.astype(rounded.dtype), lse


def standard_attention_backward(
    dtype_name: str, dout: Array, q: Array, k: Array, v: Array, precision: str = "ieee", **rules: Any
) -> tuple[Array, ...]:
    """Compute gradients by whole matrices in one dtype: P, dP, dS and the results are each rounded to it."""
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
    """Check those of out, lse, dq, dk, dv, dbias, dsink and dscore_mod[i] that are in `results`.

    For packed sequences, only tokens inside a sequence count. Shapes and rules are as in
    `cufa.reference.attention_backward`; for 8-bit q, k and v, the rules may include descales.
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
            rounding[what][tokens[what]] if np.ndim(rounding[what]) else rounding[what],
        )
        for what, actual in results.items()
    ]


def as_multiplied(
    q: Array, k: Array, v: Array, rules: Mapping[str, Any]
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    """Q, K and V, with 8-bit ones in float32 and multiplied by their descales, and the other rules."""
    others = dict(rules)
    descales = [others.pop(f"{name}_descale", None) for name in "qkv"]
    if str(k.dtype) != FLOAT8:
        return (q, k, v), others
    kv_heads = k.shape[-2]
    ends = [others.get(f"cu_seqlens_{side}") for side in "qkk"]
    table = others.get("block_table") if any(by is not None for by in descales[1:]) else None
    if table is not None:
        # Descales belong to sequences, and several sequences may share a page.
        (batch, pages), page_size = table.shape, k.shape[1]
        shape = batch, pages * page_size
        k, v = (x[table.clip(0, len(x) - 1)].reshape(*shape, *x.shape[2:]) for x in (k, v))
    q, k, v = (_descaled(x, by, kv_heads, at) for x, by, at in zip((q, k, v), descales, ends, strict=True))
    if table is not None:
        k, v = (x.reshape(table.size, page_size, *x.shape[2:]) for x in (k, v))
        others["block_table"] = np.arange(table.size, dtype=table.dtype).reshape(table.shape)
    return (q, k, v), others


def _descaled(x: Array, descale: Array | None, kv_heads: int, cu_seqlens: Array | None = None) -> Array:
    """Convert an array to float32 and multiply it by its descales.

    Args:
        x: (batch, seqlen, heads, dim), or (tokens, heads, dim).
        descale: (batch, kv_heads) factors; None for 1.
        kv_heads: must divide heads.
        cu_seqlens: where each packed sequence starts, and where the last ends.
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
    """How many times standard attention's error a result may have."""
    return OUTPUT_FACTOR if what in ("out", "lse") else GRADIENT_FACTOR


def gradient_names(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what `attention_backward` returns for these arguments."""
    asked = (what for what in ("dbias", "dsink") if rules.get(f"return_{what}"))
    of_arrays = differentiable_arrays(rules) if rules.get("return_dscore_mod") else ()
    return "dq", "dk", "dv", *asked, *(f"d{name}" for name in of_arrays)


def _tokens(what: str, rules: Mapping[str, Any]) -> tuple[Any, ...]:
    """Index of the tokens that are inside a sequence; results of others are unspecified."""
    side = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}.get(what)
    ends = rules.get(f"cu_seqlens_{side}")
    if ends is None:
        return (...,)
    tokens = slice(int(ends[0]), int(ends[-1]))
    return (..., tokens) if what == "lse" else (tokens,)


def _distance(actual: Array, exact: Array) -> Array:
    """|actual - exact|; 0 where both are NaN or the same infinity, infinite where only one is NaN."""
    actual = actual.astype(np.longdouble)
    exact = exact.astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        distance: Array = np.abs(actual - exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    distance[same] = 0
    distance[np.isnan(distance)] = np.inf
    return distance
