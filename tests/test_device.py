import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forks import in_child

from cufa import arrays, device, driver
from cufa.device import KIB, KNOWN, Arch, Device, GPUUnavailableError, gpu_present


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    device._read_gpu.cache_clear()
    yield
    device._read_gpu.cache_clear()


class CUDARuntimeError(RuntimeError):
    """Stands for CuPy's."""


@pytest.fixture
def fake_gpus(monkeypatch, h200_properties):
    """A 9.0 and an 8.6, of which `selected` is current, behind a module that stands for CuPy."""
    a10 = h200_properties | {"name": b"NVIDIA A10", "major": 8, "minor": 6, "multiProcessorCount": 72}
    gpus = SimpleNamespace(selected=0, properties=[h200_properties, a10], reads=0)

    def get_properties(index):
        gpus.reads += 1
        return gpus.properties[index]

    runtime = SimpleNamespace(
        getDevice=lambda: gpus.selected,
        getDeviceProperties=get_properties,
        CUDARuntimeError=CUDARuntimeError,
    )
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime)
    cupy.__version__ = "14.0.0"
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    gpus.runtime = runtime
    return gpus


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_present", lambda: False)


# --- Arch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_90a", Arch(9, 0, "a")),
        ("sm_75", Arch(7, 5)),
        ("sm_100f", Arch(10, 0, "f")),
        ("sm_121a", Arch(12, 1, "a")),
        ("compute_80", Arch(8, 0, virtual=True)),
        ("compute_90a", Arch(9, 0, "a", virtual=True)),
        ("90a", Arch(9, 0, "a")),
        ("9.0", Arch(9, 0)),
        ("12.1", Arch(12, 1)),
        ("9.0a", Arch(9, 0, "a")),
        (80, Arch(8, 0)),
        (121, Arch(12, 1)),
        (Arch(8, 9), Arch(8, 9)),
    ],
)
def test_arch_parses(text, expected):
    assert Arch.parse(text) == expected


def test_an_arch_that_holds_an_array_is_shown_by_its_shape():
    with pytest.raises(ValueError, match=r"^arch is \[a numpy\.ndarray of shape \(9,\)\]; give it as"):
        Arch.parse([np.ones(9)])


@pytest.mark.parametrize("name", ["sm_75", "sm_90a", "sm_103f", "compute_80", "compute_120f"])
def test_arch_prints_what_it_parsed(name):
    assert str(Arch.parse(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", "hopper", "sm90", "sm_9", "sm_90b", "sm_90A", "sm-90", "8", "sm_1234", -80, 8.6j, None],
)
def test_arch_that_is_none_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"^CUFA_ARCH is .*'sm_90a', 'compute_80'") as caught:
        Arch.parse(text, name="CUFA_ARCH")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "first"), [("sm_80a", "9.0"), ("sm_90f", "10.0")])
def test_suffix_that_a_capability_lacks_is_refused(text, first):
    with pytest.raises(ValueError, match=f"arch is '{text}'.*capability {first}; give '{text[:-1]}'"):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_103f", (10, 0), False),
        ("sm_100f", (12, 0), False),
        ("sm_120f", (12, 1), True),
        ("compute_75", (12, 1), True),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("compute_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (10, 3), True),
        ("compute_100f", (11, 0), False),
    ],
)
def test_what_runs_where(arch, capability, runs):
    reason = Arch.parse(arch).runs_on(capability)
    assert (reason is None) == runs
    if not runs:
        assert arch in reason
        assert "{}.{}".format(*capability) in reason


# --- the table ------------------------------------------------------------------------------------

CAPABILITIES = ["7.5", "8.0", "8.6", "8.7", "8.8", "8.9"]
CAPABILITIES += ["9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]


def test_table_has_every_capability_with_its_native_arch():
    assert ["{}.{}".format(*capability) for capability in KNOWN] == CAPABILITIES
    for capability, known in KNOWN.items():
        assert known.arch.capability == capability
        assert known.arch.suffix == ("a" if capability >= (9, 0) else "")
        assert known.arch.runs_on(capability) is None


@pytest.mark.parametrize("known", KNOWN.values(), ids=lambda known: str(known.arch))
def test_table_is_consistent(known):
    assert known.smem_per_block + known.smem_reserved_per_block == known.smem_per_sm
    assert known.smem_reserved_per_block == (0 if known.arch.capability == (7, 5) else KIB)
    assert known.registers_per_sm == 64 * KIB
    assert known.threads_per_sm in (1024, 1536, 2048)
    assert known.threads_per_sm // known.warp_size >= known.blocks_per_sm
    assert known.sm_count > 0
    assert known.l2_bytes >= 4 * KIB * KIB


@pytest.mark.parametrize(
    ("arch", "smem_per_block_kib"),
    [
        ("sm_75", 64),
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_90a", 227),
        ("sm_100a", 227),
        ("sm_120a", 99),
    ],
)
def test_shared_memory_of_a_block(arch, smem_per_block_kib):
    assert Device.of(arch).smem_per_block == smem_per_block_kib * KIB


def test_any_form_of_an_arch_finds_its_capability():
    for form in ("compute_90", "sm_90", "90a", "9.0", 90):
        assert Device.of(form) == replace(KNOWN[9, 0], arch=Arch.parse(form))


def test_unknown_capability_names_the_known():
    with pytest.raises(ValueError, match=r"arch is 'sm_70'.*sm_75, sm_80, .*sm_121a"):
        Device.of("sm_70")


# --- occupancy, worked by hand --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem", "blocks"),
    [
        # blocks: 1 warp and next to nothing else; 32 (A100) and 16 (RTX 3090) are the limit
        ("sm_80", 32, 16, 0, 32),
        ("sm_86", 32, 16, 0, 16),
        # threads: 1536 / 512
        ("sm_89", 512, 32, 0, 3),
        # a warp that is not full counts as one: 33 threads are 2 warps, 64 / 2 = 32
        ("sm_90a", 33, 16, 0, 32),
        # 257 threads are 9 warps, 64 // 9 = 7
        ("sm_90a", 257, 16, 0, 7),
        # registers: 64 * 32 = 2048 a warp, 16384 / 2048 = 8 a partition, 32 a SM, 8 a block
        ("sm_80", 256, 64, 0, 4),
        # 73 * 32 = 2336, rounded up to 2560: a partition holds 6, where 2336 would fit 7 times
        ("sm_80", 32, 73, 0, 24),
        # 96 * 32 = 3072: a partition holds 5, so 20 warps where 65536 / 3072 would be 21
        ("sm_80", 32, 96, 0, 20),
        # 255 * 32 = 8160, rounded up to 8192: 2 a partition, 8 warps, one block of 8
        ("sm_90a", 256, 255, 0, 1),
        ("sm_90a", 288, 255, 0, 0),
        # shared memory: 100 KiB + 1 KiB, 228 // 101 = 2
        ("sm_90a", 128, 168, 100 * KIB, 2),
        # 113 KiB + 1 KiB, twice, is exactly the 228 KiB of an SM; 1 byte more is 128 more
        ("sm_90a", 128, 32, 113 * KIB, 2),
        ("sm_90a", 128, 32, 113 * KIB + 1, 1),
        # 20096 + 1024 = 165 * 128: 11 fit in 233472, in units of 256 only 10 would
        ("sm_90a", 32, 32, 20096, 11),
        # 48 KiB + 1 KiB, 100 // 49 = 2
        ("sm_86", 128, 32, 48 * KIB, 2),
        # no reserve on 7.5, units of 256: 20000 becomes 20224, 65536 // 20224 = 3
        ("sm_75", 64, 32, 20000, 3),
        ("sm_75", 64, 32, 64 * KIB, 1),
        # what cannot be launched at all
        ("sm_86", 128, 32, 99 * KIB, 1),
        ("sm_86", 128, 32, 99 * KIB + 1, 0),
        ("sm_90a", 1024, 64, 0, 1),
        ("sm_90a", 1024, 65, 0, 0),
        ("sm_90a", 1025, 16, 0, 0),
        ("sm_90a", 32, 256, 0, 0),
        # registers not known yet
        ("sm_75", 64, 0, 0, 16),
    ],
)
def test_blocks_resident(arch, threads, registers, smem, blocks):
    assert Device.of(arch).blocks_resident(threads, registers, smem) == blocks


def test_blocks_resident_refuses_a_block_without_threads():
    with pytest.raises(ValueError, match="threads is 0"):
        Device.of("sm_90a").blocks_resident(0, 32, 0)


@pytest.mark.parametrize(("registers", "smem", "name"), [(-1, 0, "registers"), (32, -1, "smem_bytes")])
def test_blocks_resident_refuses_negative_numbers(registers, smem, name):
    with pytest.raises(ValueError, match=f"^{name} is -1; it must be at least 0$"):
        Device.of("sm_90a").blocks_resident(128, registers, smem)


# --- the GPU that is there ------------------------------------------------------------------------


def test_current_reads_the_gpu(fake_gpus):
    gpu = device.current()
    assert gpu == replace(KNOWN[9, 0], name="NVIDIA H200")


def test_current_follows_the_current_device_and_reads_each_once(fake_gpus):
    first = device.current()
    fake_gpus.selected = 1
    second = device.current()
    assert (second.name, second.arch, second.sm_count) == ("NVIDIA A10", Arch(8, 6), 72)
    fake_gpus.selected = 0
    assert device.current() is first
    assert fake_gpus.reads == 2


def test_no_gpu_says_so_and_does_not_import_cupy(no_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GPUUnavailableError, match=r"no GPU.*arch=.*CUFA_ARCH"):
        device.current()


def test_gpu_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GPUUnavailableError, match=r"pip install 'cufa\[cuda13\]'.*cufa\[cuda12\]"):
        device.current()


def test_cupy_that_cannot_be_imported_says_so(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    with pytest.raises(GPUUnavailableError, match=r"no CuPy to use it with: .*\(numpy\.dtype size changed\)"):
        device.current()


def test_cupy_that_cannot_use_the_driver_says_so(fake_gpus):
    def fail():
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    fake_gpus.runtime.getDevice = fail
    with pytest.raises(GPUUnavailableError, match=r"CuPy 14\.0\.0 .*InsufficientDriver.*cufa\["):
        device.current()


@pytest.mark.parametrize(("init", "count", "present"), [(0, 2, True), (0, 0, False), (100, 2, False)])
def test_gpu_present_asks_the_driver(monkeypatch, init, count, present):
    def get_count(reference):
        reference._obj.value = count
        return 0

    library = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=get_count)
    monkeypatch.setattr(driver, "library", lambda: library)
    assert device.gpu_present.__wrapped__() is present


def test_gpu_present_without_a_driver(monkeypatch):
    def fail():
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(driver, "library", fail)
    assert device.gpu_present.__wrapped__() is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_forked_from_one_that_had_used_the_gpu_has_none(fake_gpus, monkeypatch, caplog):
    """CUDA works in the parent alone, whose answers the child must not take for its own."""
    parent = os.getpid()

    def get_count(reference):
        reference._obj.value = 1
        return 0

    def init(flags):
        return 0 if os.getpid() == parent else 3

    monkeypatch.setattr(device, "gpu_present", gpu_present)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuInit=init, cuDeviceGetCount=get_count))
    caches = gpu_present, arrays.gpu_usable
    for cached in caches:
        cached.cache_clear()

    def has_none():
        caplog.clear()
        with pytest.raises(GPUUnavailableError, match=r"^no GPU: this process was forked .*'spawn'"):
            device.current()
        usable = [arrays.gpu_usable() for _ in range(2)]
        (record,) = caplog.records
        assert record.getMessage().startswith("computing on the CPU: no GPU: this process was forked")
        return usable == [False, False]

    assert arrays.gpu_usable()
    assert in_child(has_none)
    assert arrays.gpu_usable()
    for cached in caches:
        cached.cache_clear()


# --- target ---------------------------------------------------------------------------------------


def test_target_without_a_gpu_is_the_table(no_gpu, monkeypatch):
    assert device.target("sm_90a") == KNOWN[9, 0]
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    assert device.target() == KNOWN[8, 0]
    assert device.target("compute_86").arch == Arch(8, 6, virtual=True)


def test_target_with_neither_gpu_nor_arch(no_gpu, monkeypatch):
    monkeypatch.setenv("CUFA_ARCH", "")
    with pytest.raises(GPUUnavailableError, match="arch="):
        device.target()


def test_target_is_the_gpu(fake_gpus):
    assert device.target() is device.current()


def test_target_with_another_arch_keeps_the_gpus_limits(fake_gpus, monkeypatch):
    expected = replace(device.current(), arch=Arch.parse("compute_80"))
    assert device.target("compute_80") == expected
    monkeypatch.setenv("CUFA_ARCH", "compute_80")
    assert device.target() == expected


def test_target_refuses_what_the_gpu_cannot_run(fake_gpus, monkeypatch):
    with pytest.raises(ValueError, match=r"^arch is 'sm_80', .*8\.x, and the GPU's is 9\.0 .*H200"):
        device.target("sm_80")
    monkeypatch.setenv("CUFA_ARCH", "sm_100a")
    with pytest.raises(ValueError, match=r"^CUFA_ARCH is 'sm_100a', .*10\.0 alone"):
        device.target()


def test_target_for_compiling_takes_any_known_arch(fake_gpus):
    assert device.target("sm_100a", for_compile_only=True) == KNOWN[10, 0]


def test_target_for_planning_takes_what_the_gpu_cannot_run_from_the_table(fake_gpus):
    gpu = device.current()
    assert device.target("sm_86", for_plan_only=True) == KNOWN[8, 6]
    assert device.target("compute_80", for_plan_only=True) == replace(gpu, arch=Arch.parse("compute_80"))
    assert device.target(for_plan_only=True) is gpu
    with pytest.raises(ValueError, match="whose limits are not known"):
        device.target("sm_42", for_plan_only=True)


def test_target_for_planning_takes_an_arch_where_cupy_cannot_use_the_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert device.target("sm_86", for_plan_only=True) == KNOWN[8, 6]
    with pytest.raises(GPUUnavailableError, match="no CuPy"):
        device.target(for_plan_only=True)
    with pytest.raises(GPUUnavailableError, match="no CuPy"):
        device.target("sm_86")
    with pytest.raises(ValueError, match="whose limits are not known"):
        device.target("sm_42", for_plan_only=True)


def test_target_names_the_variable_it_cannot_read(no_gpu, monkeypatch):
    monkeypatch.setenv("CUFA_ARCH", "ampere")
    with pytest.raises(ValueError, match=r"^CUFA_ARCH is 'ampere'"):
        device.target()


def test_importing_loads_neither_cupy_nor_nvrtc():
    code = (
        "import sys, cufa.device, cufa.jit, cufa.cache; cufa.device.gpu_present();"
        "print([m for m in ('cupy', 'cuda.bindings') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.gpu
def test_current_gpu_matches_the_table_where_it_is_known():
    pytest.importorskip("cupy")
    if not device.gpu_present():
        pytest.skip("no GPU")
    gpu = device.current()
    known = KNOWN.get(gpu.arch.capability)
    if known is None:
        pytest.skip(f"{gpu.name} is not in the table")
    same = ("arch", "smem_per_block", "smem_per_sm", "smem_reserved_per_block", "registers_per_sm")
    same += ("threads_per_sm", "blocks_per_sm", "warp_size")
    assert {n: getattr(gpu, n) for n in same} == {n: getattr(known, n) for n in same}
