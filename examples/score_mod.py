#!/usr/bin/env python3
"""Functions of one's own on scores: a relative bias that is learnt and bounded, within documents in a row.

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

    inputs = [xp.asarray(x) for x in (q, k, v)]
    mods = {
        "score_mod": cufa.ScoreMod(relative_bias, xp.asarray(table)),
        "mask_mod": cufa.MaskMod(within_document, xp.asarray(document)),
    }
    out, lse = cufa.attention(*inputs, **mods, return_lse=True)
    expected = xp.asarray(with_matrices(q, k, v, table, document))
    print(f"{TOKENS} tokens differ by at most {float(abs(out - expected).max()):.1e} from all scores at once")

    dout = rng.standard_normal(v.shape, np.float32)
    *_, (dtable,) = cufa.attention_backward(
        xp.asarray(dout), *inputs, out, lse, **mods, return_dscore_mod=True
    )
    step = 1e-4 * rng.standard_normal(table.shape)
    ends = (
        with_matrices(*(x.astype(np.float64) for x in (q, k, v)), table + s, document) for s in (step, -step)
    )
    change = np.sum(dout * np.subtract(*ends)) / 2
    difference = abs(float((dtable * xp.asarray(step)).sum()) / change - 1)
    print(f"the table's gradient tells how the output changes with it but for {difference:.1e} of that")


if __name__ == "__main__":
    main()
