"""Features of the forward kernels, on the emulator: every pair of them, and where they have edges."""

import feature_cases as cases
import numpy as np
import pytest
from emulator import calls
from tolerance import DTYPES, assert_attention

from cufa.params import FeatureValues, pack_features
from cufa.problem import MAX_EXTENT, Features, Problem

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

# Several tiles of each length, and little work for the threads that have none.
TILES = {
    "fwd_4_flash_v2": {"block_m": 16, "block_n": 16, "threads": 64, "lanes": 8},
    "fwd_5_mma": {"block_m": 32, "block_n": 16, "threads": 64},
}
BY_DTYPE = [
    ("fwd_4_flash_v2", "float32"),
    ("fwd_4_flash_v2", "float64"),
    ("fwd_5_mma", "float16"),
    ("fwd_5_mma", "bfloat16"),
]
ONE_DTYPE = BY_DTYPE[::2]

# Each set with one dtype of each kernel, in turn: compiling takes most of the time.
ALL_SETS = [
    (*BY_DTYPE[first + i % 2], features)
    for first in (0, 2)
    for i, features in enumerate(cases.pairwise(cases.FORWARD_FEATURES))
]


def check(kernel, case, tiles=None, **options):
    """Run a case and hold it to the rule; what no row sees is NaN."""
    cases.hide_nan(case)
    return run(kernel, case.problem, case.forward, case.emulator_forward, tiles=tiles, **options)


def run(kernel, problem, rules, arguments, tiles=None, **options):
    tiles = tiles or TILES[kernel]
    inputs = problem.q, problem.k, problem.v
    with np.errstate(invalid="ignore"):
        out, lse = calls.attention(*inputs, kernel=kernel, tiles=tiles, **arguments, **options)
        assert_attention(out, lse, problem, **rules)
    return out, lse


@pytest.mark.parametrize(
    ("kernel", "dtype", "features"),
    ALL_SETS,
    ids=lambda value: cases.feature_id(value) if isinstance(value, frozenset) else value,
)
def test_features(rng, kernel, dtype, features):
    for case in cases.draw_lengths(rng, dtype, features, **cases.SIZES):
        check(kernel, case)


@pytest.mark.parametrize("window", cases.WINDOW_EDGES)
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_window_edges(rng, kernel, dtype, window):
    for seqlen_q, seqlen_k in [(70, 70), (33, 80), (80, 33)]:
        case = cases.draw_case(rng, dtype, (), seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, **cases.SIZES)
        case.numbers["window"] = window
        check(kernel, case)


def test_a_side_of_a_window_without_an_end_is_as_long_as_any():
    def packed(*window):
        problem = Problem("forward", "float16", 1, 1, 1, 1, 1, 64, 64, features=Features(window=window))
        return pack_features(problem, {})

    assert packed(None, 3) == packed(MAX_EXTENT, 3) != packed(3, None) == packed(3, MAX_EXTENT)


@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_lengths_of_packed_sequences(rng, kernel, dtype):
    for before, rows, keys in cases.PACKED_LENGTHS:
        check(kernel, cases.packed_case(rng, dtype, before, rows, keys, **cases.SIZES))


@pytest.mark.parametrize("scale", [0.0, -0.3, -2.0])
@pytest.mark.parametrize("features", [(), ("causal",), ("bias", "causal")])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_scales_that_are_not_positive(rng, kernel, dtype, features, scale):
    case = cases.draw_case(rng, dtype, features, seqlen_q=39, seqlen_k=53, **cases.SIZES)
    case.numbers["softmax_scale"] = scale
    check(kernel, case)


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_dtypes_of_the_bias(rng, kernel, dtype, bias_dtype):
    case = cases.draw_case(rng, dtype, ["causal"], seqlen_q=21, seqlen_k=37, **cases.SIZES)
    case.arrays["bias"] = rng.standard_normal((2, 21, 37)).astype(bias_dtype)
    check(kernel, case)


@pytest.mark.parametrize("sink", [-np.inf, -200.0, 12.0, 200.0])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_sinks_far_from_the_scores(rng, kernel, dtype, sink):
    case = cases.draw_case(rng, dtype, ["causal", "sink"], seqlen_q=30, seqlen_k=20, **cases.SIZES)
    case.arrays["sink"][:] = sink, 1
    out, lse = check(kernel, case)
    assert (out[:, :10] == 0).all()
    np.testing.assert_allclose(lse[:, 0, :10], sink, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("features", ["window", "mask"])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_nan_shows_where_it_is_seen(rng, kernel, dtype, features, bad):
    case = cases.draw_case(rng, dtype, [features], seqlen_q=50, seqlen_k=50, batch=1, **cases.SIZES)
    if features == "window":
        case.numbers["window"] = (12, 4)
    else:
        case.arrays["mask"] = rng.random((1, 50, 50)) < 0.5
    case.problem.v[:, 30] = bad
    out, _ = check(kernel, case)
    assert not np.isfinite(out).all()
    assert np.isfinite(out).any()


@pytest.mark.parametrize("why", ["bias", "underflow", "dropout_p"])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_nan_shows_where_its_weight_is_0(rng, kernel, dtype, why):
    """In tiles that a mask cuts as in whole ones: what is seen is multiplied."""
    features = ["causal"] if why == "underflow" else ["causal", why]
    case = cases.draw_case(rng, dtype, features, seqlen_q=50, seqlen_k=50, batch=1, **cases.SIZES)
    if why == "bias":
        case.arrays["bias"][..., 5] = -np.inf
    elif why == "underflow":
        case.problem.q[:] = abs(case.problem.q)
        case.problem.k[:, 5] = -1000
    case.problem.v[:, 5] = np.nan
    out, _ = check(kernel, case)
    assert np.isfinite(out[:, :5]).all()
    assert np.isnan(out[:, 5:]).all()


@pytest.mark.parametrize("in_bits", [False, True], ids=["bytes", "bits"])
def test_what_a_mask_shows_of_tiles(rng, monkeypatch, in_bits):
    """It is found as often as the mask is another, by 16 bytes at once, or by words and single bytes."""
    tiles = {"block_m": 32, "block_n": 32, "threads": 64}
    workspaces = []
    make = calls._workspace
    monkeypatch.setattr(calls, "_workspace", lambda plan: workspaces.append(make(plan)) or workspaces[-1])
    shapes = [(2, 2, 70, 128), (1, 1, 70, 128), (2, 1, 70, 104)]
    if not in_bits:  # of the last byte of bits, keys past the end count
        shapes += [(1, 2, 70, 101), (2, 1, 70, 98)]
    for of_batch, of_heads, rows, keys in shapes:
        case = cases.draw_case(rng, "float16", (), seqlen_q=70, seqlen_k=keys, **cases.SIZES)
        mask, parts = cases.mask_by_tiles(rng, (of_batch, of_heads, rows, keys), (32, 32))
        case.arrays["mask"] = np.packbits(mask, axis=-1, bitorder="little") if in_bits else mask
        check("fwd_5_mma", case, tiles=tiles)
        by_head = parts.repeat(3 // parts.shape[2], axis=2).swapaxes(0, 1)
        np.testing.assert_array_equal(workspaces[-1].view(np.uint16)[: by_head.size], by_head.ravel())
        assert workspaces[-1].nbytes < by_head.size * 2 + 4


# The mask's sequences and heads: with a bit for each key, the range of each row is tested apart.
@pytest.mark.parametrize(
    ("dtype", "keys_of_tile", "front", "features"),
    [
        ("float16", 64, (2, 2), ()),
        ("float32", 32, (2, 1), ("seqused_k", "dropout")),
        ("float64", 32, (1, 2), ("mask_bits",)),
        ("bfloat16", 96, (1, 1), ("packed",)),
        ("float16", 128, (2, 1), ("window", "seqused_k", "softcap")),
        ("float64", 32, (2, 1), ("causal",)),
        ("float32", 64, (1, 2), ("packed", "causal")),
        ("bfloat16", 32, (1, 1), ("causal", "alibi_slopes")),
        ("float16", 64, (2, 2), ("bias", "sink")),
    ],
    ids=str,
)
def test_a_mask_of_keys(rng, dtype, keys_of_tile, front, features):
    case = cases.draw_case(rng, dtype, {*features} - {"mask_bits"}, seqlen_q=70, seqlen_k=300, **cases.SIZES)
    keys = case.problem.k.shape[-3]
    mask = rng.random((*front, 1, keys)) < 0.7
    mask[..., 128:256] = rng.integers(2)  # tiles that nothing cuts
    mask[-1, ..., :40] = False
    in_bits = "mask_bits" in features
    case.arrays["mask"] = np.packbits(mask, axis=-1, bitorder="little") if in_bits else mask
    check("fwd_5_mma", case, tiles={"block_m": 32, "block_n": keys_of_tile, "threads": 64})


@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_dropout_does_not_depend_on_the_tiles(rng, kernel, dtype):
    case = cases.draw_case(rng, dtype, ["dropout"], seqlen_q=37, seqlen_k=70, **cases.SIZES)
    check(kernel, case, tiles=TILES[kernel] | {"block_n": 64})


@pytest.mark.parametrize("features", [("mask",), ("mask_bits", "causal"), tuple(cases.FORWARD_FEATURES)])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_the_tiles_that_the_plan_chooses(rng, kernel, dtype, features):
    case = cases.draw_case(rng, dtype, features, seqlen_q=150, seqlen_k=170, batch=1, **cases.SIZES)
    cases.hide_nan(case)
    out, lse = calls.attention(
        case.problem.q,
        case.problem.k,
        case.problem.v,
        kernel=kernel,
        checked=False,
        **case.emulator_forward,
    )
    assert_attention(out, lse, case.problem, **case.forward)


@pytest.mark.parametrize(
    ("kernel", "dtype", "dims"),
    [(*pair, dims) for pair, dims in zip(BY_DTYPE, [(320, 512), (512, 264)] * 2, strict=True)],
)
def test_wide_head_dims(rng, kernel, dtype, dims):
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = cases.draw_case(rng, dtype, ["window", "sink", "dropout"], seqlen_q=70, seqlen_k=85, **sizes)
    cases.hide_nan(case)
    with np.errstate(invalid="ignore"):
        inputs = case.problem.q, case.problem.k, case.problem.v
        out, lse = calls.attention(*inputs, kernel=kernel, **case.emulator_forward)
    assert_attention(out, lse, case.problem, **case.forward)


def test_warps_that_share_rows(rng):
    """Also where the part of the last one has padding, and where NaN is taken out of V."""
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 40}
    for value_dim in (8, 40, 72):
        case = cases.draw_case(
            rng, "float16", ["causal"], seqlen_q=50, seqlen_k=50, **sizes, head_dim_v=value_dim
        )
        case.problem.v[:, 30] = np.nan
        check("fwd_5_mma", case, tiles={"block_m": 32, "block_n": 16, "threads": 128, "split": 2})


def test_strides_of_bias_and_mask(rng):
    """Rows and heads of a larger array."""
    case = cases.draw_case(rng, "float16", ["bias", "mask"], seqlen_q=33, seqlen_k=40, **cases.SIZES)
    cases.widen_score_arrays(rng, case)
    for kernel in TILES:
        run(kernel, case.problem, case.forward, case.emulator_forward)


def test_values_of_other_features_are_not_read(rng):
    """A kernel without dropout does not care what the numbers of dropout are."""
    case = cases.draw_case(rng, "float16", ["causal"], seqlen_q=20, seqlen_k=20, **cases.SIZES)
    inputs = case.problem.q, case.problem.k, case.problem.v
    for kernel, tiles in TILES.items():
        options = {"causal": True, "kernel": kernel, "tiles": tiles}
        plain = calls.attention(*inputs, **options)
        other = calls.attention(*inputs, **options, values=FeatureValues(seed=5, offset=7))
        for a, b in zip(plain, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kernel", "dims", "tiles"),
    [
        ("fwd_5_mma", (64, 64), {}),
        ("fwd_6_wgmma", (64, 64), {}),
        ("fwd_8_split_kv", (64, 64), {}),
        ("fwd_8_split_kv", (64, 64), {"shares": 3}),
        ("fwd_10_wgmma_wide", (320, 264), {}),
        ("fwd_10_wgmma_wide", (320, 264), {"block_n": 32, "shares": 3}),
    ],
)
def test_numbers_of_keys_below_zero_count_as_too_large(rng, kernel, dims, tiles):
    """On a GPU nobody checks them, and nothing must wait for keys that there are not."""
    sizes = {"batch": 3, "heads": 2, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = cases.draw_case(rng, "float16", ("seqused_k",), seqlen_q=5, seqlen_k=70, **sizes)
    inputs = case.problem.q, case.problem.k, case.problem.v
    results = []
    for used in (70, -300, -(2**31)):
        case.arrays["seqused_k"][:] = used, 40, used
        results.append(calls.attention(*inputs, kernel=kernel, tiles=tiles, **case.emulator_forward))
    for result in results[1:]:
        for part, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(part, expected)
