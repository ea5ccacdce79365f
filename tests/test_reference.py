"""The reference against finite differences and plain Python loops, and the error rule itself."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from feature_cases import Case, draw_case, feature_id, hide_nan, sets_of
from tolerance import (
    DTYPES,
    Array,
    Problem,
    assert_attention,
    assert_close,
    assert_gradients,
    random_problem,
)

from cufa import philox, reference
from cufa.checking import standard_attention, standard_attention_backward

SEQLENS = [
    pytest.param((4, 4), id="square"),
    pytest.param((2, 5), id="more keys"),
    pytest.param((5, 2), id="empty rows under causal"),
    pytest.param((1, 4), id="one query"),
]


def small_problem(seqlens: tuple[int, int], batch: int) -> Problem:
    seqlen_q, seqlen_k = seqlens
    return random_problem(
        np.random.default_rng(1),
        "float64",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        heads=4,
        kv_heads=2,
        head_dim=3,
        head_dim_v=2,
    )


def loop_attention(problem: Problem, softmax_scale: float | None = None, **rules: Any) -> tuple[Array, Array]:
    """Attention element by element; of packed sequences the tokens of none have out 0 and LSE -inf."""
    q, k, v = problem.q, problem.k, problem.v
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    group = q.shape[-2] // k.shape[-2]
    out, lse = np.zeros(problem.dout.shape), np.full(problem.lse_shape, -np.inf)
    for b, rows, keys in loop_sequences(problem, rules):
        of_batch = () if "cu_seqlens_q" in rules else (b,)
        for i, h in itertools.product(range(len(rows)), range(q.shape[-2])):
            row = (*of_batch, rows[i], h)
            # The sink is a logit like others, whose value is 0.
            logits = [float(rules["sink"][h])] if "sink" in rules else []
            values = [np.zeros(v.shape[-1])] * len(logits)
            for j in range(len(keys)):
                key = (*of_batch, keys[j], h // group)
                if loop_sees(rules, b, h, i, j, len(rows), len(keys)):
                    dot = sum(float(x) * float(y) for x, y in zip(q[row], k[key], strict=True))
                    logits.append(loop_score(rules, b, h, i, j, len(rows), len(keys), scale * dot))
                    values.append(v[key] * loop_dropout(rules, b * q.shape[-2] + h, i, j))
            weights = [math.exp(logit) for logit in logits]
            if sum(weights):
                lse[(*of_batch, h, rows[i])] = math.log(sum(weights))
                out[row] = sum(
                    weight / sum(weights) * value for weight, value in zip(weights, values, strict=True)
                )
    return out, lse


def loop_sequences(problem: Problem, rules: dict[str, Any]) -> list[tuple[int, range, range]]:
    """Number, rows and those keys that count of each sequence."""
    if "cu_seqlens_q" in rules:
        ends = [
            [range(begin, end) for begin, end in itertools.pairwise(rules[name])]
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        ]
    else:
        ends = [[range(x.shape[1])] * len(x) for x in (problem.q, problem.k)]
    used = rules.get("seqused_k", [len(keys) for keys in ends[1]])
    return [(b, rows, keys[: used[b]]) for b, (rows, keys) in enumerate(zip(*ends, strict=True))]


def loop_sees(rules: dict[str, Any], b: int, h: int, i: int, j: int, rows: int, keys: int) -> bool:
    after_diagonal = (j - keys) - (i - rows)
    left, right = rules.get("window", (None, None))
    if rules.get("causal") and after_diagonal > 0:
        return False
    if left is not None and after_diagonal < -left:
        return False
    if right is not None and after_diagonal > right:
        return False
    mask = rules.get("mask")
    if mask is None:
        return True
    if mask.dtype == bool:
        return bool(loop_element(mask, b, h, i, j))
    return bool(int(loop_element(mask, b, h, i, j // 8)) & 1 << j % 8)


def loop_score(
    rules: dict[str, Any], b: int, h: int, i: int, j: int, rows: int, keys: int, product: float
) -> float:
    softcap = rules.get("softcap")
    score = softcap * math.tanh(product / softcap) if softcap else product
    if "bias" in rules:
        score += float(loop_element(rules["bias"], b, h, i, j))
    slopes = rules.get("alibi_slopes")
    if slopes is not None:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        score -= float(slope) * abs((j - keys) - (i - rows))
    return score


def loop_element(array: Array, *index: int) -> Any:
    """An element of an array that is broadcast to four axes."""
    own = index[4 - array.ndim :]
    return array[tuple(0 if size == 1 else n for n, size in zip(own, array.shape, strict=True))]


def loop_dropout(rules: dict[str, Any], matrix: int, i: int, j: int) -> float:
    p = rules.get("dropout_p", 0)
    counter = j // 16 * 4 + j % 8 // 2, i // 2, matrix, rules.get("offset", 0)
    word = int(philox.philox(counter, rules.get("seed", 0))[2 * (i % 2) + j // 8 % 2])
    dropped = round(p * 2**15)
    return 1 / (1 - dropped / 2**15) if (word >> 16 * (j % 2)) % 2**15 >= dropped else 0


def finite_difference(loss: Callable[[], Any], x: Array) -> Array:
    """The gradient of loss() by x, which it reads, by central differences in long double."""
    step = np.longdouble(1e-6)
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        if np.isneginf(kept):  # in a bias: the score stays what it is
            gradient[index] = 0
            continue
        x[index] = kept + step
        above = loss()
        x[index] = kept - step
        below = loss()
        x[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.3, -1.5])
def test_attention_is_the_loop(seqlens: tuple[int, int], causal: bool, softmax_scale: float | None) -> None:
    problem = small_problem(seqlens, batch=2)
    rules = {"causal": causal, "softmax_scale": softmax_scale}
    out, lse = reference.attention(problem.q, problem.k, problem.v, **rules)
    expected_out, expected_lse = loop_attention(problem, **rules)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


def small_case(features: frozenset[str], seed: int, **options: Any) -> Case:
    sizes = {"seqlen_q": 5, "seqlen_k": 6, "heads": 2, "kv_heads": 1, "head_dim": 2, "head_dim_v": 3}
    return draw_case(np.random.default_rng(seed), "float64", features, **{**sizes, **options})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("features", sets_of(), ids=feature_id)
def test_attention_with_features_is_the_loop(features: frozenset[str], seed: int) -> None:
    case = small_case(features, seed, heads=4, kv_heads=2, seqlen_q=7, seqlen_k=9)
    problem = case.problem
    out, lse = reference.attention(problem.q, problem.k, problem.v, **case.forward)
    expected_out, expected_lse = loop_attention(problem, **case.forward)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("features", sets_of(), ids=feature_id)
def test_gradients_with_features_are_finite_differences(features: frozenset[str]) -> None:
    case = small_case(features, 3)
    problem = case.problem
    dout, q, k, v = (x.astype(np.longdouble) for x in (problem.dout, problem.q, problem.k, problem.v))
    rules = {**case.backward}
    for name in case.gradients:
        rules[name] = rules[name].astype(np.longdouble)
    forward = {name: rules[name] for name in case.forward}

    def loss() -> Any:
        out, lse = reference.attention(q, k, v, dtype=np.longdouble, **forward)
        of_lse = 0 if case.dlse is None else (case.dlse * np.where(np.isfinite(lse), lse, 0)).sum()
        return (dout * out).sum() + of_lse

    gradients = reference.attention_backward(dout, q, k, v, **rules)
    inputs = q, k, v, *(rules[name] for name in case.gradients)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        expected = finite_difference(loss, x).astype(np.float64)
        np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("features", sets_of(), ids=feature_id)
def test_no_result_depends_on_what_is_not_seen(features: frozenset[str]) -> None:
    case = small_case(features, 4, seqlen_q=11, seqlen_k=9)
    problem = case.problem

    def results() -> tuple[Array, ...]:
        inputs = problem.q, problem.k, problem.v
        gradients = reference.attention_backward(problem.dout, *inputs, **case.backward)
        return *reference.attention(*inputs, **case.forward), *gradients

    clean = results()
    hide_nan(case)
    for expected, actual in zip(clean, results(), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_gradients_are_finite_differences(
    seqlens: tuple[int, int], causal: bool, softmax_scale: float | None
) -> None:
    problem = small_problem(seqlens, batch=1)
    arrays = problem.dout, problem.q, problem.k, problem.v
    dout, q, k, v = (x.astype(np.longdouble) for x in arrays)

    def loss() -> Any:
        out, _ = reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=np.longdouble)
        return (dout * out).sum()

    gradients = reference.attention_backward(dout, q, k, v, causal=causal, softmax_scale=softmax_scale)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.dtype == np.float64
        np.testing.assert_allclose(
            gradient, finite_difference(loss, x).astype(np.float64), rtol=1e-9, atol=1e-10
        )


def test_rows_that_see_nothing_are_zero() -> None:
    problem = random_problem(np.random.default_rng(2), "float64", seqlen_q=5, seqlen_k=2)
    out, lse = reference.attention(problem.q, problem.k, problem.v, causal=True)
    dq, _, _ = reference.attention_backward(problem.dout, problem.q, problem.k, problem.v, causal=True)
    assert np.all(out[:, :3] == 0)
    assert np.all(dq[:, :3] == 0)
    assert np.all(lse[:, :, :3] == -np.inf)
    assert np.all(np.isfinite(lse[:, :, 3:]))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_zero(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    problem = random_problem(
        np.random.default_rng(3), "float32", seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=4
    )
    inputs = problem.q, problem.k, problem.v
    out, lse = reference.attention(*inputs, causal=causal)
    gradients = reference.attention_backward(problem.dout, *inputs, causal=causal)
    assert out.shape == problem.q.shape
    assert np.all(out == 0)
    assert lse.shape == (1, 1, seqlen_q)
    assert np.all(lse == -np.inf)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert np.all(gradient == 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_masked_contributes_nothing(bad: float) -> None:
    """Row i sees keys 0 to i, so only rows after a bad one may know of it."""
    problem = random_problem(np.random.default_rng(4), "float64", seqlen_q=6, seqlen_k=6)
    inputs = problem.q, problem.k, problem.v
    clean_out, clean_lse = reference.attention(*inputs, causal=True)
    clean_dq, clean_dk, clean_dv = reference.attention_backward(problem.dout, *inputs, causal=True)

    problem.k[:, 4] = problem.v[:, 4] = bad
    out, lse = reference.attention(*inputs, causal=True)
    dq, _, _ = reference.attention_backward(problem.dout, *inputs, causal=True)
    np.testing.assert_array_equal(out[:, :4], clean_out[:, :4])
    np.testing.assert_array_equal(lse[:, :, :4], clean_lse[:, :, :4])
    np.testing.assert_array_equal(dq[:, :4], clean_dq[:, :4])
    assert not np.isfinite(out[:, 4:]).any()

    problem = random_problem(np.random.default_rng(4), "float64", seqlen_q=6, seqlen_k=6)
    problem.q[:, 1] = problem.dout[:, 1] = bad
    _, dk, dv = reference.attention_backward(problem.dout, problem.q, problem.k, problem.v, causal=True)
    np.testing.assert_array_equal(dk[:, 2:], clean_dk[:, 2:])
    np.testing.assert_array_equal(dv[:, 2:], clean_dv[:, 2:])
    assert not np.isfinite(dk[:, :2]).any()


def test_large_logits_do_not_overflow() -> None:
    problem = random_problem(np.random.default_rng(5), "float64", seqlen_q=5, seqlen_k=7, logit_scale=1e4)
    out, lse = reference.attention(problem.q, problem.k, problem.v)
    assert np.isfinite(out).all()
    assert lse.max() > math.log(np.finfo(np.float64).max)


def test_dtype_is_that_of_the_computation() -> None:
    problem = random_problem(np.random.default_rng(6), "bfloat16", seqlen_q=3, seqlen_k=4)
    inputs = problem.q, problem.k, problem.v
    for dtype in (np.float32, np.float64, np.longdouble):
        outputs = reference.attention(*inputs, dtype=dtype)
        gradients = reference.attention_backward(problem.dout, *inputs, dtype=dtype)
        assert {x.dtype for x in (*outputs, *gradients)} == {np.dtype(dtype)}


def test_softmax() -> None:
    x = np.array([[1.0, 2.0, 4.0], [-np.inf, 0.0, -np.inf], [-np.inf] * 3, [1e300, 0.0, -1e300]])
    e1, e2, e4 = math.exp(1), math.exp(2), math.exp(4)
    total = e1 + e2 + e4
    expected = np.array([[e1 / total, e2 / total, e4 / total], [0, 1, 0], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(reference.softmax(x), expected, rtol=1e-15)
    assert np.isnan(reference.softmax(np.array([1.0, np.nan]))).all()
    assert reference.softmax(np.empty((3, 0))).shape == (3, 0)
    assert reference.softmax(x, dtype=np.float32).dtype == np.float32


def test_masked_matmul_writes_into_out() -> None:
    rng = np.random.default_rng(7)
    visible = np.tril(np.ones((3, 3), bool))
    weights = np.where(visible, rng.standard_normal((3, 3)), 0)
    values = rng.standard_normal((3, 2))
    expected = weights @ values
    values[2, 1] = np.nan
    expected[2, 1] = np.nan
    out = np.empty((3, 2))
    assert reference.masked_matmul(weights, values, visible, out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-14)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_the_error_rule_passes_standard_attention_and_fails_what_is_worse(dtype_name: str) -> None:
    rng = np.random.default_rng(8)
    problem = random_problem(rng, dtype_name, seqlen_q=30, seqlen_k=40, heads=4, kv_heads=2)
    inputs = problem.q, problem.k, problem.v
    out, lse = standard_attention(dtype_name, *inputs, causal=True)
    gradients = standard_attention_backward(dtype_name, problem.dout, *inputs, causal=True)
    assert_attention(out, lse, problem, causal=True)
    assert_gradients(gradients, problem, causal=True)

    with pytest.raises(AssertionError, match=r"^out\[.* is .*, should be .*: off by"):
        assert_attention(out, lse, problem, causal=False)
    with pytest.raises(AssertionError, match=r"^dq\["):
        assert_gradients(gradients, problem, causal=False)
    worst = np.unravel_index(np.argmax(np.abs(out)), out.shape)
    out[worst] *= 1.1
    with pytest.raises(AssertionError, match=r"^out\[.*; 1 of 7680 elements are too far off$"):
        assert_attention(out, lse, problem, causal=True)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("features", sets_of(), ids=feature_id)
def test_the_error_rule_passes_standard_attention_with_features(
    features: frozenset[str], dtype_name: str
) -> None:
    sizes = {"seqlen_q": 17, "seqlen_k": 21, "head_dim": 9, "head_dim_v": 5}
    case = draw_case(np.random.default_rng(9), dtype_name, features, **sizes)
    problem = case.problem
    inputs = problem.q, problem.k, problem.v
    assert_attention(*standard_attention(dtype_name, *inputs, **case.forward), problem, **case.forward)
    gradients = standard_attention_backward(dtype_name, problem.dout, *inputs, **case.backward)
    assert_gradients(gradients, problem, **case.backward)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize(
    ("feature", "changed"),
    [
        ("causal", {"causal": False}),
        ("window", {"window": None}),
        ("softcap", {"softcap": 0.0}),
        ("bias", {"bias": None}),
        ("mask", {"mask": None}),
        ("alibi_slopes", {"alibi_slopes": None}),
        ("sink", {"sink": None}),
        ("dropout", {"dropout_p": 0.0}),
        ("dropout", {"seed": 1}),
        ("dropout", {"offset": 1}),
        ("seqused_k", {"seqused_k": None}),
        ("dlse", {"dlse": None}),
    ],
)
def test_the_error_rule_fails_what_ignores_a_feature(
    feature: str, changed: dict[str, Any], dtype_name: str
) -> None:
    case = draw_case(np.random.default_rng(10), dtype_name, [feature], seqlen_q=30, seqlen_k=30)
    problem = case.problem
    inputs = problem.q, problem.k, problem.v
    if feature != "dlse":
        wrong = standard_attention(dtype_name, *inputs, **{**case.forward, **changed})
        with pytest.raises(AssertionError, match="off by"):
            assert_attention(*wrong, problem, **case.forward)
    rules = {**case.backward, **changed}
    gradients = standard_attention_backward(dtype_name, problem.dout, *inputs, **rules)
    with pytest.raises(AssertionError, match="off by"):
        assert_gradients(gradients, problem, **case.backward)


@pytest.mark.parametrize(
    ("actual", "exact"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (-np.inf, np.inf)]
)
def test_the_error_rule_fails_nan_and_infinity_in_the_wrong_place(actual: float, exact: float) -> None:
    ones = np.ones(3)
    with pytest.raises(AssertionError, match=r"^x\[1\]"):
        assert_close(np.array([1, actual, 1]), np.array([1, exact, 1]), ones, 1e9, "x")
    same = np.array([1, exact, 1])
    assert_close(same, same, ones, 2, "x")


def test_the_error_rule_leaves_room_for_rounding_only() -> None:
    exact = np.array([1 + 2.0**-25])
    assert_close(np.array([1.0], np.float32), exact, exact, 2, "x")
    with pytest.raises(AssertionError, match="off by"):
        assert_close(np.array([1 + 2.0**-22], np.float32), exact, exact, 2, "x")
