#!/usr/bin/env python3
"""Times cufa and its peers on one GPU, in one process and in turn, and writes benchmarks/peers.json.

Peers are what PyTorch brings: FlashAttention-2, cuDNN, memory-efficient attention, which alone has float32,
and FlexAttention; and, if it is installed, flash-attn-4 (flash_attn.cute). FlexAttention is compiled by
torch.compile for each problem, and its block mask is made beforehand; neither counts. `cufa` is the kernel
that it chooses; others of its kernels take its place if they are asked for. Each problem has 16,384 tokens
and 2,048 hidden; all libraries get the same inputs, normal random ones. A step is the forward and the
backward after it, as training has them. A round times one call of each with the L2 cache written over in
between; what counts is the median over the rounds. TFLOP/s count two products forward and five backward,
4 B H S^2 D and 10 B H S^2 D if values have no head dim of their own, and half of that if causal. With dropout
each library drops others, so that results are not compared; flash-attn-4 and FlexAttention have none.

Beside that, unless others of cufa's kernels are asked for: the time of each kernel that a backward launches,
and how long a call keeps the host busy.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import click
from peer_problems import DETERMINISTIC, shape_of, work_of
from rich.console import Console
from rich.progress import track

import cufa
from cufa import device, jit
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.problem import Direction, Problem

try:
    import cupy
    import torch
    from peer_calls import DTYPES, FLASH_ATTN_4, PEER_NAMES, Call, peers_of, version_of
    from torch.profiler import ProfilerActivity, profile
except ImportError as error:
    sys.exit(f"{Path(sys.argv[0]).name} needs a GPU, CuPy and PyTorch: {error}")

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "peers.json"))
# What is written between calls: far more than an L2 cache, and for longer than any library's host needs for a
# call, so that it is the GPU that is timed.
FLUSH_BYTES = 1 << 32
PROFILED_CALLS = 5
BOTH: tuple[Direction, ...] = ("forward", "backward")
# So small that the GPU is always ahead of the host.
HOST_SHAPE, HOST_ROUNDS, HOST_CALLS = (1, 64, 2, 64), 20, 100
# Of the largest value: a wrong result differs by as much as values do, a right one in 16 bits' last places.
MAX_ERROR = 0.03


def require_gpu() -> None:
    """Exit with a message if there is no GPU."""
    try:
        device.current()
    except cufa.GPUUnavailableError as error:
        sys.exit(f"{Path(sys.argv[0]).name} needs a GPU: {error}")


def compile_ahead(problems: Iterable[Problem]) -> None:
    """Compile the kernels for these on all cores, instead of each when it is first called."""
    build_all(
        make_plan(replace(problem, direction=direction), device.current()).variant
        for problem in problems
        for direction in BOTH
    )


def build_all(variants: Iterable[jit.Variant]) -> None:
    """Compile these on all cores, each once."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(jit.build, set(variants)):
            pass


def calls_of(
    dtype: str,
    shape: tuple[int, int, int, int],
    value_dim: int,
    causal: bool,
    kernels: Collection[str],
    peers: Collection[str],
    dropout_p: float = 0,
) -> dict[str, dict[str, Call]]:
    """For each part of a training step, a call of each library; of cufa, of each kernel that is asked for."""
    shapes = shape, shape, (*shape[:3], value_dim), (*shape[:3], value_dim)
    q, k, v, dout = (torch.randn(each, dtype=getattr(torch, dtype), device="cuda") for each in shapes)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v, dout)]
    options = {"causal": causal, "dropout_p": dropout_p}
    calls = kernel_calls(*arrays, kernels, **options) if kernels else cufa_calls(*arrays, **options)
    outs = {name: attend()[0] for name, attend in calls.get("forward", {}).items()}
    for name, attend, arguments in peers_of(dtype, (q, k, v), causal, peers, dropout_p):
        differentiate = functools.partial(torch.autograd.grad, inputs=arguments, grad_outputs=dout)
        result = attend()
        if not dropout_p:
            for other, out in outs.items():
                check_alike(other, out, name, result)
        of_peer: dict[str, Call] = {
            "forward": attend,
            "backward": functools.partial(differentiate, result, retain_graph=True),
            "step": lambda attend=attend, differentiate=differentiate: differentiate(attend()),
        }
        for direction, of_direction in calls.items():
            of_direction[name] = of_peer[direction]
    return calls


def kernel_calls(
    q: Any, k: Any, v: Any, dout: Any, kernels: Collection[str], **options: Any
) -> dict[str, dict[str, Call]]:
    """A call of each kernel in its direction."""
    attend = functools.partial(cufa.attention, q, k, v, return_lse=True, **options)
    differentiate = functools.partial(cufa.attention_backward, dout, q, k, v, *attend(), **options)
    calls: dict[str, dict[str, Call]] = {}
    for name in kernels:
        direction = KERNELS[name].direction
        call = attend if direction == "forward" else differentiate
        calls.setdefault(direction, {})[name] = functools.partial(call, kernel=name)
    return calls


def cufa_calls(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> dict[str, dict[str, Call]]:
    """Calls of what cufa chooses."""
    attend = functools.partial(cufa.attention, q, k, v, return_lse=True, **options)
    differentiate = functools.partial(cufa.attention_backward, dout, q, k, v, **options)
    results = attend()
    calls: dict[str, dict[str, Call]] = {
        "forward": {"cufa": attend},
        "backward": {
            "cufa": functools.partial(differentiate, *results),
            DETERMINISTIC: functools.partial(differentiate, *results, deterministic=True),
        },
        "step": {"cufa": lambda: differentiate(*attend())},
    }
    return calls


def check(calls: dict[str, dict[str, Call]]) -> None:
    """That O, which is the first result of a forward, and all gradients of other libraries are cufa's."""
    for direction, call in calls["cufa"].items():
        ours = arrays_of(direction, call)
        for name in calls_in(direction, calls).keys() - {"cufa"}:
            for actual, expected in zip(ours, arrays_of(direction, calls[name][direction]), strict=True):
                check_alike("cufa", actual, name, expected)


def calls_in(direction: str, calls: dict[str, dict[str, Call]]) -> dict[str, Call]:
    """Those of the libraries that take this direction."""
    return {library: each[direction] for library, each in calls.items() if direction in each}


def arrays_of(direction: str, call: Call) -> list[Any]:
    """What is to be compared of a call's result."""
    result = call()
    results = result if isinstance(result, tuple) else (result,)
    if direction == "forward":
        return [results[0]]
    return [array for each in results for array in (each if isinstance(each, tuple) else (each,))]


def check_alike(name: str, array: Any, other: str, expected: Any, max_error: float = MAX_ERROR) -> None:
    """That two libraries' arrays are the same but for rounding."""
    ours, theirs = (
        (x.detach() if isinstance(x, torch.Tensor) else torch.from_dlpack(x)).float()
        for x in (array, expected)
    )
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < max_error, f"{name} and {other} differ by {error:.3f} of the largest value"


def times_of(calls: dict[str, Call], rounds: int, flush: Callable[[int], object]) -> dict[str, float]:
    """Seconds of each call, the median over rounds in which all take turns, each after a flush of L2."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):  # the first compiles and warms up
        for name, call in calls.items():
            flush(round_)
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if round_:
                seconds[name].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_problems(
    record: Path,
    problems: Sequence[tuple[dict[str, Any], Callable[[], dict[str, dict[str, Call]]]]],
    rounds: int,
    told: dict[str, Any],
    unchecked: Collection[str] = (),
) -> None:
    """Time both directions of each problem and record them, with what is `told` of all problems.

    A problem is what the record says of it, and what makes the calls of each library. The `unchecked` are not
    compared with cufa's results.
    """
    require_gpu()
    torch.manual_seed(0)
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    points: list[dict[str, Any]] = []
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        tracked = track(problems, console=Console(stderr=True), transient=True)
        for done, (described, make_calls) in enumerate(tracked, 1):
            calls = make_calls()
            check({library: each for library, each in calls.items() if library not in unchecked})
            for direction in calls["cufa"]:
                seconds = times_of(calls_in(direction, calls), rounds, flush.fill)
                points.append(described | {"direction": direction, "seconds": seconds})
                print(points[-1], flush=True)
            write_record(record, done, len(problems), {**told, "points": points})
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()


def parts_of(call: Call) -> dict[str, float]:
    """Seconds of each of cufa's kernels that a call launches, the median over some calls.

    One may be launched while the one before still runs and wait for it, so that together they are longer than
    the call.
    """
    entries = {entry for kernel in KERNELS.values() for entry in kernel.entries}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.name in entries:
            seconds.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    return {name: statistics.median(values) for name, values in seconds.items()}


def host_times() -> dict[str, dict[str, float]]:
    """Microseconds that a call in bfloat16 keeps the host busy, the GPU left to work."""
    measured: dict[str, dict[str, float]] = {}
    for direction, calls in calls_of("bfloat16", HOST_SHAPE, HOST_SHAPE[-1], False, (), PEER_NAMES).items():
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, call) in product(range(HOST_ROUNDS), calls.items()):
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            rounds[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
            torch.cuda.synchronize()
        measured[direction] = {name: statistics.median(times) for name, times in rounds.items()}
    return measured


@click.command(help=__doc__)
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=("bfloat16",))
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128, 256))
@click.option("--value-dim", type=int, help="Of values, if it is another.")
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(512, 1024, 2048, 4096, 8192, 16384))
@click.option("--dropout", "dropout_p", type=float, default=0.0, help="Which part of the weights is dropped.")
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True)
@click.option("--peer", "peers", type=click.Choice(PEER_NAMES), multiple=True, default=PEER_NAMES)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    value_dim: int | None,
    seqlens: tuple[int, ...],
    dropout_p: float,
    kernels: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int,
) -> None:
    require_gpu()
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    problems = list(product(dtypes, head_dims, seqlens, (False, True)))
    measured: dict[str, Any] = {FLASH_ATTN_4: version_of(FLASH_ATTN_4), "points": [], "parts": []}
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for done, problem in enumerate(track(problems, console=Console(stderr=True), transient=True), 1):
            dtype, head_dim, seqlen, causal = problem
            described = {"dtype": dtype, "head_dim": head_dim, "causal": causal, "seqlen": seqlen}
            described |= {"value_dim": value_dim} if value_dim else {}
            described |= {"dropout_p": dropout_p} if dropout_p else {}
            shape = shape_of(seqlen, head_dim, value_dim)
            calls = calls_of(dtype, shape, value_dim or head_dim, causal, kernels, peers, dropout_p)
            for direction, of_direction in calls.items():
                work = work_of(direction, seqlen, causal, head_dim, value_dim)
                seconds = times_of(of_direction, rounds, flush.fill)
                tflops = {name: work / each / 1e12 for name, each in seconds.items()}
                measured["points"].append(described | {"direction": direction, "tflops": tflops})
                print(measured["points"][-1], flush=True)
            if not kernels:
                measured["parts"].append(described | {"seconds": parts_of(calls["backward"]["cufa"])})
            write_record(RECORD, done, len(problems), measured)
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()
        if not kernels:
            write_record(RECORD, len(problems), len(problems), measured | {"host_us": host_times()})


def write_record(path: Path, done: int, problems: int, measured: dict[str, Any]) -> None:
    """Write what was measured, and when, on what machine and with which versions.

    It is written after each problem, so that a run that was stopped leaves those that were done.
    """
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine(),
        "cufa": cufa.__version__,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cupy": cupy.__version__,
        "problems": problems,
        "problems_done": done,
        **measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


@functools.cache
def machine() -> dict[str, Any]:
    command = [sys.executable, "-m", "cufa", "info", "--json"]
    info = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    return {"gpu": device.current().name, "driver": info["driver"], "nvrtc": info["nvrtc"]}


if __name__ == "__main__":
    main()
