"""Plans for the Hopper forward of 8-bit operands: `wgmma`'s block, and a launch before that turns values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cufa.device import Device
from cufa.plan.choice import Cost
from cufa.plan.record import Launch, Part, Scratch, TensorBox
from cufa.plan.sizes import (
    ceil_div,
    round_up,
)
from cufa.plan.wgmma import (
    BARRIER_BYTES,
    LENGTHS_BYTES,
    OVERHEAD_REGISTERS,
    PANEL_ROW_BYTES,
    SWIZZLE_BYTES,
    WGMMA_M,
    WORK_TILE_BYTES,
    Tiles,
    choose_persistent,
    forward_macros,
    panel_tile_bytes,
)
from cufa.problem import Problem

# The depth of one wgmma of bytes, and the columns that its sums come in where they are stored in 16 bits.
WGMMA_DEPTH, STORED_COLS = 32, 16
# The threads of a block that turns a tile of values.
TURN_THREADS = 256
FLAG_BYTES = 4


@dataclass(frozen=True)
class Fp8Tiles(Tiles):
    """The sizes that the kernel is compiled for."""

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_n % WGMMA_DEPTH:
            return f"block_n must be a multiple of {WGMMA_DEPTH}"
        return super().misfit()


def _best_tiles(problem: Problem) -> Fp8Tiles:
    """The tiles that were fastest on an H200 at head dims 64, 128 and 256.

    Three warpgroups hide each other's softmax best; where rows are few, larger tiles than they need lie idle.
    """
    dim, rows = max(problem.head_dim, problem.value_dim), problem.seqlen_q
    if dim <= 64:
        return Fp8Tiles(192, 128, 2, 2, 64)
    if dim <= 128:
        # What features add to a thread's registers is more than three warpgroups have left.
        few_registers = bool({"window", "softcap", "seqused_k"} & set(problem.features.names))
        short = rows < 4096
        return Fp8Tiles(128, 128, 3, 2, 128) if few_registers or short else Fp8Tiles(192, 96, 3, 1, 64)
    if dim <= 192:
        return Fp8Tiles(128, 128, 2, 1, 64)
    return Fp8Tiles(128, 64, 3, 2, 128) if rows < 2048 else Fp8Tiles(128, 96, 2, 1, 128)


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_7_fp8`: a launch that turns the values, and one with a block for each SM."""
    chosen, grid = choose_persistent(problem, device, tiles, _best_tiles(problem), _cost)
    sizes = chosen.tiles
    key_tiles = ceil_div(problem.seqlen_k, sizes.block_n)
    turned = problem.batch * problem.kv_heads * key_tiles
    tile_bytes = _value_tile_bytes(problem, sizes)
    launches = (
        Launch("turn_values", max(turned, 1), TURN_THREADS, tile_bytes),
        Launch("fwd_7_fp8", grid, sizes.threads, chosen.cost.smem_bytes),
    )
    tile_sums = tile_bytes // problem.accumulator.itemsize  # what workspaces are counted in
    scratch = Scratch("values", (turned, tile_sums)), Scratch("nan", (turned,)), Scratch("counter", (1,))
    boxes = (
        TensorBox(0, WGMMA_M, PANEL_ROW_BYTES // problem.itemsize),
        TensorBox(1, sizes.block_n, PANEL_ROW_BYTES // problem.itemsize),
        TensorBox(3, WGMMA_M, PANEL_ROW_BYTES // problem.output.itemsize),
    )
    return Part(
        tiles=asdict(sizes),
        macros=(
            *forward_macros(problem, device, chosen, len(boxes)),
            ("OUT_SCALAR", problem.output.name),
            ("TURN_THREADS", TURN_THREADS),
        ),
        launches=launches if grid else (),
        scratch=scratch if grid else (),
        reasons=chosen.reasons,
        boxes=boxes,
    )


def _value_tile_bytes(problem: Problem, tiles: Fp8Tiles) -> int:
    """The size of fp8_values.cuh's ValueTile."""
    return tiles.block_n * round_up(problem.value_dim, STORED_COLS)


def _cost(problem: Problem, tiles: Fp8Tiles) -> Cost:
    queries = tiles.query_stages * tiles.consumers
    smem_bytes = (
        tiles.stages * panel_tile_bytes(tiles.block_n, problem.head_dim, problem.itemsize)  # K
        + tiles.query_stages * panel_tile_bytes(tiles.block_m, problem.head_dim, problem.itemsize)  # Q
        + panel_tile_bytes(tiles.block_m, tiles.store_cols, problem.output.itemsize)  # O
        + tiles.stages * _value_tile_bytes(problem, tiles)  # V
        + BARRIER_BYTES * 2 * (2 * tiles.stages + queries)
        + (WORK_TILE_BYTES + LENGTHS_BYTES * problem.features.seqused_k) * queries
        + FLAG_BYTES * tiles.stages
    )
    depth, dims = round_up(problem.head_dim, WGMMA_DEPTH), round_up(problem.value_dim, STORED_COLS)
    # S and O in float32, and P in fours.
    registers = (tiles.block_n + dims) // 2 + tiles.block_n // 8 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
