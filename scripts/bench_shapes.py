#!/usr/bin/env python3
"""Times shapes that the grid of scripts/bench_peers.py leaves out, and writes benchmarks/shapes.json.

Odd head dims and lengths, few KV heads, few heads, other queries than keys, many short sequences: where a
library is at its best in a table, it may fall off a cliff beside it. The peers are PyTorch's cuDNN and
FlashAttention-2; one that refuses a shape is left out there. The way of timing is that of bench_peers.py.
"""

import functools
import os
from pathlib import Path

import bench_peers
import click
import cupy
import torch
from bench_peers import ROOT
from peer_calls import Call, calls_of_able, peers_of

from cufa.problem import Problem

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "shapes.json"))
DTYPE = "bfloat16"
PEERS = ("cudnn", "flash-attention-2")
# What of a problem the record says.
RECORDED = ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "causal")


def shape(
    batch: int,
    seqlen: int,
    heads: int,
    head_dim: int,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    causal: bool = False,
) -> Problem:
    sizes = batch, seqlen, keys or seqlen, heads, kv_heads or heads, head_dim, head_dim
    return Problem("forward", DTYPE, *sizes, causal)


GROUPS: dict[str, tuple[Problem, ...]] = {
    "head dims": tuple(
        shape(4, 4096, 16, head_dim, causal=causal)
        for head_dim in (32, 40, 72, 80, 96, 112, 160, 192, 224)
        for causal in (False, True)
    ),
    "lengths that no tile divides": (
        *(shape(4, seqlen, 16, 128, causal=True) for seqlen in (1000, 1023, 4095)),
        *(shape(4, seqlen, 16, 64) for seqlen in (1000, 1023, 4095)),
        shape(64, 197, 12, 64),
        shape(32, 577, 16, 64),
        shape(128, 77, 12, 64, causal=True),
    ),
    "few KV heads": (
        *(shape(1, 8192, 32, 128, kv_heads=kv_heads, causal=True) for kv_heads in (8, 1)),
        *(shape(4, 2048, 32, 64, kv_heads=kv_heads, causal=True) for kv_heads in (8, 1)),
        shape(2, 4096, 16, 128, kv_heads=2),
        shape(1, 4096, 28, 128, kv_heads=4, causal=True),
        shape(1, 1024, 32, 128, kv_heads=8, causal=True),
        shape(1, 8192, 8, 256, kv_heads=1, causal=True),
    ),
    "few heads": (
        shape(1, 2048, 32, 128, causal=True),
        shape(1, 2048, 20, 128, causal=True),
        shape(1, 1024, 8, 128, causal=True),
        shape(1, 512, 16, 128, causal=True),
        shape(1, 4096, 8, 64),
        shape(1, 4096, 8, 128),
        shape(1, 16384, 2, 128, causal=True),
        shape(1, 4096, 4, 128, causal=True),
        shape(1, 8192, 2, 64, causal=True),
        shape(1, 4096, 4, 256, causal=True),
        shape(1, 8192, 5, 128),
        shape(1, 4096, 5, 256),
    ),
    "other queries than keys": (
        shape(8, 4096, 10, 64, keys=77),
        shape(8, 77, 10, 64, keys=4096),
        shape(4, 256, 16, 128, keys=8192),
        shape(2, 1024, 20, 64, keys=256),
        shape(1, 256, 32, 128, keys=65536),
        shape(1, 512, 8, 128, keys=16384),
        shape(4, 128, 8, 128, keys=16384),
    ),
    "many short sequences": (
        shape(512, 128, 12, 64),
        shape(1024, 64, 12, 64),
        shape(2048, 49, 6, 32),
        shape(2048, 32, 8, 64),
        shape(4096, 16, 8, 32),
    ),
}


def calls_of(problem: Problem) -> dict[str, dict[str, Call]]:
    """The forward and the backward of each library that takes the shape."""
    shape_q = problem.batch, problem.seqlen_q, problem.heads, problem.head_dim
    shape_k = problem.batch, problem.seqlen_k, problem.kv_heads, problem.head_dim
    q, k, v, dout = (
        torch.randn(each, dtype=getattr(torch, DTYPE), device="cuda")
        for each in (shape_q, shape_k, shape_k, shape_q)
    )
    arrays = map(cupy.from_dlpack, (q, k, v, dout))
    ours = bench_peers.cufa_calls(*arrays, causal=problem.causal)
    calls = {"cufa": {direction: ours[direction]["cufa"] for direction in ("forward", "backward")}}
    return calls | calls_of_able(problem, peers_of(DTYPE, (q, k, v), problem.causal, PEERS), dout)


@click.command(help=__doc__)
@click.option("--group", "groups", type=click.Choice(list(GROUPS)), multiple=True, default=list(GROUPS))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(groups: tuple[str, ...], rounds: int) -> None:
    problems = [
        (
            {"group": group} | {name: getattr(problem, name) for name in RECORDED},
            functools.partial(calls_of, problem),
        )
        for group in groups
        for problem in GROUPS[group]
    ]
    bench_peers.require_gpu()
    bench_peers.compile_ahead(problem for group in groups for problem in GROUPS[group])
    bench_peers.time_problems(RECORD, problems, rounds, {"dtype": DTYPE})


if __name__ == "__main__":
    main()
