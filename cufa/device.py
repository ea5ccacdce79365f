"""What a GPU can hold: its compute capability, shared memory, registers, SMs and L2 cache.

A `Device` is read from the GPU that CuPy would use, or taken from the table of known compute
capabilities, so planning and compiling need no GPU. Importing this module imports neither CuPy
nor the driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from dataclasses import dataclass, replace

from cufa import driver
from cufa.integers import ceil_div, round_up
from cufa.messages import shown
from cufa.threads import in_forked_children

KIB = 1024
MIB = 1024 * KIB

WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 64 * KIB
# An SM has four partitions, each with a quarter of the registers and its own scheduler. A warp lives in one
# partition and gets registers in units of 256, 8 for each of its lanes.
PARTITIONS_PER_SM = 4
REGISTER_UNIT = 256
# Blocks get shared memory in units of so many bytes; from this compute capability on, the system takes some
# of each block's, and units are smaller.
_FIRST_WITH_SMEM_RESERVED = (8, 0)
SMEM_UNIT, OLDER_SMEM_UNIT = 128, 256

# What the driver says in a process that was forked from one that had used it (CUDA_ERROR_NOT_INITIALIZED).
_LOST_IN_FORK = 3

_ARCH_PATTERN = re.compile(r"(?P<kind>sm_|compute_)?(?P<major>\d{1,2})\.?(?P<minor>\d)(?P<suffix>[af]?)")
_ARCH_FORMS = "'sm_90a', 'compute_80', '90a', '9.0' or 80"
# The first compute capabilities with arch-specific code ('a') and with family-specific code ('f').
_FIRST_WITH_SUFFIX = {"a": (9, 0), "f": (10, 0)}


class GPUUnavailableError(RuntimeError):
    """There is no GPU that cufa can use; the message says what is missing."""


@dataclass(frozen=True)
class Arch:
    """What code is compiled for: `sm_90a` (machine code) or `compute_80` (PTX, `virtual`).

    `suffix` is '' for code that later GPUs can run too, 'a' for code with features of only one compute
    capability (wgmma on 9.0, tcgen05 on 10.0), 'f' for code with features of its family.
    """

    major: int
    minor: int
    suffix: str = ""
    virtual: bool = False

    @classmethod
    def parse(cls, text: Arch | str | int, *, name: str = "arch") -> Arch:
        """Read "sm_90a", "compute_80", "90a", "9.0" or 80.

        Raises ValueError, calling the value `name`, for anything else and for a suffix that the
        compute capability does not have.
        """
        if isinstance(text, Arch):
            return text
        match = _ARCH_PATTERN.fullmatch(str(text))
        if match is None:
            raise ValueError(f"{name} is {shown(text)}; give it as {_ARCH_FORMS}")
        arch = cls(
            major=int(match["major"]),
            minor=int(match["minor"]),
            suffix=match["suffix"],
            virtual=match["kind"] == "compute_",
        )
        if arch.suffix and arch.capability < _FIRST_WITH_SUFFIX[arch.suffix]:
            first = "{}.{}".format(*_FIRST_WITH_SUFFIX[arch.suffix])
            raise ValueError(
                f"{name} is {text!r}, but the suffix {arch.suffix!r} comes with compute "
                f"capability {first}; give {str(arch)[:-1]!r}"
            )
        return arch

    def __str__(self) -> str:
        """The name that NVRTC's -arch takes."""
        return f"{'compute' if self.virtual else 'sm'}_{self.number}{self.suffix}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, (major, minor)."""
        return self.major, self.minor

    @property
    def number(self) -> int:
        """Compute capability in NVRTC's spelling: 90 for 9.0, 121 for 12.1."""
        return 10 * self.major + self.minor

    def runs_on(self, device_capability: tuple[int, int]) -> str | None:
        """None if code for this arch runs on a GPU of that compute capability, else the reason.

        The rules are in the CUDA C++ Programming Guide: "Binary Compatibility", "PTX Compatibility"
        and "Family-Specific and Architecture-Specific Features".
        """
        own = f"{self.major}.{self.minor}"
        if self.suffix == "a":
            fits = device_capability == self.capability
            where = f"{own} alone"
        elif self.virtual and not self.suffix:
            fits = device_capability >= self.capability
            where = f"{own} and newer"
        else:
            fits = device_capability[0] == self.major and device_capability >= self.capability
            where = f"{own} and newer of {self.major}.x"
        if fits:
            return None
        have = "{}.{}".format(*device_capability)
        return f"{self} code runs on compute capability {where}, and the GPU's is {have}"


@dataclass(frozen=True)
class Device:
    """The limits of one GPU. Sizes are in bytes; registers are 32-bit.

    `arch` is what to compile for: exactly the GPU's own ('a' suffix from 9.0 on), unless another was
    requested. `smem_per_block` is the most that a block may opt in to; `smem_reserved_per_block` is
    what the system reserves per block.
    """

    name: str
    arch: Arch
    smem_per_block: int
    smem_per_sm: int
    smem_reserved_per_block: int
    registers_per_sm: int
    registers_per_thread: int
    threads_per_sm: int
    blocks_per_sm: int
    warp_size: int
    sm_count: int
    l2_bytes: int

    @classmethod
    def of(cls, arch: Arch | str | int, *, name: str = "arch") -> Device:
        """The device of `KNOWN` with this arch's compute capability, compiling for `arch`.

        Raises ValueError, calling the value `name`, if the table has no such compute capability.
        """
        wanted = Arch.parse(arch, name=name)
        known = KNOWN.get(wanted.capability)
        if known is None:
            have = ", ".join(str(device.arch) for device in KNOWN.values())
            raise ValueError(
                f"{name} is {str(wanted)!r}, whose limits are not known; without that "
                f"GPU, the arch may be one of {have}"
            )
        return replace(known, arch=wanted)

    def blocks_resident(self, threads: int, registers: int, smem_bytes: int) -> int:
        """How many blocks one SM holds at once; 0 if such a block cannot be launched.

        `threads` and `smem_bytes` (static and dynamic shared memory) are per block, `registers` per
        thread, as the compiler reports them. Raises ValueError if `threads` is less than 1, or another
        number is negative.

        There are four limits: blocks, warps, registers (a warp's are rounded up to the allocation unit
        and come from one of the SM's four partitions) and shared memory (a block's is rounded up,
        including the system's share). Source: CUDA C++ Programming Guide, table "Technical
        Specifications per Compute Capability", and the CUDA Occupancy Calculator for the allocation
        units.
        """
        if threads < 1:
            raise ValueError(f"threads is {threads}; a block has 1 to {MAX_THREADS_PER_BLOCK}")
        for name, number in (("registers", registers), ("smem_bytes", smem_bytes)):
            if number < 0:
                raise ValueError(f"{name} is {number}; it must be at least 0")
        if (
            threads > MAX_THREADS_PER_BLOCK
            or registers > self.registers_per_thread
            or smem_bytes > self.smem_per_block
        ):
            return 0
        warps = ceil_div(threads, self.warp_size)
        limits = [self.blocks_per_sm, self.threads_per_sm // self.warp_size // warps]
        if registers:
            registers_per_warp = round_up(registers * self.warp_size, REGISTER_UNIT)
            warps_per_partition = self.registers_per_sm // PARTITIONS_PER_SM // registers_per_warp
            limits.append(PARTITIONS_PER_SM * warps_per_partition // warps)
        is_older = self.arch.capability < _FIRST_WITH_SMEM_RESERVED
        smem_unit = OLDER_SMEM_UNIT if is_older else SMEM_UNIT
        smem = round_up(smem_bytes + self.smem_reserved_per_block, smem_unit)
        if smem:
            limits.append(self.smem_per_sm // smem)
        return min(limits)


def _native(major: int, minor: int) -> Arch:
    return Arch(major, minor, "a" if (major, minor) >= _FIRST_WITH_SUFFIX["a"] else "")


def _known(
    arch: str,
    name: str,
    sm_count: int,
    l2_mib: float,
    smem_per_sm_kib: int,
    threads_per_sm: int,
    blocks_per_sm: int,
) -> Device:
    native = Arch.parse(arch)
    smem_reserved = KIB if native.capability >= _FIRST_WITH_SMEM_RESERVED else 0
    return Device(
        name=name,
        arch=native,
        smem_per_block=smem_per_sm_kib * KIB - smem_reserved,
        smem_per_sm=smem_per_sm_kib * KIB,
        smem_reserved_per_block=smem_reserved,
        registers_per_sm=REGISTERS_PER_SM,
        registers_per_thread=MAX_REGISTERS_PER_THREAD,
        threads_per_sm=threads_per_sm,
        blocks_per_sm=blocks_per_sm,
        warp_size=WARP_SIZE,
        sm_count=sm_count,
        l2_bytes=int(l2_mib * MIB),
    )


# One typical GPU for each compute capability. The limits of an SM are those of the capability (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability"); SM count and L2 size are those of the
# named GPU. NVIDIA names no product of 8.8: it has 8.6's limits, and here 8.7's SM count and L2 size.
KNOWN: dict[tuple[int, int], Device] = {
    device.arch.capability: device
    for device in (
        #      arch       GPU                    SMs  L2 MiB  smem KiB  threads  blocks per SM
        _known("sm_75", "Tesla T4", 40, 4, 64, 1024, 16),
        _known("sm_80", "A100", 108, 40, 164, 2048, 32),
        _known("sm_86", "GeForce RTX 3090", 82, 6, 100, 1536, 16),
        _known("sm_87", "Jetson AGX Orin", 16, 4, 164, 1536, 16),
        _known("sm_88", "compute capability 8.8", 16, 4, 100, 1536, 16),
        _known("sm_89", "GeForce RTX 4090", 128, 72, 100, 1536, 24),
        _known("sm_90a", "H200", 132, 60, 228, 2048, 32),
        _known("sm_100a", "B200", 148, 126.5, 228, 2048, 32),
        _known("sm_103a", "B300", 148, 126.5, 228, 2048, 32),
        _known("sm_110a", "Jetson AGX Thor", 20, 32, 228, 1536, 24),
        _known("sm_120a", "GeForce RTX 5090", 170, 96, 100, 1536, 24),
        _known("sm_121a", "DGX Spark GB10", 48, 24, 100, 1536, 24),
    )
}


@functools.cache
def gpu_present() -> bool:
    """Whether the NVIDIA driver is installed and shows this process a GPU. Does not import CuPy."""
    try:
        library = driver.library()
    except OSError:
        return False
    count = ctypes.c_int()
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


in_forked_children(gpu_present.cache_clear)


def lost_in_fork() -> bool:
    """Whether this process was forked from one that had used CUDA, which then works in that one alone."""
    try:
        return bool(driver.library().cuInit(0) == _LOST_IN_FORK)
    except OSError:
        return False


def current() -> Device:
    """CuPy's current GPU. Raises GPUUnavailableError if there is none that CuPy can use."""
    if not gpu_present():
        if lost_in_fork():
            raise GPUUnavailableError(
                "no GPU: this process was forked from one that had used CUDA, which works in that one alone; "
                "spawn processes (multiprocessing.get_context('spawn')), or compute on the CPU, with "
                "backend='numpy'"
            )
        raise GPUUnavailableError(
            "no GPU: the NVIDIA driver is not installed or shows this process none; to compute on the CPU, "
            "use backend='numpy' (--backend numpy); to plan or compile for a GPU that is not here, name its "
            "arch (arch='sm_90a', --arch sm_90a) or set CUFA_ARCH"
        )
    try:
        import cupy
    except Exception as error:  # not only ImportError: one built for another NumPy raises ValueError
        raise GPUUnavailableError(
            "there is a GPU, but no CuPy to use it with: pip install 'cufa[cuda13]', or "
            f"'cufa[cuda12]' for an NVIDIA driver older than 580 ({error})"
        ) from error
    try:
        return _read_gpu(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GPUUnavailableError(
            f"there is a GPU, but CuPy {cupy.__version__} cannot use it: {error}; install the "
            "CuPy of the driver's CUDA, 'cufa[cuda12]' or 'cufa[cuda13]', or update the driver"
        ) from error


@functools.cache
def _read_gpu(device_id: int) -> Device:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        name=properties["name"].decode(),
        arch=_native(properties["major"], properties["minor"]),
        smem_per_block=properties["sharedMemPerBlockOptin"],
        smem_per_sm=properties["sharedMemPerMultiprocessor"],
        smem_reserved_per_block=properties["reservedSharedMemPerBlock"],
        registers_per_sm=properties["regsPerMultiprocessor"],
        registers_per_thread=MAX_REGISTERS_PER_THREAD,
        threads_per_sm=properties["maxThreadsPerMultiProcessor"],
        blocks_per_sm=properties["maxBlocksPerMultiProcessor"],
        warp_size=properties["warpSize"],
        sm_count=properties["multiProcessorCount"],
        l2_bytes=properties["l2CacheSize"],
    )


def target(
    arch: Arch | str | int | None = None, *, for_compile_only: bool = False, for_plan_only: bool = False
) -> Device:
    """The device to plan and compile for: `arch`, else the variable CUFA_ARCH, else the GPU's own.

    With a GPU, another arch keeps this GPU's limits and must run on it, so that compiled code can be
    launched. `for_plan_only` also accepts any other known arch, with the limits from the table, and a GPU
    that CuPy cannot use, as if there were none; `for_compile_only` uses the table's limits for every arch.

    Raises ValueError for an invalid arch, one that this GPU cannot run or one with unknown limits, and
    GPUUnavailableError if there is neither an arch nor a GPU, or one that CuPy cannot use.
    """
    name = "arch"
    if arch is None:
        name = "CUFA_ARCH"
        arch = os.environ.get(name) or None
    if arch is None:
        return current()
    wanted = Arch.parse(arch, name=name)
    if for_compile_only or not gpu_present():
        return Device.of(wanted, name=name)
    try:
        gpu = current()
    except GPUUnavailableError:
        if for_plan_only:
            return Device.of(wanted, name=name)
        raise
    reason = wanted.runs_on(gpu.arch.capability)
    if reason is None:
        return replace(gpu, arch=wanted)
    if for_plan_only:
        return Device.of(wanted, name=name)
    raise ValueError(f"{name} is {str(wanted)!r}, which cannot run here: {reason} ({gpu.name})")
