"""What the compiler made of a kernel, for tests that look at the order of its instructions."""

import itertools
import re

import pytest

from cufa import jit

WAIT = r"WARPGROUP\.DEPBAR(?:\.LE gsb0, 0x\d)?"  # for products, until so many groups are left
EXPONENTIAL = r"MUFU\.EX2"


def runs(build, *marks):
    """The instructions that match one of `marks`, each with how many are in a row; skips without nvdisasm."""
    try:
        code = jit.sass(build)
    except RuntimeError as error:
        pytest.skip(str(error))
    return [(mark, len(list(run))) for mark, run in itertools.groupby(re.findall("|".join(marks), code))]
