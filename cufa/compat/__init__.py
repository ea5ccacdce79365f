"""cufa under the names of other libraries, for code that was written for them.

Each function takes that library's arguments, in its order and with its meaning, and calls `cufa.attention`.
What differs is said in its docstring: there is no automatic differentiation of NumPy or CuPy arrays, so
gradients come from `cufa.attention_backward`, with the LSE that each of these functions can return.

    from cufa.compat import flash_attn_func
"""

from cufa.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cufa.compat.jax import dot_product_attention
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
