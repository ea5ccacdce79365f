"""Traced expressions: they compute what the function computes, and their derivatives are its."""

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa.traced.code import write
from cufa.traced.derivatives import added_terms, derivative, has_large_constant, is_of_distance, times
from cufa.traced.evaluation import evaluate_all
from cufa.traced.expression import TracedArray, apply, in_order, lifted, symbol

SYMBOLS = {"score": "float", "i": "int32", "j": "int32"}
TABLE = np.random.default_rng(7).standard_normal((5, 6))
BITS = np.array([3, 1, 4, 1, 5])

# As Python and NumPy have them; all are smooth but for some places, and none grows much.
NUMBERS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b * 0.5,
    "divide": lambda a, b: a / (2 + b * b) + np.reciprocal(1 + b * b * 1.0),
    "power": lambda a, b: a**3 / (1 + a**2) - (1.5 + np.sin(a)) ** np.tanh(b),
    "remainder": lambda a, b: a % 1.75 + 2 // (1 + b**2),
    "exponentials": lambda a, b: np.exp(-(a**2)) + np.exp2(-np.square(b)) + 0.1 * np.expm1(np.tanh(b)),
    "logarithms": lambda a, b: np.log(2 + a**2) * np.log2(2 + b**2) + np.log1p(abs(b)),
    "waves": lambda a, b: np.sin(a) * np.cos(b) + np.tanh(a + b),
    "roots": lambda a, b: np.sqrt(1 + a * a) - 1 / (3 + b**2),
    "choices": lambda a, b: np.minimum(a, b) + np.maximum(np.clip(a, -0.7, 0.7), 0.5 * b),
    "bounds": lambda a, b: np.clip(a, None, 0.7) + 0.5 * np.clip(b, -0.7, None) + np.clip(a, None, None) / 4,
    "where": lambda a, b: np.where((a < b) | ~(a > -1) & (b != 0), -a, abs(b)),
    "steps": lambda a, b: np.floor(a) + np.ceil(b) - np.sign(a) + np.logical_xor(a > 0, b > 0) * 2.0,
    "rounded": lambda a, b: np.rint(a) - np.trunc(b) + np.isfinite(a) + 2 * np.isinf(b) + a / 2,
}
LEAVES: dict[str, Any] = {
    "score": lambda score, i, j, table, bits: score,
    "distance": lambda score, i, j, table, bits: abs(i - j) * 0.25,
    "integers": lambda score, i, j, table, bits: (i // 2 * 3 + j % 3 - (i ^ j & 5) + (1 << i) - (j >> 1)) / 8,
    "negative": lambda score, i, j, table, bits: -((i - j) // 2) + (i - j) % 3 + (i - 7) ** 2 % 4,
    "table": lambda score, i, j, table, bits: table[i, j],
    "bits": lambda score, i, j, table, bits: np.where(bits[i] >> j & 1 == 1, 0.5, np.float64(-0.25)),
    "kinds": lambda score, i, j, table, bits: (i == j) * score + score.astype(np.int32) + np.isnan(score),
    "number": lambda score, i, j, table, bits: np.float64(0.75),
}

trees = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.tuples(st.sampled_from(sorted(NUMBERS)), inner, inner),
    max_leaves=6,
)


def function_of(tree):
    """What a tree says, as a function of the symbols and the arrays."""

    def function(*arguments):
        def value(node):
            if isinstance(node, str):
                return LEAVES[node](*arguments)
            name, first, second = node
            return NUMBERS[name](value(first), value(second))

        return value(tree)

    return function


def traced(function):
    symbols = [symbol(name, kind) for name, kind in SYMBOLS.items()]
    arrays = TracedArray("table", "float", 2, "table"), TracedArray("bits", "int64", 1, "bits")
    return lifted(function(*symbols, *arrays))


def values(scores):
    """For every pair of places, with scores (n, 1, 1)."""
    i, j = np.ogrid[0:5, 0:6]
    return scores[:, None, None], i.astype(np.int32), j.astype(np.int32)


def evaluate(expression, values):
    return evaluate_all([expression], values)[0]


def evaluated(expression, score, i, j):
    return evaluate(expression, {"score": score, "i": i, "j": j, "table": TABLE, "bits": BITS})


@settings(max_examples=200, deadline=None)
@given(trees)
def test_it_computes_what_the_function_does(tree):
    function = function_of(tree)
    places = values(np.array([-2.3, -1.0, -0.4, 0.0, 0.3, 1.0, 2.6]))
    expected = function(*places, TABLE, BITS)
    np.testing.assert_allclose(evaluated(traced(function), *places), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_derivative_is_that_of_finite_differences(tree):
    function = function_of(tree)
    score, i, j = values(np.linspace(-2.5, 2.5, 41) + 0.00317)
    slope = derivative(traced(function), "score")
    exact = 0.0 if slope is None else evaluated(slope, score, i, j)
    exact = np.broadcast_to(exact, np.broadcast_shapes(score.shape, i.shape, j.shape))
    found = []
    for step in (1e-4, 0.5e-4):
        ends = (np.asarray(function(score + s, i, j, TABLE, BITS)) for s in (step, -step))
        upper, lower = ends
        found.append(np.broadcast_to((upper - lower) / (2 * step), exact.shape))
    # Beside a kink or a step the two differ.
    smooth = np.abs(found[0] - found[1]) < 1e-4
    assert smooth.mean() > 0.5
    np.testing.assert_allclose(exact[smooth], found[1][smooth], rtol=1e-3, atol=1e-3)


def test_derivative_of_what_is_chosen_is_not_that_of_what_is_not():
    score = symbol("score", "float")
    expression = np.where(score > 0, np.sqrt(score), -math.inf)
    slope = derivative(expression, "score")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(evaluate(slope, {"score": np.array([-1.0, 0.25])}), [0, 1])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: np.sqrt(np.maximum(x, 0)), [0, math.inf, 1]),
        (lambda x: np.maximum(x, 0) ** 0.5, [0, math.inf, 1]),
        (lambda x: np.log1p(np.sqrt(np.where(x > 0, x, 0.0))), [0, 0, 1 / 1.5]),
        (lambda x: np.sqrt(np.clip(x, 0, 0.2)) + x, [1, math.inf, 1]),
        (lambda x: abs(x), [-1, 0, 1]),
        (lambda x: abs(x) ** (x * 0.0), [0, 0, 0]),
    ],
)
def test_derivative_where_a_choice_makes_it_zero(function, expected):
    """Also if that of what is done to the chosen number is infinite."""
    score = symbol("score", "float")
    slope = derivative(lifted(function(score)), "score")
    with np.errstate(all="ignore"):
        found = evaluate(slope, {"score": np.array([-1.0, 0.0, 0.25])})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_bound_of_clip_may_be_none():
    score, i = symbol("score", "float"), symbol("i", "int32")
    for value in (score, i):
        assert write(np.clip(value, None, 5)) == write(np.minimum(value, 5))
        assert write(np.clip(value, -2, None)) == write(np.maximum(value, -2))
        assert np.clip(value, None, None) is value
    assert write(np.clip(0.5, None, score)) == write(np.minimum(0.5, score))


def test_what_comes_twice_is_written_once():
    score = symbol("score", "float")
    text = write(np.tanh(score + 1) * np.tanh(1.0 + score) + np.tanh(score + 1))
    assert text.count("tanh_of") == 2
    assert text.splitlines()[-1].strip().startswith("return t")


def test_numbers_keep_all_their_bits():
    text = write(symbol("score", "float") * 0.1 + math.inf - math.nan)
    assert (0.1).hex() in text
    assert "(-negative_infinity())" in text
    assert "not_a_number()" in text


def test_sums_of_indices_are_written_in_two_parts():
    """And as integers where anything else is made of them."""
    i, j, score = symbol("i", "int32"), symbol("j", "int32"), symbol("score", "float")
    text = write(score * abs(i - j + 3))
    assert "const SplitIndex t0 = i - j;" in text
    assert "const SplitIndex t1 = t0 + (3);" in text
    assert "const acc_t t2 = acc_t(t1);" in text
    assert "const acc_t t3 = absolute(t2);" in text
    text = write(np.where((i - j) % 5 == 0, score, (i * j) // 2))
    assert "const SplitIndex t0 = i - j;" in text
    assert "remainder_of(int(t0), (5))" in text
    assert "product_of(int(i), int(j))" in text
    text = write(score * (i + 2**30 - 5))
    assert "const SplitIndex t0 = i + (1073741824);" in text
    assert "const int t1 = difference_of(int(t0), (5));" in text


def test_integers_are_rounded_before_what_floats_do_as_well():
    i, score = symbol("i", "int32"), symbol("score", "float")
    numbers = np.array([-(2**24) - 1, -3, 0, 7, 2**24 + 3], np.int32)
    for function in (lambda x: abs(x), lambda x: -x, lambda x: np.clip(x, -2, 5)):
        expression = score * function(i)
        expected = function(numbers).astype(np.float32)
        actual = evaluate(expression, {"i": numbers, "score": np.ones(5, np.float32)}).astype(np.float32)
        np.testing.assert_array_equal(actual, expected)
        casts = [node for node in in_order(expression) if node.operation == "cast"]
        assert [cast.operands[0].operation for cast in casts] == ["symbol"]


def test_integers_that_many_share_are_rounded_once():
    x, i = symbol("score", "float"), symbol("i", "int32")
    numbers = np.array([-5, 0, 3], np.int32)
    shared = i
    for _ in range(500):
        shared = np.minimum(np.maximum(shared, -shared), abs(shared))
    product = x * shared
    assert len(in_order(product)) < 2500
    assert [node.operation for node in in_order(product)].count("cast") == 1
    found = evaluate(product, {"i": numbers, "score": np.ones(3, np.float32)})
    np.testing.assert_array_equal(found, [5, 0, 3])
    assert write(product).count(" = ") > 1000


def test_what_is_added_to_a_score():
    score, i, h = symbol("score", "float"), symbol("i", "int32"), symbol("h", "float")
    sums = {
        score: 0,
        score - h * i: -6,
        1.5 + (score + i) - h: 2.5,
        i + score: 3,
    }
    for expression, expected in sums.items():
        terms = added_terms(expression, "score")
        assert sum(evaluate(term, {"i": 3, "h": 2.0}) for term in terms) == expected
    for other in (i - score, 2 * score, score + score, np.tanh(score) + i, lifted(1.0)):
        assert added_terms(other, "score") is None


def test_products_begin_with_what_stays_the_same():
    h, i, unit = symbol("h", "float"), symbol("i", "int32"), symbol("unit", "float")
    product = times(-(abs(i) * h), unit, {"i"})
    assert evaluate(product, {"h": 0.5, "i": -3, "unit": 4.0}) == -6
    assert "= h * unit;" in write(product)
    assert evaluate(times(1.0 * i, unit, {"i"}), {"i": -3, "unit": 4.0}) == -12


@np.errstate(all="ignore")
@pytest.mark.parametrize("unit", [8, -8, 1.5e30, 1e-30])
@pytest.mark.parametrize("number", [np.finfo(np.float32).min, -1e38, 1e9, -1e6, 0.25])
@pytest.mark.parametrize(
    "product",
    [
        lambda seen, number, h: seen * number,
        lambda seen, number, h: -(h * seen),
        lambda seen, number, h: seen * (h * 0.5),
        lambda seen, number, h: np.where(seen, number, 0) * seen,
        lambda seen, number, h: (1.0 - seen) * number,
        lambda seen, number, h: seen * 1.0 * number * 0.5 * h,
    ],
)
def test_products_of_zero_are_zero(unit, number, product):
    """However large the rest is, if it is finite."""
    places = {"h": np.float32(number), "i": np.arange(3, dtype=np.int32), "unit": np.float32(unit)}
    h, seen = symbol("h", "float"), symbol("i", "int32") > 0
    found, plain = (
        evaluate_all([lifted(expression)], places, np.dtype(np.float32))[0]
        for expression in (
            times(product(seen, float(number), h), symbol("unit", "float"), {"i"}),
            product(seen, float(number), h),
        )
    )
    zero = plain == 0
    assert zero.any()
    assert (found[zero] == 0).all()
    assert (np.sign(found[~zero]) == np.sign(plain[~zero] * places["unit"])).all()


@np.errstate(invalid="ignore")
def test_products_with_what_is_not_finite_are_not():
    h, i, unit = symbol("h", "float"), symbol("i", "int32"), symbol("unit", "float")
    product = times(i * h, unit, {"i"})
    for number, expected in ((-math.inf, [math.nan, -math.inf]), (math.nan, [math.nan, math.nan])):
        found = evaluate(product, {"h": number, "i": np.arange(2), "unit": 4.0})
        np.testing.assert_array_equal(found, expected)


def test_which_constants_are_large():
    i = symbol("i", "int32")
    for small in (-1e6 * i, i + 1000, np.where(i > 0, 0, -math.inf), i * math.nan):
        assert not has_large_constant([lifted(small)])
    for large in (-1e9 * i, i + 2**20, np.where(i > 0, 0, -1e38)):
        assert has_large_constant([lifted(0), lifted(large)])


@pytest.mark.parametrize(
    ("function", "of_distance"),
    [
        (lambda h, i, j, buckets: 5 - (j - (i - 1)), True),
        (lambda h, i, j, buckets: np.clip(i - j, -4, 4) + h, True),
        (lambda h, i, j, buckets: buckets[h, abs(i - j).astype(np.int64) + 7], True),
        (
            lambda h, i, j, buckets: np.where(i > h, np.log(np.maximum(i - j, 1) / 4.0).astype(np.int32), 0),
            False,
        ),
        (
            lambda h, i, j, buckets: np.where(
                i - j > 0, np.log(np.maximum(i - j, 1) / 4.0).astype(np.int32), 0
            ),
            True,
        ),
        (lambda h, i, j, buckets: np.where(i >= j, 1, 0), True),
        (lambda h, i, j, buckets: np.where(i >= j, i, 0), False),
        (lambda h, i, j, buckets: np.where(i - j > symbol("score", "float"), i - j, 0), False),
        (lambda h, i, j, buckets: (i - j) * 2 + h * (j - i), True),
        (lambda h, i, j, buckets: i + j, False),
        (lambda h, i, j, buckets: i - 2 * j + j, False),
        (lambda h, i, j, buckets: (i + j) % 3, False),
        (lambda h, i, j, buckets: buckets[i, j], False),
        (lambda h, i, j, buckets: i - i + h, False),
        (lambda h, i, j, buckets: lifted(3), False),
    ],
)
def test_what_depends_on_the_distance_alone(function, of_distance):
    """Those are the same along diagonals; where this is not recognised, sums are only slower."""
    h, i, j = (symbol(name, "int32") for name in ("h", "q_idx", "kv_idx"))
    assert (
        is_of_distance(lifted(function(h, i, j, TracedArray("buckets", "int32", 2, "buckets"))))
        == of_distance
    )


def test_terms_of_long_sums_are_found_at_once():
    score = symbol("score", "float")
    doubled = score
    for _ in range(100):
        doubled = doubled + doubled
    assert added_terms(doubled, "score") is None


def test_sums_of_more_terms_than_calls_nest():
    """As in a mask_mod that counts the documents that begin before a key."""
    score, i = symbol("score", "float"), symbol("i", "int32")
    terms = sys.getrecursionlimit()
    biased, place, document = score, i, lifted(0)
    for begin in range(terms):
        biased, place, document = biased + 0.5 * i, place + begin, document + (i >= begin).astype(np.int32)
    assert len(added_terms(biased, "score")) == terms
    assert evaluate(document, {"i": 5}) == 6
    for expression in (biased, place, document):
        assert write(expression).count(" = ") >= terms


def test_quotient_of_a_place_is_exact():
    i, score = symbol("i", "int32"), symbol("score", "float")
    n = np.arange(1, 1000, dtype=np.int32)
    for divisor in (41, 49, 1000):
        blocks = evaluate(np.floor(i / divisor), {"i": n})
        np.testing.assert_array_equal(blocks, n // divisor)
        assert "quotient_by(" in write(i / divisor)
    for without in (score / 41, i / 64):
        assert "quotient" not in write(without)
    assert "/" in write(i / (i + 1))
    assert "quotient_of_score(" in write(score / (i + 1))


def test_power_of_an_integer_with_a_float_is_a_float():
    i = symbol("i", "int32")
    assert (i**2).kind == "int32"
    assert (i**2.0).kind == "float"
    assert evaluate(i**2.0, {"i": np.array([100000], np.int32)}) == 1e10


def test_fabs_of_an_integer_is_a_float():
    i = symbol("i", "int32")
    distance: Any = np.fabs(i)
    assert distance.kind == "float"
    assert abs(i).kind == "int32"
    assert evaluate(distance**2, {"i": np.array([-70000], np.int32)}) == np.float32(4.9e9)


def test_sign_of_an_integer_is_an_integer():
    i, table = symbol("i", "int32"), TracedArray("table", "float", 1, "table")
    values = {"i": np.arange(-2, 3, dtype=np.int32), "table": np.arange(3.0)}
    np.testing.assert_array_equal(evaluate(table[np.sign(i) + 1], values), [0, 0, 1, 2, 2])
    halved: Any = np.sign(0.5 * i)
    assert halved.kind == "float"


def test_an_index_that_is_none_names_the_array():
    table = TracedArray("score_mod_0", "float", 1, "table")
    element = table[symbol("kv_idx", "int32")]
    values = {"kv_idx": np.arange(6), "score_mod_0": np.zeros(5)}
    with pytest.raises(IndexError, match=r"^table: index 5 is out of bounds"):
        evaluate(element, values)


def test_no_index_counts_from_the_end():
    """As in C++, where it would be of what lies before the array."""
    table = TracedArray("score_mod_0", "float", 2, "table")
    element = table[symbol("h", "int32"), symbol("kv_idx", "int32") - 1]
    values = {"h": 0, "kv_idx": np.arange(6), "score_mod_0": np.zeros((2, 6))}
    with pytest.raises(
        IndexError, match=r"^table: index -1 is out of bounds for axis 1; indices start at 0$"
    ):
        evaluate(element, values)


def test_integers_of_64_bits():
    i, table = symbol("i", "int32"), TracedArray("table", "int64", 1, "table")
    assert (i + 1).kind == "int32"
    assert (i + table[i]).kind == "int64"
    assert (i + 2**40).kind == "int64"
    assert "1099511627776LL" in write(i + 2**40)


def test_least_integers():
    """Their absolute values are none, also in C++."""
    i, numbers = symbol("i", "int32"), np.array([-3, 0, 5], np.int32)
    for least, kind in ((-(2**31), "int32"), (-(2**63), "int64")):
        wrapped, bounded = i + least, i > least
        assert (wrapped.kind, lifted(least).kind) == (kind, kind)
        assert evaluate(wrapped, {"i": numbers}).dtype == kind
        np.testing.assert_array_equal(evaluate(wrapped, {"i": numbers}), numbers.astype(kind) + least)
        assert evaluate(bounded, {"i": numbers}).all()
    assert "(-2147483647 - 1)" in write(i + -(2**31))
    assert "(-9223372036854775807LL - 1)" in write(i + -(2**63))


class Number:
    """Another library's array without axes, as torch.tensor(0.5) is."""

    shape = ()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("abs", "NumPy's function, np.abs"),
        ("clip", "NumPy's function, np.clip"),
        ("clamp", "NumPy's function, np.clip"),
        ("tanh", "NumPy's function, np.tanh"),
        ("sigmoid", "NumPy's functions"),
    ],
)
def test_methods_of_other_libraries_have_functions_instead(name, instead):
    with pytest.raises(AttributeError, match=rf"^a traced value has no attribute '{name}'; use {instead}$"):
        getattr(symbol("x", "float"), name)()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, i, t: 1 if x > 0 else 2, r"np\.where\(condition, a, b\)"),
        (lambda x, i, t: 0 < x < 1, r"& \| ~"),
        (lambda x, i, t: max(x, 0), r"np\.maximum"),
        (lambda x, i, t: math.tanh(x), r"np\.tanh\(score\)"),
        (lambda x, i, t: int(x), r"\.astype\(np\.int32\)"),
        (lambda x, i, t: round(x), r"by round\(\); use np\.rint\(value\)$"),
        (lambda x, i, t: round(x, 2), r"by round\(\); use np\.rint"),
        (lambda x, i, t: np.float32(i), r"\.astype\(np\.float32\)"),
        (lambda x, i, t: np.reciprocal(i), r"np\.reciprocal is applied to int32.*use 1 / x$"),
        (lambda x, i, t: math.trunc(x), r"\.astype\(np\.int32\)$"),
        (lambda x, i, t: [1.0, 2.0][i], r"cufa\.ScoreMod\(function, table\)"),
        (lambda x, i, t: list(range(i)), r"cannot be one of Python's integers, as range\(\) and indices of"),
        (lambda x, i, t: x + Number(), r"an array without axes .* give it x\.reshape\(1\), .*float\(x\)"),
        (lambda x, i, t: TABLE[i, i], r"cufa\.ScoreMod\(function, table\)"),
        (lambda x, i, t: x + BITS, r"cufa\.ScoreMod\(function, slopes\)"),
        (lambda x, i, t: x * t, r"an element, as in slopes\[h\]"),
        (lambda x, i, t: sum(t), "t is iterated over"),
        (
            lambda x, i, t: t[i, i + t.shape[1]],
            "t has no lengths when the function is traced; take them from",
        ),
        (lambda x, i, t: t[i, i + len(t)], "t has no lengths when the function is traced; take them from"),
        (lambda x, i, t: t[i], "2 axes and is read with 1"),
        (lambda x, i, t: t[i, i:], r"t is sliced; read an element, as in slopes\[h\]"),
        (lambda x, i, t: t[..., i], "t is sliced"),
        (lambda x, i, t: t[None, i], "t is sliced"),
        (lambda x, i, t: t[x, i], "at a float; indices must be integers"),
        (lambda x, i, t: np.arctan(x), r"np\.arctan cannot be traced; these can: abs"),
        (lambda x, i, t: np.clip(x, a_min=0, a_max=1), r"traced as np\.clip\(value, least, most\)"),
        (lambda x, i, t: np.where(i > 0), r"traced as np\.where\(condition, a, b\)"),
        (lambda x, i, t: np.sum(x), r"np\.sum cannot be traced"),
        (lambda x, i, t: np.add.reduce(x), r"np\.add\.reduce cannot be traced"),
        (lambda x, i, t: np.add(x, 1, where=True), "has the argument where"),
        (lambda x, i, t: np.asarray(x), "made an array"),
        (lambda x, i, t: list(x), "iterated over"),
        (lambda x, i, t: (i > 0) + (i < 9), r"np\.add does not support bools alone"),
        (lambda x, i, t: x & 1, "it needs integers"),
        (lambda x, i, t: i**i, "power of an integer must be a constant"),
        (lambda x, i, t: x + "1", "a str is not a number"),
        (lambda x, i, t: lifted((x, x)), "a tuple is not a number; .* returns numbers$"),
        (lambda x, i, t: i + 2**63, "too large for an integer of 64 bits"),
        (lambda x, i, t: i - (2**63 + 1), "too large for an integer of 64 bits"),
        (lambda x, i, t: x.astype(np.complex64), "it may be bool"),
        *(
            (lambda x, i, t, dtype=dtype: i.astype(dtype), f"cannot be made {dtype}; it may be bool, int32")
            for dtype in ("int8", "uint8", "uint32", "uint64", "float16")
        ),
        (lambda x, i, t: t[i, -1], "t is read at -1; indices start at 0"),
    ],
)
def test_what_cannot_be_traced(function, message):
    with pytest.raises(TypeError, match=message):
        function(symbol("x", "float"), symbol("i", "int32"), TracedArray("t", "float", 2, "t"))


def test_numpys_scalars_are_numbers():
    x = symbol("x", "float")
    assert write(np.float32(0.5) * x) == write(0.5 * x)
    assert write(apply("multiply", np.int64(3), x)) == write(3 * x)
