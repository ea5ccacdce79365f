"""float32 in halves on a GPU: masks and dropout forward; backward stages that are filled anew many times, and
what halves do not hold.
"""

import numpy as np
import pytest
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles
from gpu_calls import on_gpu, skip_unless_it_runs_here, tensors
from tolerance import assert_attention, assert_gradients, judge

import cufa
from cufa import reference

pytestmark = pytest.mark.gpu

FORWARD, KERNEL, WIDE = "fwd_9_float32", "bwd_6_float32", "bwd_7_float32_wide"


@pytest.fixture(autouse=True)
def _on_hopper(cupy):
    skip_unless_it_runs_here(KERNEL)


def gradients_of(cupy, case, kernel=KERNEL, **options):
    q, k, v, dout = tensors(cupy, case)
    inputs = case.problem.q, case.problem.k, case.problem.v
    out, lse = reference.attention(*inputs, dtype=judge("float32"), **case.forward)
    out, lse = (cupy.asarray(x.astype(np.float32)) for x in (out, lse))
    rules = on_gpu(cupy, case.backward)
    return cufa.attention_backward(dout, q, k, v, out, lse, kernel=kernel, **rules, **options)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "features", [("mask", "dropout"), ("mask_bits", "causal", "packed"), ("dropout", "window", "softcap")]
)
def test_masks_and_dropout(cupy, rng, features, head_dim, precision):
    case = draw_case(rng, "float32", features, seqlen_q=700, seqlen_k=1000, head_dim=head_dim)
    if "mask" in features:
        case.arrays["mask"], _ = mask_by_tiles(rng, (2, 1, 700, 1000), (128, 128))
    hide_nan(case)
    q, k, v, _ = tensors(cupy, case)
    options = {"kernel": FORWARD, "precision": precision, "return_lse": True}
    with np.errstate(invalid="ignore"):
        results = cufa.attention(q, k, v, **on_gpu(cupy, case.forward), **options)
        out, lse = (x.get() for x in results)
        assert_attention(out, lse, case.problem, precision=precision, **case.forward)


@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [*((KERNEL, dim) for dim in (32, 64, 96, 128)), *((WIDE, dim) for dim in (136, 192, 256))],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_is_left_before_the_next_one_comes(cupy, rng, kernel, head_dim, causal):
    """A stage was once given back before where its rows' dQ is had been read: often, with many tiles."""
    features = ("causal",) if causal else ()
    case = draw_case(rng, "float32", features, seqlen_q=1000, seqlen_k=1000, head_dim=head_dim)
    first = gradients_of(cupy, case, kernel)
    assert_gradients(tuple(x.get() for x in first), case.problem, **case.backward)
    largest = [float(abs(x).max()) for x in first]
    for _ in range(50):
        for x, same, size in zip(gradients_of(cupy, case, kernel), first, largest, strict=True):
            assert float(abs(x - same).max()) < 1e-5 * size


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dims", [(136, 137), (192, 128), (256, 40), (64, 256), (256, 256)], ids=str)
@pytest.mark.parametrize("features", [("causal",), ("packed", "window", "dropout"), ("mask", "softcap")])
def test_wide_heads(cupy, rng, features, dims, precision):
    """Parts of the dims with a panel more or none, tiles of 32 queries and of 64."""
    sizes = {"head_dim": dims[0], "head_dim_v": dims[1]}
    case = draw_case(rng, "float32", features, seqlen_q=500, seqlen_k=700, **sizes)
    hide_nan(case)
    with np.errstate(invalid="ignore"):
        gradients = tuple(x.get() for x in gradients_of(cupy, case, WIDE, precision=precision))
        assert_gradients(gradients, case.problem, precision=precision, **case.backward)


@pytest.mark.parametrize("kernel", [KERNEL, WIDE])
@pytest.mark.parametrize("value", [np.nan, 1e30])
@pytest.mark.parametrize("name", ["v", "dout"])
def test_what_a_mask_hides_with_others(cupy, rng, kernel, name, value):
    sizes = {**SIZES, **({"head_dim_v": 136} if kernel == WIDE else {})}
    case = draw_case(rng, "float32", ("causal",), seqlen_q=300, seqlen_k=300, **sizes)
    getattr(case.problem, name)[:, 260, 0, 3] = value
    with np.errstate(invalid="ignore", over="ignore"):
        gradients = tuple(x.get() for x in gradients_of(cupy, case, kernel))
        assert_gradients(gradients, case.problem, **case.backward)
    assert np.isfinite(gradients[0][:, :260]).all()
