"""Head dims over 256 on Hopper: plans, and what the compiler makes of the kernel. None of it needs a GPU."""

import re
from dataclasses import replace

import numpy as np
import pytest

import cufa
from cufa import jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.plan.rungs import PRICES
from cufa.plan.shares import TILE_IN_KEYS
from cufa.problem import FLOAT8, HEADS_OF_TILE, Features, Problem
from cufa.tensor_layout import layout_of, with_queries_as_heads

H200 = Device.of("sm_90a")
NAME = "fwd_10_wgmma_wide"
# Multi-head latent attention, whose values are the beginnings of keys.
LATENT = Problem("forward", "bfloat16", 32, 1, 8192, 128, 1, 576, 512, values_in_keys=True)
LATENT_8_BITS = replace(LATENT, kv_dtype=FLOAT8)
FEATURES = {
    "nothing": Features(),
    "window": Features(window=(100, 0)),
    "softcap and alibi": Features(softcap=True, alibi=True),
    "bias": Features(bias=(2, 8, 4096, 4096), bias_dtype="float32"),
    "dropout and sink": Features(dropout=True, sink=True),
    "packed": Features(packed=True),
    "pages": Features(page_size=16, seqused_k=True),
    "lengths": Features(seqused_k=True),
}


def problem(head_dim=512, value_dim=None, causal=False, seqlen=4096, heads=(8, 8), features=None):
    return Problem(
        *("forward", "bfloat16", 2, seqlen, seqlen, *heads, head_dim, value_dim or head_dim, causal),
        features=features or Features(),
    )


DIMS = [((512, 512), True), ((320, 320), False), ((64, 512), True)]


# Each of the features with two of the dims.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("features", "dims", "causal"),
    [
        (features, *DIMS[(i + further) % len(DIMS)])
        for i, features in enumerate(FEATURES)
        for further in (0, 1)
    ],
)
def test_no_spill_and_no_product_in_series(features, dims, causal):
    call = problem(*dims, causal and features != "window", features=FEATURES[features])
    assert jit.build(make_plan(call, H200, NAME).variant).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiles", [{"key_parts": 1}, {"key_parts": 2}, {"shares": 66}])
@pytest.mark.parametrize("features", ["nothing", "pages", "lengths"])
def test_no_spill_of_latent_attention(features, tiles):
    call = replace(LATENT, features=FEATURES[features])
    assert jit.build(make_plan(call, H200, NAME, tiles).variant).warnings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FLOAT8])
@pytest.mark.parametrize("features", ["nothing", "window", "softcap and alibi", "packed", "pages"])
def test_no_spill_of_latents_in_8_bits(features, dtype):
    of_keys = None if dtype == FLOAT8 else FLOAT8
    call = replace(LATENT, dtype=dtype, kv_dtype=of_keys, features=FEATURES[features])
    assert jit.build(make_plan(call, H200, NAME).variant).warnings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(257, 257), (264, 8), (8, 264), (576, 512), (384, 448)])
def test_any_dims_fit(head_dim, value_dim, features):
    plan = make_plan(problem(head_dim, value_dim, features=FEATURES[features]), H200, NAME)
    assert plan.launches[0].smem_bytes <= H200.smem_per_block
    assert set(jit.build(plan.variant).resources) == set(KERNELS[NAME].entries)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (problem(512), NAME),
        (problem(320, causal=True, heads=(8, 2)), NAME),
        (problem(256), "fwd_6_wgmma"),
        (problem(512, features=Features(mask=(1, 1, 1, 4096))), "fwd_5_mma"),
        (replace(problem(512), align_bytes=8), "fwd_5_mma"),
        (replace(problem(512, heads=(8, 1)), seqlen_q=1), "fwd_8_split_kv"),
        (LATENT, NAME),
        (replace(LATENT, heads=16), "fwd_8_split_kv"),
        (replace(LATENT, batch=1), NAME),
        (LATENT_8_BITS, NAME),
        (replace(LATENT_8_BITS, heads=16), "fwd_8_split_kv"),
        (replace(LATENT_8_BITS, batch=1), NAME),
        (replace(LATENT_8_BITS, seqlen_q=4096, heads=8, causal=True), NAME),
        (replace(LATENT_8_BITS, values_in_keys=False), "fwd_8_split_kv"),
        (replace(LATENT, dtype=FLOAT8), NAME),
        (replace(LATENT, dtype=FLOAT8, heads=16), "fwd_8_split_kv"),
        (replace(LATENT, batch=2, seqlen_k=1000, features=Features(seqused_k=True)), NAME),
    ],
)
def test_which_calls_it_gets(call, kernel):
    assert make_plan(call, H200).kernel == kernel


def test_keys_are_read_once_if_values_are_in_them():
    apart = replace(LATENT, values_in_keys=False)
    plans = [make_plan(call, H200, NAME) for call in (LATENT, apart)]
    assert [plan.tiles["block_n"] for plan in plans] == [64, 32]
    assert "values are the beginnings of keys, which alone are read" in str(plans[0])
    prices = [PRICES[NAME](call, H200) for call in (LATENT, apart)]
    assert prices[0] <= prices[1]


def test_many_parts_have_a_launch_that_merges_them():
    """Not under a causal mask, where tiles see different numbers of keys."""
    call = replace(LATENT, batch=1)
    in_pages = replace(call, features=Features(page_size=64, seqused_k=True))
    for same in (call, in_pages):
        plan = make_plan(same, H200, NAME, {"key_parts": 9})
        # For each of two tiles of 64 heads, 16 of its rows and eight columns of 512
        assert [(each.entry, each.grid) for each in plan.launches] == [
            (NAME, 18),
            ("merge_parts", 2 * 4 * 512 // 8),
        ]
        assert [(each.name, each.shape) for each in plan.scratch] == [("parts", (18, 64 * (512 + 2)))]
    full = replace(problem(512), batch=H200.sm_count, seqlen_q=64, heads=1, kv_heads=1)
    assert [each.entry for each in make_plan(full, H200, NAME, {"key_parts": 9}).launches] == [NAME]
    causal = problem(512, causal=True, seqlen=512)
    for other, parts in [(call, 4), (causal, 5), (causal, 16)]:
        plan = make_plan(other, H200, NAME, {"key_parts": parts})
        assert [each.entry for each in plan.launches] == ["clear_counts", NAME]
    with pytest.raises(ValueError, match="17 parts are more than one block merges, 16"):
        make_plan(causal, H200, NAME, {"key_parts": 17})


# Calls of latent attention, and how many shares their keys have.
SHARES = [
    ({"features": Features(seqused_k=True)}, 66),  # of two tiles of 64 heads each, for 132 SMs
    ({"features": Features(page_size=64, seqused_k=True), "seqlen_q": 3, "causal": True}, 22),
    ({"features": Features(seqused_k=True), "batch": 8, "seqlen_k": 500}, 64),  # no more than tiles of keys
    ({"features": Features(seqused_k=True), "batch": 1}, 1),  # many parts are as good
    ({"features": Features(seqused_k=True), "batch": 64, "seqlen_k": 1000}, 1),  # merging would take longer
    ({"features": Features(page_size=64)}, 1),  # the lengths are known, and two parts are as good
    ({"batch": 40}, 66),  # 80 tiles cannot be split evenly
    ({"batch": 66}, 1),
    ({"features": Features(packed=True)}, 1),
    ({"features": Features(seqused_k=True), "seqlen_q": 128, "causal": True}, 1),
    ({"features": Features(seqused_k=True), "seqlen_q": 70}, 1),  # 140 tiles see the same keys
]


@pytest.mark.parametrize(("change", "shares"), SHARES)
def test_shares_keep_all_busy_whatever_the_lengths(change, shares):
    assert make_plan(replace(LATENT, **change), H200, NAME).tiles["shares"] == shares


def test_the_plan_counts_as_many_rounds_without_keys_as_the_kernel():
    text = (jit.KERNELS / "hopper" / "forward" / "share_walk.cuh").read_text()
    assert re.findall(r"kTileInKeys = (\d+);", text) == [str(TILE_IN_KEYS)]


def test_shares_have_a_launch_that_merges_them():
    plan = make_plan(replace(LATENT, features=Features(seqused_k=True)), H200)
    assert [(each.entry, each.grid) for each in plan.launches] == [(NAME, 132), ("merge_parts", 8 * 132)]
    assert [(each.name, each.shape) for each in plan.scratch] == [
        ("tiles to merge", (132, 64 // 4)),
        ("parts", (2 * 132, 64 * (512 + 2))),
    ]
    assert "keys in 66 equal shares" in str(plan)
    for change, message in [
        ({"features": Features(packed=True)}, "keys are not shared out packed"),
        ({"seqlen_q": 128, "causal": True}, "keys are not shared out under a causal mask"),
        ({"features": Features(window=(9, 9))}, "keys are not split under a window"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(replace(LATENT, **change), H200, NAME, {"shares": 9})


def test_tiles_that_it_cannot_have():
    for tiles, message in [
        ({"block_m": 128}, "block_m must be 64"),
        ({"query_stages": 2}, "query_stages must be 1"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"key_parts": 129}, "key_parts must be 1 to 128"),
        ({"key_parts": 2, "shares": 9}, "key_parts and shares cannot both be over 1"),
        ({"block_n": 48}, "232,448 bytes"),
        ({"store_cols": 192}, "store_cols must divide 256"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(problem(512), H200, NAME, tiles)


def test_parts_of_more_keys_than_can_be_counted():
    call = Problem("forward", "bfloat16", 1, 1, 2**30, 1, 1, 512, 512, features=Features(page_size=64))
    assert make_plan(call, H200, NAME).tiles["key_parts"] == 63
    with pytest.raises(ValueError, match="tiles of keys and parts, multiplied, are counted only up to"):
        make_plan(call, H200, NAME, {"key_parts": 64})
    paged = Features(packed=True, page_size=64, seqused_k=True)
    two = replace(call, batch=2, seqlen_q=2, seqlen_k=2**31, features=paged)  # of both together
    assert make_plan(two, H200, NAME, {"key_parts": 63}).tiles["key_parts"] == 63


def test_more_keys_than_can_be_counted_are_not_shared_out():
    """A tile of queries counts as three further tiles of keys."""
    paged = Features(page_size=64, seqused_k=True)
    call = replace(LATENT, batch=2**13, seqlen_k=64 * (2**18 - 4), features=paged)
    assert make_plan(call, H200, NAME, {"shares": 9}).tiles["shares"] == 9
    longer = replace(call, seqlen_k=call.seqlen_k + 1)
    assert make_plan(longer, H200, NAME).tiles["shares"] == 1
    with pytest.raises(ValueError, match="tiles of keys are counted only up to 2,147,483,647"):
        make_plan(longer, H200, NAME, {"shares": 9})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"values_in_keys": False}, "only if v is the first columns of k"),
        ({"head_dim": 568}, "multiple of 16, not 568"),
        ({"features": Features(dropout=True)}, "only without dropout_p"),
        ({"features": Features(mask=(1, 1, 1, 8192))}, "does not support mask"),
    ],
)
def test_latents_in_8_bits_that_it_does_not_support(change, reason):
    with pytest.raises(ValueError, match=reason):
        make_plan(replace(LATENT_8_BITS, **change), H200, NAME)


def test_tiles_of_latents_in_8_bits():
    assert make_plan(LATENT_8_BITS, H200).tiles["block_n"] == 64
    with pytest.raises(ValueError, match="block_n must be a multiple of 32 with keys in float8_e4m3fn"):
        make_plan(LATENT_8_BITS, H200, NAME, {"block_n": 48})


# ---- heads as queries ----


def test_heads_of_few_queries_are_rows():
    call = replace(LATENT, seqlen_q=3, causal=True)
    turned = call.with_queries_as_heads
    assert (turned.seqlen_q, turned.heads, turned.causal, turned.ends_by_head) == (128, 3, False, True)
    assert turned.queries_as_heads
    assert turned.with_queries_as_heads is turned
    assert not replace(call, seqlen_q=1).with_queries_as_heads.ends_by_head  # it sees all keys
    plan = make_plan(call, H200)
    assert (plan.kernel, plan.problem) == (NAME, turned)
    assert "forward bfloat16 causal, batch 32, seqlen 128 x 8192, heads 3/1, head dim 576/512" in str(plan)
    assert "values in keys, heads as queries" in str(plan)
    for other in (
        {"seqlen_q": 0},
        {"seqlen_q": HEADS_OF_TILE},
        {"heads": HEADS_OF_TILE - 1},
        {"kv_heads": 2},
        {"features": Features(window=(5, 0))},
    ):
        same = replace(call, **other)
        assert same.with_queries_as_heads is same


def test_the_layout_of_queries_as_heads():
    storage = ((3, 2, 130, 64), (1000 * 130, 7, 1000, 2))
    layout = layout_of((storage,) * 4, 2, (0, 1, 2))
    turned = with_queries_as_heads(layout)
    (_, batch, row, head), keys = layout.places[:4], layout.places[4:12]
    assert turned.places[:4] == turned.places[12:] == (0, batch, head, row)
    assert turned.places[4:12] == keys


def test_the_plan_says_so():
    q, k = (np.empty((8, n, heads, 576), np.float16) for n, heads in ((1, 128), (8192, 1)))
    plan = cufa.plan(q, k, k[..., :512], arch="sm_90a")
    assert plan.kernel == NAME
    assert "seqlen 128 x 8192, heads 1, head dim 576/512, values in keys, heads as queries" in str(plan)


def test_values_are_in_keys_only_if_each_is_the_beginning_of_its_key():
    q, memory = np.empty((2, 1, 8, 64), np.float16), np.empty((2, 256, 1, 128), np.float16)
    k, rows = memory[:, :128, :, :64], memory.reshape(2, 512, 1, 64)
    for v, in_keys in (
        (k, True),
        (k[..., :32], True),
        (k[..., 32:], False),
        (memory[:, :128], False),  # wider than keys
        (rows[:, :128], False),  # in the same place, but closer together
        (k.copy(), False),
    ):
        assert cufa.plan(q, k, v, arch="sm_90a").problem.values_in_keys == in_keys, v.shape
