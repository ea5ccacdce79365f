"""Splits the keys of some tiles of queries among blocks, so that all SMs finish at about the same time.

Blocks take tiles of queries until none are left. In the last round some SMs have none: with 1,376 tiles for
132 SMs, 76 are idle in the eleventh round. Under a causal mask with few heads, the last queries take longer
than all SMs together need. So the keys of such tiles are split into parts. Each block leaves its result, and
the block with the last part merges them (hopper/forward/key_parts.cuh). This is like stream-K (Osama et al.
2023), but with equal parts. If only the GPU knows how many keys there are, all tiles have equally many parts,
or blocks have equal shares of the keys of all tiles (plan/shares.py).

One block has no way to the L2 cache that is wide enough for many parts. So with head dims over 256, where
tiles have more than a few, a launch of its own merges them (hopper/forward/merged_parts.cuh), except under a
causal mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeVar

from cufa.device import Device
from cufa.integers import ceil_div
from cufa.messages import counted
from cufa.plan.hopper import lengths_vary
from cufa.plan.pace import Pace
from cufa.plan.record import Parting, PartPlace
from cufa.plan.struct_sizes import MOST_PARTS_OF_HEAD
from cufa.plan.tile_sizes import TileSizes, query_tiles
from cufa.problem import MAX_EXTENT, Problem


class PartedTiles(TileSizes, Protocol):
    """The sizes of a kernel that may split a tile's keys into up to `most_key_parts`."""

    most_key_parts: ClassVar[int]

    @property
    def key_parts(self) -> int:
        """Parts of the longest tile's keys."""

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM runs at once."""

    def merges_later(self, problem: Problem, parts: int) -> bool:
        """Whether so many parts are merged by a launch of their own, not by the block with the last one."""


T = TypeVar("T", bound=PartedTiles)

# The most parts that one block merges, and up to how many of them cost no further time.
MOST_PARTS, FEW_PARTS = 16, 4
# On an H200: a part is written in float32 and read by another block, which takes so long per byte and, for
# waiting, per part. Then the time of a call until its counters are 0.
PART_BYTE_NS, PART_NS, CLEARING_NS = 0.055, 1200, 2000
# The further time for each part beyond a few: one block merges all parts of a tile.
FURTHER_PART_NS = 1000
# If a launch of its own merges parts: the time to write a byte of one; of that launch; and there, of a byte.
WRITTEN_BYTE_NS, MERGING_NS, MERGED_BYTE_NS = 0.012, 2500, 0.0005
ACCUMULATOR_BYTES = 4
# The gain that parts, and more parts over fewer, must have: times are estimates, and parts take memory.
WORTH_IT, MORE_ARE_WORTH_IT = 0.99, 0.97
# If only the GPU knows how many keys there are: often fewer than the plan assumes.
UNKNOWN_IS_WORTH_IT = 0.9


def unsuited(problem: Problem, tiles: PartedTiles, parts: int) -> str | None:
    """None if keys can be split like this, else the reason."""
    return unsuited_features(problem) or _unsuited_parts(problem, tiles, _key_tiles(problem, tiles), parts)


def unsuited_features(problem: Problem) -> str | None:
    """None if there is nothing in a call because of which keys are not split, else the reason."""
    features = problem.features
    if features.key_mask or features.windowed:
        return "keys are not split under a window, a mask or a mask_mod"
    if features.least_queries:
        return "keys are not split beside another launch"
    return None


def _unsuited_parts(problem: Problem, tiles: PartedTiles, key_tiles: list[int], parts: int) -> str | None:
    if parts > MOST_PARTS and not tiles.merges_later(problem, parts):
        return f"{parts} parts are more than one block merges, {MOST_PARTS}"
    # schedule.cuh's keep_part multiplies them.
    if ceil_div(problem.most_keys, tiles.block_n) * parts > MAX_EXTENT:
        return f"tiles of keys and parts, multiplied, are counted only up to {MAX_EXTENT:,}"
    if varies(problem):
        return None
    if not problem.causal:
        fewest = min(key_tiles)
        return f"{counted(fewest, 'tile')} of keys cannot be split so" if fewest < parts else None
    of_head = sum(_in_parts(problem, key_tiles, parts))
    if of_head > MOST_PARTS_OF_HEAD:
        return f"the tiles of a head would have {of_head} parts; they may have {MOST_PARTS_OF_HEAD}"
    return None


def varies(problem: Problem) -> bool:
    """Whether only the GPU knows how many keys there are: config.cuh's kPartsVary."""
    return lengths_vary(problem) or problem.features.page_size > 0


def parting_of(problem: Problem, tiles: TileSizes, parts: int, blocks: int) -> Parting:
    """The work items for this many blocks, if the longest split tile has `parts` parts.

    If only the GPU knows how many keys there are, all tiles have `parts` parts. Under a causal mask all tiles
    are split, and the longest parts come first. Otherwise only tiles of the last round are split.
    """
    if varies(problem):
        return Parting(0, parts, query_tiles(problem, tiles) * parts)
    if not problem.causal:
        left = query_tiles(problem, tiles) % blocks
        whole = query_tiles(problem, tiles) - left
        return Parting(whole, parts, whole + left * parts)
    key_tiles = _key_tiles(problem, tiles)
    in_parts = _in_parts(problem, key_tiles, parts)
    firsts = itertools.accumulate(in_parts, initial=0)
    places = [
        (ceil_div(keys, count), PartPlace(tile, part, count, first))
        for tile, (keys, count, first) in enumerate(zip(key_tiles, in_parts, firsts, strict=False))
        for part in range(count)
    ]
    # The longest first. Parts of a tile stay in order, since the last part's block waits for the others.
    longest_first = sorted(
        places, key=lambda length_and_place: (-length_and_place[0], -length_and_place[1].tile)
    )
    heads = problem.batch * problem.heads
    return Parting(0, parts, heads * len(places), tuple(place for _, place in longest_first))


def fastest(
    problem: Problem,
    device: Device,
    paces: Mapping[T, Pace],
    least: float,
    worth_it: float,
) -> tuple[T, int, float] | None:
    """The tiles and number of parts that finish first, and that time; None if `least` is as good.

    Parts must take less than `worth_it` of that.
    """
    best = None
    if unsuited_features(problem) is not None:
        return None
    counts_vary = varies(problem)
    if counts_vary:
        worth_it = min(worth_it, UNKNOWN_IS_WORTH_IT)
    for tiles, pace in paces.items():
        key_tiles = _key_tiles(problem, tiles)
        if counts_vary and problem.batch * problem.heads * len(key_tiles) >= device.sm_count:
            continue  # all tiles would be split
        if sum(key_tiles) == 0:
            continue
        mean = _time_of_all(problem, tiles, pace, key_tiles) / device.sm_count
        # Parts save at most the time by which blocks end apart without them, which is less than a tile's.
        if mean > min(least, worth_it * (mean + time_of_tile(tiles, pace, max(key_tiles)))):
            continue
        for parts in numbers_of_parts(max(key_tiles), tiles.most_key_parts):
            if _unsuited_parts(problem, tiles, key_tiles, parts) is None:
                time = _time(problem, tiles, pace, key_tiles, parts, device.sm_count)
                gains = worth_it if best is None else MORE_ARE_WORTH_IT if best[1] < parts else 1
                if time < gains * least:
                    best, least = (tiles, parts, time), time
    return best


@functools.lru_cache
def numbers_of_parts(keys: int, most: int) -> tuple[int, ...]:
    """The numbers of parts, up to `most`, that leave the longest tile shorter parts than fewer ones do."""
    lengths = [ceil_div(keys, parts) for parts in range(1, most + 1)]
    return tuple(parts for parts in range(2, most + 1) if lengths[parts - 1] < lengths[parts - 2])


def merging_time(problem: Problem, tiles: PartedTiles, device: Device) -> float:
    """The nanoseconds that a call takes for the parts of its tiles, in which it reads no keys."""
    parts, in_all = tiles.key_parts, 0
    if parts == 1:
        return 0
    if tiles.merges_later(problem, parts):
        parted = parting_of(problem, tiles, parts, device.sm_count * tiles.blocks_per_sm)
        in_all = parted.count - parted.whole
    return _time_of_merging(problem, tiles, parts, in_all) + _time_of_part(problem, tiles, parts, parts)


def part_bytes(problem: Problem, tiles: TileSizes) -> int:
    """The size of a part's sums of O."""
    return tiles.block_m * problem.value_dim * ACCUMULATOR_BYTES


def _time_of_part(problem: Problem, tiles: PartedTiles, parts: int, of_tile: int) -> float:
    """The nanoseconds to write one of a tile's parts and, by the block with the last one, to merge it.

    The longest tiles have `parts` parts, this one `of_tile`.
    """
    if tiles.merges_later(problem, parts):
        return WRITTEN_BYTE_NS * part_bytes(problem, tiles)
    further = FURTHER_PART_NS * max(0, of_tile - FEW_PARTS)
    return PART_NS + PART_BYTE_NS * part_bytes(problem, tiles) + further


def _time_of_merging(problem: Problem, tiles: PartedTiles, parts: int, in_all: int) -> float:
    """The nanoseconds of the launch that merges the parts, of which there are so many, or clears counters."""
    if tiles.merges_later(problem, parts):
        return MERGING_NS + MERGED_BYTE_NS * part_bytes(problem, tiles) * in_all
    return CLEARING_NS


def _time(
    problem: Problem, tiles: PartedTiles, pace: Pace, key_tiles: list[int], parts: int, blocks: int
) -> float:
    """Nanoseconds until all blocks finish."""

    def time_of(keys: int, count: int) -> float:
        """The time of one of `count` parts of `keys` tiles of keys."""
        of_part = _time_of_part(problem, tiles, parts, count) if count > 1 else 0
        return time_of_tile(tiles, pace, ceil_div(keys, count)) + of_part

    if not problem.causal and not varies(problem):
        rounds, left = divmod(query_tiles(problem, tiles), blocks)
        last_round = ceil_div(left * parts, blocks) * time_of(max(key_tiles), parts)
        merging = _time_of_merging(problem, tiles, parts, left * parts)
        return merging + rounds * time_of(max(key_tiles), 1) + last_round
    in_parts = _in_parts(problem, key_tiles, parts)
    of_head: list[float] = []
    for keys, count in zip(key_tiles, in_parts, strict=True):
        of_head += [time_of(keys, count)] * count
    of_head.sort(reverse=True)
    heads = problem.batch * problem.heads
    least = max(heads * sum(of_head) / blocks, of_head[0])
    if heads * len(of_head) > blocks:  # some block has two of the first items
        least = max(least, of_head[(blocks - 1) // heads] + of_head[blocks // heads])
    return _time_of_merging(problem, tiles, parts, heads * len(of_head)) + least


def _time_of_all(problem: Problem, tiles: TileSizes, pace: Pace, key_tiles: list[int]) -> float:
    """The time of all tiles together if none is split."""
    scores = sum(key_tiles) * tiles.block_m * tiles.block_n
    of_head = scores * pace.ns_per_score + len(key_tiles) * pace.ns_per_tile
    return problem.batch * problem.heads * of_head


def time_of_tile(tiles: TileSizes, pace: Pace, keys: float) -> float:
    """The time of a tile of queries that looks at this many tiles of keys."""
    return keys * tiles.block_m * tiles.block_n * pace.ns_per_score + pace.ns_per_tile


def _key_tiles(problem: Problem, tiles: TileSizes) -> list[int]:
    """The number of tiles of keys that each tile of a head's queries looks at; of packed ones, on average."""
    rows, keys = (size // problem.packed_sequences for size in (problem.seqlen_q, problem.seqlen_k))
    count = ceil_div(rows, tiles.block_m)
    if not problem.causal:
        return [ceil_div(keys, tiles.block_n)] * count
    ends = (min(tile * tiles.block_m, rows) for tile in range(1, count + 1))
    return [ceil_div(max(0, end + keys - rows), tiles.block_n) for end in ends]


def _in_parts(problem: Problem, key_tiles: list[int], parts: int) -> list[int]:
    """The number of parts of each tile. Under a causal mask, no part is longer than the longest tile's."""
    if varies(problem):
        return [max(1, min(parts, keys)) for keys in key_tiles]
    most = max(1, ceil_div(max(key_tiles, default=0), parts))
    return [max(1, ceil_div(keys, most)) for keys in key_tiles]
