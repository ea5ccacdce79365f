"""What cufa asks of CUDA's driver through cuda.bindings."""

import ctypes
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from first_calls import failing_meanwhile

from cufa import driver
from cufa.jit import NVRTCMissingError
from cufa.plan.record import TensorBox
from cufa.problem import Problem
from cufa.tensor_maps import Encoder

bindings = pytest.importorskip("cuda.bindings.driver")

EXTENTS, STRIDES, BOX = (72, 33, 3, 2), (432, 144, 14256), (64, 16, 1, 1)


def test_a_launch(monkeypatch):
    config = driver.launch_config(
        grid=70_000, block=256, smem_bytes=40_000, cluster=2, overlaps=True, stream=2
    )
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (70_000, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (40_000, 2)
    overlap, cluster = config.attrs
    assert overlap.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert cluster.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    assert overlap.value.programmaticStreamSerializationAllowed == 1
    extents = cluster.value.clusterDim
    assert (extents.x, extents.y, extents.z) == (2, 1, 1)
    alone = driver.launch_config(grid=2, block=32, smem_bytes=0, cluster=2, overlaps=False, stream=0)
    assert [attribute.id for attribute in alone.attrs] == [cluster.id]

    def launch_kernel(of, function, pointers, extra):
        assert (of, int(function), extra) == (config, 1 << 40, 0)
        assert ctypes.c_char_p.from_address(pointers).value == b"params"
        return (bindings.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(bindings, "cuLaunchKernelEx", launch_kernel)
    driver.launch(config, 1 << 40, ctypes.c_char_p(b"params"))


@pytest.mark.parametrize("dtype", ["UINT8", "FLOAT16", "BFLOAT16"])
def test_a_tensor_map(monkeypatch, dtype):
    def encode(of, rank, address, extents, strides, box, steps, *how):
        assert of.name == f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"
        assert (rank, address) == (len(EXTENTS), 1 << 40)
        found = tuple(tuple(map(int, values)) for values in (extents, strides, box, steps))
        assert found == (EXTENTS, STRIDES, BOX, (1, 1, 1, 1))
        assert bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B in how
        encoded = bindings.CUtensorMap()
        encoded.opaque = [bindings.cuuint64_t(word) for word in range(16)]
        return bindings.CUresult.CUDA_SUCCESS, encoded

    monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", encode)
    encoded = driver.encode_tensor_map(dtype, 1 << 40, EXTENTS, STRIDES, BOX)
    assert encoded == b"".join(word.to_bytes(8, "little") for word in range(16))
    assert len(encoded) == driver.TENSOR_MAP_BYTES


def test_the_version_of_the_driver(monkeypatch):
    def write(version):
        version._obj.value = 13050
        return 0

    monkeypatch.setattr(driver, "library", lambda: types.SimpleNamespace(cuDriverGetVersion=write))
    driver.cuda_version.cache_clear()
    assert driver.cuda_version() == (13, 5)
    driver.cuda_version.cache_clear()


def test_a_refusal_has_the_driver_s_name(monkeypatch):
    refused = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", lambda *_: (refused, None))
    monkeypatch.setattr(bindings, "cuLaunchKernelEx", lambda *_: (refused,))
    with pytest.raises(driver.DriverError, match=r"^CUDA_ERROR_INVALID_VALUE$"):
        driver.encode_tensor_map("FLOAT16", 0, EXTENTS, STRIDES, BOX)
    with pytest.raises(driver.DriverError, match=r"^CUDA_ERROR_INVALID_VALUE$"):
        driver.launch(driver.launch_config(1, 32, 0, 1, overlaps=False, stream=0), 1, ctypes.c_char_p(b""))


def test_a_thread_that_has_not_used_the_gpu_gets_a_context(monkeypatch):
    cupy = pytest.importorskip("cupy")
    without, done = bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT, bindings.CUresult.CUDA_SUCCESS
    encoded, asked = bindings.CUtensorMap(), []
    monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", lambda *_: (done if asked else without, encoded))
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: asked.append(threading.get_ident()))
    box = TensorBox(tensor=0, rows=16, cols=64)
    problem = Problem("forward", "float16", 1, 100, 100, 1, 1, 64, 64, False, align_bytes=16)
    encode = Encoder(problem, (box,))
    fields = [1 << 40, 6400, 64, 64] * 4
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(encode, fields).result() == bytes(driver.TENSOR_MAP_BYTES)
        assert asked == list({thread.ident for thread in pool._threads})


def test_other_refusals_are_raised_at_once(monkeypatch):
    refusals = []

    def refused():
        refusals.append(driver.DriverError("CUDA_ERROR_INVALID_VALUE"))
        raise refusals[-1]

    with pytest.raises(driver.DriverError, match="INVALID_VALUE"):
        driver.in_context(refused)
    assert len(refusals) == 1


def test_threads_wait_while_one_loads_the_driver(monkeypatch):
    """In some versions of the bindings, other calls fail during the first one."""
    start, loaded = threading.Barrier(4), threading.Event()

    def load():
        loaded.set()
        return bindings.CUresult.CUDA_SUCCESS, 13000

    def load_at_once(_):
        start.wait(timeout=10)
        return driver._bindings() is bindings and loaded.is_set()

    version = failing_meanwhile(load, "cuDriverGetVersion")
    monkeypatch.setattr(bindings, "cuDriverGetVersion", version)
    driver._bindings.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(load_at_once, range(4))) == [True] * 4


def test_without_its_bindings_the_driver_is_not_asked(monkeypatch):
    """As with kernels from the cache, which need no NVRTC."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    driver._bindings.cache_clear()
    with pytest.raises(NVRTCMissingError, match=r"cuda-bindings, .*: pip install 'cufa\["):
        driver.encode_tensor_map("FLOAT16", 1 << 40, EXTENTS, STRIDES, BOX)
    with pytest.raises(NVRTCMissingError, match=r"\(import of cuda\.bindings halted"):
        driver.launch_config(1, 32, 0, cluster=2, overlaps=False, stream=0)


@pytest.mark.gpu
def test_strides_that_the_copy_engine_does_not_take():
    cupy = pytest.importorskip("cupy")
    address = cupy.zeros(1 << 16, cupy.float16).data.ptr
    assert any(driver.encode_tensor_map("FLOAT16", address, EXTENTS, STRIDES, BOX))
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.encode_tensor_map("FLOAT16", address, EXTENTS, (433, 144, 14256), BOX)
