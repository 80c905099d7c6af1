"""Operands of a GEMM in the forms that kernels read and write."""
