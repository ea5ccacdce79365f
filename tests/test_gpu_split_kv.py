"""Split keys on a GPU: as many parts as a plan chooses and others, of few queries and many keys."""

from dataclasses import replace

import numpy as np
import pytest
from feature_cases import draw_case, hide_nan, in_pages
from float8 import DESCALES, assert_float8, descales_of, random_descales, with_keys_in_8_bits
from gpu_calls import captured, check_forward, on_gpu, results_of, tensors, written
from tolerance import assert_attention

import cufa
from cufa.arrays import as_bytes
from cufa.problem import FLOAT8

pytestmark = pytest.mark.gpu

KERNEL = "fwd_8_split_kv"
# (seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v)
SHAPES = [
    (1, 5000, 8, 2, 128, 128),
    (1, 1, 4, 4, 64, 64),
    (1, 3001, 3, 3, 128, 80),
    (5, 2100, 16, 2, 64, 64),
    (7, 1500, 8, 1, 256, 256),
    (40, 999, 6, 3, 40, 72),
    (3, 2000, 64, 2, 192, 128),
    (1, 3000, 16, 2, 512, 512),
    (3, 900, 6, 1, 264, 272),
]
FEATURES = [
    (),
    ("causal",),
    ("window", "sink"),
    ("softcap", "alibi_slopes"),
    ("seqused_k", "causal"),
    ("packed", "seqused_k", "causal", "sink"),
    ("packed", "window", "softcap"),
    ("mask", "causal", "softcap"),
    ("mask_bits", "packed", "sink"),
    ("bias", "packed", "seqused_k"),
]


def draw(rng, shape, features, dtype="float16"):
    seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v = shape
    case = draw_case(
        *(rng, dtype, features),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    hide_nan(case)
    return case


# Each shape with some features and each features with some shapes.
@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries(cupy, rng, shape, offset):
    place = SHAPES.index(shape)
    features, dtype = FEATURES[(place + 2 * offset) % len(FEATURES)], ("float16", "bfloat16")[place % 2]
    for parts in ({"key_parts": 1}, {"key_parts": 5}, {"shares": 37}):
        check_forward(cupy, draw(rng, shape, features, dtype), kernel=KERNEL, tiles=parts)


@pytest.mark.parametrize("mask", ["mask", "mask_bits"])
@pytest.mark.parametrize(
    "shape", [(1, 4096, 8, 2, 128, 128), (40, 2048, 6, 3, 64, 64), (17, 1072, 8, 1, 256, 256)], ids=str
)
def test_masks_whose_rows_lie_in_sixteens(cupy, rng, shape, mask):
    for features in (("causal", "sink"), ("packed", "seqused_k")):
        case = draw(rng, shape, (*features, mask))
        for parts in ({"key_parts": 1}, {"key_parts": 5}, {"shares": 37}):
            check_forward(cupy, case, kernel=KERNEL, tiles=parts)


@pytest.mark.parametrize(
    "tiles",
    [
        {"block_m": 16, "block_n": 64, "threads": 64, "stages": 2},
        {"block_m": 32, "block_n": 16, "threads": 256, "stages": 4},
        {"block_m": 64, "block_n": 32, "threads": 256, "stages": 3, "key_parts": 200},
        {"block_m": 128, "block_n": 32, "threads": 256, "stages": 2, "key_parts": 3},
        {"block_m": 16, "block_n": 16, "threads": 128, "stages": 3, "shares": 2},
        {"block_m": 128, "block_n": 32, "threads": 256, "stages": 2, "shares": 1000},
    ],
    ids=str,
)
def test_tiles(cupy, rng, tiles):
    case = draw(rng, (9, 3000, 12, 2, 64, 128), ("causal", "window"))
    check_forward(cupy, case, kernel=KERNEL, tiles=tiles)


def test_what_is_chosen_for_decoding(cupy, rng):
    """One query of each sequence, with caches that are filled to different lengths."""
    case = draw(rng, (1, 4000, 32, 8, 128, 128), ("causal",), "bfloat16")
    case.arrays["seqused_k"] = np.array([3999, 17], np.int32)
    hide_nan(case)
    q, k, v, _ = tensors(cupy, case)
    assert cufa.plan(q, k, v, causal=True).kernel == KERNEL
    check_forward(cupy, case)


@pytest.mark.parametrize("features", [("causal",), ("causal", "sink"), ("packed", "causal")], ids=str)
def test_what_is_chosen_for_a_chunk_of_a_prompt(cupy, rng, features):
    case = draw(rng, (60, 6000, 4, 2, 128, 128), features, "bfloat16")
    q, k, v, _ = tensors(cupy, case)
    plan = cufa.plan(q, k, v, **on_gpu(cupy, case.forward))
    assert plan.kernel == KERNEL
    assert max(plan.tiles["key_parts"], plan.tiles["shares"]) > 1
    check_forward(cupy, case)


@pytest.mark.parametrize("batch", [9, 40])
def test_caches_of_many_lengths(cupy, rng, batch):
    """Shared out evenly, the same bits in every run."""
    sizes = {"batch": batch, "heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128}
    case = draw_case(rng, "bfloat16", ("seqused_k",), seqlen_q=2, seqlen_k=6000, **sizes)
    case.arrays["seqused_k"] = np.geomspace(1, 6000, batch).astype(np.int32)
    case.arrays["seqused_k"][-2] = 0
    hide_nan(case)
    q, k, v, _ = tensors(cupy, case)
    forward = on_gpu(cupy, case.forward)
    assert cufa.plan(q, k, v, **forward).tiles["shares"] > 1
    check_forward(cupy, case)
    first = cufa.attention(q, k, v, **forward)
    for _ in range(50):
        assert (cufa.attention(q, k, v, **forward).view("u2") == first.view("u2")).all()


@pytest.mark.parametrize("features", [("causal", "seqused_k"), ("packed", "sink")], ids=str)
@pytest.mark.parametrize("heads", [16, 40])
def test_values_that_are_the_beginnings_of_keys(cupy, rng, heads, features):
    """Views of the same memory, as in multi-head latent attention; in pages, too."""
    case = draw(rng, (2, 1500, heads, 1, 576, 512), features, "bfloat16")
    case = replace(case, problem=replace(case.problem, v=case.problem.k[..., :512]))
    for placed in (case, in_pages(rng, case, 16)):
        q, k, _, _ = tensors(cupy, placed)
        v, forward = k[..., :512], on_gpu(cupy, placed.forward)
        assert ("VALUES_IN_KEYS", True) in cufa.plan(q, k, v, **forward).variant.macros
        out, lse = (cupy.full(shape, np.nan, kind) for shape, kind in results_of(placed))
        cufa.attention(q, k, v, **forward, out=out, lse=lse)
        with np.errstate(invalid="ignore"):
            assert_attention(*written(placed, out, lse), placed.problem, **placed.forward)


def on_gpu_in_8_bits(cupy, problem):
    """q, k and v, of which CuPy itself moves none of 8-bit floats."""
    return [cupy.asarray(as_bytes(x)).view(x.dtype) for x in (problem.q, problem.k, problem.v)]


@pytest.mark.parametrize("place", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [FLOAT8, "bfloat16", "float16"])
def test_8_bits(cupy, rng, dtype, place):
    """Of keys and values, and of queries."""
    shape, features, names = SHAPES[place], FEATURES[place], DESCALES
    case = draw(rng, shape, features, dtype)
    if dtype != FLOAT8:
        case, names = with_keys_in_8_bits(rng, case), DESCALES[1:]
    problem, descales = case.problem, descales_of(rng, case, names)
    side = {name: cupy.asarray(array) for name, array in (case.arrays | descales).items()}
    arrays = on_gpu_in_8_bits(cupy, problem)
    for tiles in (None, {"key_parts": 5}, {"shares": 37}):
        out, lse = cufa.attention(
            *arrays, return_lse=True, kernel=KERNEL, tiles=tiles, **case.numbers, **side
        )
        with np.errstate(invalid="ignore"):
            assert_float8(out.get(), lse.get(), problem, descales, **case.forward)


def test_8_bits_in_pages(cupy, rng):
    """What is chosen for decoding with a cache, some of whose pages two sequences have."""
    case = draw(rng, (1, 3000, 16, 2, 128, 128), ("causal",), FLOAT8)
    case = in_pages(rng, case, 16)
    case.arrays["seqused_k"] = np.array([2999, 40], np.int32)
    case.arrays["block_table"][1, :2] = case.arrays["block_table"][0, :2]
    problem, descales = case.problem, random_descales(rng, 2, 2)
    side = {name: cupy.asarray(array) for name, array in (case.arrays | descales).items()}
    arrays = on_gpu_in_8_bits(cupy, problem)
    assert cufa.plan(*arrays, **case.numbers, **side).kernel == KERNEL
    out, lse = cufa.attention(*arrays, return_lse=True, **case.numbers, **side)
    assert_float8(out.get(), lse.get(), problem, descales, **case.forward)


@pytest.mark.parametrize("exponent", [-126, -60, 60, 118])
def test_queries_of_any_magnitude_beside_keys_in_8_bits(cupy, rng, exponent):
    """With a scale that makes scores of one, so that each element of Q counts."""
    case = draw(rng, (3, 500, 4, 2, 128, 64), (), "bfloat16")
    case = with_keys_in_8_bits(rng, case)
    case.problem.q[...] = np.ldexp(case.problem.q.astype(np.float32), exponent).astype(case.problem.q.dtype)
    scale = 2.0**-exponent / 16
    out, lse = cufa.attention(*on_gpu_in_8_bits(cupy, case.problem), softmax_scale=scale, return_lse=True)
    assert_float8(out.get(), lse.get(), case.problem, softmax_scale=scale)


def test_prompts_beside_keys_in_8_bits(cupy, rng):
    case = with_keys_in_8_bits(rng, draw(rng, (700, 900, 4, 2, 128, 128), ("causal",), "bfloat16"))
    arrays = on_gpu_in_8_bits(cupy, case.problem)
    assert cufa.plan(*arrays, causal=True).kernel == KERNEL
    out, lse = cufa.attention(*arrays, causal=True, return_lse=True)
    assert_float8(out.get(), lse.get(), case.problem, **case.forward)


def test_what_follows_sees_the_output_where_nothing_is_merged(cupy):
    """Of keys so few that each share is of whole tiles."""
    q = cupy.ones((64, 1, 8, 128), np.float16)
    k, v = (cupy.ones((64, 4096, 2, 128), np.float16) for _ in range(2))
    options = {"seqused_k": cupy.full(64, 16, np.int32), "out": cupy.empty_like(q)}
    assert cufa.plan(q, k, v, seqused_k=options["seqused_k"]).tiles["shares"] > 1
    for _ in range(200):
        options["out"].fill(np.nan)
        assert (cufa.attention(q, k, v, **options) == 1).all()


def test_workspace_and_graph(cupy, rng):
    case, other = (draw(rng, SHAPES[0], ("causal",)) for _ in range(2))
    q, k, v, _ = tensors(cupy, case)
    options = {"causal": True, "kernel": KERNEL, "tiles": {"key_parts": 7}}
    needed = cufa.plan(q, k, v, **options).workspace_bytes
    workspace = cupy.full(needed, 0xFF, np.uint8)
    out, lse = (cupy.full(shape, np.nan, kind) for shape, kind in results_of(case))
    stream = cupy.cuda.Stream(non_blocking=True)
    with pytest.raises(ValueError, match="workspace has"):
        cufa.attention(q, k, v, workspace=workspace[:-1], **options)

    def call():
        cufa.attention(q, k, v, out=out, lse=lse, workspace=workspace, **options)

    with stream:
        graph, _ = captured(cupy, call)
        for target, source in zip((q, k, v), tensors(cupy, other), strict=False):
            target[...] = source
        graph.launch()
        stream.synchronize()
    assert_attention(out.get(), lse.get(), other.problem, causal=True)


def test_the_same_bits(cupy, rng):
    case = draw(rng, SHAPES[0], ())
    q, k, v, _ = tensors(cupy, case)
    first = cufa.attention(q, k, v, kernel=KERNEL)
    for _ in range(100):
        assert (cufa.attention(q, k, v, kernel=KERNEL).view(np.uint16) == first.view(np.uint16)).all()
