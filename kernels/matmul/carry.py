"""The kernel that converts packed MXFP4 operands to FP8 carriers (`mxjax.operands.carriers`)."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, UInt8

from mxjax.kernels.device.elements import encode_fp8, scale_value
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.numerics.formats import BLOCK, E2M1
from mxjax.operands.carriers import (
    CARRIER_DTYPES,
    LEAST_FACTOR,
    SHIFTS,
    UNIT_BYTES,
    Carried,
    Carrier,
    group_of,
)
from mxjax.runtime.devices import Target

BLOCKS = 256  # per program, at most
MOST_ROWS = 32  # per program, a bit of its flags each
_WORDS = BLOCK // 8  # words of 8 elements per block
_LEAST_UNIT, _LARGEST_UNIT = tl.constexpr(UNIT_BYTES[0]), tl.constexpr(UNIT_BYTES[1])
_LEAST_FACTOR = tl.constexpr(LEAST_FACTOR)
_E4M3_LOW, _E4M3_HIGH = map(tl.constexpr, SHIFTS["e4m3"])
_E5M2_LOW, _E5M2_HIGH = map(tl.constexpr, SHIFTS["e5m2"])
_BLOCK_MAX = tl.constexpr(BLOCK * E2M1.max)  # no block's magnitudes add up to more

# prmt selects a byte of {$4:$3} by each of 4 nibbles: the FP8 value of a code's magnitude. If a nibble's
# highest bit is set, it replicates the byte's sign bit instead, so that 0x80 becomes 0xff for negative codes.
_DECODE = tl.constexpr("""{
.reg .b32 select, sign, rest;
and.b32 select, $2, 0x77777777;
prmt.b32 $0, $3, $4, select;
shr.u32 select, select, 16;
prmt.b32 $1, $3, $4, select;
mov.b32 sign, 0x80808080;
shr.u32 rest, $2, 16;
prmt.b32 rest, sign, sign, rest;
prmt.b32 sign, sign, sign, $2;
shl.b32 rest, rest, 7;
shl.b32 sign, sign, 7;
and.b32 rest, rest, 0x80808080;
and.b32 sign, sign, 0x80808080;
or.b32 $0, $0, sign;
or.b32 $1, $1, rest;
}""")


def carry_operand(
    elements: UInt8[Array, "batch n bytes"],
    scales: UInt8[Array, "batch n blocks"],
    carrier: Carrier,
    target: Target | None,
    grouped: bool = False,
) -> Carried:
    """Returns a packed operand in FP8, bit for bit as `mxjax.operands.carriers.carry` does.

    Args:
      grouped: whether the result has `grouped`, `group_scales`, `far` and `lost_sum`, where one program takes
        whole rows.
    """
    batch, n, blocks = scales.shape
    constants = constants_of(n, blocks, carrier, target, grouped)
    written = triton_call(
        carry_kernel,
        _words_of(elements),
        scales,
        out=outputs_of(batch, n, blocks, has_groups=constants["GROUP"] > 0),
        grid=(programs_of(n, blocks), batch),
        num_warps=4,
        **constants,
    )
    return _carried(written, carrier, has_groups=constants["GROUP"] > 0)


def carry_operands(
    lhs: tuple[UInt8[Array, "batch m bytes"], UInt8[Array, "batch m blocks"]],
    rhs: tuple[UInt8[Array, "batch n bytes"], UInt8[Array, "batch n blocks"]],
    carriers: tuple[Carrier, Carrier],
    target: Target | None,
    grouped: bool = False,
) -> tuple[Carried, Carried]:
    """Returns both operands of a product in FP8. One launch converts them, as `carry_operand` does each.

    Args:
      grouped: as in `carry_operand`, for lhs.
    """
    (batch, m, blocks), n = lhs[1].shape, rhs[1].shape[1]
    constants = constants_of(m, blocks, carriers[0], target, grouped)
    has_groups = constants["GROUP"] > 0
    left = outputs_of(batch, m, blocks, has_groups=has_groups)
    right = outputs_of(batch, n, blocks, has_groups=False)[:3]
    written = triton_call(
        carry_both_kernel,
        *(_words_of(lhs[0]), lhs[1], _words_of(rhs[0]), rhs[1]),
        out=[*left, *right],
        grid=(programs_of(m, blocks) + programs_of(n, blocks), batch),
        num_warps=4,
        **constants,
        OTHER_N=n,
        OTHER_E5M2=carriers[1] == "e5m2",
    )
    return (
        _carried(written[: len(left)], carriers[0], has_groups=has_groups),
        _carried(written[len(left) :], carriers[1], has_groups=False),
    )


def _words_of(elements):
    """Returns packed elements eight a word."""
    *outer, size = elements.shape
    return jax.lax.bitcast_convert_type(elements.reshape(*outer, size // 4, 4), jnp.int32)


def _carried(written, carrier: Carrier, *, has_groups: bool) -> Carried:
    """Returns the arrays of `outputs_of` as the operand that they are."""

    def in_fp8(words):
        fp8 = jax.lax.bitcast_convert_type(words, CARRIER_DTYPES[carrier])
        return fp8.reshape(*words.shape[:2], 4 * words.shape[2])

    carried, unit, lost, *groups = written
    if not has_groups:
        return Carried(in_fp8(carried), unit, lost)
    return Carried(in_fp8(carried), unit, lost, in_fp8(groups[0]), *groups[1:])


def outputs_of(batch: int, n: int, blocks: int, *, has_groups: bool) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays that the kernel writes; without groups the last four are not written."""
    carried = jax.ShapeDtypeStruct((batch, n, 2 * _WORDS * blocks), jnp.int32)
    flags = jax.ShapeDtypeStruct((batch, programs_of(n, blocks)), jnp.uint32)
    group_scales = jax.ShapeDtypeStruct((batch, n, blocks // group_of(blocks)), jnp.uint8)
    lost_sum = jax.ShapeDtypeStruct((batch, n), jnp.float32)
    not_written = jax.ShapeDtypeStruct((1,), jnp.int32)
    more = (carried, group_scales, flags, lost_sum) if has_groups else (not_written,) * 4
    return [carried, jax.ShapeDtypeStruct((batch, n), jnp.uint8), flags, *more]


def programs_of(n: int, blocks: int) -> int:
    """Returns the number of programs for an operand of n rows: each takes whole rows, or a part of one."""
    rows, parts = rows_and_parts(blocks)
    return ceil_div(n, rows) * parts


def rows_and_parts(blocks: int) -> tuple[int, int]:
    """Returns the number of rows per program and of programs per row; one of the two is 1."""
    width = _width(blocks)
    return min(BLOCKS // width, MOST_ROWS), ceil_div(blocks, width)


def _width(blocks: int) -> int:
    """Returns the number of a row's blocks that one program takes."""
    return min(BLOCKS, triton.next_power_of_2(blocks))


def constants_of(
    n: int, blocks: int, carrier: Carrier, target: Target | None, grouped: bool
) -> dict[str, int]:
    """Returns the kernel's constants for an operand of n rows."""
    rows, parts = rows_and_parts(blocks)
    return {
        "N": n,
        "K": blocks,
        "ROWS": rows,
        "BLOCKS": _width(blocks),
        "GROUP": group_of(blocks) if grouped and parts == 1 else 0,
        "E5M2": carrier == "e5m2",
        "NATIVE": target is not None and target.backend == "cuda",
    }


@triton.jit
def carry_kernel(
    words, scales, out, unit, lost, grouped, group_scales, far, lost_sum, N, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Converts BLOCKS of the K blocks of ROWS rows of words [v, N, 4 K] and scales [v, N, K].

    The outputs are out [v, N, 8 K], unit [v, N] and lost [v, programs], uint32, whose bit i is set if row i
    of the program lost an element. Unless GROUP is 0, which it is for parts of rows, they are also grouped
    [v, N, 8 K], group_scales [v, N, K / GROUP] and lost_sum [v, N], written only by programs that lost
    elements, and far [v, programs], like lost. The grid is (programs, v).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    groups = (grouped, group_scales, far, lost_sum)
    _carry_rows(
        words, scales, out, unit, lost, groups, program, programs, N, K, ROWS, BLOCKS, GROUP, E5M2, NATIVE
    )


@triton.jit
def carry_both_kernel(
    words, scales, other_words, other_scales, out, unit, lost, grouped, group_scales, far, lost_sum,
    other_out, other_unit, other_lost, N, OTHER_N, K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, E5M2: tl.constexpr, OTHER_E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Does what `carry_kernel` does, and for the other operand, of OTHER_N rows, without groups.

    The grid is (programs of both, v).
    """
    programs = tl.cdiv(N, ROWS) * ((K + BLOCKS - 1) // BLOCKS)
    program = tl.program_id(0)
    if program < programs:
        groups = (grouped, group_scales, far, lost_sum)
        _carry_rows(
            words, scales, out, unit, lost, groups, program, programs, N, K, ROWS, BLOCKS, GROUP, E5M2, NATIVE
        )
    else:
        _carry_rows(
            other_words,
            other_scales,
            other_out,
            other_unit,
            other_lost,
            None,
            program - programs,
            tl.num_programs(0) - programs,
            OTHER_N,
            K,
            ROWS,
            BLOCKS,
            0,
            OTHER_E5M2,
            NATIVE,
        )


@triton.jit
def _carry_rows(
    words, scales, out, unit, lost, groups, program, programs, N, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Does what one of an operand's `programs` does; see `carry_kernel`, whose last outputs `groups` are."""
    PARTS: tl.constexpr = (K + BLOCKS - 1) // BLOCKS  # programs per row; if more than one, ROWS is 1
    LOW: tl.constexpr = _E5M2_LOW if E5M2 else _E4M3_LOW
    HIGH: tl.constexpr = _E5M2_HIGH if E5M2 else _E4M3_HIGH
    v = tl.program_id(1).to(tl.int64)
    part = program % PARTS
    first = v * N + program // PARTS * ROWS  # row
    rows_left = N - program // PARTS * ROWS
    index = tl.arange(0, ROWS * BLOCKS)
    row, column = index // BLOCKS, part * BLOCKS + index % BLOCKS
    inside = (row < rows_left) & (column < K)
    block = first * K + row * K + column
    word_at = 4 * block[:, None] + tl.arange(0, 4)[None, :]
    word = tl.load(words + word_at, inside[:, None], 0)
    byte = tl.load(scales + block, inside, 0).to(tl.int32)
    if PARTS == 1:
        largest = tl.max(tl.reshape(_finite(byte), [ROWS, BLOCKS]), 1)
    else:
        largest = _largest_of_row(scales + first * K, K)
    row_unit = tl.minimum(tl.maximum(largest - HIGH, _LEAST_UNIT), _LARGEST_UNIT)
    rows = tl.arange(0, ROWS)
    tl.store(unit + first + rows, row_unit.to(tl.uint8), rows < tl.where(part == 0, rows_left, 0))
    unit_of_block = _spread(row_unit, BLOCKS)
    missed, scale = _fit_blocks(word, byte, unit_of_block, LOW, HIGH)
    flags = _flags_of_rows(missed, ROWS, BLOCKS)
    place = v * programs + program
    tl.store(lost + place, flags)
    at = 8 * block[:, None] + tl.arange(0, 8)[None, :]
    carried = _carry_words(tl.where(missed[:, None], 0, word), scale, ROWS * BLOCKS, E5M2, NATIVE)
    tl.store(out + at, carried, inside[:, None])
    if GROUP > 0:
        grouped, group_scales, far, lost_sum = groups
        if flags != 0:
            lost_scale = scale_value(tl.minimum(tl.maximum(byte - unit_of_block + 127, 1), 254))
            sums = tl.sum(tl.reshape(tl.where(missed, _BLOCK_MAX * lost_scale, 0), [ROWS, BLOCKS]), 1)
            tl.store(lost_sum + first + rows, sums, rows < rows_left)
            word = tl.load(words + word_at, inside[:, None], 0)  # once more, for which no registers wait
            of_group = _spread(tl.max(tl.reshape(_finite(byte), [ROWS * BLOCKS // GROUP, GROUP]), 1), GROUP)
            group_unit = tl.maximum(of_group - HIGH, unit_of_block + _LEAST_FACTOR)
            group_scale = (group_unit - unit_of_block + 127).to(tl.uint8)
            tl.store(group_scales + block // GROUP, group_scale, inside & (column % GROUP == 0))
            missed, scale = _fit_blocks(word, byte, group_unit, LOW, HIGH)
            flags &= _flags_of_rows(missed, ROWS, BLOCKS)
            carried = _carry_words(tl.where(missed[:, None], 0, word), scale, ROWS * BLOCKS, E5M2, NATIVE)
            tl.store(grouped + at, carried, inside[:, None])
        tl.store(far + place, flags)


@triton.jit
def _spread(values, EACH: tl.constexpr):
    """Returns each value EACH times."""
    spread = tl.broadcast_to(values[:, None], [values.shape[0], EACH])
    return tl.reshape(spread, [values.shape[0] * EACH])


@triton.jit
def _fit_blocks(word, byte, unit, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns the blocks that FP8 does not hold relative to their units, and the factors of the others."""
    shift = byte - unit
    counts = (tl.max((word & 0x77777777).to(tl.uint32, bitcast=True), 1) > 0) & (byte < 255)
    missed = ((shift < LOW) | (shift > HIGH)) & counts
    return missed, scale_value(tl.where(byte == 255, 255, tl.minimum(tl.maximum(shift, LOW), HIGH) + 127))


@triton.jit
def _flags_of_rows(blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns a word whose bit i is set if one of row i's blocks is."""
    of_rows = tl.max(tl.reshape(blocks.to(tl.int32), [ROWS, BLOCKS]), 1).to(tl.uint32)
    return tl.sum(of_rows << tl.arange(0, ROWS).to(tl.uint32), 0).to(tl.uint32)


@triton.jit
def _carry_words(word, scale, COUNT: tl.constexpr, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Returns COUNT blocks of 4 words in E2M1, times their scales, as 8 words in FP8."""
    if NATIVE:
        magnitudes = (0 * scale, 0.5 * scale, scale, 1.5 * scale, 2 * scale, 3 * scale, 4 * scale, 6 * scale)
        small = encode_fp8(magnitudes, E5M2, True)
        low = tl.broadcast_to(small[0][:, None], word.shape)
        high = tl.broadcast_to(small[1][:, None], word.shape)
        halves = tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,r,r,r", [word, low, high], (tl.int32, tl.int32), True, 1
        )
    else:
        values = ()
        for i in tl.static_range(8):
            values = values + (_code_value((word >> (4 * i)) & 15) * scale[:, None],)
        halves = encode_fp8(values, E5M2, False)
    return tl.reshape(tl.join(halves[0], halves[1]), [COUNT, 8])


@triton.jit
def _largest_of_row(scales, K: tl.constexpr):
    """Returns the largest of K scale bytes other than 255, in shape [1]; 0 if there is none."""
    WIDTH: tl.constexpr = 1024
    largest = tl.zeros([WIDTH], tl.int32)
    for start in range(0, K, WIDTH):
        column = start + tl.arange(0, WIDTH)
        largest = tl.maximum(largest, _finite(tl.load(scales + column, column < K, 0).to(tl.int32)))
    return tl.max(tl.reshape(largest, [1, WIDTH]), 1)


@triton.jit
def _finite(byte):
    """Returns scale bytes, with 0 for NaN."""
    return tl.where(byte == 255, 0, byte)


@triton.jit
def _code_value(code):
    """Returns the values of E2M1 codes in float32."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
