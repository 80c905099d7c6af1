"""Hopper's quantizer kernels for training's common case: bfloat16, quantized along columns or both axes.

They compute the same as `mxjax.kernels.quantize.kernel` in fewer instructions, for packed operands. Columns
may be rotated by H4 or H16, with signs or without, or else rounded stochastically.
`mxjax.kernels.quantize.launches` chooses. One kernel reads the tensor itself. The others compute it where
they quantize it (`mxjax.operands.computed`), so that its values are never stored.
"""

import triton
import triton.language as tl

from mxjax.kernels.device.computed_ptx import (
    column_pairs,
    gate_gradient,
    load_factors,
    row_pairs,
    silu_up,
    times_norm,
    up_gradient,
)
from mxjax.kernels.device.loads import load_words
from mxjax.kernels.quantize.hopper_tile import GROUP, quantize_tile
from mxjax.kernels.quantize.kernel import place_of


@triton.jit
def quantize_pairs_kernel(
    x, scalars, row_words, row_scales, column_words, column_scales, BATCH: tl.constexpr, R, C: tl.constexpr,
    R_ALL, C_ALL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SCALARS_STRIDE: tl.constexpr,
    EXACT: tl.constexpr, ALONG_ROWS: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH,
    COLUMN_STOCHASTIC: tl.constexpr, ROTATION: tl.constexpr, COLUMN_SIGNS: tl.constexpr,
    ROW_CARRY: tl.constexpr, COLUMN_CARRY: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes x [V, BATCH, R, C] (bfloat16, C a multiple of 8) along its columns, and its rows if wanted.

    It takes the same scalars as `mxjax.kernels.quantize.kernel`, and writes operands as that does: words
    [V, BATCH, R, ROW_LENGTH / 8] int32 and scales [V, BATCH, R, ROW_LENGTH / 32] uint8; those of columns have
    C and COLUMN_LENGTH instead.

    Args:
      ALONG_ROWS: see `mxjax.kernels.quantize.kernel`.
      ROW_LENGTH: C padded to whole blocks, or 0 if rows are not wanted.
      COLUMN_LENGTH: R padded to whole blocks.
      COLUMN_STOCHASTIC: whether rounding is stochastic.
      ROTATION: size of the columns' rotation: 1, 4 or 16.
      COLUMN_SIGNS: whether it has signs.
      ROW_CARRY, COLUMN_CARRY: carries of the scale rules; that of rotated columns has 16 low bits of 0.
      SEEN: whether columns are quantized from the values of the quantized rows, of a rule with a carry.
    """
    if ALONG_ROWS:
        # From the last rows to the first: the L2 cache still has the last of what was written before.
        r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    else:
        r0, c0 = tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    if COLUMN_STOCHASTIC or COLUMN_SIGNS:
        scalars += matrix // BATCH * SCALARS_STRIDE
    random = random_at(scalars, matrix % BATCH, r0, c0, C_ALL, COLUMN_STOCHASTIC)
    signs = signs_at(scalars, COLUMN_SIGNS)
    x = (x + (matrix * R * C + r0.to(tl.int64) * C + c0)).to(tl.pointer_type(tl.int32))
    loaded = ()
    for i in tl.static_range(GROUP):
        loaded = loaded + (load_words(x, i, R - r0, (C - c0) // 2, C // 2, GROUP, BLOCK_R, BLOCK_C, EXACT),)
    out, place = (row_words, row_scales, column_words, column_scales), (matrix, r0, c0)
    quantize_tile(
        loaded, out, place, random, signs, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH,
        ROTATION, ROW_CARRY, COLUMN_CARRY, SEEN,
    )  # fmt: skip


@triton.jit
def quantize_normed_kernel(
    x, factors, scale, scalars, row_words, row_scales, column_words, column_scales, R,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr, COLUMN_LENGTH, ROTATION: tl.constexpr, SCALARS_STRIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr, ROW_CARRY: tl.constexpr, COLUMN_CARRY: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes x * factors * scale along its columns and its rows. Each product is rounded to bfloat16.

    x [V, R, C] and scale [V, C] are in bfloat16, factors [V, R] in float32. Results and the other arguments
    are as in `quantize_pairs_kernel`, with V for V * BATCH. The grid is (tiles along C, tiles along R, V),
    from the last rows to the first, of which the L2 cache still has the last.

    Args:
      STOCHASTIC, SIGNS: whether columns are rounded stochastically, and whether their rotation has signs.
      ROW_CARRY, COLUMN_CARRY, SEEN: see `quantize_pairs_kernel`.
    """
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    x = (x + (matrix * R * C + r0.to(tl.int64) * C + c0)).to(tl.pointer_type(tl.int32))
    factors = (factors + (matrix * R + r0)).to(tl.pointer_type(tl.int32))
    scale = (scale + (matrix * C + c0)).to(tl.pointer_type(tl.int32))
    rows, words = R - r0, (C - c0) // 2
    word = tl.arange(0, BLOCK_C // 2)[None, :]
    columns = load_factors(scale + word, word < words, EXACT)
    loaded = ()
    for i in tl.static_range(GROUP):
        row = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP + i
        factor = load_factors(factors + row, row < rows, EXACT)
        xs = load_words(x, i, rows, words, C // 2, GROUP, BLOCK_R, BLOCK_C, EXACT)
        loaded = loaded + (times_norm(xs, factor, columns),)
    out, place = (row_words, row_scales, column_words, column_scales), (matrix, r0, c0)
    scalars += matrix * SCALARS_STRIDE
    random = random_at(scalars, matrix * 0, r0, c0, C, STOCHASTIC)
    signs = signs_at(scalars, SIGNS)
    quantize_tile(
        loaded, out, place, random, signs, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH,
        ROTATION, ROW_CARRY, COLUMN_CARRY, SEEN,
    )  # fmt: skip


@triton.jit
def quantize_gated_kernel(
    product, row_factors, column_factors, scalars, row_words, row_scales, column_words, column_scales, R,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr, COLUMN_LENGTH, ROTATION: tl.constexpr, SCALARS_STRIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr, ROW_CARRY: tl.constexpr, COLUMN_CARRY: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes silu(gate) * up [V, R, C] of a product [V, R, 2 C] along its columns and its rows.

    Gate's columns come first. The product is as GEMMs leave it (`mxjax.operands.product.Product`): in
    bfloat16, with row_factors [V, R] and column_factors [V, 2 C], powers of two in float32. The result is
    computed in float32 and rounded to bfloat16. Results and the other arguments are as in
    `quantize_normed_kernel`. The grid is (tiles along C, tiles along R, V).
    """
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    gate = product.to(tl.pointer_type(tl.int32)) + ((matrix * R + r0) * (2 * C) + c0) // 2
    row_factors += matrix * R + r0
    column_factors += matrix * (2 * C) + c0
    rows, words = R - r0, (C - c0) // 2
    gate_column = column_pairs(column_factors, words, BLOCK_C, EXACT)
    up_column = column_pairs(column_factors + C, words, BLOCK_C, EXACT)
    loaded = ()
    for i in tl.static_range(GROUP):
        row = row_pairs(row_factors, i, rows, GROUP, BLOCK_R, EXACT)
        g = load_words(gate, i, rows, words, C, GROUP, BLOCK_R, BLOCK_C, EXACT)
        u = load_words(gate + C // 2, i, rows, words, C, GROUP, BLOCK_R, BLOCK_C, EXACT)
        loaded = loaded + (silu_up(g, u, row, gate_column, up_column),)
    out, place = (row_words, row_scales, column_words, column_scales), (matrix, r0, c0)
    scalars += matrix * SCALARS_STRIDE
    random = random_at(scalars, matrix * 0, r0, c0, C, STOCHASTIC)
    signs = signs_at(scalars, SIGNS)
    quantize_tile(
        loaded, out, place, random, signs, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH,
        ROTATION, ROW_CARRY, COLUMN_CARRY, SEEN,
    )  # fmt: skip


@triton.jit
def quantize_gated_gradient_kernel(
    product, row_factors, column_factors, gradient, gradient_row_factors, gradient_column_factors, scalars,
    row_words, row_scales, column_words, column_scales, R, C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, EXACT: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH,
    ROTATION: tl.constexpr, SCALARS_STRIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr, ROW_CARRY: tl.constexpr, COLUMN_CARRY: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes the gradient [V, R, 2 C] of a product, from that of its silu(gate) * up [V, R, C].

    C is a multiple of 32. The arguments are those of `quantize_gated_kernel`, and the gradient as a product.
    The grid is (2 * tiles along C, tiles along R, V): the first half along C computes the gate's part, the
    second the up projection's of the same elements, which it finds in the L2 cache.
    """
    tiles = tl.num_programs(0) // 2
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) % tiles * BLOCK_C
    of_up = tl.program_id(0) // tiles
    matrix = tl.program_id(2).to(tl.int64)
    gate = product.to(tl.pointer_type(tl.int32)) + ((matrix * R + r0) * (2 * C) + c0) // 2
    gradient = gradient.to(tl.pointer_type(tl.int32)) + ((matrix * R + r0) * C + c0) // 2
    row_factors += matrix * R + r0
    gradient_row_factors += matrix * R + r0
    column_factors += matrix * (2 * C) + c0
    gradient_column_factors += matrix * C + c0
    rows, words = R - r0, (C - c0) // 2
    gate_column = column_pairs(column_factors, words, BLOCK_C, EXACT)
    up_column = column_pairs(column_factors + C, words, BLOCK_C, EXACT)
    gradient_column = column_pairs(gradient_column_factors, words, BLOCK_C, EXACT)
    factors = (row_factors, gradient_row_factors, gate_column, up_column, gradient_column)
    if of_up:
        loaded = _load_gradient(gate, gradient, factors, rows, words, C, BLOCK_R, BLOCK_C, EXACT, True)
    else:
        loaded = _load_gradient(gate, gradient, factors, rows, words, C, BLOCK_R, BLOCK_C, EXACT, False)
    out, place = (row_words, row_scales, column_words, column_scales), (matrix, r0, of_up * C + c0)
    end = of_up * C + C
    scalars += matrix * SCALARS_STRIDE
    random = random_at(scalars, matrix * 0, r0, of_up * C + c0, 2 * C, STOCHASTIC)
    signs = signs_at(scalars, SIGNS)
    quantize_tile(
        loaded, out, place, random, signs, R, 2 * C, end, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH,
        COLUMN_LENGTH, ROTATION, ROW_CARRY, COLUMN_CARRY, SEEN,
    )  # fmt: skip


@triton.jit
def random_at(scalars, b, r0, c0, C_ALL: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Returns `random` of `quantize_tile` for the tile at (r0, c0) of matrix b."""
    random = None
    if STOCHASTIC:
        batch, r_all, c_all = place_of(scalars, b, STOCHASTIC)
        random = (scalars + 6, (r_all + r0) // 8, batch * C_ALL + c_all + c0)
    return random


@triton.jit
def signs_at(scalars, SIGNS: tl.constexpr):
    """Returns `signs` of `quantize_tile`."""
    signs = None
    if SIGNS:
        signs = tl.load(scalars + 8)
    return signs


@triton.jit
def _load_gradient(
    gate, gradient, factors, rows, words, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr, OF_UP: tl.constexpr,
):  # fmt: skip
    """Returns GROUP tensors of words of the gradient of the up projection's part, or else of the gate's."""
    row_factors, gradient_row_factors, gate_column, up_column, gradient_column = factors
    loaded = ()
    for i in tl.static_range(GROUP):
        row = row_pairs(row_factors, i, rows, GROUP, BLOCK_R, EXACT)
        gradient_row = row_pairs(gradient_row_factors, i, rows, GROUP, BLOCK_R, EXACT)
        g = load_words(gate, i, rows, words, C, GROUP, BLOCK_R, BLOCK_C, EXACT)
        if OF_UP:
            d = load_words(gradient, i, rows, words, C // 2, GROUP, BLOCK_R, BLOCK_C, EXACT)
            word = up_gradient(g, d, row, gate_column, gradient_row, gradient_column)
        else:
            u = load_words(gate + C // 2, i, rows, words, C, GROUP, BLOCK_R, BLOCK_C, EXACT)
            d = load_words(gradient, i, rows, words, C // 2, GROUP, BLOCK_R, BLOCK_C, EXACT)
            word = gate_gradient(g, u, d, row, gate_column, up_column, gradient_row, gradient_column)
        loaded = loaded + (word,)
    return loaded
