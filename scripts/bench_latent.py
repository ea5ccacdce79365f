#!/usr/bin/env python3
"""Times multi-head latent attention as in a server, beside FlashInfer, and writes benchmarks/latent.json.

Each request has a length of its own, and few queries; latents lie in shuffled pages. The rest is as in
scripts/bench_serving.py: what FlashInfer plans beforehand on the host is timed by itself, cufa reads the
lengths on the GPU.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import numpy as np
import torch
from bench_decode import in_pages
from bench_serving import (
    DTYPE,
    FLASHINFER,
    WORKSPACE_BYTES,
    Batch,
    Subject,
    decode,
    options,
    time_batches,
)
from peer_calls import Call

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", bench_peers.ROOT / "benchmarks" / "latent.json"))
# As in DeepSeek-AI 2024, with projections absorbed: values are the first columns of keys.
HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE = 128, 576, 512, 64
SCALE = HEAD_DIM**-0.5


def of_heads(batch: Batch, heads: int = HEADS) -> Batch:
    name = batch.name if heads == HEADS else f"{batch.name}, {heads} heads"
    return replace(batch, name=name, heads=heads, kv_heads=1)


BATCHES = (
    of_heads(decode(1, 8192)),
    of_heads(decode(1, 65_536)),
    of_heads(decode(4, 16_384)),
    of_heads(decode(16, 8192)),
    of_heads(decode(32, 16_384)),
    of_heads(decode(64, 8192)),
    of_heads(decode(128, 4096)),
    of_heads(decode(256, 2048)),
    of_heads(decode(32, 8192, new=2)),
    of_heads(decode(32, 16_384), heads=64),
    of_heads(decode(64, 8192), heads=16),
)


@dataclass(frozen=True)
class Inputs:
    """Arrays of a batch: queries of each request, pages, and where what lies."""

    q: torch.Tensor
    latents: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def draw(cls, batch: Batch) -> "Inputs":
        requests, (queries,) = len(batch.keys), set(batch.queries)
        pages = max(-(-keys // PAGE_SIZE) for keys in batch.keys)
        table = torch.randperm(requests * pages, device="cuda").reshape(requests, pages)
        q = torch.randn((requests, queries, batch.heads, HEAD_DIM), dtype=DTYPE, device="cuda")
        latents = torch.randn((requests, pages * PAGE_SIZE, 1, HEAD_DIM), dtype=DTYPE, device="cuda")
        lengths = torch.tensor(batch.keys, dtype=torch.int32, device="cuda")
        return cls(q, in_pages(latents, table, PAGE_SIZE), table.to(torch.int32), lengths)


def cufa_call(_: Batch, inputs: Inputs) -> Call:
    q, latents, block_table, lengths = (cupy.from_dlpack(x) for x in vars(inputs).values())
    attend = partial(cufa.attention, q, latents, latents[..., :VALUE_DIM], softmax_scale=SCALE)
    return partial(attend, causal=True, block_table=block_table, seqused_k=lengths)


def flashinfer_calls(
    batch: Batch, inputs: Inputs, backends: Sequence[str]
) -> tuple[dict[str, Call], dict[str, float]]:
    """A call of each of FlashInfer's kernels, and seconds that its plan took, made a second time."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    counts = [-(-keys // PAGE_SIZE) for keys in batch.keys]
    starts, page_starts = (
        torch.tensor(np.cumsum([0, *each]), dtype=torch.int32, device="cuda")
        for each in (batch.queries, counts)
    )
    pages = torch.cat([inputs.block_table[request, :count] for request, count in enumerate(counts)])
    metadata = MLAPlanMetadata.csr(starts, page_starts, pages, inputs.lengths)
    sizes = {"num_heads": batch.heads, "head_dim_ckv": VALUE_DIM, "head_dim_kpe": HEAD_DIM - VALUE_DIM}
    sizes |= {"page_size": PAGE_SIZE, "sm_scale": SCALE}
    q, latents = inputs.q.flatten(0, 1), inputs.latents.squeeze(2)
    calls, plan_seconds = {}, {}
    for backend in backends:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        plan = partial(
            wrapper.plan, metadata=metadata, **sizes, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE
        )
        plan()
        start = time.perf_counter()
        plan()
        plan_seconds[f"{FLASHINFER}, {backend}"] = time.perf_counter() - start
        calls[f"{FLASHINFER}, {backend}"] = partial(wrapper.run, query=q, kv_cache=latents)
    return calls, plan_seconds


def work_of(batch: Batch) -> dict[str, int]:
    flops = 2 * batch.pairs * batch.heads * (HEAD_DIM + VALUE_DIM)
    return {"flops": flops, "bytes": sum(batch.keys) * HEAD_DIM * DTYPE.itemsize}


@click.command(help=__doc__)
@options(BATCHES)
def main(**asked: Any) -> None:
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "page_size": PAGE_SIZE}
    subject = Subject(Inputs.draw, cufa_call, flashinfer_calls, work_of, VALUE_DIM, sizes, RECORD)
    time_batches(subject, BATCHES, **asked)


if __name__ == "__main__":
    main()
