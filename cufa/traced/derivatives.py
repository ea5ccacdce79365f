"""Derivatives of traced expressions, the terms of sums, and what expressions depend on."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence, Set

from cufa.traced.code import Lines
from cufa.traced.expression import OPERATIONS, Expression, apply, in_order, lifted, names_in

# Constants up to this may be multiplied by what makes scores products, which is at most 1.5e30.
_LARGEST_FACTOR = 1e6
# Compilers compute what follows the branches of these again for each score.
_BRANCHING = {"power", "log1p", "sin", "cos", "floor_divide", "remainder"}
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32


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


def has_large_constant(expressions: Sequence[Expression]) -> bool:
    """Whether a finite constant in the expressions may overflow if it is multiplied by another number."""
    constants = (node.value for node in in_order(*expressions) if node.operation == "constant")
    return any(_LARGEST_FACTOR < abs(constant) < math.inf for constant in constants)


def times(expression: Expression, factor: Expression, varying: Set[str]) -> Expression:
    """The product with a finite factor; what does not depend on the varying symbols is multiplied first.

    Nothing overflows there: infinity times 0 would be NaN, where the expression is 0.
    """
    operands = expression.operands
    if expression.operation == "negative":
        return -times(operands[0], factor, varying)
    if expression.operation == "multiply":
        same, other = sorted(operands, key=lambda operand: bool(varying & names_in(operand)))
        if varying & names_in(other) and _comes_first(same, varying):
            return _finite_product(same, factor) * other
    return expression * factor


def _comes_first(number: Expression, varying: Set[str]) -> bool:
    """Whether the product of a factor and this number is computed once for many scores, and is finite."""
    operations = {node.operation for node in in_order(number)}
    return not (varying & names_in(number) or has_large_constant([number]) or operations & _BRANCHING)


def _finite_product(number: Expression, factor: Expression) -> Expression:
    """The product, which is the largest float32 instead of infinity unless the number is infinite."""
    product = number * factor
    if number.operation == "constant":
        return product
    bounded = apply("minimum", apply("maximum", product, -_LARGEST_FLOAT), _LARGEST_FLOAT)
    return apply("where", apply("absolute", number) < math.inf, bounded, product)
