"""`cufa bench`: times kernels over a sweep of sequence lengths."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import cufa
from cufa.cli import files, output
from cufa.cli.generated import as_asked, bytes_moved, make_arrays, without_gradients
from cufa.cli.options import (
    INPUT_DTYPE,
    KERNEL,
    LAYOUT,
    Count,
    FeatureOptions,
    arch_option,
    backend_option,
    count_option,
    feature_options,
    json_option,
    refuse_without_backward,
    seed_option,
    several,
    tile_sizes_option,
    tilings,
)
from cufa.cli.workload import (
    DIRECTIONS,
    Rung,
    Workload,
    place,
    problem_document,
    refuse_on_cpu,
    release_gpu_memory,
    to_gpu,
    to_host,
    use_gpu,
)
from cufa.kernels import KERNELS
from cufa.problem import Direction, Problem, one_of
from cufa.timing import Timing


@dataclass(frozen=True)
class _Defaults:
    """The default problem.

    Tokens and hidden size are constant over the sweep, so arrays have the same size at all lengths, as in
    FlashAttention's own benchmarks (16 k tokens, hidden size 2,048).
    """

    seqlens: tuple[int, ...]
    tokens: int
    hidden: int
    head_dim: int
    dtype: str


_ON_GPU = _Defaults((512, 1024, 2048, 4096, 8192, 16384), 16384, 2048, 128, "bfloat16")
_ON_CPU = _Defaults((128, 256, 512, 1024, 2048), 2048, 256, 64, "float32")

# The problem that each kernel must solve before it is timed: lengths that no tile divides, and a window that
# ends inside them.
_CHECKED_SEQLENS = (113, 203)
_CHECKED_WINDOW = 50


@dataclass(frozen=True)
class _Point:
    """One measurement: the requested tiles, in words, and the kernel and the tiles of the plan.

    `timing` is None if memory did not suffice; `note` says what for.
    """

    problem: Problem
    flops: int
    asked_tiles: str
    kernel: str
    tiles: Mapping[str, int]
    timing: Timing | None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return self.flops / self.timing.median / 1e12 if self.timing else None

    @property
    def gigabytes_per_second(self) -> float | None:
        return bytes_moved(self.problem) / self.timing.median / 1e9 if self.timing else None

    @property
    def length(self) -> str:
        """The length of queries and keys; if they differ, both, as in "1 x 4096"."""
        queries, keys = self.problem.seqlen_q, self.problem.seqlen_k
        return f"{queries}" if queries == keys else f"{queries} x {keys}"


@click.command("bench")
@click.option(
    "--seqlens",
    type=several(Count(min=0)),
    metavar="N[,...]",
    show_default="512 to 16384; CPU 128 to 2048",
    help="Lengths, separated by commas.",
)
@count_option("--seqlen-q", "Number of queries for all numbers of keys.", show_default="as keys")
@count_option("--tokens", "Sets batch to tokens / length.", least=1, show_default="16384; CPU 2048")
@count_option("--hidden", "Sets heads to hidden / head dim.", least=1, show_default="2048; CPU 256")
@count_option("--batch", "Batch size, instead of --tokens.")
@count_option("--heads", "Query heads, instead of --hidden.")
@count_option("--kv-heads", "KV heads.", show_default="--heads")
@count_option("--head-dim", "Head dim of queries and keys.", show_default="128; CPU 64")
@count_option("--value-dim", "Head dim of values.", show_default="--head-dim")
@click.option("--dtype", type=INPUT_DTYPE, help="Dtype of the arrays.", show_default="bfloat16; CPU float32")
@feature_options()
@click.option("--layout", type=LAYOUT, default="bshd", show_default=True, help="Order of the axes.")
@click.option(
    "--direction",
    type=click.Choice((*DIRECTIONS, "both")),
    show_default="--kernel's direction, else both if gradients exist",
    help="What to time.",
)
@click.option(
    "--kernel",
    "kernels",
    type=KERNEL,
    metavar="KERNEL",
    multiple=True,
    show_default="the fastest",
    help="Kernel to time. Repeatable, to compare.",
)
@tile_sizes_option
@arch_option
@backend_option
@count_option("--repeats", "Timed calls of each kernel.", least=1, show_default="about a second")
@seed_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (matplotlib).")
@json_option
def command(
    seqlens: tuple[int, ...] | None,
    direction: str | None,
    kernels: tuple[str, ...],
    tile: tuple[tuple[str, tuple[int, ...]], ...],
    arch: str | None,
    backend: str | None,
    features: FeatureOptions,
    layout: str,
    repeats: int | None,
    seed: int,
    plot: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Time attention over a sweep of sequence lengths.

    Each kernel is first checked on a small problem. Times are medians, on a GPU measured by CUDA events with
    a cold L2 cache. TFLOP/s count two matrix products forward and five backward, without scores outside
    --causal and --window, but with those that --mask and --mask-mod hide. GB/s count q, k, v, the results, a
    bias and a mask once, and all keys even with --seqused-k. With --varlen, one packed batch is timed instead
    of a sweep. With several tile sizes, those that do not fit are left out.

    Exits with 1 if a kernel is wrong, or if memory suffices for nothing.
    """
    if plot is not None:
        _check_plot(plot)
    for size, instead in (("tokens", "batch"), ("hidden", "heads")):
        if sizes[size] is not None and sizes[instead] is not None:
            raise output.Failure(f"--{instead} is instead of --{size}; give one of them")
    on_gpu = use_gpu(backend)
    defaults = _ON_GPU if on_gpu else _ON_CPU
    problems = _problems(seqlens, defaults, sizes, features)
    left_out_by = f"--direction {direction}" if direction else "--kernel"
    reason = without_gradients(problems[0])
    if direction is None and not kernels and reason is not None:
        direction, left_out_by = "forward", reason
    tiles = tilings(tile)
    rungs = _rungs(direction, kernels, tiles, arch)
    if all(way == "forward" for way, _ in rungs):
        refuse_without_backward(left_out_by, features)
    if not on_gpu:
        for _, rung in rungs:
            refuse_on_cpu(rung)
    posed = _described(problems[0], features, layout)
    for way, _ in rungs:
        posed.problem(way)  # refuse it by its own sizes, not by those of the problem that is checked
    rng = np.random.default_rng(seed)

    points: list[_Point] = []
    try:
        with output.progress(len(rungs) * (1 + len(problems))) as step:
            fitting, left_out = [], []
            for way, rung in rungs:
                step(f"checking {rung.kernel or way}")
                try:
                    _check(problems[0], features, way, rung, layout, on_gpu, rng)
                except output.Failure as failure:
                    if len(tiles) == 1 or isinstance(failure, output.Wrong):
                        raise
                    left_out.append(failure.message)
                else:
                    fitting.append((way, rung))
            for message in dict.fromkeys(left_out):
                output.say(f"left out: {message}", "yellow")
            if not fitting:
                raise output.Failure("none of these tile sizes fits")
            for problem in problems:
                workload, note = _workload(problem, features, layout, on_gpu, rng)
                for way, rung in fitting:
                    step(f"{problem.seqlen_k} {rung.kernel or way}")
                    if note:
                        points.append(_without_arrays(workload, way, rung, on_gpu, note))
                    else:
                        points.append(_measure(workload, way, rung, repeats))
                del workload
                if on_gpu:
                    release_gpu_memory()
    finally:  # nothing that was measured is lost; the progress bar has left its line
        if points:
            _report(on_gpu, features, layout, seed, points, plot, as_json)
    if not any(point.timing for point in points):
        raise click.exceptions.Exit(output.WRONG)


def _report(
    on_gpu: bool,
    features: FeatureOptions,
    layout: str,
    seed: int,
    points: list[_Point],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Plot before printing, since whoever reads the output may stop."""
    measured = any(point.timing for point in points)
    if plot is not None and measured:
        _plot(plot, points, place(on_gpu))
    if as_json:
        output.print_json(_document(on_gpu, features, layout, seed, points))
    else:
        _print(on_gpu, features, layout, points)
    if plot is not None:
        output.say(f"written to {plot}" if measured else f"--plot {plot}: nothing was measured to plot")


def _rungs(
    direction: str | None,
    kernels: tuple[str, ...],
    tiles: list[dict[str, int]],
    arch: str | None,
) -> list[tuple[Direction, Rung]]:
    """What to time, in the order of the table."""
    asked: Iterable[Direction]
    if direction in DIRECTIONS:
        asked = [way for way in DIRECTIONS if way == direction]
    elif direction is None and kernels:
        asked = [way for way in DIRECTIONS if any(KERNELS[name].direction == way for name in kernels)]
    else:
        asked = DIRECTIONS
    rungs: list[tuple[Direction, Rung]] = []
    for way in asked:
        named = [name for name in kernels if direction == way or KERNELS[name].direction == way]
        names: list[str | None] = [*named] or [None]
        rungs += [(way, Rung(name, each or None, arch)) for name in names for each in tiles]
    return rungs


def _problems(
    seqlens: tuple[int, ...] | None, defaults: _Defaults, sizes: dict[str, Any], features: FeatureOptions
) -> list[Problem]:
    """One problem for each length, or the single one of packed sequences."""
    if features.varlen is None:
        lengths = seqlens or defaults.seqlens
        return [as_asked(_problem(seqlen, defaults, sizes), features) for seqlen in lengths]
    refused = ["--seqlens"] if seqlens else []
    refused += [
        f"--{name.replace('_', '-')}" for name in ("tokens", "batch", "seqlen_q") if sizes[name] is not None
    ]
    if refused:
        raise output.Failure(f"{', '.join(refused)} cannot go with --varlen, which gives the sizes")
    return [as_asked(_problem(1, defaults, sizes), features)]


def _problem(seqlen: int, defaults: _Defaults, sizes: dict[str, Any]) -> Problem:
    def size(name: str, default: int) -> int:
        return default if sizes[name] is None else int(sizes[name])

    def parts(whole: str, default: int, part: int, what: str) -> int:
        if sizes[whole] is not None and sizes[whole] < part:
            raise output.Failure(f"--{whole} is {sizes[whole]}, which is less than one {what} of {part}")
        return max(1, size(whole, default) // max(1, part))

    head_dim = size("head_dim", defaults.head_dim)
    heads = size("heads", parts("hidden", defaults.hidden, head_dim, "head"))
    return Problem(
        direction="forward",
        dtype=sizes["dtype"] or defaults.dtype,
        batch=size("batch", parts("tokens", defaults.tokens, seqlen, "sequence")),
        seqlen_q=size("seqlen_q", seqlen),
        seqlen_k=seqlen,
        heads=heads,
        kv_heads=size("kv_heads", heads),
        head_dim=head_dim,
        value_dim=size("value_dim", head_dim),
    )


def _check(
    like: Problem,
    features: FeatureOptions,
    direction: Direction,
    rung: Rung,
    layout: str,
    on_gpu: bool,
    rng: np.random.Generator,
) -> None:
    """Raise Failure unless the kernel solves a small problem like this one."""
    seqlen_q, seqlen_k = _CHECKED_SEQLENS
    if like.seqlen_q < like.seqlen_k:  # perhaps decoding, which has its own kernels
        seqlen_q = min(like.seqlen_q, seqlen_q)
    kv_heads = min(1, like.kv_heads)
    small = replace(
        like,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        kv_heads=kv_heads,
        heads=kv_heads * like.heads // max(1, like.kv_heads),
    )
    features = _checked_features(features)
    host = make_arrays(as_asked(small, features), features, layout, rng)
    workload = Workload(to_gpu(host) if on_gpu else host, on_gpu, features, layout=layout)
    workload.problem(direction)  # refuse wrong gradient options before computing
    results = workload.forward(rung if direction == "forward" else Rung(arch=rung.arch))
    if direction == "backward":
        results |= workload.backward(rung, results)
    verdict = workload.check(host, to_host(results), rng)
    wrong = [str(each) for each in verdict.comparisons if not each.ok]
    if wrong:
        name = rung.kernel or f"the {direction}"
        problem = workload.problem(direction)
        raise output.Wrong(f"{name} is wrong on {problem}, not timed: {'; '.join(wrong)}")


def _checked_features(features: FeatureOptions) -> FeatureOptions:
    """The features, with lengths that fit the small problem."""
    seqlen_q, seqlen_k = _CHECKED_SEQLENS
    if features.window is not None:
        left, right = (None if side is None else min(side, _CHECKED_WINDOW) for side in features.window)
        features = replace(features, window=(left, right))
    if features.varlen is not None:
        features = replace(features, varlen=((seqlen_q, seqlen_k), (0, 1), (seqlen_k, seqlen_q)))
    if features.seqused_k is not None:
        sequences = 1 if features.varlen is None else len(features.varlen)
        features = replace(features, seqused_k=(seqlen_q // 2,) * sequences)
    return features


def _described(problem: Problem, features: FeatureOptions, layout: str) -> Workload:
    """The problem with arrays that take no memory."""
    return Workload(make_arrays(problem, features, layout, None), False, features, layout=layout)


def _workload(
    problem: Problem, features: FeatureOptions, layout: str, on_gpu: bool, rng: np.random.Generator
) -> tuple[Workload, str]:
    """The problem with random arrays; if memory does not suffice, with described ones, and the reason."""
    try:
        arrays = make_arrays(problem, features, layout, rng)
        with output.memory_errors():
            return Workload(to_gpu(arrays) if on_gpu else arrays, on_gpu, features, layout=layout), ""
    except output.OutOfMemory as error:
        return _described(problem, features, layout), error.message


def _point(
    workload: Workload,
    direction: Direction,
    rung: Rung,
    planned: tuple[str, Mapping[str, int]],
    timing: Timing | None,
    note: str,
) -> _Point:
    """The point of a kernel and its tiles, which are `planned`."""
    problem, flops = workload.problem(direction), workload.flops(direction)
    return _Point(problem, flops, output.tiles(rung.tiles or {}), *planned, timing, note)


def _without_arrays(workload: Workload, direction: Direction, rung: Rung, on_gpu: bool, note: str) -> _Point:
    """The point of a problem whose arrays do not fit into memory."""
    kernel = (rung.kernel or "") if on_gpu else "numpy"
    return _point(workload, direction, rung, (kernel, {}), None, note)


def _measure(workload: Workload, direction: Direction, rung: Rung, repeats: int | None) -> _Point:
    plan = workload.plan(direction, rung) if workload.on_gpu else None
    planned = (plan.kernel, plan.tiles) if plan else ("numpy", {})
    timing, note = None, ""
    try:
        results = workload.forward(Rung(arch=rung.arch)) if direction == "backward" else None
        _, timing = workload.timed(direction, rung, results, repeats)
    except output.OutOfMemory as error:
        note = error.message
    return _point(workload, direction, rung, planned, timing, note)


def _document(
    on_gpu: bool, features: FeatureOptions, layout: str, seed: int, points: list[_Point]
) -> dict[str, Any]:
    return {
        "cufa": cufa.__version__,
        "backend": "cuda" if on_gpu else "numpy",
        "device": place(on_gpu),
        "options": asdict(features),
        "layout": layout,
        "seed": seed,
        "points": [
            {
                "kernel": point.kernel,
                "tiles": dict(point.tiles),
                **problem_document(point.problem),
                "features": list(point.problem.features.names),
                "seconds": point.timing.median if point.timing else None,
                "seconds_best": point.timing.best if point.timing else None,
                "repeats": point.timing.repeats if point.timing else 0,
                "tflops": point.tflops,
                "gigabytes_per_second": point.gigabytes_per_second,
                "note": point.note,
            }
            for point in points
        ],
    }


def _print(on_gpu: bool, features: FeatureOptions, layout: str, points: list[_Point]) -> None:
    first = points[0].problem
    heads = f"{first.heads}" if first.heads == first.kv_heads else f"{first.heads}/{first.kv_heads}"
    parts = [f"{first.dtypes}{' causal' if first.hides_later_keys else ''}", f"layout {layout}"]
    parts += [f"heads {heads}", f"head dim {first.dims}"]
    parts += ["values transposed"] if features.transposed_values else []
    parts += ["values in keys"] if features.values_in_keys else []
    names = dict.fromkeys(word for point in points for word in point.problem.features.words)
    names |= {"descales": None} if features.descale else {}
    parts += [f"with {', '.join(names)}"] if names else []
    output.print_prose(f"{place(on_gpu)}\n{', '.join(parts)}\n\n")
    by_tiles = len({point.asked_tiles for point in points}) > 1
    of_tiles = ("~tiles",) if by_tiles else ()
    length_of = "tokens" if first.features.packed else "seqlen"
    table = output.table((length_of, "batch", "<direction", "<kernel", *of_tiles, "time", "TFLOP/s", "GB/s"))
    length = points[0].length
    for point in points:
        if point.length != length:
            table.add_section()
            length = point.length
        measured = ("out of memory", "", "")
        if point.timing and point.tflops is not None and point.gigabytes_per_second is not None:
            measured = (
                output.seconds(point.timing.median),
                output.three_digits(point.tflops),
                output.three_digits(point.gigabytes_per_second),
            )
        ran = (point.problem.direction, point.kernel, *((point.asked_tiles,) if by_tiles else ()))
        table.add_row(length, str(point.problem.batch), *ran, *measured)
    output.print_table(table)


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise output.Failure("--plot needs matplotlib, which is not installed: pip install 'cufa[plot]'")
    files.check_folder("--plot", path)
    from matplotlib.figure import Figure

    suffixes = [f".{name}" for name in sorted(Figure().canvas.get_supported_filetypes())]
    if path.suffix.lower() not in suffixes:
        raise output.Failure(f"--plot {path}: the file's name must end with {one_of(suffixes)}")


def _plot(path: Path, points: list[_Point], where: str) -> None:
    """Plot TFLOP/s over the number of keys, with a line for each kernel and tile choice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if point.tflops is not None:
            label = ", ".join(filter(None, (point.kernel, point.problem.direction, point.asked_tiles)))
            lines.setdefault(label, []).append((point.problem.seqlen_k, point.tflops))
    for label, measured in lines.items():
        axes.plot(*zip(*measured, strict=True), marker="o", label=label)
    axes.set_xscale("symlog", base=2, linthresh=1)  # a length may be 0
    axes.set_ylim(bottom=0)
    lengths = sorted({point.problem.seqlen_k for point in points})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(where)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise output.Failure(f"--plot {path}: {error.strerror or error}") from error
