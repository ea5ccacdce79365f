"""Output of all commands: tables and JSON on stdout; errors, logs and progress on stderr."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from cufa import CompileError, GPUUnavailableError, LaunchError, NVRTCMissingError, Plan
from cufa.arguments import DESCALES
from cufa.messages import renamed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Exit codes: the computation failed or is wrong; it could not be started; and those that shells give to
# processes that SIGINT and SIGPIPE end.
WRONG = 1
BAD_INPUT = 2
INTERRUPTED = 130
UNREAD = 141

# Options that stand for arguments of the library.
_OPTIONS = {
    "block_table": "--page-size",
    "seed": "--dropout-seed",
    "softcap": "--softcap",
    "softmax_scale": "--softmax-scale",
    **dict.fromkeys(DESCALES, "--descale"),
}
# No space, no quota, too large a file, a failing device.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_PLAN_INDENT = 13 * " "  # up to the second column of a printed Plan
_UNKNOWN_WIDTH = 80  # for a terminal that does not report its width
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")


class Failure(click.ClickException):
    """The request cannot be fulfilled: ends the command with a message, in red on stderr."""

    exit_code = BAD_INPUT

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message."""
        say(f"error: {self.message}", "red")


class Wrong(Failure):
    """The computation was tried and went wrong."""

    exit_code = WRONG


class OutOfMemory(Wrong):
    """The memory of the GPU or of the machine does not suffice."""


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Report insufficient memory without a traceback."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"out of memory: {error}") from error


@contextlib.contextmanager
def library_errors(prefix: str = "--") -> Iterator[None]:
    """Turn the errors that the library documents into a message without a traceback.

    Wrap only calls of the library in this, so that mistakes in the command's own code show. Arguments that an
    option stands for get its name; those of kernels and tiles begin with `prefix`.
    """
    # "tiles" alone would also be a word.
    of_rungs = {"kernel": f"{prefix}kernel", "tiles has": f"{prefix}tile has"}
    try:
        with memory_errors():
            yield
    except (ValueError, TypeError, GPUUnavailableError, NVRTCMissingError) as error:
        raise Failure(str(renamed(error, _OPTIONS | of_rungs))) from error
    except (CompileError, LaunchError, OSError) as error:  # OSError: compiled code cannot be kept
        raise Wrong(str(error)) from error


@contextlib.contextmanager
def writing_errors() -> Iterator[None]:
    """Report output that cannot be written without a traceback; end silently if nobody reads on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_NOT_WRITTEN, errno.EPIPE):
            raise
        # Python would try to write the rest of the buffer, and report it again, when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(UNREAD) from error
        say(f"error: the output cannot be written: {error.strerror}", "red")
        raise SystemExit(WRONG) from error


def stdout() -> Console:
    """The console for results."""
    return _console(stderr=False)


@functools.cache
def stderr() -> Console:
    """The console for all else, shared so that messages and a progress bar do not collide."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error at hand, for which rich would exit with 1

    console = RaisingConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.width == 0:  # otherwise nothing would be printed
        console.width = _UNKNOWN_WIDTH
    return console


def say(message: str, style: str = "") -> None:
    """Print a message on stderr; lines are only wrapped for a terminal."""
    stderr().print(message, style=style, soft_wrap=not stderr().is_terminal)


def print_json(document: Any) -> None:
    """Print one JSON document; NaN and infinity become null, since JSON does not have them."""
    click.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Iterable[str], title: str | None = None) -> Table:
    """An empty table for `print_table`.

    Columns are numbers, right-aligned, unless their name begins with '<', for names, or '~', for prose.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        title=title,
        title_justify="left",
    )
    for name in columns:
        justify: Literal["left", "right"] = "left" if name.startswith(("<", "~")) else "right"
        made.add_column(name.lstrip("<~"), justify=justify, no_wrap=not name.startswith("~"))
    return made


def print_table(made: Table) -> None:
    """Print a table on stdout. Only prose is wrapped, between words; all else may overflow the line."""
    console = stdout()
    if made.title:  # which the table would wrap to its own width
        console.print(made.title, style="italic")
        made.title = None
    unbounded = console.options.update(width=sys.maxsize)
    for column in made.columns:
        cells = [console.measure(cell, options=unbounded) for cell in (column.header, *column.cells)]
        column.min_width = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
    # On a narrower console, rich would leave columns out.
    console.width = max(console.width, console.measure(made, options=unbounded).minimum)
    if console.is_terminal:
        console.print(made, crop=False)
        return
    with console.capture() as padded:
        console.print(made, crop=False)
    console.print("\n".join(line.rstrip() for line in padded.get().splitlines()), soft_wrap=True)


def print_plan(plan: Plan) -> None:
    """Print a Plan on stdout, wrapped to the width of the terminal."""
    print_prose(str(plan), _PLAN_INDENT)


def print_prose(text: str, indent: str = "", style: str = "") -> None:
    """Print lines on stdout, each wrapped to the width of the terminal, with later lines indented."""
    console = stdout()
    for line in text.splitlines():
        wrapped = textwrap.fill(line, console.width, subsequent_indent=indent)
        console.print(wrapped, style=style, soft_wrap=True)


def key_values() -> Table:
    """An empty table for names and values, for `print_table`."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    return made


@contextlib.contextmanager
def progress(total: int) -> Iterator[Any]:
    """Show a progress bar on stderr if that is a terminal; yields a function that names the next step."""
    console = stderr()
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield step


def seconds(value: float) -> str:
    """As in "1.23 ms"."""
    rounded = _to_three_digits(value)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if rounded >= size:
            return f"{three_digits(value / size)} {unit}"
    return f"{three_digits(value / 1e-9)} ns"


def size(value: int) -> str:
    """As in "6.25 GiB"."""
    amount, unit = float(value), "B"
    for larger in _BINARY_UNITS:
        if round(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{value} B" if unit == "B" else f"{three_digits(amount)} {unit}"


def tiles(sizes: Mapping[str, int]) -> str:
    """As in "block_m 64, block_n 32"."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def three_digits(value: float) -> str:
    """Three significant digits, but all digits before the point: 0.0123, 1.23, 12.3, 1,235."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(_to_three_digits(value)))))
    return f"{value:,.{decimals}f}"


def _to_three_digits(value: float) -> float:
    return float(f"{value:.3g}")


@contextlib.contextmanager
def log_to_stderr(verbose: bool) -> Iterator[None]:
    """Show the library's log on stderr: each message once, or all, with details, if `verbose`."""
    logger = logging.getLogger("cufa")
    level = logger.level
    handler = _StderrHandler(whole=verbose)
    if not verbose:
        handler.addFilter(_EachOnce())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _StderrHandler(logging.Handler):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self._whole = whole

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            say(record.getMessage(), "yellow")
        elif self._whole or not stderr().is_terminal:
            say(record.getMessage(), "dim")
        else:  # one line, however long it is
            stderr().print(record.getMessage(), style="dim", no_wrap=True, overflow="ellipsis")


class _EachOnce(logging.Filter):
    """Lets each message through once, however often calls that are repeated log it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._seen
        self._seen.add(message)
        return new
