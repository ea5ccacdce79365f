#!/usr/bin/env python3
"""Train a character-level GPT whose attention is cufa's, forward and backward, and sample from it.

TEXT is a UTF-8 file, this repository's README.md by default. The arrays are CuPy's on a GPU and NumPy's
without one. Every gradient is written out by hand (gpt_model.py), so that a loss that falls says they are
right; with --attention standard it falls in the same way.

The defaults suit a few kilobytes of text and a CPU. A text so short is soon learnt by heart, which is when
the held-out loss rises; longer ones are worth more steps.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from gpt_model import ATTENTIONS, GPT, Array, Config
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from cufa import GPUUnavailableError, arrays, device

README = Path(__file__).parents[1] / "README.md"

BETA_1, BETA_2, ADAM_EPSILON = 0.9, 0.99, 1e-8
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
WARMUP_FRACTION = 0.05
FINAL_LEARNING_RATE_FRACTION = 0.1
HELD_OUT_FRACTION = 0.1
EVALUATED_WINDOWS = 32
STEPS_BETWEEN_READINGS = 10  # to read a loss is to wait for the GPU


@dataclass(frozen=True)
class Options:
    """What the command line takes, under the same names."""

    steps: int
    batch: int
    length: int
    layers: int
    heads: int
    kv_heads: int | None
    width: int
    dtype: str
    learning_rate: float
    seed: int
    backend: str | None
    attention: str
    sample: int
    temperature: float


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2), gradients clipped."""

    def __init__(self, model: GPT) -> None:
        xp, self.model, self.steps = model.xp, model, 0
        self.m, self.v = xp.zeros_like(model.values), xp.zeros_like(model.values)
        # Gains and biases are vectors, and are not pulled to 0.
        decayed = [np.full(array.size, array.ndim > 1) for array in model.parameters.values()]
        self.decay = xp.asarray(WEIGHT_DECAY * np.concatenate(decayed), dtype=model.values.dtype)

    def step(self, learning_rate: float) -> None:
        xp, gradient = self.model.xp, self.model.gradient
        norm = xp.sqrt((gradient * gradient).sum())
        gradient *= MAX_GRADIENT_NORM / xp.maximum(norm, MAX_GRADIENT_NORM)
        self.steps += 1
        self.m += (1 - BETA_1) * (gradient - self.m)
        self.v += (1 - BETA_2) * (gradient * gradient - self.v)
        m = self.m / (1 - BETA_1**self.steps)
        v = self.v / (1 - BETA_2**self.steps)
        values = self.model.values
        values -= learning_rate * (m / (xp.sqrt(v) + ADAM_EPSILON) + self.decay * values)


def schedule(step: int, steps: int, peak: float) -> float:
    """The learning rate of a step: a linear warm-up, then half a cosine down to a fraction of the peak."""
    warmup = max(1, round(WARMUP_FRACTION * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return peak * (FINAL_LEARNING_RATE_FRACTION + (1 - FINAL_LEARNING_RATE_FRACTION) * cosine)


def windows(model: GPT, characters: Array, starts: Array) -> tuple[Array, Array]:
    """Tokens from each of these starts, and the ones that follow each; both (len(starts), length)."""
    offsets = starts[:, None] + np.arange(model.config.length + 1)
    window = model.xp.asarray(characters[offsets])
    return window[:, :-1], window[:, 1:]


def evaluate(model: GPT, characters: Array, batch: int) -> float:
    """The mean loss over windows that are evenly spread, the same ones whenever it is called."""
    last = len(characters) - model.config.length - 1
    starts = np.linspace(0, last, min(EVALUATED_WINDOWS, last + 1)).astype(int)
    batches = [starts[i : i + batch] for i in range(0, len(starts), batch)]
    total = sum(len(part) * float(model.loss(*windows(model, characters, part))) for part in batches)
    return total / len(starts)


def train(
    model: GPT, characters: Array, rng: np.random.Generator, steps: int, batch: int, learning_rate: float
) -> Iterator[Array]:
    """Train for so many steps; the loss of each, on the GPU until the caller reads it."""
    optimiser = AdamW(model)
    for step in range(steps):
        starts = rng.integers(0, len(characters) - model.config.length, batch)
        yield model.loss_and_gradient(*windows(model, characters, starts))
        optimiser.step(schedule(step, steps, learning_rate))


def sample(
    model: GPT, prompt: list[int], count: int, temperature: float, rng: np.random.Generator
) -> list[int]:
    """`count` tokens that continue the prompt, each drawn from the model's softmax; 0 takes the likeliest."""
    tokens = list(prompt)
    for _ in range(count):
        context = model.xp.asarray([tokens[-model.config.length :]])
        logits = np.array(model.logits(context)[0, -1].tolist())
        if temperature:
            # The largest of logits with Gumbel noise is a draw from their softmax.
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def array_module(backend: str | None) -> Any:
    """CuPy where there is a GPU for it or it is asked for, else NumPy."""
    if backend == "numpy" or (backend is None and not arrays.gpu_usable()):
        return np
    device.current()  # says what is missing
    import cupy

    return cupy


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error


def split(characters: Array, length: int) -> tuple[Array, Array]:
    """The text to train on, and the end of it that is held out."""
    held_out = max(length + 1, round(HELD_OUT_FRACTION * len(characters)))
    if len(characters) - held_out < length + 1:
        raise ValueError(
            f"length is {length}, but the text has {len(characters)} characters; it needs at least "
            f"{2 * (length + 1)}, half of them to hold out"
        )
    return characters[:-held_out], characters[-held_out:]


def run(text: str, options: Options) -> dict[str, Any]:
    """Train and sample; what there is to report, ready for JSON."""
    vocabulary = sorted(set(text))
    characters = np.searchsorted(vocabulary, list(text))
    trained, held_out = split(characters, options.length)
    xp = array_module(options.backend)
    rng = np.random.default_rng(options.seed)
    config = Config(
        vocabulary=len(vocabulary),
        length=options.length,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        width=options.width,
        attention=options.attention,
        attention_dtype=options.dtype,
    )
    model = GPT(config, xp, rng)

    def evaluation() -> dict[str, float]:
        return {
            "train": evaluate(model, trained, options.batch),
            "held_out": evaluate(model, held_out, options.batch),
        }

    start = evaluation()
    model.loss_and_gradient(*windows(model, trained, np.zeros(options.batch, int)))  # compiles what it needs
    started = time.perf_counter()
    losses = train_with_progress(model, trained, rng, options)
    seconds = time.perf_counter() - started
    continuation = sample(model, trained[:1].tolist(), options.sample, options.temperature, rng)
    return {
        "characters": len(text),
        "vocabulary": len(vocabulary),
        "parameters": model.values.size,
        "backend": "numpy" if xp is np else "cuda",
        "device": "CPU" if xp is np else device.current().name,
        "options": asdict(options),
        "seconds": seconds,
        "tokens_per_second": options.steps * options.batch * options.length / seconds,
        "loss_at_start": start,
        "loss_at_end": evaluation(),
        "step_losses": losses,
        "sample": "".join(vocabulary[token] for token in continuation),
    }


@np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite is an error of its own
def train_with_progress(
    model: GPT, characters: Array, rng: np.random.Generator, options: Options
) -> list[float]:
    """Train behind a progress bar; the loss of each step."""
    losses = []
    with progress_bar() as progress:
        bar = progress.add_task("Training", total=options.steps, loss=math.nan)
        for loss in train(model, characters, rng, options.steps, options.batch, options.learning_rate):
            losses.append(loss)
            progress.advance(bar)
            if len(losses) % STEPS_BETWEEN_READINGS == 0 or len(losses) == options.steps:
                progress.update(bar, loss=float(loss))
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"the loss is {float(loss)} at step {len(losses)}; try a smaller --learning-rate"
                    )
    return [float(loss) for loss in losses]


def progress_bar() -> Progress:
    return Progress(
        TextColumn("Training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def show(text_path: Path, report: dict[str, Any]) -> None:
    table = Table(title="Mean loss, nats per character", title_justify="left")
    for heading in ("", "train", "held out"):
        table.add_column(heading, justify="right")
    for when in ("start", "end"):
        losses = report[f"loss_at_{when}"]
        table.add_row(f"at the {when}", f"{losses['train']:.3f}", f"{losses['held_out']:.3f}")
    options = report["options"]
    console = Console()
    console.print(
        f"{report['parameters']:,} parameters, {options['attention']} attention in {options['dtype']} "
        f"on {report['device']}; {text_path}: {report['characters']:,} characters, "
        f"{report['vocabulary']} different ones",
        markup=False,
        highlight=False,
    )
    console.print(
        f"{options['steps']} steps in {report['seconds']:.1f} s, {report['tokens_per_second']:,.0f} tokens/s",
        highlight=False,
    )
    console.print(table)
    if report["sample"]:
        console.print(Panel(Text(report["sample"]), title="Sample", title_align="left"))


def positive() -> click.IntRange:
    return click.IntRange(min=1)


@click.command(help=__doc__)
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=README)
@click.option("--steps", type=positive(), default=300, show_default=True)
@click.option("--batch", type=positive(), default=12, show_default=True, help="Sequences in a step.")
@click.option("--length", type=positive(), default=64, show_default=True, help="Characters in a sequence.")
@click.option("--layers", type=positive(), default=3, show_default=True)
@click.option("--heads", type=positive(), default=3, show_default=True)
@click.option("--kv-heads", type=positive(), default=None, help="Fewer than --heads for GQA.")
@click.option("--width", type=positive(), default=96, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of Q, K and V; all else is float32.",
)
@click.option("--learning-rate", type=click.FloatRange(min=0), default=3e-3, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--backend", type=click.Choice(arrays.BACKENDS), default=None, help="[default: a GPU if there is one]"
)
@click.option("--attention", type=click.Choice(list(ATTENTIONS)), default="cufa", show_default=True)
@click.option("--sample", type=click.IntRange(min=0), default=300, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout and nothing else.")
def main(text: Path, as_json: bool, **options: Any) -> None:
    try:
        report = run(read(text), Options(**options))
    except (ValueError, FloatingPointError, GPUUnavailableError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"text": str(text), **report}, indent=2))
    else:
        show(text, report)


if __name__ == "__main__":
    main()
