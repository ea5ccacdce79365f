"""Whole calls of attention on the emulator, as `cufa.api` makes them on a GPU: the same plan, macros,
parameter struct and order of launches.

Every array is moved to memory of its own, aligned to just the bytes that the plan counts on, and what is
written is NaN beforehand. So a kernel that goes beyond an array, that loads wider than it may or that leaves
something out does not get away with it by luck.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.counters import COUNTER_BYTES
from cufa.device import Device
from cufa.launch import pack_attention, pack_softmax
from cufa.plan import Plan, make_plan
from cufa.plan.sizes import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, ceil_div
from cufa.plan.standard import softmax_launch
from cufa.problem import DTYPES, Direction, check_scale, lse_shape, make_problem, output_shape

from . import KERNELS, EmulatorError, Module, extent

Array: TypeAlias = npt.NDArray[Any]
Tiles: TypeAlias = Mapping[str, int]

DEVICE = Device.of("sm_90a")

# Around each array, so that what lies beyond its ends belongs to no other.
_MARGIN_BYTES = 1 << 16
_MAX_ALIGN_BYTES = 16

# runtime/boxes.hpp's TensorDescription, in the room of a TensorMap.
_TENSOR_MAP = struct.Struct(f"=2q 9I 4x 3q {TENSOR_MAP_BYTES - 80}x")
_TENSOR_MAGIC = 0x70614D726F736E54
_MAX_BOX = 256
assert _TENSOR_MAP.size == TENSOR_MAP_BYTES


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    device: Device = DEVICE,
    checked: bool = True,
    folder: Path = KERNELS,
) -> tuple[Array, Array]:
    """`cufa.attention` with return_lse for arrays (batch, seqlen, heads, head_dim), by a kernel in `folder`.

    Raises EmulatorError if the kernel does what it must not.
    """
    plan = _plan("forward", {"q": q, "k": k, "v": v}, causal, kernel, tiles, device)
    problem = plan.problem
    out = np.empty(output_shape(problem, "bshd"), DTYPES[problem.dtype])
    lse = np.empty(lse_shape(problem), problem.accumulator)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    done = _run(plan, arrays, {"out", "lse"}, softmax_scale, checked, folder)
    return done["out"], done["lse"]


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    device: Device = DEVICE,
    checked: bool = True,
    folder: Path = KERNELS,
) -> tuple[Array, Array, Array]:
    """`cufa.attention_backward` for arrays (batch, seqlen, heads, head_dim), by a kernel in `folder`.

    Raises EmulatorError if the kernel does what it must not.
    """
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    plan = _plan("backward", tensors, causal, kernel, tiles, device)
    gradients = {f"d{name}": np.empty(tensors[name].shape, q.dtype) for name in ("q", "k", "v")}
    arrays = {**tensors, **gradients, "lse": lse}
    done = _run(plan, arrays, set(gradients), softmax_scale, checked, folder)
    return done["dq"], done["dk"], done["dv"]


def softmax(x: Array, passes: int, checked: bool = True) -> Array:
    """`cufa.softmax` of the rows of a matrix."""
    rows, cols = x.shape
    dtype = x.dtype.name
    variant, launch = softmax_launch(dtype, passes, rows, DEVICE.arch)
    source = _placed(x, x.itemsize, is_output=False)
    result = _placed(np.empty(x.shape, x.dtype), x.itemsize, is_output=True)
    strides = source.strides[0] // x.itemsize, result.strides[0] // x.itemsize
    params = pack_softmax(source.ctypes.data, result.ctypes.data, *strides, rows, cols)
    module = Module(variant.source, variant.macros, checked)
    module.launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, params, {"x": source, "y": result}
    )
    return result


def _plan(
    direction: Direction,
    arrays: Mapping[str, Array],
    causal: bool,
    kernel: str | None,
    tiles: Tiles | None,
    device: Device,
) -> Plan:
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {name: array.dtype for name, array in arrays.items()}
    problem = make_problem(direction, shapes, dtypes, causal=causal, layout="bshd")
    # Outputs are contiguous: their strides are multiples of a row.
    strides = [array.strides[axis] for array in arrays.values() for axis in range(3)]
    rows = [problem.head_dim * problem.itemsize, problem.value_dim * problem.itemsize]
    align_bytes = math.gcd(_MAX_ALIGN_BYTES, *strides, *rows)
    return make_plan(replace(problem, align_bytes=align_bytes), device, kernel, tiles)


def _run(
    plan: Plan,
    arrays: Mapping[str, Array],
    outputs: Set[str],
    softmax_scale: float | None,
    checked: bool,
    folder: Path,
) -> dict[str, Array]:
    """The arrays after a plan ran on them: the tensors of the parameter struct in its order, then lse."""
    problem = plan.problem
    placed = {
        name: _placed(array, array.itemsize if name == "lse" else problem.align_bytes, name in outputs)
        for name, array in arrays.items()
    }
    workspace = _workspace(plan)
    tensors = [array for name, array in placed.items() if name != "lse"]
    fields = [
        field
        for array in tensors
        for field in (array.ctypes.data, *(stride // array.itemsize for stride in array.strides[:3]))
    ]
    maps = b"".join(tensor_map(tensors[box.tensor], box.rows, box.cols) for box in plan.boxes)
    lse, scale = placed["lse"].ctypes.data, check_scale(softmax_scale, problem.head_dim)
    module = Module(plan.source, plan.macros, checked, folder)
    for launch in plan.launches:
        for step in range(launch.steps):
            params = maps + pack_attention(problem, fields, lse, workspace.ctypes.data, scale, step)
            buffers = {**placed, "workspace": workspace}
            module.launch(
                launch.entry, launch.grid, launch.block, launch.smem_bytes, _padded(params, plan), buffers
            )
    if plan.boxes and not plan.scratch and workspace.any():
        raise EmulatorError(f"{plan.kernel} leaves its counter at {workspace.view(np.uint32)[0]}")
    return placed


def tensor_map(tensor: Array, rows: int, cols: int) -> bytes:
    """What the emulator takes for a tensor map, of an array (batch, rows, heads, columns) of which a copy
    brings so many rows and columns of one head.
    """
    batch, seqlen, heads, dim = tensor.shape
    batch_stride, row_stride, head_stride, _ = tensor.strides
    extents = dim, seqlen, heads, batch
    # The hardware's own rules (CUDA driver API, cuTensorMapEncodeTiled).
    if any(value % 16 for value in (tensor.ctypes.data, row_stride, head_stride, batch_stride)):
        raise ValueError("the copy engine takes multiples of 16 bytes alone")
    if not (0 < rows <= _MAX_BOX and 0 < cols <= _MAX_BOX):
        raise ValueError(f"a box has 1 to {_MAX_BOX} rows and columns, not {rows} and {cols}")
    return _TENSOR_MAP.pack(
        _TENSOR_MAGIC,
        tensor.ctypes.data,
        tensor.itemsize,
        *extents,
        *(cols, rows, 1, 1),
        row_stride,
        head_stride,
        batch_stride,
    )


def _workspace(plan: Plan) -> Array:
    """Scratch, or a counter at 0 for a kernel with boxes."""
    if plan.scratch or not plan.boxes:
        return _placed(np.empty(plan.workspace_bytes, np.uint8), _MAX_ALIGN_BYTES, is_output=True)
    counter = _placed(np.empty(COUNTER_BYTES, np.uint8), _MAX_ALIGN_BYTES, is_output=True)
    counter[:] = 0
    return counter


def _padded(params: bytes, plan: Plan) -> bytes:
    """With what the compiler adds to a struct that holds tensor maps."""
    alignment = TENSOR_MAP_ALIGNMENT if plan.boxes else 1
    return params.ljust(ceil_div(len(params), alignment) * alignment, b"\0")


def _placed(array: Array, align_bytes: int, is_output: bool) -> Array:
    """A copy of an array, or NaN in place of its values, with its strides.

    Its address is a multiple of `align_bytes`, and of no more.
    """
    begin, end = extent(array)
    memory = np.full(end - begin + 2 * _MARGIN_BYTES, 0xFF, np.uint8)
    first = array.ctypes.data - begin  # of the first element; with negative strides it is not the lowest
    offset = _MARGIN_BYTES
    offset += (align_bytes - (memory.ctypes.data + offset + first)) % (2 * _MAX_ALIGN_BYTES)
    if not is_output:
        # With the strides come gaps, and what is in them comes along.
        memory[offset : offset + end - begin] = np.frombuffer(ctypes.string_at(begin, end - begin), np.uint8)
    placed: Array = np.ndarray(array.shape, array.dtype, memory, offset + first, array.strides)
    placed.flags.writeable = is_output
    return placed
