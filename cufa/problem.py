"""What one call asks for, validated once: shapes, dtype and which options are on.

A `Problem` holds no array and no address, so planning and compiling work from it on any machine.
Everything wrong with a call's shapes and dtypes is raised here, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

Direction = Literal["forward", "backward"]
Shape = tuple[int, ...]

MAX_HEAD_DIM = 256
# The widest access that a kernel makes: what knowing a larger alignment would not improve on.
MAX_ALIGN_BYTES = 16
# Lengths and counts are 32-bit in the kernels' parameters; products of them are 64-bit.
MAX_EXTENT = 2**31 - 1

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Where a layout has batch, seqlen and heads; head_dim is last in each.
LAYOUTS: dict[str, tuple[int, int, int]] = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
_AXES = {
    "bshd": "(batch, seqlen, heads, head_dim)",
    "bhsd": "(batch, heads, seqlen, head_dim)",
}


def dtype_name(dtype: Any, argument: str) -> str:
    """One of `DTYPES`' names; TypeError, naming the argument, for any other dtype."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise TypeError(f"{argument} has dtype {dtype}; it may be {_one_of(DTYPES)}")
    return name


def accumulator_dtype(dtype: str) -> np.dtype[Any]:
    """What sums and the LSE are kept in: float64 for float64, float32 for the others."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def _one_of(names: Mapping[str, Any]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


@dataclass(frozen=True)
class Problem:
    """One attention call.

    `align_bytes` is a power of two that every address and every stride is a multiple of, in bytes; the
    kernels load that much at once.
    """

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    align_bytes: int = MAX_ALIGN_BYTES

    @property
    def itemsize(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return DTYPES[self.dtype].itemsize

    @property
    def accumulator(self) -> np.dtype[Any]:
        """What sums and the LSE are kept in."""
        return accumulator_dtype(self.dtype)

    @property
    def visible_scores(self) -> int:
        """How many (query, key) pairs of one head are not masked."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        rows = min(self.seqlen_q, self.seqlen_k)  # those that see any key at all
        return rows * self.seqlen_k - rows * (rows - 1) // 2

    @property
    def product_dims(self) -> int:
        """Multiply-adds for each visible score: two products over a head dim forward, five backward."""
        if self.direction == "forward":
            return self.head_dim + self.value_dim
        return 3 * self.head_dim + 2 * self.value_dim

    @property
    def flops(self) -> int:
        """Operations of the matrix products, two for each multiply-add."""
        return 2 * self.batch * self.heads * self.visible_scores * self.product_dims

    def __str__(self) -> str:
        """One line, as in `print(plan)`."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return (
            f"{self.direction} {self.dtype}{' causal' if self.causal else ''}, batch {self.batch}, "
            f"seqlen {self.seqlen_q} x {self.seqlen_k}, heads {heads}, head dim {dims}"
        )


def check_options(causal: object, layout: object) -> None:
    """Check those options of a call that say what kind of problem it is."""
    if not isinstance(causal, (bool, np.bool_, int)):
        raise TypeError(f"causal is {causal!r}; it may be True or False")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it may be {_one_of(LAYOUTS)}")


def check_layout(layout: str) -> tuple[int, int, int]:
    """The axes (batch, seqlen, heads) of a layout; ValueError for one that is not known."""
    check_options(False, layout)
    return LAYOUTS[layout]


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of the scores, 1 / sqrt(head_dim) if None; ValueError if it is not finite."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    try:
        finite = math.isfinite(softmax_scale)
    except TypeError:
        raise TypeError(f"softmax_scale is {softmax_scale!r}; it may be a number or None") from None
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be finite")
    return float(softmax_scale)


def make_problem(
    direction: Direction,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    *,
    causal: bool,
    layout: str,
) -> Problem:
    """The Problem of arrays q, k and v with these shapes and dtypes, given by those names.

    Raises ValueError for shapes that don't go together and TypeError for dtypes that don't, naming the
    argument, what it is and what it may be.
    """
    batch_axis, seqlen_axis, heads_axis = check_layout(layout)
    for name in ("q", "k", "v"):
        if len(shapes[name]) != 4:
            raise ValueError(f"{name} has shape {shapes[name]}; it must have the 4 axes {_AXES[layout]}")
        if max(shapes[name]) > MAX_EXTENT:
            raise ValueError(f"{name} has shape {shapes[name]}; no axis may exceed {MAX_EXTENT}")
    q, k, v = shapes["q"], shapes["k"], shapes["v"]

    dtype = dtype_name(dtypes["q"], "q")
    for name in ("k", "v"):
        if dtype_name(dtypes[name], name) != dtype:
            raise TypeError(f"{name} has dtype {dtypes[name]} and q {dtypes['q']}; they must be the same")

    heads, kv_heads = q[heads_axis], k[heads_axis]
    for name in ("k", "v"):
        if shapes[name][batch_axis] != q[batch_axis]:
            raise ValueError(f"{name} has shape {shapes[name]} and q {q}; the batch must be the same")
    for axis, word in ((seqlen_axis, "seqlen"), (heads_axis, "number of heads")):
        if v[axis] != k[axis]:
            raise ValueError(f"v has shape {v} and k {k}; the {word} must be the same")
    if k[3] != q[3]:
        raise ValueError(f"k has shape {k} and q {q}; the head dim (last axis) must be the same")
    for name in ("q", "v"):
        if not 1 <= shapes[name][3] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head dim {shapes[name][3]} (shape {shapes[name]}); it may be 1 to {MAX_HEAD_DIM}"
            )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; the query heads must be a multiple of the key-value heads"
        )
    return Problem(
        direction=direction,
        dtype=dtype,
        batch=q[batch_axis],
        seqlen_q=q[seqlen_axis],
        seqlen_k=k[seqlen_axis],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=q[3],
        value_dim=v[3],
        causal=bool(causal),
    )


def output_shape(problem: Problem, layout: str) -> Shape:
    """The shape of O in this layout."""
    batch_axis, seqlen_axis, heads_axis = check_layout(layout)
    shape = [0, 0, 0, problem.value_dim]
    shape[batch_axis], shape[seqlen_axis], shape[heads_axis] = (
        problem.batch,
        problem.seqlen_q,
        problem.heads,
    )
    return tuple(shape)


def lse_shape(problem: Problem) -> Shape:
    """The shape of the LSE, (batch, heads, seqlen_q) in every layout."""
    return problem.batch, problem.heads, problem.seqlen_q


def check_fits(problem: Problem, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], layout: str) -> None:
    """Check those of out, dout and lse that are there; ValueError or TypeError if one does not fit."""
    expected_shape = {name: output_shape(problem, layout) for name in ("out", "dout")}
    expected_dtype = dict.fromkeys(("out", "dout"), DTYPES[problem.dtype])
    expected_shape["lse"], expected_dtype["lse"] = lse_shape(problem), problem.accumulator
    for name in expected_shape:
        if name not in shapes:
            continue
        if shapes[name] != expected_shape[name]:
            raise ValueError(f"{name} has shape {shapes[name]}; it must be {expected_shape[name]}")
        if dtypes[name] != expected_dtype[name]:
            raise TypeError(f"{name} has dtype {dtypes[name]}; it must be {expected_dtype[name]}")
