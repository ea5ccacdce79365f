#!/usr/bin/env python3
"""Runs every kernel under compute-sanitizer on small problems with odd shapes.

usage: scripts/sanitize.py [TOOL ...]      memcheck, racecheck, initcheck, synccheck; the first two by default

Exits with 1 if a tool reports an error, with 2 if compute-sanitizer is not installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DEFAULT_TOOLS = TOOLS[:2]
REPORTED = 86  # what compute-sanitizer is told to exit with, so that it is no other failure
ROOT = Path(__file__).resolve().parent.parent


def main(tools: list[str]) -> int:
    unknown = set(tools) - set(TOOLS)
    if unknown:
        print(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    failed = [tool for tool in tools or DEFAULT_TOOLS if not passes(sanitizer, tool)]
    return 1 if failed else 0


def passes(sanitizer: str, tool: str) -> bool:
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED)]
    # The line of the source is what one wants to see of an error.
    search_path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"CUFA_NVRTC_OPTIONS": "-lineinfo", "PYTHONPATH": search_path}
    run = subprocess.run(
        [*command, sys.executable, __file__, "--problems"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (run.stdout + run.stderr).splitlines()
    if run.returncode != 0:
        print("\n".join(lines[:200]))
    summary = [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    print(f"{tool}: {'pass' if run.returncode == 0 else 'FAIL'} {' '.join(summary)}")
    return run.returncode == 0


def run_problems() -> None:
    """Every kernel, with and without a causal mask, on shapes that leave every kind of remainder."""
    import cupy

    import cufa
    from cufa.kernels import KERNELS

    cupy.cuda.set_allocator(None)  # a pool would hide accesses past the end of an array
    rng = np.random.default_rng()
    for dtype, head_dim, value_dim in (("float16", 40, 24), ("float32", 33, 65), ("float64", 16, 16)):
        shapes = {"q": (2, 75, 4, head_dim), "k": (2, 91, 2, head_dim), "v": (2, 91, 2, value_dim)}
        q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes.values())
        for causal in (False, True):
            out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True)
            for name, kernel in KERNELS.items():
                if dtype not in kernel.dtypes:
                    continue
                if kernel.direction == "forward":
                    cufa.attention(q, k, v, causal=causal, kernel=name, return_lse=True)
                else:
                    cufa.attention_backward(out, q, k, v, out, lse, causal=causal, kernel=name)
        for passes in (2, 3):
            cufa.softmax(q, passes=passes)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    if sys.argv[1:] == ["--problems"]:
        run_problems()
    else:
        sys.exit(main(sys.argv[1:]))
