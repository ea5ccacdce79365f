"""The command itself, those that compute nothing, and what all share."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import SMALL, WIDTH, refused, run, run_json

import cufa
from cufa import device, driver, jit
from cufa.cli import COMMANDS, main, output
from cufa.device import Device
from cufa.kernels import COMPANIONS, KERNELS
from cufa.problem import FLOAT8, INPUT_DTYPES
from cufa.timing import time_cpu


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
        [sys.executable, "-m", "cufa", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(cufa.__version__)


@pytest.mark.parametrize(
    "arguments", [("info",), ("kernels",), ("run", *SMALL), ("cache", "info")], ids=lambda each: each[0]
)
def test_reports_fit_80_columns(arguments):
    result = run(*arguments)
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    assert not re.search(r" $", result.stdout, re.MULTILINE)
    assert result.stderr == ""


def test_a_terminal_that_does_not_know_its_width_shows_all(monkeypatch):
    expected = run("kernels").stdout
    monkeypatch.setenv("COLUMNS", "0")
    assert run("kernels").stdout == expected


def test_a_narrow_terminal_breaks_no_number_and_no_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    shown = run("run", *SMALL).stdout
    assert re.search(r"^forward +numpy +[\d.,]+ [mu]?s +[\d.,]+$", shown, re.MULTILINE)
    assert re.search(r"^out +\d\.\d\de-\d\d +\d\.\d\de-\d\d +pass$", shown, re.MULTILINE)
    shown = run("bench", "--seqlens", 16, "--tokens", 16, "--direction", "forward").stdout
    assert re.search(r"^ +16 +1 +forward +numpy +[\d.,]+ [mu]?s +[\d.,]+ +[\d.,]+$", shown, re.MULTILINE)


@pytest.mark.parametrize("width", [20, 60])
def test_a_narrow_terminal_wraps_prose_between_words(monkeypatch, width):
    ideas = [row["idea"] for row in run_json("kernels")]
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("kernels").stdout
    assert {word for idea in ideas for word in idea.split()} <= set(shown.split())
    assert {*KERNELS, *COMPANIONS, *INPUT_DTYPES, "O(N^2)"} <= {word.strip(",.") for word in shown.split()}


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


def test_info_says_why_cupy_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(device, "gpu_present", lambda: True)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    facts = run_json("info")
    assert (facts["gpu"], facts["cupy"]) == (None, None)
    assert "(numpy.dtype size changed)" in facts["missing"]["gpu"]
    shown = " ".join(run("info").stdout.split())
    assert "CuPy cannot be imported (numpy.dtype size changed): pip install 'cufa[cuda13]'" in shown


def test_info_shows_a_gpu_and_its_limits(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: Device.of("sm_90a"))
    facts = run_json("info")
    assert facts["gpu"]["name"] == "H200"
    assert facts["gpu"]["arch"] == "sm_90a"
    shown = run("info").stdout
    assert "H200, sm_90a, 132 SMs" in shown
    assert "227 KiB per block" in shown


def test_info_shows_the_environment(monkeypatch):
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    assert run_json("info")["environment"]["CUFA_ARCH"] == "sm_80"
    assert "CUFA_ARCH" in run("info").stdout


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CUFA_ARCH", "foo", "CUFA_ARCH is 'foo'; give it as 'sm_90a',"),
        ("CUFA_ARCH", "sm_60", "CUFA_ARCH is 'sm_60', whose limits are not known"),
        ("CUFA_NVRTC_OPTIONS", "-DX='open", 'CUFA_NVRTC_OPTIONS is "-DX=\'open": No closing quotation'),
        ("CUFA_NVRTC_OPTIONS", "-arch=sm_75", "the arch may only be given as arch or CUFA_ARCH"),
        ("CUFA_DEBUG", "no", "CUFA_DEBUG is 'no'; it may be 0 or 1"),
    ],
)
def test_info_says_what_is_wrong_with_the_environment(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "gpu_present", lambda: False)
    facts = run_json("info")
    assert (facts["environment"][name], facts["wrong"].keys()) == (value, {name})
    assert message in facts["wrong"][name]
    assert message in " ".join(run("info").stdout.split())
    monkeypatch.delenv(name)
    monkeypatch.setenv("CUFA_ARCH", "sm_80")
    assert run_json("info")["wrong"] == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("arguments", [("--help",), ("kernels",), ("kernels", "--json")], ids=" ".join)
def test_a_full_disk_is_an_error_in_one_line(arguments):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "cufa", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == output.WRONG


@pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX's")
@pytest.mark.parametrize("arguments", [("kernels",), ("kernels", "--json")], ids=" ".join)
def test_a_command_ends_silently_if_nobody_reads_on(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cufa", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_is_no_wrong_result(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cufa, "attention", interrupted)
    assert run("run", *SMALL, code=130).stderr == "\nAborted!\n"
    assert "with 130 if it was interrupted" in " ".join(run("--help").stdout.split())


def test_names_that_the_output_cannot_encode_are_escaped(monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", "/no/caf\u00e9")
    result = CliRunner(charset="ascii").invoke(main, ["cache", "info"])
    assert result.exit_code == 0
    assert "/no/caf\\xe9" in result.stdout


def test_a_working_directory_that_was_deleted(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("CUFA_CACHE_DIR", "relative")
    assert not run_json("cache", "info")["writable"]
    message = refused("run", *SMALL, "--score-mod", "mods.py:decay")
    assert "--score-mod mods.py:decay: No such file or directory" in message


def test_other_errors_of_the_system_are_not_taken_for_those_of_the_output():
    with pytest.raises(FileNotFoundError), output.writing_errors():
        Path("/no/such/file").read_bytes()


def test_kernels_lists_the_registry():
    listed = run_json("kernels")
    assert [row["name"] for row in listed] == [*KERNELS, *COMPANIONS]
    assert all(row["idea"] and row["paper"] for row in listed)
    for row in listed[: len(KERNELS)]:
        assert set(row["features"]) == {"causal", *KERNELS[row["name"]].features}
    for row in listed[len(KERNELS) :]:
        assert set(row["features"]) == COMPANIONS[row["name"]].features
    assert {row["function"] for row in listed[len(KERNELS) :]} >= {"cufa.softmax", "cufa.merge"}
    assert {row["min_arch"] for row in listed[: len(KERNELS)]} == {"sm_75", "sm_80", "sm_90a"}
    on_request = [row["name"] for row in listed if row.get("on_request")]
    assert on_request == ["fwd_1_naive", "fwd_2_online_softmax", "fwd_3_flash_v1", "bwd_1_naive"]
    table = run("kernels").stdout
    assert f"on request: {', '.join(on_request)} run only if" in " ".join(table.split())
    assert all(name in table for name in (*KERNELS, *COMPANIONS, *INPUT_DTYPES, "O(N^2)"))
    assert max(map(len, table.splitlines())) <= WIDTH


def test_kernels_tells_the_archs_of_each_dtype():
    listed = {row["name"]: row for row in run_json("kernels")}
    mma = listed["fwd_5_mma"]["archs"]
    assert "sm_75" in mma["float16"]
    assert not {"sm_75"} & {*mma["bfloat16"], *mma["float32"], *mma["float64"]}
    assert "sm_86" not in mma["float64"]
    assert not {"sm_80", "sm_86"} & set(listed["fwd_8_split_kv"]["archs"][FLOAT8])
    hopper = listed["bwd_5_wgmma_wide"]
    assert (hopper["only_arch"], hopper["min_head_dim"]) == ("sm_90a", 129)
    assert set(map(tuple, hopper["archs"].values())) == {("sm_90a",)}
    assert listed["fwd_4_flash_v2"]["only_arch"] is None
    shown = " ".join(run("kernels").stdout.split())
    assert "fwd_5_mma, fwd_8_split_kv, bwd_3_mma need tensor cores for the dtype: " in shown
    assert "bfloat16 from sm_80 on, " in shown
    assert "float64 on sm_80, sm_90, sm_100." in shown


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


def test_a_cache_that_cannot_be_used_is_told_with_the_reason(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    for command in (("cache", "info"), ("info",)):
        shown = " ".join(run(*command).stdout.split())
        assert "(Not a directory): kernels that cannot be read from it are compiled in every process" in shown
    assert run_json("cache", "info")["unwritable"] == "Not a directory"
    assert "could not be cleared: [Errno 20] Not a directory" in refused("cache", "clear")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "2.50 s"),
        (0.0123, "12.3 ms"),
        (4.5e-5, "45.0 us"),
        (3e-9, "3.00 ns"),
        (123.4, "123 s"),
        (9.999e-4, "1.00 ms"),
    ],
)
def test_seconds_in_words(value, text):
    assert output.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 2**30, "5.00 GiB"), (2**20 - 1, "1.00 MiB")],
)
def test_sizes_in_words(value, text):
    assert output.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12345.6, "12,346"), (-2.5, "-2.50"), (9.996, "10.0")],
)
def test_three_digits(value, text):
    assert output.three_digits(value) == text


def test_a_title_and_a_folder_are_wider_than_their_table(monkeypatch):
    @click.command()
    def command():
        output.print_table(output.table(("narrow",), "a title that is wider than the table"))

    assert CliRunner().invoke(command).stdout.startswith("a title that is wider than the table\n")
    folder = "/no/" + "folder" * 20
    monkeypatch.setenv("CUFA_CACHE_DIR", folder)
    for name in (("cache", "info"), ("info",)):
        assert folder in run(*name).stdout


def test_help_tells_defaults_in_one_way():
    told = {name: " ".join(run(name, "--help").stdout.split()) for name in ("run", "bench", "compile")}
    for of in told.values():
        assert "[default: (CUFA_ARCH, else this GPU's)]" in of
    assert "[default: (512 to 16384; CPU 128 to 2048)]" in told["bench"]
    assert "FILE|random|random-bits" in told["run"]
    for default in ("float16, or the kernel's only one", "--dtype", "--head-dim", "0: no pages"):
        assert f"[default: ({default})" in told["compile"]


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
