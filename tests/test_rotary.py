"""Rotary position embedding: on the CPU, in the emulator, and, where there is one, on a GPU."""

import re

import ml_dtypes
import numpy as np
import pytest
from emulator import calls

import cufa
from cufa.problem import accumulator_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPE = (2, 7, 3, 24)  # batch, seqlen, heads, head_dim
PLACES = 40


def draw(rng, dtype, rotary_dim, shape=SHAPE, wide=True):
    """x, cos and sin; those of x's dtype or of that of sums."""
    table = accumulator_dtype(dtype) if wide else dtype
    angles = rng.uniform(-np.pi, np.pi, (PLACES, rotary_dim // 2))
    return (
        rng.standard_normal(shape).astype(dtype),
        np.cos(angles).astype(table),
        np.sin(angles).astype(table),
    )


def turned(x, cos, sin, positions=None, interleaved=False):
    """The same by complex numbers, of which a pair is one."""
    wide = x.astype(np.longdouble)
    pairs = cos.shape[1]
    if positions is None:
        positions = np.arange(x.shape[1])[None]
    factors = (cos.astype(np.longdouble) + 1j * sin.astype(np.longdouble))[positions][..., None, :]
    columns = np.arange(2 * pairs).reshape((pairs, 2) if interleaved else (2, pairs))
    real, imaginary = columns.T if interleaved else columns
    result = (wide[..., real] + 1j * wide[..., imaginary]) * factors
    wide[..., real], wide[..., imaginary] = result.real, result.imag
    return wide


def assert_turned(actual, exact):
    """Sums are rounded, and then results are: sums of two products of which each is at most the largest x."""
    epsilon = float(
        max(ml_dtypes.finfo(actual.dtype).eps, 4 * ml_dtypes.finfo(accumulator_dtype(actual.dtype.name)).eps)
    )
    np.testing.assert_allclose(actual.astype(np.longdouble), exact, rtol=epsilon, atol=epsilon)


def some_positions(rng, dtype="int32", shape=SHAPE[:2]):
    return rng.integers(0, PLACES, shape).astype(dtype)


# rotary_dim, what is interleaved, whether positions are given, whether cos is wider than x
CASES = [(24, False, True, True), (8, True, True, False), (10, True, False, True), (16, False, False, False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu(rng, dtype, case):
    rotary_dim, interleaved, placed, wide = case
    given = draw(rng, dtype, rotary_dim, wide=wide)
    positions = some_positions(rng) if placed else None
    out = cufa.rotary(*given, positions=positions, interleaved=interleaved, backend="numpy")
    assert out.dtype == given[0].dtype
    assert_turned(out, turned(*given, positions, interleaved))


@pytest.mark.emulator
@pytest.mark.parametrize(("dtype", "case"), list(zip(DTYPES, CASES, strict=True)), ids=str)
def test_in_the_emulator(rng, dtype, case):
    rotary_dim, interleaved, placed, wide = case
    given = draw(rng, dtype, rotary_dim, wide=wide)
    positions = some_positions(rng, "int64") if placed else None
    out = calls.rotary(*given, positions, interleaved)
    assert_turned(out, turned(*given, positions, interleaved))
    np.testing.assert_array_equal(calls.rotary(*given, positions, interleaved, in_place=True), out)


@pytest.mark.emulator
def test_places_that_are_not_there_become_nan(rng):
    given = draw(rng, "float16", 8)
    positions = some_positions(rng)
    positions[0, 1], positions[1, 2] = -1, PLACES
    out = calls.rotary(*given, positions)
    lost = np.isnan(out).any((2, 3))
    assert sorted(zip(*np.nonzero(lost), strict=True)) == [(0, 1), (1, 2)]
    assert np.isnan(out[0, 1, :, :8]).all()
    np.testing.assert_array_equal(out[..., 8:], given[0][..., 8:])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rng, dtype, layout):
    import cupy

    for rotary_dim, interleaved, placed, wide in CASES:
        x, cos, sin = draw(rng, dtype, rotary_dim, wide=wide)
        positions = some_positions(rng) if placed or layout == "packed" else None
        exact = turned(x, cos, sin, positions, interleaved)
        if layout == "bhsd":
            x, exact = (each.transpose(0, 2, 1, 3) for each in (x, exact))
        elif layout == "packed":
            x, exact, positions = x[1], exact[1], positions[1]
        on_gpu = [cupy.asarray(each) for each in (x, cos, sin)]
        options = {
            "positions": None if positions is None else cupy.asarray(positions),
            "interleaved": interleaved,
            "layout": "bhsd" if layout == "bhsd" else "bshd",
        }
        out = cufa.rotary(*on_gpu, **options)
        assert_turned(out.get(), exact)
        assert cufa.rotary(*on_gpu, **options, out=on_gpu[0]) is on_gpu[0]
        cupy.testing.assert_array_equal(on_gpu[0], out)


def test_positions_of_all_sequences_or_tokens_alike(rng):
    given = draw(rng, "float32", 8)
    positions = some_positions(rng)
    for part in (positions[:1], positions[:, :1]):
        out = cufa.rotary(*given, positions=part, backend="numpy")
        whole = np.broadcast_to(part, SHAPE[:2])
        np.testing.assert_array_equal(out, cufa.rotary(*given, positions=whole, backend="numpy"))


def test_layouts_are_the_same_numbers(rng):
    x, cos, sin = draw(rng, "float32", 8)
    positions = some_positions(rng)
    out = cufa.rotary(x, cos, sin, positions=positions, backend="numpy")
    bhsd = cufa.rotary(x.transpose(0, 2, 1, 3), cos, sin, positions=positions, layout="bhsd", backend="numpy")
    np.testing.assert_array_equal(bhsd.transpose(0, 2, 1, 3), out)
    packed = cufa.rotary(x[1], cos, sin, positions=positions[1], backend="numpy")
    np.testing.assert_array_equal(packed, out[1])


def test_nothing_to_turn():
    cos = np.ones((4, 2), np.float32)
    empty = np.empty((0, 3, 2, 8), np.float32)
    assert cufa.rotary(empty, cos, cos, positions=np.array([[9, 9, 9]])).shape == empty.shape


def test_the_gradient_is_the_turn_back(rng):
    x, cos, sin = draw(rng, "float64", 24)
    out = cufa.rotary(x, cos, sin, backend="numpy")
    np.testing.assert_allclose(cufa.rotary(out, cos, -sin, backend="numpy"), x, rtol=1e-12)


@pytest.mark.parametrize("rotary_dim", [16, 24])
def test_hugging_faces_tables(rng, rotary_dim):
    """They have each angle twice, for columns that lie half of rotary_dim apart."""
    x, *halves = draw(rng, "float32", rotary_dim)
    cos, sin = (np.concatenate([table, table], axis=1) for table in halves)
    front, back, rest = np.split(x, [rotary_dim // 2, rotary_dim], axis=-1)
    of_tokens = (table[: x.shape[1], None] for table in (cos, sin))
    columns = np.concatenate([front, back], axis=-1), np.concatenate([-back, front], axis=-1)
    exact = sum(part * table for part, table in zip(columns, of_tokens, strict=True))
    out = cufa.rotary(x, cos[:, : rotary_dim // 2], sin[:, : rotary_dim // 2])
    np.testing.assert_allclose(out, np.concatenate([exact, rest], axis=-1), rtol=1e-6, atol=1e-6)


def test_in_place(rng):
    x, cos, sin = draw(rng, "float32", 8)
    wanted = cufa.rotary(x, cos, sin)
    assert cufa.rotary(x, cos, sin, out=x) is x
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": np.zeros(SHAPE[1:], np.float32)}, ValueError, "positions must be given for packed sequences"),
        ({"x": np.zeros(5, np.float32)}, ValueError, "x has shape (5,); it must have 4 axes, or 3 if"),
        ({"cos": np.zeros((PLACES, 13), np.float32)}, ValueError, "with an even rotary_dim of at most 24"),
        (
            {"cos": np.zeros((PLACES, 24), np.float32)},
            ValueError,
            "; of a table that has each angle twice, as Hugging Face's, give cos[:, :rotary_dim // 2]",
        ),
        ({"cos": np.zeros((PLACES, 4), ">f4")}, TypeError, "must be float32, in the machine's byte order"),
        ({"sin": np.zeros((PLACES, 4), ">f4")}, TypeError, "as cos is, in the machine's byte order"),
        ({"positions": np.zeros((2, 7), ">i4")}, TypeError, "int32 or int64, in the machine's byte order"),
        (
            {"cos": np.zeros((6, 4), np.float32), "sin": np.zeros((6, 4), np.float32)},
            ValueError,
            "cos has 6 places, and x has 7",
        ),
        ({"sin": np.zeros((PLACES, 3), np.float32)}, ValueError, "sin has shape (40, 3); it must be (40, 4)"),
        ({"sin": np.zeros((PLACES, 4))}, TypeError, "sin has dtype float64; it must be float32, as cos is"),
        ({"cos": np.zeros((PLACES, 4))}, TypeError, "cos has dtype float64; for float32 it must be float32"),
        (
            {"positions": np.zeros((2, 6), np.int32)},
            ValueError,
            "positions has shape (2, 6); it must be (2, 7)",
        ),
        ({"positions": np.zeros(1, np.int32)}, ValueError, "positions has shape (1,); it must be (2, 7)"),
        (
            {"positions": np.zeros((2, 7, 1), np.int32)},
            ValueError,
            "positions has shape (2, 7, 1); it must be",
        ),
        ({"positions": np.zeros((2, 7))}, TypeError, "positions has dtype float64; it may be int32 or int64"),
        ({"interleaved": "no"}, TypeError, "interleaved is 'no'; it may be True or False"),
        ({"positions": np.full((2, 7), 40)}, ValueError, "positions are from 40 to 40; cos has 40 places"),
        ({"positions": np.arange(-1, 6)[None]}, ValueError, "positions are from -1 to 5; cos has 40 places"),
        ({"cos": np.zeros((PLACES, 0), np.float32)}, ValueError, "cos has shape (40, 0); it must be"),
        (
            dict.fromkeys(("cos", "sin"), np.broadcast_to(np.float32(1), (2**31, 4))),
            ValueError,
            "cos has shape (2147483648, 4); no axis may exceed",
        ),
        ({"arch": "sm_90a"}, ValueError, "arch is 'sm_90a', but this call computes on the CPU"),
        ({"out": np.zeros((2, 7, 3, 8), np.float32)}, ValueError, "out has shape (2, 7, 3, 8); it must be"),
        ({"out": np.zeros(SHAPE)}, TypeError, "out has dtype float64; it must be float32"),
    ],
)
def test_what_does_not_go_together(rng, change, error, says):
    given = dict(zip(("x", "cos", "sin"), draw(rng, "float32", 8), strict=True))
    with pytest.raises(error, match=re.escape(says)):
        cufa.rotary(**(given | change), backend="numpy")
