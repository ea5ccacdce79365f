"""Partial results made one: on the CPU, in the emulator, and, where there is one, on a GPU."""

import re

import ml_dtypes
import numpy as np
import pytest
from emulator import calls

import cufa
from cufa import reference
from cufa.problem import accumulator_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPE = (2, 13, 3, 24)  # batch, seqlen, heads, value_dim
EMULATED = pytest.mark.emulator


def parts(rng, dtype, shape=SHAPE):
    """Outputs of attention over two halves of the keys, with rows that saw none of one half or of both."""
    batch, seqlen, heads, dim = shape
    q, k, v = (rng.standard_normal((batch, n, heads, dim)).astype(dtype) for n in (seqlen, 30, 30))
    results = []
    for keys in (slice(0, 11), slice(11, 30)):
        out, lse = reference.attention(q, k[:, keys], v[:, keys], dtype=np.longdouble)
        results += [out.astype(dtype), lse.astype(accumulator_dtype(dtype))]
    (out_a, lse_a, out_b, lse_b), (whole, whole_lse) = (
        results,
        reference.attention(q, k, v, dtype=np.longdouble),
    )
    for part, part_lse, rows in ((out_a, lse_a, slice(3, 6)), (out_b, lse_b, slice(5, 8))):
        part[:, rows], part_lse[:, :, rows] = np.nan, -np.inf
    for rows, part, part_lse in ((slice(3, 5), out_b, lse_b), (slice(6, 8), out_a, lse_a)):
        whole[:, rows], whole_lse[:, :, rows] = part[:, rows], part_lse[:, :, rows]
    whole[:, 5], whole_lse[:, :, 5] = 0, -np.inf
    return results, whole, whole_lse


def assert_merged(out, lse, whole, whole_lse):
    """Parts and results are rounded; an LSE off by a rounding moves its weight by as much, relatively."""
    for actual, exact in ((out, whole), (lse, whole_lse)):
        epsilon = max(ml_dtypes.finfo(out.dtype).eps * (actual is out), ml_dtypes.finfo(lse.dtype).eps)
        actual, exact = actual.astype(np.longdouble), exact.astype(np.longdouble)
        np.testing.assert_allclose(actual, exact, rtol=16 * float(epsilon), atol=16 * float(epsilon))


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_cpu(rng, dtype):
    given, whole, whole_lse = parts(rng, dtype)
    assert_merged(*cufa.merge(*given, backend="numpy"), whole, whole_lse)


@pytest.mark.parametrize("lse", [-5e4, 1e9])
@pytest.mark.parametrize(
    "merge", [lambda *given: cufa.merge(*given, backend="numpy"), pytest.param(calls.merge, marks=EMULATED)]
)
def test_an_lse_too_large_to_hold_a_logarithm_beside_it(rng, merge, lse):
    """Keys that a bias of -1e9 hides in a row that sees no others: parts weigh as much as their LSEs say."""
    out_a, out_b = rng.standard_normal((2, *SHAPE), dtype=np.float32)
    batch, seqlen, heads, _ = SHAPE
    lses = np.full((batch, heads, seqlen), lse, np.float32)
    merged, _ = merge(out_a, lses, out_b, lses)
    np.testing.assert_allclose(merged, (out_a + out_b) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.emulator
def test_in_the_emulator(rng, dtype):
    for shape in (SHAPE, (1, 5, 2, 33)):
        given, whole, whole_lse = parts(rng, dtype, (shape[0], max(shape[1], 9), *shape[2:]))
        with np.errstate(invalid="ignore"):
            out, lse = calls.merge(*given)
            assert_merged(out, lse, whole, whole_lse)
            for merged, again in zip((out, lse), calls.merge(*given, in_place=True), strict=True):
                np.testing.assert_array_equal(merged, again)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rng, dtype, layout):
    import cupy

    (out_a, lse_a, out_b, lse_b), whole, whole_lse = parts(rng, dtype)
    if layout == "bhsd":
        out_a, out_b, whole = (x.transpose(0, 2, 1, 3) for x in (out_a, out_b, whole))
    elif layout == "packed":
        out_a, out_b, whole, lse_a, lse_b, whole_lse = (
            x[0] for x in (out_a, out_b, whole, lse_a, lse_b, whole_lse)
        )
    on_gpu = [cupy.asarray(x) for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = cufa.merge(*on_gpu, layout="bhsd" if layout == "bhsd" else "bshd")
    assert_merged(out.get(), lse.get(), whole, whole_lse)


def test_packed_and_bhsd_are_the_same_numbers(rng):
    (out_a, lse_a, out_b, lse_b), _, _ = parts(rng, "float32")
    out, lse = cufa.merge(out_a, lse_a, out_b, lse_b, backend="numpy")
    turned, _ = cufa.merge(
        *(out_a.transpose(0, 2, 1, 3), lse_a, out_b.transpose(0, 2, 1, 3), lse_b),
        layout="bhsd",
        backend="numpy",
    )
    np.testing.assert_array_equal(turned, out.transpose(0, 2, 1, 3))
    packed, packed_lse = cufa.merge(out_a[1], lse_a[1], out_b[1], lse_b[1], backend="numpy")
    np.testing.assert_array_equal(packed, out[1])
    np.testing.assert_array_equal(packed_lse, lse[1])


def scattered(xp, array):
    """Room for the same, of which every other element along the last axis is something else's."""
    return xp.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]


# Where results may be written to, by the array module and the outputs and LSEs of a and b.
GIVEN = {
    "new arrays": lambda xp, out, lse, *b: (xp.full_like(out, 7), xp.full_like(lse, 7)),
    "in place of a": lambda xp, out, lse, *b: (out, lse),
    "in place of b": lambda xp, out_a, lse_a, out, lse: (out, lse),
    "scattered": lambda xp, out, lse, *b: (scattered(xp, out), scattered(xp, lse)),
}


def check_given(xp, where, given):
    given = [xp.asarray(x) for x in given]
    wanted = cufa.merge(*given)
    out, lse = GIVEN[where](xp, *given)
    merged, merged_lse = cufa.merge(*given, out=out, lse=lse)
    assert merged is out
    assert merged_lse is lse
    xp.testing.assert_array_equal(out, wanted[0])
    xp.testing.assert_array_equal(lse, wanted[1])


@pytest.mark.parametrize("where", GIVEN)
def test_outputs_that_are_given(rng, where):
    check_given(np, where, parts(rng, "float32")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("where", GIVEN)
def test_outputs_that_are_given_on_a_gpu(rng, where):
    import cupy

    check_given(cupy, where, parts(rng, "float16")[0])


@pytest.mark.gpu
def test_nothing_is_allocated_on_a_gpu_for_outputs_that_are_given(rng):
    import cupy

    def refuse(size):
        raise AssertionError(f"{size} bytes are allocated")

    given = [cupy.asarray(x) for x in parts(rng, "float16")[0]]
    cufa.merge(*given)  # compiles
    with cupy.cuda.using_allocator(refuse):
        cufa.merge(*given, out=given[0], lse=given[1])


@pytest.mark.parametrize(
    ("name", "output", "says"),
    [
        ("out", lambda out, lse: out[:, ::-1], "out overlaps out_a in memory; it must not"),
        ("out", lambda out, lse: out[:, 1:], "out has shape (2, 12, 3, 24); it must be (2, 13, 3, 24)"),
        (
            "out",
            lambda out, lse: np.broadcast_to(out[:1], out.shape),
            "out is read-only; it must be writeable",
        ),
        ("lse", lambda out, lse: lse[:, ::-1], "lse overlaps lse_a in memory; it must not"),
        (
            "lse",
            lambda out, lse: out.reshape(-1)[: lse.size].reshape(lse.shape),
            "lse overlaps out_a in memory",
        ),
    ],
)
def test_outputs_that_cannot_be_written(rng, name, output, says):
    given, _, _ = parts(rng, "float32")
    with pytest.raises(ValueError, match=re.escape(says)):
        cufa.merge(*given, **{name: output(*given[:2])}, backend="numpy")


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        (
            "out_b",
            lambda x: x[:, 1:],
            ValueError,
            "out_b has shape (2, 12, 3, 24); it must be (2, 13, 3, 24)",
        ),
        ("lse_a", lambda x: x[..., 1:], ValueError, "lse_a has shape (2, 3, 12); it must be (2, 3, 13)"),
        ("lse_b", lambda x: x.astype(np.float64), TypeError, "lse_b has dtype float64; it must be float32"),
        ("out_b", lambda x: x.astype(np.float16), TypeError, "out_b has dtype float16; it must be float32"),
        ("out_a", lambda x: x[0, 0], ValueError, "out_a has shape (3, 24); it must have 4 axes, or 3 if"),
        ("out_a", lambda x: x[..., :0], ValueError, "out_a has shape (2, 13, 3, 0); the value dim"),
        (
            "out_a",
            lambda x: np.broadcast_to(x[:, :1], (2, 2**31, 3, 24)),
            ValueError,
            "out_a has shape (2, 2147483648, 3, 24); no axis may exceed 2147450879",
        ),
        ("out_a", lambda x: np.zeros(x.shape, int), TypeError, "out_a has dtype int64; it may be float16"),
    ],
)
def test_what_does_not_go_together(rng, name, change, error, says):
    names = ("out_a", "lse_a", "out_b", "lse_b")
    given = dict(zip(names, parts(rng, "float32")[0], strict=True))
    given[name] = change(given[name])
    with pytest.raises(error) as caught:
        cufa.merge(**given, backend="numpy")
    assert says in str(caught.value)


def test_an_arch_is_refused_on_the_cpu(rng):
    with pytest.raises(ValueError, match=r"^arch is 'sm_90a', but this call computes on the CPU"):
        cufa.merge(*parts(rng, "float32")[0], arch="sm_90a", backend="numpy")


def test_no_rows():
    out = np.zeros((2, 0, 3, 8), np.float32)
    lse = np.zeros((2, 3, 0), np.float32)
    merged, merged_lse = cufa.merge(out, lse, out, lse)
    assert merged.shape == out.shape
    assert merged_lse.shape == lse.shape
