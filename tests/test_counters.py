"""Counters for calls: never the same for two that may run at once, without a GPU."""

import itertools
import sys
import types

import pytest

from cufa.counters import COUNTER_BYTES, LEAST_FREE, RING, Counters


@pytest.fixture
def gpu(monkeypatch):
    """CuPy's memory and streams as far as counters know them; `capturing` is for a test to set."""
    addresses = itertools.count(1 << 20, 1 << 24)
    gpu = types.SimpleNamespace(capturing=False, zeroed=[])
    cuda = types.SimpleNamespace(
        Memory=lambda size: types.SimpleNamespace(ptr=next(addresses), size=size),
        runtime=types.SimpleNamespace(
            memset=lambda address, value, size: gpu.zeroed.append((address, value, size)),
            deviceSynchronize=lambda: None,
            streamIsCapturing=lambda stream: gpu.capturing,
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return gpu


def test_counters_come_round(gpu):
    counters = Counters()
    first = [counters.take(0) for _ in range(RING)]
    assert len(set(first)) == RING
    assert [counters.take(0) for _ in range(RING)] == first
    ((start, value, size),) = gpu.zeroed
    assert value == 0
    assert set(first) == set(range(start, start + size, COUNTER_BYTES))


def test_graphs_keep_theirs_and_others_never_get_them(gpu):
    counters = Counters()
    kept = set()
    for _ in range(3):  # more in all than a ring has
        gpu.capturing = True
        kept.update(counters.take(0) for _ in range(RING - LEAST_FREE + 1))
        gpu.capturing = False
        assert kept.isdisjoint(counters.take(0) for _ in range(2 * RING))
    assert len(kept) == 3 * (RING - LEAST_FREE + 1)
    assert len(gpu.zeroed) > 1


def test_captures_without_an_end_are_refused_until_something_is_called(gpu):
    counters = Counters()
    gpu.capturing = True
    assert len({counters.take(0) for _ in range(RING)}) == RING
    with pytest.raises(RuntimeError, match=r"65,536 calls were captured .* call cufa.attention once outside"):
        counters.take(0)
    gpu.capturing = False
    counters.take(0)
    gpu.capturing = True
    counters.take(0)
