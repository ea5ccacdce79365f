"""For which short sequences bwd_3_mma, whose blocks are small, is faster than the Hopper backward.

All sizes are as measured on an H200. Packed sequences count as if all were equally long, if that cannot go
wrong by much.
"""

from __future__ import annotations

from cufa.device import Device
from cufa.integers import ceil_div
from cufa.problem import Problem

# The limits above those of wide heads are for at most this many head dims.
_NARROW_DIM = 128
# Many short sequences: at most this many queries and keys, and at least this many such heads for each SM.
_SHORT, _MANY_HEADS = 32, 8

# Blocks that have all keys of a KV head, which are at most this many. "Rows" are the queries of all heads
# that share these keys. If these heads are divided among blocks, each has a "part": the queries of one head.
_WHOLE_KEYS = 128
# At most this many keys are few. Then such blocks are faster with at most this many rows, or twice as many if
# no SM is idle; and with at most this many queries in a part, or the second number if no SM is idle.
_FEW_KEYS = 64
_ROWS_OF_FEW_KEYS = 256
_QUERIES_OF_PART, _QUERIES_OF_MANY_PARTS = 128, 256
# With any number of these keys, if a mask or a mask_mod hides scores: at most this many queries.
_QUERIES_UNDER_MASK = 200
# Otherwise, by the largest head dim: at most this many rows, or queries in a part, if an SM has at most this
# many blocks; and at most this many queries with any number of blocks.
_ROWS = {32: 320, 64: 128, _NARROW_DIM: 96}
_BLOCKS_OF_SM = {32: 4, 64: 1, _NARROW_DIM: 1}
_FEW_QUERIES = {32: 64, 64: 32, _NARROW_DIM: 0}

# Few rows with any number of keys: up to this many head dims, at most this many rows, or queries in a part.
# Without a mask or a mask_mod, that is only if each SM has at most this many tiles of this many keys, or for
# rows if there is a score_mod, which the Hopper backward would also compute for rows that do not exist.
_FEW_ROWS_HEAD_DIM, _FEW_ROWS = 64, 64
_TILES_OF_SM, _TILE_KEYS = 2, 128
# If a mask or a mask_mod hides scores: at most this many queries that make at most this many rows.
_FEW_QUERIES_UNDER_MASK, _FEW_ROWS_UNDER_MASK = 128, 256
# With more head dims, only under a mask or a mask_mod: at most this many queries, if each SM has at most this
# many tiles, counted for each query head.
_FEWEST_QUERIES, _TILES_OF_HEADS = 32, 4

# Wide heads, of at most this many head dims: at most this many queries and keys.
_WIDE_DIM, _SHORT_IF_WIDE = 256, 32
# The same if scores are shaped, for which there is no bwd_8_wgmma_pair, and query heads have no more tiles of
# _WIDE_TILE_KEYS keys than there are SMs.
_WIDE_TILE_KEYS, _SHORT_IF_SHAPED = 64, 80
# Few keys: these and the queries together at most this many, if at least this many heads share the keys and
# no SM has two heads.
_QUERIES_AND_KEYS, _MANY_SHARE = 96, 4

# Wide heads, if a block has all their keys. Up to this many head dims: at most this many queries, or as many
# as the keys allow if no SM is idle or scores are shaped.
_WIDE_DIM_OF_WHOLE, _QUERIES_IF_WIDE = 160, 64
_QUERIES_IF_BUSY = {_FEW_KEYS: 256, _WHOLE_KEYS: 128}
# The same up to more head dims. Of two numbers of queries, the second counts if at least this part of the SMs
# has a head.
_WIDER_DIM_OF_WHOLE, _BUSY_SMS = 192, 0.5
# At most so many queries if scores are shaped.
_QUERIES_IF_SHAPED = 128, 256
# At most so many if they are not, and an SM has at most this many heads: with few keys or, where the second
# number counts, under a causal mask.
_QUERIES_IF_WIDER, _MOST_HEADS_OF_SM = (80, 256), 8


def is_short(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_4_wgmma`."""
    if _dims(problem) > _NARROW_DIM:
        return False
    return _are_many(problem, device) or _is_whole(problem, device) or _has_few_rows(problem, device)


def is_short_if_wide(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_5_wgmma_wide` and `bwd_8_wgmma_pair`."""
    if _dims(problem) > _WIDE_DIM:
        return False
    if _is_whole_if_wide(problem, device) or _is_whole_if_wider(problem, device):
        return True
    heads = problem.batch * problem.heads
    tiles = heads // problem.packed_sequences * ceil_div(problem.seqlen_k, _WIDE_TILE_KEYS)
    most = _SHORT_IF_SHAPED if _is_shaped(problem) and tiles <= device.sm_count else _SHORT_IF_WIDE
    if max(problem.queries_with_keys, _keys(problem)) <= most:
        return True
    many_share = problem.group >= _MANY_SHARE and heads <= device.sm_count
    keys = problem.stated_most_keys
    return many_share and keys <= _FEW_KEYS and problem.queries_with_keys + keys <= _QUERIES_AND_KEYS


def _are_many(problem: Problem, device: Device) -> bool:
    """Whether there are so many that it is not necessary to know that none is longer."""
    many = problem.batch * problem.heads >= _MANY_HEADS * device.sm_count
    return many and max(problem.queries_with_keys, _keys(problem)) <= _SHORT


def _is_whole(problem: Problem, device: Device) -> bool:
    """Whether blocks should have all keys of a KV head, and so dQ to themselves."""
    queries, keys = problem.queries_with_keys, problem.stated_most_keys
    if keys > _WHOLE_KEYS:
        return False
    rows, blocks_of_sm = queries * problem.group, problem.batch * problem.kv_heads / device.sm_count
    parts_of_sm = blocks_of_sm * problem.group
    if keys <= _FEW_KEYS:
        few_rows = rows <= _ROWS_OF_FEW_KEYS * (1 if blocks_of_sm < 1 else 2)
        if few_rows or queries <= (_QUERIES_OF_PART if parts_of_sm < 1 else _QUERIES_OF_MANY_PARTS):
            return True
    if problem.hides_scores and queries <= _QUERIES_UNDER_MASK:
        return True
    dims = next(limit for limit in _ROWS if _dims(problem) <= limit)
    return queries <= _FEW_QUERIES[dims] or any(
        of_sm <= _BLOCKS_OF_SM[dims] and length <= _ROWS[dims]
        for of_sm, length in ((blocks_of_sm, rows), (parts_of_sm, queries))
    )


def _is_whole_if_wide(problem: Problem, device: Device) -> bool:
    """The same for wide heads."""
    queries, keys = problem.queries_with_keys, problem.stated_most_keys
    if keys > _WHOLE_KEYS or _dims(problem) > _WIDE_DIM_OF_WHOLE:
        return False
    busy = problem.batch * problem.kv_heads >= device.sm_count or _is_shaped(problem)
    most = next(most for limit, most in _QUERIES_IF_BUSY.items() if keys <= limit)
    return queries <= (most if busy else _QUERIES_IF_WIDE)


def _is_whole_if_wider(problem: Problem, device: Device) -> bool:
    """The same up to more head dims."""
    keys, heads_of_sm = problem.stated_most_keys, problem.batch * problem.heads / device.sm_count
    if keys > _WHOLE_KEYS or _dims(problem) > _WIDER_DIM_OF_WHOLE:
        return False
    busy = heads_of_sm >= _BUSY_SMS
    if _is_shaped(problem):
        return problem.queries_with_keys <= _QUERIES_IF_SHAPED[busy]
    few = keys <= _FEW_KEYS or (problem.causal and busy)
    return few and heads_of_sm <= _MOST_HEADS_OF_SM and problem.queries_with_keys <= _QUERIES_IF_WIDER[busy]


def _is_shaped(problem: Problem) -> bool:
    """Whether scores have a rule for each: a mask, a bias, a function, dropout or a soft cap."""
    features = problem.features
    return (
        problem.hides_scores
        or features.bias is not None
        or features.score_mod is not None
        or features.dropout
        or features.softcap
    )


def _has_few_rows(problem: Problem, device: Device) -> bool:
    """Whether rows are few; never if packed, as it is not known that no sequence has more."""
    if problem.features.packed:
        return False
    queries = problem.queries_with_keys
    rows = queries * problem.group
    masked = problem.features.key_mask
    tiles = problem.batch * problem.kv_heads * ceil_div(problem.seqlen_k, _TILE_KEYS)
    tiles_of_heads, few_tiles = tiles * problem.group, _TILES_OF_SM * device.sm_count
    if _dims(problem) > _FEW_ROWS_HEAD_DIM:
        return masked and queries <= _FEWEST_QUERIES and tiles_of_heads <= _TILES_OF_HEADS * device.sm_count
    if problem.hides_scores and queries <= _FEW_QUERIES_UNDER_MASK and rows <= _FEW_ROWS_UNDER_MASK:
        return True
    if rows <= _FEW_ROWS:
        return problem.features.score_mod is not None or masked or tiles <= few_tiles
    return queries <= _FEW_ROWS and (masked or tiles_of_heads <= few_tiles)


def _keys(problem: Problem) -> int:
    return ceil_div(problem.seqlen_k, problem.packed_sequences)


def _dims(problem: Problem) -> int:
    return max(problem.head_dim, problem.value_dim)
