"""Rotary position embedding: rotates queries and keys by angles that grow with their positions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cufa import arrays, launch
from cufa.arguments import Wanted, check_array, check_flags, refuse_gpu_options
from cufa.device import Arch
from cufa.messages import byte_order
from cufa.plan.companions import Rotation
from cufa.problem import (
    DTYPES,
    Axes,
    LayoutName,
    Shape,
    accumulator_dtype,
    axes_of,
    check_extents,
    dtype_name,
)
from cufa.tensor_layout import layout_of
from cufa.untraced import untraced

POSITION_DTYPES = ("int32", "int64")
# Each pair is read before it is written, so that out may be x.
_IN_PLACE = frozenset([("out", "x")])


@untraced
def rotary(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    positions: Any = None,
    interleaved: bool = False,
    out: Any = None,
    layout: LayoutName = "bshd",
    arch: Arch | str | int | None = None,
    backend: arrays.Backend | None = None,
) -> Any:
    """Apply rotary position embedding to queries or keys (RoPE; Su et al. 2021, eq. 34).

    A pair (a, b) of columns becomes (a c - b s, a s + b c). c and s are the elements of cos and sin in the
    row of the token's position and the column of the pair. Columns beyond the pairs are copied. For the
    gradient of x, call this function with the gradient of the output and with -sin.

    Args:
        x: (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) for packed sequences.
        cos: (places, rotary_dim / 2), in x's dtype or in the dtype of its sums (float32, for float64 arrays
            float64); rotary_dim is at most head_dim. Of a table that has each angle twice, as Hugging Face's,
            give cos[:, :rotary_dim // 2].
        sin: as cos.
        positions: each token's row of cos and sin: (batch, seqlen) or, for packed sequences, (tokens,), int32
            or int64. Axes may have length 1. None: 0, 1, 2, ... in each sequence. On a GPU, positions are not
            checked: a token at a position that cos does not have becomes NaN.
        interleaved: pairs are columns 2 i and 2 i + 1 instead of i and i + rotary_dim / 2.
        out: where to write the output, with x's shape and dtype; it may be x.
        layout: "bshd" as above, or "bhsd".
        arch: the architecture to compile for instead of this GPU's.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        out, with x's shape, dtype and library.

    Raises:
        TypeError: not arrays, mixed libraries or dtypes, or an unsupported dtype.
        ValueError: shapes that do not match, on the CPU positions that cos does not have, packed sequences
            without positions, an output that is read-only or overlaps another array, arrays on another GPU.
        GPUUnavailableError, NVRTCMissingError, LaunchError, CompileError: as `attention`.
    """
    check_flags(interleaved=interleaved)
    given = {"x": x, "cos": cos, "sin": sin} | ({} if positions is None else {"positions": positions})
    outputs = {} if out is None else {"out": out}
    adopted = arrays.adopt(given | outputs, backend)
    named = dict(adopted.arrays)
    dtype = dtype_name(named["x"].dtype, "x")
    axes = axes_of("x", named["x"].shape, layout)
    _check(named, dtype, axes)
    arrays.check_outputs(adopted, outputs, _IN_PLACE)
    arrays.check_aligned(adopted)
    if out is None:
        empty = sys.modules["cupy"].empty if adopted.on_gpu else np.empty
        named["out"] = empty(named["x"].shape, named["x"].dtype)
    if adopted.on_gpu:
        _turn_on_gpu(named, dtype, axes, bool(interleaved), arch)
    else:
        refuse_gpu_options(arch=arch)
        _turn_on_cpu(named, axes, interleaved)
    return adopted.give_back(named["out"], out)


def check_angles(dtype: str, dim: int, cos: Wanted, sin: Wanted) -> None:
    """Check the tables of cosines and sines for arrays of this dtype and head dim.

    Raises TypeError or ValueError if they do not fit.
    """
    if len(cos.shape) != 2 or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos has shape {cos.shape}; it must be (places, rotary_dim / 2), with an even rotary_dim of at "
            f"most {dim}; of a table that has each angle twice, as Hugging Face's, give "
            "cos[:, :rotary_dim // 2]"
        )
    check_extents("cos", cos.shape)
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {sin.shape}; it must be {cos.shape}, as cos has")
    if cos.dtype not in (DTYPES[dtype], accumulator_dtype(dtype)):
        wanted = " or ".join(dict.fromkeys((dtype, accumulator_dtype(dtype).name)))
        raise TypeError(f"cos has dtype {cos.dtype}; for {dtype} it must be {wanted}{byte_order(cos.dtype)}")
    if sin.dtype != cos.dtype:
        raise TypeError(
            f"sin has dtype {sin.dtype}; it must be {cos.dtype}, as cos is{byte_order(sin.dtype)}"
        )


def _check(named: dict[str, Any], dtype: str, axes: Axes) -> None:
    x = named["x"]
    check_angles(
        dtype, x.shape[-1], *(Wanted(named[name].shape, named[name].dtype) for name in ("cos", "sin"))
    )
    if "out" in named:
        check_array("out", named["out"].shape, named["out"].dtype, Wanted(x.shape, x.dtype))
    _check_positions(named, axes)


def _check_positions(named: dict[str, Any], axes: Axes) -> None:
    x, positions = named["x"], named.get("positions")
    batch, seqlen, _ = axes
    tokens: Shape = (x.shape[seqlen],) if batch is None else (x.shape[batch], x.shape[seqlen])
    if positions is None:
        if batch is None:
            raise ValueError("positions must be given for packed sequences, to say where each begins")
        if tokens[1] > len(named["cos"]):
            raise ValueError(f"cos has {len(named['cos'])} places, and x has {tokens[1]} tokens a sequence")
        return
    if positions.dtype not in POSITION_DTYPES:
        raise TypeError(
            f"positions has dtype {positions.dtype}; it may be {' or '.join(POSITION_DTYPES)}"
            f"{byte_order(positions.dtype)}"
        )
    fits = all(size in (1, wanted) for size, wanted in zip(positions.shape, tokens, strict=False))
    if positions.ndim != len(tokens) or not fits:
        raise ValueError(
            f"positions has shape {positions.shape}; it must be {tokens}, or have 1 along an axis"
        )


def _turn_on_gpu(
    named: dict[str, Any], dtype: str, axes: Axes, interleaved: bool, arch: Arch | str | int | None
) -> None:
    x, out = named["x"], named["out"]
    if out.size == 0:
        return
    contiguous = sys.modules["cupy"].ascontiguousarray
    tensors = [x, out]
    layout = layout_of(tuple((tensor.shape, tensor.strides) for tensor in tensors), out.itemsize, axes)
    for place in layout.scattered:
        tensors[place] = contiguous(tensors[place])
    addresses = [tensor.data.ptr for tensor in tensors]
    tables = [contiguous(named[name]) for name in ("cos", "sin")]
    positions = named.get("positions")
    batch, seqlen, heads = axes
    places, pairs = tables[0].shape
    rotation = Rotation(
        dtype=dtype,
        head_dim=x.shape[-1],
        rotary_dim=2 * pairs,
        table_dtype=tables[0].dtype.name,
        position_dtype=POSITION_DTYPES[0] if positions is None else positions.dtype.name,
        interleaved=interleaved,
        align_bytes=layout.alignment(addresses),
    )
    launch.rotary(
        rotation,
        layout.fields(addresses),
        [table.data.ptr for table in tables],
        (0, 0, 0) if positions is None else (positions.data.ptr, *position_strides(positions)),
        (1 if batch is None else x.shape[batch], x.shape[heads], x.shape[seqlen]),
        places,
        arch,
    )
    if tensors[-1] is not out:
        out[...] = tensors[-1]


def position_strides(positions: Any) -> tuple[int, int]:
    """Strides between sequences and between tokens, in elements; 0 along an axis of length 1."""
    strides = [
        0 if size == 1 else stride // positions.itemsize
        for size, stride in zip(positions.shape, positions.strides, strict=True)
    ]
    return (0, strides[0]) if positions.ndim == 1 else (strides[0], strides[1])


@np.errstate(all="ignore")
def _turn_on_cpu(named: dict[str, Any], axes: Axes, interleaved: bool) -> None:
    batch, seqlen, heads = axes
    order = (seqlen, heads, 2) if batch is None else (batch, seqlen, heads, 3)
    x, out = (named[name].transpose(order) for name in ("x", "out"))
    if not x.size:
        return
    places, pairs = named["cos"].shape
    positions = named.get("positions")
    if positions is None:
        positions = np.arange(x.shape[1])[None]
    if positions.size and not 0 <= positions.min() <= positions.max() < places:
        raise ValueError(
            f"positions are from {positions.min()} to {positions.max()}; cos has {places} places"
        )
    dtype = accumulator_dtype(x.dtype.name)
    cos, sin = (named[name][positions][..., None, :].astype(dtype) for name in ("cos", "sin"))
    first, second = (
        (np.s_[..., 0 : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2])
        if interleaved
        else (np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs])
    )
    a, b = x[first].astype(dtype), x[second].astype(dtype)
    out[first], out[second] = a * cos - b * sin, a * sin + b * cos
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
