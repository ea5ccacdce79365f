"""What one call asks for, validated once: shapes, dtype and which options are on.

A `Problem` holds no array and no address, so planning and compiling work from it on any machine.
Everything wrong with a call's shapes and dtypes is raised here, before anything is allocated.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from cufa.rounding import ceil_div
from cufa.score_mod import Written

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
# Q, K and V may be of 8 bits too; nothing else is.
FLOAT8 = "float8_e4m3fn"
INPUT_DTYPES: dict[str, np.dtype[Any]] = {**DTYPES, FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}
_DTYPE_NAMES = {dtype: name for name, dtype in INPUT_DTYPES.items()}
# What the output of such inputs may be, the first one if nobody says.
FLOAT8_OUTPUTS = ("bfloat16", "float16")

# How float32 products may be computed: as exactly as float32 sums of them are, or from operands that are
# rounded to tf32, of which 10 bits are the mantissa's.
Precision = Literal["ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")

# Where a layout has batch, seqlen and heads; head_dim is last in each.
LayoutName = Literal["bshd", "bhsd"]
LAYOUTS: dict[str, tuple[int, int, int]] = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
_AXES = {
    "bshd": "(batch, seqlen, heads, head_dim)",
    "bhsd": "(batch, heads, seqlen, head_dim)",
}
_PAGE_AXES = {
    "bshd": "(pages, page_size, kv_heads, head_dim)",
    "bhsd": "(pages, kv_heads, page_size, head_dim)",
}
# Where a tensor has batch, seqlen and heads; packed sequences have no batch.
Axes = tuple[int | None, int, int]
_PACKED_AXES: Axes = (None, 0, 1)


def dtype_name(dtype: Any, argument: str, allowed: Mapping[str, Any] = DTYPES) -> str:
    """One of `allowed`'s names; TypeError, naming the argument, for any other dtype."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None or name not in allowed:
        raise TypeError(f"{argument} has dtype {dtype}; it may be {one_of(allowed)}")
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
    that it reads, whose elements are `array_sums` together. With `tf32`, tensor cores may round float32
    operands to tf32; a kernel that does not is right as well, so this is none of the `names`; nor is
    `descale`, which belongs to 8-bit inputs.
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
    dlse: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()
    array_sums: int = 0
    tf32: bool = False
    score_mod: Written | None = None
    mask_mod: Written | None = None

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
    def mod_array_bytes(self) -> int:
        """What those take in the kernel's parameters."""
        return sum(mod.array_bytes for mod in (self.score_mod, self.mask_mod) if mod is not None)

    @property
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
    `out_dtype` is that of O where it is neither `dtype` nor, for 8-bit inputs, bfloat16.
    `align_bytes` is a power of two that every address and every stride is a multiple of, in bytes; the
    kernels load that much at once. `ascending` says that no stride is negative, as the copy engine needs it.
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

    @property
    def itemsize(self) -> int:
        """Bytes of one element of Q, K and V."""
        return INPUT_DTYPES[self.dtype].itemsize

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

    @property
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

    def __str__(self) -> str:
        """One line, as in `print(plan)`."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        features = f", with {', '.join(self.features.names)}" if self.features.names else ""
        dtype = f"{self.dtype} as tf32" if self.features.tf32 else self.dtype
        return (
            f"{self.direction} {dtype}{' causal' if self.causal else ''}, batch {self.batch}, "
            f"seqlen {self.seqlen_q} x {self.seqlen_k}, heads {heads}, head dim {dims}{features}"
        )


def _pairs_up_to(rows: int, keys: int, offset: int) -> int:
    """How many pairs 0 <= i < rows, 0 <= j < keys have j <= i + offset."""
    first = min(max(0, -offset), rows)  # the first row that sees a key
    whole = min(max(first, keys - 1 - offset), rows)  # the first that sees them all
    growing = whole - first
    return growing * (first + offset + 1) + growing * (growing - 1) // 2 + (rows - whole) * keys


class Options(NamedTuple):
    """Those options of a call that are no arrays, as far as they say what kind of problem it is.

    `softcap` and `dropout` are whether there is one, `score_mod` and `mask_mod` what kernels are compiled
    with; the other fields are the arguments of that name.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()
    layout: str = "bshd"
    precision: str = "ieee"
    score_mod: Written | None = None
    mask_mod: Written | None = None


def check_options(options: Options) -> None:
    """Check those options; TypeError or ValueError with what they may be."""
    if not isinstance(options.causal, (bool, np.bool_, int)):
        raise TypeError(f"causal is {options.causal!r}; it may be True or False")
    if not isinstance(options.deterministic, (bool, np.bool_, int)):
        raise TypeError(f"deterministic is {options.deterministic!r}; it may be True or False")
    if options.precision not in PRECISIONS:
        raise ValueError(f"precision is {options.precision!r}; it may be {' or '.join(PRECISIONS)}")
    check_layout(options.layout)
    check_window(options.window)


def check_layout(layout: str) -> tuple[int, int, int]:
    """The axes (batch, seqlen, heads) of a layout; ValueError for one that is not known."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it may be {one_of(LAYOUTS)}")
    return LAYOUTS[layout]


def check_window(window: object) -> tuple[int | None, int | None]:
    """How many keys before and after the diagonal are seen; None, and -1, are all of them."""
    if window is None:
        return None, None
    wanted = f"window is {window!r}; it may be None or a pair (left, right) of numbers of keys"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(wanted)
    sides: list[int | None] = []
    for side in window:
        if side is not None:
            try:
                side = operator.index(side)
            except TypeError:
                raise TypeError(f"{wanted}, None or -1 for all") from None
            if not -1 <= side <= MAX_EXTENT:
                raise ValueError(f"{wanted}, 0 to {MAX_EXTENT}, None or -1 for all")
        sides.append(None if side == -1 else side)
    return sides[0], sides[1]


def check_softcap(softcap: float) -> float:
    """The bound of the scores, 0 for none; ValueError if it is negative or not finite."""
    softcap = _finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for none")
    return softcap


def check_dropout(dropout_p: float, seed: int, offset: int) -> tuple[float, int, int]:
    """Dropout's arguments; ValueError or TypeError if one is impossible."""
    dropout_p = _finite("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1")
    numbers = []
    for name, value, bits in (("seed", seed, 64), ("offset", offset, 32)):
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}; it must be an integer") from None
        if not 0 <= number < 2**bits:
            raise ValueError(f"{name} is {number}; it must be at least 0 and below 2**{bits}")
        numbers.append(number)
    return dropout_p, numbers[0], numbers[1]


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of the scores, 1 / sqrt(head_dim) if None; ValueError if it is not finite."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    return _finite("softmax_scale", softmax_scale, " or None")


def _finite(name: str, value: float, or_else: str = "") -> float:
    try:
        finite = math.isfinite(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it may be a number{or_else}") from None
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)


def make_problem(
    direction: Direction, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], options: Options
) -> Problem:
    """The Problem of arrays with these shapes and dtypes, given by the names of the arguments.

    Raises ValueError for shapes that don't go together and TypeError for dtypes that don't, naming the
    argument, what it is and what it may be.
    """
    check_options(options)
    packed = "cu_seqlens_q" in shapes or "cu_seqlens_k" in shapes
    if "block_table" in shapes:
        _check_paging(direction, shapes)
    if packed and options.layout != "bshd":
        raise ValueError(f"layout is {options.layout!r}, and packed sequences have none but 'bshd'")
    problem = _tensors(direction, shapes, dtypes, options.layout, packed)
    features = _features(problem, shapes, dtypes, options)
    return replace(problem, causal=_range(options)[0], features=features)


def _tensors(
    direction: Direction, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], layout: str, packed: bool
) -> Problem:
    """The Problem that q, k and v make."""
    paged = "block_table" in shapes
    batch_axis, seqlen_axis, heads_axis = tensor_axes(layout, packed)
    page_axis, key_axis, kv_heads_axis = tensor_axes(layout, packed and not paged)
    axes, hint = _AXES[layout], "; packed sequences have 3, with cu_seqlens_q and cu_seqlens_k"
    if packed:
        axes, hint = "(tokens, heads, head_dim), with cu_seqlens", ""
    _check_axes("q", shapes["q"], 3 if packed else 4, f"{axes}{hint}")
    for name in ("k", "v"):
        if paged:
            _check_axes(name, shapes[name], 4, f"{_PAGE_AXES[layout]}, with block_table")
        else:
            _check_axes(name, shapes[name], 3 if packed else 4, f"{axes}{hint}")
    q, k, v = shapes["q"], shapes["k"], shapes["v"]

    dtype = dtype_name(dtypes["q"], "q", INPUT_DTYPES)
    if dtype == FLOAT8 and direction == "backward":
        raise TypeError(f"q has dtype {dtype}, of which there are no gradients; it may be {one_of(DTYPES)}")
    for name in ("k", "v"):
        if dtype_name(dtypes[name], name, INPUT_DTYPES) != dtype:
            raise TypeError(f"{name} has dtype {dtypes[name]} and q {dtypes['q']}; they must be the same")

    heads, kv_heads = q[heads_axis], k[kv_heads_axis]
    for name in ("k", "v"):
        if not paged and batch_axis is not None and shapes[name][batch_axis] != q[batch_axis]:
            raise ValueError(f"{name} has shape {shapes[name]} and q {q}; the batch must be the same")
    words = [(key_axis, "page size" if paged else "seqlen"), (kv_heads_axis, "number of heads")]
    if paged and page_axis is not None:
        words.insert(0, (page_axis, "number of pages"))
    for axis, word in words:
        if v[axis] != k[axis]:
            raise ValueError(f"v has shape {v} and k {k}; the {word} must be the same")
    if k[-1] != q[-1]:
        raise ValueError(f"k has shape {k} and q {q}; the head dim (last axis) must be the same")
    for name in ("q", "v"):
        if not 1 <= shapes[name][-1] <= MAX_HEAD_DIM[direction]:
            raise ValueError(
                f"{name} has head dim {shapes[name][-1]} (shape {shapes[name]}); "
                f"{direction}, it may be 1 to {MAX_HEAD_DIM[direction]}"
            )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; the query heads must be a multiple of the key-value heads"
            f" (q has shape {q} and k {k}, read as {axes})"
        )
    batch = _packed_batch(shapes) if batch_axis is None else q[batch_axis]
    return Problem(
        direction=direction,
        dtype=dtype,
        batch=batch,
        seqlen_q=q[seqlen_axis],
        seqlen_k=_room_in_pages(shapes, k[key_axis], batch if packed else 1) if paged else k[key_axis],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=q[-1],
        value_dim=v[-1],
        out_dtype=_float8_output(dtypes) if dtype == FLOAT8 else None,
    )


def tensor_axes(layout: str, packed: bool) -> Axes:
    """Where a tensor has batch, seqlen and heads; pages of keys are a batch of them."""
    return _PACKED_AXES if packed else check_layout(layout)


def axes_of(name: str, shape: Shape, layout: str) -> Axes:
    """Those of one tensor alone, whose number of axes says whether it is of packed sequences.

    Raises ValueError if it has another number, or is packed and has another layout than they have.
    """
    if len(shape) == 4 or (len(shape) == 3 and layout == "bshd"):
        return tensor_axes(layout, packed=len(shape) == 3)
    check_layout(layout)
    raise ValueError(
        f"{name} has shape {shape}; it must have 4 axes, or 3 if sequences are packed (in layout 'bshd')"
    )


def _check_axes(name: str, shape: Shape, ndim: int, axes: str) -> None:
    if len(shape) != ndim:
        raise ValueError(f"{name} has shape {shape}; it must have the {ndim} axes {axes}")
    if max(shape) > MAX_EXTENT:
        raise ValueError(f"{name} has shape {shape}; no axis may exceed {MAX_EXTENT}")


def _check_paging(direction: Direction, shapes: Mapping[str, Shape]) -> None:
    """Check that nothing is asked for that there is not with a block table."""
    if direction == "backward":
        raise ValueError("block_table is given; keys in pages have no gradients")
    if "cu_seqlens_k" in shapes:
        raise ValueError(
            "block_table is given, and cu_seqlens_k is; with pages, seqused_k says how many keys each "
            "sequence has"
        )
    if len(shapes["block_table"]) != 2:
        raise ValueError(
            f"block_table has shape {shapes['block_table']}; it must be (batch, pages of a sequence)"
        )


def _room_in_pages(shapes: Mapping[str, Shape], page_size: int, sequences: int) -> int:
    """How many keys the pages of that many sequences have room for."""
    table = shapes["block_table"]
    if page_size == 0:
        raise ValueError(f"k has shape {shapes['k']}; a page must have at least one key")
    room = sequences * table[1] * page_size
    if room > MAX_EXTENT:
        raise ValueError(
            f"block_table has shape {table}, of pages of {page_size} keys: room for {room:,} keys, and there "
            f"may be {MAX_EXTENT:,}"
        )
    return room


def _float8_output(dtypes: Mapping[str, Any]) -> str | None:
    """The dtype of O for inputs of 8 bits: that of `out`, if it is given."""
    allowed = {name: DTYPES[name] for name in FLOAT8_OUTPUTS}
    return dtype_name(dtypes["out"], "out", allowed) if "out" in dtypes else None


def _packed_batch(shapes: Mapping[str, Shape]) -> int:
    """How many sequences cu_seqlens_q and cu_seqlens_k have; keys in pages have only the former."""
    if "block_table" in shapes:
        shapes = {"cu_seqlens_k": shapes["cu_seqlens_q"], **shapes}
    for name, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
        if name not in shapes:
            raise ValueError(f"{other} is given and {name} is not; packed sequences need both")
        if len(shapes[name]) != 1 or shapes[name][0] == 0:
            raise ValueError(f"{name} has shape {shapes[name]}; it must be (batch + 1,)")
    if shapes["cu_seqlens_q"] != shapes["cu_seqlens_k"]:
        raise ValueError(
            f"cu_seqlens_q has shape {shapes['cu_seqlens_q']} and cu_seqlens_k {shapes['cu_seqlens_k']}; "
            "both must be (batch + 1,)"
        )
    return shapes["cu_seqlens_q"][0] - 1


def _range(options: Options) -> tuple[bool, tuple[int | None, int | None]]:
    """Problem.causal and Features.window: each range of keys in one way only."""
    left, right = check_window(options.window)
    if options.causal:
        right = 0
    if (left, right) == (None, 0):
        return True, (None, None)
    return False, (left, right)


def _features(
    problem: Problem, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], options: Options
) -> Features:
    _, window = _range(options)
    plain = options._replace(causal=False, window=None, layout="bshd") == Options()
    if plain and window == (None, None) and not shapes.keys() & _FEATURE_ARRAYS:
        return PLAIN
    for name, (shape, dtype) in _side_arrays(problem, shapes).items():
        _check_array(name, shapes[name], dtypes[name], shape, dtype)
    for name in ("bias", "mask"):
        if name in shapes:
            _check_score_array(name, problem, shapes[name], dtypes[name], "cu_seqlens_q" in shapes)
    for name in sorted(shapes.keys() & _DESCALES):
        if problem.dtype != FLOAT8:
            raise ValueError(f"{name} is given, which is for {FLOAT8}, and the arrays are {problem.dtype}")
        for other, where in (("cu_seqlens_q", "packed sequences"), ("block_table", "pages")):
            if other in shapes:
                raise ValueError(f"{name} is given, and {other} is; {where} have no descales")
    if options.precision == "tf32" and problem.dtype != "float32":
        raise ValueError(f"precision is 'tf32', which is for float32, and the arrays are {problem.dtype}")
    if not set(options.gradients) <= _GRADIENTS:
        raise ValueError(f"gradients is {options.gradients!r}; it may have 'bias', 'sink' and 'score_mod'")
    for name in options.gradients:
        if name not in shapes and not (name == "score_mod" and options.score_mod):
            raise ValueError(f"the gradient of {name} is asked for, and there is no {name}")
    differentiated = options.score_mod.differentiated_names if options.score_mod else ()
    if "score_mod" in options.gradients and not differentiated:
        raise ValueError("the gradient of score_mod is asked for, and it reads no array of floats")
    array_sums = sum(math.prod(shapes[name]) for name in differentiated)
    if array_sums > MAX_EXTENT:
        raise ValueError(
            f"score_mod's arrays have {array_sums:,} elements; with gradients, they may {MAX_EXTENT:,}"
        )
    return Features(
        window=window,
        softcap=options.softcap,
        bias=four_axes(shapes["bias"]) if "bias" in shapes else None,
        bias_dtype=dtype_name(dtypes["bias"], "bias") if "bias" in shapes else None,
        mask=four_axes(shapes["mask"]) if "mask" in shapes else None,
        mask_bits="mask" in shapes and dtypes["mask"] == np.uint8,
        alibi="alibi_slopes" in shapes,
        sink="sink" in shapes,
        descale=bool(shapes.keys() & _DESCALES),
        dropout=options.dropout,
        packed="cu_seqlens_q" in shapes,
        page_size=shapes["k"][check_layout(options.layout)[1]] if "block_table" in shapes else 0,
        seqused_k="seqused_k" in shapes,
        dlse="dlse" in shapes,
        deterministic=bool(options.deterministic),
        gradients=options.gradients,
        array_sums=array_sums,
        tf32=options.precision == "tf32",
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
    )


# Those beyond q, k and v.
_GRADIENTS = frozenset(("bias", "sink", "score_mod"))
_DESCALES = frozenset(("q_descale", "k_descale", "v_descale"))
_FEATURE_ARRAYS = _DESCALES | frozenset(
    (
        *("bias", "mask", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
        "dlse",
    )
)


def four_axes(shape: Shape) -> Shape:
    """The shape with those axes in front that broadcasting adds."""
    return (1,) * (4 - len(shape)) + shape


def _side_arrays(problem: Problem, shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, np.dtype[Any]]]:
    """What those small arrays must be that are there."""
    batch, heads, sums = problem.batch, problem.heads, problem.accumulator
    int32 = np.dtype(np.int32)
    slopes = (batch, heads) if len(shapes.get("alibi_slopes", ())) == 2 else (heads,)
    expected: dict[str, tuple[Shape, np.dtype[Any]]] = {
        "alibi_slopes": (slopes, sums),
        "sink": ((heads,), sums),
        **dict.fromkeys(_DESCALES, ((batch, problem.kv_heads), sums)),
        "cu_seqlens_q": ((batch + 1,), int32),
        "cu_seqlens_k": ((batch + 1,), int32),
        "seqused_k": ((batch,), int32),
        "block_table": ((batch, *shapes.get("block_table", ())[1:]), int32),
    }
    return {name: what for name, what in expected.items() if name in shapes}


def _check_array(name: str, shape: Shape, dtype: Any, wanted: Shape, wanted_dtype: Any) -> None:
    if shape != wanted:
        raise ValueError(f"{name} has shape {shape}; it must be {wanted}")
    if dtype != wanted_dtype:
        raise TypeError(f"{name} has dtype {dtype}; it must be {wanted_dtype}")


def _check_score_array(name: str, problem: Problem, shape: Shape, dtype: Any, packed: bool) -> None:
    """Check the bias or the mask: what is broadcast to the scores."""
    keys, key_axis = problem.seqlen_k, "seqlen_k"
    if name == "bias":
        dtype_name(dtype, name)
    elif dtype == np.uint8:
        keys, key_axis = ceil_div(keys, 8), "seqlen_k in bytes of 8 bits"
    elif dtype != np.bool_:
        raise TypeError(f"mask has dtype {dtype}; it may be bool, or uint8 for bits")
    wanted = f"(batch or 1, heads or 1, seqlen_q or 1, {key_axis})"
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"{name} has shape {shape}; it must have 1 to 4 axes, the last of {wanted}")
    lengths = (problem.batch, problem.heads, problem.seqlen_q, keys)
    # How long packed sequences are is known on the GPU only.
    known = (0, 1) if packed else (0, 1, 2, 3)
    for axis in known:
        size = four_axes(shape)[axis]
        if size != lengths[axis] and (size != 1 or axis == 3):
            raise ValueError(f"{name} has shape {shape}; it must be {wanted}, which is {lengths} here")


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


def check_fits(problem: Problem, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], layout: str) -> None:
    """Check those that are there of the arrays whose shapes follow from the problem's.

    Raises ValueError or TypeError if one does not fit.
    """
    output = output_shape(problem, layout), problem.output
    lse = lse_shape(problem), problem.accumulator
    expected = {"out": output, "dout": output, "lse": lse, "dlse": lse}
    for name in ("q", "k", "v", "bias", "sink"):
        if name in shapes:
            expected[f"d{name}"] = shapes[name], dtypes[name]
    for name, (shape, dtype) in expected.items():
        if name in shapes:
            _check_array(name, shapes[name], dtypes.get(name), shape, dtype)
