#!/usr/bin/env python3
"""Ring attention (Liu et al. 2023): each GPU holds a part of the tokens, and keys and values go around.

usage: examples/ring.py       on all GPUs, else in NumPy
"""

from contextlib import nullcontext

import numpy as np

from cufa import arrays, attention, attention_backward, merge

BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 8, 2, 64
PARTS, TOKENS_OF_PART = 4, 500  # a GPU may hold several parts


class Ring:
    """The GPUs of the parts, or the CPU."""

    def __init__(self):
        self.on_gpus = arrays.gpu_usable()
        if self.on_gpus:
            import cupy

            self.xp, self.count = cupy, cupy.cuda.runtime.getDeviceCount()
        else:
            self.xp = np

    def at(self, part):
        """Where the part is; inside, `take` brings arrays there."""
        return self.xp.cuda.Device(part % self.count) if self.on_gpus else nullcontext()

    def take(self, *arrays):
        return [self.xp.asarray(x) for x in arrays]

    def finish_step(self):
        """Waits until all GPUs are done: what one computed can be sent to another."""
        for part in range(PARTS if self.on_gpus else 0):
            with self.at(part) as gpu:
                gpu.synchronize()


def forward(ring, parts):
    """The output and the LSE of each part, causal. In step n, part i has the keys of part i - n."""
    results = [None] * PARTS
    for step in range(PARTS):
        for i in range(step, PARTS):  # no query sees the keys of later parts
            with ring.at(i):
                k, v = ring.take(*parts[i - step][1:])
                result = attention(parts[i][0], k, v, causal=step == 0, return_lse=True)
                results[i] = result if step == 0 else merge(*results[i], *result)
        ring.finish_step()
    return results


def backward(ring, parts, results, douts):
    """The gradients dq, dk and dv of each part: with the LSE over all keys, those of its parts add up."""
    sums = []
    for i, part in enumerate(parts):
        with ring.at(i):
            sums.append([ring.xp.zeros_like(x) for x in part])
    ring.finish_step()
    for step in range(PARTS):
        found = {}
        for i in range(step, PARTS):
            with ring.at(i):
                k, v = ring.take(*parts[i - step][1:])
                found[i] = attention_backward(douts[i], parts[i][0], k, v, *results[i], causal=step == 0)
        ring.finish_step()
        for i, (dq, dk, dv) in found.items():
            with ring.at(i):
                sums[i][0] += dq
            with ring.at(i - step):
                for of_keys, more in zip(sums[i - step][1:], ring.take(dk, dv), strict=True):
                    of_keys += more
        ring.finish_step()
    return sums


def main():
    ring = Ring()
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((BATCH, PARTS * TOKENS_OF_PART, heads, HEAD_DIM), np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    parts, douts = [], []
    for i in range(PARTS):
        tokens = slice(i * TOKENS_OF_PART, (i + 1) * TOKENS_OF_PART)
        with ring.at(i):
            *part, dout_part = ring.take(*(x[:, tokens] for x in (q, k, v, dout)))
        parts.append(part)
        douts.append(dout_part)

    results = forward(ring, parts)
    grads = backward(ring, parts, results, douts)
    of_parts = [(out, *grad) for (out, _), grad in zip(results, grads, strict=True)]

    with ring.at(0):
        q, k, v, dout = ring.take(q, k, v, dout)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        at_once = out, *attention_backward(dout, q, k, v, out, lse, causal=True)
        for name, expected, pieces in zip(
            ("out", "dq", "dk", "dv"), at_once, zip(*of_parts, strict=True), strict=True
        ):
            found = ring.xp.concatenate(ring.take(*pieces), axis=1)
            print(f"{name} differs by at most {float(abs(found - expected).max()):.1e} from that of one call")


if __name__ == "__main__":
    main()
