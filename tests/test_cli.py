"""The command line through click's runner, on a machine that is made to have no GPU."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import click
import numpy as np
import pytest
from click.testing import CliRunner

import cufa
from cufa import arrays, checking, device, jit, kernels
from cufa.cli import COMMANDS, bench, check, compile, ladder, main, output, workload
from cufa.cli import run as run_command
from cufa.cli.options import FeatureOptions, feature_options
from cufa.cli.options import arguments as arguments_of
from cufa.device import Device
from cufa.kernels import COMPANIONS, KERNELS
from cufa.problem import DTYPES, FLOAT8, INPUT_DTYPES, Problem
from cufa.timing import time_cpu

WIDTH = 80
SMALL = ("--batch", "1", "--seqlen", "40", "--heads", "2", "--head-dim", "8")


@pytest.fixture(autouse=True)
def machine(request, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("CUFA_ARCH", raising=False)
    if request.node.get_closest_marker("gpu"):
        if not device.gpu_present():
            pytest.skip("no GPU")
    else:
        monkeypatch.setattr(device, "gpu_present", lambda: False)
        monkeypatch.setattr(arrays, "gpu_usable", lambda: False)


def run(*arguments, code=0):
    """What a command prints; it must end with that exit code, and never by a traceback."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


def refused(*arguments):
    """What the command says on stderr, in one line, when it refuses with exit code 2."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def qkv():
    return draw(1, 2, 33, 4, 16), draw(2, 2, 47, 2, 16), draw(3, 2, 47, 2, 24)


@pytest.fixture
def files(qkv, tmp_path):
    """The options for q, k and v from .npy files."""
    options = []
    for name, array in zip("qkv", qkv, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    return options


# --- the command itself


def test_help_imports_neither_rich_nor_cupy_nor_matplotlib():
    code = (
        "import sys; from cufa.cli import main; main(['--help'], standalone_mode=False); "
        "print(sorted({'rich', 'cupy', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_short_lines(name):
    result = run(name, "--help")
    assert "--help" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= WIDTH


def test_an_unknown_command_is_refused():
    assert "No such command 'fly'" in refused("fly")


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "cufa.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(cufa.__version__)


@pytest.mark.parametrize(
    "arguments", [("info",), ("kernels",), ("run", *SMALL), ("cache", "info")], ids=lambda each: each[0]
)
def test_reports_fit_80_columns(arguments):
    result = run(*arguments)
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    assert result.stderr == ""


# --- info, kernels, cache


def test_info_without_gpu_cupy_and_nvrtc_says_what_to_install(monkeypatch):
    def missing():
        raise cufa.NVRTCMissingError("no NVRTC")

    monkeypatch.setattr(jit, "nvrtc_version", missing)
    monkeypatch.setattr(device, "gpu_present", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    facts = run_json("info")
    assert (facts["gpu"], facts["cupy"], facts["nvrtc"]) == (None, None, None)
    assert facts["missing"].keys() == {"gpu", "cupy", "nvrtc"}
    shown = run("info").stdout
    assert re.search(r"CuPy +not installed: pip install 'cufa\[cuda13\]'", shown)
    assert re.search(r"NVRTC +not installed: pip install 'cufa\[compile\]'", shown)


def test_info_shows_a_gpu_and_its_limits(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: Device.of("sm_90a"))
    facts = run_json("info")
    assert facts["gpu"]["name"] == "H200"
    assert facts["gpu"]["arch"] == "sm_90a"
    shown = run("info").stdout
    assert "H200, sm_90a, 132 SMs" in shown
    assert "227 KiB a block" in shown


def test_info_shows_the_environment(monkeypatch):
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    assert run_json("info")["environment"]["CUFA_ARCH"] == "sm_80"
    assert "CUFA_ARCH" in run("info").stdout


def test_kernels_lists_the_registry():
    listed = run_json("kernels")
    assert [row["name"] for row in listed] == [*KERNELS, *COMPANIONS]
    assert all(row["idea"] and row["paper"] for row in listed)
    for row in listed[: len(KERNELS)]:
        assert set(row["features"]) == {"causal", *KERNELS[row["name"]].features}
    assert {row["function"] for row in listed[len(KERNELS) :]} >= {"cufa.softmax", "cufa.merge"}
    assert {row["min_arch"] for row in listed[: len(KERNELS)]} == {"sm_75", "sm_80", "sm_90a"}
    table = run("kernels").stdout
    assert all(name in table for name in (*KERNELS, *COMPANIONS))


def test_cache_info_and_clear(monkeypatch, tmp_path):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own" / "mine.txt").write_text("not cufa's")
    cufa.cache.store("0" * 64, b"binary", "cubin", {})
    held = run_json("cache", "info")
    assert held["folder"] == str(tmp_path / "own")
    assert held["entries"] == 1
    assert held["bytes"] > 6
    assert "kernels   1," in run("cache", "info").stdout
    assert run_json("cache", "clear")["files_removed"] == 2
    assert run_json("cache", "info")["entries"] == 0
    assert (tmp_path / "own" / "mine.txt").exists()
    assert "removed 0 files" in run("cache", "clear").stdout


# --- run


def test_run_without_arguments_passes_and_reports():
    report = run("run").stdout
    assert "float32, batch 2, seqlen 512 x 512, heads 4, head dim 64" in report
    assert report.rstrip().endswith("PASS")
    for word in ("forward", "backward", "out", "lse", "dq", "dk", "dv", "every element", "CPU"):
        assert word in report


@pytest.mark.parametrize("dtype", DTYPES)
def test_run_of_generated_problems(dtype):
    document = run_json(
        *("run", "--batch", 2, "--seqlen-q", 30, "--seqlen-k", 50, "--heads", 4, "--kv-heads", 2),
        *("--head-dim", 20, "--value-dim", 12, "--causal", "--layout", "bhsd", "--dtype", dtype),
    )
    assert document["backend"] == "numpy"
    assert document["check"]["ok"]
    forward, backward = document["steps"]
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    sizes = {"batch": 2, "seqlen_q": 30, "seqlen_k": 50, "heads": 4, "kv_heads": 2}
    expected = sizes | {"head_dim": 20, "value_dim": 12, "causal": True, "dtype": dtype}
    assert expected.items() <= backward["problem"].items()
    assert all(step["seconds"] > 0 and step["tflops"] > 0 for step in document["steps"])
    assert [result["name"] for result in document["check"]["results"]] == ["out", "lse", "dq", "dk", "dv"]


@pytest.mark.parametrize("sizes", [("--batch", 0), ("--seqlen-q", 0), ("--seqlen-k", 0)])
def test_run_of_empty_problems(sizes):
    assert run_json("run", *SMALL, *sizes)["check"]["ok"]


def test_run_draws_the_same_numbers_for_the_same_seed(tmp_path):
    outputs = []
    for number, seed in enumerate((1, 1, 2)):
        run("run", *SMALL, "--seed", seed, "--out", tmp_path / f"{number}.npy")
        outputs.append(np.load(tmp_path / f"{number}.npy"))
    assert np.array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


def test_head_dims_without_gradients_are_larger():
    sizes = ("--batch", 1, "--seqlen", 40, "--heads", 1, "--head-dim", 300)
    assert run_json("run", *sizes, "--no-backward")["check"]["ok"]
    assert "head dim 300" in refused("run", *sizes)


def test_run_without_backward():
    document = run_json("run", *SMALL, "--no-backward")
    assert [step["direction"] for step in document["steps"]] == ["forward"]
    assert [result["name"] for result in document["check"]["results"]] == ["out", "lse"]


@pytest.mark.parametrize("scores", [2**22, 2000])
@pytest.mark.parametrize("descale", [(), ("--descale",)])
def test_8_bit_floats_have_no_gradients(monkeypatch, descale, scores):
    monkeypatch.setattr(check, "MAX_SCORES", scores)
    eight_bits = ("--dtype", FLOAT8, *descale)
    document = run_json("run", *SMALL, *eight_bits)
    assert [step["direction"] for step in document["steps"]] == ["forward"]
    assert document["steps"][0]["problem"]["features"]["descale"] == bool(descale)
    assert [result["name"] for result in document["check"]["results"]] == ["out", "lse"]
    assert document["check"]["ok"]
    assert document["check"]["coverage"].startswith("every element" if scores > 2000 else "a random sample")
    (point,) = run_json("bench", *eight_bits, "--seqlens", 32, "--batch", 1, "--repeats", 1)["points"]
    assert (point["direction"], point["dtype"]) == ("forward", FLOAT8)
    (row,) = run_json("ladder", *SMALL, *eight_bits, "--cpu-threads", 1)["rows"]
    assert row["check"]["ok"]
    assert "no gradients" in refused("run", *SMALL, *eight_bits, "--backward")


@pytest.mark.parametrize("scores", [2**22, 2000])
@pytest.mark.parametrize(("index", "result"), [(0, "out"), (1, "lse")])
def test_8_bit_floats_that_are_wrong_are_found(monkeypatch, index, result, scores):
    monkeypatch.setattr(check, "MAX_SCORES", scores)
    corrupt(monkeypatch, "attention", index, lambda x: x + np.asarray(1, x.dtype))
    document = run_json("run", *SMALL, "--dtype", FLOAT8, code=1)
    assert [each["name"] for each in document["check"]["results"] if not each["ok"]] == [result]


@pytest.mark.parametrize(
    "options",
    [
        ("--dlse",),
        ("--deterministic",),
        ("--dout", "dout.npy"),
        ("--backward-kernel", "bwd_1_naive"),
        ("--backward-tile", "block_m=64"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_gradients_are_refused_without_them(options):
    said = f"error: {options[0]}: only gradients have that, which --no-backward leaves out"
    assert refused("run", *SMALL, "--no-backward", *options) == said


@pytest.mark.parametrize(
    ("arguments", "left_out_by"),
    [
        (("bench", "--direction", "forward"), "--direction forward"),
        (("bench", "--kernel", "fwd_4_flash_v2"), "--kernel"),
        (("ladder", "--direction", "forward"), "--direction forward"),
        (("bench", "--dtype", FLOAT8), FLOAT8),
        (("ladder", "--dtype", FLOAT8), FLOAT8),
        (("run", "--dtype", FLOAT8), FLOAT8),
    ],
)
def test_what_times_no_gradients_refuses_their_options(arguments, left_out_by):
    message = refused(*arguments, "--dlse", "--deterministic")
    assert message == (
        f"error: --dlse, --deterministic: only gradients have that, which {left_out_by} leaves out"
    )


def test_a_ladder_cannot_be_causal_and_not():
    assert "only one of them" in refused("ladder", "--causal", "--no-causal")


def corrupt(monkeypatch, function, index, change):
    """Make a function of cufa return its result at `index` changed in one element."""
    genuine = getattr(cufa, function)

    def corrupted(*arguments, **options):
        results = genuine(*arguments, **options)
        results[index].flat[7] = change(results[index].flat[7])
        return results

    monkeypatch.setattr(cufa, function, corrupted)


@pytest.mark.parametrize("change", [lambda x: x + 1e-4, lambda x: np.nan, lambda x: np.inf])
@pytest.mark.parametrize(
    ("function", "index", "result"),
    [
        ("attention", 0, "out"),
        ("attention", 1, "lse"),
        ("attention_backward", 0, "dq"),
        ("attention_backward", 1, "dk"),
        ("attention_backward", 2, "dv"),
    ],
)
def test_run_exits_with_1_when_one_element_is_wrong(monkeypatch, function, index, result, change):
    corrupt(monkeypatch, function, index, change)
    verdict = run_json("run", *SMALL, code=1)["check"]
    assert not verdict["ok"]
    failed = {each["name"] for each in verdict["results"] if not each["ok"]}
    # A wrong lse or out is also what the backward starts from.
    assert failed == {result} or (function == "attention" and result in failed)


def test_run_says_what_is_wrong(monkeypatch):
    corrupt(monkeypatch, "attention_backward", 2, lambda x: x + 1)
    result = run("run", *SMALL, code=1)
    assert result.stdout.rstrip().endswith("FAIL")
    assert "dv[0, 0, 0, 7] is" in result.stderr
    assert "1 of 640 elements are too far off" in " ".join(result.stderr.split())


def test_run_can_be_told_not_to_check(monkeypatch):
    corrupt(monkeypatch, "attention", 0, lambda x: x + 1)
    assert run_json("run", *SMALL, "--no-check")["check"] is None


def test_a_kernel_may_be_named_by_its_number():
    plans = run_json(
        "run", "--explain", "--arch", "sm_90a", "--kernel", "fwd_4", "--backward-kernel", "bwd_2"
    )
    assert [plan["kernel"] for plan in plans.values()] == ["fwd_4_flash_v2", "bwd_2_flash_v2"]
    assert "'fwd' is not one of" in run("run", "--kernel", "fwd", code=2).stderr
    assert "'fwd_' is not one of" in run("compile", "fwd_", "--arch", "sm_80", code=2).stderr


def test_explain_prints_the_plan_for_an_arch_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(cufa, "attention", None)
    shown = run("run", *SMALL, "--explain", "--arch", "sm_90a").stdout
    assert "fwd_" in shown
    assert "bwd_" in shown
    assert "why" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH
    plans = run_json("run", *SMALL, "--explain", "--arch", "sm_80", "--kernel", "fwd_1_naive")
    assert plans["forward"]["kernel"] == "fwd_1_naive"
    assert plans["backward"]["arch"] == "sm_80"
    assert [launch["entry"] for launch in plans["forward"]["launches"]] == ["scores", "softmax", "output"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-dim", 257), "head dim 257"),
        (("--heads", 5, "--kv-heads", 2), "must be a multiple of the key-value heads"),
        (("--softmax-scale", "inf"), "softmax_scale is inf"),
        (("--batch", -1), "-1 is not in the range"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--kernel", "fwd_9"), "'fwd_9' is not one of"),
        (("--kernel", "fwd_1_naive"), "it needs a GPU"),
        (("--arch", "sm_90"), "it needs a GPU"),
        (("--tile", "block_m=64"), "it needs a GPU"),
        (("--tile", "block_m"), "is not of the form NAME=N"),
        (("--tile", "block_m=-4"), "is not of the form NAME=N"),
        (("--backend", "cuda"), "no GPU"),
        (("--backend", "torch"), "'torch' is not one of"),
        (("--explain",), "no GPU"),
        (("--explain", "--arch", "sm_999"), "arch is 'sm_999'"),
        (("--explain", "--arch", "sm_80", "--kernel", "bwd_1_naive"), "is a backward kernel"),
        (("--explain", "--arch", "sm_80", "--tile", "block_q=4"), "tiles has block_q"),
        (("--layout", "sbhd"), "'sbhd' is not one of"),
        (("--out", "result.txt"), "must end with .npy or .npz"),
        (("--out", "nowhere/result.npy"), "there is no folder nowhere"),
        (("--k", "k.npy"), "--q, --v must be given, too"),
        (("--explain", "--arch", "sm_80", "--out", "out.npy"), "--explain runs nothing"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--dropout-seed", "7"), "give --dropout, too"),
    ],
)
def test_run_refuses_what_makes_no_sense(arguments, message):
    assert message in refused("run", *arguments)


# --- features


HEADS = ("--batch", 2, "--seqlen-q", 33, "--seqlen-k", 47, "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
ON_EACH = [
    (("--window", "5,3"), ["window"], []),
    (("--window", "-1,4", "--softcap", 2), ["window", "softcap"], []),
    (("--causal", "--alibi", "--sink"), ["alibi_slopes", "sink", "dsink"], ["dsink"]),
    (("--bias", "random"), ["bias", "dbias"], ["dbias"]),
    (("--mask", "random", "--dropout", 0.3), ["mask", "dropout_p"], []),
    (("--mask", "random-bits", "--seqused-k", "40,7"), ["mask", "seqused_k"], []),
    (("--deterministic",), ["deterministic"], []),
    (("--dlse", "--sink"), ["sink", "dlse", "dsink"], ["dsink"]),
    (
        ("--bias", "random", "--sink", "--softcap", 3, "--causal", "--layout", "bhsd"),
        ["softcap", "bias", "sink", "dbias", "dsink"],
        ["dbias", "dsink"],
    ),
]


@pytest.mark.parametrize(
    ("options", "names", "gradients"), ON_EACH, ids=lambda each: " ".join(map(str, each))
)
def test_run_checks_features_and_their_gradients(options, names, gradients):
    document = run_json("run", *HEADS, *options)
    assert document["steps"][1]["features"] == names
    assert document["check"]["ok"]
    assert document["check"]["coverage"] == "every element"
    results = [result["name"] for result in document["check"]["results"]]
    assert results == ["out", "lse", "dq", "dk", "dv", *gradients]


@pytest.mark.parametrize("scores", [2**22, 200])
def test_precision_is_told_and_what_is_checked_by(monkeypatch, scores):
    monkeypatch.setattr(check, "MAX_SCORES", scores)
    ieee, tf32 = (run_json("run", *SMALL, "--precision", precision) for precision in ("ieee", "tf32"))
    for strict, loose in zip(ieee["check"]["results"], tf32["check"]["results"], strict=True):
        assert loose["ok"]
        assert 100 * strict["allowed"] < loose["allowed"] < 0.05, strict["name"]
    assert "float32 as tf32" in run("run", *SMALL, "--precision", "tf32").stdout
    assert "which is for float32" in refused("run", *SMALL, "--dtype", "float16", "--precision", "tf32")
    arguments = ("bench", "--seqlens", 16, "--tokens", 16, "--repeats", 1, "--precision", "tf32")
    assert [point["precision"] for point in run_json(*arguments)["points"]] == ["tf32", "tf32"]
    assert "float32 as tf32" in run(*arguments).stdout


def test_run_of_packed_sequences():
    sizes = ("--varlen", "30,0,17:40", "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
    document = run_json("run", *sizes, "--bias", "random", "--mask", "random-bits", "--causal")
    forward, _ = document["steps"]
    assert (forward["problem"]["batch"], forward["problem"]["seqlen_q"]) == (3, 47)
    assert document["check"]["ok"]
    each = [Problem("forward", "float32", 1, *n, 4, 2, 8, 8, True).flops for n in ((30, 30), (17, 40))]
    assert forward["tflops"] == pytest.approx(sum(each) / forward["seconds"] / 1e12)
    assert "--seqlen: the sizes are those of --varlen" in refused("run", *sizes, "--seqlen", 30)


@pytest.mark.parametrize(
    ("options", "names", "seqlen_k"),
    [
        (("--causal", "--bias", "random", "--layout", "bhsd"), ["bias", "block_table"], 49),
        (("--mask", "random-bits", "--seqused-k", "40,7"), ["mask", "block_table", "seqused_k"], 49),
    ],
    ids=str,
)
def test_run_of_keys_in_pages(monkeypatch, options, names, seqlen_k):
    for scores in (2**22, 200):  # every element, and a sample
        monkeypatch.setattr(check, "MAX_SCORES", scores)
        document = run_json("run", *HEADS, "--page-size", 7, *options)
        (step,) = document["steps"]
        assert step["features"] == names
        assert step["problem"]["seqlen_k"] == seqlen_k
        assert document["check"]["ok"]


def test_packed_sequences_with_keys_in_pages():
    sizes = ("--varlen", "30,0,17:40", "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--page-size", 16)
    document = run_json("run", *sizes, "--causal")
    assert document["steps"][0]["features"] == ["cu_seqlens", "block_table", "seqused_k"]
    assert document["check"]["ok"]
    (point,) = run_json("bench", *sizes, "--repeats", 1)["points"]
    assert point["direction"] == "forward"


def test_keys_in_pages_have_no_gradients_and_come_from_no_file(tmp_path):
    asked = ("run", *HEADS, "--page-size", 7)
    assert "only gradients have that, which --page-size leaves out" in refused(*asked, "--dlse")
    assert "keys in pages have no gradients" in refused(*asked, "--backward")
    np.save(tmp_path / "x.npy", draw(0, 2, 3, 2, 8))
    files = [word for name in "qkv" for word in (f"--{name}", tmp_path / "x.npy")]
    assert "--page-size is of generated arrays" in refused("run", *files, "--page-size", 7)


def test_what_is_drawn_for_features_leaves_the_tensors_as_they_were(tmp_path):
    outputs = {}
    for name, options in {
        "plain": (),
        "mask": ("--mask", "random", "--dropout", 0.5, "--sink"),
        "bits": ("--mask", "random-bits", "--dropout", 0.5),
        "no softcap": ("--softcap", 0),
        "dropout": ("--dropout", 0.5),
        "dropout again": ("--dropout", 0.5, "--dropout-seed", 0),
        "other dropout": ("--dropout", 0.5, "--dropout-seed", 1),
    }.items():
        run("run", *SMALL, *options, "--no-check", "--no-backward", "--out", tmp_path / "out.npy")
        outputs[name] = np.load(tmp_path / "out.npy")
    same = {(a, b) for a in outputs for b in outputs if a < b and np.array_equal(outputs[a], outputs[b])}
    assert same == {("no softcap", "plain"), ("dropout", "dropout again")}


def test_run_exits_with_1_when_a_gradient_of_a_feature_is_wrong(monkeypatch):
    corrupt(monkeypatch, "attention_backward", 3, lambda x: x + 1)
    verdict = run_json("run", *SMALL, "--bias", "random", code=1)["check"]
    assert [each["name"] for each in verdict["results"] if not each["ok"]] == ["dbias"]


def test_bias_and_mask_from_files(qkv, files, tmp_path):
    bias, mask = draw(5, 4, 1, 47), draw(6, 33, 47) > 0
    bits = np.packbits(mask, axis=-1, bitorder="little")
    for name, array in (("bias", bias), ("mask", mask), ("bits", bits)):
        np.save(tmp_path / f"{name}.npy", array)
    expected = cufa.attention(*qkv, bias=bias, mask=mask, backend="numpy")
    for name in ("mask", "bits"):
        given = ("--bias", tmp_path / "bias.npy", "--mask", tmp_path / f"{name}.npy")
        run("run", *files, *given, "--out", tmp_path / "all.npz")
        with np.load(tmp_path / "all.npz") as results:
            assert list(results) == ["out", "lse", "dq", "dk", "dv", "dbias"]
            assert results["dbias"].shape == bias.shape
            assert np.array_equal(results["out"], expected)
    np.save(tmp_path / "bias.npy", bias[..., :-1])
    assert "bias has shape (4, 1, 46)" in refused("run", *files, "--bias", tmp_path / "bias.npy")
    assert "No such file" in refused("run", *SMALL, "--mask", tmp_path / "none.npy")


def test_packed_sequences_from_files(qkv, tmp_path):
    packed = [array.reshape(-1, *array.shape[2:]) for array in qkv]
    options = ["--varlen", "33:47,20:30"]
    for name, array in zip("qkv", packed, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    run("run", *options, "--out", tmp_path / "out.npy")
    ends = {"cu_seqlens_q": np.array([0, 33, 53], np.int32), "cu_seqlens_k": np.array([0, 47, 77], np.int32)}
    out = np.load(tmp_path / "out.npy")[:53]
    assert np.array_equal(out, cufa.attention(*packed, **ends, backend="numpy")[:53])
    assert "cu_seqlens_k ends with 95, but k has 94 tokens" in refused(
        "run", *options, "--varlen", "33:47,20:48", "--explain", "--arch", "sm_80"
    )


def test_features_are_in_the_plan_and_in_the_reasons(monkeypatch):
    call = ("run", *SMALL, "--dtype", "bfloat16", "--explain")
    forward = run_json(*call, "--arch", "sm_75", "--softcap", 3)["forward"]
    assert forward["kernel"] == "fwd_4_flash_v2"
    reasons = [
        "fwd_4_flash_v2: the last rung that supports this call",
        "fwd_5_mma needs tensor cores for bfloat16, which sm_75 does not have",
    ]
    assert forward["reasons"][:2] == reasons
    shown = run(*call, "--arch", "sm_75", "--softcap", 3).stdout
    assert "why        fwd_5_mma needs tensor cores" in shown
    assert "with softcap" in shown
    asked = run_json(*call, "--arch", "sm_75", "--kernel", "fwd_1_naive")["forward"]
    assert asked["reasons"][0] == "fwd_1_naive: asked for"
    message = refused(*call, "--arch", "sm_80", "--kernel", "fwd_1_naive", "--softcap", 3, "--sink")
    assert "fwd_1_naive does not support softcap, sink" in message


def test_a_gpu_call_is_refused_before_anything_takes_memory(monkeypatch):
    monkeypatch.setattr(run_command, "use_gpu", lambda backend: True)
    monkeypatch.setattr(workload, "normal", None)
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    message = refused("run", *SMALL, "--sink", "--backward-kernel", "bwd_1_naive")
    assert "bwd_1_naive does not support sink, dsink" in message


def test_what_no_kernel_supports_is_refused_with_the_reason_of_each_that_takes_the_dtype(monkeypatch):
    without = tuple(replace(kernel, features=frozenset()) for kernel in KERNELS.values())
    monkeypatch.setattr(kernels, "_LADDER", without)
    monkeypatch.setattr(workload, "normal", None)  # nothing is drawn
    message = refused("run", *SMALL, "--explain", "--arch", "sm_80", "--alibi")
    assert "no kernel supports forward float32" in message
    for name, kernel in KERNELS.items():
        is_asked = kernel.direction == "forward" and "float32" in kernel.dtypes
        assert (f"{name} does not support alibi_slopes" in message) == is_asked
        assert (name in message) == is_asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--window", "3"), "'3' is not of the form LEFT,RIGHT"),
        (("--window", "3,x"), "'3,x' is not of the form LEFT,RIGHT"),
        (("--window", "3,-2"), "'3,-2' is not of the form LEFT,RIGHT"),
        (("--softcap", "-1"), "-1.0 is not in the range"),
        (("--dropout", "1"), "1.0 is not in the range"),
        (("--dropout", "0.1", "--dropout-seed", "-1"), "seed is -1"),
        (("--varlen", "3,x"), "'x' is no length"),
        (("--varlen", "3:-1"), "'3:-1' is no length"),
        (("--varlen", "3:,4"), "'3:' is no length"),
        (("--varlen", "30", "--layout", "bhsd"), "packed sequences have none but 'bshd'"),
        (("--seqused-k", "3"), "seqused_k has shape (1,)"),
        (("--seqused-k", "3,x"), "'x' is not a valid integer."),
        (("--page-size", "-1"), "-1 is not in the range"),
    ],
)
def test_features_that_make_no_sense_are_refused(arguments, message):
    assert message in refused("run", *arguments)


@pytest.mark.parametrize(
    "features",
    [
        FeatureOptions(),
        FeatureOptions(window=(3, None), softcap=2.5, alibi=True, deterministic=True, descale=True),
        FeatureOptions(
            causal=True, sink=True, dropout=0.25, dropout_seed=7, bias="random", mask="random-bits"
        ),
    ],
)
def test_arguments_ask_for_the_same_features(features):
    @click.command()
    @feature_options(packed=False)
    def command(features):
        asked.append(features)

    asked = []
    assert CliRunner().invoke(command, arguments_of(features)).exit_code == 0
    assert asked == [features]


# --- files


def test_files_in_and_a_file_out(qkv, files, tmp_path):
    run("run", *files, "--causal", "--out", tmp_path / "out.npy")
    assert np.array_equal(np.load(tmp_path / "out.npy"), cufa.attention(*qkv, causal=True, backend="numpy"))


def test_an_npz_holds_all_results(qkv, files, tmp_path):
    dout = draw(4, 2, 33, 4, 24)
    np.save(tmp_path / "dout.npy", dout)
    run("run", *files, "--dout", tmp_path / "dout.npy", "--out", tmp_path / "all.npz")
    out, lse = cufa.attention(*qkv, return_lse=True, backend="numpy")
    gradients = cufa.attention_backward(dout, *qkv, out, lse, backend="numpy")
    with np.load(tmp_path / "all.npz") as results:
        assert list(results) == ["out", "lse", "dq", "dk", "dv"]
        for name, expected in zip(results, (out, lse, *gradients), strict=True):
            assert np.array_equal(results[name], expected), name
    run("run", *files, "--no-backward", "--out", tmp_path / "forward.npz")
    with np.load(tmp_path / "forward.npz") as results:
        assert list(results) == ["out", "lse"]


def test_results_are_written_even_if_they_are_wrong(files, tmp_path, monkeypatch):
    corrupt(monkeypatch, "attention", 0, lambda x: x + 1)
    run("run", *files, "--out", tmp_path / "out.npy", code=1)
    assert (tmp_path / "out.npy").exists()


def test_an_npz_is_read_by_the_arguments_name_or_by_a_key(qkv, tmp_path):
    q, k, v = qkv
    archive = tmp_path / "in.npz"
    np.savez(archive, q=q, k=k, v=v, other=2 * q)
    expected = {"q": q, "other": 2 * q}
    for key, location in (("q", archive), ("other", f"{archive}:other")):
        run("run", "--q", location, "--k", archive, "--v", archive, "--out", tmp_path / "out.npy")
        exact = cufa.attention(expected[key], k, v, backend="numpy")
        assert np.array_equal(np.load(tmp_path / "out.npy"), exact)


@pytest.mark.parametrize(("dtype", "opaque"), [("bfloat16", "V2"), (FLOAT8, "V1")])
def test_what_numpy_has_no_name_for_goes_in_and_out_as_it_stores_it(qkv, tmp_path, dtype, opaque):
    stored = [array.astype(INPUT_DTYPES[dtype]) for array in qkv]
    options = []
    for name, array in zip("qkv", stored, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    assert np.load(tmp_path / "q.npy").dtype == np.dtype(opaque)
    assert f"add --dtype {dtype}" in refused("run", *options)
    assert f"add --dtype {dtype}" in refused("run", *options, "--dtype", "float16")
    run("run", *options, "--dtype", dtype, "--out", tmp_path / "out.npy")
    out = np.load(tmp_path / "out.npy").view(DTYPES["bfloat16"])
    assert np.array_equal(out, cufa.attention(*stored, backend="numpy"))


def test_dtype_converts_files(qkv, files, tmp_path):
    run("run", *files, "--dtype", "float16", "--out", tmp_path / "out.npy")
    halves = [array.astype(np.float16) for array in qkv]
    assert np.array_equal(np.load(tmp_path / "out.npy"), cufa.attention(*halves, backend="numpy"))


class _Exploit:
    """What a pickle would run when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_arrays_are_refused_and_not_run(files, tmp_path):
    trap = tmp_path / "trap"
    loaded = np.array([_Exploit(trap)], dtype=object)
    np.save(tmp_path / "q.npy", loaded, allow_pickle=True)
    assert "allow_pickle=False" in refused("run", *files)
    np.savez(tmp_path / "q.npz", q=loaded)
    assert "allow_pickle=False" in refused("run", *files, "--q", tmp_path / "q.npz")
    assert not trap.exists()


def test_unreadable_files_are_refused(files, tmp_path):
    bad = tmp_path / "bad.npy"
    assert "No such file" in refused("run", *files, "--q", bad)
    for content in (b"", b"no array", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00"):
        bad.write_bytes(content)
        message = refused("run", *files, "--q", bad)
        assert "it is no .npy or .npz file of numbers" in message
        assert "unsafely" not in message
    np.save(bad, np.zeros(3))
    bad.write_bytes(bad.read_bytes()[:-8])
    assert "error: --q" in refused("run", *files, "--q", bad)
    assert "only an .npz file has arrays by name" not in refused("run", *files, "--q", tmp_path)


def test_an_npz_without_the_array_says_what_it_has(files, tmp_path):
    np.savez(tmp_path / "in.npz", a=np.zeros(3), b=np.zeros(3))
    assert "no array 'q' in the file; it has a, b" in refused("run", *files, "--q", tmp_path / "in.npz")
    assert "no array 'c'" in refused("run", *files, "--q", f"{tmp_path / 'in.npz'}:c")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 33, 4, 16), np.int32), "q has dtype int32"),
        (np.zeros((2, 33, 4), np.float32), "q has shape (2, 33, 4)"),
        (np.zeros((2, 33, 3, 16), np.float32), "q has 3 heads and k 2"),
        (np.zeros((2, 33, 4, 16), np.float64), "k has dtype float32 and q float64"),
        (np.zeros((2, 33, 4, 16), ">f4"), "q has dtype >f4"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(files, tmp_path, array, message):
    np.save(tmp_path / "q.npy", array)
    assert message in refused("run", *files)


def test_a_dout_that_does_not_fit_is_refused(files, tmp_path):
    np.save(tmp_path / "dout.npy", np.zeros((2, 33, 4, 16), np.float32))
    assert "dout has shape" in refused("run", *files, "--dout", tmp_path / "dout.npy")


def test_sizes_are_refused_beside_files(files):
    assert "--kv-heads: the sizes are those of the files" in refused("run", *files, "--kv-heads", 2)


# --- the sampled check


def solved(problem, seed=0, **features):
    """A problem as a workload, and what the CPU path makes of it."""
    features = FeatureOptions(causal=problem.causal, **features)
    problem = workload.packed(problem, features)
    host = workload.make_arrays(problem, features, "bshd", np.random.default_rng(seed))
    load = workload.Workload(host, on_gpu=False, features=features)
    results = load.forward(workload.Rung())
    return load, results | load.backward(workload.Rung(), results)


def checked(load, results):
    return load.check(load.arrays, results, np.random.default_rng(1))


SAMPLED = [
    Problem("forward", "float32", 2, 200, 200, 6, 2, 32, 32, causal=False),
    Problem("forward", "float16", 1, 150, 220, 4, 1, 16, 24, causal=True),
    Problem("forward", "bfloat16", 3, 220, 150, 2, 2, 16, 8, causal=True),  # rows that see no key
    Problem("forward", "float64", 1, 130, 130, 2, 1, 8, 8, causal=True),
    Problem("forward", "float32", 1, 1, 3000, 1, 1, 8, 8, causal=False),
    Problem("forward", "float32", 1, 3000, 1, 1, 1, 8, 8, causal=True),
]


@pytest.mark.parametrize("problem", SAMPLED, ids=str)
def test_a_sample_passes_where_everything_does(monkeypatch, problem):
    load, results = solved(problem)
    whole = checked(load, results)
    monkeypatch.setattr(check, "MAX_SCORES", 2000)
    sample = checked(load, results)
    assert whole.coverage == "every element"
    assert sample.coverage.startswith("a random sample")
    assert whole.ok
    assert sample.ok, [str(each) for each in sample.comparisons if not each.ok]
    for some, every in zip(sample.comparisons, whole.comparisons, strict=True):
        assert some.error <= 2 * every.error + 2 * some.rounding
        assert some.allowed <= 3 * every.allowed + 2 * some.rounding


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_a_sample_finds_what_is_wrong_all_over(monkeypatch, name):
    load, results = solved(SAMPLED[0])
    monkeypatch.setattr(check, "MAX_SCORES", 2000)
    results[name] = results[name] + np.float32(1e-4)
    sample = checked(load, results)
    assert not {each.what: each.ok for each in sample.comparisons}[name]


def test_a_sample_looks_at_both_ends_of_the_sequences(monkeypatch):
    problem = replace(SAMPLED[0], batch=1, heads=1, kv_heads=1)
    monkeypatch.setattr(check, "MAX_SCORES", 2000)
    for name in ("out", "dq", "dk", "dv"):
        for row in (0, -1):
            load, results = solved(problem)
            results[name][0, row] += 1
            sample = checked(load, results)
            assert not {each.what: each.ok for each in sample.comparisons}[name], (name, row)


def test_the_check_of_both_layouts_is_the_same():
    load, results = solved(SAMPLED[1])

    def bhsd(named):
        return {name: x.transpose(0, 2, 1, 3) if x.ndim == 4 else x for name, x in named.items()}

    turned = replace(load, arrays=bhsd(load.arrays), layout="bhsd")
    assert checked(turned, bhsd(results)) == checked(load, results)


def test_large_runs_are_checked_by_a_sample(monkeypatch):
    monkeypatch.setattr(check, "MAX_SCORES", 2000)
    coverage = run_json("run", *SMALL)["check"]["coverage"]
    assert coverage == "a random sample: 4 x 12 of 80 rows, 4 x 12 of 80 keys"


def test_a_comparison_refuses_other_shapes_and_finds_nan():
    truth = np.ones((3, 4))
    with pytest.raises(ValueError, match="out has shape"):
        checking.compare(truth[:2], truth, truth, 2, "out")
    wrong = truth.copy()
    wrong[1, 2] = np.nan
    comparison = checking.compare(wrong, truth, truth, 2, "out")
    assert (comparison.ok, comparison.wrong, comparison.error) == (False, 1, np.inf)
    assert "out[1, 2] is nan, should be 1.0" in str(comparison)
    assert checking.compare(truth, truth, truth, 2, "out").ok


# --- bench


def test_bench_prints_a_row_for_each_length_and_direction(tmp_path):
    arguments = ("bench", "--seqlens", "16,32", "--tokens", 64, "--hidden", 32, "--head-dim", 16)
    document = run_json(*arguments, "--repeats", 2, "--causal", "--dtype", "float16")
    points = [(each["seqlen"], each["batch"], each["direction"]) for each in document["points"]]
    assert points == [
        *((16, 4, "forward"), (16, 4, "backward")),
        *((32, 2, "forward"), (32, 2, "backward")),
    ]
    for each in document["points"]:
        assert (each["heads"], each["dtype"], each["causal"], each["repeats"]) == (2, "float16", True, 2)
        problem = Problem(
            each["direction"], "float16", each["batch"], each["seqlen"], each["seqlen"], 2, 2, 16, 16, True
        )
        assert each["tflops"] == pytest.approx(problem.flops / each["seconds"] / 1e12)
        bytes_moved = each["gigabytes_per_second"] * 1e9 * each["seconds"]
        arrays = 4 if each["direction"] == "forward" else 8
        assert bytes_moved == pytest.approx(arrays * 64 * 2 * 16 * 2 + 64 * 2 * 4)
    table = run(*arguments, "--repeats", 1, "--direction", "forward")
    assert max(map(len, table.stdout.splitlines())) <= WIDTH
    assert table.stdout.count("forward") == 2
    assert table.stderr == ""


def test_bench_of_features():
    arguments = ("bench", "--seqlens", "16,300", "--batch", 1, "--heads", 2, "--head-dim", 8, "--repeats", 1)
    options = ("--window", "100,0", "--sink", "--bias", "random", "--mask", "random-bits", "--dropout", 0.2)
    points = run_json(*arguments, *options)["points"]
    assert len(points) == 4
    for each in points:
        names = ["window", "bias", "mask", "sink", "dropout_p"]
        names += ["dbias", "dsink"] if each["direction"] == "backward" else []
        assert each["features"] == names
        length = each["seqlen"]
        seen = sum(min(i + 1, 101) for i in range(length))
        per_pair = 2 * 2 * 8 * (2 if each["direction"] == "forward" else 5)
        assert each["tflops"] * 1e12 * each["seconds"] == pytest.approx(seen * per_pair)
        scores = 2 * length * length * 4, 2 * length * -(-length // 8)
        times = 1 if each["direction"] == "forward" else 2
        tensors = 4 * times * length * 2 * 8 * 4 + 2 * length * 4
        moved = each["gigabytes_per_second"] * 1e9 * each["seconds"]
        assert moved == pytest.approx(tensors + times * scores[0] + scores[1])
    shown = run(*arguments, *options, "--direction", "forward").stdout
    assert "with window, bias, mask, sink, dropout_p" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_bench_of_packed_sequences():
    arguments = ("bench", "--varlen", "30,50:20", "--heads", 2, "--head-dim", 8, "--repeats", 1)
    (point,) = run_json(*arguments, "--direction", "forward", "--seqused-k", "9,9")["points"]
    assert (point["batch"], point["seqlen"]) == (2, 80)
    assert point["features"] == ["cu_seqlens", "seqused_k"]
    flops = 2 * 2 * 2 * 8 * (30 * 30 + 50 * 20)
    assert point["tflops"] * 1e12 * point["seconds"] == pytest.approx(flops)
    assert "--tokens: the sizes are those of --varlen" in refused(*arguments, "--tokens", 64)


def test_bench_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(bench, "_ON_CPU", replace(bench._ON_CPU, seqlens=(16,), tokens=32))
    points = run_json("bench", "--repeats", 1)["points"]
    assert [(each["seqlen"], each["batch"], each["heads"]) for each in points] == [(16, 2, 4)] * 2
    point, *_ = run_json("bench", "--repeats", 1, "--batch", 3, "--heads", 2, "--kv-heads", 1)["points"]
    assert (point["batch"], point["heads"], point["kv_heads"]) == (3, 2, 1)


def test_bench_times_nothing_that_is_wrong(monkeypatch):
    corrupt(monkeypatch, "attention_backward", 0, lambda x: x + 1)
    result = run("bench", "--seqlens", 16, "--tokens", 16, "--repeats", 1, "--json", code=1)
    assert result.stdout == ""
    assert "the backward is wrong" in " ".join(result.stderr.split())


def test_bench_says_where_memory_does_not_suffice(monkeypatch):
    genuine = cufa.attention

    def attention(q, *arrays, **options):
        if q.shape[1] == 32:
            raise MemoryError("32 is too much")
        return genuine(q, *arrays, **options)

    monkeypatch.setattr(cufa, "attention", attention)
    arguments = ("bench", "--seqlens", "16,32", "--tokens", 32, "--repeats", 1, "--direction", "forward")
    small, large = run_json(*arguments)["points"]
    assert small["seconds"] > 0
    assert large["seconds"] is None
    assert "out of memory" in run(*arguments).stdout


def test_a_message_in_a_file_or_a_pipe_has_no_lines_but_its_own(tmp_path):
    missing = tmp_path / ("a name with " + 20 * "many words ") / "bias.npy"
    result = run("run", "--bias", missing, code=2)
    assert result.stderr == f"error: --bias {missing}: No such file or directory\n"


def test_what_is_drawn_and_checked_may_take_more_memory_than_there_is(monkeypatch):
    def too_much(*_, **__):
        raise MemoryError("Unable to allocate 23.8 GiB")

    for place in ("workload.normal", "check.check"):
        with monkeypatch.context() as patch:
            patch.setattr(f"cufa.cli.{place}", too_much)
            result = run("run", "--seqlen", 8, code=1)
        assert result.stderr.strip() == "error: out of memory: Unable to allocate 23.8 GiB"


@pytest.mark.parametrize(
    ("direction", "kernels", "expected"),
    [
        (None, (), [("forward", None), ("backward", None)]),
        ("both", (), [("forward", None), ("backward", None)]),
        ("backward", (), [("backward", None)]),
        (
            None,
            ("fwd_4_flash_v2", "fwd_1_naive"),
            [("forward", "fwd_4_flash_v2"), ("forward", "fwd_1_naive")],
        ),
        ("both", ("bwd_1_naive",), [("forward", None), ("backward", "bwd_1_naive")]),
        (None, ("bwd_1_naive", "fwd_1_naive"), [("forward", "fwd_1_naive"), ("backward", "bwd_1_naive")]),
        ("forward", ("bwd_1_naive",), [("forward", "bwd_1_naive")]),  # the library says what is wrong
    ],
)
def test_bench_takes_the_directions_of_the_kernels(direction, kernels, expected):
    rungs = bench._rungs(direction, kernels, None, None)
    assert [(way, rung.kernel) for way, rung in rungs] == expected


def test_bench_writes_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("bench", "--seqlens", "16,32", "--tokens", 32, "--repeats", 1)
    result = run(*arguments, "--plot", tmp_path / "plot.png", "--json")
    assert len(json.loads(result.stdout)["points"]) == 4
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "--plot" in refused(*arguments, "--plot", tmp_path / "missing" / "plot.png")


def test_bench_says_that_a_plot_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'cufa[plot]'" in refused("bench", "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seqlens", "16,x"), "'x' is not a valid integer"),
        (("--seqlens", "0"), "0 is not in the range"),
        (("--seqlens", ","), "give at least one value"),
        (("--seqlens", "16", "--head-dim", "300"), "head dim 300"),
        (("--seqlens", "16", "--kernel", "fwd_1_naive"), "it needs a GPU"),
        (("--backend", "cuda"), "no GPU"),
        (("--tokens", 64, "--batch", 2), "--batch is instead of --tokens; give one of them"),
        (("--hidden", 64, "--heads", 2), "--heads is instead of --hidden; give one of them"),
        (("--seqlens", "16,32", "--tokens", 31), "--tokens is 31, which is less than one sequence of 32"),
        (("--head-dim", 16, "--hidden", 15), "--hidden is 15, which is less than one head of 16"),
        (("--seed", -1), "-1 is not in the range"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, message):
    assert message in refused("bench", *arguments)


# --- ladder


def test_ladder_without_a_gpu_has_the_rows_of_the_cpu_alone():
    arguments = ("ladder", "--batch", 1, "--seqlen", 32, "--heads", 2, "--head-dim", 8, "--cpu-threads", 1)
    document = run_json(*arguments)
    assert [(row["name"], row["direction"]) for row in document["rows"]] == [
        ("CPU, 1 thread", "forward"),
        ("CPU, 1 thread", "backward"),
    ]
    assert any("the rungs need a GPU" in note for note in document["notes"])
    assert document["problem"]["dtype"] == "float32"
    for row in document["rows"]:
        assert row["seconds"] > 0
        assert 0 < row["error"] < 1e-5
        assert row["check"]["ok"]
    shown = run(*arguments, "--direction", "backward")
    assert max(map(len, shown.stdout.splitlines())) <= WIDTH
    assert "CPU, 1 thread" in shown.stdout
    assert "forward" not in shown.stdout


def test_ladder_with_features():
    sizes = ("--batch", 1, "--seqlen", 32, "--heads", 2, "--head-dim", 8, "--cpu-threads", 1)
    options = ("--window", "9,-1", "--softcap", 3, "--sink", "--deterministic")
    document = run_json("ladder", *sizes, *options)
    assert document["problem"]["features"]["window"] == [9, None]
    assert document["problem"]["features"]["softcap"]
    for row, results in zip(document["rows"], (["out", "lse"], ["dq", "dk", "dv", "dsink"]), strict=True):
        assert [each["name"] for each in row["check"]["results"]] == results
        assert row["check"]["ok"]


def test_ladder_is_causal_as_its_preset_unless_told():
    for preset, options, causal in (
        ("gpt2", (), True),
        ("gpt2", ("--no-causal",), False),
        ("small", (), False),
        ("small", ("--causal",), True),
    ):
        sizes = ("--batch", 1, "--seqlen", 16, "--heads", 2, "--head-dim", 8, "--cpu-threads", 1)
        document = run_json("ladder", "--preset", preset, *sizes, *options, "--direction", "forward")
        assert document["problem"]["causal"] == causal, (preset, options)


def test_ladder_exits_with_1_when_a_result_is_wrong(monkeypatch):
    corrupt(monkeypatch, "attention", 0, lambda x: x + 1)
    monkeypatch.setattr(
        ladder, "_cpu_seconds", lambda problem, features, asked, threads: dict.fromkeys(asked, 1.0)
    )
    result = run("ladder", "--seqlen", 32, "--direction", "forward", "--cpu-threads", 1, code=1)
    assert "CPU, 1 thread: out[0, 0, 0, 7] is" in " ".join(result.stderr.split())


def test_the_course_is_compared_with_one_thread_on_a_part_of_it():
    problem = ladder._problem(ladder._PRESETS["course"], dict.fromkeys(("heads", "kv_heads")))
    assert (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim) == (100, 4096, 1, 32)
    assert problem.dtype == "float32"
    assert ladder._PRESETS["course"].cpu_threads == 1
    sliced = ladder._slice(problem)
    assert 1 <= sliced.batch < 10
    assert sliced.flops <= ladder.CPU_SLICE_FLOPS


@pytest.mark.parametrize("preset", ladder._PRESETS)
def test_a_slice_is_whole_heads_of_a_possible_problem(preset):
    problem = ladder._problem(ladder._PRESETS[preset], dict.fromkeys(("heads", "kv_heads")))
    sliced = ladder._slice(problem)
    assert sliced.heads % sliced.kv_heads == 0
    assert sliced.batch * sliced.heads <= problem.batch * problem.heads
    scale = problem.batch * problem.heads / (sliced.batch * sliced.heads)
    assert sliced.flops * scale == pytest.approx(problem.flops)


def test_speed_ups_are_over_the_rung_before_that_ran_and_over_the_cpu():
    rows = [
        ladder._Row("CPU, 1 thread", "forward", seconds=8.0, cpu=True),
        ladder._Row("naive", "forward", seconds=4.0),
        ladder._Row("too large", "forward"),
        ladder._Row("tiled", "forward", seconds=1.0),
    ]
    speedups = [(before, cpu) for _, before, cpu in ladder._compared(rows)]
    assert speedups == [(None, None), (None, 2.0), (None, None), (4.0, 8.0)]


def test_a_ladder_that_cannot_time_the_cpu_says_why(monkeypatch):
    monkeypatch.setattr(ladder.sys, "executable", "/bin/false")
    result = run("ladder", "--seqlen", 32, "--cpu-threads", 1, code=1)
    assert "measuring the CPU failed" in result.stderr


# --- compile


TINY = ("--arch", "sm_80", "--head-dim", "16")
nvrtc = pytest.mark.usefixtures("nvrtc")


@pytest.fixture(name="nvrtc")
def needs_nvrtc():
    try:
        jit.nvrtc_version()
    except cufa.NVRTCMissingError as error:
        pytest.skip(str(error))


@nvrtc
def test_compile_shows_what_kernels_take(monkeypatch, tmp_path):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_builds", {})
    (built,) = run_json("compile", "fwd_1_naive", *TINY, "--dtype", "float32")
    assert (built["arch"], built["dtype"], built["head_dim"]) == ("sm_80", "float32", 16)
    assert built["seconds"] > 0
    assert not built["cached"]
    assert not built["warnings"]
    assert [entry["name"] for entry in built["entries"]] == list(KERNELS["fwd_1_naive"].entries)
    for entry in built["entries"]:
        assert entry["registers"] > 0
        assert entry["blocks_per_sm"] == Device.of("sm_80").blocks_resident(
            entry["block"], entry["registers"], entry["smem_bytes"]
        )
        assert entry["occupancy"] == entry["warps_per_sm"] / 64
    assert run_json("compile", "fwd_1_naive", *TINY, "--dtype", "float32")[0]["cached"]
    table = run("compile", "fwd_1_naive", *TINY, "--dtype", "float32").stdout
    assert "sm_80, float32, head dim 16" in table
    assert max(map(len, table.splitlines())) <= WIDTH


@nvrtc
def test_compile_takes_the_product_of_what_is_named():
    built = run_json(
        *("compile", "fwd_1_naive", "fwd_2_online_softmax", "--arch", "sm_80, compute_75"),
        *("--dtype", "float16", "--head-dim", "16"),
    )
    assert [(each["arch"], each["kernel"]) for each in built] == [
        ("sm_80", "fwd_1_naive"),
        ("sm_80", "fwd_2_online_softmax"),
        ("compute_75", "fwd_1_naive"),
        ("compute_75", "fwd_2_online_softmax"),
    ]
    assert built[2]["entries"] == []  # PTX has no registers yet


@nvrtc
def test_compile_of_variants_with_features():
    options = ("--causal", "--window", "--softcap", "--bias", "float32", "--mask", "bits", "--varlen")
    options += ("--page-size", "5")
    (built,) = run_json("compile", "fwd_4_flash_v2", *TINY, *options)
    assert built["causal"]
    assert built["features"] == ["window", "softcap", "bias", "mask", "cu_seqlens", "block_table"]
    assert built["entries"][0]["registers"] > 0
    table = run("compile", "fwd_4_flash_v2", *TINY, *options).stdout
    title = "sm_80, float16, head dim 16, causal, window, softcap, bias, mask, cu_seqlens, block_table"
    assert " ".join(table.split()).startswith(title)
    (plain,) = run_json("compile", "fwd_4_flash_v2", *TINY)
    assert plain["path"] != built["path"]
    assert "fwd_1_naive does not support alibi_slopes" in refused("compile", "fwd_1_naive", *TINY, "--alibi")
    assert "give --bias, too" in refused("compile", "fwd_1_naive", *TINY, "--dbias")
    assert "give --sink, too" in refused("compile", "fwd_1_naive", *TINY, "--dsink")
    assert "give --dbias, too" in refused("compile", "fwd_1_naive", *TINY, "--broadcast-bias")
    gradient = ("compile", "bwd_2_flash_v2", *TINY, "--bias", "float16", "--dbias")
    (own_sums,), (broadcast,) = run_json(*gradient), run_json(*gradient, "--broadcast-bias")
    assert own_sums["path"] != broadcast["path"]
    tf32 = ("--dtype", "float32", "--precision", "tf32")
    assert "float32 as tf32" in run("compile", "softmax", *TINY, *tf32).stdout
    assert "is for float32" in refused("compile", "fwd_4_flash_v2", *TINY, "--precision", "tf32")


@nvrtc
def test_compile_of_kernels_beside_the_ladder():
    built = run_json("compile", *COMPANIONS, *TINY, "--dtype", "bfloat16")
    for companion in built:
        (entry,) = companion["entries"]
        assert entry["name"] == companion["kernel"]
        assert entry["registers"] > 0
    assert "has no tiles to choose" in refused("compile", "merge", *TINY, "--tile", "block_m=32")


def test_all_kernels_are_those_of_the_ladder_and_those_beside_it(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    tried = run_json("compile", "--all", *TINY, "--deterministic", code=1)
    assert [each["kernel"] for each in tried] == [*KERNELS, *COMPANIONS]
    for each in tried:
        name = each["kernel"]
        row = KERNELS.get(name)
        lacks = row is not None and (
            row.only_arch is not None or (row.direction == "backward" and not row.features)
        )
        assert bool(each["skipped"]) == lacks, name


@nvrtc
def test_compile_of_8_bit_operands():
    kernels = ("fwd_5_mma", "fwd_7_fp8", "merge")
    rows = run_json("compile", *kernels, "--arch", "sm_90a", "--dtype", "float8_e4m3fn")
    mma, hopper, merge = rows
    assert [entry["name"] for entry in hopper["entries"]] == list(KERNELS["fwd_7_fp8"].entries)
    for row in (mma, merge):
        assert row["skipped"].endswith(
            "supports float16, bfloat16, float32 or float64, and the arrays are float8_e4m3fn"
        )


@nvrtc
def test_a_compile_is_announced_once_on_stderr(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "_builds", {})
    arguments = ("compile", "fwd_1_naive", "fwd_2_online_softmax", *TINY)
    for verbose, times in (((), 1), (("-v",), 2)):
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / str(times)))
        result = run(*verbose, *arguments, "--json")
        assert result.stderr.count("compiling") == times
        json.loads(result.stdout)
        jit._builds.clear()
    assert not any(isinstance(each, output._StderrHandler) for each in logging.getLogger("cufa").handlers)


@nvrtc
def test_emit_writes_code(tmp_path):
    assert ".target sm_80" in run("compile", "fwd_1_naive", *TINY, "--emit", "ptx").stdout
    run("compile", "fwd_1_naive", *TINY, "--emit", "cubin", "--output", tmp_path / "k.cubin")
    assert (tmp_path / "k.cubin").read_bytes().startswith(b"\x7fELF")
    (built,) = run_json("compile", "fwd_1_naive", *TINY, "--emit", "ptx", "--output", tmp_path / "k.ptx")
    assert built["entries"]
    assert ".target sm_80" in (tmp_path / "k.ptx").read_text()
    arguments = ("compile", "fwd_1_naive", "--head-dim", 16, "--arch", "compute_80")
    assert "has no cubin" in refused(*arguments, "--emit", "cubin", "--output", tmp_path / "x")
    assert "no machine code" in refused(*arguments, "--emit", "sass")


@nvrtc
def test_emit_sass():
    try:
        jit._nvdisasm()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert "EXIT" in run("compile", "fwd_1_naive", *TINY, "--emit", "sass").stdout


def test_compile_exits_with_1_when_a_kernel_fails(monkeypatch):
    def build(variant):
        raise cufa.CompileError("expected a ';'")

    monkeypatch.setattr(compile.jit, "build", build)
    result = run("compile", "fwd_1_naive", *TINY, code=1)
    assert "FAILED" in result.stdout
    assert "expected a ';'" in result.stderr
    (failed,) = run_json("compile", "fwd_1_naive", *TINY, code=1)
    assert failed["error"] == "expected a ';'"


def test_compile_says_what_to_install(monkeypatch):
    def build(variant):
        raise cufa.NVRTCMissingError("pip install NVRTC")

    monkeypatch.setattr(compile.jit, "build", build)
    assert "pip install NVRTC" in refused("compile", "fwd_1_naive", *TINY)


@nvrtc
def test_what_a_kernel_does_not_support_is_skipped():
    tiles = ("--tile", "block_m=32")
    built = run_json("compile", "fwd_1_naive", "fwd_3_flash_v1", *TINY, *tiles)
    assert "no tiles to choose" in built[0]["skipped"]
    assert built[1]["tiles"]["block_m"] == 32
    assert "skipped" in run("compile", "fwd_1_naive", "fwd_3_flash_v1", *TINY, *tiles).stdout
    assert "no tiles to choose" in refused("compile", "fwd_1_naive", *TINY, *tiles)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name kernels or give --all"),
        (("fwd_1_naive", "--all"), "name kernels or give --all"),
        (("fwd_1_naive",), "no GPU"),
        (("fwd_1_naive", "--arch", "fast"), "arch is 'fast'"),
        (("fwd_1_naive", "--arch", "sm_20"), "arch is 'sm_20'"),
        (("fwd_1_naive", "--arch", "sm_80", "--dtype", "int8"), "'int8' is not one of"),
        (("fwd_1_naive", "--arch", "sm_80", "--emit", "cubin"), "needs --output"),
        (("fwd_1_naive", "--arch", "sm_80", "--emit", "ptx", "--json"), "needs --output"),
        (("fwd_1_naive", "--arch", "sm_80", "--output", "x"), "give --emit"),
        (("--all", "--arch", "sm_80", "--emit", "ptx"), "--emit takes one kernel"),
        (("fwd_1_naive", "--arch", "sm_80,sm_90a", "--emit", "ptx"), "these are 2"),
    ],
)
def test_compile_refuses_what_makes_no_sense(arguments, message):
    assert message in refused("compile", *arguments)


# --- what they share


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (4.5e-5, "45.0 us"), (3e-9, "3.00 ns"), (123.4, "123 s")],
)
def test_seconds_in_words(value, text):
    assert output.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 2**30, "5.00 GiB")]
)
def test_sizes_in_words(value, text):
    assert output.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12345.6, "12,346"), (-2.5, "-2.50")],
)
def test_three_digits(value, text):
    assert output.three_digits(value) == text


def test_json_has_null_for_what_it_has_no_number_for():
    @click.command()
    def command():
        output.print_json({"values": [1.5, float("nan"), (float("inf"),)]})

    assert json.loads(CliRunner().invoke(command).stdout) == {"values": [1.5, None, [None]]}


def test_a_warning_of_the_library_is_shown_whole_and_once():
    @click.command()
    def command():
        with output.log_to_stderr(verbose=False):
            for _ in range(2):
                logging.getLogger("cufa").warning("the folder %s cannot be used", "x" * 200)

    result = CliRunner().invoke(command)
    assert result.stdout == ""
    assert result.stderr.replace("\n", "").count("x" * 200) == 1


def test_time_cpu_returns_the_first_result_and_the_median():
    calls = []

    def function():
        calls.append(len(calls))
        return calls[-1]

    result, timing = time_cpu(function, repeats=5)
    assert result == 0
    assert len(calls) == 6
    assert timing.repeats == 5
    assert 0 <= timing.best <= timing.median <= timing.worst


def test_time_cpu_does_not_repeat_what_takes_long(monkeypatch):
    monkeypatch.setattr(cufa.timing, "LONG_SECONDS", 0.0)
    calls = []
    _, timing = time_cpu(lambda: calls.append(1))
    assert len(calls) == timing.repeats == 1


# --- with a GPU


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
