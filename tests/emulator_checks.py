"""What tests of forward kernels on the emulator share."""

import numpy as np
from emulator import calls
from feature_cases import hide_nan
from tolerance import assert_attention


def check_forward(case, kernel, tiles=None, **options):
    """Run a case and hold it to the rule; what no row sees is NaN, and so are pages that are nobody's."""
    hide_nan(case)
    inputs = case.problem.q, case.problem.k, case.problem.v
    with np.errstate(invalid="ignore"):
        out, lse = calls.attention(*inputs, kernel=kernel, tiles=tiles, **case.emulator_forward, **options)
        assert_attention(out, lse, case.problem, **case.forward)
    return out
