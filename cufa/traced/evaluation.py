"""Evaluates traced expressions with NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cufa.traced.expression import OPERATIONS, Expression, Kind, TracedArray, in_order


def evaluate_all(expressions: Sequence[Expression], values: Mapping[str, Any]) -> list[Any]:
    """Evaluate expressions with NumPy, which broadcasts; `values` has symbols and arrays by name.

    Shared parts are computed once. Elements have the same types as in C++: 8-bit integers are computed in 32
    bits, floats in the score's dtype.
    """
    score = values.get("score")
    of_floats = None if score is None else np.asarray(score).dtype
    known: dict[int, Any] = {}
    for node in in_order(*expressions):
        operands = [known[id(operand)] for operand in node.operands]
        if node.operation == "symbol":
            known[id(node)] = values[node.value]
        elif node.operation == "constant":
            known[id(node)] = node.value
        elif node.operation == "element":
            known[id(node)] = _widened(_element(values, node.value, operands), node.kind, of_floats)
        elif node.operation == "cast":
            known[id(node)] = _as_kind(operands[0], node.kind)
        else:
            known[id(node)] = OPERATIONS[node.operation].compute(*operands)
    return [known[id(expression)] for expression in expressions]


def _as_kind(value: Any, kind: Kind) -> Any:
    """Cast as C++ does; NumPy chooses the dtype of floats."""
    if kind == "float":
        return value * 1.0
    return np.asarray(value).astype(kind)


def _element(values: Mapping[str, Any], array: TracedArray, indices: Sequence[Any]) -> Any:
    """Read an element; raise IndexError, naming the array, for indices outside; none counts from the end."""
    for axis, index in enumerate(indices):
        least = np.min(index, initial=0)
        if least < 0:
            raise IndexError(
                f"{array.title}: index {least} is out of bounds for axis {axis}; indices start at 0"
            )
    try:
        return values[array.name][tuple(indices)]
    except IndexError as error:
        raise IndexError(f"{array.title}: {error}") from error


def _widened(element: Any, kind: Kind, of_floats: np.dtype[Any] | None) -> Any:
    """Convert elements of an array to this kind; floats have at least 32 bits by default."""
    if kind != "float":
        return element.astype(kind, copy=False)
    if of_floats is None:
        of_floats = np.dtype(np.float32) if element.dtype.itemsize < 4 else element.dtype
    return element.astype(of_floats, copy=False)
