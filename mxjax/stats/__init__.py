"""Errors of quantization, of a tensor, of the GEMMs of a `dot`, and of the layers of a model."""

from mxjax.products.linear import residual_bytes
from mxjax.stats.measures import DotErrors, Error, GemmError, QuantizationError, error, gemms, quantization

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
