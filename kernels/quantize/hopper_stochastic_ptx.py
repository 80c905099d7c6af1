"""Stochastic rounding of two bfloat16 in a word on Hopper, as `mxjax.kernels.quantize.stochastic_ptx` rounds.

Scales come in pairs, as in `mxjax.kernels.quantize.hopper_ptx`. An element times the inverse of its scale is
a bfloat16 again, but for one so small that no random number rounds it up.
"""

import triton
import triton.language as tl

from mxjax.kernels.quantize.stochastic_ptx import HALVES, ROUND_PAIR, ROUND_START, philox_text

_REGISTERS = """.reg .b32 t, inverse, b0, b1, r0, r1, most, half, code, p0, p1, p2, p3, p4, p5, p6, p7;
.reg .f32 a0, a1;
"""
# Two elements, as nibbles at the top of each half of {pair}; below them is noise.
_PAIR = f"""mul.rn.bf16x2 t, {{word}}, inverse;
shl.b32 b0, t, 16;
and.b32 b1, t, 0xFFFF0000;
mov.b32 a0, b0;
mov.b32 a1, b1;
{ROUND_PAIR}shl.b32 code, code, 6;
lop3.b32 {{pair}}, {{word}}, code, 0x80008000, 0xE4;
"""


def _encode_columns() -> str:
    """Returns PTX for 8 elements of two columns, in $2 to $9; $0 and $1 are the results.

    $10 has the scales of both, $11 is Philox's counter, $12 the first column's row, $13 and $14 are the key.
    """
    text = "{\n" + _REGISTERS + ".reg .b32 next, d0, d1, d2, d3, e0, e1, e2, e3;\nadd.u32 next, $12, 1;\n"
    for into, row in (("d", "$12"), ("e", "next")):
        drawn = philox_text("$11", row, "$13", "$14", inverted=True)
        text += "{\n" + drawn + "".join(f"mov.b32 {into}{i}, c{i};\n" for i in range(4)) + "}\n"
    text += "sub.u32 inverse, 0x7F007F00, $10;\n" + ROUND_START.format(positive="inverse")
    for i in range(8):
        half = HALVES[i % 2]
        random = {"random0": f"d{i // 2}", "random1": f"e{i // 2}", "half0": half, "half1": half}
        text += _PAIR.format(word=f"${i + 2}", pair=f"p{i}", **random)
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
