"""The examples run, and say that they are right."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from cufa import arrays

EXAMPLES = Path(__file__).parents[1] / "examples"


def differences(example, capsys):
    """The figures that an example prints."""
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return [float(figure) for figure in re.findall(r"\d\.\de[-+]\d\d", capsys.readouterr().out)]


def test_decoding_is_attention_over_all_tokens(capsys):
    (difference,) = differences("decode.py", capsys)
    assert 0 < difference < 1e-5


def test_decoding_in_a_graph_is_attention_over_all_tokens(capsys):
    found = differences("graph.py", capsys)
    assert len(found) == (2 if arrays.gpu_usable() else 1)
    assert all(0 < difference < 1e-5 for difference in found)


def test_a_cache_in_pages_is_attention_over_all_tokens(capsys):
    found = differences("pages.py", capsys)
    assert len(found) == 3
    assert all(0 < difference < 1e-5 for difference in found)


def test_a_cache_of_latent_vectors_is_attention_over_all_keys(capsys):
    (difference,) = differences("latent.py", capsys)
    assert 0 < difference < 2e-3


def test_a_prompt_that_is_read_once_is_one_of_each_request(capsys):
    (difference,) = differences("prefix.py", capsys)
    assert 0 < difference < 1e-5


def test_parts_of_the_tokens_in_a_ring_are_attention_over_all_tokens(capsys):
    found = differences("ring.py", capsys)
    assert len(found) == len(("out", "dq", "dk", "dv"))
    assert all(0 < difference < 1e-5 for difference in found)


def test_functions_of_ones_own_are_what_numpy_computes(capsys):
    of_output, of_gradient = differences("score_mod.py", capsys)
    assert 0 < of_output < 1e-5
    assert 0 < of_gradient < 1e-4


def test_8_bits_are_near_16_whatever_the_size_of_values(capsys):
    found = differences("fp8.py", capsys)
    assert len(found) == 2
    assert all(0.01 < difference < 0.06 for difference in found)


def test_what_an_example_needs_is_told_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=r"^examples/pytorch\.py needs PyTorch: pip install torch$"):
        runpy.run_path(str(EXAMPLES / "pytorch.py"), run_name="__main__")


def test_gradients_are_pytorchs(capsys):
    pytest.importorskip("torch")
    found = differences("pytorch.py", capsys)
    assert len(found) == len(("out", "dq", "dk", "dv"))
    assert all(0 < difference < 0.02 for difference in found)
