#!/usr/bin/env python3
"""Times functions of one's own on scores beside PyTorch's FlexAttention, and writes benchmarks/flex.json.

Forward and backward of long sequences are timed, and decoding. FlexAttention is compiled by torch.compile,
and its block mask is made beforehand; neither counts. What cufa finds out about a mask_mod is part of each
of its calls. Both get the same inputs and functions. The way of timing is that of scripts/bench_peers.py.
"""

import functools
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import numpy as np
import torch
from bench_peers import FLUSH_BYTES, ROOT
from peer_calls import FLEX, Call, Tensors, causal_mod, of_flex
from rich.console import Console
from rich.progress import track
from torch.nn.attention.flex_attention import create_block_mask

import cufa

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "flex.json"))
BATCH, SEQLEN, HEADS = 4, 4096, 16
DOCUMENTS, WINDOW, CAP = 8, 512, 20.0
NEAR, BUCKETS, FARTHEST = 16, 32, 128

# A query of each sequence, whose keys are in a cache.
DECODING = {"batch": 16, "seqlen_k": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}

Function = Callable[..., Any]


def alibi(score: Any, _: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    return score - slopes[h] * abs(q_idx - kv_idx)


def relative_bias(score: Any, _: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[h, q_idx - kv_idx + (SEQLEN - 1)]


def bias_of_age(score: Any, _: Any, h: Any, __: Any, kv_idx: Any, table: Any) -> Any:
    """A relative bias of the one query, which follows all keys."""
    return score + table[h, DECODING["seqlen_k"] - 1 - kv_idx]


def bucket_of_age(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return t5_bias(score, b, h, q_idx + (DECODING["seqlen_k"] - 1), kv_idx, table)


def before_end(b: Any, _: Any, __: Any, kv_idx: Any, lengths: Any) -> Any:
    return kv_idx < lengths[b]


def t5_bias(score: Any, _: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    """T5's buckets: one for each of the least distances, then for ranges of them that grow by a factor."""
    log, where = (torch.log, torch.where) if isinstance(score, torch.Tensor) else (np.log, np.where)
    distance = abs(q_idx - kv_idx)
    far = log(distance / NEAR) / math.log(FARTHEST / NEAR) * (BUCKETS - NEAR)
    far = NEAR + (far.to(torch.int32) if isinstance(score, torch.Tensor) else far.astype(np.int32))
    return score + table[h, where(distance < NEAR, distance, where(far < BUCKETS, far, BUCKETS - 1))]


def softcap(score: Any, *_: Any) -> Any:
    tanh = torch.tanh if isinstance(score, torch.Tensor) else np.tanh
    return CAP * tanh(score / CAP)


def window(_: Any, __: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < WINDOW)


def same_document(b: Any, _: Any, q_idx: Any, kv_idx: Any, document: Any) -> Any:
    return document[b, q_idx] == document[b, kv_idx]


# Of this one, what the function reads has a gradient, too.
LEARNT = "relative bias, learnt"
# For this one cufa has an argument.
BY_ARGUMENT = "ALiBi, by alibi_slopes"
# The functions of each case by the names of arguments.
CASES: dict[str, dict[str, Function]] = {
    "ALiBi": {"score_mod": alibi},
    BY_ARGUMENT: {"score_mod": alibi},
    "relative bias": {"score_mod": relative_bias},
    LEARNT: {"score_mod": relative_bias},
    "T5's buckets": {"score_mod": t5_bias},
    "soft cap, causal": {"score_mod": softcap, "mask_mod": causal_mod},
    f"window of {WINDOW}": {"mask_mod": window},
    f"{DOCUMENTS} documents": {"mask_mod": same_document},
}
DECODING_CASES: dict[str, dict[str, Function]] = {
    "relative bias": {"score_mod": bias_of_age},
    "T5's buckets": {"score_mod": bucket_of_age},
    "caches of all lengths": {"mask_mod": before_end},
}
CUFA_MODS: dict[str, Any] = {"score_mod": cufa.ScoreMod, "mask_mod": cufa.MaskMod}


def arrays_of(function: Function) -> Tensors:
    """What a function reads."""
    if function is alibi:
        return (2 ** -torch.arange(0.5, 8.5, 8 / HEADS, device="cuda"),)
    if function is relative_bias:
        return (torch.randn(HEADS, 2 * SEQLEN - 1, device="cuda"),)
    if function is t5_bias:
        return (torch.randn(HEADS, BUCKETS, device="cuda"),)
    if function is bias_of_age:
        return (torch.randn(DECODING["heads"], DECODING["seqlen_k"], device="cuda"),)
    if function is bucket_of_age:
        return (torch.randn(DECODING["heads"], BUCKETS, device="cuda"),)
    if function is before_end:
        lengths = torch.linspace(0, DECODING["seqlen_k"], DECODING["batch"] + 1, device="cuda")
        return (lengths[1:].to(torch.int32),)
    if function is same_document:
        drawn = torch.randint(DOCUMENTS, (BATCH, SEQLEN), dtype=torch.int32, device="cuda")
        return (drawn.sort(dim=1).values,)
    return ()


def learnt_of(mods: dict[str, tuple[Function, Tensors]]) -> list[torch.Tensor]:
    """Those tensors that functions read and that want gradients."""
    return [tensor for _, tensors in mods.values() for tensor in tensors if tensor.requires_grad]


def with_arrays(name: str, function: Function, tensors: Tensors) -> Function:
    """A function as FlexAttention wants it, which counts its arguments."""
    if name == "score_mod":
        return lambda score, b, h, q_idx, kv_idx: function(score, b, h, q_idx, kv_idx, *tensors)
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx, kv_idx, *tensors)


def cufa_options(case: str, mods: dict[str, tuple[Function, Tensors]]) -> dict[str, Any]:
    arrays = {name: [cupy.from_dlpack(x.detach()) for x in tensors] for name, (_, tensors) in mods.items()}
    if case == BY_ARGUMENT:
        return {"alibi_slopes": arrays["score_mod"][0]}
    return {name: CUFA_MODS[name](function, *arrays[name]) for name, (function, _) in mods.items()}


def cufa_calls(case: str, inputs: Tensors, mods: dict[str, tuple[Function, Tensors]]) -> dict[str, Call]:
    """Forward and backward."""
    q, k, v, dout = map(cupy.from_dlpack, inputs)
    options = cufa_options(case, mods)
    attend = functools.partial(cufa.attention, q, k, v, **options, return_lse=True)
    out, lse = attend()
    asked = {"return_dscore_mod": bool(learnt_of(mods))}
    differentiate = functools.partial(cufa.attention_backward, dout, q, k, v, out, lse, **options, **asked)
    return {"forward": attend, "backward": differentiate}


def flex_options(
    mods: dict[str, tuple[Function, Tensors]], batch: int, queries: int, keys: int
) -> dict[str, Any]:
    """FlexAttention's own arguments; a mask_mod that reads nothing is the same for all sequences."""
    functions = {name: with_arrays(name, *of_name) for name, of_name in mods.items()}
    mask_mod = functions.pop("mask_mod", None)
    if mask_mod is None:
        return functions
    sequences = batch if mods["mask_mod"][1] else None
    return functions | {"block_mask": create_block_mask(mask_mod, sequences, None, queries, keys)}


def flex_calls(
    inputs: Tensors, mods: dict[str, tuple[Function, Tensors]]
) -> tuple[dict[str, Call], dict[str, int]]:
    """Forward and backward, and what options of its kernels they need."""
    *operands, dout = inputs
    arguments = [x.detach().requires_grad_() for x in operands]
    learnt = learnt_of(mods)
    attend, kernel_options = of_flex(arguments, learnt, **flex_options(mods, BATCH, SEQLEN, SEQLEN))
    differentiate = functools.partial(
        torch.autograd.grad, attend(), arguments + learnt, grad_outputs=dout, retain_graph=True
    )
    return {"forward": attend, "backward": differentiate}, kernel_options


def decoding_calls(
    case: str, operands: Tensors, mods: dict[str, tuple[Function, Tensors]]
) -> tuple[dict[str, Call], dict[str, int]]:
    """The calls of both for a query of each sequence, and what options FlexAttention's kernel needs."""
    options = flex_options(mods, DECODING["batch"], 1, DECODING["seqlen_k"])
    theirs, kernel_options = of_flex(operands, enable_gqa=True, **options)
    given = map(cupy.from_dlpack, operands)
    ours = functools.partial(cufa.attention, *given, **cufa_options(case, mods))
    return {"cufa": ours, FLEX: theirs}, kernel_options


def decoding_points(dtype: str, rounds: int, flush: Any) -> list[dict[str, Any]]:
    """How long decoding takes, case by case."""
    points = []
    batch, keys, heads, kv_heads, head_dim = DECODING.values()
    for case, of_case in DECODING_CASES.items():
        sizes = (batch, 1, heads, head_dim), *((batch, keys, kv_heads, head_dim),) * 2
        operands = tuple(torch.randn(size, dtype=getattr(torch, dtype), device="cuda") for size in sizes)
        mods = {name: (function, arrays_of(function)) for name, function in of_case.items()}
        calls, kernel_options = decoding_calls(case, operands, mods)
        bench_peers.check({name: {"forward": call} for name, call in calls.items()})
        seconds = bench_peers.times_of(calls, rounds, flush)
        points.append({"case": case, "seconds": seconds, "kernel_options": kernel_options})
        print(points[-1], flush=True)
    return points


@click.command(help=__doc__)
@click.option("--dtype", type=click.Choice(("float16", "bfloat16")), default="bfloat16", show_default=True)
@click.option("--case", "cases", type=click.Choice(tuple(CASES)), multiple=True, default=tuple(CASES))
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def main(dtype: str, cases: tuple[str, ...], head_dims: tuple[int, ...], rounds: int) -> None:
    bench_peers.require_gpu()
    torch.manual_seed(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
    shape = {"batch": BATCH, "seqlen": SEQLEN, "heads": HEADS, "dtype": dtype}
    points: list[dict[str, Any]] = []
    problems = list(product(cases, head_dims))
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        tracked = track(problems, console=Console(stderr=True), transient=True)
        for done, (case, head_dim) in enumerate(tracked, 1):
            size = BATCH, SEQLEN, HEADS, head_dim
            inputs = tuple(torch.randn(size, dtype=getattr(torch, dtype), device="cuda") for _ in range(4))
            mods = {name: (function, arrays_of(function)) for name, function in CASES[case].items()}
            for tensor in mods["score_mod"][1] if case == LEARNT else ():
                tensor.requires_grad_()
            theirs, kernel_options = flex_calls(inputs, mods)
            calls = {"cufa": cufa_calls(case, inputs, mods), FLEX: theirs}
            bench_peers.check(calls)
            for direction in theirs:
                of_direction = {name: by_direction[direction] for name, by_direction in calls.items()}
                seconds = bench_peers.times_of(of_direction, rounds, flush.fill)
                described = {"case": case, "head_dim": head_dim, "direction": direction}
                points.append(described | {"seconds": seconds, "kernel_options": kernel_options})
                print(points[-1], flush=True)
            bench_peers.write_record(RECORD, done, len(problems), shape | {"points": points})
        decoding = {**DECODING, "points": decoding_points(dtype, rounds, flush.fill)}
    record = shape | {"points": points, "decoding": decoding}
    bench_peers.write_record(RECORD, len(problems), len(problems), record)


if __name__ == "__main__":
    main()
