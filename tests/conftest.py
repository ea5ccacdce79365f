"""What all tests share: random numbers, and what is skipped on a machine that lacks what it needs."""

import hashlib
import os

import numpy as np
import pytest
from emulator import available

from cufa import device


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    emulated = [item for item in items if item.get_closest_marker("emulator") and item not in on_gpu]
    if not device.gpu_present():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
    # In CI these tests must run: there, no compiler is an error in each of them.
    if emulated and os.environ.get("CI") != "true" and not available():
        for item in emulated:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler to run kernels on the CPU"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Other numbers for every test, and the same in each of its runs."""
    return np.random.default_rng(int(hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16], 16))
