"""Merges two partial results of attention over different keys."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cufa import arrays, launch
from cufa.arguments import Wanted, check_array, refuse_gpu_options
from cufa.device import Arch
from cufa.problem import (
    DTYPES,
    Axes,
    LayoutName,
    accumulator_dtype,
    axes_of,
    dtype_name,
)
from cufa.tensor_layout import layout_of
from cufa.untraced import untraced

# Outputs may overlap these inputs: each input element is read before the output element there is written.
_IN_PLACE = frozenset((result, f"{result}_{part}") for result in ("out", "lse") for part in ("a", "b"))


@untraced
def merge(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    out: Any = None,
    lse: Any = None,
    layout: LayoutName = "bshd",
    arch: Arch | str | int | None = None,
    backend: arrays.Backend | None = None,
) -> tuple[Any, Any]:
    """Merge the attention over keys a and the attention over keys b into that over both.

    Exact but for rounding: out is the mean of out_a and out_b weighted by e^lse_a and e^lse_b, and lse is
    log(e^lse_a + e^lse_b) (Milakov and Gimelshein 2018, section 3.1). A part with LSE -inf has weight 0. Pass
    a sink to only one of the parts, since each would count it.

    Args:
        out_a: (batch, seqlen, heads, value_dim), or (tokens, heads, value_dim) for packed sequences.
        lse_a: the LSE of out_a, (batch, heads, seqlen) or (heads, tokens), as `attention` returns it: to
            base e. An LSE of FlashInfer, to base 2 and (tokens, heads), is to be multiplied by ln 2 and
            transposed.
        out_b: as out_a; likewise lse_b.
        lse_b: as above.
        out: where to write the output, with its shape and dtype. It may be out_a or out_b, to merge in
            place. It must not overlap any other argument.
        lse: the same for the LSE, with lse_a and lse_b. Given out and lse, a call on a GPU allocates
            nothing if every LSE is contiguous and so is the last axis of every other array.
        layout: "bshd" as above, or "bhsd".
        arch: the architecture to compile for instead of this GPU's.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        (out, lse), with the shapes, dtypes and library of the parts.

    Raises:
        TypeError: not arrays, mixed libraries or dtypes, or an unsupported dtype.
        ValueError: shapes that do not match, an output that is read-only or overlaps another array, arrays on
            another GPU.
        GPUUnavailableError, NVRTCMissingError, LaunchError, CompileError: as `attention`.
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    outputs = {name: array for name, array in (("out", out), ("lse", lse)) if array is not None}
    adopted = arrays.adopt(given | outputs, backend)
    named = adopted.arrays
    dtype = dtype_name(named["out_a"].dtype, "out_a")
    axes = axes_of("out_a", named["out_a"].shape, layout)
    _check(named, dtype, axes)
    arrays.check_outputs(adopted, outputs, _IN_PLACE)
    arrays.check_aligned(adopted)

    empty = sys.modules["cupy"].empty if adopted.on_gpu else np.empty
    for name in ("out", "lse"):
        if name not in named:
            part = named[f"{name}_a"]
            named[name] = empty(part.shape, part.dtype)
    if adopted.on_gpu:
        _merge_on_gpu(named, dtype, axes, arch)
    else:
        refuse_gpu_options(arch=arch)
        _merge_on_cpu(named, axes)
    return adopted.give_back(named["out"], out, "out"), adopted.give_back(named["lse"], lse, "lse")


def _check(named: dict[str, Any], dtype: str, axes: Axes) -> None:
    shape = named["out_a"].shape
    batch, seqlen, heads = axes
    if shape[-1] == 0:
        raise ValueError(f"out_a has shape {shape}; the value dim (last axis) must be at least 1")
    rows = (shape[heads], shape[seqlen])
    out = Wanted(shape, DTYPES[dtype])
    lse = Wanted(rows if batch is None else (shape[batch], *rows), accumulator_dtype(dtype))
    for name, array in named.items():
        check_array(name, array.shape, array.dtype, lse if name.startswith("lse") else out)


def _merge_on_gpu(named: dict[str, Any], dtype: str, axes: Axes, arch: Arch | str | int | None) -> None:
    out, lse = named["out"], named["lse"]
    if out.size == 0 and lse.size == 0:
        return
    contiguous = sys.modules["cupy"].ascontiguousarray
    tensors = [named["out_a"], named["out_b"], out]
    layout = layout_of(tuple((tensor.shape, tensor.strides) for tensor in tensors), out.itemsize, axes)
    for place in layout.scattered:
        tensors[place] = contiguous(tensors[place])
    lses = [contiguous(named["lse_a"]), contiguous(named["lse_b"]), contiguous(lse)]
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
    for given, written in ((out, tensors[-1]), (lse, lses[-1])):
        if written is not given:
            given[...] = written


@np.errstate(all="ignore")
def _merge_on_cpu(named: dict[str, Any], axes: Axes) -> None:
    batch, seqlen, heads = axes
    order = (heads, seqlen, 2) if batch is None else (batch, heads, seqlen, 3)
    lses = named["lse_a"], named["lse_b"]
    largest = np.maximum(*lses)
    weights = [np.where(np.isneginf(lse), 0, np.exp(lse - largest)) for lse in lses]
    # Not e^(lse_a - lse): a large LSE does not hold the logarithm of the sum.
    total = weights[0] + weights[1]
    out = np.zeros([named["out"].shape[axis] for axis in order], total.dtype)
    for part, weight in zip(("out_a", "out_b"), weights, strict=True):
        share = (weight / np.where(total == 0, 1, total))[..., None]
        out += np.where(share == 0, 0, share * named[part].transpose(order))
    named["out"].transpose(order)[...] = out
    named["lse"][...] = np.where(total == 0, -np.inf, largest + np.log(total))
