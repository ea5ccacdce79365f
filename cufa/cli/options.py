"""Options that several commands share."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from cufa.arguments import check_window
from cufa.arrays import BACKENDS
from cufa.cli import output
from cufa.kernels import KERNELS, whole_name
from cufa.problem import (
    DTYPES,
    FLOAT8,
    INPUT_DTYPES,
    LAYOUTS,
    MAX_AXIS,
    MAX_EXTENT,
    PRECISIONS,
    Direction,
    one_of,
)

Command = TypeVar("Command", bound=Callable[..., Any])
Window = tuple[int | None, int | None]


class KernelName(click.Choice[str]):
    """A kernel's name, or its beginning with the number: fwd_4 for fwd_4_flash_v2."""

    def __init__(self, names: Iterable[str], direction: Direction | None = None) -> None:
        """Names of the ladder must be of kernels of this direction, if one is given."""
        super().__init__(
            [name for name in names if direction is None or KERNELS[name].direction == direction]
        )

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The full name; raises click's error if there is none."""
        name = whole_name(value, self.choices)
        if name not in self.choices:
            other = KERNELS.get(whole_name(value, KERNELS))
            if other is not None:
                self.fail(f"{other.name} is a {other.direction} kernel", param, ctx)
            meant = [each for each in self.choices if each.startswith(value)]
            if len(meant) > 1:
                self.fail(f"{value!r} may stand for {one_of(meant)}", param, ctx)
        return super().convert(name, param, ctx)


class Integer(click.IntRange):
    """An integer in a range; anything else is called "not a valid integer", without the range."""

    name = "integer"


class Count(Integer):
    """A count, at most that of the largest axis."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; raises click's error if it is not one."""
        number: int = super().convert(value, param, ctx)
        if number > MAX_AXIS:
            self.fail(f"{number} is too large; there may be {MAX_AXIS}", param, ctx)
        return number


class Real(click.types.FloatParamType):
    """A finite number, with the same kind of error message."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; raises click's error if it is not one."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite", param, ctx)
        return number


class RealInRange(Real, click.FloatRange):
    """A finite number in a range."""


SIZE = Count(min=1)
DTYPE = click.Choice(list(DTYPES))
INPUT_DTYPE = click.Choice(list(INPUT_DTYPES))
LAYOUT = click.Choice(list(LAYOUTS))
KERNEL = KernelName(KERNELS)


def several(convert_one: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """The type of an option that takes several values separated by commas."""

    def convert(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise click.BadParameter("give at least one value")
        return tuple(convert_one(part) for part in parts)

    return convert


def tile_size(text: str) -> tuple[str, int]:
    """The type of an option that overrides a tile size, NAME=N."""
    name, _, size = text.partition("=")
    if not (name.isidentifier() and size.isdecimal()):
        raise click.BadParameter(f"{text!r} is not of the form NAME=N, as in block_m=64")
    return name, int(size)


def tile_sizes(text: str) -> tuple[str, tuple[int, ...]]:
    """The type of an option that takes several sizes of one tile dimension, NAME=N[,...]."""
    name, _, several = text.partition("=")
    sizes = [size.strip() for size in several.split(",")]
    if not (name.isidentifier() and all(size.isdecimal() for size in sizes)):
        raise click.BadParameter(
            f"{text!r} is not of the form NAME=N[,...], as in block_m=64,128; other names take another --tile"
        )
    return name, tuple(map(int, sizes))


def tilings(tiles: Iterable[tuple[str, tuple[int, ...]]]) -> list[dict[str, int]]:
    """Every combination of the sizes that `tile_sizes` parsed, once; a single empty one if there are none."""
    sizes: dict[str, dict[int, None]] = {}
    for name, more in tiles:
        sizes[name] = sizes.get(name, {}) | dict.fromkeys(more)
    return [dict(zip(sizes, each, strict=True)) for each in itertools.product(*sizes.values())]


def json_option(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")(command)


def count_option(
    name: str,
    help_text: str,
    least: int = 0,
    default: int | None = None,
    show_default: str | None = None,
) -> Callable[[Command], Command]:
    """An option that takes an integer; `show_default` says in words what it is if it is not given."""
    return click.option(
        name,
        type=Count(min=least),
        default=default,
        show_default=show_default,
        metavar="N",
        help=help_text,
    )


def precision_option(command: Command) -> Command:
    """--precision."""
    return click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default=PRECISIONS[0],
        show_default=True,
        help="Precision of float32 products; tf32 is faster.",
    )(command)


def seed_option(command: Command) -> Command:
    """--seed."""
    return click.option(
        "--seed",
        type=Integer(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Seed of the random arrays.",
    )(command)


def arch_option(command: Command) -> Command:
    """--arch."""
    return click.option(
        "--arch",
        metavar="ARCH",
        show_default="CUFA_ARCH, else this GPU's",
        help="Architecture to compile for, as in compute_80.",
    )(command)


def backend_option(command: Command) -> Command:
    """--backend."""
    return click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        show_default="cuda if there is a GPU, else numpy",
        help="Where to compute.",
    )(command)


def tile_option(name: str, kernel: str) -> Callable[[Command], Command]:
    """--tile or a similar option."""
    return click.option(
        name,
        type=tile_size,
        metavar="NAME=N",
        multiple=True,
        callback=_once_each,
        help=f"Override a tile size of the {kernel}. Repeatable.",
    )


def _once_each(
    _context: click.Context, _option: click.Parameter, tiles: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    for name, count in collections.Counter(name for name, _ in tiles).items():
        if count > 1:
            raise click.BadParameter(f"{name} is given {count} times")
    return tiles


def tile_sizes_option(command: Command) -> Command:
    """--tile, with several sizes."""
    return click.option(
        "--tile",
        type=tile_sizes,
        metavar="NAME=N[,...]",
        multiple=True,
        help="Override a tile size; several sizes are tried in turn. Repeatable.",
    )(command)


def mod_options(arrays: str) -> list[Callable[..., Any]]:
    """--score-mod and --mask-mod; `arrays` says what comes with a ScoreMod."""
    return [
        click.option(
            "--score-mod",
            metavar="FILE:NAME",
            help=f"Python function f(score, b, h, q_idx, kv_idx): new scores; or a cufa.ScoreMod, {arrays}.",
        ),
        click.option(
            "--mask-mod",
            metavar="FILE:NAME",
            help="Python function g(b, h, q_idx, kv_idx): True if seen; or a cufa.MaskMod, with arrays.",
        ),
    ]


RANDOM = "random"
RANDOM_BITS = "random-bits"


@dataclass(frozen=True)
class FeatureOptions:
    """What the options ask for beyond plain attention; fields are named like the options.

    `bias` is a file or `RANDOM`, `mask` also `RANDOM_BITS`. `score_mod` and `mask_mod` are FILE:NAME.
    `varlen` has the queries and keys of each packed sequence, `seqused_k` the number of keys of each that
    count. `page_size` is the number of keys in a page, 0 for no pages. With `transposed_values`, keys of V
    are adjacent in memory. With `values_in_keys`, V is a view of the first columns of K. `kv_dtype` is the
    dtype of K and V if it is not Q's.
    """

    causal: bool = False
    window: Window | None = None
    softcap: float = 0.0
    bias: str | None = None
    mask: str | None = None
    alibi: bool = False
    sink: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    dlse: bool = False
    dropout: float = 0.0
    dropout_seed: int = 0
    varlen: tuple[tuple[int, int], ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    page_size: int = 0
    deterministic: bool = False
    descale: bool = False
    transposed_values: bool = False
    values_in_keys: bool = False
    kv_dtype: str | None = None
    precision: str = "ieee"


def arguments(features: FeatureOptions) -> list[str]:
    """These features as options for another command's line, without those of packed sequences."""
    line: list[str] = []
    for field in fields(features):
        value = getattr(features, field.name)
        if value == field.default:
            continue
        line.append(f"--{field.name.replace('_', '-')}")
        if isinstance(value, tuple):
            line.append(",".join("-1" if side is None else str(side) for side in value))
        elif value is not True:
            line.append(str(value))
    return line


def refuse_without_backward(left_out_by: str, features: FeatureOptions, **others: object) -> None:
    """Raise Failure if an option of the backward is given although `left_out_by` leaves the backward out.

    `others` are further options of the backward, by name; False, None and () mean not given.
    """
    asked = {"dlse": features.dlse, "deterministic": features.deterministic, **others}
    given = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value]
    if given:
        raise output.Failure(f"{', '.join(given)}: only for gradients, which {left_out_by} leaves out")


def check_place_of_values(transposed: bool, in_keys: bool) -> None:
    """Raise Failure if values are to lie in two places."""
    if transposed and in_keys:
        raise output.Failure("--transposed-values and --values-in-keys: give one of them")


def not_in_keys(head_dim: int, value_dim: int) -> str:
    """Why values of so many dims do not lie in keys."""
    return (
        f"--values-in-keys are the first columns of keys, and --value-dim {value_dim} is more than "
        f"--head-dim {head_dim}"
    )


def key_window(text: str) -> Window:
    """The type of --window, LEFT,RIGHT."""
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form LEFT,RIGHT, as in 128,0; -1 is all") from None
    try:
        return check_window((left, right))
    except ValueError:
        raise click.BadParameter(f"{text!r}: each side may be 0 to {MAX_EXTENT}, or -1 for all") from None


def sequence_lengths(text: str) -> tuple[int, int]:
    """The type of each part of --varlen: N queries and keys, or N:M for N queries and M keys."""
    queries, colon, keys = text.partition(":")
    keys = keys if colon else queries
    if not (queries.isdecimal() and keys.isdecimal()):
        raise click.BadParameter(f"{text!r} is no length, as in 100, or in 1:100 for 1 query and 100 keys")
    count = Count(min=0)
    return count(queries), count(keys)


def feature_options(files: bool = False, packed: bool = True) -> Callable[[Command], Command]:
    """Add the options of `FeatureOptions`, which the command gets as `features`.

    Args:
        files: allow files for the bias and the mask.
        packed: add the options for packed sequences and for keys in pages.
    """
    options = [
        click.option("--causal", is_flag=True, help="Hide keys after the diagonal (bottom-right aligned)."),
        click.option(
            "--window",
            type=key_window,
            metavar="L,R",
            help="Keys seen before and after the diagonal; -1 for all.",
        ),
        click.option(
            "--softcap",
            type=RealInRange(min=0),
            default=0.0,
            show_default="none",
            metavar="X",
            help="Soft bound of the scores.",
        ),
        *(_score_array_files() if files else _score_arrays()),
        click.option("--alibi", is_flag=True, help="ALiBi, with the slopes of the paper."),
        click.option("--sink", is_flag=True, help="A random sink, with its gradient."),
        *mod_options("with arrays and their gradients"),
        click.option("--dlse", is_flag=True, help="Backward: add a random gradient of the LSE."),
        click.option(
            "--dropout",
            type=RealInRange(min=0, max=1, max_open=True),
            default=0.0,
            show_default=True,
            metavar="P",
            help="Fraction of the probabilities that is dropped.",
        ),
        click.option(
            "--dropout-seed",
            type=Integer(min=0),
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of dropout.",
        ),
        click.option(
            "--deterministic",
            is_flag=True,
            help="Gradients with the same bits in every run; none of --score-mod's arrays.",
        ),
        click.option(
            "--kv-dtype",
            type=INPUT_DTYPE,
            show_default="--dtype",
            help=f"Dtype of keys and values: {FLOAT8} with queries in 16 bits.",
        ),
        click.option("--descale", is_flag=True, help=f"Random descales, for {FLOAT8} arrays."),
        click.option(
            "--transposed-values",
            is_flag=True,
            help=f"Store V transposed, its keys adjacent; for --dtype {FLOAT8}.",
        ),
        click.option(
            "--values-in-keys",
            is_flag=True,
            help="V is the first columns of K, as in multi-head latent attention.",
        ),
        precision_option,
    ]
    if packed:
        options += [
            click.option(
                "--varlen",
                type=several(sequence_lengths),
                metavar="N[:M][,...]",
                help="Packed sequences of N queries and M keys each; M is N if left out.",
            ),
            click.option(
                "--seqused-k",
                type=several(Count(min=0)),
                show_default="all",
                metavar="N[,...]",
                help="How many keys of each sequence count.",
            ),
            count_option(
                "--page-size",
                "Forward: keys in shuffled pages of N, rounded up to full pages.",
                default=0,
                show_default="0: no pages",
            ),
        ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def bundled(**given: Any) -> Any:
            asked = {
                field.name: given.pop(field.name) for field in fields(FeatureOptions) if field.name in given
            }
            features = FeatureOptions(**asked)
            if features.dropout_seed and not features.dropout:
                raise output.Failure(
                    "--dropout-seed is the seed of what --dropout drops; give --dropout, too"
                )
            if features.transposed_values and (features.varlen is not None or features.page_size):
                raise output.Failure("--transposed-values are neither packed (--varlen) nor in --page-size")
            check_place_of_values(features.transposed_values, features.values_in_keys)
            return command(features=features, **given)

        for option in reversed(options):
            bundled = option(bundled)
        return bundled  # type: ignore[return-value]

    return decorate


def _score_arrays() -> list[Callable[..., Any]]:
    return [
        click.option("--bias", type=click.Choice([RANDOM]), help="A bias for each head, with its gradient."),
        click.option("--mask", type=click.Choice([RANDOM, RANDOM_BITS]), help="A mask for each head."),
    ]


def _score_array_files() -> list[Callable[..., Any]]:
    return [
        click.option("--bias", metavar="FILE|random", help="Added to the scores, with its gradient."),
        click.option(
            "--mask",
            metavar="FILE|random|random-bits",
            help="True to see a key: bool, or uint8 for bits.",
        ),
    ]
