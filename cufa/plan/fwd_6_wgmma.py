"""The plan of the Hopper forward, `fwd_6_wgmma`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cufa.device import Device
from cufa.integers import ceil_div, round_up
from cufa.plan.fwd_6_tiles import Tiles, fastest_tiles
from cufa.plan.hopper import (
    BARRIER_BYTES,
    PANEL_COLS,
    SWIZZLE_BYTES,
    TILE_LABEL_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    bias_box,
    has_bias_boxes,
    panel_tile_bytes,
)
from cufa.plan.pace import is_cut, memory_time, with_features
from cufa.plan.parting import merging_time
from cufa.plan.persistent import (
    CUT_START_NS,
    FINDINGS_BYTES,
    OVERHEAD_REGISTERS,
    START_NS,
    box_keys,
    choose_persistent,
    forward_macros,
    has_seen_bits,
    launches_of_parts,
    work_bytes,
)
from cufa.plan.record import WORKSPACE_ALIGNMENT, Decisions, Launch, Scratch, TensorBox
from cufa.plan.seen import WORD_BITS, fills_words, seen_by_forward
from cufa.plan.tile_choice import Cost
from cufa.plan.tile_sizes import sizes_of
from cufa.problem import Problem

# Dropout lengthens the time by this factor, compared with what it does in other rungs. Measured on an H200.
DROPOUT_FACTOR = 1.5


def price(problem: Problem, device: Device) -> float:
    """The estimated time of the forward in microseconds."""
    tiles, least = fastest_tiles(problem, device, frozenset())
    least = with_features(problem, least)
    if problem.features.dropout:
        least *= DROPOUT_FACTOR
    start = CUT_START_NS if is_cut(problem) else START_NS
    reading = memory_time(problem, device) + merging_time(problem, tiles, device)
    return (start + max(least, reading)) / 1000


def beside(problem: Problem, device: Device, typical: Problem) -> Decisions:
    """`fwd_6_wgmma` for some of the sequences, which are like those of `typical`, beside another launch.

    With a mask it begins after the other launch, as `seen_tiles` does, which waits for nothing.
    """
    decided = forward(problem, device, {}, typical)
    if problem.features.key_mask:
        return decided
    return replace(decided, launches=tuple(replace(launch, overlaps=True) for launch in decided.launches))


def forward(
    problem: Problem, device: Device, tiles: Mapping[str, int], typical: Problem | None = None
) -> Decisions:
    """`fwd_6_wgmma`: blocks that stay for many tiles, after a launch that looks at a mask or a mask_mod.

    The tiles are those for `typical` if it is given.
    """
    best, _ = fastest_tiles(typical or problem, device, frozenset(tiles.items()))
    chosen, grid = choose_persistent(problem, device, tiles, best, _forward_cost)
    sizes = chosen.tiles
    if not fills_words(problem, sizes):
        raise ValueError(f"tiles {sizes}: with a mask block_n must be a multiple of {WORD_BITS}")
    main = Launch("fwd_6_wgmma", grid, sizes.threads, chosen.cost.smem_bytes)
    launches, scratch, parted = launches_of_parts(problem, device, sizes, main)
    if problem.features.key_mask:
        with_bits = has_seen_bits(problem, sizes)
        seen = seen_by_forward(problem, sizes, with_bits)
        threads = WARPGROUP if with_bits else sizes.threads
        # At least one block: it resets the counter.
        blocks = max(1, ceil_div(seen.warps, threads // device.warp_size))
        launches = (Launch("seen_tiles", blocks, threads), replace(main, overlaps=with_bits))
        itemsize = problem.accumulator.itemsize
        of_tiles = round_up(seen.tile_bytes, WORKSPACE_ALIGNMENT)
        scratch = (
            Scratch("tiles taken", (WORKSPACE_ALIGNMENT // itemsize,)),
            Scratch("seen tiles", (of_tiles // itemsize,)),
            *((Scratch("seen scores", (seen.words,)),) * with_bits),
        )
    boxes = (
        *bias_box(problem, WGMMA_M, has_bias_boxes(problem)),
        TensorBox(0, WGMMA_M, PANEL_COLS),
        TensorBox(1, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(2, box_keys(problem, sizes), PANEL_COLS),
        TensorBox(3, WGMMA_M, PANEL_COLS),
    )
    return Decisions(
        tiles=sizes_of(sizes),
        macros=forward_macros(problem, device, chosen, len(boxes), parted),
        launches=launches if grid else (),
        scratch=scratch,
        reasons=chosen.reasons,
        boxes=boxes,
        parting=parted,
    )


def _forward_cost(problem: Problem, tiles: Tiles) -> Cost:
    queries = tiles.query_stages * tiles.consumers
    smem_bytes = (
        tiles.query_stages * panel_tile_bytes(tiles.block_m, problem.head_dim)  # Q
        + panel_tile_bytes(tiles.block_m, tiles.store_cols)  # O
        + tiles.stages * panel_tile_bytes(tiles.block_n, problem.head_dim)  # K
        + tiles.stages * panel_tile_bytes(tiles.block_n, problem.value_dim)  # V
        + panel_tile_bytes(tiles.block_m, tiles.block_n) * has_bias_boxes(problem)
        + BARRIER_BYTES * (2 * (2 * tiles.stages + queries + tiles.consumers) + tiles.stages)
        + FINDINGS_BYTES * tiles.stages
        + 2 * TILE_LABEL_BYTES * tiles.stages * (problem.features.key_mask)
        + work_bytes(problem, tiles)
    )
    depth, dims = round_up(problem.head_dim, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and O in float32, and P in pairs
    registers = (tiles.block_n + dims) // 2 + tiles.block_n // 4 + OVERHEAD_REGISTERS
    work = tiles.block_m * tiles.block_n * (depth + dims) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
