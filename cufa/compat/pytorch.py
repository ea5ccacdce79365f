"""PyTorch's attention function."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arguments import check_flags
from cufa.compat.arguments import (
    OR_WITHOUT_BATCH,
    TENSORS,
    attend_without_batch,
    attention_as,
    check_arrays,
    check_values,
    dropout_of,
    for_each_key,
    given,
    shape_of,
    top_left,
)
from cufa.messages import counted
from cufa.problem import DTYPES, dtype_name, dtype_of
from cufa.untraced import untraced

_PYTORCH = {**TENSORS, "mask": "attn_mask", "bias": "attn_mask"}
_AXES = "(batch, heads, seqlen, head_dim)"


@untraced
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: int | None = None,
    offset: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention with the arguments of PyTorch's function of this name (torch 2.11 to 2.14).

    The layout is (batch, heads, seqlen, head_dim), or the same without the batch. As in PyTorch, but nowhere
    else in cufa except `dot_product_attention`, the causal mask is aligned to the top-left corner: query i
    sees the keys j <= i. With 2 queries and 5 keys:

        here, top-left    cufa.attention, bottom-right
        1 0 0 0 0         1 1 1 1 0
        1 1 0 0 0         1 1 1 1 1

    A row that sees no key has output 0, as in PyTorch since version 2.5. Differences: arrays must have 4
    axes or these 3; of query, key and value, only heads are broadcast, and these by `enable_gqa` alone, as
    many for values as for keys; head dims and dtypes are cufa's; `dropout_p` must be below 1; `seed`,
    `offset` and `return_lse` are cufa's. With dropout, a seed or an offset is required; without a new one in
    every call, each drops the same elements. torch.autocast has no effect: a call computes in the dtype of
    its arrays, and converts none to that of another.

    For gradients, pass the LSE to `cufa.attention_backward` with layout="bhsd". After a call that is causal
    from the top left, with at most as many queries as keys, pass key[:, :, :seqlen_q] and
    value[:, :, :seqlen_q] with causal=True; gradients of the other keys are 0. After one with more queries,
    pass window=(None, seqlen_q - seqlen_k).

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, kv_heads, seqlen_k, head_dim).
        value: (batch, kv_heads, seqlen_k, value_dim).
        attn_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k): bool, True where a query sees a key,
            or floats that are added to the scores. Or a causal bias of torch.nn.attention.bias, for as many
            queries and keys.
        dropout_p: fraction of the probabilities that is dropped.
        is_causal: causal mask, aligned to the top left; not together with attn_mask.
        scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        enable_gqa: allow fewer kv_heads than heads.
        seed: seed of dropout's random numbers.
        offset: which random sequence of that seed to use.
        return_lse: also return the LSE, (batch, heads, seqlen_q).

    Returns:
        (batch, heads, seqlen_q, value_dim), with the dtype and library of query. With return_lse, a pair of
        this and the LSE.

    Raises:
        ValueError: is_causal with attn_mask, a causal bias for other lengths, kv_heads other than heads
            without enable_gqa, dropout without a seed or an offset, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal is True and attn_mask is given; only one of them may be")
    dropout_p, seed, offset = dropout_of(dropout_p, seed, offset)
    check_arrays(query=query, key=key, value=value)
    if len(query.shape) == len(key.shape) == len(value.shape) == 3:
        options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        options |= {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse}
        options |= {"seed": seed, "offset": offset}
        return attend_without_batch(scaled_dot_product_attention, query, key, value, **options)
    causal_bias, attn_mask = (attn_mask, None) if _is_causal_bias(attn_mask) else (None, attn_mask)
    check_arrays(**given(attn_mask=attn_mask))
    tensors = {"query": query, "key": key, "value": value}
    q_shape, k_shape, _ = (shape_of(name, x, _AXES, OR_WITHOUT_BATCH) for name, x in tensors.items())
    (_, heads, seqlen_q, _), (_, kv_heads, keys, _) = q_shape, k_shape
    check_values(value, key)
    if not enable_gqa and heads != kv_heads:
        are_grouped = kv_heads > 0 and heads % kv_heads == 0
        allowed = "with enable_gqa=True they may differ" if are_grouped else "they must be the same"
        raise ValueError(
            f"query has {counted(heads, 'head')} and key {kv_heads}; {allowed} (query has shape {q_shape} "
            f"and key {k_shape}, read as {_AXES})"
        )
    options = {}
    if causal_bias is not None:
        lengths = causal_bias.seq_len_q, causal_bias.seq_len_kv
        if lengths != (seqlen_q, keys):
            raise ValueError(
                f"attn_mask is a causal bias of {lengths[0]} queries x {lengths[1]} keys; it must be of "
                f"{seqlen_q} x {keys}"
            )
        if causal_bias.variant.name == "UPPER_LEFT":
            is_causal = True
        else:
            options["causal"] = True
    if is_causal:
        keys, options = top_left(seqlen_q, keys, None, 0)
    if attn_mask is not None:
        dtype = dtype_of(attn_mask)
        if dtype != np.bool_:
            dtype_name(dtype, "attn_mask", ("bool", *DTYPES))
        options["mask" if dtype == np.bool_ else "bias"] = for_each_key(attn_mask, keys)
    return attention_as(
        _PYTORCH,
        query,
        key[:, :, :keys, :],
        value[:, :, :keys, :],
        softmax_scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        layout="bhsd",
        return_lse=return_lse,
        **options,
    )


def _is_causal_bias(attn_mask: Any) -> bool:
    """Whether this is torch's CausalBias, a tensor that names a mask and whose memory holds nothing."""
    kind = type(attn_mask)
    return (kind.__module__, kind.__name__) == ("torch.nn.attention.bias", "CausalBias")
