"""Attention and its gradients in NumPy, for machines without a GPU.

Works by tiles, or on many short heads at once. Arrays may have any strides. The caller ensures that shapes
and dtypes match.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cufa.cpu import stacks, tiles
from cufa.cpu.arithmetic import Array
from cufa.cpu.tiles import softmax
from cufa.score_rules import Rules, Sequence
from cufa.threads import most_threads

__all__ = ["attention", "attention_backward", "softmax", "stacks", "tiles"]

# With fewer scores than this, the work is done before other threads have started.
PARALLEL_SCORES = 2**20
# With fewer in each thread, threads wait longer for Python's lock than they compute.
SCORES_OF_THREAD = 2**18
# For calls without gradients of score_mod arrays.
_NO_ARRAYS: Mapping[str, Array] = MappingProxyType({})


@np.errstate(all="ignore")
def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    *,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    **options: Any,
) -> None:
    """Write attention and its log-sum-exp.

    A key that is not seen contributes nothing, even if it is NaN or Inf. Arrays of packed sequences have no
    batch axis. With a block table, k and v are (pages, page_size, kv_heads, dim).

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32, float64 or float8_e4m3fn.
        k: (batch, seqlen_k, kv_heads, head_dim), like q or float8_e4m3fn; query head h reads KV head
            h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, head_dim_v), like k.
        out: written, (batch, seqlen_q, heads, head_dim_v), any of these dtypes; 0 where a row sees no key.
        lse: written unless None, (batch, heads, seqlen_q), float32, for float64 arrays float64; natural
            logarithm; where a row sees no key, the sink or -inf.
        q_descale: (batch, kv_heads), factors for q; None for 1.
        k_descale: the same for k.
        v_descale: the same for v.
        options: the fields of `cufa.score_rules.Rules`.

    Raises:
        ValueError: invalid cu_seqlens, seqused_k or block table, or a bias or a mask that is too short for a
            sequence.
    """
    rules = Rules(**options)
    sequences = rules.sequences(q, k)
    how = rules, sequences, _threads(sequences, q.shape[-2])
    plain = q_descale is None and k_descale is None and v_descale is None
    stacked = plain and stacks.suit(q, k, rules, sequences)
    if not (stacked and stacks.attention(q, k, v, out, lse, *how)):
        tiles.attention(
            q, k, v, out, lse, *how, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )


@np.errstate(all="ignore")
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    dlse: Array | None = None,
    dbias: Array | None = None,
    dsink: Array | None = None,
    dscore_mod: Mapping[str, Array] = _NO_ARRAYS,
    **options: Any,
) -> None:
    """Write the gradients, recomputing P from Q, K and LSE.

    Args:
        dout: (batch, seqlen_q, heads, head_dim_v), the gradient of out.
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        out: the output of `attention`.
        lse: the LSE from `attention`.
        dq: written, shaped like q; 0 where a row sees no key.
        dk: written, shaped like k; summed over the query heads that share a KV head.
        dv: written, shaped like v; summed likewise.
        dlse: (batch, heads, seqlen_q), the gradient of lse; None for 0.
        dbias: written unless None, shaped like the bias; summed over broadcast axes.
        dsink: written unless None, (heads,).
        dscore_mod: written, shaped like the arrays that score_mod reads, by their names in a call; summed
            over the scores that read an element.
        options: as in `attention`.

    Raises:
        ValueError: as `attention`.
    """
    rules = Rules(**options)
    sequences = rules.sequences(q, k)
    how = rules, sequences, _threads(sequences, q.shape[-2])
    arrays = (dout, q, k, v, out, lse, dq, dk, dv)
    plain = dbias is None and dsink is None and not dscore_mod
    stacked = plain and stacks.suit(q, k, rules, sequences)
    if not (stacked and stacks.attention_backward(*arrays, *how, dlse=dlse)):
        tiles.attention_backward(*arrays, *how, dlse=dlse, dbias=dbias, dsink=dsink, dscore_mod=dscore_mod)


def _threads(sequences: list[Sequence], heads: int) -> int:
    scores = heads * sum(sequence.scores for sequence in sequences)
    return 1 if scores < PARALLEL_SCORES else min(most_threads(), scores // SCORES_OF_THREAD)
