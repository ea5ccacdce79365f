"""`cufa compile`: compiles kernels for any arch on any machine, and shows what the compiler reports."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cufa import cache, jit
from cufa.cli import files, output
from cufa.cli.functions import mods_at
from cufa.cli.options import (
    DTYPE,
    INPUT_DTYPE,
    SIZE,
    KernelName,
    check_place_of_values,
    count_option,
    json_option,
    mod_options,
    precision_option,
    several,
    tile_sizes_option,
    tilings,
)
from cufa.cli.variants import SEQLEN, Compiled, Request, compile_variant
from cufa.device import KNOWN, Arch, Device, target
from cufa.kernels import COMPANIONS, KERNELS
from cufa.problem import FLOAT8, Features
from cufa.threads import cores

# Keys before and after the diagonal; the compiled code does not depend on the number.
_WINDOW = 256
_ALL_ARCHS = ("all",)
_STDOUT = Path("-")
# A dtype that tensor cores of every arch support.
_DTYPE = "float16"
_NAMES = (*KERNELS, *COMPANIONS)
# What --emit shows that PTX does not have.
_OF_MACHINE_CODE = ("cubin", "sass")
# The features that are only on or off.
_SWITCHES = {
    "softcap": "With a softcap.",
    "alibi": "With ALiBi.",
    "sink": "With a sink.",
    "dropout": "With dropout.",
    "seqused_k": "With keys beyond seqused_k, which do not count.",
    "deterministic": "Backward: with the same bits in every run.",
}


class _KernelName(KernelName):
    """A kernel's name; what cannot be one may be the value that an option takes in other commands."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The full name; raises click's error if there is none."""
        if value[:1].isdecimal():
            self.fail(f"{value!r} is no kernel; --window and the like take no value here", param, ctx)
        return super().convert(value, param, ctx)


def _variant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for compiled-in features, which the command gets as `causal` and `features`."""

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
        dscore_mod: bool,
        score_mod: str | None,
        mask_mod: str | None,
        precision: str,
        **given: Any,
    ) -> Any:
        if dbias and bias is None:
            raise output.Failure("--dbias is the gradient of a bias; give --bias, too")
        if broadcast_bias and not dbias:
            raise output.Failure("--broadcast-bias is about the gradient of a bias; give --dbias, too")
        if dsink and not given["sink"]:
            raise output.Failure("--dsink is the gradient of a sink; give --sink, too")
        check_place_of_values(given["transposed_values"], given["values_in_keys"])
        mods = mods_at(score_mod, mask_mod)
        differentiable = mods.score_mod.differentiable if mods.score_mod else {}
        if dscore_mod and score_mod is None:
            raise output.Failure("--dscore-mod has gradients of a ScoreMod's arrays; give --score-mod, too")
        if dscore_mod and not differentiable:
            raise output.Failure(f"--dscore-mod has gradients of float arrays; {score_mod} reads none")
        of_scores, of_masks = mods.written_with_gradients if dscore_mod else mods.written
        wanted = {"bias": dbias, "sink": dsink, "score_mod": dscore_mod}
        scores = (1, 1, SEQLEN, SEQLEN)
        features = Features(
            window=(_WINDOW, _WINDOW) if window else (None, None),
            bias=((1, 1, 1, SEQLEN) if broadcast_bias else scores) if bias else None,
            bias_dtype=bias,
            mask=scores if mask else None,
            mask_bits=mask == "bits",
            packed=varlen,
            page_size=page_size,
            gradients=tuple(name for name in wanted if wanted[name]),
            array_sums=sum(x.size for x in differentiable.values()) if dscore_mod else 0,
            tf32=precision == "tf32",
            score_mod=of_scores,
            mask_mod=of_masks,
            **{name: given.pop(name) for name in _SWITCHES},
        )
        described = [(name, x.shape, x.strides, x.dtype) for name, x in mods.arrays.items()]
        return command(features=features.with_lying(described), **given)

    options = [
        click.option("--causal", is_flag=True, help="With a causal mask."),
        click.option("--window", is_flag=True, help="With a window of keys."),
        click.option("--bias", type=DTYPE, help="With a bias of this dtype."),
        click.option("--mask", type=click.Choice(["bool", "bits"]), help="With a mask."),
        click.option(
            "--transposed-values",
            is_flag=True,
            help=f"For {FLOAT8} values stored transposed.",
        ),
        click.option(
            "--values-in-keys",
            is_flag=True,
            help="For values that are the first columns of keys.",
        ),
        click.option("--varlen", is_flag=True, help="For packed sequences."),
        count_option("--page-size", "For keys in pages of N.", default=0, show_default="0: no pages"),
        click.option("--dbias", is_flag=True, help="Backward: with the gradient of the bias."),
        click.option("--broadcast-bias", is_flag=True, help="With one row of bias for all queries."),
        click.option("--dsink", is_flag=True, help="Backward: with the gradient of the sink."),
        click.option(
            "--dscore-mod", is_flag=True, help="Backward: with the gradients of --score-mod's float arrays."
        ),
        *mod_options("with arrays"),
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
@click.argument("kernels", metavar="[KERNEL]...", type=_KernelName(_NAMES), nargs=-1)
@click.option("--all", "all_kernels", is_flag=True, help="Compile every kernel.")
@click.option(
    "--arch",
    "archs",
    type=several(str),
    metavar="ARCH[,...]",
    show_default="CUFA_ARCH, else this GPU's",
    help="Architectures, as in sm_90a,sm_80, or 'all'.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=several(INPUT_DTYPE),
    metavar="DTYPE[,...]",
    show_default=f"{_DTYPE}, or the kernel's only one",
    help="Dtypes of the arrays.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice([FLOAT8]),
    show_default="--dtype",
    help="Dtype of keys and values, beside queries in 16 bits.",
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
@count_option("--value-dim", "Head dim of values.", least=1, show_default="--head-dim")
@_variant_options
@tile_sizes_option
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
    dtypes: tuple[str, ...] | None,
    kv_dtype: str | None,
    head_dims: tuple[int, ...],
    value_dim: int | None,
    causal: bool,
    transposed_values: bool,
    values_in_keys: bool,
    features: Features,
    tile: tuple[tuple[str, tuple[int, ...]], ...],
    emit: str | None,
    destination: Path | None,
    as_json: bool,
) -> None:
    """Compile kernels and show the resources of each.

    No GPU is needed. Compiles every kernel for every given arch, dtype, head dim and tile size. KERNEL is a
    name from `cufa kernels`; up to the number suffices, as in fwd_4. Shows the seconds that NVRTC took (in
    brackets if cached), registers per thread, bytes that spills store and load, shared memory per block,
    blocks and warps per SM, and the tile sizes.

    Exits with 1 if anything fails to compile.
    """
    if all_kernels == bool(kernels):
        both = ", not both" if kernels else ""
        raise output.Failure(f"name kernels or give --all{both}; `cufa kernels` lists them")
    if emit is None and destination is not None:
        raise output.Failure("--output is where --emit writes; give --emit, too")
    if destination == _STDOUT:
        destination = None
    if emit is not None and destination is None and (emit == "cubin" or as_json):
        raise output.Failure(f"--emit {emit}{' with --json' if as_json else ''} needs --output FILE")
    if destination is not None:
        files.check_folder("--output", destination)

    each_once: dict[tuple[str, str], Request] = {}  # however often it is named
    for device, given, head_dim, tiles, kernel in itertools.product(
        _devices(archs), dtypes or (None,), head_dims, tilings(tile), kernels or _NAMES
    ):
        dtype = given or _dtype_of(kernel)
        dims = head_dim, value_dim or head_dim
        own_kv_dtype = kv_dtype if kv_dtype != dtype else None
        own_features = _features_of(kernel, dtype, features)
        in_memory = transposed_values, values_in_keys
        request = Request(kernel, device, dtype, *dims, causal, *in_memory, own_features, tiles, own_kv_dtype)
        each_once.setdefault((kernel, request.title), request)
    requests = list(each_once.values())
    if emit is not None and len(requests) != 1:
        raise output.Failure(
            f"--emit takes one kernel, arch, dtype, head dim and tiling; these are {len(requests)}"
        )

    if emit in _OF_MACHINE_CODE:
        _refuse_ptx(requests[0].device.arch, emit)

    compiled = _compile(requests)
    if emit is not None and compiled[0].build is not None:
        _emit(compiled[0], emit, destination)
    if as_json:
        output.print_json([_document(each) for each in compiled])
    if all(each.skipped for each in compiled):
        raise output.Failure("; ".join(dict.fromkeys(each.skipped for each in compiled)))
    if not as_json and (emit is None or destination is not None):
        _print(compiled)
    _print_errors(compiled)
    if any(each.error for each in compiled):
        raise click.exceptions.Exit(output.WRONG)


def _compile(requests: list[Request]) -> list[Compiled]:
    """Compile in threads that an interrupt does not wait for, since NVRTC only stops when it is done."""
    compiled = []
    pool = ThreadPoolExecutor(cores())
    try:
        with output.progress(len(requests)) as step:
            in_order = pool.map(compile_variant, requests)
            for request in requests:
                step(f"{request.kernel} for {request.device.arch}")
                compiled.append(next(in_order))
    except KeyboardInterrupt:
        output.say("Aborted!")
        os._exit(output.INTERRUPTED)
    finally:
        pool.shutdown(cancel_futures=True)
    return compiled


def _dtype_of(kernel: str) -> str:
    """The dtype that a kernel is compiled for by default."""
    supported = KERNELS[kernel].dtypes if kernel in KERNELS else (_DTYPE,)
    return _DTYPE if _DTYPE in supported else supported[0]


def _features_of(kernel: str, dtype: str, asked: Features) -> Features:
    """What is asked for; for the kernel that needs a bias, else one of all scores, in the arrays' dtype if
    biases have it.
    """
    if kernel != "bias_gradient" or asked.bias is not None:
        return asked
    bias_dtype = _DTYPE if dtype == FLOAT8 else dtype
    return replace(asked, bias=(1, 1, SEQLEN, SEQLEN), bias_dtype=bias_dtype)


def _devices(archs: tuple[str, ...] | None) -> list[Device]:
    with output.library_errors():
        if archs is None:
            return [target(for_compile_only=True)]
        if archs == _ALL_ARCHS:
            return list(KNOWN.values())
        if set(_ALL_ARCHS) & set(archs):
            raise ValueError(f"'all' must be given alone, not in {','.join(archs)}")
        return [target(arch, for_compile_only=True) for arch in archs]


def _refuse_ptx(arch: Arch, emit: str) -> None:
    if arch.virtual:
        raise output.Failure(f"{arch} is PTX and has no {emit}; give a real arch, as in sm_90a")


def _emit(compiled: Compiled, what: str, destination: Path | None) -> None:
    assert compiled.planned is not None
    assert compiled.build is not None
    if what in _OF_MACHINE_CODE:
        _refuse_ptx(compiled.build.arch, what)  # of an arch that NVRTC does not know yet
    try:
        if what == "cubin":
            code = compiled.build.path.read_bytes()
        else:
            text = jit.ptx(compiled.planned.variant) if what == "ptx" else jit.sass(compiled.build)
            code = text.encode()
    except (ValueError, RuntimeError, OSError) as error:
        raise output.Failure(str(error)) from error
    if destination is None:
        click.echo(code.decode(), nl=False)
        return
    with files.writing("--output", destination) as stream:
        stream.write(code)
    output.say(f"written to {destination}")


def _document(compiled: Compiled) -> dict[str, Any]:
    build, request = compiled.build, compiled.request
    return {
        "kernel": request.kernel,
        "arch": str(request.device.arch),
        "compiled_for": str(build.arch) if build else None,
        "dtype": request.dtype,
        "kv_dtype": request.kv_dtype or request.dtype,
        "precision": "tf32" if request.features.tf32 else "ieee",
        "head_dim": request.dims.get("head_dim"),
        "value_dim": request.dims.get("value_dim"),
        "causal": request.causal,
        "transposed_values": request.transposed_values,
        "values_in_keys": request.values_in_keys,
        "features": list(request.features.names),
        "bias_dtype": request.features.bias_dtype,
        "broadcast_bias": request.broadcast_bias,
        "mask_bits": request.features.mask_bits,
        "page_size": request.features.page_size,
        "tiles": dict(compiled.planned.tiles) if compiled.planned else None,
        "seconds": build.seconds if build else None,
        "cached": build.cached if build else None,
        # What could not be kept is deleted at the end.
        "path": str(build.path) if build and build.path.parent == cache.directory() else None,
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


def _print(compiled: list[Compiled]) -> None:
    console = output.stdout()
    columns = ("<", "seconds", "registers", "spilled", "shared", "blocks", "warps")

    groups: dict[str, list[Compiled]] = {}
    for each in compiled:
        groups.setdefault(each.request.title, []).append(each)
    for title, group in groups.items():
        table = output.table(columns, title)
        tiles: list[str] = []
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
            if each.planned and each.planned.tiles:
                tiles.append(f"{each.request.kernel}: {output.tiles(each.planned.tiles)}")
            remarks += _remarks(each)
        output.print_table(table)
        for line in tiles:
            output.print_prose(line)
        for remark in remarks:
            output.print_prose(f"- {remark}", "  ", "yellow")
        console.print("")


def _seconds(compiled: Compiled) -> str:
    if compiled.build is None:
        return "skipped" if compiled.skipped else "FAILED"
    shown = output.three_digits(compiled.build.seconds)
    return f"({shown})" if compiled.build.cached else shown


def _remarks(compiled: Compiled) -> Iterator[str]:
    kernel, build = compiled.request.kernel, compiled.build
    if compiled.skipped:
        yield compiled.skipped
    if build is not None:
        if build.arch.virtual:
            yield f"{kernel}: PTX for {build.arch}, whose registers the driver gives out"
        # A warning names the entry point, which is often called like the kernel.
        yield from (f"{kernel}: {each.removeprefix(f'{kernel}: ')}" for each in build.warnings)


def _print_errors(compiled: list[Compiled]) -> None:
    for each in compiled:
        if each.error:
            output.say(each.error, "red")
