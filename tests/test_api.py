"""The public functions on NumPy arrays, on the CPU: what they compute, what they take, what they refuse."""

import builtins
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rungs import best_kernel
from tolerance import (
    DTYPES,
    LAYOUTS,
    Problem,
    assert_attention,
    assert_close,
    assert_gradients,
    poisoned,
    random_problem,
    stored,
)

import cufa
from cufa import arrays, device, reference
from cufa.call import kernel_choice_of
from cufa.checking import Array, judge
from cufa.device import KNOWN, Arch
from cufa.kernels import KERNELS
from cufa.messages import shown

FUNCTIONS = [
    cufa.attention,
    cufa.attention_backward,
    cufa.merge,
    cufa.quantize,
    cufa.rotary,
    cufa.softmax,
    cufa.plan,
]
MOST_IMPORTS_OF_NUMPY = 2.5


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU, whatever this machine has."""
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    monkeypatch.setattr(device, "gpu_present", lambda: False)
    arrays.gpu_usable.cache_clear()
    yield
    arrays.gpu_usable.cache_clear()


def draw(rng: np.random.Generator, dtype: str = "float32", **options: Any) -> Problem:
    """Grouped heads, lengths and head dims that are all different and odd."""
    sizes: dict[str, Any] = {"batch": 2, "seqlen_q": 19, "seqlen_k": 23, "heads": 6, "kv_heads": 2}
    sizes |= {"head_dim": 20, "head_dim_v": 12}
    return random_problem(rng, dtype, **(sizes | options))


def in_bhsd(array: Array) -> Array:
    transposed: Array = array.transpose(0, 2, 1, 3)
    return transposed


def check(problem: Problem, *, causal: bool = True, **options: Any) -> tuple[Array, ...]:
    """Forward and backward by the rule; returns all results."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    before = [array.copy() for array in (q, k, v, dout)]
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True, **options)
    scale = options.get("softmax_scale")
    assert_attention(out, lse, problem, causal=causal, softmax_scale=scale)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=causal, **options)
    assert_gradients(gradients, problem, causal=causal, softmax_scale=scale)
    for array, copy in zip((q, k, v, dout), before, strict=True):
        np.testing.assert_array_equal(array, copy, strict=True)
    return out, lse, *gradients


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients(
    rng: np.random.Generator, dtype: str, causal: bool, storage: str
) -> None:
    problem = draw(rng, dtype, layout=storage)
    results = check(problem, causal=causal)
    wide = "float64" if dtype == "float64" else "float32"
    assert [str(result.dtype) for result in results] == [dtype, wide, dtype, dtype, dtype]
    for result in results:
        assert type(result) is np.ndarray
        assert result.flags.c_contiguous
        assert result.flags.writeable


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_bhsd(rng: np.random.Generator, dtype: str, contiguous: bool) -> None:
    problem = draw(rng, dtype)
    expected = check(problem)
    q, k, v, dout = map(in_bhsd, (problem.q, problem.k, problem.v, problem.dout))
    if contiguous:
        q, k, v, dout = map(np.ascontiguousarray, (q, k, v, dout))
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True, layout="bhsd")
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, layout="bhsd")
    assert out.shape == (2, 6, 19, 12)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    np.testing.assert_array_equal(lse, expected[1])
    for result, in_bshd in zip((out, *gradients), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_array_equal(in_bhsd(result), in_bshd)


@pytest.mark.parametrize("scale", [0.3, -0.7, 0, 2, np.float32(0.5)])
def test_softmax_scale(rng: np.random.Generator, scale: Any) -> None:
    check(draw(rng), softmax_scale=scale)


def test_the_lse_is_returned_if_asked_for(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = cufa.attention(q, k, v, return_lse=True)
    alone = cufa.attention(q, k, v)
    assert type(alone) is np.ndarray
    np.testing.assert_array_equal(alone, out)
    assert lse.shape == (2, 6, 19)


def test_calls_are_reproducible(rng: np.random.Generator) -> None:
    problem = draw(rng, "float16")
    for first, second in zip(check(problem), check(problem), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_backend_numpy_is_what_runs_without_a_gpu(rng: np.random.Generator, backend: str | None) -> None:
    check(draw(rng), backend=backend)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_of_zero(
    rng: np.random.Generator, dtype: str, causal: bool, lengths: tuple[int, int]
) -> None:
    problem = draw(rng, dtype, seqlen_q=lengths[0], seqlen_k=lengths[1])
    out, lse, *gradients = check(problem, causal=causal)
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    for gradient in gradients:
        assert np.all(gradient == 0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"heads": 0, "kv_heads": 0}], ids=str)
def test_no_batch_and_no_heads(rng: np.random.Generator, empty: dict[str, Any], backward: bool) -> None:
    problem = draw(rng, **empty)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = cufa.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == (problem.dout.shape, problem.lse_shape)
    if backward:
        dq, dk, dv = cufa.attention_backward(problem.dout, q, k, v, out, lse)
        assert [x.shape for x in (dq, dk, dv)] == [q.shape, k.shape, v.shape]
        assert np.all(dk == 0)
        assert np.all(dv == 0)


# --- inputs of any strides ------------------------------------------------------------------------


def broadcast(array: Array) -> Array:
    """One head for all, stride 0."""
    return np.broadcast_to(array[:, :, :1], array.shape)


def locked(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


class Tagged(np.ndarray[Any, Any]):
    """A subclass with a mind of its own."""

    def __array_wrap__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a result was computed in the subclass")


VIEWS: dict[str, Callable[[Array], Array]] = {
    "fortran order": np.asfortranarray,
    "every second element of the last axis": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "last axis reversed": lambda x: x[..., ::-1],
    "all axes reversed": lambda x: x[::-1, ::-1, ::-1, ::-1],
    "broadcast heads": broadcast,
    "read-only": locked,
    "unaligned": unaligned,
    "subclass": lambda x: x.copy().view(Tagged),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_as_their_copies_are(rng: np.random.Generator, dtype: str, view: str) -> None:
    problem = draw(rng, dtype)
    make = VIEWS[view]
    views = Problem(make(problem.q), make(problem.k), make(problem.v), make(problem.dout))
    copies = Problem(*(np.array(x) for x in (views.q, views.k, views.v, views.dout)))
    given = cufa.attention(views.q, views.k, views.v, causal=True, return_lse=True)
    expected = check(copies)
    gradients = cufa.attention_backward(
        views.dout, views.q, views.k, views.v, given[0], given[1], causal=True
    )
    for result, of_copies in zip((*given, *gradients), expected, strict=True):
        assert type(result) is np.ndarray
        np.testing.assert_array_equal(result, of_copies, strict=True)


def test_arrays_of_a_mapped_file(rng: np.random.Generator, tmp_path: Path) -> None:
    problem = draw(rng)
    mapped = []
    for name, array in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        np.save(tmp_path / f"{name}.npy", array)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    np.save(tmp_path / "out.npy", poisoned(problem.dout))
    out = np.load(tmp_path / "out.npy", mmap_mode="r+")
    assert cufa.attention(*mapped, out=out) is out
    assert_attention(np.load(tmp_path / "out.npy"), None, problem, causal=False)


def test_one_array_for_all_inputs(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 19, 3, 16)).astype(np.float32)
    check(Problem(x, x, x, x))


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", LAYOUTS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_and_returned(rng: np.random.Generator, dtype: str, layout: str, storage: str) -> None:
    problem = draw(rng, dtype)
    in_layout: Callable[[Array], Array] = in_bhsd if layout == "bhsd" else np.asarray
    out = in_layout(poisoned(problem.dout, storage))
    memory = out if out.base is None else out.base
    between = np.count_nonzero(np.isnan(memory)) - out.size
    q, k, v = map(in_layout, (problem.q, problem.k, problem.v))
    result, lse = cufa.attention(q, k, v, causal=True, layout=layout, out=out, return_lse=True)
    assert result is out
    assert_attention(in_layout(out), lse, problem, causal=True)
    assert np.count_nonzero(np.isnan(memory)) == between, "what lies between its elements was written"
    out[...] = np.nan
    assert cufa.attention(q, k, v, causal=True, layout=layout, out=out) is out
    assert_attention(in_layout(out), None, problem, causal=True)


@pytest.mark.parametrize("view", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=3)[..., ::2]])
def test_out_of_any_strides(rng: np.random.Generator, view: Callable[[Array], Array]) -> None:
    problem = draw(rng)
    out = view(poisoned(problem.dout))
    cufa.attention(problem.q, problem.k, problem.v, out=out)
    assert_attention(out, None, problem, causal=False)


@pytest.mark.parametrize("sizes", [{"seqlen_q": 0}, {"batch": 0}, {"heads": 0}], ids=str)
def test_out_without_elements(rng: np.random.Generator, sizes: dict[str, Any]) -> None:
    problem = draw(rng, **sizes)
    out = np.empty_like(problem.dout)
    assert cufa.attention(problem.q, problem.k, problem.v, out=out) is out


def test_out_between_the_inputs(rng: np.random.Generator) -> None:
    packed = rng.standard_normal((2, 19, 4, 3, 16)).astype(np.float32)
    q, k, v, out = (packed[:, :, i] for i in range(4))
    problem = Problem(*(x.copy() for x in (q, k, v, v)))
    assert cufa.attention(q, k, v, out=out) is out
    assert_attention(out, None, problem, causal=False)


def with_base(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), shape, strides)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            np.zeros((2, 19, 6, 20), "f4"),
            ValueError,
            "out has shape (2, 19, 6, 20); it must be (2, 19, 6, 12)",
        ),
        (
            np.zeros((2, 6, 19, 12), "f4"),
            ValueError,
            "out has shape (2, 6, 19, 12); it must be (2, 19, 6, 12)",
        ),
        (np.zeros((2, 19, 72), "f4"), ValueError, "out has shape (2, 19, 72); it must be (2, 19, 6, 12)"),
        (np.zeros((2, 19, 6, 12), "f8"), TypeError, "out has dtype float64; it must be float32"),
        (np.zeros((2, 19, 6, 12), ">f4"), TypeError, "out has dtype >f4; it must be float32"),
        (np.zeros((2, 19, 6, 12), "i4"), TypeError, "out has dtype int32; it must be float32"),
        (locked(np.zeros((2, 19, 6, 12), "f4")), ValueError, "out is read-only; it must be writeable"),
        (
            with_base((2, 19, 6, 12), (0, 288, 48, 4)),
            ValueError,
            "out has strides (0, 288, 48, 4) for shape (2, 19, 6, 12), so that elements share memory; "
            "each must have its own",
        ),
        (with_base((2, 19, 6, 12), (5472, 144, 48, 4)), ValueError, "out has strides (5472, 144, 48, 4)"),
        ([[0.0]], TypeError, "out is a list; it may be a NumPy array, a CuPy array or any array with DLPack"),
    ],
    ids=lambda value: None if isinstance(value, np.ndarray) else str(value)[:40],
)
def test_an_out_that_does_not_fit(
    rng: np.random.Generator, out: Any, error: type[Exception], message: str
) -> None:
    problem = draw(rng)
    with pytest.raises(error, match="^" + re.escape(message)):
        cufa.attention(problem.q, problem.k, problem.v, out=out)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input(rng: np.random.Generator, argument: str) -> None:
    inputs: dict[str, Any] = {name: rng.standard_normal((2, 9, 3, 8)) for name in ("q", "k", "v")}
    before = inputs[argument].copy()
    with pytest.raises(ValueError, match=f"^out overlaps {argument} in memory; it must not$"):
        cufa.attention(**inputs, out=inputs[argument])
    with pytest.raises(ValueError, match=f"^out overlaps {argument} in memory; it must not$"):
        cufa.attention(**inputs, out=inputs[argument][::-1])
    np.testing.assert_array_equal(inputs[argument], before)


# --- refusals -------------------------------------------------------------------------------------


def test_an_out_is_looked_at_wherever_it_is(rng: np.random.Generator) -> None:
    """Of arrays that lie alike, some overlap and some do not."""
    memory = rng.standard_normal((5, 1, 7, 2, 8)).astype(np.float32)
    q, k, v, out = memory[:4]
    for _ in range(2):
        cufa.attention(q, k, v, out=out, backend="numpy")
        cufa.attention(q, k, v, out=memory[4], backend="numpy")
        for name, overlapped in (("q", q), ("k", k), ("v", v)):
            with pytest.raises(ValueError, match=f"^out overlaps {name} in memory; it must not$"):
                cufa.attention(q, k, v, out=overlapped, backend="numpy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "fwd_1_naive"}, "kernel is 'fwd_1_naive', but this call computes on the CPU"),
        ({"tiles": {"block_m": 64}}, "tiles is {'block_m': 64}, but this call computes on the CPU"),
        ({"arch": "sm_90a"}, "arch is 'sm_90a', but this call computes on the CPU"),
    ],
)
@pytest.mark.parametrize("backend", [None, "numpy"])
def test_options_of_the_gpu_are_refused_on_the_cpu(
    rng: np.random.Generator, backend: str | None, options: dict[str, Any], message: str
) -> None:
    problem = draw(rng)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    out, lse = cufa.attention(q, k, v, return_lse=True)
    expected = f"^{re.escape(message)}; it needs a GPU$"
    with pytest.raises(ValueError, match=expected):
        cufa.attention(q, k, v, backend=backend, **options)
    with pytest.raises(ValueError, match=expected):
        cufa.attention_backward(dout, q, k, v, out, lse, backend=backend, **options)
    if "arch" in options:
        with pytest.raises(ValueError, match=expected):
            cufa.softmax(q, backend=backend, **options)


def calls(problem: Problem, **options: Any) -> Iterator[Callable[[], Any]]:
    """Each function that takes these options, called with this problem."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    lse = np.zeros(problem.lse_shape, np.float32)
    yield lambda: cufa.attention(q, k, v, **options)
    yield lambda: cufa.attention_backward(dout, q, k, v, dout, lse, **options)
    if not {"softmax_scale", "backend"} & options.keys():
        yield lambda: cufa.plan(q, k, v, arch="sm_80", **options)


class Learnable(float):
    """A number like PyTorch's tensor of no axes that records gradients."""

    requires_grad = True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"softmax_scale": Learnable(0.5)},
            TypeError,
            "softmax_scale requires a gradient, and cufa does not",
        ),
        ({"softcap": Learnable(20)}, TypeError, "softcap requires a gradient, and cufa does not"),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale is 'big'; it may be a number or None"),
        ({"softmax_scale": [1.0]}, TypeError, "softmax_scale is [1.0]; it may be a number or None"),
        ({"softmax_scale": np.array("big")}, TypeError, "softmax_scale is array('big'"),
        # A flag in another argument's place
        ({"softmax_scale": True}, TypeError, "softmax_scale is True; it may be a number or None"),
        ({"softcap": np.bool_(True)}, TypeError, "softcap is np.True_; it may be a number"),
        ({"dropout_p": True}, TypeError, "dropout_p is True; it may be a number"),
        ({"window": (True, 0)}, TypeError, "window is (True, 0); it may be None or a tuple or list (left"),
        ({"causal": 5}, TypeError, "causal is 5; it may be True or False"),
        ({"softmax_scale": -1e300}, ValueError, "softmax_scale is -1e+300; for float32 it must be 0 or from"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan; it must be finite"),
        ({"softmax_scale": -math.inf}, ValueError, "softmax_scale is -inf; it must be finite"),
        ({"softcap": np.ones(2)}, TypeError, "softcap is a numpy.ndarray of shape (2,); it may be a number"),
        ({"softcap": np.ones(2, [("x", "f4")])}, TypeError, "softcap is a numpy.ndarray of shape (2,); it"),
        (
            {"dropout_p": np.zeros(2)},
            TypeError,
            "dropout_p is a numpy.ndarray of shape (2,); it may be a number",
        ),
        ({"layout": "bsdh"}, ValueError, "layout is 'bsdh'; it may be 'bshd' or 'bhsd'"),
        ({"layout": None}, ValueError, "layout is None; it may be 'bshd' or 'bhsd'"),
        ({"layout": ["bshd"]}, ValueError, "layout is ['bshd']; it may be 'bshd' or 'bhsd'"),
        ({"precision": "fast"}, ValueError, "precision is 'fast'; it may be 'ieee' or 'tf32'"),
        ({"precision": None}, ValueError, "precision is None; it may be 'ieee' or 'tf32'"),
        (
            {"precision": np.ones(2)},
            ValueError,
            "precision is a numpy.ndarray of shape (2,); it may be 'ieee' or 'tf32'",
        ),
        (
            {"causal": np.zeros(3)},
            TypeError,
            "causal is a numpy.ndarray of shape (3,); it may be True or False",
        ),
        # Arrays inside others, and what is long
        (
            {"window": (np.ones((9, 9)), 0)},
            TypeError,
            "window is (a numpy.ndarray of shape (9, 9), 0); it may be None",
        ),
        ({"softmax_scale": [np.ones(9)]}, TypeError, "softmax_scale is [a numpy.ndarray of shape (9,)]; it"),
        ({"causal": {"of": np.ones(9)}}, TypeError, "causal is {'of': a numpy.ndarray of shape (9,)}; it"),
        ({"window": list(range(99))}, ValueError, "window is [0, 1, 2, 3, 4, 5, ...]; it may be None"),
        ({"layout": 999 * "x"}, ValueError, f"layout is '{47 * 'x'}...{48 * 'x'}'; it may be 'bshd'"),
        ({"window": (1.5, 0)}, TypeError, "window is (1.5, 0); it may be None or a tuple or list (left"),
        ({"window": np.ones(2)}, TypeError, "window is a numpy.ndarray of shape (2,); it may be None or a"),
        ({"window": np.ones((2, 1), int)}, TypeError, "window is a numpy.ndarray of shape (2, 1); it may"),
        ({"window": np.ones(3, int)}, ValueError, "window is a numpy.ndarray of shape (3,); it may be None"),
        ({"window": np.array(3)}, ValueError, "window is array(3); it may be None or a tuple or list (left"),
        ({"window": {0, 3}}, ValueError, "window is {0, 3}; it may be None or a tuple or list (left"),
        ({"window": {"left": 3, "right": 0}}, ValueError, "window is {'left': 3, 'right': 0}; it may be"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'; it may be 'numpy', 'cuda' or None"),
        (
            {"backend": np.ones(2)},
            ValueError,
            "backend is a numpy.ndarray of shape (2,); it may be 'numpy', 'cuda' or None",
        ),
    ],
    ids=str,
)
def test_options_with_impossible_values(
    rng: np.random.Generator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in calls(draw(rng), **options):
        with pytest.raises(error, match="^" + re.escape(message)):
            call()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_only_float32_is_rounded_to_tf32(rng: np.random.Generator, dtype: str) -> None:
    message = f"^precision is 'tf32', which is for float32, and the arrays are {dtype}$"
    for call in calls(draw(rng, dtype), precision="tf32"):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(("kernel", "arch", "named"), [(["fwd_4"], None, "kernel"), (None, [80], "arch")])
def test_rungs_that_have_no_hash_are_named(kernel: Any, arch: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{named} is "):
        kernel_choice_of("forward", kernel, None, arch)


@pytest.mark.parametrize("name", ["seed", "offset"])
def test_numbers_of_dropout_are_checked_without_it(rng: np.random.Generator, name: str) -> None:
    problem = draw(rng)
    for given in ("1", np.zeros(2)):
        with pytest.raises(TypeError, match=rf"^{name} is {re.escape(shown(given))}; it must be an integer$"):
            cufa.attention(problem.q, problem.k, problem.v, **{name: given})


@pytest.mark.parametrize("flag", ["return_lse", "return_attn_probs"])
def test_flags_are_true_or_false(rng: np.random.Generator, flag: str) -> None:
    problem = draw(rng)
    inputs = problem.q, problem.k, problem.v
    for given in (np.zeros(2), "no", None):
        with pytest.raises(
            TypeError, match=rf"^{flag} is {re.escape(shown(given))}; it may be True or False$"
        ):
            cufa.attention(*inputs, **{flag: given})
    cufa.attention(*inputs, **{flag: np.bool_(True)})


@pytest.mark.parametrize("flag", ["deterministic", "return_dbias", "return_dsink", "return_dscore_mod"])
def test_flags_of_the_backward_are_true_or_false(rng: np.random.Generator, flag: str) -> None:
    problem = draw(rng)
    lse = np.zeros(problem.lse_shape, np.float32)
    with pytest.raises(TypeError, match=rf"^{flag} is 'no'; it may be True or False$"):
        cufa.attention_backward(
            problem.dout, problem.q, problem.k, problem.v, problem.dout, lse, **{flag: "no"}
        )


@pytest.mark.parametrize(
    "window",
    [
        [3, 0],
        (np.int64(3), np.array(0)),
        np.array([3, 0]).tolist(),
        np.array([3, 0]),
        np.array([3, 0], np.uint8),
        range(3, -1, -3),
    ],
    ids=repr,
)
def test_a_window_is_a_pair_of_anything_that_counts(rng: np.random.Generator, window: Any) -> None:
    problem = draw(rng)
    inputs = problem.q, problem.k, problem.v
    expected = cufa.attention(*inputs, window=(3, 0))
    np.testing.assert_array_equal(cufa.attention(*inputs, window=window), expected)


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({"window": (4, 0)}, {"window": (4.0, 0.0)}),
        ({"window": (None, 1)}, {"window": (None, np.float32(1))}),
        ({"window": (-1, 0)}, {"window": (-1, 0.0)}),
        ({"causal": True}, {"causal": 1.0}),
        ({"causal": False}, {"causal": np.float64(0)}),
    ],
    ids=repr,
)
def test_floats_are_refused_after_calls_with_equal_integers(
    rng: np.random.Generator, allowed: dict[str, Any], refused: dict[str, Any]
) -> None:
    problem = draw(rng)
    ((name, value),) = refused.items()
    for call, wrong in zip(calls(problem, **allowed), calls(problem, **refused), strict=True):
        call()
        with pytest.raises(TypeError, match=f"^{name} is {re.escape(shown(value))}; it may be "):
            wrong()


def test_floats_of_some_calls_are_refused_after_equal_integers(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    lse = cufa.attention(q, k, v, return_lse=True)[1]
    cufa.attention_backward(dout, q, k, v, dout, lse, deterministic=True)
    with pytest.raises(TypeError, match=r"^deterministic is 1\.0; it may be True or False$"):
        cufa.attention_backward(dout, q, k, v, dout, lse, deterministic=1.0)  # type: ignore[arg-type]
    for call in (cufa.attention, lambda *x, **options: cufa.plan(*x, **options, arch="sm_80")):
        packed: dict[str, Any] = {"cu_seqlens_q": np.array([0, 19], np.int32)}
        packed["cu_seqlens_k"] = np.array([0, 23], np.int32)
        call(q[0], k[0], v[0], **packed, max_seqlen_q=19)
        with pytest.raises(TypeError, match=r"^max_seqlen_q is 19\.0; it may be None or an integer"):
            call(q[0], k[0], v[0], **packed, max_seqlen_q=19.0)
    gradients = cufa.attention_backward(
        *(dout[0], q[0], k[0], v[0], dout[0], lse[0]), **packed, max_seqlen_k=23, backend="numpy"
    )
    assert [x.shape for x in gradients] == [x[0].shape for x in (q, k, v)]
    with pytest.raises(TypeError, match=r"^max_seqlen_k is 23\.0; it may be None or an integer"):
        cufa.attention_backward(*(dout[0], q[0], k[0], v[0], dout[0], lse[0]), **packed, max_seqlen_k=23.0)


def test_the_longest_sequences_may_be_arrays_without_axes(rng: np.random.Generator) -> None:
    # As the maximum of CuPy's lengths is; such arrays have no hash, which the key of a cache needs.
    problem = draw(rng)
    q, k, v = problem.q[0], problem.k[0], problem.v[0]
    packed: dict[str, Any] = {"cu_seqlens_q": np.array([0, 19], np.int32)}
    packed["cu_seqlens_k"] = np.array([0, 23], np.int32)
    longest: Any = {"max_seqlen_q": np.array(19), "max_seqlen_k": np.array(23)}
    np.testing.assert_array_equal(
        cufa.attention(q, k, v, **packed, **longest), cufa.attention(q, k, v, **packed)
    )
    assert type(cufa.plan(q, k, v, **packed, **longest, arch="sm_80").problem.max_seqlen_q) is int


def test_the_longest_of_empty_sequences_has_no_tokens() -> None:
    q, ends = np.ones((0, 1, 4), np.float32), np.zeros(2, np.int32)
    longest = {"max_seqlen_q": 0, "max_seqlen_k": 0}
    assert cufa.attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, **longest).shape == q.shape


def test_a_rung_has_tiles_of_integers() -> None:
    for size in (2, np.int64(2)):
        assert kernel_choice_of("forward", None, {"key_parts": size}, None) == (
            None,
            (("key_parts", 2),),
            None,
            False,
        )
    for size in (2.0, "2", None):
        with pytest.raises(TypeError, match=f"^tiles has key_parts {size!r}; it must be an integer$"):
            kernel_choice_of("forward", None, {"key_parts": size}, None)


def test_flags_are_no_sizes() -> None:
    with pytest.raises(TypeError, match=r"^tiles has key_parts True; it must be an integer$"):
        kernel_choice_of("forward", None, {"key_parts": True}, None)


def test_backend_cuda_without_a_gpu(rng: np.random.Generator) -> None:
    softmax: Callable[[], Any] = lambda: cufa.softmax(np.ones(3), backend="cuda")  # noqa: E731
    for call in (*calls(draw(rng), backend="cuda"), softmax):
        with pytest.raises(cufa.GPUUnavailableError, match=r"^no GPU: .*driver is not installed"):
            call()


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("given", [None, [[1.0]], 1.0, "q.npy", np.float32(1)])
def test_what_is_no_array(rng: np.random.Generator, argument: str, given: Any) -> None:
    problem = draw(rng)
    inputs: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v} | {argument: given}
    results: dict[str, Any] = {"dout": problem.dout, "out": problem.dout, "lse": problem.q}
    kind = rf"^{argument} is (None|an? (numpy\.)?{type(given).__name__}); it may be a NumPy array"
    with pytest.raises(TypeError, match=kind):
        cufa.attention(**inputs)
    with pytest.raises(TypeError, match=kind):
        cufa.attention_backward(**results, **inputs)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("given", [None, [[1.0]], "q.npy"])
def test_a_plan_of_what_is_no_array(rng: np.random.Generator, argument: str, given: Any) -> None:
    problem = draw(rng)
    inputs: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v} | {argument: given}
    with pytest.raises(TypeError, match=f"^{argument} is (None|a {type(given).__name__}); it "):
        cufa.plan(**inputs, arch="sm_80")


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", ">f4", ">f8", "complex64", "O"])
def test_dtypes_that_are_not_supported(dtype: str) -> None:
    x = np.ones((1, 3, 2, 8)).astype(dtype)
    lse = np.zeros((1, 2, 3), np.float32)
    of_tensors = "it may be float16, bfloat16, float32, float64 or float8_e4m3fn"
    without_8_bits = "it may be float16, bfloat16, float32 or float64"
    order = "" if x.dtype.isnative else ", in the machine's byte order"
    for argument, one_of, call in (
        ("q", of_tensors, lambda: cufa.attention(x, x, x)),
        ("q", without_8_bits, lambda: cufa.attention_backward(x, x, x, x, x, lse)),
        ("q", of_tensors, lambda: cufa.plan(x, x, x, arch="sm_80")),
        ("x", without_8_bits, lambda: cufa.softmax(x)),
    ):
        with pytest.raises(TypeError, match=f"^{argument} has dtype {x.dtype}; {one_of}{order}$"):
            call()


def test_another_byte_order_is_named(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    ends = np.array([0, 19], ">i4")
    packed: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": np.array([0, 23], np.int32)}
    out, lse = cufa.attention(q, k, v, return_lse=True)
    others: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("cu_seqlens_q has dtype >i4; it must be int32", lambda: cufa.attention(q[0], k[0], v[0], **packed)),
        ("sink has dtype >f4; it must be float32", lambda: cufa.attention(q, k, v, sink=np.zeros(6, ">f4"))),
        ("out has dtype >f4; it must be float32", lambda: cufa.attention(q, k, v, out=out.astype(">f4"))),
        (
            "lse has dtype >f4; it must be float32",
            lambda: cufa.attention_backward(out, q, k, v, out, lse.astype(">f4")),
        ),
    )
    for message, call in others:
        with pytest.raises(TypeError, match=f"^{message}, in the machine's byte order$"):
            call()


def test_mixed_dtypes(rng: np.random.Generator) -> None:
    problem = draw(rng)
    with pytest.raises(TypeError, match=r"^v has dtype float16 and q float32; they must be the same$"):
        cufa.attention(problem.q, problem.k, problem.v.astype(np.float16))


def test_shapes_that_do_not_go_together(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    for call, message in (
        (lambda: cufa.attention(q[0], k, v), "q has shape (19, 6, 20); it must have the 4 axes"),
        (
            lambda: cufa.attention(q, k, v[:, 1:]),
            "v has shape (2, 22, 2, 12) and k (2, 23, 2, 20); the seqlen",
        ),
        (
            lambda: cufa.attention(q[:, :, :5], k, v),
            "q has 5 heads and k 2; the query heads must be a multiple",
        ),
        (
            lambda: cufa.plan(q, k[..., 1:], v, arch=80),
            "k has shape (2, 23, 2, 19) and q (2, 19, 6, 20); the head",
        ),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            call()


@pytest.mark.parametrize(
    ("argument", "change", "error", "message"),
    [
        ("dout", lambda x: x[:, 1:], ValueError, "dout has shape (2, 18, 6, 12); it must be (2, 19, 6, 12)"),
        ("dout", lambda x: x.astype("f8"), TypeError, "dout has dtype float64; it must be float32"),
        ("dout", lambda x: x.tolist(), TypeError, "dout is a list; it may be a NumPy array"),
        ("out", lambda x: in_bhsd(x), ValueError, "out has shape (2, 6, 19, 12); it must be (2, 19, 6, 12)"),
        ("out", lambda x: x.astype("f2"), TypeError, "out has dtype float16; it must be float32"),
        ("out", lambda _: None, TypeError, "out is None; it may be a NumPy array"),
        (
            "lse",
            lambda x: x.transpose(0, 2, 1),
            ValueError,
            "lse has shape (2, 19, 6); it must be (batch, heads, seqlen_q), which is (2, 6, 19) here",
        ),
        ("lse", lambda x: x.astype("f8"), TypeError, "lse has dtype float64; it must be float32"),
        ("lse", lambda _: None, TypeError, "lse is None; it may be a NumPy array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_of_the_forward_that_do_not_fit(
    rng: np.random.Generator,
    argument: str,
    change: Callable[[Any], Any],
    error: type[Exception],
    message: str,
) -> None:
    problem = draw(rng)
    given: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v}
    given["out"], given["lse"] = cufa.attention(**given, return_lse=True)
    given["dout"] = problem.dout
    given[argument] = change(given[argument])
    with pytest.raises(error, match="^" + re.escape(message)):
        cufa.attention_backward(**given)


def test_the_backward_takes_results_of_any_strides(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    views = stored(out, "packed"), np.asfortranarray(lse)
    gradients = cufa.attention_backward(stored(problem.dout, "bhsd"), q, k, v, *views, causal=True)
    assert_gradients(gradients, problem, causal=True)


# --- softmax --------------------------------------------------------------------------------------


def check_softmax(x: Array, **options: Any) -> Array:
    result: Array = cufa.softmax(x, **options)
    sums = np.float64 if x.dtype == np.float64 else np.float32
    exact = reference.softmax(x, judge(str(x.dtype)))
    standard = reference.softmax(x, sums).astype(x.dtype)
    # The roundings of a row's sum, which standard softmax may be lucky with.
    rounding = float(exact.max(initial=0)) * math.sqrt(x.shape[-1]) * float(np.finfo(sums).eps) / 2
    assert type(result) is np.ndarray
    assert result.dtype == x.dtype
    assert_close(result, exact, standard, 2, "softmax", rounding)
    return result


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(7,), (1,), (3, 1), (5, 700), (2, 3, 4, 33), (0,), (3, 0), (0, 4)], ids=str
)
def test_softmax(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, passes: int) -> None:
    check_softmax((5 * rng.standard_normal(shape)).astype(dtype), passes=passes)


@pytest.mark.parametrize("passes", [2, 3])
def test_softmax_of_views(rng: np.random.Generator, passes: int) -> None:
    x = rng.standard_normal((6, 5, 40)).astype(np.float32)
    views = (
        x.T,
        x[::2, ::-1, ::3],
        np.broadcast_to(x[:1, :, :1], x.shape),
        locked(x),
        unaligned(x),
        x.view(Tagged),
    )
    for view in views:
        check_softmax(view, passes=passes)


@pytest.mark.parametrize("passes", [2, 3])
def test_softmax_of_minus_infinity(passes: int) -> None:
    x = np.full((2, 600), -np.inf, np.float32)
    x[1, 555] = -3e38
    result = cufa.softmax(x, passes=passes)
    np.testing.assert_array_equal(result[0], np.zeros(600))
    np.testing.assert_array_equal(result[1], np.eye(600)[555])


@pytest.mark.parametrize("passes", [0, 1, 4, None, "2", np.ones(2)], ids=repr)
def test_softmax_reads_rows_two_or_three_times(passes: Any) -> None:
    with pytest.raises(ValueError, match=f"^passes is {re.escape(shown(passes))}; it may be 2 or 3$"):
        cufa.softmax(np.ones(3), passes=passes)


def test_softmax_takes_numpys_numbers_of_passes() -> None:
    x = np.array([1.0, 2.0])
    for passes in (2, 3):
        numpys: Any = np.int64(passes)
        np.testing.assert_array_equal(cufa.softmax(x, passes=numpys), cufa.softmax(x, passes=passes))


def test_softmax_counts_columns_in_32_bits() -> None:
    with pytest.raises(ValueError, match=r"^x has shape \(2147483648,\); no axis may exceed 2147450879$"):
        cufa.softmax(np.broadcast_to(np.float32(0), 2**31))


def test_softmax_needs_an_axis() -> None:
    with pytest.raises(ValueError, match=r"^x has shape \(\); it must have at least one axis$"):
        cufa.softmax(np.array(1.0))
    with pytest.raises(TypeError, match=r"^x is a list; it may be a NumPy array"):
        cufa.softmax([1.0])


# --- plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", KNOWN.values(), ids=lambda known: str(known.arch))
def test_a_plan_for_a_gpu_that_is_not_here(rng: np.random.Generator, known: device.Device) -> None:
    problem = draw(rng, "float16")
    q, k, v = problem.q, problem.k, problem.v
    for arch in (str(known.arch), known.arch):
        plan = cufa.plan(q, k, v, arch=arch, causal=True)
        assert plan.device == known
        assert plan.kernel == best_kernel(plan.problem, known).name
    assert str(plan).startswith(f"{plan.kernel} on {known.name} ({known.arch})\n")
    wanted = plan.problem
    assert (wanted.direction, wanted.dtype, wanted.causal) == ("forward", "float16", True)
    assert (wanted.batch, wanted.seqlen_q, wanted.seqlen_k, wanted.heads, wanted.kv_heads) == (
        2,
        19,
        23,
        6,
        2,
    )
    assert (wanted.head_dim, wanted.value_dim) == (20, 12)


def test_a_plan_takes_the_options_of_a_call(rng: np.random.Generator) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    default = cufa.plan(q, k, v, arch=80)
    assert cufa.plan(*map(in_bhsd, (q, k, v)), layout="bhsd", arch=80) == default
    assert cufa.plan(q, k, v, arch=80, dlse=None) == default
    assert cufa.plan(q, k, v, arch=80, softmax_scale=0.3, seed=5, offset=7) == default
    assert cufa.plan(q, k, v, arch=80, kernel="fwd_1_naive").kernel == "fwd_1_naive"
    assert cufa.plan(q, k, v, arch=80, kernel="fwd_1").reasons[0] == "fwd_1_naive: chosen by the caller"
    backward = cufa.plan(q, k, v, arch=80, backward=True)
    assert backward.problem.direction == KERNELS[backward.kernel].direction == "backward"
    assert cufa.plan(q, k, v, arch=80, tiles={"block_m": 64}).tiles["block_m"] == 64
    with pytest.raises(ValueError, match=r"^kernel is 'fwd_0'; it may be fwd_1_naive, [^b]*$"):
        cufa.plan(q, k, v, arch=80, kernel="fwd_0")
    with pytest.raises(ValueError, match=r"^kernel is 'bwd_0'; it may be bwd_1_naive, [^f]*bwd_2_flash_v2"):
        cufa.plan(q, k, v, arch=80, kernel="bwd_0", backward=True)
    with pytest.raises(ValueError, match=r"^kernel is 'bwd_1_naive': .* and this is a forward call$"):
        cufa.plan(q, k, v, arch=80, kernel="bwd_1_naive")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deterministic": True}, ValueError, "deterministic: only for gradients"),
        ({"gradients": ("bias",)}, ValueError, "gradients: only for gradients"),
        ({"dlse": np.zeros((2, 4, 9), np.float32)}, ValueError, "dlse: only for gradients"),
        (
            {"backward": True, "gradients": ("mask",)},
            ValueError,
            r"gradients is \('mask',\); it may be a tuple of 'bias', 'sink' or 'score_mod'",
        ),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3 and cu_seqlens_q is not given"),
        (
            {"backward": True, "max_seqlen_k": 3},
            ValueError,
            "max_seqlen_k is 3 and cu_seqlens_k is not given",
        ),
        (
            {"backward": True, "max_seqlen_k": -3},
            ValueError,
            "max_seqlen_k is -3; it may be None or an integer from 0 on",
        ),
        (
            {"return_lse": True},
            TypeError,
            r"plan\(\) has no return_lse; it has q, k, v, backward, causal, .*, arch, bias, .*, dlse; `grad",
        ),
        ({"backward": "yes"}, TypeError, "backward is 'yes'; it may be True or False"),
        ({"deterministic": np.zeros(2)}, TypeError, "deterministic is a numpy.ndarray of shape"),
        ({"backward": True, "gradients": None}, ValueError, "gradients is None; it may be a tuple of"),
        ({"gradients": [np.zeros(2)]}, ValueError, r"gradients is \[a numpy.ndarray of shape \(2,\)\]; it"),
        ({"gradients": np.zeros(2)}, ValueError, "gradients is a numpy.ndarray of shape"),
        ({"backward": True, "gradients": "bias"}, ValueError, "gradients is 'bias'; it may be a tuple of"),
        ({"backward": True, "gradients": ["bias"]}, ValueError, "the gradient of bias is requested, but"),
        ({"kernel": ["fwd_1_naive"]}, ValueError, r"kernel is \['fwd_1_naive'\]; it may be fwd_1_naive, "),
        ({"tiles": [64]}, TypeError, r"tiles is \[64\]; it may be a mapping, as in \{'block_m': 64\}"),
        ({"kernel": np.zeros(9)}, ValueError, r"kernel is a numpy.ndarray of shape \(9,\); it may be fwd_1"),
        ({"tiles": np.zeros(9)}, TypeError, r"tiles is a numpy.ndarray of shape \(9,\); it may be a mapping"),
    ],
)
def test_a_plan_refuses_options_that_no_call_has(
    rng: np.random.Generator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    problem = draw(rng)
    with pytest.raises(error, match=f"^{message}"):
        cufa.plan(problem.q, problem.k, problem.v, arch="sm_90a", **options)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "align_bytes"),
    [
        ("float16", 64, 64, 16),
        ("float16", 36, 64, 8),
        ("float16", 64, 2, 4),
        ("bfloat16", 33, 64, 2),
        ("float32", 33, 33, 4),
        ("float32", 34, 64, 8),
        ("float64", 5, 64, 8),
        ("float64", 256, 6, 16),
    ],
)
def test_a_plan_takes_rows_to_be_aligned_as_well_as_they_can_be(
    dtype: str, head_dim: int, value_dim: int, align_bytes: int
) -> None:
    q, v = (np.zeros((1, 4, 2, dim), dtype) for dim in (head_dim, value_dim))
    plan = cufa.plan(q, q, v, arch="sm_90a")
    assert plan.problem.align_bytes == align_bytes
    assert dict(plan.macros)["ALIGN_BYTES"] == align_bytes
    assert f"{align_bytes}-byte loads" in str(plan)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be positive, or 0 for none"),
        ({"softcap": None}, TypeError, "softcap is None; it may be a number"),
        ({"dropout_p": 10}, ValueError, "dropout_p is 10.0; it must be at least 0 and below 1"),
        ({"dropout_p": None}, TypeError, "dropout_p is None; it may be a number"),
    ],
)
def test_numbers_are_checked_in_plans_and_calls(
    rng: np.random.Generator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    problem = draw(rng)
    arrays = problem.q, problem.k, problem.v
    for call in (lambda: cufa.attention(*arrays, **options), lambda: cufa.plan(*arrays, arch=80, **options)):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"softmax_scale": 1e39},
            "softmax_scale is 1e+39; for float32 it must be 0 or from 1.2e-38 to 1.7e+38",
        ),
        ({"softmax_scale": -1e39}, "softmax_scale is -1e+39; for float32"),
        ({"softmax_scale": 1e-50}, "softmax_scale is 1e-50; for float32"),
        ({"softcap": 1e39}, "softcap is 1e+39; for float32"),
        ({"softcap": 1e-50}, "softcap is 1e-50; for float32"),
        ({"softmax_scale": 1e30, "softcap": 1e-30}, "softmax_scale / softcap is 1e+60; for float32"),
    ],
    ids=str,
)
def test_numbers_that_sums_do_not_have_are_refused(
    rng: np.random.Generator, options: dict[str, Any], message: str
) -> None:
    problem = draw(rng)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    out, lse = cufa.attention(q, k, v, return_lse=True, softmax_scale=0)
    for call in (
        lambda: cufa.attention(q, k, v, **options),
        lambda: cufa.attention_backward(dout, q, k, v, out, lse, **options),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()
    wide = (x.astype(np.float64) for x in (q, k, v))
    assert np.isfinite(cufa.attention(*wide, **options)).all()


def test_softcaps_that_scores_in_16_bits_have_no_gradients_of_are_refused(rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 5, 2, 16)).astype(np.float16)
    message = "softcap is 0.0009; for float16 it must be 0 or from 0.001 to"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        cufa.attention(q, q, q, softcap=9e-4)
    assert np.isfinite(cufa.attention(q, q, q, softcap=1e-3)).all()


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype(np.float32)], ids=str)
def test_a_plan_reads_no_more_than_shape_and_dtype(dtype: Any) -> None:
    described = SimpleNamespace(shape=[2, 5, 3, 16], dtype=dtype)
    plan = cufa.plan(described, described, described, arch="sm_80")
    assert (plan.problem.seqlen_q, plan.problem.dtype) == (5, "float32")


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((2, None, 3, 16), "float32", TypeError, r"\(2, None, 3, 16\) and dtype float32: 'NoneType'"),
        ((2, 5.0, 3, 16), "float32", TypeError, r"\(2, 5.0, 3, 16\) and dtype float32: 'float'"),
        ((2, 5, 3, 16), "floats", TypeError, r"\(2, 5, 3, 16\) and dtype floats: data type 'floats'"),
        ((2, -5, 3, 16), "float32", ValueError, r"\(2, -5, 3, 16\); no axis may be negative"),
    ],
)
def test_a_plan_of_what_has_no_such_shape_or_dtype(
    shape: tuple[Any, ...], dtype: str, error: type[Exception], message: str
) -> None:
    described = SimpleNamespace(shape=shape, dtype=dtype)
    with pytest.raises(error, match=f"^q has shape {message}"):
        cufa.plan(described, described, described, arch="sm_80")


@pytest.mark.parametrize(
    ("strides", "error"),
    [
        ((4, 2), ValueError),
        ((), ValueError),
        ((480, 96, 32, 2, 1), ValueError),
        ((480, 96, 32, 2.0), TypeError),
    ],
    ids=str,
)
def test_a_plan_of_what_has_no_such_strides(strides: Any, error: type[Exception]) -> None:
    q = SimpleNamespace(shape=(2, 5, 3, 16), dtype="float16")
    k = SimpleNamespace(shape=(2, 5, 3, 16), dtype="float16", strides=strides)
    message = f"k has strides {strides}; with shape (2, 5, 3, 16) it must have 4 integers"
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        cufa.plan(q, k, q, arch="sm_80")
    k.strides = min
    with pytest.raises(TypeError, match=r"^k has strides <built-in function min>; with shape"):
        cufa.plan(q, k, q, arch="sm_80")
    k.strides = None
    assert cufa.plan(q, k, q, arch="sm_80") == cufa.plan(q, q, q, arch="sm_80")


def test_a_plan_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in DTYPES:
        q = torch.zeros((1, 4, 2, 8), dtype=getattr(torch, dtype))
        assert cufa.plan(q, q, q, arch="sm_80").problem.dtype == dtype


def test_the_arch_of_a_plan_may_be_in_the_environment(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = draw(rng)
    q, k, v = problem.q, problem.k, problem.v
    for empty in (None, ""):
        if empty is not None:
            monkeypatch.setenv("CUFA_ARCH", empty)
        with pytest.raises(
            cufa.GPUUnavailableError, match=r"^no GPU: .*\(arch='sm_90a', .*\) or set CUFA_ARCH$"
        ):
            cufa.plan(q, k, v)
    monkeypatch.setenv("CUFA_ARCH", "sm_86")
    assert cufa.plan(q, k, v).device.arch == Arch(8, 6)
    assert cufa.plan(q, k, v, arch="sm_120a").device.arch == Arch(12, 0, "a")
    monkeypatch.setenv("CUFA_ARCH", "hopper")
    with pytest.raises(ValueError, match=r"^CUFA_ARCH is 'hopper'; give it as 'sm_90a', 'compute_80'"):
        cufa.plan(q, k, v)
    with pytest.raises(ValueError, match=r"^arch is 'sm_62', whose limits are not known"):
        cufa.plan(q, k, v, arch="sm_62")
    check(problem)  # the variable does not keep a call from the CPU


def test_a_plan_may_be_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setattr(device, "current", lambda: replace(KNOWN[9, 0], name="the one here"))
    q = np.zeros((2, 1000, 8, 64), np.float32)
    assert cufa.plan(q, q, q).device.name == "the one here"
    assert cufa.plan(q, q, q, arch="compute_80").device.name == "the one here"
    assert cufa.plan(q, q, q, arch="sm_86").device == KNOWN[8, 6]


# --- the package ----------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """What a fresh interpreter that sees no GPU prints."""
    root = Path(cufa.__file__).parents[1]
    path = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    # With bytecode kept, as users have it: numpy's is there from its installation in any case.
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_importing_is_quick_and_imports_nothing_heavy() -> None:
    code = """
import sys, time
start = time.process_time()
import numpy
between = time.process_time()
import cufa
print((time.process_time() - between) / (between - start))
print(sorted({name.partition('.')[0] for name in sys.modules} & {'cupy', 'cuda', 'rich', 'click'}))
"""
    ratios = []
    for _ in range(5):
        ratio, heavy = run_python(code).splitlines()
        assert heavy == "[]"
        ratios.append(float(ratio))
        if ratios[-1] < MOST_IMPORTS_OF_NUMPY:
            return
    pytest.fail(
        f"importing cufa took {min(ratios):.1f} times as long as importing NumPy at best; it may take "
        f"{MOST_IMPORTS_OF_NUMPY} times"
    )


def test_every_file_is_installed() -> None:
    root = Path(cufa.__file__).parents[1]
    setup = (root / "pyproject.toml").read_text()
    # Every folder is a package.
    assert '\ninclude = ["cufa", "cufa.*"]\nexclude = ["*.__pycache__"]\n' in setup
    data = re.search(r'^"\*" = \[(.*)\]$', setup, re.MULTILINE)
    assert data is not None
    patterns = ["*.py", *re.findall(r'"([^"]+)"', data[1])]
    files = [path for path in (root / "cufa").rglob("*") if path.is_file()]
    own = [path for path in files if "__pycache__" not in path.parts]
    assert len(own) > 200
    assert [path for path in own if not any(map(path.match, patterns))] == []


def test_the_cpu_path_does_not_import_cupy() -> None:
    code = """
import sys
import numpy as np, cufa
q = np.ones((1, 5, 2, 8), np.float32)
for backend in (None, "numpy"):
    out, lse = cufa.attention(q, q, q, causal=True, return_lse=True, backend=backend)
    cufa.attention(q, q, q, out=out, backend=backend)
    cufa.attention_backward(q, q, q, q, out, lse, causal=True, backend=backend)
    cufa.softmax(q, backend=backend)
print(cufa.plan(q, q, q, arch="sm_90a").device.arch)
print(sorted({name.partition('.')[0] for name in sys.modules} & {'cupy', 'cuda', 'rich', 'click'}))
"""
    assert run_python(code).split() == ["sm_90a", "[]"]


def test_public_names_are_there_and_documented() -> None:
    assert sorted(cufa.__all__) == list(cufa.__all__)
    for name in cufa.__all__:
        assert inspect.getdoc(getattr(cufa, name)), name
    functions = [value for value in vars(cufa).values() if inspect.isfunction(value)]
    assert {function.__name__ for function in functions} <= set(cufa.__all__)
    assert {function.__name__ for function in FUNCTIONS} == {function.__name__ for function in functions}
    assert re.fullmatch(r"\d+\.\d+\.\d+", cufa.__version__)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_docstrings_say_what_goes_in_and_out_and_what_is_raised(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    sections = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    assert sections[1::2] == ["Args", "Returns", "Raises"]
    described = re.findall(r"^    (\w+): \S", sections[2], flags=re.MULTILINE)
    assert described == list(inspect.signature(function).parameters)
    assert all(body.strip() for body in sections[2::2])


def test_options_are_the_same_everywhere() -> None:
    """A call's options can be handed on to its backward and to its plan."""
    forward, backward, plan = (
        dict(inspect.signature(function).parameters)
        for function in (cufa.attention, cufa.attention_backward, cufa.plan)
    )
    gradients = {"dq", "dk", "dv", "dbias", "dsink", "dscore_mod", "dlse", "deterministic"}
    gradients |= {f"return_d{name}" for name in ("bias", "sink", "score_mod")}
    for name, parameter in backward.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in gradients:
            assert parameter == forward[name]
    for name, parameter in plan.items():
        assert name in {"backward", "deterministic", "gradients", "side"} or parameter == forward[name]
    for parameters in (forward, backward, plan):
        required = [p for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert len(required) == (6 if parameters is backward else 3)
        assert all(p.default is inspect.Parameter.empty for p in required)


def test_every_error_that_a_docstring_names_can_be_caught_by_that_name() -> None:
    for function in FUNCTIONS:
        raises = (inspect.getdoc(function) or "").partition("Raises:")[2]
        for name in re.findall(r"\w+Error\b", raises):
            found = getattr(cufa, name, None) or getattr(builtins, name, None)
            assert isinstance(found, type), name
            assert issubclass(found, Exception)
