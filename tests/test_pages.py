"""Keys and values in pages, which a block table lists: results on the CPU, plans, and what is refused."""

from typing import Any

import numpy as np
import pytest
from feature_cases import FORWARD_FEATURES, Case, draw_case, feature_id, hide_nan, in_pages, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import DTYPES, Array, assert_attention, random_problem

import cufa
from cufa.device import Device
from cufa.params import pack_sizes
from cufa.plan import make_plan
from cufa.problem import MAX_EXTENT, Features, Problem

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "head_dim_v": 12}
INT32 = np.int32


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


def attend(case: Case, **options: Any) -> tuple[Array, Array]:
    problem = case.problem
    out, lse = cufa.attention(
        *(problem.q, problem.k, problem.v), **case.forward, return_lse=True, backend="numpy", **options
    )
    return out, lse


@pytest.mark.parametrize("features", pairwise(FORWARD_FEATURES), ids=feature_id)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_features(rng: np.random.Generator, features: frozenset[str], page_size: int) -> None:
    case = draw_case(rng, "float32", features - {"block_table"}, seqlen_q=19, seqlen_k=23, **SIZES)
    case = in_pages(rng, case, page_size)
    hide_nan(case)
    with np.errstate(invalid="ignore"):
        assert_attention(*attend(case), case.problem, **case.forward)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 40), dtype=st.sampled_from(DTYPES), packed=st.booleans())
def test_where_keys_lie_changes_no_bit(data: st.DataObject, page_size: int, dtype: str, packed: bool) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    features = {"causal", "seqused_k"} | ({"packed"} if packed else set())
    lengths = {name: data.draw(st.integers(0, 70)) for name in ("seqlen_q", "seqlen_k")}
    case = draw_case(rng, dtype, features, **lengths, **SIZES)
    moved = in_pages(rng, case, page_size)
    tokens = slice(*case.arrays["cu_seqlens_q"][[0, -1]]) if packed else slice(None)
    (out, lse), (moved_out, moved_lse) = attend(case), attend(moved)
    np.testing.assert_array_equal(moved_out[tokens], out[tokens])
    np.testing.assert_array_equal(moved_lse[..., tokens], lse[..., tokens])


def test_all_keys_of_all_pages_count_if_nothing_else_is_said(rng: np.random.Generator) -> None:
    problem = random_problem(rng, "float32", batch=2, seqlen_q=3, seqlen_k=12, heads=2)
    table = np.array([[3, 0, 5], [1, 4, 2]], INT32)
    pages = {name: np.empty((6, 4, 2, 64), np.float32) for name in "kv"}
    for name, x in pages.items():
        x[table] = getattr(problem, name).reshape(2, 3, 4, 2, 64)
    expected = cufa.attention(problem.q, problem.k, problem.v, causal=True, backend="numpy")
    out = cufa.attention(problem.q, **pages, block_table=table, causal=True, backend="numpy")
    np.testing.assert_array_equal(out, expected)


def test_sequences_may_share_pages(rng: np.random.Generator) -> None:
    """As those do that begin with the same prompt."""
    problem = random_problem(rng, "float32", batch=2, seqlen_q=5, seqlen_k=8, heads=2)
    table = np.array([[0, 1], [0, 1]], INT32)
    options = {"block_table": table, "seqused_k": np.array([13, 16], INT32), "backend": "numpy"}
    out = cufa.attention(problem.q, problem.k, problem.v, **options)
    for b, keys in enumerate(options["seqused_k"]):
        k, v = (x.reshape(1, 16, 2, 64)[:, :keys] for x in (problem.k, problem.v))
        np.testing.assert_array_equal(out[b], cufa.attention(problem.q[b : b + 1], k, v, backend="numpy")[0])


def test_layouts_and_probabilities(rng: np.random.Generator) -> None:
    case = in_pages(rng, draw_case(rng, "float32", ("causal",), seqlen_q=9, seqlen_k=20, **SIZES), 6)
    problem, options = case.problem, case.forward
    tensors = problem.q, problem.k, problem.v
    out, _, probs = cufa.attention(*tensors, **options, return_attn_probs=True, backend="numpy")
    turned = cufa.attention(
        *(x.transpose(0, 2, 1, 3) for x in tensors), **options, layout="bhsd", backend="numpy"
    )
    np.testing.assert_array_equal(turned.transpose(0, 2, 1, 3), out)
    assert probs.shape == (2, 4, 9, 5 * 6)
    np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-5)
    assert not probs[..., 20:].any()


# --- plans ----------------------------------------------------------------------------------------


def test_no_heads() -> None:
    q, k = np.zeros((1, 3, 0, 8)), np.zeros((4, 2, 0, 8))
    table = np.array([[2, 0]], np.int32)
    _, _, probabilities = cufa.attention(q, k, k, block_table=table, return_attn_probs=True, backend="numpy")
    assert probabilities.shape == (1, 0, 3, 4)


@pytest.mark.parametrize(
    ("arch", "seqlen_q", "page_size", "kernel"),
    [
        ("sm_90a", 1, 16, "fwd_8_split_kv"),
        ("sm_90a", 2048, 16, "fwd_6_wgmma"),
        ("sm_90a", 2048, 8, "fwd_6_wgmma"),
        ("sm_90a", 2048, 20, "fwd_5_mma"),
        ("sm_80", 2048, 16, "fwd_5_mma"),
        ("sm_75", 2048, 16, "fwd_4_flash_v2"),
    ],
)
def test_the_kernel_that_is_chosen(arch: str, seqlen_q: int, page_size: int, kernel: str) -> None:
    problem = Problem(
        *("forward", "bfloat16", 4, seqlen_q, 4096, 32, 8, 128, 128), features=Features(page_size=page_size)
    )
    assert make_plan(problem, Device.of(arch)).kernel == kernel


def test_plans_say_why_pages_are_not_for_a_kernel() -> None:
    problem = Problem(
        *("forward", "bfloat16", 4, 2048, 4096, 32, 8, 128, 128), features=Features(page_size=20)
    )
    plan = make_plan(problem, Device.of("sm_90a"))
    assert "fwd_6_wgmma needs pages of a multiple of 8 keys, not of 20" in plan.reasons
    with pytest.raises(ValueError, match="fwd_3_flash_v1 does not support block_table"):
        make_plan(problem, Device.of("sm_90a"), "fwd_3_flash_v1")


# --- what is refused ------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def refuse(error: type[Exception], message: str, **arguments: Any) -> None:
    given = {"q": zeros(2, 5, 4, 8), "k": zeros(6, 4, 2, 8), "v": zeros(6, 4, 2, 8)}
    given |= {"block_table": zeros(2, 3, dtype=INT32), "backend": "numpy", **arguments}
    with pytest.raises(error) as raised:
        cufa.attention(**given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"k": zeros(6, 4, 16)},
            "k has shape (6, 4, 16); it must have the 4 axes (pages, page_size, kv_heads",
        ),
        ({"v": zeros(5, 4, 2, 8)}, "the number of pages must be the same"),
        ({"v": zeros(6, 3, 2, 8)}, "the page size must be the same"),
        ({"v": zeros(6, 4, 1, 8)}, "the number of heads must be the same"),
        ({"k": zeros(6, 0, 2, 8), "v": zeros(6, 0, 2, 8)}, "a page must have at least one key"),
        (
            {"block_table": zeros(3, 3, dtype=INT32)},
            "block_table has shape (3, 3); it must be (batch, pages of a sequence), which is (2, 3)",
        ),
        ({"block_table": zeros(6, dtype=INT32)}, "block_table has shape (6,); it must be (batch, pages"),
        ({"cu_seqlens_k": zeros(3, dtype=INT32)}, "block_table and cu_seqlens_k are both given"),
        ({"bias": zeros(5, 8)}, "bias has shape (5, 8); it must be (batch or 1"),
        (
            {"block_table": np.array([[0, 1, 2], [3, 6, 4]], INT32)},
            "block_table has page 6 for sequence 1, and k has 6 pages",
        ),
        (
            {"block_table": np.array([[0, -1, 2], [3, 6, 4]], INT32), "seqused_k": np.array([5, 1], INT32)},
            "block_table has page -1 for sequence 0, and k has 6 pages",
        ),
        (
            {"block_table": np.broadcast_to(np.zeros((), INT32), (2, 2**30))},
            "block_table has shape (2, 1073741824), of pages of 4 keys: room for 4,294,967,296 keys of a",
        ),
    ],
)
def test_what_does_not_go_together(arguments: dict[str, Any], message: str) -> None:
    refuse(ValueError, message, **arguments)


def test_tables_have_room_for_more_keys_than_32_bits_count() -> None:
    """Of all sequences together: tables are as long as the longest context."""
    sequences, heads = 2048, {"dtype": np.float16}
    q, k = np.empty((sequences, 8, 128), **heads), np.empty((64, 16, 1, 128), **heads)
    given = {
        "block_table": np.broadcast_to(np.zeros((), INT32), (sequences, 2**20 // 16)),
        "seqused_k": np.ones(sequences, INT32),
        "cu_seqlens_q": np.arange(sequences + 1, dtype=INT32),
    }
    problem = cufa.plan(q, k, k, arch="sm_90a", **given).problem
    assert (problem.seqlen_k, problem.most_keys) == (2**31, 2**20)
    pack_sizes(problem)


def test_a_sequence_has_no_room_for_more_keys_than_32_bits_count() -> None:
    q, k = zeros(1, 1, 1, 16, dtype=np.float16), zeros(1, 2048, 1, 16, dtype=np.float16)
    table = np.broadcast_to(np.zeros((), INT32), (1, 2**20))
    with pytest.raises(ValueError, match="room for 2,147,483,648 keys of a sequence; at most"):
        cufa.plan(q, k, k, block_table=table, arch="sm_80")


@pytest.mark.parametrize(
    ("longest", "error", "message"),
    [
        (-1, ValueError, "max_seqlen_q is -1; it may be None or an integer from 0 on"),
        (True, TypeError, "max_seqlen_q is True; it may be None or an integer"),
        (2.0, TypeError, "max_seqlen_q is 2.0; it may be None or an integer"),
        ([2], TypeError, "max_seqlen_q is [2]; it may be None or an integer"),
        (3, ValueError, "max_seqlen_q is 3 and cu_seqlens_q is not given"),
    ],
)
def test_how_many_queries_a_sequence_has_at_most(
    longest: object, error: type[Exception], message: str
) -> None:
    refuse(error, message, max_seqlen_q=longest)


def test_a_table_of_another_dtype() -> None:
    refuse(
        TypeError,
        "block_table has dtype int64; it must be int32",
        block_table=zeros(2, 3, dtype=np.int64),
    )


def test_a_table_whose_rows_are_too_far_apart() -> None:
    """Kernels have 32 bits for the distance."""
    q, k = np.zeros((2, 1, 1, 16), np.float16), np.zeros((3, 8, 1, 16), np.float16)

    def table(apart: int) -> Any:
        return np.lib.stride_tricks.as_strided(np.zeros((2, 1), INT32), strides=(4 * apart, 4))

    cufa.plan(q, k, k, block_table=table(-MAX_EXTENT), arch="sm_80")
    cufa.plan(q[:1], k, k, block_table=table(MAX_EXTENT + 1)[:1], arch="sm_80")
    message = "^block_table has rows 2,147,483,648 numbers apart; there may be 2,147,483,647$"
    for function, options in ((cufa.plan, {"arch": "sm_80"}), (cufa.attention, {})):
        with pytest.raises(ValueError, match=message):
            function(q, k, k, block_table=table(MAX_EXTENT + 1), **options)


def test_there_are_no_gradients() -> None:
    pages = zeros(6, 4, 2, 8)
    table = zeros(2, 3, dtype=INT32)
    with pytest.raises(ValueError, match="block_table is given; keys in pages have no gradients"):
        cufa.plan(zeros(2, 5, 4, 8), pages, pages, block_table=table, backward=True, arch="sm_90a")
