"""Chooses the rung for a problem: the last that supports it or, if plans estimate costs, the cheapest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from cufa.device import Device
from cufa.integers import round_up
from cufa.kernels import KERNELS, Kernel, kernel_named
from cufa.plan import fwd_5_mma, fwd_6_wgmma, fwd_7_fp8, fwd_8_split_kv, fwd_9_float32, fwd_10_wgmma_wide
from cufa.plan.suited import unsuited
from cufa.problem import Problem

# Estimated microseconds of a plan on an H200, besides what every launch takes. Other GPUs count as an H200
# with their number of SMs: what matters is which price is lowest.
PRICES: Mapping[str, Callable[[Problem, Device], float]] = {
    "fwd_5_mma": fwd_5_mma.price,
    "fwd_6_wgmma": fwd_6_wgmma.price,
    "fwd_7_fp8": fwd_7_fp8.price,
    "fwd_8_split_kv": fwd_8_split_kv.price,
    "fwd_9_float32": fwd_9_float32.price,
    "fwd_10_wgmma_wide": fwd_10_wgmma_wide.price,
}


# Each call may have other lengths, and pricing all rungs takes longer than a step of decoding. So prices are
# those of lengths that are rounded up, by at most a 32nd.
_ROUNDED_BITS = 6


def best_kernel_and_why(problem: Problem, device: Device) -> tuple[Kernel, tuple[str, ...]]:
    """The rung for a problem, with a sentence about it and about each later rung that was passed over.

    Raises ValueError if none supports it, with the reason of each rung that supports the dtype.
    """
    reasons = _verdicts(problem, device)
    suited = [name for name, reason in reasons.items() if reason is None]
    best, how = suited[-1], "the last rung that supports this call"
    if best in PRICES:
        prices = _prices(_priced(problem), device, tuple(name for name in suited if name in PRICES))
        best = min(prices, key=lambda name: prices[name])
        if len(prices) > 1:
            of_others = [f"{name} {price:.0f}" for name, price in prices.items() if name != best]
            where = "an H200" + f" of {device.sm_count} SMs" * (device.sm_count != fwd_5_mma.H200.sm_count)
            how = f"about {prices[best]:.0f} us on {where}, the cheapest ({', '.join(of_others)})"
    names = list(reasons)
    passed_over = (reasons[name] for name in names[names.index(best) + 1 :])
    return kernel_named(best), (f"{best}: {how}", *filter(None, passed_over))


def _verdicts(problem: Problem, device: Device) -> dict[str, str | None]:
    """Why each rung, by name and in the ladder's order, is not for a call that names none.

    None for a rung that supports and suits the problem and is not there on request only. Raises ValueError if
    none does, with the reason of each that takes the dtypes.
    """
    rungs = [kernel for kernel in KERNELS.values() if kernel.direction == problem.direction]
    reasons = {kernel.name: _verdict(kernel, problem, device) for kernel in rungs}
    if None not in reasons.values():
        of_dtypes = (reasons[kernel.name] for kernel in reversed(rungs) if kernel.takes_dtypes(problem))
        why = "; ".join(filter(None, of_dtypes))
        raise ValueError(f"no kernel supports {problem} on {device.arch}: {why}")
    return reasons


def _verdict(kernel: Kernel, problem: Problem, device: Device) -> str | None:
    """None if a call that names no kernel may get this one, else why not."""
    reason = kernel.unsupported(problem, device)
    if reason is None and kernel.on_request:
        return f"{kernel.name} runs only if a call names it"
    return reason or unsuited(kernel, problem, device)


def _priced(problem: Problem) -> Problem:
    """The problem that is priced in place of this one: typical, or of rounded-up lengths."""
    features = problem.features
    if features.packed or features.bias is not None or features.mask is not None:
        return problem.typical
    return replace(problem, seqlen_q=_rounded(problem.seqlen_q), seqlen_k=_rounded(problem.seqlen_k))


def _rounded(length: int) -> int:
    return round_up(length, 1 << max(0, length.bit_length() - _ROUNDED_BITS))


@functools.lru_cache(maxsize=4096)
def _prices(problem: Problem, device: Device, names: tuple[str, ...]) -> Mapping[str, float]:
    return {name: PRICES[name](problem, device) for name in names}
