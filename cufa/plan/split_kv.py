"""Plans for `fwd_8_split_kv`: into how many parts the keys are split.

What takes time is to read K and V. Few blocks cannot use all of the GPU's bandwidth; each wave of them adds
the time until its first tiles are there, and parts must be merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from cufa.device import Device
from cufa.plan.choice import Choice, Cost, choose, row_tiles
from cufa.plan.mma import HALF, LINE_BYTES, MMA_K, MMA_M
from cufa.plan.record import Launch, Macro, Part, Scratch
from cufa.plan.sizes import FORWARD_PARAMS_BYTES, ceil_div, common_macros, round_up
from cufa.problem import MAX_EXTENT, Problem, lse_shape

# Rows that a block may have; K and V are read again for more.
MAX_BLOCK_M = 64
MIN_STAGES, MAX_STAGES = 2, 4
# Each has a barrier, of which there are 16.
MAX_TEAMS = 8
# Keys of as many bytes or more come in smaller tiles.
WIDE_KEY_BYTES = 512
# What was fastest on an H200.
THREADS, BLOCKS_PER_SM = 128, 2
# From which compute capability on one launch may begin while the one before ends.
FIRST_OVERLAPPING = (9, 0)
# Blocks of the second launch, which merges.
MERGE_THREADS = 256
# The part of a row that a block leaves: its sums in float32, and two more in as much as is read at once.
PART_ALIGNMENT = 16
# What else takes time, in the bytes that an SM's share of the bandwidth brings in it: until a block's first
# tiles are there; the second launch, and each part that it merges. How many blocks for an SM use all of the
# bandwidth, and which part of the time counts that some SMs have more blocks than others have. For how many
# rows an SM's products take as long as its keys. All of it as measured on an H200.
START_BYTES = 72 * 1024
MERGE_BYTES = 96 * 1024
MERGED_PART_BYTES = 1024
BLOCKS_FOR_BANDWIDTH = 0.56
UNEVENNESS = 0.15
ROWS_FOR_BANDWIDTH = 48
MAX_SPLITS = 128
# Registers of a thread beside sums and scores: operands, addresses, the softmax's state.
OVERHEAD_REGISTERS = 70


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernel is compiled for; `splits` are the parts that the keys are split into.

    A team is a warp for each 16 rows of `block_m`; it has tiles of `block_n` keys, `stages` of them.
    """

    block_m: int
    block_n: int
    threads: int
    stages: int
    splits: int = 1

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // 32 * MMA_M // self.block_m

    def misfit(self) -> str | None:
        """None if the kernel can be compiled for these tiles, else the reason."""
        if self.block_m % MMA_M or self.threads // 32 % (self.block_m // MMA_M):
            return f"block_m must be {MMA_M} rows for each warp of a team, and teams must part the warps"
        if self.teams > MAX_TEAMS:
            return f"a block has up to {MAX_TEAMS} teams, and this would have {self.teams}"
        if self.block_n % MMA_K:
            return f"block_n must be a multiple of {MMA_K}"
        if not MIN_STAGES <= self.stages <= MAX_STAGES:
            return f"stages may be {MIN_STAGES} to {MAX_STAGES}"
        return None

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} with {self.threads} threads, stages {self.stages}"


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_8_split_kv`: a block for each part of the keys of a tile of rows, and a launch that merges them.

    Raises ValueError if there are more rows than can be counted.
    """
    rows = _rows_of_kv_head(problem)
    if rows > MAX_EXTENT:
        raise ValueError(f"a KV head has {rows:,} rows of queries, more than {MAX_EXTENT:,}")
    best = _best_tiles(problem, device)
    chosen = choose(problem, device, tiles, (best,), lambda tiles: _cost(problem, tiles))
    row_blocks = _row_blocks(problem, chosen.tiles.block_m)
    if "splits" not in tiles:
        splits = _best_splits(problem, chosen, row_blocks, device)
        chosen = replace(chosen, tiles=replace(chosen.tiles, splits=splits))
    sizes = chosen.tiles
    split = sizes.splits > 1
    part_bytes = _part_bytes(problem)
    merge_bytes = MERGE_THREADS // 32 * part_bytes
    grid = row_blocks * sizes.splits
    launches = [Launch("fwd_8_split_kv", grid, sizes.threads, chosen.cost.smem_bytes)]
    if split:
        overlaps = _merge_overlaps(device)
        launches.append(Launch("merge_splits", grid, MERGE_THREADS, merge_bytes, overlaps=overlaps))
    parts = (*lse_shape(problem), sizes.splits, part_bytes // problem.accumulator.itemsize)
    how = (
        f"keys in {sizes.splits} parts each, so that {row_blocks} tiles of rows are {grid} blocks"
        if split
        else f"keys in one part: {row_blocks} tiles of rows are blocks enough"
    )
    return Part(
        tiles=asdict(sizes),
        macros=_macros(problem, chosen, merge_bytes, device),
        launches=tuple(launches) if grid else (),
        scratch=(Scratch("parts of rows", parts),) if grid and split else (),
        reasons=(*chosen.reasons, f"{how}, for {device.sm_count} SMs"),
    )


def _rows_of_kv_head(problem: Problem) -> int:
    """The queries of all heads that share a KV head, of all sequences together if they are packed."""
    return problem.seqlen_q * problem.group


def _rows_of_sequence(problem: Problem) -> int:
    """The same of one sequence; of packed ones, as if all were equally long."""
    return ceil_div(_rows_of_kv_head(problem), problem.packed_sequences)


def _row_blocks(problem: Problem, block_m: int) -> int:
    return problem.kv_heads * row_tiles(problem, _rows_of_kv_head(problem), block_m)


def _key_bytes(problem: Problem) -> int:
    """Bytes of K and V of one key."""
    return (problem.head_dim + problem.value_dim) * problem.itemsize


def _visible_keys(problem: Problem) -> int:
    """How many keys a tile of rows sees, of packed sequences as if all were equally long."""
    keys = problem.seqlen_k // problem.packed_sequences
    queries = ceil_div(problem.seqlen_q, problem.packed_sequences)
    left, right = problem.features.window
    if left is None:
        return keys
    return min(keys, left + queries + (keys if right is None else right))


def _best_tiles(problem: Problem, device: Device) -> Tiles:
    """The largest that fit, and as many stages as leave room for the blocks that an SM should have."""
    rows = _rows_of_sequence(problem)
    block_m = next((m for m in (16, 32) if m >= rows), MAX_BLOCK_M)
    # A warp starts the copies of as many bytes whatever the team is.
    most_keys = block_m if _key_bytes(problem) >= WIDE_KEY_BYTES else 2 * block_m
    sizes = [
        (block_n, threads)
        for threads in (THREADS, THREADS // 2)
        for block_n in (most_keys, most_keys // 2, most_keys // 4)
        if block_n >= MMA_K and threads // 32 * MMA_M >= block_m
    ]

    def blocks(tiles: Tiles) -> int:
        return device.blocks_resident(tiles.threads, 0, _cost(problem, tiles).smem_bytes)

    smallest = [Tiles(block_m, *size, MIN_STAGES) for size in sizes]
    tiles = next(filter(blocks, smallest), smallest[-1])
    enough = min(BLOCKS_PER_SM, blocks(tiles))
    stages = range(MIN_STAGES + 1, MAX_STAGES + 1)
    return max(
        (more for more in (replace(tiles, stages=count) for count in stages) if blocks(more) >= enough > 0),
        key=lambda more: more.stages,
        default=tiles,
    )


def _best_splits(problem: Problem, chosen: Choice[Tiles], row_blocks: int, device: Device) -> int:
    """What takes the least time, reckoned in bytes of an SM's share of the bandwidth."""
    at_once = device.sm_count * chosen.blocks_per_sm
    bytes_of_row_block = _visible_keys(problem) * _key_bytes(problem)
    rounds = ceil_div(_visible_keys(problem), chosen.tiles.block_n * chosen.tiles.teams)

    def time(splits: int) -> float:
        blocks = row_blocks * splits
        waves = ceil_div(blocks, at_once)
        of_sm = row_blocks * bytes_of_row_block / device.sm_count
        of_block = bytes_of_row_block / splits
        on_busiest = ceil_div(blocks, device.sm_count)
        uneven = on_busiest * device.sm_count / max(1, blocks) - 1
        read = max(of_sm * (1 + UNEVENNESS * uneven), waves * of_block * BLOCKS_FOR_BANDWIDTH)
        multiply = on_busiest * of_block * chosen.tiles.block_m / ROWS_FOR_BANDWIDTH
        merge = MERGE_BYTES + splits * MERGED_PART_BYTES if splits > 1 else 0
        return waves * START_BYTES + max(read, multiply) + merge

    return min(range(1, max(1, min(rounds, MAX_SPLITS)) + 1), key=time)


def _merge_overlaps(device: Device) -> bool:
    """Whether the second launch may begin while the first one ends."""
    return device.arch.capability >= FIRST_OVERLAPPING


def _part_bytes(problem: Problem) -> int:
    """The size of row_parts.cuh's RowPart."""
    sums = round_up(problem.value_dim, MMA_K) * problem.accumulator.itemsize
    return round_up(sums + 2 * problem.accumulator.itemsize, PART_ALIGNMENT)


def _macros(problem: Problem, chosen: Choice[Tiles], merge_bytes: int, device: Device) -> tuple[Macro, ...]:
    sizes = asdict(chosen.tiles)
    splits = sizes.pop("splits")  # how many is for the grid to say
    return (
        *common_macros(problem),
        *((name.upper(), size) for name, size in sizes.items()),
        ("SPLIT_KEYS", splits > 1),
        ("BLOCKS_PER_SM", chosen.blocks_per_sm),
        ("MERGE_OVERLAPS", splits > 1 and _merge_overlaps(device)),
        ("MERGE_THREADS", MERGE_THREADS),
        ("MERGE_SMEM_BYTES", merge_bytes),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", FORWARD_PARAMS_BYTES),
    )


def _cost(problem: Problem, tiles: Tiles) -> Cost:
    stage_bytes = HALF.tile_bytes(tiles.block_n, problem.head_dim) + HALF.tile_bytes(
        tiles.block_n, problem.value_dim
    )
    smem_bytes = HALF.tile_bytes(tiles.block_m, problem.head_dim) + round_up(
        tiles.teams * max(tiles.stages * stage_bytes, tiles.block_m * _part_bytes(problem)),
        LINE_BYTES,
    )
    depth, columns = round_up(problem.head_dim, MMA_K), round_up(problem.value_dim, MMA_K)
    sums = (tiles.block_n + columns) * MMA_M // 32
    work = tiles.block_m * tiles.block_n * (depth + columns) / tiles.threads
    return Cost(smem_bytes, HALF.registers(sums) + OVERHEAD_REGISTERS, work)
