"""Shared by tiles of scores and stacks of heads: exponentials, and finite replacements of infinity."""
# The papers write matrices in capitals (S, P) and a row's sum l, and so does this file.
# ruff: noqa: E741, N803

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.reference import masked_matmul

Array: TypeAlias = npt.NDArray[Any]


def compute_dtype(x: Array) -> npt.DTypeLike:
    """The dtype that a call with such arrays computes in."""
    return np.float64 if x.dtype == np.float64 else np.float32


def row_sums(P: Array) -> Array:
    """The sums of rows, (..., rows, 1), by a matrix product, which takes a third of the time of `sum`."""
    sums: Array = np.matmul(P, np.ones((P.shape[-1], 1), P.dtype))
    return sums


def exp_shifted(S: Array, shift: Array) -> Array:
    """Compute exp(S - shift), overwriting S."""
    np.subtract(S, shift, out=S)
    np.exp(S, out=S)
    return S


def finite(m: Array) -> Array:
    """The maximum to subtract; 0 for a row that has seen no key, since -inf - -inf is NaN."""
    return np.where(np.isneginf(m), 0, m)


def nonzero(l: Array) -> Array:
    """The sum to divide by; 1 for a row that has seen no key."""
    return np.where(l == 0, 1, l)


def empty_as_infinite(L: Array) -> Array:
    """The LSE to subtract: inf for empty rows, as exp(S - inf) is 0 but -inf - -inf is NaN. Overwrites L."""
    L[np.isneginf(L)] = np.inf
    return L


def fill_masked(S: Array, value: float, visible: Array | None) -> None:
    """Set what is not visible to `value`; None means that all is visible."""
    if visible is not None:
        np.copyto(S, value, where=~visible)


class Scratch:
    """Arrays by name, in memory that is allocated only once and contiguous even for partial tiles."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Array] = {}

    def copy(self, name: str, x: Array, scale: float = 1.0) -> Array:
        """A copy of `x`, scaled."""
        copy = self._array(name, x.shape)
        if scale == 1.0:
            copy[...] = x
        else:
            np.multiply(x, scale, out=copy, dtype=self.dtype, casting="unsafe")
        return copy

    def product(self, name: str, a: Array, b: Array, visible: Array | None = None) -> Array:
        """The product a @ b, also of stacks of matrices; `visible` says which terms of one matrix count."""
        out = self._array(name, (*a.shape[:-1], b.shape[-1]))
        if visible is None:
            return np.matmul(a, b, out=out)
        return masked_matmul(a, b, visible, out)

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self.dtype)
        return self._buffers[name][:size].reshape(shape)
