"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cufa.arrays import BACKENDS
from cufa.kernels import KERNELS
from cufa.problem import DTYPES, LAYOUTS

Command = TypeVar("Command", bound=Callable[..., Any])

SIZE = click.IntRange(min=1)
DTYPE = click.Choice(list(DTYPES))
LAYOUT = click.Choice(list(LAYOUTS))
KERNEL = click.Choice(list(KERNELS))


def several(of: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """The type of an option that takes several values, separated by commas."""

    def convert(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise click.BadParameter("give at least one value")
        return tuple(of(part) for part in parts)

    return convert


def tile_size(text: str) -> tuple[str, int]:
    """The type of an option that overrides a tile size, NAME=N."""
    name, _, size = text.partition("=")
    if not (name.isidentifier() and size.isdecimal()):
        raise click.BadParameter(f"{text!r} is not of the form NAME=N, as in block_m=64")
    return name, int(size)


def json_option(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")(command)


def count_option(name: str, help_text: str, least: int = 0) -> Callable[[Command], Command]:
    """An option that takes a whole number."""
    return click.option(name, type=click.IntRange(min=least), metavar="N", help=help_text)


def backend_option(command: Command) -> Command:
    """--backend."""
    return click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        help="Where to compute; by default on the GPU if there is one, else in NumPy.",
    )(command)


def tile_option(name: str, of: str) -> Callable[[Command], Command]:
    """--tile or another of its kind."""
    return click.option(
        name,
        type=tile_size,
        metavar="NAME=N",
        multiple=True,
        help=f"Override a tile size of the {of}; may be repeated.",
    )
