"""Block scales: the rules that choose a power of two for each block, and exact scaling by it.

Scales stay integers (E8M0 bytes) and are applied by exponent arithmetic, because XLA flushes float32
subnormals such as 2**-127 to zero on the CPU. Kernels must reproduce `block_scale` bit for bit.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt8

from mxjax.numerics.formats import E2M1, Element

ScaleRule = Literal["floor", "even", "uos", "rceil", "ceil", "quest"]

QUEST_CLIP = 2.92247856
"""The magnitude, in standard deviations, at which E2M1 clips a normal distribution with the least error."""

BIAS = 127  # exponent bias of E8M0 and float32
NAN_SCALE = 255
_INFINITY = 0x7F80_0000
_MAGNITUDE = 0x7FFF_FFFF
_ONE = 1 << 23  # 1.0 in units of float32's last mantissa bit


def block_scale(
    amax: Float32[Array, "*blocks"], rule: ScaleRule = "floor", element: Element = E2M1
) -> UInt8[Array, "*blocks"]:
    """Returns the E8M0 byte of the scale that a block with largest magnitude `amax` shares.

    The byte is `clamp(exponent(amax) - element.emax + [mantissa(amax) past t] + 127, 0, 254)`, read from
    the float32's bits. The mantissa is in [1, 2), and for E2M1 the thresholds are

    | rule | past t | meaning |
    | --- | --- | --- |
    | floor | never | the OCP specification; the largest elements may clip |
    | even | >= 1.75 | amax rounded to the element's mantissa first |
    | uos | >= 1.625 | E2M1 only |
    | rceil | > 1.5 | the smallest scale at which nothing clips |
    | ceil | > 1 | the smallest power of two not below amax / 2**emax |

    For other elements, `even` carries at 2 - 2**-(mantissa_bits + 1) and `rceil` past max / 2**emax. The rule
    `quest` reads another statistic: see `quest_scale`.

    Returns:
      0 for an all-zero block; 255 (NaN) where amax is NaN or infinite.
    Raises:
      ValueError: unknown rule, `quest`, or `uos` with another element than E2M1.
    Source: OCP MX v1.0, section 6.3 (floor); torchao's ScaleCalculationMode (rceil, ceil, even).
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32) & _MAGNITUDE
    exponent = (bits + rule_carry(rule, element)) >> 23
    byte = jnp.clip(exponent - element.emax, 0, NAN_SCALE - 1)
    return jnp.where(bits >= _INFINITY, NAN_SCALE, byte).astype(jnp.uint8)


def quest_scale(std: Float32[Array, "*blocks"]) -> UInt8[Array, "*blocks"]:
    """Returns the E8M0 byte of the scale of E2M1 blocks with this standard deviation, for the rule `quest`.

    The scale is `2**floor(log2(QUEST_CLIP / 6 * std + 1e-8))`. It clips elements past 1.46 to 2.92 standard
    deviations. It is at least 2**-27, so magnitudes up to 2**-29 become zero.

    Returns:
      100, which is 2**-27, for an all-zero block; 255 (NaN) where std is NaN or infinite.
    Source: arXiv 2505.14669, algorithm 1; `QuestMXFP4Quantizer` of IST-DASLab/Quartet.
    """
    scale = lax.optimization_barrier(jnp.float32(QUEST_CLIP / E2M1.max) * std)  # rounded before the sum
    scale += jnp.float32(1e-8)
    bits = lax.bitcast_convert_type(scale, jnp.int32) & _MAGNITUDE
    return jnp.where(bits >= _INFINITY, NAN_SCALE, bits >> 23).astype(jnp.uint8)


def check_rule(rule: str, element: Element | None) -> None:
    """Raises ValueError if the rule is unknown or undefined for E8M0 scales of such elements."""
    if rule not in get_args(ScaleRule):
        raise ValueError(f"unknown scale_rule {rule!r}; the rules are {', '.join(get_args(ScaleRule))}")
    if rule in ("uos", "quest") and element is not None and element is not E2M1:
        raise ValueError(f"scale_rule {rule!r} is defined for E2M1 elements, not {element.name}; use 'even'")


def rule_carry(rule: ScaleRule, element: Element) -> int:
    """Returns the addend to amax's bits that makes a mantissa past the rule's threshold carry."""
    check_rule(rule, element)
    match rule:
        case "floor":
            return 0
        case "even":
            return _ONE >> (element.mantissa_bits + 1)
        case "uos":
            return int((2 - 1.625) * _ONE)
        case "rceil":
            return int((2 - element.max / 2.0**element.emax) * _ONE) - 1
        case "ceil":
            return _ONE - 1
        case "quest":
            raise ValueError("scale_rule 'quest' has no threshold: it reads a block's standard deviation")


def divide_by_scale(x: Float32[Array, "*shape"], scale: Int32[Array, "*#shape"]) -> Float32[Array, "*shape"]:
    """Returns x / 2**(scale - 127) for the scales that `block_scale` gives; 0 where scale is 255.

    Exact down to quotients of 2**-104, for subnormal x too. Smaller quotients round to zero in every element
    format, and may become zero here.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    subnormal = (bits & _INFINITY) == 0
    # A subnormal is an integer times 2**-149, and integers convert to normal floats.
    digits = (bits & _MAGNITUDE).astype(jnp.float32)
    digits = jnp.copysign(digits, x)
    exponent = jnp.where(subnormal, 2 * BIAS - 149, 2 * BIAS) - scale
    factor = lax.bitcast_convert_type(jnp.maximum(exponent, jnp.where(subnormal, 0, 1)) << 23, jnp.float32)
    quotient = jnp.where(subnormal, digits, x) * factor
    # E1M2's largest scale is 2**127, whose inverse is subnormal.
    quotient = jnp.where((exponent == 0) & ~subnormal, quotient * 0.5, quotient)
    return jnp.where(scale == NAN_SCALE, 0.0, quotient)


def multiply_by_scale(
    x: Float32[Array, "*shape"], scale: Int32[Array, "*#shape"], *, rounds: bool = False
) -> Float32[Array, "*shape"]:
    """Returns x * 2**(scale - 127) for x zero or normal; exact even where the product is subnormal.

    Args:
      rounds: whether a subnormal product with more digits is rounded to nearest even; else they are dropped.

    Special values: NaN where scale is 255; infinity where the product is 2**128 or more. Quantization reaches
      that only where a rule other than `floor` rounded a block's largest magnitude up past float32's range.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & _MAGNITUDE
    exponent = (magnitude >> 23) + scale - BIAS
    normal = jnp.where(exponent >= 255, _INFINITY, magnitude + ((scale - BIAS) << 23))
    digits, dropped = (magnitude & (_ONE - 1)) | _ONE, jnp.clip(1 - exponent, 0, 31)
    if rounds:
        dropped = jnp.minimum(dropped, 25)  # more leave nothing either
        digits += (1 << dropped >> 1) - 1 + (digits >> dropped & 1)
    subnormal = digits >> dropped
    product = jnp.where(exponent > 0, normal, subnormal)
    product = jnp.where(magnitude == 0, 0, product)
    product = jnp.where(scale == NAN_SCALE, _MAGNITUDE, product)
    return lax.bitcast_convert_type(product | (bits & ~_MAGNITUDE), jnp.float32)


def power_of_two(exponent: Int32[Array, "*b"]) -> Float32[Array, "*b"]:
    """Returns 2**exponent for exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + BIAS) << 23, jnp.float32)
