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
# Blocks that have all keys of a KV head: up to how many keys; up to how many queries and keys in any case; up
# to how many rows, which are the queries of all heads that share the keys, if the call has a mask or a
# mask_mod; and by the most head dims, up to how many rows if no SM has two blocks. With the fewest head dims,
# an SM may have several. Up to so many head dims, and so few queries, too.
_WHOLE_KEYS, _WHOLE, _WHOLE_ROWS_UNDER_MASK = 128, 64, 256
_WHOLE_ROWS = {32: 320, 64: 128, _NARROW: 96}
_FEW_QUERIES, _FEW_QUERIES_HEAD_DIM = 32, 64
# Few rows with any number of keys: up to how many head dims, rows, and tiles of so many keys for each SM.
_FEW_ROWS_HEAD_DIM, _FEW_ROWS, _TILE_KEYS, _TILES_OF_SM = 64, 64, 128, 2
# Wide heads, up to how many dims: up to how many queries and keys; and if the call has a mask or a mask_mod,
# as long as query heads have no more tiles of so many keys than there are SMs.
_WIDE, _SHORT_IF_WIDE, _SHORT_IF_WIDE_UNDER_MASK, _WIDE_TILE_KEYS = 256, 32, 64, 64


def is_short(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_4_wgmma`."""
    if _dims(problem) > _NARROW:
        return False
    return _are_many(problem, device) or _is_whole(problem, device) or _has_few_rows(problem, device)


def is_short_if_wide(problem: Problem, device: Device) -> bool:
    """Whether sequences are short for `bwd_5_wgmma_wide` and `bwd_8_wgmma_pair`."""
    longest = max(_queries(problem), _keys(problem))
    sequences = problem.batch // problem.packed_sequences
    tiles = sequences * problem.heads * ceil_div(problem.seqlen_k, _WIDE_TILE_KEYS)
    few_under_mask = problem.features.key_mask and tiles <= device.sm_count
    most = _SHORT_IF_WIDE_UNDER_MASK if few_under_mask else _SHORT_IF_WIDE
    return longest <= most and _dims(problem) <= _WIDE


def _are_many(problem: Problem, device: Device) -> bool:
    """Whether there are so many that it is not necessary to know that none is longer."""
    many = problem.batch * problem.heads >= _MANY_HEADS * device.sm_count
    return many and max(_queries(problem), _keys(problem)) <= _SHORT


def _is_whole(problem: Problem, device: Device) -> bool:
    """Whether blocks should have all keys of a KV head, and so dQ to themselves."""
    queries, keys, dims = _queries(problem), problem.longest_keys, _dims(problem)
    if keys > _WHOLE_KEYS:
        return False
    rows = queries * problem.group
    if max(queries, keys) <= _WHOLE or (problem.features.key_mask and rows <= _WHOLE_ROWS_UNDER_MASK):
        return True
    if queries <= _FEW_QUERIES and dims <= _FEW_QUERIES_HEAD_DIM:
        return True
    has_sm_to_itself = dims <= min(_WHOLE_ROWS) or problem.batch * problem.kv_heads <= device.sm_count
    return has_sm_to_itself and rows <= next(most for limit, most in _WHOLE_ROWS.items() if dims <= limit)


def _has_few_rows(problem: Problem, device: Device) -> bool:
    """Whether rows are few; never if packed, as it is not known that no sequence has more."""
    tiles = problem.batch * problem.kv_heads * ceil_div(problem.seqlen_k, _TILE_KEYS)
    few = problem.seqlen_q * problem.group <= _FEW_ROWS and tiles <= _TILES_OF_SM * device.sm_count
    return few and not problem.features.packed and _dims(problem) <= _FEW_ROWS_HEAD_DIM


def _queries(problem: Problem) -> int:
    return ceil_div(problem.seqlen_q, problem.packed_sequences)


def _keys(problem: Problem) -> int:
    return ceil_div(problem.seqlen_k, problem.packed_sequences)


def _dims(problem: Problem) -> int:
    return max(problem.head_dim, problem.value_dim)
