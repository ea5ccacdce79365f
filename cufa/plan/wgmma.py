"""Plans for the Hopper kernels: products by warpgroups (wgmma), tiles by the copy engine (TMA).

A block is one warpgroup that copies and one for each 64 rows of its tile that computes. It has an SM to
itself and stays for many tiles, so that a grid has no more blocks than the GPU has SMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from cufa.device import REGISTERS_PER_SM, Device
from cufa.driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cufa.plan.choice import Choice, Cost, choose, query_tiles
from cufa.plan.record import MAX_GRID, Launch, Macro, Part, Scratch, TensorBox
from cufa.plan.seen import seen_scratch, seen_tiles
from cufa.plan.sizes import common_macros, params_bytes
from cufa.problem import Problem
from cufa.rounding import ceil_div, round_up

WARPGROUP = 128
# Rows of one wgmma, its depth, and the most columns that it has.
WGMMA_M, WGMMA_K, MAX_WGMMA_N = 64, 16, 256
# A tile lies in panels of 64 columns; eights of rows are swizzled together and aligned.
PANEL_COLS, PANEL_ROW_BYTES, SWIZZLE_BYTES = 64, 128, 1024
BARRIER_BYTES = 8
# Of a tile of queries, and what is looked up where sequences have lengths of their own.
WORK_TILE_BYTES, LENGTHS_BYTES = 16, 16
# What four warps found in a tile of V.
FINDINGS_BYTES = 16
# What the producer says of a tile of keys, and of values, where it leaves some out.
TILE_LABEL_BYTES = 12
# setmaxnreg counts in eights; what a warpgroup that copies needs, and the most that a thread can have.
REGISTER_STEP = 8
MIN_PRODUCER_REGISTERS = 32
MAX_CONSUMER_REGISTERS = 240
# Registers of a consumer beside accumulators and weights: addresses, descriptions, the softmax's state.
OVERHEAD_REGISTERS = 30
# Of so many warpgroups that compute, threads have no registers to spare.
MANY_CONSUMERS = 4
# Part of the L2 cache that the keys and values of heads worked on at the same time may fill.
SECTION_OF_L2 = 3 / 4


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernel is compiled for.

    `stages` are how many tiles of K, and of V, a block holds, `query_stages` how many of Q; `store_cols` how
    many columns of O it sends out at once.
    """

    block_m: int
    block_n: int
    stages: int
    query_stages: int
    store_cols: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.block_m // WGMMA_M

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def registers_at_start(self) -> int:
        """What each thread of a block begins with."""
        return _register_steps(REGISTERS_PER_SM // self.threads)

    @property
    def consumer_registers(self) -> int:
        """What a consumer's thread can have once the producer has given up what it does not need."""
        given = self.registers_at_start * (self.consumers + 1) - MIN_PRODUCER_REGISTERS
        return min(MAX_CONSUMER_REGISTERS, _register_steps(given // self.consumers))

    @property
    def producer_registers(self) -> int:
        """What the producer's threads keep."""
        left = self.registers_at_start * (self.consumers + 1) - self.consumer_registers * self.consumers
        return min(left, self.registers_at_start)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_M:
            return f"block_m must be a multiple of {WGMMA_M}, the rows of a warpgroup"
        if self.block_n % WGMMA_K or self.block_n > MAX_WGMMA_N:
            return f"block_n must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        if self.store_cols % PANEL_COLS:
            return f"store_cols must be a multiple of {PANEL_COLS}"
        return None

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}, stages {self.stages}, query stages {self.query_stages}, "
            f"{self.store_cols} columns stored at once"
        )


@dataclass(frozen=True)
class Pace:
    """How long a tile of queries takes on an SM of an H200: nanoseconds, of each score and beside those."""

    of_score: float
    of_tile: float


# Those to choose from where nothing is masked, for head dims up to each.
PACES = {
    64: {
        Tiles(192, 128, 2, 1, 64): Pace(0.0605, 1900),
        Tiles(256, 64, 4, 2, 64): Pace(0.0706, 1300),
        Tiles(128, 128, 3, 2, 64): Pace(0.0715, 1300),
        Tiles(128, 64, 4, 2, 64): Pace(0.0790, 1130),
    },
    128: {
        Tiles(192, 64, 4, 1, 128): Pace(0.0779, 2500),
        Tiles(128, 128, 2, 2, 128): Pace(0.0892, 3100),
        Tiles(128, 64, 4, 2, 128): Pace(0.0915, 2400),
    },
}

T = TypeVar("T", bound=Tiles)


def _register_steps(registers: int) -> int:
    return registers // REGISTER_STEP * REGISTER_STEP


def lengths_vary(problem: Problem) -> bool:
    """Whether each sequence's lengths must be looked up."""
    return problem.features.packed or problem.features.seqused_k


def _best_tiles(problem: Problem, device: Device) -> Tiles:
    """The tiles that were fastest on an H200."""
    dim = max(problem.head_dim, problem.value_dim)
    features = problem.features
    cut = problem.causal or features.window != (None, None)
    # The more warpgroups, the fewer registers for the producer, which has to look up such lengths,
    # pages and what is seen, and for the bias of a tile of scores.
    looks_up = lengths_vary(problem) or features.page_size > 0 or features.mask_mod is not None
    varied = looks_up or features.bias is not None
    if dim > 192:
        return Tiles(128, 64, 2, 1, 128)
    if dim > 64 and features.bias_dtype == "float32":  # a bias of that takes a register for each score
        return Tiles(128, 64, 2, 1, 64) if dim > 128 else Tiles(128, 64, 4, 2, 128)
    if dim > 128:
        return Tiles(128, 128 if problem.value_dim <= 128 else 96, 2, 1, 64)
    if not cut and not varied:
        paces = PACES[64 if dim <= 64 else 128]
        if features.alibi:  # of which some need more registers than four warpgroups leave
            paces = {tiles: pace for tiles, pace in paces.items() if tiles.consumers < MANY_CONSUMERS}
        return _fastest(problem, device, paces)
    if dim > 64:
        return Tiles(128, 128, 2, 2, 128)
    # Where a mask cuts through tiles, small ones waste less. A function of the caller's needs registers, too,
    # and so do a soft cap and ALiBi together.
    asks = features.score_mod is not None or (features.softcap and features.alibi)
    large = problem.seqlen_q >= 2048 and not varied and not asks
    return Tiles(256, 64, 4, 1, 64) if large else Tiles(128, 128, 3, 2, 64)


def _fastest(problem: Problem, device: Device, paces: Mapping[Tiles, Pace]) -> Tiles:
    """Those with which all SMs are done first.

    Blocks take tiles until none are left, so that some have one more than others. Three warpgroups hide each
    other's softmax best, but the one more is then a large tile, and the last of a head may have few rows.
    """

    def time(tiles: Tiles) -> float:
        rounds = ceil_div(query_tiles(problem, tiles), device.sm_count)
        scores = tiles.block_m * round_up(problem.seqlen_k, tiles.block_n)
        return rounds * (scores * paces[tiles].of_score + paces[tiles].of_tile)

    return min(paces, key=time)


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_6_wgmma`: a block for each SM, after a launch that looks at what a mask_mod shows."""
    chosen, grid = choose_persistent(problem, device, tiles, _best_tiles(problem, device), _forward_cost)
    sizes = chosen.tiles
    launches = [Launch("fwd_6_wgmma", grid, sizes.threads, chosen.cost.smem_bytes)]
    scratch: tuple[Scratch, ...] = ()
    if problem.features.mask_mod is not None:
        seen = seen_tiles(problem, sizes.block_m, sizes.block_n)
        blocks = ceil_div(seen, sizes.threads // device.warp_size)
        launches.insert(0, Launch("seen_tiles", max(1, blocks), sizes.threads))  # it counts from 0
        scratch = (Scratch("tiles taken", (1,)), *seen_scratch(problem, seen))
    boxes = (
        TensorBox(0, WGMMA_M, PANEL_COLS),
        TensorBox(1, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(2, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(3, WGMMA_M, PANEL_COLS),
    )
    return Part(
        tiles=asdict(sizes),
        macros=forward_macros(problem, device, chosen, len(boxes)),
        launches=tuple(launches) if grid else (),
        scratch=scratch,
        reasons=chosen.reasons,
        boxes=boxes,
    )


def box_keys(problem: Problem, tiles: Tiles) -> int:
    """Keys that one copy brings: a tile, or as many of it as are in one page wherever it begins."""
    return math.gcd(tiles.block_n, problem.features.page_size)


def choose_persistent(
    problem: Problem,
    device: Device,
    overrides: Mapping[str, int],
    best: T,
    cost_of: Callable[[Problem, T], Cost],
) -> tuple[Choice[T], int]:
    """The tiles that are best or asked for, and the blocks that share the tiles of queries: one for an SM.

    Raises ValueError if a thread would need more registers than it has, or there are too many tiles to count.
    """
    chosen = choose(problem, device, overrides, (best,), lambda tiles: cost_of(problem, tiles))
    sizes = chosen.tiles
    if chosen.cost.registers > sizes.consumer_registers:
        raise ValueError(
            f"tiles {sizes}: a thread needs about {chosen.cost.registers} registers, and there are "
            f"{sizes.consumer_registers} with {sizes.consumers} warpgroups that compute"
        )
    count = query_tiles(problem, sizes)
    if count + device.sm_count > MAX_GRID:
        raise ValueError(f"tiles {sizes}: {count} of them are more than a launch can count, {MAX_GRID}")
    return chosen, min(count, device.sm_count)


def forward_macros(problem: Problem, device: Device, chosen: Choice[T], maps: int) -> tuple[Macro, ...]:
    """What the Hopper forwards are compiled with; `maps` is how many tensor maps they are passed."""
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in asdict(chosen.tiles).items()),
        ("THREADS", chosen.tiles.threads),
        ("BOX_KEYS", box_keys(problem, chosen.tiles)),
        ("PRODUCER_REGISTERS", chosen.tiles.producer_registers),
        ("CONSUMER_REGISTERS", chosen.tiles.consumer_registers),
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", round_up(maps * TENSOR_MAP_BYTES + params_bytes(problem), TENSOR_MAP_ALIGNMENT)),
    )


def panel_tile_bytes(rows: int, cols: int, itemsize: int = 2) -> int:
    """The size of wgmma_tiles.cuh's PanelTile."""
    return ceil_div(cols * itemsize, PANEL_ROW_BYTES) * rows * PANEL_ROW_BYTES


def _forward_cost(problem: Problem, tiles: Tiles) -> Cost:
    queries = tiles.query_stages * tiles.consumers
    varied = lengths_vary(problem)
    smem_bytes = (
        tiles.query_stages * panel_tile_bytes(tiles.block_m, problem.head_dim)  # Q
        + panel_tile_bytes(tiles.block_m, tiles.store_cols)  # O
        + tiles.stages * panel_tile_bytes(tiles.block_n, problem.head_dim)  # K
        + tiles.stages * panel_tile_bytes(tiles.block_n, problem.value_dim)  # V
        + BARRIER_BYTES * (2 * (2 * tiles.stages + queries) + tiles.stages)
        + (WORK_TILE_BYTES + LENGTHS_BYTES * varied) * queries
        + FINDINGS_BYTES * tiles.stages
        + 2 * TILE_LABEL_BYTES * tiles.stages * (problem.features.mask_mod is not None)
    )
    depth, dims = round_up(problem.head_dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and O in float32, and P in pairs.
    registers = (tiles.block_n + dims) // 2 + tiles.block_n // 4 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
