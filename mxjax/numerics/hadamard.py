"""Blockwise Hadamard rotation of the axis that a GEMM contracts.

Rotating both operands of a GEMM leaves their product unchanged, because H is orthogonal, and distributes each
outlier over its run before quantization. The definition is a butterfly with a fixed order of float32
operations, so that kernels can match it bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32
from numpy.lib.array_utils import normalize_axis_index

from mxjax.runtime.arguments import check_arrays, check_axis, check_tensor
from mxjax.runtime.devices import on_gpu

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


def hadamard_matrix(n: int) -> Float32[Array, "n n"]:
    """Returns Sylvester's Hadamard matrix of size n divided by sqrt(n): symmetric and orthogonal.

    Raises:
      ValueError: n is not a power of two from 2 to 256.
    """
    _check_size("hadamard_matrix", "n", n)
    return rotate(jnp.eye(n, dtype=jnp.float32), n)


def random_signs(key: jax.Array, n: int) -> Float32[Array, " n"]:
    """Returns n random signs, +1 or -1, for `rotate`."""
    # `jax.random.rademacher` draws from 64 bits under jax_enable_x64.
    return jnp.where(jax.random.bernoulli(key, jnp.float32(0.5), (n,)), jnp.float32(1), jnp.float32(-1))


def fixed_signs(seed: int, n: int) -> Float32[np.ndarray, " n"]:
    """Returns the n signs of a seed from 0 to 2**32 - 1, the same under any configuration of JAX.

    Sign i is -1 where the words of Threefry 2x32-20, of counter (0, i) and key (0, seed), differ in their
    highest bits. They are `random_signs(jax.random.key(seed), n)` with JAX's defaults.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    keys = np.array([0, seed, seed ^ 0x1BD11BDA], np.uint32)
    a, b = np.full(n, keys[0]), np.arange(n, dtype=np.uint32) + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            a = a + b
            b = (b << np.uint32(turn) | b >> np.uint32(32 - turn)) ^ a
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + np.uint32(i + 1)
    return np.where((a ^ b) >> 31, np.float32(-1), np.float32(1))


def rotate(
    x: Float[Array | np.ndarray, "*shape"],
    size: int = 16,
    *,
    axis: int = -1,
    signs: Float32[Array, " size"] | None = None,
) -> Float32[Array, "*shape"]:
    """Returns x with each run of `size` elements v along `axis` replaced by H @ (signs * v).

    H is `hadamard_matrix(size)`. Without signs the rotation is deterministic and its own inverse. The float32
    operations are stages of stride 1, 2, 4, … size/2, each the sums and differences of pairs, then one
    multiplication by 1/sqrt(size). To invert a rotation with signs, rotate without signs, then multiply by
    them.

    Args:
      x: any floating dtype. The result is always float32: in bfloat16 the two rotations of a GEMM would not
        cancel.
      size: a power of two from 2 to 256 that divides the axis.
      signs: `size` values of +1 or -1, the same for every run.
    Special values: NaN and infinity make their whole run NaN or infinite.
    Raises:
      ValueError: a size that is not such a power of two, an axis that it does not divide, signs of another
        shape, or an x without axes.
      TypeError: x or signs is no array, or x is not floating point.
    Source: Sylvester (1867); for MXFP4 training arXiv 2502.20586, arXiv 2605.09825.
    """
    check_tensor("rotate", x)
    _check_size("rotate", "size", size)
    if signs is not None:
        check_arrays("rotate", signs=signs)
        if signs.shape != (size,):
            raise ValueError(
                f"rotate needs signs of shape ({size},), one for each element of a run, got {signs.shape}; "
                f"pass mxjax.random_signs(key, {size})"
            )
    check_axis("rotate", axis)
    return _rotate(x, int(size), axis, signs)


def _check_size(function: str, name: str, size: object) -> None:
    if not isinstance(size, int | np.integer) or size not in SIZES:
        raise ValueError(f"{function} needs {name} to be one of {SIZES}, got {size!r}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rotate(x, size: int, axis: int, signs) -> Float32[Array, "*shape"]:
    axis = normalize_axis_index(axis, x.ndim)
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if length % size:
        raise ValueError(f"rotate needs an axis that {size} divides, got {length}; pad it with zeros")
    runs = (*before, length // size, size, *after)
    y = x.astype(jnp.float32).reshape(runs)
    if signs is not None:
        y = y * signs.reshape(*(1,) * (axis + 1), size, *(1,) * len(after))
    sign = jnp.array([1, -1], jnp.float32).reshape(*(1,) * (axis + 2), 2, *(1,) * (len(after) + 1))
    for stage in range(size.bit_length() - 1):
        # On CPUs a fusion computes each of its stages, and x, anew for both members of a pair.
        if stage % (4 if after else 1) == 0 and not on_gpu():
            y = lax.optimization_barrier(y)
        stride = 2**stage
        pairs = y.reshape(*before, length // size, size // (2 * stride), 2, stride, *after)
        y = (sign * pairs + lax.rev(pairs, (axis + 2,))).reshape(runs)
    y = y.reshape(x.shape) * jnp.float32(size**-0.5)
    # Without the barrier XLA repeats the butterfly in every user: the block maximum and the rounding.
    return lax.optimization_barrier(y)
