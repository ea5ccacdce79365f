"""Rounds arrays to 8-bit floats with descales, for attention in 8 bits."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cufa import arrays, launch
from cufa.arguments import Wanted, check_array, check_descales, check_flags, refuse_gpu_options
from cufa.device import Arch
from cufa.integers import round_up
from cufa.messages import shown
from cufa.plan.companions import Quantization
from cufa.problem import (
    FLOAT8,
    INPUT_DTYPES,
    MAX_ALIGN_BYTES,
    Axes,
    LayoutName,
    Shape,
    accumulator_dtype,
    axes_of,
    dtype_name,
    integer,
)
from cufa.score_rules import packed_pieces
from cufa.tensor_layout import layout_of
from cufa.untraced import untraced

_E4M3 = INPUT_DTYPES[FLOAT8]
_LARGEST = 448.0
# The limits of descales: normal float32 numbers, which have a reciprocal.
_DESCALE_LIMITS = np.finfo(np.float32)


@untraced
def quantize(
    x: Any,
    *,
    kv_heads: int | None = None,
    descale: Any = None,
    cu_seqlens: Any = None,
    seqlen_contiguous: bool = False,
    out: Any = None,
    layout: LayoutName = "bshd",
    arch: Arch | str | int | None = None,
    backend: arrays.Backend | None = None,
) -> tuple[Any, Any]:
    """Round queries, keys or values to 8 bits, and return them with the descales that `attention` takes.

    Each element of out is x times the reciprocal of its descale (computed in float32, for float64 arrays in
    float64), rounded to the nearest float8_e4m3fn, ties to even (from float64, by way of float32). A descale
    is the largest magnitude among its elements over 448, the largest float8_e4m3fn number, or the nearest
    normal float32 number; it is 1 if all elements are 0. NaN stays NaN, and infinity becomes 448. Neither
    affects a descale.

    A call that is captured into a CUDA graph should be given `descale`: the memory in which it measures
    returns to CuPy's pool.

    Args:
        x: (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) for packed sequences; float16,
            bfloat16, float32 or float64.
        kv_heads: descales per sequence: for queries, the number of KV heads. None: one for each head of x.
        descale: (batch, kv_heads) float32, at least 1.2e-38, if known (static scales). x is then read only
            once, and magnitudes over 448 descales are clipped. On a GPU the numbers are not checked.
        cu_seqlens: (batch + 1,) int32: offsets, not lengths, where each packed sequence starts, and where the
            last ends. Tokens outside all sequences are not written.
        seqlen_contiguous: whether tokens, not columns, are adjacent in memory, with the other strides
            multiples of 16 bytes. Use it for values that a Hopper GPU reads; others copy them. The
            shape is the same. With `out`, its strides decide instead. NumPy arrays computed on a GPU are
            always C-contiguous.
        out: where to write the elements, with x's shape, float8_e4m3fn.
        layout: "bshd" as above, or "bhsd".
        arch: the architecture to compile for instead of this GPU's.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        (out, descale), from x's library: out in x's shape, and the descales, (batch, kv_heads) float32: the
        given array if there is one.

    Raises:
        TypeError: not arrays, mixed libraries or dtypes, or an unsupported dtype.
        ValueError: shapes that do not match, descales that are too small, packed sequences without cu_seqlens
            or with seqlen_contiguous, an output that is read-only or overlaps another array, arrays on
            another GPU.
        GPUUnavailableError, NVRTCMissingError, LaunchError, CompileError: as `attention`.
    """
    check_flags(seqlen_contiguous=seqlen_contiguous)
    check_descales(descale=descale)
    optional = {"descale": descale, "cu_seqlens": cu_seqlens}
    given = {"x": x} | {name: array for name, array in optional.items() if array is not None}
    outputs = {} if out is None else {"out": out}
    adopted = arrays.adopt(given | outputs, backend)
    named = dict(adopted.arrays)
    dtype = dtype_name(named["x"].dtype, "x")
    axes = axes_of("x", named["x"].shape, layout)
    kv_heads = _check(named, axes, kv_heads, seqlen_contiguous)
    if seqlen_contiguous and not adopted.writeable and named["x"].shape[axes[1]] % MAX_ALIGN_BYTES:
        raise ValueError(
            f"seqlen_contiguous is True, x has {named['x'].shape[axes[1]]} tokens, and arrays of its library "
            f"cannot be padded to rows of {MAX_ALIGN_BYTES} bytes; it must have a multiple of as many tokens"
        )
    arrays.check_outputs(adopted, outputs)
    arrays.check_aligned(adopted)
    xp = sys.modules["cupy"] if adopted.on_gpu else np
    if out is None:
        named["out"] = _empty(xp, named["x"].shape, axes, seqlen_contiguous)
    if descale is None:
        named["descale"] = xp.empty((_sequences(named, axes), kv_heads), np.float32)
    if adopted.on_gpu:
        _quantize_on_gpu(named, dtype, axes, descale is None, arch)
    else:
        refuse_gpu_options(arch=arch)
        if descale is not None:
            _check_reciprocals(named["descale"])
        _quantize_on_cpu(named, axes, descale is None)
    used = adopted.give_back(named["descale"]) if descale is None else descale
    return adopted.give_back(named["out"], out), used


def _check(named: dict[str, Any], axes: Axes, kv_heads: int | None, seqlen_contiguous: bool) -> int:
    """Return the number of descales per sequence; raise TypeError or ValueError if something does not fit."""
    shape = named["x"].shape
    batch, _, heads = axes
    if kv_heads is None:
        kv_heads = shape[heads]
    else:
        allowed = f"kv_heads is {shown(kv_heads)}; it may be an integer that divides x's {shape[heads]} heads"
        try:
            kv_heads = integer(kv_heads)
        except TypeError:
            raise TypeError(allowed) from None
        if kv_heads < 1 or shape[heads] % kv_heads:
            raise ValueError(allowed)
    if batch is None and "cu_seqlens" not in named:
        raise ValueError("cu_seqlens must be given for packed sequences, to say where each begins")
    if batch is None and seqlen_contiguous:
        raise ValueError("seqlen_contiguous is True, and sequences are packed; there is no kernel for it")
    if "cu_seqlens" in named:
        if batch is not None:
            raise ValueError(f"cu_seqlens is given, and x has shape {shape}; packed, it has 3 axes")
        ends = named["cu_seqlens"]
        if ends.ndim != 1 or len(ends) == 0:
            raise ValueError(f"cu_seqlens has shape {ends.shape}; it must be (batch + 1,)")
    sequences = _sequences(named, axes)
    wanted = {
        "cu_seqlens": Wanted((sequences + 1,), np.dtype(np.int32)),
        "descale": Wanted((sequences, kv_heads), np.dtype(np.float32)),
        "out": Wanted(shape, _E4M3),
    }
    for name, of_name in wanted.items():
        if name in named:
            check_array(name, named[name].shape, named[name].dtype, of_name)
    return kv_heads


def _sequences(named: dict[str, Any], axes: Axes) -> int:
    batch = axes[0]
    return len(named["cu_seqlens"]) - 1 if batch is None else named["x"].shape[batch]


def _empty(xp: Any, shape: Shape, axes: Axes, seqlen_contiguous: bool) -> Any:
    """Allocate the output; if tokens are adjacent, their stride is padded to 16 bytes."""
    if not seqlen_contiguous:
        return xp.empty(shape, np.uint8).view(_E4M3)
    _, seqlen, _ = axes
    *others, head_dim = (size for axis, size in enumerate(shape) if axis != seqlen)
    memory = xp.empty((*others, head_dim, round_up(shape[seqlen], MAX_ALIGN_BYTES)), np.uint8)
    return xp.moveaxis(memory.view(_E4M3)[..., : shape[seqlen]], -1, seqlen)


def _quantize_on_gpu(
    named: dict[str, Any], dtype: str, axes: Axes, measured: bool, arch: Arch | str | int | None
) -> None:
    x, out, descale = named["x"], named["out"], named["descale"]
    if out.size == 0 or len(descale) == 0:
        if measured:
            descale.fill(1)
        return
    batch, seqlen, heads = axes
    contiguous = arrays.contiguous
    x_layout = layout_of(((x.shape, x.strides),), x.itemsize, axes)
    if x_layout.scattered:
        x = contiguous(x)
    # If tokens are adjacent in memory, the kernel takes them for columns.
    by_seqlen = batch is not None and out.shape[-1] > 1 and out.strides[-1] != 1 == out.strides[seqlen]
    written = out.swapaxes(seqlen, -1) if by_seqlen else out
    out_layout = layout_of(((written.shape, written.strides),), out.itemsize, axes)
    if out_layout.scattered:
        written = contiguous(out)
    x_at, out_at = (x.data.ptr,), (written.data.ptr,)
    quantization = Quantization(
        dtype=dtype,
        head_dim=x.shape[-1],
        packed=batch is None,
        seqlen_contiguous=by_seqlen,
        align_bytes=x_layout.alignment(x_at),
        out_align_bytes=out_layout.alignment(out_at),
    )
    descale = descale if measured else contiguous(descale)
    cu_seqlens = contiguous(named["cu_seqlens"]) if batch is None else None
    launch.quantize(
        quantization,
        [*x_layout.fields(x_at), *out_layout.fields(out_at)],
        0 if cu_seqlens is None else cu_seqlens.data.ptr,
        descale.data.ptr,
        measured,
        (len(descale), x.shape[heads], descale.shape[1], x.shape[seqlen]),
        arch,
    )
    if out_layout.scattered:
        arrays.as_bytes(out)[...] = arrays.as_bytes(written)


def _check_reciprocals(descale: Any) -> None:
    """Raise ValueError for a descale that is infinite or has no reciprocal: up to 0, NaN, or too small."""
    for sequence, kv_head in np.argwhere(~((descale >= _DESCALE_LIMITS.tiny) & (descale < np.inf)))[:1]:
        value = descale[sequence, kv_head]
        raise ValueError(
            f"descale has {value} for sequence {sequence}, KV head {kv_head}; it must be at least "
            f"{_DESCALE_LIMITS.tiny} and finite"
        )


@np.errstate(all="ignore")
def _quantize_on_cpu(named: dict[str, Any], axes: Axes, measured: bool) -> None:
    batch, seqlen, heads = axes
    order = (seqlen, heads, 2) if batch is None else (batch, seqlen, heads, 3)
    x, out = (named[name].transpose(order) for name in ("x", "out"))
    kv_heads = named["descale"].shape[1]
    pieces: Any = range(len(x))
    if batch is None:
        pieces = packed_pieces("cu_seqlens", named["cu_seqlens"], "x", len(x))
    for piece, descales in zip(pieces, named["descale"], strict=True):
        wide = x[piece].astype(accumulator_dtype(x.dtype.name))
        tokens, all_heads, head_dim = wide.shape
        by_descale = wide.reshape(tokens, kv_heads, all_heads // max(1, kv_heads), head_dim)
        if measured:
            finite = np.where(np.isfinite(by_descale), abs(by_descale), 0)
            largest = finite.max(axis=(0, 2, 3), initial=0)
            bounded = np.clip(largest / _LARGEST, _DESCALE_LIMITS.tiny, _DESCALE_LIMITS.max)
            descales[...] = np.where(largest == 0, 1, bounded)
        scaled = by_descale * (1 / descales.astype(wide.dtype))[:, None, None]
        out[piece] = np.clip(scaled, -_LARGEST, _LARGEST).reshape(wide.shape).astype(np.float32).astype(_E4M3)
