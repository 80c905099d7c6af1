"""The launch of the kernel that recomputes the rows of an FP8 product whose operands lost elements."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from triton import knobs

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.carry import rows_and_parts
from mxjax.kernels.matmul.correct_kernel import correct_kernel
from mxjax.kernels.matmul.lost_rows import ROWS, sift
from mxjax.kernels.matmul.tiles import TILES, Tiles
from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import Carried, group_of
from mxjax.runtime.devices import Target

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
    # Triton's interpreter truncates to bfloat16 where GPUs round.
    before = y.astype(jnp.float32) if knobs.runtime.interpret else y
    tiles = tiles_of(target)
    grid = min(ceil_div(m, tiles.m) * ceil_div(n, tiles.n), PROGRAMS), batch
    scratch = math.prod(grid), max(tiles.m, tiles.n)  # a tile's rows for each program
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
            jax.ShapeDtypeStruct(scratch, jnp.int32),
        ],
        in_place=True,
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **constants_of(m, n, BLOCK * blocks, tiles, has_groups),
    )
    return [corrected.astype(y.dtype), row_factors, column_factors]


def tiles_of(target: Target | None) -> Tiles:
    """Returns the tiles of the recomputed product."""
    interpreted = target is None or target.backend == "interpreter"
    return TILES["interpreter"][0] if interpreted else GATHERED


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
