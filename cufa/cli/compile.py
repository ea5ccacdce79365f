"""`cufa compile`: kernels for any arch on any machine, and what the compiler says of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cufa import CompileError, NVRTCMissingError, jit
from cufa.cli import output
from cufa.cli.options import (
    DTYPE,
    INPUT_DTYPE,
    SIZE,
    KernelName,
    count_option,
    json_option,
    precision_option,
    several,
    tile_option,
)
from cufa.device import KNOWN, Arch, Device, target
from cufa.jit import Variant
from cufa.kernels import COMPANIONS, KERNELS
from cufa.plan import Launch, make_plan, make_probabilities_plan
from cufa.plan.standard import (
    Quantization,
    Rotation,
    merge_launch,
    quantize_launches,
    rotary_launch,
    softmax_launch,
)
from cufa.problem import (
    DTYPES,
    FLOAT8,
    MAX_ALIGN_BYTES,
    Direction,
    Features,
    Problem,
    accumulator_dtype,
    one_of,
)

# The lengths of the plans and of a window; what is compiled does not depend on them.
_SEQLEN = 4096
_WINDOW = 256
_ALL_ARCHS = ("all",)
_NAMES = (*KERNELS, *COMPANIONS)
# Those features that are on or off, and nothing else.
_SWITCHES = {
    "softcap": "With a softcap.",
    "alibi": "With ALiBi.",
    "sink": "With a sink.",
    "dropout": "With dropout.",
    "seqused_k": "With keys that do not count.",
    "deterministic": "Backward: with the same bits in every run.",
}


@dataclass(frozen=True)
class _Entry:
    """What one entry of a kernel's file takes, and how much of an SM its blocks fill."""

    name: str
    used: jit.Resources
    block: int
    smem_bytes: int
    blocks_per_sm: int
    warps_per_sm: int
    occupancy: float


@dataclass(frozen=True)
class _Request:
    """What to compile: for which arch, and what the kernel is asked for."""

    kernel: str
    device: Device
    dtype: str
    head_dim: int
    value_dim: int
    causal: bool
    transposed_values: bool
    features: Features
    tiles: Mapping[str, int]

    def problem(self, direction: Direction) -> Problem:
        """What is asked for as a call."""
        left, right = self.features.window
        windowed = (left, right) != (None, None)
        return Problem(
            direction=direction,
            dtype=self.dtype,
            batch=1,
            seqlen_q=_SEQLEN,
            seqlen_k=_SEQLEN,
            heads=1,
            kv_heads=1,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            # Of a window a causal mask is one end.
            causal=self.causal and not windowed,
            features=replace(
                self.features,
                window=(left, 0) if self.causal and windowed else (left, right),
                deterministic=self.features.deterministic and direction == "backward",
                gradients=self.features.gradients if direction == "backward" else (),
            ),
            transposed_values=self.transposed_values,
        )


@dataclass(frozen=True)
class _Planned:
    """The variant that a request is for, its launches, and the tiles that were chosen."""

    variant: Variant
    launches: tuple[Launch, ...]
    tiles: Mapping[str, int]


@dataclass(frozen=True)
class _Compiled:
    """A request: built, or why not. `skipped` says that the kernel does not support it."""

    request: _Request
    planned: _Planned | None = None
    build: jit.Build | None = None
    entries: tuple[_Entry, ...] = ()
    skipped: str = ""
    error: str = ""


def _variant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled into a kernel or left out of it; the command takes it as `causal` and `features`."""

    @functools.wraps(command)
    def bundled(
        *,
        window: bool,
        bias: str | None,
        mask: str | None,
        varlen: bool,
        page_size: int,
        dbias: bool,
        broadcast_bias: bool,
        dsink: bool,
        precision: str,
        **given: Any,
    ) -> Any:
        if dbias and bias is None:
            raise output.Failure("--dbias is the gradient of a bias; give --bias, too")
        if broadcast_bias and not dbias:
            raise output.Failure("--broadcast-bias is about the gradient of a bias; give --dbias, too")
        if dsink and not given["sink"]:
            raise output.Failure("--dsink is the gradient of a sink; give --sink, too")
        scores = (1, 1, _SEQLEN, _SEQLEN)
        features = Features(
            window=(_WINDOW, _WINDOW) if window else (None, None),
            bias=((1, 1, 1, _SEQLEN) if broadcast_bias else scores) if bias else None,
            bias_dtype=bias,
            mask=scores if mask else None,
            mask_bits=mask == "bits",
            packed=varlen,
            page_size=page_size,
            gradients=tuple(name for name, wanted in (("bias", dbias), ("sink", dsink)) if wanted),
            tf32=precision == "tf32",
            **{name: given.pop(name) for name in _SWITCHES},
        )
        return command(features=features, **given)

    options = [
        click.option("--causal", is_flag=True, help="With a causal mask."),
        click.option("--window", is_flag=True, help="With a window of keys."),
        click.option("--bias", type=DTYPE, help="With a bias of this dtype."),
        click.option("--mask", type=click.Choice(["bool", "bits"]), help="With a mask."),
        click.option(
            "--transposed-values",
            is_flag=True,
            help=f"For values whose keys lie next to each other, of {FLOAT8}.",
        ),
        click.option("--varlen", is_flag=True, help="For packed sequences."),
        count_option("--page-size", "For keys in pages of N. [0: no pages]", default=0),
        click.option("--dbias", is_flag=True, help="Backward: with the gradient of the bias."),
        click.option("--broadcast-bias", is_flag=True, help="With a bias that is one row for all queries."),
        click.option("--dsink", is_flag=True, help="Backward: with the gradient of the sink."),
        precision_option,
    ]
    options += [
        click.option(f"--{name.replace('_', '-')}", is_flag=True, help=text)
        for name, text in _SWITCHES.items()
    ]
    for option in reversed(options):
        bundled = option(bundled)
    return bundled


@click.command("compile")
@click.argument("kernels", metavar="[KERNEL]...", type=KernelName(_NAMES), nargs=-1)
@click.option("--all", "all_kernels", is_flag=True, help="Compile every kernel.")
@click.option(
    "--arch",
    "archs",
    type=several(str),
    metavar="ARCH[,...]",
    help="Architectures, as in sm_90a,sm_80, or 'all'. [CUFA_ARCH, else this GPU's]",
)
@click.option(
    "--dtype",
    "dtypes",
    type=several(INPUT_DTYPE),
    metavar="DTYPE[,...]",
    default="float16",
    show_default=True,
    help="Dtypes of the arrays.",
)
@click.option(
    "--head-dim",
    "head_dims",
    type=several(SIZE),
    metavar="N[,...]",
    default="128",
    show_default=True,
    help="Head dims of queries and keys.",
)
@count_option("--value-dim", "Head dim of values. [--head-dim]", least=1)
@_variant_options
@tile_option("--tile", "kernels")
@click.option("--emit", type=click.Choice(["ptx", "cubin", "sass"]), help="Show the code of one variant.")
@click.option(
    "--output",
    "destination",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where --emit writes, instead of stdout.",
)
@json_option
def command(
    kernels: tuple[str, ...],
    all_kernels: bool,
    archs: tuple[str, ...] | None,
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    value_dim: int | None,
    causal: bool,
    transposed_values: bool,
    features: Features,
    tile: tuple[tuple[str, int], ...],
    emit: str | None,
    destination: Path | None,
    as_json: bool,
) -> None:
    """Compile kernels and show what each takes.

    No GPU is needed. Every kernel is compiled for every arch, dtype and head dim that is named. Shown
    are the seconds that NVRTC took (in brackets if the cache had it), registers of a thread, bytes
    spilled, shared memory of a block, and the blocks and warps that an SM holds.

    Exits with 1 if anything fails to compile.
    """
    if all_kernels == bool(kernels):
        raise output.Failure("name kernels or give --all; `cufa kernels` lists them")
    if emit is None and destination is not None:
        raise output.Failure("--output is where --emit writes; give --emit, too")
    if emit is not None and destination is None and (emit == "cubin" or as_json):
        raise output.Failure(f"--emit {emit}{' with --json' if as_json else ''} needs --output FILE")

    devices = _devices(archs)
    requests = [
        _Request(
            *(kernel, device, dtype, head_dim, value_dim or head_dim, causal, transposed_values, features),
            dict(tile),
        )
        for device, dtype, head_dim, kernel in itertools.product(
            devices, dtypes, head_dims, kernels or _NAMES
        )
    ]
    if emit is not None and len(requests) != 1:
        raise output.Failure(f"--emit takes one kernel, arch, dtype and head dim; these are {len(requests)}")

    compiled = []
    with output.progress(len(requests)) as step:
        for request in requests:
            step(f"{request.kernel} for {request.device.arch}")
            compiled.append(_compile(request))

    if all(each.skipped for each in compiled):
        raise output.Failure("; ".join(dict.fromkeys(each.skipped for each in compiled)))
    if emit is not None and compiled[0].build is not None:
        _emit(compiled[0], emit, destination)
    if as_json:
        output.print_json([_document(each) for each in compiled])
    elif emit is None or destination is not None:
        _print(compiled)
    _print_errors(compiled)
    if any(each.error for each in compiled):
        raise click.exceptions.Exit(output.WRONG)


def _devices(archs: tuple[str, ...] | None) -> list[Device]:
    with output.library_errors():
        if archs is None:
            return [target(for_compile_only=True)]
        if archs == _ALL_ARCHS:
            return list(KNOWN.values())
        return [target(arch, for_compile_only=True) for arch in archs]


def _compile(request: _Request) -> _Compiled:
    try:
        planned = _plan(request)
    except ValueError as error:
        # The reason names the kernel itself.
        return _Compiled(request, skipped=str(error).removeprefix(f"kernel is {request.kernel!r}: "))
    try:
        build = jit.build(planned.variant)
    except CompileError as error:
        return _Compiled(request, planned, error=str(error))
    except (NVRTCMissingError, ValueError) as error:
        raise output.Failure(str(error)) from error
    return _Compiled(request, planned, build, tuple(_entries(request.device, planned, build)))


def _plan(request: _Request) -> _Planned:
    """What to compile; ValueError if the kernel does not support it."""
    name, device = request.kernel, request.device
    if request.features.tf32 and request.dtype != "float32":
        raise ValueError(f"--precision tf32 is for float32, and this is {request.dtype}")
    if request.transposed_values and request.dtype != FLOAT8:
        raise ValueError(f"--transposed-values is for {FLOAT8}, and this is {request.dtype}")
    if name in KERNELS:
        problem = request.problem(KERNELS[name].direction)
        plan = make_plan(problem, device, name, request.tiles)
        return _Planned(plan.variant, plan.launches, plan.tiles)
    if request.tiles:
        raise ValueError(f"tiles has {', '.join(request.tiles)}, and {name} has no tiles to choose")
    if request.dtype not in DTYPES:
        raise ValueError(f"{name} supports {one_of(DTYPES)}, and the arrays are {request.dtype}")
    variant, launches = _COMPANION_LAUNCHES[name](request, device.arch)
    return _Planned(variant, launches, {})


def _alone(variant: Variant, launch: Launch) -> tuple[Variant, tuple[Launch, ...]]:
    return variant, (launch,)


_COMPANION_LAUNCHES: dict[str, Callable[[_Request, Arch], tuple[Variant, tuple[Launch, ...]]]] = {
    "softmax": lambda request, arch: _alone(*softmax_launch(request.dtype, 2, _SEQLEN, arch)),
    "merge": lambda request, arch: _alone(
        *merge_launch(request.dtype, request.value_dim, _SEQLEN, MAX_ALIGN_BYTES, arch)
    ),
    "rotary": lambda request, arch: _alone(*rotary_launch(_rotation(request), _SEQLEN, arch)),
    "quantize": lambda request, arch: quantize_launches(_quantization(request), True, 1, 1, _SEQLEN, arch),
    "attn_probs": lambda request, _: _probabilities_launches(request),
}


def _rotation(request: _Request) -> Rotation:
    """Of all columns, or all but the last of an odd number."""
    rotary_dim = request.head_dim // 2 * 2
    if rotary_dim == 0:
        raise ValueError("rotary turns pairs of columns, and head_dim is 1")
    table = accumulator_dtype(request.dtype).name
    return Rotation(request.dtype, request.head_dim, rotary_dim, table, "int32", False, MAX_ALIGN_BYTES)


def _quantization(request: _Request) -> Quantization:
    dtype, packed = request.dtype, request.features.packed
    return Quantization(dtype, request.head_dim, packed, False, MAX_ALIGN_BYTES, MAX_ALIGN_BYTES)


def _probabilities_launches(request: _Request) -> tuple[Variant, tuple[Launch, ...]]:
    plan = make_probabilities_plan(request.problem("forward"), request.device)
    return plan.variant, plan.launches


def _entries(device: Device, planned: _Planned, build: jit.Build) -> Iterator[_Entry]:
    for launch in planned.launches:
        used = build.resources.get(launch.entry)
        if used is None:  # PTX: registers are given out when the driver compiles it
            continue
        smem_bytes = launch.smem_bytes + used.static_smem
        blocks = device.blocks_resident(launch.block, used.registers, smem_bytes)
        warps = blocks * launch.block // device.warp_size
        occupancy = warps * device.warp_size / device.threads_per_sm
        yield _Entry(launch.entry, used, launch.block, smem_bytes, blocks, warps, occupancy)


def _emit(compiled: _Compiled, what: str, destination: Path | None) -> None:
    assert compiled.planned is not None
    assert compiled.build is not None
    try:
        if what == "cubin":
            if compiled.build.arch.virtual:
                raise output.Failure(f"{compiled.build.arch} is PTX and has no cubin; give a real arch")
            code = compiled.build.path.read_bytes()
        else:
            text = jit.ptx(compiled.planned.variant) if what == "ptx" else jit.sass(compiled.build)
            code = text.encode()
    except (ValueError, RuntimeError) as error:
        raise output.Failure(str(error)) from error
    if destination is None:
        click.echo(code.decode(), nl=False)
        return
    try:
        destination.write_bytes(code)
    except OSError as error:
        raise output.Failure(f"--output {destination}: {error.strerror or error}") from error


def _document(compiled: _Compiled) -> dict[str, Any]:
    build, request = compiled.build, compiled.request
    return {
        "kernel": request.kernel,
        "arch": str(request.device.arch),
        "compiled_for": str(build.arch) if build else None,
        "dtype": request.dtype,
        "precision": "tf32" if request.features.tf32 else "ieee",
        "head_dim": request.head_dim,
        "value_dim": request.value_dim,
        "causal": request.causal,
        "transposed_values": request.transposed_values,
        "features": list(request.features.names),
        "tiles": dict(compiled.planned.tiles) if compiled.planned else None,
        "seconds": build.seconds if build else None,
        "cached": build.cached if build else None,
        "path": str(build.path) if build else None,
        "entries": [
            {
                "name": entry.name,
                "registers": entry.used.registers,
                "spill_stores": entry.used.spill_stores,
                "spill_loads": entry.used.spill_loads,
                "stack_bytes": entry.used.stack_bytes,
                "block": entry.block,
                "smem_bytes": entry.smem_bytes,
                "blocks_per_sm": entry.blocks_per_sm,
                "warps_per_sm": entry.warps_per_sm,
                "occupancy": entry.occupancy,
            }
            for entry in compiled.entries
        ],
        "warnings": list(build.warnings) if build else [],
        "skipped": compiled.skipped or None,
        "error": compiled.error or None,
    }


def _print(compiled: list[_Compiled]) -> None:
    console = output.stdout()
    columns = ("<", "seconds", "registers", "spilled", "shared", "blocks", "warps")

    for title, group in itertools.groupby(compiled, lambda each: _title(each.request)):
        table = output.table(columns, title)
        remarks: list[str] = []
        for each in group:
            table.add_row(each.request.kernel, _seconds(each))
            for entry in each.entries:
                spilled = entry.used.spill_stores + entry.used.spill_loads
                table.add_row(
                    f"  {entry.name}",
                    "",
                    str(entry.used.registers),
                    str(spilled),
                    output.size(entry.smem_bytes),
                    str(entry.blocks_per_sm),
                    f"{entry.warps_per_sm} ({entry.occupancy:.0%})",
                    style="yellow" if spilled else None,
                )
            remarks += _remarks(each)
        console.print(table)
        for remark in remarks:
            console.print(f"- {remark}", style="yellow")
        console.print("")


def _title(request: _Request) -> str:
    """What the kernels of one table have in common."""
    head_dim, value_dim = request.head_dim, request.value_dim
    dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"
    dtype = f"{request.dtype} as tf32" if request.features.tf32 else request.dtype
    parts = [str(request.device.arch), dtype, f"head dim {dims}"]
    parts += ["values transposed"] if request.transposed_values else []
    parts += ["causal"] if request.causal else []
    return ", ".join((*parts, *request.features.names))


def _seconds(compiled: _Compiled) -> str:
    if compiled.build is None:
        return "skipped" if compiled.skipped else "FAILED"
    shown = output.three_digits(compiled.build.seconds)
    return f"({shown})" if compiled.build.cached else shown


def _remarks(compiled: _Compiled) -> Iterator[str]:
    kernel, build = compiled.request.kernel, compiled.build
    if compiled.skipped:
        yield compiled.skipped
    if build is not None:
        if build.arch.virtual:
            yield f"{kernel}: PTX for {build.arch}, whose registers the driver gives out"
        yield from (f"{kernel}: {warning}" for warning in build.warnings)


def _print_errors(compiled: list[_Compiled]) -> None:
    for each in compiled:
        if each.error:
            output.say(each.error, "red")
