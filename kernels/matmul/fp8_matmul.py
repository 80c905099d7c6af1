"""Products of packed MXFP4 operands on FP8 matrix units: exact in FP8 carriers, else recomputed by a kernel.

Whether FP8 represents the operands exactly is known only at run time. XLA's FP8 GEMM always runs.
`correct_kernel` then recomputes, from the packed operands, the strips of tiles in which a row lost elements.
So the XLA program needs no branch, which would copy its inputs and outputs.
"""

import functools
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
from mxjax.fp8_carriers import Carried, Carrier
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.carry import carry_operand, rows_and_parts
from mxjax.kernels.matmul.fp4_gemm import (
    accumulate_tile,
    batched,
    check_operands,
    multiply_flat,
    rows_of,
    store_tile,
)
from mxjax.kernels.matmul.tiles import TILES, Tiles
from mxjax.product import Product, contract_fp8

PROGRAMS = 132  # Hopper's multiprocessors; each runs one program


def matmul(
    lhs: UInt8[Array, "*batch m _"],
    lhs_scales: UInt8[Array, "*batch m _"],
    rhs: UInt8[Array, "*batch n _"],
    rhs_scales: UInt8[Array, "*batch n _"],
    dtype: DTypeLike,
    carriers: tuple[Carrier, Carrier],
) -> Product:
    """Returns lhs @ rhs.T of packed MXFP4 operands, as `fp4_gemm.matmul` does, on FP8 matrix units.

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
    left = carry_operand(lhs, lhs_scales, carriers[0], target)
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
    # Triton's interpreter truncates to bfloat16 where GPUs round.
    before = y.astype(jnp.float32) if knobs.runtime.interpret else y
    tiles = tiles_of(target)
    corrected, *factors = triton_call(
        correct_kernel,
        before,
        *operands,
        left.unit,
        right.unit,
        left.lost,
        right.lost,
        out=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct((batch, m), jnp.float32),
            jax.ShapeDtypeStruct((batch, n), jnp.float32),
        ],
        in_place=True,
        grid=grid_of(m, n, batch, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **constants_of(m, n, 2 * operands[0].shape[2], tiles),
    )
    return [corrected.astype(y.dtype), *factors]


def tiles_of(target: Target | None) -> Tiles:
    """Returns the tiles of the recomputed product."""
    return TILES["other" if target is not None and target.backend != "interpreter" else "interpreter"][0]


def grid_of(m: int, n: int, batch: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the number of programs along each grid axis."""
    return min(ceil_div(m, tiles.m) * ceil_div(n, tiles.n), PROGRAMS), batch


def constants_of(m: int, n: int, k: int, tiles: Tiles) -> dict[str, int]:
    """Returns the kernel's constexpr arguments."""
    rows, parts = rows_and_parts(k // BLOCK)
    flags = {"ROWS": rows, "PARTS": parts}
    return {"M": m, "N": n, "K": k, **flags, "BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}


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
    out,
    lhs_factors,
    rhs_factors,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Recomputes the strips of tiles of out [b, M, N] where a row of lhs or of rhs lost elements.

    A strip becomes that of lhs[b] @ rhs[b].T divided by the factors of its rows and columns, as the rest of
    out is. The kernel also writes these factors, [b, M] and [b, N], from the unit bytes. Each of PARTS parts
    of ROWS rows has a flag: lhs_lost is [b, ceil(M / ROWS) * PARTS], rhs_lost has N instead of M. `before` is
    the memory of out. The grid is (programs, batch), with any number of programs.
    """
    LHS_LOST: tl.constexpr = (M + ROWS - 1) // ROWS * PARTS
    RHS_LOST: tl.constexpr = (N + ROWS - 1) // ROWS * PARTS
    TILES_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    batch = tl.program_id(1).to(tl.int64)
    lhs_unit += batch * M
    rhs_unit += batch * N
    lhs_lost += batch * LHS_LOST
    rhs_lost += batch * RHS_LOST
    _write_factors(lhs_unit, lhs_factors + batch * M, M)
    _write_factors(rhs_unit, rhs_factors + batch * N, N)
    lost = _any(lhs_lost, LHS_LOST, LHS_LOST) | _any(rhs_lost, RHS_LOST, RHS_LOST)
    # Strips of rows, then of columns. Programs take their tiles in turn; `first` is this program's. The loop
    # over tiles is a `while`, because Triton 3.6 drops a carried scalar that only bounds a `for`, which would
    # give every strip to the same few programs.
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    for strip in range(tl.where(lost > 0, TILES_M + TILES_N, 0)):
        of_rows = strip < TILES_M
        if of_rows:
            tiles = TILES_N * _strip_lost(lhs_lost, strip, M, BLOCK_M, ROWS, PARTS)
        else:
            tiles = TILES_M * _strip_lost(rhs_lost, strip - TILES_M, N, BLOCK_N, ROWS, PARTS)
        tile = first
        while tile < tiles:
            tile_m = tl.where(of_rows, strip, tile)
            tile_n = tl.where(of_rows, tile, strip - TILES_M)
            acc = accumulate_tile(
                lhs,
                lhs_scales,
                rhs,
                rhs_scales,
                tile_m,
                tile_n,
                batch,
                M,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                False,
            )
            row_exponent = _tile_exponents(lhs_unit, tile_m, M, BLOCK_M)
            column_exponent = _tile_exponents(rhs_unit, tile_n, N, BLOCK_N)
            acc = acc * _power_of_two(-row_exponent[:, None] - column_exponent[None, :])
            store_tile(out, acc, tile_m, tile_n, batch, M, N, BLOCK_M, BLOCK_N)
            tile += programs
        first = (first + programs - tiles % programs) % programs


@triton.jit
def _strip_lost(
    flags,
    tile,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Returns 1 if a flag of a tile's rows is set, else 0. A flag may span more rows than the tile."""
    COUNT: tl.constexpr = (BLOCK + ROWS - 1) // ROWS * PARTS
    first = tile * BLOCK // ROWS * PARTS
    return _any(flags + first, (LENGTH + ROWS - 1) // ROWS * PARTS - first, COUNT)


@triton.jit
def _any(flags, left, COUNT: tl.constexpr):
    """Returns 1 if one of COUNT flags is set, else 0. Only the first `left` of them exist."""
    WIDTH: tl.constexpr = 8192 if COUNT > 8192 else triton.next_power_of_2(COUNT)
    found = tl.zeros([WIDTH], tl.uint8)
    for start in range(0, COUNT, WIDTH):
        place = start + tl.arange(0, WIDTH)
        found |= tl.load(flags + place, (place < COUNT) & (place < left), 0)
    return tl.max(found.to(tl.int32), 0)


@triton.jit
def _tile_exponents(units, tile, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the exponents of the factors of a tile's rows."""
    rows = tile * BLOCK + rows_of(tile, LENGTH, BLOCK)
    return tl.load(units + rows).to(tl.int32) - 127


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
