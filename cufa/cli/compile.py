"""`cufa compile`: kernels for any arch on any machine, and what the compiler says of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cufa import CompileError, NVRTCMissingError, jit
from cufa.cli import output
from cufa.cli.options import DTYPE, KERNEL, SIZE, count_option, json_option, several, tile_option
from cufa.device import KNOWN, Device, target
from cufa.kernels import KERNELS, Kernel
from cufa.plan import Plan, make_plan
from cufa.problem import Problem

# The lengths of the plans; what is compiled does not depend on them.
_SEQLEN = 4096
_ALL_ARCHS = ("all",)


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
class _Compiled:
    """A variant: built, or why not. `skipped` says that the kernel does not support it."""

    kernel: str
    device: Device
    dtype: str
    head_dim: int
    value_dim: int
    plan: Plan | None = None
    build: jit.Build | None = None
    entries: tuple[_Entry, ...] = ()
    skipped: str = ""
    error: str = ""


@click.command("compile")
@click.argument("kernels", metavar="[KERNEL]...", type=KERNEL, nargs=-1)
@click.option("--all", "all_kernels", is_flag=True, help="All kernels of the registry.")
@click.option(
    "--arch",
    "archs",
    type=several(str),
    metavar="ARCH[,...]",
    help="As in sm_90a,sm_80, or 'all'. [CUFA_ARCH, else this GPU's]",
)
@click.option(
    "--dtype", "dtypes", type=several(DTYPE), metavar="DTYPE[,...]", default="float16", show_default=True
)
@click.option(
    "--head-dim", "head_dims", type=several(SIZE), metavar="N[,...]", default="128", show_default=True
)
@count_option("--value-dim", "Head dim of values. [--head-dim]", least=1)
@click.option("--causal", is_flag=True, help="The masked variants.")
@tile_option("--tile", "kernels")
@click.option("--emit", type=click.Choice(["ptx", "cubin", "sass"]), help="The code of one variant.")
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
    rows = [KERNELS[name] for name in kernels] or list(KERNELS.values())
    requests = list(itertools.product(devices, dtypes, head_dims, rows))
    if emit is not None and len(requests) != 1:
        raise output.Failure(f"--emit takes one kernel, arch, dtype and head dim; these are {len(requests)}")

    compiled = []
    with output.progress(len(requests)) as step:
        for device, dtype, head_dim, kernel in requests:
            step(f"{kernel.name} for {device.arch}")
            problem = Problem(
                direction=kernel.direction,
                dtype=dtype,
                batch=1,
                seqlen_q=_SEQLEN,
                seqlen_k=_SEQLEN,
                heads=1,
                kv_heads=1,
                head_dim=head_dim,
                value_dim=value_dim or head_dim,
                causal=causal,
            )
            compiled.append(_compile(kernel, device, problem, dict(tile)))

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


def _compile(kernel: Kernel, device: Device, problem: Problem, tiles: dict[str, int]) -> _Compiled:
    about: dict[str, Any] = {
        "kernel": kernel.name,
        "device": device,
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
    }
    try:
        plan = make_plan(problem, device, kernel.name, tiles)
    except ValueError as error:
        return _Compiled(**about, skipped=str(error))
    try:
        build = jit.build(plan.variant)
    except CompileError as error:
        return _Compiled(**about, plan=plan, error=str(error))
    except (NVRTCMissingError, ValueError) as error:
        raise output.Failure(str(error)) from error
    return _Compiled(**about, plan=plan, build=build, entries=tuple(_entries(plan, build)))


def _entries(plan: Plan, build: jit.Build) -> Iterator[_Entry]:
    device = plan.device
    for launch in plan.launches:
        used = build.resources.get(launch.entry)
        if used is None:  # PTX: registers are given out when the driver compiles it
            continue
        smem_bytes = launch.smem_bytes + used.static_smem
        blocks = device.blocks_resident(launch.block, used.registers, smem_bytes)
        warps = blocks * launch.block // device.warp_size
        occupancy = warps * device.warp_size / device.threads_per_sm
        yield _Entry(launch.entry, used, launch.block, smem_bytes, blocks, warps, occupancy)


def _emit(compiled: _Compiled, what: str, destination: Path | None) -> None:
    assert compiled.plan is not None
    assert compiled.build is not None
    try:
        if what == "cubin":
            if compiled.build.arch.virtual:
                raise output.Failure(f"{compiled.build.arch} is PTX and has no cubin; give a real arch")
            code = compiled.build.path.read_bytes()
        else:
            text = jit.ptx(compiled.plan.variant) if what == "ptx" else jit.sass(compiled.build)
            code = text.encode()
    except (ValueError, RuntimeError) as error:
        raise output.Failure(str(error)) from error
    if destination is None:
        click.echo(code.decode(), nl=False)
        return
    try:
        destination.write_bytes(code)
    except OSError as error:
        raise output.Failure(f"--output {destination}: {error}") from error


def _document(compiled: _Compiled) -> dict[str, Any]:
    build, plan = compiled.build, compiled.plan
    return {
        "kernel": compiled.kernel,
        "arch": str(compiled.device.arch),
        "compiled_for": str(build.arch) if build else None,
        "dtype": compiled.dtype,
        "head_dim": compiled.head_dim,
        "value_dim": compiled.value_dim,
        "tiles": dict(plan.tiles) if plan else None,
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

    def same_table(each: _Compiled) -> tuple[str, str, int, int]:
        return str(each.device.arch), each.dtype, each.head_dim, each.value_dim

    for (arch, dtype, head_dim, value_dim), group in itertools.groupby(compiled, same_table):
        dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"
        table = output.table(columns, f"{arch}, {dtype}, head dim {dims}")
        remarks: list[str] = []
        for each in group:
            table.add_row(each.kernel, _seconds(each))
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


def _seconds(compiled: _Compiled) -> str:
    if compiled.build is None:
        return "skipped" if compiled.skipped else "FAILED"
    shown = output.three_digits(compiled.build.seconds)
    return f"({shown})" if compiled.build.cached else shown


def _remarks(compiled: _Compiled) -> Iterator[str]:
    if compiled.skipped:
        yield compiled.skipped
    if compiled.build is not None:
        if compiled.build.arch.virtual:
            yield f"{compiled.kernel}: PTX for {compiled.build.arch}, whose registers the driver gives out"
        yield from (f"{compiled.kernel}: {warning}" for warning in compiled.build.warnings)


def _print_errors(compiled: list[_Compiled]) -> None:
    for each in compiled:
        if each.error:
            output.say(each.error, "red")
