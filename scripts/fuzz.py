#!/usr/bin/env python3
"""Random problems for attention and its gradients, held to the rule of cufa.checking.

Draws dtypes, lengths, head dims, features that go together in any way, functions on scores, and arrays that
lie in memory in any way with NaN around them, and compares with float64 until the time is over. Nothing but
results may be written, and NaN that nobody sees shows nowhere. With `--backend emulator` the GPU's kernels
run on the CPU, where g++ compiles them, a second or two for a case. A case that is wrong is printed as it is
and without what it is wrong without; `check(Case(...))` is that case again. Exits with 1 if there was one.
"""

import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fuzz_emulator  # noqa: E402 - of this checkout, as all below
from feature_cases import one_by_one  # noqa: E402
from fuzz_cases import ALIKE, Built, Case, draw  # noqa: E402
from fuzz_memory import Array, Memory, placed  # noqa: E402

import cufa  # noqa: E402
from cufa import device  # noqa: E402
from cufa.checking import compare_results, gradient_names, judge  # noqa: E402
from cufa.cli.options import RealInRange  # noqa: E402
from cufa.cpu import stacks, tiles  # noqa: E402
from cufa.problem import DTYPES, FLOAT8, accumulator_dtype  # noqa: E402
from cufa.reference import Rules, attention, attention_backward  # noqa: E402

# On the CPU: so small that there are several tiles, and some heads are not in stacks.
CPU_SIZES = ((tiles, "Q_TILE", 7), (tiles, "KV_TILE", 10), (stacks, "MOST_SCORES", 300))
WORKSPACE_BYTES = 1 << 26
# How many times as far off as the rule allows a result may be: it takes roundings for independent, which
# those of keys that are the same are not, and does not count those of thousands of sums, one after another.
LEEWAY = 4
# What a probability may be off, relative and absolute, beside so many roundings of its score.
SCORE_ROUNDINGS = 8
OF_PROBABILITIES = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-13}
SHRINKING_SECONDS = 10


class WrongResultError(Exception):
    """What is wrong with a case."""


class Run:
    """A case, computed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng((case.seed, 1))
        self.to_gpu = case.runs_on_gpu and case.on_gpu
        self.built = Built(case)
        self.inputs: dict[str, Memory] = {}
        self.options: dict[str, Any] = {}
        for name, value in self.built.arguments.items():
            self.options[name] = self._place(name, value) if isinstance(value, np.ndarray) else value
        for kind, mod in self.built.mods.items():
            arrays = [self._place(f"{kind}[{n}]", x) for n, x in enumerate(mod.arrays)]
            self.options[kind] = type(mod)(mod.function, *arrays)
        self.tensors = {name: self.options.pop(name) for name in ("q", "k", "v", "dout")}
        self.library = fuzz_emulator if case.backend == "emulator" else cufa
        self.common = case.planned | {"backend": case.backend}
        if case.sm_count is not None:
            self.common["sm_count"] = case.sm_count

    def forward(self) -> dict[str, Array]:
        """Out, LSE and the probabilities if they are wanted."""
        case, problem = self.case, self.built.drawn.problem
        dtype = (
            DTYPES[str(self.rng.choice(("float16", "bfloat16")))] if case.dtype == FLOAT8 else problem.q.dtype
        )
        shape = self.built.turned(np.empty((*problem.q.shape[:-1], case.value_dim), np.uint8)).shape
        wanted = {"out": (shape, dtype), "lse": (problem.lse_shape, accumulator_dtype(case.dtype))}
        inputs = [self.tensors[name] for name in ("q", "k", "v")]
        results = self._call(
            self.library.attention,
            inputs,
            wanted,
            return_lse=True,
            return_attn_probs=case.probabilities,
            **case.rung("forward"),
        )
        return dict(zip(("out", "lse", "probabilities"), map(_on_host, results), strict=False))

    def backward(self, out: Array, lse: Array) -> dict[str, Array]:
        """The gradients by their names."""
        case, drawn = self.case, self.built.drawn
        self.rng = np.random.default_rng((case.seed, 2))  # so that arrays lie alike if it is called again
        for name, x in (("out", out), ("lse", lse), ("dlse", drawn.dlse)):
            if x is not None:
                self.tensors[name] = self._place(name, x)
        of_inputs = {**self.built.arguments}
        wanted = {
            f"d{name}": (of_inputs[name].shape, of_inputs[name].dtype)
            for name in ("q", "k", "v", *drawn.gradients)
        }
        asked = {f"return_d{name}": True for name in drawn.gradients}
        if "dscore_mod" in case.features:
            asked["return_dscore_mod"] = True
        results = self._call(
            self.library.attention_backward,
            [self.tensors[name] for name in ("dout", "q", "k", "v", "out", "lse")],
            wanted,
            dlse=self.tensors.get("dlse"),
            deterministic="deterministic" in case.features,
            **asked,
            **case.rung("backward"),
        )
        names = gradient_names(self.built.rules | asked)
        return dict(zip(names, map(_on_host, one_by_one(results)), strict=True))

    def compare(self, results: dict[str, Array]) -> None:
        """Raise WrongResultError unless they are as near to float64 as they must be."""
        problem = self.built.drawn.problem
        inputs = problem.q, problem.k, problem.v, problem.dout
        in_bshd = {
            name: self.built.turned(x) if name in ("out", "dq", "dk", "dv") else x
            for name, x in results.items()
        }
        rules = self.built.rules | {"dlse": self.built.drawn.dlse}
        if self.case.with_inf is not None:
            in_bshd = self._without_lost(in_bshd) if "dq" in in_bshd else self._with_any_infinity(in_bshd)
        compared = compare_results(*inputs, in_bshd, precision=self.case.precision, **rules)
        wrong = [str(each) for each in compared if not each.ok and each.error > LEEWAY * each.allowed]
        if wrong:
            raise WrongResultError("\n  ".join(wrong))

    @np.errstate(invalid="ignore")
    def _with_any_infinity(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """With infinity and NaN as the exact ones have them: a weight of 0 times infinity is NaN."""
        problem = self.built.drawn.problem
        inputs = problem.q, problem.k, problem.v
        exact = attention(*inputs, dtype=judge(problem.dtype_name), **self.built.rules)
        return {
            name: np.where(np.isfinite(x) | np.isfinite(actual), actual, x.astype(actual.dtype))
            for (name, actual), x in zip(outputs.items(), exact, strict=True)
        }

    @np.errstate(invalid="ignore")
    def _without_lost(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """With the exact ones where an infinity shows: there, NaN is as right.

        That is in rows with one, in keys that have one or whose value does, and where the exact gradients are
        not finite. Gradients of arrays sum over all rows, so they are left out. Where kernels take out an
        infinite query, its place has the largest number: that of float16 is not as large for small keys.
        """
        drawn = self.built.drawn
        problem, dtype = drawn.problem, judge(drawn.problem.dtype_name)
        inputs = problem.dout, problem.q, problem.k, problem.v
        rules = self.built.rules | {"dlse": drawn.dlse, "return_dsink": "dsink" in gradients}
        results = attention_backward(*inputs, dtype=dtype, **rules)
        exact = dict(zip(("dq", "dk", "dv", "dsink"), results, strict=False))
        of_q, of_k, of_v = (_any_infinite(x.astype(dtype)) for x in inputs[1:])
        lost = {"dq": of_q, "dk": of_k | of_v, "dv": of_k | of_v}
        if problem.dtype_name == "float16":
            lost["dv"] = lost["dv"] | _any_infinite(exact["dk"])
        kept = {}
        for name, x in exact.items():
            actual = gradients[name]
            of_rows = lost[name] | _any_infinite(x) if name in lost else ~np.isfinite(x)
            kept[name] = np.where(of_rows, x, actual.astype(dtype)).astype(actual.dtype)
        return kept

    def compare_probabilities(self, actual: Array) -> None:
        problem = self.built.drawn.problem
        q, k = (x.astype(judge(problem.dtype_name)) for x in (problem.q, problem.k))
        exact, largest = np.zeros(actual.shape, q.dtype), 0.0
        with np.errstate(all="ignore"):
            for head in Rules(**self.built.rules).heads(q, k):
                scores, _ = head.scores(q[head.queries], k[head.keys])
                weights = np.where(head.kept == 0, 0, head.softmax(scores)[0] * head.kept)
                exact[head.queries[0], head.number, :, : scores.shape[1]] = weights
                largest = max(largest, float(np.abs(scores).max(where=np.isfinite(scores), initial=0)))
        rounding = float(np.finfo(accumulator_dtype(problem.dtype_name)).eps)
        tolerance = OF_PROBABILITIES[problem.dtype_name] + SCORE_ROUNDINGS * rounding * largest
        near = np.isclose(actual.astype(q.dtype), exact, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not near.all():
            at = tuple(int(i) for i in np.argwhere(~near)[0])
            raise WrongResultError(f"probability {list(at)} is {actual[at]}, should be {exact[at]}")

    def tokens(self, name: str) -> slice:
        """Those of a gradient that are in a sequence."""
        ends = self.built.rules.get(
            {"dq": "cu_seqlens_q", "dk": "cu_seqlens_k", "dv": "cu_seqlens_k"}.get(name, "")
        )
        return slice(None) if ends is None else slice(int(ends[0]), int(ends[-1]))

    def _place(self, name: str, values: Array) -> Any:
        if name == "v" and self.case.in_keys:
            self.inputs[name] = replace(self.inputs["k"], shape=values.shape)
        else:
            self.inputs[name] = self._memory(values, self.case.strided, self.case.broadcast)
        return self.inputs[name].array

    def _memory(self, values: Array, strided: bool, with_repeats: bool = False) -> Memory:
        memory = placed(self.rng, values, strided, self.case.align_bytes)
        return (memory.with_repeats() if with_repeats else memory).copy(self.to_gpu)

    def _call(
        self, function: Callable[..., Any], inputs: list[Any], wanted: Mapping[str, Any], **more: Any
    ) -> Any:
        """What the function returns; raises WrongResultError if it writes to what is no result."""
        given = {}
        for name, (shape, dtype) in wanted.items():
            if self.case.given and self.rng.random() < 0.7:
                strided = self.case.strided and name != "dbias"
                given[name] = self._memory(np.full(shape, np.nan, dtype), strided)
        if self.case.runs_on_gpu:
            _poison_pool()
        if self.case.given and self.to_gpu:
            import cupy

            more["workspace"] = cupy.full(WORKSPACE_BYTES // 4, np.nan, np.float32)
        before = {name: memory.copy(to_gpu=False) for name, memory in (self.inputs | given).items()}
        outputs = {name: memory.array for name, memory in given.items()}
        results = function(*inputs, **self.options, **self.common, **more, **outputs)
        for name, was in before.items():
            now = (self.inputs | given)[name].copy(to_gpu=False)
            changed = was.bytes != now.bytes
            if name in given:
                changed &= ~now.inside
            if changed.any():
                raise WrongResultError(
                    f"{name}: {np.count_nonzero(changed)} bytes were written that are no result"
                )
        return results


def check(case: Case) -> None:
    """Compute it and compare; raises WrongResultError, or what the call does."""
    run = Run(case)
    results = run.forward()
    if "probabilities" in results:
        run.compare_probabilities(results.pop("probabilities"))
    run.compare(results)
    if case.backward:
        gradients = run.backward(**results)
        run.compare(gradients)
        again = run.backward(**results) if "deterministic" in case.features else gradients
        for name, x in gradients.items():
            tokens = run.tokens(name)
            if x[tokens].tobytes() != again[name][tokens].tobytes():
                raise WrongResultError(f"{name}, which is deterministic, differs from run to run")


def _any_infinite(x: Array) -> Array:
    """Whether rows have NaN or infinity, with one column."""
    rows: Array = ~np.isfinite(x).all(axis=-1, keepdims=True)
    return rows


def _on_host(x: Any) -> Array:
    return x if isinstance(x, np.ndarray) else x.get()


def _poison_pool() -> None:
    """Leave NaN in memory that the next results and workspaces may get."""
    import cupy

    blocks = [cupy.full(1 << size, np.nan, np.float32) for size in range(8, 23, 2)]
    del blocks


def outcome(case: Case) -> tuple[str, str]:
    """ "right", "refused" or "wrong", and what there is to say of it."""
    try:
        check(case)
    except WrongResultError as error:
        return "wrong", str(error)
    except Exception as error:  # whatever there is
        if not _is_refusal(error):
            return "wrong", traceback.format_exc()
        if case.kernel or case.backward_kernel:  # as that one does not take these addresses
            return outcome(replace(case, kernel=None, tiles=(), backward_kernel=None, backward_tiles=()))
        return "refused", f"{type(error).__name__}: {error}"
    return "right", ""


def _is_refusal(error: Exception) -> bool:
    """Whether it is the library's own error about arguments, raised on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_own = Path(last.filename).is_relative_to(ROOT / "cufa") and (last.line or "").startswith("raise")
    return is_own and isinstance(error, (ValueError, TypeError))


def shrunk(case: Case, deadline: float) -> Case:
    """The case without what it is wrong without, as far as time suffices."""
    for simpler in _simpler(case):
        if time.monotonic() > deadline:
            break
        if outcome(simpler)[0] == "wrong":
            return shrunk(simpler, deadline)
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for name in case.features:
        yield replace(case, features=tuple(other for other in case.features if other != name))
    for field in fields(case):
        is_kept = field.name in ("seed", "backend", "features", "kernel", "backward_kernel", "kv_heads")
        if not is_kept and getattr(case, field.name) != field.default:
            with_one_head = {"heads": 1, "kv_heads": 1} if field.name == "heads" else {}
            yield replace(case, **({field.name: field.default} | with_one_head))


def _gpu_is_well() -> bool:
    """Whether it computes still: after an access to memory that is nobody's it does not."""
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


def report(case: Case, message: str) -> None:
    """Print a case that is wrong, then what is left of it."""
    print(f"wrong: {case}\n  {message}", flush=True)
    if case.runs_on_gpu and not _gpu_is_well():
        sys.exit(1)
    simpler = shrunk(case, time.monotonic() + SHRINKING_SECONDS)
    print(f"simpler: {simpler}\n  {outcome(simpler)[1]}", flush=True)


@click.command(help=__doc__)
@click.option("--seconds", type=RealInRange(min=0), default=60.0, show_default=True, help="How long to run.")
@click.option("--backend", type=click.Choice(tuple(ALIKE)), default="numpy", show_default=True)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the first cases; then the next one.",
)
@click.option(
    "--failures",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="After how many to stop.",
)
@click.option("--show", is_flag=True, help="Count also what was refused, and which kernels ran.")
def main(seconds: float, backend: str, seed: int, failures: int, show: bool) -> None:
    if backend == "numpy":
        for module, name, size in CPU_SIZES:
            setattr(module, name, size)
    elif backend == "cuda":
        try:
            device.current()
        except cufa.GPUUnavailableError as error:
            raise click.ClickException(str(error)) from error
    end = time.monotonic() + seconds
    counts, details = Counter[str](), Counter[str]()
    drawn = (
        case for number in itertools.count(seed) for case in draw(np.random.default_rng(number), backend)
    )
    for case in drawn:
        if time.monotonic() > end or counts["wrong"] >= failures:
            break
        kind, message = outcome(case)
        counts[kind] += 1
        details[
            message if kind == "refused" else f"{case.dtype} by {case.kernel}, {case.backward_kernel}"
        ] += 1
        if kind == "wrong":
            report(case, message)
    for detail, count in details.most_common() if show else ():
        print(f"{count:5} {detail}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
