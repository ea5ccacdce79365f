"""Plans for the Hopper backwards of float32: elements as sums of two halves, products by warpgroups (wgmma).

A block has 64 keys, since halves of more do not fit into shared memory, and two warpgroups. They alternate
between its tiles of queries or, beyond 128 head dims, share each and divide the dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cufa.device import WARP_SIZE, Device
from cufa.integers import ceil_div, round_up
from cufa.plan.fwd_9_float32 import FLOAT_BYTES, HALVING_THREADS, half_tile_bytes
from cufa.plan.gradients import gradient_macros, sink_launch
from cufa.plan.hopper import (
    BARRIER_BYTES,
    HEAD_TILE_LABEL_BYTES,
    PANEL_COLS,
    SWIZZLE_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    Warpgroups,
)
from cufa.plan.macros import common_macros
from cufa.plan.record import Decisions, Launch, Scratch
from cufa.plan.seen import seen_launch, seen_scratch, seen_tiles
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import Candidates, Cost
from cufa.plan.tile_sizes import counted_row_tiles, sizes_of
from cufa.plan.wgmma_backward import MOST_IN_LINE, ORDER_OF_ADDITIONS
from cufa.plan.wgmma_backward_tiles import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS
from cufa.problem import Problem

EXACT_THREADS = 256
# backward_tiles.cuh's TileUnit, and its Statistics without the two units and the two floats of each row.
UNIT_BYTES, PLACE_BYTES = 8, 16
# How often was added to the sums of dQ.
COUNT_BYTES = 4
# Per key: SeeingRows.
SEEING_BYTES = 8
# RowSizes, for each warp and each of the two tensors.
ROW_SIZES_BYTES = 12
MOST_STAGES = 2
# With more sums of dK and dV in a thread than this, it has registers for only one part of what a tile adds to
# them. If that spills a little, it needs the registers that the copying warpgroup can spare.
MOST_SUMS_OF_FEW_REGISTERS = 64
# With more than this, dS is only in shared memory.
MOST_SUMS_BESIDE_GRADIENTS = 96
# Registers of the copying warpgroup's threads, and of the others after it has released the rest.
EASY_PRODUCER_REGISTERS, EASY_CONSUMER_REGISTERS = 40, 232


@dataclass(frozen=True)
class Tiles(Warpgroups):
    """The sizes that the kernel is compiled for: a warpgroup holds `stages` tiles of `block_m` queries."""

    block_m: int
    block_n: int
    stages: int

    rows_allowed: ClassVar[tuple[int, ...]] = (WGMMA_M,)
    # Whether warpgroups work on the same tiles of queries and divide the dims; sums are then of dQ^T.
    share_queries: ClassVar[bool] = False

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return CONSUMERS

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_m not in self.rows_allowed:
            rows = " or ".join(map(str, self.rows_allowed))
            return f"block_m must be {rows}, as many as the kernel has registers and shared memory for"
        if self.block_n != WGMMA_M:
            return f"block_n must be {WGMMA_M}, the rows of a warpgroup's product"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, stages {self.stages}"


@dataclass(frozen=True)
class WideTiles(Tiles):
    """The same where both warpgroups work on one tile of queries."""

    rows_allowed: ClassVar[tuple[int, ...]] = (WGMMA_M, WGMMA_M // 2)
    share_queries: ClassVar[bool] = True


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_6_float32`: a launch that makes halves, then one with a block for each tile of keys.

    If there are masks, a first launch finds out what they show of tiles of scores.
    """
    return _decide(problem, device, tiles, Tiles)


def backward_wide(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_7_float32_wide`: the same launches."""
    return _decide(problem, device, tiles, WideTiles)


def _decide(problem: Problem, device: Device, tiles: Mapping[str, int], kind: type[Tiles]) -> Decisions:
    candidates = tuple(
        kind(rows, WGMMA_M, stages) for rows in kind.rows_allowed for stages in range(MOST_STAGES, 0, -1)
    )
    chosen = Candidates(device, candidates, lambda tiles: _cost(problem, tiles)).choose(problem, tiles)
    sizes = chosen.tiles
    queries = keys = 0
    if problem.batch:
        # As kernels count them to address the workspace, even if packed sequences have no queries at all.
        queries = problem.heads * counted_row_tiles(problem, problem.seqlen_q, sizes.block_m)
        keys = problem.kv_heads * counted_row_tiles(problem, problem.seqlen_k, sizes.block_n)
    query_bytes, key_bytes = _query_tile_bytes(problem, sizes), _key_tile_bytes(problem, sizes)
    halving_smem_bytes = 2 * HALVING_THREADS // WARP_SIZE * ROW_SIZES_BYTES
    exact_smem_bytes = 2 * sizes.block_m * sizes.block_n * FLOAT_BYTES
    producer_registers, consumer_registers = _registers(problem, sizes)
    sink = sink_launch(problem, HALVING_THREADS, HALVING_THREADS // WARP_SIZE)
    seen = seen_tiles(problem, sizes.block_m, sizes.block_n)
    launches = (
        seen_launch(problem, seen, HALVING_THREADS, HALVING_THREADS // WARP_SIZE),
        Launch("to_halves", queries + keys, HALVING_THREADS, halving_smem_bytes),
        Launch("key_tiles", keys, sizes.threads, chosen.cost.smem_bytes, overlaps=True),
        Launch("store_query_gradients", queries, HALVING_THREADS, 0, overlaps=True),
        Launch("exact_tiles", keys + queries, EXACT_THREADS, exact_smem_bytes, overlaps=True),
        sink,
    )
    scratch = (
        Scratch("alignment", (SWIZZLE_BYTES // FLOAT_BYTES,)),
        Scratch("halves of queries and dO, sums of dQ", (queries, query_bytes // FLOAT_BYTES)),
        Scratch("halves of keys and values", (keys, key_bytes // FLOAT_BYTES)),
        *seen_scratch(problem, seen),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *common_macros(problem),
            *gradient_macros(problem),
            *((name.upper(), size) for name, size in sizes_of(sizes).items()),
            ("THREADS", sizes.threads),
            ("HALVING_THREADS", HALVING_THREADS),
            *(() if sizes.share_queries else _product_macros(problem)),
            ("TRANSPOSED_SUMS", sizes.share_queries),
            ("PRODUCER_REGISTERS", producer_registers),
            ("CONSUMER_REGISTERS", consumer_registers),
            ("QUERY_TILE_BYTES", query_bytes),
            ("KEY_TILE_BYTES", key_bytes),
            ("SMEM_BYTES", chosen.cost.smem_bytes),
            ("HALVING_SMEM_BYTES", halving_smem_bytes),
            ("LEAST_HEADS", _least_heads(problem, device)),
            ("EXACT_THREADS", EXACT_THREADS),
            ("EXACT_SMEM_BYTES", exact_smem_bytes),
            ("SINK_SMEM_BYTES", sink.smem_bytes),
            ("PARAMS_BYTES", params_bytes(problem)),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=scratch if queries + keys > 0 else (),
        reasons=(
            *chosen.reasons,
            *((f"deterministic: {ORDER_OF_ADDITIONS}",) * problem.features.deterministic),
        ),
    )


def _product_macros(problem: Problem) -> tuple[tuple[str, bool], ...]:
    """How bwd_6_consumer.cuh adds products to its sums."""
    return (
        ("PARTS_AHEAD", _sums(problem) <= MOST_SUMS_OF_FEW_REGISTERS),
        ("SHARES_GRADIENTS", _sums(problem) > MOST_SUMS_BESIDE_GRADIENTS),
    )


def _least_heads(problem: Problem, device: Device) -> int:
    """The least number of KV heads whose tiles of keys blocks process together.

    Blocks that add in the order of their keys wait for the others of their head. If some are longer, as under
    a causal mask, few should wait for each other. Else a block waits at its beginning only, and a head's
    blocks should run together: of the queries of many heads, the L2 cache loses what the next block needs.
    """
    ordered = problem.features.deterministic and problem.range_mask
    return ceil_div(device.sm_count, MOST_IN_LINE) if ordered else 1


def _registers(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """Registers of a thread that copies, and of one that computes."""
    if tiles.share_queries or _sums(problem) > MOST_SUMS_OF_FEW_REGISTERS:
        return PRODUCER_REGISTERS, CONSUMER_REGISTERS
    return EASY_PRODUCER_REGISTERS, EASY_CONSUMER_REGISTERS


def _sums(problem: Problem) -> int:
    """The sums of dK and dV in a thread."""
    return sum(round_up(dim, WGMMA_K) for dim in (problem.head_dim, problem.value_dim)) // 2


def _query_tile_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of backward_tiles.cuh's QueryHalves."""
    halves, sums = _rows_bytes(problem, tiles.block_m), _sums_bytes(problem, tiles)
    return round_up(halves + sums + _statistics_bytes(tiles) + COUNT_BYTES, SWIZZLE_BYTES)


def _key_tile_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of its KeyHalves."""
    return round_up(_rows_bytes(problem, tiles.block_n) + 2 * UNIT_BYTES, SWIZZLE_BYTES)


def _statistics_bytes(tiles: Tiles) -> int:
    return 2 * tiles.block_m * FLOAT_BYTES + 2 * UNIT_BYTES + PLACE_BYTES


def _sums_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of QuerySums."""
    step = PANEL_COLS if tiles.share_queries else WGMMA_K
    return tiles.block_m * round_up(problem.head_dim, step) * FLOAT_BYTES


def _rows_bytes(problem: Problem, rows: int) -> int:
    """Bytes of the halves of this many rows of Q and dO, or of K and V."""
    dims = (problem.head_dim, problem.value_dim)
    return sum(half_tile_bytes(problem, rows, dim) for dim in dims)


def _cost(problem: Problem, tiles: Tiles) -> Cost:
    halves = _rows_bytes(problem, tiles.block_m)
    scores = half_tile_bytes(problem, tiles.block_n, tiles.block_m)
    if tiles.share_queries:
        # P as well as dS. What warpgroups exchange before lies in the same memory.
        scores = max(2 * scores, tiles.block_n * tiles.block_m * FLOAT_BYTES)
    else:
        # And here dQ in that of its queries.
        halves = max(halves, _sums_bytes(problem, tiles))
    holders = 1 if tiles.share_queries else tiles.consumers
    of_label = HEAD_TILE_LABEL_BYTES * problem.features.key_mask
    of_stage = halves + _statistics_bytes(tiles) + 4 * BARRIER_BYTES + of_label
    smem_bytes = (
        _rows_bytes(problem, tiles.block_n)
        + 2 * UNIT_BYTES
        + BARRIER_BYTES
        + tiles.consumers * WARPGROUP // WARP_SIZE * FLOAT_BYTES
        + holders * (scores + tiles.block_n * SEEING_BYTES + tiles.stages * of_stage)
    )
    depth, dims = (round_up(dim, WGMMA_K) for dim in (problem.head_dim, problem.value_dim))
    # Fewer queries are for where more do not fit: products of so few columns wait for shared memory.
    work = WGMMA_M * tiles.block_n * (3 * depth + 2 * dims) / WARPGROUP
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), tiles.registers_at_start, work)
