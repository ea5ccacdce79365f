"""The options for features, on all commands that have them."""

import json
import sys
from dataclasses import replace

import click
import numpy as np
import pytest
from click.testing import CliRunner
from command_line import HEADS, ON_EACH, SMALL, corrupt, draw, refused, run, run_json

import cufa
from cufa.cli import check, generated
from cufa.cli import run as run_command
from cufa.cli.functions import mods_at
from cufa.cli.options import FeatureOptions, feature_options
from cufa.cli.options import arguments as arguments_of
from cufa.kernels import KERNELS
from cufa.plan import rungs
from cufa.problem import Problem


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


MODS = """
import cufa
import numpy as np

def decay(score, b, h, q_idx, kv_idx):
    return score - 0.1 * np.abs(q_idx - kv_idx)

def near(b, h, q_idx, kv_idx):
    return np.abs(q_idx - kv_idx) <= 5 + h

def failing(score, b, h, q_idx, kv_idx):
    return missing * score

def leaving(b, h, q_idx, kv_idx):
    raise SystemExit(4)

number = 3
with_arrays = cufa.ScoreMod(lambda score, b, h, q_idx, kv_idx, slopes: score * slopes[h], np.ones(4))
relative = cufa.ScoreMod(
    lambda score, b, h, q_idx, kv_idx, middle, table: score + table[h, q_idx - kv_idx + middle[0]],
    np.array([255]),
    np.linspace(-1, 1, 4 * 511, dtype=np.float32).reshape(4, 511),
)
of_integers = cufa.ScoreMod(lambda score, b, h, q_idx, kv_idx, levels: score + levels[h], np.arange(4))
"""


@pytest.fixture
def mods(tmp_path):
    (tmp_path / "mods.py").write_text(MODS)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(3)")
    return tmp_path / "mods.py"


def test_functions_on_scores(mods):
    options = ("--score-mod", f"{mods}:decay", "--mask-mod", f"{mods}:near")
    document = run_json("run", *HEADS, *options)
    assert document["check"]["ok"]
    assert document["steps"][1]["features"] == ["score_mod", "mask_mod"]
    assert "return" not in str(document)  # as the functions' C++ has it
    plan = run_json("run", *HEADS, *options, "--explain", "--arch", "sm_80", "--no-backward")["forward"]
    assert [launch["entry"] for launch in plan["launches"]] == ["seen_tiles", "fwd_5_mma"]
    points = run_json("bench", "--seqlens", 16, "--tokens", 16, "--repeats", 1, *options)["points"]
    assert [point["features"] for point in points] == 2 * [["score_mod", "mask_mod"]]


def test_functions_that_read_arrays(mods):
    options = ("--score-mod", f"{mods}:with_arrays")
    document = run_json("run", *HEADS, *options)
    assert document["check"]["ok"]
    assert document["steps"][1]["features"] == ["score_mod", "dscore_mod"]
    plans = run_json("run", *HEADS, *options, "--explain", "--arch", "sm_80")
    assert plans["forward"]["kernel"] == "fwd_5_mma"
    assert plans["backward"]["launches"][-1]["entry"] == "array_gradients"
    variant, *_ = run_json("compile", "fwd_6_wgmma", "--arch", "sm_90a", *options)
    assert variant["features"] == ["score_mod"]


def test_gradients_of_arrays_that_a_function_reads(mods, files, qkv, tmp_path):
    """Of those of floats, beside the others."""
    options = (*files, "--bias", "random", "--score-mod", f"{mods}:relative")
    document = run_json("run", *options, "--out", tmp_path / "all.npz")
    assert document["check"]["coverage"] == "every element"
    assert document["check"]["ok"]
    names = ["out", "lse", "dq", "dk", "dv", "dbias", "dscore_mod[1]"]
    assert [result["name"] for result in document["check"]["results"]] == names
    with np.load(tmp_path / "all.npz") as results:
        assert list(results) == names
        assert results["dscore_mod[1]"].shape == (4, 511)
        assert np.all(results["dscore_mod[1]"][:, 255 - 46 : 255 + 33] != 0)
    bench = ("bench", "--seqlens", 16, "--tokens", 16, "--repeats", 1, "--score-mod", f"{mods}:relative")
    points = run_json(*bench)["points"]
    assert [point["features"] for point in points] == [["score_mod"], ["score_mod", "dscore_mod"]]


def test_functions_without_gradients_of_arrays(mods):
    """Integers have none, and what has the same bits in every run has none of floats."""
    for options, features in (
        (("--score-mod", f"{mods}:of_integers"), ["score_mod"]),
        (("--score-mod", f"{mods}:relative", "--deterministic"), ["score_mod", "deterministic"]),
    ):
        document = run_json("run", *HEADS, *options)
        assert document["steps"][1]["features"] == features
        assert [result["name"] for result in document["check"]["results"]] == ["out", "lse", "dq", "dk", "dv"]
        plan = run_json("run", *HEADS, *options, "--explain", "--arch", "sm_80")["backward"]
        assert "array_gradients" not in [launch["entry"] for launch in plan["launches"]]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{mods}", "it is not of the form FILE:NAME, as in mods.py:decay"),
        ("{mods}:", "it is not of the form FILE:NAME"),
        (":near", "it is not of the form FILE:NAME"),
        ("{mods}:x:near", "No such file or directory"),
        ("{mods}:number", "the file has no function 'number'"),
        ("{mods}:with_arrays", "it is a cufa.score_mod.ScoreMod, which is for the other option"),
        ("{mods.parent}/broken.py:decay", "ZeroDivisionError: division by zero"),
        ("{mods.parent}/leaving.py:decay", "SystemExit: 3"),
        ("{mods}:leaving", "SystemExit: 4"),
    ],
)
def test_functions_that_there_are_not(mods, place, message):
    place = place.format(mods=mods)
    assert f"--mask-mod {place}: {message}" in refused("run", *SMALL, "--mask-mod", place)


def test_a_file_of_functions_may_import_those_beside_it(mods):
    """As it runs, and as a function is traced."""
    (mods.parent / "strides_of_heads.py").write_text("STRIDE = 3")
    (mods.parent / "reach_of_heads.py").write_text("REACH = 5")
    importing = mods.parent / "importing.py"
    importing.write_text(
        "from strides_of_heads import STRIDE\n"
        "def near(b, h, q_idx, kv_idx):\n"
        "    from reach_of_heads import REACH\n"
        "    return (q_idx - kv_idx <= REACH) & (kv_idx % STRIDE != 2)\n"
    )
    before = list(sys.path)
    assert run_json("run", *SMALL, "--mask-mod", f"{importing}:near")["check"]["ok"]
    assert sys.path == before


def test_what_a_file_of_functions_prints_is_no_output_of_the_command(mods):
    with mods.open("a") as file:
        file.write(
            "print('read')\ndef talking(b, h, q_idx, kv_idx):\n    print('traced')\n    return h < 9\n"
        )
    for command in (("run", *SMALL), ("compile", "fwd_5_mma", "--arch", "sm_80")):
        result = run(*command, "--mask-mod", f"{mods}:talking", "--json")
        json.loads(result.stdout)
        assert "read\ntraced\n" in result.stderr
        mods_at.cache_clear()


def test_functions_that_cannot_be_traced(mods):
    for command in (("run", *SMALL), ("compile", "fwd_5_mma", "--arch", "sm_80")):
        assert "it is called with (b, h, q_idx, kv_idx)" in refused(*command, "--mask-mod", f"{mods}:decay")
        message = f"--score-mod {mods}:failing: NameError: name 'missing' is not defined"
        assert message in refused(*command, "--score-mod", f"{mods}:failing")


def test_run_of_packed_sequences():
    sizes = ("--varlen", "30,0,17:40", "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
    document = run_json("run", *sizes, "--bias", "random", "--mask", "random-bits", "--causal")
    forward, _ = document["steps"]
    assert (forward["problem"]["batch"], forward["problem"]["seqlen_q"]) == (3, 47)
    assert document["check"]["ok"]
    each = [Problem("forward", "float32", 1, *n, 4, 2, 8, 8, True).flops for n in ((30, 30), (17, 40))]
    assert forward["tflops"] == pytest.approx(sum(each) / forward["seconds"] / 1e12)
    assert "--seqlen cannot go with --varlen, which gives the sizes" in refused("run", *sizes, "--seqlen", 30)


def test_the_plan_of_packed_sequences_knows_the_longest():
    asked = ("--heads", 16, "--head-dim", 128, "--dtype", "bfloat16", "--causal", "--explain")
    one_long = ",".join(["8192", *["128"] * 64])
    plans = run_json("run", "--varlen", one_long, *asked, "--arch", "sm_90a")
    assert plans["forward"]["tiles"]["block_m"] == 128


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


def test_no_more_keys_of_packed_sequences_count_than_there_are_though_pages_have_room(tmp_path):
    sizes = ("--varlen", "3:30,2:5", "--heads", 2, "--head-dim", 8, "--page-size", 16, "--bias", "random")
    outputs = []
    for option in ((), ("--seqused-k", "50,50"), ("--seqused-k", "50,3")):
        document = run_json("run", *sizes, *option, "--out", tmp_path / "out.npy")
        assert document["check"]["ok"]
        outputs.append(np.load(tmp_path / "out.npy"))
    all_keys, more, fewer = outputs
    np.testing.assert_array_equal(more, all_keys)
    np.testing.assert_array_equal(fewer[:3], all_keys[:3])
    assert not np.array_equal(fewer[3:], all_keys[3:])


def test_keys_in_pages_have_no_gradients_and_come_from_no_file(tmp_path):
    asked = ("run", *HEADS, "--page-size", 7)
    assert "only for gradients, which --page-size leaves out" in refused(*asked, "--dlse")
    assert "keys in pages have no gradients" in refused(*asked, "--backward")
    np.save(tmp_path / "x.npy", draw(0, 2, 3, 2, 8))
    files = [word for name in "qkv" for word in (f"--{name}", tmp_path / "x.npy")]
    for option in (("--page-size", 7), ("--transposed-values",), ("--values-in-keys",)):
        assert f"{option[0]} is of generated arrays" in refused("run", *files, *option)


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


def test_run_exits_with_1_when_the_gradient_of_an_array_is_wrong(mods, monkeypatch):
    genuine = cufa.attention_backward

    def corrupted(*arguments, **options):
        *others, (of_integers, of_floats) = genuine(*arguments, **options)
        of_floats[1, 255] += 0.1
        return *others, (of_integers, of_floats)

    monkeypatch.setattr(cufa, "attention_backward", corrupted)
    verdict = run_json("run", *HEADS, "--score-mod", f"{mods}:relative", code=1)["check"]
    assert [each["name"] for each in verdict["results"] if not each["ok"]] == ["dscore_mod[1]"]


def test_a_sample_has_no_gradients_of_arrays(mods, monkeypatch):
    """All scores may be read by the same element."""
    monkeypatch.setattr(check, "MAX_SCORES", 200)
    verdict = run_json("run", *HEADS, "--score-mod", f"{mods}:relative")["check"]
    assert verdict["coverage"].endswith(" of 188 keys, no gradients of score_mod's arrays")
    assert [result["name"] for result in verdict["results"]] == ["out", "lse", "dq", "dk", "dv"]
    assert "score_mod" not in run_json("run", *HEADS, "--score-mod", f"{mods}:decay")["check"]["coverage"]


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


def test_results_of_tokens_after_the_packed_sequences_are_0(monkeypatch, tmp_path):
    """Whatever the memory had in their place."""
    genuine = np.empty

    def with_nan(*arguments, **options):
        made = genuine(*arguments, **options)
        if np.issubdtype(made.dtype, np.floating):
            made.fill(np.nan)
        return made

    np.save(tmp_path / "tokens.npy", draw(1, 16, 2, 8))
    files = [part for name in "qkv" for part in (f"--{name}", tmp_path / "tokens.npy")]
    monkeypatch.setattr(np, "empty", with_nan)
    run("run", *files, "--varlen", "4:3,4:2", "--out", tmp_path / "all.npz")
    with np.load(tmp_path / "all.npz") as results:
        ends = {"out": 8, "dq": 8, "dk": 5, "dv": 5}
        for name, end in ends.items():
            assert np.all(results[name][:end] != 0), name
            assert np.all(results[name][end:] == 0), name
        assert np.all(results["lse"][:, :8] != 0)
        assert np.all(results["lse"][:, 8:] == 0)


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
    assert asked["reasons"][0] == "fwd_1_naive: chosen by the caller"
    message = refused(*call, "--arch", "sm_80", "--kernel", "fwd_1_naive", "--softcap", 3, "--sink")
    assert "fwd_1_naive does not support softcap, sink" in message


def test_a_gpu_call_is_refused_before_anything_takes_memory(monkeypatch):
    monkeypatch.setattr(run_command, "use_gpu", lambda backend: True)
    monkeypatch.setattr(generated, "normal", None)
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    message = refused("run", *SMALL, "--sink", "--backward-kernel", "bwd_1_naive")
    assert "bwd_1_naive does not support sink, dsink" in message


def test_what_no_kernel_supports_is_refused_with_the_reason_of_each_that_takes_the_dtype(monkeypatch):
    without = {name: replace(kernel, features=frozenset()) for name, kernel in KERNELS.items()}
    monkeypatch.setattr(rungs, "KERNELS", without)
    monkeypatch.setattr(generated, "normal", None)  # nothing is drawn
    message = refused("run", *SMALL, "--explain", "--arch", "sm_90a", "--alibi")
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
        (("--window", "3,-2"), "'3,-2': each side may be 0 to 2147483647, or -1 for all"),
        (("--window", "99999999999,0"), "'99999999999,0': each side may be 0 to 2147483647"),
        (("--softcap", "-1"), "-1.0 is not in the range"),
        (("--dropout", "1"), "1.0 is not in the range"),
        (("--dropout", "0.1", "--dropout-seed", "-1"), "'--dropout-seed': -1 is not in the range"),
        (("--dropout", "0.1", "--dropout-seed", 2**64), f"--dropout-seed is {2**64}; it must be"),
        (("--varlen", "3,x"), "'x' is no length"),
        (("--varlen", "3:-1"), "'3:-1' is no length"),
        (("--varlen", "3:,4"), "'3:' is no length"),
        (("--varlen", "30", "--layout", "bhsd"), "packed sequences must be in 'bshd'"),
        (("--dropout", "nan"), "'--dropout': nan is not finite"),
        (("--page-size", "1000000000", "--varlen", "1:3,1:4,1:5"), "full pages have room for 3,000,000,000"),
        (("--seqused-k", "3"), "--seqused-k has 1 number for 2 sequences; give one for each"),
        (("--seqused-k", "3,x"), "'x' is not a valid integer."),
        (("--seqused-k", "3,2147483647"), "2147483647 is too large; there may be 2147450879"),
        (("--page-size", "2147450880"), "2147450880 is too large; there may be 2147450879"),
        (("--varlen", "3:99999999999999999999"), "99999999999999999999 is too large; there may be"),
        (("--batch", "99999999999999999999"), "99999999999999999999 is too large; there may be"),
        (("--page-size", "-1"), "-1 is not in the range"),
    ],
)
def test_features_that_make_no_sense_are_refused(arguments, message):
    assert message in refused("run", *arguments)


def test_alibi_slopes_are_powers_of_one_half():
    np.testing.assert_array_equal(generated.alibi_slopes(8), 0.5 ** np.arange(1, 9))


@pytest.mark.parametrize(
    "features",
    [
        FeatureOptions(),
        FeatureOptions(window=(3, None), softcap=2.5, alibi=True, deterministic=True, descale=True),
        FeatureOptions(kv_dtype="float8_e4m3fn", values_in_keys=True),
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
