"""What a call's mask_mod shows of tiles of scores: the launch that finds it out, and what that writes."""

from __future__ import annotations

from cufa.plan.choice import row_tiles
from cufa.plan.record import Scratch
from cufa.problem import Problem
from cufa.rounding import ceil_div

# What a tile takes of which it is known what a mask_mod shows: seen_tiles.cuh's SeenPart.
SEEN_PART_BYTES = 2


def seen_tiles(problem: Problem, rows: int, keys: int) -> int:
    """Of how many tiles of scores it is found out what a mask_mod shows of them: seen_tiles.cuh's count."""
    mask_mod = problem.features.mask_mod
    if mask_mod is None:
        return 0
    of_heads = problem.heads if mask_mod.of_heads else 1
    return of_heads * row_tiles(problem, problem.seqlen_q, rows) * ceil_div(problem.seqlen_k, keys)


def seen_scratch(problem: Problem, tiles: int) -> tuple[Scratch, ...]:
    """Where that is written, for so many tiles."""
    elements = ceil_div(tiles * SEEN_PART_BYTES, problem.accumulator.itemsize)
    return (Scratch("seen tiles", (elements,)),) if tiles else ()
