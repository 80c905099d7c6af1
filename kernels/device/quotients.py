"""Quotients rounded as `mxjax.numerics.float_scales.divide` rounds them, on NVIDIA GPUs without branches.

`tl.div_rn` tests each operand for exponents that need care, and leaves registers for a call. Here an inverse
of the divisor, correctly rounded, gives a quotient within two units in the last place. One correction by its
remainder makes that at most one unit wrong, and then the remainder is exact and a second rounds correctly
(Markstein 1990), unless it underflows: so tiny numbers are scaled before.
"""

import numpy as np
import triton
import triton.language as tl

_CORRECT = """fma.rn.f32 r, n, q, x;
fma.rn.f32 q, r, i, q;
"""
_QUOTIENT = f"""mov.b32 x, $1;
mul.rn.f32 q, x, i;
{2 * _CORRECT}mov.b32 $0, q;
}}"""
_START = "{\n.reg .f32 x, n, i, q, r;\n"
_DIVIDE = tl.constexpr(f"{_START}neg.f32 n, $2;\nmov.b32 i, $3;\n{_QUOTIENT}")
# One correction makes an inverse that is a unit or two wrong right for each of the 8 significands of a scale.
_DIVIDE_BY_SCALE = tl.constexpr(f"""{_START}neg.f32 n, $2;
rcp.approx.ftz.f32 i, $2;
fma.rn.f32 r, n, i, 0f3F800000;
fma.rn.f32 i, i, r, i;
{_QUOTIENT}""")


@triton.constexpr_function
def _inverse(divisor):
    return float(np.float32(1) / np.float32(divisor))


@triton.jit
def divide_twice(x, FIRST: tl.constexpr, second, inverse, PTX: tl.constexpr):
    """Returns x / FIRST / second for x >= 0 and second > 2**-120, whose inverse is given.

    With PTX a quotient below 2**-40 may be wrong, but is below 2**-40 too.
    """
    first = tl.full(x.shape, FIRST, tl.float32)
    second, inverse = tl.zeros_like(x) + second, tl.zeros_like(x) + inverse
    if not PTX or FIRST < 1:  # whose quotient may be infinite
        return tl.div_rn(tl.div_rn(x, first), second)
    # With a small divisor both are scaled. By an infinite one, what is finite becomes zero.
    small, infinite = second < 2.0**-40, second == float("inf")
    x = x * tl.where(infinite, 0.0, tl.where(small, 2.0**60, 1.0))
    inverse = tl.where(infinite, 1.0, tl.where(small, inverse * 2.0**-60, inverse))
    second = tl.where(infinite, 1.0, tl.where(small, second * 2.0**60, second))
    of_first = tl.full(x.shape, _inverse(FIRST), tl.float32)
    x = tl.inline_asm_elementwise(_DIVIDE, "=r,r,r,r", [x, first, of_first], tl.float32, True, 1)
    return tl.inline_asm_elementwise(_DIVIDE, "=r,r,r,r", [x, second, inverse], tl.float32, True, 1)


@triton.jit
def divide_by_scale(x, scale, PTX: tl.constexpr):
    """Returns x / scale, for a scale of 4 significant bits; 0 where it is zero."""
    if PTX:
        y = tl.inline_asm_elementwise(_DIVIDE_BY_SCALE, "=r,r,r", [x, scale], tl.float32, True, 1)
    else:
        y = tl.div_rn(x, scale)
    return tl.where(scale == 0, 0.0, y)
