"""Tiles of the Hopper backward: which are the best, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

from cufa.device import REGISTERS_PER_SM
from cufa.plan.choice import Cost
from cufa.plan.head_parts import check_parts
from cufa.plan.sizes import VECTOR_BYTES
from cufa.plan.wgmma import (
    BARRIER_BYTES,
    LENGTHS_BYTES,
    MAX_CONSUMER_REGISTERS,
    MAX_WGMMA_N,
    PANEL_COLS,
    REGISTER_STEP,
    SWIZZLE_BYTES,
    TILE_LABEL_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    has_bias_boxes,
    lengths_vary,
    panel_tile_bytes,
)
from cufa.problem import Problem
from cufa.rounding import ceil_div, round_up

CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
SUM_BYTES = 4
# Tiles of keys that a block holds if it stays for many, and if they fit; and what says which each is: batch,
# head, first key.
MOST_KEY_STAGES = 2
KEY_WORK_BYTES = 12
# What says where the content of an outbox goes.
LABEL_BYTES = 32
# What the copying warpgroup keeps, and what its giving up the rest leaves a thread of the others.
PRODUCER_REGISTERS = 24
AT_START = REGISTERS_PER_SM // THREADS // REGISTER_STEP * REGISTER_STEP
CONSUMER_REGISTERS = min(
    MAX_CONSUMER_REGISTERS,
    AT_START + (AT_START - PRODUCER_REGISTERS) // CONSUMERS // REGISTER_STEP * REGISTER_STEP,
)
# The product that makes dQ is of the tile of queries before: there must be room for both.
LEAST_STAGES = 2
# Registers of a consumer beside accumulators: addresses, descriptions, where it is.
OVERHEAD_REGISTERS = 32
# Up to so many head dims a thread has registers for S and dP at the same time, beside dK and dV.
MOST_DIMS_TOGETHER = 128


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for.

    `block_n` is what the kernel makes of it and cannot be chosen; `stages` are how many tiles of Q, and of
    dO, a block holds; `parts` are those into which the query heads of a KV head are divided among blocks.
    """

    block_m: int
    block_n: int
    stages: int
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_K or self.block_m > MAX_WGMMA_N:
            return f"block_m must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        if self.stages < LEAST_STAGES:
            return f"stages must be at least {LEAST_STAGES}: dQ is made a tile of queries later"
        return None

    def __str__(self) -> str:
        parts = f", parts {self.parts}" if self.parts > 1 else ""
        return f"{self.block_m}x{self.block_n}, stages {self.stages}{parts}"


# What is best for head dims up to each.
TILES = {64: Tiles(128, CONSUMERS * WGMMA_M, 2), 192: Tiles(64, CONSUMERS * WGMMA_M, 2)}
# The same over head dim 64 where at least so many queries of a head see a key on average: blocks seldom go on
# to other keys, so that it matters little that they wait for those.
LONG_TILES, MANY_QUERIES = Tiles(80, CONSUMERS * WGMMA_M, 2), 1500
WIDE_TILES = Tiles(64, WGMMA_M, 2)


def has_long_tiles(problem: Problem) -> bool:
    """Whether tiles of queries are long: many of a head must see a key, or a part of a tile would cost more.

    A soft cap, a bias, dropout and functions of the caller's need registers that there are not beside those.
    """
    features = problem.features
    mods = features.score_mod is not None or features.key_mask
    asks = features.softcap or features.bias is not None or features.dropout or mods
    if problem.head_dim <= PANEL_COLS or not scores_together(problem) or asks:
        return False
    keys = problem.seqlen_k // problem.packed_sequences
    return problem.visible_scores >= MANY_QUERIES * max(1, keys)


def are_long(problem: Problem, tiles: Tiles) -> bool:
    """Whether a tile has more sums of dQ than a warpgroup adds to without a long wait."""
    return problem.head_dim > PANEL_COLS and tiles.block_m > PANEL_COLS


def head_cols(problem: Problem, tiles: Tiles) -> int:
    """Columns of the tiles of Q and K: two panels at least if tiles of queries are short."""
    short = tiles.block_m <= PANEL_COLS and problem.head_dim <= PANEL_COLS
    return 2 * PANEL_COLS if short else problem.head_dim


def check_tiles(problem: Problem, tiles: Tiles, best: Tiles, registers: int) -> None:
    """Check tiles that a caller chose; ValueError if the kernel cannot have them."""
    check_parts(problem, tiles, tiles.parts)
    if tiles.block_n != best.block_n:
        raise ValueError(f"tiles {tiles}: block_n must be {best.block_n}, {WGMMA_M} for a warpgroup's rows")
    if problem.head_dim <= PANEL_COLS < best.block_m != tiles.block_m:
        raise ValueError(f"tiles {tiles}: block_m must be {best.block_m}, {PANEL_COLS} for a warpgroup's dQ")
    panels = ceil_div(head_cols(problem, tiles), PANEL_COLS)
    if best.block_n == CONSUMERS * WGMMA_M and panels % CONSUMERS and tiles.block_m % (2 * WGMMA_K):
        raise ValueError(f"tiles {tiles}: block_m must be a multiple of 32, 16 for half a warpgroup's dQ")
    if registers > CONSUMER_REGISTERS:
        raise ValueError(
            f"tiles {tiles}: a thread needs about {registers} registers, and there are {CONSUMER_REGISTERS}"
        )


def scores_together(problem: Problem) -> bool:
    """Whether a thread has registers for S and dP at the same time (key_softmax.cuh)."""
    return problem.head_dim <= MOST_DIMS_TOGETHER


def parted(dims: int) -> int:
    """Head dims, padded so that each warpgroup has whole panels of them, and one at least."""
    return max(round_up(dims, PANEL_COLS), CONSUMERS * PANEL_COLS)


def statistics_bytes(tiles: Tiles) -> int:
    """The size of key_softmax.cuh's RowStatistics: LSE and D, and whether all is finite."""
    return 2 * tiles.block_m * SUM_BYTES + VECTOR_BYTES


def narrow_cost(problem: Problem, tiles: Tiles, key_stages: int, outboxes: bool) -> Cost:
    """What those of `bwd_4_wgmma` take, with so many stages of keys."""
    m, n = tiles.block_m, tiles.block_n
    cols = head_cols(problem, tiles)
    outbox_bytes = m * round_up(cols, PANEL_COLS) // CONSUMERS * SUM_BYTES if outboxes else SUM_BYTES
    smem_bytes = (
        key_stages * (panel_tile_bytes(n, cols) + panel_tile_bytes(n, problem.value_dim))  # K, V
        + tiles.stages * (panel_tile_bytes(m, cols) + panel_tile_bytes(m, problem.value_dim))
        + tiles.stages * n * m * problem.itemsize  # dS
        + n * m * problem.itemsize * has_bias_boxes(problem)
        + CONSUMERS * (outbox_bytes + LABEL_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + tiles.stages * statistics_bytes(tiles)
        + key_stages * (KEY_WORK_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + BARRIER_BYTES * ((5 + 3 * CONSUMERS) * tiles.stages + 3 * key_stages + 2 * CONSUMERS + 2)
        + tiles.stages * TILE_LABEL_BYTES * (problem.features.key_mask)
    )
    head, value = round_up(cols, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and dP, or dP and P rounded; dK and dV.
    scores = m if scores_together(problem) else m // 2 + m // 4
    registers = scores + (head + value) // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)


def wide_cost(problem: Problem, tiles: Tiles) -> Cost:
    """What those of `bwd_5_wgmma_wide` take."""
    m, n = tiles.block_m, tiles.block_n
    head, value = parted(problem.head_dim), parted(problem.value_dim)
    smem_bytes = (
        panel_tile_bytes(n, head)  # K
        + panel_tile_bytes(n, value)  # V
        + tiles.stages * (panel_tile_bytes(m, head) + panel_tile_bytes(m, value))  # Q, dO
        + tiles.stages * 2 * panel_tile_bytes(n, m)  # P, dS
        + tiles.stages * statistics_bytes(tiles)
        + BARRIER_BYTES * ((9 + 3 * CONSUMERS) * tiles.stages + 2)
        + tiles.stages * TILE_LABEL_BYTES * problem.features.key_mask
    )
    # S or dP; dK and dV, of one of which the warpgroup has the smaller part; a panel of dQ.
    panels = ceil_div(head // PANEL_COLS + value // PANEL_COLS, CONSUMERS)
    registers = m // 2 + panels * PANEL_COLS // 2 + m // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
