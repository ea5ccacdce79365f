"""The header score_mod.cuh as it is written for a call, from functions that have been traced."""

from __future__ import annotations

from dataclasses import dataclass

from cufa.traced.code import write
from cufa.traced.expression import Expression

# Its name.
HEADER = "scores/score_mod.cuh"
FIELD_BYTES = 8  # of an address, a stride, a length

_PLACE_ARGUMENTS = "int b, int h, SplitIndex q_idx, SplitIndex kv_idx"


@dataclass(frozen=True)
class Written:
    """A traced function in CUDA C++: the arrays it reads, by the names of a call, and its functions.

    Each array has its number of axes and the type of its elements. `of_heads` is whether it may be different
    in each head, `of_batches` in each sequence of the batch, `looks_up` whether it reads
    them at places that change from score to score. `differentiated` are those arrays whose
    gradients are wanted, `elements` how many of their elements a score reads, `changing_with_query` which of
    these are others for another query, `changing_with_key` for another key. `element_slopes` is the body of a
    function that says by how much a score changes with each; `slopes_ask_score` if that depends on it.
    """

    arrays: tuple[tuple[str, int, str], ...]
    functions: str
    of_heads: bool
    of_batches: bool
    looks_up: bool = False
    differentiated: tuple[tuple[str, int, str], ...] = ()
    elements: int = 0
    changing_with_query: tuple[int, ...] = ()
    changing_with_key: tuple[int, ...] = ()
    element_slopes: str = ""
    slopes_ask_score: bool = False

    @property
    def differentiated_names(self) -> tuple[str, ...]:
        """By their names in a call."""
        return tuple(name for name, _, _ in self.differentiated)

    @property
    def array_bytes(self) -> int:
        """In the kernel's parameters: address and strides, and of gradients two numbers and lengths."""
        of_arrays = sum(1 + ndim for _, ndim, _ in self.arrays)
        of_gradients = sum(2 + ndim for _, ndim, _ in self.differentiated)
        return FIELD_BYTES * (of_arrays + of_gradients)


def header_of(score_mod: Written, mask_mod: Written) -> str:
    """The text of score_mod.cuh for a call with these functions."""
    fields = [
        f"    ArrayOf<{element}, {ndim}> {field_name(name)};\n"
        for of_function in (score_mod, mask_mod)
        for name, ndim, element in of_function.arrays
    ]
    differentiated = score_mod.differentiated
    fields += [
        f"    GradientOf<{element}, {ndim}> d{field_name(name)};\n" for name, ndim, element in differentiated
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


def _of_gradients(score_mod: Written) -> str:
    """What the gradients of its arrays ask for."""
    fields = [f"arrays.d{field_name(name)}" for name, _, _ in score_mod.differentiated]
    count = " + ".join(f"{field}.count()" for field in fields) or "0"
    changing = {"query": score_mod.changing_with_query, "key": score_mod.changing_with_key}
    writes = "".join(f"    {field}.write(sums, place);\n" for field in fields)
    return (
        f"constexpr bool kArrayGradients = {cpp_bool(bool(fields))};\n"
        f"constexpr int kElements = {score_mod.elements};\n\n"
        f"{''.join(_changes_with(name, numbers) for name, numbers in changing.items())}"
        "__device__ inline void element_slopes(const ModArrays& arrays, acc_t score, "
        f"{_PLACE_ARGUMENTS}, ElementSlope* slopes) {{\n{score_mod.element_slopes}}}\n\n"
        f"__device__ inline int array_sums(const ModArrays& arrays) {{\n    return {count};\n}}\n\n"
        "__device__ inline void write_array_gradients(const ModArrays& arrays, const acc_t* sums, "
        f"int place) {{\n{writes}}}\n"
    )


def _changes_with(name: str, numbers: tuple[int, ...]) -> str:
    among = " || ".join(f"element == {number}" for number in numbers) or "false"
    return f"__device__ constexpr bool changes_with_{name}(int element) {{\n    return {among};\n}}\n\n"


def cpp_bool(value: bool) -> str:
    """As C++ spells it."""
    return "true" if value else "false"


def field_name(name: str) -> str:
    """The name of an array's field: score_mod_0 for score_mod[0]."""
    return name.replace("[", "_").rstrip("]")


def function_of(result: str, name: str, arguments: str, expression: Expression) -> str:
    """One of its functions, which computes an expression."""
    return (
        f"__device__ inline {result} {name}(const ModArrays& arrays, {arguments}{_PLACE_ARGUMENTS}) {{\n"
        f"{write(expression)}}}\n"
    )
