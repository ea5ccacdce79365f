"""The problems of the benchmarks beside other libraries, and how much work they are."""

TOKENS, HIDDEN = 16_384, 2_048
# How many products have the head dim of queries and keys, and how many that of values.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "step": (4, 3)}
DETERMINISTIC = "cufa, deterministic"


def shape_of(seqlen: int, head_dim: int, value_dim: int | None = None) -> tuple[int, int, int, int]:
    """(batch, seqlen, heads, head_dim) of queries and keys; the hidden size is that of values."""
    return TOKENS // seqlen, seqlen, HIDDEN // (value_dim or head_dim), head_dim


def work_of(direction: str, seqlen: int, causal: bool, head_dim: int, value_dim: int | None = None) -> float:
    """Floating-point operations of two products forward and five backward, half of them if causal."""
    batch, _, heads, _ = shape_of(seqlen, head_dim, value_dim)
    dims = head_dim, value_dim or head_dim
    depth = sum(count * dim for count, dim in zip(PRODUCTS[direction], dims, strict=True))
    return 2 * batch * heads * seqlen**2 * depth / (2 if causal else 1)
