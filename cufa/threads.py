"""Threads of the CPU path; BLAS uses one thread in each."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

import threadpoolctl

# More threads than this wait long for Python's lock, which each takes back after each of NumPy's operations.
# Then these should be long.
FEW_THREADS = 4

S = TypeVar("S")
T = TypeVar("T")


def in_forked_children(renew: Callable[[], object]) -> None:
    """Call `renew` in every child that this process forks.

    A child has only the thread that forked: it inherits what others were at, and locks that they held then.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_threads() -> int:
    """How many threads the CPU path may have: one per core, or as many as OMP_NUM_THREADS allows."""
    allowed = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores(), int(allowed)) if allowed.isdecimal() and int(allowed) > 0 else cores()


@functools.cache
def _blas() -> threadpoolctl.ThreadpoolController:
    """The BLAS library that NumPy has loaded; cached, since the lookup takes a millisecond."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def _set_threads(library: threadpoolctl.LibController, threads: int) -> None:
    """Set how many threads a BLAS library has, whichever thread set the number before.

    From threadpoolctl 3.8 on, one thread at a time controls OpenBLAS, and what others set has no effect.
    """
    release = getattr(library, "clear_controlling_thread", lambda force: None)
    release(force=True)
    library.set_num_threads(threads)
    release(force=True)  # whoever set the number before will set it again


class _OneBlasThread:
    """Limits BLAS to one thread while any call is inside, and then restores the previous number.

    The number is process-wide, and calls in several threads may end in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._before: list[tuple[threadpoolctl.LibController, int]] = []

    def enter(self, call: object) -> None:
        """Limit BLAS until the call leaves, which it must do even if an interrupt ends this."""
        with self._lock:
            if not self._inside:
                self._before = [(library, library.num_threads) for library in _blas().lib_controllers]
            self._inside.add(call)
            if len(self._inside) == 1:
                for library, _ in self._before:
                    _set_threads(library, 1)

    def leave(self, call: object) -> None:
        """Restore the number if no other call is inside; do nothing if this one is not."""
        with self._lock:
            if self._inside == {call}:
                self._restore()
            self._inside.discard(call)

    def renew(self) -> None:
        """Restore the number in a forked child, in which nobody is inside."""
        self._lock = threading.Lock()
        if self._inside:
            self._restore()
        self._inside.clear()

    def _restore(self) -> None:
        for library, threads in self._before:
            _set_threads(library, threads)


_one_blas_thread = _OneBlasThread()
in_forked_children(_one_blas_thread.renew)


# Set when the call that a thread works for is to end early; never, where a call has no threads.
_NEVER = threading.Event()
_stopping = contextvars.ContextVar("stopping", default=_NEVER)


def until_stopped(steps: Iterable[S]) -> Iterator[S]:
    """Yield the steps of a share; raise CancelledError before the next if the call is to end early."""
    stopping = _stopping.get()
    for step in steps:
        if stopping.is_set():
            raise CancelledError
        yield step


def in_threads(work: Callable[[S], T], shares: Iterator[S], threads: int) -> Generator[T, None, None]:
    """Yield work(share) for every share, in order.

    An error in one share, an interrupt, or the end of this iterator ends all of them: those that have begun
    when they ask `until_stopped` for their next step.

    BLAS uses one thread, however many there are here: otherwise the bits of results would depend on what
    other threads of the process compute meanwhile.
    """
    call = object()
    try:
        _one_blas_thread.enter(call)
        yield from _in_threads(work, shares, threads)
    finally:
        try:
            _one_blas_thread.leave(call)
        finally:  # an interrupt may come before the call has left; else this does nothing
            _one_blas_thread.leave(call)


def _in_threads(work: Callable[[S], T], shares: Iterator[S], threads: int) -> Generator[T, None, None]:
    # Once the main thread has ended, no thread can be started.
    if threads == 1 or not threading.main_thread().is_alive():
        yield from map(work, shares)
        return
    stopping, errors = threading.Event(), list[BaseException]()

    def do(share: S) -> T:
        if stopping.is_set():
            raise CancelledError
        _stopping.set(stopping)
        try:
            return work(share)
        except BaseException as error:
            if not stopping.is_set():
                errors.append(error)
                stopping.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        # NumPy's error state is a context variable, which threads do not inherit.
        contexts = contextvars.copy_context()
        try:
            yield from pool.map(lambda share: contexts.copy().run(do, share), shares)
        except CancelledError:  # since a later share failed
            raise errors.pop() from None
        finally:
            stopping.set()
