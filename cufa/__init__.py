"""FlashAttention for NumPy and CuPy arrays, forward and backward, with or without a GPU."""

from cufa import compat
from cufa.api import attention, attention_backward, plan, softmax
from cufa.device import Arch, Device, GPUUnavailableError
from cufa.jit import CompileError, NVRTCMissingError
from cufa.launch import LaunchError
from cufa.merging import merge
from cufa.plan import Plan
from cufa.problem import Problem
from cufa.quantizing import quantize
from cufa.rotary import rotary
from cufa.score_mod import MaskMod, ScoreMod

__version__ = "0.1.0"

__all__ = [
    "Arch",
    "CompileError",
    "Device",
    "GPUUnavailableError",
    "LaunchError",
    "MaskMod",
    "NVRTCMissingError",
    "Plan",
    "Problem",
    "ScoreMod",
    "attention",
    "attention_backward",
    "compat",
    "merge",
    "plan",
    "quantize",
    "rotary",
    "softmax",
]
