"""Keeps torch.compile out of cufa."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile leave calls of a function as they are, as torch.compiler.disable does.

    It would else follow cufa into NumPy and CuPy with tensors that have no elements, and fail. What
    torch.compiler.disable returns must be called, so an attribute of the function does not suffice. torch is
    not imported: it may be, and compile something, long after cufa.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # nothing is being compiled
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(sys.modules["torch"].compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
