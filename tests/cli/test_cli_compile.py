"""`cufa compile`."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import WIDTH, refused, run, run_json

import cufa
from cufa import cache, jit
from cufa.cli import compile, output
from cufa.device import Device
from cufa.kernels import COMPANIONS, KERNELS
from cufa.plan import make_plan

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


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_an_interrupt_does_not_wait_for_the_compiler():
    """Which here compiles for ever.

    Python hears interrupts even if whoever runs the tests, as a shell in the background, has them ignored.
    """
    code = (
        "import signal, threading; from cufa import jit; from cufa.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def build(_): print('compiling\\n', end='', flush=True); threading.Event().wait()\n"
        "jit.build = build\n"
        "main(['compile', 'fwd_1_naive', '--arch', 'sm_80,sm_90'])\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as command:
        try:
            assert command.stdout.readline() == "compiling\n"
            command.send_signal(signal.SIGINT)
            _, messages = command.communicate(timeout=60)
        finally:
            command.kill()
    assert (command.returncode, messages) == (130, "Aborted!\n")


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
    details = ("bias_dtype", "broadcast_bias", "mask_bits", "page_size")
    assert [built[name] for name in details] == ["float32", False, True, 5]
    title = (
        "sm_80, float16, head dim 16, causal, window, softcap, bias in float32, mask in bits, cu_seqlens, "
        "block_table with pages of 5"
    )
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
    assert (own_sums["broadcast_bias"], broadcast["broadcast_bias"]) == (False, True)
    assert "one row of bias in float16, dbias" in run(*gradient, "--broadcast-bias").stdout
    tf32 = ("--dtype", "float32", "--precision", "tf32")
    assert "float32 as tf32" in run("compile", "fwd_4_flash_v2", *TINY, *tf32).stdout
    assert "--precision tf32 is of products, and merge has none" in refused("compile", "merge", *TINY, *tf32)
    assert "is for float32" in refused("compile", "fwd_4_flash_v2", *TINY, "--precision", "tf32")


def test_without_a_dtype_kernels_are_compiled_for_one_that_they_take(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    hopper = ("--arch", "sm_90a", "--head-dim", "128")
    tried = run_json("compile", "--all", *hopper, code=1)
    skipped = [each["kernel"] for each in tried if each["skipped"]]
    assert skipped == [
        "fwd_10_wgmma_wide",
        "bwd_5_wgmma_wide",
        "bwd_7_float32_wide",
        "bwd_8_wgmma_pair",
    ]  # they are for wider ones
    others = {each["kernel"]: each["dtype"] for each in tried if each["dtype"] != "float16"}
    in_float32 = ("fwd_9_float32", "bwd_6_float32", "bwd_7_float32_wide")
    assert others == {"fwd_7_fp8": "float8_e4m3fn", **dict.fromkeys(in_float32, "float32")}
    table = run("compile", "fwd_8", "fwd_9", "bwd_4", *hopper, code=1).stdout
    assert table.count("sm_90a, float16, head dim 128") == 1
    assert "sm_90a, float32, head dim 128" in table


def test_compile_of_all_kernels_in_8_bits(monkeypatch):
    """Those without 8 bits are passed over."""

    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    asked = ("--arch", "sm_90a", "--dtype", "float8_e4m3fn", "--head-dim", "64")
    tried = run_json("compile", "--all", *asked, code=1)
    compiled = {each["kernel"] for each in tried if not each["skipped"]}
    assert {"fwd_7_fp8", "fwd_8_split_kv"} <= compiled
    assert "bias_gradient" not in compiled
    assert "bias_gradient supports float16" in refused("compile", "bias_gradient", *asked)


@nvrtc
def test_compile_of_kernels_beside_the_ladder():
    built = run_json("compile", *COMPANIONS, *TINY, "--dtype", "bfloat16")
    for companion in built:
        others = {"quantize": ["measure", "convert"], "bias_gradient": ["row_sums", "bias_gradient"]}
        entries = others.get(companion["kernel"], [companion["kernel"]])
        assert [entry["name"] for entry in companion["entries"]] == entries
        assert all(entry["registers"] > 0 for entry in companion["entries"])
    assert "--tile has block_m, and merge has no tiles to choose" in refused(
        "compile", "merge", *TINY, "--tile", "block_m=32"
    )


@pytest.mark.parametrize(
    ("kernel", "dims", "title"),
    [
        ("softmax", (None, None), "sm_80, float16"),
        ("merge", (None, 3), "sm_80, float16, head dim 3"),
        ("rotary", (7, None), "sm_80, float16, head dim 7"),
        ("append", (7, 3), "sm_80, float16, head dim 7/3"),
        ("bias_gradient", (7, 3), "sm_80, float16, head dim 7/3, bias in float16"),
    ],
)
def test_what_a_kernel_does_not_depend_on_is_not_told(monkeypatch, kernel, dims, title):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    asked = ("compile", kernel, "--arch", "sm_80", "--head-dim", "7", "--value-dim", "3")
    (tried,) = run_json(*asked, code=1)
    assert (tried["head_dim"], tried["value_dim"]) == dims
    assert run(*asked, code=1).stdout.splitlines()[0].rstrip() == title


def test_a_kernel_that_depends_on_no_head_dim_is_compiled_once(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    tried = run_json("compile", "softmax", "rotary", "--arch", "sm_80", "--head-dim", "64,128", code=1)
    assert [(each["kernel"], each["head_dim"]) for each in tried] == [
        ("softmax", None),
        ("rotary", 64),
        ("rotary", 128),
    ]


def test_all_kernels_are_those_of_the_ladder_and_those_beside_it(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    tried = run_json("compile", "--all", *TINY, code=1)
    assert [each["kernel"] for each in tried] == [*KERNELS, *COMPANIONS]
    for each in tried:
        name = each["kernel"]
        assert bool(each["skipped"]) == (name in KERNELS and KERNELS[name].only_arch is not None), name


def test_kernels_are_passed_over_that_do_not_have_what_is_asked_for(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)

    def having(*options):
        tried = run_json("compile", "--all", *TINY, *options, code=1)
        return {each["kernel"] for each in tried if not each["skipped"]}

    tiled = {"fwd_4_flash_v2", "fwd_5_mma", "bwd_2_flash_v2", "bwd_3_mma", "bias_gradient", "attn_probs"}
    assert having("--sink") == tiled | {"fwd_8_split_kv"}
    assert having("--varlen") == tiled - {"attn_probs"} | {"fwd_8_split_kv", "quantize"}
    assert having("--sink", "--dsink") == {"bwd_2_flash_v2", "bwd_3_mma"}
    assert having("--deterministic") == {"bwd_2_flash_v2", "bwd_3_mma", "bias_gradient"}
    assert not {"softmax", "merge", "rotary", "quantize"} & having("--causal")
    asked = ("compile", "softmax", *TINY, "--causal", "--sink")
    assert "softmax does not support causal, sink" in refused(*asked)
    asked = ("compile", "fwd_4_flash_v2", *TINY, "--deterministic")
    assert "fwd_4_flash_v2 does not support deterministic" in refused(*asked)


@nvrtc
def test_compile_of_functions_on_scores(tmp_path):
    (tmp_path / "mods.py").write_text("def halved(score, b, h, q_idx, kv_idx):\n    return score / 2\n")
    own = ("--score-mod", f"{tmp_path / 'mods.py'}:halved")
    (plain,), (built,) = (run_json("compile", "fwd_4", *TINY, *options) for options in ((), own))
    assert built["features"] == ["score_mod"]
    assert built["path"] != plain["path"]


@nvrtc
def test_compile_of_gradients_of_arrays(tmp_path):
    (tmp_path / "mods.py").write_text(
        "import cufa, numpy as np\n"
        "def added(score, b, h, q_idx, kv_idx, of_heads): return score + of_heads[h]\n"
        "floats, integers = (cufa.ScoreMod(added, np.zeros(4, dtype)) for dtype in (np.float32, np.int32))\n"
    )
    floats, integers = (("--score-mod", f"{tmp_path / 'mods.py'}:{name}") for name in ("floats", "integers"))
    asked = ("compile", "bwd_3_mma", *TINY)
    (plain,), (built,) = (run_json(*asked, *floats, *options) for options in ((), ("--dscore-mod",)))
    assert "array_gradients" not in [entry["name"] for entry in plain["entries"]]
    assert built["features"] == ["score_mod", "dscore_mod"]
    assert built["entries"][-1]["name"] == "array_gradients"
    assert built["path"] != plain["path"]
    assert "give --score-mod, too" in refused(*asked, "--dscore-mod")
    assert f"float arrays; {integers[1]} reads none" in refused(*asked, *integers, "--dscore-mod")
    forward = ("compile", "fwd_5_mma", *TINY, *floats, "--dscore-mod")
    assert "fwd_5_mma does not support dscore_mod" in refused(*forward)


@nvrtc
def test_compile_of_several_tiles():
    arguments = ("compile", "fwd_5_mma", *TINY, "--tile", "block_m=64,128", "--tile", "block_n=16,100000")
    rows = run_json(*arguments)
    assert [bool(row["skipped"]) for row in rows] == [False, True, False, True]
    assert [row["tiles"]["block_m"] for row in rows if row["tiles"]] == [64, 128]
    table = " ".join(run(*arguments).stdout.split())
    assert "sm_80, float16, head dim 16, block_m 128, block_n 16" in table
    assert "fwd_5_mma: block_m 128, block_n 16, threads" in table
    spaced = ("--tile", "block_m=64, 128", "--tile", "block_n=16")
    assert [row["tiles"]["block_m"] for row in run_json("compile", "fwd_5_mma", *TINY, *spaced)] == [64, 128]
    for wrong in ("block_m=32,x", "block_m=64,block_n=32"):
        message = refused("compile", "fwd_5_mma", *TINY, "--tile", wrong)
        assert f"'{wrong}' is not of the form NAME=N[,...]" in message


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
def test_compile_of_keys_and_values_in_8_bits():
    kernels = ("fwd_6_wgmma", "fwd_8_split_kv", "merge", "append")
    dtypes = ("--dtype", "bfloat16", "--kv-dtype", "float8_e4m3fn")
    hopper, split, merge, append = run_json("compile", *kernels, "--arch", "sm_90a", *dtypes)
    assert (split["dtype"], split["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert [entry["name"] for entry in split["entries"]] == list(KERNELS["fwd_8_split_kv"].entries)
    assert [entry["name"] for entry in append["entries"]] == ["append"]
    assert hopper["skipped"].endswith("does not support k and v in float8_e4m3fn beside q in bfloat16")
    assert merge["skipped"].startswith("--kv-dtype is of keys and values")
    assert "'float16' is not 'float8_e4m3fn'" in refused(
        "compile", "fwd_8", *dtypes[:2], "--kv-dtype", "float16"
    )


@nvrtc
def test_compile_for_transposed_values():
    asked = ("compile", "fwd_7_fp8", "--arch", "sm_90a", "--transposed-values")
    (row,) = run_json(*asked, "--dtype", "float8_e4m3fn")
    assert row["transposed_values"]
    assert [entry["name"] for entry in row["entries"]] == list(KERNELS["fwd_7_fp8"].entries)
    assert "in packed sequences or pages" in refused(*asked, "--dtype", "float8_e4m3fn", "--varlen")
    assert "--transposed-values is for float8_e4m3fn" in refused(*asked, "--dtype", "float16")


@nvrtc
@pytest.mark.parametrize("dtypes", [(), ("--kv-dtype", "float8_e4m3fn")], ids=" ".join)
def test_compile_for_values_in_keys(monkeypatch, tmp_path, dtypes):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_builds", {})
    dims = ("--head-dim", 576, "--value-dim", 512)
    asked = ("compile", "fwd_8_split_kv", "fwd_10_wgmma_wide", "--arch", "sm_90a", "--dtype", "bfloat16")
    result = run("-v", *asked, *dims, *dtypes, "--values-in-keys", "--json")
    assert result.stderr.count("-DVALUES_IN_KEYS=1 ") == 2
    assert all(row["values_in_keys"] and row["entries"] for row in json.loads(result.stdout))
    table = run(*asked, *dims, *dtypes, "--values-in-keys").stdout
    assert "head dim 576/512, values in keys" in " ".join(table.split())


def test_compile_refuses_values_that_lie_in_no_keys():
    asked = ("compile", "fwd_4_flash_v2", *TINY, "--values-in-keys")
    assert "--value-dim 17 is more than --head-dim 16" in refused(*asked, "--value-dim", 17)
    assert "give one of them" in refused(*asked, "--transposed-values")
    assert "--values-in-keys is of products with keys and values, and merge has none" in refused(
        "compile", "merge", *TINY, "--values-in-keys"
    )


@nvrtc
def test_each_kernel_is_announced_on_stderr(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "_builds", {})
    arguments = ("compile", "fwd_1_naive", "fwd_2_online_softmax", *TINY)
    for verbose in ((), ("-v",)):
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / f"cache{len(verbose)}"))
        result = run(*verbose, *arguments, "--json")
        assert result.stderr.count("compiling") == 2
        assert result.stderr.count("its macros") == 2 * len(verbose)
        json.loads(result.stdout)
        jit._builds.clear()
    assert not any(isinstance(each, output._StderrHandler) for each in logging.getLogger("cufa").handlers)


@nvrtc
def test_why_a_cache_entry_is_ignored_is_told_whole_and_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    for verbose in ((), ("-v",)):
        monkeypatch.setattr(jit, "_builds", {})
        run("compile", "fwd_1_naive", *TINY)
        (record,) = tmp_path.glob("*.json")
        record.write_text("garbage")
        monkeypatch.setattr(jit, "_builds", {})
        lines = run(*verbose, "compile", "fwd_1_naive", *TINY).stderr.splitlines()
        (ignored,) = (line for line in lines if line.startswith("ignoring"))
        assert ignored == f"ignoring a cache entry: Expecting value: line 1 column 1 (char 0) ({record})"


@nvrtc
def test_json_has_no_path_where_nothing_can_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(jit, "_builds", {})
    (built,) = run_json("compile", "fwd_1_naive", *TINY)
    assert built["entries"]
    assert built["path"] is None


@nvrtc
def test_emit_writes_code(tmp_path):
    assert ".target sm_80" in run("compile", "fwd_1_naive", *TINY, "--emit", "ptx").stdout
    emitted = run("compile", "fwd_1_naive", *TINY, "--emit", "cubin", "--output", tmp_path / "k.cubin")
    assert "registers" in emitted.stdout
    assert f"written to {tmp_path / 'k.cubin'}\n" in emitted.stderr
    assert (tmp_path / "k.cubin").read_bytes().startswith(b"\x7fELF")
    (built,) = run_json("compile", "fwd_1_naive", *TINY, "--emit", "ptx", "--output", tmp_path / "k.ptx")
    assert built["entries"]
    assert ".target sm_80" in (tmp_path / "k.ptx").read_text()


@pytest.mark.parametrize("emit", ["cubin", "sass"])
def test_machine_code_of_ptx_is_refused_before_compiling(monkeypatch, tmp_path, emit):
    monkeypatch.setattr(compile.jit, "build", None)
    arguments = ("fwd_1_naive", "--arch", "compute_80", "--emit", emit, "--output", tmp_path / "x")
    assert f"compute_80 is PTX and has no {emit}; give a real arch" in refused("compile", *arguments)


@nvrtc
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_emit_to_a_full_disk_went_wrong():
    emitted = run("compile", "fwd_1_naive", *TINY, "--emit", "ptx", "--output", "/dev/full", code=1)
    assert "error: --output /dev/full: No space left on device\n" in emitted.stderr


@nvrtc
def test_a_kernel_that_can_be_kept_nowhere_is_no_traceback(monkeypatch):
    def kept_nowhere(*_):
        raise OSError("compiled kernels can be kept neither here nor there")

    monkeypatch.setattr(cache, "store", kept_nowhere)
    monkeypatch.setattr(jit, "_builds", {})
    arguments = ("compile", "fwd_1_naive", "--arch", "sm_80", "--head-dim", 23)
    assert "compiled kernels can be kept neither here nor there\n" in run(*arguments, code=1).stderr
    (document,) = run_json(*arguments, code=1)
    assert document["error"] == "compiled kernels can be kept neither here nor there"


@nvrtc
def test_a_dash_is_stdout(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    emitted = run("compile", "fwd_1_naive", *TINY, "--emit", "ptx", "--output", "-")
    assert ".target sm_80" in emitted.stdout
    assert list(tmp_path.iterdir()) == []


@nvrtc
def test_emit_sass():
    try:
        jit._nvdisasm()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert "EXIT" in run("compile", "fwd_1_naive", *TINY, "--emit", "sass").stdout


def test_an_output_without_a_folder_is_refused_before_compiling(monkeypatch):
    monkeypatch.setattr(compile.jit, "build", None)
    message = refused("compile", "fwd_1_naive", *TINY, "--emit", "ptx", "--output", "nowhere/k.ptx")
    assert "--output nowhere/k.ptx: there is no folder nowhere" in message


def test_what_is_named_twice_is_compiled_once(monkeypatch):
    def build(variant):
        raise cufa.CompileError(variant.source)

    monkeypatch.setattr(compile.jit, "build", build)
    twice = ("--arch", "sm_86,sm_86", "--dtype", "float16,float16", "--head-dim", "16,16")
    tried = run_json("compile", "fwd_4", "fwd_4_flash_v2", *twice, "--tile", "block_m=32,32", code=1)
    assert [each["kernel"] for each in tried] == ["fwd_4_flash_v2"]


def test_a_warning_names_the_kernel_once(monkeypatch, tmp_path):
    used = jit.Resources(registers=255, spill_stores=16, spill_loads=32, stack_bytes=48, static_smem=0)

    def build(variant):
        resources = dict.fromkeys(("fwd_4_flash_v2", "other"), used)
        return jit.Build("key", tmp_path, variant.arch, "", resources, seconds=1.0, cached=False)

    monkeypatch.setattr(compile.jit, "build", build)
    shown = run("compile", "fwd_4_flash_v2", *TINY).stdout
    assert "\n- fwd_4_flash_v2: 16 bytes spill stores, 32 bytes spill loads\n" in shown
    assert "\n- fwd_4_flash_v2: other: 16 bytes spill stores, 32 bytes spill loads\n" in shown


def test_a_narrow_terminal_breaks_no_kernel_and_no_number(monkeypatch, tmp_path):
    used = jit.Resources(registers=168, spill_stores=0, spill_loads=0, stack_bytes=0, static_smem=0)

    def build(variant):
        resources = dict.fromkeys(KERNELS["fwd_6_wgmma"].entries, used)
        return jit.Build("key", tmp_path, variant.arch, "", resources, seconds=2.0, cached=False)

    monkeypatch.setattr(compile.jit, "build", build)
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line.split() for line in run("compile", "fwd_6", "--arch", "sm_90a").stdout.splitlines()]
    assert ["fwd_6_wgmma", "2.00"] in lines
    assert ["fwd_6_wgmma", "168", "0", "225", "KiB", "1", "12", "(19%)"] in lines


def test_compile_exits_with_1_when_a_kernel_fails(monkeypatch):
    def build(variant):
        raise cufa.CompileError("expected a ';'")

    monkeypatch.setattr(compile.jit, "build", build)
    result = run("compile", "fwd_1_naive", *TINY, code=1)
    assert "FAILED" in result.stdout
    assert "expected a ';'" in result.stderr
    (failed,) = run_json("compile", "fwd_1_naive", *TINY, code=1)
    assert failed["error"] == "expected a ';'"


def test_a_planner_and_a_file_that_disagree_about_entries_fail(monkeypatch):
    """By the registry's row, or, if that agrees with the planner, by what was compiled."""
    genuine = KERNELS["fwd_1_naive"]

    def register(*entries):
        kernels = {**KERNELS, "fwd_1_naive": replace(genuine, entries=entries)}
        monkeypatch.setattr(sys.modules[make_plan.__module__], "KERNELS", kernels)

    register("scores", "softmax")
    failed = run("compile", "fwd_1_naive", *TINY, code=1)
    assert "FAILED" in failed.stdout
    launched = "the planner of fwd_1_naive launches output, and the kernel's entries are scores, softmax"
    assert launched in " ".join(failed.stderr.split())

    register(*genuine.entries)
    used = jit.Resources(32, 0, 0, 0, 0)
    built = jit.Build("", Path(), Device.of("sm_80").arch, "", {"scores": used, "rows": used}, 1.0, False)
    monkeypatch.setattr(compile.jit, "build", lambda _: built)
    failed = run("compile", "fwd_1_naive", *TINY, code=1)
    launched = "the plan launches softmax, output, and the entries of fwd_1_naive.cu are scores, rows"
    assert launched in " ".join(failed.stderr.split())


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


def test_json_has_what_is_skipped_even_if_nothing_is_compiled():
    result = run("compile", "fwd_6_wgmma", *TINY, "--json", code=2)
    (skipped,) = json.loads(result.stdout)
    assert skipped["skipped"] == "fwd_6_wgmma needs sm_90a, and the arch is sm_80"
    assert skipped["skipped"] in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name kernels or give --all"),
        (("fwd_1_naive", "--all"), "name kernels or give --all, not both"),
        (("fwd_1_naive",), "no GPU"),
        (("fwd_1_naive", "--arch", "fast"), "arch is 'fast'"),
        (("fwd_1_naive", "--arch", "sm_20"), "arch is 'sm_20'"),
        (("fwd_1_naive", "--arch", "sm_80", "--dtype", "int8"), "'int8' is not one of"),
        (("fwd_1_naive", "--arch", "sm_80", "--emit", "cubin"), "needs --output"),
        (
            ("fwd_4", "--arch", "sm_80", "--window", "4,4"),
            "'4,4' is no kernel; --window and the like take no value here",
        ),
        (("fwd_1_naive", "--arch", "sm_80", "--emit", "ptx", "--json"), "needs --output"),
        (("fwd_1_naive", "--arch", "sm_80", "--output", "x"), "give --emit"),
        (("--all", "--arch", "sm_80", "--emit", "ptx"), "--emit takes one kernel"),
        (("fwd_1_naive", "--arch", "sm_80,sm_90a", "--emit", "ptx"), "these are 2"),
    ],
)
def test_compile_refuses_what_makes_no_sense(arguments, message):
    assert message in refused("compile", *arguments)
