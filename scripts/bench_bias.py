#!/usr/bin/env python3
"""Times attention with a bias that is learnt, and writes benchmarks/bias.json.

The backward has the gradient of the bias, too, as relative position or pair biases need it in training. The
peer is PyTorch's memory-efficient attention, which alone of its kernels has that gradient. The way of timing
is that of bench_peers.py.
"""

import functools
import os
from itertools import product
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import torch
from bench_peers import FLUSH_BYTES, ROOT
from peer_calls import Call
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "bias.json"))
PEER = "efficient"
BATCH, HEADS = 8, 16
# By what the bias differs: whether by the sequence, the head and the query.
BIASES = {
    "one for each head": (False, True, True),
    "one for each head of each sequence": (True, True, True),
    "one for all heads": (False, False, True),
    "one for each key of a sequence": (True, False, False),
}
# Additions to the bias's gradient are rounded as often as scores share an element: of PyTorch's, in 16 bits.
MAX_ERROR = 0.1


def calls_of(dtype: str, seqlen: int, head_dim: int, bias: str) -> dict[str, dict[str, Call]]:
    """The forward and the backward of both, found to be alike."""
    shape = BATCH, seqlen, HEADS, head_dim
    of_type = functools.partial(torch.randn, dtype=getattr(torch, dtype), device="cuda")
    q, k, v, dout = (of_type(shape) for _ in range(4))
    sizes = zip(BIASES[bias], (BATCH, HEADS, seqlen), strict=True)
    added = of_type((*(size if differs else 1 for differs, size in sizes), seqlen))
    *arrays, of_scores = map(cupy.from_dlpack, (q, k, v, added))
    attend = functools.partial(cufa.attention, *arrays, bias=of_scores, return_lse=True)
    ours = functools.partial(
        cufa.attention_backward, cupy.from_dlpack(dout), *arrays, *attend(), bias=of_scores, return_dbias=True
    )
    inputs = [x.detach().requires_grad_() for x in (q, k, v, added)]

    def attend_by_peer() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            *transposed, mask = (*(x.transpose(1, 2) for x in inputs[:3]), inputs[3])
            return scaled_dot_product_attention(*transposed, attn_mask=mask).transpose(1, 2)

    output = attend_by_peer()
    bench_peers.check_alike("cufa's output", attend()[0], f"{PEER}'s", output, MAX_ERROR)
    theirs = functools.partial(torch.autograd.grad, output, inputs, dout, retain_graph=True)
    for name, actual, expected in zip(("dq", "dk", "dv", "dbias"), ours(), theirs(), strict=True):
        bench_peers.check_alike(f"cufa's {name}", actual, f"{PEER}'s", expected, MAX_ERROR)
    return {"forward": {"cufa": attend, PEER: attend_by_peer}, "backward": {"cufa": ours, PEER: theirs}}


@click.command(help=__doc__)
@click.option("--dtype", "dtypes", multiple=True, default=("bfloat16", "float32"))
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(512, 2048))
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(dtypes: tuple[str, ...], seqlens: tuple[int, ...], head_dims: tuple[int, ...], rounds: int) -> None:
    bench_peers.require_gpu()
    torch.manual_seed(0)
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    points: list[dict[str, Any]] = []
    problems = list(product(dtypes, seqlens, head_dims, BIASES))
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for done, problem in enumerate(track(problems, console=Console(stderr=True), transient=True), 1):
            described = dict(zip(("dtype", "seqlen", "head_dim", "bias"), problem, strict=True))
            for direction, calls in calls_of(*problem).items():
                seconds = bench_peers.times_of(calls, rounds, flush.fill)
                points.append(described | {"direction": direction, "seconds": seconds})
                print(points[-1], flush=True)
            measured = {"batch": BATCH, "heads": HEADS, "points": points}
            bench_peers.write_record(RECORD, done, len(problems), measured)
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
