"""flash-attn's functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from cufa.arguments import (
    check_descales,
    check_dropout,
    check_flags,
    check_window,
)
from cufa.arrays import adopt_in_place, check_same_kind, check_writeable, check_written, on_cpu
from cufa.compat.appending import append
from cufa.compat.arguments import (
    arange,
    attention_as,
    check_arrays,
    check_attention_as,
    check_int32,
    full,
    given,
    shape_of,
)
from cufa.messages import counted, renamed
from cufa.problem import FLOAT8, FLOAT8_OUTPUTS, INPUT_DTYPES, dtype_of, integer
from cufa.quantizing import quantize
from cufa.rotary import rotary

# The names that flash-attn gives to cufa's arguments, where they differ.
_FLASH_ATTN = {"window": "window_size"}
_FLASH_ATTN_CACHE = {
    **_FLASH_ATTN,
    **{"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "return_lse": "return_softmax_lse"},
}


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
    """Compute attention with the arguments of flash-attn's function of this name (flash-attn 2.8).

    Differences: `seed` and `offset` choose dropout's random numbers, which flash-attn takes from torch's
    generator; `deterministic` only concerns gradients and has no effect here; the LSE of a row that sees no
    key is -inf, in flash-attn inf. With dropout, `return_attn_probs` returns the probabilities as
    `cufa.attention` defines them, without flash-attn's signs; without dropout it returns None, and flash-attn
    an empty array. Head dims and dtypes are cufa's.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: fraction of the probabilities that is dropped.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        causal: causal mask, aligned to the bottom right.
        window_size: (left, right), -1 for no limit.
        softcap: 0 for none.
        alibi_slopes: (heads,) or (batch, heads), float32.
        deterministic: no effect here; pass it to `cufa.attention_backward`.
        return_attn_probs: also return the LSE and, with dropout, the probabilities, which take O(N^2) memory.
        seed: seed of dropout's random numbers.
        offset: which random sequence of that seed to use.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with return_attn_probs (out, lse, probabilities or None).

    Raises:
        What `cufa.attention` raises.
    """
    check_flags(return_attn_probs=return_attn_probs)
    has_probabilities = return_attn_probs and check_dropout(dropout_p, seed, offset)[0] > 0
    result = attention_as(
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
        return_lse=return_attn_probs,
        return_attn_probs=has_probabilities,
    )
    return (*result, None) if return_attn_probs and not has_probabilities else result


def flash_attn_qkvpacked_func(qkv: Any, *options: Any, **named_options: Any) -> Any:
    """Call `flash_attn_func` with q, k and v in one array, read in place, as in flash-attn 2.8.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim).
        options: the arguments of `flash_attn_func` after v, in order.
        named_options: the same by name.

    Returns:
        What `flash_attn_func` returns.

    Raises:
        ValueError: qkv has another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    with _errors_about("qkv"):
        return flash_attn_func(*_unpacked("qkv", qkv), *options, **named_options)


def flash_attn_kvpacked_func(q: Any, kv: Any, *options: Any, **named_options: Any) -> Any:
    """Call `flash_attn_func` with k and v in one array, read in place, as in flash-attn 2.8.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, kv_heads, head_dim).
        options: the arguments of `flash_attn_func` after v, in order.
        named_options: the same by name.

    Returns:
        What `flash_attn_func` returns.

    Raises:
        ValueError: kv has another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    with _errors_about("kv"):
        return flash_attn_func(q, *_unpacked("kv", kv), *options, **named_options)


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
    """Compute attention of packed sequences with flash-attn's arguments (flash-attn 2.8).

    Differences, besides those of `flash_attn_func`: `max_seqlen_q` and `max_seqlen_k` are optional; there are
    no probabilities even with dropout, since those of sequences of different lengths do not form an array.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim); with a block table (pages, page_size, kv_heads, head_dim).
        v: the same for the values.
        cu_seqlens_q: (batch + 1,) int32: where each sequence of q starts, and where the last ends.
        cu_seqlens_k: (batch + 1,) int32, the same for k and v. With a block table, the differences are the
            number of keys of each sequence. On a GPU these are not checked: if the pages have room for
            fewer, all keys in them count.
        max_seqlen_q: as in `cufa.attention`; used only with a block table and if it is an int.
        max_seqlen_k: ignored.
        dropout_p: as in `flash_attn_func`; likewise the options below.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`, aligned within each sequence.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: also return the LSE, (heads, tokens).
        block_table: (batch, pages) int32, the pages of each sequence, as in `cufa.attention`.
        seqused_k: (batch,) int32: how many keys of each sequence count, at most all that it has.
        seed: as in `flash_attn_func`.
        offset: as in `flash_attn_func`.

    Returns:
        out (tokens, heads, head_dim); with return_attn_probs (out, lse, None).

    Raises:
        ValueError: on the CPU, a sequence with more keys than its pages have room for; or what
            `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    check_flags(return_attn_probs=return_attn_probs)
    check_arrays(cu_seqlens_q=cu_seqlens_q)
    names = _FLASH_ATTN
    if block_table is None:
        check_arrays(cu_seqlens_k=cu_seqlens_k)
    else:
        if cu_seqlens_k is not None:
            check_int32("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
            _check_room_in_pages(seqused_k, k, block_table)
            names = {**names, "seqused_k": "cu_seqlens_k"}
        cu_seqlens_k = None
    # Reading a max_seqlen_q from the GPU would need a synchronization.
    longest = max_seqlen_q if block_table is not None and isinstance(max_seqlen_q, Integral) else None
    result = attention_as(
        names,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
        max_seqlen_q=longest,
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
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int | None = None, *options: Any, **named_options: Any
) -> Any:
    """Call `flash_attn_varlen_func` with q, k and v in one array, as in flash-attn 2.8.

    Args:
        qkv: (tokens, 3, heads, head_dim), read in place.
        cu_seqlens: (batch + 1,) int32: where each sequence starts, and where the last ends.
        max_seqlen: optional.
        options: the arguments of `flash_attn_varlen_func` after max_seqlen_k, in order.
        named_options: the same by name.

    Returns:
        What `flash_attn_varlen_func` returns.

    Raises:
        ValueError: qkv has another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    with _errors_about("qkv", cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens"):
        q, k, v = _unpacked("qkv", qkv, "tokens")
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named_options
        )


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, *options: Any, **named_options: Any) -> Any:
    """Call `flash_attn_varlen_func` with k and v in one array, as in flash-attn 2.8.

    Args:
        q: (tokens, heads, head_dim).
        kv: (tokens, 2, kv_heads, head_dim), read in place.
        options: the arguments of `flash_attn_varlen_func` after v, in order, starting with cu_seqlens_q.
        named_options: the same by name.

    Returns:
        What `flash_attn_varlen_func` returns.

    Raises:
        ValueError: kv has another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    with _errors_about("kv"):
        return flash_attn_varlen_func(q, *_unpacked("kv", kv, "tokens"), *options, **named_options)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: None = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """Decode with a cache of keys and values, with flash-attn's arguments (flash-attn 2.8).

    The cache may have 8 bits, with q in 8 or 16. New keys `k` and values `v` are appended to the cache, then
    seen like the rest of it. If they have 16 bits and the cache 8, they are divided by the cache's descales
    and rounded (`cufa.quantize`). With `rotary_cos` and `rotary_sin`, q and k are first rotated
    (`cufa.rotary`): a key by its position in the cache. With a causal mask or a window, query i is rotated by
    position cache_seqlens + i, otherwise every query by position cache_seqlens.

    Differences: there is no padding on the left (`cache_leftpad`); `num_splits` is ignored, since the plan
    chooses it; the LSE of a row that sees no key is -inf. Pages may have any size.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (batch, seqlen_cache, kv_heads, head_dim), with a block table (pages, page_size, kv_heads,
            head_dim). With k, it must be writable and must not overlap another array.
        v_cache: the same for the values.
        k: (batch, seqlen_new, kv_heads, head_dim), keys to append to the cache; None for none.
        v: the same for v_cache; required with k.
        rotary_cos: (places, rotary_dim / 2), in q's dtype or float32, with places for all keys. Only with k,
            and with q in 16 bits or more.
        rotary_sin: the same; required with rotary_cos.
        cache_seqlens: how many keys the cache holds, without those of k: a number, or (batch,) int32; None
            for a full cache. On a GPU the numbers of an array are not checked: k must fit. If a number
            exceeds the cache, all keys in the cache count.
        cache_batch_idx: (batch,) int32, the cache entry of each sequence; None for 0, 1, 2, ... Not with a
            block table. With k, no two sequences may share an entry.
        cache_leftpad: must be None.
        block_table: (batch, pages) int32, the pages of each sequence, as in `cufa.attention`, including the
            pages that k is written to, each of which takes keys of one sequence only.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        causal: causal mask; the last query is aligned with the last key in the cache, counting those of k.
        window_size: (left, right), -1 for no limit.
        softcap: 0 for none.
        rotary_interleaved: pairs are columns 2 i and 2 i + 1 instead of i and i + rotary_dim / 2.
        alibi_slopes: (heads,) or (batch, heads), float32.
        num_splits: ignored.
        return_softmax_lse: also return the LSE.
        q_descale: (batch, kv_heads) float32, for float8_e4m3fn arrays only: the factor for q; None for 1.
        k_descale: the same for k_cache, and for k in 8 bits, which is copied to it unchanged.
        v_descale: the same for v_cache and v.

    Returns:
        out (batch, seqlen_q, heads, head_dim). With return_softmax_lse, a pair of this and the LSE,
        (batch, heads, seqlen_q).

    Raises:
        TypeError: what `cufa.attention` raises, or a cache from a library whose arrays cannot be written.
        ValueError: k without v or without cache_seqlens, rotary_cos without rotary_sin or k, shapes that do
            not fit the cache, more keys than it has room for, on the CPU a place for keys of two sequences, a
            cache to write to that overlaps another array, or what `cufa.attention` and `cufa.rotary` raise.
        In all these cases, nothing has been written.
    """
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad is given; there is no padding on the left of a cache")
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **given(k=k, v=v)}
    check_arrays(**arrays)
    batch, _, _, _ = shape_of("q", q)
    pages = {} if block_table is None else {"axes": "(pages, page_size, kv_heads, head_dim)"}
    _, room, _, _ = shape_of("k_cache", k_cache, **pages)
    shape_of("v_cache", v_cache, **pages)
    names, table = _FLASH_ATTN_CACHE, block_table
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx is given, and block_table is, which says where all keys are")
        check_int32("cache_batch_idx", cache_batch_idx, (batch,))
        names = {**names, "block_table": "cache_batch_idx"}
        table = cache_batch_idx[:, None]  # each entry of the cache is one page
    elif block_table is not None:
        check_arrays(block_table=block_table)
        if len(block_table.shape) != 2:
            raise ValueError(f"block_table has shape {tuple(block_table.shape)}; it must be (batch, pages)")
        room *= block_table.shape[1]
    held = cache_seqlens
    if isinstance(held, Real):
        try:
            held = integer(held)
        except TypeError:
            wanted = f"cache_seqlens is {held}; it may be an integer, or (batch,) of int32"
            raise TypeError(wanted) from None
        if not 0 <= held <= room:
            raise ValueError(f"cache_seqlens is {held}; k_cache has room for 0 to {room}")
    elif held is not None:
        check_int32("cache_seqlens", held, (batch,))
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved)
    check_descales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    arrays |= given(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    arrays |= given(block_table=block_table, alibi_slopes=alibi_slopes, **descales)
    arrays |= {} if isinstance(held, int) else given(cache_seqlens=held)
    check_arrays(**arrays)
    check_same_kind(arrays)
    is_turned = rotary_cos is not None or rotary_sin is not None
    if is_turned:
        _check_given(
            "to turn queries and keys",
            **{"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "k": k, "cache_seqlens": held},
        )
        if dtype_of(q) == INPUT_DTYPES[FLOAT8]:
            raise TypeError(f"q has dtype {FLOAT8}; with rotary_cos it must have 16 bits or more")
    is_written = k is not None or v is not None
    cached = k_cache.shape[0]
    for place in _outside("cache_batch_idx", cache_batch_idx, cached):
        raise ValueError(f"cache_batch_idx has {place}, and k_cache has {counted(cached, 'sequence')}")
    if not is_written and _outside("cache_seqlens", held, room + 1):
        raise ValueError(f"cache_seqlens is {held}; k_cache has room for 0 to {room}")
    seqused_k = held
    if is_written:
        _check_new(k_cache, v_cache, k, v, held, batch, room)
        check_written(adopt_in_place(arrays), ("k_cache", "v_cache"))
        seqused_k = held + k.shape[1]
    if is_turned:
        in_turn = causal or check_window(window_size, "window_size") != (None, None)
        q, k = _turn(q, k, rotary_cos, rotary_sin, held, in_turn, rotary_interleaved)
    if isinstance(seqused_k, int):  # plans do not depend on the numbers in an array
        seqused_k = full((batch,), seqused_k, "int32", q)
    options = {
        "causal": causal,
        "window": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "return_lse": return_softmax_lse,
    }
    side = {"alibi_slopes": alibi_slopes, **descales, "seqused_k": seqused_k, "block_table": table}
    if is_written:
        check_attention_as(names, q, k_cache, v_cache, **side, **options)  # before anything is written
        if table is not None:
            has = "block_table has page" if cache_batch_idx is None else "cache_batch_idx has"
            _check_apart(has, table, held, k.shape[1], k_cache.shape[1])
        _append(k_cache, v_cache, k, v, held, _Cache(batch, table, k_descale, v_descale))
    return attention_as(names, q, k_cache, v_cache, **side, **options)


def _check_room_in_pages(lengths: Any, k: Any, block_table: Any) -> None:
    """Raise ValueError if a sequence has more keys than its pages have room for; check nothing on a GPU."""
    check_arrays(k=k, block_table=block_table)
    if len(k.shape) != 4 or len(block_table.shape) != 2:
        return  # `attention` refuses these shapes
    pages, page_size = block_table.shape[1], k.shape[1]
    lengths = _numbers("cu_seqlens_k", lengths)
    for count in lengths[lengths > pages * page_size]:
        raise ValueError(
            f"cu_seqlens_k has a sequence of {counted(count, 'key')}; block_table has room for "
            f"{pages * page_size} in {counted(pages, 'page')} of {page_size}"
        )


@contextlib.contextmanager
def _errors_about(packed: str, **names: str) -> Iterator[None]:
    """Let errors about parts of "qkv" or "kv" name that array, and others by `names`.

    If they show shapes, which are those of the parts, they say which part.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        for i, part in enumerate(packed):
            names[part] = f"{packed}[..., {i}, :, :]" if "shape" in str(error) else packed
        raise renamed(error, names) from None


def _unpacked(name: str, packed: Any, tokens: str = "batch, seqlen") -> list[Any]:
    """Split the axis after the tokens into the arrays that the letters of the name stand for.

    Raises ValueError if it has another length.
    """
    check_arrays(**{name: packed})
    shape, count = tuple(packed.shape), len(name)
    if len(shape) != 4 + tokens.count(",") or shape[-3] != count:
        raise ValueError(f"{name} has shape {shape}; it must be ({tokens}, {count}, heads, head_dim)")
    return [packed[..., i, :, :] for i in range(count)]


class _Cache(NamedTuple):
    """How many sequences a cache has keys for, its block table if any, and the descales of an 8-bit cache."""

    batch: int
    block_table: Any
    k_descale: Any
    v_descale: Any


def _check_given(for_what: str, **needed: Any) -> None:
    """Raise ValueError for arguments that are None."""
    missing = [name for name, what in needed.items() if what is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, too, {for_what}")


def _turn(q: Any, k: Any, cos: Any, sin: Any, held: Any, in_turn: bool, interleaved: bool) -> tuple[Any, Any]:
    """Apply `rotary` to q and k after `held` keys; each query by its own position if `in_turn`.

    Raises TypeError and ValueError as `rotary` does.
    """
    queries = q.shape[1]
    first = held if isinstance(held, int) else held[:, None]

    new = max(queries if in_turn else 1, k.shape[1])
    if len(cos.shape) == 2 and k.shape[0] and np.any(_numbers("cache_seqlens", held) > cos.shape[0] - new):
        more, places = counted(new, "new token"), cos.shape[0]
        raise ValueError(
            f"cache_seqlens is {held}; with {more} after that, rotary_cos has only {places} places"
        )

    def turned(name: str, x: Any, count: int) -> Any:
        is_first = count == 1 and not isinstance(first, int)  # as in decoding: nothing to compute
        positions = first if is_first else first + arange(count, x)[None]
        try:
            return rotary(x, cos, sin, positions=positions, interleaved=interleaved)
        except (TypeError, ValueError) as error:
            names = {"x": name, "cos": "rotary_cos", "sin": "rotary_sin"}
            raise renamed(error, names) from None

    return turned("q", q, queries if in_turn else 1), turned("k", k, shape_of("k", k)[1])


def _check_new(k_cache: Any, v_cache: Any, k: Any, v: Any, held: Any, batch: int, room: int) -> None:
    """Check that caches with `room` keys per sequence can take k and v after the `held` keys.

    Raises ValueError for missing arguments, wrong shapes or no room, TypeError for another dtype.
    """
    _check_given("to write to the cache", k=k, v=v, cache_seqlens=held)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    check_writeable(caches, caches)
    _, count, _, _ = shape_of("k", k)
    for name, new, of in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (batch, count, *of.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(new.shape)}; for {name}_cache it must be {wanted}")
        if new.dtype != of.dtype and not _becomes_8_bits(new, of):
            raise TypeError(f"{name} has dtype {new.dtype}; as {name}_cache it must be {of.dtype}")
    lengths = _numbers("cache_seqlens", held)
    if np.any((lengths < 0) | (lengths > room - count)):  # lengths + count may overflow int32
        keys = counted(count, "key")
        raise ValueError(f"cache_seqlens is {held} and k has {keys}; k_cache has room for {room}")


def _check_apart(has: str, table: Any, held: Any, count: int, page_size: int) -> None:
    """Raise ValueError if `count` keys after the `held` ones go to one page twice; check nothing on a GPU."""
    pages = on_cpu(table, "block_table")
    if pages is None or count == 0:
        return
    first = _numbers("cache_seqlens", held)[:, None]
    begins = np.arange(pages.shape[1]) * page_size
    written = np.broadcast_to((begins < first + count) & (begins + page_size > first), pages.shape)
    writers: dict[int, int] = {}
    for page, sequence in zip(pages[written].tolist(), np.nonzero(written)[0].tolist(), strict=True):
        if page in writers:
            raise ValueError(
                f"{has} {page} for sequence {writers[page]} and again for sequence {sequence}, and k would "
                "be written to both; each must have its own"
            )
        writers[page] = sequence


def _append(k_cache: Any, v_cache: Any, k: Any, v: Any, held: Any, cache: _Cache) -> None:
    """Write k and v to the caches, after the `held` keys of each sequence; all has been checked."""
    batch, table, *descales = cache
    named = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, **given(block_table=table)}
    for name, descale in zip("kv", descales, strict=True):
        new, of = named[name], named[f"{name}_cache"]
        if _becomes_8_bits(new, of):
            given_or_one = full((batch, of.shape[2]), 1, "float32", new) if descale is None else descale
            named[name], _ = quantize(new, descale=given_or_one)
    append(named, held)


def _numbers(name: str, value: Any) -> Any:
    """A number or the numbers of an array, for checks; none of an array on a GPU, which would take time."""
    numbers = value if isinstance(value, int) else on_cpu(value, name)
    return np.empty(0, np.int32) if numbers is None else np.atleast_1d(numbers)


def _outside(name: str, value: Any, end: int) -> list[int]:
    """The first number that is not in 0 to end - 1, if there is one; no number of None."""
    if value is None:
        return []
    numbers = _numbers(name, value)
    first: list[int] = numbers[(numbers < 0) | (numbers >= end)][:1].tolist()
    return first


def _becomes_8_bits(new: Any, cache: Any) -> bool:
    """Whether new keys or values are rounded to 8 bits for the cache."""
    return dtype_of(cache) == INPUT_DTYPES[FLOAT8] and dtype_of(new).name in FLOAT8_OUTPUTS
