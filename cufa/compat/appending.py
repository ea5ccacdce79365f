"""Writes new keys and values into a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cufa import arrays, launch
from cufa.compat.arguments import arange, as_bytes
from cufa.problem import LAYOUTS
from cufa.tensor_layout import Layout, layout_of

_TENSORS = ("k", "v", "k_cache", "v_cache")
_LENGTHS = "cache_seqlens"


def append(named: Mapping[str, Any], held: Any) -> None:
    """Write `k` and `v` into `k_cache` and `v_cache`, after the `held` keys that sequences have there.

    `named` are arrays of any library, all of one; they have been checked. So has `held`, a number for all
    sequences or an array (batch,) of them. With a `block_table`, the caches are in pages.

    Raises ValueError for arrays on a GPU that kernels cannot read; then nothing has been written.
    """
    lengths = {} if isinstance(held, int) else {_LENGTHS: held}
    adopted = arrays.adopt_in_place({**named, **lengths})
    arrays.check_aligned(adopted)
    if adopted.on_gpu:
        tensors = [adopted.arrays[name] for name in _TENSORS]
        storage = tuple((tensor.shape, tensor.strides) for tensor in tensors)
        layout = layout_of(storage, tensors[0].itemsize, LAYOUTS["bshd"])
        if not layout.scattered:
            _append_by_kernel(adopted.arrays, layout, held if isinstance(held, int) else 0)
            return
    _append_by_indices(named, held)


def _append_by_kernel(named: Mapping[str, Any], layout: Layout, held_by_each: int) -> None:
    batch, seqlen, heads, head_dim = named["k"].shape
    if named["k"].size == 0:
        return
    addresses = [named[name].data.ptr for name in _TENSORS]
    lengths, table = (
        arrays.contiguous(named[name]) if name in named else None for name in (_LENGTHS, "block_table")
    )
    pages, page_size = named["k_cache"].shape[:2]
    launch.append(
        named["k"].dtype.name,
        (head_dim, named["v"].shape[-1]),
        layout.fields(addresses),
        (0 if lengths is None else lengths.data.ptr, held_by_each),
        (0, 0) if table is None else (table.data.ptr, table.shape[1]),
        (1 if table is None else table.shape[1], pages, page_size),
        (batch, heads, seqlen),
        layout.alignment(addresses),
    )


def _append_by_indices(named: Mapping[str, Any], held: Any) -> None:
    """The same by the arrays' own library."""
    k, k_cache, table = named["k"], named["k_cache"], named.get("block_table")
    batch, count = k.shape[:2]
    if isinstance(held, int) and table is None:
        place: Any = np.s_[:, held : held + count]
    else:
        first = held if isinstance(held, int) else held[:, None]
        sequence, key = arange(batch, k_cache)[:, None], first + arange(count, k_cache)[None]
        place = sequence, key
        if table is not None:
            page_size = k_cache.shape[1]
            place = table[sequence, key // page_size], key % page_size
    for cache, new in ((k_cache, k), (named["v_cache"], named["v"])):
        as_bytes(cache)[place] = as_bytes(new)
