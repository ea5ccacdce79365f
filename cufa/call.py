"""One call: what follows from its arguments, cached for calls that are alike, and its way to the GPU.

arrays -> CallFacts (Problem, layout, results) -> Executable (Plan, loaded kernels) -> launches

What is cached on that way, by what. Each call asks the caches of the first group; those of the second are
asked about arrays at addresses that are new.

- `_facts`, by shapes, strides, dtypes and options: what follows from them, if they are right.
- `_check_workspace`, by the addresses and the workspace: that this may be used, if there is one.
- `_at_addresses`, by `CallFacts`, addresses and choices: what runs the call, if the arrays are aligned.
- `_features`, by `CallFacts` and addresses: the packed parameters of arrays that are not in the layout.
- `launch._packed`, by addresses: the packed parameters of those that are.

- `_in_layout`, by `CallFacts`, layout, choices and what addresses decide: what runs such calls.
- `_executable`, by `Problem` and choices: the plan with its kernels, for all strides.
- `launch._module`, by `Variant`: a compiled file, for all plans that differ in no macro.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cufa import arrays, launch, probabilities
from cufa.arguments import (
    DESCALES,
    FEATURE_ARRAYS,
    Options,
    check_fits,
    check_options,
    check_reach,
    make_problem,
)
from cufa.arrays import ArrayInfo
from cufa.device import Arch, Device, target
from cufa.kernels import kernel_named, reads_transposed
from cufa.params import FeatureValues, pack_features, pack_values
from cufa.plan import Plan, check_tiles, make_plan, make_probabilities_plan
from cufa.plan.record import WORKSPACE_ALIGNMENT
from cufa.problem import (
    PLAIN,
    Axes,
    Direction,
    Features,
    Problem,
    Shape,
    check_layout,
    lse_shape,
    output_shape,
    tensor_axes,
)
from cufa.score_mod import Mods
from cufa.tensor_layout import (
    Layout,
    Region,
    Storage,
    check_aligned,
    check_apart,
    contiguous_strides,
    is_contiguous,
    layout_of,
    lie_in_keys,
    lies_in_boxes,
    lies_transposed,
    transposed,
)
from cufa.traced.header import TracedCode

Tiles = Mapping[str, int]
Window = tuple[int | None, int | None] | None
ArchLike = Arch | str | int
Arrays = dict[str, Any]

# The fields of `Options`, as part of a cache's key. Only a call that is not cached makes `Options` of them.
OptionValues = tuple[
    bool,
    Window,
    bool,
    bool,
    bool,
    tuple[str, ...],
    str,
    str,
    TracedCode | None,
    TracedCode | None,
    int | None,
    int | None,
]


class KernelChoice(NamedTuple):
    """The kernel, tiles and architecture that the caller chose, if any, and whether to run `attn_probs`."""

    kernel: str | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    arch: ArchLike | None = None
    attn_probs: bool = False


# Most calls choose nothing. Making a `KernelChoice` for each would take a fiftieth of their host time.
_NOTHING_CHOSEN = KernelChoice()

# The arguments that are tensors, in the order of the parameter structs.
TENSORS: dict[Direction, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "out"),
    "backward": ("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
}
_KEY_TENSORS = frozenset(("k", "v", "dk", "dv"))
# What only a backward call has beside these.
GRADIENT_ARRAYS = ("dlse", "dbias", "dsink")
_BESIDE_TENSORS = frozenset(("lse", *FEATURE_ARRAYS, *DESCALES, *GRADIENT_ARRAYS))


@dataclass(frozen=True, eq=False)
class CallFacts:
    """What follows from options, shapes, strides and dtypes; calls that are alike share one.

    `outputs` are the names of the given arrays to write into. `layout` is the layout of the tensors, `axes`
    are their axes batch, seqlen and heads. `results` are the shapes and dtypes of all possible results.
    `copied` are the arrays that kernels cannot read in place. With features, `side` describes all arrays
    that are not in the layout: shape, strides and element size of what kernels read or write.
    """

    direction: Direction
    problem: Problem
    options: Options
    arrays: tuple[ArrayInfo, ...]
    outputs: tuple[str, ...]
    layout: Layout
    axes: Axes
    results: Mapping[str, tuple[Shape, np.dtype[Any]]]
    copied: tuple[str, ...]
    side: Mapping[str, tuple[Shape, Shape, int]]

    @property
    def keeps_keys(self) -> bool:
        """Whether kernels read K and V where they are."""
        return not {"k", "v"} & set(self.copied)


class Call:
    """The arrays of one call, on the side where it is computed, and the problem that they pose.

    `wanted` are the shapes and dtypes of the results to write, to given arrays or to new ones.
    """

    def __init__(
        self, direction: Direction, named: Arrays, option_values: OptionValues, backend: str | None
    ) -> None:
        """Check all arguments; `named` must end with the arrays to write into."""
        arrays.check_backend(backend)
        adopted = arrays.adopt_in_place(named)
        self.facts = facts = facts_of(direction, adopted.described, option_values)
        self.problem = facts.problem
        if facts.outputs:
            arrays.check_outputs(adopted, facts.outputs)
        adopted = arrays.moved(adopted, backend)  # what is wrong is not copied
        self.tensors = adopted.arrays
        self.on_gpu = adopted.on_gpu
        self.wanted: dict[str, tuple[Shape, np.dtype[Any]]] = {}
        self._give_back = adopted.give_back
        self.addresses = adopted.addresses
        if adopted.moved:
            described, self.addresses = arrays.describe(self.tensors)
            self.facts = facts_of(direction, described, option_values)

    def refine(self) -> None:
        """Compute float32 products exactly, as `attn_probs` does, since it reads this call's LSE."""
        options = self.facts.options._replace(precision="ieee")
        self.facts = facts_of("forward", self.facts.arrays, options)
        self.problem = self.facts.problem

    def want(self, name: str) -> None:
        """Request a result."""
        self.wanted[name] = self.facts.results[name]

    def allocate(self) -> None:
        """Allocate arrays for the requested results that have none."""
        for name, (shape, dtype) in self.wanted.items():
            if name not in self.tensors:
                self.add(name, empty(shape, dtype, self.on_gpu))

    def add(self, name: str, array: Any) -> None:
        """Add an array that was not given."""
        self.tensors[name] = array
        self.addresses[name] = arrays.address(array)

    def give_back(self, name: str, given: Any) -> Any:
        """Return a result to the caller, in the caller's own array if there is one."""
        return self._give_back(self.tensors[name], given, name)

    def in_bshd(self, *names: str) -> list[Any]:
        """The tensors as (batch, seqlen, heads, dim); packed ones, which have no batch axis, unchanged."""
        axes = (*check_layout(self.facts.options.layout), 3)
        tensors = [self.tensors[name] for name in names]
        return [tensor.transpose(axes) if tensor.ndim == len(axes) else tensor for tensor in tensors]


def kernel_choice_of(
    direction: Direction, kernel: str | None, tiles: Tiles | None, arch: ArchLike | None
) -> KernelChoice:
    """What a call with these options chooses; raises TypeError or ValueError for invalid values."""
    if kernel is None and tiles is None and arch is None:
        return _NOTHING_CHOSEN
    if kernel is not None:
        kernel_named(kernel, direction)
    if arch is not None:
        Arch.parse(arch)
    return KernelChoice(kernel, () if tiles is None else tuple(check_tiles(tiles).items()), arch)


def cpu_options(call: Call, softmax_scale: float, values: FeatureValues, mods: Mods) -> dict[str, Any]:
    """The keyword arguments for the functions of `cufa.cpu`."""
    side = {name: call.tensors[name] for name in FEATURE_ARRAYS if name in call.tensors}
    return {
        "causal": bool(call.facts.options.causal),
        "window": call.facts.options.window,
        "softmax_scale": softmax_scale,
        **values._asdict(),
        **side,
        **mods.with_arrays(call.tensors, call.problem.accumulator),
    }


def facts_of(direction: Direction, tensors: tuple[ArrayInfo, ...], option_values: OptionValues) -> CallFacts:
    """What follows from a call's arrays and options; raises TypeError or ValueError if they are wrong."""
    try:
        return _facts(direction, tensors, option_values)
    except TypeError:  # also raised if an option is not hashable
        if _has_hash(option_values):
            raise
    options = Options(*option_values)
    check_options(options)
    return _facts(direction, tensors, options._replace(gradients=tuple(options.gradients)))


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _facts(
    direction: Direction,
    tensors: tuple[ArrayInfo, ...],
    option_values: OptionValues,
    may_be_transposed: bool = True,
) -> CallFacts:
    """`facts_of`; unless V `may_be_transposed`, it is copied if it is stored so."""
    options = Options(*option_values)
    shapes = {name: shape for name, shape, _, _ in tensors}
    dtypes = {name: dtype for name, _, _, dtype in tensors}
    problem = make_problem(direction, shapes, dtypes, options)
    check_fits(problem, shapes, dtypes, options.layout)
    if problem.features.mod_arrays or problem.features.mask is not None:
        problem = replace(problem, features=problem.features.with_lying(tensors))

    packed = problem.features.packed
    axes = tensor_axes(options.layout, packed)
    key_axes = tensor_axes(options.layout, packed and not problem.features.page_size)
    storage = _storage_of(tensors, output_shape(problem, options.layout))
    if may_be_transposed and lies_transposed(problem, storage["v"], key_axes):
        problem = replace(problem, transposed_values=True)
        storage["v"] = transposed(storage["v"], key_axes)
    names = TENSORS[direction]
    axes_of = tuple(key_axes if name in _KEY_TENSORS else axes for name in names)
    layout = layout_of(tuple(storage[name] for name in names), _itemsizes_of(problem, names), axes_of)

    results = _results_of(problem, shapes, dtypes, options.layout)
    scattered = _scattered(problem.features, tensors)
    side = {} if problem.features is PLAIN else _side_of(names, tensors, results, scattered)
    check_reach(problem.features, side)
    return CallFacts(
        direction=direction,
        problem=problem,
        options=options,
        arrays=tensors,
        outputs=tuple(name for name in results if name in shapes),
        layout=layout,
        axes=axes,
        results=results,
        copied=(*[names[place] for place in layout.scattered], *scattered),
        side=side,
    )


def _storage_of(tensors: tuple[ArrayInfo, ...], out: Shape) -> dict[str, Storage]:
    """Where the elements of each array lie; arrays that are not given are, or will be, contiguous."""
    given: dict[str, Storage] = {name: (shape, strides) for name, shape, strides, _ in tensors}
    gradients: dict[str, Storage] = {f"d{name}": (given[name][0], None) for name in ("q", "k", "v")}
    return {"out": (out, None), "dout": (out, None), **gradients, **given}


def _itemsizes_of(problem: Problem, names: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of the tensors' elements."""
    own = {"out": problem.output.itemsize, "k": problem.key_itemsize, "v": problem.key_itemsize}
    return tuple(own.get(name, problem.itemsize) for name in names)


def _results_of(
    problem: Problem, shapes: Mapping[str, Shape], dtypes: Mapping[str, np.dtype[Any]], layout: str
) -> dict[str, tuple[Shape, np.dtype[Any]]]:
    """The shapes and dtypes of all possible results."""
    if problem.direction == "forward":
        out = output_shape(problem, layout)
        return {"out": (out, problem.output), "lse": (lse_shape(problem), problem.accumulator)}
    of_features = (*("bias", "sink"), *problem.features.differentiated_arrays)
    differentiated = [name for name in ("q", "k", "v", *of_features) if name in shapes]
    return {f"d{name}": (shapes[name], dtypes[name]) for name in differentiated}


def _scattered(features: Features, tensors: tuple[ArrayInfo, ...]) -> list[str]:
    """The arrays beside the tensors that kernels cannot read in place."""
    beside = _BESIDE_TENSORS | {f"d{name}" for name in features.differentiated_arrays}
    return [
        name
        for name, shape, strides, dtype in tensors
        if name in beside and not _is_read_as_it_lies(name, shape, strides, dtype.itemsize)
    ]


def _side_of(
    names: tuple[str, ...],
    tensors: tuple[ArrayInfo, ...],
    results: Mapping[str, tuple[Shape, np.dtype[Any]]],
    scattered: Collection[str],
) -> dict[str, tuple[Shape, Shape, int]]:
    """Shape, strides and element size of arrays other than `names`, as kernels read or write them."""
    written = {name: (shape, None, dtype) for name, (shape, dtype) in results.items()}
    read = {
        name: (shape, None if name in scattered else strides, dtype)
        for name, shape, strides, dtype in tensors
    }
    return {
        name: (shape, strides or contiguous_strides(shape, dtype.itemsize), dtype.itemsize)
        for name, (shape, strides, dtype) in (written | read).items()
        if name not in names
    }


def empty(shape: Shape, dtype: np.dtype[Any], on_gpu: bool) -> Any:
    """Allocate an array by the constructor that `empty` of both libraries ends in; calling it is faster."""
    return (sys.modules["cupy"] if on_gpu else np).ndarray(shape, dtype)


def plan_of(
    facts: CallFacts,
    addresses: Mapping[str, int],
    in_keys: bool,
    device: Device,
    kernel: str | None = None,
    tiles: Tiles | None = None,
) -> Plan:
    """The Plan of calls that are alike; arrays without an address count as well aligned.

    `in_keys` says that rows of V are the beginnings of those of K.
    """
    facts = _as_read(facts, addresses, device, kernel)
    align_bytes = _alignment(facts, addresses)
    boxes = _bias_lies_in_boxes(facts, 0 if "bias" in facts.copied else addresses.get("bias", 0))
    placed = _placed(facts, facts.layout, align_bytes, in_keys and facts.keeps_keys, boxes)
    return make_plan(placed, device, kernel, tiles)


def _as_read(facts: CallFacts, addresses: Mapping[str, int], device: Device, kernel: str | None) -> CallFacts:
    """The same with V copied if it is stored transposed and no kernel, or not this one, reads it so."""
    if not facts.problem.transposed_values:
        return facts
    align_bytes = _alignment(facts, addresses)
    problem = replace(facts.problem, align_bytes=align_bytes, ascending=facts.layout.ascending)
    if reads_transposed(problem, device, kernel):
        return facts
    return _facts(facts.direction, facts.arrays, facts.options, False)


def _alignment(facts: CallFacts, addresses: Mapping[str, int]) -> int:
    """What divides the strides and addresses of the tensors; those without an address are well aligned."""
    return facts.layout.alignment(addresses.get(name, 0) for name in TENSORS[facts.direction])


def _placed(facts: CallFacts, layout: Layout, align_bytes: int, in_keys: bool, bias_boxes: bool) -> Problem:
    """The problem of arrays that lie so."""
    return replace(
        facts.problem,
        align_bytes=align_bytes,
        ascending=layout.ascending,
        values_in_keys=in_keys,
        bias_boxes=bias_boxes,
    )


def run_on_gpu(
    call: Call,
    names: tuple[str, ...],
    layout: Layout | None,
    softmax_scale: float,
    values: FeatureValues,
    workspace: Any,
    chosen: KernelChoice,
) -> None:
    """Launch the kernels for the named tensors, in the order of the parameter struct.

    `layout` is that of the call's tensors, unless another is given.
    """
    tensors, addresses = call.tensors, call.addresses
    if call.problem.transposed_values:
        call.facts = _as_read(call.facts, addresses, target(chosen.arch), chosen.kernel)
    facts = call.facts
    layout = layout or facts.layout
    given_at = tuple(addresses.values())
    room = None
    if workspace is not None:
        workspace = arrays.on_current_gpu(workspace, "workspace")
        room = workspace.nbytes
        _check_workspace(facts, given_at, workspace.data.ptr, room, workspace.flags.c_contiguous)
    device_id = sys.modules["cupy"].cuda.runtime.getDevice()
    run, pack, packed = _at_addresses(facts, names, layout, given_at, chosen, room, device_id)
    call.allocate()
    if facts.copied:
        copies = {name: arrays.contiguous(tensors[name]) for name in facts.copied}
        tensors, addresses = tensors | copies, addresses | arrays.describe(copies)[1]
    features = b""
    if facts.problem.features is not PLAIN:
        before, after = _features(facts, tuple(addresses.items()))
        features = before + pack_values(values, facts.problem.accumulator.itemsize) + after
    packed_tensors = pack(*[addresses[name] for name in packed])
    run(packed_tensors, addresses.get("lse", 0), softmax_scale, features, workspace)
    for name in facts.copied:
        if name in call.wanted:
            call.tensors[name][...] = tensors[name]


@functools.lru_cache(maxsize=4096)
def _check_workspace(
    facts: CallFacts, addresses: tuple[int, ...], address: int, room: int, contiguous: bool
) -> None:
    """Raise ValueError unless a workspace of `room` bytes lies well, apart from arrays at these addresses.

    Whether it is large enough, only a plan can say.
    """
    if not contiguous or address % WORKSPACE_ALIGNMENT:
        raise ValueError(f"workspace must be contiguous and aligned to {WORKSPACE_ALIGNMENT} bytes")
    own = Region(address, (room,), (1,), 1)
    check_apart(arrays.regions(facts.arrays, addresses) | {"workspace": own}, ("workspace",))


def check_on_gpu(facts: CallFacts, addresses: Mapping[str, int]) -> None:
    """Raise what `run_on_gpu` would raise for a forward call before launching anything."""
    device_id = sys.modules["cupy"].cuda.runtime.getDevice()
    facts = _as_read(facts, addresses, target(None), None)
    given_at = tuple(addresses.values())
    _at_addresses(facts, TENSORS["forward"], facts.layout, given_at, _NOTHING_CHOSEN, None, device_id)


def _is_read_as_it_lies(name: str, shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether kernels read an array without a copy; rows of some arrays may be apart."""
    if is_contiguous(shape, strides, itemsize):
        return True
    return name in ("bias", "mask", "block_table") and (shape[-1] == 1 or strides[-1] == itemsize)


def write_probabilities(
    call: Call, softmax_scale: float, values: FeatureValues, mods: Mods, arch: ArchLike | None
) -> None:
    """Write the probabilities of a forward call from its LSE."""
    if call.on_gpu:
        in_layout = probabilities.axes(call.facts.options.layout)
        call.add("attn_probs", call.tensors["probs"].transpose(in_layout))
        names = ("q", "k", "v", "attn_probs")
        storage = tuple((call.tensors[name].shape, call.tensors[name].strides) for name in names)
        layout = layout_of(storage, call.problem.itemsize, call.facts.axes)
        chosen = KernelChoice(arch=arch, attn_probs=True)
        run_on_gpu(call, names, layout, softmax_scale, values, None, chosen)
    else:
        q, k = call.in_bshd("q", "k")
        options = cpu_options(call, softmax_scale, values, mods)
        probabilities.write(q, k, call.tensors["lse"], call.tensors["probs"], **options)


@functools.lru_cache(maxsize=4096)
def _features(facts: CallFacts, addresses: tuple[tuple[str, int], ...]) -> tuple[bytes, bytes]:
    """`pack_features` for a call with arrays at these addresses."""
    side = {name: Region(address, *facts.side[name]) for name, address in addresses if name in facts.side}
    return pack_features(facts.problem, side)


@functools.lru_cache(maxsize=4096)
def _at_addresses(
    facts: CallFacts,
    names: tuple[str, ...],
    layout: Layout,
    addresses: tuple[int, ...],
    chosen: KernelChoice,
    room: int | None,
    device_id: int,
) -> tuple[launch.Executable, launch.Packer, tuple[str, ...]]:
    """What runs calls that are alike, with arrays at these addresses, and what it packs the addresses of.

    `room` is the number of bytes of the caller's workspace, if there is one. Raises ValueError if an array is
    misaligned. After the addresses of the given arrays, there may be those of newly allocated ones.
    """
    given = arrays.regions(facts.arrays, addresses)
    check_aligned(given)
    align_bytes = layout.alignment(given[name].address for name in names if name in given)
    bias_at = given["bias"].address if "bias" in given and "bias" not in facts.copied else 0
    bias_boxes = _bias_lies_in_boxes(facts, bias_at)
    in_keys = facts.keeps_keys and lie_in_keys(given["k"], given["v"])
    run, pack = _in_layout(facts, layout, align_bytes, in_keys, bias_boxes, chosen, room, device_id)
    return run, pack, (*names, "bias") if bias_boxes else names


def _bias_lies_in_boxes(facts: CallFacts, address: int) -> bool:
    """Whether the copy engine can bring the bias, if there is one; a copy is as aligned as possible."""
    return "bias" in facts.side and lies_in_boxes(Region(address, *facts.side["bias"]))


@functools.lru_cache(maxsize=4096)
def _in_layout(
    facts: CallFacts,
    layout: Layout,
    align_bytes: int,
    in_keys: bool,
    bias_boxes: bool,
    chosen: KernelChoice,
    room: int | None,
    device_id: int,
) -> tuple[launch.Executable, launch.Packer]:
    """What runs calls that are alike, and what packs their tensors."""
    placed = _placed(facts, layout, align_bytes, in_keys, bias_boxes)
    executable = _executable(placed, chosen, room, device_id)
    bias = Region(0, *facts.side["bias"]) if bias_boxes else None
    return executable, executable.packer(layout, bias)


@functools.lru_cache(maxsize=4096)
def _executable(
    problem: Problem, chosen: KernelChoice, room: int | None, device_id: int
) -> launch.Executable:
    """The Executable, shared by calls whose layouts differ only in strides.

    Raises ValueError, before anything is compiled, for a workspace that is too small.
    """
    device = target(chosen.arch)
    if chosen.attn_probs:
        plan = make_probabilities_plan(problem, device)
    else:
        plan = make_plan(problem, device, chosen.kernel, dict(chosen.tiles))
    if room is not None and room < plan.workspace_bytes:
        raise ValueError(
            f"workspace has {room:,} bytes; this call needs {plan.workspace_bytes:,} "
            "(cufa.plan(...).workspace_bytes)"
        )
    return launch.Executable(plan)


def forget() -> None:
    """Forget plans and loaded kernels, so that edited kernels are compiled again."""
    for cached in (_at_addresses, _in_layout, _executable):
        cached.cache_clear()
    launch.forget()
