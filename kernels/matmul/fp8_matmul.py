"""Products of packed MXFP4 operands on FP8 matrix units: exact in FP8 carriers, else recomputed by a kernel.

Whether FP8 represents the operands exactly is known only at run time. XLA's FP8 GEMM always runs.
`sift_kernel` then finds the rows in which what was lost is below rounding, and `correct_kernel` multiplies
the others that lost elements alone, so that the cost is in proportion to their number. The XLA program
needs no branch, which would copy its inputs and outputs.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.carry import carry_operands, rows_and_parts
from mxjax.kernels.matmul.correct_kernel import correct_kernel
from mxjax.kernels.matmul.fp4_gemm import batched, check_operands, multiply_flat
from mxjax.kernels.matmul.lost_rows import ROWS, sift
from mxjax.kernels.matmul.tiles import TILES, Tiles
from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import Carried, Carrier, group_of
from mxjax.operands.product import Product, contract_fp8
from mxjax.runtime.devices import Target, current_target

# Two for each of Hopper's multiprocessors.
PROGRAMS = 264
# On H200 6 stages, or 256 columns and 8 warps, are as fast; 128 rows have no registers for the offsets of
# gathered rows.
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

    Of lhs in E5M2, with K up to 8,192, a row that lost elements is recomputed only if a result may lack
    more than 2**-10 of itself for it in bfloat16, 2**-13 in float16 or 2**-26 in float32; where K is
    sharded, a shard's result, in float32. A recomputed result may become zero if it is below 2**-126 times
    the factors of its row and column. A row's factor is 2**-6 (E4M3) or 2**-13 (E5M2) of its largest scale,
    but from 2**-63 to 2**63.

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
    # Of training's operands Dgrad's gradient, which is lhs in E5M2, loses rows; Wgrad's was once seen to.
    grouped = carriers[0] == "e5m2"
    left, right = carry_operands((lhs, lhs_scales), (rhs, rhs_scales), carriers, target, grouped)
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

    Where `left` has groups, rows in which what was lost is negligible are left as they are (`sift`).

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
    blocks = operands[1].shape[2]
    if left.grouped is not None:
        left = sift(y, left, right, rows_and_parts(blocks)[0])
    grouped = (left.grouped, left.group_scales, left.far)
    has_groups = left.grouped is not None
    if not has_groups:
        grouped = (left.elements, left.unit, left.lost)  # not read
    tiles = correction_tiles(target)
    grid = min(ceil_div(m, tiles.m) * ceil_div(n, tiles.n), PROGRAMS), batch
    scratch = math.prod(grid), max(tiles.m, tiles.n)  # a tile's rows for each program
    corrected, row_factors, column_factors, _ = triton_call(
        correct_kernel,
        *(y, *operands, left.unit, right.unit, left.lost, right.lost, *grouped, right.elements),
        out=[
            jax.ShapeDtypeStruct(y.shape, y.dtype),
            jax.ShapeDtypeStruct((batch, m), jnp.float32),
            jax.ShapeDtypeStruct((batch, n), jnp.float32),
            jax.ShapeDtypeStruct(scratch, jnp.int32),
        ],
        in_place=True,
        multiplies=True,
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **correction_constants(m, n, BLOCK * blocks, tiles, has_groups),
    )
    return [corrected, row_factors, column_factors]


def correction_tiles(target: Target | None) -> Tiles:
    """Returns the tiles of the recomputed product."""
    interpreted = target is None or target.backend == "interpreter"
    return TILES["interpreter"][0] if interpreted else GATHERED


def correction_constants(m: int, n: int, k: int, tiles: Tiles, has_groups: bool) -> dict[str, int]:
    """Returns the kernel's arguments other than arrays.

    Args:
      has_groups: whether lhs has `grouped`, which needs whole rows.
    """
    rows, parts = rows_and_parts(k // BLOCK)
    return {
        "M": m,
        "N": n,
        "K": k,
        "LHS_ROWS": ROWS if has_groups else rows,
        "RHS_ROWS": rows,
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
