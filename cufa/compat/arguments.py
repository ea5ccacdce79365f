"""What all of these functions share: arguments as cufa's, and errors that name the caller's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cufa.api import attention, check_attention
from cufa.arrays import namespace_of
from cufa.messages import kind_of
from cufa.problem import FLOAT8, INPUT_DTYPES, dtype_of

# What PyTorch and JAX call cufa's arguments.
TENSORS = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
# What stands before an argument's name in a message; elsewhere "mask" is a word, and 'q' a value.
_BEFORE_NAMES = r"^|; |\(|\b(?:and|as|but|give|or) "


def attention_as(names: Mapping[str, str], q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`cufa.attention`, whose errors call arguments what the caller calls them."""
    try:
        return attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error, in whose message arguments have other names."""
    words = rf"({_BEFORE_NAMES})({'|'.join(names)})\b"
    error.args = (re.sub(words, lambda found: found[1] + names[found[2]], str(error)),)
    return error


def check_attention_as(names: Mapping[str, str], q: Any, k: Any, v: Any, **options: Any) -> None:
    """What `attention_as` would raise, before anything is done."""
    try:
        check_attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def check_int32(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """TypeError for what is no array of int32, ValueError for one of another shape."""
    check_arrays(**{name: array})
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {shape}")
    if dtype_of(array) != np.int32:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be int32")


def check_arrays(**named: Any) -> None:
    """TypeError for what is no array."""
    for name, array in named.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(
                f"{name} is {kind_of(array)}; it may be a NumPy array, a CuPy array or any array with DLPack"
            )


def given(**named: Any) -> dict[str, Any]:
    """Those arguments that are not None."""
    return {name: value for name, value in named.items() if value is not None}


def shape_of(name: str, array: Any) -> tuple[int, int, int, int]:
    """That of an array that must have 4 axes."""
    shape = tuple(array.shape)
    if len(shape) != 4:
        raise ValueError(f"{name} has shape {shape}; it must have 4 axes")
    return shape


def check_values(value: Any, key: Any) -> None:
    """ValueError unless each key has one value: others would be left out without a word."""
    if tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise ValueError(
            f"value has shape {tuple(value.shape)} and key {tuple(key.shape)}; all axes but the last must be "
            "the same"
        )


def as_bytes(array: Any) -> Any:
    """An array of 8-bit floats as uint8, any other as it is: not all libraries can write the former."""
    if dtype_of(array) != INPUT_DTYPES[FLOAT8]:
        return array
    return array.view(namespace_of(array).uint8)


def top_left(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple[int, dict[str, Any]]:
    """The range of keys around key i that query i sees, in terms of a diagonal that ends in the last corner.

    Returns how many keys, from the first on, anyone sees at all, and with only those the window. There is
    none if no query is limited, or if no window says it: where the last queries see nothing.
    """
    keys = seqlen_k if right is None else min(seqlen_k, seqlen_q + right)
    shift = keys - seqlen_q  # from the one diagonal to the other
    ends = (
        None if left is None else left + shift,
        None if right is None else right - shift,
    )
    if ends == (None, None) or any(end is not None and end < 0 for end in ends):
        return keys, {}
    return keys, {"window": ends}


def arange(stop: int, beside: Any) -> Any:
    """The numbers from 0 to stop - 1, in an array of that one's library on its device."""
    return namespace_of(beside).arange(stop, **device_of(beside))


def full(shape: tuple[int, ...], value: int, dtype: str, beside: Any) -> Any:
    """A number that often, likewise."""
    xp = namespace_of(beside)
    return xp.full(shape, value, dtype=getattr(xp, dtype), **device_of(beside))


def device_of(array: Any) -> dict[str, Any]:
    """What other libraries than NumPy and CuPy want to be told to make an array beside that one."""
    return {} if namespace_of(array).__name__ in ("numpy", "cupy") else {"device": array.device}
