#!/usr/bin/env python3
"""Times packed sequences of many lengths beside other libraries, and writes benchmarks/packed.json.

The peers are FlashAttention-2 (PyTorch's varlen_attn) and flash-attn-4; one that refuses a problem is left
out there. All are told the longest length. Where all sequences are equally long, cufa is also timed on the
same arrays as a batch. The way of timing is that of bench_peers.py.
"""

import functools
import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import bench_peers
import click
import cupy
import numpy as np
import torch
from bench_peers import ROOT
from peer_calls import FLASH_ATTN_4, Call, calls_of_able, is_installed, version_of
from torch.nn.attention.varlen import varlen_attn

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "packed.json"))
DTYPE = torch.bfloat16
BATCH = "in a batch"
HIDDEN, HEAD_DIMS = 2_048, (64, 128)

# Drawn once: most documents are short, and most tokens in long ones.
DOCUMENTS = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.4, 50).astype(int) + 1, 8_192)
LENGTHS: dict[str, list[int]] = {
    "4 of 4,096": [4_096] * 4,
    "16 of 1,024": [1_024] * 16,
    "128 of 128": [128] * 128,
    "each half as long as the one before, from 8,192 on": [8_192 >> i for i in range(14)],
    "one of 8,192, 64 of 128": [8_192] + [128] * 64,
    "8 to 2,048 in steps of 120": list(range(8, 2_049, 120)),
    "documents": DOCUMENTS.tolist(),
    "1 to 128": list(range(1, 129)),
}


@dataclass(frozen=True)
class Packed:
    """Sequences of these lengths, one after the other."""

    lengths: list[int]
    head_dim: int
    causal: bool

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        return torch.tensor(np.cumsum([0, *self.lengths]), dtype=torch.int32, device="cuda")


def cufa_calls(packed: Packed, tensors: Collection[torch.Tensor]) -> dict[str, dict[str, Call]]:
    starts = cupy.from_dlpack(packed.starts)
    q, k, v, dout = (cupy.from_dlpack(x) for x in tensors)
    options = {"causal": packed.causal, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(packed.lengths))
    attend = functools.partial(cufa.attention, q, k, v, return_lse=True, **options)
    differentiate = functools.partial(cufa.attention_backward, dout, q, k, v, *attend(), **options)
    calls: dict[str, dict[str, Call]] = {"cufa": {"forward": attend, "backward": differentiate}}
    if len(set(packed.lengths)) == 1:
        shape = len(packed.lengths), packed.lengths[0], packed.heads, packed.head_dim
        batch = (x.reshape(shape) for x in (q, k, v, dout))
        of_batch = bench_peers.cufa_calls(*batch, causal=packed.causal)
        calls[BATCH] = {direction: of_batch[direction]["cufa"] for direction in calls["cufa"]}
    return calls


def flash_attention_2(packed: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    longest, window = max(packed.lengths), (-1, 0 if packed.causal else -1)
    return functools.partial(
        varlen_attn, q, k, v, packed.starts, packed.starts, longest, longest, window_size=window
    )


def flash_attn_4(packed: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from flash_attn.cute.interface import flash_attn_varlen_func

    longest = max(packed.lengths)

    def attend() -> torch.Tensor:
        result = flash_attn_varlen_func(
            *(q, k, v),
            cu_seqlens_q=packed.starts,
            cu_seqlens_k=packed.starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=packed.causal,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend


PEERS = {"flash-attention-2": flash_attention_2, FLASH_ATTN_4: flash_attn_4}


def calls_of(packed: Packed, peers: Collection[str]) -> dict[str, dict[str, Call]]:
    """The forward and the backward of each library that takes the problem."""
    shape = sum(packed.lengths), packed.heads, packed.head_dim
    tensors = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(4)]
    calls = cufa_calls(packed, tensors)
    *inputs, dout = tensors
    for x in inputs:
        x.requires_grad_()
    of_peers = ((name, PEERS[name](packed, *inputs), inputs) for name in filter(is_installed, peers))
    return calls | calls_of_able(packed, of_peers, dout)


@click.command(help=__doc__)
@click.option("--lengths", "chosen", type=click.Choice(list(LENGTHS)), multiple=True, default=list(LENGTHS))
@click.option("--peer", "peers", type=click.Choice(list(PEERS)), multiple=True, default=list(PEERS))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(chosen: Collection[str], peers: Collection[str], rounds: int) -> None:
    problems = []
    for name, head_dim, causal in itertools.product(chosen, HEAD_DIMS, (False, True)):
        packed = Packed(LENGTHS[name], head_dim, causal)
        described = {"lengths": name, "sequences": len(packed.lengths), "tokens": sum(packed.lengths)}
        described |= {"heads": packed.heads, "head_dim": head_dim, "causal": causal}
        problems.append((described, functools.partial(calls_of, packed, peers)))
    told = {FLASH_ATTN_4: version_of(FLASH_ATTN_4), "dtype": "bfloat16"}
    bench_peers.time_problems(RECORD, problems, rounds, told, unchecked=(BATCH,))


if __name__ == "__main__":
    main()
