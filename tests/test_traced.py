"""What traced functions compute in kernels where NumPy's answer is not what C makes of it."""

import itertools
import math
import struct

import emulator
import numpy as np
import pytest

from cufa import jit
from cufa.device import target
from cufa.plan.macros import common_macros
from cufa.problem import Problem
from cufa.traced.code import write
from cufa.traced.evaluation import evaluate_all
from cufa.traced.expression import lifted, symbol

SOURCE, HEADER, SMEM_BYTES = "probe_traced.cu", "traced_functions.cuh", 16
SYMBOLS = {"x": "float", "y": "float", "i": "int32", "j": "int32"}
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 7.0, 1e-20, -1e-20, 3e-6, 88.0, -1e30, np.inf, -np.inf, np.nan)
INTEGERS = (0, 1, -1, 2, 3, -7, 31, 32, 33, 63, 100, -(2**31), 2**31 - 1)

# They compute the same bits, but for those that end with a value of a library.
EXACT = {
    "float floor_divide": lambda x, y, i, j: x // y,
    "float remainder": lambda x, y, i, j: x % y,
    "floor_divide": lambda x, y, i, j: i // j,
    "remainder": lambda x, y, i, j: i % j,
    "left_shift": lambda x, y, i, j: i << j,
    "right_shift": lambda x, y, i, j: i >> j,
    "floor_divide of 64 bits": lambda x, y, i, j: (i.astype(np.int64) << 32) // j,
    "remainder of 64 bits": lambda x, y, i, j: (i.astype(np.int64) << 32) % j,
    "shifts of 64 bits": lambda x, y, i, j: (i.astype(np.int64) << j) >> i,
    "integers that wrap around": lambda x, y, i, j: (
        ((i * 1103515245 + 12345) >> 16) ^ abs(j * 2**30 * 2) ^ -(i * j) ^ (2147483647 - j * 3)
    ),
    "64 bits that wrap around": lambda x, y, i, j: abs((i.astype(np.int64) << 32) * j - 2**62) * 3 + 2**62,
    "constants that wrap around": lambda x, y, i, j: (i // 2 + 2**30 + 2**30 < i // 2) * 1.0,
    "least constants": lambda x, y, i, j: (
        ((i + -(2**31)) ^ (i // 2 - j // 2 - 2**31)) * 1.0
        + (j > -(2**63))
        + ((i + -(2**63)) >> 32)
        + np.maximum(i, -(2**31))
    ),
    "rounded": lambda x, y, i, j: np.trunc(x) + np.rint(y),
    "what is finite": lambda x, y, i, j: np.isfinite(x) + 2 * np.isinf(y) + 4 * np.isnan(x),
    "choices of 32 bits": lambda x, y, i, j: np.where(x > y, 2**20, j) * 4096,
    "sign": lambda x, y, i, j: np.sign(x) + 2 * np.sign(y),
    "by a tiny constant": lambda x, y, i, j: x / 1e-39 + y / 1e-300,
    "by a huge constant": lambda x, y, i, j: x / 1e38 - y / 1e300,
}
ROUNDED = {
    "expm1": lambda x, y, i, j: np.expm1(x),
    "log1p": lambda x, y, i, j: np.log1p(x),
    "log": lambda x, y, i, j: np.log(x),
    "log2": lambda x, y, i, j: np.log2(x),
    "quotient": lambda x, y, i, j: x / y,
    "quotient by a constant": lambda x, y, i, j: i / 49 + j / 2.885,
}
# For 16-bit operands, of numbers that are not subnormal.
FAST = {
    "log": lambda x, y, i, j: np.log(x),
    "log2": lambda x, y, i, j: np.log2(x),
    "log of a place": lambda x, y, i, j: np.log(abs(i.astype(np.float32))),
    "quotient": lambda x, y, i, j: x / y,
    "quotient by a constant": lambda x, y, i, j: i / 49 + j / 2.885,
}
# What becomes an index is the same with 16-bit operands, and for all numbers.
PLACES = {
    "quotient by 49": lambda x, y, i, j: np.floor(i / 49),
    "quotient by 41": lambda x, y, i, j: np.floor(i / 41.0),
    "quotient by a thousand": lambda x, y, i, j: np.floor(i / 1000),
    "quotient of a sum": lambda x, y, i, j: np.floor((i + 0.5) / 7),
    "infinite": lambda x, y, i, j: np.log(i * 0.0) / math.log(8) + np.exp(1e4 + i) / 3,
    "powers of two from 1 on": lambda x, y, i, j: np.log2(2.0 ** abs(j)),
    "bucket of T5": lambda x, y, i, j: (np.log(np.maximum(i, 16) / 16) / math.log(8) * 16).astype(np.int32),
}


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("emulator", "gpu")])
def compute(request, tmp_path):
    """Results of functions, (functions, values), of x, y, i and j, in a kernel for operands of a dtype."""
    emulator.with_probe(SOURCE, tmp_path)
    run = on_gpu if request.param == "gpu" else on_emulator

    def results_of(dtype, functions, *arguments):
        (tmp_path / HEADER).write_text(header_of(functions))
        problem = Problem("forward", dtype, 1, 1, 1, 1, 1, 16, 16, False)
        macros = (*common_macros(problem), ("SMEM_BYTES", SMEM_BYTES))
        return run(tmp_path, macros, arguments, len(functions))

    return results_of


def numpys(function, arguments):
    """What NumPy computes, in float32."""
    values = dict(zip(SYMBOLS, arguments, strict=True))
    return np.asarray(evaluate_all([traced(function)], values)[0]).astype(np.float32)


def traced(function):
    return lifted(function(*(symbol(name, kind) for name, kind in SYMBOLS.items())))


def header_of(functions):
    arguments = "acc_t x, acc_t y, int i, int j"
    parts = ['#pragma once\n#include "scores/traced.cuh"\n']
    for number, function in enumerate(functions):
        parts.append(f"__device__ inline acc_t value_{number}({arguments}) {{\n{write(traced(function))}}}\n")
    calls = "".join(f"    results[{n} * count] = value_{n}(x, y, i, j);\n" for n in range(len(functions)))
    parts.append(
        f"__device__ inline void write_values({arguments}, acc_t* results, int count) {{\n{calls}}}\n"
    )
    return "\n".join(parts)


def on_emulator(folder, macros, arguments, functions):
    results = np.full((functions, arguments[0].size), 7, np.float32)
    params = struct.pack("=5qi4x", *(array.ctypes.data for array in (*arguments, results)), results.shape[1])
    buffers = {**dict(zip(SYMBOLS, arguments, strict=True)), "results": results}
    emulator.Module(SOURCE, dict(macros), folder=folder).launch("traced", 2, 64, 0, params, buffers)
    return results


def on_gpu(folder, macros, arguments, functions):
    cupy = pytest.importorskip("cupy")
    placed = [cupy.asarray(array) for array in arguments]
    results = cupy.full((functions, arguments[0].size), 7, np.float32)
    params = struct.pack("=5qi4x", *(array.data.ptr for array in (*placed, results)), results.shape[1])
    kernel = jit.load(jit.build(jit.Variant(SOURCE, macros, target(None).arch, folder))).get_function(
        "traced"
    )
    kernel((2,), (64,), (np.frombuffer(params, np.dtype((np.void, len(params)))),))
    return results.get()


@np.errstate(all="ignore")
def test_kernels_have_numpys_answers(compute):
    floats = np.array(list(itertools.product(FLOATS, repeat=2)), np.float32)
    integers = np.array(list(itertools.product(INTEGERS, repeat=2)), np.int32)
    count = max(len(floats), len(integers))
    arguments = [np.resize(column, count) for column in (*floats.T, *integers.T)]
    results = iter(compute("float32", [*EXACT.values(), *ROUNDED.values()], *arguments))
    for rtol, functions in ((0, EXACT), (1e-6, ROUNDED)):
        for name, function in functions.items():
            result, expected = next(results), numpys(function, arguments)
            np.testing.assert_allclose(result, expected, rtol, err_msg=name)
            number = ~np.isnan(expected)
            np.testing.assert_array_equal(
                np.signbit(result[number]), np.signbit(expected[number]), err_msg=name
            )


@np.errstate(all="ignore")
def test_fast_answers_of_16_bit_kernels(compute, rng):
    floats = np.array(list(itertools.product(FLOATS, repeat=2)), np.float32)
    floats = np.concatenate((floats, rng.uniform(0.25, 4, (4000, 2)), rng.lognormal(0, 9, (4000, 2))))
    integers = rng.integers(-(10**5), 10**5, (len(floats), 2), dtype=np.int32)
    arguments = [*floats.astype(np.float32).T.copy(), *integers.T.copy()]
    results = compute("bfloat16", list(FAST.values()), *arguments)
    for (name, function), result in zip(FAST.items(), results, strict=True):
        expected = numpys(function, arguments)
        np.testing.assert_allclose(result, expected, 2**-21, 2**-22 if "log" in name else 0, err_msg=name)


@np.errstate(all="ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_are_exact(compute, dtype):
    i = np.arange(2**14, dtype=np.int32)
    arguments = [np.ones(i.size, np.float32), np.ones(i.size, np.float32), i, i % 250 - 125]
    results = compute(dtype, list(PLACES.values()), *arguments)
    for (name, function), result in zip(PLACES.items(), results, strict=True):
        np.testing.assert_array_equal(result, numpys(function, arguments), err_msg=name)
