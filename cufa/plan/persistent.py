"""What the plans of `fwd_6_wgmma`, `fwd_7_fp8` and `fwd_10_wgmma_wide` share: blocks stay for many tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from cufa.device import WARP_SIZE, Device
from cufa.driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cufa.integers import round_up
from cufa.plan import parting
from cufa.plan.fwd_6_tiles import MOST_VALUE_DIM, T, Tiles
from cufa.plan.hopper import (
    LENGTHS_BYTES,
    MAX_CONSUMER_REGISTERS,
    REGISTER_STEP,
    SECTION_OF_L2,
    WARPGROUP,
    bias_rows_differ,
    has_bias_boxes,
    lengths_vary,
)
from cufa.plan.macros import common_macros
from cufa.plan.record import MAX_GRID, NOT_PARTED, WORKSPACE_ALIGNMENT, Launch, Macro, Parting, Scratch
from cufa.plan.seen import WORD_BITS, seen_tiles
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import Candidates, Choice, Cost
from cufa.plan.tile_sizes import query_tiles, sizes_of
from cufa.problem import BYTE_BITS, Problem

# For a tile of queries, besides which of its keys a block has.
WORK_TILE_BYTES = 16
# The findings of four warps about a tile of V.
FINDINGS_BYTES = 16
# The most registers for consumers if the producer looks up more than where a tile is, and if it searches for
# some of the sequences.
BESIDE_LOOK_UPS, BESIDE_SEARCH = 224, 216
# The same if warps of the producer's warpgroup widen keys, which they hold in registers meanwhile.
BESIDE_WIDENING = 192
# Of the launch that merges parts (merged_parts.cuh): columns of O for a block that has a warp's rows, and its
# shared memory, for four sums and two rows of each thread.
MERGED_COLUMNS, MERGE_SMEM_BYTES = 8, 32 * WARPGROUP
# Registers of a consumer besides accumulators and weights: addresses, descriptors, the softmax's state.
OVERHEAD_REGISTERS = 30
# Sizes that are passed, or follow from others.
NOT_COMPILED_IN = ("key_parts", "shares", "helpers")
# The time until the first tiles arrive; longer if rows do not see all keys.
START_NS, CUT_START_NS = 3500, 4200


def choose_persistent(
    problem: Problem,
    device: Device,
    overrides: Mapping[str, int],
    best: T,
    cost_of: Callable[[Problem, T], Cost],
) -> tuple[Choice[T], int]:
    """The best or requested tiles, and the number of blocks that share the tiles of queries; all run at once.

    Raises ValueError if a thread would need more registers than it has, or if there are too many tiles.
    """

    def as_launched(tiles: T) -> Cost:
        return replace(cost_of(problem, tiles), registers=tiles.registers_at_start)

    if overrides:
        best = replace(best, key_parts=1)  # other tiles may not allow those parts
    chosen = Candidates(device, (best,), as_launched).choose(problem, overrides)
    sizes = chosen.tiles
    needed = cost_of(problem, sizes).registers
    if needed > sizes.consumer_registers:
        raise ValueError(
            f"tiles {sizes}: a thread needs about {needed} registers, and there are "
            f"{sizes.consumer_registers} with {sizes.consumers} warpgroups that compute"
        )
    count = query_tiles(problem, sizes)
    blocks = device.sm_count * chosen.blocks_per_sm
    if count + blocks > MAX_GRID:
        raise ValueError(f"tiles {sizes}: {count} of them are more than a launch can count, {MAX_GRID}")
    return chosen, min(count, blocks)


def launches_of_parts(
    problem: Problem, device: Device, tiles: Tiles, main: Launch
) -> tuple[tuple[Launch, ...], tuple[Scratch, ...], Parting]:
    """The launches if `tiles` split keys, else `main` alone; their workspace; and the parts."""
    if tiles.key_parts == 1 or not main.grid:
        return (main,), (), NOT_PARTED
    reason = parting.unsuited(problem, tiles, tiles.key_parts)
    if reason is not None:
        raise ValueError(f"tiles {tiles}: {reason}")
    blocks = device.sm_count * tiles.blocks_per_sm
    parted = parting.parting_of(problem, tiles, tiles.key_parts, blocks)
    main = replace(main, grid=min(parted.count, blocks))
    if tiles.merges_later(problem, tiles.key_parts):
        split = (parted.count - parted.whole) // parted.parts
        columns = tiles.consumers * tiles.own_cols(problem.value_dim) // MERGED_COLUMNS
        pieces = columns * (WARPGROUP // WARP_SIZE)
        launches = (main, merging_launch(split * pieces)) if split else (main,)
        return launches, (scratch_to_merge(problem, tiles, parted.count - parted.whole),), parted
    launches = (Launch("clear_counts", 1, tiles.threads), replace(main, overlaps=True))
    return launches, _parts_scratch(problem, tiles, parted), parted


def work_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory for the tiles of queries that a block is at: work_tiles.cuh."""
    varied = lengths_vary(problem)
    of_tile = WORK_TILE_BYTES + LENGTHS_BYTES * varied + tiles.keys_bytes
    for_lengths = varied and tiles.teams > (3 if problem.range_mask else 1)
    for_labels = problem.features.key_mask and max(tiles.teams, tiles.blocks_per_sm) > 2
    of_warps = WARPGROUP // WARP_SIZE if for_lengths or for_labels else 0
    return of_tile * tiles.teams * (tiles.query_stages + of_warps)


def _parts_scratch(problem: Problem, tiles: Tiles, parted: Parting) -> tuple[Scratch, ...]:
    """Workspace of key_parts.cuh: counts, then the result of each warpgroup for each part."""
    parts = parted.count - parted.whole
    words = WORKSPACE_ALIGNMENT // problem.accumulator.itemsize
    # A thread's sums of O, and the maximum and the sum of two rows
    of_thread = tiles.own_cols(problem.value_dim) // 2 + 4
    return (
        Scratch("tiles taken", (words,)),
        Scratch("parts there", (round_up(parts * tiles.consumers, words),)),
        Scratch("parts", (parts, tiles.consumers, WARPGROUP * of_thread)),
    )


def merging_launch(blocks: int) -> Launch:
    """The launch that merges parts of tiles."""
    return Launch("merge_parts", blocks, WARPGROUP, MERGE_SMEM_BYTES, overlaps=True)


def scratch_to_merge(problem: Problem, tiles: Tiles, parts: int) -> Scratch:
    """Workspace of merged_parts.cuh: of each part the sums of O, and the maximum and the sum of each row."""
    of_row = tiles.consumers * tiles.own_cols(problem.value_dim) + 2
    return Scratch("parts", (parts, tiles.block_m * of_row))


def has_seen_bits(problem: Problem, tiles: Tiles) -> bool:
    """Whether each score has a bit that says if a mask or a mask_mod shows it; for a mask, always.

    If all rows of a mask are alike, a bit of each key is enough: `seen.has_key_bits`.
    For a function, bits are faster if it reads arrays for each score, and are used if all bits take no more
    memory than the output.
    """
    if problem.features.mask is not None:
        return True
    function = problem.features.mask_mod
    if function is None or not function.looks_up or tiles.block_n % WORD_BITS:
        return False
    bits = seen_tiles(problem, tiles.block_m, tiles.block_n) * tiles.block_m * tiles.block_n
    rows = problem.tensor_batch * problem.heads * problem.seqlen_q
    output_bytes = rows * problem.value_dim * problem.itemsize
    return bits <= BYTE_BITS * output_bytes


def box_keys(problem: Problem, tiles: Tiles) -> int:
    """Keys that one copy brings: a tile, or as many of it as lie in one page wherever it begins."""
    return math.gcd(tiles.block_n, problem.features.page_size)


def forward_macros(
    problem: Problem, device: Device, chosen: Choice[T], maps: int, parted: Parting = NOT_PARTED
) -> tuple[Macro, ...]:
    """The macros of the Hopper forwards; `maps` is the number of tensor maps that they are passed."""
    tiles = chosen.tiles
    sizes = {name: size for name, size in sizes_of(tiles).items() if name not in NOT_COMPILED_IN}
    consumer_registers = min(tiles.consumer_registers, _most_consumer_registers(problem, tiles, parted))
    return (
        *common_macros(problem, parted),
        *((name.upper(), size) for name, size in sizes.items()),
        ("THREADS", tiles.threads),
        ("COLUMN_WARPGROUPS", tiles.column_warpgroups),
        ("VALUES_IN_KEYS", problem.values_in_keys and tiles.column_warpgroups > 1),
        ("BOX_KEYS", box_keys(problem, tiles)),
        ("PRODUCER_REGISTERS", tiles.producer_registers(consumer_registers)),
        ("CONSUMER_REGISTERS", consumer_registers),
        ("MERGES_LATER", parted is not NOT_PARTED and tiles.merges_later(problem, tiles.key_parts)),
        ("SEEN_BITS", has_seen_bits(problem, tiles)),
        ("KEY_BITS", problem.features.mask_of_keys),
        ("BIAS_BOXES", has_bias_boxes(problem)),
        ("BIAS_ROWS_DIFFER", bias_rows_differ(problem)),
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SMEM_BYTES", chosen.cost.smem_bytes),
        ("PARAMS_BYTES", passed_bytes(problem, maps, parted)),
    )


def passed_bytes(problem: Problem, maps: int, parted: Parting = NOT_PARTED) -> int:
    """The size of the kernels' Params with this many tensor maps."""
    return round_up(maps * TENSOR_MAP_BYTES + params_bytes(problem, parted), TENSOR_MAP_ALIGNMENT)


def _most_consumer_registers(problem: Problem, tiles: Tiles, parted: Parting) -> int:
    """The most registers that a consumer may have while the producer has enough."""
    features = problem.features
    if features.least_queries:
        return BESIDE_SEARCH
    if problem.kv_dtype is not None:
        return BESIDE_WIDENING
    if features.key_mask and (tiles.blocks_per_sm > 1 or (tiles.consumers > 2 and not problem.rows_alike)):
        return tiles.consumer_registers - REGISTER_STEP
    # With fewer value dims, the few words that are spilled for pages take no time. A bias or a score_mod
    # needs all registers that consumers can get.
    in_pages = features.page_size > 0 and problem.value_dim > MOST_VALUE_DIM
    asks = features.bias is not None or features.score_mod is not None
    looks_up = in_pages or features.key_mask or parted.in_shares
    return BESIDE_LOOK_UPS if looks_up and not asks else MAX_CONSUMER_REGISTERS
