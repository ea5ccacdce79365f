"""Random problems of 8-bit operands, and the assertion that holds their results to what rounding allows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tolerance import Array, Problem

from cufa.checking import compare_results
from cufa.problem import MAX_ALIGN_BYTES
from cufa.rounding import round_up

DESCALES = ("q_descale", "k_descale", "v_descale")


def random_descales(rng: np.random.Generator, batch: int, kv_heads: int) -> dict[str, Array]:
    """One for each of q, k and v."""
    return {name: rng.uniform(0.5, 2, (batch, kv_heads)).astype(np.float32) for name in DESCALES}


def transposed(values: Array) -> Array:
    """Values (batch, seqlen_k, kv_heads, value_dim) whose keys lie next to each other; NaN after the last."""
    batch, seqlen_k, kv_heads, value_dim = values.shape
    rows = np.full((batch, kv_heads, value_dim, round_up(seqlen_k, MAX_ALIGN_BYTES)), np.nan, values.dtype)
    rows[..., :seqlen_k] = values.transpose(0, 2, 3, 1)
    return rows[..., :seqlen_k].transpose(0, 3, 1, 2)


def with_values_transposed(problem: Problem) -> Problem:
    """The same problem, its values lying so."""
    return replace(problem, v=transposed(problem.v))


def assert_float8(
    out: Array, lse: Array, problem: Problem, descales: Mapping[str, Array] | None = None, **rules: Any
) -> None:
    """Hold out and lse to the truth about the arrays as they are."""
    no_gradient = np.zeros((*problem.q.shape[:-1], problem.v.shape[-1]), np.float32)
    tensors = problem.q, problem.k, problem.v, no_gradient
    for comparison in compare_results(*tensors, {"out": out, "lse": lse}, **(descales or {}), **rules):
        assert comparison.ok, str(comparison)
