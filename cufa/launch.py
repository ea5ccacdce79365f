"""From a Plan to running kernels: compiled and loaded once, then parameters, workspace and stream.

Kernels run on CuPy's current stream; nothing here synchronises, and nothing is allocated but the
workspace that the Plan declares, so calls can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cufa import counters, driver, jit
from cufa.device import Arch, target
from cufa.driver import TENSOR_MAP_BYTES
from cufa.jit import Variant
from cufa.philox import dropped_below
from cufa.plan import Launch, Plan
from cufa.plan.sizes import (
    BACKWARD_PARAMS_BYTES,
    FORWARD_PARAMS_BYTES,
    MERGE_PARAMS_BYTES,
    ROTARY_PARAMS_BYTES,
    SOFTMAX_PARAMS_BYTES,
    params_bytes,
)
from cufa.plan.standard import Rotation, merge_launch, rotary_launch, softmax_launch
from cufa.problem import MAX_EXTENT, Problem, four_axes
from cufa.tensor_layout import Layout
from cufa.tensor_maps import Encoder

# The structs of params.cuh begin with the tensors; then LSE, workspace, softmax_scale, sizes and step.
_TENSORS = {"forward": struct.Struct("=" + 4 * "4q"), "backward": struct.Struct("=" + 8 * "4q")}
_CALL = struct.Struct("=2q" + "d" + "6i")
# Bias, mask, ALiBi slopes and their batch stride, sink, three arrays of lengths, three of descales, softcap,
# kept_scale, seed, offset, dropped_below, the window.
_FEATURES = struct.Struct("=4q4q" + "2q" + "q" + "3q" + "3q" + "2d" + "Q" + "2I" + "2i")
# Addresses and strides of what functions of the caller's read, with which the features begin.
_INT64 = struct.Struct("=q")
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
assert _SOFTMAX.size == SOFTMAX_PARAMS_BYTES
assert _MERGE.size == MERGE_PARAMS_BYTES
assert _ROTARY.size == ROTARY_PARAMS_BYTES

# What follows in the structs when a call asks for nothing of it.
_NO_FEATURES = {
    "forward": bytes(_FEATURES.size + _PAGES.size),
    "backward": bytes(_FEATURES.size + _GRADIENTS.size),
}
assert all(
    _TENSORS[direction].size + _CALL.size + len(_NO_FEATURES[direction]) == size
    for direction, size in (("forward", FORWARD_PARAMS_BYTES), ("backward", BACKWARD_PARAMS_BYTES))
)
# How far a window reaches that has no end on one side.
_UNLIMITED = 2**31 - 1

# The kernels read and write it 16 bytes at a time; what CuPy allocates is aligned to 512.
WORKSPACE_ALIGNMENT = 16
# Above this much dynamic shared memory a kernel must ask for it (CUDA C++ Programming Guide, "Shared
# Memory" of each compute capability).
_DEFAULT_SMEM_BYTES = 48 * 1024
# Streams for which a launch remembers what it tells the driver.
_REMEMBERED_STREAMS = 64
# Calls for which tensors that lie alike remain packed.
_REMEMBERED_CALLS = 256


class LaunchError(RuntimeError):
    """The driver refused a kernel; the message has the launch and the driver's reason."""


def pack_tensors(problem: Problem, tensors: Sequence[int]) -> bytes:
    """What ForwardParams and BackwardParams begin with: q, k, v, o and, backward, dout, dq, dk, dv.

    `tensors` has four numbers for each: its address, then batch, row and head stride in elements.
    """
    return _TENSORS[problem.direction].pack(*tensors)


def pack_call(problem: Problem, lse: int, workspace: int, softmax_scale: float, step: int = 0) -> bytes:
    """What follows the tensors; `lse` and `workspace` are addresses, 0 for none."""
    return _CALL.pack(
        lse,
        workspace,
        softmax_scale,
        problem.batch,
        problem.heads,
        problem.kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        step,
    )


@dataclass(frozen=True)
class FeatureValues:
    """The numbers that go with features, as in `cufa.attention`."""

    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0


def pack_features(
    problem: Problem, side: Mapping[str, Any], addresses: Mapping[str, int], values: FeatureValues
) -> bytes:
    """What ends the structs: the fields that features have to themselves.

    `side` are the arrays beyond the tensors, NumPy's or CuPy's, by their names as arguments and contiguous
    along the last axis, and `addresses` where they are; those that are missing are null.
    """
    at = addresses.get
    slopes = side.get("alibi_slopes")
    left, right = problem.features.window
    packed = _pack_mod_arrays(problem, side, addresses) + _FEATURES.pack(
        at("bias", 0),
        *_score_strides(side.get("bias")),
        at("mask", 0),
        *_score_strides(side.get("mask")),
        at("alibi_slopes", 0),
        problem.heads if slopes is not None and slopes.ndim == 2 else 0,
        at("sink", 0),
        at("cu_seqlens_q", 0),
        at("cu_seqlens_k", 0),
        at("seqused_k", 0),
        at("q_descale", 0),
        at("k_descale", 0),
        at("v_descale", 0),
        values.softcap,
        1 / (1 - values.dropout_p),
        values.seed,
        values.offset,
        dropped_below(values.dropout_p),
        _UNLIMITED if left is None else left,
        _UNLIMITED if right is None else right,
    )
    if problem.direction == "forward":
        return packed + _pack_pages(side.get("block_table"), at("block_table", 0))
    dbias = side.get("dbias")
    lengths = problem.features.bias if dbias is not None and problem.features.bias else (0, 0, 0, 0)
    fields = at("dlse", 0), at("dsink", 0), at("dbias", 0), *_score_strides(dbias), *lengths
    return packed + _GRADIENTS.pack(*fields)


def _pack_pages(table: Any, address: int) -> bytes:
    """Pages; of no table if it is None."""
    if table is None:
        return bytes(_PAGES.size)
    batch_stride = table.strides[0] // table.itemsize
    return _PAGES.pack(address, table.shape[1], batch_stride)


def _pack_mod_arrays(problem: Problem, side: Mapping[str, Any], addresses: Mapping[str, int]) -> bytes:
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
        packed += b"".join(map(_INT64.pack, (addresses[name], *strides)))
    first = 0
    for name in problem.features.differentiated_arrays:
        shape = side[name].shape
        packed += b"".join(map(_INT64.pack, (addresses[f"d{name}"], first, *shape)))
        first += prod(shape)
    return packed


def _score_strides(array: Any) -> tuple[int, ...]:
    """Batch, head and row stride, in elements, of an array that is broadcast to the scores; or of none."""
    if array is None:
        return 0, 0, 0
    shape, strides = four_axes(array.shape), (0,) * (4 - array.ndim) + array.strides
    return tuple(
        0 if size == 1 else stride // array.itemsize
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


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


class Executable:
    """A Plan whose kernels are on the current GPU."""

    def __init__(self, plan: Plan) -> None:
        """Compile, or find in the cache, and load."""
        import cupy

        self.plan = plan
        self._current_stream = cupy.cuda.get_current_stream
        needed = plan.workspace_bytes
        self._allocate = functools.partial(cupy.cuda.alloc, needed) if needed else None
        self._no_features = _NO_FEATURES[plan.problem.direction]
        packed = len(plan.boxes) * TENSOR_MAP_BYTES + params_bytes(plan.problem)
        self._padding = bytes(int(dict(plan.macros)["PARAMS_BYTES"]) - packed)  # maps align the struct's end
        self._encoder = Encoder(plan.problem, plan.boxes)
        # Allocated now: a call may be captured, when nothing can be.
        counted = bool(plan.boxes) and not plan.scratch
        self._counters = counters.of_device(cupy.cuda.runtime.getDevice()) if counted else None
        module = jit.load(jit.build(plan.variant))
        launches = [
            (_Kernel(module, launch), step) for launch in plan.launches for step in range(launch.steps)
        ]
        by_step = itertools.groupby(launches, key=operator.itemgetter(1))
        self._launches = [(step, [kernel for kernel, _ in same]) for step, same in by_step]

    def packer(self, layout: Layout) -> Callable[..., bytes]:
        """What packs tensors that lie so, from their addresses: their maps, then the struct's beginning.

        It remembers the tensors of many calls, for which it is then a matter of looking them up.
        """

        @functools.lru_cache(_REMEMBERED_CALLS)
        def pack(*addresses: int) -> bytes:
            fields = layout.fields(addresses)
            return self._encoder(fields) + pack_tensors(self.plan.problem, fields)

        return pack

    def __call__(
        self,
        tensors: bytes,
        lse: int,
        softmax_scale: float,
        features: bytes = b"",
        workspace: Any = None,
    ) -> None:
        """Launch on the current stream.

        `tensors` are from `packer`, `lse` is an address or 0 for none, `features` are `pack_features`', or
        nothing for none. `workspace` is a CuPy array to use instead of memory from CuPy's pool. Raises
        ValueError if it is too small or not aligned.
        """
        stream = self._current_stream().ptr
        address = 0
        if workspace is not None:
            _check_workspace(workspace, self.plan.workspace_bytes)
            address = workspace.data.ptr
        elif self._allocate is not None:
            memory = self._allocate()  # CuPy's again, for this stream, when all is launched
            address = memory.ptr
        if self._counters is not None:
            address = self._counters.take(stream)
        rest = (features or self._no_features) + self._padding
        for step, kernels in self._launches:
            params = tensors + pack_call(self.plan.problem, lse, address, softmax_scale, step) + rest
            for kernel in kernels:
                kernel(params, stream)


def _check_workspace(workspace: Any, needed: int) -> None:
    if workspace.nbytes < needed:
        raise ValueError(
            f"workspace has {workspace.nbytes:,} bytes; this call needs {needed:,} "
            "(cufa.plan(...).workspace_bytes)"
        )
    if not workspace.flags.c_contiguous or workspace.data.ptr % WORKSPACE_ALIGNMENT:
        raise ValueError(f"workspace must be contiguous and aligned to {WORKSPACE_ALIGNMENT} bytes")


def softmax(x: Any, y: Any, dtype: str, passes: int, arch: Arch | str | int | None = None) -> None:
    """Softmax of the rows of x into y, two CuPy arrays (rows, cols), on the current stream."""
    rows, cols = x.shape
    kernel = _loaded(softmax_launch(dtype, passes, rows, target(arch).arch), _current_device())
    x_row_stride, y_row_stride = (array.strides[0] // array.itemsize for array in (x, y))
    params = pack_softmax(x.data.ptr, y.data.ptr, x_row_stride, y_row_stride, rows, cols)
    kernel(params, _current_stream())


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
    compiled = merge_launch(dtype, value_dim, prod(sizes), align_bytes, target(arch).arch)
    _loaded(compiled, _current_device())(pack_merge(tensors, lses, *sizes), _current_stream())


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
    compiled = rotary_launch(rotation, prod(sizes), target(arch).arch)
    params = pack_rotary(tensors, tables, positions, sizes, places)
    _loaded(compiled, _current_device())(params, _current_stream())


def _current_device() -> int:
    import cupy

    device: int = cupy.cuda.runtime.getDevice()
    return device


def _current_stream() -> int:
    import cupy

    stream: int = cupy.cuda.get_current_stream().ptr
    return stream


class _Kernel:
    """One function on the GPU and how to launch it."""

    def __init__(self, module: Any, launch: Launch) -> None:
        import cupy

        kernel = module.get_function(launch.entry)
        if launch.smem_bytes > _DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = launch.smem_bytes
        self._function = kernel.kernel
        self._launch = launch
        extents = (launch.grid, 1, 1, launch.block, 1, 1, launch.smem_bytes)
        self._launch_alone = functools.partial(cupy.cuda.driver.launchKernel, self._function.ptr, *extents)
        self._refusals = (cupy.cuda.driver.CUDADriverError, driver.DriverError)
        overlapping = functools.partial(
            driver.overlapping_launch, launch.grid, launch.block, launch.smem_bytes
        )
        self._overlapping = functools.lru_cache(_REMEMBERED_STREAMS)(overlapping) if launch.overlaps else None

    def __call__(self, params: bytes, stream: int) -> None:
        """Launch on that stream, with the struct that these are the bytes of."""
        # The driver wants the address of an array of pointers to parameters, of which there is one. CuPy's
        # own call of a function makes that array from objects, which takes half as long again.
        pointers = ctypes.c_char_p(params)
        try:
            if self._overlapping is not None:
                driver.launch(self._overlapping(stream), self._function.ptr, pointers)
            else:
                self._launch_alone(stream, ctypes.addressof(pointers), 0)
        except self._refusals as error:
            launch = self._launch
            raise LaunchError(
                f"{launch.entry} could not be launched with {launch.grid} blocks of {launch.block} threads "
                f"and {launch.smem_bytes} bytes of shared memory: {error}"
            ) from error


@functools.lru_cache(maxsize=4096)
def _loaded(compiled: tuple[Variant, Launch], device_id: int) -> _Kernel:
    """The kernel of a variant on a GPU, which must be the current one."""
    variant, launch = compiled
    return _Kernel(jit.load(jit.build(variant)), launch)
