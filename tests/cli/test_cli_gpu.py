"""The commands on a GPU."""

import numpy as np
import pytest
from command_line import HEADS, LATENT, ON_EACH, WIDTH, run, run_json

from cufa import device
from cufa.kernels import KERNELS
from cufa.problem import DTYPES, FLOAT8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_run_on_the_gpu(dtype, tmp_path):
    document = run_json("run", "--dtype", dtype, "--causal", "--kv-heads", 2, "--out", tmp_path / "all.npz")
    assert document["backend"] == "cuda"
    assert document["check"]["ok"]
    for step in document["steps"]:
        assert step["plan"]["kernel"] == step["kernel"] in KERNELS
        assert 0 < step["seconds"] < 0.1
    with np.load(tmp_path / "all.npz") as results:
        assert list(results) == ["out", "lse", "dq", "dk", "dv"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "options", [options for options, _, _ in ON_EACH], ids=lambda each: " ".join(map(str, each))
)
def test_features_on_the_gpu(dtype, options):
    document = run_json("run", *HEADS, *options, "--dtype", dtype)
    assert document["backend"] == "cuda"
    assert document["check"]["ok"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_arrays_on_the_gpu(dtype, tmp_path):
    (tmp_path / "mods.py").write_text(
        "import cufa, numpy as np\n"
        "def scaled(score, b, h, q_idx, kv_idx, nothing, scales): return score * scales[h] + nothing[0]\n"
        "mod = cufa.ScoreMod(scaled, np.zeros(1, np.int32), np.ones(4, np.float32))\n"
    )
    document = run_json("run", *HEADS, "--dtype", dtype, "--score-mod", f"{tmp_path / 'mods.py'}:mod")
    assert document["backend"] == "cuda"
    assert document["check"]["ok"]
    assert document["check"]["results"][-1]["name"] == "dscore_mod[1]"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--page-size", 16), ("--kv-dtype", FLOAT8, "--descale")])
def test_values_in_keys_on_the_gpu(options):
    if FLOAT8 in options and device.current().arch.capability < (8, 9):
        pytest.skip("8 bits need sm_89 or newer")
    of_kernel = ("--kernel", "fwd_8_split_kv", "--no-backward")
    document = run_json("run", *LATENT, *options, "--dtype", "bfloat16", *of_kernel)
    assert document["check"]["ok"]
    (step,) = document["steps"]
    assert "values are the beginnings of keys, which alone are read" in step["plan"]["reasons"]


@pytest.mark.gpu
def test_run_reports_the_gpu():
    report = run("run", "--backend", "cuda").stdout
    assert max(map(len, report.splitlines())) <= WIDTH
    assert device.current().name in report


@pytest.mark.gpu
def test_bench_and_ladder_on_the_gpu():
    rungs = [
        kernel for kernel in KERNELS.values() if kernel.min_head_dim <= 128 and "float16" in kernel.dtypes
    ]
    kernels = [option for kernel in rungs for option in ("--kernel", kernel.name)]
    points = run_json("bench", "--seqlens", "256,512", "--tokens", 1024, "--head-dim", 128, *kernels)[
        "points"
    ]
    assert len(points) == 2 * len(rungs)
    assert all(point["seconds"] > 0 for point in points)
    document = run_json("ladder", "--batch", 1, "--seqlen", 512, "--dtype", "float16", "--cpu-threads", 1)
    measured = [row for row in document["rows"] if row["memory_bytes"] is not None]
    assert [row["name"] for row in measured] == [
        *(kernel.name for kernel in rungs if kernel.direction == "forward"),
        *(kernel.name for kernel in rungs if kernel.direction == "backward"),
    ]
    assert all(row["check"]["ok"] for row in measured)
    assert all(row["speedup_over_cpu"] > 1 for row in measured)


@pytest.mark.gpu
def test_bench_of_several_tiles_on_the_gpu():
    arguments = ("bench", "--seqlens", "256", "--tokens", 512, "--head-dim", 64, "--repeats", 2)
    tiles = ("--kernel", "fwd_5_mma", "--tile", "block_m=64,128", "--tile", "block_n=32,100000")
    points = run_json(*arguments, *tiles)["points"]
    assert [(point["tiles"]["block_m"], point["tiles"]["block_n"]) for point in points] == [
        (64, 32),
        (128, 32),
    ]
    assert all(point["seconds"] > 0 for point in points)
    (decoding,) = run_json(*arguments, "--seqlen-q", 1, "--direction", "forward", "--dtype", "float16")[
        "points"
    ]
    assert (decoding["kernel"], decoding["seqlen_q"], decoding["seqlen_k"]) == ("fwd_8_split_kv", 1, 256)
