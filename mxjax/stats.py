"""Measures of what quantization does to a tensor, and to each GEMM of a `dot`, against float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from mxjax.blocks import BlockShape
from mxjax.dot import dot
from mxjax.formats import get_format
from mxjax.gemm import Implementation
from mxjax.policy import Policy
from mxjax.quantize import dequantize, quantize
from mxjax.rounding import Rounding
from mxjax.scales import ScaleRule


class Error(NamedTuple):
    """How far an approximation lies from a float32 tensor; scalars.

    Attributes:
      sqnr_db: signal to quantization noise, 10 log10(sum x^2 / sum (x - approximation)^2), in dB.
      relative_error: ||x - approximation|| / ||x||.
      cosine: of the angle between the two.
    """

    sqnr_db: Float32[Array, ""]
    relative_error: Float32[Array, ""]
    cosine: Float32[Array, ""]


class QuantizationError(NamedTuple):
    """`Error`'s fields, and two fractions of all elements.

    Attributes:
      clipped: whose magnitude was past the largest that their block can hold.
      flushed: that were not zero and became zero.
    """

    sqnr_db: Float32[Array, ""]
    relative_error: Float32[Array, ""]
    cosine: Float32[Array, ""]
    clipped: Float32[Array, ""]
    flushed: Float32[Array, ""]


class DotErrors(NamedTuple):
    """The error of each GEMM's product: y, dx and dw."""

    fprop: Error
    dgrad: Error
    wgrad: Error


def error(x: Float[Array, "*shape"], approximation: Float[Array, "*shape"]) -> Error:
    """Returns how far `approximation` lies from x.

    Special values: infinite dB where exact; for an all-zero x the cosine is NaN, and so are the others if
    the approximation is all zero too (else -infinite dB and an infinite relative error).
    """
    x, a = x.astype(jnp.float32), approximation.astype(jnp.float32)
    signal, noise, norm = jnp.sum(x * x), jnp.sum((x - a) ** 2), jnp.sum(a * a)
    return Error(
        10 * jnp.log10(signal / noise),
        jnp.sqrt(noise / signal),
        jnp.sum(x * a) / jnp.sqrt(signal * norm),
    )


def quantization(
    x: Float[Array, "*shape"],
    format: str = "mxfp4",
    *,
    axis: int = -1,
    scale_rule: ScaleRule = "floor",
    rounding: Rounding = "nearest",
    block_shape: BlockShape = None,
    prescale: float | None = None,
    key: jax.Array | None = None,
) -> QuantizationError:
    """Returns the error of `dequantize(quantize(x, ...))`; arguments as `mxjax.quantize`."""
    q = quantize(
        x,
        format,
        axis=axis,
        scale_rule=scale_rule,
        rounding=rounding,
        block_shape=block_shape,
        prescale=prescale,
        key=key,
    )
    x, value = x.astype(jnp.float32), dequantize(q)
    element = get_format(format).element
    at_limit = jnp.abs(q.elements.astype(jnp.float32)) == (element.max if element else jnp.inf)
    return QuantizationError(
        *error(x, value),
        clipped=jnp.mean(at_limit & (jnp.abs(x) > (1 + 1e-6) * jnp.abs(value)), dtype=jnp.float32),
        flushed=jnp.mean((x != 0) & (value == 0), dtype=jnp.float32),
    )


def gemms(
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "d_in d_out"],
    dy: Float[Array, "*batch d_out"],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> DotErrors:
    """Returns the errors of y, dx and dw of `dot(x, w, policy=...)`, for the output gradient dy."""
    x, w, dy = (a.astype(jnp.float32) for a in (x, w, dy))

    def products(policy, implementation):
        def product(x, w):
            return dot(x, w, policy=policy, key=key, implementation=implementation)

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    exact, quantized = products("fp32", "reference"), products(policy, implementation)
    return DotErrors(*(error(e, q) for e, q in zip(exact, quantized, strict=True)))
