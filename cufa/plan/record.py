"""The records that planning returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from cufa.device import Device
from cufa.integers import round_up
from cufa.jit import Variant
from cufa.messages import counted
from cufa.problem import Problem
from cufa.score_mod import header
from cufa.traced.header import HEADER

Macro = tuple[str, str | int | bool]

# The limit of a grid's first axis. cufa's grids use only this axis, since the others end at 65,535.
MAX_GRID = 2**31 - 1
# Kernels access a workspace 16 bytes at a time; CuPy aligns allocations to 512 bytes.
WORKSPACE_ALIGNMENT = 16
# The first compute capability on which a launch may begin before the previous one ends.
FIRST_OVERLAPPING = (9, 0)


@dataclass(frozen=True)
class Launch:
    """One launch of an entry point of the kernel's file, or `steps` numbered launches in a row.

    A launch that `overlaps` begins before the previous one ends. The first launch of a plan never overlaps:
    earlier work on the stream may use the same workspace, or the arrays of this call. A later one may, if all
    its blocks wait for the previous launch (`ptx::wait_for_launch_before`) before anything that depends on
    it. At least one block must wait in any case. Since the previous launch has itself waited for its
    predecessor, the end of a launch then implies the end of all earlier launches of the plan.

    The blocks of a `cluster`, as many as that, run at the same time and reach each other's shared memory.
    """

    entry: str
    grid: int
    block: int
    smem_bytes: int = 0
    steps: int = 1
    overlaps: bool = False
    cluster: int = 1

    def __post_init__(self) -> None:
        """Refuse a grid that is too large for any GPU."""
        if self.grid > MAX_GRID:
            raise ValueError(f"{self.entry} would take {self.grid} blocks; a grid has at most {MAX_GRID}")
        assert self.grid % self.cluster == 0

    @property
    def in_clusters(self) -> str:
        """What to say of its clusters, if there are any."""
        return f" in clusters of {self.cluster}" * (self.cluster > 1)


@dataclass(frozen=True)
class Scratch:
    """One array in the workspace, with the accumulator's dtype."""

    name: str
    shape: tuple[int, ...]


# The index of the bias, which follows the tensors of a call.
BIAS = -1


@dataclass(frozen=True)
class TensorBox:
    """A tensor map that a kernel is passed: the rows and columns that one copy brings.

    With 0 rows, the map is empty, as the kernel copies nothing of that tensor.

    `tensor` is an index into the call's tensors, whose extents `Problem` has, or `BIAS`. With `paired_rows`,
    a copy brings two adjacent rows of every four.
    """

    tensor: int
    rows: int
    cols: int
    paired_rows: bool = False


class PartPlace(NamedTuple):
    """A part of a tile of queries, as kernels are told (params.cuh).

    The tile's number in its head, the part's number in the tile, how many parts the tile has, and the number
    of the first of these among all parts of the head.
    """

    tile: int
    part: int
    parts: int
    first: int


@dataclass(frozen=True)
class Parting:
    """How blocks get tiles of queries if the keys of some tiles are split among blocks (params.cuh).

    There are `count` work items: the first `whole` are tiles with all their keys, the others come in `parts`
    parts each, or fewer if they see fewer tiles of keys. Or the items are the parts of each head that
    `places` lists, in that order. Or, if they are `in_shares`, `count` blocks have equal shares of the keys.
    """

    whole: int = 0
    parts: int = 0
    count: int = 0
    places: tuple[PartPlace, ...] = ()
    in_shares: bool = False


NOT_PARTED = Parting()


@dataclass(frozen=True)
class Decisions:
    """The decisions of one kernel's planner, and the problem that it solves if that is not the call's."""

    tiles: Mapping[str, int]
    macros: tuple[Macro, ...]
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    reasons: tuple[str, ...] = ()
    boxes: tuple[TensorBox, ...] = ()
    parting: Parting = NOT_PARTED
    problem: Problem | None = None


@dataclass(frozen=True)
class Plan:
    """All that compiling and launching need to know, and all that they get to see.

    `launches` are in order, without those that have nothing to do. The arrays of `scratch` follow each other
    in one workspace. `reasons` explain the choices, one sentence each. A kernel with `boxes` gets their
    tensor maps before its other parameters, and without `scratch` a zeroed counter as its workspace. The plan
    `beside` computes what this one leaves out. Its launches follow this plan's first launch, its `scratch`
    follows this plan's.
    """

    kernel: str
    source: str
    problem: Problem
    device: Device
    tiles: Mapping[str, int] = field(hash=False)  # a dict has no hash
    macros: tuple[Macro, ...]
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...]
    reasons: tuple[str, ...]
    boxes: tuple[TensorBox, ...] = ()
    parting: Parting = NOT_PARTED
    beside: Plan | None = None

    @property
    def and_beside(self) -> tuple[Plan, ...]:
        """This plan and, if there is one, the plan beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def in_order(self) -> tuple[tuple[int, Launch], ...]:
        """All launches in order, each with the index of its plan in `and_beside`."""
        plans = enumerate(self.and_beside)
        first, *others = ([(index, launch) for launch in plan.launches] for index, plan in plans)
        return (*first[:1], *itertools.chain(*others), *first[1:])

    @cached_property
    def variant(self) -> Variant:
        """The kernel variant to compile."""
        return Variant(self.source, self.macros, self.device.arch, headers=self.headers)

    @cached_property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Name and text of the header with the caller's score_mod and mask_mod, if there are any."""
        features = self.problem.features
        if features.score_mod is None and features.mask_mod is None:
            return ()
        return ((HEADER, header(features.score_mod, features.mask_mod)),)

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of `scratch` in global memory."""
        return sum(prod(part.shape) for part in self.scratch) * self.problem.accumulator.itemsize

    @cached_property
    def workspace_begins(self) -> tuple[int, ...]:
        """The offset in the workspace of each plan in `and_beside`."""
        return (0, round_up(self.scratch_bytes, WORKSPACE_ALIGNMENT))[: len(self.and_beside)]

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of global memory needed beyond inputs and outputs."""
        if self.beside is None or not self.beside.scratch:
            return self.scratch_bytes
        return self.workspace_begins[-1] + self.beside.scratch_bytes

    def __str__(self) -> str:
        """Kernel, tiles, launches, memory with its limits, and reasons."""
        device = self.device
        lines = [
            f"{self.kernel} on {device.name} ({device.arch})",
            f"  problem    {self.problem}, {self.problem.align_bytes}-byte loads",
        ]
        if self.tiles:
            lines.append("  tiles      " + ", ".join(f"{name} {size}" for name, size in self.tiles.items()))
        for launch in self.launches:
            steps = f" x {launch.steps} steps" if launch.steps > 1 else ""
            lines.append(
                f"  launch     {launch.entry}: grid {launch.grid}{steps}{launch.in_clusters}, "
                f"block {launch.block} ({counted(launch.block // device.warp_size, 'warp')}), shared memory "
                f"{launch.smem_bytes:,} of {device.smem_per_block:,} bytes"
                f"{', overlaps the one before' if launch.overlaps else ''}"
            )
        if not self.launches:
            lines.append("  launch     none: there is nothing to compute")
        workspace = ", ".join(f"{part.name} {'x'.join(map(str, part.shape))}" for part in self.scratch)
        lines.append(f"  workspace  {self.scratch_bytes:,} bytes{f' ({workspace})' if workspace else ''}")
        lines += [f"  why        {reason}" for reason in self.reasons]
        if self.beside is not None:
            lines.append(f"beside it, after its first launch, {self.beside}")
            lines.append(f"  both       {self.workspace_bytes:,} bytes of workspace")
        return "\n".join(lines)
