#!/usr/bin/env python3
"""Times attention and its gradients with head dims over 256, and writes benchmarks/wide.json.

PyTorch's FlashAttention-2 and cuDNN do not take these. The peers are its memory-efficient attention and,
forward only, FlexAttention, which is left out where it refuses. The way of timing is that of bench_peers.py.
"""

import functools
import os
from itertools import product
from pathlib import Path

import bench_peers
import click
import cupy
import torch
from bench_peers import ROOT
from peer_calls import BACKENDS, FLEX, Call, causal_mod, of_pytorch, with_gradient
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "wide.json"))
DTYPE = torch.bfloat16
EFFICIENT = "efficient"
TOKENS, HEADS, KV_HEADS = 16_384, 8, 4
# FlexAttention's own tiles want more shared memory than there is. These fit with all of the head dims.
SMALL_TILES = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}


def of_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """FlexAttention's forward, compiled for these tensors."""
    mask = create_block_mask(causal_mod, None, None, q.shape[1], k.shape[1]) if causal else None
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    attend = functools.partial(compiled, block_mask=mask, enable_gqa=True, kernel_options=SMALL_TILES)
    return lambda: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def calls_of(head_dim: int, seqlen: int, causal: bool) -> dict[str, dict[str, Call]]:
    """The forward and the backward of each library, as far as it takes the problem."""
    q, k, v, dout = (
        torch.randn((TOKENS // seqlen, seqlen, heads, head_dim), dtype=DTYPE, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    attend = functools.partial(cufa.attention, *arrays, causal=causal, return_lse=True)
    differentiate = functools.partial(cufa.attention_backward, cupy.from_dlpack(dout), *arrays, causal=causal)
    calls: dict[str, dict[str, Call]] = {
        "cufa": {"forward": attend, "backward": functools.partial(differentiate, *attend())}
    }
    tensors = [x.requires_grad_() for x in (q, k, v)]
    # The memory-efficient one has no GQA. Its gradients reach the KV heads through their copies.
    expanded = [q, *(x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))]
    efficient = of_pytorch(BACKENDS[EFFICIENT], *expanded, causal)
    calls[EFFICIENT] = with_gradient(efficient, tensors, dout)
    flex = of_flex(*(x.detach() for x in tensors), causal)
    try:
        flex()
    except (RuntimeError, InductorError, NotImplementedError) as error:
        print(f"{FLEX} is left out of head dim {head_dim}: {str(error).splitlines()[0]}", flush=True)
    else:
        calls[FLEX] = {"forward": flex}
    return calls


@click.command(help=__doc__)
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(320, 384, 512))
@click.option("--seqlen", "seqlens", type=int, multiple=True, default=(1024, 4096, 16_384))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(head_dims: tuple[int, ...], seqlens: tuple[int, ...], rounds: int) -> None:
    problems = []
    for head_dim, causal, seqlen in product(head_dims, (False, True), seqlens):
        pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen**2
        described = {
            "head_dim": head_dim,
            "causal": causal,
            "seqlen": seqlen,
            "flops_of_product": 2 * (TOKENS // seqlen) * HEADS * pairs * head_dim,
        }
        problems.append((described, functools.partial(calls_of, head_dim, seqlen, causal)))
    told = {"tokens": TOKENS, "heads": HEADS, "kv_heads": KV_HEADS, "dtype": "bfloat16"}
    bench_peers.time_problems(RECORD, problems, rounds, told)


if __name__ == "__main__":
    main()
