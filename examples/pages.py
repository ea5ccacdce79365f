#!/usr/bin/env python3
"""Requests of many lengths that share one cache: its pages are handed out as the requests grow.

A step of the loop is one call for all requests that there are: those that have just come bring their prompt,
the others one token.

usage: examples/pages.py       on the GPU if there is one, else in NumPy
"""

import numpy as np

from cufa import arrays, attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
PAGES, PAGE_SIZE, PAGES_OF_REQUEST = 64, 16, 12
PROMPTS = (100, 7, 61)
ARRIVALS = (0, 0, 5)  # the steps in which they come
STEPS = 20


def main():
    if arrays.gpu_usable():
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)
    k_cache, v_cache = (xp.zeros((PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    free_pages = list(rng.permutation(PAGES))
    block_table = np.zeros((len(PROMPTS), PAGES_OF_REQUEST), np.int32)
    held = np.zeros(len(PROMPTS), np.int32)

    def draw(tokens, heads):
        return xp.asarray(rng.standard_normal((tokens, heads, HEAD_DIM), np.float32))

    # What a model would compute, token by token: queries, keys and values of each request.
    lengths = [prompt + STEPS - 1 - arrival for prompt, arrival in zip(PROMPTS, ARRIVALS, strict=True)]
    requests = [[draw(length, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)] for length in lengths]
    outs = [[] for _ in PROMPTS]

    for step in range(STEPS):
        counts = [
            0 if step < arrival else prompt if step == arrival else 1
            for prompt, arrival in zip(PROMPTS, ARRIVALS, strict=True)
        ]
        queries = []
        for r, count in enumerate(counts):
            new = slice(held[r], held[r] + count)
            places = np.arange(new.start, new.stop)
            for place in places[places % PAGE_SIZE == 0]:
                block_table[r, place // PAGE_SIZE] = free_pages.pop()
            q, k, v = (x[new] for x in requests[r])
            in_pages = xp.asarray(block_table[r, places // PAGE_SIZE]), xp.asarray(places % PAGE_SIZE)
            k_cache[in_pages], v_cache[in_pages] = k, v
            queries.append(q)
            held[r] += count
        ends = np.cumsum([0, *counts], dtype=np.int32)
        out = attention(
            xp.concatenate(queries),
            k_cache,
            v_cache,
            cu_seqlens_q=xp.asarray(ends),
            seqused_k=xp.asarray(held),
            block_table=xp.asarray(block_table),
            causal=True,
        )
        for r in range(len(PROMPTS)):
            outs[r].append(out[ends[r] : ends[r + 1]])

    for prompt, (q, k, v), parts in zip(PROMPTS, requests, outs, strict=True):
        all_at_once = attention(q[None], k[None], v[None], causal=True)[0]
        difference = float(abs(xp.concatenate(parts) - all_at_once).max())
        print(f"{prompt} + {len(q) - prompt} tokens differ by at most {difference:.1e} from all at once")


if __name__ == "__main__":
    main()
