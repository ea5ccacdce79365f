"""What one call asks for: shapes, dtypes and options.

A `Problem` holds no array and no address, so any machine can plan and compile for it. `cufa.arguments` checks
a call's arguments and makes the Problem.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cufa.integers import ceil_div
from cufa.messages import shown
from cufa.traced.header import TracedCode

Direction = Literal["forward", "backward"]
Shape = tuple[int, ...]

MAX_HEAD_DIM, MAX_VALUE_DIM = 576, 512
# The widest access of a kernel in bytes; a larger alignment gains nothing.
MAX_ALIGN_BYTES = 16
# Lengths and counts are 32-bit in the kernels' parameters; their products are 64-bit.
MAX_EXTENT = 2**31 - 1
# The largest axis: kernels count past its end, by less than this distance.
MAX_AXIS = MAX_EXTENT - 2**15

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# So many query heads with the same KV head fill a tile of rows.
HEADS_OF_TILE = 64
# Features that depend neither on the head nor on the query's place.
_FEATURES_OF_ALL_HEADS = frozenset(("softcap", "seqused_k", "block_table"))
# Only Q, K and V together, or K and V, may have 8 bits.
FLOAT8 = "float8_e4m3fn"
INPUT_DTYPES: dict[str, np.dtype[Any]] = {**DTYPES, FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}
_DTYPE_NAMES = {dtype: name for name, dtype in INPUT_DTYPES.items()}
# The output dtypes for 8-bit inputs, the default first; also the dtypes of Q with K and V in 8 bits.
FLOAT8_OUTPUTS = ("bfloat16", "float16")

# The keys that a byte of a mask in bits holds.
BYTE_BITS = 8

# With a transposed V, keys are copied in groups of four, two adjacent ones at a time.
KEYS_TOGETHER = 4

# Precision of float32 products: as exact as float32 sums, or with operands rounded to tf32 (10 bits of
# mantissa).
Precision = Literal["ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")

# The axes batch, seqlen and heads in each layout; head_dim is always last.
LayoutName = Literal["bshd", "bhsd"]
LAYOUTS: dict[str, tuple[int, int, int]] = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
# The axes batch, seqlen and heads of a tensor; packed sequences have no batch axis.
Axes = tuple[int | None, int, int]
_PACKED_AXES: Axes = (None, 0, 1)


def dtype_of(array: Any) -> np.dtype[Any]:
    """An array's dtype as NumPy's; other libraries use the same names. np.float32 stands for its dtype."""
    dtype = array.dtype
    if isinstance(dtype, (np.dtype, type)):
        return np.dtype(dtype)
    return np.dtype(str(dtype).rpartition(".")[2])


def dtype_name(dtype: Any, argument: str, allowed: Collection[str] = DTYPES) -> str:
    """The dtype's name, one of `allowed`; raises TypeError, naming the argument, for any other dtype."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None or name not in allowed:
        order = "" if getattr(dtype, "isnative", True) else ", in the machine's byte order"
        raise TypeError(f"{argument} has dtype {dtype}; it may be {one_of(allowed)}{order}")
    return name


def accumulator_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of sums and of the LSE: float64 for float64, float32 for the others."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def one_of(names: Iterable[str]) -> str:
    """Join names, as in: a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Features:
    """What a call asks for beyond plain attention. Kernels are compiled without what is off.

    `window` is how many keys before and after the diagonal a query sees, None for all. `bias` and `mask` are
    the shapes of these arrays, with 1 along broadcast axes; `bias_dtype` is the bias's dtype. With
    `mask_bits`, a byte of the mask holds eight keys. `packed` stands for cu_seqlens; `page_size` is the
    number of keys in a page, 0 without a block table. `gradients` are the inputs beyond q, k and v whose
    gradients are requested: "bias", "sink" or "score_mod", which stands for the float arrays that it reads;
    `array_sums` is the number of their elements. Packed sequences with fewer than `least_queries` or more
    than `most_queries` are left out (0: no limit); only plans set these limits, calls do not. With `tf32`,
    tensor cores may round float32 operands to tf32. A kernel that does not is also right, so tf32 is not
    among the `names`; nor is `descale`, which comes with 8-bit inputs.
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
    score_mod: TracedCode | None = None
    mask_mod: TracedCode | None = None

    @property
    def windowed(self) -> bool:
        """Whether a window limits the keys before or after the diagonal that a query sees."""
        return self.window != (None, None)

    @property
    def key_mask(self) -> bool:
        """Whether each key may be visible or hidden, independently of its neighbours."""
        return self.mask is not None or self.mask_mod is not None

    @property
    def mask_of_keys(self) -> bool:
        """Whether the mask shows the same keys to all queries of a head, and no mask_mod hides more."""
        return self.mask is not None and self.mask[2] == 1 and self.mask_mod is None

    @property
    def mod_arrays(self) -> tuple[str, ...]:
        """The arrays that `score_mod` and `mask_mod` read, by the names they have in a call."""
        written = (mod for mod in (self.score_mod, self.mask_mod) if mod is not None)
        return tuple(array.name for mod in written for array in mod.arrays)

    def with_lying(self, described: Iterable[tuple[str, Shape, Shape, np.dtype[Any]]]) -> Features:
        """The same, knowing how a call's arrays lie: names, shapes, strides in bytes and dtypes of all.

        What counts is of which arrays of functions elements along the last axis are adjacent, and along which
        axes a mask repeats itself, as a broadcast one does: it has one element there.
        """
        names = (*self.mod_arrays, "mask")
        own = {
            name: (shape, strides)
            for name, shape, strides, x in described
            if name in names and (shape[-1] == 1 or strides[-1] == x.itemsize)
        }
        mask, adjacent = self.mask, own.keys() - {"mask"}
        if "mask" in own:
            sizes, steps = own["mask"]
            mask = four_axes(tuple(1 if step == 0 else size for size, step in zip(sizes, steps, strict=True)))
        return replace(
            self,
            mask=mask,
            score_mod=self.score_mod and self.score_mod.with_adjacent(adjacent),
            mask_mod=self.mask_mod and self.mask_mod.with_adjacent(adjacent),
        )

    @property
    def differentiated_arrays(self) -> tuple[str, ...]:
        """The mod arrays whose gradients are requested."""
        return self.score_mod.differentiated_names if self.score_mod is not None else ()

    @property
    def element_slopes_ask_score(self) -> bool:
        """Whether these gradients depend on the score itself, beyond its gradient and position."""
        return self.score_mod is not None and self.score_mod.slopes_ask_score

    @property
    def mod_array_bytes(self) -> int:
        """Bytes that the mod arrays take in the kernel's parameters."""
        return sum(mod.array_bytes for mod in (self.score_mod, self.mask_mod) if mod is not None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments that turn on what is on."""
        on = {
            "window": self.windowed,
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

    @property
    def words(self) -> tuple[str, ...]:
        """The `names`, for messages: the window's with its sizes, -1 for all."""
        sizes = tuple(-1 if side is None else side for side in self.window)
        return tuple(f"window {sizes}" if name == "window" else name for name in self.names)


PLAIN = Features()


@dataclass(frozen=True)
class Problem:
    """One attention call.

    For packed sequences, `seqlen_q` and `seqlen_k` count the tokens of all sequences. For keys in pages,
    `seqlen_k` is how many the block table has room for. `causal` is a plain causal mask; any other range of
    keys is a window in the features. `dtype` is that of Q, and of K and V unless `kv_dtype` is set (8 bits,
    with Q in 16). `out_dtype` is that of O, if it is neither `dtype` nor, for 8-bit inputs, bfloat16.
    `align_bytes` is a power of two that divides every address and every stride in bytes; kernels load that
    much at once. `ascending` says that no stride is negative, as the copy engine requires. With
    `transposed_values`, keys of V are adjacent in memory; kernels see (batch, value_dim, kv_heads, seqlen_k).
    With `values_in_keys`, rows of V are the beginnings of those of K, in the same memory. With
    `queries_as_heads`, which only plans set, query heads count as queries, and queries as heads; with
    `ends_by_head`, a head then sees the keys that the causal mask shows to the query.
    With `bias_boxes`, the copy engine can bring boxes of the bias, which then has 16-bit elements.
    `max_seqlen_q`, of the forward, and `max_seqlen_k`, of the backward, are the most queries and keys of a
    packed sequence, as the caller says; only speed depends on them.
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
    values_in_keys: bool = False
    queries_as_heads: bool = False
    ends_by_head: bool = False
    bias_boxes: bool = False
    kv_dtype: str | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @cached_property
    def kind(self) -> Problem:
        """The same problem with all sizes 1, to look up what does not depend on sizes."""
        return replace(
            self, batch=1, seqlen_q=1, seqlen_k=1, heads=1, kv_heads=1, max_seqlen_q=None, max_seqlen_k=None
        )

    @cached_property
    def with_queries_as_heads(self) -> Problem:
        """The problem with query heads as queries, and queries as heads, if tiles are fuller that way.

        Itself unless all heads share a KV head, there are few queries, and nothing depends on the head.
        """
        others = set(self.features.names) - _FEATURES_OF_ALL_HEADS
        fuller = 0 < self.seqlen_q < HEADS_OF_TILE <= self.heads and self.kv_heads == 1
        if self.direction == "backward" or not fuller or others:
            return self
        turned = replace(self, seqlen_q=self.heads, heads=self.seqlen_q, causal=False)
        return replace(turned, queries_as_heads=True, ends_by_head=self.causal and self.seqlen_q > 1)

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
    def key_bytes(self) -> int:
        """Bytes of a key and its value; values that lie in keys have none of their own."""
        of_values = 0 if self.values_in_keys else self.value_dim
        return (self.head_dim + of_values) * self.key_itemsize

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of the shortest rows of Q and K, and of V, unless it is transposed or in K, and O."""
        has_no_rows = self.transposed_values or self.values_in_keys
        of_values = self.output.itemsize if has_no_rows else self.key_itemsize
        return self.head_dim * self.key_itemsize, self.value_dim * of_values

    @property
    def output(self) -> np.dtype[Any]:
        """The dtype of O."""
        default = FLOAT8_OUTPUTS[0] if self.dtype == FLOAT8 else self.dtype
        return DTYPES[self.out_dtype or default]

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of sums and of the LSE."""
        return accumulator_dtype(self.dtype)

    @property
    def group(self) -> int:
        """Query heads that share a KV head; 0 if there are no heads."""
        return self.heads // max(1, self.kv_heads)

    @property
    def hides_keys(self) -> bool:
        """Whether the mask shows the same keys to all queries that share them, of all heads."""
        features = self.features
        return features.mask_of_keys and (features.mask is None or features.mask[1] == 1 or self.group == 1)

    @property
    def hides_scores(self) -> bool:
        """Whether a mask or a mask_mod may hide a key from some of the queries that share it."""
        return self.features.key_mask and not self.hides_keys

    @property
    def stated_most_keys(self) -> int:
        """How many keys a sequence has at most, if `max_seqlen_k` is right. Only speed may depend on it."""
        return self.most_keys if self.max_seqlen_k is None else min(self.max_seqlen_k, self.most_keys)

    @property
    def most_keys(self) -> int:
        """How many keys a sequence has at most, for certain.

        Of packed sequences only the sum of the keys is known, and how many keys a mask has.
        """
        keys = self.seqlen_k
        if self.features.packed and self.features.page_size:
            keys //= max(1, self.batch)
        if self.features.packed and self.features.mask is not None:
            keys = min(keys, self.features.mask[-1] * (BYTE_BITS if self.features.mask_bits else 1))
        return keys

    @property
    def packed_sequences(self) -> int:
        """How many sequences `seqlen_q` and `seqlen_k` span: 1 unless packed."""
        return max(1, self.batch) if self.features.packed else 1

    @property
    def tensor_batch(self) -> int:
        """The batch of the tensors: packed sequences are one."""
        return 1 if self.features.packed else self.batch

    @property
    def mean_keys(self) -> int:
        """The keys of a sequence; if packed, on average."""
        return self.seqlen_k // self.packed_sequences

    @cached_property
    def typical(self) -> Problem:
        """The problem with as many tokens in packed sequences that are all as long as an average token's.

        These are longer and fewer than the sequences are, if the caller says that the longest is longer than
        the mean: most tokens, and so most of the work, are in long sequences. One sequence is taken to have
        the stated length, and all others the same. The forward goes by the lengths of queries; the backward,
        whose blocks have tiles of keys, by those of keys.
        """
        longest, tokens, others = self.max_seqlen_q, self.seqlen_q, self.batch - 1
        if self.direction == "backward":
            longest, tokens = self.max_seqlen_k, self.seqlen_k
        if longest is None or self.features.page_size or not tokens or others < 1:
            return self
        longest = min(max(longest, ceil_div(tokens, self.batch)), tokens)
        if longest * self.batch == tokens:  # all are equally long, and how long is still of use
            return self
        squares = longest**2 + (tokens - longest) ** 2 / others
        return replace(self, batch=max(1, round(tokens**2 / squares)), max_seqlen_q=None)

    @property
    def visible_keys(self) -> int:
        """The keys of a sequence that any query sees, by the window; if packed, of equally long ones."""
        keys, (left, right) = self.mean_keys, self.features.window
        if left is None:
            return keys
        queries = ceil_div(self.seqlen_q, self.packed_sequences)
        return min(keys, left + queries + (keys if right is None else right))

    @property
    def queries_with_keys(self) -> int:
        """The queries of a sequence that see a key; if packed, of equally long ones.

        If keys are fewer, the first queries see none under a causal mask, or if the window ends.
        """
        queries, keys = (ceil_div(size, self.packed_sequences) for size in (self.seqlen_q, self.seqlen_k))
        return queries if self.keys_after is None else min(queries, keys + self.keys_after)

    @cached_property
    def visible_scores(self) -> int:
        """How many (query, key) pairs of one head the causal mask or window admits.

        Packed sequences count as if all were equally long.
        """
        (left, _), right = self.features.window, self.keys_after
        rows, keys = (size // self.packed_sequences for size in (self.seqlen_q, self.seqlen_k))
        end = rows + keys if right is None else keys - rows + right
        begin = -rows if left is None else keys - rows - left - 1
        return max(0, _pairs_up_to(rows, keys, end) - _pairs_up_to(rows, keys, begin))

    @property
    def seen_keys(self) -> float:
        """The keys that a query sees on average, by the causal mask or window."""
        return self.visible_scores / max(1, self.seqlen_q // self.packed_sequences)

    @property
    def seeing_queries(self) -> float:
        """The queries of a head that see a key on average, by the causal mask or window."""
        return self.visible_scores / max(1, self.mean_keys)

    @property
    def range_mask(self) -> bool:
        """Whether a causal mask or a window limits the keys that a row sees: the kernels' kRangeMask."""
        return self.causal or self.features.windowed

    @property
    def rows_alike(self) -> bool:
        """Whether all rows of a head see the same keys, those of a mask: the forward kernels' kRowsAlike."""
        return self.features.mask_of_keys and not self.range_mask

    @property
    def keys_after(self) -> int | None:
        """How many keys after the diagonal a row sees, by a causal mask or a window; None for all."""
        return 0 if self.causal else self.features.window[1]

    @property
    def hides_later_keys(self) -> bool:
        """Whether a row sees no key after the diagonal."""
        return self.keys_after == 0

    @property
    def product_dims(self) -> int:
        """Multiply-adds for each visible score: two products over a head dim forward, five backward."""
        if self.direction == "forward":
            return self.head_dim + self.value_dim
        return 3 * self.head_dim + 2 * self.value_dim

    @property
    def flops(self) -> int:
        """Operations of the matrix products, two per multiply-add."""
        return 2 * self.batch * self.heads * self.visible_scores * self.product_dims

    @property
    def dtypes(self) -> str:
        """The dtypes of the arrays, and what they are rounded to, in words."""
        of_keys = f" with keys and values in {self.kv_dtype}" if self.kv_dtype is not None else ""
        return f"{self.dtype}{' as tf32' if self.features.tf32 else ''}{of_keys}"

    @property
    def dims(self) -> str:
        """The head dim in words: 64, or 192/128 if values have another."""
        return f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"

    def __str__(self) -> str:
        """One line, as in `print(plan)`."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        features = f", with {', '.join(self.features.words)}" if self.features.words else ""
        of_values = ", values transposed" if self.transposed_values else ""
        of_values += ", values in keys" if self.values_in_keys else ""
        of_values += ", heads as queries" if self.queries_as_heads else ""
        causal = " causal" if self.hides_later_keys or self.ends_by_head else ""
        return (
            f"{self.direction} {self.dtypes}{causal}, batch {self.batch}, "
            f"seqlen {self.seqlen_q} x {self.seqlen_k}, heads {heads}, head dim {self.dims}"
            f"{of_values}{features}"
        )


def _pairs_up_to(rows: int, keys: int, offset: int) -> int:
    """The number of pairs with 0 <= i < rows, 0 <= j < keys and j <= i + offset."""
    first = min(max(0, -offset), rows)  # the first row that sees a key
    whole = min(max(first, keys - 1 - offset), rows)  # the first row that sees all keys
    growing = whole - first
    return growing * (first + offset + 1) + growing * (growing - 1) // 2 + (rows - whole) * keys


def check_layout(layout: str) -> tuple[int, int, int]:
    """The axes (batch, seqlen, heads) of a layout; raises ValueError if it is unknown."""
    check_choice("layout", layout, LAYOUTS)
    return LAYOUTS[layout]


def check_choice(argument: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError, naming the argument and the allowed words, unless the value is one of them."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} is {shown(value)}; it may be {one_of(map(repr, allowed))}")


def integer(value: Any) -> int:
    """An integer of any kind as an int; raises TypeError for anything else, such as 1.0 or True."""
    if type(value) is int:  # as in almost all calls
        return value
    if isinstance(value, bool):
        raise TypeError("a flag is not an integer")
    return int(operator.index(value))


def tensor_axes(layout: str, packed: bool) -> Axes:
    """The axes batch, seqlen and heads of a tensor; for pages of keys, the batch axis is the page."""
    return _PACKED_AXES if packed else check_layout(layout)


def axes_of(name: str, shape: Shape, layout: str) -> Axes:
    """The axes of a single tensor; 3 axes mean packed sequences.

    Raises ValueError for any other number of axes, for one that is too long, and for packed sequences in
    another layout than theirs.
    """
    check_layout(layout)
    check_extents(name, shape)
    if len(shape) == 4 or (len(shape) == 3 and layout == "bshd"):
        return tensor_axes(layout, packed=len(shape) == 3)
    raise ValueError(
        f"{name} has shape {shape}; it must have 4 axes, or 3 if sequences are packed (in layout 'bshd')"
    )


def check_extents(name: str, shape: Shape) -> None:
    """Raise ValueError for an axis that is longer than kernels can count."""
    if max(shape, default=0) > MAX_AXIS:
        raise ValueError(f"{name} has shape {shape}; no axis may exceed {MAX_AXIS}")


def four_axes(shape: Shape) -> Shape:
    """The shape with the leading axes that broadcasting adds."""
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
