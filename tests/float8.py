"""Random problems with operands of 8 bits, and the assertion that holds their results to the rule."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from feature_cases import Case
from tolerance import Array, Problem

from cufa.checking import compare_results
from cufa.integers import round_up
from cufa.problem import FLOAT8, INPUT_DTYPES, MAX_ALIGN_BYTES

DESCALES = ("q_descale", "k_descale", "v_descale")


def random_descales(
    rng: np.random.Generator, batch: int, kv_heads: int, names: Collection[str] = DESCALES
) -> dict[str, Array]:
    """One for each of q, k and v, or for some of them."""
    return {name: rng.uniform(0.5, 2, (batch, kv_heads)).astype(np.float32) for name in names}


def descales_of(rng: np.random.Generator, case: Case, names: Collection[str] = DESCALES) -> dict[str, Array]:
    """Random ones for the sequences and KV heads of a case."""
    offsets = case.arrays.get("cu_seqlens_q")
    sequences = len(case.problem.q) if offsets is None else len(offsets) - 1
    return random_descales(rng, sequences, case.problem.k.shape[-2], names)


def with_keys_in_8_bits(rng: np.random.Generator, case: Case) -> Case:
    """The case of 16 bits with keys and values in 8, and rows of queries of many magnitudes."""
    q, k, v = case.problem.q, case.problem.k, case.problem.v
    rows = q * rng.choice([2.0**-12, 1.0, 1.0, 4.0], (*q.shape[:-1], 1)).astype(q.dtype)
    in_8_bits = (x.astype(INPUT_DTYPES[FLOAT8]) for x in (k, v))
    return replace(case, problem=Problem(rows, *in_8_bits, case.problem.dout))


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
    """Hold out and lse to the truth about the arrays as they are, of which those in 8 bits have descales."""
    no_gradient = np.zeros((*problem.q.shape[:-1], problem.v.shape[-1]), np.float32)
    tensors = problem.q, problem.k, problem.v, no_gradient
    for comparison in compare_results(*tensors, {"out": out, "lse": lse}, **(descales or {}), **rules):
        assert comparison.ok, str(comparison)
