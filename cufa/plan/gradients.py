"""What backwards plan alike: gradients beyond dQ, dK and dV, and whether sums may be atomic.

The bias's gradient here is for backwards on CUDA cores; others leave it to a separate kernel.
"""

from __future__ import annotations

from math import prod

from cufa.integers import ceil_div
from cufa.plan.record import Launch, Macro, Scratch
from cufa.problem import Problem, lse_shape


def gradient_macros(problem: Problem) -> tuple[Macro, ...]:
    """The macros that score_gradients.cuh needs."""
    return (("DETERMINISTIC", problem.features.deterministic),)


def bias_macros(problem: Problem) -> tuple[Macro, ...]:
    """The macros that bias_sums.cuh needs."""
    return (
        ("BIAS_GRADIENT", _bias_gradient(problem)),
        ("OWN_BIAS_SUMS", _bias_gradient(problem) and _own_bias_sums(problem)),
    )


def gradient_sums(problem: Problem) -> tuple[Scratch, ...]:
    """The last parts of the workspace, as array_gradients.cuh and bias_sums.cuh lay them out."""
    features, arrays = problem.features, array_sums(problem)
    if features.bias is None or not _bias_gradient(problem):
        return arrays
    shape = (*lse_shape(problem), features.bias[3]) if _own_bias_sums(problem) else features.bias
    return (*arrays, Scratch("dbias sums", shape))


def gradient_launches(problem: Problem, threads: int, warps: int) -> tuple[Launch, ...]:
    """The launches that finish the requested gradients of bias, score_mod's arrays and sink."""
    bias = problem.features.bias
    elements = prod(bias) if bias is not None and _bias_gradient(problem) else 0
    return (
        Launch("bias_gradient", ceil_div(elements, threads), threads),
        array_launch(problem, threads),
        sink_launch(problem, threads, warps),
    )


def array_sums(problem: Problem) -> tuple[Scratch, ...]:
    """The part of the workspace for the gradients of score_mod's arrays, if requested."""
    elements = problem.features.array_sums
    return (Scratch("dscore_mod sums", (elements,)),) if elements else ()


def array_launch(problem: Problem, threads: int) -> Launch:
    """The launch that rounds these gradients; without blocks if they are not requested."""
    return Launch("array_gradients", ceil_div(problem.features.array_sums, threads), threads)


def sink_launch(problem: Problem, threads: int, warps: int) -> Launch:
    """The launch that computes the gradient of the sinks; without blocks if it is not requested."""
    heads = problem.heads if "sink" in problem.features.gradients else 0
    # A sum for each warp.
    return Launch("sink_gradient", heads, threads, warps * problem.accumulator.itemsize)


def row_blocks(problem: Problem, rows: int, warps: int) -> int:
    """Blocks of row_sums: a warp for each row, and at least one block, to clear other sums."""
    clears = _bias_gradient(problem) or problem.features.array_sums
    return max(ceil_div(rows, warps), 1 if clears else 0)


def _bias_gradient(problem: Problem) -> bool:
    return "bias" in problem.features.gradients


def _own_bias_sums(problem: Problem) -> bool:
    """Whether every score has its own sum: if that costs nothing, or if the order of additions matters."""
    features = problem.features
    if features.bias is None:
        return False
    batch, heads, rows, _ = features.bias
    # Only the GPU knows how many rows packed sequences have.
    all_rows = rows > 1 if features.packed else rows == problem.seqlen_q
    return features.deterministic or ((batch, heads) == (problem.batch, problem.heads) and all_rows)
