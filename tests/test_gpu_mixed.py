"""A kernel for sequences of few queries beside one for those of many, on a GPU of Hopper's."""

import numpy as np
import pytest
from feature_cases import hide_nan, in_pages, packed_case
from gpu_calls import captured, check_forward, on_gpu, results_of, tensors, written
from tolerance import assert_attention

import cufa
from cufa import call
from cufa.device import current
from cufa.plan import mixed

pytestmark = pytest.mark.gpu

FEWER = mixed.MANY_QUERIES - 1
# How many sequences, the queries of one that has many, and the most keys: so few that each tile has a block,
# and so many that they are shared out.
SHORT, LONG = (36, 50, 300), (12, 150, 2500)


def draw(rng, lengths, dtype="bfloat16", **sizes):
    sequences, longest, most_keys = lengths
    rows = rng.choice([0, 1, 1, 1, 2, FEWER, FEWER + 1, FEWER + 2], sequences)
    keys = rng.permutation(np.geomspace(1, most_keys, sequences).astype(int))
    rows[3], keys[3], keys[5] = longest, most_keys, 0
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128, **sizes}
    return packed_case(rng, dtype, int(rng.integers(0, 99)), rows.tolist(), keys.tolist(), **sizes)


def paged(rng, case, page_size=16):
    case = in_pages(rng, case, page_size)
    hide_nan(case)
    return case


@pytest.fixture(autouse=True)
def hopper(cupy):
    if str(current().arch) != "sm_90a":
        pytest.skip("fwd_6_wgmma needs sm_90a")


@pytest.fixture(params=[False, True], ids=["one after the other", "half of the SMs for each"])
def always_mixed(request, monkeypatch):
    """Two kernels whatever that costs."""

    def mix_of(problem, device):
        few, many = mixed.alike(problem, problem.batch - 1, 1), mixed.alike(problem, 1, 500)
        return mixed.Mix(few, many, request.param, "asked for")

    monkeypatch.setattr(mixed, "mix_of", mix_of)
    call.forget()
    yield
    call.forget()


def test_what_is_chosen(cupy, rng):
    case = paged(rng, draw(rng, (24, 400, 4000), heads=8, kv_heads=2))
    q, k, v, _ = tensors(cupy, case)
    assert cufa.plan(q, k, v, **on_gpu(cupy, case.forward)).beside is not None
    check_forward(cupy, case)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=str)
@pytest.mark.parametrize("page_size", [8, 48])
def test_lengths(cupy, rng, always_mixed, lengths, page_size):
    for _ in range(2):
        check_forward(cupy, paged(rng, draw(rng, lengths), page_size))


@pytest.mark.parametrize(
    "features", [("sink", "seqused_k"), ("window",), ("alibi_slopes", "softcap"), ("mask",)], ids=str
)
def test_features(cupy, rng, always_mixed, features):
    case = draw(rng, LONG, "float16", head_dim=64, head_dim_v=64)
    heads = case.problem.q.shape[1]
    if "sink" in features:
        case.arrays["sink"] = rng.standard_normal(heads).astype(np.float32)
    if "alibi_slopes" in features:
        case.arrays["alibi_slopes"] = rng.uniform(0.01, 0.5, heads).astype(np.float32)
    if "seqused_k" in features:
        held = np.diff(case.arrays["cu_seqlens_k"])
        case.arrays["seqused_k"] = rng.integers(0, held + 1).astype(np.int32)
    if "window" in features:
        case.numbers["window"] = (150, 0)
    if "mask" in features:
        case.arrays["mask"] = rng.random((1, 1, 1, LONG[2])) < 0.7
    if "softcap" in features:
        case.numbers.update(softcap=2.5, causal=False)
    check_forward(cupy, paged(rng, case))


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=str)
def test_the_same_bits(cupy, rng, always_mixed, lengths):
    case = paged(rng, draw(rng, lengths))
    q, k, v, _ = tensors(cupy, case)
    begin, end = case.arrays["cu_seqlens_q"][[0, -1]]
    options = on_gpu(cupy, case.forward)

    def bits():
        return cufa.attention(q, k, v, **options)[begin:end].view("u2")

    first = bits()
    assert not any((bits() != first).any() for _ in range(1000))


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=str)
def test_workspace_and_graph(cupy, rng, always_mixed, lengths):
    """Captured with some lengths, run with others."""
    case, other = (paged(rng, draw(rng, lengths)) for _ in range(2))
    tokens = max(len(x.problem.q) for x in (case, other))
    (shape, dtype), (lse_shape, lse_dtype) = results_of(other)
    q, out = (cupy.full((tokens, *shape[1:]), np.nan, dtype) for _ in range(2))
    lse = cupy.full((lse_shape[0], tokens), np.nan, lse_dtype)
    k, v = (cupy.asarray(x) for x in (case.problem.k, case.problem.v))
    options = on_gpu(cupy, case.forward)
    needed = cufa.plan(q, k, v, **options).workspace_bytes
    workspace = cupy.full(max(1, needed), 0xFF, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)

    def attend():
        cufa.attention(q, k, v, out=out, lse=lse, workspace=workspace, **options)

    with stream:
        graph, _ = captured(cupy, attend)
        others = tensors(cupy, other)
        q[: len(others[0])] = others[0]
        k[...], v[...] = others[1:3]
        for name, array in on_gpu(cupy, other.arrays).items():
            options[name][...] = array
        for result in (out, lse):
            result.fill(np.nan)
        workspace.fill(0xFF)
        graph.launch()
        stream.synchronize()
    rows = len(others[0])
    with np.errstate(invalid="ignore"):
        assert_attention(*written(other, out[:rows], lse[:, :rows]), other.problem, **other.forward)
