"""Writes traced expressions in CUDA C++, with the functions of traced.cuh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cufa.traced.expression import OPERATIONS, Expression, Kind, asks_score, has_reciprocal, in_order

_CPP_TYPES: dict[Kind, str] = {"bool": "bool", "int32": "int", "int64": "int64", "float": "acc_t"}
# Operations on integers, which wrap around; C++'s own may not overflow.
_WRAPPING = {
    "add": "sum_of({}, {})",
    "subtract": "difference_of({}, {})",
    "multiply": "product_of({}, {})",
    "negative": "negative_of({})",
}
# The sum of constants in a SplitIndex, which does not wrap around, is at most this.
_LARGEST_OFFSET = 2**30


def write(expression: Expression) -> str:
    """The body of a CUDA C++ function that returns the expression's value.

    The function's arguments are the symbols, where integers have traced.cuh's type SplitIndex, and `arrays`,
    whose fields are named like the arrays.
    """
    code = Lines()
    result = code.number_of(expression)
    return f"{''.join(code.lines)}    return {result};\n"


def write_slopes(slopes: Sequence[tuple[Expression, Expression]]) -> str:
    """The body of a function that writes `element_derivatives` to the array `slopes`.

    `arrays` has a gradient for each array, named with a leading d.
    """
    code = Lines()
    stores = []
    for number, (element, slope) in enumerate(slopes):
        indices = ", ".join(map(code.name_of, element.operands))
        place = f"arrays.d{element.value.name}.place({indices})"
        stores.append(f"    slopes[{number}] = {{{place}, {code.number_of(slope)}}};\n")
    return "".join((*code.lines, *stores))


class Lines:
    """Lines of C++ that compute expressions; each line names a value that no earlier line has computed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._indices: dict[int, int] = {}  # the sum of a SplitIndex's constants
        self._known: dict[str, str] = {}

    def name_of(self, expression: Expression) -> str:
        """The name of an expression's value; may add lines."""
        for node in in_order(expression):
            if id(node) not in self._names:
                constants = self._constants_of_index(node)
                if constants is not None:
                    self._indices[id(node)] = constants
                self._names[id(node)] = self._name(node)
        return self._names[id(expression)]

    def number_of(self, expression: Expression) -> str:
        """The same as a number, which a SplitIndex is not."""
        name = self.name_of(expression)
        return f"int({name})" if id(expression) in self._indices else name

    def _name(self, node: Expression) -> str:
        """The name of a node whose operands have names."""
        if node.operation == "symbol":
            return str(node.value)
        if node.operation == "constant":
            return _literal(node.value, node.kind)
        is_index = id(node) in self._indices
        text = _code(node, [self._operand(operand, node) for operand in node.operands], wraps=not is_index)
        if text not in self._known:
            self._known[text] = f"t{len(self._known)}"
            cpp_type = "SplitIndex" if is_index else _CPP_TYPES[node.kind]
            self.lines.append(f"    const {cpp_type} {self._known[text]} = {text};\n")
        return self._known[text]

    def _operand(self, operand: Expression, of: Expression) -> str:
        """The name of an operand where `of` is computed; some operations take a SplitIndex directly."""
        name = self._names[id(operand)]
        takes_indices = (
            id(of) in self._indices
            or of.operation == "element"
            or (of.operation == "cast" and of.kind == "float")
        )
        return f"int({name})" if id(operand) in self._indices and not takes_indices else name

    def _constants_of_index(self, node: Expression) -> int | None:
        """If C++ has the node as a SplitIndex, the largest sum of its constants.

        Such are 32-bit symbols and sums of these and constants.
        """
        if node.kind != "int32":
            return None
        if node.operation in ("add", "subtract", "negative"):
            others = [operand for operand in node.operands if id(operand) not in self._indices]
            if len(others) == len(node.operands) or any(
                operand.operation != "constant" for operand in others
            ):
                return None
            constants = sum(self._indices.get(id(operand), 0) for operand in node.operands)
            constants += sum(abs(operand.value) for operand in others)
            return constants if constants <= _LARGEST_OFFSET else None
        return 0 if node.operation == "symbol" else None


def _literal(value: float, kind: Kind) -> str:
    if kind == "bool":
        return "true" if value else "false"
    if kind != "float":
        suffix = "LL" if kind == "int64" else ""
        least = -(2**63) if kind == "int64" else -(2**31)
        # The least integer's absolute value is none.
        return f"({value + 1}{suffix} - 1)" if value == least else f"({value}{suffix})"
    if math.isnan(value):
        return "not_a_number()"
    if math.isinf(value):
        return "(-negative_infinity())" if value > 0 else "negative_infinity()"
    return f"acc_t({value.hex()})"


def _code(node: Expression, operands: Iterable[str], wraps: bool) -> str:
    """The right side of the node's assignment in C++; integers wrap around, or are known not to."""
    if node.operation == "cast":
        return f"{_CPP_TYPES[node.kind]}({', '.join(operands)})"
    if node.operation == "element":
        at = f"arrays.{node.value.name}.at({', '.join(operands)})"
        return f"{_CPP_TYPES[node.kind]}({f'to_acc({at})' if node.kind == 'float' else at})"
    if wraps and node.kind in ("int32", "int64") and node.operation in _WRAPPING:
        return _WRAPPING[node.operation].format(*operands)
    if node.operation == "divide":
        return _division(node).format(*operands)
    return OPERATIONS[node.operation].code.format(*operands)


def _division(node: Expression) -> str:
    """The code of a division: exact for positions, since they may become indices, but not for scores."""
    if has_reciprocal(node.operands[1]):
        return "quotient_by({}, {})"
    return "quotient_of_score({}, {})" if asks_score(node) else OPERATIONS["divide"].code
