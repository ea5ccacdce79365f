"""What scripts/gpu_check runs; it prints what it does and writes two records in benchmarks."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "gpu_check.json"))
SPEEDS_RECORD = RECORD.with_name("speeds.json")
WORKERS_OF_GPU = 14  # of 28 the memory pools leave too little for the largest tests
LONGEST_TEST = 300  # seconds; what takes longer hangs, and fails by its name instead of stopping all others
LADDERS = ("course", "small", "gpt2", "llama")
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numpy", "ml_dtypes")


def run(*arguments: str, threads: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter on something, BLAS with so many threads, and show what it says if it fails."""
    start = time.monotonic()
    limits = (
        {} if threads is None else dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    )
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | limits,
    )
    print(f"{' '.join(arguments)}: exit {done.returncode}, {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-3000:], sep="\n", flush=True)
    return done


def kernels_digest() -> str:
    """What changes whenever a kernel or a header does."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "cufa" / "kernels").rglob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def tests(chosen: Sequence[str]) -> dict[str, Any]:
    """What comes of the GPU tests that are chosen; `failures` are the names of those that fail."""
    # Nearly all of their time is compiling and what the CPU computes to compare with, on one core each;
    # pytest-benchmark, if it is there, does not work beside others.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")  # tests/conftest.py shares them out
    workers = str(min(WORKERS_OF_GPU * len(gpus), os.cpu_count() or 1))
    shared_out = "-n", workers, "--dist", "worksteal"
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
    watchdog = "-o", f"faulthandler_timeout={LONGEST_TEST}", "-o", "faulthandler_exit_on_timeout=true"
    done = run("-m", "pytest", *shared_out, *options, *watchdog, *chosen, threads=1)
    summary = (done.stdout.splitlines() or [""])[-1]
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", summary)
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return {
        "ok": done.returncode == 0,
        **{outcome: int(count) for count, outcome in counts},
        "failures": failures,
    }


def tests_again(before: dict[str, Any]) -> dict[str, Any]:
    """The same where those that failed before, with the same kernels, have run once more."""
    if not before["failures"]:
        return before
    again = tests(before["failures"])
    passed = before.get("passed", 0) + again.get("passed", 0)
    kept = {name: count for name, count in before.items() if name not in ("failed", "error")}
    return kept | {"failed": 0} | again | {"passed": passed, "skipped": before.get("skipped", 0)}


def sanitizer() -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"ok": None, "note": "compute-sanitizer is not installed"}
    done = run("scripts/sanitize.py")
    return {"ok": done.returncode == 0, "tools": done.stdout.splitlines()}


def ladder(name: str) -> Any:
    return json.loads(run("-m", "cufa", "ladder", "--preset", name, "--json").stdout)


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", flush=True)


@click.command(help=__doc__)
@click.option("--only-tests", is_flag=True, help="Measure no speeds.")
@click.option("--only-speeds", is_flag=True, help="Measure speeds, and run no tests.")
@click.option("--again", is_flag=True, help="Of the tests, run those that failed with the same kernels.")
def main(only_tests: bool, only_speeds: bool, again: bool) -> None:
    if only_tests and only_speeds:
        raise click.UsageError("--only-tests and --only-speeds leave nothing to do; give one of them.")
    info = json.loads(run("-m", "cufa", "info", "--json").stdout)
    if info["gpu"] is None:
        print(f"nothing to check: {info['missing']['gpu']}", file=sys.stderr)
        sys.exit(2)
    about = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "kernels_sha256": kernels_digest(),
        "versions": versions(),
        "info": info,
    }
    # What is right is found out side by side, what is fast afterwards, alone.
    right = only_speeds or check(about, again)
    if not only_tests:
        measure(about)
    sys.exit(0 if right else 1)


def check(about: dict[str, Any], again: bool) -> bool:
    """Whether all tests pass, or all that failed before."""
    if again:
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        if before.get("kernels_sha256") != about["kernels_sha256"]:
            sys.exit(f"{RECORD} is not of these kernels: it has no tests to run again")
        record = before | about | {"tests": tests_again(before["tests"])}
    else:
        with ThreadPoolExecutor() as pool:
            testing, sanitizing = pool.submit(tests, ["tests"]), pool.submit(sanitizer)
        record = about | {"tests": testing.result(), "sanitizer": sanitizing.result()}
    write(RECORD, record)
    return record["tests"]["ok"] and record["sanitizer"]["ok"] is not False


def measure(about: dict[str, Any]) -> None:
    jit = json.loads(run("scripts/bench_jit.py").stdout)
    cpu = json.loads(run("scripts/bench_cpu.py", "--json").stdout)
    write(SPEEDS_RECORD, about | {"jit": jit, "cpu": cpu, "ladder": {name: ladder(name) for name in LADDERS}})


if __name__ == "__main__":
    main()
