"""Tiles of the Hopper backward: which are the best, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from cufa.device import REGISTERS_PER_SM, Device
from cufa.integers import ceil_div, round_up
from cufa.plan.head_parts import check_head_parts
from cufa.plan.hopper import (
    BARRIER_BYTES,
    HEAD_TILE_LABEL_BYTES,
    LENGTHS_BYTES,
    MAX_CONSUMER_REGISTERS,
    MAX_WGMMA_N,
    PANEL_COLS,
    REGISTER_STEP,
    SWIZZLE_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    has_bias_boxes,
    lengths_vary,
    panel_tile_bytes,
)
from cufa.plan.struct_sizes import VECTOR_BYTES
from cufa.plan.tile_choice import Cost
from cufa.problem import Problem

CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
SUM_BYTES = 4
# The dims of dQ that a warp sums: those of the sums in memory are padded to them.
SLAB_DIMS = WGMMA_M // 4
# The tiles of keys that a block holds if it stays for many and they fit; the bytes that identify one: batch,
# part of the heads, first key.
MOST_KEY_STAGES = 2
KEY_WORK_BYTES = 12
# The bytes that say where an outbox's content goes.
LABEL_BYTES = 32
# Registers that the copying warpgroup keeps, and of a thread of the others after it has released the rest.
PRODUCER_REGISTERS = 24
AT_START = REGISTERS_PER_SM // THREADS // REGISTER_STEP * REGISTER_STEP
CONSUMER_REGISTERS = min(
    MAX_CONSUMER_REGISTERS,
    AT_START + (AT_START - PRODUCER_REGISTERS) // CONSUMERS // REGISTER_STEP * REGISTER_STEP,
)
# Products for a tile of queries are made while the next one is processed, so there must be room for both.
LEAST_STAGES = 2
# Registers of a consumer besides accumulators: addresses, descriptors, its position.
OVERHEAD_REGISTERS = 32
# Up to this head dim, a thread has registers for S and dP at the same time, besides dK and dV.
MOST_DIMS_TOGETHER = 128


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for.

    `block_n` is determined by the kernel and cannot be chosen. A block holds `stages` tiles of Q, and of dO;
    of a pair of `bwd_8_wgmma_pair`, one holds so many of Q, and the other SCORE_STAGES of dO.
    `head_parts` is the number of parts into which the query heads of a KV head are divided among blocks.
    `row_parts` is the number of parts into which the rows of each of these parts are divided.
    """

    block_m: int
    block_n: int
    stages: int
    head_parts: int = 1
    row_parts: int = 1

    @property
    def all_parts(self) -> int:
        """The number of blocks that share a tile of keys."""
        return self.head_parts * self.row_parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_K or self.block_m > MAX_WGMMA_N:
            return f"block_m must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        if self.stages < LEAST_STAGES:
            return f"stages must be at least {LEAST_STAGES}: one tile of queries and the next"
        return None

    def __str__(self) -> str:
        parts = f", head_parts {self.head_parts}" if self.head_parts > 1 else ""
        of_rows = f", row_parts {self.row_parts}" if self.row_parts > 1 else ""
        return f"{self.block_m}x{self.block_n}, stages {self.stages}{parts}{of_rows}"


# Up to this many head and value dims together, a thread has registers for all dims of 64 queries of dQ; the
# same where scores or weights are more than products, and with a soft cap.
MOST_DIMS_OF_WHOLE, MOST_WITH_SHAPES, MOST_WITH_SOFTCAP = 224, 192, 128

# The best tiles, by largest head dim.
TILES = {64: Tiles(128, CONSUMERS * WGMMA_M, 2), 192: Tiles(64, CONSUMERS * WGMMA_M, 2)}
# The best tiles above head dim 64 if dQ of a tile is divided and at least this many queries of a head see a
# key on average, or fewer if heads share it and there is no window: blocks then seldom go on to other keys,
# so waiting for those matters little.
LONG_TILES, MANY_QUERIES, SHARED_MANY_QUERIES = Tiles(80, CONSUMERS * WGMMA_M, 2), 1500, 620
# The best tiles where the warpgroups share keys, and shorter ones, beside which more head dims fit.
WIDE_TILES, WIDEST_TILES = Tiles(64, WGMMA_M, 2), Tiles(48, WGMMA_M, 2)
# The best tiles of pairs of blocks that divide the products; `stages` are of Q, and these of dO, P and dS.
# Those are so long on their way that dK is made two tiles later.
PAIR, PAIR_TILES, SCORE_STAGES, PAIR_LAG = 2, Tiles(64, CONSUMERS * WGMMA_M, 3), 2, 2
# Above this many head dims two blocks have half of them each.
MOST_DIMS_OF_BLOCK = 256
# The best tiles up to head dim 64 in a window that reaches at most this far to both sides: a warpgroup's keys
# are seen by at most three, and it passes over the rest. In wider windows short tiles cost more than that.
NEAR_TILES, NEAR = Tiles(64, CONSUMERS * WGMMA_M, 3), 64


def _shapes_scores(problem: Problem) -> bool:
    """Whether scores or weights are more than products, which needs registers or shared memory."""
    features = problem.features
    mods = features.score_mod is not None or problem.hides_scores
    return features.softcap or features.bias is not None or features.dropout or mods


def has_whole_queries(problem: Problem, block_m: int) -> bool:
    """Whether the warpgroups make dQ of one tile after the other in turn, instead of dividing its dims.

    A product for some of the dims of dQ^T computes whole panels, one for all of them no more than these.
    """
    head, value = round_up(problem.head_dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    most = MOST_DIMS_OF_WHOLE
    if _shapes_scores(problem):
        most = MOST_WITH_SOFTCAP if problem.features.softcap else MOST_WITH_SHAPES
    return block_m == WGMMA_M and head < CONSUMERS * PANEL_COLS and head + value <= most


def _has_many_queries(problem: Problem, many: int = MANY_QUERIES) -> bool:
    """Whether so many queries of a head see a key, above one panel of dims, by products alone."""
    seen_by_many = problem.seeing_queries >= many
    return problem.head_dim > PANEL_COLS and seen_by_many and not _shapes_scores(problem)


def has_long_tiles(problem: Problem) -> bool:
    """Whether tiles of queries are long: many must see a key, or a partial tile costs more."""
    whole = has_whole_queries(problem, WGMMA_M)
    shared = problem.group > 1 and not problem.features.windowed
    many = SHARED_MANY_QUERIES if shared else MANY_QUERIES
    return scores_together(problem) and not whole and _has_many_queries(problem, many)


def best_tiles(problem: Problem) -> Tiles:
    """The fastest tiles of `bwd_4_wgmma`, with all heads in one part."""
    if has_long_tiles(problem):
        return LONG_TILES
    dim = max(problem.head_dim, problem.value_dim)
    reaches_far = any(side is None or side > NEAR for side in problem.features.window)
    if dim <= PANEL_COLS and not reaches_far:
        return NEAR_TILES
    return next(tiles for limit, tiles in TILES.items() if dim <= limit)


def shares_keys(tiles: Tiles) -> bool:
    """Whether the warpgroups share the keys, as in `bwd_5_wgmma_wide`."""
    return tiles.block_n == WGMMA_M


def cluster_blocks_of(problem: Problem) -> int:
    """How many blocks of a cluster share a tile of keys of `bwd_5_wgmma_wide`, and divide the head dims."""
    return 2 if max(problem.head_dim, problem.value_dim) > MOST_DIMS_OF_BLOCK else 1


def best_wide_tiles(problem: Problem, device: Device) -> Tiles:
    """The fastest tiles of `bwd_5_wgmma_wide`, with all heads in one part."""
    smem_bytes = wide_cost(problem, WIDE_TILES).smem_bytes
    return WIDE_TILES if smem_bytes <= device.smem_per_block else WIDEST_TILES


def sends_sums(problem: Problem, tiles: Tiles) -> bool:
    """Whether the copy engine should add to dQ of `bwd_4_wgmma`, if blocks add as they come.

    Otherwise warpgroups do. Those of long tiles would wait long for it. Under a causal mask or a window the
    others wait less than the outboxes cost.
    """
    if not has_whole_queries(problem, tiles.block_m):
        return problem.head_dim > PANEL_COLS and tiles.block_m > PANEL_COLS
    return _has_many_queries(problem) and not problem.range_mask


def narrow_misfit(problem: Problem, tiles: Tiles) -> str | None:
    """None if `bwd_4_wgmma` can have such tiles, else the reason."""
    step = CONSUMERS * WGMMA_K
    if ceil_div(problem.head_dim, PANEL_COLS) % CONSUMERS and tiles.block_m % step:
        return f"block_m must be a multiple of {step}, {WGMMA_K} for half a warpgroup's dQ"
    return None


def pair_misfit(tiles: Tiles) -> str | None:
    """None if `bwd_8_wgmma_pair` can have such tiles, else the reason."""
    if tiles.block_m != PANEL_COLS:
        return f"block_m must be {PANEL_COLS}: a warp sends its rows of one panel of P or dS"
    if tiles.stages <= PAIR_LAG:
        return f"stages must be at least {PAIR_LAG + 1}: dK is made {PAIR_LAG} tiles of queries later"
    return None


def check_tiles(problem: Problem, tiles: Tiles, block_n: int, registers: int, misfit: str | None) -> None:
    """Raise ValueError if the kernel cannot have the tiles that a caller chose."""
    check_head_parts(problem, tiles, tiles.head_parts)
    if tiles.block_n != block_n:
        raise ValueError(f"tiles {tiles}: block_n must be {block_n}, {WGMMA_M} for a warpgroup's rows")
    if misfit is not None:
        raise ValueError(f"tiles {tiles}: {misfit}")
    if registers > CONSUMER_REGISTERS:
        raise ValueError(
            f"tiles {tiles}: a thread needs about {registers} registers, and there are {CONSUMER_REGISTERS}"
        )


def scores_together(problem: Problem) -> bool:
    """Whether a thread has registers for S and dP at the same time (key_statistics.cuh)."""
    return problem.head_dim <= MOST_DIMS_TOGETHER


def padded_dims(dims: int, cluster: int) -> int:
    """A block's head dims, padded so that each warpgroup has whole panels, and at least one."""
    return max(round_up(ceil_div(dims, cluster), PANEL_COLS), CONSUMERS * PANEL_COLS)


def statistics_bytes(tiles: Tiles) -> int:
    """The size of key_statistics.cuh's RowStatistics: LSE and D, and whether all are finite."""
    return 2 * tiles.block_m * SUM_BYTES + VECTOR_BYTES


def narrow_cost(problem: Problem, tiles: Tiles, key_stages: int, outboxes: bool) -> Cost:
    """The cost of tiles of `bwd_4_wgmma` with this many stages of keys."""
    m, n = tiles.block_m, tiles.block_n
    dim = problem.head_dim
    head, value = round_up(dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    whole = has_whole_queries(problem, m)
    sums = m * (head if whole else round_up(dim, PANEL_COLS) // CONSUMERS)
    outbox_bytes = (sums if outboxes else 1) * SUM_BYTES
    smem_bytes = (
        key_stages * (panel_tile_bytes(n, dim) + panel_tile_bytes(n, problem.value_dim))  # K, V
        + tiles.stages * (panel_tile_bytes(m, dim) + panel_tile_bytes(m, problem.value_dim))
        + tiles.stages * n * m * problem.itemsize  # dS
        + n * m * problem.itemsize * has_bias_boxes(problem)
        + CONSUMERS * (outbox_bytes + LABEL_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + tiles.stages * statistics_bytes(tiles)
        + key_stages * (KEY_WORK_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + BARRIER_BYTES * ((5 + 3 * CONSUMERS) * tiles.stages + 3 * key_stages + 2 * CONSUMERS + 2)
        + tiles.stages * HEAD_TILE_LABEL_BYTES * (problem.features.key_mask)
    )
    # S and dP, or dP and P rounded; or dS rounded and all dims of dQ; dK and dV
    scores = m if scores_together(problem) else m // 2 + m // 4
    if whole:
        scores = max(scores, m // 4 + head // 2)
    registers = scores + (head + value) // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)


def wide_cost(problem: Problem, tiles: Tiles) -> Cost:
    """The cost of tiles of `bwd_5_wgmma_wide`."""
    m, n, cluster = tiles.block_m, tiles.block_n, cluster_blocks_of(problem)
    head, value = (padded_dims(dims, cluster) for dims in (problem.head_dim, problem.value_dim))
    partner_bytes = CONSUMERS * (n * m * SUM_BYTES + 2 * BARRIER_BYTES)
    smem_bytes = (
        round_up(partner_bytes * (cluster - 1), SWIZZLE_BYTES)  # scores of the partner
        + panel_tile_bytes(n, head)  # K
        + panel_tile_bytes(n, value)  # V
        + tiles.stages * (panel_tile_bytes(m, head) + panel_tile_bytes(m, value))  # Q, dO
        + tiles.stages * 2 * panel_tile_bytes(n, m)  # P, dS
        + tiles.stages * statistics_bytes(tiles)
        + BARRIER_BYTES * ((9 + 3 * CONSUMERS) * tiles.stages + 2)
        + tiles.stages * HEAD_TILE_LABEL_BYTES * problem.features.key_mask
    )
    # S or dP; dK and dV, where a warpgroup has the smaller part of one; a panel of dQ
    panels = ceil_div(head // PANEL_COLS + value // PANEL_COLS, CONSUMERS)
    registers = m // 2 + panels * PANEL_COLS // 2 + m // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)


def pair_cost(problem: Problem, tiles: Tiles) -> Cost:
    """The cost of tiles of `bwd_8_wgmma_pair`."""
    m, n = tiles.block_m, tiles.block_n
    head, value = problem.head_dim, problem.value_dim
    key_block = panel_tile_bytes(n, head) + tiles.stages * panel_tile_bytes(m, head)  # K, Q
    value_block = (
        panel_tile_bytes(n, value)  # V
        + panel_tile_bytes(n, CONSUMERS * PANEL_COLS)  # later panels of K
        + SCORE_STAGES * panel_tile_bytes(m, value)  # dO
    )
    smem_bytes = (
        max(key_block, value_block)
        + SCORE_STAGES * 2 * panel_tile_bytes(n, m)  # P, dS
        + tiles.stages * statistics_bytes(tiles)
        + n * (WARPGROUP // WGMMA_M) * problem.itemsize  # which keys are lost, by threads for each
        + BARRIER_BYTES * (2 * tiles.stages + (7 * CONSUMERS + 4) * SCORE_STAGES + 2)
    )
    # S or dP; dK or dV; a panel of dQ
    registers = m // 2 + round_up(max(head, value), WGMMA_K) // 2 + m // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / (PAIR * tiles.threads)
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
