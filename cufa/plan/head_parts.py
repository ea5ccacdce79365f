"""Splits the queries that share a tile of keys into parts, so that more SMs have work in a backward.

Parts are some of the query heads that share a KV head or, if there are too few heads, some of their rows. The
blocks of a part write their gradients of keys and values to the workspace in float32, and a launch adds
up all parts.
"""

from __future__ import annotations

from math import ceil

from cufa.integers import ceil_div, round_up
from cufa.plan.record import Launch, Scratch
from cufa.plan.tile_sizes import TileSizes, row_tiles
from cufa.problem import Problem

# Columns of a part's gradients are padded to a multiple of 8.
KEY_SUMS_STEP = 8
# If blocks fill this fraction of the time, there is one part.
FILLED = 0.9
# The most parts of rows, and parts in all if rows are split; and the gain that more parts of rows over fewer
# must have: times are estimates, and parts take memory.
MOST_ROW_PARTS, MOST_WITH_ROW_PARTS, MORE_ARE_WORTH_IT = 4, 16, 0.97
# The cost of parts, as equivalent rows of queries of the wgmma backwards in 16 bits, measured on an H200: a
# block writes its part in float32; all parts are read again, in rows for each tile of keys and part; and
# there is one more launch.
WRITE_ROWS, READ_ROWS, LAUNCH_ROWS = 150, 150, 60


def best_parts(
    problem: Problem, tiles: TileSizes, at_once: int, *, row_factor: float = 1, may_split_rows: bool = False
) -> tuple[int, int]:
    """The number of parts of the heads, and of the rows of these, for which a call takes the least time.

    `at_once` blocks run at once. With more parts, more SMs work, and more gradients of keys are written and
    added up in float32. A row of queries takes `row_factor` times as long as in the wgmma backwards in 16
    bits.
    It is not known what a mask hides, so this assumes that it hides nothing.
    """
    key_tiles = problem.kv_heads * row_tiles(problem, problem.seqlen_k, tiles.block_n)
    if not key_tiles * problem.group * problem.visible_scores:
        return 1, 1
    rows, keys = (size / problem.packed_sequences for size in (problem.seqlen_q, problem.seqlen_k))
    most, mean = problem.visible_scores / keys, 1.0
    if problem.causal and not problem.features.windowed:
        # Tiles have different lengths, longest first. With enough tiles, all end when the longest does.
        most = min(rows, keys)
        mean = min(1, problem.visible_scores / (most * keys) + tiles.block_n / (2 * keys))
    share = at_once / key_tiles  # of all blocks, for a tile of keys

    def filled(parts: int) -> float:
        """The fraction of the time that all blocks fill."""
        rounds = parts / share
        return min(1, rounds * mean) if mean < 1 else rounds / ceil(rounds)

    def time(head_parts: int, row_parts: int) -> float:
        """Rows of queries for which a tile's share of the blocks takes as long."""
        rows = most if row_parts == 1 else row_parts * round_up(ceil(most / row_parts), tiles.block_m)
        parts = head_parts * row_parts
        adding = WRITE_ROWS * max(parts, share) + READ_ROWS * parts + LAUNCH_ROWS * share
        return problem.group * rows * mean / filled(parts) + adding * (parts > 1) / row_factor

    if filled(1) >= FILLED:
        return 1, 1
    of_heads = [(parts, 1) for parts in range(1, problem.group + 1) if problem.group % parts == 0]
    best = min(of_heads, key=lambda split: time(*split))
    most_row_parts = min(
        MOST_ROW_PARTS, MOST_WITH_ROW_PARTS // problem.group, ceil_div(ceil(rows), tiles.block_m)
    )
    for row_parts in range(2, most_row_parts + 1) if may_split_rows else ():
        if time(problem.group, row_parts) < MORE_ARE_WORTH_IT * time(*best):
            best = problem.group, row_parts
    return best


def check_head_parts(problem: Problem, tiles: object, head_parts: int) -> None:
    """Raise ValueError if the heads cannot be split into this many parts."""
    if problem.group % head_parts:
        raise ValueError(
            f"tiles {tiles}: head_parts must divide the {problem.group} query heads that share a KV head"
        )


def key_sums(problem: Problem, parts: int) -> tuple[Scratch, ...]:
    """The gradients of keys and values for each part: key_sums.cuh's KeySums."""
    if parts == 1:
        return ()
    cols = sum(round_up(dim, KEY_SUMS_STEP) for dim in (problem.head_dim, problem.value_dim))
    return (Scratch("parts of dK and dV", (_rows(problem), problem.kv_heads, parts, cols)),)


def round_keys(problem: Problem, parts: int, threads: int, warps: int, *, overlaps: bool = False) -> Launch:
    """The launch that adds up the parts: a warp for each row of a KV head."""
    rows = _rows(problem) * problem.kv_heads * (parts > 1)
    return Launch("round_keys", ceil_div(rows, warps), threads, overlaps=overlaps)


def why_parts(head_parts: int, row_parts: int = 1) -> tuple[str, ...]:
    """What a plan says about the parts of the heads, and about those of their rows."""
    heads = f"the query heads of a KV head are split into {head_parts} parts, one block each, to fill the SMs"
    rows = f"the rows that see a tile of keys are split into {row_parts} parts, one block each"
    return (heads,) * (head_parts > 1) + (rows,) * (row_parts > 1)


def _rows(problem: Problem) -> int:
    return problem.tensor_batch * problem.seqlen_k
