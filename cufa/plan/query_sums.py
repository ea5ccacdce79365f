"""How blocks sum dQ in the Hopper backward."""

from __future__ import annotations

from enum import Enum

from cufa.device import Device
from cufa.plan.head_parts import FILLED
from cufa.plan.hopper import PANEL_COLS, SECTION_OF_L2
from cufa.plan.wgmma_backward_tiles import LONG_TILES, SUM_BYTES, Tiles, shares_keys
from cufa.problem import Problem
from cufa.rounding import ceil_div

# Up to this many tiles of keys in a head under a causal mask, or that a query sees in a window, blocks add in
# order and the last rounds dQ.
MOST_IN_ORDER = 8
# In a window: how many blocks of a head may run at the same time for each tile of queries that one processes.
MOST_IN_LINE_PER_TILE = 2
# In a window with later keys: the fraction of the keys that a query may see.
MOST_SEEN = 2 / 3
# Up to this many tiles, with and without a causal mask, blocks add after the first.
CAUSAL_MOST_AFTER_FIRST, MOST_AFTER_FIRST = 16, 4


class Adding(Enum):
    """How blocks sum dQ; the values are the kernels' names.

    ALONE: a block has all keys of a head. AS_THEY_COME: blocks add in any order to sums that start at zero.
    AFTER_FIRST and IN_ORDER: the first block sets the sums, and the others add after it, in any order or in
    the order of their keys. That saves passes over the sums, whose time does not depend on the number of
    blocks. In return every adding block waits, and longer the more blocks begin with the same queries, as all
    do without a mask.
    """

    ALONE = "kAlone"
    AS_THEY_COME = "kAsTheyCome"
    AFTER_FIRST = "kAfterFirst"
    IN_ORDER = "kInOrder"


def _takes_whole_heads(problem: Problem, device: Device, block_n: int, tiles: Tiles) -> bool:
    """Whether a block works on all keys of a KV head, for a part of the heads.

    It then needs no zeroed sums, and loads the head's queries for one tile of keys after the other. That is
    faster if the L2 cache holds all these queries and no SM is idle. Packed sequences may differ in length,
    and have more keys than the caller says.
    """
    heads = problem.batch * problem.kv_heads * tiles.all_parts
    if problem.features.packed:
        return problem.longest_keys <= block_n and tiles.row_parts == 1
    if problem.seqlen_k <= block_n or heads == 0:
        return True
    if tiles.row_parts > 1:  # different blocks add to a tile of queries for different keys
        return False
    fills = heads >= FILLED * device.sm_count * ceil_div(heads, device.sm_count)
    head_bytes = problem.group // tiles.parts * problem.seqlen_q * query_bytes(problem)
    return fills and device.sm_count * head_bytes <= SECTION_OF_L2 * device.l2_bytes


def way_of_adding(
    problem: Problem, device: Device, best: Tiles, tiles: Tiles, sends_sums: bool = False
) -> Adding:
    """The fastest way to add, or the one that the call requires.

    `best` are the fastest tiles. With `sends_sums`, the copy engine should add.
    """
    if problem.features.key_mask:  # it is not known which blocks skip a tile of queries
        return Adding.AS_THEY_COME
    if _takes_whole_heads(problem, device, best.block_n, tiles):
        return Adding.ALONE
    if problem.features.deterministic or few_add(problem, device, best):
        return Adding.IN_ORDER
    # With a window, a query may see keys but not the first ones. If the copy engine adds the sums, it is not
    # known when.
    if problem.features.windowed or sends_sums or _cached(problem, device):
        return Adding.AS_THEY_COME
    # In bwd_5_wgmma_wide products run during the addition, so waiting costs little.
    most = CAUSAL_MOST_AFTER_FIRST if problem.causal else MOST_AFTER_FIRST
    few = problem.mean_keys <= most * best.block_n
    return Adding.AFTER_FIRST if shares_keys(best) or few else Adding.AS_THEY_COME


def few_add(problem: Problem, device: Device, best: Tiles) -> bool:
    """Whether it is faster to add in order and let the last block round dQ."""
    if problem.features.windowed:
        return _few_add_in_window(problem, device, best)
    short = best.block_m <= PANEL_COLS and not (shares_keys(best) and _cached(problem, device))
    # Without a mask, a sequence of one tile of keys, which would be a block's alone if it were not packed.
    most = MOST_IN_ORDER if problem.causal else int(problem.features.packed)
    few = problem.mean_keys <= most * best.block_n
    return short and few and problem.seqlen_q >= problem.seqlen_k and not problem.features.key_mask


def _few_add_in_window(problem: Problem, device: Device, best: Tiles) -> bool:
    """The same in a window, where blocks come to a tile of queries in the order of their keys.

    So they hardly wait, but not if many start with the last queries, nor if so many of one head run at the
    same time that all lag behind the slowest. Wide tiles have no registers to round dQ between products.
    """
    seen = problem.seen_keys
    if best == LONG_TILES or shares_keys(best) or seen > MOST_IN_ORDER * best.block_n:
        return False
    heads = problem.kv_heads * problem.tensor_batch
    in_line = min(device.sm_count / max(1, heads), problem.mean_keys / best.block_n)
    tiles_of_block = problem.group * (seen + best.block_n) / best.block_m
    begin_apart = problem.hides_later_keys or seen <= MOST_SEEN * problem.mean_keys
    one_tile = problem.mean_keys <= best.block_n
    return (begin_apart or one_tile) and in_line <= MOST_IN_LINE_PER_TILE * tiles_of_block


def query_bytes(problem: Problem) -> int:
    """The bytes of a row of Q and dO, and of its sums of dQ."""
    return (problem.head_dim + problem.value_dim) * problem.itemsize + problem.head_dim * SUM_BYTES


def _cached(problem: Problem, device: Device) -> bool:
    """Whether the sums of dQ fit into the L2 cache, so that passes over them are quick."""
    rows = problem.batch * problem.seqlen_q // problem.packed_sequences * problem.heads
    return rows * problem.head_dim * SUM_BYTES <= SECTION_OF_L2 * device.l2_bytes
