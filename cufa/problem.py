"""What one call asks for: shapes, dtype and which options are on.

A `Problem` holds no array and no address, so planning and compiling work from it on any machine. It is made
of a call's arguments, which are checked, in `cufa.arguments`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cufa.messages import shown
from cufa.traced.header import Written

Direction = Literal["forward", "backward"]
Shape = tuple[int, ...]

MAX_HEAD_DIM: Mapping[Direction, int] = {"forward": 512, "backward": 256}
# The widest access that a kernel makes: what knowing a larger alignment would not improve on.
MAX_ALIGN_BYTES = 16
# Lengths and counts are 32-bit in the kernels' parameters; products of them are 64-bit.
MAX_EXTENT = 2**31 - 1

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Q, K and V may be of 8 bits too, or K and V alone; nothing else is.
FLOAT8 = "float8_e4m3fn"
INPUT_DTYPES: dict[str, np.dtype[Any]] = {**DTYPES, FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}
_DTYPE_NAMES = {dtype: name for name, dtype in INPUT_DTYPES.items()}
# What the output of such inputs may be, the first one if nobody says; and what Q may be beside such K and V.
FLOAT8_OUTPUTS = ("bfloat16", "float16")

# Beside a transposed V, keys are copied in fours, two of each at once.
KEYS_TOGETHER = 4

# How float32 products may be computed: as exactly as float32 sums of them are, or from operands that are
# rounded to tf32, of which 10 bits are the mantissa's.
Precision = Literal["ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")

# Where a layout has batch, seqlen and heads; head_dim is last in each.
LayoutName = Literal["bshd", "bhsd"]
LAYOUTS: dict[str, tuple[int, int, int]] = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
# Where a tensor has batch, seqlen and heads; packed sequences have no batch.
Axes = tuple[int | None, int, int]
_PACKED_AXES: Axes = (None, 0, 1)


def dtype_of(array: Any) -> np.dtype[Any]:
    """An array's dtype as NumPy's, of which other libraries have the names; np.float32 stands for its own."""
    dtype = array.dtype
    if isinstance(dtype, (np.dtype, type)):
        return np.dtype(dtype)
    return np.dtype(str(dtype).rpartition(".")[2])


def dtype_name(dtype: Any, argument: str, allowed: Collection[str] = DTYPES) -> str:
    """One of the `allowed` names; TypeError, naming the argument, for any other dtype."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None or name not in allowed:
        order = "" if getattr(dtype, "isnative", True) else ", in the machine's byte order"
        raise TypeError(f"{argument} has dtype {dtype}; it may be {one_of(allowed)}{order}")
    return name


def accumulator_dtype(dtype: str) -> np.dtype[Any]:
    """What sums and the LSE are kept in: float64 for float64, float32 for the others."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def one_of(names: Iterable[str]) -> str:
    """As in: a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Features:
    """What a call asks for beyond plain attention. Kernels are compiled without what is off.

    `window` is how many keys before and after the diagonal a query sees, None for all of them; `bias` and
    `mask` are the shapes of those arrays, with 1 along axes that are broadcast, and `bias_dtype` is the
    bias's dtype; of a mask in `mask_bits`, eight keys are one byte. `packed` stands for cu_seqlens;
    `page_size` is how many keys a page has, 0 without a block table; `gradients` are the inputs beyond q, k
    and v whose gradients are wanted, of "bias", "sink" and "score_mod", which stands for the arrays of floats
    that it reads, whose elements are `array_sums` together. Packed sequences with fewer than `least_queries`
    or more than `most_queries` are left out; 0 is no such limit, and calls have none: plans do. With `tf32`,
    tensor cores may round float32 operands to tf32; a kernel that does not is right as well, so this is none
    of the `names`; nor is `descale`, which belongs to 8-bit inputs.
    """

    window: tuple[int | None, int | None] = (None, None)
    softcap: bool = False
    bias: Shape | None = None
    bias_dtype: str | None = None
    mask: Shape | None = None
    mask_bits: bool = False
    alibi: bool = False
    sink: bool = False
    descale: bool = False
    dropout: bool = False
    packed: bool = False
    page_size: int = 0
    seqused_k: bool = False
    least_queries: int = 0
    most_queries: int = 0
    dlse: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()
    array_sums: int = 0
    tf32: bool = False
    score_mod: Written | None = None
    mask_mod: Written | None = None

    @property
    def key_mask(self) -> bool:
        """Whether a key may be seen or not whatever its neighbours are."""
        return self.mask is not None or self.mask_mod is not None

    @property
    def mod_arrays(self) -> tuple[str, ...]:
        """The arrays that `score_mod` and `mask_mod` read, by their names in a call."""
        written = (mod for mod in (self.score_mod, self.mask_mod) if mod is not None)
        return tuple(name for mod in written for name, _, _ in mod.arrays)

    @property
    def differentiated_arrays(self) -> tuple[str, ...]:
        """Those of them whose gradients are wanted."""
        return self.score_mod.differentiated_names if self.score_mod is not None else ()

    @property
    def element_slopes_ask_score(self) -> bool:
        """Whether their gradients take more than a score's gradient and its place."""
        return self.score_mod is not None and self.score_mod.slopes_ask_score

    @property
    def mod_array_bytes(self) -> int:
        """What those take in the kernel's parameters."""
        return sum(mod.array_bytes for mod in (self.score_mod, self.mask_mod) if mod is not None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments that ask for what is on."""
        on = {
            "window": self.window != (None, None),
            "softcap": self.softcap,
            "bias": self.bias is not None,
            "mask": self.mask is not None,
            "alibi_slopes": self.alibi,
            "sink": self.sink,
            "score_mod": self.score_mod is not None,
            "mask_mod": self.mask_mod is not None,
            "dropout_p": self.dropout,
            "cu_seqlens": self.packed,
            "block_table": self.page_size > 0,
            "seqused_k": self.seqused_k,
            "dlse": self.dlse,
            "deterministic": self.deterministic,
            **{f"d{name}": True for name in self.gradients},
        }
        return tuple(name for name, is_on in on.items() if is_on)


PLAIN = Features()


@dataclass(frozen=True)
class Problem:
    """One attention call.

    In packed sequences `seqlen_q` and `seqlen_k` are those of all sequences together. Of keys in pages,
    `seqlen_k` is how many the block table has room for. A causal mask with
    nothing else about it is `causal`; any other range of keys is a window of the features.
    `dtype` is that of Q, and of K and V unless they have a `kv_dtype` of their own: of 8 bits beside 16.
    `out_dtype` is that of O where it is neither `dtype` nor, for 8-bit inputs, bfloat16.
    `align_bytes` is a power of two that every address and every stride is a multiple of, in bytes; the
    kernels load that much at once. `ascending` says that no stride is negative, as the copy engine needs it.
    `transposed_values` says that V lies in memory with its keys next to each other, (batch, value_dim,
    kv_heads, seqlen_k) to the kernels. `bias_boxes` says that the copy engine can bring boxes of the
    bias, which then has 16 bits an element. `max_seqlen_q` is how many queries a packed sequence has at most,
    as the caller says: only what is fastest depends on it.
    """

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    align_bytes: int = MAX_ALIGN_BYTES
    features: Features = PLAIN
    ascending: bool = True
    out_dtype: str | None = None
    transposed_values: bool = False
    bias_boxes: bool = False
    kv_dtype: str | None = None
    max_seqlen_q: int | None = None

    @cached_property
    def kind(self) -> Problem:
        """One of the same kind whose sizes are all 1, to look up what does not depend on them."""
        return replace(self, batch=1, seqlen_q=1, seqlen_k=1, heads=1, kv_heads=1, max_seqlen_q=None)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of Q."""
        return INPUT_DTYPES[self.dtype].itemsize

    @property
    def key_dtype(self) -> str:
        """The dtype of K and V."""
        return self.kv_dtype or self.dtype

    @property
    def key_itemsize(self) -> int:
        """Bytes of one element of K and V."""
        return INPUT_DTYPES[self.key_dtype].itemsize

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of the shortest rows of Q and K, and of V and O; a transposed V has no such rows."""
        of_values = self.output.itemsize if self.transposed_values else self.key_itemsize
        return self.head_dim * self.key_itemsize, self.value_dim * of_values

    @property
    def output(self) -> np.dtype[Any]:
        """The dtype of O."""
        default = FLOAT8_OUTPUTS[0] if self.dtype == FLOAT8 else self.dtype
        return DTYPES[self.out_dtype or default]

    @property
    def accumulator(self) -> np.dtype[Any]:
        """What sums and the LSE are kept in."""
        return accumulator_dtype(self.dtype)

    @property
    def group(self) -> int:
        """Query heads that share a KV head; 0 if there are no heads."""
        return self.heads // max(1, self.kv_heads)

    @property
    def packed_sequences(self) -> int:
        """How many sequences `seqlen_q` and `seqlen_k` are those of together: 1 unless they are packed."""
        return max(1, self.batch) if self.features.packed else 1

    @cached_property
    def visible_scores(self) -> int:
        """How many (query, key) pairs of one head are in the range of a causal mask or a window.

        Packed sequences are counted as if all were equally long.
        """
        left, right = self.features.window
        if self.causal:
            right = 0
        rows, keys = (size // self.packed_sequences for size in (self.seqlen_q, self.seqlen_k))
        end = rows + keys if right is None else keys - rows + right
        begin = -rows if left is None else keys - rows - left - 1
        return max(0, _pairs_up_to(rows, keys, end) - _pairs_up_to(rows, keys, begin))

    @property
    def product_dims(self) -> int:
        """Multiply-adds for each visible score: two products over a head dim forward, five backward."""
        if self.direction == "forward":
            return self.head_dim + self.value_dim
        return 3 * self.head_dim + 2 * self.value_dim

    @property
    def flops(self) -> int:
        """Operations of the matrix products, two for each multiply-add."""
        return 2 * self.batch * self.heads * self.visible_scores * self.product_dims

    @property
    def dtypes(self) -> str:
        """Those of the arrays, and what they are rounded to, in words."""
        of_keys = f" with keys and values in {self.kv_dtype}" if self.kv_dtype is not None else ""
        return f"{self.dtype}{' as tf32' if self.features.tf32 else ''}{of_keys}"

    def __str__(self) -> str:
        """One line, as in `print(plan)`."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        features = f", with {', '.join(self.features.names)}" if self.features.names else ""
        transposed = ", values transposed" if self.transposed_values else ""
        return (
            f"{self.direction} {self.dtypes}{' causal' if self.causal else ''}, batch {self.batch}, "
            f"seqlen {self.seqlen_q} x {self.seqlen_k}, heads {heads}, head dim {dims}{transposed}{features}"
        )


def _pairs_up_to(rows: int, keys: int, offset: int) -> int:
    """How many pairs 0 <= i < rows, 0 <= j < keys have j <= i + offset."""
    first = min(max(0, -offset), rows)  # the first row that sees a key
    whole = min(max(first, keys - 1 - offset), rows)  # the first that sees them all
    growing = whole - first
    return growing * (first + offset + 1) + growing * (growing - 1) // 2 + (rows - whole) * keys


def check_layout(layout: str) -> tuple[int, int, int]:
    """The axes (batch, seqlen, heads) of a layout; ValueError for one that is not known."""
    check_choice("layout", layout, LAYOUTS)
    return LAYOUTS[layout]


def check_choice(argument: str, value: object, allowed: Collection[str]) -> None:
    """Check an argument that is one of a few words; ValueError, naming it and them, for anything else."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} is {shown(value)}; it may be {one_of(map(repr, allowed))}")


def tensor_axes(layout: str, packed: bool) -> Axes:
    """Where a tensor has batch, seqlen and heads; pages of keys are a batch of them."""
    return _PACKED_AXES if packed else check_layout(layout)


def axes_of(name: str, shape: Shape, layout: str) -> Axes:
    """Those of one tensor alone, whose number of axes says whether it is of packed sequences.

    Raises ValueError if it has another number, or is packed and has another layout than they have.
    """
    check_layout(layout)
    if len(shape) == 4 or (len(shape) == 3 and layout == "bshd"):
        return tensor_axes(layout, packed=len(shape) == 3)
    raise ValueError(
        f"{name} has shape {shape}; it must have 4 axes, or 3 if sequences are packed (in layout 'bshd')"
    )


def four_axes(shape: Shape) -> Shape:
    """The shape with those axes in front that broadcasting adds."""
    return (1,) * (4 - len(shape)) + shape


def output_shape(problem: Problem, layout: str) -> Shape:
    """The shape of O in this layout."""
    if problem.features.packed:
        return problem.seqlen_q, problem.heads, problem.value_dim
    batch_axis, seqlen_axis, heads_axis = check_layout(layout)
    shape = [0, 0, 0, problem.value_dim]
    shape[batch_axis], shape[seqlen_axis], shape[heads_axis] = (
        problem.batch,
        problem.seqlen_q,
        problem.heads,
    )
    return tuple(shape)


def lse_shape(problem: Problem) -> Shape:
    """The shape of the LSE: (batch, heads, seqlen_q) in every layout, (heads, tokens) if packed."""
    if problem.features.packed:
        return problem.heads, problem.seqlen_q
    return problem.batch, problem.heads, problem.seqlen_q
