"""Plans for the naive rungs (a thread per element, a block per softmax row) and for the helper kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cufa.device import WARP_SIZE, Arch, Device
from cufa.jit import Variant
from cufa.plan.record import FIRST_OVERLAPPING, MAX_GRID, Launch, Macro, Part, Scratch
from cufa.plan.sizes import (
    APPEND_PARAMS_BYTES,
    BACKWARD_PARAMS_BYTES,
    FORWARD_PARAMS_BYTES,
    MERGE_PARAMS_BYTES,
    QUANTIZE_PARAMS_BYTES,
    ROTARY_PARAMS_BYTES,
    SOFTMAX_PARAMS_BYTES,
    common_macros,
    feature_macros,
)
from cufa.problem import DTYPES, INPUT_DTYPES, MAX_ALIGN_BYTES, PLAIN, Features, Problem, accumulator_dtype
from cufa.rounding import ceil_div

# Enough warps to hide the latency of loads that are not tiled, and a divisor of every SM's threads.
THREADS = 256
WARPS = THREADS // WARP_SIZE
# Loads of a thread that are in flight together, where it only reads.
_ROWS_TOGETHER = 4


def forward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`fwd_1_naive` and `fwd_2_online_softmax`."""
    _refuse_tiles(tiles)
    rows = problem.batch * problem.heads * problem.seqlen_q
    # A maximum and a sum for each warp of a row's block.
    smem_bytes = WARPS * 2 * problem.accumulator.itemsize
    return _part(
        problem,
        FORWARD_PARAMS_BYTES,
        smem_bytes,
        (
            _per_element("scores", rows * problem.seqlen_k),
            Launch("softmax", rows, THREADS, smem_bytes),
            _per_element("output", rows * problem.value_dim),
        ),
        ("P",),
    )


def backward(problem: Problem, device: Device, tiles: Mapping[str, int]) -> Part:
    """`bwd_1_naive`."""
    _refuse_tiles(tiles)
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    smem_bytes = WARPS * problem.accumulator.itemsize  # a partial sum for each warp
    return _part(
        problem,
        BACKWARD_PARAMS_BYTES,
        smem_bytes,
        (
            _per_element("probabilities", rows * problem.seqlen_k),
            _per_element("grad_values", keys * problem.value_dim),
            _per_element("grad_probabilities", rows * problem.seqlen_k),
            Launch("grad_scores", rows, THREADS, smem_bytes),
            _per_element("grad_queries", rows * problem.head_dim),
            _per_element("grad_keys", keys * problem.head_dim),
        ),
        ("P", "dS"),
    )


def _part(
    problem: Problem,
    params_bytes: int,
    smem_bytes: int,
    launches: tuple[Launch, ...],
    matrices: tuple[str, ...],
) -> Part:
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return Part(
        tiles={},
        macros=(
            *common_macros(problem),
            ("THREADS", THREADS),
            ("SMEM_BYTES", smem_bytes),
            ("PARAMS_BYTES", params_bytes),
        ),
        launches=tuple(launch for launch in launches if launch.grid > 0),
        scratch=tuple(Scratch(name, shape) for name in matrices),
        reasons=(f"{THREADS} threads per block, one for each element of a result",),
    )


def _per_element(entry: str, elements: int) -> Launch:
    return Launch(entry, ceil_div(elements, THREADS), THREADS)


def _refuse_tiles(tiles: Mapping[str, int]) -> None:
    if tiles:
        raise ValueError(f"tiles has {', '.join(map(str, tiles))}, and this kernel has no tiles to choose")


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
        ("ALIGN_BYTES", align_bytes),
        *feature_macros(features),
        ("THREADS", THREADS),
    )
