"""Float32 scales of a whole tensor: its largest magnitude, and division that every program rounds alike."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from mxjax.blocks import magnitude_bits

SMALLEST_TENSOR_MAX = 2.0**-100
"""The largest magnitude for which a tensor scale is chosen if all elements are smaller.

With it every factor is a normal float32: an E5M2 tensor's scale is 2**-116, and what a block of NVFP4 is
multiplied by reaches 2**121.
"""


def tensor_max(x: Float32[Array, "*shape"]) -> Float32[Array, ""]:
    """Returns the largest magnitude of x, at least SMALLEST_TENSOR_MAX; NaN if x contains NaN."""
    amax = lax.bitcast_convert_type(jnp.max(magnitude_bits(x), initial=0), jnp.float32)
    return jnp.maximum(amax, jnp.float32(SMALLEST_TENSOR_MAX))


def divide(x: Float32[Array, "*blocks"], divisor: float | Float32[Array, ""]) -> Float32[Array, "*blocks"]:
    """Returns x / divisor, rounded once; XLA might multiply by the inverse or merge two divisions."""
    divisors = lax.optimization_barrier(jnp.full(x.shape, divisor, jnp.float32))
    return lax.optimization_barrier(x / divisors)
