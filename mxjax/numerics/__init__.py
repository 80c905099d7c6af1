"""Formats, scales, rounding, rotation, quantization: definitions that kernels reproduce bit for bit."""
