"""The functions that users call, read top to bottom: arrays -> Problem -> Plan -> kernels, or the CPU."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cufa import arrays, cpu, launch
from cufa.device import Arch, target
from cufa.plan import Plan, make_plan
from cufa.problem import (
    DTYPES,
    MAX_ALIGN_BYTES,
    Direction,
    Problem,
    Shape,
    check_fits,
    check_layout,
    check_options,
    check_scale,
    dtype_name,
    lse_shape,
    make_problem,
    output_shape,
)

Tiles = Mapping[str, int]
ArchLike = Arch | str | int
Arrays = dict[str, Any]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(softmax_scale * Q K^T) V, never holding a seqlen_q x seqlen_k matrix.

    Computed as in FlashAttention-2 (Dao 2023, Algorithm 1). Sums are kept in float32, for float64 arrays
    in float64. A row that sees no key has output 0 and LSE -inf.

    Arrays are NumPy's, CuPy's or any with DLPack, all of one kind, with any strides; one whose last axis
    is not contiguous is copied. On a GPU the work is on CuPy's current stream, and nothing waits for it.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64; head_dim 1 to 256.
        k: (batch, seqlen_k, kv_heads, head_dim), as q; heads must be a multiple of kv_heads, and query
            head h reads KV head h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, value_dim), as q; value_dim 1 to 256.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q only: the mask is aligned to the
            bottom-right corner.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        layout: "bshd" as above, or "bhsd" for (batch, heads, seqlen, head_dim).
        return_lse: also return the log-sum-exp of the scaled scores, which the backward needs.
        out: where to write the output, of its shape and dtype; must not overlap an input.
        kernel: a rung of the ladder (`cufa kernels` lists them) instead of the fastest.
        tiles: overrides of that kernel's tile sizes, as in {"block_m": 64}.
        arch: what to compile for instead of this GPU's own, as in "compute_80"; also CUFA_ARCH.
        backend: "cuda" or "numpy"; None is the GPU if the arrays are on one or there is one.

    Returns:
        (batch, seqlen_q, heads, value_dim) in the layout asked for, of the dtype and kind of q. With
        return_lse, a pair of that and the LSE: (batch, heads, seqlen_q), natural logarithm, float32
        (float64 for float64 arrays).

    Raises:
        TypeError: no array, kinds or dtypes mixed, or a dtype that is not supported.
        ValueError: shapes that don't go together, an `out` that does not fit or overlaps an input, an
            option with an impossible value, a kernel that cannot run here, arrays on another GPU.
        GPUUnavailableError: "cuda" without a GPU or CuPy; the message says what to install.
        LaunchError, CompileError: the driver or NVRTC refused the kernel.
    """
    given = {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "out": out}
    adopted = arrays.adopt(given, backend)
    tensors = adopted.arrays
    problem = _problem_of("forward", tensors, causal, layout)
    scale = check_scale(softmax_scale, problem.head_dim)
    if out is None:
        tensors["out"] = _empty(output_shape(problem, layout), DTYPES[problem.dtype], adopted.on_gpu)
    else:
        _check_out(adopted.sources)
    lse = _empty(lse_shape(problem), problem.accumulator, adopted.on_gpu) if return_lse else None

    if adopted.on_gpu:
        _run_on_gpu(problem, tensors, ("q", "k", "v", "out"), lse, scale, layout, kernel, tiles, arch)
    else:
        _refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch)
        q, k, v, output = _in_bshd(tensors, ("q", "k", "v", "out"), layout)
        cpu.attention(q, k, v, output, lse, causal=problem.causal, softmax_scale=scale)
    result = adopted.give_back(tensors["out"], out)
    return (result, adopted.give_back(lse)) if return_lse else result


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    backend: str | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of `attention` in q, k and v.

    Computed as in FlashAttention-2 (Dao 2023, Algorithm 2): the probabilities are recomputed from q, k
    and lse, never held as a whole. Rows that see no key, and keys that no row sees, have gradient 0.

    Args:
        dout: gradient of the output: (batch, seqlen_q, heads, value_dim), of q's dtype and kind.
        q: as it was given to `attention`; likewise k and v.
        k: as above.
        v: as above.
        out: what `attention` returned.
        lse: what `attention` returned with return_lse=True, (batch, heads, seqlen_q).
        causal: as in the forward call; likewise the options below.
        softmax_scale: as in the forward call.
        layout: as in the forward call.
        kernel: a backward rung of the ladder instead of the fastest.
        tiles: overrides of that kernel's tile sizes.
        arch: what to compile for instead of this GPU's own.
        backend: "cuda", "numpy" or None.

    Returns:
        (dq, dk, dv), each of the shape, dtype and kind of q, k, v; dk and dv are summed over the query
        heads that share a KV head.

    Raises:
        What `attention` raises.
    """
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    adopted = arrays.adopt(given, backend)
    tensors = adopted.arrays
    problem = _problem_of("backward", tensors, causal, layout)
    scale = check_scale(softmax_scale, problem.head_dim)
    for name in ("q", "k", "v"):
        tensors["d" + name] = _empty(tensors[name].shape, DTYPES[problem.dtype], adopted.on_gpu)

    if adopted.on_gpu:
        lse = tensors.pop("lse")
        if not lse.flags.c_contiguous:
            lse = lse.copy()
        names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        _run_on_gpu(problem, tensors, names, lse, scale, layout, kernel, tiles, arch)
    else:
        _refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch)
        dout, q, k, v, out = _in_bshd(tensors, ("dout", "q", "k", "v", "out"), layout)
        dq, dk, dv = _in_bshd(tensors, ("dq", "dk", "dv"), layout)
        cpu.attention_backward(
            *(dout, q, k, v, out, tensors["lse"], dq, dk, dv),
            causal=problem.causal,
            softmax_scale=scale,
        )
    dq, dk, dv = (adopted.give_back(tensors[name]) for name in ("dq", "dk", "dv"))
    return dq, dk, dv


def softmax(x: Any, *, passes: int = 2, arch: ArchLike | None = None, backend: str | None = None) -> Any:
    """Softmax over the last axis, the part of standard attention between its two products.

    Args:
        x: any shape with at least one axis, float16, bfloat16, float32 or float64; NumPy, CuPy or DLPack.
        passes: reads of each row: 3 for the safe softmax (maximum, sum, quotients), 2 for the online one
            (Milakov and Gimelshein 2018, Algorithm 3), which finds maximum and sum together.
        arch: what to compile for instead of this GPU's own.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        Of the shape, dtype and kind of x. A row of -inf alone gives zeros.

    Raises:
        TypeError: no array, or a dtype that is not supported.
        ValueError: no axis, or another number of passes.
    """
    if passes not in (2, 3):
        raise ValueError(f"passes is {passes!r}; it may be 2 or 3")
    adopted = arrays.adopt({"x": x}, backend)
    source = adopted.arrays["x"]
    dtype = dtype_name(source.dtype, "x")
    if source.ndim == 0:
        raise ValueError("x has shape (); it must have at least one axis")
    result = _empty(source.shape, DTYPES[dtype], adopted.on_gpu)
    if adopted.on_gpu:
        if result.size:
            rows = (math.prod(source.shape[:-1]), source.shape[-1])
            matrix = _last_axis_contiguous(source.reshape(rows))
            launch.softmax(matrix, result.reshape(rows), dtype, passes, arch)
    else:
        _refuse_gpu_options(arch=arch)
        cpu.softmax(source, result, passes)
    return adopted.give_back(result)


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    causal: bool = False,
    layout: str = "bshd",
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
) -> Plan:
    """The Plan that a call with these arrays would use on the GPU, and why; nothing is compiled or run.

    Args:
        q: anything with the shape and dtype of an array; likewise k and v. Nothing else of it is read, so
            the arrays are taken to be as well aligned as their rows allow.
        k: as above.
        v: as above.
        backward: plan `attention_backward` instead of `attention`.
        causal: as in `attention`; likewise the options below.
        layout: as in `attention`.
        kernel: as in `attention`.
        tiles: as in `attention`.
        arch: what to plan for; on a machine without a GPU it must be given, or CUFA_ARCH set.

    Returns:
        The Plan; `print` shows it.

    Raises:
        TypeError, ValueError: as `attention`.
        GPUUnavailableError: no GPU, and no arch.
    """
    direction: Direction = "backward" if backward else "forward"
    described = {name: _Described(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    problem = _problem_of(direction, described, causal, layout)
    row_bytes = (problem.head_dim | problem.value_dim) * problem.itemsize
    return make_plan(replace(problem, align_bytes=_alignment(row_bytes)), target(arch), kernel, tiles)


class _Described:
    """The shape and the NumPy dtype of something that need be no more of an array than that."""

    def __init__(self, name: str, array: Any) -> None:
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{name} is a {arrays.kind_of(array)}; it must have a shape and a dtype")
        self.shape = tuple(array.shape)
        self.dtype = array.dtype
        if not isinstance(self.dtype, np.dtype):
            # A library with dtypes of its own spells them as NumPy does, behind its own name.
            self.dtype = np.dtype(str(self.dtype).rpartition(".")[2])


def _problem_of(direction: Direction, tensors: Mapping[str, Any], causal: bool, layout: str) -> Problem:
    described = tuple([(name, array.shape, array.dtype) for name, array in tensors.items()])
    try:
        return _problem(direction, described, causal, layout)
    except TypeError:
        check_options(causal, layout)  # something that has no hash
        raise


@functools.lru_cache(maxsize=4096)
def _problem(
    direction: Direction,
    tensors: tuple[tuple[str, Shape, Any], ...],
    causal: bool,
    layout: str,
) -> Problem:
    check_options(causal, layout)
    shapes = {name: shape for name, shape, _ in tensors}
    dtypes = {name: dtype for name, _, dtype in tensors}
    problem = make_problem(direction, shapes, dtypes, causal=causal, layout=layout)
    check_fits(problem, shapes, dtypes, layout)
    return problem


def _empty(shape: Shape, dtype: np.dtype[Any], on_gpu: bool) -> Any:
    return (sys.modules["cupy"] if on_gpu else np).empty(shape, dtype)


def _check_out(sources: Arrays) -> None:
    out = sources["out"]
    if not getattr(out.flags, "writeable", True):  # CuPy's arrays always are
        raise ValueError("out is read-only; it must be writeable")
    if arrays.overlaps_itself(out):
        raise ValueError(
            f"out has strides {out.strides} for shape {out.shape}, so that elements share memory; "
            "each must have its own"
        )
    for name in ("q", "k", "v"):
        if arrays.overlap(out, sources[name]):
            raise ValueError(f"out overlaps {name} in memory; it must not")


def _refuse_gpu_options(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but this call computes on the CPU; it needs a GPU")


def _in_bshd(tensors: Arrays, names: tuple[str, ...], layout: str) -> list[Any]:
    axes = (*check_layout(layout), 3)
    return [tensors[name].transpose(axes) for name in names]


def _last_axis_contiguous(array: Any) -> Any:
    if array.shape[-1] == 1 or array.strides[-1] == array.itemsize:
        return array
    return sys.modules["cupy"].ascontiguousarray(array)


def _run_on_gpu(
    problem: Problem,
    tensors: Arrays,
    names: tuple[str, ...],
    lse: Any,
    softmax_scale: float,
    layout: str,
    kernel: str | None,
    tiles: Tiles | None,
    arch: ArchLike | None,
) -> None:
    """Launch the kernels for these tensors, in the order of the parameter struct."""
    batch, row, head = check_layout(layout)
    itemsize = problem.itemsize
    fields: list[int] = []
    bits = 0
    for name in names:
        array = _last_axis_contiguous(tensors[name])
        tensors[name] = array
        strides = array.strides
        address = array.data.ptr
        bits |= address | strides[batch] | strides[row] | strides[head]
        fields += (
            address,
            strides[batch] // itemsize,
            strides[row] // itemsize,
            strides[head] // itemsize,
        )
    align_bytes = _alignment(bits)
    if align_bytes < itemsize:
        raise ValueError(
            f"an array of {', '.join(names)} has an address or a stride that is a multiple of "
            f"{align_bytes} bytes only; {problem.dtype} needs {itemsize}"
        )
    run = _executable(
        problem,
        align_bytes,
        kernel,
        tuple(tiles.items()) if tiles else None,
        arch,
        os.environ.get("CUFA_ARCH"),
        sys.modules["cupy"].cuda.runtime.getDevice(),
    )
    run(fields, 0 if lse is None else lse.data.ptr, softmax_scale)


def _alignment(bits: int) -> int:
    """The largest power of two up to 16 that divides all numbers whose bits these are."""
    bits |= MAX_ALIGN_BYTES
    return bits & -bits


@functools.lru_cache(maxsize=4096)
def _executable(
    problem: Problem,
    align_bytes: int,
    kernel: str | None,
    tiles: tuple[tuple[str, int], ...] | None,
    arch: ArchLike | None,
    environment_arch: str | None,
    device_id: int,
) -> launch.Executable:
    aligned = replace(problem, align_bytes=align_bytes)
    return launch.Executable(make_plan(aligned, target(arch), kernel, dict(tiles or ())))
