"""The records that planning returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from cufa.device import Device
from cufa.jit import Variant
from cufa.messages import counted
from cufa.problem import Problem
from cufa.rounding import round_up
from cufa.score_mod import header
from cufa.traced.header import HEADER

Macro = tuple[str, str | int | bool]

# The first axis of a grid; cufa's grids have only that one, since the others end at 65,535.
MAX_GRID = 2**31 - 1
# Kernels read and write a workspace 16 bytes at a time; what CuPy allocates is aligned to 512.
WORKSPACE_ALIGNMENT = 16
# From which compute capability on one launch may begin while the one before ends.
FIRST_OVERLAPPING = (9, 0)


@dataclass(frozen=True)
class Launch:
    """One launch of an entry of the kernel's file, or `steps` of them in a row, numbered for the kernel.

    One that `overlaps` begins while the launch before it ends. The first of a plan never does: what ran on
    the stream before the call may use the same workspace, and what it read or wrote. The others may, if all
    their blocks wait for the launch before (`ptx::wait_for_launch_before`) ahead of what depends on it, and
    one at least in any case. That one has then waited for its own predecessor, so when a launch has ended all
    of the plan's before it have.
    """

    entry: str
    grid: int
    block: int
    smem_bytes: int = 0
    steps: int = 1
    overlaps: bool = False

    def __post_init__(self) -> None:
        """Refuse a grid that no GPU takes."""
        if self.grid > MAX_GRID:
            raise ValueError(f"{self.entry} would take {self.grid} blocks; a grid has at most {MAX_GRID}")


@dataclass(frozen=True)
class Scratch:
    """One part of the workspace: an array of the accumulator's dtype."""

    name: str
    shape: tuple[int, ...]


# The place of the bias behind the tensors of a call.
BIAS = -1


@dataclass(frozen=True)
class TensorBox:
    """A map of a tensor that a kernel asks for: the rows and columns that one copy brings.

    `tensor` is its place among the call's tensors, of which `Problem` has the extents, or `BIAS`. Of a tensor
    in `paired_rows`, a copy brings two neighbours of every four rows.
    """

    tensor: int
    rows: int
    cols: int
    paired_rows: bool = False


# A part of a tile of queries: the tile's number in its head, which of its parts it is and of how many, and
# the number of the first of them among those of all of the head's tiles.
PartPlace = tuple[int, int, int, int]


@dataclass(frozen=True)
class Parting:
    """How tiles of queries are handed out where the keys of some are parted among blocks (params.cuh).

    Something is handed out `count` times: the first `whole` tiles with all their keys, the others in so many
    `parts`; or those parts of each head that `places` lists, in its order.
    """

    whole: int = 0
    parts: int = 0
    count: int = 0
    places: tuple[PartPlace, ...] = ()


NOT_PARTED = Parting()


@dataclass(frozen=True)
class Part:
    """What a kernel's planner decides."""

    tiles: Mapping[str, int]
    macros: tuple[Macro, ...]
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    reasons: tuple[str, ...] = ()
    boxes: tuple[TensorBox, ...] = ()
    parting: Parting = NOT_PARTED


@dataclass(frozen=True)
class Plan:
    """All that compiling and launching need to know, and all that they get to see.

    `launches` are in order, those with nothing to do left out. `scratch` lies one after the other in
    one workspace. `reasons` say, a sentence each, how the choices were made. A kernel with `boxes` gets their
    tensor maps before its other parameters, and without `scratch` a counter that is 0 as its workspace.
    A plan `beside` it is of what this one leaves out; its launches come after the first of this one's, and
    its `scratch` behind this one's.
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
        """The plan and, if there is one, that beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def in_order(self) -> tuple[tuple[int, Launch], ...]:
        """All launches, each with the place in `and_beside` of the plan that it is of."""
        plans = enumerate(self.and_beside)
        first, *others = ([(of, launch) for launch in plan.launches] for of, plan in plans)
        return (*first[:1], *itertools.chain(*others), *first[1:])

    @cached_property
    def variant(self) -> Variant:
        """What the JIT compiles."""
        return Variant(self.source, self.macros, self.device.arch, headers=self.headers)

    @cached_property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Name and text of the header that says what the call's own functions are, if it has some."""
        features = self.problem.features
        if features.score_mod is None and features.mask_mod is None:
            return ()
        return ((HEADER, header(features.score_mod, features.mask_mod)),)

    @cached_property
    def scratch_bytes(self) -> int:
        """The global memory of `scratch`."""
        return sum(prod(part.shape) for part in self.scratch) * self.problem.accumulator.itemsize

    @cached_property
    def workspace_begins(self) -> tuple[int, ...]:
        """Where in the workspace each of `and_beside` has its own."""
        return (0, round_up(self.scratch_bytes, WORKSPACE_ALIGNMENT))[: len(self.and_beside)]

    @cached_property
    def workspace_bytes(self) -> int:
        """Global memory needed beyond inputs and outputs."""
        if self.beside is None or not self.beside.scratch:
            return self.scratch_bytes
        return self.workspace_begins[-1] + self.beside.scratch_bytes

    def __str__(self) -> str:
        """Kernel, tiles, launches and memory against the limits, and why."""
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
                f"  launch     {launch.entry}: grid {launch.grid}{steps}, "
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
        return "\n".join(lines)
