"""Tensor maps for the copy engine of sm_90 and later, encoded by the driver.

Encoding a map takes microseconds, so those of recent tensors are cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from cufa import driver
from cufa.driver import TENSOR_MAP_BYTES, TensorMapType
from cufa.plan.record import BIAS, TensorBox
from cufa.problem import FLOAT8, INPUT_DTYPES, KEYS_TOGETHER, MAX_EXTENT, Problem

# The output's index among the tensors of a call.
_OUTPUT = 3
# The indices of K and V.
_KEYS = (1, 2)
_VALUES = 2
_TYPES: dict[str, TensorMapType] = {FLOAT8: "UINT8", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}
# How many maps are remembered, of all encoders together: each takes half a kilobyte, and a server may have an
# encoder for each of thousands of shapes.
_REMEMBERED_MAPS = 16384


class Encoder:
    """Encodes the maps that a plan's kernel needs."""

    def __init__(self, problem: Problem, boxes: Sequence[TensorBox]) -> None:
        """Fix what all calls share; only addresses and strides change."""
        self._encoders = [(functools.partial(_encode, problem, box), _fields_of(box)) for box in boxes]

    def __call__(self, tensors: Sequence[int]) -> bytes:
        """The maps, in order; `tensors` are as for `pack_tensors`, then the bias if it is in boxes."""
        return b"".join([_encoded(encode, *tensors[place]) for encode, place in self._encoders])


@functools.lru_cache(_REMEMBERED_MAPS)
def _encoded(encode: Callable[..., bytes], *tensor: int) -> bytes:
    return encode(*tensor)


def _fields_of(box: TensorBox) -> slice:
    first = 4 * box.tensor  # negative for the bias: counted from the end
    return slice(first, None if box.tensor == BIAS else first + 4)


def _encode(
    problem: Problem, box: TensorBox, address: int, batch_stride: int, row_stride: int, head_stride: int
) -> bytes:
    if box.tensor == BIAS:
        return _encode_bias(problem, box, address, (batch_stride, head_stride, row_stride))
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
    if 0 in (problem.batch, rows, heads, dim, box.rows) or address == 0:
        return bytes(TENSOR_MAP_BYTES)  # the kernel copies nothing
    batch = problem.batch
    if box.tensor in _KEYS and problem.features.page_size:  # the number of pages is not known
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
    return _encode_map(name, address, extents, strides, brought)


def _encode_bias(problem: Problem, box: TensorBox, address: int, strides: tuple[int, int, int]) -> bytes:
    """Encode the map of a bias. An axis that is broadcast, by its shape or a stride of 0, has one element."""
    shape, name = problem.features.bias, problem.features.bias_dtype
    if shape is None or name is None:
        raise ValueError("there is no bias")
    batch, heads = (size if stride else 1 for size, stride in zip(shape[:2], strides[:2], strict=True))
    batch_bytes, head_bytes, row_bytes = (stride * INPUT_DTYPES[name].itemsize for stride in strides)
    extents = [shape[3], shape[2], heads, batch]
    return _encode_map(
        name, address, extents, [row_bytes, head_bytes, batch_bytes], [box.cols, box.rows, 1, 1]
    )


def _encode_map(name: str, address: int, extents: list[int], strides: list[int], brought: list[int]) -> bytes:
    encode = functools.partial(driver.encode_tensor_map, _TYPES[name], address, extents, strides, brought)
    try:
        return driver.in_context(encode)
    except driver.DriverError as error:
        raise ValueError(
            f"the copy engine does not take a tensor of {name} at {address:#x} with extents {extents}, the "
            f"fastest axis first, and strides of {strides} bytes: {error}"
        ) from error
