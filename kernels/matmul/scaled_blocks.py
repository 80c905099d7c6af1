"""Products of bfloat16 operands with a float32 scale for each run of elements along k, on CUDA.

The product of two runs is the matrix units'; its row's and column's scales are applied as it is added to the
float32 sum. So operands of which no bfloat16 holds the values are multiplied exactly, once.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.fp4_gemm import batched, multiply_flat, store_tile, summing, tile_of
from mxjax.kernels.matmul.tiles import Tiles
from mxjax.operands.kernel_operand import RUN
from mxjax.runtime.devices import Target, current_target

PROGRAMS = 132
"""Programs that take tiles in turn: one for each multiprocessor of an H100."""
TILES = Tiles(128, 128, RUN, warps=8, stages=3)
"""Of those tried on H100 the fastest: 461 to 521 TFLOP/s, where XLA's bfloat16 GEMM reaches 775 to 812. With
4 warps, steps of 64 or tiles of 256 it is 142 to 430, and by pointers instead of descriptors 375. Stages take
64 KiB of shared memory each."""


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
    return batched(summing(functools.partial(_multiply, target=target), dtype), "b m n", RUN, k_first=True)


def _multiply(lhs, lhs_scales, rhs, rhs_scales, dtype, target: Target | None) -> jax.Array:
    has_227_kib = target is not None and 90 <= (target.compute_capability or 0) < 120
    (batch, m, k), n = lhs.shape, rhs.shape[1]
    [out] = triton_call(
        scaled_blocks_kernel,
        lhs,
        lhs_scales,
        rhs,
        rhs_scales,
        out=[jax.ShapeDtypeStruct((batch, m, n), dtype)],
        multiplies=True,
        grid=(min(ceil_div(m, TILES.m) * ceil_div(n, TILES.n) * batch, PROGRAMS),),
        num_warps=TILES.warps,
        # With a single run the tiles are the loop that is pipelined, by a stage more, which no GPU holds.
        num_stages=TILES.stages if has_227_kib and k > RUN else 1,
        B=batch,
        M=m,
        N=n,
        K=k,
        RUN=RUN,
        BLOCK_M=TILES.m,
        BLOCK_N=TILES.n,
        GROUP_M=8,
    )
    return out


@triton.jit
def scaled_blocks_kernel(
    lhs, lhs_scales, rhs, rhs_scales, out, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Computes out [B, M, N] = lhs [B, M, K] @ rhs [B, N, K].T, each RUN elements of a row times its scale.

    Scales are [B, runs, M] and [B, runs, N], float32. The grid is any number of programs, which take tiles in
    turn.
    """
    DOWN: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    RUNS: tl.constexpr = (K + RUN - 1) // RUN
    x = tl.make_tensor_descriptor(lhs, [B * M, K], [K, 1], [BLOCK_M, RUN])
    y = tl.make_tensor_descriptor(rhs, [B * N, K], [K, 1], [BLOCK_N, RUN])
    for tile in range(tl.program_id(0), B * DOWN * ACROSS, tl.num_programs(0)):
        b = tile // (DOWN * ACROSS)
        tile_m, tile_n = tile_of(tile % (DOWN * ACROSS), DOWN, ACROSS, GROUP_M, 1)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        row_scales = lhs_scales + b.to(tl.int64) * (RUNS * M) + m + row
        column_scales = rhs_scales + b.to(tl.int64) * (RUNS * N) + n + column
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for run in range(RUNS):
            rows = tl.load(row_scales + run * M, row < M - m, 0.0)  # while the units multiply
            columns = tl.load(column_scales + run * N, column < N - n, 0.0)
            part = tl.dot(x.load([b * M + m, run * RUN]), y.load([b * N + n, run * RUN]).T)
            wide = tl.broadcast_to(rows[:, None], [BLOCK_M, BLOCK_N])
            acc = tl.fma(part * columns[None, :], wide, acc)
        store_tile(out, acc, tile_m, tile_n, b.to(tl.int64), M, N, BLOCK_M, BLOCK_N)
