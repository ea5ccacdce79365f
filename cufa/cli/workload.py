"""One attention call of a command: its arrays, generated or from files, where they are, and its options."""

from __future__ import annotations

import functools
import gc
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import cufa
from cufa import arrays, device
from cufa.arguments import (
    Options,
    check_dropout,
    check_fits,
    check_range,
    check_scale,
    make_problem,
    refuse_gpu_options,
)
from cufa.cli import check
from cufa.cli.functions import mods_of
from cufa.cli.options import FeatureOptions
from cufa.cli.output import library_errors, memory_errors
from cufa.messages import counted
from cufa.problem import (
    Direction,
    Problem,
)
from cufa.threads import cores
from cufa.timing import Timing, time_cpu, time_gpu

Arrays = dict[str, Any]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PLAIN = FeatureOptions()
TENSORS = ("q", "k", "v", "dout")


@dataclass(frozen=True)
class Rung:
    """A kernel, its tiles and arch; None for what the library chooses."""

    kernel: str | None = None
    tiles: Mapping[str, int] | None = None
    arch: str | None = None


@dataclass(frozen=True)
class Workload:
    """Arrays, from CuPy on the GPU or from NumPy, and the options of the call.

    The arrays are q, k, v and dout, those of the features, by the argument names of `cufa.attention`, and
    dlse, which only the backward gets.
    """

    arrays: Arrays
    on_gpu: bool
    features: FeatureOptions = PLAIN
    softmax_scale: float | None = None
    layout: str = "bshd"

    @property
    def gradients(self) -> tuple[str, ...]:
        """The inputs whose gradients the backward returns, in its order; score_mod stands for its arrays."""
        score_mod = mods_of(self.features).score_mod
        asked = {
            "bias": "bias" in self.arrays,
            "sink": "sink" in self.arrays,
            # On a GPU, these sums have no fixed order.
            "score_mod": score_mod and score_mod.differentiable and not self.features.deterministic,
        }
        return "q", "k", "v", *(name for name, is_asked in asked.items() if is_asked)

    def forward(self, rung: Rung) -> Arrays:
        """Compute out and lse."""
        options = self._options(rung)
        with library_errors():
            out, lse = cufa.attention(**self._tensors("q", "k", "v"), **options, return_lse=True)
        return {"out": out, "lse": lse}

    def backward(self, rung: Rung, results: Arrays) -> Arrays:
        """Compute the gradients from what `forward` returned."""
        names = [f"d{name}" for name in self.gradients]
        options = self._options(rung) | {f"return_{name}": True for name in names[3:]}
        options |= self._backward_options()
        with library_errors():
            gradients = cufa.attention_backward(
                **self._tensors("dout", "q", "k", "v"), out=results["out"], lse=results["lse"], **options
            )
        computed = dict(zip(names, gradients, strict=True))
        of_arrays = enumerate(computed.pop("dscore_mod", ()))
        return computed | {f"dscore_mod[{number}]": x for number, x in of_arrays if x is not None}

    def timed(
        self, direction: Direction, rung: Rung, results: Arrays | None = None, repeats: int | None = None
    ) -> tuple[Arrays, Timing]:
        """Run and time one direction; the backward needs the forward's results."""

        def call() -> Arrays:
            return self.forward(rung) if results is None else self.backward(rung, results)

        assert (direction == "backward") == (results is not None)
        return (time_gpu if self.on_gpu else time_cpu)(call, repeats=repeats)

    def check(self, host: Arrays, results: Arrays, rng: np.random.Generator) -> check.Check:
        """Compare results with float64. All arrays are from NumPy; `host` has the inputs."""
        on_host = replace(self, arrays=host, on_gpu=False)
        inputs = {name: host[name] for name in (*TENSORS, "dlse") if name in host}
        with memory_errors():
            return check.check(inputs, results, layout=self.layout, rng=rng, **on_host.rules())

    def plan(self, direction: Direction, rung: Rung, prefix: str = "--") -> cufa.Plan:
        """The Plan that the call uses on a GPU; errors name the rung's options, which begin with `prefix`."""
        options = self._options(rung)
        del options["backend"]
        if direction == "backward":
            options |= {"backward": True, "gradients": self.gradients[3:]} | self._backward_options()
        with library_errors(prefix):
            return cufa.plan(**self._tensors("q", "k", "v"), **options)

    def problem(self, direction: Direction) -> Problem:
        """The problem of the call; raises Failure if the arrays do not match."""
        asked, backward = self.features, direction == "backward"
        mods, gradients = mods_of(asked), self.gradients[3:] if backward else ()
        given = {name: array for name, array in self.arrays.items() if backward or name != "dlse"}
        given |= mods.arrays
        shapes = {name: array.shape for name, array in given.items()}
        dtypes = {name: array.dtype for name, array in given.items()}
        options = Options(
            causal=asked.causal,
            window=asked.window,
            softcap=asked.softcap > 0,
            dropout=asked.dropout > 0,
            deterministic=backward and asked.deterministic,
            gradients=gradients,
            layout=self.layout,
            precision=asked.precision,
        )
        with library_errors():
            written = mods.written_with_gradients if "score_mod" in gradients else mods.written
            score_mod, mask_mod = written
            options = options._replace(score_mod=score_mod, mask_mod=mask_mod, **self._longest())
            problem = make_problem(direction, shapes, dtypes, options)
            check_fits(problem, shapes, dtypes, self.layout)
        return replace(
            problem, transposed_values=asked.transposed_values, values_in_keys=asked.values_in_keys
        )

    def check_numbers(self) -> None:
        """Raise Failure for a number that the call would refuse."""
        asked, problem = self.features, self.problem("forward")
        with library_errors():
            check_range(problem, check_scale(self.softmax_scale, problem.head_dim), asked.softcap)
            check_dropout(asked.dropout, asked.dropout_seed, 0)

    def flops(self, direction: Direction) -> int:
        """Operations of the matrix products, summed over sequences if these differ."""
        problem, asked = self.problem(direction), self.features
        if asked.varlen is None and asked.seqused_k is None:
            return problem.flops
        lengths = asked.varlen or ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
        used = asked.seqused_k or tuple(keys for _, keys in lengths)
        of_one = replace(problem, batch=1, features=replace(problem.features, packed=False))
        return sum(
            replace(of_one, seqlen_q=queries, seqlen_k=min(keys, count)).flops
            for (queries, keys), count in zip(lengths, used, strict=True)
        )

    def rules(self) -> Arrays:
        """The arguments of `cufa.attention`, besides q, k and v, that say what is computed."""
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
        rules |= self._mods
        others = (*TENSORS, "dlse")
        return rules | {name: array for name, array in self.arrays.items() if name not in others}

    @functools.cached_property
    def _mods(self) -> Arrays:
        """score_mod and mask_mod, with their arrays where the others are."""
        mods = mods_of(self.features)
        if not self.on_gpu:
            return {**mods.by_name}
        moved = {name: _moved(array) for name, array in mods.arrays.items()}
        return mods.with_arrays(moved, np.dtype(np.float32))

    def _options(self, rung: Rung) -> Arrays:
        """`rules` and the arguments for lengths, layout, kernel and backend."""
        backend = "cuda" if self.on_gpu else "numpy"
        options = self._longest() | asdict(rung) | {"layout": self.layout, "backend": backend}
        return self.rules() | options

    def _longest(self) -> Arrays:
        """The most queries and keys of packed sequences."""
        if self.features.varlen is None:
            return {}
        most = zip("qk", map(max, zip(*self.features.varlen, strict=True)), strict=True)
        return {f"max_seqlen_{side}": count for side, count in most if f"cu_seqlens_{side}" in self.arrays}

    def _backward_options(self) -> Arrays:
        """The arguments that only the backward has."""
        dlse = {"dlse": self.arrays["dlse"]} if "dlse" in self.arrays else {}
        return {"deterministic": self.features.deterministic, **dlse}

    def _tensors(self, *names: str) -> Arrays:
        return {name: self.arrays[name] for name in names}


def problem_document(problem: Problem) -> dict[str, Any]:
    """A problem's sizes and dtypes for --json; of the window, None for all keys."""
    return {
        "direction": problem.direction,
        "dtype": problem.dtype,
        "kv_dtype": problem.key_dtype,
        "bias_dtype": problem.features.bias_dtype,
        "precision": "tf32" if problem.features.tf32 else "ieee",
        "batch": problem.batch,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "causal": problem.hides_later_keys,
        "window": list(problem.features.window),
        "transposed_values": problem.transposed_values,
        "values_in_keys": problem.values_in_keys,
    }


def use_gpu(backend: str | None) -> bool:
    """Whether to compute on the GPU; raises Failure if it is requested and there is none."""
    if backend == "cuda":
        with library_errors():
            device.current()
        return True
    return backend is None and arrays.gpu_usable()


def refuse_on_cpu(rung: Rung, prefix: str = "--") -> None:
    """Raise Failure if a call that computes on the CPU asks for a kernel, its tiles or an arch."""
    tiles = rung.tiles and " ".join(f"{name}={size}" for name, size in rung.tiles.items())
    options = {f"{prefix}kernel": rung.kernel, f"{prefix}tile": tiles, "--arch": rung.arch}
    with library_errors():
        refuse_gpu_options(**options)


def place(on_gpu: bool) -> str:
    """Where the call is computed, in words."""
    if on_gpu:
        gpu = device.current()
        return f"{gpu.name} ({gpu.arch})"
    return f"CPU ({platform.machine()}, {counted(cores(), 'core')}, NumPy {np.__version__})"


def to_gpu(host: Arrays) -> Arrays:
    """The arrays as CuPy arrays; values in keys remain in them."""
    in_keys = arrays.values_in_keys(host["k"], host["v"])
    with library_errors():
        moved = {name: _moved(array) for name, array in host.items() if not (in_keys and name == "v")}
        return moved | {"v": moved["k"][..., : host["v"].shape[-1]]} if in_keys else moved


def _moved(array: Any) -> Any:
    """The array on the GPU, with the same order of axes in memory."""
    import cupy

    slowest_first = np.argsort([-stride for stride in array.strides], kind="stable")
    moved = cupy.asarray(arrays.as_bytes(array).transpose(slowest_first))
    return moved.transpose(np.argsort(slowest_first).tolist()).view(array.dtype)


def to_host(arrays: Arrays) -> Arrays:
    """The arrays as NumPy arrays."""
    return {name: array if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}


def release_gpu_memory() -> None:
    """Free the memory that CuPy keeps of deleted arrays, so that a problem of another size finds room."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
