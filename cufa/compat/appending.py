"""Appends new keys and values to a cache, and makes queries ready for them.

On a GPU one launch does it, unless arrays lie so that the kernel cannot read them. Elsewhere `cufa.rotary`,
`cufa.quantize` and the arrays' own library do it step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cufa import arrays, launch
from cufa.arguments import Wanted
from cufa.arrays import Adopted, ArrayInfo
from cufa.call import empty
from cufa.compat.arguments import arange, as_integers, errors_name, full
from cufa.params import NOT_ROTATED, pack_append, pack_rotated
from cufa.plan.companions import Appending
from cufa.problem import DTYPES, FLOAT8, FLOAT8_OUTPUTS, INPUT_DTYPES, LAYOUTS, dtype_of
from cufa.quantizing import quantize
from cufa.rotary import check_angles, rotary
from cufa.tensor_layout import Layout, Storage, is_contiguous, layout_of

_ANGLES = ("rotary_cos", "rotary_sin")
# What those of `cufa.rotary` are called.
_OF_ROTARY = dict(zip(("cos", "sin"), _ANGLES, strict=True))
_LENGTHS = "cache_seqlens"
# What says where the rows of a sequence are: in its pages, or in a page of its own.
_PAGES, _ENTRIES = "block_table", "cache_batch_idx"
# What the kernel reads as it lies only if it is contiguous.
_CONTIGUOUS = (*_ANGLES, "k_descale", "v_descale", _LENGTHS, _PAGES, _ENTRIES)


class Prepared(NamedTuple):
    """What a call with new keys computes attention with, once `write` has been called.

    `q` are the queries, rotated if keys are; `seqused_k` the keys that sequences have, with the new ones.
    `kept` are arrays that must not be freed before.
    """

    q: Any
    seqused_k: Any
    write: Callable[[], None]
    kept: Mapping[str, Any]


def prepare(
    named: Mapping[str, Any], adopted: Adopted, held: Any, in_turn: bool, interleaved: bool
) -> Prepared:
    """Prepare to write `k` and `v` into `k_cache` and `v_cache`, after the `held` keys of each sequence.

    `named` are the arrays of `flash_attn_with_kvcache` by argument name, which have been checked; `adopted`
    are the same, adopted in place. `held` is a number for all sequences, or an array (batch,) of them. With
    `rotary_cos`, queries and keys are rotated, each query by a position of its own if `in_turn`. Until
    `write` is called, nothing of the caller's is written.

    Raises TypeError and ValueError as `cufa.rotary` does, and ValueError for arrays on a GPU that kernels
    cannot read.
    """
    arrays.check_aligned(adopted)
    form = _form_of(adopted.described, interleaved) if adopted.on_gpu else None
    if form is None:
        return _step_by_step(named, held, in_turn, interleaved)
    return _by_kernel(named["q"], adopted, form, held, in_turn)


class _Form(NamedTuple):
    """What follows from the shapes, strides and dtypes of a call whose keys a kernel appends.

    `new` is the layout of k and v, `queries` that of q and of what it is rotated to, if it is. `scaled` says
    whether 16 bits become the caches' 8. `copied` are arrays that are not contiguous, and must be. `pages`
    are the pages of a sequence, all pages, and the rows of one.
    """

    appending: Appending
    new: Layout
    caches: Layout
    queries: Layout | None
    scaled: bool
    copied: tuple[str, ...]
    pages: tuple[int, int, int]


@functools.lru_cache(maxsize=4096)
def _form_of(described: tuple[ArrayInfo, ...], interleaved: bool) -> _Form | None:
    """None if no kernel appends such keys: of several dtypes, or with columns that are not adjacent."""
    storage: dict[str, Storage] = {name: (shape, strides) for name, shape, strides, _ in described}
    dtypes = {name: dtype for name, _, _, dtype in described}
    rotated = _ANGLES[0] in storage
    dtype, cache_dtype = dtypes["k"], dtypes["k_cache"]
    allowed = DTYPES if rotated else INPUT_DTYPES
    if dtype not in allowed.values() or dtypes["v"] != dtype or (rotated and dtypes["q"] != dtype):
        return None
    new = _layout_of((storage["k"], storage["v"]), dtype)
    caches = _layout_of((storage["k_cache"], storage["v_cache"]), cache_dtype)
    queries = _layout_of((storage["q"], (storage["q"][0], None)), dtype) if rotated else None
    if new.scattered or caches.scattered or (queries and queries.scattered):
        return None
    (pages, page_size, _, head_dim), _ = storage["k_cache"]
    appending = Appending(dtype.name, cache_dtype.name, head_dim, storage["v_cache"][0][-1])
    if rotated:
        cos, sin = (Wanted(storage[name][0], dtypes[name]) for name in _ANGLES)
        with errors_name(_OF_ROTARY):
            check_angles(dtype.name, head_dim, cos, sin)
        appending = replace(
            appending, rotary_dim=2 * cos.shape[1], table_dtype=cos.dtype.name, interleaved=interleaved
        )
    of_sequence = storage[_PAGES][0][1] if _PAGES in storage else 1
    return _Form(
        appending=appending,
        new=new,
        caches=caches,
        queries=queries,
        scaled=cache_dtype != dtype,
        copied=tuple(
            name
            for name, shape, strides, dtype in described
            if name in _CONTIGUOUS and not is_contiguous(shape, strides, dtype.itemsize)
        ),
        pages=(of_sequence if page_size else 0, pages, max(1, page_size)),
    )


def _layout_of(tensors: tuple[Storage, ...], dtype: np.dtype[Any]) -> Layout:
    return layout_of(tensors, dtype.itemsize, LAYOUTS["bshd"])


def _by_kernel(q: Any, adopted: Adopted, form: _Form, held: Any, in_turn: bool) -> Prepared:
    named, at = adopted.arrays, adopted.addresses
    if form.copied:
        copies = {name: arrays.contiguous(named[name]) for name in form.copied}
        named, at = named | copies, at | arrays.describe(copies)[1]
    k = named["k"]
    batch, seqlen, kv_heads, _ = k.shape
    lengths = empty((batch,), np.dtype(np.int32), on_gpu=True)
    new, caches = [at["k"], at["v"]], [at["k_cache"], at["v_cache"]]
    # In elements, since the caches' may be smaller.
    alignments = [
        form.new.alignment(new) // k.itemsize,
        form.caches.alignment(caches) // named["k_cache"].itemsize,
    ]
    query_rows, rotated = 0, NOT_ROTATED
    if form.queries:
        _, seqlen_q, heads, _ = q.shape
        turned = empty(named["q"].shape, k.dtype, on_gpu=True)
        queries = [at["q"], turned.data.ptr]
        alignments.append(form.queries.alignment(queries) // k.itemsize)
        query_rows = batch * seqlen_q * heads
        angles, places = [at[name] for name in _ANGLES], len(named[_ANGLES[0]])
        rotated = pack_rotated(form.queries.fields(queries), angles, (heads, seqlen_q), in_turn, places)
        q = adopted.export(turned)
    of_sequence, _, _ = form.pages
    params = pack_append(
        form.new.fields(new) + form.caches.fields(caches),
        (0, held) if isinstance(held, int) else (at[_LENGTHS], 0),
        (at.get(_PAGES) or at.get(_ENTRIES, 0), of_sequence),
        form.pages,
        (batch, kv_heads, seqlen),
        lengths.data.ptr,
        (at.get("k_descale", 0), at.get("v_descale", 0)) if form.scaled else (0, 0),
        rotated,
    )

    def write() -> None:
        if batch:
            rows = batch * seqlen * kv_heads
            launch.append(form.appending, min(alignments) * k.itemsize, batch, rows, query_rows, params)

    return Prepared(q, adopted.export(lengths), write, named)


def _step_by_step(named: Mapping[str, Any], held: Any, in_turn: bool, interleaved: bool) -> Prepared:
    q, k, count = named["q"], named["k"], named["k"].shape[1]
    if _ANGLES[0] in named:
        angles = [named[name] for name in _ANGLES]
        q = _rotated("q", q, angles, held, q.shape[1] if in_turn else 1, interleaved)
        k = _rotated("k", k, angles, held, count, interleaved)
    seqused_k = held + count
    if isinstance(seqused_k, int):
        seqused_k = full((k.shape[0],), seqused_k, "int32", q)

    def write() -> None:
        new = {"k": k, "v": named["v"]}
        for name, x in new.items():
            if becomes_8_bits(x, named[f"{name}_cache"]):
                descale = named.get(f"{name}_descale")
                if descale is None:
                    descale = full((x.shape[0], x.shape[2]), 1, "float32", x)
                with errors_name({"descale": f"{name}_descale"}):
                    new[name], _ = quantize(x, descale=descale)
        _write_by_indices({**named, **new}, held)

    return Prepared(q, seqused_k, write, named)


def _rotated(name: str, x: Any, angles: list[Any], held: Any, count: int, interleaved: bool) -> Any:
    """The tokens of x, rotated by `count` positions after the `held` ones."""
    first = held if isinstance(held, int) else held[:, None, ...]
    is_first = count == 1 and not isinstance(first, int)  # as in decoding: nothing to compute
    positions = first if is_first else first + arange(count, x)[None, ...]
    with errors_name(_OF_ROTARY | {"x": name}):
        return rotary(x, *angles, positions=positions, interleaved=interleaved)


def becomes_8_bits(new: Any, cache: Any) -> bool:
    """Whether new keys or values are rounded to 8 bits for the cache."""
    return dtype_of(cache) == INPUT_DTYPES[FLOAT8] and dtype_of(new).name in FLOAT8_OUTPUTS


def _write_by_indices(named: Mapping[str, Any], held: Any) -> None:
    """Write new keys and values by the arrays' own library."""
    k, k_cache = named["k"], named["k_cache"]
    batch, count = k.shape[:2]
    table = named.get(_PAGES)
    if _ENTRIES in named:
        table = named[_ENTRIES][:, None, ...]
    if isinstance(held, int) and table is None:
        place: Any = np.s_[:, held : held + count, ...]
    else:
        first = held if isinstance(held, int) else held[:, None, ...]
        sequence, key = arange(batch, k_cache)[:, None, ...], first + arange(count, k_cache)[None, ...]
        place = sequence, key
        if table is not None:
            page_size = k_cache.shape[1]
            place = table[sequence, key // page_size], key % page_size
    for cache, new in ((k_cache, k), (named["v_cache"], named["v"])):
        as_integers(cache)[place] = as_integers(new)
