"""FP8 carriers: MXFP4 operands represented exactly in FP8, so that FP8 matrix units can multiply them.

A nonzero element times its block's scale is 1 or 1.5 times a power of two. FP8 represents it exactly if the
scales in its row, along K, span at most 15 binades (E4M3) or 29 (E5M2). That is known only at run time, hence
`Carried.lost`. Scales far above 2**63 or below 2**-63 do not fit either: the exponents of a row and a column
must add up to a float32's.

`mxjax.kernels.matmul.carry` reproduces `carry` bit for bit.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, UInt8, UInt32

from mxjax.numerics.formats import BLOCK, E2M1, E4M3, E5M2
from mxjax.numerics.scales import power_of_two
from mxjax.operands.kernel_operand import KernelOperand, code_values, spread_blocks, unpack_codes

Carrier = Literal["e4m3", "e5m2"]

CARRIER_DTYPES = {"e4m3": E4M3.dtype, "e5m2": E5M2.dtype}
SHIFTS = {"e4m3": (-8, 6), "e5m2": (-15, 13)}
"""The smallest and largest shift s for which E2M1's magnitudes, 0.5 to 6, times 2**s are exact."""
UNIT_BYTES = (64, 190)
"""The smallest and largest unit byte of a row; its exponent is then from -63 to 63."""
LEAST_FACTOR = -126
"""The smallest exponent of a group's factor, which is then a normal float32."""

Flags = UInt8[Array, "*batch n"] | UInt32[Array, "*batch programs"]
"""1 for some rows, 0 for others. From the kernel, a word for each of its programs
(`mxjax.kernels.matmul.carry.rows_and_parts`): bit i is that of its row i."""


class Carried(NamedTuple):
    """An operand in FP8. Its value is elements * 2**(unit - 127), row by row, unless elements were lost.

    It is grouped * 2**(group_scales - 127) * 2**(unit - 127), with a scale for each `group_of` blocks, also
    in rows that lost elements, unless they are far.

    Attributes:
      elements: FP8, K-major; 0 in place of lost elements.
      unit: the scale byte in each row that becomes a factor of 1, within UNIT_BYTES.
      lost: the rows with a nonzero element that FP8 cannot represent beside the others.
      grouped: FP8, the elements relative to their group's largest scale; 0 in place of those that do not fit.
        From the kernel only in rows that lost elements, and not for all operands, as the next two.
      group_scales: the scale byte of each group.
      far: those rows of `lost` with a nonzero element that FP8 cannot represent beside those of its group.
      lost_sum: a bound of what a row's lost elements add up to in magnitude, relative to its unit: the sum
        over lost blocks of 192, which is 32 elements of 6, times the block's scale, at least 2**-126. From
        the kernel it is there with `grouped`.
    """

    elements: Float[Array, "*batch n k"]
    unit: UInt8[Array, "*batch n"]
    lost: Flags
    grouped: Float[Array, "*batch n k"] | None = None
    group_scales: UInt8[Array, "*batch n groups"] | None = None
    far: Flags | None = None
    lost_sum: Float32[Array, "*batch n"] | None = None

    @property
    def fits(self) -> Bool[Array, ""]:
        """Whether no element was lost. If False, these elements alone give another product."""
        return ~jnp.any(self.lost)


def group_of(blocks: int) -> int:
    """Returns how many of a row's blocks share a scale in `Carried.grouped`: two, or one if they are odd."""
    return 2 - blocks % 2


def carry(q: KernelOperand, carrier: Carrier) -> Carried:
    """Returns a packed operand in FP8, without its factor; NaN where q is NaN."""
    byte = q.packed[1].astype(jnp.int32)
    high, blocks = SHIFTS[carrier][1], byte.shape[-1]
    group = group_of(blocks)
    known = jnp.where(byte == 255, 0, byte)
    unit = jnp.clip(jnp.max(known, axis=-1, initial=0) - high, *UNIT_BYTES)
    elements, lost = _carry_blocks(q, byte, unit[..., None], carrier)
    largest = jnp.max(known.reshape(*unit.shape, blocks // group, group), axis=-1)
    group_unit = jnp.maximum(largest - high, unit[..., None] + LEAST_FACTOR)
    grouped, missed = _carry_blocks(q, byte, jnp.repeat(group_unit, group, axis=-1), carrier)
    lost_rows = jnp.any(lost, axis=-1)
    lost_scales = power_of_two(jnp.clip(byte - unit[..., None], -126, 127))
    return Carried(
        elements,
        unit.astype(jnp.uint8),
        lost_rows.astype(jnp.uint8),
        grouped,
        (group_unit - unit[..., None] + 127).astype(jnp.uint8),
        (lost_rows & jnp.any(missed, axis=-1)).astype(jnp.uint8),
        jnp.sum(jnp.where(lost, BLOCK * E2M1.max * lost_scales, 0), axis=-1),
    )


def _carry_blocks(q: KernelOperand, byte, unit, carrier: Carrier):
    """Returns the elements in FP8, relative to the units of blocks, and the blocks that FP8 does not hold."""
    packed = q.packed[0]
    is_nan = byte == 255
    counts = jnp.any((packed.reshape(*byte.shape, BLOCK // 2) & 0x77) != 0, axis=-1) & ~is_nan
    shift = jnp.clip(byte - unit, *SHIFTS[carrier])
    missed = counts & (shift != byte - unit)
    values = code_values(unpack_codes(packed)) * spread_blocks(power_of_two(shift))
    held = jnp.where(spread_blocks(is_nan), jnp.nan, jnp.where(spread_blocks(missed), 0, values))
    return held.astype(CARRIER_DTYPES[carrier]), missed
