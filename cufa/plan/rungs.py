"""Chooses the rung for a problem: the last that supports it or, if plans estimate costs, the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cufa.device import Device
from cufa.kernels import Kernel, kernel_named, verdicts
from cufa.plan import float32, fp8, mma, split_kv, wgmma
from cufa.problem import Problem

# Estimated microseconds of a plan on an H200, besides what every launch takes. Other GPUs count as an H200
# with their number of SMs: what matters is which price is lowest.
PRICES: Mapping[str, Callable[[Problem, Device], float]] = {
    "fwd_5_mma": mma.price,
    "fwd_6_wgmma": wgmma.price,
    "fwd_7_fp8": fp8.price,
    "fwd_8_split_kv": split_kv.price,
    "fwd_9_float32": float32.price,
}


def best_kernel_and_why(problem: Problem, device: Device) -> tuple[Kernel, tuple[str, ...]]:
    """The rung for a problem, with a sentence about it and about each later rung that was passed over.

    Raises ValueError if none supports it, with the reason of each rung that supports the dtype.
    """
    reasons = verdicts(problem, device)
    suited = [name for name, reason in reasons.items() if reason is None]
    best, how = suited[-1], "the last rung that supports this call"
    if best in PRICES:
        prices = {name: PRICES[name](problem, device) for name in suited if name in PRICES}
        best = min(prices, key=lambda name: prices[name])
        if len(prices) > 1:
            of_others = [f"{name} {price:.0f}" for name, price in prices.items() if name != best]
            how = f"about {prices[best]:.0f} us on an H200, the cheapest ({', '.join(of_others)})"
    names = list(reasons)
    passed_over = (reasons[name] for name in names[names.index(best) + 1 :])
    return kernel_named(best), (f"{best}: {how}", *filter(None, passed_over))
