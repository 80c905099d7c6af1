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
from mxjax.kmajor import KMajor, code_values, spread_blocks, unpack_codes
from mxjax.scales import power_of_two

Carrier = Literal["e4m3", "e5m2"]

CARRIER_DTYPES = {"e4m3": E4M3.dtype, "e5m2": E5M2.dtype}
SHIFTS = {"e4m3": (-8, 6), "e5m2": (-15, 13)}
"""The smallest and largest shift s for which E2M1's magnitudes, 0.5 to 6, times 2**s are exact."""
UNIT_BYTES = (64, 190)
"""The smallest and largest unit byte of a row; its exponent is then from -63 to 63."""
WIDTHS = {carrier: high - low + 1 for carrier, (low, high) in SHIFTS.items()}
"""The number of binades that a row's scales may span."""

Flags = UInt8[Array, "*batch n"] | UInt32[Array, "*batch programs"]
"""1 for some rows, 0 for others. From the kernel, a word for each of its programs
(`mxjax.kernels.matmul.carry.rows_and_parts`): bit i is that of its row i."""


class Carried(NamedTuple):
    """An operand in FP8. Its value is elements * 2**(unit - 127), row by row, unless elements were lost.

    With w of WIDTHS, it is (elements + lower * 2**-w) * 2**(unit - 127) also where elements were lost, unless
    some are in neither.

    Attributes:
      elements: FP8, K-major; 0 in place of lost elements.
      unit: the scale byte in each row that becomes a factor of 1, within UNIT_BYTES.
      lost: the rows with a nonzero element that FP8 cannot represent beside the others.
      lower: FP8, the elements of the w binades below; from the kernel only in rows that lost elements, and
        not for all operands.
      far: those rows of `lost` with a nonzero element in neither; from the kernel where there is `lower`.
    """

    elements: Float[Array, "*batch n k"]
    unit: UInt8[Array, "*batch n"]
    lost: Flags
    lower: Float[Array, "*batch n k"] | None = None
    far: Flags | None = None

    @property
    def fits(self) -> Bool[Array, ""]:
        """Whether no element was lost. If False, these elements alone give another product."""
        return ~jnp.any(self.lost)

    @property
    def width(self) -> int:
        """The number of binades of `elements`, and of `lower`."""
        return next(w for c, w in WIDTHS.items() if self.elements.dtype == CARRIER_DTYPES[c])


def carry(q: KMajor, carrier: Carrier) -> Carried:
    """Returns a packed operand in FP8, without its factor; NaN where q is NaN."""
    packed, scales = q.packed
    high = SHIFTS[carrier][1]
    byte = scales.astype(jnp.int32)
    is_nan = byte == 255
    largest = jnp.max(jnp.where(is_nan, 0, byte), axis=-1, initial=0)
    unit = jnp.clip(largest - high, *UNIT_BYTES)
    shift = byte - unit[..., None]
    groups = packed.reshape(*scales.shape, BLOCK // 2)
    counts = jnp.any((groups & 0x77) != 0, axis=-1) & ~is_nan
    values = code_values(unpack_codes(packed))
    scaled, held = _window(values, shift, carrier)
    lost = counts & ~held
    elements = jnp.where(spread_blocks(is_nan), jnp.nan, jnp.where(spread_blocks(lost), 0, scaled))
    scaled, held_below = _window(values, shift + WIDTHS[carrier], carrier)
    lower = jnp.where(spread_blocks(lost & held_below), scaled, 0)
    lost_rows, far_rows = (jnp.any(b, axis=-1).astype(jnp.uint8) for b in (lost, lost & ~held_below))
    dtype = CARRIER_DTYPES[carrier]
    return Carried(elements.astype(dtype), unit.astype(jnp.uint8), lost_rows, lower.astype(dtype), far_rows)


def _window(values, shift, carrier: Carrier):
    """Returns values times 2**shift, the shift clipped, and the blocks whose shift FP8 holds."""
    low, high = SHIFTS[carrier]
    clipped = jnp.clip(shift, low, high)
    return values * spread_blocks(power_of_two(clipped)), clipped == shift
