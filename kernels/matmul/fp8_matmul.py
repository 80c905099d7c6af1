"""Products of packed MXFP4 operands on FP8 matrix units: exact in FP8 carriers, else recomputed by a kernel.

Whether FP8 represents the operands exactly is known only at run time. XLA's FP8 GEMM always runs.
`correct_kernel` then gathers the rows that lost elements and multiplies them alone, so that the cost is in
proportion to their number: in FP8 once more, from two carriers of their high and low binades, or where two do
not hold them from the packed operands. The XLA program needs no branch, which would copy its inputs and
outputs.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8
from triton import knobs

from mxjax.devices import Target, current_target
from mxjax.formats import BLOCK
from mxjax.fp8_carriers import CARRIER_DTYPES, WIDTHS, Carried, Carrier
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.accumulate import accumulate_fp8, accumulate_rows
from mxjax.kernels.matmul.carry import carry_operand, rows_and_parts
from mxjax.kernels.matmul.fp4_gemm import (
    batched,
    check_operands,
    multiply_flat,
)
from mxjax.kernels.matmul.tiles import TILES, Tiles
from mxjax.product import Product, contract_fp8

# Two for each of Hopper's multiprocessors.
PROGRAMS = 264
# The fastest on H200; larger tiles have no registers for the offsets of gathered rows.
GATHERED = Tiles(64, 128, 64, warps=4, stages=4)


def matmul(
    lhs: UInt8[Array, "*batch m _"],
    lhs_scales: UInt8[Array, "*batch m _"],
    rhs: UInt8[Array, "*batch n _"],
    rhs_scales: UInt8[Array, "*batch n _"],
    dtype: DTypeLike,
    carriers: tuple[Carrier, Carrier],
) -> Product:
    """Returns lhs @ rhs.T of packed MXFP4 operands, as `fp4_gemm.matmul` does, on FP8 matrix units.

    A recomputed result may become zero if it is below 2**-126 times the factors of its row and column. A
    row's factor is 2**-6 (E4M3) or 2**-13 (E5M2) of its largest scale, but from 2**-63 to 2**63.

    Args:
      dtype: dtype of the product before its factors are applied.
      carriers: carriers of lhs and of rhs.

    Raises:
      ValueError: shapes that do not match.
    """
    check_operands(lhs, lhs_scales, rhs, rhs_scales)
    if 0 in (*lhs.shape, *rhs.shape):
        return Product(jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), dtype))
    run = _matmul(jnp.dtype(dtype), carriers, current_target())
    y, rows, columns = multiply_flat(run, lhs, lhs_scales, rhs, rhs_scales)
    return Product(y, (rows, columns))


@functools.cache
def _matmul(dtype, carriers: tuple[Carrier, Carrier], target: Target | None) -> Callable:
    """Returns the product as a function. JAX caches its trace, hence a separate function for each target."""
    part = functools.partial(_part, dtype=dtype, carriers=carriers, target=target)
    return batched(part, "b m n, b m, b n")


def _part(lhs, lhs_scales, rhs, rhs_scales, *, dtype, carriers, target, summed_over):
    """Returns the product of operands [batch, rows, …] and the factors of its rows and columns.

    Where k is sharded the factors are ones, because each shard has its own and applies them before the sum.
    """
    # The operands that lose elements are gradients, in E5M2.
    left = carry_operand(lhs, lhs_scales, carriers[0], target, lower=carriers[0] == "e5m2")
    right = carry_operand(rhs, rhs_scales, carriers[1], target)
    y = _contract(left.elements, right.elements, jnp.dtype(jnp.float32) if summed_over else dtype)
    y, rows, columns = correct(y, (lhs, lhs_scales, rhs, rhs_scales), left, right, target)
    if not summed_over:
        return [y, rows, columns]
    y = lax.psum(Product(y, (rows, columns)).value(jnp.float32), summed_over).astype(dtype)
    return [y, jnp.ones_like(rows), jnp.ones_like(columns)]


def _contract(left, right, dtype):
    """Returns left @ right.T, batched."""
    if left.shape[0] == 1:  # without a batch axis XLA recognizes the FP8 GEMM
        return contract_fp8(left[0], right[0], dtype)[None]
    return contract_fp8(left, right, dtype)


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
    in_fp8 = left.lower is not None and left.far is not None
    width = next(w for c, w in WIDTHS.items() if left.elements.dtype == CARRIER_DTYPES[c]) if in_fp8 else 0
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
        left.far if in_fp8 else left.lost,
        left.elements,
        left.lower if in_fp8 else left.elements,
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
        **constants_of(m, n, 2 * operands[0].shape[2], tiles, width),
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


def constants_of(m: int, n: int, k: int, tiles: Tiles, width: int) -> dict[str, int]:
    """Returns the kernel's constexpr arguments.

    Args:
      width: the width of the carrier of lhs, of `mxjax.fp8_carriers.WIDTHS`, or 0 if it has no `lower`.
    """
    rows, parts = rows_and_parts(k // BLOCK)
    sizes = {"M": m, "N": n, "K": k, "ROWS": rows, "PARTS": parts}
    fp8_k = next(size for size in (128, 64, 32) if k % size == 0)
    return sizes | {
        "WIDTH": width,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "FP8_K": fp8_k,
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
    lhs_far,
    lhs_fp8,
    lhs_lower,
    rhs_fp8,
    out,
    lhs_factors,
    rhs_factors,
    scratch,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8_K: tl.constexpr,
):
    """Recomputes the rows of out [b, M, N] whose row of lhs lost elements, and columns likewise for rhs.

    They become those of lhs[b] @ rhs[b].T divided by the factors of their rows and columns, as the rest of
    out is. The kernel also writes these factors, [b, M] and [b, N], from the unit bytes. Each of PARTS parts
    of ROWS rows has a word with a bit for each row: lhs_lost is [b, ceil(M / ROWS) * PARTS], rhs_lost has N
    instead of M. If WIDTH is not 0, lhs_fp8, lhs_lower, rhs_fp8 and the flags lhs_far are the operands in FP8
    (see `mxjax.fp8_carriers`), which suffice where no column and no far element was lost. `before` is the
    memory of out, and scratch, [programs * b, max(BLOCK_M, BLOCK_N)], is for this kernel alone. The grid is
    (programs, batch), with any number of programs.
    """
    TILES_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
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
    out += batch * (M * N)
    # Strips of BLOCK_M lost rows across all columns, then strips of BLOCK_N lost columns across all rows.
    of_rows = tl.cdiv(_count_lost(lhs_lost, M, ROWS, PARTS), BLOCK_M) * TILES_N
    of_columns = tl.cdiv(_count_lost(rhs_lost, N, ROWS, PARTS), BLOCK_N) * TILES_M
    in_fp8 = False
    if WIDTH != 0:
        lhs_far += batch * tl.cdiv(M, ROWS)
        in_fp8 = (of_columns == 0) & (_count_lost(lhs_far, M, ROWS, PARTS) == 0)
    if in_fp8:
        x, below, y = lhs_fp8 + batch * (M * K), lhs_lower + batch * (M * K), rhs_fp8 + batch * (N * K)
        for tile in range(program, of_rows, programs):
            rows = _lost_rows(lhs_lost, scratch, tile // TILES_N, M, ROWS, PARTS, BLOCK_M)
            columns = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
            x_rows = tl.minimum(rows, M - 1).to(tl.int64 if M * K >= 2**31 else tl.int32)
            y_rows = tl.minimum(columns, N - 1).to(tl.int64 if N * K >= 2**31 else tl.int32)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc = accumulate_fp8(below, y, x_rows, y_rows, acc, K, FP8_K) * 2.0**-WIDTH
            acc = accumulate_fp8(x, y, x_rows, y_rows, acc, K, FP8_K)
            _store_tile(out, acc, rows, columns, M, N)
    else:
        for tile in range(program, of_rows + of_columns, programs):
            if tile < of_rows:
                rows = _lost_rows(lhs_lost, scratch, tile // TILES_N, M, ROWS, PARTS, BLOCK_M)
                columns = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
            else:
                strip = (tile - of_rows) // TILES_M
                columns = _lost_rows(rhs_lost, scratch, strip, N, ROWS, PARTS, BLOCK_N)
                rows = (tile - of_rows) % TILES_M * BLOCK_M + tl.arange(0, BLOCK_M)
            lhs_rows = tl.minimum(rows, M - 1).to(tl.int64 if M * K >= 2**32 else tl.int32)
            rhs_rows = tl.minimum(columns, N - 1).to(tl.int64 if N * K >= 2**32 else tl.int32)
            acc = accumulate_rows(
                lhs + batch * (M * (K // 2)),
                lhs_scales + batch * (M * (K // 32)),
                rhs + batch * (N * (K // 2)),
                rhs_scales + batch * (N * (K // 32)),
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
            _store_tile(out, acc, rows, columns, M, N)


@triton.jit
def _store_tile(out, acc, rows, columns, M: tl.constexpr, N: tl.constexpr):
    """Stores the elements of acc whose row and column are in out [M, N]."""
    offsets = rows.to(tl.int64 if M * N >= 2**31 else tl.int32)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _count_lost(flags, LENGTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns the number of rows that lost elements."""
    GROUPS: tl.constexpr = (LENGTH + ROWS - 1) // ROWS
    WIDTH: tl.constexpr = 4096 if GROUPS > 4096 else triton.next_power_of_2(GROUPS)
    count = tl.zeros([WIDTH], tl.int32)
    for start in range(0, GROUPS, WIDTH):
        count += _ones(_group_flags(flags, start + tl.arange(0, WIDTH), GROUPS, PARTS))
    return tl.sum(count, 0)


@triton.jit
def _lost_rows(
    flags,
    scratch,
    strip,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns a strip's BLOCK rows of those that lost elements; past the last of them, LENGTH.

    The program finds the rows together, and hands them to its threads through scratch memory.
    """
    GROUPS: tl.constexpr = (LENGTH + ROWS - 1) // ROWS
    WIDTH: tl.constexpr = 4096 if GROUPS > 4096 else triton.next_power_of_2(GROUPS)
    first = strip * BLOCK  # of the strip's rows, counted among those that lost elements
    before = 0
    tl.debug_barrier()  # all threads have read the last strip's
    for start in range(0, GROUPS, WIDTH):
        group = start + tl.arange(0, WIDTH)
        found = _group_flags(flags, group, GROUPS, PARTS)
        count = _ones(found)
        slot = before - first + tl.cumsum(count, 0) - count
        for i in range(ROWS):
            is_lost = (found >> i & 1).to(tl.int32)
            tl.store(scratch + slot, group * ROWS + i, mask=(is_lost > 0) & (slot >= 0) & (slot < BLOCK))
            slot += is_lost
        before += tl.sum(count, 0)
    tl.debug_barrier()
    rank = tl.arange(0, BLOCK)
    return tl.load(scratch + rank, mask=first + rank < before, other=LENGTH)


@triton.jit
def _group_flags(flags, group, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Returns for each group, by its index, a bit for each of its rows, over all parts; 0 past the last."""
    found = tl.zeros(group.shape, tl.uint32)
    for part in tl.static_range(PARTS):
        found |= tl.load(flags + group * PARTS + part, group < GROUPS, 0)
    return found


@triton.jit
def _ones(bits):
    """Returns the number of ones in each of 32 bits."""
    pairs = bits - (bits >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def _write_factors(units, factors, LENGTH: tl.constexpr):
    """Writes this program's part of the rows' factors, 2**(unit - 127)."""
    WIDTH: tl.constexpr = 256
    for start in range(tl.program_id(0) * WIDTH, LENGTH, tl.num_programs(0) * WIDTH):
        row = start + tl.arange(0, WIDTH)
        exponent = tl.load(units + row, row < LENGTH, 127).to(tl.int32) - 127
        tl.store(factors + row, _power_of_two(exponent), row < LENGTH)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
