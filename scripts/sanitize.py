#!/usr/bin/env python3
"""Runs every kernel under compute-sanitizer on small problems with odd shapes, with features and without.

TOOLS are memcheck, racecheck, initcheck and synccheck; the first two by default. Exits with 1 if a tool
reports an error, with 2 if compute-sanitizer is not installed.

racecheck and synccheck are for kernels without barriers in memory (mbarrier). Unless --kernel names them,
they pass over the Hopper kernels and over float64 on tensor cores where warps hand tiles on. There one lane
arrives for its warp after __syncwarp, and racecheck takes the others for not ordered: it says that what they
read races with the next copy, and says nothing if every lane arrives (tried on an H200, with both). synccheck
wants each phase waited for. The emulator knows those barriers, copies and products: tests/test_emulator.py
runs all rungs as on a Hopper, with its search for races.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DEFAULT_TOOLS = TOOLS[:2]
REPORTED = 86  # what compute-sanitizer is told to exit with, so that it is no other failure
MISSING = 2
# What reports what is right as an error, where barriers lie in memory.
NOT_FOR_BARRIERS = ("racecheck", "synccheck")
SHOWN_LINES = 200
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cufa.kernels import KERNELS, HopperKernel  # noqa: E402 - from this checkout, installed or not

# dtype, head_dim, value_dim, then the options of the call.
PROBLEMS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("float16", 40, 24, {}),
    ("float16", 128, 128, {"causal": True}),
    ("bfloat16", 64, 64, {"window": (70, 9), "softcap": 2.0, "sink": True}),
    ("bfloat16", 256, 200, {"causal": True}),
    ("bfloat16", 128, 72, {"causal": True, "deterministic": True}),
    ("bfloat16", 64, 64, {"causal": True, "packed": True}),
    ("bfloat16", 320, 264, {"causal": True}),
    ("float32", 33, 65, {}),
    ("float32", 33, 65, {"causal": True}),
    ("float32", 33, 65, {"causal": True, "deterministic": True}),
    ("float32", 136, 200, {"causal": True, "deterministic": True}),
    ("float64", 16, 16, {"causal": True}),
    ("float16", 64, 64, {"causal": True, "bias": True}),
    ("float16", 64, 64, {"score_mod": True}),
    ("bfloat16", 128, 72, {"causal": True, "score_mod": True}),
    ("float32", 64, 40, {"softcap": 2.0, "bias": True}),
    ("float16", 64, 64, {"mask": True}),
    ("bfloat16", 128, 128, {"packed": True, "mask_mod": True}),
)
SEQLEN_Q, SEQLEN_K, HEADS, KV_HEADS = 133, 197, 4, 2


def passes(sanitizer: str, tool: str, kernels: tuple[str, ...]) -> bool:
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED)]
    if tool == "memcheck":  # or it would report what the driver is asked for and does not have
        command += ["--report-api-errors", "no"]
    # The line of the source is what one wants to see of an error.
    search_path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"CUFA_NVRTC_OPTIONS": "-lineinfo", "PYTHONPATH": search_path}
    chosen = [argument for name in kernels for argument in ("--kernel", name)]
    if tool in NOT_FOR_BARRIERS and not kernels:
        chosen.append("--no-barriers")
    run = subprocess.run(
        [*command, sys.executable, __file__, "--problems", *chosen],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (run.stdout + run.stderr).splitlines()
    if run.returncode != 0:
        print("\n".join(lines[:SHOWN_LINES]))
    summary = [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    print(f"{tool}: {'pass' if run.returncode == 0 else 'FAIL'} {' '.join(summary)}", flush=True)
    return run.returncode == 0


def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[h, q_idx - kv_idx + (SEQLEN_K - 1)]


def see_some(b: Any, h: Any, q_idx: Any, kv_idx: Any, seen: Any) -> Any:
    return seen[kv_idx]


def arguments_of(
    dtype: str, head_dim: int, value_dim: int, options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """q, k and v on the GPU, and the other arguments of the call."""
    import cupy

    import cufa

    rng = np.random.default_rng(0)
    heads = ((SEQLEN_Q, HEADS, head_dim), (SEQLEN_K, KV_HEADS, head_dim), (SEQLEN_K, KV_HEADS, value_dim))
    options = dict(options)
    batch = () if options.pop("packed", False) else (2,)
    if not batch:
        ends = [(0, 0, SEQLEN // 3, SEQLEN) for SEQLEN in (SEQLEN_Q, SEQLEN_K)]
        options |= {
            name: cupy.asarray(np.array(each, np.int32))
            for name, each in zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)
        }
    if options.pop("sink", False):
        options["sink"] = cupy.asarray(rng.standard_normal(HEADS).astype(np.float32))
    if options.pop("bias", False):
        scores = rng.standard_normal((1, HEADS, SEQLEN_Q, SEQLEN_K))
        options["bias"] = cupy.asarray(scores.astype(dtype))
    if options.pop("score_mod", False):
        # As many elements as there are distances: past the ends there are none.
        table = cupy.asarray(rng.standard_normal((HEADS, SEQLEN_Q + SEQLEN_K - 1)).astype(np.float32))
        options["score_mod"] = cufa.ScoreMod(by_distance, table)
    # Nobody sees some of the keys, in whole tiles and in parts of them.
    seen = rng.random(SEQLEN_K) < 0.7
    seen[SEQLEN_K // 3 : SEQLEN_K // 2] = False
    if options.pop("mask", False):
        options["mask"] = cupy.asarray(np.broadcast_to(seen, (1, 1, SEQLEN_Q, SEQLEN_K)).copy())
    if options.pop("mask_mod", False):
        options["mask_mod"] = cufa.MaskMod(see_some, cupy.asarray(seen))
    tensors = [cupy.asarray(rng.standard_normal((*batch, *shape)).astype(dtype)) for shape in heads]
    return tensors, options


def differentiated(options: dict[str, Any]) -> tuple[str, ...]:
    """What beside q, k and v has a gradient."""
    return tuple(name for name in ("bias", "score_mod") if name in options)


def supported(
    kernels: tuple[str, ...], tensors: list[Any], options: dict[str, Any], deterministic: bool
) -> Iterator[tuple[str, bool]]:
    """Those of the kernels that can run this call here, and whether they do it with barriers in memory."""
    import cufa

    for name in kernels:
        kernel = KERNELS[name]
        asked = {"backward": True, "gradients": differentiated(options), "deterministic": deterministic}
        if kernel.direction == "forward":
            asked = {}
        try:
            plan = cufa.plan(*tensors, kernel=name, **asked, **options)
        except ValueError:
            continue
        yield name, isinstance(kernel, HopperKernel) or ("HANDS_OVER", 1) in plan.variant.macros


def run_problems(kernels: tuple[str, ...], no_barriers: bool) -> None:
    """Every kernel on the problems that it supports, and the softmax."""
    import cupy

    import cufa

    cupy.cuda.set_allocator(None)  # a pool would hide accesses past the end of an array
    ran = set()
    for dtype, head_dim, value_dim, of_call in PROBLEMS:
        tensors, options = arguments_of(dtype, head_dim, value_dim, of_call)
        deterministic = options.pop("deterministic", False)
        # By plain stores: of those by the copy engine initcheck does not know.
        out, lse = cufa.attention(*tensors, **options, return_lse=True, kernel="fwd_4_flash_v2")
        for name, has_barriers in supported(kernels, tensors, options, deterministic):
            if has_barriers and no_barriers:
                continue
            ran.add(name)
            if KERNELS[name].direction == "forward":
                cufa.attention(*tensors, **options, kernel=name, return_lse=True)
            else:
                asked: dict[str, Any] = {f"return_d{name}": True for name in differentiated(options)}
                asked |= options | {"deterministic": deterministic, "kernel": name}
                cufa.attention_backward(out, *tensors, out, lse, **asked)
        for passes in (2, 3):
            cufa.softmax(tensors[0], passes=passes)
    cupy.cuda.Device().synchronize()
    print(f"ran {', '.join(sorted(ran))}")


@click.command(help=__doc__)
@click.argument("tools", type=click.Choice(TOOLS), nargs=-1)
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True)
@click.option("--problems", is_flag=True, hidden=True)
@click.option("--no-barriers", is_flag=True, hidden=True)
def main(tools: tuple[str, ...], kernels: tuple[str, ...], problems: bool, no_barriers: bool) -> None:
    if problems:
        run_problems(kernels or tuple(KERNELS), no_barriers)
        return
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        sys.exit(MISSING)
    # Most of their time the tools wait for the CPU.
    with ThreadPoolExecutor() as pool:
        passed = list(pool.map(lambda tool: passes(sanitizer, tool, kernels), tools or DEFAULT_TOOLS))
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
