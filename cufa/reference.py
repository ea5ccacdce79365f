"""Standard attention and its gradients in NumPy: the specification of every kernel.

Written to be read, and to be right: it keeps whole S and P matrices and takes no shortcuts. Arrays are
(batch, seqlen, heads, head_dim), for packed sequences (tokens, heads, head_dim), with any strides. Everything
is computed in `dtype`: float64 to check the 16 and 32-bit kernels, numpy.longdouble to check the float64
ones.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import philox
from cufa.arguments import check_window
from cufa.problem import four_axes
from cufa.score_mod import ElementSlope, MaskMod, ScoreMod, place_of

Array: TypeAlias = npt.NDArray[Any]


def exactly(x: Array) -> Array:
    """Round nothing."""
    return x


@np.errstate(all="ignore")
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: npt.DTypeLike = np.float64,
    rounded: Callable[[Array], Array] = exactly,
    **rules: Any,
) -> tuple[Array, Array]:
    """Standard attention, O = softmax(scale * Q K^T) V (Vaswani et al. 2017, equation 1).

    Query head h reads KV head h // (heads // kv_heads). A key that a query does not see contributes nothing,
    even if it is NaN or Inf.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        dtype: of the whole computation and of the results.
        rounded: applied to every matrix before the next one is computed from it.
        rules: the fields of `Rules`.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), the natural
        logarithm of each row's sum of exp(S). Rows that see no key, and tokens outside all sequences, have
        out 0 and lse -inf.

    Raises:
        ValueError: from NumPy, if the shapes do not match.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    out = np.zeros((*q.shape[:-1], v.shape[-1]), dtype)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -np.inf, dtype)
    for head in Rules(**rules).heads(q, k):
        S, _ = head.scores(q[head.queries], k[head.keys], rounded)
        P, lse[head.lse] = head.softmax(S, rounded)
        out[head.queries] = head.output(P, v[head.keys], rounded)
    return out, lse


@np.errstate(all="ignore")
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_mod: bool = False,
    dtype: npt.DTypeLike = np.float64,
    rounded: Callable[[Array], Array] = exactly,
    **rules: Any,
) -> tuple[Array, ...]:
    """Gradients of sum(dout * out) + sum(dlse * lse) (FlashAttention, Dao et al. 2022, appendix B.2).

    Takes the arguments of `attention`, dout (batch, seqlen_q, heads, head_dim_v) and dlse
    (batch, heads, seqlen_q).

    Returns:
        dq, dk and dv, shaped like q, k and v; dk and dv are summed over the query heads that share
        a KV head. Then, with return_dbias, dbias, and with return_dsink, dsink, shaped like bias and sink and
        summed over broadcast axes; with return_dscore_mod, the gradient of each float array that score_mod
        reads. Keys that are not seen contribute nothing; a row that sees no key has gradient 0.

    Raises:
        ValueError: from NumPy, if the shapes do not match.
    """
    dout, q, k, v = (np.asarray(x).astype(dtype) for x in (dout, q, k, v))
    asked = Rules(**rules)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    bias_shape = asked.bias.shape if return_dbias and asked.bias is not None else ()
    dbias = np.zeros(four_axes(bias_shape), dtype)
    dsink = np.zeros(q.shape[-2], dtype)
    dscore_mod = {name: np.zeros(x.shape, dtype) for name, x in asked.differentiable.items()}
    for head in asked.heads(q, k):
        Q, K, V, dO = q[head.queries], k[head.keys], v[head.keys], dout[head.queries]
        S, slopes = head.scores(Q, K, rounded)
        P, lse = head.softmax(S, rounded)
        dP = head.probability_gradients(dO, V, rounded)
        D = (P * dP).sum(axis=1) - (0 if dlse is None else dlse[head.lse].astype(dtype))
        dQ, dK, dV, dS = head.gradients(Q, K, dO, P, dP, D, slopes, rounded)
        dq[head.queries] = dQ
        dk[head.keys] += dK
        dv[head.keys] += dV
        if return_dbias:
            head.add_as_broadcast(dS, dbias)
        dsink[head.number] -= (head.sink_probability(lse) * D).sum()
        for element in slopes.elements:
            element.add_to(dscore_mod[element.name], rounded(P * (dP - D[:, None])), head.visible)
    results = [dq, dk, dv]
    if return_dbias:
        results.append(dbias.reshape(bias_shape))
    if return_dsink:
        results.append(dsink)
    if return_dscore_mod:
        results += dscore_mod.values()
    return tuple(results)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What a call asks for between Q K^T and the softmax, and between the softmax and V.

    The fields are arguments of `cufa.attention`, which describes them.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    bias: Array | None = None
    mask: Array | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    block_table: Array | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @property
    def differentiable(self) -> dict[str, Array]:
        """The arrays of score_mod that have gradients, by their names in a call."""
        return {} if self.score_mod is None else self.score_mod.differentiable


@dataclass(frozen=True, kw_only=True)
class Rules(ScoreOptions):
    """Applies the options and the scale to each head."""

    softmax_scale: float | None = None

    def heads(self, q: Array, k: Array) -> Iterator[Head]:
        """Every head of every sequence."""
        for sequence, h in itertools.product(self.sequences(q, k), range(q.shape[-2])):
            yield self.head(q, k, sequence, h)

    def head(
        self,
        q: Array,
        k: Array,
        sequence: Sequence,
        h: int,
        rows: slice = slice(None),
        keys: slice = slice(None),
        dtype: npt.DTypeLike | None = None,
    ) -> Head:
        """One head of a sequence, or some of its rows and keys; computed in q's dtype by default."""
        b = sequence.number
        rows = slice(*rows.indices(sequence.seqlen_q))
        keys = slice(*keys.indices(sequence.seqlen_k))
        dtype = q.dtype if dtype is None else dtype
        heads, head_dim = q.shape[-2:]
        group = heads // max(1, k.shape[-2])
        i, j = np.ogrid[rows, keys]
        # How far key j is beyond row i's diagonal, which aligns the last row with the last key.
        distance = j - (i + sequence.seqlen_k - sequence.seqlen_q)
        of_queries = _moved(rows, sequence.first_q)
        return Head(
            number=h,
            queries=(*sequence.batch, of_queries, h),
            keys=(*self._place_of_keys(sequence, keys, k.shape[1]), h // group),
            lse=(*sequence.batch, h, of_queries),
            bias=_place_of_scores(self.bias, b, h, rows, keys),
            scale=1 / math.sqrt(head_dim) if self.softmax_scale is None else self.softmax_scale,
            softcap=self.softcap,
            added=self._added(b, h, rows, keys, distance, dtype),
            score_mod=self.score_mod,
            place=place_of(b, h, rows, keys),
            visible=self._visible(b, h, rows, keys, distance),
            kept=self._kept(b * heads + h, rows, keys, dtype),
            sink=-math.inf if self.sink is None else self.sink[h],
        )

    def sequences(self, q: Array, k: Array) -> list[Sequence]:
        """The sequences of the batch."""
        packed = self.cu_seqlens_q is not None
        queries = _pieces(self.cu_seqlens_q, len(q), q.shape[1])
        room = k.shape[1] if self.block_table is None else self.block_table.shape[1] * k.shape[1]
        keys = _pieces(self.cu_seqlens_k, len(queries), room)
        sequences = [
            Sequence(b, () if packed else (b,), first_q, first_k, end_q - first_q, end_k - first_k)
            for b, ((first_q, end_q), (first_k, end_k)) in enumerate(zip(queries, keys, strict=True))
        ]
        if self.seqused_k is None:
            return sequences
        return [
            replace(sequence, seqlen_k=min(sequence.seqlen_k, int(used)))
            for sequence, used in zip(sequences, self.seqused_k, strict=True)
        ]

    def _place_of_keys(self, sequence: Sequence, keys: slice, page_size: int) -> tuple[Any, ...]:
        """The indices of these keys of a sequence in k and v; in pages, the second axis is the key."""
        if self.block_table is None:
            return *sequence.batch, _moved(keys, sequence.first_k)
        numbers = np.arange(keys.start, keys.stop)
        return self.block_table[sequence.number, numbers // page_size], numbers % page_size

    def _visible(self, b: int, h: int, rows: slice, keys: slice, distance: Array) -> Array:
        """Whether query i may see key j: (rows, keys) of bool."""
        left, right = check_window(self.window)
        if self.causal:
            right = 0
        visible: Array = np.ones(distance.shape, bool)
        if left is not None:
            visible &= distance >= -left
        if right is not None:
            visible &= distance <= right
        if self.mask is not None:
            first, second, rows_of_mask, _ = _place_of_scores(self.mask, b, h, rows, keys)
            visible &= unpacked(_with_four_axes(self.mask)[first, second, rows_of_mask])[:, keys]
        if self.mask_mod is not None:
            visible &= np.asarray(self.mask_mod(*place_of(b, h, rows, keys)), bool)
        return visible

    def _added(
        self, b: int, h: int, rows: slice, keys: slice, distance: Array, dtype: npt.DTypeLike
    ) -> Array:
        """What is added to the scores: bias and ALiBi (Press et al. 2022)."""
        added = np.zeros(distance.shape, dtype)
        if self.bias is not None:
            added += _with_four_axes(self.bias)[_place_of_scores(self.bias, b, h, rows, keys)]
        if self.alibi_slopes is not None:
            slope = np.atleast_2d(self.alibi_slopes)[b if self.alibi_slopes.ndim == 2 else 0, h]
            added -= slope.astype(dtype) * np.abs(distance)
        return added

    def _kept(self, matrix: int, rows: slice, keys: slice, dtype: npt.DTypeLike) -> Array:
        """The factors by which dropout multiplies the probabilities."""
        if not self.dropout_p:
            return np.ones((rows.stop - rows.start, keys.stop - keys.start), dtype)
        kept = philox.kept(self.dropout_p, self.seed, self.offset, matrix, rows, keys)
        return np.where(kept, philox.kept_scale(self.dropout_p), 0).astype(dtype)


@dataclass(frozen=True)
class Sequence:
    """One sequence of the batch: where its rows and its keys that count are in the arrays."""

    number: int
    batch: tuple[int, ...]  # its index on the batch axis; () for packed sequences, which have no such axis
    first_q: int
    first_k: int
    seqlen_q: int
    seqlen_k: int


class Slopes(NamedTuple):
    """Derivatives of a score: `capped`, of softcap by the scaled product of Q and K; `modified`, of the
    caller's function by the score it is given; `elements`, by the array elements that the function reads.
    """

    capped: Array
    modified: Array
    elements: list[ElementSlope]


@dataclass(frozen=True)
class Head:
    """One head of one sequence, or some of its rows and keys: their indices, and the rules for them.

    `queries` indexes q, out and their gradients, `keys` indexes k and v, `bias` the bias with four axes.
    Matrices are (rows, keys).
    """

    number: int
    queries: tuple[int | slice, ...]
    keys: tuple[Any, ...]
    lse: tuple[int | slice, ...]
    bias: tuple[int | slice, ...]
    scale: float
    softcap: float
    added: Array
    score_mod: ScoreMod | None
    place: tuple[Array, Array, Array, Array]
    visible: Array
    kept: Array
    sink: Any

    @functools.cached_property
    def rows_that_see(self) -> Array:
        """Which rows see any key."""
        rows: Array = np.any(self.visible, axis=1)
        return rows

    @functools.cached_property
    def keys_seen(self) -> Array:
        """Which keys any row sees."""
        keys: Array = np.any(self.visible, axis=0)
        return keys

    def scores(self, Q: Array, K: Array, rounded: Callable[[Array], Array] = exactly) -> tuple[Array, Slopes]:
        """S, and its derivatives."""
        S, slope = rounded(self.scale * self.products(Q, K)), np.ones(self.visible.shape, Q.dtype)
        if self.softcap:
            tanh = rounded(np.tanh(S / self.softcap))
            S, slope = rounded(self.softcap * tanh), 1 - tanh**2
        S, modified_slope = rounded(S + self.added), np.ones_like(S)
        elements: list[ElementSlope] = []
        if self.score_mod is not None:
            modified, modified_slope[...], elements = self.score_mod.with_slopes(S, *self.place)
            S = rounded(np.broadcast_to(modified, S.shape).astype(S.dtype))
        return np.where(self.visible, S, -np.inf), Slopes(slope, modified_slope, elements)

    def softmax(self, S: Array, rounded: Callable[[Array], Array] = exactly) -> tuple[Array, Array]:
        """P and the LSE."""
        P, lse = _softmax_and_lse(S, self.sink)
        return rounded(self.only_visible(P)), lse  # a NaN in S makes the whole row NaN

    def probabilities(self, S: Array, lse: Array) -> Array:
        """P, recomputed from a known LSE (rows, 1); a row whose LSE is -inf has no weights."""
        P: Array = np.exp(S - np.where(np.isneginf(lse), np.inf, lse))
        return self.only_visible(P)

    def output(self, P: Array, V: Array, rounded: Callable[[Array], Array] = exactly) -> Array:
        """O."""
        return rounded(masked_matmul(rounded(P * self.kept), V, self.visible))

    def probability_gradients(
        self, dO: Array, V: Array, rounded: Callable[[Array], Array] = exactly
    ) -> Array:
        """dP."""
        return rounded(self.kept * rounded(self.only_visible(self.products(dO, V))))

    def products(self, rows: Array, keys: Array) -> Array:
        """Every row times every key, as numpy.longdouble, which has no BLAS, computes it fastest.

        Rows that see nothing and keys that no row sees count as 0: NaN there takes 40 times as long.
        """
        rows = np.where(self.rows_that_see[:, None], rows, 0)
        keys = np.where(self.keys_seen[:, None], keys, 0)
        products: Array = np.inner(rows, keys)
        return products

    def gradients(
        self,
        Q: Array,
        K: Array,
        dO: Array,
        P: Array,
        dP: Array,
        D: Array,
        slopes: Slopes,
        rounded: Callable[[Array], Array] = exactly,
    ) -> tuple[Array, Array, Array, Array]:
        """This head's contributions to dQ, dK and dV, and dS, the gradient of what is added to scores.

        D is (rows,): the sum of P * dP over all keys that a row sees, minus the gradient of its LSE.
        """
        dS = rounded(self.only_visible(P * (dP - D[:, None]) * slopes.modified))
        dproduct = rounded(self.only_visible(dS * slopes.capped))
        dQ = self.scale * masked_matmul(dproduct, K, self.visible)
        dK = self.scale * masked_matmul(dproduct.T, Q, self.visible.T)
        dV = masked_matmul(rounded(P * self.kept).T, dO, self.visible.T)
        return dQ, dK, dV, dS

    def only_visible(self, scores: Array) -> Array:
        """Replace what is not seen, which may be NaN, by 0."""
        return np.where(self.visible, scores, 0)

    def sink_probability(self, lse: Array) -> Array:
        """The sink's probability in each row; 0 without a sink."""
        return np.where(np.isneginf(lse), 0, np.exp(self.sink - lse))

    def add_as_broadcast(self, scores: Array, sums: Array) -> None:
        """Add the scores to an array of the bias's shape, summed over its broadcast axes."""
        part = sums[self.bias]
        part += scores.sum(axis=0, keepdims=True) if len(part) == 1 else scores


@np.errstate(all="ignore")
def softmax(x: Array, dtype: npt.DTypeLike = np.float64) -> Array:
    """exp(x) / sum(exp(x)) over the last axis, in `dtype`; 0 in a row of only -inf."""
    P, _ = _softmax_and_lse(np.asarray(x).astype(dtype))
    return P


def masked_matmul(weights: Array, values: Array, visible: Array, out: Array | None = None) -> Array:
    """Compute weights @ values, where terms outside `visible` are 0, even for 0 * NaN.

    Args:
        weights: (rows, n), zero wherever `visible` is False.
        values: (n, columns), possibly with NaN or Inf.
        visible: (rows, n) of bool.
        out: where to write the product, (rows, columns); a new array by default.
    """
    finite = np.all(np.isfinite(values), axis=1)
    if finite.all():
        return np.matmul(weights, values, out=out)
    product = np.matmul(weights, np.where(finite[:, None], values, 0), out=out)
    for n in np.flatnonzero(~finite):
        rows = visible[:, n]
        product[rows] += weights[rows, n, None] * values[n]
    return product


def unpacked(mask: Array) -> Array:
    """A mask as bools, given as bools or as bits."""
    return mask if mask.dtype == bool else np.unpackbits(mask, axis=-1, bitorder="little").astype(bool)


def _with_four_axes(array: Array) -> Array:
    return array.reshape(four_axes(array.shape))


def _place_of_scores(
    array: Array | None, b: int, h: int, rows: slice, keys: slice
) -> tuple[int, int, slice, slice]:
    """The indices of these scores in a bias or a mask with four axes; one row may stand for all."""
    batch, heads, of_rows, _ = four_axes(() if array is None else array.shape)
    return b if batch > 1 else 0, h if heads > 1 else 0, rows if of_rows > 1 else slice(0, 1), keys


def _pieces(cu_seqlens: Array | None, batch: int, length: int) -> list[tuple[int, int]]:
    """Start and end of each sequence: of packed sequences from cu_seqlens, of others 0 and the length."""
    if cu_seqlens is None:
        return [(0, length)] * batch
    return list(itertools.pairwise(map(int, cu_seqlens)))


def _moved(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)


def _softmax_and_lse(S: Array, sink: float = -math.inf) -> tuple[Array, Array]:
    """Softmax and log-sum-exp of every row, computed after subtracting its maximum so that exp stays finite.

    The sink is one more score in every row.
    """
    m = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(np.isneginf(m), 0, m)  # in an empty row, where -inf - -inf would be NaN
    exp = np.exp(S - m)
    total = exp.sum(axis=-1, keepdims=True) + np.exp(sink - m)
    P = exp / np.where(total == 0, 1, total)
    return P, (m + np.log(total))[..., 0]
