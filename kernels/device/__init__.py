"""Functions that run inside Triton kernels."""
