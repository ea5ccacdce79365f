"""A machine that is made to have no GPU and whose times are of few calls, and arrays in files."""

import numpy as np
import pytest
from command_line import WIDTH, draw

from cufa import arrays, device, timing


@pytest.fixture(autouse=True)
def machine(request, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    if request.node.get_closest_marker("gpu"):
        if not device.gpu_present():
            pytest.skip("no GPU")
    else:
        monkeypatch.setattr(device, "gpu_present", lambda: False)
        monkeypatch.setattr(arrays, "gpu_usable", lambda: False)
        monkeypatch.setattr(timing, "BUDGET_SECONDS", 0.0)


@pytest.fixture
def qkv():
    return draw(1, 2, 33, 4, 16), draw(2, 2, 47, 2, 16), draw(3, 2, 47, 2, 24)


@pytest.fixture
def files(qkv, tmp_path):
    """The options for q, k and v from .npy files."""
    options = []
    for name, array in zip("qkv", qkv, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    return options
