"""Traces Python functions, `score_mod` and `mask_mod`, by calling them with symbols.

Holds the expressions (`expression`), their values in NumPy (`evaluation`), their derivatives (`derivatives`),
their CUDA C++ (`code`), and the header that kernels are compiled with (`header`).
"""
