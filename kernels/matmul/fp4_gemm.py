"""GEMM of packed MXFP4 operands by `tl.dot_scaled`: E2M1 elements, E8M0 scales, float32 accumulation.

On gfx950 it compiles to v_mfma_scale_f32_16x16x128_f8f6f4, on sm_100 to tcgen05.mma kind::mxf4. Elsewhere
Triton multiplies in bfloat16. Both operands are K-major, which allows 16-byte loads.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8
from triton import knobs

from mxjax.devices import Target, current_target
from mxjax.formats import BLOCK
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.tiles import OPTIONS, Tiles, choose_tiles, table_of
from mxjax.kernels.mesh import partitioned


def matmul(
    lhs: UInt8[Array, "*batch m _"],
    lhs_scales: UInt8[Array, "*batch m _"],
    rhs: UInt8[Array, "*batch n _"],
    rhs_scales: UInt8[Array, "*batch n _"],
    dtype: DTypeLike = jnp.bfloat16,
) -> Float[Array, "*batch m n"]:
    """Returns lhs @ rhs.T of packed MXFP4 operands, accumulated in float32 and rounded to dtype.

    A scale byte of 255 makes every result that it enters NaN; byte 0 is 2**-127. Where Triton multiplies in
    bfloat16, an element times its scale saturates or underflows like a bfloat16, on Hopper below 2**-126.

    Args:
      lhs, rhs: two E2M1 elements a byte along k, the even one in the low nibble; k is a multiple of 32.
      lhs_scales, rhs_scales: one E8M0 byte for 32 elements.
      dtype: bfloat16 or float32.

    Raises:
      ValueError: shapes that do not match, or another dtype.
    """
    check_operands(lhs, lhs_scales, rhs, rhs_scales)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"matmul needs dtype bfloat16 or float32, got {dtype}; cast the result")
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), dtype)
    [y] = multiply_flat(_matmul(jnp.dtype(dtype), current_target()), lhs, lhs_scales, rhs, rhs_scales)
    return y


def check_operands(lhs: jax.Array, lhs_scales: jax.Array, rhs: jax.Array, rhs_scales: jax.Array) -> None:
    """Raises ValueError unless the shapes match and the kernels' offsets fit into 32 bits."""
    *batch, m, k = (*lhs.shape[:-1], lhs.shape[-1] * 2)
    n = rhs.shape[-2]
    if k % BLOCK or rhs.shape[-1] * 2 != k:
        raise ValueError(
            f"matmul needs lhs and rhs with equal k, a multiple of {BLOCK}, "
            f"got packed {lhs.shape} and {rhs.shape}"
        )
    if lhs_scales.shape != (*batch, m, k // BLOCK) or rhs_scales.shape != (*batch, n, k // BLOCK):
        raise ValueError(
            f"matmul needs scales of shapes {(*batch, m, k // BLOCK)} and {(*batch, n, k // BLOCK)}, "
            f"got {lhs_scales.shape} and {rhs_scales.shape}"
        )
    if max(n, k) >= 2**21 or m >= 2**28:
        raise ValueError(
            f"matmul needs n and k below 2**21 and m below 2**28 for 32-bit offsets, got n={n}, k={k}, m={m}"
        )


def multiply_flat(run: Callable[..., list[jax.Array]], *operands: jax.Array) -> list[jax.Array]:
    """Flattens the operands' batch axes, calls `run`, and restores the axes in its results."""
    batch = operands[0].shape[:-2]
    flat = [x.reshape(math.prod(batch), *x.shape[-2:]) for x in operands]
    return [y.reshape(*batch, *y.shape[1:]) for y in run(*flat)]


@functools.cache
def _matmul(dtype, target: Target | None):
    """Returns the product as a function. JAX caches its trace, hence a separate function for each target."""

    def part(*operands, summed_over):
        if not summed_over:
            return [launch(*operands, dtype, target)]
        y = launch(*operands, jnp.dtype(jnp.float32), target)
        return [lax.psum(y, summed_over).astype(dtype)]

    return batched(part, "b m n")


def batched(part: Callable[..., list[jax.Array]], results: str) -> Callable[..., list[jax.Array]]:
    """Returns a product of [batch, ...] operands that meshes shard; vmap enlarges its batch.

    Args:
      part: a function of the operands or their shards, and of `summed_over`: the mesh axes that shard k, over
        which it must sum.
      results: the axes of its results, as in a rule of `partitioned`.
    """

    def call(lhs, lhs_scales, rhs, rhs_scales, summed_over=()):
        return part(lhs, lhs_scales, rhs, rhs_scales, summed_over=summed_over)

    @custom_vmap
    def multiply(*operands):
        blocks = operands[1].shape[2]
        if blocks > 1 and blocks % jax.device_count() == 0:
            rule, sizes, whole = "b m (k w), b m k, b n (k w), b n k", {"k": blocks, "w": 16}, ["w"]
        else:
            rule, sizes, whole = "b m w, b m k, b n w, b n k", {}, ["w", "k"]
        return partitioned(call, f"{rule} -> {results}", sizes, whole, "k" if sizes else None)(*operands)

    @multiply.def_vmap
    def _(size, mapped, *operands):
        operands = [
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(operands, mapped, strict=True)
        ]
        out = multiply_flat(multiply, *operands)
        return out, [True] * len(out)

    return multiply


def launch(
    lhs: UInt8[Array, "batch m _"],
    lhs_scales: UInt8[Array, "batch m _"],
    rhs: UInt8[Array, "batch n _"],
    rhs_scales: UInt8[Array, "batch n _"],
    dtype: DTypeLike,
    target: Target | None,
    tiles: Tiles | None = None,
) -> Float[Array, "batch m n"]:
    """Returns lhs @ rhs.T by one launch of the kernel, with the given tiles or the fastest."""
    batch, m, k = lhs.shape[0], lhs.shape[1], lhs.shape[2] * 2
    n = rhs.shape[1]
    tiles = tiles or choose_tiles(m, n, k, batch, target)
    [out] = triton_call(
        gemm_kernel,
        lhs,
        shuffle_scales(lhs_scales, target),
        rhs,
        shuffle_scales(rhs_scales, target),
        # Triton's interpreter truncates to bfloat16 where GPUs round.
        out=[jax.ShapeDtypeStruct((batch, m, n), jnp.float32 if knobs.runtime.interpret else dtype)],
        grid=grid_of(m, n, batch, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=OPTIONS.get(table_of(target), {}),
        **constants_of(m, n, k, tiles, target),
    )
    return out.astype(dtype)


def shuffle_scales(
    scales: UInt8[Array, "batch rows blocks"], target: Target | None
) -> UInt8[Array, "batch rows_ blocks_"]:
    """Returns scales in the order in which the target's matrix instructions read them.

    On gfx950 the result is [batch, ceil(blocks / 8), ceil(rows / 256) * 2048], padded with byte 127. Within
    32 rows and 8 blocks, [2, 16 rows, 2, 4 blocks] becomes [4, 16, 2, 2]: the four bytes that a lane of
    v_mfma_scale_f32_16x16x128 uses in turn are one word, as in Triton's tutorial on block-scaled matrix
    multiplication. Other targets take the scales unchanged.
    """
    if table_of(target) != "gfx950":
        return scales
    batch, rows, blocks = scales.shape
    rows_, blocks_ = ceil_div(rows, 256) * 256, ceil_div(blocks, 8) * 8
    scales = jnp.pad(scales, ((0, 0), (0, rows_ - rows), (0, blocks_ - blocks)), constant_values=127)
    scales = scales.reshape(batch, rows_ // 32, 2, 16, blocks_ // 8, 2, 4).transpose(0, 4, 1, 6, 3, 5, 2)
    return scales.reshape(batch, blocks_ // 8, rows_ * 8)


def grid_of(m: int, n: int, batch: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the number of programs along each grid axis."""
    return (ceil_div(m, tiles.m) * ceil_div(n, tiles.n), batch)


def constants_of(m: int, n: int, k: int, tiles: Tiles, target: Target | None) -> dict[str, int | bool]:
    """Returns the kernel's constexpr arguments."""
    native_amd = table_of(target) == "gfx950"
    return {
        "M": m,
        "N": n,
        "K": k,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "GROUP_M": 8,
        "SHUFFLED": native_amd,
        "XCDS": 8 if native_amd else 1,
    }


@triton.jit
def gemm_kernel(
    lhs,
    lhs_scales,
    rhs,
    rhs_scales,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SHUFFLED: tl.constexpr,
    XCDS: tl.constexpr,
):
    """Computes one BLOCK_M x BLOCK_N tile of out[b] = lhs[b] @ rhs[b].T; the grid is (tiles, batch).

    With SHUFFLED, scales are in the order of `shuffle_scales` for gfx950, and BLOCK_K is 256.
    """
    tile_m, tile_n = _tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M, XCDS)
    batch = tl.program_id(1).to(tl.int64)
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
        SHUFFLED,
    )
    store_tile(out, acc, tile_m, tile_n, batch, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def accumulate_tile(
    lhs,
    lhs_scales,
    rhs,
    rhs_scales,
    tile_m,
    tile_n,
    batch,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHUFFLED: tl.constexpr,
):
    """Returns one tile of lhs[b] @ rhs[b].T in float32; rows and columns past the end are undefined."""
    x_rows = rows_of(tile_m, M, BLOCK_M)
    y_rows = rows_of(tile_n, N, BLOCK_N)
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    x_offsets = x_rows[:, None] * (K // 2) + packed[None, :]
    # Only transposed offsets, not a transposed tile, avoid bank conflicts in LDS.
    y_offsets = y_rows[None, :] * (K // 2) + packed[:, None]
    lhs += _start(batch, tile_m, M, K // 2, BLOCK_M)
    rhs += _start(batch, tile_n, N, K // 2, BLOCK_N)
    if SHUFFLED:
        X_STEP: tl.constexpr = tl.cdiv(M, 256) * 2048
        Y_STEP: tl.constexpr = tl.cdiv(N, 256) * 2048
        x_scale_offsets = tl.arange(0, BLOCK_M * 8)
        y_scale_offsets = tl.arange(0, BLOCK_N * 8)
        lhs_scales += batch * (tl.cdiv(K, 256) * X_STEP) + tile_m * (BLOCK_M * 8)
        rhs_scales += batch * (tl.cdiv(K, 256) * Y_STEP) + tile_n * (BLOCK_N * 8)
    else:
        X_STEP: tl.constexpr = BLOCK_K // 32
        Y_STEP: tl.constexpr = BLOCK_K // 32
        x_scale_offsets = x_rows[:, None] * (K // 32) + blocks
        y_scale_offsets = y_rows[:, None] * (K // 32) + blocks
        lhs_scales += _start(batch, tile_m, M, K // 32, BLOCK_M)
        rhs_scales += _start(batch, tile_n, N, K // 32, BLOCK_N)

    return _accumulate(
        lhs,
        x_offsets,
        lhs_scales,
        x_scale_offsets,
        rhs,
        y_offsets,
        rhs_scales,
        y_scale_offsets,
        X_STEP,
        Y_STEP,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SHUFFLED,
    )


@triton.jit
def accumulate_rows(
    lhs,
    lhs_scales,
    rhs,
    rhs_scales,
    lhs_rows,
    rhs_rows,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns lhs[lhs_rows] @ rhs[rhs_rows].T in float32, of any BLOCK_M and BLOCK_N rows.

    The rows are int64 if their offsets need it.
    """
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    return _accumulate(
        lhs,
        lhs_rows[:, None] * (K // 2) + packed[None, :],
        lhs_scales,
        lhs_rows[:, None] * (K // 32) + blocks,
        rhs,
        rhs_rows[None, :] * (K // 2) + packed[:, None],
        rhs_scales,
        rhs_rows[:, None] * (K // 32) + blocks,
        BLOCK_K // 32,
        BLOCK_K // 32,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        False,
    )


@triton.jit
def _accumulate(
    lhs,
    x_offsets,
    lhs_scales,
    x_scale_offsets,
    rhs,
    y_offsets,
    rhs_scales,
    y_scale_offsets,
    X_STEP: tl.constexpr,
    Y_STEP: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHUFFLED: tl.constexpr,
):
    """Returns the product in float32 of the rows that the offsets name, summed over K in steps of BLOCK_K."""
    packed = tl.arange(0, BLOCK_K // 2)
    blocks = tl.arange(0, BLOCK_K // 32)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K // BLOCK_K):
        x_scales = _unshuffle(tl.load(lhs_scales + x_scale_offsets), BLOCK_M, SHUFFLED)
        y_scales = _unshuffle(tl.load(rhs_scales + y_scale_offsets), BLOCK_N, SHUFFLED)
        x = tl.load(lhs + x_offsets)
        y = tl.load(rhs + y_offsets)
        acc = tl.dot_scaled(x, x_scales, "e2m1", y, y_scales, "e2m1", acc)
        lhs += BLOCK_K // 2
        rhs += BLOCK_K // 2
        lhs_scales += X_STEP
        rhs_scales += Y_STEP

    # The rest of K, with zero elements and scales of 1 past the end.
    REST: tl.constexpr = K % BLOCK_K
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
def store_tile(
    out,
    acc,
    tile_m,
    tile_n,
    batch,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores the part of a tile that lies inside out [batch, M, N], rounded to its dtype."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    out += batch * (M * N) + tile_m.to(tl.int64) * (BLOCK_M * N) + tile_n * BLOCK_N
    offsets = rows * N + columns
    if M % BLOCK_M == 0 and N % BLOCK_N == 0:
        tl.store(out + offsets, acc.to(out.dtype.element_ty))
    else:
        inside = (rows < M - tile_m * BLOCK_M) & (columns < N - tile_n * BLOCK_N)
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(program, tiles_m, tiles_n, GROUP_M: tl.constexpr, XCDS: tl.constexpr):
    """Returns a program's tile, in columns of GROUP_M tiles that share operands in the L2 cache.

    The GPU assigns programs in turn to XCDS dies, each with its own L2 cache. The order here puts
    neighbouring tiles on one die.
    """
    if XCDS > 1:
        total = tiles_m * tiles_n
        die = program % XCDS
        program = die * (total // XCDS) + tl.minimum(die, total % XCDS) + program // XCDS
    group = program // (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % rows, within // rows


@triton.jit
def _start(batch, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the offset (int64) of a tile of BLOCK rows in a [batch, ROWS, WIDTH] array."""
    return batch * (ROWS * WIDTH) + tile.to(tl.int64) * (BLOCK * WIDTH)


@triton.jit
def rows_of(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
