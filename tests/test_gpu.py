"""Everything that only a GPU can show; `pytest -m gpu` runs it."""

import dataclasses
import importlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from gpu_calls import captured, skip_unless_the_driver_reads_ptx
from tolerance import (
    DTYPES,
    LAYOUTS,
    Problem,
    assert_attention,
    assert_gradients,
    judge,
    poisoned,
    random_problem,
    stored,
)

import cufa
from cufa import call, reference
from cufa.kernels import KERNELS as ALL_KERNELS
from cufa.launch import Executable
from cufa.problem import FLOAT8
from cufa.tensor_layout import layout_of

pytestmark = pytest.mark.gpu

# Those of 8 bits have a rule of their own, and tests (tests/test_gpu_fp8.py).
KERNELS = {name: kernel for name, kernel in ALL_KERNELS.items() if FLOAT8 not in kernel.dtypes}
FORWARD = [name for name, kernel in KERNELS.items() if kernel.direction == "forward"]
BACKWARD = [name for name, kernel in KERNELS.items() if kernel.direction == "backward"]

# Those whose copy engine reads the caller's arrays.
HOPPER = [name for name, kernel in KERNELS.items() if kernel.ascending_only]

RUNGS_AND_DTYPES = [(name, dtype) for name, kernel in KERNELS.items() for dtype in kernel.dtypes]

# (seqlen_q, seqlen_k, heads, kv_heads, head_dim, value_dim): nothing divides a tile.
SHAPES = [
    (113, 203, 6, 2, 64, 64),
    (203, 113, 4, 4, 33, 65),
    (1, 333, 3, 1, 128, 80),
    (257, 1, 2, 2, 1, 7),
    (65, 65, 2, 1, 256, 256),
    (130, 67, 2, 2, 96, 20),
]


def to_gpu(array):
    """The array on the GPU, its strides and the memory around it included."""
    import cupy

    base = array if array.base is None else array.base
    memory = cupy.asarray(np.ascontiguousarray(base))
    offset = array.ctypes.data - base.ctypes.data
    return cupy.ndarray(array.shape, array.dtype, memory.data + offset, array.strides)


def on_gpu(problem):
    return [to_gpu(array) for array in (problem.q, problem.k, problem.v, problem.dout)]


def step(q, k, v, dout):
    """A forward and a backward."""
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    return out, lse, cufa.attention_backward(dout, q, k, v, out, lse, causal=True)


def draw(rng, dtype, shape, **options):
    seqlen_q, seqlen_k, heads, kv_heads, head_dim, value_dim = shape
    return random_problem(
        rng,
        dtype,
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=value_dim,
        **options,
    )


def check_forward(problem, causal, **options):
    q, k, v, _ = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True, **options)
    assert_attention(out.get(), lse.get(), problem, causal=causal)


def check_backward(problem, causal, **options):
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=causal, **options)
    assert_gradients(tuple(gradient.get() for gradient in gradients), problem, causal=causal)


def check_rung(kernel, problem, causal, **options):
    check = check_forward if kernel in FORWARD else check_backward
    try:
        check(problem, causal, kernel=kernel, **options)
    except ValueError as error:
        if not re.search(r"needs (addresses|strides|sm_|a head_dim|[\d,]+ bytes)", str(error)):
            raise
        pytest.skip(str(error))


def dims_for(kernel, *dims):
    """The head dims where the kernel takes them; else as wide as it goes, or beyond where it begins."""
    row = KERNELS[kernel]
    if max(dims) < row.min_head_dim:
        dims = [dim + row.min_head_dim - 1 for dim in dims]
    return tuple(map(min, dims, (row.max_head_dim, row.max_value_dim)))


def shape_for(kernel):
    """The first shape, with such head dims."""
    *lengths_and_heads, head_dim, value_dim = SHAPES[0]
    return (*lengths_and_heads, *dims_for(kernel, head_dim, value_dim))


def narrowest(kernel):
    """float16, or what a kernel takes that does not take it."""
    return next(dtype for dtype in ("float16", "float32") if dtype in KERNELS[kernel].dtypes)


def widest(kernel):
    """The most precise of the dtypes that a kernel supports, of float32 and below."""
    return next(dtype for dtype in ("float32", "float16") if dtype in KERNELS[kernel].dtypes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), RUNGS_AND_DTYPES)
def test_rung(cupy, rng, kernel, dtype, causal, shape):
    *lengths_and_heads, head_dim, value_dim = shape
    shape = (*lengths_and_heads, *dims_for(kernel, head_dim, value_dim))
    check_rung(kernel, draw(rng, dtype, shape), causal)


@pytest.mark.parametrize("storage", LAYOUTS)
@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
def test_strided_views_are_read_where_they_are(cupy, rng, kernel, storage):
    problem = draw(rng, narrowest(kernel), (70, 90, 4, 2, *dims_for(kernel, 40, 24)), layout=storage)
    check_rung(kernel, problem, True)


def widened(array, axes):
    """A view of an array in which the first place along these axes stands for all, with stride 0."""
    first = tuple(slice(1) if axis in axes else slice(None) for axis in range(array.ndim))
    return np.broadcast_to(array[first], array.shape)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
def test_broadcast_keys_and_values(cupy, rng, kernel, axes):
    """With stride 0, which tensor maps take as well."""
    dims = dims_for(kernel, 64, 64)
    problem = draw(rng, narrowest(kernel), (70, 200, 4, 4, *dims))
    k, v = (widened(x, axes) for x in (problem.k, problem.v))
    check_rung(kernel, dataclasses.replace(problem, k=k, v=v), True)


@pytest.mark.parametrize("kernel", HOPPER)
def test_no_copy_engine_goes_backwards(cupy, rng, kernel):
    problem = draw(rng, "float16", (70, 90, 4, 2, *dims_for(kernel, 64, 64)), layout="reversed")
    check = check_forward if kernel in FORWARD else check_backward
    with pytest.raises(ValueError, match=r"needs (strides that are not negative|sm_90a)"):
        check(problem, True, kernel=kernel)
    check(problem, True)


@pytest.mark.parametrize("dims", [(64, 64), (7, 5)])
def test_strides_of_axes_with_one_place_do_not_count(cupy, rng, dims):
    """They may be anything in an array that another library made."""
    problem = draw(rng, "float16", (40, 50, 1, 1, *dims), layout="bhsd")
    one = dataclasses.replace(
        problem, **{name: getattr(problem, name)[:1] for name in ("q", "k", "v", "dout")}
    )
    q, k, v, _ = on_gpu(one)
    odd = [cupy.ndarray(x.shape, x.dtype, x.data, (2, x.strides[1], 2, x.strides[3])) for x in (q, k, v)]
    out, lse = cufa.attention(*odd, causal=True, return_lse=True)
    assert_attention(out.get(), lse.get(), one, causal=True)


@pytest.mark.parametrize(("kernel", "dtype"), RUNGS_AND_DTYPES)
def test_rows_that_are_aligned_to_one_element_only(cupy, rng, kernel, dtype):
    check_rung(kernel, draw(rng, dtype, (50, 40, 2, 2, *dims_for(kernel, 33, 33))), True)


def test_layout_bhsd(cupy, rng):
    problem = draw(rng, "float32", SHAPES[0])
    q, k, v, dout = (cupy.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in on_gpu(problem))
    out, lse = cufa.attention(q, k, v, causal=True, layout="bhsd", return_lse=True)
    assert_attention(out.get().transpose(0, 2, 1, 3), lse.get(), problem, causal=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, layout="bhsd")
    assert_gradients(tuple(x.get().transpose(0, 2, 1, 3) for x in gradients), problem, causal=True)


def test_last_axis_not_contiguous(cupy, rng):
    problem = draw(rng, "float32", SHAPES[0])
    q, k, v, _ = (cupy.asfortranarray(x) for x in on_gpu(problem))
    out = cufa.attention(q, k, v)
    assert_attention(out.get(), None, problem, causal=False)


@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (1, 40, 3)]
)
def test_empty_problems_and_rows(cupy, rng, kernel, batch, seqlen_q, seqlen_k):
    lengths = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    (dim,) = dims_for(kernel, 64)
    problem = random_problem(rng, narrowest(kernel), **lengths, heads=2, head_dim=dim)
    for causal in (False, True):
        check_rung(kernel, problem, causal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
def test_a_masked_key_does_not_show(cupy, rng, kernel, bad):
    """Rows that do not see a key are finite whatever it holds."""
    problem = draw(rng, widest(kernel), (90, 100, 4, 2, *dims_for(kernel, 64, 64)))
    problem.k[:, 70], problem.v[:, 70] = bad, bad  # seen from row 60 on
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(
        q, k, v, causal=True, return_lse=True, kernel=kernel if kernel in FORWARD else None
    )
    assert np.isfinite(out.get()[:, :60]).all()
    with np.errstate(invalid="ignore"):
        if kernel in FORWARD:
            check_forward(problem, True, kernel=kernel)
            return
        check_backward(problem, True, kernel=kernel)
    dq, _, _ = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=kernel)
    assert np.isfinite(dq.get()[:, :60]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", BACKWARD)
def test_a_query_that_does_not_see_a_key_does_not_show_in_its_gradients(cupy, rng, kernel, bad):
    problem = draw(rng, widest(kernel), (90, 100, 4, 2, *dims_for(kernel, 64, 64)))
    problem.q[:, 75], problem.dout[:, 75] = bad, bad  # sees keys to 85
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    _, dk, dv = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=kernel)
    assert np.isfinite(dk.get()[:, 86:]).all()
    assert np.isfinite(dv.get()[:, 86:]).all()
    with np.errstate(invalid="ignore"):
        check_backward(problem, True, kernel=kernel)


@pytest.mark.parametrize("kernel", FORWARD)
def test_large_logits(cupy, rng, kernel):
    check_forward(draw(rng, widest(kernel), shape_for(kernel), logit_scale=1e3), True, kernel=kernel)


def test_out_is_written_everywhere_and_returned(cupy, rng):
    problem = draw(rng, "bfloat16", SHAPES[1])
    q, k, v, _ = on_gpu(problem)
    for storage in LAYOUTS:
        out = to_gpu(poisoned(problem.dout, storage))
        assert cufa.attention(q, k, v, out=out) is out
        assert_attention(out.get(), None, problem, causal=False)


@pytest.mark.parametrize("kernel", FORWARD)
def test_forward_is_bitwise_reproducible(cupy, rng, kernel):
    q, k, v, _ = on_gpu(draw(rng, narrowest(kernel), shape_for(kernel)))
    first = cufa.attention(q, k, v, causal=True, kernel=kernel).get().tobytes()
    for _ in range(20):
        assert cufa.attention(q, k, v, causal=True, kernel=kernel).get().tobytes() == first


@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
def test_current_stream_is_used(cupy, rng, kernel):
    """The work follows what the stream does before it and precedes what it does after it."""
    problem = draw(rng, widest(kernel), (300, 300, 4, 4, *dims_for(kernel, 64, 64)))
    stream = cupy.cuda.Stream(non_blocking=True)
    good = on_gpu(problem)
    q, k, v, dout = (cupy.full_like(x, np.nan) for x in good)
    cupy.cuda.Device().synchronize()
    with stream:
        busy = cupy.ones((4096, 4096), np.float32)
        for _ in range(5):
            busy = busy @ busy * np.float32(1e-4)
        for target, source in zip((q, k, v, dout), good, strict=True):
            target[...] = source
        if kernel in FORWARD:
            result = cufa.attention(q, k, v, causal=True, kernel=kernel)
        else:
            out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
            result = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=kernel)
        for target in (q, k, v, dout):
            target.fill(np.nan)
    stream.synchronize()
    if kernel in FORWARD:
        assert_attention(result.get(), None, problem, causal=True)
    else:
        assert_gradients(tuple(x.get() for x in result), problem, causal=True)


def test_cuda_graph_capture(cupy, rng):
    """Capturing fails if anything synchronises; replaying follows the inputs."""
    first, second = (draw(rng, "float16", SHAPES[0]) for _ in range(2))
    inputs = on_gpu(first)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph, (out, lse, gradients) = captured(cupy, partial(step, *inputs))
        for target, source in zip(inputs, on_gpu(second), strict=True):
            target[...] = source
        graph.launch()
        stream.synchronize()
    assert_attention(out.get(), lse.get(), second, causal=True)
    assert_gradients(tuple(x.get() for x in gradients), second, causal=True)


def test_numpy_arrays_travel_there_and_back(cupy, rng):
    problem = draw(rng, "bfloat16", SHAPES[0])
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    out = poisoned(dout)
    result, lse = cufa.attention(q, k, v, causal=True, return_lse=True, out=out, backend="cuda")
    assert result is out
    assert type(lse) is np.ndarray
    assert_attention(out, lse, problem, causal=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert all(type(x) is np.ndarray for x in gradients)
    assert_gradients(gradients, problem, causal=True)


def test_cupy_arrays_on_the_numpy_backend(cupy, rng):
    problem = draw(rng, "float32", SHAPES[0])
    q, k, v, _ = on_gpu(problem)
    out = cufa.attention(q, k, v, backend="numpy")
    assert isinstance(out, cupy.ndarray)
    assert_attention(out.get(), None, problem, causal=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_dlpack(cupy, rng, library, dtype):
    pytest.importorskip(library)
    namespace = importlib.import_module("torch" if library == "torch" else "jax.numpy")
    problem = draw(rng, dtype, SHAPES[0])
    q, k, v, dout = (namespace.from_dlpack(cupy.ascontiguousarray(x)) for x in on_gpu(problem))
    kind = type(q)
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert {type(x) for x in (out, lse, *gradients)} == {kind}
    assert str(out.dtype).removeprefix("torch.") == dtype
    back = [cupy.from_dlpack(x).get() for x in (out, lse, *gradients)]
    assert_attention(back[0], back[1], problem, causal=True)
    assert_gradients(tuple(back[2:]), problem, causal=True)


def test_dlpack_out_is_written_in_place(cupy, rng):
    torch = pytest.importorskip("torch")
    problem = draw(rng, "float16", SHAPES[0])
    q, k, v, dout = (torch.from_dlpack(x) for x in on_gpu(problem))
    out = torch.full_like(dout, float("nan"))
    assert cufa.attention(q, k, v, out=out) is out
    assert_attention(cupy.from_dlpack(out).get(), None, problem, causal=False)


def test_dlpack_follows_the_other_librarys_stream(cupy):
    """What torch has only queued is seen, and torch sees what cufa has only queued."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    problem = draw(rng, "float32", (300, 300, 4, 4, 64, 64))
    good = [torch.from_dlpack(x) for x in on_gpu(problem)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy = torch.ones(8192, 8192, device="cuda")
        for _ in range(5):
            busy = busy @ busy * 1e-4
        q, k, v = (x + busy[0, 0] * 0 for x in good[:3])
        out = cufa.attention(q, k, v)
        result = out.clone()
    torch.cuda.synchronize()
    assert_attention(result.cpu().numpy(), None, problem, causal=False)


def test_dlpack_out_follows_the_other_librarys_stream(cupy):
    """torch sees what cufa has only queued to write into torch's own array."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    problem = draw(rng, "float32", (2048, 2048, 8, 8, 64, 64))
    q, k, v = (torch.from_dlpack(x) for x in on_gpu(problem)[:3])
    expected = cufa.attention(q, k, v).cpu().numpy()
    out = torch.empty_like(q)
    stream = torch.cuda.Stream()
    for _ in range(20):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            cufa.attention(q, k, v, out=out)
            result = out.clone()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(result.cpu().numpy(), expected)


def test_threads_call_at_once(cupy, rng):
    """Each on a stream of its own; a thread's first call finds kernels loaded, but no context of its own."""
    problems = [
        draw(rng, "float16", shape) for shape in (SHAPES[0], (900, 900, 4, 2, 64, 64)) for _ in range(4)
    ]
    inputs = [on_gpu(problem) for problem in problems]

    for arguments in inputs:
        step(*arguments)
    cupy.cuda.runtime.deviceSynchronize()
    start = threading.Barrier(len(inputs))

    def work(arguments):
        start.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(30):
                results = step(*arguments)
            stream.synchronize()
        return results

    with ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(work, inputs))
    for problem, (out, lse, gradients) in zip(problems, found, strict=True):
        assert_attention(out.get(), lse.get(), problem, causal=True)
        assert_gradients(tuple(x.get() for x in gradients), problem, causal=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_thread_s_first_use_of_the_gpu_is_a_new_call(cupy, rng, head_dim):
    """Of shapes, addresses and variants that no other thread has used; and then of known kernels."""
    cupy.get_default_memory_pool().free_all_blocks()
    problems = [draw(rng, "bfloat16", (length, 531, 6, 3, head_dim, head_dim)) for length in (417, 419)]
    inputs = [on_gpu(problem) for problem in problems]
    # So that the pool has memory for the results, and a call asks nothing else of CuPy.
    spare = [cupy.empty_like(x) for arguments in inputs for x in arguments * 3]
    cupy.cuda.runtime.deviceSynchronize()
    del spare

    for problem, arguments in zip(problems, inputs, strict=True):
        with ThreadPoolExecutor(1) as pool:
            out, lse, gradients = pool.submit(step, *arguments).result()
        assert_attention(out.get(), lse.get(), problem, causal=True)
        assert_gradients(tuple(x.get() for x in gradients), problem, causal=True)


# In float32 it would take more memory than is left beside other tests.
@pytest.mark.parametrize("kernel", [name for name in FORWARD + BACKWARD if narrowest(name) == "float16"])
def test_more_than_2_to_the_31_elements_and_65535_blocks(cupy, kernel):
    """Offsets of the last sequence of the batch do not fit 32 bits."""
    seqlen, heads = 32, 4
    (dim,) = dims_for(kernel, 128)
    batch = 2**31 // (seqlen * heads * dim) + 1
    generator = cupy.random.default_rng(1)
    q, k, v, dout = (
        generator.standard_normal((batch, seqlen, heads, dim), dtype=np.float32).astype(np.float16)
        for _ in range(4)
    )
    assert q.size > 2**31
    last = Problem(*(x[-1:].get() for x in (q, k, v, dout)))
    if kernel in FORWARD:
        out = cufa.attention(q, k, v, causal=True, kernel=kernel)
        assert_attention(out[-1:].get(), None, last, causal=True)
    else:
        out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
        gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, kernel=kernel)
        assert_gradients(tuple(x[-1:].get() for x in gradients), last, causal=True)
    cupy.get_default_memory_pool().free_all_blocks()


def test_more_than_2_to_the_31_elements_of_queries_that_see_no_key(cupy, rng):
    """A block with all keys of a head sets these rows of dQ to zero."""
    seqlen_q, seqlen_k, dim = 17_000_000, 100, 127
    row, k = (
        cupy.asarray(rng.standard_normal((1, rows, 1, dim)).astype(np.float16)) for rows in (1, seqlen_k)
    )
    q = cupy.broadcast_to(row, (1, seqlen_q, 1, dim))
    out = cupy.broadcast_to(cupy.zeros_like(row), q.shape)
    dq = cupy.full(q.shape, np.nan, np.float16)
    assert dq.size > 2**31
    lse = cupy.full((1, 1, seqlen_q), -np.inf, np.float32)
    no_key = cupy.zeros(1, np.int32)
    _, dk, dv = cufa.attention_backward(q, q, k, k, out, lse, seqused_k=no_key, dq=dq, kernel="bwd_3_mma")
    assert not any(gradient.any() for gradient in (dq, dk, dv))
    cupy.get_default_memory_pool().free_all_blocks()


def test_row_strides_beyond_2_to_the_31(cupy, rng):
    """One head of a very wide packed array: the last rows are far from the first."""
    seqlen, width, dim = 70_000, 2**15 + 512, 64
    wide = cupy.zeros((1, seqlen, width), np.float16)
    assert wide.size > 2**31
    k, v = (wide[..., at : at + dim].reshape(1, seqlen, 1, dim) for at in (0, 256))
    small = rng.standard_normal((1, 8, 1, dim)).astype(np.float16)
    for x in (k, v):
        assert x.base is not None
        x[...] = cupy.asarray(rng.standard_normal((1, seqlen, 1, dim)).astype(np.float16))
    problem = Problem(small, k.get(), v.get(), small)
    out, lse = cufa.attention(cupy.asarray(small), k, v, return_lse=True)
    assert_attention(out.get(), lse.get(), problem, causal=False)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(cupy, rng, dtype, passes):
    for shape in ((7,), (3, 1000), (2, 5, 33), (4, 0), (0, 4), (3, 10_001)):
        for mean in (0, 1000):
            x = (mean + 4 * rng.standard_normal(shape)).astype(dtype)
            y = cufa.softmax(cupy.asarray(x), passes=passes).get()
            exact = reference.softmax(x, dtype=judge(dtype))
            assert y.dtype == x.dtype
            tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
            np.testing.assert_allclose(y.astype(exact.dtype), exact, rtol=tolerance, atol=tolerance * 1e-3)
    masked = cupy.full((2, 40), -np.inf, np.float32)
    assert not cufa.softmax(masked, passes=passes).get().any()
    every_other = cupy.asarray(rng.standard_normal((6, 80)).astype(np.float32))[::2]
    np.testing.assert_allclose(
        cufa.softmax(every_other, passes=passes).get(), reference.softmax(every_other.get()), rtol=1e-5
    )


def test_a_launch_that_fails_raises(cupy, rng):
    q, k, v, _ = on_gpu(draw(rng, "float32", SHAPES[0]))
    plan = cufa.plan(q, k, v)
    too_many = tuple(dataclasses.replace(launch, block=2048) for launch in plan.launches)
    run = Executable(dataclasses.replace(plan, launches=too_many))
    tensors = (q, k, v, q)
    batch, seqlen, heads = 0, 1, 2
    layout = layout_of(tuple((x.shape, x.strides) for x in tensors), q.itemsize, (batch, seqlen, heads))
    pack = run.packer(layout)
    with pytest.raises(cufa.LaunchError, match="2048 threads"):
        run(pack(*(x.data.ptr for x in tensors)), 0, 1.0)


def test_arch_override_through_the_driver(cupy, rng, monkeypatch):
    skip_unless_the_driver_reads_ptx()
    problem = draw(rng, "float16", SHAPES[0])
    check_forward(problem, True, arch="compute_80")
    monkeypatch.setenv("CUFA_ARCH", "compute_80")
    call.forget()
    check_forward(problem, False)
    call.forget()
    q, k, v, _ = on_gpu(problem)
    with pytest.raises(ValueError, match="cannot run here"):
        cufa.attention(q, k, v, arch="sm_75")


def test_arrays_on_another_gpu_are_refused(cupy, rng):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    problem = draw(rng, "float16", SHAPES[0])
    q, k, v, _ = on_gpu(problem)
    with cupy.cuda.Device(1):
        with pytest.raises(ValueError, match="q is on GPU 0"):
            cufa.attention(q, k, v)
        check_forward(problem, True)


def test_out_that_overlaps_is_refused(cupy, rng):
    packed = cupy.asarray(rng.standard_normal((2, 50, 4, 2, 64)).astype(np.float32))
    q, k, v, out = (packed[:, :, i] for i in range(4))
    problem = Problem(*(np.copy(x.get()) for x in (q, k, v, q)))
    cufa.attention(q, k, v, out=out)  # interleaved with the inputs, but nowhere on them
    assert_attention(out.get(), None, problem, causal=False)
    with pytest.raises(ValueError, match="out overlaps k"):
        cufa.attention(q, k, v, out=k)


@pytest.mark.parametrize("dims", [(1, 1), (8, 256), (256, 8), (72, 136)])
@pytest.mark.parametrize("kernel", FORWARD + BACKWARD)
def test_head_dims(cupy, rng, kernel, dims):
    check_rung(kernel, draw(rng, widest(kernel), (100, 70, 2, 1, *dims_for(kernel, *dims))), True)


@pytest.mark.parametrize("dims", [(257, 300), (320, 320), (72, 512), (576, 512)])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("bwd_1_naive", "float32"),
        *(("bwd_2_flash_v2", dtype) for dtype in DTYPES),
        *(("bwd_3_mma", dtype) for dtype in DTYPES[:3]),
    ],
)
def test_gradients_of_wide_heads(cupy, rng, kernel, dtype, dims):
    for causal in (False, True):
        check_rung(kernel, draw(rng, dtype, (203, 330, 4, 2, *dims)), causal)


def test_tile_overrides_compute_the_same(cupy, rng):
    problem = draw(rng, "float32", SHAPES[0])
    for tiles in ({"block_m": 32}, {"block_n": 32}, {"threads": 128, "lanes": 8}):
        check_forward(problem, True, kernel="fwd_4_flash_v2", tiles=tiles)
        check_backward(problem, True, kernel="bwd_2_flash_v2", tiles=tiles)
    problem = draw(rng, "bfloat16", SHAPES[0])
    for tiles in ({"block_n": 16}, {"block_m": 64, "threads": 64}, {"block_m": 16, "threads": 32}):
        check_forward(problem, True, kernel="fwd_5_mma", tiles=tiles)


def test_tiles_that_are_no_mapping_are_refused(cupy, rng):
    q, k, v, _ = on_gpu(draw(rng, "float32", SHAPES[0]))
    with pytest.raises(TypeError, match=r"^tiles is \[64\]; it may be a mapping, as in "):
        cufa.attention(q, k, v, kernel="fwd_4_flash_v2", tiles=[64])


def test_stored_layouts_reach_the_gpu_as_they_are(cupy, rng):
    values = rng.standard_normal((2, 5, 3, 4)).astype(np.float32)
    for storage in LAYOUTS:
        view = stored(values, storage)
        on_device = to_gpu(view)
        assert on_device.strides == view.strides
        np.testing.assert_array_equal(on_device.get(), values)


@pytest.mark.parametrize(
    ("name", "shape", "strides"), [("bias", (5, 9), (38, 4)), ("lse", (2, 2, 5), (50, 22, 4))]
)
def test_an_array_that_lies_askew_is_named(cupy, rng, name, shape, strides):
    q, k, v, _ = on_gpu(draw(rng, "float32", (5, 9, 2, 2, 8, 8)))
    memory = cupy.zeros(1000, np.uint8)
    for offset, lie, multiple in ((1, None, 1), (0, strides, 2)):
        askew = cupy.ndarray(shape, np.float32, memory.data + offset, lie)
        message = f"{name} has an address or a stride that is a multiple of {multiple} bytes only; 4-byte"
        with pytest.raises(ValueError, match=f"^{message}"):
            cufa.attention(q, k, v, **{name: askew})
