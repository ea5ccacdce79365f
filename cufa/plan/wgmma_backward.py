"""Plans for the Hopper backward: a block is a warpgroup that copies and two that compute.

Up to head dim 128 each of the two has 64 keys of the block's 128, and blocks stay for many such tiles of
keys; over that they share 64 keys and part the head dims. Where many queries see a key, those go through in
longer tiles, which leave room for one tile of keys, and the copy engine adds to dQ. Where tiles of keys are
too few for the SMs, a block works for a part of the query heads that share its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum

from cufa.device import REGISTERS_PER_SM, Device
from cufa.driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cufa.plan.choice import Cost, choose, query_tiles, row_tiles
from cufa.plan.gradients import array_launch, array_sums, sink_launch
from cufa.plan.head_parts import FILLED, best_parts, check_parts, key_sums, round_keys, why_parts
from cufa.plan.record import Launch, Macro, Part, Scratch, TensorBox
from cufa.plan.seen import seen_scratch, seen_tiles
from cufa.plan.sizes import VECTOR_BYTES, common_macros, params_bytes
from cufa.plan.wgmma import (
    BARRIER_BYTES,
    LENGTHS_BYTES,
    MAX_CONSUMER_REGISTERS,
    MAX_WGMMA_N,
    PANEL_COLS,
    REGISTER_STEP,
    SECTION_OF_L2,
    SWIZZLE_BYTES,
    TILE_LABEL_BYTES,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    lengths_vary,
    panel_tile_bytes,
)
from cufa.problem import Problem
from cufa.rounding import ceil_div, round_up

CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
HELPER_THREADS = 256
# Rows of the tile that they round are that much longer, against bank conflicts.
ROW_PADDING_BYTES = 16
SUM_BYTES = 4
# Tiles of keys that a block holds if it stays for many, and if they fit; and what says which each is: batch,
# head, first key.
MOST_KEY_STAGES = 2
KEY_WORK_BYTES = 12
LABEL_BYTES = 32
# What the copying warpgroup keeps, and what its giving up the rest leaves a thread of the others.
PRODUCER_REGISTERS = 24
AT_START = REGISTERS_PER_SM // THREADS // REGISTER_STEP * REGISTER_STEP
CONSUMER_REGISTERS = min(
    MAX_CONSUMER_REGISTERS,
    AT_START + (AT_START - PRODUCER_REGISTERS) // CONSUMERS // REGISTER_STEP * REGISTER_STEP,
)
# Registers of a consumer beside accumulators: addresses, descriptions, where it is.
OVERHEAD_REGISTERS = 32
# Up to so many head dims a thread has registers for S and dP at the same time, beside dK and dV.
MOST_DIMS_TOGETHER = 128
# Up to so many tiles of keys of a head, under a causal mask, blocks add in order and the last rounds dQ.
MOST_IN_ORDER = 8
# Up to so many, under such a mask and without, they add after the first.
CAUSAL_MOST_AFTER_FIRST, MOST_AFTER_FIRST = 16, 4
# Blocks for each SM in a section of heads whose blocks are of many lengths, or add in order.
SECTION_ROUNDS = 2
# Of blocks that do so under a causal mask, how many of one head may run at the same time: with more of them
# short ones wait long for their turns, with fewer each tile of queries is loaded more often.
LEAST_IN_LINE, MOST_IN_LINE, WIDE_MOST_IN_LINE = 4, 4, 16


class Adding(Enum):
    """How the sums of dQ come about; the values are the kernels' names for it.

    A block has all keys of a head and adds alone. Or each adds as it comes, to sums that are zero before. Or
    the first sets them and the others add after it, as they come or in the order of their keys. That spares
    passes over the sums, which take as long however many blocks add to them. What it costs are waits of each
    that adds, the longer the more of them begin with the same queries, as all do without a mask.
    """

    ALONE = "kAlone"
    AS_THEY_COME = "kAsTheyCome"
    AFTER_FIRST = "kAfterFirst"
    IN_ORDER = "kInOrder"


@dataclass(frozen=True)
class Tiles:
    """The sizes that the kernels are compiled for.

    `block_n` is what the kernel makes of it and cannot be chosen; `stages` are how many tiles of Q, and of
    dO, a block holds; `parts` are those into which the query heads of a KV head are divided among blocks.
    """

    block_m: int
    block_n: int
    stages: int
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    def misfit(self) -> str | None:
        """None if the kernels can be compiled for these tiles, else the reason."""
        if self.block_m % WGMMA_K or self.block_m > MAX_WGMMA_N:
            return f"block_m must be a multiple of {WGMMA_K} up to {MAX_WGMMA_N}"
        return None

    def __str__(self) -> str:
        parts = f", parts {self.parts}" if self.parts > 1 else ""
        return f"{self.block_m}x{self.block_n}, stages {self.stages}{parts}"


# What is best for head dims up to each.
TILES = {64: Tiles(128, CONSUMERS * WGMMA_M, 2), 192: Tiles(64, CONSUMERS * WGMMA_M, 2)}
# The same over head dim 64 where at least so many queries of a head see a key on average: blocks seldom go on
# to other keys, so that it matters little that they wait for those.
LONG_TILES, MANY_QUERIES = Tiles(80, CONSUMERS * WGMMA_M, 2), 1500
WIDE_TILES = Tiles(64, WGMMA_M, 2)


@dataclass(frozen=True)
class _Kind:
    """What the two kernels differ in, for one call.

    `best` are the tiles that are the fastest, of all heads in one part, `padded_dim` is the head dim of dQ's
    sums; a block `stays` for many tiles of keys or has one.
    """

    best: Tiles
    adding_of: Callable[[Tiles], Adding]
    padded_dim: int
    stays: bool
    cost_of: Callable[[Tiles], Cost]
    own_macros: Callable[[Tiles], tuple[Macro, ...]]


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_4_wgmma`: a block for each tile of queries, for one or more of keys, for each of queries."""
    dim = max(problem.head_dim, problem.value_dim)
    short = next(tiles for limit, tiles in TILES.items() if dim <= limit)
    best = LONG_TILES if _has_long_tiles(problem) else short

    def adding_of(tiles: Tiles) -> Adding:
        return _adding(problem, device, best, tiles.parts)

    def outboxes(tiles: Tiles) -> bool:
        return _are_long(problem, tiles) and adding_of(tiles) is Adding.AS_THEY_COME

    def key_stages(tiles: Tiles) -> int:
        smem_bytes = _cost(problem, tiles, MOST_KEY_STAGES, outboxes(tiles)).smem_bytes
        return MOST_KEY_STAGES if device.blocks_resident(THREADS, 0, smem_bytes) else 1

    kind = _Kind(
        best=best,
        adding_of=adding_of,
        padded_dim=round_up(_head_cols(problem, best), PANEL_COLS),
        stays=True,
        cost_of=lambda tiles: _cost(problem, tiles, key_stages(tiles), outboxes(tiles)),
        own_macros=lambda tiles: (
            ("KEY_STAGES", key_stages(tiles)),
            ("HAS_OUTBOXES", outboxes(tiles)),
            ("SCORES_TOGETHER", _scores_together(problem)),
        ),
    )
    part = _plan(problem, device, tiles, kind)
    by_copies = ("tiles of queries are long: the copy engine adds to dQ",) * outboxes(Tiles(**part.tiles))
    return replace(part, reasons=(*part.reasons, *by_copies))


def backward_wide(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_5_wgmma_wide`: as `bwd_4_wgmma`."""
    kind = _Kind(
        best=WIDE_TILES,
        adding_of=lambda tiles: _adding(problem, device, WIDE_TILES, tiles.parts),
        padded_dim=_parted(problem.head_dim),
        stays=False,
        cost_of=lambda tiles: _wide_cost(problem, tiles),
        own_macros=lambda _: (("SCORES_TOGETHER", False),),  # a warpgroup has S, the other dP
    )
    return _plan(problem, device, tiles, kind)


def _plan(problem: Problem, device: Device, overrides: Mapping[str, int], kind: _Kind) -> Part:
    parts = best_parts(problem, kind.best.block_n, device.sm_count)
    best = replace(kind.best, parts=parts)
    chosen = choose(problem, device, overrides, (best,), kind.cost_of)
    tiles, smem_bytes = chosen.tiles, chosen.cost.smem_bytes
    adding = kind.adding_of(tiles)
    _check_tiles(problem, tiles, kind.best, chosen.cost.registers)
    query_blocks = query_tiles(problem, tiles)
    # Tiles of more queries leave a thread no registers for that.
    may_round = kind.stays and tiles.block_m <= PANEL_COLS
    rounds = may_round and (adding is Adding.ALONE or _few_add(problem, kind.best))
    round_smem_bytes = tiles.block_m * (kind.padded_dim * problem.itemsize + ROW_PADDING_BYTES)
    sink = sink_launch(problem, HELPER_THREADS, HELPER_THREADS // device.warp_size)

    to_take = _tiles_of_keys(problem, adding, tiles)
    key_blocks = min(to_take, device.sm_count) if kind.stays else to_take
    counters = kind.stays * min(1, query_blocks + to_take)
    # They also set the counter to 0, and sums of arrays.
    row_blocks = max(query_blocks, counters, min(1, problem.features.array_sums))
    round_blocks = (not rounds) * query_blocks
    overlaps = row_blocks > 0
    seen = seen_tiles(problem, tiles.block_m, tiles.block_n)
    launches = (
        Launch("seen_tiles", ceil_div(seen, HELPER_THREADS // device.warp_size), HELPER_THREADS),
        Launch("row_sums", row_blocks, HELPER_THREADS),
        Launch("key_tiles", key_blocks, THREADS, smem_bytes, overlaps=overlaps),
        round_keys(problem, tiles.parts, HELPER_THREADS, HELPER_THREADS // device.warp_size, overlaps=True),
        Launch("round_queries", round_blocks, HELPER_THREADS, round_smem_bytes, overlaps=overlaps),
        array_launch(problem, HELPER_THREADS),
        sink,
    )
    turns = adding in (Adding.AFTER_FIRST, Adding.IN_ORDER)
    boxes = _boxes(tiles)
    passed_bytes = len(boxes) * TENSOR_MAP_BYTES + params_bytes(problem)
    return Part(
        tiles=asdict(tiles),
        macros=(
            *common_macros(problem),
            ("BLOCK_M", tiles.block_m),
            ("STAGES", tiles.stages),
            ("PARTS", tiles.parts),
            *kind.own_macros(tiles),
            ("ADDING", adding.value),
            ("ROUNDS", rounds),
            ("HELPER_THREADS", HELPER_THREADS),
            ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
            ("CONSUMER_REGISTERS", CONSUMER_REGISTERS),
            *_section_macros(device, kind.stays),
            ("SMEM_BYTES", smem_bytes),
            ("ROUND_SMEM_BYTES", round_smem_bytes),
            ("SINK_SMEM_BYTES", sink.smem_bytes),
            ("PARAMS_BYTES", round_up(passed_bytes, TENSOR_MAP_ALIGNMENT)),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=(
            Scratch("dQ sums", (query_blocks, kind.padded_dim, tiles.block_m)),
            Scratch("statistics", (query_blocks, _statistics_bytes(tiles) // SUM_BYTES)),
            *key_sums(problem, tiles.parts),
            *((Scratch("blocks added", (query_blocks, CONSUMERS)),) * turns),
            *((Scratch("tiles of keys taken", (counters,)),) * kind.stays),
            *seen_scratch(problem, seen),
            *array_sums(problem),
        ),
        reasons=(*chosen.reasons, *_how(problem, adding, rounds, stay=kind.stays), *why_parts(tiles.parts)),
        boxes=boxes,
    )


def _tiles_of_keys(problem: Problem, adding: Adding, tiles: Tiles) -> int:
    """How many tiles of keys, or whole heads, blocks take."""
    heads = problem.kv_heads * tiles.parts
    if adding is Adding.ALONE:
        return problem.batch * heads * min(1, problem.seqlen_k)
    return heads * row_tiles(problem, problem.seqlen_k, tiles.block_n)


def _boxes(tiles: Tiles) -> tuple[TensorBox, ...]:
    q, k, v, _, dout, _, dk, dv = range(8)
    rows = {q: tiles.block_m, k: WGMMA_M, v: WGMMA_M, dout: tiles.block_m, dk: WGMMA_M, dv: WGMMA_M}
    return tuple(TensorBox(tensor, count, PANEL_COLS) for tensor, count in rows.items())


def _section_macros(device: Device, stays: bool) -> tuple[Macro, ...]:
    """Of how many heads blocks run together."""
    most_in_line = MOST_IN_LINE if stays else WIDE_MOST_IN_LINE
    return (
        ("SECTION_BYTES", int(device.l2_bytes * SECTION_OF_L2)),
        ("SECTION_BLOCKS", device.sm_count * SECTION_ROUNDS),
        ("LEAST_ORDERED_HEADS", ceil_div(device.sm_count, most_in_line)),
        ("MOST_ORDERED_HEADS", ceil_div(device.sm_count, LEAST_IN_LINE)),
    )


def _are_long(problem: Problem, tiles: Tiles) -> bool:
    """Whether a tile has more sums of dQ than a warpgroup adds to without a long wait."""
    return problem.head_dim > PANEL_COLS and tiles.block_m > PANEL_COLS


def _head_cols(problem: Problem, tiles: Tiles) -> int:
    """Columns of the tiles of Q and K: two panels at least if tiles of queries are short."""
    short = tiles.block_m <= PANEL_COLS and problem.head_dim <= PANEL_COLS
    return 2 * PANEL_COLS if short else problem.head_dim


def _how(problem: Problem, adding: Adding, rounds: bool, *, stay: bool) -> tuple[str, ...]:
    stays = ", and stays for others" if stay else ""
    works = f"a block works on one tile of keys{stays}"
    rounded = ("the last of them rounds dQ",) * rounds
    if adding is Adding.ALONE:
        return (f"a block works on all keys of a head{stays}: its sums of dQ are its own", *rounded)
    if adding is Adding.IN_ORDER:
        why = "deterministic" if problem.features.deterministic else "few blocks share dQ"
        order = f"{why}: blocks add to dQ in the order of their keys, each tile of queries by itself"
        return (works, order, *rounded)
    if adding is Adding.AFTER_FIRST:
        return (works, "blocks add to dQ as they come, after that of the first keys")
    return (works,)


def _check_tiles(problem: Problem, tiles: Tiles, best: Tiles, registers: int) -> None:
    check_parts(problem, tiles, tiles.parts)
    if tiles.block_n != best.block_n:
        raise ValueError(f"tiles {tiles}: block_n must be {best.block_n}, {WGMMA_M} for a warpgroup's rows")
    if problem.head_dim <= PANEL_COLS < best.block_m != tiles.block_m:
        raise ValueError(f"tiles {tiles}: block_m must be {best.block_m}, {PANEL_COLS} for a warpgroup's dQ")
    panels = ceil_div(_head_cols(problem, tiles), PANEL_COLS)
    if best.block_n == CONSUMERS * WGMMA_M and panels % CONSUMERS and tiles.block_m % (2 * WGMMA_K):
        raise ValueError(f"tiles {tiles}: block_m must be a multiple of 32, 16 for half a warpgroup's dQ")
    if registers > CONSUMER_REGISTERS:
        raise ValueError(
            f"tiles {tiles}: a thread needs about {registers} registers, and there are {CONSUMER_REGISTERS}"
        )


def _takes_whole_heads(problem: Problem, device: Device, block_n: int, parts: int) -> bool:
    """Whether a block works on all keys of a KV head, of sequences of one length, for a part of the heads.

    It then needs no sums that are zero at first, and loads the head's queries for one tile of keys after the
    other: that is faster if the L2 cache has them all and no SM is left idle.
    """
    heads = problem.batch * problem.kv_heads * parts
    if problem.features.packed:
        return False
    if problem.seqlen_k <= block_n or heads == 0:
        return True
    fills = heads >= FILLED * device.sm_count * ceil_div(heads, device.sm_count)
    row_bytes = (problem.head_dim + problem.value_dim) * problem.itemsize + problem.head_dim * SUM_BYTES
    head_bytes = problem.group // parts * problem.seqlen_q * row_bytes
    return fills and device.sm_count * head_bytes <= SECTION_OF_L2 * device.l2_bytes


def _adding(problem: Problem, device: Device, best: Tiles, parts: int) -> Adding:
    if problem.features.mask_mod is not None:  # nobody knows which blocks leave out a tile of queries
        return Adding.AS_THEY_COME
    if _takes_whole_heads(problem, device, best.block_n, parts):
        return Adding.ALONE
    if problem.features.deterministic or _few_add(problem, best):
        return Adding.IN_ORDER
    # A query of a window may see keys, but not the first; of long tiles the copy engine adds the sums, and
    # nobody knows when; and sums that the L2 cache holds are soon zero.
    windowed = problem.features.window != (None, None)
    sums = problem.batch * problem.seqlen_q // problem.packed_sequences * problem.heads * problem.head_dim
    if windowed or best is LONG_TILES or sums * SUM_BYTES <= SECTION_OF_L2 * device.l2_bytes:
        return Adding.AS_THEY_COME
    # Over head dim 128 products run beside the addition, so that a wait costs little.
    most = CAUSAL_MOST_AFTER_FIRST if problem.causal else MOST_AFTER_FIRST
    few = problem.seqlen_k <= most * best.block_n
    return Adding.AFTER_FIRST if best is WIDE_TILES or few else Adding.AS_THEY_COME


def _few_add(problem: Problem, best: Tiles) -> bool:
    """Whether it is faster that blocks add in order and the last rounds dQ."""
    short = best.block_m <= PANEL_COLS and best is not WIDE_TILES
    few = problem.causal and problem.seqlen_k <= MOST_IN_ORDER * best.block_n
    return short and few and problem.seqlen_q >= problem.seqlen_k and problem.features.mask_mod is None


def _has_long_tiles(problem: Problem) -> bool:
    """Whether tiles of queries are long: many of a head must see a key, or a part of a tile would cost more.

    A soft cap, a bias and functions of the caller's need registers that there are not beside those.
    """
    features = problem.features
    mods = features.score_mod is not None or features.mask_mod is not None
    asks = features.softcap or features.bias is not None or mods
    if problem.head_dim <= PANEL_COLS or not _scores_together(problem) or asks:
        return False
    keys = problem.seqlen_k // problem.packed_sequences
    return problem.visible_scores >= MANY_QUERIES * max(1, keys)


def _scores_together(problem: Problem) -> bool:
    """Whether a thread has registers for S and dP at the same time (key_softmax.cuh)."""
    return problem.head_dim <= MOST_DIMS_TOGETHER


def _parted(dims: int) -> int:
    """Head dims, padded so that each warpgroup has whole panels of them, and one at least."""
    return max(round_up(dims, PANEL_COLS), CONSUMERS * PANEL_COLS)


def _statistics_bytes(tiles: Tiles) -> int:
    """The size of key_softmax.cuh's RowStatistics: LSE and D, and whether all is finite."""
    return 2 * tiles.block_m * SUM_BYTES + VECTOR_BYTES


def _cost(problem: Problem, tiles: Tiles, key_stages: int, outboxes: bool) -> Cost:
    m, n = tiles.block_m, tiles.block_n
    head_cols = _head_cols(problem, tiles)
    outbox_bytes = m * round_up(head_cols, PANEL_COLS) // CONSUMERS * SUM_BYTES if outboxes else SUM_BYTES
    smem_bytes = (
        key_stages * (panel_tile_bytes(n, head_cols) + panel_tile_bytes(n, problem.value_dim))  # K, V
        + tiles.stages * (panel_tile_bytes(m, head_cols) + panel_tile_bytes(m, problem.value_dim))
        + tiles.stages * n * m * problem.itemsize  # dS
        + CONSUMERS * (outbox_bytes + LABEL_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + tiles.stages * _statistics_bytes(tiles)
        + key_stages * (KEY_WORK_BYTES + LENGTHS_BYTES * lengths_vary(problem))
        + BARRIER_BYTES * ((5 + 3 * CONSUMERS) * tiles.stages + 3 * key_stages + 2 * CONSUMERS)
        + tiles.stages * TILE_LABEL_BYTES * (problem.features.mask_mod is not None)
    )
    head, value = round_up(head_cols, WGMMA_K), round_up(problem.value_dim, WGMMA_K)
    # S and dP, or dP and P rounded; dK and dV.
    scores = m if _scores_together(problem) else m // 2 + m // 4
    registers = scores + (head + value) // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)


def _wide_cost(problem: Problem, tiles: Tiles) -> Cost:
    m, n = tiles.block_m, tiles.block_n
    head, value = _parted(problem.head_dim), _parted(problem.value_dim)
    smem_bytes = (
        panel_tile_bytes(n, head)  # K
        + panel_tile_bytes(n, value)  # V
        + tiles.stages * (panel_tile_bytes(m, head) + panel_tile_bytes(m, value))  # Q, dO
        + tiles.stages * 2 * panel_tile_bytes(n, m)  # P, dS
        + tiles.stages * _statistics_bytes(tiles)
        + BARRIER_BYTES * ((8 + 3 * CONSUMERS) * tiles.stages + 2)
    )
    # S or dP; dK and dV, of one of which the warpgroup has the smaller part; a panel of dQ.
    panels = ceil_div(head // PANEL_COLS + value // PANEL_COLS, CONSUMERS)
    registers = m // 2 + panels * PANEL_COLS // 2 + m // 2 + OVERHEAD_REGISTERS
    work = m * n * (3 * head + 2 * value) / tiles.threads
    return Cost(round_up(smem_bytes, SWIZZLE_BYTES), registers, work)
