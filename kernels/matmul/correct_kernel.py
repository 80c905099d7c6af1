"""The kernel that recomputes the rows of an FP8 product whose FP8 carriers lost elements.

It gathers them and multiplies them alone: rows in FP8 once more, with a scale for each group of columns, or
where FP8 does not hold a group, and for columns, from the packed operands.
"""

import triton
import triton.language as tl

from mxjax.kernels.matmul.accumulate import accumulate_groups, accumulate_rows
from mxjax.kernels.matmul.lost_rows import count_lost, find_lost, some_lost


@triton.jit
def correct_kernel(
    before, lhs, lhs_scales, rhs, rhs_scales, lhs_unit, rhs_unit, lhs_lost, rhs_lost, lhs_grouped,
    lhs_group_scales, lhs_far, rhs_fp8, out, lhs_factors, rhs_factors, scratch, M, N, K: tl.constexpr,
    LHS_ROWS: tl.constexpr, RHS_ROWS: tl.constexpr, PARTS: tl.constexpr, LARGE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8_N: tl.constexpr,
):  # fmt: skip
    """Recomputes the rows of out [b, M, N] whose row of lhs lost elements, and columns likewise for rhs.

    They become those of lhs[b] @ rhs[b].T divided by the factors of their rows and columns, as the rest of
    out is. The kernel also writes these factors, [b, M] and [b, N], from the unit bytes. Each of PARTS parts
    of LHS_ROWS rows has a word with a bit for each row: lhs_lost is [b, ceil(M / LHS_ROWS) * PARTS], and
    rhs_lost likewise for N and RHS_ROWS. Unless GROUP is 0, lhs_grouped, lhs_group_scales of each GROUP
    columns, the flags lhs_far and rhs_fp8 are of the operands in FP8 (see `mxjax.operands.carriers`), which
    suffice for rows that are not far in columns that are not lost. `before` is the memory of out, and scratch
    has max(BLOCK_M, BLOCK_N) words a program for this kernel alone. The grid is (programs, batch), with any
    number of programs.
    """
    batch = tl.program_id(1).to(tl.int64)
    correct_part(
        (lhs, lhs_scales, lhs_unit, lhs_lost, lhs_factors),
        (batch * M, M, batch * (tl.cdiv(M, LHS_ROWS) * PARTS)),
        (rhs, rhs_scales, rhs_unit, rhs_lost, rhs_factors),
        (batch * N, N, batch * (tl.cdiv(N, RHS_ROWS) * PARTS)),
        (lhs_grouped, lhs_group_scales, lhs_far, rhs_fp8), out + batch * M * N, scratch, 0, None, False, K,
        LHS_ROWS, RHS_ROWS, PARTS, LARGE, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, FP8_N,
    )  # fmt: skip


@triton.jit
def correct_part(
    left, left_part, right, right_part, groups, out, scratch, first_step, steps, SCALED: tl.constexpr,
    K: tl.constexpr, LHS_ROWS: tl.constexpr, RHS_ROWS: tl.constexpr, PARTS: tl.constexpr, LARGE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8_N: tl.constexpr,
):  # fmt: skip
    """Recomputes rows and columns of one product, as `correct_kernel` does those of a batch.

    Args:
      left, right: the operands with scales, units, flags and factors.
      left_part, right_part: an operand's first row, its number of rows, and the word of the first one's flag.
      groups: the operands in FP8, which is not read if GROUP is 0.
      out: the product's first element.
      first_step, steps: see `accumulate_rows`.
      SCALED: whether the factors of rows and columns are in out; then they are not written.
    """
    lhs, lhs_scales, lhs_unit, lhs_lost, lhs_factors = left
    rhs, rhs_scales, rhs_unit, rhs_lost, rhs_factors = right
    lhs_first, M, lhs_word = left_part
    rhs_first, N, rhs_word = right_part
    TILES_M, TILES_N = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    SLOTS: tl.constexpr = BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N
    program, programs = tl.program_id(0), tl.num_programs(0)
    lhs_unit += lhs_first
    rhs_unit += rhs_first
    some = some_lost(lhs_lost, lhs_word, tl.cdiv(M, LHS_ROWS) * PARTS)
    some |= some_lost(rhs_lost, rhs_word, tl.cdiv(N, RHS_ROWS) * PARTS)
    lhs_lost += lhs_word
    rhs_lost += rhs_word
    lost, of_columns = 0, 0
    if tl.max((some != 0).to(tl.int32), 0) > 0:
        lost = count_lost(lhs_lost, None, M, LHS_ROWS, PARTS)
        of_columns = tl.cdiv(count_lost(rhs_lost, None, N, RHS_ROWS, PARTS), BLOCK_N) * TILES_M
    scratch += (tl.program_id(1).to(tl.int64) * programs + program) * SLOTS
    if not SCALED:
        _write_factors(lhs_unit, lhs_factors + lhs_first, M)
        _write_factors(rhs_unit, rhs_factors + rhs_first, N)
    if GROUP > 0:
        lhs_grouped, lhs_group_scales, lhs_far, rhs_fp8 = groups
        lhs_far += lhs_word
        if lost > 0:
            near = count_lost(lhs_lost, lhs_far, M, LHS_ROWS, PARTS)
            tiles = tl.cdiv(near, BLOCK_M) * tl.cdiv(N, FP8_N)
            first, count = _share_of(tiles, program, programs)
            for i in range(count):
                _put_near_tile(
                    lhs_grouped + lhs_first * K, lhs_group_scales + lhs_first * (K // GROUP),
                    rhs_fp8 + rhs_first * K, lhs_unit, rhs_unit, lhs_lost, lhs_far, rhs_lost, out, scratch,
                    first + i, i == 0, SCALED, M, N, K, LHS_ROWS, RHS_ROWS, LARGE, GROUP, BLOCK_M, FP8_N,
                )  # fmt: skip
            lhs_lost, lost = lhs_far, lost - near
    of_rows = tl.cdiv(lost, BLOCK_M) * TILES_N
    first, count = _share_of(of_rows + of_columns, program, programs)
    for i in range(count):
        _put_far_tile(
            lhs + lhs_first * (K // 2), lhs_scales + lhs_first * (K // 32), rhs + rhs_first * (K // 2),
            rhs_scales + rhs_first * (K // 32), lhs_unit, rhs_unit, lhs_lost, rhs_lost, out, scratch,
            first + i, i == 0, of_rows, first_step, steps, SCALED, M, N, K, LHS_ROWS, RHS_ROWS, PARTS, LARGE,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _put_near_tile(
    x, x_scales, y, x_unit, y_unit, lost, far, columns_lost, out, scratch, tile, is_first,
    SCALED: tl.constexpr, M, N, K: tl.constexpr, LHS_ROWS: tl.constexpr, RHS_ROWS: tl.constexpr,
    LARGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes a tile of x @ y.T, of rows that lost elements and are not far, but for columns that did.

    Each strip of BLOCK_M such rows has tiles across all columns. A program finds the rows of a strip with its
    first tile there, and keeps them in scratch memory.
    """
    ACROSS = tl.cdiv(N, BLOCK_N)
    if is_first | (tile % ACROSS == 0):
        find_lost(lost, far, scratch, tile // ACROSS, M, LHS_ROWS, 1, BLOCK_M)
    rows = tl.load(scratch + tl.arange(0, BLOCK_M))
    columns = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = tl.minimum(rows, M - 1).to(tl.int64 if LARGE else tl.int32)
    y_rows = tl.minimum(columns, N - 1).to(tl.int64 if LARGE else tl.int32)
    acc = accumulate_groups(x, x_scales, y, x_rows, y_rows, K, BLOCK_M, BLOCK_N, GROUP)
    if SCALED:
        acc = acc * _power_of_two(_exponents(x_unit, x_rows, y_unit, y_rows))
    is_lost = tl.load(columns_lost + y_rows // RHS_ROWS) >> (y_rows % RHS_ROWS).to(tl.uint32) & 1
    _store_tile(out, acc, rows, tl.where(is_lost > 0, N, columns), M, N, LARGE)


@triton.jit
def _put_far_tile(
    lhs, lhs_scales, rhs, rhs_scales, lhs_unit, rhs_unit, lhs_lost, rhs_lost, out, scratch, tile, is_first,
    of_rows, first_step, steps, SCALED: tl.constexpr, M, N, K: tl.constexpr, LHS_ROWS: tl.constexpr,
    RHS_ROWS: tl.constexpr, PARTS: tl.constexpr, LARGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes a tile of lost rows or columns, from the packed operands; see `_place_of`."""
    rows, columns = _place_of(
        lhs_lost, rhs_lost, scratch, tile, is_first, of_rows, M, N, LHS_ROWS, RHS_ROWS, PARTS, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    lhs_rows = tl.minimum(rows, M - 1).to(tl.int64 if LARGE else tl.int32)
    rhs_rows = tl.minimum(columns, N - 1).to(tl.int64 if LARGE else tl.int32)
    acc = accumulate_rows(
        lhs, lhs_scales, rhs, rhs_scales, lhs_rows, rhs_rows, first_step, steps, K, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if not SCALED:
        acc = acc * _power_of_two(-_exponents(lhs_unit, lhs_rows, rhs_unit, rhs_rows))
    _store_tile(out, acc, rows, columns, M, N, LARGE)


@triton.jit
def _place_of(
    lhs_lost, rhs_lost, scratch, tile, is_first, of_rows, M, N, LHS_ROWS: tl.constexpr,
    RHS_ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns the rows and columns of a tile; past the end they are M and N, or more.

    The first `of_rows` tiles are of strips of BLOCK_M lost rows across all columns, the others of strips of
    BLOCK_N lost columns across all rows; see `_put_near_tile`.
    """
    TILES_M, TILES_N = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if tile < of_rows:
        if is_first | (tile % TILES_N == 0):
            find_lost(lhs_lost, None, scratch, tile // TILES_N, M, LHS_ROWS, PARTS, BLOCK_M)
        rows = tl.load(scratch + tl.arange(0, BLOCK_M))
        columns = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        strip, across = (tile - of_rows) // TILES_M, (tile - of_rows) % TILES_M
        if is_first | (across == 0):
            find_lost(rhs_lost, None, scratch, strip, N, RHS_ROWS, PARTS, BLOCK_N)
        columns = tl.load(scratch + tl.arange(0, BLOCK_N))
        rows = across * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, columns


@triton.jit
def _share_of(tiles, program, programs):
    """Returns a program's first tile and the number of its tiles, which follow each other."""
    each = tl.cdiv(tiles, programs)
    return program * each, tl.minimum(tl.maximum(tiles - program * each, 0), each)


@triton.jit
def _store_tile(out, acc, rows, columns, M, N, LARGE: tl.constexpr):
    """Stores the elements of acc whose row and column are in out [M, N]."""
    offsets = rows.to(tl.int64 if LARGE else tl.int32)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_factors(units, factors, LENGTH):
    """Writes this program's part of the rows' factors, 2**(unit - 127)."""
    WIDTH: tl.constexpr = 256
    for start in range(tl.program_id(0) * WIDTH, LENGTH, tl.num_programs(0) * WIDTH):
        row = start + tl.arange(0, WIDTH)
        exponent = tl.load(units + row, row < LENGTH, 127).to(tl.int32) - 127
        tl.store(factors + row, _power_of_two(exponent), row < LENGTH)


@triton.jit
def _exponents(lhs_unit, lhs_rows, rhs_unit, rhs_rows):
    """Returns the exponents of the factors of rows and columns."""
    of_rows = tl.load(lhs_unit + lhs_rows).to(tl.int32) - 127
    return of_rows[:, None] + (tl.load(rhs_unit + rhs_rows).to(tl.int32) - 127)[None, :]


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
