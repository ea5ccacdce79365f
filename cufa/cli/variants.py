"""One kernel variant of `cufa compile`: what it is compiled from, and what resources it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cufa import CompileError, NVRTCMissingError, jit
from cufa.cli import output
from cufa.cli.options import not_in_keys
from cufa.device import Arch, Device
from cufa.jit import Variant
from cufa.kernels import COMPANIONS, KERNELS
from cufa.messages import renamed
from cufa.plan import Launch, make_plan, make_probabilities_plan
from cufa.plan.companions import (
    Appending,
    Quantization,
    Rotation,
    append_launches,
    merge_launches,
    quantize_launches,
    rotary_launches,
    softmax_launches,
)
from cufa.problem import (
    FLOAT8,
    MAX_ALIGN_BYTES,
    Direction,
    Features,
    Problem,
    accumulator_dtype,
    one_of,
)
from cufa.tensor_layout import contiguous_bias_lies_in_boxes

# Length of queries and keys; the compiled code does not depend on it.
SEQLEN = 4096
_DIMS = ("head_dim", "value_dim")
# On which head dims companions depend, if not on both.
_COMPANION_DIMS = {"softmax": (), "merge": ("value_dim",), "rotary": ("head_dim",), "quantize": ("head_dim",)}
# The companions that multiply matrices.
_WITH_PRODUCTS = ("bias_gradient", "attn_probs")


@dataclass(frozen=True)
class Entry:
    """The resources of one entry point of a kernel's file, and how much of an SM its blocks fill."""

    name: str
    used: jit.Resources
    block: int
    smem_bytes: int
    blocks_per_sm: int
    warps_per_sm: int
    occupancy: float


@dataclass(frozen=True)
class Request:
    """What to compile: the arch, and what the kernel must support."""

    kernel: str
    device: Device
    dtype: str
    head_dim: int
    value_dim: int
    causal: bool
    transposed_values: bool
    values_in_keys: bool
    features: Features
    tiles: Mapping[str, int]
    kv_dtype: str | None = None

    @property
    def dims(self) -> dict[str, int]:
        """The head dims that the kernel depends on."""
        return {name: getattr(self, name) for name in _COMPANION_DIMS.get(self.kernel, _DIMS)}

    @property
    def broadcast_bias(self) -> bool:
        """Whether all queries share a row of the bias."""
        return self.features.bias is not None and self.features.bias[-2] == 1

    @property
    def title(self) -> str:
        """All that it asks for, but for the kernel."""
        features = self.features
        details = {
            "bias": f"{'one row of ' * self.broadcast_bias}bias in {features.bias_dtype}",
            "mask": f"mask{' in bits' * features.mask_bits}",
            "block_table": f"block_table with pages of {features.page_size}",
        }
        parts = [str(self.device.arch), self.problem("forward").dtypes]
        dims = dict.fromkeys(map(str, self.dims.values()))
        parts += [f"head dim {'/'.join(dims)}"] if dims else []
        parts += ["values transposed"] if self.transposed_values else []
        parts += ["values in keys"] if self.values_in_keys else []
        parts += ["causal"] if self.causal else []
        parts += [details.get(name, name) for name in features.names]
        parts += [output.tiles(self.tiles)] if self.tiles else []
        return ", ".join(parts)

    def problem(self, direction: Direction) -> Problem:
        """The request as a call."""
        left, right = self.features.window
        windowed = (left, right) != (None, None)
        problem = Problem(
            direction=direction,
            dtype=self.dtype,
            batch=1,
            seqlen_q=SEQLEN,
            seqlen_k=SEQLEN,
            heads=1,
            kv_heads=1,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            # With a window, a causal mask is its right end.
            causal=self.causal and not windowed,
            features=replace(self.features, window=(left, 0) if self.causal and windowed else (left, right)),
            transposed_values=self.transposed_values,
            values_in_keys=self.values_in_keys,
            kv_dtype=self.kv_dtype,
        )
        return replace(problem, bias_boxes=contiguous_bias_lies_in_boxes(problem))


@dataclass(frozen=True)
class Planned:
    """The variant that a request needs, its launches, and the chosen tiles."""

    variant: Variant
    launches: tuple[Launch, ...]
    tiles: Mapping[str, int]


@dataclass(frozen=True)
class Compiled:
    """A request and its build, or why there is none. `skipped` says why the kernel does not support it."""

    request: Request
    planned: Planned | None = None
    build: jit.Build | None = None
    entries: tuple[Entry, ...] = ()
    skipped: str = ""
    error: str = ""


def compile_variant(request: Request) -> Compiled:
    """Compile a request if the kernel supports it; raise Failure if nothing can be compiled here."""
    try:
        planned = _plan(request)
    except ValueError as error:
        # The error names the kernel, as the table does.
        reason = str(renamed(error, {"tiles has": "--tile has"}))
        return Compiled(request, skipped=reason.removeprefix(f"kernel is {request.kernel!r}: "))
    except RuntimeError as error:  # the kernel's planner is wrong
        return Compiled(request, error=str(error))
    try:
        build = jit.build(planned.variant)
    except (CompileError, OSError) as error:  # OSError: the code cannot be kept
        return Compiled(request, planned, error=str(error))
    except (NVRTCMissingError, ValueError) as error:
        raise output.Failure(str(error)) from error
    missing = _missing_entries(planned, build)
    if missing:
        return Compiled(request, planned, error=missing)
    return Compiled(request, planned, build, tuple(_entries(request.device, planned, build)))


def _missing_entries(planned: Planned, build: jit.Build) -> str:
    """What to say if a launched entry is not in the compiled file, as in a copy that kept its old name."""
    if build.arch.virtual:  # PTX: the driver allocates registers when it compiles it
        return ""
    missing = [launch.entry for launch in planned.launches if launch.entry not in build.resources]
    if not missing:
        return ""
    return (
        f"the plan launches {', '.join(missing)}, and the entries of {planned.variant.source} are "
        f"{', '.join(build.resources)}"
    )


def _plan(request: Request) -> Planned:
    """Plan what to compile; raise ValueError if the kernel does not support it."""
    name, device = request.kernel, request.device
    if request.features.tf32 and request.dtype != "float32":
        raise ValueError(f"--precision tf32 is for float32, and this is {request.dtype}")
    if request.transposed_values and request.dtype != FLOAT8:
        raise ValueError(f"--transposed-values is for {FLOAT8}, and this is {request.dtype}")
    if request.values_in_keys and request.value_dim > request.head_dim:
        raise ValueError(not_in_keys(request.head_dim, request.value_dim))
    if name in KERNELS:
        problem = request.problem(KERNELS[name].direction)
        plan = make_plan(problem, device, name, request.tiles)
        return Planned(plan.variant, plan.launches, plan.tiles)
    if request.tiles:
        raise ValueError(f"--tile has {', '.join(request.tiles)}, and {name} has no tiles to choose")
    companion = COMPANIONS[name]
    if request.kv_dtype is not None and not companion.mixes_dtypes:
        raise ValueError(f"--kv-dtype is of keys and values, and {name} has none of their own")
    if request.features.tf32 and name not in _WITH_PRODUCTS:
        raise ValueError(f"--precision tf32 is of products, and {name} has none")
    if request.values_in_keys and name not in _WITH_PRODUCTS:
        raise ValueError(f"--values-in-keys is of products with keys and values, and {name} has none")
    asked = (*(("causal",) if request.causal else ()), *request.features.names)
    missing = [feature for feature in asked if feature not in companion.features]
    if missing:
        raise ValueError(f"{name} does not support {', '.join(missing)}")
    if request.dtype not in companion.dtypes:
        raise ValueError(f"{name} supports {one_of(companion.dtypes)}, and the arrays are {request.dtype}")
    variant, launches = _COMPANION_LAUNCHES[name](request, device.arch)
    return Planned(variant, launches, {})


_COMPANION_LAUNCHES: dict[str, Callable[[Request, Arch], tuple[Variant, tuple[Launch, ...]]]] = {
    "softmax": lambda request, arch: softmax_launches(request.dtype, 2, SEQLEN, arch),
    "merge": lambda request, arch: merge_launches(
        request.dtype, request.value_dim, SEQLEN, MAX_ALIGN_BYTES, arch
    ),
    "rotary": lambda request, arch: rotary_launches(_rotation(request), SEQLEN, arch),
    "append": lambda request, arch: append_launches(
        _appending(request), MAX_ALIGN_BYTES, 1, SEQLEN, SEQLEN, arch
    ),
    "quantize": lambda request, arch: quantize_launches(_quantization(request), True, 1, 1, SEQLEN, arch),
    "bias_gradient": lambda request, _: _bias_gradient_launches(request),
    "attn_probs": lambda request, _: _probabilities_launches(request),
}


def _rotation(request: Request) -> Rotation:
    """A rotation of all columns; of an odd number, all but the last."""
    rotary_dim = request.head_dim // 2 * 2
    if rotary_dim == 0:
        raise ValueError("rotary turns pairs of columns, and head_dim is 1")
    table = accumulator_dtype(request.dtype).name
    return Rotation(request.dtype, request.head_dim, rotary_dim, table, "int32", False, MAX_ALIGN_BYTES)


def _appending(request: Request) -> Appending:
    """Keys that are rotated as by `_rotation`, unless they have 8 bits or one column."""
    dims = request.head_dim, request.value_dim
    appending = Appending(request.dtype, request.kv_dtype or request.dtype, *dims)
    if request.dtype == FLOAT8 or request.head_dim == 1:
        return appending
    rotation = _rotation(request)
    return replace(appending, rotary_dim=rotation.rotary_dim, table_dtype=rotation.table_dtype)


def _quantization(request: Request) -> Quantization:
    dtype, packed = request.dtype, request.features.packed
    return Quantization(dtype, request.head_dim, packed, False, MAX_ALIGN_BYTES, MAX_ALIGN_BYTES)


def _bias_gradient_launches(request: Request) -> tuple[Variant, tuple[Launch, ...]]:
    asked = replace(request, features=replace(request.features, gradients=("bias",)))
    problem, name = asked.problem("backward"), "bwd_3_mma"
    if reason := KERNELS[name].unsupported(problem, request.device):
        raise ValueError(f"kernel is 'bias_gradient', which goes with {name}: {reason}")
    plan = make_plan(problem, request.device, name).beside
    assert plan is not None
    return plan.variant, plan.launches


def _probabilities_launches(request: Request) -> tuple[Variant, tuple[Launch, ...]]:
    plan = make_probabilities_plan(request.problem("forward"), request.device)
    return plan.variant, plan.launches


def _entries(device: Device, planned: Planned, build: jit.Build) -> Iterator[Entry]:
    for launch in planned.launches:
        used = build.resources.get(launch.entry)
        if used is None:  # of PTX nothing is known
            continue
        smem_bytes = launch.smem_bytes + used.static_smem
        blocks = device.blocks_resident(launch.block, used.registers, smem_bytes)
        warps = blocks * launch.block // device.warp_size
        occupancy = warps * device.warp_size / device.threads_per_sm
        yield Entry(launch.entry, used, launch.block, smem_bytes, blocks, warps, occupancy)
