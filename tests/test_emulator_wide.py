"""Head dims over 256 on Hopper, on the emulator: two warpgroups that share queries."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, calls
from emulator_checks import check_forward
from feature_cases import draw_case, hide_nan
from float8 import DESCALES, assert_float8, descales_of, with_keys_in_8_bits
from test_emulator import planted

from cufa.problem import FLOAT8

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

KERNEL = "fwd_10_wgmma_wide"
SMALL_DEVICE = replace(calls.DEVICE, sm_count=3)
ALL_MASKS = ("causal", "window", "sink", "packed", "seqused_k")
# Dims of two halves with as many panels each, and of which one has a panel more; and few of Q and K.
DIMS = [(512, 512), (320, 264), (40, 320)]


def check(case, tiles=None, **options):
    return check_forward(case, KERNEL, tiles, **options)


def sizes_of(dims, heads=2, kv_heads=1):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dims[0], "head_dim_v": dims[1]}
    return sizes | {"page_sizes": (8, 40, 64)}


@pytest.mark.parametrize("dims", DIMS)
def test_lengths(rng, dims):
    """No tile of keys, one, two and many: of each warpgroup as many, and of one more."""
    for seqlen_q, seqlen_k in [(5, 0), (0, 5), (1, 1), (64, 64), (70, 100), (30, 190), (129, 250)]:
        case = draw_case(rng, "bfloat16", (), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes_of(dims))
        check(case, {"block_n": 32})


@pytest.mark.parametrize(
    ("dims", "features"),
    [
        (DIMS[0], ALL_MASKS),
        (DIMS[2], ALL_MASKS),
        (DIMS[1], ("causal", "softcap", "block_table")),
        (DIMS[0], ("bias", "alibi_slopes", "dropout")),
        (DIMS[2], ("causal", "alibi_slopes", "sink")),
        (DIMS[1], ("window", "bias", "seqused_k")),
    ],
)
def test_features(rng, dims, features):
    for seqlen_q, seqlen_k in [(100, 200), (130, 70)]:
        case = draw_case(rng, "float16", features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes_of(dims))
        check(case, device=SMALL_DEVICE)


@pytest.mark.parametrize(("dims", "bad"), list(zip(DIMS, (np.nan, np.inf, np.nan), strict=True)))
def test_nonfinite_values_show_where_they_are_seen(rng, dims, bad):
    case = draw_case(rng, "bfloat16", ("causal",), seqlen_q=150, seqlen_k=150, batch=1, **sizes_of(dims))
    for column in (0, -1):
        case.problem.v[:, 70, :, column] = bad
    out = check(case, {"block_n": 32})
    assert not np.isfinite(out[:, 70:, :, [0, -1]]).any()
    assert np.isfinite(out[:, :70]).all()
    assert np.isfinite(out[:, :, :, 1:-1]).all()


@pytest.mark.parametrize(
    ("tiles", "features"),
    [
        ({"block_n": 64, "stages": 2}, ("causal", "softcap")),
        ({"block_n": 64, "stages": 2}, ("seqused_k",)),
        ({"block_n": 32, "stages": 4}, ()),
        ({"block_n": 32, "stages": 4}, ("window", "packed")),
    ],
)
def test_values_that_are_the_beginnings_of_keys(rng, tiles, features):
    """With room for the next keys, and without; also a NaN that some rows see.

    Tiles of keys come in three parts, in two, and whole.
    """
    for dims in [(576, 512), (384, 384), (320, 320)]:
        case = draw_case(rng, "bfloat16", features, seqlen_q=70, seqlen_k=200, **sizes_of(dims))
        k = case.problem.k
        with_views = replace(case, problem=replace(case.problem, v=k[..., : dims[1]]))
        check(with_views, tiles)
        k.reshape(-1, dims[0])[:: k.size // dims[0] // 3, [0, -1]] = np.nan
        check(with_views, tiles)


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("wgmma_wide_forward.cuh", "smem.k_ring.parts[part].wait_full(k_at);"),
        ("wgmma_forward_copies.cuh", "ring.wait_empty(at);"),
    ],
)
def test_parts_of_tiles_are_handed_over(rng, tmp_path, header, line):
    folder = planted(tmp_path, header, line, "")
    case = draw_case(rng, "float16", (), seqlen_q=70, seqlen_k=500, **sizes_of((272, 256)))
    case = replace(case, problem=replace(case.problem, v=case.problem.k[..., :256]))
    with pytest.raises(EmulatorError, match=r"race|one arrival too many|no thread has written"):
        check(case, {"block_n": 32, "stages": 2}, folder=folder)


LATENTS = {"heads": 2, "kv_heads": 1, "head_dim": 272, "head_dim_v": 256}


def of_latents(rng, dtype, features, **sizes):
    """A case of latents in 8 bits, beside queries of this dtype."""
    case = draw_case(rng, dtype, features, **(LATENTS | sizes))
    if dtype != FLOAT8:
        case = with_keys_in_8_bits(rng, case)
    hide_nan(case)
    return replace(case, problem=replace(case.problem, v=case.problem.k[..., : case.problem.v.shape[-1]]))


def check_latents(case, descales, tiles=None, **options):
    problem = case.problem
    options |= {"kernel": KERNEL, "tiles": tiles, "device": SMALL_DEVICE}
    with np.errstate(invalid="ignore"):
        out, lse = calls.attention(
            *(problem.q, problem.k, problem.v), **(case.emulator_forward | descales | options)
        )
        assert_float8(out, lse, problem, descales, **case.forward)


@pytest.mark.parametrize(
    ("dims", "dtype", "features", "tiles"),
    [
        ((576, 512), "bfloat16", (), {"block_n": 64, "stages": 2}),
        ((576, 512), "bfloat16", ("causal", "seqused_k"), {"block_n": 32, "stages": 3}),
        ((576, 512), "float16", ("causal", "softcap", "block_table"), {"block_n": 64, "stages": 2}),
        ((272, 264), "float16", ("window", "packed"), {"block_n": 32}),
        ((320, 320), "bfloat16", ("sink", "seqused_k"), {"block_n": 32, "key_parts": 3}),
        ((272, 256), "float16", ("softcap", "seqused_k"), {"block_n": 32, "shares": 3}),
        ((320, 320), FLOAT8, ("block_table", "seqused_k"), {"block_n": 32, "shares": 5}),
        ((576, 512), FLOAT8, ("causal", "packed"), {"block_n": 64, "stages": 2}),
        ((336, 320), FLOAT8, ("alibi_slopes", "block_table"), {"block_n": 32, "key_parts": 2}),
    ],
)
def test_latents_in_8_bits(rng, dims, dtype, features, tiles):
    """Beside queries in 16 bits, and in 8; also with a NaN that some rows see."""
    names = DESCALES[dtype != FLOAT8 :]
    for seqlen_q, seqlen_k in [(70, 200), (5, 31), (3, 0)]:
        case = of_latents(rng, dtype, features, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes_of(dims))
        descales = descales_of(rng, case, names)
        check_latents(case, descales, tiles)
        k = case.problem.k
        k.reshape(-1, dims[0])[:: max(k.size // dims[0] // 3, 1), [0, -1]] = np.nan
        check_latents(case, descales, tiles)


def test_descales_of_latents(rng):
    """Of each KV head, also 0, negative and tiny ones."""
    case = of_latents(rng, "bfloat16", ("causal",), seqlen_q=40, seqlen_k=70, batch=2, heads=4, kv_heads=2)
    numbers = np.array([[0, 1], [-0.5, 1e-38]], np.float32)
    check_latents(case, {"k_descale": numbers, "v_descale": numbers[::-1].copy()})


@pytest.mark.parametrize(
    ("dtype", "header", "line"),
    [
        ("float16", "widened_keys.cuh", "ptx::proxy_fence();"),
        ("float16", "widened_keys.cuh", "smem.k_ring.wait_empty(at);"),
        ("bfloat16", "wgmma_forward_copies.cuh", "smem.q_ring[0].wait_full(at);"),
        (FLOAT8, "wgmma_forward_copies.cuh", "smem.q_ring[w].wait_empty(at);"),
    ],
)
def test_latents_are_handed_over(rng, tmp_path, dtype, header, line):
    folder = planted(tmp_path, header, line, "")
    case = of_latents(rng, dtype, (), seqlen_q=70, seqlen_k=500)
    with pytest.raises(EmulatorError, match=r"race|fence|no thread has written"):
        check_latents(case, {}, {"block_n": 32, "stages": 2}, folder=folder)


@pytest.mark.parametrize("exponent", [-126, -60, 60, 118])
def test_queries_of_any_magnitude_beside_latents_in_8_bits(rng, exponent):
    """With a scale that makes scores of one, so that each element of Q counts; also infinite ones."""
    case = of_latents(rng, "bfloat16", (), seqlen_q=70, seqlen_k=100)
    q = case.problem.q
    q[...] = np.ldexp(q.astype(np.float32), exponent).astype(q.dtype)
    case.numbers["softmax_scale"] = 2.0**-exponent / 16
    check_latents(case, {})
    q[:, 3, 0, 5] = np.inf
    check_latents(case, {})


@pytest.mark.parametrize(
    ("parts", "dims", "sets"),
    [
        (2, (512, 512), [("seqused_k",), ("causal",)]),
        (5, (512, 512), [(), ("causal",)]),
        (7, (320, 264), [("causal", "seqused_k", "sink"), ("packed", "softcap"), ("dropout", "block_table")]),
        (6, (40, 312), [("alibi_slopes", "sink"), ("seqused_k",)]),
    ],
)
def test_parts_of_keys(rng, parts, dims, sets):
    """Few and many, which a launch of their own merges; some tiles see fewer tiles of keys than parts."""
    for features in sets:
        case = draw_case(rng, "float16", features, seqlen_q=100, seqlen_k=230, **sizes_of(dims))
        check(case, {"block_n": 32, "key_parts": parts}, device=SMALL_DEVICE)


@pytest.mark.parametrize(
    ("tiles", "dims", "sizes", "sets"),
    [
        (
            {"block_n": 32, "shares": 5},
            (512, 512),
            {"heads": 2, "kv_heads": 2, "batch": 3},
            [(), ("seqused_k",)],
        ),
        (
            {"block_n": 32, "shares": 2},
            (320, 264),
            {"heads": 2, "batch": 5},
            [("seqused_k", "block_table", "sink"), ("block_table",)],
        ),
        (
            {"block_n": 32, "shares": 9},
            (320, 264),
            {"heads": 1, "batch": 2},
            [("dropout", "seqused_k"), ("softcap", "block_table")],
        ),
        (
            {"block_n": 16, "shares": 7},
            (40, 312),
            {"heads": 2, "batch": 4},
            [("alibi_slopes", "sink", "seqused_k")],
        ),
    ],
)
def test_shares_of_keys(rng, tiles, dims, sizes, sets):
    """Of fewer tiles of keys than shares, of more, and of none."""
    for features in sets:
        for seqlen_k in (20, 230):
            case = draw_case(
                rng, "float16", features, seqlen_q=70, seqlen_k=seqlen_k, **sizes_of(dims) | sizes
            )
            check(case, tiles)


@pytest.mark.parametrize(("shares", "seqlen_k"), [(12, 400), (40, 700)])
def test_tiles_in_many_shares(rng, shares, seqlen_k):
    """One sequence has all keys: 6 and 20 shares and more have parts of its tile."""
    case = draw_case(
        rng,
        "float16",
        ("sink", "seqused_k"),
        seqlen_q=70,
        seqlen_k=seqlen_k,
        **sizes_of((40, 312)) | {"heads": 1, "batch": 2},
    )
    case.arrays["seqused_k"][:] = seqlen_k, 0
    check(case, {"block_n": 16, "shares": shares})


def test_warps_wait_for_each_others_parts(rng, tmp_path):
    folder = planted(tmp_path, "merged_parts.cuh", "= merged; __syncthreads();", "= merged;")
    case = draw_case(rng, "float16", (), seqlen_q=100, seqlen_k=230, **sizes_of((512, 512)))
    with pytest.raises(EmulatorError, match=r"race|no thread has written"):
        check(case, {"block_n": 32, "key_parts": 6}, device=SMALL_DEVICE, folder=folder)


@pytest.mark.parametrize(
    ("features", "heads", "seqlen_q", "seqlen_k"),
    [
        *(((), 130, 1, 150), ((), 64, 3, 2)),
        *((("causal",), 128, 2, 150), (("causal",), 64, 3, 2)),
        *((("causal", "softcap", "seqused_k"), 70, 5, 64), (("causal", "softcap", "seqused_k"), 130, 1, 150)),
        (("causal", "block_table"), 128, 2, 150),
    ],
)
def test_heads_of_few_queries_are_rows(rng, features, heads, seqlen_q, seqlen_k):
    """And queries are heads, of which each sees as many keys as the causal mask shows to it."""
    sizes = sizes_of((320, 256), heads, 1)
    case = draw_case(rng, "bfloat16", features, batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes)
    check(case, device=SMALL_DEVICE)
    if "block_table" not in features:
        case.problem.k[:, -1] = np.nan
        case = replace(case, problem=replace(case.problem, v=case.problem.k[..., :256]))
        check(case, device=SMALL_DEVICE)
    if "seqused_k" not in features and seqlen_k > 100:
        check(case, {"key_parts": 2}, device=SMALL_DEVICE)


ALL_MEET = "ptx::named_barrier_sync<2 * kWarpgroup>(kAllConsumers);"
WRITES_SUMS = "sums[warpgroup][half][thread] = softmax.rows[half].sum;"
# A barrier and what is around it, that without the barrier, and how many keys show that it is missing.
BARRIERS = {
    "weights are there": ("ptx::named_barrier_sync<2 * kWarpgroup>(kFirstTurn + 1 - warpgroup);", "", 200),
    "weights have been used": ("ptx::named_barrier_sync<kWarpgroup>(kFirstStore + warpgroup);", "", 200),
    "sums are there": (f"{WRITES_SUMS} {ALL_MEET}", WRITES_SUMS, 30),
    "sums have been read": (f"if (kReleasesEarly) {ALL_MEET}", "", 30),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_each_barrier_is_needed(rng, tmp_path, barrier):
    right, wrong, keys = BARRIERS[barrier]
    folder = planted(tmp_path, "wgmma_wide_forward.cuh", right, wrong)
    case = draw_case(rng, "float16", (), seqlen_q=300, seqlen_k=keys, **sizes_of((512, 512)))
    with pytest.raises(EmulatorError, match=r"race|no thread has written"):
        check(case, device=SMALL_DEVICE, folder=folder)
