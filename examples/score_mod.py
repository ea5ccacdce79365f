#!/usr/bin/env python3
"""Functions of one's own on scores: a relative bias that is bounded, within documents that lie in a row.

usage: examples/score_mod.py    on the GPU if there is one, else in NumPy
"""

import numpy as np

import cufa
from cufa import arrays

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 300, 4, 64
FARTHEST = 16


def relative_bias(score, b, h, q_idx, kv_idx, table):
    """A learnt number for each distance up to FARTHEST, as T5 has them, and a soft bound."""
    distance = np.clip(q_idx - kv_idx, -FARTHEST, FARTHEST)
    return 20 * np.tanh((score + table[h, distance + FARTHEST]) / 20)


def within_document(b, h, q_idx, kv_idx, document):
    return (kv_idx <= q_idx) & (document[b, q_idx] == document[b, kv_idx])


def with_matrices(q, k, v, table, document):
    """The same by NumPy, with matrices of all scores."""
    q_idx, kv_idx = np.ogrid[:TOKENS, :TOKENS]
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(HEAD_DIM)
    scores = 20 * np.tanh((scores + table[:, np.clip(q_idx - kv_idx, -FARTHEST, FARTHEST) + FARTHEST]) / 20)
    seen = (kv_idx <= q_idx) & (document[:, None, :, None] == document[:, None, None, :])
    weights = np.where(seen, np.exp(scores), 0)
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(axis=-1, keepdims=True), v)


def main():
    if arrays.gpu_usable():
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((BATCH, TOKENS, HEADS, HEAD_DIM), np.float32) for _ in range(3))
    table = rng.standard_normal((HEADS, 2 * FARTHEST + 1), np.float32)
    document = np.sort(rng.integers(0, 5, (BATCH, TOKENS)), axis=1)

    out = cufa.attention(
        *(xp.asarray(x) for x in (q, k, v)),
        score_mod=cufa.ScoreMod(relative_bias, xp.asarray(table)),
        mask_mod=cufa.MaskMod(within_document, xp.asarray(document)),
    )

    expected = xp.asarray(with_matrices(q, k, v, table, document))
    print(f"{TOKENS} tokens differ by at most {float(abs(out - expected).max()):.1e} from all scores at once")


if __name__ == "__main__":
    main()
