#!/usr/bin/env python3
"""Decoding of requests that begin with the same prompt: its keys and values are stored and read once for all.

To the prompt, the requests' queries are those of one sequence. What follows it has a cache for each request.
`merge` makes one output of both (FlashInfer's cascade; Juravsky et al. 2024).

usage: examples/prefix.py       on the GPU if there is one, else in NumPy
"""

import numpy as np

from cufa import arrays, attention, merge

REQUESTS, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64
PROMPT, ROOM = 500, 40


def attend(q, prompt, own, held):
    """The output of a query of each request: (requests, 1, heads, head_dim)."""
    of_prompt, lse_of_prompt = attention(q.swapaxes(0, 1), *prompt, return_lse=True)
    of_own, lse_of_own = attention(q, *own, seqused_k=held, return_lse=True)
    out, _ = merge(of_prompt.swapaxes(0, 1), lse_of_prompt.swapaxes(0, 2), of_own, lse_of_own)
    return out


def main():
    if arrays.gpu_usable():
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)

    def normal(*shape):
        return xp.asarray(rng.standard_normal(shape, np.float32))

    q = normal(REQUESTS, 1, HEADS, HEAD_DIM)
    prompt = [normal(1, PROMPT, KV_HEADS, HEAD_DIM) for _ in range(2)]
    own = [normal(REQUESTS, ROOM, KV_HEADS, HEAD_DIM) for _ in range(2)]
    held = xp.asarray(rng.integers(0, ROOM + 1, REQUESTS), np.int32)
    out = attend(q, prompt, own, held)

    # The same with a copy of the prompt for each request.
    k, v = (
        xp.concatenate([xp.broadcast_to(shared, (REQUESTS, *shared.shape[1:])), each], axis=1)
        for shared, each in zip(prompt, own, strict=True)
    )
    copied = attention(q, k, v, seqused_k=PROMPT + held)
    smaller = k.size / (prompt[0].size + own[0].size)
    print(f"keys and values take {smaller:.1f} times less memory than with a copy of the prompt for each")
    print(f"request; outputs differ by at most {float(abs(out - copied).max()):.1e}")


if __name__ == "__main__":
    main()
