"""float32 in halves: plans, and what the compiler makes of the kernel. None of it needs a GPU."""

from dataclasses import replace

import pytest

from cufa import jit
from cufa.device import Device
from cufa.plan import best_kernel, make_plan
from cufa.plan.float32 import PACES
from cufa.problem import Features, Problem

H200 = Device.of("sm_90a")
NAME = "fwd_9_float32"
ALL = Features(window=(9, 9), softcap=True, alibi=True, sink=True, packed=True, seqused_k=True)


def problem(head_dim=128, value_dim=None, causal=False, seqlen=4096, align_bytes=16, **features):
    return Problem(
        *("forward", "float32", 2, seqlen, seqlen, 4, 2, head_dim, value_dim or head_dim, causal),
        align_bytes=align_bytes,
        features=Features(**features),
    )


def warnings_of(call, **tiles):
    return jit.build(make_plan(call, H200, NAME, tiles).variant).warnings


@pytest.mark.parametrize(
    ("tf32", "dim", "tiles"),
    [(tf32, dim, tiles) for tf32, of_dims in PACES.items() for dim in of_dims for tiles in of_dims[dim]],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_spill_and_no_product_in_series(tf32, dim, tiles, causal):
    assert warnings_of(problem(dim, causal=causal, tf32=tf32), **vars(tiles)) == ()


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (33, 127)])
def test_no_spill_with_features(head_dim, value_dim):
    assert warnings_of(replace(problem(head_dim, value_dim, align_bytes=4), features=ALL)) == ()


def test_which_calls_it_takes():
    assert best_kernel(problem(), H200).name == NAME
    assert best_kernel(problem(64, tf32=True), H200).name == NAME
    assert best_kernel(problem(80, align_bytes=4), H200).name == NAME
    for other in (problem(136), problem(dropout=True), problem(seqlen=16), problem(page_size=16)):
        assert best_kernel(other, H200).name == "fwd_5_mma"
    assert best_kernel(problem(), Device.of("sm_100")).name == "fwd_5_mma"


def test_its_workspace_has_both_halves_of_each_element():
    call = problem()
    elements = 2 * 4096 * (4 + 2 + 2) * 128
    assert 0 <= make_plan(call, H200).workspace_bytes - 4 * elements < 0.04 * 4 * elements
    tf32 = make_plan(problem(tf32=True), H200)
    assert 0 <= tf32.workspace_bytes - 2 * elements < 0.06 * 2 * elements


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="block_m must be a multiple of 64"):
        make_plan(problem(), H200, NAME, {"block_m": 32})
    with pytest.raises(ValueError, match="block_n must be a multiple of 32"):
        make_plan(problem(), H200, NAME, {"block_n": 48})
    with pytest.raises(ValueError, match="bytes of shared memory"):
        make_plan(problem(), H200, NAME, {"stages": 4})
