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
# With any number of these keys, if a mask or a mask_mod hides scores: at most this many rows.
_ROWS_UNDER_MASK = 256
# Otherwise, by the largest head dim: at most this many rows, or queries in a part, if an SM has at most this
# many blocks; and at most this many queries with any number of blocks.
_ROWS = {32: 320, 64: 128, _NARROW_DIM: 96}
_BLOCKS_OF_SM = {32: 4, 64: 1, _NARROW_DIM: 1}
_FEW_QUERIES = {32: 64, 64: 32, _NARROW_DIM: 0}

# Few rows with any number of keys: at most this many head dims, and rows, or queries in a part.
_FEW_ROWS_HEAD_DIM, _FEW_ROWS = 64, 64
# That is only if each SM has at most this many tiles of this many keys, or if there is a score_mod, which the
# Hopper backward would also compute for rows that do not exist.
_TILES_OF_SM, _TILE_KEYS = 2, 128

# Wide heads, of at most this many head dims: at most this many queries and keys.
_WIDE_DIM, _SHORT_IF_WIDE = 256, 32
# The same if the call has a mask, a bias, a function or dropout, and query heads have no more tiles of
# _WIDE_TILE_KEYS keys than there are SMs.
_WIDE_TILE_KEYS, _SHORT_IF_SHAPED = 64, 80
# Wide heads, of at most this many head dims, if a block has all their keys: at most this many queries.
_WIDE_DIM_OF_WHOLE, _QUERIES_IF_WIDE = 160, 64
# If no SM is idle or the call has one of these features, by the most keys: at most this many queries.
_QUERIES_IF_BUSY = {_FEW_KEYS: 256, _WHOLE_KEYS: 128}


def is_short(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_4_wgmma`."""
    if _dims(problem) > _NARROW_DIM:
        return False
    return _are_many(problem, device) or _is_whole(problem, device) or _has_few_rows(problem, device)


def is_short_if_wide(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_5_wgmma_wide` and `bwd_8_wgmma_pair`."""
    if _is_whole_if_wide(problem, device):
        return True
    longest = max(_queries(problem), _keys(problem))
    sequences = problem.batch // problem.packed_sequences
    tiles = sequences * problem.heads * ceil_div(problem.seqlen_k, _WIDE_TILE_KEYS)
    most = _SHORT_IF_SHAPED if _is_shaped(problem) and tiles <= device.sm_count else _SHORT_IF_WIDE
    return longest <= most and _dims(problem) <= _WIDE_DIM


def _are_many(problem: Problem, device: Device) -> bool:
    """Whether there are so many that it is not necessary to know that none is longer."""
    many = problem.batch * problem.heads >= _MANY_HEADS * device.sm_count
    return many and max(_queries(problem), _keys(problem)) <= _SHORT


def _is_whole(problem: Problem, device: Device) -> bool:
    """Whether blocks should have all keys of a KV head, and so dQ to themselves."""
    queries, keys = _queries(problem), problem.stated_most_keys
    if keys > _WHOLE_KEYS:
        return False
    rows, blocks_of_sm = queries * problem.group, problem.batch * problem.kv_heads / device.sm_count
    parts_of_sm = blocks_of_sm * problem.group
    if keys <= _FEW_KEYS:
        few_rows = rows <= _ROWS_OF_FEW_KEYS * (1 if blocks_of_sm < 1 else 2)
        if few_rows or queries <= (_QUERIES_OF_PART if parts_of_sm < 1 else _QUERIES_OF_MANY_PARTS):
            return True
    if problem.hides_scores and rows <= _ROWS_UNDER_MASK:
        return True
    dims = next(limit for limit in _ROWS if _dims(problem) <= limit)
    return queries <= _FEW_QUERIES[dims] or any(
        of_sm <= _BLOCKS_OF_SM[dims] and length <= _ROWS[dims]
        for of_sm, length in ((blocks_of_sm, rows), (parts_of_sm, queries))
    )


def _is_whole_if_wide(problem: Problem, device: Device) -> bool:
    """The same for wide heads."""
    queries, keys = _queries(problem), problem.stated_most_keys
    if keys > _WHOLE_KEYS or _dims(problem) > _WIDE_DIM_OF_WHOLE:
        return False
    busy = problem.batch * problem.kv_heads >= device.sm_count or _is_shaped(problem)
    most = next(most for limit, most in _QUERIES_IF_BUSY.items() if keys <= limit)
    return queries <= (most if busy else _QUERIES_IF_WIDE)


def _is_shaped(problem: Problem) -> bool:
    """Whether scores have a rule for each: a mask, a bias, a function or dropout."""
    features = problem.features
    rules = problem.hides_scores, features.bias is not None, features.score_mod is not None, features.dropout
    return any(rules)


def _has_few_rows(problem: Problem, device: Device) -> bool:
    """Whether rows are few; never if packed, as it is not known that no sequence has more."""
    if problem.features.packed or _dims(problem) > _FEW_ROWS_HEAD_DIM:
        return False
    tiles = problem.batch * problem.kv_heads * ceil_div(problem.seqlen_k, _TILE_KEYS)
    most_tiles = _TILES_OF_SM * device.sm_count
    if problem.seqlen_q * problem.group <= _FEW_ROWS:
        return problem.features.score_mod is not None or tiles <= most_tiles
    return problem.seqlen_q <= _FEW_ROWS and tiles * problem.group <= most_tiles


def _queries(problem: Problem) -> int:
    return ceil_div(problem.seqlen_q, problem.packed_sequences)


def _keys(problem: Problem) -> int:
    return ceil_div(problem.seqlen_k, problem.packed_sequences)


def _dims(problem: Problem) -> int:
    return max(problem.head_dim, problem.value_dim)
