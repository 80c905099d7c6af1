"""The embedding's lookup, whose gradient does not depend on the order in which a GPU adds it up."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from models.sharding import constrain
from mxjax.runtime.devices import on_gpu

_SMALLEST_EXPONENT = -126  # of float32's normal numbers; GPUs may flush smaller ones


def lookup(embedding_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Returns the tokens' rows of the embedding.

    On a GPU the gradient is that of `add_rows`: XLA adds floats by atomic operations, in any order. Like
    `mxjax.dot` it has no forward-mode derivative there.
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


def add_rows(tokens_BS: Int[Array, "B S"], dy_BSD: Float[Array, "B S D"], rows: int) -> Float32[Array, "V D"]:
    """Returns for each of `rows` tokens the sum of the rows of dy that belong to it, of others none.

    Two integers an element are added up, so that the order makes no difference. Besides float32's rounding,
    the sum of m rows is exact to m^3 * 2^-58 times the largest element of dy, and to m * 2^-126: closer than
    a sum in float32 unless a token occurs millions of times.

    Special values: the sums of all tokens that occur are NaN if an element of dy is NaN or infinite.
    """
    n = tokens_BS.size
    if 2 * n > rows:
        return _sums(tokens_BS, dy_BSD, rows)
    # A large vocabulary: sums of this batch's tokens alone, each in the place of its first occurrence.
    places_BS = jnp.arange(n, dtype=jnp.int32).reshape(tokens_BS.shape)
    first_V = jnp.full(rows, n, jnp.int32).at[tokens_BS].min(places_BS)
    slots_BS = first_V.at[tokens_BS].get(mode="fill", fill_value=n)
    targets_BS = jnp.where(slots_BS == places_BS, tokens_BS, rows + places_BS)  # others are dropped
    # Both are the same on all devices; else XLA would add up a whole table of zeros across them.
    targets_N = constrain(targets_BS.reshape(-1), None)
    sums_ND = constrain(_sums(slots_BS, dy_BSD, n), None, "embed")
    zeros_VD = jnp.zeros((rows, dy_BSD.shape[-1]), jnp.float32)
    return zeros_VD.at[targets_N].add(sums_ND, mode="drop", unique_indices=True)


def _sums(slots_BS: Int[Array, "B S"], dy_BSD: Float[Array, "B S D"], n: int) -> Float32[Array, "n D"]:
    """Returns for each of n slots the sum of its rows of dy.

    A row is an integer multiple of a unit, and what that leaves a multiple of a smaller one. Units are powers
    of two, as small as is possible with the largest element and the number of the slot's rows.
    """
    dy_BSD = dy_BSD.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(dy_BSD))  # XLA's maximum on a CPU may lose a NaN
    _, exponent = jnp.frexp(jnp.max(jnp.abs(dy_BSD), initial=0.0))  # the largest is below 2^exponent
    counts_n = jnp.zeros(n, jnp.int32).at[slots_BS].add(1)
    bits_n = jnp.minimum(lax.clz(counts_n), 31) - 2  # count < 2^(30 - bits): no sum of 2^bits overflows
    exponents_n = jnp.maximum(exponent, _SMALLEST_EXPONENT + 2 * bits_n)
    units_n = [jnp.ldexp(jnp.float32(1), exponents_n - k * bits_n)[:, None] for k in (1, 2)]
    units_BSD = [unit_n.at[slots_BS].get(mode="fill", fill_value=1) for unit_n in units_n]

    def add(integers_BSD):
        zeros = jnp.zeros((n, dy_BSD.shape[-1]), jnp.int32)
        return zeros.at[slots_BS].add(integers_BSD.astype(jnp.int32)).astype(jnp.float32)

    high_BSD = jnp.round(dy_BSD / units_BSD[0])
    low_BSD = jnp.round((dy_BSD - high_BSD * units_BSD[0]) / units_BSD[1])
    total = add(high_BSD) * units_n[0] + add(low_BSD) * units_n[1]
    return jnp.where(finite, total, jnp.nan)
