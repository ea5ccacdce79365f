"""`score_mod` and `mask_mod`: the caller's own functions of scores, as in FlexAttention (Dong et al. 2024).

A function is called once with symbols. What it computes becomes a header that kernels are compiled with; its
derivative comes from the same symbols (`cufa.traced`). On the CPU, NumPy evaluates the same expressions, so
numbers have the same kinds and widths.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cufa.arrays import check_elements
from cufa.messages import counted, kind_of, shown
from cufa.problem import Shape, dtype_of
from cufa.traced.code import write_slopes
from cufa.traced.derivatives import (
    added_terms,
    derivative,
    element_derivatives,
    has_large_constant,
    is_of_distance,
    times,
)
from cufa.traced.evaluation import evaluate_all
from cufa.traced.expression import (
    Expression,
    Kind,
    TracedArray,
    in_order,
    kind_of_dtype,
    lifted,
    names_in,
    symbol,
)
from cufa.traced.header import ReadArray, TracedCode, cpp_bool, field_name, function_of, header_of

_Array: TypeAlias = npt.NDArray[Any]

_PLACE: Mapping[str, Kind] = {"b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
# Symbols that differ between the scores of a tile.
_VARYING = {"q_idx", "kv_idx"}
_NAMED_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ELEMENT_TYPES = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
}


M = TypeVar("M", bound="_Mod")


class _Mod:
    """A function and the arrays that it reads."""

    name: ClassVar[str]
    symbols: ClassVar[Mapping[str, Kind]]
    floats = np.dtype(np.float32)  # that of numbers, if there is no score

    def __init__(self, function: Callable[..., Any] | None = None, *arrays: Any, **named: Any) -> None:
        if named:  # Python's own message would not say how arrays are given
            kind, names = type(self).__name__, ", ".join(named)
            raise TypeError(
                f"{names} of {kind} is given by name; arrays are given by position, as in "
                f"cufa.{kind}(function, {names})"
            )
        if isinstance(function, _Mod):
            raise TypeError(
                f"{self.name}'s function is a {type(function).__name__}; it must be a function, as "
                "mod.function is"
            )
        if not callable(function):
            raise TypeError(f"{self.name}'s function is {shown(function)}; it must be a function")
        self._function = function
        self._arrays = arrays
        for number, array in enumerate(arrays):
            check_elements(f"array {number} of {self.name}", array)
            if not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise TypeError(f"array {number} of {self.name} is {kind_of(array)}; it must be an array")
            if len(array.shape) == 0:
                raise ValueError(
                    f"array {number} of {self.name} has no axis; it must have at least one, as x.reshape(1) "
                    "has"
                )
            if dtype_of(array).name not in _ELEMENT_TYPES:
                allowed = ", ".join(_ELEMENT_TYPES)
                raise TypeError(f"array {number} of {self.name} has dtype {array.dtype}; it may be {allowed}")

    @property
    def function(self) -> Callable[..., Any]:
        """The function, which is traced once."""
        return self._function

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the function reads."""
        return self._arrays

    def __repr__(self) -> str:
        """The function's name, and the dtypes and shapes of its arrays."""
        arrays = [f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in self.arrays]
        return f"{type(self).__name__}({', '.join((_name_of(self.function), *arrays))})"

    @property
    def named_arrays(self) -> dict[str, Any]:
        """The arrays by the names they have in a call."""
        return {f"{self.name}[{number}]": array for number, array in enumerate(self.arrays)}

    @functools.cached_property
    def written(self) -> TracedCode:
        """What a kernel is compiled with; raises TypeError if the function cannot be traced."""
        arrays = [
            ReadArray(name, len(array.shape), _ELEMENT_TYPES[dtype_of(array).name])
            for name, array in self.named_arrays.items()
        ]
        asked = names_in(self.expression)
        try:
            functions = self._functions()
        except RecursionError as error:
            raise TypeError(f"{self.name} cannot be traced: it takes too many steps in a row") from error
        return TracedCode(tuple(arrays), functions, "h" in asked, "b" in asked, self._looks_up)

    @functools.cached_property
    def expression(self) -> Expression:
        """What the function computes, as an expression."""
        symbols = [symbol(name, kind) for name, kind in self.symbols.items()]
        arrays = [
            TracedArray(field_name(name), kind_of_dtype(dtype_of(array)), len(array.shape), title)
            for (name, array), title in zip(self.named_arrays.items(), self._titles(), strict=True)
        ]
        try:
            return lifted(self.function(*symbols, *arrays))
        except (TypeError, AttributeError, LookupError, RecursionError) as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            reason = str(error)
            if len(frames) == 1:  # The call itself failed; no line of the function ran.
                reason += f"; it is called with ({', '.join((*self.symbols, *self.named_arrays))})"
            elif frames[-1].f_globals.get("__name__") not in (Expression.__module__, __name__):
                # The function's own error or another library's, which does not say what can be traced.
                if not isinstance(error, RecursionError):
                    reason = f"the function raised {type(error).__name__}: {reason}"
                reason += (
                    "; a traced function may use Python's operators, NumPy's functions and elements of the "
                    f"arrays it is given, as in cufa.{type(self).__name__}(function, table)"
                )
            raise TypeError(f"{self.name} cannot be traced: {reason}") from error

    def _titles(self) -> Iterator[str]:
        """Names of the arrays for errors: the function's parameter names, if they are known."""
        try:
            parameters = [*inspect.signature(self.function).parameters.values()]
        except (TypeError, ValueError):  # some builtins have no signature
            parameters = []
        named = [parameter.name for parameter in parameters if parameter.kind in _NAMED_BY_PLACE]
        names = named[len(self.symbols) :]
        for number in range(len(self.arrays)):
            title = f"array {number} of {self.name}"
            yield f"{names[number]} ({title})" if number < len(names) else title

    def __call__(self, *symbols: Any) -> Any:
        """Evaluate the function for these values of its symbols: arrays that broadcast.

        For symbols of another function that is being traced, an expression; then no arrays may be read.
        """
        if len(symbols) != len(self.symbols):
            raise TypeError(
                f"a {type(self).__name__} is called with {counted(len(symbols), 'argument')}; it takes "
                f"{', '.join(self.symbols)}"
            )
        if not any(isinstance(value, Expression) for value in symbols):
            return self._evaluated((self.expression,), symbols)[0]
        if self.arrays:
            raise TypeError(
                f"a {type(self).__name__} that reads arrays is called in a traced function; write one "
                "function that takes all arrays, and call mod.function with those of mod"
            )
        return lifted(self.function(*map(lifted, symbols)))

    def _evaluated(self, expressions: Sequence[Expression], symbols: tuple[Any, ...]) -> list[Any]:
        arrays = {field_name(name): array for name, array in self.named_arrays.items()}
        values = dict(zip(self.symbols, symbols, strict=True)) | arrays
        return evaluate_all(expressions, values, self.floats)

    def with_arrays(self: M, named: Mapping[str, Any], floats: np.dtype[Any]) -> M:
        """A copy that computes in this dtype and reads the arrays in `named`, by their names in a call."""
        other = copy.copy(self)
        other.floats = floats
        other._arrays = tuple(named[name] for name in self.named_arrays)
        return other

    @property
    def _looks_up(self) -> bool:
        """Whether arrays are read at indices that change from score to score."""
        elements = (node for node in in_order(self.expression) if node.operation == "element")
        return any(_VARYING & names_in(element) for element in elements)

    def _functions(self) -> str:
        raise NotImplementedError


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class ElementSlope(NamedTuple):
    """The derivative of scores by the array elements that they read, and those elements' indices."""

    name: str
    slope: Any
    indices: tuple[Any, ...]

    def add_to(self, sums: _Array, gradient: _Array, visible: _Array | None) -> None:
        """Add the elements' gradients to `sums`, given the gradient of the scores, (rows, keys).

        Scores that are not visible add nothing.
        """
        places, gradients = self.gradients(sums.shape, gradient, visible)
        np.add.at(sums.reshape(-1), places, gradients)

    def gradients(
        self, shape: Shape, gradient: _Array, visible: _Array | None
    ) -> tuple[npt.NDArray[np.intp], _Array]:
        """The same as places in a contiguous array of this shape, and what is to be added there."""
        of_scores = gradient * self.slope
        if visible is not None:
            np.copyto(of_scores, 0, where=~visible)
        indices = np.broadcast_arrays(*self.indices)
        places = np.atleast_2d(np.ravel_multi_index(indices, shape, mode="wrap"))
        shared = tuple(axis for axis, size in enumerate(places.shape) if size == 1)
        return places, of_scores.sum(axis=shared, keepdims=True)


class WithSlopes(NamedTuple):
    """New scores, and their derivatives by the old scores and by elements of arrays."""

    score: Any
    slope: Any
    elements: list[ElementSlope]


class ScoreMod(_Mod):
    """A function that computes new scores from scores, and the arrays that it reads.

        cufa.ScoreMod(lambda score, b, h, q_idx, kv_idx, table: score + table[h, q_idx - kv_idx + 511], table)

    `cufa.attention` says what the function may do. It is traced at its first use; numbers that it takes from
    outside are fixed then. What arrays hold may change from call to call; for other arrays, make another
    ScoreMod of the same function, which uses the same kernels. Lookups are fastest if the last axis is
    contiguous and its index is a sum of q_idx, kv_idx and numbers, as above. For inputs of 8 or 16 bits, GPUs
    compute np.log, np.log2 and quotients of scores within 2^-22 of their values (logarithms between -1 and 1:
    within 2^-22), and np.tanh within 2^-11; for others within some units in the last place.

    Args:
        function: called with (score, b, h, q_idx, kv_idx, *arrays); returns the new score.
        arrays: what the function reads, element by element: arrays from NumPy, CuPy or a library with DLPack,
            the same as q's, with at least one axis; bool, integers of up to 64 bits except uint64, or floats.
            Integers below 32 bits are computed in 32, uint32 in 64. Negative indices do not count from the
            end. On a GPU, indices are not checked. Elements are also read for keys that masks hide, so clip
            indices that may lie outside. The gradient of an element that a score of -inf is multiplied by is
            NaN; hide keys by a mask instead.

    Raises:
        TypeError: not a function, not an array, or an array of an unsupported dtype.
        ValueError: an array without an axis.
    """

    name = "score_mod"
    symbols: ClassVar[Mapping[str, Kind]] = {"score": "float", **_PLACE}

    @functools.cached_property
    def slope(self) -> Expression:
        """The derivative of the new score by the score."""
        slope = derivative(self.expression, "score")
        return lifted(0.0) if slope is None else slope

    @functools.cached_property
    def element_slopes(self) -> list[tuple[Expression, Expression]]:
        """The elements of float arrays that are read, and the derivative of the new score by each."""
        return element_derivatives(self.expression)

    @property
    def differentiable(self) -> dict[str, Any]:
        """The arrays that have gradients, those of floats, by their names in a call."""
        arrays = self.named_arrays.items()
        return {name: array for name, array in arrays if kind_of_dtype(dtype_of(array)) == "float"}

    @functools.cached_property
    def written_with_gradients(self) -> TracedCode:
        """What a backward is compiled with that also computes the gradients of the arrays."""
        differentiated = tuple(array for array in self.written.arrays if array.name in self.differentiable)
        slopes = self.element_slopes
        asks_score = "score" in names_in(*itertools.chain(*slopes))
        return replace(
            self.written,
            differentiated=differentiated,
            elements=len(slopes),
            changing_with_query=self._elements_that(lambda element: "q_idx" in names_in(element)),
            changing_with_key=self._elements_that(lambda element: "kv_idx" in names_in(element)),
            of_distance=() if asks_score else self._elements_that(is_of_distance),
            element_slopes=write_slopes(slopes),
            slopes_ask_score=asks_score,
        )

    def _elements_that(self, are_so: Callable[[Expression], bool]) -> tuple[int, ...]:
        """The numbers of those elements of which it is true."""
        elements = enumerate(element for element, _ in self.element_slopes)
        return tuple(number for number, element in elements if are_so(element))

    def with_slopes(self, *symbols: Any, of_elements: bool = True) -> WithSlopes:
        """Evaluate the function and its derivatives for these values of its symbols."""
        elements = self.element_slopes if of_elements else []
        wanted = [part for element, slope in elements for part in (slope, *element.operands)]
        score, slope, *parts = self._evaluated((self.expression, self.slope, *wanted), symbols)
        names, values = {field_name(name): name for name in self.named_arrays}, iter(parts)
        of_arrays = [
            ElementSlope(
                names[element.value.name],
                next(values),
                tuple(itertools.islice(values, len(element.operands))),
            )
            for element, _ in elements
        ]
        return WithSlopes(score, slope, of_arrays)

    def _functions(self) -> str:
        has_slopes = self.slope.operation != "constant" or self.slope.value != 1
        added = added_terms(self.expression, "score")
        in_units = [times(term, symbol("unit", "float"), _VARYING) for term in added or [lifted(0.0)]]
        adds = added is not None and not self._looks_up and not has_large_constant(added)
        return "\n".join(
            (
                f"constexpr bool kScoreModSlopes = {cpp_bool(has_slopes)};\n",
                f"constexpr bool kSlopeAsksScore = {cpp_bool('score' in names_in(self.slope))};\n",
                f"constexpr bool kScoreModAdds = {cpp_bool(adds)};\n",
                f"constexpr bool kScoreModLooksUp = {cpp_bool(self._looks_up)};\n",
                function_of("acc_t", "modified_score", "acc_t score, ", self.expression),
                function_of("acc_t", "modified_slope", "acc_t score, ", self.slope),
                function_of("acc_t", "added_score", "acc_t unit, ", functools.reduce(operator.add, in_units)),
            )
        )


class MaskMod(_Mod):
    """A function that says which query sees which key, and the arrays that it reads.

        cufa.MaskMod(lambda b, h, q_idx, kv_idx, document: document[q_idx] == document[kv_idx], document)

    Args:
        function: called with (b, h, q_idx, kv_idx, *arrays); returns True, or a nonzero integer, if the query
            sees the key.
        arrays: as for `ScoreMod`.

    Raises:
        TypeError, ValueError: as `ScoreMod`.
    """

    name = "mask_mod"
    symbols = _PLACE

    def _functions(self) -> str:
        if self.expression.kind == "float":
            raise TypeError("mask_mod returns a float; it must be a bool, as a comparison is")
        return function_of("bool", "mod_sees", "", self.expression)


_AS_IT_IS = ScoreMod(lambda score, *_: score).written
_ALL_SEEN = MaskMod(lambda *_: True).written


def header(score_mod: TracedCode | None, mask_mod: TracedCode | None) -> str:
    """The text of score_mod.cuh for a call with these functions; None leaves scores or masks as they are."""
    return header_of(score_mod or _AS_IT_IS, mask_mod or _ALL_SEEN)


@dataclass(frozen=True, eq=False)
class Mods:
    """The score_mod and mask_mod of a call."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @property
    def by_name(self) -> dict[str, ScoreMod | MaskMod]:
        """Those that are given, by argument name."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: mod for name, mod in mods.items() if mod is not None}

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """The arrays of both, by name."""
        return {name: x for mod in self.by_name.values() for name, x in mod.named_arrays.items()}

    def array_gradients(self, outputs: Any = None) -> list[tuple[str | None, Any]]:
        """For each array of the score_mod, its gradient's name in a call and where to write it, or None.

        `outputs` has an entry for each. Arrays that are not of floats have no gradient, so no name. Raises
        TypeError or ValueError if the outputs are of other arrays.
        """
        if self.score_mod is None:
            return []
        named, differentiable = self.score_mod.named_arrays, self.score_mod.differentiable
        if outputs is None:
            outputs = [None] * len(named)
        if not isinstance(outputs, (tuple, list)):
            raise TypeError(
                f"dscore_mod is {kind_of(outputs)}; it may be a tuple of arrays, as it is returned"
            )
        if len(outputs) != len(named):
            has = f"dscore_mod has {counted(len(outputs), 'entry', 'entries')}"
            raise ValueError(f"{has}; score_mod has {counted(len(named), 'array')}")
        gradients: list[tuple[str | None, Any]] = []
        for name, output in zip(named, outputs, strict=True):
            if name not in differentiable and output is not None:
                raise ValueError(f"d{name} is given, and {name} has {named[name].dtype}; it must be None")
            gradients.append((f"d{name}" if name in differentiable else None, output))
        return gradients

    @functools.cached_property
    def written(self) -> tuple[TracedCode | None, TracedCode | None]:
        """What kernels are compiled with for each of the two."""
        score_mod, mask_mod = self.score_mod, self.mask_mod
        return score_mod.written if score_mod else None, mask_mod.written if mask_mod else None

    @property
    def written_with_gradients(self) -> tuple[TracedCode | None, TracedCode | None]:
        """The same, with gradients of the score_mod's arrays."""
        return self.score_mod.written_with_gradients if self.score_mod else None, self.written[1]

    def with_arrays(self, named: Mapping[str, Any], floats: np.dtype[Any]) -> dict[str, Any]:
        """The same as `by_name`, with other arrays, computed in this dtype."""
        return {name: mod.with_arrays(named, floats) for name, mod in self.by_name.items()}


_NO_MODS = Mods()


def mods_of(score_mod: Any, mask_mod: Any) -> Mods:
    """Wrap the arguments of a call in Mods; raise TypeError for anything but functions and the right mods."""
    if score_mod is None and mask_mod is None:
        return _NO_MODS
    made: list[Any] = []
    for argument, kind in ((score_mod, ScoreMod), (mask_mod, MaskMod)):
        if isinstance(argument, _Mod) and not isinstance(argument, kind):
            raise TypeError(f"{kind.name} is a {type(argument).__name__}; it may be a {kind.__name__}")
        is_function = argument is not None and not isinstance(argument, _Mod)
        made.append(kind(argument) if is_function else argument)
    return Mods(*made)


def place_of(b: int, h: int, rows: slice, keys: slice) -> tuple[Any, Any, Any, Any]:
    """(b, h, q_idx, kv_idx) for some queries and keys of a head, as arrays that broadcast to (rows, keys)."""
    q_idx, kv_idx = (np.arange(part.start, part.stop, dtype=np.int32) for part in (rows, keys))
    return np.array([[b]], np.int32), np.array([[h]], np.int32), q_idx[:, None], kv_idx[None, :]
