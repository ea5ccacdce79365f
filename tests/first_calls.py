"""First calls that load a library, as those of some versions of cuda-bindings."""

import threading
import time
from collections.abc import Callable
from typing import Any


def failing_meanwhile(call: Callable[[], Any], name: str) -> Callable[[], Any]:
    """The same call, but while the first one is at work, others fail like those of a missing library."""
    first, loaded = threading.Lock(), threading.Event()

    def called() -> Any:
        if first.acquire(blocking=False):
            time.sleep(0.1)
            loaded.set()
        if not loaded.is_set():
            raise RuntimeError(f'Function "{name}" not found')
        return call()

    return called
