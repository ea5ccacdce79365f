"""From a Plan to running kernels: compile and load them once, then pass parameters, workspace and stream.

Kernels run on CuPy's current stream, without synchronization. Nothing is allocated except scratch memory: the
workspace that the Plan declares, and what `quantize` measures in. So calls can be captured into a CUDA graph,
which needs that memory to be the caller's: else it returns to CuPy's pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import prod
from typing import Any

from cufa import counters, driver, jit
from cufa.device import Arch, target
from cufa.driver import TENSOR_MAP_BYTES
from cufa.jit import Variant
from cufa.params import (
    NO_FEATURES,
    bias_fields,
    pack_call,
    pack_merge,
    pack_quantize,
    pack_rotary,
    pack_sizes,
    pack_softmax,
    pack_tensors,
)
from cufa.plan import Launch, Plan
from cufa.plan.companions import (
    Appending,
    Quantization,
    Rotation,
    append_launches,
    merge_launches,
    quantize_launches,
    rotary_launches,
    softmax_launches,
)
from cufa.plan.struct_sizes import params_bytes
from cufa.tensor_layout import Layout, Region, with_queries_as_heads
from cufa.tensor_maps import Encoder

# Kernels must request more dynamic shared memory than this explicitly (CUDA C++ Programming Guide, "Shared
# Memory" of each compute capability).
_DEFAULT_SMEM_BYTES = 48 * 1024
# The number of streams for which a launch caches its arguments for the driver.
_REMEMBERED_STREAMS = 64
# The number of calls whose packed tensors are cached, of all layouts together: each takes one to two
# kilobytes, and a server may have thousands of layouts.
_REMEMBERED_CALLS = 16384


# Packs tensors, given their addresses, for the plan and for the one beside it.
Packer = Callable[..., tuple[bytes, ...]]


class LaunchError(RuntimeError):
    """The driver refused a kernel; the message has the launch and the driver's reason."""


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Kernels and their counters are loaded inside; if CUDA does not allow that now, say what to do."""
    try:
        yield
    except RuntimeError as error:  # this module's or CuPy's
        if not any(name in str(error) for name in driver.OF_CAPTURE):
            raise
        raise LaunchError(
            "kernels are loaded by the first call of a kind, which CUDA did not allow during a capture; make "
            f"such a call once before ({error})"
        ) from error


class Executable:
    """A Plan whose kernels are loaded on the current GPU."""

    def __init__(self, plan: Plan) -> None:
        """Compile the kernels, or find them in the cache, and load them."""
        import cupy

        self.plan = plan
        self._current_stream = cupy.cuda.get_current_stream
        needed = plan.workspace_bytes
        self._allocate = functools.partial(cupy.cuda.alloc, needed) if needed else None
        self._sum_bytes = plan.problem.accumulator.itemsize
        self._no_features = NO_FEATURES[plan.problem.direction]
        with _loading():
            self._loaded = tuple(map(_LoadedPlan, plan.and_beside, plan.workspace_begins))
            launches = [
                (index, step, _Kernel(self._loaded[index].module, launch))
                for index, launch in plan.in_order
                for step in range(launch.steps)
            ]
        by_step = itertools.groupby(launches, key=operator.itemgetter(0, 1))
        plans = plan.and_beside
        self._launches = [
            (
                index,
                pack_sizes(plans[index].problem, step, plans[index].parting),
                [kernel for *_, kernel in same],
            )
            for (index, step), same in by_step
        ]

    def packer(self, layout: Layout, bias: Region | None = None) -> Packer:
        """A function that packs tensors of this layout, given their addresses: their maps, then parameters.

        With maps of a bias, which lies as `bias` does, its address comes last. The function packs for the
        plan and for the one beside it, which has its own maps.

        The packed tensors of many calls are cached.
        """
        if self.plan.problem.queries_as_heads:
            layout = with_queries_as_heads(layout)

        def pack(addresses: tuple[int, ...]) -> tuple[bytes, ...]:
            of_bias: list[int] = []
            if bias is not None:
                addresses, bias_at = addresses[:-1], addresses[-1]
                of_bias = bias_fields(bias_at, bias)
            fields = layout.fields(addresses)
            tensors = pack_tensors(self.plan.problem, fields)
            return tuple(loaded.encoder(fields + of_bias) + tensors for loaded in self._loaded)

        return functools.partial(_packed, pack)

    def __call__(
        self,
        tensors: tuple[bytes, ...],
        lse: int,
        softmax_scale: float,
        features: bytes = b"",
        workspace: Any = None,
    ) -> None:
        """Launch on the current stream.

        `tensors` are from `packer`, `lse` is an address or 0 for none, `features` are from `pack_features`,
        or empty for none. `workspace` is a CuPy array to use instead of memory from CuPy's pool.
        """
        stream = self._current_stream().ptr
        address = 0
        if workspace is not None:
            address = workspace.data.ptr
        elif self._allocate is not None:
            memory = self._allocate()  # returns to CuPy's pool, for this stream, after all launches
            address = memory.ptr
        features = features or self._no_features
        for index, sizes, kernels in self._launches:
            loaded = self._loaded[index]
            workspace_at = address + loaded.begins
            if loaded.counters is not None:
                workspace_at = loaded.counters.take(stream)
            call = pack_call(lse, workspace_at, softmax_scale, self._sum_bytes)
            params = ctypes.c_char_p(tensors[index] + call + sizes + features + loaded.padding)
            for kernel in kernels:
                kernel(params, stream)


@functools.lru_cache(_REMEMBERED_CALLS)
def _packed(pack: Callable[[tuple[int, ...]], tuple[bytes, ...]], *addresses: int) -> tuple[bytes, ...]:
    return pack(addresses)


class _LoadedPlan:
    """What is loaded for one plan, and the fixed part of its kernels' parameters."""

    def __init__(self, plan: Plan, begins: int) -> None:
        self.begins = begins  # the offset of its own workspace
        self.module = _module(plan.variant, _current_device())
        self.encoder = Encoder(plan.problem, plan.boxes)
        packed = len(plan.boxes) * TENSOR_MAP_BYTES + params_bytes(plan.problem, plan.parting)
        self.padding = bytes(int(dict(plan.macros)["PARAMS_BYTES"]) - packed)  # since maps align the struct
        # Allocated now, since nothing can be allocated while a call is captured.
        counted = bool(plan.boxes) and not plan.scratch
        self.counters = counters.of_device(_current_device()) if counted else None


def softmax(x: Any, y: Any, dtype: str, passes: int, arch: Arch | str | int | None = None) -> None:
    """Softmax of the rows of x into y, two CuPy arrays (rows, cols), on the current stream."""
    rows, cols = x.shape
    (kernel,) = _kernels(softmax_launches, (dtype, passes, rows), arch)
    x_row_stride, y_row_stride = (array.strides[0] // array.itemsize for array in (x, y))
    params = pack_softmax(x.data.ptr, y.data.ptr, x_row_stride, y_row_stride, rows, cols)
    kernel(ctypes.c_char_p(params), _current_stream())


def merge(
    dtype: str,
    value_dim: int,
    sizes: tuple[int, int, int],
    tensors: Sequence[int],
    lses: Sequence[int],
    align_bytes: int,
    arch: Arch | str | int | None = None,
) -> None:
    """Launch `merge` for (batch, heads, seqlen) rows on the current stream; see `pack_merge`."""
    (kernel,) = _kernels(merge_launches, (dtype, value_dim, prod(sizes), align_bytes), arch)
    params = pack_merge(tensors, lses, *sizes)
    kernel(ctypes.c_char_p(params), _current_stream())


def rotary(
    rotation: Rotation,
    tensors: Sequence[int],
    tables: Sequence[int],
    positions: tuple[int, int, int],
    sizes: tuple[int, int, int],
    places: int,
    arch: Arch | str | int | None = None,
) -> None:
    """Launch `rotary` for (batch, heads, seqlen) rows on the current stream; see `pack_rotary`."""
    (kernel,) = _kernels(rotary_launches, (rotation, prod(sizes)), arch)
    params = pack_rotary(tensors, tables, positions, sizes, places)
    kernel(ctypes.c_char_p(params), _current_stream())


def quantize(
    quantization: Quantization,
    tensors: Sequence[int],
    cu_seqlens: int,
    descale: int,
    measured: bool,
    sizes: tuple[int, int, int, int],
    arch: Arch | str | int | None = None,
) -> None:
    """Launch `quantize` for (batch, heads, kv_heads, seqlen) on the current stream; see `pack_quantize`.

    `descale` is the address of the descales; with `measured`, the kernel writes them.
    """
    import cupy

    batch, heads, kv_heads, seqlen = sizes
    kernels = _kernels(quantize_launches, (quantization, measured, batch, heads, seqlen), arch)
    largest = None
    if measured:
        needed = batch * kv_heads * ctypes.sizeof(ctypes.c_float)
        largest = cupy.cuda.alloc(needed)
        largest.memset_async(0, needed)
    measured_at = largest.ptr if largest else 0
    params = ctypes.c_char_p(pack_quantize(tensors, cu_seqlens, measured_at, descale, sizes))
    stream = _current_stream()
    for kernel in kernels:
        kernel(params, stream)


def append(
    appending: Appending, align_bytes: int, batch: int, rows: int, query_rows: int, params: bytes
) -> None:
    """Launch `append` on the current stream for so many rows of keys and of queries to rotate.

    `params` is what `pack_append` returns.
    """
    (kernel,) = _kernels(append_launches, (appending, align_bytes, batch, rows, query_rows), None)
    kernel(ctypes.c_char_p(params), _current_stream())


def _current_device() -> int:
    import cupy

    device: int = cupy.cuda.runtime.getDevice()
    return device


def _current_stream() -> int:
    import cupy

    stream: int = cupy.cuda.get_current_stream().ptr
    return stream


@functools.lru_cache(maxsize=4096)
def _module(variant: Variant, device_id: int) -> Any:
    """Load the variant on a GPU, which must be the current one.

    Cached, since most new shapes share a variant, and rereading its sources would take milliseconds.
    """
    import cupy

    for is_last in (False, True):
        build = jit.build(variant)
        try:
            return driver.with_memory(functools.partial(jit.load, build))
        except cupy.cuda.driver.CUDADriverError as error:
            if is_last or build.path.exists():  # else another process has cleared the cache in between
                raise LaunchError(_why_not_loaded(build, error)) from None


def _why_not_loaded(build: jit.Build, error: Exception) -> str:
    of_driver = driver.cuda_version()
    reason = "the driver, which is for CUDA {}.{}, refuses ".format(*of_driver)
    try:
        of_nvrtc = jit.nvrtc_version()
    except jit.NVRTCMissingError:  # the kernel is from the cache
        return f"{reason}{build.arch}: {error}"
    reason += "{} by NVRTC {}.{}: {}".format(build.arch, *of_nvrtc, error)
    if build.arch.virtual and of_nvrtc > of_driver:
        reason += (
            "; it reads PTX of no later version than its own. Give a real arch, as in sm_90a, update the "
            "driver, or install nvidia-cuda-nvrtc=={}.{}.*".format(*of_driver)
        )
    return reason


def forget() -> None:
    """Look kernels up again at their next launch."""
    for cached in (_module, _planned_kernels, _packed):
        cached.cache_clear()


def _function(module: Any, launch: Launch) -> Any:
    """The function that a launch runs, which may have the shared memory that it needs."""
    kernel = module.get_function(launch.entry)
    if launch.smem_bytes > _DEFAULT_SMEM_BYTES:
        kernel.max_dynamic_shared_size_bytes = launch.smem_bytes
    return kernel.kernel


class _Kernel:
    """One function on the GPU, and how to launch it."""

    def __init__(self, module: Any, launch: Launch) -> None:
        import cupy

        find = functools.partial(_function, module, launch)  # and load it, since the driver is lazy
        self._function = driver.with_memory(lambda: driver.in_context(find))
        self._launch = launch
        extents = (launch.grid, 1, 1, launch.block, 1, 1, launch.smem_bytes)
        self._launch_alone = functools.partial(cupy.cuda.driver.launchKernel, self._function.ptr, *extents)
        self._refusals = (cupy.cuda.driver.CUDADriverError, driver.DriverError)
        self._config: Callable[[int], Any] | None = None
        if launch.overlaps or launch.cluster > 1:
            config = functools.partial(
                driver.launch_config,
                *(launch.grid, launch.block, launch.smem_bytes, launch.cluster, launch.overlaps),
            )
            self._config = functools.lru_cache(_REMEMBERED_STREAMS)(config)

    def __call__(self, params: ctypes.c_char_p, stream: int, in_context: bool = False) -> None:
        """Launch on this stream, with the struct that `params` points to."""
        # The driver takes an array of pointers to parameters; there is one. CuPy's own launch builds that
        # array from objects, which takes half as long again.
        try:
            if self._config is not None:
                driver.launch(self._config(stream), self._function.ptr, params)
            else:
                self._launch_alone(stream, ctypes.addressof(params), 0)
        except self._refusals as error:
            if driver.NO_CONTEXT in str(error) and not in_context:
                driver.get_context()  # driver.in_context would take longer, in every launch
                return self(params, stream, in_context=True)
            launch = self._launch
            raise LaunchError(
                f"{launch.entry} could not be launched with {launch.grid} blocks of {launch.block} threads"
                f"{launch.in_clusters} and {launch.smem_bytes} bytes of shared memory: {error}"
            ) from error


def _kernels(
    planned: Callable[..., tuple[Variant, Sequence[Launch]]],
    asked: tuple[Hashable, ...],
    arch: Arch | str | int | None,
) -> tuple[_Kernel, ...]:
    """The kernels that a function of `cufa.plan.companions` plans for these arguments, on the current GPU."""
    return _planned_kernels(planned, asked, None if arch is None else Arch.parse(arch), _current_device())


@functools.lru_cache(maxsize=4096)
def _planned_kernels(
    planned: Callable[..., tuple[Variant, Sequence[Launch]]],
    asked: tuple[Hashable, ...],
    arch: Arch | None,
    device_id: int,
) -> tuple[_Kernel, ...]:
    variant, launches = planned(*asked, target(arch).arch)
    with _loading():
        return tuple(_Kernel(_module(variant, device_id), launch) for launch in launches)
