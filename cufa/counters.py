"""Counters in GPU memory that are 0 when a launch begins, at no cost to the launch.

A kernel that counts leaves its counter at 0. Each call takes another counter of a ring, so that calls on
different streams never share one: a counter comes round again only after more calls than any GPU holds in
its queues. A call that is captured into a CUDA graph keeps its counter, since the graph may run at any time.
"""

from __future__ import annotations

import collections
import functools
import threading

RING = 1 << 16
COUNTER_BYTES = 4


class _Ring:
    def __init__(self) -> None:
        import cupy

        # Memory that is never given back, zero before any stream can use it.
        self._memory = cupy.cuda.Memory(RING * COUNTER_BYTES)
        cupy.cuda.runtime.memset(self._memory.ptr, 0, RING * COUNTER_BYTES)
        cupy.cuda.runtime.deviceSynchronize()
        self._free = collections.deque(range(self._memory.ptr, self._memory.ptr + RING * COUNTER_BYTES, 4))
        self._lock = threading.Lock()
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._current_stream = cupy.cuda.get_current_stream

    def take(self) -> int:
        with self._lock:
            address = self._free.popleft()
            if not self._is_capturing(self._current_stream().ptr) or len(self._free) < RING // 2:
                self._free.append(address)
            return address


@functools.cache
def _ring_of(device_id: int) -> _Ring:
    return _Ring()


def take() -> int:
    """The address of a counter on CuPy's current device."""
    import cupy

    return _ring_of(cupy.cuda.runtime.getDevice()).take()
