#!/usr/bin/env python3
"""Times random calls by each rung with tensor cores that takes them, and writes benchmarks/choice.json.

What counts is how much longer the rung that a call gets takes than the fastest. Calls have few queries or
short sequences: elsewhere the choice is easy. Time is that of `cufa bench`, with a cold L2 cache.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import bench_peers
import click
import cupy
import numpy as np
from bench_peers import BOTH, ROOT
from rich.console import Console
from rich.progress import track

import cufa
from cufa.kernels import KERNELS
from cufa.plan import Plan
from cufa.problem import Direction
from cufa.timing import time_gpu

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "choice.json"))
# The first rung with tensor cores; those before it are never faster.
FIRST = {"forward": "fwd_5_mma", "backward": "bwd_3_mma"}
DTYPES = ("bfloat16", "bfloat16", "float32")
REPEATS = 9
QUERIES = {
    "forward": (1, 1, 2, 4, 8, 16, 32, 64, 77, 128, 197, 256, 512, 1024),
    "backward": (16, 32, 48, 64, 77, 100, 128, 197, 256, 384, 512),
}
KEYS = {
    "forward": (128, 512, 1000, 2048, 4096, 8192, 16384, 32768, 65536),
    "backward": (64, 77, 128, 256, 1024, 4096),
}
# How often there are as many keys as queries.
AS_MANY_KEYS = {"forward": 0.4, "backward": 0.5}
BATCHES, KV_HEADS, GROUPS = (1, 1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16), (1, 1, 1, 2, 4, 8)
HEAD_DIMS = (32, 64, 64, 96, 128, 128, 128, 192, 256, 256)
REACHES = (64, 256, 1024)  # of a window or a mask_mod
# A tensor, and a bias or a mask, have at most so many elements; a product has so many multiplications.
MOST_ELEMENTS, MOST_WORK = 2**28, {"forward": 1.5e11, "backward": 1e10}


@dataclass(frozen=True)
class Drawn:
    """A random call."""

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    feature: str
    reach: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of Q, of K and V, and of scores."""
        return {
            "q": (self.batch, self.seqlen_q, self.heads, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.kv_heads, self.head_dim),
            "scores": (self.batch, self.heads, self.seqlen_q, self.seqlen_k),
        }

    @property
    def is_small(self) -> bool:
        work = prod(self.shapes["scores"]) * self.head_dim
        return max(map(prod, self.shapes.values())) <= MOST_ELEMENTS and work <= MOST_WORK[self.direction]


class Numbers:
    """Views of a few arrays of random numbers, so that no problem waits for its own."""

    def __init__(self) -> None:
        some = cupy.random.standard_normal(MOST_ELEMENTS // 16, dtype=np.float32)
        self._arrays = {
            dtype: [cupy.concatenate([some.astype(np.dtype(dtype))] * 16) for _ in range(4)]
            for dtype in set(DTYPES)
        }
        self._turn = 0

    def of_shape(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A tensor; the next three are others."""
        arrays = self._arrays[dtype]
        self._turn = (self._turn + 1) % len(arrays)
        return arrays[self._turn][: prod(shape)].reshape(shape)


def nearer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * np.minimum(abs(q_idx - kv_idx), 100)


def used_keys(drawn: Drawn) -> Any:
    rng = np.random.default_rng(drawn.seqlen_k)
    return cupy.asarray(rng.integers(drawn.seqlen_k // 2, drawn.seqlen_k + 1, drawn.batch), np.int32)


def padding(drawn: Drawn) -> Any:
    """A mask of the keys that `used_keys` counts."""
    return cupy.arange(drawn.seqlen_k) < used_keys(drawn)[:, None, None, None]


def same_document(drawn: Drawn) -> cufa.MaskMod:
    """Of up to four in a sequence."""
    rng = np.random.default_rng(drawn.seqlen_k)
    numbers = np.sort(rng.integers(0, 4, (drawn.batch, max(drawn.seqlen_q, drawn.seqlen_k))))
    documents = cupy.asarray(numbers, np.int32)
    return cufa.MaskMod(lambda b, h, i, j, number: number[b, i] == number[b, j], documents)


FEATURES: dict[str, Callable[[Drawn, Numbers], dict[str, Any]]] = {
    "none": lambda drawn, numbers: {},
    "causal": lambda drawn, numbers: {"causal": True},
    "window": lambda drawn, numbers: {"window": (drawn.reach, 0)},
    "softcap": lambda drawn, numbers: {"softcap": 30.0},
    "dropout": lambda drawn, numbers: {"dropout_p": 0.1},
    "score_mod": lambda drawn, numbers: {"score_mod": nearer},
    "mask_mod": lambda drawn, numbers: {"mask_mod": lambda b, h, i, j: abs(i - j) <= drawn.reach},
    "documents": lambda drawn, numbers: {"mask_mod": same_document(drawn)},
    "padding": lambda drawn, numbers: {"mask": padding(drawn)},
    "mask": lambda drawn, numbers: {"mask": cupy.ones((drawn.batch, 1, *drawn.shapes["scores"][2:]), bool)},
    "bias": lambda drawn, numbers: {"bias": numbers.of_shape(drawn.shapes["scores"], drawn.dtype)},
    "alibi_slopes": lambda drawn, numbers: {"alibi_slopes": cupy.full(drawn.heads, 0.01, np.float32)},
    "seqused_k": lambda drawn, numbers: {"seqused_k": used_keys(drawn)},
}


def draw(rng: np.random.Generator, direction: Direction) -> Drawn:
    """A random call that is not too large."""
    while True:
        queries, keys, kv_heads, group = (
            int(rng.choice(sizes)) for sizes in (QUERIES[direction], KEYS[direction], KV_HEADS, GROUPS)
        )
        drawn = Drawn(
            direction,
            dtype=str(rng.choice(DTYPES)),
            batch=int(rng.choice(BATCHES)),
            seqlen_q=queries,
            seqlen_k=queries if rng.random() < AS_MANY_KEYS[direction] else keys,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=int(rng.choice(HEAD_DIMS)),
            feature=str(rng.choice(list(FEATURES))),
            reach=int(rng.choice(REACHES)),
        )
        if drawn.is_small:
            return drawn


def arguments_of(drawn: Drawn, numbers: Numbers) -> tuple[list[Any], dict[str, Any]]:
    """Q, K and V, and the options of the feature."""
    tensors = [numbers.of_shape(drawn.shapes[name], drawn.dtype) for name in ("q", "k", "k")]
    return tensors, FEATURES[drawn.feature](drawn, numbers)


def plans_of(drawn: Drawn, numbers: Numbers) -> dict[str, Plan]:
    """By the names of the rungs that take the call; the first is the one that it gets."""
    tensors, options = arguments_of(drawn, numbers)
    plan = partial(cufa.plan, *tensors, **options, backward=drawn.direction == "backward")
    chosen = plan()
    plans = {chosen.kernel: chosen}
    names = [name for name, row in KERNELS.items() if row.direction == drawn.direction]
    for name in names[names.index(FIRST[drawn.direction]) :]:
        if name != chosen.kernel and not KERNELS[name].on_request:
            try:
                plans[name] = plan(kernel=name)
            except ValueError:
                continue  # it does not take the call
    return plans


def seconds_of(drawn: Drawn, names: list[str], numbers: Numbers) -> dict[str, float]:
    """The time of each rung."""
    tensors, options = arguments_of(drawn, numbers)
    call: Callable[..., Any] = partial(cufa.attention, *tensors, **options)
    if drawn.direction == "backward":
        outputs = call(return_lse=True)
        dout = numbers.of_shape(drawn.shapes["q"], drawn.dtype)
        call = partial(cufa.attention_backward, dout, *tensors, *outputs, **options)
    asked = {name: None if name == names[0] else name for name in names}  # the first is the call's own
    return {
        name: time_gpu(partial(call, kernel=kernel), repeats=REPEATS)[1].median
        for name, kernel in asked.items()
    }


@click.command(help=__doc__)
@click.option(
    "--calls", type=click.IntRange(min=1), default=150, show_default=True, help="Of each direction."
)
@click.option("--seed", type=int, default=0, show_default=True)
def main(calls: int, seed: int) -> None:
    bench_peers.require_gpu()
    rng, numbers = np.random.default_rng(seed), Numbers()
    drawn = [draw(rng, direction) for _ in range(calls) for direction in BOTH]
    plans = [plans_of(each, numbers) for each in drawn]
    bench_peers.build_all(
        part.variant for each in plans for plan in each.values() for part in plan.and_beside
    )
    points: list[dict[str, Any]] = []
    tracked = track(drawn, console=Console(stderr=True), transient=True)
    for done, (each, names) in enumerate(zip(tracked, map(list, plans), strict=True), 1):
        seconds = seconds_of(each, names, numbers)
        points.append(asdict(each) | {"chosen": names[0], "seconds": seconds})
        measured = {"seed": seed, "points": points}
        bench_peers.write_record(RECORD, done, len(drawn), measured)


if __name__ == "__main__":
    main()
