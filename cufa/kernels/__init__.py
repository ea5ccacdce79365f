"""The registry: one row for each kernel, from standard attention up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cufa.device import Device
from cufa.problem import DTYPES, MAX_HEAD_DIM, Direction, Problem


@dataclass(frozen=True)
class Kernel:
    """One rung of the ladder: what it is and what it supports.

    `entries` are the `extern "C"` functions of its file in the order in which they are launched.
    `memory` is what it needs in global memory beyond its inputs and outputs, in the sequence length N.
    """

    name: str
    direction: Direction
    entries: tuple[str, ...]
    idea: str
    paper: str
    memory: str
    dtypes: tuple[str, ...] = tuple(DTYPES)
    min_capability: tuple[int, int] = (7, 5)
    min_head_dim: int = 1
    max_head_dim: int = MAX_HEAD_DIM
    only_arch: str | None = None
    min_align_bytes: int = 1

    @property
    def source(self) -> str:
        """Its file in this folder."""
        return f"{self.name}.cu"

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None if the kernel can solve the problem on this device, else the reason."""
        if problem.direction != self.direction:
            return f"{self.name} is a {self.direction} kernel, and this is a {problem.direction} call"
        if problem.dtype not in self.dtypes:
            return f"{self.name} supports {', '.join(self.dtypes)}, and the arrays are {problem.dtype}"
        if device.arch.capability < self.min_capability:
            needed = "sm_{}{}".format(*self.min_capability)
            return f"{self.name} needs {needed} or newer, and the arch is {device.arch}"
        if self.only_arch not in (None, f"{device.arch.number}{device.arch.suffix}"):
            return f"{self.name} needs sm_{self.only_arch}, and the arch is {device.arch}"
        if problem.align_bytes < self.min_align_bytes:
            return (
                f"{self.name} needs addresses and strides that are multiples of {self.min_align_bytes} "
                f"bytes, and these are of {problem.align_bytes}"
            )
        dim = max(problem.head_dim, problem.value_dim)
        if dim > self.max_head_dim:
            return f"{self.name} supports head dims to {self.max_head_dim}, and this is {dim}"
        if dim < self.min_head_dim:
            return f"{self.name} supports head dims from {self.min_head_dim}, and this is {dim}"
        return None


_LADDER = (
    Kernel(
        name="fwd_1_naive",
        direction="forward",
        entries=("scores", "softmax", "output"),
        idea="standard attention: S and P in global memory, safe softmax in three passes",
        paper="Dao et al. 2022, Algorithm 0",
        memory="O(N^2)",
    ),
    Kernel(
        name="fwd_2_online_softmax",
        direction="forward",
        entries=("scores", "softmax", "output"),
        idea="the softmax in two passes, with a running maximum and sum",
        paper="Milakov and Gimelshein 2018, Algorithm 3",
        memory="O(N^2)",
    ),
    Kernel(
        name="fwd_3_flash_v1",
        direction="forward",
        entries=("fwd_3_flash_v1",),
        idea="tiles in shared memory; keys outer, one launch for each block of them",
        paper="Dao et al. 2022, Algorithm 1",
        memory="O(N)",
    ),
    Kernel(
        name="fwd_4_flash_v2",
        direction="forward",
        entries=("fwd_4_flash_v2",),
        idea="queries outer, one launch; O and the softmax's state in registers",
        paper="Dao 2023, Algorithm 1",
        memory="none",
    ),
    Kernel(
        name="fwd_5_mma",
        direction="forward",
        entries=("fwd_5_mma",),
        idea="tensor cores (mma.sync): S, P and O in fragments, asynchronous copies",
        paper="Dao 2023, Algorithm 1",
        memory="none",
        dtypes=("float16", "bfloat16"),
        min_capability=(8, 0),
    ),
    Kernel(
        name="fwd_6_wgmma",
        direction="forward",
        entries=("fwd_6_wgmma",),
        idea="Hopper: warps that copy and warpgroups that multiply (TMA, wgmma), products beside softmax",
        paper="Shah et al. 2024, Algorithm 2",
        memory="none",
        dtypes=("float16", "bfloat16"),
        min_capability=(9, 0),
        only_arch="90a",
        min_align_bytes=16,
    ),
    Kernel(
        name="bwd_1_naive",
        direction="backward",
        entries=(
            "probabilities",
            "grad_values",
            "grad_probabilities",
            "grad_scores",
            "grad_queries",
            "grad_keys",
        ),
        idea="standard backward: P and dS in global memory",
        paper="Dao et al. 2022, Algorithm 3",
        memory="O(N^2)",
    ),
    Kernel(
        name="bwd_2_flash_v2",
        direction="backward",
        entries=("row_sums", "key_tiles", "round_queries"),
        idea="P recomputed in tiles from Q, K and LSE; dK and dV in registers, dQ by atomics",
        paper="Dao 2023, Algorithm 2",
        memory="O(N)",
    ),
    Kernel(
        name="bwd_3_mma",
        direction="backward",
        entries=("row_sums", "key_tiles", "round_queries"),
        idea="tensor cores: S and dP transposed, so that P and dS stay in registers",
        paper="Dao 2023, Algorithm 2",
        memory="O(N)",
        dtypes=("float16", "bfloat16"),
        min_capability=(8, 0),
    ),
    Kernel(
        name="bwd_4_wgmma",
        direction="backward",
        entries=("row_sums", "key_tiles", "round_queries"),
        idea="Hopper: all five products by wgmma beside each other and beside the softmax, tiles by TMA",
        paper="Shah et al. 2024, section 3",
        memory="O(N)",
        dtypes=("float16", "bfloat16"),
        min_capability=(9, 0),
        only_arch="90a",
        min_align_bytes=16,
        max_head_dim=128,
    ),
    Kernel(
        name="bwd_5_wgmma_wide",
        direction="backward",
        entries=("row_sums", "key_tiles", "round_queries"),
        idea="head dims over 128: warpgroups share the keys and part the dims; one has S, the other dP",
        paper="Shah et al. 2024, section 3",
        memory="O(N)",
        dtypes=("float16", "bfloat16"),
        min_capability=(9, 0),
        only_arch="90a",
        min_align_bytes=16,
        min_head_dim=129,
    ),
)

KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _LADDER})


def kernel_named(name: str) -> Kernel:
    """The registry's row of that name; ValueError if there is none."""
    kernel = KERNELS.get(name)
    if kernel is None:
        raise ValueError(f"kernel is {name!r}; it may be {', '.join(KERNELS)}")
    return kernel


def best_kernel(problem: Problem, device: Device) -> Kernel:
    """The last rung that supports the problem; the ladder is ordered by speed.

    Raises ValueError, with each rung's reason, if none does.
    """
    reasons = []
    for kernel in reversed(_LADDER):
        if kernel.direction != problem.direction:
            continue
        reason = kernel.unsupported(problem, device)
        if reason is None:
            return kernel
        reasons.append(reason)
    raise ValueError(f"no kernel supports {problem} on {device.arch}: " + "; ".join(reasons))
