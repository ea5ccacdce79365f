"""Plans for the Hopper backward: a warpgroup that copies, two that compute, each for 64 keys of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cufa.device import REGISTERS_PER_SM, Device
from cufa.plan.choice import Choice, Cost, choose
from cufa.plan.record import Launch, Macro, Part, Scratch, TensorBox
from cufa.plan.sizes import (
    BACKWARD_PARAMS_BYTES,
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    ceil_div,
    common_macros,
    round_up,
)
from cufa.plan.wgmma import (
    BARRIER_BYTES,
    MAX_CONSUMER_REGISTERS,
    MAX_WGMMA_N,
    PANEL_COLS,
    REGISTER_STEP,
    SECTION_OF_L2,
    SWIZZLE_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    panel_tile_bytes,
)
from cufa.problem import Problem

CONSUMERS = 2
HELPER_THREADS = 256
SUM_BYTES = 4
# Tiles of dS that a block holds: one to write while the other is read.
SCORE_STAGES = 2
# Part of the SMs' time that blocks which work on whole heads must fill.
FILLED = 0.9
TAKE_TURNS = -1
WHOLE = -1
STRIDE = 0
PRODUCER_REGISTERS = 24
# Registers of a consumer beside accumulators: addresses, descriptions, statistics of rows.
OVERHEAD_REGISTERS = 30


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for; `stages` are how many tiles of Q, and of dO, are held."""

    block_m: int
    stages: int

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return CONSUMERS * WGMMA_M

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (CONSUMERS + 1) * WARPGROUP

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_K or self.block_m > MAX_WGMMA_N:
            return f"block_m must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, stages {self.stages}"


@dataclass(frozen=True)
class WideTiles(Tiles):
    """The same for head dims over 128, where the warpgroups share the keys and part the dims."""

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return WGMMA_M


# What is best for head dims up to each.
TILES = {
    64: Tiles(128, 2),
    128: Tiles(64, 2),
}


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_4_wgmma`: a block for each tile of queries, for each tile of keys, for each tile of queries."""
    dim = max(problem.head_dim, problem.value_dim)
    best = next(candidate for limit, candidate in TILES.items() if dim <= limit)
    chosen = choose(problem, device, tiles, (best,), lambda candidate: _cost(problem, candidate))
    return _part(problem, device, chosen, round_up(problem.head_dim, PANEL_COLS))


def _part(problem: Problem, device: Device, chosen: Choice[Tiles], padded_dim: int) -> Part:
    sizes = chosen.tiles
    heads = problem.batch * problem.heads
    query_tiles = ceil_div(problem.seqlen_q, sizes.block_m)
    key_tiles = ceil_div(problem.seqlen_k, sizes.block_n)
    kv_heads = problem.batch * problem.kv_heads
    whole_head = key_tiles == 1 or _fills(device, kv_heads) if WHOLE < 0 else bool(WHOLE)
    key_blocks = kv_heads * (min(1, key_tiles) if whole_head else key_tiles)
    if STRIDE and not whole_head: key_blocks = min(key_blocks, device.sm_count)
    launches = (
        Launch("row_sums", heads * query_tiles, HELPER_THREADS),
        Launch("key_tiles", key_blocks, sizes.threads, chosen.cost.smem_bytes),
        Launch("round_queries", heads * query_tiles, HELPER_THREADS),
    )
    boxes = (
        TensorBox(0, sizes.block_m, PANEL_COLS),  # Q
        TensorBox(1, WGMMA_M, PANEL_COLS),  # K
        TensorBox(2, WGMMA_M, PANEL_COLS),  # V
        TensorBox(4, sizes.block_m, PANEL_COLS),  # dO
        TensorBox(6, WGMMA_M, PANEL_COLS),  # dK
        TensorBox(7, WGMMA_M, PANEL_COLS),  # dV
    )
    return Part(
        tiles=asdict(sizes),
        macros=_macros(problem, device, chosen, len(boxes), whole_head),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(
            Scratch("dQ sums", (problem.batch, problem.heads, query_tiles, padded_dim, sizes.block_m)),
            Scratch("LSE and D", (problem.batch, problem.heads, query_tiles, 2, sizes.block_m)),
        ),
        reasons=chosen.reasons,
        boxes=boxes,
    )


def backward_wide(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_5_wgmma_wide`: as `bwd_4_wgmma`."""
    wide = WideTiles(64, 2)
    chosen = choose(problem, device, tiles, (wide,), lambda candidate: _wide_cost(problem, candidate))
    return _part(problem, device, chosen, CONSUMERS * _part_of_dims(problem.head_dim))


def _fills(device: Device, blocks: int) -> bool:
    """Whether so many long blocks leave few SMs idle at the end."""
    return blocks >= FILLED * device.sm_count * ceil_div(blocks, device.sm_count)


def _part_of_dims(dims: int) -> int:
    return round_up(ceil_div(dims, CONSUMERS), PANEL_COLS)


def _wide_cost(problem: Problem, tiles: Tiles) -> Cost:
    m, n = tiles.block_m, tiles.block_n
    head = CONSUMERS * _part_of_dims(problem.head_dim)
    value = CONSUMERS * _part_of_dims(problem.value_dim)
    smem_bytes = (
        panel_tile_bytes(n, head)  # K
        + panel_tile_bytes(n, value)  # V
        + tiles.stages * (panel_tile_bytes(m, head) + panel_tile_bytes(m, value))  # Q, dO
        + tiles.stages * 2 * panel_tile_bytes(n, m)  # P, dS
        + tiles.stages * 2 * m * SUM_BYTES  # LSE and D
        + BARRIER_BYTES * (8 * tiles.stages + 2)
        + BARRIER_BYTES  # whether anything was taken out
    )
    # S or dP, dK and dV, a panel of dQ.
    registers = m // 2 + (head + value) // 4 + m // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)


def _macros(
    problem: Problem, device: Device, chosen: Choice[Tiles], maps: int, whole_head: bool
) -> tuple[Macro, ...]:
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in asdict(chosen.tiles).items()),
        ("HELPER_THREADS", HELPER_THREADS),
        ("TAKE_TURNS", max(problem.head_dim, problem.value_dim) > 64 if TAKE_TURNS < 0 else TAKE_TURNS),
        ("MOST_SUMS", 208),
        ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
        ("CONSUMER_REGISTERS", _consumer_registers(chosen.tiles)),
        ("WHOLE_HEAD", whole_head),
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", round_up(maps * TENSOR_MAP_BYTES + BACKWARD_PARAMS_BYTES, TENSOR_MAP_ALIGNMENT)),
    )


def _consumer_registers(tiles: Tiles) -> int:
    at_start = REGISTERS_PER_SM // tiles.threads // REGISTER_STEP * REGISTER_STEP
    given = at_start * (CONSUMERS + 1) - PRODUCER_REGISTERS
    return min(MAX_CONSUMER_REGISTERS, given // CONSUMERS // REGISTER_STEP * REGISTER_STEP)


def _cost(problem: Problem, tiles: Tiles) -> Cost:
    m, n = tiles.block_m, tiles.block_n
    smem_bytes = (
        panel_tile_bytes(n, problem.head_dim)  # K
        + panel_tile_bytes(n, problem.value_dim)  # V
        + tiles.stages * (panel_tile_bytes(m, problem.head_dim) + panel_tile_bytes(m, problem.value_dim))
        + tiles.stages * panel_tile_bytes(n, m)  # dS
        + tiles.stages * 2 * m * SUM_BYTES  # LSE and D
        + BARRIER_BYTES * (4 * tiles.stages + 2)
        + BARRIER_BYTES  # whether anything was taken out
    )
    head, value = round_up(problem.head_dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and dP, dK and dV.
    registers = m + (head + value) // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
