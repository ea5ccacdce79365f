"""Two partial results of attention, over different keys, made one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cufa import arrays, launch
from cufa.device import Arch
from cufa.problem import (
    DTYPES,
    LayoutName,
    Shape,
    accumulator_dtype,
    check_layout,
    dtype_name,
)
from cufa.tensor_layout import Axes, layout_of


def merge(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    layout: LayoutName = "bshd",
    arch: Arch | str | int | None = None,
    backend: arrays.Backend | None = None,
) -> tuple[Any, Any]:
    """What attention over the keys of a and of b together gives, from what each gives alone.

    Exact but for rounding: out is the mean of out_a and out_b weighted with e^lse_a and e^lse_b, and lse is
    log(e^lse_a + e^lse_b) (Milakov and Gimelshein 2018, section 3.1). A part whose LSE is -inf counts for
    nothing. A sink, which each part would count, must be given to one of them only.

    Args:
        out_a: (batch, seqlen, heads, value_dim), or (tokens, heads, value_dim) of packed sequences.
        lse_a: its LSE, (batch, heads, seqlen) or (heads, tokens), as `attention` returns it.
        out_b: as out_a; likewise lse_b.
        lse_b: as above.
        layout: "bshd" as above, or "bhsd".
        arch: what to compile for instead of this GPU's own.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        (out, lse), shaped as those of the parts, of their dtype and kind.

    Raises:
        TypeError: no arrays, kinds or dtypes mixed, or a dtype that is not supported.
        ValueError: shapes that don't go together.
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    adopted = arrays.adopt(given, backend)
    parts = adopted.arrays
    dtype = dtype_name(parts["out_a"].dtype, "out_a")
    axes = _axes(parts["out_a"].shape, layout)
    _check(parts, dtype, axes)

    xp: Any = sys.modules["cupy"] if adopted.on_gpu else np
    out = xp.empty(parts["out_a"].shape, DTYPES[dtype])
    lse = xp.empty(parts["lse_a"].shape, accumulator_dtype(dtype))
    if adopted.on_gpu:
        _merge_on_gpu(parts, out, lse, dtype, axes, arch)
    elif arch is not None:
        raise ValueError(f"arch is {arch!r}, but this call computes on the CPU; it needs a GPU")
    else:
        _merge_on_cpu(parts, out, lse, axes)
    return adopted.give_back(out), adopted.give_back(lse)


def _axes(shape: Shape, layout: str) -> Axes:
    """The axes (batch, seqlen, heads) of an output; packed ones have no batch."""
    batch, seqlen, heads = check_layout(layout)
    if len(shape) == 4:
        return batch, seqlen, heads
    if len(shape) == 3 and layout == "bshd":
        return None, 0, 1
    raise ValueError(
        f"out_a has shape {shape}; it must have 4 axes, or 3 if sequences are packed (in layout 'bshd')"
    )


def _check(parts: dict[str, Any], dtype: str, axes: Axes) -> None:
    shape = parts["out_a"].shape
    batch, seqlen, heads = axes
    lse_shape = (
        (shape[heads], shape[seqlen]) if batch is None else (shape[batch], shape[heads], shape[seqlen])
    )
    wanted = {
        "out_b": (shape, DTYPES[dtype]),
        "lse_a": (lse_shape, accumulator_dtype(dtype)),
        "lse_b": (lse_shape, accumulator_dtype(dtype)),
    }
    for name, (wanted_shape, wanted_dtype) in wanted.items():
        if parts[name].shape != wanted_shape:
            raise ValueError(f"{name} has shape {parts[name].shape}; it must be {wanted_shape}")
        if parts[name].dtype != wanted_dtype:
            raise TypeError(f"{name} has dtype {parts[name].dtype}; it must be {wanted_dtype}")


def _merge_on_gpu(
    parts: dict[str, Any],
    out: Any,
    lse: Any,
    dtype: str,
    axes: Axes,
    arch: Arch | str | int | None,
) -> None:
    if out.size == 0 and lse.size == 0:
        return
    contiguous = sys.modules["cupy"].ascontiguousarray
    tensors = [parts["out_a"], parts["out_b"], out]
    layout = layout_of(tuple((tensor.shape, tensor.strides) for tensor in tensors), out.itemsize, axes)
    for place in layout.scattered:
        tensors[place] = contiguous(tensors[place])
    lses = [contiguous(parts["lse_a"]), contiguous(parts["lse_b"]), lse]
    addresses = [tensor.data.ptr for tensor in tensors]
    batch, seqlen, heads = axes
    sizes = (1 if batch is None else out.shape[batch], out.shape[heads], out.shape[seqlen])
    launch.merge(
        dtype,
        out.shape[-1],
        sizes,
        layout.fields(addresses),
        [array.data.ptr for array in lses],
        layout.alignment(addresses),
        arch,
    )


@np.errstate(all="ignore")
def _merge_on_cpu(parts: dict[str, Any], out: Any, lse: Any, axes: Axes) -> None:
    batch, seqlen, heads = axes
    order = (heads, seqlen, 2) if batch is None else (batch, heads, seqlen, 3)
    lse[...] = np.logaddexp(parts["lse_a"], parts["lse_b"])
    merged = np.zeros([out.shape[axis] for axis in order], lse.dtype)
    for name in ("a", "b"):
        part_lse = parts[f"lse_{name}"]
        seen = ~np.isneginf(part_lse)
        weight = np.exp(np.subtract(part_lse, lse, where=seen, out=np.zeros_like(lse)))
        merged += np.where(seen[..., None], weight[..., None] * parts[f"out_{name}"].transpose(order), 0)
    out.transpose(order)[...] = merged
