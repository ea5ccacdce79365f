"""`cufa run`: computes and checks attention and gradients, of arrays from files or of a generated problem."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import cufa
from cufa import device, jit
from cufa.arguments import DESCALES, check_scale
from cufa.cli import check, files, output
from cufa.cli.generated import as_asked, cu_seqlens, make_arrays, without_gradients
from cufa.cli.options import (
    INPUT_DTYPE,
    LAYOUT,
    RANDOM,
    RANDOM_BITS,
    FeatureOptions,
    KernelName,
    Real,
    arch_option,
    backend_option,
    count_option,
    feature_options,
    json_option,
    refuse_without_backward,
    seed_option,
    tile_option,
)
from cufa.cli.workload import (
    TENSORS,
    Arrays,
    Rung,
    Workload,
    place,
    problem_document,
    refuse_on_cpu,
    to_gpu,
    to_host,
    use_gpu,
)
from cufa.kernels import KERNELS
from cufa.plan import Plan
from cufa.problem import DTYPES, Direction, Problem
from cufa.score_rules import Rules
from cufa.timing import Timing

# The default problem, small enough to check every result.
DEFAULT_SIZES = {"batch": 2, "seqlen": 512, "heads": 4, "head_dim": 64}
DEFAULT_DTYPE = "float32"
# Sizes that --varlen sets.
_VARLEN_SIZES = ("batch", "seqlen", "seqlen_q", "seqlen_k")
# How the options of a direction's kernel begin.
_PREFIXES: dict[Direction, str] = {"forward": "--", "backward": "--backward-"}
# How NumPy stores what it has no name for, and how to read it.
_BFLOAT16_AGAIN = "as |V2; numpy.load(...).view(ml_dtypes.bfloat16) reads it"


@dataclass(frozen=True)
class _Step:
    """One direction of the run: what was asked for and computed, how fast, and by which plan on a GPU."""

    problem: Problem
    rung: Rung
    flops: int
    timing: Timing
    plan: Plan | None

    @property
    def kernel(self) -> str:
        return self.plan.kernel if self.plan else "numpy"

    @property
    def tflops(self) -> float:
        return self.flops / self.timing.median / 1e12


@click.command("run")
@click.option("--q", metavar="FILE", help="Queries: .npy, or .npz with an array q (or FILE:KEY).")
@click.option("--k", metavar="FILE", help="Keys, likewise.")
@click.option("--v", metavar="FILE", help="Values, likewise.")
@click.option("--dout", metavar="FILE", help="Gradient of the output, likewise.", show_default="random")
@click.option(
    "--out",
    "destination",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results, 0 for tokens after those of --varlen: .npy for only the output, .npz for all. "
    f"bfloat16 is stored {_BFLOAT16_AGAIN}.",
)
@count_option("--batch", "Batch size of the generated problem.", show_default=str(DEFAULT_SIZES["batch"]))
@count_option("--seqlen", "Length of queries and of keys.", show_default=str(DEFAULT_SIZES["seqlen"]))
@count_option("--seqlen-q", "Length of queries.", show_default="--seqlen")
@count_option("--seqlen-k", "Length of keys.", show_default="--seqlen")
@count_option("--heads", "Query heads.", show_default=str(DEFAULT_SIZES["heads"]))
@count_option("--kv-heads", "KV heads; --heads must be a multiple.", show_default="--heads")
@count_option(
    "--head-dim",
    "Head dim of queries and keys, 1 to 576 (over 512 with --value-dim).",
    show_default=str(DEFAULT_SIZES["head_dim"]),
)
@count_option("--value-dim", "Head dim of values, 1 to 512.", show_default="--head-dim")
@click.option(
    "--dtype",
    type=INPUT_DTYPE,
    show_default=DEFAULT_DTYPE,
    help="Dtype of q, k and v; those from files are converted to it, and without it keep theirs.",
)
@seed_option
@feature_options(files=True)
@click.option(
    "--softmax-scale", type=Real(), metavar="X", show_default="1 / sqrt(head dim)", help="Factor on Q K^T."
)
@click.option("--layout", type=LAYOUT, default="bshd", show_default=True, help="Order of the axes.")
@click.option(
    "--kernel",
    type=KernelName(KERNELS, "forward"),
    metavar="KERNEL",
    show_default="the fastest",
    help="A kernel from `cufa kernels`; its name up to the number suffices, as in fwd_4.",
)
@click.option(
    "--backward-kernel",
    type=KernelName(KERNELS, "backward"),
    metavar="KERNEL",
    show_default="the fastest",
    help="Likewise, for the gradients.",
)
@tile_option("--tile", "forward kernel")
@tile_option("--backward-tile", "backward kernel")
@arch_option
@backend_option
@click.option(
    "--backward/--no-backward", default=None, show_default="if there are any", help="Also compute gradients."
)
@click.option("--check/--no-check", "checked", default=True, show_default=True, help="Compare with float64.")
@click.option("--explain", is_flag=True, help="Print the plan and its reasons; run nothing.")
@json_option
def command(
    dtype: str | None,
    seed: int,
    features: FeatureOptions,
    softmax_scale: float | None,
    layout: str,
    kernel: str | None,
    backward_kernel: str | None,
    tile: tuple[tuple[str, int], ...],
    backward_tile: tuple[tuple[str, int], ...],
    arch: str | None,
    backend: str | None,
    backward: bool | None,
    checked: bool,
    explain: bool,
    destination: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Compute attention and gradients, and check them.

    Without arguments, the problem is small and generated. All results are compared with float64. Arrays from
    files have the axes (batch, seqlen, heads, head_dim) or those of --layout; with --varlen they have
    (tokens, heads, head_dim).

    Exits with 1 if a result's error is too large, with 2 if the call is refused.
    """
    locations = {name: given.pop(name) for name in TENSORS}
    locations["bias"] = None if features.bias == RANDOM else features.bias
    locations["mask"] = None if features.mask in (RANDOM, RANDOM_BITS) else features.mask
    if explain and backend == "numpy":
        raise output.Failure("--explain: there is no plan to print, since the NumPy backend has none")
    if explain and arch is None and not os.environ.get("CUFA_ARCH") and not device.gpu_present():
        raise output.Failure(
            "--explain: there is no GPU to plan for; name an arch (--arch sm_90a, or CUFA_ARCH)"
        )
    if destination is not None:
        if explain:
            raise output.Failure("--out: there are no results to write, since --explain runs nothing")
        files.check_destination(destination, locations)
    rng = np.random.default_rng(seed)
    of_gradients = {
        "backward_kernel": backward_kernel,
        "backward_tile": backward_tile,
        "dout": locations["dout"],
    }
    if backward is False:
        refuse_without_backward("--no-backward", features, **of_gradients)
    from_files = _from_files(locations, features, dtype)
    if "q" in from_files:
        problem = _problem_of(from_files, given, features, layout)
    else:
        problem = _generated(given, dtype or DEFAULT_DTYPE, features)
    if backward is None:
        left_out_by = without_gradients(problem)
        backward = left_out_by is None
        if left_out_by is not None:
            refuse_without_backward(left_out_by, features, **of_gradients)
    rungs: dict[Direction, Rung] = {"forward": Rung(kernel, dict(tile) or None, arch)}
    if backward:
        rungs["backward"] = Rung(backward_kernel, dict(backward_tile) or None, arch)

    described = make_arrays(problem, features, layout, None, from_files)
    workload = Workload(described, False, features, softmax_scale, layout)
    for direction in rungs:
        workload.problem(direction)  # refuse wrong gradient options before computing
    workload.check_numbers()
    if features.varlen is not None:
        _check_sequences(workload)
    if explain:
        _explain(_plans(workload, rungs), as_json)
        return
    on_gpu = use_gpu(backend)
    if on_gpu:
        _plans(workload, rungs)  # refuse what no kernel supports before allocating
    else:
        for direction, rung in rungs.items():
            refuse_on_cpu(rung, _PREFIXES[direction])
    if not as_json:  # at once, since what follows may take minutes
        _print_what_is_run(workload, on_gpu)
    host = make_arrays(problem, features, layout, rng, from_files)
    workload = replace(workload, arrays=to_gpu(host) if on_gpu else host, on_gpu=on_gpu)
    results, steps = _compute(workload, rungs)
    if features.varlen is not None:
        _clear_others(results, features.varlen)
    has_bfloat16 = destination is not None and files.save(destination, results)
    verdict = workload.check(host, results, rng) if checked else None
    if as_json:
        output.print_json(_document(workload, steps, seed, verdict, destination))
    else:
        _report(steps, verdict, destination, has_bfloat16)
    if verdict is not None and not verdict.ok:
        raise click.exceptions.Exit(output.WRONG)


def _from_files(locations: dict[str, str | None], features: FeatureOptions, dtype: str | None) -> Arrays:
    """The arrays from files; if one tensor is from a file, q, k and v must be."""
    missing = [f"--{name}" for name in ("q", "k", "v") if locations[name] is None]
    if missing and any(locations[name] for name in TENSORS):
        raise output.Failure(f"{', '.join(missing)} must be given, too, with arrays from files")
    dtypes = dict.fromkeys(TENSORS, dtype) | dict.fromkeys(("k", "v"), features.kv_dtype or dtype)
    loaded = {
        name: files.load(name, at, dtypes.get(name)) for name, at in locations.items() if at is not None
    }
    _check_one_dtype({name: x.dtype for name, x in loaded.items() if name in TENSORS and not dtypes[name]})
    return loaded


def _check_one_dtype(dtypes: dict[str, np.dtype[Any]]) -> None:
    """Raise Failure for unconverted tensors of several dtypes; leave what none may have to other checks."""
    allowed = {name: dtype for name, dtype in dtypes.items() if dtype in DTYPES.values()}
    for name, dtype in allowed.items():
        of_q = allowed.get("q", dtype)
        if dtype != of_q:
            raise output.Failure(
                f"--{name} has dtype {dtype} and --q {of_q}; they must be the same; --dtype converts them"
            )


def _problem_of(
    from_files: Arrays, sizes: dict[str, int | None], features: FeatureOptions, layout: str
) -> Problem:
    """The problem that the arrays from files pose."""
    refused = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size is not None]
    if refused:
        raise output.Failure(f"{', '.join(refused)} cannot go with files, which give the sizes")
    of_generated = {
        "--page-size": features.page_size,
        "--transposed-values": features.transposed_values,
        "--values-in-keys": features.values_in_keys,
    }
    for option, given in of_generated.items():
        if given:
            raise output.Failure(f"{option} is of generated arrays, and these are from files")
    arrays = {**from_files, **cu_seqlens(features)}
    return Workload(arrays, False, features, layout=layout).problem("forward")


def _generated(sizes: dict[str, int | None], dtype: str, features: FeatureOptions) -> Problem:
    """The problem of the sizes on the command line."""
    refused = [f"--{name.replace('_', '-')}" for name in _VARLEN_SIZES if sizes[name] is not None]
    if refused and features.varlen is not None:
        raise output.Failure(f"{', '.join(refused)} cannot go with --varlen, which gives the sizes")

    def size(name: str, like: str | None = None) -> int:
        value = sizes[name]
        if value is not None:
            return value
        return size(like) if like else DEFAULT_SIZES[name]

    problem = Problem(
        direction="forward",
        dtype=dtype,
        batch=size("batch"),
        seqlen_q=size("seqlen_q", "seqlen"),
        seqlen_k=size("seqlen_k", "seqlen"),
        heads=size("heads"),
        kv_heads=size("kv_heads", "heads"),
        head_dim=size("head_dim"),
        value_dim=size("value_dim", "head_dim"),
    )
    return as_asked(problem, features)


def _check_sequences(workload: Workload) -> None:
    """Raise Failure if arrays from files are too short for the sequences; a GPU would not notice."""
    rules = workload.rules()
    others = ("softmax_scale", "precision", *DESCALES)
    side = {name: rules[name] for name in rules if name not in others}
    with output.library_errors():
        Rules(softmax_scale=1.0, **side).sequences(workload.arrays["q"], workload.arrays["k"])


def _plans(workload: Workload, rungs: dict[Direction, Rung]) -> dict[Direction, Plan]:
    with output.library_errors():  # as compiling would
        jit.debug_options()
        jit.extra_options()
    return {
        direction: workload.plan(direction, rung, _PREFIXES[direction]) for direction, rung in rungs.items()
    }


def _explain(plans: dict[Direction, Plan], as_json: bool) -> None:
    if as_json:
        output.print_json({direction: plan_document(plan) for direction, plan in plans.items()})
    else:
        for plan in plans.values():
            output.print_plan(plan)


def _compute(workload: Workload, rungs: dict[Direction, Rung]) -> tuple[Arrays, list[_Step]]:
    """The results as NumPy arrays, and the steps that computed them."""
    results: Arrays = {}
    steps = []
    for direction, rung in rungs.items():
        inputs = results if direction == "backward" else None
        computed, timing = workload.timed(direction, rung, inputs)
        results = results | computed
        plan = workload.plan(direction, rung) if workload.on_gpu else None
        problem, flops = workload.problem(direction), workload.flops(direction)
        steps.append(_Step(problem, rung, flops, timing, plan))
    return to_host(results), steps


def _clear_others(results: Arrays, varlen: tuple[tuple[int, int], ...]) -> None:
    """Make the results 0 of the tokens after all sequences, which calls leave as they are in memory."""
    queries, keys = (sum(side) for side in zip(*varlen, strict=True))
    ends = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    for name in results.keys() & ends:
        results[name][ends[name] :] = 0
    results["lse"][:, queries:] = 0


def plan_document(plan: Plan) -> dict[str, Any]:
    """A Plan for --json."""
    return {
        "kernel": plan.kernel,
        "arch": str(plan.device.arch),
        "device": plan.device.name,
        "tiles": dict(plan.tiles),
        "launches": [asdict(launch) for launch in plan.launches],
        "workspace_bytes": plan.workspace_bytes,
        "reasons": list(plan.reasons),
        "beside": plan_document(plan.beside) if plan.beside else None,
    }


def _document(
    workload: Workload,
    steps: list[_Step],
    seed: int,
    verdict: check.Check | None,
    destination: Path | None,
) -> dict[str, Any]:
    return {
        "cufa": cufa.__version__,
        "backend": "cuda" if workload.on_gpu else "numpy",
        "device": place(workload.on_gpu),
        "options": asdict(workload.features),
        "softmax_scale": check_scale(workload.softmax_scale, steps[0].problem.head_dim),
        "layout": workload.layout,
        "seed": seed,
        "steps": [
            {
                "direction": step.problem.direction,
                "problem": problem_document(step.problem),
                "features": list(step.problem.features.names),
                "asked": asdict(step.rung),
                "kernel": step.kernel,
                "seconds": step.timing.median,
                "seconds_best": step.timing.best,
                "repeats": step.timing.repeats,
                "tflops": step.tflops,
                "plan": plan_document(step.plan) if step.plan else None,
            }
            for step in steps
        ],
        "check": verdict.document() if verdict else None,
        "out": str(destination) if destination else None,
    }


def _print_what_is_run(workload: Workload, on_gpu: bool) -> None:
    output.print_prose(f"cufa {cufa.__version__} on {place(on_gpu)}\n{workload.problem('forward')}\n\n")


def _report(
    steps: list[_Step], verdict: check.Check | None, destination: Path | None, has_bfloat16: bool
) -> None:
    console = output.stdout()
    table = output.table(("<direction", "<kernel", "time", "TFLOP/s"))
    for step in steps:
        time = output.seconds(step.timing.median)
        table.add_row(step.problem.direction, step.kernel, time, output.three_digits(step.tflops))
    output.print_table(table)
    for step in steps:
        if step.plan is not None:
            output.print_prose(f"{step.kernel}: {_plan_summary(step.plan)}")
    if verdict is not None:
        _report_check(verdict)
    if destination is not None:
        console.print(f"\nwritten to {destination}", soft_wrap=True)
        if has_bfloat16:
            console.print(f"bfloat16 is stored {_BFLOAT16_AGAIN}", soft_wrap=True)


def _plan_summary(plan: Plan) -> str:
    """A Plan in one line; --explain prints all of it."""
    if not plan.launches:
        return "nothing to launch"
    parts = [output.tiles(plan.tiles)] if plan.tiles else []
    parts.append(f"{output.size(max(launch.smem_bytes for launch in plan.launches))} of shared memory")
    if plan.workspace_bytes:
        parts.append(f"{output.size(plan.workspace_bytes)} of workspace")
    return ", ".join(parts)


def _report_check(verdict: check.Check) -> None:
    from rich.text import Text

    console = output.stdout()
    table = output.table(("<result", "largest error", "allowed", "<"))
    for each in verdict.comparisons:
        passed = Text("pass", "green") if each.ok else Text("FAIL", "bold red")
        table.add_row(each.what, f"{each.error:.2e}", f"{each.allowed:.2e}", passed)
    console.print("")
    output.print_table(table)
    output.print_prose(f"\nchecked against float64: {verdict.coverage}")
    not_finite = [
        f"{each.not_finite} of {each.size} of {each.what}" for each in verdict.comparisons if each.not_finite
    ]
    if not_finite:
        output.print_prose(f"NaN or infinite, as in float64: {', '.join(not_finite)}")
    console.print("PASS" if verdict.ok else "FAIL", style="bold green" if verdict.ok else "bold red")
    for each in verdict.comparisons:
        if not each.ok:
            output.say(str(each), "red")
