"""Random problems of 8-bit operands, and the assertion that holds their results to what rounding allows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tolerance import Array, Problem

from cufa import reference
from cufa.checking import compare, rounding_of_sums
from cufa.cpu import descaled
from cufa.problem import FLOAT8

DESCALES = ("q_descale", "k_descale", "v_descale")
# Hopper keeps this much of a sum of 8-bit products, relative to its largest term; the LSE shows it.
SUM_ERROR = 2.0**-12


def random_descales(rng: np.random.Generator, batch: int, kv_heads: int) -> dict[str, Array]:
    """One for each of q, k and v."""
    return {name: rng.uniform(0.5, 2, (batch, kv_heads)).astype(np.float32) for name in DESCALES}


def assert_float8(
    out: Array, lse: Array, problem: Problem, descales: Mapping[str, Array] | None = None, **rules: Any
) -> None:
    """Hold out and lse to the truth about the arrays as they are.

    Weights are rounded to 8 bits, independently of each other, and S is a sum that tensor cores keep in fewer
    bits than float32 has. There is no standard attention to compare with: in 8 bits it is of no use.
    """
    rules = {"softmax_scale": problem.q.shape[-1] ** -0.5} | rules
    kv_heads = problem.k.shape[-2]
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    q, k, v = (
        descaled(x, (descales or {}).get(f"{name}_descale"), kv_heads).astype(np.float64)
        for name, x in tensors.items()
    )
    exact = dict(zip(("out", "lse"), reference.attention(q, k, v, **rules), strict=True))
    rounding = rounding_of_sums(FLOAT8, q, k, v, np.zeros((*q.shape[:-1], v.shape[-1])), **rules)
    rounding["lse"] += SUM_ERROR * float(np.abs(exact["lse"]).max(where=np.isfinite(exact["lse"]), initial=1))
    for name, actual in (("out", out), ("lse", lse)):
        comparison = compare(actual, exact[name], exact[name], 0, name, rounding[name])
        assert comparison.ok, str(comparison)
