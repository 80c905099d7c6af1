"""Kernels that see to the rows which FP8 carriers lost in products expert by expert, as in dense ones.

The products have the factors of their rows and columns, and rows are placed as in
`mxjax.kernels.matmul.grouped_kernel`.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int32

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul import lost_rows
from mxjax.kernels.matmul.carry import rows_and_parts
from mxjax.kernels.matmul.correct_kernel import correct_part
from mxjax.kernels.matmul.fp8_matmul import PROGRAMS, correction_constants, correction_tiles
from mxjax.kernels.matmul.grouped_kernel import place_of
from mxjax.kernels.matmul.lost_rows import least_of_rows
from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import Carried
from mxjax.runtime.devices import Target


def sift_rows(
    y: Float[Array, "rows n"], left: Carried, right: Carried, places: tuple[Int32[Array, " _"], ...], run: int
) -> Carried:
    """Returns `left` without the flags of rows in which what was lost is negligible; see `lost_rows.sift`.

    Args:
      y: the product with its factors.
      left: with groups, of a batch of 1.
      places: experts, starts and ends.
    """
    m, n, blocks = left.unit.shape[1], y.shape[1], left.elements.shape[2] // BLOCK
    flags = jax.ShapeDtypeStruct((1, m // lost_rows.ROWS), jnp.uint32)
    constants = lost_rows.constants_of(m, n, y.dtype, right.elements.dtype, rows_and_parts(blocks)[0])
    lost, far = triton_call(
        sift_experts_kernel,
        *(y, left.lost_sum, left.lost, left.far, left.unit, right.unit, *places),
        out=[flags, flags],
        grid=(flags.shape[1],),
        num_warps=lost_rows.WARPS,
        **constants | {"GROUPS": right.unit.shape[0], "RUN": run},
    )
    return left._replace(lost=lost, far=far)


def correct_experts(
    y: Float[Array, "..."],
    operands: tuple[jax.Array, ...],
    left: Carried,
    right: Carried,
    places: tuple[Int32[Array, " g_1"], Int32[Array, " g_2"]],
    run: int,
    target: Target | None,
) -> Float[Array, "..."]:
    """Returns y, recomputed where its row or column lost elements; see `fp8_matmul.correct`.

    Args:
      y: [rows, n] of rows and their experts, or [g, m, n] of sums over experts' runs. It is overwritten.
      operands: packed lhs, lhs_scales, rhs, rhs_scales, without batch axes but rhs's of experts.
      places: starts and ends.
    """
    m, n, blocks = left.unit.shape[-1], right.unit.shape[-1], operands[1].shape[-1]
    groups, has_groups = places[0].size - 1, left.grouped is not None
    parts = rows_and_parts(blocks)[1]
    if parts > 1:  # one flag for all parts of a row, of which the contracted rows of all experts have many
        left, right = (
            q._replace(lost=jnp.max(q.lost.reshape(*q.unit.shape, parts), axis=-1)) for q in (left, right)
        )
    grouped = (left.grouped, left.group_scales, left.far)
    if not has_groups:
        grouped = (left.elements, left.unit, left.lost)  # not read
    tiles = correction_tiles(target)
    tiles_of_all = ceil_div(m, tiles.m) * ceil_div(n, tiles.n)
    grid = min(tiles_of_all, max(1, PROGRAMS // groups)), groups
    corrected, _ = triton_call(
        correct_experts_kernel,
        *(y, *operands, left.unit, right.unit, left.lost, right.lost, *grouped, right.elements, *places),
        out=[
            jax.ShapeDtypeStruct(y.shape, y.dtype),
            jax.ShapeDtypeStruct((math.prod(grid), max(tiles.m, tiles.n)), jnp.int32),
        ],
        in_place=True,
        multiplies=True,
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **correction_constants(m, n, BLOCK * blocks, tiles, has_groups)
        | {"PARTS": 1, "RUN": run, "SUMS": y.ndim == 3},
    )
    return corrected


@triton.jit
def sift_experts_kernel(
    y, lost_sum, lost, far, lhs_unit, rhs_unit, experts, starts, ends, still_lost, still_far, M: tl.constexpr,
    N: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, FROM: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Does what `lost_rows.sift_kernel` does, of rows of experts; the grid is (M / ROWS,)."""
    program = tl.program_id(0)
    expert, y_row, rows = place_of(experts, starts, ends, program, RUN, ROWS)
    index = tl.arange(0, ROWS)
    row = program * ROWS + index
    bit = (row % FROM).to(tl.uint32)
    inside = index < tl.where(expert < GROUPS, rows, 0)
    is_lost = (tl.load(lost + row // FROM, inside, 0) >> bit) & 1
    if tl.max(is_lost.to(tl.int32), 0) > 0:
        unit = tl.load(lhs_unit + row, inside, 127).to(tl.int32)
        bound = tl.load(lost_sum + row, is_lost > 0, 0.0) * FACTOR
        bound *= (unit << 23).to(tl.float32, bitcast=True)
        least = least_of_rows(y, y_row.to(tl.int64) + index, is_lost, rhs_unit + expert * N, N, ROWS, WIDTH)
        is_lost &= (least < bound).to(tl.uint32)
    tl.store(still_lost + program, tl.sum(is_lost << index.to(tl.uint32), 0).to(tl.uint32))
    is_far = is_lost & (tl.load(far + row // FROM, inside, 0) >> bit)
    tl.store(still_far + program, tl.sum(is_far << index.to(tl.uint32), 0).to(tl.uint32))


@triton.jit
def correct_experts_kernel(
    before, lhs, lhs_scales, rhs, rhs_scales, lhs_unit, rhs_unit, lhs_lost, rhs_lost, lhs_grouped,
    lhs_group_scales, lhs_far, rhs_fp8, starts, ends, out, scratch, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, RUN: tl.constexpr, SUMS: tl.constexpr, LHS_ROWS: tl.constexpr, RHS_ROWS: tl.constexpr,
    PARTS: tl.constexpr, LARGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FP8_N: tl.constexpr,
):  # fmt: skip
    """Does what `mxjax.kernels.matmul.correct_kernel.correct_kernel` does, of products expert by expert.

    With SUMS, out [g, M, N] is of experts' runs of K, lhs [M, K] and rhs [N, K]. Otherwise out [rows, N] is
    of experts' rows of lhs [M, K] and their rhs, of [g, N, K]. The grid is (programs, experts).
    """
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(starts + expert)
    left = (lhs, lhs_scales, lhs_unit, lhs_lost, None)
    right = (rhs, rhs_scales, rhs_unit, rhs_lost, None)
    STEPS: tl.constexpr = RUN // BLOCK_K
    if SUMS:
        left_part, right_part = (0, M, 0), (0, N, 0)
        out += expert * M * N
        first_step, steps = first * STEPS, (tl.load(starts + expert + 1) - first) * STEPS
    else:
        row, end = tl.load(ends + expert), tl.load(ends + expert + 1)
        left_first = first.to(tl.int64) * RUN
        left_part = (left_first, end - row, left_first // LHS_ROWS * PARTS)
        right_part = (expert * N, N, expert * (tl.cdiv(N, RHS_ROWS) * PARTS))
        out += row.to(tl.int64) * N
        first_step, steps = 0, None
    correct_part(
        left, left_part, right, right_part, (lhs_grouped, lhs_group_scales, lhs_far, rhs_fp8), out, scratch,
        first_step, steps, True, K, LHS_ROWS, RHS_ROWS, PARTS, LARGE, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, FP8_N,
    )  # fmt: skip
