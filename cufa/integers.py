"""Integers divided and rounded up."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return ceil_div(a, b) * b
