"""Words of two bfloat16, which on NVIDIA GPUs one instruction joins or multiplies."""

import triton
import triton.language as tl

_JOIN = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")
_SIGN = tl.constexpr("""{
.reg .b32 sign;
prmt.b32 sign, $2, $3, 0x7632;
lop3.b32 $0, sign, $1, 0x80008000, 0xE4;
}""")
_SCALE = tl.constexpr("""{
.reg .b32 scale;
prmt.b32 scale, $2, $2, 0x3232;
mul.rn.bf16x2 $0, $1, scale;
}""")


@triton.jit
def join_pair(low, high, PTX: tl.constexpr):
    """Returns words of two float32 that bfloat16 represents; PTX is whether the target is sm_90 or later."""
    if PTX:
        return tl.inline_asm_elementwise(_JOIN, "=r,r,r", [low, high], tl.int32, True, 1)
    return (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF | (high.to(tl.int32, bitcast=True) & ~0xFFFF)


@triton.jit
def split_pair(word):
    """Returns both bfloat16 of words in float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & ~0xFFFF).to(tl.float32, bitcast=True)


@triton.jit
def sign_pair(word, x0, x1, PTX: tl.constexpr):
    """Returns words of two magnitudes with the signs of x0 and x1, float32."""
    if PTX:
        return tl.inline_asm_elementwise(_SIGN, "=r,r,r,r", [word, x0, x1], tl.int32, True, 1)
    signs = join_pair(x0, x1, False) & -0x7FFF8000
    return word | signs


@triton.jit
def scale_pair(word, scale, PTX: tl.constexpr):
    """Returns words times a scale in float32; bfloat16 represents the scale and the products."""
    if PTX:
        return tl.inline_asm_elementwise(_SCALE, "=r,r,r", [word, scale], tl.int32, True, 1)
    low, high = split_pair(word)
    return join_pair(low * scale, high * scale, PTX)
