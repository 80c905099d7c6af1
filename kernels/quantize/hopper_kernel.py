"""Hopper's quantizer kernel for training's common case: bfloat16, quantized along columns or both axes.

It computes the same as `mxjax.kernels.quantize.kernel` in fewer instructions, for packed operands and the
rule `floor`; columns may be rotated by H4 or H16, or else rounded stochastically.
`mxjax.kernels.quantize.launches` chooses between the two.

Two neighbouring elements of a row stay in the word in which they are loaded: they are in two blocks along
columns, but in one along the row. A thread has 16 rows of 8 elements, each row from one 16-byte load. A block
along columns thus spans 2 threads, a block along rows 4, and a run of H16 lies in one thread.
"""

import triton
import triton.language as tl

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
from mxjax.kernels.device.loads import join_tensors
from mxjax.kernels.device.stochastic_ptx import draw_columns
from mxjax.kernels.quantize.kernel import place_of

GROUP = tl.constexpr(16)  # rows per thread


@triton.jit
def quantize_pairs_kernel(
    x,
    scalars,
    row_words,
    row_scales,
    column_words,
    column_scales,
    BATCH: tl.constexpr,
    R,
    C: tl.constexpr,
    R_ALL,
    C_ALL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALARS_STRIDE: tl.constexpr,
    EXACT: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ROW_LENGTH: tl.constexpr,
    COLUMN_LENGTH,
    COLUMN_STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
):
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
      FOLDED: log2 of sqrt(ROTATION), folded into the scales.
    """
    if ALONG_ROWS:
        # From the last rows to the first: the L2 cache still has the last of what was written before.
        r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    else:
        r0, c0 = tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    scalars += matrix // BATCH * SCALARS_STRIDE
    batch, r_all, c_all = place_of(scalars, matrix % BATCH, COLUMN_STOCHASTIC)
    r_all, c_all = r_all + r0, c_all + c0
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    x = x.to(tl.pointer_type(tl.int32))
    loaded = ()
    for i in tl.static_range(GROUP):
        loaded = loaded + (load_row(x, i, R - r0, (C - c0) // 2, C // 2, BLOCK_R, BLOCK_C, EXACT),)
    quantize_tile(
        split_words(loaded, BLOCK_R, BLOCK_C),
        row_words,
        row_scales,
        column_words,
        column_scales,
        scalars + 6,
        r_all // 8,
        batch * C_ALL + c_all,
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
        COLUMN_STOCHASTIC,
        ROTATION,
        FOLDED,
    )


@triton.jit
def quantize_tile(
    tile,
    row_words,
    row_scales,
    column_words,
    column_scales,
    key,
    counter0,
    row0,
    matrix,
    r0,
    c0,
    R,
    C: tl.constexpr,
    c_end,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
    ROW_LENGTH: tl.constexpr,
    COLUMN_LENGTH,
    COLUMN_STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Quantizes the tile at row r0 and column c0 of a matrix [R, C], whose tiles end at column `c_end`.

    Args:
      tile: the tile as `split_words` returns it.
      key, counter0, row0: see `_quantize_columns`.
      Others: see `quantize_pairs_kernel`.
    """
    if ROW_LENGTH > 0:
        row = matrix * R + r0
        words = row_words + row * (ROW_LENGTH // 8) + c0 // 8
        scales = row_scales + row * (ROW_LENGTH // 32) + c0 // 32
        length = c_end + (ROW_LENGTH - C) - c0
        _quantize_rows(tile, words, scales, R - r0, length, ROW_LENGTH, BLOCK_R, BLOCK_C, EXACT)
    column = matrix * C + c0
    words = column_words + column * (COLUMN_LENGTH // 8) + r0 // 8
    scales = column_scales + column * (COLUMN_LENGTH // 32) + r0 // 32
    _quantize_columns(
        tile,
        words,
        scales,
        key,
        counter0,
        row0,
        COLUMN_LENGTH - r0,
        c_end - c0,
        COLUMN_LENGTH,
        BLOCK_R,
        BLOCK_C,
        COLUMN_STOCHASTIC,
        ROTATION,
        FOLDED,
        EXACT,
    )


@triton.jit
def load_row(
    x,
    i: tl.constexpr,
    rows,
    words,
    STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Returns the words of row i of each group, [BLOCK_R / GROUP, BLOCK_C / 2]; zeros outside of x."""
    row, word = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP, tl.arange(0, BLOCK_C // 2)[None, :]
    pointers = x + i * STRIDE + (row * STRIDE + word)
    if EXACT:
        return tl.load(pointers)
    return tl.load(pointers, (row + i < rows) & (word < words), 0)


@triton.jit
def split_words(loaded, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns 4 tuples of GROUP tensors [BLOCK_R / GROUP, BLOCK_C / 8]: word 4 q + j of row GROUP g + i."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    w0 = ()
    w1 = ()
    w2 = ()
    w3 = ()
    for i in tl.static_range(GROUP):
        even, odd = tl.split(tl.reshape(loaded[i], [GROUPS, QUADS, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        w0 = w0 + (first,)
        w1 = w1 + (second,)
        w2 = w2 + (third,)
        w3 = w3 + (fourth,)
    return w0, w1, w2, w3


@triton.jit
def _quantize_rows(
    columns,
    words,
    scales,
    rows,
    length,
    LENGTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Quantizes along rows, two at a time; stores words [rows, length / 8] and scales [rows, length / 32]."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    row, word = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, QUADS)[None, :]
    w0, w1, w2, w3 = columns
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
            _store(pointers, tl.where(_along_row(is_nan, GROUPS, QUADS), 0, codes), inside, EXACT)
    byte = tl.reshape(join_tensors(written, GROUP), [GROUPS, QUADS // 4, GROUP])
    byte = tl.reshape(tl.permute(byte, [0, 2, 1]), [BLOCK_R, QUADS // 4])
    row, block = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, QUADS // 4)[None, :]
    inside = (row < rows) & (block < length // 32)
    _store(scales + (row * (LENGTH // 32) + block), byte.to(tl.uint8), inside, EXACT)


@triton.jit
def _quantize_columns(
    columns,
    words,
    scales,
    key,
    counter0,
    row0,
    length,
    others,
    LENGTH,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Quantizes along columns, two at a time; stores words and scales as `_quantize_rows` does.

    The tile begins at Philox's counter `counter0` and row `row0`; both are used if STOCHASTIC.
    """
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    at = tl.arange(0, GROUPS * 2)[:, None]
    bytes_written = ()
    words_written = ()
    for j in tl.static_range(4):
        two_bytes, four_words = _quantize_two_columns(
            columns[j], key, counter0, row0 + 2 * j, STOCHASTIC, ROTATION, FOLDED, GROUPS, QUADS
        )
        bytes_written = bytes_written + two_bytes
        if ROTATION == 1:
            # Stored at once they need fewer registers; after a rotation that takes longer.
            for k in tl.static_range(2):
                column = tl.arange(0, QUADS)[None, :] * 8 + (2 * j + k)
                word = tl.permute(tl.join(four_words[k], four_words[2 + k]), [0, 2, 1])
                inside = (column < others) & (at < length // 8)
                pointers = words + (column * (LENGTH // 8) + at)
                _store(pointers, tl.reshape(word, [GROUPS * 2, QUADS]), inside, EXACT)
        else:
            words_written = words_written + four_words
    column = tl.arange(0, BLOCK_C)[None, :]
    byte = tl.reshape(join_tensors(bytes_written, 8), [GROUPS // 2, BLOCK_C])
    block = tl.arange(0, GROUPS // 2)[:, None]
    inside = (column < others) & (block < length // 32)
    _store(scales + (column * (LENGTH // 32) + block), byte.to(tl.uint8), inside, EXACT)
    if ROTATION > 1:
        word = tl.reshape(join_tensors(words_written, 16), [GROUPS, QUADS, 4, 2, 2])
        word = tl.reshape(tl.permute(word, [0, 3, 1, 2, 4]), [GROUPS * 2, BLOCK_C])
        inside = (column < others) & (at < length // 8)
        _store(words + (column * (LENGTH // 8) + at), word, inside, EXACT)


@triton.jit
def _quantize_two_columns(
    ws,
    key,
    counter0,
    row0,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    FOLDED: tl.constexpr,
    GROUPS: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Quantizes the columns in the low and in the high halves of GROUP tensors of words.

    Returns the scale bytes of both, [GROUPS / 2, QUADS], and four words [GROUPS, QUADS]: low and high of the
    upper 8 rows, then of the lower 8 rows.
    """
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
    if STOCHASTIC:
        counters = counter0 + tl.arange(0, GROUPS)[:, None] * (GROUP // 8)
        counter, row = _in_layout(counters, row0 + tl.arange(0, QUADS)[None, :] * 8, divisors)
        key0, key1 = tl.load(key), tl.load(key + 1)
    words = ()
    for i in tl.static_range(0, GROUP, 8):
        if STOCHASTIC:
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


@triton.jit
def _store(pointers, value, inside, EXACT: tl.constexpr):
    if EXACT:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, inside)
