"""Plans for the tiled kernels on CUDA cores: the largest tiles that an SM holds well.

The kernels' threads stand in a grid of `threads / lanes` rows by `lanes` (products.cuh). A thread owns
block_m / rows queries by block_n / lanes keys of a score tile: the more of both, the more multiply-adds
each read of shared memory feeds, but the more registers it takes, the fewer warps an SM holds to hide
the latency of those reads, and the more of a tile may lie outside of a short problem. A small model of
these counts what a useful multiply-add costs with each of the candidates, and the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from cufa.device import MAX_THREADS_PER_BLOCK, Device
from cufa.plan.record import Launch, Macro, Part, Scratch
from cufa.plan.sizes import (
    BACKWARD_PARAMS_BYTES,
    FORWARD_PARAMS_BYTES,
    VECTOR_BYTES,
    ceil_div,
    common_macros,
    round_up,
    shared_matrix_bytes,
)
from cufa.problem import Problem

# With fewer warps than this on an SM, two for each of its schedulers, nobody works while one waits.
ENOUGH_WARPS = 8
# Part of the throughput that is left when an SM has next to no warps. Measured on an H200: 4 warps reach
# two thirds of what 8 do.
THROUGHPUT_WITHOUT_WARPS = 1 / 3
# What a thread's 16-byte read of shared memory costs, in multiply-adds of float32. With it the model
# predicts the times of 140 combinations of tiles, head dims and dtypes on an H200 within 15 % in four
# cases of five, and its choice is the fastest candidate or within 10 % of it.
VECTOR_READ_COST = 4
# Registers for addresses, loop counters and loads in flight, beside the tiles: above what ptxas was seen
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
    def grid_rows(self) -> int:
        """Rows of the grid of threads."""
        return self.threads // self.lanes

    @property
    def rows(self) -> int:
        """Queries of a score tile that a thread owns."""
        return self.block_m // self.grid_rows

    @property
    def keys(self) -> int:
        """Keys of a score tile that a thread owns."""
        return self.block_n // self.lanes

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if min(asdict(self).values()) < 1:
            return "sizes must be positive"
        if self.lanes > 32 or self.lanes & (self.lanes - 1):
            return "lanes must be a power of two up to 32"
        if self.threads % 32 or self.threads > MAX_THREADS_PER_BLOCK:
            return f"threads must be a multiple of 32 up to {MAX_THREADS_PER_BLOCK}"
        if self.block_m % self.grid_rows:
            return f"block_m must be a multiple of threads / lanes = {self.grid_rows}"
        if self.block_n % max(self.lanes, 4):
            return f"block_n must be a multiple of {max(self.lanes, 4)} (lanes, and a vector of weights)"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} with {self.threads} threads in {self.lanes} lanes"


@dataclass(frozen=True)
class Cost:
    """What a block of some tiles takes and does.

    Bytes of shared memory; registers a thread, by estimate; and, for each tile of scores, the 16-byte
    reads of shared memory and the multiply-adds of a thread, padding included.
    """

    smem_bytes: int
    registers: int
    vector_reads: float
    multiply_adds: int


CostOf = Callable[[Problem, Tiles], Cost]

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
BACKWARD_TILES = (
    Tiles(64, 128, 256, 16),
    Tiles(64, 64, 256, 16),
    Tiles(64, 64, 128, 8),
    Tiles(32, 64, 256, 16),
    Tiles(32, 64, 128, 8),
    Tiles(32, 32, 128, 8),
    Tiles(32, 32, 128, 16),
    Tiles(16, 64, 128, 16),
    Tiles(16, 32, 128, 16),
    Tiles(16, 16, 64, 8),
    Tiles(4, 8, 32, 8),
)


def flash_v1(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_3_flash_v1`: one step for each block of keys, and one if there are none."""
    chosen = _choose(problem, device, tiles, FLASH_V1_TILES, _forward_cost)
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    steps = max(1, ceil_div(problem.seqlen_k, chosen.tiles.block_n))
    grid = _query_tiles(problem, chosen.tiles)
    launch = Launch("fwd_3_flash_v1", grid, chosen.tiles.threads, chosen.cost.smem_bytes, steps)
    return Part(
        tiles=asdict(chosen.tiles),
        macros=_macros(problem, chosen, FORWARD_PARAMS_BYTES),
        launches=(launch,) if grid else (),
        scratch=(Scratch("O", (*rows, problem.value_dim)), Scratch("l", rows), Scratch("m", rows)),
        reasons=(*chosen.reasons, f"one launch for each of {steps} blocks of keys"),
    )


def flash_v2(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_4_flash_v2`: one launch, a block for each tile of queries."""
    chosen = _choose(problem, device, tiles, FLASH_V2_TILES, _forward_cost)
    grid = _query_tiles(problem, chosen.tiles)
    launch = Launch("fwd_4_flash_v2", grid, chosen.tiles.threads, chosen.cost.smem_bytes)
    return Part(
        tiles=asdict(chosen.tiles),
        macros=(
            *_macros(problem, chosen, FORWARD_PARAMS_BYTES),
            ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ),
        launches=(launch,) if grid else (),
        reasons=chosen.reasons,
    )


def flash_v2_backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_2_flash_v2`: a warp for each row, a block for each tile of keys, a warp for each row."""
    chosen = _choose(problem, device, tiles, BACKWARD_TILES, _backward_cost)
    threads = chosen.tiles.threads
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    row_blocks = ceil_div(rows[0] * rows[1] * rows[2], threads // device.warp_size)
    key_blocks = problem.batch * problem.kv_heads * ceil_div(problem.seqlen_k, chosen.tiles.block_n)
    launches = (
        Launch("row_sums", row_blocks, threads),
        Launch("key_tiles", key_blocks, threads, chosen.cost.smem_bytes),
        Launch("round_queries", row_blocks, threads),
    )
    return Part(
        tiles=asdict(chosen.tiles),
        macros=(
            *_macros(problem, chosen, BACKWARD_PARAMS_BYTES),
            ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(Scratch("dQ sums", (*rows, problem.head_dim)), Scratch("D", rows)),
        reasons=chosen.reasons,
    )


def _query_tiles(problem: Problem, tiles: Tiles) -> int:
    return problem.batch * problem.heads * ceil_div(problem.seqlen_q, tiles.block_m)


@dataclass(frozen=True)
class _Choice:
    tiles: Tiles
    cost: Cost
    blocks_per_sm: int
    reasons: tuple[str, ...]


def _choose(
    problem: Problem,
    device: Device,
    overrides: Mapping[str, int],
    candidates: tuple[Tiles, ...],
    cost_of: CostOf,
) -> _Choice:
    """The best of the candidates that fit; overrides are applied to it and must fit too."""
    fitting = [
        tiles
        for tiles in candidates
        if device.blocks_resident(tiles.threads, 0, cost_of(problem, tiles).smem_bytes)
    ]
    if not fitting:
        smallest = candidates[-1]
        raise ValueError(_does_not_fit(smallest, cost_of(problem, smallest), device))
    # Spilled registers cost more than any tile gains.
    no_spills = [
        tiles for tiles in fitting if cost_of(problem, tiles).registers <= device.registers_per_thread
    ]
    prices = {
        tiles: _price(problem, tiles, cost_of(problem, tiles), device) for tiles in no_spills or fitting
    }
    tiles = min(prices, key=lambda tiles: prices[tiles])
    how = f"the cheapest of {len(prices)} that fit, a multiply-add at {prices[tiles]:.2f} times its bare cost"
    if overrides:
        tiles = _override(tiles, overrides)
        how = f"{', '.join(overrides)} asked for"
    cost = cost_of(problem, tiles)
    if not device.blocks_resident(tiles.threads, 0, cost.smem_bytes):
        raise ValueError(_does_not_fit(tiles, cost, device))
    blocks = _blocks_per_sm(tiles, cost, device)
    fit = (
        f"{blocks} blocks an SM: {cost.smem_bytes:,} bytes of shared memory of {device.smem_per_sm:,}, "
        f"about {cost.registers} registers a thread of {device.registers_per_thread}"
    )
    return _Choice(tiles, cost, blocks, (f"tiles {tiles}: {how}", fit))


def _price(problem: Problem, tiles: Tiles, cost: Cost, device: Device) -> float:
    """What a useful multiply-add costs with these tiles: 1 if nothing but it took time."""
    rows = min(tiles.block_m, max(1, problem.seqlen_q))
    keys = min(tiles.block_n, max(1, problem.seqlen_k))
    useful = rows * keys * problem.product_dims / tiles.threads
    read_cost = VECTOR_READ_COST * 4 / problem.accumulator.itemsize
    warps = _blocks_per_sm(tiles, cost, device) * tiles.threads / device.warp_size
    hidden = THROUGHPUT_WITHOUT_WARPS + (1 - THROUGHPUT_WITHOUT_WARPS) * min(1, warps / ENOUGH_WARPS)
    return (cost.multiply_adds + read_cost * cost.vector_reads) / (useful * hidden)


def _blocks_per_sm(tiles: Tiles, cost: Cost, device: Device) -> int:
    # The compiler spills what is over the limit, so that one block always runs.
    registers = min(cost.registers, device.registers_per_thread)
    return max(1, device.blocks_resident(tiles.threads, registers, cost.smem_bytes))


def _override(tiles: Tiles, overrides: Mapping[str, int]) -> Tiles:
    names = [field.name for field in fields(Tiles)]
    unknown = overrides.keys() - set(names)
    if unknown:
        raise ValueError(f"tiles has {', '.join(sorted(unknown))}; it may have {', '.join(names)}")
    changed = replace(tiles, **overrides)
    misfit = changed.misfit()
    if misfit is not None:
        raise ValueError(f"tiles {changed}: {misfit}")
    return changed


def _does_not_fit(tiles: Tiles, cost: Cost, device: Device) -> str:
    return (
        f"tiles {tiles}: they need {cost.smem_bytes:,} bytes of shared memory and {tiles.threads} "
        f"threads a block; {device.arch} offers {device.smem_per_block:,} bytes and "
        f"{min(MAX_THREADS_PER_BLOCK, device.threads_per_sm)} threads"
    )


def _macros(problem: Problem, chosen: _Choice, params_bytes: int) -> tuple[Macro, ...]:
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in asdict(chosen.tiles).items()),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", params_bytes),
    )


def _output_columns(dims: int, tiles: Tiles, itemsize: int) -> int:
    """Columns of an output tile: whole vectors for each of the lanes (ThreadGrid::padded)."""
    return round_up(dims, tiles.lanes * (VECTOR_BYTES // itemsize))


@dataclass(frozen=True)
class _Work:
    """What a thread does for one tile of scores: 16-byte reads of shared memory, and multiply-adds."""

    reads: float = 0
    multiply_adds: int = 0

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.reads + other.reads, self.multiply_adds + other.multiply_adds)


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
    return Cost(smem_bytes, registers, work.reads, work.multiply_adds)


def _backward_cost(problem: Problem, tiles: Tiles) -> Cost:
    itemsize = problem.accumulator.itemsize
    vector = VECTOR_BYTES // itemsize
    head_columns = _output_columns(problem.head_dim, tiles, itemsize)
    value_columns = _output_columns(problem.value_dim, tiles, itemsize)
    smem_bytes = (
        shared_matrix_bytes(tiles.block_n, head_columns, itemsize)  # K
        + shared_matrix_bytes(tiles.block_n, problem.value_dim, itemsize)  # V
        + shared_matrix_bytes(tiles.block_m, head_columns, itemsize)  # Q
        + shared_matrix_bytes(tiles.block_m, value_columns, itemsize)  # dO
        + 2 * shared_matrix_bytes(tiles.block_m, tiles.block_n, itemsize)  # P, dS
        + 2 * tiles.block_m * itemsize  # LSE, D
    )
    rows, keys, tile_keys = tiles.rows, tiles.keys, tiles.block_n // tiles.grid_rows
    head, value = head_columns // tiles.lanes, value_columns // tiles.lanes
    work = (
        _product_nt(rows, keys, round_up(problem.head_dim, vector), vector)  # S
        + _product_nt(rows, keys, round_up(problem.value_dim, vector), vector)  # dP
        + _product_tn(tile_keys, value, tiles.block_m, vector)  # dV
        + _product_tn(tile_keys, head, tiles.block_m, vector)  # dK
        + _product_nn(rows, head, tiles.block_n, vector)  # dQ
    )
    # dK and dV are held all the time; S and dP, or a part of dQ, never at once.
    held = tile_keys * (head + value) + max(2 * rows * keys, rows * head)
    return Cost(smem_bytes, _registers(held, rows + keys, itemsize), work.reads, work.multiply_adds)


def _registers(accumulators: int, operand_vectors: int, itemsize: int) -> int:
    words = (accumulators * itemsize + operand_vectors * VECTOR_BYTES) // 4
    return words + OVERHEAD_REGISTERS
