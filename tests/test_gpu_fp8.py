"""The forward of 8-bit operands on a GPU; `pytest -m gpu` runs it."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from feature_cases import HOPPER_PAGE_SIZES, draw_case, feature_id, hide_nan, sets_of
from float8 import assert_float8, random_descales, with_values_transposed
from tolerance import random_problem

import cufa
from cufa import device
from cufa.integers import round_up
from cufa.problem import FLOAT8

pytestmark = pytest.mark.gpu

KERNEL = "fwd_7_fp8"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FEATURES = ("causal", "window", "softcap", "sink", "seqused_k", "packed", "block_table")


@pytest.fixture
def cupy(cupy):
    if device.current().arch.capability != (9, 0):
        pytest.skip("no GPU of sm_90")
    return cupy


def on_gpu(cupy, array):
    """CuPy makes no array of 8-bit floats, but sees memory as one."""
    if array.dtype == E4M3 and array.strides[1] == 1:  # transposed values, with what is after the last key
        rows = array.base
        return on_gpu(cupy, rows)[..., : array.shape[1]].transpose(0, 3, 1, 2)
    if array.dtype != E4M3:
        return cupy.asarray(array)
    return cupy.asarray(array.view(np.uint8)).view(E4M3)


def draw(rng, seqlen_q, seqlen_k, dims=(64, 64), **shape):
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, **shape}
    return random_problem(
        rng, FLOAT8, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=dims[0], head_dim_v=dims[1], **shape
    )


def run(cupy, problem, descales=None, out=None, tiles=None, **options):
    """Out and LSE, held to the rule."""
    tensors = [on_gpu(cupy, array) for array in (problem.q, problem.k, problem.v)]
    on_device = {name: cupy.asarray(array) for name, array in (descales or {}).items()}
    out, lse = cufa.attention(
        *tensors, return_lse=True, out=out, tiles=tiles, kernel=KERNEL, **on_device, **options
    )
    assert_float8(out.get(), lse.get(), problem, descales, **options)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48), (192, 176), (256, 256)])
def test_lengths(cupy, rng, dims, causal):
    for lengths in [(1, 65), (130, 129), (300, 100), (1000, 1100)]:
        run(cupy, draw(rng, *lengths, dims=dims), random_descales(rng, 2, 2), causal=causal)


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 176), (256, 256)])
def test_keys_in_parts(cupy, rng, dims, causal, transposes):
    for lengths, parts in [((3000, 2900), 2), ((700, 4500), 3), ((300, 8000), 13)]:
        problem = draw(rng, *lengths, dims=dims, batch=1)
        problem.v[0, lengths[1] // 2, 1, 5] = np.nan
        problem = with_values_transposed(problem) if transposes else problem
        run(cupy, problem, random_descales(rng, 1, 2), causal=causal, tiles={"key_parts": parts})


def test_descales_of_packed_sequences(cupy, rng):
    for causal in ({"causal"}, set()):
        case = draw_case(rng, FLOAT8, {"packed", *causal}, seqlen_q=500, seqlen_k=600, head_dim=128)
        descales = random_descales(rng, len(case.arrays["cu_seqlens_q"]) - 1, case.problem.k.shape[1])
        run(cupy, case.problem, case.arrays | descales, **case.numbers)


def test_descales_of_keys_in_pages(cupy, rng):
    sizes = {"seqlen_q": 300, "seqlen_k": 600, "head_dim": 128}
    case = draw_case(rng, FLOAT8, {"block_table", "causal"}, page_sizes=HOPPER_PAGE_SIZES, **sizes)
    kv_heads = case.problem.k.shape[2]
    descales = random_descales(rng, len(case.problem.q), kv_heads)
    run(cupy, case.problem, case.arrays | descales, **case.numbers)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48), (64, 72), (192, 176), (256, 256)])
def test_transposed_values(cupy, rng, dims, causal):
    for lengths in [(1, 64), (130, 132), (300, 100), (1000, 1100)]:
        problem = draw(rng, *lengths, dims=dims)
        problem = with_values_transposed(problem)
        assert cufa.plan(problem.q, problem.k, problem.v, causal=causal).problem.transposed_values
        run(cupy, problem, random_descales(rng, 2, 2), causal=causal)


@pytest.mark.parametrize("block_n", [32, 64, 96, 128, 192])
def test_tiles_of_transposed_values(cupy, rng, block_n):
    problem = draw(rng, 200, 1000, dims=(128, 128))
    problem = with_values_transposed(problem)
    run(cupy, problem, causal=True, tiles={"block_m": 128, "block_n": block_n, "stages": 2})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(cupy, rng, head_dim):
    problem = draw(rng, 4200, 4200, dims=(head_dim, head_dim), batch=1, heads=2, kv_heads=1)
    run(cupy, problem, causal=True)


@pytest.mark.parametrize("factor", [12, 60])
def test_scores_that_leap(cupy, rng, factor):
    """Beyond what weights under the maximum before can be, and beyond floats."""
    problem = draw(rng, 500, 900, dims=(128, 128))
    for key in (30, 300):
        problem.k[:, key] = (problem.k[:, key].astype(np.float32) * factor).astype(E4M3)
    run(cupy, problem)


def test_output_in_float16(cupy, rng):
    problem = draw(rng, 70, 80)
    out, _ = run(cupy, problem, out=cupy.empty(problem.q.shape, np.float16))
    assert out.dtype == np.float16


def test_strides_and_numpy(cupy, rng):
    problem = draw(rng, 100, 150)
    descales = random_descales(rng, 2, 2)
    expected, _ = run(cupy, problem, descales)
    # The last axis of these is not contiguous: they are copied.
    scattered = [
        on_gpu(cupy, np.ascontiguousarray(x.swapaxes(1, 3))).swapaxes(1, 3)
        for x in (problem.q, problem.k, problem.v)
    ]
    on_device = {name: cupy.asarray(array) for name, array in descales.items()}
    bits = expected.view(np.uint16)
    assert (cufa.attention(*scattered, kernel=KERNEL, **on_device).view(np.uint16) == bits).all()
    host = cufa.attention(problem.q, problem.k, problem.v, backend="cuda", kernel=KERNEL, **descales)
    np.testing.assert_array_equal(host.view(np.uint16), bits.get())


def test_torch_tensors(cupy, rng):
    torch = pytest.importorskip("torch")
    problem = draw(rng, 100, 150)
    tensors = [
        torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
        for x in (problem.q, problem.k, problem.v)
    ]
    out = cufa.attention(*tensors, kernel=KERNEL)
    expected, _ = run(cupy, problem)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.view(torch.int16).cpu().numpy(), expected.view(np.int16).get())


def test_nan_reaches_those_who_see_it(cupy, rng):
    problem = draw(rng, 500, 510)
    problem.k[:, 100], problem.v[:, 100, 0, 3] = np.nan, np.nan  # seen from row 90 on
    problem.v[:, 380, 0, 5] = np.nan
    out, _ = run(cupy, problem, causal=True)
    assert np.isfinite(out[:, :90].get().astype(np.float32)).all()
    run(cupy, problem)  # every row sees them, without a search


def test_nan_in_transposed_values_reaches_those_who_see_it(cupy, rng):
    problem = draw(rng, 500, 512, dims=(128, 128))
    problem.v[:, 100, 0, 3], problem.v[:, 380, 0, 5] = np.nan, np.nan  # seen from rows 88 and 368 on
    problem = with_values_transposed(problem)
    out, _ = run(cupy, problem, causal=True)
    assert np.isfinite(out[:, :88].get().astype(np.float32)).all()
    run(cupy, problem)


def test_the_same_bits_in_every_run(cupy, rng):
    tensors = [on_gpu(cupy, rng.standard_normal((2, 2100, 8, 128)).astype(E4M3)) for _ in range(3)]
    first = cufa.attention(*tensors, causal=True, kernel=KERNEL).view(np.uint16)
    for _ in range(200):
        assert (cufa.attention(*tensors, causal=True, kernel=KERNEL).view(np.uint16) == first).all()


@pytest.mark.parametrize("hidden", [False, True], ids=["clean", "NaN in the unseen"])
@pytest.mark.parametrize(
    "features",
    sets_of(FEATURES),
    ids=feature_id,
)
def test_features(cupy, request, features, hidden):
    check_features(cupy, request, features, hidden)


@pytest.mark.parametrize(
    "features", [on for on in sets_of(FEATURES) if not on & {"packed", "block_table"}], ids=feature_id
)
def test_features_with_transposed_values(cupy, request, features):
    check_features(cupy, request, features, hidden=True, lie_transposed=True)


def check_features(cupy, request, features, hidden, lie_transposed=False):
    """Run a drawn case of these features; beside transposed values keys are a multiple of four."""
    seed = int(hashlib.sha256(request.node.name.encode()).hexdigest()[:16], 16)
    rng = np.random.default_rng(seed)
    seqlen_q, seqlen_k = (int(length) for length in rng.integers(1, 700, 2))
    dims = {"head_dim": 128, "head_dim_v": 48} if hidden else {"head_dim": 64}
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": round_up(seqlen_k, 4) if lie_transposed else seqlen_k}
    case = draw_case(rng, FLOAT8, features, page_sizes=HOPPER_PAGE_SIZES, **lengths, **dims)
    if hidden:
        hide_nan(case)
    problem = with_values_transposed(case.problem) if lie_transposed else case.problem
    tensors = [on_gpu(cupy, array) for array in (problem.q, problem.k, problem.v)]
    side = {name: cupy.asarray(array) for name, array in case.arrays.items()}
    out, lse = cufa.attention(*tensors, return_lse=True, kernel=KERNEL, **case.numbers, **side)
    with np.errstate(invalid="ignore"):
        assert_float8(out.get(), lse.get(), problem, **case.forward)
