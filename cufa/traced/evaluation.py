"""Evaluates traced expressions with NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cufa.traced.expression import OPERATIONS, Expression, Kind, TracedArray, in_order

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)


def evaluate_all(
    expressions: Sequence[Expression], values: Mapping[str, Any], floats: np.dtype[Any] = _FLOAT32
) -> list[Any]:
    """Evaluate expressions with NumPy, which broadcasts; `values` has symbols and arrays by name.

    Shared parts are computed once. Numbers have the same types as in C++: 8-bit integers are computed in 32
    bits, floats in the score's dtype or, if there is no score, in `floats`.
    """
    if "score" in values:
        floats = np.asarray(values["score"]).dtype
    known: dict[int, Any] = {}
    for node in in_order(*expressions):
        operands = [known[id(operand)] for operand in node.operands]
        if node.operation == "symbol":
            known[id(node)] = values[node.value]
        elif node.operation == "constant":
            known[id(node)] = node.value
        elif node.operation == "element":
            known[id(node)] = _as_kind(_element(values, node.value, operands), node.kind, floats)
        elif node.operation == "cast":
            known[id(node)] = _as_kind(operands[0], node.kind, floats)
        else:
            # np.where of two of Python's numbers, for one, has 64 bits.
            known[id(node)] = _as_kind(OPERATIONS[node.operation].compute(*operands), node.kind, floats)
    return [known[id(expression)] for expression in expressions]


def _as_kind(value: Any, kind: Kind, floats: np.dtype[Any]) -> Any:
    """Cast as C++ does."""
    return np.asarray(value).astype(floats if kind == "float" else kind, copy=False)


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
