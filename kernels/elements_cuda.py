"""E2M1 elements on NVIDIA GPUs without FP4 conversion, two elements to an instruction.

A group's 8 elements are rounded as float32 or bfloat16 and their codes cut out of 16-bit halves: an element
times a small power of two has its code in the bits of a subnormal. Minima, shifts and logic have half the
throughput of sums and products there, and are what limits the kernel, so that they work on pairs.
"""

import triton
import triton.language as tl

# A sum with `base` has the distance between E2M1's neighbours as its last bit, for every binade of x: base is
# 1.5 times a power of two, so that x may be negative, and its exponent is x's, but at least the scale's, plus
# a constant less the scale's. It is computed for two elements at once, in the format of bfloat16.
_BASE = """
and.b32 base, {pair}, 0x7F807F80;
max.bf16x2 base, base, scale;
add.u32 base, base, shift;
"""
# Joins sign and code as a nibble at the top of each half of `pair`, and these nibbles with those before.
_NIBBLE = """
shl.b32 t, t, {shift};
lop3.b32 {pair}, t, {pair}, 0x80008000, 0xF8;
"""
_JOIN = """
shr.u32 {into}, {first}, 4;
add.u32 {into}, {into}, {second};
shr.u32 {into}, {into}, 4;
add.u32 {into}, {into}, {third};
shr.u32 {into}, {into}, 4;
add.u32 {into}, {into}, {fourth};
"""


def _join(into: str, parts: list[str]) -> str:
    return _JOIN.format(into=into, first=parts[0], second=parts[1], third=parts[2], fourth=parts[3])


def _encode_pairs() -> str:
    """Two groups: $2 … $9 hold an element of each, $10 and $11 their scale bytes, $0 and $1 the results."""
    text = """{
.reg .b32 scale, inverse, shift, base, t, one, small, zero, most, low, high, p0, p1, p2, p3, p4, p5, p6, p7;
mov.b32 one, 0xBF80BF80;
mov.b32 small, 0x00800080;
mov.b32 zero, 0x80008000;
mov.b32 most, 0x01C001C0;
prmt.b32 scale, $10, $11, 0x5410;
shl.b32 scale, scale, 7;
sub.u32 inverse, 0x7F007F00, scale;
sub.u32 shift, 0x42C042C0, scale;
"""
    for i in range(8):
        pair = f"p{i}"
        text += f"mov.b32 {pair}, ${i + 2};" + _BASE.format(pair=pair)
        text += f"""
fma.rn.bf16x2 t, {pair}, inverse, base;
fma.rn.bf16x2 t, base, one, t;
fma.rn.bf16x2 t, t, small, zero;
abs.bf16x2 t, t;
min.bf16x2 t, t, most;"""
        text += _NIBBLE.format(pair=pair, shift=6)
    text += _join("low", ["p0", "p1", "p2", "p3"]) + _join("high", ["p4", "p5", "p6", "p7"])
    return text + "prmt.b32 $0, low, high, 0x5410;\nprmt.b32 $1, low, high, 0x7632;\n}"


def _encode_floats() -> str:
    """One group: $1 … $8 are its elements, $9 is the scale byte and $10 the inverse scale times 2**-14."""
    text = """{
.reg .b32 scale, shift, base, t, most, p0, p1, p2, p3;
.reg .f32 base0, base1, x0, x1;
mov.b32 most, 0x0E000E00;
prmt.b32 scale, $9, $9, 0x5410;
shl.b32 scale, scale, 7;
sub.u32 shift, 0x43C043C0, scale;
"""
    for i in range(4):
        pair, first, second = f"p{i}", f"${i + 1}", f"${i + 5}"
        text += f"prmt.b32 {pair}, {first}, {second}, 0x7632;" + _BASE.format(pair=pair)
        # As a float32 `base` ends in the bits of the other one's, an even number of last places.
        text += f"""
mov.b32 base1, base;
shl.b32 base, base, 16;
mov.b32 base0, base;
mov.b32 x0, {first};
mov.b32 x1, {second};
fma.rn.f32 x0, x0, $10, base0;
fma.rn.f32 x1, x1, $10, base1;
sub.rn.f32 x0, x0, base0;
sub.rn.f32 x1, x1, base1;
cvt.rn.f16x2.f32 t, x1, x0;
abs.f16x2 t, t;
min.f16x2 t, t, most;"""
        text += _NIBBLE.format(pair=pair, shift=3)
    return text + _join("$0", ["p0", "p1", "p2", "p3"]) + "}"


def _largest_pairs() -> str:
    text = "{\n.reg .b32 m, a;\nabs.bf16x2 m, $2;\n"
    for i in range(1, 8):
        text += f"abs.bf16x2 a, ${i + 2};\nmax.NaN.bf16x2 m, m, a;\n"
    return text + "shl.b32 $0, m, 16;\nand.b32 $1, m, 0xFFFF0000;\n}"


_ENCODE_PAIRS = tl.constexpr(_encode_pairs())
_ENCODE_FLOATS = tl.constexpr(_encode_floats())
_LARGEST_PAIRS = tl.constexpr(_largest_pairs())


@triton.jit
def encode_pairs(xs, byte):
    """Returns the 8 bfloat16 elements as the nibbles of one int32 word, rounded to nearest."""
    eight = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]]
    return tl.inline_asm_elementwise(
        _ENCODE_PAIRS, "=&r,=&r,r,r,r,r,r,r,r,r,r,r", eight + [byte], tl.int32, True, 2
    )


@triton.jit
def encode_floats(xs, byte, inverse):
    """Returns the 8 float32 elements as the nibbles of one int32 word, rounded to nearest.

    byte: of the scale that the elements have before their factor; inverse: what to multiply them by.
    """
    eight = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]]
    return tl.inline_asm_elementwise(
        _ENCODE_FLOATS,
        "=&r,r,r,r,r,r,r,r,r,r,r",
        eight + [byte, inverse * 0.00006103515625],
        tl.int32,
        True,
        1,
    )


@triton.jit
def largest_pairs(xs):
    """Returns the bits in float32 of the largest magnitude among 8 bfloat16 tensors; NaN is the largest."""
    eight = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]]
    return tl.inline_asm_elementwise(_LARGEST_PAIRS, "=&r,=&r,r,r,r,r,r,r,r,r", eight, tl.int32, True, 2)
