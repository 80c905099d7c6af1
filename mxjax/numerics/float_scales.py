"""Scales that are floats: float32 of a tensor or a long block, E4M3 of an NVFP4 block, UE5M3 of `fp4_ue5m3`.

A block's largest magnitude is scaled to `Operand.scale_target`, and the tensor scale makes the scale of the
tensor's largest block `Operand.scale_max`. Two options refine the scales of single blocks: `four_over_six`
chooses between two by their errors, and `eden` corrects them so that gradients are unbiased.

Sources: NVFP4: arXiv 2509.25149, section 2, in torchao's order of float32 operations; four over six: arXiv
2512.02010, section 3; MS-EDEN: arXiv 2601.22813, section 3.3; UE5M3: arXiv 2609.02846, sections 4 and 5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from mxjax.numerics.blocks import block_max, block_sum, magnitude_bits, spread
from mxjax.numerics.formats import UE5M3, Element, Format
from mxjax.numerics.operand import FourOverSix, Operand
from mxjax.numerics.philox import KeyWords, random_uint16
from mxjax.numerics.rounding import round_elements, round_nearest, stochastic_round

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


Blocks = tuple[int, int]
"""A block's size along the other of the last two axes, and along the blocked axis."""


class Rounded(NamedTuple):
    """A tensor by one choice of scales: the scales, x divided by them, and that rounded to elements."""

    scales: Float32[Array, "*blocks"]
    scaled: Float32[Array, "*shape"]
    elements: Float32[Array, "*shape"]


def quantize_by_minifloats(
    x: Float32[Array, "*shape"],
    f: Format,
    operand: Operand,
    blocks: Blocks,
    axis: int,
    key: jax.Array | KeyWords | None,
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*blocks"], Float32[Array, "*outer"] | None]:
    """Returns the elements of x, the scales of its blocks, and those of outer blocks or the tensor."""
    element, scale_element = f.element, f.scale_element
    assert element is not None
    assert scale_element is not None
    largest = operand.scale_max or (scale_element.max if f.tensor_scale else None)
    target = operand.scale_target or element.max
    block_amax = block_max(x, blocks, axis)
    exact = divide(block_amax, target)
    tensor_scale = unit = None
    if largest is not None:
        run = f.outer_block // blocks[1] if f.outer_block else None
        amax = outer_max(block_amax, run, axis) if run else tensor_max(block_amax)
        tensor_scale = divide(amax, target * largest)
        # The float32 scale that each block has; a scalar if all have the same.
        unit = spread(tensor_scale, exact.shape, (1, run), axis) if run else tensor_scale
        exact = divide(exact, unit)

    def rounded(exact: Float32[Array, "*blocks"], use: int) -> Rounded:
        scales = _round_scales(exact, scale_element)
        scaled = x * spread(_inverse(scales, unit), x.shape, blocks, axis)
        return Rounded(
            scales,
            scaled,
            round_elements(scaled, element, operand.rounding, operand.prescale, key, axis, use),
        )

    best = rounded(exact, 0)
    if operand.four_over_six is not None:
        # To scale the largest magnitude to 4 instead of 6, scales are half as large again.
        other = rounded(exact * 1.5, 2)
        relative = x * spread(_inverse(jnp.ones_like(exact), unit), x.shape, blocks, axis)
        relative = lax.optimization_barrier(relative)  # rounded, not contracted with a subtraction
        best = closer(relative, best, other, operand.four_over_six, blocks, axis)
    if operand.eden is not None:
        assert key is not None
        scales = eden_scales(best, operand.eden, blocks, axis)
        random = random_uint16(key, scales.shape, axis, use=1)
        best = best._replace(scales=stochastic_round(scales, scale_element, random))
    return best.elements, best.scales, tensor_scale


def closer(
    x: Float32[Array, "*shape"],
    first: Rounded,
    second: Rounded,
    error: FourOverSix,
    blocks: Blocks,
    axis: int,
) -> Rounded:
    """Returns, for each block, whichever of two roundings has the lower error; the first if they are equal.

    Args:
      x: the tensor in units of its tensor scale.
      error: "mse", the sum of squared differences from x over the block, or "mae", of their magnitudes.
    Source: arXiv 2512.02010, section 3; "mae" and ties as in TransformerEngine's reference_nvfp4.py.
    """
    errors = [block_errors(x, r, error, blocks, axis) for r in (first, second)]
    choice: Bool[Array, "*blocks"] = errors[1] < errors[0]
    wide = spread(choice, x.shape, blocks, axis)
    return Rounded(
        jnp.where(choice, second.scales, first.scales),
        jnp.where(wide, second.scaled, first.scaled),
        jnp.where(wide, second.elements, first.elements),
    )


def block_errors(
    x: Float32[Array, "*shape"], rounded: Rounded, error: FourOverSix, blocks: Blocks, axis: int
) -> Float32[Array, "*blocks"]:
    """Returns the sum of squared differences from x of each block, or of their magnitudes; see `closer`."""
    # An element times its scale has six bits and is exact: its subtraction may be contracted with it.
    difference = rounded.elements * spread(rounded.scales, x.shape, blocks, axis) - x
    measure = jnp.abs(difference) if error == "mae" else difference * difference
    # With what is summed in the same loop, XLA would contract the squares, and sum in another order.
    return block_sum(lax.optimization_barrier(measure), blocks, axis)


def eden_scales(rounded: Rounded, run: int, blocks: Blocks, axis: int) -> Float32[Array, "*blocks"]:
    """Returns the scales times <s, s> / <s, q>, with s the scaled values and q the elements of a run.

    With them the projection of the quantized run on the run is exact, so that after a random rotation the
    expected result is the run (EDEN, arXiv 2108.08842). They are not yet rounded.

    Args:
      run: number of elements along the axis that share a correction: a multiple of the block.
    Special values: the scale stays where all elements of the run are zero.
    Source: arXiv 2601.22813, algorithm 1, whose runs are single blocks. In its code they have the rotation's
      length, with s in units of each block's scale.
    """
    scaled, elements = rounded.scaled, rounded.elements
    of_blocks = (block_sum(lax.optimization_barrier(scaled * t), blocks, axis) for t in (scaled, elements))
    squares, products = (block_sum(t, (1, run // blocks[1]), axis) for t in of_blocks)
    correction = jnp.where(products == 0, 1.0, squares / jnp.where(products == 0, 1.0, products))
    return rounded.scales * spread(correction, rounded.scales.shape, (1, run // blocks[1]), axis)


def _round_scales(exact: Float32[Array, "*blocks"], scale_element: Element) -> Float32[Array, "*blocks"]:
    """Returns block scales rounded to nearest: NaN where `exact` is not finite, and in UE5M3 never zero.

    A UE5M3 scale that would be zero is 1, so that stochastic rounding still keeps the mean (arXiv 2609.02846,
    section 5.4). An E4M3 scale of zero makes the block zero.
    """
    scales = jnp.where(jnp.isfinite(exact), round_nearest(exact, scale_element), jnp.nan)
    return jnp.where(scales == 0, 1.0, scales) if scale_element is UE5M3 else scales


def _inverse(
    scales: Float32[Array, "*blocks"], unit: Float32[Array, "*#blocks"] | None
) -> Float32[Array, "*blocks"]:
    """Returns the inverse of each block's scale and unit; 0 where the scale is zero."""
    inverse = jnp.ones_like(scales) if unit is None else divide(jnp.ones_like(unit), unit)
    return jnp.where(scales == 0, 0.0, divide(jnp.broadcast_to(inverse, scales.shape), scales))
