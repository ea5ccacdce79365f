"""flash-attn's functions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np

from cufa.arguments import check_flags
from cufa.compat.arguments import (
    also_named,
    as_sink,
    attention_as,
    check_arrays,
    check_int32,
    descales_of,
    dropout_of,
    numbers_of,
    refuse,
)
from cufa.messages import counted, renamed
from cufa.untraced import untraced

# The names that flash-attn gives to cufa's arguments, where they differ.
_FLASH_ATTN = {"window": "window_size", "sink": "learnable_sink"}
# What flash-attn 3 and 4 have in the place of `dropout_p`.
_MEANT_SCALE = "; if softmax_scale is meant, give it by name"


@untraced
@also_named(s_aux="learnable_sink", return_softmax_lse="return_lse")
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
    learnable_sink: Any = None,
    s_aux: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    qv: Any = None,
    attention_chunk: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    seed: int | None = None,
    offset: int | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention with the arguments of flash-attn's function of this name (flash-attn 2.8).

    Of flash-attn 3 and 4 it also takes, by name, `learnable_sink` (or `s_aux`), `num_splits`, `pack_gqa`,
    `sm_margin`, `q_descale`, `k_descale`, `v_descale` and `return_lse` (or `return_softmax_lse`); and with
    their defaults alone `qv`, `attention_chunk`, `score_mod`, `mask_mod` and `aux_tensors`: for other values,
    the error says what to do instead. Pass all of their arguments after `v` by name: their order is another,
    and the fourth is `dropout_p` here. Pass `return_lse=True` where they return a pair: flash-attn 3 with
    `return_attn_probs`, 4 always.

    Differences: `seed` and `offset` choose dropout's random numbers, which flash-attn takes from torch's
    generator: with dropout one of them is required, and must be new in every call, or each drops the same
    elements. `deterministic` only concerns gradients and has no effect here. The LSE of a row that sees no
    key is -inf, in flash-attn inf. With `alibi_slopes`, flash-attn's LSE is larger by
    slope * (i + seqlen_k - seqlen_q) in row i if nothing but later keys is hidden, by `causal` or
    window_size=(-1, 0). flash-attn takes a window of seqlen_k or more for none, also for queries whose window
    begins before the first key. With dropout, `return_attn_probs` returns the probabilities as
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
        alibi_slopes: (heads,) or (batch, heads), float32 (float64 for float64 arrays).
        deterministic: no effect here; pass it to `cufa.attention_backward`.
        return_attn_probs: also return the LSE and, with dropout, the probabilities, which take O(N^2) memory.
        learnable_sink: `sink` of `cufa.attention`, (heads,), here also in bfloat16 or float16.
        s_aux: another name of learnable_sink.
        num_splits: ignored, since the plan chooses it.
        pack_gqa: ignored, likewise.
        sm_margin: ignored: kernels may use all SMs.
        q_descale: as in `cufa.attention`, for float8_e4m3fn arrays; ignored for others. Likewise the next
            two.
        k_descale: the same for k.
        v_descale: the same for v.
        qv: only None.
        attention_chunk: only 0.
        score_mod: only None.
        mask_mod: only None.
        aux_tensors: only None.
        seed: seed of dropout's random numbers.
        offset: which random sequence of that seed to use.
        return_lse: also return the LSE, (batch, heads, seqlen_q); not together with return_attn_probs.
        return_softmax_lse: another name of return_lse.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with return_lse (out, lse), with return_attn_probs
        (out, lse, probabilities or None).

    Raises:
        ValueError: both return_lse and return_attn_probs, an argument by both of its names, dropout without
            a seed or an offset, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    _check_returned(return_attn_probs, return_lse)
    refuse(
        qv=qv,
        attention_chunk=attention_chunk,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
    )
    sink = as_sink(learnable_sink)
    dropout_p, seed, offset = dropout_of(dropout_p, seed, offset, _MEANT_SCALE)
    has_probabilities = return_attn_probs and dropout_p > 0
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
        sink=sink,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        return_lse=return_attn_probs or return_lse,
        return_attn_probs=has_probabilities,
        **descales_of((q, k, v), q_descale, k_descale, v_descale),
    )
    return (*result, None) if return_attn_probs and not has_probabilities else result


@untraced
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
    with _errors_about_packed("flash_attn_qkvpacked_func", "qkv"):
        return flash_attn_func(
            *_unpacked("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)"), *options, **named_options
        )


@untraced
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
    with _errors_about_packed("flash_attn_kvpacked_func", "kv"):
        k, v = _unpacked("kv", kv, "(batch, seqlen_k, 2, kv_heads, head_dim)")
        return flash_attn_func(q, k, v, *options, **named_options)


@untraced
@also_named(s_aux="learnable_sink", page_table="block_table", q_v="qv", return_softmax_lse="return_lse")
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
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
    page_table: Any = None,
    seqused_k: Any = None,
    learnable_sink: Any = None,
    s_aux: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    qv: Any = None,
    q_v: Any = None,
    seqused_q: Any = None,
    attention_chunk: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    out: Any = None,
    seed: int | None = None,
    offset: int | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention of packed sequences with flash-attn's arguments (flash-attn 2.8).

    Of flash-attn 3 and 4 it also takes, by name after `v`, what `flash_attn_func` does, besides `seqused_k`,
    `page_table` and `scheduler_metadata`, and `seqused_q` if it is None. Pass vLLM's arguments all by name,
    since its order is another, too; of them it also takes `fa_version`, `out`, and `q_v` if it is None.

    Differences, besides those of `flash_attn_func`: `max_seqlen_q` and `max_seqlen_k` are optional; there are
    no probabilities even with dropout, since those of sequences of different lengths do not form an array.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim); with a block table (pages, page_size, kv_heads, head_dim).
        v: the same for the values.
        cu_seqlens_q: (batch + 1,) int32: offsets, not lengths, where each sequence of q starts, and where the
            last ends.
        cu_seqlens_k: (batch + 1,) int32, the same for k and v. With a block table, the differences are the
            number of keys of each sequence. On a GPU these are not checked: if the pages have room for
            fewer, all keys in them count.
        max_seqlen_q: as in `cufa.attention`; used only if it is an int.
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
        page_table: another name of block_table.
        seqused_k: (batch,) int32: how many keys of each sequence count, all if it has fewer. With a block
            table it takes the place of cu_seqlens_k, and one of the two is required.
        learnable_sink: as in `flash_attn_func`.
        s_aux: another name of learnable_sink.
        num_splits: ignored.
        pack_gqa: ignored.
        sm_margin: ignored.
        scheduler_metadata: ignored.
        fa_version: ignored.
        q_descale: as in `flash_attn_func`; likewise the next two.
        k_descale: as in `flash_attn_func`.
        v_descale: as in `flash_attn_func`.
        qv: only None.
        q_v: another name of qv.
        seqused_q: only None.
        attention_chunk: only 0.
        score_mod: only None.
        mask_mod: only None.
        aux_tensors: only None.
        out: where to write the output, as in `cufa.attention`.
        seed: as in `flash_attn_func`.
        offset: as in `flash_attn_func`.
        return_lse: also return the LSE; not together with return_attn_probs.
        return_softmax_lse: another name of return_lse.

    Returns:
        out (tokens, heads, head_dim); with return_lse (out, lse), with return_attn_probs (out, lse, None).

    Raises:
        ValueError: what `flash_attn_func` raises; on the CPU, a sequence with more keys than its pages have
            room for.
        TypeError: what `cufa.attention` raises.
    """
    _check_returned(return_attn_probs, return_lse)
    refuse(
        qv=qv,
        seqused_q=seqused_q,
        attention_chunk=attention_chunk,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
    )
    check_arrays(cu_seqlens_q=cu_seqlens_q)
    dropout_p, seed, offset = dropout_of(dropout_p, seed, offset, _MEANT_SCALE)
    sink = as_sink(learnable_sink)
    names = _FLASH_ATTN
    if block_table is None:
        check_arrays(cu_seqlens_k=cu_seqlens_k)
    else:
        if cu_seqlens_k is None and seqused_k is None:
            raise ValueError(
                "block_table is given; how many keys there are, cu_seqlens_k or seqused_k must say"
            )
        if cu_seqlens_k is not None:
            check_int32("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
        if seqused_k is None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
            _check_ends_of_keys_in_pages(cu_seqlens_k, k, block_table)
            names = {**names, "seqused_k": "cu_seqlens_k"}
        cu_seqlens_k = None
    # Reading a max_seqlen_q from the GPU would need a synchronization.
    longest = max_seqlen_q if isinstance(max_seqlen_q, Integral) else None
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
        sink=sink,
        dropout_p=dropout_p,
        seed=seed,
        offset=offset,
        return_lse=return_attn_probs or return_lse,
        out=out,
        **descales_of((q, k, v), q_descale, k_descale, v_descale),
    )
    return (*result, None) if return_attn_probs else result


@untraced
def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int | None = None, *options: Any, **named_options: Any
) -> Any:
    """Call `flash_attn_varlen_func` with q, k and v in one array, as in flash-attn 2.8.

    Args:
        qkv: (tokens, 3, heads, head_dim), read in place.
        cu_seqlens: (batch + 1,) int32: offsets, not lengths, where each sequence starts, and where the last
            ends.
        max_seqlen: optional.
        options: the arguments of `flash_attn_varlen_func` after max_seqlen_k, in order.
        named_options: the same by name.

    Returns:
        What `flash_attn_varlen_func` returns.

    Raises:
        ValueError: qkv has another shape, or what `cufa.attention` raises.
        TypeError: what `cufa.attention` raises.
    """
    names = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
    with _errors_about_packed("flash_attn_varlen_qkvpacked_func", "qkv", **names):
        q, k, v = _unpacked("qkv", qkv, "(tokens, 3, heads, head_dim)")
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named_options
        )


@untraced
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
    with _errors_about_packed("flash_attn_varlen_kvpacked_func", "kv"):
        k, v = _unpacked("kv", kv, "(tokens, 2, kv_heads, head_dim)")
        return flash_attn_varlen_func(q, k, v, *options, **named_options)


def _check_returned(return_attn_probs: bool, return_lse: bool) -> None:
    """Raise TypeError for what is no flag, ValueError for both, which ask for different results."""
    check_flags(return_attn_probs=return_attn_probs, return_lse=return_lse)
    if return_attn_probs and return_lse:
        raise ValueError("return_lse and return_attn_probs are both True; only one of them may be")


def _check_ends_of_keys_in_pages(cu_seqlens_k: Any, k: Any, block_table: Any) -> None:
    """Raise ValueError if ends fall or are beyond the room in a sequence's pages; check nothing on a GPU."""
    check_arrays(k=k, block_table=block_table)
    if len(k.shape) != 4 or len(block_table.shape) != 2:
        return  # `attention` refuses these shapes
    pages, page_size = block_table.shape[1], k.shape[1]
    ends = numbers_of("cu_seqlens_k", cu_seqlens_k)
    lengths = np.diff(ends)
    for b in np.flatnonzero(lengths < 0):
        raise ValueError(f"cu_seqlens_k falls from {ends[b]} to {ends[b + 1]} in sequence {b}; it must not")
    for count in lengths[lengths > pages * page_size]:
        raise ValueError(
            f"cu_seqlens_k has a sequence of {counted(count, 'key')}; block_table has room for "
            f"{pages * page_size} in {counted(pages, 'page')} of {page_size}"
        )


@contextlib.contextmanager
def _errors_about_packed(function: str, packed: str, **names: str) -> Iterator[None]:
    """Let errors about parts of "qkv" or "kv" name that array, and others by `names`.

    If they show shapes, which are those of the parts, they say which part. Python's errors about arguments
    that there are not, or are given twice, name the function that was called.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        of_parts = {
            part: f"{packed}[..., {i}, :, :]" if "shape" in str(error) else packed
            for i, part in enumerate(packed)
        }
        error.args = (re.sub(r"^\w+\(\) got", f"{function}() got", str(error)),)
        raise renamed(error, names | of_parts) from None


def _unpacked(name: str, packed: Any, axes: str) -> list[Any]:
    """Split the axis after the tokens into the arrays that the letters of the name stand for.

    Raises ValueError if it has another length, or the array not these `axes`.
    """
    check_arrays(**{name: packed})
    shape, count = tuple(packed.shape), len(name)
    if len(shape) != len(axes.split(",")) or shape[-3] != count:
        raise ValueError(f"{name} has shape {shape}; it must be {axes}")
    return [packed[..., i, :, :] for i in range(count)]
