"""JAX's attention function."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from cufa.arguments import check_broadcast, check_flags
from cufa.arrays import check_same_kind, namespace_of
from cufa.compat.arguments import (
    OR_WITHOUT_BATCH,
    TENSORS,
    arange,
    as_integers,
    attend_without_batch,
    attention_as,
    check_arrays,
    check_values,
    for_each_key,
    given,
    placed,
    shape_of,
    top_left,
)
from cufa.messages import shown
from cufa.problem import dtype_of, integer
from cufa.untraced import untraced

_JAX = {**TENSORS, "window": "local_window_size", "return_lse": "return_residual"}
# JAX's implementations.
_KNOWN = ("xla", "cudnn")


@untraced
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention with the arguments of jax.nn.dot_product_attention (jax 0.8 to 0.10).

    The layout is (batch, seqlen, heads, head_dim), or the same without the batch. As in JAX, the causal mask
    and the window are aligned to the top-left corner: query i is aligned with key i, whatever the lengths.

    Differences: a row that sees no key has output 0, while JAX without cuDNN returns the mean of the values;
    limits of a window must not be negative; all arrays must be of one library, not lists or numbers, but
    those beside query, key and value may be NumPy's, which are then copied; head dims and dtypes are cufa's,
    also that of a bias; `implementation` has no effect. It cannot be called inside jax.jit, jax.vmap or
    jax.grad, except by jax.pure_callback.

    For gradients, pass the residual to `cufa.attention_backward` with its last axes swapped, as (batch,
    heads, seqlen_q). There, causal masks and windows are aligned to the bottom right. After a causal call
    with at most as many queries as keys, pass key[:, :seqlen_q] and value[:, :seqlen_q] with causal=True;
    gradients of the other keys are 0. After one with more queries, pass window=(None, seqlen_q - seqlen_k).

    Args:
        query: (batch, seqlen_q, heads, head_dim).
        key: (batch, seqlen_k, kv_heads, head_dim).
        value: (batch, seqlen_k, kv_heads, head_dim).
        bias: added to the scores, broadcastable to (batch, heads, seqlen_q, seqlen_k).
        mask: bool, True where a query sees a key, broadcastable likewise.
        scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        is_causal: causal mask, aligned to the top left.
        query_seq_lengths: (batch,) integers; outputs of later queries are 0, and their LSE is -inf, as for a
            row that sees no key.
        key_value_seq_lengths: (batch,) integers; later keys are not seen.
        local_window_size: (left, right), or one number for both: how far from key i query i sees.
        implementation: None, "xla" or "cudnn", which all do the same here.
        return_residual: also return the LSE, (batch, seqlen_q, heads), with cufa's dtype.

    Returns:
        (batch, seqlen_q, heads, head_dim), with the dtype and library of query. With return_residual, a pair
        of this and the LSE.

    Raises:
        ValueError: another implementation, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    check_flags(is_causal=is_causal)
    if implementation is not None and not (isinstance(implementation, str) and implementation in _KNOWN):
        raise ValueError(f"implementation is {shown(implementation)}; it may be 'xla', 'cudnn' or None")
    tensors = {"query": query, "key": key, "value": value}
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    check_arrays(**tensors, **given(bias=bias, mask=mask, **lengths))
    check_same_kind(tensors)
    bias, mask, query_seq_lengths, key_value_seq_lengths = (
        placed(array, query) for array in (bias, mask, *lengths.values())
    )
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    of_scores, lengths = given(bias=bias, mask=mask), given(**lengths)
    check_same_kind({"query": query, **of_scores, **lengths})
    if mask is not None and dtype_of(mask) != np.bool_:
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool")
    if len(query.shape) == len(key.shape) == len(value.shape) == 3:
        options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, **of_scores, **lengths}
        options |= {"local_window_size": local_window_size, "return_residual": return_residual}
        return attend_without_batch(dot_product_attention, query, key, value, **options)
    shapes = [shape_of(name, array, otherwise=OR_WITHOUT_BATCH) for name, array in tensors.items()]
    (batch, seqlen_q, heads, _), (_, seqlen_k, _, _), _ = shapes
    check_values(value, key)
    bias, mask = (None if array is None else for_each_key(array, seqlen_k) for array in (bias, mask))
    for name, array in given(bias=bias, mask=mask).items():
        check_broadcast(name, tuple(array.shape), (batch, heads, seqlen_q, seqlen_k))
    for name, array in lengths.items():
        if tuple(array.shape) != (batch,):
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; it must be (batch,), which is ({batch},)"
            )
        if dtype_of(array).kind not in "iu":
            raise TypeError(f"{name} has dtype {array.dtype}; it must be of integers")
    left, right = _window_of(local_window_size, seqlen_q, seqlen_k)
    if is_causal:
        right = 0
    keys, options = top_left(seqlen_q, seqlen_k, left, right)
    if bias is not None:
        options["bias"] = bias[..., :keys]
    masks = [] if mask is None else [mask[..., :keys]]
    xp = namespace_of(query)
    if key_value_seq_lengths is not None:
        masks.append(arange(keys, query)[None, None, None, :] < key_value_seq_lengths[:, None, None, None])
    if "window" not in options and (left, right) != (None, None):
        places = arange(keys, query)[None, :] - arange(seqlen_q, query)[:, None]
        near = places >= (-seqlen_q if left is None else -left)
        masks.append(near if right is None else near & (places <= right))
    if masks:
        options["mask"] = functools.reduce(operator.and_, masks)
    result = attention_as(
        _JAX,
        query,
        key[:, :keys, :, :],
        value[:, :keys, :, :],
        softmax_scale=scale,
        return_lse=return_residual,
        **options,
    )
    out, lse = result if return_residual else (result, None)
    if query_seq_lengths is not None:
        inside = arange(seqlen_q, query)[None, :, None, None] < query_seq_lengths[:, None, None, None]
        bits = as_integers(out)  # CuPy would make bfloat16 float32
        kept = xp.where(inside, bits, xp.zeros_like(bits))
        out = kept if bits is out else kept.view(out.dtype)
        if lse is not None:
            # Rows that have output 0 see no key: otherwise their weight in `cufa.merge` would be wrong.
            lse = xp.where(inside[:, None, :, 0, 0], lse, xp.full_like(lse, -np.inf))
    return out if lse is None else (out, xp.moveaxis(lse, -1, -2))


def _window_of(
    local_window_size: int | tuple[int, int] | None, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """Return the keys before and after, None for all; raise ValueError or TypeError for other values."""
    if local_window_size is None:
        return None, None
    is_pair = isinstance(local_window_size, (tuple, list))
    sides: Any = local_window_size if is_pair else (local_window_size, local_window_size)
    wanted = (
        f"local_window_size is {shown(local_window_size)}; it may be a number of keys, a pair of them or None"
    )
    try:
        left, right = map(integer, sides)
    except TypeError:
        raise TypeError(wanted) from None
    except ValueError:  # more or fewer than two
        raise ValueError(wanted) from None
    if min(left, right) < 0:
        raise ValueError(f"{wanted}, each at least 0")
    return None if left >= seqlen_q else left, None if right >= seqlen_k else right
