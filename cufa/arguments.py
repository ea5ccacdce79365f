"""From the shapes, dtypes and options of a call to its Problem.

All errors in them are raised here, before anything is allocated. Messages name the argument, its value and
the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import check_elements, records_gradients
from cufa.integers import ceil_div
from cufa.messages import byte_order, counted, shown
from cufa.problem import (
    BYTE_BITS,
    DTYPES,
    FLOAT8,
    FLOAT8_OUTPUTS,
    INPUT_DTYPES,
    MAX_AXIS,
    MAX_EXTENT,
    MAX_HEAD_DIM,
    MAX_VALUE_DIM,
    PLAIN,
    PRECISIONS,
    Direction,
    Features,
    Problem,
    Shape,
    check_choice,
    check_extents,
    check_layout,
    dtype_name,
    four_axes,
    integer,
    lse_shape,
    one_of,
    output_shape,
    tensor_axes,
)
from cufa.traced.header import TracedCode

# What a call may request gradients of, and its arrays, beyond q, k and v.
_GRADIENTS = ("bias", "sink", "score_mod")
# The arrays of a call that are neither q, k and v nor results.
FEATURE_ARRAYS = (
    *("bias", "mask", "alibi_slopes", "sink"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
)
DESCALES = ("q_descale", "k_descale", "v_descale")
_NOT_PLAIN = frozenset((*FEATURE_ARRAYS, *DESCALES, "dlse"))
# Magnitudes that a nonzero factor of the scores may have, by the dtype of sums, in which kernels hold it.
# Some kernels hold it in units of log 2, where it is half as much again.
_RANGES = {
    DTYPES[name]: (float(np.finfo(name).tiny), float(np.finfo(name).max) / 2)
    for name in ("float32", "float64")
}
# With inputs of at most so many bytes, a backward may recover a capped score from its probability and the
# LSE, and divide what float32 leaves of it by the cap.
_HALF_BYTES, _LEAST_SOFTCAP = 2, 1e-3

_AXES = {
    "bshd": "(batch, seqlen, heads, head_dim)",
    "bhsd": "(batch, heads, seqlen, head_dim)",
}
_PAGE_AXES = {
    "bshd": "(pages, page_size, kv_heads, head_dim)",
    "bhsd": "(pages, kv_heads, page_size, head_dim)",
}


class Options(NamedTuple):
    """The options of a call that are not arrays, as far as they determine the kind of problem.

    `softcap` and `dropout` say whether there is one; `score_mod` and `mask_mod` are what kernels are compiled
    with; the other fields are the arguments of the same name.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()
    layout: str = "bshd"
    precision: str = "ieee"
    score_mod: TracedCode | None = None
    mask_mod: TracedCode | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def check_options(options: Options) -> None:
    """Check the options; raise TypeError or ValueError with the allowed values."""
    check_flags(causal=options.causal, deterministic=options.deterministic)
    check_choice("precision", options.precision, PRECISIONS)
    check_layout(options.layout)
    check_window(options.window)
    check_gradients(options.gradients)
    check_longest("max_seqlen_q", options.max_seqlen_q)
    check_longest("max_seqlen_k", options.max_seqlen_k)


def check_gradients(gradients: object) -> None:
    """Check the requested gradients beyond q, k and v; raise ValueError with the allowed values."""
    if not isinstance(gradients, (tuple, list)) or not all(
        isinstance(name, str) and name in _GRADIENTS for name in gradients
    ):
        raise ValueError(
            f"gradients is {shown(gradients)}; it may be a tuple of {one_of(map(repr, _GRADIENTS))}"
        )


def check_flags(**flags: object) -> None:
    """Raise TypeError unless each flag is True or False, or 1 or 0."""
    for name, flag in flags.items():
        if flag is True or flag is False:  # as in almost all calls
            continue
        if not isinstance(flag, (int, np.bool_)) or flag not in (0, 1):
            raise TypeError(f"{name} is {shown(flag)}; it may be True or False")


def refuse_gpu_options(**options: object) -> None:
    """Raise ValueError for a GPU option in a call that computes on the CPU."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is {shown(value)}, but this call computes on the CPU; it needs a GPU")


def check_longest(name: str, longest: object) -> int | None:
    """Return the most queries or keys of a packed sequence; None means unknown."""
    if longest is None:
        return None
    wanted = f"{name} is {shown(longest)}; it may be None or an integer from 0 on"
    try:
        number = integer(longest)
    except TypeError:
        raise TypeError(wanted) from None
    if number < 0:
        raise ValueError(wanted)
    return number


def check_window(window: Any, name: str = "window") -> tuple[int | None, int | None]:
    """Return how many keys before and after the diagonal are seen; None and -1 mean all."""
    if window is None:
        return None, None
    try:  # an array will do, too
        is_pair = len(window) == 2
        left, right = window[0], window[1]
    except (LookupError, TypeError):
        is_pair = False
    if not is_pair:
        raise ValueError(_wrong_window(name, window))
    try:
        return _side(left), _side(right)
    except TypeError:
        raise TypeError(f"{_wrong_window(name, window)}, None or -1 for all") from None
    except ValueError:
        raise ValueError(f"{_wrong_window(name, window)}, 0 to {MAX_EXTENT}, None or -1 for all") from None


def _side(keys: Any) -> int | None:
    """One side of a window, None for all keys; raises TypeError or ValueError for other values."""
    if type(keys) is int and 0 <= keys <= MAX_EXTENT:  # as in almost all calls
        return keys
    if keys is None:
        return None
    keys = integer(keys)
    if not -1 <= keys <= MAX_EXTENT:
        raise ValueError
    return None if keys == -1 else keys


def _wrong_window(name: str, window: object) -> str:
    return f"{name} is {shown(window)}; it may be None or a tuple or list (left, right) of two integers"


def check_softcap(softcap: float) -> float:
    """Return the bound of the scores, 0 for none; raise ValueError if it is negative or not finite."""
    softcap = _finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for none")
    return softcap


def check_dropout(dropout_p: float, seed: int, offset: int) -> tuple[float, int, int]:
    """Return dropout's arguments; raise ValueError or TypeError if one is impossible."""
    dropout_p = _finite("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1")
    numbers = []
    for name, value, bits in (("seed", seed, 64), ("offset", offset, 32)):
        try:
            number = integer(value)
        except TypeError:
            raise TypeError(f"{name} is {shown(value)}; it must be an integer") from None
        if not 0 <= number < 2**bits:
            raise ValueError(f"{name} is {number}; it must be at least 0 and below 2**{bits}")
        numbers.append(number)
    return dropout_p, numbers[0], numbers[1]


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return the scale of the scores, 1 / sqrt(head_dim) if None; raise ValueError if it is not finite."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    return _finite("softmax_scale", softmax_scale, " or None")


def check_range(problem: Problem, softmax_scale: float, softcap: float) -> None:
    """Raise ValueError if scale, softcap or their quotient is out of range for the dtype of sums."""
    tiny, most = _RANGES[problem.accumulator]
    numbers = {"softmax_scale": softmax_scale, "softcap": softcap}
    if softcap:
        numbers["softmax_scale / softcap"] = softmax_scale / softcap
    for name, number in numbers.items():
        least = _LEAST_SOFTCAP if name == "softcap" and problem.itemsize <= _HALF_BYTES else tiny
        if number != 0 and not least <= abs(number) <= most:
            raise ValueError(
                f"{name} is {number}; for {problem.dtype} it must be 0 or from {least:.2g} to {most:.2g}"
                + " in magnitude" * (number < 0)
            )


def check_descales(**descales: object) -> None:
    """Raise TypeError for a scalar: making it an array in each call would be slow."""
    for name, descale in descales.items():
        if descale is not None and isinstance(descale, Real):
            raise TypeError(
                f"{name} is {descale}; it must be an array of (batch, kv_heads) in float32, as full((batch, "
                f"kv_heads), {descale}, float32) makes it once for many calls"
            )


def _finite(name: str, value: float, or_else: str = "") -> float:
    if type(value) is not float and hasattr(value, "requires_grad"):  # torch's
        check_elements(name, value)
        if value.requires_grad and records_gradients(value):  # it would be lost silently
            raise TypeError(f"{name} requires a gradient, and cufa does not record gradients; give a number")
    try:
        if isinstance(value, (bool, np.bool_)):  # an argument in another's place
            raise TypeError
        finite = math.isfinite(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {shown(value)}; it may be a number{or_else}") from None
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)


def make_problem(
    direction: Direction, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], options: Options
) -> Problem:
    """Make the Problem of arrays with these shapes and dtypes, by argument name.

    Raises ValueError for shapes and TypeError for dtypes that do not match, naming the argument, its value
    and the allowed values.
    """
    check_options(options)
    packed = "cu_seqlens_q" in shapes or "cu_seqlens_k" in shapes
    if "block_table" in shapes:
        _check_paging(direction, shapes)
    if packed and options.layout != "bshd":
        raise ValueError(f"layout is {options.layout!r}, but packed sequences must be in 'bshd'")
    for side, longest in (("q", options.max_seqlen_q), ("k", options.max_seqlen_k)):
        if longest is not None and f"cu_seqlens_{side}" not in shapes:
            raise ValueError(f"max_seqlen_{side} is {longest} and cu_seqlens_{side} is not given")
    problem = _tensors(direction, shapes, dtypes, options.layout, packed)
    causal, window = _range(options)
    features = _features(problem, shapes, dtypes, options, window)
    return replace(
        problem,
        causal=causal,
        features=features,
        max_seqlen_q=options.max_seqlen_q if direction == "forward" else None,
        max_seqlen_k=options.max_seqlen_k if direction == "backward" else None,
    )


def _tensors(
    direction: Direction, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], layout: str, packed: bool
) -> Problem:
    """The Problem that q, k and v pose."""
    paged = "block_table" in shapes
    batch_axis, seqlen_axis, heads_axis = tensor_axes(layout, packed)
    page_axis, key_axis, kv_heads_axis = tensor_axes(layout, packed and not paged)
    axes, hint = _AXES[layout], "; packed sequences have 3, with cu_seqlens_q and cu_seqlens_k"
    if packed:
        axes, hint = "(tokens, heads, head_dim), with cu_seqlens", ""
    _check_axes("q", shapes["q"], 3 if packed else 4, f"{axes}{hint}")
    for name in ("k", "v"):
        if paged:
            _check_axes(name, shapes[name], 4, f"{_PAGE_AXES[layout]}, with block_table")
        else:
            _check_axes(name, shapes[name], 3 if packed else 4, f"{axes}{hint}")
    q, k, v = shapes["q"], shapes["k"], shapes["v"]

    allowed = INPUT_DTYPES
    if direction == "backward":
        allowed = DTYPES
        for name in ("q", "k", "v"):
            if dtypes[name] == INPUT_DTYPES[FLOAT8]:
                raise TypeError(
                    f"{name} has dtype {FLOAT8}, which has no gradients; it may be {one_of(DTYPES)}"
                )
    dtype = dtype_name(dtypes["q"], "q", allowed)
    kv_dtype = _key_dtype(dtype, dtypes, allowed)

    heads, kv_heads = q[heads_axis], k[kv_heads_axis]
    for name in ("k", "v"):
        if not paged and batch_axis is not None and shapes[name][batch_axis] != q[batch_axis]:
            raise ValueError(f"{name} has shape {shapes[name]} and q {q}; the batch must be the same")
    words = [(key_axis, "page size" if paged else "seqlen"), (kv_heads_axis, "number of heads")]
    if paged and page_axis is not None:
        words.insert(0, (page_axis, "number of pages"))
    for axis, word in words:
        if v[axis] != k[axis]:
            raise ValueError(f"v has shape {v} and k {k}; the {word} must be the same")
    if k[-1] != q[-1]:
        raise ValueError(f"k has shape {k} and q {q}; the head dim (last axis) must be the same")
    for name, most in (("q", MAX_HEAD_DIM), ("v", MAX_VALUE_DIM)):
        if not 1 <= shapes[name][-1] <= most:
            raise ValueError(
                f"{name} has head dim {shapes[name][-1]} (shape {shapes[name]}); it may be 1 to {most}"
            )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"q has {counted(heads, 'head')} and k {kv_heads}; the query heads must be a multiple of the "
            f"key-value heads (q has shape {q} and k {k}, read as {axes})"
        )
    batch = _packed_batch(shapes) if batch_axis is None else q[batch_axis]
    return Problem(
        direction=direction,
        dtype=dtype,
        batch=batch,
        seqlen_q=q[seqlen_axis],
        seqlen_k=_room_in_pages(shapes, k[key_axis]) * (batch if packed else 1) if paged else k[key_axis],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=q[-1],
        value_dim=v[-1],
        out_dtype=_float8_output(dtypes) if dtype == FLOAT8 else None,
        kv_dtype=kv_dtype if kv_dtype != dtype else None,
    )


def _check_axes(name: str, shape: Shape, ndim: int, axes: str) -> None:
    if len(shape) != ndim:
        raise ValueError(f"{name} has shape {shape}; it must have the {ndim} axes {axes}")
    check_extents(name, shape)


def _check_paging(direction: Direction, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError for anything that is not available with a block table."""
    if direction == "backward":
        raise ValueError("block_table is given; keys in pages have no gradients")
    if "cu_seqlens_k" in shapes:
        raise ValueError(
            "block_table and cu_seqlens_k are both given; with pages, give the numbers of keys as seqused_k"
        )
    if len(shapes["block_table"]) != 2:
        raise ValueError(
            f"block_table has shape {shapes['block_table']}; it must be (batch, pages of a sequence)"
        )


def _room_in_pages(shapes: Mapping[str, Shape], page_size: int) -> int:
    """How many keys the pages of a sequence have room for."""
    table = shapes["block_table"]
    if page_size == 0:
        raise ValueError(f"k has shape {shapes['k']}; a page must have at least one key")
    room = table[1] * page_size
    if room > MAX_AXIS:
        raise ValueError(
            f"block_table has shape {table}, of pages of {page_size} keys: room for {room:,} keys of a "
            f"sequence; at most {MAX_AXIS:,} are allowed"
        )
    return room


def _key_dtype(dtype: str, dtypes: Mapping[str, Any], allowed: Mapping[str, np.dtype[Any]]) -> str:
    """The dtype of k and v: q's, or 8 bits with q in 16."""
    k, v = (dtype_name(dtypes[name], name, allowed) for name in ("k", "v"))
    for name, own in (("k", k), ("v", v)):
        if own == dtype or (own == FLOAT8 and dtype in FLOAT8_OUTPUTS):
            continue
        or_16_bits = f", or q {one_of(FLOAT8_OUTPUTS)}" if own == FLOAT8 else ""
        raise TypeError(
            f"{name} has dtype {dtypes[name]} and q {dtypes['q']}; they must be the same{or_16_bits}"
        )
    if k != v:
        raise TypeError(f"v has dtype {dtypes['v']} and k {dtypes['k']}; they must be the same")
    return k


def _float8_output(dtypes: Mapping[str, Any]) -> str | None:
    """The dtype of O for 8-bit inputs: that of `out`, if given."""
    allowed = {name: DTYPES[name] for name in FLOAT8_OUTPUTS}
    return dtype_name(dtypes["out"], "out", allowed) if "out" in dtypes else None


def _packed_batch(shapes: Mapping[str, Shape]) -> int:
    """How many sequences cu_seqlens_q and cu_seqlens_k have; keys in pages have only cu_seqlens_q."""
    if "block_table" in shapes:
        shapes = {"cu_seqlens_k": shapes["cu_seqlens_q"], **shapes}
    for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
        if name not in shapes:
            raise ValueError(f"{other} is given and {name} is not; packed sequences need both")
        if len(shapes[name]) != 1 or shapes[name][0] == 0:
            raise ValueError(f"{name} has shape {shapes[name]}; it must be (batch + 1,)")
    if shapes["cu_seqlens_q"] != shapes["cu_seqlens_k"]:
        raise ValueError(
            f"cu_seqlens_q has shape {shapes['cu_seqlens_q']} and cu_seqlens_k {shapes['cu_seqlens_k']}; "
            "both must be (batch + 1,)"
        )
    return shapes["cu_seqlens_q"][0] - 1


def _range(options: Options) -> tuple[bool, tuple[int | None, int | None]]:
    """Problem.causal and Features.window, normalized so that each range of keys has one form."""
    left, right = check_window(options.window)
    if options.causal:
        right = 0
    if (left, right) == (None, 0):
        return True, (None, None)
    return False, (left, right)


def _features(
    problem: Problem,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    options: Options,
    window: tuple[int | None, int | None],
) -> Features:
    plain = options._replace(causal=False, window=None, layout="bshd") == Options()
    if plain and window == (None, None) and not shapes.keys() & _NOT_PLAIN:
        return PLAIN
    for name in sorted(shapes.keys() & DESCALES):
        array = name.removesuffix("_descale")
        own_dtype = problem.dtype if array == "q" else problem.key_dtype
        if own_dtype != FLOAT8:
            raise ValueError(f"{name} is given, which is for {FLOAT8}, and {array} is {own_dtype}")
    for name, wanted in _side_arrays(problem, shapes).items():
        check_array(name, shapes[name], dtypes[name], wanted)
    for name in ("bias", "mask"):
        if name in shapes:
            _check_score_array(name, problem, shapes[name], dtypes[name], "cu_seqlens_q" in shapes)
    if options.precision == "tf32" and problem.dtype != "float32":
        raise ValueError(f"precision is 'tf32', which is for float32, and the arrays are {problem.dtype}")
    for name in options.gradients:
        if name not in shapes and not (name == "score_mod" and options.score_mod):
            raise ValueError(
                f"the gradient of {name} is requested, but there is no {name}; give {name}, as to the forward"
            )
    differentiated = options.score_mod.differentiated_names if options.score_mod else ()
    if "score_mod" in options.gradients and not differentiated:
        raise ValueError("the gradient of score_mod is requested, but it reads no array of floats")
    array_sums = sum(math.prod(shapes[name]) for name in differentiated)
    if array_sums > MAX_AXIS:
        raise ValueError(
            f"score_mod's arrays have {array_sums:,} elements; with gradients, at most {MAX_AXIS:,}"
        )
    return Features(
        window=window,
        softcap=options.softcap,
        bias=four_axes(shapes["bias"]) if "bias" in shapes else None,
        bias_dtype=dtype_name(dtypes["bias"], "bias") if "bias" in shapes else None,
        mask=four_axes(shapes["mask"]) if "mask" in shapes else None,
        mask_bits="mask" in shapes and dtypes["mask"] == np.uint8,
        alibi="alibi_slopes" in shapes,
        sink="sink" in shapes,
        descale=not shapes.keys().isdisjoint(DESCALES),
        dropout=options.dropout,
        packed="cu_seqlens_q" in shapes,
        page_size=shapes["k"][check_layout(options.layout)[1]] if "block_table" in shapes else 0,
        seqused_k="seqused_k" in shapes,
        dlse="dlse" in shapes,
        deterministic=bool(options.deterministic),
        gradients=options.gradients,
        array_sums=array_sums,
        tf32=options.precision == "tf32",
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
    )


class Wanted(NamedTuple):
    """The required shape and dtype of an array; `axes` names its axes, unless they are a tensor's.

    `remedy` says how to get one of that shape, if that is not clear.
    """

    shape: Shape
    dtype: Any
    axes: str = ""
    remedy: str = ""


def _side_arrays(problem: Problem, shapes: Mapping[str, Shape]) -> dict[str, Wanted]:
    """The requirements of the small arrays that are given."""
    batch, heads, sums = problem.batch, problem.heads, problem.accumulator
    int32 = np.dtype(np.int32)
    for_heads = Wanted((heads,), sums, "(heads,)")
    if len(shapes.get("alibi_slopes", ())) == 2:
        slopes = Wanted((batch, heads), sums, f"(heads,), which is {(heads,)} here, or (batch, heads)")
    else:
        slopes = Wanted((heads,), sums, f"(batch, heads), which is {(batch, heads)} here, or (heads,)")
    starts = Wanted((batch + 1,), int32, "(batch + 1,)")
    descales = Wanted((batch, problem.kv_heads), sums, "(batch, kv_heads)")
    of_queries = descales._replace(remedy=f"; cufa.quantize(q, kv_heads={problem.kv_heads}) returns such")
    table = (batch, *shapes.get("block_table", ())[1:])
    expected = {
        "alibi_slopes": slopes,
        "sink": for_heads,
        **dict.fromkeys(DESCALES, descales),
        "q_descale": of_queries if heads != problem.kv_heads else descales,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "seqused_k": Wanted((batch,), int32, "(batch,)"),
        "block_table": Wanted(table, int32, "(batch, pages of a sequence)"),
    }
    return {name: wanted for name, wanted in expected.items() if name in shapes}


def check_array(name: str, shape: Shape, dtype: Any, wanted: Wanted) -> None:
    """Raise ValueError for another shape than the wanted one, TypeError for another dtype."""
    if shape != wanted.shape:
        needed = f"{wanted.axes}, which is {wanted.shape} here" if wanted.axes else f"{wanted.shape}"
        raise ValueError(f"{name} has shape {shape}; it must be {needed}{wanted.remedy}")
    if dtype != wanted.dtype:
        raise TypeError(f"{name} has dtype {dtype}; it must be {wanted.dtype}{byte_order(dtype)}")


def _check_score_array(name: str, problem: Problem, shape: Shape, dtype: Any, packed: bool) -> None:
    """Check a bias or a mask, which broadcasts to the scores."""
    keys, key_axis = problem.seqlen_k, "seqlen_k"
    if name == "bias":
        dtype_name(dtype, name)
    elif dtype == np.uint8:
        keys, key_axis = ceil_div(keys, BYTE_BITS), "seqlen_k in bytes of 8 bits"
    elif dtype != np.bool_:
        raise TypeError(f"mask has dtype {dtype}; it may be bool, or uint8 for bits")
    lengths = (problem.batch, problem.heads, problem.seqlen_q, keys)
    # Only the GPU knows the lengths of packed sequences.
    check_broadcast(name, shape, lengths, key_axis, (0, 1) if packed else (0, 1, 2, 3))


def check_broadcast(
    name: str,
    shape: Shape,
    lengths: Shape,
    key_axis: str = "seqlen_k",
    axes: tuple[int, ...] = (0, 1, 2, 3),
) -> None:
    """Raise ValueError unless each of these axes has length 1 or the length of the scores' axis."""
    wanted = f"(batch or 1, heads or 1, seqlen_q or 1, {key_axis})"
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"{name} has shape {shape}; it must have 1 to 4 axes, the last of {wanted}")
    for axis in axes:
        size = four_axes(shape)[axis]
        if size != lengths[axis] and (size != 1 or axis == 3):
            raise ValueError(f"{name} has shape {shape}; it must be {wanted}, which is {lengths} here")


def check_fits(problem: Problem, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], layout: str) -> None:
    """Check the given arrays whose shapes follow from the problem.

    Raises ValueError or TypeError if one does not fit.
    """
    output = Wanted(output_shape(problem, layout), problem.output)
    lse_axes = "(heads, tokens)" if problem.features.packed else "(batch, heads, seqlen_q)"
    lse = Wanted(lse_shape(problem), problem.accumulator, lse_axes)
    expected = {"out": output, "dout": output, "lse": lse, "dlse": lse}
    for name in ("q", "k", "v", "bias", "sink"):
        if name in shapes:
            expected[f"d{name}"] = Wanted(shapes[name], dtypes[name])
    for name in problem.features.differentiated_arrays:
        expected[f"d{name}"] = Wanted(shapes[name], dtypes[name])
    for name, wanted in expected.items():
        if name in shapes:
            check_array(name, shapes[name], dtypes.get(name), wanted)


def check_reach(features: Features, side: Mapping[str, tuple[Shape, Shape, int]]) -> None:
    """Raise ValueError for an array whose elements are farther apart than kernels can count.

    `side` has the shape, the strides in bytes and the element size of arrays as kernels read them.
    """
    for name in features.mod_arrays:
        shape, strides, itemsize = side[name]
        reach = sum(abs(stride) * (size - 1) for size, stride in zip(shape, strides, strict=True)) // itemsize
        if reach >= MAX_AXIS:
            raise ValueError(f"{name} reaches over {reach + 1:,} elements; it may over {MAX_AXIS:,}")
    if "block_table" in side:
        (batch, _), (row_stride, _), itemsize = side["block_table"]
        apart = abs(row_stride) // itemsize
        if batch > 1 and apart > MAX_EXTENT:
            raise ValueError(f"block_table has rows {apart:,} numbers apart; there may be {MAX_EXTENT:,}")
