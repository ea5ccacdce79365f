"""Features of the backward kernels, on the emulator: every pair of them, and where they have edges."""

from dataclasses import replace

import feature_cases as cases
import numpy as np
import pytest
from emulator import calls
from tolerance import DTYPES, assert_gradients

from cufa import reference
from cufa.checking import judge
from cufa.problem import accumulator_dtype

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(4)]

# Several tiles of each length, and little work for the threads that have none.
TILES = {
    "bwd_2_flash_v2": {"block_m": 16, "block_n": 16, "threads": 64, "lanes": 8},
    "bwd_3_mma": {"block_m": 16, "block_n": 32, "threads": 64, "stages": 2, "split": 1},
}
# All keys of a head in a tile, where others hold some.
WHOLE_HEADS = {"block_m": 16, "block_n": 64, "threads": 128, "stages": 2, "split": 1}
ONE_STAGE = {"block_m": 16, "block_n": 32, "threads": 64, "stages": 1, "split": 1}
SHARED_ROWS = {"block_m": 32, "block_n": 32, "threads": 128, "stages": 1, "split": 2}
EIGHT_COLUMNS = {"block_m": 32, "block_n": 16, "threads": 128, "stages": 1, "split": 4}
BY_DTYPE = [
    ("bwd_2_flash_v2", "float32"),
    ("bwd_2_flash_v2", "float64"),
    ("bwd_3_mma", "float16"),
    ("bwd_3_mma", "bfloat16"),
]
ONE_DTYPE = BY_DTYPE[::2]

# Each set with one dtype of each kernel, in turn: compiling takes most of the time. On tensor cores some sets
# have other dtypes, in test_emulator_types.py.
MMA_ELSEWHERE = (3, 6, 8, 10)
ALL_SETS = [
    (*BY_DTYPE[first + i % 2], features)
    for first in (0, 2)
    for i, features in enumerate(cases.pairwise())
    if first == 0 or i not in MMA_ELSEWHERE
]
EVERYTHING = (
    *("window", "softcap", "bias", "mask", "alibi_slopes", "sink", "dropout", "packed"),
    *("seqused_k", "dlse", "dbias", "dsink"),
)


def check(kernel, case, **options):
    """Run a case and hold it to the rule; what no row sees is NaN."""
    cases.hide_nan(case)
    gradients = run(kernel, case, **options)
    assert_gradients(gradients, case.problem, **case.backward)
    return gradients


def run(kernel, case, **options):
    """The gradients, from the output and the LSE of the reference."""
    problem, name = case.problem, case.problem.dtype_name
    inputs = problem.q, problem.k, problem.v
    options = {"tiles": TILES.get(kernel), **case.emulator_backward, **options}
    with np.errstate(all="ignore"):
        out, lse = reference.attention(*inputs, dtype=judge(name), **case.forward)
        out, lse = out.astype(name), lse.astype(accumulator_dtype(name))
        return calls.attention_backward(problem.dout, *inputs, out, lse, kernel=kernel, **options)


@pytest.mark.parametrize(
    ("kernel", "dtype", "features"),
    ALL_SETS,
    ids=lambda value: cases.feature_id(value) if isinstance(value, frozenset) else value,
)
def test_features(rng, kernel, dtype, features):
    """Both kernels read what features bring by the same code: one of them with all accesses checked.

    For few keys `bwd_3_mma` is another variant, which `test_whole_heads` has.
    """
    for case in cases.draw_lengths(rng, dtype, features, **cases.SIZES):
        if kernel != "bwd_3_mma" or case.problem.k.shape[-3] > TILES[kernel]["block_n"]:
            check(kernel, case, checked=kernel == "bwd_3_mma")


@pytest.mark.parametrize(
    ("dtype", "features"),
    [(DTYPES[i % len(DTYPES)], features) for i, features in enumerate(cases.pairwise())],
    ids=lambda value: cases.feature_id(value) if isinstance(value, frozenset) else value,
)
def test_whole_heads(rng, dtype, features):
    packed = {"max_seqlen_k": 53} if "packed" in features else {}
    for case in cases.draw_lengths(rng, dtype, features, **cases.SIZES):
        check("bwd_3_mma", case, tiles=WHOLE_HEADS, **packed)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_in_a_row_of_whole_heads_reaches_no_other(rng, dtype, name):
    """Neither of the next tile of queries, nor of the next head: Q's memory has had the rows of dQ."""
    case = cases.draw_case(rng, dtype, (), seqlen_q=40, seqlen_k=40, batch=1, **cases.SIZES)
    getattr(case.problem, name)[0, 3, 0, 0] = np.nan
    check("bwd_3_mma", case, tiles=WHOLE_HEADS)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_in_more_keys_than_the_call_says(rng, dtype, name):
    case = cases.packed_case(rng, dtype, 5, [40, 0, 70, 3], [33, 20, 0, 90], **cases.SIZES)
    getattr(case.problem, name)[7, 0, 0] = np.nan
    check("bwd_3_mma", case, tiles=ONE_STAGE, max_seqlen_k=32)


@pytest.mark.parametrize(("dtype", "features"), [("float16", ()), ("float32", ("deterministic", "dsink"))])
def test_packed_sequences_have_more_keys_than_the_call_says(rng, dtype, features):
    case = cases.draw_case(rng, dtype, ["packed", "sink", *features], seqlen_q=1, seqlen_k=1, **cases.SIZES)
    lengths = cases.packed_case(rng, dtype, 5, [40, 0, 70, 3], [33, 20, 0, 90], **cases.SIZES)
    case = replace(
        lengths,
        arrays=lengths.arrays | {"sink": case.arrays["sink"]},
        gradients=case.gradients,
        deterministic=case.deterministic,
    )
    check("bwd_3_mma", case, tiles=ONE_STAGE, max_seqlen_k=32)


@pytest.mark.parametrize("window", cases.WINDOW_EDGES)
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_window_edges(rng, kernel, dtype, window):
    for deterministic, (seqlen_q, seqlen_k) in enumerate([(70, 70), (33, 80), (80, 33)]):
        case = cases.draw_case(rng, dtype, (), seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, **cases.SIZES)
        case.numbers["window"] = window
        check(kernel, case, deterministic=deterministic == 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_lengths_of_packed_sequences(rng, kernel, dtype, deterministic):
    for before, rows, keys in cases.PACKED_LENGTHS:
        case = cases.packed_case(rng, dtype, before, rows, keys, **cases.SIZES)
        dq, dk, dv = check(kernel, case, deterministic=deterministic)
        for gradient, cu_seqlens in zip((dq, dk, dv), (rows, keys, keys), strict=True):
            first, last = before, before + sum(cu_seqlens)
            assert np.isfinite(gradient[first:last]).all()
            # What is of no sequence is left as it was.
            assert np.isnan(gradient[:first]).all()
            assert np.isnan(gradient[last:]).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_gradients_of_keys_that_do_not_count_are_zero(rng, kernel, dtype, packed):
    case = cases.draw_case(rng, dtype, ["seqused_k"], seqlen_q=30, seqlen_k=70, batch=3, **cases.SIZES)
    if packed:
        case = cases.packed_case(rng, dtype, 5, [30, 20, 40], [70, 70, 70], **cases.SIZES)
    case.arrays["seqused_k"] = np.array([0, 20, 33], np.int32)
    _, *gradients = check(kernel, case)
    for gradient in gradients:
        sequences = gradient[5:215].reshape(3, 70, *gradient.shape[1:]) if packed else gradient
        for sequence, used in zip(sequences, case.arrays["seqused_k"], strict=True):
            assert (sequence[used:] == 0).all()
            assert sequence[:used].all(axis=-1).any() or used == 0


@pytest.mark.parametrize(
    ("kernel", "dtype", "feature", "deterministic"),
    [
        (*ONE_DTYPE[0], "causal", False),
        (*ONE_DTYPE[0], "packed", True),
        (*ONE_DTYPE[1], "packed", False),
        (*ONE_DTYPE[1], "causal", True),
    ],
)
def test_broadcasts_of_the_bias(rng, kernel, dtype, feature, deterministic):
    for shape in [(1, 1, 1), (2, 1, 1), (1, 2, 30), (2, 2, 30)]:
        case = cases.draw_case(rng, dtype, [feature, "dbias"], seqlen_q=30, seqlen_k=21, **cases.SIZES)
        case.arrays["bias"] = rng.standard_normal((*shape, 21)).astype(dtype)
        *_, dbias = check(kernel, case, deterministic=deterministic)
        if feature == "causal" and shape[2] > 1:
            row, key = np.ogrid[:30, :21]
            assert (dbias[..., key > row - 9] == 0).all()


@pytest.mark.parametrize(
    ("kernel", "dtype", "bias_dtype"),
    [
        *((*ONE_DTYPE[0], bias_dtype) for bias_dtype in DTYPES),
        *((*ONE_DTYPE[1], bias_dtype) for bias_dtype in ("float16", "float32")),
    ],
)
def test_dtypes_of_the_bias(rng, kernel, dtype, bias_dtype):
    case = cases.draw_case(rng, dtype, ["causal", "dbias"], seqlen_q=21, seqlen_k=37, **cases.SIZES)
    case.arrays["bias"] = rng.standard_normal((2, 21, 37)).astype(bias_dtype)
    *_, dbias = check(kernel, case)
    assert dbias.dtype == bias_dtype


@pytest.mark.parametrize(
    ("kernel", "dtype", "deterministic"), [(*ONE_DTYPE[0], False), (*ONE_DTYPE[1], True)]
)
def test_a_bias_without_queries_has_gradient_zero(rng, kernel, dtype, deterministic):
    case = cases.draw_case(rng, dtype, ["dbias", "dsink"], seqlen_q=0, seqlen_k=9, **cases.SIZES)
    case.arrays["bias"] = np.ones((1, 9), dtype)
    *_, dbias, dsink = check(kernel, case, deterministic=deterministic)
    assert not dbias.any()
    assert not dsink.any()


def test_packed_sequences_without_queries(rng):
    """No tile of them is seen, and the sums of the bias lie where the workspace has room for them."""
    case = cases.draw_case(rng, "float16", ["packed", "mask", "dbias"], seqlen_q=0, seqlen_k=9, **cases.SIZES)
    problem = case.problem
    case = replace(case, problem=replace(problem, q=problem.q[:0], dout=problem.dout[:0]))
    case.arrays["cu_seqlens_q"][:] = 0
    case.arrays.update(mask=np.ones((1, 9), bool), bias=np.ones((1, 9), np.float16))
    *_, dbias = check("bwd_3_mma", case)
    assert not dbias.any()


@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_keys_without_query_heads_have_gradient_zero(rng, kernel, dtype):
    case = cases.draw_case(
        rng, dtype, ["dbias", "dsink"], seqlen_q=30, seqlen_k=20, **cases.SIZES | {"heads": 0}
    )
    case.arrays["bias"] = np.ones((1, 20), dtype)
    for deterministic in (False, True):
        _, dk, dv, dbias, dsink = check(kernel, case, deterministic=deterministic)
        assert not any(gradient.any() for gradient in (dk, dv, dbias, dsink))


@pytest.mark.parametrize("sink", [-200.0, 12.0])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_sinks_far_from_the_scores(rng, kernel, dtype, sink):
    case = cases.draw_case(rng, dtype, ["causal", "dlse", "dsink"], seqlen_q=30, seqlen_k=20, **cases.SIZES)
    case.arrays["sink"][:] = sink, 1
    check(kernel, case)


@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_a_sink_that_is_no_score_has_gradient_zero(rng, kernel, dtype):
    case = cases.draw_case(rng, dtype, ["causal", "dlse", "dsink"], seqlen_q=30, seqlen_k=20, **cases.SIZES)
    case.arrays["sink"][:] = -np.inf
    case.problem.dout[:, :10] = np.nan  # rows that see no key
    *gradients, dsink = run(kernel, case)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (dsink == 0).all()


@pytest.mark.parametrize(
    ("kernel", "dtype", "features"),
    [(*ONE_DTYPE[0], EVERYTHING), (*ONE_DTYPE[1], ()), (*ONE_DTYPE[1], EVERYTHING)],
)
def test_deterministic_calls_give_the_same_bits(rng, kernel, dtype, features):
    case = cases.draw_case(rng, dtype, [*features, "deterministic"], seqlen_q=70, seqlen_k=90, **cases.SIZES)
    first, second = (check(kernel, case, checked=checked) for checked in (True, False))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


DETERMINISTIC = (("bwd_2_flash_v2", "window"), ("bwd_3_mma", "mask"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("features", ["window", "mask"])
@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_nan_shows_where_it_is_seen(rng, kernel, dtype, features, name, bad):
    case = cases.draw_case(rng, dtype, [features], seqlen_q=50, seqlen_k=50, batch=1, **cases.SIZES)
    if features == "window":
        case.numbers["window"] = (12, 4)
    else:
        case.arrays["mask"] = np.add.outer(np.arange(50), np.arange(50)) % 2 == 0
    getattr(case.problem, name)[:, 30] = bad
    gradients = check(kernel, case, deterministic=(kernel, features) in DETERMINISTIC)
    assert not all(np.isfinite(gradient).all() for gradient in gradients)
    assert all(np.isfinite(gradient).any() for gradient in gradients)


@pytest.mark.parametrize(("kernel", "dtype"), ONE_DTYPE)
def test_nan_shows_where_its_weight_is_0(rng, kernel, dtype):
    """In tiles that a mask cuts as in whole ones: what is seen is multiplied."""
    case = cases.draw_case(rng, dtype, ["causal", "bias"], seqlen_q=50, seqlen_k=50, batch=1, **cases.SIZES)
    case.arrays["bias"][..., 5] = -np.inf
    case.problem.dout[:, 40] = np.nan
    _, _, dv = check(kernel, case)
    assert np.isnan(dv[:, :41]).all()
    assert np.isfinite(dv[:, 41:]).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_that_a_mask_hides(rng, deterministic):
    for of_batch, of_heads, rows in [(2, 2, 70), (1, 1, 70), (2, 1, 1)]:
        case = cases.draw_case(rng, "float16", ("causal",), seqlen_q=70, seqlen_k=90, **cases.SIZES)
        case.arrays["mask"], _ = cases.mask_by_tiles(rng, (of_batch, of_heads, rows, 90), (32, 32))
        check("bwd_3_mma", case, deterministic=deterministic)


# Keys are hidden in the ways that blocks process them: with warps that share rows, that hand tiles on, with a
# head in parts, with whole heads, more of their keys than the call says, and with dQ in blocks of its own.
@pytest.mark.parametrize(
    ("dtype", "tiles", "features", "options"),
    [
        ("float16", TILES["bwd_3_mma"], (), {}),
        ("float16", TILES["bwd_3_mma"], ("window", "dbias"), {"deterministic": True}),
        ("float16", TILES["bwd_3_mma"] | {"head_parts": 2}, ("seqused_k", "dsink"), {}),
        ("bfloat16", SHARED_ROWS, ("seqused_k", "dropout"), {"deterministic": True}),
        ("bfloat16", ONE_STAGE, ("packed",), {"max_seqlen_k": 32}),
        ("bfloat16", WHOLE_HEADS, ("dsink", "softcap"), {}),
        ("float16", WHOLE_HEADS, ("packed", "causal"), {}),
        ("float32", EIGHT_COLUMNS, ("dlse",), {}),
        ("float64", TILES["bwd_3_mma"], (), {}),
        ("float64", TILES["bwd_3_mma"], ("causal", "mask_bits"), {}),
    ],
    ids=str,
)
def test_a_mask_of_keys(rng, dtype, tiles, features, options):
    lengths = {"seqlen_q": 40, "seqlen_k": 60 if tiles is WHOLE_HEADS else 130, "batch": 3}
    case = cases.draw_case(rng, dtype, {*features} - {"mask_bits"}, **cases.SIZES | lengths)
    sequences, keys = (1 if "packed" in features else 3), case.problem.k.shape[-3]
    shown = rng.choice([0.0, 0.5, 1.0], (sequences, 1, 1, keys // 32 + 1))
    shown[0, ..., :2] = 0, 1
    shown[1:2] = 0  # nothing is seen
    mask = rng.random((sequences, 1, 1, keys)) < np.repeat(shown, 32, axis=-1)[..., :keys]
    in_bits = "mask_bits" in features
    case.arrays["mask"] = np.packbits(mask, axis=-1, bitorder="little") if in_bits else mask
    check("bwd_3_mma", case, tiles=tiles, **options)


def test_a_mask_of_the_keys_of_each_head(rng):
    sizes = cases.SIZES | {"heads": 2, "kv_heads": 2}
    case = cases.draw_case(rng, "float16", (), seqlen_q=40, seqlen_k=70, **sizes)
    case.arrays["mask"] = rng.random((2, 2, 1, 70)) < 0.5
    check("bwd_3_mma", case)


def test_queries_in_one_stage(rng):
    """The next ones come while dQ is multiplied, also where NaN has been taken out of this tile."""
    case = cases.draw_case(rng, "float16", ("causal",), seqlen_q=70, seqlen_k=90, **cases.SIZES)
    check("bwd_3_mma", case, tiles=ONE_STAGE)
    case.problem.q[:, 30] = np.nan
    case.problem.dout[:, 41] = np.inf
    check("bwd_3_mma", case, tiles=ONE_STAGE)


@pytest.mark.parametrize(
    ("features", "deterministic"),
    [(("dropout",), False), (("softcap", "dbias"), False), (EVERYTHING, True)],
)
def test_warps_that_share_rows(rng, features, deterministic):
    case = cases.draw_case(rng, "float16", features, seqlen_q=70, seqlen_k=90, **cases.SIZES)
    check("bwd_3_mma", case, tiles=SHARED_ROWS, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_warps_of_eight_columns(rng, deterministic):
    """Of which two share the random words of a row."""
    case = cases.draw_case(rng, "float64", ("dropout",), seqlen_q=70, seqlen_k=90, **cases.SIZES)
    check("bwd_3_mma", case, tiles=EIGHT_COLUMNS, deterministic=deterministic)


@pytest.mark.parametrize(
    ("dtype", "tiles", "features", "deterministic"),
    [
        ("bfloat16", SHARED_ROWS, {"packed", "seqused_k", "causal", "dbias"}, True),
        ("float64", TILES["bwd_3_mma"], {"mask", "seqused_k", "sink"}, False),
    ],
)
def test_heads_that_share_keys_in_parts(rng, dtype, tiles, features, deterministic):
    lengths = {"seqlen_q": 40, "seqlen_k": 90, "heads": 4, "kv_heads": 1, "head_dim": 24, "head_dim_v": 13}
    case = cases.draw_case(rng, dtype, features, **lengths)
    check("bwd_3_mma", case, tiles={**tiles, "head_parts": 2}, deterministic=deterministic)


@pytest.mark.parametrize(
    ("kernel", "dtype", "features", "deterministic"),
    [
        *((*ONE_DTYPE[0], features, False) for features in ((), ("mask_bits", "causal"))),
        (*ONE_DTYPE[0], EVERYTHING, True),
        (*ONE_DTYPE[1], (), False),
        (*ONE_DTYPE[1], ("mask_bits", "causal"), True),
        (*ONE_DTYPE[1], EVERYTHING, False),
    ],
)
def test_the_tiles_that_the_plan_chooses(rng, kernel, dtype, features, deterministic):
    case = cases.draw_case(rng, dtype, features, seqlen_q=150, seqlen_k=170, batch=1, **cases.SIZES)
    check(kernel, case, tiles=None, checked=False, deterministic=deterministic)


def test_strides_of_bias_and_mask(rng):
    """Rows and heads of a larger array."""
    case = cases.draw_case(rng, "float16", ["dbias", "mask"], seqlen_q=33, seqlen_k=40, **cases.SIZES)
    cases.widen_score_arrays(rng, case)
    for kernel in TILES:
        gradients = run(kernel, case)
        assert_gradients(gradients, case.problem, **case.backward)
