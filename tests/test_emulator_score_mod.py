"""Functions of one's own on scores, on the emulator: one that does much, in all kernels that take them."""

from dataclasses import replace

import feature_cases as cases
import numpy as np
import pytest
import test_emulator_split_kv as few
from emulator import calls
from float8 import assert_float8, descales_of
from test_emulator_backward_features import TILES as BACKWARD_TILES
from test_emulator_forward_features import TILES
from test_emulator_hopper_features import DEVICE as FEW_SMS
from test_emulator_hopper_features import gradients_of
from tolerance import assert_attention, assert_gradients

from cufa import reference
from cufa.problem import FLOAT8, accumulator_dtype
from cufa.score_mod import MaskMod, ScoreMod

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

# Without a mask to multiply with, sums are not all of the same sign.
FEATURES = frozenset(("causal", "packed", "bias", "dbias"))
LENGTHS = {"seqlen_q": 39, "seqlen_k": 53}
ALL_LENGTHS = [dict(zip(LENGTHS, lengths, strict=True)) for lengths in cases.LENGTHS]


def shape_score(score, b, h, q_idx, kv_idx, table, halves):
    """A relative bias by a table of strides, a bound, and what changes with every place.

    One query has no score that is finite.
    """
    distance = np.clip(q_idx - kv_idx, -4, 4)
    score = 2 * np.tanh(score / 2) + table[h % 2, distance + 4] * halves[kv_idx // 2]
    score = np.where((kv_idx + b) % 5 == 3, np.exp(-np.abs(score)) - 1, np.maximum(score, -1.5) ** 2)
    score = score + (q_idx & 3) / 8 - np.sqrt(1.0 + kv_idx // 7)
    return np.where(q_idx == 9, -np.inf, score)


def learn(score, b, h, q_idx, kv_idx, table, halves, temperatures, counts):
    """What is read of arrays by distance, by key and by head, one element twice; one query has but -inf."""
    distance = np.clip(q_idx - kv_idx, -4, 4) + 4 + counts[kv_idx]
    score = 2 * np.tanh(np.maximum(score, -9.0) * temperatures[h])
    score = score + table[h % 2, distance] * halves[kv_idx // 2] + 0.1 * table[h % 2, distance] ** 2
    return np.where(q_idx == 9, -np.inf, score)


def learnt(rng, tokens):
    """For up to so many tokens; of several strides and dtypes, one of which has no gradient."""
    table, temperatures = rng.standard_normal((9, 2)).T, rng.standard_normal(4).astype(np.float32)
    halves = rng.standard_normal(2 * tokens).astype(np.float16)[::-2]
    return ScoreMod(learn, table, halves, temperatures, np.zeros(tokens, np.int32))


def see(b, h, q_idx, kv_idx, document):
    return (document[b, q_idx] == document[b, kv_idx]) | ((kv_idx < 2) & ~(h == 1))


@pytest.fixture
def mods(rng):
    table = rng.standard_normal((9, 2)).T
    halves = rng.standard_normal(60).astype(np.float16)[::-2]
    document = rng.integers(0, 3, (2, 60))
    return {
        "score_mod": ScoreMod(shape_score, table, halves),
        "mask_mod": MaskMod(see, np.sort(document, axis=1)),
    }


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("fwd_4_flash_v2", "float64"), ("fwd_5_mma", "float16"), ("fwd_5_mma", "float32")],
)
def test_forward(rng, mods, kernel, dtype):
    for case in cases.draw_lengths(rng, dtype, FEATURES, **cases.SIZES):
        case.numbers.update(mods)
        cases.hide_nan(case)
        inputs = case.problem.q, case.problem.k, case.problem.v
        with np.errstate(invalid="ignore"):
            out, lse = calls.attention(*inputs, kernel=kernel, tiles=TILES[kernel], **case.emulator_forward)
            assert_attention(out, lse, case.problem, **case.forward)


@pytest.mark.parametrize(
    "mods",
    [
        {"mask_mod": MaskMod(lambda b, h, q_idx, kv_idx: kv_idx - q_idx)},
        {"score_mod": ScoreMod(lambda score, b, h, q_idx, kv_idx: -kv_idx)},
    ],
    ids="".join,
)
def test_functions_that_return_places(rng, mods):
    """In C++ a place is no number yet."""
    case = cases.draw_case(rng, "float16", (), **LENGTHS, **cases.SIZES)
    case.numbers.update(mods)
    inputs, name = (case.problem.q, case.problem.k, case.problem.v), "fwd_5_mma"
    out, lse = calls.attention(*inputs, kernel=name, tiles=TILES[name], **case.emulator_forward)
    assert_attention(out, lse, case.problem, **case.forward)


@pytest.mark.parametrize("kernel", ["fwd_5_mma", "fwd_6_wgmma"])
def test_keys_in_pages(rng, mods, kernel):
    """A place is a key's in its sequence, wherever its page is."""
    sizes = {**LENGTHS, **cases.SIZES}
    case = cases.draw_case(rng, "float16", ("block_table", "causal"), **sizes)
    case.numbers.update(mods)
    inputs = case.problem.q, case.problem.k, case.problem.v
    tiles = TILES.get(kernel)
    out, lse = calls.attention(*inputs, kernel=kernel, tiles=tiles, device=FEW_SMS, **case.emulator_forward)
    with np.errstate(invalid="ignore"):
        assert_attention(out, lse, case.problem, **case.forward)


def add_distance(score, b, h, q_idx, kv_idx, slopes):
    """The score and what is said of places alone, without looking anything up by them."""
    return 0.5 + (score - slopes[h] * np.abs(q_idx - kv_idx)) - np.minimum(kv_idx, 7) / 8


def see_documents(b, h, q_idx, kv_idx, of_queries, of_keys):
    """Tiles of which all is seen, some or nothing; and a query that sees nothing."""
    same = of_queries[b, q_idx // 64] == of_keys[b, kv_idx // 16]
    return (same | ((kv_idx % 32 < 3) & (kv_idx < q_idx) & (h == 1))) & (q_idx != 7)


# Two tiles of either length.
HOPPER_SIZES = {"seqlen_q": 140, "seqlen_k": 150, "heads": 2, "kv_heads": 1}


def see_blocks(b, h, q_idx, kv_idx, of_blocks):
    """The same for all heads."""
    return (q_idx // 40 + b) % 2 == of_blocks[kv_idx // 24]


def by_distance(rng, seqlen_q, seqlen_k):
    """A score_mod that reads elements at constants from each other, along a last axis and another one.

    There are no more elements than distances: past the ends of sequences, there is nothing to read.
    """
    farthest = seqlen_q + seqlen_k - 2

    def add(score, b, h, q_idx, kv_idx, table, pairs):
        distance = q_idx - kv_idx + (seqlen_k - 1)
        added = pairs[h % 2, distance, 1] * table[1, farthest - distance] + table[h % 2, distance]
        return score + added - pairs[0, kv_idx, 0]

    tables = rng.standard_normal((2, farthest + 1)), rng.standard_normal((2, farthest + 1, 4))[..., ::2]
    return ScoreMod(add, *tables)


@pytest.mark.parametrize(
    ("features", "functions", "block_n"),
    [
        (("window", "softcap"), ("shape_score",), 128),
        (("packed",), ("by_distance",), 64),
        ((), ("by_distance",), 128),
        (("packed", "causal"), ("shape_score", "see_documents"), 16),
        (("causal",), ("shape_score", "see_documents"), 32),
        (("seqused_k", "sink"), ("see_documents",), 16),
        (("seqused_k", "sink"), ("see_documents",), 64),
        (("window",), ("add_distance", "see_documents"), 128),
        (("packed", "alibi_slopes"), ("add_distance",), 128),
        (("packed", "causal"), ("see_blocks",), 96),
        (("bias", "softcap", "causal"), ("add_distance",), 64),
    ],
)
def test_hopper_forward(rng, mods, features, functions, block_n):
    """Without a bit for each score where tiles are of 16 keys."""
    sizes = {**HOPPER_SIZES, "head_dim": 64, "head_dim_v": 40}
    case = cases.draw_case(rng, "bfloat16", features, **sizes)
    own = {
        "shape_score": ScoreMod(shape_score, mods["score_mod"].arrays[0], rng.standard_normal(110)),
        "add_distance": ScoreMod(add_distance, rng.random(4)),
        "by_distance": by_distance(rng, HOPPER_SIZES["seqlen_q"], HOPPER_SIZES["seqlen_k"]),
        "see_documents": MaskMod(see_documents, *rng.integers(0, 3, (2, 2, 16))),
        "see_blocks": MaskMod(see_blocks, np.arange(20) % 2),
    }
    case.numbers.update((own[name].name, own[name]) for name in functions)
    cases.hide_nan(case)
    inputs = case.problem.q, case.problem.k, case.problem.v
    tiles = {"block_n": block_n}
    out, lse = calls.attention(
        *inputs, kernel="fwd_6_wgmma", tiles=tiles, device=FEW_SMS, **case.emulator_forward
    )
    with np.errstate(invalid="ignore"):
        assert_attention(out, lse, case.problem, **case.forward)


@pytest.mark.parametrize(
    ("features", "functions", "tiles"),
    [
        ((), ("by_distance",), few.OWN_TILES),
        (("packed", "causal"), ("by_distance",), few.OWN_TILES | {"key_parts": 1, "shares": 7}),
        (("packed", "causal", "bias"), ("shape_score", "see_documents"), few.WIDE_TILES),
        (("seqused_k", "sink", "mask"), ("see_documents",), few.SHARED_TILES),
        (("window", "softcap", "bias"), ("add_distance",), few.COLUMN_TILES),
        (("block_table", "causal"), ("shape_score", "see_blocks"), few.OWN_TILES),
    ],
)
def test_few_queries(rng, mods, features, functions, tiles):
    lengths = {"seqlen_q": 11, "seqlen_k": 109}
    own = {
        "shape_score": ScoreMod(shape_score, mods["score_mod"].arrays[0], rng.standard_normal(110)),
        "by_distance": by_distance(rng, **lengths),
        "add_distance": ScoreMod(add_distance, rng.random(6)),
        "see_documents": MaskMod(see_documents, *rng.integers(0, 3, (2, 2, 16))),
        "see_blocks": MaskMod(see_blocks, np.arange(20) % 2),
    }
    for dtype in ("float16", "bfloat16"):
        case = cases.draw_case(rng, dtype, features, **lengths, **few.HEADS)
        case.numbers.update((own[name].name, own[name]) for name in functions)
        with np.errstate(invalid="ignore"):
            few.check(case, tiles)


def test_few_queries_of_8_bits(rng):
    case = cases.draw_case(rng, FLOAT8, ("causal", "bias"), seqlen_q=3, seqlen_k=90, **few.HEADS)
    case.numbers["score_mod"] = by_distance(rng, 3, 90)
    inputs, descales = (case.problem.q, case.problem.k, case.problem.v), descales_of(rng, case)
    options = {"kernel": few.KERNEL, "tiles": few.OWN_TILES | {"block_n": 32}, "out_dtype": np.float16}
    out, lse = calls.attention(*inputs, **case.emulator_forward, **descales, **options)
    assert_float8(out, lse, case.problem, descales, **case.forward)


@pytest.mark.parametrize("parts", [{"key_parts": 2}, {"key_parts": 1, "shares": 3}], ids=str)
@pytest.mark.parametrize("features", [("seqused_k",), ("packed",)], ids=str)
def test_few_queries_of_a_sequence_without_keys(rng, features, parts):
    """The function is not asked about its keys: there are none."""
    case = cases.draw_case(rng, "float16", features, seqlen_q=3, seqlen_k=90, **few.HEADS)
    if "seqused_k" in case.arrays:
        case.arrays["seqused_k"][:] = 0, 70
    else:
        case.arrays["cu_seqlens_k"][:2] = 0
    case.numbers["mask_mod"] = MaskMod(lambda b, h, q_idx, kv_idx, seen: seen[kv_idx], rng.random(300) < 0.5)
    few.check(case, few.OWN_TILES | parts)


def add_relative(score, b, h, q_idx, kv_idx, table):
    return score + table[h % 2, np.clip(q_idx - kv_idx, -4, 4) + 4]


def add_learnt(score, b, h, q_idx, kv_idx, table, halves, of_queries):
    """What may be learnt of it depends on no score."""
    added = table[h % 2, np.clip(q_idx - kv_idx, -4, 4) + 4] * halves[kv_idx // 2]
    return 2 * np.tanh(score / 2) + added - of_queries[q_idx] / (kv_idx + 1)


@pytest.mark.parametrize(
    ("kernel", "features", "head_dim", "head_dim_v", "functions"),
    [
        ("bwd_4_wgmma", ("window", "softcap"), 64, 40, ("shape_score",)),
        ("bwd_4_wgmma", ("packed", "causal", "deterministic"), 192, 72, ("shape_score",)),
        ("bwd_4_wgmma", ("seqused_k", "sink"), 128, 128, ("add_relative", "see_documents")),
        ("bwd_4_wgmma", ("packed", "causal"), 72, 128, ("shape_score", "see_documents")),
        ("bwd_4_wgmma", ("packed", "causal", "softcap"), 64, 64, ("add_learnt",)),
        ("bwd_4_wgmma", ("seqused_k", "window"), 192, 40, ("add_learnt", "see_documents")),
        ("bwd_4_wgmma", (), 64, 64, ("by_distance",)),
        ("bwd_4_wgmma", ("sink",), 128, 128, ("by_distance",)),
        ("bwd_4_wgmma", ("packed", "causal"), 96, 96, ("by_distance",)),
        ("bwd_5_wgmma_wide", ("packed", "causal"), 72, 136, ("shape_score",)),
        ("bwd_5_wgmma_wide", ("packed", "mask"), 192, 192, ("shape_score", "see_documents")),
        ("bwd_5_wgmma_wide", ("seqused_k", "window"), 256, 256, ("add_relative", "see_documents")),
    ],
)
def test_hopper_backward(rng, mods, kernel, features, head_dim, head_dim_v, functions):
    sizes = {**HOPPER_SIZES, "head_dim": head_dim, "head_dim_v": head_dim_v}
    case = cases.draw_case(rng, "bfloat16", features, **sizes)
    table = mods["score_mod"].arrays[0]
    score_mods = {
        "shape_score": ScoreMod(shape_score, table, rng.standard_normal(110)),
        "add_relative": ScoreMod(add_relative, table),
        "add_learnt": ScoreMod(
            add_learnt, table, rng.standard_normal(110).astype(np.float16), rng.standard_normal(150)
        ),
        "by_distance": by_distance(rng, HOPPER_SIZES["seqlen_q"], HOPPER_SIZES["seqlen_k"]),
    }
    case.numbers["score_mod"] = score_mods[functions[0]]
    if "see_documents" in functions:
        of_keys = np.repeat([[0, 1], [3, 2]], 8, axis=1)  # the block has 128 of them
        case.numbers["mask_mod"] = MaskMod(see_documents, np.array([[0, 1, 0], [2, 2, 1]]), of_keys)
    if functions[0] in ("add_learnt", "by_distance"):
        case = replace(case, gradients=(*case.gradients, "score_mod"))
    cases.hide_nan(case)
    with np.errstate(invalid="ignore"):
        assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)


@pytest.mark.parametrize(("kernel", "head_dim"), [("bwd_4_wgmma", 64), ("bwd_5_wgmma_wide", 136)])
@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (lambda score, b, h, q_idx, kv_idx: score * 1e5, 1e-4),
        (lambda score, b, h, q_idx, kv_idx: score * 2e-8, 8000),
        (lambda score, b, h, q_idx, kv_idx: np.where(kv_idx % 7 == 3, -np.exp(abs(score) + 11), score), 1),
    ],
    ids=["large", "small", "of the score"],
)
def test_slopes_that_16_bits_cannot_hold(rng, kernel, head_dim, function, scale):
    case = cases.draw_case(rng, "float16", ("causal",), **HOPPER_SIZES, head_dim=head_dim)
    case.numbers["score_mod"] = ScoreMod(function)
    dout = (case.problem.dout * scale).astype(np.float16)
    case = replace(case, problem=replace(case.problem, dout=dout))
    assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)


LEAST = float(np.finfo(np.float32).min)
HIDING = {
    "least": lambda score, b, h, q_idx, kv_idx, t: score + (kv_idx > q_idx) * LEAST,
    "subtracted": lambda score, b, h, q_idx, kv_idx, t: score - 1e38 * (kv_idx > q_idx),
    "not shown": lambda score, b, h, q_idx, kv_idx, t: score + (1.0 - (kv_idx <= q_idx)) * -1e9,
    "chosen": lambda score, b, h, q_idx, kv_idx, t: score + np.where(kv_idx > q_idx, LEAST, 0),
    "element": lambda score, b, h, q_idx, kv_idx, t: score + (kv_idx > q_idx) * t[h],
    "infinite": lambda score, b, h, q_idx, kv_idx, t: score + np.where(kv_idx > q_idx, -np.inf, 0),
}


def hiding_case(rng, dtype, name, scale, **sizes):
    """Keys after a query are hidden by a number that is added; and the same case, by a mask_mod."""
    case = cases.draw_case(rng, dtype, (), seqlen_q=70, seqlen_k=70, heads=2, kv_heads=1, **sizes)
    if scale is not None:
        case.numbers["softmax_scale"] = scale
    mod = ScoreMod(HIDING[name], np.array([LEAST, -1e38], np.float32))
    masked = {"mask_mod": MaskMod(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)}
    numbers = [{**case.numbers, **added} for added in ({"score_mod": mod}, masked)]
    return [replace(case, numbers=of_case) for of_case in numbers]


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim"),
    [
        ("fwd_5_mma", "float16", 40),
        ("fwd_6_wgmma", "bfloat16", 64),
        ("fwd_8_split_kv", "bfloat16", 40),
        ("fwd_9_float32", "float32", 40),
        ("fwd_10_wgmma_wide", "float16", 272),
    ],
)
def test_keys_hidden_by_adding_large_numbers(rng, kernel, dtype, head_dim, name):
    """Nothing but those keys is hidden, in whatever units scores are."""
    options = {"kernel": kernel, "tiles": TILES.get(kernel), "device": FEW_SMS}
    for scale in (None, 0.0, 1e-20, -0.3):
        case, masked = hiding_case(rng, dtype, name, scale, head_dim=head_dim)
        inputs = case.problem.q, case.problem.k, case.problem.v
        out, lse = calls.attention(*inputs, **options, **case.emulator_forward)
        assert_attention(out, lse, masked.problem, **masked.forward)


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize(("kernel", "head_dim"), [("bwd_4_wgmma", 64), ("bwd_5_wgmma_wide", 136)])
def test_gradients_of_keys_hidden_by_adding_large_numbers(rng, kernel, head_dim, name):
    for scale in (None, 0.0):
        case, masked = hiding_case(rng, "bfloat16", name, scale, head_dim=head_dim)
        assert_gradients(gradients_of(kernel, case), masked.problem, **masked.backward)


def check_backward(case, kernel):
    inputs = case.problem.q, case.problem.k, case.problem.v
    kinds = case.problem.q.dtype, accumulator_dtype(case.problem.dtype_name)
    with np.errstate(invalid="ignore"):
        results = reference.attention(*inputs, **case.forward)
        out, lse = (x.astype(kind) for x, kind in zip(results, kinds, strict=True))
        gradients = calls.attention_backward(
            case.problem.dout,
            *inputs,
            out,
            lse,
            kernel=kernel,
            tiles=BACKWARD_TILES[kernel],
            **case.emulator_backward,
        )
        assert_gradients(gradients, case.problem, **case.backward)


@pytest.mark.parametrize(
    ("kernel", "dtype", "deterministic"),
    [("bwd_2_flash_v2", "float32", False), ("bwd_3_mma", "float16", True)],
)
def test_backward(rng, mods, kernel, dtype, deterministic):
    features = FEATURES | ({"deterministic"} if deterministic else set())
    for case in cases.draw_lengths(rng, dtype, features, **cases.SIZES):
        case.numbers.update(mods)
        cases.hide_nan(case)
        check_backward(case, kernel)


@pytest.mark.parametrize(("kernel", "dtype"), [("bwd_2_flash_v2", "float64"), ("bwd_3_mma", "float16")])
def test_gradients_of_arrays(rng, mods, kernel, dtype):
    for case in cases.draw_lengths(rng, dtype, FEATURES, **cases.SIZES):
        case.numbers.update(score_mod=learnt(rng, 60), mask_mod=mods["mask_mod"])
        cases.hide_nan(case)
        check_backward(replace(case, gradients=(*case.gradients, "score_mod")), kernel)


@pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])
def test_lookups_by_distance(rng, features):
    """Whole tiles, and tiles that queries or keys end in."""
    case = cases.draw_case(rng, "float16", features, **LENGTHS, **cases.SIZES)
    case.numbers["score_mod"] = by_distance(rng, **LENGTHS)
    inputs, name = (case.problem.q, case.problem.k, case.problem.v), "fwd_5_mma"
    out, lse = calls.attention(*inputs, kernel=name, tiles=TILES[name], **case.emulator_forward)
    assert_attention(out, lse, case.problem, **case.forward)
    check_backward(replace(case, gradients=("score_mod",)), "bwd_3_mma")


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q_idx, kv_idx, t: score + np.where(score > 0, t[h % 2, q_idx - kv_idx + 52], 0),
        lambda score, b, h, q_idx, kv_idx, t: (
            score + t[h % 2, q_idx - kv_idx + 56 + np.clip(4 * score, -4, 4).astype(np.int32)]
        ),
    ],
    ids=["slope", "index"],
)
def test_lookups_that_depend_on_the_score(rng, function):
    """They have a distance, too, but diagonals have no sums of theirs; only some kernels know the scores."""
    case = cases.draw_case(rng, "float16", (), **LENGTHS, **cases.SIZES)
    mod = ScoreMod(function, rng.standard_normal((2, 99)))
    case.numbers["score_mod"] = mod
    check_backward(replace(case, gradients=("score_mod",)), "bwd_3_mma")
    assert mod.written_with_gradients.slopes_ask_score
    assert mod.written_with_gradients.of_distance == ()


def test_packed_sequences_without_queries(rng):
    """Sums of arrays lie behind all that the workspace has for tiles of queries."""
    case = cases.draw_case(rng, "float16", ["packed"], seqlen_q=0, seqlen_k=9, head_dim=64)
    problem = case.problem
    case = replace(case, problem=replace(problem, q=problem.q[:0], dout=problem.dout[:0]))
    case.arrays["cu_seqlens_q"][:] = 0
    case.numbers["score_mod"] = ScoreMod(add_relative, rng.standard_normal((2, 9)))
    *_, gradient = gradients_of("bwd_4_wgmma", replace(case, gradients=("score_mod",)))
    assert not gradient.any()


@pytest.mark.parametrize("nothing", [{"batch": 0}, {"heads": 0, "kv_heads": 0}], ids=["batch", "heads"])
@pytest.mark.parametrize("kernel", ["bwd_2_flash_v2", "bwd_3_mma", "bwd_4_wgmma"])
def test_calls_without_a_sequence_or_a_head(rng, kernel, nothing):
    """Gradients of arrays are then all that is written, wherever their sums are in the workspace."""
    case = cases.draw_case(rng, "float16", (), seqlen_q=9, seqlen_k=9, head_dim=64, **nothing)
    case.numbers["score_mod"] = ScoreMod(add_relative, rng.standard_normal((2, 9)))
    for mask_mod in (None, MaskMod(lambda b, h, q_idx, kv_idx: kv_idx < q_idx)):
        case.numbers["mask_mod"] = mask_mod
        *_, gradient = gradients_of(kernel, replace(case, gradients=("score_mod",)))
        assert not gradient.any()


def test_beside_a_mask(rng, mods):
    """What either hides is hidden, in whole tiles and in parts of them."""
    for lengths in ALL_LENGTHS:
        case = cases.draw_case(rng, "float16", (), **lengths, **cases.SIZES)
        shape = (2, 1, lengths["seqlen_q"], lengths["seqlen_k"])
        case.arrays["mask"], _ = cases.mask_by_tiles(rng, shape, (32, 16))
        case.numbers["mask_mod"] = mods["mask_mod"]
        cases.hide_nan(case)
        inputs = case.problem.q, case.problem.k, case.problem.v
        out, lse = calls.attention(
            *inputs, kernel="fwd_5_mma", tiles=TILES["fwd_5_mma"], **case.emulator_forward
        )
        with np.errstate(invalid="ignore"):
            assert_attention(out, lse, case.problem, **case.forward)


@np.errstate(all="ignore")
def test_probabilities(rng, mods):
    case = cases.draw_case(rng, "float32", (), **LENGTHS, **cases.SIZES)
    q, k, v = case.problem.q, case.problem.k, case.problem.v
    _, lse = reference.attention(q, k, v, **mods)
    probs = calls.attn_probs(q, k, v, lse.astype(np.float32), **mods)
    for head in reference.Rules(**mods).heads(q, k):
        scores, _ = head.scores(q[head.queries].astype(np.float64), k[head.keys].astype(np.float64))
        expected = head.softmax(scores)[0]
        np.testing.assert_allclose(probs[head.lse], expected, atol=1e-5)
