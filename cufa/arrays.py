"""Arrays in, and the same kind of arrays out.

NumPy and CuPy arrays are used as they are. Any other array with DLPack (a torch tensor, a JAX array) is
read without a copy, and results go back through its own library's `from_dlpack`. What travels between
host and GPU does so here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cufa import device, tensor_layout
from cufa.messages import kind_of, shown
from cufa.problem import FLOAT8, INPUT_DTYPES, Shape
from cufa.tensor_layout import Region, check_apart

# DLPack's device types (dlpack.h): memory that the CPU can read, and memory of a CUDA GPU.
_DLPACK_CPU = 1
_DLPACK_CUDA = 2

# The dtypes that those who read and write DLPack do not know; they see the bits, as integers.
_UNKNOWN_TO_CUPY = {FLOAT8: "uint8"}
_UNKNOWN_TO_NUMPY = {FLOAT8: "uint8", "bfloat16": "int16"}

Backend = Literal["numpy", "cuda"]
BACKENDS: tuple[Backend, ...] = ("numpy", "cuda")

# An array's name as an argument, its shape, its strides in bytes and its dtype.
Described = tuple[str, Shape, Shape, Any]

_log = logging.getLogger("cufa")


class Adopted(NamedTuple):
    """The arrays of one call where they will be computed on.

    `arrays` are CuPy's if `on_gpu`, else NumPy's, by argument name. `sources` are the caller's own memory:
    the same arrays, unless those had to be copied from the other side. `described` and `addresses` are
    `describe`'s of the sources.
    """

    arrays: dict[str, Any]
    sources: dict[str, Any]
    on_gpu: bool
    export: Callable[[Any], Any]
    described: tuple[Described, ...]
    addresses: dict[str, int]

    @property
    def moved(self) -> bool:
        """Whether the arrays are copies from the other side."""
        return self.sources is not self.arrays

    @property
    def regions(self) -> dict[str, Region]:
        """The caller's memory, by argument name."""
        return regions(self.described, self.addresses.values())

    def give_back(self, result: Any, given: Any = None, name: str = "out") -> Any:
        """A result as the kind of array that came in; or `given`, the caller's, with the result in it.

        `name` is the argument that it was given as.
        """
        if self.moved:
            result = _to_other_side(result)
            if given is not None:
                self.sources[name][...] = result
        return self.export(result) if given is None else given


def adopt(named: Mapping[str, Any], backend: str | None) -> Adopted:
    """The arrays as NumPy's or CuPy's, on the side where `backend` wants them.

    backend None is the GPU for arrays on it, and for others if there is a GPU that CuPy can use.

    Raises TypeError for anything that is no array and for a mixture of kinds, ValueError for arrays on a
    GPU that is not the current one and for an unknown backend.
    """
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f"backend is {shown(backend)}; it may be 'numpy', 'cuda' or None")
    adopted = adopt_in_place(named)
    are_on_gpu = adopted.on_gpu
    wants_gpu = backend == "cuda" or (backend is None and (are_on_gpu or gpu_usable()))
    if wants_gpu == are_on_gpu:
        return adopted
    if wants_gpu:
        device.current()  # says what is missing
    moved = {name: _to_other_side(array) for name, array in adopted.arrays.items()}
    return adopted._replace(arrays=moved, on_gpu=wants_gpu)


def adopt_in_place(named: Mapping[str, Any]) -> Adopted:
    """The arrays as NumPy's or CuPy's, on the side where they are; raises what `adopt` does."""
    kinds = set(map(type, named.values()))
    cupy_ndarray = _cupy_ndarray()
    if len(kinds) == 1 and cupy_ndarray in kinds:
        arrays = dict(named)
        return Adopted(arrays, arrays, True, _unchanged, *_describe_on_current_gpu(arrays))
    if not all(issubclass(kind, np.ndarray) for kind in kinds):
        check_same_kind(named)

    export: Callable[[Any], Any] = _unchanged
    kind = next(iter(kinds))
    if issubclass(kind, np.ndarray):
        _check_no_mask(named)
        # Of a subclass too, so that what it makes of arithmetic does not get into ours.
        arrays = {name: np.asarray(array) for name, array in named.items()}
    elif issubclass(kind, cupy_ndarray):
        arrays = dict(named)
    else:
        imported = {name: _import(array, name) for name, array in named.items()}
        arrays = {name: array for name, (array, _) in imported.items()}
        export = imported[next(iter(imported))][1]
        _check_same_side(arrays)
    are_on_gpu = isinstance(next(iter(arrays.values())), _cupy_ndarray())
    places = _describe_on_current_gpu(arrays) if are_on_gpu else describe(arrays)
    return Adopted(arrays, arrays, are_on_gpu, export, *places)


@functools.cache
def gpu_usable() -> bool:
    """Whether there is a GPU and a CuPy to use it with; logs, once, what a GPU without CuPy needs."""
    if not device.gpu_present():
        return False
    try:
        device.current()
    except device.GPUUnavailableError as error:
        _log.warning("computing on the CPU: %s", error)
        return False
    return True


def address(array: Any) -> int:
    """Where the first element of a NumPy or CuPy array is."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def describe(arrays: Mapping[str, Any]) -> tuple[tuple[Described, ...], dict[str, int]]:
    """How NumPy's or CuPy's arrays lie, and their addresses by name."""
    described = tuple([(name, array.shape, array.strides, array.dtype) for name, array in arrays.items()])
    return described, {name: address(array) for name, array in arrays.items()}


def regions(described: Iterable[Described], addresses: Iterable[int]) -> dict[str, Region]:
    """The memory of those arrays, by name; there may be more addresses, of others, behind theirs."""
    return {
        name: Region(address, shape, strides, dtype.itemsize)
        for (name, shape, strides, dtype), address in zip(described, addresses, strict=False)
    }


def check_writeable(arrays: Mapping[str, Any], outputs: Iterable[str]) -> None:
    """ValueError, naming it, for an array of `outputs` that is read-only."""
    for name in outputs:
        output = arrays[name]
        if isinstance(output, np.ndarray) and not output.flags.writeable:
            raise ValueError(f"{name} is read-only; it must be writeable")


def check_outputs(adopted: Adopted, outputs: Collection[str], in_place: Mapping[str, Sequence[str]]) -> None:
    """Check that those of a call's arrays can be written, and overlap no other but those of `in_place`.

    Raises ValueError, as `check_writeable` and `check_apart`.
    """
    if outputs:
        check_writeable(adopted.sources, outputs)
        check_apart(adopted.regions, outputs, in_place)


def check_written(adopted: Adopted, outputs: tuple[str, ...]) -> None:
    """ValueError, as `check_apart`, unless those share no memory with themselves or with a call's others."""
    _check_written(adopted.described, tuple(adopted.addresses.values()), outputs)


@functools.lru_cache(maxsize=4096)
def _check_written(
    described: tuple[Described, ...], addresses: tuple[int, ...], outputs: tuple[str, ...]
) -> None:
    check_apart(regions(described, addresses), outputs)


def check_aligned(adopted: Adopted) -> None:
    """Check that a kernel can read all of a call's arrays; ValueError, naming it, for one that lies askew."""
    if adopted.on_gpu and not adopted.moved:
        _check_aligned(adopted.described, tuple(adopted.addresses.values()))


@functools.lru_cache(maxsize=4096)
def _check_aligned(described: tuple[Described, ...], addresses: tuple[int, ...]) -> None:
    tensor_layout.check_aligned(regions(described, addresses))


def on_current_gpu(array: Any, name: str) -> Any:
    """An array in that GPU's memory as CuPy's, without a copy.

    Raises TypeError for what is no array or in the CPU's memory, ValueError for an array on another GPU.
    """
    if not isinstance(array, _cupy_ndarray()):
        check_same_kind({name: array})
        array, _ = _import(array, name)
        if isinstance(array, np.ndarray):
            raise TypeError(f"{name} is in the CPU's memory; it must be in the GPU's")
    _describe_on_current_gpu({name: array})
    return array


def _describe_on_current_gpu(arrays: Mapping[str, Any]) -> tuple[tuple[Described, ...], dict[str, int]]:
    """As `describe`, of CuPy's arrays; all in one go, since every call does it."""
    current = sys.modules["cupy"].cuda.runtime.getDevice()
    described = []
    addresses = {}
    for name, array in arrays.items():
        memory = array.data
        if memory.device_id != current:
            raise ValueError(
                f"{name} is on GPU {memory.device_id} and the current one is {current}; all arrays "
                f"must be on the current GPU (with cupy.cuda.Device({memory.device_id}): ...)"
            )
        described.append((name, array.shape, array.strides, array.dtype))
        addresses[name] = memory.ptr
    return tuple(described), addresses


def _unchanged(array: Any) -> Any:
    return array


class _NoArray:
    """What nothing is of."""


def _cupy_ndarray() -> type:
    """CuPy's array type; if nobody has imported CuPy no array is of it."""
    cupy = sys.modules.get("cupy")
    return cupy.ndarray if cupy is not None and hasattr(cupy, "ndarray") else _NoArray


def _import(array: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
    """An array of another library as NumPy's or CuPy's, without a copy, and the way back."""
    namespace = _exporting_namespace(array, name)
    if getattr(array, "requires_grad", False):  # its bits would be read without a word
        raise TypeError(
            f"{name} is {kind_of(array)} that requires a gradient, of which cufa keeps no record; "
            f"give {name}.detach()"
        )
    if getattr(array, "is_neg", bool)():  # likewise, without its sign
        raise TypeError(
            f"{name} is {kind_of(array)} with its negative bit set, which DLPack leaves out; "
            f"give {name}.resolve_neg()"
        )
    with _read_errors(array, name):
        device_type, _ = array.__dlpack_device__()
    if device_type == _DLPACK_CUDA:
        device.current()  # says what is missing
        reader, unknown = sys.modules["cupy"].from_dlpack, _UNKNOWN_TO_CUPY
    elif device_type == _DLPACK_CPU:
        reader, unknown = np.from_dlpack, _UNKNOWN_TO_NUMPY
    else:
        raise TypeError(
            f"{name} is on a device of DLPack type {int(device_type)}; it may be on the CPU or a CUDA GPU"
        )
    # Dtypes are spelt as NumPy's, behind a library's name.
    dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
    with _read_errors(array, name):
        if dtype in unknown:
            bits = array.view(getattr(namespace, unknown[dtype]))
            return reader(bits).view(INPUT_DTYPES[dtype]), functools.partial(_export, namespace)
        return reader(array), functools.partial(_export, namespace)


def _export(namespace: Any, result: Any) -> Any:
    """A result as an array of that library."""
    unknown = _UNKNOWN_TO_NUMPY if isinstance(result, np.ndarray) else _UNKNOWN_TO_CUPY
    bits = unknown.get(result.dtype.name)
    if bits is None:
        return namespace.from_dlpack(result)
    return namespace.from_dlpack(result.view(bits)).view(getattr(namespace, result.dtype.name))


@contextlib.contextmanager
def _read_errors(array: Any, name: str) -> Iterator[None]:
    """TypeError, naming the array, for what a library raises whose array cannot be read."""
    try:
        yield
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is {kind_of(array)} that cannot be read through DLPack: {error}") from error


def namespace_of(array: Any) -> Any:
    """The library an array is of: what its array API says, else the top module of its type or a base."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    tops = [sys.modules.get(kind.__module__.partition(".")[0]) for kind in type(array).__mro__]
    return next((top for top in tops if hasattr(top, "from_dlpack")), tops[0])


def _exporting_namespace(array: Any, name: str) -> Any:
    """The same; TypeError if results cannot be handed back to it."""
    namespace = namespace_of(array)
    if not hasattr(namespace, "from_dlpack"):
        raise TypeError(f"{name} is {kind_of(array)}, whose library has no from_dlpack to hand results back")
    return namespace


def _to_other_side(array: Any) -> Any:
    import cupy

    bytes_or_array = as_bytes(array)
    moved = cupy.asarray(bytes_or_array) if isinstance(array, np.ndarray) else bytes_or_array.get()
    return moved if bytes_or_array is array else moved.view(array.dtype)


def as_bytes(array: Any) -> Any:
    """An array of float8_e4m3fn as uint8, any other as it is.

    CuPy views memory as that dtype and does nothing else with it.
    """
    return array.view(np.uint8) if array.dtype == INPUT_DTYPES[FLOAT8] else array


def contiguous(array: Any) -> Any:
    """A contiguous copy of a CuPy array."""
    return sys.modules["cupy"].ascontiguousarray(as_bytes(array)).view(array.dtype)


def check_same_kind(named: Mapping[str, Any]) -> None:
    """TypeError, naming it, for what is no array, or one of another library than the first."""
    for name, array in named.items():
        if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
            raise TypeError(
                f"{name} is {kind_of(array)}; it may be a NumPy array, a CuPy array or any array with DLPack"
            )
    (first_name, first), *others = named.items()
    for name, array in others:
        # One may be of a subclass, as torch's Parameter is.
        if not (isinstance(array, type(first)) or isinstance(first, type(array))):
            raise TypeError(
                f"{name} is {kind_of(array)} and {first_name} {kind_of(first)}; "
                "all arrays must be of one kind"
            )


def _check_no_mask(named: Mapping[str, Any]) -> None:
    for name, array in named.items():
        if isinstance(array, np.ma.MaskedArray):  # what its mask hides would be read without a word
            raise TypeError(
                f"{name} is {kind_of(array)}, of whose mask cufa knows nothing; give {name}.filled(...)"
            )


def _check_same_side(arrays: Mapping[str, Any]) -> None:
    (first_name, first), *others = arrays.items()
    for name, array in others:
        if type(array) is not type(first):
            places = {True: "the CPU", False: "a GPU"}
            raise ValueError(
                f"{name} is on {places[isinstance(array, np.ndarray)]} and {first_name} on "
                f"{places[isinstance(first, np.ndarray)]}; all arrays must be on one device"
            )
