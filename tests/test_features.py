"""Features of a call on the CPU, through the functions that users call."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from feature_cases import (
    Case,
    draw_case,
    feature_id,
    hide_nan,
    one_by_one,
    pairwise,
    sets_of,
    sets_with_dtypes,
)
from tolerance import LAYOUTS, Array, assert_attention, assert_gradients, poisoned, random_problem

import cufa
from cufa import cpu, reference
from cufa.cpu import stacks, tiles
from cufa.cpu.arithmetic import Scratch
from cufa.score_rules import Rules

SETS = sets_of()
LENGTHS = [(19, 23), (23, 19), (1, 40), (40, 1), (0, 5), (5, 0), (0, 0)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with mock.patch.multiple(tiles, Q_TILE=7, KV_TILE=10):
        yield


@pytest.fixture
def by_tiles() -> Iterator[None]:
    """All by tiles: what is compared would be by tiles and by stacks, whose last bits differ."""
    with mock.patch.object(stacks, "MOST_SCORES", 0):
        yield


@pytest.fixture(params=["tiles", "stacks"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """All by tiles, or short heads in stacks."""
    most = stacks.MOST_SCORES if request.param == "stacks" else 0
    with mock.patch.object(stacks, "MOST_SCORES", most):
        yield request.param


def arrays_of(case: Case) -> list[Array]:
    problem = case.problem
    dlse = [] if case.dlse is None else [case.dlse]
    return [problem.q, problem.k, problem.v, problem.dout, *case.arrays.values(), *dlse]


def attend(case: Case, **options: Any) -> tuple[Array, ...]:
    """All results of both directions."""
    problem = case.problem
    inputs = problem.q, problem.k, problem.v
    out, lse = cufa.attention(*inputs, **case.forward, return_lse=True, backend="numpy", **options)
    gradients = cufa.attention_backward(
        problem.dout,
        *inputs,
        out,
        lse,
        **case.backward,
        deterministic=case.deterministic,
        backend="numpy",
        **options,
    )
    return out, lse, *one_by_one(gradients)


def in_sequences(case: Case, results: tuple[Array, ...]) -> list[Array]:
    """The results without those tokens that belong to no sequence: what is theirs is whatever it was."""
    if "cu_seqlens_q" not in case.arrays:
        return list(results)
    rows, keys = (slice(*case.arrays[f"cu_seqlens_{name}"][[0, -1]]) for name in "qk")
    out, lse, dq, dk, dv, *others = results
    return [out[rows], lse[:, rows], dq[rows], dk[keys], dv[keys], *others]


def check(case: Case) -> None:
    """Both directions by the rule; what is given is not written to."""
    for array in arrays_of(case):
        array.flags.writeable = False
    out, lse, *gradients = attend(case)
    assert_attention(out, lse, case.problem, **case.forward)
    assert_gradients(tuple(gradients), case.problem, **case.backward)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("features", "dtype"),
    sets_with_dtypes(),
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else value,
)
def test_features(rng: np.random.Generator, features: frozenset[str], dtype: str) -> None:
    for lengths, storage in zip(LENGTHS, LAYOUTS * 2, strict=False):
        sizes = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
        check(draw_case(rng, dtype, features, **sizes, head_dim=13, head_dim_v=6, layout=storage))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("features", "dtype"),
    sets_with_dtypes(),
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else value,
)
def test_nan_in_what_is_not_seen(rng: np.random.Generator, features: frozenset[str], dtype: str) -> None:
    case = draw_case(rng, dtype, features, seqlen_q=31, seqlen_k=25, head_dim=5, head_dim_v=8)
    hide_nan(case)
    check(case)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (5, 1)])
@pytest.mark.parametrize("features", pairwise(), ids=feature_id)
def test_batches_and_groups(
    rng: np.random.Generator, features: frozenset[str], heads: int, kv_heads: int, batch: int
) -> None:
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": 4}
    check(draw_case(rng, "float32", features, seqlen_q=12, seqlen_k=15, **sizes))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("features", SETS, ids=feature_id)
def test_threads_and_their_sums(
    rng: np.random.Generator, features: frozenset[str], batch: int, kv_heads: int
) -> None:
    sizes = {"batch": batch, "heads": 3, "kv_heads": kv_heads, "head_dim": 6}
    case = draw_case(rng, "float32", features, seqlen_q=33, seqlen_k=40, **sizes)
    with mock.patch.object(cpu, "_threads", return_value=4):
        check(case)
        expected = in_sequences(case, attend(case))
        for _ in range(2):
            for first, again in zip(expected, in_sequences(case, attend(case)), strict=True):
                assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("features", [s for s in SETS if "packed" not in s], ids=feature_id)
def test_layout_bhsd(rng: np.random.Generator, features: frozenset[str]) -> None:
    case = draw_case(rng, "float32", features, seqlen_q=12, seqlen_k=17, head_dim=4)
    problem = case.problem
    expected = attend(case)
    transposed = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in vars(problem).values()]
    results = attend(
        Case(type(problem)(*transposed), case.numbers, case.arrays, case.dlse, case.gradients, False),
        layout="bhsd",
    )
    for i, (result, in_bshd) in enumerate(zip(results, expected, strict=True)):
        is_tensor = i in (0, 2, 3, 4)
        np.testing.assert_array_equal(result.transpose(0, 2, 1, 3) if is_tensor else result, in_bshd)


@pytest.mark.parametrize("features", SETS, ids=feature_id)
def test_strides_of_side_arrays_do_not_matter(rng: np.random.Generator, features: frozenset[str]) -> None:
    case = draw_case(rng, "float32", features, seqlen_q=14, seqlen_k=18, head_dim=4)

    def strided(x: Array) -> Array:
        spread = np.empty(tuple(2 * size for size in x.shape), x.dtype)
        view = spread[tuple(slice(None, None, 2) for _ in x.shape)][..., ::-1]
        view[...] = x
        return view

    side = {name: strided(x) for name, x in case.arrays.items()}
    dlse = None if case.dlse is None else strided(case.dlse)
    other = Case(case.problem, case.numbers, side, dlse, case.gradients, case.deterministic)
    both = (in_sequences(case, attend(each)) for each in (case, other))
    for expected, actual in zip(*both, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_strides_of_given_gradients_do_not_matter(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float32", ["bias", "sink"], seqlen_q=14, seqlen_k=18, head_dim=4)
    problem, side = case.problem, case.arrays
    out, lse = cufa.attention(problem.q, problem.k, problem.v, return_lse=True, **side)
    arrays = (problem.dout, problem.q, problem.k, problem.v, out, lse)
    *_, dbias, dsink = cufa.attention_backward(*arrays, **side, return_dbias=True, return_dsink=True)
    given = {name: np.empty((*side[name].shape, 2), np.float32)[..., 0] for name in ("bias", "sink")}
    cufa.attention_backward(*arrays, **side, dbias=given["bias"], dsink=given["sink"])
    np.testing.assert_array_equal(given["bias"], dbias)
    np.testing.assert_array_equal(given["sink"], dsink)


# --- what features are to each other --------------------------------------------------------------


def assert_same(first: Case, numbers: dict[str, Any], arrays: dict[str, Array]) -> None:
    """The bits do not change if other arguments ask for the same."""
    second = Case(first.problem, numbers, arrays, first.dlse, first.gradients, first.deterministic)
    for expected, actual in zip(attend(first), attend(second), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("window", [(None, 0), (-1, 0), (30, 0), (2**31 - 1, 0), (None, np.int32(0))])
def test_causal_is_a_window(rng: np.random.Generator, window: Any) -> None:
    case = draw_case(rng, "float32", ["causal"], seqlen_q=20, seqlen_k=26, head_dim=4)
    assert_same(case, {"window": window}, {})
    assert_same(case, {"window": (window[0], 5), "causal": True}, {})


@pytest.mark.parametrize("window", [(3, 5), (None, 0)])
def test_a_window_may_be_a_list(rng: np.random.Generator, window: Any) -> None:
    case = draw_case(rng, "float32", [], seqlen_q=20, seqlen_k=26, head_dim=4)
    case.numbers["window"] = window
    assert_same(case, {"window": list(window)}, {})


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (2**31 - 1, None), (25, 25)])
def test_windows_that_hide_nothing(rng: np.random.Generator, window: Any) -> None:
    case = draw_case(rng, "float32", [], seqlen_q=20, seqlen_k=26, head_dim=4)
    assert_same(case, {"window": window}, {})


def test_bits_are_a_mask(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float16", ["mask"], seqlen_q=20, seqlen_k=27, head_dim=4)
    bits = np.packbits(case.arrays["mask"], axis=-1, bitorder="little")
    assert_same(case, case.numbers, {"mask": bits})


def test_a_bias_of_minus_infinity_is_a_mask(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float32", ["mask"], seqlen_q=20, seqlen_k=27, head_dim=4)
    bias = np.where(case.arrays["mask"], np.float32(0), np.float32(-np.inf))
    _, masked_lse, *_ = attend(case)
    _, lse, *_ = attend(Case(case.problem, case.numbers, {"bias": bias}, None, (), False))
    np.testing.assert_allclose(lse, masked_lse, rtol=1e-6)


def test_alibi_is_a_bias(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float64", ["alibi_slopes"], seqlen_q=20, seqlen_k=27, head_dim=4)
    i, j = np.ogrid[:20, :27]
    slopes = np.atleast_2d(case.arrays["alibi_slopes"])[:, :, None, None]
    bias = -slopes * np.abs(i + 7 - j)
    other = Case(case.problem, case.numbers, {"bias": bias}, None, (), False)
    for expected, actual in zip(attend(case), attend(other), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_sink_is_a_key_without_value(rng: np.random.Generator) -> None:
    """Its logit is that of a key whose product with every query is it."""
    case = draw_case(rng, "float64", ["sink"], seqlen_q=9, seqlen_k=11, heads=2, kv_heads=2, head_dim=4)
    problem, sink = case.problem, case.arrays["sink"]
    q = np.concatenate([problem.q, np.ones((2, 9, 2, 1))], axis=3)
    k = np.concatenate([problem.k, np.zeros((2, 11, 2, 1))], axis=3)
    k = np.concatenate([k, np.zeros((2, 1, 2, 5))], axis=1)
    k[:, -1, :, -1] = 2 * sink  # the scale is 1/2
    v = np.concatenate([problem.v, np.zeros((2, 1, 2, 4))], axis=1)
    out, lse = cufa.attention(q, k, v, softmax_scale=0.5, return_lse=True, backend="numpy")
    with_sink_out, with_sink_lse, *_ = attend(case)
    np.testing.assert_allclose(with_sink_out, out, rtol=1e-12)
    np.testing.assert_allclose(with_sink_lse, lse, rtol=1e-12)


def test_a_row_that_sees_nothing_has_its_sink(rng: np.random.Generator) -> None:
    problem = random_problem(rng, "float32", seqlen_q=5, seqlen_k=2, heads=2)
    sink = np.array([0.5, -np.inf], np.float32)
    inputs = problem.q, problem.k, problem.v
    out, lse = cufa.attention(*inputs, causal=True, sink=sink, return_lse=True, backend="numpy")
    assert np.all(out[:, :3] == 0)
    np.testing.assert_array_equal(lse[0, :, :3], np.broadcast_to(sink[:, None], (2, 3)))


@pytest.mark.parametrize("seqused", [False, True])
@pytest.mark.usefixtures("by_tiles")
def test_packed_sequences_are_calls_of_their_own(rng: np.random.Generator, seqused: bool) -> None:
    features = ["packed", "causal", *(["seqused_k"] if seqused else [])]
    case = draw_case(rng, "float16", features, batch=4, seqlen_q=20, seqlen_k=27, head_dim=4)
    q, k, v, dout = vars(case.problem).values()
    out, lse, dq, dk, dv = attend(case)
    pieces = [
        [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        for ends in (case.arrays["cu_seqlens_q"], case.arrays["cu_seqlens_k"])
    ]
    for b, (rows, keys) in enumerate(zip(*pieces, strict=True)):
        used = keys
        if seqused:
            used = slice(keys.start, min(keys.stop, keys.start + case.arrays["seqused_k"][b]))
        alone = (q[None, rows], k[None, used], v[None, used])
        results = cufa.attention(*alone, causal=True, return_lse=True, backend="numpy")
        gradients = cufa.attention_backward(dout[None, rows], *alone, *results, causal=True, backend="numpy")
        parts = out[rows], lse[:, rows], dq[rows], dk[used], dv[used]
        for expected, actual in zip((*results, *gradients), parts, strict=True):
            np.testing.assert_array_equal(actual, expected[0])
        beyond = slice(used.stop, keys.stop)
        assert np.all(dk[beyond] == 0)
        assert np.all(dv[beyond] == 0)


def test_more_used_keys_than_there_are_is_all(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float32", ["causal"], seqlen_q=5, seqlen_k=9, head_dim=4)
    assert_same(case, case.numbers, {"seqused_k": np.array([9, 1000], np.int32)})


@pytest.mark.usefixtures("by_tiles")
def test_dropout_drops_and_scales(rng: np.random.Generator) -> None:
    """With the identity for V the output is the probabilities."""
    problem = random_problem(rng, "float32", seqlen_q=200, seqlen_k=64, heads=2)
    identity = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (1, 64, 2, 64))
    inputs = problem.q, problem.k, identity
    probabilities = cufa.attention(*inputs, backend="numpy")
    dropped, lse = cufa.attention(*inputs, dropout_p=0.3, seed=5, return_lse=True, backend="numpy")
    kept = dropped != 0
    assert abs(kept.mean() - 0.7) < 0.01
    np.testing.assert_allclose(
        dropped[kept] * (1 - round(0.3 * 2**15) / 2**15), probabilities[kept], rtol=1e-5
    )
    np.testing.assert_array_equal(lse, cufa.attention(*inputs, return_lse=True, backend="numpy")[1])
    for other in ({"seed": 6}, {"seed": 5, "offset": 1}, {"seed": 5 + 2**63}):
        others = cufa.attention(*inputs, dropout_p=0.3, **other, backend="numpy") != 0
        assert abs((others == kept).mean() - (0.7**2 + 0.3**2)) < 0.02


def test_dropout_does_not_depend_on_tiles(rng: np.random.Generator) -> None:
    case = draw_case(rng, "float64", ["dropout", "packed"], seqlen_q=40, seqlen_k=40, head_dim=4)
    expected = in_sequences(case, attend(case))
    for tile in (1, 5, 64):
        with mock.patch.multiple(tiles, Q_TILE=tile, KV_TILE=tile):
            results = in_sequences(case, attend(case))
        for first, other in zip(expected, results, strict=True):
            np.testing.assert_allclose(other, first, rtol=1e-10, atol=1e-12)


# --- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [s for s in SETS if s & {"causal", "window", "mask", "mask_bits"}])
def test_tiles_are_what_is_seen(rng: np.random.Generator, features: frozenset[str]) -> None:
    case = draw_case(rng, "float32", features, seqlen_q=30, seqlen_k=37, head_dim=4)
    q, k, heads = case.problem.q, case.problem.k, range(case.problem.q.shape[-2])
    rules = Rules(softmax_scale=1.0, **case.forward)
    tiled = [rules.of_head(sequence, h, len(heads)) for sequence in rules.sequences(q, k) for h in heads]
    exact = reference.Rules(**case.forward).heads(q, k)
    for head, truth in zip(tiled, exact, strict=True):
        seen = np.zeros((head.rows, head.keys), bool)
        for start in range(0, head.rows, 8):
            rows = slice(start, min(start + 8, head.rows))
            for columns, visible in head.visible_tiles(rows, 8):
                assert "mask" not in case.arrays or truth.visible[rows, columns].any()
                seen[rows, columns] = True if visible is None else visible
        np.testing.assert_array_equal(seen, truth.visible)


@pytest.mark.usefixtures("by_tiles")
def test_work_follows_the_window(rng: np.random.Generator) -> None:
    problem = random_problem(rng, "float32", seqlen_q=400, seqlen_k=400, head_dim=4)
    products = 0
    product = Scratch.product

    def counted(self: Any, name: str, a: Array, b: Array, visible: Array | None = None) -> Array:
        nonlocal products
        products += a.shape[0] * a.shape[1] * b.shape[1]
        return product(self, name, a, b, visible)

    def work(**options: Any) -> int:
        nonlocal products
        products = 0
        with mock.patch.object(Scratch, "product", counted):
            results = cufa.attention(
                problem.q, problem.k, problem.v, return_lse=True, backend="numpy", **options
            )
            inputs = problem.dout, problem.q, problem.k, problem.v
            cufa.attention_backward(*inputs, *results, backend="numpy", **options)
        return products

    everything = work()
    assert work(window=(10, 10)) < everything / 10
    assert work(window=(10, None), causal=True) < everything / 15
    mask = np.zeros((1, 400), bool)
    mask[0, 100:120] = True
    assert work(mask=mask) < everything / 10
    assert work(seqused_k=np.array([40], np.int32)) <= everything / 10


# --- given buffers --------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", LAYOUTS)
@pytest.mark.parametrize("features", SETS, ids=feature_id)
def test_given_buffers(rng: np.random.Generator, features: frozenset[str], storage: str) -> None:
    case = draw_case(rng, "float32", features, seqlen_q=14, seqlen_k=18, head_dim=4)
    problem = case.problem

    def buffer(like: Array) -> Array:
        return poisoned(like, storage) if like.ndim == 4 else poisoned(like[None], storage)[0]

    inputs = problem.q, problem.k, problem.v
    out = buffer(problem.dout)
    lse = np.full(problem.lse_shape, np.nan, np.float32)
    returned = cufa.attention(*inputs, **case.forward, out=out, lse=lse, backend="numpy")
    assert returned[0] is out
    assert returned[1] is lse
    assert_attention(out, lse, problem, **case.forward)

    like = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    given = {name: buffer(x) for name, x in like.items()}
    given |= {f"d{name}": np.full_like(case.arrays[name], np.nan) for name in case.gradients}
    arguments = {name: x for name, x in case.backward.items() if not name.startswith("return_")}
    gradients = cufa.attention_backward(
        problem.dout, *inputs, out, lse, **arguments, **given, backend="numpy"
    )
    for gradient, buffer_of_it in zip(gradients, given.values(), strict=True):
        assert gradient is buffer_of_it
    assert_gradients(gradients, problem, **case.backward)
    if "packed" in features:
        for name, written in (("q", (out, given["dq"])), ("k", (given["dk"], given["dv"]))):
            first, *_, end = case.arrays[f"cu_seqlens_{name}"]
            for x in written:
                assert np.isnan(x[:first]).all()
                assert np.isnan(x[end:]).all()
                assert np.isfinite(x[first:end]).all()


OUTPUTS = ["dq", "dk", "dv", "dbias", "dsink"]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", ["bias", "sink", "alibi_slopes", "dlse", "q", "out"])
def test_outputs_that_overlap_inputs_are_refused(rng: np.random.Generator, output: str, name: str) -> None:
    features = ["bias", "sink", "alibi_slopes", "dlse"]
    case = draw_case(rng, "float32", features, seqlen_q=4, seqlen_k=4, heads=4, kv_heads=4, head_dim=4)
    out, lse, *_ = attend(case)
    problem = case.problem
    arguments = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out, "lse": lse, **case.backward}
    like = arguments[output[1:]]
    memory = np.zeros(max(like.nbytes, arguments[name].nbytes) // 4, np.float32)
    overlapping = memory[: arguments[name].size].reshape(arguments[name].shape)
    overlapping[...] = arguments[name]
    arguments[name] = overlapping
    arguments[output] = memory[-like.size :].reshape(like.shape)
    with pytest.raises(ValueError, match=f"^{output} overlaps {name} in memory; it must not$"):
        cufa.attention_backward(problem.dout, **arguments, backend="numpy")


# --- refusals -------------------------------------------------------------------------------------


INT32 = np.dtype(np.int32)


def refuse(error: type[Exception], message: str, **arguments: Any) -> None:
    """Both directions raise this for arguments of a call with batch 2, 5 x 9, 4 heads."""
    packed = "cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments
    shapes = [(10, 4, 8), (18, 2, 8)] if packed else [(2, 5, 4, 8), (2, 9, 2, 8)]
    q, k = (np.zeros(shape, np.float32) for shape in shapes)
    lse = np.zeros((4, 10) if packed else (2, 4, 5), np.float32)
    for call in (
        lambda: cufa.attention(q, k, k, **arguments, backend="numpy"),
        lambda: cufa.attention_backward(q, q, k, k, q, lse, **arguments, backend="numpy"),
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


SCORES = "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k), which is (2, 4, 5, 9) here"
BITS = "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k in bytes of 8 bits), which is (2, 4, 5, 2) here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": zeros(5, 8)}, f"bias has shape (5, 8); it must be {SCORES}"),
        ({"bias": zeros(9, 1)}, f"bias has shape (9, 1); it must be {SCORES}"),
        ({"bias": zeros(4, 9)}, f"bias has shape (4, 9); it must be {SCORES}"),
        ({"mask": zeros(2, 5, 9, dtype=bool)}, f"mask has shape (2, 5, 9); it must be {SCORES}"),
        ({"bias": zeros(3, 1, 5, 9)}, f"bias has shape (3, 1, 5, 9); it must be {SCORES}"),
        ({"mask": zeros(2, 2, 5, 9, dtype=bool)}, f"mask has shape (2, 2, 5, 9); it must be {SCORES}"),
        ({"mask": zeros(5, 9, dtype=np.uint8)}, f"mask has shape (5, 9); it must be {BITS}"),
        (
            {"bias": zeros(1, 1, 1, 1, 9)},
            "bias has shape (1, 1, 1, 1, 9); it must have 1 to 4 axes, the last of "
            "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k)",
        ),
        (
            {"alibi_slopes": zeros(2)},
            "alibi_slopes has shape (2,); it must be (batch, heads), which is (2, 4) here, or (heads,), "
            "which is (4,) here",
        ),
        (
            {"alibi_slopes": zeros(4, 2)},
            "alibi_slopes has shape (4, 2); it must be (heads,), which is (4,) here, or (batch, heads), "
            "which is (2, 4) here",
        ),
        ({"sink": zeros(2, 4)}, "sink has shape (2, 4); it must be (heads,), which is (4,) here"),
        (
            {"seqused_k": zeros(3, dtype=INT32)},
            "seqused_k has shape (3,); it must be (batch,), which is (2,) here",
        ),
        (
            {"seqused_k": np.array([1, -1], INT32)},
            "seqused_k has -1 for sequence 1; it must be at least 0",
        ),
        ({"softcap": -1.0}, "softcap is -1.0; it must be positive, or 0 for none"),
        ({"softcap": np.nan}, "softcap is nan; it must be finite"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0; it must be at least 0 and below 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1; it must be at least 0 and below 1"),
        ({"dropout_p": 0.1, "seed": -1}, "seed is -1; it must be at least 0 and below 2**64"),
        ({"dropout_p": 0.1, "seed": 2**64}, f"seed is {2**64}; it must be at least 0 and below 2**64"),
        ({"dropout_p": 0.1, "offset": 2**32}, f"offset is {2**32}; it must be at least 0 and below 2**32"),
        (
            {"window": 3},
            "window is 3; it may be None or a tuple or list (left, right) of two integers",
        ),
        (
            {"window": (-2, 0)},
            "window is (-2, 0); it may be None or a tuple or list (left, right) of two integers, "
            "0 to 2147483647, None or -1 for all",
        ),
    ],
)
def test_impossible_values(arguments: dict[str, Any], message: str) -> None:
    refuse(ValueError, message, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bias": zeros(5, 9, dtype=np.int32)},
            "bias has dtype int32; it may be float16, bfloat16, float32 or float64",
        ),
        ({"mask": zeros(5, 9)}, "mask has dtype float32; it may be bool, or uint8 for bits"),
        (
            {"alibi_slopes": zeros(4, dtype=np.float64)},
            "alibi_slopes has dtype float64; it must be float32",
        ),
        ({"sink": zeros(4, dtype=np.float16)}, "sink has dtype float16; it must be float32"),
        (
            {"seqused_k": zeros(2, dtype=np.int64)},
            "seqused_k has dtype int64; it must be int32",
        ),
        (
            {"window": (1.5, 0)},
            "window is (1.5, 0); it may be None or a tuple or list (left, right) of two integers, "
            "None or -1 for all",
        ),
        ({"dropout_p": 0.1, "seed": 1.0}, "seed is 1.0; it must be an integer"),
        ({"seed": 0.0}, "seed is 0.0; it must be an integer"),
        ({"offset": False}, "offset is False; it must be an integer"),
        ({"softcap": False}, "softcap is False; it may be a number"),
        ({"dropout_p": False}, "dropout_p is False; it may be a number"),
        ({"softcap": "1"}, "softcap is '1'; it may be a number"),
    ],
)
def test_impossible_types(arguments: dict[str, Any], message: str) -> None:
    refuse(TypeError, message, **arguments)


def lengths(*ends: int) -> Array:
    return np.array(ends, np.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"cu_seqlens_q": lengths(0, 10)},
            "cu_seqlens_q is given and cu_seqlens_k is not; packed sequences need both",
        ),
        (
            {"cu_seqlens_k": lengths(0, 18)},
            "cu_seqlens_k is given and cu_seqlens_q is not; packed sequences need both",
        ),
        (
            {"cu_seqlens_q": lengths(0, 10), "cu_seqlens_k": lengths(0, 3, 18)},
            "cu_seqlens_q has shape (2,) and cu_seqlens_k (3,); both must be (batch + 1,)",
        ),
        (
            {"cu_seqlens_q": lengths(), "cu_seqlens_k": lengths()},
            "cu_seqlens_q has shape (0,); it must be (batch + 1,)",
        ),
        (
            {"cu_seqlens_q": lengths(-1, 10), "cu_seqlens_k": lengths(0, 18)},
            "cu_seqlens_q begins with -1; it must be at least 0",
        ),
        (
            {"cu_seqlens_q": lengths(0, 10), "cu_seqlens_k": lengths(0, 19)},
            "cu_seqlens_k ends with 19, but k has 18 tokens",
        ),
        (
            {"cu_seqlens_q": lengths(0, 7, 3, 10), "cu_seqlens_k": lengths(0, 5, 6, 18)},
            "cu_seqlens_q falls from 7 to 3 in sequence 1; it must not",
        ),
        (
            {"cu_seqlens_q": lengths(0, 11, 10), "cu_seqlens_k": lengths(0, 5, 6)},
            "cu_seqlens_q falls from 11 to 10 in sequence 1; it must not",
        ),
        (
            {
                "cu_seqlens_q": lengths(0, 4, 10),
                "cu_seqlens_k": lengths(0, 5, 6),
                "bias": zeros(5, 9),
            },
            "bias has shape (5, 9), but sequence 1 has 6 rows and 1 keys",
        ),
        (
            {
                "cu_seqlens_q": lengths(0, 4, 10),
                "cu_seqlens_k": lengths(0, 9, 18),
                "mask": zeros(1, 1, dtype=np.uint8),
            },
            "mask has shape (1, 1), but sequence 0 has 4 rows and 9 keys",
        ),
        (
            {
                "cu_seqlens_q": lengths(0, 4, 10),
                "cu_seqlens_k": lengths(0, 5, 18),
                "mask": zeros(1, 5, dtype=bool),
            },
            "mask has shape (1, 5), but sequence 1 has 6 rows and 13 keys",
        ),
        (
            {
                "cu_seqlens_q": lengths(0, 10),
                "cu_seqlens_k": lengths(0, 18),
                "mask": zeros(1, 3, 10, 18, dtype=bool),
            },
            "mask has shape (1, 3, 10, 18); it must be (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), "
            "which is (1, 4, 10, 18) here",
        ),
        (
            {
                "cu_seqlens_q": lengths(0, 10),
                "cu_seqlens_k": lengths(0, 18),
                "bias": zeros(2, 1, 10, 18),
            },
            "bias has shape (2, 1, 10, 18); it must be (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), "
            "which is (1, 4, 10, 18) here",
        ),
        (
            {"cu_seqlens_q": lengths(0, 10), "cu_seqlens_k": lengths(0, 18), "layout": "bhsd"},
            "layout is 'bhsd', but packed sequences must be in 'bshd'",
        ),
    ],
)
def test_impossible_sequences(arguments: dict[str, Any], message: str) -> None:
    refuse(ValueError, message, **arguments)


def test_an_lse_of_packed_sequences_that_does_not_fit() -> None:
    q, ends = zeros(3, 2, 4), lengths(0, 3)
    message = r"^lse has shape \(3, 2\); it must be \(heads, tokens\), which is \(2, 3\) here$"
    with pytest.raises(ValueError, match=message):
        cufa.attention_backward(
            q, q, q, q, q, zeros(3, 2), cu_seqlens_q=ends, cu_seqlens_k=ends, backend="numpy"
        )


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_gradients_of_what_is_not_there_are_refused(name: str) -> None:
    q, lse = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    message = f"^the gradient of {name} is requested, but there is no {name}; give {name}, as to the forward$"
    for others in ({}, {"score_mod": lambda score, *_: 2 * score}):
        options: dict[str, Any] = {f"return_d{name}": True, **others}
        with pytest.raises(ValueError, match=message):
            cufa.attention_backward(q, q, q, q, q, lse, **options, backend="numpy")


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_bias_or_a_mask_may_have_the_axis_of_keys_alone(rng: np.random.Generator, name: str) -> None:
    q, k, v = (rng.standard_normal((2, length, 3, 8)).astype(np.float32) for length in (5, 9, 9))
    of_keys = rng.standard_normal(9).astype(np.float32)
    given = of_keys if name == "bias" else of_keys > 0
    whole = np.broadcast_to(given, (2, 3, 5, 9)).copy()
    expected = cufa.attention(q, k, v, **{name: whole}, backend="numpy")
    np.testing.assert_array_equal(cufa.attention(q, k, v, **{name: given}, backend="numpy"), expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "dlse",
            zeros(1, 3, 2),
            "dlse has shape (1, 3, 2); it must be (batch, heads, seqlen_q), which is (1, 2, 3) here",
        ),
        ("dbias", zeros(1, 2, 3, 3), "dbias has shape (1, 2, 3, 3); it must be (3, 3)"),
        ("dsink", zeros(1, 2), "dsink has shape (1, 2); it must be (2,)"),
    ],
)
def test_arrays_of_the_backward_that_do_not_fit(name: str, given: Array, message: str) -> None:
    q, lse = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    side = {"bias": zeros(3, 3), "sink": zeros(2)}
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        cufa.attention_backward(q, q, q, q, q, lse, **side, **{name: given}, backend="numpy")
    assert str(raised.value) == message
