"""What a number is: formats, scales, rounding, rotation, quantization. Kernels reproduce them bit for bit."""
