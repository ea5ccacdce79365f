"""The features of Hopper's forward on the emulator: every pair, with NaN in all that is not seen."""

import dataclasses

import numpy as np
import pytest
from emulator import calls
from feature_cases import draw_case, hide_nan, pairwise
from tolerance import assert_attention

pytestmark = pytest.mark.emulator

FEATURES = ("causal", "window", "softcap", "sink", "packed", "seqused_k")
SETS = [*(frozenset((name,)) for name in FEATURES), *pairwise(FEATURES)]
# So few that each block takes several tiles.
DEVICE = dataclasses.replace(calls.DEVICE, sm_count=3)


@pytest.mark.parametrize("hidden", [False, True], ids=["clean", "NaN in the unseen"])
@pytest.mark.parametrize("features", SETS, ids=lambda features: "+".join(sorted(features)))
def test_forward(rng, features, hidden):
    dtype, dims = [("float16", (64, 64)), ("bfloat16", (128, 40))][hidden]
    seqlen_q, seqlen_k = (int(length) for length in rng.integers(1, 280, 2))
    case = draw_case(
        rng, dtype, features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=dims[0], head_dim_v=dims[1]
    )
    if hidden:
        hide_nan(case)
    problem = case.problem
    with np.errstate(invalid="ignore"):
        out, lse = calls.attention(
            problem.q,
            problem.k,
            problem.v,
            kernel="fwd_6_wgmma",
            device=DEVICE,
            **case.emulator_forward,
        )
        assert_attention(out, lse, problem, **case.forward)
