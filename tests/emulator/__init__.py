"""The kernels' own `.cu` files on the CPU: compiled by g++, checked while they run.

    module = Module("fwd_4_flash_v2.cu", plan.macros)
    module.launch("fwd_4_flash_v2", grid, block, smem_bytes, params, {"q": q, "out": out})

`include/` stands in for what CUDA builds in, with a twin of every `ptx_*.cuh`; `runtime/` runs the threads
of a block as fibers. What works beside them, the copy engine, wgmma and what the two blocks of a cluster
send each other, does so as late as it may. In the checked flavour, every access to memory is looked at
(g++'s instrumentation for sanitizers, with other functions behind it), and what is wrong with a kernel raises
`EmulatorError`.

Environment: CUFA_EMULATOR_OPTIONS holds further options for g++ (as in "-O0 -g" for a debugger), CXX another
compiler, CUFA_EMULATOR_CACHE another folder for what is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

KERNELS = Path(__file__).parents[2] / "cufa" / "kernels"

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
_BUILTINS = _INCLUDE / "cuda_builtins.hpp"
_RUNTIME = _HERE / "runtime"

# The frame pointers are for the stacks in reports.
_COMMON = ("-std=c++17", "-fPIC", "-fno-omit-frame-pointer")
# A library that all modules need. As it is loaded once, what is local to a thread may be found without a
# call: there is little room for that.
_RUNTIME_OPTIONS = (
    *_COMMON,
    "-O3",
    "-U_FORTIFY_SOURCE",
    "-pthread",
    "-ftls-model=initial-exec",
    "-fno-semantic-interposition",
    f"-I{_INCLUDE}",
)
_KERNEL_OPTIONS = (
    *_COMMON,
    "-fvisibility=hidden",
    "-g1",  # lines and what is inlined, for reports
    "-fno-optimize-sibling-calls",
    "-fno-plt",  # the runtime is called all the time
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
    "-fno-exceptions",  # kernels have none, and stacks are walked by their frame pointers
    "-fno-asynchronous-unwind-tables",
    "-Wno-unknown-pragmas",
    "-fsanitize-coverage=trace-pc",
)
# Compiling takes several times as long as the run of a small problem, so neither flavour is optimised much.
# What is inlined makes reports longer: of an earlier access they know one place, and what that is inlined in.
_CHECKED = (
    "-Og",
    "-finline-functions-called-once",
    "-finline-small-functions",
    "-fsanitize=thread,alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift",
    "-fno-sanitize-recover=all",  # what follows a report is not compiled
    "--param=tsan-instrument-func-entry-exit=0",
)
_FAST = ("-O1",)
_LINK = ("-shared", "-Wl,--no-as-needed,-z,now")

# A block that takes so many steps, pieces of code without a jump, does so for ever: it is half a minute.
_MAX_STEPS = 1 << 32

_UNUSED_SECONDS = 24 * 60 * 60

_ENTRY = re.compile(r"__global__\s+void\s+(?:__(?:launch_bounds|cluster_dims)__\([^)]*\)\s*)*(\w+)\s*\(")
_PLACE = re.compile(r"<([0-9a-f]+)>\n")
_KERNEL_LINE = re.compile(r".*/([^/]+\.cuh?:\d+)")

# The one file that is compiled: the kernel's, and what lets the loader call it. All dynamic shared memory is
# one array of this name.
_MAIN = """\
#include "{source}"
__thread unsigned char bytes[SMEM_BYTES] __align__(1024);
unsigned char* emulator::find_shared_memory() {{ return bytes; }}
{entries}
"""


def with_probe(source: str, folder: Path) -> Path:
    """A copy of the kernels in `folder`, and among them a probe: a source of the tests that includes them."""
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
    shutil.copy(_HERE / source, folder)
    return folder


class EmulatorError(Exception):
    """A kernel did what it must not; the message has block, thread, and the lines that led there."""


class _Entry(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("shared_memory", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writeable", ctypes.c_int32),
        ("element_bytes", ctypes.c_uint32),
    )


@functools.cache
def available() -> bool:
    """Whether there is a compiler that knows the options needed: g++ 12 or newer."""
    if shutil.which(_compiler()) is None:
        return False
    command = [_compiler(), *_KERNEL_OPTIONS, *_CHECKED, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Module:
    """One variant of a kernel's file, compiled and loaded.

    `source` is a file in `folder`; `macros` are defined for it as NVRTC would, and `headers`, names and
    texts, take the place of files there. `checked` is the flavour: with it every access to memory is looked
    at; without it only waiting for ever is found, and it runs four to ten times as fast.

    Raises RuntimeError if the compiler refuses the file.
    """

    def __init__(
        self,
        source: str,
        macros: Iterable[tuple[str, str | int | bool]] | Mapping[str, str | int | bool],
        checked: bool = True,
        folder: Path = KERNELS,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.checked = checked
        macros = dict(macros)
        self.path = _build(source, macros, checked, folder, headers)
        self._smem_bytes = int(macros["SMEM_BYTES"])
        self._blocks_per_sm = int(macros.get("BLOCKS_PER_SM", 1))
        self._library = ctypes.CDLL(str(self.path))
        self._library.emulator_launch.restype = ctypes.c_char_p

    def launch(
        self,
        entry: str,
        grid: int,
        block: int,
        smem_bytes: int,
        params: bytes,
        buffers: Mapping[str, npt.NDArray[Any]],
        threads: int = 2,
        max_steps: int = _MAX_STEPS,
        cluster: int = 1,
    ) -> None:
        """Run `grid` blocks of `block` threads, several blocks at once on `threads` threads of the CPU.

        Those of a `cluster` of two reach each other's shared memory.

        `params` is the kernel's parameter, one struct. `buffers` are the arrays whose addresses are in it,
        by the names that reports shall give them; a kernel may write to those only that are writeable.

        Raises ValueError without blocks, as a driver refuses such a launch, and EmulatorError if the kernel
        touches other memory, reads shared memory that no thread wrote, misaligns a vector, has a race, if its
        threads wait for each other for ever, or if one of its blocks has not come to an end after `max_steps`
        pieces of code without a jump.
        """
        if grid == 0:
            raise ValueError(f"{entry} would be launched without blocks")
        record = _Entry.in_dll(self._library, f"entry_of_{entry}")
        if len(params) != record.params_bytes:
            raise ValueError(
                f"params has {len(params)} bytes; the parameter of {entry} has {record.params_bytes}"
            )
        if smem_bytes > self._smem_bytes:
            raise ValueError(
                f"smem_bytes is {smem_bytes}; SMEM_BYTES, which was compiled, is {self._smem_bytes}"
            )
        regions = [_region(name, array) for name, array in buffers.items()]
        report = self._library.emulator_launch(
            ctypes.byref(record),
            entry.encode(),
            ctypes.c_uint(grid),
            ctypes.c_uint(block),
            ctypes.c_uint(cluster),
            ctypes.c_uint(self._blocks_per_sm),
            ctypes.c_uint64(smem_bytes),
            params,
            (_Buffer * len(regions))(*regions),
            ctypes.c_uint(len(regions)),
            ctypes.c_int(self.checked),
            ctypes.c_uint64(max_steps),
            ctypes.c_uint(min(threads, max(grid, 1))),
        )
        if report is not None:
            raise EmulatorError(_with_lines(report.decode(), self.path))


def extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last."""
    if array.size == 0:
        return array.ctypes.data, array.ctypes.data
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    begin = array.ctypes.data + sum(offset for offset in reach if offset < 0)
    return begin, array.ctypes.data + sum(offset for offset in reach if offset > 0) + array.itemsize


def _region(name: str, array: npt.NDArray[Any]) -> _Buffer:
    begin, end = extent(array)
    return _Buffer(name.encode(), begin, end - begin, array.flags.writeable, array.itemsize)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _cache() -> Path:
    """The folder of what is compiled. What was not used for a day is of kernels that are no more."""
    given = os.environ.get("CUFA_EMULATOR_CACHE")
    folder = Path(given).resolve() if given else _HERE.parents[1] / ".pytest_cache" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if file.is_file() and time.time() - file.stat().st_mtime > _UNUSED_SECONDS:
                file.unlink()
    return folder


def _cached(name: str, inputs: object, make: Callable[[Path], None]) -> Path:
    """The file that make(path) makes of these inputs, made at most once; safe for several processes."""
    key = hashlib.sha256(repr((_version(_compiler()), inputs)).encode()).hexdigest()[:32]
    path = _cache() / f"{key}-{name}"
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / name
        make(made)
        made.replace(path)
    return path


def _run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{result.stderr}")


@functools.cache
def _digest(file: Path, changed: int, size: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _contents(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Names and digests. Each launch asks for those of all kernels: what has not changed is read once."""
    states = [(file, file.stat()) for file in sorted(files)]
    return [(file.name, _digest(file, state.st_mtime_ns, state.st_size)) for file, state in states]


def _runtime() -> Path:
    """The runtime's library, of all its files at once: the headers take most of the time."""
    files = sorted(_RUNTIME.glob("*.cpp"))

    def compile_to(made: Path) -> None:
        main = made.with_suffix(".cpp")
        main.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
        _run(_compiler(), *_RUNTIME_OPTIONS, "-shared", "-Wl,-Bsymbolic", main, "-o", made)

    contents = _contents((*_RUNTIME.iterdir(), _INCLUDE / "emulator.hpp"))
    return _cached("runtime.so", (contents, _RUNTIME_OPTIONS), compile_to)


def _build(
    source: str,
    macros: Mapping[str, str | int | bool],
    checked: bool,
    folder: Path,
    headers: Sequence[tuple[str, str]],
) -> Path:
    runtime = _runtime()
    options = (
        *_KERNEL_OPTIONS,
        *(_CHECKED if checked else _FAST),
        *(f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in macros.items()),
        *shlex.split(os.environ.get("CUFA_EMULATOR_OPTIONS", "")),
    )
    entries = _ENTRY.findall((folder / source).read_text(encoding="utf-8"))

    def compile_to(made: Path) -> None:
        # A header is looked for beside the file that includes it, then in these folders: those written for
        # the call and the twins stand before the kernels' own. The source is therefore in a folder by
        # itself, but reports and debuggers see it where it really is.
        (made.parent / source).symlink_to((folder / source).resolve())
        for name, text in headers:
            (made.parent / name).parent.mkdir(exist_ok=True)
            (made.parent / name).write_text(text, encoding="utf-8")
        places = [word for place in (made.parent, _INCLUDE, folder.resolve()) for word in ("-iquote", place)]
        origin = f"-ffile-prefix-map={made.parent}={folder.resolve()}"
        main, compiled = made.with_suffix(".cpp"), made.with_suffix(".o")
        calls = "\n".join(f"EMULATOR_ENTRY({entry})" for entry in entries)
        main.write_text(_MAIN.format(source=source, entries=calls), encoding="utf-8")
        _run(_compiler(), *options, *places, origin, "-include", _BUILTINS, "-c", main, "-o", compiled)
        _run(_compiler(), *_LINK, "-nodefaultlibs", compiled, runtime, "-lgcc", "-o", made)

    contents = _contents(folder.rglob("*.cu*")), _contents(_INCLUDE.rglob("*.*"))
    inputs = source, options, headers, contents, runtime
    return _cached(f"{Path(source).stem}.so", inputs, compile_to)


def _with_lines(report: str, library: Path) -> str:
    """The report with lines of the source in place of its places in the code."""
    places = list(dict.fromkeys(_PLACE.findall(report)))
    command = ["addr2line", "--addresses", "--inlines", "--functions", "--demangle", "--exe", str(library)]
    output = subprocess.run([*command, *places], capture_output=True, text=True, check=True).stdout
    # The address, then two lines for each function there: what is inlined, and what that is inlined in.
    answers = [answer.splitlines()[1:] for answer in output.split("0x")[1:]]
    frames = {
        place: "".join(map(_frame, answer[::2], answer[1::2]))
        for place, answer in zip(places, answers, strict=True)
    }
    return _PLACE.sub(lambda match: frames[match[1]], report).rstrip()


def _frame(function: str, place: str) -> str:
    """A line for one function on a stack; none for those of the emulator itself."""
    match = _KERNEL_LINE.match(place)
    if match is None:
        return ""
    function = function.replace("(anonymous namespace)::", "")
    while function != (shorter := re.sub(r"<[^<>]*>", "", function)):
        function = shorter
    name = function.split("(")[0].split()[-1]
    return f"    {match[1]}: {name}\n"
