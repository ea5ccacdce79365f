"""The matrices of probabilities, which attention avoids, for those who want to look at them."""
# The papers write matrices in capitals (S, P), and so does this file.
# ruff: noqa: N803, N806

from __future__ import annotations

import logging
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.cpu import tiles
from cufa.problem import DTYPES, FLOAT8, Problem, Shape, check_layout
from cufa.score_rules import HeadRules, Rules

Array: TypeAlias = npt.NDArray[Any]

_log = logging.getLogger("cufa")


def shape(problem: Problem) -> Shape:
    """(batch, heads, seqlen_q, seqlen_k); a log message says how much memory that is.

    Raises ValueError for packed sequences, whose probabilities do not form an array, and for 8-bit keys.
    """
    if problem.key_dtype == FLOAT8:
        raise ValueError(f"return_attn_probs is True, and k and v are {FLOAT8}, which is too coarse for them")
    if problem.features.packed:
        raise ValueError(
            "return_attn_probs is True, and cu_seqlens_q is given; the probabilities of packed sequences "
            "make no array"
        )
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    _log.info("attn_probs takes %s bytes", f"{prod(sizes) * DTYPES[problem.dtype].itemsize:,}")
    return sizes


def axes(layout: str) -> tuple[int, ...]:
    """The axes of `shape`, in the order in which a layout has (batch, heads, seqlen)."""
    batch, seqlen, heads = check_layout(layout)
    order = {batch: 0, heads: 1, seqlen: 2, 3: 3}
    return tuple(order[axis] for axis in range(4))


@np.errstate(all="ignore")
def write(q: Array, k: Array, lse: Array, probs: Array, **options: Any) -> None:
    """Write P = exp(S - LSE), with dropout applied as before the product with V; 0 where a key is not seen.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        lse: (batch, heads, seqlen_q).
        probs: written, (batch, heads, seqlen_q, seqlen_k).
        options: the fields of `cufa.score_rules.Rules`.
    """
    rules = Rules(**options)
    dtype, heads = lse.dtype, q.shape[2]
    probs[...] = 0
    for sequence in rules.sequences(q, k):
        queries, keys = sequence.queries(q), sequence.used_keys(k)
        for h in range(heads):
            head = rules.of_head(sequence, h, heads)
            K = keys[:, h // (heads // k.shape[2])].astype(dtype)
            P, L = probs[sequence.number, h], lse[sequence.number, h]
            for first in range(0, len(queries), tiles.Q_TILE):
                rows = slice(first, min(first + tiles.Q_TILE, len(queries)))
                Q = np.multiply(queries[rows, h], rules.softmax_scale, dtype=dtype)
                for columns, visible in head.visible_tiles(rows, tiles.KV_TILE):
                    P[rows, columns] = _tile(head, Q @ K[columns].T, L[rows, None], rows, columns, visible)


def _tile(head: HeadRules, S: Array, lse: Array, rows: slice, columns: slice, visible: Array | None) -> Array:
    """P for a tile of Q K^T."""
    head.cap(S)
    head.add(S, rows, columns)
    head.modify(S, rows, columns)
    P: Array = np.exp(S - np.where(np.isneginf(lse), 0, lse))  # if the LSE is -inf, so are all scores
    if visible is not None:
        np.copyto(P, 0, where=~visible)  # even if it is NaN
    kept = head.kept(rows, columns)
    if kept is not None:
        P *= head.kept_scale
        np.copyto(P, 0, where=~kept)
    return P
