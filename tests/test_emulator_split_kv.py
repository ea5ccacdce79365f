"""Split keys on the emulator: several parts, few and many tiles, and rows of heads that share keys."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, calls
from emulator_checks import check_forward
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles
from float8 import DESCALES, assert_float8, descales_of, with_keys_in_8_bits
from test_emulator import planted

from cufa.problem import FLOAT8

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

KERNEL = "fwd_8_split_kv"
# Warps that each have tiles of their own, and warps that share them.
OWN_TILES = {"block_m": 16, "block_n": 16, "threads": 64, "stages": 3, "key_parts": 2}
SHARED_TILES = {"block_m": 32, "block_n": 16, "threads": 128, "stages": 2, "key_parts": 1}
# Warps that divide the columns of the output.
COLUMN_TILES = {"block_m": 16, "block_n": 16, "threads": 128, "stages": 2, "key_parts": 2, "column_warps": 2}
# Warps with two 16-row tiles each.
WIDE_TILES = {"block_m": 128, "block_n": 16, "threads": 128, "stages": 2, "key_parts": 2}
HEADS = {**SIZES, "heads": 6, "kv_heads": 2}
ALL_MASKS = ("causal", "window", "sink", "packed", "seqused_k")
PAGED = ("causal", "softcap", "block_table")


def check(case, tiles, **options):
    return check_forward(case, KERNEL, tiles, **options)


@pytest.mark.parametrize("parts", [2, 3, 9])
def test_masks_and_lengths(rng, parts):
    for lengths in [(1, 200), (7, 53), (53, 7), (40, 1), (0, 5), (5, 0)]:
        case = draw_case(rng, "float16", ALL_MASKS, seqlen_q=lengths[0], seqlen_k=lengths[1], **HEADS)
        check(case, OWN_TILES | {"key_parts": parts})


@pytest.mark.parametrize("shares", [2, 7, 300])
def test_keys_shared_out(rng, shares):
    """Among fewer blocks than there are tiles, and among more than there are rounds of keys."""
    lengths = [(1, 200), (7, 53), (40, 1), (0, 5), (5, 0)] if shares < 300 else [(1, 200)]
    for seqlen_q, seqlen_k in lengths:
        case = draw_case(rng, "float16", ALL_MASKS, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **HEADS)
        check(case, OWN_TILES | {"key_parts": 1, "shares": shares})


def test_shares_of_many_sequences(rng):
    """More than a warp has lanes, some of them without keys, in tiles that warps share."""
    sizes = {"batch": 70, "heads": 2, "kv_heads": 1}
    case = draw_case(rng, "bfloat16", ("seqused_k",), seqlen_q=1, seqlen_k=40, **sizes)
    case.arrays["seqused_k"][[0, 33, 69]] = 0
    check(case, SHARED_TILES | {"shares": 50})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_shows_where_it_is_seen(rng, bad):
    case = draw_case(rng, "float16", ALL_MASKS, seqlen_q=30, seqlen_k=80, **HEADS)
    case.numbers["window"] = (12, 4)
    for name, length in (("q", 30), ("k", 80)):
        case.arrays[f"cu_seqlens_{name}"][:] = case.arrays[f"cu_seqlens_{name}"][0] + [0, 0, length]
    case.arrays["seqused_k"][:] = 80
    case.problem.v[case.arrays["cu_seqlens_k"][0] + 60] = bad
    for tiles in (OWN_TILES, WIDE_TILES, OWN_TILES | {"key_parts": 1, "shares": 3}):
        out = check(case, tiles)
        assert not np.isfinite(out).all()
        assert np.isfinite(out).any()


def test_scores_of_heads_that_share_a_tile(rng):
    for lengths in [(1, 150), (9, 70), (70, 9)]:
        features = "causal", "softcap", "alibi_slopes", "sink", "mask"
        case = draw_case(rng, "bfloat16", features, seqlen_q=lengths[0], seqlen_k=lengths[1], **HEADS)
        case.numbers["softmax_scale"] = -0.4
        check(case, SHARED_TILES)


def test_warps_with_two_tiles_of_rows(rng):
    for lengths in [(53, 7), (90, 40)]:
        features = *ALL_MASKS, "mask_bits"
        case = draw_case(rng, "float16", features, seqlen_q=lengths[0], seqlen_k=lengths[1], **HEADS)
        check(case, WIDE_TILES)
    case = draw_case(
        rng, "bfloat16", ("causal", "softcap", "alibi_slopes"), seqlen_q=70, seqlen_k=29, **HEADS
    )
    check(case, WIDE_TILES | {"threads": 256})


@pytest.mark.parametrize(
    ("seqlen_k", "features"),
    [(176, ("causal", "sink", "mask")), (170, ("packed", "window", "seqused_k", "mask_bits"))],
)
def test_masks_whose_rows_lie_in_sixteens(rng, seqlen_k, features):
    """Tiles of 16 keys at a time, and a last one that must be read key by key."""
    case = draw_case(rng, "bfloat16", features, seqlen_q=21, seqlen_k=seqlen_k, **HEADS)
    check(case, OWN_TILES)
    check(case, SHARED_TILES | {"block_n": 64})
    check(case, WIDE_TILES | {"block_n": 32, "key_parts": 1, "shares": 5})


def test_odd_dims(rng):
    """Which are copied element by element, also where rows have more of them than there are threads."""
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 33, "head_dim_v": 135}
    check(draw_case(rng, "float16", ("window",), seqlen_q=5, seqlen_k=65, **sizes), SHARED_TILES)


@pytest.mark.parametrize(
    ("dims", "tiles"),
    [
        ((32, 64), COLUMN_TILES),
        ((24, 40), COLUMN_TILES | {"block_m": 32}),  # the last warp's columns are padding in part
        ((16, 33), COLUMN_TILES | {"threads": 256, "column_warps": 4, "key_parts": 1, "shares": 3}),
        ((32, 64), COLUMN_TILES | {"block_m": 128, "threads": 256}),
    ],
)
def test_warps_that_divide_columns(rng, dims, tiles):
    sizes = HEADS | {"head_dim": dims[0], "head_dim_v": dims[1]}
    for lengths in [(1, 200), (7, 53)]:
        case = draw_case(rng, "float16", ALL_MASKS, seqlen_q=lengths[0], seqlen_k=lengths[1], **sizes)
        check(case, tiles)


# Also values that begin where no line of keys does.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((512, 512), "float16"),
        ((576, 512), "bfloat16"),
        ((512, 480), "float16"),
        ((500, 272), "bfloat16"),
        ((512, 384), FLOAT8),
        ((300, 272), FLOAT8),
    ],
)
def test_wide_heads(rng, dims, dtype):
    """Of which a warp has not registers for a row; also values that are a part of the keys."""
    sizes = {"batch": 2, "heads": 20, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = draw_case(rng, dtype, ("causal", "seqused_k"), seqlen_q=2, seqlen_k=90, **sizes)
    case = replace(case, problem=replace(case.problem, v=case.problem.k[..., : dims[1]]))
    if dtype == FLOAT8:
        descales = descales_of(rng, case)
        problem = case.problem
        options = {"kernel": KERNEL, "out_dtype": np.float16, **case.emulator_forward, **descales}
        out, lse = calls.attention(*(problem.q, problem.k, problem.v), **options)
        assert_float8(out, lse, problem, descales, **case.forward)
    else:
        check(case, None)


@pytest.mark.parametrize(
    ("dims", "tiles", "features"),
    [
        ((64, 64), OWN_TILES, ALL_MASKS),
        ((64, 64), OWN_TILES, PAGED),
        ((64, 40), SHARED_TILES, ("mask", "sink")),
        # Rows that are copied element by element.
        ((33, 33), OWN_TILES | {"key_parts": 1, "shares": 3}, PAGED),
        ((33, 33), OWN_TILES | {"key_parts": 1, "shares": 3}, ("mask", "sink")),
        ((48, 16), WIDE_TILES, ALL_MASKS),
        ((40, 24), COLUMN_TILES, PAGED),
        ((128, 96), COLUMN_TILES, ("mask", "sink")),
        ((256, 160), COLUMN_TILES | {"column_warps": 4}, ALL_MASKS),
    ],
)
def test_values_that_are_the_beginnings_of_keys(rng, dims, tiles, features):
    """A NaN that some rows see, of a column that values have and of another, and those that no row does."""
    sizes = HEADS | {"head_dim": dims[0], "head_dim_v": dims[1]}
    for lengths in [(1, 200), (13, 53)]:
        case = draw_case(rng, "bfloat16", features, seqlen_q=lengths[0], seqlen_k=lengths[1], **sizes)
        k = case.problem.k
        with_views = replace(case, problem=replace(case.problem, v=k[..., : dims[1]]))
        check(with_views, tiles)
        k.reshape(-1, dims[0])[:: k.size // dims[0] // 3, [0, -1]] = np.nan
        check(with_views, tiles)


@pytest.mark.parametrize(
    ("dtype", "features", "tiles", "dims"),
    [
        (FLOAT8, ALL_MASKS, OWN_TILES, {}),
        ("bfloat16", ("causal", "softcap", "block_table"), SHARED_TILES, {}),
        ("float16", ("window", "sink"), WIDE_TILES, {"head_dim": 70, "head_dim_v": 34}),
        (FLOAT8, ("mask", "causal"), SHARED_TILES, {}),
        (FLOAT8, ("bias", "causal"), SHARED_TILES, {}),
    ],
)
def test_8_bits(rng, dtype, features, tiles, dims):
    """Of keys and values, and of queries; NaN that no row sees, and some that all rows of a head do."""
    case = draw_case(rng, dtype, features, seqlen_q=13, seqlen_k=150, **(HEADS | dims))
    names = DESCALES
    if dtype != FLOAT8:
        case, names = with_keys_in_8_bits(rng, case), DESCALES[1:]
    hide_nan(case)
    descales = descales_of(rng, case, names)
    options = {"kernel": KERNEL, "tiles": tiles | {"block_n": 32}}
    if dtype == FLOAT8:
        options["out_dtype"] = np.float16
    problem = case.problem
    with np.errstate(invalid="ignore"):
        out, lse = calls.attention(
            *(problem.q, problem.k, problem.v), **case.emulator_forward, **descales, **options
        )
        assert_float8(out, lse, problem, descales, **case.forward)


def test_the_tiles_that_the_plan_chooses(rng):
    sizes = {"batch": 3, "heads": 16, "kv_heads": 2, "head_dim": 128, "head_dim_v": 64}
    case = draw_case(rng, "bfloat16", ("seqused_k",), seqlen_q=1, seqlen_k=700, **sizes)
    check(case, None, checked=False)


@pytest.mark.parametrize("tiles", [OWN_TILES, SHARED_TILES | {"stages": 3}, WIDE_TILES, COLUMN_TILES])
def test_tiles_that_nobody_sees(rng, tiles):
    """They are not read; the first ones of a block are, before anybody knows."""
    for lengths in [(1, 700), (21, 330)]:
        case = draw_case(rng, "float16", ("sink",), seqlen_q=lengths[0], seqlen_k=lengths[1], **HEADS)
        case.arrays["mask"], _ = mask_by_tiles(rng, (2, HEADS["heads"], *lengths), (32, 48))
        check(case, tiles)


def test_a_tile_that_is_not_waited_for(rng, tmp_path):
    right, wrong = (f"wait_copies_but<kStages - {groups}>();" for groups in (2, 1))
    folder = planted(tmp_path, "fwd_8_copies.cuh", right, wrong)
    case = draw_case(rng, "float16", (), seqlen_q=1, seqlen_k=200, **HEADS)
    with pytest.raises(EmulatorError, match="shared memory"):
        check(case, OWN_TILES, folder=folder)
