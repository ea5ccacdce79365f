"""How each library beside cufa is called that brings its own gradient: by PyTorch, in cufa's layout."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch._functorch import config as autograd_config
from torch._inductor.exc import InductorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

DTYPES = ("float32", "float16", "bfloat16")
FLASH_ATTN_4, FLEX = "flash-attn-4", "FlexAttention"
# PyTorch's kernels. All but one are for 16 bits alone.
BACKENDS = {
    "flash-attention-2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = {dtype: ("efficient",) if dtype == "float32" else (*BACKENDS, FLASH_ATTN_4, FLEX) for dtype in DTYPES}
PEER_NAMES = PEERS["bfloat16"]
WITHOUT_DROPOUT = (FLASH_ATTN_4, FLEX)
# What FlexAttention is given where its own choice wants more shared memory than there is.
SMALL_TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}

# Else a compiled backward cannot be repeated.
autograd_config.donated_buffer = False

Call = Callable[[], Any]
Tensors = Sequence[torch.Tensor]


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_installed(peer: str) -> bool:
    """Whether it is there; all but flash-attn-4 come with PyTorch."""
    return peer != FLASH_ATTN_4 or version_of(FLASH_ATTN_4) is not None


def peers_of(
    dtype: str, tensors: Tensors, causal: bool, chosen: Collection[str], dropout_p: float = 0
) -> list[tuple[str, Call, list[torch.Tensor]]]:
    """Of each peer that is chosen, installed and able: its name, a call, what it can be differentiated by."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    of_peer: dict[str, Callable[[], Call]] = {
        name: functools.partial(of_pytorch, backend, q, k, v, causal, dropout_p)
        for name, backend in BACKENDS.items()
    }
    of_peer[FLASH_ATTN_4] = lambda: of_flash_attn_4(q, k, v, causal)
    of_peer[FLEX] = lambda: of_flex(
        (q, k, v),
        block_mask=create_block_mask(causal_mod, None, None, q.shape[1], k.shape[1]) if causal else None,
        enable_gqa=q.shape[2] != k.shape[2],
    )[0]
    able = [
        name
        for name in PEERS[dtype]
        if name in chosen and not (dropout_p and name in WITHOUT_DROPOUT) and is_installed(name)
    ]
    return [(name, of_peer[name](), [q, k, v]) for name in able]


def with_gradient(attend: Call, arguments: Tensors, dout: torch.Tensor) -> dict[str, Call]:
    """A library's forward and backward, both of which have run once: what refuses the problem has raised."""
    differentiate = functools.partial(
        torch.autograd.grad, attend(), arguments, grad_outputs=dout, retain_graph=True
    )
    differentiate()
    return {"forward": attend, "backward": differentiate}


def calls_of_able(
    problem: object, peers: Iterable[tuple[str, Call, Tensors]], dout: torch.Tensor
) -> dict[str, dict[str, Call]]:
    """The forward and the backward of each of `peers`, as `peers_of` returns them, that takes the problem."""
    calls = {}
    for name, attend, arguments in peers:
        try:
            calls[name] = with_gradient(attend, arguments, dout)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            print(f"{name} is left out of {problem}: {reason}", flush=True)
    return calls


def of_pytorch(
    backend: SDPBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    dropout_p: float = 0,
) -> Call:
    grouped = q.shape[2] != k.shape[2]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                dropout_p=dropout_p,
                is_causal=causal,
                enable_gqa=grouped,
            )
        return out.transpose(1, 2)

    return attend


def of_flash_attn_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    from flash_attn.cute.interface import flash_attn_func

    def attend() -> torch.Tensor:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return attend


def causal_mod(_: Any, __: Any, q_idx: Any, kv_idx: Any) -> Any:
    """For FlexAttention, of as many queries as keys."""
    return kv_idx <= q_idx


def of_flex(arguments: Tensors, learnt: Tensors = (), **options: Any) -> tuple[Call, dict[str, int]]:
    """FlexAttention compiled for these arguments, forward and backward, and what options its kernels need."""
    try:
        return compiled_flex(arguments, learnt, **options), {}
    except InductorError as error:
        print(f"{FLEX} by its own choice: {str(error).splitlines()[0]}", flush=True)
        return compiled_flex(arguments, learnt, **options, kernel_options=SMALL_TILES), SMALL_TILES


def compiled_flex(arguments: Tensors, learnt: Tensors, **options: Any) -> Call:
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> torch.Tensor:
        return compiled(*(x.transpose(1, 2) for x in arguments), **options).transpose(1, 2)

    out = attend()
    if out.requires_grad:
        torch.autograd.grad(out, (*arguments, *learnt), grad_outputs=torch.ones_like(out))
    return attend
