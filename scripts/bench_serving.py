#!/usr/bin/env python3
"""Times what a server of language models asks for, beside FlashInfer, and writes benchmarks/serving.json.

Keys and values lie in shuffled pages of 16, and each request has a length of its own. FlashInfer is timed
with each of its kernels for the GPU; what it plans beforehand on the host for the lengths at hand is timed by
itself, cufa reads the lengths on the GPU. The way of timing is that of scripts/bench_decode.py.

Without FlashInfer only cufa is timed. FlashInfer compiles its kernels by nvcc when they are called first.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import numpy as np
import torch
from bench_decode import FLUSH_BYTES, in_pages
from bench_peers import ROOT
from peer_calls import Call, version_of

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "serving.json"))
FLASHINFER, PACKAGE = "flashinfer", "flashinfer-python"
BACKENDS = "fa2", "fa3"
DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
# What FlashInfer's documentation asks for.
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class Batch:
    """Requests, each with some tokens that are new and all that its keys are then."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @property
    def pairs(self) -> int:
        """How many keys all queries of a head see together."""
        return sum(n * k - n * (n - 1) // 2 for n, k in zip(self.queries, self.keys, strict=True))


def lengths(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from a sixteenth of the longest up, all likewise far apart on a logarithmic scale, shuffled."""
    spread = np.geomspace(longest / 16 if count > 1 else longest, longest, count).round().astype(int)
    return tuple(int(each) for each in np.random.default_rng(count).permutation(spread))


def prompts(count: int, longest: int) -> Batch:
    new = lengths(count, longest)
    return Batch(f"{count} prompts of up to {longest:,}", new, new)


def chunk(new: int, before: int) -> Batch:
    return Batch(f"a prompt's chunk of {new:,} after {before:,}", (new,), (before + new,))


def decode(count: int, longest: int, new: int = 1) -> Batch:
    what = "decoding" if new == 1 else f"checking {new} drafted tokens of"
    return Batch(f"{what} {count} of up to {longest:,}", (new,) * count, lengths(count, longest))


def mixed(new: int, count: int, longest: int) -> Batch:
    keys = lengths(count, longest)
    return Batch(
        f"a chunk of {new:,} beside decoding {count} of up to {longest:,}",
        (new,) + (1,) * count,
        (longest, *keys),
    )


def on_one_of(gpus: int, batch: Batch) -> Batch:
    """The batch on one of several GPUs that share a model's heads."""
    heads, kv_heads = batch.heads // gpus, batch.kv_heads // gpus
    return replace(batch, name=f"{batch.name}, {heads}/{kv_heads} heads", heads=heads, kv_heads=kv_heads)


BATCHES = (
    Batch("a prompt of 8,192", (8192,), (8192,)),
    prompts(8, 4096),
    prompts(64, 1024),
    chunk(2048, 30_720),
    chunk(512, 7_680),
    on_one_of(4, chunk(512, 7_680)),
    on_one_of(8, chunk(512, 15_872)),
    mixed(1024, 63, 8192),
    mixed(512, 255, 2048),
    decode(32, 8192, new=4),
    decode(1, 8192),
    decode(16, 8192),
    decode(64, 8192),
    decode(256, 4096),
)


@dataclass(frozen=True)
class Inputs:
    """Arrays of a batch: queries one request after the other, pages, and where what lies."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def draw(cls, batch: Batch) -> "Inputs":
        pages = max(-(-keys // PAGE_SIZE) for keys in batch.keys)
        table = torch.randperm(len(batch.keys) * pages, device="cuda").reshape(len(batch.keys), pages)
        cache = len(batch.keys), pages * PAGE_SIZE, batch.kv_heads, HEAD_DIM
        q = torch.randn((sum(batch.queries), batch.heads, HEAD_DIM), dtype=DTYPE, device="cuda")
        k, v = (in_pages(torch.randn(cache, dtype=DTYPE, device="cuda"), table, PAGE_SIZE) for _ in range(2))
        starts = np.cumsum([0, *batch.queries])
        as_integers = partial(torch.tensor, dtype=torch.int32, device="cuda")
        return cls(q, k, v, table.to(torch.int32), as_integers(starts), as_integers(batch.keys))


def cufa_call(batch: Batch, inputs: Inputs) -> Call:
    """As many new tokens of each request are an array of that many, others are packed."""
    q, k, v, block_table, starts, held = (cupy.from_dlpack(x) for x in vars(inputs).values())
    attend = partial(cufa.attention, causal=True, block_table=block_table, seqused_k=held)
    if len(set(batch.queries)) == 1:
        return partial(attend, q.reshape(len(batch.queries), -1, *q.shape[1:]), k, v)
    return partial(attend, q, k, v, cu_seqlens_q=starts)


def flashinfer_calls(
    batch: Batch, inputs: Inputs, backends: Sequence[str]
) -> tuple[dict[str, Call], dict[str, float]]:
    """A call of each of FlashInfer's kernels, and seconds that its plan took, made a second time."""
    import flashinfer

    counts = [-(-keys // PAGE_SIZE) for keys in batch.keys]
    as_integers = partial(torch.tensor, dtype=torch.int32, device="cuda")
    page_starts = as_integers(np.cumsum([0, *counts]))
    pages = torch.cat([inputs.block_table[request, :count] for request, count in enumerate(counts)])
    last = as_integers(
        [keys - (count - 1) * PAGE_SIZE for keys, count in zip(batch.keys, counts, strict=True)]
    )
    heads = batch.heads, batch.kv_heads, HEAD_DIM, PAGE_SIZE

    def planned_prefill(backend: str) -> tuple[Any, Call]:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        arrays = inputs.starts, page_starts, pages, last
        return wrapper, partial(wrapper.plan, *arrays, *heads, causal=True, q_data_type=DTYPE)

    def planned_decode() -> tuple[Any, Call]:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        return wrapper, partial(wrapper.plan, page_starts, pages, last, *heads, q_data_type=DTYPE)

    planned = {f"{FLASHINFER}, {backend}": planned_prefill(backend) for backend in backends}
    if set(batch.queries) == {1}:
        planned[f"{FLASHINFER}, decode"] = planned_decode()
    calls, plan_seconds = {}, {}
    for name, (wrapper, plan) in planned.items():
        plan()
        start = time.perf_counter()
        plan()
        plan_seconds[name] = time.perf_counter() - start
        calls[name] = partial(wrapper.run, inputs.q, (inputs.k, inputs.v))
    return calls, plan_seconds


def check(calls: dict[str, Call], heads: int, dim: int) -> None:
    """That all compute the same."""
    expected = torch.from_dlpack(calls["cufa"]()).reshape(-1, heads, dim)
    for name in calls.keys() - {"cufa"}:
        bench_peers.check_alike(name, calls[name](), "cufa", expected)


@dataclass(frozen=True)
class Subject:
    """What is timed: the arrays of a batch and calls of both libraries with them.

    The record has `sizes` and, of each batch, its `work`: operations, and bytes of keys and values.
    """

    draw: Callable[[Batch], Any]
    cufa_call: Callable[[Batch, Any], Call]
    flashinfer_calls: Callable[[Batch, Any, Sequence[str]], tuple[dict[str, Call], dict[str, float]]]
    work: Callable[[Batch], dict[str, int]]
    value_dim: int
    sizes: dict[str, int]
    record: Path


def options(batches: Sequence[Batch]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command that times some of these batches."""
    names = click.Choice([each.name for each in batches])
    given = (
        click.option("--batch", "chosen", type=names, multiple=True),
        click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS),
        click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True),
    )
    return lambda function: reduce(lambda decorated, option: option(decorated), reversed(given), function)


def time_batches(
    subject: Subject, batches: Sequence[Batch], chosen: Sequence[str], backends: Sequence[str], rounds: int
) -> None:
    """Time the calls of each batch, or of those that are chosen, and write the record."""
    bench_peers.require_gpu()
    torch.manual_seed(0)
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    other = cupy.zeros(FLUSH_BYTES // 4, cupy.float32)
    version = version_of(PACKAGE)
    batches = [batch for batch in batches if not chosen or batch.name in chosen]
    measured: dict[str, Any] = {FLASHINFER: version, **subject.sizes, "points": []}
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for done, batch in enumerate(batches, 1):
            inputs = subject.draw(batch)
            calls, plan_seconds = subject.flashinfer_calls(batch, inputs, backends) if version else ({}, {})
            calls = {"cufa": subject.cufa_call(batch, inputs), **calls}
            check(calls, batch.heads, subject.value_dim)
            seconds = bench_peers.times_of(calls, rounds, lambda _: other.sum())
            described = {"batch": batch.name, **subject.work(batch)}
            measured["points"].append(described | {"seconds": seconds, "plan_seconds": plan_seconds})
            told = ", ".join(f"{name} {each * 1e6:.1f} us" for name, each in seconds.items())
            print(f"{batch.name}: {told}", flush=True)
            bench_peers.write_record(subject.record, done, len(batches), measured)


def work_of(batch: Batch) -> dict[str, int]:
    key_bytes = 2 * batch.kv_heads * HEAD_DIM * DTYPE.itemsize
    return {"flops": 4 * batch.pairs * batch.heads * HEAD_DIM, "bytes": sum(batch.keys) * key_bytes}


@click.command(help=__doc__)
@options(BATCHES)
def main(**asked: Any) -> None:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
    subject = Subject(Inputs.draw, cufa_call, flashinfer_calls, work_of, HEAD_DIM, sizes, RECORD)
    time_batches(subject, BATCHES, **asked)


if __name__ == "__main__":
    main()
