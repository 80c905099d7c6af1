"""Blocks, the elements that share a scale: their shapes, their maxima, and the broadcast of their scales.

A block is r x b: b elements along the blocked axis and r along the other of the last two axes. Axes that are
not a multiple of the block are padded with zeros, which change no maximum.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped

from mxjax.numerics.formats import Format

BlockShape = int | tuple[int, int] | None


def resolve_block_shape(f: Format, block_shape: BlockShape, ndim: int, axis: int) -> tuple[int, int]:
    """Returns block_shape as a checked pair; (1, 0) for formats without blocks or with vectors."""
    if not f.block and block_shape is not None:
        raise ValueError(f"{f.name} has no blocks and needs block_shape=None, got {block_shape}")
    if block_shape is None:
        return (1, f.block)
    pair = block_shape if isinstance(block_shape, tuple) else (1, block_shape)
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        raise ValueError(f"block_shape needs a positive size or a tuple of two, got {block_shape}")
    rows, length = pair
    if rows > 1 and (ndim < 2 or axis < -2):
        raise ValueError(
            f"block_shape {block_shape} needs axis to be one of the last two, got {axis} of {ndim}"
        )
    return (rows, length)


def _sizes(shape: tuple[int, ...], block_shape: tuple[int, int], axis: int) -> dict[int, int]:
    """Returns the block's size along each blocked axis, counted from 0; a length of 0 is the whole axis."""
    rows, length = block_shape
    other = len(shape) + (-3 - axis)
    return {len(shape) + axis: length or max(shape[axis], 1)} | ({other: rows} if rows > 1 else {})


def _count(n: int, size: int) -> int:
    """Returns how many blocks hold n elements.

    If n is symbolic, jax.export knows what divides this, but not what divides n + -n % size.
    """
    return (n + size - 1) // size


def scales_shape(shape: tuple[int, ...], block_shape: tuple[int, int], axis: int) -> tuple[int, ...]:
    """Returns the shape of the scales, one for each block. A whole axis is one block even if it is empty."""
    sizes = _sizes(shape, block_shape, axis)
    found = [_count(n, sizes.get(i, 1)) for i, n in enumerate(shape)]
    if not block_shape[1]:
        found[axis] = 1
    return tuple(found)


def block_max(x: Float32[Array, "*shape"], block_shape, axis: int) -> Float32[Array, "*blocks"]:
    """Returns the largest magnitude of each block; NaN if the block contains NaN."""
    largest = _reduce(jnp.max, magnitude_bits(x), block_shape, axis)
    return lax.bitcast_convert_type(largest, jnp.float32)


def block_sum(x: Float32[Array, "*shape"], block_shape, axis: int) -> Float32[Array, "*blocks"]:
    """Returns the sum of each block, along the axis and then along the other one.

    Sums are in pairs of halves, the first half plus the second, so that every device rounds alike.
    """
    return _block_sum(x, block_shape, axis)[0]


def block_std(x: Float32[Array, "*shape"], block_shape, axis: int) -> Float32[Array, "*blocks"]:
    """Returns the standard deviation of each block, the root of mean(x^2) - mean(x)^2.

    The zeros that fill up a short block count as elements. Sums are those of `block_sum`.

    Special values: NaN if the block contains NaN or infinity.
    """
    large = block_max(x, block_shape, axis) >= 2.0**48
    x = jnp.where(spread(large, x.shape, block_shape, axis), x * 2.0**-80, x)  # so that no sum overflows
    squares = lax.optimization_barrier(x * x)  # a fused multiplication and addition would round once
    mean, mean_square = (_block_mean(t, block_shape, axis) for t in (x, squares))
    variance = mean_square - lax.optimization_barrier(mean * mean)
    std = jnp.sqrt(jnp.where(variance < 0, 0, variance))
    return jnp.where(large, std * 2.0**80, std)


def _block_mean(x: Float32[Array, "*shape"], block_shape, axis: int) -> Float32[Array, "*blocks"]:
    total, count = _block_sum(x, block_shape, axis)
    return total / count


def _block_sum(x: Float32[Array, "*shape"], block_shape, axis: int) -> tuple[Float32[Array, "*blocks"], int]:
    """Returns the sum of each block, and the number of its elements."""
    count = 1
    for i, size in _sizes(x.shape, block_shape, axis).items():
        x, count = pad(x, i, size), count * size
        x = x.reshape(*x.shape[:i], x.shape[i] // size, size, *x.shape[i + 1 :])
        while x.shape[i + 1] > 1:
            x = pad(x, i + 1, 2)
            low, high = jnp.split(x, 2, axis=i + 1)
            x = low + high
        x = x.squeeze(i + 1)
    return x, count


def _reduce(
    reduce: Callable[..., Array], x: Shaped[Array, "*shape"], block_shape, axis: int
) -> Shaped[Array, "*blocks"]:
    if not block_shape[1] and not x.shape[axis]:  # the whole axis is one block, though empty
        x = jnp.zeros([*x.shape[: x.ndim + axis], 1, *x.shape[x.ndim + axis + 1 :]], x.dtype)
    for i, size in _sizes(x.shape, block_shape, axis).items():
        x = pad(x, i, size)
        x = reduce(x.reshape(*x.shape[:i], x.shape[i] // size, size, *x.shape[i + 1 :]), axis=i + 1)
    return x


def magnitude_bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns integers in the order of magnitudes, infinity, NaN; XLA's maximum of floats may drop NaN."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF


def spread(
    scales: Shaped[Array, "*blocks"], shape: tuple[int, ...], block_shape, axis: int
) -> Shaped[Array, "*shape"]:
    """Broadcasts each block's scale to its elements."""
    for i, size in _sizes(shape, block_shape, axis).items():
        wide = jnp.broadcast_to(
            jnp.expand_dims(scales, i + 1), (*scales.shape[: i + 1], size, *scales.shape[i + 1 :])
        )
        wide = wide.reshape(*scales.shape[:i], scales.shape[i] * size, *scales.shape[i + 1 :])
        scales = lax.slice_in_dim(wide, 0, shape[i], axis=i)
    return scales


def pad(x: Shaped[Array, "*shape"], axis: int, multiple: int) -> Shaped[Array, "*padded"]:
    """Returns x padded with zeros to a multiple of `multiple` along the axis."""
    missing = _count(x.shape[axis], multiple) * multiple - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
