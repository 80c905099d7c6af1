"""The quantiles past which a token's elements are outliers, from one read of the tensor.

`mxjax.operands.split.quantiles` defines them; these are the same elements. A row stays in registers. Every
few of its elements form a group. The n-th largest of the groups' maxima, found bit by bit, is at most the
n-th largest element, and few elements lie between: from there the kernel climbs from one element to the next.
"""

import functools
import math

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.mesh import batched_by_vmap, partitioned
from mxjax.operands.split import Quantiles, quantile_ranks
from mxjax.runtime.devices import Target

LONGEST_ROW = 2**15  # 64 elements a thread
DTYPES = ("bfloat16", "float16", "float32")


def takes(x: jax.Array, target: Target | None) -> bool:
    """Whether the kernel finds the quantiles of the rows of x; nobody has run it on HIP."""
    runs = target is not None and target.backend != "hip"
    return runs and x.dtype.name in DTYPES and x.size > 0 and x.shape[-1] <= LONGEST_ROW


def quantiles(x: Float[Array, "*batch m k"], quantile: float) -> Quantiles:
    """Returns the quantiles of each row of x, which `takes` accepts."""
    *batch, m, k = x.shape
    found = _finder(*quantile_ranks(k, quantile))(x.reshape(math.prod(batch), m, k))
    return Quantiles(*(y.reshape(*batch, m, 1) for y in found))


@functools.cache
def _finder(lower: int, upper: int):
    """Returns a function of x [v, m, k] that returns two elements of each row; vmap grows v."""
    run = functools.partial(_find, lower, upper)
    return batched_by_vmap(partitioned(run, "v m k -> v m, v m", {}, ["k"]))


def _find(lower: int, upper: int, x: jax.Array) -> list[jax.Array]:
    v, m, k = x.shape
    largest, smallest = k - upper, lower + 1
    depth = 8 if 32 * max(largest, smallest) <= k else 1  # else the climb would be long
    width = triton.next_power_of_2(ceil_div(k, depth))
    return triton_call(
        quantile_kernel,
        x,
        out=[jax.ShapeDtypeStruct((v, m), x.dtype)] * 2,
        grid=(v * m,),
        num_warps=min(max(depth * width // 2048, 1), 16),
        K=k,
        SMALLEST=smallest,
        LARGEST=largest,
        DEPTH=depth,
        WIDTH=width,
        BITS=8 * x.dtype.itemsize,
    )


@triton.jit
def quantile_kernel(
    x, lower, upper, K: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Writes the SMALLEST-th smallest and the LARGEST-th largest element of each row of x [rows, K].

    NaN counts as larger than infinity, and minus zero as smaller than zero. One program takes one row.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    keys = _keys(tl.load(x + row * K + at, at < K, 0))
    outside: tl.constexpr = -(2**31)
    largest = _nth_largest(tl.where(at < K, keys, outside), LARGEST, DEPTH, BITS)
    smallest = ~_nth_largest(tl.where(at < K, ~keys, outside), SMALLEST, DEPTH, BITS)
    tl.store(upper + row, _value(largest, upper.dtype.element_ty))
    tl.store(lower + row, _value(smallest, lower.dtype.element_ty))


@triton.jit
def _nth_largest(keys, N: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr):
    """Returns the N-th largest of int32 keys [DEPTH, WIDTH] of so many bits."""
    maxima = tl.max(keys, axis=0)
    found = tl.where(tl.sum((maxima >= 0).to(tl.int32)) >= N, 0, -(2 ** (BITS - 1)))
    for i in range(1, BITS):
        larger = found + (1 << (BITS - 1 - i))
        found = tl.where(tl.sum((maxima >= larger).to(tl.int32)) >= N, larger, found)
    if DEPTH > 1:
        above = tl.sum((keys > found).to(tl.int32))
        while above >= N:
            found = tl.min(tl.where(keys > found, keys, 2**31 - 1))
            above = tl.sum((keys > found).to(tl.int32))
    return found


@triton.jit
def _constants(DTYPE: tl.constexpr):
    """Returns the bits of the largest magnitude, of infinity and of NaN."""
    if tl.float32 == DTYPE:
        return 0x7FFFFFFF, 0x7F800000, 0x7FC00000
    if tl.bfloat16 == DTYPE:
        return 0x7FFF, 0x7F80, 0x7FC0
    return 0x7FFF, 0x7C00, 0x7E00


@triton.jit
def _keys(values):
    """Returns int32 in the order of floats."""
    magnitude, infinity, nan = _constants(values.dtype)
    if values.dtype == tl.float32:
        bits = values.to(tl.int32, bitcast=True)
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
    keys = bits ^ ((bits >> 31) & magnitude)
    return tl.where(keys < -1 - infinity, nan, keys)  # NaN with a sign is no smaller than others


@triton.jit
def _value(key, DTYPE: tl.constexpr):
    """Returns the float of a key, every NaN as the same."""
    magnitude, infinity, nan = _constants(DTYPE)
    bits = tl.where(key > infinity, nan, key ^ ((key >> 31) & magnitude))
    if tl.float32 != DTYPE:
        bits = bits.to(tl.int16)
    return bits.to(DTYPE, bitcast=True)
