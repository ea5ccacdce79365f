"""Sizes that the host and the kernels must agree on. The kernels assert each of them."""

from __future__ import annotations

from cufa.plan.record import NOT_PARTED, Macro, Parting
from cufa.problem import Features, Problem
from cufa.rounding import ceil_div

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


def params_bytes(problem: Problem, parting: Parting = NOT_PARTED) -> int:
    """The size of ForwardParams or BackwardParams, including the arrays that the caller's functions read."""
    plain = FORWARD_PARAMS_BYTES if problem.direction == "forward" else BACKWARD_PARAMS_BYTES
    of_parts = MOST_PARTS_OF_HEAD * PART_PLACE_BYTES if parting.places else 0
    return plain + problem.features.mod_array_bytes + of_parts


# One shared-memory access of a thread.
VECTOR_BYTES = 16


def common_macros(
    problem: Problem, parting: Parting = NOT_PARTED, cluster_blocks: int = 1
) -> tuple[Macro, ...]:
    """The macros that config.cuh needs."""
    return (
        ("SCALAR", problem.dtype),
        ("KEY_SCALAR", problem.key_dtype),
        ("HEAD_DIM", problem.head_dim),
        ("VALUE_DIM", problem.value_dim),
        ("CAUSAL", problem.causal),
        ("QUERIES_AS_HEADS", problem.queries_as_heads),
        ("ENDS_BY_HEAD", problem.ends_by_head),
        ("ALIGN_BYTES", problem.align_bytes),
        ("CLUSTER_BLOCKS", cluster_blocks),
        *feature_macros(problem.features, parting),
    )


def feature_macros(features: Features, parting: Parting = NOT_PARTED) -> tuple[Macro, ...]:
    """The macros of config.cuh for compiled-in features, and whether keys are split."""
    return (
        ("WINDOW", features.windowed),
        ("SOFTCAP", features.softcap),
        ("BIAS", features.bias_dtype or "void"),
        ("MASK_BITS", 0 if features.mask is None else 1 if features.mask_bits else 8),
        ("ALIBI", features.alibi),
        ("SINK", features.sink),
        ("DROPOUT", features.dropout),
        ("PACKED", features.packed),
        ("USED_KEYS", features.seqused_k),
        ("PAGE_SIZE", features.page_size),
        ("TF32_PRODUCTS", features.tf32),
        ("SCORE_MOD", features.score_mod is not None),
        ("MASK_MOD", features.mask_mod is not None),
        ("LEAST_QUERIES", features.least_queries),
        ("MOST_QUERIES", features.most_queries),
        ("PARTS_KEYS", parting is not NOT_PARTED),
        ("SHARES_KEYS", parting.in_shares),
        ("MOST_PARTS_OF_HEAD", MOST_PARTS_OF_HEAD),
    )


def shared_matrix_bytes(rows: int, cols: int, itemsize: int) -> int:
    """The size of shared.cuh's SharedMatrix: a row is an odd number of 16-byte vectors."""
    vector = VECTOR_BYTES // itemsize
    return rows * (ceil_div(cols, vector) | 1) * VECTOR_BYTES
