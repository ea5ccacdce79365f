"""How error messages describe values."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

# What precedes an argument's name in a message. Elsewhere, "mask" is a word and 'q' a value.
_BEFORE_NAMES = r"^|; |\(|\b(?:and|as|but|give|or|overlaps) "


def kind_of(value: object) -> str:
    """The kind of an object: None, a list, an int, a torch.Tensor."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Count things, as in 1 warp, 2 warps; 1 axis, 2 axes."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def byte_order(dtype: object) -> str:
    """What else a dtype must be that would else be the right one: in the machine's byte order."""
    return "" if getattr(dtype, "isnative", True) else ", in the machine's byte order"


class _Shown(reprlib.Repr):
    """repr, but of arrays only their shape, also inside lists and the like, and of what is long a part."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = 8
        self.maxlong = self.maxstring = self.maxother = 100

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", ())
        has_axes = isinstance(shape, tuple) and len(shape) > 0  # a module's `shape` is a function
        return f"{kind_of(x)} of shape {tuple(shape)}" if has_axes else super().repr1(x, level)


_SHOWN = _Shown()


def shown(value: object) -> str:
    """The value of an option as given; for an array, which may be large and on a GPU, only its shape."""
    return _SHOWN.repr(value)


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error, with other names for arguments in its message."""
    words = rf"({_BEFORE_NAMES})({'|'.join(names)})\b"
    error.args = (re.sub(words, lambda found: found[1] + names[found[2]], str(error)),)
    return error
