"""The problems that scripts/fuzz.py draws."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import feature_cases as cases
import fuzz_emulator
import ml_dtypes  # noqa: F401 - makes numpy.dtype("bfloat16") known
import numpy as np

import cufa
from cufa.integers import round_up
from cufa.kernels import KERNELS
from cufa.problem import DTYPES, FLOAT8, FLOAT8_OUTPUTS, INPUT_DTYPES, MAX_ALIGN_BYTES, MAX_VALUE_DIM
from cufa.reference import Rules
from cufa.score_mod import MaskMod, ScoreMod

Array = np.ndarray[Any, np.dtype[Any]]

# Most are next to what divides something. A GPU's tiles are larger.
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 63, 64, 65)
GPU_LENGTHS = (
    *(0, 1, 2, 5, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 200),
    *(255, 257, 333, 500, 641),
)
# Of keys, beside few queries.
FEW_QUERIES, CACHES = 17, (1000, 1999, 2500, 5000)
BATCHES, GPU_BATCHES = (0, 1, 2, 3, 5), (0, 1, 2, 3, 5, 17, 40)
# Of all together there are no more, so that float64, or the emulator, is no matter of seconds. With more head
# dims than these, the emulator gets fewer.
MAX_SCORES, EMULATED_SCORES, EMULATED_HEAD_DIM = 1_500_000, 50_000, 128
HEAD_DIMS = (1, 2, 3, 5, 7, 8, 13, 16, 24, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 128)
WIDE_HEAD_DIMS = (129, 136, 160, 192, 200, 248, 256)
WIDEST_HEAD_DIMS = (257, 320, 384, 512, 576)
WINDOW_SIDES = (None, -1, 0, 1, 2, 15, 16, 33, 64, 100, 2**31 - 1)
PAGE_SIZES = (*cases.HOPPER_PAGE_SIZES, *cases.PAGE_SIZES)
FLOAT8_FEATURES = {
    "causal",
    "window",
    "softcap",
    "alibi_slopes",
    "sink",
    "seqused_k",
    "packed",
    "block_table",
}
# What emulated kernels are planned for: Hopper, and others, which differ in tensor cores and shared memory.
EMULATED_ARCHS = (*(fuzz_emulator.ARCH,) * 3, "sm_75", "sm_80", "sm_86", "sm_120")
# Of a part of such a GPU.
SM_COUNTS = (1, 2, 3, 5)
# How many cases differ in lengths, numbers and memory alone: compiling kernels takes most of the time.
ALIKE = {"numpy": 1, "emulator": 4, "cuda": 16}


FARTHEST = 2**13  # between a query and a later key


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[h, np.clip(q_idx - kv_idx, -8, 8) + 8]


def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score + table[h, q_idx - kv_idx + FARTHEST]


def tempered(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, factors: Any, places: Any) -> Any:
    return score * factors[b, h] + 0.25 * places[q_idx] * places[kv_idx]


def bounded(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.5 * np.tanh(score / 2.5) - np.where((q_idx + kv_idx) % 2 == 0, 0.5, h * 0.125)


def same_part(b: Any, h: Any, q_idx: Any, kv_idx: Any, part: Any) -> Any:
    return part[b, q_idx] == part[b, kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any, lengths: Any) -> Any:
    return (kv_idx <= q_idx) | (kv_idx < lengths[b])


def sparse(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx * 7 + kv_idx * 13 + h) % 5 != 0) & (q_idx % 11 != 3)


SCORE_MODS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (relative, by_distance, tempered, bounded)
}
MASK_MODS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (same_part, prefix, sparse)}
WITH_GRADIENTS = ("relative", "by_distance", "tempered")


def mod_arrays(rng: np.random.Generator, name: str, batch: int, heads: int, longest: int) -> list[Array]:
    """What the function of that name reads."""
    if name == "relative":
        return [rng.standard_normal((heads, 17)).astype(rng.choice(["float16", "float32", "float64"]))]
    if name == "by_distance":
        return [rng.standard_normal((heads, FARTHEST + longest)).astype(rng.choice(["float16", "float32"]))]
    if name == "tempered":
        return [rng.uniform(0.5, 1.5, (batch, heads)).astype(np.float32), rng.standard_normal(longest)]
    if name == "same_part":
        return [np.sort(rng.integers(0, 4, (batch, longest))).astype(rng.choice(["uint8", "int32", "int64"]))]
    return [rng.integers(0, longest + 1, batch)] if name == "prefix" else []


@dataclass(frozen=True)
class Case:
    """A problem; what is not said here is drawn with `seed`.

    Keys and values have `kv_dtype`, if not `dtype`; with `in_keys`, values are a view of the first columns of
    keys. `features` are those of tests/feature_cases.py and "dscore_mod"; `score_mod` and `mask_mod` are
    names of functions above. What nobody sees is NaN with `hide_nan`, or infinite if also `hide_inf`. One
    element of the tensor `with_nan` is NaN and one of `with_inf` infinite, whoever sees it. Arrays lie in
    other ways than contiguous with `strided`, at addresses and with strides that are multiples of
    `align_bytes`, and are the same along an axis with `broadcast`. Some results and the workspace are the
    caller's memory with `given`.
    `on_gpu` is where arrays are, if a GPU computes. It or the emulator, which takes plans for `arch` with
    `sm_count` SMs, does so by these rungs and their tiles.
    """

    seed: int
    backend: str = "numpy"
    dtype: str = "float32"
    kv_dtype: str | None = None
    in_keys: bool = False
    features: tuple[str, ...] = ()
    batch: int = 1
    seqlen_q: int = 5
    seqlen_k: int = 5
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    value_dim: int = 8
    layout: str = "bshd"
    precision: str = "ieee"
    window: tuple[int | None, ...] | None = None
    page_size: int = 16
    logit_scale: float = 1.0
    softmax_scale: float | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    descales: bool = False
    hide_nan: bool = False
    hide_inf: bool = False
    with_nan: str | None = None
    with_inf: str | None = None
    strided: bool = False
    align_bytes: int = MAX_ALIGN_BYTES
    broadcast: bool = False
    given: bool = False
    on_gpu: bool = True
    probabilities: bool = False
    backward: bool = False
    kernel: str | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    backward_kernel: str | None = None
    backward_tiles: tuple[tuple[str, int], ...] = ()
    arch: str | None = None
    sm_count: int | None = None

    def __repr__(self) -> str:
        """The call that makes it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = (
            f"{field.name}={values[field.name]!r}"
            for field in fields(self)
            if values[field.name] != field.default
        )
        return f"Case({', '.join(given)})"

    @property
    def runs_on_gpu(self) -> bool:
        return self.backend == "cuda"

    @property
    def runs_kernels(self) -> bool:
        """On a GPU or emulated."""
        return self.backend != "numpy"

    @property
    def planned(self) -> dict[str, Any]:
        """The options of the call that plans have, too."""
        return {"layout": self.layout, "precision": self.precision} | (
            {"arch": self.arch} if self.arch else {}
        )

    def rung(self, direction: str) -> dict[str, Any]:
        """The options that choose a kernel."""
        if not self.runs_kernels:
            return {}
        if direction == "backward":
            return {"kernel": self.backward_kernel, "tiles": dict(self.backward_tiles) or None}
        return {"kernel": self.kernel, "tiles": dict(self.tiles) or None}


def draw(rng: np.random.Generator, backend: str) -> Iterator[Case]:
    """A case, or several with the same features for kernels."""
    by_kernels = backend != "numpy"
    dtype = str(rng.choice((*DTYPES, FLOAT8, *("float16", "bfloat16") * (2 if by_kernels else 1))))
    kv_dtype = FLOAT8 if dtype == FLOAT8 or (dtype in FLOAT8_OUTPUTS and rng.random() < 0.15) else dtype
    density = rng.choice((0.03, 0.1, 0.25) if by_kernels else (0.05, 0.15, 0.4))
    features = {name for name in cases.BACKWARD_FEATURES if rng.random() < density}
    if rng.random() < 0.15:
        features.add("block_table")
    mods = [
        str(rng.choice(list(functions))) if rng.random() < 0.2 else None
        for functions in (SCORE_MODS, MASK_MODS)
    ]
    if kv_dtype == FLOAT8 and by_kernels:
        features &= FLOAT8_FEATURES
        mods = [None, None]
    backward = kv_dtype != FLOAT8 and "block_table" not in features and rng.random() < 0.6
    if backward and mods[0] in WITH_GRADIENTS and rng.random() < 0.5:
        features = features - {"deterministic"} | {"dscore_mod"}
    if not backward:
        features -= {"dlse", "dbias", "dsink", "deterministic"}
    head_dim, value_dim = _head_dims(rng, kv_dtype, by_kernels)
    alike = Case(
        seed=0,
        backend=backend,
        dtype=dtype,
        kv_dtype=kv_dtype if kv_dtype != dtype else None,
        in_keys=not backward and value_dim <= head_dim and bool(rng.random() < 0.2),
        features=tuple(sorted(features)),
        head_dim=head_dim,
        value_dim=value_dim,
        layout="bshd" if "packed" in features else str(rng.choice(("bshd", "bhsd"))),
        precision="tf32" if dtype == "float32" and rng.random() < 0.3 else "ieee",
        page_size=int(rng.choice(PAGE_SIZES)),
        score_mod=mods[0],
        mask_mod=mods[1],
        backward=backward,
        descales=kv_dtype == FLOAT8 and bool(rng.random() < 0.5),
        strided=bool(rng.random() < 0.5),
        align_bytes=MAX_ALIGN_BYTES if rng.random() < 0.8 else int(rng.choice((1, 2, 4, 8))),
        on_gpu=bool(rng.random() < 0.95),
    )
    if backend == "emulator":
        # Many of the others have no 8 bits.
        archs = EMULATED_ARCHS[:1] if kv_dtype == FLOAT8 else EMULATED_ARCHS
        few_sms = int(rng.choice(SM_COUNTS)) if rng.random() < 0.5 else None
        alike = replace(alike, arch=str(rng.choice(archs)), sm_count=few_sms)
    # An LSE of rounded operands is not that of the scores that probabilities are computed from.
    with_probabilities = kv_dtype != FLOAT8 and "packed" not in features and alike.precision == "ieee"
    alike = replace(alike, probabilities=with_probabilities and bool(rng.random() < 0.1))
    if by_kernels:
        alike = _with_rungs(rng, alike)
    for _ in range(ALIKE[backend]):
        yield _with_sizes(rng, alike)


def _head_dims(rng: np.random.Generator, dtype: str, by_kernels: bool) -> tuple[int, int]:
    dims = HEAD_DIMS
    if rng.random() < (0.5 if by_kernels else 0.2):
        dims += WIDE_HEAD_DIMS
    if rng.random() < 0.1:
        dims = WIDEST_HEAD_DIMS
    head_dim, value_dim = (int(dim) for dim in rng.choice(dims, 2))
    if rng.random() < 0.6:
        value_dim = head_dim
    value_dim = min(value_dim, MAX_VALUE_DIM)
    if rng.random() < (0.85 if by_kernels else 0.2):  # what all kernels take
        elements = MAX_ALIGN_BYTES // INPUT_DTYPES[dtype].itemsize
        return round_up(head_dim, elements), round_up(value_dim, elements)
    return head_dim, value_dim


def _with_sizes(rng: np.random.Generator, case: Case) -> Case:
    by_kernels = case.runs_kernels
    some = rng.random() < 0.3
    batch = int(rng.choice((GPU_BATCHES if by_kernels else BATCHES) if some else (1, 2)))
    kv_heads = int(rng.choice((0, 1, 2, 3) if rng.random() < 0.1 else (1, 2, 3)))
    heads = kv_heads * int(rng.choice((1, 2, 3, 5, 8) if rng.random() < 0.5 else (1, 2)))
    seqlen_q, seqlen_k = (int(length) for length in rng.choice(GPU_LENGTHS if by_kernels else LENGTHS, 2))
    if by_kernels and seqlen_q <= FEW_QUERIES and rng.random() < 0.5:
        seqlen_k = int(rng.choice(CACHES))
    most = MAX_SCORES
    if case.backend == "emulator":
        most = EMULATED_SCORES * EMULATED_HEAD_DIM // max(case.head_dim, EMULATED_HEAD_DIM)
    while batch * heads * seqlen_q * seqlen_k > most:
        seqlen_q, seqlen_k = seqlen_q // 2, seqlen_k // 2
    sides = tuple(WINDOW_SIDES[i] for i in rng.integers(len(WINDOW_SIDES), size=2))
    # The gradient of a sink multiplies dO of rows without keys by their output, which is 0.
    tensors = ("q", "k", "v", *("dout",) * ("dsink" not in case.features))
    bad = "with_nan" if rng.random() < 0.5 or FLOAT8 in (case.dtype, case.kv_dtype) else "with_inf"
    if bad == "with_inf" and "dlse" in case.features:
        tensors += ("dlse",)
    return replace(
        case,
        seed=int(rng.integers(2**31)),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        window=sides if "window" in case.features else None,
        logit_scale=float(rng.choice((1, 1, 4, 20))),
        softmax_scale=None if rng.random() < 0.8 else float(rng.choice((-0.1, 0.05, 0.3))),
        hide_nan=bool(rng.random() < 0.6),
        hide_inf=bool(rng.random() < 0.5),
        broadcast=bool(rng.random() < 0.1),
        given=bool(rng.random() < 0.4),
        **{bad: str(rng.choice(tensors)) if rng.random() < 0.3 else None},
    )


def _with_rungs(rng: np.random.Generator, case: Case) -> Case:
    """The case by rungs that the registry says take it, most often with the same tiles for all lengths."""
    usual = replace(case, batch=2, heads=2, kv_heads=1, seqlen_q=300, seqlen_k=400)
    problem = Built(usual)
    given = problem.arguments | problem.mods | case.planned
    left_out = ("dout", "softmax_scale", "seed", "offset")
    options = {name: value for name, value in given.items() if name not in left_out}
    chosen: dict[str, Any] = {}
    for direction in ("forward", "backward") if case.backward else ("forward",):
        if direction == "backward":
            asked = tuple(name for name in ("bias", "sink", "score_mod") if f"d{name}" in case.features)
            options |= {
                "backward": True,
                "gradients": asked,
                "deterministic": "deterministic" in case.features,
            }
        plans = [
            plan
            for name, kernel in KERNELS.items()
            if kernel.direction == direction
            and kernel.min_align_bytes <= case.align_bytes
            and (plan := _plan(options, kernel=name)) is not None
        ]
        if not plans or rng.random() < 0.2:
            continue
        later = np.arange(1, len(plans) + 1) ** 2  # which are called more often
        plan = plans[rng.choice(len(plans), p=later / later.sum())]
        tiles = dict(plan.tiles) if rng.random() < 0.8 else {}
        for _ in range(3 if rng.random() < 0.2 and plan.tiles else 0):
            name = str(rng.choice(list(plan.tiles)))
            other = tiles | {name: max(1, int(plan.tiles[name] * rng.choice((0.5, 1.5, 2))))}
            if _plan(options, kernel=plan.kernel, tiles=other) is not None:
                tiles = other
        before = "backward_" if direction == "backward" else ""
        chosen |= {f"{before}kernel": plan.kernel, f"{before}tiles": tuple(tiles.items())}
    return replace(case, **chosen)


def _plan(options: dict[str, Any], **rung: Any) -> Any:
    """The Plan of a call, None if it is refused."""
    try:
        return cufa.plan(**options, **rung)
    except (ValueError, TypeError):
        return None


class Built:
    """The problem of a case: as tests have it, and as arguments in the case's layout."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        self.drawn = cases.draw_case(
            rng,
            case.dtype,
            set(case.features) - {"dscore_mod"},
            seqlen_q=case.seqlen_q,
            seqlen_k=case.seqlen_k,
            batch=case.batch,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.value_dim,
            page_sizes=(case.page_size,),
            logit_scale=case.logit_scale,
        )
        if case.kv_dtype is not None:
            problem = self.drawn.problem
            k, v = (x.astype(case.kv_dtype) for x in (problem.k, problem.v))
            self.drawn = replace(self.drawn, problem=replace(problem, k=k, v=v))
        if case.in_keys:
            problem = self.drawn.problem
            self.drawn = replace(self.drawn, problem=replace(problem, v=problem.k[..., : case.value_dim]))
        arrays, numbers = self.drawn.arrays, self.drawn.numbers
        if "bias" in arrays and str(arrays["bias"].dtype) == FLOAT8:
            arrays["bias"] = arrays["bias"].astype(np.float32)
        if case.window is not None:
            numbers["window"] = case.window
        numbers["softmax_scale"] = case.softmax_scale
        _empty_some(rng, arrays)
        self.mods = self._mods(rng)
        numbers.update(self.mods)
        if case.broadcast:
            self._repeat_some(rng)
        elif case.hide_nan:
            cases.hide_nan(self.drawn)
            if case.hide_inf:
                self._make_infinite(rng)
        for name, bad in ((case.with_nan, np.nan), (case.with_inf, rng.choice((-np.inf, np.inf)))):
            if name is not None:
                x = self.drawn.dlse if name == "dlse" else getattr(self.drawn.problem, name)
                x.flat[rng.integers(x.size, size=1 if x.size else 0)] = bad
        in_8_bits = "qkv" if case.kv_dtype is None else "kv"
        descales = [f"{name}_descale" for name in in_8_bits if case.descales and rng.random() < 0.7]
        for name in descales:
            arrays[name] = rng.uniform(0.5, 2, (case.batch, case.kv_heads)).astype(np.float32)

    @property
    def rules(self) -> dict[str, Any]:
        return self.drawn.forward

    @property
    def arguments(self) -> dict[str, Any]:
        problem = self.drawn.problem
        tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
        return {name: self.turned(x) for name, x in tensors.items()} | self.drawn.forward

    def turned(self, x: Array) -> Array:
        """A tensor from the case's layout to the other one, and back."""
        return x.transpose(0, 2, 1, 3) if self.case.layout == "bhsd" and x.ndim == 4 else x

    def _mods(self, rng: np.random.Generator) -> dict[str, Any]:
        case, problem = self.case, self.drawn.problem
        sequences = Rules(**self.drawn.forward).sequences(problem.q, problem.k)
        longest = max((max(each.seqlen_q, each.seqlen_k) for each in sequences), default=0)
        kinds = {
            "score_mod": (ScoreMod, SCORE_MODS, case.score_mod),
            "mask_mod": (MaskMod, MASK_MODS, case.mask_mod),
        }
        return {
            kind: make(functions[name], *mod_arrays(rng, name, case.batch, case.heads, max(1, longest)))
            for kind, (make, functions, name) in kinds.items()
            if name is not None
        }

    def _make_infinite(self, rng: np.random.Generator) -> None:
        """What is NaN, if the dtype has infinity."""
        problem = self.drawn.problem
        for x in (problem.q, problem.k, problem.v, problem.dout, self.drawn.arrays.get("bias")):
            if x is not None and str(x.dtype) != FLOAT8:
                x[np.isnan(x)] = rng.choice((-np.inf, np.inf))

    def _repeat_some(self, rng: np.random.Generator) -> None:
        problem = self.drawn.problem
        of_scores = [self.drawn.arrays[name] for name in ("bias", "mask") if name in self.drawn.arrays]
        for x in (problem.q, problem.k, problem.v, problem.dout, *of_scores):
            axis = int(rng.integers(x.ndim))
            if x.size and axis < x.ndim - 1:
                x[...] = x.take([0], axis)


def _empty_some(rng: np.random.Generator, arrays: Mapping[str, Array]) -> None:
    """Leave some sequences without keys, and some packed ones without tokens, which are then nobody's."""
    if "seqused_k" in arrays:
        arrays["seqused_k"][rng.random(len(arrays["seqused_k"])) < 0.2] = 0
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in arrays:
            lengths = np.diff(arrays[name])
            lengths[rng.random(len(lengths)) < 0.2] = 0
            arrays[name][1:] = arrays[name][0] + np.cumsum(lengths)
