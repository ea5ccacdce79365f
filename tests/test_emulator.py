"""Every kernel's numbers on the CPU, and that the emulator sees what is wrong with a kernel."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from emulator import KERNELS as FOLDER
from emulator import EmulatorError, Module, calls
from tolerance import (
    DTYPES,
    LAYOUTS,
    assert_attention,
    assert_gradients,
    judge,
    random_problem,
)

from cufa import reference
from cufa.kernels import KERNELS as ALL_KERNELS
from cufa.plan.companions import softmax_launches
from cufa.problem import accumulator_dtype

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(4)]

# Hopper's kernels, which take aligned arrays alone, are in test_emulator_hopper.py, and the one for few
# queries is in test_emulator_split_kv.py.
KERNELS = {
    name: kernel
    for name, kernel in ALL_KERNELS.items()
    if kernel.only_arch is None and name != "fwd_8_split_kv"
}
FORWARD = [name for name, kernel in KERNELS.items() if kernel.direction == "forward"]
BACKWARD = [name for name, kernel in KERNELS.items() if kernel.direction == "backward"]
# float32 and float64 on tensor cores are in test_emulator_types.py.
BY_DTYPE = [
    (name, dtype)
    for name, kernel in KERNELS.items()
    for dtype in (DTYPES[:2] if name.endswith("_mma") else kernel.dtypes)
]

# Several tiles of each length, and little work for the threads that have none.
SMALL_TILES = {"block_m": 16, "block_n": 16, "threads": 64, "lanes": 8}
TILES = {
    **dict.fromkeys(("fwd_3_flash_v1", "fwd_4_flash_v2", "bwd_2_flash_v2"), SMALL_TILES),
    "fwd_5_mma": {"block_m": 32, "block_n": 16, "threads": 64},
    "bwd_3_mma": {"block_m": 16, "block_n": 32, "threads": 64, "stages": 2, "split": 1},
}

# (seqlen_q, seqlen_k): one row or key, one short of a tile or over it, more of either than of the other.
LENGTHS = [(1, 65), (31, 33), (33, 31), (65, 1)]
HEAD_DIMS = [(20, 33), (64, 64), (33, 8), (16, 72)]


def draw(rng, dtype, seqlen_q, seqlen_k, *, dims=(20, 33), **options):
    """A batch of two, with query heads that share key-value heads."""
    options = {"batch": 2, "heads": 4, "kv_heads": 2, **options}
    return random_problem(
        rng,
        dtype,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=dims[0],
        head_dim_v=dims[1],
        **options,
    )


def run(kernel, problem, causal, **options):
    """The results of a forward or backward kernel, held to the rule of all kernels."""
    rules = {"causal": causal, "softmax_scale": options.pop("softmax_scale", None)}
    options = {"kernel": kernel, "tiles": TILES.get(kernel), **rules, **options}
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    with np.errstate(invalid="ignore"):
        if ALL_KERNELS[kernel].direction == "forward":
            out, lse = calls.attention(q, k, v, **options)
            assert_attention(out, lse, problem, **rules)
            return out, lse
        exact_out, exact_lse = reference.attention(q, k, v, dtype=judge(q.dtype.name), **rules)
        accumulator = np.float64 if q.dtype == np.float64 else np.float32
        out, lse = exact_out.astype(q.dtype), exact_lse.astype(accumulator)
        gradients = calls.attention_backward(dout, q, k, v, out, lse, **options)
        assert_gradients(gradients, problem, **rules)
        return gradients


@pytest.mark.parametrize(("kernel", "dtype"), BY_DTYPE)
def test_lengths(rng, kernel, dtype):
    """Head dims and masks in turn: compiling takes most of the time."""
    turn = DTYPES.index(dtype) + list(KERNELS).index(kernel)
    dims, causal = HEAD_DIMS[turn % len(HEAD_DIMS)], turn % 2 == 0
    for lengths in LENGTHS:
        run(kernel, draw(rng, dtype, *lengths, dims=dims, batch=1, heads=2, kv_heads=1), causal)


@pytest.mark.parametrize(
    ("kernel", "dims"), list(zip(KERNELS, itertools.cycle([(1, 7), (128, 4)]), strict=False))
)
def test_head_dims(rng, kernel, dims):
    problem = draw(rng, KERNELS[kernel].dtypes[0], 21, 37, dims=dims, batch=1, heads=2, kv_heads=1)
    run(kernel, problem, True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_odd_head_dims_beyond_the_threads_of_a_block(rng, kernel):
    problem = draw(rng, KERNELS[kernel].dtypes[0], 5, 37, dims=(161, 255), batch=1, heads=1, kv_heads=1)
    run(kernel, problem, True, tiles=None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tiles_that_the_plan_chooses(rng, kernel):
    run(kernel, draw(rng, "float16", 65, 97, batch=1), True, tiles=None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_views_with_nan_in_the_gaps(rng, kernel, layout):
    run(kernel, draw(rng, "float16", 31, 17, dims=(40, 24), heads=2, layout=layout), True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_problems_and_rows(rng, kernel):
    for batch, seqlen_q, seqlen_k in [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (1, 40, 3)]:
        for causal in (False, True):
            run(kernel, draw(rng, "float16", seqlen_q, seqlen_k, batch=batch), causal)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_masked_key_does_not_show(rng, kernel, bad):
    problem = draw(rng, "float16", 40, 45)
    problem.k[:, 30], problem.v[:, 30] = bad, bad  # seen from row 25 on
    rows, *_ = run(kernel, problem, True)
    assert np.isfinite(rows[:, :25]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kernel", BACKWARD)
def test_a_query_that_does_not_see_a_key_does_not_show(rng, kernel, bad):
    problem = draw(rng, "float16", 40, 45)
    problem.q[:, 30], problem.dout[:, 30] = bad, bad  # sees keys to 35
    _, dk, dv = run(kernel, problem, True)
    assert np.isfinite(dk[:, 36:]).all()
    assert np.isfinite(dv[:, 36:]).all()


@pytest.mark.parametrize(
    ("kernel", "dtype", "dims"),
    [
        ("bwd_1_naive", "float32", (64, 40)),
        ("bwd_2_flash_v2", "float32", (64, 64)),
        ("bwd_2_flash_v2", "float64", (40, 64)),
        ("bwd_3_mma", "bfloat16", (64, 64)),
        ("bwd_3_mma", "float64", (64, 40)),
        ("bwd_4_wgmma", "float16", (64, 64)),
        ("bwd_5_wgmma_wide", "bfloat16", (192, 128)),
        ("bwd_6_float32", "float32", (64, 64)),
        ("bwd_7_float32_wide", "float32", (72, 136)),
        ("bwd_8_wgmma_pair", "float16", (136, 256)),
    ],
)
def test_rows_that_the_caller_leaves_out(rng, kernel, dtype, dims):
    """Their LSE is -inf. They have no gradients, and keys get none from them."""
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    problem = random_problem(rng, dtype, seqlen_q=70, seqlen_k=90, **sizes)
    inputs = problem.q, problem.k, problem.v
    out, lse = reference.attention(*inputs, dtype=judge(dtype))
    out, lse = out.astype(dtype), lse.astype(accumulator_dtype(dtype))
    out[:, 30:60], lse[:, :, 30:60] = 0, -np.inf
    gradients = calls.attention_backward(problem.dout, *inputs, out, lse, kernel=kernel)
    dout = problem.dout.copy()
    dout[:, 30:60] = 0
    assert not gradients[0][:, 30:60].any()
    assert_gradients(gradients, replace(problem, dout=dout))


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(rng, dtype, passes):
    x = (4 * rng.standard_normal((5, 300))).astype(dtype)
    x[1], x[2, ::2] = -np.inf, -np.inf
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for rows in (x, x[:, :1], x[::2, 3:250], x[:2] + x.dtype.type(1000)):
        y = calls.softmax(rows, passes)
        exact = reference.softmax(rows, dtype=judge(dtype))
        np.testing.assert_allclose(y.astype(exact.dtype), exact, rtol=tolerance, atol=tolerance * 1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_flavours_compute_the_same(rng, kernel):
    problem = draw(rng, "float16", 33, 20, batch=1, heads=1, kv_heads=1)
    checked, fast = (run(kernel, problem, True, checked=flavour) for flavour in (True, False))
    for a, b in zip(checked, fast, strict=True):
        np.testing.assert_array_equal(a, b)


# What is wrong in a copy of a kernel's file, and what is said about it.
PLANTED = {
    "missing barrier after loading": (
        "fwd_4_flash_v2",
        "fwd_4_flash_v2.cu",
        "    __syncthreads();\n\n    ScoreTile",
        "    ScoreTile",
        r"reads 16 bytes of shared memory at byte \d+, which no thread has written\n"
        r"    products.cuh:\d+: product_nt\n    fwd_4_flash_v2.cu:\d+: attend\n",
    ),
    "missing barrier before loading": (
        "fwd_4_flash_v2",
        "fwd_4_flash_v2.cu",
        "    __syncthreads();  // every warp is done",
        "    // every warp is done",
        r"race: writes 4 bytes of shared memory at byte \d+, which thread \d+ among others reads with no ",
    ),
    "missing barrier between products": (
        "bwd_2_flash_v2",
        "bwd_2_flash_v2.cu",
        "        __syncthreads();\n        for_slices_back",
        "        for_slices_back",
        r"shared memory at byte \d+, which ",
    ),
    "missing __syncwarp": (
        "fwd_3_flash_v1",
        "fwd_3_flash_v1.cu",
        "    __syncwarp();",
        "",
        r"shared memory at byte \d+, which no thread has written",
    ),
    "barrier that some threads do not reach": (
        "fwd_4_flash_v2",
        "fwd_4_flash_v2.cu",
        "    Accumulator acc = {};",
        "    if (first_row + layout.row(0) >= seqlen_q) return;\n    Accumulator acc = {};",
        r"threads wait for others that do not come\n"
        r"threads 0-7 in __syncthreads\n    fwd_4_flash_v2.cu:\d+: attend\n"
        r"(?s:.*)threads 8-63 returned$",
    ),
    "shuffle by some lanes of a warp": (
        "bwd_1_naive",
        "numbers.cuh",
        "x = lanes_sum<32>(x);",
        "if (threadIdx.x % 32 < 20) x = lanes_sum<32>(x);",
        r"threads 0-19, 32-51, .* in __shfl_xor_sync of lanes 0xffffffff\n    numbers.cuh:\d+: lanes_",
    ),
    "shared memory that is left out": (
        "fwd_4_flash_v2",
        "shared.cuh",
        "i < Tile::kRows * kRowChunks",
        "i < Tile::kRows * kRowChunks - 1",
        r"shared memory at byte \d+, which no thread has written",
    ),
    "row beyond the end of an input": (
        "fwd_4_flash_v2",
        "shared.cuh",
        "first_row + row < end_row",
        "first_row + row <= end_row",
        r"reads 2 bytes out of bounds: at byte 2640 of q, which has 2640\n    shared.cuh:\d+: load_tile",
    ),
    "row beyond the end of shared memory": (
        "fwd_4_flash_v2",
        "products.cuh",
        "return y + i * kY;",
        "return y + i * kY + 1;",
        r"out of bounds: at byte (\d+) of shared memory, which has \1",
    ),
    "vector that is wider than its alignment": (
        "fwd_4_flash_v2",
        "shared.cuh",
        "kChunk = kChunkOfRow<scalar_t, Cols>;",
        "kChunk = min_of(8 / sizeof(scalar_t), Cols & -Cols);",
        r"misaligned address of 'const .*': 2 bytes past a multiple of 8\n    shared.cuh:\d+: load_tile",
    ),
    "index beyond an array": (
        "fwd_4_flash_v2",
        "scores.cuh",
        "acc_t largest = scores[0];",
        "acc_t largest = scores[TN];",
        r"index 2 out of bounds for 'float \[2\]'\n    scores.cuh:\d+: max_of",
    ),
    "sums of several blocks that are not atomic": (
        "bwd_2_flash_v2",
        "bwd_2_flash_v2.cu",
        "atomicAdd(head.dq_sums.row(row) + col, dq[i][c][e]);",
        "head.dq_sums.row(row)[col] += dq[i][c][e];",
        r"race: (reads|writes) 4 bytes of workspace at byte \d+, which (block \d+, )?thread ",
    ),
    "result written over an input": (
        "fwd_1_naive",
        "standard.cuh",
        "matrix_of<scalar_t>(params.o, at.batch, at.head)",
        "matrix_of<scalar_t>(params.q, at.batch, at.head)",
        r"writes 2 bytes of q at byte \d+, which is read-only\n    standard.cuh:\d+: output_element",
    ),
    "row that several threads write": (
        "fwd_4_flash_v2",
        "fwd_4_flash_v2.cu",
        "if (lse && layout.x == 0)",
        "if (lse)",
        r"race: writes 4 bytes of lse at byte \d+, which thread 0 writes with no barrier between",
    ),
    "mask that is off by one": (
        "fwd_4_flash_v2",
        "mask.cuh",
        "kCausal ? max(diagonal(row) + 1, 0)",
        "kCausal ? max(diagonal(row), 0)",
        r"is .* should be",
    ),
    "wrong lane of a tile": (
        "bwd_2_flash_v2",
        "products.cuh",
        "weights.vec(layout.row(i), k)",
        "weights.vec(layout.row(TM - 1 - i), k)",
        r"is .* should be",
    ),
    "wrong element of a fragment": (
        "fwd_5_mma",
        "operands_half.cuh",
        "pair(left[2], left[3])",
        "pair(left[3], left[2])",
        r"is .* should be",
    ),
    "wrong row of a matrix": (
        "fwd_5_mma",
        "operands_half.cuh",
        "row + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2 * Tile::kMatrixCols",
        "row + lane() % 16, lane() / 16 * Tile::kMatrixCols",
        r"is .* should be",
    ),
    "missing wait for a copy": (
        "fwd_5_mma",
        "fwd_5_mma.cu",
        "    ptx::wait_copies();\n    __syncthreads();  // K",
        "    __syncthreads();  // K",
        r"race: reads 16 bytes of shared memory at byte \d+, to which a copy of thread \d+ is under way\n"
        r"(?s:.*)the other access:\n    ptx_sm80.cuh:\d+: ptx::copy_async\n    mma_tile.cuh:\d+: copy_rows",
    ),
    "missing barrier after a copy": (
        "fwd_5_mma",
        "fwd_5_mma.cu",
        "    __syncthreads();  // K",
        "    // K",
        r"reads 16 bytes of shared memory at byte \d+, (to )?which ",
    ),
}


def planted(folder, file, right, wrong):
    """A copy of the kernels with one thing wrong."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    (path,) = folder.rglob(file)
    text = path.read_text()
    # However the lines are broken.
    pattern = r"\s+".join(map(re.escape, right.split()))
    changed, count = re.subn(pattern, lambda _: wrong, text, count=1)
    assert count == 1, f"{file} no longer has {right!r}: plant the mistake elsewhere"
    path.write_text(changed)
    return folder


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_seen(rng, tmp_path, what):
    kernel, file, right, wrong, message = PLANTED[what]
    dims = (24, 40) if kernel == "fwd_5_mma" else (20, 33)  # cp.async copies no odd rows
    problem = draw(rng, "float16", 33, 40, dims=dims, batch=1, heads=2, kv_heads=1)
    kind = AssertionError if message == r"is .* should be" else EmulatorError
    with pytest.raises(kind, match=message) as caught:
        run(kernel, problem, True, folder=planted(tmp_path, file, right, wrong))
    if kind is EmulatorError:
        assert any(str(caught.value).startswith(entry) for entry in KERNELS[kernel].entries)


@pytest.mark.parametrize(
    ("kernel", "file", "wait"),
    [
        ("fwd_5_mma", "fwd_5_in_turn.cuh", "smem.keys.wait_free(number + 1);"),
        ("fwd_5_mma", "fwd_5_in_turn.cuh", "smem.values.wait_whole(number);"),
        ("bwd_3_mma", "bwd_3_copies.cuh", "smem.queries[stage].wait_free(number / kStages);"),
        ("bwd_3_mma", "bwd_3_keys.cuh", "smem.gradients.wait_free(at.number);"),
    ],
)
def test_a_missing_wait_for_a_tile_that_is_handed_on_is_seen(rng, tmp_path, kernel, file, wait):
    problem = draw(rng, "float64", 200, 200, dims=(64, 64), batch=1, heads=1, kv_heads=1)
    with pytest.raises(EmulatorError, match=r"race: |to which a copy of thread \d+ is under way"):
        run(kernel, problem, False, tiles=None, folder=planted(tmp_path, file, wait, ""))


def test_a_missing_wait_gives_a_wrong_number_in_the_flavour_without_checks(rng, tmp_path):
    _, file, right, wrong, _ = PLANTED["missing wait for a copy"]
    problem = draw(rng, "float16", 33, 40, dims=(24, 40))
    with pytest.raises(AssertionError, match="should be"):
        run("fwd_5_mma", problem, True, folder=planted(tmp_path, file, right, wrong), checked=False)


@pytest.mark.parametrize("ci", [False, True])
def test_without_a_compiler_tests_are_skipped_but_not_in_ci(ci):
    environment = {**os.environ, "CXX": "no-such-compiler", "CI": str(ci).lower()}
    test = f"{__file__}::{test_softmax.__name__}[float32-2]"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", test],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ci:
        assert result.returncode == pytest.ExitCode.TESTS_FAILED
        assert "no-such-compiler" in result.stdout
    else:
        assert result.returncode == pytest.ExitCode.OK
        assert "no C++ compiler to run kernels on the CPU" in result.stdout


def test_sizes_that_were_not_compiled_are_refused():
    module = Module("softmax.cu", softmax_launches("float32", 2, 1, calls.DEVICE.arch)[0].macros)
    with pytest.raises(ValueError, match="params has 40 bytes; the parameter of softmax has 48"):
        module.launch("softmax", 1, 256, 64, bytes(40), {})
    with pytest.raises(ValueError, match="smem_bytes is 65; SMEM_BYTES, which was compiled, is 64"):
        module.launch("softmax", 1, 256, 65, bytes(48), {})


def test_what_the_compiler_says_is_passed_on():
    with pytest.raises(RuntimeError, match="the host must define SCALAR, KEY_SCALAR, HEAD_DIM"):
        Module("softmax.cu", {})
