"""New keys and values into a cache, and queries for them: in the emulator and, if there is one, on a GPU."""

import numpy as np
import pytest
from emulator import calls

import cufa
from cufa.compat import flash_attn_with_kvcache
from cufa.problem import accumulator_dtype

# Of K and of V: rows of 16-byte chunks, and of fewer bytes.
DTYPES_AND_DIMS = [
    ("float16", (64, 40)),
    ("bfloat16", (33, 24)),
    ("float32", (20, 20)),
    ("float64", (5, 6)),
    ("float8_e4m3fn", (48, 7)),
]
BATCH, KV_HEADS, COUNT = 3, 2, 4
HEADS, QUERIES = 4, 3
PAGE_SIZE, PAGES_OF_SEQUENCE = 5, 3
OUTSIDE = 1000
PLACES = 40


def draw(rng, dtype, dims, *shape):
    """Arrays for keys and for values."""
    return [rng.standard_normal((*shape, KV_HEADS, dim)).astype(dtype) for dim in dims]


def expected(new, cache, held, table):
    """The cache with each row where it belongs, if there is such a place."""
    cache = cache.copy()
    for sequence, i in np.ndindex(new.shape[:2]):
        page, row = divmod(int(np.broadcast_to(held, len(new))[sequence]) + i, cache.shape[1])
        pages = [sequence] if table is None else list(table[sequence])
        if 0 <= page < len(pages) and 0 <= pages[page] < len(cache):
            cache[pages[page], row] = new[sequence, i]
    return cache


def assert_same_bits(actual, exact):
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(np.uint8), np.ascontiguousarray(exact).view(np.uint8)
    )


def assert_appended(written, new, caches, held, table=None):
    """Rows are where they belong, and the lengths say so."""
    for name, x, cache in zip(("k_cache", "v_cache"), new, caches, strict=True):
        assert_same_bits(written[name], expected(x, cache, held, table))
    room = caches[0].shape[1] * (1 if table is None else table.shape[1])
    lengths = np.broadcast_to(held, BATCH).astype(np.int64) + COUNT
    np.testing.assert_array_equal(written["lengths"], np.clip(lengths, 0, room))


def table_of(rng, pages):
    """Pages of their own for each sequence."""
    return rng.permutation(pages)[: BATCH * PAGES_OF_SEQUENCE].reshape(BATCH, -1).astype(np.int32)


def named(new, caches, **others):
    return dict(zip(("k", "v", "k_cache", "v_cache"), (*new, *caches), strict=True)) | others


@pytest.mark.emulator
@pytest.mark.parametrize("held", [3, [0, 11, 6], [-6, 14, 2**31 - 1]], ids=["alike", "each", "outside"])
@pytest.mark.parametrize(("dtype", "dims"), DTYPES_AND_DIMS)
def test_in_the_emulator(rng, dtype, dims, held):
    """Into pages and into a row of its own for each; rows without a place are not written."""
    held = held if isinstance(held, int) else np.array(held, np.int32)
    pages = BATCH * PAGES_OF_SEQUENCE + 2
    table = table_of(rng, pages)
    if not isinstance(held, int):
        table[0, -1] = OUTSIDE
    of_pages = table, (pages, PAGE_SIZE)
    for used, shape in (of_pages, (None, (BATCH, PAGE_SIZE * PAGES_OF_SEQUENCE))):
        new, caches = draw(rng, dtype, dims, BATCH, COUNT), draw(rng, dtype, dims, *shape)
        written = calls.append(named(new, caches), held, table=used)
        assert_appended(written, new, caches, held, used)


@pytest.mark.emulator
def test_views_in_the_emulator(rng):
    """Heads before rows, as in layout "bhsd", and every other sequence."""
    dims = 16, 8
    new = [x[::2] for x in draw(rng, "float16", dims, 2 * BATCH, COUNT)]
    caches = [
        rng.standard_normal((BATCH, KV_HEADS, 20, dim)).astype("float16").swapaxes(1, 2) for dim in dims
    ]
    assert_appended(calls.append(named(new, caches), 7), new, caches, 7)


@pytest.mark.emulator
@pytest.mark.parametrize("scaled", [True, False], ids=["descales", "units"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_8_bits_in_the_emulator(rng, dtype, scaled):
    dims = 24, 6
    new = draw(rng, dtype, dims, BATCH, COUNT)
    new[0][1, 2, 0, 3], new[1][0, 0, 1, 1] = np.nan, np.inf
    caches = draw(rng, "float8_e4m3fn", dims, BATCH, 12)
    descales = [rng.uniform(0.01, 2, (BATCH, KV_HEADS)).astype(np.float32) for _ in dims]
    given = dict(zip(("k_descale", "v_descale"), descales, strict=True)) if scaled else {}
    written = calls.append(named(new, caches, **given), 7)
    units = descales if scaled else [np.ones_like(descale) for descale in descales]
    rounded = [cufa.quantize(x, descale=unit)[0] for x, unit in zip(new, units, strict=True)]
    assert_appended(written, rounded, caches, 7)


# What is interleaved, the rotary_dim, whether cos is wider than x, the step of queries.
ROTATIONS = [(False, 24, True, 1), (True, 8, False, 0), (False, 10, True, 0), (True, 24, True, 1)]


@pytest.mark.emulator
@pytest.mark.parametrize("held", [0, [30, 11, 6]], ids=["alike", "each"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "rotation"),
    [
        *zip(*[("float16", "bfloat16", "float32", "float64")] * 2, ROTATIONS, strict=True),
        ("bfloat16", "float8_e4m3fn", ROTATIONS[0]),
        ("float16", "float8_e4m3fn", ROTATIONS[1]),
    ],
    ids=str,
)
def test_rotated_in_the_emulator(rng, dtype, cache_dtype, rotation, held):
    """Keys and queries are what `rotary` makes of them, NaN at a place that is not there."""
    interleaved, rotary_dim, wide, step = rotation
    held = held if isinstance(held, int) else np.array(held, np.int32)
    dims = 24, 16
    new = draw(rng, dtype, dims, BATCH, COUNT)
    q = rng.standard_normal((BATCH, QUERIES, HEADS, dims[0])).astype(dtype)
    caches = draw(rng, cache_dtype, dims, BATCH, 36)
    angles = rng.uniform(-np.pi, np.pi, (PLACES if step else 32, rotary_dim // 2))
    table_dtype = accumulator_dtype(dtype) if wide else dtype
    cos, sin = (table(angles).astype(table_dtype) for table in (np.cos, np.sin))
    given = named(new, caches, q=q, cos=cos, sin=sin)
    written = calls.append(given, held, step=step, interleaved=interleaved)

    def rotated(x, step):
        positions = np.arange(x.shape[1]) * step + np.broadcast_to(held, BATCH)[:, None]
        return calls.rotary(x, cos, sin, positions.astype(np.int32), interleaved)

    keys = [rotated(new[0], 1), new[1]]
    if cache_dtype != dtype:
        ones = np.ones((BATCH, KV_HEADS), np.float32)
        keys = [cufa.quantize(x, descale=ones)[0] for x in keys]
    assert_appended(written, keys, caches, held)
    assert_same_bits(written["rotated"], rotated(q, step))


@pytest.mark.emulator
@pytest.mark.parametrize(("queries", "heads"), [(0, HEADS), (QUERIES, 0)], ids=["no queries", "no heads"])
def test_nothing_to_rotate_in_the_emulator(rng, queries, heads):
    dims = 24, 16
    new, caches = draw(rng, "float16", dims, BATCH, COUNT), draw(rng, "float16", dims, BATCH, 36)
    q = np.zeros((BATCH, queries, heads, dims[0]), np.float16)
    cos, sin = np.ones((PLACES, 12), np.float32), np.zeros((PLACES, 12), np.float32)
    written = calls.append(named(new, caches, q=q, cos=cos, sin=sin), 7)
    assert_appended(written, new, caches, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("in_pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("each", [False, True], ids=["alike", "each"])
@pytest.mark.parametrize(("dtype", "dims"), [*DTYPES_AND_DIMS[:-1], ("float8_e4m3fn", (48, 32))])
def test_on_a_gpu(rng, dtype, dims, each, in_pages):
    """By one launch; and by indices, where rows of the cache are not contiguous."""
    cupy = pytest.importorskip("cupy")
    held = np.array([0, 11, 6], np.int32) if each else 3
    pages = BATCH * PAGES_OF_SEQUENCE + 2
    table = table_of(rng, pages) if in_pages else None
    shape = (pages, PAGE_SIZE) if in_pages else (BATCH, PAGE_SIZE * PAGES_OF_SEQUENCE)
    new, caches = draw(rng, dtype, dims, BATCH, COUNT), draw(rng, dtype, dims, *shape)
    q = rng.standard_normal((BATCH, QUERIES, HEADS, dims[0])).astype(dtype)

    def on_gpu(x):
        return cupy.asarray(x.view(np.uint8)).view(x.dtype)

    def check(k_cache, v_cache):
        out = flash_attn_with_kvcache(
            *(on_gpu(q), k_cache, v_cache, *map(on_gpu, new)),
            cache_seqlens=cupy.asarray(held) if each else held,
            block_table=cupy.asarray(table) if in_pages else None,
            causal=True,
        )
        full = []
        for x, cache, on_gpu_cache in zip(new, caches, (k_cache, v_cache), strict=True):
            full.append(expected(x, cache, held, table))
            bits = cupy.ascontiguousarray(on_gpu_cache).view(cupy.uint8).get()
            assert_same_bits(bits, full[-1])
        lengths = np.broadcast_to(held, BATCH).astype(np.int32) + np.int32(COUNT)
        exact = cufa.attention(
            q, *full, causal=True, seqused_k=lengths, block_table=table, backend="numpy"
        ).astype(np.float32)
        result = cupy.ascontiguousarray(out).view(cupy.uint8).get().view(out.dtype).astype(np.float32)
        np.testing.assert_allclose(result, exact, rtol=0.05, atol=0.05)

    check(*map(on_gpu, caches))
    if dtype != "float8_e4m3fn":  # of which CuPy copies nothing
        check(*(on_gpu(np.repeat(cache, 2, axis=-1))[..., ::2] for cache in caches))
