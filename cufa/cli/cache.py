"""`cufa cache`: shows and clears the compiled kernels on disk."""

from __future__ import annotations

from typing import Any

import click

from cufa import cache
from cufa.cli import output
from cufa.cli.options import json_option
from cufa.messages import counted

# What it means that the folder cannot be written to.
COMPILED_AGAIN = "kernels that cannot be read from it are compiled in every process"


@click.group("cache")
def command() -> None:
    """Show or clear the folder of compiled kernels."""


@command.command()
@json_option
def info(as_json: bool) -> None:
    """Show where the folder is and what it holds."""
    held = cache.info()
    if as_json:
        output.print_json(document(held))
        return
    table = output.key_values()
    table.add_row("folder", str(held.path))
    table.add_row("kernels", f"{held.entries}, {output.size(held.bytes)}")
    table.add_row("writable", "yes" if held.writable else f"no ({held.unwritable}): {COMPILED_AGAIN}")
    output.print_table(table)


@command.command()
@json_option
def clear(as_json: bool) -> None:
    """Remove every compiled kernel, and nothing else, from the folder."""
    folder = cache.directory()
    try:
        removed = cache.clear()
    except OSError as error:
        raise output.Failure(f"the cache folder {folder} could not be cleared: {error}") from error
    if as_json:
        output.print_json({"folder": str(folder), "files_removed": removed})
    else:
        output.stdout().print(f"removed {counted(removed, 'file')} from {folder}", soft_wrap=True)


def document(held: cache.CacheInfo) -> dict[str, Any]:
    """What the folder holds, for --json; `cufa info` shows it, too."""
    return {
        "folder": str(held.path),
        "entries": held.entries,
        "bytes": held.bytes,
        "writable": held.writable,
        "unwritable": held.unwritable,
    }
