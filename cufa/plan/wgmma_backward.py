"""Plans for the Hopper backward: a block is a warpgroup that copies and two that compute.

Up to head dim 128, or 192 with values to 128, each of the two has 64 of the block's 128 keys, and blocks stay
for many tiles of keys. Above, they share 64 keys and divide the head dims; over head dim 256 with those of
another block, in a cluster. Or two blocks of a cluster have 128 keys and divide the products. If many queries
see a key, tiles of queries are longer where dQ is divided, and the copy engine may add to dQ; both mostly
leave room for one tile of keys. If there are too few tiles of keys for the SMs, a block works for a part of
the query heads that share its keys, or of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cufa.device import Device
from cufa.driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cufa.integers import ceil_div, round_up
from cufa.plan.gradients import array_launch, array_sums, sink_launch
from cufa.plan.head_parts import best_parts, key_sums, round_keys, why_parts
from cufa.plan.hopper import PANEL_COLS, SECTION_OF_L2, WGMMA_M, bias_box, bias_rows_differ, has_bias_boxes
from cufa.plan.macros import common_macros
from cufa.plan.query_sums import Adding, few_add, query_bytes, way_of_adding
from cufa.plan.record import Decisions, Launch, Macro, Scratch, TensorBox
from cufa.plan.seen import seen_by_all, seen_launch, seen_scratch, seen_tiles
from cufa.plan.struct_sizes import params_bytes
from cufa.plan.tile_choice import Candidates, Choice, Cost
from cufa.plan.tile_sizes import counted_row_tiles, query_tiles, row_tiles, sizes_of
from cufa.plan.wgmma_backward_tiles import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    MOST_KEY_STAGES,
    PAIR,
    PAIR_TILES,
    PRODUCER_REGISTERS,
    SCORE_STAGES,
    SLAB_DIMS,
    SUM_BYTES,
    THREADS,
    Tiles,
    best_tiles,
    best_wide_tiles,
    check_tiles,
    cluster_blocks_of,
    has_whole_queries,
    narrow_cost,
    narrow_misfit,
    pair_cost,
    pair_misfit,
    scores_together,
    sends_sums,
    statistics_bytes,
    wide_cost,
)
from cufa.problem import Problem

HELPER_THREADS = 256
# Rows of the tile that helpers round are padded by this much, against bank conflicts.
ROW_PADDING_BYTES = 16
# Blocks per SM in a section of heads whose blocks have different lengths, or add in order.
SECTION_ROUNDS = 2
# For such blocks under a causal mask: how many of one head may run at the same time. With more, short ones
# wait long for their turn; with fewer, each tile of queries is loaded more often.
LEAST_IN_LINE, MOST_IN_LINE, WIDE_MOST_IN_LINE = 4, 4, 16
# The same in a window: with more, all wait if one does; with fewer, the L2 cache has to hold more heads.
LEAST_IN_WINDOW, MOST_IN_WINDOW = 2, 8
# For the reasons of a plan.
ORDER_OF_ADDITIONS = "blocks add to each tile of dQ in the order of their keys"


@dataclass(frozen=True)
class _Kind:
    """What differs between the kernels, for one call.

    `best` are the fastest tiles, with all heads in one part. A block `stays` for many tiles of keys, or has
    only one. With `bias_boxes` the copy engine brings the bias. A tile of keys is shared by `cluster` blocks;
    `shared_how` says how. `misfit` says why the kernel cannot have some tiles.
    """

    best: Tiles
    adding_of: Callable[[Tiles], Adding]
    stays: bool
    bias_boxes: bool
    cost_of: Callable[[Tiles], Cost]
    own_macros: Callable[[Tiles], tuple[Macro, ...]]
    cluster: int = 1
    shared_how: tuple[str, ...] = ()
    misfit: Callable[[Tiles], str | None] = lambda _: None


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_4_wgmma`: blocks for tiles of queries, for one or more tiles of keys, and for tiles of queries."""
    usual = problem.typical
    best = best_tiles(usual)

    def adding_of(tiles: Tiles) -> Adding:
        return way_of_adding(problem, device, best, tiles)

    def outboxes(tiles: Tiles) -> bool:
        return sends_sums(usual, tiles) and adding_of(tiles) is Adding.AS_THEY_COME

    def key_stages(tiles: Tiles) -> int:
        smem_bytes = narrow_cost(problem, tiles, MOST_KEY_STAGES, outboxes(tiles)).smem_bytes
        return MOST_KEY_STAGES if device.blocks_resident(THREADS, 0, smem_bytes) else 1

    kind = _Kind(
        best=best,
        adding_of=adding_of,
        stays=True,
        bias_boxes=has_bias_boxes(problem),
        cost_of=lambda tiles: narrow_cost(problem, tiles, key_stages(tiles), outboxes(tiles)),
        own_macros=lambda tiles: (
            ("KEY_STAGES", key_stages(tiles)),
            ("HAS_OUTBOXES", outboxes(tiles)),
            ("WHOLE_QUERIES", has_whole_queries(problem, tiles.block_m)),
            ("SCORES_TOGETHER", scores_together(problem)),
        ),
        misfit=lambda tiles: narrow_misfit(problem, tiles),
    )
    part = _decide(problem, device, tiles, kind)
    chosen = Tiles(**part.tiles)
    whole = has_whole_queries(problem, chosen.block_m)
    reasons = (
        *part.reasons,
        *("the warpgroups make dQ in turn, all head dims of a tile of queries",) * whole,
        *("many queries see a key: the copy engine adds to dQ",) * outboxes(chosen),
    )
    return replace(part, reasons=reasons)


def backward_wide(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_5_wgmma_wide`: launches as in `bwd_4_wgmma`, of blocks alone or in pairs, which take two SMs."""
    cluster, best = cluster_blocks_of(problem), best_wide_tiles(problem, device)
    pairs = _in_clusters(device, cluster)
    kind = _Kind(
        best=best,
        adding_of=lambda tiles: way_of_adding(problem, pairs, best, tiles),
        stays=False,
        bias_boxes=problem.bias_boxes,
        cost_of=lambda tiles: wide_cost(problem, tiles),
        own_macros=lambda _: (("SCORES_TOGETHER", False),),  # one warpgroup has S, the other dP
        cluster=cluster,
        shared_how=("two blocks share a tile of keys, each with half of the head dims",) * (cluster > 1),
    )
    return _decide(problem, pairs, tiles, kind)


def backward_pair(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Decisions:
    """`bwd_8_wgmma_pair`: launches as in `bwd_4_wgmma` unless a mask hides scores, of blocks in pairs."""
    best, pairs = PAIR_TILES, _in_clusters(device, PAIR)
    kind = _Kind(
        best=best,
        adding_of=lambda tiles: way_of_adding(problem, pairs, best, tiles),
        stays=False,
        bias_boxes=False,
        cost_of=lambda tiles: pair_cost(problem, tiles),
        own_macros=lambda _: (("SCORES_TOGETHER", False), ("SCORE_STAGES", SCORE_STAGES)),
        cluster=PAIR,
        shared_how=("two blocks share a tile of keys: one has K and Q, the other V and dO",),
        misfit=pair_misfit,
    )
    return _decide(problem, pairs, tiles, kind)


def _in_clusters(device: Device, blocks: int) -> Device:
    """The device as calls see it whose blocks come in clusters of so many, one block on each SM."""
    return replace(device, sm_count=max(1, device.sm_count // blocks))


def _choose(problem: Problem, device: Device, overrides: Mapping[str, int], kind: _Kind) -> Choice[Tiles]:
    """The tiles, with the parts that occupy all SMs or those that the caller asks for."""
    # In order, parts of rows would wait for each other. Those of a packed sequence that a block has alone
    # might not be apart, if it has more keys than the caller says.
    adding = kind.adding_of(kind.best)
    together = adding is Adding.IN_ORDER or (adding is Adding.ALONE and problem.features.packed)
    may_split_rows = not together and overrides.keys().isdisjoint(("head_parts", "row_parts"))
    head_parts, row_parts = best_parts(
        problem.typical, kind.best, device.sm_count, may_split_rows=may_split_rows
    )
    best = replace(kind.best, head_parts=head_parts, row_parts=row_parts)
    chosen = Candidates(device, (best,), kind.cost_of).choose(problem, overrides)
    misfit = kind.misfit(chosen.tiles)
    check_tiles(problem, chosen.tiles, kind.best.block_n, chosen.cost.registers, misfit)
    return chosen


def _decide(problem: Problem, device: Device, overrides: Mapping[str, int], kind: _Kind) -> Decisions:
    chosen = _choose(problem, device, overrides, kind)
    tiles, smem_bytes = chosen.tiles, chosen.cost.smem_bytes
    adding = kind.adding_of(tiles)
    padded_dim = round_up(problem.head_dim, SLAB_DIMS)
    query_blocks = query_tiles(problem, tiles)
    query_parts = problem.heads * counted_row_tiles(problem, problem.seqlen_q, tiles.block_m)
    rounds = _rounds(problem, device, kind, tiles, adding)
    round_smem_bytes = tiles.block_m * (padded_dim * problem.itemsize + ROW_PADDING_BYTES)
    helper_warps = HELPER_THREADS // device.warp_size
    sink = sink_launch(problem, HELPER_THREADS, helper_warps)

    to_take = _tiles_of_keys(problem, adding, tiles)
    key_blocks = min(to_take, device.sm_count) if kind.stays else to_take
    counters = kind.stays * min(1, query_blocks + to_take + problem.features.array_sums)
    row_blocks = max(query_blocks, counters)  # they also zero the counter and the sums of arrays
    round_blocks = (not rounds) * query_blocks
    overlaps = row_blocks > 0
    seen = seen_tiles(problem, tiles.block_m, tiles.block_n) if problem.hides_scores else 0
    launches = (
        seen_launch(problem, seen, HELPER_THREADS, helper_warps),
        Launch("row_sums", row_blocks, HELPER_THREADS),
        Launch(
            *("key_tiles", key_blocks * kind.cluster, THREADS, smem_bytes),
            overlaps=overlaps,
            cluster=kind.cluster,
        ),
        round_keys(problem, tiles.all_parts, HELPER_THREADS, helper_warps, overlaps=True),
        Launch("round_queries", round_blocks, HELPER_THREADS, round_smem_bytes, overlaps=overlaps),
        array_launch(problem, HELPER_THREADS),
        sink,
    )
    turns = adding in (Adding.AFTER_FIRST, Adding.IN_ORDER)
    boxes = _boxes(problem, tiles, kind.bias_boxes)
    passed_bytes = len(boxes) * TENSOR_MAP_BYTES + params_bytes(problem)
    return Decisions(
        tiles=sizes_of(tiles),
        macros=(
            *common_macros(problem, cluster_blocks=kind.cluster),
            ("BLOCK_M", tiles.block_m),
            ("BLOCK_N", tiles.block_n),
            ("STAGES", tiles.stages),
            ("HEAD_PARTS", tiles.head_parts),
            ("ROW_PARTS", tiles.row_parts),
            *kind.own_macros(tiles),
            ("ADDING", adding.value),
            ("HIDES_KEYS", problem.hides_keys),
            ("ROUNDS", rounds),
            ("BIAS_BOXES", kind.bias_boxes),
            ("BIAS_ROWS_DIFFER", bias_rows_differ(problem)),
            ("HELPER_THREADS", HELPER_THREADS),
            ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
            ("CONSUMER_REGISTERS", CONSUMER_REGISTERS),
            *_section_macros(problem, device, kind, tiles, adding),
            ("SMEM_BYTES", smem_bytes),
            ("ROUND_SMEM_BYTES", round_smem_bytes),
            ("SINK_SMEM_BYTES", sink.smem_bytes),
            ("PARAMS_BYTES", round_up(passed_bytes, TENSOR_MAP_ALIGNMENT)),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(
            Scratch("dQ sums", (query_parts, padded_dim, tiles.block_m)),
            Scratch("statistics", (query_parts, statistics_bytes(tiles) // SUM_BYTES)),
            *key_sums(problem, tiles.all_parts),
            *((Scratch("blocks added", (query_parts, kind.cluster * CONSUMERS)),) * turns),
            *_hidden_keys(problem, tiles),
            *((Scratch("tiles of keys taken", (counters,)),) * kind.stays),
            *seen_scratch(problem, seen),
            *array_sums(problem),
        ),
        reasons=(
            *chosen.reasons,
            *_how(problem, adding, rounds, stay=kind.stays),
            *why_parts(tiles.head_parts, tiles.row_parts),
            *kind.shared_how,
        ),
        boxes=boxes,
    )


def _hidden_keys(problem: Problem, tiles: Tiles) -> tuple[Scratch, ...]:
    """What a mask of keys shows of their tiles, found out by row_sums."""
    if not problem.hides_keys:
        return ()
    return (Scratch("seen keys", (seen_by_all(problem, tiles.block_n).tile_bytes // SUM_BYTES,)),)


def _rounds(problem: Problem, device: Device, kind: _Kind, tiles: Tiles, adding: Adding) -> bool:
    """Whether the blocks round dQ, which is faster than a launch of its own where few blocks share it."""
    # Otherwise threads have no registers to round dQ.
    has_registers = min(tiles.block_m, problem.head_dim) <= PANEL_COLS
    if adding is not Adding.ALONE:
        few = (problem.features.windowed and kind.stays) or few_add(problem, device, kind.best)
        return adding is Adding.IN_ORDER and few and has_registers
    if not kind.stays:  # a warpgroup would wait for the sums of other keys amid its products
        return problem.stated_most_keys <= tiles.block_n
    return has_registers


def _tiles_of_keys(problem: Problem, adding: Adding, tiles: Tiles) -> int:
    """The number of work items that blocks take: tiles of keys, or whole heads."""
    heads = problem.kv_heads * tiles.all_parts
    if adding is Adding.ALONE:
        return problem.batch * heads * min(1, problem.seqlen_k)
    return heads * row_tiles(problem, problem.seqlen_k, tiles.block_n)


def _boxes(problem: Problem, tiles: Tiles, bias_boxes: bool) -> tuple[TensorBox, ...]:
    q, k, v, _, dout, _, dk, dv = range(8)
    rows = {q: tiles.block_m, k: WGMMA_M, v: WGMMA_M, dout: tiles.block_m, dk: WGMMA_M, dv: WGMMA_M}
    of_bias = bias_box(problem, tiles.block_m, bias_boxes)
    return (*of_bias, *(TensorBox(tensor, count, PANEL_COLS) for tensor, count in rows.items()))


def _section_macros(
    problem: Problem, device: Device, kind: _Kind, tiles: Tiles, adding: Adding
) -> tuple[Macro, ...]:
    """The macros for how many heads blocks work on together."""
    least_in_line, most_in_line = LEAST_IN_LINE, MOST_IN_LINE if kind.stays else WIDE_MOST_IN_LINE
    if problem.features.windowed and adding is Adding.IN_ORDER:
        least_in_line, most_in_line = LEAST_IN_WINDOW, MOST_IN_WINDOW
        # As many heads as possible if the L2 cache holds the queries that see one tile of keys of each and
        # those that all blocks reach next.
        rows_of_head = problem.group * problem.seeing_queries
        rows = ceil_div(device.sm_count, least_in_line) * rows_of_head + device.sm_count * tiles.block_n
        if rows * query_bytes(problem) <= SECTION_OF_L2 * device.l2_bytes:
            most_in_line = least_in_line
    return (
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SECTION_BLOCKS", device.sm_count * SECTION_ROUNDS),
        ("LEAST_ORDERED_HEADS", ceil_div(device.sm_count, most_in_line)),
        ("MOST_ORDERED_HEADS", ceil_div(device.sm_count, least_in_line)),
    )


def _how(problem: Problem, adding: Adding, rounds: bool, *, stay: bool) -> tuple[str, ...]:
    in_turn = ", then the next" if stay else ""
    works = f"a block processes one tile of keys{in_turn}"
    if adding is Adding.ALONE:
        rounded = " and rounds it" * rounds
        return (f"a block processes all keys of a head{in_turn}, so that it adds to dQ alone{rounded}",)
    if adding is Adding.IN_ORDER:
        why = "deterministic" if problem.features.deterministic else "few blocks share dQ"
        return (works, f"{why}: {ORDER_OF_ADDITIONS}", *("the last of them rounds dQ",) * rounds)
    if adding is Adding.AFTER_FIRST:
        return (works, "blocks add to dQ in any order, after the block with the first keys")
    return (works,)
