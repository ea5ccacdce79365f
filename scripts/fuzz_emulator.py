"""The GPU's kernels on the CPU, by the emulator of the tests, called as cufa is: for scripts/fuzz.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from emulator import calls

from cufa.device import Device
from cufa.params import FeatureValues
from cufa.problem import LAYOUTS
from cufa.score_mod import ScoreMod

Array = np.ndarray[Any, np.dtype[Any]]

ARCH = str(calls.DEVICE.arch)
# Those that have batch, seqlen and heads where the layout says, and those whose rows may lie apart.
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_WITH_ROWS = (*_TENSORS, "bias", "mask", "block_table")


def _device(arch: str, sm_count: int | None) -> Device:
    """A GPU of this arch or, with `sm_count`, a part of it: then a block has more work than one tile."""
    whole = Device.of(arch)
    if sm_count is None:
        return whole
    return replace(whole, sm_count=sm_count, l2_bytes=whole.l2_bytes * sm_count // whole.sm_count)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "bshd",
    arch: str = ARCH,
    sm_count: int | None = None,
    precision: str = "ieee",
    kernel: str | None = None,
    tiles: Mapping[str, int] | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_attn_probs: bool = False,
    **options: Any,
) -> tuple[Array, ...]:
    """What `cufa.attention` returns with `return_lse`."""
    given = _readable({"q": q, "k": k, "v": v} | _with_values(options), layout)
    rung: dict[str, Any] = {"precision": precision, "kernel": kernel, "tiles": tiles}
    rung["device"] = _device(arch, sm_count)
    dtype = None if out is None else out.dtype
    results = [*calls.attention(**given, **rung, out_dtype=dtype)]
    probabilities = [calls.attn_probs(**given, lse=results[1])] if return_attn_probs else []
    results[0] = _in_layout(results[0], layout)
    return *(_given_back(*each) for each in zip(results, (out, lse), strict=True)), *probabilities


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    layout: str = "bshd",
    arch: str = ARCH,
    sm_count: int | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_mod: bool = False,
    score_mod: ScoreMod | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """What `cufa.attention_backward` does."""
    asked = {"bias": return_dbias, "sink": return_dsink, "score_mod": return_dscore_mod}
    names = ("q", "k", "v", *(name for name, is_asked in asked.items() if is_asked))
    outputs = [options.pop(f"d{name}", None) for name in names if name != "score_mod"]
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    given = _readable(tensors | _with_values(options), layout)
    rules = {"score_mod": score_mod, "gradients": names[3:], "device": _device(arch, sm_count)}
    results = list(calls.attention_backward(**given, **rules))
    results[:3] = [_in_layout(x, layout) for x in results[:3]]
    of_arrays = iter(results[len(outputs) :])
    of_inputs = [_given_back(*each) for each in zip(results, outputs, strict=False)]
    if score_mod is None or not return_dscore_mod:
        return tuple(of_inputs)
    floats = (name in score_mod.differentiable for name in score_mod.named_arrays)
    return *of_inputs, tuple(next(of_arrays) if is_float else None for is_float in floats)


def _with_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call as the emulator has them, but for what it does not ask for."""
    in_values = FeatureValues._fields
    values = FeatureValues(**{name: options[name] for name in in_values if name in options})
    left_out = {*in_values, "return_lse", "backend"}
    others = {name: x for name, x in options.items() if name not in left_out and x is not None}
    return {**others, "values": values}


def _readable(named: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """The arrays as kernels read them: (batch, seqlen, heads, dim), those copied that lie otherwise."""
    arrays = {name: x for name, x in named.items() if isinstance(x, np.ndarray)}
    for name, x in arrays.items():
        turned = _in_layout(x, layout) if name in _TENSORS else x
        rows_lie = name in _WITH_ROWS and (x.shape[-1] == 1 or x.strides[-1] == x.itemsize)
        arrays[name] = turned if rows_lie or x.flags.c_contiguous else np.ascontiguousarray(turned)
    return {**named, **arrays}


def _in_layout(x: Array, layout: str) -> Array:
    """A tensor from (batch, seqlen, heads, dim) to the layout, or back, which is the same."""
    return x.transpose(*LAYOUTS[layout], 3) if x.ndim == 4 else x


def _given_back(result: Array, given: Array | None) -> Array:
    if given is None:
        return result
    given[...] = result
    return given
