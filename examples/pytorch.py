#!/usr/bin/env python3
"""cufa within PyTorch's autograd: tensors go in and come out through DLPack, without a copy.

usage: examples/pytorch.py      gradients of a small problem beside those of PyTorch's own attention

A program with several streams on a GPU has to make its current one CuPy's around each call of cufa, also in
`backward`, which autograd calls in a thread of its own:

    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):

or, before PyTorch 2.10, cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream). Else results are
memory of another stream, CuPy's current one, which may use it again once they are freed, even if a stream of
PyTorch's is still to read them. Tensors given as `out`, `lse`, `dq`, `dk` and `dv` are PyTorch's own memory.
"""

try:
    import torch
except ImportError:
    raise SystemExit("examples/pytorch.py needs PyTorch: pip install torch") from None

import cufa


class Attention(torch.autograd.Function):
    """cufa.attention as a node of the graph; tensors are (batch, seqlen, heads, head_dim)."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        # PyTorch records no gradients here. Where it does, cufa refuses tensors that want some.
        out, lse = cufa.attention(q, k, v, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        return *cufa.attention_backward(dout, *ctx.saved_tensors, **ctx.options), None


def attention(q, k, v, **options):
    """As cufa.attention, of which gradients can be taken: softmax_scale, causal, window and softcap."""
    return Attention.apply(q, k, v, options)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(2, 1024, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    )
    out = attention(q, k, v, causal=True)
    gradients = torch.autograd.grad(out.square().mean(), (q, k, v))

    turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    their_gradients = torch.autograd.grad(theirs.square().mean(), (q, k, v))
    pairs = {"out": (out, theirs.transpose(1, 2))}
    pairs |= dict(zip(("dq", "dk", "dv"), zip(gradients, their_gradients, strict=True), strict=True))
    for name, (ours, other) in pairs.items():
        difference = (ours - other).float().norm() / other.float().norm()
        print(f"{name:4} differs from PyTorch's by {difference.item():.1e} of its size")


if __name__ == "__main__":
    main()
