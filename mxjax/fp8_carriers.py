"""FP8 carriers: MXFP4 operands held exactly in FP8, so that FP8 matrix units multiply them.

An element times its block's scale, both powers of two times at most 1.5, is a power of two times at most 1.5;
FP8 holds it if the scales of its row, along which is summed, span no more binades than FP8 has to spare: 15
with E4M3, 29 with E5M2. Whether they do is known at run time alone, hence `Carried.fits`. Scales far above
2**63 or below 2**-63 do not fit either, so that the exponents of a row and a column add up to a float32's.

`mxjax.kernels.matmul.carry` does the same.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mxjax.packing import (
    BLOCK,
    Packed,
    code_values,
    power_of_two,
    spread_blocks,
    unpack_codes,
)

Carrier = Literal["e4m3", "e5m2"]

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
SHIFTS = {"e4m3": (-8, 6), "e5m2": (-15, 13)}
"""The least and the largest shift s at which 0.5 * 2**s to 6 * 2**s are exact."""
REFERENCES = (64, 190)
"""The least and the largest scale byte that is a factor of 1: a row's exponent is from -63 to 63."""


class Carried(NamedTuple):
    """An operand in FP8: its value is elements * 2**exponent, row by row, exactly where `fits`.

    Attributes:
      fits: whether no element of the operand was lost. If not, multiply something else.
    """

    elements: Float[Array, "*batch n k"]
    exponent: Int32[Array, "*batch n"]
    fits: Bool[Array, ""]


def carry(q: Packed, carrier: Carrier) -> Carried:
    """Returns q in FP8, without its factor; NaN where q is."""
    low, high = SHIFTS[carrier]
    byte = q.scales.astype(jnp.int32)
    is_nan = byte == 255
    largest = jnp.max(jnp.where(is_nan, 0, byte), axis=-1, initial=0)
    reference = jnp.clip(largest - high, *REFERENCES)
    shift = byte - reference[..., None]
    groups = q.elements.reshape(*q.scales.shape, BLOCK // 2)
    holds_something = jnp.any((groups & 0x77) != 0, axis=-1)
    fits = ~jnp.any(((shift < low) | (shift > high)) & ~is_nan & holds_something)
    factor = jnp.where(is_nan, jnp.nan, power_of_two(jnp.clip(shift, low, high)))
    elements = code_values(unpack_codes(q.elements)) * spread_blocks(factor)
    return Carried(elements.astype(DTYPES[carrier]), reference - 127, fits)
