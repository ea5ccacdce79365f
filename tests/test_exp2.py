"""The kernels' own 2^x of float64, on the emulator and on a GPU."""

import struct

import emulator
import numpy as np
import pytest

from cufa import jit
from cufa.device import target
from cufa.plan.macros import common_macros
from cufa.problem import Problem

SOURCE = "probe_exp2.cu"
ROOT_BITS = {"fwd_5_mma": 10, "bwd_3_mma": 7}
# Its last bits are not zero, as those of NumPy's are.
NAN_WITH_PAYLOAD = np.uint64(0x7FF8_0000_0000_07A2).view(np.float64)


@pytest.fixture
def folder(tmp_path):
    return emulator.with_probe(SOURCE, tmp_path)


@pytest.fixture(params=ROOT_BITS.values(), ids=ROOT_BITS)
def root_bits(request):
    return request.param


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("emulator", "gpu")])
def powers(request, folder, root_bits):
    """2^x of an array, by a table and without one."""
    problem = Problem("forward", "float64", 1, 1, 1, 1, 1, 16, 16, False)
    table_bytes = 8 << root_bits
    macros = (*common_macros(problem), ("SMEM_BYTES", table_bytes), ("ROOT_BITS", root_bits))
    compute = on_gpu if request.param == "gpu" else on_emulator
    return lambda x: compute(folder, macros, table_bytes, x)


def on_emulator(folder, macros, table_bytes, x):
    results = np.full((2, x.size), 7.0)
    params = struct.pack("=qqqi4x", *(array.ctypes.data for array in (x, *results)), x.size)
    module = emulator.Module(SOURCE, dict(macros), folder=folder)
    module.launch("powers", 2, 64, table_bytes, params, {"x": x, "results": results})
    return results


def on_gpu(folder, macros, table_bytes, x):
    cupy = pytest.importorskip("cupy")
    x, results = cupy.asarray(x), cupy.full((2, x.size), 7.0)
    params = struct.pack("=qqqi4x", *(array.data.ptr for array in (x, *results)), x.size)
    kernel = jit.load(jit.build(jit.Variant(SOURCE, macros, target(None).arch, folder))).get_function(
        "powers"
    )
    by_value = np.frombuffer(params, np.dtype((np.void, len(params))))
    kernel((2,), (64,), (by_value,), shared_mem=table_bytes)
    return results.get()


def test_within_three_units_of_the_last_place(powers, rng):
    x = np.concatenate(
        [rng.uniform(-1020.9, 1020.9, 5000), rng.uniform(-2, 2, 5000), np.arange(-1020.0, 1021)]
    )
    exact = np.exp2(x.astype(np.longdouble))
    by_table, without = np.abs(powers(x) - exact) / np.spacing(exact.astype(np.float64))
    assert by_table.max() < 3
    assert without.max() < 2


def test_what_vanishes_and_what_is_no_number(powers):
    x = np.array([-1021.5, -1e5, -1e300, -np.inf, np.nan, -np.nan, NAN_WITH_PAYLOAD, -NAN_WITH_PAYLOAD, 0])
    results = powers(x)
    assert np.all(results[:, :4] == 0)
    assert np.isnan(results[:, 4:8]).all()
    assert np.all(results[:, 8] == 1)
