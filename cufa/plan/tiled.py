"""Plans for the tiled kernels on CUDA cores: the largest tiles that an SM holds well.

A block's threads are laid out in `threads / lanes` rows of `lanes` (products.cuh). A thread owns
block_m / rows queries by block_n / lanes keys of a score tile. With more of both, each read of shared
memory feeds more multiply-adds. But then a thread needs more registers, an SM holds fewer warps to hide
the latency of those reads, and more of a tile may lie outside of a short problem. A small model of this
computes the cost of a useful multiply-add for each candidate, and the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

from cufa.device import WARP_SIZE, Device
from cufa.integers import ceil_div, round_up
from cufa.plan.gradients import (
    bias_macros,
    gradient_launches,
    gradient_macros,
    gradient_sums,
    row_blocks,
    sink_launch,
)
from cufa.plan.macros import common_macros
from cufa.plan.record import Decisions, Launch, Macro, Scratch
from cufa.plan.struct_sizes import VECTOR_BYTES, params_bytes, shared_matrix_bytes
from cufa.plan.tile_choice import Candidates, Choice, Cost
from cufa.plan.tile_sizes import query_tiles, row_tiles, sizes_of
from cufa.problem import Problem, lse_shape

# The cost of a thread's 16-byte read of shared memory, in multiply-adds of float32. With it the model
# predicts the times of 140 combinations of tiles, head dims and dtypes on an H200 within 15 % in four
# cases of five. Its choice is the fastest candidate or within 10 % of it.
VECTOR_READ_COST = 4
# Weights, in the dtype of sums, that one read of shared memory brings; in float64 half as many would do.
WEIGHT_VECTOR = 4
# Registers besides the tiles, for addresses, loop counters and loads in flight: more than ptxas was seen
# to use on sm_75 to sm_120.
OVERHEAD_REGISTERS = 72


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for."""

    block_m: int
    block_n: int
    threads: int
    lanes: int

    @property
    def thread_rows(self) -> int:
        """Rows of threads."""
        return self.threads // self.lanes

    @property
    def rows(self) -> int:
        """Queries of a score tile that a thread owns."""
        return self.block_m // self.thread_rows

    @property
    def keys(self) -> int:
        """Keys of a score tile that a thread owns."""
        return self.block_n // self.lanes

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.lanes > WARP_SIZE or self.lanes & (self.lanes - 1):
            return f"lanes must be a power of two up to {WARP_SIZE}"
        if self.block_m % self.thread_rows:
            return f"block_m must be a multiple of threads / lanes = {self.thread_rows}"
        if self.block_n % max(self.lanes, WEIGHT_VECTOR):
            keys = max(self.lanes, WEIGHT_VECTOR)
            return f"block_n must be a multiple of {keys} (lanes, and a vector of weights)"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} with {self.threads} threads in {self.lanes} lanes"


@dataclass(frozen=True)
class BackwardTiles(Tiles):
    """The tiles of the backward, where each row of threads also owns keys of the tile."""

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        misfit = super().misfit()
        if misfit is None and self.block_n % self.thread_rows:
            misfit = f"block_n must be a multiple of threads / lanes = {self.thread_rows}"
        return misfit


T = TypeVar("T", bound=Tiles)

# block_m, block_n, threads, lanes
FLASH_V1_TILES = (Tiles(32, 32, 128, 8), Tiles(16, 16, 64, 8), Tiles(8, 8, 32, 8))
FLASH_V2_TILES = (
    Tiles(128, 64, 256, 16),
    Tiles(128, 64, 128, 8),
    Tiles(128, 32, 128, 8),
    Tiles(128, 32, 256, 16),
    Tiles(64, 64, 256, 16),
    Tiles(64, 64, 128, 8),
    Tiles(64, 32, 128, 16),
    Tiles(32, 64, 128, 16),
    Tiles(32, 32, 128, 16),
    Tiles(16, 16, 64, 8),
    Tiles(8, 8, 32, 8),
)
# Above this head dim, float64 leaves a thread registers for only one row.
WIDE_HEAD_DIM = 256
WIDE_TILES = (Tiles(4, 8, 32, 8),)
BACKWARD_TILES = (
    BackwardTiles(64, 128, 256, 16),
    BackwardTiles(64, 64, 256, 16),
    BackwardTiles(64, 64, 128, 8),
    BackwardTiles(32, 64, 256, 16),
    BackwardTiles(32, 64, 128, 8),
    BackwardTiles(32, 32, 128, 8),
    BackwardTiles(32, 32, 128, 16),
    BackwardTiles(16, 64, 128, 16),
    BackwardTiles(16, 32, 128, 16),
    BackwardTiles(16, 16, 64, 8),
    BackwardTiles(4, 8, 32, 8),
)
# Above WIDE_HEAD_DIM the backward's shared memory holds one slice of the head dims at a time, and for fewer
# dims if that is cheaper. A slice has at most so many columns by the bytes of a sum: as many as 64 KiB hold
# of the smallest tiles.
SLICE_COLUMNS = {4: 128, 8: 96}
# Slices are taken if their slowdown is less than this, relative to whole head dims: the estimate leaves out
# that each tile of queries loads all of K and V again.
SLICES_ARE_WORTH_IT = 0.8
SLICED_BACKWARD_TILES = (
    BackwardTiles(64, 32, 256, 16),
    BackwardTiles(32, 32, 256, 16),
    BackwardTiles(64, 16, 256, 16),
    BackwardTiles(32, 16, 256, 16),
    BackwardTiles(16, 16, 256, 16),
    BackwardTiles(16, 16, 128, 8),
    BackwardTiles(8, 8, 64, 8),
)


def flash_v1(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_3_flash_v1`: one step for each block of keys, and one step if there are no keys."""
    chosen = _choose("fwd_3_flash_v1", problem, device, tiles, FLASH_V1_TILES, _forward_cost)
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    steps = max(1, ceil_div(problem.seqlen_k, chosen.tiles.block_n))
    grid = query_tiles(problem, chosen.tiles)
    launch = Launch("fwd_3_flash_v1", grid, chosen.tiles.threads, chosen.cost.smem_bytes, steps)
    return Decisions(
        tiles=sizes_of(chosen.tiles),
        macros=_macros(problem, chosen),
        launches=(launch,) if grid else (),
        scratch=(Scratch("O", (*rows, problem.value_dim)), Scratch("l", rows), Scratch("m", rows)),
        reasons=(*chosen.reasons, f"one launch for each of {steps} blocks of keys"),
    )


def flash_v2(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_4_flash_v2`: one launch, a block for each tile of queries."""
    candidates = (*FLASH_V2_TILES, *WIDE_TILES) if _is_wide(problem) else FLASH_V2_TILES
    chosen = _choose("fwd_4_flash_v2", problem, device, tiles, candidates, _forward_cost)
    return _one_launch("fwd_4_flash_v2", problem, chosen)


def probabilities(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`attn_probs`: one launch, a block for each tile of queries."""
    chosen = _choose("attn_probs", problem, device, tiles, FLASH_V2_TILES, _probabilities_cost)
    return _one_launch("attn_probs", problem, chosen)


def _one_launch(entry: str, problem: Problem, chosen: Choice[Tiles]) -> Decisions:
    grid = query_tiles(problem, chosen.tiles)
    launch = Launch(entry, grid, chosen.tiles.threads, chosen.cost.smem_bytes)
    return Decisions(
        tiles=sizes_of(chosen.tiles),
        macros=(
            *_macros(problem, chosen),
            ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ),
        launches=(launch,) if grid else (),
        reasons=chosen.reasons,
    )


def flash_v2_backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_2_flash_v2`: a warp for each row, then a block for each tile of keys, then a warp for each row.

    If deterministic, a block for each tile of queries takes the place of these warps. Launches for the
    gradients of a bias, a sink and arrays follow.
    """
    slices, chosen = _choose_slices(problem, device, tiles)
    threads, smem_bytes = chosen.tiles.threads, chosen.cost.smem_bytes
    rows = lse_shape(problem)
    warps = threads // device.warp_size
    key_blocks = problem.kv_heads * row_tiles(problem, problem.seqlen_k, chosen.tiles.block_n)
    deterministic = problem.features.deterministic
    launches = (
        Launch("row_sums", row_blocks(problem, prod(rows), warps), threads),
        Launch("key_tiles", key_blocks, threads, smem_bytes),
        Launch("query_tiles", query_tiles(problem, chosen.tiles), threads, smem_bytes)
        if deterministic
        else Launch("round_queries", ceil_div(prod(rows), warps), threads),
        *gradient_launches(problem, threads, warps),
    )
    return Decisions(
        tiles=sizes_of(chosen.tiles),
        macros=(
            *_macros(problem, chosen),
            ("BLOCKS_PER_SM", chosen.blocks_per_sm),
            ("SLICES", slices),
            *gradient_macros(problem),
            *bias_macros(problem),
            ("SINK_SMEM_BYTES", sink_launch(problem, threads, warps).smem_bytes),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(
            Scratch("LSE and D", (*rows, 2)),
            *(() if deterministic else (Scratch("dQ sums", (*rows, problem.head_dim)),)),
            *gradient_sums(problem),
        ),
        reasons=(*chosen.reasons, *_why_slices(slices)),
    )


def _choose_slices(
    problem: Problem, device: Device, overrides: Mapping[str, int]
) -> tuple[int, Choice[BackwardTiles]]:
    """Into how many slices the head dims are divided, and the tiles."""
    name, sliced = "bwd_2_flash_v2", _slices(problem)

    def choose(slices: int) -> tuple[int, Choice[BackwardTiles]]:
        candidates = BACKWARD_TILES if slices == 1 else SLICED_BACKWARD_TILES
        cost_of = partial(_backward_cost, slices=slices)
        return slices, _choose(name, problem, device, overrides, candidates, cost_of)

    if sliced == 1 or _is_wide(problem):
        return choose(sliced)
    try:
        whole = choose(1)
    except ValueError:
        return choose(sliced)
    try:
        in_slices = choose(sliced)
    except ValueError:
        return whole
    spills = whole[1].cost.registers > device.registers_per_thread
    cheaper = in_slices[1].slowdown < SLICES_ARE_WORTH_IT * whole[1].slowdown
    return in_slices if spills or cheaper else whole


def _is_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.value_dim) > WIDE_HEAD_DIM


def _slices(problem: Problem) -> int:
    """Slices of the head dims, if a block of the backward holds one at a time."""
    return ceil_div(max(problem.head_dim, problem.value_dim), SLICE_COLUMNS[problem.accumulator.itemsize])


def _why_slices(slices: int) -> tuple[str, ...]:
    """What a plan says about the slices."""
    return (f"shared memory holds one of {slices} slices of the head dims at a time",) * (slices > 1)


def _choose(
    kernel: str,
    problem: Problem,
    device: Device,
    overrides: Mapping[str, int],
    candidates: Sequence[T],
    cost_of: Callable[[Problem, T], Cost],
) -> Choice[T]:
    """The cheapest of these tiles, or the requested ones; raises ValueError if none fits."""
    try:
        fitting = Candidates(device, candidates, partial(cost_of, problem))
    except ValueError as error:
        refused = f"{problem.dtype} with head dim {problem.dims} on {device.arch}"
        raise ValueError(f"{kernel} does not support {refused}: {error}") from None
    return fitting.choose(problem, overrides)


def _macros(problem: Problem, chosen: Choice[T]) -> tuple[Macro, ...]:
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in sizes_of(chosen.tiles).items()),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", params_bytes(problem)),
    )


def _output_columns(dims: int, tiles: Tiles, itemsize: int) -> int:
    """Columns of an output tile: whole vectors for each of the lanes (ThreadLayout::padded)."""
    return round_up(dims, tiles.lanes * (VECTOR_BYTES // itemsize))


@dataclass(frozen=True)
class _Work:
    """The work of a thread for one tile of scores: 16-byte reads of shared memory, and multiply-adds."""

    reads: float
    multiply_adds: int

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.reads + other.reads, self.multiply_adds + other.multiply_adds)

    def total(self, itemsize: int) -> float:
        """The work in multiply-adds; in float64 they take twice as long relative to the reads."""
        return self.multiply_adds + VECTOR_READ_COST * 4 / itemsize * self.reads


def _product_nt(rows: int, keys: int, depth: int, vector: int) -> _Work:
    return _Work((rows + keys) * depth / vector, rows * keys * depth)


def _product_nn(rows: int, columns: int, depth: int, vector: int) -> _Work:
    return _Work((rows + columns) * depth / vector, rows * columns * depth)


def _product_tn(keys: int, columns: int, depth: int, vector: int) -> _Work:
    weights = keys / vector if keys % vector == 0 else keys
    return _Work((weights + columns / vector) * depth, keys * columns * depth)


def _forward_cost(problem: Problem, tiles: Tiles) -> Cost:
    itemsize = problem.accumulator.itemsize
    vector = VECTOR_BYTES // itemsize
    value_columns = _output_columns(problem.value_dim, tiles, itemsize)
    smem_bytes = (
        shared_matrix_bytes(tiles.block_m, problem.head_dim, itemsize)  # Q
        + shared_matrix_bytes(tiles.block_n, problem.head_dim, itemsize)  # K
        + shared_matrix_bytes(tiles.block_n, value_columns, itemsize)  # V
        + shared_matrix_bytes(tiles.block_m, tiles.block_n, itemsize)  # P
    )
    rows, keys, columns = tiles.rows, tiles.keys, value_columns // tiles.lanes
    work = (
        _product_nt(rows, keys, round_up(problem.head_dim, vector), vector)  # S
        + _product_nn(rows, columns, tiles.block_n, vector)  # O
    )
    registers = _registers(rows * keys + rows * columns, rows + keys, itemsize)
    return Cost(smem_bytes, registers, work.total(itemsize))


def _probabilities_cost(problem: Problem, tiles: Tiles) -> Cost:
    itemsize = problem.accumulator.itemsize
    vector = VECTOR_BYTES // itemsize
    smem_bytes = (
        shared_matrix_bytes(tiles.block_m, problem.head_dim, itemsize)  # Q
        + shared_matrix_bytes(tiles.block_n, problem.head_dim, itemsize)  # K
    )
    work = _product_nt(tiles.rows, tiles.keys, round_up(problem.head_dim, vector), vector)  # S
    registers = _registers(tiles.rows * tiles.keys, tiles.rows + tiles.keys, itemsize)
    return Cost(smem_bytes, registers, work.total(itemsize))


def _backward_cost(problem: Problem, tiles: Tiles, slices: int) -> Cost:
    itemsize = problem.accumulator.itemsize
    vector = VECTOR_BYTES // itemsize
    head_columns = _output_columns(ceil_div(problem.head_dim, slices), tiles, itemsize)
    value_columns = _output_columns(ceil_div(problem.value_dim, slices), tiles, itemsize)
    value_depth = min(problem.value_dim, value_columns)
    smem_bytes = (
        shared_matrix_bytes(tiles.block_n, head_columns, itemsize)  # K
        + shared_matrix_bytes(tiles.block_n, value_depth, itemsize)  # V
        + shared_matrix_bytes(tiles.block_m, head_columns, itemsize)  # Q
        + shared_matrix_bytes(tiles.block_m, value_columns, itemsize)  # dO
        + 2 * shared_matrix_bytes(tiles.block_m, tiles.block_n, itemsize)  # P, dS
        + 2 * tiles.block_m * itemsize  # LSE, D
    )
    rows, keys, tile_keys = tiles.rows, tiles.keys, tiles.block_n // tiles.thread_rows
    # Of all slices.
    head = ceil_div(problem.head_dim, head_columns) * head_columns // tiles.lanes
    value = ceil_div(problem.value_dim, value_columns) * value_columns // tiles.lanes
    work = (
        _product_nt(rows, keys, round_up(problem.head_dim, vector), vector)  # S
        + _product_nt(rows, keys, round_up(problem.value_dim, vector), vector)  # dP
        + _product_tn(tile_keys, value, tiles.block_m, vector)  # dV
        + _product_tn(tile_keys, head, tiles.block_m, vector)  # dK
        + _product_nn(rows, head, tiles.block_n, vector)  # dQ
    )
    # dK and dV are held all the time. Only one of S and dP, and a slice of dQ, is held at once.
    held = tile_keys * (head + value) + max(2 * rows * keys, rows * head_columns // tiles.lanes)
    return Cost(smem_bytes, _registers(held, rows + keys, itemsize), work.total(itemsize))


def _registers(accumulators: int, operand_vectors: int, itemsize: int) -> int:
    words = (accumulators * itemsize + operand_vectors * VECTOR_BYTES) // 4
    return words + OVERHEAD_REGISTERS
