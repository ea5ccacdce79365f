"""Calls of CuPy arrays from end to end without a GPU: their memory is the host's, the emulator runs kernels.

What a GPU's driver would be asked is answered here; all that comes before it is what a GPU runs.
"""

import ctypes
import itertools
import math
import types
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator import Module, calls
from feature_cases import draw_case
from float8 import assert_float8, random_descales, with_values_transposed
from tolerance import assert_attention, assert_gradients, random_problem

import cufa
from cufa import arrays, call, compat, counters, device, driver, jit, launch
from cufa.api import check_attention
from cufa.compat import appending
from cufa.device import Device
from cufa.driver import TENSOR_MAP_BYTES, DriverError
from cufa.plan.record import BIAS
from cufa.problem import FLOAT8
from cufa.tensor_layout import Region

pytestmark = pytest.mark.emulator

cupy = pytest.importorskip("cupy")

# So few SMs that a persistent block takes several tiles.
DEVICE = replace(calls.DEVICE, sm_count=3)
# A file that is there, as that of a compiled kernel.
HERE = Path(__file__)


class Machine:
    """A GPU that is none: its memory, and the kernels that were launched on it."""

    def __init__(self):
        self.memory = []
        self.functions = []
        self.launched = []
        self.overlapping = []

    def allocate(self, size):
        """Memory as CuPy's pool has it, with NaN in it."""
        whole = np.full(size + 1024, 0xFF, np.uint8)
        return self.place(whole[-whole.ctypes.data % 512 :][:size])

    def place(self, memory):
        """A pointer of CuPy's to memory of NumPy's."""
        self.memory.append(memory)
        unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, device_id=0)
        return cupy.cuda.MemoryPointer(unowned, 0)

    def array(self, host):
        """As `cupy.asarray`, with the strides that the array has and what lies between its rows."""
        first, end = span(host)
        pointer = self.allocate(end - first)
        self.memory[-1][:] = np.frombuffer(ctypes.string_at(first, end - first), np.uint8)
        return cupy.ndarray(host.shape, host.dtype, pointer + (arrays.address(host) - first), host.strides)

    def contiguous(self, array):
        """As `cupy.ascontiguousarray`."""
        if array.flags.c_contiguous:
            return array
        copy = cupy.ndarray(array.shape, array.dtype)
        host(copy)[...] = host(array)
        return copy

    def load(self, variant):
        module = Module(variant.source, variant.macros, checked=False)
        size = int(dict(variant.macros)["PARAMS_BYTES"])

        def function(entry):
            self.functions.append((module, entry, size))
            return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=len(self.functions) - 1))

        return types.SimpleNamespace(get_function=function)

    def launch_kernel(
        self, function, grid, _y, _z, block, _by, _bz, smem_bytes, stream, pointers, _extra, cluster=1
    ):
        module, entry, size = self.functions[function]
        params = ctypes.string_at(ctypes.c_void_p.from_address(pointers).value, size)
        buffers = {str(number): memory for number, memory in enumerate(self.memory)}
        module.launch(entry, grid, block, smem_bytes, params, buffers, cluster=cluster)
        self.launched.append(entry)

    def launch_with(self, config, function, pointers):
        """What `cuLaunchKernelEx` is asked for."""
        sizes = (config.gridDimX, 1, 1, config.blockDimX, 1, 1, config.sharedMemBytes, int(config.hStream))
        ids = {attribute.id.name: attribute.value for attribute in config.attrs}
        clusters = [value.clusterDim.x for name, value in ids.items() if "CLUSTER" in name]
        self.launch_kernel(function, *sizes, ctypes.addressof(pointers), 0, *clusters)
        self.overlapping.append(self.launched[-1])


def span(array):
    return Region(arrays.address(array), array.shape, array.strides, array.itemsize).span


def host(array):
    """The memory of an array, as NumPy's."""
    first, end = span(array)
    memory = (ctypes.c_char * (end - first)).from_address(first)
    return np.ndarray(array.shape, array.dtype, memory, array.data.ptr - first, array.strides)


def encode(dtype, address, extents, strides, box):
    """What `cuTensorMapEncodeTiled` is asked for, as the emulator has it."""
    if not address or 0 in extents or 0 in box:
        raise DriverError("CUDA_ERROR_INVALID_VALUE")
    dim, *rows, heads, batch = extents
    row_stride, *_, head_stride, batch_stride = strides
    itemsize = 1 if dtype == "UINT8" else 2
    where = np.ndarray(
        (batch, math.prod(rows), heads, dim),
        f"u{itemsize}",
        (ctypes.c_char * 2**56).from_address(address),
        strides=(batch_stride, row_stride, head_stride, itemsize),
    )
    cols, *box_rows, _, _ = box
    tensor_map = bytes(calls.tensor_map(where, math.prod(box_rows), cols, paired_rows=len(rows) == 2))
    assert len(tensor_map) == TENSOR_MAP_BYTES
    return tensor_map


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    counter = np.zeros(1, np.uint32)
    machine.memory.append(counter)
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setattr(device, "current", lambda: DEVICE)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=0))
    monkeypatch.setattr(cupy.cuda, "alloc", machine.allocate)
    monkeypatch.setattr(cupy, "ascontiguousarray", machine.contiguous)
    asked = types.SimpleNamespace(launchKernel=machine.launch_kernel, CUDADriverError=RuntimeError)
    monkeypatch.setattr(cupy.cuda, "driver", asked)
    monkeypatch.setattr(driver, "launch", machine.launch_with)
    monkeypatch.setattr(driver, "encode_tensor_map", encode)
    monkeypatch.setattr(
        counters, "of_device", lambda _: types.SimpleNamespace(take=lambda stream: counter.ctypes.data)
    )
    monkeypatch.setattr(jit, "build", lambda variant: types.SimpleNamespace(**vars(variant), path=HERE))
    monkeypatch.setattr(jit, "load", machine.load)
    call.forget()
    with cupy.cuda.using_allocator(machine.allocate):
        yield machine
    call.forget()
    assert counter[0] == 0


def check(machine, problem, causal=True, rungs=(), **options):
    """Both directions of a call; the entries that are named must be among those launched."""
    q, k, v, dout = map(machine.array, (problem.q, problem.k, problem.v, problem.dout))
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True, **options)
    assert_attention(host(out), host(lse), problem, causal=causal)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=causal, **options)
    assert_gradients(tuple(map(host, gradients)), problem, causal=causal)
    assert set(rungs) <= set(machine.launched)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_each_dtype(machine, rng, dtype):
    check(machine, random_problem(rng, dtype, batch=2, seqlen_q=70, seqlen_k=90, heads=4, kv_heads=2))
    assert ("fwd_6_wgmma" in machine.launched) == (dtype in ("float16", "bfloat16"))


OPTIONS = {"causal": True, "window": None, "softmax_scale": 0.3, "softcap": 5.0, "return_lse": True}


def test_a_call_that_is_checked_is_not_run(machine, rng):
    """What it found, the call finds again."""
    problem = random_problem(rng, "float16", batch=2, seqlen_q=70, seqlen_k=90, heads=2)
    tensors = [machine.array(x) for x in (problem.q, problem.k, problem.v)]
    side = {"alibi_slopes": np.ones(2, np.float32), "seqused_k": np.array([90, 3], np.int32)}
    side = {name: machine.array(x) for name, x in side.items()}
    memory = len(machine.memory)
    check_attention(*tensors, **side, **OPTIONS)
    assert not machine.launched
    assert len(machine.memory) == memory
    planned = call._at_addresses.cache_info().misses
    assert planned
    cufa.attention(*tensors, **side, **OPTIONS)
    assert call._at_addresses.cache_info().misses == planned
    q, k, v = tensors
    askew = cupy.ndarray(k.shape, k.dtype, machine.allocate(k.nbytes + 1) + 1)
    with pytest.raises(ValueError, match=r"^k has an address or a stride"):
        check_attention(q, askew, v, **OPTIONS)


def test_a_call_that_would_move_to_a_gpu_is_checked_where_it_is(machine, monkeypatch):
    monkeypatch.setattr(arrays, "gpu_usable", lambda: True)
    eights = [np.zeros((2, 3, 2, 16), "float8_e4m3fn") for _ in "qkv"]
    memory = len(machine.memory)
    check_attention(*eights, **OPTIONS)
    assert len(machine.memory) == memory
    with pytest.raises(ValueError, match=r"^seqused_k has -1 for sequence 1; it must be at least 0"):
        check_attention(*eights, seqused_k=np.array([1, -1], np.int32), **OPTIONS)
    monkeypatch.setattr(device, "current", lambda: Device.of("sm_80"))
    with pytest.raises(ValueError, match=r"^no kernel supports forward float8_e4m3fn .* on sm_80: "):
        check_attention(*eights, **OPTIONS)


@pytest.mark.parametrize("storage", ["packed", "bhsd", "reversed"])
def test_strides(machine, rng, storage):
    sizes = {"batch": 2, "seqlen_q": 70, "seqlen_k": 90, "heads": 4, "kv_heads": 2}
    kernel = "fwd_5_mma" if storage == "reversed" else "fwd_6_wgmma"
    check(machine, random_problem(rng, "float16", **sizes, layout=storage), rungs=[kernel])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("seqlen_k", [120, 90])
def test_transposed_values(machine, rng, monkeypatch, layout, seqlen_k):
    """They are read where they lie, unless there are keys that make no four."""
    sizes = {"batch": 2, "seqlen_q": 70, "seqlen_k": seqlen_k, "heads": 4, "kv_heads": 2}
    problem = with_values_transposed(random_problem(rng, FLOAT8, **sizes))
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    q, k, v = (machine.array(x).transpose(order) for x in (problem.q, problem.k, problem.v))
    copied = []
    contiguous = arrays.contiguous
    monkeypatch.setattr(arrays, "contiguous", lambda x: copied.append(x) or contiguous(x))
    descales = random_descales(rng, 2, 2)
    given = {name: machine.array(value) for name, value in descales.items()}
    out, lse = cufa.attention(q, k, v, layout=layout, causal=True, return_lse=True, **given)
    assert_float8(host(out).transpose(order), host(lse), problem, descales, causal=True)
    assert len(copied) == (seqlen_k % 4 != 0)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_one_place_for_all(machine, rng, axes):
    problem = random_problem(rng, "float16", batch=2, seqlen_q=70, seqlen_k=90, heads=2)
    first = tuple(slice(1) if axis in axes else slice(None) for axis in range(4))
    k, v = (np.broadcast_to(x[first], x.shape) for x in (problem.k, problem.v))
    check(machine, replace(problem, k=k, v=v), rungs=["fwd_6_wgmma"])


@pytest.mark.parametrize("dims", [(64, 64), (7, 5)])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (70, 1)])
def test_axes_with_one_place(machine, rng, lengths, dims):
    """Their strides may be anything."""
    problem = random_problem(
        rng, "float16", seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=dims[0], head_dim_v=dims[1]
    )

    def odd(x):
        strides = [1 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]
        return np.ndarray(x.shape, x.dtype, x, strides=strides)

    check(machine, replace(problem, **{name: odd(getattr(problem, name)) for name in ("q", "k", "v")}))


def test_arrays_that_must_be_copied(machine, rng):
    problem = random_problem(rng, "float16", batch=2, seqlen_q=30, seqlen_k=40, heads=2, head_dim=24)
    q, k, v, dout = (machine.array(np.asfortranarray(x)) for x in vars(problem).values())
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    lse = machine.array(np.asfortranarray(host(lse)))
    assert_attention(host(out), host(lse), problem, causal=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert_gradients(tuple(map(host, gradients)), problem, causal=True)


def test_features_and_their_gradients(machine, rng):
    names = ("window", "softcap", "bias", "mask", "alibi_slopes", "sink", "dropout", "dlse", "dbias", "dsink")
    case = draw_case(rng, "float16", names, seqlen_q=39, seqlen_k=53, heads=2, kv_heads=1, head_dim=24)
    problem = case.problem
    forward = case.numbers | {name: machine.array(array) for name, array in case.arrays.items()}
    q, k, v, dout = map(machine.array, (problem.q, problem.k, problem.v, problem.dout))
    out, lse = cufa.attention(q, k, v, **forward, return_lse=True)
    assert_attention(host(out), host(lse), problem, **case.forward)
    asked = {f"return_d{name}": True for name in case.gradients}
    gradients = cufa.attention_backward(
        dout, q, k, v, out, lse, **forward, dlse=machine.array(case.dlse), **asked
    )
    assert_gradients(tuple(map(host, gradients)), problem, **case.backward)


@pytest.mark.parametrize("shape", [(2, 2, 70, 96), (1, 2, 70, 96), (2, 1, 1, 96)], ids=str)
def test_a_bias_that_the_copy_engine_brings(machine, rng, shape):
    problem = random_problem(rng, "float16", batch=2, seqlen_q=70, seqlen_k=96, heads=2)
    whole = np.full((*shape[:2], 2 * shape[2], 104), np.nan, np.float16)
    bias = whole[:, :, ::2, :96]
    bias[...] = rng.standard_normal(shape)
    q, k, v, dout = map(machine.array, vars(problem).values())
    given = {"bias": machine.array(bias)}
    for backward in (False, True):
        assert BIAS in [box.tensor for box in cufa.plan(q, k, v, **given, backward=backward).boxes]
    out, lse = cufa.attention(q, k, v, **given, return_lse=True)
    assert_attention(host(out), host(lse), problem, bias=bias)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, **given)
    assert_gradients(tuple(map(host, gradients)), problem, bias=bias)


def test_a_gradient_that_another_plan_launches(machine, rng):
    """Between the launches of the first, with parameters and memory of its own."""
    problem = random_problem(rng, "float32", batch=2, seqlen_q=70, seqlen_k=96, heads=2)
    bias = rng.standard_normal((1, 2, 70, 96)).astype(np.float32)
    q, k, v, dout, of_scores = map(machine.array, (*vars(problem).values(), bias))
    out, lse = cufa.attention(q, k, v, bias=of_scores, return_lse=True)
    machine.launched.clear()
    options = {"bias": of_scores, "return_dbias": True, "kernel": "bwd_6_float32"}
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, **options)
    assert_gradients(tuple(map(host, gradients)), problem, bias=bias, return_dbias=True)
    assert machine.launched[:4] == ["to_halves", "row_sums", "bias_gradient", "key_tiles"]


def test_steps_in_the_callers_workspace(machine, rng, monkeypatch):
    problem = random_problem(rng, "float32", batch=2, seqlen_q=20, seqlen_k=150, heads=2, head_dim=16)
    q, k, v, _ = map(machine.array, vars(problem).values())
    options = {"kernel": "fwd_3_flash_v1", "tiles": {"block_n": 64}}
    workspace = machine.array(np.zeros(cufa.plan(q, k, v, **options).workspace_bytes, np.uint8))
    monkeypatch.setattr(cupy.cuda, "alloc", lambda _: pytest.fail("memory of its own"))
    out, lse = cufa.attention(q, k, v, **options, return_lse=True, workspace=workspace)
    assert_attention(host(out), host(lse), problem)
    assert machine.launched == ["fwd_3_flash_v1"] * 3
    assert host(workspace).any()


def test_heads_that_are_a_tile_s_rows(machine, rng):
    """Many heads of few queries beside latents, whose beginnings are the values."""
    problem = random_problem(
        rng, "float16", batch=2, seqlen_q=3, seqlen_k=70, heads=64, kv_heads=1, head_dim=576
    )
    q, k = map(machine.array, (problem.q, problem.k))
    assert cufa.plan(q, k, k[..., :512]).problem.queries_as_heads
    out, lse = cufa.attention(q, k, k[..., :512], return_lse=True)
    assert_attention(
        host(out), host(lse), replace(problem, v=problem.k[..., :512], dout=problem.dout[..., :512])
    )


def test_softmax_of_rows_with_a_gap(machine, rng):
    x = rng.standard_normal((5, 60)).astype(np.float32)[:, :40]
    y = cufa.softmax(machine.array(x))
    np.testing.assert_allclose(host(y), np.exp(x) / np.exp(x).sum(-1, keepdims=True), rtol=1e-5)


def test_pages_that_the_copy_engine_brings(machine, rng):
    problem = random_problem(rng, "float16", batch=2, seqlen_q=70, seqlen_k=128, heads=2)
    table = np.array([[5, 0, 1], [2, 7, 1]], np.int32)[:, :2]  # the beginning of one with more room
    pages = {name: np.full((9, 64, 2, 64), np.nan, np.float16) for name in "kv"}
    for name, whole in pages.items():
        whole[table] = getattr(problem, name).reshape(2, 2, 64, 2, 64)
    k, v = map(machine.array, pages.values())
    out, lse = cufa.attention(
        machine.array(problem.q), k, v, block_table=machine.array(table), return_lse=True
    )
    assert_attention(host(out), host(lse), problem)
    assert machine.launched == ["fwd_6_wgmma"]


@pytest.mark.parametrize("pages", [False, True])
def test_no_keys_are_brought(machine, rng, pages):
    """The driver encodes no map of nothing, be it at an address or at none."""
    q = machine.array(rng.standard_normal((2, 70, 2, 64)).astype(np.float16))
    side = {}
    if pages:
        side = {"block_table": np.zeros((2, 1), np.int32), "seqused_k": np.zeros(2, np.int32)}
    nowhere = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device_id=0), 0)
    none_of = machine.array(np.zeros((2, 1, 2, 64), np.float16))[:, :0]
    k = cupy.ndarray((0, 64, 2, 64), np.float16, nowhere) if pages else none_of
    out = cufa.attention(q, k, k, **{name: machine.array(x) for name, x in side.items()})
    assert not host(out).any()
    assert machine.launched == ["fwd_6_wgmma"]


def test_probabilities_and_parts(machine, rng):
    problem = random_problem(rng, "float32", batch=2, seqlen_q=20, seqlen_k=30, heads=2, head_dim=16)
    q, k, v, _ = map(machine.array, vars(problem).values())
    for layout, order in (("bshd", (0, 1, 2, 3)), ("bhsd", (0, 2, 1, 3))):
        inputs = [x.transpose(order) for x in (q, k, v)]
        out, _, probs = cufa.attention(*inputs, layout=layout, return_attn_probs=True)
        values = problem.v.transpose(0, 2, 1, 3)
        np.testing.assert_allclose(
            host(probs) @ values, host(out).transpose(order).transpose(0, 2, 1, 3), atol=1e-5
        )
    before = len(machine.launched)
    _, _, probs = cufa.attention(q, k, v, precision="tf32", return_attn_probs=True)
    np.testing.assert_allclose(host(probs).sum(-1), 1, rtol=1e-6)  # not beside an LSE of rounded products
    assert machine.launched[before:] == machine.launched[:2]
    halves = [
        cufa.attention(q, x, y, return_lse=True) for x, y in ((k[:, :11], v[:, :11]), (k[:, 11:], v[:, 11:]))
    ]
    merged, merged_lse = cufa.merge(*itertools.chain(*halves))
    assert_attention(host(merged), host(merged_lse), problem)


def test_a_call_that_comes_again_and_one_at_other_addresses(machine, rng):
    """Maps are remembered for the tensors that they are of."""
    problems = [random_problem(rng, "float16", seqlen_q=70, seqlen_k=90, heads=2) for _ in range(2)]
    placed = [[machine.array(x) for x in vars(problem).values()] for problem in problems]
    for number in (0, 1, 0, 0, 1):
        q, k, v, _ = placed[number]
        out, lse = cufa.attention(q, k, v, return_lse=True)
        assert_attention(host(out), host(lse), problems[number])
    assert len({id(module) for module, _, _ in machine.functions}) == 1


def test_sources_are_read_once_for_lengths_that_are_compiled_alike(machine, rng, monkeypatch):
    built = []
    monkeypatch.setattr(jit, "build", lambda variant: built.append(variant) or variant)
    for seqlen_k in (90, 91, 92):
        problem = random_problem(rng, "float16", seqlen_q=70, seqlen_k=seqlen_k, heads=2)
        q, k, v, _ = map(machine.array, vars(problem).values())
        out, lse = cufa.attention(q, k, v, return_lse=True)
        assert_attention(host(out), host(lse), problem)
    assert len(built) == 1


def test_kernels_are_read_again_when_they_are_forgotten(machine, rng, monkeypatch):
    built = []
    monkeypatch.setattr(jit, "build", lambda variant: built.append(variant) or variant)
    q, k, v, _ = map(machine.array, vars(random_problem(rng, "float32", seqlen_q=7, seqlen_k=9)).values())
    calls = lambda: cufa.attention(q, k, v), lambda: cufa.softmax(q)
    for call_one in calls * 2:
        call_one()
    assert len(built) == 2
    call.forget()
    for call_one in calls:
        call_one()
    assert built[2:] == built[:2]


def test_arrays_that_lie_askew_are_named(machine):
    def askew(*shape, dtype=np.float16):
        byte = machine.array(np.zeros(1, np.uint8))
        return cupy.ndarray(shape, dtype, byte.data + 1)

    x, lse, table = askew(1, 2, 1, 8), askew(1, 1, 2, dtype=np.float32), askew(2, 4)
    lies, wide, angles = (
        machine.array(np.zeros(shape, dtype))
        for shape, dtype in (((1, 2, 1, 8), np.float16), ((1, 1, 2), np.float32), ((2, 4), np.float16))
    )
    message = "^{} has an address or a stride that is a multiple of 1 bytes only; {}-byte elements need"
    for name, itemsize, function, given in (
        ("q", 2, cufa.attention, (x, lies, lies)),
        ("v", 2, cufa.attention, (lies, lies, x)),
        ("x", 2, cufa.softmax, (x,)),
        ("out_b", 2, cufa.merge, (lies, wide, x, wide)),
        ("lse_a", 4, cufa.merge, (lies, lse, lies, wide)),
        ("sin", 2, cufa.rotary, (lies, angles, table)),
        ("x", 2, cufa.quantize, (x,)),
    ):
        with pytest.raises(ValueError, match=message.format(name, itemsize)):
            function(*given)


ANGLES = np.random.default_rng(3).uniform(-np.pi, np.pi, (15, 4)).astype(np.float32)
ROTARY = {"rotary_cos": np.cos(ANGLES), "rotary_sin": np.sin(ANGLES)}


@pytest.mark.parametrize("rotary", [{}, ROTARY], ids=["", "rotary"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "places"),
    [
        *(("float16", "float16", places) for places in ("rows", "pages")),
        *(("float32", "float32", places) for places in ("rows", "entries")),
        ("bfloat16", FLOAT8, "pages"),
        *(("float16", FLOAT8, places) for places in ("rows", "pages", "entries")),
    ],
)
@pytest.mark.parametrize("held", [5, [0, 12]], ids=["alike", "each"])
def test_new_keys_are_appended_to_a_cache_by_one_launch(
    machine, rng, monkeypatch, held, dtype, cache_dtype, places, rotary
):
    """With all that a call with them can have, the result is that of the CPU, step by step."""
    q = rng.standard_normal((2, 3, 4, 16)).astype(dtype)
    new = [rng.standard_normal((2, 3, 2, dim)).astype(dtype) for dim in (16, 24)]
    shape = {"rows": (2, 15), "pages": (7, 5), "entries": (3, 15)}[places]
    caches = [rng.standard_normal((*shape, 2, dim)).astype(cache_dtype) for dim in (16, 24)]
    side = dict(rotary)
    if places == "pages":
        side["block_table"] = np.array([[4, 0, 2], [1, 5, 3]], np.int32)
    elif places == "entries":
        side["cache_batch_idx"] = np.array([2, 0], np.int32)
    if cache_dtype == FLOAT8:
        side |= {f"{x}_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32) for x in "kv"}
    if not isinstance(held, int):
        held = side["cache_seqlens"] = np.array(held, np.int32)
    options = {"causal": True, **({"cache_seqlens": held} if isinstance(held, int) else {})}
    on_gpu = [machine.array(x) for x in (q, *caches, *new)]
    side_on_gpu = {name: machine.array(x) for name, x in side.items()}
    out = compat.flash_attn_with_kvcache(*on_gpu, **side_on_gpu, **options)
    assert machine.launched[0] == "append"
    assert machine.launched.count("append") == 1
    assert not {"rotary", "convert"} & set(machine.launched)
    monkeypatch.setattr(arrays, "gpu_usable", lambda: False)
    exact = compat.flash_attn_with_kvcache(q, *caches, *new, **side, **options)
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    for actual, cache in zip(on_gpu[1:3], caches, strict=True):
        actual, cache = (x.astype(np.float32) for x in (host(actual), cache))
        # A key whose last place is rounded the other way may be the next one in 8 bits.
        apart = np.abs(actual - cache) > 4 * epsilon * np.abs(cache) + epsilon
        assert apart.mean() < (0.01 if cache_dtype == FLOAT8 and rotary else 1e-9)
    np.testing.assert_allclose(host(out).astype(np.float32), exact.astype(np.float32), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("of_values", ["float16", "bfloat16"])
def test_one_launch_appends_keys_and_values_of_one_dtype_alone(machine, rng, of_values):
    caches = [rng.standard_normal((2, 15, 2, 16)).astype(FLOAT8) for _ in "kv"]
    new = [rng.standard_normal((2, 1, 2, 16)).astype(dtype) for dtype in ("float16", of_values)]
    q = rng.standard_normal((2, 1, 4, 16)).astype(np.float16)
    named = dict(zip(("q", "k_cache", "v_cache", "k", "v"), (q, *caches, *new), strict=True))
    adopted = arrays.adopt_in_place({name: machine.array(x) for name, x in named.items()})
    assert (appending._form_of(adopted.described, True) is None) == (of_values != "float16")


def test_parts_of_keys_are_merged_by_a_launch_that_overlaps(machine, rng, monkeypatch):
    problem = random_problem(rng, "float16", seqlen_q=1, seqlen_k=500, heads=8, kv_heads=2)
    q, k, v, _ = map(machine.array, vars(problem).values())
    options = {"kernel": "fwd_8_split_kv", "tiles": {"key_parts": 3}, "return_lse": True}
    out, lse = cufa.attention(q, k, v, **options)
    assert_attention(host(out), host(lse), problem, causal=False)
    assert machine.launched == ["fwd_8_split_kv", "merge_parts"]
    assert machine.overlapping == ["merge_parts"]

    def refuse(*_):
        raise DriverError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(driver, "launch", refuse)
    with pytest.raises(launch.LaunchError, match=r"merge_parts .* 256 threads .*CUDA_ERROR_INVALID_VALUE"):
        cufa.attention(q, k, v, **options)


@pytest.mark.parametrize("entry", ["fwd_8_split_kv", "merge_parts"])
def test_the_first_launch_of_a_thread(machine, rng, monkeypatch, entry):
    """It may have no context yet. One is asked for once; then the launch is refused or not."""
    problem = random_problem(rng, "float16", seqlen_q=1, seqlen_k=500, heads=8, kv_heads=2)
    q, k, v, _ = map(machine.array, vars(problem).values())
    options = {"kernel": "fwd_8_split_kv", "tiles": {"key_parts": 3}}
    asked, has_context = [], False

    def get_context():
        nonlocal has_context
        asked.append(len(machine.launched))
        has_context = gets_one

    def checked(launch, error):
        def launch_if_there_is_one(*arguments):
            if not has_context:
                raise error("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
            return launch(*arguments)

        return launch_if_there_is_one

    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", get_context)
    if entry == "merge_parts":
        monkeypatch.setattr(driver, "launch", checked(machine.launch_with, DriverError))
    else:
        monkeypatch.setattr(cupy.cuda.driver, "launchKernel", checked(machine.launch_kernel, RuntimeError))
    gets_one = False
    with pytest.raises(launch.LaunchError, match=f"{entry} could not .*INVALID_CONTEXT"):
        cufa.attention(q, k, v, **options)
    machine.launched.clear()
    asked.clear()
    gets_one = True
    assert_attention(host(cufa.attention(q, k, v, **options)), None, problem, causal=False)
    assert machine.launched == ["fwd_8_split_kv", "merge_parts"]
    assert asked == [machine.launched.index(entry)]


def test_a_kernel_from_the_cache_that_does_not_load_without_nvrtc(machine, rng, monkeypatch):
    def refuse(_):
        raise cupy.cuda.driver.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY")

    def missing():
        raise jit.NVRTCMissingError("no NVRTC")

    monkeypatch.setattr(jit, "load", refuse)
    monkeypatch.setattr(jit, "nvrtc_version", missing)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    q, k, v, _ = map(machine.array, vars(random_problem(rng, "float16", seqlen_q=2, seqlen_k=3)).values())
    with pytest.raises(launch.LaunchError, match=r"CUDA 13\.0, refuses sm_90a: CUDA_ERROR_OUT_OF_MEMORY$"):
        cufa.attention(q, k, v)


@pytest.mark.parametrize(("owner", "step"), [(jit, "load"), (launch, "_function")])
def test_a_kernel_is_loaded_where_the_pool_frees_memory(machine, rng, monkeypatch, owner, step):
    """The driver has no part in CuPy's pool, which may hold the rest of the memory, unused."""
    freed, load = [], getattr(owner, step)

    def load_if_there_is_room(*arguments):
        if not freed:
            raise cupy.cuda.driver.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return load(*arguments)

    pool = types.SimpleNamespace(free_all_blocks=lambda: freed.append(True))
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    monkeypatch.setattr(owner, step, load_if_there_is_room)
    problem = random_problem(rng, "float16", seqlen_q=2, seqlen_k=3)
    q, k, v, _ = map(machine.array, vars(problem).values())
    assert_attention(host(cufa.attention(q, k, v)), None, problem, causal=False)
    assert len(freed) == 1


@pytest.mark.parametrize(
    ("owner", "step", "error"),
    [
        (jit, "load", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: operation not permitted"),
        (counters, "of_device", "cudaErrorStreamCaptureUnsupported: operation not permitted"),
    ],
)
def test_a_first_call_that_may_not_be_captured_says_so(machine, rng, monkeypatch, owner, step, error):
    def refuse(_):
        raise cupy.cuda.driver.CUDADriverError(error)

    q, k, v, _ = map(machine.array, vars(random_problem(rng, "float16", seqlen_q=70, seqlen_k=90)).values())
    calls = [lambda: cufa.attention(q, k, v), lambda: cufa.softmax(q)]  # the second has no counters
    with monkeypatch.context() as capturing:
        capturing.setattr(owner, step, refuse)
        capturing.setattr(driver, "cuda_version", lambda: (13, 0))
        for call_one in calls if owner is jit else calls[:1]:
            with pytest.raises(launch.LaunchError, match=r"^kernels are loaded by the first .* once before"):
                call_one()
    for call_one in calls:
        call_one()


def test_a_kernel_whose_file_is_gone_is_built_again_once(machine, rng, monkeypatch, tmp_path):
    """Another process may clear the cache between the two steps."""
    built, build = [], jit.build

    def build_elsewhere(variant):
        built.append(build(variant))
        built[-1].path = tmp_path / str(len(built))
        if len(built) == stays_from:
            built[-1].path.touch()
        return built[-1]

    def load(build):
        if not build.path.exists():
            raise cupy.cuda.driver.CUDADriverError("CUDA_ERROR_FILE_NOT_FOUND")
        return machine.load(build)

    monkeypatch.setattr(jit, "build", build_elsewhere)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    problem = random_problem(rng, "float16", seqlen_q=2, seqlen_k=3)
    q, k, v, _ = map(machine.array, vars(problem).values())
    stays_from = 3
    with pytest.raises(launch.LaunchError, match="FILE_NOT_FOUND"):
        cufa.attention(q, k, v)
    assert len(built) == 2
    built.clear()
    stays_from = 2
    assert_attention(host(cufa.attention(q, k, v)), None, problem, causal=False)
    assert len(built) == 2


@pytest.mark.parametrize(("nvrtc", "newer"), [((13, 0), False), ((13, 5), True)])
def test_ptx_that_the_driver_does_not_load(machine, rng, monkeypatch, nvrtc, newer):
    def refuse(_):
        raise cupy.cuda.driver.CUDADriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(jit, "load", refuse)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: nvrtc)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    problem = random_problem(rng, "float16", seqlen_q=20, seqlen_k=30, head_dim=16)
    q, k, v, _ = map(machine.array, vars(problem).values())
    with pytest.raises(launch.LaunchError, match="UNSUPPORTED_PTX") as caught:
        cufa.attention(q, k, v, arch="compute_80")
    message = str(caught.value)
    assert "CUDA 13.0, refuses compute_80 by NVRTC 13." in message
    assert ("install nvidia-cuda-nvrtc==13.0.*" in message) == newer


def test_a_refusal_comes_before_any_allocation(machine, rng):
    problem = random_problem(rng, "float32", seqlen_q=20, seqlen_k=30, head_dim=16)
    q, k, v, _ = map(machine.array, vars(problem).values())
    before = len(machine.memory)
    with pytest.raises(ValueError, match="fwd_6_wgmma supports float16"):
        cufa.attention(q, k, v, return_attn_probs=True, kernel="fwd_6_wgmma")
    assert len(machine.memory) == before


def test_a_workspace_that_cannot_be_used_is_refused_before_anything_is_compiled(machine, rng, monkeypatch):
    built = []
    monkeypatch.setattr(jit, "build", built.append)
    problem = random_problem(rng, "float16", batch=2, seqlen_q=70, seqlen_k=90, heads=2)
    v = np.asfortranarray(problem.v)  # it would be copied
    arrays = problem.q, problem.k, v, problem.dout, np.zeros_like(problem.q), np.zeros((2, 2, 70), np.float32)
    q, k, v, dout, out, lse = map(machine.array, arrays)
    in_parts = {"kernel": "fwd_8_split_kv", "tiles": {"key_parts": 2}}
    needed = cufa.plan(q, k, v, **in_parts).workspace_bytes
    backward_needed = cufa.plan(q, k, v, backward=True).workspace_bytes
    memory = machine.allocate(2 * needed + backward_needed)

    def room(pointer, count, step=1):
        return cupy.ndarray((count,), np.uint8, pointer, (step,))

    def with_room(array):  # around it, so that a workspace there overlaps nothing else
        return cupy.ndarray(array.shape, array.dtype, machine.allocate(array.nbytes + needed) + 512)

    k, out = with_room(k), with_room(out)
    before = len(machine.memory)
    too_small = "^workspace has {:,} bytes; this call needs {:,} "
    askew = r"^workspace must be contiguous and aligned to \d+ bytes$"
    overlaps = "^workspace overlaps {} in memory; it must not$"
    for message, workspace in (
        (too_small.format(needed - 1, needed), room(memory, needed - 1)),
        (askew, room(memory + 1, needed)),
        (askew, room(memory, needed, step=2)),
        (overlaps.format("k"), room(k.data, needed)),
        (overlaps.format("out"), room(out.data - 512, needed)),
    ):
        with pytest.raises(ValueError, match=message):
            cufa.attention(q, k, v, out=out, **in_parts, workspace=workspace)
    dq = cupy.ndarray(q.shape, q.dtype, memory + 512)
    for message, workspace in (
        (too_small.format(0, backward_needed), room(memory, 0)),
        (overlaps.format("dq"), room(memory, backward_needed)),
    ):
        with pytest.raises(ValueError, match=message):
            cufa.attention_backward(dout, q, k, v, out, lse, dq=dq, workspace=workspace)
    assert not built
    assert len(machine.memory) == before


def test_elements_too_far_apart_are_refused_before_anything_is_compiled(machine, rng, monkeypatch):
    built = []
    monkeypatch.setattr(jit, "build", built.append)
    q = machine.array(rng.standard_normal((2, 3, 1, 16)).astype(np.float16))
    far = cupy.ndarray((2, 1), np.int32, machine.allocate(4), (2**40, 4))
    before = len(machine.memory)
    with pytest.raises(ValueError, match=r"^block_table has rows 274,877,906,944 numbers apart"):
        cufa.attention(q, q, q, block_table=far)
    mod = cufa.MaskMod(lambda b, h, i, j, x: x[b, 0] > j, far)
    with pytest.raises(ValueError, match=r"^mask_mod\[0\] reaches over 274,877,906,945 elements"):
        cufa.attention(q, q, q, mask_mod=mod)
    assert not built
    assert len(machine.memory) == before
