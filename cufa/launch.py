"""From a Plan to running kernels: compiled and loaded once, then parameters, workspace and stream.

Kernels run on CuPy's current stream; nothing here synchronises, and nothing is allocated but the
workspace that the Plan declares, so calls can be captured into a CUDA graph.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cufa import counters, jit
from cufa.device import Arch, target
from cufa.plan import Launch, Plan
from cufa.plan.sizes import BACKWARD_PARAMS_BYTES, FORWARD_PARAMS_BYTES, SOFTMAX_PARAMS_BYTES
from cufa.plan.standard import softmax_launch
from cufa.problem import Problem
from cufa.tensor_maps import Encoder

# The structs of params.cuh: tensors, LSE, workspace, softmax_scale, sizes and step.
_FORWARD = struct.Struct("=" + 4 * "4q" + "2q" + "d" + "6i")
_BACKWARD = struct.Struct("=" + 8 * "4q" + "2q" + "d" + "6i")
# Addresses of x and y, their row strides, rows and columns.
_SOFTMAX = struct.Struct("=2q2qqi4x")
assert _FORWARD.size == FORWARD_PARAMS_BYTES
assert _BACKWARD.size == BACKWARD_PARAMS_BYTES
assert _SOFTMAX.size == SOFTMAX_PARAMS_BYTES

# Above this much dynamic shared memory a kernel must ask for it (CUDA C++ Programming Guide, "Shared
# Memory" of each compute capability).
_DEFAULT_SMEM_BYTES = 48 * 1024


class LaunchError(RuntimeError):
    """The driver refused a kernel; the message has the launch and the driver's reason."""


def pack_attention(
    problem: Problem,
    tensors: Sequence[int],
    lse: int,
    workspace: int,
    softmax_scale: float,
    step: int = 0,
) -> bytes:
    """ForwardParams for q, k, v, o or BackwardParams for q, k, v, o, dout, dq, dk, dv.

    `tensors` has four numbers for each: its address, then batch, row and head stride in elements. `lse`
    and `workspace` are addresses, 0 for none.
    """
    layout = _FORWARD if problem.direction == "forward" else _BACKWARD
    return layout.pack(
        *tensors,
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


def pack_softmax(x: int, y: int, x_row_stride: int, y_row_stride: int, rows: int, cols: int) -> bytes:
    """SoftmaxParams; strides in elements."""
    return _SOFTMAX.pack(x, y, x_row_stride, y_row_stride, rows, cols)


class Executable:
    """A Plan whose kernels are on the current GPU."""

    def __init__(self, plan: Plan) -> None:
        """Compile, or find in the cache, and load."""
        import cupy

        self.plan = plan
        self._allocate = functools.partial(cupy.empty, plan.workspace_bytes, np.uint8)
        self._encoder = Encoder(plan.problem, plan.boxes) if plan.boxes else None
        # Allocated now: a call may be captured, when nothing can be.
        counted = bool(plan.boxes) and not plan.scratch
        self._counters = counters.of_device(cupy.cuda.runtime.getDevice()) if counted else None
        module = jit.load(jit.build(plan.variant))
        self._launches = [
            (_Kernel(module, launch), step) for launch in plan.launches for step in range(launch.steps)
        ]

    def __call__(self, tensors: Sequence[int], lse: int, softmax_scale: float) -> None:
        """Launch on the current stream; the arguments are `pack_attention`'s."""
        plan = self.plan
        workspace = self._allocate() if plan.workspace_bytes else None
        address = workspace.data.ptr if workspace is not None else 0
        maps = b""
        if self._encoder is not None:
            maps = self._encoder(tensors)
        if self._counters is not None:
            address = self._counters.take()
        for kernel, step in self._launches:
            kernel(maps + pack_attention(plan.problem, tensors, lse, address, softmax_scale, step))


def softmax(x: Any, y: Any, dtype: str, passes: int, arch: Arch | str | int | None = None) -> None:
    """Softmax of the rows of x into y, two CuPy arrays (rows, cols), on the current stream."""
    rows, cols = x.shape
    variant, launch = softmax_launch(dtype, passes, rows, target(arch).arch)
    kernel = _Kernel(jit.load(jit.build(variant)), launch)
    x_row_stride, y_row_stride = (array.strides[0] // array.itemsize for array in (x, y))
    kernel(pack_softmax(x.data.ptr, y.data.ptr, x_row_stride, y_row_stride, rows, cols))


class _Kernel:
    """One function on the GPU and how to launch it."""

    def __init__(self, module: Any, launch: Launch) -> None:
        import cupy

        kernel = module.get_function(launch.entry)
        if launch.smem_bytes > _DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = launch.smem_bytes
        self._function = kernel.kernel
        self._launch = launch
        self._grid, self._block = (launch.grid, 1, 1), (launch.block, 1, 1)
        self._refused = cupy.cuda.driver.CUDADriverError

    def __call__(self, params: bytes) -> None:
        # An array of one element is what CuPy passes by value.
        by_value = np.frombuffer(params, dtype=_void(len(params)))
        launch = self._launch
        try:
            self._function(self._grid, self._block, (by_value,), launch.smem_bytes)
        except self._refused as error:
            raise LaunchError(
                f"{launch.entry} could not be launched with {launch.grid} blocks of {launch.block} threads "
                f"and {launch.smem_bytes} bytes of shared memory: {error}"
            ) from error


@functools.cache
def _void(size: int) -> np.dtype[Any]:
    return np.dtype((np.void, size))
