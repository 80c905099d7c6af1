"""Stochastic rounding to E2M1 on NVIDIA GPUs: Philox and eight elements in one piece of PTX.

The bits are those of `mxjax.kernels.device.elements.round_element`. There a magnitude of s steps, each the
distance between E2M1's neighbours, is rounded up where its fraction is above (random + 1/2) / 2**16.

Times 2**-126, E2M1's subnormals become float32's: from bit 22 on, the magnitude's bits are then its code, and
the 22 bits below, 64 f, the fraction in units of 2**-16. It is rounded up where f > random + 1/2, which is
where 64 f, rounded up to an integer, plus 31 and 64 (65535 - random) reaches 2**22. So a sum gives the code:
4 times as large, it has random bits in whole bytes, and the code in the highest.

Hopper has half as many lanes for integers as for float32, but sums with products run beside them, in those
for float32. These are few operations on integers, as many of them as possible on pairs. One operation also
spares Triton's pass over memory accesses, whose time grows with the square of their number.

On Hopper two bfloat16 in a word are rounded together. Scales come in pairs, as in `hopper_ptx`: an element
times the inverse of its scale is a bfloat16 again, but for one so small that no random number rounds it up.
"""

import triton
import triton.language as tl

_ROUND = """mul.wide.u32 wide, c0, 0xD2511F53;
mov.b64 {low0, high0}, wide;
mul.wide.u32 wide, c2, 0xCD9E8D57;
mov.b64 {low1, high1}, wide;
lop3.b32 c0, high1, c1, k0, TABLE;
lop3.b32 c2, high0, c3, k1, TABLE;
mov.b32 c1, low1;
mov.b32 c3, low0;
add.u32 k0, k0, 0x9E3779B9;
add.u32 k1, k1, 0xBB67AE85;
"""
# Inverts the lower halves of both products: -1 minus a product is one by the negative constant, minus 1.
_INVERTED = """mad.lo.u32 low0, c0, 0x2DAEE0AD, 0xFFFFFFFF;
mad.lo.u32 low1, c2, 0x326172A9, 0xFFFFFFFF;
"""
# Rounds a0 and a1. Each half of `code` then has a code at bits 8 to 10; below them is noise.
ROUND_PAIR = """abs.f32 a0, a0;
abs.f32 a1, a1;
mul.rp.f32 a0, a0, 0f00800000;
mul.rp.f32 a1, a1, 0f00800000;
prmt.b32 r0, {random0}, half, {half0};
prmt.b32 r1, {random1}, half, {half1};
mov.b32 b0, a0;
mov.b32 b1, a1;
mad.lo.u32 b0, b0, four, r0;
mad.lo.u32 b1, b1, four, r1;
prmt.b32 code, b0, b1, 0x7632;
"""
CLIP = "min.u16x2 code, code, most;\n"
"""Follows `ROUND_PAIR` where a magnitude may be 7 or more, which rounds up to 8."""
HALVES = ("0x5104", "0x5324")
"""Selectors of `ROUND_PAIR` for the low and the high half of a random word."""
# 0x7C below an inverted random half makes 4 (64 (65535 - random) + 31). As a constant beside prmt's selector,
# ptxas would move it to a register for every element, and a product with a constant 4 would be a shift. It
# does not know that the sign bit of `positive` is 0, so that it keeps both in registers.
ROUND_START = """mov.b32 most, 0x07FF07FF;
shr.u32 four, {positive}, 31;
or.b32 half, four, 0x7C;
or.b32 four, four, 4;
"""
_REGISTERS = """.reg .b32 b0, b1, r0, r1, most, half, four, code;
.reg .f32 a0, a1;
"""


def philox_text(counter: str, row: str, key0: str, key1: str, *, inverted: bool = False) -> str:
    """Returns PTX that leaves Philox's words in c0 to c3, or their inverses."""
    rounds = 10 * _ROUND.replace("TABLE", "0x96")  # a sum of three bits
    if inverted:
        last = _ROUND.replace("TABLE", "0x69").replace("lop3", _INVERTED + "lop3", 1)
        rounds = 9 * _ROUND.replace("TABLE", "0x96") + last
    start = "".join(f"mov.b32 {name}, {value};\n" for name, value in (
        ("c0", counter), ("c1", row), ("c2", "0"), ("c3", "0"), ("k0", key0), ("k1", key1),
    ))  # fmt: skip
    return ".reg .b32 c0, c1, c2, c3, k0, k1, low0, low1, high0, high1;\n.reg .b64 wide;\n" + start + rounds


def _encode_text(clips: bool) -> str:
    """Returns PTX for 8 float32, $1 to $8, times $9; $10 to $13 are Philox's counter, row and key."""
    text = f"""{{
{_REGISTERS}.reg .b32 sign, even, odd, evens, odds, signs;
{philox_text("$10", "$11", "$12", "$13", inverted=True)}{ROUND_START.format(positive="$9")}"""
    for k, (codes, signs) in enumerate((("even", "evens"), ("odd", "odds"))):
        for first in (k, k + 4):  # elements `first` and `first + 2`
            x0, x1 = f"${first + 1}", f"${first + 3}"
            random = {"random0": f"c{first // 2}", "random1": f"c{first // 2 + 1}"}
            text += f"mul.rn.f32 a0, {x0}, $9;\nmul.rn.f32 a1, {x1}, $9;\n"
            text += ROUND_PAIR.format(**random, half0=HALVES[k], half1=HALVES[k]) + (CLIP if clips else "")
            text += f"prmt.b32 sign, {x0}, {x1}, 0x7632;\n"
            if first == k:
                text += f"mov.b32 {codes}, code;\nmov.b32 {signs}, sign;\n"
            else:  # the highest byte of each element
                text += f"prmt.b32 {codes}, {codes}, code, 0x7531;\n"
                text += f"prmt.b32 {signs}, {signs}, sign, 0x7531;\n"
    return f"""{text}mad.lo.u32 even, odd, 16, even;
shr.u32 evens, evens, 4;
lop3.b32 even, evens, even, 0x08080808, 0xE4;
lop3.b32 $0, odds, even, 0x80808080, 0xE4;
}}"""


_ENCODE, _ENCODE_CLIPPED = tl.constexpr(_encode_text(False)), tl.constexpr(_encode_text(True))
_PHILOX = tl.constexpr(
    "{\n" + philox_text("$4", "$5", "$6", "$7") + "".join(f"mov.b32 ${i}, c{i};\n" for i in range(4)) + "}"
)


@triton.jit
def philox_words(counter, row, key0, key1):
    """Returns the four words of Philox 4x32-10 for the counter (counter, row, 0, 0)."""
    inputs = [counter, row, key0, key1]
    return tl.inline_asm_elementwise(
        _PHILOX,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        inputs,
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        True,
        1,
    )


@triton.jit
def encode_stochastic(xs, factor, counter, row, key0, key1, CLIPS: tl.constexpr):
    """Returns 8 float32 elements times `factor`, rounded stochastically, as the nibbles of one int32 word.

    Args:
      CLIPS: whether a product may be above 6.
    """
    TEXT: tl.constexpr = _ENCODE_CLIPPED if CLIPS else _ENCODE
    inputs = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7], factor, counter, row, key0, key1]
    return tl.inline_asm_elementwise(TEXT, "=&r,r,r,r,r,r,r,r,r,r,r,r,r,r", inputs, tl.int32, True, 1)


# Two elements, as nibbles at the top of each half of {pair}; below them is noise.
_BFLOAT16_PAIR = f"""mul.rn.bf16x2 t, {{word}}, inverse;
shl.b32 b0, t, 16;
and.b32 b1, t, 0xFFFF0000;
mov.b32 a0, b0;
mov.b32 a1, b1;
{ROUND_PAIR}{CLIP}shl.b32 code, code, 4;
lop3.b32 {{pair}}, {{word}}, code, 0x80008000, 0xE4;
"""


def _encode_columns() -> str:
    """Returns PTX for 8 elements of two columns, in $2 to $9; $0 and $1 are the results.

    $10 has the scales of both, $11 is Philox's counter, $12 the first column's row, $13 and $14 are the key.
    """
    text = "{\n" + _REGISTERS + ".reg .b32 t, inverse, p0, p1, p2, p3, p4, p5, p6, p7;\n"
    text += ".reg .b32 next, d0, d1, d2, d3, e0, e1, e2, e3;\nadd.u32 next, $12, 1;\n"
    for into, row in (("d", "$12"), ("e", "next")):
        drawn = philox_text("$11", row, "$13", "$14", inverted=True)
        text += "{\n" + drawn + "".join(f"mov.b32 {into}{i}, c{i};\n" for i in range(4)) + "}\n"
    text += "sub.u32 inverse, 0x7F007F00, $10;\n" + ROUND_START.format(positive="inverse")
    for i in range(8):
        half = HALVES[i % 2]
        random = {"random0": f"d{i // 2}", "random1": f"e{i // 2}", "half0": half, "half1": half}
        text += _BFLOAT16_PAIR.format(word=f"${i + 2}", pair=f"p{i}", **random)
    for first in (0, 4):
        for i in range(first + 1, first + 4):
            text += f"shr.u32 p{i - 1}, p{i - 1}, 4;\nlop3.b32 p{i}, p{i}, p{i - 1}, 0xF000F000, 0xE4;\n"
    return text + "prmt.b32 $0, p3, p7, 0x5410;\nprmt.b32 $1, p3, p7, 0x7632;\n}"


_ENCODE_COLUMNS = tl.constexpr(_encode_columns())


@triton.jit
def draw_columns(ws, i: tl.constexpr, scales, counter, row, key0, key1):
    """Returns two words of 8 nibbles: the low halves of ws[i] to ws[i + 7], and the high halves.

    Args:
      scales: of both columns, each in a half.
      counter, row: Philox's counter of both columns, and its row of the first.
    """
    inputs = [ws[i], ws[i + 1], ws[i + 2], ws[i + 3], ws[i + 4], ws[i + 5], ws[i + 6], ws[i + 7], scales]
    inputs = inputs + [counter, row, key0, key1]
    CONSTRAINTS: tl.constexpr = "=&r,=&r" + ",r" * 13
    return tl.inline_asm_elementwise(_ENCODE_COLUMNS, CONSTRAINTS, inputs, (tl.int32, tl.int32), True, 1)


def _draw_text(clips: bool) -> str:
    """Returns PTX for 8 float32, $4 to $11, times $12; $13 to $16 are Philox's counter, row and key.

    $0 to $3 are pairs of magnitudes in bfloat16. A code at bits 6 to 8 is one times 2**-126, a subnormal.
    """
    text = f"""{{
{_REGISTERS}.reg .b32 unit;
{philox_text("$13", "$14", "$15", "$16", inverted=True)}{ROUND_START.format(positive="$12")}"""
    text += "mov.b32 unit, 0x7E807E80;\n"
    for i in range(4):
        first, second = f"${2 * i + 4}", f"${2 * i + 5}"
        random = {"random0": f"c{i}", "random1": f"c{i}", "half0": HALVES[0], "half1": HALVES[1]}
        text += f"""mul.rn.f32 a0, {first}, $12;
mul.rn.f32 a1, {second}, $12;
{ROUND_PAIR.format(**random)}{CLIP if clips else ""}shr.u32 code, code, 2;
and.b32 code, code, 0x01C001C0;
mul.rn.bf16x2 ${i}, code, unit;
"""
    return text + "}"


_DRAW, _DRAW_CLIPPED = tl.constexpr(_draw_text(False)), tl.constexpr(_draw_text(True))


@triton.jit
def draw_pairs(xs, i: tl.constexpr, factor, counter, row, key0, key1, CLIPS: tl.constexpr):
    """Returns the magnitudes of xs[i] to xs[i + 7], float32, times `factor`, rounded stochastically to E2M1.

    They are 4 words of two bfloat16 each.

    Args:
      CLIPS: whether a product may be above 6.
    """
    TEXT: tl.constexpr = _DRAW_CLIPPED if CLIPS else _DRAW
    inputs = [xs[i], xs[i + 1], xs[i + 2], xs[i + 3], xs[i + 4], xs[i + 5], xs[i + 6], xs[i + 7], factor]
    inputs = inputs + [counter, row, key0, key1]
    CONSTRAINTS: tl.constexpr = "=&r,=&r,=&r,=&r" + ",r" * 13
    return tl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        inputs,
        (tl.int32, tl.int32, tl.int32, tl.int32),
        True,
        1,
    )
