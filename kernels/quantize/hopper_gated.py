"""Hopper's quantizer kernel for SwiGLU and for its gradient, which are computed where they are quantized.

The kernels read the products as GEMMs leave them (`mxjax.operands.product.Product`): bfloat16, and a power
of two for each row and each column. So neither silu(gate) * up nor its gradient is stored and read again.
Both are computed in float32 and rounded to bfloat16. Tiles and results are those of `hopper_kernel`.
"""

import triton
import triton.language as tl

from mxjax.kernels.quantize.hopper_kernel import GROUP, load_row, quantize_tile, split_words

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
_TIMES = "mul.rn.bf16x2 f, {row}, {column};\nmul.rn.bf16x2 {into}, {word}, f;\n"
_SILU_UP = tl.constexpr(
    _on_halves(
        _TIMES.format(into="g", word="$1", row="$3", column="$4")
        + _TIMES.format(into="u", word="$2", row="$3", column="$5"),
        (("x", "g"), ("v", "u")),
        _LOGISTIC + "mul.rn.f32 y, x, s;\nmul.rn.f32 y, y, v;\n",
    )
)
_OF_UP = tl.constexpr(
    _on_halves(
        _TIMES.format(into="g", word="$1", row="$3", column="$4")
        + _TIMES.format(into="d", word="$2", row="$5", column="$6"),
        (("x", "g"), ("t", "d")),
        _LOGISTIC + "mul.rn.f32 y, x, s;\nmul.rn.f32 y, y, t;\n",
    )
)
_OF_GATE = tl.constexpr(
    _on_halves(
        _TIMES.format(into="g", word="$1", row="$4", column="$5")
        + _TIMES.format(into="u", word="$2", row="$4", column="$6")
        + _TIMES.format(into="d", word="$3", row="$7", column="$8"),
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
def quantize_gated_kernel(
    product,
    row_factors,
    column_factors,
    row_words,
    row_scales,
    column_words,
    column_scales,
    R,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr,
    COLUMN_LENGTH,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Quantizes silu(gate) * up [V, R, C] of a product [V, R, 2 C] along its columns and its rows.

    Gate's columns come first. The product is in bfloat16; row_factors [V, R] and column_factors [V, 2 C] are
    powers of two in float32. Results and the other arguments are as in `quantize_pairs_kernel`, with V for
    V * BATCH. The grid is (tiles along C, tiles along R, V).
    """
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    at = ((matrix * R + r0) * (2 * C) + c0) // 2
    gate = product.to(tl.pointer_type(tl.int32)) + at
    row_factors += matrix * R + r0
    column_factors += matrix * (2 * C) + c0
    rows, words = R - r0, (C - c0) // 2
    gate_column = _column_pairs(column_factors, words, BLOCK_C, EXACT)
    up_column = _column_pairs(column_factors + C, words, BLOCK_C, EXACT)
    loaded = ()
    for i in tl.static_range(GROUP):
        row = _row_pairs(row_factors, i, rows, BLOCK_R, EXACT)
        g = load_row(gate, i, rows, words, C, BLOCK_R, BLOCK_C, EXACT)
        u = load_row(gate + C // 2, i, rows, words, C, BLOCK_R, BLOCK_C, EXACT)
        inputs = [g, u, row, gate_column, up_column]
        loaded = loaded + (tl.inline_asm_elementwise(_SILU_UP, "=r,r,r,r,r,r", inputs, tl.int32, True, 1),)
    quantize_tile(
        split_words(loaded, BLOCK_R, BLOCK_C),
        row_words,
        row_scales,
        column_words,
        column_scales,
        column_scales,
        0,
        0,
        matrix,
        r0,
        c0,
        R,
        C,
        C,
        BLOCK_R,
        BLOCK_C,
        EXACT,
        ROW_LENGTH,
        COLUMN_LENGTH,
        False,
        ROTATION,
        FOLDED,
    )


@triton.jit
def quantize_gated_gradient_kernel(
    product,
    row_factors,
    column_factors,
    gradient,
    gradient_row_factors,
    gradient_column_factors,
    row_words,
    row_scales,
    column_words,
    column_scales,
    R,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr,
    COLUMN_LENGTH,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Quantizes the gradient [V, R, 2 C] of a product, from that of its silu(gate) * up [V, R, C].

    C is a multiple of 32. The arguments are those of `quantize_gated_kernel`, and the gradient as a product.
    The grid is (2 * tiles along C, tiles along R, V): the first half along C computes the gate's part, the
    second the up projection's of the same elements, which it finds in the L2 cache.
    """
    tiles = tl.num_programs(0) // 2
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) % tiles * BLOCK_C
    of_up = tl.program_id(0) // tiles
    matrix = tl.program_id(2).to(tl.int64)
    at = ((matrix * R + r0) * (2 * C) + c0) // 2
    gate = product.to(tl.pointer_type(tl.int32)) + at
    gradient = gradient.to(tl.pointer_type(tl.int32)) + ((matrix * R + r0) * C + c0) // 2
    row_factors += matrix * R + r0
    gradient_row_factors += matrix * R + r0
    column_factors += matrix * (2 * C) + c0
    gradient_column_factors += matrix * C + c0
    rows, words = R - r0, (C - c0) // 2
    gate_column = _column_pairs(column_factors, words, BLOCK_C, EXACT)
    up_column = _column_pairs(column_factors + C, words, BLOCK_C, EXACT)
    gradient_column = _column_pairs(gradient_column_factors, words, BLOCK_C, EXACT)
    factors = (row_factors, gradient_row_factors, gate_column, up_column, gradient_column)
    if of_up:
        loaded = _gradient(gate, gradient, factors, rows, words, C, BLOCK_R, BLOCK_C, EXACT, True)
    else:
        loaded = _gradient(gate, gradient, factors, rows, words, C, BLOCK_R, BLOCK_C, EXACT, False)
    quantize_tile(
        split_words(loaded, BLOCK_R, BLOCK_C),
        row_words,
        row_scales,
        column_words,
        column_scales,
        column_scales,
        0,
        0,
        matrix,
        r0,
        of_up * C + c0,
        R,
        2 * C,
        of_up * C + C,
        BLOCK_R,
        BLOCK_C,
        EXACT,
        ROW_LENGTH,
        COLUMN_LENGTH,
        False,
        ROTATION,
        FOLDED,
    )


@triton.jit
def _gradient(
    gate,
    gradient,
    factors,
    rows,
    words,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
    OF_UP: tl.constexpr,
):
    """Returns GROUP tensors of words of the gradient of the up projection's part, or else of the gate's."""
    row_factors, gradient_row_factors, gate_column, up_column, gradient_column = factors
    loaded = ()
    for i in tl.static_range(GROUP):
        row = _row_pairs(row_factors, i, rows, BLOCK_R, EXACT)
        gradient_row = _row_pairs(gradient_row_factors, i, rows, BLOCK_R, EXACT)
        g = load_row(gate, i, rows, words, C, BLOCK_R, BLOCK_C, EXACT)
        if OF_UP:
            d = load_row(gradient, i, rows, words, C // 2, BLOCK_R, BLOCK_C, EXACT)
            inputs = [g, d, row, gate_column, gradient_row, gradient_column]
            word = tl.inline_asm_elementwise(_OF_UP, "=r,r,r,r,r,r,r", inputs, tl.int32, True, 1)
        else:
            u = load_row(gate + C // 2, i, rows, words, C, BLOCK_R, BLOCK_C, EXACT)
            d = load_row(gradient, i, rows, words, C // 2, BLOCK_R, BLOCK_C, EXACT)
            inputs = [g, u, d, row, gate_column, up_column, gradient_row, gradient_column]
            word = tl.inline_asm_elementwise(_OF_GATE, "=r,r,r,r,r,r,r,r,r", inputs, tl.int32, True, 1)
        loaded = loaded + (word,)
    return loaded


@triton.jit
def _row_pairs(factors, i, rows, BLOCK_R: tl.constexpr, EXACT: tl.constexpr):
    """Returns the factor of row i of each group as bfloat16 in both halves, [BLOCK_R / GROUP, 1]."""
    row = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP + i
    bits = _load_bits(factors + row, row < rows, EXACT)
    return bits | (bits >> 16)


@triton.jit
def _column_pairs(factors, columns, BLOCK_C: tl.constexpr, EXACT: tl.constexpr):
    """Returns the factors of each two columns as bfloat16, [1, BLOCK_C / 2]."""
    column = tl.arange(0, BLOCK_C // 2)[None, :]
    pointers = factors + 2 * column
    low = _load_bits(pointers, column < columns, EXACT)
    return (low >> 16) | _load_bits(pointers + 1, column < columns, EXACT)


@triton.jit
def _load_bits(pointers, inside, EXACT: tl.constexpr):
    if EXACT:
        return tl.load(pointers).to(tl.int32, bitcast=True)
    return tl.load(pointers, inside, 0).to(tl.int32, bitcast=True)
