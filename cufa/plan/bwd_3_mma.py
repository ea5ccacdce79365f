"""Plans for `bwd_3_mma`, the backward on mma.sync."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from cufa.device import WARP_SIZE, Device
from cufa.integers import ceil_div, round_up
from cufa.plan.fwd_5_mma import (
    HALF,
    LINE_BYTES,
    MAX_SPLIT,
    MMA_K,
    MMA_M,
    MMA_N,
    Work,
    arithmetic_of,
    hands_over_keys,
    macros_of,
)
from cufa.plan.gradients import (
    gradient_launches,
    gradient_macros,
    gradient_sums,
    row_blocks,
    sink_launch,
)
from cufa.plan.head_parts import best_parts, check_head_parts, key_sums, round_keys, why_parts
from cufa.plan.record import Decisions, Launch, Scratch
from cufa.plan.seen import seen_launch, seen_scratch, seen_tiles
from cufa.plan.tile_choice import Candidates, Cost
from cufa.plan.tile_sizes import counted_row_tiles, row_tiles, sizes_of
from cufa.problem import Problem, lse_shape

# The most tiles of queries that a block may hold.
MAX_STAGES = 2
# Instructions per score of a lane.
INSTRUCTIONS_PER_SCORE = 10


@dataclass(frozen=True)
class BackwardTiles:
    """The sizes that the backward is compiled for.

    `stages` is the number of tiles of queries that a block holds, including the one in work. `split` warps
    share rows of keys and divide their head dims. `head_parts` is the number of parts into which the query
    heads of a KV head are divided among blocks.
    """

    block_m: int
    block_n: int
    threads: int
    stages: int
    split: int
    head_parts: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // WARP_SIZE

    @property
    def keys(self) -> int:
        """Keys of a tile whose rows of S^T a warp owns."""
        return self.block_n * self.split // self.warps

    @property
    def queries(self) -> int:
        """Queries whose columns of S^T a warp computes: with few, several warps compute the same."""
        return self.block_m // self.score_split

    @property
    def score_split(self) -> int:
        """The number of warps that divide the queries of the same rows of S^T."""
        return min(self.split, self.block_m // MMA_N)

    @property
    def query_parts(self) -> int:
        """The number of warps that divide the head dims of the same rows of dQ."""
        return self.warps // min(self.warps, self.query_rows)

    @property
    def query_rows(self) -> int:
        """The number of parts of the rows of dQ: tiles of 16 rows, or pairs of them."""
        tiles = self.block_m // MMA_M
        fits = self.split < MAX_SPLIT or 2 * self.warps <= tiles * self.split
        return tiles // 2 if self.split > 1 and tiles > 1 and fits else tiles

    def padded(self, dims: int, parts: int) -> int:
        """Head dims, padded so that each of this many warps has whole fragments."""
        return round_up(dims, MMA_K * parts)

    def sums(self, problem: Problem) -> int:
        """What a lane has of a warp's dK, dV, S and dP."""
        part = (self.head(problem) + self.value(problem)) // self.split
        return self.keys * (part + 2 * self.queries) // WARP_SIZE

    def head(self, problem: Problem) -> int:
        """Columns of the tiles of Q and K."""
        return self.padded(problem.head_dim, max(self.split, self.query_parts))

    def value(self, problem: Problem) -> int:
        """Columns of the tiles of V and dO."""
        return self.padded(problem.value_dim, self.split)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.stages > MAX_STAGES or self.split > MAX_SPLIT:
            return f"stages may be 1 to {MAX_STAGES} and split 1 to {MAX_SPLIT}"
        if self.warps % self.split or self.block_n % (self.warps // self.split * MMA_M):
            return (
                f"block_n must be {MMA_M} keys for each of threads / {WARP_SIZE} / split warps, or a multiple"
            )
        if self.block_m % MMA_K:
            return f"block_m must be a multiple of {MMA_K}"
        if self.split % self.score_split or self.queries % MMA_N:
            return f"block_m must be a multiple of split * {MMA_N}, or {MMA_K} with split {MAX_SPLIT}"
        rows = self.query_rows
        if max(rows, self.warps) % min(rows, self.warps):
            return f"of the {rows} parts of rows of dQ and the {self.warps} warps one must divide the other"
        return None

    def __str__(self) -> str:
        shape = f"{self.block_m}x{self.block_n} with {self.threads} threads"
        parts = f", head_parts {self.head_parts}" if self.head_parts > 1 else ""
        return f"{shape}, stages {self.stages}, split {self.split}{parts}"


# By the element size in bytes: block_m, block_n, threads, stages, split
BACKWARD_TILES = {
    2: (
        BackwardTiles(64, 128, 256, 2, 1),
        BackwardTiles(64, 128, 256, 2, 2),
        BackwardTiles(128, 128, 256, 2, 1),
        BackwardTiles(32, 128, 128, 2, 1),
        BackwardTiles(64, 64, 128, 1, 1),
        BackwardTiles(32, 64, 128, 2, 1),
        BackwardTiles(64, 64, 256, 1, 4),
        BackwardTiles(64, 64, 256, 1, 2),
        BackwardTiles(32, 64, 256, 2, 2),
        BackwardTiles(32, 32, 128, 1, 2),
        BackwardTiles(32, 16, 64, 1, 2),
        BackwardTiles(16, 32, 64, 1, 1),
    ),
    4: (
        BackwardTiles(32, 64, 128, 2, 1),
        BackwardTiles(32, 64, 128, 1, 1),
        BackwardTiles(64, 64, 256, 1, 2),
        BackwardTiles(32, 64, 256, 1, 2),
        BackwardTiles(32, 32, 128, 1, 2),
        BackwardTiles(32, 32, 64, 1, 1),
        BackwardTiles(32, 16, 64, 1, 2),
        BackwardTiles(16, 32, 64, 1, 1),
        BackwardTiles(16, 16, 32, 1, 1),
    ),
    8: (
        BackwardTiles(32, 128, 256, 1, 1),
        BackwardTiles(64, 64, 256, 1, 2),
        BackwardTiles(32, 64, 256, 1, 2),
        BackwardTiles(16, 64, 128, 1, 1),
        BackwardTiles(32, 48, 192, 1, 2),
        BackwardTiles(32, 32, 128, 1, 2),
        BackwardTiles(32, 32, 64, 1, 1),
        BackwardTiles(16, 32, 64, 1, 1),
        BackwardTiles(16, 16, 32, 1, 1),
    ),
}

# With more bytes of sums of dK and dV per key than this, two warps that share rows have too many; and the
# tiles for these. By the element size.
WIDE_KEY_BYTES = {2: 2048, 4: 2048, 8: 2816}
WIDE_BACKWARD_TILES = {
    2: (
        BackwardTiles(64, 32, 256, 1, 4),
        BackwardTiles(32, 32, 256, 1, 4),
        BackwardTiles(32, 16, 128, 1, 4),
        BackwardTiles(16, 16, 128, 1, 4),
    ),
    4: (
        BackwardTiles(32, 32, 256, 1, 4),
        BackwardTiles(32, 16, 128, 1, 4),
        BackwardTiles(16, 16, 128, 1, 4),
    ),
    8: (BackwardTiles(32, 16, 128, 1, 4),),
}

# The tiles with which a block has all keys of a KV head: those of the fewest keys that are enough. By the
# element size.
WHOLE_TILES = {
    2: (
        BackwardTiles(16, 16, 32, 1, 1),
        BackwardTiles(32, 32, 64, 1, 1),
        BackwardTiles(32, 64, 128, 2, 1),
        BackwardTiles(32, 64, 128, 1, 1),
        BackwardTiles(32, 128, 256, 2, 1),
    ),
    4: (
        BackwardTiles(16, 16, 32, 1, 1),
        BackwardTiles(16, 32, 64, 1, 1),
        BackwardTiles(32, 64, 128, 1, 1),
        BackwardTiles(16, 64, 128, 1, 1),
    ),
    8: (
        BackwardTiles(16, 16, 32, 1, 1),
        BackwardTiles(16, 32, 64, 1, 1),
        BackwardTiles(16, 64, 128, 1, 1),
    ),
}
# For `head_parts`, as measured on an H200: in 16 bits, a row of queries takes so many times as long as in
# the wgmma backwards; and an SM has so many blocks before they take each other's time.
ROW_FACTOR, BLOCKS_SIDE_BY_SIDE = 4, 2
# No tiles of the plan's own choice have more keys.
MOST_WHOLE_KEYS = 128

# Two tiles of queries, which warps hand on instead of meeting; the first choice if they can.
HANDED_ON_TILES = BackwardTiles(32, 128, 256, 2, 1)


def hands_over_queries(problem: Problem, device: Device, tiles: BackwardTiles) -> bool:
    """Whether the backward's warps hand Q, dO and dS on, as in the forward, which needs two tiles of queries.

    Warps that share rows exchange P and dS, and blocks that own queries have no dS to exchange: these use
    barriers.
    """
    apart = tiles.split == 1 and tiles.stages == MAX_STAGES and not problem.features.deterministic
    return apart and hands_over_keys(problem, device)


def takes_whole_heads(problem: Problem, device: Device, tiles: BackwardTiles) -> bool:
    """Whether a block has all keys of a KV head, so that it has dQ of the head's queries to itself.

    It then finds LSE and D of the queries, too, for which it needs a tile of O.
    """
    all_keys = problem.stated_most_keys <= tiles.block_n
    if not all_keys or tiles.split > 1 or hands_over_queries(problem, device, tiles):
        return False
    return _smem_bytes(problem, device, tiles, whole=True) <= device.smem_per_block


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_3_mma`: a warp for each row, then a block for each tile of keys, then a warp for 16 rows.

    If deterministic, a block for each tile of queries takes the place of these warps. If sequences have no
    more keys than a tile, all is done by a block for each KV head. A first launch finds out what masks show
    of tiles; others round dK and dV if they come in parts, and make the gradients of a sink and of arrays.
    """
    # Tiles that a caller chooses may have any number of keys.
    keys = problem.stated_most_keys if tiles else min(problem.stated_most_keys, MOST_WHOLE_KEYS + 1)
    candidates = _backward_candidates(replace(problem.kind, seqlen_k=keys), device, bool(tiles))
    chosen = candidates.choose(problem, tiles)
    if "head_parts" not in tiles:
        row_factor = ROW_FACTOR * arithmetic_of(problem).product_clocks
        at_once = device.sm_count * min(chosen.blocks_per_sm, BLOCKS_SIDE_BY_SIDE)
        head_parts, _ = best_parts(problem, chosen.tiles, at_once, row_factor=row_factor)
        chosen = replace(chosen, tiles=replace(chosen.tiles, head_parts=head_parts))
    sizes, smem_bytes = chosen.tiles, chosen.cost.smem_bytes
    check_head_parts(problem, sizes, sizes.head_parts)
    rows = lse_shape(problem)
    padded_rows = _padded_rows(problem, sizes.block_m)
    whole = takes_whole_heads(problem, device, sizes)
    some_heads = problem.batch * min(1, problem.seqlen_q + problem.seqlen_k)
    key_tiles = some_heads if whole else row_tiles(problem, problem.seqlen_k, sizes.block_n)
    # Blocks that own queries own as many as the others own keys.
    query_blocks = problem.heads * row_tiles(problem, problem.seqlen_q, sizes.block_n)
    strips = problem.heads * row_tiles(problem, problem.seqlen_q, MMA_M)
    owns_queries = problem.features.deterministic and not whole
    shares_queries = not whole and not owns_queries
    sums_queries = shares_queries or (whole and problem.features.packed)
    keeps_stats = not whole or problem.features.sink
    skips_queries = not whole and problem.hides_scores
    seen = seen_tiles(problem, sizes.block_m, sizes.block_n) if skips_queries else 0
    if owns_queries:
        seen += seen_tiles(problem, sizes.block_n, sizes.block_m)
    launches = (
        seen_launch(problem, seen, sizes.threads, sizes.warps),
        Launch("row_sums", row_blocks(problem, keeps_stats * prod(padded_rows), sizes.warps), sizes.threads),
        Launch("key_tiles", problem.kv_heads * key_tiles * sizes.head_parts, sizes.threads, smem_bytes),
        round_keys(problem, sizes.head_parts, sizes.threads, sizes.warps),
        Launch("query_tiles", owns_queries * query_blocks, sizes.threads, smem_bytes),
        Launch("round_queries", shares_queries * ceil_div(strips, sizes.warps), sizes.threads),
        *gradient_launches(problem, sizes.threads, sizes.warps),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *macros_of(problem, chosen),
            *gradient_macros(problem),
            ("ROW_PARTS", 1),
            ("HIDES_KEYS", problem.hides_keys),
            ("WHOLE_HEADS", int(whole)),
            ("HANDS_OVER", int(hands_over_queries(problem, device, sizes))),
            ("SINK_SMEM_BYTES", sink_launch(problem, sizes.threads, sizes.warps).smem_bytes),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(
            *((Scratch("dQ sums", (*padded_rows, sizes.head(problem))),) * sums_queries),
            *key_sums(problem, sizes.head_parts),
            *((Scratch("LSE and D", (*rows, 2)),) * keeps_stats),
            *seen_scratch(problem, seen),
            *gradient_sums(problem),
        ),
        reasons=(
            *chosen.reasons,
            *("a block has all keys of a KV head, and dQ to itself",) * whole,
            *why_parts(sizes.head_parts),
        ),
    )


def _whole_tiles(kind: Problem, device: Device) -> BackwardTiles | None:
    """The tiles with which a block has all keys of a KV head, if some fit and do without many spills."""
    arithmetic = arithmetic_of(kind)
    for tiles in WHOLE_TILES[kind.itemsize]:
        cost = _backward_cost(kind, device, tiles)
        registers = arithmetic.registers(tiles.sums(kind)) + arithmetic.backward_overhead
        if kind.itemsize == HALF.item_bytes and tiles.warps > 1:
            # A few spills cost less than two more launches.
            registers = cost.registers
        fits = device.blocks_resident(tiles.threads, registers, cost.smem_bytes) > 0
        if takes_whole_heads(kind, device, tiles) and fits and registers <= device.registers_per_thread:
            return tiles
    return None


@functools.lru_cache
def _backward_candidates(kind: Problem, device: Device, chosen: bool) -> Candidates[BackwardTiles]:
    """Tiles for problems of a kind and so many keys, those of whole heads unless the caller chooses sizes."""
    cost_of = functools.partial(_backward_cost, kind, device)
    whole = None if chosen else _whole_tiles(kind, device)
    if whole is not None:
        return Candidates(device, (whole,), cost_of)
    tiles = BACKWARD_TILES[kind.itemsize]
    if chosen:
        tiles = (*tiles, *(each for each in WHOLE_TILES[kind.itemsize] if each not in tiles))
    if hands_over_queries(kind, device, HANDED_ON_TILES):
        tiles = (HANDED_ON_TILES, *tiles)
    key_bytes = (kind.head_dim + kind.value_dim) * arithmetic_of(kind).sum_bytes
    if key_bytes > WIDE_KEY_BYTES[kind.itemsize]:
        tiles = (*tiles, *WIDE_BACKWARD_TILES[kind.itemsize])
    return Candidates(device, tiles, cost_of)


def _padded_rows(problem: Problem, block_m: int) -> tuple[int, int]:
    """The number of heads, and the rows of each in whole tiles."""
    return problem.heads, counted_row_tiles(problem, problem.seqlen_q, block_m) * block_m


def _smem_bytes(problem: Problem, device: Device, tiles: BackwardTiles, whole: bool) -> int:
    """Shared memory of a block, which has all keys of a KV head if it is `whole`."""
    arithmetic = arithmetic_of(problem)
    head, value = tiles.head(problem), tiles.value(problem)
    m, n = tiles.block_m, tiles.block_n
    # With one stage, P^T is stored where dS^T will be.
    weights = 2 if tiles.split > 1 and tiles.stages > 1 else 1
    return (
        arithmetic.backward_table_bytes
        + (LINE_BYTES if hands_over_queries(problem, device, tiles) else 0)
        + arithmetic.tile_bytes(n, head)  # K
        + arithmetic.tile_bytes(n, value)  # V
        + tiles.stages * (arithmetic.tile_bytes(m, head) + arithmetic.tile_bytes(m, value))  # Q, dO
        + whole * tiles.stages * arithmetic.tile_bytes(m, value)  # O
        + weights * arithmetic.tile_bytes(n, m)  # dS^T, P^T
        + round_up(2 * tiles.stages * m * arithmetic.sum_bytes, LINE_BYTES)  # LSE and D
    )


def _backward_cost(problem: Problem, device: Device, tiles: BackwardTiles) -> Cost:
    arithmetic = arithmetic_of(problem)
    head, value = tiles.head(problem), tiles.value(problem)
    m, n = tiles.block_m, tiles.block_n
    whole = takes_whole_heads(problem, device, tiles)
    smem_bytes = _smem_bytes(problem, device, tiles, whole)
    keys, queries = tiles.keys, tiles.queries
    part = (head + value) // tiles.split
    query_rows, query_columns = m * tiles.query_parts // tiles.warps, head // tiles.query_parts
    shared_weights = 2 * keys * m if tiles.split > 1 else 0
    l2_bytes = m * (
        (problem.head_dim + problem.value_dim) * arithmetic.item_bytes + head * arithmetic.sum_bytes
    )
    work = Work(
        multiply_adds=keys * queries * (head + value) + keys * m * part + query_rows * n * query_columns,
        loaded=(keys + queries) * (head + value)  # S^T, dP^T
        + m * part
        + shared_weights  # dV, dK
        + n * (query_rows + query_columns),  # dQ
        scores=keys * queries,
        instructions_per_score=INSTRUCTIONS_PER_SCORE,
        l2_bytes=l2_bytes / tiles.warps,
    )
    # Blocks with whole heads mostly wait for memory: more of them gain more than a few spills cost.
    overhead = arithmetic.backward_overhead // (2 if whole else 1)
    registers = arithmetic.registers(tiles.sums(problem)) + overhead
    return Cost(
        smem_bytes,
        registers,
        work.in_multiply_adds(arithmetic, device),
        arithmetic.throughput_without_warps(device),
    )
