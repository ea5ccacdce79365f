"""Functions of one's own on scores, as FlexAttention has them (Dong et al. 2024): `score_mod`, `mask_mod`.

A function is called once with symbols (cufa/expression.py), and what it computes is written as the header
score_mod.cuh, which kernels are compiled with; its derivative is found from the same symbols. On the CPU
NumPy computes the same expressions, so that numbers have the same kinds and widths.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from cufa.expression import (
    Expression,
    Kind,
    TracedArray,
    derivative,
    evaluate_all,
    in_order,
    kind_of_dtype,
    lifted,
    symbol,
    write,
)

# The header that is written.
HEADER = "score_mod.cuh"
POINTER_BYTES = STRIDE_BYTES = 8

_PLACE: Mapping[str, Kind] = {"b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
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


@dataclass(frozen=True)
class Written:
    """A traced function in CUDA C++: the arrays it reads, by the names of a call, and its functions.

    Each array has its number of axes and the type of its elements. `of_heads` is whether it may be different
    in each head, `of_batches` in each sequence of the batch.
    """

    arrays: tuple[tuple[str, int, str], ...]
    functions: str
    of_heads: bool
    of_batches: bool

    @property
    def array_bytes(self) -> int:
        """Of addresses and strides in the kernel's parameters."""
        return sum(POINTER_BYTES + ndim * STRIDE_BYTES for _, ndim, _ in self.arrays)


def header(score_mod: Written | None, mask_mod: Written | None) -> str:
    """The text of score_mod.cuh for a call with these functions; None stands for what it has by itself."""
    written = score_mod or _AS_IT_IS, mask_mod or _ALL_SEEN
    fields = [
        f"    ArrayOf<{element}, {ndim}> {_field(name)};\n"
        for of_function in written
        for name, ndim, element in of_function.arrays
    ]
    parts = (
        '#pragma once\n\n#include "traced.cuh"\n',
        f"struct ModArrays {{\n{''.join(fields)}}};\n",
        f"constexpr bool kMaskModOfHead = {_cpp(written[1].of_heads)};\n",
        f"constexpr bool kMaskModOfBatch = {_cpp(written[1].of_batches)};\n",
        *(of_function.functions for of_function in written),
    )
    return "\n".join(parts)


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def _field(name: str) -> str:
    """The name of an array's field: score_mod_0 for score_mod[0]."""
    return name.replace("[", "_").rstrip("]")


def _function(result: str, name: str, arguments: str, expression: Expression) -> str:
    place = ", ".join(f"int {name}" for name in _PLACE)
    return (
        f"__device__ inline {result} {name}(const ModArrays& arrays, {arguments}{place}) {{\n"
        f"{write(expression)}}}\n"
    )


M = TypeVar("M", bound="_Mod")


class _Mod:
    """A function and the arrays that it reads."""

    name: ClassVar[str]
    symbols: ClassVar[Mapping[str, Kind]]

    def __init__(self, function: Callable[..., Any], *arrays: Any) -> None:
        if not callable(function):
            raise TypeError(f"{self.name}'s function is {function!r}; it must be a function")
        self.function = function
        self.arrays = arrays
        for number, array in enumerate(arrays):
            if not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise TypeError(f"array {number} of {self.name} is {array!r}; it must be an array")
            if len(array.shape) == 0:
                raise ValueError(f"array {number} of {self.name} has no axis; it must have at least one")
            if _dtype_of(array).name not in _ELEMENT_TYPES:
                allowed = ", ".join(_ELEMENT_TYPES)
                raise TypeError(f"array {number} of {self.name} has dtype {array.dtype}; it may be {allowed}")

    @property
    def named_arrays(self) -> dict[str, Any]:
        """The arrays by their names in a call."""
        return {f"{self.name}[{number}]": array for number, array in enumerate(self.arrays)}

    @functools.cached_property
    def written(self) -> Written:
        """What a kernel is compiled with; TypeError if the function cannot be traced."""
        arrays = [
            (name, len(array.shape), _ELEMENT_TYPES[_dtype_of(array).name])
            for name, array in self.named_arrays.items()
        ]
        asked = {node.value for node in in_order(self.expression) if node.operation == "symbol"}
        return Written(tuple(arrays), self._functions(), "h" in asked, "b" in asked)

    @functools.cached_property
    def expression(self) -> Expression:
        """What the function computes."""
        symbols = [symbol(name, kind) for name, kind in self.symbols.items()]
        arrays = [
            TracedArray(_field(name), kind_of_dtype(_dtype_of(array)), len(array.shape))
            for name, array in self.named_arrays.items()
        ]
        try:
            return lifted(self.function(*symbols, *arrays))
        except (TypeError, AttributeError) as error:
            raise TypeError(f"{self.name} cannot be traced: {error}") from error

    def __call__(self, *symbols: Any) -> Any:
        """What the function makes of these values of its symbols, arrays that are broadcast."""
        return self._evaluated((self.expression,), symbols)[0]

    def _evaluated(self, expressions: Sequence[Expression], symbols: tuple[Any, ...]) -> list[Any]:
        arrays = {_field(name): array for name, array in self.named_arrays.items()}
        return evaluate_all(expressions, dict(zip(self.symbols, symbols, strict=True)) | arrays)

    def with_arrays(self: M, named: Mapping[str, Any]) -> M:
        """The same with those arrays that have its arrays' names in a call."""
        other = copy.copy(self)
        other.arrays = tuple(named[name] for name in self.named_arrays)
        return other

    def _functions(self) -> str:
        raise NotImplementedError


class ScoreMod(_Mod):
    """A function that makes new scores of scores, and the arrays that it reads.

        cufa.ScoreMod(lambda score, b, h, q_idx, kv_idx, table: score + table[h, q_idx - kv_idx + 511], table)

    `cufa.attention` says what such a function may be. It is traced when it is first used, and numbers that it
    takes from around it are then fixed; arrays may change from call to call.

    Args:
        function: called with (score, b, h, q_idx, kv_idx, *arrays), returns the new score.
        arrays: what it reads, element by element: NumPy's, CuPy's or any with DLPack, of the kind of q, with
            one axis at least; bool, integers of up to 64 bits but not uint64, or floats. On a GPU indices are
            not checked, and negative ones do not count from the end; elements are read for keys that masks
            hide, too.

    Raises:
        TypeError: no function, or no array.
        ValueError: an array without an axis.
    """

    name = "score_mod"
    symbols: ClassVar[Mapping[str, Kind]] = {"score": "float", **_PLACE}

    @functools.cached_property
    def slope(self) -> Expression:
        """By how much the new score changes with the score."""
        slope = derivative(self.expression, "score")
        return lifted(0.0) if slope is None else slope

    def with_slope(self, *symbols: Any) -> tuple[Any, Any]:
        """What the function makes of these values of its symbols, and the slope there."""
        score, slope = self._evaluated((self.expression, self.slope), symbols)
        return score, slope

    def _functions(self) -> str:
        adds = self.slope.operation == "constant" and self.slope.value == 1
        functions = (("modified_score", self.expression), ("modified_slope", self.slope))
        return "\n".join(
            (
                f"constexpr bool kScoreModSlopes = {'false' if adds else 'true'};\n",
                *(_function("acc_t", name, "acc_t score, ", expression) for name, expression in functions),
            )
        )


class MaskMod(_Mod):
    """A function that says which keys queries see, and the arrays that it reads.

        cufa.MaskMod(lambda b, h, q_idx, kv_idx, document: document[q_idx] == document[kv_idx], document)

    Args:
        function: called with (b, h, q_idx, kv_idx, *arrays), returns True for a key that is seen.
        arrays: as of `ScoreMod`.

    Raises:
        TypeError, ValueError: as `ScoreMod`.
    """

    name = "mask_mod"
    symbols = _PLACE

    def _functions(self) -> str:
        if self.expression.kind == "float":
            raise TypeError("mask_mod returns a float; it must be a bool, as a comparison is")
        return _function("bool", "mod_sees", "", self.expression)


_AS_IT_IS = ScoreMod(lambda score, *_: score).written
_ALL_SEEN = MaskMod(lambda *_: True).written


class Mods(NamedTuple):
    """Those of a call."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays of both, by name."""
        return {name: x for mod in self if mod is not None for name, x in mod.named_arrays.items()}

    @property
    def written(self) -> tuple[Written | None, Written | None]:
        """What kernels are compiled with for each."""
        score_mod, mask_mod = self
        return score_mod.written if score_mod else None, mask_mod.written if mask_mod else None

    def with_arrays(self, named: Mapping[str, Any]) -> Mods:
        """The same with other arrays, by name."""
        score_mod, mask_mod = self
        return Mods(score_mod and score_mod.with_arrays(named), mask_mod and mask_mod.with_arrays(named))


_NO_MODS = Mods()


def mods_of(score_mod: Any, mask_mod: Any) -> Mods:
    """The arguments of a call as what they stand for; TypeError if they are neither that nor functions."""
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
    """(b, h, q_idx, kv_idx) of some queries and keys of a head, which are broadcast to (rows, keys)."""
    q_idx, kv_idx = (np.arange(part.start, part.stop, dtype=np.int32) for part in (rows, keys))
    return np.array([[b]], np.int32), np.array([[h]], np.int32), q_idx[:, None], kv_idx[None, :]


def _dtype_of(array: Any) -> np.dtype[Any]:
    """An array's dtype as NumPy's, of which other libraries have the names."""
    dtype = array.dtype
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])
