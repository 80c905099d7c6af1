"""Stochastic rounding to E2M1 on NVIDIA GPUs: Philox and eight elements in one piece of PTX.

The bits are those of `mxjax.kernels.quantize.elements.round_element`. There a magnitude of s steps, each the
distance between E2M1's neighbours, is rounded up where its fraction is above (random + 1/2) / 2**16. Here s
is rounded to D / 2**16, a tie downward, and the result is the integer part of (D + 2**16 - 1 - random) /
2**16. The sum of 192 and s - 2**-17, rounded up, has D in the last bits of a float32 with known other bits.

Conversions and roundings to integers have a quarter of the throughput of sums on Hopper; here are none. One
operation also spares Triton's pass over memory accesses, whose time grows with the square of their number.
"""

import triton
import triton.language as tl

_ROUND = """mul.wide.u32 wide, c0, 0xD2511F53;
mov.b64 {low0, high0}, wide;
mul.wide.u32 wide, c2, 0xCD9E8D57;
mov.b64 {low1, high1}, wide;
xor.b32 c0, high1, c1;
xor.b32 c0, c0, k0;
xor.b32 c2, high0, c3;
xor.b32 c2, c2, k1;
mov.b32 c1, low1;
mov.b32 c3, low0;
add.u32 k0, k0, 0x9E3779B9;
add.u32 k1, k1, 0xBB67AE85;
"""
# Two magnitudes of at most 6 in steps of E2M1. The halves of `binades` have binades where bfloat16 has its
# exponent; from 0x7F80 they leave the exponent of the factor that makes steps.
_PAIR = """mul.rn.f32 a0, {first}, {factor};
mul.rn.f32 a1, {second}, {factor};
abs.f32 a0, a0;
abs.f32 a1, a1;
min.f32 a0, a0, 0f40C00000;
min.f32 a1, a1, 0f40C00000;
mov.b32 b0, a0;
mov.b32 b1, a1;
prmt.b32 binades, b0, b1, 0x7632;
and.b32 binades, binades, 0x7F807F80;
max.u16x2 binades, binades, least;
sub.u32 b1, 0x7F807F80, binades;
shl.b32 b0, b1, 16;
and.b32 b1, b1, 0xFFFF0000;
mov.b32 s0, b0;
mov.b32 s1, b1;
fma.rn.f32 s0, a0, s0, 0fB7000000;
fma.rn.f32 s1, a1, s1, 0fB7000000;
add.rp.f32 s0, s0, 0f43400000;
add.rp.f32 s1, s1, 0f43400000;
{draw} b0, {random0}, {half};
{draw} b1, {random1}, {half};
mov.b32 d0, s0;
mov.b32 d1, s1;
sub.u32 d0, d0, b0;
sub.u32 d1, d1, b1;
add.u32 d0, d0, 0xFFFF;
add.u32 d1, d1, 0xFFFF;
prmt.b32 code, d0, d1, 0x7632;
shr.u32 binades, binades, 6;
add.u32 code, code, binades;
add.u32 code, code, 0x00020002;
and.b32 code, code, 0x00070007;
prmt.b32 sign, {first}, {second}, 0x7632;
shr.u32 sign, sign, 12;
lop3.b32 n{i}, sign, 0x00080008, code, 0xEA;
"""


def _philox(counter: str, row: str, key0: str, key1: str) -> str:
    start = "".join(f"mov.b32 {name}, {value};\n" for name, value in (
        ("c0", counter), ("c1", row), ("c2", "0"), ("c3", "0"), ("k0", key0), ("k1", key1),
    ))  # fmt: skip
    return (
        ".reg .b32 c0, c1, c2, c3, k0, k1, low0, low1, high0, high1;\n.reg .b64 wide;\n" + start + 10 * _ROUND
    )


def _encode_text() -> str:
    """Returns PTX for 8 float32, $1 to $8, times $9; $10 to $13 are Philox's counter, row and key."""
    text = f"""{{
.reg .b32 b0, b1, d0, d1, binades, least, code, sign, n0, n1, n2, n3;
.reg .f32 a0, a1, s0, s1;
{_philox("$10", "$11", "$12", "$13")}mov.b32 least, 0x3F803F80;
"""
    halves = (("and.b32", "0xFFFF"), ("shr.u32", "16"))
    for i in range(4):
        draw, half = halves[i % 2]
        names = {"random0": f"c{i // 2}", "random1": f"c{i // 2 + 2}", "draw": draw, "half": half}
        text += _PAIR.format(i=i, first=f"${i + 1}", second=f"${i + 5}", factor="$9", **names)
    for i in (2, 1, 0):
        text += f"shl.b32 n3, n3, 4;\nor.b32 n3, n3, n{i};\n"
    return text + "mov.b32 $0, n3;\n}"


_ENCODE = tl.constexpr(_encode_text())
_PHILOX = tl.constexpr(
    "{\n" + _philox("$4", "$5", "$6", "$7") + "".join(f"mov.b32 ${i}, c{i};\n" for i in range(4)) + "}"
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
def encode_stochastic(xs, factor, counter, row, key0, key1):
    """Returns 8 float32 elements times `factor`, rounded stochastically, as the nibbles of one int32 word."""
    inputs = [xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7], factor, counter, row, key0, key1]
    return tl.inline_asm_elementwise(_ENCODE, "=&r,r,r,r,r,r,r,r,r,r,r,r,r,r", inputs, tl.int32, True, 1)
