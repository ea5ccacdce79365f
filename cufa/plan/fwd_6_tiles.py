"""The tiles of `fwd_6_wgmma`: which there are, and which are the fastest.

A block is a warpgroup that copies, and one that computes for each 64 rows of its tile. It stays for many
tiles of queries. With long sequences a block has an SM to itself; small blocks that share an SM hide each
other's work besides the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.plan import parting
from cufa.plan.hopper import (
    MAX_WGMMA_N,
    PANEL_COLS,
    WGMMA_K,
    WGMMA_M,
    Warpgroups,
    has_bias_boxes,
    lengths_vary,
    register_steps,
)
from cufa.plan.pace import Pace, fastest, is_cut, time
from cufa.plan.seen import fills_words
from cufa.plan.tile_choice import with_sizes
from cufa.problem import Problem

# For a tile of queries, if keys are split: which part of them a block has.
PART_OF_KEYS_BYTES = 8
# With this many consumers, or blocks per SM, threads have no registers to spare.
MANY_CONSUMERS = MANY_BLOCKS = 4


@dataclass(frozen=True)
class Tiles(Warpgroups):
    """The sizes that the kernel is compiled for.

    A block holds `stages` tiles of K, and of V, and `query_stages` of Q. It writes `store_cols` columns of O
    at once. Registers are divided among `blocks_per_sm` blocks. The keys of the longest tile of queries may
    be split into `key_parts`.
    """

    block_m: int
    block_n: int
    stages: int
    query_stages: int
    store_cols: int
    blocks_per_sm: int = 1
    key_parts: int = 1
    most_key_parts: ClassVar[int] = parting.MOST_PARTS

    @property
    def keys_bytes(self) -> int:
        """Bytes that say which of a tile's keys a block has."""
        return PART_OF_KEYS_BYTES if self.key_parts > 1 else 0

    def merges_later(self, problem: Problem, parts: int) -> bool:
        """As for `PartedTiles`."""
        return False

    def own_cols(self, value_dim: int) -> int:
        """Columns of the output that a warpgroup has the sums of."""
        return round_up(value_dim, WGMMA_K)

    def producer_registers(self, consumer_registers: int) -> int:
        """Registers that each thread keeps that does not compute, if one that computes has so many."""
        left = self.registers_at_start * self.warpgroups - consumer_registers * self.consumers
        of_each = register_steps(left // (self.warpgroups - self.consumers))
        return min(of_each, self.registers_at_start)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_M:
            return f"block_m must be a multiple of {WGMMA_M}, the rows of a warpgroup"
        if self.block_n % WGMMA_K or self.block_n > MAX_WGMMA_N:
            return f"block_n must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        if self.store_cols % PANEL_COLS:
            return f"store_cols must be a multiple of {PANEL_COLS}"
        if self.consumer_registers < self.registers_at_start:
            return "blocks_per_sm must be larger: threads would begin with more registers than they may have"
        if self.key_parts > self.most_key_parts:
            return f"key_parts must be 1 to {self.most_key_parts}"
        return None

    def __str__(self) -> str:
        blocks = f", {self.blocks_per_sm} blocks per SM" if self.blocks_per_sm > 1 else ""
        parts = f", keys in {self.key_parts} parts" if self.key_parts > 1 else ""
        return (
            f"{self.block_m}x{self.block_n}, stages {self.stages}, query stages {self.query_stages}, "
            f"{self.store_cols} columns stored at once{blocks}{parts}"
        )


# By largest head dim. Tiles of MANY_KEYS allow value dims up to MOST_VALUE_DIM.
WIDE_PACES = {
    192: {Tiles(128, 128, 2, 1, 64): Pace(0.0886, 2930), Tiles(128, 96, 2, 1, 64): Pace(0.113, 2000)},
    256: {Tiles(128, 64, 2, 1, 128): Pace(0.1415, 1790)},
}
MOST_VALUE_DIM = MANY_KEYS = 128
# Candidates if all keys are seen.
PACES = {
    64: {
        Tiles(192, 128, 2, 1, 64): Pace(0.0540, 1210),
        Tiles(256, 64, 4, 2, 64): Pace(0.0564, 1120),
        Tiles(256, 64, 4, 1, 64): Pace(0.0564, 1120),  # packed
        Tiles(128, 128, 3, 2, 64): Pace(0.0631, 1170),
        Tiles(128, 64, 4, 2, 64): Pace(0.0650, 910),
        Tiles(128, 48, 2, 1, 64, 2): Pace(0.0662, 580, 1.10),
        Tiles(128, 32, 4, 1, 64, 2): Pace(0.0657, 530, 1.05),
        Tiles(64, 80, 2, 1, 64, 3): Pace(0.0648, 390, 1.62),
        Tiles(64, 64, 2, 1, 64, 3): Pace(0.0664, 410, 1.67),
        Tiles(64, 32, 2, 1, 64, 4): Pace(0.1120, 260, 2.20),
    },
    128: {
        Tiles(192, 64, 4, 1, 128): Pace(0.0780, 1710),
        Tiles(128, 128, 2, 2, 128): Pace(0.0851, 1650),
        Tiles(128, 64, 4, 2, 128): Pace(0.0880, 1260),
        Tiles(64, 80, 2, 1, 64, 2): Pace(0.0914, 590, 1.55),
        Tiles(64, 64, 2, 1, 64, 2): Pace(0.0917, 640, 1.60),
    },
    192: WIDE_PACES[192],
    256: WIDE_PACES[256],
}
# Candidates if a mask cuts through tiles.
CUT_PACES = {
    64: {
        Tiles(192, 128, 2, 1, 64): Pace(0.0575, 2100, ns_of_other_edge=2000),
        Tiles(256, 64, 4, 1, 64): Pace(0.0545, 3100, ns_of_other_edge=2900),
        Tiles(128, 128, 3, 2, 64): Pace(0.0600, 1000, ns_of_other_edge=1000),
        Tiles(64, 128, 2, 1, 64, 2): Pace(0.0640, 640, 1.45, 530),
        Tiles(64, 64, 2, 1, 64, 3): Pace(0.0715, 370, 1.55, 390),
        Tiles(64, 32, 2, 1, 64, 4): Pace(0.0960, 300, 1.80, 390),
    },
    128: {
        Tiles(128, 128, 2, 2, 128): Pace(0.0850, 1570, ns_of_other_edge=1380),
        Tiles(64, 64, 2, 1, 64, 2): Pace(0.1151, 760, 1.15, 450),
    },
    192: WIDE_PACES[192],
    256: WIDE_PACES[256],
}
# Above head dim 64, rows of keys and values that do not fill whole sectors of the L2 cache take half as many
# requests again. If a mask cuts through tiles, tiles of 128 queries then wait for the cache, by this factor.
# Tiles of 192 queries, which read less, become candidates.
SECTOR_BYTES = 32
ODD_ROWS = 1.35
ODD_ROW_PACES = {128: {Tiles(192, 64, 4, 1, 128): Pace(0.0880, 2270)}}
# Above PANEL_COLS, the small blocks of those tables are for at least this head dim, since they take as long
# for fewer dims. For fewer, there are these, without and with a mask that cuts. With such a mask they have 80
# keys, since ptxas would make products of 64 keys wait.
LEAST_WIDE_DIM = 120
FEW_DIMS_PACES: Mapping[bool, Mapping[Tiles, Pace]] = {
    False: {Tiles(64, 64, 2, 1, 64, 2): Pace(0.116, 570, 2)},
    True: {Tiles(64, 80, 2, 1, 64, 2): Pace(0.118, 890, 1.15, 800)},
}
# The most pages of a tile of keys for which three or more consumers leave the producer the registers to look
# them up, if all keys are seen.
MOST_PAGES = 8

# Where a mask is alike for all rows, and nothing else cuts through tiles, more consumers have registers for
# it, and tiles take other times.
ALIKE_PACES = {
    64: {
        Tiles(256, 64, 4, 2, 64): Pace(0.0571, 1800),
        Tiles(128, 128, 3, 2, 64): Pace(0.0640, 1200),
        Tiles(64, 128, 2, 1, 64, 2): Pace(0.0683, 800, 1.45),
        Tiles(64, 64, 2, 1, 64, 3): Pace(0.0724, 670, 1.55),
    },
    128: {
        Tiles(192, 64, 4, 1, 128): Pace(0.0827, 2000),
        Tiles(128, 128, 2, 2, 128): Pace(0.0847, 2700),
        Tiles(64, 64, 2, 1, 64, 2): Pace(0.1125, 1150, 1.15),
    },
}

# A float32 bias takes a register per score, so above PANEL_COLS tiles have fewer keys.
BIASED_PACES = {
    128: {Tiles(128, 64, 4, 2, 128): PACES[128][Tiles(128, 64, 4, 2, 128)]},
    192: {Tiles(128, 64, 2, 1, 64): Pace(0.12, 2000)},
}
# Above head dim 64, the tiles that have room for a bias that comes in boxes.
BIAS_BOX_PACES = {Tiles(128, 128, 2, 1, 128): PACES[128][Tiles(128, 128, 2, 2, 128)]}
# The part of the keys that tiles under a mask_mod are chosen for: windows and documents are often shorter.
MASK_MOD_STRETCH = 1 / 5
# The fraction of a table's pace that scales with the head dim, if a call has fewer dims than the table.
FASTER_WITHOUT_DIMS = 0.22

T = TypeVar("T", bound=Tiles)


@functools.lru_cache
def candidates(kind: Problem) -> Mapping[Tiles, Pace]:
    """Tiles that may be the fastest on an H200, and their paces."""
    dim = max(kind.head_dim, kind.value_dim)
    if PANEL_COLS < dim <= max(BIASED_PACES) and kind.features.bias_dtype == "float32":
        return _for_dim(BIASED_PACES, dim)[1]
    if dim > PANEL_COLS and has_bias_boxes(kind):
        return BIAS_BOX_PACES
    least = min(kind.head_dim, kind.value_dim)
    cut = is_cut(kind)
    most, paces = _for_dim(CUT_PACES if cut else PACES, dim)
    if dim > PANEL_COLS and least < LEAST_WIDE_DIM:
        paces = {tiles: pace for tiles, pace in paces.items() if tiles.blocks_per_sm == 1}
    odd = 1.0
    if cut and most in ODD_ROW_PACES and _has_odd_rows(kind):
        odd = ODD_ROWS
        paces = {tiles: pace.times(odd) for tiles, pace in paces.items()} | ODD_ROW_PACES[most]
    faster = 1 - FASTER_WITHOUT_DIMS * (1 - dim / most)
    paces = {tiles: pace.times(faster) for tiles, pace in paces.items()}
    if least > PANEL_COLS and dim < LEAST_WIDE_DIM:
        # With half as many queries, keys are read twice as often.
        paces |= {tiles: pace.times(odd**2) for tiles, pace in FEW_DIMS_PACES[cut].items()}
    paces = {
        tiles: pace
        for tiles, pace in paces.items()
        if fills_words(kind, tiles) and _has_registers(kind, tiles)
    }
    if dim <= max(ALIKE_PACES) and _only_rows_alike(kind):
        paces |= {
            tiles: pace.times(faster)
            for tiles, pace in _for_dim(ALIKE_PACES, dim)[1].items()
            if tiles.blocks_per_sm == 1 or tiles in paces
        }
    return paces


def _for_dim(table: Mapping[int, Mapping[Tiles, Pace]], dim: int) -> tuple[int, Mapping[Tiles, Pace]]:
    """The candidates for a head dim, and the largest head dim that they are for."""
    return next((most, paces) for most, paces in table.items() if dim <= most)


def _has_odd_rows(problem: Problem) -> bool:
    return any(dim * problem.itemsize % SECTOR_BYTES for dim in (problem.head_dim, problem.value_dim))


@functools.lru_cache
def fastest_tiles(problem: Problem, device: Device, asked: Set[tuple[str, int]]) -> tuple[Tiles, float]:
    """The tiles for a problem and their time; cached, since price and plan both need them.

    They have the sizes that a caller asks for, if any candidate has. Under a mask_mod, they are the fastest
    if rows see few keys.
    """
    paces = with_sizes(candidates(problem.kind), asked)
    if problem.features.mask_mod is None:
        return fastest_in_parts(problem, device, paces, parts_leave_registers)
    of_few_keys = {tiles: _pace_of_few_keys(tiles, pace) for tiles, pace in paces.items()}
    best, _ = fastest(problem.typical, device, of_few_keys)
    return best, time(problem.typical, device, best, paces[best])


def _pace_of_few_keys(tiles: Tiles, pace: Pace) -> Pace:
    """The pace, in time as if rows saw all keys, if they see a stretch of MASK_MOD_STRETCH of them.

    Where the two edges of such a stretch cut through tiles, scores are computed in vain.
    """
    in_vain = tiles.block_m * (tiles.block_m + tiles.block_n)
    of_edges = pace.ns_of_other_edge + pace.ns_per_score * in_vain
    return replace(pace, ns_per_tile=(pace.ns_per_tile + of_edges) / MASK_MOD_STRETCH)


def fastest_in_parts(
    problem: Problem,
    device: Device,
    paces: Mapping[T, Pace],
    may_part: Callable[[Problem, T], bool],
    worth_it: float = parting.WORTH_IT,
) -> tuple[T, float]:
    """The tiles with which all SMs finish first, and that time.

    Keys are split with tiles that `may_part`, if the time is less than `worth_it` of that without.
    """
    best, least = fastest(problem.typical, device, paces)
    parted = {tiles: pace for tiles, pace in paces.items() if may_part(problem, tiles)}
    in_parts = parting.fastest(problem, device, parted, least, worth_it)
    if in_parts is None:
        return best, least
    best, parts, least = in_parts
    return replace(best, key_parts=parts), least


def _has_registers(problem: Problem, tiles: Tiles) -> bool:
    """Whether threads have registers for everything that a call asks for besides its products.

    The more consumers or blocks, the fewer registers are left: for the producer, which may look up lengths,
    pages and masks; for a bias; for the caller's functions; for ALiBi with another of these.
    """
    if tiles.blocks_per_sm > 1:
        return _has_registers_for_blocks(problem, tiles)
    if tiles.consumers <= 2:
        return problem.value_dim <= MOST_VALUE_DIM or tiles.block_n < MANY_KEYS
    return _has_registers_for_consumers(problem, tiles)


def _has_registers_for_blocks(problem: Problem, tiles: Tiles) -> bool:
    """The same if an SM has several blocks."""
    features = problem.features
    if features.score_mod is not None or features.dropout or features.bias is not None or features.page_size:
        return False
    masks = features.key_mask and not _only_rows_alike(problem)
    alibi_and_more = features.alibi and (features.softcap or masks or lengths_vary(problem))
    more = features.softcap or features.alibi or features.key_mask
    many_and_more = tiles.blocks_per_sm >= MANY_BLOCKS and more
    return not (alibi_and_more or many_and_more)


def _has_registers_for_consumers(problem: Problem, tiles: Tiles) -> bool:
    """The same if a block has three or more consumers."""
    features = problem.features
    if features.key_mask or features.dropout:
        return False
    if lengths_vary(problem):
        # Causal ones spill some words, which costs less than smaller tiles.
        whole_tiles = not features.page_size or tiles.block_n <= features.page_size
        plain = features.bias is None and features.score_mod is None
        return plain and whole_tiles and tiles.query_stages == 1
    if features.bias is not None:
        plain = not (is_cut(problem) or features.alibi or features.softcap or features.score_mod)
        return plain and has_bias_boxes(problem) and tiles.consumers < MANY_CONSUMERS
    # From here on, all sequences have the same length.
    pages = ceil_div(tiles.block_n, features.page_size) if features.page_size else 1
    if features.alibi and (features.page_size or features.softcap):
        return False
    narrow = tiles.block_n <= PANEL_COLS
    if is_cut(problem):
        return pages == 1 and features.score_mod is None and (narrow or not features.alibi)
    if features.score_mod is not None and not narrow:
        return False
    return pages <= MOST_PAGES and not (features.alibi and tiles.consumers == MANY_CONSUMERS)


def _only_rows_alike(problem: Problem) -> bool:
    """Whether all rows see the keys that a mask shows, and nothing else asks for registers."""
    features = problem.features
    adds = features.bias is not None or features.alibi or features.score_mod is not None
    plain = not (adds or features.softcap or features.dropout or features.page_size)
    return problem.rows_alike and plain and not lengths_vary(problem)


def parts_leave_registers(problem: Problem, tiles: Tiles) -> bool:
    """Whether threads that leave parts of keys have registers for what else a call asks for."""
    features = problem.features
    if features.alibi or features.bias is not None or features.score_mod is not None or features.dropout:
        return False
    most = 2 if is_cut(problem) or lengths_vary(problem) else MANY_CONSUMERS - 1
    return tiles.blocks_per_sm == 1 and tiles.consumers <= most
