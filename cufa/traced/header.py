"""Writes the header score_mod.cuh for a call, from its traced functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from cufa.traced.code import write
from cufa.traced.expression import Expression

# The name of the header.
HEADER = "scores/score_mod.cuh"
FIELD_BYTES = 8  # of an address, a stride or a length

_PLACE_ARGUMENTS = "int b, int h, SplitIndex q_idx, SplitIndex kv_idx"


class ReadArray(NamedTuple):
    """An array that a function reads: its name in a call, its number of axes and its element type.

    `adjacent` says that elements along the last axis are known to be adjacent in memory.
    """

    name: str
    ndim: int
    element: str
    adjacent: bool = False

    @property
    def field(self) -> str:
        """The name of the array's field in C++."""
        return field_name(self.name)


@dataclass(frozen=True)
class TracedCode:
    """A traced function in CUDA C++: the arrays it reads, and its functions.

    `of_heads` says whether the result may differ between heads, `of_batches` between sequences of the batch,
    `looks_up` whether arrays are read at indices that change from score to score. `differentiated` are the
    arrays whose gradients are requested, `elements` the number of their elements that a score reads;
    `changing_with_query` are the elements that differ for another query, `changing_with_key` for another key,
    and `of_distance` those that differ for another distance of the two, and not otherwise, none if any
    depends on the score.
    `element_slopes` is the body of a function for the derivative of a score by each; `slopes_ask_score` says
    whether a derivative or what element it is of depends on the score.
    """

    arrays: tuple[ReadArray, ...]
    functions: str
    of_heads: bool
    of_batches: bool
    looks_up: bool = False
    differentiated: tuple[ReadArray, ...] = ()
    elements: int = 0
    changing_with_query: tuple[int, ...] = ()
    changing_with_key: tuple[int, ...] = ()
    of_distance: tuple[int, ...] = ()
    element_slopes: str = ""
    slopes_ask_score: bool = False

    @property
    def differentiated_names(self) -> tuple[str, ...]:
        """The names of the differentiated arrays in a call."""
        return tuple(array.name for array in self.differentiated)

    @property
    def array_bytes(self) -> int:
        """Bytes in the kernel's parameters: address and strides; for gradients two numbers and lengths."""
        of_arrays = sum(1 + array.ndim for array in self.arrays)
        of_gradients = sum(2 + array.ndim for array in self.differentiated)
        return FIELD_BYTES * (of_arrays + of_gradients)

    def with_adjacent(self, names: Collection[str]) -> TracedCode:
        """The same for arrays of which those named have adjacent elements along the last axis."""
        return replace(
            self, arrays=tuple(array._replace(adjacent=array.name in names) for array in self.arrays)
        )


def header_of(score_mod: TracedCode, mask_mod: TracedCode) -> str:
    """The text of score_mod.cuh for a call with these functions."""
    fields = [
        f"    ArrayOf<{array.element}, {array.ndim}, {cpp_bool(array.adjacent)}> {array.field};\n"
        for of_function in (score_mod, mask_mod)
        for array in of_function.arrays
    ]
    fields += [
        f"    GradientOf<{array.element}, {array.ndim}> d{array.field};\n"
        for array in score_mod.differentiated
    ]
    parts = (
        '#pragma once\n\n#include "scores/traced.cuh"\n',
        f"struct ModArrays {{\n{''.join(fields)}}};\n",
        f"constexpr bool kMaskModOfHead = {cpp_bool(mask_mod.of_heads)};\n",
        f"constexpr bool kMaskModOfBatch = {cpp_bool(mask_mod.of_batches)};\n",
        *(of_function.functions for of_function in (score_mod, mask_mod)),
        _of_gradients(score_mod),
    )
    return "\n".join(parts)


def _of_gradients(score_mod: TracedCode) -> str:
    """The part of the header for the gradients of its arrays."""
    fields = [f"arrays.d{array.field}" for array in score_mod.differentiated]
    count = " + ".join(f"{field}.count()" for field in fields) or "0"
    elements = {
        "changes_with_query": score_mod.changing_with_query,
        "changes_with_key": score_mod.changing_with_key,
        "is_of_distance": score_mod.of_distance,
    }
    writes = "".join(f"    {field}.write(sums, place);\n" for field in fields)
    return (
        f"constexpr bool kArrayGradients = {cpp_bool(bool(fields))};\n"
        f"constexpr int kElements = {score_mod.elements};\n\n"
        f"{''.join(_is_one_of(name, numbers) for name, numbers in elements.items())}"
        "__device__ inline void element_slopes(const ModArrays& arrays, acc_t score, "
        f"{_PLACE_ARGUMENTS}, ElementSlope* slopes) {{\n{score_mod.element_slopes}}}\n\n"
        f"__device__ inline int array_sums(const ModArrays& arrays) {{\n    return {count};\n}}\n\n"
        "__device__ inline void write_array_gradients(const ModArrays& arrays, const acc_t* sums, "
        f"int place) {{\n{writes}}}\n"
    )


def _is_one_of(name: str, numbers: tuple[int, ...]) -> str:
    among = " || ".join(f"element == {number}" for number in numbers) or "false"
    return f"__device__ constexpr bool {name}(int element) {{\n    return {among};\n}}\n\n"


def cpp_bool(value: bool) -> str:
    """The value as C++ spells it."""
    return "true" if value else "false"


def field_name(name: str) -> str:
    """The name of an array's field: score_mod_0 for score_mod[0]."""
    return name.replace("[", "_").rstrip("]")


def function_of(result: str, name: str, arguments: str, expression: Expression) -> str:
    """A C++ function that computes an expression."""
    return (
        f"__device__ inline {result} {name}(const ModArrays& arrays, {arguments}{_PLACE_ARGUMENTS}) {{\n"
        f"{write(expression)}}}\n"
    )
