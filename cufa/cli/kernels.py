"""`cufa kernels`: the registry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from cufa.cli import output
from cufa.cli.options import json_option
from cufa.device import Arch
from cufa.kernels import COMPANIONS, KERNELS, Kernel
from cufa.problem import DTYPES

# What any rung supports beyond a causal mask.
_ALL_FEATURES = frozenset[str]().union(*(kernel.features for kernel in KERNELS.values()))


@click.command("kernels")
@json_option
def command(as_json: bool) -> None:
    """List the kernels: the ladder from standard attention up, and those beside it."""
    if as_json:
        output.print_json(_documents())
        return
    console = output.stdout()
    for direction in ("forward", "backward"):
        columns = ("<kernel", "<idea", "<memory", "<dtypes", "<features", "<from")
        table = output.table(columns, direction)
        table.columns[0].no_wrap = True
        for kernel in KERNELS.values():
            if kernel.direction == direction:
                table.add_row(
                    kernel.name,
                    f"{kernel.idea} ({kernel.paper})",
                    kernel.memory,
                    "all" if kernel.dtypes == tuple(DTYPES) else ", ".join(kernel.dtypes),
                    _features(kernel),
                    str(Arch(*kernel.min_capability)),
                )
                table.add_section()
        console.print(table)
    table = output.table(("<kernel", "<idea", "<for"), "beside the ladder")
    table.columns[0].no_wrap = True
    for companion in COMPANIONS.values():
        table.add_row(companion.name, f"{companion.idea} ({companion.paper})", companion.function)
    console.print(table)
    console.print(
        f"dtypes: all are {', '.join(DTYPES)}. memory: global, beyond inputs and outputs, for sequence "
        f"length N. features: all are causal, {', '.join(sorted(_ALL_FEATURES))}."
    )


def _features(kernel: Kernel) -> str:
    if kernel.features == _ALL_FEATURES:
        return "all"
    return ", ".join(("causal", *sorted(kernel.features)))


def _documents() -> list[dict[str, Any]]:
    """The rungs, then those beside the ladder, which have no direction."""
    rungs = [
        {
            "name": kernel.name,
            "direction": kernel.direction,
            "idea": kernel.idea,
            "paper": kernel.paper,
            "memory": kernel.memory,
            "dtypes": list(kernel.dtypes),
            "features": ["causal", *sorted(kernel.features)],
            "min_arch": str(Arch(*kernel.min_capability)),
            "max_head_dim": kernel.max_head_dim,
            "entries": list(kernel.entries),
            "source": kernel.source,
        }
        for kernel in KERNELS.values()
    ]
    return rungs + [asdict(companion) | {"direction": None} for companion in COMPANIONS.values()]
