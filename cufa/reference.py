"""Standard attention and its gradients in NumPy: the specification of every kernel.

Written to be read, and to be right: it keeps whole S and P matrices and takes no shortcuts. Arrays
are (batch, seqlen, heads, head_dim), of packed sequences (tokens, heads, head_dim), with any strides.
Everything is computed in `dtype`; float64 judges the 16 and 32-bit kernels, numpy.longdouble judges the
float64 ones.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import philox
from cufa.problem import check_window, four_axes

Array: TypeAlias = npt.NDArray[Any]


def exactly(x: Array) -> Array:
    """Rounds nothing."""
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

    Query head h reads KV head h // (heads // kv_heads). What a query does not see contributes nothing,
    even if it is NaN or Inf.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        dtype: of the whole computation and of what is returned.
        rounded: what every matrix goes through before the next is computed from it.
        rules: the fields of `Rules`.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), the natural
        logarithm of each row's sum of exp(S). A row that sees no key has out 0 and lse -inf, and so have
        tokens that are in no sequence.

    Raises:
        ValueError: from NumPy, when the shapes do not fit each other.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    out = np.zeros((*q.shape[:-1], v.shape[-1]), dtype)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -np.inf, dtype)
    for head in Rules(**rules).heads(q, k):
        Q, K, V = q[head.queries], k[head.keys], v[head.keys]
        S, _ = head.scores(Q, K, rounded)
        P, lse[head.lse] = head.softmax(S, rounded)
        out[head.queries] = rounded(masked_matmul(rounded(P * head.kept), V, head.visible))
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
    dtype: npt.DTypeLike = np.float64,
    rounded: Callable[[Array], Array] = exactly,
    **rules: Any,
) -> tuple[Array, ...]:
    """Gradients of sum(dout * out) + sum(dlse * lse) (FlashAttention, Dao et al. 2022, appendix B.2).

    The arguments are those of `attention`, and dout (batch, seqlen_q, heads, head_dim_v) and dlse
    (batch, heads, seqlen_q).

    Returns:
        dq, dk and dv, shaped like q, k and v; dk and dv are summed over the query heads that share
        a KV head. With return_dbias then dbias, with return_dsink dsink, shaped like bias and sink and
        summed over what those are broadcast to. What is not seen contributes nothing; a row that sees no
        key has gradient 0.

    Raises:
        ValueError: from NumPy, when the shapes do not fit each other.
    """
    dout, q, k, v = (np.asarray(x).astype(dtype) for x in (dout, q, k, v))
    asked = Rules(**rules)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    bias_shape = asked.bias.shape if return_dbias and asked.bias is not None else ()
    dbias = np.zeros(four_axes(bias_shape), dtype)
    dsink = np.zeros(q.shape[-2], dtype)
    for head in asked.heads(q, k):
        Q, K, V, dO = q[head.queries], k[head.keys], v[head.keys], dout[head.queries]
        S, slope = head.scores(Q, K, rounded)
        P, lse = head.softmax(S, rounded)
        dP = rounded(head.kept * rounded(head.only_visible(dO @ V.T)))
        D = (P * dP).sum(axis=1) - (0 if dlse is None else dlse[head.lse].astype(dtype))
        dS = rounded(head.only_visible(P * (dP - D[:, None])))
        dproduct = rounded(head.only_visible(dS * slope))
        dq[head.queries] = head.scale * masked_matmul(dproduct, K, head.visible)
        dk[head.keys] += head.scale * masked_matmul(dproduct.T, Q, head.visible.T)
        dv[head.keys] += masked_matmul(rounded(P * head.kept).T, dO, head.visible.T)
        if return_dbias:
            head.add_as_broadcast(dS, dbias)
        dsink[head.number] -= (head.sink_probability(lse) * D).sum()
    results = [dq, dk, dv]
    if return_dbias:
        results.append(dbias.reshape(bias_shape))
    if return_dsink:
        results.append(dsink)
    return tuple(results)


@dataclass(frozen=True)
class Rules:
    """What a call asks for between Q K^T and the softmax, and between the softmax and V.

    The fields are the arguments of `cufa.attention`, which says what they are.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
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

    def heads(self, q: Array, k: Array) -> Iterator[Head]:
        """Every head of every sequence."""
        heads, head_dim = q.shape[-2:]
        group = heads // max(1, k.shape[-2])
        scale = 1 / math.sqrt(head_dim) if self.softmax_scale is None else self.softmax_scale
        for b, h in itertools.product(range(self._batch(q)), range(heads)):
            rows, keys = self._sequence(b, q, k)
            # What comes first in an index: nothing where there is no batch axis.
            of_batch = () if self.cu_seqlens_q is not None else (b,)
            lengths = rows.stop - rows.start, keys.stop - keys.start
            yield Head(
                number=h,
                queries=(*of_batch, rows, h),
                keys=(*of_batch, keys, h // group),
                lse=(*of_batch, h, rows),
                scores_of_bias=_index_of_scores(self.bias, b, h, *lengths),
                scale=scale,
                softcap=self.softcap,
                added=self._added(b, h, *lengths, q.dtype),
                visible=self._visible(b, h, *lengths),
                kept=self._kept(b * heads + h, *lengths, q.dtype),
                sink=-math.inf if self.sink is None else self.sink[h],
            )

    def _batch(self, q: Array) -> int:
        return q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    def _sequence(self, b: int, q: Array, k: Array) -> tuple[slice, slice]:
        """Where the queries and those keys that count of a sequence are in q and in k."""
        rows, keys = slice(0, q.shape[-3]), slice(0, k.shape[-3])
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            rows = slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))
            keys = slice(int(self.cu_seqlens_k[b]), int(self.cu_seqlens_k[b + 1]))
        if self.seqused_k is not None:
            keys = slice(keys.start, min(keys.stop, keys.start + int(self.seqused_k[b])))
        return rows, keys

    def _visible(self, b: int, h: int, rows: int, keys: int) -> Array:
        """(rows, keys) of bool: may query i see key j."""
        distance = _distance_from_diagonal(rows, keys)
        left, right = check_window(self.window)
        if self.causal:
            right = 0
        visible: Array = np.ones((rows, keys), bool)
        if left is not None:
            visible &= distance >= -left
        if right is not None:
            visible &= distance <= right
        if self.mask is not None:
            visible &= unpacked(self.mask)[_index_of_scores(self.mask, b, h, rows, keys)]
        return visible

    def _added(self, b: int, h: int, rows: int, keys: int, dtype: npt.DTypeLike) -> Array:
        """What is added to the scores: bias and ALiBi (Press et al. 2022)."""
        added = np.zeros((rows, keys), dtype)
        if self.bias is not None:
            bias = self.bias.reshape(four_axes(self.bias.shape))
            added += bias[_index_of_scores(self.bias, b, h, rows, keys)]
        if self.alibi_slopes is not None:
            slope = np.atleast_2d(self.alibi_slopes)[b if self.alibi_slopes.ndim == 2 else 0, h]
            added -= slope.astype(dtype) * np.abs(_distance_from_diagonal(rows, keys))
        return added

    def _kept(self, matrix: int, rows: int, keys: int, dtype: npt.DTypeLike) -> Array:
        """What dropout multiplies the probabilities by."""
        if not self.dropout_p:
            return np.ones((rows, keys), dtype)
        kept = philox.kept(self.dropout_p, self.seed, self.offset, matrix, slice(0, rows), slice(0, keys))
        return np.where(kept, 1 / (1 - self.dropout_p), 0).astype(dtype)


@dataclass(frozen=True)
class Head:
    """One head of one sequence: where it is in the arrays, and the rules that it goes by.

    `queries` is its place in q, out and their gradients, `keys` in k and v; matrices are (rows, keys).
    """

    number: int
    queries: tuple[int | slice, ...]
    keys: tuple[int | slice, ...]
    lse: tuple[int | slice, ...]
    scores_of_bias: tuple[int | slice, ...]
    scale: float
    softcap: float
    added: Array
    visible: Array
    kept: Array
    sink: Any

    def scores(self, Q: Array, K: Array, rounded: Callable[[Array], Array] = exactly) -> tuple[Array, Array]:
        """S, and by how much it changes with the product of Q and K times the scale."""
        S, slope = rounded(self.scale * (Q @ K.T)), np.ones(self.visible.shape, Q.dtype)
        if self.softcap:
            tanh = rounded(np.tanh(S / self.softcap))
            S, slope = rounded(self.softcap * tanh), 1 - tanh**2
        return np.where(self.visible, rounded(S + self.added), -np.inf), slope

    def softmax(self, S: Array, rounded: Callable[[Array], Array] = exactly) -> tuple[Array, Array]:
        """P and the LSE."""
        P, lse = _softmax_and_lse(S, self.sink)
        return rounded(self.only_visible(P)), lse  # a NaN in S makes the whole row NaN

    def only_visible(self, scores: Array) -> Array:
        """0 for what is not seen, instead of what may be NaN."""
        return np.where(self.visible, scores, 0)

    def sink_probability(self, lse: Array) -> Array:
        """What of each row's probability the sink has; nothing if there is none."""
        return np.where(np.isneginf(lse), 0, np.exp(self.sink - lse))

    def add_as_broadcast(self, scores: Array, sums: Array) -> None:
        """Add to an array of the bias's shape what belongs to each of its elements."""
        part = sums[self.scores_of_bias]
        part += scores.sum(axis=0, keepdims=True) if len(part) == 1 else scores


@np.errstate(all="ignore")
def softmax(x: Array, dtype: npt.DTypeLike = np.float64) -> Array:
    """exp(x) / sum(exp(x)) over the last axis, in `dtype`; 0 in a row of nothing but -inf."""
    P, _ = _softmax_and_lse(np.asarray(x).astype(dtype))
    return P


def masked_matmul(weights: Array, values: Array, visible: Array, out: Array | None = None) -> Array:
    """The product weights @ values, whose terms outside `visible` are nothing, not even 0 * NaN.

    Args:
        weights: (rows, n), zero wherever `visible` is False.
        values: (n, columns), possibly with NaN or Inf.
        visible: (rows, n) of bool.
        out: where the product goes, (rows, columns); a new array by default.
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
    """A mask as four axes of bool, whether it was bools or bits."""
    if mask.dtype == np.uint8:
        mask = np.unpackbits(mask, axis=-1, bitorder="little").astype(bool)
    return mask.reshape(four_axes(mask.shape))


def _index_of_scores(array: Array | None, b: int, h: int, rows: int, keys: int) -> tuple[int | slice, ...]:
    """Where a bias or a mask has a head's scores, as (1 or rows, keys)."""
    shape = () if array is None else array.shape
    batch, heads, _, _ = four_axes(shape)
    return b if batch > 1 else 0, h if heads > 1 else 0, slice(0, rows), slice(0, keys)


def _distance_from_diagonal(rows: int, keys: int) -> Array:
    """How far each key is beyond the one where the row stands: the last row stands at the last key."""
    i, j = np.ogrid[:rows, :keys]
    distance: Array = j - (i + keys - rows)
    return distance


def _softmax_and_lse(S: Array, sink: float = -math.inf) -> tuple[Array, Array]:
    """Softmax and log-sum-exp of every row; less the row's maximum, so that exp stays finite.

    The sink is one more score of every row.
    """
    m = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(np.isneginf(m), 0, m)  # in an empty row, where -inf - -inf would be NaN
    exp = np.exp(S - m)
    total = exp.sum(axis=-1, keepdims=True) + np.exp(sink - m)
    P = exp / np.where(total == 0, 1, total)
    return P, (m + np.log(total))[..., 0]
