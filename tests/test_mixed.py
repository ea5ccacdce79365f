"""Plans of two kernels: whose calls get them, what each leaves out, in what order they are launched."""

from dataclasses import replace

import numpy as np
import pytest

import cufa
from cufa import jit
from cufa.device import Device
from cufa.plan import fwd_6_tiles, make_plan, mixed
from cufa.plan.tile_sizes import sizes_of
from cufa.problem import Features, Problem

H200 = Device.of("sm_90a")
# A chunk of a prompt beside sequences that decode.
PAGED = Features(packed=True, seqused_k=True, page_size=16)
CALL = Problem("forward", "bfloat16", 64, 1087, 64 * 8192, 32, 8, 128, 128, causal=True, features=PAGED)


def call(tokens, batch, keys, **changes):
    return replace(CALL, seqlen_q=tokens, batch=batch, seqlen_k=batch * keys, **changes)


def limits(plan):
    macros = dict(plan.macros)
    return macros["LEAST_QUERIES"], macros["MOST_QUERIES"]


@pytest.mark.parametrize("batch", [64, 256, 1024, 4096])
@pytest.mark.parametrize("keys", [32768, 131072, 1048576])
@pytest.mark.parametrize("prompts", [1, 3, 20, 100])
def test_long_prompts_beside_decoding_from_large_caches(batch, keys, prompts):
    """There is a plan, however many keys the pages have room for in all."""
    assert make_plan(call(batch + 4000 * prompts, batch, keys), H200).launches


@pytest.mark.parametrize(
    ("tokens", "batch", "keys", "launches"),
    [
        (1024 + 63, 64, 8192, ["fwd_8_split_kv", "fwd_6_wgmma", "merge_parts"]),
        (512 + 255, 256, 2048, ["fwd_8_split_kv", "fwd_6_wgmma"]),
        (4096 + 15, 16, 8192, ["fwd_8_split_kv", "fwd_6_wgmma", "merge_parts"]),
    ],
)
def test_prompts_beside_decoding_get_two_kernels(tokens, batch, keys, launches):
    plan = make_plan(call(tokens, batch, keys), H200)
    assert [launch.entry for _, launch in plan.in_order] == launches
    assert [launch.overlaps for _, launch in plan.in_order] == [False, True, True][: len(launches)]
    assert limits(plan) == (0, mixed.MANY_QUERIES - 1)
    assert limits(plan.beside) == (mixed.MANY_QUERIES, 0)
    assert plan.beside.workspace_bytes == 0
    assert "fwd_8_split_kv for sequences of fewer than 16 queries" in str(plan)
    assert str(plan.beside) in str(plan)


def test_a_launch_that_looks_at_a_mask_runs_beside_no_other():
    """It waits for nothing, so what comes after it could not know when the first launch has ended."""
    masked = call(4096 + 63, 64, 4096, features=replace(PAGED, mask=(1, 1, 1, 4096)), max_seqlen_q=4096)
    plan = make_plan(masked, H200)
    launches = {launch.entry: launch.overlaps for _, launch in plan.in_order}
    assert list(launches)[:3] == ["fwd_8_split_kv", "seen_tiles", "fwd_6_wgmma"]
    assert not launches["seen_tiles"]
    assert "one after the other" in str(plan)


@pytest.mark.parametrize(
    "problem",
    [
        call(64, 64, 8192),
        call(128, 32, 8192),
        call(22000, 64, 1024),
        call(8192, 1, 8192),
        call(0, 4, 8192),
        replace(CALL, features=replace(PAGED, page_size=0)),
        replace(CALL, features=replace(PAGED, dropout=True)),
        replace(CALL, features=replace(PAGED, page_size=4)),
        replace(CALL, batch=64, seqlen_q=17, seqlen_k=8192, features=Features()),
        replace(CALL, dtype="float32"),
        replace(CALL, seqlen_k=0),
        call(32 * 8, 32, 4096, max_seqlen_q=8),
        call(32 * 17, 32, 4096, max_seqlen_q=17),
        call(512, 64, 8192, max_seqlen_q=15),
    ],
    ids=[
        *("decoding", "drafts", "prompts", "one sequence", "no queries", "no pages", "dropout"),
        *("pages of which boxes do not consist", "not packed", "float32", "no keys"),
        *("all as short as the longest", "all as long as the longest", "none long"),
    ],
)
def test_others_get_one(problem):
    assert make_plan(problem, H200).beside is None


def test_no_sequences():
    q, pages = np.empty((64, 4, 64), np.float16), np.empty((10, 16, 4, 64), np.float16)
    none = {"cu_seqlens_q": np.zeros(1, np.int32), "block_table": np.empty((0, 5), np.int32)}
    assert cufa.plan(q, pages, pages, arch="sm_90a", **none).beside is None


def test_a_call_says_how_many_queries_its_longest_sequence_has():
    q, pages = np.empty((32 * 17, 32, 128), np.float16), np.empty((1, 16, 8, 128), np.float16)
    table, starts = np.empty((32, 256), np.int32), np.empty(33, np.int32)
    given = {"block_table": table, "cu_seqlens_q": starts, "causal": True, "arch": "sm_90a"}
    plans = [cufa.plan(q, pages, pages, max_seqlen_q=most, **given) for most in (None, 17)]
    assert [plan.beside is None for plan in plans] == [False, True]


def test_how_many_have_many_queries_if_the_longest_is_known():
    unknown, known = (mixed.mix_of(call(1600, 64, 8192, max_seqlen_q=most), H200) for most in (None, 500))
    assert unknown.many.batch == 1
    assert known.many.batch == 4
    assert known.many.seqlen_q <= 500


def test_tiles_are_the_fastest_without_parts_of_keys():
    few_heads = call(1000, 4, 2000, heads=8, kv_heads=1, head_dim=64, value_dim=64, causal=False)
    known_lengths = mixed.alike(few_heads, 1, 997)
    assert fwd_6_tiles.fastest_tiles(known_lengths, H200, frozenset())[0].key_parts > 1
    many = mixed.mix_of(few_heads, H200).many
    beside = replace(many, features=replace(many.features, least_queries=mixed.MANY_QUERIES))
    expected, _ = fwd_6_tiles.fastest_tiles(beside, H200, frozenset())
    assert make_plan(few_heads, H200).beside.tiles == sizes_of(expected)
    assert expected.key_parts == 1


def test_who_asks_for_a_kernel_or_tiles_gets_one():
    assert make_plan(CALL, H200, "fwd_6_wgmma").beside is None
    assert make_plan(CALL, H200, tiles={"block_n": 32}).beside is None
    assert make_plan(CALL, Device.of("sm_80")).beside is None


def test_many_blocks_or_half_of_the_sms():
    """Half where the others would wait for longer than it takes, and where there are surely many queries."""
    halved, whole = (make_plan(call(*sizes), H200) for sizes in ((1087, 64, 8192), (767, 256, 2048)))
    assert halved.tiles["shares"] == H200.sm_count // 2
    assert halved.launches[0].block > whole.launches[0].block
    assert whole.launches[0].grid > 2 * H200.sm_count


def test_keys_of_few_sequences_are_not_split_beside_another_launch():
    plan = make_plan(call(513, 2, 2048), H200)
    assert plan.beside is not None
    assert plan.tiles["key_parts"] == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_does_not_spill(head_dim):
    plan = make_plan(replace(CALL, head_dim=head_dim, value_dim=head_dim), H200)
    for each in plan.and_beside:
        assert jit.build(each.variant).warnings == ()
