"""What a Python function computes, found by calling it with symbols: `score_mod` and `mask_mod` go this way.

The expressions (`expression`), their values by NumPy (`evaluation`), their derivatives (`derivatives`), in
CUDA C++ (`code`), and the header that kernels are compiled with (`header`).
"""
