"""Random problems, and the assertions that hold results to the rule of `cufa.checking`.

A test should call `assert_attention` and `assert_gradients`.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 - makes numpy.dtype("bfloat16") known
import numpy as np

from cufa.checking import Array, compare, compare_results, gradient_names
from cufa.checking import judge as judge

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("contiguous", "packed", "bhsd", "reversed")


@dataclass(frozen=True)
class Problem:
    """q (batch, seqlen_q, heads, head_dim), k and v with kv_heads and seqlen_k, dout like out.

    Of packed sequences all are (tokens, heads, dim).
    """

    q: Array
    k: Array
    v: Array
    dout: Array

    @property
    def dtype_name(self) -> str:
        return str(self.q.dtype)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, seqlen_q, heads, _ = self.q.shape
        return *batch, heads, seqlen_q


def random_problem(
    rng: np.random.Generator,
    dtype_name: str,
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    logit_scale: float = 1.0,
) -> Problem:
    """Normal random arrays; `logit_scale` multiplies q, and so the logits."""
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return stored((scale * rng.standard_normal(shape)).astype(dtype_name), layout)

    return Problem(
        q=normal(batch, seqlen_q, heads, head_dim, scale=logit_scale),
        k=normal(batch, seqlen_k, kv_heads, head_dim),
        v=normal(batch, seqlen_k, kv_heads, head_dim_v),
        dout=normal(batch, seqlen_q, heads, head_dim_v),
    )


def stored(values: Array, layout: str) -> Array:
    """The values in memory laid out as one of `LAYOUTS`; what lies between them is NaN."""
    batch, seqlen, heads, head_dim = values.shape
    dtype = values.dtype
    view: Array
    if layout == "contiguous":
        view = np.empty(values.shape, dtype)
    elif layout == "packed":
        view = np.full((batch, seqlen, 3, heads, head_dim), np.nan, dtype)[:, :, 1]
    elif layout == "bhsd":
        view = np.empty((batch, heads, seqlen, head_dim), dtype).transpose(0, 2, 1, 3)
    elif layout == "reversed":
        view = np.empty(values.shape, dtype)[:, ::-1]
    else:
        raise ValueError(f"layout is {layout!r}; it may be one of {LAYOUTS}")
    view[...] = values
    return view


def poisoned(like: Array, layout: str = "contiguous") -> Array:
    """NaN in the shape and dtype of an array, for a result to overwrite."""
    return stored(np.full(like.shape, np.nan, like.dtype), layout)


def assert_attention(out: Array, lse: Array | None, problem: Problem, **rules: Any) -> None:
    """Hold out and lse to the rule; `rules` are the arguments of the call, as of `cufa.reference`."""
    _assert_results({"out": out} | ({} if lse is None else {"lse": lse}), problem, rules)


def assert_gradients(gradients: tuple[Array, ...], problem: Problem, **rules: Any) -> None:
    """Hold dq, dk and dv to the rule, and dbias and dsink if `rules` say that they were asked for."""
    names = gradient_names(rules)
    rules = {name: value for name, value in rules.items() if not name.startswith("return_")}
    _assert_results(dict(zip(names, gradients, strict=True)), problem, rules)


def _assert_results(results: dict[str, Array], problem: Problem, rules: dict[str, Any]) -> None:
    inputs = problem.q, problem.k, problem.v, problem.dout
    for comparison in compare_results(*inputs, results, **rules):
        assert comparison.ok, str(comparison)


def assert_close(
    actual: Array,
    exact: Array,
    baseline: Array,
    factor: float,
    what: str,
    rounding: float = 0.0,
) -> None:
    """Fail unless `cufa.checking.compare` finds every element near enough."""
    comparison = compare(actual, exact, baseline, factor, what, rounding)
    assert comparison.ok, str(comparison)
