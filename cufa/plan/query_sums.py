"""How blocks sum dQ in the Hopper backward."""

from __future__ import annotations

from enum import Enum
from math import inf

from cufa.device import Device
from cufa.integers import ceil_div
from cufa.plan.head_parts import FILLED
from cufa.plan.hopper import PANEL_COLS, SECTION_OF_L2
from cufa.plan.wgmma_backward_tiles import CONSUMERS, LONG_TILES, PAIR_TILES, SUM_BYTES, Tiles, shares_keys
from cufa.problem import Problem

# The rounds of blocks in which SMs process all tiles of keys: how many it takes for blocks to add so. In few,
# all begin at once and wait for the first. In fewer than one, parts of rows fill SMs, which add in no order.
LEAST_IN_ORDER, LEAST_AFTER_FIRST = 3 / 4, 3
# Up to this many tiles of keys in a head blocks add in order and the last rounds dQ: under a causal mask (in
# a window, of the keys that a query sees), without a mask, and where waiting costs more.
MOST_IN_ORDER, UNMASKED_MOST_IN_ORDER, LEAST_MOST_IN_ORDER = 8, 4, 2
# In a window: how many blocks of a head may run at the same time for each tile of queries that one processes.
MOST_IN_LINE_PER_TILE = 2
# In a window with later keys: the fraction of the keys that a query may see.
MOST_SEEN = 2 / 3
# Up to this many tiles, with and without a causal mask, blocks add after the first; long tiles of queries do
# so under a causal mask at any length.
CAUSAL_MOST_AFTER_FIRST, MOST_AFTER_FIRST, LONG_MOST_AFTER_FIRST = 32, 16, 32
# The same of blocks in pairs, and of blocks that share keys if the L2 cache holds the sums of dQ.
PAIR_CAUSAL_MOST_AFTER_FIRST, PAIR_MOST_AFTER_FIRST = 16, 8
CACHED_MOST_AFTER_FIRST = 16


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
        return problem.stated_most_keys <= block_n and tiles.row_parts == 1
    if problem.seqlen_k <= block_n or heads == 0:
        return True
    if tiles.row_parts > 1:  # different blocks add to a tile of queries for different keys
        return False
    fills = heads >= FILLED * device.sm_count * ceil_div(heads, device.sm_count)
    head_bytes = problem.group // tiles.head_parts * problem.seqlen_q * query_bytes(problem)
    return fills and device.sm_count * head_bytes <= SECTION_OF_L2 * device.l2_bytes


def way_of_adding(problem: Problem, device: Device, best: Tiles, tiles: Tiles) -> Adding:
    """The fastest way to add, or the one that the call requires. `best` are the fastest tiles.

    Packed sequences count as if they had the length that is typical for their tokens.
    """
    if problem.hides_scores:  # it is not known which blocks skip a tile of queries
        return Adding.AS_THEY_COME
    if _takes_whole_heads(problem, device, best.block_n, tiles):
        return Adding.ALONE
    if problem.features.deterministic or few_add(problem, device, best):
        return Adding.IN_ORDER
    usual = problem.typical
    # With a window, a query may see keys but not the first ones.
    if usual.features.windowed or _rounds_of_blocks(usual, device, best) < LEAST_AFTER_FIRST:
        return Adding.AS_THEY_COME
    few = usual.mean_keys <= _most_after_first(usual, device, best) * best.block_n
    return Adding.AFTER_FIRST if few else Adding.AS_THEY_COME


def _most_after_first(problem: Problem, device: Device, best: Tiles) -> float:
    """Up to how many tiles of keys in a head it is fastest to add after the first block."""
    if shares_keys(best):  # products run during the addition, so waiting costs little
        return CACHED_MOST_AFTER_FIRST if _cached(problem, device) else inf
    if best == PAIR_TILES:
        return PAIR_CAUSAL_MOST_AFTER_FIRST if problem.causal else PAIR_MOST_AFTER_FIRST
    if best == LONG_TILES:
        return inf if problem.causal else LONG_MOST_AFTER_FIRST
    if problem.causal:
        return CAUSAL_MOST_AFTER_FIRST
    return MOST_AFTER_FIRST if problem.group > 1 or problem.head_dim > PANEL_COLS else 0


def few_add(problem: Problem, device: Device, best: Tiles) -> bool:
    """Whether it is faster to add in order and let the last block round dQ."""
    problem = problem.typical
    if problem.features.windowed:
        return _few_add_in_window(problem, device, best)
    rounds = _rounds_of_blocks(problem, device, best)
    if shares_keys(best) or rounds < LEAST_IN_ORDER or problem.seqlen_q < problem.seqlen_k:
        return False
    many_rounds, shared = rounds >= LEAST_AFTER_FIRST, problem.group > 1
    if problem.causal:
        waits = problem.head_dim <= PANEL_COLS and not shared and many_rounds
        most = LEAST_MOST_IN_ORDER if waits else MOST_IN_ORDER
    elif shared:
        most = 1 if many_rounds else LEAST_MOST_IN_ORDER
    else:
        wide = problem.head_dim > CONSUMERS * PANEL_COLS and best != PAIR_TILES
        most = LEAST_MOST_IN_ORDER if wide else UNMASKED_MOST_IN_ORDER
    return problem.mean_keys <= most * best.block_n


def _rounds_of_blocks(problem: Problem, device: Device, best: Tiles) -> float:
    """How many blocks each SM processes, one for each tile of keys of a query head."""
    tiles_of_head = problem.batch * ceil_div(problem.mean_keys, best.block_n)
    return problem.heads * tiles_of_head / device.sm_count


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
