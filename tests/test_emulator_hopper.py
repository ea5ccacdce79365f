"""Hopper's kernels on the emulator: each twin alone, mistakes that must be seen, and whole calls.

The tests of twins also run on a GPU of sm_90 with `pytest -m gpu`: there, it is they that are tested.
"""

import struct
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import emulator
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError, Module, calls, with_probe
from test_emulator import draw, planted, run
from test_gpu_hopper import WATCHED_MISTAKES

from cufa import jit
from cufa.arguments import Options, make_problem
from cufa.device import target
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.plan.hopper import SECTION_OF_L2
from cufa.problem import Problem

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(4)]

HERE = Path(emulator.__file__).parent

# The swizzle: rows of 128 bytes in chunks of 16, eight rows together.
ROW_BYTES, CHUNK_BYTES, SWIZZLE_ROWS = 128, 16, 8
PANEL = ROW_BYTES // 2
DEPTH, STEP, WARPGROUP = 64, 16, 128

FORWARD = "fwd_6_wgmma"
# So few SMs that a persistent block takes several tiles.
SMALL_DEVICE = replace(calls.DEVICE, sm_count=3)


# ---- the twins ----

PROBE = {
    "BOX_ROWS": 24,
    "BOX_COLUMNS": PANEL,
    "PAIRED_ROWS": False,
    "PRODUCT_COLUMNS": 16,
    "TRANSPOSED_A": False,
    "TRANSPOSED_B": False,
    "BFLOAT16": False,
    "E4M3": False,
    "A_BYTES": 1024,
    "B_BYTES": 1024,
    "SMEM_BYTES": 65536,
}


@pytest.fixture
def folder(tmp_path):
    return with_probe("probe_hopper.cu", tmp_path)


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def launch(request, folder):
    """Runs launch(entry, threads, fields, arrays, **macros); more blocks than one and another source are
    keywords, too.

    The parameter struct is a list: the name of an array is its address, (name, rows, columns, whether rows
    are paired) the tensor map of a box of it, an int 4 bytes of a number, bytes themselves.
    """
    run = launch_on_gpu if request.param == "gpu" else launch_on_emulator

    def launch(*arguments, source="probe_hopper.cu", blocks=1, **macros):
        run(with_probe(source, folder) / source, blocks, *arguments, {**PROBE, **macros})

    return launch


def pack(fields, address_of, tensor_map):
    params = b""
    for field in fields:
        match field:
            case str(name):
                params += struct.pack("q", address_of(name))
            case (name, *box):
                params += tensor_map(name, *box)
            case int(number):
                params += struct.pack("i", number)
            case _:
                params += field
    return params


def launch_on_emulator(probe, blocks, entry, threads, fields, arrays, macros):
    params = pack(
        fields,
        lambda name: arrays[name].ctypes.data,
        lambda name, *box: calls.tensor_map(arrays[name], *box),
    )
    module = Module(probe.name, macros, folder=probe.parent)
    cluster = 2 if probe.name == PAIR_PROBE else 1  # a GPU finds it in the code
    smem_bytes = macros["SMEM_BYTES"]
    module.launch(entry, blocks, threads, smem_bytes, aligned(params, fields), arrays, cluster=cluster)


def launch_on_gpu(probe, blocks, entry, threads, fields, arrays, macros):
    cupy = pytest.importorskip("cupy")
    arch = target(None).arch
    if arch.capability != (9, 0):
        pytest.skip("no GPU of sm_90")
    kernel = jit.load(jit.build(jit.Variant(probe.name, tuple(macros.items()), arch, probe.parent)))
    kernel = kernel.get_function(entry)
    kernel.max_dynamic_shared_size_bytes = macros["SMEM_BYTES"]
    on_gpu = {name: cupy.asarray(array.view(np.uint8)) for name, array in arrays.items()}
    params = pack(
        fields,
        lambda name: on_gpu[name].data.ptr,
        lambda name, *box: encode(arrays[name], on_gpu[name].data.ptr, *box),
    )
    params = aligned(params, fields)
    by_value = np.frombuffer(params, np.dtype((np.void, len(params))))
    kernel((blocks,), (threads,), (by_value,), shared_mem=macros["SMEM_BYTES"])
    for name, array in arrays.items():
        array.view(np.uint8)[...] = on_gpu[name].get()


def aligned(params, fields):
    """With the padding of a struct that holds tensor maps, or addresses alone."""
    alignment = 64 if any(isinstance(field, tuple) for field in fields) else 8
    return params.ljust(-(-len(params) // alignment) * alignment, b"\0")


def encode(tensor, address, rows, columns, paired_rows=False):
    """The GPU's own tensor map of what calls.tensor_map describes."""
    from cuda.bindings import driver

    batch, seqlen, heads, dim = tensor.shape
    strides = [tensor.strides[axis] for axis in (1, 2, 0)]
    extents, box = [dim, seqlen, heads, batch], [columns, rows, 1, 1]
    if paired_rows:
        extents[1:2], box[1:2] = [4, seqlen // 4], [2, rows // 2]
        strides.insert(1, 4 * strides[0])
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(extents),
        address,
        [driver.cuuint64_t(extent) for extent in extents],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(extent) for extent in box],
        [driver.cuuint32_t(1)] * len(extents),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert status == driver.CUresult.CUDA_SUCCESS
    return b"".join(int(word).to_bytes(8, "little") for word in tensor_map.opaque)


def swizzled(rows, row_bytes=ROW_BYTES):
    """Rows as they lie in shared memory: chunk c of row r at c ^ r % 8, of 32 bytes at c ^ r / 4 % 2."""
    count = row_bytes // CHUNK_BYTES
    chunks = rows.reshape(len(rows), count, -1)
    place = np.arange(count) ^ np.arange(len(rows))[:, None] // (ROW_BYTES // row_bytes) % count
    lying = np.empty_like(chunks)
    np.put_along_axis(lying, place[:, :, None], chunks, axis=1)
    return lying.reshape(rows.shape)


def part(tensor, first_row, head, batch, first_column, rows):
    """64 columns of rows of one head, zero outside of the tensor."""
    box = np.zeros((rows, PANEL), tensor.dtype)
    inside = [row for row in range(rows) if 0 <= first_row + row < tensor.shape[1]]
    values = tensor[batch, [first_row + row for row in inside], head, first_column : first_column + PANEL]
    box[inside, : values.shape[1]] = values
    return box


def box_arrays(rng, source):
    """Those of the entry `boxes`."""
    return {
        "from": source,
        "to": np.zeros((2, 40, 2, 80), np.uint16),
        "tile": np.zeros((PROBE["BOX_ROWS"], PANEL), np.uint16),
        "line": np.zeros(32, np.uint16),
        "line_from": rng.integers(0, 2**16, 32, dtype=np.uint16),
    }


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((0, 0, 0, 0), (0, 8, 1, 1)),
        ((64, 16, 1, 1), (64, 30, 0, 0)),  # both reach beyond the last row and column
        ((0, -5, 2, 1), (0, 3, 1, 0)),
        ((64, 40, 0, 0), (0, 39, 1, 1)),  # nothing and one row
    ],
)
def test_boxes_and_lines(launch, rng, x, y):
    rows = PROBE["BOX_ROWS"]
    source = rng.integers(1, 2**16, (2, 33, 3, 72), dtype=np.uint16)
    arrays = box_arrays(rng, source)
    fields = [("from", rows, PANEL), ("to", rows, PANEL), "tile", "line", "line_from", *x, *y]
    launch("boxes", 128, fields, arrays)
    box = part(source, x[1], x[2], x[3], x[0], rows)
    np.testing.assert_array_equal(arrays["tile"], swizzled(box))
    np.testing.assert_array_equal(arrays["line"], arrays["line_from"])
    expected = np.zeros_like(arrays["to"])
    for row, values in enumerate(box):
        if y[1] + row < 40:
            target_row = expected[y[3], y[1] + row, y[2], y[0] : y[0] + PANEL]
            target_row[:] = values[: len(target_row)]
    np.testing.assert_array_equal(arrays["to"], expected)


@pytest.mark.parametrize("first_row", [0, 18, 22])
def test_boxes_of_paired_rows(launch, rng, first_row):
    """Two neighbours of every four rows, also beyond the last."""
    rows = PROBE["BOX_ROWS"]
    source = rng.integers(1, 2**16, (2, 52, 3, 72), dtype=np.uint16)
    arrays = box_arrays(rng, source)
    fields = [("from", rows, PANEL, True), ("to", rows, PANEL), "tile", "line", "line_from"]
    launch("boxes", 128, [*fields, *(8, first_row, 2, 1), *(0, 0, 0, 0)], arrays, PAIRED_ROWS=True)
    box = np.concatenate(
        [part(source, first_row + 4 * pair, 2, 1, 8, 2) for pair in range(rows // 2)], dtype=np.uint16
    )
    np.testing.assert_array_equal(arrays["tile"], swizzled(box))


@pytest.mark.parametrize("columns", [32, 48])
def test_narrow_boxes(launch, rng, columns):
    """Their rows lie as far apart as others, and what is between them does not count."""
    rows = PROBE["BOX_ROWS"]
    source = rng.integers(1, 2**16, (2, 33, 3, 72), dtype=np.uint16)
    arrays = box_arrays(rng, source)
    fields = [("from", rows, columns), ("to", rows, columns), "tile", "line", "line_from"]
    launch("boxes", 128, [*fields, *(8, 4, 2, 1), *(0, 0, 0, 0)], arrays, BOX_COLUMNS=columns)
    inside = swizzled(np.broadcast_to(np.arange(PANEL) < columns, (rows, PANEL)))
    box = swizzled(part(source, 4, 2, 1, 8, rows))
    np.testing.assert_array_equal(arrays["tile"][inside], box[inside])


def operand(matrix, transposed, gap, row_bytes=ROW_BYTES):
    """A matrix (across, depth) in shared memory, its description at address 0, and the step of 16 in depth.

    With the depth along the rows in memory, panels of `row_bytes` a row lie one after the other; else eights
    of rows do. Between these there are `gap` times eight rows of NaN.
    """
    rows = matrix.T if transposed else matrix
    width = row_bytes // matrix.itemsize
    lying = swizzled(np.concatenate(np.split(rows, range(width, rows.shape[1], width), axis=1)), row_bytes)
    pieces = lying.reshape(-1, DEPTH if transposed else SWIZZLE_ROWS, width)
    nan = np.full((len(pieces), gap * SWIZZLE_ROWS, width), np.nan, matrix.dtype)
    memory = np.concatenate([pieces, nan], axis=1)
    stride = memory[0].nbytes
    panels, eights = (stride, SWIZZLE_ROWS * row_bytes) if transposed else (0, stride)
    step = STEP * row_bytes if transposed else STEP * matrix.itemsize
    kind = {128: 1, 32: 3}[row_bytes]
    return memory.ravel(), kind << 62 | eights // 16 << 32 | panels // 16 << 16, step // 16


def fragments(matrix):
    """The registers of A, (depth / 16, thread, register): PTX ISA, "Register Fragments" of wgmma."""
    thread, register = np.arange(WARPGROUP)[:, None], np.arange(8)
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    column = thread % 4 * 2 + register % 2 + register // 4 * 8
    return np.stack([matrix[row, k + column] for k in range(0, DEPTH, STEP)])


def product_results(columns):
    """What a product is written to: with A from shared memory, and from registers."""
    return {name: np.zeros((WARPGROUP, columns // 2), np.float32) for name in ("shared", "registers")}


def assert_products(arrays, a, b, error):
    """Each is 1 + a b^T, but for an error relative to what is summed."""
    # "Matrix fragments of D": eights of columns, of which a thread has two in each of two rows.
    thread, register = np.arange(WARPGROUP)[:, None], np.arange(len(b) // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    left, right = a.astype(np.float64), b.astype(np.float64).T
    exact, magnitude = left @ right + 1, np.abs(left) @ np.abs(right) + 1
    for result in (arrays["shared"], arrays["registers"]):
        assert (np.abs(result - exact[row, column]) <= error * magnitude[row, column]).all()


@pytest.mark.parametrize(
    ("columns", "transposed_a", "transposed_b", "gap", "dtype", "b_row_bytes"),
    [
        (16, False, False, 0, "float16", 128),
        (80, True, False, 0, "bfloat16", 128),
        (128, False, True, 0, "bfloat16", 128),
        (128, False, False, 1, "float16", 128),
        (192, True, True, 1, "float16", 128),
        (256, False, True, 0, "float16", 128),
        (80, True, True, 0, "bfloat16", 32),
        (48, False, True, 1, "float16", 32),
    ],
)
def test_products(launch, rng, columns, transposed_a, transposed_b, gap, dtype, b_row_bytes):
    dtype = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    a, b = (rng.standard_normal((across, DEPTH)).astype(dtype) for across in (64, columns))
    width = b_row_bytes // dtype.itemsize
    padded = np.zeros((-(-columns // width) * width if transposed_b else columns, DEPTH), dtype)
    padded[:columns] = b
    a_memory, a_description, a_step = operand(a, transposed_a, gap)
    b_memory, b_description, b_step = operand(padded, transposed_b, gap, b_row_bytes)
    arrays = {
        "a": a_memory,
        "b": b_memory,
        "fragments": np.ascontiguousarray(fragments(a)),
        **product_results(columns),
    }
    numbers = struct.pack("4Q", a_description, b_description, a_step, b_step)
    launch(
        "products",
        WARPGROUP,
        ["a", "b", "fragments", "shared", "registers", numbers],
        arrays,
        PRODUCT_COLUMNS=columns,
        TRANSPOSED_A=transposed_a,
        TRANSPOSED_B=transposed_b,
        BFLOAT16=dtype != np.float16,
        A_BYTES=a_memory.nbytes,
        B_BYTES=b_memory.nbytes,
        SMEM_BYTES=-(-a_memory.nbytes // 1024) * 1024 + -(-b_memory.nbytes // 1024) * 1024,
    )
    assert_products(arrays, a, b, error=1e-5)


def multiplied_and_added(a, b, c, dtype):
    """a * b + c rounded once, by Python's fractions; NaN and infinity as float64 has them."""
    with np.errstate(all="ignore"):
        result = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        rounded = result.astype(dtype)
    for index in np.ndindex(result.shape):
        if np.isfinite(result[index]):
            exact = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
            rounded[index] = nearest(exact, rounded[index])
    return rounded


def nearest(exact, near):
    """Of `near` and its neighbours the one nearest to a fraction; of two the even one."""
    if not np.isfinite(near):
        return near
    bits = near.view(np.uint16)
    neighbours = [x for x in (bits + np.arange(-1, 2)).astype(np.uint16).view(near.dtype) if np.isfinite(x)]
    return min(neighbours, key=lambda x: (abs(Fraction(float(x)) - exact), x.view(np.uint16) % 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_barriers_and_small_things(launch, rng, dtype):
    dtype = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    values = rng.permutation(96).astype(np.int32)
    pairs = rng.integers(0, 2**16, (500, 3, 2), dtype=np.uint16)
    matrices = rng.integers(0, 2**16, (32, 4, 2), dtype=np.uint16)
    arrays = {
        "values": values,
        "exchanged": np.zeros((2, 96), np.int32),
        "handed": np.zeros(32, np.int32),
        "sums": np.zeros(32, np.int32),
        "matrices": matrices,
        "stored": np.zeros((4, 8, 8), np.uint16),
        "transposed": np.zeros((8, 8), np.uint16),
        "counter": np.zeros(1, np.uint32),
        "counted": np.zeros(96, np.uint32),
        "pairs": pairs,
        "fused": np.zeros((500, 2), np.uint16),
        "total": np.zeros(4, np.float32),
    }
    launch("barriers", 96, [*arrays, len(pairs)], arrays, BFLOAT16=dtype != np.float16)

    changed = np.concatenate([values[63::-1], values[:63:-1]])
    np.testing.assert_array_equal(arrays["exchanged"], [changed, changed + 1])
    np.testing.assert_array_equal(arrays["handed"], values[:32][::-1])
    assert (arrays["sums"] == values.sum()).all()
    np.testing.assert_array_equal(arrays["stored"], matrices.swapaxes(0, 1).reshape(4, 8, 8))
    np.testing.assert_array_equal(arrays["transposed"], arrays["stored"][0].T)
    np.testing.assert_array_equal(np.sort(arrays["counted"]), np.sort(np.arange(96) % 41))
    assert arrays["counter"][0] == 96 % 41
    np.testing.assert_array_equal(arrays["total"], [96, 192, 288, values.sum()])

    exact = multiplied_and_added(*np.moveaxis(pairs.view(dtype), 1, 0), dtype)
    fused = arrays["fused"].view(dtype)
    np.testing.assert_array_equal(np.isnan(fused), np.isnan(exact))
    known = ~np.isnan(exact)
    np.testing.assert_array_equal(fused[known].astype(np.float64), exact[known].astype(np.float64))


# ---- what must be seen ----

TILES = {"block_m": 128, "block_n": 64, "stages": 2, "query_stages": 1, "store_cols": 64}

BYTES = r"bytes of shared memory at byte \d+"
BARRIER = r"the barrier at byte \d+ of shared memory, whose phase 0, of parity 0, "

# What is wrong in a copy of a kernel's file, and what is said about it.
PLANTED = {
    "fewer bytes announced than copied": (
        "wgmma_forward_copies.cuh",
        "ring.announce(at, Rows::kBytes);",
        "ring.announce(at, Rows::kBytes / 2);",
        r"threads wait for others that do not come\n(?s:.*)"
        rf"threads 128-255 in mbarrier.try_wait for a phase of parity 0 of {BARRIER}"
        r"lacks 0 of 1 arrivals and has 4096 bytes that nobody announced\n",
    ),
    "more bytes announced than copied": (
        "wgmma_forward_copies.cuh",
        "ring.announce(at, Rows::kBytes);",
        "ring.announce(at, 2 * Rows::kBytes);",
        rf"{BARRIER}lacks 0 of 1 arrivals and 8192 bytes\n    ptx_sm90.cuh:\d+: ptx::barrier_try_wait\n",
    ),
    "bytes announced for one of two boxes": (
        "wgmma_forward_copies.cuh",
        "copy_tile(to, map, full, batch, work.kv_head, first_key);",
        "for (int i = 0; i < 2; ++i) copy_tile(to, map, full, work.batch, work.kv_head, 0);",
        r"(brings bytes for a phase that has ended without them|a copy of thread 0 is under way)",
    ),
    "a box stored before its tensor": (
        "wgmma_forward_output.cuh",
        "store_tile(params.o, rows, kPacked ? 0 : work.batch, work.head, sequence.first_q + row,",
        "store_tile(params.o, rows, kPacked ? 0 : work.batch, work.head, sequence.first_q + row - 1,",
        r"stores a box that begins before its tensor",
    ),
    "wrong parity of a writer": (
        "pipeline.cuh",
        "wait_for(empty[at.stage], at.parity ^ 1, at.stage, caller);",
        "wait_for(empty[at.stage], at.parity, at.stage, caller);",
        rf"thread 0 in mbarrier.try_wait for a phase of parity 0 of {BARRIER}lacks (\d+) of \1 arrivals",
    ),
    "wrong parity of a reader": (
        "pipeline.cuh",
        "wait_for(full[at.stage], at.parity, at.stage, caller);",
        "wait_for(full[at.stage], at.parity ^ 1, at.stage, caller);",
        rf"race: reads \d+ {BYTES}, which thread 0 writes with no barrier between",
    ),
    "stage filled before it is empty": (
        "pipeline.cuh",
        "wait_for(empty[at.stage], at.parity ^ 1, at.stage, caller);",
        "",
        r"(one arrival too many at the barrier at byte \d+|race: starts a copy to \d+ bytes)",
    ),
    "keys released before their product is done": (
        "wgmma_forward.cuh",
        "wait_product<Pending>(s); release_and_advance(smem.k_ring, k_at);",
        "release_and_advance(smem.k_ring, k_at); wait_product<Pending>(s);",
        rf"race: starts a copy to 8192 {BYTES}, which a product of the warpgroup of thread \d+ reads with no "
        r"wait for it between\n    ptx_sm90.cuh:\d+: ptx::copy_box\n(?s:.*)"
        r"the other access:\n    ptx_sm90a.cuh:\d+: ptx::Wgmma::multiply\n",
    ),
    "keys released for a warp that still reads": (
        "wgmma_forward_block.cuh",
        "smem.k_ring.init(kConsumers * kWarps);",
        "smem.k_ring.init(kConsumers * kWarps - 1);",
        rf"race: starts a copy to 8192 {BYTES}, which a product of the warpgroup of thread \d+ reads",
    ),
    "keys never released": (
        "wgmma_forward.cuh",
        "wait_product<Pending>(s); release_and_advance(smem.k_ring, k_at);",
        "wait_product<Pending>(s);",
        rf"thread 0 in mbarrier.try_wait for a phase of parity 0 of {BARRIER}lacks 8 of 8 arrivals\n",
    ),
    "barriers of which the copy engine was not told": (
        "fwd_6_wgmma.cu",
        "ptx::barrier_init_fence();",
        "",
        r"a copy that arrives on a barrier of which the copy engine has not been told\n",
    ),
    "barriers of which the other threads were not told": (
        "fwd_6_wgmma.cu",
        "ptx::barrier_init_fence();\n    }\n    __syncthreads();",
        "ptx::barrier_init_fence();\n    }\n",
        rf"race: changes atomically 8 {BYTES}, which thread 0 writes with no barrier between\n",
    ),
    "missing proxy fence": (
        "wgmma_forward_output.cuh",
        "ptx::proxy_fence(); ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup); const Sequence",
        "ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup); const Sequence",
        rf"race: reads 16 {BYTES}, which thread 128 writes with no proxy fence between\n"
        r"    ptx_sm90.cuh:\d+: ptx::store_box\n(?s:.*)"
        r"the other access:\n    ptx_sm90.cuh:\d+: ptx::stmatrix_x4",
    ),
    "missing barrier before a store": (
        "wgmma_forward_output.cuh",
        "ptx::proxy_fence(); ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup); const Sequence",
        "ptx::proxy_fence(); const Sequence",
        rf"race: reads 16 {BYTES}, which thread \d+ writes with no barrier between\n",
    ),
    "missing wait for a store": (
        "wgmma_forward_output.cuh",
        "if (leader) ptx::wait_stores_read();",
        "",
        rf"race: writes 16 {BYTES}, which a store of thread \d+ reads with no wait for it between\n",
    ),
    "store that outlives its thread": (
        "fwd_6_wgmma.cu",
        "Consumer(smem, params, warpgroup - kFirstConsumer).consume(); ptx::wait_stores_read();",
        "Consumer(smem, params, warpgroup - kFirstConsumer).consume();",
        r"thread 128: returns before its stores have read shared memory",
    ),
    "scores read in flight": (
        "wgmma_forward.cuh",
        "wait_scores<waits_once() ? 0 : 1>(s, last);",
        "wait_scores<waits_once() ? 0 : 2>(s, last);",
        r"reads 4 bytes of registers that a product works with\n    wgmma_softmax.cuh:\d+: ",
    ),
    "missing wait for a product": (
        "wgmma_products.cuh",
        "ptx::wgmma_wait<Pending>();",
        "",
        r"(reads|writes) 4 bytes of registers that a product works with\n    ",
    ),
    "weights written in flight": (
        "wgmma_forward.cuh",
        "self().template wait_output<0>(o, work, tile + 1); if (kLate",
        "self().round(p, s); self().template wait_output<0>(o, work, tile + 1); if (kLate",
        r"writes 4 bytes of registers that a product works with\n    wgmma_products.cuh:\d+: ",
    ),
    "missing fence before a product": (
        "wgmma_products.cuh",
        "hold_all(o); ptx::wgmma_fence();",
        "hold_all(o);",
        r"a product with no wgmma.fence after the last group\n    ptx_sm90a.cuh:\d+: ptx::Wgmma::multiply\n",
    ),
    "operand that is swizzled otherwise": (
        "wgmma_products.cuh",
        "kSwizzle128 = 1,",
        "kSwizzle128 = 2,",
        r"an operand with a swizzle that no kernel uses\n",
    ),
    "operand between two eights of rows": (
        "wgmma_products.cuh",
        "v0 + rows_step(k)",
        "v0 + rows_step(k / 4)",
        r"an operand that begins 512 bytes past a multiple of 1024\n",
    ),
    "registers that nobody gave up": (
        "fwd_6_wgmma.cu",
        "ptx::registers_decrease<kProducerRegisters>();",
        "",
        r"threads 128-383 in setmaxnreg.inc to \d+ of a warpgroup\n",
    ),
    "thread of a warpgroup that is missing": (
        "fwd_6_wgmma.cu",
        "Consumer(smem, params, warpgroup - kFirstConsumer).consume();",
        "if (threadIdx.x != 130) Consumer(smem, params, warpgroup - kFirstConsumer).consume();",
        r"threads wait for others that do not come\n(?s:.*)threads 1-127, 130 returned",
    ),
    "barrier of another number of threads": (
        "product_turns.cuh",
        "if (Warpgroups > 1) ptx::named_barrier_arrive<2 * kWarpgroup>(FirstBarrier + next);",
        "if (Warpgroups > 1) ptx::named_barrier_arrive<3 * kWarpgroup>(FirstBarrier + next);",
        r"barrier \d of 256 threads, at which others arrived as one of 384\n",
    ),
    "counter that is not put back": (
        "schedule.cuh",
        "atomicInc(taken, tiles - 1)",
        "atomicInc(taken, tiles)",
        r"fwd_6_wgmma leaves its counter at 4",
    ),
}


@pytest.mark.parametrize("mistake", WATCHED_MISTAKES)
def test_mistakes_for_the_watchdog_can_be_planted(tmp_path, mistake):
    """A GPU is needed to see them caught, but not to see that a change of the kernels has outdated them."""
    planted(tmp_path, *mistake)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_seen(rng, tmp_path, what):
    file, right, wrong, message = PLANTED[what]
    problem = draw(rng, "float16", 200, 260, dims=(64, 64), batch=1, heads=2, kv_heads=1)
    folder = planted(tmp_path, file, right, wrong)
    device = replace(calls.DEVICE, sm_count=1)
    with pytest.raises(EmulatorError, match=message) as caught:
        run(FORWARD, problem, False, folder=folder, tiles=TILES, device=device)
    assert str(caught.value).startswith(FORWARD)


def test_a_wrong_stride_between_panels_gives_wrong_numbers(rng, tmp_path):
    right = "return operand_at(tile.data, Tile::kPanelBytes);"
    folder = planted(tmp_path, "wgmma_products.cuh", right, "return operand_at(tile.data, 0);")
    with pytest.raises(AssertionError, match="should be"):
        run(FORWARD, draw(rng, "float16", 70, 70, dims=(128, 128), batch=1), False, folder=folder)


@pytest.mark.parametrize("checked", [True, False])
def test_a_block_that_never_ends_is_stopped(folder, checked):
    stop = np.zeros(1, np.int32)
    module = Module("probe_hopper.cu", PROBE, checked, folder)
    with pytest.raises(
        EmulatorError, match=r"endless, block 0, thread 0: .* has taken 100000 steps and has not"
    ):
        module.launch(
            "endless", 1, 32, 0, struct.pack("q", stop.ctypes.data), {"stop": stop}, max_steps=100_000
        )


def take_turns(folder, blocks=20, first_turn=0, **changes):
    """The sums after blocks added to them in turn, the last one first."""
    text = (HERE / "probe_blocks.cu").read_text()
    for right, wrong in changes.values():
        assert right in text
        text = text.replace(right, wrong)
    (folder / "probe_blocks.cu").write_text(text)
    turn, sums = np.zeros(1, np.uint32), np.ones(64, np.uint32)
    module = Module("probe_blocks.cu", {"SMEM_BYTES": 16}, folder=folder)
    params = struct.pack("2qI4x", turn.ctypes.data, sums.ctypes.data, first_turn)
    module.launch("turns", blocks, 64, 0, params, {"turn": turn, "sums": sums}, max_steps=100_000)
    return sums


def test_blocks_that_wait_for_each_other(folder):
    expected = 1
    for block in reversed(range(20)):
        expected = (2 * expected + block) % 2**32
    assert (take_turns(folder) == expected).all()


# Which of both blocks comes second, and so finds it, is chance.
RACE_FOR_SUMS = r"race: (reads|writes) 4 bytes of sums at byte \d+, which block \d+, thread"


def test_blocks_that_wait_for_each_other_for_ever(folder):
    message = "threads wait for others that do not come\nthread 0 in ld.acquire for another value\n"
    with pytest.raises(EmulatorError, match=f"^turns, block 0: {message}"):
        take_turns(folder, first_turn=1)


def test_blocks_that_do_not_wait_for_each_other(folder):
    wait = "while (ptx::load_acquire(params.turn) != mine) {", "while (false) {"
    with pytest.raises(EmulatorError, match=RACE_FOR_SUMS):
        take_turns(folder, wait=wait)


def test_a_block_that_says_it_is_done_before_it_is(folder):
    barrier = "__syncthreads();\n    if (threadIdx.x == 0) ptx::add", "if (threadIdx.x == 0) ptx::add"
    with pytest.raises(EmulatorError, match=RACE_FOR_SUMS):
        take_turns(folder, barrier=barrier)


# ---- blocks that send each other what they have ----

PAIR_PROBE = "probe_pairs.cu"
PAIR_THREADS, PAIR_SMEM_BYTES = 64, 8192


def exchange_arrays(rng, blocks, rounds):
    """Those of the probe's entries, and what shall be received."""
    sent = rng.standard_normal((blocks, rounds, PAIR_THREADS, 4)).astype(np.float32)
    return {"sent": sent, "received": np.zeros_like(sent)}, sent[:, :, ::-1]


def exchange(rng, folder, blocks=2, rounds=5, checked=True, changes=(), cluster=2, entry="exchange"):
    """What blocks receive from their partners in a copy of the probe with changes, (right, wrong)."""
    text = (HERE / PAIR_PROBE).read_text()
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    (folder / PAIR_PROBE).write_text(text)
    arrays, expected = exchange_arrays(rng, blocks, rounds)
    params = struct.pack("2qi4x", *(array.ctypes.data for array in arrays.values()), rounds)
    module = Module(PAIR_PROBE, {"SMEM_BYTES": PAIR_SMEM_BYTES}, checked, folder)
    sizes = blocks, PAIR_THREADS, PAIR_SMEM_BYTES
    module.launch(entry, *sizes, params, arrays, max_steps=1_000_000, cluster=cluster)
    np.testing.assert_array_equal(arrays["received"], expected)


@pytest.mark.parametrize("entry", ["exchange", "copy"])
@pytest.mark.parametrize("rounds", [1, 7])
def test_pairs(launch, rng, rounds, entry):
    arrays, expected = exchange_arrays(rng, 6, rounds)
    probe = {"source": PAIR_PROBE, "blocks": 6}
    launch(entry, PAIR_THREADS, ["sent", "received", rounds], arrays, **probe)
    np.testing.assert_array_equal(arrays["received"], expected)


@pytest.mark.parametrize("checked", [True, False])
def test_more_pairs_than_run_at_a_time(rng, folder, checked):
    exchange(rng, folder, blocks=20, checked=checked)


# What is changed where blocks copy tiles to each other, and what is said about it.
PLANTED_IN_COPIES = {
    "a tile that is not copied yet": (
        "wait_for_partner(empty, parity ^ 1);  // the copy is read",
        r"race: writes 4 bytes .* which a copy of thread 0 to its partner reads with no wait for what",
    ),
    "a tile that the copy engine does not see": (
        "ptx::proxy_fence();",
        r"race: reads 1024 bytes .* which thread \d+( among others)? writes with no proxy fence between",
    ),
    "no wait for the copy": (
        "wait_for_partner(full, parity);  // of the copy",
        r"which no thread has written|which a copy of block \d, thread 0 writes with no wait for its barrier",
    ),
}


@pytest.mark.parametrize("what", PLANTED_IN_COPIES)
def test_planted_mistakes_in_copies_are_seen(rng, folder, what):
    line, message = PLANTED_IN_COPIES[what]
    with pytest.raises(EmulatorError, match=message):
        exchange(rng, folder, changes=[(line, "")], entry="copy")


SEND = "ptx::send_to_partner(smem.landing[stage][thread], four, full);"
WAIT_FULL, WAIT_EMPTY = "wait_for_partner(full, parity);", "wait_for_partner(empty, parity ^ 1);"
ARRIVE = "ptx::barrier_arrive_at_partner(empty);"
FIRST_SYNC, LAST_SYNC = "ptx::pair_sync();  // the barriers", "ptx::pair_sync();  // nothing"

LANDING = r"16 bytes of shared memory at byte \d+"
STUCK = r"exchange, block \d: threads wait for others that do not come\n(?s:.*)"

ENDS_EARLY = r"ends with no wait for an arrival of block \d, thread|comes when its partner has ended"

# What is changed in the probe, and what is said about it.
PLANTED_IN_PAIRS = {
    "a place that is not empty": (
        [(WAIT_EMPTY, "")],
        rf"from block \d, thread \d+: race: writes {LANDING}, which a send of block \d, thread \d+ writes",
    ),
    "a place that is read after it is given back": (
        [(ARRIVE, ""), (WAIT_FULL, WAIT_FULL + ARRIVE)],
        rf"from block \d, thread \d+: race: writes {LANDING}, which block \d, thread \d+ reads with no",
    ),
    "a place that is never given back": ([(ARRIVE, "")], rf"{STUCK}lacks 64 of 64 arrivals\n"),
    "a place to which two threads send": (
        [("landing[stage][thread]", "landing[stage][thread & 62]")],
        rf"from block \d, thread \d+: race: writes {LANDING}, which a send of block \d, thread \d+ writes",
    ),
    "no wait for what is sent": (
        [(WAIT_FULL, "")],
        r"(which no thread has written|which a send of block \d, thread \d+ writes with no wait)",
    ),
    "a wait for the own block alone": (
        [(WAIT_FULL, "while (!ptx::barrier_try_wait(full, parity)) {}")],
        r"race: reads 4 bytes .* which a send of block \d, thread \d+ writes with no wait for its barrier",
    ),
    "a wait for part of the bytes": (
        [("sizeof smem.landing[stage]", "sizeof smem.landing[stage] / 2")],
        r"race: reads 4 bytes .* which a send of block \d, thread \d+ writes with no wait for its barrier",
    ),
    "a partner that never sends": (
        [(SEND, "if (ptx::rank_in_pair() == 0) " + SEND)],
        rf"{STUCK}lacks 0 of 1 arrivals and 1024 bytes\n",
    ),
    "a partner that stops sending": (
        [(SEND, "if (ptx::rank_in_pair() == 0 || round < 3) " + SEND)],
        rf"{STUCK}lacks 0 of 1 arrivals and 1024 bytes\n",
    ),
    "barriers of which the partner was not told": (
        [(FIRST_SYNC, "__syncthreads();  // the barriers")],
        r"(race: changes atomically 8 bytes|there is no barrier)",
    ),
    "a block that ends early": (
        [(LAST_SYNC, "// nothing")],
        ENDS_EARLY,
    ),
    "one of two blocks that ends early": (
        [(LAST_SYNC, "if (ptx::rank_in_pair() == 0) " + LAST_SYNC)],
        rf"{ENDS_EARLY}|{STUCK}threads 0-63 in barrier.cluster\n",
    ),
    "a thread that ends early": (
        [(LAST_SYNC, "if (thread != 5) " + LAST_SYNC)],
        rf"{STUCK}threads 0-4, 6-63 in barrier.cluster\n(?s:.*)thread 5 returned",
    ),
    "a place that is misaligned": (
        [("landing[stage][thread], four", "landing[stage][thread] + 2, four")],
        r"misaligned: sends 16 bytes to 8 bytes past a multiple of that",
    ),
}


@pytest.mark.parametrize("what", PLANTED_IN_PAIRS)
def test_a_planted_mistake_between_partners_is_seen(rng, folder, what):
    changes, message = PLANTED_IN_PAIRS[what]
    with pytest.raises(EmulatorError, match=message):
        exchange(rng, folder, changes=changes)


def test_a_block_without_a_partner(rng, folder):
    with pytest.raises(EmulatorError, match=r"exchange, block 2, thread 0: the last block has no partner"):
        exchange(rng, folder, blocks=3)
    with pytest.raises(EmulatorError, match=r"exchange, block 0, thread 0: the launch has no clusters"):
        exchange(rng, folder, cluster=1)


# ---- whole calls ----


def takes(kernel, head_dim, value_dim):
    """Whether a kernel supports these head dims."""
    shapes = {name: (1, 1, 1, dim) for name, dim in zip("qkv", (head_dim, head_dim, value_dim), strict=True)}
    if kernel.direction == "backward":
        shapes |= dict.fromkeys(("out", "dout"), shapes["v"])
    dtypes = dict.fromkeys(shapes, np.dtype(np.float16))
    problem = make_problem(kernel.direction, shapes, dtypes, Options())
    return kernel.unsupported(replace(problem, align_bytes=16), calls.DEVICE) is None


def cases(*dims):
    """Each of Hopper's kernels with those of these head dims that it supports."""
    hopper = [kernel for kernel in KERNELS.values() if kernel.only_arch is not None]
    return [(kernel.name, pair) for kernel in hopper for pair in dims if takes(kernel, *pair)]


# Head dims for what is tested at one size: those that most kernels take, and those for the others.
EASY = list({name: (name, dims) for name, dims in cases((192, 128), (64, 64))}.values())

# (seqlen_q, seqlen_k): one row or key, tails of tiles, rows that see no key, several tiles.
LENGTHS = [(1, 65), (130, 129), (300, 100), (250, 310)]


@pytest.mark.parametrize(
    ("kernel", "dims", "causal"),
    [
        *((*case, True) for case in cases((40, 72), (64, 64))),
        *((*case, False) for case in cases((64, 64), (128, 128))),
    ],
)
def test_lengths(rng, kernel, dims, causal):
    dtype = "float16" if causal else "bfloat16"
    for lengths in LENGTHS:
        problem = draw(rng, dtype, *lengths, dims=dims, batch=1, heads=2, kv_heads=1)
        run(kernel, problem, causal, tiles=None, device=SMALL_DEVICE)


@pytest.mark.parametrize(("kernel", "dims"), cases((192, 128), (152, 72), (104, 248), (256, 256)))
def test_large_head_dims(rng, kernel, dims):
    problem = draw(rng, "bfloat16", 150, 200, dims=dims, batch=1, heads=2, kv_heads=2)
    run(kernel, problem, True, device=SMALL_DEVICE)


@pytest.mark.parametrize(
    ("block_m", "block_n", "stages", "blocks_per_sm"), [(128, 64, 1, 1), (192, 80, 3, 1), (64, 64, 2, 3)]
)
def test_tiles(rng, block_m, block_n, stages, blocks_per_sm):
    sizes = {"block_m": block_m, "block_n": block_n, "stages": stages, "blocks_per_sm": blocks_per_sm}
    tiles = {**TILES, **sizes}
    run(FORWARD, draw(rng, "float16", 400, 330, dims=(64, 64)), True, tiles=tiles, device=SMALL_DEVICE)


@pytest.mark.parametrize(("dims", "causal"), [((64, 64), False), ((64, 40), True), ((128, 128), False)])
def test_a_block_that_sums_dq_of_one_head_after_the_other(rng, dims, causal):
    problem = draw(rng, "bfloat16", 290, 300, dims=dims, batch=2, heads=4, kv_heads=2)
    run("bwd_4_wgmma", problem, causal, device=replace(SMALL_DEVICE, sm_count=1))


@pytest.mark.parametrize(("head_dim", "lengths"), [(256, (200, 200)), (192, (140, 60)), (320, (200, 150))])
def test_the_last_of_few_blocks_rounds_dq_of_many_dims(rng, head_dim, lengths):
    problem = draw(rng, "bfloat16", *lengths, dims=(head_dim, head_dim), batch=1, heads=2, kv_heads=1)
    run("bwd_5_wgmma_wide", problem, True, device=replace(SMALL_DEVICE, l2_bytes=1 << 16))


# The backward's for many queries that see a key, whose dQ the copy engine adds.
LONG_TILES = {"block_m": 80}


@pytest.mark.parametrize(("dims", "causal"), [((128, 128), False), ((72, 40), True)])
def test_long_tiles_of_queries(rng, dims, causal):
    dtype = "float16" if causal else "bfloat16"
    for lengths in LENGTHS:
        problem = draw(rng, dtype, *lengths, dims=dims, batch=1, heads=2, kv_heads=1)
        run("bwd_4_wgmma", problem, causal, tiles=LONG_TILES, device=SMALL_DEVICE)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize(
    ("dims", "causal"), [((96, 96), False), ((72, 112), True), ((112, 104), True), ((24, 40), False)]
)
def test_warpgroups_that_make_dq_in_turn(rng, dims, causal, kv_heads):
    """Each has every other tile of one head after the other, or of three heads that share their keys."""
    for lengths in LENGTHS:
        problem = draw(rng, "bfloat16", *lengths, dims=dims, batch=1, heads=3, kv_heads=kv_heads)
        for options in ({}, {"deterministic": True}):
            run("bwd_4_wgmma", problem, causal, tiles={"block_m": 64}, device=SMALL_DEVICE, **options)


def test_a_block_that_makes_dq_in_turn_of_one_head_after_the_other(rng):
    problem = draw(rng, "bfloat16", 300, 310, dims=(80, 80), batch=1, heads=6, kv_heads=6)
    run("bwd_4_wgmma", problem, False, device=SMALL_DEVICE)


def test_whole_tiles_of_dq_that_the_copy_engine_adds(rng):
    problem = draw(rng, "float16", 1510, 150, dims=(104, 80), batch=1, heads=2, kv_heads=1)
    run("bwd_4_wgmma", problem, False, tiles=None, device=SMALL_DEVICE)


@pytest.mark.parametrize(
    ("file", "right", "lengths", "error"),
    [
        (
            "bwd_4_gradients.cuh",
            "if (kWholeQueries) ptx::named_barrier_sync<kWarpgroup>(kFirstOfWarpgroup + warpgroup);",
            (203, 330),
            "race: .* a product of the warpgroup",
        ),
        (
            "bwd_4_consumer.cuh",
            "if (tile_before != nullptr) release(smem.ds_ring, before(at));",
            (330, 310),
            "threads wait for others that do not come",
        ),
        (
            "bwd_4_consumer.cuh",
            "if (kTurns && kWholeQueries) turn_at.advance();",
            (330, 310),
            "threads wait for others that do not come",
        ),
    ],
)
def test_a_warpgroup_without_a_part_of_dq(rng, tmp_path, file, right, lengths, error):
    folder = planted(tmp_path, file, right, "")
    problem = draw(rng, "bfloat16", *lengths, dims=(96, 96), batch=1, heads=2, kv_heads=1)
    with pytest.raises(EmulatorError, match=error):
        run("bwd_4_wgmma", problem, True, tiles={"block_m": 64}, device=SMALL_DEVICE, folder=folder)


@pytest.mark.parametrize("block_m", [32, 64, 96])
def test_short_tiles_of_queries(rng, block_m):
    """Under a mask, a warpgroup passes over those that see keys of the other one alone."""
    many_dims = [(True, (192, 128))] * (block_m <= 64)  # there are no registers for more queries
    for causal, dims in [(True, (64, 64)), (True, (128, 40)), (False, (40, 72)), *many_dims]:
        for lengths in LENGTHS:
            problem = draw(rng, "bfloat16", *lengths, dims=dims, batch=1, heads=2, kv_heads=1)
            run("bwd_4_wgmma", problem, causal, tiles={"block_m": block_m}, device=SMALL_DEVICE)


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("bwd_4_consumer.cuh", "walk.tile < both_begin);", "walk.tile <= both_begin);"),
        ("bwd_4_consumer.cuh", "if (kProductTurns && both_see(walk)) turns.wait();", "turns.wait();"),
    ],
)
def test_warpgroups_that_do_not_take_turns_for_the_same_tiles(rng, tmp_path, file, right, wrong):
    options = {"tiles": {"block_m": 64}, "device": replace(SMALL_DEVICE, sm_count=1)}
    problem = draw(rng, "bfloat16", 250, 250, dims=(128, 128), batch=1, heads=1, kv_heads=1)
    with pytest.raises(EmulatorError, match="threads wait for others that do not come"):
        run("bwd_4_wgmma", problem, True, **options, folder=planted(tmp_path, file, right, wrong))


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("bwd_4_copies.cuh", "ptx::wait_stores_read(); ring.release(from);", "ring.release(from);"),
        ("bwd_4_gradients.cuh", "smem.outbox_rings[warpgroup].wait_empty(outbox_to);", ""),
    ],
)
def test_an_outbox_that_is_written_before_it_is_sent(rng, tmp_path, file, right, wrong):
    folder = planted(tmp_path, file, right, wrong)
    problem = draw(rng, "float16", 250, 310, dims=(128, 128), batch=1, heads=1, kv_heads=1)
    with pytest.raises(EmulatorError, match=r"race: .* of shared memory"):
        run("bwd_4_wgmma", problem, False, tiles=LONG_TILES, device=SMALL_DEVICE, folder=folder)


def test_a_product_that_begins_before_its_operand_is_there(rng, tmp_path):
    wait = "if (kOutApart) wait_for(smem.dout_full[at.stage], at.parity, at.stage);"
    folder = planted(tmp_path, "bwd_4_consumer.cuh", wait, "")
    problem = draw(rng, "float16", 130, 129, dims=(128, 128), batch=1, heads=1, kv_heads=1)
    with pytest.raises(EmulatorError, match=r"race: .* of shared memory"):
        run("bwd_4_wgmma", problem, False, tiles=None, device=SMALL_DEVICE, folder=folder)


# No score at all, one that is too small for LSE / scale to be finite, the other way round, and large ones.
@pytest.mark.parametrize("scale", [0.0, 1e-38, -0.2, 3.0])
@pytest.mark.parametrize(("kernel", "dims"), EASY)
def test_scales(rng, kernel, dims, scale):
    problem = draw(rng, "float16", 130, 140, dims=dims, batch=1, heads=2, kv_heads=1)
    run(kernel, problem, True, softmax_scale=scale, tiles=None, device=SMALL_DEVICE)


def with_leaps(problem, factor):
    """Some keys of a later tile, which are earlier ones, have scores that are larger by that factor."""
    for key in (30, 77):
        problem.k[:, key] = (problem.k[:, key].astype(np.float32) * factor).astype(problem.k.dtype)
    return problem


# Weights under the maxima before are large, and shrink; or beyond floats, and their scores are computed anew.
LARGE, BEYOND_FLOATS = 12, 60


@pytest.mark.parametrize("factor", [LARGE, BEYOND_FLOATS])
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, None), (False, -0.125)])
def test_scores_that_leap(rng, causal, scale, factor):
    problem = with_leaps(draw(rng, "bfloat16", 200, 400, dims=(64, 64), heads=2, kv_heads=1), factor)
    # One warpgroup, and two: they compute scores anew in different steps.
    for tiles in ({"block_m": 64}, {"block_m": 128, "blocks_per_sm": 1}):
        run(FORWARD, problem, causal, softmax_scale=scale, tiles=tiles, device=SMALL_DEVICE)


@pytest.mark.parametrize(
    ("file", "right", "factor"),
    [
        ("wgmma_softmax.cuh", "rescale(s, shrink);", LARGE),
        ("wgmma_softmax.cuh", "sums[half] *= shrink[half];", LARGE),
        ("wgmma_forward.cuh", "compute_products(s, work, tile);", BEYOND_FLOATS),
    ],
)
def test_weights_that_are_left_too_large(rng, tmp_path, file, right, factor):
    problem = with_leaps(draw(rng, "bfloat16", 200, 400, dims=(64, 64), heads=2, kv_heads=1), factor)
    with pytest.raises(AssertionError):
        run(FORWARD, problem, False, device=SMALL_DEVICE, folder=planted(tmp_path, file, right, ""))


@pytest.mark.parametrize(("kernel", "dims"), EASY)
def test_empty_problems(rng, kernel, dims):
    for batch, seqlen_q, seqlen_k in [(0, 5, 5), (2, 0, 5), (2, 5, 0)]:
        problem = draw(rng, "float16", seqlen_q, seqlen_k, dims=dims, batch=batch)
        run(kernel, problem, False, device=SMALL_DEVICE)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_masked_key_does_not_show(rng, bad):
    problem = draw(rng, "float16", 200, 210, dims=(64, 64))
    problem.k[:, 100], problem.v[:, 100] = bad, bad  # seen from row 90 on
    out, _ = run(FORWARD, problem, True, device=SMALL_DEVICE)
    assert np.isfinite(out[:, :90]).all()


@pytest.mark.parametrize(("kernel", "dims"), EASY)
def test_the_flavours_compute_the_same(rng, kernel, dims):
    # One query tile: sums of several blocks have no order.
    problem = draw(rng, "float16", 60, 60, dims=dims, batch=1, heads=1, kv_heads=1)
    checked, fast = (
        run(kernel, problem, True, checked=flavour, device=SMALL_DEVICE) for flavour in (True, False)
    )
    for a, b in zip(checked, fast, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- blocks that share in the sums of dQ ----

BACKWARDS = cases((64, 64), (128, 40), (192, 128), (256, 256), (264, 264))
BACKWARDS = [(kernel, dims) for kernel, dims in BACKWARDS if KERNELS[kernel].direction == "backward"]


# A mask or none in turn: compiling takes most of the time.
@pytest.mark.parametrize(
    ("kernel", "dims", "tiles", "causal"),
    [
        *((*pair, None, i % 2 == 0) for i, pair in enumerate(BACKWARDS)),
        *(("bwd_4_wgmma", (128, 128), LONG_TILES, causal) for causal in (False, True)),
    ],
)
def test_deterministic_gradients(rng, kernel, dims, tiles, causal):
    lengths = (300, 270) if causal else (200, 310)  # rows that see no key, and keys beyond a tile
    problem = draw(rng, "bfloat16", *lengths, dims=dims, batch=1, heads=2, kv_heads=1)
    options = {"tiles": tiles, "device": SMALL_DEVICE, "deterministic": True}
    checked = run(kernel, problem, causal, **options)
    again = run(kernel, problem, causal, **options, checked=False)
    for first, second in zip(checked, again, strict=True):
        np.testing.assert_array_equal(first, second)


# One that would have to write sums of dQ to memory to make them zero.
NO_CACHE = replace(SMALL_DEVICE, l2_bytes=0)


# Lengths and mask at which blocks add as they come, after the first, and in order, the last one rounding.
WAYS = {
    "bwd_4_wgmma": {
        "kAsTheyCome": ((70, 400), False),
        "kAfterFirst": ((40, 520), False),
        "kInOrder": ((300, 300), True),
    },
    "bwd_5_wgmma_wide": {"kAfterFirst": ((300, 300), True)},
    "bwd_8_wgmma_pair": {
        "kAsTheyCome": ((40, 1100), False),
        "kAfterFirst": ((70, 400), False),
        "kInOrder": ((300, 300), True),
    },
}
BY_WAY = [(kernel, dims, way) for kernel, dims in BACKWARDS for way in WAYS[kernel]]


@pytest.mark.parametrize(("kernel", "dims", "way"), BY_WAY)
def test_ways_of_adding(rng, kernel, dims, way):
    (queries, keys), causal = WAYS[kernel][way]
    call = Problem("backward", "float16", 1, queries, keys, 2, 1, *dims, causal)
    assert dict(make_plan(call, NO_CACHE, kernel).macros)["ADDING"] == way
    problem = draw(rng, "float16", queries, keys, dims=dims, batch=1, heads=2, kv_heads=1)
    run(kernel, problem, causal, tiles=None, device=NO_CACHE)


# Blocks that add as they come, after the first and in order, the last one rounding; a tile of queries without
# other keys, and fewer of them than parts.
ROWS_IN_PARTS = [
    ("bwd_4_wgmma", (64, 64), (300, 300), True, {"row_parts": 2}),
    ("bwd_4_wgmma", (128, 128), (70, 400), False, {"row_parts": 2, "head_parts": 2}),
    ("bwd_4_wgmma", (128, 128), (700, 300), True, {"row_parts": 3}),
    ("bwd_4_wgmma", (64, 64), (40, 100), False, {"row_parts": 3}),
    # The turn for one tile of queries is asked for again and again.
    ("bwd_4_wgmma", (64, 80), (4, 600), False, {"row_parts": 2, "head_parts": 2}),
    ("bwd_5_wgmma_wide", (192, 192), (300, 200), True, {"row_parts": 2}),
    ("bwd_5_wgmma_wide", (264, 72), (300, 200), True, {"row_parts": 2}),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kernel", "dims", "lengths", "causal", "tiles"), ROWS_IN_PARTS)
def test_rows_in_parts(rng, kernel, dims, lengths, causal, tiles, deterministic):
    problem = draw(rng, "bfloat16", *lengths, dims=dims, batch=1, heads=4, kv_heads=2)
    run(kernel, problem, causal, tiles=tiles, device=NO_CACHE, deterministic=deterministic)


# Under a causal mask the cache holds five heads: two that are left over belong to that section, three
# are one of their own.
@pytest.mark.parametrize("heads", [7, 8])
def test_heads_left_over_by_sections(rng, heads):
    head_bytes = 260 * 64 * (2 * 2 + 4)  # of queries, dO and sums
    device = replace(SMALL_DEVICE, l2_bytes=int(5.5 * head_bytes / SECTION_OF_L2))
    problem = draw(rng, "float16", 260, 260, dims=(64, 64), batch=1, heads=heads, kv_heads=heads)
    run("bwd_4_wgmma", problem, True, tiles=None, device=device)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("ptx::load_acquire(before) < turn", "false"),
        ("wait_for(order.added[to.stage], to.parity, to.stage);", ""),
    ],
)
@pytest.mark.parametrize(
    ("kernel", "dims", "deterministic"), [(*BACKWARDS[0], False), (*BACKWARDS[-1], True)]
)
def test_blocks_that_do_not_wait_for_their_turn(rng, tmp_path, kernel, dims, deterministic, right, wrong):
    folder = planted(tmp_path, "wgmma_turns.cuh", right, wrong)
    problem = draw(rng, "float16", 60, 520, dims=dims, batch=1, heads=2, kv_heads=1)
    options = {"tiles": None, "device": NO_CACHE, "deterministic": deterministic}
    with pytest.raises(EmulatorError, match=r"race: .* of workspace|threads wait for others"):
        run(kernel, problem, False, **options, folder=folder)


@pytest.mark.parametrize(
    ("kernel", "awaited", "report"),
    [
        ("bwd_5_wgmma_wide", "partner_empty, at.parity ^ 1", "race: .* of shared memory"),
        ("bwd_5_wgmma_wide", "full, at.parity", "reads .* of shared memory"),
        (
            *("bwd_8_wgmma_pair", "empty[at.stage], at.parity ^ 1, at.stage, caller"),
            "race: .* of shared memory",
        ),
        ("bwd_8_wgmma_pair", "full[at.stage], at.parity, at.stage, caller", "one arrival too many"),
    ],
)
def test_partners_that_do_not_wait(rng, tmp_path, kernel, awaited, report):
    file = "partner_sums.cuh" if kernel == "bwd_5_wgmma_wide" else "partner_tiles.cuh"
    folder = planted(tmp_path, file, f"wait_for_partner({awaited});", "")
    dims = (264, 264) if kernel == "bwd_5_wgmma_wide" else (136, 136)
    problem = draw(rng, "bfloat16", 250, 60, dims=dims, batch=1, heads=1, kv_heads=1)
    with pytest.raises(EmulatorError, match=report):
        run(kernel, problem, False, tiles=None, device=SMALL_DEVICE, folder=folder)


# Head dims, lengths, and into how many parts keys are parted: of all tiles under a causal mask, some of which
# see no key, and of those that are left for the last round, behind whole ones and alone.
IN_PARTS = [
    ((64, 64), (300, 700), True, 3),
    ((128, 128), (500, 300), True, 4),
    ((72, 200), (130, 400), True, 2),
    ((64, 64), (700, 500), False, 2),
    ((128, 40), (100, 900), False, 4),
    ((64, 64), (300, 1500), True, 9),
    ((128, 40), (100, 1700), False, 11),
]


@pytest.mark.parametrize(("dims", "lengths", "causal", "parts"), IN_PARTS)
def test_keys_in_parts(rng, dims, lengths, causal, parts):
    problem = draw(rng, "bfloat16", *lengths, dims=dims, batch=2, heads=2, kv_heads=1)
    options = {"tiles": {"key_parts": parts}, "device": SMALL_DEVICE}
    first = run(FORWARD, problem, causal, **options)
    for now, expected in zip(run(FORWARD, problem, causal, **options, checked=False), first, strict=True):
        np.testing.assert_array_equal(now, expected)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("ptx::load_acquire(&left) < others", "false"),
        (
            "            ptx::named_barrier_sync<kWarpgroup>(barrier);\n            if (first_warp",
            "if (first_warp",
        ),
        ("        ptx::named_barrier_sync<kWarpgroup>(barrier);\n#pragma", "#pragma"),
    ],
)
def test_parts_that_are_joined_before_they_are_there(rng, tmp_path, right, wrong):
    """In some of many tiles: a block that takes all parts of one, as on a busy machine, waits for nobody."""
    folder = planted(tmp_path, "key_parts.cuh", right, wrong)
    # Under a causal mask all tiles have parts.
    problem = draw(rng, "bfloat16", 100, 700, dims=(64, 64), batch=1, heads=16, kv_heads=1)
    options = {"tiles": {"key_parts": 2}, "device": SMALL_DEVICE}
    with pytest.raises(EmulatorError, match=r"race: .* of workspace"):
        run(FORWARD, problem, True, **options, folder=folder)
