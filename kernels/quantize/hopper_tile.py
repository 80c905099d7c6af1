"""A tile of `mxjax.kernels.quantize.hopper`: quantized along its rows, if wanted, and along its columns.

Two neighbouring elements of a row stay in the word in which they are loaded: they are in two blocks along
columns, but in one along the row. A thread has 16 rows of 8 elements, each row from one 16-byte load. A block
along columns thus spans 2 threads, a block along rows 4, and a run of H16 lies in one thread.
"""

import triton
import triton.language as tl

from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.hopper_ptx import (
    decode_row,
    encode_columns,
    encode_rotated,
    encode_row,
    larger,
    larger_bits,
    larger_halves,
    largest_floats,
    largest_pair,
    pair_factors,
    pair_scales,
)
from mxjax.kernels.device.loads import join_tensors, split_words, store_inside
from mxjax.kernels.device.stochastic_ptx import draw_columns

GROUP = tl.constexpr(16)  # rows per thread


@triton.jit
def quantize_tile(
    loaded, out, place, random, signs, R, C: tl.constexpr, c_end, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, EXACT: tl.constexpr, ROW_LENGTH: tl.constexpr, COLUMN_LENGTH,
    ROTATION: tl.constexpr, ROW_CARRY: tl.constexpr, COLUMN_CARRY: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes the tile at a place (matrix, row, column) of a tensor [V, R, C].

    Args:
      loaded: the tile's words, as `load_words` returns those of each row of the groups.
      out: words and scales of rows, then of columns.
      random: Philox's key, the counter and the row at which the tile begins; None rounds to nearest.
      signs: the rotation's as bits of a word, 1 for negative, the first in the highest; or None.
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
        seen = _quantize_rows(
            tile, words, scales, R - r0, length, ROW_LENGTH, BLOCK_R, BLOCK_C, EXACT, ROW_CARRY, SEEN
        )
        if SEEN:
            tile = seen
    column = matrix * C + c0
    words = column_words + column * (COLUMN_LENGTH // 8) + r0 // 8
    scales = column_scales + column * (COLUMN_LENGTH // 32) + r0 // 32
    length, others = COLUMN_LENGTH - r0, c_end - c0
    _quantize_columns(
        tile, words, scales, random, signs, length, others, COLUMN_LENGTH, BLOCK_R, BLOCK_C, ROTATION, EXACT,
        COLUMN_CARRY,
    )  # fmt: skip


@triton.jit
def _quantize_rows(
    tile, words, scales, rows, length, LENGTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    EXACT: tl.constexpr, CARRY: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Quantizes along rows, two at a time; stores words [rows, length / 8] and scales [rows, length / 32].

    With SEEN it returns the tile's quantized values.
    """
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    row, word = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, QUADS)[None, :]
    w0, w1, w2, w3 = tile
    NAN: tl.constexpr = 254 if CARRY else 253
    written = ()
    s0 = ()
    s1 = ()
    s2 = ()
    s3 = ()
    for i in tl.static_range(0, GROUP, 2):
        first = largest_pair((w0[i], w1[i], w2[i], w3[i]), 4, CARRY)
        second = largest_pair((w0[i + 1], w1[i + 1], w2[i + 1], w3[i + 1]), 4, CARRY)
        largest = tl.reshape(larger_halves(first, second, CARRY), [GROUPS, QUADS // 4, 4])
        pair = pair_scales(_largest_of_lanes(largest, 2, CARRY), 0, CARRY)
        both = _along_row(pair, GROUPS, QUADS)
        if SEEN:
            factors = _along_row(pair_factors(pair), GROUPS, QUADS)
        for k in tl.static_range(2):
            byte, is_nan = _bytes(pair, k, NAN)
            written = written + (byte,)
            codes = encode_row((w0[i + k], w1[i + k], w2[i + k], w3[i + k]), both, k)
            inside = (row + (i + k) < rows) & (word < length // 8)
            pointers = words + (i + k) * (LENGTH // 8) + (row * (LENGTH // 8) + word)
            store_inside(pointers, tl.where(_along_row(is_nan, GROUPS, QUADS), 0, codes), inside, EXACT)
            if SEEN:
                v0, v1, v2, v3 = decode_row(codes, factors, k)
                s0 = s0 + (v0,)
                s1 = s1 + (v1,)
                s2 = s2 + (v2,)
                s3 = s3 + (v3,)
    byte = tl.reshape(join_tensors(written, GROUP), [GROUPS, QUADS // 4, GROUP])
    byte = tl.reshape(tl.permute(byte, [0, 2, 1]), [BLOCK_R, QUADS // 4])
    row, block = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, QUADS // 4)[None, :]
    inside = (row < rows) & (block < length // 32)
    store_inside(scales + (row * (LENGTH // 32) + block), byte.to(tl.uint8), inside, EXACT)
    return s0, s1, s2, s3


@triton.jit
def _quantize_columns(
    tile, words, scales, random, signs, length, others, LENGTH, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, ROTATION: tl.constexpr, EXACT: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """Quantizes along columns, two at a time; stores words and scales as `_quantize_rows` does."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    at = tl.arange(0, GROUPS * 2)[:, None]
    bytes_written = ()
    words_written = ()
    for j in tl.static_range(4):
        two_bytes, four_words = _quantize_two_columns(
            tile[j], 2 * j, random, signs, ROTATION, GROUPS, QUADS, CARRY
        )
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
    ws, after: tl.constexpr, random, signs, ROTATION: tl.constexpr, GROUPS: tl.constexpr,
    QUADS: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
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
            w = ws[i]
            if signs is not None:
                negative = (signs << i & 0x80000000).to(tl.int32)
                w ^= negative | (negative >> 16 & 0x8000)
            lows = lows + ((w << 16).to(tl.float32, bitcast=True),)
            highs = highs + ((w & -65536).to(tl.float32, bitcast=True),)
        lows = rotate_groups(lows, ROTATION, GROUP, GROUPS, QUADS, 1)
        highs = rotate_groups(highs, ROTATION, GROUP, GROUPS, QUADS, 1)
        first, second = largest_floats(lows, GROUP, CARRY), largest_floats(highs, GROUP, CARRY)
        largest = larger_halves(first, second, CARRY)
    else:
        largest = largest_pair(ws, GROUP, CARRY)
    largest = _largest_of_lanes(tl.reshape(largest, [GROUPS // 2, 2, QUADS]), 1, CARRY)
    pair = pair_scales(largest, FOLDED, CARRY)
    NAN: tl.constexpr = (254 if CARRY else 253) - FOLDED
    low_byte, low_nan = _bytes(pair, 0, NAN)
    high_byte, high_nan = _bytes(pair, 1, NAN)
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
def _largest_of_lanes(largest, AXIS: tl.constexpr, CARRY: tl.constexpr):
    """Returns the larger halves of words that `largest_pair` made, along an axis."""
    return tl.reduce(largest, AXIS, larger_bits if CARRY else larger)


@triton.jit
def _bytes(pair, HIGH: tl.constexpr, NAN: tl.constexpr):
    """Returns the scale bytes in one half of `pair_scales`, and whether they are NaN: the byte NAN."""
    byte = pair >> 23 if HIGH else (pair >> 7) & 255
    is_nan = byte == NAN
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
