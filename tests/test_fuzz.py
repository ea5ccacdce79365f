"""scripts/fuzz.py: some of its problems, that it finds what is wrong, and that what it prints is the case."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from test_emulator import planted

from cufa import cpu, device
from cufa.problem import MAX_ALIGN_BYTES

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import fuzz
import fuzz_emulator


@pytest.fixture
def small_tiles(monkeypatch):
    for module, name, size in fuzz.CPU_SIZES:
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("seed", range(60))
def test_some_problems(small_tiles, seed):
    for case in fuzz.draw(np.random.default_rng(seed), "numpy"):
        assert fuzz.outcome(case) == ("right", ""), case


@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(2))
def test_some_problems_of_emulated_kernels(seed):
    for case in fuzz.draw(np.random.default_rng(seed), "emulator"):
        assert fuzz.outcome(case) == ("right", ""), case


@pytest.mark.emulator
def test_what_an_emulated_kernel_does_wrong_is_found(monkeypatch, tmp_path):
    folder = planted(tmp_path, "fwd_1_naive.cu", "params.lse && threadIdx.x == 0", "params.lse")
    case = fuzz.Case(0, backend="emulator", kernel="fwd_1_naive")
    assert fuzz.outcome(case) == ("right", "")
    monkeypatch.setattr(fuzz_emulator, "attention", partial(fuzz_emulator.attention, folder=folder))
    kind, message = fuzz.outcome(case)
    assert kind == "wrong"
    assert "with no barrier between\n    fwd_1_naive.cu" in message


def test_cases_are_printed_as_they_are():
    for seed in range(20):
        for case in fuzz.draw(np.random.default_rng(seed), "numpy"):
            assert eval(repr(case), vars(fuzz)) == case


def test_what_cannot_be_drawn_is_refused(monkeypatch):
    monkeypatch.setattr(device, "gpu_present", lambda: False)
    for message, arguments in {
        "no GPU": ("--backend", "cuda"),
        "-1 is not in the range": ("--seed", "-1"),
        "0 is not in the range": ("--failures", "0"),
    }.items():
        result = CliRunner().invoke(fuzz.main, [*arguments, "--seconds", "0"])
        assert message in result.stderr, arguments
        assert isinstance(result.exception, SystemExit)


def test_what_is_wrong_is_found_and_made_simpler(monkeypatch):
    right = cpu.attention

    def wrong(q, k, v, out, lse, **options):
        right(q, k, v, out, lse, **options)
        if options.get("sink") is not None:
            out += 1

    monkeypatch.setattr(cpu, "attention", wrong)
    case = fuzz.Case(3, features=("causal", "sink", "softcap"), heads=2, seqlen_q=9, given=True, strided=True)
    kind, message = fuzz.outcome(case)
    assert kind == "wrong"
    assert message.startswith("out[")
    assert fuzz.shrunk(case, float("inf")) == fuzz.Case(3, features=("sink",))


@pytest.mark.parametrize("bad", [np.nan, 100])
def test_what_an_infinity_does_to_others_is_found(monkeypatch, bad):
    """A query's own gradient and those of the keys that it sees may be lost, not those of other queries."""
    right = cpu.attention_backward
    case = fuzz.Case(3, features=("causal",), with_inf="q", backward=True)
    (row,) = np.flatnonzero(~np.isfinite(fuzz.Built(case).drawn.problem.q).all(axis=(0, 2, 3)))
    lost = [row]

    def wrong(dout, q, k, v, out, lse, dq, dk, dv, **options):
        right(dout, q, k, v, out, lse, dq, dk, dv, **options)
        dq[:, lost] = dk[:, 0] = bad

    monkeypatch.setattr(cpu, "attention_backward", wrong)
    assert fuzz.outcome(case) == ("right", "")
    lost.append(other := (row + 1) % case.seqlen_q)
    kind, message = fuzz.outcome(case)
    assert kind == "wrong"
    assert message.startswith(f"dq[0, {other}, ")


def test_what_is_written_beside_results_is_found(monkeypatch):
    def careless(q, k, v, out, lse, **options):
        out[...] = 0
        k[...] = 0

    monkeypatch.setattr(cpu, "attention", careless)
    kind, message = fuzz.outcome(fuzz.Case(0))
    assert kind == "wrong"
    assert message.startswith("k: ")
    assert message.endswith(" bytes were written that are no result")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_it_goes_on_for_some_seconds(seconds):
    result = CliRunner().invoke(fuzz.main, ["--seconds", seconds])
    assert result.exit_code == 2
    assert "Invalid value for '--seconds'" in result.stderr


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("align_bytes", [8, MAX_ALIGN_BYTES])
def test_arrays_lie_in_many_ways(dtype, align_bytes):
    values = np.random.default_rng(0).standard_normal((3, 5, 2, 16)).astype(dtype)
    ways = set()
    for seed in range(50):
        memory = fuzz.placed(np.random.default_rng(seed), values, True, align_bytes)
        np.testing.assert_array_equal(memory.array, values)
        assert memory.inside.sum() == values.nbytes
        assert np.isnan(memory.bytes.view(dtype)[~memory.inside.view(bool)[:: values.itemsize]]).all()
        assert memory.offset % values.itemsize == 0
        ways.add(memory.strides)
    assert len(ways) > 10
