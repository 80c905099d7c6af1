"""Float32 scales of a tensor or of long blocks: largest magnitudes, and division rounded alike everywhere."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from mxjax.blocks import block_max, magnitude_bits

SMALLEST_TENSOR_MAX = 2.0**-100
"""The largest magnitude for which a tensor scale is chosen if all elements are smaller.

With it every factor is a normal float32: an E5M2 tensor's scale is 2**-116, and what a block of NVFP4 is
multiplied by reaches 2**121.
"""

SMALLEST_BLOCK_MAX = 2.0**-122
"""The same for a block whose one scale is a float32. With it the smallest value, half a scale, is normal."""


def tensor_max(x: Float32[Array, "*shape"]) -> Float32[Array, ""]:
    """Returns the largest magnitude of x, at least SMALLEST_TENSOR_MAX; NaN if x contains NaN."""
    amax = lax.bitcast_convert_type(jnp.max(magnitude_bits(x), initial=0), jnp.float32)
    return jnp.maximum(amax, jnp.float32(SMALLEST_TENSOR_MAX))


def outer_max(x: Float32[Array, "*shape"], length: int, axis: int) -> Float32[Array, "*outer"]:
    """Returns the largest magnitude of each `length` elements along the axis, as `tensor_max` does."""
    return jnp.maximum(block_max(x, (1, length), axis), jnp.float32(SMALLEST_TENSOR_MAX))


def divide(
    x: Float32[Array, "*blocks"], divisor: float | Float32[Array, "*#blocks"]
) -> Float32[Array, "*blocks"]:
    """Returns x / divisor, rounded once; XLA might multiply by the inverse or merge two divisions."""
    divisors = lax.optimization_barrier(jnp.broadcast_to(jnp.float32(divisor), x.shape))
    return lax.optimization_barrier(x / divisors)
