#!/usr/bin/env python3
"""Seconds and megabytes that an installation takes, cufa's and its peers', for benchmarks/install.json.

Each goes into a fresh virtual environment of its own, one after the other, without pip's cache: what a user
waits for, and what is on the disk afterwards beyond an empty environment. Seconds depend on the network and
on how much is compiled on the spot; megabytes do not. Peers that build themselves with nvcc, as flash-attn
does where it has no wheel, are left out.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "install.json"))
# What brings it, and what one gets of attention.
INSTALLATIONS = {
    "cufa": [f"{ROOT}[cuda13]"],
    "PyTorch (FlashAttention-2, cuDNN, FlexAttention)": ["torch"],
    "flash-attn-4": ["torch", "flash-attn-4>=4.0.0b1"],
    "FlashInfer": ["flashinfer-python"],
    "JAX": ["jax[cuda13]"],
}


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def install(requirements: list[str]) -> dict[str, Any]:
    """Raises CalledProcessError if pip cannot install them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        before = size_of(Path(folder))
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        start = time.perf_counter()
        subprocess.run([*pip, "install", "-q", "--no-cache-dir", *requirements], check=True)
        seconds = time.perf_counter() - start
        listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True)
        versions = {row["name"]: row["version"] for row in json.loads(listed.stdout)}
        return {
            "seconds": seconds,
            "bytes": size_of(Path(folder)) - before,
            "packages": sorted(f"{name} {version}" for name, version in versions.items()),
        }


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(INSTALLATIONS)), default=tuple(INSTALLATIONS))
def main(only: tuple[str, ...]) -> None:
    installations = json.loads(RECORD.read_text())["installations"] if RECORD.exists() else {}
    for name in only:
        installations[name] = measured = install(INSTALLATIONS[name])
        print(f"{name}: {measured['seconds']:.0f} s, {measured['bytes'] / 1e6:,.0f} MB", flush=True)
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "installations": installations,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
