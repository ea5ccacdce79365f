"""Holds the results of a call to the rule of `cufa.checking`: all of them, or a bounded sample.

float64 attention in NumPy takes seconds where a GPU takes milliseconds. Beyond `MAX_SCORES` scores a
random sample is checked: blocks of query rows, whose out, lse and dq depend on no other query, and
blocks of keys, whose dk and dv are checked as what `attention_backward` promises of the out and lse
that it is given.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N806, N815

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cufa import reference
from cufa.checking import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    Comparison,
    Rounded,
    compare,
    judge,
    rounding_of_sums,
    squared_roundings,
    standard_attention,
    standard_attention_backward,
)
from cufa.problem import Direction, check_layout, dtype_name

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

# About a second of float64 on one core. numpy.longdouble, which judges float64, has no BLAS.
MAX_SCORES = 2**22
LONGDOUBLE_SLOWDOWN = 8
RESULTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("out", "lse"),
    "backward": ("dq", "dk", "dv"),
}
# So many blocks of rows, and of keys, a sample has.
SAMPLES = 4


@dataclass(frozen=True)
class Check:
    """A comparison for each result, and which part of them it covers."""

    comparisons: tuple[Comparison, ...]
    coverage: str

    @property
    def ok(self) -> bool:
        """Whether all is as near to the truth as it must be."""
        return all(comparison.ok for comparison in self.comparisons)

    def of(self, direction: Direction) -> Check:
        """The part about the results of one direction."""
        kept = tuple(each for each in self.comparisons if each.what in RESULTS[direction])
        return replace(self, comparisons=kept)

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "ok": self.ok,
            "coverage": self.coverage,
            "results": [
                {
                    "name": each.what,
                    "error": each.error,
                    "allowed": each.allowed,
                    "ok": each.ok,
                    "wrong": each.wrong,
                    "of": each.size,
                }
                for each in self.comparisons
            ],
        }


@dataclass(frozen=True)
class _Part:
    """Some elements of a result: as computed, in truth, and by standard attention."""

    actual: Array
    exact: Array
    standard: Array
    rounding: float


def check(
    inputs: Arrays,
    results: Arrays,
    *,
    causal: bool,
    softmax_scale: float | None,
    layout: str,
    rng: np.random.Generator,
) -> Check:
    """Check those of out, lse, dq, dk and dv that are in `results`.

    Args:
        inputs: NumPy arrays q, k, v and dout, in the layout.
        results: what `attention` and `attention_backward` made of them.
        causal: as it was for these calls; likewise softmax_scale and layout.
        softmax_scale: as above.
        layout: as above.
        rng: picks the sample.
    """
    inputs, results = _bshd(inputs, layout), _bshd(results, layout)
    q, k = inputs["q"], inputs["k"]
    dtype = dtype_name(q.dtype, "q")
    judged = _Judge(dtype, causal, softmax_scale)
    budget = MAX_SCORES // (LONGDOUBLE_SLOWDOWN if dtype == "float64" else 1)
    if q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] <= budget:
        parts = [judged.whole(inputs, results)]
        coverage = "every element"
    else:
        parts, coverage = _sample(judged, inputs, results, budget, rng)
    return Check(
        tuple(
            _compared(name, [part[name] for part in parts if name in part], judged.factor(name))
            for name in results
        ),
        coverage,
    )


def _bshd(arrays: Arrays, layout: str) -> dict[str, Array]:
    axes = (*check_layout(layout), 3)
    return {name: x.transpose(axes) if x.ndim == 4 else x for name, x in arrays.items()}


def _compared(name: str, parts: list[_Part], factor: float) -> Comparison:
    """The rule for all parts of a result together: the error of standard attention is that of them all."""

    def joined(arrays: Iterable[Array]) -> Array:
        first, *others = arrays
        return np.concatenate([x.ravel() for x in (first, *others)]) if others else first

    return compare(
        joined(part.actual for part in parts),
        joined(part.exact for part in parts),
        joined(part.standard for part in parts),
        factor,
        name,
        max(part.rounding for part in parts),
    )


def _sample(
    judged: _Judge, inputs: Arrays, results: Arrays, budget: int, rng: np.random.Generator
) -> tuple[list[dict[str, _Part]], str]:
    q, k = inputs["q"], inputs["k"]
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads

    rows = max(1, min(seqlen_q, budget // (SAMPLES * seqlen_k)))
    parts = [
        judged.rows(inputs, results, head // heads, head % heads, start, start + rows)
        for head, start in _places(rng, batch * heads, seqlen_q - rows)
    ]
    coverage = f"a random sample: {SAMPLES} x {rows} of {batch * heads * seqlen_q:,} rows"
    if "dk" in results:
        keys = max(1, min(seqlen_k, budget // (SAMPLES * group * seqlen_q)))
        parts += [
            judged.keys(inputs, results, head // kv_heads, head % kv_heads, start, start + keys)
            for head, start in _places(rng, batch * kv_heads, seqlen_k - keys)
        ]
        coverage += f", {SAMPLES} x {keys} of {batch * kv_heads * seqlen_k:,} keys"
    return parts, coverage


def _places(rng: np.random.Generator, heads: int, last_start: int) -> list[tuple[int, int]]:
    """Heads, and where in each a block begins: at both ends, where kernels go wrong, and anywhere."""
    chosen = rng.choice(heads, SAMPLES, replace=heads < SAMPLES)
    starts = [0, last_start, *rng.integers(0, last_start + 1, SAMPLES - 2)]
    return [(int(head), int(start)) for head, start in zip(chosen, starts, strict=True)]


class _Judge:
    """Makes, for parts of a call's results, the truth and the baseline."""

    def __init__(self, dtype: str, causal: bool, softmax_scale: float | None) -> None:
        self._dtype = dtype
        self._causal = causal
        self._scale = softmax_scale

    def factor(self, name: str) -> float:
        return OUTPUT_FACTOR if name in RESULTS["forward"] else GRADIENT_FACTOR

    def whole(self, inputs: Arrays, results: Arrays) -> dict[str, _Part]:
        """All of them, by the reference as it stands."""
        qkv = inputs["q"], inputs["k"], inputs["v"]
        options: dict[str, Any] = {"causal": self._causal, "softmax_scale": self._scale}
        exact = list(reference.attention(*qkv, **options, dtype=judge(self._dtype)))
        standard = list(standard_attention(self._dtype, *qkv, **options))
        dout = inputs["dout"]
        if "dq" in results:
            exact += reference.attention_backward(dout, *qkv, **options, dtype=judge(self._dtype))
            standard += standard_attention_backward(self._dtype, dout, *qkv, **options)
        rounding = rounding_of_sums(self._dtype, *qkv, dout, **options)
        triples = zip(("out", "lse", "dq", "dk", "dv"), exact, standard, strict=False)
        return {
            name: _Part(results[name], truth, baseline, rounding[name])
            for name, truth, baseline in triples
            if name in results
        }

    def rows(
        self, inputs: Arrays, results: Arrays, batch: int, head: int, start: int, stop: int
    ) -> dict[str, _Part]:
        """out, lse and dq of some rows of a query head: a problem of its own.

        With `causal`, what comes after the last row's last key is cut off, so that the corner that the
        mask is aligned to is that row's.
        """
        q, k = inputs["q"], inputs["k"]
        last_key = max(0, stop + k.shape[1] - q.shape[1]) if self._causal else k.shape[1]
        kv_head = head // (q.shape[2] // k.shape[2])
        queries = np.s_[batch : batch + 1, start:stop, head : head + 1]
        keys = np.s_[batch : batch + 1, :last_key, kv_head : kv_head + 1]
        of_rows = {"q": queries, "k": keys, "v": keys, "dout": queries, "out": queries, "dq": queries}
        return self.whole(
            {name: x[of_rows[name]] for name, x in inputs.items()},
            {name: x[of_rows[name]] for name, x in results.items() if name in of_rows}
            | {"lse": results["lse"][batch : batch + 1, head : head + 1, start:stop]},
        )

    def keys(
        self, inputs: Arrays, results: Arrays, batch: int, kv_head: int, start: int, stop: int
    ) -> dict[str, _Part]:
        """dk and dv of some keys of a KV head, from the call's own out and lse."""
        seqlen_q, heads, head_dim = inputs["q"].shape[1:]
        seqlen_k, kv_heads = inputs["k"].shape[1:3]
        group = heads // kv_heads
        block = np.s_[batch, start:stop, kv_head]
        visible: Array = np.ones((seqlen_q, stop - start), bool)
        if self._causal:
            visible = np.tril(visible, seqlen_k - seqlen_q - start)
        scale = 1 / math.sqrt(head_dim) if self._scale is None else self._scale
        rounded = Rounded(self._dtype)

        exact: tuple[Any, Any] = (0, 0)
        standard: tuple[Any, Any] = (0, 0)
        squares: tuple[Any, Any] = (0, 0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            rows = np.s_[batch, :, head]
            of_head = _Matrices(
                Q=inputs["q"][rows],
                K=inputs["k"][block],
                V=inputs["v"][block],
                O=results["out"][rows],
                dO=inputs["dout"][rows],
                lse=results["lse"][batch, head, :, None],
                visible=visible,
            )
            truth, baseline = of_head.astype(judge(self._dtype)), of_head.astype(rounded.sums)
            exact = _added(exact, _key_gradients(truth, scale, lambda x: x))
            standard = _added(standard, _key_gradients(baseline, scale, rounded))
            squares = _added(squares, _key_roundings(of_head.astype(np.float64), scale, rounded))
        return {
            name: _Part(
                results[name][block],
                exact[i],
                standard[i].astype(rounded.dtype),
                math.sqrt(squares[i].max()),
            )
            for i, name in enumerate(("dk", "dv"))
        }


def _added(sums: tuple[Any, Any], terms: tuple[Array, Array]) -> tuple[Array, Array]:
    return sums[0] + terms[0], sums[1] + terms[1]


@dataclass(frozen=True)
class _Matrices:
    """All queries of a head and some keys: each (rows or keys, dim), lse (rows, 1), visible (rows, keys)."""

    Q: Array
    K: Array
    V: Array
    O: Array  # noqa: E741
    dO: Array
    lse: Array
    visible: Array

    def astype(self, dtype: npt.DTypeLike) -> _Matrices:
        """The same in another dtype."""
        return replace(
            self,
            Q=self.Q.astype(dtype),
            K=self.K.astype(dtype),
            V=self.V.astype(dtype),
            O=self.O.astype(dtype),
            dO=self.dO.astype(dtype),
            lse=self.lse.astype(dtype),
        )


@np.errstate(all="ignore")
def _key_gradients(of: _Matrices, scale: float, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
    """What one query head adds to dK and dV of some keys (FlashAttention-2, algorithm 2, lines 11 to 16).

    S, P, dP and dS go through `rounded`.
    """
    P = rounded(np.where(of.visible, np.exp(rounded(scale * (of.Q @ of.K.T)) - of.lse), 0))
    dP = rounded(of.dO @ of.V.T)
    D = (of.dO * of.O).sum(axis=1, keepdims=True)
    dS = rounded(np.where(of.visible, P * (dP - D), 0))
    dK = scale * reference.masked_matmul(dS.T, of.Q, of.visible.T)
    return dK, reference.masked_matmul(P.T, of.dO, of.visible.T)


@np.errstate(all="ignore")
def _key_roundings(of: _Matrices, scale: float, rounded: Rounded) -> tuple[Array, Array]:
    """What one query head adds to the squared roundings of dK and dV; NaN and Inf count as 0."""
    Q, K, V, O, dO = (np.where(np.isfinite(x), x, 0) for x in (of.Q, of.K, of.V, of.O, of.dO))  # noqa: E741
    S = np.where(of.visible, scale * (Q @ K.T), -np.inf)
    P = np.where(of.visible, np.exp(S - of.lse), 0)
    _, P2, dS2 = squared_roundings(rounded, Q, K, V, O, dO, S, of.lse, P, scale)
    return scale**2 * (dS2.T @ Q**2), P2.T @ dO**2
