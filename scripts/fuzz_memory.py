"""Arrays that lie in memory in any way, for scripts/fuzz.py."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cufa.problem import FLOAT8, INPUT_DTYPES

Array = np.ndarray[Any, np.dtype[Any]]

# How an array may lie: contiguous, its axes but the last in another order, all of them so, some backwards,
# with gaps between rows, its last axis scattered, or in the midst of a larger one.
WAYS_TO_LIE = ("", "permuted", "transposed", "reversed", "stepped", "scattered", "cut out", "cut out")


@dataclass(frozen=True)
class Memory:
    """Bytes, NumPy's or CuPy's, in which an array lies somewhere."""

    bytes: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int

    @property
    def array(self) -> Any:
        if isinstance(self.bytes, np.ndarray):
            return np.ndarray(self.shape, self.dtype, self.bytes, self.offset, self.strides)
        import cupy

        kind = np.uint8 if self.dtype == INPUT_DTYPES[FLOAT8] else self.dtype  # which CuPy only views as
        seen = cupy.ndarray(self.shape, kind, self.bytes.data + self.offset, self.strides)
        return seen if kind == self.dtype else seen.view(self.dtype)

    @property
    def inside(self) -> Array:
        """Which of the bytes are the array's."""
        inside = np.zeros(self.bytes.size, bool)
        if 0 not in self.shape:
            shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
            np.ndarray(shape, bool, inside, self.offset, strides)[...] = True
        return inside

    def copy(self, to_gpu: bool) -> "Memory":
        if to_gpu != isinstance(self.bytes, np.ndarray):
            return replace(self, bytes=self.bytes.copy())
        import cupy

        return replace(self, bytes=cupy.asarray(self.bytes) if to_gpu else self.bytes.get())

    def with_repeats(self) -> "Memory":
        """The same with one place for what is the same along an axis."""
        bits = self.array.view(f"u{self.dtype.itemsize}")
        strides = [
            0 if size > 1 and (bits == bits.take([0], axis)).all() else self.strides[axis]
            for axis, size in enumerate(self.shape[:-1])
        ]
        return replace(self, strides=(*strides, self.strides[-1]))


def placed(rng: np.random.Generator, values: Array, strided: bool, align_bytes: int) -> Memory:
    """The values somewhere in memory; around them is NaN, or integers that no argument may be.

    They are contiguous unless `strided`; addresses and strides are multiples of `align_bytes`.
    """
    shape, itemsize = values.shape, values.dtype.itemsize
    ndim, last = values.ndim, values.ndim - 1
    unit = max(1, align_bytes // itemsize)
    way = str(rng.choice(WAYS_TO_LIE)) if strided and values.size else ""
    order, starts, more, steps = list(range(ndim)), [0] * ndim, [0] * ndim, [1] * ndim
    if way == "permuted":
        order[:last] = [int(axis) for axis in rng.permutation(last)]
    elif way == "transposed":
        order = [int(axis) for axis in rng.permutation(ndim)]
    elif way == "scattered":
        steps[last] = int(rng.choice((-1, 2)))
    elif way in ("reversed", "stepped"):
        steps[:last] = [int(step) for step in rng.choice((-1, 1) if way == "reversed" else (1, 2, 3), last)]
    elif way == "cut out":
        more = [unit * int(units) for units in rng.integers(0, 3, ndim)]
        starts = [unit * int(rng.integers(0, extra // unit + 1)) for extra in more]
    strides, reached = [0] * ndim, itemsize
    for axis in reversed(order):
        strides[axis] = reached
        reached *= (max(1, shape[axis]) + more[axis]) * abs(steps[axis])
    before, after = (unit * int(units) for units in rng.integers(1, 4, 2))
    offset = before * itemsize
    for axis, step in enumerate(steps):
        offset += (starts[axis] + (shape[axis] - 1 if step < 0 else 0)) * strides[axis]
        strides[axis] *= step
    around = np.nan if values.dtype.kind in "fV" else np.array(2**31 - 1).astype(values.dtype)
    whole = np.full(before + after + reached // itemsize, around, values.dtype)
    memory = Memory(whole.view(np.uint8), shape, values.dtype, tuple(strides), offset)
    memory.array[...] = values
    return memory
