"""Divides the keys of all tiles of queries evenly among blocks (hopper/forward/share_walk.cuh).

Equally many parts of each tile leave most SMs waiting for the longest sequence, if only the GPU knows how
long they are. Equal shares keep all SMs busy, whatever the lengths; a launch of its own merges the results of
tiles that several blocks have parts of (hopper/forward/merged_parts.cuh).
"""

from __future__ import annotations

import math
from typing import Protocol

from cufa.device import Device
from cufa.integers import ceil_div
from cufa.plan import parting
from cufa.plan.hopper import lengths_vary
from cufa.plan.pace import Pace, memory_time
from cufa.plan.record import Parting
from cufa.plan.tile_sizes import TileSizes
from cufa.problem import MAX_EXTENT, Problem

# share_walk.cuh: as many keys as take as long as a tile of queries beside its keys.
TILE_IN_KEYS = 192
# The time of the launch that merges, on an H200, and its further time per byte of all parts.
MERGING_NS, MERGED_BYTE_NS = 3500, 0.00027
# How long sequences are on average, of the longest, if only the GPU knows.
MEAN_OF_LONGEST = 0.5
# What shares must gain: times are estimates.
WORTH_IT = 0.95


class SharedTiles(TileSizes, Protocol):
    """The sizes of a kernel whose blocks may have equal shares of the keys."""

    @property
    def shares(self) -> int:
        """How many shares there are; each has a block for every tile that sees the same keys."""


def unsuited(problem: Problem, tiles: TileSizes) -> str | None:
    """None if keys can be shared out like this, else the reason."""
    reason = parting.unsuited_features(problem)
    if reason is not None:
        return reason
    if problem.causal or problem.features.packed:
        how = "packed" if problem.features.packed else "under a causal mask"
        return f"keys are not shared out {how}"
    without_keys = _lines(problem) * (TILE_IN_KEYS // tiles.block_n)
    if without_keys + _rounds(problem, tiles) > MAX_EXTENT:
        return f"tiles of keys are counted only up to {MAX_EXTENT:,}"
    return None


def most_shares(problem: Problem, tiles: TileSizes, blocks: int) -> int:
    """How many shares so many blocks can have."""
    of_share = tiles_of_share(problem, tiles)
    return min(blocks // of_share, _rounds(problem, tiles)) if of_share else 0


def tiles_of_share(problem: Problem, tiles: TileSizes) -> int:
    """The tiles of queries that see the same keys."""
    return problem.group * ceil_div(problem.seqlen_q, tiles.block_m)


def parting_of(problem: Problem, tiles: SharedTiles) -> Parting:
    """The blocks."""
    return Parting(count=tiles.shares * tiles_of_share(problem, tiles), in_shares=True)


def gains(problem: Problem, tiles: SharedTiles, pace: Pace, least: float, device: Device) -> bool:
    """Whether shares take less time than `least`, that of blocks that take tiles or parts of tiles.

    That is for sequences that are all as long as the longest. If only the GPU knows their lengths, they are
    shorter on average. Then blocks also end apart by up to the time of the longest tile. The keys of a single
    sequence are split as well into parts.
    """
    if _lines(problem) == 1:
        return False
    mean = MEAN_OF_LONGEST if lengths_vary(problem) else 1
    of_block = _lines(problem) * tiles_of_share(problem, tiles) / device.sm_count
    if lengths_vary(problem) and of_block > 1:
        rounds = problem.seqlen_k / tiles.block_n
        least = (
            of_block * parting.time_of_tile(tiles, pace, mean * rounds)
            + parting.time_of_tile(tiles, pace, rounds) / 2
        )
    reading = mean * memory_time(problem, device)
    in_shares = max(time(problem, tiles, pace, mean), reading + merging_time(problem, tiles))
    return in_shares < WORTH_IT * max(least, reading)


def time(problem: Problem, tiles: SharedTiles, pace: Pace, of_longest: float = 1) -> float:
    """Nanoseconds until all blocks finish and the parts are merged.

    Sequences are on average `of_longest` times as long as they may be.
    """
    rounds = math.ceil(of_longest * _rounds(problem, tiles) / tiles.shares)
    further_tiles = _parts(problem, tiles) / tiles.shares - 1
    return (
        parting.time_of_tile(tiles, pace, rounds)
        + further_tiles * parting.time_of_tile(tiles, pace, 0)
        + merging_time(problem, tiles)
    )


def merging_time(problem: Problem, tiles: SharedTiles) -> float:
    """The nanoseconds of that to write parts of tiles and to merge them."""
    side_by_side = tiles_of_share(problem, tiles)
    parts = min(_parts(problem, tiles), 2 * tiles.shares) * side_by_side
    of_block = parts / (tiles.shares * side_by_side)
    part_bytes = parting.part_bytes(problem, tiles)
    return MERGING_NS + part_bytes * (parting.WRITTEN_BYTE_NS * of_block + MERGED_BYTE_NS * parts)


def _parts(problem: Problem, tiles: SharedTiles) -> int:
    """The most parts that one of the tiles side by side has in all sequences."""
    return tiles.shares + _lines(problem) - 1


def _lines(problem: Problem) -> int:
    """Sequences and KV heads: what keys there are for some tiles of queries."""
    return problem.batch * problem.kv_heads


def _rounds(problem: Problem, tiles: TileSizes) -> int:
    """The tiles of keys of all of them, at most."""
    return _lines(problem) * max(1, ceil_div(problem.seqlen_k, tiles.block_n))
