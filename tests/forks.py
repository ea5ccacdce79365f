"""Forked children, in which only one thread of their parent goes on."""

import os
import signal
import warnings
from collections.abc import Callable

# A child that waits for a lock that nobody will release is ended after so many seconds.
PATIENCE = 20


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` returns True in a forked child, and does so in time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads may hold locks
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(PATIENCE)
            status = int(not work())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
