"""`cufa ladder`: shows what each idea gains, by running every rung on one problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import numpy as np

import cufa
from cufa import device
from cufa.cli import check, output
from cufa.cli.generated import as_asked, make_arrays, without_gradients
from cufa.cli.options import (
    INPUT_DTYPE,
    FeatureOptions,
    arguments,
    backend_option,
    count_option,
    feature_options,
    json_option,
    refuse_without_backward,
    seed_option,
)
from cufa.cli.workload import (
    DIRECTIONS,
    Rung,
    Workload,
    place,
    problem_document,
    release_gpu_memory,
    to_gpu,
    to_host,
    use_gpu,
)
from cufa.kernels import KERNELS, Kernel
from cufa.messages import counted
from cufa.problem import Direction, Problem
from cufa.threads import cores


@dataclass(frozen=True)
class _Preset:
    """A problem, and the number of CPU threads to compare with; None for one per core."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    cpu_threads: int | None = None


_PRESETS = {
    "small": _Preset(2, 1024, 4, 4, 64, "float32", causal=False),
    # The problem of the classic course, which reports 235x over one CPU thread.
    "course": _Preset(100, 4096, 1, 1, 32, "float32", causal=False, cpu_threads=1),
    "gpt2": _Preset(8, 1024, 12, 12, 64, "bfloat16", causal=True),
    "llama": _Preset(1, 8192, 32, 8, 128, "bfloat16", causal=True),
}

_OF_PRESET = "the preset's"
# The CPU computes this much of a problem's forward, about a second; its time is scaled up.
CPU_SLICE_FLOPS = 8e9
# The variables that set the number of threads of NumPy's BLAS libraries.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class _Row:
    """One line of the ladder. Values that could not be measured are None; `note` says why.

    `memory_bytes` excludes inputs and outputs; `cpu` marks the rows that a GPU is compared with.
    """

    name: str
    direction: Direction
    seconds: float | None = None
    tflops: float | None = None
    memory_bytes: int | None = None
    check: check.Check | None = None
    cpu: bool = False
    note: str = ""

    @property
    def error(self) -> float | None:
        """The largest error among this direction's results."""
        if self.check is None:
            return None
        return max(each.error for each in self.check.comparisons)


@click.command("ladder")
@click.option(
    "--preset", type=click.Choice(list(_PRESETS)), default="small", show_default=True, help="The problem."
)
@count_option("--batch", "Batch size.", least=1, show_default=_OF_PRESET)
@count_option("--seqlen", "Length of queries and of keys.", least=1, show_default=_OF_PRESET)
@count_option("--heads", "Query heads.", least=1, show_default=_OF_PRESET)
@count_option(
    "--kv-heads",
    "KV heads; --heads must be a multiple.",
    least=1,
    show_default="--heads, if given, else the preset's",
)
@count_option("--head-dim", "Head dim, 1 to 512.", least=1, show_default=_OF_PRESET)
@click.option("--dtype", type=INPUT_DTYPE, show_default=_OF_PRESET, help="Dtype of the arrays.")
@feature_options(packed=False)
@click.option("--no-causal", is_flag=True, help="Drop the preset's causal mask.")
@click.option(
    "--direction",
    type=click.Choice((*DIRECTIONS, "both")),
    show_default="both if gradients exist",
    help="What to run.",
)
@count_option(
    "--cpu-threads", "Threads of the CPU row.", least=1, show_default="the preset's, else one per core"
)
@backend_option
@seed_option
@json_option
def command(
    preset: str,
    features: FeatureOptions,
    no_causal: bool,
    direction: str | None,
    cpu_threads: int | None,
    backend: str | None,
    seed: int,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Run every rung, and the CPU, on one problem.

    Shows for each: time, TFLOP/s, speedup over the rung before and over the CPU, memory beyond inputs and
    outputs, and the largest error against float64. Rungs that do not support the problem say so.

    Presets: "small" is batch 2, length 1024, 4 heads of 64, float32; "course" batch 100, length 4096, one
    head of 32, float32, compared with one CPU thread; "gpt2" batch 8, length 1024, 12 heads of 64, bfloat16,
    causal; "llama" batch 1, length 8192, 32 heads of 128 with 8 KV heads, bfloat16, causal.

    Exits with 1 if a result's error is too large.
    """
    if features.causal and no_causal:
        raise output.Failure("--causal and --no-causal: only one of them may be given")
    chosen = _PRESETS[preset]
    problem = as_asked(_problem(chosen, sizes), features)
    if direction == "forward":
        refuse_without_backward("--direction forward", features)
    elif direction is None and (left_out_by := without_gradients(problem)):
        refuse_without_backward(left_out_by, features)
        direction = "forward"
    features = replace(features, causal=(features.causal or chosen.causal) and not no_causal)
    asked = [way for way in DIRECTIONS if direction in (way, "both", None)]
    on_gpu = use_gpu(backend)
    rng = np.random.default_rng(seed)
    if cpu_threads is not None and cpu_threads > cores():
        raise output.Failure(f"--cpu-threads is {cpu_threads}, and there may be {cores()}, one per core")
    threads = [cpu_threads or chosen.cpu_threads or cores()]
    if not on_gpu and cpu_threads is None:
        threads = sorted({1, cores()})  # without rungs to compare, show how BLAS scales

    rungs = [kernel for kernel in KERNELS.values() if kernel.direction in asked] if on_gpu else []
    with output.progress(len(threads) + len(rungs)) as step:
        rows = _cpu_rows(problem, features, asked, threads, rng, step)
        if rungs:
            rows += _gpu_rows(problem, features, rungs, rng, step)
    notes = _notes(on_gpu, rows)
    posed = _described(problem, features)
    if as_json:
        output.print_json(_document(on_gpu, features, posed, rows, notes))
    else:
        _print(on_gpu, posed, rows, notes)
    if not all(row.check.ok for row in rows if row.check):
        raise click.exceptions.Exit(output.WRONG)


def _problem(preset: _Preset, sizes: dict[str, Any]) -> Problem:
    changed = replace(preset, **{name: value for name, value in sizes.items() if value is not None})
    if sizes["heads"] is not None and sizes["kv_heads"] is None:
        changed = replace(changed, kv_heads=changed.heads)
    return Problem(
        direction="forward",
        dtype=changed.dtype,
        batch=changed.batch,
        seqlen_q=changed.seqlen,
        seqlen_k=changed.seqlen,
        heads=changed.heads,
        kv_heads=changed.kv_heads,
        head_dim=changed.head_dim,
        value_dim=changed.head_dim,
    )


def _described(problem: Problem, features: FeatureOptions) -> Problem:
    """The forward problem with its features."""
    arrays = make_arrays(problem, features, "bshd", None)
    return Workload(arrays, on_gpu=False, features=features).problem("forward")


def _slice(problem: Problem) -> Problem:
    """The part of the problem that `CPU_SLICE_FLOPS` pays for: fewer batches, if need be fewer heads."""
    pieces = problem.batch * problem.heads
    affordable = max(1, int(CPU_SLICE_FLOPS * pieces / max(1, problem.flops)))
    if affordable >= problem.heads:
        return replace(problem, batch=min(problem.batch, affordable // max(1, problem.heads)))
    return replace(problem, batch=1, heads=affordable, kv_heads=affordable)


def _cpu_rows(
    problem: Problem,
    features: FeatureOptions,
    asked: list[Direction],
    threads: list[int],
    rng: np.random.Generator,
    step: Any,
) -> list[_Row]:
    sliced = _slice(problem)
    pieces, measured = problem.batch * problem.heads, sliced.batch * sliced.heads
    note = "" if measured == pieces else f"measured on {measured} of {pieces} heads and scaled"
    host = make_arrays(sliced, features, "bshd", rng)
    workload = Workload(host, on_gpu=False, features=features)
    for way in asked:
        workload.problem(way)  # refuse wrong gradient options before computing
    results = workload.forward(Rung())
    if "backward" in asked:
        results |= workload.backward(Rung(), results)
    verdict = workload.check(host, results, rng)
    rows = []
    for count in threads:
        step(f"CPU, {counted(count, 'thread')}")
        for way, seconds in _cpu_seconds(sliced, features, asked, count).items():
            rows.append(
                _Row(
                    name=f"CPU, {counted(count, 'thread')}",
                    direction=way,
                    seconds=seconds * pieces / measured,
                    tflops=workload.flops(way) / seconds / 1e12,
                    check=verdict.of(way),
                    cpu=True,
                    note=note,
                )
            )
    return rows


def _cpu_seconds(
    problem: Problem, features: FeatureOptions, asked: list[Direction], threads: int
) -> dict[Direction, float]:
    """Time `cufa bench` in its own process, since BLAS reads its number of threads when it is loaded."""
    command = [sys.executable, "-m", "cufa", "bench", "--backend", "numpy", "--json"]
    command += ["--direction", asked[0] if len(asked) == 1 else "both"]
    command += ["--seqlens", str(problem.seqlen_q), "--dtype", problem.dtype]
    for name in ("batch", "heads", "kv_heads", "head_dim"):
        command += [f"--{name.replace('_', '-')}", str(getattr(problem, name))]
    command += arguments(features)
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise output.Wrong(f"measuring the CPU failed: {done.stderr.strip()}")
    return {point["direction"]: point["seconds"] for point in json.loads(done.stdout)["points"]}


def _gpu_rows(
    problem: Problem, features: FeatureOptions, rungs: list[Kernel], rng: np.random.Generator, step: Any
) -> list[_Row]:
    host = make_arrays(problem, features, "bshd", rng)
    workload = Workload(to_gpu(host), on_gpu=True, features=features)
    has_backward = any(kernel.direction == "backward" for kernel in rungs)
    forward = workload.forward(Rung()) if has_backward else {}
    rows = []
    for kernel in rungs:
        way = kernel.direction
        step(kernel.name)
        reason = kernel.unsupported(workload.problem(way), device.current())
        if reason is not None:
            rows.append(_Row(kernel.name, way, note=reason))
            continue
        rung = Rung(kernel.name)
        plan = workload.plan(way, rung)
        try:
            results, timing = workload.timed(way, rung, forward if way == "backward" else None)
        except output.OutOfMemory:
            rows.append(_Row(kernel.name, way, memory_bytes=plan.workspace_bytes, note="out of memory"))
            continue
        finally:
            release_gpu_memory()
        verdict = workload.check(host, to_host(forward | results), rng)
        rows.append(
            _Row(
                name=kernel.name,
                direction=way,
                seconds=timing.median,
                tflops=workload.flops(way) / timing.median / 1e12,
                memory_bytes=plan.workspace_bytes,
                check=verdict.of(way),
            )
        )
    return rows


def _notes(on_gpu: bool, rows: list[_Row]) -> list[str]:
    """What readers need to know to understand the figures."""
    notes = [f"{row.name}, {row.direction}: {row.note}" for row in rows if row.note]
    if not on_gpu:
        notes.append(
            "the rungs need a GPU; these are the rows of the CPU alone. In a checkout, benchmarks/README.md "
            "has times of the rungs on an H200, and CONTRIBUTING.md says how an emulator runs them on a CPU"
        )
    notes.append("the CPU path is the tiled algorithm in NumPy, on as many threads as are named")
    covered = [row.check.coverage for row in rows if row.check and row.cpu != on_gpu]
    if covered:
        notes.append(f"errors are the largest against float64, of {max(covered, key=len)}")
    return notes


def _speedup(row: _Row, other: _Row | None) -> float | None:
    """The speedup of a row over another."""
    if other is None or row.seconds is None or other.seconds is None:
        return None
    return other.seconds / row.seconds


def _compared(rows: list[_Row]) -> list[tuple[_Row, float | None, float | None]]:
    """Each row with its speedup over the previous rung that ran, and over the direction's first CPU row."""
    compared = []
    for way in DIRECTIONS:
        of_way = [row for row in rows if row.direction == way]
        cpu = next((row for row in of_way if row.cpu), None)
        before: _Row | None = None
        for row in of_way:
            compared.append((row, _speedup(row, before), _speedup(row, None if row is cpu else cpu)))
            if row.seconds is not None and not row.cpu:
                before = row
    return compared


def _document(
    on_gpu: bool, features: FeatureOptions, problem: Problem, rows: list[_Row], notes: list[str]
) -> dict[str, Any]:
    return {
        "cufa": cufa.__version__,
        "backend": "cuda" if on_gpu else "numpy",
        "device": place(on_gpu),
        "options": asdict(features),
        "problem": problem_document(problem),
        "features": list(problem.features.names),
        "rows": [
            {
                "name": row.name,
                "direction": row.direction,
                "seconds": row.seconds,
                "tflops": row.tflops,
                "speedup_over_rung_before": over_before,
                "speedup_over_cpu": over_cpu,
                "memory_bytes": row.memory_bytes,
                "error": row.error,
                "check": row.check.document() if row.check else None,
                "note": row.note,
            }
            for row, over_before, over_cpu in _compared(rows)
        ],
        "notes": notes,
    }


def _print(on_gpu: bool, problem: Problem, rows: list[_Row], notes: list[str]) -> None:
    console = output.stdout()
    output.print_prose(f"{place(on_gpu)}\n{str(problem).removeprefix('forward ')}\n\n")
    columns = ("<", "time", "TFLOP/s", "x before", "x CPU", "memory", "error")
    for way in DIRECTIONS:
        compared = [line for line in _compared(rows) if line[0].direction == way]
        if not compared:
            continue
        table = output.table(columns, way)
        for row, over_before, over_cpu in compared:
            table.add_row(
                row.name,
                _shown(row.seconds, output.seconds),
                _shown(row.tflops, output.three_digits),
                _shown(over_before, output.three_digits),
                _shown(over_cpu, output.three_digits),
                _shown(row.memory_bytes, output.size),
                _shown(row.error, "{:.1e}".format),
                style="red" if row.check and not row.check.ok else None,
            )
        output.print_table(table)
        console.print("")
    for note in notes:
        output.print_prose(f"- {note}", "  ")
    for row in rows:
        for each in row.check.comparisons if row.check else ():
            if not each.ok:
                output.say(f"{row.name}: {each}", "red")


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None else form(value)
