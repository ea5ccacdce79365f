"""Checks the results of a call by the rule of `cufa.checking`: all of them, or a bounded sample.

float64 attention in NumPy takes seconds where a GPU takes milliseconds. Above `MAX_SCORES` scores, a random
sample is checked. Blocks of query rows: their out, lse and dq depend on no other query. Blocks of keys: their
dk and dv must be what `attention_backward` promises for the out and lse that it was given. Parts of dbias,
and dsink, are checked in the same way. Gradients of a score_mod's arrays are not, as all scores may read the
same element.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N806, N815

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cufa.checking import Comparison, as_multiplied, compare, compare_results, factor, judge
from cufa.problem import FLOAT8, INPUT_DTYPES, Direction, check_layout, dtype_name, four_axes
from cufa.reference import Head, Rules, Sequence, exactly
from cufa.rounding_errors import (
    Rounded,
    finite,
    largest_or_each,
    rounding_of_lse,
    squared_roundings,
    with_finite_bias,
)

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

# About a second of float64 on one core. numpy.longdouble, which checks float64, has no BLAS.
MAX_SCORES = 2**22
LONGDOUBLE_SLOWDOWN = 8
_OF_FORWARD = ("out", "lse")
# The number of blocks of rows, and of blocks of keys, in a sample.
SAMPLES = 4

_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_ALL, _NONE = slice(None), slice(0, 0)


@dataclass(frozen=True)
class Check:
    """A comparison for each result, and the part of the results that it covers."""

    comparisons: tuple[Comparison, ...]
    coverage: str

    @property
    def ok(self) -> bool:
        """Whether all errors are small enough."""
        return all(comparison.ok for comparison in self.comparisons)

    def of(self, direction: Direction) -> Check:
        """The check of only one direction's results."""
        forward = direction == "forward"
        kept = tuple(each for each in self.comparisons if (each.what in _OF_FORWARD) == forward)
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
                    "not_finite": each.not_finite,
                    "of": each.size,
                }
                for each in self.comparisons
            ],
        }


@dataclass(frozen=True)
class _Part:
    """Some elements of a result: as computed, exact, and by standard attention."""

    actual: Array
    exact: Array
    standard: Array
    rounding: Any


_Parts = dict[str, _Part]


def check(
    inputs: Arrays,
    results: Arrays,
    *,
    layout: str,
    rng: np.random.Generator,
    precision: str = "ieee",
    **rules: Any,
) -> Check:
    """Check whichever of out, lse, dq, dk, dv, dbias, dsink and dscore_mod[i] are in `results`.

    Args:
        inputs: NumPy arrays q, k and v, with gradients also dout, in the layout, and dlse if given.
        results: what `attention` and `attention_backward` returned for them.
        layout: as in these calls.
        rng: picks the sample.
        precision: as in these calls.
        rules: the other arguments of these calls, as in `cufa.reference.attention`.
    """
    if rules.get("cu_seqlens_q") is None:
        inputs, results = _bshd(inputs, layout), _bshd(results, layout)
    inputs = {"dout": np.broadcast_to(np.float32(0), results["out"].shape), **inputs}
    sample = _Sample(inputs, results, rules, precision, rng)
    if sample.scores <= sample.budget:
        q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
        rules["dlse"] = inputs.get("dlse")
        compared = compare_results(q, k, v, dout, results, precision=precision, **rules)
        return Check(tuple(compared), "every element")
    parts, coverage = sample.draw()
    parts_of = {name: [part[name] for part in parts if name in part] for name in results}
    return Check(tuple(_compared(name, drawn) for name, drawn in parts_of.items() if drawn), coverage)


def _bshd(arrays: Arrays, layout: str) -> dict[str, Array]:
    axes = (*check_layout(layout), 3)
    return {name: x.transpose(axes) if name in _TENSORS else x for name, x in arrays.items()}


def _compared(name: str, parts: list[_Part]) -> Comparison:
    """Apply the rule to all parts of a result together; standard attention's error is over all of them."""

    def joined(arrays: Iterable[Array]) -> Array:
        first, *others = arrays
        return np.concatenate([x.ravel() for x in (first, *others)]) if others else first

    roundings = [part.rounding for part in parts]
    compared = compare(
        joined(part.actual for part in parts),
        joined(part.exact for part in parts),
        joined(part.standard for part in parts),
        factor(name),
        f"the sample of {name}, ",  # its worst element has an index of the sample, not of the result
        joined(roundings) if all(map(np.ndim, roundings)) else max(roundings),
    )
    return replace(compared, what=name)


@dataclass(frozen=True)
class _Matrices:
    """Matrices of some rows and keys of a head, in one dtype: (rows or keys, dim), lse and dlse (rows,)."""

    head: Head
    Q: Array
    K: Array
    V: Array
    O: Array  # noqa: E741
    dO: Array
    lse: Array
    dlse: Array


class _Sample:
    """Computes exact values and the baseline for random parts of a call's results."""

    def __init__(
        self,
        inputs: Arrays,
        results: Arrays,
        rules: Mapping[str, Any],
        precision: str,
        rng: np.random.Generator,
    ) -> None:
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        self._dtype = dtype_name(q.dtype, "q", INPUT_DTYPES)
        (q, k, v), rules = as_multiplied(q, k, v, rules)
        self._inputs = {**inputs, "q": q, "k": k, "v": v}
        self._results = dict(results)
        if "dbias" in results:
            self._results["dbias"] = results["dbias"].reshape(four_axes(results["dbias"].shape))
        self._rng = rng
        self._rounded = Rounded(self._dtype, precision)
        self._rules, self._finite_rules = Rules(**rules), Rules(**with_finite_bias(rules))
        self._sequences = self._rules.sequences(q, k)
        self._heads, self._kv_heads = q.shape[-2], k.shape[-2]

    @property
    def scores(self) -> int:
        """The number of scores of the whole call."""
        pairs = sum(sequence.seqlen_q * sequence.seqlen_k for sequence in self._sequences)
        return int(self._heads * pairs)

    @property
    def budget(self) -> int:
        """The largest number of scores to compute."""
        return MAX_SCORES // (LONGDOUBLE_SLOWDOWN if self._dtype == "float64" else 1)

    def draw(self) -> tuple[list[_Parts], str]:
        """Draw parts of every result, and say in words what they cover."""
        seqlens_q, seqlens_k = ([getattr(s, f"seqlen_{x}") for s in self._sequences] for x in "qk")
        longest_q, longest_k = max(seqlens_q), max(seqlens_k)
        budget = self.budget // SAMPLES

        size = max(1, min(longest_q, budget // longest_k))
        parts = [self._of_rows(*place) for place in self._places(seqlens_q, self._heads, size)]
        coverage = f"a random sample: {SAMPLES} x {size} of {self._heads * sum(seqlens_q):,} rows"
        if "dk" in self._results:
            group = self._heads // self._kv_heads
            size = max(1, min(longest_k, budget // (group * longest_q)))
            parts += [self._of_keys(*place) for place in self._places(seqlens_k, self._kv_heads, size)]
            coverage += f", {SAMPLES} x {size} of {self._kv_heads * sum(seqlens_k):,} keys"
        if "dbias" in self._results:
            rows, keys = self._size_in_bias(budget, longest_q)
            parts += [self._of_bias(i, rows, keys) for i in range(SAMPLES)]
            total = self._results["dbias"].size
            coverage += f", {SAMPLES} x {rows} x {keys} of the bias's {total:,} elements"
        if "dsink" in self._results:
            parts += [self._of_sink(h) for h in range(self._heads)]
        if any(name.startswith("dscore_mod") for name in self._results):
            coverage += ", no gradients of score_mod's arrays"
        return parts, coverage

    def _places(self, lengths: list[int], heads: int, size: int) -> list[tuple[Sequence, int, slice]]:
        """Pick sequences, heads, and a block of this size in each."""
        usable = [sequence for sequence, length in zip(self._sequences, lengths, strict=True) if length]
        count = len(usable) * heads
        places = []
        for i, chosen in enumerate(self._rng.choice(count, SAMPLES, replace=count < SAMPLES)):
            sequence, h = usable[chosen // heads], int(chosen % heads)
            places.append((sequence, h, self._block(i, lengths[sequence.number], size)))
        return places

    def _block(self, i: int, length: int, size: int) -> slice:
        """The i-th block: first the start, then the end, where kernels go wrong, then random ones."""
        last = max(0, length - size)
        start = (0, last)[i] if i < 2 else int(self._rng.integers(0, last + 1))
        return slice(start, min(start + size, length))

    def _of_rows(self, sequence: Sequence, h: int, rows: slice) -> _Parts:
        """out, lse and dq of some rows of a query head."""
        head = self._head(sequence, h, rows, _NONE)
        places = {"out": head.queries, "lse": head.lse, "dq": head.queries}
        wanted = {name: place for name, place in places.items() if name in self._results}
        return self._parts(wanted, [(sequence, h)], rows, _ALL, _row_results)

    def _of_keys(self, sequence: Sequence, kv_head: int, keys: slice) -> _Parts:
        """dk and dv of some keys of a KV head, from the call's own out and lse."""
        group = self._heads // self._kv_heads
        heads = [(sequence, kv_head * group + h) for h in range(group)]
        place = self._head(*heads[0], _NONE, keys).keys
        return self._parts({"dk": place, "dv": place}, heads, _ALL, keys, _score_results)

    def _size_in_bias(self, budget: int, longest_q: int) -> tuple[int, int]:
        """The number of rows and keys of dbias in one block."""
        batch, heads, rows, keys = self._results["dbias"].shape
        sharing = (len(self._sequences) if batch == 1 else 1) * (self._heads if heads == 1 else 1)
        if rows == 1:
            return 1, max(1, min(keys, budget // (sharing * longest_q)))
        size = max(1, math.isqrt(budget // sharing))
        return min(rows, size), min(keys, size)

    def _of_bias(self, i: int, rows: int, keys: int) -> _Parts:
        """A block of dbias, summed over the bias's broadcast axes, from the call's own out and lse."""
        batch, heads, of_rows, of_keys = self._results["dbias"].shape
        b, h = int(self._rng.integers(batch)), int(self._rng.integers(heads))
        row_block, key_block = self._block(i, of_rows, rows), self._block(i, of_keys, keys)
        sharing = itertools.product(
            self._sequences if batch == 1 else [self._sequences[b]],
            range(self._heads) if heads == 1 else [h],
        )

        def fit(scores: Array) -> Array:
            """Sum the scores, and pad them with 0 if the sequence ends inside the block."""
            sums = scores.sum(axis=0, keepdims=True) if of_rows == 1 else scores
            filled = np.zeros((rows, keys), scores.dtype)
            filled[: sums.shape[0], : sums.shape[1]] = sums
            return filled

        places = {"dbias": np.s_[b, h, row_block, key_block]}
        rows_of_scores = _ALL if of_rows == 1 else row_block
        return self._parts(places, list(sharing), rows_of_scores, key_block, _score_results, fit)

    def _of_sink(self, h: int) -> _Parts:
        """dsink of a head, from the call's own out and lse."""
        heads = [(sequence, h) for sequence in self._sequences]
        return self._parts({"dsink": np.s_[h]}, heads, _ALL, _NONE, _score_results, np.sum)

    def _parts(
        self,
        places: Mapping[str, Any],
        heads: list[tuple[Sequence, int]],
        rows: slice,
        keys: slice,
        compute: Callable[[_Matrices, Callable[[Array], Array]], dict[str, Array]],
        fit: Callable[[Array], Any] = exactly,
    ) -> _Parts:
        """The results at these places: sums of `compute` over the heads."""
        sums: dict[str, list[Any]] = {name: [0, 0, 0] for name in places}
        for sequence, h in heads:
            of_head = sequence, h, rows, keys
            exact = compute(self._matrices(*of_head, judge(self._dtype)), exactly)
            standard = exact
            if self._dtype != FLOAT8:
                standard = compute(self._rounded_matrices(*of_head), self._rounded)
            squares = _squares(self._finite_matrices(*of_head, np.float64), self._rounded)
            for name in places:
                terms = (fit(of_head[name]) for of_head in (exact, standard, squares))
                sums[name] = [total + term for total, term in zip(sums[name], terms, strict=True)]
        return {name: self._part(name, place, *sums[name]) for name, place in places.items()}

    def _part(self, name: str, place: Any, exact: Any, standard: Any, squares: Any) -> _Part:
        actual = np.asarray(self._results[name][place])
        rounding = largest_or_each(self._dtype, name, squares)
        if name == "lse":
            rounding += rounding_of_lse(self._dtype, np.asarray(exact))
        return _Part(actual, np.asarray(exact), np.asarray(standard).astype(actual.dtype), rounding)

    def _head(
        self, sequence: Sequence, h: int, rows: slice, keys: slice, dtype: npt.DTypeLike | None = None
    ) -> Head:
        return self._rules.head(self._inputs["q"], self._inputs["k"], sequence, h, rows, keys, dtype)

    def _matrices(
        self, sequence: Sequence, h: int, rows: slice, keys: slice, dtype: npt.DTypeLike
    ) -> _Matrices:
        head = self._head(sequence, h, rows, keys, dtype)
        lse = self._results["lse"][head.lse].astype(dtype)
        dlse = self._inputs["dlse"][head.lse].astype(dtype) if "dlse" in self._inputs else np.zeros_like(lse)
        return _Matrices(
            head,
            Q=self._inputs["q"][head.queries].astype(dtype),
            K=self._inputs["k"][head.keys].astype(dtype),
            V=self._inputs["v"][head.keys].astype(dtype),
            O=self._results["out"][head.queries].astype(dtype),
            dO=self._inputs["dout"][head.queries].astype(dtype),
            lse=lse,
            dlse=dlse,
        )

    def _finite_matrices(
        self, sequence: Sequence, h: int, rows: slice, keys: slice, dtype: npt.DTypeLike
    ) -> _Matrices:
        """The matrices with NaN and Inf replaced by 0, to measure rounding."""
        given = self._matrices(sequence, h, rows, keys, dtype)
        q, k = self._inputs["q"], self._inputs["k"]
        head = self._finite_rules.head(q, k, sequence, h, rows, keys, dtype)
        Q, K, V, O, dO = finite(given.Q, given.K, given.V, given.O, given.dO)  # noqa: E741
        return _Matrices(head, Q, K, V, O, dO, given.lse, given.dlse)

    def _rounded_matrices(self, sequence: Sequence, h: int, rows: slice, keys: slice) -> _Matrices:
        """The operands of standard attention; for tf32 the inputs are rounded, too."""
        given = self._finite_matrices(sequence, h, rows, keys, self._rounded.sums)
        Q, K, V, dO = map(self._rounded, (given.Q, given.K, given.V, given.dO))
        return replace(given, Q=Q, K=K, V=V, dO=dO)


@np.errstate(all="ignore")
def _row_results(given: _Matrices, rounded: Callable[[Array], Array]) -> dict[str, Array]:
    """The results of rows, given all their keys."""
    S, slopes = given.head.scores(given.Q, given.K, rounded)
    P, lse = given.head.softmax(S, rounded)
    dP = given.head.probability_gradients(given.dO, given.V, rounded)
    D = (P * dP).sum(axis=1) - given.dlse
    dQ, *_ = given.head.gradients(given.Q, given.K, given.dO, P, dP, D, slopes, rounded)
    return {"out": given.head.output(P, given.V, rounded), "lse": lse, "dq": dQ}


@np.errstate(all="ignore")
def _score_results(given: _Matrices, rounded: Callable[[Array], Array]) -> dict[str, Array]:
    """Terms of gradients that are sums over rows (FlashAttention-2, algorithm 2, lines 11 to 16)."""
    S, slopes = given.head.scores(given.Q, given.K, rounded)
    P = rounded(given.head.probabilities(S, given.lse[:, None]))
    dP = given.head.probability_gradients(given.dO, given.V, rounded)
    D = (given.dO * given.O).sum(axis=1) - given.dlse
    _, dK, dV, dS = given.head.gradients(given.Q, given.K, given.dO, P, dP, D, slopes, rounded)
    return {"dk": dK, "dv": dV, "dbias": dS, "dsink": -given.head.sink_probability(given.lse) * D}


@np.errstate(all="ignore")
def _squares(given: _Matrices, rounded: Rounded) -> dict[str, Array]:
    return squared_roundings(
        rounded, given.head, given.Q, given.K, given.V, given.O, given.dO, given.lse, given.dlse
    )
