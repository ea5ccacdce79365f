#!/usr/bin/env python3
"""Compiles the tensor-core kernels for GPUs that need not be here, and writes benchmarks/archs.md.

For each arch and head dim: the tiles that the plan chooses, registers, spills, what an SM holds, and how many
of which instructions the main kernel has. Beside them stand the tiles that FlashAttention's authors chose by
measurement: FlashAttention-2 2.8 (flash_fwd_launch_template.h, flash_bwd_launch_template.h) for A100, RTX 30
and 40, flash-attn-4 (flash_fwd_sm120.py) for RTX 50.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from cufa import jit
from cufa.device import Device
from cufa.plan import Plan, make_plan
from cufa.problem import Direction, Problem

DESTINATION = Path(__file__).resolve().parent.parent / "benchmarks" / "archs.md"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
KERNELS: dict[str, Direction] = {"fwd_5_mma": "forward", "bwd_3_mma": "backward"}
MAIN_ENTRIES = ("fwd_5_mma", "key_tiles")
# Products, loads of operands, asynchronous copies, exponentials, additions to global memory, barriers, local
# memory (spills).
INSTRUCTIONS = {
    "HMMA": r"HMMA",
    "LDSM": r"LDSM",
    "LDGSTS": r"LDGSTS",
    "EX2": r"MUFU\.EX2",
    "RED": r"RED|ATOMG",
    "BAR": r"BAR",
    "local": r"LDL|STL",
}
# block_m x block_n and warps, by capability (major, minor) and head dim.
LITERATURE = {
    "fwd_5_mma": {
        (8, 0): {64: "128x128 4w", 128: "128x64 4w", 256: "128x64 8w"},
        (8, 6): {64: "128x128 4w", 128: "128x32 4w, causal 64x64", 256: "64x64 4w"},
        (8, 9): {64: "128x128 4w", 128: "128x32 4w, causal 64x64", 256: "64x64 4w"},
        (12, 0): {64: "128x128 4w", 128: "128x64 4w", 256: "-"},
    },
    "bwd_3_mma": {
        (8, 0): {64: "128x128 8w", 128: "64x128 8w", 256: "64x64 8w"},
        (8, 6): {64: "64x128 8w", 128: "64x64 8w", 256: "64x32 8w"},
        (8, 9): {64: "64x128 8w", 128: "64x64 8w", 256: "64x32 8w"},
        (12, 0): {64: "64x64 4w", 128: "64x64 4w", 256: "-"},
    },
}


def instruction_mix(sass: str, entry: str) -> Counter[str]:
    """How often the code of one entry has each of `INSTRUCTIONS`."""
    section = re.split(rf"^\.text\.{entry}:", sass, flags=re.MULTILINE)[1].split("\n.text.")[0]
    mnemonics = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)", section, flags=re.MULTILINE
    )
    return Counter(
        name
        for mnemonic in mnemonics
        for name, pattern in INSTRUCTIONS.items()
        if re.match(pattern, mnemonic)
    )


def tiles_of(plan: Plan) -> str:
    extra = [f"{name} {plan.tiles[name]}" for name in ("stages", "split") if plan.tiles.get(name, 1) != 1]
    shape = f"{plan.tiles['block_m']}x{plan.tiles['block_n']} {plan.tiles['threads'] // 32}w"
    return ", ".join([shape, *extra])


def rows(kernel: str, device: Device, head_dim: int, causal: bool) -> Iterator[list[str]]:
    problem = Problem(
        KERNELS[kernel],
        "float16",
        4,
        4096,
        4096,
        2048 // head_dim,
        2048 // head_dim,
        head_dim,
        head_dim,
        causal,
    )
    plan = make_plan(problem, device, kernel)
    build = jit.build(plan.variant)
    launch = next(launch for launch in plan.launches if launch.entry in MAIN_ENTRIES)
    used = build.resources[launch.entry]
    blocks = device.blocks_resident(launch.block, used.registers, launch.smem_bytes + used.static_smem)
    mix = instruction_mix(jit.sass(build), launch.entry)
    yield [
        f"{device.arch} ({device.name})",
        f"{head_dim}{' causal' if causal else ''}",
        tiles_of(plan),
        LITERATURE[kernel].get(device.arch.capability, {}).get(head_dim, "-"),
        str(used.registers),
        str(used.spill_stores),
        f"{launch.smem_bytes / 1024:.1f}",
        f"{blocks} ({blocks * launch.block / device.threads_per_sm:.0%})",
        *(str(mix[name]) for name in INSTRUCTIONS),
    ]


@click.command(help=__doc__)
def main() -> None:
    lines = [
        "# The tensor-core kernels on GPUs that were not at hand",
        "",
        f"Written by `scripts/arch_report.py` with NVRTC {'.'.join(map(str, jit.nvrtc_version()))}; float16, "
        "4,096 tokens a sequence. Tiles are queries x keys and warps of a block; registers and spilled bytes "
        "are of a thread, shared memory of a block, in KiB; blocks are those that an SM holds, and how much "
        "of its threads that is; then comes how many of which instructions the main kernel has. `literature` "
        "are the tiles that FlashAttention-2 (A100, RTX 30 and 40) and flash-attn-4 (RTX 50) use.",
    ]
    columns = [
        "arch",
        "head dim",
        "tiles",
        "literature",
        "registers",
        "spilled",
        "shared",
        "blocks",
        *INSTRUCTIONS,
    ]
    for kernel in KERNELS:
        lines += ["", f"## {kernel}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        combinations = [
            (arch, dim, causal) for arch in ARCHS for dim in (64, 128, 256) for causal in (False, True)
        ]
        for arch, dim, causal in track(combinations, kernel, console=Console(stderr=True), transient=True):
            device = Device.of(arch)
            try:
                lines += [f"| {' | '.join(row)} |" for row in rows(kernel, device, dim, causal)]
            except ValueError as error:
                lines.append(f"| {device.arch} ({device.name}) | {dim} | {error} |")
    DESTINATION.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
