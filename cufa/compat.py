"""cufa under the names of other libraries, for code that was written for them.

Each function takes that library's arguments, in its order and with its meaning, and calls `cufa.attention`.
What differs is said in its docstring: there is no automatic differentiation of NumPy or CuPy arrays, so
gradients come from `cufa.attention_backward`, with the LSE that each of these functions can return.

    from cufa.compat import flash_attn_func
"""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cufa.api import attention
from cufa.arguments import check_flags, check_window
from cufa.arrays import kind_of
from cufa.rotary import rotary

# What another library calls cufa's arguments, where it has other names.
_FLASH_ATTN = {"window": "window_size"}
_FLASH_ATTN_VARLEN = {**_FLASH_ATTN, "return_lse": "return_attn_probs"}
_FLASH_ATTN_CACHE = {
    **_FLASH_ATTN,
    **{"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "return_lse": "return_softmax_lse"},
}
_TENSORS = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
_PYTORCH = {**_TENSORS, "mask": "attn_mask", "bias": "attn_mask"}
_JAX = {**_TENSORS, "window": "local_window_size", "return_lse": "return_residual"}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seed: int = 0,
    offset: int = 0,
) -> Any:
    """flash-attn's function of that name (flash-attn 2.8).

    What differs: `seed` and `offset` choose the random numbers of dropout, where flash-attn takes them from
    torch's generator; `deterministic` is about gradients and has no part in the forward;
    `return_attn_probs` returns (out, lse, probabilities), the probabilities as `cufa.attention` defines
    them, where flash-attn returns their signs too; the LSE of a row that sees no key is -inf, flash-attn's
    is inf. Head dims and dtypes are cufa's.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: which part of the probabilities is dropped.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        causal: bottom-right aligned.
        window_size: (left, right), -1 for no limit.
        softcap: 0 for none.
        alibi_slopes: (heads,) or (batch, heads), float32.
        deterministic: has no effect here; give it to `cufa.attention_backward`.
        return_attn_probs: whether to return the LSE and the probabilities too.
        seed: of dropout's random numbers.
        offset: which sequence of them.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with return_attn_probs (out, lse, probabilities).

    Raises:
        What `cufa.attention` raises.
    """
    return _attention(
        _FLASH_ATTN,
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_qkvpacked_func(qkv: Any, *options: Any, **named_options: Any) -> Any:
    """flash-attn's function of that name (flash-attn 2.8): q, k and v in one array, read where they lie.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim).
        options: those of `flash_attn_func` that follow v, in its order.
        named_options: the same by their names.

    Returns:
        What `flash_attn_func` returns.

    Raises:
        ValueError: qkv of another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    return flash_attn_func(*_unpacked("qkv", qkv, 3), *options, **named_options)


def flash_attn_kvpacked_func(q: Any, kv: Any, *options: Any, **named_options: Any) -> Any:
    """flash-attn's function of that name (flash-attn 2.8): k and v in one array, read where they lie.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, kv_heads, head_dim).
        options: those of `flash_attn_func` that follow v, in its order.
        named_options: the same by their names.

    Returns:
        What `flash_attn_func` returns.

    Raises:
        ValueError: kv of another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    return flash_attn_func(q, *_unpacked("kv", kv, 2), *options, **named_options)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    seqused_k: Any = None,
    seed: int = 0,
    offset: int = 0,
) -> Any:
    """flash-attn's function of that name (flash-attn 2.8), for packed sequences.

    What differs, beside what differs in `flash_attn_func`: `max_seqlen_q` and `max_seqlen_k` are not
    needed and not looked at; with `return_attn_probs` the result is (out, lse), since probabilities of
    sequences of many lengths make no array.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim); with a block table (pages, page_size, kv_heads, head_dim).
        v: the same for the values.
        cu_seqlens_q: (batch + 1,) int32, where each sequence of q begins, and the last ends.
        cu_seqlens_k: (batch + 1,) int32, the same for k and v; with a block table the differences are how
            many keys each sequence has.
        max_seqlen_q: not looked at.
        max_seqlen_k: not looked at.
        dropout_p: as in `flash_attn_func`; likewise the options below.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`, aligned within each sequence.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: whether to return the LSE too, (heads, tokens).
        block_table: (batch, pages) int32, the pages of each sequence, as of `cufa.attention`.
        seqused_k: (batch,) int32, how many keys of each sequence count.
        seed: as in `flash_attn_func`.
        offset: as in `flash_attn_func`.

    Returns:
        out (tokens, heads, head_dim); with return_attn_probs (out, lse).

    Raises:
        What `cufa.attention` raises.
    """
    if block_table is not None:
        _check_arrays(cu_seqlens_k=cu_seqlens_k)
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    return _attention(
        _FLASH_ATTN_VARLEN,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
        causal=causal,
        window=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        return_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash-attn's function of that name (flash-attn 2.8), for decoding with a cache of keys and values.

    `k` and `v` are written to the cache, behind what it holds, and then seen like the rest of it. With
    `rotary_cos` and `rotary_sin` q and k are turned first (`cufa.rotary`): a key by its place in the cache; a
    query by that of the key at which it stands if the mask is causal or a window, else by how many keys the
    cache holds.

    What differs: what comes after `v` is given by name; there is no padding on the left (`cache_leftpad`);
    `num_splits` is not looked at, as the plan chooses it; the LSE of a row that sees no key is -inf. Pages
    may be of any size.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch, seqlen_cache, kv_heads, head_dim), with a block table (pages, page_size, kv_heads,
            head_dim); of a kind that can be written to if k is given.
        v_cache: the same for the values.
        k: (batch, seqlen_new, kv_heads, head_dim), what is to be written to the cache; None for nothing.
        v: the same for v_cache; given if k is.
        rotary_cos: (places, rotary_dim / 2), of q's dtype or float32; places for all keys. Only with k.
        rotary_sin: the same; given if rotary_cos is.
        cache_seqlens: how many keys the cache holds, without those of k: a number, or (batch,) int32; None
            for all that it has room for. On a GPU the numbers of an array are not checked: there must be
            room for k.
        cache_batch_idx: (batch,) int32, which of the cache each sequence has; None for one after the other.
            Not with a block table. No two may have the same if k is given.
        block_table: (batch, pages) int32, the pages of each sequence, as of `cufa.attention`; those that k is
            written to must be there.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        causal: the last query stands at the last key that the cache holds, with those of k.
        window_size: (left, right), -1 for no limit.
        softcap: 0 for none.
        rotary_interleaved: whether pairs are columns 2 i and 2 i + 1, not i and i + rotary_dim / 2.
        alibi_slopes: (heads,) or (batch, heads), float32.
        num_splits: not looked at.
        return_softmax_lse: whether to return the LSE too.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with return_softmax_lse a pair of that and the LSE,
        (batch, heads, seqlen_q).

    Raises:
        TypeError: what `cufa.attention` raises, or a cache of a kind that cannot be written to.
        ValueError: k without v or without cache_seqlens, rotary_cos without rotary_sin or k, shapes that do
            not fit the cache, a number of keys that it has no room for, or what `cufa.attention` and
            `cufa.rotary` raise.
    """
    _check_arrays(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    _, room, _, _ = _shape("k_cache", k_cache)
    _shape("v_cache", v_cache)
    batch = len(k_cache)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx is given, and block_table is, which says where all keys are")
        _check_arrays(cache_batch_idx=cache_batch_idx)
        if len(cache_batch_idx.shape) != 1:
            raise ValueError(f"cache_batch_idx has shape {tuple(cache_batch_idx.shape)}; it must be (batch,)")
        block_table = cache_batch_idx[:, None]  # what the cache has of a sequence is a page
    if block_table is not None:
        _check_arrays(block_table=block_table)
        if len(block_table.shape) != 2:
            raise ValueError(f"block_table has shape {tuple(block_table.shape)}; it must be (batch, pages)")
        batch, pages = block_table.shape
        room *= pages
    held = cache_seqlens
    if isinstance(held, (int, np.integer)):
        held = int(held)
        if not 0 <= held <= room:
            raise ValueError(f"cache_seqlens is {held}; k_cache has room for 0 to {room}")
    else:
        _check_arrays(cache_seqlens=held)
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved)
    if rotary_cos is not None or rotary_sin is not None:
        in_turn = causal or check_window(window_size, "window_size") != (None, None)
        q, k = _turn(q, k, rotary_cos, rotary_sin, held, in_turn, rotary_interleaved)
    if k is not None or v is not None:
        held = _append(k_cache, v_cache, k, v, held, _Cache(batch, room, block_table))
    if isinstance(held, int):  # as an array, on whose numbers no plan depends
        held = _full(batch, held, q)
    return _attention(
        _FLASH_ATTN_CACHE,
        q,
        k_cache,
        v_cache,
        seqused_k=held,
        block_table=block_table,
        causal=causal,
        window=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )


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
    seed: int = 0,
    offset: int = 0,
    return_lse: bool = False,
) -> Any:
    """PyTorch's torch.nn.functional.scaled_dot_product_attention (torch 2.11).

    The layout is PyTorch's, (batch, heads, seqlen, head_dim), and so is the causal mask: it is aligned to
    the top-left corner, query i sees the keys j <= i, unlike anywhere else in cufa. With 2 queries and 5
    keys it is

        here, top-left    cufa.attention, bottom-right
        1 0 0 0 0         1 1 1 1 0
        1 1 0 0 0         1 1 1 1 1

    A row that sees no key has output 0, as PyTorch's has since version 2.5. What differs: arrays must have
    4 axes; `seed`, `offset` and `return_lse` are cufa's.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, kv_heads, seqlen_k, head_dim).
        value: (batch, kv_heads, seqlen_k, value_dim).
        attn_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k), but for the last axis: bool, True to
            take part, or floats to add to the scores.
        dropout_p: which part of the probabilities is dropped.
        is_causal: top-left aligned; not together with attn_mask.
        scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        enable_gqa: whether kv_heads may be fewer than heads.
        seed: of dropout's random numbers.
        offset: which sequence of them.
        return_lse: also return the LSE, (batch, heads, seqlen_q).

    Returns:
        (batch, heads, seqlen_q, value_dim), of the dtype and kind of query.

    Raises:
        ValueError: is_causal with attn_mask, fewer kv_heads without enable_gqa, or what `cufa.attention`
            raises.
        TypeError: what `cufa.attention` raises.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal is True and attn_mask is given; only one of them may be")
    _check_arrays(query=query, key=key, value=value, attn_mask=attn_mask)
    _, heads, seqlen_q, _ = _shape("query", query)
    _, kv_heads, keys, _ = _shape("key", key)
    _shape("value", value)
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; with enable_gqa=True they may differ")
    options: dict[str, Any] = {}
    if is_causal:
        keys, options = _top_left(seqlen_q, keys, None, 0)
    if attn_mask is not None:
        options["mask" if _is_bool(attn_mask) else "bias"] = attn_mask
    return _attention(
        _PYTORCH,
        query,
        key[:, :, :keys],
        value[:, :, :keys],
        softmax_scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        layout="bhsd",
        return_lse=return_lse,
        **options,
    )


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
    """JAX's jax.nn.dot_product_attention (jax 0.8).

    The layout is (batch, seqlen, heads, head_dim), and the causal mask and the window are JAX's, aligned to
    the top-left corner: query i stands at key i, whatever the lengths are.

    What differs: arrays must have 4 axes; a row that sees no key has output 0, where JAX without cuDNN has
    the mean of the values; the residual, the LSE, has cufa's shape; `implementation` is not looked at.

    Args:
        query: (batch, seqlen_q, heads, head_dim).
        key: (batch, seqlen_k, kv_heads, head_dim).
        value: (batch, seqlen_k, kv_heads, head_dim).
        bias: added to the scores, broadcastable to (batch, heads, seqlen_q, seqlen_k) but for the last axis.
        mask: bool, True to take part, broadcastable likewise.
        scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        is_causal: top-left aligned.
        query_seq_lengths: (batch,) integers; outputs of later queries are 0.
        key_value_seq_lengths: (batch,) integers; later keys are not seen.
        local_window_size: (left, right), or one number for both: how far from key i query i sees.
        implementation: not looked at.
        return_residual: also return the LSE, (batch, heads, seqlen_q).

    Returns:
        (batch, seqlen_q, heads, head_dim), of the dtype and kind of query; with return_residual a pair of
        that and the LSE.

    Raises:
        What `cufa.attention` raises.
    """
    check_flags(is_causal=is_causal)
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    _check_arrays(query=query, key=key, value=value, bias=bias, mask=mask, **lengths)
    if mask is not None and not _is_bool(mask):
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool")
    batch, seqlen_q, _, _ = _shape("query", query)
    _, seqlen_k, _, _ = _shape("key", key)
    _shape("value", value)
    for name, array in lengths.items():
        if array is not None and tuple(array.shape) != (batch,):
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; it must be (batch,), which is ({batch},)"
            )
    left, right = _window_of(local_window_size)
    if is_causal:
        right = 0
    keys, options = _top_left(seqlen_q, seqlen_k, left, right)
    if bias is not None:
        options["bias"] = bias[..., :keys]
    masks = [] if mask is None else [mask[..., :keys]]
    xp = _namespace(query)
    if key_value_seq_lengths is not None:
        masks.append(_arange(keys, query)[None, None, None, :] < key_value_seq_lengths[:, None, None, None])
    if "window" not in options and (left, right) != (None, None):
        places = _arange(keys, query)[None, :] - _arange(seqlen_q, query)[:, None]
        near = places >= (-seqlen_q if left is None else -left)
        masks.append(near if right is None else near & (places <= right))
    if masks:
        options["mask"] = functools.reduce(operator.and_, masks)
    result = _attention(
        _JAX,
        query,
        key[:, :keys],
        value[:, :keys],
        softmax_scale=scale,
        return_lse=return_residual,
        **options,
    )
    if query_seq_lengths is None:
        return result
    out, *residual = result if return_residual else (result,)
    inside = _arange(seqlen_q, query)[None, :, None, None] < query_seq_lengths[:, None, None, None]
    out = xp.where(inside, out, xp.zeros_like(out))
    return (out, *residual) if return_residual else out


def _unpacked(name: str, packed: Any, count: int) -> list[Any]:
    """The arrays in one that has them along its axis 2; ValueError if it does not have so many."""
    _check_arrays(**{name: packed})
    shape = tuple(packed.shape)
    if len(shape) != 5 or shape[2] != count:
        raise ValueError(f"{name} has shape {shape}; it must be (batch, seqlen, {count}, heads, head_dim)")
    return [packed[:, :, i] for i in range(count)]


class _Cache(NamedTuple):
    """Of how many sequences a cache has keys, for how many each has room, and in which pages if in any."""

    batch: int
    room: int
    block_table: Any


def _check_held(held: Any, batch: int) -> None:
    """ValueError unless how many keys a cache holds is a number, or one for each sequence."""
    if not isinstance(held, int) and tuple(held.shape) != (batch,):
        raise ValueError(f"cache_seqlens has shape {tuple(held.shape)}; it must be ({batch},)")


def _turn(q: Any, k: Any, cos: Any, sin: Any, held: Any, in_turn: bool, interleaved: bool) -> tuple[Any, Any]:
    """q and k as `rotary` turns them behind `held` keys; the queries each by its own place if `in_turn`.

    Raises ValueError for what is missing or does not fit, as `rotary` does, and TypeError.
    """
    given = {"rotary_cos": cos, "rotary_sin": sin, "k": k, "cache_seqlens": held}
    missing = [name for name, what in given.items() if what is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, too, to turn queries and keys")
    batch, queries, _, _ = _shape("q", q)
    _check_held(held, batch)
    first = held if isinstance(held, int) else held[:, None]

    def turned(name: str, x: Any, count: int) -> Any:
        try:
            return rotary(x, cos, sin, positions=first + _arange(count, x)[None], interleaved=interleaved)
        except (TypeError, ValueError) as error:
            names = {"x": name, "cos": "rotary_cos", "sin": "rotary_sin", "positions": "cache_seqlens"}
            raise _renamed(error, names) from None

    return turned("q", q, queries if in_turn else 1), turned("k", k, _shape("k", k)[1])


def _append(k_cache: Any, v_cache: Any, k: Any, v: Any, held: Any, cache: _Cache) -> Any:
    """Write k and v to the caches, behind the `held` keys of each sequence; returns how many those are then.

    Raises ValueError for what is missing, does not fit or has no room, TypeError for another dtype.
    """
    given = {"k": k, "v": v, "cache_seqlens": held}
    missing = [name for name, what in given.items() if what is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, too, to write to the cache")
    batch, room, block_table = cache
    _, count, _, _ = _shape("k", k)
    for name, new, of in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (batch, count, *of.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(new.shape)}; for {name}_cache it must be {wanted}")
        if new.dtype != of.dtype:
            raise TypeError(f"{name} has dtype {new.dtype}; as {name}_cache it must be {of.dtype}")
    _check_held(held, batch)
    lengths = np.atleast_1d(held) if isinstance(held, (int, np.ndarray)) else np.empty(0)
    if np.any((lengths < 0) | (lengths + count > room)):
        raise ValueError(f"cache_seqlens is {held} and k has {count} keys; k_cache has room for {room}")
    if isinstance(held, int) and block_table is None:
        place: Any = np.s_[:, held : held + count]
    else:
        first = held if isinstance(held, int) else held[:, None]
        sequence, key = _arange(batch, k_cache)[:, None], first + _arange(count, k_cache)[None]
        place = sequence, key
        if block_table is not None:
            page_size = k_cache.shape[1]
            place = block_table[sequence, key // page_size], key % page_size
    k_cache[place] = k
    v_cache[place] = v
    return held + count


def _attention(names: Mapping[str, str], q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`cufa.attention`, whose errors call arguments what the caller calls them."""
    try:
        return attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        raise _renamed(error, names) from None


def _renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error, in whose message arguments have other names."""
    words = r"\b(" + "|".join(names) + r")\b"
    error.args = (re.sub(words, lambda word: names[word[0]], str(error)),)
    return error


def _check_arrays(**named: Any) -> None:
    """TypeError for what is no array; None is what is not given."""
    for name, array in named.items():
        if array is not None and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(
                f"{name} is {kind_of(array)}; it may be a NumPy array, a CuPy array or any array with DLPack"
            )


def _shape(name: str, array: Any) -> tuple[int, int, int, int]:
    """That of an array that must have 4 axes."""
    shape = tuple(array.shape)
    if len(shape) != 4:
        raise ValueError(f"{name} has shape {shape}; it must have 4 axes")
    return shape


def _is_bool(array: Any) -> bool:
    """Also of a library that has dtypes of its own."""
    return str(array.dtype).rpartition(".")[2] == "bool"


def _window_of(local_window_size: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """The keys before and after; ValueError for less than none, TypeError for what is no number."""
    if local_window_size is None:
        return None, None
    is_pair = isinstance(local_window_size, (tuple, list))
    sides: Any = local_window_size if is_pair else (local_window_size, local_window_size)
    wanted = f"local_window_size is {local_window_size!r}; it may be a number of keys, a pair of them or None"
    try:
        left, right = map(operator.index, sides)
    except TypeError:
        raise TypeError(wanted) from None
    except ValueError:  # more or fewer than two
        raise ValueError(wanted) from None
    if min(left, right) < 0:
        raise ValueError(f"{wanted}, each at least 0")
    return left, right


def _top_left(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> tuple[int, dict[str, Any]]:
    """The range of keys around key i that query i sees, in terms of a diagonal that ends in the last corner.

    Returns how many keys, from the first on, anyone sees at all, and with only those the window. There is
    none if no query is limited, or if no window says it: where the last queries see nothing.
    """
    keys = seqlen_k if right is None else min(seqlen_k, seqlen_q + right)
    shift = keys - seqlen_q  # from the one diagonal to the other
    ends = (
        None if left is None else left + shift,
        None if right is None else right - shift,
    )
    if ends == (None, None) or any(end is not None and end < 0 for end in ends):
        return keys, {}
    return keys, {"window": ends}


def _namespace(array: Any) -> Any:
    """The library of an array, which has NumPy's functions."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def _arange(stop: int, beside: Any) -> Any:
    """The numbers from 0 to stop - 1, in an array of that one's library on its device."""
    return _namespace(beside).arange(stop, **_device_of(beside))


def _full(count: int, value: int, beside: Any) -> Any:
    """A number that often, as int32, likewise."""
    xp = _namespace(beside)
    return xp.full((count,), value, dtype=xp.int32, **_device_of(beside))


def _device_of(array: Any) -> dict[str, Any]:
    """What other libraries than NumPy and CuPy want to be told to make an array beside that one."""
    return {} if _namespace(array).__name__ in ("numpy", "cupy") else {"device": array.device}
