"""Functions of the CUDA driver that CuPy does not have.

Importing cuda.bindings takes 12 to 18 ms, so the first call that needs it does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

# A tensor map for the copy engine (CUtensorMap); a struct that holds maps has their alignment.
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64

TensorMapType = Literal["UINT8", "FLOAT16", "BFLOAT16"]

# The driver's name for what a thread lacks that has not used the GPU.
NO_CONTEXT = "CUDA_ERROR_INVALID_CONTEXT"
# What the driver and the runtime both say.
OUT_OF_MEMORY = "out of memory"
# How names begin of what the driver and the runtime do not allow during a capture.
OF_CAPTURE = ("CUDA_ERROR_STREAM_CAPTURE", "cudaErrorStreamCapture")

T = TypeVar("T")

_loading = threading.Lock()


class DriverError(RuntimeError):
    """The driver refused; the message is the name of its error code."""


@functools.cache
def library() -> ctypes.CDLL:
    """Load the driver without its bindings. Raises OSError if it is not installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def cuda_version() -> tuple[int, int]:
    """The CUDA version that the driver is for, (major, minor). Raises OSError if it is not installed."""
    version = ctypes.c_int()
    library().cuDriverGetVersion(ctypes.byref(version))  # 13050 is 13.5
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        from cufa.jit import NVRTCMissingError  # which asks this module

        raise NVRTCMissingError(
            "cufa asks the driver through cuda-bindings, which is not installed: pip install 'cufa[cuda13]', "
            f"or 'cufa[cuda12]' for an NVIDIA driver older than 580 ({error})"
        ) from error

    # In some versions, a call fails while another thread's first one loads the driver; without one, all do.
    with _loading, contextlib.suppress(RuntimeError):
        driver.cuDriverGetVersion()
    return driver


def get_context() -> None:
    """Give this thread the context of CuPy's current device, as any function of CUDA's runtime does."""
    import cupy

    cupy.cuda.runtime.memGetInfo()


def in_context(act: Callable[[], T]) -> T:
    """Return what `act` returns; if the thread has no context, get one and act again.

    In its first call a thread may have needed no more of CuPy than memory that the pool had.
    """
    return _despite(NO_CONTEXT, get_context, act)


def with_memory(act: Callable[[], T]) -> T:
    """Return what `act` returns; if memory is short, free what CuPy's pool does not use and act again.

    For what is not of the pool, which does the same for its own.
    """
    return _despite(OUT_OF_MEMORY, _free_unused_memory, act)


def _free_unused_memory() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def _despite(refusal: str, mend: Callable[[], None], act: Callable[[], T]) -> T:
    """Return what `act` returns; if it is refused for this reason, mend that and act again."""
    try:
        return act()
    except RuntimeError as error:  # this module's or CuPy's
        if refusal not in str(error):
            raise
    mend()
    return act()


def encode_tensor_map(
    dtype: TensorMapType, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """Encode a tensor map whose boxes are copied to shared memory in swizzled lines of 128 bytes.

    Extents, including the box's, are in elements, fastest axis first. Strides are in bytes, without the
    fastest axis. Raises DriverError if the copy engine does not support such a tensor.
    """
    driver = _bindings()
    long, short = driver.cuuint64_t, driver.cuuint32_t
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"),
        len(extents),
        address,
        [long(extent) for extent in extents],
        [long(stride) for stride in strides],
        [short(extent) for extent in box],
        [short(1)] * len(extents),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _check(status)
    # Reading its words would take as long as all else here.
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)


def launch_config(grid: int, block: int, smem_bytes: int, cluster: int, overlaps: bool, stream: int) -> Any:
    """A CUlaunchConfig, in clusters of so many blocks; if it `overlaps`, it begins before the last ends."""
    driver = _bindings()
    ids = driver.CUlaunchAttributeID
    attributes = []
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        extents = attribute.value.clusterDim
        extents.x, extents.y, extents.z = cluster, 1, 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def launch(config: Any, function: int, pointers: ctypes.c_char_p) -> None:
    """Launch a function by its handle; `pointers` point to its parameters. Raises DriverError."""
    driver = _bindings()
    _check(driver.cuLaunchKernelEx(config, driver.CUfunction(function), ctypes.addressof(pointers), 0)[0])


def _check(status: Any) -> None:
    if status:
        raise DriverError(status.name)
