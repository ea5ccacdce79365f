"""cufa under the names of other libraries, for code that was written for them.

Each function takes the arguments of that library, in the same order and with the same meaning, and calls
`cufa.attention`. Its docstring lists the differences. None of them differentiates: for gradients, ask for the
LSE and pass it to `cufa.attention_backward`. For functions that are causal from the top left, their
docstrings say with which keys.

    from cufa.compat import flash_attn_func
"""

from cufa.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cufa.compat.jax import dot_product_attention
from cufa.compat.kvcache import flash_attn_with_kvcache
from cufa.compat.pytorch import scaled_dot_product_attention

__all__ = [
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]
