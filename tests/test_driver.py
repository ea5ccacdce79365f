"""What cufa asks of CUDA's driver itself, beside how cuda.bindings has it."""

import ctypes
import types

import pytest

from cufa import driver

bindings = pytest.importorskip("cuda.bindings.driver")

EXTENTS, STRIDES, BOX = (72, 33, 3, 2), (432, 144, 14256), (64, 16, 1, 1)


def test_types_of_elements():
    for dtype in driver.TensorMapType:
        theirs = getattr(bindings.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.name}")
        assert dtype == int(theirs)


def test_a_launch_is_described_as_the_driver_reads_it():
    ours = driver.overlapping_launch(grid=70_000, block=256, smem_bytes=40_000, stream=2)
    theirs = bindings.CUlaunchConfig(ctypes.addressof(ours))
    assert (theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ) == (70_000, 1, 1)
    assert (theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ) == (256, 1, 1)
    assert (theirs.sharedMemBytes, int(theirs.hStream), theirs.numAttrs) == (40_000, 2, 1)
    attribute = bindings.CUlaunchAttribute(ctypes.addressof(ours.attributes.contents))
    ids = bindings.CUlaunchAttributeID
    assert attribute.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert ctypes.sizeof(driver.LaunchAttribute) == len(bytes(attribute.value.pad)) + 8


def test_a_tensor_map_is_asked_for_and_where_it_lies(monkeypatch):
    def encode(to, dtype, rank, address, extents, strides, box, steps, *how):
        asked.update(address=address.value, shape=(*extents,), strides=(*strides,), box=(*box,))
        asked.update(dtype=dtype, rank=rank, steps=(*steps,), how=how)
        first = ctypes.cast(to, ctypes.c_void_p).value
        assert first % driver.TENSOR_MAP_ALIGNMENT == 0
        ctypes.memmove(first, bytes(range(driver.TENSOR_MAP_BYTES)), driver.TENSOR_MAP_BYTES)
        return 0

    asked = {}
    library = types.SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(driver, "library", lambda: library)
    encoded = driver.encode_tensor_map(driver.TensorMapType.BFLOAT16, 1 << 40, EXTENTS, STRIDES, BOX)
    assert encoded == bytes(range(driver.TENSOR_MAP_BYTES))
    assert asked["how"] == (
        int(bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    assert (asked["address"], asked["shape"], asked["strides"], asked["box"]) == (
        1 << 40,
        EXTENTS,
        STRIDES,
        BOX,
    )
    assert (asked["dtype"], asked["rank"], asked["steps"]) == (9, 4, (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("name", "message"), [(b"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_VALUE"), (None, "error 1")]
)
def test_a_refusal_has_the_driver_s_name(monkeypatch, name, message):
    def name_of(status, to):
        assert status == 1
        to._obj.value = name

    library = types.SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 1, cuLaunchKernelEx=lambda *_: 1)
    library.cuGetErrorName = name_of
    monkeypatch.setattr(driver, "library", lambda: library)
    with pytest.raises(driver.DriverError, match=f"^{message}$"):
        driver.encode_tensor_map(driver.TensorMapType.FLOAT16, 0, EXTENTS, STRIDES, BOX)
    with pytest.raises(driver.DriverError, match=f"^{message}$"):
        driver.launch(driver.overlapping_launch(1, 32, 0, 0), 1, ctypes.c_char_p(b""))


@pytest.mark.gpu
def test_tensor_maps_are_those_of_cuda_bindings():
    cupy = pytest.importorskip("cupy")
    address = cupy.zeros(1 << 16, cupy.float16).data.ptr
    encoded = driver.encode_tensor_map(driver.TensorMapType.FLOAT16, address, EXTENTS, STRIDES, BOX)
    status, theirs = bindings.cuTensorMapEncodeTiled(
        bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(EXTENTS),
        address,
        [bindings.cuuint64_t(extent) for extent in EXTENTS],
        [bindings.cuuint64_t(stride) for stride in STRIDES],
        [bindings.cuuint32_t(extent) for extent in BOX],
        [bindings.cuuint32_t(1)] * len(EXTENTS),
        bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert status == bindings.CUresult.CUDA_SUCCESS
    assert encoded == b"".join(int(word).to_bytes(8, "little") for word in theirs.opaque)
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.encode_tensor_map(driver.TensorMapType.FLOAT16, address, EXTENTS, (433, 144, 14256), BOX)
