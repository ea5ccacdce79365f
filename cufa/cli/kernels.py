"""`cufa kernels`: lists the registered kernels."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cufa.cli import output
from cufa.cli.options import json_option
from cufa.device import KNOWN, Arch
from cufa.kernels import COMPANIONS, KERNELS, Kernel, features_in_words, tensor_cores_in_words
from cufa.problem import DTYPES, FLOAT8, Direction, Problem

if TYPE_CHECKING:
    from rich.table import Table


@click.command("kernels")
@json_option
def command(as_json: bool) -> None:
    """List the kernels of the ladder and the others."""
    if as_json:
        output.print_json(_documents())
        return
    console = output.stdout()
    for table in (_ideas(), _support(), _companions()):
        output.print_table(table)
        console.print("")
    output.print_prose(
        f"dtypes: all are {', '.join(DTYPES)}, without {FLOAT8}. memory: global, beyond inputs and outputs, "
        f"for sequence length N. features: forward, all are {_all_features('forward')}; backward, "
        f"{_all_features('backward')}."
    )
    by_tensor_cores = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.tensor_cores)
    output.print_prose(f"GPU: {by_tensor_cores} need tensor cores for the dtype: {tensor_cores_in_words()}.")
    on_request = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.on_request)
    output.print_prose(f"on request: {on_request} run only if a call names them.")


def _all_features(direction: Direction) -> str:
    of_direction = (kernel.features for kernel in KERNELS.values() if kernel.direction == direction)
    return ", ".join(("causal", *sorted(frozenset[str]().union(*of_direction))))


def _ideas() -> Table:
    table = output.table(("<kernel", "~idea"), "the ladder")
    for kernel in KERNELS.values():
        table.add_row(kernel.name, f"{kernel.idea} ({kernel.paper})")
    return table


def _support() -> Table:
    table = output.table(
        ("<kernel", "<GPU", "~dtypes", "~head dims", "~features", "<memory"), "what each takes"
    )
    for kernel in KERNELS.values():
        table.add_row(
            kernel.name,
            _first_arch(kernel) + ("" if kernel.only_arch else "+"),
            "all" if kernel.dtypes == tuple(DTYPES) else ", ".join(kernel.dtypes),
            kernel.head_dims,
            features_in_words(kernel),
            kernel.memory,
        )
    return table


def _companions() -> Table:
    table = output.table(("<kernel", "~idea", "~for"), "beside the ladder")
    for companion in COMPANIONS.values():
        table.add_row(companion.name, f"{companion.idea} ({companion.paper})", companion.function)
    return table


def _first_arch(kernel: Kernel) -> str:
    return f"sm_{kernel.only_arch}" if kernel.only_arch else str(Arch(*kernel.min_capability))


def _archs(kernel: Kernel, dtype: str) -> list[str]:
    """The known archs on which the kernel supports a dtype."""
    dim = kernel.min_head_dim
    problem = Problem(kernel.direction, dtype, 1, 1, 1, 1, 1, dim, dim)
    return [str(known.arch) for known in KNOWN.values() if kernel.unsupported(problem, known) is None]


def _documents() -> list[dict[str, Any]]:
    """The rungs, then the kernels outside the ladder, which have no direction."""
    rungs = [
        {
            "name": kernel.name,
            "direction": kernel.direction,
            "idea": kernel.idea,
            "paper": kernel.paper,
            "memory": kernel.memory,
            "dtypes": list(kernel.dtypes),
            "features": ["causal", *sorted(kernel.features)],
            "on_request": kernel.on_request,
            "min_arch": _first_arch(kernel),
            "only_arch": f"sm_{kernel.only_arch}" if kernel.only_arch else None,
            "archs": {dtype: _archs(kernel, dtype) for dtype in kernel.dtypes},
            "min_head_dim": kernel.min_head_dim,
            "max_head_dim": kernel.max_head_dim,
            "max_value_dim": min(kernel.max_value_dim, kernel.max_head_dim),
            "entries": list(kernel.entries),
            "source": kernel.source,
        }
        for kernel in KERNELS.values()
    ]
    companions = [
        asdict(companion) | {"direction": None, "features": sorted(companion.features)}
        for companion in COMPANIONS.values()
    ]
    return rungs + companions
