"""Planning for every known GPU: what is planned fits, covers every row, and is explained."""

import functools
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerance import DTYPES

from cufa import kernels
from cufa.device import KNOWN, Arch, Device
from cufa.integers import ceil_div, round_up
from cufa.kernels import KERNELS
from cufa.messages import counted
from cufa.plan import Launch, Plan, make_plan, rungs, tiled
from cufa.plan.companions import softmax_launches
from cufa.plan.record import MAX_GRID
from cufa.plan.rungs import PRICES
from cufa.plan.struct_sizes import shared_matrix_bytes
from cufa.plan.suited import unsuited
from cufa.plan.tiled import Tiles
from cufa.problem import Direction, Features, Problem

ARCHS = [str(device.arch) for device in KNOWN.values()]
NAIVE = ["fwd_1_naive", "fwd_2_online_softmax", "bwd_1_naive"]
TILED = ["fwd_3_flash_v1", "fwd_4_flash_v2", "bwd_2_flash_v2"]
SOME_TILES = {"block_m": 64, "block_n": 64, "threads": 128, "lanes": 8}
CANDIDATES = {
    "fwd_3_flash_v1": tiled.FLASH_V1_TILES,
    "fwd_4_flash_v2": tiled.FLASH_V2_TILES,
    "bwd_2_flash_v2": tiled.BACKWARD_TILES,
}

# (head_dim, value_dim): around every multiple of a vector, a warp and a tile, then unequal ones.
EQUAL_DIMS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 100, 112]
EQUAL_DIMS += [127, 128, 129, 144, 160, 176, 192, 200, 224, 240, 255, 256]
UNEQUAL_DIMS = [(1, 256), (256, 1), (8, 256), (256, 8), (33, 65), (64, 128), (192, 128), (129, 255)]
HEAD_DIMS = [(dim, dim) for dim in EQUAL_DIMS] + UNEQUAL_DIMS


# Rows of keys of the Hopper backward's tiles, 64 of them for each warpgroup or for two; blocks of a cluster.
HOPPER_BACKWARD_KEYS = {"bwd_4_wgmma": 128, "bwd_5_wgmma_wide": 64, "bwd_8_wgmma_pair": 128}
CLUSTERS = {"bwd_8_wgmma_pair": 2}
# What the workspace of these has, whatever the lengths, if keys are split.
HOPPER_FORWARDS, FORWARD_COUNT = ("fwd_6_wgmma", "fwd_7_fp8"), {"tiles taken": (4,)}
# Of sums of two halves.
IN_HALVES = ("fwd_9_float32", "bwd_6_float32", "bwd_7_float32_wide")
# What the workspace of a backward has, whatever the lengths, whose blocks stay for many tiles.
HOPPER_COUNT = {"bwd_4_wgmma": {"tiles of keys taken": (1,)}}


def rounds_dq(plan: Plan) -> bool:
    """Whether the last block to add to a tile of dQ writes it."""
    return bool(macros_of(plan)["ROUNDS"])


# Keys or heads that are in parts, for which there is a workspace.
IN_PARTS = {
    **{kernel: {"key_parts": 2, "block_m": 128, "blocks_per_sm": 1} for kernel in HOPPER_FORWARDS},
    "fwd_8_split_kv": {"key_parts": 2},
    "fwd_10_wgmma_wide": {"key_parts": 2},
    **{kernel: {"head_parts": 2} for kernel in HOPPER_BACKWARD_KEYS},
}


def dim_for(kernel: str, dim: int) -> int:
    """The dim, for a kernel that takes any; else as far beyond the narrowest that the kernel takes."""
    return dim + KERNELS[kernel].min_head_dim - 1


def problem_for(
    kernel: str,
    dtype: str | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seqlen_q: int = 300,
    seqlen_k: int = 400,
    causal: bool = False,
) -> Problem:
    """A problem of the kernel's direction, in float32 if it has that, with head dims that it takes."""
    dtypes = KERNELS[kernel].dtypes
    head_dim = dim_for(kernel, 64) if head_dim is None else head_dim
    return Problem(
        direction=KERNELS[kernel].direction,
        dtype=dtype or ("float32" if "float32" in dtypes else dtypes[0]),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        causal=causal,
    )


def supported(kernel: str, arch: str) -> bool:
    return KERNELS[kernel].unsupported(problem_for(kernel), Device.of(arch)) is None


# Each kernel with each GPU that it can run on, and with each of its dtypes.
KERNELS_ON_GPUS = [(kernel, arch) for kernel in KERNELS for arch in ARCHS if supported(kernel, arch)]
KERNELS_IN_DTYPES = [(kernel, dtype) for kernel in KERNELS for dtype in KERNELS[kernel].dtypes]


def dtype_for(kernel: str, wanted: str) -> str:
    """A dtype that a kernel supports, the one that is wanted if it can be."""
    dtypes = KERNELS[kernel].dtypes
    return wanted if wanted in dtypes else dtypes[0]


def plan_of(kernel: str, arch: str = "sm_90a", tiles: dict[str, Any] | None = None, **options: Any) -> Plan:
    return make_plan(problem_for(kernel, **options), Device.of(arch), kernel, tiles)


def macros_of(plan: Plan) -> dict[str, str | int | bool]:
    macros = dict(plan.macros)
    assert len(macros) == len(plan.macros), "a macro is defined twice"
    return macros


def misfit(plan: Plan) -> str | None:
    """Why the tiles of a tiled kernel's plan cannot be compiled, if so."""
    tiles = Tiles(**plan.tiles)
    if plan.kernel.startswith("bwd") and tiles.block_n % tiles.thread_rows:
        return "the backward shares out a tile's keys among the rows of threads"
    return tiles.misfit()


# --- every GPU, dtype, head dim and kernel --------------------------------------------------------


@pytest.mark.parametrize(("kernel", "arch"), KERNELS_ON_GPUS)
def test_there_is_a_plan_that_fits(kernel: str, arch: str) -> None:
    device = Device.of(arch)
    max_dim = KERNELS[kernel].max_head_dim
    dims = [pair for pair in HEAD_DIMS if max(pair) <= max_dim]
    for dtype, (head_dim, value_dim) in itertools.product(KERNELS[kernel].dtypes, dims):
        problem = problem_for(kernel, dtype, head_dim, value_dim)
        if KERNELS[kernel].unsupported(problem, device):
            continue
        plan = make_plan(problem, device, kernel)
        assert (plan.kernel, plan.device, plan.variant.arch) == (kernel, device, device.arch)
        launched = {launch.entry: launch for launch in plan.launches}
        assert list(launched) == [entry for entry in KERNELS[kernel].entries if entry in launched]
        for launch in plan.launches:
            assert 0 < launch.grid <= MAX_GRID
            assert 0 <= launch.smem_bytes <= device.smem_per_block
            assert launch.block % 32 == 0
            assert device.blocks_resident(launch.block, 0, launch.smem_bytes) >= 1
        assert macros_of(plan)["SMEM_BYTES"] == max(launch.smem_bytes for launch in plan.launches)
        assert bool(plan.tiles) == (kernel not in NAIVE)
        if kernel in TILED:
            assert misfit(plan) is None


# Every so many head dims over 256, as wide as values get or with fewer or more of them.
WIDE_DIMS = [(dim, min(dim, 512)) for dim in (*range(257, 576, 11), 512, 576)]
WIDE_DIMS += [(576, 1), (1, 512), (264, 128), (300, 512), (64, 320)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_wide_heads_fit_everywhere(arch: str, dtype: str) -> None:
    """In shared memory and in registers, with the gradient of a bias; by the rung that says that it can."""
    device = Device.of(arch)
    biased = Features(bias=(1, 4, 300, 400), bias_dtype="float32", gradients=("bias",))
    names = ("bwd_1_naive", "bwd_2_flash_v2", "bwd_3_mma")
    for dims, features, tf32 in itertools.product(WIDE_DIMS, (Features(), biased), (False, True)):
        features = replace(features, tf32=tf32)
        problem = replace(problem_for("bwd_2_flash_v2", dtype, *dims), features=features)
        able = [name for name in names if KERNELS[name].unsupported(problem, device) is None]
        assert "bwd_2_flash_v2" in able
        for name in (None, *able):
            plan: Plan | None = make_plan(problem, device, name)
            while plan is not None:
                assert all(launch.smem_bytes <= device.smem_per_block for launch in plan.launches)
                of_registers = re.search(r"about (\d+) of (\d+) registers", str(plan))
                assert not of_registers or int(of_registers[1]) <= int(of_registers[2])
                plan = plan.beside


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", TILED)
def test_registers_are_not_exceeded_if_other_tiles_do_with_fewer(kernel: str, arch: str) -> None:
    device = Device.of(arch)
    for dtype, (head_dim, value_dim) in itertools.product(DTYPES, HEAD_DIMS):
        problem = problem_for(kernel, dtype, head_dim, value_dim)
        plan = make_plan(problem, device, kernel)
        slices = dict(plan.macros).get("SLICES", 1)
        candidates = tiled.SLICED_BACKWARD_TILES if slices > 1 else CANDIDATES[kernel]
        cost_of = (
            functools.partial(tiled._backward_cost, slices=slices)
            if kernel.startswith("bwd")
            else tiled._forward_cost
        )
        costs = {tiles: cost_of(problem, tiles) for tiles in candidates}
        holds = [
            tiles
            for tiles, cost in costs.items()
            if cost.smem_bytes <= device.smem_per_block and cost.registers <= device.registers_per_thread
        ]
        (chosen,) = (tiles for tiles in costs if vars(tiles) == plan.tiles)
        assert chosen in holds or not holds
        registers = costs[chosen].registers
        assert f"about {registers} of {device.registers_per_thread} registers per thread" in str(plan)


# Beside what is asked for, sizes with which it can be compiled, and the number of slices of the head dims.
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "asked", "slices"),
    [
        ("sm_86", "float16", 64, {"block_m": 64, "block_n": 32}, 1),
        ("sm_75", "float16", 128, {"block_m": 64, "block_n": 32}, 1),
        ("sm_75", "float32", 256, {"block_m": 32, "block_n": 16, "threads": 256}, 2),
        ("sm_75", "float32", 128, {"block_m": 16, "block_n": 16, "lanes": 16}, 1),
    ],
)
def test_the_plan_chooses_other_sizes_to_suit(
    arch: str, dtype: str, head_dim: int, asked: dict[str, int], slices: int
) -> None:
    problem = Problem("backward", dtype, 2, 4096, 4096, 16, 16, head_dim, head_dim)
    plan = make_plan(problem, Device.of(arch), tiles=asked)
    assert asked.items() <= plan.tiles.items()
    assert dict(plan.macros).get("SLICES", 1) == slices


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "slices"),
    [
        ("sm_75", "float32", 128, 1),
        ("sm_75", "float32", 144, 2),
        ("sm_86", "float32", 192, 1),
        ("sm_86", "float32", 256, 2),
        ("sm_86", "float64", 96, 1),
        ("sm_86", "float64", 256, 3),
        ("sm_90a", "float32", 256, 1),
        ("sm_90a", "float64", 144, 2),
    ],
)
def test_head_dims_come_in_slices_where_whole_ones_spill_or_cost_more(
    arch: str, dtype: str, head_dim: int, slices: int
) -> None:
    plan = plan_of("bwd_2_flash_v2", arch, dtype=dtype, head_dim=head_dim)
    assert dict(plan.macros)["SLICES"] == slices
    assert f"one of {slices} slices" in str(plan) or slices == 1
    registers = re.search(r"about (\d+) of (\d+) registers", str(plan))
    assert registers
    assert int(registers[1]) <= int(registers[2])


@pytest.mark.parametrize("kernel", TILED)
def test_candidates_can_be_compiled_and_differ(kernel: str) -> None:
    candidates = CANDIDATES[kernel]
    assert len(set(candidates)) == len(candidates)
    for tiles in candidates:
        assert misfit(plan_of(kernel, tiles=vars(tiles), head_dim=1)) is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", TILED)
def test_short_queries_get_short_tiles(kernel: str, arch: str) -> None:
    shortest = min(tiles.block_m for tiles in CANDIDATES[kernel])
    for dtype, dim, seqlen_q in itertools.product(DTYPES, (16, 64, 128), (1, 7, 16, 33, 64)):
        plan = plan_of(kernel, arch, dtype=dtype, head_dim=dim, seqlen_q=seqlen_q, seqlen_k=1000)
        assert plan.tiles["block_m"] <= max(shortest, 2 * seqlen_q - 1)


@pytest.mark.parametrize("kernel", TILED)
def test_long_queries_get_taller_tiles(kernel: str) -> None:
    short, long = (plan_of(kernel, seqlen_q=seqlen_q).tiles["block_m"] for seqlen_q in (1, 10_000))
    assert long >= 4 * short


@pytest.mark.parametrize("kernel", TILED)
def test_tiles_shrink_where_shared_memory_is_short(kernel: str) -> None:
    areas = []
    for smem_bytes in (20_000, 60_000, 200_000):
        device = replace(Device.of("sm_90a"), smem_per_block=smem_bytes, smem_per_sm=smem_bytes + 1024)
        plan = make_plan(problem_for(kernel), device, kernel)
        assert max(launch.smem_bytes for launch in plan.launches) <= smem_bytes
        areas.append(plan.tiles["block_m"] * plan.tiles["block_n"])
    assert areas[0] < areas[2]
    assert areas == sorted(areas)


@pytest.mark.parametrize("kernel", TILED)
def test_a_device_that_holds_no_tile_is_refused_with_the_arithmetic(kernel: str) -> None:
    device = replace(Device.of("sm_80"), smem_per_block=1000)
    needs = r"even the smallest tiles, .*, need [\d,]+ bytes of shared memory and 32 threads a block"
    offers = "sm_80 offers 1,000 bytes and 1024 threads"
    refused = f"{kernel} does not support float32 with head dim 64 on sm_80"
    with pytest.raises(ValueError, match=f"^{refused}: {needs}; {offers}$"):
        make_plan(problem_for(kernel), device, kernel)


@pytest.mark.parametrize(("head_dim", "value_dim", "dims"), [(512, 512, "512"), (384, 512, "384/512")])
def test_float64_of_wide_heads_on_turing_is_refused_by_name(head_dim: int, value_dim: int, dims: str) -> None:
    problem = problem_for("fwd_4_flash_v2", "float64", head_dim, value_dim)
    refused = f"fwd_4_flash_v2 does not support float64 with head dim {dims} on sm_75: even the smallest"
    for kernel in (None, "fwd_4_flash_v2"):
        with pytest.raises(ValueError, match=f"^{refused}"):
            make_plan(problem, Device.of("sm_75"), kernel)


# --- grids and workspace by brute force -----------------------------------------------------------


def blocks_by_brute_force(plan: Plan) -> dict[str, int]:
    """For each entry, the blocks that have anything to do: each element put into its block, one by one."""
    problem, tiles = plan.problem, plan.tiles
    batch, heads, kv_heads = (range(n) for n in (problem.batch, problem.heads, problem.kv_heads))
    queries, keys = range(problem.seqlen_q), range(problem.seqlen_k)
    head_dims, value_dims = range(problem.head_dim), range(problem.value_dim)

    def elements(*axes: range) -> int:
        """Blocks of 256 threads, one for each element."""
        return len({index // 256 for index, _ in enumerate(itertools.product(*axes))})

    def tiles_of(axes: tuple[range, ...], rows: range, height: int) -> int:
        return len({(*index[:-1], index[-1] // height) for index in itertools.product(*axes, rows)})

    rows = (batch, heads, queries)
    if plan.kernel in ("fwd_1_naive", "fwd_2_online_softmax"):
        return {
            "scores": elements(*rows, keys),
            "softmax": len(list(itertools.product(*rows))),
            "output": elements(*rows, value_dims),
        }
    if plan.kernel == "bwd_1_naive":
        key_rows = (batch, kv_heads, keys)
        return {
            "probabilities": elements(*rows, keys),
            "grad_values": elements(*key_rows, value_dims),
            "grad_probabilities": elements(*rows, keys),
            "grad_scores": len(list(itertools.product(*rows))),
            "grad_queries": elements(*rows, head_dims),
            "grad_keys": elements(*key_rows, head_dims),
        }
    if plan.kernel == "fwd_8_split_kv":
        # Rows are those of all heads that share a KV head.
        shared = range(problem.seqlen_q * problem.heads // problem.kv_heads)
        blocks = tiles_of((batch, kv_heads), shared, tiles["block_m"]) * tiles["key_parts"]
        return {"fwd_8_split_kv": blocks} | ({"merge_parts": blocks} if tiles["key_parts"] > 1 else {})
    if problem.direction == "forward":
        grids = {plan.kernel: tiles_of((batch, heads), queries, tiles["block_m"])}
        if plan.kernel == "fwd_9_float32":
            key_tiles = tiles_of((batch, kv_heads), keys, tiles["block_n"])
            grids["to_halves"] = grids[plan.kernel] + key_tiles if grids[plan.kernel] else 0
        return grids
    if plan.kernel in IN_HALVES:
        query_tiles = tiles_of((batch, heads), queries, tiles["block_m"])
        key_tiles = tiles_of((batch, kv_heads), keys, tiles["block_n"])
        return {
            "to_halves": query_tiles + key_tiles,
            "key_tiles": key_tiles,
            "store_query_gradients": query_tiles,
            "exact_tiles": key_tiles + query_tiles,
        }
    if plan.kernel in HOPPER_BACKWARD_KEYS:
        # Whole heads are for more of them than there are SMs (tests/test_wgmma_backward.py).
        query_tiles = tiles_of((batch, heads), queries, tiles["block_m"])
        parts = range(tiles["head_parts"] * tiles["row_parts"])
        key_tiles = tiles_of((batch, kv_heads, parts), keys, HOPPER_BACKWARD_KEYS[plan.kernel])
        key_rows = len(list(itertools.product(batch, kv_heads, keys)))
        if plan.kernel in HOPPER_COUNT:
            # row_sums also sets the count of the tiles that were taken to zero.
            grids = {"row_sums": max(query_tiles, min(key_tiles, 1))}
            grids["key_tiles"] = min(key_tiles, plan.device.sm_count)
        else:
            grids = {"row_sums": query_tiles, "key_tiles": key_tiles * CLUSTERS.get(plan.kernel, 1)}
        # A warp adds up the parts of a row, eight to a block.
        grids["round_keys"] = -(-key_rows // 8) * (len(parts) > 1)
        return {**grids, "round_queries": query_tiles * (not rounds_dq(plan))}
    warps = tiles["threads"] // 32

    def warps_for(*axes: range) -> int:
        """Blocks that hold a warp for each element."""
        return len({index // warps for index, _ in enumerate(itertools.product(*axes))})

    summed, rounded = queries, queries
    if plan.kernel == "bwd_3_mma":
        # The sums of dQ are whole tiles of queries; a warp rounds sixteen rows.
        summed = range(-(-problem.seqlen_q // tiles["block_m"]) * tiles["block_m"])
        rounded = range(-(-problem.seqlen_q // 16))
    parts = range(tiles.get("head_parts", 1))
    adding_parts = {"round_keys": warps_for(batch, kv_heads, keys)} if len(parts) > 1 else {}
    if plan.kernel == "bwd_3_mma" and tiles["split"] == 1 and problem.seqlen_k <= tiles["block_n"]:
        return {"key_tiles": len(list(itertools.product(batch, kv_heads, parts))), **adding_parts}
    return {
        "row_sums": warps_for(batch, heads, summed),
        "key_tiles": tiles_of((batch, kv_heads, parts), keys, tiles["block_n"]),
        **adding_parts,
        "round_queries": warps_for(batch, heads, rounded),
    }


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 70), (63, 64), (64, 65), (129, 128), (130, 3), (33, 257), (0, 5), (5, 0)], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_grids_cover_everything_once(kernel: str, lengths: tuple[int, int]) -> None:
    needs_heads = (
        isinstance(KERNELS[kernel], kernels.HopperKernel) and KERNELS[kernel].direction == "backward"
    )
    no_heads = (2, 0, 0 if needs_heads else 2)
    # Of parts there are tests of their own.
    tiles = {"key_parts": 1} if kernel == "fwd_10_wgmma_wide" else None
    for batch, heads, kv_heads in ((1, 1, 1), (2, 6, 3), (3, 2, 1), (0, 2, 1), no_heads):
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads}
        sizes |= {"seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        sizes |= {"head_dim": dim_for(kernel, 5), "value_dim": dim_for(kernel, 3)}
        plan = plan_of(kernel, tiles=tiles, **sizes)
        expected = blocks_by_brute_force(plan)
        assert {launch.entry: launch.grid for launch in plan.launches} == {
            entry: blocks for entry, blocks in expected.items() if blocks
        }
        in_order = [entry for entry in KERNELS[kernel].entries if expected.get(entry)]
        assert [launch.entry for launch in plan.launches] == in_order
        # What ran before a call has ended when its first launch begins.
        assert not any(launch.overlaps for launch in plan.launches[:1])


@pytest.mark.parametrize("seqlen_k", [0, 1, 31, 32, 33, 400])
def test_flash_v1_takes_a_step_for_each_block_of_keys(seqlen_k: int) -> None:
    plan = plan_of("fwd_3_flash_v1", seqlen_k=seqlen_k)
    (launch,) = plan.launches
    blocks = {key // plan.tiles["block_n"] for key in range(seqlen_k)}
    assert launch.steps == max(1, len(blocks))  # without keys, one still writes the zeros
    assert f"one launch for each of {launch.steps} blocks of keys" in str(plan)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS_IN_DTYPES)
def test_workspace_by_brute_force(kernel: str, dtype: str) -> None:
    dims = {"head_dim": dim_for(kernel, 24), "value_dim": dim_for(kernel, 40)}
    plan = plan_of(kernel, tiles=IN_PARTS.get(kernel), dtype=dtype, **dims)
    rows = (2, 4, 300)
    matrix = (*rows, 400)
    in_parts = 2 * (2 * 4 * 3)
    of_parts = {"parts there": (in_parts * 2,), "parts": (in_parts, 2, 128 * (48 // 2 + 4))}
    expected: dict[str, dict[str, tuple[int, ...]]] = {
        "fwd_1_naive": {"P": matrix},
        "fwd_2_online_softmax": {"P": matrix},
        "fwd_3_flash_v1": {"O": (*rows, 40), "l": rows, "m": rows},
        "fwd_4_flash_v2": {},
        # Two parts of each tile of 128 queries. Of two rows, a thread has a quarter of the 40 sums in whole
        # sixteens, and the softmax's two.
        **{kernel: {**FORWARD_COUNT, **of_parts} for kernel in HOPPER_FORWARDS},
        # For each part of the keys 40 sums in whole sixteens, and the softmax's two in as much as four.
        "fwd_8_split_kv": {"partial rows": (*rows, 2, 48 + 4)},
        # Tiles of 128 queries, or keys, each a panel of either half and a unit a row; for keys two of each.
        "fwd_9_float32": {
            "alignment": (1024 // 4,),
            "halves of queries": (2 * 4 * 3, 2 * 128 * 32 + 256),
            "halves of keys and values": (2 * 2 * 4, 2 * (2 * 128 * 32) + 512),
        },
        # Two parts of each tile of 64 queries; a warpgroup has three of six panels of O.
        "fwd_10_wgmma_wide": {
            **FORWARD_COUNT,
            "parts there": (2 * (2 * 4 * 5) * 2,),
            "parts": (2 * (2 * 4 * 5), 2, 128 * (3 * 64 // 2 + 4)),
        },
        # Tiles of 64 rows, a panel of either half for either tensor; of each row of queries two floats, and
        # 32 bytes, in whole swizzled units of 1,024 bytes; and dQ.
        "bwd_6_float32": {
            "alignment": (1024 // 4,),
            "halves of queries and dO, sums of dQ": (2 * 4 * 5, 2 * (2 * 64 * 32) + 64 * 32 + 256),
            "halves of keys and values": (2 * 2 * 7, 2 * (2 * 64 * 32) + 256),
        },
        # The same with three panels, and dQ^T in whole panels.
        "bwd_7_float32_wide": {
            "alignment": (1024 // 4,),
            "halves of queries and dO, sums of dQ": (2 * 4 * 5, 3 * (2 * (2 * 64 * 32) + 64 * 64) + 256),
            "halves of keys and values": (2 * 2 * 7, 3 * 2 * (2 * 64 * 32) + 256),
        },
        "bwd_1_naive": {"P": matrix, "dS": matrix},
        "bwd_2_flash_v2": {"LSE and D": (*rows, 2), "dQ sums": (*rows, 24)},
        # Whole tiles of queries, and head dims that the warps can part.
        "bwd_3_mma": {
            "dQ sums": (4, 2 * 320, 32),
            "parts of dK and dV": (2 * 400, 2, 2, 24 + 40),
            "LSE and D": (*rows, 2),
        },
        # Tiles of 128 and of 64 queries, head dims that the warps can part. Of each row LSE and D, of each
        # tile 16 bytes.
        "bwd_4_wgmma": {"dQ sums": (2 * 4 * 3, 32, 128), "statistics": (2 * 4 * 3, 2 * 128 + 4)},
        "bwd_5_wgmma_wide": {"dQ sums": (2 * 4 * 5, 160, 64), "statistics": (2 * 4 * 5, 2 * 64 + 4)},
        "bwd_8_wgmma_pair": {"dQ sums": (2 * 4 * 5, 160, 64), "statistics": (2 * 4 * 5, 2 * 64 + 4)},
    }
    shapes = expected.get(kernel, {})
    if kernel in HOPPER_BACKWARD_KEYS:
        shapes["parts of dK and dV"] = (2 * 400, 2, 2, sum(dims.values()))
    shapes |= HOPPER_COUNT.get(kernel, {})
    assert [(part.name, part.shape) for part in plan.scratch] == list(shapes.items())
    dtype_of_sums = np.float64 if dtype == "float64" else np.float32
    parts = [np.broadcast_to(dtype_of_sums(0), shape) for shape in shapes.values()]
    assert plan.workspace_bytes == sum(part.size * part.itemsize for part in parts)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_workspace_grows_as_the_registry_says(kernel: str) -> None:
    fixed = {
        **dict.fromkeys((*HOPPER_FORWARDS, "fwd_10_wgmma_wide"), 16),
        **dict.fromkeys(HOPPER_COUNT, 4),
        **dict.fromkeys(IN_HALVES, 1024),
    }
    small, large = (
        plan_of(kernel, tiles=IN_PARTS.get(kernel), seqlen_q=n, seqlen_k=n).workspace_bytes
        - fixed.get(kernel, 0)
        for n in (512, 1024)
    )
    grows = {"none": 0, "O(N)": 2, "O(N^2)": 4}[KERNELS[kernel].memory]
    assert large == grows * small
    assert bool(small) == bool(grows)


@pytest.mark.parametrize("kernel", [name for name, row in KERNELS.items() if row.only_arch is not None])
def test_tokens_of_no_sequence_are_no_launch(kernel: str) -> None:
    """Kernels would look for the sequence of a tile."""
    dtype, dim = KERNELS[kernel].dtypes[0], dim_for(kernel, 64)
    sizes = 0, 1000, 1000, 4, 4, dim, dim
    call = Problem(KERNELS[kernel].direction, dtype, *sizes, features=Features(packed=True))
    assert make_plan(call, Device.of("sm_90a"), kernel).launches == ()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0, "kv_heads": 0}, {"seqlen_q": 0, "seqlen_k": 0}])
def test_nothing_to_compute_is_no_launch(kernel: str, empty: dict[str, Any]) -> None:
    plan = plan_of(kernel, **empty)
    assert plan.launches == ()
    assert plan.workspace_bytes == 0
    assert "launch     none: there is nothing to compute" in str(plan)


@pytest.mark.parametrize(
    "mask", [{"mask": (1, 1, 1, 500)}, {"mask": (1, 1, 1, 63), "mask_bits": True}], ids=["bytes", "bits"]
)
@pytest.mark.parametrize("kernel", ["fwd_5_mma", "fwd_6_wgmma", "bwd_3_mma", "bwd_4_wgmma"])
def test_a_mask_says_how_many_keys_a_packed_sequence_has(kernel: str, mask: dict[str, Any]) -> None:
    """The memory for what it shows grows with the tokens, not with their square."""
    direction, features = KERNELS[kernel].direction, Features(packed=True, **mask)

    def memory(batch: int) -> int:
        tokens = 500 * batch
        call = Problem(direction, "bfloat16", batch, tokens, tokens, 4, 4, 64, 64, features=features)
        return make_plan(call, Device.of("sm_90a"), kernel).workspace_bytes

    assert memory(512) < 2.1 * memory(256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_without_query_heads_are_not_for_blocks_that_begin_with_a_head(
    dtype: str, head_dim: int
) -> None:
    call = Problem("backward", dtype, *(2, 5, 300, 0, 2, head_dim, head_dim))
    assert make_plan(call, Device.of("sm_90a")).kernel == "bwd_3_mma"
    with pytest.raises(ValueError, match="needs query heads"):
        make_plan(call, Device.of("sm_90a"), "bwd_4_wgmma" if dtype == "bfloat16" else "bwd_6_float32")


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name.startswith("fwd")])
def test_a_forward_without_keys_still_writes_its_zeros(kernel: str) -> None:
    plan = plan_of(kernel, seqlen_k=0)
    writes_out = {"fwd_1_naive": "output", "fwd_2_online_softmax": "output"}.get(kernel, kernel)
    writes_lse = "softmax" if kernel in NAIVE else kernel
    before = {"to_halves"} if kernel == "fwd_9_float32" else set()
    assert {writes_out, writes_lse} | before == {launch.entry for launch in plan.launches}
    assert plan_of(kernel, seqlen_q=0).launches == ()


@pytest.mark.parametrize(
    ("kernel", "writes_queries", "writes_keys"),
    [
        ("bwd_1_naive", {"grad_queries"}, {"grad_keys", "grad_values"}),
        ("bwd_2_flash_v2", {"row_sums", "round_queries"}, {"key_tiles"}),
    ],
)
def test_a_backward_without_keys_or_queries_still_writes_the_other_ones_zeros(
    kernel: str, writes_queries: set[str], writes_keys: set[str]
) -> None:
    without_keys = {launch.entry for launch in plan_of(kernel, seqlen_k=0).launches}
    assert writes_queries <= without_keys
    assert not writes_keys & without_keys
    without_queries = {launch.entry for launch in plan_of(kernel, seqlen_q=0).launches}
    assert without_queries == writes_keys


@pytest.mark.parametrize("kernel", ["bwd_3_mma", "bwd_4_wgmma", "bwd_5_wgmma_wide"])
def test_a_causal_backward_without_queries_still_writes_the_zeros_of_keys(kernel: str) -> None:
    plan = plan_of(kernel, seqlen_q=0, causal=True)
    assert "key_tiles" in {launch.entry for launch in plan.launches}


def test_grids_that_no_gpu_takes_are_refused() -> None:
    assert Launch("entry", MAX_GRID, 32).grid == 2**31 - 1
    with pytest.raises(
        ValueError, match=r"^entry would take 2147483648 blocks; a grid has at most 2147483647$"
    ):
        Launch("entry", MAX_GRID + 1, 32)
    with pytest.raises(ValueError, match=r"^scores would take 4294967296 blocks; a grid has at most"):
        plan_of("fwd_1_naive", batch=1, heads=1, kv_heads=1, seqlen_q=2**20, seqlen_k=2**20)
    for kernel, entry in (("fwd_4_flash_v2", "fwd_4_flash_v2"), ("bwd_2_flash_v2", "row_sums")):
        with pytest.raises(ValueError, match=f"^{entry} would take [0-9]+ blocks"):
            plan_of(kernel, batch=2**20, heads=2**15, seqlen_q=1)
    assert plan_of("fwd_4_flash_v2", batch=2**20, heads=2**10, seqlen_q=1).launches[0].grid == 2**30


@pytest.mark.parametrize("rows", [0, 1, 2**31 - 1, 2**31, 2**40])
def test_softmax_shares_out_the_rows_that_a_grid_cannot_take(rows: int) -> None:
    _, (launch,) = softmax_launches("float32", 2, rows, Arch(9, 0, "a"))
    assert launch.grid == min(rows, 2**31 - 1)


# --- arithmetic -----------------------------------------------------------------------------------


def test_rounding_up_by_brute_force() -> None:
    for a, b in itertools.product(range(70), range(1, 20)):
        assert ceil_div(a, b) == next(n for n in itertools.count() if n * b >= a)
        assert round_up(a, b) == next(n for n in itertools.count(a) if n % b == 0)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_shared_matrices_have_rows_of_an_odd_number_of_vectors(itemsize: int) -> None:
    for rows, cols in itertools.product((1, 8, 128), range(1, 257)):
        row_bytes, rest = divmod(shared_matrix_bytes(rows, cols, itemsize), rows)
        assert rest == 0
        assert row_bytes // 16 % 2 == 1
        assert row_bytes % 16 == 0
        assert 0 <= row_bytes - cols * itemsize < 32


# --- the record -----------------------------------------------------------------------------------


def leaves(value: Any) -> Iterator[Any]:
    """All that a plan is made of, down to what has no parts."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.items():
            yield from leaves(item)
    elif isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_is_plain_facts_and_always_the_same(kernel: str) -> None:
    plan, again = plan_of(kernel, causal=True), plan_of(kernel, causal=True)
    assert plan == again
    assert str(plan) == str(again)
    assert plan.variant == again.variant
    assert {type(leaf) for leaf in leaves(plan)} <= {str, int, bool, type(None)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "features", [Features(), Features(packed=True), Features(window=(100, None))], ids=str
)
def test_what_is_looked_up_by_kind_does_not_depend_on_sizes(
    features: Features, direction: Direction, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device.of("sm_90a")
    problem = replace(problem_for("fwd_1_naive", dtype), direction=direction, features=features)
    lengths = [(1, 3000), (200, 200), (4000, 70)]
    sizes = [
        {"batch": 5, "seqlen_q": rows, "seqlen_k": keys, "heads": 12, "kv_heads": 3} for rows, keys in lengths
    ]

    def decided(device: Device) -> list[Any]:
        plans = [make_plan(replace(problem, **of_call), device) for of_call in sizes]
        return [(plan.tiles, plan.macros, plan.launches, plan.scratch, plan.reasons) for plan in plans]

    looked_up = decided(device)
    monkeypatch.setattr(Problem, "kind", property(lambda problem: problem))
    assert looked_up == decided(replace(device, name="another, of which nothing is remembered"))


def test_an_empty_mapping_of_tiles_is_none() -> None:
    assert plan_of("fwd_4_flash_v2", tiles={}) == plan_of("fwd_4_flash_v2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_cheapest_or_last_rung_is_taken(arch: str, direction: Direction, dtype: str) -> None:
    device = Device.of(arch)
    problem = replace(problem_for("fwd_1_naive", dtype), direction=direction)
    fits = [row for row in KERNELS.values() if not row.unsupported(problem, device)]
    last = [row.name for row in fits if not row.on_request and not unsuited(row, problem, device)][-1]
    chosen = make_plan(problem, device)
    asked = make_plan(problem, device, chosen.kernel)
    prices = {row.name: PRICES[row.name](problem, device) for row in fits if row.name in PRICES}
    if len(prices) > 1:
        assert chosen.kernel == min(prices, key=lambda name: prices[name])
        assert re.search(r"us on an H200( of \d+ SMs)?, the cheapest", chosen.reasons[0])
    else:
        assert chosen.reasons[0] == f"{last}: the last rung that supports this call"
    assert asked.reasons[0] == f"{chosen.kernel}: chosen by the caller"
    assert chosen.launches == asked.launches


PLANNING = sys.modules[make_plan.__module__]  # `cufa.plan` is the function
# A copy of a rung, as whoever writes one begins.
COPY = replace(KERNELS["fwd_4_flash_v2"], name="fwd_99_copy", entries=("fwd_99_copy",))


def add_to_the_ladder(monkeypatch: pytest.MonkeyPatch, kernel: kernels.Kernel) -> None:
    """As its last rung, with the planner of fwd_4_flash_v2."""
    ladder = {**KERNELS, kernel.name: kernel}
    for module in (kernels, PLANNING, rungs):
        monkeypatch.setattr(module, "KERNELS", ladder)
    monkeypatch.setitem(PLANNING._PLANNERS, kernel.name, tiled.flash_v2)


def test_a_rung_on_request_runs_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, device = problem_for("fwd_4_flash_v2"), Device.of("sm_75")
    own = replace(COPY, entries=KERNELS["fwd_4_flash_v2"].entries)
    add_to_the_ladder(monkeypatch, own)
    assert make_plan(problem, device).kernel == own.name  # the last that supports the call
    add_to_the_ladder(monkeypatch, replace(own, on_request=True))
    chosen = make_plan(problem, device)
    assert chosen.kernel == "fwd_4_flash_v2"
    assert f"{own.name} runs only if a call names it" in chosen.reasons
    assert make_plan(problem, device, own.name).kernel == own.name


def test_a_planner_that_launches_what_its_kernel_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    add_to_the_ladder(monkeypatch, COPY)
    expected = (
        "^the planner of fwd_99_copy launches fwd_4_flash_v2, and the kernel's entries are fwd_99_copy; "
    )
    with pytest.raises(RuntimeError, match=expected):
        make_plan(problem_for("fwd_4_flash_v2"), Device.of("sm_75"), COPY.name)


@pytest.mark.parametrize("queries", [1, 100, None], ids=["decoding", "few queries", "as many as keys"])
def test_rungs_are_priced_once_for_many_lengths(monkeypatch: pytest.MonkeyPatch, queries: int | None) -> None:
    device, found = Device.of("sm_90a"), []

    def price(problem: Problem, device: Device) -> float:
        found.append((problem.seqlen_q, problem.seqlen_k))
        return PRICES["fwd_6_wgmma"](problem, device)

    monkeypatch.setattr(rungs, "PRICES", PRICES | {"fwd_6_wgmma": price})
    rungs._prices.cache_clear()
    of_lengths = range(2048, 2048 + 128)
    for keys in of_lengths:
        call = Problem("forward", "float16", 2, queries or keys, keys, 8, 2, 64, 64, False, align_bytes=16)
        chosen = make_plan(call, device)
        exact = {name: PRICES[name](call, device) for name in ("fwd_5_mma", "fwd_6_wgmma", "fwd_8_split_kv")}
        assert exact[chosen.kernel] <= 1.05 * min(exact.values())
    rungs._prices.cache_clear()
    assert len(found) <= 4
    assert all(max(lengths) <= of_lengths[-1] * 33 / 32 for lengths in found)


@pytest.mark.parametrize(
    ("arch", "dtype", "tf32", "on_tensor_cores"),
    [
        ("sm_75", "float16", False, True),
        ("sm_75", "bfloat16", False, False),
        ("sm_75", "float32", True, False),
        ("sm_80", "float32", False, True),
        ("sm_86", "float32", False, False),
        ("sm_86", "float32", True, True),
        ("sm_90a", "float32", False, True),
        ("sm_120a", "float32", False, False),
        ("sm_120a", "float32", True, True),
        ("sm_80", "float64", False, True),
        ("sm_86", "float64", False, False),
        ("sm_90a", "float64", False, True),
        ("sm_103a", "float64", False, False),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tensor_cores_are_taken_where_they_are_faster(
    direction: Direction, arch: str, dtype: str, tf32: bool, on_tensor_cores: bool
) -> None:
    problem = replace(problem_for("fwd_5_mma", dtype), direction=direction, features=Features(tf32=tf32))
    plan = make_plan(problem, Device.of(arch))
    assert (plan.kernel.endswith("_mma") or plan.kernel in IN_HALVES) == on_tensor_cores
    if not on_tensor_cores:
        reason = "needs (tensor cores|three tf32 products)"
        assert any(re.search(reason, each) for each in plan.reasons)


def test_types_limit_head_dims() -> None:
    problem = problem_for("fwd_5_mma", "float64", 288)
    with pytest.raises(ValueError, match="fwd_5_mma supports head dims up to 256, and this is 288"):
        make_plan(problem, Device.of("sm_90a"), "fwd_5_mma")


def undefined_macros(source: str) -> set[str]:
    """Names in capitals that a kernel's file and its headers use and do not define."""
    folder = Path(kernels.__file__).parent
    names: set[str] = set()
    defined: set[str] = set()
    seen: set[str] = set()
    waiting = [source]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        text = re.sub(r"//.*|/\*.*?\*/", "", (folder / name).read_text())
        waiting += re.findall(r'#include "(.*)"', text)
        defined |= set(re.findall(r"#define (\w+)", text))
        text = re.sub(r'"[^"\n]*"', "", text)
        names |= set(
            re.findall(
                r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b(?:SCALAR|CAUSAL|THREADS|LANES|SLICES|STAGES|SPLIT|PARTS)\b"
                r"|\b(?:WINDOW|SOFTCAP|BIAS|ALIBI|SINK|DROPOUT|PACKED|TF32|DETERMINISTIC|ADDING|ROUNDS)\b",
                text,
            )
        )
    # Some are put together from parts.
    parts = {name for name in names for whole in defined if whole.startswith(name)}
    return {name for name in names - defined - parts if not name.startswith("__")}


@pytest.mark.parametrize("kernel", KERNELS)
def test_macros_are_what_the_kernel_asks_for(kernel: str) -> None:
    dims = {"head_dim": dim_for(kernel, 40), "value_dim": dim_for(kernel, 72)}
    dtype = dtype_for(kernel, "bfloat16")
    plan = plan_of(kernel, dtype=dtype, causal=True, tiles=IN_PARTS.get(kernel), **dims)
    macros = macros_of(plan)
    assert set(macros) == undefined_macros(plan.source)
    common = {"SCALAR": dtype, "CAUSAL": True, "ALIGN_BYTES": 16}
    common |= {name.upper(): dim for name, dim in dims.items()}
    assert {name: macros[name] for name in common} == common
    blocks = {launch.entry: launch.block for launch in plan.launches}
    if kernel in HOPPER_BACKWARD_KEYS:
        # The number of its warpgroups, and with it that of the keys, is the kernel's own.
        own = {"block_n": HOPPER_BACKWARD_KEYS[kernel]}
        helper = macros["HELPER_THREADS"]
        small = dict.fromkeys(("row_sums", "round_keys", "round_queries"), helper)
        assert blocks == {"key_tiles": 3 * 128, **small}
    else:
        # In how many parts the keys are, the grid says, or the parameters; how many warps help, the block.
        passed = {
            "fwd_8_split_kv": ("key_parts", "shares"),
            "fwd_6_wgmma": ("key_parts",),
            "fwd_7_fp8": ("key_parts", "helpers"),
            "fwd_10_wgmma_wide": ("key_parts", "shares"),
        }
        own = {name: plan.tiles[name] for name in passed.get(kernel, ())}
        helpers = {
            "merge_parts": "MERGE_THREADS",
            "to_halves": "HALVING_THREADS",
            "store_query_gradients": "HALVING_THREADS",
            "exact_tiles": "EXACT_THREADS",
        }
        expected = {entry: macros[helpers.get(entry, "THREADS")] for entry in blocks}
        assert blocks == expected
    from_macros = {name: macros[name.upper()] for name in plan.tiles if name not in own}
    assert from_macros | own == plan.tiles
    assert plan.variant.macros == plan.macros
    assert plan.variant.source == f"{kernel}.cu"


def test_plans_that_are_equal_have_the_same_hash() -> None:
    problem = problem_for("fwd_4_flash_v2")
    first, second = (make_plan(problem, Device.of("sm_90a")) for _ in range(2))
    assert len({first, second, make_plan(problem, Device.of("sm_80"))}) == 2


def test_one_and_more_are_counted() -> None:
    assert [counted(number, "warp") for number in (1, 2, 11)] == ["1 warp", "2 warps", "11 warps"]
    assert [counted(number, "axis", "axes") for number in (1, 2)] == ["1 axis", "2 axes"]


@pytest.mark.parametrize("kernel", ["fwd_4_flash_v2", "bwd_2_flash_v2"])
@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_blocks_as_the_launch_bounds_promise_fit_an_sm(kernel: str, arch: str) -> None:
    device = Device.of(arch)
    for dtype, dim in itertools.product(DTYPES, (16, 64, 128, 256)):
        plan = make_plan(problem_for(kernel, dtype, dim), device, kernel)
        blocks = macros_of(plan)["BLOCKS_PER_SM"]
        assert isinstance(blocks, int)
        launch = max(plan.launches, key=lambda launch: launch.smem_bytes)
        assert 1 <= blocks <= device.blocks_resident(launch.block, 0, launch.smem_bytes)
        assert f"{counted(blocks, 'block')} per SM" in str(plan)


@pytest.mark.parametrize(("kernel", "arch"), KERNELS_ON_GPUS)
def test_a_printed_plan_says_what_and_why(kernel: str, arch: str) -> None:
    dtype = dtype_for(kernel, "float16")
    plan = plan_of(kernel, arch, dtype=dtype, head_dim=dim_for(kernel, 96), causal=True)
    device, lines = plan.device, str(plan).splitlines()
    assert lines[0] == f"{kernel} on {device.name} ({arch})"
    assert lines[1] == f"  problem    {plan.problem}, 16-byte loads"
    printed = [re.split(r"  +", line.strip(), maxsplit=1) for line in lines[2:]]
    tiles = ", ".join(f"{name} {size}" for name, size in plan.tiles.items())
    assert [text for label, text in printed if label == "tiles"] == ([tiles] if plan.tiles else [])
    assert [text for label, text in printed if label == "launch"] == [
        f"{launch.entry}: grid {launch.grid}{f' x {launch.steps} steps' if launch.steps > 1 else ''}"
        f"{' in clusters of 2' if launch.entry == 'key_tiles' and kernel in CLUSTERS else ''}, "
        f"block {launch.block} ({counted(launch.block // 32, 'warp')}), "
        f"shared memory {launch.smem_bytes:,} of {device.smem_per_block:,} bytes"
        f"{', overlaps the one before' if launch.overlaps else ''}"
        for launch in plan.launches
    ]
    (workspace,) = (text for label, text in printed if label == "workspace")
    assert workspace.startswith(f"{plan.workspace_bytes:,} bytes")
    for part in plan.scratch:
        assert f"{part.name} {'x'.join(map(str, part.shape))}" in workspace
    why = [text for label, text in printed if label == "why"]
    assert tuple(why) == plan.reasons
    assert len(why) > 1
    assert {label for label, _ in printed} <= {"tiles", "launch", "workspace", "why"}


# --- overrides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", TILED)
@pytest.mark.parametrize(
    "tiles",
    [
        {"block_m": 32},
        {"block_n": 64},
        {"threads": 128, "lanes": 8},
        {"block_m": 48, "block_n": 96, "threads": 96, "lanes": 8},
        {"block_m": 8, "block_n": 8, "threads": 32, "lanes": 4},
        {"block_m": 64, "block_n": 32, "threads": 1024, "lanes": 32},
    ],
    ids=str,
)
def test_overrides_are_taken(kernel: str, tiles: dict[str, int]) -> None:
    default, plan = plan_of(kernel), plan_of(kernel, tiles=tiles)
    having = [vars(each) for each in CANDIDATES[kernel] if vars(each).items() >= tiles.items()]
    assert plan.tiles in (having or [{**default.tiles, **tiles}])
    assert f"chosen by the caller: {', '.join(tiles)}" in str(plan)
    assert misfit(plan) is None
    assert plan.launches[0].block == plan.tiles["threads"]
    assert {launch.entry: launch.grid for launch in plan.launches} == blocks_by_brute_force(plan)


def test_an_override_changes_the_shared_memory() -> None:
    tiles = {"block_m": 48, "block_n": 32, "threads": 128, "lanes": 16}
    (launch,) = plan_of("fwd_4_flash_v2", tiles=tiles, head_dim=72, value_dim=40).launches
    # Rows of float32, padded to an odd number of 16-byte vectors: Q, K, V (40 columns are padded to
    # the 64 of 16 lanes with a vector each), P.
    assert launch.smem_bytes == 48 * 19 * 16 + 32 * 19 * 16 + 32 * 17 * 16 + 48 * 9 * 16


def test_an_override_with_too_much_shared_memory_names_both_numbers() -> None:
    tiles = {"block_m": 512, "block_n": 64, "threads": 256, "lanes": 16}
    needs = 512 * 33 * 16 + 64 * 33 * 16 + 64 * 33 * 16 + 512 * 17 * 16  # Q, K, V, P in float32
    for arch, offers in (("sm_75", 65_536), ("sm_86", 101_376), ("sm_90a", 232_448)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
            plan_of("fwd_4_flash_v2", arch, tiles, head_dim=128)
        assert str(caught.value) == (
            f"tiles 512x64 with 256 threads in 16 lanes: they need {needs:,} bytes of shared memory and "
            f"256 threads a block; {arch} offers {offers:,} bytes and 1024 threads"
        )


@pytest.mark.parametrize("kernel", TILED)
@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        ({"lanes": 3}, "lanes must be a power of two up to 32"),
        ({"lanes": 12}, "lanes must be a power of two up to 32"),
        ({"lanes": 64}, "lanes must be a power of two up to 32"),
        ({"threads": 100}, "threads must be a multiple of 32 up to 1024"),
        ({"threads": 2048}, "threads must be a multiple of 32 up to 1024"),
        ({"block_m": 33}, r"block_m must be a multiple of threads / lanes = 16"),
        ({"block_n": 36}, r"block_n must be a multiple of 8 \(lanes, and a vector of weights\)"),
        (
            {"block_n": 6, "lanes": 2},
            r"block_n must be a multiple of 4 \(lanes, and a vector of weights\)",
        ),
        ({"block_m": 0}, "block_m is 0; sizes must be positive"),
        ({"block_n": -64}, "block_n is -64; sizes must be positive"),
        ({"threads": 0}, "threads is 0; sizes must be positive"),
        ({"lanes": 0}, "lanes is 0; sizes must be positive"),
    ],
    ids=str,
)
def test_overrides_that_cannot_be_compiled(kernel: str, tiles: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^tiles .*: {reason}$"):
        plan_of(kernel, tiles=SOME_TILES | tiles)


@pytest.mark.parametrize(
    "tiles",
    [
        {"block_m": 64, "block_n": 32, "threads": 256, "lanes": 4},
        {"block_m": 96, "block_n": 8, "threads": 64, "lanes": 2},
        {"block_m": 32, "block_n": 48, "threads": 256, "lanes": 8},
    ],
    ids=str,
)
def test_backward_tiles_must_share_out_their_keys(tiles: dict[str, int]) -> None:
    """A thread of the backward also owns whole keys of dK and dV: block_n / (threads / lanes)."""
    assert plan_of("fwd_4_flash_v2", tiles=tiles).tiles == tiles
    rows = tiles["threads"] // tiles["lanes"]
    with pytest.raises(ValueError, match=f"^tiles .*block_n must be a multiple of .*{rows}"):
        plan_of("bwd_2_flash_v2", tiles=tiles)


@pytest.mark.parametrize("kernel", TILED)
def test_every_override_is_either_refused_or_can_be_compiled(kernel: str) -> None:
    rng = np.random.default_rng(1)
    accepted = refused = 0
    for _ in range(500):
        lanes, threads = int(rng.choice([1, 2, 4, 8, 16, 32])), 32 * int(rng.integers(1, 9))
        block_m, block_n = int(rng.integers(1, 97)), 4 * int(rng.integers(1, 25))
        tiles = {"block_m": block_m, "block_n": block_n, "threads": threads, "lanes": lanes}
        try:
            plan = plan_of(kernel, tiles=tiles, head_dim=8)
        except ValueError:
            refused += 1
        else:
            accepted += 1
            assert misfit(plan) is None
    assert accepted
    assert refused


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        *((kernel, "sm_86") for kernel in ("fwd_4_flash_v2", "bwd_2_flash_v2", "fwd_5_mma", "bwd_3_mma")),
        ("fwd_6_wgmma", "sm_90a"),
        ("fwd_7_fp8", "sm_90a"),
        ("fwd_9_float32", "sm_90a"),
    ],
)
def test_the_other_sizes_suit_those_that_a_caller_asks_for(kernel: str, arch: str) -> None:
    """The blocks of tiles that are the best at one length can be asked for at another."""

    def plan(seqlen: int, tiles: dict[str, int] | None = None) -> Plan:
        dims = {"head_dim": 64, "value_dim": 64, "seqlen_q": seqlen, "seqlen_k": seqlen}
        return plan_of(kernel, arch, tiles, dtype=dtype, **dims)

    dtype = {"fwd_7_fp8": "float8_e4m3fn", "fwd_9_float32": "float32"}.get(kernel, "float16")
    for seqlen in (1, 40, 100, 300, 1000, 8000):
        best = plan(seqlen).tiles
        for name in ("block_m", "block_n"):
            assert plan(2000, {name: best[name]}).tiles[name] == best[name]
        block = {name: best[name] for name in ("block_m", "block_n")}
        assert plan(2000, block).tiles.items() >= block.items()


@pytest.mark.parametrize("kernel", TILED)
def test_overrides_of_unknown_names(kernel: str) -> None:
    known = "block_m, block_n, threads, lanes"
    with pytest.raises(ValueError, match=f"^tiles has stages; it may have {known}$"):
        plan_of(kernel, tiles={"stages": 2})
    with pytest.raises(ValueError, match=f"^tiles has BLOCK_M, warps; it may have {known}$"):
        plan_of(kernel, tiles={"warps": 4, "block_m": 64, "BLOCK_M": 64})
    by_number: Any = {0: 64}
    with pytest.raises(ValueError, match=f"^tiles has 0; it may have {known}$"):
        plan_of(kernel, tiles=by_number)


@pytest.mark.parametrize("kernel", TILED)
@pytest.mark.parametrize("size", [64.0, "64", None, [64]])
def test_overrides_must_be_whole_numbers(kernel: str, size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^tiles .*block_m") as caught:
        plan_of(kernel, tiles=SOME_TILES | {"block_m": size})
    assert repr(size) in str(caught.value)


def test_overrides_may_be_numpys_integers() -> None:
    tiles = {"block_m": np.int64(64), "block_n": np.int32(32)}
    plan, expected = (
        plan_of("fwd_4_flash_v2", tiles=each) for each in (tiles, {"block_m": 64, "block_n": 32})
    )
    assert plan == expected
    assert str(plan) == str(expected)
    assert {type(leaf) for leaf in leaves(plan)} <= {str, int, bool, type(None)}


@pytest.mark.parametrize("kernel", NAIVE)
def test_naive_rungs_have_no_tiles(kernel: str) -> None:
    with pytest.raises(
        ValueError, match=r"^tiles has block_m, lanes, and this kernel has no tiles to choose$"
    ):
        plan_of(kernel, tiles={"block_m": 64, "lanes": 8})
    by_number: Any = {0: 64}
    with pytest.raises(ValueError, match=r"^tiles has 0, and this kernel has no tiles"):
        plan_of(kernel, tiles=by_number)


# --- kernels that cannot do it --------------------------------------------------------------------


def test_a_kernel_that_is_not_known() -> None:
    allowed = ", ".join(name for name, kernel in KERNELS.items() if kernel.direction == "forward")
    with pytest.raises(ValueError, match=f"^kernel is 'flash'; it may be {allowed}$"):
        make_plan(problem_for("fwd_1_naive"), Device.of("sm_80"), "flash")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_of_the_other_direction(kernel: str) -> None:
    own = KERNELS[kernel].direction
    other: Direction = "backward" if own == "forward" else "forward"
    expected = f"^kernel is '{kernel}': {kernel} is a {own} kernel, and this is a {other} call$"
    with pytest.raises(ValueError, match=expected):
        make_plan(replace(problem_for(kernel), direction=other), Device.of("sm_80"), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_arch_that_is_too_old(kernel: str) -> None:
    volta = replace(Device.of("sm_75"), arch=Arch(7, 0))
    only, oldest = KERNELS[kernel].only_arch, "sm_{}{}".format(*KERNELS[kernel].min_capability)
    reason = f"{kernel} needs {f'sm_{only}' if only else f'{oldest} or newer'}, and the arch is sm_70"
    with pytest.raises(ValueError, match=f"^kernel is '{kernel}': {reason}$"):
        make_plan(problem_for(kernel), volta, kernel)
    with pytest.raises(ValueError, match=r"^no kernel supports .* on sm_70: ") as caught:
        make_plan(problem_for(kernel), volta)
    assert reason in str(caught.value)
    assert str(problem_for(kernel)) in str(caught.value)
