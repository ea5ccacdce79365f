"""One attention call of a command: arrays, generated or from files, where they are, and its options."""

from __future__ import annotations

import gc
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cufa
from cufa import arrays, device
from cufa.cli.output import library_errors
from cufa.problem import (
    DTYPES,
    Direction,
    Options,
    Problem,
    Shape,
    check_layout,
    lse_shape,
    make_problem,
    output_shape,
)
from cufa.timing import Timing, cpu_cores, time_cpu, time_gpu

Arrays = dict[str, Any]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Rung:
    """A kernel and what may be asked of it; all None for what the library chooses."""

    kernel: str | None = None
    tiles: Mapping[str, int] | None = None
    arch: str | None = None


@dataclass(frozen=True)
class Workload:
    """Arrays q, k, v and dout, on the GPU as CuPy's or NumPy's, and how to attend."""

    arrays: Arrays
    causal: bool
    on_gpu: bool
    softmax_scale: float | None = None
    layout: str = "bshd"

    def forward(self, rung: Rung) -> Arrays:
        """What the call returns: out and lse."""
        inputs = [self.arrays[name] for name in ("q", "k", "v")]
        with library_errors():
            out, lse = cufa.attention(*inputs, return_lse=True, **self._options(rung))
        return {"out": out, "lse": lse}

    def backward(self, rung: Rung, results: Arrays) -> Arrays:
        """dq, dk and dv, from what `forward` returned."""
        inputs = [self.arrays[name] for name in ("dout", "q", "k", "v")]
        inputs += [results["out"], results["lse"]]
        with library_errors():
            gradients = cufa.attention_backward(*inputs, **self._options(rung))
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def timed(
        self, direction: Direction, rung: Rung, results: Arrays | None = None, repeats: int | None = None
    ) -> tuple[Arrays, Timing]:
        """What one direction returns, and how long it takes; the backward needs the forward's results."""

        def call() -> Arrays:
            return self.forward(rung) if results is None else self.backward(rung, results)

        assert (direction == "backward") == (results is not None)
        return (time_gpu if self.on_gpu else time_cpu)(call, repeats=repeats)

    def plan(self, direction: Direction, rung: Rung) -> cufa.Plan:
        """The Plan that the call uses on a GPU."""
        inputs = [self.arrays[name] for name in ("q", "k", "v")]
        options = self._options(rung)
        del options["softmax_scale"], options["backend"]
        with library_errors():
            return cufa.plan(*inputs, backward=direction == "backward", **options)

    def problem(self, direction: Direction) -> Problem:
        """What is asked for; Failure if the arrays don't go together."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        dtypes = {name: array.dtype for name, array in self.arrays.items()}
        with library_errors():
            return make_problem(direction, shapes, dtypes, Options(causal=self.causal, layout=self.layout))

    def _options(self, rung: Rung) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "layout": self.layout,
            "kernel": rung.kernel,
            "tiles": rung.tiles,
            "arch": rung.arch,
            "backend": "cuda" if self.on_gpu else "numpy",
        }


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
    return f"CPU ({platform.machine()}, {cpu_cores()} cores, NumPy {np.__version__})"


def shapes_of(problem: Problem, layout: str) -> dict[str, Shape]:
    """The shapes of q, k, v and dout in a layout."""
    batch, row, head = check_layout(layout)

    def shape(seqlen: int, heads: int, dim: int) -> Shape:
        extents = [0, 0, 0, dim]
        extents[batch], extents[row], extents[head] = problem.batch, seqlen, heads
        return tuple(extents)

    return {
        "q": shape(problem.seqlen_q, problem.heads, problem.head_dim),
        "k": shape(problem.seqlen_k, problem.kv_heads, problem.head_dim),
        "v": shape(problem.seqlen_k, problem.kv_heads, problem.value_dim),
        "dout": output_shape(problem, layout),
    }


def random_arrays(problem: Problem, layout: str, rng: np.random.Generator) -> Arrays:
    """Normal random q, k, v and dout; Failure for a problem that the library refuses."""
    shapes = shapes_of(problem, layout)
    dtype = DTYPES[problem.dtype]
    dtypes = dict.fromkeys(shapes, dtype)
    with library_errors():
        make_problem(problem.direction, shapes, dtypes, Options(causal=problem.causal, layout=layout))
    return {name: normal(rng, shape, dtype) for name, shape in shapes.items()}


def normal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Normal random numbers of any float dtype."""
    drawn_as = np.float64 if dtype == np.float64 else np.float32
    return rng.standard_normal(shape, drawn_as).astype(dtype, copy=False)


def to_gpu(host: Arrays) -> Arrays:
    """The arrays as CuPy's."""
    import cupy

    with library_errors():
        return {name: cupy.asarray(array) for name, array in host.items()}


def to_host(arrays: Arrays) -> Arrays:
    """The arrays as NumPy's."""
    return {name: array if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}


def release_gpu_memory() -> None:
    """Hand back what CuPy keeps of arrays that are gone, so that a problem of another size finds room."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def bytes_moved(problem: Problem) -> int:
    """What a call must read and write at least: each input and each result once."""
    shapes = shapes_of(problem, "bshd")
    elements = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    times = {"q": 1, "k": 1, "v": 1, "dout": 1}  # out, of dout's shape, is written
    if problem.direction == "backward":
        times = {"q": 2, "k": 2, "v": 2, "dout": 2}  # and the gradients; out and dout are read
    lse = int(np.prod(lse_shape(problem), dtype=np.int64)) * problem.accumulator.itemsize
    return sum(times[name] * elements[name] for name in times) * problem.itemsize + lse
