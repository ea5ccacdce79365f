"""Expressions of traced functions: what a Python function computes, found by calling it with symbols.

    score, kv_idx = symbol("score", "float"), symbol("kv_idx", "int32")
    expression = np.tanh(score) - 0.5 * kv_idx

Python's operators and NumPy's ufuncs on an `Expression` make larger ones, from the operations in the table at
the end of this file. In this folder, `derivatives` differentiates them, `evaluation` computes their values
with NumPy, and `code` writes them in CUDA C++.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from cufa.messages import counted, kind_of

# The kind of a value. "float" is the type that scores are computed in.
Kind = Literal["bool", "int32", "int64", "float"]
Kinds = tuple[Kind, ...]
_RANK: dict[Kind, int] = {"bool": 0, "int32": 1, "int64": 2, "float": 3}

# Constant powers up to this become products, which are exact and work for integers too.
_MOST_PRODUCTS = 8

# Operations that give the same whether integers are rounded to floats before or after; floats are cheaper.
_CAST_BEFORE = ("absolute", "negative", "minimum", "maximum")

# Division of scores by a constant becomes multiplication if its magnitude is between 1 over this and this.
_LARGEST_FACTOR = 2.0**126

Derivatives: TypeAlias = "Sequence[Expression | None]"
_Binary: TypeAlias = "Callable[[Expression, Any], Expression]"


def kind_of_dtype(dtype: np.dtype[Any]) -> Kind:
    """The kind of numbers of a dtype; raises TypeError if there is none."""
    if dtype == np.bool_:
        return "bool"
    if dtype.kind in "iu" and dtype != np.uint64:
        return "int64" if dtype.itemsize == 8 or dtype == np.uint32 else "int32"
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return "float"
    raise TypeError(f"a dtype is {dtype}; it may be bool, an integer except uint64, or a float")


# The dtypes to cast to; others would have to drop bits or a sign, as NumPy's do.
_CASTS = ("bool", "int32", "int64", "float32", "float64")


def _operator(name: str) -> tuple[_Binary, _Binary]:
    """A binary operator of expressions, and its reflected form, for an expression only on the right."""
    return lambda left, right: apply(name, left, right), lambda right, left: apply(name, left, right)


@dataclass(frozen=True, eq=False)
class Expression:
    """An operation on operands, or one without operands: "symbol" or "constant".

    `value` is the symbol's name, the constant, the kind that "cast" makes, or the array of "element", whose
    operands are indices.
    """

    operation: str
    kind: Kind
    operands: tuple[Expression, ...] = ()
    value: Any = None

    __hash__ = object.__hash__

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("subtract")
    __mul__, __rmul__ = _operator("multiply")
    __truediv__, __rtruediv__ = _operator("divide")
    __floordiv__, __rfloordiv__ = _operator("floor_divide")
    __mod__, __rmod__ = _operator("remainder")
    __pow__, __rpow__ = _operator("power")
    __and__, __rand__ = _operator("bitwise_and")
    __or__, __ror__ = _operator("bitwise_or")
    __xor__, __rxor__ = _operator("bitwise_xor")
    __lshift__, __rlshift__ = _operator("left_shift")
    __rshift__, __rrshift__ = _operator("right_shift")
    __lt__, __gt__ = _operator("less")
    __le__, __ge__ = _operator("less_equal")

    def __eq__(self, other: Any) -> Expression:  # type: ignore[override]
        return apply("equal", self, other)

    def __ne__(self, other: Any) -> Expression:  # type: ignore[override]
        return apply("not_equal", self, other)

    def __neg__(self) -> Expression:
        return apply("negative", self)

    def __pos__(self) -> Expression:
        return self

    def __abs__(self) -> Expression:
        return apply("absolute", self)

    def __invert__(self) -> Expression:
        return apply("invert", self)

    def astype(self, dtype: Any) -> Expression:
        """The value as another kind; floats are truncated to integers.

        Floats of either size have the score's dtype. Raises TypeError for other dtypes.
        """
        name = np.dtype(dtype).name
        if name not in _CASTS:
            raise TypeError(f"a traced value cannot be made {name}; it may be {', '.join(_CASTS)}")
        return _cast(self, kind_of_dtype(np.dtype(dtype)))

    def __getattr__(self, name: str) -> NoReturn:
        """Called for attributes that there are not, such as other libraries' methods."""
        function = "clip" if name == "clamp" else name
        instead = f"NumPy's function, np.{function}" if function in _TRACEABLE else "NumPy's functions"
        raise AttributeError(f"a traced value has no attribute {name!r}; use {instead}")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Expression:
        """Called by NumPy for ufuncs with an expression among their arguments."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if options:
            raise TypeError(f"np.{name} has the argument {', '.join(options)}, which cannot be traced")
        return apply(name, *inputs)

    def __array_function__(
        self, function: Any, _: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Expression:
        """Called by NumPy for its other functions with an expression among their arguments."""
        if function is np.where and len(inputs) == 3 and not options:
            return apply("where", *inputs)
        if function is np.where:
            raise TypeError("np.where is traced as np.where(condition, a, b)")
        if function is np.clip and len(inputs) == 3 and not options:
            value, least, most = inputs
            if least is not None:
                value = apply("maximum", value, least)
            return lifted(value) if most is None else apply("minimum", value, most)
        if function is np.clip:
            raise TypeError("np.clip is traced as np.clip(value, least, most); None is no bound")
        raise TypeError(_unknown(function.__name__))

    def __bool__(self) -> bool:
        raise TypeError(
            "a traced value cannot be tested by if, and, or, not, min(), max() or a chained comparison; "
            "use np.where(condition, a, b), & | ~, np.minimum, np.maximum, (a <= b) & (b <= c)"
        )

    def __float__(self) -> float:
        raise TypeError(
            "a traced value cannot be made a number by float() or the math module; use NumPy's functions, as "
            "in np.tanh(score), and .astype(np.float32)"
        )

    def __int__(self) -> int:
        raise TypeError("a traced value cannot be made a number by int(); use np.floor or .astype(np.int32)")

    def __round__(self, _: Any = None) -> int:
        raise TypeError("a traced value cannot be rounded by round(); use np.rint(value)")

    def __trunc__(self) -> int:
        raise TypeError("a traced value cannot be truncated by math.trunc(); use .astype(np.int32)")

    def __index__(self) -> int:
        raise TypeError(
            "a traced value cannot be one of Python's integers, as range() and indices of lists and of other "
            "arrays need; it can only index arrays that the function is given, as in table[q_idx, kv_idx] "
            "with cufa.ScoreMod(function, table)"
        )

    def __iter__(self) -> Any:
        raise TypeError("a traced value is one number; it cannot be iterated over")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "a traced value cannot be made an array or one of NumPy's numbers, or index an array; use "
            "NumPy's ufuncs, np.where and .astype(np.float32), and give the function the arrays that it "
            "reads, as in cufa.ScoreMod(function, table)"
        )


@dataclass(frozen=True, eq=False)
class TracedArray:
    """An array that a traced function reads, element by element; errors call it by its `title`."""

    name: str
    kind: Kind
    ndim: int
    title: str

    def __getitem__(self, indices: Any) -> Expression:
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != self.ndim:
            raise TypeError(
                f"{self.title} has {counted(self.ndim, 'axis', 'axes')} and is read with "
                f"{counted(len(indices), 'index', 'indices')}; it needs one for each axis"
            )
        if any(index is None or index is Ellipsis or isinstance(index, slice) for index in indices):
            raise TypeError(f"{self.title} is sliced; read an element, as in slopes[h]")
        of_axes = tuple(lifted(index) for index in indices)
        for index in of_axes:
            if index.kind not in ("int32", "int64"):
                raise TypeError(f"{self.title} is read at a {index.kind}; indices must be integers")
            if index.operation == "constant" and index.value < 0:
                raise TypeError(
                    f"{self.title} is read at {index.value}; indices start at 0 and do not count from the end"
                )
        return Expression("element", self.kind, of_axes, self)

    def __iter__(self) -> Any:
        raise TypeError(f"{self.title} is iterated over; read an element, as in slopes[h]")

    def __len__(self) -> int:
        raise self._has_no_lengths()

    @property
    def shape(self) -> tuple[int, ...]:
        """Arrays may change from call to call, also in length."""
        raise self._has_no_lengths()

    def _has_no_lengths(self) -> TypeError:
        return TypeError(f"{self.title} has no lengths when the function is traced; take them from outside")


def symbol(name: str, kind: Kind) -> Expression:
    """An argument of a traced function."""
    return Expression("symbol", kind, (), name)


def lifted(value: Any) -> Expression:
    """A number as an expression; raises TypeError for anything but numbers and expressions."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, TracedArray):
        raise TypeError(f"{value.title} is used as a whole; read an element, as in slopes[h]")
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, bool):
        return Expression("constant", "bool", (), value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TypeError(f"{value} is too large for an integer of 64 bits")
        return Expression("constant", "int32" if -(2**31) <= value < 2**31 else "int64", (), value)
    if isinstance(value, float):
        return Expression("constant", "float", (), value)
    shape = getattr(value, "shape", None)
    if shape == ():
        raise TypeError(
            "an array without axes is used that the function is not given; give it x.reshape(1), as in "
            "cufa.ScoreMod(function, x.reshape(1)), and read element 0 there; or, for a constant, float(x)"
        )
    if shape is not None:
        raise TypeError(
            "an array is used that the function is not given; give it the array, as in "
            "cufa.ScoreMod(function, slopes), and read an element there"
        )
    if value is None:
        raise TypeError("None is not a number; is a return missing in the function, or in one that it calls?")
    raise TypeError(f"{kind_of(value)} is not a number; a traced function takes and returns numbers")


def apply(name: str, *operands: Any) -> Expression:
    """Apply the NumPy function of that name to expressions and numbers.

    Raises TypeError if the function is not supported, or if its operands are of the wrong kind.
    """
    name = _SYNONYMS.get(name, name)
    arguments = [lifted(value) for value in operands]
    if name in _COMPOSED:
        return _COMPOSED[name](*arguments)
    if name == "power":
        product = _as_product(*arguments)
        if product is not None:
            return product
    if name == "divide" and has_reciprocal(arguments[1]):
        # Positions are divided exactly, since 49 * (1 / 49) is below 1, and np.floor of it is 0.
        divisor = arguments[1].value
        if asks_score(arguments[0]) or abs(math.frexp(divisor)[0]) == 0.5:  # a power of two
            return apply("multiply", arguments[0], 1 / divisor)
    if name not in OPERATIONS:
        raise TypeError(_unknown(name))
    wanted, kind = OPERATIONS[name].signature(name, tuple(argument.kind for argument in arguments))
    return Expression(name, kind, tuple(map(_cast, arguments, wanted)))


def asks_score(expression: Expression) -> bool:
    """Whether its value depends on the score."""
    return any(node.operation == "symbol" and node.kind == "float" for node in in_order(expression))


def in_order(
    *roots: Expression, through: Callable[[Expression], bool] = lambda node: True
) -> list[Expression]:
    """All nodes of the expressions, each once and after its operands.

    Operands of a node come along only if `through` is true of it.
    """
    done: dict[int, Expression] = {}
    pending = list(reversed(roots))
    while pending:
        node = pending[-1]
        operands = node.operands if through(node) else ()
        missing = [operand for operand in operands if id(operand) not in done]
        if missing:
            pending += reversed(missing)
        else:
            done[id(node)] = pending.pop()
    return list(done.values())


def names_in(*expressions: Expression) -> set[str]:
    """The names of the symbols in the expressions."""
    return {node.value for node in in_order(*expressions) if node.operation == "symbol"}


@dataclass(frozen=True)
class Operation:
    """An operation: its names in NumPy and C++, the kinds it takes and makes, and its derivative.

    `signature` maps the kinds of operands to the kinds that they are converted to and the kind of the result.
    `slope` makes the derivative of a node from those of its operands, of which at least one is not None.
    """

    compute: Callable[..., Any]
    code: str
    signature: Callable[[str, Kinds], tuple[Kinds, Kind]]
    slope: Callable[[Expression, Derivatives], Expression | None]


def _common(kinds: Kinds) -> Kind:
    return max(kinds, key=_RANK.__getitem__)


def _arithmetic(name: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    kind = _common(kinds)
    if kind == "bool":
        raise TypeError(f"np.{name} does not support bools alone; use & | ~ or np.where")
    return (kind,) * len(kinds), kind


def _comparison(_: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    return (_common(kinds),) * len(kinds), "bool"


def _real(_: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    return tuple("float" for _ in kinds), "float"


def _logical(_: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    return tuple("bool" for _ in kinds), "bool"


def _bitwise(name: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    kind = _common(kinds)
    if kind == "float" or (kind == "bool" and "shift" in name):
        raise TypeError(f"np.{name} is applied to {' and '.join(kinds)}; it needs integers")
    return (kind,) * len(kinds), kind


def _selection(_: str, kinds: Kinds) -> tuple[Kinds, Kind]:
    kind = _common(kinds[1:])
    return ("bool", kind, kind), kind


def _no_slope(_: Expression, __: Derivatives) -> None:
    """The derivative of an operation that changes in steps, or not at all."""


def _by_partials(partials: Callable[..., Sequence[Any]]) -> Callable[[Expression, Derivatives], Expression]:
    """The chain rule: partials(*operands, result) are the partial derivatives by each operand."""

    def slope(node: Expression, slopes: Derivatives) -> Expression:
        factors = partials(*node.operands, node)
        terms = [_times(lifted(f), s) for f, s in zip(factors, slopes, strict=True) if s is not None]
        return functools.reduce(operator.add, terms)

    return slope


def _times(factor: Expression, slope: Expression) -> Expression:
    """The product; where a choice makes the slope 0 it is 0, even if the factor is not finite there."""
    if slope.operation == "where":
        condition, *chosen = slope.operands
        if any(map(_is_zero, chosen)):
            return apply("where", condition, *(s if _is_zero(s) else _times(factor, s) for s in chosen))
    if slope.operation == "constant" and slope.value == 1:
        return factor
    return slope if factor.operation == "constant" and factor.value == 1 else factor * slope


def _is_zero(expression: Expression) -> bool:
    return expression.operation == "constant" and expression.value == 0


def _slope_of_choice(choose: Callable[..., Expression]) -> Callable[[Expression, Derivatives], Expression]:
    """For an operation that returns one of its last two operands: the first if choose(*operands)."""

    def slope(node: Expression, slopes: Derivatives) -> Expression:
        first, second = (lifted(0.0) if s is None else s for s in slopes[-2:])
        return apply("where", choose(*node.operands), first, second)

    return slope


def _by_base(a: Expression, b: Expression) -> Expression:
    """The derivative of a power by its base; a power with exponent 0 is 1 for all bases."""
    return apply("where", b == 0.0, 0.0, b * apply("power", a, b - 1.0))


def _by_exponent(a: Expression, b: Expression, power: Expression) -> Expression:
    """The derivative of a power by its exponent; powers of 0 are 0 for all exponents above 0."""
    return apply("where", (a == 0.0) & (b >= 0.0), 0.0, power * apply("log", a))


OPERATIONS: Mapping[str, Operation] = {
    "add": Operation(np.add, "{} + {}", _arithmetic, _by_partials(lambda a, b, y: (1.0, 1.0))),
    "subtract": Operation(np.subtract, "{} - {}", _arithmetic, _by_partials(lambda a, b, y: (1.0, -1.0))),
    "multiply": Operation(np.multiply, "{} * {}", _arithmetic, _by_partials(lambda a, b, y: (b, a))),
    "divide": Operation(np.divide, "{} / {}", _real, _by_partials(lambda a, b, y: (1 / b, -y / b))),
    "floor_divide": Operation(np.floor_divide, "floor_divide({}, {})", _arithmetic, _no_slope),
    "remainder": Operation(
        np.remainder,
        "remainder_of({}, {})",
        _arithmetic,
        _by_partials(lambda a, b, y: (1.0, -apply("floor_divide", a, b))),
    ),
    "power": Operation(
        np.power,
        "power({}, {})",
        _real,
        _by_partials(lambda a, b, y: (_by_base(a, b), _by_exponent(a, b, y))),
    ),
    "negative": Operation(np.negative, "-{}", _arithmetic, _by_partials(lambda x, y: (-1.0,))),
    "absolute": Operation(
        np.absolute,
        "absolute({})",
        _arithmetic,
        _by_partials(lambda x, y: (apply("where", x > 0.0, 1.0, apply("where", x < 0.0, -1.0, 0.0)),)),
    ),
    "exp": Operation(np.exp, "exp_of({})", _real, _by_partials(lambda x, y: (y,))),
    "exp2": Operation(np.exp2, "exp2_of({})", _real, _by_partials(lambda x, y: (y * math.log(2),))),
    "expm1": Operation(np.expm1, "expm1_of({})", _real, _by_partials(lambda x, y: (apply("exp", x),))),
    "log": Operation(np.log, "logarithm({})", _real, _by_partials(lambda x, y: (1 / x,))),
    "log2": Operation(
        np.log2, "binary_logarithm({})", _real, _by_partials(lambda x, y: (1 / (x * math.log(2)),))
    ),
    "log1p": Operation(np.log1p, "log1p_of({})", _real, _by_partials(lambda x, y: (1 / (1 + x),))),
    "sqrt": Operation(np.sqrt, "sqrt_of({})", _real, _by_partials(lambda x, y: (0.5 / y,))),
    "tanh": Operation(np.tanh, "tanh_of({})", _real, _by_partials(lambda x, y: (1 - y * y,))),
    "sin": Operation(np.sin, "sin_of({})", _real, _by_partials(lambda x, y: (apply("cos", x),))),
    "cos": Operation(np.cos, "cos_of({})", _real, _by_partials(lambda x, y: (-apply("sin", x),))),
    "floor": Operation(np.floor, "floor_of({})", _real, _no_slope),
    "rint": Operation(np.rint, "rint_of({})", _real, _no_slope),
    "minimum": Operation(np.minimum, "minimum({}, {})", _arithmetic, _slope_of_choice(lambda a, b: a <= b)),
    "maximum": Operation(np.maximum, "maximum({}, {})", _arithmetic, _slope_of_choice(lambda a, b: a >= b)),
    "where": Operation(
        np.where, "{} ? {} : {}", _selection, _slope_of_choice(lambda condition, a, b: condition)
    ),
    "less": Operation(np.less, "{} < {}", _comparison, _no_slope),
    "less_equal": Operation(np.less_equal, "{} <= {}", _comparison, _no_slope),
    "greater": Operation(np.greater, "{} > {}", _comparison, _no_slope),
    "greater_equal": Operation(np.greater_equal, "{} >= {}", _comparison, _no_slope),
    "equal": Operation(np.equal, "{} == {}", _comparison, _no_slope),
    "not_equal": Operation(np.not_equal, "{} != {}", _comparison, _no_slope),
    "logical_and": Operation(np.logical_and, "{} && {}", _logical, _no_slope),
    "logical_or": Operation(np.logical_or, "{} || {}", _logical, _no_slope),
    "logical_not": Operation(np.logical_not, "!{}", _logical, _no_slope),
    "bitwise_and": Operation(np.bitwise_and, "{} & {}", _bitwise, _no_slope),
    "bitwise_or": Operation(np.bitwise_or, "{} | {}", _bitwise, _no_slope),
    "bitwise_xor": Operation(np.bitwise_xor, "{} ^ {}", _bitwise, _no_slope),
    "invert": Operation(np.invert, "inverted({})", _bitwise, _no_slope),
    "left_shift": Operation(np.left_shift, "shifted_left({}, {})", _bitwise, _no_slope),
    "right_shift": Operation(np.right_shift, "shifted_right({}, {})", _bitwise, _no_slope),
}


def _sign(x: Expression) -> Expression:
    """The sign; NaN for NaN."""
    if x.kind != "float":
        return apply("where", x > 0, 1, apply("where", x < 0, -1, 0))
    neither = apply("where", x == 0.0, 0.0, math.nan)
    return apply("where", x > 0.0, 1.0, apply("where", x < 0.0, -1.0, neither))


def _reciprocal(x: Expression) -> Expression:
    if x.kind != "float":
        raise TypeError(f"np.reciprocal is applied to {x.kind}, and would round the result to 0; use 1 / x")
    return 1 / x


_SYNONYMS = {"true_divide": "divide", "mod": "remainder", "abs": "absolute"}
# Operations that are composed of others.
_COMPOSED: Mapping[str, Callable[..., Expression]] = {
    "positive": lambda x: x,
    "square": lambda x: x * x,
    "fabs": lambda x: apply("absolute", _cast(x, "float")),
    "reciprocal": _reciprocal,
    "sign": _sign,
    "ceil": lambda x: -apply("floor", -x),
    "trunc": lambda x: apply("where", x < 0, apply("ceil", x), apply("floor", x)),
    "logical_xor": lambda a, b: _cast(a, "bool") != _cast(b, "bool"),
    "isnan": lambda x: x != x,
    "isinf": lambda x: apply("fabs", x) == math.inf,
    "isfinite": lambda x: apply("fabs", x) < math.inf,
}


# The NumPy functions that can be traced.
_TRACEABLE = {*OPERATIONS, *_COMPOSED, *_SYNONYMS, "clip"}


def has_reciprocal(divisor: Expression) -> bool:
    """Whether it is a constant whose float32 reciprocal has all bits; 0 or inf could make inf * 0, a NaN."""
    if divisor.operation != "constant":
        return False
    return bool(1 / _LARGEST_FACTOR <= abs(divisor.value) <= _LARGEST_FACTOR)


def _unknown(name: str) -> str:
    return f"np.{name} cannot be traced; these can: {', '.join(sorted(_TRACEABLE))}"


def _as_product(base: Expression, exponent: Expression) -> Expression | None:
    """A constant integer power as products; None for any other power."""
    if exponent.operation == "constant":
        number = float(exponent.value)
        if number.is_integer() and 1 <= number <= _MOST_PRODUCTS:
            base = _cast(base, _common((base.kind, exponent.kind)))
            return functools.reduce(operator.mul, [base] * int(number))
    if _RANK[_common((base.kind, exponent.kind))] < _RANK["float"]:
        raise TypeError(
            f"the power of an integer must be a constant from 1 to {_MOST_PRODUCTS}; for others, use 1.0 * x"
        )
    return None


def _cast(value: Expression, kind: Kind) -> Expression:
    if kind != "float":
        return _cast_after(value, kind)
    # Each once, though many of them may share an operand.
    done: dict[int, Expression] = {}
    for node in in_order(value, through=_casts_before):
        done[id(node)] = (
            apply(node.operation, *(done[id(operand)] for operand in node.operands))
            if _casts_before(node)
            else _cast_after(node, kind)
        )
    return done[id(value)]


def _casts_before(node: Expression) -> bool:
    return node.kind != "float" and node.operation in _CAST_BEFORE


def _cast_after(value: Expression, kind: Kind) -> Expression:
    if value.kind == kind:
        return value
    if value.operation == "constant" and kind in ("int64", "float"):
        return Expression("constant", kind, (), float(value.value) if kind == "float" else int(value.value))
    return Expression("cast", kind, (value,), kind)
