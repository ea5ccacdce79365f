"""float32 and float64 on tensor cores: the numbers of fwd_5_mma and bwd_3_mma on the CPU."""

import itertools

import numpy as np
import pytest
from emulator import calls
from feature_cases import FORWARD_FEATURES, draw_case, feature_id, hide_nan, pairwise
from test_emulator_backward_features import MMA_ELSEWHERE
from tolerance import assert_attention, assert_gradients, random_problem

from cufa import reference
from cufa.checking import judge

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

KERNELS = ("fwd_5_mma", "bwd_3_mma")
ARITHMETIC = (("float32", "ieee"), ("float32", "tf32"), ("float64", "ieee"))
SPLIT = {"block_m": 32, "block_n": 16, "threads": 64, "stages": 1, "split": 2}
TILES = {
    "fwd_5_mma": (
        {"block_m": 32, "block_n": 16, "threads": 64},
        {"block_m": 64, "block_n": 32, "threads": 64},
    ),
    "bwd_3_mma": (
        {"block_m": 16, "block_n": 32, "threads": 64, "stages": 2, "split": 1},
        SPLIT,
    ),
}
# Sets that have all features, of which 16-bit types have more elsewhere; backward, those that they lack in
# test_emulator_backward_features.py.
FEATURES = {
    "fwd_5_mma": pairwise(FORWARD_FEATURES)[1:5],
    "bwd_3_mma": [pairwise()[i] for i in (*MMA_ELSEWHERE, 2, 9)],
}


def run(kernel, problem, *, precision="ieee", causal=False, **options):
    """The results of a kernel, held to the rule of its precision."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    options = {"kernel": kernel, "precision": precision, "causal": causal, **options}
    rules = {"causal": causal, "precision": precision}
    with np.errstate(invalid="ignore"):
        if kernel.startswith("fwd"):
            results = calls.attention(q, k, v, **options)
            assert_attention(*results, problem, **rules)
            return results
        out, lse = reference.attention(q, k, v, causal=causal, dtype=judge(problem.dtype_name))
        out, lse = out.astype(q.dtype), lse.astype(q.dtype)
        results = calls.attention_backward(dout, q, k, v, out, lse, **options)
        assert_gradients(results, problem, **rules)
        return results


def draw(rng, dtype, seqlen_q, seqlen_k, dims, **options):
    options = {"batch": 1, "heads": 2, "kv_heads": 1, **options}
    dims = dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
    return random_problem(rng, dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **dims, **options)


# The first kind of tiles under a causal mask, the second with odd dims.
@pytest.mark.parametrize(
    ("dtype", "precision", "which"),
    [(*ARITHMETIC[0], 0), (*ARITHMETIC[0], 1), (*ARITHMETIC[1], 0), (*ARITHMETIC[2], 1)],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_and_dims(rng, kernel, dtype, precision, which):
    dims, causal = ((24, 40), True) if which == 0 else ((33, 7), False)
    for lengths in ((33, 47), (50, 21), (1, 65)):
        problem = draw(rng, dtype, *lengths, dims)
        run(kernel, problem, precision=precision, causal=causal, tiles=TILES[kernel][which])


@pytest.mark.parametrize("deterministic", [False, True])
def test_warps_with_half_a_step_of_queries(rng, deterministic):
    problem = draw(rng, "float64", 50, 37, (24, 40))
    tiles = {"block_m": 32, "block_n": 16, "threads": 128, "stages": 1, "split": 4}
    run("bwd_3_mma", problem, causal=True, tiles=tiles, deterministic=deterministic)


@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tiles_that_the_plan_chooses(rng, kernel, dtype, precision):
    run(kernel, draw(rng, dtype, 70, 97, (64, 64), heads=1), precision=precision, causal=True)


@pytest.mark.parametrize(
    ("kernel", "arithmetic", "features"),
    [
        (kernel, arithmetic, features)
        for kernel, sets in FEATURES.items()
        for arithmetic, features in zip(itertools.cycle(ARITHMETIC), sets, strict=False)
    ],
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else None,
)
def test_features(rng, kernel, arithmetic, features):
    dtype, precision = arithmetic
    options = {"kernel": kernel, "precision": precision, "tiles": TILES[kernel][0], "checked": False}
    case = draw_case(rng, dtype, features, seqlen_q=39, seqlen_k=53, head_dim=24, head_dim_v=40)
    hide_nan(case)
    inputs = case.problem.q, case.problem.k, case.problem.v
    with np.errstate(all="ignore"):
        if kernel == "fwd_5_mma":
            results = calls.attention(*inputs, **case.emulator_forward, **options)
            assert_attention(*results, case.problem, precision=precision, **case.forward)
        else:
            out, lse = reference.attention(*inputs, dtype=judge(dtype), **case.forward)
            made = case.problem.dout, *inputs, out.astype(dtype), lse.astype(dtype)
            gradients = calls.attention_backward(*made, **case.emulator_backward, **options)
            assert_gradients(gradients, case.problem, precision=precision, **case.backward)


@pytest.mark.parametrize(("value_dim", "features"), [(40, ("causal",)), (33, ("window",))])
def test_who_copies_a_value_takes_it_out(rng, value_dim, features):
    """Where tiles are handed on: a single NaN or infinity, wherever it is in a tile."""
    sizes = {"batch": 80, "seqlen_q": 32, "seqlen_k": 32, "heads": 1, "kv_heads": 1, "head_dim": 8}
    case = draw_case(rng, "float64", features, **sizes, head_dim_v=value_dim)
    for i in range(sizes["batch"]):
        case.problem.v[i, 16 + i % 16, 0, 7 * i % value_dim] = (np.nan, np.inf)[i // 16 % 2]
    inputs = case.problem.q, case.problem.k, case.problem.v
    options = {"kernel": "fwd_5_mma", "tiles": TILES["fwd_5_mma"][0]}
    with np.errstate(invalid="ignore"):
        results = calls.attention(*inputs, **case.emulator_forward, **options)
        assert_attention(*results, case.problem, **case.forward)
    assert not np.isfinite(results[0]).all(axis=(1, 2, 3)).any()


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_long_sums_do_not_drift(rng, kernel, precision):
    """Tensor cores cut sums off: what is summed in them over a whole sequence is too small in the end."""
    problem = draw(rng, "float32", 16, 1500, (128, 16), heads=1)
    if kernel == "bwd_3_mma":
        problem = draw(rng, "float32", 1500, 16, (128, 16), heads=1)
    problem.v[...] += 1
    problem.dout[...] += 1
    run(kernel, problem, precision=precision, checked=False)


def test_large_scores(rng):
    run("fwd_5_mma", draw(rng, "float32", 40, 60, (64, 16), logit_scale=8.0))


def test_tf32_is_not_more_than_it_says(rng):
    """What tf32 gets wrong is much more than float32 does, so it must be asked for."""
    problem = draw(rng, "float32", 40, 60, (64, 16))
    (ieee, _), (tf32, _) = (run("fwd_5_mma", problem, precision=which) for which in ("ieee", "tf32"))
    assert np.abs(ieee - tf32).max() > 1e-5


def test_cuda_cores_may_be_more_exact_than_tf32(rng):
    problem = draw(rng, "float32", 40, 60, (64, 16))
    for kernel in ("fwd_4_flash_v2", "bwd_2_flash_v2"):
        plain, tf32 = (run(kernel, problem, precision=which) for which in ("ieee", "tf32"))
        for a, b in zip(plain, tf32, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
def test_what_is_not_finite_stays_what_it_is(rng, precision, bad):
    """An infinity is not to become NaN by being split in two."""
    problem = draw(rng, "float32", 20, 40, (16, 24), heads=1)
    problem.v[0, 3, 0, 5] = bad
    problem.v[0, 9, 0, 6] = 1  # a value that one tf32 holds
    out, _ = run("fwd_5_mma", problem, precision=precision)
    assert np.isfinite(out[..., 6]).all()
    if not np.isfinite(bad):
        np.testing.assert_array_equal(out[0, :, 0, 5], np.float32(bad))
