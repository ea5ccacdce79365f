"""What is asked of CUDA's driver itself: functions that CuPy does not have.

cuda.bindings has them too, but its module for the driver takes 12 to 18 ms to import: of a process that finds
its kernels in the cache that was four fifths of the first call.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from enum import IntEnum

# A map of a tensor for the copy engine; a struct that holds maps is aligned as they are (CUtensorMap).
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
# Of CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion and CUtensorMapFloatOOBfill.
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 3, 3, 0
# Of CUlaunchAttributeID.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class TensorMapType(IntEnum):
    """CUtensorMapDataType, of the elements of a tensor."""

    UINT8 = 0
    FLOAT16 = 6
    BFLOAT16 = 9


class DriverError(RuntimeError):
    """The driver refused; the message is the name of its reason."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; `value` is the first of a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("union", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The driver. Raises OSError if it is not installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def encode_tensor_map(
    dtype: TensorMapType, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """The map of a tensor whose boxes come into shared memory in swizzled lines of 128 bytes.

    Extents and the box's are in elements, the fastest axis first; strides in bytes, of the other axes.
    Raises DriverError if the copy engine does not take such a tensor.
    """
    rank = len(extents)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    _check(
        library().cuTensorMapEncodeTiled(
            ctypes.byref(memory, start),
            dtype,
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*extents),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _INTERLEAVE_NONE,
            _SWIZZLE_128B,
            _L2_PROMOTION_256B,
            _FILL_ZEROS,
        )
    )
    return memory.raw[start : start + TENSOR_MAP_BYTES]


def overlapping_launch(grid: int, block: int, smem_bytes: int, stream: int) -> LaunchConfig:
    """How to launch a function so that it begins while the launch before it ends."""
    attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    return LaunchConfig(
        (grid, 1, 1), (block, 1, 1), smem_bytes, stream, ctypes.pointer(attribute), attribute_count=1
    )


def launch(config: LaunchConfig, function: int, pointers: ctypes.c_char_p) -> None:
    """Launch a function by its handle; `pointers` are those to its parameters. Raises DriverError."""
    arguments = ctypes.byref(config), ctypes.c_void_p(function), ctypes.byref(pointers)
    _check(library().cuLaunchKernelEx(*arguments, None))


def _check(status: int) -> None:
    if status == 0:
        return
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    raise DriverError(name.value.decode() if name.value else f"error {status}")
