"""The features of Hopper's kernels on the emulator: every pair, with NaN in all that is not seen."""

import dataclasses
import itertools

import numpy as np
import pytest
from emulator import calls
from feature_cases import (
    HOPPER_PAGE_SIZES,
    draw_case,
    feature_id,
    hide_nan,
    mask_by_tiles,
    packed_case,
    pairwise,
)
from test_emulator import planted
from tolerance import assert_attention, assert_gradients

from cufa import reference
from cufa.checking import judge
from cufa.plan import make_plan
from cufa.problem import accumulator_dtype
from cufa.score_mod import ScoreMod

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(4)]

FEATURES = ("causal", "window", "softcap", "alibi_slopes", "sink", "packed", "seqused_k")
FORWARD_FEATURES = (*FEATURES, "bias", "dropout")
BACKWARD_FEATURES = (*FEATURES, "dlse", "dsink", "deterministic", "dropout")

# By kernel and dtype, the head dims of Q and of V.
BACKWARDS = [
    ("bwd_4_wgmma", "float16", (64, 64)),
    ("bwd_4_wgmma", "bfloat16", (128, 40)),
    ("bwd_5_wgmma_wide", "float16", (192, 128)),
    ("bwd_5_wgmma_wide", "bfloat16", (72, 256)),
    ("bwd_4_wgmma", "bfloat16", (72, 128)),
    ("bwd_4_wgmma", "float16", (192, 128)),
    ("bwd_8_wgmma_pair", "bfloat16", (256, 136)),
    ("bwd_8_wgmma_pair", "float16", (136, 256)),
]
# Which features a kernel lacks for some of those.
LACKS = {case: {"softcap", "dropout"} for case in BACKWARDS[5:]}
# A kernel's tiles for some head dims, where there is more than one kind of them.
TILES = {("bwd_4_wgmma", (72, 128)): {"block_m": 80}}
# Larger ones than the plan has for few rows.
LARGE_TILES = {"block_m": 128, "block_n": 64, "stages": 2, "query_stages": 1, "blocks_per_sm": 1}
# The forward's dtype and head dims, with tiles of its own or those of the plan.
FORWARDS = [("float16", (64, 64), LARGE_TILES), ("bfloat16", (128, 40), None)]
# From where to where lengths of a side are, as often of one tile as of two.
LENGTHS = [(1, 80), (129, 190)]
HEADS = {"heads": 2, "kv_heads": 1}
# So few that each block takes several tiles.
DEVICE = dataclasses.replace(calls.DEVICE, sm_count=3)


def draw(rng, dtype, dims, features):
    """A case of these features and head dims, and of random lengths."""
    seqlen_q, seqlen_k = (int(rng.integers(*rng.choice(LENGTHS))) for _ in range(2))
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
    return draw_case(rng, dtype, features, **sizes, **HEADS)


# Each set with one of the forward's, in turn: compiling takes most of the time.
@pytest.mark.parametrize(
    ("dtype", "dims", "tiles", "features"),
    [
        (*forward, features)
        for forward, features in zip(itertools.cycle(FORWARDS), pairwise(FORWARD_FEATURES), strict=False)
    ]
    + [
        (*FORWARDS[0], frozenset(("mask", "window", "seqused_k", "softcap"))),
        (*FORWARDS[1], frozenset(("mask_bits", "causal", "packed", "bias"))),
    ],
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else str(value),
)
def test_forward(rng, dtype, dims, tiles, features):
    """Clean, and with NaN in the unseen, which takes another way through the kernel."""
    case = draw(rng, dtype, dims, features)
    for hidden in (False, True):
        if hidden:
            hide_nan(case)
        with np.errstate(invalid="ignore"):
            check_forward(case, tiles)


def check_forward(case, tiles):
    problem = case.problem
    out, lse = calls.attention(
        problem.q,
        problem.k,
        problem.v,
        kernel="fwd_6_wgmma",
        tiles=tiles,
        device=DEVICE,
        **case.emulator_forward,
    )
    assert_attention(out, lse, problem, **case.forward)


# Two stages of queries, three and four warpgroups: the next tile of queries comes while the one before is
# stored. Under a causal mask it takes four for the warps to share what they know of a tile.
OVERLAPPING_TILES = [
    ({**LARGE_TILES, "query_stages": 2}, False),
    ({**LARGE_TILES, "block_m": 192}, False),
    ({**LARGE_TILES, "block_m": 256}, True),
]


@pytest.mark.parametrize(
    "features", [{"packed"}, {"seqused_k"}, {"packed", "seqused_k", "sink"}], ids=feature_id
)
@pytest.mark.parametrize(("tiles", "causal"), OVERLAPPING_TILES, ids=str)
def test_tiles_of_many_lengths_that_overlap(rng, tiles, causal, features):
    """Sequences without keys or without queries stand between others."""
    sizes = {"head_dim": 64, "head_dim_v": 64} | HEADS
    if "packed" in features:
        case = packed_case(rng, "float16", 5, [200, 70, 0, 193, 1, 130], [90, 0, 50, 130, 64, 1], **sizes)
    else:
        case = draw_case(rng, "float16", features, seqlen_q=200, seqlen_k=130, batch=6, **sizes)
    case.numbers["causal"] = causal
    if "seqused_k" in features:
        case.arrays["seqused_k"] = np.array([90, 0, 17, 0, 64, 1], np.int32)
    if "sink" in features:
        case.arrays["sink"] = rng.standard_normal(HEADS["heads"]).astype(np.float32)
    check_forward(case, tiles)


def sets_from(first):
    """Each pair of features with one of the kernels in turn, from that one on."""
    kernels = itertools.islice(itertools.cycle(BACKWARDS), first, None)
    return [
        (*kernel, features - LACKS.get(kernel, set()))
        for kernel, features in zip(kernels, pairwise(BACKWARD_FEATURES), strict=False)
    ]


FURTHER_SETS = [
    (*BACKWARDS[0], frozenset(("bias", "softcap"))),
    (*BACKWARDS[1], frozenset(("bias", "causal", "packed"))),
    (*BACKWARDS[3], frozenset(("bias", "alibi_slopes"))),
    (*BACKWARDS[0], frozenset(("mask", "window", "seqused_k", "softcap"))),
    (*BACKWARDS[1], frozenset(("mask_bits", "causal", "packed", "bias"))),
    (*BACKWARDS[5], frozenset(("mask", "alibi_slopes", "dlse", "dsink"))),
    (*BACKWARDS[2], frozenset(("mask", "window", "seqused_k", "softcap"))),
    (*BACKWARDS[3], frozenset(("mask_bits", "causal", "packed", "bias"))),
]


# Pairs with two kernels; of one of them every access is checked.
@pytest.mark.parametrize(
    ("checked", "kernel", "dtype", "dims", "features"),
    [
        *((True, *each) for each in (*sets_from(0), *FURTHER_SETS)),
        *((False, *each) for each in sets_from(2)),
    ],
    ids=lambda value: feature_id(value) if isinstance(value, frozenset) else str(value),
)
def test_backward(rng, checked, kernel, dtype, dims, features):
    case = draw(rng, dtype, dims, features)
    hide_nan(case)
    gradients = gradients_of(kernel, case, tiles=TILES.get((kernel, dims)), checked=checked)
    assert_gradients(gradients, case.problem, **case.backward)


# By dtype and head dims, of which two blocks have half each: all of the second's values, or some of both, are
# beyond them, or a tile of queries is shorter.
IN_PAIRS = [
    ("bfloat16", (264, 64), {"causal", "softcap", "dsink", "packed"}),
    ("float16", (320, 328), {"window", "alibi_slopes", "deterministic", "seqused_k"}),
    ("bfloat16", (512, 512), {"dlse", "dropout", "packed", "seqused_k"}),
    ("float16", (72, 400), {"causal", "mask", "dsink"}),
    ("bfloat16", (456, 512), {"causal", "packed", "deterministic", "sink"}),
]


@pytest.mark.parametrize(("dtype", "dims", "features"), IN_PAIRS)
def test_backward_of_blocks_in_pairs(rng, dtype, dims, features):
    for _ in range(3):
        case = draw(rng, dtype, dims, features)
        hide_nan(case)
        assert_gradients(gradients_of("bwd_5_wgmma_wide", case), case.problem, **case.backward)


# By direction; the mask's heads and sequences, and its tiles.
HIDING = [
    ("fwd_6_wgmma", (72, 40), (2, 1), (128, 64)),
    ("bwd_4_wgmma", (72, 40), (1, 2), (64, 128)),
    ("bwd_5_wgmma_wide", (40, 136), (1, 2), (64, 64)),
]


# Keys, and queries of the mask: rows of it that are read 16 keys at once or key by key, and one row for all.
@pytest.mark.parametrize(("keys", "rows"), [(256, 150), (200, 150), (256, 1)])
@pytest.mark.parametrize("in_bits", [False, True], ids=["bytes", "bits"])
def test_tiles_that_a_mask_hides(rng, in_bits, keys, rows):
    """Forward and backward; other keys hide in other heads and sequences, or the same in all."""
    for kernel, (head_dim, value_dim), front, tile in HIDING:
        sizes = {"seqlen_q": 150, "seqlen_k": keys, "head_dim": head_dim, "head_dim_v": value_dim} | HEADS
        case = draw_case(rng, "bfloat16", {"causal"}, **sizes)
        mask, _ = mask_by_tiles(rng, (*front, rows, keys), tile)
        case.arrays["mask"] = np.packbits(mask, axis=-1, bitorder="little") if in_bits else mask
        if kernel != "fwd_6_wgmma":
            assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)
            continue
        inputs = case.problem.q, case.problem.k, case.problem.v
        options = {"kernel": kernel, "tiles": LARGE_TILES, "device": DEVICE, **case.emulator_forward}
        assert_attention(*calls.attention(*inputs, **options), case.problem, **case.forward)


# The mask's heads and sequences: with bits for each key, the range of each row is tested apart.
@pytest.mark.parametrize(
    ("front", "features"),
    [
        ((2, 2), ()),
        ((1, 1), ("packed",)),
        ((2, 1), ("seqused_k",)),
        ((2, 1), ("window", "seqused_k", "softcap")),
        ((1, 2), ("packed", "causal")),
        ((2, 2), ("dropout", "bias", "sink")),
        ((1, 1), ("causal", "alibi_slopes")),
    ],
    ids=str,
)
def test_a_mask_of_keys(rng, front, features):
    keys, dtype = 400, "float16" if "bias" in features else "bfloat16"
    sizes = {"seqlen_q": 150, "seqlen_k": keys, "head_dim": 72, "head_dim_v": 40} | HEADS
    case = draw_case(rng, dtype, {*features}, **sizes)
    mask = rng.random((*front, 1, keys)) < 0.7
    mask[..., 128:256] = rng.integers(2)  # a tile that nothing cuts
    case.arrays["mask"] = mask
    inputs = case.problem.q, case.problem.k, case.problem.v
    options = {"kernel": "fwd_6_wgmma", "tiles": LARGE_TILES, "device": DEVICE, **case.emulator_forward}
    assert_attention(*calls.attention(*inputs, **options), case.problem, **case.forward)


# Many consumers have registers for a mask of one row; small blocks for any.
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, {"block_m": 192}),
        (1, {"block_m": 256, "query_stages": 2}),
        (270, {"block_m": 64, "blocks_per_sm": 3}),
    ],
    ids=str,
)
def test_a_mask_where_warps_share_what_they_know_of_a_tile(rng, rows, sizes):
    """A block takes tiles of sequences with and without keys."""
    of_case = {"batch": 3, "seqlen_q": 270, "seqlen_k": 200, "head_dim": 64, "head_dim_v": 64} | HEADS
    case = draw_case(rng, "float16", set(), **of_case)
    mask = rng.random((3, 1, rows, 200)) < 0.7
    mask[0, ..., 64:128] = True
    mask[1] = False
    mask[2, ..., 64:] = False
    case.arrays["mask"] = mask
    check_forward(case, LARGE_TILES | sizes)


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_no_keys(rng, packed):
    sizes = {"seqlen_q": 40, "seqlen_k": 0, "head_dim": 16} | HEADS
    case = draw_case(rng, "bfloat16", {"packed"} if packed else set(), **sizes)
    case.arrays["mask"] = np.empty((1, 1, 1, case.problem.k.shape[-3]), bool)
    inputs = case.problem.q, case.problem.k, case.problem.v
    options = {"kernel": "fwd_6_wgmma", "device": DEVICE, **case.emulator_forward}
    assert_attention(*calls.attention(*inputs, **options), case.problem, **case.forward)


@pytest.mark.parametrize("hidden", [slice(None, None, 256), slice(128, 200), slice(256, 320)])
def test_a_row_that_has_seen_no_key_looks_at_the_next_tile_first(rng, tmp_path, hidden):
    """It would else compute its scores again, one product after the other: here they would be wrong."""
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 16}
    case = draw_case(rng, "bfloat16", {"causal"}, **sizes)
    case.arrays["mask"] = np.ones((1, 1, 1, 512), bool)
    case.arrays["mask"][..., hidden] = False
    case.problem.q[:] = 4 * case.problem.q.astype(np.float32)  # it looks for such rows if weights are large
    right, wrong = "compute_products(s, work, tile); shape_scores", "for (float& x : s) x = 9; shape_scores"
    inputs = case.problem.q, case.problem.k, case.problem.v
    options = {"kernel": "fwd_6_wgmma", "tiles": LARGE_TILES, "device": DEVICE, **case.emulator_forward}
    options["folder"] = planted(tmp_path, "wgmma_forward.cuh", right, wrong)
    assert_attention(*calls.attention(*inputs, **options), case.problem, **case.forward)


# Of 32 tiles what is seen is in a word if all rows are alike; else of four, and rows of 99 begin within one.
@pytest.mark.parametrize("rows", [1, 40])
def test_a_mask_of_many_tiles_of_keys(rng, rows):
    keys, tile = 64 * 98 + 9, LARGE_TILES["block_n"]
    sizes = {"batch": 3, "heads": 1, "kv_heads": 1, "seqlen_q": 40, "seqlen_k": keys, "head_dim": 16}
    case = draw_case(rng, "bfloat16", set(), **sizes)
    shown = rng.choice([0.0, 0.5, 1.0], (3, 1, 1, keys // tile + 1), p=[0.8, 0.1, 0.1])
    shown[0, ..., :33] = 0  # the walk ends within a word
    shown[1, ..., 31:97] = 0  # and passes over words
    shown[1, ..., 30] = 1
    shown[2] = 0  # there is nothing to see
    mask = rng.random((3, 1, rows, keys)) < np.repeat(shown, tile, axis=-1)[..., :keys]
    case.arrays["mask"] = mask
    inputs = case.problem.q, case.problem.k, case.problem.v
    options = {"kernel": "fwd_6_wgmma", "tiles": LARGE_TILES, "device": DEVICE, **case.emulator_forward}
    assert_attention(*calls.attention(*inputs, **options), case.problem, **case.forward)


# In order, a block counts the tiles of keys before its own that are seen.
@pytest.mark.parametrize("features", [frozenset(), frozenset(("deterministic",))])
def test_gradients_under_a_mask_of_many_tiles_of_keys(rng, features):
    sizes = {"batch": 2, "heads": 1, "kv_heads": 1, "seqlen_q": 30, "seqlen_k": 6800, "head_dim": 16}
    case = draw_case(rng, "bfloat16", features, **sizes)
    shown = rng.choice([0.0, 0.5, 1.0], (2, 1, 1, 6800 // 128 + 1), p=[0.8, 0.1, 0.1])
    shown[0, ..., :34] = 0  # the first words, but for some of the second
    shown[1, ..., 10], shown[1, ..., 11:40] = 1, 0
    case.arrays["mask"] = rng.random((2, 1, 1, 6800)) < np.repeat(shown, 128, axis=-1)[..., :6800]
    hide_nan(case)
    for device in (dataclasses.replace(DEVICE, sm_count=1), DEVICE):
        gradients = gradients_of("bwd_4_wgmma", case, device=device)
        assert_gradients(gradients, case.problem, **case.backward)


# How blocks add to dQ, and the device, tiles and features of a call that make them do so.
NO_CACHE = dataclasses.replace(DEVICE, sm_count=1, l2_bytes=0)
WAYS_OF_ADDING = [
    ("kAlone", dataclasses.replace(DEVICE, sm_count=1), None, ()),
    ("kAsTheyCome", dataclasses.replace(DEVICE, sm_count=64), {"head_parts": 2}, ()),
    ("kAfterFirst", NO_CACHE, None, ("seqused_k",)),
    ("kInOrder", NO_CACHE, None, ("deterministic", "causal")),
    ("kInOrder", NO_CACHE, None, ("deterministic", "window")),
    ("kInOrder", NO_CACHE, {"head_parts": 2}, ("deterministic", "packed")),
]


@pytest.mark.parametrize(("way", "device", "tiles", "features"), WAYS_OF_ADDING)
@pytest.mark.parametrize(("kernel", "dtype", "dims"), [BACKWARDS[i] for i in (0, 1, 2, 5, 6)])
def test_gradients_under_a_mask_of_keys(rng, monkeypatch, kernel, dtype, dims, way, device, tiles, features):
    """Tiles of keys that it hides are left out: the first or the last of a sequence, or all."""
    queries, keys = (430, 400) if "causal" in features else (150, 600)
    tile = 64 if kernel == "bwd_5_wgmma_wide" else 128
    sizes = {"batch": 4, "seqlen_q": queries, "seqlen_k": keys, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = draw_case(rng, dtype, features, **sizes, **HEADS)
    if "window" in features:
        case.numbers["window"] = (130, 70)
    sequences, keys = (1 if "packed" in features else 4), case.problem.k.shape[-3]
    shown = rng.choice([0.0, 0.5, 1.0], (sequences, 1, 1, -(-keys // tile)))
    shown[0, ..., 0] = 0
    shown[1:2, ..., -1] = 0
    shown[2:3] = 0
    shown[-1, ..., 1:3] = 0, 0.5
    case.arrays["mask"] = rng.random((sequences, 1, 1, keys)) < np.repeat(shown, tile, axis=-1)[..., :keys]
    hide_nan(case)
    plans = []
    monkeypatch.setattr(calls, "make_plan", lambda *call: plans.append(make_plan(*call)) or plans[-1])
    gradients = gradients_of(kernel, case, device=device, tiles=tiles)
    assert dict(plans[0].macros)["ADDING"] == way
    assert_gradients(gradients, case.problem, **case.backward)


def test_gradients_under_a_mask_of_the_keys_of_each_head(rng):
    sizes = {"seqlen_q": 70, "seqlen_k": 300, "head_dim": 64, "head_dim_v": 64, "heads": 2, "kv_heads": 2}
    case = draw_case(rng, "float16", set(), **sizes)
    mask = rng.random((1, 2, 1, 300)) < 0.7
    mask[:, 0, :, 128:256] = False
    case.arrays["mask"] = mask
    hide_nan(case)
    assert_gradients(gradients_of("bwd_4_wgmma", case), case.problem, **case.backward)


# The heads that share keys, and rows that see them, in parts: where dQ is added from registers, by copies and
# by two warpgroups for a part of the dims each; sequences packed, with unused keys, and of one length.
PARTED = [
    ("bwd_4_wgmma", (64, 40), {"head_parts": 4}, {"packed", "seqused_k", "causal", "dlse", "dropout"}),
    ("bwd_4_wgmma", (72, 128), {"head_parts": 2, "block_m": 80}, {"seqused_k", "dsink"}),
    ("bwd_5_wgmma_wide", (72, 136), {"head_parts": 2}, {"packed", "window", "deterministic"}),
    ("bwd_5_wgmma_wide", (192, 192), {"head_parts": 2}, {"seqused_k", "mask", "dsink"}),
    ("bwd_4_wgmma", (64, 64), {"head_parts": 2, "row_parts": 2}, {"packed", "causal", "deterministic"}),
    ("bwd_4_wgmma", (128, 96), {"row_parts": 3}, {"mask", "causal", "dlse", "dsink"}),
    (
        "bwd_5_wgmma_wide",
        (136, 192),
        {"head_parts": 4, "row_parts": 2},
        {"window", "alibi_slopes", "dropout"},
    ),
    ("bwd_5_wgmma_wide", (328, 264), {"head_parts": 2, "row_parts": 2}, {"packed", "causal"}),
    ("bwd_8_wgmma_pair", (256, 192), {"head_parts": 2, "row_parts": 2}, {"packed", "causal", "dsink"}),
    ("bwd_8_wgmma_pair", (72, 136), {"head_parts": 4}, {"window", "alibi_slopes", "dlse", "deterministic"}),
]


@pytest.mark.parametrize(("kernel", "dims", "tiles", "features"), PARTED)
def test_heads_in_parts(rng, kernel, dims, tiles, features):
    lengths = {"seqlen_q": 150, "seqlen_k": 140, "heads": 4, "kv_heads": 1}
    case = draw_case(rng, "bfloat16", features, **lengths, head_dim=dims[0], head_dim_v=dims[1])
    hide_nan(case)
    assert_gradients(gradients_of(kernel, case, tiles=tiles), case.problem, **case.backward)


@pytest.mark.parametrize(("kernel", "dtype", "dims"), BACKWARDS)
def test_keys_before_the_window(rng, kernel, dtype, dims):
    """No query sees the first tiles of keys. A block takes all keys of a head, one tile after the other."""
    sizes = {"seqlen_q": 70, "seqlen_k": 420, "head_dim": dims[0], "head_dim_v": dims[1], **HEADS}
    case = draw_case(rng, dtype, set(), **sizes)
    case.numbers["window"] = (60, 0)
    gradients = gradients_of(kernel, case, device=dataclasses.replace(DEVICE, sm_count=1))
    assert_gradients(gradients, case.problem, **case.backward)


@pytest.mark.parametrize(("kernel", "dtype", "dims"), BACKWARDS)
def test_packed_sequences_that_blocks_have_alone(rng, kernel, dtype, dims):
    """Sequences without keys or without queries stand between others; one has more keys than the plan knows.

    Features in turn: compiling takes most of the time.
    """
    turn = BACKWARDS.index((kernel, dtype, dims))
    sizes = {"head_dim": dims[0], "head_dim_v": dims[1]} | HEADS
    case = packed_case(rng, dtype, 5, [64, 70, 0, 193, 1, 130], [60, 0, 50, 30, 300, 1], **sizes)
    case.numbers["causal"] = turn % 2 == 0
    if turn % 3 == 0:
        case.arrays["seqused_k"] = np.array([41, 0, 50, 0, 150, 1], np.int32)
    gradients = gradients_of(kernel, case, max_seqlen_k=64, device=dataclasses.replace(DEVICE, sm_count=4))
    assert_gradients(gradients, case.problem, **case.backward)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(("kernel", "dtype", "dims"), BACKWARDS)
def test_windows_of_several_tiles(rng, kernel, dtype, dims, number):
    """Each tile of queries has first keys that set its sums and last ones that round it, of several tiles.

    Features and lengths in turn: compiling takes most of the time.
    """
    turn = 2 * BACKWARDS.index((kernel, dtype, dims)) + number
    features = [(), ("deterministic",), ("packed", "seqused_k")][turn % 3]
    sizes = [(270, 270), (200, 400), (400, 150)][turn // 3 % 3]
    lengths = dict(zip(("seqlen_q", "seqlen_k"), sizes, strict=True))
    lengths["batch"] = 2 if "packed" in features else 1
    case = draw_case(rng, dtype, features, **lengths, head_dim=dims[0], head_dim_v=dims[1], **HEADS)
    for window in ((100, 0), (64, 64), (0, 200)):
        case.numbers["window"] = window
        assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)


# Keys of which only the kernel knows how many there are, in parts: fewer tiles than parts, none, many.
VARIED_PARTS = [
    ((64, 40), 4, {"packed", "causal", "sink"}),
    ((128, 128), 3, {"packed", "seqused_k", "softcap"}),
    ((72, 64), 2, {"seqused_k", "causal"}),
    ((128, 96), 4, {"block_table", "causal"}),
    ((64, 64), 2, {"block_table", "packed", "causal", "sink"}),
    ((192, 192), 3, {"block_table"}),
    ((64, 64), 8, {"block_table", "causal"}),
]


@pytest.mark.parametrize(("dims", "parts", "features"), VARIED_PARTS)
def test_keys_in_parts(rng, dims, parts, features):
    lengths = {**HEADS, "seqlen_q": 150, "seqlen_k": 700, "head_dim": dims[0], "head_dim_v": dims[1]}
    case = draw_case(rng, "bfloat16", features, page_sizes=HOPPER_PAGE_SIZES, **lengths)
    for hidden in (False, True):
        if hidden:
            hide_nan(case)
        options = {"kernel": "fwd_6_wgmma", "tiles": {"key_parts": parts}, "device": DEVICE}
        inputs = case.problem.q, case.problem.k, case.problem.v
        with np.errstate(invalid="ignore"):
            out, lse = calls.attention(*inputs, **options, **case.emulator_forward)
            assert_attention(out, lse, case.problem, **case.forward)


# The sequences, heads and rows of a bias that the copy engine can bring, and what else there is. With more
# than 64 head dims fwd_6 and bwd_4 read it from memory.
BOXED = [
    ("fwd_6_wgmma", "bfloat16", (64, 40), (2, 2, 150), {"causal"}),
    ("fwd_6_wgmma", "float16", (72, 128), (1, 2, 150), {"packed", "softcap"}),
    ("fwd_6_wgmma", "bfloat16", (40, 64), (2, 1, 1), {"mask", "window"}),
    ("fwd_6_wgmma", "float16", (48, 64), (1, 2, 150), {"packed", "softcap"}),
    ("bwd_4_wgmma", "float16", (64, 40), (2, 2, 150), {"dlse"}),
    ("bwd_4_wgmma", "bfloat16", (56, 64), (1, 2, 150), {"packed", "causal", "softcap"}),
    ("bwd_4_wgmma", "bfloat16", (64, 64), (2, 1, 1), {"mask", "seqused_k"}),
    ("bwd_4_wgmma", "bfloat16", (72, 128), (1, 2, 150), {"packed", "causal", "softcap"}),
    ("bwd_4_wgmma", "bfloat16", (128, 64), (2, 1, 1), {"mask", "seqused_k"}),
    ("bwd_4_wgmma", "float16", (40, 32), (1, 1, 150), {"deterministic", "alibi_slopes", "dropout"}),
    ("bwd_5_wgmma_wide", "bfloat16", (72, 136), (2, 2, 150), {"packed", "window", "deterministic"}),
    ("bwd_5_wgmma_wide", "float16", (192, 192), (1, 2, 1), {"mask", "softcap", "dropout"}),
    ("bwd_5_wgmma_wide", "bfloat16", (136, 136), (2, 1, 150), set()),
    ("bwd_5_wgmma_wide", "float16", (392, 264), (1, 2, 150), {"packed", "softcap", "causal"}),
]


@pytest.mark.parametrize(("kernel", "dtype", "dims", "front", "features"), BOXED)
def test_bias_in_boxes(rng, kernel, dtype, dims, front, features):
    """Of rows whose first elements are aligned; -inf, and NaN where nothing is seen, are in there, too."""
    lengths = {"seqlen_q": 150, "seqlen_k": 136, **HEADS}
    case = draw_case(rng, dtype, features, **lengths, head_dim=dims[0], head_dim_v=dims[1])
    bias = rng.standard_normal((*front, lengths["seqlen_k"]))
    bias[rng.random(bias.shape) < 0.05] = -np.inf
    case.arrays["bias"] = bias.astype("bfloat16" if kernel != "bwd_5_wgmma_wide" else dtype)
    hide_nan(case)
    if kernel != "fwd_6_wgmma":
        assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)
        return
    inputs = case.problem.q, case.problem.k, case.problem.v
    with np.errstate(invalid="ignore"):
        found = calls.attention(*inputs, kernel=kernel, device=DEVICE, **case.emulator_forward)
        assert_attention(*found, case.problem, **case.forward)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("kernel", "dim"), [("fwd_6_wgmma", 64), ("fwd_10_wgmma_wide", 512)])
def test_bias_of_any_dtype(rng, kernel, dim, dtype):
    """Of keys that lie in pairs, and of an odd number of keys."""
    for seqlen_k in (136, 77):
        case = draw_case(
            rng, "bfloat16", (), seqlen_q=70, seqlen_k=seqlen_k, head_dim=dim, head_dim_v=dim, **HEADS
        )
        case.arrays["bias"] = rng.standard_normal((1, 2, 70, seqlen_k)).astype(dtype)
        inputs = case.problem.q, case.problem.k, case.problem.v
        found = calls.attention(*inputs, kernel=kernel, device=DEVICE, **case.emulator_forward)
        assert_attention(*found, case.problem, **case.forward)


@pytest.mark.parametrize("name", ["q", "dout"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("kernel", "dtype", "dim"),
    [
        ("bwd_2_flash_v2", "float64", 24),
        ("bwd_3_mma", "float16", 24),
        ("bwd_3_mma", "float32", 40),
        ("bwd_4_wgmma", "bfloat16", 64),
        ("bwd_5_wgmma_wide", "float16", 192),
        ("bwd_6_float32", "float32", 64),
        ("bwd_7_float32_wide", "float32", 192),
        ("bwd_8_wgmma_pair", "bfloat16", 192),
    ],
)
def test_nan_of_queries_reaches_no_key_that_is_not_used(rng, kernel, dtype, dim, packed, name):
    features = ["seqused_k", "packed"] if packed else ["seqused_k"]
    sizes = {"seqlen_q": 40, "seqlen_k": 150, "batch": 2, "head_dim": dim, "head_dim_v": dim, **HEADS}
    case = draw_case(rng, dtype, features, **sizes)
    case.arrays["seqused_k"][:] = 5, 70
    x = getattr(case.problem, name)
    x.reshape(-1, *x.shape[-2:])[len(x) // 2 if packed else 7, 1, 3] = np.nan
    assert_gradients(gradients_of(kernel, case), case.problem, **case.backward)


def gradients_of(kernel, case, *, device=DEVICE, **options):
    """Those of a kernel, from the output and the LSE of the reference."""
    problem, name = case.problem, case.problem.dtype_name
    inputs = problem.q, problem.k, problem.v
    with np.errstate(all="ignore"):
        out, lse = reference.attention(*inputs, dtype=judge(name), **case.forward)
        out, lse = out.astype(name), lse.astype(accumulator_dtype(name))
        return calls.attention_backward(
            problem.dout, *inputs, out, lse, kernel=kernel, device=device, **options, **case.emulator_backward
        )


@pytest.mark.parametrize(("kernel", "head_dim"), [("bwd_4_wgmma", 64), ("bwd_5_wgmma_wide", 160)])
@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_keys_of_no_weight(rng, kernel, head_dim, sign):
    """Such a key's value has the gradient 0; its own gradient is lost."""
    case = draw_case(rng, "float16", ("causal",), seqlen_q=70, seqlen_k=70, head_dim=head_dim)
    case.problem.k[:, 60, :, 5] = sign * np.inf
    case.problem.q[..., 5] = -sign * (0.1 + np.abs(case.problem.q[..., 5]))
    _, _, dv, *_ = gradients_of(kernel, case)
    with np.errstate(all="ignore"):
        expected = reference.attention_backward(
            case.problem.dout, case.problem.q, case.problem.k, case.problem.v, **case.forward
        )[2]
    np.testing.assert_allclose(dv.astype(np.float64), expected, atol=2e-2)
    assert (dv[:, 60] == 0).all()


# What keeps the output of an infinite query finite: a sink beside scores of -inf, or a bound on scores.
BOUNDED = {
    "sink": ("causal", "sink", "dsink"),
    "softcap": ("causal", "softcap", "dlse"),
    "score_mod": ("causal",),
}


@pytest.mark.parametrize(
    ("kernel", "dtype", "dims", "bound"),
    [
        ("bwd_3_mma", "float16", (64, 64), "sink"),
        ("bwd_3_mma", "bfloat16", (64, 64), "softcap"),
        *(("bwd_4_wgmma", "float16", (64, 64), bound) for bound in BOUNDED),
        ("bwd_4_wgmma", "bfloat16", (192, 128), "sink"),
        ("bwd_5_wgmma_wide", "bfloat16", (160, 160), "sink"),
        ("bwd_5_wgmma_wide", "bfloat16", (264, 264), "softcap"),
        ("bwd_8_wgmma_pair", "bfloat16", (160, 160), "sink"),
    ],
)
def test_an_infinite_query_of_finite_output(rng, kernel, dtype, dims, bound):
    """Also where a mask cuts through its tile, only its gradient and those of the keys it sees are lost."""
    sizes = {"seqlen_q": 70, "seqlen_k": 140, "head_dim": dims[0], "head_dim_v": dims[1], **HEADS}
    case = draw_case(rng, dtype, BOUNDED[bound], batch=1, **sizes)
    if bound == "score_mod":
        case.numbers["score_mod"] = ScoreMod(lambda score, b, h, q_idx, kv_idx: 4 * np.tanh(score / 4))
    problem, row = case.problem, 40
    problem.q[:, row, :, 5] = np.inf
    problem.k[..., 5] = -np.abs(problem.k[..., 5]) - 0.1
    dq, dk, dv, *dsink = gradients_of(kernel, case)
    seen = row + 140 - 70 + 1
    with np.errstate(all="ignore"):
        rules = {name: value for name, value in case.backward.items() if not name.startswith("return_")}
        exact = reference.attention_backward(problem.dout, problem.q, problem.k, problem.v, **rules)
        assert not np.isfinite(exact[1][:, :seen, :, 5]).any()
        assert not np.isfinite(dk[:, :seen, :, 5]).any()
        for x, lost, right in ((dq, np.s_[:, row], exact[0]), (dk, np.s_[:, :seen], exact[1])):
            x[lost] = right[lost]
        assert_gradients((dq, dk, dv, *dsink), problem, **case.backward)
