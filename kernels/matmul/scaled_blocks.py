"""Products of bfloat16 operands with a float32 scale for each run of elements along k, on CUDA.

The product of two runs is the matrix units'; its row's and column's scales are applied as it is added to the
float32 sum. So operands of which no bfloat16 holds the values are multiplied exactly, once.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from triton import knobs

from mxjax.kernels.launch import triton_call
from mxjax.kernels.matmul.accumulate import rows_of
from mxjax.kernels.matmul.fp4_gemm import grid_of, multiply_flat, store_tile, tile_of
from mxjax.kernels.matmul.tiles import Tiles
from mxjax.kernels.mesh import batched_by_vmap, partitioned
from mxjax.operands.kernel_operand import RUN
from mxjax.runtime.devices import Target, current_target

TILES = Tiles(128, 128, RUN, warps=8, stages=3)
"""Of those tried on H100 the fastest: 450 to 514 TFLOP/s, where XLA's bfloat16 GEMM reaches 789 to 828. With
4 warps, steps of 64 or tiles of 256 it is 200 to 430. Stages take 64 KiB of shared memory each."""


def matmul(
    lhs: Float[Array, "*batch m k"],
    lhs_scales: Float32[Array, "*batch runs m"],
    rhs: Float[Array, "*batch n k"],
    rhs_scales: Float32[Array, "*batch runs n"],
    dtype: DTypeLike,
) -> Float[Array, "*batch m n"]:
    """Returns lhs @ rhs.T, each run of RUN elements of a row times its scale, summed in float32.

    Args:
      lhs, rhs: in bfloat16; k is a multiple of 32.
      dtype: dtype of the result, to which float32 is rounded.
    """
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), dtype)
    of_kernel = dtype if dtype == jnp.bfloat16 else jnp.float32
    [y] = multiply_flat(_matmul(jnp.dtype(of_kernel), current_target()), lhs, lhs_scales, rhs, rhs_scales)
    return y.astype(dtype)


@functools.cache
def _matmul(dtype, target: Target | None):
    """Returns the product as a function. JAX caches its trace, hence a separate function for each target."""

    def part(lhs, lhs_scales, rhs, rhs_scales, summed_over):
        if not summed_over:
            return [_launch(lhs, lhs_scales, rhs, rhs_scales, dtype, target)]
        y = _launch(lhs, lhs_scales, rhs, rhs_scales, jnp.dtype(jnp.float32), target)
        return [lax.psum(y, summed_over).astype(dtype)]

    def multiply(*operands):
        k, runs = operands[0].shape[2], operands[1].shape[1]
        if runs > 1 and k % RUN == 0 and runs % jax.device_count() == 0:
            rule, sizes, whole, summed = (
                "b m (k w), b k m, b n (k w), b k n",
                {"k": runs, "w": RUN},
                ["w"],
                "k",
            )
        else:
            rule, sizes, whole, summed = "b m w, b k m, b n w, b k n", {}, ["w", "k"], None
        run = part if summed else functools.partial(part, summed_over=())
        return partitioned(run, f"{rule} -> b m n", sizes, whole, summed)(*operands)

    return batched_by_vmap(multiply)


def _launch(lhs, lhs_scales, rhs, rhs_scales, dtype, target: Target | None) -> jax.Array:
    has_227_kib = target is not None and 90 <= (target.compute_capability or 0) < 120
    (batch, m, k), n = lhs.shape, rhs.shape[1]
    if knobs.runtime.interpret:  # its dot takes the bits of bfloat16 for integers, and it truncates to it
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    [out] = triton_call(
        scaled_blocks_kernel,
        lhs,
        lhs_scales,
        rhs,
        rhs_scales,
        out=[jax.ShapeDtypeStruct((batch, m, n), jnp.float32 if knobs.runtime.interpret else dtype)],
        grid=grid_of(m, n, batch, TILES),
        num_warps=TILES.warps,
        num_stages=TILES.stages if has_227_kib else 1,
        M=m,
        N=n,
        K=k,
        RUN=RUN,
        BLOCK_M=TILES.m,
        BLOCK_N=TILES.n,
        GROUP_M=8,
    )
    return out.astype(dtype)


@triton.jit
def scaled_blocks_kernel(
    lhs, lhs_scales, rhs, rhs_scales, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Computes a tile of out[b] = lhs[b] @ rhs[b].T, each RUN elements of a row times its scale.

    lhs is [b, M, K], rhs [b, N, K], and scales are [b, runs, M] and [b, runs, N], float32. The grid is
    (tiles, b).
    """
    RUNS: tl.constexpr = (K + RUN - 1) // RUN
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M, 1)
    b = tl.program_id(1).to(tl.int64)
    m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
    row, column = rows_of(tile_m, M, BLOCK_M), rows_of(tile_n, N, BLOCK_N)
    k = tl.arange(0, RUN)
    xs = lhs + (b * M + m) * K + (row[:, None] * K + k[None, :])
    ys = rhs + (b * N + n) * K + (column[None, :] * K + k[:, None])
    row_scales = lhs_scales + b * (RUNS * M) + m + row
    column_scales = rhs_scales + b * (RUNS * N) + n + column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for run in range(RUNS):
        if K % RUN == 0:
            part = tl.dot(tl.load(xs), tl.load(ys))
        else:
            inside = k < K - run * RUN
            part = tl.dot(tl.load(xs, inside[None, :], 0), tl.load(ys, inside[:, None], 0))
        rows, columns = tl.load(row_scales + run * M), tl.load(column_scales + run * N)
        wide = tl.broadcast_to(rows[:, None], [BLOCK_M, BLOCK_N])
        acc = tl.fma(part * columns[None, :], wide, acc)
        xs += RUN
        ys += RUN
    store_tile(out, acc, tile_m, tile_n, b, M, N, BLOCK_M, BLOCK_N)
