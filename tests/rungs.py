"""The rung that a call runs on, if its caller chooses none."""

from cufa.device import Device
from cufa.kernels import Kernel
from cufa.plan.rungs import best_kernel_and_why
from cufa.problem import Problem


def best_kernel(problem: Problem, device: Device) -> Kernel:
    """Without the reasons."""
    return best_kernel_and_why(problem, device)[0]
