"""Sequences of few and of many queries by a kernel for each, on the emulator."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import calls
from feature_cases import hide_nan, in_pages, packed_case
from tolerance import assert_attention

from cufa.plan import mixed
from cufa.score_mod import MaskMod, ScoreMod

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

# Few SMs, so that blocks take several tiles.
DEVICE = replace(calls.DEVICE, sm_count=3)
FEWER = mixed.MANY_QUERIES - 1


def always_mixed(problem, device):
    """What a plan takes the sequences for if it must take two kernels."""
    return mixed.Mix(
        few=mixed.alike(problem, problem.batch, 1),
        many=mixed.alike(problem, 2, 2 * mixed.MANY_QUERIES),
        on_half=True,
        reason="asked for",
    )


def without(*_):
    return {}


def with_tables(rng, keys):
    """Both kernels ask the functions, which read a number of each key."""
    added, seen = rng.standard_normal(keys), rng.random(keys) < 0.6
    return {
        "score_mod": ScoreMod(lambda score, b, h, q_idx, kv_idx, table: score + table[kv_idx], added),
        "mask_mod": MaskMod(lambda b, h, q_idx, kv_idx, table: table[kv_idx], seen),
    }


@pytest.mark.parametrize(("before", "functions"), [(0, without), (70, without), (0, with_tables)])
def test_sequences_at_the_limit_and_beside_it(rng, monkeypatch, before, functions):
    """More of them than a warp has lanes, some without queries or keys."""
    monkeypatch.setattr(mixed, "mix_of", always_mixed)
    rows = [0, 1, FEWER, FEWER + 1, 130, FEWER + 2, 2, *[1] * 30, 40]
    keys = [9, 50, 70, 7, 200, 30, 0, *[17] * 30, 0]
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
    case = in_pages(rng, packed_case(rng, "bfloat16", before, rows, keys, **sizes), page_size=16)
    case.numbers.update(functions(rng, max(keys) + 16))
    hide_nan(case)
    problem = case.problem
    out, lse = calls.attention(problem.q, problem.k, problem.v, device=DEVICE, **case.emulator_forward)
    with np.errstate(invalid="ignore"):
        assert_attention(out, lse, problem, **case.forward)
