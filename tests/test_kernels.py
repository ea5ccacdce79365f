"""Every kernel compiles for each kind of arch that it claims, and the plan's figures are its own."""

import itertools
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import machine_code
import pytest
from rungs import best_kernel

from cufa import jit, kernels
from cufa.device import KNOWN, Device
from cufa.integers import ceil_div
from cufa.kernels import KERNELS, kernel_named
from cufa.plan import make_plan
from cufa.plan.companions import softmax_launches
from cufa.plan.struct_sizes import SOFTMAX_PARAMS_BYTES
from cufa.problem import DTYPES, Features, Problem

FOLDER = Path(kernels.__file__).parent
GUIDE = (FOLDER / "README.md").read_text()
# The rows of its table of rungs: the rung, the rung that it changes, the headers to read with it.
GUIDE_ROWS = re.findall(r"^\| `(\w+)` \| (.*) \| .* \| (.*) \|$", GUIDE.split("##")[0], re.MULTILINE)

# From which compute capabilities on the kernels' code has other instructions.
OTHER_INSTRUCTIONS = [(8, 0), (8, 9), (9, 0), (10, 0)]


def archs_alike():
    """Those that differ neither in the code nor in the shared memory that plans count on, together."""
    alike = defaultdict(list)
    for device in KNOWN.values():
        instructions = sum(device.arch.capability >= first for first in OTHER_INSTRUCTIONS)
        alike[instructions, device.smem_per_block].append(str(device.arch))
    return list(alike.values())


def archs_of(name):
    """Half of those that are alike, as kernels take turns."""
    direction = KERNELS[name].direction
    alike = [each for each, kernel in KERNELS.items() if kernel.direction == direction]
    turn = alike.index(name) + (direction == "backward")
    return [archs[(turn + i) % len(archs)] for archs in archs_alike() for i in range(ceil_div(len(archs), 2))]


# (dtype, head_dim, value_dim, causal, align_bytes): each arch of a kernel gets one of them, so that together
# they see all of them without compiling the whole product.
VARIANTS = [
    ("float16", 64, 64, True, 16),
    ("bfloat16", 128, 128, False, 16),
    ("float32", 33, 65, True, 4),
    ("float64", 40, 256, False, 16),
    ("bfloat16", 256, 80, True, 16),
    ("float64", 256, 256, True, 8),
    ("bfloat16", 255, 131, True, 2),
    ("float16", 250, 256, False, 4),
    ("float8_e4m3fn", 128, 128, True, 16),
    ("float8_e4m3fn", 80, 144, False, 16),
]
# For kernels of one arch alone: others have no arch left for it.
OF_ONE_ARCH = [("float32", 137, 200, False, 4), ("bfloat16", 512, 264, True, 16)]


def problem(direction, dtype, head_dim, value_dim, causal, align_bytes):
    return Problem(direction, dtype, 2, 300, 400, 4, 2, head_dim, value_dim, causal, align_bytes)


def supported_variants(arch, name):
    """The variants that the kernel supports there."""
    kernel, device = KERNELS[name], Device.of(arch)
    return [
        variant
        for variant in VARIANTS + (OF_ONE_ARCH if kernel.only_arch else [])
        if kernel.unsupported(problem(kernel.direction, *variant), device) is None
    ]


def shared_out_variants(name):
    """For each of the kernel's archs one of its variants, one least taken by the others."""
    supported = {arch: supported_variants(arch, name) for arch in archs_of(name)}
    archs_with = Counter(itertools.chain(*supported.values()))
    start = list(KERNELS).index(name) % len(VARIANTS)
    in_turn = VARIANTS[start:] + VARIANTS[:start] + OF_ONE_ARCH  # kernels begin with different ones
    taken = Counter()
    shares = {}
    for arch, variants in sorted(supported.items(), key=lambda item: len(item[1])):
        wanted = sorted(variants, key=lambda each: (taken[each], archs_with[each], in_turn.index(each)))
        shares[arch] = wanted[:1]
        taken.update(shares[arch])
    return shares


@pytest.mark.parametrize("name", KERNELS)
def test_its_entries_are_in_the_order_of_their_launches(name):
    source = (FOLDER / KERNELS[name].source).read_text()
    entries = re.findall(
        r'^extern "C" __global__ [^;{]*?\b(\w+)\(const __grid_constant__', source, re.MULTILINE
    )
    assert tuple(entries) == KERNELS[name].entries


def test_the_guide_says_which_rung_each_changes():
    assert [name for name, _, _ in GUIDE_ROWS] == list(KERNELS)
    for name, changed, _ in GUIDE_ROWS:
        source = (FOLDER / KERNELS[name].source).read_text()
        in_comment = re.findall(r"^// Change from (\w+):", source, re.MULTILINE)
        assert [kernel_named(each).name for each in re.findall(r"`(\w+)`", changed)] == in_comment


def test_the_guide_names_all_headers_that_are_parts_of_one_rung():
    for name, _, to_read in GUIDE_ROWS:
        numbered = "_".join(name.split("_")[:2])
        parts = {path.name for path in FOLDER.rglob(f"{numbered}_*.cuh")}
        assert parts <= set(re.findall(r"`(\w+\.cuh)`", to_read))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in KERNELS for arch in archs_of(name)])
def test_compiles_for_its_archs(name, arch):
    device = Device.of(arch)
    if device.arch.number not in jit.supported_archs():
        pytest.skip("NVRTC does not know it")
    for variant in shared_out_variants(name)[arch]:
        plan = make_plan(problem(KERNELS[name].direction, *variant), device, name)
        build = jit.build(plan.variant)
        assert build.arch == device.arch
        assert set(build.resources) == set(KERNELS[name].entries)
        launched = [launch.entry for launch in plan.launches]
        assert launched == [entry for entry in KERNELS[name].entries if entry in launched]
        assert not [line for line in build.warnings if "spill" not in line]
        for launch in plan.launches:
            resources = build.resources[launch.entry]
            smem_bytes = launch.smem_bytes + resources.static_smem
            assert device.blocks_resident(launch.block, resources.registers, smem_bytes) >= 1


def test_the_spread_covers_every_variant_of_kernels_for_several_archs():
    """Those for one alone have tests of their own, of more head dims."""
    for name in [name for name, kernel in KERNELS.items() if kernel.only_arch is None]:
        shares = shared_out_variants(name)
        supported = {arch: supported_variants(arch, name) for arch in archs_of(name)}
        assert set(itertools.chain(*shares.values())) == set(itertools.chain(*supported.values()))
        assert all(shares[arch] for arch in supported if supported[arch])


def test_the_spread_covers_every_arch():
    """With and without tensor cores, forward and backward."""
    for names in (["fwd_4_flash_v2", "bwd_2_flash_v2"], ["fwd_5_mma", "bwd_3_mma"]):
        archs = {arch for name in names for arch in archs_of(name)}
        assert archs == {str(device.arch) for device in KNOWN.values()}


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_compiles(dtype, passes):
    variant, (launch,) = softmax_launches(dtype, passes, rows=10, arch=Device.of("sm_90a").arch)
    assert set(jit.build(variant).resources) == {launch.entry}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, row in KERNELS.items() if "bias" in row.features])
def test_biases_of_all_dtypes_compile(name, bias_dtype):
    row, device = KERNELS[name], Device.of("sm_90a")
    features = Features(bias=(1, 1, 300, 400), bias_dtype=bias_dtype)
    calls = (
        replace(problem(row.direction, dtype, dim, dim, True, 16), features=features)
        for dim, dtype in itertools.product((64, 256, 512), row.dtypes)
    )
    call = next(call for call in calls if row.unsupported(call, device) is None)
    jit.build(make_plan(call, device, name).variant)


FASTEST = [
    *itertools.product(["fwd_4_flash_v2", "bwd_2_flash_v2"], ["float32"], [32, 64, 128], [True]),
    *itertools.product(["fwd_5_mma"], ["float16"], [32, 128, 256], [False]),
    *itertools.product(["fwd_5_mma"], ["bfloat16"], [32, 128, 256], [True]),
    *itertools.product(["fwd_5_mma"], ["float64"], [64, 128, 256], [False, True]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype", "head_dim", "causal"), FASTEST)
def test_the_fastest_rungs_do_not_spill_on_an_h200(name, dtype, head_dim, causal):
    variant = problem(KERNELS[name].direction, dtype, head_dim, head_dim, causal, 16)
    build = jit.build(make_plan(variant, Device.of("sm_90a"), name).variant)
    assert build.warnings == ()


# Additions, products and comparisons of doubles, and their conversions.
OF_DOUBLES = r"\bD(?:ADD|MUL|FMA|SETP)|F2F\.F(?:32\.F64|64\.F32)"
# Calls with as many numbers as a kernel supports: the first of these.
WITH_NUMBERS = list(
    itertools.product(
        ("bfloat16", "float32", "float8_e4m3fn"),
        (128, 256, 512),
        (Features(softcap=True, dropout=True), Features(softcap=True), Features()),
    )
)


@pytest.mark.parametrize("name", KERNELS)
def test_only_float64_is_computed_in_doubles(name):
    """Compilers would convert a call's numbers anew for each tile."""
    kernel, here = KERNELS[name], Device.of("sm_90a")
    calls = (
        replace(problem(kernel.direction, dtype, dim, dim, False, 16), features=features)
        for dtype, dim, features in WITH_NUMBERS
    )
    call = next(call for call in calls if kernel.unsupported(call, here) is None)
    build = jit.build(make_plan(call, here, name).variant)
    assert machine_code.runs(build, OF_DOUBLES) == []


@pytest.mark.parametrize("macro", ["SMEM_BYTES", "PARAMS_BYTES"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_size_that_the_host_gets_wrong_does_not_compile(name, macro):
    variant = supported_variants("sm_90a", name)[0]
    plan = make_plan(problem(KERNELS[name].direction, *variant), Device.of("sm_90a"), name)
    wrong = tuple((key, value + 16 if key == macro else value) for key, value in plan.macros)
    with pytest.raises(jit.CompileError, match="the host"):
        jit.build(replace(plan.variant, macros=wrong))


def test_softmax_params_have_the_kernels_size():
    variant, _ = softmax_launches("float32", 2, 10, Device.of("sm_90a").arch)
    assert ("PARAMS_BYTES", SOFTMAX_PARAMS_BYTES) in variant.macros


def test_kernels_are_found_by_name():
    assert kernel_named("fwd_1_naive").idea
    assert kernel_named("fwd_6") is KERNELS["fwd_6_wgmma"]
    assert kernel_named("bwd_3") is KERNELS["bwd_3_mma"]
    with pytest.raises(ValueError, match=r"kernel is 'fwd_0'; it may be fwd_1_naive, .*bwd_2_flash_v2"):
        kernel_named("fwd_0")
    with pytest.raises(ValueError, match=r"kernel is 'fwd'; it may be fwd_1_naive, "):
        kernel_named("fwd")


def test_the_registry_says_why_a_kernel_cannot_run():
    forward = problem("forward", *VARIANTS[0])
    device = Device.of("sm_75")
    assert best_kernel(forward, device).name == "fwd_5_mma"
    assert "needs tensor cores for bfloat16, which sm_75" in KERNELS["fwd_5_mma"].unsupported(
        replace(forward, dtype="bfloat16"), device
    )
    assert "forward kernel" in KERNELS["fwd_1_naive"].unsupported(
        replace(forward, direction="backward"), device
    )
    newer = replace(KERNELS["fwd_1_naive"], min_capability=(9, 0))
    assert newer.unsupported(forward, device) == "fwd_1_naive needs sm_90 or newer, and the arch is sm_75"
    narrow = replace(KERNELS["fwd_1_naive"], max_head_dim=32)
    assert "head dims up to 32" in narrow.unsupported(forward, device)
    half = replace(KERNELS["fwd_1_naive"], dtypes=("float32",))
    assert "supports float32" in half.unsupported(forward, device)
