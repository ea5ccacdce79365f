"""What one call may ask for: every refusal by its words, and the counts of work by brute force."""

import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from tolerance import DTYPES

from cufa import problem as problem_module
from cufa.arguments import Options, check_fits, check_scale, make_problem
from cufa.messages import shown
from cufa.problem import (
    LAYOUTS,
    MAX_AXIS,
    MAX_EXTENT,
    MAX_HEAD_DIM,
    MAX_VALUE_DIM,
    Direction,
    Features,
    Problem,
    Shape,
    accumulator_dtype,
    check_layout,
    dtype_name,
    lse_shape,
    output_shape,
)

# q, k and v that go together, in "bshd".
SHAPES: dict[str, Shape] = {"q": (2, 5, 6, 8), "k": (2, 7, 3, 8), "v": (2, 7, 3, 4)}
ONE_OF_THE_DTYPES = "it may be float16, bfloat16, float32 or float64"
ONE_OF_THE_INPUT_DTYPES = "it may be float16, bfloat16, float32, float64 or float8_e4m3fn"


def in_layout(shape: Shape, layout: str) -> Shape:
    """A "bshd" shape, if it has 4 axes, as this layout has it."""
    if len(shape) != 4 or layout == "bshd":
        return shape
    batch, seqlen, heads, head_dim = shape
    return batch, heads, seqlen, head_dim


def make(
    direction: Direction = "forward",
    *,
    layout: str = "bshd",
    causal: Any = False,
    dtypes: dict[str, Any] | None = None,
    **shapes: Shape,
) -> Problem:
    """A problem of `SHAPES` in float32 but for what is given; shapes are in "bshd"."""
    return make_problem(
        direction,
        {name: in_layout(shape, layout) for name, shape in (SHAPES | shapes).items()},
        {name: np.dtype((dtypes or {}).get(name, np.float32)) for name in SHAPES},
        Options(causal=causal, layout=layout),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_problem_is_what_the_arrays_are(
    dtype: str, direction: Direction, causal: bool, layout: str
) -> None:
    made = make(direction, layout=layout, causal=causal, dtypes=dict.fromkeys("qkv", dtype))
    assert made == Problem(direction, dtype, 2, 5, 7, 6, 3, 8, 4, causal)


def test_a_problem_is_a_key_and_cannot_change() -> None:
    made = make()
    assert {made: 1}[make()] == 1
    assert made != make(causal=True)
    with pytest.raises(FrozenInstanceError):
        made.batch = 3  # type: ignore[misc]


def test_causal_of_numpy_becomes_a_plain_bool() -> None:
    assert make(causal=np.bool_(True)).causal is True


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (0, 5, 6, 8), "k": (0, 7, 3, 8), "v": (0, 7, 3, 4)},
        {"q": (2, 0, 6, 8)},
        {"k": (2, 0, 3, 8), "v": (2, 0, 3, 4)},
        {"q": (2, 5, 0, 8)},
        {"q": (2, 5, 0, 8), "k": (2, 7, 0, 8), "v": (2, 7, 0, 4)},
        {"q": (2, 5, 6, 1), "k": (2, 7, 3, 1)},
        {"q": (2, 5, 6, 512), "k": (2, 7, 3, 512), "v": (2, 7, 3, 512)},
        {"q": (2, MAX_AXIS, 6, 8), "k": (2, MAX_AXIS, 3, 8), "v": (2, MAX_AXIS, 3, 4)},
        {"q": (2, 5, 3, 8)},
        {"k": (2, 7, 1, 8), "v": (2, 7, 1, 4)},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_at_a_limit_is_allowed(shapes: dict[str, Any], layout: str) -> None:
    made = make(layout=layout, **shapes)
    q, k, v = ((SHAPES | shapes)[name] for name in "qkv")
    assert (made.batch, made.seqlen_q, made.heads, made.head_dim) == q
    assert (made.batch, made.seqlen_k, made.kv_heads, made.value_dim) == v
    assert k[:3] == v[:3]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"q": (2, 5, 6)},
            "q has shape (2, 5, 6); it must have the 4 axes (batch, seqlen, heads, head_dim); packed "
            "sequences have 3, with cu_seqlens_q and cu_seqlens_k",
        ),
        ({"k": ()}, "k has shape (); it must have the 4 axes (batch, seqlen, heads, head_dim)"),
        ({"v": (1, 2, 7, 3, 4)}, "v has shape (1, 2, 7, 3, 4); it must have the 4 axes"),
        ({"q": (2, 2**31, 6, 8)}, "q has shape (2, 2147483648, 6, 8); no axis may exceed 2147450879"),
        ({"k": (2, 7, 2**31, 8)}, "k has shape (2, 7, 2147483648, 8); no axis may exceed 2147450879"),
        ({"k": (1, 7, 3, 8)}, "k has shape (1, 7, 3, 8) and q (2, 5, 6, 8); the batch must be the same"),
        ({"v": (3, 7, 3, 4)}, "v has shape (3, 7, 3, 4) and q (2, 5, 6, 8); the batch must be the same"),
        ({"v": (2, 6, 3, 4)}, "v has shape (2, 6, 3, 4) and k (2, 7, 3, 8); the seqlen must be the same"),
        (
            {"v": (2, 7, 6, 4)},
            "v has shape (2, 7, 6, 4) and k (2, 7, 3, 8); the number of heads must be the same",
        ),
        (
            {"k": (2, 7, 3, 4)},
            "k has shape (2, 7, 3, 4) and q (2, 5, 6, 8); the head dim (last axis) must be the same",
        ),
        (
            {"q": (2, 5, 6, 577), "k": (2, 7, 3, 577)},
            "q has head dim 577 (shape (2, 5, 6, 577)); it may be 1 to 576",
        ),
        (
            {"q": (2, 5, 6, 0), "k": (2, 7, 3, 0)},
            "q has head dim 0 (shape (2, 5, 6, 0)); it may be 1 to 576",
        ),
        ({"v": (2, 7, 3, 513)}, "v has head dim 513 (shape (2, 7, 3, 513)); it may be 1 to 512"),
        ({"v": (2, 7, 3, 0)}, "v has head dim 0 (shape (2, 7, 3, 0)); it may be 1 to 512"),
        (
            {"q": (2, 5, 4, 8)},
            "q has 4 heads and k 3; the query heads must be a multiple of the key-value heads (q has shape "
            "(2, 5, 4, 8) and k (2, 7, 3, 8), read as (batch, seqlen, heads, head_dim))",
        ),
        ({"q": (2, 5, 2, 8)}, "q has 2 heads and k 3; the query heads must be a multiple"),
        (
            {"k": (2, 7, 0, 8), "v": (2, 7, 0, 4)},
            "q has 6 heads and k 0; the query heads must be a multiple of the key-value heads",
        ),
    ],
)
def test_shapes_that_do_not_go_together(shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(**shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (2, 5, 6)}, "q has shape (2, 5, 6); it must have the 4 axes (batch, heads, seqlen, head_dim)"),
        ({"v": (2, 6, 3, 4)}, "v has shape (2, 3, 6, 4) and k (2, 3, 7, 8); the seqlen must be the same"),
        (
            {"v": (2, 7, 6, 4)},
            "v has shape (2, 6, 7, 4) and k (2, 3, 7, 8); the number of heads must be the same",
        ),
        ({"q": (2, 5, 4, 8)}, "q has 4 heads and k 3; the query heads must be a multiple"),
    ],
)
def test_shapes_of_the_other_layout_are_named_as_given(shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(layout="bhsd", **shapes)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize(
    "dtype", ["int8", "int32", "int64", "uint16", "bool", "complex64", "O", "V2", "M8[s]", ">f2", ">f4"]
)
def test_dtypes_that_are_not_supported(argument: str, dtype: str) -> None:
    given = np.dtype(dtype)
    with pytest.raises(TypeError) as caught:
        make(dtypes={argument: given})
    order = "" if given.isnative else ", in the machine's byte order"
    assert str(caught.value) == f"{argument} has dtype {given}; {ONE_OF_THE_INPUT_DTYPES}{order}"


@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize(("dtype", "other"), list(itertools.permutations(DTYPES, 2)))
def test_dtypes_that_are_mixed(argument: str, dtype: str, other: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(dtypes=dict.fromkeys("qkv", dtype) | {argument: other})
    assert str(caught.value) == f"{argument} has dtype {other} and q {dtype}; they must be the same"


def test_dtype_name_names_the_argument() -> None:
    assert [dtype_name(np.dtype(name), "x") for name in DTYPES] == list(DTYPES)
    with pytest.raises(TypeError, match=f"^x has dtype int32; {ONE_OF_THE_DTYPES}$"):
        dtype_name(np.dtype(np.int32), "x")


@pytest.mark.parametrize("layout", ["bshdd", "", "BSHD", "bsdh", None])
def test_layouts_that_are_not_known(layout: Any) -> None:
    expected = re.escape(f"layout is {layout!r}; it may be 'bshd' or 'bhsd'")
    problem = make()
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_layout(layout)
    with pytest.raises(ValueError, match=f"^{expected}$"):
        make(layout=layout)
    with pytest.raises(ValueError, match=f"^{expected}$"):
        output_shape(problem, layout)


def test_layouts_say_where_the_axes_are() -> None:
    assert check_layout("bshd") == (0, 1, 2)
    assert check_layout("bhsd") == (0, 2, 1)


@pytest.mark.parametrize("head_dim", [1, 24, 64, 256])
def test_the_scale_is_one_over_the_root_of_the_head_dim(head_dim: int) -> None:
    assert check_scale(None, head_dim) == pytest.approx(head_dim**-0.5, rel=1e-15)


@pytest.mark.parametrize("scale", [1, 0, -0.5, 2.5, np.float32(0.25), np.int64(3), np.array(0.5)])
def test_a_scale_may_be_any_finite_number(scale: Any) -> None:
    checked = check_scale(scale, 64)
    assert type(checked) is float
    assert checked == scale


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, np.float16("inf")])
def test_a_scale_must_be_finite(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"^softmax_scale is (-?inf|nan); it must be finite$"):
        check_scale(scale, 64)


def test_a_scale_too_large_for_a_float_is_not_finite() -> None:
    with pytest.raises(ValueError, match=r"^softmax_scale is .*; it must be finite$"):
        check_scale(10**400, 64)


@pytest.mark.parametrize("scale", ["big", "0.5", b"1", [0.5], (), 1j, object(), np.array([0.5, 1.0])])
def test_a_scale_must_be_a_number(scale: Any) -> None:
    with pytest.raises(TypeError) as caught:
        check_scale(scale, 64)
    assert str(caught.value) == f"softmax_scale is {shown(scale)}; it may be a number or None"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_of_the_results(layout: str) -> None:
    problem = make(layout=layout)
    assert output_shape(problem, layout) == in_layout((2, 5, 6, 4), layout)
    assert lse_shape(problem) == (2, 6, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_float32_or_wider(dtype: str) -> None:
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    problem = make(dtypes=dict.fromkeys("qkv", dtype))
    assert accumulator_dtype(dtype) == problem.accumulator == wide
    assert problem.itemsize == {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]


def fits(dtype: str, layout: str, shapes: dict[str, Shape], dtypes: dict[str, str]) -> None:
    """Check out, dout and lse of `SHAPES`, as they should be but for what is given."""
    problem = make("backward", layout=layout, dtypes=dict.fromkeys("qkv", dtype))
    wide = "float64" if dtype == "float64" else "float32"
    good = in_layout((2, 5, 6, 4), layout)
    check_fits(
        problem,
        {"out": good, "dout": good, "lse": (2, 6, 5)} | shapes,
        {
            name: np.dtype(given)
            for name, given in ({"out": dtype, "dout": dtype, "lse": wide} | dtypes).items()
        },
        layout,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_fit(dtype: str, layout: str) -> None:
    fits(dtype, layout, {}, {})


@pytest.mark.parametrize(("name", "dtype"), [("bias", np.float32), ("mask", np.bool_)])
def test_a_bias_and_a_mask_have_an_element_for_each_key(name: str, dtype: Any) -> None:
    dtypes = dict.fromkeys(SHAPES, np.dtype(np.float32)) | {name: np.dtype(dtype)}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        make_problem("forward", SHAPES | {name: (5, 1)}, dtypes, Options())
    assert str(caught.value) == (
        f"{name} has shape (5, 1); it must be (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), "
        "which is (2, 6, 5, 7) here"
    )


def test_only_what_is_there_is_checked() -> None:
    check_fits(make(), SHAPES, dict.fromkeys(SHAPES, np.dtype(np.float32)), "bshd")


@pytest.mark.parametrize(
    ("name", "shape", "layout", "expected"),
    [
        ("out", (2, 5, 6, 8), "bshd", "(2, 5, 6, 4)"),
        ("out", (2, 5, 6, 4), "bhsd", "(2, 6, 5, 4)"),
        ("dout", (2, 5, 24), "bshd", "(2, 5, 6, 4)"),
        ("dout", (), "bhsd", "(2, 6, 5, 4)"),
        ("lse", (2, 5, 6), "bshd", "(batch, heads, seqlen_q), which is (2, 6, 5) here"),
        ("lse", (2, 6, 5, 1), "bhsd", "(batch, heads, seqlen_q), which is (2, 6, 5) here"),
    ],
)
def test_results_of_another_shape(name: str, shape: Shape, layout: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        fits("float32", layout, {name: shape}, {})
    assert str(caught.value) == f"{name} has shape {shape}; it must be {expected}"


@pytest.mark.parametrize(
    ("dtype", "name", "given", "expected"),
    [
        ("float16", "out", "float32", "float16"),
        ("bfloat16", "dout", "float16", "bfloat16"),
        ("float32", "out", "int32", "float32"),
        ("float16", "lse", "float16", "float32"),
        ("bfloat16", "lse", "float64", "float32"),
        ("float64", "lse", "float32", "float64"),
    ],
)
def test_results_of_another_dtype(dtype: str, name: str, given: str, expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        fits(dtype, "bshd", {}, {name: given})
    assert str(caught.value) == f"{name} has dtype {given}; it must be {expected}"


def test_what_is_refused_first_does_not_depend_on_chance() -> None:
    """Not on the order of a set of strings, which differs from process to process."""
    code = f"""
from cufa.arguments import check_fits
from cufa.problem import Features, Problem
try:
    check_fits({make()!r}, dict.fromkeys(("lse", "dout", "out"), (1,)), {{}}, "bshd")
except ValueError as error:
    print(error)
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert said == {"out has shape (1,); it must be (2, 5, 6, 4)\n"}


@pytest.mark.parametrize("seqlens", list(itertools.product([0, 1, 2, 5, 9], repeat=2)), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_visible_scores_by_brute_force(causal: bool, seqlens: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = seqlens
    visible = [
        (i, j)
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
        if not causal or seqlen_q - i <= seqlen_k - j
    ]
    problem = Problem("forward", "float32", 1, seqlen_q, seqlen_k, 1, 1, 8, 8, causal)
    assert problem.visible_scores == len(visible)


@pytest.mark.parametrize("seqlens", [(5, 9), (9, 5), (7, 7), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (0, 3), (3, 1), (None, 2), (4, None), (20, 20)], ids=str)
def test_scores_in_a_window_by_brute_force(
    window: tuple[int | None, int | None], seqlens: tuple[int, int]
) -> None:
    (seqlen_q, seqlen_k), (left, right) = seqlens, window
    ahead = [j - (i + seqlen_k - seqlen_q) for i, j in itertools.product(*map(range, seqlens))]
    visible = [x for x in ahead if (left is None or -x <= left) and (right is None or x <= right)]
    features = Features(window=window)
    problem = Problem("forward", "float32", 1, seqlen_q, seqlen_k, 1, 1, 8, 8, features=features)
    assert problem.visible_scores == len(visible)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_the_flops_of_a_batch_of_their_length(
    causal: bool, direction: Direction
) -> None:
    batch = Problem(direction, "float32", 3, 5, 7, 6, 3, 8, 4, causal)
    packed = replace(batch, seqlen_q=15, seqlen_k=21, features=Features(packed=True))
    assert packed.flops == batch.flops


@pytest.mark.parametrize("causal", [False, True])
def test_flops_by_brute_force(causal: bool) -> None:
    """Two for each multiply-add of the products, element by element, with what is masked left out."""
    batch, seqlen_q, seqlen_k, heads, head_dim, value_dim = 2, 5, 7, 6, 8, 3
    multiply_adds = {"forward": 0, "backward": 0}
    for _, _, i, j in np.ndindex(batch, heads, seqlen_q, seqlen_k):
        if causal and j > i + seqlen_k - seqlen_q:
            continue
        q_k = k_ds = q_ds = range(head_dim)  # S, dQ, dK
        p_v = dout_v = p_dout = range(value_dim)  # O, dP, dV
        multiply_adds["forward"] += len(q_k) + len(p_v)
        multiply_adds["backward"] += sum(map(len, (q_k, dout_v, p_dout, k_ds, q_ds)))
    for direction in ("forward", "backward"):
        problem = Problem(
            direction,
            "float32",
            *(batch, seqlen_q, seqlen_k, heads, 3, head_dim, value_dim),
            causal=causal,
        )
        assert problem.flops == 2 * multiply_adds[direction]


def test_flops_of_a_large_problem_do_not_overflow() -> None:
    problem = Problem("forward", "float16", 2**10, 2**20, 2**20, 2**7, 1, 128, 128)
    assert problem.flops == 2**10 * 2**7 * 2**40 * 4 * 128


def test_a_problem_in_words() -> None:
    problem = Problem("forward", "float16", 2, 300, 400, 8, 8, 64, 64)
    assert str(problem) == "forward float16, batch 2, seqlen 300 x 400, heads 8, head dim 64"
    problem = replace(problem, direction="backward", causal=True, kv_heads=2, value_dim=128)
    assert str(problem) == "backward float16 causal, batch 2, seqlen 300 x 400, heads 8/2, head dim 64/128"
    problem = replace(problem, causal=False, features=Features(window=(16, None), softcap=True, sink=True))
    assert str(problem) == (
        "backward float16, batch 2, seqlen 300 x 400, heads 8/2, head dim 64/128, "
        "with window (16, -1), softcap, sink"
    )


def test_limits_are_what_the_documentation_says() -> None:
    assert (MAX_HEAD_DIM, MAX_VALUE_DIM) == (576, 512)
    assert MAX_EXTENT == 2**31 - 1
    assert tuple(problem_module.DTYPES) == DTYPES
