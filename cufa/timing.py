"""Times one call, on a GPU with CUDA events and on the CPU with the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cufa import device

T = TypeVar("T")

# How long to measure one function, and the fewest and the most calls.
BUDGET_SECONDS = 1.0
MIN_REPEATS = 3
MAX_REPEATS = 100
# A CPU call that takes this long is not repeated.
LONG_SECONDS = 5.0
# The GPU gets other work before a call for this many times the host's time of the call.
HOST_MARGIN = 2


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of `repeats`, the fastest and the slowest."""

    median: float
    best: float
    worst: float
    repeats: int


def time_gpu(function: Callable[[], T], *, repeats: int | None = None) -> tuple[T, Timing]:
    """Time what `function` puts on CuPy's current stream, with a cold L2 cache.

    Before each call, a buffer twice the size of L2 is written, outside of the time that two CUDA events
    around the call measure. The write, repeated if necessary, takes longer than the host needs to prepare the
    call. So the kernels are already queued when the write ends, and the time between the events is purely
    GPU time.

    Args:
        function: must not synchronize. A first call, which is not measured, compiles the kernels.
        repeats: number of calls to measure; None for as many as fit in `BUDGET_SECONDS`.

    Returns:
        What the first call returned, and the times.

    Raises:
        GPUUnavailableError: there is no GPU that CuPy can use.
    """
    l2_bytes = device.current().l2_bytes
    import cupy

    stream = cupy.cuda.get_current_stream()
    result = function()
    stream.synchronize()
    buffer = cupy.empty(2 * l2_bytes, cupy.uint8)

    def elapsed(work: Callable[[], object], flushes: int, calls: int) -> list[float]:
        pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(calls)]
        for start, stop in pairs:
            for _ in range(flushes):
                buffer.data.memset_async(0, buffer.nbytes, stream)
            start.record()
            work()
            stop.record()
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(start, stop) / 1e3 for start, stop in pairs]

    (flush_seconds,) = elapsed(lambda: buffer.data.memset_async(0, buffer.nbytes, stream), 1, 1)
    host_start = time.perf_counter()
    function()
    host_seconds = time.perf_counter() - host_start
    flushes = 1 + int(HOST_MARGIN * host_seconds / flush_seconds)
    (once,) = elapsed(function, flushes, 1)
    return result, _timing(elapsed(function, flushes, repeats or _repeats(once)))


def time_cpu(function: Callable[[], T], *, repeats: int | None = None) -> tuple[T, Timing]:
    """Time `function` with the clock.

    Args:
        function: called once to warm up; if that takes `LONG_SECONDS` and `repeats` is None, this call is
            the only measurement.
        repeats: number of calls to measure; None for as many as fit in `BUDGET_SECONDS`.

    Returns:
        What the first call returned, and the times.
    """

    def elapsed() -> tuple[T, float]:
        start = time.perf_counter()
        result = function()
        return result, time.perf_counter() - start

    result, once = elapsed()
    if repeats is None and once >= LONG_SECONDS:
        return result, _timing([once])
    return result, _timing([elapsed()[1] for _ in range(repeats or _repeats(once))])


def _repeats(seconds: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(BUDGET_SECONDS / max(seconds, 1e-9))))


def _timing(seconds: list[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
