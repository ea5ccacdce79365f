"""Loads the caller's score_mod and mask_mod from Python files."""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cufa.cli.options import FeatureOptions
from cufa.cli.output import Failure
from cufa.messages import kind_of
from cufa.score_mod import MaskMod, Mods, ScoreMod

M = TypeVar("M", ScoreMod, MaskMod)

# Whatever the caller's code raises, by sys.exit() too.
_RAISED = (Exception, SystemExit)


def mods_of(features: FeatureOptions) -> Mods:
    """The functions that the options name."""
    return mods_at(features.score_mod, features.mask_mod)


@functools.cache
def mods_at(score_mod: str | None, mask_mod: str | None) -> Mods:
    """Load the functions at FILE:NAME, each read and traced once, with arrays from NumPy.

    Raises Failure if that is not possible.
    """
    return Mods(
        None if score_mod is None else _traced(ScoreMod, "--score-mod", score_mod),
        None if mask_mod is None else _traced(MaskMod, "--mask-mod", mask_mod),
    )


def _traced(kind: type[M], option: str, place: str) -> M:
    file, _, name = place.rpartition(":")
    if not file or not name:
        raise Failure(f"{option} {place}: it is not of the form FILE:NAME, as in mods.py:decay")
    try:
        folder = Path(file).resolve().parent
    except OSError as error:
        raise _unreadable(option, place, error) from error
    with _as_script_in(folder):
        found = _found(option, place, file, name)
        mod = _on_host(found) if isinstance(found, kind) else kind(found)
        try:
            mod.written  # noqa: B018
        except TypeError as error:  # its message says what cannot be traced
            raise Failure(str(error)) from error
        except _RAISED as error:
            raise _raised(option, place, error) from error
    return mod


@contextlib.contextmanager
def _as_script_in(folder: Path) -> Iterator[None]:
    """Let code import its neighbours in the folder; it prints to stderr, since stdout is the command's."""
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(str(folder))


def _on_host(mod: M) -> M:
    return type(mod)(mod.function, *(x if isinstance(x, np.ndarray) else x.get() for x in mod.arrays))


def _found(option: str, place: str, file: str, name: str) -> Callable[..., Any]:
    """The function or the mod of that name; of mods, only the option's own kind is callable."""
    try:
        found = runpy.run_path(file).get(name)
    except OSError as error:
        raise _unreadable(option, place, error) from error
    except _RAISED as error:
        raise _raised(option, place, error) from error
    if isinstance(found, ScoreMod if option == "--mask-mod" else MaskMod):
        raise Failure(f"{option} {place}: it is {kind_of(found)}, which is for the other option")
    if not callable(found):
        raise Failure(f"{option} {place}: the file has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def _unreadable(option: str, place: str, error: OSError) -> Failure:
    return Failure(f"{option} {place}: {error.strerror or error}")


def _raised(option: str, place: str, error: BaseException) -> Failure:
    return Failure(f"{option} {place}: {type(error).__name__}: {error}")
