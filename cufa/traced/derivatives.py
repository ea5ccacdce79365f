"""Derivatives of traced expressions, the terms of sums, and what expressions depend on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set

from cufa.traced.code import Lines
from cufa.traced.expression import OPERATIONS, Expression, in_order, lifted, names_in


def derivative(expression: Expression, variable: str) -> Expression | None:
    """The derivative by the symbol of that name; None if the expression does not depend on it."""
    symbols = [node for node in in_order(expression) if node.operation == "symbol" and node.value == variable]
    return _derivative(expression, symbols)


def element_derivatives(expression: Expression) -> list[tuple[Expression, Expression]]:
    """The elements of float arrays that the expression reads, each once, and the derivative by each."""
    code = Lines()
    code.name_of(expression)
    alike: dict[str, list[Expression]] = {}
    for node in in_order(expression):
        if node.operation == "element" and node.kind == "float":
            alike.setdefault(code.name_of(node), []).append(node)
    slopes = [(nodes[0], _derivative(expression, nodes)) for nodes in alike.values()]
    return [(element, slope) for element, slope in slopes if slope is not None]


def _derivative(expression: Expression, variables: Sequence[Expression]) -> Expression | None:
    """The derivative by a number that all of these nodes stand for."""
    known: dict[int, Expression | None] = {}
    for node in in_order(expression):
        operands = [known[id(operand)] for operand in node.operands]
        if any(node is variable for variable in variables):
            known[id(node)] = lifted(1.0)
        elif all(slope is None for slope in operands) or node.operation in ("cast", "element"):
            known[id(node)] = None  # a cast makes an integer or a bool
        else:
            known[id(node)] = OPERATIONS[node.operation].slope(node, operands)
    return known[id(expression)]


# How much a result grows if operands grow so much. Comparisons stay the same if both do alike.
_STEPS: dict[str, Callable[..., int | None]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "negative": operator.neg,
    **dict.fromkeys(
        ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
        lambda a, b: 0 if a == b else None,
    ),
}


def is_of_distance(expression: Expression) -> bool:
    """Whether the expression depends on q_idx and kv_idx, but only by their difference.

    Then it is the same for all scores of a diagonal. Some such expressions are not recognised.
    """
    # How much each node grows if q_idx and kv_idx grow by 1; None if this is not known.
    steps: dict[int, int | None] = {}
    for node in in_order(expression):
        operands = [steps[id(operand)] for operand in node.operands]
        steps[id(node)] = _step(node, operands)
    return steps[id(expression)] == 0 and {"q_idx", "kv_idx"} <= names_in(expression)


def _step(node: Expression, operands: Sequence[int | None]) -> int | None:
    if node.operation == "symbol":
        return None if node.value == "score" else int(node.value in ("q_idx", "kv_idx"))
    if all(step == 0 for step in operands):
        return 0
    known = [step for step in operands if step is not None]
    if len(known) < len(operands) or node.operation not in _STEPS:
        return None
    return _STEPS[node.operation](*known)


def added_terms(expression: Expression, name: str) -> list[Expression] | None:
    """The terms that are added to the symbol of that name; None unless the expression is such a sum."""
    terms: list[Expression] = []
    while expression.operation in ("add", "subtract"):
        is_added = expression.operation == "add"
        expression, term = expression.operands
        if is_added and name in names_in(term):
            expression, term = term, expression
        if name in names_in(term):
            return None
        terms.insert(0, term if is_added else -term)
    return terms if expression.operation == "symbol" and expression.value == name else None


def times(expression: Expression, factor: Expression, varying: Set[str]) -> Expression:
    """The product; factors that do not depend on the varying symbols are multiplied first."""
    operands = expression.operands
    if expression.operation == "negative":
        return -times(operands[0], factor, varying)
    if expression.operation == "multiply":
        same, other = sorted(operands, key=lambda operand: bool(varying & names_in(operand)))
        return times(same, factor, varying) * other
    return expression * factor
