"""Probabilities on request: on the CPU, in the emulator, and, where there is one, on a GPU."""

import itertools
import logging
from unittest import mock

import numpy as np
import pytest
from emulator import calls
from feature_cases import FORWARD_FEATURES, draw_case, feature_id, hide_nan, pairwise, sets_of
from tolerance import DTYPES

import cufa
from cufa import reference
from cufa.checking import judge
from cufa.cpu import tiles

FEATURES = tuple(name for name in FORWARD_FEATURES if name != "packed")
SETS = sets_of(FEATURES)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-13}


@pytest.fixture(autouse=True)
def small_tiles():
    with mock.patch.multiple(tiles, Q_TILE=7, KV_TILE=10):
        yield


def draw(rng, dtype, features, seqlen_q=39, seqlen_k=53, **options):
    case = draw_case(rng, dtype, features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options)
    hide_nan(case)
    return case


def exact(case):
    """What attention gives for values that are the unit matrix."""
    problem = case.problem
    batch, seqlen_k, kv_heads, _ = problem.k.shape
    if "block_table" in case.arrays:
        units = units_in_pages(problem.k, case.arrays["block_table"])
    else:
        units = np.broadcast_to(np.eye(seqlen_k)[:, None], (batch, seqlen_k, kv_heads, seqlen_k))
    dtype = judge(problem.dtype_name)
    out, lse = reference.attention(problem.q, problem.k, units, **case.forward, dtype=dtype)
    return out.transpose(0, 2, 1, 3), lse


def units_in_pages(k, table):
    """The unit matrix of each sequence, in the pages that are there."""
    count, page_size, kv_heads, _ = k.shape
    room = table.shape[1] * page_size
    units = np.zeros((count, page_size, kv_heads, room))
    in_pages = np.eye(room).reshape(-1, page_size, 1, room)
    for entries in table:
        there = (entries >= 0) & (entries < count)
        units[entries[there]] = in_pages[there]
    return units


def assert_probabilities(actual, case):
    expected, _ = exact(case)
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[case.problem.dtype_name]
    np.testing.assert_allclose(actual.astype(expected.dtype), expected, rtol=tolerance, atol=tolerance)
    assert (actual[expected == 0] == 0).all()


@pytest.mark.parametrize("features", SETS, ids=feature_id)
def test_on_the_cpu(rng, features):
    for dtype in DTYPES:
        case = draw(rng, dtype, features)
        inputs = case.problem.q, case.problem.k, case.problem.v
        out, lse, probs = cufa.attention(*inputs, **case.forward, return_attn_probs=True, backend="numpy")
        assert probs.dtype == out.dtype
        assert_probabilities(probs, case)
        expected = cufa.attention(*inputs, **case.forward, return_lse=True, backend="numpy")
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])


def test_keys_that_are_not_seen_have_none_beside_nan_that_is(rng):
    problem = draw(rng, "float32", (), seqlen_q=30, seqlen_k=30).problem
    problem.k[:, 20] = np.nan
    *_, probs = cufa.attention(
        problem.q, problem.k, problem.v, causal=True, return_attn_probs=True, backend="numpy"
    )
    assert np.isnan(probs[:, :, 20:, 20]).all()
    assert (probs[:, :, 22, 23:] == 0).all()
    options = {"dropout_p": 0.5, "seed": 3, "return_attn_probs": True, "backend": "numpy"}
    *_, probs = cufa.attention(problem.q, problem.k, problem.v, **options)
    assert ((probs == 0) | np.isnan(probs)).all()
    assert 0.4 < (probs == 0).mean() < 0.6  # those that are dropped


@pytest.mark.parametrize("lengths", [(300, 600), (1, 1), (0, 3), (3, 0)])
def test_lengths(rng, lengths):
    case = draw(rng, "float32", ["causal"], *lengths)
    inputs = case.problem.q, case.problem.k, case.problem.v
    *_, probs = cufa.attention(*inputs, causal=True, return_attn_probs=True, backend="numpy")
    assert_probabilities(probs, case)


def test_layouts_have_the_same(rng):
    case = draw(rng, "float32", ["mask"])
    inputs = case.problem.q, case.problem.k, case.problem.v
    transposed = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in inputs)
    options = {**case.forward, "return_attn_probs": True, "backend": "numpy"}
    *_, probs = cufa.attention(*inputs, **options)
    *_, other = cufa.attention(*transposed, **options, layout="bhsd")
    np.testing.assert_array_equal(probs, other)


def test_their_memory_is_logged(rng, caplog):
    case = draw(rng, "float16", [], 30, 40, batch=2, heads=4)
    with caplog.at_level(logging.INFO, "cufa"):
        cufa.attention(
            case.problem.q, case.problem.k, case.problem.v, return_attn_probs=True, backend="numpy"
        )
    assert "attn_probs takes 19,200 bytes" in caplog.text


def test_packed_sequences_have_none(rng):
    case = draw_case(rng, "float32", ["packed"], seqlen_q=10, seqlen_k=12)
    inputs = case.problem.q, case.problem.k, case.problem.v
    with pytest.raises(
        ValueError, match=r"return_attn_probs is True, and cu_seqlens_q is given; .* no array"
    ):
        cufa.attention(*inputs, **case.forward, return_attn_probs=True, backend="numpy")


# Each set with one dtype, in turn: compiling takes most of the time.
@pytest.mark.parametrize(
    ("features", "dtype"),
    list(zip(pairwise(FEATURES), itertools.cycle(("float16", "float32", "float64")), strict=False)),
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else value,
)
@pytest.mark.emulator
def test_in_the_emulator(rng, features, dtype):
    for lengths in ((139, 70), (1, 65), (0, 3), (3, 0)):
        case = draw(rng, dtype, features, *lengths, heads=2, kv_heads=1, head_dim=24)
        inputs = case.problem.q, case.problem.k, case.problem.v
        lse = exact(case)[1].astype(np.float64 if dtype == "float64" else np.float32)
        assert_probabilities(calls.attn_probs(*inputs, lse, **case.emulator_forward, checked=False), case)


@pytest.mark.emulator
def test_every_access_in_the_emulator(rng):
    """Also of rows that are NaN: only those of keys that they see are."""
    case = draw(rng, "float32", ["window", "mask", "sink"], 70, 75, heads=2, kv_heads=1, head_dim=21)
    inputs = case.problem.q, case.problem.k, case.problem.v
    lse = exact(case)[1].astype(np.float32)
    assert_probabilities(calls.attn_probs(*inputs, lse, **case.emulator_forward), case)
    inputs[0][:, ::3] = np.nan
    _, lse, expected = cufa.attention(*inputs, **case.forward, return_attn_probs=True, backend="numpy")
    assert np.isnan(expected).any()
    probs = calls.attn_probs(*inputs, lse, **case.emulator_forward)
    np.testing.assert_array_equal(np.isnan(probs), np.isnan(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rng, dtype, layout):
    cupy = pytest.importorskip("cupy")
    for features in SETS:
        case = draw(rng, dtype, features, 139, 203, head_dim=40)
        order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
        inputs = [cupy.asarray(x.transpose(order)) for x in (case.problem.q, case.problem.k, case.problem.v)]
        arrays = {name: cupy.asarray(array) for name, array in case.arrays.items()}
        *_, probs = cufa.attention(*inputs, **case.numbers, **arrays, layout=layout, return_attn_probs=True)
        assert_probabilities(probs.get(), case)
