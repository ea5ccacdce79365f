"""Functions of one's own on scores, on a GPU: by every kernel that takes them, beside what is built in."""

from dataclasses import replace

import feature_cases as cases
import numpy as np
import pytest
from gpu_calls import on_gpu, results_of, skip_unless_it_runs_here, tensors, written
from test_emulator_score_mod import add_learnt, by_distance, learnt, see, shape_score
from tolerance import assert_attention, assert_gradients

import cufa

pytestmark = pytest.mark.gpu

# Of a forward and a backward.
HOPPER = ("fwd_6_wgmma", "bwd_4_wgmma", "bfloat16")
KERNELS = [
    ("fwd_4_flash_v2", "bwd_2_flash_v2", "float32"),
    ("fwd_5_mma", "bwd_3_mma", "float16"),
    ("fwd_5_mma", "bwd_3_mma", "float64"),
]
SIZES = {"seqlen_q": 203, "seqlen_k": 330, "head_dim": 64, "head_dim_v": 72}


def relative_bias(score, b, h, q_idx, kv_idx, table):
    return score + table[h, np.clip(q_idx - kv_idx, -64, 64) + 64]


def alibi(score, b, h, q_idx, kv_idx, slopes, shift):
    return score - slopes[h] * np.abs(q_idx + shift[0] - kv_idx)


def softcap(score, *_):
    return 2.5 * np.tanh(score / 2.5)


def same_document(b, h, q_idx, kv_idx, document):
    return document[b, q_idx] == document[b, kv_idx]


def prefix_lm(b, h, q_idx, kv_idx, prefix):
    return (kv_idx <= q_idx) | (kv_idx < prefix[b])


def window(b, h, q_idx, kv_idx):
    distance = q_idx + (SIZES["seqlen_k"] - SIZES["seqlen_q"]) - kv_idx
    return (distance <= 40) & (distance >= -7)


def moved(cupy, mods):
    """With their arrays on the GPU."""
    return {
        name: type(mod)(mod.function, *(cupy.asarray(x) for x in mod.arrays)) for name, mod in mods.items()
    }


def run(cupy, case, mods, forward, backward):
    """All results of both directions by these kernels."""
    skip_unless_it_runs_here(forward)
    q, k, v, dout = tensors(cupy, case)
    options = on_gpu(cupy, case.forward) | moved(cupy, mods)
    out, lse = cufa.attention(q, k, v, **options, return_lse=True, kernel=forward)
    of_backward = on_gpu(cupy, case.backward) | moved(cupy, mods)
    gradients = cufa.attention_backward(
        dout, q, k, v, out, lse, **of_backward, deterministic=case.deterministic, kernel=backward
    )
    return [x.get() for x in (out, lse, *cases.one_by_one(gradients))]


def check(cupy, case, mods, forward, backward):
    out, lse, *gradients = run(cupy, case, mods, forward, backward)
    with np.errstate(invalid="ignore"):
        assert_attention(out, lse, case.problem, **case.forward, **mods)
        assert_gradients(tuple(gradients), case.problem, **case.backward, **mods)


@pytest.mark.parametrize(
    "features", [("dbias", "causal"), ("packed", "softcap"), ("dropout", "deterministic")]
)
@pytest.mark.parametrize(("forward", "backward", "dtype"), KERNELS)
def test_one_that_does_much(cupy, rng, forward, backward, dtype, features):
    case = cases.draw_case(rng, dtype, features, **SIZES)
    table = rng.standard_normal((9, 2)).T
    halves = rng.standard_normal(400).astype(np.float16)[::-2]
    document = np.sort(rng.integers(0, 3, (2, 400)), axis=1)
    mods = {
        "score_mod": cufa.ScoreMod(shape_score, table, halves),
        "mask_mod": cufa.MaskMod(see, document),
    }
    check(cupy, case, mods, forward, backward)


OF_HOPPER = [("bwd_4_wgmma", (64, 72)), ("bwd_4_wgmma", (128, 128)), ("bwd_4_wgmma", (192, 128))]


@pytest.fixture(params=[("packed", "causal"), ("window", "sink"), ("softcap", "seqused_k")], ids="+".join)
def draw_on_hopper(request, rng):
    def draw(dims, **lengths):
        if dims[0] == 192 and "softcap" in request.param:
            pytest.skip("the kernel takes no softcap with such head dims")
        return cases.draw_case(
            rng, "bfloat16", request.param, **lengths, head_dim=dims[0], head_dim_v=dims[1]
        )

    return draw


@pytest.mark.parametrize(("backward", "dims"), [*OF_HOPPER, ("bwd_5_wgmma_wide", (256, 200))])
def test_on_hopper(cupy, rng, backward, dims, draw_on_hopper):
    case = draw_on_hopper(dims, seqlen_q=203, seqlen_k=330)
    mods = {"score_mod": cufa.ScoreMod(shape_score, rng.standard_normal((2, 9)), rng.standard_normal(200))}
    check(cupy, case, mods, HOPPER[0], backward)


@pytest.mark.parametrize(("backward", "dims"), OF_HOPPER)
def test_gradients_of_arrays_on_hopper(cupy, rng, backward, dims, draw_on_hopper):
    case = draw_on_hopper(dims, seqlen_q=203, seqlen_k=330)
    case = replace(case, gradients=(*case.gradients, "score_mod"))
    arrays = (
        rng.standard_normal((9, 2)).T,
        rng.standard_normal(200).astype(np.float16),
        rng.standard_normal(400),
    )
    mods = {
        "score_mod": cufa.ScoreMod(add_learnt, *arrays),
        "mask_mod": cufa.MaskMod(see, np.sort(rng.integers(0, 3, (2, 400)), axis=1)),
    }
    check(cupy, case, mods, HOPPER[0], backward)


@pytest.mark.parametrize("features", [(), ("packed", "causal")], ids=["full", "packed"])
@pytest.mark.parametrize(
    ("forward", "backward", "dtype", "head_dim"),
    [(*HOPPER, 64), (*HOPPER, 128), (*KERNELS[1], 64), (*KERNELS[2], 64)],
)
def test_lookups_by_distance(cupy, rng, forward, backward, dtype, head_dim, features):
    """In tiles that lie inside, and in others."""
    lengths = {"seqlen_q": 403, "seqlen_k": 530}
    case = cases.draw_case(rng, dtype, features, **lengths, head_dim=head_dim)
    case = replace(case, gradients=("score_mod",))
    check(cupy, case, {"score_mod": by_distance(rng, **lengths)}, forward, backward)


@pytest.mark.parametrize("parts", [{"key_parts": 1}, {"key_parts": 5}, {"shares": 37}], ids=str)
@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ((1, 5000, 8, 2, 128, 128), ("seqused_k",)),
        ((5, 2100, 16, 2, 64, 64), ("packed", "causal", "bias")),
        ((40, 999, 6, 3, 40, 72), ("window", "softcap")),
        ((3, 2000, 64, 2, 192, 128), ("block_table", "causal", "mask")),
        ((2, 900, 6, 1, 264, 272), ("bias", "sink")),
    ],
    ids=str,
)
def test_few_queries(cupy, rng, shape, features, parts):
    seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
    case = cases.draw_case(rng, "bfloat16", features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes)
    cases.hide_nan(case)
    q, k, v, _ = tensors(cupy, case)
    tables = rng.standard_normal((9, 2)).T, rng.standard_normal(seqlen_k)
    document = np.sort(rng.integers(0, 3, (2, seqlen_q + seqlen_k)), axis=1)
    for mods in (
        {"score_mod": by_distance(rng, seqlen_q, seqlen_k)},
        {"score_mod": cufa.ScoreMod(shape_score, *tables), "mask_mod": cufa.MaskMod(see, document)},
    ):
        out, lse = (cupy.full(size, np.nan, kind) for size, kind in results_of(case))
        options = on_gpu(cupy, case.forward) | moved(cupy, mods)
        cufa.attention(q, k, v, **options, out=out, lse=lse, kernel="fwd_8_split_kv", tiles=parts)
        with np.errstate(invalid="ignore"):
            assert_attention(*written(case, out, lse), case.problem, **case.forward, **mods)


def test_gradients_of_arrays_where_one_wants_them(cupy, rng):
    case = cases.draw_case(rng, "float16", (), **SIZES)
    q, k, v, dout = tensors(cupy, case)
    mod = cufa.ScoreMod(add_learnt, *(cupy.asarray(x) for x in (rng.random((2, 9)), *rng.random((2, 400)))))
    out, lse = cufa.attention(q, k, v, score_mod=mod, return_lse=True)
    given = (dout, q, k, v, out, lse)
    *_, expected = cufa.attention_backward(*given, score_mod=mod, return_dscore_mod=True)
    outputs = cupy.full((2, 9), np.nan), None, cupy.full(800, np.nan)[::2]
    *_, gradients = cufa.attention_backward(*given, score_mod=mod, dscore_mod=outputs)
    assert gradients[0] is outputs[0]
    assert gradients[2] is outputs[2]
    for gradient, wanted in zip(gradients, expected, strict=True):
        cupy.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-3 * float(abs(wanted).max()))


@pytest.mark.parametrize(("backward", "dims"), [*OF_HOPPER, ("bwd_5_wgmma_wide", (256, 256))])
def test_mask_on_hopper(cupy, rng, backward, dims, draw_on_hopper):
    """Of many tiles, most of which are hidden."""
    case = draw_on_hopper(dims, seqlen_q=1000, seqlen_k=2100)
    document = np.sort(rng.integers(0, 12, (2, 2100)), axis=1)
    check(cupy, case, {"mask_mod": cufa.MaskMod(see, document)}, HOPPER[0], backward)


@pytest.mark.parametrize(("forward", "backward", "dtype"), [*KERNELS, HOPPER])
def test_relative_bias(cupy, rng, forward, backward, dtype):
    case = cases.draw_case(rng, dtype, (), **SIZES)
    table = rng.standard_normal((4, 129)).astype(np.float32)
    check(cupy, case, {"score_mod": cufa.ScoreMod(relative_bias, table)}, forward, backward)


@pytest.mark.parametrize("function", [same_document, prefix_lm])
@pytest.mark.parametrize(("forward", "backward", "dtype"), [*KERNELS, HOPPER])
def test_masks_by_tables(cupy, rng, forward, backward, dtype, function):
    case = cases.draw_case(rng, dtype, (), **SIZES)
    table = np.sort(rng.integers(0, 5, (2, 330)), axis=1) if function is same_document else np.array([7, 250])
    check(cupy, case, {"mask_mod": cufa.MaskMod(function, table)}, forward, backward)


@pytest.mark.parametrize("features", [("packed", "dbias"), ("causal", "dropout"), ("softcap", "sink")])
@pytest.mark.parametrize(("forward", "backward", "dtype"), KERNELS)
def test_gradients_of_arrays(cupy, rng, forward, backward, dtype, features):
    case = cases.draw_case(rng, dtype, features, **SIZES)
    case = replace(case, gradients=(*case.gradients, "score_mod"))
    check(cupy, case, {"score_mod": learnt(rng, 400)}, forward, backward)


@pytest.mark.parametrize("feature", ["alibi_slopes", "softcap", "window"])
@pytest.mark.parametrize(("forward", "backward", "dtype"), [*KERNELS, HOPPER])
def test_as_the_feature_that_is_built_in(cupy, rng, forward, backward, dtype, feature):
    case = cases.draw_case(rng, dtype, (), **SIZES)
    sums = np.float64 if dtype == "float64" else np.float32
    slopes = rng.uniform(0.01, 0.5, 4).astype(sums)
    shift = np.array([SIZES["seqlen_k"] - SIZES["seqlen_q"]])
    built_in, mods = {
        "alibi_slopes": ({"alibi_slopes": slopes}, {"score_mod": cufa.ScoreMod(alibi, slopes, shift)}),
        "softcap": ({"softcap": 2.5}, {"score_mod": cufa.ScoreMod(softcap)}),
        "window": ({"window": (40, 7)}, {"mask_mod": cufa.MaskMod(window)}),
    }[feature]
    results = run(cupy, case, mods, forward, backward)
    case.numbers.update(built_in)
    out, lse, *gradients = results
    assert_attention(out, lse, case.problem, **case.forward)
    assert_gradients(tuple(gradients), case.problem, **case.backward)


def test_a_new_array_is_no_new_kernel(cupy, rng):
    case = cases.draw_case(rng, "float16", (), **SIZES)
    q, k, v, _ = tensors(cupy, case)
    for _ in range(2):
        table = rng.standard_normal((4, 129)).astype(np.float32)
        mods = {"score_mod": cufa.ScoreMod(relative_bias, table)}
        out, lse = cufa.attention(q, k, v, **moved(cupy, mods), return_lse=True)
        assert_attention(out.get(), lse.get(), case.problem, **mods)


def test_probabilities(cupy, rng):
    case = cases.draw_case(rng, "float32", ("causal",), **SIZES)
    document = np.sort(rng.integers(0, 5, (2, 330)), axis=1)
    mods = {"score_mod": cufa.ScoreMod(softcap), "mask_mod": cufa.MaskMod(same_document, document)}
    q, k, v, _ = tensors(cupy, case)
    _, _, probs = cufa.attention(q, k, v, causal=True, **moved(cupy, mods), return_attn_probs=True)
    arrays = (case.problem.q, case.problem.k, case.problem.v)
    _, _, expected = cufa.attention(*arrays, causal=True, **mods, return_attn_probs=True, backend="numpy")
    np.testing.assert_allclose(probs.get(), expected, atol=1e-5)
