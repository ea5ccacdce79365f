"""Which rung takes a problem: the last that suits it or, where plans say what they cost, the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cufa.device import Device
from cufa.kernels import Kernel, passed_over, suited_kernels
from cufa.plan import mma, split_kv, wgmma
from cufa.problem import Problem

# How many microseconds a plan takes on an H200, about, beside what every launch takes. Other GPUs are taken
# for one with as many SMs as they have: what counts is which price is the lowest.
PRICES: Mapping[str, Callable[[Problem, Device], float]] = {
    "fwd_5_mma": mma.price,
    "fwd_6_wgmma": wgmma.price,
    "fwd_8_split_kv": split_kv.price,
}


def best_kernel(problem: Problem, device: Device) -> Kernel:
    """The rung for a problem.

    Raises ValueError if none supports it, with the reason of each rung that takes the dtype.
    """
    return _best_and_prices(problem, device)[0]


def best_kernel_and_why(problem: Problem, device: Device) -> tuple[Kernel, tuple[str, ...]]:
    """The same, with a sentence about it and about each that was passed over."""
    best, prices = _best_and_prices(problem, device)
    how = "the last rung that supports this call"
    if len(prices) > 1:
        of_others = [f"{name} {price:.0f}" for name, price in prices.items() if name != best.name]
        how = f"about {prices[best.name]:.0f} us on an H200, the cheapest: {', '.join(of_others)}"
    return best, (f"{best.name}: {how}", *passed_over(best, problem, device))


def _best_and_prices(problem: Problem, device: Device) -> tuple[Kernel, dict[str, float]]:
    suited = suited_kernels(problem, device)
    prices: dict[str, float] = {}
    if suited[-1].name in PRICES:
        prices = {row.name: PRICES[row.name](problem, device) for row in suited if row.name in PRICES}
    best = min(prices, key=lambda name: prices[name], default=suited[-1].name)
    return next(row for row in suited if row.name == best), prices
