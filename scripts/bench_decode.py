#!/usr/bin/env python3
"""Times few queries with many keys, as in decoding, and writes benchmarks/decode.json.

Beside cufa are PyTorch's cuDNN and FlashAttention-2, which get the same inputs, cufa with its keys in
shuffled pages, and with all inputs or only its keys and values rounded to 8 bits, and those of its kernels
and tiles that are asked for. What counts is the median over rounds in which all take turns. In between, the
L2 cache is filled with other data; that is read, not written, as what is written would have to go to memory
in the time of the next call.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import torch
from bench_fp8 import read
from bench_peers import ROOT
from peer_calls import BACKENDS, Call, of_pytorch

import cufa
from cufa.kernels import KERNELS

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "decode.json"))
# What is read between calls: far more than an L2 cache, and for longer than the host needs for a call.
FLUSH_BYTES = 1 << 30
# Keys of the pages in which cufa gets them, too.
PAGE_SIZES = (16, 64)
IN_8_BITS, KEYS_IN_8_BITS = "in 8 bits", "in 8 bits but for q"
# What rounding inputs to that may change of the largest output.
MAX_ERROR_IN_8_BITS = 0.15
PEERS = ("flash-attention-2", "cudnn")
# Batch, query heads, KV heads, keys, head dim; queries are few.
SHAPES = (
    *((1, heads, heads, keys, 128) for heads, keys in ((8, 1024), (32, 8192), (128, 65536))),
    *((1, 32, 8, keys, 128) for keys in (1024, 4096, 8192, 16384, 32768, 65536, 131072)),
    *((batch, 32, 8, 8192, 128) for batch in (2, 4, 8, 16, 32, 64)),
    *((batch, 32, 32, 2048, 128) for batch in (4, 16, 64)),
    *((batch, 64, 8, 4096, 128) for batch in (1, 8, 64)),
    *((1, 8, 1, keys, 128) for keys in (4096, 131072)),
    *((batch, 32, 8, keys, 64) for batch, keys in ((1, 8192), (1, 131072), (16, 8192), (64, 1024))),
    *((batch, 16, 4, keys, 256) for batch, keys in ((1, 8192), (1, 131072), (16, 8192), (64, 1024))),
    *((batch, 16, 2, keys, 512) for batch, keys in ((1, 8192), (1, 131072), (16, 8192), (64, 1024))),
    *((batch, heads, 1, 8192, 576) for batch, heads in ((1, 16), (32, 16), (128, 16), (1, 128), (32, 128))),
)
# Multi-head latent attention (DeepSeek-AI 2024) with its projections absorbed: values of so many head dims
# are the beginnings of keys of this many.
LATENT_DIMS = {576: 512}

Shape = tuple[int, int, int, int, int]


class TilesType(click.ParamType):
    """Sizes as in block_n=32,stages=3."""

    name = "name=size,..."

    def convert(self, value: Any, *_: Any) -> dict[str, int]:
        """The sizes by their names."""
        return {name: int(size) for name, size in (each.split("=") for each in value.split(","))}


def calls_of(
    shape: Shape, queries: int, kernels: tuple[str, ...], tiles: tuple[dict[str, int], ...]
) -> dict[str, Call]:
    """A call of each library, of cufa's kernels by their names and of those tiles."""
    batch, heads, kv_heads, keys, dim = shape
    q = torch.randn((batch, queries, heads, dim), dtype=torch.bfloat16, device="cuda")
    cache = torch.randn((batch, keys, kv_heads, dim), dtype=q.dtype, device="cuda")
    values = None if dim in LATENT_DIMS else torch.randn_like(cache)

    def keys_and_values(change: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
        """K and V, their memory changed."""
        changed = change(cache)
        return changed, changed[..., : LATENT_DIMS[dim]] if values is None else change(values)

    k, v = keys_and_values(lambda tensor: tensor)
    attend = partial(cufa.attention, *map(cupy.from_dlpack, (q, k, v)))
    calls: dict[str, Call] = {"cufa": attend}
    for kernel in kernels:
        calls[kernel] = partial(attend, kernel=kernel)
    for sizes in tiles:
        name = " ".join(f"{name}={size}" for name, size in sizes.items())
        calls[name] = partial(attend, kernel="fwd_8_split_kv", tiles=sizes)
    for page_size in PAGE_SIZES:
        table = torch.randperm(batch * keys // page_size, device="cuda").reshape(batch, -1)
        paged = keys_and_values(partial(in_pages, table=table, page_size=page_size))
        arrays = map(cupy.from_dlpack, (q, *paged))
        calls[f"in pages of {page_size}"] = partial(
            cufa.attention, *arrays, block_table=cupy.from_dlpack(table.to(torch.int32))
        )
    in_8_bits = keys_and_values(lambda tensor: read(tensor.to(torch.float8_e4m3fn)))
    calls[IN_8_BITS] = partial(cufa.attention, read(q.to(torch.float8_e4m3fn)), *in_8_bits)
    calls[KEYS_IN_8_BITS] = partial(cufa.attention, cupy.from_dlpack(q), *in_8_bits)
    for name in PEERS:
        calls[name] = of_pytorch(BACKENDS[name], q, k, v)
    return calls


def in_pages(x: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys or values, (batch, keys, heads, dim), in those pages: (pages, page_size, heads, dim)."""
    pages = torch.empty((table.numel(), page_size, *x.shape[2:]), dtype=x.dtype, device=x.device)
    pages[table] = x.reshape(*table.shape, page_size, *x.shape[2:])
    return pages


def check(calls: dict[str, Call]) -> None:
    """That all compute the same; those that cannot are left out."""
    expected = calls["cufa"]()
    for name, call in tuple(calls.items()):
        try:
            result = call()
        except (RuntimeError, ValueError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}", flush=True)
            del calls[name]
            continue
        most = MAX_ERROR_IN_8_BITS if name in (IN_8_BITS, KEYS_IN_8_BITS) else bench_peers.MAX_ERROR
        bench_peers.check_alike(name, result, "cufa", expected, most)


@click.command(help=__doc__)
@click.option("--queries", type=int, multiple=True, default=(1,), show_default=True)
@click.option("--shape", "shapes", type=(int, int, int, int, int), multiple=True, default=SHAPES)
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True)
@click.option("--tiles", "tiles", type=TilesType(), multiple=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
def main(
    queries: tuple[int, ...],
    shapes: tuple[Shape, ...],
    kernels: tuple[str, ...],
    tiles: tuple[dict[str, int], ...],
    rounds: int,
) -> None:
    bench_peers.require_gpu()
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    other = cupy.zeros(FLUSH_BYTES // 4, cupy.float32)
    points: list[dict[str, Any]] = []
    problems = list(product(queries, shapes))
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for count, shape in problems:
            batch, heads, kv_heads, keys, dim = shape
            calls = calls_of(shape, count, kernels, tiles)
            check(calls)
            seconds = bench_peers.times_of(calls, rounds, lambda _: other.sum())
            described = {
                "batch": batch,
                "heads": heads,
                "kv_heads": kv_heads,
                "seqlen_q": count,
                "seqlen_k": keys,
            }
            rows = 1 if dim in LATENT_DIMS else 2  # of K, and of V if it has memory of its own
            read = rows * batch * kv_heads * keys * dim * 2
            dims = {"head_dim": dim, "value_dim": LATENT_DIMS.get(dim, dim)}
            points.append(described | dims | {"bytes": read, "seconds": seconds})
            told = ", ".join(f"{name} {time * 1e6:.1f} us" for name, time in seconds.items())
            print(f"{count} x {shape}: {told}; cufa {read / seconds['cufa'] / 1e12:.2f} TB/s", flush=True)
            bench_peers.write_record(RECORD, len(points), len(problems), {"points": points})


if __name__ == "__main__":
    main()
