"""`cufa ladder`."""

import pytest
from command_line import WIDTH, corrupt, refused, run, run_json

from cufa.cli import ladder
from cufa.problem import FLOAT8


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
    assert not any(line.endswith(" ") for line in shown.stdout.splitlines())
    assert "CPU, 1 thread" in shown.stdout
    assert "forward" not in shown.stdout


def test_ladder_with_features():
    sizes = ("--batch", 1, "--seqlen", 32, "--heads", 2, "--head-dim", 8, "--cpu-threads", 1)
    options = ("--window", "9,-1", "--softcap", 3, "--sink", "--deterministic")
    document = run_json("ladder", *sizes, *options)
    assert document["features"] == ["window", "softcap", "sink"]
    assert document["options"]["window"] == [9, None]
    assert document["options"]["softcap"] == 3
    for row, results in zip(document["rows"], (["out", "lse"], ["dq", "dk", "dv", "dsink"]), strict=True):
        assert [each["name"] for each in row["check"]["results"]] == results
        assert row["check"]["ok"]


def test_ladder_with_gradients_of_arrays(tmp_path):
    (tmp_path / "mods.py").write_text(
        "import cufa, numpy as np\n"
        "def scaled(score, b, h, q_idx, kv_idx, scales): return score * scales[h]\n"
        "mod = cufa.ScoreMod(scaled, np.ones(2, np.float32))\n"
    )
    sizes = ("--batch", 1, "--seqlen", 32, "--heads", 2, "--head-dim", 8, "--cpu-threads", 1)
    rows = run_json("ladder", *sizes, "--score-mod", f"{tmp_path / 'mods.py'}:mod")["rows"]
    results = [[each["name"] for each in row["check"]["results"]] for row in rows]
    assert results == [["out", "lse"], ["dq", "dk", "dv", "dscore_mod[0]"]]
    assert all(row["check"]["ok"] for row in rows)


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


def test_a_ladder_has_no_more_threads_than_cores():
    most = ladder.cores()
    message = f"--cpu-threads is {most + 1}, and there may be {most}, one per core"
    assert message in refused("ladder", "--cpu-threads", most + 1)


def test_a_ladder_cannot_be_causal_and_not():
    assert "only one of them" in refused("ladder", "--causal", "--no-causal")


@pytest.mark.parametrize("direction", ["backward", "both"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", FLOAT8), "float8_e4m3fn, which has no gradients"),
        (("--head-dim", 513), "head dim 513"),
    ],
)
def test_ladder_refuses_gradients_that_there_are_not(direction, options, message):
    assert message in refused("ladder", *options, "--seqlen", 16, "--direction", direction)
