"""Packs the parameter structs of the kernels: the same fields in the same order as in params.cuh."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Mapping, Sequence
from math import e, log2, prod
from typing import NamedTuple

from cufa.philox import kept_carry, kept_scale
from cufa.plan.record import NOT_PARTED, Parting
from cufa.plan.struct_sizes import (
    APPEND_PARAMS_BYTES,
    BACKWARD_PARAMS_BYTES,
    FORWARD_PARAMS_BYTES,
    MERGE_PARAMS_BYTES,
    MOST_PARTS_OF_HEAD,
    PART_PLACE_BYTES,
    QUANTIZE_PARAMS_BYTES,
    ROTARY_PARAMS_BYTES,
    SOFTMAX_PARAMS_BYTES,
)
from cufa.problem import MAX_EXTENT, Problem, four_axes
from cufa.tensor_layout import Region

# The structs of params.cuh begin with the tensors, then LSE, workspace, softmax_scale and scale_log2, sizes
# and step.
_TENSORS = {"forward": struct.Struct("=" + 4 * "4q"), "backward": struct.Struct("=" + 8 * "4q")}
# Numbers are of the type of sums, by its bytes; each takes eight.
_CALL = {4: struct.Struct("=2q" + 2 * "f4x"), 8: struct.Struct("=2q2d")}
_SIZES = {"forward": struct.Struct("=7i"), "backward": struct.Struct("=7i4x")}
# Forward: the parts of a head's tiles, if there is a list of them; the number of whole tiles, the parts of
# each other tile, the number of work items.
_PLACES = struct.Struct(f"={MOST_PARTS_OF_HEAD * PART_PLACE_BYTES}s")
_PARTING = struct.Struct("=3i")
# Addresses and strides of the arrays that score_mod and mask_mod read; the features begin with them.
_INT64 = struct.Struct("=q")
# Bias, mask, ALiBi slopes and their batch stride, sink, three arrays of lengths, three of descales.
_ARRAYS = struct.Struct("=4q4q" + "2q" + "q" + "3q" + "3q")
# Softcap and its reciprocal, kept_scale, seed, offset, kept_carry.
_VALUES = {4: struct.Struct("=" + 3 * "f4x" + "Q2I"), 8: struct.Struct("=3dQ2I")}
_WINDOW = struct.Struct("=2i")
# dLSE, dsink, dbias and its lengths.
_GRADIENTS = struct.Struct("=2q" + "4q4i")
# The block table, the number of pages of a sequence, the table's batch stride.
_PAGES = struct.Struct("=q2i")
# Addresses of x and y, their row strides, rows and columns.
_SOFTMAX = struct.Struct("=2q2qqi4x")
# Three tensors, three LSEs, batch, heads, seqlen.
_MERGE = struct.Struct("=" + 3 * "4q" + "3q" + "3i4x")
# Two tensors, cos and sin, positions and their strides, batch, heads, seqlen, places.
_ROTARY = struct.Struct("=" + 2 * "4q" + "2q" + "3q" + "4i")
# Two tensors, cu_seqlens, the address for measuring, descales, batch, heads, kv_heads, seqlen.
_QUANTIZE = struct.Struct("=" + 2 * "4q" + "3q" + "4i")
# Four tensors, the numbers of keys held, the block table and its stride, the number held by each, the pages
# of a sequence, their number and size, batch, heads, seqlen, the lengths, two descales.
_APPEND = struct.Struct("=" + 4 * "4q" + "3q" + "7i4x" + "3q")
# Queries and where they are rotated to, cos and sin, heads, seqlen, step, places.
_ROTATED = struct.Struct("=" + 2 * "4q" + "2q" + "4i")
NOT_ROTATED = bytes(_ROTATED.size)
assert _SOFTMAX.size == SOFTMAX_PARAMS_BYTES
assert _MERGE.size == MERGE_PARAMS_BYTES
assert _ROTARY.size == ROTARY_PARAMS_BYTES
assert _QUANTIZE.size == QUANTIZE_PARAMS_BYTES
assert _APPEND.size + _ROTATED.size == APPEND_PARAMS_BYTES
# The end of the structs for a call without features.
NO_FEATURES = {
    direction: bytes(_ARRAYS.size + _VALUES[8].size + _WINDOW.size + last.size)
    for direction, last in (("forward", _PAGES), ("backward", _GRADIENTS))
}
assert all(
    _TENSORS[direction].size + _CALL[8].size + sizes + len(NO_FEATURES[direction]) == size
    for direction, sizes, size in (
        ("forward", _SIZES["forward"].size + _PARTING.size, FORWARD_PARAMS_BYTES),
        ("backward", _SIZES["backward"].size, BACKWARD_PARAMS_BYTES),
    )
)
_LOG2_E = log2(e)
_ALMOST_0 = 1e-30  # a scale that makes almost every score 0
# The extent of a window without an end on one side.
_UNLIMITED = 2**31 - 1


def pack_tensors(problem: Problem, tensors: Sequence[int]) -> bytes:
    """Pack the start of ForwardParams and BackwardParams: q, k, v, o and, backward, dout, dq, dk, dv.

    `tensors` has four numbers for each: its address, then batch, row and head stride in elements.
    """
    return _TENSORS[problem.direction].pack(*tensors)


def pack_call(lse: int, workspace: int, softmax_scale: float, sum_bytes: int) -> bytes:
    """Pack what follows the tensors; `lse` and `workspace` are addresses, 0 for none.

    `sum_bytes` is the size of the accumulator's dtype.
    """
    return _CALL[sum_bytes].pack(lse, workspace, softmax_scale, softmax_scale * _LOG2_E or _ALMOST_0)


def pack_sizes(problem: Problem, step: int = 0, parting: Parting = NOT_PARTED) -> bytes:
    """Pack the sizes, which follow the fields of `pack_call`."""
    # Of packed sequences, kernels read from a block table how many keys it has room for.
    lengths = problem.seqlen_q, min(problem.seqlen_k, MAX_EXTENT)
    sizes = _SIZES[problem.direction].pack(
        problem.batch, problem.heads, problem.kv_heads, *lengths, step, problem.most_keys
    )
    if problem.direction == "backward":
        return sizes
    places = _PLACES.pack(bytes(itertools.chain(*parting.places))) if parting.places else b""
    return sizes + places + _PARTING.pack(parting.whole, parting.parts, parting.count)


class FeatureValues(NamedTuple):
    """The numbers of the features, as in `cufa.attention`."""

    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0


@functools.lru_cache
def pack_values(values: FeatureValues, sum_bytes: int) -> bytes:
    """Pack the numbers, which lie in the middle of the feature fields; `sum_bytes` as for `pack_call`."""
    softcap, p, seed, offset = values
    reciprocal = 1 / softcap if softcap else 0.0
    return _VALUES[sum_bytes].pack(softcap, reciprocal, kept_scale(p), seed, offset, kept_carry(p))


def pack_features(problem: Problem, side: Mapping[str, Region]) -> tuple[bytes, bytes]:
    """Pack the end of the structs, the feature fields: those before the numbers, and those after them.

    `side` is the memory of the arrays beyond the tensors, by argument name, contiguous along the last axis;
    missing ones are null.
    """

    def at(name: str) -> int:
        return side[name].address if name in side else 0

    slopes = side.get("alibi_slopes")
    before = _pack_mod_arrays(problem, side) + _ARRAYS.pack(
        at("bias"),
        *_score_strides(side.get("bias")),
        at("mask"),
        *_score_strides(side.get("mask")),
        at("alibi_slopes"),
        problem.heads if slopes is not None and len(slopes.shape) == 2 else 0,
        at("sink"),
        at("cu_seqlens_q"),
        at("cu_seqlens_k"),
        at("seqused_k"),
        at("q_descale"),
        at("k_descale"),
        at("v_descale"),
    )
    window = _WINDOW.pack(*(_UNLIMITED if keys is None else keys for keys in problem.features.window))
    if problem.direction == "forward":
        return before, window + _pack_pages(side.get("block_table"))
    dbias = side.get("dbias")
    lengths = problem.features.bias if dbias is not None and problem.features.bias else (0, 0, 0, 0)
    fields = at("dlse"), at("dsink"), at("dbias"), *_score_strides(dbias), *lengths
    return before, window + _GRADIENTS.pack(*fields)


def _pack_pages(table: Region | None) -> bytes:
    """Pack the pages; None for no block table."""
    if table is None:
        return bytes(_PAGES.size)
    batch_stride = table.strides[0] // table.itemsize if table.shape[0] > 1 else 0
    return _PAGES.pack(table.address, table.shape[1], batch_stride)


def _pack_mod_arrays(problem: Problem, side: Mapping[str, Region]) -> bytes:
    """Pack the arrays that score_mod and mask_mod read: address, then strides in elements; then gradients.

    A gradient has its address, the index of its first sum, and its lengths.
    """
    packed = b""
    for name in problem.features.mod_arrays:
        array = side[name]
        strides = [stride // array.itemsize for stride in array.strides]
        packed += b"".join(map(_INT64.pack, (array.address, *strides)))
    first = 0
    for name in problem.features.differentiated_arrays:
        shape = side[name].shape
        packed += b"".join(map(_INT64.pack, (side[f"d{name}"].address, first, *shape)))
        first += prod(shape)
    return packed


def _score_strides(array: Region | None) -> tuple[int, ...]:
    """Batch, head and row stride in elements of an array that broadcasts to the scores, or of None."""
    if array is None:
        return 0, 0, 0
    shape, strides = four_axes(array.shape), (0,) * (4 - len(array.shape)) + array.strides
    return tuple(
        0 if size == 1 else stride // array.itemsize
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def bias_fields(address: int, bias: Region) -> list[int]:
    """The four numbers of a bias at this address, as `pack_tensors` takes them for a tensor."""
    batch_stride, head_stride, row_stride = _score_strides(bias)
    return [address, batch_stride, row_stride, head_stride]


def pack_softmax(x: int, y: int, x_row_stride: int, y_row_stride: int, rows: int, cols: int) -> bytes:
    """Pack SoftmaxParams; strides are in elements."""
    return _SOFTMAX.pack(x, y, x_row_stride, y_row_stride, rows, cols)


def pack_merge(tensors: Sequence[int], lses: Sequence[int], batch: int, heads: int, seqlen: int) -> bytes:
    """Pack MergeParams: out_a, out_b and out as for `pack_tensors`, then the addresses of their LSEs."""
    return _MERGE.pack(*tensors, *lses, batch, heads, seqlen)


def pack_rotary(
    tensors: Sequence[int],
    tables: Sequence[int],
    positions: tuple[int, int, int],
    sizes: tuple[int, int, int],
    places: int,
) -> bytes:
    """Pack RotaryParams: x and y as for `pack_tensors`, the addresses of cos and sin, the positions' address
    and strides in elements, (batch, heads, seqlen), the rows of cos.
    """
    return _ROTARY.pack(*tensors, *tables, *positions, *sizes, places)


def pack_quantize(
    tensors: Sequence[int],
    cu_seqlens: int,
    measured: int,
    descale: int,
    sizes: tuple[int, int, int, int],
) -> bytes:
    """Pack QuantizeParams: x and y as for `pack_tensors`, three addresses (the first two 0 for none), then
    (batch, heads, kv_heads, seqlen).
    """
    return _QUANTIZE.pack(*tensors, cu_seqlens, measured, descale, *sizes)


def pack_append(
    tensors: Sequence[int],
    held: tuple[int, int],
    table: tuple[int, int],
    pages: tuple[int, int, int],
    sizes: tuple[int, int, int],
    lengths: int,
    descales: tuple[int, int],
    rotated: bytes = NOT_ROTATED,
) -> bytes:
    """Pack AppendParams: k, v and their caches as for `pack_tensors`; the address of the numbers of keys held
    (0 for none) and the number held by each; the block table's address (0 for none) and its stride in
    elements; (pages of a sequence, pages, page size); (batch, heads, seqlen); the addresses of the lengths
    and of the caches' descales (0 for none); what `pack_rotated` returns.
    """
    held_at, held_by_each = held
    fields = (*tensors, held_at, *table, held_by_each, *pages, *sizes, lengths, *descales)
    return _APPEND.pack(*fields) + rotated


def pack_rotated(
    tensors: Sequence[int], tables: Sequence[int], sizes: tuple[int, int], step: int, places: int
) -> bytes:
    """Pack RotatedQueries: q and y as for `pack_tensors`, the addresses of cos and sin, (heads, seqlen), the
    step between the positions of two queries, the rows of cos.
    """
    return _ROTATED.pack(*tensors, *tables, *sizes, step, places)
