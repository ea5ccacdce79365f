"""The macros of config.cuh: what kernels are compiled for, besides the sizes of their tiles."""

from __future__ import annotations

from cufa.plan.record import NOT_PARTED, Macro, Parting
from cufa.plan.struct_sizes import MOST_PARTS_OF_HEAD
from cufa.problem import Features, Problem


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
