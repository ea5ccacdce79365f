"""Plans for the kernels beside the ladder, each for one function of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cufa.device import Arch
from cufa.integers import ceil_div
from cufa.jit import Variant
from cufa.plan.macros import feature_macros
from cufa.plan.record import FIRST_OVERLAPPING, MAX_GRID, Launch, Macro
from cufa.plan.standard import THREADS, WARPS
from cufa.plan.struct_sizes import (
    APPEND_PARAMS_BYTES,
    MERGE_PARAMS_BYTES,
    QUANTIZE_PARAMS_BYTES,
    ROTARY_PARAMS_BYTES,
    SOFTMAX_PARAMS_BYTES,
)
from cufa.problem import DTYPES, INPUT_DTYPES, MAX_ALIGN_BYTES, PLAIN, Features, accumulator_dtype

# Loads of a thread that are in flight together, where it only reads.
_ROWS_TOGETHER = 4


def softmax_launches(dtype: str, passes: int, rows: int, arch: Arch) -> tuple[Variant, tuple[Launch, ...]]:
    """`softmax`: a block for each row, or for several if there are more rows than a grid has blocks."""
    smem_bytes = WARPS * 2 * accumulator_dtype(dtype).itemsize
    macros: tuple[Macro, ...] = (
        *_macros_without_attention(dtype, 1, DTYPES[dtype].itemsize),
        ("PASSES", passes),
        ("SMEM_BYTES", smem_bytes),
        ("PARAMS_BYTES", SOFTMAX_PARAMS_BYTES),
    )
    launch = Launch("softmax", min(rows, MAX_GRID), THREADS, smem_bytes)
    return Variant("softmax.cu", macros, arch), (launch,)


def merge_launches(
    dtype: str, value_dim: int, rows: int, align_bytes: int, arch: Arch
) -> tuple[Variant, tuple[Launch, ...]]:
    """`merge`: a warp for each row."""
    macros: tuple[Macro, ...] = (
        *_macros_without_attention(dtype, value_dim, align_bytes),
        ("SMEM_BYTES", 0),
        ("PARAMS_BYTES", MERGE_PARAMS_BYTES),
    )
    return Variant("merge.cu", macros, arch), (Launch("merge", ceil_div(rows, WARPS), THREADS),)


@dataclass(frozen=True)
class Rotation:
    """What `rotary` is compiled for: the dtypes of x, cos and positions, and how x lies in memory."""

    dtype: str
    head_dim: int
    rotary_dim: int
    table_dtype: str
    position_dtype: str
    interleaved: bool
    align_bytes: int


def _parts_of_row(dtype: str, dim: int, rotary_dim: int, align_bytes: int) -> int:
    """Threads for a row of `dim` columns, of which the first `rotary_dim` are rotated; as in rotation.cuh."""
    together = math.gcd(align_bytes // INPUT_DTYPES[dtype].itemsize, rotary_dim // 2, dim)
    return (dim - rotary_dim // 2) // together


def rotary_launches(rotation: Rotation, rows: int, arch: Arch) -> tuple[Variant, tuple[Launch, ...]]:
    """`rotary`: a thread for as many pairs, or unchanged columns, of a row as it reads at once."""
    macros: tuple[Macro, ...] = (
        *_macros_without_attention(rotation.dtype, rotation.head_dim, rotation.align_bytes),
        ("ROTARY_DIM", rotation.rotary_dim),
        ("TABLE_SCALAR", rotation.table_dtype),
        ("POSITION", {"int32": "int", "int64": "long long"}[rotation.position_dtype]),
        ("INTERLEAVED", rotation.interleaved),
        ("SMEM_BYTES", 0),
        ("PARAMS_BYTES", ROTARY_PARAMS_BYTES),
    )
    threads = rows * _parts_of_row(
        rotation.dtype, rotation.head_dim, rotation.rotary_dim, rotation.align_bytes
    )
    return Variant("rotary.cu", macros, arch), (Launch("rotary", ceil_div(threads, THREADS), THREADS),)


@dataclass(frozen=True)
class Quantization:
    """What `quantize` is compiled for: the dtype of x, and how x and its 8-bit output lie in memory."""

    dtype: str
    head_dim: int
    packed: bool
    seqlen_contiguous: bool
    align_bytes: int
    out_align_bytes: int

    @property
    def chunk(self) -> int:
        """Columns that a thread reads at once, and writes at once if they are adjacent."""
        read = self.align_bytes // DTYPES[self.dtype].itemsize
        written = read if self.seqlen_contiguous else self.out_align_bytes
        return math.gcd(read, written, self.head_dim)

    @property
    def rows(self) -> int:
        """Tokens that a thread reads at once: enough loads in flight and, if tokens are adjacent in the 8-bit
        output, enough bytes for its widest write.
        """
        return MAX_ALIGN_BYTES if self.seqlen_contiguous else _ROWS_TOGETHER

    @property
    def tile_rows(self) -> int:
        """Tokens of a block; its threads read one chunk each, or several if rows are long."""
        return self.rows * max(1, THREADS * self.chunk // self.head_dim)


def quantize_launches(
    quantization: Quantization, measured: bool, batch: int, heads: int, seqlen: int, arch: Arch
) -> tuple[Variant, tuple[Launch, ...]]:
    """`quantize`: a block for each tile of a head's tokens; if `measured`, descales are computed first."""
    packed, tile_rows = quantization.packed, quantization.tile_rows
    overlaps = arch.capability >= FIRST_OVERLAPPING
    smem_bytes = WARPS * accumulator_dtype(quantization.dtype).itemsize
    macros: tuple[Macro, ...] = (
        *_macros_without_attention(
            quantization.dtype, quantization.head_dim, quantization.align_bytes, Features(packed=packed)
        ),
        ("TILE_ROWS", tile_rows),
        ("ROWS", quantization.rows),
        ("CHUNK", quantization.chunk),
        ("SEQLEN_CONTIGUOUS", quantization.seqlen_contiguous),
        ("OUT_ALIGN_BYTES", quantization.out_align_bytes),
        ("CONVERT_OVERLAPS", overlaps),
        ("SMEM_BYTES", smem_bytes),
        ("PARAMS_BYTES", QUANTIZE_PARAMS_BYTES),
    )
    # For packed sequences, the most tiles that any lengths can take.
    tiles = seqlen // tile_rows + batch if packed else batch * ceil_div(seqlen, tile_rows)
    launches = [Launch("convert", heads * tiles, THREADS, overlaps=measured and overlaps)]
    if measured:
        launches.insert(0, Launch("measure", heads * tiles, THREADS, smem_bytes))
    return Variant("quantize.cu", macros, arch), tuple(launches)


@dataclass(frozen=True)
class Appending:
    """What `append` is compiled for: the dtypes of new keys, of the cache and of cos.

    `rotary_dim` is 0 if keys are not rotated.
    """

    dtype: str
    cache_dtype: str
    head_dim: int
    value_dim: int
    rotary_dim: int = 0
    table_dtype: str = "float32"
    interleaved: bool = False


def append_launches(
    appending: Appending, align_bytes: int, batch: int, rows: int, query_rows: int, arch: Arch
) -> tuple[Variant, tuple[Launch, ...]]:
    """`append`: a thread for as many columns as it reads at once of a row of keys, of values, or of queries.

    `rows` are those of new keys in all heads, `query_rows` those of the queries to rotate. All rows are
    aligned to `align_bytes`; those of an 8-bit cache, to as many elements.
    """
    head_dim, value_dim = appending.head_dim, appending.value_dim
    macros: tuple[Macro, ...] = (
        *_macros_without_attention(
            appending.dtype,
            value_dim,
            align_bytes,
            head_dim=head_dim,
            key_dtype=appending.cache_dtype,
        ),
        ("ROTARY_DIM", appending.rotary_dim),
        ("TABLE_SCALAR", appending.table_dtype),
        ("INTERLEAVED", appending.interleaved),
        ("SMEM_BYTES", 0),
        ("PARAMS_BYTES", APPEND_PARAMS_BYTES),
    )
    of_key = _parts_of_row(appending.dtype, head_dim, appending.rotary_dim, align_bytes)
    of_value = _parts_of_row(appending.dtype, value_dim, 0, align_bytes)
    # One for each sequence's length, too.
    threads = max(batch, rows * (of_key + of_value) + query_rows * of_key)
    return Variant("append.cu", macros, arch), (Launch("append", ceil_div(threads, THREADS), THREADS),)


def _macros_without_attention(
    dtype: str,
    value_dim: int,
    align_bytes: int,
    features: Features = PLAIN,
    head_dim: int = 1,
    key_dtype: str | None = None,
) -> tuple[Macro, ...]:
    """The macros that config.cuh needs in a kernel that works on rows alone, most often of one array."""
    return (
        ("SCALAR", dtype),
        ("KEY_SCALAR", key_dtype or dtype),
        ("HEAD_DIM", head_dim),
        ("VALUE_DIM", value_dim),
        ("CAUSAL", False),
        ("QUERIES_AS_HEADS", False),
        ("CLUSTER_BLOCKS", 1),
        ("ENDS_BY_HEAD", False),
        ("ALIGN_BYTES", align_bytes),
        *feature_macros(features),
        ("THREADS", THREADS),
    )
