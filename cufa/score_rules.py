"""What the CPU path does between Q K^T and the softmax, and between the softmax and V: soft cap, bias, ALiBi,
the caller's functions, masks, dropout. Also which rows of the arrays belong to a sequence.

All of it works tile by tile. Matrices are (rows, keys) of one head, numbered from the start of the sequence.
Sums are kept in the dtype of the scores.
"""
# The papers write matrices in capitals (S, P, dS), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa import philox
from cufa.arguments import check_window
from cufa.integers import ceil_div
from cufa.messages import counted
from cufa.problem import four_axes
from cufa.reference import ScoreOptions
from cufa.score_mod import MaskMod, ScoreMod, WithSlopes, place_of

Array: TypeAlias = npt.NDArray[Any]
# Where a tile's sums go in the gradient of the bias: batch, head, first row, end of the rows.
BiasPlace: TypeAlias = tuple[int, int, int, int]
# With fewer keys than this, a separate tile takes longer than masking them along with others.
LEAST_WHOLE_KEYS = 32


@dataclass(frozen=True, kw_only=True)
class Rules(ScoreOptions):
    """Applies the options and the scale to each sequence and each head."""

    softmax_scale: float

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after the diagonal a row sees; None for all."""
        left, right = check_window(self.window)
        return left, 0 if self.causal else right

    def sequences(self, q: Array, k: Array) -> list[Sequence]:
        """Every sequence of the batch.

        Raises ValueError if cu_seqlens, seqused_k or the block table is invalid, or if the bias or the mask
        is too short for a sequence.
        """
        sequences = [
            Sequence(number, *place, used := self._used(number, place[2]), self._pages(number, used, k))
            for number, place in enumerate(self._sequence_places(q, k))
        ]
        for name, array in (("bias", self.bias), ("mask", self.mask)):
            if array is not None:
                _check_reach(name, array, sequences)
        return sequences

    def of_head(self, sequence: Sequence, head: int, heads: int) -> HeadRules:
        """The rules of one of the `heads` of a sequence."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[sequence.number]
        left, right = self.reach
        return HeadRules(
            sequence=sequence.number,
            number=head,
            rows=sequence.seqlen_q,
            keys=sequence.seqlen_k,
            left=left,
            right=right,
            softcap=self.softcap,
            bias=_of_head(self.bias, sequence.number, head),
            bias_place=_matrix_place(self.bias, sequence.number, head),
            mask=_of_head(self.mask, sequence.number, head),
            alibi_slope=None if slopes is None else slopes[head],
            sink=-math.inf if self.sink is None else self.sink[head],
            dropout_p=self.dropout_p,
            dropout=(self.seed, self.offset, sequence.number * heads + head),
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
        )

    def _sequence_places(self, q: Array, k: Array) -> list[tuple[tuple[int, ...], slice, slice]]:
        """Batch index, rows and keys of every sequence."""
        room = k.shape[1] if self.block_table is None else self.block_table.shape[1] * k.shape[1]
        if self.cu_seqlens_q is None:
            return [((b,), slice(0, q.shape[1]), slice(0, room)) for b in range(q.shape[0])]
        rows = packed_pieces("cu_seqlens_q", self.cu_seqlens_q, "q", len(q))
        if self.cu_seqlens_k is None:
            return [((), piece, slice(0, room)) for piece in rows]
        keys = packed_pieces("cu_seqlens_k", self.cu_seqlens_k, "k", len(k))
        return [((), *pieces) for pieces in zip(rows, keys, strict=True)]

    def _used(self, number: int, keys: slice) -> int:
        """How many of a sequence's keys count."""
        length = int(keys.stop - keys.start)
        if self.seqused_k is None:
            return length
        used = int(self.seqused_k[number])
        if used < 0:
            raise ValueError(f"seqused_k has {used} for sequence {number}; it must be at least 0")
        return min(length, used)

    def _pages(self, number: int, used: int, k: Array) -> Array | None:
        """The pages that hold the keys of a sequence that count; None if keys are not in pages."""
        if self.block_table is None:
            return None
        pages: Array = self.block_table[number, : ceil_div(used, k.shape[1])]
        for page in pages[(pages < 0) | (pages >= len(k))][:1]:
            held = counted(len(k), "page")
            raise ValueError(f"block_table has page {page} for sequence {number}, and k has {held}")
        return pages


@dataclass(frozen=True)
class Sequence:
    """One sequence of the batch: where its rows and keys are in the arrays."""

    number: int
    batch: tuple[int, ...]  # its index on the batch axis; () for packed sequences, which have no such axis
    rows: slice
    keys: slice
    seqlen_k: int  # how many of the keys count
    pages: Array | None = None  # the numbers of the pages with its keys, if they are in pages

    @property
    def seqlen_q(self) -> int:
        """The number of queries."""
        return int(self.rows.stop - self.rows.start)

    @property
    def scores(self) -> int:
        """The number of scores of a head."""
        return self.seqlen_q * self.seqlen_k

    def queries(self, x: Array) -> Array:
        """Its part of q, out or their gradients: (seqlen_q, heads, dim)."""
        return self._part(x, self.rows)

    def used_keys(self, x: Array) -> Array:
        """Its part of k, v or their gradients: (seqlen_k, kv_heads, dim), or without the axis of heads."""
        if self.pages is not None:
            in_pages: Array = x[self.pages]
            count = len(in_pages) * in_pages.shape[1]  # reshape cannot infer -1 if there are no heads
            keys: Array = in_pages.reshape(count, *x.shape[2:])[: self.seqlen_k]
            return keys
        return self._part(x, slice(self.keys.start, self.keys.start + self.seqlen_k))

    def unused_keys(self, x: Array) -> Array:
        """Its keys that do not count."""
        return self._part(x, slice(self.keys.start + self.seqlen_k, self.keys.stop))

    def statistics(self, x: Array) -> Array:
        """Its part of the LSE or the LSE's gradient: (heads, seqlen_q)."""
        return self._part(x, slice(None), self.rows)

    def _part(self, x: Array, *places: slice) -> Array:
        part: Array = x[self.batch + places]
        return part


@dataclass(frozen=True)
class HeadRules:
    """The rules of one head of one sequence."""

    sequence: int
    number: int
    rows: int
    keys: int
    left: int | None
    right: int | None
    softcap: float
    bias: Array | None  # (1 or rows, keys)
    bias_place: tuple[int, int]
    mask: Array | None  # (1 or rows, keys or bytes of eight)
    alibi_slope: Any
    sink: Any  # -inf for none
    dropout_p: float
    dropout: tuple[int, int, int]  # seed, offset and the number of this head, counted over all sequences
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None

    def visible_tiles(self, rows: slice, tile: int) -> Iterator[tuple[slice, Array | None]]:
        """The tiles of keys that any of the rows sees, each with its visible scores (None: all)."""
        first, last = self._diagonal(rows.start), self._diagonal(rows.stop - 1)
        begin = 0 if self.left is None else max(0, first - self.left)
        end = self.keys if self.right is None else min(self.keys, last + self.right + 1)
        # Tiles end where rows stop seeing all keys, so that few tiles need a mask.
        whole_begin = begin if self.left is None else min(max(begin, last - self.left), end)
        whole_end = end if self.right is None else min(max(whole_begin, first + self.right + 1), end)
        if whole_end - whole_begin < LEAST_WHOLE_KEYS:
            whole_begin = whole_end = begin
        parts = itertools.pairwise((begin, whole_begin, whole_end, end))
        for columns in itertools.chain.from_iterable(tiles_between(*part, tile) for part in parts):
            visible = self._visible(rows, columns)
            if (self.mask is None and self.mask_mod is None) or visible is None:
                yield columns, visible
            elif visible.any():
                yield columns, None if visible.all() else visible

    @property
    def scores_are_products(self) -> bool:
        """Whether scores are plain scaled products, without anything that may be larger."""
        return (
            all(x is None for x in (self.bias, self.alibi_slope, self.score_mod)) and self.sink == -math.inf
        )

    def cap(self, S: Array) -> None:
        """Apply the softcap to the scores."""
        cap(S, self.softcap)

    def slope(self, S: Array) -> Array | None:
        """The derivative of capped scores by the scores before; None if it is 1."""
        return slope_of_cap(S, self.softcap)

    def add(self, S: Array, rows: slice, columns: slice) -> None:
        """Add bias and ALiBi to the scores."""
        if self.bias is not None:
            S += _rows_of(self.bias, rows)[:, columns].astype(S.dtype)
        if self.alibi_slope is not None:
            diagonal, keys = self._places(rows, columns)
            S -= self.alibi_slope * np.abs(keys - diagonal).astype(S.dtype)

    def modify(self, S: Array, rows: slice, columns: slice) -> None:
        """Apply score_mod to the scores."""
        if self.score_mod is not None:
            S[...] = self.score_mod(S, *self._mod_arguments(rows, columns))

    def modify_with_slopes(
        self, S: Array, rows: slice, columns: slice, of_elements: bool
    ) -> WithSlopes | None:
        """The same; returns the derivatives by the old scores and, if wanted, by array elements.

        Returns None if there is no score_mod.
        """
        if self.score_mod is None:
            return None
        before = S.copy()  # a slope may be this array
        modified = self.score_mod.with_slopes(
            before, *self._mod_arguments(rows, columns), of_elements=of_elements
        )
        S[...] = modified.score
        return modified

    def kept(self, rows: slice, columns: slice) -> Array | None:
        """Which probabilities dropout keeps, (rows, columns) of bool; None for all."""
        return philox.kept(self.dropout_p, *self.dropout, rows, columns) if self.dropout_p else None

    @property
    def kept_scale(self) -> float:
        """The factor for kept probabilities."""
        return philox.kept_scale(self.dropout_p)

    def add_bias_gradient(self, dS: Array, rows: slice, columns: slice, sums: dict[BiasPlace, Array]) -> None:
        """Add the gradients of a tile of scores to the gradient of the bias that was added to them."""
        assert self.bias is not None
        if len(self.bias) == 1:
            rows, dS = slice(0, 1), dS.sum(axis=0, keepdims=True)
        place = *self.bias_place, rows.start, rows.stop
        if place not in sums:
            sums[place] = np.zeros((len(dS), self.keys), dS.dtype)
        sums[place][:, columns] += dS

    def _visible(self, rows: slice, columns: slice) -> Array | None:
        """Which rows of a tile see which keys; None if all see all."""
        first, last = self._diagonal(rows.start), self._diagonal(rows.stop - 1)
        parts: list[Array] = []
        if self.left is not None and columns.start < last - self.left:
            diagonal, keys = self._places(rows, columns)
            parts.append(keys >= diagonal - self.left)
        if self.right is not None and columns.stop - 1 > first + self.right:
            diagonal, keys = self._places(rows, columns)
            parts.append(keys <= diagonal + self.right)
        if self.mask is not None:
            mask = _mask_tile(_rows_of(self.mask, rows), columns)
            parts.append(np.broadcast_to(mask, (rows.stop - rows.start, mask.shape[1])))
        if self.mask_mod is not None:
            seen = np.asarray(self.mask_mod(*self._mod_arguments(rows, columns)), bool)
            parts.append(np.broadcast_to(seen, (rows.stop - rows.start, columns.stop - columns.start)))
        return functools.reduce(np.logical_and, parts) if parts else None

    def _mod_arguments(self, rows: slice, columns: slice) -> tuple[Array, Array, Array, Array]:
        """The arguments of the caller's functions for a tile."""
        return place_of(self.sequence, self.number, rows, columns)

    def _places(self, rows: slice, columns: slice) -> tuple[Array, Array]:
        """The keys that rows are aligned with, (rows, 1), and the keys of a tile."""
        diagonal = np.arange(self._diagonal(rows.start), self._diagonal(rows.stop))
        return diagonal[:, None], np.arange(columns.start, columns.stop)

    def _diagonal(self, row: int) -> int:
        """The key that a row is aligned with; the last row is aligned with the last key."""
        return row + self.keys - self.rows


def cap(S: Array, softcap: float) -> None:
    """Apply the softcap to scores, unless it is 0."""
    if softcap:
        S /= softcap
        np.tanh(S, out=S)
        S *= softcap


def slope_of_cap(S: Array, softcap: float) -> Array | None:
    """The derivative of capped scores by the scores before; None if it is 1."""
    if not softcap:
        return None
    slope: Array = 1 - np.square(S / softcap)
    return slope


def tiles_between(begin: int, end: int, tile: int) -> list[slice]:
    """Split a range into tiles of this length and a remainder."""
    return [slice(start, min(start + tile, end)) for start in range(begin, end, tile)]


def packed_pieces(name: str, cu_seqlens: Array, tensor: str, tokens: int) -> list[slice]:
    """The slice of each packed sequence; raises ValueError if cu_seqlens is invalid."""
    ends = [int(end) for end in cu_seqlens]
    if ends[0] < 0:
        raise ValueError(f"{name} begins with {ends[0]}; it must be at least 0")
    if ends[-1] > tokens:
        raise ValueError(f"{name} ends with {ends[-1]}, but {tensor} has {counted(tokens, 'token')}")
    pieces = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    for b, piece in enumerate(pieces):
        if piece.stop < piece.start:
            raise ValueError(f"{name} falls from {piece.start} to {piece.stop} in sequence {b}; it must not")
    return pieces


def _check_reach(name: str, array: Array, sequences: list[Sequence]) -> None:
    """Raise ValueError unless the bias or the mask has the rows and the keys of every sequence."""
    _, _, rows, keys = four_axes(array.shape)
    if array.dtype == np.uint8:
        keys *= 8
    for sequence in sequences:
        if (rows < sequence.seqlen_q and rows != 1) or keys < sequence.seqlen_k:
            raise ValueError(
                f"{name} has shape {array.shape}, but sequence {sequence.number} has "
                f"{sequence.seqlen_q} rows and {sequence.seqlen_k} keys"
            )


def _matrix_place(array: Array | None, batch: int, head: int) -> tuple[int, int]:
    """The indices of a head's matrix in the bias or the mask."""
    batch_size, heads, _, _ = four_axes(() if array is None else array.shape)
    return batch if batch_size > 1 else 0, head if heads > 1 else 0


def _of_head(array: Array | None, batch: int, head: int) -> Array | None:
    if array is None:
        return None
    matrix: Array = array.reshape(four_axes(array.shape))[_matrix_place(array, batch, head)]
    return matrix


def _rows_of(matrix: Array, rows: slice) -> Array:
    """Rows of a matrix; a single row stands for all."""
    return matrix if len(matrix) == 1 else matrix[rows]


def _mask_tile(mask: Array, columns: slice) -> Array:
    """Some keys of a mask's rows as bool."""
    if mask.dtype != np.uint8:
        return mask[:, columns]
    first = columns.start // 8
    in_bytes = mask[:, first : ceil_div(columns.stop, 8)]
    bits = np.unpackbits(in_bytes, axis=1, bitorder="little").astype(bool)
    return bits[:, columns.start - 8 * first : columns.stop - 8 * first]
