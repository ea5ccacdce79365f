"""What the plans of all Hopper kernels share: products by warpgroups (wgmma), tiles by the copy engine (TMA).

A block is one warpgroup that copies (the producer) and others that compute (consumers). In `fwd_7_fp8`, one
more may help.
"""

from __future__ import annotations

from typing import ClassVar

from cufa.device import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM
from cufa.integers import ceil_div
from cufa.plan.record import BIAS, TensorBox
from cufa.problem import Problem

WARPGROUP = 128
# Rows of one wgmma, its depth, and its most columns.
WGMMA_M, WGMMA_K, MAX_WGMMA_N = 64, 16, 256
# A tile consists of panels of 64 columns; groups of eight rows are swizzled together and aligned.
PANEL_COLS, PANEL_ROW_BYTES, SWIZZLE_BYTES = 64, 128, 1024
BARRIER_BYTES = 8
# For the lengths that are looked up if each sequence has its own.
LENGTHS_BYTES = 16
# What the producer says about a tile of keys or queries, if it skips some; and if there are several heads.
TILE_LABEL_BYTES, HEAD_TILE_LABEL_BYTES = 4, 8
# setmaxnreg counts in eights, from 24 on; the registers that most producers need, and the most that a thread
# can have.
REGISTER_STEP, LEAST_REGISTERS = 8, 24
MIN_PRODUCER_REGISTERS = 32
MAX_CONSUMER_REGISTERS = 240
# The fraction of the L2 cache that keys and values of heads in work at the same time may fill.
SECTION_OF_L2 = 3 / 4
# Up to this head dim, `fwd_6_wgmma` and `bwd_4_wgmma` have room for a bias that comes in boxes.
MOST_DIMS_OF_BIAS_BOXES = 128


class Warpgroups:
    """A block for `block_m` queries: one warpgroup that copies, and one that computes for each 64 rows, or
    `column_warpgroups` that divide the columns of the output.
    """

    block_m: int
    blocks_per_sm: int = 1
    column_warpgroups: ClassVar[int] = 1

    @property
    def teams(self) -> int:
        """Warpgroups that compute for rows of their own, or groups of these with the same rows."""
        return self.block_m // WGMMA_M

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.teams * self.column_warpgroups

    @property
    def warpgroups(self) -> int:
        """All of a block's warpgroups."""
        return self.consumers + 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warpgroups * WARPGROUP

    @property
    def registers_at_start(self) -> int:
        """Registers that each thread of a block starts with."""
        of_thread = REGISTERS_PER_SM // (self.threads * self.blocks_per_sm)
        return register_steps(min(MAX_REGISTERS_PER_THREAD, of_thread))

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer's thread can have after the producer has released what it does not need."""
        others = self.warpgroups - self.consumers
        given = self.registers_at_start * self.warpgroups - MIN_PRODUCER_REGISTERS * others
        return min(MAX_CONSUMER_REGISTERS, register_steps(given // self.consumers))


def register_steps(registers: int) -> int:
    """Registers, rounded down to what setmaxnreg can count."""
    return registers // REGISTER_STEP * REGISTER_STEP


def panel_tile_bytes(rows: int, cols: int, itemsize: int = 2) -> int:
    """The size of panel_tile.cuh's PanelTile."""
    return ceil_div(cols * itemsize, PANEL_ROW_BYTES) * rows * PANEL_ROW_BYTES


def lengths_vary(problem: Problem) -> bool:
    """Whether each sequence's lengths must be looked up."""
    return problem.features.packed or problem.features.seqused_k


def has_bias_boxes(problem: Problem) -> bool:
    """Whether the copy engine brings the bias."""
    return problem.bias_boxes and max(problem.head_dim, problem.value_dim) <= MOST_DIMS_OF_BIAS_BOXES


def bias_rows_differ(problem: Problem) -> bool:
    """Whether a bias has a row for each query, instead of one for all."""
    return problem.features.bias is not None and problem.features.bias[2] > 1


def bias_box(problem: Problem, rows: int, in_boxes: bool) -> tuple[TensorBox, ...]:
    """The box for a tile of the bias with this many rows, if it comes `in_boxes`."""
    return (TensorBox(BIAS, rows if bias_rows_differ(problem) else 1, PANEL_COLS),) * in_boxes
