"""One attention call of a command: arrays, generated or from files, where they are, and its options."""

from __future__ import annotations

import gc
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

import cufa
from cufa import arrays, device
from cufa.arguments import Options, make_problem
from cufa.cli import check
from cufa.cli.options import RANDOM_BITS, FeatureOptions
from cufa.cli.output import library_errors, memory_errors
from cufa.problem import (
    DTYPES,
    FLOAT8,
    INPUT_DTYPES,
    Direction,
    Features,
    Problem,
    Shape,
    check_layout,
    lse_shape,
    output_shape,
)
from cufa.rounding import ceil_div, round_up
from cufa.threads import cores
from cufa.timing import Timing, time_cpu, time_gpu

Arrays = dict[str, Any]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PLAIN = FeatureOptions()
_TENSORS = ("q", "k", "v", "dout")
_DESCALES = ("q_descale", "k_descale", "v_descale")
# Which part of the keys a random mask leaves for a row to see.
_MASK_DENSITY = 0.8


@dataclass(frozen=True)
class Rung:
    """A kernel and what may be asked of it; all None for what the library chooses."""

    kernel: str | None = None
    tiles: Mapping[str, int] | None = None
    arch: str | None = None


@dataclass(frozen=True)
class Workload:
    """Arrays, on the GPU as CuPy's or NumPy's, and how to attend.

    The arrays are q, k, v and dout, those that the features have, by the names of the arguments of
    `cufa.attention`, and dlse, which the backward alone is given.
    """

    arrays: Arrays
    on_gpu: bool
    features: FeatureOptions = PLAIN
    softmax_scale: float | None = None
    layout: str = "bshd"

    @property
    def gradients(self) -> tuple[str, ...]:
        """The inputs that the backward gives gradients of, in its order."""
        return "q", "k", "v", *(name for name in ("bias", "sink") if name in self.arrays)

    def forward(self, rung: Rung) -> Arrays:
        """What the call returns: out and lse."""
        with library_errors():
            out, lse = cufa.attention(**self._tensors("q", "k", "v"), **self._options(rung), return_lse=True)
        return {"out": out, "lse": lse}

    def backward(self, rung: Rung, results: Arrays) -> Arrays:
        """The gradients, from what `forward` returned."""
        names = [f"d{name}" for name in self.gradients]
        options = self._options(rung) | {f"return_{name}": True for name in names[3:]}
        options |= self._backward_options()
        with library_errors():
            gradients = cufa.attention_backward(
                **self._tensors("dout", "q", "k", "v"), out=results["out"], lse=results["lse"], **options
            )
        return dict(zip(names, gradients, strict=True))

    def timed(
        self, direction: Direction, rung: Rung, results: Arrays | None = None, repeats: int | None = None
    ) -> tuple[Arrays, Timing]:
        """What one direction returns, and how long it takes; the backward needs the forward's results."""

        def call() -> Arrays:
            return self.forward(rung) if results is None else self.backward(rung, results)

        assert (direction == "backward") == (results is not None)
        return (time_gpu if self.on_gpu else time_cpu)(call, repeats=repeats)

    def check(self, host: Arrays, results: Arrays, rng: np.random.Generator) -> check.Check:
        """Results against float64; all arrays are NumPy's, and `host` has those that are computed with."""
        on_host = replace(self, arrays=host)
        inputs = {name: host[name] for name in (*_TENSORS, "dlse") if name in host}
        with memory_errors():
            return check.check(inputs, results, layout=self.layout, rng=rng, **on_host.rules())

    def plan(self, direction: Direction, rung: Rung) -> cufa.Plan:
        """The Plan that the call uses on a GPU."""
        options = self._options(rung)
        for name in ("softmax_scale", "seed", "backend"):
            options.pop(name, None)
        if direction == "backward":
            options |= {"backward": True, "gradients": self.gradients[3:]} | self._backward_options()
        with library_errors():
            return cufa.plan(**self._tensors("q", "k", "v"), **options)

    def problem(self, direction: Direction) -> Problem:
        """What is asked for; Failure if the arrays don't go together."""
        asked, backward = self.features, direction == "backward"
        given = {name: array for name, array in self.arrays.items() if backward or name != "dlse"}
        shapes = {name: array.shape for name, array in given.items()}
        dtypes = {name: array.dtype for name, array in given.items()}
        options = Options(
            causal=asked.causal,
            window=asked.window,
            softcap=asked.softcap > 0,
            dropout=asked.dropout > 0,
            deterministic=backward and asked.deterministic,
            gradients=self.gradients[3:] if backward else (),
            layout=self.layout,
            precision=asked.precision,
        )
        with library_errors():
            return make_problem(direction, shapes, dtypes, options)

    def flops(self, direction: Direction) -> int:
        """Operations of the matrix products, those of packed sequences one by one."""
        problem = self.problem(direction)
        if self.features.varlen is None:
            return problem.flops
        unpacked = replace(problem, batch=1, features=replace(problem.features, packed=False))
        return sum(
            replace(unpacked, seqlen_q=queries, seqlen_k=keys).flops for queries, keys in self.features.varlen
        )

    def rules(self) -> Arrays:
        """The arguments of `cufa.attention` that say what is computed, beside q, k and v."""
        asked = self.features
        rules: Arrays = {"causal": asked.causal, "softmax_scale": self.softmax_scale}
        if asked.window is not None:
            rules["window"] = asked.window
        if asked.softcap:
            rules["softcap"] = asked.softcap
        if asked.dropout:
            rules |= {"dropout_p": asked.dropout, "seed": asked.dropout_seed}
        if asked.precision != "ieee":
            rules["precision"] = asked.precision
        others = (*_TENSORS, "dlse")
        return rules | {name: array for name, array in self.arrays.items() if name not in others}

    def _options(self, rung: Rung) -> Arrays:
        """Those, and the ones that say how the arrays lie and what computes."""
        backend = "cuda" if self.on_gpu else "numpy"
        return self.rules() | asdict(rung) | {"layout": self.layout, "backend": backend}

    def _backward_options(self) -> Arrays:
        """Those that the backward alone has."""
        dlse = {"dlse": self.arrays["dlse"]} if "dlse" in self.arrays else {}
        return {"deterministic": self.features.deterministic, **dlse}

    def _tensors(self, *names: str) -> Arrays:
        return {name: self.arrays[name] for name in names}


def use_gpu(backend: str | None) -> bool:
    """Whether to compute on the GPU; Failure if that is asked for and there is none."""
    if backend == "cuda":
        with library_errors():
            device.current()
        return True
    return backend is None and arrays.gpu_usable()


def place(on_gpu: bool) -> str:
    """Where it is computed, in words."""
    if on_gpu:
        gpu = device.current()
        return f"{gpu.name} ({gpu.arch})"
    return f"CPU ({platform.machine()}, {cores()} cores, NumPy {np.__version__})"


def packed(problem: Problem, features: FeatureOptions) -> Problem:
    """The problem with the sizes of the packed sequences and of whole pages, if that is what is asked for."""
    longest = problem.seqlen_k
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
        in_pages = replace(problem.features, page_size=features.page_size)
        problem = replace(problem, seqlen_k=room, features=in_pages)
    return problem


def without_gradients(problem: Problem) -> str | None:
    """What of the problem leaves out the backward; None if nothing does."""
    if problem.features.page_size:
        return "--page-size"
    return problem.dtype if problem.dtype == FLOAT8 else None


def shapes_of(problem: Problem, layout: str) -> dict[str, Shape]:
    """The shapes of q, k, v and dout in a layout; of pages there are as many as the keys of all fill."""
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
    """All arrays of a workload: those that are given, and the others drawn.

    Without a generator nothing is drawn: they have shapes and dtypes alone and take no memory.

    Args:
        problem: sizes and dtype of q, k and v.
        features: which arrays there are beside them.
        layout: of q, k, v and dout.
        rng: what draws.
        given: arrays from files.

    Raises:
        Failure: a problem that the library refuses; before anything is drawn.
    """
    described = {**_described(problem, features, layout), **given}
    Workload(described, False, features, layout=layout).problem("forward")
    if rng is None:
        return described
    with memory_errors():
        drawn = {
            name: array if name in given else _draw(name, array, rng) for name, array in described.items()
        }
        if features.transposed_values and "v" not in given:
            described["v"][...] = drawn["v"]
            drawn["v"] = described["v"]
    return drawn


def _described(problem: Problem, features: FeatureOptions, layout: str) -> Arrays:
    """The shapes and dtypes of all arrays, in zeros that take no memory; bias and mask are for each head."""

    def zeros(dtype: Any, *shape: int) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    dtype, heads = INPUT_DTYPES[problem.dtype], problem.heads
    rows, keys = problem.seqlen_q, problem.seqlen_k
    described = {name: zeros(dtype, *shape) for name, shape in shapes_of(problem, layout).items()}
    if features.transposed_values:
        described["v"] = _transposed(described["v"], layout)
    if without_gradients(problem):
        del described["dout"]
    if features.descale:
        described |= dict.fromkeys(_DESCALES, zeros(np.float32, problem.batch, problem.kv_heads))
    if features.varlen is not None:
        rows, keys = (max(side) for side in zip(*features.varlen, strict=True))
        described |= cu_seqlens(features)
    if features.page_size:
        described["block_table"] = zeros(np.int32, problem.batch, _pages_of_sequence(problem))
    if features.seqused_k is not None:
        described["seqused_k"] = np.array(features.seqused_k, np.int32)
    elif features.page_size and features.varlen is not None:
        described["seqused_k"] = np.array([keys for _, keys in features.varlen], np.int32)
    if features.bias is not None:
        described["bias"] = zeros(dtype, 1, heads, rows, keys)
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
    """Zeros whose keys lie next to each other."""
    _, keys_axis, _ = check_layout(layout)
    return np.zeros(zeros.swapaxes(keys_axis, -1).shape, zeros.dtype).swapaxes(keys_axis, -1)


def _draw(name: str, described: Any, rng: np.random.Generator) -> Any:
    """The array that is described; what follows from the options is there already."""
    shape, dtype = described.shape, described.dtype
    if name == "mask" and dtype == np.uint8:
        return np.packbits(_seen(rng, (*shape, 8)), axis=-1)[..., 0]
    if name == "mask":
        return _seen(rng, shape)
    if name in (*_TENSORS, "bias", "sink", "dlse"):
        return normal(rng, shape, dtype)
    if name == "block_table":
        return rng.permutation(described.size).reshape(shape).astype(dtype)
    if name in _DESCALES:
        return rng.uniform(0.5, 2, shape).astype(dtype)
    return described


def _seen(rng: np.random.Generator, shape: Shape) -> Any:
    """Random booleans, most of them True."""
    return rng.integers(256, size=shape, dtype=np.uint8) < _MASK_DENSITY * 256


def alibi_slopes(heads: int) -> Any:
    """The slopes of Press et al. 2022, from 2^(-8 / heads) down to 2^-8."""
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)


def cu_seqlens(features: FeatureOptions) -> Arrays:
    """Where the packed sequences begin that are asked for, and the last ends; nothing if none are.

    Those of the keys only if they do not lie in pages.
    """
    if features.varlen is None:
        return {}
    names = ("cu_seqlens_q",) if features.page_size else ("cu_seqlens_q", "cu_seqlens_k")
    sides = zip(names, zip(*features.varlen, strict=True), strict=False)
    return {name: np.cumsum([0, *lengths], dtype=np.int32) for name, lengths in sides}


def normal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Normal random numbers of any float dtype."""
    drawn_as = np.float64 if dtype == np.float64 else np.float32
    return rng.standard_normal(shape, drawn_as).astype(dtype, copy=False)


def to_gpu(host: Arrays) -> Arrays:
    """The arrays as CuPy's."""
    with library_errors():
        return {name: _moved(array) for name, array in host.items()}


def _moved(array: Any) -> Any:
    """An array on the GPU, its axes as they were from the slowest to the fastest."""
    import cupy

    slowest_first = np.argsort([-stride for stride in array.strides], kind="stable")
    moved = cupy.asarray(arrays.as_bytes(array).transpose(slowest_first))
    return moved.transpose(np.argsort(slowest_first).tolist()).view(array.dtype)


def to_host(arrays: Arrays) -> Arrays:
    """The arrays as NumPy's."""
    return {name: array if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}


def release_gpu_memory() -> None:
    """Hand back what CuPy keeps of arrays that are gone, so that a problem of another size finds room."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def bytes_moved(problem: Problem) -> int:
    """What a call must read and write at least: each input and each result once, those of features too."""
    features = problem.features
    tensors = sum(math.prod(shape) for shape in shapes_of(problem, "bshd").values())
    # The forward writes out where dout is counted; the backward reads out, too, and writes gradients.
    times = 2 if problem.direction == "backward" else 1
    moved = times * tensors * problem.itemsize + math.prod(lse_shape(problem)) * problem.accumulator.itemsize
    moved += math.prod(output_shape(problem, "bshd")) * (problem.output.itemsize - problem.itemsize)
    if features.bias is not None and features.bias_dtype is not None:
        times = 2 if "bias" in features.gradients else 1
        moved += times * math.prod(features.bias) * DTYPES[features.bias_dtype].itemsize
    if features.mask is not None:
        moved += math.prod(features.mask)
    return moved
