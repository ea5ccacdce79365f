"""What counts as an array, where it is computed on, and which arrays share memory.

Other libraries are stood for by a small one of DLPack arrays, and CuPy by a module whose arrays lie in
the CPU's memory.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tolerance import assert_attention, assert_gradients, random_problem

import cufa
from cufa import arrays, device, reference
from cufa.arrays import Adopted, adopt, on_current_gpu
from cufa.device import GPUUnavailableError
from cufa.problem import DTYPES
from cufa.untraced import untraced

DLPACK_CPU, DLPACK_CUDA, DLPACK_PINNED, DLPACK_ROCM = 1, 2, 3, 10
INSTALL_CUPY = r"there is a GPU, but no CuPy to use it with: pip install 'cufa\[cuda13\]'"


def forget_gpus() -> None:
    arrays.gpu_usable.cache_clear()
    device._read_gpu.cache_clear()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU, whatever this machine has."""
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    monkeypatch.setattr(device, "gpu_present", lambda: False)
    forget_gpus()
    yield
    forget_gpus()


# --- libraries that stand for others --------------------------------------------------------------


class DLPackArray:
    """An array of another library: it has DLPack, and NumPy's memory."""

    def __init__(self, values: Any, device_type: int = DLPACK_CPU) -> None:
        self.values = values
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)


class FirstDLPackArray(DLPackArray):
    """Its `__dlpack__` is that of DLPack before versions."""

    def __dlpack__(self, **options: Any) -> Any:
        if options.keys() - {"stream"}:
            raise TypeError(f"unexpected keyword arguments {options}")
        return self.values.__dlpack__()


class StandardArray(DLPackArray):
    """It says which library it is of, as the array API standard has it."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: StandardArray(np.from_dlpack(array)))


@pytest.fixture(params=[DLPackArray, FirstDLPackArray, StandardArray])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An array type whose library is found by the module of the type, or by asking the array."""
    kind = request.param
    if kind is not StandardArray:
        module = ModuleType("tinylib")
        module.from_dlpack = lambda array: kind(np.from_dlpack(array))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tinylib", module)
        monkeypatch.setattr(kind, "__module__", "tinylib.arrays")
    return kind


class CUDARuntimeError(RuntimeError):
    """Stands for CuPy's."""


class CudaArray:
    """What cufa uses of CuPy's arrays."""

    def __init__(self, values: Any, device_id: int = 0) -> None:
        self.values = values
        self.data = SimpleNamespace(ptr=values.ctypes.data, device_id=device_id)
        self.flags = SimpleNamespace(c_contiguous=values.flags.c_contiguous)
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.size, self.itemsize = values.size, values.itemsize

    def get(self) -> Any:
        return self.values.copy()

    def view(self, dtype: Any) -> "CudaArray":
        return CudaArray(self.values.view(dtype))

    def __setitem__(self, index: Any, value: "CudaArray") -> None:
        self.values[index] = value.values

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, self.data.device_id

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, h200_properties: dict[str, Any]) -> Any:
    """A machine with an H200 and CuPy."""
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceProperties=lambda _: h200_properties,
        CUDARuntimeError=CUDARuntimeError,
    )
    module: Any = ModuleType("cupy")
    module.__version__ = "14.0.0"
    module.cuda = SimpleNamespace(runtime=runtime)
    module.ndarray = CudaArray
    module.asarray = lambda array: CudaArray(np.array(array))
    module.from_dlpack = lambda array: CudaArray(array.values)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    return module


def some_array() -> Any:
    return np.arange(24, dtype=np.float32).reshape(2, 3, 4)


class Float8Array(DLPackArray):
    """Of a dtype that DLPack's readers do not know; seen as bytes, it is of one that they know."""

    dtype = "tinylib.float8_e4m3fn"

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("float8_e4m3fn")

    def view(self, dtype: Any) -> Any:
        return self.values.view(dtype)

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=StandardArray, uint8=np.uint8)


class BFloat16Array(DLPackArray):
    """The same of 16 bits; as NumPy's arrays of that dtype, which do not write DLPack either."""

    dtype = "tinylib.bfloat16"

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("bfloat16")

    def view(self, dtype: Any) -> Any:
        return self.values.view(dtype)

    def __array_namespace__(self) -> Any:
        def from_dlpack(array: Any) -> Any:
            return SimpleNamespace(view=lambda dtype: BFloat16Array(np.from_dlpack(array).view(dtype)))

        return SimpleNamespace(from_dlpack=from_dlpack, int16=np.int16, bfloat16=DTYPES["bfloat16"])


def test_bfloat16_of_other_libraries_is_read_and_written_as_bits() -> None:
    values = some_array().astype(DTYPES["bfloat16"])
    adopted = adopt({"q": BFloat16Array(values)}, None)
    assert adopted.arrays["q"].dtype == values.dtype
    assert np.shares_memory(adopted.arrays["q"], values)
    result = values + values
    given_back = adopted.give_back(result)
    assert type(given_back) is BFloat16Array
    np.testing.assert_array_equal(given_back.values, result)


def test_an_array_that_requires_a_gradient_is_named() -> None:
    q = StandardArray(some_array())
    q.requires_grad = True  # type: ignore[attr-defined]
    with pytest.raises(
        TypeError, match=r"^q is a .*StandardArray that requires a gradient, .*q\.detach\(\)$"
    ):
        adopt({"q": q}, None)


def test_an_array_that_requires_a_gradient_is_read_where_its_library_records_none() -> None:
    class Recording(StandardArray):
        requires_grad, records = True, False

        def detach(self) -> StandardArray:
            return StandardArray(self.values)

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it requires a gradient")

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=StandardArray, is_grad_enabled=lambda: self.records)

    q = Recording(some_array())
    assert np.shares_memory(adopt({"q": q}, None).arrays["q"], q.values)
    q.records = True
    with pytest.raises(TypeError, match=r"^q is a .*Recording that requires a gradient, .*q\.detach\(\)$"):
        adopt({"q": q}, None)


def test_a_number_that_requires_a_gradient_is_read_where_its_library_records_none() -> None:
    class Recording(float):
        requires_grad, records = True, False

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(is_grad_enabled=lambda: self.records)

    q, scale = some_array()[None], Recording(0.5)
    expected = cufa.attention(q, q, q, softmax_scale=0.5)
    np.testing.assert_array_equal(cufa.attention(q, q, q, softmax_scale=scale), expected)
    scale.requires_grad, scale.records = False, True
    np.testing.assert_array_equal(cufa.attention(q, q, q, softmax_scale=scale), expected)
    scale.requires_grad = True
    with pytest.raises(TypeError, match=r"^softmax_scale requires a gradient, and cufa does not"):
        cufa.attention(q, q, q, softmax_scale=scale)


def test_an_array_whose_sign_dlpack_leaves_out_is_named() -> None:
    q = StandardArray(some_array())
    q.is_neg = lambda: True  # type: ignore[attr-defined]
    with pytest.raises(
        TypeError, match=r"^q is a .*StandardArray with its negative bit .*q\.resolve_neg\(\)$"
    ):
        adopt({"q": q}, None)


def test_an_array_with_elements_and_no_memory_is_named() -> None:
    """As torch's in torch.func.functionalize; NumPy would take new memory for it."""

    class Unplaced(StandardArray):
        def __init__(self, values: Any) -> None:
            super().__init__(values)
            self.shape = values.shape

        def data_ptr(self) -> int:
            return 0

    with pytest.raises(TypeError, match=r"^q is a .*Unplaced that .*: it has elements, but no memory$"):
        adopt({"q": Unplaced(some_array())}, None)
    assert adopt({"q": Unplaced(some_array()[:0])}, None).arrays["q"].shape == (0, 3, 4)


def test_an_array_of_a_subclass_is_of_its_bases_library(library: Any) -> None:
    subclass = type("Subclass", (library,), {})
    subclass.__module__ = "__main__"
    adopted = adopt({"q": subclass(some_array())}, None)
    assert type(adopted.give_back(some_array())) is library


def test_an_array_may_be_of_a_subclass_of_the_others_kind() -> None:
    class Parameter(StandardArray):
        pass

    q, k = Parameter(some_array()), StandardArray(some_array())
    for named in ({"q": q, "k": k}, {"q": k, "k": q}):
        adopted = adopt(named, None)
        assert all(np.shares_memory(adopted.arrays[name], named[name].values) for name in named)
        assert type(adopted.give_back(some_array())) is StandardArray


def test_8_bit_arrays_of_other_libraries_are_read_as_bytes() -> None:
    values = some_array().astype(ml_dtypes.float8_e4m3fn)
    adopted = adopt({"q": Float8Array(values)}, None)
    assert adopted.arrays["q"].dtype == ml_dtypes.float8_e4m3fn
    assert np.shares_memory(adopted.arrays["q"], values)
    assert isinstance(adopted.give_back(some_array()), StandardArray)


@pytest.mark.parametrize("backend", ["cuda", "numpy"])
def test_8_bit_arrays_cross_over_as_bytes(cupy: Any, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """CuPy does nothing with their dtype but view memory as it."""

    def asarray(array: Any) -> CudaArray:
        if array.dtype == ml_dtypes.float8_e4m3fn:
            raise ValueError("Unsupported dtype float8_e4m3fn")
        return CudaArray(np.array(array))

    monkeypatch.setattr(cupy, "asarray", asarray)
    values = some_array()[:, ::2].astype(ml_dtypes.float8_e4m3fn)
    given = values if backend == "cuda" else CudaArray(values)
    moved = adopt({"q": given}, backend).arrays["q"]
    assert moved.dtype == values.dtype
    np.testing.assert_array_equal(moved.values if backend == "cuda" else moved, values)


# --- NumPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_numpy_arrays_are_used_as_they_are(backend: str | None) -> None:
    q, k = some_array(), some_array()[:, ::-1]
    adopted = adopt({"q": q, "k": k}, backend)
    assert (adopted.on_gpu, adopted.moved) == (False, False)
    assert adopted.arrays["q"] is q
    assert adopted.arrays["k"] is k
    assert adopted.give_back(q) is q
    assert adopted.give_back(q, k) is k


def test_subclasses_of_numpys_arrays_mix_with_them() -> None:
    class Tagged(np.ndarray[Any, Any]):
        pass

    tagged = some_array().view(Tagged)
    adopted = adopt({"q": tagged, "k": some_array()}, None)
    assert isinstance(adopted.arrays["q"], np.ndarray)
    assert np.shares_memory(adopted.arrays["q"], tagged)


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_a_broadcast_mask_is_planned_as_what_it_repeats(dtype: type) -> None:
    q = np.empty((2, 1000, 8, 64), np.float16)
    length = 1000 if dtype is bool else 125
    padding = np.ones((2, 1, 1, length), dtype)
    apart = np.ones((2, 1, 1, 2 * length), dtype)[..., ::2]  # kernels cannot read it where it lies

    def plan(mask: Any) -> cufa.Plan:
        return cufa.plan(q, q, q, mask=mask, arch="sm_90a")

    def to_all(mask: Any) -> Any:
        return np.broadcast_to(mask, (2, 1, 1000, length))

    assert plan(to_all(padding)) == plan(padding)
    bits = 2 * 1024**2 / 8
    repeated = plan(padding.repeat(1000, axis=2)).workspace_bytes
    assert repeated > bits > 100 * plan(padding).workspace_bytes
    assert plan(to_all(apart)).workspace_bytes == repeated


def test_what_a_mask_hides_is_not_read_without_a_word() -> None:
    masked = np.ma.masked_invalid(some_array())
    with pytest.raises(TypeError, match=r"^k is a numpy.ma.MaskedArray, .*; give k.filled\(...\)$"):
        adopt({"q": some_array(), "k": masked}, None)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([[1.0]], "a list"),
        (((1.0,),), "a tuple"),
        (None, "None"),
        (1.0, "a float"),
        ("q.npy", "a str"),
        (1, "an int"),
        (memoryview(b"bytes"), "a memoryview"),
        (np.float32(1), "a numpy.float32"),
        (SimpleNamespace(shape=(1,), dtype=np.float32), "a types.SimpleNamespace"),
    ],
)
def test_what_is_no_array_is_refused_by_name(argument: str, value: Any, kind: str) -> None:
    named = dict.fromkeys(("q", "k", "v"), some_array()) | {argument: value}
    expected = f"{argument} is {kind}; it may be a NumPy array, a CuPy array or any array with DLPack"
    with pytest.raises(TypeError) as caught:
        adopt(named, None)
    assert str(caught.value) == expected


@pytest.mark.parametrize("backend", ["gpu", "", "CUDA", "cupy", 0, np], ids=repr)
def test_backends_that_are_not_known(backend: Any) -> None:
    given = re.escape(repr(backend))
    with pytest.raises(ValueError, match=f"^backend is {given}; it may be 'numpy', 'cuda' or None$"):
        adopt({"q": some_array()}, backend)


# --- other libraries ------------------------------------------------------------------------------


def test_dlpack_arrays_are_read_without_a_copy(library: Any) -> None:
    q, k = library(some_array()), library(some_array()[:, ::2])
    adopted = adopt({"q": q, "k": k}, None)
    assert (adopted.on_gpu, adopted.moved) == (False, False)
    for name, given in (("q", q), ("k", k)):
        taken = adopted.arrays[name]
        assert type(taken) is np.ndarray
        assert taken.ctypes.data == given.values.ctypes.data
        assert taken.strides == given.values.strides


def test_results_go_back_to_their_library_without_a_copy(library: Any) -> None:
    adopted = adopt({"q": library(some_array())}, None)
    result = some_array()
    given_back = adopted.give_back(result)
    assert type(given_back) is library
    assert np.shares_memory(given_back.values, result)


def test_results_lie_on_the_device_of_jaxs_arrays() -> None:
    """Its CPU may have several, as with XLA_FLAGS=--xla_force_host_platform_device_count=2."""

    class JaxArray(StandardArray):
        device = "cpu:1"

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(__name__="jax.numpy", from_dlpack=lambda array, device="cpu:0": device)

    assert adopt({"q": JaxArray(some_array())}, None).give_back(some_array()) == JaxArray.device


def test_out_of_another_library_is_what_comes_back(library: Any) -> None:
    out = library(some_array())
    adopted = adopt({"q": library(some_array()), "out": out}, None)
    assert adopted.give_back(adopted.arrays["out"], out) is out


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_attention_of_another_librarys_arrays(library: Any, backend: str | None) -> None:
    rng = np.random.default_rng(1)
    problem = random_problem(rng, "float32", seqlen_q=17, seqlen_k=23, heads=4, kv_heads=2, head_dim=8)
    q, k, v, dout = (library(array) for array in (problem.q, problem.k, problem.v, problem.dout))
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, backend=backend)
    assert {type(array) for array in (out, lse, *gradients)} == {library}
    assert_attention(out.values, lse.values, problem, causal=True)
    dq, dk, dv = (gradient.values for gradient in gradients)
    assert_gradients((dq, dk, dv), problem, causal=True)
    assert type(cufa.softmax(q, backend=backend)) is library


def test_attention_into_a_given_out(library: Any) -> None:
    """Also where NumPy takes what it reads for read-only, as DLPack before versions does not say."""
    problem = random_problem(np.random.default_rng(2), "float32", seqlen_q=17, seqlen_k=17, head_dim=8)
    q, k, v = (library(array) for array in (problem.q, problem.k, problem.v))
    rows = np.full((*problem.q.shape[:-1], 11), np.nan, np.float32)
    out = library(rows[..., :8])
    assert cufa.attention(q, k, v, out=out) is out
    assert_attention(out.values, None, problem, causal=False)
    assert np.isnan(rows[..., 8:]).all()


def test_an_out_that_its_library_calls_read_only() -> None:
    q, out = StandardArray(some_array()[None]), StandardArray(some_array()[None])
    out.values.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out is read-only; it must be writeable$"):
        cufa.attention(q, q, q, out=out)


def test_attention_into_another_librarys_out() -> None:
    problem = random_problem(np.random.default_rng(2), "float16", seqlen_q=17, seqlen_k=17, head_dim=8)
    q, k, v = (StandardArray(array) for array in (problem.q, problem.k, problem.v))
    out = StandardArray(np.full_like(problem.q, np.nan))
    assert cufa.attention(q, k, v, out=out) is out
    assert_attention(out.values, None, problem, causal=False)
    with pytest.raises(ValueError, match=r"^out overlaps v in memory"):
        cufa.attention(q, k, v, out=v)


@pytest.mark.parametrize("backend", [None, "numpy", "cuda"])
def test_kinds_may_not_be_mixed(backend: str | None, library: Any) -> None:
    named = {"q": some_array(), "k": some_array(), "v": library(some_array())}
    kind = f"{library.__module__}.{library.__name__}"
    with pytest.raises(TypeError) as caught:
        adopt(named, backend)
    assert str(caught.value) == (f"v is a {kind} and q a numpy.ndarray; all arrays must be of one kind")


def test_two_other_libraries_may_not_be_mixed() -> None:
    named = {"q": StandardArray(some_array()), "k": FirstDLPackArray(some_array())}
    with pytest.raises(
        TypeError, match=r"^k is a test_arrays.FirstDLPackArray and q a test_arrays.StandardArray; "
    ):
        adopt(named, None)


@pytest.mark.parametrize("module", ["test_arrays", "library_that_is_not_imported"])
def test_an_array_whose_library_cannot_take_results(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DLPackArray, "__module__", module)
    expected = f"^q is a {module}.DLPackArray, whose library has no from_dlpack to hand results back$"
    with pytest.raises(TypeError, match=expected):
        adopt({"q": DLPackArray(some_array())}, None)


def test_an_array_that_jax_traces() -> None:
    class DynamicJaxprTracer:
        __module__ = "jax._src.interpreters.partial_eval"

    expected = r"^q is an array that JAX traces, as jit, vmap and grad do, .* or by jax.pure_callback$"
    with pytest.raises(TypeError, match=expected):
        adopt({"q": DynamicJaxprTracer()}, None)


def test_an_array_api_library_without_dlpack() -> None:
    class Half(DLPackArray):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace()

    with pytest.raises(TypeError, match=r"^q is a .*Half, whose library has no from_dlpack"):
        adopt({"q": Half(some_array())}, None)


def test_memory_that_cuda_has_pinned_is_the_cpus() -> None:
    adopted = adopt({"q": StandardArray(some_array(), DLPACK_PINNED)}, None)
    assert not adopted.on_gpu
    assert isinstance(adopted.arrays["q"], np.ndarray)


def test_an_array_on_a_device_of_another_kind() -> None:
    named = {"q": StandardArray(some_array()), "k": StandardArray(some_array(), DLPACK_ROCM)}
    with pytest.raises(TypeError) as caught:
        adopt(named, None)
    assert str(caught.value) == ("k is on a device of DLPack type 10; it may be on the CPU or a CUDA GPU")


def test_an_array_on_a_gpu_that_is_not_there() -> None:
    with pytest.raises(GPUUnavailableError, match=r"^no GPU: the NVIDIA driver is not installed"):
        adopt({"q": StandardArray(some_array(), DLPACK_CUDA)}, None)


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError])
def test_an_array_that_its_library_does_not_export_is_named(error: type[Exception]) -> None:
    class Guarded(StandardArray):
        def __dlpack__(self, **options: Any) -> Any:
            raise error("it requires a gradient")

    with pytest.raises((TypeError, ValueError), match=r"^k .*: it requires a gradient$"):
        adopt({"k": Guarded(some_array())}, None)


# --- with a GPU -----------------------------------------------------------------------------------


def test_backend_cuda_without_a_gpu() -> None:
    with pytest.raises(GPUUnavailableError, match=r"^no GPU: the NVIDIA driver is not installed"):
        adopt({"q": some_array()}, "cuda")


def test_a_gpu_without_cupy_says_once_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING, "cufa"):
        for _ in range(3):
            assert not adopt({"q": some_array()}, None).on_gpu
    (record,) = caplog.records
    assert record.getMessage().startswith("computing on the CPU: there is a GPU, but no CuPy")
    with pytest.raises(GPUUnavailableError, match=f"^{INSTALL_CUPY}, or 'cufa\\[cuda12\\]'"):
        adopt({"q": some_array()}, "cuda")


def test_backend_numpy_does_not_look_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not adopt({"q": some_array()}, "numpy").on_gpu
    assert not caplog.records


def test_cupy_without_a_driver_it_can_use(cupy: Any, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")

    cupy.cuda.runtime.getDevice = refuse
    with caplog.at_level(logging.WARNING, "cufa"):
        assert not adopt({"q": some_array()}, None).on_gpu
    expected = "there is a GPU, but CuPy 14.0.0 cannot use it: cudaErrorInsufficientDriver"
    assert f"computing on the CPU: {expected}" in caplog.text
    assert "update the driver" in caplog.text
    with pytest.raises(GPUUnavailableError, match=f"^{expected}"):
        adopt({"q": some_array()}, "cuda")


@pytest.mark.parametrize("backend", [None, "cuda"])
def test_arrays_on_the_gpu_stay_there(cupy: Any, backend: str | None) -> None:
    q, k = CudaArray(some_array()), CudaArray(some_array())
    adopted = adopt({"q": q, "k": k}, backend)
    assert (adopted.on_gpu, adopted.moved) == (True, False)
    assert adopted.arrays["q"] is q
    assert adopted.give_back(k) is k
    assert adopted.give_back(k, q) is q


@pytest.mark.parametrize("backend", [None, "cuda"])
def test_numpy_arrays_travel_to_the_gpu_and_back(cupy: Any, backend: str | None) -> None:
    q, out = some_array(), np.full((2, 3, 4), np.nan, np.float32)[::-1]
    adopted = adopt({"q": q, "out": out}, backend)
    assert (adopted.on_gpu, adopted.moved) == (True, True)
    assert type(adopted.arrays["q"]) is CudaArray
    np.testing.assert_array_equal(adopted.arrays["q"].values, q)
    result = CudaArray(q + 1)
    assert type(adopted.give_back(result)) is np.ndarray
    np.testing.assert_array_equal(adopted.give_back(result), q + 1)
    assert adopted.give_back(result, out) is out
    np.testing.assert_array_equal(out, q + 1)


def test_other_libraries_arrays_travel_to_the_gpu_and_back(cupy: Any) -> None:
    q, out = StandardArray(some_array()), StandardArray(np.full((2, 3, 4), np.nan, np.float32))
    adopted = adopt({"q": q, "out": out}, None)
    assert (adopted.on_gpu, adopted.moved) == (True, True)
    result = CudaArray(q.values + 1)
    given_back = adopted.give_back(result)
    assert type(given_back) is StandardArray
    np.testing.assert_array_equal(given_back.values, q.values + 1)
    assert adopted.give_back(result, out) is out
    np.testing.assert_array_equal(out.values, q.values + 1)


def test_other_libraries_arrays_on_the_gpu_stay_there(
    cupy: Any, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = library(some_array(), DLPACK_CUDA)
    adopted = adopt({"q": q}, None)
    assert (adopted.on_gpu, adopted.moved) == (True, False)
    assert adopted.arrays["q"].values is q.values
    assert type(adopted.give_back(CudaArray(some_array()))) is library


def test_another_library_waits_for_what_is_written_to_its_array(cupy: Any) -> None:
    """It does so where it takes a result over: with a given array, what it takes is dropped."""
    taken: list[Any] = []

    class Waiting(StandardArray):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=taken.append)

    q, out = Waiting(some_array(), DLPACK_CUDA), Waiting(some_array(), DLPACK_CUDA)
    adopted = adopt({"q": q, "out": out}, None)
    assert adopted.give_back(adopted.arrays["out"], out) is out
    assert taken == [adopted.arrays["out"]]


def test_what_is_wrong_is_said_before_arrays_are_copied(cupy: Any) -> None:
    cupy.asarray = None
    for dtype, message in (("int32", "q has dtype int32"), ("float32", "k has shape")):
        q = np.ones((1, 5, 2, 8), dtype)
        with pytest.raises((TypeError, ValueError), match=message):
            cufa.attention(q, q[..., :7], q[..., :7], backend="cuda")
    with pytest.raises(ValueError, match="out is read-only"):
        cufa.attention(q, q, q, out=np.broadcast_to(np.float32(0), q.shape), backend="cuda")


def test_backend_numpy_brings_arrays_from_the_gpu(cupy: Any) -> None:
    q, out = CudaArray(some_array()), CudaArray(np.full((2, 3, 4), np.nan, np.float32))
    adopted = adopt({"q": q, "out": out}, "numpy")
    assert (adopted.on_gpu, adopted.moved) == (False, True)
    assert type(adopted.arrays["q"]) is np.ndarray
    np.testing.assert_array_equal(adopted.arrays["q"], q.values)
    given_back = adopted.give_back(some_array())
    assert type(given_back) is CudaArray
    np.testing.assert_array_equal(given_back.values, some_array())
    assert adopted.give_back(some_array(), out) is out
    np.testing.assert_array_equal(out.values, some_array())


def test_numpy_and_cupy_may_not_be_mixed(cupy: Any) -> None:
    for named in (
        {"q": some_array(), "k": CudaArray(some_array())},
        {"q": CudaArray(some_array()), "k": some_array()},
    ):
        with pytest.raises(TypeError, match=r"^k is a .* and q a .*; all arrays must be of one kind$"):
            adopt(named, None)


def test_arrays_on_two_sides_may_not_be_mixed(cupy: Any) -> None:
    on_cpu, on_gpu = StandardArray(some_array()), StandardArray(some_array(), DLPACK_CUDA)
    together = "all arrays must be on one device$"
    with pytest.raises(ValueError, match=f"^k is on a GPU and q on the CPU; {together}"):
        adopt({"q": on_cpu, "k": on_gpu}, None)
    with pytest.raises(ValueError, match=f"^k is on the CPU and q on a GPU; {together}"):
        adopt({"q": on_gpu, "k": on_cpu}, None)


@pytest.mark.parametrize("backend", [None, "cuda", "numpy"])
def test_arrays_on_another_gpu_are_refused(cupy: Any, backend: str | None) -> None:
    named = {"q": CudaArray(some_array()), "k": CudaArray(some_array(), device_id=3)}
    with pytest.raises(ValueError, match=r"^k is on GPU 3 and the current one is 0; .*cupy.cuda.Device\(3\)"):
        adopt(named, backend)


def test_memory_on_the_gpu_may_be_any_librarys(cupy: Any) -> None:
    given = CudaArray(some_array())
    assert on_current_gpu(given, "workspace") is given
    values = some_array()
    assert on_current_gpu(StandardArray(values, DLPACK_CUDA), "workspace").data.ptr == values.ctypes.data
    for array, kind, message in (
        (some_array(), TypeError, "^workspace is in the CPU's memory; it must be in the GPU's$"),
        (StandardArray(some_array()), TypeError, "^workspace is in the CPU's memory"),
        (1 << 20, TypeError, "^workspace is an int; it may be a NumPy array, a CuPy array or any array with"),
        (CudaArray(some_array(), device_id=3), ValueError, "^workspace is on GPU 3 and the current one is 0"),
    ):
        with pytest.raises(kind, match=message):
            on_current_gpu(array, "workspace")


def read_only(out: Any) -> Any:
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("make_out", "message"),
    [
        (read_only, "out is read-only; it must be writeable"),
        (lambda out: np.lib.stride_tricks.as_strided(out, strides=(0, 0, 0, 4)), "out has strides"),
    ],
)
def test_an_out_that_travels_is_held_to_the_same_rules(
    cupy: Any, make_out: Callable[[Any], Any], message: str
) -> None:
    """Its copy on the GPU is writeable and lies nowhere else, but the result goes back to `out`."""
    q = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"^{message}"):
        cufa.attention(q, q, q, out=make_out(np.zeros_like(q)))


def test_an_out_that_travels_may_not_overlap_either(cupy: Any) -> None:
    q, k = (np.ones((1, 4, 2, 8), np.float32) for _ in range(2))
    with pytest.raises(ValueError, match=r"^out overlaps k in memory; it must not$"):
        cufa.attention(q, k, q, out=k)


# --- libraries that are installed -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_torch_on_the_cpu(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    problem = random_problem(rng, dtype, seqlen_q=17, seqlen_k=23, heads=4, kv_heads=2, head_dim=8)
    q, k, v, dout = map(torch.from_numpy, (problem.q, problem.k, problem.v, problem.dout))
    assert adopt({"q": q}, None).arrays["q"].ctypes.data == q.data_ptr()
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert {type(x) for x in (out, lse, *gradients)} == {torch.Tensor}
    assert_attention(out.numpy(), lse.numpy(), problem, causal=True)
    dq, dk, dv = (gradient.numpy() for gradient in gradients)
    assert_gradients((dq, dk, dv), problem, causal=True)
    result = torch.full_like(out, float("nan"))
    assert cufa.attention(q, k, v, causal=True, out=result) is result
    assert torch.equal(result, out)


def test_an_array_whose_device_dlpack_does_not_know_is_named() -> None:
    class Abstract(StandardArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("Unknown device type meta for Dlpack")

    with pytest.raises(TypeError, match=r"^k is a .*Abstract that cannot be read through DLPack: Unknown"):
        adopt({"k": Abstract(some_array())}, None)


def test_torch_tensors_that_cannot_be_read_are_named() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 2, 8)
    negative = torch.zeros((1, 4, 2, 8), dtype=torch.complex64).conj().imag
    for unreadable in (q.clone().requires_grad_(), q.bfloat16().requires_grad_(), q.to("meta"), negative):
        with pytest.raises((TypeError, ValueError), match=r"^q .*torch\.Tensor"):
            cufa.attention(unreadable, unreadable, unreadable)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_torch_tensors_are_read_where_torch_records_no_gradients(mode: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q, scale, sink = torch.randn(1, 4, 2, 8).to(getattr(torch, dtype)), torch.tensor(0.5), torch.randn(2)
    expected = cufa.attention(q, q, q, sink=sink, softmax_scale=0.5)
    q, scale, sink = (torch.nn.Parameter(x) for x in (q, scale, sink))
    out = torch.nn.Parameter(torch.zeros_like(q))
    with getattr(torch, mode)():
        result = cufa.attention(q, q, q, sink=sink, softmax_scale=scale)
        assert cufa.attention(q, q, q, sink=sink, softmax_scale=scale, out=out) is out
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert torch.equal(out.detach(), expected)
    with pytest.raises(TypeError, match=r"^softmax_scale requires a gradient, and cufa does not"):
        cufa.attention(*[q.detach()] * 3, softmax_scale=scale)


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_torch_tensors_whose_elements_are_not_their_memorys_are_named() -> None:
    torch = pytest.importorskip("torch")
    bias = pytest.importorskip("torch.nn.attention.bias")
    masked = pytest.importorskip("torch.masked")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    q = torch.zeros(1, 4, 2, 8)
    parts = [q[0], q[0, :2]]
    strange = {
        bias.causal_lower_right(
            4, 4
        ): "CausalBias, whose elements may be others than its memory holds; give a",
        masked.masked_tensor(q, q == 0): "MaskedTensor, whose elements may be others than its memory holds",
        fake_tensor.FakeTensorMode().from_tensor(q): "FakeTensor, whose elements may be others",
        torch.nested.nested_tensor(parts): "Tensor that is nested; for sequences of different lengths, pack",
        torch.nested.nested_tensor(parts, layout=torch.jagged): "NestedTensor that is nested; for sequences",
        q.to_sparse(): "Tensor with layout torch.sparse_coo; give what its to_dense",
    }
    for tensor, message in strange.items():
        for call, name in (
            (lambda tensor=tensor: cufa.attention(q, tensor, q), "k"),
            (lambda tensor=tensor: cufa.attention(q, q, q, bias=tensor), "bias"),
            (lambda tensor=tensor: cufa.ScoreMod(lambda s, *_: s, tensor), "array 0 of score_mod"),
        ):
            with pytest.raises(TypeError, match=rf"^{name} is a torch\S*\.{message}"):
                call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_torch_tensors_that_torch_func_transforms_are_named() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch", minversion="2.7")  # earlier ones do not say which these are
    q, one, scale = torch.ones(2, 1, 4, 2, 8), torch.ones(1, 4, 2, 8), torch.tensor(0.5)
    refused = r" is a torch\.Tensor that torch\.func transforms, as vmap, .*; call it outside of these$"
    for transformed in (
        torch.func.functionalize(cufa.softmax),
        torch.func.vmap(cufa.softmax),
        torch.func.grad(lambda x: cufa.softmax(x).sum()),
        torch.func.jacfwd(cufa.softmax),
        lambda x: torch.func.jvp(cufa.softmax, (x,), (x,)),
    ):
        with pytest.raises(TypeError, match=f"^x{refused}"):
            transformed(q)
    with pytest.raises(TypeError, match=f"^query{refused}"):
        torch.func.vmap(cufa.compat.scaled_dot_product_attention)(q, q, q)
    with pytest.raises(TypeError, match=f"^softmax_scale{refused}"):
        torch.func.grad(lambda x: cufa.attention(one, one, one, softmax_scale=x).sum())(scale)


@pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_torch_tensors_with_a_tangent_are_named() -> None:
    """Results would have none, so the derivative would be lost without a word."""
    torch = pytest.importorskip("torch")
    forward = torch.autograd.forward_ad
    q, table, scale = torch.ones(1, 4, 2, 8), torch.ones(4, 4), torch.tensor(0.5)
    sdpa = cufa.compat.scaled_dot_product_attention
    with forward.dual_level():
        dual, dual_table, dual_scale = (forward.make_dual(x, x) for x in (q, table, scale))
        calls: dict[str, Callable[[], Any]] = {
            "q": lambda: cufa.attention(dual, q, q),
            "bias": lambda: cufa.attention(q, q, q, bias=dual_table),
            "softmax_scale": lambda: cufa.attention(q, q, q, softmax_scale=dual_scale),
            "x": lambda: cufa.softmax(dual),
            "cos": lambda: cufa.rotary(q, dual_table, table),
            "query": lambda: sdpa(dual, q, q),
            "attn_mask": lambda: sdpa(q, q, q, dual_table[:2].repeat(2, 1)[:, :2].contiguous()),
            "learnable_sink": lambda: cufa.compat.flash_attn_func(q, q, q, learnable_sink=dual_table[0, :2]),
            "array 0 of score_mod": lambda: cufa.ScoreMod(lambda s, *_: s, dual_table),
        }
        for name, call in calls.items():
            primal = rf"give torch\.autograd\.forward_ad\.unpack_dual\({name}\)\.primal$"
            with pytest.raises(TypeError, match=rf"^{name} is a torch\.Tensor with a tangent, .*; {primal}"):
                call()
        primal = forward.unpack_dual(dual).primal
        assert torch.equal(cufa.attention(primal, q, q), cufa.attention(q, q, q))
    with pytest.raises(TypeError, match=r"^x is a torch\.Tensor with a tangent, and cufa does not"):
        torch.func.linearize(cufa.softmax, q)


def test_torch_notices_what_is_written_to_its_tensors() -> None:
    torch = pytest.importorskip("torch")
    q, dout, out, dq, dk, dv = (torch.ones(1, 4, 2, 8) for _ in range(6))  # views would share a counter
    lse, angles, bias, dbias, rows = (
        torch.zeros(shape) for shape in ((1, 2, 4), (4, 4), (1, 4), (1, 4), (3, 4, 2, 8))
    )
    written = {
        (out, lse): lambda: cufa.attention(q, q, q, out=out, lse=lse),
        (rows,): lambda: cufa.attention(q, q, q, out=rows[1:2]),
        (dq, dk, dv, dbias): lambda: cufa.attention_backward(
            dout, q, q, q, out, lse, bias=bias, dq=dq, dk=dk, dv=dv, dbias=dbias
        ),
        (q,): lambda: cufa.rotary(q, angles, angles, positions=torch.arange(4)[None], out=q),
        (dq, lse): lambda: cufa.merge(out, lse, out, lse, out=dq, lse=lse),
    }
    for tensors, call in written.items():
        versions = [tensor._version for tensor in tensors]
        call()
        assert all(tensor._version > before for tensor, before in zip(tensors, versions, strict=True))
    read = torch.ones(1, 4, 2, 8, requires_grad=True)
    loss = (read * out).sum()
    cufa.attention(q, q, q, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_notices_what_is_copied_back_to_its_tensors(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    q, out = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    adopted = adopt({"q": q, "out": out}, "cuda")
    assert adopted.moved
    adopted.give_back(CudaArray(some_array()), out)
    assert (q._version, out._version) == (0, 1)
    np.testing.assert_array_equal(out.numpy(), some_array())


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz"])
def test_8_bit_dtypes_that_no_call_takes_are_named(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    strange, q = torch.zeros(1, 4, 2, 8).to(getattr(torch, dtype)), torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=rf"^x has dtype {dtype}; it may be float16, bfloat16, "):
        cufa.softmax(strange)
    with pytest.raises(TypeError, match=rf"^q has dtype {dtype}; it may be .* or float8_e4m3fn$"):
        cufa.attention(strange, strange, strange)
    with pytest.raises(TypeError, match=rf"^mask has dtype {dtype}; it may be bool"):
        cufa.attention(q, q, q, mask=strange[0, 0])


def test_torch_tensors_of_subclasses_that_change_nothing() -> None:
    torch = pytest.importorskip("torch")
    tagged = type("Tagged", (torch.Tensor,), {})
    q = torch.ones(1, 4, 2, 8)
    for like in (torch.nn.Parameter(q, requires_grad=False), q.as_subclass(tagged)):
        assert torch.equal(cufa.attention(like, like, like), cufa.attention(q, q, q))


def test_torch_compile_does_not_look_into_calls() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 8, 2, 16)

    def sum_of_gradients(q: Any, k: Any, v: Any) -> Any:
        out, lse = cufa.attention(q + 1, k, v, causal=True, return_lse=True)
        return sum(gradient.sum() for gradient in cufa.attention_backward(out, q, k, v, out, lse))

    compiled = torch.compile(sum_of_gradients, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(q, k, v), sum_of_gradients(q, k, v))
    turned = cufa.compat.scaled_dot_product_attention
    torch.testing.assert_close(torch.compile(turned, backend="eager")(q, k, v), turned(q, k, v))


def test_calls_leave_what_torch_compiles_once_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def disable(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: ("outside", function(*arguments))

    @untraced
    def double(x: int) -> int:
        return 2 * x

    torch = SimpleNamespace(compiler=SimpleNamespace(disable=disable))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert double(3) == 6
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert [double(3), double(4)] == [("outside", 6), ("outside", 8)]


def test_torch_compiles_no_public_function() -> None:
    for module in (cufa, cufa.compat):
        for name in module.__all__:
            function = getattr(module, name)
            assert not isfunction(function) or hasattr(function, "__wrapped__"), name


def test_bfloat16_of_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    problem = random_problem(np.random.default_rng(6), "float32", seqlen_q=17, seqlen_k=23, head_dim=8)
    q, k, v = (torch.from_numpy(array).bfloat16() for array in (problem.q, problem.k, problem.v))
    result = torch.zeros_like(q)
    out = cufa.attention(q, k, v)
    assert cufa.attention(q, k, v, out=result) is result
    assert out.dtype == result.dtype == torch.bfloat16
    exact = cufa.attention(q.float(), k.float(), v.float())
    assert (out - exact).abs().max() < 0.02
    assert torch.equal(out, result)


def test_jax_on_the_cpu() -> None:
    jax = pytest.importorskip("jax")
    problem = random_problem(np.random.default_rng(5), "float32", seqlen_q=17, seqlen_k=23, head_dim=8)
    (*_, cpu) = jax.devices("cpu")  # where it has a GPU, too
    q, k, v = (jax.device_put(array, cpu) for array in (problem.q, problem.k, problem.v))
    out, lse = cufa.attention(q, k, v, return_lse=True)
    assert isinstance(out, jax.Array)
    assert out.device == lse.device == cpu
    assert_attention(np.asarray(out), np.asarray(lse), problem, causal=False)
    with pytest.raises(TypeError, match=r"^out is from a library whose arrays cannot be written; take what"):
        cufa.attention(q, k, v, out=out)
    half = [array.astype("bfloat16") for array in (q, k, v)]
    out = cufa.attention(*half)
    assert (out.dtype, out.device) == ("bfloat16", cpu)
    exact, _ = reference.attention(*(np.asarray(array.astype("float32")) for array in half))
    np.testing.assert_allclose(np.asarray(out.astype("float32")), exact, atol=0.02)


def test_adopted_is_a_record() -> None:
    adopted = adopt({"q": some_array()}, None)
    assert isinstance(adopted, Adopted)
    with pytest.raises(AttributeError):
        adopted.moved = True  # type: ignore[misc]
