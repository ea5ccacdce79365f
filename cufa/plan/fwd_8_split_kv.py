"""Plans for `fwd_8_split_kv`: the number of parts that the keys are split into.

Reading K and V takes most of the time. Few blocks cannot use the GPU's full bandwidth. Each wave of blocks
adds the time until its first tiles arrive, and parts must be merged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from cufa.device import MAX_REGISTERS_PER_THREAD, WARP_SIZE, Device
from cufa.integers import ceil_div, round_up
from cufa.messages import counted
from cufa.plan.fwd_5_mma import BYTE, HALF, LINE_BYTES, MMA_M, MMA_N, arithmetic_of
from cufa.plan.macros import common_macros
from cufa.plan.record import FIRST_OVERLAPPING, Decisions, Launch, Macro, Scratch
from cufa.plan.seen import check_masked_keys
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import Candidates, Choice, Cost
from cufa.plan.tile_sizes import row_tiles, sizes_of
from cufa.problem import FLOAT8, MAX_AXIS, MAX_EXTENT, Problem, lse_shape, one_of

# Rows of a block; with more rows, K and V are read again. Above the first number, each warp has twice as many
# rows, so that each load of K and V serves both its 16-row tiles.
BLOCK_M, MAX_BLOCK_M = 64, 128
FEW_ROWS = 16, 32
# The most columns of the output for which a warp has registers, and how many warps may divide the columns.
MAX_COLUMNS_OF_WARP = 256
COLUMN_WARPS = 1, 2, 4
MIN_STAGES, MAX_STAGES = 2, 4
# Each team has one of the 16 barriers.
MAX_TEAMS = 8
# Keys of this many bytes or more come in smaller tiles.
WIDE_KEY_BYTES = 512
# The fastest on an H200.
THREADS, BLOCKS_PER_SM = 128, 2
# Of the second launch, which merges: threads of a block, and blocks per tile whose keys were shared out.
MERGE_THREADS, MERGE_BLOCKS = 256, 4
# A block leaves a part of a row: its sums in float32, and two more, padded to one vector access.
PART_ALIGNMENT = 16
# Other costs, measured on an H200. Times of reading are counted in bytes: those that an SM's share of the
# bandwidth brings in that time.
# The time until a block's first tiles arrive, by the rows of a warp.
START_BYTES = {MMA_M: 72 * 1024, 2 * MMA_M: 320 * 1024}
# The time of the second launch, and for each part: this or, if it is more, PASSES_OVER_PARTS times the part's
# bytes per SM.
MERGE_BYTES = 80 * 1024
MERGED_PART_BYTES = 1024
PASSES_OVER_PARTS = 4
# So many blocks per SM use the full bandwidth.
BLOCKS_FOR_BANDWIDTH = 0.56
# How much it counts that some SMs have more blocks than others.
UNEVENNESS = 0.15
# With so many rows, by the element size and the rows of a warp, an SM's products take as long as reading its
# keys.
ROWS_FOR_BANDWIDTH = {2: {MMA_M: 64, 2 * MMA_M: 85}, 1: {MMA_M: 43, 2 * MMA_M: 41}}
# The softmax takes as long as the products of so many bytes of a key.
SCORE_BYTES = 96
# A block that has an SM to itself takes so many times as long for products and softmax as half of two blocks.
LONE_BLOCK_FACTOR = 1.5
# The factor on reading keys of few bytes if a tile's keys are in several pages. Twice as many warps hide
# that, but then the first tiles of a block take twice as long to arrive.
SEVERAL_PAGES = 1.06
# The time of any call.
START_NS = 1500
# The bytes that an SM's share of the bandwidth brings in a nanosecond.
BYTES_PER_NS = 36
# The time of a row of a block besides its keys, however many parts these are split into.
ROW_NS = 60
# Operations per nanosecond of an SM of an H200 if several warps divide the columns of the output.
WIDE_FLOPS_PER_NS = 1400
MAX_PARTS = 128
# Sharing the keys out evenly saves this fraction of a block's time for the tile with the most keys. It costs
# so much time per block, and per tile that a block has keys of.
SAVED_OF_LONGEST = 0.4
SHARE_NS, TILE_OF_SHARE_NS = 5000, 2500
# Instead, few tiles have at least this many parts, those of BLOCK_M rows or more the second number, if all
# parts run at once: the more blocks share a tile and the more rows it has, the longer merging takes.
PARTS_OF_FEW_TILES, PARTS_OF_FEW_LARGE_TILES = 16, 8
# The time that a bias takes an SM for each score of a tile, with those of rows that do not exist.
BIAS_NS = 0.3
# The time that a window costs if it ends at other keys for each of many queries.
WINDOW_NS = 3000
# With half of the SMs, a lone block of twice as many warps on an SM reads this many bytes in a nanosecond.
# Each tile takes it this further time.
LONE_BLOCK_BYTES_PER_NS, LONE_TILE_NS = 65, 5000
# Registers of a thread besides sums and scores: operands (more of them for 8 bits), addresses, the softmax's
# state.
OVERHEAD_REGISTERS, BYTE_OVERHEAD_REGISTERS = 70, 100


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernel is compiled for, and how blocks divide the keys.

    Each tile's keys are split into `key_parts` parts. If `shares` is more than one, the keys of all tiles are
    instead shared out evenly among that many blocks. A team has `column_warps` warps, which divide the
    columns of the output and the head dims of the scores, for every 16 rows of `block_m`, or for every 32 if
    there are many, and `stages` tiles of `block_n` keys.
    """

    block_m: int
    block_n: int
    threads: int
    stages: int
    key_parts: int = 1
    shares: int = 1
    column_warps: int = 1
    depth: ClassVar[int] = HALF.depth

    @property
    def warp_rows(self) -> int:
        """Rows that a warp owns."""
        return MMA_M if self.block_m <= BLOCK_M else 2 * MMA_M

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // WARP_SIZE * self.warp_rows // (self.block_m * self.column_warps)

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        rows = self.warp_rows
        if self.column_warps not in COLUMN_WARPS:
            return f"column_warps may be {one_of(map(str, COLUMN_WARPS))}"
        if self.block_m % rows or self.threads // WARP_SIZE % (self.block_m // rows * self.column_warps):
            team = f"a team has {counted(self.column_warps, 'warp')} for every {rows} rows"
            return f"{team}: block_m must be a multiple of {rows}, and threads must be whole teams"
        if self.teams > MAX_TEAMS:
            return f"a block may have up to {MAX_TEAMS} teams, not {self.teams}"
        if self.block_n % self.depth:
            return f"block_n must be a multiple of {self.depth}"
        if not MIN_STAGES <= self.stages <= MAX_STAGES:
            return f"stages may be {MIN_STAGES} to {MAX_STAGES}"
        if min(self.key_parts, self.shares) > 1:
            return "key_parts and shares cannot both be over 1"
        return None

    def __str__(self) -> str:
        columns = f", column_warps {self.column_warps}" if self.column_warps > 1 else ""
        return f"{self.block_m}x{self.block_n} with {self.threads} threads, stages {self.stages}{columns}"


@dataclass(frozen=True)
class ByteTiles(Tiles):
    """The same for 8 bits, with deeper steps of a product."""

    depth: ClassVar[int] = BYTE.depth


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`fwd_8_split_kv`: a block for each part of the keys of a tile of rows, then a launch that merges parts.

    Raises ValueError if there are more rows than can be counted.
    """
    chosen = _chosen(problem, device, _fastest(problem, device), tiles)
    check_masked_keys(problem, chosen.tiles)
    if not {"key_parts", "shares"} & tiles.keys():
        chosen = replace(chosen, tiles=_parted(problem, chosen, device))
    return _planned(problem, device, chosen)


def beside(problem: Problem, device: Device, typical: Problem, on_half: bool) -> Decisions:
    """The same for some of the sequences, which are like those of `typical`, beside another launch.

    With `on_half`, the other launch has half of the SMs from the beginning. This one then has a block, with
    twice as many warps, on each of the others.
    """
    best = _fastest(typical, device)
    if on_half:
        best = _best_tiles(typical.kind, device, best.block_m, 2)
    chosen = _chosen(problem, device, best)
    # Keys are not split: merging would read parts of all rows, but rows that are left out have none.
    shares = _half(device) if on_half else _shares(typical, chosen, device)
    parted = replace(chosen.tiles, shares=shares if _may_share(problem, chosen.tiles) else 1)
    return _planned(problem, device, replace(chosen, tiles=parted))


def _half(device: Device) -> int:
    return max(2, device.sm_count // 2)  # a single share means no sharing


def _fastest(problem: Problem, device: Device) -> Tiles:
    return min(
        _candidates(problem, device), key=lambda tiles: _least_time_in_bytes(problem, tiles, device)[0]
    )


def _chosen(
    problem: Problem, device: Device, tiles: Tiles, overrides: Mapping[str, int] | None = None
) -> Choice[Tiles]:
    return _candidate(problem.kind, device, tiles).choose(problem, overrides or {})


@functools.lru_cache
def _candidate(kind: Problem, device: Device, tiles: Tiles) -> Candidates[Tiles]:
    """The only one; cached, since a new length needs a plan, and in decoding each step has one."""
    return Candidates(device, (tiles,), functools.partial(_cost, kind))


def _planned(problem: Problem, device: Device, chosen: Choice[Tiles]) -> Decisions:
    """The launches with these tiles."""
    rows = _rows_of_kv_head(problem)
    if rows > MAX_AXIS:
        raise ValueError(f"a KV head has {rows:,} rows of queries, more than {MAX_AXIS:,}")
    sizes = chosen.tiles
    if sizes.shares > 1 and not _may_share(problem, sizes):
        raise ValueError(f"tiles {sizes}: no shares of more than {MAX_EXTENT:,} rounds of keys")
    row_blocks = _row_blocks(problem, sizes.block_m)
    shared, split = sizes.shares > 1, sizes.key_parts > 1
    part_bytes = _part_bytes(problem, sizes)
    merge_bytes = MERGE_THREADS // WARP_SIZE * part_bytes
    grid = sizes.shares if shared else row_blocks * sizes.key_parts
    launches = [Launch("fwd_8_split_kv", grid, sizes.threads, chosen.cost.smem_bytes)]
    scratch: tuple[Scratch, ...] = ()
    if shared or split:
        merge_grid = grid * MERGE_BLOCKS if shared else grid
        overlaps = _may_overlap(device)
        launches.append(Launch("merge_parts", merge_grid, MERGE_THREADS, merge_bytes, overlaps=overlaps))
        of_blocks = (sizes.shares, 2, sizes.block_m)
        parts = of_blocks if shared else (*lse_shape(problem), sizes.key_parts)
        scratch = (Scratch("partial rows", (*parts, part_bytes // problem.accumulator.itemsize)),)
    of_rows = f"{counted(row_blocks, 'tile')} of rows"
    if shared:
        how = f"the keys of {of_rows} divided evenly among {grid} blocks"
    elif split:
        how = f"the keys of {of_rows} split into {sizes.key_parts} parts each: {grid} blocks"
    else:
        how = f"keys not split: {of_rows}"
    alone = _reads_keys_alone(problem, sizes)
    read_once = ("values are the beginnings of keys, which alone are read",) * alone
    any_rows = row_blocks > 0
    return Decisions(
        tiles=sizes_of(sizes),
        macros=_macros(problem, chosen, merge_bytes, device),
        launches=tuple(launches) if any_rows else (),
        scratch=scratch if any_rows else (),
        reasons=(*chosen.reasons, f"{how}, for {device.sm_count} SMs", *read_once),
    )


def _parted(problem: Problem, chosen: Choice[Tiles], device: Device) -> Tiles:
    """The tiles with their keys split into as many parts as take the least time, or shared out evenly."""
    tiles, shares = chosen.tiles, _shares(problem, chosen, device)
    row_blocks, at_once = _row_blocks(problem, tiles.block_m), device.sm_count * chosen.blocks_per_sm
    least = PARTS_OF_FEW_TILES if tiles.block_m < BLOCK_M else PARTS_OF_FEW_LARGE_TILES
    if shares > 1 and row_blocks * least > at_once:
        return replace(tiles, shares=shares)
    _, parts = _least_time_in_bytes(problem, tiles, device)
    return replace(tiles, key_parts=parts if shares == 1 else max(parts, least))


def _shares(problem: Problem, chosen: Choice[Tiles], device: Device) -> int:
    """How many blocks should share out the keys of all tiles, if there are many tiles; 1 for none."""
    tiles, at_once = chosen.tiles, device.sm_count * chosen.blocks_per_sm
    if not (_uneven(problem) and _may_share(problem, tiles)):
        return 1
    longest = problem.visible_keys * problem.key_bytes * BLOCKS_FOR_BANDWIDTH / BYTES_PER_NS
    tiles_of_block = _row_blocks(problem, tiles.block_m) / at_once
    if SAVED_OF_LONGEST * longest <= SHARE_NS + TILE_OF_SHARE_NS * tiles_of_block:
        return 1
    return max(1, min(at_once, _rounds(problem, tiles, problem.mean_keys)))


def _uneven(problem: Problem) -> bool:
    """Whether there are several sequences and only the GPU knows how many keys each has."""
    return (problem.features.packed or problem.features.seqused_k) and problem.batch > 1


def _rounds(problem: Problem, tiles: Tiles, keys: int) -> int:
    """The most rounds in which blocks read so many keys of all tiles of rows."""
    return _row_blocks(problem, tiles.block_m) * max(1, ceil_div(keys, tiles.block_n * tiles.teams))


def _may_share(problem: Problem, tiles: Tiles) -> bool:
    """Whether kernels can count the rounds (key_shares.cuh), even if all rows see as many keys as any may."""
    return _rounds(problem, tiles, problem.most_keys) <= MAX_EXTENT


def price(problem: Problem, device: Device, like: Problem | None = None) -> float:
    """The estimated time of the forward in microseconds, with the tiles for `like` if given."""

    def time(tiles: Tiles) -> float:
        least, _ = _least_time_in_bytes(problem, tiles, device)
        row_blocks = _row_blocks(problem, tiles.block_m)
        rounds = ceil_div(row_blocks, device.sm_count)
        biased = problem.features.bias is not None
        scores = row_blocks * tiles.block_m * problem.visible_keys if biased else 0
        shaping = scores / device.sm_count * BIAS_NS
        many_windows = problem.features.windowed and problem.seqlen_q >= FEW_ROWS[0]
        start = START_NS + WINDOW_NS * many_windows
        return start + least / BYTES_PER_NS + rounds * tiles.block_m * ROW_NS + shaping

    tiles = _candidates(problem, device) if like is None else [_fastest(like, device)]
    least = min(map(time, tiles))
    if tiles[0].column_warps > 1:
        least = max(least, problem.flops / (WIDE_FLOPS_PER_NS * device.sm_count))
    return least / 1000


def price_on_half(problem: Problem, device: Device) -> float:
    """The same if half of the SMs, with one block each, share out the keys."""
    blocks = _half(device)
    tiles_of_block = _row_blocks(problem, _fastest(problem, device).block_m) / blocks
    read = problem.visible_keys * problem.key_bytes / LONE_BLOCK_BYTES_PER_NS
    return (SHARE_NS + tiles_of_block * (LONE_TILE_NS + read)) / 1000


def _rows_of_kv_head(problem: Problem) -> int:
    """The queries of all heads that share a KV head; if packed, of all sequences together."""
    return problem.seqlen_q * problem.group


def _rows_of_sequence(problem: Problem) -> int:
    """The same for one sequence; packed sequences count as if all were equally long."""
    return ceil_div(_rows_of_kv_head(problem), problem.packed_sequences)


def _row_blocks(problem: Problem, block_m: int) -> int:
    return problem.kv_heads * row_tiles(problem, _rows_of_kv_head(problem), block_m)


def _candidates(problem: Problem, device: Device) -> list[Tiles]:
    """Tiles for all rows; if there are many, for the most rows that warps of either kind may have."""
    rows, kind = _rows_of_sequence(problem), problem.kind
    best = _most_rows(kind, device, next((m for m in FEW_ROWS if m >= rows), BLOCK_M))
    wide = _best_tiles(kind, device, MAX_BLOCK_M) if rows > BLOCK_M else None
    more_warps = _in_several_pages(problem, best)
    return [
        best,
        *((_best_tiles(kind, device, best.block_m, 2),) if more_warps else ()),
        *((wide,) if wide and _fits(kind, device, wide) else ()),
    ]


def _in_several_pages(problem: Problem, tiles: Tiles) -> bool:
    """Whether a tile's keys are in several pages, and have so few bytes that this takes time."""
    page_size = problem.features.page_size
    return page_size > 0 and page_size % tiles.block_n > 0 and problem.key_bytes < WIDE_KEY_BYTES


@functools.lru_cache
def _most_rows(kind: Problem, device: Device, most: int) -> Tiles:
    """The tiles of so many rows, or of as many as shared memory has room for."""
    sizes = [rows for rows in (BLOCK_M, *reversed(FEW_ROWS)) if rows <= most]
    found = (_best_tiles(kind, device, rows) for rows in sizes)
    with_room = (tiles for tiles in found if _blocks_with_room(kind, device, tiles))
    return next(with_room, _best_tiles(kind, device, sizes[-1]))


def _blocks_with_room(kind: Problem, device: Device, tiles: Tiles) -> int:
    """How many blocks the shared memory of an SM has room for."""
    return device.blocks_resident(tiles.threads, 0, _cost(kind, tiles).smem_bytes)


def _fits(kind: Problem, device: Device, tiles: Tiles) -> bool:
    enough_registers = _cost(kind, tiles).registers <= MAX_REGISTERS_PER_THREAD
    return enough_registers and _blocks_with_room(kind, device, tiles) > 0


@functools.lru_cache
def _best_tiles(kind: Problem, device: Device, block_m: int, times_threads: int = 1) -> Tiles:
    """The largest tiles that fit, with as many stages as leave room for the blocks that an SM should have."""
    # A warp starts the copies of the same number of bytes for every team size.
    form = ByteTiles if kind.key_dtype == FLOAT8 else Tiles
    column_warps = ceil_div(kind.value_dim, MAX_COLUMNS_OF_WARP)
    most_threads = THREADS * column_warps * times_threads
    keys = min(block_m, BLOCK_M) * (1 if kind.key_bytes >= WIDE_KEY_BYTES else 2)
    most_keys = max(keys, form.depth)
    # Warps that add up scores meet once more for each tile, so that larger ones are worth more.
    quarters = (4, 3, 2, 1) if column_warps > 1 else (4, 2, 1)
    smallest = [
        tiles
        for threads in (most_threads, most_threads // 2, most_threads // 4)
        for block_n in (most_keys * count // 4 for count in quarters)
        if (tiles := form(block_m, block_n, threads, MIN_STAGES, column_warps=column_warps)).misfit() is None
        and tiles.teams
    ]

    blocks = functools.partial(_blocks_with_room, kind, device)
    fits = functools.partial(_fits, kind, device)
    tiles = next(filter(fits, smallest), next(filter(blocks, smallest), smallest[-1]))
    enough = min(BLOCKS_PER_SM, blocks(tiles))
    stages = range(MIN_STAGES + 1, MAX_STAGES + 1)
    return max(
        (more for more in (replace(tiles, stages=count) for count in stages) if blocks(more) >= enough > 0),
        key=lambda more: more.stages,
        default=tiles,
    )


@functools.lru_cache
def _least_time_in_bytes(problem: Problem, tiles: Tiles, device: Device) -> tuple[float, int]:
    """The least time, in bytes of an SM's share of the bandwidth, and the number of parts that takes it."""
    row_blocks = _row_blocks(problem, tiles.block_m)
    blocks_per_sm = _blocks_per_sm(problem.kind, tiles, device)
    bytes_of_row_block = problem.visible_keys * problem.key_bytes
    more_warps = tiles.threads > THREADS * tiles.column_warps
    if not more_warps and _in_several_pages(problem, tiles):
        bytes_of_row_block = round(SEVERAL_PAGES * bytes_of_row_block)
    start = START_BYTES[tiles.warp_rows] * (2 if more_warps else 1)
    parts_of_sm = prod(lse_shape(problem)) * _part_bytes(problem, tiles) / device.sm_count
    part_bytes = max(MERGED_PART_BYTES, PASSES_OVER_PARTS * parts_of_sm)
    of_sm = row_blocks * bytes_of_row_block / device.sm_count
    rows = ROWS_FOR_BANDWIDTH[problem.key_itemsize][tiles.warp_rows]
    products = (problem.head_dim + problem.value_dim) * problem.key_itemsize + SCORE_BYTES
    of_products = products / problem.key_bytes
    rounds = max(1, ceil_div(problem.visible_keys, tiles.block_n * tiles.teams))

    def waves_of(parts: int) -> int:
        return ceil_div(row_blocks * parts, device.sm_count * blocks_per_sm)

    def merge_of(parts: int) -> float:
        return MERGE_BYTES + parts * part_bytes if parts > 1 else 0

    def time(parts: int) -> float:
        blocks, waves = row_blocks * parts, waves_of(parts)
        # The largest part has whole rounds.
        of_block = bytes_of_row_block * ceil_div(rounds, parts) / rounds
        on_busiest = ceil_div(blocks, device.sm_count)
        uneven = on_busiest * device.sm_count / max(1, blocks) - 1
        read = max(of_sm * (1 + UNEVENNESS * uneven), waves * of_block * BLOCKS_FOR_BANDWIDTH)
        lone = on_busiest % 2 if blocks_per_sm > 1 else 0
        block_times = on_busiest + (LONE_BLOCK_FACTOR - 1) * lone
        multiply = block_times * of_block * of_products * tiles.block_m / rows
        return waves * start + max(read, multiply) + merge_of(parts)

    best = time(1), 1
    for parts in range(2, min(rounds, MAX_PARTS) + 1):
        # More parts take at least this, which assumes perfectly even reads.
        if waves_of(parts) * start + of_sm + merge_of(parts) > best[0]:
            break
        best = min(best, (time(parts), parts))
    return best


@functools.lru_cache
def _blocks_per_sm(kind: Problem, tiles: Tiles, device: Device) -> int:
    cost = _cost(kind, tiles)
    return max(1, device.blocks_resident(tiles.threads, cost.registers, cost.smem_bytes))


def _may_overlap(device: Device) -> bool:
    """Whether a launch may begin before the previous one ends."""
    return device.arch.capability >= FIRST_OVERLAPPING


def _columns(problem: Problem, tiles: Tiles) -> int:
    """The columns of the output, padded so that warps can divide them."""
    return round_up(problem.value_dim, 2 * MMA_N * tiles.column_warps)


def _depth(problem: Problem, tiles: Tiles) -> int:
    """The head dims of Q and K, padded so that warps can divide them."""
    return round_up(problem.head_dim, arithmetic_of(problem).depth * tiles.column_warps)


def _reads_keys_alone(problem: Problem, tiles: Tiles) -> bool:
    """Whether V is not copied besides K, in whose tile each warp must find its columns (fwd_8_block.cuh)."""
    own = _columns(problem, tiles) // tiles.column_warps
    swizzled = arithmetic_of(problem).swizzles(_depth(problem, tiles))
    apart = own * problem.key_itemsize % LINE_BYTES == 0 or own & (own - 1) == 0
    return problem.values_in_keys and (tiles.column_warps == 1 or not swizzled or apart)


def _part_bytes(problem: Problem, tiles: Tiles) -> int:
    """The size of partial_rows.cuh's PartialRow."""
    sums = _columns(problem, tiles) * problem.accumulator.itemsize
    return round_up(sums + 2 * problem.accumulator.itemsize, PART_ALIGNMENT)


def _macros(problem: Problem, chosen: Choice[Tiles], merge_bytes: int, device: Device) -> tuple[Macro, ...]:
    sizes = sizes_of(chosen.tiles)
    parts, shares = sizes.pop("key_parts"), sizes.pop("shares")  # the grid determines the numbers
    return (
        *common_macros(problem),
        ("OUT_SCALAR", problem.output.name),
        *((name.upper(), size) for name, size in sizes.items()),
        ("WARP_ROWS", chosen.tiles.warp_rows),
        ("VALUES_IN_KEYS", _reads_keys_alone(problem, chosen.tiles)),
        ("SPLIT_KEYS", parts > 1),
        ("EVEN_SHARES", shares > 1),
        ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ("NEXT_OVERLAPS", _has_next(problem, chosen.tiles) and _may_overlap(device)),
        ("MERGE_THREADS", MERGE_THREADS),
        ("MERGE_BLOCKS", MERGE_BLOCKS),
        ("MERGE_SMEM_BYTES", merge_bytes),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", params_bytes(problem)),
    )


def _has_next(problem: Problem, tiles: Tiles) -> bool:
    """Whether a launch follows the first one: the one beside it, or the one that merges."""
    return max(tiles.key_parts, tiles.shares) > 1 or problem.features.most_queries > 0


def _query_bytes(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """The sizes of the queries in shared memory and of half_queries.cuh's HalfQueries."""
    rows, depth = tiles.block_m, _depth(problem, tiles)
    if problem.kv_dtype is None:
        return arithmetic_of(problem).tile_bytes(rows, depth), 0
    units = round_up(rows * problem.accumulator.itemsize, LINE_BYTES)
    return HALF.tile_bytes(rows, depth), units


def _cost(problem: Problem, tiles: Tiles) -> Cost:
    arithmetic = arithmetic_of(problem)
    depth, columns = _depth(problem, tiles), _columns(problem, tiles)
    stage_bytes = arithmetic.tile_bytes(tiles.block_n, depth)
    if not _reads_keys_alone(problem, tiles):
        stage_bytes += arithmetic.tile_bytes(tiles.block_n, columns)
    query_bytes, unit_bytes = _query_bytes(problem, tiles)
    score_bytes = 0
    if tiles.column_warps > 1:
        score_bytes = (
            tiles.teams * tiles.column_warps * tiles.block_m * tiles.block_n * problem.accumulator.itemsize
        )
    results = tiles.teams * tiles.block_m * _part_bytes(problem, tiles)
    inputs = query_bytes + tiles.teams * tiles.stages * stage_bytes
    smem_bytes = unit_bytes + score_bytes + round_up(max(inputs, results), LINE_BYTES)
    sums = (tiles.block_n + columns // tiles.column_warps) * tiles.warp_rows // WARP_SIZE
    work = tiles.block_m * tiles.block_n * (depth + columns) / tiles.threads
    overhead = BYTE_OVERHEAD_REGISTERS if arithmetic is BYTE else OVERHEAD_REGISTERS
    return Cost(smem_bytes, arithmetic.registers(sums) + overhead, work)
