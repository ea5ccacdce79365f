"""Plans for the rungs of standard attention: a thread per element, a block per softmax row."""

from __future__ import annotations

from collections.abc import Mapping

from cufa.device import WARP_SIZE, Device
from cufa.integers import ceil_div
from cufa.plan.macros import common_macros
from cufa.plan.record import Decisions, Launch, Scratch
from cufa.plan.struct_sizes import BACKWARD_PARAMS_BYTES, FORWARD_PARAMS_BYTES
from cufa.problem import Problem

# Enough warps to hide the latency of loads that are not tiled, and a divisor of every SM's threads.
THREADS = 256
WARPS = THREADS // WARP_SIZE


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_1_naive` and `fwd_2_online_softmax`."""
    _refuse_tiles(tiles)
    rows = problem.batch * problem.heads * problem.seqlen_q
    # A maximum and a sum for each warp of a row's block.
    smem_bytes = WARPS * 2 * problem.accumulator.itemsize
    return _decide(
        problem,
        FORWARD_PARAMS_BYTES,
        smem_bytes,
        (
            _per_element("scores", rows * problem.seqlen_k),
            Launch("softmax", rows, THREADS, smem_bytes),
            _per_element("output", rows * problem.value_dim),
        ),
        ("P",),
    )


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_1_naive`."""
    _refuse_tiles(tiles)
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    smem_bytes = WARPS * problem.accumulator.itemsize  # a partial sum for each warp
    return _decide(
        problem,
        BACKWARD_PARAMS_BYTES,
        smem_bytes,
        (
            _per_element("probabilities", rows * problem.seqlen_k),
            _per_element("grad_values", keys * problem.value_dim),
            _per_element("grad_probabilities", rows * problem.seqlen_k),
            Launch("grad_scores", rows, THREADS, smem_bytes),
            _per_element("grad_queries", rows * problem.head_dim),
            _per_element("grad_keys", keys * problem.head_dim),
        ),
        ("P", "dS"),
    )


def _decide(
    problem: Problem,
    params_bytes: int,
    smem_bytes: int,
    launches: tuple[Launch, ...],
    matrices: tuple[str, ...],
) -> Decisions:
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return Decisions(
        tiles={},
        macros=(
            *common_macros(problem),
            ("THREADS", THREADS),
            ("SMEM_BYTES", smem_bytes),
            ("PARAMS_BYTES", params_bytes),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=tuple(Scratch(name, shape) for name in matrices),
        reasons=(f"{THREADS} threads per block, one for each element of a result",),
    )


def _per_element(entry: str, elements: int) -> Launch:
    return Launch(entry, ceil_div(elements, THREADS), THREADS)


def _refuse_tiles(tiles: Mapping[str, int]) -> None:
    if tiles:
        raise ValueError(f"tiles has {', '.join(map(str, tiles))}, and this kernel has no tiles to choose")
