"""The parameter structs of the kernels, packed: the same fields in the same order as params.cuh has them."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from cufa.philox import kept_carry, kept_scale
from cufa.plan.record import NOT_PARTED, Parting
from cufa.plan.sizes import (
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

# The structs of params.cuh begin with the tensors; then LSE, workspace and softmax_scale; sizes and step.
_TENSORS = {"forward": struct.Struct("=" + 4 * "4q"), "backward": struct.Struct("=" + 8 * "4q")}
_CALL = struct.Struct("=2qd")
_SIZES = struct.Struct("=6i")
# Forward: parts of a head's tiles, if there is a list of them; tiles that are whole, parts of each of the
# others, how many times something is handed out.
_PLACES = struct.Struct(f"={MOST_PARTS_OF_HEAD * PART_PLACE_BYTES}s")
_PARTING = struct.Struct("=3i4x")
# Addresses and strides of what functions of the caller's read, with which the features begin.
_INT64 = struct.Struct("=q")
# Bias, mask, ALiBi slopes and their batch stride, sink, three arrays of lengths, three of descales.
_ARRAYS = struct.Struct("=4q4q" + "2q" + "q" + "3q" + "3q")
# Softcap, kept_scale, seed, offset, kept_carry.
_VALUES = struct.Struct("=2dQ2I")
_WINDOW = struct.Struct("=2i")
# dLSE, dsink, dbias and its lengths.
_GRADIENTS = struct.Struct("=2q" + "4q4i")
# The block table, how many pages of a sequence it has, its batch stride.
_PAGES = struct.Struct("=q2i")
# Addresses of x and y, their row strides, rows and columns.
_SOFTMAX = struct.Struct("=2q2qqi4x")
# Three tensors, three LSEs, batch, heads, seqlen.
_MERGE = struct.Struct("=" + 3 * "4q" + "3q" + "3i4x")
# Two tensors, cos and sin, positions and their strides, batch, heads, seqlen, places.
_ROTARY = struct.Struct("=" + 2 * "4q" + "2q" + "3q" + "4i")
# Two tensors, cu_seqlens, what is measured, descales, batch, heads, kv_heads, seqlen.
_QUANTIZE = struct.Struct("=" + 2 * "4q" + "3q" + "4i")
assert _SOFTMAX.size == SOFTMAX_PARAMS_BYTES
assert _MERGE.size == MERGE_PARAMS_BYTES
assert _ROTARY.size == ROTARY_PARAMS_BYTES
assert _QUANTIZE.size == QUANTIZE_PARAMS_BYTES
# What follows in the structs when a call asks for nothing of it.
NO_FEATURES = {
    direction: bytes(_ARRAYS.size + _VALUES.size + _WINDOW.size + last.size)
    for direction, last in (("forward", _PAGES), ("backward", _GRADIENTS))
}
assert all(
    _TENSORS[direction].size + _CALL.size + sizes + len(NO_FEATURES[direction]) == size
    for direction, sizes, size in (
        ("forward", _SIZES.size + _PARTING.size, FORWARD_PARAMS_BYTES),
        ("backward", _SIZES.size, BACKWARD_PARAMS_BYTES),
    )
)
# How far a window reaches that has no end on one side.
_UNLIMITED = 2**31 - 1


def pack_tensors(problem: Problem, tensors: Sequence[int]) -> bytes:
    """What ForwardParams and BackwardParams begin with: q, k, v, o and, backward, dout, dq, dk, dv.

    `tensors` has four numbers for each: its address, then batch, row and head stride in elements.
    """
    return _TENSORS[problem.direction].pack(*tensors)


def pack_call(lse: int, workspace: int, softmax_scale: float) -> bytes:
    """What follows the tensors; `lse` and `workspace` are addresses, 0 for none."""
    return _CALL.pack(lse, workspace, softmax_scale)


def pack_sizes(problem: Problem, step: int = 0, parting: Parting = NOT_PARTED) -> bytes:
    """What follows that."""
    sizes = _SIZES.pack(
        problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k, step
    )
    if problem.direction == "backward":
        return sizes
    places = _PLACES.pack(bytes(itertools.chain(*parting.places))) if parting.places else b""
    return sizes + places + _PARTING.pack(parting.whole, parting.parts, parting.count)


class FeatureValues(NamedTuple):
    """The numbers that go with features, as in `cufa.attention`."""

    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0


@functools.lru_cache
def pack_values(values: FeatureValues) -> bytes:
    """The numbers, which are in the midst of the fields that features have to themselves."""
    p = values.dropout_p
    return _VALUES.pack(values.softcap, kept_scale(p), values.seed, values.offset, kept_carry(p))


def pack_features(problem: Problem, side: Mapping[str, Region]) -> tuple[bytes, bytes]:
    """What ends the structs, those fields: all before the numbers, and all after them.

    `side` is the memory of the arrays beyond the tensors, by their names as arguments, contiguous along the
    last axis; those that are missing are null.
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
    """Pages; of no table if it is None."""
    if table is None:
        return bytes(_PAGES.size)
    batch_stride = table.strides[0] // table.itemsize
    return _PAGES.pack(table.address, table.shape[1], batch_stride)


def _pack_mod_arrays(problem: Problem, side: Mapping[str, Region]) -> bytes:
    """The arrays that score_mod and mask_mod read: address, then strides in elements; then the gradients.

    Of those address, which of the sums are its first, and lengths. Raises ValueError for an array that
    reaches too far.
    """
    packed = b""
    for name in problem.features.mod_arrays:
        array = side[name]
        strides = [stride // array.itemsize for stride in array.strides]
        reach = sum(abs(stride) * (size - 1) for stride, size in zip(strides, array.shape, strict=True))
        if reach > MAX_EXTENT:
            raise ValueError(f"{name} reaches over {reach + 1} elements; it may over {MAX_EXTENT}")
        packed += b"".join(map(_INT64.pack, (array.address, *strides)))
    first = 0
    for name in problem.features.differentiated_arrays:
        shape = side[name].shape
        packed += b"".join(map(_INT64.pack, (side[f"d{name}"].address, first, *shape)))
        first += prod(shape)
    return packed


def _score_strides(array: Region | None) -> tuple[int, ...]:
    """Batch, head and row stride, in elements, of an array that is broadcast to the scores; or of none."""
    if array is None:
        return 0, 0, 0
    shape, strides = four_axes(array.shape), (0,) * (4 - len(array.shape)) + array.strides
    return tuple(
        0 if size == 1 else stride // array.itemsize
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def bias_fields(address: int, bias: Region) -> list[int]:
    """Four numbers of a bias that lies so at an address, as `pack_tensors` has them of each tensor."""
    batch_stride, head_stride, row_stride = _score_strides(bias)
    return [address, batch_stride, row_stride, head_stride]


def pack_softmax(x: int, y: int, x_row_stride: int, y_row_stride: int, rows: int, cols: int) -> bytes:
    """SoftmaxParams; strides in elements."""
    return _SOFTMAX.pack(x, y, x_row_stride, y_row_stride, rows, cols)


def pack_merge(tensors: Sequence[int], lses: Sequence[int], batch: int, heads: int, seqlen: int) -> bytes:
    """MergeParams: out_a, out_b and out as `pack_tensors` has them, then the addresses of their LSEs."""
    return _MERGE.pack(*tensors, *lses, batch, heads, seqlen)


def pack_rotary(
    tensors: Sequence[int],
    tables: Sequence[int],
    positions: tuple[int, int, int],
    sizes: tuple[int, int, int],
    places: int,
) -> bytes:
    """RotaryParams: x and y as `pack_tensors` has them, the addresses of cos and sin, the positions' address
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
    """QuantizeParams: x and y as `pack_tensors` has them, three addresses of which the first two may be 0 for
    none, (batch, heads, kv_heads, seqlen).
    """
    return _QUANTIZE.pack(*tensors, cu_seqlens, measured, descale, *sizes)
