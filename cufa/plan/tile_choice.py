"""How a planner chooses among its tile sizes: by the time of a useful multiply-add with each.

It is estimated from the shared memory, registers and work of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from cufa.device import MAX_THREADS_PER_BLOCK, WARP_SIZE, Device
from cufa.messages import counted
from cufa.plan.tile_sizes import TileSizes, sizes_of
from cufa.problem import Problem

# With fewer warps than this on an SM, two per scheduler, a scheduler has nothing to do while one warp waits.
ENOUGH_WARPS = 8
# The fraction of the throughput that remains with next to no warps on an SM, unless a kernel's warps have
# much to do at once. Measured on an H200: 4 warps reach two thirds of the throughput of 8.
THROUGHPUT_WITHOUT_WARPS = 1 / 3


@dataclass(frozen=True)
class Cost:
    """The resources and the work of a block with some tiles.

    Shared memory in bytes; registers per thread, estimated; a thread's work on one tile of scores, as the
    number of multiply-adds that take as long; and the fraction of an SM's throughput that remains with next
    to no warps.
    """

    smem_bytes: int
    registers: int
    work: float
    without_warps: float = THROUGHPUT_WITHOUT_WARPS


S = TypeVar("S")
T = TypeVar("T", bound=TileSizes)


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """Some tiles, their cost, and how many of their blocks an SM holds."""

    tiles: T
    cost: Cost
    blocks_per_sm: int


@dataclass(frozen=True)
class Choice(Candidate[T]):
    """The chosen tiles, and why.

    `slowdown` is the time of a useful multiply-add, relative to the time if nothing else took any.
    """

    slowdown: float
    reasons: tuple[str, ...]


class Candidates(Generic[T]):
    """Tiles to choose from for problems of one kind."""

    def __init__(self, device: Device, tiles: Sequence[T], cost_of: Callable[[T], Cost]) -> None:
        """Keep the tiles that fit; of these, only the ones without spills, if there are any.

        Raises ValueError, with the arithmetic, if none fits.
        """
        self._device, self._cost_of, self._tiles = device, cost_of, tiles
        self._candidates = self._best_fitting(tiles)
        if not self._candidates:
            smallest = tiles[-1]
            needs = _needs(smallest, cost_of(smallest), device)
            raise ValueError(f"even the smallest tiles, {smallest}, {needs}")
        # More rows or keys than the largest tile has do not change the choice.
        self._most_rows = max(tiles.block_m for tiles in self._candidates)
        self._most_keys = max(tiles.block_n for tiles in self._candidates)
        self._cheapest_and_slowdown = functools.lru_cache(self._search)

    def choose(self, problem: Problem, overrides: Mapping[str, int]) -> Choice[T]:
        """Choose the cheapest tiles for a problem, among those with the sizes that `overrides` asks for.

        If none has these, any may get them with which they can be compiled and fit. Raises ValueError, with
        the reason or the arithmetic, if there are no such tiles.
        """
        device = self._device
        rows, keys = (size // problem.packed_sequences for size in (problem.seqlen_q, problem.seqlen_k))
        best, slowdown = self._cheapest_and_slowdown(
            min(rows, self._most_rows),
            min(keys, self._most_keys),
            problem.product_dims,
            frozenset(overrides.items()),
        )
        tiles, cost, blocks = best.tiles, best.cost, best.blocks_per_sm
        how = "those for this kind of problem, by measurements on an H200"
        if len(self._tiles) > 1:
            cost_of_one = f"a multiply-add at {slowdown:.2f} times its bare cost"
            how = f"the cheapest of {len(self._candidates)} that fit, {cost_of_one}"
        if overrides:
            tiles = _override(tiles, overrides)
            how = f"chosen by the caller: {', '.join(overrides)}"
            cost = self._cost_of(tiles)
            if not _fits(tiles, cost, device):
                raise ValueError(f"tiles {tiles}: they {_needs(tiles, cost, device)}")
            blocks = _blocks_per_sm(tiles, cost, device)
        limit = device.registers_per_thread
        fit = (
            f"{counted(blocks, 'block')} per SM: {cost.smem_bytes:,} of {device.smem_per_sm:,} bytes of "
            f"shared memory, about {cost.registers} of {limit} registers per thread"
        )
        return Choice(tiles, cost, blocks, slowdown, (f"tiles {tiles}: {how}", fit))

    def _search(
        self, rows: int, keys: int, product_dims: int, asked: Set[tuple[str, int]]
    ) -> tuple[Candidate[T], float]:
        """The cheapest tiles for sequences of this many rows and keys, and their slowdown."""
        candidates = self._with_sizes(asked)
        slowdowns = [_slowdown(each, rows, keys, product_dims, self._device) for each in candidates]
        slowdown = min(slowdowns)
        return candidates[slowdowns.index(slowdown)], slowdown

    def _with_sizes(self, asked: Set[tuple[str, int]]) -> list[Candidate[T]]:
        """The candidates that have these sizes or, if none has, all tiles that can have them."""
        own = _own_sizes(asked)
        having = _having(self._candidates, own)
        if having or not own.keys() <= sizes_of(self._tiles[0]).keys():
            return [*(having or self._candidates).values()]
        changed = dict.fromkeys(replace(tiles, **own) for tiles in self._tiles)
        fitting = self._best_fitting([tiles for tiles in changed if _misfit(tiles) is None])
        return [*(fitting or self._candidates).values()]

    def _best_fitting(self, tiles: Iterable[T]) -> dict[T, Candidate[T]]:
        """Those that fit; of these, only the ones without spills, if there are any."""
        device = self._device
        costs = {each: self._cost_of(each) for each in tiles}
        fitting = {each: cost for each, cost in costs.items() if _fits(each, cost, device)}
        # Spilled registers cost more than any tile gains.
        limit = device.registers_per_thread
        no_spills = {each: cost for each, cost in fitting.items() if cost.registers <= limit}
        return {
            each: Candidate(each, cost, _blocks_per_sm(each, cost, device))
            for each, cost in (no_spills or fitting).items()
        }


def with_sizes(candidates: Mapping[T, S], asked: Set[tuple[str, int]]) -> Mapping[T, S]:
    """The candidates that have the sizes that a caller asks for by name; all, if none has them."""
    return _having(candidates, _own_sizes(asked)) or candidates


def _having(candidates: Mapping[T, S], own: Mapping[str, int]) -> dict[T, S]:
    return {tiles: each for tiles, each in candidates.items() if own.items() <= sizes_of(tiles).items()}


def _own_sizes(asked: Set[tuple[str, int]]) -> dict[str, int]:
    """Without the numbers of parts, which are not a candidate's: they follow from the problem."""
    return {name: size for name, size in asked if name not in ("head_parts", "key_parts")}


def _slowdown(candidate: Candidate[T], rows: int, keys: int, product_dims: int, device: Device) -> float:
    """The time of a useful multiply-add with these tiles, relative to the time if nothing else took any."""
    tiles, cost = candidate.tiles, candidate.cost
    useful_rows, useful_keys = min(tiles.block_m, max(1, rows)), min(tiles.block_n, max(1, keys))
    useful = useful_rows * useful_keys * product_dims / tiles.threads
    warps = candidate.blocks_per_sm * tiles.threads / device.warp_size
    hidden = cost.without_warps + (1 - cost.without_warps) * min(1, warps / ENOUGH_WARPS)
    return cost.work / (useful * hidden)


def _fits(tiles: TileSizes, cost: Cost, device: Device) -> bool:
    return device.blocks_resident(tiles.threads, 0, cost.smem_bytes) > 0


def _blocks_per_sm(tiles: TileSizes, cost: Cost, device: Device) -> int:
    # The compiler spills registers over the limit, so one block always runs.
    registers = min(cost.registers, device.registers_per_thread)
    return max(1, device.blocks_resident(tiles.threads, registers, cost.smem_bytes))


def _override(tiles: T, overrides: Mapping[str, int]) -> T:
    names = [field.name for field in fields(tiles)]
    unknown = overrides.keys() - set(names)
    if unknown:
        raise ValueError(f"tiles has {', '.join(sorted(map(str, unknown)))}; it may have {', '.join(names)}")
    changed = replace(tiles, **overrides)
    misfit = _misfit(changed)
    if misfit is not None:
        raise ValueError(f"tiles {changed}: {misfit}")
    return changed


def _misfit(tiles: TileSizes) -> str | None:
    """None if a kernel can be compiled for these sizes, else the reason."""
    sizes = sizes_of(tiles)
    for name, size in sizes.items():
        if size < 1:
            return f"{name} is {size}; sizes must be positive"
    if "threads" in sizes and (tiles.threads % WARP_SIZE or tiles.threads > MAX_THREADS_PER_BLOCK):
        return f"threads must be a multiple of {WARP_SIZE} up to {MAX_THREADS_PER_BLOCK}"
    if tiles.threads > MAX_THREADS_PER_BLOCK:
        of_rows = f"block_m is {tiles.block_m}, for which a block needs {tiles.threads:,} threads"
        return f"{of_rows}; it may have {MAX_THREADS_PER_BLOCK:,}"
    return tiles.misfit()


def _needs(tiles: TileSizes, cost: Cost, device: Device) -> str:
    return (
        f"need {cost.smem_bytes:,} bytes of shared memory and {tiles.threads} "
        f"threads a block; {device.arch} offers {device.smem_per_block:,} bytes and "
        f"{min(MAX_THREADS_PER_BLOCK, device.threads_per_sm)} threads"
    )
