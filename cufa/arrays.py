"""Arrays in, and arrays of the same library out.

NumPy and CuPy arrays are used directly. Any other array with DLPack (a torch tensor, a JAX array) is read
without a copy, and results are returned through its library's `from_dlpack`. All copies between host and GPU
happen in this file.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from cufa import device, tensor_layout
from cufa.messages import kind_of, shown
from cufa.problem import FLOAT8, INPUT_DTYPES, Shape
from cufa.tensor_layout import InPlace, Region, check_apart, lie_in_keys
from cufa.threads import in_forked_children

# DLPack's device types (dlpack.h): memory of the CPU, plain or pinned by CUDA, and memory of a CUDA GPU.
_DLPACK_CPU = (1, 3)
_DLPACK_CUDA = 2
# The version of DLPack to ask for, and what a capsule without a version is called until it is read.
_DLPACK_VERSION = (1, 0)
_UNVERSIONED = b"dltensor"
# Libraries whose arrays never change, which DLPack does not say.
_IMMUTABLE = ("jax",)
# What libraries raise for an array that they cannot export.
_READ_ERRORS = (BufferError, RuntimeError, TypeError, ValueError)

# Dtypes that the reader or the writer of DLPack does not know; they exchange the bits as integers.
_UNKNOWN_TO_CUPY = {name: "uint8" for name in dir(ml_dtypes) if name.startswith("float8_")}
UNKNOWN_TO_NUMPY = {**_UNKNOWN_TO_CUPY, "bfloat16": "int16"}
# Most of those of 8 bits no call takes, but errors are to name them.
_FLOATS = {name: np.dtype(getattr(ml_dtypes, name)) for name in UNKNOWN_TO_NUMPY}

Backend = Literal["numpy", "cuda"]
BACKENDS: tuple[Backend, ...] = ("numpy", "cuda")

# An array's name as an argument, its shape, its strides in bytes and its dtype.
ArrayInfo = tuple[str, Shape, Shape, Any]

_log = logging.getLogger("cufa")


class Adopted(NamedTuple):
    """The arrays of one call, on the side where it is computed.

    `arrays` are from CuPy if `on_gpu`, else from NumPy, by argument name. `sources` are the caller's own
    memory: the same arrays, unless they had to be copied from the other side. `described` and `addresses`
    describe the sources (see `describe`). `writeable` says whether their library lets arrays be written.
    """

    arrays: dict[str, Any]
    sources: dict[str, Any]
    on_gpu: bool
    export: Callable[[Any], Any]
    described: tuple[ArrayInfo, ...]
    addresses: dict[str, int]
    writeable: bool = True

    @property
    def moved(self) -> bool:
        """Whether the arrays were copied from the other side."""
        return self.sources is not self.arrays

    def give_back(self, result: Any, given: Any = None, name: str = "out") -> Any:
        """Convert a result to the library of the inputs; or copy it to the caller's `given` and return that.

        `name` is the argument of `given`.
        """
        if self.moved:
            result = _to_other_side(result)
            if given is not None:
                self.sources[name][...] = result
        if given is None:
            return self.export(result)
        if self.export is not _unchanged:
            if self.on_gpu and not self.moved:
                self.export(result)  # the stream of the given array's library then waits for CuPy's
            self.count_writes(given)
        return given

    def count_writes(self, *given: Any) -> None:
        """Let torch's autograd notice that tensors were written; do nothing for arrays of other libraries.

        It then refuses to compute gradients from what they were before.
        """
        if self.export is _unchanged:
            return
        for array in given:
            kind: Any = type(array)
            torch, _ = _torch_of(kind)
            if torch is not None:  # old versions have no such function
                getattr(torch.autograd.graph, "increment_version", _unchanged)(array)


def adopt(named: Mapping[str, Any], backend: str | None) -> Adopted:
    """Convert arrays to NumPy or CuPy, on the side that `backend` asks for, as `moved` does.

    Raises TypeError for anything that is not an array and for mixed libraries, ValueError for arrays on a
    GPU other than the current one and for an unknown backend.
    """
    check_backend(backend)
    return moved(adopt_in_place(named), backend)


def check_backend(backend: Any) -> None:
    """Raise ValueError for an unknown backend."""
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f"backend is {shown(backend)}; it may be 'numpy', 'cuda' or None")


def moved(adopted: Adopted, backend: str | None) -> Adopted:
    """Copy the arrays to the side that `backend` asks for, unless they are there.

    None means the GPU for arrays on it, and for others if CuPy can use a GPU. Raises GPUUnavailableError if
    the GPU is asked for and there is none.
    """
    are_on_gpu = adopted.on_gpu
    wants_gpu = backend == "cuda" or (backend is None and (are_on_gpu or gpu_usable()))
    if wants_gpu == are_on_gpu:
        return adopted
    if wants_gpu:
        device.current()  # raises with what is missing
    copies = {name: _to_other_side(array) for name, array in adopted.arrays.items()}
    return adopted._replace(arrays=copies, on_gpu=wants_gpu)


def adopt_in_place(named: Mapping[str, Any]) -> Adopted:
    """Convert arrays to NumPy or CuPy, on the side where they are; raises what `adopt` does."""
    cupy_ndarray = _cupy_ndarray()
    for array in named.values():
        if type(array) is not cupy_ndarray:
            break
    else:
        arrays = dict(named)
        return Adopted(arrays, arrays, True, _unchanged, *_describe_on_current_gpu(arrays))
    kinds = set(map(type, named.values()))
    if not all(issubclass(kind, np.ndarray) for kind in kinds):
        check_same_kind(named)

    export: Callable[[Any], Any] = _unchanged
    writeable = True
    kind = next(iter(kinds))
    if issubclass(kind, np.ndarray):
        check_no_mask(named)
        # Convert subclasses, so that their arithmetic does not enter ours.
        arrays = {name: np.asarray(array) for name, array in named.items()}
    elif issubclass(kind, cupy_ndarray):
        arrays = dict(named)
    else:
        first_name, first = next(iter(named.items()))
        namespace = _exporting_namespace(first, first_name)
        arrays = {name: _import(array, name, namespace) for name, array in named.items()}
        export = functools.partial(_export, namespace, first)
        writeable = _has_writeable_arrays(namespace)
        _check_same_side(arrays)
    are_on_gpu = isinstance(next(iter(arrays.values())), _cupy_ndarray())
    places = _describe_on_current_gpu(arrays) if are_on_gpu else describe(arrays)
    return Adopted(arrays, arrays, are_on_gpu, export, *places, writeable)


@functools.cache
def gpu_usable() -> bool:
    """Whether CuPy can use a GPU; logs, once, why not if there is one: most often, what to install."""
    if not device.gpu_present() and not device.lost_in_fork():
        return False
    try:
        device.current()
    except device.GPUUnavailableError as error:
        _log.warning("computing on the CPU: %s", error)
        return False
    return True


in_forked_children(gpu_usable.cache_clear)


def address(array: Any) -> int:
    """The address of the first element of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def describe(arrays: Mapping[str, Any]) -> tuple[tuple[ArrayInfo, ...], dict[str, int]]:
    """Describe NumPy or CuPy arrays, and return their addresses by name."""
    described = tuple([(name, array.shape, array.strides, array.dtype) for name, array in arrays.items()])
    return described, {name: address(array) for name, array in arrays.items()}


def regions(described: Iterable[ArrayInfo], addresses: Iterable[int]) -> dict[str, Region]:
    """The memory of the described arrays, by name; `addresses` may continue with those of other arrays."""
    return {
        name: Region(address, shape, strides, dtype.itemsize)
        for (name, shape, strides, dtype), address in zip(described, addresses, strict=False)
    }


def addresses_on_gpu(arrays: Mapping[str, Any]) -> dict[str, int]:
    """The addresses of those arrays that are CuPy's."""
    return {name: address(array) for name, array in arrays.items() if isinstance(array, _cupy_ndarray())}


def values_in_keys(k: Any, v: Any) -> bool:
    """`lie_in_keys` of arrays; False if one is not of NumPy or CuPy, such as a description for a plan."""
    if not all(isinstance(array, (np.ndarray, _cupy_ndarray())) for array in (k, v)):
        return False
    described, addresses = describe({"k": k, "v": v})
    return lie_in_keys(*regions(described, addresses.values()).values())


def check_writeable(arrays: Mapping[str, Any], outputs: Iterable[str]) -> None:
    """Raise ValueError, naming the array, if one of `outputs` is read-only."""
    for name in outputs:
        output = arrays[name]
        if isinstance(output, np.ndarray) and not output.flags.writeable:
            raise ValueError(f"{name} is read-only; it must be writeable")


def check_outputs(adopted: Adopted, outputs: Collection[str], in_place: InPlace = frozenset()) -> None:
    """Check that outputs can be written and overlap no array except the ones that `in_place` allows.

    Raises ValueError, as `check_writeable` does, or what `check_written` raises.
    """
    if outputs:
        if adopted.writeable:
            check_writeable(adopted.sources, outputs)
        check_written(adopted, tuple(outputs), in_place)


def check_written(
    adopted: Adopted,
    outputs: tuple[str, ...],
    in_place: InPlace = frozenset(),
    instead: str = "take what is returned",
) -> None:
    """Check that outputs lie apart from themselves and other arrays, in memory that may be written.

    Raises ValueError, as `check_apart` does, and TypeError for a library whose arrays never change, with what
    to do `instead`.
    """
    if not adopted.writeable:
        raise TypeError(f"{outputs[0]} is from a library whose arrays cannot be written; {instead}")
    _check_apart(adopted.described, tuple(adopted.addresses.values()), outputs, in_place)


@functools.lru_cache(maxsize=4096)
def _check_apart(
    described: tuple[ArrayInfo, ...], addresses: tuple[int, ...], outputs: tuple[str, ...], in_place: InPlace
) -> None:
    check_apart(regions(described, addresses), outputs, in_place)


def check_aligned(adopted: Adopted) -> None:
    """Raise ValueError, naming the array, unless a kernel can read all arrays of a call."""
    if adopted.on_gpu and not adopted.moved:
        _check_aligned(adopted.described, tuple(adopted.addresses.values()))


@functools.lru_cache(maxsize=4096)
def _check_aligned(described: tuple[ArrayInfo, ...], addresses: tuple[int, ...]) -> None:
    tensor_layout.check_aligned(regions(described, addresses))


def on_current_gpu(array: Any, name: str) -> Any:
    """Return an array on the current GPU as a CuPy array, without a copy.

    Raises TypeError for anything that is not an array or is in the CPU's memory, ValueError for an array on
    another GPU.
    """
    if not isinstance(array, _cupy_ndarray()):
        check_same_kind({name: array})
        array = _import(array, name, _exporting_namespace(array, name))
        if isinstance(array, np.ndarray):
            raise TypeError(f"{name} is in the CPU's memory; it must be in the GPU's")
    _describe_on_current_gpu({name: array})
    return array


def on_cpu(array: Any, name: str) -> Any:
    """Return an array in the CPU's memory as a NumPy array, without a copy; None for an array on a GPU.

    Raises TypeError for anything that is not an array.
    """
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, _cupy_ndarray()):
        return None
    check_same_kind({name: array})
    if _device_type(array, name) not in _DLPACK_CPU:
        return None
    return _import(array, name, _exporting_namespace(array, name))


def _describe_on_current_gpu(arrays: Mapping[str, Any]) -> tuple[tuple[ArrayInfo, ...], dict[str, int]]:
    """Do what `describe` does, for CuPy arrays; in a single pass, since every call needs it."""
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
    """A type without instances."""


def _cupy_ndarray() -> type:
    """CuPy's array type; `_NoArray` if CuPy has not been imported, since then no array is CuPy's."""
    cupy = sys.modules.get("cupy")
    return cupy.ndarray if cupy is not None and hasattr(cupy, "ndarray") else _NoArray


def _import(array: Any, name: str, namespace: Any) -> Any:
    """Read an array of another library, `namespace`, as NumPy's or CuPy's, without a copy."""
    if getattr(array, "requires_grad", False):
        if records_gradients(array):  # its data would be read and the gradient silently lost
            raise TypeError(
                f"{name} is {kind_of(array)} that requires a gradient, and cufa does not record gradients; "
                f"give {name}.detach()"
            )
        array = array.detach()  # DLPack refuses it nevertheless
    if getattr(array, "is_neg", bool)():  # likewise, its sign
        raise TypeError(
            f"{name} is {kind_of(array)} with its negative bit set, which DLPack leaves out; "
            f"give {name}.resolve_neg()"
        )
    device_type = _device_type(array, name)
    if device_type == _DLPACK_CUDA:
        device.current()  # raises with what is missing
        reader, unknown = sys.modules["cupy"].from_dlpack, _UNKNOWN_TO_CUPY
    elif device_type in _DLPACK_CPU:
        reader, unknown = np.from_dlpack, UNKNOWN_TO_NUMPY
    else:
        raise TypeError(
            f"{name} is on a device of DLPack type {device_type}; it may be on the CPU or a CUDA GPU"
        )
    dtype = _spelled(getattr(array, "dtype", None))
    try:
        if hasattr(array, "data_ptr") and array.data_ptr() == 0 and 0 not in array.shape:
            raise BufferError("it has elements, but no memory")  # for which NumPy would take some of its own
        exported = array.view(getattr(namespace, unknown[dtype])) if dtype in unknown else array
        read = reader(exported)
        if isinstance(read, np.ndarray) and not read.flags.writeable and _has_writeable_arrays(namespace):
            read = _as_writeable(read, exported)
        return read.view(_FLOATS[dtype]) if dtype in unknown else read
    except _READ_ERRORS as error:
        raise _unreadable(array, name, error) from error


def _has_writeable_arrays(namespace: Any) -> bool:
    """Whether arrays of this library may be written."""
    return getattr(namespace, "__name__", "").partition(".")[0] not in _IMMUTABLE


def _as_writeable(read: Any, exported: Any) -> Any:
    """The same memory, writeable unless the library that exported it says that it is not.

    DLPack says so from version 1.0 on. NumPy takes all arrays from before for read-only.
    """
    try:
        capsule = exported.__dlpack__(max_version=_DLPACK_VERSION)
    except TypeError:  # an exporter that knows no versions
        return np.asarray(_Writeable(read))
    is_unversioned = ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(capsule), _UNVERSIONED)
    return np.asarray(_Writeable(read)) if is_unversioned else read


class _Writeable:
    """The memory of a NumPy array, which lives as long, without the mark that it is read-only."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self.__array_interface__ = read.__array_interface__ | {"data": (read.ctypes.data, False)}


@functools.lru_cache(maxsize=256)
def _spelled(dtype: Any) -> str:
    """A dtype's name: libraries spell it as NumPy does, after their own name. NumPy takes microseconds."""
    return str(dtype).rpartition(".")[2]


def _device_type(array: Any, name: str) -> int:
    """DLPack's type of the device that another library's array is on."""
    try:
        device_type, _ = array.__dlpack_device__()
    except _READ_ERRORS as error:
        raise _unreadable(array, name, error) from error
    return int(device_type)


def _unreadable(array: Any, name: str, error: Exception) -> TypeError:
    """The error for an array that its library cannot export."""
    return TypeError(f"{name} is {kind_of(array)} that cannot be read through DLPack: {error}")


def _export(namespace: Any, beside: Any, result: Any) -> Any:
    """A result as an array of this library, on the device of `beside`."""
    # Where JAX's CPU has several devices, it takes what comes through DLPack for memory of the first.
    place = {} if _has_writeable_arrays(namespace) else {"device": beside.device}
    unknown = UNKNOWN_TO_NUMPY if isinstance(result, np.ndarray) else _UNKNOWN_TO_CUPY
    bits = unknown.get(result.dtype.name)
    if bits is None:
        return namespace.from_dlpack(result, **place)
    if not hasattr(namespace, result.dtype.name):
        raise TypeError(f"the result has dtype {result.dtype.name}, which the arrays' library does not have")
    return namespace.from_dlpack(result.view(bits), **place).view(getattr(namespace, result.dtype.name))


def namespace_of(array: Any) -> Any:
    """The library of an array: what its array API says, else the top module of its type or a base."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    tops = [sys.modules.get(kind.__module__.partition(".")[0]) for kind in type(array).__mro__]
    return next((top for top in tops if hasattr(top, "from_dlpack")), tops[0])


def records_gradients(array: Any) -> bool:
    """Whether a gradient that an array requires would be recorded; in torch.no_grad() it would not."""
    return bool(getattr(namespace_of(array), "is_grad_enabled", lambda: True)())


def _exporting_namespace(array: Any, name: str) -> Any:
    """The same; raises TypeError if results cannot be returned to this library."""
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
    """View an array of float8_e4m3fn as uint8; return any other unchanged.

    CuPy can create views of that dtype, but do nothing else with them.
    """
    return array.view(np.uint8) if array.dtype == INPUT_DTYPES[FLOAT8] else array


def contiguous(array: Any) -> Any:
    """A contiguous copy of a CuPy array."""
    return sys.modules["cupy"].ascontiguousarray(as_bytes(array)).view(array.dtype)


def _is_traced(array: Any) -> bool:
    """Whether it stands for an array while JAX records what is done with it."""
    kind = type(array)
    return kind.__module__.partition(".")[0] in _IMMUTABLE and kind.__name__.endswith("Tracer")


def check_same_kind(named: Mapping[str, Any]) -> None:
    """Raise TypeError, naming it, for anything that is not an array or not from the first one's library."""
    for name, array in named.items():
        check_elements(name, array)
        if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
            if _is_traced(array):
                raise TypeError(
                    f"{name} is an array that JAX traces, as jit, vmap and grad do, and cufa needs its "
                    "elements; call it outside of these, or by jax.pure_callback"
                )
            raise TypeError(
                f"{name} is {kind_of(array)}; it may be a NumPy array, a CuPy array or any array with DLPack"
            )
    (first_name, first), *others = named.items()
    for name, array in others:
        # An array may have a subclass, like torch's Parameter.
        if not (isinstance(array, type(first)) or isinstance(first, type(array))):
            raise TypeError(
                f"{name} is {kind_of(array)} and {first_name} {kind_of(first)}; "
                "all arrays must be of one kind"
            )


def check_elements(name: str, array: Any) -> None:
    """Raise TypeError for a torch tensor that is more than the elements in its memory, or has others.

    Such are nested and sparse tensors, those that torch.func transforms, those with a tangent (forward-mode
    differentiation), and those of many subclasses: CausalBias, MaskedTensor, FakeTensor.
    """
    kind: Any = type(array)
    torch, is_plain = _torch_of(kind)
    if torch is None:
        return
    if array.is_nested:
        raise TypeError(
            f"{name} is {kind_of(array)} that is nested; for sequences of different lengths, pack them and "
            "call cufa.attention with cu_seqlens_q and cu_seqlens_k"
        )
    if not is_plain:
        raise TypeError(
            f"{name} is {kind_of(array)}, whose elements may be others than its memory holds; give a plain "
            "torch.Tensor"
        )
    unwrapped = getattr(getattr(torch, "func", None), "debug_unwrap", _unchanged)  # new in torch 2.7
    if unwrapped(array) is not array:
        raise TypeError(
            f"{name} is {kind_of(array)} that torch.func transforms, as vmap, jvp and grad do, and cufa "
            "needs its elements; call it outside of these"
        )
    forward = torch.autograd.forward_ad
    if forward.unpack_dual(array).tangent is not None:  # it would silently be lost
        raise TypeError(
            f"{name} is {kind_of(array)} with a tangent, and cufa does not compute tangents; "
            f"give torch.autograd.forward_ad.unpack_dual({name}).primal"
        )
    if array.layout is not torch.strided:
        raise TypeError(
            f"{name} is {kind_of(array)} with layout {array.layout}; give what its to_dense() returns"
        )


@functools.lru_cache(maxsize=256)
def _torch_of(kind: Any) -> tuple[Any, bool]:
    """torch, for its tensors, and whether a subclass leaves to it what functions do with them; else None."""
    torch: Any = sys.modules.get("torch")
    tensor: Any = getattr(torch, "Tensor", _NoArray)
    if not issubclass(kind, tensor):
        return None, True
    function, dispatch = kind.__torch_function__, kind.__torch_dispatch__
    # Parameter's switches the mechanism off.
    plain = tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__
    is_plain = getattr(function, "__func__", function) in plain and dispatch is tensor.__torch_dispatch__
    return torch, is_plain


def check_no_mask(named: Mapping[str, Any]) -> None:
    """Raise TypeError for NumPy's masked arrays."""
    for name, array in named.items():
        if isinstance(array, np.ma.MaskedArray):  # masked elements would silently be read
            raise TypeError(
                f"{name} is {kind_of(array)}, and cufa does not support masked arrays; "
                f"give {name}.filled(...)"
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
