"""Plans for the Hopper forward of float32: elements as sums of two halves, products by warpgroups (wgmma)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass

from cufa.device import WARP_SIZE, Device
from cufa.integers import round_up
from cufa.plan.hopper import (
    BARRIER_BYTES,
    LEAST_REGISTERS,
    MAX_CONSUMER_REGISTERS,
    MAX_WGMMA_N,
    MIN_PRODUCER_REGISTERS,
    PANEL_COLS,
    SWIZZLE_BYTES,
    TILE_LABEL_BYTES,
    WGMMA_K,
    WGMMA_M,
    Warpgroups,
    panel_tile_bytes,
)
from cufa.plan.macros import common_macros
from cufa.plan.pace import Pace, fastest
from cufa.plan.record import Decisions, Launch, Scratch
from cufa.plan.seen import check_masked_keys, seen_launch, seen_scratch, seen_tiles
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import Candidates, Cost, with_sizes
from cufa.plan.tile_sizes import query_tiles, row_tiles, sizes_of
from cufa.problem import Problem

# Threads of the launch that makes halves, and the most rows that they process at once.
HALVING_THREADS, ROWS_AT_ONCE = 256, 32
FLOAT_BYTES, HALF_BYTES = 4, 2
# With more dims of V, threads that compute spill registers unless those that copy have the least possible.
# With features, they still spill a few.
MOST_DIMS_BESIDE_PRODUCER = 192
# The most sums in a thread beside which it has registers for what else there may be to a score.
MOST_SUMS = 180
# On an H200: the time of two launches besides their tiles, and the bytes that an SM reads and writes in a
# nanosecond while it makes halves.
START_NS = 6000
HALVED_BYTES_PER_NS = 28


@dataclass(frozen=True)
class Tiles(Warpgroups):
    """The sizes that the kernel is compiled for.

    A block holds `stages` tiles of keys and `value_stages` of values.
    """

    block_m: int
    block_n: int
    stages: int
    value_stages: int

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread after the producer has released the ones it does not need."""
        return max(self.registers_at_start, super().consumer_registers)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_M:
            return f"block_m must be a multiple of {WGMMA_M}, the rows of a warpgroup"
        if self.block_n % ROWS_AT_ONCE or self.block_n > MAX_WGMMA_N:
            return f"block_n must be a multiple of {ROWS_AT_ONCE} up to {MAX_WGMMA_N}"
        return None

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}, stages {self.stages} of keys and {self.value_stages} of values"
        )


# By whether there are only the larger halves (tf32), and by largest head dim.
PACES: Mapping[bool, Mapping[int, Mapping[Tiles, Pace]]] = {
    False: {
        32: {Tiles(128, 128, 2, 2): Pace(0.132, 2900), Tiles(192, 96, 2, 2): Pace(0.116, 4000)},
        64: {Tiles(128, 128, 2, 2): Pace(0.17, 3200)},
        96: {Tiles(128, 64, 2, 2): Pace(0.235, 4900)},
        128: {Tiles(128, 64, 2, 2): Pace(0.287, 4500)},
        192: {Tiles(128, 32, 2, 2): Pace(0.464, 9900)},
        256: {Tiles(128, 32, 2, 1): Pace(0.787, 9700)},
    },
    True: {
        64: {Tiles(128, 128, 3, 3): Pace(0.11, 3000), Tiles(192, 96, 2, 2): Pace(0.0874, 4500)},
        128: {
            Tiles(128, 64, 3, 3): Pace(0.144, 4200),
            Tiles(128, 96, 2, 2): Pace(0.139, 4800),
            Tiles(128, 128, 2, 2): Pace(0.124, 5700),
        },
        192: {Tiles(128, 64, 2, 2): Pace(0.176, 6700), Tiles(128, 96, 2, 2): Pace(0.166, 8100)},
        256: {Tiles(128, 64, 2, 2): Pace(0.206, 7600)},
    },
}


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds."""
    tiles, least = _fastest(problem, device, frozenset())
    queries, keys = _tile_counts(problem, tiles)
    made = queries * _query_tile_bytes(problem, tiles) + keys * _key_tile_bytes(problem, tiles)
    of_element = _parts(problem) * HALF_BYTES
    moved = made * (of_element + FLOAT_BYTES) / of_element
    return (START_NS + moved / (HALVED_BYTES_PER_NS * device.sm_count) + least) / 1000


def _tile_counts(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """The number of tiles of queries, and of keys, over all heads."""
    return query_tiles(problem, tiles), problem.kv_heads * row_tiles(problem, problem.seqlen_k, tiles.block_n)


def _fastest(problem: Problem, device: Device, asked: Set[tuple[str, int]]) -> tuple[Tiles, float]:
    dim = max(problem.head_dim, problem.value_dim)
    of_dims = PACES[problem.features.tf32].items()
    paces = next(of_dim for limit, of_dim in of_dims if dim <= limit)
    if _asks_for_registers(problem):
        sparing = {tiles: pace for tiles, pace in paces.items() if _sums(problem, tiles) <= MOST_SUMS}
        paces = sparing or paces
    return fastest(problem, device, with_sizes(paces, asked))


def _asks_for_registers(problem: Problem) -> bool:
    """Whether there is more to a score than its product, and a mask hides more than keys."""
    features = problem.features
    added = features.bias is not None or features.alibi
    functions = features.score_mod is not None or problem.hides_scores
    return bool(features.softcap or added or features.dropout or functions)


def _sums(problem: Problem, tiles: Tiles) -> int:
    """A thread's registers of scores, their weights in halves, the output and a tile's last part of it."""
    dims = round_up(problem.value_dim, WGMMA_K)
    # As fwd_9_consumer.cuh's kByPanels.
    by_panels = problem.value_dim > (PANEL_COLS if problem.features.tf32 else 2 * PANEL_COLS)
    part = PANEL_COLS if by_panels else dims
    return (tiles.block_n + dims + part) // 2 + tiles.block_n * _parts(problem) // 4


def _parts(problem: Problem) -> int:
    """The number of halves per element."""
    return 1 if problem.features.tf32 else 2


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_9_float32`: a launch that makes halves, then one with a block for each tile of queries.

    If there are masks, a first launch finds out what they show of tiles of scores.
    """
    best, _ = _fastest(problem, device, frozenset(tiles.items()))
    chosen = Candidates(device, (best,), functools.partial(_cost, problem)).choose(problem, tiles)
    sizes = chosen.tiles
    check_masked_keys(problem, sizes)
    producer_registers, consumer_registers = _registers(problem, sizes)
    queries, keys = _tile_counts(problem, sizes)
    query_bytes, key_bytes = _query_tile_bytes(problem, sizes), _key_tile_bytes(problem, sizes)
    seen = seen_tiles(problem, sizes.block_m, sizes.block_n)
    launches = (
        seen_launch(problem, seen, HALVING_THREADS, HALVING_THREADS // WARP_SIZE),
        Launch("to_halves", queries + keys, HALVING_THREADS),
        Launch("fwd_9_float32", queries, sizes.threads, chosen.cost.smem_bytes, overlaps=True),
    )
    scratch = (
        Scratch("alignment", (SWIZZLE_BYTES // FLOAT_BYTES,)),
        Scratch("halves of queries", (queries, query_bytes // FLOAT_BYTES)),
        Scratch("halves of keys and values", (keys, key_bytes // FLOAT_BYTES)),
        *seen_scratch(problem, seen),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *common_macros(problem),
            *((name.upper(), size) for name, size in sizes_of(sizes).items()),
            ("THREADS", sizes.threads),
            ("HALVING_THREADS", HALVING_THREADS),
            ("PRODUCER_REGISTERS", producer_registers),
            ("CONSUMER_REGISTERS", consumer_registers),
            ("HIDES_KEYS", problem.hides_keys),
            ("QUERY_TILE_BYTES", query_bytes),
            ("KEY_TILE_BYTES", key_bytes),
            ("SMEM_BYTES", chosen.cost.smem_bytes),
            ("PARAMS_BYTES", params_bytes(problem)),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0) if queries else (),
        scratch=scratch if queries else (),
        reasons=chosen.reasons,
    )


def _registers(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """The registers of a thread that copies and of one that computes.

    Of wide heads, the latter gets as many as there are, unless the former must look at masks.
    """
    wide = problem.value_dim > MOST_DIMS_BESIDE_PRODUCER and tiles.consumers == 2
    if wide and not (problem.features.tf32 or problem.features.key_mask):
        return LEAST_REGISTERS, MAX_CONSUMER_REGISTERS
    return MIN_PRODUCER_REGISTERS, tiles.consumer_registers


def _query_tile_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of fwd_9_block.cuh's QueryHalves."""
    rows = half_tile_bytes(problem, tiles.block_m, problem.head_dim)
    return round_up(rows + tiles.block_m * FLOAT_BYTES, SWIZZLE_BYTES)


def _key_tile_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of fwd_9_block.cuh's TileHalves."""
    keys, values = (
        half_tile_bytes(problem, tiles.block_n, dim) for dim in (problem.head_dim, problem.value_dim)
    )
    return round_up(keys + values + _unit_bytes(tiles), SWIZZLE_BYTES)


def _unit_bytes(tiles: Tiles) -> int:
    """The size of fwd_9_block.cuh's KeyUnits."""
    return 3 * tiles.block_n * FLOAT_BYTES


def half_tile_bytes(problem: Problem, rows: int, dim: int) -> int:
    """Bytes of this many rows of halves, in the panel layout of halves.cuh."""
    return panel_tile_bytes(_parts(problem) * rows, round_up(dim, WGMMA_K))


def _cost(problem: Problem, tiles: Tiles) -> Cost:
    smem_bytes = (
        _query_tile_bytes(problem, tiles)
        + tiles.stages * (half_tile_bytes(problem, tiles.block_n, problem.head_dim) + _unit_bytes(tiles))
        + tiles.value_stages * half_tile_bytes(problem, tiles.block_n, problem.value_dim)
        + BARRIER_BYTES * (2 * (tiles.stages + tiles.value_stages) + 1)
        + TILE_LABEL_BYTES * tiles.stages * problem.features.key_mask
    )
    depth, dims = (round_up(dim, WGMMA_K) for dim in (problem.head_dim, problem.value_dim))
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), tiles.registers_at_start, work)
