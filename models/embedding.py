"""The embedding's lookup, whose gradient does not depend on the order in which a GPU adds it up."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from mxjax.devices import on_gpu

_SMALLEST_EXPONENT = -126  # of float32's normal numbers; GPUs may flush smaller ones


def lookup(embedding_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Returns the tokens' rows of the embedding.

    On a GPU the gradient is that of `add_rows`: XLA adds floats by atomic operations, in any order.
    """
    return _lookup(embedding_VD, tokens_BS) if on_gpu() else embedding_VD[tokens_BS]


@jax.custom_vjp
def _lookup(embedding_VD, tokens_BS):
    return embedding_VD[tokens_BS]


def _forward(embedding_VD, tokens_BS):
    return embedding_VD[tokens_BS], (tokens_BS, embedding_VD.shape[0])


def _backward(residuals, dy_BSD):
    tokens_BS, rows = residuals
    return add_rows(tokens_BS, dy_BSD, rows).astype(dy_BSD.dtype), None


_lookup.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=2)
def add_rows(
    tokens_BS: Int32[Array, "B S"], dy_BSD: Float[Array, "B S D"], rows: int
) -> Float32[Array, "V D"]:
    """Returns for each of `rows` tokens the sum of the rows of dy that belong to it.

    Two integers an element are added up, so that the order makes no difference. Besides float32's rounding of
    the sum, the error of a row of m tokens is at most m * n^2 * 2^-58 times the largest element, with n the
    number of times that the most frequent token occurs.

    Special values: everything that a token touches is NaN if an element of dy is NaN or infinite.
    """
    n = tokens_BS.size
    if 2 * n > rows:
        return _sums(tokens_BS, dy_BSD, rows)
    # A large vocabulary: sums of this batch's tokens alone, each in the place of its first occurrence.
    places_BS = jnp.arange(n, dtype=jnp.int32).reshape(tokens_BS.shape)
    first_V = jnp.full(rows, n, jnp.int32).at[tokens_BS].min(places_BS)
    slots_BS = first_V[tokens_BS]
    targets_BS = jnp.where(slots_BS == places_BS, tokens_BS, rows + places_BS)  # others are dropped
    sums_ND = _sums(slots_BS, dy_BSD, n)
    zeros_VD = jnp.zeros((rows, dy_BSD.shape[-1]), jnp.float32)
    return zeros_VD.at[targets_BS.reshape(-1)].add(sums_ND, mode="drop", unique_indices=True)


def _sums(slots_BS: Int32[Array, "B S"], dy_BSD: Float[Array, "B S D"], n: int) -> Float32[Array, "n D"]:
    """Returns for each of n slots the sum of its rows of dy.

    A row is an integer multiple of `unit`, and what that leaves a multiple of `small_unit`. Both are powers
    of two, as small as is possible with the largest element and the size of the fullest slot.
    """
    dy_BSD = dy_BSD.astype(jnp.float32)
    most = jnp.zeros(n, jnp.int32).at[slots_BS].add(1).max(initial=0)
    finite = jnp.all(jnp.isfinite(dy_BSD))  # XLA's maximum on a CPU may lose a NaN
    largest = jnp.max(jnp.abs(dy_BSD), initial=0.0)
    bits = lax.clz(most) - 2  # most < 2^(30 - bits), so that no sum of integers up to 2^bits overflows
    _, exponent = jnp.frexp(largest)  # largest < 2^exponent
    exponent = jnp.maximum(exponent, _SMALLEST_EXPONENT + 2 * bits)
    unit, small_unit = (jnp.ldexp(jnp.float32(1), exponent - k * bits) for k in (1, 2))

    def add(integers_BSD):
        zeros = jnp.zeros((n, dy_BSD.shape[-1]), jnp.int32)
        return zeros.at[slots_BS].add(integers_BSD.astype(jnp.int32)).astype(jnp.float32)

    high_BSD = jnp.round(dy_BSD / unit)
    low_BSD = jnp.round((dy_BSD - high_BSD * unit) / small_unit)
    total = add(high_BSD) * unit + add(low_BSD) * small_unit
    return jnp.where(finite, total, jnp.nan)
