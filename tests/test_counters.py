"""Counters for calls: never the same for two that may run at once, without a GPU."""

import itertools
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from cufa import counters
from cufa.counters import COUNTER_BYTES, LEAST_FREE, RING, Counters


class CUDARuntimeError(RuntimeError):
    pass


class GPU:
    """CuPy's memory and streams as far as counters know them; attributes are for tests to set."""

    def __init__(self):
        self.capturing = False
        self.room = 10  # how many more rings fit
        self.pooled = 0  # how many the pool holds, unused
        self.zeroed = []
        self._asked = []  # what the GPU may still have to do
        self._addresses = itertools.count(1 << 20, 1 << 24)

    def memory(self, size):
        if self.room == 0:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.room -= 1
        return types.SimpleNamespace(ptr=next(self._addresses), size=size)

    def free_all_blocks(self):
        self.room, self.pooled = self.room + self.pooled, 0

    def memset(self, address, value, size, stream=0):
        self.not_captured(stream)
        self._asked.append((address, value, size))

    def synchronize(self, stream=0):
        self.not_captured(stream)
        self.zeroed += self._asked
        self._asked.clear()

    def not_captured(self, stream=0):
        """CUDA forbids to use the default stream or to wait for all of the GPU during a capture."""
        if self.capturing and stream == 0:
            raise CUDARuntimeError("cudaErrorStreamCaptureImplicit")


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    cuda = types.SimpleNamespace(
        Memory=gpu.memory,
        Stream=lambda *, non_blocking: types.SimpleNamespace(ptr=int(non_blocking)),
        runtime=types.SimpleNamespace(
            memset=gpu.memset,
            memsetAsync=gpu.memset,
            deviceSynchronize=gpu.synchronize,
            streamSynchronize=gpu.synchronize,
            streamIsCapturing=lambda stream: gpu.capturing,
        ),
    )
    cupy = types.SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: gpu)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(counters, "_of_devices", {})
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


def test_a_device_s_first_call_may_come_while_another_is_captured(gpu):
    gpu.capturing = True
    assert Counters().take(0)
    assert len(gpu.zeroed) == 1


def test_counters_get_memory_that_the_pool_does_not_use(gpu):
    gpu.room, gpu.pooled = 0, 1
    Counters()
    with pytest.raises(CUDARuntimeError, match="out of memory"):
        Counters()


def test_threads_that_begin_at_once_have_the_same_counters(gpu, monkeypatch):
    """A graph keeps its counter, so that no counters may go while there is a process."""
    start, memory = threading.Barrier(4), gpu.memory

    def allocate(size):
        time.sleep(0.05)
        return memory(size)

    def find(_):
        start.wait(timeout=10)
        return counters.of_device(3)

    monkeypatch.setattr(sys.modules["cupy"].cuda, "Memory", allocate)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(find, range(4)))) == 1
    assert counters.of_device(3) is not counters.of_device(4)
