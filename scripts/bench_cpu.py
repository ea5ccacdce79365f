#!/usr/bin/env python3
"""Time and peak memory of the CPU path against standard NumPy attention of all heads at once, float32.

The standard backward pass starts from the P that its forward pass kept, the CPU path recomputes P.
Every measurement has a fresh process to itself. Time is the median of the repeats, after one call
that is not counted. Memory is by how much the process grew at its largest up to the end of that call
(VmHWM less VmRSS once there are inputs, so BLAS, the results and, of a backward, the forward that
prepares it are in it, and the inputs are not); Linux only.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: E741, N803, N806

import json
import math
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cufa import cpu

Array: TypeAlias = npt.NDArray[Any]

MIB = 2**20


@dataclass(frozen=True)
class Case:
    implementation: str
    direction: str
    heads: int
    seqlen: int
    head_dim: int
    causal: bool


@dataclass(frozen=True)
class Measurement:
    seconds: float
    peak_bytes: int | None


def standard_forward(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """O and P, which the backward pass reads again."""
    S = q @ k.swapaxes(1, 2)
    S *= 1 / math.sqrt(q.shape[2])
    if causal:
        S[:, np.triu(np.ones(S.shape[1:], bool), 1)] = -np.inf
    S -= S.max(axis=2, keepdims=True)
    P = np.exp(S, out=S)
    P /= P.sum(axis=2, keepdims=True)
    return P @ v, P


def standard_backward(
    dO: Array,
    q: Array,
    k: Array,
    v: Array,
    O: Array,
    P: Array,
) -> tuple[Array, Array, Array]:
    dS = dO @ v.swapaxes(1, 2)
    dS -= (dO * O).sum(axis=2, keepdims=True)
    dS *= P
    dS *= 1 / math.sqrt(q.shape[2])
    return dS @ k, dS.swapaxes(1, 2) @ q, P.swapaxes(1, 2) @ dO


def standard(case: Case, q: Array, k: Array, v: Array, dO: Array) -> Callable[[], Any]:
    """A call that computes the case; what a backward pass starts from is made here."""
    if case.direction == "forward":
        return lambda: standard_forward(q, k, v, case.causal)
    O, P = standard_forward(q, k, v, case.causal)
    return lambda: standard_backward(dO, q, k, v, O, P)


def tiled(case: Case, *arrays: Array) -> Callable[[], Any]:
    q, k, v, dout = (x.swapaxes(0, 1)[None] for x in arrays)
    options: dict[str, Any] = {
        "causal": case.causal,
        "softmax_scale": 1 / math.sqrt(case.head_dim),
    }
    out, lse = np.empty_like(q), np.empty((1, case.heads, case.seqlen), np.float32)
    if case.direction == "forward":
        return lambda: cpu.attention(q, k, v, out, lse, **options)
    cpu.attention(q, k, v, out, lse, **options)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    return lambda: cpu.attention_backward(dout, q, k, v, out, lse, *gradients, **options)


def measure(case: Case, repeats: int) -> Measurement:
    rng = np.random.default_rng(0)
    shape = (case.heads, case.seqlen, case.head_dim)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
    before = memory("VmRSS")
    prepare = standard if case.implementation == "standard" else tiled
    call = prepare(case, *arrays)
    call()
    peak = memory("VmHWM")
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    grown = None if before is None or peak is None else peak - before
    return Measurement(statistics.median(seconds), grown)


def memory(field: str) -> int | None:
    """Bytes of a field of /proc/self/status: VmRSS is resident now, VmHWM the most ever."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def in_fresh_process(case: Case, repeats: int) -> Measurement:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, case, repeats).result()


def table(results: dict[Case, Measurement]) -> Table:
    grid = Table(title="The CPU path against standard NumPy attention, float32")
    headings = "heads", "seqlen", "pass", "standard", "tiled", "speed-up", "standard peak", "tiled peak"
    for heading in headings:
        grid.add_column(heading, justify="right")
    for case, slow in results.items():
        if case.implementation == "tiled":
            continue
        fast = results[Case(**(asdict(case) | {"implementation": "tiled"}))]
        grid.add_row(
            str(case.heads),
            str(case.seqlen),
            case.direction,
            *(f"{x.seconds * 1e3:.1f} ms" for x in (slow, fast)),
            f"{slow.seconds / fast.seconds:.2f}x",
            *("-" if x.peak_bytes is None else f"{x.peak_bytes / MIB:.0f} MiB" for x in (slow, fast)),
        )
    return grid


@click.command(help=__doc__)
@click.option(
    "--heads",
    "shapes",
    type=(int, int),
    multiple=True,
    metavar="HEADS SEQLEN",
    default=((1, 4096), (1, 16384), (256, 64)),
    show_default=True,
    help="How many heads of which length.",
)
@click.option("--head-dim", type=int, default=64, show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    shapes: tuple[tuple[int, int], ...], head_dim: int, causal: bool, repeats: int, as_json: bool
) -> None:
    cases = [
        Case(implementation, direction, heads, seqlen, head_dim, causal)
        for (heads, seqlen), direction, implementation in product(
            shapes, ("forward", "backward"), ("standard", "tiled")
        )
    ]
    progress = track(cases, "Measuring", console=Console(stderr=True), transient=True)
    results = {case: in_fresh_process(case, repeats) for case in progress}
    if as_json:
        rows = [asdict(case) | asdict(measurement) for case, measurement in results.items()]
        click.echo(json.dumps({"numpy": np.__version__, "repeats": repeats, "results": rows}, indent=2))
    else:
        Console().print(table(results))


if __name__ == "__main__":
    main()
