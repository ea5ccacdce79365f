"""The check of results by a sample of them."""

import re
from dataclasses import replace

import numpy as np
import pytest
from command_line import SMALL, run_json

from cufa import checking
from cufa.cli import check, generated, workload
from cufa.cli.options import FeatureOptions
from cufa.problem import Problem


def solved(problem, seed=0, **features):
    """A problem as a workload, and what the CPU path makes of it."""
    features = FeatureOptions(causal=problem.causal, **features)
    problem = generated.as_asked(problem, features)
    host = generated.make_arrays(problem, features, "bshd", np.random.default_rng(seed))
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


@pytest.mark.parametrize(("name", "value"), [("q", np.nan), ("bias", np.nan), ("bias", np.inf)])
def test_a_sample_passes_where_inputs_make_results_nan(monkeypatch, name, value):
    load, _ = solved(SAMPLED[3], bias="random")
    load.arrays[name][0, 0, 0, 0] = value
    results = load.forward(workload.Rung())
    results |= load.backward(workload.Rung(), results)
    monkeypatch.setattr(check, "MAX_SCORES", 20_000)
    sample = checked(load, results)
    assert sample.coverage.startswith("a random sample")
    assert sample.ok, [str(each) for each in sample.comparisons if not each.ok]


def test_what_is_wrong_in_a_sample_is_an_element_of_the_sample(monkeypatch):
    load, results = solved(SAMPLED[0])
    monkeypatch.setattr(check, "MAX_SCORES", 2000)
    results["dk"] = results["dk"] + np.float32(1)
    (wrong,) = (each for each in checked(load, results).comparisons if not each.ok)
    assert wrong.what == "dk"
    assert re.match(r"the sample of dk, \[\d+\] is ", str(wrong))


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
