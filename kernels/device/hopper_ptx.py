"""Two elements in a word on Hopper: E2M1 codes of pairs of bfloat16, and of float32 after a rotation.

Scales also come in pairs, of two columns or two rows. Each half of a word is 128 times a scale byte, which
puts the byte where bfloat16 has its exponent. The rule `floor` reads exponents only; another adds its carry
(`mxjax.numerics.scales.rule_carry`) to a magnitude's bits before, of which bfloat16 has the upper 16.
"""

import triton
import triton.language as tl

from mxjax.kernels.device.elements_ptx import (
    PAIR_CODE,
    encode_floats_text,
    encode_pairs_text,
    largest_floats_text,
    pair_start,
)

SPREAD = ("0x1010", "0x3232")  # selectors of prmt: the low or the high half of a word in both halves


@triton.constexpr_function
def _largest(words: int, exponent_only: bool) -> str:
    mask, larger = ("0x7F807F80", "max.bf16x2") if exponent_only else ("0x7FFF7FFF", "max.u16x2")
    text = f"{{\n.reg .b32 t;\nand.b32 $0, $1, {mask};\n"
    for i in range(1, words):
        text += f"and.b32 t, ${i + 1}, {mask};\n{larger} $0, $0, t;\n"
    return text + "}"


@triton.constexpr_function
def _largest_floats(elements: int, exponent_only: bool) -> str:
    return largest_floats_text(elements, exponent_only=exponent_only) + "mov.b32 $0, m;\n}"


@triton.constexpr_function
def _scales(folded: int, carry: int) -> str:
    most = 128 * (2 + folded)  # E2M1's largest exponent is 2
    if carry:
        # Infinity and NaN become 256 for a byte before E2M1's largest exponent, 2, is subtracted.
        return f"""{{
.reg .b32 t, carry, one, last, most;
mov.b32 carry, {carry >> 16 << 16 | carry >> 16};
mov.b32 one, 0x00800080;
mov.b32 last, 0x80008000;
mov.b32 most, {most << 16 | most};
add.s16x2 t, $1, one;
add.s16x2 carry, $1, carry;
lop3.b32 t, t, carry, last, 0xE4;
and.b32 t, t, 0xFF80FF80;
min.u16x2 t, t, last;
max.u16x2 t, t, most;
sub.u32 $0, t, most;
}}"""
    less = 0x10000 - most
    return f"""{{
.reg .b32 less, zero;
mov.b32 less, {less << 16 | less};
mov.b32 zero, 0;
add.s16x2 less, $1, less;
max.s16x2 $0, less, zero;
}}"""


# 2**-127 for a byte of 0 is subnormal; that of 254 stands for NaN.
_FACTORS = tl.constexpr("""{
.reg .b32 nan, two, least;
mov.b32 two, 0x01000100;
mov.b32 least, 0x00400040;
add.s16x2 nan, $1, two;
and.b32 nan, nan, 0x80008000;
max.u16x2 $0, $1, least;
shr.u32 nan, nan, 8;
or.b32 $0, $0, nan;
shr.u32 nan, nan, 1;
or.b32 $0, $0, nan;
}""")


def _decode_row(half: int) -> str:
    """Returns PTX that makes the nibbles in $4 four words of two bfloat16, by one of two factors in $5.

    At bits 6 to 8 a nibble's magnitude is a subnormal, 2**-126 times as large.
    """
    text = f"""{{
.reg .b32 odd, factor, unit, pair, sign;
prmt.b32 factor, $5, $5, {SPREAD[half]};
mov.b32 unit, 0x7E807E80;
shr.u32 odd, $4, 4;
"""
    for i in range(4):
        text += f"""prmt.b32 pair, $4, odd, 0x{i + 4}{i + 4}{i}{i};
shl.b32 sign, pair, 12;
shl.b32 pair, pair, 6;
and.b32 pair, pair, 0x01C001C0;
lop3.b32 pair, sign, pair, 0x80008000, 0xE4;
mul.rn.bf16x2 pair, pair, unit;
mul.rn.bf16x2 ${i}, pair, factor;
"""
    return text + "}"


def _encode_row(half: int) -> str:
    """Returns PTX for 8 elements of a row, in $1 to $4; $5 has the scales of two rows, $0 is the result."""
    spread = f"prmt.b32 t, $5, $5, {SPREAD[half]};\n"
    text = f"""{{
.reg .b32 inverse, shift, least, base, t, one, small, zero, most, low, high, p0, p1, p2, p3;
{pair_start(spread)}"""
    for i in range(4):
        text += f"mov.b32 p{i}, ${i + 1};" + PAIR_CODE.format(pair=f"p{i}")
    # Nibbles of even elements go to the low halves, those of odd elements to the high halves.
    return f"""{text}
shr.u32 low, p0, 8;
add.u32 low, low, p1;
shr.u32 high, p2, 8;
add.u32 high, high, p3;
prmt.b32 t, low, high, 0x5410;
prmt.b32 base, low, high, 0x7632;
shr.u32 t, t, 4;
add.u32 $0, t, base;
}}"""


def _encode_floats(half: int) -> str:
    return encode_floats_text(f"prmt.b32 t, $9, $9, {SPREAD[half]};\n")


_LARGER_HALVES = tl.constexpr("""{
.reg .b32 low, high;
prmt.b32 low, $1, $2, 0x5410;
prmt.b32 high, $1, $2, 0x7632;
max.bf16x2 $0, low, high;
}""")
_LARGER_HALVES_BITS = tl.constexpr(_LARGER_HALVES.value.replace("bf16x2", "u16x2"))
_ENCODE_COLUMNS = tl.constexpr(encode_pairs_text("mov.b32 t, $10;\n"))
_ENCODE_FIRST_ROW, _ENCODE_SECOND_ROW = tl.constexpr(_encode_row(0)), tl.constexpr(_encode_row(1))
_DECODE_FIRST_ROW, _DECODE_SECOND_ROW = tl.constexpr(_decode_row(0)), tl.constexpr(_decode_row(1))
_ENCODE_LOW, _ENCODE_HIGH = tl.constexpr(_encode_floats(0)), tl.constexpr(_encode_floats(1))


@triton.jit
def largest_pair(ws, WORDS: tl.constexpr, CARRY: tl.constexpr):
    """Returns the magnitudes of the largest low half and of the largest high half.

    If CARRY is 0, the powers of two in their binades.
    """
    TEXT: tl.constexpr = _largest(WORDS, CARRY == 0)
    CONSTRAINTS: tl.constexpr = "=&r" + ",r" * WORDS
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, ws, tl.int32, True, 1)


@triton.jit
def largest_floats(xs, ELEMENTS: tl.constexpr, CARRY: tl.constexpr):
    """Returns two halves, one of which is the upper half of the largest magnitude of float32 tensors.

    If CARRY is 0 it is the power of two in its binade.
    """
    TEXT: tl.constexpr = _largest_floats(ELEMENTS, CARRY == 0)
    CONSTRAINTS: tl.constexpr = "=&r" + ",r" * ELEMENTS
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, xs, tl.int32, True, 1)


@triton.jit
def larger(a, b):
    """Returns the larger low half and the larger high half of two words."""
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def larger_bits(a, b):
    """Returns the larger low half and the larger high half of two words, as unsigned integers."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def larger_halves(a, b, CARRY: tl.constexpr):
    """Returns the larger half of a and the larger half of b, which `largest_pair` made."""
    TEXT: tl.constexpr = _LARGER_HALVES_BITS if CARRY else _LARGER_HALVES
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def pair_scales(largest, FOLDED: tl.constexpr, CARRY: tl.constexpr):
    """Returns the scales for the largest magnitudes in both halves, which are 2**FOLDED times too large.

    Where a magnitude is infinite or NaN the scale is 128 * (253 - FOLDED), which no other scale is; with a
    CARRY 128 * (254 - FOLDED).
    """
    TEXT: tl.constexpr = _scales(FOLDED, CARRY)
    return tl.inline_asm_elementwise(TEXT, "=r,r", [largest], tl.int32, True, 1)


@triton.jit
def encode_columns(ws, i: tl.constexpr, scales):
    """Returns two words of 8 nibbles: the low halves of ws[i] to ws[i + 7], and the high halves."""
    inputs = [ws[i], ws[i + 1], ws[i + 2], ws[i + 3], ws[i + 4], ws[i + 5], ws[i + 6], ws[i + 7], scales]
    return tl.inline_asm_elementwise(
        _ENCODE_COLUMNS, "=&r,=&r,r,r,r,r,r,r,r,r,r", inputs, (tl.int32, tl.int32), True, 1
    )


@triton.jit
def encode_row(ws, scales, SECOND: tl.constexpr):
    """Returns 8 elements of a row, in 4 words, as a word of nibbles, by the first or second of two scales."""
    TEXT: tl.constexpr = _ENCODE_SECOND_ROW if SECOND else _ENCODE_FIRST_ROW
    inputs = [ws[0], ws[1], ws[2], ws[3], scales]
    return tl.inline_asm_elementwise(TEXT, "=&r,r,r,r,r,r", inputs, tl.int32, True, 1)


@triton.jit
def pair_factors(scales):
    """Returns scales that `pair_scales` made with a CARRY as bfloat16."""
    return tl.inline_asm_elementwise(_FACTORS, "=&r,r", [scales], tl.int32, True, 1)


@triton.jit
def decode_row(codes, factors, SECOND: tl.constexpr):
    """Returns a word of nibbles times the first or second of two factors, as 4 words of bfloat16."""
    TEXT: tl.constexpr = _DECODE_SECOND_ROW if SECOND else _DECODE_FIRST_ROW
    return tl.inline_asm_elementwise(
        TEXT,
        "=&r,=&r,=&r,=&r,r,r",
        [codes, factors],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        True,
        1,
    )


@triton.jit
def encode_rotated(xs, i: tl.constexpr, scales, HIGH: tl.constexpr):
    """Returns 8 float32 from xs[i] on as a word of nibbles, with the scale in the low or the high half."""
    TEXT: tl.constexpr = _ENCODE_HIGH if HIGH else _ENCODE_LOW
    bits = scales & -65536 if HIGH else scales << 16
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True) * 0.00006103515625
    inputs = [xs[i], xs[i + 1], xs[i + 2], xs[i + 3], xs[i + 4], xs[i + 5], xs[i + 6], xs[i + 7]]
    return tl.inline_asm_elementwise(
        TEXT, "=&r,r,r,r,r,r,r,r,r,r,r", inputs + [scales, inverse], tl.int32, True, 1
    )
