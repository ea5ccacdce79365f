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
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cufa.arguments import Options, check_fits, check_scale, make_problem
from cufa.counters import COUNTER_BYTES
from cufa.device import Device
from cufa.driver import TENSOR_MAP_BYTES
from cufa.params import (
    NOT_ROTATED,
    FeatureValues,
    bias_fields,
    pack_append,
    pack_call,
    pack_features,
    pack_merge,
    pack_quantize,
    pack_rotary,
    pack_rotated,
    pack_sizes,
    pack_softmax,
    pack_tensors,
    pack_values,
)
from cufa.plan import Plan, make_plan, make_probabilities_plan
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
from cufa.problem import LAYOUTS, Direction, four_axes, lse_shape
from cufa.rotary import position_strides
from cufa.score_mod import MaskMod, Mods, ScoreMod
from cufa.tensor_layout import Region, lie_in_keys, lies_in_boxes, lies_transposed

from . import KERNELS, EmulatorError, Module, extent

Array: TypeAlias = npt.NDArray[Any]
Tiles: TypeAlias = Mapping[str, int]

DEVICE = Device.of("sm_90a")
NO_VALUES = FeatureValues()

# Around each array, so that what lies beyond its ends belongs to no other.
_MARGIN_BYTES = 1 << 16
_MAX_ALIGN_BYTES = 16
_WORD_BYTES = 4

# runtime/bulk.hpp's TensorDescription, in the room of a TensorMap.
_TENSOR_MAP = struct.Struct(f"=2q 2I 5I5I 4q {TENSOR_MAP_BYTES - 96}x")
_TENSOR_MAGIC = 0x70614D726F736E54
_MAX_BOX = 256
assert _TENSOR_MAP.size == TENSOR_MAP_BYTES


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    values: FeatureValues = NO_VALUES,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    precision: str = "ieee",
    out_dtype: npt.DTypeLike = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    device: Device = DEVICE,
    checked: bool = True,
    folder: Path = KERNELS,
    **side: Array,
) -> tuple[Array, Array]:
    """`cufa.attention` with return_lse for arrays (batch, seqlen, heads, head_dim), by a kernel in `folder`.

    `side` are bias, mask and so on, by their names; `values` the numbers that go with features.
    `out_dtype` is that of an output which is given.

    Raises EmulatorError if the kernel does what it must not.
    """
    mods = Mods(score_mod, mask_mod)
    arrays = {"q": q, "k": k, "v": v, **side, **mods.arrays}
    if out_dtype is not None:
        arrays["out"] = np.empty((*q.shape[:-1], v.shape[-1]), out_dtype)
    options = _options(causal, window, values, mods, precision=precision)
    plan = _plan("forward", arrays, options, kernel, tiles, device)
    problem = plan.problem
    arrays.setdefault("out", np.empty((*q.shape[:-1], v.shape[-1]), problem.output))
    lse = (len(q), q.shape[2], q.shape[1]) if problem.queries_as_heads else lse_shape(problem)
    arrays["lse"] = np.empty(lse, problem.accumulator)
    tensors = ("q", "k", "v", "out")
    done = _run(plan, arrays, tensors, {"out", "lse"}, softmax_scale, values, checked, folder)
    return done["out"], done["lse"]


def attn_probs(
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    values: FeatureValues = NO_VALUES,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    checked: bool = True,
    **side: Array,
) -> Array:
    """What `cufa.attention` with return_attn_probs has third, from the LSE that it has second."""
    mods = Mods(score_mod, mask_mod)
    arrays = {"q": q, "k": k, "v": v, **side, **mods.arrays}
    options = _options(causal, window, values, mods)
    problem = _plan("forward", arrays, options, None, None).problem
    plan = make_probabilities_plan(problem, DEVICE)
    in_layout = (problem.batch, problem.seqlen_q, problem.heads, problem.seqlen_k)
    arrays |= {"lse": lse, "probs": np.empty(in_layout, q.dtype)}
    tensors = ("q", "k", "v", "probs")
    done = _run(plan, arrays, tensors, {"probs"}, softmax_scale, values, checked, KERNELS)
    return done["probs"].transpose(0, 2, 1, 3)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    values: FeatureValues = NO_VALUES,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    precision: str = "ieee",
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
    max_seqlen_k: int | None = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    device: Device = DEVICE,
    checked: bool = True,
    folder: Path = KERNELS,
    **side: Array,
) -> tuple[Array, ...]:
    """`cufa.attention_backward` for arrays (batch, seqlen, heads, head_dim), by a kernel in `folder`.

    `gradients` are of "bias", "sink" and "score_mod" those whose gradients are wanted after dq, dk and dv; of
    the last there is one for each array of floats.

    Raises EmulatorError if the kernel does what it must not.
    """
    mods = Mods(score_mod, mask_mod)
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout, **side, **mods.arrays}
    options = _options(
        causal,
        window,
        values,
        mods,
        deterministic=deterministic,
        gradients=gradients,
        max_seqlen_k=max_seqlen_k,
        precision=precision,
    )
    plan = _plan("backward", arrays, options, kernel, tiles, device)
    of_arrays = plan.problem.features.differentiated_arrays
    outputs = [f"d{name}" for name in ("q", "k", "v", *gradients, *of_arrays) if name != "score_mod"]
    for name in outputs:
        arrays[name] = np.empty(arrays[name[1:]].shape, arrays[name[1:]].dtype)
    arrays["lse"] = lse
    tensors = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    done = _run(plan, arrays, tensors, set(outputs), softmax_scale, values, checked, folder)
    return tuple(done[name] for name in outputs)


def softmax(x: Array, passes: int, checked: bool = True) -> Array:
    """`cufa.softmax` of the rows of a matrix."""
    rows, cols = x.shape
    dtype = x.dtype.name
    variant, (launch,) = softmax_launches(dtype, passes, rows, DEVICE.arch)
    source = _placed(x, x.itemsize, is_output=False)
    result = _placed(np.empty(x.shape, x.dtype), x.itemsize, is_output=True)
    strides = source.strides[0] // x.itemsize, result.strides[0] // x.itemsize
    params = pack_softmax(source.ctypes.data, result.ctypes.data, *strides, rows, cols)
    module = Module(variant.source, variant.macros, checked)
    module.launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, params, {"x": source, "y": result}
    )
    return result


def merge(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, in_place: bool = False, checked: bool = True
) -> tuple[Array, Array]:
    """`cufa.merge` of arrays (batch, seqlen, heads, value_dim), to new ones or in place of a's."""
    batch, seqlen, heads, value_dim = out_a.shape
    align_bytes = math.gcd(
        _MAX_ALIGN_BYTES, value_dim * out_a.itemsize, *out_a.strides[:3], *out_b.strides[:3]
    )
    arrays = {"out_a": out_a, "out_b": out_b, "lse_a": lse_a, "lse_b": lse_b}
    if not in_place:
        arrays |= {"out": np.empty(out_a.shape, out_a.dtype), "lse": np.empty(lse_a.shape, lse_a.dtype)}
    placed = {
        name: _placed(
            array, align_bytes if name.startswith("out") else array.itemsize, name in ("out", "lse")
        )
        for name, array in arrays.items()
    }
    if in_place:
        for name in ("out", "lse"):
            placed[name] = placed.pop(f"{name}_a")
            placed[name].flags.writeable = True
    first = "" if in_place else "_a"
    tensors = [field for name in (f"out{first}", "out_b", "out") for field in _fields(placed[name])]
    lses = [placed[name].ctypes.data for name in (f"lse{first}", "lse_b", "lse")]
    rows = batch * heads * seqlen
    variant, (launch,) = merge_launches(out_a.dtype.name, value_dim, rows, align_bytes, DEVICE.arch)
    params = pack_merge(tensors, lses, batch, heads, seqlen)
    module = Module(variant.source, variant.macros, checked)
    module.launch(launch.entry, launch.grid, launch.block, launch.smem_bytes, params, placed)
    return placed["out"], placed["lse"]


def rotary(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    interleaved: bool = False,
    in_place: bool = False,
    checked: bool = True,
) -> Array:
    """`cufa.rotary` of an array (batch, seqlen, heads, head_dim), to a new one or in place."""
    batch, seqlen, heads, head_dim = x.shape
    align_bytes = math.gcd(_MAX_ALIGN_BYTES, head_dim * x.itemsize, *x.strides[:3])
    arrays = {"x": x, "cos": cos, "sin": sin} | ({} if positions is None else {"positions": positions})
    if not in_place:
        arrays["out"] = np.empty(x.shape, x.dtype)
    placed = {
        name: _placed(
            array,
            align_bytes if name in ("x", "out") else array.itemsize,
            name == ("x" if in_place else "out"),
        )
        for name, array in arrays.items()
    }
    y = placed["x" if in_place else "out"]
    if in_place:
        y[...] = x
    position_dtype = "int32" if positions is None else positions.dtype.name
    places, pairs = cos.shape
    rotation = Rotation(
        x.dtype.name, head_dim, 2 * pairs, cos.dtype.name, position_dtype, interleaved, align_bytes
    )
    variant, (launch,) = rotary_launches(rotation, batch * heads * seqlen, DEVICE.arch)
    params = pack_rotary(
        [*_fields(placed["x"]), *_fields(y)],
        [placed["cos"].ctypes.data, placed["sin"].ctypes.data],
        (placed["positions"].ctypes.data, *position_strides(placed["positions"]))
        if positions is not None
        else (0, 0, 0),
        (batch, heads, seqlen),
        places,
    )
    module = Module(variant.source, variant.macros, checked)
    module.launch(launch.entry, launch.grid, launch.block, launch.smem_bytes, params, placed)
    return y


def append(
    new: dict[str, Array],
    held: Array | int,
    *,
    table: Array | None = None,
    step: int = 1,
    interleaved: bool = False,
    checked: bool = True,
) -> dict[str, Array]:
    """What `append` writes: the caches, the lengths and, if there are angles, q rotated.

    `new` has k, v, k_cache and v_cache, (batch, seqlen, kv_heads, dim); perhaps k_descale and v_descale;
    perhaps q, cos and sin, with which queries are rotated by positions `step` apart, `interleaved` or not.
    `table` is a block table; the other arguments are as in `rotary`.
    """
    batch, seqlen, heads, head_dim = new["k"].shape
    value_dim = new["v"].shape[-1]
    places, pairs = new["cos"].shape if "cos" in new else (0, 0)
    tensors = {name: x for name, x in new.items() if name in ("k", "v", "k_cache", "v_cache", "q")}
    if pairs:
        tensors["rotated"] = np.empty(new["q"].shape, new["q"].dtype)
    # Elements that all rows are aligned to.
    strides = [stride // x.itemsize for x in tensors.values() for stride in x.strides[:3]]
    together = math.gcd(_MAX_ALIGN_BYTES // new["k"].itemsize, head_dim, value_dim, *strides)
    written = ("k_cache", "v_cache", "rotated")
    placed = {name: _placed(x, together * x.itemsize, name in written) for name, x in tensors.items()}
    for name in ("k_cache", "v_cache"):
        placed[name][...] = new[name]
    others = {"table": table, "held": held, "lengths": np.empty(batch, np.int32)}
    others |= {name: x for name, x in new.items() if name not in tensors}
    placed |= {
        name: _placed(x, x.itemsize, name == "lengths")
        for name, x in others.items()
        if isinstance(x, np.ndarray)
    }

    def at(name: str) -> int:
        return placed[name].ctypes.data if name in placed else 0

    rotated, query_rows = NOT_ROTATED, 0
    if pairs:
        _, seqlen_q, heads_q, _ = new["q"].shape
        fields = [*_fields(placed["q"]), *_fields(placed["rotated"])]
        rotated = pack_rotated(fields, [at("cos"), at("sin")], (heads_q, seqlen_q), step, places)
        query_rows = batch * seqlen_q * heads_q
    of_sequence = 1 if table is None else table.shape[1]
    appending = Appending(
        new["k"].dtype.name,
        new["k_cache"].dtype.name,
        head_dim,
        value_dim,
        2 * pairs,
        new["cos"].dtype.name if pairs else "float32",
        interleaved,
    )
    align_bytes = together * new["k"].itemsize
    variant, (launch,) = append_launches(
        appending, align_bytes, batch, batch * heads * seqlen, query_rows, DEVICE.arch
    )
    params = pack_append(
        [field for name in ("k", "v", "k_cache", "v_cache") for field in _fields(placed[name])],
        (at("held"), held if isinstance(held, int) else 0),
        (at("table"), of_sequence),
        (of_sequence, *new["k_cache"].shape[:2]),
        (batch, heads, seqlen),
        at("lengths"),
        (at("k_descale"), at("v_descale")),
        rotated,
    )
    module = Module(variant.source, variant.macros, checked)
    module.launch(launch.entry, launch.grid, launch.block, launch.smem_bytes, params, placed)
    return {name: placed[name] for name in (*written, "lengths") if name in placed}


def quantize(
    x: Array,
    kv_heads: int,
    descale: Array | None = None,
    cu_seqlens: Array | None = None,
    seqlen_contiguous: bool = False,
    checked: bool = True,
) -> tuple[Array, Array]:
    """`cufa.quantize` of an array (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim)."""
    packed = cu_seqlens is not None
    seqlen, heads, head_dim = x.shape[-3:]
    batch = len(cu_seqlens) - 1 if cu_seqlens is not None else len(x)
    out = np.empty(x.shape, ml_dtypes.float8_e4m3fn)
    if seqlen_contiguous:
        out = np.empty((*x.shape[:-3], head_dim, heads, seqlen), out.dtype).swapaxes(-1, -3)
    written = out.swapaxes(-1, -3) if seqlen_contiguous else out
    align_bytes = math.gcd(_MAX_ALIGN_BYTES, head_dim * x.itemsize, *x.strides[:-1])
    out_align_bytes = math.gcd(_MAX_ALIGN_BYTES, *written.strides[:-1])
    arrays = {"x": x, "out": written} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    alignments = {"x": align_bytes, "out": out_align_bytes}
    placed = {
        name: _placed(array, alignments.get(name, array.itemsize), name == "out")
        for name, array in arrays.items()
    }
    measured = _placed(np.empty((batch, kv_heads), np.uint32), 4, is_output=True)
    measured[:] = 0
    given = np.empty((batch, kv_heads), np.float32) if descale is None else descale
    placed |= {"measured": measured, "descale": _placed(given, 4, is_output=descale is None)}
    quantization = Quantization(
        x.dtype.name, head_dim, packed, seqlen_contiguous, align_bytes, out_align_bytes
    )
    variant, launches = quantize_launches(quantization, descale is None, batch, heads, seqlen, DEVICE.arch)
    params = pack_quantize(
        [*_fields(placed["x"]), *_fields(placed["out"])],
        placed["cu_seqlens"].ctypes.data if packed else 0,
        measured.ctypes.data if descale is None else 0,
        placed["descale"].ctypes.data,
        (batch, heads, kv_heads, seqlen),
    )
    module = Module(variant.source, variant.macros, checked)
    for launch in launches:
        module.launch(launch.entry, launch.grid, launch.block, launch.smem_bytes, params, placed)
    return placed["out"].swapaxes(-1, -3) if seqlen_contiguous else placed["out"], placed["descale"]


def _options(
    causal: bool,
    window: tuple[int | None, int | None] | None,
    values: FeatureValues,
    mods: Mods,
    **others: Any,
) -> Options:
    with_gradients = "score_mod" in others.get("gradients", ())
    score_mod, mask_mod = mods.written_with_gradients if with_gradients else mods.written
    drops = values.dropout_p > 0
    return Options(
        causal, window, values.softcap > 0, drops, score_mod=score_mod, mask_mod=mask_mod, **others
    )


def _plan(
    direction: Direction,
    arrays: Mapping[str, Array],
    options: Options,
    kernel: str | None,
    tiles: Tiles | None,
    device: Device = DEVICE,
) -> Plan:
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {name: array.dtype for name, array in arrays.items()}
    problem = make_problem(direction, shapes, dtypes, options)
    check_fits(problem, shapes, dtypes, "bshd")
    described = [(name, x.shape, x.strides, x.dtype) for name, x in arrays.items()]
    problem = replace(problem, features=problem.features.with_lying(described))
    if lies_transposed(problem, (arrays["v"].shape, arrays["v"].strides), LAYOUTS["bshd"]):
        problem = replace(problem, transposed_values=True)
        arrays = {**arrays, "v": arrays["v"].swapaxes(1, 3)}
    in_keys = lie_in_keys(_region(arrays["k"]), _region(arrays["v"]))
    problem = replace(problem, values_in_keys=in_keys)
    # Outputs are contiguous: their strides are multiples of a row.
    tensors = [array for name, array in arrays.items() if name in ("q", "k", "v", "out", "dout")]
    strides = [stride for array in tensors for stride in array.strides[:-1]]
    align_bytes = math.gcd(_MAX_ALIGN_BYTES, *strides, *problem.row_bytes)
    in_boxes = "bias" in arrays and lies_in_boxes(_region(arrays["bias"]))
    ascending = min(strides, default=0) >= 0
    placed = replace(problem, align_bytes=align_bytes, ascending=ascending, bias_boxes=in_boxes)
    return make_plan(placed, device, kernel, tiles)


def _run(
    plan: Plan,
    arrays: Mapping[str, Array],
    tensors: Sequence[str],
    outputs: Set[str],
    softmax_scale: float | None,
    values: FeatureValues,
    checked: bool,
    folder: Path,
) -> dict[str, Array]:
    """The arrays after a plan ran on them; `tensors` are those of the parameter struct, in its order."""
    problem = plan.problem
    alignments = {name: problem.align_bytes if name in tensors else x.itemsize for name, x in arrays.items()}
    if problem.bias_boxes:
        alignments["bias"] = _MAX_ALIGN_BYTES
    if "mask" in arrays:  # kernels look at the address to see how much of it they can read at once
        alignments["mask"] = math.gcd(_MAX_ALIGN_BYTES, arrays["mask"].ctypes.data)
    placed = {name: _placed(array, alignments[name], name in outputs) for name, array in arrays.items()}
    lying = [placed[name] for name in tensors]
    if problem.transposed_values:
        lying[2] = lying[2].swapaxes(1, 3)
    if problem.queries_as_heads:
        lying[0], lying[3] = lying[0].swapaxes(1, 2), lying[3].swapaxes(1, 2)
    boxed = list(lying)
    if problem.bias_boxes:
        bias = placed["bias"]
        batch, heads, rows, keys = four_axes(bias.shape)
        _, *steps = bias_fields(bias.ctypes.data, _region(bias))
        strides = [step * bias.itemsize for step in (*steps, 1)]
        boxed.append(np.lib.stride_tricks.as_strided(bias, (batch, rows, heads, keys), strides))
    fields = [field for tensor in lying for field in _fields(tensor)]
    lse, scale = placed["lse"].ctypes.data, check_scale(softmax_scale, problem.head_dim)
    side = {name: _region(array) for name, array in placed.items() if name not in tensors}
    before, after = pack_features(problem, side)
    sum_bytes = problem.accumulator.itemsize
    features = before + pack_values(values, sum_bytes) + after
    plans = plan.and_beside
    workspaces = [_workspace(each) for each in plans]
    modules = [Module(each.source, each.macros, checked, folder, each.headers) for each in plans]
    maps = [
        b"".join(tensor_map(boxed[box.tensor], box.rows, box.cols, box.paired_rows) for box in each.boxes)
        for each in plans
    ]
    for of, launch in plan.in_order:
        for step in range(launch.steps):
            sizes = pack_sizes(problem, step, plan.parting)
            call = pack_call(lse, workspaces[of].ctypes.data, scale, sum_bytes) + sizes
            params = maps[of] + pack_tensors(problem, fields) + call + features
            params = params.ljust(int(dict(plans[of].macros)["PARAMS_BYTES"]), b"\0")
            buffers = {**placed, "workspace": workspaces[of]}
            sizes_of_launch = launch.grid, launch.block, launch.smem_bytes
            modules[of].launch(launch.entry, *sizes_of_launch, params, buffers, cluster=launch.cluster)
    for each, workspace in zip(plans, workspaces, strict=True):
        if each.boxes and not each.scratch and workspace.any():
            raise EmulatorError(f"{each.kernel} leaves its counter at {workspace[0]}")
    return placed


def tensor_map(tensor: Array, rows: int, cols: int, paired_rows: bool = False) -> bytes:
    """What the emulator takes for a tensor map, of an array (batch, rows, heads, columns) of which a copy
    brings so many rows and columns of one head, with `paired_rows` two neighbours of every four. Packed
    sequences are one batch. With 0 rows nothing is copied.
    """
    if rows == 0:
        return bytes(_TENSOR_MAP.size)
    if tensor.ndim == 3:
        tensor = tensor[None]
    batch, seqlen, heads, dim = tensor.shape
    batch_stride, row_stride, head_stride, _ = tensor.strides
    extents, box = [dim, seqlen, heads, batch], [cols, rows, 1, 1]
    strides = [row_stride, head_stride, batch_stride]
    if paired_rows:
        extents[1:2], box[1:2] = [4, seqlen // 4], [2, rows // 2]
        strides.insert(1, 4 * row_stride)
    axes = len(extents)
    # The hardware's own rules (CUDA driver API, cuTensorMapEncodeTiled).
    if any(value % 16 for value in (tensor.ctypes.data, row_stride, head_stride, batch_stride)):
        raise ValueError("the copy engine takes multiples of 16 bytes alone")
    if not (0 < rows <= _MAX_BOX and 0 < cols <= _MAX_BOX):
        raise ValueError(f"a box has 1 to {_MAX_BOX} rows and columns, not {rows} and {cols}")
    return _TENSOR_MAP.pack(
        _TENSOR_MAGIC,
        tensor.ctypes.data,
        tensor.itemsize,
        axes,
        *(*extents, 1)[:5],
        *(*box, 1)[:5],
        *(*strides, 0)[:4],
    )


def _region(array: Array) -> Region:
    return Region(array.ctypes.data, array.shape, array.strides, array.itemsize)


def _workspace(plan: Plan) -> Array:
    """Scratch, or a counter at 0 for a kernel with boxes."""
    if plan.scratch or not plan.boxes:
        words = plan.scratch_bytes // _WORD_BYTES
        return _placed(np.empty(words, np.uint32), _MAX_ALIGN_BYTES, is_output=True)
    counter = _placed(np.empty(COUNTER_BYTES // _WORD_BYTES, np.uint32), _MAX_ALIGN_BYTES, is_output=True)
    counter[:] = 0
    return counter


def _fields(tensor: Array) -> tuple[int, ...]:
    """Address, batch, row and head stride; packed sequences have no batch axis."""
    strides = [stride // tensor.itemsize for stride in tensor.strides[:-1]]
    return tensor.ctypes.data, *([0] * (3 - len(strides))), *strides


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
