"""The plan of `fwd_10_wgmma_wide`: head dims over 256 on Hopper."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.plan import parting, shares
from cufa.plan.fwd_6_tiles import Tiles, fastest_in_parts
from cufa.plan.hopper import (
    BARRIER_BYTES,
    LENGTHS_BYTES,
    PANEL_COLS,
    SWIZZLE_BYTES,
    WARPGROUP,
    WGMMA_M,
    lengths_vary,
    panel_tile_bytes,
)
from cufa.plan.pace import Pace, memory_time
from cufa.plan.persistent import (
    FINDINGS_BYTES,
    MERGE_SMEM_BYTES,
    OVERHEAD_REGISTERS,
    START_NS,
    WORK_TILE_BYTES,
    box_keys,
    choose_persistent,
    forward_macros,
    launches_of_parts,
    merging_launch,
    scratch_to_merge,
    work_bytes,
)
from cufa.plan.record import NOT_PARTED, WORKSPACE_ALIGNMENT, Decisions, Launch, Parting, Scratch, TensorBox
from cufa.plan.tile_choice import Cost
from cufa.plan.tile_sizes import sizes_of
from cufa.problem import FLOAT8, Problem

# Keys of a tile, the most first, and the stages that copies need to be ahead, and the most that help.
BLOCK_NS = (64, 48, 32, 16)
LEAST_STAGES, MOST_STAGES = 2, 4
# The dtype to which 8 bits are widened, by four warps, each of which writes whole swizzled units of 8 rows.
WIDENED, WIDENED_AT_ONCE = "float16", 32
# The most columns of the output that a warpgroup stores at once, in the place of the queries.
MOST_STORE_COLS = 128
# The time of an SM of an H200 for each dim of the two products of a score. Small tiles of keys, and those
# with so few stages that no copy is ahead of the products, take longer; so do widened keys.
DIM_NS, PRESSED_DIM_NS, WIDENED_DIM_NS = 0.00039, 0.00044, 0.00046
# Its further time for each tile of queries.
TILE_NS = 5300
# With at most so many keys, tiles count as small.
FEW_KEYS = 32
# Which of a tile's keys are in a share, and which part of its tile that is.
SHARE_OF_KEYS_BYTES, PART_BYTES = 12, 8
# Blocks of the launch that merges what blocks with shares leave, for each of those.
MERGING_BLOCKS = 8
FLOAT_BYTES = 4
# The barriers of a stage: a ring's two for each of up to three parts of K, and for V, and the inspectors'.
STAGE_BARRIERS = 9


@dataclass(frozen=True)
class WideTiles(Tiles):
    """Tiles of 64 queries, of which each warpgroup has half of the output's columns.

    Instead of parts of each tile's keys, blocks may have equal `shares` of the keys of all tiles.
    """

    shares: int = 1
    column_warpgroups: ClassVar[int] = 2
    most_key_parts: ClassVar[int] = 128

    @property
    def keys_bytes(self) -> int:
        """As for `Tiles`."""
        return SHARE_OF_KEYS_BYTES if self.shares > 1 else super().keys_bytes

    def merges_later(self, problem: Problem, parts: int) -> bool:
        """As for `Tiles`: those of shares, and many, if tiles do not see different numbers of keys."""
        return self.shares > 1 or (parts > parting.FEW_PARTS and not problem.causal)

    def own_cols(self, value_dim: int) -> int:
        """As for `Tiles`: whole panels."""
        return ceil_div(ceil_div(value_dim, PANEL_COLS), self.column_warpgroups) * PANEL_COLS

    def __str__(self) -> str:
        return super().__str__() + f", keys in {self.shares} equal shares" * (self.shares > 1)

    def misfit(self) -> str | None:
        """As for `Tiles`."""
        if self.block_m != WGMMA_M:
            return f"block_m must be {WGMMA_M}"
        if self.query_stages != 1:
            return "query_stages must be 1"
        if self.stages < LEAST_STAGES:
            return f"stages must be at least {LEAST_STAGES}"
        if min(self.key_parts, self.shares) > 1:
            return "key_parts and shares cannot both be over 1"
        return super().misfit()


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds."""
    problem = problem.with_queries_as_heads
    tiles, least = _fastest_tiles(problem, device)
    if tiles.shares > 1:
        merging = shares.merging_time(problem, tiles)
    else:
        merging = parting.merging_time(problem, tiles, device)
    return (START_NS + max(least, memory_time(problem, device) + merging)) / 1000


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_10_wgmma_wide`: blocks that stay for many tiles, and a launch beside if keys are split."""
    problem = problem.with_queries_as_heads
    best, _ = _fastest_tiles(problem, device)
    if "key_parts" in tiles:
        best = replace(best, shares=1)
    chosen, grid = choose_persistent(problem, device, tiles, best, functools.partial(_cost, device))
    sizes = chosen.tiles
    if not _can_be_brought(problem, sizes.block_n):
        raise ValueError(
            f"tiles {sizes}: block_n must be a multiple of {WIDENED_AT_ONCE} with keys in {problem.key_dtype}"
        )
    own_cols = sizes.own_cols(problem.value_dim)
    if own_cols % sizes.store_cols:
        raise ValueError(
            f"tiles {sizes}: store_cols must divide {own_cols}, a warpgroup's columns of the output"
        )
    main = Launch("fwd_10_wgmma_wide", grid, sizes.threads, chosen.cost.smem_bytes)
    launches_of = _launches_of_shares if sizes.shares > 1 else launches_of_parts
    launches, scratch, parted = launches_of(problem, device, sizes, main)
    # What is widened is not copied.
    queries = 0 if problem.dtype == FLOAT8 else WGMMA_M
    keys = 0 if _widens(problem) else box_keys(problem, sizes)
    boxes = tuple(
        TensorBox(tensor, rows, PANEL_COLS) for tensor, rows in enumerate((queries, keys, keys, WGMMA_M))
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *forward_macros(_as_multiplied(problem), device, chosen, len(boxes), parted),
            ("QUERY_SCALAR", problem.dtype),
            ("OUT_SCALAR", problem.output.name),
            ("OUTPUT_APART", _has_output_apart(problem, device, sizes)),
            ("MERGE_SMEM_BYTES", MERGE_SMEM_BYTES),
        ),
        launches=launches if grid else (),
        scratch=scratch,
        reasons=(
            *chosen.reasons,
            *("values are the beginnings of keys, which alone are read",) * problem.values_in_keys,
        ),
        boxes=boxes,
        parting=parted,
        problem=problem,
    )


@functools.lru_cache
def _fastest_tiles(problem: Problem, device: Device) -> tuple[WideTiles, float]:
    """The tiles, with the parts of their keys, and their time."""
    tiles = _largest(problem.kind, device)
    pressed = tiles.block_n <= FEW_KEYS or (problem.values_in_keys and tiles.stages == LEAST_STAGES)
    value_cols = tiles.own_cols(problem.value_dim) * tiles.column_warpgroups
    of_dim = PRESSED_DIM_NS if pressed else DIM_NS
    if _widens(problem):
        of_dim = WIDENED_DIM_NS
    of_score = (problem.head_dim + value_cols) * of_dim
    pace = Pace(of_score, TILE_NS)
    best, least = fastest_in_parts(problem, device, {tiles: pace}, lambda *_: True)
    in_shares = replace(tiles, shares=shares.most_shares(problem, tiles, device.sm_count))
    may_share = in_shares.shares > 1 and shares.unsuited(problem, in_shares) is None
    if may_share and shares.gains(problem, in_shares, pace, least, device):
        return in_shares, min(least, shares.time(problem, in_shares, pace))
    return best, least


@functools.lru_cache
def _largest(kind: Problem, device: Device) -> WideTiles:
    """The largest tiles of keys that fit, and then the most stages."""
    stages = range(MOST_STAGES, LEAST_STAGES - 1, -1)
    block_ns = [keys for keys in BLOCK_NS if _can_be_brought(kind, keys)]
    candidates = (WideTiles(WGMMA_M, *sizes, 1, PANEL_COLS) for sizes in itertools.product(block_ns, stages))
    tiles = next(
        tiles for tiles in candidates if _smem_bytes(kind, tiles, output_apart=False) <= device.smem_per_block
    )
    if _has_output_apart(kind, device, tiles):
        return tiles
    return replace(tiles, store_cols=math.gcd(tiles.own_cols(kind.value_dim), MOST_STORE_COLS))


def _launches_of_shares(
    problem: Problem, device: Device, tiles: WideTiles, main: Launch
) -> tuple[tuple[Launch, ...], tuple[Scratch, ...], Parting]:
    """The launches if blocks have equal shares of the keys, their workspace, and the number of blocks."""
    if not main.grid:
        return (main,), (), NOT_PARTED
    reason = shares.unsuited(problem, tiles)
    if reason is not None:
        raise ValueError(f"tiles {tiles}: {reason}")
    parted = shares.parting_of(problem, tiles)
    of_tile = WORK_TILE_BYTES + LENGTHS_BYTES * lengths_vary(problem) + tiles.keys_bytes + PART_BYTES
    words = round_up(of_tile, WORKSPACE_ALIGNMENT) // problem.accumulator.itemsize
    scratch = (
        Scratch("tiles to merge", (parted.count, words)),
        scratch_to_merge(problem, tiles, 2 * parted.count),
    )
    main = replace(main, grid=parted.count)
    return (main, merging_launch(MERGING_BLOCKS * parted.count)), scratch, parted


def _widens(problem: Problem) -> bool:
    """Whether keys, and perhaps queries, are in 8 bits and widened to float16."""
    return problem.key_dtype == FLOAT8


def _as_multiplied(problem: Problem) -> Problem:
    """The problem with the dtype of its products for that of Q."""
    return replace(problem, dtype=WIDENED, kv_dtype=FLOAT8) if _widens(problem) else problem


def _can_be_brought(problem: Problem, block_n: int) -> bool:
    """Whether tiles may have so many keys: the copy engine brings any number."""
    return not _widens(problem) or block_n % WIDENED_AT_ONCE == 0


def _cost(device: Device, problem: Problem, tiles: Tiles) -> Cost:
    # S and O in float32, and P in pairs
    own_cols = tiles.own_cols(problem.value_dim)
    registers = (tiles.block_n + own_cols) // 2 + tiles.block_n // 4 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * problem.product_dims / tiles.threads
    return Cost(_smem_bytes(problem, tiles, _has_output_apart(problem, device, tiles)), registers, work)


def _has_output_apart(problem: Problem, device: Device, tiles: Tiles) -> bool:
    """Whether there is room for the output on its way out beside the queries."""
    return _smem_bytes(problem, tiles, output_apart=True) <= device.smem_per_block


def _smem_bytes(problem: Problem, tiles: Tiles, output_apart: bool) -> int:
    value_cols = tiles.own_cols(problem.value_dim) * tiles.column_warpgroups
    in_keys = problem.values_in_keys
    stage_bytes = (
        panel_tile_bytes(tiles.block_n, max(problem.head_dim, value_cols if in_keys else 0))  # K
        + (0 if in_keys else panel_tile_bytes(tiles.block_n, value_cols))  # V
        + STAGE_BARRIERS * BARRIER_BYTES
        + FINDINGS_BYTES
    )
    of_queries = panel_tile_bytes(WGMMA_M, problem.head_dim)
    of_output = tiles.consumers * panel_tile_bytes(WGMMA_M, tiles.store_cols)
    smem_bytes = (
        tiles.stages * stage_bytes
        + (of_queries + of_output if output_apart else max(of_queries, of_output))
        + panel_tile_bytes(WGMMA_M, tiles.block_n)  # P
        + FLOAT_BYTES * (WGMMA_M + 2 * tiles.consumers * WARPGROUP)  # maxima and sums
        + 2 * BARRIER_BYTES
        + work_bytes(problem, tiles)
        + (FLOAT_BYTES * WGMMA_M if _widens(problem) and problem.dtype == "bfloat16" else 0)  # units of rows
    )
    return round_up(smem_bytes, SWIZZLE_BYTES)
