"""Which rungs a call should not get although they support it: those slower than a rung before them.

All numbers are as measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.kernels import Kernel, kernel_named
from cufa.plan.hopper import WGMMA_M
from cufa.plan.short_backward import is_short, is_short_if_wide
from cufa.plan.wgmma_backward_tiles import PAIR_TILES
from cufa.problem import MAX_HEAD_DIM, Problem

# Where three products of tf32 take less time than one of float32 on CUDA cores.
_FAST_TF32 = frozenset(((8, 0), (8, 7), (9, 0), (10, 0), (10, 3)))
# Sequences are too short for the backward in halves (`bwd_6_float32` and `bwd_7_float32_wide`) with at most
# this many queries and keys; with at most this many queries and any number of keys; the same in tf32.
_SHORT_IN_HALVES = 64
_FEW_QUERIES_IN_HALVES = 32
_FEW_QUERIES_IN_TF32 = 128
# Where heads share keys, the mma.sync rungs divide these heads among SMs. Without that, they would be this
# many times as slow as the backward in halves: by whether it is in tf32, and by the largest head dim.
_SLOWER_WITHOUT_PARTS = {
    False: {64: 4.5, 128: 3.0, MAX_HEAD_DIM: 4.5},
    True: {128: 4.0, MAX_HEAD_DIM: 3.0},
}
# The keys of a block of `bwd_5_wgmma_wide`, `bwd_6_float32` and `bwd_7_float32_wide`, and of a pair of blocks
# of `bwd_8_wgmma_pair`.
_BLOCK_KEYS, _PAIR_KEYS = WGMMA_M, PAIR_TILES.block_n
# Up to this head dim, half of a pair's dQ is padding.
_MOST_PADDED_DIM = 128
# Up to this head dim, a pair is slower than single blocks with no more queries than it has keys, and in any
# window that hides most keys.
_MOST_NARROW_DIM = 192
# Above that, it is slower with at most this many queries, and in such a window if a row sees at most this
# many keys.
_FEW_QUERIES_OF_PAIR, _FEW_SEEN_BY_PAIR = 64, 512
# A window hides most keys if a row sees at most one key in this many.
_HIDES_MOST = 4

_SHORTER = "is slower than the mma.sync rungs for so few queries"


def unsuited(kernel: Kernel, problem: Problem, device: Device) -> str | None:
    """None if a kernel that supports the problem suits it, else why a rung before it is faster."""
    exact = problem.dtype == "float32" and not problem.features.tf32
    if kernel.tensor_cores and exact and device.arch.capability not in _FAST_TF32:
        return f"{kernel.name} needs three tf32 products for each in float32, too slow on {device.arch}"
    why = _WHY.get(kernel.name)
    reason = why(problem, device) if why else None
    return reason and f"{kernel.name} {reason}"


def _why_not_bwd_4(problem: Problem, device: Device) -> str | None:
    """Not with a bias in 32 bits, which takes most of the time, nor for short sequences, which leave threads
    idle.
    """
    if problem.features.bias_dtype == "float32":
        return "is slower than the mma.sync rungs with a bias in float32"
    return f"{_SHORTER} or keys" if is_short(problem, device) else None


def _why_not_bwd_5(problem: Problem, device: Device) -> str | None:
    """Not where a warpgroup can have keys of its own, nor for short sequences."""
    if kernel_named("bwd_4_wgmma").unsupported(problem, device) is None:
        return "works on half as many keys at a time as bwd_4_wgmma"
    return f"{_SHORTER} and keys" if is_short_if_wide(problem, device) else None


def _why_not_bwd_8(problem: Problem, device: Device) -> str | None:
    """Not where single blocks do as well, nor where half of dQ is padding, nor for few keys or queries, nor
    in a narrow window.
    """
    if kernel_named("bwd_4_wgmma").unsupported(problem, device) is None:
        return "needs two blocks where bwd_4_wgmma needs one"
    if problem.head_dim <= _MOST_PADDED_DIM:
        return f"is slower than bwd_5_wgmma_wide up to head dim {_MOST_PADDED_DIM}"
    if is_short_if_wide(problem, device):
        return f"{_SHORTER} and keys"
    narrow = problem.head_dim <= _MOST_NARROW_DIM
    usual = problem.typical
    queries, keys = usual.seqlen_q // usual.packed_sequences, usual.mean_keys
    if keys <= _PAIR_KEYS:
        # Then a pair is slower only if it has half as many keys while all SMs have work, or for few queries
        # in a window that hides half of the keys.
        half_idle = (
            keys <= _BLOCK_KEYS
            and problem.batch * problem.kv_heads > device.sm_count
            and (narrow or queries * problem.group <= _FEW_QUERIES_OF_PAIR)
        )
        hides_half = problem.features.windowed and 2 * problem.seen_keys <= keys
        few_in_window = hides_half and queries <= _FEW_QUERIES_OF_PAIR
        if not (half_idle or few_in_window):
            return None
    # The last tile has many keys that do not exist: all tiles a third more than those of 64 keys.
    padded = 3 * round_up(keys, _PAIR_KEYS) >= 4 * round_up(keys, _BLOCK_KEYS)
    if padded or queries <= (_PAIR_KEYS if narrow else _FEW_QUERIES_OF_PAIR):
        return "is slower than bwd_5_wgmma_wide for so few queries or keys"
    hides_most = problem.features.windowed and _HIDES_MOST * problem.seen_keys <= keys
    if hides_most and (narrow or problem.seen_keys <= _FEW_SEEN_BY_PAIR):
        return "is slower than bwd_5_wgmma_wide in so narrow a window"
    return None


def _why_not_bwd_6_or_7(problem: Problem, device: Device) -> str | None:
    """Not for short sequences, nor where heads that share few keys are parted."""
    tf32, sequences = problem.features.tf32, problem.packed_sequences
    queries, keys = problem.queries_with_keys, ceil_div(problem.seqlen_k, sequences)
    few = queries <= (_FEW_QUERIES_IN_TF32 if tf32 else _FEW_QUERIES_IN_HALVES)
    if few or max(queries, keys) <= _SHORT_IN_HALVES:
        return "is slower than the mma.sync rungs for sequences this short"
    blocks = problem.batch // sequences * problem.kv_heads * ceil_div(problem.seqlen_k, _BLOCK_KEYS)
    # If the call is causal, the longest block takes twice as long as the mean.
    parts = min(problem.group, device.sm_count * (2 if problem.causal else 1) / max(1, blocks))
    by_dims = _SLOWER_WITHOUT_PARTS[tf32].items()
    if parts > next(slower for limit, slower in by_dims if problem.head_dim <= limit):
        return f"would have only {blocks} blocks for {device.sm_count} SMs"
    return None


_WHY: Mapping[str, Callable[[Problem, Device], str | None]] = {
    "bwd_4_wgmma": _why_not_bwd_4,
    "bwd_5_wgmma_wide": _why_not_bwd_5,
    "bwd_6_float32": _why_not_bwd_6_or_7,
    "bwd_7_float32_wide": _why_not_bwd_6_or_7,
    "bwd_8_wgmma_pair": _why_not_bwd_8,
}
