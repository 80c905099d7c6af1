"""The kernel that recomputes the rows of an FP8 product whose operands lost elements (`mxjax.fp8_carriers`).

It gathers them and multiplies them alone: rows in FP8 once more, with a scale for each group of columns, or
where FP8 does not hold a group, and for columns, from the packed operands.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float
from triton import knobs

from mxjax.devices import Target
from mxjax.formats import BLOCK
from mxjax.fp8_carriers import Carried, group_of
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.accumulate import accumulate_groups, accumulate_rows
from mxjax.kernels.matmul.carry import rows_and_parts
from mxjax.kernels.matmul.lost_rows import count_lost, find_lost
from mxjax.kernels.matmul.tiles import TILES, Tiles

# Two for each of Hopper's multiprocessors.
PROGRAMS = 264
# On H200 6 stages, or 256 columns and 8 warps, are as fast; 128 rows have no registers for the offsets of
# gathered rows.
GATHERED = Tiles(64, 128, 64, warps=4, stages=4)


def correct(
    y: Float[Array, "batch m n"],
    operands: tuple[jax.Array, ...],
    left: Carried,
    right: Carried,
    target: Target | None,
) -> list[jax.Array]:
    """Returns y, recomputed where its row or column lost elements, with the factors of rows and columns.

    Args:
      y: the product of the elements of `left` and `right`. It is overwritten.
      operands: packed lhs, lhs_scales, rhs, rhs_scales.

    Returns:
      y: the product before the factors of its rows and columns are applied. Recomputed results may flush
        subnormals to zero.
      row_factors: [batch, m] float32, powers of two with exponents from -63 to 63.
      column_factors: [batch, n] float32, likewise.
    """
    batch, m, n = y.shape
    grouped = (left.grouped, left.group_scales, left.far)
    has_groups = left.grouped is not None
    if not has_groups:
        grouped = (left.elements, left.unit, left.lost)  # not read
    # Triton's interpreter truncates to bfloat16 where GPUs round.
    before = y.astype(jnp.float32) if knobs.runtime.interpret else y
    tiles = tiles_of(target)
    corrected, row_factors, column_factors, _ = triton_call(
        correct_kernel,
        before,
        *operands,
        left.unit,
        right.unit,
        left.lost,
        right.lost,
        *grouped,
        right.elements,
        out=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct((batch, m), jnp.float32),
            jax.ShapeDtypeStruct((batch, n), jnp.float32),
            jax.ShapeDtypeStruct(scratch_of(m, n, batch, tiles), jnp.int32),
        ],
        in_place=True,
        grid=grid_of(m, n, batch, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **constants_of(m, n, 2 * operands[0].shape[2], tiles, has_groups),
    )
    return [corrected.astype(y.dtype), row_factors, column_factors]


def tiles_of(target: Target | None) -> Tiles:
    """Returns the tiles of the recomputed product."""
    interpreted = target is None or target.backend == "interpreter"
    return TILES["interpreter"][0] if interpreted else GATHERED


def grid_of(m: int, n: int, batch: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the number of programs along each grid axis."""
    return min(ceil_div(m, tiles.m) * ceil_div(n, tiles.n), PROGRAMS), batch


def scratch_of(m: int, n: int, batch: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the shape of the kernel's scratch memory, int32: a tile's rows for each program."""
    programs = math.prod(grid_of(m, n, batch, tiles))
    return programs, max(tiles.m, tiles.n)


def constants_of(m: int, n: int, k: int, tiles: Tiles, has_groups: bool) -> dict[str, int]:
    """Returns the kernel's arguments other than arrays.

    Args:
      has_groups: whether lhs has `grouped`, which needs whole rows.
    """
    rows, parts = rows_and_parts(k // BLOCK)
    return {
        "M": m,
        "N": n,
        "K": k,
        "ROWS": rows,
        "PARTS": parts,
        "LARGE": max(m * k, n * k, m * n) >= 2**31,
        "GROUP": BLOCK * group_of(k // BLOCK) if has_groups else 0,
        "BLOCK_M": tiles.m,
        # In a kernel that has both ways, this is the rare one, and larger tiles of it would spill registers.
        "BLOCK_N": tiles.n // 2 if has_groups else tiles.n,
        "BLOCK_K": tiles.k,
        # Few steps along k are unrolled, for which larger tiles have no registers.
        "FP8_N": tiles.n if k > 512 else tiles.n // 2,
    }


@triton.jit
def correct_kernel(
    before,
    lhs,
    lhs_scales,
    rhs,
    rhs_scales,
    lhs_unit,
    rhs_unit,
    lhs_lost,
    rhs_lost,
    lhs_grouped,
    lhs_group_scales,
    lhs_far,
    rhs_fp8,
    out,
    lhs_factors,
    rhs_factors,
    scratch,
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LARGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8_N: tl.constexpr,
):
    """Recomputes the rows of out [b, M, N] whose row of lhs lost elements, and columns likewise for rhs.

    They become those of lhs[b] @ rhs[b].T divided by the factors of their rows and columns, as the rest of
    out is. The kernel also writes these factors, [b, M] and [b, N], from the unit bytes. Each of PARTS parts
    of ROWS rows has a word with a bit for each row: lhs_lost is [b, ceil(M / ROWS) * PARTS], rhs_lost has N
    instead of M. Unless GROUP is 0, lhs_grouped, lhs_group_scales of each GROUP columns, the flags lhs_far
    and rhs_fp8 are of the operands in FP8 (see `mxjax.fp8_carriers`), which suffice for rows that are not
    far in columns that are not lost. `before` is the memory of out, and scratch has max(BLOCK_M, BLOCK_N)
    words a program for this kernel alone. The grid is (programs, batch), with any number of programs.
    """
    TILES_M, TILES_N = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    SLOTS: tl.constexpr = BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N
    program, programs = tl.program_id(0), tl.num_programs(0)
    batch = tl.program_id(1).to(tl.int64)
    lhs_unit += batch * M
    rhs_unit += batch * N
    lhs_lost += batch * (tl.cdiv(M, ROWS) * PARTS)
    rhs_lost += batch * (tl.cdiv(N, ROWS) * PARTS)
    scratch += (batch * programs + program) * SLOTS
    _write_factors(lhs_unit, lhs_factors + batch * M, M)
    _write_factors(rhs_unit, rhs_factors + batch * N, N)
    out += batch * M * N
    lost = count_lost(lhs_lost, None, M, ROWS, PARTS)
    of_columns = tl.cdiv(count_lost(rhs_lost, None, N, ROWS, PARTS), BLOCK_N) * TILES_M
    if GROUP > 0:
        lhs_far += batch * tl.cdiv(M, ROWS)
        if lost > 0:
            near = count_lost(lhs_lost, lhs_far, M, ROWS, PARTS)
            tiles = tl.cdiv(near, BLOCK_M) * tl.cdiv(N, FP8_N)
            first, count = _share_of(tiles, program, programs)
            for i in range(count):
                _put_near_tile(
                    lhs_grouped + batch * M * K,
                    lhs_group_scales + batch * M * (K // GROUP),
                    rhs_fp8 + batch * N * K,
                    lhs_lost,
                    lhs_far,
                    rhs_lost,
                    out,
                    scratch,
                    first + i,
                    i == 0,
                    M,
                    N,
                    K,
                    ROWS,
                    LARGE,
                    GROUP,
                    BLOCK_M,
                    FP8_N,
                )
            lhs_lost, lost = lhs_far, lost - near
    of_rows = tl.cdiv(lost, BLOCK_M) * TILES_N
    first, count = _share_of(of_rows + of_columns, program, programs)
    for i in range(count):
        rows, columns = _place_of(
            lhs_lost,
            rhs_lost,
            scratch,
            first + i,
            i == 0,
            of_rows,
            M,
            N,
            ROWS,
            PARTS,
            BLOCK_M,
            BLOCK_N,
        )
        lhs_rows = tl.minimum(rows, M - 1).to(tl.int64 if LARGE else tl.int32)
        rhs_rows = tl.minimum(columns, N - 1).to(tl.int64 if LARGE else tl.int32)
        acc = accumulate_rows(
            lhs + batch * M * (K // 2),
            lhs_scales + batch * M * (K // 32),
            rhs + batch * N * (K // 2),
            rhs_scales + batch * N * (K // 32),
            lhs_rows,
            rhs_rows,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        row_exponent = tl.load(lhs_unit + lhs_rows).to(tl.int32) - 127
        column_exponent = tl.load(rhs_unit + rhs_rows).to(tl.int32) - 127
        acc = acc * _power_of_two(-row_exponent[:, None] - column_exponent[None, :])
        _store_tile(out, acc, rows, columns, M, N, LARGE)


@triton.jit
def _put_near_tile(
    x,
    x_scales,
    y,
    lost,
    far,
    columns_lost,
    out,
    scratch,
    tile,
    is_first,
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LARGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes a tile of x @ y.T, of rows that lost elements and are not far, but for columns that did.

    Each strip of BLOCK_M such rows has tiles across all columns. A program finds the rows of a strip with its
    first tile there, and keeps them in scratch memory.
    """
    ACROSS = tl.cdiv(N, BLOCK_N)
    if is_first | (tile % ACROSS == 0):
        find_lost(lost, far, scratch, tile // ACROSS, M, ROWS, 1, BLOCK_M)
    rows = tl.load(scratch + tl.arange(0, BLOCK_M))
    columns = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = tl.minimum(rows, M - 1).to(tl.int64 if LARGE else tl.int32)
    y_rows = tl.minimum(columns, N - 1).to(tl.int64 if LARGE else tl.int32)
    acc = accumulate_groups(x, x_scales, y, x_rows, y_rows, K, BLOCK_M, BLOCK_N, GROUP)
    is_lost = tl.load(columns_lost + y_rows // ROWS) >> (y_rows % ROWS).to(tl.uint32) & 1
    _store_tile(out, acc, rows, tl.where(is_lost > 0, N, columns), M, N, LARGE)


@triton.jit
def _place_of(
    lhs_lost,
    rhs_lost,
    scratch,
    tile,
    is_first,
    of_rows,
    M,
    N,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the rows and columns of a tile; past the end they are M and N, or more.

    The first `of_rows` tiles are of strips of BLOCK_M lost rows across all columns, the others of strips of
    BLOCK_N lost columns across all rows; see `_put_near_tile`.
    """
    TILES_M, TILES_N = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if tile < of_rows:
        if is_first | (tile % TILES_N == 0):
            find_lost(lhs_lost, None, scratch, tile // TILES_N, M, ROWS, PARTS, BLOCK_M)
        rows = tl.load(scratch + tl.arange(0, BLOCK_M))
        columns = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        strip, across = (tile - of_rows) // TILES_M, (tile - of_rows) % TILES_M
        if is_first | (across == 0):
            find_lost(rhs_lost, None, scratch, strip, N, ROWS, PARTS, BLOCK_N)
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
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
