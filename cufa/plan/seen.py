"""What a call's masks show of tiles of scores: the launch that finds it out, and what that writes."""

from __future__ import annotations

from dataclasses import replace

from cufa.plan.choice import TileSizes, counted_row_tiles
from cufa.plan.record import Launch, Scratch
from cufa.problem import Problem
from cufa.rounding import ceil_div, round_up

# What a tile takes of which it is known what a mask shows: mask_tiles.cuh's SeenPart.
SEEN_PART_BYTES = 2
# Keys of a tile in the forwards where threads keep a bit for each score that is seen: two of every eight in
# a word.
MOST_MASKED_KEYS = 128


def check_masked_keys(problem: Problem, tiles: TileSizes) -> None:
    """Raises ValueError if tiles that a caller chose have more keys than there are bits for in a word."""
    if problem.features.key_mask and tiles.block_n > MOST_MASKED_KEYS:
        raise ValueError(
            f"tiles {tiles}: with a mask or a mask_mod block_n may be at most {MOST_MASKED_KEYS}"
        )


def seen_tiles(problem: Problem, rows: int, keys: int) -> int:
    """Of how many tiles of scores it is found out what masks show of them: seen_tiles.cuh's count."""
    features = problem.features
    if not features.key_mask:
        return 0
    mask_batch, mask_heads, _, _ = features.mask or (1, 1, 1, 1)
    function = features.mask_mod
    of_heads = mask_heads > 1 or (function is not None and function.of_heads)
    # Where packed sequences and used keys end is each one's own.
    own_ends = features.packed or features.seqused_k
    of_batches = mask_batch > 1 or (function is not None and function.of_batches) or own_ends
    counted = problem if of_batches else replace(problem, batch=1)
    row_count = counted_row_tiles(counted, problem.seqlen_q, rows)
    return (problem.heads if of_heads else 1) * row_count * ceil_div(problem.seqlen_k, keys)


def seen_launch(problem: Problem, tiles: int, threads: int, warps: int) -> Launch:
    """The launch that finds it out, a warp for each tile; without blocks if there are no queries."""
    any_queries = problem.batch > 0 and problem.heads > 0 and problem.seqlen_q > 0
    return Launch("seen_tiles", ceil_div(tiles, warps) if any_queries else 0, threads)


def seen_scratch(problem: Problem, tiles: int, alignment: int = 1) -> tuple[Scratch, ...]:
    """Where that is written, for so many tiles, and up to where something else may begin."""
    elements = ceil_div(round_up(tiles * SEEN_PART_BYTES, alignment), problem.accumulator.itemsize)
    return (Scratch("seen tiles", (elements,)),) if tiles else ()
