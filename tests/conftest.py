"""What all tests share: random numbers, and what is skipped on a machine that lacks what it needs."""

import gc
import hashlib
import os
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from emulator import available

from cufa import device, jit
from cufa.problem import Features


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run all cases of tests marked `sampled`")


def pytest_configure(config):
    """A part of the tests, by file or keyword, runs with all cases. Workers get the option from here.

    Where CUDA_VISIBLE_DEVICES names several GPUs, each worker begins with another of them.
    """
    config.option.exhaustive |= config.args_source is config.ArgsSource.ARGS or bool(config.option.keyword)
    worker, visible = getattr(config, "workerinput", None), os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker and visible:
        gpus = visible.split(",")
        first = int(worker["workerid"].removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_collection_modifyitems(config, items):
    if not config.option.exhaustive:
        left_out = _left_out(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    emulated = [item for item in items if item.get_closest_marker("emulator") and item not in on_gpu]
    if not device.gpu_present():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
    # In CI these tests must run: there, no compiler is an error in each of them.
    if emulated and os.environ.get("CI") != "true" and not available():
        for item in emulated:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler to run kernels on the CPU"))


def _left_out(items) -> dict[pytest.Item, None]:
    """Of tests marked `sampled(step)`, the cases that do not run: of about `step`, all but one.

    One runs of each name among the parameters: of a kernel, an arch, a dtype, and of each feature in a set.
    """
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("gpu"):
            tests[item.path, item.originalname].append(item)
    left_out = {}
    for cases in tests.values():
        (step,) = cases[0].get_closest_marker("sampled").args
        # A diagonal of the table of parameters, not a column.
        kept = [case for i, case in enumerate(cases) if (i + i // step) % step == 0]
        names = {name for case in kept for name in _names(case)}
        for case in cases:
            if case not in kept and names.issuperset(_names(case)):
                left_out[case] = None
            names.update(_names(case))
    return left_out


def _names(case) -> set[str]:
    names = set()
    for value in case.callspec.params.values() if hasattr(case, "callspec") else ():
        if isinstance(value, Features):
            names.update(value.names)
        elif isinstance(value, str):
            names.add(value)
        elif isinstance(value, (set, frozenset)):
            names.update(value)
    return names


def pytest_collection_finish():
    """Let garbage collection leave out what stays until the end, thousands of tests: 6 % of the time."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Say with a failure which NVRTC there is: what it spills and warns of differs between its versions."""
    report = yield
    if report.failed:
        report.sections.append(("NVRTC", _nvrtc_version()))
    return report


def _nvrtc_version() -> str:
    try:
        return "version {}.{}".format(*jit.nvrtc_version())
    except jit.NVRTCMissingError as error:
        return str(error)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Other numbers for every test, and the same in each of its runs."""
    return np.random.default_rng(int(hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16], 16))


@pytest.fixture
def cupy() -> Any:
    """CuPy, with NaN in the memory that the next allocations will get."""
    cupy = pytest.importorskip("cupy")
    blocks = [cupy.full(size, np.nan, np.float32) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22)]
    del blocks
    return cupy


@pytest.fixture
def h200_properties() -> dict[str, Any]:
    """What CUDA's runtime says of an H200."""
    return {
        "name": b"NVIDIA H200",
        "major": 9,
        "minor": 0,
        "sharedMemPerBlockOptin": 232448,
        "sharedMemPerMultiprocessor": 233472,
        "reservedSharedMemPerBlock": 1024,
        "regsPerMultiprocessor": 65536,
        "maxThreadsPerMultiProcessor": 2048,
        "maxBlocksPerMultiProcessor": 32,
        "warpSize": 32,
        "multiProcessorCount": 132,
        "l2CacheSize": 62914560,
    }
