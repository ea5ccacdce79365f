#!/usr/bin/env python3
"""Times sliding windows, soft caps and sinks beside other libraries, and writes benchmarks/windows.json.

The problems are layers of models that have them. The peers are FlashAttention-2 by PyTorch, which knows only
windows, and flash-attn-4; one that refuses a problem is left out there. The way of timing is that of
bench_peers.py.
"""

import functools
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import torch
from bench_peers import ROOT
from peer_calls import FLASH_ATTN_4, Call, calls_of_able, is_installed, version_of

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "windows.json"))
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """Self-attention of a model: a query sees `window[0]` keys before it and `window[1]` after it."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    window: tuple[int | None, int | None]
    softcap: float = 0.0
    sink: bool = False


CAUSAL = (None, 0)
LAYERS: dict[str, tuple[Layer, ...]] = {
    "Mistral 7B": (
        Layer(1, 16_384, 32, 8, 128, (4_095, 0)),
        Layer(4, 4_096, 32, 8, 128, (1_023, 0)),
    ),
    "Phi-3 mini": (Layer(1, 16_384, 32, 32, 96, (2_046, 0)),),
    "Gemma 3 12B": (
        Layer(1, 16_384, 16, 8, 256, (1_023, 0)),
        Layer(4, 4_096, 16, 8, 256, (511, 0)),
    ),
    "Gemma 2 9B": (
        Layer(1, 8_192, 16, 8, 256, (4_095, 0), softcap=50.0),
        Layer(1, 8_192, 16, 8, 256, CAUSAL, softcap=50.0),
    ),
    "Gemma 2 27B": (
        Layer(1, 8_192, 32, 16, 128, (4_095, 0), softcap=50.0),
        Layer(1, 8_192, 32, 16, 128, CAUSAL, softcap=50.0),
    ),
    "gpt-oss": (
        Layer(1, 16_384, 64, 8, 64, (127, 0), sink=True),
        Layer(4, 4_096, 64, 8, 64, (127, 0), sink=True),
        Layer(1, 8_192, 64, 8, 64, CAUSAL, sink=True),
    ),
    "Longformer": (Layer(8, 4_096, 12, 12, 64, (256, 256)),),
    "ModernBERT": (
        Layer(8, 8_192, 12, 12, 64, (64, 64)),
        Layer(16, 1_024, 12, 12, 64, (64, 64)),
    ),
    "both sides, head dim 128": (Layer(2, 8_192, 16, 16, 128, (256, 256)),),
}


def cufa_calls(layer: Layer, tensors: Collection[torch.Tensor], sink: torch.Tensor | None) -> dict[str, Call]:
    q, k, v, dout = (cupy.from_dlpack(x) for x in tensors)
    options: dict[str, Any] = {"window": layer.window, "softcap": layer.softcap}
    if sink is not None:
        options["sink"] = cupy.from_dlpack(sink)
    ours = bench_peers.cufa_calls(q, k, v, dout, **options)
    return {direction: ours[direction]["cufa"] for direction in ("forward", "backward")}


def flash_attention_2(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Call:
    left, right = (-1 if side is None else side for side in layer.window)

    def attend() -> torch.Tensor:
        if layer.softcap or layer.sink:
            raise NotImplementedError("neither soft caps nor sinks")
        return torch.ops.aten._flash_attention_forward(
            *(q, k, v, None, None, layer.seqlen, layer.seqlen, 0.0, False, False),
            window_size_left=left,
            window_size_right=right,
        )[0]

    return attend


def flash_attn_4(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Call:
    from flash_attn.cute.interface import flash_attn_func

    left, right = layer.window

    def attend() -> torch.Tensor:
        window = {"causal": True} if layer.window == CAUSAL else {"window_size": (left, right)}
        result = flash_attn_func(q, k, v, softcap=layer.softcap, learnable_sink=sink, **window)
        return result[0] if isinstance(result, tuple) else result

    return attend


PEERS = {"flash-attention-2": flash_attention_2, FLASH_ATTN_4: flash_attn_4}


def calls_of(layer: Layer, peers: Collection[str]) -> dict[str, dict[str, Call]]:
    """The forward and the backward of each library that takes the problem."""
    shape_q = layer.batch, layer.seqlen, layer.heads, layer.head_dim
    shape_k = layer.batch, layer.seqlen, layer.kv_heads, layer.head_dim
    tensors = [
        torch.randn(shape, dtype=DTYPE, device="cuda") for shape in (shape_q, shape_k, shape_k, shape_q)
    ]
    sink = torch.randn(layer.heads, dtype=DTYPE, device="cuda") if layer.sink else None
    calls = {"cufa": cufa_calls(layer, tensors, None if sink is None else sink.float())}
    *inputs, dout = tensors
    for x in inputs:
        x.requires_grad_()
    of_peers = ((name, PEERS[name](layer, *inputs, sink), inputs) for name in filter(is_installed, peers))
    return calls | calls_of_able(layer, of_peers, dout)


@click.command(help=__doc__)
@click.option("--layer", "chosen", type=click.Choice(list(LAYERS)), multiple=True, default=list(LAYERS))
@click.option("--peer", "peers", type=click.Choice(list(PEERS)), multiple=True, default=list(PEERS))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(chosen: Collection[str], peers: Collection[str], rounds: int) -> None:
    problems = [
        ({"layer": name} | asdict(layer), functools.partial(calls_of, layer, peers))
        for name in chosen
        for layer in LAYERS[name]
    ]
    told = {FLASH_ATTN_4: version_of(FLASH_ATTN_4), "dtype": "bfloat16"}
    bench_peers.time_problems(RECORD, problems, rounds, told)


if __name__ == "__main__":
    main()
