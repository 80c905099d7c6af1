"""Hopper's quantizer kernel for the result of RMSNorm, which is computed where it is quantized.

The kernel reads the tensor before the norm, and the factors that a pass over it has found. Each of the two
products is rounded to bfloat16, as XLA does. Tiles and results are those of `hopper_kernel`.
"""

import triton
import triton.language as tl

from mxjax.kernels.quantize.hopper_kernel import GROUP, load_row, quantize_tile, split_words

# A word times the factor of its row in float32, and the scales of its columns in bfloat16.
_TIMES = tl.constexpr("""{
.reg .b32 low, high;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xFFFF0000;
mul.rn.f32 low, low, $2;
mul.rn.f32 high, high, $2;
cvt.rn.bf16x2.f32 low, high, low;
mul.rn.bf16x2 $0, low, $3;
}""")


@triton.jit
def quantize_normed_kernel(
    x,
    factors,
    scale,
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
    """Quantizes x * factors * scale along its columns and its rows.

    x [V, R, C] and scale [V, C] are in bfloat16, factors [V, R] in float32. Results and the other arguments
    are as in `quantize_pairs_kernel`, with V for V * BATCH. The grid is (tiles along C, tiles along R, V),
    from the last rows to the first, of which the L2 cache still has the last.
    """
    r0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R
    c0 = tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    x = x.to(tl.pointer_type(tl.int32))
    factors += matrix * R + r0
    scale += matrix * C + c0
    rows, words = R - r0, (C - c0) // 2
    word = tl.arange(0, BLOCK_C // 2)[None, :]
    columns = _load(scale.to(tl.pointer_type(tl.int32)) + word, word < words, EXACT)
    loaded = ()
    for i in tl.static_range(GROUP):
        row = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP + i
        factor = _load(factors.to(tl.pointer_type(tl.int32)) + row, row < rows, EXACT)
        inputs = [load_row(x, i, rows, words, C // 2, BLOCK_R, BLOCK_C, EXACT), factor, columns]
        loaded = loaded + (tl.inline_asm_elementwise(_TIMES, "=r,r,r,r", inputs, tl.int32, True, 1),)
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
def _load(pointers, inside, EXACT: tl.constexpr):
    if EXACT:
        return tl.load(pointers)
    return tl.load(pointers, inside, 0)
