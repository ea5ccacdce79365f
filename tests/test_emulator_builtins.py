"""What the emulator puts in the place of CUDA's built-ins and of PTX, held to what a GPU computes.

The same tests run on a GPU with `pytest -m gpu`: there, it is they that are tested.
"""

import re
import struct
from pathlib import Path
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import pytest
from emulator import Module, with_probe

from cufa import jit
from cufa.device import target

TWINS = Path(emulator.__file__).parent / "include" / "ptx"
SMEM_BYTES = 2 * 16 * 16 * 2


@pytest.fixture
def folder(tmp_path):
    return with_probe("probe.cu", tmp_path)


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("emulator", "gpu")])
def launch(request, folder):
    """Runs launch(entry, blocks, threads, arrays, numbers): the parameter is addresses and numbers."""
    if request.param == "gpu":
        return lambda *arguments: launch_on_gpu(folder, *arguments)
    return lambda *arguments: launch_on_emulator(folder, *arguments)


def launch_on_emulator(folder, entry, blocks, threads, arrays, numbers):
    params = pack([array.ctypes.data for array in arrays.values()], numbers)
    module = Module("probe.cu", {"SMEM_BYTES": SMEM_BYTES}, folder=folder)
    module.launch(entry, blocks, threads, SMEM_BYTES, params, arrays)


def launch_on_gpu(folder, entry, blocks, threads, arrays, numbers):
    cupy = pytest.importorskip("cupy")
    variant = jit.Variant("probe.cu", (("SMEM_BYTES", SMEM_BYTES),), target(None).arch, folder)
    kernel = jit.load(jit.build(variant)).get_function(entry)
    on_gpu = [cupy.asarray(array.view(np.uint8)) for array in arrays.values()]
    params = pack([array.data.ptr for array in on_gpu], numbers)
    by_value = np.frombuffer(params, np.dtype((np.void, len(params))))
    kernel((blocks,), (threads,), (by_value,), shared_mem=SMEM_BYTES)
    for array, result in zip(arrays.values(), on_gpu, strict=True):
        array.view(np.uint8)[...] = result.get()


def pack(addresses, numbers):
    padding = len(numbers) % 2
    return struct.pack(f"={len(addresses)}q{len(numbers)}i{4 * padding}x", *addresses, *numbers)


def awkward_floats(rng):
    """All float16 and bfloat16, what lies halfway between two, the neighbours of these, and anything."""
    bits = np.arange(2**16, dtype=np.uint16)
    halves = bits.view(np.float16).astype(np.float32)
    bfloats = (bits.astype(np.uint32)[:, None] << 16 | [0, 0x8000]).astype(np.uint32).view(np.float32).ravel()
    ties = np.concatenate([halves, (halves[:-1] + halves[1:]) / 2, bfloats])
    neighbours = [np.nextafter(ties, np.float32(direction)) for direction in (-np.inf, np.inf)]
    anything = rng.integers(0, 2**32, 10_000, dtype=np.uint32).view(np.float32)
    moderate = rng.uniform(-160, 160, 10_000).astype(np.float32)
    return np.concatenate([ties, *neighbours, anything, moderate])


def rounded(floats, dtype):
    """The bits of what conversion instructions return, which know one NaN."""
    return np.where(np.isnan(floats), np.uint16(0x7FFF), floats.astype(dtype).view(np.uint16))


def test_conversions(launch):
    with np.errstate(all="ignore"):
        floats = awkward_floats(np.random.default_rng(1))
    bits = np.arange(2**16, dtype=np.uint16)
    arrays: dict[str, Any] = {
        "floats": floats,
        "halves": np.zeros(floats.size, np.uint16),
        "bfloats": np.zeros(floats.size, np.uint16),
        "half_pairs": np.zeros(floats.size, np.uint32),
        "bfloat_pairs": np.zeros(floats.size, np.uint32),
        "powers": np.zeros(floats.size, np.float32),
        "bits": bits,
        "from_halves": np.zeros(bits.size, np.float32),
        "from_bfloats": np.zeros(bits.size, np.float32),
    }
    launch("conversions", 4, 128, arrays, (floats.size, bits.size))

    with np.errstate(all="ignore"):
        for what, dtype in (("half", np.float16), ("bfloat", ml_dtypes.bfloat16)):
            low, high = (rounded(x, dtype) for x in (floats, -floats))
            back = bits.view(dtype).astype(np.float32)
            plural = {"half": "halves", "bfloat": "bfloats"}[what]
            np.testing.assert_array_equal(arrays[plural], low)
            np.testing.assert_array_equal(arrays[f"{what}_pairs"], high.astype(np.uint32) << 16 | low)
            np.testing.assert_array_equal(arrays[f"from_{plural}"], back)
        powers = np.exp2(floats.astype(np.float64))
        powers = np.where(powers < np.finfo(np.float32).tiny, 0, powers).astype(np.float32)
        np.testing.assert_array_max_ulp(arrays["powers"], powers, 2)


def ballot(ayes):
    return np.packbits(ayes, bitorder="little").view(np.int32)[0]


def taken(values, inside, lanes):
    """The values of other lanes, or one's own where there is none."""
    return values[np.where(inside, lanes, np.arange(32))]


def test_shuffles_votes_and_atomics(launch):
    values = np.random.default_rng(2).permutation(64).astype(np.int32)
    results, total = np.zeros((15, 64), np.int32), np.zeros(1)
    launch("warp", 1, 64, {"values": values, "results": results, "sum": total}, (64,))

    lane = np.arange(32)
    for warp in (0, 1):
        mine = values[32 * warp :][:32]

        expected = [
            mine[5],
            mine[lane // 8 * 8 + (lane + 3) % 8],
            mine[lane ^ 9],
            mine[lane ^ 4],
            taken(mine, lane >= 3, lane - 3),
            taken(mine, lane % 4 >= 1, lane - 1),
            taken(mine, lane + 7 < 32, lane + 7),
            taken(mine, lane % 16 + 2 < 16, lane + 2),
            ballot(mine % 3 == 0),
            (mine == 7).any(),
            True,
            np.where(lane < 12, mine[lane ^ 1], ballot((mine % 2 == 1) & (lane >= 12))),
            np.where(lane < 12, 1, mine[lane ^ 2]),
            True,
            False,
        ]
        for i, row in enumerate(expected):
            np.testing.assert_array_equal(results[i, 32 * warp :][:32], row, f"result {i} of warp {warp}")
    assert total[0] == values.sum()


def test_fragments_and_copies(launch):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 8, (16, 16)).astype(np.float16) for _ in range(2))
    arrays: dict[str, Any] = {
        "a": a,
        "b": b,
        "loaded": np.zeros((32, 4), np.uint32),
        "transposed": np.zeros((32, 4), np.uint32),
        "f16": np.zeros((32, 4), np.float32),
        "bf16": np.zeros((32, 4), np.float32),
        "turing": np.zeros((32, 4), np.float32),
        "copied": np.zeros((16, 16), np.float16),
    }
    launch("fragments", 1, 32, arrays, ())

    # A register holds two neighbours of a row of an 8x8 matrix, of each row four lanes (PTX ISA, "ldmatrix").
    matrices = [a[rows : rows + 8, cols : cols + 8] for cols in (0, 8) for rows in (0, 8)]
    loaded, transposed = (
        arrays[name].view(np.float16).reshape(32, 4, 2) for name in ("loaded", "transposed")
    )
    for i, matrix in enumerate(matrices):
        np.testing.assert_array_equal(loaded[:, i].reshape(8, 8), matrix)
        np.testing.assert_array_equal(transposed[:, i].reshape(8, 8), matrix.T)

    # Of the product, two registers are of its upper eight rows and two of the lower ("mma.m16n8k16").
    for name, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16), ("turing", np.float16)):
        left, right = a.view(dtype).astype(np.float64), b.view(dtype)[:, :8].astype(np.float64)
        product = arrays[name].reshape(32, 2, 2).swapaxes(0, 1).reshape(16, 8)
        error = np.abs(product - (left @ right + 1))
        assert (error <= 1e-5 * (np.abs(left) @ np.abs(right) + 1)).all()

    np.testing.assert_array_equal(arrays["copied"][:15], a[:15])
    assert not arrays["copied"][15].any()


def test_wide_fragments(launch):
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    a64, b64 = rng.standard_normal((16, 16)), rng.standard_normal((16, 8))
    arrays: dict[str, Any] = {
        "a": a,
        "b": b,
        "rounded": np.zeros((16, 8), np.uint32),
        "tf32": np.zeros((32, 4), np.float32),
        "a64": a64,
        "b64": b64,
        "f64": np.zeros((32, 4)),
        "small": np.zeros((32, 2)),
    }
    launch("wide_fragments", 1, 32, arrays, ())

    def product_of(name):
        return arrays[name].reshape(32, -1, 2).swapaxes(0, 1).reshape(-1, 8)

    def cut(x):
        return (x.view(np.uint32) & 0xFFFFE000).view(np.float32)

    np.testing.assert_array_equal(arrays["rounded"].view(np.float32), cut(a / 2))
    left, right = (cut(x).astype(np.float64) for x in (a, b))
    error = np.abs(product_of("tf32") - (left @ right + 1))
    assert (error <= 1e-6 * (np.abs(left) @ np.abs(right) + 1)).all()
    np.testing.assert_allclose(product_of("f64"), a64 @ b64 + 1, rtol=1e-13, atol=1e-13)
    small = a64[:8, :4] @ b64[:4] + 1
    np.testing.assert_allclose(product_of("small"), small, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("header", sorted(path.name for path in TWINS.iterdir()))
def test_every_wrapper_of_ptx_has_a_twin(header):
    # What only wrappers call is theirs alone.
    private = {"shared_address", "partner_address", "needed_once"}
    wrapper = re.compile(r"^__device__ inline .*?(\w+)\(", re.MULTILINE)
    twin = re.compile(r"^(?:inline|__forceinline__) .*?(\w+)\(", re.MULTILINE)
    wrappers = wrapper.findall((emulator.KERNELS / "ptx" / header).read_text())
    assert wrappers
    assert set(wrappers) - private <= set(twin.findall((TWINS / header).read_text()))


def test_inline_ptx_stands_in_its_headers_only():
    having = {path for path in emulator.KERNELS.rglob("*.cu*") if re.search(r"\basm\b", path.read_text())}
    assert {path.name for path in having} == {path.name for path in TWINS.iterdir()}
