"""The quantizer kernel: rotates, scales and encodes a tensor along its rows, columns or both, in one read.

A program takes a tile of BLOCK_R x BLOCK_C elements, in groups along the blocked axis. A group lies in the
registers of one thread. Groups of 8 are loaded once for both sides, 16 bytes at a time; neighbouring lanes
have the rest of a block. Groups of 32 are whole blocks: scales and rotations up to H32 need no exchange
between lanes, and the second side finds its tile in the L1 cache. Groups of 64 are whole runs of H64, of
which all threads have the same signs. Operands are written K-major: groups along the blocked axis, which a
GEMM contracts, are contiguous, so the column-wise operand is transposed.
"""

from typing import Literal

import triton
import triton.language as tl

from mxjax.kernels.device.elements import (
    MAGNITUDE,
    block_scale,
    element_values,
    encode_bf16,
    encode_drawn,
    encode_fp4,
    largest,
    scale_value,
    widen,
)
from mxjax.kernels.device.elements_ptx import encode_pairs, largest_exponent, largest_pairs
from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.loads import column_groups, join_tensors, row_groups, transpose_groups
from mxjax.kernels.device.philox import random_halves
from mxjax.kernels.device.quest import QUEST, quest_bytes, saturating

Form = Literal["packed", "bf16"]
"""The kernel's output: two E2M1 elements a byte, or the dequantized values in bfloat16."""

SCALARS = 15
"""uint32: for rows two words of the key and four of signs, the same for columns, and three offsets of x."""
SIGN = tl.constexpr(0x80000000)


@triton.jit
def quantize_kernel(
    x, scalars, row_words, row_scales, column_words, column_scales, BATCH: tl.constexpr, R, C: tl.constexpr,
    R_ALL, C_ALL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    SCALARS_STRIDE: tl.constexpr, CONVERT: tl.constexpr, EXACT: tl.constexpr, ALONG_ROWS: tl.constexpr,
    ROW_FORM: tl.constexpr, ROW_LENGTH: tl.constexpr, ROW_ROTATION: tl.constexpr, ROW_FACTOR: tl.constexpr,
    ROW_SIGNS: tl.constexpr, ROW_CARRY: tl.constexpr, ROW_SQUARE: tl.constexpr, ROW_STOCHASTIC: tl.constexpr,
    ROW_PRESCALE: tl.constexpr, COLUMN_FORM: tl.constexpr, COLUMN_LENGTH, COLUMN_ROTATION: tl.constexpr,
    COLUMN_FACTOR: tl.constexpr, COLUMN_SIGNS: tl.constexpr, COLUMN_CARRY: tl.constexpr,
    COLUMN_SQUARE: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, COLUMN_PRESCALE: tl.constexpr,
):  # fmt: skip
    """Quantizes x [V, BATCH, R, C] (any float dtype, row-major) into the operands of one or two GEMMs.

    Each operand is written as words [V, BATCH, other, length / 8, words a group] int32 and scales
    [V, BATCH, other, length / 32] uint8. `length` is the blocked axis, padded to whole blocks and rotations.

    x may be a part of a tensor whose last two axes have lengths R_ALL and C_ALL. The last three scalars are
    its batch, row and column offsets: random bits depend on the position in the whole tensor.

    Args:
      scalars: uint32 [V or 1, SCALARS]; not read if no side is stochastic or has signs.
      ALONG_ROWS: whether the grid is (tiles along C, tiles along R, V * BATCH), else the first two change
        places.
    Constants of a side (ROW: blocks along C, other = R; COLUMN: blocks along R, other = C):
      FORM: "" (not wanted), "packed" (E2M1, 1 word a group) or "bf16" (dequantized values, 4 words).
      LENGTH: padded length of the blocked axis.
      ROTATION: Hadamard size, or 1.
      FACTOR: 1 / sqrt(ROTATION).
      SIGNS: whether the rotation has signs. A sign is a bit, 1 for negative, the first in the highest.
      CARRY: `mxjax.numerics.scales.rule_carry` of the scale rule, or QUEST.
      SQUARE: whether blocks are 32 x 32.
      STOCHASTIC: whether rounding is stochastic.
      PRESCALE: factor of the elements, or 1.
    """
    GROUPS_R: tl.constexpr = BLOCK_R // GROUP
    GROUPS_C: tl.constexpr = BLOCK_C // GROUP
    if ALONG_ROWS:
        tile_r, tile_c = tl.program_id(1), tl.program_id(0)
    else:
        tile_r, tile_c = tl.program_id(0), tl.program_id(1)
    r0, c0 = tile_r * BLOCK_R, tile_c * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    v, b = matrix // BATCH, matrix % BATCH
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    scalars += v * SCALARS_STRIDE
    batch, r_all, c_all = place_of(scalars, b, ROW_STOCHASTIC or COLUMN_STOCHASTIC)
    if ROW_FORM != "" and GROUP >= 32:
        row_xs = row_groups(x, R - r0, C - c0, C, GROUP, GROUPS_C, BLOCK_R, EXACT)
    if COLUMN_FORM != "" or GROUP == 8:
        xs = column_groups(x, R - r0, C - c0, C, GROUP, GROUPS_R, BLOCK_C, EXACT)
    if COLUMN_FORM != "":
        _quantize_groups(
            xs, scalars + 6, column_words + matrix * C * (COLUMN_LENGTH // 8) * words_of(COLUMN_FORM),
            column_scales + matrix * C * (COLUMN_LENGTH // 32), r0, c0, r_all // 8, batch * C_ALL + c_all, C,
            GROUP, GROUPS_R, BLOCK_C, CONVERT, COLUMN_FORM, COLUMN_LENGTH, COLUMN_ROTATION, COLUMN_FACTOR,
            COLUMN_SIGNS, COLUMN_CARRY, COLUMN_SQUARE, COLUMN_STOCHASTIC, COLUMN_PRESCALE,
        )  # fmt: skip
    if ROW_FORM != "":
        if GROUP == 8:
            row_xs = transpose_groups(xs, GROUPS_R, BLOCK_C)
        _quantize_groups(
            row_xs, scalars, row_words + matrix * R * (ROW_LENGTH // 8) * words_of(ROW_FORM),
            row_scales + matrix * R * (ROW_LENGTH // 32), c0, r0, c_all // 8, batch * R_ALL + r_all, R, GROUP,
            GROUPS_C, BLOCK_R, CONVERT, ROW_FORM, ROW_LENGTH, ROW_ROTATION, ROW_FACTOR, ROW_SIGNS, ROW_CARRY,
            ROW_SQUARE, ROW_STOCHASTIC, ROW_PRESCALE,
        )  # fmt: skip


@triton.jit
def place_of(scalars, b, STOCHASTIC: tl.constexpr):
    """Returns the batch, row and column at which matrix b of x begins in the whole tensor, if STOCHASTIC."""
    batch, r_all, c_all = b.to(tl.int32), 0, 0
    if STOCHASTIC:
        batch += tl.load(scalars + 12).to(tl.int32)
        r_all, c_all = tl.load(scalars + 13).to(tl.int32), tl.load(scalars + 14).to(tl.int32)
    return batch, r_all, c_all


@triton.jit
def _quantize_groups(
    xs, scalars, words, scales, start, other0, counter0, row0, N, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    OTHER: tl.constexpr, CONVERT: tl.constexpr, FORM: tl.constexpr, LENGTH, ROTATION: tl.constexpr,
    FACTOR: tl.constexpr, SIGNS: tl.constexpr, CARRY: tl.constexpr, SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr, PRESCALE: tl.constexpr,
):  # fmt: skip
    """Quantizes GROUP tensors [GROUPS, OTHER] (see `rotate_groups`) and stores them at [other, group].

    The tile begins at element `start` of the blocked axis and at `other0` of the other axis.
    """
    PAIRS: tl.constexpr = (
        CONVERT == "sm_90"
        and FORM == "packed"
        and ROTATION == 1
        and not STOCHASTIC
        and PRESCALE == 1
        and CARRY != QUEST
        and xs[0].dtype == tl.bfloat16
    )
    PTX: tl.constexpr = CONVERT == "sm_89" or CONVERT == "sm_90" or CONVERT == "sm_100"
    DRAWN: tl.constexpr = PTX and CONVERT != "sm_89" and FORM == "packed" and STOCHASTIC
    # On gfx950 LLVM packs sums that no product follows, which costs moves of their operands.
    FOLDED: tl.constexpr = 0 if CONVERT == "gfx950" or CARRY == QUEST else _folded(ROTATION)
    WORDS: tl.constexpr = GROUP // 8 * words_of(FORM)
    PART: tl.constexpr = min(GROUP, 32)  # of one block
    BLOCKS: tl.constexpr = GROUP // PART
    group, other = tl.arange(0, GROUPS), tl.arange(0, OTHER)
    if not PAIRS:
        ys = ()
        for i in tl.static_range(GROUP):
            if SIGNS:
                if GROUP == 64 and i % PART == 0:
                    negative = tl.load(scalars + 2 + i // PART)
                elif i == 0:
                    negative = group_signs(scalars + 2, group[:, None], GROUP, ROTATION, CONVERT)
                # A sum changes the sign: with the shift that widens, it is one operation.
                y = widen(xs[i]).to(tl.uint32, bitcast=True) + (negative << i % PART & SIGN)
                ys = ys + (y.to(tl.float32, bitcast=True),)
            else:
                ys = ys + (widen(xs[i]),)
        xs = ys
        if ROTATION > 1:
            xs = rotate_groups(xs, ROTATION, GROUP, GROUPS, OTHER, FACTOR if FOLDED == 0 else 1)
    scales += other0.to(tl.int64) * (LENGTH // 32) + start // 32
    others = N - other0
    ws = ()
    for i in tl.static_range(0, GROUP, 8):
        if i % PART == 0:
            block = _part(xs, i, PART)
            if PAIRS:
                amax = largest_pairs(block, PART, CARRY == 0)
            elif CARRY == QUEST:
                amax = quest_bytes(block, PART, GROUPS, OTHER)
            elif CONVERT == "sm_90" and CARRY == 0:
                amax = largest_exponent(block, PART)
            else:
                amax = largest(block, PART)
            blocks = (LENGTH - start) // 32 - i // PART
            byte = _store_scales(
                amax, scales + i // PART, blocks, others, BLOCKS, PART, GROUPS, OTHER, LENGTH, CARRY, SQUARE,
                2.0**-FOLDED,
            )  # fmt: skip
            divisor = tl.minimum(byte + FOLDED, 255)
            if CARRY == QUEST:
                block = saturating(block, byte, PART)
        eight = _part(block, i % PART, 8)
        random = (byte, byte, byte, byte, byte, byte, byte, byte)
        if STOCHASTIC:
            # A dependence on `byte`, which is never negative, gives random bits its layout: no conversion.
            counter = (counter0 + start // 8 + group * (GROUP // 8) + i // 8)[:, None]
            counter = tl.where(byte >= 0, counter, 0).to(tl.uint32)
            row = tl.where(byte >= 0, (row0 + other0 + other)[None, :], 0).to(tl.uint32)
            key0, key1 = tl.load(scalars), tl.load(scalars + 1)
            if not DRAWN:
                random = random_halves(counter, row, key0, key1, PTX)
        if PAIRS:
            ws = ws + (tl.where(byte == 255, 0, encode_pairs(eight, byte)),)
        elif DRAWN:
            ws = ws + (encode_drawn(eight, divisor, PRESCALE, CARRY != QUEST, counter, row, key0, key1),)
        elif FORM == "packed":
            ws = ws + (encode_fp4(eight, random, divisor, PRESCALE, STOCHASTIC, CONVERT),)
        else:
            scale = scale_value(byte)
            ws = ws + encode_bf16(element_values(eight, random, divisor, scale, PRESCALE, STOCHASTIC))
    words += other0.to(tl.int64) * (LENGTH // 8 * words_of(FORM)) + start // 8 * words_of(FORM)
    at = tl.arange(0, GROUPS * WORDS)[:, None]
    mask = (at < (LENGTH - start) // 8 * words_of(FORM)) & (other[None, :] < others)
    word = join_words(ws, WORDS, GROUPS, OTHER)
    tl.store(words + (other[None, :] * (LENGTH // 8 * words_of(FORM)) + at), word, mask)


@triton.jit
def _part(xs, start: tl.constexpr, COUNT: tl.constexpr):
    """Returns COUNT of the tensors, from `start` on."""
    part = ()
    for i in tl.static_range(COUNT):
        part = part + (xs[start + i],)
    return part


@triton.jit
def group_signs(words, group, GROUP: tl.constexpr, ROTATION: tl.constexpr, CONVERT: tl.constexpr):
    """Returns the signs of each group's elements as bits, the first in the highest.

    They are the bits of four words, the first repeated if ROTATION is less than 32. A load of each sign would
    cost Triton's pass over memory accesses up to minutes.
    """
    word = tl.load(words) + tl.zeros_like(group).to(tl.uint32)
    for i in tl.static_range(1, ROTATION // 32):
        word = tl.where(group * GROUP % ROTATION < 32 * i, word, tl.load(words + i))
    word = word << (group * GROUP % 32).to(tl.uint32)
    if CONVERT == "gfx950":  # in scalar registers, those of all groups would not fit
        word = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [word], tl.uint32, True, 1)
    return word


@triton.jit
def _store_scales(
    amax, scales, blocks, others, STEP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    OTHER: tl.constexpr, LENGTH, CARRY: tl.constexpr, SQUARE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Stores every STEP-th of scale bytes [others, blocks] and returns them, one a group [GROUPS, OTHER].

    Args:
      amax: float32 bits of the largest magnitudes, not yet multiplied by FACTOR; with QUEST the bytes.
    """
    BLOCKS: tl.constexpr = GROUPS * GROUP // 32
    if CARRY == QUEST:
        byte = amax
    else:
        if GROUP < 32:
            amax = tl.max(tl.reshape(amax, [BLOCKS, 32 // GROUP, OTHER]), 1)
        if FACTOR != 1:
            amax = (amax.to(tl.float32, bitcast=True) * FACTOR).to(tl.int32, bitcast=True) & MAGNITUDE
        if SQUARE:
            amax = tl.max(tl.reshape(amax, [BLOCKS, OTHER // 32, 32]), 2, keep_dims=True)
            amax = tl.reshape(tl.broadcast_to(amax, [BLOCKS, OTHER // 32, 32]), [BLOCKS, OTHER])
        byte = block_scale(amax, CARRY)
    block, other = tl.arange(0, BLOCKS)[:, None] * STEP, tl.arange(0, OTHER)[None, :]
    mask = (block < blocks) & (other < others)
    tl.store(scales + (other * (LENGTH // 32) + block), byte.to(tl.uint8), mask)
    if GROUP < 32:
        byte = tl.reshape(tl.broadcast_to(byte[:, None, :], [BLOCKS, 32 // GROUP, OTHER]), [GROUPS, OTHER])
    return byte


@triton.constexpr_function
def _folded(rotation):
    """Returns log2(1 / FACTOR) if it is an integer, which scales then absorb instead of elements, else 0."""
    return {4: 1, 16: 2, 64: 3}.get(rotation, 0)


@triton.constexpr_function
def words_of(form):
    """Returns the number of 32-bit words for 8 elements."""
    return {"": 0, "packed": 1, "bf16": 4}[form]


@triton.jit
def join_words(ws, WORDS: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    """Returns WORDS tensors [GROUPS, OTHER] as one [GROUPS * WORDS, OTHER]; WORDS is a power of two."""
    word = join_tensors(ws, WORDS)
    if WORDS > 1:
        word = tl.permute(tl.reshape(word, [GROUPS, OTHER, WORDS]), [0, 2, 1])
        word = tl.reshape(word, [GROUPS * WORDS, OTHER])
    return word
