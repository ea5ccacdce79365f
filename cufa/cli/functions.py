"""Functions of one's own on scores, from Python files."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from typing import Any

from cufa.cli.options import FeatureOptions
from cufa.cli.output import Failure
from cufa.score_mod import MaskMod, Mods, ScoreMod


def mods_of(features: FeatureOptions) -> Mods:
    """Those that the options ask for."""
    return mods_at(features.score_mod, features.mask_mod)


@functools.cache
def mods_at(score_mod: str | None, mask_mod: str | None) -> Mods:
    """The functions at these places, FILE:NAME, each read and traced once; Failure if there are none."""
    return Mods(
        None if score_mod is None else ScoreMod(_function("--score-mod", score_mod)),
        None if mask_mod is None else MaskMod(_function("--mask-mod", mask_mod)),
    )


def _function(option: str, place: str) -> Callable[..., Any]:
    file, colon, name = place.rpartition(":")
    if not colon:
        raise Failure(f"{option} {place}: it is not of the form FILE:NAME, as in mods.py:decay")
    try:
        found = runpy.run_path(file).get(name)
    except OSError as error:
        raise Failure(f"{option} {place}: {error.strerror or error}") from error
    except Exception as error:  # whatever the file raises
        raise Failure(f"{option} {place}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise Failure(f"{option} {place}: the file has no function {name!r}")
    function: Callable[..., Any] = found
    return function
