#!/usr/bin/env python3
"""Decoding in a CUDA graph: a token's launches are recorded once, then replayed without Python between them.

A replay works on the same arrays as the recording. So the token's input lies in one array, and how many keys
the caches hold is counted on the GPU.

usage: examples/graph.py       on the GPU if there is one, else in NumPy, where each token calls Python
"""

import time

import numpy as np

from cufa import arrays, attention
from cufa.compat import flash_attn_with_kvcache

BATCH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 16, 4, 64
TOKENS, ROOM = 50, 64


def split(x):
    """Queries, keys and values: other heads of the same array, where a model would have weights."""
    return x, x[:, :, :KV_HEADS], x[:, :, KV_HEADS : 2 * KV_HEADS]


def record(xp, token):
    """A function that launches what `token` does."""
    # What `token` allocates on the way is the graph's for as long as there is a graph.
    pool, stream = xp.cuda.MemoryPool(), xp.cuda.Stream()
    with xp.cuda.using_allocator(pool.malloc), stream:
        token()  # compiles, which cannot be recorded
        stream.begin_capture()
        token()
        graph = stream.end_capture()

    def replay(pool=pool):
        graph.launch()

    return replay


def main():
    on_gpu = arrays.gpu_usable()
    if on_gpu:
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)
    inputs = xp.asarray(rng.standard_normal((BATCH, TOKENS, HEADS, HEAD_DIM), np.float32))
    caches = [
        [xp.zeros((BATCH, ROOM, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2)] for _ in range(LAYERS)
    ]
    held = xp.zeros(BATCH, np.int32)
    x = xp.empty_like(inputs[:, :1])

    def token():
        out = x
        for k_cache, v_cache in caches:
            query, key, value = split(out)
            out = flash_attn_with_kvcache(query, k_cache, v_cache, key, value, cache_seqlens=held)
        x[...] = out
        held[...] += 1

    def decode(step):
        """All tokens, one after the other, and how long each took in microseconds."""
        step()  # compiles, which is not to be timed
        held[...] = 0
        outs = []
        begin = time.perf_counter()
        for i in range(TOKENS):
            x[...] = inputs[:, i : i + 1]
            step()
            outs.append(x.copy())
        out = xp.concatenate(outs, axis=1)
        float(out[0, 0, 0, 0])  # waits for the GPU
        return out, (time.perf_counter() - begin) / TOKENS * 1e6

    all_at_once = inputs
    for _ in range(LAYERS):
        all_at_once = attention(*split(all_at_once), causal=True)
    steps = {"called": token}
    if on_gpu:
        steps["replayed"] = record(xp, token)
    for how, step in steps.items():
        out, microseconds = decode(step)
        difference = float(abs(out - all_at_once).max())
        print(
            f"{how}: {microseconds:.0f} us a token, which differ by at most {difference:.1e} from all at once"
        )


if __name__ == "__main__":
    main()
