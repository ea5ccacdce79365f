"""For which short sequences bwd_3_mma, whose blocks are small, is faster than the Hopper backward.

All sizes are as measured on an H200. Packed sequences count as if all were equally long, if that cannot go
wrong by much.
"""

from __future__ import annotations

from cufa.device import Device
from cufa.problem import Problem
from cufa.rounding import ceil_div

# The most head dims of all that follows but for wide heads.
_NARROW = 128
# Many short sequences: up to how many queries and keys, and how many heads of such ones for each SM.
_SHORT, _MANY_HEADS = 32, 8
# Blocks that have all keys of a KV head: up to how many keys. Rows are the queries of all heads that share
# these. Up to how many rows they are faster with few keys, where twice as many do if no SM is idle; and with
# more keys, where a mask or a mask_mod hides scores.
_WHOLE_KEYS, _FEW_KEYS, _ROWS_OF_FEW_KEYS, _ROWS_UNDER_MASK = 128, 64, 256, 256
# With few keys, heads that share them are parted: up to how many queries, and how many if no SM is idle.
_QUERIES_OF_PART, _QUERIES_OF_MANY_PARTS = 128, 256
# With more keys, by the most head dims: up to how many rows, or queries of parts, if an SM has at most so
# many blocks, and up to how many queries with any number of blocks.
_ROWS, _BLOCKS_OF_SM = {32: 320, 64: 128, _NARROW: 96}, {32: 4, 64: 1, _NARROW: 1}
_FEW_QUERIES = {32: 64, 64: 32, _NARROW: 0}
# Few rows with any number of keys: up to how many head dims and rows, or queries of parts; and without a
# score_mod, which would be computed for rows that do not exist, how many tiles of so many keys for each SM.
_FEW_ROWS_HEAD_DIM, _FEW_ROWS, _TILE_KEYS, _TILES_OF_SM = 64, 64, 128, 2
# Wide heads, up to how many dims: up to how many queries and keys; and if the call has a mask, a bias, a
# function or dropout, as long as query heads have no more tiles of so many keys than there are SMs.
_WIDE, _SHORT_IF_WIDE, _SHORT_IF_SHAPED, _WIDE_TILE_KEYS = 256, 32, 80, 64
# Wide heads whose keys a block can have all, up to how many dims: up to how many queries; and by the most
# keys, if no SM is idle or the call has one of these features.
_WIDE_OF_WHOLE_KEYS, _QUERIES_IF_WIDE, _QUERIES_IF_BUSY = 160, 64, {_FEW_KEYS: 256, _WHOLE_KEYS: 128}


def is_short(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_4_wgmma`."""
    if _dims(problem) > _NARROW:
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
    return longest <= most and _dims(problem) <= _WIDE


def _are_many(problem: Problem, device: Device) -> bool:
    """Whether there are so many that it is not necessary to know that none is longer."""
    many = problem.batch * problem.heads >= _MANY_HEADS * device.sm_count
    return many and max(_queries(problem), _keys(problem)) <= _SHORT


def _is_whole(problem: Problem, device: Device) -> bool:
    """Whether blocks should have all keys of a KV head, and so dQ to themselves."""
    queries, keys = _queries(problem), problem.longest_keys
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
    queries, keys = _queries(problem), problem.longest_keys
    if keys > _WHOLE_KEYS or _dims(problem) > _WIDE_OF_WHOLE_KEYS:
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
