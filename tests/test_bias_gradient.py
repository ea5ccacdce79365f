"""The gradient of the bias beside a backward on tensor cores: its plan, and on the emulator its parts."""

from dataclasses import replace

import numpy as np
import pytest
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles, packed_case
from test_emulator import planted
from test_emulator_hopper_features import gradients_of
from tolerance import assert_gradients

from cufa import jit
from cufa.device import Device
from cufa.plan import bias_gradient, make_plan
from cufa.problem import Features, Problem

H200 = Device.of("sm_90a")
# One that works on few tiles at once: those who share a tile of the bias are not parted.
SMALL = replace(H200, sm_count=1)
KERNELS = {
    ("float16", 64): "bwd_4_wgmma",
    ("bfloat16", 256): "bwd_5_wgmma_wide",
    ("float32", 64): "bwd_6_float32",
    ("float32", 256): "bwd_7_float32_wide",
    ("float64", 64): "bwd_3_mma",
}


def problem(dtype="float16", dim=64, bias=(1, 8, 2048, 2048), seqlen=2048, **features):
    features = Features(bias=bias, bias_dtype=dtype, gradients=("bias", "sink"), sink=True, **features)
    return Problem("backward", dtype, 4, seqlen, seqlen, 8, 2, dim, dim, features=features)


@pytest.mark.parametrize(("dtype", "dim"), KERNELS)
def test_it_is_planned_beside_the_fastest_kernel(dtype, dim):
    plan = make_plan(problem(dtype, dim), H200)
    assert plan.kernel == KERNELS[dtype, dim]
    assert [launch.entry for launch in plan.beside.launches] == ["row_sums", "bias_gradient"]
    assert "sink_gradient" in [launch.entry for launch in plan.launches]
    assert "beside it, after its first launch, bias_gradient" in str(plan)
    assert str(plan).endswith(f"both       {plan.workspace_bytes:,} bytes of workspace")


def test_cuda_cores_have_it_themselves():
    plan = make_plan(problem(), H200, "bwd_2_flash_v2")
    assert plan.beside is None
    assert "bias_gradient" in [launch.entry for launch in plan.launches]


def test_its_workspace_lies_behind():
    plan = make_plan(problem("float32", mask=(1, 1, 2048, 2048)), H200)
    own, behind = plan.workspace_begins
    assert own == 0
    assert plan.scratch_bytes <= behind < plan.scratch_bytes + 16
    assert behind % 16 == 0
    assert plan.workspace_bytes == behind + plan.beside.scratch_bytes


@pytest.mark.parametrize(
    ("bias", "parts", "of_tile"),
    [
        ((4, 8, 2048, 2048), 1, 1),
        ((1, 8, 2048, 2048), 1, 1),
        ((1, 1, 512, 512), 6, 6),  # 64 tiles for three blocks on each of 132 SMs
        ((1, 1, 1, 2048), 8, 8 * 4),  # each warp of four has its own
        ((4, 1, 1, 2048), 2, 2 * 4),
    ],
)
def test_those_that_share_few_tiles_are_parted(bias, parts, of_tile):
    plan = make_plan(problem(bias=bias, seqlen=bias[3]), H200).beside
    assert dict(plan.macros)["PARTS"] == parts
    shapes = {part.name: part.shape for part in plan.scratch}
    assert shapes.get("parts of dbias") == (None if of_tile == 1 else (of_tile, *bias))
    assert ("add_parts" in [launch.entry for launch in plan.launches]) == (of_tile > 1)


@pytest.mark.parametrize(
    ("dtype", "dim"), [("float16", 64), ("float32", 64), ("float32", 128), ("float64", 64)]
)
def test_no_spill(dtype, dim):
    assert jit.build(make_plan(problem(dtype, dim), H200).beside.variant).warnings == ()


def check(case, kernel="bwd_3_mma", **options):
    hide_nan(case)
    gradients = gradients_of(kernel, case, **options)
    assert_gradients(gradients, case.problem, **case.backward)
    return gradients


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kernel", "dtype", "dims", "features"),
    [
        ("bwd_4_wgmma", "float16", (64, 40), ("causal", "packed", "softcap", "dropout")),
        ("bwd_5_wgmma_wide", "bfloat16", (72, 136), ("window", "mask", "dlse", "alibi_slopes")),
        ("bwd_6_float32", "float32", (24, 40), ("causal", "mask_bits", "seqused_k", "dsink")),
        ("bwd_7_float32_wide", "float32", (136, 24), ("causal", "dropout", "packed", "dlse")),
    ],
)
def test_beside_kernels_of_hopper(rng, kernel, dtype, dims, features):
    lengths = {"seqlen_q": 150, "seqlen_k": 140, "heads": 2, "kv_heads": 1}
    case = draw_case(rng, dtype, (*features, "dbias"), **lengths, head_dim=dims[0], head_dim_v=dims[1])
    check(case, kernel)


@pytest.mark.emulator
@pytest.mark.parametrize("shape", [(1, 1, 150), (2, 1, 150), (1, 2, 1), (1, 1, 1)])
@pytest.mark.parametrize("device", [H200, SMALL], ids=["parted", "whole"])
def test_who_shares_a_tile(rng, monkeypatch, device, shape):
    """Over batch, heads and rows, with more of them than a block has stages; some tiles show nothing."""
    monkeypatch.setattr("test_emulator_hopper_features.DEVICE", device)
    case = draw_case(rng, "float16", ("causal", "dbias"), seqlen_q=150, seqlen_k=141, **SIZES)
    case.arrays["mask"], _ = mask_by_tiles(rng, (2, 1, 150, 141), (64, 64))
    case.arrays["bias"] = rng.standard_normal((*shape, 141)).astype(np.float16)
    check(case)


@pytest.mark.emulator
def test_one_warp_has_all_rows_that_share_the_bias(rng, monkeypatch):
    """As it is where no larger tile fits."""
    monkeypatch.setattr(bias_gradient, "TILES", {2: bias_gradient.TILES[2][-1:]})
    bias_gradient._candidates.cache_clear()
    case = draw_case(rng, "float16", ("dbias",), batch=1, seqlen_q=1, seqlen_k=20, **SIZES)
    case.arrays["bias"] = rng.standard_normal((2, 1, 20)).astype(np.float16)
    check(case)
    bias_gradient._candidates.cache_clear()


@pytest.mark.emulator
@pytest.mark.parametrize("rows", [1, 90])
def test_packed_sequences_of_many_lengths(rng, rows):
    case = packed_case(rng, "float32", 10, [0, 90, 1, 33], [70, 5, 0, 64], **SIZES)
    case.arrays["bias"] = rng.standard_normal((1, 2, rows, 70)).astype(np.float32)
    check(replace(case, gradients=("bias",)))


@pytest.mark.emulator
@pytest.mark.parametrize(("none", "rows"), [("batch", 1), ("batch", 20), ("seqlen_q", 1)])
def test_a_bias_that_nobody_reads_has_gradient_0(rng, none, rows):
    sizes = {"batch": 2, "seqlen_q": 20, "seqlen_k": 24, **SIZES, none: 0}
    case = draw_case(rng, "float16", ("dbias",), **sizes)
    case.arrays["bias"] = rng.standard_normal((1, 2, rows, 24)).astype(np.float16)
    check(case)


@pytest.mark.emulator
def test_a_tile_that_is_not_waited_for(rng, tmp_path):
    waits = "ptx::wait_copies();\n        __syncthreads();"
    folder = planted(tmp_path, "bias_gradient.cu", waits, "__syncthreads();")
    case = draw_case(rng, "float16", ("dbias",), seqlen_q=40, seqlen_k=40, **SIZES)
    with pytest.raises(Exception, match="bias_gradient"):
        check(case, folder=folder)
