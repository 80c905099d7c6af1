"""FP8 carriers: MXFP4 operands represented exactly in FP8, so that FP8 matrix units can multiply them.

A nonzero element times its block's scale is 1 or 1.5 times a power of two. FP8 represents it exactly if the
scales in its row, along K, span at most 15 binades (E4M3) or 29 (E5M2). That is known only at run time, hence
`Carried.lost`. Scales far above 2**63 or below 2**-63 do not fit either: the exponents of a row and a column
must add up to a float32's.

`mxjax.kernels.matmul.carry` reproduces `carry` bit for bit.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8, UInt32

from mxjax.formats import BLOCK, E4M3, E5M2
from mxjax.kmajor import KMajor, code_values, power_of_two, spread_blocks, unpack_codes

Carrier = Literal["e4m3", "e5m2"]

CARRIER_DTYPES = {"e4m3": E4M3.dtype, "e5m2": E5M2.dtype}
SHIFTS = {"e4m3": (-8, 6), "e5m2": (-15, 13)}
"""The smallest and largest shift s for which E2M1's magnitudes, 0.5 to 6, times 2**s are exact."""
UNIT_BYTES = (64, 190)
"""The smallest and largest unit byte of a row; its exponent is then from -63 to 63."""


class Carried(NamedTuple):
    """An operand in FP8. Its value is elements * 2**(unit - 127), row by row, unless elements were lost.

    Attributes:
      elements: FP8, K-major.
      unit: the scale byte in each row that becomes a factor of 1, within UNIT_BYTES.
      lost: 1 for each row with a nonzero element that FP8 cannot represent, else 0. From the kernel, a word
        for each of its programs (`mxjax.kernels.matmul.carry.rows_and_parts`): bit i is that of its row i.
    """

    elements: Float[Array, "*batch n k"]
    unit: UInt8[Array, "*batch n"]
    lost: UInt8[Array, "*batch n"] | UInt32[Array, "*batch programs"]

    @property
    def fits(self) -> Bool[Array, ""]:
        """Whether no element was lost. If False, do not multiply these elements."""
        return ~jnp.any(self.lost)


def carry(q: KMajor, carrier: Carrier) -> Carried:
    """Returns a packed operand in FP8, without its factor; NaN where q is NaN."""
    packed, scales = q.packed
    low, high = SHIFTS[carrier]
    byte = scales.astype(jnp.int32)
    is_nan = byte == 255
    largest = jnp.max(jnp.where(is_nan, 0, byte), axis=-1, initial=0)
    unit = jnp.clip(largest - high, *UNIT_BYTES)
    shift = byte - unit[..., None]
    groups = packed.reshape(*scales.shape, BLOCK // 2)
    is_nonzero = jnp.any((groups & 0x77) != 0, axis=-1)
    lost = jnp.any(((shift < low) | (shift > high)) & ~is_nan & is_nonzero, axis=-1)
    factor = jnp.where(is_nan, jnp.nan, power_of_two(jnp.clip(shift, low, high)))
    elements = code_values(unpack_codes(packed)) * spread_blocks(factor)
    return Carried(elements.astype(CARRIER_DTYPES[carrier]), unit.astype(jnp.uint8), lost.astype(jnp.uint8))
