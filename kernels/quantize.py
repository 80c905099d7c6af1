"""The quantizer kernel: rotates, scales and encodes a tensor along its rows, columns or both, in one read.

A program takes a tile of BLOCK_R x BLOCK_C elements. Each thread loads 8 x 8 of them by 16-byte loads, so
that groups of 8 along either axis lie in its registers; the rest of a block is in neighbouring lanes. What it
writes is K-major: groups along the blocked axis, which a GEMM contracts, are contiguous, so the column-wise
operand is transposed.
"""

import triton
import triton.language as tl

from mxjax.kernels.elements import (
    MAGNITUDE,
    block_scale,
    element_values,
    encode_bf16,
    encode_fp4,
    encode_fp8,
    largest,
    scale_value,
    widen,
)
from mxjax.kernels.elements_cuda import encode_pairs, largest_pairs
from mxjax.kernels.hadamard import rotate_groups
from mxjax.kernels.philox import random_halves

SCALARS = 9  # uint32: two key words and the FP8 reference, for rows and for columns; x's place in the whole


@triton.jit
def quantize_kernel(
    x,
    scalars,
    signs,
    row_words,
    row_scales,
    column_words,
    column_scales,
    BATCH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    R_ALL: tl.constexpr,
    C_ALL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALARS_STRIDE: tl.constexpr,
    SIGNS_STRIDE: tl.constexpr,
    CONVERT: tl.constexpr,
    ROW_FORM: tl.constexpr,
    ROW_LENGTH: tl.constexpr,
    ROW_ROTATION: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    ROW_SIGNS: tl.constexpr,
    ROW_CARRY: tl.constexpr,
    ROW_SQUARE: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr,
    ROW_PRESCALE: tl.constexpr,
    COLUMN_FORM: tl.constexpr,
    COLUMN_LENGTH: tl.constexpr,
    COLUMN_ROTATION: tl.constexpr,
    COLUMN_FACTOR: tl.constexpr,
    COLUMN_SIGNS: tl.constexpr,
    COLUMN_CARRY: tl.constexpr,
    COLUMN_SQUARE: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr,
    COLUMN_PRESCALE: tl.constexpr,
):
    """Quantizes x [V, BATCH, R, C] (any float dtype, row-major) into the operands of one or two GEMMs.

    Each operand is written as words [V, BATCH, other, length / 8, words a group] int32 and scales
    [V, BATCH, other, length / 32] uint8: `length` is the blocked axis filled up to whole blocks and runs.

    Arguments of a side (ROW: blocks along C, other = R; COLUMN: blocks along R, other = C):
      FORM: "" (not wanted), "packed" (E2M1, 1 word a group), "e4m3" or "e5m2" (2 words: the elements times
        2**(scale byte - reference); `scales` then holds 1 where a block does not fit and else 0), "bf16"
        (4 words: the dequantized values).
      LENGTH: of the blocked axis, filled up. ROTATION: the Hadamard size, or 1. SIGNS: whether it has signs.
      CARRY: the scale rule, as `mxjax.scales.rule_carry`. SQUARE: blocks of 32 x 32. PRESCALE: or 1.
    scalars: uint32 [V or 1, SCALARS]; signs: float32 [V or 1, 2, 64], for rows and for columns.

    x is a part of a tensor whose last two axes are R_ALL and C_ALL long, from the batch, row and column that
    scalars 6, 7 and 8 say: random bits go by the position in the whole.
    """
    GROUPS_R: tl.constexpr = BLOCK_R // 8
    GROUPS_C: tl.constexpr = BLOCK_C // 8
    if COLUMN_FORM == "":
        tile_r, tile_c = tl.program_id(1), tl.program_id(0)
    else:
        tile_r, tile_c = tl.program_id(0), tl.program_id(1)
    r0, c0 = tile_r * BLOCK_R, tile_c * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    v, b = matrix // BATCH, matrix % BATCH
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    scalars += v * SCALARS_STRIDE
    signs += v * SIGNS_STRIDE
    batch = tl.load(scalars + 6).to(tl.int32) + b.to(tl.int32)
    r_all, c_all = tl.load(scalars + 7).to(tl.int32), tl.load(scalars + 8).to(tl.int32)
    EXACT: tl.constexpr = R % BLOCK_R == 0 and C % BLOCK_C == 0
    xs = ()
    for i in tl.static_range(8):
        xs = xs + (_load_rows(x + i * C, R - r0 - i, C - c0, C, GROUPS_R, BLOCK_C, EXACT),)
    if COLUMN_FORM != "":
        _quantize_groups(
            xs,
            scalars + 3,
            signs + 64,
            column_words + matrix * C * (COLUMN_LENGTH // 8) * _words(COLUMN_FORM),
            column_scales + matrix * C * (COLUMN_LENGTH // 32),
            r0 // 8,
            c0,
            r_all // 8,
            batch * C_ALL + c_all,
            C,
            GROUPS_R,
            BLOCK_C,
            CONVERT,
            COLUMN_FORM,
            COLUMN_LENGTH,
            COLUMN_ROTATION,
            COLUMN_FACTOR,
            COLUMN_SIGNS,
            COLUMN_CARRY,
            COLUMN_SQUARE,
            COLUMN_STOCHASTIC,
            COLUMN_PRESCALE,
        )
    if ROW_FORM != "":
        _quantize_groups(
            _split_columns(_join_rows(xs, GROUPS_R, BLOCK_C), BLOCK_R, BLOCK_C),
            scalars,
            signs,
            row_words + matrix * R * (ROW_LENGTH // 8) * _words(ROW_FORM),
            row_scales + matrix * R * (ROW_LENGTH // 32),
            c0 // 8,
            r0,
            c_all // 8,
            batch * R_ALL + r_all,
            R,
            GROUPS_C,
            BLOCK_R,
            CONVERT,
            ROW_FORM,
            ROW_LENGTH,
            ROW_ROTATION,
            ROW_FACTOR,
            ROW_SIGNS,
            ROW_CARRY,
            ROW_SQUARE,
            ROW_STOCHASTIC,
            ROW_PRESCALE,
        )


@triton.jit
def _load_rows(x, rows, columns, C: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """Returns rows 0, 8, 16, … of x [rows, columns] with stride C: [GROUPS, WIDTH], 8 columns to a thread.

    Zero outside of x, none of which is read if EXACT.
    """
    if x.dtype.element_ty.primitive_bitwidth == 32:
        # By 16 bytes: the even fours of columns, and the odd.
        r = tl.arange(0, GROUPS)[:, None, None] * 8
        c = tl.arange(0, WIDTH // 8)[None, :, None] * 8 + tl.arange(0, 4)[None, None, :]
        low = _load(x + (r * C + c), (r < rows) & (c < columns), EXACT)
        high = _load(x + (r * C + c) + 4, (r < rows) & (c + 4 < columns), EXACT)
        y = tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [GROUPS, WIDTH])
    else:
        r, c = tl.arange(0, GROUPS)[:, None] * 8, tl.arange(0, WIDTH)[None, :]
        y = _load(x + (r * C + c), (r < rows) & (c < columns), EXACT)
    return y


@triton.jit
def _load(pointers, mask, EXACT: tl.constexpr):
    if EXACT:
        y = tl.load(pointers)
    else:
        y = tl.load(pointers, mask, 0)
    return y


@triton.jit
def _quantize_groups(
    xs,
    scalars,
    signs,
    words,
    scales,
    group0,
    other0,
    counter0,
    row0,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    OTHER: tl.constexpr,
    CONVERT: tl.constexpr,
    FORM: tl.constexpr,
    LENGTH: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    SIGNS: tl.constexpr,
    CARRY: tl.constexpr,
    SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PRESCALE: tl.constexpr,
):
    """Quantizes 8 tensors [GROUPS, OTHER], see `mxjax.kernels.hadamard`; stores them at [other, group]."""
    PAIRS: tl.constexpr = (
        CONVERT == "sm_89"
        and FORM == "packed"
        and ROTATION == 1
        and not STOCHASTIC
        and PRESCALE == 1
        and xs[0].dtype == tl.bfloat16
    )
    FOLDED: tl.constexpr = _folded(ROTATION)
    group = tl.arange(0, GROUPS)
    ys = ()
    if PAIRS:
        amax = largest_pairs(xs)
    else:
        for i in tl.static_range(8):
            y = widen(xs[i])
            if SIGNS:
                y = y * tl.load(signs + (group * 8 + i) % ROTATION)[:, None]
            ys = ys + (y,)
        if ROTATION > 1:
            ys = rotate_groups(ys, ROTATION, GROUPS, OTHER, FACTOR if FOLDED == 0 else 1)
        amax = largest(ys)
    scales += other0.to(tl.int64) * (LENGTH // 32) + group0 // 4
    blocks, others = LENGTH // 32 - group0 // 4, N - other0
    byte = _store_scales(
        amax, scalars, scales, blocks, others, GROUPS, OTHER, FORM, LENGTH, CARRY, SQUARE, 2.0**-FOLDED
    )
    random = (byte, byte, byte, byte, byte, byte, byte, byte)
    if STOCHASTIC:
        # What depends on `byte`, which is never negative, has its layout: random bits need no conversion.
        counter = tl.where(byte >= 0, (counter0 + group0 + group)[:, None], 0).to(tl.uint32)
        row = tl.where(byte >= 0, (row0 + other0 + tl.arange(0, OTHER))[None, :], 0).to(tl.uint32)
        random = random_halves(counter, row, tl.load(scalars), tl.load(scalars + 1))
    divisor = tl.minimum(byte + FOLDED, 255)
    if PAIRS:
        word = tl.where(byte == 255, 0, encode_pairs(xs, byte))
    elif FORM == "packed":
        word = encode_fp4(ys, random, divisor, PRESCALE, STOCHASTIC, CONVERT)
    elif FORM == "bf16":
        w = encode_bf16(element_values(ys, random, divisor, scale_value(byte), PRESCALE, STOCHASTIC))
        word = tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3]))
    else:
        reference = tl.load(scalars + 2).to(tl.int32)
        shifted = tl.minimum(tl.maximum(byte - reference + 127, 0), 254)
        scale = scale_value(tl.where(byte == 255, 255, shifted))
        NATIVE: tl.constexpr = CONVERT == "sm_89" or CONVERT == "sm_100"
        w = encode_fp8(element_values(ys, random, divisor, scale, PRESCALE, STOCHASTIC), FORM == "e5m2", NATIVE)
        word = tl.join(w[0], w[1])
    WORDS: tl.constexpr = _words(FORM)
    if WORDS > 1:
        word = tl.reshape(word, [GROUPS, OTHER, WORDS])
        word = tl.reshape(tl.permute(word, [0, 2, 1]), [GROUPS * WORDS, OTHER])
    words += other0.to(tl.int64) * (LENGTH // 8 * WORDS) + group0 * WORDS
    at = tl.arange(0, GROUPS * WORDS)[:, None]
    other = tl.arange(0, OTHER)[None, :]
    mask = (at < LENGTH // 8 * WORDS - group0 * WORDS) & (other < N - other0)
    tl.store(words + (other * (LENGTH // 8 * WORDS) + at), word, mask)


@triton.jit
def _store_scales(
    amax,
    scalars,
    scales,
    blocks,
    others,
    GROUPS: tl.constexpr,
    OTHER: tl.constexpr,
    FORM: tl.constexpr,
    LENGTH: tl.constexpr,
    CARRY: tl.constexpr,
    SQUARE: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Stores the scale bytes [others, blocks] and returns those of the tile, one a group [GROUPS, OTHER].

    amax: the bits of the largest magnitudes but for FACTOR, in float32.
    """
    BLOCKS: tl.constexpr = GROUPS // 4
    amax = tl.max(tl.reshape(amax, [BLOCKS, 4, OTHER]), 1)
    if FACTOR != 1:
        amax = (amax.to(tl.float32, bitcast=True) * FACTOR).to(tl.int32, bitcast=True) & MAGNITUDE
    if SQUARE:
        amax = tl.max(tl.reshape(amax, [BLOCKS, OTHER // 32, 32]), 2, keep_dims=True)
        amax = tl.reshape(tl.broadcast_to(amax, [BLOCKS, OTHER // 32, 32]), [BLOCKS, OTHER])
    byte = block_scale(amax, CARRY)
    out = byte
    if FORM == "e4m3" or FORM == "e5m2":
        shift = byte - tl.load(scalars + 2).to(tl.int32)
        fits = (shift >= (-8 if FORM == "e4m3" else -15)) & (shift <= (6 if FORM == "e4m3" else 13))
        out = (~(fits | (amax == 0) | (byte == 255))).to(tl.int32)
    block, other = tl.arange(0, BLOCKS)[:, None], tl.arange(0, OTHER)[None, :]
    mask = (block < blocks) & (other < others)
    tl.store(scales + (other * (LENGTH // 32) + block), out.to(tl.uint8), mask)
    return tl.reshape(tl.broadcast_to(byte[:, None, :], [BLOCKS, 4, OTHER]), [GROUPS, OTHER])


@triton.constexpr_function
def _folded(rotation):
    """Returns log2 of 1 / FACTOR where that is whole: then scales take it up, and elements stay as they are."""
    return {4: 1, 16: 2, 64: 3}.get(rotation, 0)


@triton.constexpr_function
def _words(form):
    """Words a group of 8 elements."""
    return {"": 0, "packed": 1, "e4m3": 2, "e5m2": 2, "bf16": 4}[form]


@triton.jit
def _split_columns(x, R: tl.constexpr, C: tl.constexpr):
    """Returns 8 tensors [C / 8, R]: columns 8 * g + i of x [R, C], transposed."""
    even, odd = tl.split(tl.reshape(x, [R, C // 8, 2, 2, 2]))
    x04_26, x15_37 = tl.split(even), tl.split(odd)
    x0, x4 = tl.split(x04_26[0])
    x2, x6 = tl.split(x04_26[1])
    x1, x5 = tl.split(x15_37[0])
    x3, x7 = tl.split(x15_37[1])
    return (
        tl.trans(x0),
        tl.trans(x1),
        tl.trans(x2),
        tl.trans(x3),
        tl.trans(x4),
        tl.trans(x5),
        tl.trans(x6),
        tl.trans(x7),
    )


@triton.jit
def _join_rows(xs, GROUPS: tl.constexpr, C: tl.constexpr):
    """Returns x [8 * GROUPS, C] from its rows 8 * g + i: the inverse of splitting rows."""
    low = tl.join(tl.join(xs[0], xs[1]), tl.join(xs[2], xs[3]))
    high = tl.join(tl.join(xs[4], xs[5]), tl.join(xs[6], xs[7]))
    return tl.reshape(tl.permute(tl.join(low, high), [0, 4, 3, 2, 1]), [8 * GROUPS, C])
