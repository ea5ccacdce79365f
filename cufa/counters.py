"""Counters in GPU memory that are 0 when a launch begins, at no cost to the launch.

A kernel resets its counter to 0 when it ends. Each call takes the next counter of a ring, so that calls on
different streams have their own: a counter is reused only after more calls than a GPU can hold in its queues.
(A call that its stream holds back for longer would have to begin just beside the one that shares its
counter.) A call that is captured into a CUDA graph keeps its counter, since the graph may run at any time.
(Of executables made of the same graph only one may run at a time: they also share its workspace and output.)
When half of the ring is kept, it gets new counters.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

from cufa import driver

RING = 1 << 16
COUNTER_BYTES = 4
# A ring with fewer free counters gets new ones.
LEAST_FREE = RING // 2


class Counters:
    """The counters of CuPy's current device."""

    def __init__(self) -> None:
        """Allocate the counters once, and set them to 0 before any stream can use one."""
        import cupy

        self._lock = threading.Lock()
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._memory: list[Any] = []
        self._free: collections.deque[int] = collections.deque()
        self._add_ring()

    def take(self, stream: int) -> int:
        """Return the address of a counter for a call on that stream.

        Raises RuntimeError if call after call was captured and none was made between captures: during a
        capture, nothing can be allocated.
        """
        captured = self._is_capturing(stream)
        with self._lock:
            if not captured and len(self._free) < LEAST_FREE:
                self._add_ring()
            if captured and not self._free:
                raise RuntimeError(
                    f"{len(self._memory) * RING:,} calls were captured into CUDA graphs, and each keeps a "
                    "counter; call cufa.attention once outside of a capture, which makes room for more"
                )
            address = self._free.popleft()
            if not captured:
                self._free.append(address)
        return address

    def _add_ring(self) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        memory = driver.with_memory(lambda: cupy.cuda.Memory(RING * COUNTER_BYTES))
        # Neither the default stream nor the whole GPU may be used while another thread captures a call.
        stream = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(memory.ptr, 0, memory.size, stream.ptr)
        runtime.streamSynchronize(stream.ptr)
        self._memory.append(memory)
        self._free.extendleft(range(memory.ptr, memory.ptr + memory.size, COUNTER_BYTES))


_of_devices: dict[int, Counters] = {}
_making = threading.Lock()


def of_device(device_id: int) -> Counters:
    """The counters of this device, which must be CuPy's current one.

    They are made once, since graphs keep theirs for as long as there is a process.
    """
    with _making:
        if device_id not in _of_devices:
            _of_devices[device_id] = Counters()
        return _of_devices[device_id]
