"""RMSNorm, SwiGLU and SwiGLU's gradient on Hopper: of words that hold two neighbouring bfloat16 of a row.

They are computed in float32 and rounded to bfloat16. A GEMM's result comes with powers of two as factors: of
its row in both halves of a word, and of its two columns. Applied in bfloat16, they are exact.
"""

import triton
import triton.language as tl

# A word times the factor of its row in float32, and the scales of its columns in bfloat16.
_TIMES_NORM = tl.constexpr("""{
.reg .b32 low, high;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xFFFF0000;
mul.rn.f32 low, low, $2;
mul.rn.f32 high, high, $2;
cvt.rn.bf16x2.f32 low, high, low;
mul.rn.bf16x2 $0, low, $3;
}""")
# Sets s to the logistic function of x.
_LOGISTIC = """
mul.rn.f32 s, x, 0fBFB8AA3B;
ex2.approx.ftz.f32 s, s;
add.rn.f32 s, s, 0f3F800000;
rcp.approx.ftz.f32 s, s;
"""
_HALVES = (("low", "shl.b32 {into}, {word}, 16;\n"), ("high", "and.b32 {into}, {word}, 0xFFFF0000;\n"))


@triton.constexpr_function
def _on_halves(start: str, words: tuple[tuple[str, str], ...], text: str) -> str:
    """Returns PTX that unpacks words into float32 registers, runs `text` on each half, and packs its `y`."""
    asm = "{\n.reg .b32 f, g, u, d, x, v, t, s, y, low, high;\n" + start
    for half, unpack in _HALVES:
        asm += "".join(unpack.format(into=into, word=word) for into, word in words)
        asm += text + f"mov.b32 {half}, y;\n"
    return asm + "cvt.rn.bf16x2.f32 $0, high, low;\n}"


# A word times the powers of two of its row and of its columns.
_TIMES_FACTORS = "mul.rn.bf16x2 f, {row}, {column};\nmul.rn.bf16x2 {into}, {word}, f;\n"
_SILU_UP = tl.constexpr(
    _on_halves(
        _TIMES_FACTORS.format(into="g", word="$1", row="$3", column="$4")
        + _TIMES_FACTORS.format(into="u", word="$2", row="$3", column="$5"),
        (("x", "g"), ("v", "u")),
        _LOGISTIC + "mul.rn.f32 y, x, s;\nmul.rn.f32 y, y, v;\n",
    )
)
_UP_GRADIENT = tl.constexpr(
    _on_halves(
        _TIMES_FACTORS.format(into="g", word="$1", row="$3", column="$4")
        + _TIMES_FACTORS.format(into="d", word="$2", row="$5", column="$6"),
        (("x", "g"), ("t", "d")),
        _LOGISTIC + "mul.rn.f32 y, x, s;\nmul.rn.f32 y, y, t;\n",
    )
)
_GATE_GRADIENT = tl.constexpr(
    _on_halves(
        _TIMES_FACTORS.format(into="g", word="$1", row="$4", column="$5")
        + _TIMES_FACTORS.format(into="u", word="$2", row="$4", column="$6")
        + _TIMES_FACTORS.format(into="d", word="$3", row="$7", column="$8"),
        (("x", "g"), ("v", "u"), ("t", "d")),
        _LOGISTIC
        + """mul.rn.f32 t, t, v;
sub.rn.f32 y, 0f3F800000, s;
fma.rn.f32 y, x, y, 0f3F800000;
mul.rn.f32 y, y, s;
mul.rn.f32 y, y, t;
""",
    )
)


@triton.jit
def times_norm(words, row, columns):
    """Returns words times the float32 factor of their row, and times the bfloat16 scales of their columns."""
    return tl.inline_asm_elementwise(_TIMES_NORM, "=r,r,r,r", [words, row, columns], tl.int32, True, 1)


@triton.jit
def silu_up(gate, up, row, gate_column, up_column):
    """Returns silu(gate) * up."""
    inputs = [gate, up, row, gate_column, up_column]
    return tl.inline_asm_elementwise(_SILU_UP, "=r,r,r,r,r,r", inputs, tl.int32, True, 1)


@triton.jit
def up_gradient(gate, gradient, row, gate_column, gradient_row, gradient_column):
    """Returns the gradient of up from that of silu(gate) * up."""
    inputs = [gate, gradient, row, gate_column, gradient_row, gradient_column]
    return tl.inline_asm_elementwise(_UP_GRADIENT, "=r,r,r,r,r,r,r", inputs, tl.int32, True, 1)


@triton.jit
def gate_gradient(gate, up, gradient, row, gate_column, up_column, gradient_row, gradient_column):
    """Returns the gradient of gate from that of silu(gate) * up."""
    inputs = [gate, up, gradient, row, gate_column, up_column, gradient_row, gradient_column]
    return tl.inline_asm_elementwise(_GATE_GRADIENT, "=r,r,r,r,r,r,r,r,r", inputs, tl.int32, True, 1)


@triton.jit
def row_pairs(factors, i, rows, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, EXACT: tl.constexpr):
    """Returns the factor of row i of each group as bfloat16 in both halves, [BLOCK_R / GROUP, 1]."""
    row = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP + i
    bits = load_factors(factors + row, row < rows, EXACT).to(tl.int32, bitcast=True)
    return bits | (bits >> 16)


@triton.jit
def column_pairs(factors, columns, BLOCK_C: tl.constexpr, EXACT: tl.constexpr):
    """Returns the factors of each two columns as bfloat16, [1, BLOCK_C / 2]."""
    column = tl.arange(0, BLOCK_C // 2)[None, :]
    pointers = factors + 2 * column
    low = load_factors(pointers, column < columns, EXACT).to(tl.int32, bitcast=True)
    high = load_factors(pointers + 1, column < columns, EXACT).to(tl.int32, bitcast=True)
    return (low >> 16) | high


@triton.jit
def load_factors(pointers, inside, EXACT: tl.constexpr):
    """Loads a tile; elements that are not inside are zero."""
    if EXACT:
        return tl.load(pointers)
    return tl.load(pointers, inside, 0)
