"""Functions of one's own on scores, on the CPU: results, what is built in, errors, and plans."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from feature_cases import BACKWARD_FEATURES, draw_case, feature_id, pairwise
from test_emulator_score_mod import learnt, see, shape_score
from test_features import check, small_tiles  # noqa: F401 - a fixture
from tolerance import DTYPES, assert_attention

import cufa
from cufa.kernels import KERNELS
from cufa.problem import MAX_AXIS
from cufa.score_mod import MaskMod, ScoreMod, header, mods_of


def random_mods(rng: np.random.Generator) -> dict[str, Any]:
    table = rng.standard_normal((9, 2)).T
    halves = rng.standard_normal(60).astype(np.float16)[::-2]
    document = np.sort(rng.integers(0, 3, (2, 60)), axis=1)
    return {"score_mod": ScoreMod(shape_score, table, halves), "mask_mod": MaskMod(see, document)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [frozenset[str](), *pairwise(BACKWARD_FEATURES)], ids=feature_id)
def test_with_other_features(rng: np.random.Generator, features: frozenset[str], dtype: str) -> None:
    case = draw_case(rng, dtype, features, seqlen_q=19, seqlen_k=33, head_dim=13, head_dim_v=6)
    case.numbers.update(random_mods(rng))
    check(case)


@pytest.fixture
def arrays(rng: np.random.Generator) -> list[Any]:
    return [rng.standard_normal((2, n, 4, 16)) for n in (30, 40, 40, 30)]


def both_directions(arrays: list[Any], **options: Any) -> list[Any]:
    q, k, v, dout = arrays
    out, lse = cufa.attention(q, k, v, **options, return_lse=True, backend="numpy")
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, **options, backend="numpy")
    return [out, lse, *gradients]


@pytest.mark.parametrize(
    ("clipped", "bounded"),
    [
        (lambda s, *_: np.clip(s, None, 0.5), lambda s, *_: np.minimum(s, 0.5)),
        (lambda s, *_: np.clip(s, 0.5, None), lambda s, *_: np.maximum(s, 0.5)),
    ],
)
def test_clip_with_one_bound(arrays: list[Any], clipped: Any, bounded: Any) -> None:
    results = (both_directions(arrays, score_mod=function) for function in (clipped, bounded))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        ({"score_mod": lambda s, *_: 2 * np.tanh(s / 2)}, {"softcap": 2.0}),
        ({"score_mod": lambda s, b, h, i, j: s - 0.25 * abs(i + 10 - j)}, {"alibi_slopes": np.full(4, 0.25)}),
        ({"mask_mod": lambda b, h, i, j: j <= i + 10}, {"causal": True}),
        ({"mask_mod": lambda b, h, i, j: (j <= i + 12) & (j >= i + 3)}, {"window": (7, 2)}),
        ({"score_mod": lambda s, b, h, i, j: np.where(j <= i + 10, s, -np.inf)}, {"causal": True}),
    ],
)
def test_as_the_feature_that_is_built_in(arrays: list[Any], own: Any, built_in: Any) -> None:
    for mine, theirs in zip(both_directions(arrays, **own), both_directions(arrays, **built_in), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_is_that_of_finite_differences(arrays: list[Any], rng: np.random.Generator) -> None:
    q, k, v, dout = arrays
    mods = random_mods(rng)
    _, _, dq, dk, _ = both_directions(arrays, **mods)
    for position, gradient in ((0, dq), (1, dk)):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [q, k, v]
            moved[position] = moved[position] + step * direction
            ends.append((cufa.attention(*moved, **mods, backend="numpy") * dout).sum())
        np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [frozenset[str](), *pairwise(BACKWARD_FEATURES)], ids=feature_id)
def test_gradients_of_arrays_with_other_features(
    rng: np.random.Generator, features: frozenset[str], dtype: str
) -> None:
    case = draw_case(rng, dtype, features, seqlen_q=19, seqlen_k=33, head_dim=13, head_dim_v=6)
    case.numbers["score_mod"] = learnt(rng, 60)
    check(replace(case, gradients=(*case.gradients, "score_mod")))


def test_scores_of_minus_infinity_leave_the_error_rule_of_other_elements(rng: np.random.Generator) -> None:
    """An element that scales them has a slope that is not finite; the others are held to something."""
    case = draw_case(rng, "float32", ("dbias",), seqlen_q=5, seqlen_k=9)
    case.arrays["bias"] = np.where(np.arange(9) < 4, -np.inf, np.zeros((2, 4, 5, 9))).astype(np.float32)
    case.arrays["bias"][0, 0] = 0
    case.numbers["score_mod"] = ScoreMod(
        lambda s, b, h, i, j, factors: s * factors[b, h], np.ones((2, 4), np.float32)
    )
    check(replace(case, gradients=(*case.gradients, "score_mod")))


def test_gradients_of_arrays_are_those_of_finite_differences(
    arrays: list[Any], rng: np.random.Generator
) -> None:
    *inputs, dout = arrays
    of_call: dict[str, Any] = {"causal": True, "softcap": 2.0, "dropout_p": 0.2, "backend": "numpy"}
    mod = learnt(rng, 40)
    out, lse = cufa.attention(*inputs, score_mod=mod, **of_call, return_lse=True)
    *_, gradients = cufa.attention_backward(
        dout, *inputs, out, lse, score_mod=mod, **of_call, return_dscore_mod=True
    )
    *differentiable, counts = mod.arrays
    assert gradients[-1] is None
    for number, (array, gradient) in enumerate(zip(differentiable, gradients[:-1], strict=True)):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
        direction = rng.standard_normal(array.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [x.astype(np.float64) for x in differentiable]
            moved[number] += step * direction
            moved_mod = ScoreMod(mod.function, *moved, counts)
            ends.append((cufa.attention(*inputs, score_mod=moved_mod, **of_call) * dout).sum())
        expected = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-3)


def test_gradient_of_temperatures_is_that_of_what_they_multiply(arrays: list[Any]) -> None:
    """The slope in a temperature is the score itself, as it was before."""
    q, k, v, dout = arrays
    temperatures = np.array([0.5, 1.0, 2.0, -1.0])
    options = {"score_mod": ScoreMod(lambda s, b, h, i, j, t: s * t[h], temperatures), "backend": "numpy"}
    out, lse = cufa.attention(q, k, v, **options, return_lse=True)
    dq, *_, (gradient,) = cufa.attention_backward(dout, q, k, v, out, lse, **options, return_dscore_mod=True)
    np.testing.assert_allclose(gradient, (dq * q).sum(axis=(0, 1, 3)) / temperatures, rtol=1e-10)


def test_places_count_from_the_sequences_first(arrays: list[Any]) -> None:
    q, k, v, _ = arrays
    mods = {"score_mod": lambda s, b, h, i, j: s + b - 0.1 * h * i + 0.03 * (b + 1) * j}
    expected = cufa.attention(q, k, v, **mods, backend="numpy")
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    ends = {f"cu_seqlens_{name}": np.array([0, n, 2 * n], np.int32) for name, n in (("q", 30), ("k", 40))}
    out = cufa.attention(*packed, **ends, **mods, backend="numpy")
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        ("uint8", lambda s, b, h, i, j, x: s + 0.01 * (x[i] - x[j])),
        ("int8", lambda s, b, h, i, j, x: s + 0.01 * (1000 * x[j])),
        ("uint32", lambda s, b, h, i, j, x: s + 0.01 * (x[i] - x[j])),
        ("int16", lambda s, b, h, i, j, x: s + 1e-12 * (x[j] + 2**40)),
        ("float16", lambda s, b, h, i, j, x: s + 1e-4 * (x[j] * 1e4)),
        ("float32", lambda s, b, h, i, j, x: s * (0.1 * x[j])),
    ],
)
@pytest.mark.parametrize("as_mask", [False, True])
def test_elements_are_as_wide_as_they_are_computed_with(
    arrays: list[Any], dtype: str, function: Any, as_mask: bool
) -> None:
    results = []
    for wide in (dtype, "float64" if "float" in dtype else "int64"):
        table = np.arange(40).astype(wide)
        if as_mask:
            mods: Any = {"mask_mod": MaskMod(lambda b, h, i, j, x: function(0, b, h, i, j, x) > 0.05, table)}
        else:
            mods = {"score_mod": ScoreMod(function, table)}
        results.append(both_directions(arrays, **mods))
    for narrow, expected in zip(*results, strict=True):
        np.testing.assert_allclose(narrow, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_without_a_score_are_as_wide_as_it_would_be(dtype: str) -> None:
    """Times of which float32 takes 128 seconds for one, and positions whose multiples it rounds."""
    x, times = np.zeros((1, 200, 1, 8), dtype), 1.7e9 + np.arange(200.0)

    def alike(b: Any, h: Any, i: Any, j: Any, times: Any) -> Any:
        return (times[i] == times[j]) & (np.floor(i * 0.7) == np.floor(j * 0.7))

    def hidden(score: Any, *place: Any) -> Any:
        return np.where(alike(*place), score, -np.inf)

    masks: list[Any] = [{"mask_mod": MaskMod(alike, times)}, {"score_mod": ScoreMod(hidden, times)}]
    seen = [cufa.attention(x, x, x, return_attn_probs=True, **mask, backend="numpy")[2] > 0 for mask in masks]
    np.testing.assert_array_equal(*seen)
    assert (seen[0].sum() == 200) == (dtype == "float64")


def test_a_scoremod_is_traced_once(arrays: list[Any]) -> None:
    calls = []

    def function(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        calls.append(type(score))
        return score

    mod = ScoreMod(function)
    for _ in range(3):
        cufa.attention(*arrays[:3], score_mod=mod, backend="numpy")
    assert len([kind for kind in calls if kind is not np.ndarray]) == 1


def test_constants_are_part_of_the_kernel_and_arrays_are_not() -> None:
    texts = [ScoreMod(lambda s, *_, factor=factor: s * factor).written for factor in (1.5, 2.5, 1.5)]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
    slopes = [np.zeros(4, np.float32), np.ones(8, np.float32)[::2]]
    with_arrays = [ScoreMod(lambda s, b, h, i, j, x: s * x[h], x).written for x in slopes]
    assert with_arrays[0] == with_arrays[1]


def test_header_says_what_functions_compute() -> None:
    mod = ScoreMod(lambda s, b, h, i, j, x: s * x[h, j], np.zeros((4, 5), np.float16))
    text = header(mod.written, None)
    assert "ArrayOf<float16, 2, false> score_mod_0;" in text
    assert "return true;" in text
    arguments = "acc_t score, int b, int h, SplitIndex q_idx, SplitIndex kv_idx"
    assert text.count(f"(const ModArrays& arrays, {arguments})") == 2


@pytest.mark.parametrize(
    ("function", "adds", "looks_up"),
    [
        (lambda s, b, h, i, j, x: s - x[h, b] * abs(i - j), True, False),
        (lambda s, b, h, i, j, x: s + x[h, j], False, True),
        (lambda s, b, h, i, j, x: s * x[h, b] + i, False, False),
    ],
)
def test_header_says_what_a_function_adds(function, adds, looks_up) -> None:
    text = header(ScoreMod(function, np.zeros((4, 5), np.float32)).written, None)
    assert f"kScoreModAdds = {str(adds).lower()};" in text
    assert f"kScoreModLooksUp = {str(looks_up).lower()};" in text


def test_header_says_which_arrays_have_adjacent_elements() -> None:
    """Whether they do is part of the kernel: it reads them at constants from few addresses."""
    q, table = np.empty((2, 300, 4, 64), np.float16), np.zeros((4, 600), np.float32)
    texts = []
    for array in (table, table[::-1], table[:, ::2], table.T.copy().T):
        mods = {
            "score_mod": ScoreMod(lambda s, b, h, i, j, x: s + x[h, i - j + 299], array),
            "mask_mod": MaskMod(lambda b, h, i, j, x: x[h, j] > 0, array),
        }
        plan = cufa.plan(q, q, q, **mods, arch="sm_90a")
        texts.append(dict(plan.headers)["scores/score_mod.cuh"])
        adjacent = str(array.strides[-1] == 4).lower()
        assert all(f"ArrayOf<float32, 2, {adjacent}> {name}_0;" in texts[-1] for name in mods)
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


@pytest.mark.parametrize("sign", [1, -1])
def test_arrays_whose_elements_are_too_far_apart_are_refused(sign: int) -> None:
    """Kernels have 32 bits for an index."""
    q = np.zeros((1, 2, 1, 64), np.float16)

    def mod(farthest: int) -> ScoreMod:
        strides = 4 * sign * farthest, 4
        far = np.lib.stride_tricks.as_strided(np.zeros((2, 1), np.float32), strides=strides)
        return ScoreMod(lambda s, b, h, i, j, x: s + x[i, j], far)

    cufa.plan(q, q, q, score_mod=mod(MAX_AXIS - 1), arch="sm_80")
    message = r"^score_mod\[0\] reaches over 2,147,450,880 elements; it may over 2,147,450,879$"
    for function, options in ((cufa.plan, {"arch": "sm_80"}), (cufa.attention, {})):
        with pytest.raises(ValueError, match=message):
            function(q, q, q, score_mod=mod(MAX_AXIS), **options)


def test_header_says_with_what_elements_change() -> None:
    arrays = np.zeros((4, 5), np.float32), np.zeros(9, np.float32), np.zeros(5, np.float32)
    mod = ScoreMod(lambda s, b, h, i, j, x, y, z: s + x[b, i] + y[i - j + 4] + z[j], *arrays)
    text = header(mod.written_with_gradients, None)
    of = {name: text.split(f"changes_with_{name}(int element)")[1].split("}")[0] for name in ("query", "key")}
    assert "element == 0 || element == 1;" in of["query"]
    assert "element == 1 || element == 2;" in of["key"]


def test_plan_says_that_there_is_one() -> None:
    q = np.empty((2, 300, 4, 512), np.float16)
    plan = cufa.plan(q, q, q, score_mod=lambda s, *_: s, mask_mod=lambda *_: True, arch="sm_90a")
    assert "with score_mod, mask_mod" in str(plan)
    assert "fwd_10_wgmma_wide does not support mask_mod" in plan.reasons
    assert dict(plan.headers).keys() == {"scores/score_mod.cuh"}
    assert cufa.plan(q, q, q, arch="sm_90a").headers == ()


@pytest.mark.parametrize(
    ("options", "backward", "head_dim", "kernel"),
    [
        ({"score_mod": lambda s, *_: 2 * s}, False, 128, "fwd_6_wgmma"),
        ({"score_mod": lambda s, *_: 2 * s}, True, 128, "bwd_4_wgmma"),
        ({"mask_mod": lambda b, h, i, j: i > j}, False, 128, "fwd_6_wgmma"),
        ({"mask_mod": lambda b, h, i, j: i > j}, True, 128, "bwd_4_wgmma"),
        ({"mask_mod": lambda b, h, i, j: i > j}, True, 256, "bwd_5_wgmma_wide"),
        ({"mask_mod": lambda b, h, i, j: i > j, "deterministic": True}, True, 128, "bwd_3_mma"),
        ({"mask_mod": lambda b, h, i, j: i > j, "deterministic": True}, True, 256, "bwd_3_mma"),
    ],
)
def test_hopper_takes_them(options: dict[str, Any], backward: bool, head_dim: int, kernel: str) -> None:
    q = np.empty((2, 300, 4, head_dim), np.float16)
    plan = cufa.plan(q, q, q, backward=backward, arch="sm_90a", **options)
    looks = "mask_mod" in options
    assert plan.kernel == kernel
    assert (plan.launches[0].entry == "seen_tiles") == looks
    assert ("seen tiles" in [part.name for part in plan.scratch]) == looks
    for hopper in ("bwd_4_wgmma",) * (head_dim <= 192) + ("bwd_5_wgmma_wide",) * (head_dim > 128):
        unless = "except a mask that is the same for all queries that share a key"
        refused = f"{hopper} does not support deterministic with mask or mask_mod, {unless}"
        assert (refused in plan.reasons) == ("deterministic" in options)


def endless(score: Any, *place: Any) -> Any:
    return endless(-score, *place)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"score_mod": 3}, TypeError, "score_mod's function is 3"),
        ({"score_mod": MaskMod(lambda *_: True)}, TypeError, "score_mod is a MaskMod; it may be a ScoreMod"),
        ({"mask_mod": lambda b, h, i, j: 0.5 * i}, TypeError, "mask_mod returns a float"),
        ({"score_mod": lambda s, *_: s if s > 0 else 0}, TypeError, "score_mod cannot be traced: .*np.where"),
        (
            {"score_mod": lambda s: s},
            TypeError,
            r"positional arg.*called with \(score, b, h, q_idx, kv_idx\)",
        ),
        ({"score_mod": np.ones((2, 3))}, TypeError, r"is a numpy.ndarray of shape \(2, 3\); it must"),
        ({"score_mod": lambda s, *_: None}, TypeError, "None is not a number; is a return missing"),
        ({"score_mod": lambda s, *_: s.clip(0, 1)}, TypeError, r"cannot be traced: a traced .*np\.clip$"),
        ({"score_mod": endless}, TypeError, "score_mod cannot be traced: maximum recursion depth exceeded"),
        (
            {"score_mod": lambda s, b, h, i, j: functools.reduce(lambda x, _: -x, range(5000), 1.0 * i) + s},
            TypeError,
            "score_mod cannot be traced: it takes too many steps in a row",
        ),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_errors(arrays: list[Any], options: Any, error: Any, message: str, backward: bool) -> None:
    q, k, v, dout = arrays
    lse = np.zeros((2, 4, 30))
    arguments = (dout, q, k, v, dout, lse) if backward else (q, k, v)
    call: Any = cufa.attention_backward if backward else cufa.attention
    with pytest.raises(error, match=message):
        call(*arguments, **options, backend="numpy")


class Foreign:
    """An array of a library that knows nothing of symbols, as torch's tensors are."""

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(f"only integers are valid indices (got {type(index).__name__})")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda s, b, h, i, j: s + Foreign()[h],
            r"IndexError: only integers are valid indices \(got Expression\)",
        ),
        (lambda s, *_: {}.abs(), "AttributeError: 'dict' object has no attribute 'abs'"),  # type: ignore[attr-defined]
        (lambda s, *_: divmod(s, 2), r"TypeError: unsupported operand type\(s\) for divmod\(\): .*"),
        (lambda s, b, h, i, j: {0: s}[h], r"KeyError: Expression\(.*\)"),
        (lambda s, *_: {}["mine"], "KeyError: 'mine'"),
        (lambda s, *_: fail(), "TypeError: mine"),
    ],
)
def test_errors_of_others_are_followed_by_what_can_be_traced(function: Any, reason: str) -> None:
    hint = r"a traced function may use .* NumPy's functions and .* cufa\.ScoreMod\(function, table\)"
    message = f"^score_mod cannot be traced: the function raised {reason}; {hint}$"
    with pytest.raises(TypeError, match=message) as caught:
        _ = ScoreMod(function).expression
    assert type(caught.value.__cause__).__name__ == reason.split(":")[0]


def fail() -> None:
    raise TypeError("mine")


def in_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < 9


def test_functions_that_call_others(arrays: list[Any]) -> None:
    """Those that read no arrays may be called as they are, others with the arrays of both."""
    causal = MaskMod(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    seen = MaskMod(lambda b, h, q_idx, kv_idx, x: x[kv_idx] > 0, np.arange(40) % 3)
    half = ScoreMod(lambda score, *_: score / 2)
    expected = both_directions(
        arrays,
        score_mod=lambda s, b, h, i, j: s / 2 + 1,
        mask_mod=MaskMod(lambda b, h, i, j, x: (j <= i) & (i - j < 9) & (x[j] > 0), *seen.arrays),
    )
    own = both_directions(
        arrays,
        score_mod=lambda score, *place: half(score, *place) + 1,
        mask_mod=MaskMod(
            lambda b, h, i, j, x: causal(b, h, i, j) & in_window(b, h, i, j) & seen.function(b, h, i, j, x),
            *seen.arrays,
        ),
    )
    for mine, theirs in zip(own, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(
        TypeError, match=r"^mask_mod cannot be traced: a MaskMod that reads arrays is called in"
    ):
        cufa.attention(*arrays[:3], mask_mod=lambda *place: causal(*place) & seen(*place), backend="numpy")
    with pytest.raises(
        TypeError, match=r"^a MaskMod is called with 3 arguments; it takes b, h, q_idx, kv_idx$"
    ):
        causal(0, 0, 1)
    for kind in (ScoreMod, MaskMod):
        expected_error = rf"^{kind.name}'s function is a MaskMod; it must be a function, as mod\.function is$"
        with pytest.raises(TypeError, match=expected_error):
            kind(causal)


@pytest.mark.parametrize(
    ("function", "in_units"),
    [
        (lambda s, b, h, i, j: s - 0.25 * abs(i - j), True),
        (lambda s, b, h, i, j: np.where(j > i, -np.inf, 0) + s, True),
        (lambda s, b, h, i, j: s + (j > i) * -1e9, False),
        (lambda s, b, h, i, j: np.where(j > i, -1e38, 0) + s, False),
        (lambda s, b, h, i, j: 0.5 * s, False),
    ],
)
def test_large_constants_are_added_to_scores_and_not_to_products(function: Any, in_units: bool) -> None:
    """Where they could overflow: a score may be many products."""
    text = header(ScoreMod(function).written, None)
    assert ("kScoreModAdds = true" in text, "kScoreModAdds = false" in text) == (in_units, not in_units)


def add_slope(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    return score + slopes[h] * (j - i)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the gradient of score_mod is requested, but there is no score_mod"),
        ({"score_mod": lambda s, *_: s}, "score_mod is requested, but it reads no array of floats"),
        ({"score_mod": ScoreMod(add_slope, np.arange(4))}, "but it reads no array of floats"),
        (
            {"score_mod": ScoreMod(add_slope, np.broadcast_to(np.float32(0), 2**31))},
            "score_mod's arrays have 2,147,483,648 elements; with gradients, at most 2,147,450,879",
        ),
    ],
)
def test_gradients_of_arrays_that_there_are_not(arrays: list[Any], options: Any, message: str) -> None:
    q, k, v, dout = arrays
    with pytest.raises(ValueError, match=message):
        cufa.attention_backward(
            dout, q, k, v, dout, np.zeros((2, 4, 30)), **options, return_dscore_mod=True, backend="numpy"
        )


def test_an_array_that_is_not_differentiated_has_gradient_0(arrays: list[Any]) -> None:
    q, k, v, dout = arrays
    mod = ScoreMod(lambda s, b, h, i, j, x, y: np.where(x[h] > 0, s, s - 1), np.ones(4), np.ones((2, 3)))
    out, lse = cufa.attention(q, k, v, score_mod=mod, return_lse=True, backend="numpy")
    *_, gradients = cufa.attention_backward(
        dout, q, k, v, out, lse, score_mod=mod, return_dscore_mod=True, deterministic=True, backend="numpy"
    )
    for array, gradient in zip(mod.arrays, gradients, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(array))


def test_arrays_are_those_that_were_traced() -> None:
    mod = ScoreMod(add_slope, np.zeros(4, np.float32))
    with pytest.raises(AttributeError):
        mod.arrays = (np.zeros((4, 4)),)  # type: ignore[misc]


def test_gradient_of_an_exponent_of_distances(arrays: list[Any]) -> None:
    """Of 0, too, whose powers are all 0."""
    q, k, v, dout = arrays
    exponents = np.array([0.5, 0.7, 1.5, 2])

    def losses(exponents: Any) -> Any:
        mod = ScoreMod(lambda s, b, h, i, j, p: s - abs(i - j) ** p[h], exponents)
        out, lse = cufa.attention(q, k, v, score_mod=mod, return_lse=True, backend="numpy")
        given = (dout, q, k, v, out, lse)
        *_, gradients = cufa.attention_backward(
            *given, score_mod=mod, return_dscore_mod=True, backend="numpy"
        )
        return (out * dout).sum(axis=(0, 1, 3)), gradients[0]

    _, gradient = losses(exponents)
    step = 1e-6
    expected = (losses(exponents + step)[0] - losses(exponents - step)[0]) / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


def shift(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, counts: Any, table: Any) -> Any:
    return score + slopes[h] * counts[j] + table[h, i - j + 69]


@pytest.mark.parametrize("apart", [1, 2])
def test_gradients_of_arrays_where_one_wants_them(arrays: list[Any], apart: int) -> None:
    q, k, v, dout = arrays
    rng = np.random.default_rng(3)
    tables = rng.random(4).astype(np.float16), np.arange(70, dtype=np.int32), rng.random((4, 140))
    mod = ScoreMod(shift, *tables)
    out, lse = cufa.attention(q, k, v, score_mod=mod, return_lse=True, backend="numpy")
    given = (dout, q, k, v, out, lse)
    *_, expected = cufa.attention_backward(*given, score_mod=mod, return_dscore_mod=True, backend="numpy")
    outputs = np.full(4 * apart, np.nan, np.float16)[::apart], None, None
    *_, gradients = cufa.attention_backward(*given, score_mod=mod, dscore_mod=outputs, backend="numpy")
    assert gradients[0] is outputs[0]
    assert gradients[1] is None
    for gradient, wanted in zip(gradients[::2], expected[::2], strict=True):
        assert np.any(wanted)
        np.testing.assert_array_equal(gradient, wanted)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (np.zeros(4, np.float16), TypeError, "dscore_mod is a numpy.ndarray; it may be a tuple of arrays"),
        ([None], ValueError, "dscore_mod has 1 entry; score_mod has 3 arrays"),
        ((None, np.zeros(70), None), ValueError, r"dscore_mod\[1\] is given, and score_mod\[1\] has int32"),
        ((np.zeros(4), None, None), TypeError, r"dscore_mod\[0\] has dtype float64; it must be float16"),
        (
            (None, None, np.zeros((4, 9))),
            ValueError,
            r"dscore_mod\[2\] has shape \(4, 9\); it must be \(4, 140\)",
        ),
        ((None, None, np.zeros(140)[None].repeat(4, 0).T.T[:, :1]), ValueError, r"dscore_mod\[2\] has shape"),
        ((None, None, np.broadcast_to(0.0, (4, 140))), ValueError, r"dscore_mod\[2\] is read-only"),
    ],
)
def test_wrong_places_for_gradients_of_arrays(
    arrays: list[Any], outputs: Any, error: Any, message: str
) -> None:
    q, k, v, dout = arrays
    mod = ScoreMod(shift, np.ones(4, np.float16), np.arange(70, dtype=np.int32), np.ones((4, 140)))
    given = (dout, q, k, v, dout, np.zeros((2, 4, 30)))
    with pytest.raises(error, match=f"^{message}"):
        cufa.attention_backward(*given, score_mod=mod, dscore_mod=outputs, backend="numpy")


def scale(score: Any, b: Any, h: Any, i: Any, j: Any, factors: Any) -> Any:
    return score * factors[h]


@pytest.mark.parametrize(("function", "kernel"), [(add_slope, "bwd_4_wgmma"), (scale, "bwd_3_mma")])
def test_plan_of_gradients_of_arrays(function: Any, kernel: str) -> None:
    q = np.empty((2, 300, 4, 64), np.float16)
    options: dict[str, Any] = {"backward": True, "score_mod": ScoreMod(function, np.zeros(4, np.float32))}
    plan = cufa.plan(q, q, q, **options, gradients=("score_mod",), arch="sm_90a")
    refused = "bwd_4_wgmma does not support dscore_mod where elements or their slopes depend on the score"
    assert (plan.kernel, refused in plan.reasons) == (kernel, kernel == "bwd_3_mma")
    assert plan.launches[-1].entry == "array_gradients"
    assert (plan.scratch[-1].name, plan.scratch[-1].shape) == ("dscore_mod sums", (4,))
    without = cufa.plan(q, q, q, **options, kernel=kernel, arch="sm_90a")
    assert "array_gradients" not in [launch.entry for launch in without.launches]
    with pytest.raises(ValueError, match=rf"{kernel} does not support deterministic with dscore_mod"):
        cufa.plan(q, q, q, **options, gradients=("score_mod",), deterministic=True, arch="sm_90a")


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        ([1.0], TypeError, "array 0 of score_mod is a list; it must be an array"),
        (np.float64(3), ValueError, r"array 0 of score_mod has no axis; .* as x\.reshape\(1\) has$"),
        (np.zeros(3, np.complex64), TypeError, "array 0 of score_mod has dtype complex64; it may be"),
        (np.zeros(3, np.uint64), TypeError, "array 0 of score_mod has dtype uint64; it may be"),
    ],
)
def test_arrays_that_it_cannot_read(array: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ScoreMod(lambda s, b, h, i, j, x: s + x[h], array)


@pytest.mark.parametrize("kind", [ScoreMod, MaskMod])
def test_arrays_have_no_names_and_a_function_is_needed(kind: type[ScoreMod] | type[MaskMod]) -> None:
    name = kind.__name__
    expected = rf"^table of {name} is given by name; .* by position, as in cufa\.{name}\(function, table\)$"
    with pytest.raises(TypeError, match=expected):
        kind(lambda *_: True, table=np.zeros(3))
    with pytest.raises(TypeError, match=f"^{kind.name}'s function is None; it must be a function$"):
        kind()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda s, b, h, i, j, table, _: s + table[h],
            r"table \(array 0 of score_mod\) has 2 axes and is read with 1 index; it",
        ),
        (
            lambda s, b, h, i, j, x, table: s + table[h, i],
            r"table \(array 1 of score_mod\) has 1 axis and is read with 2 indices; it",
        ),
        (lambda s, b, h, i, j, *arrays: s + arrays[1], "traced: array 1 of score_mod is used as a"),
        (lambda s, b, h, i, j, table, x: s + x[h:], r"x \(array 1 of score_mod\) is sliced"),
        (np.vectorize(lambda s, *_: s), "cannot be traced"),
    ],
)
def test_errors_name_arrays_as_the_function_does(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _ = ScoreMod(function, np.zeros((4, 5)), np.zeros(4)).expression


def test_an_element_that_there_is_not_is_named_as_the_function_does(arrays: list[Any]) -> None:
    q, k, v, _ = arrays
    mod = ScoreMod(lambda s, b, h, i, j, slopes: s + slopes[i], np.zeros(4))
    with pytest.raises(IndexError, match=r"^slopes \(array 0 of score_mod\): index .* is out of bounds"):
        cufa.attention(q, k, v, score_mod=mod, backend="numpy")


def test_what_is_printed_of_them() -> None:
    def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[h, 0]

    assert repr(ScoreMod(relative, np.zeros((4, 9), np.float32))).endswith("relative, float32 4x9)")
    assert repr(MaskMod(np.vectorize(lambda *_: True))) == "MaskMod(vectorize)"


def test_rungs_that_have_no_features_refuse_it() -> None:
    q = np.empty((2, 300, 4, 64), np.float16)
    for name in ("fwd_1_naive", "fwd_3_flash_v1"):
        assert not {"score_mod", "mask_mod"} & KERNELS[name].features
        with pytest.raises(ValueError, match=f"{name} does not support score_mod"):
            cufa.plan(q, q, q, score_mod=lambda s, *_: s, kernel=name, arch="sm_90a")


def test_a_call_without_one_has_the_same_record_as_before() -> None:
    assert mods_of(None, None) is mods_of(None, None)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (lambda b, h, i, j: i > j, 1),
        (lambda b, h, i, j: h > i, 4),
        (lambda b, h, i, j: b > i, 2),
        (lambda b, h, i, j: b > h, 8),
    ],
)
def test_what_a_mask_mod_shows_is_found_once_for_the_heads_and_sequences_that_it_does_not_ask_for(
    function: Any, times: int
) -> None:
    q = np.empty((2, 300, 4, 64), np.float16)
    plan = cufa.plan(
        q, q, q, mask_mod=function, kernel="fwd_5_mma", tiles={"block_m": 64, "block_n": 64}, arch="sm_90a"
    )
    tiles = times * 5 * 5
    assert [launch.entry for launch in plan.launches] == ["seen_tiles", "fwd_5_mma"]
    assert plan.launches[0].grid == -(-tiles // (plan.launches[0].block // 32))
    assert plan.workspace_bytes == -(-tiles * 2 // 8) * 8
    backward = cufa.plan(q, q, q, backward=True, mask_mod=function, kernel="bwd_3_mma", arch="sm_90a")
    without = cufa.plan(q, q, q, backward=True, kernel="bwd_3_mma", arch="sm_90a")
    assert backward.launches[0].entry == "seen_tiles"
    assert "seen_tiles" not in [launch.entry for launch in without.launches]


def test_keys_in_pages(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float32", ("block_table", "causal"), seqlen_q=19, seqlen_k=33, head_dim=13)
    case.numbers.update(random_mods(rng))
    inputs = case.problem.q, case.problem.k, case.problem.v
    out, lse = cufa.attention(*inputs, **case.forward, return_lse=True, backend="numpy")
    assert_attention(out, lse, case.problem, **case.forward)
