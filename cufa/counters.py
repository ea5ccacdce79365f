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
# Graphs may keep this many for good; those after them share theirs with calls that are long over by then.
MOST_KEPT = RING // 2


class Counters:
    """The counters of CuPy's current device."""

    def __init__(self) -> None:
        """Allocate them, once and for all, and make them 0 before any stream can use one."""
        import cupy

        size = RING * COUNTER_BYTES
        self._memory = cupy.cuda.Memory(size)
        cupy.cuda.runtime.memset(self._memory.ptr, 0, size)
        cupy.cuda.runtime.deviceSynchronize()
        first = self._memory.ptr
        self._free = collections.deque(range(first, first + size, COUNTER_BYTES))
        self._lock = threading.Lock()
        self._current_stream = cupy.cuda.get_current_stream
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing

    def take(self) -> int:
        """The address of a counter for a call on CuPy's current stream."""
        captured = self._is_capturing(self._current_stream().ptr)
        with self._lock:
            address = self._free.popleft()
            if not captured or len(self._free) < RING - MOST_KEPT:
                self._free.append(address)
        return address


@functools.cache
def of_device(device_id: int) -> Counters:
    """The counters of that device, which must be CuPy's current one."""
    return Counters()
