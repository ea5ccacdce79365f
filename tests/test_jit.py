import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
from first_calls import failing_meanwhile
from forks import in_child
from gpu_calls import skip_unless_the_driver_reads_ptx

from cufa import cache, device, jit
from cufa.device import Arch, Device
from cufa.jit import Resources, Variant
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.problem import Problem

SCALE = """
#include "scale.cuh"
#if !USE_SCALE
#error "USE_SCALE must be true"
#endif
extern "C" __global__ void scale(float* y, const TYPE* x, int n) {
    __shared__ float tile[TILE];
    int i = blockIdx.x * TILE + threadIdx.x;
    tile[threadIdx.x] = i < n ? scaled(x[i]) : 0;
    __syncthreads();
    if (i < n) y[i] = tile[threadIdx.x];
}
"""
SCALE_HEADER = """
#pragma once
#include "factor.cuh"
__device__ inline float scaled(float x) { return FACTOR * x; }
"""
FACTOR_HEADER = "#pragma once\n#define FACTOR 3\n"

# 200 accumulators in each of 1,024 threads, which may have 64 registers each
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) many(float* x, int n) {
    float a[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) a[i] = x[i * n + threadIdx.x];
#pragma unroll 1
    for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int i = 0; i < 200; ++i) a[i] = a[i] * a[(i + 1) % 200] + a[(i + 7) % 200];
    }
#pragma unroll
    for (int i = 0; i < 200; ++i) x[i * n + threadIdx.x] = a[i];
}
extern "C" __global__ void few(float* x) { x[0] = 1; }
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUFA_NVRTC_OPTIONS", raising=False)
    monkeypatch.delenv("CUFA_DEBUG", raising=False)
    monkeypatch.setattr(jit, "_builds", {})
    monkeypatch.setattr(jit, "_modules", {})


@pytest.fixture
def kernels(tmp_path):
    root = tmp_path / "kernels"
    root.mkdir()
    (root / "scale.cu").write_text(SCALE)
    (root / "scale.cuh").write_text(SCALE_HEADER)
    (root / "factor.cuh").write_text(FACTOR_HEADER)
    (root / "unrelated.cuh").write_text("#error never included\n")
    (root / "spilling.cu").write_text(SPILLING)
    return root


@pytest.fixture
def variant(kernels):
    macros = (("TYPE", "float"), ("TILE", 64), ("USE_SCALE", True))
    return Variant("scale.cu", macros, Arch.parse("sm_90a"), kernels)


@pytest.fixture
def compiles(monkeypatch):
    """NVRTC replaced by something quick; the list of variants that it was given."""
    given = []

    def compile_nothing(variant, texts, options):
        given.append(variant)
        return os.urandom(100), ""

    monkeypatch.setattr(jit, "_run_nvrtc", compile_nothing)
    return given


def forget():
    """What the process remembers is gone, as in a new process."""
    jit._builds.clear()


# --- real compiles --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_100f", "sm_121a"])
def test_a_real_arch_gives_machine_code_and_its_resources(variant, arch):
    built = jit.build(replace(variant, arch=Arch.parse(arch)))
    assert str(built.arch) == arch
    assert built.path.suffix == ".cubin"
    assert built.path.read_bytes()[:4] == b"\x7fELF"
    assert list(built.resources) == ["scale"]
    used = built.resources["scale"]
    assert 0 < used.registers <= 64
    assert used == Resources(used.registers, 0, 0, 0, static_smem=64 * 4)
    assert built.warnings == ()
    assert built.seconds > 0
    assert not built.cached


@pytest.mark.gpu
def test_what_nvrtc_has_compiled_before_has_its_resources_too(variant, monkeypatch, tmp_path):
    """With a driver there NVRTC has a cache of its own, whose machine code comes without a report."""
    first = jit.build(variant)
    forget()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "another"))
    again = jit.build(variant)
    assert not again.cached
    assert again.resources == first.resources


@pytest.mark.parametrize("arch", ["compute_80", "compute_90a"])
def test_a_virtual_arch_gives_ptx(variant, arch):
    built = jit.build(replace(variant, arch=Arch.parse(arch)))
    assert str(built.arch) == arch
    assert built.path.suffix == ".ptx"
    text = built.path.read_text()
    assert f".target {arch.replace('compute', 'sm')}" in text
    assert "\0" not in text
    assert built.resources == {}


def test_macros_reach_the_source(kernels):
    (kernels / "macros.cu").write_text(
        'static_assert(YES == 1 && NO == 0 && OFFSET == -7 && sizeof(KIND) == 8 && FACTOR == 0x1.8p+1f, "");'
    )
    macros = (("YES", True), ("NO", False), ("OFFSET", -7), ("KIND", "double"), ("FACTOR", "0x1.8p+1f"))
    jit.build(Variant("macros.cu", macros, Arch.parse("compute_80"), kernels))


def test_spills_are_counted_and_are_warnings(kernels):
    built = jit.build(Variant("spilling.cu", (), Arch.parse("sm_90a"), kernels))
    many, few = built.resources["many"], built.resources["few"]
    assert many.registers == 64
    assert many.spill_stores > 0
    assert many.spill_loads > 0
    assert many.stack_bytes > 0
    assert (few.spill_stores, few.spill_loads, few.stack_bytes) == (0, 0, 0)
    (warning,) = built.warnings
    assert warning.startswith(f"many: {many.spill_stores} bytes spill stores")


def test_options_from_the_environment_are_used(variant, monkeypatch):
    free = jit.build(variant)
    monkeypatch.setenv("CUFA_NVRTC_OPTIONS", "--maxrregcount=24 '-DNOTE=two words'")
    bound = jit.build(variant)
    assert bound.key != free.key
    assert bound.resources["scale"].registers <= 24
    assert "maxrregcount" in bound.log


@pytest.mark.parametrize("kernel", ["fwd_6_wgmma", "bwd_4_wgmma", "bwd_5_wgmma_wide"])
def test_a_debug_build_alone_has_a_watchdog(monkeypatch, kernel):
    direction = KERNELS[kernel].direction
    dim = max(64, KERNELS[kernel].min_head_dim)
    problem = Problem(direction, "bfloat16", 1, 256, 256, 1, 1, dim, dim)
    variant = make_plan(problem, Device.of("sm_90a"), kernel).variant
    parts = "globaltimer", "vprintf", "trap;"
    monkeypatch.setenv("CUFA_DEBUG", "0")
    assert not any(part in jit.ptx(variant) for part in parts)
    monkeypatch.setenv("CUFA_DEBUG", "1")
    assert all(part in jit.ptx(variant) for part in parts)


INCLUDING = ("-I/opt/headers", "-I /opt/headers", "--include-path=/opt/headers", "-lineinfo -include a.h")
INCLUDING += ("--pre-include=a.h",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-DX='open", "-DX='open.*quotation"),
        ("-DX=\udcff", "not allowed"),
        ("-lineinfo -arch=sm_75", "the arch may only be given as arch or CUFA_ARCH"),
        ("--gpu-architecture sm_75", "the arch may only be given"),
        *((option, "it may name no file or folder to include") for option in INCLUDING),
    ],
)
def test_options_that_cannot_be_read_are_named(variant, monkeypatch, options, message):
    monkeypatch.setenv("CUFA_NVRTC_OPTIONS", options)
    with pytest.raises(ValueError, match=f"CUFA_NVRTC_OPTIONS is .*{message}"):
        jit.build(variant)


@pytest.mark.parametrize("value", ["false", "off", "2"])
def test_debug_is_on_or_off(variant, monkeypatch, value):
    monkeypatch.setenv("CUFA_DEBUG", value)
    with pytest.raises(ValueError, match=f"^CUFA_DEBUG is '{value}'; it may be 0 or 1$"):
        jit.build(variant)


def test_debug_is_off_if_its_variable_is_empty(monkeypatch):
    monkeypatch.setenv("CUFA_DEBUG", "")
    assert jit.debug_options() == ()


def test_a_compile_error_has_the_variant_and_the_log(variant):
    (variant.root / "factor.cuh").write_text("#define FACTOR undeclared\n")
    with pytest.raises(jit.CompileError) as caught:
        jit.build(variant)
    message = str(caught.value)
    for part in ("scale.cu for sm_90a", "-DTILE=64", "-DUSE_SCALE=1", "scale.cuh(4)", "undeclared"):
        assert part in message
    assert not list(cache.directory().glob("*"))


def test_a_compile_error_is_not_remembered(variant):
    (variant.root / "factor.cuh").write_text("#define FACTOR undeclared\n")
    for _ in range(2):
        with pytest.raises(jit.CompileError):
            jit.build(variant)
    (variant.root / "factor.cuh").write_text(FACTOR_HEADER)
    assert jit.build(variant).resources


def test_nvrtc_keeps_no_memory_of_a_program_that_it_has_compiled_or_refused(variant, monkeypatch):
    nvrtc, destroyed = jit._nvrtc(), []
    destroy = nvrtc.nvrtcDestroyProgram
    monkeypatch.setattr(nvrtc, "nvrtcDestroyProgram", lambda program: destroyed.append(destroy(program)))
    jit.build(variant)
    assert len(destroyed) == 1
    with pytest.raises(jit.CompileError):
        jit.build(replace(variant, macros=()))
    assert destroyed == [(nvrtc.nvrtcResult.NVRTC_SUCCESS,)] * 2


def test_a_failed_static_assertion_is_in_the_message(kernels):
    (kernels / "assert.cu").write_text('static_assert(SMEM_BYTES == 64, "host and kernel differ");')
    with pytest.raises(jit.CompileError, match="host and kernel differ"):
        jit.build(Variant("assert.cu", (("SMEM_BYTES", 32),), Arch.parse("sm_80"), kernels))


@pytest.mark.parametrize("arch", ["sm_90a", "compute_80"])
@pytest.mark.parametrize("option", ["-dlto", "-optix-ir"])
def test_code_in_a_form_that_no_gpu_loads_is_refused(variant, monkeypatch, arch, option):
    monkeypatch.setenv("CUFA_NVRTC_OPTIONS", f"-lineinfo {option}")
    with pytest.raises(jit.CompileError, match=rf"scale\.cu for {arch} .*OPTIONS is '-lineinfo {option}'"):
        jit.build(replace(variant, arch=Arch.parse(arch)))
    assert not list(cache.directory().glob("*"))


@pytest.mark.parametrize("missing", ["scale.cu", "factor.cuh"])
def test_a_missing_source_or_header_is_named(variant, missing):
    (variant.root / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        jit.build(variant)


def test_a_header_that_the_key_does_not_cover_cannot_be_included(kernels, monkeypatch):
    monkeypatch.chdir(kernels)  # NVRTC would look there for what is in quotes
    (kernels / "by_macro.cu").write_text("#define HEADER <unrelated.cuh>\n#include HEADER\n")
    with pytest.raises(jit.CompileError, match=r"could not open source file \"unrelated\.cuh\""):
        jit.build(Variant("by_macro.cu", (), Arch.parse("compute_80"), kernels))


# --- what is parsed -------------------------------------------------------------------------------


def test_resources_of_a_kernel_include_the_functions_it_calls():
    log = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'caller' for 'sm_90a'
ptxas info    : Function properties for caller
ptxas         .     1752 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 2 barriers, 1900 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compile time = 126.867 ms
ptxas info    : Function properties for _Z6calleePfi
ptxas         .     0 bytes stack frame, 3820 bytes spill stores, 3848 bytes spill loads
ptxas info    : Compiling entry function 'leaf' for 'sm_90a'
ptxas info    : Function properties for leaf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 372 bytes cmem[0]
"""
    assert jit._parse_resources(log) == {
        "caller": Resources(32, 3828, 3860, 1900, 256),
        "leaf": Resources(168, 0, 0, 0, 0),
    }


def test_warnings_are_the_lines_that_matter(tmp_path):
    advice = [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining accumulator registers",
        'a.cu(11): warning #177-D: variable "unused" was declared but never referenced',
        "ptxas warning : For profile sm_90a adjusting per thread register count",
        'nvrtc: warning: "-arch=90" followed by "-arch=80"',
    ]
    noise = [
        'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"',
        "ptxas info    : Used 168 registers, used 1 barriers",
        "ptxas info    : Compile time = 75.10 ms",
    ]
    log = "\n".join([*noise, *advice, *noise])
    built = jit.Build("k", tmp_path, Arch(9, 0), log, {}, 0.1, cached=False)
    assert built.warnings == tuple(advice)


# --- which arch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "fallback"),
    [("sm_120a", "compute_90"), ("sm_88", "compute_86"), ("compute_120", "compute_90")],
)
def test_an_arch_that_nvrtc_does_not_know_yet_becomes_ptx(variant, monkeypatch, arch, fallback):
    monkeypatch.setattr(jit, "supported_archs", lambda: (75, 80, 86, 90))
    built = jit.build(replace(variant, arch=Arch.parse(arch)))
    assert str(built.arch) == fallback
    assert built.arch.runs_on(Arch.parse(arch).capability) is None
    assert f".target {fallback.replace('compute', 'sm')}" in built.path.read_text()
    forget()
    assert jit.build(replace(variant, arch=Arch.parse(arch))).arch == built.arch


def test_an_arch_that_nvrtc_no_longer_knows_is_refused(variant, monkeypatch):
    monkeypatch.setattr(jit, "supported_archs", lambda: (80, 90))
    with pytest.raises(ValueError, match=r"arch is 'sm_75', and NVRTC \d+\.\d+ .*sm_80 and newer.*pip"):
        jit.build(replace(variant, arch=Arch.parse("sm_75")))


def test_an_nvrtc_that_would_crash_is_not_asked(variant, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 1))
    with pytest.raises(
        jit.NVRTCMissingError, match=r"^NVRTC 12\.1 is installed, .* need 12\.4 or newer: pip"
    ):
        jit.build(variant)


def test_every_known_gpu_gets_code_that_it_can_run():
    for capability, known in device.KNOWN.items():
        assert jit._compilable(known.arch).runs_on(capability) is None


# --- the key --------------------------------------------------------------------------------------


def _edit_header(variant, monkeypatch):
    (variant.root / "scale.cuh").write_text(SCALE_HEADER + "// edited\n")
    return variant


def _edit_included_header(variant, monkeypatch):
    (variant.root / "factor.cuh").write_text("#define FACTOR 4\n")
    return variant


def _edit_source(variant, monkeypatch):
    (variant.root / "scale.cu").write_text(SCALE + "// edited\n")
    return variant


def _include_another(variant, monkeypatch):
    (variant.root / "factor.cuh").write_text('#  include  "other.cuh"\n')
    (variant.root / "other.cuh").write_text("#define FACTOR 3\n")
    return variant


def _change_macro(variant, monkeypatch):
    return replace(variant, macros=(*variant.macros[:1], ("TILE", 128), *variant.macros[2:]))


def _add_macro(variant, monkeypatch):
    return replace(variant, macros=(*variant.macros, ("EXTRA", False)))


def _change_arch(variant, monkeypatch):
    return replace(variant, arch=Arch.parse("sm_90"))


def _make_virtual(variant, monkeypatch):
    return replace(variant, arch=Arch.parse("compute_90a"))


def _add_option(variant, monkeypatch):
    monkeypatch.setenv("CUFA_NVRTC_OPTIONS", "-lineinfo")
    return variant


def _update_nvrtc(variant, monkeypatch):
    monkeypatch.setattr(jit, "_compiler", lambda: "nvidia-cuda-nvrtc 99.0")
    return variant


def _change_format(variant, monkeypatch):
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    return variant


@pytest.mark.parametrize(
    "change",
    [
        _edit_header, _edit_included_header, _edit_source, _include_another, _change_macro, _add_macro,
        _change_arch, _make_virtual, _add_option, _update_nvrtc, _change_format,
    ],
)  # fmt: skip
def test_a_change_compiles_again(variant, compiles, monkeypatch, change):
    old = jit.build(variant)
    new = jit.build(change(variant, monkeypatch))
    assert new.key != old.key
    assert not new.cached
    assert len(compiles) == 2


def test_what_is_not_included_does_not_matter(variant, compiles, tmp_path):
    old = jit.build(variant)
    (variant.root / "unrelated.cuh").write_text("// edited\n")
    (variant.root / "new.cuh").write_text("// added\n")
    assert jit.build(variant) == replace(old, cached=True)
    moved = variant.root.rename(tmp_path / "elsewhere")
    assert jit.build(replace(variant, root=moved)) == replace(old, cached=True)
    assert len(compiles) == 1


def test_headers_that_include_each_other_are_read_once(variant, compiles):
    (variant.root / "factor.cuh").write_text(FACTOR_HEADER + '#include "scale.cuh"\n')
    assert sorted(jit._read_sources(variant)) == ["factor.cuh", "scale.cu", "scale.cuh"]


def test_the_compiler_is_identified_without_loading_it(monkeypatch):
    monkeypatch.setattr(jit, "_nvrtc", lambda: pytest.fail("loads NVRTC"))
    monkeypatch.setattr(metadata, "version", lambda name: f"7.1 of {name}")
    assert "nvidia-cuda-nvrtc 7.1" in jit._compiler.__wrapped__()


def test_a_compiler_that_is_no_wheel_is_asked(monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_found)
    assert jit._compiler.__wrapped__() == "NVRTC {}.{}".format(*jit.nvrtc_version())


def test_what_another_nvrtc_than_the_wheels_compiles_has_its_own_key(variant, compiles, monkeypatch):
    monkeypatch.setattr(jit, "_compiler", lambda: "nvidia-cuda-nvrtc 99.0.1")
    built = jit.build(variant)
    forget()
    assert jit.build(variant) == replace(built, cached=True)
    forget()
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (99, 0))
    assert not jit.build(variant).cached
    assert len(compiles) == 2


def test_each_of_two_wheels_has_its_own_key(variant, compiles, monkeypatch):
    wheels = "nvidia-cuda-nvrtc 99.0.1, nvidia-cuda-nvrtc-cu12 98.0.2"
    monkeypatch.setattr(jit, "_compiler", lambda: wheels)
    keys = []
    for version in ((99, 0), (98, 0), (99, 0)):
        monkeypatch.setattr(jit, "nvrtc_version", lambda version=version: version)
        keys.append(jit.build(variant).key)
        forget()
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
    assert len(compiles) == 2
    monkeypatch.setattr(jit, "_compiler", lambda: wheels.partition(", ")[0])
    assert jit.build(variant).key == keys[0]  # with its wheel alone


# --- cached ---------------------------------------------------------------------------------------


def test_a_hit_needs_no_nvrtc_and_gives_the_same(variant, monkeypatch):
    built = jit.build(variant)
    monkeypatch.setattr(jit, "_nvrtc", lambda: pytest.fail("loads NVRTC"))
    assert jit.build(variant) == replace(built, cached=True)
    forget()
    assert jit.build(variant) == replace(built, cached=True)


def test_a_compile_is_announced_once_and_a_hit_is_silent(variant, compiles, caplog):
    with caplog.at_level(logging.INFO, logger="cufa"):
        jit.build(variant)
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert "scale.cu for sm_90a" in record.getMessage()
        jit.build(variant)
        forget()
        jit.build(variant)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", ["truncated", "missing", "cleared", "record"])
@pytest.mark.parametrize("same_process", [True, False])
def test_a_damaged_entry_is_compiled_again(variant, compiles, damage, same_process):
    built = jit.build(variant)
    if damage == "truncated":
        built.path.write_bytes(built.path.read_bytes()[:50])
    elif damage == "missing":
        built.path.unlink()
    elif damage == "cleared":
        cache.clear()
    else:
        (built.path.parent / f"{built.key}.json").write_text("{")
    if not same_process:
        forget()
    again = jit.build(variant)
    assert again.path.exists()
    unharmed_in_memory = same_process and damage in ("truncated", "record")
    assert len(compiles) == (1 if unharmed_in_memory else 2)
    if not unharmed_in_memory:
        forget()
        assert jit.build(variant) == replace(again, cached=True)


def test_without_a_usable_folder_a_process_still_compiles_once(variant, compiles, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    built = jit.build(variant)
    assert built.path.exists()
    assert jit.build(variant) == replace(built, cached=True)
    assert len(compiles) == 1


# --- many at once ---------------------------------------------------------------------------------


def _in_threads(functions):
    results, failures = [], []

    def run(function):
        try:
            results.append(function())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert len(results) == len(threads)
    return results


def test_eight_threads_compile_one_variant_once(variant, monkeypatch):
    compiles = []
    start = threading.Barrier(8)
    real = jit._run_nvrtc

    def counted(*arguments):
        compiles.append(arguments)
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setattr(jit, "_run_nvrtc", counted)

    def build_at_once():
        start.wait(timeout=10)
        return jit.build(variant)

    builds = _in_threads([build_at_once] * 8)
    assert len(compiles) == 1
    assert len({built.path for built in builds}) == 1
    assert sorted(built.cached for built in builds) == [False] + [True] * 7


@pytest.mark.usefixtures("_reload_nvrtc")
def test_threads_wait_while_one_loads_nvrtc(monkeypatch):
    """In some versions of the binding, other calls fail during the first one."""
    from cuda.bindings import nvrtc

    version, start = failing_meanwhile(nvrtc.nvrtcVersion, "nvrtcVersion"), threading.Barrier(4)

    def load_at_once():
        start.wait(timeout=10)
        return jit.nvrtc_version()

    monkeypatch.setattr(nvrtc, "nvrtcVersion", version)
    assert len(set(_in_threads([load_at_once] * 4))) == 1


def test_different_variants_compile_at_the_same_time(variant, monkeypatch):
    inside = threading.Barrier(2)

    def meet(*arguments):
        inside.wait(timeout=10)  # breaks if one compile waits for the other
        return b"code", ""

    monkeypatch.setattr(jit, "_run_nvrtc", meet)
    other = replace(variant, arch=Arch.parse("sm_100a"))
    builds = _in_threads([lambda: jit.build(variant), lambda: jit.build(other)])
    assert len({built.key for built in builds}) == 2


def test_a_forked_child_waits_for_no_thread_of_its_parent(variant, compiles):
    """It has only the thread that forked; no other will ever release what it holds."""
    built = jit.build(variant)
    with jit._locks[built.key]:
        assert in_child(lambda: jit.build(variant).path == built.path)


def test_four_processes_start_at_once_on_an_empty_cache(variant):
    code = f"""
import sys, pathlib
from cufa import jit
from cufa.device import Arch
variant = jit.Variant("scale.cu", {variant.macros!r}, Arch.parse("sm_90a"),
                      pathlib.Path({str(variant.root)!r}))
print("ready", flush=True)
sys.stdin.readline()
built = jit.build(variant)
assert built.path.read_bytes()[:4] == b"\\x7fELF"
print(built.key, built.resources["scale"].registers)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    built = jit.build(variant)
    assert built.cached
    assert outputs[0][0].split() == [built.key, str(built.resources["scale"].registers)]
    assert cache.info().entries == 1
    assert not list(cache.directory().glob(".cufa-*"))


# --- what is not installed ------------------------------------------------------------------------


@pytest.fixture
def _reload_nvrtc():
    for function in (jit._nvrtc, jit.supported_archs, jit.nvrtc_version):
        function.cache_clear()
    yield
    for function in (jit._nvrtc, jit.supported_archs, jit.nvrtc_version):
        function.cache_clear()


@pytest.mark.usefixtures("_reload_nvrtc")
def test_a_missing_binding_says_what_to_install(variant, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(jit.NVRTCMissingError, match=r"pip install 'cufa\[cuda13\]'.*cuda12") as caught:
        jit.build(variant)
    assert isinstance(caught.value, ImportError)


@pytest.mark.usefixtures("_reload_nvrtc")
def test_a_missing_library_says_what_to_install(variant, monkeypatch):
    from cuda.bindings import nvrtc

    def not_found():
        raise RuntimeError("Failure finding libnvrtc.so.13\n\tlistdir('/usr/lib'):\n\t\tlibc.so\n")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    with pytest.raises(jit.NVRTCMissingError, match=r"'cufa\[compile\]'.*libnvrtc\.so\.13\)$"):
        jit.build(variant)


def _nvdisasm_is_missing():
    try:
        return not jit._nvdisasm()
    except RuntimeError:
        return True


needs_nvdisasm = pytest.mark.skipif(_nvdisasm_is_missing(), reason="nvdisasm is not installed")


@needs_nvdisasm
def test_sass_is_the_disassembly(variant):
    text = jit.sass(jit.build(variant))
    assert "EXIT" in text
    assert "LDG" in text


def test_sass_of_ptx_is_refused(variant):
    built = jit.build(replace(variant, arch=Arch.parse("compute_90")))
    with pytest.raises(ValueError, match="compute_90"):
        jit.sass(built)


def test_sass_without_nvdisasm_says_what_to_install(variant, compiles, monkeypatch):
    monkeypatch.setattr(jit.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvdisasm"):
        jit.sass(jit.build(variant))


@needs_nvdisasm
def test_sass_of_what_is_no_cubin_has_nvdisasms_message(variant, compiles):
    with pytest.raises(RuntimeError, match=r"nvdisasm.* failed: .+"):
        jit.sass(jit.build(variant))


def test_ptx_keeps_the_suffix(variant):
    assert ".target sm_90a" in jit.ptx(variant)
    assert ".target sm_80" in jit.ptx(replace(variant, arch=Arch.parse("compute_80")))


def test_a_build_is_loaded_once_for_each_device_and_at_once(variant, compiles, monkeypatch):
    """Its file may be gone later."""
    loaded = []

    class Module:
        def __init__(self, path):
            self.path = path

        def compile(self):
            loaded.append(self.path)

    current = iter((0, 1, 0, 1))
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: next(current)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=Module))
    build = jit.build(variant)
    modules = []
    for _ in range(4):
        modules.append(jit.load(build))
        assert loaded == [str(build.path)] * min(len(modules), 2)
    assert modules[:2] == modules[2:]
    assert modules[0] is not modules[1]


def test_the_record_on_disk_says_what_was_compiled(variant, compiles):
    built = jit.build(variant)
    record = json.loads((built.path.parent / f"{built.key}.json").read_text())
    assert record["meta"]["variant"] == str(variant)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("virtual", [False, True])
def test_a_build_loads_and_launches(variant, virtual):
    cupy = pytest.importorskip("cupy")
    if not device.gpu_present():
        pytest.skip("no GPU")
    if virtual:
        skip_unless_the_driver_reads_ptx()
    arch = replace(device.current().arch, virtual=virtual)
    built = jit.build(replace(variant, arch=arch))
    module = jit.load(built)
    built.path.unlink()
    assert jit.load(built) is module
    x = cupy.random.default_rng(7).random(1000, dtype=cupy.float32)
    y = cupy.full_like(x, cupy.nan)
    kernel = module.get_function("scale")
    kernel((16,), (64,), (y, x, cupy.int32(x.size)))
    assert cupy.array_equal(y, 3 * x)
    used = built.resources.get("scale")
    assert used is None or used.registers == kernel.num_regs
