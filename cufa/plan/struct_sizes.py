"""Sizes of the kernels' structs. The kernels assert each of them."""

from __future__ import annotations

from cufa.integers import ceil_div
from cufa.plan.record import NOT_PARTED, Parting
from cufa.problem import Problem

# The structs of params.cuh, whose fields cufa/params.py packs.
FORWARD_PARAMS_BYTES = 400
BACKWARD_PARAMS_BYTES = 568
SOFTMAX_PARAMS_BYTES = 48
MERGE_PARAMS_BYTES = 136
ROTARY_PARAMS_BYTES = 120
QUANTIZE_PARAMS_BYTES = 104
APPEND_PARAMS_BYTES = 304

# The most parts of a head's tiles that may be listed (PartPlace), and the bytes of each in the list.
MOST_PARTS_OF_HEAD, PART_PLACE_BYTES = 192, 4
# One shared-memory access of a thread.
VECTOR_BYTES = 16


def params_bytes(problem: Problem, parting: Parting = NOT_PARTED) -> int:
    """The size of ForwardParams or BackwardParams, including the arrays that the caller's functions read."""
    plain = FORWARD_PARAMS_BYTES if problem.direction == "forward" else BACKWARD_PARAMS_BYTES
    of_parts = MOST_PARTS_OF_HEAD * PART_PLACE_BYTES if parting.places else 0
    return plain + problem.features.mod_array_bytes + of_parts


def shared_matrix_bytes(rows: int, cols: int, itemsize: int) -> int:
    """The size of shared.cuh's SharedMatrix: a row is an odd number of 16-byte vectors."""
    vector = VECTOR_BYTES // itemsize
    return rows * (ceil_div(cols, vector) | 1) * VECTOR_BYTES
