"""Head dims over 256 backward, on the emulator: slices of the head dims, and warps that share few keys."""

from dataclasses import replace

import feature_cases as cases
import numpy as np
import pytest
from emulator import EmulatorError
from test_emulator import planted
from test_emulator_backward_features import check
from test_emulator_score_mod import learnt

from cufa.device import Device

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

# (head_dim, value_dim): slices of which the last is not full, that only one of them has, and full ones.
DIMS = [(264, 128), (257, 300), (320, 512), (576, 512), (72, 384)]
# Of bwd_3_mma, two steps of queries for each warp, a half, and a half that two warps have.
WIDE_MMA = {"block_m": 64, "block_n": 32, "threads": 256, "stages": 1, "split": 4}
NARROW_MMA = {"block_m": 32, "block_n": 16, "threads": 128, "stages": 1, "split": 4}
NARROWEST_MMA = {**NARROW_MMA, "block_m": 16}
CUDA_CORES = {"block_m": 16, "block_n": 16, "threads": 128, "lanes": 8}
KERNELS = [
    ("bwd_2_flash_v2", "float32", CUDA_CORES),
    ("bwd_2_flash_v2", "float64", CUDA_CORES),
    ("bwd_3_mma", "float16", NARROW_MMA),
    ("bwd_3_mma", "bfloat16", NARROWEST_MMA),
    ("bwd_3_mma", "float32", NARROWEST_MMA),
    ("bwd_3_mma", "float16", WIDE_MMA),
]
# Sets of features and a kernel for each, so that all features are found on CUDA cores and on tensor cores.
SETS = [
    (*KERNELS[kernel], cases.pairwise()[i])
    for i, kernel in [(0, 2), (1, 0), (2, 3), (4, 2), (5, 1), (7, 3), (8, 0)]
]
# Those whose code for a slice differs: by the kernel, its tiles and how it multiplies.
UNLIKE = [KERNELS[i] for i in (0, 2, 4, 5)]


def sizes_of(dims, heads=2):
    return {"heads": heads, "kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}


def name_of(value):
    if isinstance(value, dict):
        return "x".join(str(value[name]) for name in ("block_m", "block_n", "threads"))
    return cases.feature_id(value) if isinstance(value, frozenset) else None


# Compiling takes most of the time.
WITH_DIMS = [
    (*KERNELS[kernel], DIMS[dims])
    for kernel, dims in [(0, 3), (0, 1), (1, 0), (2, 4), (3, 2), (4, 1), (5, 0), (5, 3)]
]


@pytest.mark.parametrize(("kernel", "dtype", "tiles", "dims"), WITH_DIMS, ids=name_of)
def test_head_dims(rng, kernel, dtype, tiles, dims):
    """Other features with each of the head dims."""
    features = [("causal",), (), ("causal", "deterministic"), ("deterministic",), ("window", "softcap")]
    for seqlen_q, seqlen_k in [(21, 37), (70, 17), (1, 1)]:
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": 1}
        case = cases.draw_case(rng, dtype, features[DIMS.index(dims)], **lengths, **sizes_of(dims))
        check(kernel, case, tiles=tiles)


@pytest.mark.parametrize(("kernel", "dtype", "tiles", "features"), SETS, ids=name_of)
def test_features(rng, kernel, dtype, tiles, features):
    for seqlen_q, seqlen_k in [(39, 53), (1, 40), (5, 0)]:
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **sizes_of((264, 320))}
        case = cases.draw_case(rng, dtype, features, compiled=np.random.default_rng(0), **sizes)
        check(kernel, case, tiles=tiles)


@pytest.mark.parametrize(
    ("dtype", "arch", "dims"),
    [
        ("float16", "sm_75", (320, 320)),
        ("bfloat16", "sm_75", (320, 320)),
        ("float64", "sm_75", (320, 320)),
        ("bfloat16", "sm_80", (576, 512)),
        ("float32", "sm_86", (576, 512)),
        ("float16", "sm_90a", (320, 320)),
        ("float16", "sm_90a", (576, 512)),
        ("float32", "sm_90a", (576, 512)),
        ("float64", "sm_90a", (576, 512)),
    ],
    ids=str,
)
def test_the_tiles_that_the_plan_chooses(rng, dtype, arch, dims):
    features = ("causal", "dbias") if dtype == "bfloat16" else ("causal", "deterministic")
    sizes = {"seqlen_q": 70, "seqlen_k": 45, "batch": 1, **sizes_of(dims, heads=1)}
    check(None, cases.draw_case(rng, dtype, features, **sizes), tiles=None, device=Device.of(arch))


@pytest.mark.parametrize(("kernel", "dtype", "tiles"), UNLIKE, ids=name_of)
def test_gradients_of_arrays(rng, kernel, dtype, tiles):
    """Of scores that several warps compute each counts once."""
    for seqlen_q, seqlen_k in [(39, 53), (1, 40)]:
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **sizes_of((264, 320))}
        case = cases.draw_case(rng, dtype, ("causal",), **sizes)
        case.numbers["score_mod"] = learnt(rng, 60)
        check(kernel, replace(case, gradients=("score_mod",)), tiles=tiles)


@pytest.mark.parametrize(("tiles", "parts"), [(WIDE_MMA, 2), (NARROWEST_MMA, 4)], ids=name_of)
def test_parts_of_heads(rng, tiles, parts):
    sizes = {"seqlen_q": 70, "seqlen_k": 45, **sizes_of((257, 300), heads=4)}
    case = cases.draw_case(rng, "bfloat16", ("causal",), **sizes)
    check("bwd_3_mma", case, tiles=tiles | {"head_parts": parts})


@pytest.mark.parametrize(("kernel", "dtype", "tiles"), UNLIKE, ids=name_of)
def test_what_is_not_seen_does_not_show(rng, kernel, dtype, tiles):
    """In each of the slices; every second kernel deterministic."""
    deterministic = UNLIKE.index((kernel, dtype, tiles)) % 2 == 1
    features = ("causal", "deterministic") if deterministic else ("causal",)
    sizes = {"seqlen_q": 70, "seqlen_k": 75, "batch": 1, **sizes_of((264, 320), heads=1)}
    for bad, column in ((np.nan, 0), (np.inf, -1)):
        problem = (case := cases.draw_case(rng, dtype, features, **sizes)).problem
        problem.k[:, 40, :, column] = problem.v[:, 40, :, column] = bad  # seen from row 35 on
        dq, *_ = check(kernel, case, tiles=tiles)
        assert np.isfinite(dq[:, :35]).all()
        problem = (case := cases.draw_case(rng, dtype, features, **sizes)).problem
        problem.q[:, 30, :, column] = problem.dout[:, 30, :, column] = bad  # sees keys to 35
        _, dk, dv = check(kernel, case, tiles=tiles)
        assert np.isfinite(dk[:, 36:]).all()
        assert np.isfinite(dv[:, 36:]).all()


# A barrier and what is around it, and that without the barrier.
BARRIERS = {
    "a slice has been used": ("__syncthreads();  // every warp is done with what was there", ""),
    "a slice is there": ("load(slice); __syncthreads(); use(slice);", "load(slice); use(slice);"),
    "the last has been used": ("__syncthreads();  // every warp is done with the slice before", ""),
    "one is there again": ("load(slice); __syncthreads(); }", "load(slice); }"),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_each_barrier_between_slices_is_needed(rng, tmp_path, barrier):
    folder = planted(tmp_path, "bwd_2_flash_v2.cu", *BARRIERS[barrier])
    case = cases.draw_case(rng, "float32", (), seqlen_q=40, seqlen_k=33, batch=1, **sizes_of((264, 300)))
    with pytest.raises(EmulatorError, match=r"race|no thread has written"):
        check("bwd_2_flash_v2", case, tiles=CUDA_CORES, folder=folder)
