#!/usr/bin/env python3
"""Times cufa and its peers on one GPU, in one process and in turn, and writes benchmarks/peers.json.

Peers are what PyTorch brings: FlashAttention-2, cuDNN and, for float32, memory-efficient attention; and, if
it is installed, flash-attn-4 (flash_attn.cute). `cufa` is the kernel that it chooses; others of its kernels
stand beside it under their own names. Each problem has 16,384 tokens and 2,048 hidden; all libraries get the
same inputs, normal random ones. A round times one call of each with the L2 cache written over in between;
what counts is the median over the rounds. TFLOP/s count 4 B H S^2 D forward, half of it if causal, and 2.5
times as much backward.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import click
import cupy
import torch
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cufa
from cufa import device
from cufa.kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "peers.json"))
TOKENS, HIDDEN = 16_384, 2_048
PEERS = {
    "float32": {"efficient": SDPBackend.EFFICIENT_ATTENTION},
    "float16": {"flash-attention-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "bfloat16": {"flash-attention-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
}
FLASH_ATTN_4 = "flash-attn-4"
PEER_NAMES = (*dict.fromkeys(name for peers in PEERS.values() for name in peers), FLASH_ATTN_4)

Call = Callable[[], Any]


def peers_of(
    dtype: str, tensors: tuple[torch.Tensor, ...], causal: bool, chosen: Collection[str]
) -> list[tuple[str, Call, list[torch.Tensor]]]:
    """The name of each peer, a call of it, and what it can be differentiated by; layout as cufa's."""
    arguments = [x.detach().requires_grad_() for x in tensors]
    peers: list[tuple[str, Call, list[torch.Tensor]]] = []
    for name, backend in PEERS[dtype].items():
        if name not in chosen:
            continue

        def attend(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                transposed = (x.transpose(1, 2) for x in arguments)
                return scaled_dot_product_attention(*transposed, is_causal=causal).transpose(1, 2)

        peers.append((name, attend, arguments))
    if FLASH_ATTN_4 in chosen and dtype != "float32" and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn.cute.interface import flash_attn_func

        def attend_4() -> torch.Tensor:
            result = flash_attn_func(*arguments, causal=causal)
            return result[0] if isinstance(result, tuple) else result

        peers.append((FLASH_ATTN_4, attend_4, arguments))
    return peers


def calls_of(
    dtype: str, head_dim: int, seqlen: int, causal: bool, kernels: Collection[str], peers: Collection[str]
) -> dict[str, dict[str, Call]]:
    """For each direction, a call of each library and of each kernel of cufa's that is asked for."""
    shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(4))
    ours = [cupy.from_dlpack(x) for x in (q, k, v, dout)]
    out, lse = cufa.attention(*ours[:3], causal=causal, return_lse=True)

    def attend_with(kernel: str | None) -> Call:
        return lambda: cufa.attention(*ours[:3], causal=causal, return_lse=True, kernel=kernel)

    def differentiate_with(kernel: str | None) -> Call:
        return lambda: cufa.attention_backward(ours[3], *ours[:3], out, lse, causal=causal, kernel=kernel)

    calls: dict[str, dict[str, Call]] = {
        "forward": {"cufa": attend_with(None)},
        "backward": {"cufa": differentiate_with(None)},
    }
    for name in kernels:
        backward = KERNELS[name].direction == "backward"
        calls[KERNELS[name].direction][name] = differentiate_with(name) if backward else attend_with(name)
    for name, attend, arguments in peers_of(dtype, (q, k, v), causal, peers):

        def differentiate(result: torch.Tensor, arguments: Any = arguments) -> Any:
            return torch.autograd.grad(result, arguments, dout, retain_graph=True)

        result = attend()
        error = (torch.from_dlpack(out) - result).abs().max().item()
        assert error < 0.05, f"cufa and {name} differ by {error}"
        calls["forward"][name] = attend
        calls["backward"][name] = lambda result=result, differentiate=differentiate: differentiate(result)
    return calls


def times_of(calls: dict[str, Call], rounds: int, flush: Any) -> dict[str, float]:
    """Seconds of each call, the median over rounds in which all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):  # the first compiles and warms up
        for name, call in calls.items():
            flush.fill(round_)
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if round_:
                seconds[name].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return {name: statistics.median(values) for name, values in seconds.items()}


@click.command(help=__doc__)
@click.option("--dtype", "dtypes", type=click.Choice(list(PEERS)), multiple=True, default=("bfloat16",))
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128, 256))
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(512, 1024, 2048, 4096, 8192, 16384))
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True)
@click.option("--peer", "peers", type=click.Choice(PEER_NAMES), multiple=True, default=PEER_NAMES)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    seqlens: tuple[int, ...],
    kernels: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int,
) -> None:
    # One stream for all, so that events of one library see the work of the other.
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(4 * device.current().l2_bytes, cupy.uint8)
    problems = list(product(dtypes, head_dims, seqlens, (False, True)))
    points = []
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for problem in track(problems, console=Console(stderr=True), transient=True):
            dtype, head_dim, seqlen, causal = problem
            flops = 4 * TOKENS * HIDDEN * seqlen / (2 if causal else 1)
            for direction, calls in calls_of(*problem, kernels, peers).items():
                work = flops * (2.5 if direction == "backward" else 1)
                measured = times_of(calls, rounds, flush)
                tflops = {name: work / seconds / 1e12 for name, seconds in measured.items()}
                points.append(
                    {"dtype": dtype, "head_dim": head_dim, "causal": causal, "seqlen": seqlen}
                    | {"direction": direction, "tflops": tflops}
                )
                print(points[-1], flush=True)
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        **machine(),
        "cufa": cufa.__version__,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cupy": cupy.__version__,
        "points": points,
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict[str, Any]:
    command = [sys.executable, "-m", "cufa.cli", "info", "--json"]
    info = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    return {"gpu": device.current().name, "driver": info["driver"], "nvrtc": info["nvrtc"]}


if __name__ == "__main__":
    main()
