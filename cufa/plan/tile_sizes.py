"""The sizes of a kernel's tiles, by name, and how many tiles a problem has with them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from cufa.integers import ceil_div
from cufa.problem import Problem


class TileSizes(Protocol):
    """A frozen dataclass of the sizes that a kernel is compiled for; its fields are the macros."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def block_m(self) -> int:
        """Queries of a block's tile."""

    @property
    def block_n(self) -> int:
        """Keys of a tile."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    def misfit(self) -> str | None:
        """None if a kernel can be compiled for these sizes, else the reason."""


def sizes_of(tiles: TileSizes) -> dict[str, int]:
    """The sizes by name."""
    return dict(vars(tiles))


def query_tiles(problem: Problem, tiles: TileSizes) -> int:
    """The number of query tiles over all heads."""
    return problem.heads * row_tiles(problem, problem.seqlen_q, tiles.block_m)


def row_tiles(problem: Problem, seqlen: int, rows: int) -> int:
    """The number of tiles of `rows` rows in a head, over all sequences; 0 without rows."""
    return counted_row_tiles(problem, seqlen, rows) if problem.batch and seqlen else 0


def counted_row_tiles(problem: Problem, seqlen: int, rows: int) -> int:
    """The number of tiles as kernels count them to address the workspace: tensor.cuh's row_tiles."""
    if not problem.features.packed:
        return problem.batch * ceil_div(seqlen, rows)
    # Only the GPU knows the length of each sequence; no lengths take more tiles than this.
    return seqlen // rows + problem.batch
