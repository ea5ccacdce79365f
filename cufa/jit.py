"""Compiles a `.cu` file with macros for an arch by NVRTC, caches the code on disk and loads it on the GPU.

    variant -> build (compiles, or reads the cache) -> load (a cupy.RawModule)

Compiling needs neither a GPU nor CuPy, only `cuda-bindings` and NVRTC, which are loaded at the first
compilation. CuPy's own compiler is not used: it does not know `sm_90a`, and its cache does not notice
edited headers.

The cache key covers everything that NVRTC gets: the source and the headers are passed as text,
without an include path.

Environment: CUFA_NVRTC_OPTIONS holds further options (as in "-lineinfo --maxrregcount=128"), but neither the
arch nor files to include. CUFA_DEBUG=1 compiles slower debug builds, with line numbers and a watchdog that
stops a kernel whose threads wait for each other forever.

Do not fork a process while another of its threads compiles: NVRTC's locks would stay locked in the child,
which would wait forever. Spawn it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cufa import cache
from cufa.device import Arch
from cufa.threads import in_forked_children

if TYPE_CHECKING:
    import cupy

KERNELS = Path(__file__).parent / "kernels"

_log = logging.getLogger("cufa")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '[^']+'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes (?:stack frame|cumulative stack size)")
# NVRTC's and ptxas's warnings, and ptxas's advisories (C75xx) that it serialized wgmma or ignored setmaxnreg,
# which it prints as mere information.
_ADVICE = re.compile(r"\bwarning\s*[:#]|\bC75\d\d\b")

# What gives NVRTC the arch, which is the variant's.
_ARCH_OPTIONS = ("-arch", "--gpu-architecture")
# What gives it files that the cache key does not cover.
_FILE_OPTIONS = ("-I", "--include-path", "-include", "--pre-include")
_DEBUG_OPTIONS = ("-lineinfo", "-DWATCHDOG_SECONDS=5")
# Earlier versions crash with the larger kernels, or do not know instructions of theirs.
_OLDEST_NVRTC = (12, 4)
# From this version on, NVRTC keeps machine code in the driver's cache and then prints no report.
_NVRTC_WITH_CACHE = (12, 9)

_builds: dict[str, Build] = {}
_modules: dict[tuple[str, int], cupy.RawModule] = {}
# One for each key of these, and one for NVRTC.
_locks: dict[str | tuple[str, int], threading.Lock] = {}
in_forked_children(_locks.clear)


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message has the variant, the arch and NVRTC's log."""


class NVRTCMissingError(ImportError):
    """NVRTC or its Python binding is not installed, or is too old."""


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel: `source` is a file in the folder `root`.

    `macros` are defined in this order; a bool is passed as 1 or 0. NVRTC's built-in header sees them too, so
    names that it uses must be avoided (`T` and `x` among them). `headers` are names and texts of headers
    that replace files in `root`.
    """

    source: str
    macros: tuple[tuple[str, str | int | bool], ...]
    arch: Arch
    root: Path = KERNELS
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """One line for logs and messages."""
        return f"{self.source} for {self.arch} with {' '.join(self.definitions) or 'no macros'}"

    @property
    def definitions(self) -> tuple[str, ...]:
        """The macros as compiler options."""
        return tuple(
            f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in self.macros
        )


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, from ptxas's report: registers per thread, the rest in bytes.

    Spills and stack (per thread) include the functions that the kernel calls. Static shared memory
    is per block.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_smem: int


@dataclass(frozen=True)
class Build:
    """A compiled variant.

    `path` is a .cubin or .ptx file, `arch` what it was compiled for, `log` the compiler's messages,
    `resources` each kernel's by name (empty for PTX), `seconds` the compile time. `cached` says
    that this call did not have to compile.
    """

    key: str
    path: Path
    arch: Arch
    log: str
    resources: Mapping[str, Resources]
    seconds: float
    cached: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """Log entries that cost speed or hint at a mistake: spills, C75xx advisories, warnings."""
        spills = (
            f"{name}: {used.spill_stores} bytes spill stores, {used.spill_loads} bytes spill loads"
            for name, used in self.resources.items()
            if used.spill_stores or used.spill_loads
        )
        lines = (line.strip() for line in self.log.splitlines() if _ADVICE.search(line))
        return (*spills, *lines)


def build(variant: Variant) -> Build:
    """Compile `variant`, or read it from the cache. Thread-safe.

    The result is machine code for `variant.arch`, or PTX if that arch is virtual. If NVRTC does not
    know the arch yet, it is PTX for the newest earlier arch that NVRTC knows.

    Raises CompileError if NVRTC refuses the source, ValueError if NVRTC no longer supports so old an
    arch or a variable of the environment is wrong, NVRTCMissingError if NVRTC is not installed, and
    FileNotFoundError if the source or a header does not exist.
    """
    texts = _read_sources(variant)
    options = _options(variant)
    key = _key(variant.arch, texts, options, _compiler())
    with _locks.setdefault(key, threading.Lock()):
        built = _recall(key)
        if built is None:
            key_at_work = _key(variant.arch, texts, options, _compiler_at_work())
            if key_at_work != key:
                built = _recall(key_at_work)
            built = built or _compile(variant, texts, options, key_at_work)
        _builds[key] = replace(built, cached=True)
        return built


def load(build: Build) -> cupy.RawModule:
    """Load the build as a module on CuPy's current device, once per device."""
    import cupy

    place = build.key, cupy.cuda.runtime.getDevice()
    with _locks.setdefault(place, threading.Lock()):
        module = _modules.get(place)
        if module is None:
            module = cupy.RawModule(path=str(build.path))
            module.compile()  # load it now: the file may be gone later
            _modules[place] = module
        return module


def ptx(variant: Variant) -> str:
    """The PTX of `variant`, for the virtual form of its arch (compute_90a for sm_90a)."""
    virtual = replace(variant, arch=replace(variant.arch, virtual=True))
    return build(virtual).path.read_text(encoding="utf-8")


def sass(build: Build) -> str:
    """Disassemble a cubin with nvdisasm.

    Raises ValueError for a build that is PTX, and RuntimeError if nvdisasm is not found or fails.
    """
    if build.arch.virtual:
        raise ValueError(
            f"{build.arch} is compiled to PTX, which has no machine code; give a real arch, as in sm_90a"
        )
    command = [_nvdisasm(), "--print-code", str(build.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed: {result.stderr.strip()}")
    return result.stdout


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, (major, minor). Raises NVRTCMissingError if it is not installed."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """The compute capabilities that this NVRTC compiles for, in order, as in 90 and 121."""
    return tuple(sorted(_checked(_nvrtc().nvrtcGetSupportedArchs())))


def _read_sources(variant: Variant) -> dict[str, str]:
    """The text of the source, first, and of every header that it includes, directly or indirectly."""
    texts: dict[str, str] = {}
    written = dict(variant.headers)
    pending = [variant.source]
    while pending:
        name = pending.pop()
        if name not in texts:
            texts[name] = written.get(name) or (variant.root / name).read_text(encoding="utf-8")
            pending += _INCLUDE.findall(texts[name])
    return texts


def _options(variant: Variant) -> tuple[str, ...]:
    """All compiler options except the arch."""
    return ("--std=c++17", *variant.definitions, *debug_options(), *extra_options())


def debug_options() -> tuple[str, ...]:
    """The options that CUFA_DEBUG=1 asks for; raises ValueError if it is neither 0 nor 1."""
    value = os.environ.get("CUFA_DEBUG") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"CUFA_DEBUG is {value!r}; it may be 0 or 1")
    return _DEBUG_OPTIONS if value == "1" else ()


def extra_options() -> list[str]:
    """The options in CUFA_NVRTC_OPTIONS.

    Raises ValueError if they are not text that a shell could parse, or if one is the arch or names a file.
    """
    text = os.environ.get("CUFA_NVRTC_OPTIONS", "")
    try:
        text.encode()
        options = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"CUFA_NVRTC_OPTIONS is {text!r}: {error}") from error
    if any(option.partition("=")[0] in _ARCH_OPTIONS for option in options):
        raise ValueError(f"CUFA_NVRTC_OPTIONS is {text!r}; the arch may only be given as arch or CUFA_ARCH")
    if any(option.startswith(_FILE_OPTIONS) for option in options):
        raise ValueError(
            f"CUFA_NVRTC_OPTIONS is {text!r}; it may name no file or folder to include, since edits there "
            "would go unnoticed by the cache"
        )
    return options


def _key(arch: Arch, texts: Mapping[str, str], options: tuple[str, ...], compiler: str) -> str:
    parts = [cache.FORMAT_VERSION, compiler, str(arch), options, sorted(texts.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _compiler() -> str:
    """An identifier of the compiler: the installed NVRTC wheels, else the version that NVRTC reports.

    Asking NVRTC itself means loading 100 MB, which a process that finds everything in the cache should
    not have to do.
    """
    from importlib import metadata  # takes a tenth of `import cufa`, and only compiled code needs a key

    wheels = []
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            wheels.append(f"{wheel} {metadata.version(wheel)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(wheels) or "NVRTC {}.{}".format(*nvrtc_version())


def _compiler_at_work() -> str:
    """An identifier of the NVRTC in use: of one of the wheels, or of another that was loaded before."""
    version = "{}.{}".format(*nvrtc_version())
    installed = _compiler().split(", ")
    return next((wheel for wheel in installed if f" {version}." in wheel), f"NVRTC {version}")


def _recall(key: str) -> Build | None:
    """The build of `key` from this process's memory or from the disk."""
    built = _builds.get(key)
    if built is not None and built.path.exists():
        return built
    entry = cache.lookup(key)
    if entry is None:
        return None
    meta = entry.meta
    return Build(
        key=key,
        path=entry.path,
        arch=Arch.parse(meta["arch"]),
        log=meta["log"],
        resources={name: Resources(**used) for name, used in meta["resources"].items()},
        seconds=meta["seconds"],
        cached=True,
    )


def _compile(variant: Variant, texts: Mapping[str, str], options: tuple[str, ...], key: str) -> Build:
    arch = _compilable(variant.arch)
    _log.info("compiling %s for %s", variant.source, arch)
    _log.debug("its macros: %s", " ".join(variant.definitions))
    start = time.perf_counter()
    binary, log = _run_nvrtc(replace(variant, arch=arch), texts, options)
    seconds = time.perf_counter() - start
    resources = _parse_resources(log)
    meta = {
        "variant": str(variant),
        "arch": str(arch),
        "log": log,
        "resources": {name: asdict(used) for name, used in resources.items()},
        "seconds": seconds,
    }
    entry = cache.store(key, binary, "ptx" if arch.virtual else "cubin", meta)
    return Build(key, entry.path, arch, log, resources, seconds, cached=False)


def _compilable(arch: Arch) -> Arch:
    """`arch`, or the newest earlier virtual arch if NVRTC does not know it yet."""
    known = supported_archs()
    if arch.number in known:
        return arch
    older = [number for number in known if number < arch.number]
    if not older:
        raise ValueError(
            "arch is {!r}, and NVRTC {}.{} compiles for sm_{} and newer; an older one may do: "
            "pip install 'cufa[cuda12]'".format(str(arch), *nvrtc_version(), known[0])
        )
    return Arch.parse(f"compute_{older[-1]}")


def _run_nvrtc(variant: Variant, texts: Mapping[str, str], options: tuple[str, ...]) -> tuple[bytes, str]:
    """The machine code or PTX of `variant`, and NVRTC's log."""
    nvrtc = _nvrtc()
    if nvrtc_version() < _OLDEST_NVRTC:
        raise NVRTCMissingError(
            "NVRTC {}.{} is installed, and the kernels need {}.{} or newer: "
            "pip install --upgrade 'cufa[cuda12]'".format(*nvrtc_version(), *_OLDEST_NVRTC)
        )
    arguments = [f"-arch={variant.arch}", *options]
    if not variant.arch.virtual:
        arguments.append("--ptxas-options=-v")
        if nvrtc_version() >= _NVRTC_WITH_CACHE:
            arguments.append("--no-cache")
    headers = [name for name in texts if name != variant.source]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[variant.source].encode(),
            variant.source.encode(),
            len(headers),
            [texts[name].encode() for name in headers],
            [name.encode() for name in headers],
        )
    )
    try:
        encoded = [argument.encode() for argument in arguments]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _output(program, "ProgramLog").decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC could not compile {variant} ({status.name}):\n{log}")
        binary = _output(program, "PTX" if variant.arch.virtual else "CUBIN")
        if not binary:
            raise CompileError(
                f"NVRTC made neither machine code nor PTX of {variant}: CUFA_NVRTC_OPTIONS is "
                f"{os.environ.get('CUFA_NVRTC_OPTIONS', '')!r}; it may ask for no other form, as -dlto does"
            )
        return binary, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(program: Any, what: str) -> bytes:
    """One of NVRTC's outputs; it has separate functions for the size and for the content."""
    nvrtc = _nvrtc()
    buffer = bytearray(_checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return bytes(buffer) if what == "CUBIN" else bytes(buffer).rstrip(b"\0")


def _parse_resources(log: str) -> dict[str, Resources]:
    """Parse ptxas's report. Lines after an entry function's name, up to the next name, are about it."""
    _, *parts = _ENTRY.split(log)
    resources = {}
    for name, report in zip(parts[::2], parts[1::2], strict=True):
        spills = _SPILLS.findall(report)
        resources[name] = Resources(
            registers=_first_number(r"Used (\d+) registers", report),
            spill_stores=sum(int(stores) for stores, _ in spills),
            spill_loads=sum(int(loads) for _, loads in spills),
            stack_bytes=max((int(size) for size in _STACK.findall(report)), default=0),
            static_smem=_first_number(r"(\d+) bytes smem", report),
        )
    return resources


def _first_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


@functools.cache
def _nvrtc() -> ModuleType:
    """`cuda.bindings.nvrtc`, with its library loaded."""
    try:
        from cuda.bindings import nvrtc

        # In some versions of the binding, a call fails while another thread's first one loads the library.
        with _locks.setdefault("nvrtc", threading.Lock()):
            nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the binding, or the library that it loads
        reason = str(error).partition("\n")[0]  # what follows lists where it was looked for
        raise NVRTCMissingError(
            "cufa compiles its kernels with NVRTC, which is not installed: pip install "
            "'cufa[cuda13]', or 'cufa[cuda12]' for an NVIDIA driver older than 580, or 'cufa[compile]' to "
            f"compile without a GPU ({reason})"
        ) from error
    module: ModuleType = nvrtc
    return module


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a binding's (status, value...); raises RuntimeError if the status is an error."""
    status, *values = result
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else values


def _nvdisasm() -> str:
    """The path of nvdisasm, in NVIDIA's wheel, else on the path."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    bins = [str(folder) for root in roots or () for folder in sorted(Path(root).glob("*/bin"))]
    found = shutil.which("nvdisasm", path=os.pathsep.join(bins)) or shutil.which("nvdisasm")
    if found is None:
        raise RuntimeError(
            "nvdisasm is not installed, and the machine code cannot be shown without it: "
            "pip install nvidia-cuda-nvdisasm"
        )
    return found
