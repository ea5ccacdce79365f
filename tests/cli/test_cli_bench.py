"""`cufa bench`."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import LATENT, WIDTH, corrupt, refused, run, run_json

import cufa
from cufa.cli import bench, generated, output
from cufa.problem import FLOAT8, Problem


def test_bench_prints_a_row_for_each_length_and_direction(tmp_path):
    arguments = ("bench", "--seqlens", "16,32", "--tokens", 64, "--hidden", 32, "--head-dim", 16)
    document = run_json(*arguments, "--repeats", 2, "--causal", "--dtype", "float16")
    points = [(each["seqlen_k"], each["batch"], each["direction"]) for each in document["points"]]
    assert points == [
        *((16, 4, "forward"), (16, 4, "backward")),
        *((32, 2, "forward"), (32, 2, "backward")),
    ]
    for each in document["points"]:
        assert (each["heads"], each["dtype"], each["causal"], each["repeats"]) == (2, "float16", True, 2)
        problem = Problem(
            each["direction"],
            "float16",
            each["batch"],
            each["seqlen_k"],
            each["seqlen_k"],
            2,
            2,
            16,
            16,
            True,
        )
        assert each["tflops"] == pytest.approx(problem.flops / each["seconds"] / 1e12)
        bytes_moved = each["gigabytes_per_second"] * 1e9 * each["seconds"]
        arrays = 4 if each["direction"] == "forward" else 8
        assert bytes_moved == pytest.approx(arrays * 64 * 2 * 16 * 2 + 64 * 2 * 4)
    table = run(*arguments, "--repeats", 1, "--direction", "forward")
    assert max(map(len, table.stdout.splitlines())) <= WIDTH
    assert table.stdout.count("forward") == 2
    assert table.stderr == ""


def test_bench_keeps_what_it_measured_when_memory_runs_out(tmp_path):
    sizes = ("--seqlens", "16,2000000000", "--batch", 1, "--heads", 1, "--head-dim", 8)
    options = ("--causal", "--sink", "--repeats", 1, "--direction", "forward", "--backend", "numpy")
    document = run_json("bench", *sizes, *options)
    measured, without = document["points"]
    assert (measured["seqlen_k"], without["seqlen_k"]) == (16, 2_000_000_000)
    assert measured["seconds"] > 0
    assert without["seconds"] is without["tflops"] is None
    assert (without["causal"], without["features"]) == (True, ["sink"])
    assert (measured["note"], without["note"].partition(":")[0]) == ("", "out of memory")


def test_bench_exits_with_1_and_plots_nothing_when_memory_suffices_for_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ("--seqlens", "2000000000", "--batch", 1, "--heads", 1, "--head-dim", 8)
    plot = tmp_path / "plot.svg"
    shown = run("bench", *sizes, "--causal", "--direction", "forward", "--plot", plot, code=1)
    assert "float32 causal" in shown.stdout
    assert "out of memory" in shown.stdout
    assert shown.stderr == f"--plot {plot}: nothing was measured to plot\n"
    assert not plot.exists()


def test_bench_shows_and_plots_what_it_measured_before_an_interrupt(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    make = bench.make_arrays

    def interrupted(problem, *others):
        if problem.seqlen_k == 32:
            raise KeyboardInterrupt
        return make(problem, *others)

    monkeypatch.setattr(bench, "make_arrays", interrupted)
    plot = tmp_path / "plot.png"
    sizes = ("--seqlens", "16,32", "--batch", 1, "--heads", 1, "--head-dim", 8)
    shown = run("bench", *sizes, "--repeats", 1, "--plot", plot, "--backend", "numpy", code=130)
    assert shown.stdout.count("numpy") == 2  # forward and backward
    assert plot.exists()


def test_bench_prints_after_the_progress_bar_which_may_be_on_the_same_terminal(monkeypatch):
    @contextlib.contextmanager
    def bar(total):
        yield lambda _: None
        print("the bar ends")

    monkeypatch.setattr(output, "progress", bar)
    sizes = ("--seqlens", "16", "--batch", 1, "--heads", 1, "--head-dim", 8)
    shown = run("bench", *sizes, "--repeats", 1, "--backend", "numpy").stdout
    assert shown.startswith("the bar ends\nCPU")


def test_bench_of_features():
    arguments = ("bench", "--seqlens", "16,300", "--batch", 1, "--heads", 2, "--head-dim", 8, "--repeats", 1)
    options = ("--window", "100,0", "--sink", "--bias", "random", "--mask", "random-bits", "--dropout", 0.2)
    points = run_json(*arguments, *options)["points"]
    assert len(points) == 4
    for each in points:
        names = ["window", "bias", "mask", "sink", "dropout_p"]
        names += ["dbias", "dsink"] if each["direction"] == "backward" else []
        assert each["features"] == names
        length = each["seqlen_k"]
        seen = sum(min(i + 1, 101) for i in range(length))
        per_pair = 2 * 2 * 8 * (2 if each["direction"] == "forward" else 5)
        assert each["tflops"] * 1e12 * each["seconds"] == pytest.approx(seen * per_pair)
        scores = 2 * length * length * 4, 2 * length * -(-length // 8)
        times = 1 if each["direction"] == "forward" else 2
        tensors = 4 * times * length * 2 * 8 * 4 + 2 * length * 4
        moved = each["gigabytes_per_second"] * 1e9 * each["seconds"]
        assert moved == pytest.approx(tensors + times * scores[0] + scores[1])
    shown = run(*arguments, *options, "--direction", "forward").stdout
    assert "with window (100, 0), bias, mask, sink, dropout_p" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_bench_tells_all_that_was_asked_for():
    arguments = ("bench", "--seqlens", 32, "--batch", 1, "--heads", 2, "--head-dim", 16, "--repeats", 1)
    keys = ("--dtype", "bfloat16", "--kv-dtype", FLOAT8, "--descale", "--layout", "bhsd", "--seed", 3)
    document = run_json(*arguments, *keys, "--softcap", 2)
    (point,) = document["points"]
    assert (point["dtype"], point["kv_dtype"]) == ("bfloat16", FLOAT8)
    assert (document["layout"], document["seed"]) == ("bhsd", 3)
    assert (document["options"]["descale"], document["options"]["softcap"]) == (True, 2)
    assert "layout bhsd, heads 2, head dim 16, with softcap, descales" in " ".join(
        run(*arguments, *keys, "--softcap", 2).stdout.split()
    )
    transposed = ("--dtype", FLOAT8, "--transposed-values")
    assert run_json(*arguments, *transposed)["points"][0]["transposed_values"]
    assert "values transposed" in " ".join(run(*arguments, *transposed).stdout.split())


def test_bench_of_values_in_keys():
    arguments = ("bench", "--seqlens", 32, "--batch", 1, *LATENT, "--repeats", 1)
    points = run_json(*arguments)["points"]
    keys, others = 24 * 32 * 4, (4 * 24 + 4 * 16) * 32 * 4 + 4 * 32 * 4  # q and out, lse
    gradients = (4 * 24 + 24 + 16 + 4 * 16) * 32 * 4  # and dout
    for point, moved in zip(points, (keys + others, keys + others + gradients), strict=True):
        assert point["values_in_keys"]
        assert point["gigabytes_per_second"] * 1e9 * point["seconds"] == pytest.approx(moved)
    assert "head dim 24/16, values in keys" in " ".join(run(*arguments).stdout.split())


def test_a_causal_window_is_told_with_its_sizes():
    sizes = ("--batch", 1, "--heads", 1, "--head-dim", 8, "--causal", "--window", "3,-1")
    bench_of = ("bench", "--seqlens", 16, "--repeats", 1, "--direction", "forward")
    (point,) = run_json(*bench_of, *sizes)["points"]
    (step,) = run_json("run", "--seqlen", 16, *sizes, "--no-backward")["steps"]
    for problem in (point, step["problem"]):
        assert (problem["causal"], problem["window"]) == (True, [3, 0])
    for command in (bench_of, ("run", "--seqlen", 16, "--no-backward")):
        shown = " ".join(run(*command, *sizes).stdout.split())
        assert "float32 causal, " in shown
        assert "with window (3, 0)" in shown


def test_bench_of_packed_sequences():
    arguments = ("bench", "--varlen", "30,50:20", "--heads", 2, "--head-dim", 8, "--repeats", 1)
    (point,) = run_json(*arguments, "--direction", "forward", "--seqused-k", "9,9")["points"]
    assert (point["batch"], point["seqlen_q"], point["seqlen_k"]) == (2, 80, 50)
    assert point["features"] == ["cu_seqlens", "seqused_k"]
    assert "tokens batch" in " ".join(run(*arguments, "--direction", "forward").stdout.split())
    flops = 2 * 2 * 2 * 8 * (30 * 9 + 50 * 9)  # keys that do not count are not counted
    assert point["tflops"] * 1e12 * point["seconds"] == pytest.approx(flops)
    assert "--tokens cannot go with --varlen, which gives the sizes" in refused(*arguments, "--tokens", 64)


def test_bench_counts_no_more_used_keys_than_there_are():
    arguments = ("bench", "--varlen", "3:5,2:4", "--seqused-k", "50,40", "--heads", 2, "--head-dim", 8)
    (point,) = run_json(*arguments, "--repeats", 1, "--direction", "forward")["points"]
    assert point["tflops"] * 1e12 * point["seconds"] == pytest.approx(2 * 2 * 2 * 8 * (3 * 5 + 2 * 4))


def test_threads_draw_the_same_numbers_however_many_they_are(monkeypatch):
    monkeypatch.setattr(generated, "_DRAWN_AT_ONCE", 7)
    drawn = []
    for cores in (1, 5):
        monkeypatch.setattr(generated, "cores", lambda cores=cores: cores)
        drawn.append(generated.normal(np.random.default_rng(0), (3, 11, 2), np.dtype(np.float16)))
    np.testing.assert_array_equal(*drawn)
    assert len(np.unique(drawn[0])) > 60
    assert abs(drawn[0].mean()) < 0.5


def test_bench_has_sizes_of_its_own(monkeypatch):
    monkeypatch.setattr(bench, "_ON_CPU", replace(bench._ON_CPU, seqlens=(16,), tokens=32))
    points = run_json("bench", "--repeats", 1)["points"]
    assert [(each["seqlen_k"], each["batch"], each["heads"]) for each in points] == [(16, 2, 4)] * 2
    point, *_ = run_json("bench", "--repeats", 1, "--batch", 3, "--heads", 2, "--kv-heads", 1)["points"]
    assert (point["batch"], point["heads"], point["kv_heads"]) == (3, 2, 1)


def test_bench_of_a_length_over_its_own_number_of_tokens_has_one_sequence(monkeypatch):
    monkeypatch.setattr(bench, "_ON_CPU", replace(bench._ON_CPU, tokens=8))
    arguments = ("--seqlens", 16, "--heads", 2, "--head-dim", 8, "--repeats", 1)
    assert [each["batch"] for each in run_json("bench", *arguments)["points"]] == [1, 1]


def test_bench_of_few_queries_and_many_keys():
    arguments = ("bench", "--seqlens", "40,300", "--seqlen-q", 2, "--tokens", 600, "--heads", 2)
    points = run_json(*arguments, "--repeats", 1)["points"]
    sizes = [(each["batch"], each["seqlen_q"], each["seqlen_k"]) for each in points]
    assert sizes == [(15, 2, 40), (15, 2, 40), (2, 2, 300), (2, 2, 300)]
    assert "2 x 300" in run(*arguments, "--repeats", 1, "--direction", "forward").stdout
    assert "--seqlen-q cannot go with --varlen" in refused("bench", "--varlen", 8, "--seqlen-q", 2)


def test_bench_of_a_length_of_0():
    """`run` takes it, too."""
    points = run_json("bench", "--seqlens", "0,16", "--tokens", 32, "--repeats", 1)["points"]
    assert [each["seqlen_k"] for each in points] == [0, 0, 16, 16]


def test_bench_of_several_tiles_leaves_out_those_that_do_not_fit(monkeypatch):
    genuine = cufa.attention

    def attention(*arrays, tiles, **options):
        if tiles["block_m"] == 4096:
            raise ValueError("tiles 4096x16 do not fit")
        return genuine(*arrays, **options)

    arguments = ("bench", "--seqlens", "16", "--tokens", 16, "--repeats", 1, "--direction", "forward")
    tiles = ("--tile", "block_m=32,64", "--tile", "block_n=16", "--tile", "block_m=4096")
    monkeypatch.setattr(cufa, "attention", attention)
    monkeypatch.setattr(bench, "refuse_on_cpu", lambda _: None)
    result = run(*arguments, *tiles)
    assert result.stderr == "left out: tiles 4096x16 do not fit\n"
    shown = " ".join(result.stdout.split())
    assert "block_m 32, " in shown
    assert "block_m 64, " in shown
    assert "do not fit" in refused(*arguments, "--tile", "block_m=4096")


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

    for place in ("generated.normal", "check.check"):
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
    rungs = bench._rungs(direction, kernels, [{}], None)
    assert [(way, rung.kernel) for way, rung in rungs] == expected


def test_bench_writes_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("bench", "--seqlens", "0,16,32", "--tokens", 32, "--repeats", 1)
    result = run(*arguments, "--plot", tmp_path / "plot.png", "--json")
    assert len(json.loads(result.stdout)["points"]) == 6
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "there is no folder" in refused(*arguments, "--plot", tmp_path / "missing" / "plot.png")
    for name in ("plot", "plot.zip"):
        assert "must end with" in refused(*arguments, "--plot", tmp_path / name)


def test_bench_says_that_a_plot_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'cufa[plot]'" in refused("bench", "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seqlens", "16,x"), "'x' is not a valid integer"),
        (("--seqlens", "-1"), "-1 is not in the range"),
        (("--seqlens", ","), "give at least one value"),
        (("--seqlens", "16", "--head-dim", "513", "--direction", "both"), "head dim 513"),
        (
            ("--seqlens", "16", "--dtype", FLOAT8, "--direction", "backward"),
            "which has no gradients",
        ),
        (("--kernel", "fwd_1_naive"), "--kernel is 'fwd_1_naive', but this call computes on the CPU"),
        (("--tile", "block_m=32,64"), "--tile is 'block_m=32', but this call computes on the CPU"),
        (("--arch", "sm_80"), "--arch is 'sm_80', but this call computes on the CPU"),
        (("--seqlens", "16", "--batch", 2, "--heads", 1, "--head-dim", 600), "shape (2, 16, 1, 600)"),
        (("--seqlens", "16", "--seqused-k", "5"), "--seqused-k has 1 number for 128 sequences"),
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
