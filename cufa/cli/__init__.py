"""The command `cufa`. Each subcommand is a file of this package, imported only when it is called."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import click

import cufa
from cufa.cli import output

COMMANDS = ("run", "bench", "ladder", "compile", "kernels", "info", "cache")


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"cufa.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with output.writing_errors():  # before click, which exits with 1 if nobody reads on
                return super().invoke(ctx)
        except KeyboardInterrupt:
            output.say("\nAborted!")
            raise SystemExit(output.INTERRUPTED) from None

    def main(self, *args: Any, **extra: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names may have what it cannot encode
            sys.stdout.reconfigure(errors="backslashreplace")
        with output.writing_errors():
            return super().main(*args, **extra)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cufa.__version__, prog_name="cufa")
@click.option("-v", "--verbose", is_flag=True, help="Log every compilation, with its macros, on stderr.")
@click.pass_context
def main(ctx: click.Context, verbose: bool) -> None:
    """FlashAttention for NumPy and CuPy arrays, forward and backward, with or without a GPU.

    Every command has --help. With --json, it prints one JSON document on stdout and nothing else. It exits
    with 1 if a computation failed or is wrong, with 2 if it could not be started, with 130 if it was
    interrupted.
    """
    ctx.with_resource(output.log_to_stderr(verbose))
