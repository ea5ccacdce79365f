"""Arrays in 8 bits: on the CPU, in the emulator, and, where there is one, on a GPU."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from emulator import calls
from gpu_calls import captured, skip_unless_the_driver_reads_ptx
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cufa
from cufa.problem import accumulator_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448
SHAPE = (2, 70, 6, 24)  # batch, seqlen, heads, head_dim
STARTS = np.array([1, 1, 18, 60], np.int32)  # packed sequences, of which the first is empty


def draw(rng, dtype, shape=SHAPE):
    """Heads of different sizes, and here and there NaN and infinity."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 6, (shape[-2], 1)))
    x[rng.random(shape) < 0.01] = np.nan
    x[rng.random(shape) < 0.01] = -np.inf
    x[..., 2, :] = 0
    return x.astype(dtype)


def exact_descale(x, kv_heads):
    """Of one sequence, (seqlen, heads, head_dim)."""
    tokens, heads, head_dim = x.shape
    wide = x.astype(np.float64).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    largest = np.where(np.isfinite(wide), abs(wide), 0).max(axis=(0, 2, 3), initial=0)
    return np.where(largest == 0, 1, largest / LARGEST)


def assert_quantized(out, descale, x, given=None):
    """Of batches; elements are those of NumPy's rounding, but for the sign of NaN."""
    assert (out.dtype, out.shape, descale.dtype) == (E4M3, x.shape, np.float32)
    kv_heads = descale.shape[1]
    if given is None:
        np.testing.assert_allclose(descale, [exact_descale(part, kv_heads) for part in x], rtol=1e-6)
    else:
        np.testing.assert_array_equal(descale, given)
    by_head = np.repeat(descale, x.shape[2] // kv_heads, axis=1)[:, None, :, None]
    wide = accumulator_dtype(x.dtype.name)
    units = x.astype(wide) * (1 / by_head.astype(wide))
    nearest = np.clip(units, -LARGEST, LARGEST).astype(np.float32).astype(E4M3)
    assert_same(out, nearest)


def assert_same(actual, wanted):
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    np.testing.assert_array_equal(actual.view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])


def some_descale(rng, kv_heads, batch=SHAPE[0]):
    return rng.uniform(0.001, 0.1, (batch, kv_heads)).astype(np.float32)


# kv_heads, whether tokens lie next to each other, whether descales are given
CASES = [(6, False, False), (2, False, True), (3, True, False), (1, True, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu(rng, dtype, case):
    kv_heads, seqlen_contiguous, static = case
    x = draw(rng, dtype)
    given = some_descale(rng, kv_heads) if static else None
    options = {"kv_heads": kv_heads, "seqlen_contiguous": seqlen_contiguous, "descale": given}
    out, descale = cufa.quantize(x, **options, backend="numpy")
    assert_quantized(out, descale, x, given)
    assert (descale is given) == static
    assert out.strides[1 if seqlen_contiguous else 3] == 1
    if seqlen_contiguous:
        assert all(stride % 16 == 0 for axis, stride in enumerate(out.strides) if axis != 1)


@pytest.mark.emulator
@pytest.mark.parametrize(("dtype", "case"), list(zip(DTYPES, CASES, strict=True)), ids=str)
def test_in_the_emulator(rng, dtype, case):
    kv_heads, seqlen_contiguous, static = case
    x = draw(rng, dtype)
    given = some_descale(rng, kv_heads) if static else None
    assert_quantized(*calls.quantize(x, kv_heads, given, seqlen_contiguous=seqlen_contiguous), x, given)


@pytest.mark.emulator
@pytest.mark.parametrize("seqlen_contiguous", [False, True])
@pytest.mark.parametrize("shape", [(1, 300, 1, 128), (1, 33, 2, 7), (2, 5, 1, 510), (3, 1, 1, 1)])
def test_shapes_in_the_emulator(rng, shape, seqlen_contiguous):
    x = rng.standard_normal(shape).astype("bfloat16")
    assert_quantized(*calls.quantize(x, shape[2], seqlen_contiguous=seqlen_contiguous), x)


def assert_packed(rng, quantize):
    x = draw(rng, "float16", (65, *SHAPE[2:]))
    out, descale = quantize(x, kv_heads=3, cu_seqlens=STARTS)
    assert descale.shape == (len(STARTS) - 1, 3)
    np.testing.assert_array_equal(descale[0], 1)
    for number, (begin, end) in enumerate(itertools.pairwise(STARTS)):
        assert_quantized(out[None, begin:end], descale[number : number + 1], x[None, begin:end])


def test_packed_sequences_on_the_cpu(rng):
    assert_packed(rng, lambda *x, **options: cufa.quantize(*x, **options, backend="numpy"))


@pytest.mark.emulator
def test_packed_sequences_in_the_emulator(rng):
    assert_packed(rng, calls.quantize)


@drawn(hnp.arrays(np.float32, (1, 3, 2, 4), elements=st.floats(width=32)))
@settings(deadline=None)
def test_what_holds_for_any_array(x):
    out, descale = cufa.quantize(x, backend="numpy")
    elements, units = out.astype(np.float64), descale.astype(np.float64)[:, None, :, None]
    assert (np.isfinite(descale) & (descale > 0)).all()
    np.testing.assert_array_equal(np.isnan(elements), np.isnan(x))
    assert (abs(elements[~np.isnan(x)]) <= LARGEST).all()
    # Three bits of mantissa, or the last place of subnormals.
    held = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        off = abs(elements * units - x)
        allowed = np.maximum(abs(x) * 2.0**-4, units * 2.0**-10)
    assert (off <= allowed * (1 + 1e-6))[held].all()
    again, same = cufa.quantize(elements * units, descale=descale, backend="numpy")
    assert same is descale
    assert_same(again, out)


@drawn(
    hnp.arrays(np.float32, (1, 3, 2, 4), elements=st.floats(-1e9, 1e9, width=32, allow_subnormal=False)),
    st.integers(-20, 20),
)
@settings(deadline=None)
def test_a_power_of_two_is_in_the_descale_alone(x, factor):
    x = np.where(abs(x) < 1e-9, 0, x)
    out, descale = cufa.quantize(x, backend="numpy")
    larger, its_descale = cufa.quantize(np.ldexp(x, factor), backend="numpy")
    assert_same(larger, out)
    zero = (x == 0).all(axis=(1, 3))
    np.testing.assert_array_equal(its_descale, np.where(zero, 1, np.ldexp(descale, factor)))


def test_numbers_out_of_range_raise_no_floating_point_error():
    x = np.array([np.inf, -np.inf, np.nan, 1e38, 1e-45, 0], np.float32).reshape(1, 1, 1, 6)
    with np.errstate(all="raise"):
        for descale in (None, np.full((1, 1), 1.2e-38, np.float32)):
            cufa.quantize(x, descale=descale, backend="numpy")


def test_layouts_are_the_same_numbers(rng):
    x = draw(rng, "float32")
    out, descale = cufa.quantize(x, kv_heads=2, backend="numpy")
    for seqlen_contiguous in (False, True):
        options = {"layout": "bhsd", "seqlen_contiguous": seqlen_contiguous, "kv_heads": 2}
        bhsd, same = cufa.quantize(x.transpose(0, 2, 1, 3), **options, backend="numpy")
        assert bhsd.strides[2 if seqlen_contiguous else 3] == 1
        assert_same(bhsd.transpose(0, 2, 1, 3), out)
        np.testing.assert_array_equal(same, descale)


def test_into_what_is_given(rng):
    x = draw(rng, "float32")
    wanted, _ = cufa.quantize(x, backend="numpy")
    out = np.zeros(SHAPE, E4M3)
    assert cufa.quantize(x, out=out, backend="numpy")[0] is out
    assert_same(out, wanted)


def test_nothing_at_all():
    for shape in ((2, 0, 3, 8), (0, 5, 3, 8), (2, 5, 0, 8)):
        out, descale = cufa.quantize(np.zeros(shape, np.float32), backend="numpy")
        assert (out.shape, descale.shape) == (shape, (shape[0], shape[2]))
        np.testing.assert_array_equal(descale, 1)


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    x = draw(rng, "float32")
    out, descale = cufa.quantize(torch.from_numpy(x), seqlen_contiguous=True, backend="numpy")
    assert (out.dtype, descale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert_quantized(out.view(torch.uint8).numpy().view(E4M3), descale.numpy(), x)


def test_attention_of_it(rng):
    """Within what 8 bits are off, by descales of the heads that share a KV head."""
    sizes = np.exp2(np.arange(3) * 6 - 6)[:, None]
    q, k, v = (rng.standard_normal((2, 60, heads, 32)).astype(np.float32) for heads in (6, 3, 3))
    v *= sizes
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = (
        cufa.quantize(x, kv_heads=3, seqlen_contiguous=x is v, backend="numpy") for x in (q, k, v)
    )
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out = cufa.attention(q8, k8, v8, **descales, causal=True, backend="numpy").astype(np.float32)
    expected = cufa.attention(q, k, v, causal=True, backend="numpy")
    squares = (((out - expected) ** 2).mean((0, 1, 3)), (expected**2).mean((0, 1, 3)))
    assert (np.sqrt(squares[0] / squares[1]) < 0.06).all()


def test_descales_of_query_heads_are_not_those_of_kv_heads(rng):
    q, k = (rng.standard_normal((2, 4, heads, 32)).astype(np.float32) for heads in (6, 3))
    (q8, q_descale), (k8, _) = (cufa.quantize(x, backend="numpy") for x in (q, k))
    says = (
        "q_descale has shape (2, 6); it must be (batch, kv_heads), which is (2, 3) here; "
        "cufa.quantize(q, kv_heads=3) returns such"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        cufa.attention(q8, k8, k8, q_descale=q_descale)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": np.zeros(5, np.float32)}, ValueError, "x has shape (5,); it must have 4 axes, or 3 if"),
        ({"x": None}, TypeError, "x is None; it may be a NumPy array"),
        ({"x": np.zeros(SHAPE, np.int8)}, TypeError, "x has dtype int8; it may be float16, bfloat16"),
        (
            {"x": np.zeros(SHAPE[1:]), "layout": np.zeros(2)},
            ValueError,
            "layout is a numpy.ndarray of shape (2,); it may be",
        ),
        ({"x": np.zeros(SHAPE[1:])}, ValueError, "cu_seqlens must be given for packed sequences"),
        ({"cu_seqlens": STARTS}, ValueError, "cu_seqlens is given, and x has shape (2, 70, 6, 24)"),
        (
            {"x": np.zeros(SHAPE[1:]), "cu_seqlens": STARTS.astype(np.int64)},
            TypeError,
            "cu_seqlens has dtype int64; it must be int32",
        ),
        (
            {"x": np.zeros(SHAPE[1:]), "cu_seqlens": STARTS[None]},
            ValueError,
            "cu_seqlens has shape (1, 4); it must be (batch + 1,)",
        ),
        (
            {"x": np.zeros(SHAPE[1:]), "cu_seqlens": STARTS[:0]},
            ValueError,
            "cu_seqlens has shape (0,); it must be (batch + 1,)",
        ),
        (
            {"x": np.zeros(SHAPE[1:]), "cu_seqlens": STARTS * 2},
            ValueError,
            "cu_seqlens ends with 120, but x has 70 tokens",
        ),
        (
            {"x": np.zeros(SHAPE[1:]), "cu_seqlens": STARTS, "seqlen_contiguous": True},
            ValueError,
            "seqlen_contiguous is True, and sequences are packed",
        ),
        ({"seqlen_contiguous": "no"}, TypeError, "seqlen_contiguous is 'no'; it may be True or False"),
        ({"kv_heads": 4}, ValueError, "kv_heads is 4; it may be an integer that divides x's 6 heads"),
        ({"kv_heads": 0}, ValueError, "kv_heads is 0; it may be an integer that divides x's 6 heads"),
        ({"kv_heads": True}, TypeError, "kv_heads is True; it may be an integer that divides x's 6 heads"),
        ({"kv_heads": 2.0}, TypeError, "kv_heads is 2.0; it may be an integer that divides x's 6 heads"),
        (
            {"descale": np.ones((2, 3), np.float32)},
            ValueError,
            "descale has shape (2, 3); it must be (2, 6)",
        ),
        ({"descale": 0.5}, TypeError, "descale is 0.5; it must be an array of (batch, kv_heads) in float32"),
        ({"descale": np.ones((2, 6))}, TypeError, "descale has dtype float64; it must be float32"),
        *(
            (
                {"descale": np.where(np.arange(12).reshape(2, 6) == 8, value, 1).astype(np.float32)},
                ValueError,
                f"descale has {value} for sequence 1, KV head 2; it must be at least 1.17549",
            )
            for value in (0.0, -2.0, np.nan, np.inf, np.float32(1e-40))
        ),
        ({"out": np.zeros(SHAPE, np.uint8)}, TypeError, "out has dtype uint8; it must be float8_e4m3fn"),
        ({"out": np.zeros(SHAPE[1:], E4M3)}, ValueError, "out has shape (70, 6, 24); it must be (2, 70, 6"),
        ({"arch": "sm_80"}, ValueError, "arch is 'sm_80', but this call computes on the CPU"),
    ],
)
def test_what_does_not_go_together(change, error, says):
    with pytest.raises(error, match=re.escape(says)):
        cufa.quantize(**({"x": np.zeros(SHAPE, np.float32)} | change), backend="numpy")


def test_an_out_that_overlaps_x():
    x = np.zeros(SHAPE, np.float32)
    out = x.reshape(-1).view(E4M3)[: x.size].reshape(SHAPE)
    with pytest.raises(ValueError, match=r"^out overlaps x in memory; it must not"):
        cufa.quantize(x, out=out, backend="numpy")


# ---- on a GPU ----


@pytest.fixture(params=[None, "compute_80"])
def arch(request):
    """compute_80 has no instruction that rounds to 8 bits."""
    if request.param is not None:
        skip_unless_the_driver_reads_ptx()
    return request.param


def on_gpu(**named):
    import cupy

    return {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in named.items()}


def to_host(out, descale):
    return out.view(np.uint8).get().view(E4M3), descale.get()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rng, dtype, arch):
    for kv_heads, seqlen_contiguous, static in CASES:
        for shape in (SHAPE, (2, 1000, 6, 128), (1, 33, 6, 7), (1, 1, 6, 256)):
            x = draw(rng, dtype, shape)
            given = some_descale(rng, kv_heads, shape[0]) if static else None
            options = on_gpu(x=x, descale=given) | {"seqlen_contiguous": seqlen_contiguous, "arch": arch}
            out, descale = cufa.quantize(**options, kv_heads=kv_heads)
            assert_quantized(*to_host(out, descale), x, given)
            assert out.strides[1 if seqlen_contiguous else 3] == 1


@pytest.mark.gpu
def test_rounding_on_a_gpu(rng, arch):
    """All codes, what is halfway between two, and what is next to that."""
    codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    halfway = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 500)])
    values = np.concatenate([values, -values, [449, 1e30, -464, np.inf, np.nan, 1e-40]])
    x = np.resize(values, (1, 1, 1, 512 * (len(values) // 512 + 1))).astype(np.float32).reshape(1, -1, 1, 512)
    given = np.ones((1, 1), np.float32)
    assert_quantized(*to_host(*cufa.quantize(**on_gpu(x=x, descale=given), arch=arch)), x, given)


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu(rng):
    def quantize(x, kv_heads, cu_seqlens):
        return to_host(*cufa.quantize(**on_gpu(x=x, cu_seqlens=cu_seqlens), kv_heads=kv_heads))

    assert_packed(rng, quantize)


@pytest.mark.gpu
def test_layouts_and_strides_on_a_gpu(rng):
    x = draw(rng, "bfloat16")
    wanted = cufa.quantize(x, kv_heads=2, backend="numpy")

    def assert_wanted(out, descale):
        assert_same(to_host(out, descale)[0], wanted[0])
        np.testing.assert_array_equal(descale.get(), wanted[1])

    named = on_gpu(x=x)
    bhsd = named["x"].transpose(0, 2, 1, 3)
    for seqlen_contiguous in (False, True):
        options = {"kv_heads": 2, "layout": "bhsd", "seqlen_contiguous": seqlen_contiguous}
        out, descale = cufa.quantize(bhsd, **options)
        assert out.strides[2 if seqlen_contiguous else 3] == 1
        assert_wanted(out.transpose(0, 2, 1, 3), descale)
    scattered = on_gpu(x=np.ascontiguousarray(x.swapaxes(1, 3)))["x"].swapaxes(1, 3)
    out = on_gpu(out=np.zeros(x.shape[::-1], np.uint8))["out"].view(E4M3).T
    assert_wanted(*cufa.quantize(scattered, kv_heads=2, out=out))
    assert_wanted(out, on_gpu(descale=wanted[1])["descale"])
    out, descale = cufa.quantize(x, kv_heads=2, backend="cuda")
    assert_same(out, wanted[0])
    np.testing.assert_array_equal(descale, wanted[1])


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu(rng):
    torch = pytest.importorskip("torch")
    x = draw(rng, "float32")
    for seqlen_contiguous in (False, True):
        out, descale = cufa.quantize(torch.from_numpy(x).cuda(), seqlen_contiguous=seqlen_contiguous)
        assert (out.dtype, descale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert_quantized(out.view(torch.uint8).cpu().numpy().view(E4M3), descale.cpu().numpy(), x)


@pytest.mark.gpu
def test_no_packed_sequences_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    out, descale = cufa.quantize(cupy.ones((5, 2, 8), np.float32), cu_seqlens=cupy.array([3], np.int32))
    assert out.shape == (5, 2, 8)
    assert descale.shape == (0, 2)


@pytest.mark.gpu
def test_in_a_graph(rng):
    """What is captured once quantizes what is in x then."""
    import cupy

    first, second = (draw(rng, "float16") for _ in range(2))
    x = cupy.asarray(first)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph, (out, descale) = captured(cupy, lambda: cufa.quantize(x))
        x.set(second)
        graph.launch()
        stream.synchronize()
    assert_quantized(*to_host(out, descale), second)
