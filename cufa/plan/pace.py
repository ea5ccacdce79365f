"""Estimated time of forwards, mainly of those whose blocks stay for many tiles.

Blocks take tiles until none are left, so some process one tile more than others. Larger tiles hide their
softmax better, but then the extra tile is large, and a head's last tile may have few rows. If an SM has
several blocks, they hide each other's softmax.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.plan.tile_sizes import TileSizes, query_tiles
from cufa.problem import Problem


class PersistentTiles(TileSizes, Protocol):
    """The sizes of blocks that stay for many tiles."""

    @property
    def blocks_per_sm(self) -> int:
        """How many blocks an SM has room for."""


T = TypeVar("T", bound=PersistentTiles)

# An SM's share of an H200's memory bandwidth.
BYTES_PER_NS = 32.7
# Measured on an H200: by what factor a bias lengthens the time, and how long the launch takes that finds out
# what a mask shows of tiles.
BIAS_FACTOR, SEEN_NS = 1.3, 3000
# The fraction of a row's keys that a mask_mod is expected to show, and further keys in tiles that it cuts.
MASK_MOD_SHARE, MASK_MOD_EDGES = 0.35, 256


@dataclass(frozen=True)
class Pace:
    """The time of a tile of queries on an SM of an H200: nanoseconds per score, and further ones per tile.

    `alone` is the factor if the SM has room for several blocks but works on only one. If one edge of what
    rows see cuts through tiles, `ns_per_tile` includes it; `ns_of_other_edge` is for the second edge, of a
    window.
    """

    ns_per_score: float
    ns_per_tile: float
    alone: float = 1
    ns_of_other_edge: float = 0

    def times(self, factor: float) -> Pace:
        """A pace that takes `factor` times as long."""
        return replace(
            self,
            ns_per_score=factor * self.ns_per_score,
            ns_per_tile=factor * self.ns_per_tile,
            ns_of_other_edge=factor * self.ns_of_other_edge,
        )


def is_cut(problem: Problem) -> bool:
    """Whether a causal mask, a window, a mask or a mask_mod cuts through tiles."""
    return problem.range_mask or problem.features.key_mask


def fastest(problem: Problem, device: Device, paces: Mapping[T, Pace]) -> tuple[T, float]:
    """The tiles with which all SMs finish first, and that time."""
    times = {tiles: time(problem, device, tiles, pace) for tiles, pace in paces.items()}
    return min(times.items(), key=operator.itemgetter(1))


def time(problem: Problem, device: Device, tiles: PersistentTiles, pace: Pace) -> float:
    """Nanoseconds until all SMs finish."""
    keys = keys_of_tile(problem, tiles)
    count = _filled_tiles(problem, tiles)
    longest: float = 1
    if problem.causal and not problem.features.windowed and keys > 0:
        longest = keys_of_longest(problem, tiles) / keys
    # Tiles have different lengths, longest first. The others end with the longest, unless all are about as
    # long and some SMs have one more.
    shortest = max(0, 2 - longest)
    # Of an SM's blocks: the length of the longest tile and of those that start with it.
    ranks = (block * device.sm_count for block in range(tiles.blocks_per_sm))
    first, *others = (_length(rank, count, longest, shortest) for rank in ranks)
    second = others[0] if others else 0
    alone = pace.alone * (first - second)
    beside_others = second + sum(others)
    rounds = max(count / device.sm_count, alone + beside_others, shortest * ceil_div(count, device.sm_count))
    of_edges = (_edges(problem) - 1) * pace.ns_of_other_edge
    return rounds * (tiles.block_m * keys * pace.ns_per_score + pace.ns_per_tile + of_edges)


def _filled_tiles(problem: Problem, tiles: TileSizes) -> int:
    """The number of tiles with queries."""
    count = query_tiles(problem, tiles)
    if not problem.features.packed:
        return count
    sequences = problem.heads * problem.batch
    longest = problem.max_seqlen_q or 0
    if longest * problem.batch == problem.seqlen_q and not is_cut(problem):
        return sequences * ceil_div(longest, tiles.block_m)
    # A sequence's last tile is half full, but it has one. Of equal lengths, it may be full; but tiles that a
    # mask cuts then do not come in the order of their lengths, which costs large ones about as much.
    return max(count - problem.heads * (problem.batch // 2), sequences)


def _length(rank: int, count: int, longest: float, shortest: float) -> float:
    """The length of the tile after `rank` longer ones; 0 if there is none."""
    return longest - (longest - shortest) * rank / count if rank < count else 0


def keys_of_tile(problem: Problem, tiles: TileSizes) -> float:
    """The average number of keys that a tile of queries looks at, in whole tiles."""
    keys = problem.mean_keys
    rows = problem.seqlen_q // problem.packed_sequences
    if is_cut(problem) and rows:
        # At each edge, rows of a tile end up to block_m keys apart, and whole tiles add half a tile of keys.
        edges: float = _edges(problem)
        if problem.causal:
            edges *= min(1, keys / rows)  # rows before the first key see none
        seen = problem.seen_keys + edges * tiles.block_m / 2
        if seen < keys:
            return min(seen + edges * tiles.block_n / 2, round_up(keys, tiles.block_n))
    return round_up(keys, tiles.block_n)


def keys_of_longest(problem: Problem, tiles: TileSizes) -> float:
    """The number of keys for the tile that looks at the most."""
    if problem.features.windowed:
        return keys_of_tile(problem, tiles)
    return round_up(problem.mean_keys, tiles.block_n)


def _edges(problem: Problem) -> int:
    """The number of edges of what rows see, if there are any."""
    return 2 if problem.features.windowed else 1


def with_features(problem: Problem, time: float) -> float:
    """The time of a kernel that skips tiles of which nothing is seen, with what a bias or a mask adds."""
    features = problem.features
    if features.bias is not None:
        time *= BIAS_FACTOR
    if features.mask_mod is not None:
        time *= min(1, MASK_MOD_SHARE + MASK_MOD_EDGES / max(problem.mean_keys, 1))
    return time + SEEN_NS * features.key_mask


def memory_time(problem: Problem, device: Device) -> float:
    """The least time in nanoseconds to read Q and what is seen of K and V, and to write O."""
    query_bytes = (problem.head_dim + problem.value_dim) * problem.itemsize  # of Q and O
    of_queries = problem.heads * problem.seqlen_q * query_bytes
    keys = problem.visible_keys * problem.packed_sequences
    in_all = of_queries + problem.kv_heads * keys * problem.key_bytes
    return problem.tensor_batch * in_all / (BYTES_PER_NS * device.sm_count)
