#!/usr/bin/env python3
"""Decoding with multi-head latent attention (DeepSeek-AI 2024, section 2.1): a cache of one vector per token.

Keys and values of each head are projections of a token's latent vector, besides a part of keys with RoPE that
all heads share. With the projections moved to queries and outputs, the heads share one KV head: its keys are
the latent vectors and that part, and its values the latent vectors, a view of the same memory.

usage: examples/latent.py       on the GPU if there is one, else in NumPy
"""

import numpy as np

from cufa import arrays, attention

BATCH, TOKENS, HEADS = 2, 300, 16
LATENT_DIM, HEAD_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 64, 128
SCALE = (HEAD_DIM + ROPE_DIM) ** -0.5


def main():
    if arrays.gpu_usable():
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)

    def normal(*shape):
        return xp.asarray(rng.standard_normal(shape, np.float32))

    latents, rope_keys = normal(BATCH, TOKENS, LATENT_DIM), normal(BATCH, TOKENS, ROPE_DIM)
    to_keys = normal(HEADS, LATENT_DIM, HEAD_DIM) / LATENT_DIM**0.5
    to_values = normal(HEADS, LATENT_DIM, VALUE_DIM) / LATENT_DIM**0.5
    q, q_rope = normal(BATCH, 1, HEADS, HEAD_DIM), normal(BATCH, 1, HEADS, ROPE_DIM)

    def half(x):
        return x.astype(np.float16)

    # Keys and values of all heads, as in a prompt.
    shared = xp.broadcast_to(rope_keys[:, :, None], (BATCH, TOKENS, HEADS, ROPE_DIM))
    k = xp.concatenate([xp.einsum("btl,hld->bthd", latents, to_keys), shared], axis=-1)
    v = xp.einsum("btl,hld->bthd", latents, to_values)
    queries = xp.concatenate([q, q_rope], axis=-1)
    apart = attention(half(queries), half(k), half(v), softmax_scale=SCALE)

    # The same from the cache, whose memory is read once.
    cache = half(xp.concatenate([latents, rope_keys], axis=-1))[:, :, None]
    queries = xp.concatenate([xp.einsum("bqhd,hld->bqhl", q, to_keys), q_rope], axis=-1)
    of_latents = attention(half(queries), cache, cache[..., :LATENT_DIM], softmax_scale=SCALE)
    absorbed = xp.einsum("bqhl,hld->bqhd", of_latents.astype(np.float32), to_values)

    smaller = (k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3]) / cache.shape[-1]
    print(f"the cache is {smaller:.1f} times smaller than keys and values of all heads")
    print(f"with it, outputs differ by at most {float(abs(absorbed - apart).max()):.1e}")


if __name__ == "__main__":
    main()
