"""Head dims over 256 on a Hopper GPU: repeats, parts of keys, values in keys, heads as queries, gradients."""

from dataclasses import replace

import numpy as np
import pytest
from feature_cases import HOPPER_PAGE_SIZES, draw_case, hide_nan, in_pages
from float8 import DESCALES, assert_float8, descales_of, with_keys_in_8_bits
from gpu_calls import check_forward, on_gpu, results_of, skip_unless_it_runs_here, tensors, written
from tolerance import assert_attention, assert_gradients

import cufa
from cufa.arrays import as_bytes
from cufa.problem import FLOAT8

pytestmark = pytest.mark.gpu

KERNEL, BACKWARD = "fwd_10_wgmma_wide", "bwd_5_wgmma_wide"
REPEATS = 1000


@pytest.fixture(autouse=True)
def of_hopper():
    skip_unless_it_runs_here(KERNEL)


def draw(rng, features, dtype="bfloat16", seqlen_q=1000, seqlen_k=1000, dims=(512, 512), **sizes):
    dims_and_heads = {"heads": 4, "kv_heads": 2, "head_dim": dims[0], "head_dim_v": dims[1]} | sizes
    case = draw_case(rng, dtype, features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **dims_and_heads)
    hide_nan(case)
    return case


@pytest.mark.parametrize(("dims", "features"), [((512, 512), ("causal",)), ((320, 320), ())])
def test_every_repeat_gives_the_same_bits(cupy, rng, dims, features):
    case = draw(rng, features, batch=2, seqlen_k=1300, dims=dims)
    q, k, v, _ = tensors(cupy, case)
    first = cufa.attention(q, k, v, **case.forward, return_lse=True, kernel=KERNEL)
    same = cupy.ones((), bool)
    for _ in range(REPEATS):
        again = cufa.attention(q, k, v, **case.forward, return_lse=True, kernel=KERNEL)
        for one, other in zip(first, again, strict=True):
            same &= (one == other).all()
    assert same


@pytest.mark.parametrize(
    ("parts", "features"),
    [(3, ("seqused_k",)), (16, ("causal", "softcap")), (40, ("sink", "packed")), (7, ("dropout",))],
)
def test_parts_of_keys(cupy, rng, parts, features):
    case = draw(rng, features, seqlen_q=300, seqlen_k=3000)
    check_forward(cupy, case, kernel=KERNEL, tiles={"key_parts": parts})


@pytest.mark.parametrize("lengths", [(7, 2000), (40, 300)])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "features"),
    [
        (128, 1, ("seqused_k",)),
        (128, 3, ("causal", "seqused_k", "block_table")),
        (70, 2, ("seqused_k", "softcap")),
        (130, 1, ("block_table",)),
    ],
)
def test_shares_of_keys(cupy, rng, heads, seqlen_q, features, lengths):
    """Of latents: few tiles in many parts, and many in few; the same bits in every repeat."""
    sizes = {"batch": lengths[0], "heads": heads, "kv_heads": 1, "page_sizes": HOPPER_PAGE_SIZES}
    case = draw(rng, features, "float16", seqlen_q, lengths[1], (576, 512), **sizes)
    case = replace(case, problem=replace(case.problem, v=case.problem.k[..., :512]))
    q, k, *_ = tensors(cupy, case)

    def attend(shares):
        out, lse = (cupy.full(shape, np.nan, kind) for shape, kind in results_of(case))
        options = on_gpu(cupy, case.forward) | {"kernel": KERNEL, "tiles": {"shares": shares}}
        cufa.attention(q, k, k[..., :512], **options, out=out, lse=lse)
        return out, lse

    for shares in (2, 20):
        first = attend(shares)
        with np.errstate(invalid="ignore"):
            assert_attention(*written(case, *first), case.problem, **case.forward)
        for _ in range(20):
            for one, other in zip(first, attend(shares), strict=True):
                assert bool((one.view("u2") == other.view("u2")).all())


@pytest.mark.parametrize(
    ("dims", "features"),
    [
        ((576, 512), ("causal", "sink")),
        ((576, 512), ("block_table", "causal")),
        ((320, 320), ("window", "packed")),
    ],
)
def test_values_that_are_the_beginnings_of_keys(cupy, rng, dims, features):
    sizes = {"heads": 4, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    lengths = {"seqlen_q": 200, "seqlen_k": 900, "page_sizes": HOPPER_PAGE_SIZES}
    case = draw_case(rng, "bfloat16", features, **sizes, **lengths)
    hide_nan(case)
    case = replace(case, problem=replace(case.problem, v=case.problem.k[..., : dims[1]]))
    q, k, _, _ = tensors(cupy, case)
    options = on_gpu(cupy, case.forward)
    for v in (k[..., : dims[1]], k[..., : dims[1]].copy()):
        out, lse = cufa.attention(q, k, v, **options, return_lse=True, kernel=KERNEL)
        with np.errstate(invalid="ignore"):
            assert_attention(out.get(), lse.get(), case.problem, **case.forward)


@pytest.mark.parametrize(
    ("dtype", "heads", "lengths", "features", "tiles"),
    [
        ("bfloat16", 128, (1, 3000), (), {"key_parts": 3}),
        ("bfloat16", 128, (3, 700), ("causal", "seqused_k"), {}),
        ("float16", 6, (300, 900), ("causal", "packed"), {}),
        ("float16", 6, (500, 1300), ("window", "softcap"), {}),
        ("bfloat16", 64, (1, 2000), ("seqused_k", "block_table"), {"key_parts": 5}),
        (FLOAT8, 128, (1, 3000), ("block_table",), {"key_parts": 3}),
        (FLOAT8, 128, (3, 3000), ("block_table", "seqused_k"), {"shares": 20}),
        ("bfloat16", 128, (2, 900), ("causal", "seqused_k"), {"shares": 30}),
        (FLOAT8, 6, (300, 900), ("causal", "alibi_slopes"), {}),
    ],
)
def test_latents_in_8_bits(cupy, rng, dtype, heads, lengths, features, tiles):
    """By the rule; without descales the same bits in every repeat, and as good as those in float16.

    There, sums of scores have another order, and a weight may be rounded the other way.
    """
    sizes = {"heads": heads, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    of_lengths = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "page_sizes": HOPPER_PAGE_SIZES}
    case = draw_case(rng, dtype, features, **sizes, **of_lengths)
    if dtype != FLOAT8:
        case = with_keys_in_8_bits(rng, case)
    hide_nan(case)
    problem = replace(case.problem, v=case.problem.k[..., :512])
    q, k = (cupy.asarray(as_bytes(x)).view(x.dtype) for x in (problem.q, problem.k))
    options = on_gpu(cupy, case.forward) | {"kernel": KERNEL, "tiles": tiles}

    def attend(queries, keys, **descales):
        (shape, own_dtype), of_lse = results_of(case)
        out = cupy.full(shape, np.nan, np.float16 if dtype == FLOAT8 else own_dtype)
        lse = cupy.full(of_lse[0], np.nan, of_lse[1])
        cufa.attention(queries, keys, keys[..., :512], **options, **descales, out=out, lse=lse)
        return out, lse

    expected = attend(q, k)
    if dtype != "bfloat16":
        in_halves = (cupy.asarray(x.astype(np.float16)) for x in (problem.q, problem.k))
        for one, other in zip(attend(*in_halves), expected, strict=True):
            np.testing.assert_allclose(one.get(), other.get(), rtol=2**-9, atol=2**-8)
    same = cupy.ones((), bool)
    for _ in range(100):
        for one, other in zip(attend(q, k), expected, strict=True):
            same &= (one.view("u2") == other.view("u2")).all()
    assert same

    descales = descales_of(rng, case, DESCALES[dtype != FLOAT8 :])
    out, lse = written(case, *attend(q, k, **on_gpu(cupy, descales)))
    with np.errstate(invalid="ignore"):
        assert_float8(out, lse, problem, descales, **case.forward)


@pytest.mark.parametrize("exponent", [-126, 118])
def test_queries_of_any_magnitude_beside_latents_in_8_bits(cupy, rng, exponent):
    """With a scale that makes scores of one, so that each element of Q counts."""
    sizes = {"heads": 64, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    case = with_keys_in_8_bits(rng, draw_case(rng, "bfloat16", (), seqlen_q=1, seqlen_k=500, **sizes))
    problem = replace(case.problem, v=case.problem.k[..., :512])
    problem.q[...] = np.ldexp(problem.q.astype(np.float32), exponent).astype(problem.q.dtype)
    scale = 2.0**-exponent / 16
    q, k = cupy.asarray(problem.q), cupy.asarray(as_bytes(problem.k)).view(problem.k.dtype)
    out, lse = cufa.attention(q, k, k[..., :512], softmax_scale=scale, return_lse=True, kernel=KERNEL)
    assert_float8(out.get(), lse.get(), problem, softmax_scale=scale)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "features"),
    [(3, 128, 1, ()), (2, 70, 1, ("softcap", "seqused_k"))],
)
def test_heads_of_one_query_are_its_rows(cupy, rng, batch, heads, kv_heads, features):
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads}
    case = draw(rng, features, seqlen_q=1, seqlen_k=200, dims=(576, 512), **sizes)
    check_forward(cupy, case, kernel=KERNEL)
    in_latents = replace(case, problem=replace(case.problem, v=case.problem.k[..., :512]))
    check_forward(cupy, in_pages(rng, in_latents, 64), kernel=KERNEL)
    q, k, *_ = tensors(cupy, in_latents)
    options = on_gpu(cupy, case.forward)
    out, lse = cufa.attention(q, k, k[..., :512], **options, return_lse=True, kernel=KERNEL)
    assert_attention(out.get(), lse.get(), in_latents.problem, **case.forward)


@pytest.mark.parametrize(
    ("seqlen_q", "features"), [(2, ("causal",)), (5, ("causal", "softcap", "seqused_k"))]
)
def test_heads_of_a_few_queries_are_rows(cupy, rng, seqlen_q, features):
    sizes = {"batch": 2, "heads": 128, "kv_heads": 1}
    case = draw(rng, features, seqlen_q=seqlen_q, seqlen_k=200, dims=(576, 512), **sizes)
    in_latents = replace(case, problem=replace(case.problem, v=case.problem.k[..., :512]))
    q, k, *_ = tensors(cupy, in_latents)
    options = on_gpu(cupy, case.forward)
    for each in (q, cupy.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)):
        out, lse = cufa.attention(each, k, k[..., :512], **options, return_lse=True)
        assert_attention(out.get(), lse.get(), in_latents.problem, **case.forward)


def test_heads_of_one_query_in_other_layouts(cupy, rng):
    """Heads that are apart, and each other's neighbours in memory."""
    case = draw(rng, (), seqlen_q=1, seqlen_k=500, heads=130, kv_heads=1, dims=(320, 72))
    q, k, v, _ = tensors(cupy, case)
    apart = cupy.zeros((*q.shape[:3], 328), q.dtype)[..., :320]
    apart[...] = q
    turned = cupy.ascontiguousarray(q.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    for each in (apart, turned):
        out, lse = cufa.attention(each, k, v, return_lse=True)
        assert_attention(out.get(), lse.get(), case.problem)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out, lse = cufa.attention(*heads_first, layout="bhsd", return_lse=True)
    assert_attention(out.transpose(0, 2, 1, 3).get(), lse.get(), case.problem)


# Blocks in pairs: fewer and more of them than run at once, as they come, after the first and in order.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dims", "features", "batch"),
    [((512, 512), ("causal",), 8), ((320, 264), ("packed", "seqused_k"), 2), ((384, 512), (), 1)],
)
def test_gradients_of_blocks_in_pairs(cupy, rng, dims, features, batch, deterministic):
    case = draw(rng, features, batch=batch, seqlen_k=1300, dims=dims)
    q, k, v, dout = tensors(cupy, case)
    forward, backward = on_gpu(cupy, case.forward), on_gpu(cupy, case.backward)
    out, lse = cufa.attention(q, k, v, **forward, return_lse=True)
    options = {**backward, "deterministic": deterministic, "kernel": BACKWARD}

    def gradients():  # rows of no sequence are left as they are
        room = {f"d{name}": cupy.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        return cufa.attention_backward(dout, q, k, v, out, lse, **options, **room)

    first = gradients()
    with np.errstate(invalid="ignore"):
        assert_gradients(tuple(x.get() for x in first), case.problem, **case.backward)
    same = cupy.ones((), bool)
    for _ in range(REPEATS // 10):
        again = gradients()
        for one, other in list(zip(first, again, strict=True))[0 if deterministic else 1 :]:
            same &= (one == other).all()
    assert same
