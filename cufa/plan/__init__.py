"""From a Problem and a Device to a Plan: which kernel, which tiles, which launches, and why.

Pure functions of their arguments: a machine without a GPU can make, print and compile a plan for any known
GPU. README.md in this folder says what each module plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cufa.device import Device
from cufa.kernels import KERNELS, kernel_named
from cufa.messages import shown
from cufa.plan import (
    bias_gradient,
    bwd_3_mma,
    float32_backward,
    fwd_5_mma,
    fwd_6_wgmma,
    fwd_7_fp8,
    fwd_8_split_kv,
    fwd_9_float32,
    fwd_10_wgmma_wide,
    mixed,
    standard,
    tiled,
    wgmma_backward,
)
from cufa.plan.record import Decisions, Launch, Macro, Plan, Scratch, TensorBox
from cufa.plan.rungs import best_kernel_and_why
from cufa.problem import Problem, integer

__all__ = [
    "Decisions",
    "Launch",
    "Macro",
    "Plan",
    "Scratch",
    "TensorBox",
    "check_tiles",
    "make_plan",
    "make_probabilities_plan",
]

_PLANNERS: dict[str, Callable[[Problem, Device, Mapping[str, int]], Decisions]] = {
    "fwd_1_naive": standard.forward,
    "fwd_2_online_softmax": standard.forward,
    "fwd_3_flash_v1": tiled.flash_v1,
    "fwd_4_flash_v2": tiled.flash_v2,
    "fwd_5_mma": fwd_5_mma.forward,
    "fwd_6_wgmma": fwd_6_wgmma.forward,
    "fwd_7_fp8": fwd_7_fp8.forward,
    "fwd_8_split_kv": fwd_8_split_kv.forward,
    "fwd_9_float32": fwd_9_float32.forward,
    "fwd_10_wgmma_wide": fwd_10_wgmma_wide.forward,
    "bwd_1_naive": standard.backward,
    "bwd_2_flash_v2": tiled.flash_v2_backward,
    "bwd_3_mma": bwd_3_mma.backward,
    "bwd_4_wgmma": wgmma_backward.backward,
    "bwd_5_wgmma_wide": wgmma_backward.backward_wide,
    "bwd_6_float32": float32_backward.backward,
    "bwd_7_float32_wide": float32_backward.backward_wide,
    "bwd_8_wgmma_pair": wgmma_backward.backward_pair,
}


def make_plan(
    problem: Problem,
    device: Device,
    kernel: str | None = None,
    tiles: Mapping[str, int] | None = None,
) -> Plan:
    """Make the Plan for a problem on a device.

    `kernel` names a rung of the ladder instead of the fastest that supports the problem. `tiles` sets
    tile sizes of that kernel, by the names in a printed plan; the others are chosen to suit.

    Raises ValueError if the kernel does not support the problem or the device, or if the tiles do not
    fit; the message has the arithmetic. Raises TypeError unless tiles is a mapping to integers, and
    RuntimeError if the kernel's planner is wrong: it launches an entry that the kernel does not have.
    """
    overrides = {} if tiles is None else check_tiles(tiles)
    mix = mixed.mix_of(problem, device) if kernel is None and not overrides else None
    if mix is not None:
        return _mixed_plan(mix, problem, device)
    if kernel is None:
        row, why = best_kernel_and_why(problem, device)
    else:
        row = kernel_named(kernel, problem.direction)
        why = (f"{row.name}: chosen by the caller",)
        reason = row.unsupported(problem, device)
        if reason is not None:
            raise ValueError(f"kernel is {row.name!r}: {reason}")
    planned = bias_gradient.without_it(problem) if row.leaves_dbias else problem
    plan = _plan(row.name, problem, device, _PLANNERS[row.name](planned, device, overrides), why)
    if planned == problem:
        return plan
    return replace(plan, beside=_bias_gradient_plan(bias_gradient.alone(problem), device))


def _bias_gradient_plan(problem: Problem, device: Device) -> Plan:
    return _plan(bias_gradient.NAME, problem, device, bias_gradient.bias_gradient(problem, device))


def _mixed_plan(mix: mixed.Mix, problem: Problem, device: Device) -> Plan:
    (few, of_few), (many, of_many) = mix.decisions(problem, device)
    beside = _plan(mixed.MANY, many, device, of_many)
    return replace(_plan(mixed.FEW, few, device, of_few, (mix.reason,)), beside=beside)


def check_tiles(tiles: object) -> dict[str, int]:
    """Return overrides of tile sizes as a dict; raise TypeError unless they are a mapping to integers."""
    if not isinstance(tiles, Mapping):
        raise TypeError(f"tiles is {shown(tiles)}; it may be a mapping, as in {{'block_m': 64}}")
    sizes = {}
    for name, size in tiles.items():
        try:
            sizes[name] = integer(size)
        except TypeError:
            raise TypeError(f"tiles has {name} {shown(size)}; it must be an integer") from None
    return sizes


def make_probabilities_plan(problem: Problem, device: Device) -> Plan:
    """Make the Plan of `attn_probs`, which writes the probabilities of a forward problem.

    Raises ValueError if no tiles fit.
    """
    return _plan("attn_probs", problem, device, tiled.probabilities(problem, device, {}))


def _plan(
    kernel: str, problem: Problem, device: Device, decided: Decisions, why: tuple[str, ...] = ()
) -> Plan:
    """The Plan of a kernel that was chosen for the reasons `why`."""
    if kernel in KERNELS:
        _check_entries(kernel, KERNELS[kernel].entries, decided.launches)
    return Plan(
        kernel=kernel,
        source=f"{kernel}.cu",
        problem=decided.problem or problem,
        device=device,
        tiles=decided.tiles,
        macros=decided.macros,
        launches=decided.launches,
        scratch=decided.scratch,
        reasons=(*why, *decided.reasons),
        boxes=decided.boxes,
        parting=decided.parting,
    )


def _check_entries(kernel: str, entries: Collection[str], launches: Iterable[Launch]) -> None:
    for launch in launches:
        if launch.entry not in entries:
            raise RuntimeError(
                f"the planner of {kernel} launches {launch.entry}, and the kernel's entries are "
                f"{', '.join(entries)}; a planner names the entries of its own kernel"
            )
