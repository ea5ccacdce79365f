"""Standard attention and its gradients in NumPy: the specification of every kernel.

Written to be read, and to be right: it keeps whole S and P matrices and takes no shortcuts. Arrays
are (batch, seqlen, heads, head_dim) with any strides. Everything is computed in `dtype`; float64
judges the 16 and 32-bit kernels, numpy.longdouble judges the float64 ones.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N803, N806

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


@np.errstate(all="ignore")
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Standard attention, O = softmax(scale * Q K^T) V (Vaswani et al. 2017, equation 1).

    Query head h reads KV head h // (heads // kv_heads). With `causal`, query i sees the keys
    j <= i + seqlen_k - seqlen_q. What is masked contributes nothing, even if it is NaN or Inf.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        causal: hide the keys after the query, counted from the last query and the last key.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) by default.
        dtype: of the whole computation and of what is returned.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), the natural
        logarithm of each row's sum of exp(S). A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: from NumPy, when the shapes do not fit each other.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    batch, seqlen_q, heads, head_dim = q.shape
    group = heads // max(1, k.shape[2])
    scale = _scale(softmax_scale, head_dim)
    visible = _visible(seqlen_q, k.shape[1], causal)
    out = np.empty((batch, seqlen_q, heads, v.shape[3]), dtype)
    lse = np.empty((batch, heads, seqlen_q), dtype)
    for b, h in np.ndindex(batch, heads):
        Q, K, V = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
        P, lse[b, h] = _probabilities(Q, K, visible, scale)
        out[b, :, h] = masked_matmul(P, V, visible)
    return out, lse


@np.errstate(all="ignore")
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array, Array]:
    """Gradients of sum(dout * attention(q, k, v)) (FlashAttention, Dao et al. 2022, appendix B.2).

    The arguments are those of `attention`, and dout (batch, seqlen_q, heads, head_dim_v).

    Returns:
        dq, dk and dv, shaped like q, k and v; dk and dv are summed over the query heads that share
        a KV head. What is masked contributes nothing; a row that sees no key has gradient 0.

    Raises:
        ValueError: from NumPy, when the shapes do not fit each other.
    """
    dout, q, k, v = (np.asarray(x).astype(dtype) for x in (dout, q, k, v))
    batch, seqlen_q, heads, head_dim = q.shape
    group = heads // max(1, k.shape[2])
    scale = _scale(softmax_scale, head_dim)
    visible = _visible(seqlen_q, k.shape[1], causal)
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h in np.ndindex(batch, heads):
        kv = h // group
        Q, K, V, dO = q[b, :, h], k[b, :, kv], v[b, :, kv], dout[b, :, h]
        P, _ = _probabilities(Q, K, visible, scale)
        dP = np.where(visible, dO @ V.T, 0)
        dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
        dS = np.where(visible, dS, 0)
        dq[b, :, h] = scale * masked_matmul(dS, K, visible)
        dk[b, :, kv] += scale * masked_matmul(dS.T, Q, visible.T)
        dv[b, :, kv] += masked_matmul(P.T, dO, visible.T)
    return dq, dk, dv


@np.errstate(all="ignore")
def softmax(x: Array, dtype: npt.DTypeLike = np.float64) -> Array:
    """exp(x) / sum(exp(x)) over the last axis, in `dtype`; 0 in a row of nothing but -inf."""
    P, _ = _softmax_and_lse(np.asarray(x).astype(dtype))
    return P


def masked_matmul(weights: Array, values: Array, visible: Array, out: Array | None = None) -> Array:
    """The product weights @ values, whose terms outside `visible` are nothing, not even 0 * NaN.

    Args:
        weights: (rows, n), zero wherever `visible` is False.
        values: (n, columns), possibly with NaN or Inf.
        visible: (rows, n) of bool.
        out: where the product goes, (rows, columns); a new array by default.
    """
    finite = np.all(np.isfinite(values), axis=1)
    if finite.all():
        return np.matmul(weights, values, out=out)
    product = np.matmul(weights, np.where(finite[:, None], values, 0), out=out)
    for n in np.flatnonzero(~finite):
        rows = visible[:, n]
        product[rows] += weights[rows, n, None] * values[n]
    return product


def _visible(seqlen_q: int, seqlen_k: int, causal: bool) -> Array:
    """(seqlen_q, seqlen_k) of bool: may query i see key j."""
    if not causal:
        return np.ones((seqlen_q, seqlen_k), bool)
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    return j <= i + seqlen_k - seqlen_q


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale


def _probabilities(Q: Array, K: Array, visible: Array, scale: float) -> tuple[Array, Array]:
    """P and LSE of one head."""
    S = np.where(visible, scale * (Q @ K.T), -np.inf)
    P, lse = _softmax_and_lse(S)
    return np.where(visible, P, 0), lse  # a NaN in S makes the whole row NaN, masked keys too


def _softmax_and_lse(S: Array) -> tuple[Array, Array]:
    """Softmax and log-sum-exp of every row; less the row's maximum, so that exp stays finite."""
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isneginf(m), 0, m)  # in an empty row, where -inf - -inf would be NaN
    exp = np.exp(S - m)
    total = exp.sum(axis=-1, keepdims=True)
    P = exp / np.where(total == 0, 1, total)
    return P, (m + np.log(total))[..., 0]
