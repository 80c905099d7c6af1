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

    Two integers an element are added up, so that the order makes no difference: multiples of `unit`, and what
    they leave in multiples of `small_unit`. Both are powers of two, as small as is possible with the largest
    element and n, the number of times that the most frequent token occurs. Besides float32's rounding of the
    sum, the error of a row of m tokens is at most m * n^2 * 2^-58 times the largest element.

    Special values: everything is NaN if an element of dy is NaN or infinite.
    """
    dy_BSD = dy_BSD.astype(jnp.float32)
    most = jnp.zeros(rows, jnp.int32).at[tokens_BS].add(1).max()
    largest = jnp.max(jnp.abs(dy_BSD), initial=0.0)
    bits = lax.clz(most) - 2  # most < 2^(30 - bits), so that no sum of integers up to 2^bits overflows
    _, exponent = jnp.frexp(largest)  # largest < 2^exponent
    exponent = jnp.maximum(exponent, _SMALLEST_EXPONENT + 2 * bits)
    unit, small_unit = (jnp.ldexp(jnp.float32(1), exponent - n * bits) for n in (1, 2))

    def add(integers_BSD):
        zeros = jnp.zeros((rows, dy_BSD.shape[-1]), jnp.int32)
        return zeros.at[tokens_BS].add(integers_BSD.astype(jnp.int32)).astype(jnp.float32)

    high_BSD = jnp.round(dy_BSD / unit)
    low_BSD = jnp.round((dy_BSD - high_BSD * unit) / small_unit)
    total_VD = add(high_BSD) * unit + add(low_BSD) * small_unit
    return jnp.where(jnp.isfinite(largest), total_VD, jnp.nan)
