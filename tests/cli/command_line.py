"""Commands by click's runner, and what several of their tests ask for."""

import json

import numpy as np
from click.testing import CliRunner

import cufa
from cufa.cli import main

WIDTH = 80
SMALL = ("--batch", "1", "--seqlen", "40", "--heads", "2", "--head-dim", "8")
HEADS = ("--batch", 2, "--seqlen-q", 33, "--seqlen-k", 47, "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
LATENT = ("--heads", 4, "--kv-heads", 1, "--head-dim", 24, "--value-dim", 16, "--values-in-keys")
# Options for features, what their names are, and which gradients there are beside those of q, k and v.
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


def corrupt(monkeypatch, function, index, change):
    """Make a function of cufa return its result at `index` changed in one element."""
    genuine = getattr(cufa, function)

    def corrupted(*arguments, **options):
        results = genuine(*arguments, **options)
        results[index].flat[7] = change(results[index].flat[7])
        return results

    monkeypatch.setattr(cufa, function, corrupted)
