"""Errors of quantization, of a tensor, of the GEMMs of a `dot`, and of the layers of a model."""

from mxjax.stats.measures import (
    DotErrors,
    Error,
    GemmError,
    QuantizationError,
    error,
    gemms,
    quantization,
    residual_bytes,
)

__all__ = [
    "DotErrors",
    "Error",
    "GemmError",
    "QuantizationError",
    "error",
    "gemms",
    "quantization",
    "residual_bytes",
]
