"""What the copy engine of sm_90 and later must know of a tensor, encoded by the driver.

A map takes microseconds to encode, so an `Encoder` keeps those of the tensors that it saw last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cufa import driver
from cufa.driver import TENSOR_MAP_BYTES, TensorMapType
from cufa.plan.record import TensorBox
from cufa.problem import FLOAT8, INPUT_DTYPES, KEYS_TOGETHER, MAX_EXTENT, Problem

# The output's place among the tensors of a call.
_OUTPUT = 3
# Those of K and V.
_KEYS = (1, 2)
_VALUES = 2
_TYPES: dict[str, TensorMapType] = {FLOAT8: "UINT8", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}
# Tensors that an encoder remembers for each of the maps.
_REMEMBERED = 256


class Encoder:
    """Encodes the maps that a plan's kernel asks for, and remembers each of them."""

    def __init__(self, problem: Problem, boxes: Sequence[TensorBox]) -> None:
        """Fix what all calls have in common; what changes are addresses and strides."""
        remember = functools.lru_cache(maxsize=_REMEMBERED)
        self._encoders = [
            (remember(functools.partial(_encode, problem, box)), slice(4 * box.tensor, 4 * box.tensor + 4))
            for box in boxes
        ]

    def __call__(self, tensors: Sequence[int]) -> bytes:
        """The maps one after the other; `tensors` are `pack_tensors`'."""
        return b"".join([encode(*tensors[place]) for encode, place in self._encoders])


def _encode(
    problem: Problem, box: TensorBox, address: int, batch_stride: int, row_stride: int, head_stride: int
) -> bytes:
    rows, heads, dim = (
        (problem.seqlen_q, problem.heads, problem.head_dim),
        (problem.seqlen_k, problem.kv_heads, problem.head_dim),
        (problem.seqlen_k, problem.kv_heads, problem.value_dim),
        (problem.seqlen_q, problem.heads, problem.value_dim),
        (problem.seqlen_q, problem.heads, problem.value_dim),
        (problem.seqlen_q, problem.heads, problem.head_dim),
        (problem.seqlen_k, problem.kv_heads, problem.head_dim),
        (problem.seqlen_k, problem.kv_heads, problem.value_dim),
    )[box.tensor]
    if problem.transposed_values and box.tensor == _VALUES:
        rows, dim = dim, rows
    if 0 in (problem.batch, rows, heads, dim) or address == 0:
        return bytes(TENSOR_MAP_BYTES)  # the kernel copies nothing
    batch = problem.batch
    if box.tensor in _KEYS and problem.features.page_size:  # how many pages there are nobody says
        batch, rows = MAX_EXTENT, problem.features.page_size
    elif problem.features.packed:  # the rows of all sequences are one batch
        batch, batch_stride = 1, rows * row_stride
    name = problem.output.name if box.tensor == _OUTPUT else problem.dtype
    itemsize = INPUT_DTYPES[name].itemsize
    strides = [stride * itemsize for stride in (row_stride, head_stride, batch_stride)]
    extents, brought = [dim, rows, heads, batch], [box.cols, box.rows, 1, 1]
    if box.paired_rows:
        extents[1:2], brought[1:2] = [KEYS_TOGETHER, rows // KEYS_TOGETHER], [2, box.rows // 2]
        strides.insert(1, KEYS_TOGETHER * strides[0])
    try:
        return driver.encode_tensor_map(_TYPES[name], address, extents, strides, brought)
    except driver.DriverError as error:
        raise ValueError(
            f"the copy engine does not take a tensor at {address:#x} with {rows} rows of {heads} heads of "
            f"{dim} elements and strides {strides} bytes: {error}"
        ) from error
