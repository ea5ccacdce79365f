"""The backward of float32 in halves on the emulator: lengths, features, and tiles that halves do not hold."""

import numpy as np
import pytest
from emulator import EmulatorError
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles
from test_emulator import planted
from test_emulator_hopper_features import gradients_of
from tolerance import assert_gradients

from cufa.score_mod import MaskMod

pytestmark = pytest.mark.emulator

KERNEL = "bwd_6_float32"
FEATURES = [
    (),
    ("causal",),
    ("causal", "window", "sink", "packed", "seqused_k", "dlse", "dsink"),
    ("causal", "softcap", "alibi_slopes", "dropout"),
    ("causal", "bias", "score_mod"),
    ("causal", "mask", "packed", "dropout", "dlse"),
    ("window", "mask_bits", "seqused_k", "dsink"),
    ("deterministic",),
    ("causal", "window", "packed", "seqused_k", "deterministic"),
]


def check(case, precision="ieee", **options):
    """Hold the gradients to the rule."""
    with np.errstate(invalid="ignore", over="ignore"):
        gradients = gradients_of(KERNEL, case, precision=precision, **options)
        assert_gradients(gradients, case.problem, precision=precision, **case.backward)
    return gradients


@pytest.mark.parametrize("features", FEATURES)
def test_lengths_and_features(rng, features):
    for lengths in [(70, 200), (1, 64), (65, 7), (130, 1), (0, 5), (5, 0)]:
        case = draw_case(rng, "float32", features, seqlen_q=lengths[0], seqlen_k=lengths[1], **SIZES)
        hide_nan(case)
        check(case)


@pytest.mark.parametrize("by", ["mask", "mask_mod"])
def test_tiles_of_which_nothing_is_seen(rng, by):
    """What is in their queries and keys shows nowhere; of some tiles of keys there is nothing to do."""
    case = draw_case(rng, "float32", (), seqlen_q=450, seqlen_k=140, **{**SIZES, "heads": 4, "kv_heads": 2})
    mask, _ = mask_by_tiles(rng, (2, 4, 450, 140), (64, 64))
    mask[0, :, :, 64:128], mask[1, 2, 320:] = False, False
    if by == "mask":
        case.arrays["mask"] = mask
    else:
        case.numbers["mask_mod"] = MaskMod(
            lambda b, h, q_idx, kv_idx, shown: shown[b, h, q_idx, kv_idx], mask
        )
    hide_nan(case)
    check(case)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_head_dims(rng, precision):
    """One whose rows are read an element at a time, and values of several panels."""
    sizes = {"seqlen_q": 140, "seqlen_k": 150, "heads": 2, "kv_heads": 1, "head_dim": 33, "head_dim_v": 127}
    case = draw_case(rng, "float32", ("causal",), **sizes)
    check(case, precision=precision, checked=False)


@pytest.mark.parametrize("exponent", [30, 60])
def test_tiles_in_units_of_their_own(rng, exponent):
    """Of queries so large that halves hold them, and larger."""
    sizes = {**SIZES, "batch": 1, "heads": 4, "kv_heads": 2, "seqlen_q": 150, "seqlen_k": 150}
    case = draw_case(rng, "float32", ("causal",), **sizes)
    problem = case.problem
    exponents = (exponent, -exponent - 2, 20, -50)
    for x, unit in zip((problem.q, problem.k, problem.v, problem.dout), exponents, strict=True):
        x[:] = np.ldexp(x, unit + rng.integers(0, 3, (1, x.shape[1], 1, 1)))
    problem.dout[:, 64:128] = 0
    check(case)


@pytest.mark.parametrize(
    ("features", "name", "value"),
    [
        *((("causal", "softcap", "dropout"), "q", 1e6), (("mask", "alibi_slopes"), "k", -1e6)),
        *((("mask", "dropout", "bias"), "v", 1e30), (("causal", "score_mod"), "dout", 1e30)),
    ],
)
def test_features_of_what_halves_do_not_hold(rng, features, name, value):
    case = draw_case(rng, "float32", features, batch=1, seqlen_q=100, seqlen_k=100, **SIZES)
    getattr(case.problem, name)[:, 60, :, 3] = value
    hide_nan(case)
    check(case)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("q", 1e6), ("k", 1e6), ("v", -1e30), ("dout", 1e30), ("v", np.inf)),
        *((name, np.nan) for name in ("q", "k", "v", "dout")),
    ],
)
def test_what_a_mask_hides_with_others(rng, name, value):
    """Rows that some see and some do not, with what would leave those beside it no bits, or be NaN."""
    case = draw_case(rng, "float32", ("causal",), batch=1, seqlen_q=100, seqlen_k=100, **SIZES)
    row = getattr(case.problem, name)[:, 60]
    row[:, 0, 3] = row[:, -1, 14] = value
    dq, *_ = check(case)
    assert np.isfinite(dq[:, :60]).all()


# The order of blocks, planted.
LAST_FIRST = (
    "kLeastHeads>(call, block)",
    "kLeastHeads>(call, Workspace(call).key_tiles * call.sizes.kv_heads - 1 - block)",
)


@pytest.mark.parametrize("features", [("causal",), ("window", "packed")])
def test_blocks_in_another_order_give_the_same_bits(rng, tmp_path, features):
    """Each block waits for those with earlier keys, even where halves do not hold all tiles."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 20, "head_dim_v": 36}
    case = draw_case(rng, "float32", (*features, "deterministic"), seqlen_q=260, seqlen_k=330, **sizes)
    case.problem.k[..., 70, :, 3] = 1e6
    first = check(case)
    folder = planted(tmp_path, "bwd_6_block.cuh", *LAST_FIRST)
    for one, other in zip(first, check(case, folder=folder), strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_that_do_not_wait_for_their_turn(rng, tmp_path):
    case = draw_case(rng, "float32", ("deterministic",), seqlen_q=260, seqlen_k=330, **SIZES)
    folder = planted(tmp_path, "bwd_6_block.cuh", *LAST_FIRST)
    first, *_ = check(case, folder=folder)
    turns = folder / "hopper" / "float32" / "bwd_6_turns.cuh"
    waiting = "ptx::load_acquire(taken) < number"
    assert waiting in turns.read_text()
    turns.write_text(turns.read_text().replace(waiting, "false"))
    other, *_ = gradients_of(KERNEL, case, folder=folder)
    assert (first != other).any()


def test_a_turn_passed_on_before_the_sums_are_there(rng, tmp_path):
    folder = planted(tmp_path, "bwd_6_turns.cuh", "ptx::wait_stores();", "")
    with pytest.raises(EmulatorError, match="signals before what it adds is there"):
        check(draw_case(rng, "float32", ("deterministic",), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)


def test_a_tile_that_is_not_waited_for(rng, tmp_path):
    folder = planted(tmp_path, "bwd_6_consumer.cuh", "{ smem.dout_rings[warpgroup].wait_full(at); }", "{}")
    with pytest.raises(EmulatorError, match="shared memory"):
        check(draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)


def test_sums_written_where_queries_are_still_read(rng, tmp_path):
    meeting = "if constexpr (Part == kFirstOfQueries) meet_warpgroup();"
    folder = planted(tmp_path, "bwd_6_consumer.cuh", meeting, "")
    with pytest.raises(EmulatorError, match="race"):
        check(draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)
