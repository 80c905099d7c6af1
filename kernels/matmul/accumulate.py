"""The main loops of the kernels that multiply MXFP4 operands: of a tile, and of rows from anywhere."""

import triton
import triton.language as tl


@triton.jit
def accumulate_tile(
    lhs, lhs_scales, rhs, rhs_scales, tile_m, tile_n, lhs_batch, rhs_batch, first, steps, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Returns a tile of lhs[lhs_batch] @ rhs[rhs_batch].T in float32; what is past the end is undefined.

    It is summed over `steps` steps of BLOCK_K from step `first`, an even one; or over all of K if `steps` is
    None and `first` 0.
    """
    x_rows = _rows_of(tile_m, M, BLOCK_M)
    y_rows = _rows_of(tile_n, N, BLOCK_N)
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    x_offsets = x_rows[:, None] * (K // 2) + packed[None, :]
    # Only transposed offsets, not a transposed tile, avoid bank conflicts in LDS.
    y_offsets = y_rows[None, :] * (K // 2) + packed[:, None]
    lhs += _start(lhs_batch, tile_m, M, K // 2, BLOCK_M) + first * (BLOCK_K // 2)
    rhs += _start(rhs_batch, tile_n, N, K // 2, BLOCK_N) + first * (BLOCK_K // 2)
    if SHUFFLED:
        # Triton 3.6's tl.cdiv returns no constexpr.
        X_STEP: tl.constexpr = (M + 255) // 256 * 2048
        Y_STEP: tl.constexpr = (N + 255) // 256 * 2048
        x_scale_offsets = tl.arange(0, BLOCK_M * 8)
        y_scale_offsets = tl.arange(0, BLOCK_N * 8)
        eights = first // (256 // BLOCK_K)
        lhs_scales += (lhs_batch * tl.cdiv(K, 256) + eights) * X_STEP + tile_m * (BLOCK_M * 8)
        rhs_scales += (rhs_batch * tl.cdiv(K, 256) + eights) * Y_STEP + tile_n * (BLOCK_N * 8)
    else:
        X_STEP: tl.constexpr = BLOCK_K // 32
        Y_STEP: tl.constexpr = BLOCK_K // 32
        x_scale_offsets = x_rows[:, None] * (K // 32) + blocks
        y_scale_offsets = y_rows[:, None] * (K // 32) + blocks
        lhs_scales += _start(lhs_batch, tile_m, M, K // 32, BLOCK_M) + first * X_STEP
        rhs_scales += _start(rhs_batch, tile_n, N, K // 32, BLOCK_N) + first * Y_STEP

    return _accumulate(
        lhs, x_offsets, lhs_scales, x_scale_offsets, rhs, y_offsets, rhs_scales, y_scale_offsets, X_STEP,
        Y_STEP, steps, K, BLOCK_M, BLOCK_N, BLOCK_K, SHUFFLED,
    )  # fmt: skip


@triton.jit
def accumulate_rows(
    lhs, lhs_scales, rhs, rhs_scales, lhs_rows, rhs_rows, first, steps, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns lhs[lhs_rows] @ rhs[rhs_rows].T in float32, of any BLOCK_M and BLOCK_N rows.

    The rows are int64 if their offsets need it. `first` and `steps` are as in `accumulate_tile`.
    """
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    return _accumulate(
        lhs + first * (BLOCK_K // 2), lhs_rows[:, None] * (K // 2) + packed[None, :],
        lhs_scales + first * (BLOCK_K // 32), lhs_rows[:, None] * (K // 32) + blocks,
        rhs + first * (BLOCK_K // 2), rhs_rows[None, :] * (K // 2) + packed[:, None],
        rhs_scales + first * (BLOCK_K // 32), rhs_rows[:, None] * (K // 32) + blocks, BLOCK_K // 32,
        BLOCK_K // 32, steps, K, BLOCK_M, BLOCK_N, BLOCK_K, False,
    )  # fmt: skip


@triton.jit
def accumulate_groups(
    lhs, lhs_scales, rhs, lhs_rows, rhs_rows, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns lhs[lhs_rows] @ rhs[rhs_rows].T in float32 of FP8 arrays with K columns, a multiple of BLOCK_K.

    Each BLOCK_K columns of a row of lhs have a scale byte in lhs_scales, from 1 to 254. Hopper's FP8 units
    keep 13 bits of a sum; here they sum BLOCK_K products before float32 takes over.
    """
    k = tl.arange(0, BLOCK_K)
    lhs_offsets = lhs_rows[:, None] * K + k[None, :]
    rhs_offsets = rhs_rows[None, :] * K + k[:, None]
    lhs_scales += lhs_rows * (K // BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    byte = tl.load(lhs_scales)
    for group in range(1, K // BLOCK_K + 1):
        following = tl.load(lhs_scales + tl.minimum(group, K // BLOCK_K - 1))  # for the next step
        products = tl.dot(tl.load(lhs + lhs_offsets), tl.load(rhs + rhs_offsets))
        scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        acc = tl.fma(products, tl.broadcast_to(scale[:, None], products.shape), acc)
        byte = following
        lhs += BLOCK_K
        rhs += BLOCK_K
    return acc


@triton.jit
def accumulate_values(
    lhs, rhs, lhs_row, rhs_row, first, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, K_FIRST: tl.constexpr,
):  # fmt: skip
    """Returns a tile of lhs @ rhs.T in float32 of arrays in FP8 or bfloat16, by descriptors of their tiles.

    It is summed over `steps` steps of BLOCK_K columns from column `first`. Hopper's FP8 units keep 13 bits of
    a sum; here they sum BLOCK_K products before float32 takes over.

    Args:
      lhs_row, rhs_row: the tile's first rows in both arrays.
      K_FIRST: whether they are transposed in memory, which Hopper multiplies in bfloat16 alone.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for column in range(first, first + steps * BLOCK_K, BLOCK_K):
        if K_FIRST:
            x = lhs.load([column, lhs_row]).T
            y = rhs.load([column, rhs_row])
        else:
            x = lhs.load([lhs_row, column])
            y = rhs.load([rhs_row, column]).T
        acc = tl.dot(x, y, acc, max_num_imprecise_acc=BLOCK_K if x.dtype.is_fp8() else None)
    return acc


@triton.jit
def _accumulate(
    lhs, x_offsets, lhs_scales, x_scale_offsets, rhs, y_offsets, rhs_scales, y_scale_offsets,
    X_STEP: tl.constexpr, Y_STEP: tl.constexpr, steps, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Returns the product in float32 of the rows that the offsets name, summed over K in steps of BLOCK_K.

    If `steps` is not None, it is summed over as many steps. With SHUFFLED and steps of 128, which must divide
    K, two steps load the same scales and take half of them.
    """
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    HALVES: tl.constexpr = SHUFFLED and BLOCK_K == 128
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(K // BLOCK_K if steps is None else steps):
        if HALVES:
            pair = (i // 2).to(tl.int64)
            x_scales = _half(tl.load(lhs_scales + x_scale_offsets + pair * X_STEP), i % 2, BLOCK_M)
            y_scales = _half(tl.load(rhs_scales + y_scale_offsets + pair * Y_STEP), i % 2, BLOCK_N)
        else:
            x_scales = _unshuffle(tl.load(lhs_scales + x_scale_offsets), BLOCK_M, SHUFFLED)
            y_scales = _unshuffle(tl.load(rhs_scales + y_scale_offsets), BLOCK_N, SHUFFLED)
        x = tl.load(lhs + x_offsets)
        y = tl.load(rhs + y_offsets)
        acc = tl.dot_scaled(x, x_scales, "e2m1", y, y_scales, "e2m1", acc)
        lhs += BLOCK_K // 2
        rhs += BLOCK_K // 2
        if not HALVES:
            lhs_scales += X_STEP
            rhs_scales += Y_STEP

    # The rest of K, with zero elements and scales of 1 past the end.
    REST: tl.constexpr = K % BLOCK_K if steps is None else 0
    if REST > 0:
        if SHUFFLED:
            x_scales = _unshuffle(tl.load(lhs_scales + x_scale_offsets), BLOCK_M, SHUFFLED)
            y_scales = _unshuffle(tl.load(rhs_scales + y_scale_offsets), BLOCK_N, SHUFFLED)
        else:
            x_scales = tl.load(lhs_scales + x_scale_offsets, mask=blocks < REST // 32, other=127)
            y_scales = tl.load(rhs_scales + y_scale_offsets, mask=blocks < REST // 32, other=127)
        x = tl.load(lhs + x_offsets, mask=(packed < REST // 2)[None, :], other=0)
        y = tl.load(rhs + y_offsets, mask=(packed < REST // 2)[:, None], other=0)
        acc = tl.dot_scaled(x, x_scales, "e2m1", y, y_scales, "e2m1", acc)
    return acc


@triton.jit
def _start(batch, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the offset (int64) of a tile of BLOCK rows in a [batch, ROWS, WIDTH] array."""
    return batch * (ROWS * WIDTH) + tile.to(tl.int64) * (BLOCK * WIDTH)


@triton.jit
def _rows_of(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a tile's rows relative to its first; those past the end repeat the last and are not stored."""
    rows = tl.arange(0, BLOCK)
    if ROWS % BLOCK != 0:
        rows = tl.minimum(rows, ROWS - 1 - tile * BLOCK)
    return rows


@triton.jit
def _unshuffle(scales, BLOCK: tl.constexpr, SHUFFLED: tl.constexpr):
    """Returns a tile's scales [BLOCK, 8], undoing the order of `shuffle_scales` if SHUFFLED."""
    if SHUFFLED:
        scales = scales.reshape(BLOCK // 32, 4, 16, 2, 2).permute(0, 4, 2, 3, 1).reshape(BLOCK, 8)
    return scales


@triton.jit
def _half(scales, which, BLOCK: tl.constexpr):
    """Returns half of what `_unshuffle` returns: [BLOCK, 4], for the first or the second 128 along k."""
    first, second = tl.split(scales.reshape(BLOCK // 32, 4, 16, 2, 2).permute(0, 4, 2, 1, 3))
    return tl.where(which == 0, first, second).reshape(BLOCK, 4)
