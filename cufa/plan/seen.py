"""What a call's masks show of tiles of scores: the launch that finds it out, and its output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cufa.integers import ceil_div, round_up
from cufa.plan.record import Launch, Scratch
from cufa.plan.tile_sizes import TileSizes, counted_row_tiles
from cufa.problem import BYTE_BITS, Problem

# Bytes of what is known about a tile under a mask: mask_tiles.cuh's SeenPart. Producers read so many at once.
SEEN_PART_BYTES, SEEN_WORD_BYTES = 2, 8
# Scores, keys or tiles whose visibility a word holds.
WORD_BITS = 32
# Of tiles of keys of which all rows see the same, in seen_columns.cuh: bits for each, and tiles for a warp.
TILE_BITS, TILES_OF_WARP = 2, 16
# The most keys of a tile in forwards whose threads keep a bit for each visible score: two of every eight in
# one word.
MOST_MASKED_KEYS = 128


def check_masked_keys(problem: Problem, tiles: TileSizes) -> None:
    """Raise ValueError if the caller's tiles have more keys than a word has bits for."""
    if problem.features.key_mask and tiles.block_n > MOST_MASKED_KEYS:
        raise ValueError(
            f"tiles {tiles}: with a mask or a mask_mod block_n may be at most {MOST_MASKED_KEYS}"
        )


def fills_words(problem: Problem, tiles: TileSizes) -> bool:
    """Whether the bits that a mask has for a row of a tile, if there is one, are whole words."""
    return problem.features.mask is None or tiles.block_n % WORD_BITS == 0


def has_key_bits(problem: Problem, tiles: TileSizes) -> bool:
    """Whether the launch finds out about tiles of keys, for all rows, and has a bit for each key."""
    return problem.features.mask_of_keys and fills_words(problem, tiles)


def seen_tiles(problem: Problem, rows: int, keys: int) -> int:
    """The number of tiles of scores that the launch looks at: seen_tiles.cuh's count."""
    if not problem.features.key_mask:
        return 0
    heads, batch = _that_differ(problem)
    row_tiles = counted_row_tiles(replace(problem, batch=batch), problem.seqlen_q, rows)
    return heads * row_tiles * ceil_div(problem.most_keys, keys)


@dataclass(frozen=True)
class Seen:
    """Of what a launch finds out: its warps, and the workspace for tiles and for the bits."""

    warps: int
    tile_bytes: int
    words: int


def seen_by_row(problem: Problem, rows: int, keys: int, with_bits: bool) -> Seen:
    """What each tile of rows sees of each tile of keys, and which scores are seen."""
    tiles = seen_tiles(problem, rows, keys)
    words = tiles * rows * keys // WORD_BITS if with_bits else 0
    return Seen(tiles, tiles * SEEN_PART_BYTES, words)


def seen_by_all(problem: Problem, keys: int) -> Seen:
    """What all rows see of each tile of keys, and which keys: seen_columns.cuh."""
    heads, batch = _that_differ(problem)
    matrices, tiles = heads * batch, ceil_div(problem.most_keys, keys)
    padded = round_up(tiles, WORD_BITS)
    tile_bytes = TILE_BITS * padded // BYTE_BITS
    return Seen(
        warps=matrices * padded // TILES_OF_WARP,
        tile_bytes=matrices * tile_bytes,
        words=matrices * tiles * keys // WORD_BITS,
    )


def seen_by_forward(problem: Problem, tiles: TileSizes, with_bits: bool) -> Seen:
    """What the launch before a forward finds out: of tiles of keys if `has_key_bits`, else of scores."""
    if has_key_bits(problem, tiles):
        return seen_by_all(problem, tiles.block_n)
    return seen_by_row(problem, tiles.block_m, tiles.block_n, with_bits)


def _that_differ(problem: Problem) -> tuple[int, int]:
    """Of how many heads and sequences the tiles may differ."""
    features = problem.features
    mask_batch, mask_heads, _, _ = features.mask or (1, 1, 1, 1)
    function = features.mask_mod
    of_heads = mask_heads > 1 or (function is not None and function.of_heads)
    # Packed sequences and used keys end at different places in each sequence.
    own_ends = features.packed or features.seqused_k
    of_batches = mask_batch > 1 or (function is not None and function.of_batches) or own_ends
    return problem.heads if of_heads else 1, problem.batch if of_batches else 1


def seen_launch(problem: Problem, tiles: int, threads: int, warps: int) -> Launch:
    """The launch that finds it out, with a warp for each tile; without blocks if there are no queries."""
    any_queries = problem.batch > 0 and problem.heads > 0 and problem.seqlen_q > 0
    return Launch("seen_tiles", ceil_div(tiles, warps) if any_queries else 0, threads)


def seen_scratch(problem: Problem, tiles: int) -> tuple[Scratch, ...]:
    """Workspace for what is known about this many tiles."""
    return scratch_of(problem, Seen(tiles, tiles * SEEN_PART_BYTES, 0))


def scratch_of(problem: Problem, seen: Seen) -> tuple[Scratch, ...]:
    """Workspace for what is found out."""
    nbytes = round_up(seen.words * WORD_BITS // BYTE_BITS + seen.tile_bytes, SEEN_WORD_BYTES)
    return (Scratch("seen tiles", (ceil_div(nbytes, problem.accumulator.itemsize),)),) if nbytes else ()
