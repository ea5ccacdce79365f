"""FlashAttention in NumPy: tiles, online softmax, O(seqlen) memory.

Computes in float32 (float64 for float64 arrays). K and V of a KV head are copied to contiguous memory once,
for all Q tiles and query heads of the group. Of each seqlen_q x seqlen_k matrix, a thread only keeps one
tile, which stays in cache between BLAS and exp. The Q tiles are shared among one thread per core; BLAS then
uses one thread in each. Arrays may have any strides. The caller ensures that shapes and dtypes match.
"""
# The papers write matrices in capitals (S, P, O, dP, dS) and a row's sum l, and so does this file.
# ruff: noqa: E741, N802, N803, N806, N815

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cufa.cpu.arithmetic import (
    Array,
    Scratch,
    compute_dtype,
    empty_as_infinite,
    exp_shifted,
    fill_masked,
    finite,
    nonzero,
    row_sums,
)
from cufa.integers import ceil_div
from cufa.problem import Shape, four_axes
from cufa.score_mod import ElementSlope
from cufa.score_rules import BiasPlace, HeadRules, Rules, Sequence, tiles_between
from cufa.threads import FEW_THREADS, in_threads, until_stopped

# A float32 tile of this size fills 1 MiB, half of a server core's L2 cache. More rows mean more work on the
# diagonal. With more than a few threads, which wait for Python's lock several times per tile, one is this
# many times as high and as wide; or only wider, by as much in all, if threads would be left without a tile. A
# forward of 16,384 takes 16 threads 245 ms in the smaller tiles and 103 in the larger ones, four threads 286
# and 204. One or two take as long in either, and under a causal mask a tenth longer in the larger ones.
Q_TILE = 256
KV_TILE = 1024
GROWTH = 2
# Scores of at most this magnitude are exponentiated without a shift, if the largest value is 0 or between the
# other numbers: sums with these weights, from 1e-13 to 1e13, neither underflow nor overflow. Otherwise, each
# row's maximum is subtracted.
MOST_UNSHIFTED_SCORE = 30
LEAST_UNSHIFTED_VALUE, MOST_UNSHIFTED_VALUE = 1e-15, 1e15


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    rules: Rules,
    sequences: list[Sequence],
    threads: int,
    *,
    q_descale: Array | None,
    k_descale: Array | None,
    v_descale: Array | None,
) -> None:
    """Do what `cufa.cpu.attention` does (FlashAttention-2, Dao 2023, algorithm 1)."""
    dtype = compute_dtype(q)

    def attend(share: _Share) -> None:
        scratch = Scratch(dtype)
        sequence, K, V = share.group.sequence, share.group.K, share.group.V
        for head, rows in until_stopped(share.tiles):
            h = head.number
            scale = rules.softmax_scale * share.group.descale(q_descale)
            Q = np.multiply(sequence.queries(q)[rows, h], scale, dtype=dtype, order="C")
            small = head.scores_are_products and share.group.has_small_scores(Q)
            softmax = (_UnshiftedSoftmax if small else _OnlineSoftmax)(len(Q), dtype, head.sink)
            O = np.zeros((len(Q), V.shape[1]), dtype)
            for columns, visible in until_stopped(head.visible_tiles(rows, share.kv_tile)):
                S = scratch.product("S", Q, K[columns].T)
                head.cap(S)
                head.add(S, rows, columns)
                head.modify(S, rows, columns)
                fill_masked(S, -np.inf, visible)
                P, rescale = softmax.take(S)
                _drop(P, head.kept(rows, columns))
                if rescale is not None:
                    O *= rescale
                O += scratch.product("PV", P, V[columns], visible)
            sequence.queries(out)[rows, h] = O / (nonzero(softmax.l) / head.kept_scale)
            if lse is not None:
                sequence.statistics(lse)[h, rows] = (softmax.m + np.log(softmax.l))[:, 0]

    shares = _shares(sequences, rules, q, k, v, threads, k_descale, v_descale)
    for _ in in_threads(attend, shares, threads):
        pass


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    rules: Rules,
    sequences: list[Sequence],
    threads: int,
    *,
    dlse: Array | None,
    dbias: Array | None,
    dsink: Array | None,
    dscore_mod: Mapping[str, Array],
) -> None:
    """Do what `cufa.cpu.attention_backward` does (FlashAttention-2, algorithm 2).

    The Q tiles are the outer loop, as in the forward pass; in the paper, the KV tiles are. dK and dV are sums
    over the heads of a group, so this keeps all of dK and dV, not of dQ. Each thread has its own sums, which
    are added in a fixed order: results are the same for the same number of cores.
    """
    dtype, heads = compute_dtype(q), q.shape[-2]
    arrays = _BackwardArrays(dout, q, out, lse, dq, dlse, dbias, dsink, dscore_mod)
    gradients = functools.partial(_gradients, arrays=arrays, scale=rules.softmax_scale)
    dbias_sums = np.zeros(four_axes(() if dbias is None else dbias.shape), dtype)
    dsink_sums = np.zeros(heads, dtype)
    array_sums = {name: np.zeros(x.size, dtype) for name, x in dscore_mod.items()}
    shares = _shares(sequences, rules, q, k, v, threads)
    # The traceback of an interrupt would keep the threads at work.
    with contextlib.closing(in_threads(gradients, shares, threads)) as results:
        for group, parts in itertools.groupby(results, key=lambda sums: sums.group):
            total = functools.reduce(_Sums.add, parts)
            for gradient, of_keys in ((dk, total.dK), (dv, total.dV)):
                group.sequence.used_keys(gradient)[:, group.kv_head] = of_keys
                group.sequence.unused_keys(gradient)[:, group.kv_head] = 0
            for (b, h, start, stop), of_scores in total.dbias.items():
                dbias_sums[b, h, start:stop, : of_scores.shape[1]] += of_scores
            dsink_sums += total.dsink
            for name, sums in array_sums.items():
                total.dscore_mod[name].add_to(sums)
    if dbias is not None:
        dbias[...] = dbias_sums.reshape(dbias.shape)
    if dsink is not None:
        dsink[...] = dsink_sums
    for name, sums in array_sums.items():
        dscore_mod[name][...] = sums.reshape(dscore_mod[name].shape)


def _gradients(share: _Share, arrays: _BackwardArrays, scale: float) -> _Sums:
    """Write dQ of a share's tiles, and return what they add to the gradients of others."""
    q, sequence, K, V = arrays.q, share.group.sequence, share.group.K, share.group.V
    dtype = compute_dtype(q)
    scratch = Scratch(dtype)
    sums = _Sums.none(share.group, q.shape[-2], arrays.dscore_mod)
    for head, rows in until_stopped(share.tiles):
        h = head.number
        Q = np.multiply(sequence.queries(q)[rows, h], scale, dtype=dtype, order="C")
        O, dO = (np.array(sequence.queries(x)[rows, h], dtype, order="C") for x in (arrays.out, arrays.dout))
        D = (dO * O).sum(axis=1, keepdims=True)
        if arrays.dlse is not None:
            D -= sequence.statistics(arrays.dlse)[h, rows, None]
        L = empty_as_infinite(sequence.statistics(arrays.lse)[h, rows, None].astype(dtype))
        if arrays.dsink is not None:
            sums.dsink[h] -= (np.exp(head.sink - L) * D).sum()
        dO *= head.kept_scale
        dQ = np.zeros_like(Q)
        for columns, visible in until_stopped(head.visible_tiles(rows, share.kv_tile)):
            S = scratch.product("S", Q, K[columns].T)
            head.cap(S)
            slope = head.slope(S)
            head.add(S, rows, columns)
            modified = head.modify_with_slopes(S, rows, columns, of_elements=bool(arrays.dscore_mod))
            P = exp_shifted(S, L)
            fill_masked(P, 0, visible)
            kept = head.kept(rows, columns)
            dP = scratch.product("dP", dO, V[columns].T)
            _drop(dP, kept)
            dP -= D
            dS = np.multiply(P, dP, out=dP)
            if modified is not None:
                for element in modified.elements:
                    sums.dscore_mod[element.name].add(element, dS, visible)
                dS *= np.asarray(modified.slope, dtype)
            fill_masked(dS, 0, visible)
            if arrays.dbias is not None:
                head.add_bias_gradient(dS, rows, columns, sums.dbias)
            if slope is not None:
                dS *= slope
                fill_masked(dS, 0, visible)
            _drop(P, kept)
            visible_t = None if visible is None else visible.T
            sums.dV[columns] += scratch.product("dV", P.T, dO, visible_t)
            sums.dK[columns] += scratch.product("dK", dS.T, Q, visible_t)
            dQ += scratch.product("dQ", dS, K[columns], visible)
        sequence.queries(arrays.dq)[rows, h] = scale * dQ
    return sums


@np.errstate(all="ignore")
def softmax(x: Array, out: Array, passes: int) -> None:
    """Write softmax over the last axis, reading every row `passes` times.

    Args:
        x: (..., n), float16, bfloat16, float32 or float64, any strides.
        out: written, shaped like x; 0 in a row of only -inf.
        passes: 3 to compute the maximum, then the sum, then normalize (safe softmax); 2 to compute
            maximum and sum together (Milakov and Gimelshein 2018, algorithms 2 and 3).

    Raises:
        ValueError: `passes` is neither 2 nor 3.
    """
    statistics = {2: _online_max_and_sum, 3: _max_then_sum}.get(passes)
    if statistics is None:
        raise ValueError(f"passes is {passes!r}; it may be 2 or 3")
    scratch = Scratch(compute_dtype(x))
    for x_rows, out_rows in _row_blocks(x, out):
        m, l = statistics(x_rows, scratch)
        for columns in tiles_between(0, x.shape[-1], KV_TILE):
            E = exp_shifted(scratch.copy("x", x_rows[:, columns]), finite(m))
            E /= nonzero(l)
            out_rows[:, columns] = E


def _max_then_sum(x: Array, scratch: Scratch) -> tuple[Array, Array]:
    m, l = np.full((len(x), 1), -np.inf, scratch.dtype), np.zeros((len(x), 1), scratch.dtype)
    for columns in tiles_between(0, x.shape[1], KV_TILE):
        m = np.maximum(m, scratch.copy("x", x[:, columns]).max(axis=1, keepdims=True))
    for columns in tiles_between(0, x.shape[1], KV_TILE):
        E = exp_shifted(scratch.copy("x", x[:, columns]), finite(m))
        l += E.sum(axis=1, keepdims=True)
    return m, l


def _online_max_and_sum(x: Array, scratch: Scratch) -> tuple[Array, Array]:
    softmax = _OnlineSoftmax(len(x), scratch.dtype)
    for columns in tiles_between(0, x.shape[1], KV_TILE):
        softmax.take(scratch.copy("x", x[:, columns]))
    return softmax.m, softmax.l


class _OnlineSoftmax:
    """The running maximum m and sum l of rows; before the first tile, they come from the sink alone."""

    def __init__(self, rows: int, dtype: npt.DTypeLike, sink: float = -math.inf) -> None:
        self.m = np.full((rows, 1), sink, dtype)
        self.l = np.full((rows, 1), 0 if sink == -math.inf else 1, dtype)

    def take(self, S: Array) -> tuple[Array, Array | None]:
        """Add a tile: returns its weights P, which overwrite S, and the factor on older sums, None for 1."""
        m_new = np.maximum(self.m, S.max(axis=1, keepdims=True))
        rescale = np.exp(self.m - finite(m_new))
        P = exp_shifted(S, finite(m_new))
        self.m, self.l = m_new, self.l * rescale + row_sums(P)
        return P, rescale


class _UnshiftedSoftmax(_OnlineSoftmax):
    """The same with 0 instead of the maximum, for small scores and no sink."""

    def __init__(self, rows: int, dtype: npt.DTypeLike, sink: float = -math.inf) -> None:
        super().__init__(rows, dtype, sink)
        self.m = np.zeros_like(self.l)

    def take(self, S: Array) -> tuple[Array, None]:
        """As `_OnlineSoftmax.take`."""
        P = np.exp(S, out=S)
        sums = row_sums(P)
        self.l += np.where(np.isposinf(sums), np.nan, sums)  # NaN, like an infinite score minus itself
        return P, None


def _drop(P: Array, kept: Array | None) -> None:
    """Set to 0 what dropout does not keep."""
    if kept is not None:
        P *= kept


@dataclass(frozen=True, eq=False)
class _Group:
    """A KV head of a sequence and the query heads that read it."""

    sequence: Sequence
    kv_head: int
    k: Array
    v: Array
    dtype: npt.DTypeLike
    k_descale: Array | None = None
    v_descale: Array | None = None

    @functools.cached_property
    def K(self) -> Array:
        return self._keys(self.k, self.k_descale)

    @functools.cached_property
    def V(self) -> Array:
        return self._keys(self.v, self.v_descale)

    def descale(self, descale: Array | None) -> float:
        """The factor for this head's part of an 8-bit array."""
        return 1.0 if descale is None else float(descale[self.sequence.number, self.kv_head])

    def has_small_scores(self, Q: Array) -> bool:
        """Whether 0 can replace the maximum of the scores of these scaled queries, (rows, head_dim).

        The product of a query and a key is at most the product of their lengths (Cauchy-Schwarz). Keys and
        values that are not finite do not count: rows that see them have NaN either way, and other rows must
        not be affected.
        """
        largest = _longest_row(Q) * self._longest_key
        value = self._largest_value
        moderate = value == 0 or LEAST_UNSHIFTED_VALUE <= value <= MOST_UNSHIFTED_VALUE
        return largest <= MOST_UNSHIFTED_SCORE and moderate

    @functools.cached_property
    def _longest_key(self) -> float:
        return _longest_row(self.K)

    @functools.cached_property
    def _largest_value(self) -> float:
        return float(np.max(np.abs(self.V), initial=0, where=np.isfinite(self.V)))

    def _keys(self, x: Array, descale: Array | None) -> Array:
        keys = np.ascontiguousarray(self.sequence.used_keys(x[..., self.kv_head, :]), self.dtype)
        if descale is not None:
            keys = keys * self.descale(descale)
        return keys


@dataclass(frozen=True)
class _Share:
    """One thread's Q tiles of a group: query head and rows; and the keys of a tile."""

    group: _Group
    tiles: list[tuple[HeadRules, slice]]
    kv_tile: int


# NumPy counts places in less time than it adds to them one by one, unless they lie so many times farther
# apart.
_DENSE = 8


class _RangeOfSums:
    """Sums for the elements of an array, from the first to the last of which anything is known.

    One share of many reads few of a large table.
    """

    def __init__(self, shape: Shape, dtype: npt.DTypeLike) -> None:
        self._shape, self._begin, self._sums = shape, 0, np.zeros(0, dtype)

    @property
    def _end(self) -> int:
        return self._begin + len(self._sums)

    def add(self, element: ElementSlope, gradient: Array, visible: Array | None) -> None:
        """Add gradients of elements, given that of the scores."""
        places, gradients = element.gradients(self._shape, gradient, visible)
        if not places.size:
            return
        begin, end = int(places.min()), int(places.max()) + 1
        self._cover(begin, end)
        if end - begin <= _DENSE * places.size:
            sums = np.bincount((places - begin).ravel(), gradients.ravel())
            self._sums[begin - self._begin : end - self._begin] += sums
        else:
            np.add.at(self._sums, places - self._begin, gradients)

    def add_range(self, other: _RangeOfSums) -> None:
        """Add those of another share."""
        if len(other._sums):
            self._cover(other._begin, other._end)
            self._sums[other._begin - self._begin :][: len(other._sums)] += other._sums

    def add_to(self, sums: Array) -> None:
        """Add them to those of all elements, in one axis."""
        sums[self._begin : self._end] += self._sums

    def _cover(self, begin: int, end: int) -> None:
        if not len(self._sums):
            self._begin, self._sums = begin, np.zeros(end - begin, self._sums.dtype)
        elif begin < self._begin or end > self._end:
            before, after = max(0, self._begin - begin), max(0, end - self._end)
            self._begin, self._sums = self._begin - before, np.pad(self._sums, (before, after))


@dataclass(frozen=True, eq=False)
class _BackwardArrays:
    """The arrays of a backward call beside K and V: what it reads, dQ, and the gradients of options."""

    dout: Array
    q: Array
    out: Array
    lse: Array
    dq: Array
    dlse: Array | None
    dbias: Array | None
    dsink: Array | None
    dscore_mod: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class _Sums:
    """What the Q tiles of a share, or of a group, add to gradients that other shares add to as well."""

    group: _Group
    dK: Array
    dV: Array
    dsink: Array
    dbias: dict[BiasPlace, Array]
    dscore_mod: dict[str, _RangeOfSums]

    @classmethod
    def none(cls, group: _Group, heads: int, dscore_mod: Mapping[str, Array]) -> _Sums:
        """Sums of nothing."""
        dtype = group.K.dtype
        of_arrays = {name: _RangeOfSums(x.shape, dtype) for name, x in dscore_mod.items()}
        dK, dV, dsink = np.zeros_like(group.K), np.zeros_like(group.V), np.zeros(heads, dtype)
        return cls(group, dK, dV, dsink, {}, of_arrays)

    def add(self, other: _Sums) -> _Sums:
        for mine, others in ((self.dK, other.dK), (self.dV, other.dV), (self.dsink, other.dsink)):
            mine += others
        for name, of_array in self.dscore_mod.items():
            of_array.add_range(other.dscore_mod[name])
        for place, sums in other.dbias.items():
            self.dbias[place] = self.dbias[place] + sums if place in self.dbias else sums
        return self


def _shares(
    sequences: list[Sequence],
    rules: Rules,
    q: Array,
    k: Array,
    v: Array,
    threads: int,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
) -> Iterator[_Share]:
    """Every Q tile of every head, in enough shares per group for every thread.

    Tiles are dealt out in turn, since under a causal mask later tiles are more work.
    """
    heads, kv_heads = q.shape[-2], k.shape[-2]
    q_tile, kv_tile = _tile_sizes(sequences, heads, threads)
    size = heads // max(1, kv_heads)
    parts = ceil_div(threads, max(1, len(sequences) * kv_heads))
    for sequence, kv_head in itertools.product(sequences, range(kv_heads)):
        group = _Group(sequence, kv_head, k, v, compute_dtype(q), k_descale, v_descale)
        queries = [rules.of_head(sequence, kv_head * size + h, heads) for h in range(size)]
        tiles = list(itertools.product(queries, tiles_between(0, sequence.seqlen_q, q_tile)))
        for part in range(max(1, min(parts, len(tiles)))):
            yield _Share(group, tiles[part::parts], kv_tile)


def _tile_sizes(sequences: list[Sequence], heads: int, threads: int) -> tuple[int, int]:
    """The rows and the keys of a tile."""
    if threads <= FEW_THREADS:
        return Q_TILE, KV_TILE
    higher = GROWTH * Q_TILE
    tiles = heads * sum(ceil_div(sequence.seqlen_q, higher) for sequence in sequences)
    return (higher, GROWTH * KV_TILE) if tiles >= threads else (Q_TILE, GROWTH**2 * KV_TILE)


def _longest_row(x: Array) -> float:
    """The length of the longest row of finite elements; infinite if a square overflows the dtype."""
    lengths = np.sqrt(np.einsum("ij,ij->i", x, x))
    counted = np.isfinite(lengths)
    if not counted.all():
        counted = np.isfinite(x).all(axis=1)
    return float(np.max(lengths, initial=0, where=counted))


def _row_blocks(x: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """Pieces of at most Q_TILE rows of x and out, as matrices, for any strides."""
    x, out = np.atleast_2d(x, out)
    for index in np.ndindex(x.shape[:-2]):
        for rows in tiles_between(0, x.shape[-2], Q_TILE):
            yield x[index][rows], out[index][rows]
