"""The values of traced expressions, by NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cufa.traced.expression import OPERATIONS, Expression, Kind, TracedArray, in_order


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """As `evaluate_all`, of one."""
    return evaluate_all((expression,), values)[0]


def evaluate_all(expressions: Sequence[Expression], values: Mapping[str, Any]) -> list[Any]:
    """Their values by NumPy, which broadcasts; `values` are those of symbols and the arrays, by name.

    What they have in common is computed once. Elements are computed with as what they are in C++: integers of
    8 bits in 32, floats in the score's dtype.
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
    """As C++ casts it; floats are NumPy's to choose."""
    if kind == "float":
        return value * 1.0
    return np.asarray(value).astype(kind)


def _element(values: Mapping[str, Any], array: TracedArray, indices: Sequence[Any]) -> Any:
    """Raises IndexError, which names the array, for indices that are not in it: none counts from its end."""
    for axis, index in enumerate(indices):
        least = np.min(index, initial=0)
        if least < 0:
            raise IndexError(f"{array.title} is read where it has no element: index {least} of axis {axis}")
    try:
        return values[array.name][tuple(indices)]
    except IndexError as error:
        raise IndexError(f"{array.title} is read where it has no element: {error}") from error


def _widened(element: Any, kind: Kind, of_floats: np.dtype[Any] | None) -> Any:
    """Elements of an array as values of that kind; floats by default of 32 bits at least."""
    if kind != "float":
        return element.astype(kind, copy=False)
    if of_floats is None:
        of_floats = np.dtype(np.float32) if element.dtype.itemsize < 4 else element.dtype
    return element.astype(of_floats, copy=False)
