"""How the sums of dQ come about in the Hopper backward."""

from __future__ import annotations

from enum import Enum

from cufa.device import Device
from cufa.plan.head_parts import FILLED
from cufa.plan.wgmma import PANEL_COLS, SECTION_OF_L2
from cufa.plan.wgmma_backward_tiles import LONG_TILES, SUM_BYTES, WIDE_TILES, Tiles
from cufa.problem import Problem
from cufa.rounding import ceil_div

# Up to so many tiles of keys of a head, under a causal mask, blocks add in order and the last rounds dQ.
MOST_IN_ORDER = 8
# Up to so many, under such a mask and without, they add after the first.
CAUSAL_MOST_AFTER_FIRST, MOST_AFTER_FIRST = 16, 4


class Adding(Enum):
    """How the sums of dQ come about; the values are the kernels' names for it.

    A block has all keys of a head and adds alone. Or each adds as it comes, to sums that are zero before. Or
    the first sets them and the others add after it, as they come or in the order of their keys. That spares
    passes over the sums, which take as long however many blocks add to them. What it costs are waits of each
    that adds, the longer the more of them begin with the same queries, as all do without a mask.
    """

    ALONE = "kAlone"
    AS_THEY_COME = "kAsTheyCome"
    AFTER_FIRST = "kAfterFirst"
    IN_ORDER = "kInOrder"


def _takes_whole_heads(problem: Problem, device: Device, block_n: int, parts: int) -> bool:
    """Whether a block works on all keys of a KV head, of sequences of one length, for a part of the heads.

    It then needs no sums that are zero at first, and loads the head's queries for one tile of keys after the
    other: that is faster if the L2 cache has them all and no SM is left idle.
    """
    heads = problem.batch * problem.kv_heads * parts
    if problem.features.packed:
        return False
    if problem.seqlen_k <= block_n or heads == 0:
        return True
    fills = heads >= FILLED * device.sm_count * ceil_div(heads, device.sm_count)
    row_bytes = (problem.head_dim + problem.value_dim) * problem.itemsize + problem.head_dim * SUM_BYTES
    head_bytes = problem.group // parts * problem.seqlen_q * row_bytes
    return fills and device.sm_count * head_bytes <= SECTION_OF_L2 * device.l2_bytes


def way_of_adding(problem: Problem, device: Device, best: Tiles, parts: int) -> Adding:
    """The one that is the fastest, or that the call asks for."""
    if problem.features.key_mask:  # nobody knows which blocks leave out a tile of queries
        return Adding.AS_THEY_COME
    if _takes_whole_heads(problem, device, best.block_n, parts):
        return Adding.ALONE
    if problem.features.deterministic or few_add(problem, best):
        return Adding.IN_ORDER
    # A query of a window may see keys, but not the first; of long tiles the copy engine adds the sums, and
    # nobody knows when; and sums that the L2 cache holds are soon zero.
    windowed = problem.features.window != (None, None)
    sums = problem.batch * problem.seqlen_q // problem.packed_sequences * problem.heads * problem.head_dim
    if windowed or best is LONG_TILES or sums * SUM_BYTES <= SECTION_OF_L2 * device.l2_bytes:
        return Adding.AS_THEY_COME
    # Over head dim 128 products run beside the addition, so that a wait costs little.
    most = CAUSAL_MOST_AFTER_FIRST if problem.causal else MOST_AFTER_FIRST
    few = problem.seqlen_k <= most * best.block_n
    return Adding.AFTER_FIRST if best is WIDE_TILES or few else Adding.AS_THEY_COME


def few_add(problem: Problem, best: Tiles) -> bool:
    """Whether it is faster that blocks add in order and the last rounds dQ."""
    short = best.block_m <= PANEL_COLS and best is not WIDE_TILES
    few = problem.causal and problem.seqlen_k <= MOST_IN_ORDER * best.block_n
    return short and few and problem.seqlen_q >= problem.seqlen_k and not problem.features.key_mask
