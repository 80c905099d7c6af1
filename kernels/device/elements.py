"""E2M1 elements inside kernels: scales, rounding and encoding, as `mxjax.numerics` defines them.

A group is a run of consecutive elements along the blocked axis, with a separate tensor for each position.
Eight elements are encoded into a 32-bit word, the first in the lowest bits.
"""

import triton
import triton.language as tl

from mxjax.kernels.device.elements_ptx import encode_floats
from mxjax.kernels.device.stochastic_ptx import encode_stochastic

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
ONE = tl.constexpr(0x3F800000)
BASE = tl.constexpr(2.0**22 + 3)  # of `round_element`, for the binade of 1

# Rounds to nearest only: v_cvt_scalef32_sr_pk_fp4_f32 uses one random word for two elements, while the
# definition gives each element 16 bits of its own.
#
# Each instruction divides two float32 by the scale in $9 and writes them as the nibbles of one byte of $0. It
# keeps the other bytes, so it also reads the register; s_nop covers the wait state that this requires.
_GFX950_ENCODE = tl.constexpr("""
v_cvt_scalef32_pk_fp4_f32 $0, $1, $2, $9
s_nop 0
v_cvt_scalef32_pk_fp4_f32 $0, $3, $4, $9 op_sel:[0,0,1,0]
s_nop 0
v_cvt_scalef32_pk_fp4_f32 $0, $5, $6, $9 op_sel:[0,0,0,1]
s_nop 0
v_cvt_scalef32_pk_fp4_f32 $0, $7, $8, $9 op_sel:[0,0,1,1]
s_nop 0
""")
_SM100_ENCODE = tl.constexpr("""{
.reg .b8 a, b, c, d;
cvt.rn.satfinite.e2m1x2.f32 a, $2, $1;
cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;
cvt.rn.satfinite.e2m1x2.f32 c, $6, $5;
cvt.rn.satfinite.e2m1x2.f32 d, $8, $7;
mov.b32 $0, {a, b, c, d};
}""")
_SM89_E4M3 = tl.constexpr("""{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")
_SM89_E5M2 = tl.constexpr(_SM89_E4M3.value.replace("e4m3", "e5m2"))


@triton.jit
def widen(x):
    """Returns x in float32, bfloat16 by shifting its bits: Triton's interpreter loses bfloat16 subnormals."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def largest(xs, GROUP: tl.constexpr):
    """Returns the bits of the largest magnitude among GROUP float32 tensors; NaN is the largest of all."""
    m = tl.abs(xs[0])
    for i in tl.static_range(1, GROUP):
        m = tl.maximum(m, tl.abs(xs[i]), propagate_nan=tl.PropagateNan.ALL)
    return m.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def block_scale(amax, CARRY: tl.constexpr):
    """Returns E8M0 bytes (int32) from the bits of largest magnitudes; CARRY is the rule's `rule_carry`."""
    byte = tl.minimum(tl.maximum(((amax + CARRY) >> 23) - 2, 0), 254)
    return tl.where(amax >= INFINITY, 255, byte)


@triton.jit
def inverse_scale(byte):
    """Returns 2**(127 - byte), the factor of the elements, in float32; 0 for bytes past 253."""
    return (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """Returns 2**(byte - 127) in float32, NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, MAGNITUDE, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_element(x, random, STOCHASTIC: tl.constexpr, CLIPS: tl.constexpr = True):
    """Rounds abs(x) to E2M1. Returns abs(x) + base, which `code` reads, and the rounded magnitude.

    `base` is 2**22 times the magnitude's binade plus 6 units in the last place. The unit is the distance
    between E2M1's neighbours, so that the addition rounds. The 6 units make `code` correct and keep parity.
    The product that is base is exact, so that it may be fused with the addition.

    Args:
      CLIPS: whether abs(x) may round to 8: 7 or more, at random any above 6.
    """
    a = tl.minimum(tl.abs(x), 6.0) if CLIPS else tl.abs(x)
    bits = tl.maximum(a.to(tl.int32, bitcast=True) & INFINITY, ONE)
    binade = bits.to(tl.float32, bitcast=True)
    if STOCHASTIC:
        steps = a * ((0x7F000000 - bits + 0x00800000).to(tl.float32, bitcast=True))
        # Away from zero where the distance to the neighbour nearer zero is above (random + 1/2) / 2**16.
        steps = tl.ceil(tl.fma(random.to(tl.float32), -(2.0**-16), steps - 2.0**-17))
        a = steps * (binade * 0.5)
    rounded = tl.fma(binade, BASE, a)
    return rounded, tl.fma(binade, -BASE, rounded)


@triton.jit
def code(rounded):
    """Returns the 3 bits of a magnitude's code from the sum of `round_element`: steps + 2 * binade."""
    bits = rounded.to(tl.int32, bitcast=True)
    return (bits + (bits >> 22)) & 7


@triton.jit
def encode_fp4(xs, random, byte, prescale: tl.constexpr, STOCHASTIC: tl.constexpr, CONVERT: tl.constexpr):
    """Returns 8 elements as the nibbles of one int32 word; 0 in blocks whose scale is NaN."""
    inverse = inverse_scale(byte)
    if STOCHASTIC or CONVERT == "software" or CONVERT == "sm_89":
        word = tl.zeros_like(byte)
        for i in tl.static_range(8):
            scaled = _scaled(xs[i], inverse, prescale)
            rounded, _ = round_element(scaled, random[i], STOCHASTIC)
            sign = (xs[i].to(tl.int32, bitcast=True) >> 28) & 8
            word |= (code(rounded) | sign) << (4 * i)
    elif CONVERT == "gfx950":
        if prescale == 1:
            # The instruction reads only the exponent; byte 0 is the subnormal 2**-127.
            scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
        else:
            xs = _all_scaled(xs, inverse, prescale)
            scale = tl.full(byte.shape, 1.0, tl.float32)
        word = tl.inline_asm_elementwise(
            _GFX950_ENCODE,
            "=&v,v,v,v,v,v,v,v,v,v",
            [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7], scale],
            tl.int32,
            True,
            1,
        )
    elif CONVERT == "sm_100":
        ys = _all_scaled(xs, inverse, prescale)
        word = tl.inline_asm_elementwise(
            _SM100_ENCODE,
            "=r,r,r,r,r,r,r,r,r",
            [ys[0], ys[1], ys[2], ys[3], ys[4], ys[5], ys[6], ys[7]],
            tl.int32,
            True,
            1,
        )
    elif prescale == 1:
        word = encode_floats(xs, byte, inverse)
    else:
        one = tl.full(byte.shape, 127, tl.int32)
        word = encode_floats(_all_scaled(xs, inverse, prescale), one, inverse_scale(one))
    return tl.where(byte == 255, 0, word)


@triton.jit
def encode_drawn(xs, byte, prescale: tl.constexpr, BOUNDED: tl.constexpr, counter, row, key0, key1):
    """Returns 8 elements as the nibbles of one int32 word; draws its random bits itself, from sm_90 on.

    Args:
      BOUNDED: whether elements are below 8 scales, as of any rule but `quest`.
    """
    if prescale * 4 == int(prescale * 4):  # the product with a power of two is exact, also a subnormal one
        factor = inverse_scale(byte) * prescale
    else:
        factor = tl.full(byte.shape, 1.0, tl.float32)
        xs = _all_scaled(xs, inverse_scale(byte), prescale)
    CLIPS: tl.constexpr = not BOUNDED or prescale > 0.75
    return tl.where(byte == 255, 0, encode_stochastic(xs, factor, counter, row, key0, key1, CLIPS))


@triton.jit
def element_values(xs, random, byte, scale, prescale: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Returns the 8 elements times `scale`, in float32."""
    inverse = inverse_scale(byte)
    values = ()
    for i in tl.static_range(8):
        _, magnitude = round_element(_scaled(xs[i], inverse, prescale), random[i], STOCHASTIC)
        bits = magnitude.to(tl.int32, bitcast=True) | (xs[i].to(tl.int32, bitcast=True) & ~MAGNITUDE)
        values = values + (bits.to(tl.float32, bitcast=True) * scale,)
    return values


@triton.jit
def encode_bf16(values):
    """Returns 4 words of two bfloat16 each, for values that bfloat16 represents exactly."""
    words = ()
    for i in tl.static_range(0, 8, 2):
        low = (values[i].to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        words = words + (low | (values[i + 1].to(tl.int32, bitcast=True) & ~0xFFFF),)
    return words


@triton.jit
def encode_fp8(values, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Returns 2 words of four E4M3 or E5M2 each; NaN is 0x7F.

    They are rounded to nearest and saturate if NATIVE; else the format must represent the values exactly.
    """
    words = ()
    for i in tl.static_range(0, 8, 4):
        if NATIVE:
            four = [values[i], values[i + 1], values[i + 2], values[i + 3]]
            word = tl.inline_asm_elementwise(
                _SM89_E5M2 if E5M2 else _SM89_E4M3, "=r,r,r,r,r", four, tl.int32, True, 1
            )
        else:
            word = tl.zeros_like(values[i].to(tl.int32))
            for k in tl.static_range(4):
                value = values[i + k]
                byte = value.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
                word |= tl.where(value != value, 0x7F, byte.to(tl.int32)) << (8 * k)
        words = words + (word,)
    return words


@triton.jit
def _scaled(x, inverse, prescale: tl.constexpr):
    y = x * inverse
    if prescale != 1:
        y = y * prescale
    return y


@triton.jit
def _all_scaled(xs, inverse, prescale: tl.constexpr):
    ys = ()
    for i in tl.static_range(8):
        ys = ys + (_scaled(xs[i], inverse, prescale),)
    return ys
