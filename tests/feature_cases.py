"""Random calls with features, for the tests of every path: NumPy, emulated kernels and a GPU.

A test should take its sets of features from `sets_of`, or from `pairwise` where each takes a second to
compile, and its calls from `draw_case`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from typing import Any

import numpy as np
from tolerance import DTYPES, Array, Problem, random_problem

from cufa.integers import ceil_div
from cufa.params import FeatureValues
from cufa.problem import accumulator_dtype, four_axes
from cufa.reference import Rules

FORWARD_FEATURES = (
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "mask_bits",
    "alibi_slopes",
    "sink",
    "dropout",
    "packed",
    "seqused_k",
    "block_table",
)
# dbias and dsink ask for the gradients of the bias and of the sink. Keys in pages have none.
BACKWARD_FEATURES = (*FORWARD_FEATURES[:-1], "dlse", "dbias", "dsink", "deterministic")
_IMPLIED = {"dbias": "bias", "dsink": "sink", "mask_bits": "mask"}

# A key, tiles of them and several, and neither; and those that Hopper's kernels take.
PAGE_SIZES = (1, 7, 16, 32, 48)
HOPPER_PAGE_SIZES = (8, 16, 48, 128)
# For the emulator: several of its small tiles of either length, one row or key, and none.
LENGTHS = [(39, 53), (53, 39), (1, 40), (40, 1), (0, 5), (5, 0)]
SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 24, "head_dim_v": 40}
# Windows that end at tiles' edges and beside them, or nowhere.
WINDOW_EDGES = [(0, 0), (15, 16), (16, 15), (31, 0), (5, None), (None, 20), (2**31 - 1, 3)]
# Tokens before the first of packed sequences, none or more than some tiles, and the lengths in q and in k.
PACKED_LENGTHS = [
    (before, *lengths)
    for before in (0, 100)
    for lengths in (
        ([0, 0, 0], [0, 0, 0]),
        ([0, 40, 0, 1, 0], [7, 0, 33, 16, 0]),
        ([32, 32, 64], [48, 1, 15]),
    )
]


def pairwise(features: Sequence[str] = BACKWARD_FEATURES) -> list[frozenset[str]]:
    """Few sets in which any two features are found together, one without the other, and neither.

    Each set is the one of some random ones that has most such pairs that the sets before it have not.
    """
    rng = np.random.default_rng(0)
    missing = {
        frozenset(((a, a_on), (b, b_on)))
        for a, b in combinations(features, 2)
        for a_on, b_on in product((False, True), repeat=2)
    }
    sets = []
    while missing:
        candidates = [dict(zip(features, rng.random(len(features)) < 0.5, strict=True)) for _ in range(50)]
        found = [missing & {frozenset(pair) for pair in combinations(c.items(), 2)} for c in candidates]
        best = max(range(len(found)), key=lambda i: len(found[i]))
        missing -= found[best]
        sets.append(frozenset(name for name, on in candidates[best].items() if on))
    return sets


def sets_of(features: Sequence[str] = BACKWARD_FEATURES) -> list[frozenset[str]]:
    """Each feature without any other, and the sets of `pairwise`."""
    return list(dict.fromkeys([*(frozenset((name,)) for name in features), *pairwise(features)]))


def sets_with_dtypes() -> list[tuple[frozenset[str], str]]:
    """The sets of `pairwise` with every dtype; each feature without any other with one of them, in turn."""
    alone = zip(BACKWARD_FEATURES, cycle(DTYPES), strict=False)
    return [*((frozenset((name,)), dtype) for name, dtype in alone), *product(pairwise(), DTYPES)]


def feature_id(features: frozenset[str]) -> str:
    """The set as the name of a test."""
    return "+".join(sorted(features)) or "none"


@dataclass(frozen=True)
class Case:
    """A call: its tensors, and what goes with them by the names of `cufa.attention`'s arguments.

    Of packed sequences the tensors are (tokens, heads, dim).
    """

    problem: Problem
    numbers: dict[str, Any]
    arrays: dict[str, Array]
    dlse: Array | None
    gradients: tuple[str, ...]
    deterministic: bool

    @property
    def forward(self) -> dict[str, Any]:
        """The arguments of `cufa.attention`, beside q, k and v."""
        return {**self.numbers, **self.arrays}

    @property
    def backward(self) -> dict[str, Any]:
        """Those of `cufa.attention_backward`, but for `deterministic`, which changes no result."""
        asked = {f"return_d{name}": True for name in self.gradients}
        return {**self.forward, "dlse": self.dlse, **asked}

    @property
    def emulator_forward(self) -> dict[str, Any]:
        """The arguments of `emulator.calls.attention`."""
        in_values = FeatureValues._fields
        others = {name: value for name, value in self.numbers.items() if name not in in_values}
        values = FeatureValues(**{name: self.numbers[name] for name in in_values if name in self.numbers})
        return {**others, **self.arrays, "values": values}

    @property
    def emulator_backward(self) -> dict[str, Any]:
        """Those of `emulator.calls.attention_backward`."""
        dlse = {} if self.dlse is None else {"dlse": self.dlse}
        asked = {"gradients": self.gradients, "deterministic": self.deterministic}
        return {**self.emulator_forward, **dlse, **asked}


def draw_case(
    rng: np.random.Generator,
    dtype_name: str,
    features: Iterable[str],
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    page_sizes: Sequence[int] = PAGE_SIZES,
    compiled: np.random.Generator | None = None,
    **options: Any,
) -> Case:
    """A random problem with these features; `options` are those of `tolerance.random_problem`.

    Packed sequences have random lengths up to `seqlen_q` and `seqlen_k`, and the tensors have tokens
    before and after them that belong to none. Pages have one of the sizes. `compiled` draws what a kernel
    is compiled for beside the features, `rng` by default.
    """
    compiled = compiled or rng
    on = set(features)
    on |= {_IMPLIED[name] for name in on & _IMPLIED.keys()}
    numbers = _numbers(rng, on, seqlen_k)
    arrays: dict[str, Array] = {}
    options = {"heads": heads, "kv_heads": kv_heads, **options}
    if "packed" in on:
        arrays["cu_seqlens_q"], rows = _packed(rng, batch, seqlen_q)
        arrays["cu_seqlens_k"], keys = _packed(rng, batch, seqlen_k)
        problem = random_problem(rng, dtype_name, batch=1, seqlen_q=rows, seqlen_k=keys, **options)
        problem = Problem(*(x[0] for x in (problem.q, problem.k, problem.v, problem.dout)))
    else:
        problem = random_problem(
            rng, dtype_name, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options
        )
    sums = accumulator_dtype(dtype_name)
    scores = batch, heads, seqlen_q, seqlen_k
    if "bias" in on:
        arrays["bias"] = _bias(rng, scores).astype(dtype_name if compiled.integers(2) else "float32")
    if "mask" in on:
        arrays["mask"] = _mask(rng, scores, in_bits="mask_bits" in on)
    if "alibi_slopes" in on:
        shape = (heads,) if rng.integers(2) else (batch, heads)
        arrays["alibi_slopes"] = rng.uniform(0.01, 0.5, shape).astype(sums)
    if "sink" in on:
        arrays["sink"] = rng.standard_normal(heads).astype(sums)
    if "seqused_k" in on:
        arrays["seqused_k"] = rng.integers(0, seqlen_k + 1, batch).astype(np.int32)
    case = Case(
        problem,
        numbers,
        arrays,
        rng.standard_normal(problem.lse_shape).astype(sums) if "dlse" in on else None,
        tuple(name for name in ("bias", "sink") if f"d{name}" in on),
        "deterministic" in on,
    )
    return in_pages(rng, case, int(compiled.choice(page_sizes))) if "block_table" in on else case


def draw_lengths(
    rng: np.random.Generator, dtype_name: str, features: Iterable[str], **sizes: Any
) -> Iterator[Case]:
    """A case for each of `LENGTHS`, all for one variant of a kernel: compiling takes most of the time."""
    seed = rng.integers(2**32)
    for seqlen_q, seqlen_k in LENGTHS:
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        yield draw_case(rng, dtype_name, features, **lengths, compiled=np.random.default_rng(seed), **sizes)


def in_pages(rng: np.random.Generator, case: Case, page_size: int) -> Case:
    """The case with its keys and values in pages, in any order and among others that are nobody's.

    Entries of the block table past a sequence's keys are no pages at all.
    """
    problem = case.problem
    sequences = Rules(**case.forward).sequences(problem.q, problem.k)
    used = [sequence.seqlen_k for sequence in sequences]
    pages = 1 + max((ceil_div(keys, page_size) for keys in used), default=0)
    count = len(used) * pages + 3
    table = rng.permutation(count)[: len(used) * pages].reshape(len(used), pages).astype(np.int32)

    def placed(x: Array) -> Array:
        moved = np.full((count, page_size, *x.shape[-2:]), np.nan, x.dtype)
        for sequence, entries in zip(sequences, table, strict=True):
            keys = np.arange(sequence.seqlen_k)
            in_pages = entries[keys // page_size], keys % page_size
            moved[in_pages] = x[(*sequence.batch, keys + sequence.first_k)]
        return moved

    paged = Problem(problem.q, placed(problem.k), placed(problem.v), problem.dout)
    for entries, keys in zip(table, used, strict=True):
        entries[ceil_div(keys, page_size) :] = rng.choice([-1, count, 2**31 - 1])
    arrays = {name: array for name, array in case.arrays.items() if name != "cu_seqlens_k"}
    for name in arrays.keys() & {"bias", "mask"}:
        arrays[name] = _for_keys(arrays[name], pages * page_size)
    arrays |= {"block_table": table, "seqused_k": np.array(used, np.int32)}
    return replace(case, problem=paged, arrays=arrays)


def _for_keys(array: Array, keys: int) -> Array:
    """A bias or a mask for so many keys: those that are more are 0, and others are left out."""
    elements = ceil_div(keys, 8) if array.dtype == np.uint8 else keys
    result = np.zeros((*array.shape[:-1], elements), array.dtype)
    both = min(elements, array.shape[-1])
    result[..., :both] = array[..., :both]
    return result


def packed_case(
    rng: np.random.Generator,
    dtype_name: str,
    before: int,
    rows: list[int],
    keys: list[int],
    after: int = 3,
    **sizes: int,
) -> Case:
    """A causal case of sequences with these lengths, and tokens `before` and `after` them."""
    cu_seqlens = {
        f"cu_seqlens_{name}": np.cumsum([before, *lengths]).astype(np.int32)
        for name, lengths in (("q", rows), ("k", keys))
    }
    tokens = [int(cu[-1]) + after for cu in cu_seqlens.values()]
    problem = random_problem(rng, dtype_name, seqlen_q=tokens[0], seqlen_k=tokens[1], **sizes)
    parts = (x[0] for x in (problem.q, problem.k, problem.v, problem.dout))
    return Case(Problem(*parts), {"causal": True}, cu_seqlens, None, (), False)


def widen_score_arrays(rng: np.random.Generator, case: Case) -> None:
    """Have a bias and a mask, (2, 2, 33, 40), that are rows and heads of larger arrays."""
    arrays = {
        "bias": rng.standard_normal((3, 4, 40, 50)).astype(np.float32),
        "mask": rng.random((3, 4, 40, 50)) < 0.7,
    }
    for name, array in arrays.items():
        case.arrays[name] = array[1:, ::2, 3:36, 5:45]


def _numbers(rng: np.random.Generator, on: set[str], seqlen_k: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {"causal": "causal" in on}
    if "window" in on:
        left, right = (int(side) for side in rng.integers(0, max(2, seqlen_k // 2), 2))
        windows = [(left, right), (left, None), (left, 0)]
        if "causal" not in on and right > 0:  # otherwise a causal mask
            windows.append((None, right))
        numbers["window"] = windows[rng.integers(len(windows))]
    if "softcap" in on:
        numbers["softcap"] = float(rng.uniform(0.5, 3))
    if "dropout" in on:
        numbers["dropout_p"] = float(rng.uniform(0.1, 0.6))
        numbers["seed"], numbers["offset"] = int(rng.integers(2**63)), int(rng.integers(2**32))
    return numbers


def _packed(rng: np.random.Generator, batch: int, longest: int) -> tuple[Array, int]:
    """cu_seqlens, and the number of tokens: more than the sequences have."""
    lengths = rng.integers(0, longest + 1, batch)
    lengths[rng.integers(batch, size=min(batch, 1))] = longest
    before, after = rng.integers(0, 3, 2)
    cu_seqlens = np.cumsum([before, *lengths]).astype(np.int32)
    return cu_seqlens, int(cu_seqlens[-1] + after)


def _broadcast(rng: np.random.Generator, scores: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The shape of the scores with some axes 1; some of those in front are left out."""
    *front, keys = (size if axis == 3 or rng.integers(2) else 1 for axis, size in enumerate(scores))
    while front and front[0] == 1 and rng.integers(2):
        front.pop(0)
    return *front, keys


def _bias(rng: np.random.Generator, scores: tuple[int, int, int, int]) -> Array:
    """Some of it is -inf."""
    bias = rng.standard_normal(_broadcast(rng, scores))
    bias[rng.random(bias.shape) < 0.05] = -np.inf
    return bias


def _mask(rng: np.random.Generator, scores: tuple[int, int, int, int], in_bits: bool) -> Array:
    """Of single keys and whole stretches of them; some rows see none."""
    shape = _broadcast(rng, scores)
    mask = rng.random(shape) < 0.8
    keys = np.arange(shape[-1])
    begin, length = (rng.integers(0, shape[-1] + 1, (*shape[:-1], 1)) for _ in range(2))
    mask &= (keys < begin) | (keys >= begin + length // 2)
    mask[rng.random(shape[:-1]) < 0.1] = False
    if not in_bits:
        return mask
    beyond = rng.random((*shape[:-1], -shape[-1] % 8)) < 0.5  # bits that belong to no key
    return np.packbits(np.concatenate([mask, beyond], axis=-1), axis=-1, bitorder="little")


def one_by_one(gradients: tuple[Any, ...]) -> list[Any]:
    """What `cufa.attention_backward` returns, and what it has of a score_mod's arrays one by one too."""
    *of_inputs, last = gradients
    return (
        [*of_inputs, *(x for x in last if x is not None)] if isinstance(last, tuple) else [*of_inputs, last]
    )


def mask_by_tiles(
    rng: np.random.Generator, shape: tuple[int, int, int, int], tile: tuple[int, int]
) -> tuple[Array, Array]:
    """A mask of which each tile shows nothing, some keys or all of them, and which of it: 0, 1 or 2.

    Some are one key of one row, or all but that.
    """
    *front, rows, keys = shape
    parts = rng.integers(0, 3, (*front, ceil_div(rows, tile[0]), ceil_div(keys, tile[1])))
    mask = (parts == 2).repeat(tile[0], axis=2)[:, :, :rows].repeat(tile[1], axis=3)[..., :keys]
    for *head, i, j in np.argwhere(parts == 1):
        of_tile = mask[(*head, slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1]))]
        of_tile[...] = rng.integers(2)
        of_tile[tuple(rng.integers(of_tile.shape))] ^= True
    return mask, parts


def hide_nan(case: Case) -> None:
    """Write NaN to all that no result may depend on: what no row sees, rows that see nothing, other tokens.

    But not to dout, where the gradient of a sink is asked for: a row that sees nothing has one too.
    """
    problem, bias = case.problem, case.arrays.get("bias")
    rows_see = np.zeros(problem.q.shape[:-1], bool)
    keys_seen = np.zeros(problem.k.shape[:-1], bool)
    scores_seen = np.zeros(four_axes(() if bias is None else bias.shape), int)
    for head in Rules(**case.forward).heads(problem.q, problem.k):
        rows_see[head.queries] = head.rows_that_see
        keys_seen[head.keys] |= head.keys_seen
        if bias is not None:
            head.add_as_broadcast(head.visible.astype(int), scores_seen)
    for x, matters in ((problem.k, keys_seen), (problem.v, keys_seen), (problem.q, rows_see)):
        x[~matters] = np.nan
    if "sink" not in case.gradients:
        problem.dout[~rows_see] = np.nan
    if bias is not None:
        bias[scores_seen.reshape(bias.shape) == 0] = np.nan
