"""`cufa kernels`: the registry."""

from __future__ import annotations

import click

from cufa.cli import output
from cufa.cli.options import json_option
from cufa.device import Arch
from cufa.kernels import KERNELS
from cufa.problem import DTYPES


@click.command("kernels")
@json_option
def command(as_json: bool) -> None:
    """List the kernels, from standard attention up."""
    if as_json:
        output.print_json(
            [
                {
                    "name": kernel.name,
                    "direction": kernel.direction,
                    "idea": kernel.idea,
                    "paper": kernel.paper,
                    "memory": kernel.memory,
                    "dtypes": list(kernel.dtypes),
                    "min_arch": str(Arch(*kernel.min_capability)),
                    "max_head_dim": kernel.max_head_dim,
                    "entries": list(kernel.entries),
                    "source": kernel.source,
                }
                for kernel in KERNELS.values()
            ]
        )
        return
    for direction in ("forward", "backward"):
        table = output.table(("<kernel", "<idea", "<memory", "<dtypes", "<from"), direction)
        table.columns[0].no_wrap = True
        for kernel in KERNELS.values():
            if kernel.direction == direction:
                dtypes = "all" if kernel.dtypes == tuple(DTYPES) else ", ".join(kernel.dtypes)
                table.add_row(
                    kernel.name,
                    f"{kernel.idea} ({kernel.paper})",
                    kernel.memory,
                    dtypes,
                    str(Arch(*kernel.min_capability)),
                )
                table.add_section()
        output.stdout().print(table)
    output.stdout().print(
        f"dtypes: all are {', '.join(DTYPES)}. memory: global, beyond inputs and outputs, "
        "for sequence length N."
    )
