"""flash-attn's function for decoding with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from cufa.arguments import check_flags, check_window
from cufa.arrays import adopt_in_place, check_outputs, check_same_kind, check_writeable, check_written, on_cpu
from cufa.compat.appending import becomes_8_bits, prepare
from cufa.compat.arguments import (
    also_named,
    arange,
    as_sink,
    attention_as,
    check_arrays,
    check_attention_as,
    check_int32,
    check_values,
    descales_of,
    full,
    given,
    numbers_of,
    refuse,
    shape_of,
)
from cufa.messages import counted
from cufa.problem import FLOAT8, FLOAT8_OUTPUTS, INPUT_DTYPES, dtype_of, integer, one_of
from cufa.untraced import untraced

# The names that flash-attn gives to cufa's arguments, where they differ.
_NAMES = {
    "k": "k_cache",
    "v": "v_cache",
    "window": "window_size",
    "seqused_k": "cache_seqlens",
    "return_lse": "return_softmax_lse",
    "sink": "learnable_sink",
}


@untraced
@also_named(s_aux="learnable_sink", page_table="block_table", return_lse="return_softmax_lse")
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
    cache_leftpad: Any = None,
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
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    learnable_sink: Any = None,
    s_aux: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
    qv: Any = None,
    attention_chunk: int = 0,
    rotary_seqlens: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Decode with a cache of keys and values, with flash-attn's arguments (flash-attn 2.8).

    The cache may have 8 bits, with q in 8 or 16. New keys `k` and values `v` are appended to the cache, then
    seen like the rest of it. If they have 16 bits and the cache 8, they are divided by the cache's descales
    and rounded (`cufa.quantize`). With `rotary_cos` and `rotary_sin`, q and k are first rotated
    (`cufa.rotary`): a key by its position in the cache. With a causal mask or a window, query i is rotated by
    position cache_seqlens + i, otherwise every query by position cache_seqlens.

    Of flash-attn 3 it also takes, by name after `v`, since its order is another: `page_table`, the descales,
    `scheduler_metadata`, `pack_gqa`, `sm_margin`, `cu_seqlens_q` and `max_seqlen_q` without new keys, and
    with their defaults alone `qv`, `attention_chunk` and `rotary_seqlens`: for other values, the error says
    what to do instead. `learnable_sink` is flash-attn 4's, and `s_aux`, `fa_version` and `out` are vLLM's.

    Differences: `num_splits` is ignored, since the plan chooses it. The LSE is cufa's: as `flash_attn_func`
    says, flash-attn's is another in rows that see no key and with `alibi_slopes`. A window is one however
    long it is; flash-attn takes one of the cache's length or more for none, and then rotates queries by one
    position. Pages may have any size, and padding on their left.

    A call that is captured into a CUDA graph must take its memory from a pool of the graph's own
    (examples/graph.py): what it allocates on the way returns to the pool, but the graph keeps using it.

    Args:
        q: (batch, seqlen_q, heads, head_dim); with cu_seqlens_q (tokens, heads, head_dim).
        k_cache: (batch or more, seqlen_cache, kv_heads, head_dim), with a block table (pages, page_size,
            kv_heads, head_dim). With k, it must be writable and must not overlap another array: write rows to
            a cache of which v_cache is a part, as in multi-head latent attention, before the call.
        v_cache: the same for the values.
        k: (batch, seqlen_new, kv_heads, head_dim), keys to append to the cache; None for none.
        v: the same for v_cache; required with k.
        rotary_cos: (places, rotary_dim / 2), in q's dtype or float32 (float64 for float64 arrays), with
            places for all keys. Only with k, and with q and k in 16 bits or more.
        rotary_sin: the same; required with rotary_cos.
        cache_seqlens: how many keys the cache holds, without those of k: a number, or (batch,) int32; None
            for a full cache. On a GPU the numbers of an array are not checked: k must fit, and if a number
            exceeds the cache, all keys in the cache count.
        cache_batch_idx: (batch,) int32, the cache entry of each sequence; None for 0, 1, 2, ... Not with a
            block table. With k, no two sequences may share an entry. Each entry is read as a page, so each
            length of a cache has kernels of its own, which are compiled at its first use.
        cache_leftpad: (batch,) int32, how many keys at the beginning of each sequence are padding, which no
            query sees; cache_seqlens and positions count them. On a GPU the numbers are not checked.
        block_table: (batch, pages) int32, the pages of each sequence, as in `cufa.attention`, including the
            pages that k is written to, each of which takes keys of one sequence only.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        causal: causal mask; the last query is aligned with the last key in the cache, counting those of k.
        window_size: (left, right), -1 for no limit.
        softcap: 0 for none.
        rotary_interleaved: pairs are columns 2 i and 2 i + 1 instead of i and i + rotary_dim / 2.
        alibi_slopes: (heads,) or (batch, heads), float32 (float64 for float64 arrays).
        num_splits: ignored.
        return_softmax_lse: also return the LSE.
        page_table: another name of block_table.
        cu_seqlens_q: (batch + 1,) int32, for packed queries: offsets, not lengths, where those of each
            sequence start, and where the last end. Not with k. Without a block table, each cache entry is
            read as a page, as with cache_batch_idx.
        max_seqlen_q: as in `cufa.attention`; used only with cu_seqlens_q, and if it is an int.
        cu_seqlens_k_new: only None with k; ignored without.
        q_descale: (batch, kv_heads) float32, for float8_e4m3fn arrays: the factor for q; None for 1. Ignored
            for others.
        k_descale: the same for k_cache, and for k in 8 bits, which is copied to it unchanged.
        v_descale: the same for v_cache and v.
        learnable_sink: `sink` of `cufa.attention`, (heads,), here also in bfloat16 or float16.
        s_aux: another name of learnable_sink.
        pack_gqa: ignored.
        sm_margin: ignored.
        scheduler_metadata: ignored.
        fa_version: ignored.
        qv: only None.
        attention_chunk: only 0.
        rotary_seqlens: only None.
        out: where to write the output, as in `cufa.attention`.
        return_lse: another name of return_softmax_lse.

    Returns:
        out, shaped like q except for the last axis, which is that of v_cache. With return_softmax_lse, a pair
        of this and the LSE, (batch, heads, seqlen_q), with cu_seqlens_q (heads, tokens).

    Raises:
        TypeError: what `cufa.attention` raises, or a cache from a library whose arrays cannot be written.
        ValueError: k without v or without cache_seqlens, rotary_cos without rotary_sin or k, k with
            cu_seqlens_q, an argument by both of its names, shapes that do not fit the cache, more keys than
            it has room for, on the CPU a place for keys of two sequences, a cache to write to that overlaps
            another array, or what `cufa.attention` and `cufa.rotary` raise.
        In all these cases, nothing has been written.
    """
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved)
    is_written, is_packed = k is not None or v is not None, cu_seqlens_q is not None
    refuse(
        qv=qv,
        attention_chunk=attention_chunk,
        rotary_seqlens=rotary_seqlens,
        cu_seqlens_k_new=cu_seqlens_k_new if is_written else None,
    )
    if is_packed and is_written:
        raise ValueError(
            "cu_seqlens_q is given, and k is; give q as (batch, seqlen_q, heads, head_dim), or write the new "
            "keys and values to the cache before the call"
        )
    descales = descales_of((q, k_cache, v_cache), q_descale, k_descale, v_descale)
    held = _number_of(cache_seqlens) if isinstance(cache_seqlens, Real) else cache_seqlens
    check_arrays(q=q, k_cache=k_cache, v_cache=v_cache)
    if cache_batch_idx is None and block_table is None and not is_packed:
        k_cache, v_cache = _first_entries(q, k_cache, v_cache)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | given(
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=None if isinstance(held, int) else held,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        **descales,
        learnable_sink=as_sink(learnable_sink),
        out=out,
    )
    if is_written:
        adopted = adopt_in_place(arrays)
    else:
        check_arrays(**arrays)
        check_same_kind(arrays)
    batch = _packed_batch(cu_seqlens_q) if is_packed else shape_of("q", q)[0]
    names, table, room = _places(arrays, batch)
    if isinstance(held, int):
        if not 0 <= held <= room:
            raise ValueError(f"cache_seqlens is {held}; k_cache has room for 0 to {room}")
    elif held is not None:
        check_int32("cache_seqlens", held, (batch,))
    options = {
        "causal": causal,
        "window": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "return_lse": return_softmax_lse,
    }
    side = {"alibi_slopes": alibi_slopes, "sink": arrays.get("learnable_sink"), **descales}
    side |= {"seqused_k": held, "block_table": table, "out": out}
    if is_packed:
        side["cu_seqlens_q"] = cu_seqlens_q
        side["max_seqlen_q"] = max_seqlen_q if isinstance(max_seqlen_q, Integral) else None
    if cache_leftpad is not None:
        side["mask"] = _right_of(cache_leftpad, q, batch, room)
    is_rotated = rotary_cos is not None or rotary_sin is not None
    if is_rotated:
        _check_given(
            "to turn queries and keys",
            **{"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "k": k, "cache_seqlens": held},
        )
        for name, rotated in (("q", q), ("k", k)):
            if dtype_of(rotated) == INPUT_DTYPES[FLOAT8]:
                raise TypeError(f"{name} has dtype {FLOAT8}; with rotary_cos it must have 16 bits or more")
    if not is_written:
        _check_fits("cache_seqlens", held, room)
        if isinstance(held, int):  # plans do not depend on the numbers in an array
            side["seqused_k"] = full((batch,), held, "int32", q)
        return attention_as(names, q, k_cache, v_cache, **side, **options)

    _check_new(arrays, held, batch, room)
    check_written(
        adopted,
        ("k_cache", "v_cache"),
        instead="write the new keys and values to a cache of your own, and call without k and v",
    )
    in_turn = causal or check_window(window_size, "window_size") != (None, None)
    if is_rotated:
        _check_angles(rotary_cos, held, max(q.shape[1] if in_turn else 1, k.shape[1]))
    new = prepare(arrays, adopted, held, bool(in_turn), bool(rotary_interleaved))
    side["seqused_k"] = new.seqused_k
    check_attention_as(names, new.q, k_cache, v_cache, **side, **options)  # before anything is written
    if out is not None:
        check_outputs(adopted, ("out",))
    if table is not None:
        has = "block_table has page" if cache_batch_idx is None else "cache_batch_idx has"
        _check_apart(has, table, held, k.shape[1], k_cache.shape[1])
    new.write()
    adopted.count_writes(k_cache, v_cache)  # the kernel's; indices would count theirs themselves
    return attention_as(names, new.q, k_cache, v_cache, **side, **options)


def _first_entries(q: Any, k_cache: Any, v_cache: Any) -> tuple[Any, Any]:
    """The entries of caches for the sequences of q, if they have more.

    Raises ValueError if they have fewer, or not equally many; what else is wrong is left to other checks.
    """
    shapes = [array.shape for array in (q, k_cache, v_cache)]
    if not all(len(shape) == 4 for shape in shapes) or not hasattr(type(k_cache), "__getitem__"):
        return k_cache, v_cache
    batch, of_keys, of_values = (shape[0] for shape in shapes)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[0] < batch:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}; it must have at least q's batch, {batch}"
            )
    if of_keys != of_values:
        check_values(v_cache, k_cache, ("v_cache", "k_cache"))
    if of_keys == batch:
        return k_cache, v_cache
    return k_cache[:batch, ...], v_cache[:batch, ...]


def _packed_batch(cu_seqlens_q: Any) -> int:
    """How many sequences there are; raises ValueError if it does not have one axis."""
    shape = tuple(cu_seqlens_q.shape)
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"cu_seqlens_q has shape {shape}; it must be (batch + 1,)")
    return int(shape[0]) - 1


def _number_of(cache_seqlens: Real) -> int:
    try:
        return integer(cache_seqlens)
    except TypeError:
        wanted = f"cache_seqlens is {cache_seqlens}; it may be an integer, or (batch,) of int32"
        raise TypeError(wanted) from None


def _places(arrays: Mapping[str, Any], batch: int) -> tuple[Mapping[str, str], Any, int]:
    """Where the keys of sequences are: the names of arguments, a block table if any, and the room of each.

    Raises TypeError or ValueError if a cache, a block table or a list of entries does not fit.
    """
    pages, entries = arrays.get("block_table"), arrays.get("cache_batch_idx")
    axes = {} if pages is None else {"axes": "(pages, page_size, kv_heads, head_dim)"}
    cached, room, _, _ = shape_of("k_cache", arrays["k_cache"], **axes)
    shape_of("v_cache", arrays["v_cache"], **axes)
    if pages is None and entries is None and "cu_seqlens_q" in arrays:
        if cached < batch:
            raise ValueError(
                f"k_cache has {counted(cached, 'sequence')} and cu_seqlens_q {batch}; it must have at least "
                "as many"
            )
        entries = arange(batch, arrays["k_cache"], "int32")
    if entries is not None:
        if pages is not None:
            raise ValueError("cache_batch_idx is given, and block_table is, which says where all keys are")
        check_int32("cache_batch_idx", entries, (batch,))
        check_values(arrays["v_cache"], arrays["k_cache"], ("v_cache", "k_cache"))
        if room == 0:
            raise ValueError(
                "k_cache has no room for keys; with cache_batch_idx or cu_seqlens_q it must have some"
            )
        for wrong in _outside("cache_batch_idx", entries, cached):
            raise ValueError(f"{wrong}; k_cache has {counted(cached, 'sequence')}")
        # Each entry of the cache is one page.
        return {**_NAMES, "block_table": "cache_batch_idx"}, entries[:, None, ...], room
    if pages is not None:
        if len(pages.shape) != 2:
            raise ValueError(f"block_table has shape {tuple(pages.shape)}; it must be (batch, pages)")
        room *= pages.shape[1]
    return _NAMES, pages, room


def _right_of(padding: Any, q: Any, batch: int, room: int) -> Any:
    """A mask for the `room` keys of each sequence that hides those of its padding; raises as a check."""
    check_int32("cache_leftpad", padding, (batch,))
    _check_fits("cache_leftpad", padding, room)
    return (arange(room, q) >= padding[:, None, ...])[:, None, None, ...]


def _check_given(for_what: str, **needed: Any) -> None:
    """Raise ValueError for arguments that are None."""
    missing = [name for name, what in needed.items() if what is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, too, {for_what}")


def _check_new(arrays: Mapping[str, Any], held: Any, batch: int, room: int) -> None:
    """Check that caches with `room` keys per sequence can take k and v after the `held` keys.

    Raises ValueError for missing arguments, wrong shapes or no room, TypeError for another dtype.
    """
    _check_given("to write to the cache", k=arrays.get("k"), v=arrays.get("v"), cache_seqlens=held)
    check_writeable(arrays, ("k_cache", "v_cache"))
    _, count, _, _ = shape_of("k", arrays["k"])
    for name in ("k", "v"):
        new, cache = arrays[name], arrays[f"{name}_cache"]
        wanted = (batch, count, *cache.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(new.shape)}; for {name}_cache it must be {wanted}")
        if new.dtype != cache.dtype and not becomes_8_bits(new, cache):
            allowed = f"as {name}_cache it must be {cache.dtype}"
            if dtype_of(cache) == INPUT_DTYPES[FLOAT8]:
                allowed = f"for {name}_cache it may be {one_of((FLOAT8, *FLOAT8_OUTPUTS))}"
            raise TypeError(f"{name} has dtype {new.dtype}; {allowed}")
    for wrong in _outside("cache_seqlens", held, room - count + 1):
        raise ValueError(f"{wrong} and k has {counted(count, 'key')}; k_cache has room for {room}")


def _check_angles(cos: Any, held: Any, new: int) -> None:
    """Raise ValueError unless there are places for `new` tokens after the `held` keys.

    Check nothing of an array on a GPU, and leave another shape to `cufa.rotary`.
    """
    if len(cos.shape) != 2:
        return
    for wrong in _outside("cache_seqlens", held, cos.shape[0] - new + 1):
        raise ValueError(
            f"{wrong}; with {counted(new, 'new token')} after that, rotary_cos has only {cos.shape[0]} places"
        )


def _check_apart(has: str, table: Any, held: Any, count: int, page_size: int) -> None:
    """Raise ValueError if `count` keys after the `held` ones go to one page twice; check nothing on a GPU."""
    pages = on_cpu(table, "block_table")
    if pages is None or count == 0:
        return
    first = numbers_of("cache_seqlens", held)[:, None]
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


def _check_fits(name: str, counts: Any, room: int) -> None:
    """Raise ValueError if a count of keys is not 0 to `room`; check nothing of an array on a GPU."""
    for wrong in _outside(name, counts, room + 1):
        raise ValueError(f"{wrong}; k_cache has room for 0 to {room}")


def _outside(name: str, value: Any, end: int) -> Iterator[str]:
    """Say of the numbers that are not in 0 to end - 1 what they are; nothing of None or of those on a GPU."""
    if value is None:
        return
    numbers = numbers_of(name, value)
    if numbers.size:
        for b in np.flatnonzero((numbers < 0) | (numbers >= end)):
            yield f"{name} is {numbers[b]}" + ("" if isinstance(value, int) else f" for sequence {b}")
