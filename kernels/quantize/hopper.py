"""Hopper's quantizer kernels for training's common case: bfloat16, quantized along columns or both axes.

They compute the same as `mxjax.kernels.quantize.kernel` in fewer instructions, for packed operands and the
rule `floor`; columns may be rotated by H4 or H16, or else rounded stochastically.
`mxjax.kernels.quantize.launches` chooses. One kernel reads the tensor itself. The others compute it where
they quantize it (`mxjax.operands.computed`), so that its values are never stored.

Two neighbouring elements of a row stay in the word in which they are loaded: they are in two blocks along
columns, but in one along the row. A thread has 16 rows of 8 elements, each row from one 16-byte load. A block
along columns thus spans 2 threads, a block along rows 4, and a run of H16 lies in one thread.
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
from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.hopper_ptx import (
    encode_columns,
    encode_rotated,
    encode_row,
    larger,
    larger_halves,
    largest_floats,
    largest_pair,
    pair_scales,
)
from mxjax.kernels.device.loads import join_tensors, load_words, split_words, store_inside
from mxjax.kernels.device.stochastic_ptx import draw_columns
from mxjax.kernels.quantize.kernel import place_of

GROUP = tl.constexpr(16)  # rows per thread


@triton.jit
def quantize_pairs_kernel(
    x, scalars, row_words, row_scales, column_words, column_scales, BATCH: tl.constexpr, R, C: tl.constexpr,
    R_ALL, C_ALL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SCALARS_STRIDE: tl.constexpr,
    EXACT: tl.constexpr, ALONG_ROWS: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH,
    COLUMN_STOCHASTIC: tl.constexpr, ROTATION: tl.constexpr,
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
    """
    if ALONG_ROWS:
        # From the last rows to the first: the L2 cache still has the last of what was written before.
        r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    else:
        r0, c0 = tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    random = None
    if COLUMN_STOCHASTIC:
        scalars += matrix // BATCH * SCALARS_STRIDE
        batch, r_all, c_all = place_of(scalars, matrix % BATCH, COLUMN_STOCHASTIC)
        r_all, c_all = r_all + r0, c_all + c0
        random = (scalars + 6, r_all // 8, batch * C_ALL + c_all)
    x = (x + (matrix * R * C + r0.to(tl.int64) * C + c0)).to(tl.pointer_type(tl.int32))
    loaded = ()
    for i in tl.static_range(GROUP):
        loaded = loaded + (load_words(x, i, R - r0, (C - c0) // 2, C // 2, GROUP, BLOCK_R, BLOCK_C, EXACT),)
    out, place = (row_words, row_scales, column_words, column_scales), (matrix, r0, c0)
    quantize_tile(
        loaded, out, place, random, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH, ROTATION
    )


@triton.jit
def quantize_normed_kernel(
    x, factors, scale, row_words, row_scales, column_words, column_scales, R, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EXACT: tl.constexpr, ROW_LENGTH: tl.constexpr,
    COLUMN_LENGTH, ROTATION: tl.constexpr,
):  # fmt: skip
    """Quantizes x * factors * scale along its columns and its rows. Each product is rounded to bfloat16.

    x [V, R, C] and scale [V, C] are in bfloat16, factors [V, R] in float32. Results and the other arguments
    are as in `quantize_pairs_kernel`, with V for V * BATCH. The grid is (tiles along C, tiles along R, V),
    from the last rows to the first, of which the L2 cache still has the last.
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
    quantize_tile(
        loaded, out, place, None, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH, ROTATION
    )


@triton.jit
def quantize_gated_kernel(
    product, row_factors, column_factors, row_words, row_scales, column_words, column_scales, R,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr, COLUMN_LENGTH, ROTATION: tl.constexpr,
):  # fmt: skip
    """Quantizes silu(gate) * up [V, R, C] of a product [V, R, 2 C] along its columns and its rows.

    Gate's columns come first. The product is as GEMMs leave it (`mxjax.operands.product.Product`): in
    bfloat16, with row_factors [V, R] and column_factors [V, 2 C], powers of two in float32. The result is
    computed in float32 and rounded to bfloat16. Results and the other arguments are as in
    `quantize_pairs_kernel`, with V for V * BATCH. The grid is (tiles along C, tiles along R, V).
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
    quantize_tile(
        loaded, out, place, None, R, C, C, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH, ROTATION
    )


@triton.jit
def quantize_gated_gradient_kernel(
    product, row_factors, column_factors, gradient, gradient_row_factors, gradient_column_factors, row_words,
    row_scales, column_words, column_scales, R, C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, EXACT: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH,
    ROTATION: tl.constexpr,
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
    quantize_tile(
        loaded, out, place, None, R, 2 * C, end, BLOCK_R, BLOCK_C, EXACT, ROW_LENGTH, COLUMN_LENGTH, ROTATION
    )


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


@triton.jit
def quantize_tile(
    loaded, out, place, random, R, C: tl.constexpr, c_end, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH, ROTATION: tl.constexpr,
):  # fmt: skip
    """Quantizes the tile at a place (matrix, row, column) of a tensor [V, R, C].

    Args:
      loaded: the tile's words, as `load_words` returns those of each row of the groups.
      out: words and scales of rows, then of columns.
      random: Philox's key, the counter and the row at which the tile begins; None rounds to nearest.
      c_end: the column at which the tiles end.
      Others: see `quantize_pairs_kernel`.
    """
    row_words, row_scales, column_words, column_scales = out
    matrix, r0, c0 = place
    tile = split_words(loaded, GROUP, BLOCK_R, BLOCK_C)
    if ROW_LENGTH > 0:
        row = matrix * R + r0
        words = row_words + row * (ROW_LENGTH // 8) + c0 // 8
        scales = row_scales + row * (ROW_LENGTH // 32) + c0 // 32
        length = c_end + (ROW_LENGTH - C) - c0
        _quantize_rows(tile, words, scales, R - r0, length, ROW_LENGTH, BLOCK_R, BLOCK_C, EXACT)
    column = matrix * C + c0
    words = column_words + column * (COLUMN_LENGTH // 8) + r0 // 8
    scales = column_scales + column * (COLUMN_LENGTH // 32) + r0 // 32
    length, others = COLUMN_LENGTH - r0, c_end - c0
    _quantize_columns(
        tile, words, scales, random, length, others, COLUMN_LENGTH, BLOCK_R, BLOCK_C, ROTATION, EXACT
    )


@triton.jit
def _quantize_rows(
    tile, words, scales, rows, length, LENGTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Quantizes along rows, two at a time; stores words [rows, length / 8] and scales [rows, length / 32]."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    row, word = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, QUADS)[None, :]
    w0, w1, w2, w3 = tile
    written = ()
    for i in tl.static_range(0, GROUP, 2):
        first = largest_pair((w0[i], w1[i], w2[i], w3[i]), 4)
        second = largest_pair((w0[i + 1], w1[i + 1], w2[i + 1], w3[i + 1]), 4)
        largest = tl.reshape(larger_halves(first, second), [GROUPS, QUADS // 4, 4])
        pair = pair_scales(tl.reduce(largest, 2, larger), 0)
        both = _along_row(pair, GROUPS, QUADS)
        for k in tl.static_range(2):
            byte, is_nan = _bytes(pair, k, 0)
            written = written + (byte,)
            codes = encode_row((w0[i + k], w1[i + k], w2[i + k], w3[i + k]), both, k)
            inside = (row + (i + k) < rows) & (word < length // 8)
            pointers = words + (i + k) * (LENGTH // 8) + (row * (LENGTH // 8) + word)
            store_inside(pointers, tl.where(_along_row(is_nan, GROUPS, QUADS), 0, codes), inside, EXACT)
    byte = tl.reshape(join_tensors(written, GROUP), [GROUPS, QUADS // 4, GROUP])
    byte = tl.reshape(tl.permute(byte, [0, 2, 1]), [BLOCK_R, QUADS // 4])
    row, block = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, QUADS // 4)[None, :]
    inside = (row < rows) & (block < length // 32)
    store_inside(scales + (row * (LENGTH // 32) + block), byte.to(tl.uint8), inside, EXACT)


@triton.jit
def _quantize_columns(
    tile, words, scales, random, length, others, LENGTH, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    ROTATION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Quantizes along columns, two at a time; stores words and scales as `_quantize_rows` does."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    at = tl.arange(0, GROUPS * 2)[:, None]
    bytes_written = ()
    words_written = ()
    for j in tl.static_range(4):
        two_bytes, four_words = _quantize_two_columns(tile[j], 2 * j, random, ROTATION, GROUPS, QUADS)
        bytes_written = bytes_written + two_bytes
        if ROTATION == 1:
            # Stored at once they need fewer registers; after a rotation that takes longer.
            for k in tl.static_range(2):
                column = tl.arange(0, QUADS)[None, :] * 8 + (2 * j + k)
                word = tl.permute(tl.join(four_words[k], four_words[2 + k]), [0, 2, 1])
                inside = (column < others) & (at < length // 8)
                pointers = words + (column * (LENGTH // 8) + at)
                store_inside(pointers, tl.reshape(word, [GROUPS * 2, QUADS]), inside, EXACT)
        else:
            words_written = words_written + four_words
    column = tl.arange(0, BLOCK_C)[None, :]
    byte = tl.reshape(join_tensors(bytes_written, 8), [GROUPS // 2, BLOCK_C])
    block = tl.arange(0, GROUPS // 2)[:, None]
    inside = (column < others) & (block < length // 32)
    store_inside(scales + (column * (LENGTH // 32) + block), byte.to(tl.uint8), inside, EXACT)
    if ROTATION > 1:
        word = tl.reshape(join_tensors(words_written, 16), [GROUPS, QUADS, 4, 2, 2])
        word = tl.reshape(tl.permute(word, [0, 3, 1, 2, 4]), [GROUPS * 2, BLOCK_C])
        inside = (column < others) & (at < length // 8)
        store_inside(words + (column * (LENGTH // 8) + at), word, inside, EXACT)


@triton.jit
def _quantize_two_columns(
    ws, after: tl.constexpr, random, ROTATION: tl.constexpr, GROUPS: tl.constexpr, QUADS: tl.constexpr
):
    """Quantizes the columns in the low and in the high halves of GROUP tensors of words.

    Returns the scale bytes of both, [GROUPS / 2, QUADS], and four words [GROUPS, QUADS]: low and high of the
    upper 8 rows, then of the lower 8 rows. They are `after` columns from the first of each eight.
    """
    # log2 of the rotation's factor sqrt(ROTATION), which the scales take
    FOLDED: tl.constexpr = 2 if ROTATION == 16 else (1 if ROTATION == 4 else 0)
    if ROTATION > 1:
        lows = ()
        highs = ()
        for i in tl.static_range(GROUP):
            lows = lows + ((ws[i] << 16).to(tl.float32, bitcast=True),)
            highs = highs + ((ws[i] & -65536).to(tl.float32, bitcast=True),)
        lows = rotate_groups(lows, ROTATION, GROUP, GROUPS, QUADS, 1)
        highs = rotate_groups(highs, ROTATION, GROUP, GROUPS, QUADS, 1)
        largest = larger_halves(largest_floats(lows, GROUP), largest_floats(highs, GROUP))
    else:
        largest = largest_pair(ws, GROUP)
    largest = tl.reduce(tl.reshape(largest, [GROUPS // 2, 2, QUADS]), 1, larger)
    pair = pair_scales(largest, FOLDED)
    low_byte, low_nan = _bytes(pair, 0, FOLDED)
    high_byte, high_nan = _bytes(pair, 1, FOLDED)
    low_nan, high_nan = _along_columns(low_nan, GROUPS, QUADS), _along_columns(high_nan, GROUPS, QUADS)
    divisors = _along_columns(pair, GROUPS, QUADS) + 0x00800080 * FOLDED
    if random is not None:
        key, counter0, row0 = random
        row0 += after
        counters = counter0 + tl.arange(0, GROUPS)[:, None] * (GROUP // 8)
        counter, row = _in_layout(counters, row0 + tl.arange(0, QUADS)[None, :] * 8, divisors)
        key0, key1 = tl.load(key), tl.load(key + 1)
    words = ()
    for i in tl.static_range(0, GROUP, 8):
        if random is not None:
            low, high = draw_columns(ws, i, divisors, counter + i // 8, row, key0, key1)
        elif ROTATION > 1:
            low = encode_rotated(lows, i, divisors, 0)
            high = encode_rotated(highs, i, divisors, 1)
        else:
            low, high = encode_columns(ws, i, divisors)
        words = words + (tl.where(low_nan, 0, low), tl.where(high_nan, 0, high))
    return (low_byte, high_byte), words


@triton.jit
def _bytes(pair, HIGH: tl.constexpr, FOLDED: tl.constexpr):
    """Returns the scale bytes in one half of `pair_scales`, and whether they are NaN."""
    byte = pair >> 23 if HIGH else (pair >> 7) & 255
    is_nan = byte == 253 - FOLDED
    return tl.where(is_nan, 255, byte), is_nan


@triton.jit
def _in_layout(counter, row, scales):
    """Returns Philox's counters and rows as uint32, in the shape and layout of `scales`.

    Those are never negative, so that their values do not matter. Without the dependence Triton would convert
    counters and rows through shared memory.
    """
    return tl.where(scales >= 0, counter, 0).to(tl.uint32), tl.where(scales >= 0, row, 0).to(tl.uint32)


@triton.jit
def _along_row(x, GROUPS: tl.constexpr, QUADS: tl.constexpr):
    """Broadcasts one value for each block along rows [GROUPS, QUADS / 4] to its quads [GROUPS, QUADS]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [GROUPS, QUADS // 4, 4]), [GROUPS, QUADS])


@triton.jit
def _along_columns(x, GROUPS: tl.constexpr, QUADS: tl.constexpr):
    """Broadcasts one value for each block along columns [GROUPS / 2, QUADS] to its groups [GROUPS, QUADS]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [GROUPS // 2, 2, QUADS]), [GROUPS, QUADS])
