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
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from mxjax.kernels.launch import ceil_div, order_on_dies, triton_call
from mxjax.kernels.matmul import aiter
from mxjax.kernels.matmul.accumulate import accumulate_tile
from mxjax.kernels.matmul.tiles import (
    AITER,
    TileName,
    Tiles,
    choose_tiles,
    is_aiter_faster,
    options_of,
    table_of,
)
from mxjax.kernels.mesh import batched_by_vmap, partitioned
from mxjax.numerics.formats import BLOCK
from mxjax.runtime.devices import Target, current_target


def matmul(
    lhs: UInt8[Array, "*batch m _"],
    lhs_scales: UInt8[Array, "*batch m _"],
    rhs: UInt8[Array, "*batch n _"],
    rhs_scales: UInt8[Array, "*batch n _"],
    dtype: DTypeLike = jnp.bfloat16,
    tiles: TileName | None = None,
) -> Float[Array, "*batch m n"]:
    """Returns lhs @ rhs.T of packed MXFP4 operands, accumulated in float32 and rounded to dtype.

    A scale byte of 255 makes every result that it enters NaN; byte 0 is 2**-127. Where Triton multiplies in
    bfloat16, an element times its scale saturates or underflows like a bfloat16, on Hopper below 2**-126.

    Args:
      lhs, rhs: two E2M1 elements a byte along k, the even one in the low nibble; k is a multiple of 32.
      lhs_scales, rhs_scales: one E8M0 byte for 32 elements.
      dtype: bfloat16 or float32.
      tiles: `AITER` for AMD's GEMM, which rounds to bfloat16, or None for the fastest.

    Raises:
      ValueError: shapes that do not match, or another dtype.
      NotImplementedError: sizes that AMD's GEMM does not take.
    """
    check_operands(lhs, lhs_scales, rhs, rhs_scales)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"matmul needs dtype bfloat16 or float32, got {dtype}; cast the result")
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), dtype)
    [y] = multiply_flat(_matmul(jnp.dtype(dtype), current_target(), tiles), lhs, lhs_scales, rhs, rhs_scales)
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
def _matmul(dtype, target: Target | None, tiles: TileName | None):
    """Returns the product as a function. JAX caches its trace, hence a separate function for each target."""
    return batched(summing(functools.partial(launch, target=target, tiles=tiles), dtype), "b m n")


def summing(multiply: Callable[..., jax.Array], dtype: DTypeLike) -> Callable[..., list[jax.Array]]:
    """Returns a part for `batched` of `multiply`, a function of the operands and `dtype`."""

    def part(*operands, summed_over):
        if not summed_over:
            return [multiply(*operands, dtype=dtype)]
        y = multiply(*operands, dtype=jnp.dtype(jnp.float32))
        return [lax.psum(y, summed_over).astype(dtype)]

    return part


def batched(
    part: Callable[..., list[jax.Array]], results: str, unit: int = BLOCK // 2, *, k_first: bool = False
) -> Callable[..., list[jax.Array]]:
    """Returns a product of [batch, ...] operands that meshes shard; vmap enlarges its batch.

    Args:
      part: a function of the operands or their shards, and of `summed_over`: the mesh axes that shard k, over
        which it must sum.
      results: the axes of its results, as in a rule of `partitioned`.
      unit: entries of a row that share a scale.
      k_first: whether scales are [batch, k / unit, m] and not [batch, m, k / unit], rhs's likewise.
    """

    def call(lhs, lhs_scales, rhs, rhs_scales, summed_over=()):
        return part(lhs, lhs_scales, rhs, rhs_scales, summed_over=summed_over)

    def multiply(*operands):
        blocks, rest = divmod(operands[0].shape[2], unit)
        m, n = ("k m", "k n") if k_first else ("m k", "n k")
        if blocks > 1 and not rest and blocks % jax.device_count() == 0:
            rule, sizes, whole = f"b m (k w), b {m}, b n (k w), b {n}", {"k": blocks, "w": unit}, ["w"]
        else:
            rule, sizes, whole = f"b m w, b {m}, b n w, b {n}", {}, ["w", "k"]
        return partitioned(call, f"{rule} -> {results}", sizes, whole, "k" if sizes else None)(*operands)

    return batched_by_vmap(multiply)


def launch(
    lhs: UInt8[Array, "batch m _"],
    lhs_scales: UInt8[Array, "batch m _"],
    rhs: UInt8[Array, "batch n _"],
    rhs_scales: UInt8[Array, "batch n _"],
    dtype: DTypeLike,
    target: Target | None,
    tiles: Tiles | TileName | None = None,
) -> Float[Array, "batch m n"]:
    """Returns lhs @ rhs.T by one launch of the kernel, with the given tiles, or by the fastest."""
    batch, m, k = lhs.shape[0], lhs.shape[1], lhs.shape[2] * 2
    n = rhs.shape[1]
    lhs_scales, rhs_scales = shuffle_scales(lhs_scales, target), shuffle_scales(rhs_scales, target)
    if tiles is None and dtype == jnp.bfloat16 and is_aiter_faster(m, n, k, batch, target):
        tiles = AITER
    if tiles == AITER:
        return aiter.multiply(lhs, lhs_scales, rhs, rhs_scales).astype(dtype)
    tiles = tiles if isinstance(tiles, Tiles) else choose_tiles(m, n, k, batch, target)
    [out] = triton_call(
        gemm_kernel,
        lhs,
        lhs_scales,
        rhs,
        rhs_scales,
        out=[jax.ShapeDtypeStruct((batch, m, n), dtype)],
        multiplies=True,
        grid=grid_of(m, n, batch, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=options_of(tiles, target),
        **constants_of(m, n, k, tiles, target),
    )
    return out


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
    lhs, lhs_scales, rhs, rhs_scales, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SHUFFLED: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    """Computes one BLOCK_M x BLOCK_N tile of out[b] = lhs[b] @ rhs[b].T; the grid is (tiles, batch).

    With SHUFFLED, scales are in the order of `shuffle_scales` for gfx950, and BLOCK_K is 256, or 128 if that
    divides K.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M, XCDS)
    batch = tl.program_id(1).to(tl.int64)
    acc = accumulate_tile(
        lhs, lhs_scales, rhs, rhs_scales, tile_m, tile_n, batch, batch, 0, None, M, N, K, BLOCK_M, BLOCK_N,
        BLOCK_K, SHUFFLED,
    )  # fmt: skip
    store_tile(out, acc, tile_m, tile_n, batch, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def store_tile(
    out, acc, tile_m, tile_n, batch, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
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
def tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr, XCDS: tl.constexpr):
    """Returns a program's tile, in columns of GROUP_M tiles that share operands in the L2 cache.

    Neighbouring tiles run on one of XCDS dies.
    """
    program = order_on_dies(program, tiles_m * tiles_n, XCDS)
    group = program // (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % rows, within // rows
