"""Plans for the tensor-core kernels on mma.sync: products of 16x8 fragments, fed from shared memory.

This file has the costs of both directions and the forward, `fwd_5_mma`; the backward is in
cufa/plan/bwd_3_mma.py.

A warp owns some of a tile's 16-row tiles, and each fragment of K and V that it loads serves all of them: with
two, loads take half as long per product. The cost of a tile is counted in an SM's clocks. It depends on how
fast the tensor cores are relative to shared memory, which differs between any two generations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from cufa.device import WARP_SIZE, Device
from cufa.integers import round_up
from cufa.plan.macros import common_macros
from cufa.plan.pace import keys_of_longest, keys_of_tile, memory_time, with_features
from cufa.plan.record import Decisions, Launch, Macro
from cufa.plan.seen import (
    check_masked_keys,
    has_key_bits,
    scratch_of,
    seen_by_forward,
    seen_launch,
)
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import THROUGHPUT_WITHOUT_WARPS, Candidates, Choice, Cost
from cufa.plan.tile_sizes import TileSizes, query_tiles, sizes_of
from cufa.problem import FLOAT8, Problem

T = TypeVar("T", bound=TileSizes)

# Rows of an mma's left operand, columns of its right one, and the depth of a step of a product.
MMA_M, MMA_N, MMA_K = 16, 8, 16
# Tiles, and the kernels' struct of them, are aligned to what shared memory delivers at once. Rows are padded
# unless they are a power of two of these lines (MmaTile in mma_tile.cuh).
LINE_BYTES = 128
ROW_PADDING_BYTES = 16
# The most warps that may share rows.
MAX_SPLIT = 4

# Multiply-adds per clock and SM by mma.sync, 16-bit types with float32 sums: the data sheets' dense rates
# over SMs and clock. Data-centre chips have four times the rate of the others.
MULTIPLY_ADDS_PER_CLOCK = {(8, 0): 1024, (8, 7): 1024, (9, 0): 1024, (10, 0): 1024, (10, 3): 1024}
OTHER_MULTIPLY_ADDS_PER_CLOCK = 256
# Bytes per clock that an SM loads from shared memory.
SMEM_BYTES_PER_CLOCK = 128
# Bytes per clock that an SM gets from the L2 cache, about the same on every chip.
L2_BYTES_PER_CLOCK = 32
# Warp instructions that an SM issues per clock.
ISSUED_PER_CLOCK = 4
# Instructions per score of a lane.
INSTRUCTIONS_PER_SCORE = 6
REGISTER_BYTES = 4
# The first compute capability whose warps need not wait for copies to shared memory (cp.async).
FIRST_ASYNC_COPIES = (8, 0)
# The first compute capability on which warps can wait for parts of a block's work (mbarrier.try_wait).
FIRST_HANDING_OVER = (9, 0)
# For the estimated time of the forward, measured on an H200: the time until a block's first tiles have
# arrived; of a lone block for a tile of scores, fixed and for each clock of its work; and of an SM for each
# clock of its work, and further for each row and score. Rows of more than ROW_DIMS take longer if tiles are
# large.
START_NS = 3000
TILE_LATENCY_NS, LATENCY_NS_PER_CLOCK = 1150, 0.13
CLOCK_NS, ROW_NS, SCORE_NS = 0.313, 12.5, 0.012
ROW_DIMS, LARGE_BLOCK_M = 64, 64
TENSOR_CORES_OF_SM = 4
H200 = Device.of("sm_90a")
# Registers per score of a lane for features that work on each score; without them, ptxas spilled hundreds of
# bytes.
FEATURE_REGISTERS_PER_SCORE = 0.5
# The same in float32 for a mask that has a bit for each key; other dtypes have registers for it.
KEY_BITS_REGISTERS_PER_SCORE = 0.3


@dataclass(frozen=True)
class Arithmetic:
    """The cost of an element type on tensor cores.

    Bytes of an element and of a sum; clocks of a product, relative to 16-bit types; the depth of a step of a
    product; and instructions besides the products, in the time of a float32 addition: per element that a lane
    loads as an operand, and per score. The overheads are registers besides the sums: operands, addresses, the
    softmax's state. Shared memory may hold tables of powers of 2. One flag says whether the forward's copies
    are free, since its products take much longer. The last two are measured on an H200: a factor on the
    forward's estimated time, and how much of the throughput is left with next to no warps on an SM.
    """

    item_bytes: int
    sum_bytes: int
    product_clocks: float
    forward_overhead: int
    backward_overhead: int
    depth: int = MMA_K
    instructions_per_operand: float = 0
    instructions_per_score: float = 0
    forward_table_bytes: int = 0
    backward_table_bytes: int = 0
    hides_copies: bool = False
    measured: float = 1
    without_warps: float = THROUGHPUT_WITHOUT_WARPS

    def tile_bytes(self, rows: int, cols: int) -> int:
        """The size of mma_tile.cuh's MmaTile."""
        padding = 0 if self.swizzles(cols) else ROW_PADDING_BYTES
        return round_up(rows * (self._row_bytes(cols) + padding), LINE_BYTES)

    def swizzles(self, cols: int) -> bool:
        """Whether units of that tile's rows are swizzled; if not, rows are padded."""
        row_bytes = self._row_bytes(cols)
        in_lines = row_bytes % LINE_BYTES == 0 or self.item_bytes == 1
        return in_lines and row_bytes & (row_bytes - 1) == 0

    def _row_bytes(self, cols: int) -> int:
        return round_up(cols, self.depth) * self.item_bytes

    def throughput_without_warps(self, device: Device) -> float:
        """The fraction of an SM's throughput with next to no warps; less if these wait for their copies."""
        copies_async = device.arch.capability >= FIRST_ASYNC_COPIES
        return self.without_warps if copies_async else THROUGHPUT_WITHOUT_WARPS

    def registers(self, sums: int) -> int:
        """Registers that this many sums take."""
        return sums * self.sum_bytes // REGISTER_BYTES


HALF = Arithmetic(
    item_bytes=2,
    sum_bytes=4,
    product_clocks=1,
    forward_overhead=62,
    backward_overhead=62,
    without_warps=0.9,
)
# Converted to 16 bits on the way to the products.
BYTE = Arithmetic(
    item_bytes=1, sum_bytes=4, product_clocks=1, forward_overhead=62, backward_overhead=62, depth=2 * MMA_K
)
# An mma has half the depth of one for 16-bit types.
TF32 = Arithmetic(
    item_bytes=4,
    sum_bytes=4,
    product_clocks=2,
    forward_overhead=62,
    backward_overhead=62,
    instructions_per_operand=1,
    measured=0.92,
)
# Three of them, and each operand is split in two: four instructions, two of them at half the rate.
SINGLE = Arithmetic(
    item_bytes=4,
    sum_bytes=4,
    product_clocks=6,
    forward_overhead=80,
    backward_overhead=100,
    instructions_per_operand=6,
    measured=1.3,
)
# On an H200; the other chips with float64 tensor cores have half as fast ones. An SM has half as many lanes
# for float64, and 2^x takes 16 instructions there.
DOUBLE = Arithmetic(
    item_bytes=8,
    sum_bytes=8,
    product_clocks=16,
    forward_overhead=94,
    backward_overhead=62,
    instructions_per_score=32,
    forward_table_bytes=1024 * 8,
    backward_table_bytes=128 * 8,
    hides_copies=True,
)


def arithmetic_of(problem: Problem) -> Arithmetic:
    """The arithmetic of tensor cores for the problem's keys and values."""
    if problem.dtype == "float64":
        return DOUBLE
    if problem.dtype == "float32":
        return TF32 if problem.features.tf32 else SINGLE
    return BYTE if problem.key_dtype == FLOAT8 else HALF


def hands_over_keys(problem: Problem, device: Device) -> bool:
    """Whether the forward's warps hand K and V on (handover.cuh) instead of meeting at barriers.

    float64 products take so long that while one warp computes its softmax, the others keep the tensor cores
    busy.
    """
    return problem.dtype == "float64" and device.arch.capability >= FIRST_HANDING_OVER


@dataclass(frozen=True)
class Tiles:
    """The sizes of the forward; `split` warps share rows and divide the columns of the output."""

    block_m: int
    block_n: int
    threads: int
    split: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // WARP_SIZE

    @property
    def rows(self) -> int:
        """Rows of a tile that a warp owns, alone or shared."""
        return self.block_m * self.split // self.warps

    def columns(self, problem: Problem) -> int:
        """Columns of a warp's output."""
        return round_up(problem.value_dim, MMA_K * self.split) // self.split

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.split > MAX_SPLIT or self.warps % self.split:
            return f"split may be 1 to {MAX_SPLIT}, and must divide threads / {WARP_SIZE}"
        rows = self.warps // self.split * MMA_M
        if self.block_m % rows:
            return f"block_m must be a multiple of {rows}, {MMA_M} rows for each warp"
        if self.block_n % MMA_K:
            return f"block_n must be a multiple of {MMA_K}"
        return None

    def __str__(self) -> str:
        split = f", split {self.split}" if self.split > 1 else ""
        return f"{self.block_m}x{self.block_n} with {self.threads} threads{split}"


# By the element size in bytes: block_m, block_n, threads
_WIDE_FORWARD_TILES = (
    Tiles(128, 64, 256),
    Tiles(128, 32, 256),
    Tiles(128, 64, 128),
    Tiles(128, 32, 128),
    Tiles(64, 64, 128),
    Tiles(64, 32, 128),
    Tiles(64, 16, 128),
    Tiles(32, 32, 64),
    Tiles(32, 16, 64),
    Tiles(16, 32, 32),
    Tiles(16, 16, 32),
)
FORWARD_TILES = {
    2: (
        Tiles(128, 128, 128),
        Tiles(128, 96, 128),
        Tiles(128, 64, 128),
        Tiles(128, 32, 128),
        Tiles(64, 64, 128),
        Tiles(64, 48, 128),
        Tiles(64, 32, 128),
        Tiles(64, 16, 128),
        Tiles(32, 64, 64),
        Tiles(16, 64, 32),
        Tiles(16, 32, 32),
        Tiles(16, 16, 32),
    ),
    4: _WIDE_FORWARD_TILES,
    # At equal price the first is taken: two small blocks do not wait at each other's barriers.
    8: (Tiles(64, 64, 128), *_WIDE_FORWARD_TILES),
}

# With more bytes of sums in a row of the output than this, a warp barely has registers for whole rows.
WIDE_ROW_BYTES = 1024
# block_m, block_n, threads, split
WIDE_FORWARD_TILES = (
    Tiles(64, 64, 256, 2),
    Tiles(64, 32, 256, 2),
    Tiles(64, 16, 256, 2),
    Tiles(32, 32, 128, 2),
    Tiles(32, 16, 128, 2),
    Tiles(16, 16, 64, 2),
)


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_5_mma`: one launch, with a block for each tile of queries.

    If there are masks, a first launch finds out what they show of tiles of scores.
    """
    chosen = _forward_candidates(problem.kind, device).choose(problem, tiles)
    sizes = chosen.tiles
    check_masked_keys(problem, sizes)
    seen = seen_by_forward(problem, sizes, with_bits=False)
    launches = (
        seen_launch(problem, seen.warps, sizes.threads, sizes.warps),
        Launch("fwd_5_mma", query_tiles(problem, sizes), sizes.threads, chosen.cost.smem_bytes),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *macros_of(problem, chosen),
            ("HANDS_OVER", int(hands_over_keys(problem, device))),
            ("KEY_BITS", has_key_bits(problem, sizes)),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=scratch_of(problem, seen),
        reasons=chosen.reasons,
    )


@functools.lru_cache
def _forward_candidates(kind: Problem, device: Device) -> Candidates[Tiles]:
    row_bytes = max(kind.head_dim, kind.value_dim) * arithmetic_of(kind).sum_bytes
    tiles = WIDE_FORWARD_TILES if row_bytes > WIDE_ROW_BYTES else FORWARD_TILES[kind.itemsize]
    return Candidates(device, tiles, functools.partial(_forward_cost, kind, device))


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds.

    It is the longest of the time of a lone block, of the work of all SMs, and of moving the data.
    """
    tiles = _forward_candidates(problem.kind, device).choose(problem, {}).tiles
    tile_clocks = _tile_clocks(problem.kind, tiles)
    key_tiles, most = (ceil(keys(problem, tiles) / tiles.block_n) for keys in (keys_of_tile, keys_of_longest))
    tile_work = tile_clocks * CLOCK_NS + tiles.block_m * tiles.block_n * SCORE_NS
    tile_latency = TILE_LATENCY_NS + LATENCY_NS_PER_CLOCK * tile_clocks
    # A warp has one of an SM's tensor cores.
    of_block = most * max(tile_latency, tile_work * max(1, TENSOR_CORES_OF_SM / tiles.warps))
    dims = max(problem.head_dim, problem.value_dim) if tiles.block_m >= LARGE_BLOCK_M else ROW_DIMS
    row_time = ROW_NS * max(1, dims / ROW_DIMS)
    block_work = tiles.block_m * row_time + key_tiles * tile_work
    of_all = query_tiles(problem, tiles) * block_work / device.sm_count
    computing = with_features(problem, max(of_block, of_all))
    return (START_NS + max(computing, memory_time(problem, device))) / 1000


@functools.lru_cache
def _tile_clocks(kind: Problem, tiles: Tiles) -> float:
    """The clocks of an SM of an H200 for a tile of scores."""
    multiply_adds = _forward_cost(kind, H200, tiles).work * tiles.threads
    arithmetic = arithmetic_of(kind)
    clocks_of_one = arithmetic.product_clocks * arithmetic.measured / MULTIPLY_ADDS_PER_CLOCK[9, 0]
    return multiply_adds * clocks_of_one


def macros_of(problem: Problem, chosen: Choice[T]) -> tuple[Macro, ...]:
    """The macros that forward and backward share."""
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in sizes_of(chosen.tiles).items()),
        ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", params_bytes(problem)),
    )


def _forward_cost(problem: Problem, device: Device, tiles: Tiles) -> Cost:
    arithmetic = arithmetic_of(problem)
    depth, columns = round_up(problem.head_dim, MMA_K), tiles.columns(problem)
    smem_bytes = (
        arithmetic.forward_table_bytes
        + (LINE_BYTES if hands_over_keys(problem, device) else 0)
        + arithmetic.tile_bytes(tiles.block_m, problem.head_dim)  # Q
        + arithmetic.tile_bytes(tiles.block_n, problem.head_dim)  # K
        + arithmetic.tile_bytes(tiles.block_n, columns * tiles.split)  # V
    )
    copied = tiles.block_n * (problem.head_dim + problem.value_dim) * arithmetic.item_bytes
    work = Work(
        multiply_adds=tiles.rows * tiles.block_n * (depth + columns),
        # Fragments of Q are read again for every tile of keys.
        loaded=tiles.rows * depth + tiles.block_n * (depth + columns),
        scores=tiles.rows * tiles.block_n,
        instructions_per_score=INSTRUCTIONS_PER_SCORE,
        l2_bytes=0 if arithmetic.hides_copies else copied / tiles.warps,
    )
    scores, outputs = (tiles.rows * size // device.warp_size for size in (tiles.block_n, columns))
    registers = arithmetic.registers(scores + outputs) + arithmetic.forward_overhead
    registers += round(_registers_per_score(problem) * arithmetic.registers(scores))
    return Cost(
        smem_bytes,
        registers,
        work.in_multiply_adds(arithmetic, device),
        arithmetic.throughput_without_warps(device),
    )


def _registers_per_score(problem: Problem) -> float:
    """What features need that do something with every score, unlike a window, which cuts few tiles.

    With 16 bits there are registers for a mask: the same tiles are fastest with one.
    """
    features = problem.features
    masked = features.mask is not None and problem.itemsize > HALF.item_bytes
    has_arrays = features.bias is not None or (masked and not features.mask_of_keys)
    has_functions = features.score_mod is not None or features.mask_mod is not None
    if has_arrays or has_functions or features.softcap or features.alibi or features.dropout:
        return FEATURE_REGISTERS_PER_SCORE
    return KEY_BITS_REGISTERS_PER_SCORE if masked and problem.itemsize == SINGLE.item_bytes else 0


@dataclass(frozen=True)
class Work:
    """The work of a warp for one tile of scores.

    Multiply-adds of the tensor cores, elements loaded as operands, scores, a lane's instructions per score,
    and the warp's share of the bytes that the block moves between L2 and shared memory.
    """

    multiply_adds: int
    loaded: int
    scores: int
    instructions_per_score: int
    l2_bytes: float

    def in_multiply_adds(self, arithmetic: Arithmetic, device: Device) -> float:
        """All of the work, as the number of a thread's multiply-adds that take as long."""
        rate = MULTIPLY_ADDS_PER_CLOCK.get(device.arch.capability, OTHER_MULTIPLY_ADDS_PER_CLOCK)
        instructions = (
            self.loaded * arithmetic.instructions_per_operand
            + self.scores * (self.instructions_per_score + arithmetic.instructions_per_score)
        ) / device.warp_size
        clocks = (
            self.multiply_adds * arithmetic.product_clocks / rate
            + self.loaded * arithmetic.item_bytes / SMEM_BYTES_PER_CLOCK
            + instructions / ISSUED_PER_CLOCK
            + self.l2_bytes / L2_BYTES_PER_CLOCK
        )
        return clocks * rate / arithmetic.product_clocks / device.warp_size
