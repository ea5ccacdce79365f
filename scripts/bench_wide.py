#!/usr/bin/env python3
"""Times the forward with head dims over 256, and writes benchmarks/wide.json.

PyTorch's FlashAttention-2 and cuDNN do not take these. The peers are its memory-efficient attention and
FlexAttention; where one refuses, it is left out. The way of timing is that of bench_peers.py.
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
from peer_calls import BACKENDS, FLEX, Call, causal_mod, of_pytorch
from rich.console import Console
from rich.progress import track
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "wide.json"))
DTYPE = torch.bfloat16
EFFICIENT = "efficient"
TOKENS, HEADS, KV_HEADS = 16_384, 8, 4
MAX_ERROR = 0.05
# FlexAttention's own tiles want more shared memory than there is. These fit with all of the head dims.
SMALL_TILES = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}


def of_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """FlexAttention's forward, compiled for these tensors."""
    mask = create_block_mask(causal_mod, None, None, q.shape[1], k.shape[1]) if causal else None
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    attend = functools.partial(
        compiled, *tensors, block_mask=mask, enable_gqa=True, kernel_options=SMALL_TILES
    )
    return lambda: attend().transpose(1, 2)


def calls_of(head_dim: int, seqlen: int, causal: bool) -> dict[str, Call]:
    """The forward of each library that takes the problem, found to be alike."""
    q, k, v = (
        torch.randn((TOKENS // seqlen, seqlen, heads, head_dim), dtype=DTYPE, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    ours = functools.partial(cufa.attention, *map(cupy.from_dlpack, (q, k, v)), causal=causal)
    expanded = (q, *(x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v)))  # it has no GQA
    peers = {
        EFFICIENT: of_pytorch(BACKENDS[EFFICIENT], *expanded, causal),
        FLEX: of_flex(q, k, v, causal),
    }
    calls: dict[str, Call] = {"cufa": ours}
    for name, attend in peers.items():
        try:
            expected = attend()
        except (RuntimeError, InductorError, NotImplementedError) as error:
            print(f"{name} is left out of head dim {head_dim}: {str(error).splitlines()[0]}", flush=True)
            continue
        bench_peers.check_alike("cufa's output", ours(), f"{name}'s", expected, MAX_ERROR)
        calls[name] = attend
    return calls


@click.command(help=__doc__)
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(320, 384, 512))
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(1024, 4096, 16_384))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(head_dims: tuple[int, ...], seqlens: tuple[int, ...], rounds: int) -> None:
    bench_peers.require_gpu()
    torch.manual_seed(0)
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    points: list[dict[str, Any]] = []
    problems = list(product(head_dims, (False, True), seqlens))
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)), torch.no_grad():
        for done, (head_dim, causal, seqlen) in enumerate(
            track(problems, console=Console(stderr=True), transient=True), 1
        ):
            seconds = bench_peers.times_of(calls_of(head_dim, seqlen, causal), rounds, flush.fill)
            batch = TOKENS // seqlen
            pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen**2
            points.append(
                {
                    "direction": "forward",
                    "head_dim": head_dim,
                    "causal": causal,
                    "seqlen": seqlen,
                    "flops": 4 * batch * HEADS * pairs * head_dim,
                    "seconds": seconds,
                }
            )
            print(points[-1], flush=True)
            measured = {"tokens": TOKENS, "heads": HEADS, "kv_heads": KV_HEADS, "points": points}
            bench_peers.write_record(RECORD, done, len(problems), measured | {"dtype": "bfloat16"})


if __name__ == "__main__":
    main()
