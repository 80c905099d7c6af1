"""E2M1 elements on Hopper, which has no FP4 conversion: two elements in each instruction.

Elements are rounded as float32 or bfloat16, and their codes are extracted from 16-bit halves: multiplied by
a small power of two, an element is a subnormal whose bits are its code. On Hopper, minima, shifts and logic
have half the throughput of sums and products and limit the kernel, so they work on pairs.
"""

import triton
import triton.language as tl

# The last bit of a sum with `base` is worth the distance between E2M1's neighbours. base is 1.5 times a power
# of two, so that x may be negative. Its exponent is max(x's, the scale's) - the scale's + that of `least`. It
# is computed for two bfloat16 elements at once.
_BASE = """
and.b32 base, {pair}, 0x7F807F80;
add.s16x2 base, base, shift;
max.s16x2 base, base, least;
"""
# Joins sign and code into a nibble at the top of each half of `pair`.
_NIBBLE = """
abs.f16x2 t, t;
min.f16x2 t, t, most;
shl.b32 t, t, {left};
lop3.b32 {pair}, t, {pair}, 0x80008000, 0xF8;
"""
_PAIR_CONSTANTS = """
mov.b32 least, 0x42C042C0;
mov.b32 one, 0xBF80BF80;
mov.b32 small, 0x00800080;
mov.b32 zero, 0x80008000;
mov.b32 most, 0x01C001C0;
"""
# Replaces two bfloat16 by their nibbles, at the top of each half. The inverse scales are negative, so that a
# byte of 255 does not borrow from the other half; signs are handled apart.
PAIR_CODE = f"""{_BASE}
fma.rn.bf16x2 t, {{pair}}, inverse, base;
fma.rn.bf16x2 t, base, one, t;
fma.rn.bf16x2 t, t, small, zero;
{_NIBBLE.replace("{left}", "6")}"""


def pair_start(scales: str) -> str:
    """Returns PTX that sets the registers of `PAIR_CODE`.

    Args:
      scales: PTX that sets each half of `t` to 128 times its scale byte.
    """
    return f"""{_PAIR_CONSTANTS}{scales}sub.u32 inverse, 0xFF00FF00, t;
mov.b32 shift, 0x43C043C0;
add.s16x2 shift, inverse, shift;
"""


def join_nibbles(into: str, parts: list[str]) -> str:
    """Returns PTX that joins the nibbles of four words, the first one lowest."""
    text = f"mov.b32 {into}, {parts[0]};\n"
    for part in parts[1:]:
        text += f"shr.u32 {into}, {into}, 4;\nadd.u32 {into}, {into}, {part};\n"
    return text


def encode_pairs_text(scales: str) -> str:
    """Returns PTX that encodes two groups: $2 to $9 have an element of each, $0 and $1 are the results.

    Args:
      scales: see `pair_start`.
    """
    text = f"""{{
.reg .b32 inverse, shift, least, base, t, one, small, zero, most, low, high, p0, p1, p2, p3, p4, p5, p6, p7;
{pair_start(scales)}"""
    for i in range(8):
        text += f"mov.b32 p{i}, ${i + 2};" + PAIR_CODE.format(pair=f"p{i}")
    text += join_nibbles("low", ["p0", "p1", "p2", "p3"]) + join_nibbles("high", ["p4", "p5", "p6", "p7"])
    return text + "prmt.b32 $0, low, high, 0x5410;\nprmt.b32 $1, low, high, 0x7632;\n}"


def encode_floats_text(scale: str) -> str:
    """Returns PTX that encodes one group: $1 to $8 are its elements, $10 is the inverse scale times 2**-14.

    Args:
      scale: PTX that sets both halves of `t` to 128 times the scale byte.
    """
    text = f"""{{
.reg .b32 shift, least, base, t, most, p0, p1, p2, p3;
.reg .f32 base0, base1, x0, x1;
mov.b32 least, 0x43C043C0;
mov.b32 most, 0x0E000E00;
{scale}sub.u32 t, 0x7F007F00, t;
mov.b32 shift, 0xC4C0C4C0;
add.s16x2 shift, t, shift;
"""
    for i in range(4):
        pair, first, second = f"p{i}", f"${i + 1}", f"${i + 5}"
        text += f"prmt.b32 {pair}, {first}, {second}, 0x7632;" + _BASE.format(pair=pair)
        # The low half of `base` as a float32 is the other element's: an even number of last places.
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
cvt.rn.f16x2.f32 t, x1, x0;"""
        text += _NIBBLE.format(pair=pair, left=3)
    return text + join_nibbles("$0", ["p0", "p1", "p2", "p3"]) + "}"


@triton.constexpr_function
def _largest_pairs(elements: int, exponent_only: bool) -> str:
    """Returns PTX for two groups: $2 … have an element of each, $0 and $1 are their float32 maxima."""
    mask, nan = ("0x7F807F80", "") if exponent_only else ("0x7FFF7FFF", ".NaN")
    text = f"{{\n.reg .b32 m, t;\nand.b32 m, $2, {mask};\n"
    for i in range(1, elements):
        text += f"and.b32 t, ${i + 2}, {mask};\nmax{nan}.bf16x2 m, m, t;\n"
    return text + "shl.b32 $0, m, 16;\nand.b32 $1, m, 0xFFFF0000;\n}"


@triton.constexpr_function
def largest_floats_text(elements: int, *, exponent_only: bool) -> str:
    """Returns PTX for one group, $1 …: one half of `m` gets the upper half of the largest magnitude.

    With `exponent_only` it gets the power of two in its binade.

    It pairs elements as the encoding does, so that the compiler pairs them once.
    """
    mask, larger = ("0x7F807F80", "max.bf16x2") if exponent_only else ("0x7FFF7FFF", "max.u16x2")
    text = "{\n.reg .b32 m, t;\n"
    for i in range(0, elements, 8):
        for k in range(i, i + 4):
            into = "t" if k else "m"
            text += f"prmt.b32 {into}, ${k + 1}, ${k + 5}, 0x7632;\nand.b32 {into}, {into}, {mask};\n"
            text += f"{larger} m, m, t;\n" if k else ""
    return text


@triton.constexpr_function
def _largest_exponent(elements: int) -> str:
    """Returns PTX for one group, $1 …. It pairs elements as `stochastic_ptx` does."""
    text = "{\n.reg .b32 m, t;\n"
    for i in (i for i in range(elements) if not i & 2):
        into = "t" if i else "m"
        text += f"prmt.b32 {into}, ${i + 1}, ${i + 3}, 0x7632;\nabs.bf16x2 {into}, {into};\n"
        text += "max.NaN.bf16x2 m, m, t;\n" if i else ""
    return text + "shl.b32 t, m, 16;\nand.b32 m, m, 0xFFFF0000;\nmax.u32 $0, m, t;\n}"


_ENCODE_PAIRS = tl.constexpr(encode_pairs_text("prmt.b32 t, $10, $11, 0x5410;\nshl.b32 t, t, 7;\n"))
_ENCODE_FLOATS = tl.constexpr(encode_floats_text("prmt.b32 t, $9, $9, 0x5410;\nshl.b32 t, t, 7;\n"))


@triton.jit
def encode_pairs(xs, byte):
    """Returns 8 bfloat16 elements as the nibbles of one int32 word, rounded to nearest."""
    eight = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]]
    return tl.inline_asm_elementwise(
        _ENCODE_PAIRS, "=&r,=&r,r,r,r,r,r,r,r,r,r,r", eight + [byte], tl.int32, True, 2
    )


@triton.jit
def encode_floats(xs, byte, inverse):
    """Returns 8 float32 elements as the nibbles of one int32 word, rounded to nearest.

    Args:
      inverse: factor of the elements.
    """
    eight = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]]
    inputs = eight + [byte, inverse * 0.00006103515625]
    return tl.inline_asm_elementwise(_ENCODE_FLOATS, "=&r,r,r,r,r,r,r,r,r,r,r", inputs, tl.int32, True, 1)


@triton.jit
def largest_pairs(xs, GROUP: tl.constexpr, EXPONENT_ONLY: tl.constexpr):
    """Returns the float32 bits of the largest magnitude among GROUP bfloat16 tensors; NaN is the largest.

    Args:
      EXPONENT_ONLY: whether the mantissa does not matter.
    """
    TEXT: tl.constexpr = _largest_pairs(GROUP, EXPONENT_ONLY)
    CONSTRAINTS: tl.constexpr = "=&r,=&r" + ",r" * GROUP
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, xs, tl.int32, True, 2)


@triton.jit
def largest_exponent(xs, GROUP: tl.constexpr):
    """Returns the bits of a number in the binade of the largest magnitude among float32 tensors.

    Infinity or NaN where that magnitude is infinite or NaN.
    """
    TEXT: tl.constexpr = _largest_exponent(GROUP)
    CONSTRAINTS: tl.constexpr = "=&r" + ",r" * GROUP
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, xs, tl.int32, True, 1)
