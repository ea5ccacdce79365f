"""The backward of float32 in halves on the emulator: lengths, features, and tiles that halves do not hold."""

import numpy as np
import pytest
from emulator import EmulatorError
from feature_cases import SIZES, draw_case, hide_nan
from test_emulator import planted
from test_emulator_hopper_features import gradients_of
from tolerance import assert_gradients

pytestmark = pytest.mark.emulator

KERNEL = "bwd_6_float32"
FEATURES = ("causal", "window", "sink", "packed", "seqused_k", "dlse", "dsink")


def check(case, precision="ieee", **options):
    """Hold the gradients to the rule."""
    with np.errstate(invalid="ignore", over="ignore"):
        gradients = gradients_of(KERNEL, case, precision=precision, **options)
        assert_gradients(gradients, case.problem, precision=precision, **case.backward)
    return gradients


@pytest.mark.parametrize("features", [(), ("causal",), FEATURES])
def test_lengths_and_features(rng, features):
    for lengths in [(70, 200), (1, 64), (65, 7), (130, 1), (0, 5), (5, 0)]:
        case = draw_case(rng, "float32", features, seqlen_q=lengths[0], seqlen_k=lengths[1], **SIZES)
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


def test_a_tile_that_is_not_waited_for(rng, tmp_path):
    folder = planted(tmp_path, "bwd_6_consumer.cuh", "{ smem.dout_rings[warpgroup].wait_full(at); }", "{}")
    with pytest.raises(EmulatorError, match="shared memory"):
        check(draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)


def test_sums_written_where_queries_are_still_read(rng, tmp_path):
    meeting = "if (kSharesWeights || Col == 0) meet_warpgroup();"
    folder = planted(tmp_path, "bwd_6_consumer.cuh", meeting, "")
    with pytest.raises(EmulatorError, match="race"):
        check(draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)
