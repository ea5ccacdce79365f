"""float32 in halves on the emulator: lengths and head dims, units of rows, and what halves cannot hold."""

import numpy as np
import pytest
from emulator import EmulatorError, calls
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles
from test_emulator import planted
from tolerance import assert_attention, random_problem

from cufa.score_mod import MaskMod

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

KERNEL = "fwd_9_float32"
# One warpgroup that computes.
TILES = {"block_m": 64, "block_n": 64}
HEADS = {**SIZES, "heads": 4, "kv_heads": 2}


def run(problem, rules, call=None, **options):
    """The output, held to the rule; `call` are the arguments of the call if they are not the rules."""
    options = {"kernel": KERNEL, "tiles": TILES, **(rules if call is None else call), **options}
    with np.errstate(invalid="ignore", over="ignore"):
        out, lse = calls.attention(problem.q, problem.k, problem.v, **options)
        assert_attention(out, lse, problem, **rules)
    return out


def check(case, **options):
    """The same of a case; what no row sees is NaN."""
    hide_nan(case)
    return run(case.problem, case.forward, case.emulator_forward, **options)


@pytest.mark.parametrize(
    "features",
    [
        ("causal", "window", "sink", "softcap", "alibi_slopes", "packed", "seqused_k"),
        ("causal", "bias", "score_mod"),
        ("causal", "mask", "packed", "dropout"),
        ("window", "mask_bits", "seqused_k", "sink"),
    ],
)
def test_lengths_and_features(rng, features):
    for lengths in [(70, 200), (1, 64), (65, 7), (130, 1), (0, 5), (5, 0)]:
        sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], **HEADS}
        check(draw_case(rng, "float32", features, **sizes))


@pytest.mark.parametrize(
    "features",
    [
        (),
        ("causal", "bias"),
        ("window", "seqused_k", "dropout"),
        ("packed", "mask_bits"),
        ("tf32", "softcap"),
    ],
    ids=str,
)
def test_a_mask_of_keys(rng, features):
    """It hides them by the exponents of their values, also where halves cannot hold a key or a value."""
    case = draw_case(rng, "float32", {*features} - {"mask_bits"}, seqlen_q=70, seqlen_k=300, **HEADS)
    keys = case.problem.k.shape[-3]
    mask = rng.random((1 if "packed" in features else 2, 1, 1, keys)) < 0.7
    mask[..., :64], mask[..., 64:128], mask[-1, ..., 192:256] = False, True, rng.integers(2)
    case.arrays["mask"] = np.packbits(mask, axis=-1, bitorder="little") if "mask_bits" in features else mask
    case.problem.v[..., 70, 0, 3] = np.nan
    case.problem.v[..., 71, 1, 3] = 1e30
    check(case)


def test_a_mask_of_no_key(rng):
    case = draw_case(rng, "float32", (), seqlen_q=70, seqlen_k=100, **HEADS)
    case.arrays["mask"] = np.array([False, True])[:, None, None, None] & np.ones((2, 1, 1, 100), bool)
    check(case)


def test_a_mask_of_the_keys_of_each_head(rng):
    for kv_heads in (2, 4):  # then that of each has its own halves
        case = draw_case(rng, "float32", (), seqlen_q=70, seqlen_k=100, **HEADS | {"kv_heads": kv_heads})
        case.arrays["mask"] = rng.random((2, 4, 1, 100)) < 0.5
        check(case)


@pytest.mark.parametrize("by", ["mask", "mask_mod"])
def test_tiles_of_which_nothing_is_seen(rng, by):
    """What is in their keys and values shows nowhere; some queries see none at all."""
    case = draw_case(rng, "float32", (), seqlen_q=140, seqlen_k=450, **HEADS)
    mask, _ = mask_by_tiles(rng, (2, 4, 140, 450), (64, 64))
    mask[1, 2, :64], mask[0, :, :64, 320:] = False, False
    if by == "mask":
        case.arrays["mask"] = mask
    else:
        case.numbers["mask_mod"] = MaskMod(
            lambda b, h, q_idx, kv_idx, shown: shown[b, h, q_idx, kv_idx], mask
        )
    check(case)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dims", [(33, 127), (256, 256), (70, 137), (192, 40)], ids=str)
def test_head_dims(rng, precision, dims):
    """Some whose rows are read an element at a time, and the tiles that the plan chooses."""
    sizes = {"seqlen_q": 140, "seqlen_k": 150, "heads": 2, "kv_heads": 1}
    sizes |= dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
    problem = random_problem(rng, "float32", **sizes)
    run(problem, {"precision": precision, "causal": True}, tiles=None, checked=False)


def test_rows_in_units_of_their_own(rng):
    problem = random_problem(rng, "float32", seqlen_q=20, seqlen_k=150, head_dim=16)

    for x, exponent, deviation in ((problem.q, 80, 2), (problem.k, -82, 4), (problem.v, 0, 30)):
        x[:] = np.ldexp(x, rng.normal(exponent, deviation, (*x.shape[:-1], 1)).astype(int))
    problem.v[0, 3] = 0
    run(problem, {})


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_values_that_halves_cannot_hold(rng, value):
    """Some rows see them, some do not."""
    problem = random_problem(rng, "float32", seqlen_q=100, seqlen_k=100, head_dim=16, heads=2, kv_heads=1)
    problem.v[0, 60, 0, 5] = problem.v[0, 61, 0, 14] = value
    out = run(problem, {"causal": True})
    others = np.abs(out) < 1e3
    assert others.any()
    assert not others.all()


def test_keys_that_are_not_finite(rng):
    problem = random_problem(rng, "float32", seqlen_q=100, seqlen_k=100, head_dim=16, heads=2)
    problem.k[0, 60, 0, 5] = np.nan
    problem.k[0, 70, 1, 3] = np.inf
    problem.q[0, 90, 0, 3] = np.inf
    run(problem, {"causal": True})


def test_a_tile_that_is_not_waited_for(rng, tmp_path):
    folder = planted(tmp_path, f"{KERNEL}.cu", "wait_for(smem.queries_full, 0, 0);", "")
    with pytest.raises(EmulatorError, match="shared memory"):
        check(draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=200, **HEADS), folder=folder)
