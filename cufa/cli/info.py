"""`cufa info`: shows what this machine can compute with."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

import cufa
from cufa import cache, device, driver, jit
from cufa.cli import output
from cufa.cli.cache import COMPILED_AGAIN, document
from cufa.cli.options import json_option
from cufa.messages import counted
from cufa.threads import cores

_INSTALL = "pip install 'cufa[cuda13]', or 'cufa[cuda12]' for an NVIDIA driver older than 580"
_INSTALL_COMPILER = "pip install 'cufa[compile]', to compile kernels without a GPU"
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")  # Linux only
_VARIABLES = ("CUFA_ARCH", "CUFA_CACHE_DIR", "CUFA_DEBUG", "CUFA_NVRTC_OPTIONS")


@click.command("info")
@json_option
def command(as_json: bool) -> None:
    """Show the GPU, the versions and the cache."""
    facts = _facts()
    if as_json:
        output.print_json(facts)
    else:
        _print(facts)


def _facts() -> dict[str, Any]:
    """All facts by name; None for what is missing, with the reason under "missing"."""
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {
        "cufa": cufa.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu_cores": cores(),
        "gpu": _gpu(missing),
        "driver": _driver(),
        "driver_cuda": _driver_cuda(),
        "cupy": _cupy(missing),
        "nvrtc": None,
        "nvrtc_archs": [],
        "known_archs": [str(known.arch) for known in device.KNOWN.values()],
        "cache": document(cache.info()),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "wrong": _wrong(),
        "missing": missing,
    }
    try:
        facts["nvrtc"] = "{}.{}".format(*jit.nvrtc_version())
        facts["nvrtc_archs"] = [f"sm_{number}" for number in jit.supported_archs()]
    except cufa.NVRTCMissingError:
        install = _INSTALL if device.gpu_present() else _INSTALL_COMPILER
        missing["nvrtc"] = f"not installed: {install}"
    return facts


def _wrong() -> dict[str, str]:
    """What is wrong with environment variables that calls would refuse."""
    wrong = {}
    readers: dict[str, Callable[[], object]] = {
        "CUFA_ARCH": device.target,
        "CUFA_DEBUG": jit.debug_options,
        "CUFA_NVRTC_OPTIONS": jit.extra_options,
    }
    for name, read in readers.items():
        try:
            read()
        except ValueError as error:
            wrong[name] = str(error)
        except cufa.GPUUnavailableError:
            pass  # the GPU's entry says so
    return wrong


def _gpu(missing: dict[str, str]) -> dict[str, Any] | None:
    try:
        gpu = device.current()
    except cufa.GPUUnavailableError as error:
        missing["gpu"] = str(error)
        return None
    return asdict(gpu) | {"arch": str(gpu.arch)}


def _cupy(missing: dict[str, str]) -> str | None:
    try:
        import cupy
    except ModuleNotFoundError:
        missing["cupy"] = f"not installed: {_INSTALL}"
        return None
    except Exception as error:  # whatever an installation raises that does not fit NumPy's, or is incomplete
        missing["cupy"] = f"cannot be imported ({error}): {_INSTALL}"
        return None
    version: str = cupy.__version__
    return version


def _driver_cuda() -> str | None:
    """The CUDA version that the driver can run, as in "13.0"."""
    if not device.gpu_present():
        return None
    return "{}.{}".format(*driver.cuda_version())


def _driver() -> str | None:
    """The driver's version, as in "580.95.05", if the system reports it."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER_VERSION_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[0] if found else None


def _print(facts: dict[str, Any]) -> None:
    missing = facts["missing"]
    table = output.key_values()
    table.add_row("cufa", f"{facts['cufa']} (Python {facts['python']}, NumPy {facts['numpy']})")
    table.add_row("CPU", f"{counted(facts['cpu_cores'], 'core')}")
    gpu = facts["gpu"]
    if gpu is None:
        table.add_row("GPU", missing["gpu"])
    else:
        table.add_row("GPU", f"{gpu['name']}, {gpu['arch']}, {gpu['sm_count']} SMs")
        for name, value in _limits(gpu):
            table.add_row(f"  {name}", value)
    if facts["driver_cuda"]:
        table.add_row("driver", f"{facts['driver'] or 'NVIDIA'}, for CUDA {facts['driver_cuda']}")
    table.add_row("CuPy", facts["cupy"] or missing["cupy"])
    table.add_row("NVRTC", facts["nvrtc"] or missing["nvrtc"])
    if facts["nvrtc"]:
        table.add_row("  compiles for", ", ".join(facts["nvrtc_archs"]))
    table.add_row("plans for", ", ".join(facts["known_archs"]))
    held = facts["cache"]
    table.add_row("cache", held["folder"])
    table.add_row("", f"{counted(held['entries'], 'kernel')}, {output.size(held['bytes'])}")
    if not held["writable"]:
        table.add_row("", f"not writable ({held['unwritable']}): {COMPILED_AGAIN}")
    for name, value in facts["environment"].items():
        table.add_row(name, facts["wrong"].get(name, value))
    output.print_table(table)


def _limits(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    block, sm = output.size(gpu["smem_per_block"]), output.size(gpu["smem_per_sm"])
    return [
        ("shared memory", f"{block} per block, {sm} per SM"),
        ("registers", f"{gpu['registers_per_sm']:,} per SM, {gpu['registers_per_thread']} per thread"),
        ("threads", f"{gpu['threads_per_sm']:,} per SM, in up to {gpu['blocks_per_sm']} blocks"),
        ("L2 cache", output.size(gpu["l2_bytes"])),
    ]
