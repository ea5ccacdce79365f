"""Plans for the bias's gradient in a backward on tensor cores: one block for each tile of the bias."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import prod

from cufa.device import WARP_SIZE, Device
from cufa.integers import ceil_div, round_up
from cufa.messages import counted
from cufa.plan.bwd_3_mma import INSTRUCTIONS_PER_SCORE
from cufa.plan.fwd_5_mma import LINE_BYTES, MMA_K, MMA_M, Work, arithmetic_of, macros_of
from cufa.plan.gradients import gradient_macros
from cufa.plan.record import Decisions, Launch, Scratch
from cufa.plan.seen import seen_launch, seen_scratch, seen_tiles
from cufa.plan.struct_sizes import VECTOR_BYTES
from cufa.plan.tile_choice import Candidates, Cost
from cufa.plan.tile_sizes import counted_row_tiles, sizes_of
from cufa.problem import DTYPES, Problem, Shape, lse_shape

NAME = "bias_gradient"


@dataclass(frozen=True)
class Tiles:
    """The sizes that it is compiled for: `block_n` queries by `block_m` keys, and `stages` tiles of both.

    A block owns `block_n` rows, as in `bwd_3_mma` where blocks own queries.
    """

    block_m: int
    block_n: int
    threads: int
    stages: int

    def misfit(self) -> str | None:
        """None if it can be compiled for these tiles, else the reason."""
        if self.block_n % (self.threads // WARP_SIZE * MMA_M) or self.block_m % MMA_K:
            return f"block_n must be {MMA_M} queries for each warp, block_m a multiple of {MMA_K}"
        return None

    def __str__(self) -> str:
        of_scores = f"{self.block_n} queries by {self.block_m} keys"
        return f"{of_scores} with {self.threads} threads, stages {self.stages}"


# By the element size in bytes.
TILES = {
    2: (
        Tiles(64, 128, 256, 2),
        Tiles(64, 128, 256, 1),
        Tiles(64, 128, 128, 1),
        Tiles(64, 64, 128, 2),
        Tiles(64, 64, 128, 1),
        Tiles(32, 64, 128, 1),
        Tiles(32, 32, 64, 1),
        Tiles(16, 16, 32, 1),
    ),
    4: (
        Tiles(64, 64, 128, 2),
        Tiles(64, 64, 128, 1),
        Tiles(32, 64, 128, 2),
        Tiles(32, 64, 128, 1),
        Tiles(32, 32, 64, 1),
        Tiles(16, 16, 32, 1),
    ),
    8: (
        Tiles(32, 64, 128, 2),
        Tiles(32, 64, 128, 1),
        Tiles(16, 64, 128, 1),
        Tiles(16, 32, 64, 1),
        Tiles(16, 16, 32, 1),
    ),
}
# The fastest tiles for 16 bits on an H200, by largest head dim, if a block has a tile of the bias and they
# fit: small blocks, three per SM.
FASTEST = {64: Tiles(64, 64, 128, 2), 128: Tiles(64, 64, 128, 1)}


def bias_gradient(problem: Problem, device: Device) -> Decisions:
    """`bias_gradient`: a launch for LSE and D, then one with a block for each tile of the bias.

    If there are masks, a first launch finds out what they show of tiles of scores. If blocks share a tile, or
    warps a row, a last one adds their parts.
    """
    shape = problem.features.bias
    if shape is None:
        raise ValueError("there is no bias")
    chosen = _candidates(problem.kind, device).choose(problem, {})
    sizes, warps = chosen.tiles, chosen.tiles.threads // device.warp_size
    batch, heads, rows, keys = shape
    tiles = batch * heads * ceil_div(rows, sizes.block_n) * ceil_div(keys, sizes.block_m)
    rows_share = rows == 1
    parts = _parts(_sharing(problem, shape, sizes), tiles, device.sm_count * chosen.blocks_per_sm)
    parts_of_tile = parts * (warps if rows_share else 1)
    seen = seen_tiles(problem, sizes.block_n, sizes.block_m)
    in_parts = rows_share or parts != 1
    sums = (Scratch("parts of dbias", (parts_of_tile, *shape)),) if in_parts else ()
    launches = (
        seen_launch(problem, seen, sizes.threads, warps),
        Launch("row_sums", ceil_div(prod(lse_shape(problem)), warps), sizes.threads),
        Launch(NAME, tiles * parts, sizes.threads, chosen.cost.smem_bytes),
        Launch("add_parts", ceil_div(prod(shape), sizes.threads) if sums else 0, sizes.threads),
    )
    shared = f"each of the {counted(tiles, 'tile')} of the bias is computed in {counted(parts, 'part')}"
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *macros_of(problem, chosen),
            *gradient_macros(problem),
            ("SPLIT", 1),
            ("HIDES_KEYS", False),
            ("PARTS", parts),
            ("ROWS_SHARE", rows_share),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(Scratch("LSE and D", (*lse_shape(problem), 2)), *sums, *seen_scratch(problem, seen)),
        reasons=(*chosen.reasons, *((shared,) if parts > 1 else ())),
    )


def _sharing(problem: Problem, shape: Shape, tiles: Tiles) -> int:
    """The most tiles of scores that share one tile of the bias."""
    batch, heads, rows, _ = shape
    sequences = problem.tensor_batch
    of_rows = 1
    if rows == 1:
        of_rows = counted_row_tiles(problem, problem.seqlen_q, tiles.block_n) // max(1, sequences)
    of_batches = sequences if batch == 1 else 1
    if problem.features.packed and rows != 1 and batch == 1:
        of_batches = problem.batch
    return of_batches * (problem.heads if heads == 1 else 1) * of_rows


def _parts(sharing: int, tiles: int, blocks: int) -> int:
    """The number of parts of the tiles that share a tile, such that all SMs have blocks; 0 for none."""
    return min(sharing, max(1, blocks // max(1, tiles)))


@functools.lru_cache
def _candidates(kind: Problem, device: Device) -> Candidates[Tiles]:
    cost_of = functools.partial(_cost, kind, device)
    if kind.itemsize == 2 and not _rows_share(kind):
        dim = max(kind.head_dim, kind.value_dim)
        for tiles in (tiles for most, tiles in FASTEST.items() if dim <= most):
            if device.blocks_resident(tiles.threads, 0, cost_of(tiles).smem_bytes):
                return Candidates(device, (tiles,), cost_of)
    return Candidates(device, TILES[kind.itemsize], cost_of)


def _rows_share(problem: Problem) -> bool:
    return problem.features.bias is not None and problem.features.bias[2] == 1


def _cost(problem: Problem, device: Device, tiles: Tiles) -> Cost:
    arithmetic = arithmetic_of(problem)
    head, value = (round_up(dim, MMA_K) for dim in (problem.head_dim, problem.value_dim))
    m, n = tiles.block_m, tiles.block_n
    of_stage = sum(arithmetic.tile_bytes(rows, dim) for rows in (m, n) for dim in (head, value))
    smem_bytes = (
        arithmetic.backward_table_bytes
        + tiles.stages * of_stage
        + round_up(2 * tiles.stages * n * arithmetic.sum_bytes, LINE_BYTES)  # LSE and D
        + round_up(_bias_bytes(problem, tiles), LINE_BYTES)
    )
    warps = tiles.threads // WARP_SIZE
    queries = n // warps
    copied = (m + n) * (problem.head_dim + problem.value_dim) * arithmetic.item_bytes
    work = Work(
        multiply_adds=queries * m * (head + value),
        loaded=(queries + m) * (head + value),
        scores=queries * m,
        instructions_per_score=INSTRUCTIONS_PER_SCORE,
        l2_bytes=copied / warps,
    )
    # S, dP and dS
    sums = 3 * queries * m // device.warp_size
    registers = arithmetic.registers(sums) + arithmetic.backward_overhead
    return Cost(smem_bytes, registers, work.in_multiply_adds(arithmetic, device))


def _bias_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of a tile of the bias; rows are padded by one vector access of a thread."""
    shape, name = problem.features.bias, problem.features.bias_dtype
    if shape is None or name is None or _rows_share(problem):  # a row for all is read from memory
        return 0
    return tiles.block_n * (tiles.block_m * DTYPES[name].itemsize + VECTOR_BYTES)


def without_it(problem: Problem) -> Problem:
    """The problem without the gradient of the bias."""
    if "bias" not in problem.features.gradients:
        return problem
    return _asking(problem, tuple(name for name in problem.features.gradients if name != "bias"))


def alone(problem: Problem) -> Problem:
    """The problem with only dQ, dK, dV and the gradient of the bias."""
    return _asking(problem, ("bias",))


def _asking(problem: Problem, gradients: tuple[str, ...]) -> Problem:
    return replace(problem, features=replace(problem.features, gradients=gradients))
