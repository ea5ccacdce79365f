"""The registry: one row for each kernel, from standard attention up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cufa.device import Device
from cufa.integers import round_up
from cufa.messages import shown
from cufa.problem import DTYPES, FLOAT8, MAX_HEAD_DIM, MAX_VALUE_DIM, Direction, Problem, one_of

# From which compute capability on tensor cores take a type by mma.sync; for float64, which have them in more
# than name.
_FIRST_TENSOR_CORES = {"float16": (7, 5), "bfloat16": (8, 0), "float32": (8, 0), FLOAT8: (8, 9)}
_FLOAT64_TENSOR_CORES = frozenset(((8, 0), (9, 0), (10, 0)))
# Larger tiles of these would not fit into shared memory or, backward, into registers.
_MAX_DIMS: Mapping[Direction, Mapping[str, int]] = {
    "forward": {"float32": 512, "float64": 256},
    "backward": {"float64": 256},
}
# What the smallest tiles of `bwd_3_mma` and `bias_gradient` have in shared memory: so many rows of Q and K
# together, and as many of dO and V; their columns are padded to the steps of 16 that four warps divide; and
# so much of all else.
_LEAST_ROWS = 32
_COLUMN_STEP = 64
_OTHER_BYTES = 3072
# The fewest head dims of a pair of blocks of the Hopper backward: K has two panels of them.
_LEAST_IN_PAIRS = 65
# Keys that a copy of Hopper's engine brings at least: copies must begin where a swizzled unit does.
_BOX_KEYS = 8
# Columns of a key in 8 bits that a lane loads at once.
_WIDENED_COLS = 16
# For reasons: what hides whole keys.
_MASK_OF_KEYS = "a mask that is the same for all queries that share a key"


@dataclass(frozen=True)
class Kernel:
    """One rung of the ladder: what it is and what it supports.

    `entries` are the `extern "C"` functions of its file in the order in which they are launched; a call
    launches those that it needs.
    `memory` is what it needs in global memory beyond its inputs and outputs, without features, in the
    sequence length N.
    `tensor_cores` says that tensor cores make its products, by mma.sync; `reads_transposed`, that keys of V
    may lie next to each other; `mixes_dtypes`, that K and V may be of 8 bits beside Q in 16. `features` are
    the names of those that it supports (`cufa.problem.Features.names`). One that is `on_request` runs only if
    a call names it.
    """

    name: str
    direction: Direction
    entries: tuple[str, ...]
    idea: str
    paper: str
    memory: str
    dtypes: tuple[str, ...] = tuple(DTYPES)
    min_capability: tuple[int, int] = (7, 5)
    tensor_cores: bool = False
    min_head_dim: int = 1
    max_head_dim: int = MAX_HEAD_DIM
    max_value_dim: int = MAX_VALUE_DIM
    features: frozenset[str] = frozenset()
    only_arch: str | None = None
    min_align_bytes: int = 1
    ascending_only: bool = False
    reads_transposed: bool = False
    mixes_dtypes: bool = False
    on_request: bool = False

    @property
    def source(self) -> str:
        """Its file in this folder."""
        return f"{self.name}.cu"

    @property
    def leaves_dbias(self) -> bool:
        """Whether the gradient of a bias is computed beside it, by `bias_gradient`."""
        return self.tensor_cores or self.only_arch is not None

    @property
    def head_dims(self) -> str:
        """The head dims that it supports, in words."""
        of_values = f", of values to {self.max_value_dim}" * (self.max_value_dim < self.max_head_dim)
        return f"{self.min_head_dim} to {self.max_head_dim}{of_values}"

    def takes_dtypes(self, problem: Problem) -> bool:
        """Whether it has arithmetic for these arrays, on some device."""
        return problem.dtype in self.dtypes and (problem.kv_dtype is None or self.mixes_dtypes)

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None if the kernel can solve the problem on this device, else the reason."""
        if problem.direction != self.direction:
            return f"{self.name} is a {self.direction} kernel, and this is a {problem.direction} call"
        if problem.kv_dtype is not None and not self.mixes_dtypes:
            return f"{self.name} does not support k and v in {problem.kv_dtype} beside q in {problem.dtype}"
        if problem.dtype not in self.dtypes:
            return f"{self.name} supports {one_of(self.dtypes)}, and the arrays are {problem.dtype}"
        if self.only_arch not in (None, f"{device.arch.number}{device.arch.suffix}"):
            return f"{self.name} needs sm_{self.only_arch}, and the arch is {device.arch}"
        if device.arch.capability < self.min_capability:
            needed = "sm_{}{}".format(*self.min_capability)
            return f"{self.name} needs {needed} or newer, and the arch is {device.arch}"
        if problem.align_bytes < self.min_align_bytes:
            return (
                f"{self.name} needs addresses and strides that are multiples of {self.min_align_bytes} "
                f"bytes, not of {problem.align_bytes}"
            )
        if self.ascending_only and not problem.ascending:
            return f"{self.name} needs strides that are not negative"
        if problem.transposed_values and not self.reads_transposed:
            return f"{self.name} does not support values stored transposed"
        if self.tensor_cores and not _has_tensor_cores(problem.key_dtype, device):
            return (
                f"{self.name} needs tensor cores for {problem.key_dtype}, which {device.arch} does not have"
            )
        limit = self.max_head_dim
        if self.tensor_cores:
            limit = min(limit, _MAX_DIMS[self.direction].get(problem.dtype, limit))
        dim = max(problem.head_dim, problem.value_dim)
        if dim > limit:
            return f"{self.name} supports head dims up to {limit}, and this is {dim}"
        if dim < self.min_head_dim:
            return f"{self.name} supports head dims from {self.min_head_dim}, and this is {dim}"
        if problem.value_dim > self.max_value_dim:
            most = f"head dims of values up to {self.max_value_dim}"
            return f"{self.name} supports {most}, and this is {problem.value_dim}"
        if self.tensor_cores and self.direction == "backward":
            columns = sum(round_up(dim, _COLUMN_STEP) for dim in (problem.head_dim, problem.value_dim))
            needs = _LEAST_ROWS * columns * problem.itemsize + _OTHER_BYTES
            if needs > device.smem_per_block:
                return (
                    f"{self.name} needs {needs:,} bytes of shared memory for head dim {problem.dims}, and "
                    f"{device.arch} has {device.smem_per_block:,}"
                )
        missing = [name for name in problem.features.names if name not in self.features]
        if missing:
            return f"{self.name} does not support {', '.join(missing)}"
        if problem.features.array_sums and problem.features.deterministic:
            return f"{self.name} does not support deterministic with dscore_mod (its order of sums varies)"
        return None


@dataclass(frozen=True)
class HopperKernel(Kernel):
    """A rung whose products are wgmma's and whose tiles come by the copy engine, both of sm_90a alone.

    A backward that `hides_keys` treats a mask that hides keys from all queries as if these did not exist.
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    min_capability: tuple[int, int] = (9, 0)
    max_head_dim: int = 256
    max_value_dim: int = 256
    only_arch: str | None = "90a"
    min_align_bytes: int = 16
    ascending_only: bool = True
    hides_keys: bool = True

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """As `Kernel.unsupported`."""
        page_size = problem.features.page_size
        if page_size % _BOX_KEYS and "block_table" in self.features:
            return f"{self.name} needs pages of a multiple of {_BOX_KEYS} keys, not of {page_size}"
        if problem.transposed_values and (problem.features.packed or page_size):
            return f"{self.name} does not support transposed values in packed sequences or pages"
        if self.direction == "backward" and problem.kv_heads and not problem.heads:
            return f"{self.name} needs query heads"  # each block begins with one
        reason = super().unsupported(problem, device)
        hides = problem.hides_scores if self.hides_keys else problem.features.key_mask
        if reason is None and hides and problem.features.deterministic:
            unless = f", except {_MASK_OF_KEYS}" * self.hides_keys
            return f"{self.name} does not support deterministic with mask or mask_mod{unless}"
        return reason


@dataclass(frozen=True)
class WideHopperForward(HopperKernel):
    """One that may widen 8 bits to 16, if keys are also the values."""

    mixes_dtypes: bool = True

    def takes_dtypes(self, problem: Problem) -> bool:
        """As `Kernel.takes_dtypes`: beside keys that it widens, queries may be in 8 bits, too."""
        return super().takes_dtypes(_with_queries_widened(problem))

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """As `Kernel.unsupported`."""
        reason = super().unsupported(_with_queries_widened(problem), device)
        if reason is not None or problem.key_dtype != FLOAT8:
            return reason
        beside = f"{self.name} supports k and v in {FLOAT8} beside q in {problem.dtype}"
        if not problem.values_in_keys:
            return f"{beside} only if v is the first columns of k"
        if problem.head_dim % _WIDENED_COLS:
            return (
                f"{beside} only with a head dim that is a multiple of {_WIDENED_COLS}, not {problem.head_dim}"
            )
        unwidened = [name for name in problem.features.names if name in ("bias", "dropout_p", "score_mod")]
        return f"{beside} only without {', '.join(unwidened)}" if unwidened else None


def _with_queries_widened(problem: Problem) -> Problem:
    """The problem with queries in 16 bits, if keys in 8 bits are also the values."""
    if problem.dtype != FLOAT8 or not problem.values_in_keys:
        return problem
    return replace(problem, dtype="float16", kv_dtype=FLOAT8)


@dataclass(frozen=True)
class HopperBackward(HopperKernel):
    """One whose warpgroups have keys of their own: dK and dV of those must fit their registers.

    Beside dK of more head dims than values may have, there is no room for both S and dP, nor for a bias.
    """

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """As `Kernel.unsupported`."""
        reason = super().unsupported(problem, device)
        if reason is None and problem.features.element_slopes_ask_score:
            return (
                f"{self.name} does not support dscore_mod where elements or their slopes depend on the score"
            )
        if reason is None and problem.features.dropout and problem.features.array_sums:
            return f"{self.name} does not support dropout_p with dscore_mod"
        asks = " and ".join(
            name for name in ("softcap", "bias", "dropout_p") if name in problem.features.names
        )
        if reason is None and problem.head_dim > self.max_value_dim and asks:
            return (
                f"{self.name} supports head dims up to {self.max_value_dim} with {asks}, and this is "
                f"{problem.head_dim}"
            )
        return reason


@dataclass(frozen=True)
class PairHopperBackward(HopperKernel):
    """One whose blocks are in pairs, with twice as many keys, and divide the products.

    Each of the key block's two warpgroups has a panel of K to multiply with, of 64 head dims.
    """

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """As `Kernel.unsupported`."""
        reason = super().unsupported(problem, device)
        if reason is None and problem.head_dim < _LEAST_IN_PAIRS:
            least = f"a head_dim of at least {_LEAST_IN_PAIRS}"
            return f"{self.name} needs {least}, and this is {problem.head_dim}"
        if reason is None and problem.hides_scores:
            return f"{self.name} supports only {_MASK_OF_KEYS}"
        return reason


@dataclass(frozen=True)
class Float32Kernel(HopperKernel):
    """A Hopper rung of float32 in halves, which a launch of its own makes: any rows will do."""

    idea: str = "Hopper: each float32 as the sum of two float16, three wgmma products for one"
    paper: str = "Ootomo and Yokota 2022, section 3"
    memory: str = "O(N)"
    dtypes: tuple[str, ...] = ("float32",)
    min_align_bytes: int = 1
    ascending_only: bool = False
    hides_keys: bool = False
    max_head_dim: int = 128
    max_value_dim: int = 128


def features_in_words(kernel: Kernel) -> str:
    """Those that a kernel supports, of those that a call of its direction may ask for."""
    alike = (each.features for each in KERNELS.values() if each.direction == kernel.direction)
    missing = frozenset[str]().union(*alike) - kernel.features
    if not missing:
        return "all"
    if len(missing) <= len(kernel.features):  # and causal
        return f"all but {', '.join(sorted(missing))}"
    return ", ".join(("causal", *sorted(kernel.features)))


def tensor_cores_in_words() -> str:
    """On which archs mma.sync takes which dtypes."""
    first = (f"{dtype} from sm_{major}{minor} on" for dtype, (major, minor) in _FIRST_TENSOR_CORES.items())
    of_float64 = (f"sm_{major}{minor}" for major, minor in sorted(_FLOAT64_TENSOR_CORES))
    return f"{', '.join(first)}, float64 on {', '.join(of_float64)}"


def _has_tensor_cores(dtype: str, device: Device) -> bool:
    if dtype == "float64":
        return device.arch.capability in _FLOAT64_TENSOR_CORES
    return device.arch.capability >= _FIRST_TENSOR_CORES[dtype]


# What the kernels support that are made for use.
_FEATURES = frozenset(
    (
        *("window", "softcap", "bias", "mask", "alibi_slopes", "sink", "dropout_p", "cu_seqlens"),
        *("seqused_k", "score_mod", "mask_mod"),
    )
)
_FORWARD_FEATURES = _FEATURES | {"block_table"}
_BACKWARD_FEATURES = _FEATURES | {"dlse", "deterministic", "dbias", "dsink", "dscore_mod"}
# What makes scores more than products and ALiBi's line.
_SHAPES = frozenset(("softcap", "bias", "dbias", "score_mod"))
_HOPPER_BACKWARD_FEATURES = frozenset(
    (
        *("window", "softcap", "bias", "alibi_slopes", "sink", "cu_seqlens", "seqused_k"),
        *("dlse", "dbias", "dsink", "deterministic", "score_mod", "mask", "mask_mod"),
    )
)

_HOPPER_BACKWARD_ENTRIES = (
    *("seen_tiles", "row_sums", "key_tiles", "round_keys", "round_queries", "sink_gradient"),
)
_FLOAT32_BACKWARD_FEATURES = _FEATURES | {"dlse", "dbias", "dsink", "deterministic"}
_FLOAT32_BACKWARD_ENTRIES = (
    *("seen_tiles", "to_halves", "key_tiles", "store_query_gradients", "exact_tiles"),
    "sink_gradient",
)

_LADDER = (
    Kernel(
        name="fwd_1_naive",
        direction="forward",
        entries=("scores", "softmax", "output"),
        idea="standard attention: S and P in global memory, safe softmax in three passes",
        paper="Dao et al. 2022, Algorithm 0",
        memory="O(N^2)",
        on_request=True,
    ),
    Kernel(
        name="fwd_2_online_softmax",
        direction="forward",
        entries=("scores", "softmax", "output"),
        idea="softmax in two passes, with a running maximum and sum",
        paper="Milakov and Gimelshein 2018, Algorithm 3",
        memory="O(N^2)",
        on_request=True,
    ),
    Kernel(
        name="fwd_3_flash_v1",
        direction="forward",
        entries=("fwd_3_flash_v1",),
        idea="tiles in shared memory; outer loop over keys, one launch per block of keys",
        paper="Dao et al. 2022, Algorithm 1",
        memory="O(N)",
        on_request=True,
    ),
    Kernel(
        name="fwd_4_flash_v2",
        direction="forward",
        entries=("fwd_4_flash_v2",),
        idea="outer loop over queries, one launch; O and the softmax state in registers",
        paper="Dao 2023, Algorithm 1",
        memory="none",
        features=_FORWARD_FEATURES,
    ),
    Kernel(
        name="fwd_5_mma",
        direction="forward",
        entries=("seen_tiles", "fwd_5_mma"),
        idea="tensor cores (mma.sync): S, P and O in fragments, asynchronous copies",
        paper="Dao 2023, Algorithm 1",
        memory="none",
        tensor_cores=True,
        features=_FORWARD_FEATURES,
    ),
    HopperKernel(
        name="fwd_6_wgmma",
        direction="forward",
        entries=("seen_tiles", "clear_counts", "fwd_6_wgmma"),
        idea="Hopper: some warps copy (TMA), warpgroups multiply (wgmma) while others compute the softmax",
        paper="Shah et al. 2024, Algorithm 2",
        memory="O(N)",
        features=frozenset(
            (
                *("window", "softcap", "bias", "alibi_slopes", "sink", "dropout_p", "cu_seqlens"),
                *("seqused_k", "block_table", "score_mod", "mask", "mask_mod"),
            )
        ),
    ),
    HopperKernel(
        name="fwd_7_fp8",
        direction="forward",
        entries=("clear_counts", "fwd_7_fp8"),
        idea="Hopper: 8-bit operands; V is transposed on its way to the product unless it is stored so",
        paper="Shah et al. 2024, section 3.3",
        memory="O(N)",
        dtypes=(FLOAT8,),
        reads_transposed=True,
        features=frozenset(("window", "softcap", "sink", "cu_seqlens", "seqused_k", "block_table")),
    ),
    Kernel(
        name="fwd_8_split_kv",
        direction="forward",
        entries=("fwd_8_split_kv", "merge_parts"),
        idea="few queries: heads that share keys share a tile, keys are split among blocks, parts merged",
        paper="Dao et al. 2023, Flash-Decoding",
        memory="O(N)",
        dtypes=("float16", "bfloat16", FLOAT8),
        min_capability=(8, 0),
        tensor_cores=True,
        min_align_bytes=2,
        mixes_dtypes=True,
        features=_FORWARD_FEATURES - {"dropout_p"},
    ),
    Float32Kernel(
        name="fwd_9_float32",
        direction="forward",
        entries=("seen_tiles", "to_halves", "fwd_9_float32"),
        max_head_dim=256,
        max_value_dim=256,
        features=_FEATURES,
    ),
    WideHopperForward(
        name="fwd_10_wgmma_wide",
        direction="forward",
        entries=("clear_counts", "fwd_10_wgmma_wide", "merge_parts"),
        idea="Hopper, head dims over 256: two warpgroups share queries and split the columns of the output",
        paper="Li and Liu 2025, FlashMLA",
        memory="O(N)",
        min_head_dim=257,
        max_head_dim=MAX_HEAD_DIM,
        max_value_dim=MAX_VALUE_DIM,
        features=frozenset(
            (
                *("window", "softcap", "bias", "alibi_slopes", "sink", "dropout_p", "cu_seqlens"),
                *("seqused_k", "block_table", "score_mod"),
            )
        ),
    ),
    Kernel(
        name="bwd_1_naive",
        direction="backward",
        entries=(
            "probabilities",
            "grad_values",
            "grad_probabilities",
            "grad_scores",
            "grad_queries",
            "grad_keys",
        ),
        idea="standard backward: P and dS in global memory",
        paper="Dao et al. 2022, Algorithm 3",
        memory="O(N^2)",
        on_request=True,
    ),
    Kernel(
        name="bwd_2_flash_v2",
        direction="backward",
        entries=(
            *("row_sums", "key_tiles", "query_tiles", "round_queries"),
            *("bias_gradient", "array_gradients", "sink_gradient"),
        ),
        idea="P recomputed in tiles from Q, K and LSE; dK and dV in registers, dQ by atomics",
        paper="Dao 2023, Algorithm 2",
        memory="O(N)",
        features=_BACKWARD_FEATURES,
    ),
    Kernel(
        name="bwd_3_mma",
        direction="backward",
        entries=(
            *("seen_tiles", "row_sums", "key_tiles", "round_keys", "query_tiles", "round_queries"),
            *("array_gradients", "sink_gradient"),
        ),
        idea="tensor cores: S and dP transposed, so that P and dS stay in registers",
        paper="Dao 2023, Algorithm 2",
        memory="O(N)",
        tensor_cores=True,
        features=_BACKWARD_FEATURES,
    ),
    HopperBackward(
        name="bwd_4_wgmma",
        direction="backward",
        entries=(*_HOPPER_BACKWARD_ENTRIES[:-1], "array_gradients", "sink_gradient"),
        idea="Hopper: five wgmma products, overlapped with each other and the softmax; tiles by TMA",
        paper="Shah et al. 2024, Algorithm 3",
        memory="O(N)",
        max_head_dim=192,
        max_value_dim=128,
        features=_HOPPER_BACKWARD_FEATURES | {"dscore_mod", "dropout_p"},
    ),
    HopperKernel(
        name="bwd_5_wgmma_wide",
        direction="backward",
        entries=_HOPPER_BACKWARD_ENTRIES,
        idea="head dims over 128: two warpgroups, over 256 of two blocks, share the keys and split the dims",
        paper="Shah et al. 2024, Algorithm 3",
        memory="O(N)",
        min_head_dim=129,
        max_head_dim=512,
        max_value_dim=512,
        features=_HOPPER_BACKWARD_FEATURES | {"dropout_p"},
    ),
    Float32Kernel(
        name="bwd_6_float32",
        direction="backward",
        entries=_FLOAT32_BACKWARD_ENTRIES,
        features=_FLOAT32_BACKWARD_FEATURES,
    ),
    Float32Kernel(
        name="bwd_7_float32_wide",
        direction="backward",
        entries=_FLOAT32_BACKWARD_ENTRIES,
        idea="head dims over 128, in halves: warpgroups share tiles and split the dims, one has S, one dP",
        min_head_dim=129,
        max_head_dim=256,
        max_value_dim=256,
        features=_FLOAT32_BACKWARD_FEATURES,
    ),
    PairHopperBackward(
        name="bwd_8_wgmma_pair",
        direction="backward",
        entries=_HOPPER_BACKWARD_ENTRIES[1:],
        idea="pairs of blocks: one has K and Q, one V and dO; they exchange P and dS",
        paper="Shah et al. 2024, Algorithm 3",
        memory="O(N)",
        min_head_dim=129,
        features=_HOPPER_BACKWARD_FEATURES - _SHAPES - {"mask_mod"},
    ),
)

KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _LADDER})


def whole_name(name: str, names: Iterable[str]) -> str:
    """That of `names` of which this is as much as leaves no other, fwd_4 of fwd_4_flash_v2; else as it is."""
    meant = [each for each in names if each.startswith(f"{name}_")]
    return meant[0] if len(meant) == 1 else name


def kernel_named(name: str, direction: str | None = None) -> Kernel:
    """The registry's row of that name, which may be short.

    Raises ValueError if there is none; it names those of the direction, or all.
    """
    kernel = KERNELS.get(whole_name(name, KERNELS)) if isinstance(name, str) else None
    if kernel is None:
        allowed = (kernel.name for kernel in KERNELS.values() if direction in (None, kernel.direction))
        raise ValueError(f"kernel is {shown(name)}; it may be {', '.join(allowed)}")
    return kernel


def reads_transposed(problem: Problem, device: Device, name: str | None = None) -> bool:
    """Whether a kernel, or that of this name, can solve a problem whose values are stored transposed."""
    kernels = KERNELS.values() if name is None else (kernel_named(name),)
    return any(kernel.reads_transposed and not kernel.unsupported(problem, device) for kernel in kernels)


@dataclass(frozen=True)
class Companion:
    """A kernel beside the ladder, for one function of the library, and what it is compiled with.

    `features`, `dtypes` and `mixes_dtypes` are as in `Kernel`.
    """

    name: str
    function: str
    idea: str
    paper: str
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    mixes_dtypes: bool = False


COMPANIONS: Mapping[str, Companion] = MappingProxyType(
    {
        companion.name: companion
        for companion in (
            Companion(
                name="softmax",
                function="cufa.softmax",
                idea="one block per row, read two or three times",
                paper="Milakov and Gimelshein 2018, Algorithms 2 and 3",
            ),
            Companion(
                name="merge",
                function="cufa.merge",
                idea="two partial results merged, one warp per row",
                paper="Milakov and Gimelshein 2018, section 3.1",
            ),
            Companion(
                name="rotary",
                function="cufa.rotary",
                idea="pairs of columns rotated by a token's angles, one thread for a part of a row",
                paper="Su et al. 2021, eq. 34",
            ),
            Companion(
                name="append",
                function="flash_attn_with_kvcache of cufa.compat",
                idea="new keys and values into a cache or its pages, rotated and rounded on the way",
                paper="Kwon et al. 2023, section 5.1",
                dtypes=(*DTYPES, FLOAT8),
                mixes_dtypes=True,
            ),
            Companion(
                name="quantize",
                function="cufa.quantize",
                idea="elements rounded to 8 bits, in units of a descale that the heads of a group share",
                paper="Shah et al. 2024, section 3.3",
                features=frozenset(("cu_seqlens",)),
            ),
            Companion(
                name="bias_gradient",
                function="cufa.attention_backward(..., return_dbias=True)",
                idea="the gradient of the bias: one block per tile, summed over all that share it",
                paper="Dao 2023, Algorithm 2",
                features=_BACKWARD_FEATURES - {"dsink", "dscore_mod"} | {"causal"},
            ),
            Companion(
                name="attn_probs",
                function="cufa.attention(..., return_attn_probs=True)",
                idea="the probabilities from Q, K and the LSE, tile by tile",
                paper="Dao 2023, Algorithm 2",
                features=_FORWARD_FEATURES - {"cu_seqlens"} | {"causal"},
            ),
        )
    }
)
