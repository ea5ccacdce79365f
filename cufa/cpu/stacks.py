"""Attention of many short heads in NumPy: each call works on the matrices of a stack of heads.

A head of few scores takes less time than the Python calls for a tile. Matrices are (batch, heads, rows,
columns) of a stack. Query heads that share keys form one matrix where they are multiplied by these.
"""
# The papers write matrices in capitals (S, P, O, dP, dS) and a row's sum l, and so does this file.
# ruff: noqa: E741, N803, N806

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields

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
from cufa.problem import four_axes
from cufa.reference import unpacked
from cufa.score_rules import Rules, Sequence, cap, slope_of_cap, tiles_between
from cufa.threads import FEW_THREADS, in_threads

# Scores of a stack: in float32 a quarter of a MiB, a MiB if a few threads take turns with Python's lock, and
# four if many do: 96 heads of 512 x 512 take 16 threads 22 ms, in smaller stacks 63.
STACK_SCORES, SHARED_STACK_SCORES, WIDELY_SHARED_STACK_SCORES = 2**16, 2**18, 2**20
# Stacks are for groups of heads with at most this many scores, or half as many with a window, which lets
# tiles be skipped. With more, tiles take no longer.
MOST_SCORES = SHARED_STACK_SCORES
# The options of a call that stacks support. seed and offset belong to dropout, which is not included.
SUPPORTED = {
    "softmax_scale",
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "sink",
    "seed",
    "offset",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "block_table",
}


def suit(q: Array, k: Array, rules: Rules, sequences: list[Sequence]) -> bool:
    """Whether heads are short enough, and the call asks for nothing that only tiles support."""
    others = (getattr(rules, field.name) for field in fields(rules) if field.name not in SUPPORTED)
    if not all(value is None or (np.isscalar(value) and value == 0) for value in others):
        return False
    heads, kv_heads = q.shape[-2], k.shape[-2]
    many = heads > 1 if have_own_lengths(rules) else len(sequences) * kv_heads > 1
    if not many or kv_heads == 0:
        return False
    scores = [heads // kv_heads * each.scores for each in sequences]
    most = MOST_SCORES if rules.window is None else MOST_SCORES // 2
    return min(scores, default=0) > 0 and max(scores) <= most


def have_own_lengths(rules: Rules) -> bool:
    """Whether sequences are packed, in pages, or with seqused_k."""
    return any(x is not None for x in (rules.cu_seqlens_q, rules.seqused_k, rules.block_table))


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    rules: Rules,
    sequences: list[Sequence],
    threads: int,
) -> bool:
    """Do what `cufa.cpu.attention` does; return False, with useless results, if a mask hides NaN in V."""

    def attend(stack: _Stack) -> bool:
        scratch = stack.scratch
        Q = stack.queries("Q", q, rules.softmax_scale)
        K, V = stack.keys("K", k), stack.keys("V", v)
        S = stack.by_head(scratch.product("S", Q, K.swapaxes(2, 3)))
        cap(S, rules.softcap)
        stack.add(S)
        visible = stack.visible()
        if visible is not None and not np.isfinite(V).all():
            return False
        fill_masked(S, -np.inf, visible)
        sink = stack.sink()
        m = np.maximum(S.max(axis=3, keepdims=True), sink)
        P = exp_shifted(S, finite(m))
        l = row_sums(P) + np.exp(sink - finite(m))
        O = stack.by_head(scratch.product("O", stack.by_group(P), V))
        O /= nonzero(l)
        stack.queries_of(out)[...] = O
        if lse is not None:
            stack.statistics_of(lse)[...] = (m + np.log(l))[..., 0]
        return True

    return all(list(in_threads(attend, _stacks(sequences, q, k, rules, threads), threads)))


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
) -> bool:
    """Do what `cufa.cpu.attention_backward` does, or return False, like `attention`."""
    scale = rules.softmax_scale

    def differentiate(stack: _Stack) -> bool:
        scratch = stack.scratch
        Q, K, V = stack.queries("Q", q, scale), stack.keys("K", k), stack.keys("V", v)
        O, dO = stack.queries("O", out), stack.queries("dO", dout)
        visible = stack.visible()
        if visible is not None and not all(np.isfinite(x).all() for x in (Q, K, V, dO)):
            return False
        O *= dO
        D = stack.by_head(row_sums(O))
        if dlse is not None:
            D = D - stack.statistics_of(dlse)[..., None]
        L = empty_as_infinite(stack.statistics_of(lse)[..., None].astype(Q.dtype))
        S = stack.by_head(scratch.product("S", Q, K.swapaxes(2, 3)))
        cap(S, rules.softcap)
        slope = slope_of_cap(S, rules.softcap)
        stack.add(S)
        P = exp_shifted(S, L)
        fill_masked(P, 0, visible)
        dP = stack.by_head(scratch.product("dP", dO, V.swapaxes(2, 3)))
        dP -= D
        dS = np.multiply(P, dP, out=dP)
        if slope is not None:
            dS *= slope
        fill_masked(dS, 0, visible)
        P, dS = stack.by_group(P), stack.by_group(dS)
        stack.keys_of(dv)[...] = scratch.product("dV", P.swapaxes(2, 3), dO)
        stack.keys_of(dk)[...] = scratch.product("dK", dS.swapaxes(2, 3), Q)
        for gradient in (dk, dv):
            stack.unused_keys_of(gradient)[...] = 0
        dQ = scratch.product("dQ", dS, K)
        dQ *= scale
        stack.queries_of(dq)[...] = stack.by_head(dQ)
        return True

    return all(list(in_threads(differentiate, _stacks(sequences, q, k, rules, threads), threads)))


class _Scratches(threading.local):
    """Scratch memory for each thread of a call."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.own = Scratch(dtype)


@dataclass(frozen=True, eq=False)
class _Alike:
    """What stacks of sequences of the same length share.

    A KV head has `group` query heads, `rows` and `columns`.
    """

    rules: Rules
    scratches: _Scratches
    group: int
    rows: int
    columns: int

    @functools.cached_property
    def distances(self) -> Array:
        """How far each key is beyond each row's diagonal; the last row is aligned with the last key."""
        return np.arange(self.columns) - (np.arange(self.rows) + self.columns - self.rows)[:, None]

    @functools.cached_property
    def in_window(self) -> Array | None:
        """Which rows see which keys, without the mask; None if all see all."""
        left, right = self.rules.reach
        parts = [] if left is None else [self.distances >= -left]
        parts += [] if right is None else [self.distances <= right]
        return functools.reduce(np.logical_and, parts) if parts else None


@dataclass(frozen=True)
class _EqualSequences:
    """Consecutive sequences of the same length."""

    numbers: slice

    def queries(self, x: Array) -> Array:
        """Their part of q, out or their gradients: (batch, rows, heads, dim)."""
        part: Array = x[self.numbers]
        return part

    keys = statistics = queries

    def unused_keys(self, x: Array) -> Array:
        """The keys that do not count: none."""
        part: Array = x[self.numbers, :0]
        return part


@dataclass(frozen=True)
class _OneSequence:
    """One sequence that is packed or has its own length, with the same methods."""

    sequence: Sequence

    @property
    def numbers(self) -> slice:
        return slice(self.sequence.number, self.sequence.number + 1)

    def queries(self, x: Array) -> Array:
        return self.sequence.queries(x)[None]

    def keys(self, x: Array) -> Array:
        return self.sequence.used_keys(x)[None]

    def statistics(self, x: Array) -> Array:
        return self.sequence.statistics(x)[None]

    def unused_keys(self, x: Array) -> Array:
        return self.sequence.unused_keys(x)[None]


@dataclass(frozen=True)
class _Stack:
    """Some KV heads of some sequences, and the query heads that share them."""

    alike: _Alike
    sequences: _EqualSequences | _OneSequence
    kv_heads: slice

    @property
    def rules(self) -> Rules:
        """The rules of the call."""
        return self.alike.rules

    @property
    def scratch(self) -> Scratch:
        """Scratch memory of the thread that works on the stack."""
        return self.alike.scratches.own

    @property
    def heads(self) -> slice:
        """The query heads."""
        return slice(self.kv_heads.start * self.alike.group, self.kv_heads.stop * self.alike.group)

    def queries_of(self, x: Array) -> Array:
        """Its part of q, out or their gradients: (batch, heads, rows, dim)."""
        part: Array = self.sequences.queries(x)[:, :, self.heads].swapaxes(1, 2)
        return part

    def keys_of(self, x: Array) -> Array:
        """Its part of k, v or their gradients: (batch, kv_heads, columns, dim)."""
        part: Array = self.sequences.keys(x)[:, :, self.kv_heads].swapaxes(1, 2)
        return part

    def unused_keys_of(self, x: Array) -> Array:
        """Its part of the keys that do not count."""
        return self.sequences.unused_keys(x)[:, :, self.kv_heads]

    def statistics_of(self, x: Array) -> Array:
        """Its part of the LSE or the LSE's gradient: (batch, heads, rows)."""
        return self.sequences.statistics(x)[:, self.heads]

    def queries(self, name: str, x: Array, scale: float = 1.0) -> Array:
        """A scaled copy of `queries_of`, by group."""
        return self.by_group(self.scratch.copy(name, self.queries_of(x), scale))

    def keys(self, name: str, x: Array) -> Array:
        """The same for keys or values; without a copy if BLAS can read them in place."""
        part = self.keys_of(x)
        item = part.itemsize
        rows_apart = part.strides[2] % item == 0 and part.strides[2] >= part.shape[3] * item
        if part.dtype == self.scratch.dtype and part.strides[3] == item and rows_apart:
            return part
        return self.scratch.copy(name, part)

    def by_group(self, x: Array) -> Array:
        """Reshape (batch, heads, rows, ...) to (batch, kv_heads, group * rows, ...)."""
        return x.reshape(x.shape[0], -1, self.alike.group * self.alike.rows, x.shape[-1])

    def by_head(self, x: Array) -> Array:
        """The inverse of `by_group`."""
        return x.reshape(x.shape[0], -1, self.alike.rows, x.shape[-1])

    def add(self, S: Array) -> None:
        """Add bias and ALiBi to the scores."""
        if self.rules.bias is not None:
            S += self._part(self.rules.bias).astype(S.dtype)
        slopes = self.rules.alibi_slopes
        if slopes is not None:
            own = slopes[self.heads] if slopes.ndim == 1 else slopes[self.sequences.numbers, self.heads]
            S -= own[..., None, None] * np.abs(self.alike.distances).astype(S.dtype)

    def visible(self) -> Array | None:
        """Which rows see which keys, for all heads or for each; None if all see all."""
        seen = self.alike.in_window
        if self.rules.mask is not None:
            mask = unpacked(self._part(self.rules.mask))[..., : self.alike.columns]
            seen = mask if seen is None else mask & seen
        return None if seen is None or seen.all() else seen

    def sink(self) -> Array:
        """The extra logits in each row's softmax, (heads, 1, 1); -inf for none."""
        if self.rules.sink is None:
            return np.full((1, 1, 1), -np.inf, self.scratch.dtype)
        sink: Array = np.asarray(self.rules.sink[self.heads], self.scratch.dtype)
        return sink[:, None, None]

    def _part(self, x: Array) -> Array:
        """Its part of a bias or a mask; axes of length 1 stand for all."""
        shape = four_axes(x.shape)
        batches = self.sequences.numbers if shape[0] > 1 else slice(None)
        heads = self.heads if shape[1] > 1 else slice(None)
        part: Array = x.reshape(shape)[batches, heads, : self.alike.rows, : self.alike.columns]
        return part


def _stacks(sequences: list[Sequence], q: Array, k: Array, rules: Rules, threads: int) -> Iterator[_Stack]:
    """All heads in stacks; at least one stack per thread if there are enough sequences and KV heads."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    group, scratches = heads // kv_heads, _Scratches(compute_dtype(q))
    scores = heads * sum(sequence.scores for sequence in sequences)
    most_scores = min(_most_scores(threads), scores // threads)
    if have_own_lengths(rules):
        for sequence in sequences:
            alike = _Alike(rules, scratches, group, sequence.seqlen_q, sequence.seqlen_k)
            parts = tiles_between(0, kv_heads, min(_fitting(alike, most_scores), kv_heads))
            yield from (_Stack(alike, _OneSequence(sequence), part) for part in parts)
        return
    alike = _Alike(rules, scratches, group, q.shape[1], k.shape[1])
    most = _fitting(alike, most_scores)
    for numbers in tiles_between(0, len(sequences), max(1, most // kv_heads)):
        parts = tiles_between(0, kv_heads, min(most, kv_heads))
        yield from (_Stack(alike, _EqualSequences(numbers), part) for part in parts)


def _most_scores(threads: int) -> int:
    """The scores of a stack for so many threads."""
    if threads > FEW_THREADS:
        return WIDELY_SHARED_STACK_SCORES
    return STACK_SCORES if threads == 1 else SHARED_STACK_SCORES


def _fitting(alike: _Alike, scores: int) -> int:
    """The number of KV heads with so many scores, at least one."""
    return max(1, scores // (alike.group * alike.rows * alike.columns))
