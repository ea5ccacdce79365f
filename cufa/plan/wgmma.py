"""Plans for the Hopper kernels: products by warpgroups (wgmma), tiles by the copy engine (TMA).

A block is one warpgroup that copies (the producer) and one that computes (a consumer) for each 64 rows of its
tile. It stays for many tiles, so a grid has only as many blocks as run at once. With long sequences a block
has an SM to itself; small blocks that share an SM hide each other's work besides the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from cufa.device import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, Device
from cufa.driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cufa.plan import parting
from cufa.plan.choice import Candidates, Choice, Cost, query_tiles, sizes_of
from cufa.plan.pace import Pace, fastest, is_cut, memory_time
from cufa.plan.record import BIAS, MAX_GRID, NOT_PARTED, Launch, Macro, Part, Parting, Scratch, TensorBox
from cufa.plan.seen import seen_scratch, seen_tiles
from cufa.plan.sizes import common_macros, params_bytes
from cufa.problem import Problem
from cufa.rounding import ceil_div, round_up

WARPGROUP = 128
# Rows of one wgmma, its depth, and its most columns.
WGMMA_M, WGMMA_K, MAX_WGMMA_N = 64, 16, 256
# A tile consists of panels of 64 columns; groups of eight rows are swizzled together and aligned.
PANEL_COLS, PANEL_ROW_BYTES, SWIZZLE_BYTES = 64, 128, 1024
BARRIER_BYTES = 8
# For a tile of queries; and for the lengths that are looked up if each sequence has its own.
WORK_TILE_BYTES, LENGTHS_BYTES = 16, 16
# If keys are split, the part of a tile of queries.
PART_OF_KEYS_BYTES = 8
# The findings of four warps about a tile of V.
FINDINGS_BYTES = 16
# Scores whose visibility a word holds, and a byte.
WORD_BITS, BYTE_BITS = 32, 8
# Of each array in the workspace of the forward, in bytes.
WORKSPACE_ALIGNMENT = 16
# What the producer says about a tile of keys, and of values, if it skips some.
TILE_LABEL_BYTES = 12
# setmaxnreg counts in eights; the registers that a producer needs, and the most that a thread can have.
REGISTER_STEP = 8
MIN_PRODUCER_REGISTERS = 32
MAX_CONSUMER_REGISTERS = 240
# The most for consumers if the producer looks up more than where a tile is, and if it searches for some of
# the sequences.
BESIDE_LOOK_UPS, BESIDE_SEARCH = 224, 216
# Registers of a consumer besides accumulators and weights: addresses, descriptors, the softmax's state.
OVERHEAD_REGISTERS = 30
# With this many consumers, or blocks per SM, threads have no registers to spare.
MANY_CONSUMERS = MANY_BLOCKS = 4
# The fraction of the L2 cache that keys and values of heads in work at the same time may fill.
SECTION_OF_L2 = 3 / 4


class Warpgroups:
    """A block for `block_m` queries: one warpgroup that copies, and one that computes for each 64 rows."""

    block_m: int
    blocks_per_sm: int = 1

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
        """Registers that each thread of a block starts with."""
        of_thread = REGISTERS_PER_SM // (self.threads * self.blocks_per_sm)
        return register_steps(min(MAX_REGISTERS_PER_THREAD, of_thread))

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer's thread can have after the producer has released what it does not need."""
        given = self.registers_at_start * (self.consumers + 1) - MIN_PRODUCER_REGISTERS
        return min(MAX_CONSUMER_REGISTERS, register_steps(given // self.consumers))


@dataclass(frozen=True)
class Tiles(Warpgroups):
    """The sizes that the kernel is compiled for.

    A block holds `stages` tiles of K, and of V, and `query_stages` of Q. It writes `store_cols` columns of O
    at once. Registers are divided among `blocks_per_sm` blocks. The keys of the longest tile of queries may
    be split into `parts`.
    """

    block_m: int
    block_n: int
    stages: int
    query_stages: int
    store_cols: int
    blocks_per_sm: int = 1
    parts: int = 1

    @property
    def producer_registers(self) -> int:
        """Registers that the producer's threads keep."""
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
        if self.consumer_registers < self.registers_at_start:
            return "blocks_per_sm must be larger: threads would begin with more registers than they may have"
        if self.parts > parting.MOST_PARTS:
            return f"parts must be 1 to {parting.MOST_PARTS}"
        return None

    def __str__(self) -> str:
        blocks = f", {self.blocks_per_sm} blocks an SM" if self.blocks_per_sm > 1 else ""
        parts = f", keys in {self.parts} parts" if self.parts > 1 else ""
        return (
            f"{self.block_m}x{self.block_n}, stages {self.stages}, query stages {self.query_stages}, "
            f"{self.store_cols} columns stored at once{blocks}{parts}"
        )


# By largest head dim. The first tiles allow value dims up to MOST_VALUE_DIM.
WIDE_PACES = {
    192: {Tiles(128, 128, 2, 1, 64): Pace(0.0886, 2930), Tiles(128, 96, 2, 1, 64): Pace(0.113, 2000)},
    256: {Tiles(128, 64, 2, 1, 128): Pace(0.1415, 1790)},
}
MOST_VALUE_DIM = 128
# Candidates if all keys are seen.
PACES = {
    64: {
        Tiles(192, 128, 2, 1, 64): Pace(0.0540, 1210),
        Tiles(256, 64, 4, 2, 64): Pace(0.0564, 1120),
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
        Tiles(192, 128, 2, 1, 64): Pace(0.0575, 2100, of_other_edge=2000),
        Tiles(256, 64, 4, 1, 64): Pace(0.0545, 3100, of_other_edge=2900),
        Tiles(128, 128, 3, 2, 64): Pace(0.0600, 1000, of_other_edge=1000),
        Tiles(64, 128, 2, 1, 64, 2): Pace(0.0640, 640, 1.45, 530),
        Tiles(64, 64, 2, 1, 64, 3): Pace(0.0715, 370, 1.55, 390),
        Tiles(64, 32, 2, 1, 64, 4): Pace(0.0960, 140, 1.80, 390),
    },
    128: {
        Tiles(128, 128, 2, 2, 128): Pace(0.0850, 1570, of_other_edge=1380),
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

# A float32 bias takes a register per score, so tiles have fewer keys: up to head dim 128, and above.
BIASED_PACES = {
    False: {Tiles(128, 64, 4, 2, 128): PACES[128][Tiles(128, 64, 4, 2, 128)]},
    True: {Tiles(128, 64, 2, 1, 64): Pace(0.12, 2000)},
}
# Up to this head dim, `fwd_6_wgmma` and `bwd_4_wgmma` have room for a bias that comes in boxes; above head
# dim 64, only with these tiles in `fwd_6_wgmma`.
MOST_DIMS_OF_BIAS_BOXES = 128
BIAS_BOX_PACES = {Tiles(128, 128, 2, 1, 128): PACES[128][Tiles(128, 128, 2, 2, 128)]}
# The fraction of a table's pace that scales with the head dim, if a call has fewer dims than the table.
FASTER_WITHOUT_DIMS = 0.22
# Nanoseconds until the first tiles arrive; longer if rows do not see all keys.
START, CUT_START = 3500, 4200

T = TypeVar("T", bound=Tiles)


def register_steps(registers: int) -> int:
    """Registers, rounded down to what setmaxnreg can count."""
    return registers // REGISTER_STEP * REGISTER_STEP


def lengths_vary(problem: Problem) -> bool:
    """Whether each sequence's lengths must be looked up."""
    return problem.features.packed or problem.features.seqused_k


@functools.lru_cache
def _candidates(kind: Problem) -> Mapping[Tiles, Pace]:
    """Tiles that may be the fastest on an H200, and their paces."""
    dim = max(kind.head_dim, kind.value_dim)
    if PANEL_COLS < dim <= 192 and kind.features.bias_dtype == "float32":
        return BIASED_PACES[dim > 128]
    if dim > PANEL_COLS and has_bias_boxes(kind):
        return BIAS_BOX_PACES
    least = min(kind.head_dim, kind.value_dim)
    cut = is_cut(kind)
    most, paces = next((most, paces) for most, paces in (CUT_PACES if cut else PACES).items() if dim <= most)
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
    return {tiles: pace for tiles, pace in paces.items() if _has_registers(kind, tiles)}


def _has_odd_rows(problem: Problem) -> bool:
    return any(dim * problem.itemsize % SECTOR_BYTES for dim in (problem.head_dim, problem.value_dim))


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds."""
    _, least = _fastest(problem, device)
    start = CUT_START if is_cut(problem) else START
    return (start + max(least, memory_time(problem, device))) / 1000


@functools.lru_cache
def _fastest(problem: Problem, device: Device) -> tuple[Tiles, float]:
    """The tiles for a problem and their time; cached, since price and plan both need them."""
    candidates = _candidates(problem.kind)
    parted = {tiles: pace for tiles, pace in candidates.items() if parts_leave_registers(problem, tiles)}
    return fastest_in_parts(problem, device, candidates, parted)


def fastest_in_parts(
    problem: Problem,
    device: Device,
    paces: Mapping[T, Pace],
    parted: Mapping[T, Pace],
    worth_it: float = parting.WORTH_IT,
) -> tuple[T, float]:
    """The tiles with which all SMs finish first, and that time.

    `parted` are those that may be in parts, if the time is less than `worth_it` of that without.
    """
    best, least = fastest(problem, device, paces)
    in_parts = parting.fastest(problem, device, parted, least, worth_it)
    if in_parts is None:
        return best, least
    best, parts, least = in_parts
    return replace(best, parts=parts), least


def _has_registers(problem: Problem, tiles: Tiles) -> bool:
    """Whether threads have registers for everything that a call asks for besides its products.

    The more consumers or blocks, the fewer registers are left: for the producer, which may look up lengths,
    pages and masks; for a bias; for the caller's functions; for ALiBi with another of these.
    """
    features = problem.features
    if tiles.blocks_per_sm > 1:
        functions = features.score_mod is not None or features.key_mask or features.dropout
        alibi_and_more = features.alibi and (features.softcap or lengths_vary(problem))
        many_and_more = tiles.blocks_per_sm >= MANY_BLOCKS and (features.softcap or features.alibi)
        if functions or features.bias is not None or features.page_size:
            return False
        return not (alibi_and_more or many_and_more)
    if tiles.consumers <= 2:
        return problem.value_dim <= MOST_VALUE_DIM or tiles.block_n < 128
    if lengths_vary(problem) or features.key_mask or features.dropout:
        return False
    if features.bias is not None:
        plain = not (is_cut(problem) or features.alibi or features.softcap or features.score_mod)
        return plain and has_bias_boxes(problem) and tiles.consumers < MANY_CONSUMERS
    pages = ceil_div(tiles.block_n, features.page_size) if features.page_size else 1
    if features.alibi and (features.page_size or features.softcap):
        return False
    narrow = tiles.block_n <= PANEL_COLS
    if is_cut(problem):
        return pages == 1 and features.score_mod is None and (narrow or not features.alibi)
    if features.score_mod is not None and not narrow:
        return False
    return pages <= MOST_PAGES and not (features.alibi and tiles.consumers == MANY_CONSUMERS)


def parts_leave_registers(problem: Problem, tiles: Tiles) -> bool:
    """Whether threads that leave parts of keys have registers for what else a call asks for."""
    features = problem.features
    if features.alibi or features.bias is not None or features.score_mod is not None or features.dropout:
        return False
    most = 2 if is_cut(problem) else MANY_CONSUMERS - 1
    return tiles.blocks_per_sm == 1 and tiles.consumers <= most


def has_bias_boxes(problem: Problem) -> bool:
    """Whether the copy engine brings the bias."""
    return problem.bias_boxes and max(problem.head_dim, problem.value_dim) <= MOST_DIMS_OF_BIAS_BOXES


def bias_rows_differ(problem: Problem) -> bool:
    """Whether a bias has a row for each query, instead of one for all."""
    return problem.features.bias is not None and problem.features.bias[2] > 1


def bias_box(problem: Problem, rows: int, in_boxes: bool) -> tuple[TensorBox, ...]:
    """The box for a tile of the bias with this many rows, if it comes `in_boxes`."""
    return (TensorBox(BIAS, rows if bias_rows_differ(problem) else 1, PANEL_COLS),) * in_boxes


def beside(problem: Problem, device: Device, typical: Problem) -> Part:
    """`fwd_6_wgmma` for some of the sequences, which are like those of `typical`, beside another launch."""
    part = forward(problem, device, {}, typical)
    return replace(part, launches=tuple(replace(launch, overlaps=True) for launch in part.launches))


def forward(
    problem: Problem, device: Device, tiles: Mapping[str, int], typical: Problem | None = None
) -> Part:
    """`fwd_6_wgmma`: blocks that stay for many tiles, after a launch that looks at a mask or a mask_mod.

    The tiles are those for `typical` if it is given.
    """
    best, _ = _fastest(typical or problem, device)
    if tiles:
        best = replace(best, parts=1)  # other tiles may not allow those parts
    chosen, grid = choose_persistent(problem, device, tiles, best, _forward_cost)
    sizes = chosen.tiles
    if problem.features.mask is not None and sizes.block_n % WORD_BITS:
        raise ValueError(f"tiles {sizes}: with a mask block_n must be a multiple of {WORD_BITS}")
    main = Launch("fwd_6_wgmma", grid, sizes.threads, chosen.cost.smem_bytes)
    launches, scratch, parted = launches_of_parts(problem, device, sizes, main)
    if problem.features.key_mask:
        seen = seen_tiles(problem, sizes.block_m, sizes.block_n)
        with_bits = has_seen_bits(problem, sizes)
        threads = WARPGROUP if with_bits else sizes.threads
        blocks = max(1, ceil_div(seen, threads // device.warp_size))  # at least one: it resets the counter
        launches = (Launch("seen_tiles", blocks, threads), replace(main, overlaps=with_bits))
        taken = Scratch("tiles taken", (WORKSPACE_ALIGNMENT // problem.accumulator.itemsize,))
        scratch = (taken, *seen_scratch(problem, seen, WORKSPACE_ALIGNMENT))
        if with_bits:
            scratch += (Scratch("seen scores", (seen * sizes.block_m * sizes.block_n // WORD_BITS,)),)
    boxes = (
        *bias_box(problem, WGMMA_M, has_bias_boxes(problem)),
        TensorBox(0, WGMMA_M, PANEL_COLS),
        TensorBox(1, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(2, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(3, WGMMA_M, PANEL_COLS),
    )
    return Part(
        tiles=sizes_of(sizes),
        macros=forward_macros(problem, device, chosen, len(boxes), parted),
        launches=launches if grid else (),
        scratch=scratch,
        reasons=chosen.reasons,
        boxes=boxes,
        parting=parted,
    )


def launches_of_parts(
    problem: Problem, device: Device, tiles: Tiles, main: Launch
) -> tuple[tuple[Launch, ...], tuple[Scratch, ...], Parting]:
    """The launches if `tiles` split keys, else `main` alone; their workspace; and the parts."""
    if tiles.parts == 1 or not main.grid:
        return (main,), (), NOT_PARTED
    reason = parting.unsuited(problem, tiles, tiles.parts)
    if reason is not None:
        raise ValueError(f"tiles {tiles}: {reason}")
    blocks = device.sm_count * tiles.blocks_per_sm
    parted = parting.parting_of(problem, tiles, tiles.parts, blocks)
    main = replace(main, grid=min(parted.count, blocks), overlaps=True)
    return (Launch("clear_counts", 1, tiles.threads), main), _parts_scratch(problem, tiles, parted), parted


def parts_bytes(tiles: Tiles) -> int:
    """Shared memory for the parts that the stages of queries hold."""
    return PART_OF_KEYS_BYTES * tiles.query_stages * tiles.consumers * (tiles.parts > 1)


def _parts_scratch(problem: Problem, tiles: Tiles, parted: Parting) -> tuple[Scratch, ...]:
    """Workspace of key_parts.cuh: counts, then the result of each warpgroup for each part."""
    parts = parted.count - parted.whole
    words = WORKSPACE_ALIGNMENT // problem.accumulator.itemsize
    # A thread's sums of O, and the maximum and the sum of two rows
    of_thread = round_up(problem.value_dim, WGMMA_K) // 2 + 4
    return (
        Scratch("tiles taken", (words,)),
        Scratch("parts there", (round_up(parts * tiles.consumers, words),)),
        Scratch("parts", (parts, tiles.consumers, WARPGROUP * of_thread)),
    )


def has_seen_bits(problem: Problem, tiles: Tiles) -> bool:
    """Whether each score has a bit that says if a mask or a mask_mod shows it; for a mask, always.

    For a function, bits are faster if it reads arrays for each score, and are used if all bits take no more
    memory than the output.
    """
    if problem.features.mask is not None:
        return True
    function = problem.features.mask_mod
    if function is None or not function.looks_up or tiles.block_n % WORD_BITS:
        return False
    bits = seen_tiles(problem, tiles.block_m, tiles.block_n) * tiles.block_m * tiles.block_n
    sequences = 1 if problem.features.packed else problem.batch
    output_bytes = sequences * problem.heads * problem.seqlen_q * problem.value_dim * problem.itemsize
    return bits <= BYTE_BITS * output_bytes


def box_keys(problem: Problem, tiles: Tiles) -> int:
    """Keys that one copy brings: a tile, or as many of it as lie in one page wherever it begins."""
    return math.gcd(tiles.block_n, problem.features.page_size)


def choose_persistent(
    problem: Problem,
    device: Device,
    overrides: Mapping[str, int],
    best: T,
    cost_of: Callable[[Problem, T], Cost],
) -> tuple[Choice[T], int]:
    """The best or requested tiles, and the number of blocks that share the tiles of queries; all run at once.

    Raises ValueError if a thread would need more registers than it has, or if there are too many tiles.
    """

    def as_launched(tiles: T) -> Cost:
        return replace(cost_of(problem, tiles), registers=tiles.registers_at_start)

    chosen = Candidates(device, (best,), as_launched).choose(problem, overrides)
    sizes = chosen.tiles
    needed = cost_of(problem, sizes).registers
    if needed > sizes.consumer_registers:
        raise ValueError(
            f"tiles {sizes}: a thread needs about {needed} registers, and there are "
            f"{sizes.consumer_registers} with {sizes.consumers} warpgroups that compute"
        )
    count = query_tiles(problem, sizes)
    blocks = device.sm_count * chosen.blocks_per_sm
    if count + blocks > MAX_GRID:
        raise ValueError(f"tiles {sizes}: {count} of them are more than a launch can count, {MAX_GRID}")
    return chosen, min(count, blocks)


def forward_macros(
    problem: Problem, device: Device, chosen: Choice[T], maps: int, parted: Parting = NOT_PARTED
) -> tuple[Macro, ...]:
    """The macros of the Hopper forwards; `maps` is the number of tensor maps that they are passed.

    The number of parts that keys are split into is not compiled in.
    """
    tiles = chosen.tiles
    sizes = {name: size for name, size in sizes_of(tiles).items() if name != "parts"}
    consumer_registers = min(tiles.consumer_registers, _most_consumer_registers(problem))
    given = tiles.consumer_registers - consumer_registers
    return (
        *common_macros(problem, parted),
        *((name.upper(), size) for name, size in sizes.items()),
        ("THREADS", tiles.threads),
        ("BOX_KEYS", box_keys(problem, tiles)),
        ("PRODUCER_REGISTERS", tiles.producer_registers + given * tiles.consumers),
        ("CONSUMER_REGISTERS", consumer_registers),
        ("SEEN_BITS", has_seen_bits(problem, tiles)),
        ("BIAS_BOXES", has_bias_boxes(problem)),
        ("BIAS_ROWS_DIFFER", bias_rows_differ(problem)),
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", passed_bytes(problem, maps, parted)),
    )


def passed_bytes(problem: Problem, maps: int, parted: Parting = NOT_PARTED) -> int:
    """The size of the kernels' Params with this many tensor maps."""
    return round_up(maps * TENSOR_MAP_BYTES + params_bytes(problem, parted), TENSOR_MAP_ALIGNMENT)


def _most_consumer_registers(problem: Problem) -> int:
    """The most registers that a consumer may have while the producer has enough."""
    features = problem.features
    if features.least_queries:
        return BESIDE_SEARCH
    # With fewer value dims, the few words that are spilled for pages take no time. A bias or a score_mod
    # needs all registers that consumers can get.
    in_pages = features.page_size > 0 and problem.value_dim > MOST_VALUE_DIM
    asks = features.bias is not None or features.score_mod is not None
    looks_up = in_pages or features.key_mask
    return BESIDE_LOOK_UPS if looks_up and not asks else MAX_CONSUMER_REGISTERS


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
        + panel_tile_bytes(tiles.block_m, tiles.block_n) * has_bias_boxes(problem)
        + BARRIER_BYTES * (2 * (2 * tiles.stages + queries + tiles.consumers) + tiles.stages)
        + (WORK_TILE_BYTES + LENGTHS_BYTES * varied) * queries
        + FINDINGS_BYTES * tiles.stages
        + 2 * TILE_LABEL_BYTES * tiles.stages * (problem.features.key_mask)
        + parts_bytes(tiles)
    )
    depth, dims = round_up(problem.head_dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and O in float32, and P in pairs
    registers = (tiles.block_n + dims) // 2 + tiles.block_n // 4 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
