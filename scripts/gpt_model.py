"""A GPT with its gradients written out by hand, for NumPy and CuPy arrays; `train_gpt.py` trains it.

A decoder as in GPT-2 (Radford et al. 2019), pre-norm blocks of causal self-attention and MLP, but with
no biases in its products and a head that is not tied to the embedding.
"""
# The papers write matrices in capitals (S, P, O, dP, dS), and so does this file.
# ruff: noqa: N806

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import cufa
from cufa.problem import DTYPES, accumulator_dtype

Array: TypeAlias = Any  # NumPy's or CuPy's
# A layer gives its output and the way back, from the output's gradient to the input's. On that way it
# adds the gradients of its parameters to the model's.
Backward: TypeAlias = Callable[[Array], Array]
Layer: TypeAlias = Callable[[Array], tuple[Array, Backward]]
# Attention gives its output and the way back from the output's gradient to (dq, dk, dv).
Attended: TypeAlias = tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]

INITIAL_STD = 0.02
NORM_EPSILON = 1e-5
MLP_RATIO = 4
GELU_CUBIC = 0.044715


@dataclass(frozen=True)
class Config:
    """The shape of a model. `attention_dtype` is what Q, K and V are cast to, `dtype` that of the rest."""

    vocabulary: int
    length: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    attention: str = "cufa"
    attention_dtype: str = "float32"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; it must be a multiple of heads, {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.vocabulary, width),
            "positions": (self.length, width),
        }
        for block in range(self.layers):
            shapes |= {
                f"{block}.attention.norm.gain": (width,),
                f"{block}.attention.norm.bias": (width,),
                f"{block}.attention.qkv": (width, (self.heads + 2 * self.kv_heads) * self.head_dim),
                f"{block}.attention.out": (width, width),
                f"{block}.mlp.norm.gain": (width,),
                f"{block}.mlp.norm.bias": (width,),
                f"{block}.mlp.in": (width, MLP_RATIO * width),
                f"{block}.mlp.out": (MLP_RATIO * width, width),
            }
        return shapes | {
            "final.norm.gain": (width,),
            "final.norm.bias": (width,),
            "head": (width, self.vocabulary),
        }

    def initial_value(self, name: str, rng: np.random.Generator) -> Array:
        shape = self.parameter_shapes[name]
        if name.endswith("gain"):
            return np.ones(shape)
        if name.endswith("bias"):
            return np.zeros(shape)
        # The residual stream sums two branches of each block: as in GPT-2, they start smaller by the root
        # of their number.
        branches = 2 * self.layers if name.endswith("out") else 1
        return rng.normal(0, INITIAL_STD / math.sqrt(branches), shape)


class GPT:
    """A model and the gradients of its parameters.

    All parameters lie in one vector, `values`, and all gradients in another, `gradient`, so that the
    optimiser is a few operations on whole vectors; `parameters` and `gradients` are views, by name.
    `xp` is numpy or cupy.
    """

    def __init__(self, config: Config, xp: Any, rng: np.random.Generator) -> None:
        self.config, self.xp = config, xp
        shapes = config.parameter_shapes
        initial = np.concatenate([config.initial_value(name, rng).ravel() for name in shapes])
        self.values = xp.asarray(initial.astype(config.dtype))
        self.gradient = xp.zeros_like(self.values)
        self.parameters = views(self.values, shapes)
        self.gradients = views(self.gradient, shapes)
        self.attention = ATTENTIONS[config.attention]
        branches = [
            residual(chain(self.norm(f"{block}.{name}.norm"), branch(f"{block}.{name}")))
            for block in range(config.layers)
            for name, branch in (("attention", self.self_attention), ("mlp", self.mlp))
        ]
        self.forward = chain(self.embedding, *branches, self.norm("final.norm"), self.linear("head"))

    def logits(self, tokens: Array) -> Array:
        """(batch, length, vocabulary), of (batch, length) tokens."""
        return self.forward(tokens)[0]

    def loss(self, tokens: Array, targets: Array) -> Array:
        """Mean cross-entropy in nats, of (batch, length) tokens and the ones that follow each."""
        loss, _ = cross_entropy(self.xp, self.logits(tokens), self.one_hot(targets))
        return loss / targets.size

    def loss_and_gradient(self, tokens: Array, targets: Array) -> Array:
        """The same loss; its gradient is then in `gradient`."""
        self.gradient[...] = 0
        logits, backward = self.forward(tokens)
        loss, dlogits = cross_entropy(self.xp, logits, self.one_hot(targets))
        # What goes back is the gradient of the sum of losses. That of their mean is smaller by the number
        # of tokens, and attention in float16 would round much of it to 0.
        backward(dlogits)
        self.gradient /= targets.size
        return loss / targets.size

    def embedding(self, tokens: Array) -> tuple[Array, Backward]:
        length = tokens.shape[1]

        def backward(dx: Array) -> None:
            # A product, unlike a scatter-add with atomics, sums in the same order every time, and a
            # vocabulary of characters is small enough for it.
            self.gradients["tokens"] += rows(self.one_hot(tokens)).T @ rows(dx)
            self.gradients["positions"][:length] += dx.sum(axis=0)

        return self.parameters["tokens"][tokens] + self.parameters["positions"][:length], backward

    def one_hot(self, tokens: Array) -> Array:
        return (tokens[..., None] == self.xp.arange(self.config.vocabulary)).astype(self.config.dtype)

    def self_attention(self, name: str) -> Layer:
        return chain(self.linear(f"{name}.qkv"), self.attend, self.linear(f"{name}.out"))

    def attend(self, qkv: Array) -> tuple[Array, Backward]:
        """Attention, from (batch, length, the heads of q, k and v side by side) to (batch, length, width)."""
        config = self.config
        batch, length, _ = qkv.shape
        attention_dtype = DTYPES[config.attention_dtype]
        # q, k and v remain views of one array: attention takes any strides.
        heads = qkv.reshape(batch, length, -1, config.head_dim).astype(attention_dtype, copy=False)
        first_k, first_v = config.heads, config.heads + config.kv_heads
        q, k, v = heads[:, :, :first_k], heads[:, :, first_k:first_v], heads[:, :, first_v:]
        out, attention_backward = self.attention(self.xp, q, k, v)

        def backward(dy: Array) -> Array:
            dout = dy.reshape(out.shape).astype(out.dtype, copy=False)
            gradients = [gradient.astype(config.dtype, copy=False) for gradient in attention_backward(dout)]
            return self.xp.concatenate(gradients, axis=2).reshape(qkv.shape)

        return out.astype(config.dtype, copy=False).reshape(batch, length, config.width), backward

    def mlp(self, name: str) -> Layer:
        return chain(self.linear(f"{name}.in"), self.gelu, self.linear(f"{name}.out"))

    def gelu(self, x: Array) -> tuple[Array, Backward]:
        """x times the normal distribution function of x, approximated (Hendrycks and Gimpel 2016)."""
        scale = math.sqrt(2 / math.pi)
        tanh = self.xp.tanh(scale * (x + GELU_CUBIC * x * x * x))

        def backward(dy: Array) -> Array:
            dtanh = scale * (1 + 3 * GELU_CUBIC * x * x) * (1 - tanh * tanh)
            return dy * (0.5 * (1 + tanh) + 0.5 * x * dtanh)

        return 0.5 * x * (1 + tanh), backward

    def linear(self, name: str) -> Layer:
        def forward(x: Array) -> tuple[Array, Backward]:
            def backward(dy: Array) -> Array:
                self.gradients[name] += rows(x).T @ rows(dy)
                return product(dy, self.parameters[name].T)

            return product(x, self.parameters[name]), backward

        return forward

    def norm(self, name: str) -> Layer:
        """Layer normalisation (Ba et al. 2016)."""

        def forward(x: Array) -> tuple[Array, Backward]:
            centred = x - x.mean(axis=-1, keepdims=True)
            variance = (centred * centred).mean(axis=-1, keepdims=True)
            inverse_std = 1 / self.xp.sqrt(variance + NORM_EPSILON)
            z = centred * inverse_std

            def backward(dy: Array) -> Array:
                self.gradients[f"{name}.gain"] += rows(dy * z).sum(axis=0)
                self.gradients[f"{name}.bias"] += rows(dy).sum(axis=0)
                dz = dy * self.parameters[f"{name}.gain"]
                along_z = (dz * z).mean(axis=-1, keepdims=True)
                return inverse_std * (dz - dz.mean(axis=-1, keepdims=True) - z * along_z)

            return z * self.parameters[f"{name}.gain"] + self.parameters[f"{name}.bias"], backward

        return forward


def views(vector: Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Consecutive pieces of a vector, by name and of these shapes."""
    pieces, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        pieces[name] = vector[start:end].reshape(shape)
        start = end
    return pieces


def chain(*layers: Layer) -> Layer:
    """One layer after the other."""

    def forward(x: Array) -> tuple[Array, Backward]:
        backwards: list[Backward] = []
        for layer in layers:
            x, layer_backward = layer(x)
            backwards.append(layer_backward)

        def backward(dy: Array) -> Array:
            for layer_backward in reversed(backwards):
                dy = layer_backward(dy)
            return dy

        return x, backward

    return forward


def residual(layer: Layer) -> Layer:
    """The input with the layer's output added to it."""

    def forward(x: Array) -> tuple[Array, Backward]:
        y, backward = layer(x)
        return x + y, lambda dy: dy + backward(dy)

    return forward


def product(x: Array, matrix: Array) -> Array:
    """x @ matrix as one product, not one for each sequence."""
    return (rows(x) @ matrix).reshape(*x.shape[:-1], matrix.shape[1])


def rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def cross_entropy(xp: Any, logits: Array, one_hot_targets: Array) -> tuple[Array, Array]:
    """The sum of the cross-entropies, and its gradient in the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = xp.exp(shifted)
    sums = exponentials.sum(axis=-1, keepdims=True)
    losses = xp.log(sums)[..., 0] - (shifted * one_hot_targets).sum(axis=-1)
    return losses.sum(), exponentials / sums - one_hot_targets


def cufa_attention(xp: Any, q: Array, k: Array, v: Array) -> Attended:
    """Causal attention of (batch, length, heads, head_dim), k and v with as many heads or fewer."""
    backend = "numpy" if xp is np else "cuda"
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True, backend=backend)

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = cufa.attention_backward(dout, q, k, v, out, lse, causal=True, backend=backend)
        return dq, dk, dv

    return out, backward


def standard_attention(xp: Any, q: Array, k: Array, v: Array) -> Attended:
    """The same, holding S and P whole: what cufa's loss curve is compared with."""
    batch, length, kv_heads, head_dim = k.shape
    scale = 1 / math.sqrt(head_dim)

    def by_kv_head(x: Array) -> Array:
        """(batch, kv_heads, group, length, head_dim), for sums in the precision that cufa has."""
        x = x.astype(accumulator_dtype(q.dtype.name))
        return x.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)

    def as_given(x: Array) -> Array:
        return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, head_dim).astype(q.dtype)

    Q, K, V = by_kv_head(q), by_kv_head(k), by_kv_head(v)
    S = xp.where(xp.tri(length, dtype=bool), scale * (Q @ K.swapaxes(-1, -2)), -xp.inf)
    P = xp.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dO = by_kv_head(dout)
        dP = dO @ V.swapaxes(-1, -2)
        dS = scale * P * (dP - (dP * P).sum(axis=-1, keepdims=True))
        dK = (dS.swapaxes(-1, -2) @ Q).sum(axis=2, keepdims=True)
        dV = (P.swapaxes(-1, -2) @ dO).sum(axis=2, keepdims=True)
        return as_given(dS @ K), as_given(dK), as_given(dV)

    return as_given(P @ V), backward


ATTENTIONS: dict[str, Callable[[Any, Array, Array, Array], Attended]] = {
    "cufa": cufa_attention,
    "standard": standard_attention,
}
