#!/usr/bin/env python3
"""Attention in 8 bits: queries, keys and values of 16 bits quantised, and how far off that is.

usage: examples/fp8.py       on the GPU if it is a Hopper, else in NumPy
"""

import ml_dtypes
import numpy as np

from cufa import arrays, attention, device, quantize

BATCH, SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 2, 512, 8, 2, 128
# The values of each KV head are of another size, for which it has descales of its own.
SIZES = 0.01, 30.0


def main():
    if arrays.gpu_usable() and device.current().arch.capability == (9, 0):
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((BATCH, SEQLEN, heads, HEAD_DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    v *= np.reshape(SIZES, (KV_HEADS, 1))
    q, k, v = (xp.asarray(x.astype(ml_dtypes.bfloat16)) for x in (q, k, v))

    q8, q_descale = quantize(q, kv_heads=KV_HEADS)
    k8, k_descale = quantize(k)
    v8, v_descale = quantize(v, seqlen_contiguous=True)  # as the kernel multiplies with it
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out = attention(q8, k8, v8, **descales, causal=True).astype(np.float32)

    expected = attention(q, k, v, causal=True).astype(np.float32)
    group = HEADS // KV_HEADS
    for kv_head, size in enumerate(SIZES):
        heads = np.s_[:, :, kv_head * group : (kv_head + 1) * group]
        squares = ((out - expected)[heads] ** 2).mean() / (expected[heads] ** 2).mean()
        print(f"values of {size}: {float(squares) ** 0.5:.1e} from 16 bits, root mean square")


if __name__ == "__main__":
    main()
