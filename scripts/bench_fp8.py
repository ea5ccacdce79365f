#!/usr/bin/env python3
"""Times the forward of 8-bit operands beside that of bfloat16 on one GPU, and writes benchmarks/fp8.json.

The problems, the way of timing and TFLOP/s are those of scripts/bench_peers.py; bfloat16 gets what the 8-bit
arrays were rounded from. 8 bits are timed with V as it was drawn, and with its keys next to each other. The
error is that of one head's output from float64 attention on the same 8-bit arrays, root
mean square, over the root mean square of that output.
"""

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import ml_dtypes
import numpy as np
import torch
from bench_peers import FLUSH_BYTES, ROOT
from peer_problems import shape_of, work_of
from rich.console import Console
from rich.progress import track

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "fp8.json"))
FLOAT8 = "float8_e4m3fn"
TRANSPOSED = f"{FLOAT8}, V transposed"
# Rows of which the scores are computed in float64 at once.
EXACT_ROWS = 2048


def read(tensor: torch.Tensor) -> Any:
    """A PyTorch tensor as CuPy's array, which knows 8-bit floats by their memory alone."""
    if tensor.dtype != torch.float8_e4m3fn:
        return cupy.from_dlpack(tensor)
    return cupy.from_dlpack(tensor.view(torch.uint8)).view(np.dtype(ml_dtypes.float8_e4m3fn))


def transposed(v: torch.Tensor) -> torch.Tensor:
    """The same values (batch, seqlen, heads, dim), their keys next to each other."""
    return v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of one head in float64; all are (seqlen, dim)."""
    q, k, v = (x.double() for x in (q, k, v))
    parts = []
    for first in range(0, len(q), EXACT_ROWS):
        scores = q[first : first + EXACT_ROWS] @ k.T / q.shape[1] ** 0.5
        if causal:
            rows = torch.arange(first, first + len(scores), device=q.device)[:, None]
            scores[torch.arange(len(k), device=q.device) > rows] = -torch.inf
        parts.append(torch.softmax(scores, dim=1) @ v)
    return torch.cat(parts)


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return float((actual.double() - truth).norm() / truth.norm())


@click.command(help=__doc__)
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128, 256))
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(512, 1024, 2048, 4096, 8192, 16384))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(head_dims: tuple[int, ...], seqlens: tuple[int, ...], rounds: int) -> None:
    bench_peers.require_gpu()
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    points: list[dict[str, Any]] = []
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        problems = list(product(head_dims, seqlens, (False, True)))
        for head_dim, seqlen, causal in track(problems, console=Console(stderr=True), transient=True):
            shape = shape_of(seqlen, head_dim)
            drawn = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
            rounded = [x.to(torch.float8_e4m3fn) for x in drawn]
            given = {
                FLOAT8: rounded,
                TRANSPOSED: [*rounded[:2], transposed(rounded[2])],
                "bfloat16": drawn,
            }
            calls = {
                name: partial(cufa.attention, *map(read, tensors), causal=causal)
                for name, tensors in given.items()
            }
            truth = exact(*(x[0, :, 0] for x in rounded), causal)
            outs = [torch.from_dlpack(calls[name]()) for name in (FLOAT8, TRANSPOSED)]
            error = max(relative_error(out[0, :, 0], truth) for out in outs)
            seconds = bench_peers.times_of(calls, rounds, flush.fill)
            work = work_of("forward", seqlen, causal, head_dim)
            tflops = {name: work / time / 1e12 for name, time in seconds.items()}
            described = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
            points.append(described | {"tflops": tflops, "error": error})
            print(points[-1], flush=True)
            bench_peers.write_record(RECORD, len(points), len(problems), {"points": points})


if __name__ == "__main__":
    main()
