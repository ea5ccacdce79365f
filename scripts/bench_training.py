#!/usr/bin/env python3
"""Trains the GPT of train_gpt.py by cufa in 16 bits and by standard attention in float32, and compares.

Each seed is trained both ways, from the same parameters and on the same text, this checkout's source code.
Writes benchmarks/training.json: the losses at the end, by how much those of the reference differ from seed to
seed, and the kernels that were used.
"""

import json
import os
import statistics
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from train_gpt import Options, run  # noqa: E402

import cufa  # noqa: E402 - from this checkout, installed or not
from cufa.problem import DTYPES  # noqa: E402

RECORD = Path(os.environ.get("CUFA_RECORD", ROOT / "benchmarks" / "training.json"))
REFERENCE = Options(
    steps=600,
    batch=16,
    length=512,
    layers=4,
    heads=6,
    kv_heads=3,
    width=384,
    dtype="float32",
    learning_rate=1e-3,
    seed=0,
    backend="cuda",
    attention="standard",
    sample=0,
    temperature=0,
)
LAST_STEPS = 25  # whose mean is the loss that training came to: one step's depends on its few sequences


def source_code() -> str:
    files = sorted(path for suffix in ("py", "cu", "cuh") for path in ROOT.glob(f"cufa/**/*.{suffix}"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def kernels_of(options: Options) -> list[str]:
    """The kernels that cufa takes for these sizes, forward and backward."""
    dim = options.width // options.heads
    q, k = (
        np.empty((options.batch, options.length, heads, dim), DTYPES[options.dtype])
        for heads in (options.heads, options.kv_heads or options.heads)
    )
    return [cufa.plan(q, k, k, causal=True, backward=backward).kernel for backward in (False, True)]


def trained(text: str, options: Options) -> dict[str, Any]:
    report = run(text, options)
    return {
        "seed": options.seed,
        "loss": statistics.mean(report["step_losses"][-LAST_STEPS:]),
        "held_out": report["loss_at_end"]["held_out"],
        "tokens_per_second": report["tokens_per_second"],
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    losses = [each["loss"] for each in runs]
    return {
        "loss": statistics.mean(losses),
        "deviation": statistics.stdev(losses),
        "tokens_per_second": statistics.median(each["tokens_per_second"] for each in runs),
    }


@click.command(help=__doc__)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--steps", type=click.IntRange(min=LAST_STEPS), default=REFERENCE.steps, show_default=True)
@click.option("--seeds", type=click.IntRange(min=2), default=3, show_default=True)
def main(dtype: str, steps: int, seeds: int) -> None:
    try:
        gpu = cufa.device.current().name
    except cufa.GPUUnavailableError as error:
        raise click.ClickException(str(error)) from error
    text = source_code()
    reference = replace(REFERENCE, steps=steps)
    ours = replace(reference, dtype=dtype, attention="cufa")
    runs: dict[str, list[dict[str, Any]]] = {"cufa": [], "standard": []}
    for seed in range(seeds):
        for options in (ours, reference):
            runs[options.attention].append(trained(text, replace(options, seed=seed)))
            print(options.attention, options.dtype, runs[options.attention][-1], flush=True)
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "characters": len(text),
        "options": asdict(ours),
        "kernels": kernels_of(ours),
        "runs": runs,
        "summary": {name: summary(each) for name, each in runs.items()},
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(record["kernels"], record["summary"])


if __name__ == "__main__":
    main()
