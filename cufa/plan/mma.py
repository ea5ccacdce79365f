"""Plans for the tensor-core kernels on mma.sync: products of 16x8x16, fed from shared memory by ldmatrix.

A warp owns some of a tile's 16-row tiles, and every fragment of K and V that it loads serves all of them:
with two, the loads take half as long for each product. What a tile costs is counted in an SM's clocks,
from how fast the arch's tensor cores are beside its shared memory, which no two generations agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cufa.device import Device
from cufa.plan.choice import Cost, choose, query_tiles
from cufa.plan.record import Launch, Part
from cufa.plan.sizes import FORWARD_PARAMS_BYTES, common_macros, round_up
from cufa.problem import Problem

# The shape of one mma.
MMA_M, MMA_N, MMA_K = 16, 8, 16
ITEM_BYTES = 2
# A row of a shared tile is padded by 16 bytes (HalfTile in mma_tiles.cuh).
ROW_PADDING = 8

# Multiply-adds of 16-bit types with float32 sums that an SM does in a clock by mma.sync: the data sheets'
# dense rates over SMs and clock. Data-centre chips have four times what the others have.
MULTIPLY_ADDS_PER_CLOCK = {(8, 0): 1024, (8, 7): 1024, (9, 0): 1024, (10, 0): 1024, (10, 3): 1024}
OTHER_MULTIPLY_ADDS_PER_CLOCK = 256
# An SM's clocks for a warp's ldmatrix of four matrices: 512 bytes at 128 a clock.
CLOCKS_PER_LOAD = 4
# Bytes that an SM gets from the L2 cache in a clock, about the same on every chip.
L2_BYTES_PER_CLOCK = 32
# An SM's clocks for a warp's share of the softmax: about 6 instructions a score, 4 issued in a clock.
CLOCKS_PER_SCORE = 1.5
# Registers beside the accumulators: operands, addresses, the softmax's state.
OVERHEAD_REGISTERS = 62


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for."""

    block_m: int
    block_n: int
    threads: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rows(self) -> int:
        """Rows of a tile that a warp owns."""
        return self.block_m // self.warps

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.block_m % (self.warps * MMA_M):
            return f"block_m must be a multiple of {self.warps * MMA_M}, {MMA_M} rows for each warp"
        if self.block_n % MMA_K:
            return f"block_n must be a multiple of {MMA_K}"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} with {self.threads} threads"


# block_m, block_n, threads
FORWARD_TILES = (
    Tiles(128, 128, 128),
    Tiles(128, 96, 128),
    Tiles(128, 64, 128),
    Tiles(128, 32, 128),
    Tiles(64, 64, 128),
    Tiles(64, 48, 128),
    Tiles(64, 32, 128),
    Tiles(32, 64, 64),
    Tiles(16, 64, 32),
    Tiles(16, 32, 32),
    Tiles(16, 16, 32),
)


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_5_mma`: one launch, a block for each tile of queries."""
    chosen = choose(
        problem, device, tiles, FORWARD_TILES, lambda tiles: _forward_cost(problem, device, tiles)
    )
    grid = query_tiles(problem, chosen.tiles)
    launch = Launch("fwd_5_mma", grid, chosen.tiles.threads, chosen.cost.smem_bytes)
    return Part(
        tiles=asdict(chosen.tiles),
        macros=(
            *common_macros(problem),
            *((name.upper(), size) for name, size in asdict(chosen.tiles).items()),
            ("BLOCKS_PER_SM", chosen.blocks_per_sm),
            ("SMEM_BYTES", chosen.cost.smem_bytes),
            ("PARAMS_BYTES", FORWARD_PARAMS_BYTES),
        ),
        launches=(launch,) if grid else (),
        reasons=chosen.reasons,
    )


def half_tile_bytes(rows: int, cols: int) -> int:
    """The size of mma_tiles.cuh's HalfTile."""
    return rows * (round_up(cols, MMA_K) + ROW_PADDING) * ITEM_BYTES


def _forward_cost(problem: Problem, device: Device, tiles: Tiles) -> Cost:
    depth, dims = round_up(problem.head_dim, MMA_K), round_up(problem.value_dim, MMA_K)
    smem_bytes = (
        half_tile_bytes(tiles.block_m, problem.head_dim)  # Q
        + half_tile_bytes(tiles.block_n, problem.head_dim)  # K
        + half_tile_bytes(tiles.block_n, problem.value_dim)  # V
    )
    multiply_adds = tiles.rows * tiles.block_n * (depth + dims)
    # Each ldmatrix brings 16 x 16 elements; those of Q are read anew for every tile of keys.
    loads = (tiles.rows * depth + tiles.block_n * (depth + dims)) / (16 * 16)
    scores = tiles.rows * tiles.block_n / device.warp_size
    per_clock = MULTIPLY_ADDS_PER_CLOCK.get(device.arch.capability, OTHER_MULTIPLY_ADDS_PER_CLOCK)
    copied = tiles.block_n * (problem.head_dim + problem.value_dim) * ITEM_BYTES / tiles.warps
    clocks = (
        multiply_adds / per_clock
        + CLOCKS_PER_LOAD * loads
        + CLOCKS_PER_SCORE * scores
        + copied / L2_BYTES_PER_CLOCK
    )
    accumulators = tiles.rows * (tiles.block_n + dims) // device.warp_size
    return Cost(smem_bytes, accumulators + OVERHEAD_REGISTERS, clocks * per_clock / device.warp_size)
