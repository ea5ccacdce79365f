"""Shared by all functions of `cufa.compat`: arguments as cufa takes them, errors with the caller's names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cufa.api import attention, check_attention
from cufa.arguments import check_descales, check_dropout
from cufa.arrays import UNKNOWN_TO_NUMPY, check_elements, check_no_mask, namespace_of, on_cpu
from cufa.messages import byte_order, kind_of, renamed, shown
from cufa.problem import FLOAT8, INPUT_DTYPES, dtype_of

P = ParamSpec("P")
R = TypeVar("R")

# The names that PyTorch and JAX give to cufa's arguments.
TENSORS = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
# What else `attend_without_batch` takes.
OR_WITHOUT_BATCH = ", or query, key and value all the last 3 of these"
# Arguments of flash-attn 3 and 4 that may only have their defaults here, and what to do instead.
_REMEDIES = {
    "qv": "concatenate qv and q along the last axis, and v and k, as examples/latent.py does",
    "attention_chunk": "give a mask_mod to cufa.attention, as the README has it",
    "score_mod": "give one to cufa.attention, which has other parameters: f(score, b, h, q_idx, kv_idx)",
    "mask_mod": "give one to cufa.attention, which has other parameters: f(b, h, q_idx, kv_idx)",
    "aux_tensors": "give a cufa.ScoreMod or cufa.MaskMod with these arrays to cufa.attention",
    "seqused_q": "leave the queries that do not count out of q and cu_seqlens_q",
    "rotary_seqlens": "call cufa.rotary for q and k with positions, and leave rotary_cos and rotary_sin out",
    "cu_seqlens_k_new": "give new keys as (batch, seqlen_new, kv_heads, head_dim)",
}


@contextlib.contextmanager
def errors_name(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of cufa's functions call arguments what the caller calls them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def attention_as(names: Mapping[str, str], q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call `cufa.attention`; its errors call arguments what the caller calls them."""
    try:  # quicker than a context, which would take a twentieth of a call
        return attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def check_attention_as(names: Mapping[str, str], q: Any, k: Any, v: Any, **options: Any) -> None:
    """Raise what `attention_as` would raise, before anything is done."""
    with errors_name(names):
        check_attention(q, k, v, **options)


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments by other names, too: `names` has its own name for each other one.

    It lists the others among its parameters, for those who look into its signature, and need not read them.
    Errors then call an argument what the caller does. Raises ValueError for one that is given by both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        by_own_names: Callable[..., R] = function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if names.keys().isdisjoint(kwargs):  # as in most calls
                return function(*args, **kwargs)
            used = {own: other for other, own in names.items() if _is_given(kwargs.get(other))}
            for own, other in used.items():
                if _is_given(kwargs.get(own)):
                    raise ValueError(f"{own} and {other} are both given; they are names of one argument")
            named = {name: value for name, value in kwargs.items() if name not in names}
            named |= {own: kwargs[other] for own, other in used.items()}
            with errors_name(used):
                return by_own_names(*args, **named)

        return call

    return decorate


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def refuse(**named: object) -> None:
    """Raise ValueError, with what to do instead, for arguments that are neither None nor 0."""
    for name, value in named.items():
        if value is None or (type(value) is int and value == 0):  # as in almost all calls
            continue
        if not (isinstance(value, Integral) and value == 0):
            raise ValueError(
                f"{name} is {shown(value)}, which cufa.compat does not support; {_REMEDIES[name]}"
            )


def dropout_of(
    dropout_p: float, seed: int | None, offset: int | None, otherwise: str = ""
) -> tuple[float, int, int]:
    """Return dropout's arguments for cufa; raise ValueError or TypeError if one is impossible.

    Dropout needs a seed or an offset here, since these libraries draw new random numbers in each call; what
    else may be wrong, `otherwise` says.
    """
    if seed is None and offset is None and type(dropout_p) is float and dropout_p == 0:
        return 0.0, 0, 0  # as in almost all calls
    try:
        options = check_dropout(dropout_p, 0 if seed is None else seed, 0 if offset is None else offset)
    except (TypeError, ValueError) as error:
        if str(error).startswith("dropout_p"):
            error.args = (f"{error}{otherwise}",)
        raise
    if options[0] > 0 and seed is None and offset is None:
        raise ValueError(
            f"dropout_p is {options[0]} and seed is not given; give a new seed or offset in every call"
            f"{otherwise}"
        )
    return options


def descales_of(
    tensors: tuple[Any, Any, Any], q_descale: Any, k_descale: Any, v_descale: Any
) -> dict[str, Any]:
    """The descales of those tensors that have 8 bits; as in flash-attn 3, others are ignored.

    Raises TypeError for a scalar.
    """
    if q_descale is None and k_descale is None and v_descale is None:
        return {}
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    check_descales(**descales)
    return {
        name: descale
        for (name, descale), tensor in zip(descales.items(), tensors, strict=True)
        if descale is not None and hasattr(tensor, "dtype") and dtype_of(tensor) == INPUT_DTYPES[FLOAT8]
    }


def check_int32(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise TypeError unless this is an int32 array, ValueError if it has another shape."""
    check_arrays(**{name: array})
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {shape}")
    if dtype_of(array) != np.int32:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be int32{byte_order(array.dtype)}")


def check_arrays(**named: Any) -> None:
    """Raise TypeError for anything that is not an array."""
    for name, array in named.items():
        check_elements(name, array)
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(
                f"{name} is {kind_of(array)}; it may be a NumPy array, a CuPy array or any array with DLPack"
            )
    check_no_mask(named)


def given(**named: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in named.items() if value is not None}


def shape_of(
    name: str, array: Any, axes: str = "(batch, seqlen, heads, head_dim)", otherwise: str = ""
) -> tuple[int, int, int, int]:
    """The shape of an array; raises ValueError, with what it may have `otherwise`, unless it has 4 axes."""
    shape = tuple(array.shape)
    if len(shape) != 4:
        raise ValueError(f"{name} has shape {shape}; it must have the 4 axes {axes}{otherwise}")
    return shape


def attend_without_batch(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Call a function with arrays of one sequence, without the first axis, of which results are free, too."""
    results = function(*(array[None, ...] for array in arrays), **options)
    return tuple([x[0, ...] for x in results]) if isinstance(results, tuple) else results[0, ...]


def check_values(value: Any, key: Any, names: tuple[str, str] = ("value", "key")) -> None:
    """Raise ValueError unless each key has one value; others would be ignored silently."""
    if tuple(value.shape[:3]) != tuple(key.shape[:3]):
        of_value, of_key = names
        raise ValueError(
            f"{of_value} has shape {tuple(value.shape)} and {of_key} {tuple(key.shape)}; all axes but the "
            "last must be the same"
        )


def as_integers(array: Any) -> Any:
    """View floats that not all libraries can write as integers; return other arrays unchanged."""
    integers = UNKNOWN_TO_NUMPY.get(dtype_of(array).name)
    return array if integers is None else array.view(getattr(namespace_of(array), integers))


def for_each_key(array: Any, keys: int) -> Any:
    """A bias or a mask for so many keys, also from one with one element for all: a view, if it can be one."""
    if keys == 1 or tuple(array.shape[-1:]) != (1,):
        return array
    return namespace_of(array).broadcast_to(array, (*array.shape[:-1], keys))


def as_sink(learnable_sink: Any) -> Any:
    """flash-attn 4's sink, which has 16 bits, in float32, as cufa needs it; others are returned unchanged."""
    if learnable_sink is None:
        return None
    check_arrays(learnable_sink=learnable_sink)
    if dtype_of(learnable_sink).name not in ("bfloat16", "float16"):
        return learnable_sink
    float32 = namespace_of(learnable_sink).float32
    cast = getattr(learnable_sink, "astype", None) or learnable_sink.to  # torch's
    return cast(float32)


def top_left(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple[int, dict[str, Any]]:
    """Turn a window that is aligned to the top left into one that is aligned to the bottom right.

    Query i sees `left` keys before key i and `right` keys after it. Returns how many keys, from the first on,
    any query sees, and the window for only those keys. There is no window if no query is limited, or if none
    can express the limits: where the last queries see nothing.
    """
    keys = seqlen_k if right is None else min(seqlen_k, seqlen_q + right)
    shift = keys - seqlen_q  # from one diagonal to the other
    ends = (
        None if left is None else left + shift,
        None if right is None else right - shift,
    )
    if ends == (None, None) or any(end is not None and end < 0 for end in ends):
        return keys, {}
    return keys, {"window": ends}


def arange(stop: int, beside: Any, dtype: str = "") -> Any:
    """The numbers 0 to stop - 1, from the library and on the device of `beside`."""
    xp = namespace_of(beside)
    return xp.arange(stop, **({"dtype": getattr(xp, dtype)} if dtype else {}), **device_of(beside))


def full(shape: tuple[int, ...], value: int, dtype: str, beside: Any) -> Any:
    """A constant array, from the library and on the device of `beside`."""
    xp = namespace_of(beside)
    return xp.full(shape, value, dtype=getattr(xp, dtype), **device_of(beside))


def placed(array: Any, beside: Any) -> Any:
    """An array of NumPy as one from the library and on the device of `beside`; anything else as it is."""
    if isinstance(beside, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    return namespace_of(beside).asarray(array, **device_of(beside))


def device_of(array: Any) -> dict[str, Any]:
    """The keyword that libraries other than NumPy and CuPy need to create an array on the same device."""
    return {} if namespace_of(array).__name__ in ("numpy", "cupy") else {"device": array.device}


def numbers_of(name: str, value: Any) -> Any:
    """A number or the numbers of an array, for checks; none of an array on a GPU, which would take time."""
    numbers = value if isinstance(value, int) else on_cpu(value, name)
    return np.empty(0, np.int32) if numbers is None else np.atleast_1d(numbers)
