"""Plans for the Hopper forward with 8-bit operands: `wgmma`'s block, in which some warps transpose V."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.plan import parting
from cufa.plan.fwd_6_tiles import Tiles, fastest_in_parts
from cufa.plan.hopper import (
    BARRIER_BYTES,
    MAX_CONSUMER_REGISTERS,
    PANEL_ROW_BYTES,
    SWIZZLE_BYTES,
    WGMMA_M,
    lengths_vary,
    panel_tile_bytes,
)
from cufa.plan.pace import Pace, is_cut, memory_time
from cufa.plan.persistent import (
    FINDINGS_BYTES,
    OVERHEAD_REGISTERS,
    START_NS,
    box_keys,
    choose_persistent,
    forward_macros,
    launches_of_parts,
    work_bytes,
)
from cufa.plan.record import Decisions, Launch, TensorBox
from cufa.plan.tile_choice import Cost, with_sizes
from cufa.plan.tile_sizes import sizes_of
from cufa.problem import Problem

# The depth of one 8-bit wgmma, and the columns in which its sums are grouped when stored in 16 bits.
WGMMA_DEPTH, STORED_COLS = 32, 16
# A warp transposes 32 columns of V at once, and reports its findings for every tile.
TURNED_COLS = 32
FLAG_BYTES = 4
# The helpers: the three warps beside the producer, or a warpgroup of their own.
BESIDE_PRODUCER, OWN_WARPGROUP = 3, 4
# With more dims of V, a block with two warpgroups that do not compute spills registers or, beyond 192, cannot
# be compiled.
MOST_VALUE_DIM_APART = 128
# Up to this head dim, tiles have many queries.
NARROW_DIM = 64
# The registers that a thread needs to leave a part of keys.
PART_REGISTERS = 16
# The gain that parts must have: for a last round of many, they gained less than expected.
PARTS_WORTH_IT = 0.97
# The most keys, in tiles, for which warpgroups process the first tile in halves.
FEW_TILES = 4


@dataclass(frozen=True)
class Fp8Tiles(Tiles):
    """The sizes that the kernel is compiled for. So many warps, `helpers`, process V before the product."""

    helpers: int = BESIDE_PRODUCER
    # The most registers of a consumer's thread, by helpers.
    most_registers: ClassVar[Mapping[int, int]]

    @property
    def warpgroups(self) -> int:
        """All of a block's warpgroups."""
        return super().warpgroups + (self.helpers == OWN_WARPGROUP)

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer's thread can have after the others have released what they do not need."""
        return min(super().consumer_registers, self.most_registers[self.helpers])

    @property
    def value_panels(self) -> int:
        """Panels of a tile of values as the product reads it, with a key per column."""
        return ceil_div(self.block_n, PANEL_ROW_BYTES)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.helpers not in self.most_registers:
            apart = f"or {OWN_WARPGROUP} for a warpgroup of their own"
            return f"helpers is {self.helpers}; it must be {BESIDE_PRODUCER}, {apart}"
        if self.helpers == OWN_WARPGROUP and self.consumers > 2:
            return f"helpers must be {BESIDE_PRODUCER} if block_m is more than {2 * WGMMA_M}"
        if self.block_n % (self.value_panels * WGMMA_DEPTH):
            return f"block_n must be a multiple of {WGMMA_DEPTH}, over {PANEL_ROW_BYTES} of {2 * WGMMA_DEPTH}"
        return super().misfit()

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.helpers} helpers"


@dataclass(frozen=True)
class TurnedTiles(Fp8Tiles):
    """The same if helpers transpose V."""

    # With two consumers, these leave helpers the registers to transpose four times as many columns at once.
    most_registers: ClassVar = {BESIDE_PRODUCER: 224, OWN_WARPGROUP: 208}


@dataclass(frozen=True)
class TransposedTiles(Fp8Tiles):
    """The same if V is stored transposed, so that helpers only search it for NaN."""

    # Helpers with fewer than 40 registers would spill.
    most_registers: ClassVar = {BESIDE_PRODUCER: MAX_CONSUMER_REGISTERS, OWN_WARPGROUP: 216}


# Candidates if all keys are seen, by largest head dim.
PACES = {
    64: {
        TurnedTiles(192, 128, 2, 2, 64): Pace(0.0471, 1100),
        TurnedTiles(256, 64, 3, 2, 64): Pace(0.0464, 1640),
        TurnedTiles(128, 128, 3, 2, 64, helpers=OWN_WARPGROUP): Pace(0.0551, 1250),
    },
    128: {TurnedTiles(128, 128, 3, 2, 128, helpers=OWN_WARPGROUP): Pace(0.0579, 1850)},
    192: {TurnedTiles(128, 128, 2, 1, 64): Pace(0.08, 2000)},  # the only candidate; its pace is a guess
    256: {
        TurnedTiles(128, 64, 3, 1, 128): Pace(0.1063, 2500),
        TurnedTiles(128, 96, 2, 1, 128): Pace(0.0968, 2800),
    },
}
# Candidates if a mask cuts through tiles.
CUT_PACES = {
    64: {
        TurnedTiles(192, 128, 2, 2, 64): Pace(0.0492, 1760),
        TurnedTiles(256, 64, 3, 2, 64): Pace(0.049, 3150),
        TurnedTiles(128, 128, 3, 2, 64, helpers=OWN_WARPGROUP): Pace(0.0537, 1170),
    },
    128: {TurnedTiles(128, 128, 3, 2, 128, helpers=OWN_WARPGROUP): Pace(0.0629, 1100)},
    192: PACES[192],
    256: {
        TurnedTiles(128, 64, 3, 1, 128): Pace(0.1119, 3000),
        TurnedTiles(128, 96, 2, 1, 128): Pace(0.1012, 3800),
    },
}


# The same for V stored transposed.
TRANSPOSED_PACES = {
    64: {
        TransposedTiles(256, 64, 4, 2, 64): Pace(0.0436, 1890),
        TransposedTiles(192, 128, 3, 2, 64): Pace(0.0452, 1250),
        TransposedTiles(128, 128, 4, 2, 64): Pace(0.0497, 1060),
    },
    128: {
        TransposedTiles(128, 128, 3, 2, 128): Pace(0.0552, 1870),
        TransposedTiles(128, 192, 2, 2, 128): Pace(0.0534, 2620),
    },
    192: {TransposedTiles(128, 128, 2, 1, 64): Pace(0.08, 2000)},  # also a guess
    256: {
        TransposedTiles(128, 64, 3, 1, 128): Pace(0.0851, 3280),
        TransposedTiles(128, 96, 3, 1, 64): Pace(0.0793, 4260),
    },
}
CUT_TRANSPOSED_PACES = {
    64: {
        TransposedTiles(256, 64, 4, 2, 64): Pace(0.0461, 3810),
        TransposedTiles(192, 128, 3, 2, 64): Pace(0.0472, 1990),
        TransposedTiles(128, 128, 4, 2, 64): Pace(0.0484, 1200),
    },
    128: {
        TransposedTiles(128, 128, 3, 2, 128, helpers=OWN_WARPGROUP): Pace(0.0571, 1900),
    },
    192: TRANSPOSED_PACES[192],
    256: {
        TransposedTiles(128, 64, 3, 1, 128): Pace(0.0938, 5670),
        TransposedTiles(128, 96, 2, 1, 128): Pace(0.0823, 6560),
    },
}


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds."""
    _, least = _fastest(problem, device, frozenset())
    return (START_NS + max(least, memory_time(problem, device))) / 1000


@functools.lru_cache
def _fastest(problem: Problem, device: Device, asked: Set[tuple[str, int]]) -> tuple[Fp8Tiles, float]:
    """The tiles for a problem and their time; cached, since price and plan both need them.

    They have the sizes that a caller asks for, if any candidate has. Those of head dims 64, 128 and 256 were
    the fastest on an H200.
    """
    paces = with_sizes(_candidates(problem), asked)
    return fastest_in_parts(problem, device, paces, parts_leave_registers, PARTS_WORTH_IT)


def _candidates(problem: Problem) -> dict[Fp8Tiles, Pace]:
    """Tiles for the problem's head dims that leave registers for its features."""
    dim = max(problem.head_dim, problem.value_dim)
    most = _most_consumers(problem)
    paces: Mapping[Fp8Tiles, Pace] = next(of_dim for limit, of_dim in _paces(problem).items() if dim <= limit)
    return {tiles: pace for tiles, pace in paces.items() if tiles.consumers <= most}


def parts_leave_registers(problem: Problem, tiles: Fp8Tiles) -> bool:
    """Whether threads have registers to leave parts of keys."""
    enough = _cost(problem, tiles).registers + PART_REGISTERS <= tiles.consumer_registers
    return enough and not parting.varies(problem)


def _paces(problem: Problem) -> Mapping[int, Mapping[Any, Pace]]:
    """The table for a problem, by largest head dim."""
    if problem.transposed_values:
        return CUT_TRANSPOSED_PACES if is_cut(problem) else TRANSPOSED_PACES
    return CUT_PACES if is_cut(problem) else PACES


def _most_consumers(problem: Problem) -> int:
    """The most consumers that leave registers for what a call asks for besides its products."""
    features = problem.features
    asks = features.softcap or features.windowed or lengths_vary(problem)
    return 3 if asks else 4


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_7_fp8`: blocks that stay for many tiles."""
    best, _ = _fastest(problem, device, frozenset(tiles.items()))
    block = best.block_m, best.block_n
    if (tiles.get("block_m", best.block_m), tiles.get("block_n", best.block_n)) != block:
        best = replace(best, helpers=BESIDE_PRODUCER)  # other blocks may have no registers for more
    chosen, grid = choose_persistent(problem, device, tiles, best, _cost)
    sizes = chosen.tiles
    if sizes.helpers == OWN_WARPGROUP and problem.value_dim > MOST_VALUE_DIM_APART:
        raise ValueError(
            f"tiles {sizes}: helpers must be {BESIDE_PRODUCER} with a value_dim of more than "
            f"{MOST_VALUE_DIM_APART}; it is {problem.value_dim}"
        )
    main = Launch("fwd_7_fp8", grid, sizes.threads, chosen.cost.smem_bytes)
    launches, scratch, parted = launches_of_parts(problem, device, sizes, main)
    boxes = (
        TensorBox(0, WGMMA_M, PANEL_ROW_BYTES // problem.itemsize),
        *_key_boxes(problem, sizes),
        TensorBox(3, WGMMA_M, PANEL_ROW_BYTES // problem.output.itemsize),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=(
            *forward_macros(problem, device, chosen, len(boxes), parted),
            ("OUT_SCALAR", problem.output.name),
            ("TRANSPOSED_VALUES", problem.transposed_values),
            ("HALVES_FIRST", _halves_first(problem, sizes)),
        ),
        launches=launches if grid else (),
        scratch=scratch,
        reasons=chosen.reasons,
        boxes=boxes,
        parting=parted,
    )


def _halves_first(problem: Problem, tiles: Fp8Tiles) -> bool:
    """Whether warpgroups skip the half of a causal mask's first tile that they do not see.

    That saves 2 to 4 % if queries see few tiles, of which the first takes the longest; longer calls may lose
    as much.
    """
    few = problem.mean_keys <= FEW_TILES * tiles.block_n
    of_dims = NARROW_DIM < max(problem.head_dim, problem.value_dim) <= 2 * NARROW_DIM
    plain = problem.causal and not problem.features.windowed
    return plain and few and of_dims


def _key_boxes(problem: Problem, tiles: Fp8Tiles) -> tuple[TensorBox, TensorBox]:
    """The boxes that a copy of keys and a copy of values bring."""
    cols = PANEL_ROW_BYTES // problem.itemsize
    if isinstance(tiles, TransposedTiles):
        keys = TensorBox(1, tiles.block_n // 2, cols, paired_rows=True)
        return keys, TensorBox(2, _dims(problem), tiles.block_n // tiles.value_panels)
    return TensorBox(1, box_keys(problem, tiles), cols), TensorBox(2, box_keys(problem, tiles), cols)


def _dims(problem: Problem) -> int:
    """The columns of the output that are computed."""
    return round_up(problem.value_dim, STORED_COLS)


def _value_bytes(problem: Problem, tiles: Fp8Tiles) -> int:
    """Bytes of a stage of values, with everything that belongs to it."""
    if isinstance(tiles, TurnedTiles):
        turned = tiles.block_n * round_up(problem.value_dim, TURNED_COLS)
        tile = panel_tile_bytes(tiles.block_n, problem.value_dim, problem.itemsize)
        return tile + turned + BARRIER_BYTES * 2 * 2 + FLAG_BYTES * tiles.helpers
    tile = panel_tile_bytes(_dims(problem), tiles.block_n, problem.itemsize)
    return tile + BARRIER_BYTES * 3 + FINDINGS_BYTES


def _cost(problem: Problem, tiles: Fp8Tiles) -> Cost:
    queries = tiles.query_stages * tiles.consumers
    smem_bytes = (
        tiles.stages * panel_tile_bytes(tiles.block_n, problem.head_dim, problem.itemsize)  # K
        + tiles.query_stages * panel_tile_bytes(tiles.block_m, problem.head_dim, problem.itemsize)  # Q
        + panel_tile_bytes(tiles.block_m, tiles.store_cols, problem.output.itemsize)  # O
        + tiles.stages * _value_bytes(problem, tiles)
        + BARRIER_BYTES * 2 * (tiles.stages + queries)
        + work_bytes(problem, tiles)
    )
    depth, dims = round_up(problem.head_dim, WGMMA_DEPTH), _dims(problem)
    # S and O in float32, and P in fours
    registers = (tiles.block_n + dims) // 2 + tiles.block_n // 8 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
