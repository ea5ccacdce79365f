"""The functions under other libraries' names, against what those libraries say that they compute."""

import inspect
import itertools
import math
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import cufa
from cufa import compat, reference
from cufa.compat import appending, kvcache

LENGTHS = [(2, 5), (5, 2), (7, 7), (1, 6), (6, 1)]


def draw(rng, seqlen_q, seqlen_k, layout="bshd", heads=4, kv_heads=2):
    shapes = [(2, seqlen_q, heads, 8), (2, seqlen_k, kv_heads, 8), (2, seqlen_k, kv_heads, 8)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [x.transpose(0, 2, 1, 3).copy() for x in arrays] if layout == "bhsd" else arrays


def expected(q, k, v, visible, bias=0.0):
    """Attention in float64 of (batch, heads, seqlen, head_dim), with a mask and a bias of that shape."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]) + bias
    weights = np.where(visible, np.exp(scores), 0)
    total = weights.sum(axis=3, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v


def turned(*arrays):
    return [x.transpose(0, 2, 1, 3) for x in arrays]


def close(actual, exact):
    np.testing.assert_allclose(actual, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_causal_mask_begins_in_the_first_corner(rng, lengths, causal):
    q, k, v = draw(rng, *lengths, "bhsd")
    visible = np.tri(*lengths, dtype=bool) if causal else np.ones(lengths, bool)
    out = compat.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    close(out, expected(q, k, v, visible))


def test_pytorchs_masks(rng):
    q, k, v = draw(rng, 6, 9, "bhsd", kv_heads=4)
    kept = rng.random((2, 1, 6, 9)) < 0.7
    added = rng.standard_normal((6, 9)).astype(np.float32)
    close(compat.scaled_dot_product_attention(q, k, v, kept), expected(q, k, v, kept))
    close(compat.scaled_dot_product_attention(q, k, v, added), expected(q, k, v, True, added))
    with pytest.raises(ValueError, match="only one of them"):
        compat.scaled_dot_product_attention(q, k, v, kept, is_causal=True)


def test_arrays_without_a_batch(rng):
    q, k, v = (x[:1] for x in draw(rng, 6, 9, "bhsd"))
    added = rng.standard_normal((4, 6, 9)).astype(np.float32)
    options = {"enable_gqa": True, "return_lse": True, "attn_mask": added}
    results = compat.scaled_dot_product_attention(*(x[0] for x in (q, k, v)), **options)
    for one, batch in zip(results, compat.scaled_dot_product_attention(q, k, v, **options), strict=True):
        np.testing.assert_array_equal(one, batch[0])
    options = {"enable_gqa": True, "is_causal": True, "scale": 0.5, "dropout_p": 0.3, "seed": 5, "offset": 7}
    out = compat.scaled_dot_product_attention(q[0], k[0], v[0], **options)
    np.testing.assert_array_equal(out, compat.scaled_dot_product_attention(q, k, v, **options)[0])
    q, k, v = turned(q, k, v)
    options = {"bias": added[None], "query_seq_lengths": np.array([5]), "local_window_size": 3}
    out = compat.dot_product_attention(q[0], k[0], v[0], **options)
    np.testing.assert_array_equal(out, compat.dot_product_attention(q, k, v, **options)[0])
    options = {"mask": added[None] > 0, "is_causal": True, "scale": 0.5, "return_residual": True}
    options["key_value_seq_lengths"] = np.array([5])
    results = compat.dot_product_attention(q[0], k[0], v[0], **options)
    for one, batch in zip(results, compat.dot_product_attention(q, k, v, **options), strict=True):
        np.testing.assert_array_equal(one, batch[0])


def test_masks_and_biases_with_one_element_for_all_keys(rng):
    """As for queries that are padding: those that are hidden from all keys have output 0."""
    q, k, v = draw(rng, 6, 9, "bhsd", kv_heads=4)
    kept = rng.random((2, 1, 6, 1)) < 0.7
    added = rng.standard_normal((2, 4, 1, 1)).astype(np.float32)
    close(compat.scaled_dot_product_attention(q, k, v, kept), expected(q, k, v, kept))
    close(compat.scaled_dot_product_attention(q, k, v, added), expected(q, k, v, True, added))
    out = compat.dot_product_attention(*turned(q, k, v), added, kept, key_value_seq_lengths=np.array([4, 9]))
    visible = kept & (np.arange(9) < np.array([4, 9])[:, None, None, None])
    close(*turned(out), expected(q, k, v, visible, added))


class CausalBias:
    """Stands for torch's, which is a tensor whose memory holds nothing."""

    __module__ = "torch.nn.attention.bias"

    def __init__(self, variant, seq_len_q, seq_len_kv):
        self.variant = SimpleNamespace(name=variant)
        self.seq_len_q, self.seq_len_kv = seq_len_q, seq_len_kv


@pytest.mark.parametrize("lengths", LENGTHS)
def test_pytorchs_causal_biases(rng, lengths):
    q, k, v = draw(rng, *lengths, "bhsd")
    for variant, causal in (("UPPER_LEFT", np.tri(*lengths)), ("LOWER_RIGHT", lower_right(*lengths))):
        attn_mask = CausalBias(variant, *lengths)
        out = compat.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)
        close(out, expected(q, k, v, causal.astype(bool)))
        with pytest.raises(ValueError, match=r"^is_causal is True and attn_mask is given"):
            compat.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=True, enable_gqa=True)
        rows, keys = lengths
        message = f"^attn_mask is a causal bias of {rows} queries x 12 keys; it must be of {rows} x {keys}$"
        with pytest.raises(ValueError, match=message):
            compat.scaled_dot_product_attention(q, k, v, CausalBias(variant, rows, 12), enable_gqa=True)


def lower_right(seqlen_q, seqlen_k):
    return np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q)


def test_pytorchs_causal_biases_beside_pytorch(rng):
    torch = pytest.importorskip("torch")
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k, v = (torch.from_numpy(x) for x in draw(rng, 5, 9, "bhsd", kv_heads=4))
    for attn_mask in (bias.causal_upper_left(5, 9), bias.causal_lower_right(5, 9)):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask)
        close(compat.scaled_dot_product_attention(q, k, v, attn_mask), theirs)
        with pytest.raises(TypeError, match=r"^mask is a torch\S*CausalBias, whose elements may be others"):
            compat.dot_product_attention(q, k, v, mask=attn_mask)


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_torch_tensors_that_are_more_than_their_memory_are_named(rng):
    torch = pytest.importorskip("torch")
    masked = pytest.importorskip("torch.masked")
    x = torch.zeros(2, 4, 4, 8)
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    for strange in (nested, masked.masked_tensor(x, x == 0), x.to_sparse()):
        for function, name in (
            (compat.scaled_dot_product_attention, "key"),
            (compat.dot_product_attention, "key"),
            (compat.flash_attn_func, "k"),
            (compat.flash_attn_with_kvcache, "k_cache"),
        ):
            with pytest.raises(TypeError, match=rf"^{name} is a torch\S*\.(Masked)?Tensor[, ]"):
                function(x, strange, x)
        with pytest.raises(TypeError, match=r"^kv is a torch"):
            compat.flash_attn_kvpacked_func(x, strange)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [
        (4, 2, "with enable_gqa=True they may differ"),
        (16, 24, "they must be the same"),
        (2, 4, "they must be the same"),
        (4, 0, "they must be the same"),
    ],
)
def test_pytorchs_heads_may_differ_only_if_that_is_asked_for(heads, kv_heads, allowed):
    q, k = np.zeros((2, heads, 1, 32)), np.zeros((2, kv_heads, 2, 32))
    message = (
        f"query has {heads} heads and key {kv_heads}; {allowed} (query has shape {q.shape} and key "
        f"{k.shape}, read as (batch, heads, seqlen, head_dim))"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compat.scaled_dot_product_attention(q, k, k, is_causal=True)  # fewer keys are seen than it has


WINDOWS = [None, 1, np.int64(1), (0, 2), (2, 0), (3, 1), 2**31 - 1]


@pytest.mark.parametrize(
    ("lengths", "causal", "window"), list(itertools.product(LENGTHS, [False, True], WINDOWS))
)
def test_jaxs_windows_follow_the_diagonal_from_the_first_corner(rng, lengths, causal, window):
    q, k, v = draw(rng, *lengths)
    i, j = np.ogrid[: lengths[0], : lengths[1]]
    visible = np.ones(lengths, bool)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        visible &= (j >= i - left) & (j <= i + right)
    if causal:
        visible &= j <= i
    out = compat.dot_product_attention(q, k, v, is_causal=causal, local_window_size=window)
    close(*turned(out), expected(*turned(q, k, v), visible))


def test_jaxs_lengths_bias_and_mask(rng):
    q, k, v = draw(rng, 6, 9)
    bias = rng.standard_normal((1, 4, 6, 9)).astype(np.float32)
    kept = rng.random((2, 1, 6, 9)) < 0.7
    rows, keys = np.array([6, 3], np.int32), np.array([4, 9], np.int32)
    out, lse = compat.dot_product_attention(
        *(q, k, v, bias, kept),
        is_causal=True,
        query_seq_lengths=rows,
        key_value_seq_lengths=keys,
        return_residual=True,
    )
    visible = kept & np.tri(6, 9, dtype=bool) & (np.arange(9) < keys[:, None, None, None])
    exact = expected(*turned(q, k, v), visible, bias)
    exact[1, :, 3:] = 0
    close(*turned(out), exact)
    assert lse.shape == (2, 6, 4)


def test_jaxs_rows_beyond_a_length_see_no_key(rng):
    """So their LSE says, by which gradients and merging go."""
    q, k, v = draw(rng, 6, 9)
    options = {"query_seq_lengths": np.array([6, 3], np.int32), "return_residual": True}
    out, lse = compat.dot_product_attention(q, k, v, **options)
    exact, exact_lse = cufa.attention(q, k, v, return_lse=True)
    exact[1, 3:], exact_lse[1, :, 3:] = 0, -np.inf
    np.testing.assert_array_equal(out, exact)
    lse = lse.swapaxes(1, 2)
    np.testing.assert_array_equal(lse, exact_lse)

    dout, dlse = np.ones_like(out), np.ones_like(lse)
    dq, *of_keys = cufa.attention_backward(dout, q, k, v, out, lse, dlse=dlse, backend="numpy")
    assert dq[1, :3].all()
    np.testing.assert_array_equal(dq[1, 3:], 0)
    shorter = [x[1:, :3] for x in (dout, q)], [k[1:], v[1:], out[1:, :3], lse[1:, :, :3].copy()]
    _, *exact = cufa.attention_backward(
        *shorter[0], *shorter[1], dlse=dlse[1:, :, :3].copy(), backend="numpy"
    )
    for gradient, exact_gradient in zip(of_keys, exact, strict=True):
        close(gradient[1:], exact_gradient)

    halves = [compat.dot_product_attention(q, k[:, half], v[:, half], **options) for half in np.s_[:4, 4:]]
    merged, merged_lse = cufa.merge(*(x for out, lse in halves for x in (out, lse.swapaxes(1, 2))))
    close(merged, out)
    close(merged_lse, lse)


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_jaxs_lengths_may_be_unsigned(rng, name):
    q, k, v = draw(rng, 6, 9)
    lengths = np.array([2, 5], np.int32)
    out = compat.dot_product_attention(q, k, v, **{name: lengths.astype(np.uint32)})
    np.testing.assert_array_equal(out, compat.dot_product_attention(q, k, v, **{name: lengths}))


def test_jaxs_residual_has_the_axes_of_the_output(rng):
    q, k, v = draw(rng, 6, 9)
    options = {"is_causal": True, "return_residual": True}
    out, residual = compat.dot_product_attention(q, k, v, **options)
    _, exact = cufa.attention(q, k[:, :6], v[:, :6], causal=True, return_lse=True)
    np.testing.assert_array_equal(residual, exact.transpose(0, 2, 1))
    assert (out.shape, residual.dtype) == ((*residual.shape, 8), np.float32)
    _, of_one = compat.dot_product_attention(q[0], k[0], v[0], **options)
    np.testing.assert_array_equal(of_one, residual[0])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "dot_product_attention"])
def test_gradients_of_calls_that_are_causal_from_the_top_left(rng, function, lengths):
    """As the docstrings and the README say, beside the reference with a mask from the top left."""
    layout = {"scaled_dot_product_attention": "bhsd", "dot_product_attention": "bshd"}[function]
    q, k, v = draw(rng, *lengths, layout)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    rows, keys = lengths
    if layout == "bhsd":
        out, lse = compat.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, return_lse=True
        )
        seen = np.s_[:, :, :rows]
    else:
        out, lse = compat.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
        seen, lse = np.s_[:, :rows], lse.swapaxes(1, 2)
    rule = {"causal": True} if rows <= keys else {"window": (None, rows - keys)}
    dq, dk, dv = cufa.attention_backward(dout, q, k[seen], v[seen], out, lse, layout=layout, **rule)

    arrays = (dout, q, k, v)
    if layout == "bhsd":
        arrays, (dq, dk, dv) = turned(*arrays), turned(dq, dk, dv)
    exact = reference.attention_backward(*arrays, mask=np.tri(*lengths, dtype=bool))
    close(dq, exact[0])
    for gradient, whole in zip((dk, dv), exact[1:3], strict=True):
        close(gradient, whole[:, :rows])
        np.testing.assert_array_equal(whole[:, rows:], 0)


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_jaxs_implementations_are_one(rng, implementation):
    q, k, v = draw(rng, 6, 9)
    out = compat.dot_product_attention(q, k, v, implementation=implementation)
    np.testing.assert_array_equal(out, compat.dot_product_attention(q, k, v))


def test_lengths_of_queries_in_bfloat16(rng):
    q, k, v = (x.astype("bfloat16") for x in draw(rng, 6, 9))
    out = compat.dot_product_attention(q, k, v, query_seq_lengths=np.array([6, 3], np.int32))
    assert out.dtype == "bfloat16"
    np.testing.assert_array_equal(out[1, 3:], 0)
    np.testing.assert_array_equal(out[0], compat.dot_product_attention(q, k, v)[0])


def test_flash_attn(rng):
    q, k, v = draw(rng, 6, 9)
    slopes = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    options = {"causal": True, "softcap": 5.0, "alibi_slopes": slopes}
    out = compat.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, -1), 5.0, slopes)
    close(out, cufa.attention(q, k, v, softmax_scale=0.3, window=(4, None), **options))


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": 5, "offset": 2}])
def test_flash_attn_returns_the_lse_and_with_dropout_the_probabilities(rng, dropout):
    q, k, v = draw(rng, 6, 9)
    out, lse, probabilities = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **dropout)
    same, same_lse = cufa.attention(q, k, v, causal=True, return_lse=True, **dropout)
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)
    if dropout:
        close(probabilities @ np.repeat(v, 2, axis=2).transpose(0, 2, 1, 3), *turned(same))
    else:
        assert probabilities is None


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": 0}])
def test_flash_attn_4_returns_a_pair(rng, dropout):
    q, k, v = draw(rng, 6, 9)
    same, same_lse = cufa.attention(q, k, v, causal=True, return_lse=True, **dropout)
    out, lse = compat.flash_attn_func(q, k, v, causal=True, return_lse=True, **dropout)
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
def test_flash_attn_returns_a_pair_or_three(rng, function):
    q, k, v = draw(rng, 6, 9)
    arguments = [q, k, v]
    if function == "flash_attn_varlen_func":
        ends = [np.array([0, n], np.int32) for n in (6, 9)]
        arguments = [q[0], k[0], v[0], *ends]
    call = getattr(compat, function)
    message = r"^return_lse and return_attn_probs are both True; only one of them may be$"
    with pytest.raises(ValueError, match=message):
        call(*arguments, return_lse=True, return_attn_probs=True)
    with pytest.raises(TypeError, match=r"^return_lse is 'x'; it may be True or False$"):
        call(*arguments, return_lse="x")
    for returned, count in (({"return_lse": True}, 2), ({"return_attn_probs": True}, 3)):
        assert len(call(*arguments, **returned)) == count


def test_flash_attns_packed_sequences(rng):
    q, k, v = draw(rng, 6, 9)
    ends = [np.array([0, n, 2 * n], np.int32) for n in (6, 9)]
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, lse, none = compat.flash_attn_varlen_func(*packed, *ends, 6, 9, causal=True, return_attn_probs=True)
    assert none is None
    pair = compat.flash_attn_varlen_func(*packed, *ends, 6, 9, causal=True, return_lse=True)
    for actual, exact in zip(pair, (out, lse), strict=True):
        np.testing.assert_array_equal(actual, exact)
    same, same_lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    close(out.reshape(same.shape), same)
    close(lse.reshape(4, 2, 6).transpose(1, 0, 2), same_lse)


HINTS = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
METADATA = {"scheduler_metadata": np.zeros(3, np.int32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_flash_attn_3_and_4_add(rng, dtype):
    q, k, v = draw(rng, 6, 9)
    sink = np.array([0.5, -1, 2, 0], dtype)
    exact = cufa.attention(q, k, v, sink=sink.astype(np.float32))
    close(compat.flash_attn_func(q, k, v, learnable_sink=sink, **HINTS), exact)
    close(packed(q, k, v, learnable_sink=sink, **HINTS, **METADATA), exact)
    out = np.empty_like(q)
    result = compat.flash_attn_with_kvcache(q, k, v, learnable_sink=sink, out=out, **HINTS, **METADATA)
    assert result is out
    close(out, exact)


def test_flash_attns_window_may_be_an_array(rng):
    q, k, v = draw(rng, 6, 9)
    exact = cufa.attention(q, k, v, window=(3, 0))
    window = np.array([3, 0])
    close(compat.flash_attn_func(q, k, v, window_size=window), exact)
    close(packed(q, k, v, window_size=window), exact)
    close(compat.flash_attn_with_kvcache(q, k, v, window_size=window), exact)
    wrong = r"^window_size is a numpy\.ndarray of shape \(2,\); it may be None or a tuple or list"
    for call in (compat.flash_attn_func, packed, compat.flash_attn_with_kvcache):
        with pytest.raises(TypeError, match=wrong):
            call(q, k, v, window_size=window + 0.5)


def test_flash_attns_window_may_be_a_tensor(rng):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, draw(rng, 6, 9))
    out = compat.flash_attn_func(q, k, v, window_size=torch.tensor([3, -1]))
    assert torch.equal(out, compat.flash_attn_func(q, k, v, window_size=(3, -1)))


def test_torch_notices_that_new_keys_are_written_to_its_caches(rng, monkeypatch):
    """A kernel writes them; indices, which count for themselves, do not."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, draw(rng, 1, 1))
    k_cache, v_cache = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)
    seqused_k = torch.ones(2, dtype=torch.int32)
    new = appending.Prepared(q, seqused_k, write=lambda: None, kept={})
    monkeypatch.setattr(kvcache, "prepare", lambda *_: new)
    compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0)
    assert (k_cache._version, v_cache._version) == (1, 1)


def test_descales_of_flash_attn_3(rng):
    q, k, v = (x.astype("float8_e4m3fn") for x in draw(rng, 6, 9))
    descales = {f"{name}_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32) for name in "qkv"}
    exact = cufa.attention(q, k, v, **descales)
    np.testing.assert_array_equal(compat.flash_attn_func(q, k, v, **descales), exact)
    of_packed = packed(q, k, v, **descales)
    np.testing.assert_array_equal(of_packed.reshape(exact.shape), exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_descales_of_what_has_more_bits_are_ignored(rng, dtype):
    """As by flash-attn 3, for which vLLM gives ones. Those of a cache in 8 bits count."""
    q, k, v = (x.astype(dtype) for x in draw(rng, 6, 9))
    descales = {f"{name}_descale": np.full((2, 2), 3, np.float32) for name in "qkv"}
    exact = cufa.attention(q, k, v)
    for function in (compat.flash_attn_func, packed, compat.flash_attn_with_kvcache):
        np.testing.assert_array_equal(function(q, k, v, **descales), exact)
    with pytest.raises(TypeError, match=r"^q_descale is 1\.0; it must be an array of \(batch, kv_heads\)"):
        compat.flash_attn_func(q, k, v, q_descale=1.0)
    if dtype == "bfloat16":
        k, v = (x.astype("float8_e4m3fn") for x in (k, v))
        of_keys = {name: descales[name] for name in ("k_descale", "v_descale")}
        exact = cufa.attention(q, k, v, **of_keys)
        for function in (compat.flash_attn_func, compat.flash_attn_with_kvcache):
            np.testing.assert_array_equal(function(q, k, v, **descales), exact)


# The arguments of flash-attn 3, 4 and vLLM that these functions have, as their callers look them up.
OF_ALL = "learnable_sink s_aux num_splits pack_gqa sm_margin q_descale k_descale v_descale qv attention_chunk"
OF_SCORES = "score_mod mask_mod aux_tensors return_lse return_softmax_lse"


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (compat.flash_attn_func, OF_SCORES),
        (
            compat.flash_attn_varlen_func,
            f"{OF_SCORES} seqused_q seqused_k page_table scheduler_metadata fa_version q_v out",
        ),
        (
            compat.flash_attn_with_kvcache,
            "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens scheduler_metadata "
            "fa_version out return_lse return_softmax_lse",
        ),
    ],
)
def test_signatures_and_docs_have_the_names_of_flash_attn_3_and_4(function, names):
    names = f"{OF_ALL} {names}".split()
    assert set(names) <= inspect.signature(function).parameters.keys()
    documented = re.findall(r"^ {8}(\w+): ", function.__doc__, re.MULTILINE)
    assert set(names) <= set(documented)


def test_defaults_of_flash_attn_3_and_4(rng):
    q, k, v = draw(rng, 6, 9)
    exact = cufa.attention(q, k, v)
    defaults = {"qv": None, "attention_chunk": np.int32(0), "s_aux": None}
    of_scores = {"score_mod": None, "mask_mod": None, "aux_tensors": None}
    np.testing.assert_array_equal(compat.flash_attn_func(q, k, v, **defaults, **of_scores), exact)
    of_packed = defaults | of_scores | {"seqused_q": None, "q_v": None, "page_table": None}
    close(packed(q, k, v, **of_packed, return_softmax_lse=False, fa_version=3), exact)
    of_cache = {"page_table": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None, "max_seqlen_q": 6}
    of_cache |= defaults | {"rotary_seqlens": None, "return_lse": False, "fa_version": 3}
    np.testing.assert_array_equal(compat.flash_attn_with_kvcache(q, k, v, **of_cache), exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qv": np.zeros((2, 6, 4, 8))}, r"qv is a numpy\.ndarray of shape .* support; concatenate qv and q"),
        (
            {"attention_chunk": 64},
            "attention_chunk is 64, which cufa.compat does not support; give a mask_mod",
        ),
        ({"score_mod": max}, "score_mod is <built-in function max>, which .*; give one to cufa.attention"),
        ({"mask_mod": max}, "mask_mod is <built-in function max>, which .*; give one to cufa.attention"),
        ({"aux_tensors": [1]}, r"aux_tensors is \[1\], which .*; give a cufa\.ScoreMod or cufa\.MaskMod"),
    ],
)
def test_what_flash_attn_3_and_4_can_do_here_in_another_way(rng, options, message):
    for function in (compat.flash_attn_func, packed):
        with pytest.raises(ValueError, match=f"^{message}"):
            function(*draw(rng, 6, 9), **options)


def test_what_only_packed_sequences_of_flash_attn_3_can_do(rng):
    q, k, v = draw(rng, 6, 9)
    with pytest.raises(
        ValueError, match=r"^seqused_q is .* support; leave the queries that do not count out"
    ):
        packed(q, k, v, seqused_q=np.array([3, 6], np.int32))
    with pytest.raises(ValueError, match=r"^q_v is a numpy\.ndarray of shape .* support; concatenate"):
        packed(q, k, v, q_v=q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sink_by_the_name_of_transformers_and_vllm(rng, dtype):
    q, k, v = draw(rng, 6, 9)
    sink = np.array([0.5, -1, 2, 0], dtype)
    for function in (compat.flash_attn_func, packed, compat.flash_attn_with_kvcache):
        exact = function(q, k, v, learnable_sink=sink)
        np.testing.assert_array_equal(function(q, k, v, s_aux=sink), exact)
        np.testing.assert_array_equal(function(q, k, v, s_aux=None, learnable_sink=sink), exact)
        with pytest.raises(ValueError, match=r"^learnable_sink and s_aux are both given; they are names of"):
            function(q, k, v, learnable_sink=sink, s_aux=sink)
        with pytest.raises(ValueError, match=r"^s_aux has shape \(3,\); it must be \(heads,\)"):
            function(q, k, v, s_aux=sink[:3])


def test_an_lse_by_either_name(rng):
    q, k, v = draw(rng, 6, 9)
    ends = [np.array([0, n], np.int32) for n in (6, 9)]
    of_one = compat.flash_attn_varlen_func, (q[0], k[0], v[0], *ends)
    for function, given in (
        (compat.flash_attn_func, (q, k, v)),
        of_one,
        (compat.flash_attn_with_kvcache, (q, k, v)),
    ):
        exact = function(*given, return_lse=True)
        for flags in ({"return_softmax_lse": True}, {"return_softmax_lse": True, "return_lse": False}):
            for actual, expected in zip(function(*given, **flags), exact, strict=True):
                np.testing.assert_array_equal(actual, expected)
        for name in ("return_lse", "return_softmax_lse"):
            with pytest.raises(TypeError, match=f"^{name} is 'x'; it may be True or False$"):
                function(*given, **{name: "x"})


def test_vllms_call(rng):
    """With all of the names that its backend for flash-attn passes, and its values."""
    q, k, v = (x.astype("bfloat16") for x in draw(rng, 6, 9))
    table, *pages = pages_of(rng, 4, k, v)
    ends, lengths = np.array([0, 1, 9], np.int32), np.array([7, 4], np.int32)
    tokens = q.reshape(-1, *q.shape[2:])[:9]
    out, sink = np.empty_like(tokens), np.array([0.5, -1, 2, 0], "bfloat16")
    scale = np.broadcast_to(np.float32(1), (2, 2))
    result = compat.flash_attn_varlen_func(
        q=tokens,
        k=pages[0],
        v=pages[1],
        out=out,
        cu_seqlens_q=ends,
        max_seqlen_q=8,
        seqused_k=lengths,
        max_seqlen_k=7,
        softmax_scale=0.3,
        causal=True,
        alibi_slopes=None,
        window_size=[4, 0],
        block_table=table,
        softcap=0,
        scheduler_metadata=None,
        fa_version=3,
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
        num_splits=0,
        s_aux=sink,
        return_softmax_lse=True,
    )
    exact = cufa.attention(
        *(tokens, *pages),
        cu_seqlens_q=ends,
        seqused_k=lengths,
        block_table=table,
        softmax_scale=0.3,
        causal=True,
        window=(4, 0),
        sink=sink.astype(np.float32),
        return_lse=True,
    )
    assert result[0] is out
    for actual, expected in zip(result, exact, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_page_tables_are_block_tables(rng):
    q, k, v = draw(rng, 6, 9)
    table, *pages = pages_of(rng, 4, k, v)
    ends, lengths = np.array([0, 1, 6], np.int32), np.array([7, 4], np.int32)
    options = {"cu_seqlens_q": ends, "seqused_k": lengths}
    exact = compat.flash_attn_varlen_func(q[0], *pages, **options, block_table=table)
    out = compat.flash_attn_varlen_func(q[0], *pages, **options, page_table=table)
    np.testing.assert_array_equal(out, exact)
    with pytest.raises(ValueError, match=r"^page_table is given; how many keys there are, cu_seqlens_k or"):
        compat.flash_attn_varlen_func(q[0], *pages, ends, page_table=table)
    with pytest.raises(
        ValueError, match=r"^block_table and page_table are both given; they are names of one"
    ):
        compat.flash_attn_varlen_func(q[0], *pages, **options, block_table=table, page_table=table)


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_kvpacked_func", "scaled_dot_product"])
def test_dropout_takes_a_seed_or_an_offset(rng, function):
    """Flash-attn 3 and 4 have softmax_scale where flash-attn 2 has dropout_p."""
    q, k, v = draw(rng, 6, 9)
    message = r"dropout_p is 0\.25 and seed is not given; give a new seed or offset in every call"
    if function == "scaled_dot_product":
        with pytest.raises(ValueError, match=f"^{message}$"):
            pytorchs(q, k, v, dropout_p=0.25)
        return
    arguments = (q, k, v) if function == "flash_attn_func" else (q, np.stack([k, v], axis=2))
    with pytest.raises(ValueError, match=f"^{message}; if softmax_scale is meant, give it by name$"):
        getattr(compat, function)(*arguments, 0.25)
    with pytest.raises(ValueError, match=f"^{message}; if softmax_scale is meant, give it by name$"):
        packed(q, k, v, dropout_p=0.25)


@pytest.mark.parametrize("function", [compat.flash_attn_func, compat.scaled_dot_product_attention])
def test_no_dropout_needs_no_seed_but_one_that_is_given_is_checked(rng, function):
    q, k, v = draw(rng, 6, 6, kv_heads=4)
    np.testing.assert_array_equal(function(q, k, v, dropout_p=0), function(q, k, v))
    for name in ("seed", "offset"):
        with pytest.raises(ValueError, match=f"^{name} is -1; it must be at least 0 and below 2"):
            function(q, k, v, **{name: -1})


def test_memory_that_overlaps_is_named_as_the_caller_does(rng):
    q, k_cache, v_cache = draw(rng, 3, 9, kv_heads=4)
    memory = np.zeros(q.size, np.float32)
    lengths, out = memory.view(np.int32)[:2], memory.reshape(q.shape)
    call = compat.flash_attn_with_kvcache
    for options, name in (
        ({"cache_seqlens": 3, "out": k_cache[:, :3]}, "k_cache"),
        ({"cache_seqlens": lengths, "out": out}, "cache_seqlens"),
        ({"learnable_sink": memory[:4], "out": out}, "learnable_sink"),
        ({"s_aux": memory[:4], "out": out}, "s_aux"),
        ({"page_table": lengths[:, None], "out": out}, "page_table"),
        ({"cache_batch_idx": lengths, "out": out}, "cache_batch_idx"),
    ):
        with pytest.raises(ValueError, match=f"^out overlaps {name} in memory; it must not$"):
            call(q, k_cache, v_cache, **options)
    qkv = np.stack([k_cache, v_cache, v_cache], axis=2)[0]
    ends = np.array([0, 9], np.int32)
    with pytest.raises(ValueError, match=r"^out overlaps qkv in memory; it must not$"):
        compat.flash_attn_varlen_qkvpacked_func(qkv, ends, 9, out=qkv[:, 0])
    with pytest.raises(ValueError, match=r"^max_seqlen is -5; it may be None or an integer from 0 on$"):
        compat.flash_attn_varlen_qkvpacked_func(qkv, ends, -5)


def test_flash_attns_output_in_memory_that_is_given(rng):
    q, k, v = draw(rng, 6, 9)
    tokens = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    ends = [np.array([0, n, 2 * n], np.int32) for n in (6, 9)]
    out = np.empty_like(tokens[0])
    assert compat.flash_attn_varlen_func(*tokens, *ends, out=out) is out
    close(out.reshape(q.shape), cufa.attention(q, k, v))
    with pytest.raises(ValueError, match=r"^out overlaps q in memory"):
        compat.flash_attn_varlen_func(*tokens, *ends, out=tokens[0])


@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        ([1.0], TypeError, "learnable_sink is a list; it may be a NumPy array"),
        (np.zeros(4, np.int16), TypeError, "learnable_sink has dtype int16; it must be float32"),
        (np.zeros(3, "bfloat16"), ValueError, r"learnable_sink has shape \(3,\); it must be \(heads,\)"),
    ],
)
def test_what_is_no_sink_for_flash_attn(rng, sink, error, message):
    for function in (compat.flash_attn_func, packed, compat.flash_attn_with_kvcache):
        with pytest.raises(error, match=f"^{message}"):
            function(*draw(rng, 6, 9), learnable_sink=sink)


def test_flash_attn_4s_sink_in_bfloat16_of_torch(rng):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, draw(rng, 6, 9))
    sink = torch.tensor([0.5, -1, 2, 0])
    out = compat.flash_attn_func(q, k, v, learnable_sink=sink.bfloat16())
    close(out, cufa.attention(q, k, v, sink=sink))


def test_flash_attns_arrays_in_one(rng):
    q, k, v = draw(rng, 6, 6, kv_heads=4)
    options = {"causal": True, "window_size": (3, -1), "softcap": 5.0}
    exact = compat.flash_attn_func(q, k, v, 0.0, 0.3, **options)
    qkv, kv = np.stack([q, k, v], axis=2), np.stack([k, v], axis=2)
    close(compat.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, **options), exact)
    close(compat.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, **options), exact)
    close(compat.flash_attn_kvpacked_func(q, kv[:, :, :, :2]), cufa.attention(q, k[:, :, :2], v[:, :, :2]))
    q, qkv, kv, exact = (x.reshape(-1, *x.shape[2:]) for x in (q, qkv, kv, exact))
    ends = np.array([0, 6, 12], np.int32)
    close(compat.flash_attn_varlen_qkvpacked_func(qkv, ends, 6, 0.0, 0.3, **options), exact)
    close(compat.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 6, 6, 0.0, 0.3, **options), exact)


def test_what_flash_attn_would_not_take_apart_is_named(rng):
    q, k, v = draw(rng, 6, 6, kv_heads=4)
    kv = np.stack([k, v], axis=2)
    with pytest.raises(
        ValueError, match=r"^qkv has shape \(2, 6, 2, 4, 8\); it must be \(batch, seqlen, 3, "
    ):
        compat.flash_attn_qkvpacked_func(kv)
    with pytest.raises(
        ValueError, match=r"^kv has shape \(2, 6, 4, 8\); it must be \(batch, seqlen_k, 2, kv_heads"
    ):
        compat.flash_attn_kvpacked_func(q, k)
    ends = np.array([0, 2])
    with pytest.raises(
        ValueError, match=r"^qkv has shape \(2, 6, 2, 4, 8\); it must be \(tokens, 3, heads, head_dim\)"
    ):
        compat.flash_attn_varlen_qkvpacked_func(kv, ends)
    with pytest.raises(
        ValueError, match=r"^kv has shape \(2, 6, 2, 4, 8\); it must be \(tokens, 2, kv_heads, "
    ):
        compat.flash_attn_varlen_kvpacked_func(q[0], kv, ends, ends)
    with pytest.raises(TypeError, match=r"^cu_seqlens has dtype int64; it must be int32"):
        compat.flash_attn_varlen_qkvpacked_func(np.stack([q, k, v], axis=2)[0], ends)
    with pytest.raises(TypeError, match=r"^kv is a list; it may be a NumPy array"):
        compat.flash_attn_kvpacked_func(q, kv.tolist())


PACKED = np.zeros((2, 16, 3, 4, 8), np.float32)
ENDS = np.array([0, 16], np.int32)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("qkvpacked", (PACKED.astype(int),), TypeError, "qkv has dtype int64; it may be"),
        (
            "qkvpacked",
            (PACKED[..., :0],),
            ValueError,
            "qkv[..., 0, :, :] has head dim 0 (shape (2, 16, 4, 0)); ",
        ),
        (
            "kvpacked",
            (PACKED[:, :, 0], PACKED[:, :, 1:].astype(np.float16)),
            TypeError,
            "kv has dtype float16 and q float32; they must be the same",
        ),
        (
            "kvpacked",
            (PACKED[:, :, 0], PACKED[:1, :, 1:]),
            ValueError,
            "kv[..., 0, :, :] has shape (1, 16, 4, 8) and q (2, 16, 4, 8); the batch",
        ),
        (
            "kvpacked",
            (PACKED[:, :, 0], PACKED[:, :, 1:, :3]),
            ValueError,
            "q has 4 heads and kv[..., 0, :, :] 3; the query heads must be a multiple of the key-value heads "
            "(q has shape (2, 16, 4, 8) and kv[..., 0, :, :] (2, 16, 3, 8), read as",
        ),
        ("kvpacked", (PACKED[..., 0, :, :0], PACKED[:, :, 1:, :, :0]), ValueError, "q has head dim 0 (shape"),
        ("varlen_qkvpacked", (PACKED[0].astype(int), ENDS), TypeError, "qkv has dtype int64; it may be"),
        (
            "varlen_qkvpacked",
            (PACKED[0], ENDS + ENDS // 16),
            ValueError,
            "cu_seqlens ends with 17, but qkv has 16",
        ),
        (
            "varlen_kvpacked",
            (PACKED[0, :, 0], PACKED[0, :, 1:], ENDS, ENDS + ENDS // 16),
            ValueError,
            "cu_seqlens_k ends with 17, but kv has 16",
        ),
    ],
)
def test_errors_name_arrays_in_one_and_their_parts_beside_shapes(function, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        getattr(compat, f"flash_attn_{function}_func")(*arguments)


def packed(q, k, v, **options):
    """flash_attn_varlen_func for a batch of sequences that are equally long."""
    ends = [np.arange(len(x) + 1, dtype=np.int32) * x.shape[1] for x in (q, k)]
    out = compat.flash_attn_varlen_func(*(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), *ends, **options)
    return out.reshape(*q.shape[:3], v.shape[3])


class OnGPU:
    """Stands for an integer in the memory of a GPU, for which whoever reads it waits."""

    def __index__(self):
        raise AssertionError("the GPU is waited for")

    __int__ = __index__


def test_the_longest_of_flash_attns_packed_sequences_are_not_read(rng):
    q, k, v = draw(rng, 6, 9)
    out = packed(q, k, v, max_seqlen_q=OnGPU(), max_seqlen_k=OnGPU())
    np.testing.assert_array_equal(out, packed(q, k, v))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.3, "seed": 0},
        {"dropout_p": 0.3, "seed": 5},
        {"dropout_p": 0.3, "offset": 7},
    ],
)
def test_what_is_not_asked_for_is_off_and_dropout_is_ours(rng, options):
    q, k, v = draw(rng, 6, 9, kv_heads=4)
    exact = cufa.attention(q, k, v, **options)
    for function in (compat.flash_attn_func, packed, pytorchs):
        out = function(q, k, v, **options)
        close(out if out.shape == exact.shape else turned(out)[0], exact)
    if not options:
        close(compat.dot_product_attention(q, k, v), exact)


CACHE_OPTIONS = [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 5.0}]


def attention_of_each(
    q, k_cache, v_cache, held, padding=(0, 0), causal=False, window_size=(-1, -1), softcap=0.0
):
    """The output and the LSE over the `held` keys of each sequence but its padding, in a call of its own."""
    results = [
        cufa.attention(
            *(q[[b]], k_cache[[b], padding[b] : count], v_cache[[b], padding[b] : count]),
            causal=causal,
            window=window_size,
            softcap=softcap,
            return_lse=True,
        )
        for b, count in enumerate(held)
    ]
    return [np.concatenate(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("options", CACHE_OPTIONS)
@pytest.mark.parametrize("held", [5, np.int64(0), np.array([0, 7], np.int32), np.array([9, 3], np.int32)])
def test_flash_attns_cache_is_read_as_far_as_it_is_filled(rng, options, held):
    q, k_cache, v_cache = draw(rng, 3, 9)
    k_cache[1, 7:] = np.nan  # keys that this sequence never holds
    if np.max(held) < 9:
        v_cache[:, np.max(held) :] = np.nan
    before = k_cache.copy(), v_cache.copy()
    out, lse = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=held, return_softmax_lse=True, **options
    )
    exact, exact_lse = attention_of_each(q, k_cache, v_cache, np.broadcast_to(held, 2), **options)
    close(out, exact)
    close(lse, exact_lse)
    np.testing.assert_array_equal(k_cache, before[0])
    np.testing.assert_array_equal(v_cache, before[1])


def test_flash_attns_cache_is_whole_if_no_length_is_given(rng):
    q, k_cache, v_cache = draw(rng, 3, 9)
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, softmax_scale=0.3)
    np.testing.assert_array_equal(out, cufa.attention(q, k_cache, v_cache, softmax_scale=0.3))


@pytest.mark.parametrize("options", CACHE_OPTIONS)
@pytest.mark.parametrize("held", [4, np.array([0, 6], np.int32)])
def test_flash_attns_cache_takes_new_keys_behind_those_it_holds(rng, options, held):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    expected_caches = k_cache.copy(), v_cache.copy()
    for b, count in enumerate(np.broadcast_to(held, 2)):
        for cache, new in zip(expected_caches, (k, v), strict=True):
            cache[b, count : count + 3] = new[b]
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held, **options)
    np.testing.assert_array_equal(k_cache, expected_caches[0])
    np.testing.assert_array_equal(v_cache, expected_caches[1])
    exact, _ = attention_of_each(q, *expected_caches, np.broadcast_to(held, 2) + 3, **options)
    close(out, exact)


@pytest.mark.parametrize("options", CACHE_OPTIONS)
@pytest.mark.parametrize("padding", [[0, 6], [6, 1]])
@pytest.mark.parametrize("paged", [False, True])
def test_flash_attns_cache_with_padding_on_the_left(rng, options, padding, paged):
    """Which queries do not see, even if it is NaN; of one sequence all keys but the new ones."""
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    held, padding = np.array([6, 6], np.int32), np.array(padding, np.int32)
    whole = [np.concatenate([cache[:, :6], new], axis=1) for cache, new in ((k_cache, k), (v_cache, v))]
    exact, exact_lse = attention_of_each(q, *whole, held + 3, padding, **options)
    for b, cache in itertools.product(range(2), (k_cache, v_cache)):
        cache[b, : padding[b]] = np.nan
    caches, table = (k_cache, v_cache), None
    if paged:
        table, *caches = pages_of(rng, 4, k_cache, v_cache)
    options = options | {"cache_leftpad": padding, "block_table": table, "return_softmax_lse": True}
    out, lse = compat.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=held, **options)
    close(out, exact)
    close(lse, exact_lse)


def rounded_to_8_bits(descales, **arrays):
    """Keys or values in the units of a cache."""
    return [
        x if x.dtype == "float8_e4m3fn" else cufa.quantize(x, descale=descales[f"{name}_descale"])[0]
        for name, x in arrays.items()
    ]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16"])
@pytest.mark.parametrize("table", [None, np.array([[3, 0], [1, 2]], np.int32)], ids=["rows", "pages"])
def test_flash_attns_cache_in_8_bits(rng, table, dtype):
    """With new keys, which are in the units of the cache, or will be."""
    float8 = np.dtype("float8_e4m3fn")
    q, k_cache, v_cache = (x.astype(float8) for x in draw(rng, 3, 10))
    _, k, v = (x.astype(dtype) for x in draw(rng, 3, 3))
    q = q.astype(dtype)
    held = np.array([0, 6], np.int32)
    whole = [cache.copy() for cache in (k_cache, v_cache)]
    names = "qkv" if dtype == "float8_e4m3fn" else "kv"
    descales = {f"{name}_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32) for name in names}
    for b, count in enumerate(held):
        for cache, new in zip(whole, rounded_to_8_bits(descales, k=k, v=v), strict=True):
            cache[b, count : count + 3] = new[b]
    caches = [k_cache, v_cache]
    if table is not None:
        for number, cache in enumerate(caches):
            caches[number] = np.empty((4, 5, *cache.shape[2:]), float8)
            caches[number][table] = cache.reshape(2, 2, 5, *cache.shape[2:])
    options = {"cache_seqlens": held, "block_table": table, "causal": True, **descales}
    out = compat.flash_attn_with_kvcache(q, *caches, k, v, **options)
    expected = cufa.attention(q, *whole, seqused_k=held + 3, causal=True, **descales)
    assert out.dtype == np.dtype("float16" if dtype == "float16" else "bfloat16")
    np.testing.assert_array_equal(out, expected)


def test_keys_in_pages_are_not_all_that_there_is_room_for(rng):
    q, k, v = draw(rng, 6, 9)
    table, *paged = pages_of(rng, 4, k, v)
    ends = np.array([0, 1, 6], np.int32)
    with pytest.raises(ValueError, match=r"^block_table is given; .* cu_seqlens_k or seqused_k must say"):
        compat.flash_attn_varlen_func(q[0], *paged, ends, None, block_table=table)


@pytest.mark.parametrize("table", [None, np.array([[3, 0], [1, 2]], np.int32)], ids=["rows", "pages"])
def test_flash_attns_cache_with_a_sink_and_memory_for_the_output(rng, table):
    q, k_cache, v_cache = draw(rng, 3, 10)
    _, k, v = draw(rng, 3, 3)
    if table is not None:
        k_cache, v_cache = (x.reshape(4, 5, 2, 8) for x in (k_cache, v_cache))
    given = {"cache_seqlens": np.array([0, 6], np.int32), "block_table": table, "causal": True}
    given |= {"learnable_sink": np.array([0.5, -1, 2, 0], np.float32), "return_softmax_lse": True}
    out = np.empty_like(q)
    result, lse = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given, out=out)
    assert result is out
    given["cache_seqlens"] += 3
    exact, exact_lse = compat.flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_array_equal(lse, exact_lse)


@pytest.mark.parametrize(
    ("out_of", "message"),
    [
        (lambda q, **_: np.empty_like(q[:1]), "out has shape"),
        (lambda q, **_: np.broadcast_to(np.float32(0), q.shape), "out is read-only"),
        (lambda q, **_: q, "out overlaps q in memory"),
        (
            lambda k_cache, **_: np.lib.stride_tricks.as_strided(
                k_cache, (2, 3, 4, 8), (k_cache.strides[0], 128, 32, 4)
            ),
            ".* overlaps .* in memory",
        ),
    ],
)
def test_no_key_is_written_if_the_output_cannot_be(rng, out_of, message):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    before = k_cache.copy(), v_cache.copy()
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    with pytest.raises(ValueError, match=f"^{message}"):
        compat.flash_attn_with_kvcache(**given, cache_seqlens=4, out=out_of(**given))
    np.testing.assert_array_equal((k_cache, v_cache), before)


def test_errors_about_a_cache_in_8_bits_name_its_arguments(rng):
    q, k, v = (x.astype(np.float16) for x in draw(rng, 1, 1))
    caches = [np.zeros((2, 4, *x.shape[2:]), "float8_e4m3fn") for x in (k, v)]
    with pytest.raises(ValueError, match=r"^v_descale has 0\.0 for sequence 0, KV head 0"):
        compat.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=2, v_descale=np.zeros((2, 2), np.float32)
        )
    turn = {"rotary_cos": np.ones((4, 2), np.float16), "rotary_sin": np.zeros((4, 2), np.float16)}
    k, v = (x.astype("float8_e4m3fn") for x in (k, v))
    with pytest.raises(TypeError, match=r"^k has dtype float8_e4m3fn; with rotary_cos it must have 16 bits"):
        compat.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, **turn)
    assert not np.any([cache.view(np.uint8) for cache in caches])


def test_flash_attns_cache_in_8_bits_without_descales(rng):
    """New keys, turned, are rounded as they are."""
    q, k, v = (x.astype(np.float16) for x in draw(rng, 1, 1))
    caches = [np.zeros((2, 4, *x.shape[2:]), "float8_e4m3fn") for x in (k, v)]
    angles = rng.uniform(0, 1, (4, 2)).astype(np.float32)
    turn = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    compat.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, **turn)
    turned = cufa.rotary(k, *turn.values(), positions=np.array([[2], [2]]), interleaved=True)
    for cache, new in zip(caches, (turned, v), strict=True):
        np.testing.assert_array_equal(cache[:, 2:3], new.astype(np.float32).astype(cache.dtype))
        assert not cache[:, [0, 1, 3]].view(np.uint8).any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": None}, ValueError, "v must be given, too"),
        ({"k": None, "cache_seqlens": None}, ValueError, "k, cache_seqlens must be given, too"),
        ({"cache_seqlens": 8}, ValueError, "cache_seqlens is 8 and k has 2 keys; k_cache has room for 9"),
        (
            {name: np.zeros((2, 1, 2, 8), np.float32) for name in ("k", "v")} | {"cache_seqlens": 9},
            ValueError,
            "cache_seqlens is 9 and k has 1 key; k_cache has room for 9",
        ),
        (
            {"cache_seqlens": np.array([1, 8], np.int32)},
            ValueError,
            "cache_seqlens is 8 for sequence 1 and k has 2 keys",
        ),
        (
            {"cache_seqlens": np.array([1, -1], np.int32)},
            ValueError,
            "cache_seqlens is -1 for sequence 1 and k",
        ),
        (
            {"cache_seqlens": np.array([1, 2**31 - 1], np.int32)},
            ValueError,
            "cache_seqlens is 2147483647 for sequence 1",
        ),
        ({"cache_seqlens": 10}, ValueError, "cache_seqlens is 10; k_cache has room for 0 to 9"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1; k_cache has room for 0 to 9"),
        ({"cache_seqlens": [1, 2]}, TypeError, "cache_seqlens is a list; it may be a NumPy array"),
        ({"cache_seqlens": True}, TypeError, "cache_seqlens is True; it may be an integer, or"),
        ({"cache_seqlens": 3.0}, TypeError, r"cache_seqlens is 3\.0; it may be an integer, or"),
        ({"cache_seqlens": np.array([1], np.int32)}, ValueError, r"cache_seqlens has shape \(1,\); it must"),
        ({"k": np.zeros((2, 2, 3, 8), np.float32)}, ValueError, r"k has shape \(2, 2, 3, 8\); for k_cache"),
        ({"v": np.zeros((2, 3, 2, 8), np.float32)}, ValueError, r"v has shape \(2, 3, 2, 8\); for v_cache"),
        ({"k": np.zeros((2, 2, 2, 8))}, TypeError, "k has dtype float64; as k_cache it must be float32"),
        (
            {name: np.zeros((2, 9, 2, 8), "float8_e4m3fn") for name in ("k_cache", "v_cache")},
            TypeError,
            "k has dtype float32; for k_cache it may be float8_e4m3fn, bfloat16 or float16",
        ),
        (
            {"q": np.zeros((2, 3, 3, 8), np.float32)},
            ValueError,
            "q has 3 heads and k_cache 2; the query heads",
        ),
        ({"q": None}, TypeError, "q is None; it may be a NumPy array"),
        (
            {"v_cache": np.zeros((2, 8, 2, 8), np.float32)},
            ValueError,
            r"v_cache has shape \(2, 8, 2, 8\) and",
        ),
        (
            {"k_cache": np.zeros((1, 9, 2, 8), np.float32)},
            ValueError,
            r"k_cache has shape \(1, 9, 2, 8\); it must have at least q's batch, 2$",
        ),
        (
            {name: np.zeros((1, 9, 2, 8), np.float32) for name in ("v_cache", "v")},
            ValueError,
            r"v_cache has shape \(1, 9, 2, 8\); it must have at least q's batch, 2$",
        ),
        (
            {"k_cache": np.zeros((4, 9, 2, 8), np.float32)},
            ValueError,
            r"v_cache has shape \(2, 9, 2, 8\) and k_cache \(4, 9, 2, 8\); all axes but the last",
        ),
        ({"v_cache": np.broadcast_to(np.float32(0), (2, 9, 2, 8))}, ValueError, "v_cache is read-only"),
        ({"softcap": -1}, ValueError, "softcap is -1.0; it must be positive"),
        ({"alibi_slopes": np.ones(3, np.float32)}, ValueError, r"alibi_slopes has shape \(3,\); it must be"),
        ({"window_size": (1, "2")}, TypeError, r"window_size is \(1, '2'\); it may be"),
        ({"cache_seqlens": np.array([1, 2])}, TypeError, "cache_seqlens has dtype int64; it must be int32"),
        (
            {"cache_batch_idx": np.array([0, -1], np.int32)},
            ValueError,
            "cache_batch_idx is -1 for sequence 1; k_cache has 2 sequences",
        ),
        ({"cache_batch_idx": np.zeros(2)}, TypeError, "cache_batch_idx has dtype float64; it must be int32"),
        (
            {"cache_batch_idx": np.zeros(2, np.int32), "v_cache": np.zeros((2, 8, 2, 8), np.float32)},
            ValueError,
            r"v_cache has shape \(2, 8, 2, 8\) and k_cache \(2, 9, 2, 8\); all axes but the last",
        ),
        (
            {"block_table": np.array([[0], [2]], np.int32)},
            ValueError,
            "block_table has page 2 for sequence 1, and k_cache has 2 pages",
        ),
        ({"block_table": np.zeros((2, 1))}, TypeError, "block_table has dtype float64; it must be int32"),
        ({"return_softmax_lse": "x"}, TypeError, "return_softmax_lse is 'x'; it may be True or False"),
        ({"softmax_scale": 1e39}, ValueError, "softmax_scale is 1e[+]39; for float32 it must be 0 or from"),
        ({"softmax_scale": "k"}, TypeError, "softmax_scale is 'k'; it may be a number or None"),
        ({"softcap": 1e-40}, ValueError, "softcap is 1e-40; for float32 it must be 0 or from"),
        ({"window_size": (1, 2, 3)}, ValueError, r"window_size is \(1, 2, 3\); it may be None or a tuple"),
        ({"k_descale": 1.0}, TypeError, r"k_descale is 1\.0; it must be an array of \(batch, kv_heads\)"),
        (
            {"qv": np.zeros((2, 3, 4, 8))},
            ValueError,
            r"qv is a numpy\.ndarray of shape \(2, 3, 4, 8\), which",
        ),
        ({"attention_chunk": 4}, ValueError, "attention_chunk is 4, which .*; give a mask_mod to cufa"),
        ({"rotary_seqlens": np.zeros(2)}, ValueError, "rotary_seqlens is .*; call cufa.rotary for q and k"),
        ({"cu_seqlens_k_new": np.zeros(3)}, ValueError, r"cu_seqlens_k_new is .*; give new keys as \(batch,"),
        (
            {"cu_seqlens_q": np.zeros(3)},
            ValueError,
            r"cu_seqlens_q is given, and k is; give q as \(batch, se",
        ),
        (
            {"block_table": np.zeros((2, 1)), "page_table": np.zeros((2, 1))},
            ValueError,
            "block_table and page_table are both given; they are names of one argument$",
        ),
        ({"page_table": np.zeros((2, 1))}, TypeError, "page_table has dtype float64; it must be int32"),
        (
            {"page_table": np.array([[0], [2]], np.int32)},
            ValueError,
            "page_table has page 2 for sequence 1, and k_cache has 2 pages",
        ),
        ({"cache_seqlens": np.array([1, 2], ">i4")}, TypeError, "cache_seqlens .*, in the machine's byte or"),
        (
            {"v_cache": np.ma.zeros((2, 9, 2, 8), np.float32)},
            TypeError,
            r"v_cache is a numpy\.ma\S*, and cufa does not support masked",
        ),
        (
            {"v": np.ma.zeros((2, 2, 2, 8), np.float32)},
            TypeError,
            r"v is a numpy\.ma\S*, and cufa does not support masked",
        ),
        (
            {"alibi_slopes": np.ma.zeros(4, np.float32)},
            TypeError,
            r"alibi_slopes is a numpy\.ma\S*, and cufa does not support masked",
        ),
    ],
)
def test_what_flash_attns_cache_cannot_take_is_not_written(rng, change, error, message):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    before = k_cache.copy(), v_cache.copy()
    of_call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 3, **change}
    with pytest.raises(error, match=f"^{message}"):
        compat.flash_attn_with_kvcache(**of_call)
    np.testing.assert_array_equal(k_cache, before[0])
    np.testing.assert_array_equal(v_cache, before[1])


@pytest.mark.parametrize(
    ("held", "place", "what", "sequences"),
    [
        (3, {"cache_batch_idx": [0, 0]}, "cache_batch_idx has 0", (0, 1)),
        ([1, 5], {"cache_batch_idx": [3, 3]}, "cache_batch_idx has 3", (0, 1)),
        (2, {"block_table": [[0], [0]]}, "block_table has page 0", (0, 1)),
        ([3, 6], {"block_table": [[2, 1], [1, 2]]}, "block_table has page 2", (0, 1)),
        ([3, 4], {"block_table": [[2, 1], [3, 1]]}, "block_table has page 1", (0, 1)),
        (3, {"block_table": [[2, 2], [0, 1]]}, "block_table has page 2", (0, 0)),
    ],
)
def test_new_keys_of_two_sequences_are_not_written_to_one_place(rng, held, place, what, sequences):
    q, k, v = draw(rng, 1, 2)
    caches = [np.zeros((4, 4 if "block_table" in place else 8, 2, 8), np.float32) for _ in "kv"]
    options = {name: np.array(numbers, np.int32) for name, numbers in place.items()}
    held = held if isinstance(held, int) else np.array(held, np.int32)
    first, again = sequences
    message = f"^{what} for sequence {first} and again for sequence {again}, and k would be written to both"
    with pytest.raises(ValueError, match=message):
        compat.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=held, **options)
    assert not np.any(caches)


@pytest.mark.parametrize(
    ("held", "table", "count"),
    [
        ([4, 6], [[2, 1], [2, 3]], 2),  # both begin with page 2
        ([4, 4], [[2, 1], [2, 3]], 4),
        ([2, 1], [[2, 0], [1, 0]], 2),  # page 0 only fills the table
        ([2, 6], [[0, 1], [3, 1]], 2),  # the first ends before page 1
        ([6, 6], [[2, 1], [2, 1]], 0),  # neither writes
        ([6, 6], [[2, 1], [2, 1]], None),
    ],
)
def test_sequences_may_share_what_no_two_write(rng, held, table, count):
    q, k_pages, v_pages = draw(rng, 1, 4)
    k_pages, v_pages = (np.concatenate([x, rng.permuted(x)]) for x in (k_pages, v_pages))
    table, held = np.array(table, np.int32), np.array(held, np.int32)
    new = [] if count is None else draw(rng, 1, count)[1:]
    of_each = [x[table].reshape(2, 8, 2, 8) for x in (k_pages, v_pages)]
    exact = compat.flash_attn_with_kvcache(q, *of_each, *new, cache_seqlens=held)
    out = compat.flash_attn_with_kvcache(q, k_pages, v_pages, *new, cache_seqlens=held, block_table=table)
    np.testing.assert_array_equal(out, exact)


def test_sequences_may_share_an_entry_that_is_only_read(rng):
    q, k_cache, v_cache = draw(rng, 3, 9)
    entry = np.array([1, 1], np.int32)
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5, cache_batch_idx=entry)
    exact = compat.flash_attn_with_kvcache(q, k_cache[entry], v_cache[entry], cache_seqlens=5)
    np.testing.assert_array_equal(out, exact)


def test_a_page_that_flash_attns_cache_has_not_is_found_before_it_is_written(rng):
    """Among those whose keys are held already, too."""
    q, k, v = draw(rng, 1, 1, heads=1, kv_heads=1)
    caches = [np.zeros((2, 8, 1, 8), np.float32) for _ in "kv"]
    of_call = {"block_table": np.array([[99, 1]], np.int32), "cache_seqlens": np.array([8], np.int32)}
    with pytest.raises(ValueError, match=r"^block_table has page 99 for sequence 0, and k_cache has 2 pages"):
        compat.flash_attn_with_kvcache(q[:1], *caches, k[:1], v[:1], **of_call)
    assert not np.any(caches)


def test_a_masked_array_is_no_cache_to_write(rng):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    masked = np.ma.array(k_cache.copy())
    with pytest.raises(TypeError, match=r"^k_cache is a numpy\.ma\S*, and cufa does not support masked"):
        compat.flash_attn_with_kvcache(q, masked, v_cache, k, v, cache_seqlens=3)
    np.testing.assert_array_equal(masked.data, k_cache)


def views_of(cache):
    """What a call has beside a cache of (2, 9, 2, 8), in the cache's own memory."""
    words = cache.view(np.int32).reshape(-1)
    return {
        "q": cache[:, 2:5],
        "k": cache[:, 4:6],
        "v": cache[:, :2],
        "cache_seqlens": words[:2],
        "alibi_slopes": cache[0, 0, 0, :2],
        "block_table": words[2:4].reshape(2, 1),
        "cache_batch_idx": words[2:4],
        "rotary_cos": cache[0, :, 0, :4],
        "rotary_sin": cache[0, :, 1, :4],
    }


ROTARY = {name: np.ones((9, 4), np.float32) for name in ("rotary_cos", "rotary_sin")}


@pytest.mark.parametrize("more", [{}, ROTARY], ids=["", "rotary"])
@pytest.mark.parametrize("name", list(views_of(np.zeros((2, 9, 2, 8), np.float32))))
@pytest.mark.parametrize("written", ["k_cache", "v_cache"])
def test_what_is_read_of_flash_attns_call_lies_apart_from_a_cache_that_is_written(rng, name, written, more):
    q, k_cache, v_cache = draw(rng, 3, 9, heads=2)
    _, k, v = draw(rng, 3, 2)
    words = k_cache.view(np.int32).reshape(-1), v_cache.view(np.int32).reshape(-1)
    for bits in words:
        bits[:4] = 3, 3, 0, 1
    of_call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 3, **more}
    if name.startswith("rotary"):
        of_call |= ROTARY
    of_call[name] = views_of(of_call[written])[name]
    before = k_cache.copy(), v_cache.copy()
    with pytest.raises(ValueError, match=f"^{written} overlaps {name} in memory; it must not$"):
        compat.flash_attn_with_kvcache(**of_call)
    np.testing.assert_array_equal(k_cache, before[0])
    np.testing.assert_array_equal(v_cache, before[1])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_each_key_of_a_cache_that_is_written_has_its_own_memory(rng, name):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    one = caches[name][:1].copy()
    caches[name] = np.lib.stride_tricks.as_strided(one, (2, 9, 2, 8), (0, *one.strides[1:]))
    before = one.copy()
    with pytest.raises(
        ValueError, match=rf"^{name} has strides \(0, .*\) for shape .*, so that elements share"
    ):
        compat.flash_attn_with_kvcache(q, **caches, k=k, v=v, cache_seqlens=3)
    np.testing.assert_array_equal(one, before)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, ::-1]])
def test_one_cache_does_not_take_keys_and_values(rng, part):
    q, cache, _ = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    before = cache.copy()
    with pytest.raises(ValueError, match=r"^v_cache overlaps k_cache in memory; it must not$"):
        compat.flash_attn_with_kvcache(q, cache, cache[part], k, v, cache_seqlens=3)
    np.testing.assert_array_equal(cache, before)


def test_caches_that_are_only_read_may_lie_anywhere(rng):
    q, cache, _ = draw(rng, 3, 9)
    out = compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4)
    np.testing.assert_array_equal(
        out, compat.flash_attn_with_kvcache(q, cache, cache.copy(), cache_seqlens=4)
    )
    in_one = np.stack([cache, cache], axis=2)  # keys and values side by side
    _, k, v = draw(rng, 3, 2)
    exact = compat.flash_attn_with_kvcache(q, cache.copy(), cache.copy(), k, v, cache_seqlens=4)
    beside = in_one[:, :, 0], in_one[:, :, 1]
    np.testing.assert_array_equal(compat.flash_attn_with_kvcache(q, *beside, k, v, cache_seqlens=4), exact)


def pages_of(rng, page_size, *caches):
    """Caches of two sequences in pages in any order, and the table that lists them."""
    pages = -(-caches[0].shape[1] // page_size)
    table = rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    placed = []
    for cache in caches:
        room = np.zeros((2, pages * page_size, *cache.shape[2:]), cache.dtype)
        room[:, : cache.shape[1]] = cache
        placed.append(np.empty((2 * pages, page_size, *cache.shape[2:]), cache.dtype))
        placed[-1][table] = room.reshape(2, pages, page_size, *cache.shape[2:])
    return table, *placed


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("held", [4, np.array([0, 6], np.int32)])
def test_flash_attns_cache_in_pages(rng, held, page_size):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    table, *paged = pages_of(rng, page_size, k_cache, v_cache)
    options = {"cache_seqlens": held, "causal": True, "return_softmax_lse": True}
    expected = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    results = compat.flash_attn_with_kvcache(q, *paged, k, v, block_table=table, **options)
    for actual, exact in zip(results, expected, strict=True):
        np.testing.assert_array_equal(actual, exact)
    for pages, cache in zip(paged, (k_cache, v_cache), strict=True):
        np.testing.assert_array_equal(pages[table].reshape(2, -1, *cache.shape[2:])[:, :9], cache)


def angles_of(rng, places=14, pairs=3):
    angles = rng.uniform(-np.pi, np.pi, (places, pairs)).astype(np.float32)
    return np.cos(angles), np.sin(angles)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("in_turn", [{"causal": True}, {"window_size": (2, -1)}, {}], ids=str)
@pytest.mark.parametrize("held", [4, np.array([0, 6], np.int32)])
def test_flash_attns_cache_with_rotary_embedding(rng, held, in_turn, interleaved):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    cos, sin = angles_of(rng)
    turned = []
    for x, one_by_one in ((q, bool(in_turn)), (k, True)):
        turned.append(np.empty_like(x))
        for b, first in enumerate(np.broadcast_to(held, 2)):
            for i in range(3):
                rows = slice(*(np.array([0, 1]) + first + i * one_by_one))
                token = x[b : b + 1, i : i + 1]
                turned[-1][b, i] = cufa.rotary(token, cos[rows], sin[rows], interleaved=interleaved)[0, 0]
    caches = k_cache.copy(), v_cache.copy()
    options = {"cache_seqlens": held, **in_turn}
    exact = compat.flash_attn_with_kvcache(turned[0], *caches, turned[1], v, **options)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    if not interleaved:
        rotary["rotary_interleaved"] = False
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options, **rotary)
    close(out, exact)
    close(k_cache, caches[0])
    np.testing.assert_array_equal(v_cache, caches[1])


def test_flash_attns_cache_of_more_sequences(rng):
    """Those that are asked for, in that order."""
    q, _, _ = draw(rng, 3, 9)
    k_cache, v_cache = (np.concatenate([x, draw(rng, 3, 9)[1]]) for x in draw(rng, 3, 9)[1:])
    _, k, v = draw(rng, 3, 3)
    chosen, held = np.array([3, 1], np.int32), np.array([2, 5], np.int32)
    caches = k_cache[chosen], v_cache[chosen]
    exact = compat.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=held, causal=True)
    before = k_cache.copy()
    # In flash-attn's order.
    out = compat.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, None, None, held, chosen, None, None, None, True)
    )
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_array_equal(k_cache[chosen], caches[0])
    np.testing.assert_array_equal(k_cache[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rotary_sin": None}, ValueError, "rotary_sin must be given, too, to turn"),
        ({"k": None, "v": None}, ValueError, "k must be given, too, to turn"),
        (
            {"rotary_cos": np.ones((14, 2), np.float32)},
            ValueError,
            r"rotary_sin has shape \(14, 3\); it must",
        ),
        ({"cache_seqlens": 12}, ValueError, "cache_seqlens is 12; k_cache has room for 0 to 9"),
        (
            {"rotary_cos": np.ones((5, 3), np.float32), "rotary_sin": np.ones((5, 3), np.float32)},
            ValueError,
            "cache_seqlens is 4; with 3 new tokens after that, rotary_cos has only 5 places",
        ),
        (
            dict.fromkeys(("k", "v"), np.zeros((2, 1, 2, 8), np.float32))
            | dict.fromkeys(("rotary_cos", "rotary_sin"), np.ones((5, 3), np.float32))
            | {"causal": True},
            ValueError,
            "cache_seqlens is 4; with 3 new tokens after that, rotary_cos has only 5 places",
        ),
        ({"cache_leftpad": np.zeros(3, np.int32)}, ValueError, r"cache_leftpad has shape \(3,\); it must be"),
        ({"cache_leftpad": np.zeros(2)}, TypeError, "cache_leftpad has dtype float64; it must be int32"),
        (
            {"cache_leftpad": np.array([9, 10], np.int32)},
            ValueError,
            "cache_leftpad is 10 for sequence 1; k_cache has room for 0 to 9",
        ),
        ({"cache_batch_idx": np.zeros((2, 1), np.int32)}, ValueError, r"cache_batch_idx has shape \(2, 1\)"),
        (
            {"cache_batch_idx": np.zeros(2, np.int32), "block_table": np.zeros((2, 1), np.int32)},
            ValueError,
            "cache_batch_idx is given, and block_table is",
        ),
    ],
)
def test_what_does_not_go_with_flash_attns_cache(rng, change, error, message):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 3)
    cos, sin = angles_of(rng)
    given = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 4}
    with pytest.raises(error, match=f"^{message}"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, **(given | change))


def test_flash_attns_packed_queries_with_pages(rng):
    q, k, v = draw(rng, 6, 9)
    table, *paged = pages_of(rng, 4, k, v)
    ends, key_ends = np.array([0, 1, 9], np.int32), np.array([0, 7, 11], np.int32)
    tokens = q.reshape(-1, *q.shape[2:])[:9]
    options = {"causal": True, "return_attn_probs": True}
    options |= {"max_seqlen_q": 8, "max_seqlen_k": 7}
    out, lse, _ = compat.flash_attn_varlen_func(tokens, *paged, ends, key_ends, block_table=table, **options)
    for b, (begin, end) in enumerate([(0, 1), (1, 9)]):
        keys = slice(0, key_ends[b + 1] - key_ends[b])
        of_one = (x[None] for x in (tokens[begin:end], k[b, keys], v[b, keys]))
        exact, exact_lse = cufa.attention(*of_one, causal=True, return_lse=True)
        close(out[begin:end], exact[0])
        close(lse[:, begin:end], exact_lse[0])
    lengths = {"seqused_k": np.diff(key_ends), "block_table": table}  # as vLLM calls it
    named = compat.flash_attn_varlen_func(tokens, *paged, cu_seqlens_q=ends, causal=True, **lengths)
    np.testing.assert_array_equal(named, out)
    room = np.array([0, 8, 17], np.int32)
    both = compat.flash_attn_varlen_func(tokens, *paged, ends, room, causal=True, **lengths)
    np.testing.assert_array_equal(both, out)


@pytest.mark.parametrize("options", CACHE_OPTIONS)
@pytest.mark.parametrize("held", [None, 5, np.array([7, 0, 9], np.int32)], ids=["full", "number", "array"])
@pytest.mark.parametrize("place", ["pages", "rows", "entries", "padded"])
def test_packed_queries_of_flash_attn_3s_cache(rng, place, held, options):
    """Without new keys, whose ends SGLang nevertheless gives; the cache may have room for more sequences."""
    q = rng.standard_normal((9, 4, 8)).astype(np.float32)
    caches = list(rng.standard_normal((2, 4, 9, 2, 8)).astype(np.float32))
    ends, given = np.array([0, 3, 4, 9], np.int32), {}
    entries, padding = np.arange(3), np.zeros(3, np.int32)
    if place == "entries":
        entries = np.array([3, 0, 2], np.int32)
        given["cache_batch_idx"] = entries
    if place == "padded":
        padding = np.array([2, 0, 8], np.int32)
        given["cache_leftpad"] = padding
    if place == "pages":
        entries = rng.permutation(12).reshape(3, 4).astype(np.int32)
        given["page_table"] = entries[:, :3]
        caches = list(rng.standard_normal((2, 12, 3, 2, 8)).astype(np.float32))
        k, v = (x[given["page_table"]].reshape(3, 9, 2, 8) for x in caches)
    else:
        k, v = (x[entries] for x in caches)
    if held is not None:
        given["cache_seqlens"] = held
    out, lse = compat.flash_attn_with_kvcache(
        *(q, *caches),
        cu_seqlens_q=ends,
        max_seqlen_q=5,
        cu_seqlens_k_new=np.array([0, 7, 7, 16], np.int32),
        return_softmax_lse=True,
        **given,
        **options,
    )
    for b, count in enumerate(np.broadcast_to(9 if held is None else held, 3)):
        tokens, keys = slice(ends[b], ends[b + 1]), slice(padding[b], count)
        of_one = q[None, tokens], k[[b], keys], v[[b], keys]
        side = {"causal": options.get("causal", False), "softcap": options.get("softcap", 0.0)}
        side["window"] = options.get("window_size")
        exact, exact_lse = cufa.attention(*of_one, return_lse=True, **side)
        close(out[tokens], exact[0])
        close(lse[:, tokens], exact_lse[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": np.zeros((2, 3, 4, 8), np.float32)},
            ValueError,
            r"q has shape .*; it must have the 3 axes \(to",
        ),
        (
            {"cu_seqlens_q": np.zeros((2, 2), np.int32)},
            ValueError,
            r"cu_seqlens_q has shape \(2, 2\); it must",
        ),
        (
            {"cu_seqlens_q": np.zeros(0, np.int32)},
            ValueError,
            r"cu_seqlens_q has shape \(0,\); it must be \(batch \+ 1,\)$",
        ),
        ({"cu_seqlens_q": [0, 3]}, TypeError, "cu_seqlens_q is a list; it may be a NumPy array"),
        ({"cu_seqlens_q": np.array([0, 1, 6])}, TypeError, "cu_seqlens_q has dtype int64; it must be int32$"),
        (
            {"cu_seqlens_q": np.array([0, 1, 2, 6], np.int32)},
            ValueError,
            "k_cache has 2 sequences and cu_seqlens_q 3; it must have at least as many$",
        ),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; it may be None or an integer from 0 on"),
        (
            {"v_cache": np.zeros((2, 8, 2, 8), np.float32)},
            ValueError,
            r"v_cache has shape \(2, 8, 2, 8\) and k_cache \(2, 9, 2, 8\); all axes but the last",
        ),
        (
            {name: np.zeros((2, 0, 2, 8), np.float32) for name in ("k_cache", "v_cache")},
            ValueError,
            "k_cache has no room for keys; with cache_batch_idx or cu_seqlens_q it must have some$",
        ),
    ],
)
def test_what_does_not_go_with_packed_queries_of_a_cache(rng, change, error, message):
    q, k_cache, v_cache = draw(rng, 6, 9)
    given = {"q": q[0], "k_cache": k_cache, "v_cache": v_cache, "cu_seqlens_q": np.array([0, 1, 6], np.int32)}
    with pytest.raises(error, match=f"^{message}"):
        compat.flash_attn_with_kvcache(**(given | change))


@pytest.mark.parametrize(
    ("key_ends", "error", "message"),
    [
        (np.array([0, 7]), ValueError, r"cu_seqlens_k has shape \(2,\); it must be \(3,\)"),
        (np.array([0, 7, 11]), TypeError, "cu_seqlens_k has dtype int64; it must be int32"),
        (np.float32(7), ValueError, r"cu_seqlens_k has shape \(\); it must be \(3,\)"),
        (
            np.array([0, 7, 5], np.int32),
            ValueError,
            "cu_seqlens_k falls from 7 to 5 in sequence 1; it must not",
        ),
    ],
)
def test_ends_of_keys_in_pages_that_are_none(rng, key_ends, error, message):
    q, k, v = draw(rng, 6, 9)
    table, *paged = pages_of(rng, 4, k, v)
    ends = np.array([0, 1, 6], np.int32)
    with pytest.raises(error, match=f"^{message}"):
        compat.flash_attn_varlen_func(q[0], *paged, ends, key_ends, block_table=table)


def test_a_sequence_may_have_no_keys_in_its_pages(rng):
    q, k, v = draw(rng, 6, 9)
    table, *paged = pages_of(rng, 4, k, v)
    ends, key_ends = np.array([0, 2, 6], np.int32), np.array([0, 0, 5], np.int32)
    out = compat.flash_attn_varlen_func(q[1], *paged, ends, key_ends, block_table=table)
    np.testing.assert_array_equal(out[:2], np.zeros_like(q[1, :2]))
    close(out[2:], cufa.attention(q[1:, 2:], k[1:, :5], v[1:, :5])[0])


def test_keys_that_are_in_no_pages_are_not_counted_as_if_they_were(rng):
    q, k, v = draw(rng, 6, 9)
    ends, table = np.array([0, 6], np.int32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=r"^k has shape \(9, 2, 8\); it must have the 4 axes \(pages, "):
        compat.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, block_table=table)
    with pytest.raises(ValueError, match=r"^block_table has shape \(1,\); it must be \(batch, pages of"):
        compat.flash_attn_varlen_func(q[0], k, v, ends, ends, block_table=table[0])


@pytest.mark.parametrize("table", [None, np.array([[3, 0], [1, 2]], np.int32)], ids=["rows", "pages"])
@pytest.mark.parametrize("held", [11, np.array([1, 11], np.int32), np.array([1, -1], np.int32)])
def test_no_more_keys_are_read_than_flash_attns_cache_has_room_for(rng, held, table):
    q, k_cache, v_cache = draw(rng, 3, 10)
    if table is not None:
        k_cache, v_cache = (x.reshape(4, 5, 2, 8) for x in (k_cache, v_cache))
    which = held if isinstance(held, int) else f"{held[1]} for sequence 1"
    message = f"^cache_seqlens is {which}; k_cache has room for 0 to 10$"
    with pytest.raises(ValueError, match=message):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=held, block_table=table)


def test_no_more_keys_than_their_pages_have_room_for(rng):
    q, k, v = draw(rng, 6, 8)
    table, *paged = pages_of(rng, 4, k, v)
    ends = np.array([0, 1, 6], np.int32)
    message = "^cu_seqlens_k has a sequence of 15 keys; block_table has room for 8 in 2 pages of 4$"
    with pytest.raises(ValueError, match=message):
        compat.flash_attn_varlen_func(q[0], *paged, ends, np.array([0, 8, 23], np.int32), block_table=table)
    # As `cufa.attention` says, of seqused_k all that there is.
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": None, "block_table": table}
    most, all_there_are = (
        compat.flash_attn_varlen_func(q[0], *paged, **options, seqused_k=np.array([8, n], np.int32))
        for n in (15, 8)
    )
    np.testing.assert_array_equal(most, all_there_are)


class Tensor:
    """An array of another library in the CPU's memory, which is NumPy's."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.__dlpack__, self.__dlpack_device__ = values.__dlpack__, values.__dlpack_device__

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda array: Tensor(np.from_dlpack(array)))

    def __getitem__(self, place):
        return Tensor(self.values[place])

    def __sub__(self, other):
        return Tensor(self.values - other.values)


class ImmutableTensor(Tensor):
    """It comes from a library whose arrays never change."""

    def __array_namespace__(self):
        return SimpleNamespace(__name__="jax.numpy", from_dlpack=ImmutableTensor)


def test_arrays_that_never_change_are_no_cache_to_write(rng):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    before = k_cache.copy(), v_cache.copy()
    message = "^k_cache is from a library whose arrays cannot be written; write the new keys and values to "
    with pytest.raises(TypeError, match=message):
        compat.flash_attn_with_kvcache(*map(ImmutableTensor, (q, k_cache, v_cache, k, v)), cache_seqlens=3)
    np.testing.assert_array_equal((k_cache, v_cache), before)


@pytest.mark.parametrize("adds", [False, True])
def test_a_cache_with_room_for_more_sequences(rng, adds):
    """Those of q are its first ones; the others are neither read nor written."""
    q, k_cache, v_cache = draw(rng, 3, 9)
    new = draw(rng, 3, 2)[1:] if adds else ()
    larger = [np.concatenate((x, np.full_like(x, np.nan))) for x in (k_cache, v_cache)]
    options = {"cache_seqlens": 5, "causal": True, "return_softmax_lse": True}
    expected = compat.flash_attn_with_kvcache(q, k_cache, v_cache, *new, **options)
    actual = compat.flash_attn_with_kvcache(q, *larger, *new, **options)
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one, other)
    for cache, same in zip(larger, (k_cache, v_cache), strict=True):
        np.testing.assert_array_equal(cache[: len(same)], same)
        assert np.isnan(cache[len(same) :]).all()


class StandardTensor(Tensor):
    """It is indexed along all axes, as the array API standard has it."""

    device = "cpu"

    def __array_namespace__(self):
        def of(function):
            return lambda *given, **options: StandardTensor(function(*given, **options))

        return SimpleNamespace(
            __name__="standard",
            from_dlpack=of(np.from_dlpack),
            asarray=of(np.asarray),
            full=of(np.full),
            moveaxis=lambda x, *axes: StandardTensor(np.moveaxis(x.values, *axes)),
            int32=np.int32,
        )

    def __getitem__(self, place):
        return StandardTensor(self.values[self._complete(place)])

    def __setitem__(self, place, other):
        self.values[self._complete(place)] = other.values

    def _complete(self, place):
        place = place if isinstance(place, tuple) else (place,)
        if len(place) - place.count(None) != len(self.shape) and Ellipsis not in place:
            raise IndexError(f"{place} is no index of {len(self.shape)} axes")
        return place


@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "dot_product_attention"])
def test_arrays_need_only_what_the_array_api_standard_has(rng, function):
    layout = "bhsd" if function == "scaled_dot_product_attention" else "bshd"
    q, k, v = draw(rng, 6, 9, layout, kv_heads=4)
    call = getattr(compat, function)
    out = call(*map(StandardTensor, (q, k, v)), is_causal=True)
    np.testing.assert_array_equal(out.values, call(q, k, v, is_causal=True))
    out = call(*map(StandardTensor, (q[0], k[0], v[0])))
    np.testing.assert_array_equal(out.values, call(q[0], k[0], v[0]))
    if function == "dot_product_attention":
        results = call(*map(StandardTensor, (q, k, v)), return_residual=True)
        for actual, exact in zip(results, call(q, k, v, return_residual=True), strict=True):
            np.testing.assert_array_equal(actual.values, exact)


def test_numpys_arrays_beside_those_of_another_library(rng):
    """As JAX takes them; but not as query, key or value."""
    q, k, v = draw(rng, 6, 9)
    side = {"bias": rng.standard_normal((4, 6, 9)).astype(np.float32), "mask": rng.random((6, 9)) < 0.7}
    out = compat.dot_product_attention(*map(StandardTensor, (q, k, v)), **side)
    np.testing.assert_array_equal(out.values, compat.dot_product_attention(q, k, v, **side))
    with pytest.raises(
        TypeError, match=r"^key is a numpy\.ndarray and query a test_compat\.StandardTensor; all"
    ):
        compat.dot_product_attention(StandardTensor(q), k, StandardTensor(v))
    with pytest.raises(TypeError, match=r"^bias is a numpy\.ma\S*, and cufa does not support masked"):
        compat.dot_product_attention(*map(StandardTensor, (q, k, v)), bias=np.ma.array(side["bias"]))


@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_numpys_lengths_bias_and_mask_beside_tensors(rng, library):
    xp = pytest.importorskip(library)
    q, k, v = draw(rng, 6, 9)
    side = {"bias": rng.standard_normal((4, 6, 9)).astype(np.float32), "mask": rng.random((6, 9)) < 0.7}
    side |= {"query_seq_lengths": np.array([6, 3]), "key_value_seq_lengths": np.array([4, 9], np.int32)}
    options = {"is_causal": True, "return_residual": True}
    exact = compat.dot_product_attention(q, k, v, **side, **options)
    results = compat.dot_product_attention(*map(xp.asarray, (q, k, v)), **side, **options)
    for actual, expected in zip(results, exact, strict=True):
        close(np.asarray(actual), expected)


def test_jaxs_function_beside_jax(rng):
    jax = pytest.importorskip("jax")
    q, k, v = map(jax.numpy.asarray, draw(rng, 6, 9))
    options = {
        "is_causal": True,
        "key_value_seq_lengths": np.array([4, 9], np.int32),
        "return_residual": True,
    }
    theirs = jax.nn.dot_product_attention(q, k, v, **options)
    for actual, expected in zip(compat.dot_product_attention(q, k, v, **options), theirs, strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        close(actual, expected)


def test_a_cache_is_written_as_the_array_api_standard_has_it(rng):
    given = (draw(rng, 3, 9), draw(rng, 3, 2)[1:])
    results = []
    for tensor in (np.array, StandardTensor):
        (q, *cache), new = (list(map(tensor, map(np.copy, arrays))) for arrays in given)
        out = compat.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=5)
        results.append([getattr(array, "values", array) for array in (out, *cache)])
    for written, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(written, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": np.array([1, 8], np.int32)}, "cache_seqlens is .* and k has 2 keys; k_cache has"),
        ({"cache_seqlens": np.array([1, -1], np.int32)}, "cache_seqlens is .* and k has 2 keys; k_cache has"),
        ({"k": None, "v": None, "cache_seqlens": np.array([1, 10], np.int32)}, "cache_seqlens is .* 0 to 9$"),
        (
            {"cache_batch_idx": np.array([0, 2], np.int32)},
            "cache_batch_idx is 2 for sequence 1; k_cache has 2 seq",
        ),
    ],
)
def test_numbers_in_the_cpus_memory_are_checked_whatever_their_library(rng, change, message):
    q, k_cache, v_cache = draw(rng, 3, 9)
    _, k, v = draw(rng, 3, 2)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 3, **change}
    wrapped = {name: Tensor(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        compat.flash_attn_with_kvcache(**wrapped)


def test_room_in_pages_is_checked_whatever_the_library(rng):
    q, k, v = draw(rng, 6, 8)
    table, *paged = pages_of(rng, 4, k, v)
    ends = np.array([0, 1, 6], np.int32), np.array([0, 8, 23], np.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k has a sequence of 15 keys; block_table has room"):
        compat.flash_attn_varlen_func(*map(Tensor, (q[0], *paged, *ends)), block_table=Tensor(table))


def test_arrays_of_two_kinds_are_named(rng):
    class Other(SimpleNamespace):
        def __dlpack__(self):
            raise NotImplementedError

        __dlpack_device__ = __dlpack__

    q, k, v = draw(rng, 3, 9)
    other = Other(shape=(2,), dtype=np.dtype(np.int32))
    with pytest.raises(TypeError, match=r"^cache_seqlens is .*Other and q a numpy.ndarray; all arrays must"):
        compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=other)
    other = Other(shape=(3, 9), dtype=np.dtype(bool))
    with pytest.raises(TypeError, match=r"^mask is .*Other and query a numpy.ndarray; all arrays must"):
        compat.dot_product_attention(q, k, v, mask=other)


def test_errors_name_flash_attns_cache(rng):
    q, k_cache, v_cache = draw(rng, 3, 9)
    with pytest.raises(
        ValueError, match=r"^v_cache has shape .* and k_cache .*; the seqlen must be the same"
    ):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache[:, :8])
    with pytest.raises(TypeError, match=r"^cache_seqlens has dtype int64; it must be int32"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=np.array([3, 4]))
    with pytest.raises(ValueError, match=r"^cache_seqlens has shape \(3,\); it must be \(2,\)"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"^block_table has shape \(3,\); it must be \(batch, pages\)"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"^cache_seqlens is 19; k_cache has room for 0 to 18"):
        compat.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=19, block_table=np.zeros((2, 2), np.int32)
        )


def pytorchs(q, k, v, **options):
    turn = (0, 2, 1, 3)
    return compat.scaled_dot_product_attention(
        *(x.transpose(turn) if x.ndim == 4 else x for x in (q, k, v)), enable_gqa=True, **options
    )


@pytest.mark.parametrize("function", [pytorchs, compat.dot_product_attention])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_array_without_4_axes_is_named(rng, function, name):
    arrays = dict(zip(("query", "key", "value"), draw(rng, 6, 9), strict=True))
    arrays[name] = arrays[name][0]
    axes = "batch, heads, seqlen" if function is pytorchs else "batch, seqlen, heads"
    message = (
        rf"^{name} has shape \(\d, \d, 8\); it must have the 4 axes \({axes}, head_dim\), or query, key and "
        "value all the last 3 of these$"
    )
    with pytest.raises(ValueError, match=message):
        function(*arrays.values())


@pytest.mark.parametrize("dropout_p", [None, 1.0, "8"])
def test_who_gives_flash_attn_3s_scale_by_position_learns_to_give_it_by_name(rng, dropout_p):
    q, k, v = draw(rng, 6, 9)
    hint = "; if softmax_scale is meant, give it by name$"
    with pytest.raises((TypeError, ValueError), match=rf"^dropout_p is .*{hint}"):
        compat.flash_attn_func(q, k, v, dropout_p, True)
    with pytest.raises(TypeError, match=r"^seed is 0\.5; it must be an integer$"):
        compat.flash_attn_func(q, k, v, 0.5, seed=0.5)
    with pytest.raises(TypeError, match=r"^dropout_p is None; it may be a number$"):
        pytorchs(q, k, v, dropout_p=None)


def test_errors_about_arguments_of_packed_tensors_name_the_function(rng):
    q, k, v = draw(rng, 6, 6, kv_heads=4)
    kv, qkv, ends = np.stack((k, v), 2), np.stack((q, k, v), 2), np.array([0, 6, 12], np.int32)
    calls = {
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_kvpacked_func": (q, kv),
        "flash_attn_varlen_qkvpacked_func": (qkv.reshape(12, 3, 4, 8), ends, 6),
        "flash_attn_varlen_kvpacked_func": (q.reshape(12, 4, 8), kv.reshape(12, 2, 4, 8), ends, ends, 6, 6),
    }
    for name, arguments in calls.items():
        function = getattr(compat, name)
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'window'"):
            function(*arguments, window=(1, 1))
        with pytest.raises(TypeError, match=rf"^{name}\(\) got multiple values for argument 'dropout_p'"):
            function(*arguments, 0.0, dropout_p=0.0)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k"])
@pytest.mark.parametrize("table", [None, np.array([[0], [1]], np.int32)], ids=["rows", "pages"])
def test_an_array_of_flash_attns_cache_without_4_axes_is_named(rng, name, table):
    of_call = dict(zip(("q", "k_cache", "v_cache"), draw(rng, 3, 9), strict=True))
    of_call |= dict(zip(("k", "v"), draw(rng, 3, 2)[1:], strict=True))
    of_call[name] = of_call[name][0]
    in_pages = table is not None and name.endswith("cache")
    axes = "pages, page_size, kv_heads" if in_pages else "batch, seqlen, heads"
    message = rf"^{name} has shape \(\d, \d, 8\); it must have the 4 axes \({axes}, head_dim\)$"
    with pytest.raises(ValueError, match=message):
        compat.flash_attn_with_kvcache(**of_call, cache_seqlens=3, block_table=table)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_array_is_named(rng, name):
    arrays = dict(zip(("query", "key", "value"), draw(rng, 6, 9), strict=True))
    arrays[name] = arrays[name].tolist()
    for function in (compat.scaled_dot_product_attention, compat.dot_product_attention):
        with pytest.raises(TypeError, match=f"^{name} is a list; it may be a NumPy array"):
            function(*arrays.values())
        with pytest.raises(TypeError, match=f"^{name} is None; it may be a NumPy array"):
            function(*(arrays | {name: None}).values())
    of_8_bits = dict.fromkeys(("q_descale", "k_descale", "v_descale"), np.ones((2, 2), np.float32))
    with pytest.raises(TypeError, match=r"^[qkv] is a list; it may be a NumPy array"):
        compat.flash_attn_func(*arrays.values(), **of_8_bits)


def test_side_arrays_that_are_none_are_named(rng):
    q, k, v = draw(rng, 6, 9)
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        with pytest.raises(TypeError, match=f"^{name} is a list; it may be a NumPy array"):
            compat.dot_product_attention(q, k, v, **{name: [1, 2]})
    with pytest.raises(TypeError, match=r"^attn_mask is a list; it may be a NumPy array"):
        pytorchs(q, k, v, attn_mask=[1, 2])


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_attn_mask_may_be_bool_too(rng, dtype):
    mask = np.ones((6, 9), dtype)
    message = f"^attn_mask has dtype {mask.dtype}; it may be bool, float16, bfloat16, float32 or float64$"
    with pytest.raises(TypeError, match=message):
        pytorchs(*draw(rng, 6, 9), attn_mask=mask)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed_sequences_need_their_ends(rng, name):
    q, k, v = draw(rng, 6, 6, kv_heads=4)  # of 4 axes, which would be a call without packed sequences
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 6], np.int32))
    with pytest.raises(TypeError, match=f"^{name} is None; it may be a NumPy array"):
        compat.flash_attn_varlen_func(q, k, v, **(ends | {name: None}))
    with pytest.raises(TypeError, match=r"^cu_seqlens is None; it may be a NumPy array"):
        compat.flash_attn_varlen_qkvpacked_func(np.stack([q, k, v], axis=2)[0], None)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (compat.flash_attn_func, {"window_size": (2, -3)}, r"window_size is \(2, -3\); it may be None or"),
        (compat.flash_attn_func, {"dropout_p": 1, "return_attn_probs": True}, "dropout_p is 1.0; it must be"),
        (compat.flash_attn_func, {"softmax_scale": np.inf}, "softmax_scale is inf; it must be finite"),
        (pytorchs, {"attn_mask": np.ones((6, 8), bool)}, r"attn_mask has shape \(6, 8\); it must be"),
        (pytorchs, {"attn_mask": np.ones((6, 8))}, r"attn_mask has shape \(6, 8\); it must be"),
        (pytorchs, {"scale": np.nan}, "scale is nan; it must be finite"),
        (compat.dot_product_attention, {"scale": np.nan}, "scale is nan; it must be finite"),
        (compat.dot_product_attention, {"mask": np.ones((6, 8), bool)}, r"mask has shape \(6, 8\); it must"),
        (compat.dot_product_attention, {"bias": np.ones((6, 8))}, r"bias has shape \(6, 8\); it must be"),
        (compat.dot_product_attention, {"bias": np.ones((6, 10))}, r"bias has shape \(6, 10\); it must be"),
        (compat.dot_product_attention, {"bias": np.array(1.0)}, r"bias has shape \(\); it must have 1 to 4"),
    ],
)
def test_errors_name_arguments_as_the_caller_does(rng, function, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(*draw(rng, 6, 9), **options)


@pytest.mark.parametrize(
    ("function", "flag"),
    [
        (compat.scaled_dot_product_attention, "is_causal"),
        (compat.scaled_dot_product_attention, "enable_gqa"),
        (compat.dot_product_attention, "is_causal"),
        (compat.flash_attn_with_kvcache, "causal"),
        (compat.flash_attn_with_kvcache, "rotary_interleaved"),
    ],
)
def test_flags_are_true_or_false(rng, function, flag):
    q, k, v = draw(rng, 6, 9, "bhsd", kv_heads=4)
    with pytest.raises(TypeError, match=f"^{flag} is 'no'; it may be True or False$"):
        function(q, k, v, **{flag: "no"})


@pytest.mark.parametrize("function", [pytorchs, compat.dot_product_attention])
def test_errors_name_tensors_as_the_caller_does(rng, function):
    q, k, v = draw(rng, 6, 9)
    with pytest.raises(ValueError, match=r"^key has shape \(.*\) and query \(.*\); the head dim"):
        function(q, k[..., :5], v)
    with pytest.raises(TypeError, match=r"^value has dtype float64 and query float32; they must be the same"):
        function(q, k, v.astype(np.float64))
    for fewer in (q, k[:, :5], v), (q, k, v[:, :5]):
        with pytest.raises(
            ValueError, match=r"^value has shape \(.*\) and key \(.*\); all axes but the last"
        ):
            function(*fewer, is_causal=True)


def test_errors_leave_words_and_values_as_they_are(rng):
    q, k, v = draw(rng, 6, 9)
    message = (
        r"^query is a numpy\.ma\S*, and cufa does not support masked arrays; give query\.filled\(\.\.\.\)$"
    )
    with pytest.raises(TypeError, match=message):
        pytorchs(np.ma.array(q), k, v)
    mask = np.ma.array(np.ones((6, 9), bool))
    with pytest.raises(TypeError, match=message.replace("query", "attn_mask")):
        pytorchs(q, k, v, attn_mask=mask)
    with pytest.raises(TypeError, match=r"^scale is 'q'; it may be a number or None$"):
        compat.dot_product_attention(q, k, v, scale="q")


@pytest.mark.parametrize("function", [pytorchs, compat.dot_product_attention])
def test_errors_name_all_tensors_that_they_are_about(rng, function):
    q, k, v = draw(rng, 6, 9, heads=3)
    message = (
        r"^query has 3 heads and key 2; the query heads .* \(query has shape \(.*\) and key \(.*\), read as"
    )
    with pytest.raises(ValueError, match=message):
        function(q, k, v)
    q, k, v = (x.astype(np.float16) for x in draw(rng, 6, 9))
    k, v = (x.astype("float8_e4m3fn") for x in (k, v))
    message = "^key has dtype float8_e4m3fn and query float32; they must be the same, or query bfloat16 or"
    with pytest.raises(TypeError, match=message):
        function(q.astype(np.float32), k, v)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"implementation": "bogus"},
            ValueError,
            "implementation is 'bogus'; it may be 'xla', 'cudnn' or None$",
        ),
        ({"implementation": 1}, ValueError, "implementation is 1; it may be 'xla'"),
        ({"local_window_size": -1}, ValueError, "local_window_size is -1; it may be a number of keys"),
        ({"local_window_size": (2, -1)}, ValueError, r"local_window_size is \(2, -1\); it may be"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"local_window_size is \(1, 2, 3\); it may be"),
        ({"local_window_size": True}, TypeError, "local_window_size is True; it may be"),
        ({"local_window_size": 1.5}, TypeError, "local_window_size is 1.5; it may be"),
        ({"mask": np.ones((6, 9), np.uint8)}, TypeError, "mask has dtype uint8; it must be bool"),
        ({"key_value_seq_lengths": np.array([3])}, ValueError, r"key_value_seq_lengths has shape \(1,\)"),
        (
            {"key_value_seq_lengths": np.ones(2)},
            TypeError,
            "key_value_seq_lengths has dtype float64; it must",
        ),
        (
            {"mask": np.ones((3, 1, 6, 9), bool), "key_value_seq_lengths": np.array([3, 4])},
            ValueError,
            r"mask has shape \(3, 1, 6, 9\); it must be",
        ),
        ({"query_seq_lengths": np.array([[3, 4]])}, ValueError, r"query_seq_lengths has shape \(1, 2\)"),
        (
            {"key_value_seq_lengths": Tensor(np.array([3, 4]))},
            TypeError,
            "key_value_seq_lengths is a test_compat.Tensor and query a numpy.ndarray; all arrays",
        ),
    ],
)
def test_jaxs_options_that_are_impossible(rng, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        compat.dot_product_attention(*draw(rng, 6, 9), **options)


@pytest.mark.parametrize("packed", [False, True])
def test_flashinfers_cache(rng, packed):
    """Of heads before keys, with pages in a row and the length of the last."""
    page_size, indptr, last = 4, np.array([0, 3, 5, 5]), np.array([2, 4, 1])  # the last has no keys
    indices = rng.permutation(6)[:5]
    q = rng.standard_normal((3, 1, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 6, 2, page_size, 8)).astype(np.float32)  # (pages, heads, keys, head_dim)
    pages = np.diff(indptr)
    table = np.zeros((3, pages.max()), np.int32)
    for r in range(3):
        table[r, : pages[r]] = indices[indptr[r] : indptr[r + 1]]
    lengths = np.where(pages, (pages - 1) * page_size + last, 0)
    options = {"block_table": table, "seqused_k": lengths.astype(np.int32)}
    if packed:
        ends = np.array([0, 1, 2, 3], np.int32)
        out = cufa.attention(q[:, 0], k.swapaxes(1, 2), v.swapaxes(1, 2), cu_seqlens_q=ends, **options)
    else:
        out = cufa.attention(q.swapaxes(1, 2), k, v, layout="bhsd", **options)
    for r, count in enumerate((10, 8, 0)):
        ours = (np.concatenate(x[table[r]], axis=1)[None, :, :count] for x in (k, v))
        close(out[r].reshape(4, 8), expected(q[[r]].swapaxes(1, 2), *ours, True)[0, :, 0])


def test_flashinfers_lse(rng):
    q, k, v = draw(rng, 6, 9)
    parts = [cufa.attention(q[:1], k[:1, part], v[:1, part], return_lse=True) for part in np.s_[:4, 4:]]
    theirs = [(out[0], lse[0].T / math.log(2)) for out, lse in parts]
    ours = [(out, lse.T * math.log(2)) for out, lse in theirs]
    merged, _ = cufa.merge(*ours[0], *ours[1])
    close(merged, cufa.attention(q[:1], k[:1], v[:1])[0])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_of_llama_4(rng, lengths):
    (rows, keys), n = lengths, 3
    q, k, v = draw(rng, *lengths)
    i, j = np.arange(rows)[:, None] + keys - rows, np.arange(keys)
    visible = (i // n * n <= j) & (j <= i)
    out = cufa.attention(q, k, v, causal=True, mask_mod=lambda b, h, i, j: (i + keys - rows) // n == j // n)
    close(*turned(out), expected(*turned(q, k, v), visible))


def test_flex_attentions_functions(rng):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (torch.from_numpy(x) for x in draw(rng, 6, 9, "bhsd", kv_heads=4))
    table = torch.from_numpy(rng.standard_normal((4, 9)).astype(np.float32))

    def theirs(score, b, h, i, j):
        near = torch.tanh(score) - table[h][torch.clamp(j - i, 0, 8)] * (i - j).abs()
        return torch.where(j < 8, near, -torch.inf)

    def ours(score, b, h, i, j, table):
        near = np.tanh(score) - table[h, np.clip(j - i, 0, 8)] * abs(i - j)
        return np.where(j < 8, near, -np.inf)

    def before(b, h, i, j):
        return j <= i + 3

    def even(b, h, i, j):
        return j % 2 == 0

    for combined, mask_mod in (
        (flex.and_masks(before, even), lambda *place: before(*place) & even(*place)),
        (flex.or_masks(before, even), lambda *place: before(*place) | even(*place)),
        (before, flex.create_block_mask(before, 2, 4, 6, 9, device="cpu").mask_mod),
    ):
        block_mask = flex.create_block_mask(combined, 2, 4, 6, 9, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to compile it
            exact = flex.flex_attention(q, k, v, score_mod=theirs, block_mask=block_mask)
        mods = {"score_mod": cufa.ScoreMod(ours, table), "mask_mod": mask_mod}
        close(cufa.attention(q, k, v, layout="bhsd", **mods), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("held", [4, np.array([0, 6], np.int32)])
@pytest.mark.parametrize("padding", [None, np.array([2, 5], np.int32)], ids=["all", "padded"])
def test_flash_attns_cache_on_a_gpu(rng, library, held, padding):
    xp = pytest.importorskip(library)

    def on_gpu(x):
        return xp.asarray(x) if library == "cupy" else xp.from_numpy(x).cuda()

    host = [*draw(rng, 3, 9), *draw(rng, 3, 3)[1:]]
    arrays = [on_gpu(x) for x in host]
    side = dict(zip(("rotary_cos", "rotary_sin"), angles_of(rng), strict=True))
    if padding is not None:
        side["cache_leftpad"] = padding
    out = compat.flash_attn_with_kvcache(
        *arrays,
        cache_seqlens=held if isinstance(held, int) else on_gpu(held),
        causal=True,
        **{name: on_gpu(x) for name, x in side.items()},
    )
    expected_out = compat.flash_attn_with_kvcache(*host, cache_seqlens=held, causal=True, **side)
    for actual, exact in zip((out, *arrays[1:3]), (expected_out, *host[1:3]), strict=True):
        close(actual.get() if library == "cupy" else actual.cpu().numpy(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_flash_attns_cache_in_8_bits_on_a_gpu(rng, library, dtype):
    """In pages, with new keys; neither library writes 8-bit floats everywhere."""
    xp = pytest.importorskip(library)
    float8 = np.dtype("float8_e4m3fn")

    def on_gpu(x):
        stored = x.view(np.uint8) if x.dtype == float8 else x
        moved = xp.asarray(stored) if library == "cupy" else xp.from_numpy(stored).cuda()
        return moved if stored is x else moved.view(float8 if library == "cupy" else xp.float8_e4m3fn)

    q, k_pages, v_pages = (x.astype(float8) for x in draw(rng, 3, 4))
    _, k, v = (x.astype(dtype) for x in draw(rng, 3, 3))
    q = q.astype(dtype)
    side = {"cache_seqlens": np.array([0, 1], np.int32), "block_table": np.array([[1], [0]], np.int32)}
    side["cache_leftpad"] = np.array([2, 1], np.int32)
    names = "qkv" if dtype == "float8_e4m3fn" else "kv"
    side |= {f"{name}_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32) for name in names}
    arrays = [on_gpu(x) for x in (q, k_pages, v_pages, k, v)]
    given = {name: on_gpu(x) for name, x in side.items()}
    out = compat.flash_attn_with_kvcache(*arrays, causal=True, **given)
    exact = compat.flash_attn_with_kvcache(q, k_pages, v_pages, k, v, causal=True, **side)
    actual = out.get() if library == "cupy" else out.float().cpu().numpy()
    np.testing.assert_allclose(actual.astype(np.float32), exact.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_jaxs_options_with_torchs_arrays_on_a_gpu(rng):
    torch = pytest.importorskip("torch")
    host = draw(rng, 6, 9)
    lengths = {"query_seq_lengths": np.array([6, 3], np.int32)}
    lengths["key_value_seq_lengths"] = np.array([4, 9], np.int32)
    options = {"is_causal": True, "local_window_size": (2, 0)}
    exact = compat.dot_product_attention(*host, **lengths, **options)
    on_gpu = [torch.from_numpy(x).cuda() for x in host]
    lengths_on_gpu = {name: torch.from_numpy(x).cuda() for name, x in lengths.items()}
    out = compat.dot_product_attention(*on_gpu, **lengths_on_gpu, **options)
    close(out.cpu().numpy(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
def test_beside_pytorch(rng, lengths):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).cuda() for x in draw(rng, *lengths, "bhsd"))
    for causal in (False, True):
        ours, theirs = (
            function(q, k, v, is_causal=causal, enable_gqa=True).cpu()
            for function in (
                compat.scaled_dot_product_attention,
                torch.nn.functional.scaled_dot_product_attention,
            )
        )
        close(ours, theirs)
