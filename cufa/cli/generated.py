"""The arrays of a generated problem: their shapes and random values."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cufa.arguments import DESCALES
from cufa.cli.options import RANDOM_BITS, FeatureOptions, not_in_keys
from cufa.cli.output import Failure, OutOfMemory, memory_errors, size
from cufa.cli.workload import TENSORS, Arrays, Workload
from cufa.integers import ceil_div, round_up
from cufa.messages import counted
from cufa.problem import (
    DTYPES,
    FLOAT8,
    INPUT_DTYPES,
    MAX_AXIS,
    Features,
    Problem,
    Shape,
    check_layout,
    lse_shape,
    output_shape,
)
from cufa.threads import cores, in_threads

# The fraction of the keys that a row sees under a random mask.
_MASK_DENSITY = 0.8
# Random numbers per generator; a thread draws this many in tens of milliseconds.
_DRAWN_AT_ONCE = 2**21


def as_asked(problem: Problem, features: FeatureOptions) -> Problem:
    """The problem with the requested dtype of keys and values, packed sequences and full pages, if any."""
    longest = problem.seqlen_k
    if features.kv_dtype not in (None, problem.dtype):
        problem = replace(problem, kv_dtype=features.kv_dtype)
    if features.varlen is not None:
        sides = tuple(zip(*features.varlen, strict=True))
        queries, keys = (sum(side) for side in sides)
        longest = max(sides[1])
        problem = replace(
            problem,
            batch=len(features.varlen),
            seqlen_q=queries,
            seqlen_k=keys,
            features=Features(packed=True),
        )
    if features.page_size:
        room = round_up(longest, features.page_size) * problem.packed_sequences
        if room > MAX_AXIS:
            raise Failure(
                f"--page-size {features.page_size}: full pages have room for {room:,} keys; at most "
                f"{MAX_AXIS:,} are allowed"
            )
        in_pages = replace(problem.features, page_size=features.page_size)
        problem = replace(problem, seqlen_k=room, features=in_pages)
    return problem


def without_gradients(problem: Problem) -> str | None:
    """The part of the problem that has no backward; None if the problem has one."""
    if problem.features.page_size:
        return "--page-size"
    return FLOAT8 if problem.key_dtype == FLOAT8 else None


def shapes_of(problem: Problem, layout: str) -> dict[str, Shape]:
    """The shapes of q, k, v and dout in a layout; there are as many pages as all keys fill."""
    batch, row, head = check_layout(layout)
    page_size = problem.features.page_size
    keys = problem.batch, problem.seqlen_k
    if page_size:
        keys = _pages_of_sequence(problem) * problem.batch, page_size

    def shape(sequences: int, seqlen: int, heads: int, dim: int) -> Shape:
        extents = [0, 0, 0, dim]
        extents[batch], extents[row], extents[head] = sequences, seqlen, heads
        return tuple(extents)

    shapes = {
        "q": shape(problem.batch, problem.seqlen_q, problem.heads, problem.head_dim),
        "k": shape(*keys, problem.kv_heads, problem.head_dim),
        "v": shape(*keys, problem.kv_heads, problem.value_dim),
    }
    if problem.features.packed:
        without_batch = ("q",) if page_size else ("q", "k", "v")
        shapes |= {name: shapes[name][1:] for name in without_batch}
    return shapes | {"dout": output_shape(problem, layout)}


def _pages_of_sequence(problem: Problem) -> int:
    return problem.seqlen_k // problem.packed_sequences // problem.features.page_size


def make_arrays(
    problem: Problem,
    features: FeatureOptions,
    layout: str,
    rng: np.random.Generator | None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Arrays:
    """All arrays of a workload: the given ones, and random ones for the rest.

    Without a generator nothing is drawn: arrays then have a shape and a dtype but take no memory.

    Args:
        problem: sizes and dtype of q, k and v.
        features: which other arrays there are.
        layout: of q, k, v and dout.
        rng: the random generator.
        given: arrays from files.

    Raises:
        Failure: the library refuses the problem; raised before anything is drawn.
        OutOfMemory: the memory does not suffice.
    """
    if features.transposed_values and problem.dtype != FLOAT8:
        raise Failure(f"--transposed-values is for {FLOAT8}, and the arrays are {problem.dtype}")
    if features.values_in_keys and problem.value_dim > problem.head_dim:
        raise Failure(not_in_keys(problem.head_dim, problem.value_dim))
    if features.seqused_k is not None and len(features.seqused_k) != problem.batch:
        raise Failure(
            f"--seqused-k has {counted(len(features.seqused_k), 'number')} for "
            f"{counted(problem.batch, 'sequence')}; give one for each, of --batch or --varlen"
        )
    with memory_errors():
        described = {**_described(problem, features, layout), **given}
    Workload(described, False, features, layout=layout).problem("forward")
    if rng is None:
        return described
    to_draw = described.keys() - given.keys() - ({"v"} if features.values_in_keys else set())
    drawn_bytes = sum(described[name].nbytes for name in to_draw)
    memory_bytes = _memory_bytes()
    if memory_bytes is not None and drawn_bytes > memory_bytes:
        raise OutOfMemory(
            f"out of memory: the arrays take {size(drawn_bytes)}, and the machine has {size(memory_bytes)}"
        )
    with memory_errors():
        drawn = {
            name: _draw(name, array, rng) if name in to_draw else array for name, array in described.items()
        }
        if features.transposed_values:
            described["v"][...] = drawn["v"]
            drawn["v"] = described["v"]
        if features.values_in_keys:
            drawn["v"] = drawn["k"][..., : problem.value_dim]
    return drawn


def _memory_bytes() -> int | None:
    """The machine's memory, if known: systems that overcommit do not compare it with what is allocated."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows, nor everywhere else
        return None


def _described(problem: Problem, features: FeatureOptions, layout: str) -> Arrays:
    """Zeros that take no memory, with the shapes and dtypes of all arrays; bias and mask are per head."""

    def zeros(dtype: Any, *shape: int) -> Any:
        if math.prod(shape) * np.dtype(dtype).itemsize > sys.maxsize:
            raise MemoryError(f"no memory holds an array of {np.dtype(dtype)} with shape {shape}")
        return np.broadcast_to(np.zeros((), dtype), shape)

    dtype, heads = INPUT_DTYPES[problem.dtype], problem.heads
    rows, keys = problem.seqlen_q, problem.seqlen_k
    shapes = shapes_of(problem, layout)
    of_keys = dict.fromkeys(("k", "v"), INPUT_DTYPES[problem.key_dtype])
    described = {name: zeros(of_keys.get(name, dtype), *shape) for name, shape in shapes.items()}
    if features.transposed_values:
        described["v"] = _transposed(described["v"], layout)
    if features.values_in_keys:
        described["k"] = _with_rows(described["k"])
        described["v"] = described["k"][..., : problem.value_dim]
    if without_gradients(problem):
        del described["dout"]
    if features.descale:
        descaled = DESCALES if problem.kv_dtype is None else DESCALES[1:]
        described |= dict.fromkeys(descaled, zeros(np.float32, problem.batch, problem.kv_heads))
    if features.varlen is not None:
        rows, keys = (max(side) for side in zip(*features.varlen, strict=True))
        described |= cu_seqlens(features)
    if features.page_size:
        described["block_table"] = zeros(np.int32, problem.batch, _pages_of_sequence(problem))
    if features.page_size and features.varlen is not None:  # pages have room for more keys than there are
        lengths = [keys for _, keys in features.varlen]
        described["seqused_k"] = np.minimum(features.seqused_k or lengths, lengths).astype(np.int32)
    elif features.seqused_k is not None:
        described["seqused_k"] = np.array(features.seqused_k, np.int32)
    if features.bias is not None:
        described["bias"] = zeros(problem.output, 1, heads, rows, keys)
    if features.mask == RANDOM_BITS:
        described["mask"] = zeros(np.uint8, 1, heads, rows, ceil_div(keys, 8))
    elif features.mask is not None:
        described["mask"] = zeros(np.bool_, 1, heads, rows, keys)
    if features.alibi:
        described["alibi_slopes"] = alibi_slopes(heads).astype(problem.accumulator)
    if features.sink:
        described["sink"] = zeros(problem.accumulator, heads)
    if features.dlse:
        described["dlse"] = zeros(problem.accumulator, *lse_shape(problem))
    return described


def _transposed(zeros: Any, layout: str) -> Any:
    """Zeros with adjacent keys."""
    _, keys_axis, _ = check_layout(layout)
    return np.zeros(zeros.swapaxes(keys_axis, -1).shape, zeros.dtype).swapaxes(keys_axis, -1)


def _with_rows(zeros: Any) -> Any:
    """Zeros whose last axis is contiguous: calls would copy others, and values no longer lie in keys."""
    return np.broadcast_to(np.zeros(zeros.shape[-1], zeros.dtype), zeros.shape)


def _draw(name: str, described: Any, rng: np.random.Generator) -> Any:
    """Draw the described array; arrays that follow from the options are returned unchanged."""
    shape, dtype = described.shape, described.dtype
    if name == "mask" and dtype == np.uint8:
        return np.packbits(_seen(rng, (*shape, 8)), axis=-1)[..., 0]
    if name == "mask":
        return _seen(rng, shape)
    if name in (*TENSORS, "bias", "sink", "dlse"):
        return normal(rng, shape, dtype)
    if name == "block_table":
        return rng.permutation(described.size).reshape(shape).astype(dtype)
    if name in DESCALES:
        return rng.uniform(0.5, 2, shape).astype(dtype)
    return described


def _seen(rng: np.random.Generator, shape: Shape) -> Any:
    """Random booleans, most of them True."""
    return rng.integers(256, size=shape, dtype=np.uint8) < _MASK_DENSITY * 256


def alibi_slopes(heads: int) -> Any:
    """The slopes of Press et al. 2022, from 2^(-8 / heads) down to 2^-8."""
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)


def cu_seqlens(features: FeatureOptions) -> Arrays:
    """Offsets of the requested packed sequences, if any; those of the keys only if they are not in pages."""
    if features.varlen is None:
        return {}
    names = ("cu_seqlens_q",) if features.page_size else ("cu_seqlens_q", "cu_seqlens_k")
    sides = zip(names, zip(*features.varlen, strict=True), strict=False)
    return {name: np.cumsum([0, *lengths], dtype=np.int32) for name, lengths in sides}


def normal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Normal random numbers of any float dtype; they do not depend on the number of threads."""
    drawn_as = np.float64 if dtype == np.float64 else np.float32
    drawn = np.empty(shape, dtype)
    flat = drawn.reshape(-1)
    parts = [flat[begin : begin + _DRAWN_AT_ONCE] for begin in range(0, flat.size, _DRAWN_AT_ONCE)]

    def draw(share: tuple[Any, np.random.Generator]) -> None:
        part, generator = share
        part[...] = generator.standard_normal(part.size, drawn_as)

    for _ in in_threads(draw, zip(parts, rng.spawn(len(parts)), strict=True), cores()):
        pass
    return drawn


def bytes_moved(problem: Problem) -> int:
    """The bytes of q, k, v, the output, gradients, a bias and a mask, each counted once, and all keys."""
    features = problem.features
    itemsizes = {"q": problem.itemsize, "dout": problem.output.itemsize}
    tensors = {
        name: math.prod(shape) * itemsizes.get(name, problem.key_itemsize)
        for name, shape in shapes_of(problem, "bshd").items()
    }
    # dout, as counted, stands for the out of the forward. The backward also reads out and writes gradients.
    times = 2 if problem.direction == "backward" else 1
    moved = times * sum(tensors.values()) + math.prod(lse_shape(problem)) * problem.accumulator.itemsize
    if problem.values_in_keys:
        moved -= tensors["v"]  # read with the keys
    if features.bias is not None and features.bias_dtype is not None:
        times = 2 if "bias" in features.gradients else 1
        moved += times * math.prod(features.bias) * DTYPES[features.bias_dtype].itemsize
    if features.mask is not None:
        moved += math.prod(features.mask)
    return moved
