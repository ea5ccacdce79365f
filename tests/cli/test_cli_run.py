"""`cufa run`: generated problems, arrays from files and what is refused."""

import errno
import io
import os
import sys
import threading
import zipfile

import numpy as np
import pytest
from command_line import LATENT, SMALL, WIDTH, corrupt, draw, refused, run, run_json

import cufa
from cufa import arrays
from cufa.cli import check, generated, main, workload
from cufa.problem import DTYPES, FLOAT8, INPUT_DTYPES, MAX_AXIS


def test_run_without_arguments_passes_and_reports():
    report = run("run").stdout
    assert "float32, batch 2, seqlen 512 x 512, heads 4, head dim 64" in report
    assert report.rstrip().endswith("PASS")
    for word in ("forward", "backward", "out", "lse", "dq", "dk", "dv", "every element", "CPU"):
        assert word in report


def test_run_says_what_it_runs_before_it_computes(monkeypatch):
    file, at_once = io.BytesIO(), []
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8"))
    genuine = cufa.attention

    def attention(*arrays, **options):
        at_once.append(file.getvalue().decode())
        return genuine(*arrays, **options)

    monkeypatch.setattr(cufa, "attention", attention)
    main(["run", *SMALL], standalone_mode=False)
    assert "on CPU" in at_once[0]
    assert at_once[0].endswith("forward float32, batch 1, seqlen 40 x 40, heads 2, head dim 8\n\n")


def test_what_is_wrapped_has_no_spaces_at_the_ends_of_lines(monkeypatch):
    monkeypatch.setattr(check, "MAX_SCORES", 1000)
    lines = run("run", *SMALL, "--bias", "random").stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "a random sample" in " ".join(lines)
    assert not any(line.endswith(" ") for line in lines)


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


def test_run_with_scores_too_large_for_the_dtype_fails_without_warnings(tmp_path, rng):
    np.save(tmp_path / "large.npy", 1e20 * rng.standard_normal((1, 6, 2, 8), np.float32))
    large = [part for name in "qkv" for part in (f"--{name}", tmp_path / "large.npy")]
    assert "lse[0, 0, 0] is nan" in run("run", *large, "--no-backward", code=1).stderr


def test_run_with_a_scale_whose_square_is_too_large():
    assert (
        "are too far off" in run("run", *SMALL, "--dtype", "float64", "--softmax-scale", 1e300, code=1).stderr
    )


@pytest.mark.parametrize("dtype", ["float16", FLOAT8])
def test_numbers_in_files_that_are_too_large_for_the_dtype_are_refused(tmp_path, dtype):
    numbers = np.full((1, 6, 2, 8), 1e5, np.float32)
    numbers[0, 0, 0] = np.inf  # may be intended
    np.save(tmp_path / "large.npy", numbers)
    large = [part for name in "qkv" for part in (f"--{name}", tmp_path / "large.npy")]
    assert f"large.npy: it has 100000.0, which is too large for {dtype}" in refused(
        "run", *large, "--dtype", dtype
    )
    run("run", *large, "--dtype", "bfloat16")


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


def test_the_widest_heads_have_gradients():
    document = run_json("run", "--seqlen", 40, "--heads", 1, "--head-dim", 576, "--value-dim", 512, "--dlse")
    assert document["check"]["ok"]
    assert [step["direction"] for step in document["steps"]] == ["forward", "backward"]


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
    assert document["options"]["descale"] == bool(descale)
    assert [result["name"] for result in document["check"]["results"]] == ["out", "lse"]
    assert document["check"]["ok"]
    assert document["check"]["coverage"].startswith("every element" if scores > 2000 else "a random sample")
    (point,) = run_json("bench", *eight_bits, "--seqlens", 32, "--batch", 1, "--repeats", 1)["points"]
    assert (point["direction"], point["dtype"]) == ("forward", FLOAT8)
    (row,) = run_json("ladder", *SMALL, *eight_bits, "--cpu-threads", 1)["rows"]
    assert row["check"]["ok"]
    assert "no gradients" in refused("run", *SMALL, *eight_bits, "--backward")
    packed = ("--varlen", "40,7:30", "--heads", 4, "--kv-heads", 2, "--head-dim", 16)
    assert run_json("run", *packed, *eight_bits)["check"]["ok"]
    (step,) = run_json("run", *SMALL, *eight_bits, "--bias", "random")["steps"]
    assert step["problem"]["bias_dtype"] == "bfloat16"


def test_keys_and_values_alone_in_8_bits(tmp_path):
    of_keys = ("--kv-dtype", FLOAT8)
    asked = ("--dtype", "bfloat16", *of_keys, "--descale")
    document = run_json("run", *SMALL, *asked)
    (step,) = document["steps"]
    assert (step["problem"]["dtype"], step["problem"]["kv_dtype"]) == ("bfloat16", FLOAT8)
    assert document["check"]["ok"]
    assert "k has dtype float8_e4m3fn, which has no gradients" in refused("run", *SMALL, *asked, "--backward")
    assert "k has dtype float8_e4m3fn and q float32" in refused("run", *SMALL, *of_keys)
    (point,) = run_json("bench", *asked, "--seqlens", 32, "--batch", 1, "--repeats", 1)["points"]
    assert point["direction"] == "forward"
    (row,) = run_json("ladder", *SMALL, *asked, "--cpu-threads", 1)["rows"]
    assert row["check"]["ok"]
    paths = [tmp_path / f"{name}.npy" for name in "qkv"]
    for path in paths:
        np.save(path, np.ones((1, 3, 2, 8), np.float32))
    files = [part for name, path in zip("qkv", paths, strict=True) for part in (f"--{name}", path)]
    (step,) = run_json("run", *files, "--dtype", "float16", *of_keys)["steps"]
    assert (step["problem"]["dtype"], step["problem"]["kv_dtype"]) == ("float16", FLOAT8)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_transposed_values(layout):
    asked = ("run", *SMALL, "--dtype", FLOAT8, "--transposed-values", "--layout", layout)
    assert run_json(*asked, "--backend", "numpy")["check"]["ok"]
    explained = run(*asked, "--head-dim", 64, "--seqlen", 64, "--arch", "sm_90a", "--explain").stdout
    assert "values transposed" in " ".join(explained.split())
    assert "neither packed (--varlen)" in refused(*asked, "--page-size", 16)


@pytest.mark.parametrize("dtypes", [(), ("--kv-dtype", FLOAT8, "--descale")], ids=" ".join)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--layout", "bhsd"),
        ("--varlen", "30,0,17:40"),
        ("--page-size", 16),
        ("--varlen", "30,0,17:40", "--page-size", 16),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_values_in_keys(monkeypatch, options, dtypes):
    attention = cufa.attention

    def of_values_in_keys(q, k, v, **others):
        assert arrays.values_in_keys(k, v)
        return attention(q, k, v, **others)

    asked = ("run", *LATENT, *options, "--dtype", "bfloat16", *dtypes)
    plans = run_json(*asked, "--no-backward", "--explain", "--arch", "sm_90a", "--kernel", "fwd_8_split_kv")
    assert "values are the beginnings of keys, which alone are read" in plans["forward"]["reasons"]
    monkeypatch.setattr(cufa, "attention", of_values_in_keys)
    document = run_json(*asked)
    assert document["check"]["ok"]
    assert all(step["problem"]["values_in_keys"] for step in document["steps"])
    has_gradients = not dtypes and "--page-size" not in options
    assert [step["direction"] for step in document["steps"]] == ["forward", "backward"][: 1 + has_gradients]
    assert "head dim 24/16, values in keys" in " ".join(run(*asked).stdout.split())


def test_values_that_lie_in_no_keys_are_refused():
    for command in ("run", "bench"):
        assert refused(command, *LATENT, "--value-dim", 25).endswith(
            "are the first columns of keys, and --value-dim 25 is more than --head-dim 24"
        )
        transposed = ("--dtype", FLOAT8, "--transposed-values")
        assert "--transposed-values and --values-in-keys: give one of them" in refused(
            command, *LATENT, *transposed
        )


@pytest.mark.parametrize("scores", [2**22, 1500])  # all of them, and a sample that has the first rows
@pytest.mark.parametrize(("index", "result"), [(0, "out"), (1, "lse")])
def test_8_bit_floats_that_are_wrong_are_found(monkeypatch, index, result, scores):
    monkeypatch.setattr(check, "MAX_SCORES", scores)
    corrupt(monkeypatch, "attention", index, lambda x: x + np.asarray(1, x.dtype))
    document = run_json("run", *SMALL, "--heads", 1, "--dtype", FLOAT8, code=1)
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
    said = f"error: {options[0]}: only for gradients, which --no-backward leaves out"
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
    assert message == (f"error: --dlse, --deterministic: only for gradients, which {left_out_by} leaves out")


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
    message = refused("run", "--kernel", "fwd")
    assert "'fwd' may stand for fwd_1_naive, " in message
    assert message.endswith("or fwd_10_wgmma_wide")
    assert "'fwd_' may stand for fwd_1_naive, " in refused("compile", "fwd_", "--arch", "sm_80")
    assert "bwd" not in refused("run", "--kernel", "fwd_0")
    assert "up to the number suffices" in " ".join(run("compile", "--help").stdout.split())


def test_json_has_what_was_asked_for():
    asked = ("--softmax-scale", 0.5, "--layout", "bhsd", "--seed", 7)
    document = run_json("run", *SMALL, *asked)
    assert [document[name] for name in ("softmax_scale", "layout", "seed")] == [0.5, "bhsd", 7]
    assert [step["asked"] for step in document["steps"]] == 2 * [dict.fromkeys(("kernel", "tiles", "arch"))]
    document = run_json("run", *SMALL, "--head-dim", 16)
    assert document["softmax_scale"] == 0.25
    assert document["steps"][0]["problem"]["precision"] == "ieee"


@pytest.mark.parametrize(
    "options",
    [
        ("--batch", MAX_AXIS, "--seqlen", MAX_AXIS, "--heads", MAX_AXIS),
        ("--seqlen", MAX_AXIS, "--bias", "random"),
        ("--seqlen", MAX_AXIS, "--mask", "random", "--batch", MAX_AXIS),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_arrays_that_no_memory_holds_are_out_of_memory(options):
    for command in (("run", "--explain", "--arch", "sm_90a"), ("run",)):
        message = run(*command, *options, code=1).stderr
        assert "out of memory: no memory holds an array of " in " ".join(message.split())


def test_what_only_describes_arrays_may_take_more_memory_than_there_is(monkeypatch):
    def too_much(_):
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setattr(generated, "alibi_slopes", too_much)
    result = run("run", *SMALL, "--alibi", "--explain", "--arch", "sm_90a", code=1)
    assert result.stderr.strip() == "error: out of memory: Unable to allocate 16.0 GiB"


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
    ("name", "value"), [("CUFA_ARCH", "fast"), ("CUFA_DEBUG", "yes"), ("CUFA_NVRTC_OPTIONS", "'")]
)
def test_what_would_not_compile_is_not_explained(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    arch = () if name == "CUFA_ARCH" else ("--arch", "sm_80")
    message = refused("run", *SMALL, "--explain", *arch)
    assert name in message
    assert value in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-dim", 577), "head dim 577"),
        (("--value-dim", 513), "head dim 513"),
        (("--heads", 5, "--kv-heads", 2), "must be a multiple of the key-value heads"),
        (("--softmax-scale", "inf"), "'--softmax-scale': inf is not finite"),
        (("--softmax-scale", ""), "'' is not a valid number"),
        (("--softmax-scale", 1e-60), "--softmax-scale is 1e-60; for float32 it must be 0 or"),
        (("--batch", -1), "-1 is not in the range"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--kernel", "fwd_0"), "'fwd_0' is not one of"),
        (("--kernel", "fwd_1_naive"), "it needs a GPU"),
        (("--arch", "sm_90"), "it needs a GPU"),
        (("--tile", "block_m=64"), "it needs a GPU"),
        (("--tile", "block_m"), "is not of the form NAME=N"),
        (("--tile", "block_m=32", "--tile", "block_m=64"), "block_m is given 2 times"),
        (("--tile", "block_m=-4"), "is not of the form NAME=N"),
        (("--backward", "--page-size", "8"), "--page-size is given; keys in pages have no gradients"),
        (("--backend", "cuda"), "no GPU"),
        (("--backend", "torch"), "'torch' is not one of"),
        (("--explain",), "--explain: there is no GPU to plan for; name an arch"),
        (("--explain", "--arch", "sm_999"), "arch is 'sm_999'"),
        (("--kernel", "bwd_1_naive"), "'--kernel': bwd_1_naive is a backward kernel"),
        (("--backward-kernel", "fwd_4"), "'--backward-kernel': fwd_4_flash_v2 is a forward kernel"),
        (("--tile", "block_m=64", "--tile", "block_n=8"), "--tile is 'block_m=64 block_n=8', but this call"),
        (("--backward-tile", "block_m=64"), "--backward-tile is 'block_m=64', but this call"),
        (("--explain", "--arch", "sm_80", "--tile", "block_q=4"), "error: --tile has block_q; it may have"),
        (("--explain", "--arch", "sm_80", "--backward-tile", "block_q=4"), "--backward-tile has block_q; it"),
        (("--explain", "--arch", "sm_80", "--kernel", "fwd_6"), "error: --kernel is 'fwd_6_wgmma': fwd_6_w"),
        (
            ("--explain", "--arch", "sm_80", "--backward-kernel", "bwd_4_wgmma"),
            "error: --backward-kernel is 'bwd_4_wgmma': bwd_4_wgmma supports float16",
        ),
        (("--explain", "--arch", "sm_80", "--softmax-scale", "1e39"), "--softmax-scale is 1e+39; for"),
        (
            ("--explain", "--arch", "sm_80", "--dropout", ".1", "--dropout-seed", 2**64),
            "--dropout-seed is 18446744073709551616; it must be",
        ),
        (("--layout", "sbhd"), "'sbhd' is not one of"),
        (("--out", "result.txt"), "must end with .npy or .npz"),
        (("--out", "nowhere/result.npy"), "there is no folder nowhere"),
        (("--out", "/proc/result.npy"), "--out /proc/result.npy: "),
        (("--k", "k.npy"), "--q, --v must be given, too"),
        (("--explain", "--arch", "sm_80", "--out", "out.npy"), "--explain runs nothing"),
        (("--explain", "--arch", "sm_80", "--backend", "numpy"), "there is no plan to print"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--dropout-seed", "7"), "give --dropout, too"),
    ],
)
def test_run_refuses_what_makes_no_sense(arguments, message):
    assert message in refused("run", *arguments)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (("--causal",), {"causal": True}),
        (("--window", "5,3"), {"window": (5, 3)}),
        (("--window", "-1,3", "--softcap", 2), {"window": (None, 3), "softcap": 2.0}),
        (("--softmax-scale", 0.5), {"softmax_scale": 0.5}),
        (("--dropout", 0.3, "--dropout-seed", 5), {"dropout_p": 0.3, "seed": 5}),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_files_in_and_a_file_out(qkv, files, tmp_path, options, arguments):
    run("run", *files, *options, "--out", tmp_path / "out.npy")
    expected = cufa.attention(*qkv, **arguments, backend="numpy")
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected)


def test_a_gradient_of_the_lse_adds_to_those_of_queries_and_keys(files, tmp_path):
    results = {}
    for options in ((), ("--dlse",)):
        run("run", *files, *options, "--out", tmp_path / "all.npz")
        with np.load(tmp_path / "all.npz") as archive:
            results[options] = dict(archive)
    without, added = results.values()
    changed = {name for name in without if not np.array_equal(without[name], added[name])}
    assert changed == {"dq", "dk"}


def test_no_result_is_written_over_what_is_read(qkv, files, tmp_path):
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "q.npy")
    for same in (tmp_path / "q.npy", tmp_path / "." / "q.npy", tmp_path / "hard.npy"):
        assert "--q is read from that file" in refused("run", *files, "--out", same)
    for name in ("bias", "mask"):
        given = f"--{name}", tmp_path / "k.npy"
        assert f"--{name} is read from that file" in refused("run", *given, "--out", tmp_path / "k.npy")
    for name, array in zip("qk", qkv, strict=False):
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), array)


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


def test_a_file_whose_name_reads_as_a_key_of_another_is_read(qkv, files, tmp_path):
    q, k, v = qkv
    np.savez(tmp_path / "in.npz", q=q)
    np.save(tmp_path / "in.npz:q.npy", 2 * q)
    run("run", *files, "--q", tmp_path / "in.npz:q.npy", "--out", tmp_path / "out.npy")
    assert np.array_equal(np.load(tmp_path / "out.npy"), cufa.attention(2 * q, k, v, backend="numpy"))


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
    report = run("run", *options, "--dtype", dtype, "--out", tmp_path / "out.npy").stdout
    assert "\nbfloat16 is stored as |V2; numpy.load(...).view(ml_dtypes.bfloat16) reads it\n" in report
    out = np.load(tmp_path / "out.npy").view(DTYPES["bfloat16"])
    assert np.array_equal(out, cufa.attention(*stored, backend="numpy"))


def test_8_bit_keys_beside_16_bit_queries_ask_for_their_own_dtype(qkv, tmp_path):
    q, k, v = qkv
    np.save(tmp_path / "q.npy", q.astype(np.float16))
    options = ["--q", tmp_path / "q.npy"]
    for name, array in {"k": k, "v": v}.items():
        np.save(tmp_path / f"{name}.npy", array.astype(INPUT_DTYPES[FLOAT8]))
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    assert refused("run", *options).endswith(f"add --kv-dtype {FLOAT8}")
    assert run_json("run", *options, "--kv-dtype", FLOAT8)["check"]["ok"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_from_a_file_keeps_its_dtype(tmp_path, dtype):
    np.save(tmp_path / "bias.npy", np.full((40, 40), -1e30, DTYPES[dtype]))
    forward, _ = run_json("run", *SMALL, "--dtype", "float16", "--bias", tmp_path / "bias.npy")["steps"]
    assert forward["problem"]["bias_dtype"] == dtype


def test_dtype_converts_files(qkv, files, tmp_path):
    report = run("run", *files, "--dtype", "float16", "--out", tmp_path / "out.npy").stdout
    assert "is stored as" not in report
    halves = [array.astype(np.float16) for array in qkv]
    assert np.array_equal(np.load(tmp_path / "out.npy"), cufa.attention(*halves, backend="numpy"))


@pytest.mark.parametrize("name", ["k", "dout"])
def test_files_of_several_dtypes_ask_for_one(files, tmp_path, name):
    np.save(tmp_path / "half.npy", draw(5, 2, 33 if name == "dout" else 47, 4, 16, dtype=np.float16))
    several = [*files, f"--{name}", tmp_path / "half.npy"]
    expected = f"--{name} has dtype float16 and --q float32; they must be the same; --dtype converts them"
    assert expected in refused("run", *several)
    assert "dtype" not in refused("run", *several, "--dtype", "float32")  # but of their shapes


def test_what_is_not_finite_is_counted(tmp_path, monkeypatch):
    q = draw(4, 1, 6, 2, 8)
    q[0, 2] = np.nan
    np.save(tmp_path / "q.npy", q)
    tensors = [part for name in "qkv" for part in (f"--{name}", tmp_path / "q.npy")]
    causal = ("run", *tensors, "--causal", "--no-backward")
    line = "\nNaN or infinite, as in float64: 64 of 96 of out, 8 of 12 of lse\n"
    assert line in run(*causal).stdout
    out, lse = run_json(*causal)["check"]["results"]
    assert (out["not_finite"], lse["not_finite"]) == (64, 8)
    assert "NaN" not in run("run", *SMALL).stdout
    corrupt(monkeypatch, "attention", 0, lambda value: np.nan)
    (out, _) = run_json("run", *SMALL, "--no-backward", code=1)["check"]["results"]
    assert (out["wrong"], out["not_finite"]) == (1, 0)


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


def _header(shape):
    """The beginning of an .npy file of that shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_unreadable_files_are_refused(files, tmp_path):
    bad = tmp_path / "bad.npy"
    assert "No such file" in refused("run", *files, "--q", bad)
    header = b"\x93NUMPY\x01\x00\x06\x00"
    too_long = _header((1, 10**23, 2, 8))
    headers = (header[:8], header + b"{'a':\n", header + b"{[]:3}", too_long)
    for content in (b"", b"no array", b"PK\x03\x04 no archive", *headers):
        bad.write_bytes(content)
        message = refused("run", *files, "--q", bad)
        assert "it is no .npy or .npz file of numbers" in message
        assert "unsafely" not in message
    np.save(bad, np.zeros(3))
    bad.write_bytes(bad.read_bytes()[:-8])
    assert "error: --q" in refused("run", *files, "--q", bad)
    assert "only an .npz file has arrays by name" not in refused("run", *files, "--q", tmp_path)
    assert "only an .npz file has arrays by name" in refused("run", *files, "--q", f"{tmp_path / 'k.npy'}:q")
    bad.write_text("no array, but text")
    assert "of numbers (it does not begin like one)" in refused("run", *files, "--q", bad)
    assert "--bias '': the file has no name" in refused("run", *SMALL, "--bias", "")


def test_a_file_that_claims_to_be_larger_than_memory_is_named(files, tmp_path):
    large = tmp_path / "large.npy"
    large.write_bytes(_header((1, 10**15, 8, 2)))
    message = " ".join(run("run", *files, "--q", large, code=1).stderr.split())
    assert f"--q {large}: out of memory: Unable to allocate" in message


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX's")
def test_an_array_may_come_from_a_pipe(qkv, files, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = (tmp_path / "q.npy").read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=[content], daemon=True)
    writer.start()
    run("run", *files, "--q", pipe, "--out", tmp_path / "out.NPY")
    writer.join()
    assert np.array_equal(np.load(tmp_path / "out.NPY"), cufa.attention(*qkv, backend="numpy"))


def test_a_full_disk_keeps_no_part_of_a_result(monkeypatch, tmp_path):
    def half(stream, *_, **__):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, suffix in (("save", "npy"), ("savez", "npz")):
        monkeypatch.setattr(np, name, half)
        result = run("run", *SMALL, "--out", tmp_path / f"out.{suffix}", code=1)
        assert result.stderr == f"error: --out {tmp_path / 'out'}.{suffix}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_numpy_writes_an_array(monkeypatch, tmp_path):
    def half(*_, **__):
        raise OSError("2560 requested and 512 written")  # NumPy's error, without a reason

    monkeypatch.setattr(np, "save", half)
    message = run("run", *SMALL, "--out", tmp_path / "out.npy", code=1).stderr
    assert message.endswith("out.npy: it cannot be written whole: 2560 requested and 512 written\n")


def test_a_kernel_that_can_be_kept_nowhere_is_no_traceback(monkeypatch):
    def kept_nowhere(*_, **__):
        raise OSError("compiled kernels can be kept neither here nor there")

    monkeypatch.setattr(cufa, "attention", kept_nowhere)
    assert run("run", *SMALL, code=1).stderr == (
        "error: compiled kernels can be kept neither here nor there\n"
    )


def test_an_npz_without_the_array_says_what_it_has(files, tmp_path):
    np.savez(tmp_path / "in.npz", a=np.zeros(3), b=np.zeros(3))
    assert "no array 'q' in the file; it has a, b" in refused("run", *files, "--q", tmp_path / "in.npz")
    assert "no array 'c'" in refused("run", *files, "--q", f"{tmp_path / 'in.npz'}:c")
    np.savez(tmp_path / "in.npz")
    assert "no array 'q' in the file; it has none" in refused("run", *files, "--q", tmp_path / "in.npz")
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        archive.writestr("q", "no array")
    assert "as 'q' is no array" in refused("run", *files, "--q", tmp_path / "in.npz")


def test_a_compressed_file_that_is_broken_is_refused(files, tmp_path):
    np.savez_compressed(tmp_path / "in.npz", q=np.random.default_rng(0).random(1000))
    content = bytearray((tmp_path / "in.npz").read_bytes())
    content[100:200] = bytes(100)
    (tmp_path / "in.npz").write_bytes(content)
    assert "it is no .npy or .npz file" in refused("run", *files, "--q", tmp_path / "in.npz")
    with zipfile.ZipFile(tmp_path / "in.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.write(tmp_path / "q.npy", "q.npy")
    content = bytearray((tmp_path / "in.npz").read_bytes())
    content[100:200] = bytes(100)
    (tmp_path / "in.npz").write_bytes(content)
    assert "it is no .npy or .npz file" in refused("run", *files, "--q", tmp_path / "in.npz")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 33, 4, 16), np.int32), "q has dtype int32"),
        (np.zeros((2, 33, 4), np.float32), "q has shape (2, 33, 4)"),
        (np.zeros((2, 33, 3, 16), np.float32), "q has 3 heads and k 2"),
        (np.zeros((2, 33, 4, 16), np.float64), "--k has dtype float32 and --q float64; they must"),
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
    assert "--kv-heads cannot go with files, which give the sizes" in refused("run", *files, "--kv-heads", 2)


def test_a_gpu_that_is_there_is_used_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(arrays, "gpu_usable", lambda: True)
    assert workload.use_gpu(None)
    assert not workload.use_gpu("numpy")


def test_what_only_a_gpu_has_is_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(generated, "_draw", None)
    for name, given, shown in (
        ("--kernel", "fwd_4", "'fwd_4_flash_v2'"),
        ("--backward-tile", "block_m=64", "'block_m=64'"),
        ("--arch", "sm_80", "'sm_80'"),
    ):
        message = refused("run", "--backend", "numpy", name, given)
        assert message == f"error: {name} is {shown}, but this call computes on the CPU; it needs a GPU"


def test_arrays_that_exceed_the_machines_memory_are_not_drawn(monkeypatch):
    monkeypatch.setattr(generated, "_memory_bytes", lambda: 2**20)
    message = run("run", "--backend", "numpy", "--seqlen", 10_000, code=1).stderr
    assert message == "error: out of memory: the arrays take 78.1 MiB, and the machine has 1.00 MiB\n"
