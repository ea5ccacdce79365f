#!/usr/bin/env python3
"""Measures what run-time compilation and a call cost: seconds to compile, first calls, host time.

Prints one JSON document.

Compiling is measured with an empty cache, each variant on a core of its own, for CUFA_ARCH, else for the
GPU's arch or, without one, the H200's; the calls are measured where there is a GPU.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# NVRTC has a cache of its own, which would answer for what the tests compiled.
os.environ["CUDA_CACHE_DISABLE"] = "1"

import click
import numpy as np

import cufa
from cufa import arrays, device, jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.problem import Problem

DTYPES = "bfloat16", "float32", "float64", "float8_e4m3fn"
VARIANTS = [(dtype, dim) for dtype in DTYPES for dim in (64, 128, 256)]
CALLS, ROUNDS = 200, 30


def compile_seconds() -> dict[str, float]:
    """Seconds for each kernel, of the slowest of its variants."""
    arch = os.environ.get("CUFA_ARCH") or (None if arrays.gpu_usable() else "sm_90a")
    target = device.target(arch, for_compile_only=True)
    problems = [
        (name, problem)
        for name, kernel in KERNELS.items()
        for dtype, dim in VARIANTS
        for problem in [Problem(kernel.direction, dtype, 2, 4096, 4096, 8, 8, dim, dim, causal=True)]
        if kernel.unsupported(problem, target) is None
    ]
    cores = sorted(os.sched_getaffinity(0))
    workers = max(1, len(cores) // 2)  # the others are left to the machine
    with get_context("spawn").Manager() as manager:
        free = manager.Queue()
        for core in cores[:workers]:
            free.put(core)
        with ProcessPoolExecutor(workers, get_context("spawn"), take_a_core, (free,)) as pool:
            seconds = pool.map(seconds_to_compile, *zip(*problems, strict=True), [target] * len(problems))
            slowest: dict[str, float] = {}
            for (name, _), each in zip(problems, seconds, strict=True):
                slowest[name] = max(slowest.get(name, 0), each)
    return slowest


def take_a_core(free: Any) -> None:
    os.sched_setaffinity(0, {free.get()})


def seconds_to_compile(name: str, problem: Problem, target: Device) -> float:
    build = jit.build(make_plan(problem, target, name).variant)
    assert not build.cached
    return build.seconds


def first_call() -> dict[str, float]:
    """Milliseconds of this process's first call and of a later one, each until the GPU is done."""
    import cupy

    rng = np.random.default_rng()
    q, k, v = (cupy.asarray(rng.standard_normal((1, 512, 8, 64)).astype(np.float16)) for _ in range(3))
    cupy.cuda.Device().synchronize()

    def call() -> float:
        start = time.perf_counter()
        cufa.attention(q, k, v, causal=True)
        cupy.cuda.Device().synchronize()
        return (time.perf_counter() - start) * 1e3

    return {"first_ms": call(), "later_ms": statistics.median(call() for _ in range(20))}


def host_microseconds() -> dict[str, float]:
    """What a call keeps the host busy, the GPU left to work: median over rounds in which all take turns."""
    import cupy

    rng = np.random.default_rng()
    shape = (1, 64, 2, 64)
    q, k, v, dout = (cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for _ in range(4))
    out, lse = cufa.attention(q, k, v, return_lse=True)
    cache = cupy.zeros((1, ROUNDS * CALLS, *shape[2:]), cupy.float16)
    lengths = itertools.count(1)

    def with_another_key() -> Any:
        keys = cache[:, : next(lengths)]
        return cufa.attention(q[:, :1], keys, keys)

    calls = {
        "attention": lambda: cufa.attention(q, k, v),
        "attention, out given": lambda: cufa.attention(q, k, v, out=out),
        "attention, return_lse": lambda: cufa.attention(q, k, v, return_lse=True),
        "attention_backward": lambda: cufa.attention_backward(dout, q, k, v, out, lse),
        "attention, of one key more each time": with_another_key,
    }
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(ROUNDS), calls.items()):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds[name].append((time.perf_counter() - start) / CALLS * 1e6)
        cupy.cuda.Device().synchronize()
    return {name: statistics.median(times) for name, times in rounds.items()}


def first_call_of_a_process() -> dict[str, float]:
    command = [sys.executable, __file__, "--first-call"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@click.command(help=__doc__)
@click.option("--first-call", "only_first_call", is_flag=True, help="Measure that alone, in this process.")
def main(only_first_call: bool) -> None:
    if only_first_call:
        print(json.dumps(first_call()))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUFA_CACHE_DIR"] = folder
        report: dict[str, object] = {"nvrtc": list(jit.nvrtc_version()), "compile_seconds": compile_seconds()}
        if arrays.gpu_usable():
            report["cold_cache"] = first_call_of_a_process()
            warm = [first_call_of_a_process() for _ in range(5)]
            report["warm_cache"] = min(warm, key=lambda times: times["first_ms"])
            report["warm_cache_runs"] = warm
            report["host_us"] = host_microseconds()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
