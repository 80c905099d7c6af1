"""Kernels that multiply expert by expert in one launch: packed MXFP4 operands, or arrays in FP8 or bfloat16.

Each expert's rows begin a new run of RUN rows, and zeros fill up its last one. So a tile of BLOCK_M rows, or
a step of BLOCK_K of them, both of which divide RUN, has the rows of one expert, and never mixes two. Results
have the rows without what fills up runs, as if there were GROUPS + 1 experts, of which the last has the rows
that none of the others has; their products are zero.

All kernels take what `mxjax.products.expert_rows.Runs` has: `starts` are the first run of each expert and
the end of the last, `ends` 0, the end of each expert's rows and the number of rows, `experts` the expert of
each run.
"""

import triton
import triton.language as tl

from mxjax.kernels.matmul.accumulate import accumulate_tile, accumulate_values
from mxjax.kernels.matmul.fp4_gemm import store_tile, tile_of


@triton.jit
def grouped_rows_kernel(
    lhs, lhs_scales, rhs, rhs_scales, experts, starts, ends, out, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SHUFFLED: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    """Computes a tile of out [rows, N], each row that of lhs [M, K] times its expert's of rhs [g, N, K].

    The grid is (tiles,). Scales and BLOCK_K are as in `mxjax.kernels.matmul.fp4_gemm.gemm_kernel`.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), M // BLOCK_M, tl.cdiv(N, BLOCK_N), GROUP_M, XCDS)
    expert, row, rows = place_of(experts, starts, ends, tile_m, RUN, BLOCK_M)
    if expert < GROUPS:
        acc = accumulate_tile(
            lhs, lhs_scales, rhs, rhs_scales, tile_m, tile_n, 0, expert.to(tl.int64), 0, None, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, SHUFFLED,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    _store_rows(out, acc, row, rows, tile_n, N, BLOCK_M, BLOCK_N)


@triton.jit
def grouped_sums_kernel(
    lhs, lhs_scales, rhs, rhs_scales, starts, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SHUFFLED: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    """Computes a tile of out[expert] = lhs [M, K] @ rhs [N, K].T, summed over the expert's runs of columns.

    Without any the sum is zero. The grid is (tiles, experts); the rest is as in `grouped_rows_kernel`.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M, XCDS)
    expert = tl.program_id(1)
    first = tl.load(starts + expert)
    steps = (tl.load(starts + expert + 1) - first) * (RUN // BLOCK_K)
    acc = accumulate_tile(
        lhs, lhs_scales, rhs, rhs_scales, tile_m, tile_n, 0, 0, first * (RUN // BLOCK_K), steps, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, SHUFFLED,
    )  # fmt: skip
    store_tile(out, acc, tile_m, tile_n, expert.to(tl.int64), M, N, BLOCK_M, BLOCK_N)


@triton.jit
def value_rows_kernel(
    lhs, lhs_factor, rhs, rhs_factor, experts, starts, ends, out, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Does what `grouped_rows_kernel` does, of arrays in FP8 or bfloat16 with factors.

    They are lhs [M, K] and rhs [g, N, K]. With UNITS each row has a unit byte, [M] and [g, N], and the factor
    2**(unit - 127). Otherwise each array has one factor in float32. The grid is any number of programs, which
    take tiles in turn.
    """
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = M // BLOCK_M * ACROSS
    x = tl.make_tensor_descriptor(lhs, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    y = tl.make_tensor_descriptor(rhs, [GROUPS * N, K], [K, 1], [BLOCK_N, BLOCK_K])
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, M // BLOCK_M, ACROSS, GROUP_M, 1)
        expert, row, rows = place_of(experts, starts, ends, tile_m, RUN, BLOCK_M)
        steps = tl.where(expert < GROUPS, (K + BLOCK_K - 1) // BLOCK_K, 0)
        rhs_row = tl.minimum(expert, GROUPS - 1) * N + tile_n * BLOCK_N
        acc = accumulate_values(x, y, tile_m * BLOCK_M, rhs_row, 0, steps, BLOCK_M, BLOCK_N, BLOCK_K, False)
        places = (tile_m * BLOCK_M, BLOCK_M, rhs_row, N - tile_n * BLOCK_N)
        acc = _times_factors(acc, lhs_factor, rhs_factor, places, UNITS)
        _store_rows(out, acc, row, rows, tile_n, N, BLOCK_M, BLOCK_N)


@triton.jit
def value_sums_kernel(
    lhs, lhs_factor, rhs, rhs_factor, starts, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUPS: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, UNITS: tl.constexpr, K_FIRST: tl.constexpr,
):  # fmt: skip
    """Does what `grouped_sums_kernel` does of lhs [M, K] and rhs [N, K]; see `value_rows_kernel`.

    With K_FIRST they are [K, M] and [K, N].
    """
    DOWN: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if K_FIRST:
        x = tl.make_tensor_descriptor(lhs, [K, M], [M, 1], [BLOCK_K, BLOCK_M])
        y = tl.make_tensor_descriptor(rhs, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    else:
        x = tl.make_tensor_descriptor(lhs, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        y = tl.make_tensor_descriptor(rhs, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    for tile in range(tl.program_id(0), GROUPS * DOWN * ACROSS, tl.num_programs(0)):
        expert = tile // (DOWN * ACROSS)
        tile_m, tile_n = tile_of(tile % (DOWN * ACROSS), DOWN, ACROSS, GROUP_M, 1)
        first = tl.load(starts + expert)
        steps = (tl.load(starts + expert + 1) - first) * (RUN // BLOCK_K)
        rows = (tile_m * BLOCK_M, tile_n * BLOCK_N)
        acc = accumulate_values(
            x, y, rows[0], rows[1], first * RUN, steps, BLOCK_M, BLOCK_N, BLOCK_K, K_FIRST
        )
        places = (rows[0], M - rows[0], rows[1], N - rows[1])
        acc = _times_factors(acc, lhs_factor, rhs_factor, places, UNITS)
        store_tile(out, acc, tile_m, tile_n, expert.to(tl.int64), M, N, BLOCK_M, BLOCK_N)


@triton.jit
def place_of(experts, starts, ends, tile_m, RUN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the expert of a tile of rows, its first row in the result, and the number of its rows there."""
    expert = tl.load(experts + tile_m // (RUN // BLOCK_M))
    row = tl.load(ends + expert) + tile_m * BLOCK_M - tl.load(starts + expert) * RUN
    return expert, row, tl.load(ends + expert + 1) - row


@triton.jit
def _times_factors(acc, lhs_factor, rhs_factor, places, UNITS: tl.constexpr):
    """Returns acc times its factors; see `value_rows_kernel`.

    Args:
      places: the tile's first row in lhs and how many follow, and the same of rhs.
    """
    lhs_row, rows, rhs_row, columns = places
    if UNITS:
        row, column = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        of_rows = tl.load(lhs_factor + lhs_row + row, row < rows, 127).to(tl.int32)
        of_columns = tl.load(rhs_factor + rhs_row + column, column < columns, 127).to(tl.int32)
        exponents = of_rows[:, None] + (of_columns[None, :] - 127)
        return acc * (exponents << 23).to(tl.float32, bitcast=True)
    return acc * tl.load(lhs_factor) * tl.load(rhs_factor)


@triton.jit
def _store_rows(out, acc, row, rows, tile_n, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores the first `rows` rows of a tile from a row of out [..., N] on, rounded to its dtype."""
    at, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    out += row.to(tl.int64) * N + tile_n * BLOCK_N
    inside = (at < rows) & (columns < N - tile_n * BLOCK_N)
    tl.store(out + (at * N + columns), acc.to(out.dtype.element_ty), mask=inside)
