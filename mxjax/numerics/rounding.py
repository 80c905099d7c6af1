"""Rounding of float32 values to an element format: to nearest even, or stochastically.

Both saturate at the format's largest magnitude, keep the sign of zero, and pass NaN through.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt16

from mxjax.numerics.formats import Element
from mxjax.numerics.philox import KeyWords, random_uint16

Rounding = Literal["nearest", "stochastic"]


def round_nearest(x: Float32[Array, "*shape"], element: Element) -> Float32[Array, "*shape"]:
    """Returns the value of `element` nearest to each x, ties to the even code.

    Source: OCP MX v1.0, section 5.3; roundTiesToEven of IEEE 754.
    """
    x = jnp.clip(x, -element.max, element.max)
    step, per_step = _steps(x, element)
    steps = x * per_step
    rounded = jnp.rint(steps) if element.mantissa_bits else _round_powers(steps, step)
    return rounded * step


def stochastic_round(
    x: Float32[Array, "*shape"], element: Element, random: UInt16[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns one of the neighbours a <= x < b of `element` around each x: b with probability (x-a)/(b-a).

    x is rounded away from zero where (random + 1/2) / 2**16 is below its distance to the neighbour nearer
    zero, in steps. So values of the grid never move, and the probability is exact to 2**-17. Values past
    `element.max` saturate; scale them to fit if the mean must be exact.

    Args:
      random: uniform integers in [0, 2**16).
    """
    magnitude = jnp.minimum(jnp.abs(x), element.max)
    step, per_step = _steps(magnitude, element)
    steps = magnitude * per_step
    below = jnp.floor(steps)
    uniform = (random.astype(jnp.float32) + 0.5) * jnp.float32(2**-16)
    return jnp.copysign((below + (uniform < steps - below).astype(jnp.float32)) * step, x)


def fraction_between(x: Float32[Array, "*shape"], element: Element) -> Float32[Array, "*shape"]:
    """Returns how far each x >= 0 is from its neighbour below to that above, in [0, 1); 0 on the grid."""
    steps = x * _steps(x, element)[1]
    return steps - jnp.floor(steps)


def round_elements(
    x: Float32[Array, "*shape"],
    element: Element,
    rounding: Rounding,
    prescale: float | None,
    key: jax.Array | KeyWords | None,
    axis: int,
    use: int = 0,
) -> Float32[Array, "*shape"]:
    """Returns scaled values rounded to elements, after the prescale.

    Args:
      axis, use: the blocked axis, along which random bits are counted, and their use of the key; see
        `random_uint16`.
    """
    if prescale is not None:
        x = x * jnp.float32(prescale)
    if rounding == "nearest":
        return round_nearest(x, element)
    assert key is not None
    return stochastic_round(x, element, random_uint16(key, x.shape, axis, use))


def _steps(
    x: Float32[Array, "*shape"], element: Element
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
    """Returns the distance between neighbours in each x's binade, a power of two, and its inverse."""
    binade = lax.bitcast_convert_type(_bits(x) & 0x7F80_0000, jnp.float32)
    step = jnp.maximum(binade, 2.0**element.emin) * jnp.float32(2.0**-element.mantissa_bits)
    return step, lax.bitcast_convert_type(0x7F00_0000 - _bits(step), jnp.float32)


def _round_powers(
    steps: Float32[Array, "*shape"], step: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Rounds to nearest in a format without mantissa; a tie goes to the even exponent code."""
    code_below_is_even = (_bits(step) >> 23) & 1 == 0  # float32's bias and E3M0's are both odd
    return jnp.where((jnp.abs(steps) == 1.5) & code_below_is_even, jnp.sign(steps), jnp.rint(steps))


def _bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)
