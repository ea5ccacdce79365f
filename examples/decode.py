#!/usr/bin/env python3
"""Decoding with a cache: each token writes its key and value there, and reads all that are in it.

usage: examples/decode.py       on the GPU if there is one, else in NumPy
"""

import numpy as np

from cufa import arrays, attention
from cufa.compat import flash_attn_with_kvcache

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 64
PROMPT, GENERATED, ROOM = 100, 20, 256


def main():
    if arrays.gpu_usable():
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)
    tokens = PROMPT + GENERATED
    q, k, v = (
        xp.asarray(rng.standard_normal((BATCH, tokens, heads, HEAD_DIM), np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    k_cache, v_cache = (xp.zeros((BATCH, ROOM, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))

    # The prompt at once, then a token at a time.
    outs = []
    for begin, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, tokens))]:
        query, key, value = (x[:, begin:end] for x in (q, k, v))
        outs.append(
            flash_attn_with_kvcache(query, k_cache, v_cache, key, value, cache_seqlens=begin, causal=True)
        )

    out = xp.concatenate(outs, axis=1)
    all_at_once = attention(q, k, v, causal=True)
    print(f"{tokens} tokens differ by at most {float(abs(out - all_at_once).max()):.1e} from all at once")


if __name__ == "__main__":
    main()
