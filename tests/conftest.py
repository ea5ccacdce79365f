"""What all tests share: GPU tests are skipped where there is no GPU, and say so."""

import pytest

from cufa import device


def pytest_collection_modifyitems(items):
    if device.gpu_present():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))
