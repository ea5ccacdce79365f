"""New keys and values into a cache, by the kernel: in the emulator and, where there is one, on a GPU."""

import numpy as np
import pytest
from emulator import calls

from cufa.compat.appending import append

# Of K and of V: rows of 16-byte chunks, and of fewer bytes.
DTYPES_AND_DIMS = [
    ("float16", (64, 40)),
    ("bfloat16", (33, 24)),
    ("float32", (20, 20)),
    ("float64", (5, 6)),
    ("float8_e4m3fn", (48, 7)),
]
BATCH, KV_HEADS, COUNT = 3, 2, 4
PAGE_SIZE, PAGES_OF_SEQUENCE = 5, 3
OUTSIDE = 1000


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


def table_of(rng, pages):
    """Pages of their own for each sequence."""
    return rng.permutation(pages)[: BATCH * PAGES_OF_SEQUENCE].reshape(BATCH, -1).astype(np.int32)


@pytest.mark.emulator
@pytest.mark.parametrize("held", [3, [0, 11, 6], [-2, 14, 2**31 - 1]], ids=["alike", "each", "outside"])
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
        written = calls.append(*new, *caches, held, used)
        for x, cache, result in zip(new, caches, written, strict=True):
            assert_same_bits(result, expected(x, cache, held, used))


@pytest.mark.emulator
def test_views_in_the_emulator(rng):
    """Heads before rows, as in layout "bhsd", and every other sequence."""
    dims = 16, 8
    new = [x[::2] for x in draw(rng, "float16", dims, 2 * BATCH, COUNT)]
    caches = [
        rng.standard_normal((BATCH, KV_HEADS, 20, dim)).astype("float16").swapaxes(1, 2) for dim in dims
    ]
    written = calls.append(*new, *caches, 7)
    for x, cache, result in zip(new, caches, written, strict=True):
        assert_same_bits(result, expected(x, cache, 7, None))


@pytest.mark.gpu
@pytest.mark.parametrize("in_pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("each", [False, True], ids=["alike", "each"])
@pytest.mark.parametrize(("dtype", "dims"), DTYPES_AND_DIMS)
def test_on_a_gpu(rng, dtype, dims, each, in_pages):
    """By one launch; and by indices, where rows of the cache are not contiguous."""
    cupy = pytest.importorskip("cupy")
    held = np.array([0, 11, 6], np.int32) if each else 3
    pages = BATCH * PAGES_OF_SEQUENCE + 2
    table = table_of(rng, pages) if in_pages else None
    shape = (pages, PAGE_SIZE) if in_pages else (BATCH, PAGE_SIZE * PAGES_OF_SEQUENCE)
    new, caches = draw(rng, dtype, dims, BATCH, COUNT), draw(rng, dtype, dims, *shape)

    def on_gpu(x):
        return cupy.asarray(x.view(np.uint8)).view(x.dtype)

    def assert_appended(named):
        pages = {"block_table": cupy.asarray(table)} if in_pages else {}
        append(named | pages, cupy.asarray(held) if each else held)
        for name, x, cache in zip(("k_cache", "v_cache"), new, caches, strict=True):
            bits = cupy.ascontiguousarray(named[name]).view(cupy.uint8).get()
            assert_same_bits(bits, expected(x, cache, held, table))

    names = "k", "v", "k_cache", "v_cache"
    named = dict(zip(names, map(on_gpu, (*new, *caches)), strict=True))
    assert_appended(named)
    if np.dtype(dtype).kind == "f":  # which CuPy computes with
        for name, cache in zip(names[2:], caches, strict=True):
            named[name] = cupy.zeros((*cache.shape[:-1], 2 * cache.shape[-1]), dtype)[..., ::2]
            named[name][...] = cupy.asarray(cache)
        assert_appended(named)
