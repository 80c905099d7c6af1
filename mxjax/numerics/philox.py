"""Philox 4x32-10: the counter-based generator behind stochastic rounding.

Each random number is a pure function of a key and of the element's position in the whole tensor. So the same
key gives the same bits in `jax.numpy`, in a kernel, under any tiling and under any sharding by jit. Inside
vmap and shard_map, positions count within the mapped part.

Kernels must reproduce `random_uint16` bit for bit.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt16, UInt32
from numpy.lib.array_utils import normalize_axis_index

from mxjax.runtime.devices import on_gpu

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
PER_COUNTER = 8  # 16-bit numbers in the 128 bits from one counter

Word = UInt32[Array, "*#shape"]


@jax.jit
def philox_4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Returns Philox 4x32-10 of a counter and a key, elementwise: four 32-bit words."""

    def one_round(i, c):
        i = jnp.asarray(i, jnp.uint32)
        k0, k1 = (word + i * jnp.uint32(weyl) for word, weyl in zip(key, _WEYL, strict=True))
        hi0, lo0 = _multiply(_MULTIPLIERS[0], c[0])
        hi1, lo1 = _multiply(_MULTIPLIERS[1], c[2])
        return hi1 ^ c[1] ^ k0, lo1, hi0 ^ c[3] ^ k1, lo0

    # This zero broadcasts all words and, under shard_map, makes them vary alike, as a loop's state must.
    zero = functools.reduce(operator.xor, (word ^ word for word in (*counter, *key)))
    words = tuple(word ^ zero for word in counter)
    # All in one, CPUs would compile slowly and recompute the rounds for each word; one at a time, each would
    # pass through memory. On GPUs each iteration of a loop would be a kernel.
    return lax.fori_loop(0, _ROUNDS, one_round, words, unroll=_ROUNDS if on_gpu() else 5)


def _multiply(a: int, b: Word) -> tuple[Word, Word]:
    """Returns the high and low 32 bits of a * b. `jax.lax.mulhi` does not compile for several devices."""
    with jax.enable_x64(True):
        wide = lax.convert_element_type(b, jnp.uint64)
        product = wide * lax.full_like(wide, a)
        high = lax.convert_element_type(product >> lax.full_like(wide, 32), jnp.uint32)
        return high, lax.convert_element_type(product, jnp.uint32)


class KeyWords(NamedTuple):
    """Words of a key for `random_uint16`, drawn for many keys at once: each hash costs XLA 150 operations.

    Attributes:
      words: two words of the key, then two of each of its folds with 1, 2, ….
      places: positions of a matrix's rows, where they are not 0, 1, …. Along the rows they come in whole runs
        of PER_COUNTER, aligned to it.
    """

    words: UInt32[Array, "uses 2"]
    places: Int32[Array, " m"] | None = None


def key_words(key: jax.Array | KeyWords, use: int = 0) -> UInt32[Array, "2"]:
    """Returns two words of a key or, for another use, of its fold with the use's number."""
    if isinstance(key, KeyWords):
        return key.words[use]
    return jax.random.bits(jax.random.fold_in(key, use) if use else key, (2,), jnp.uint32)


def random_uint16(
    key: jax.Array | KeyWords, shape: tuple[int, ...], axis: int = -1, use: int = 0
) -> UInt16[Array, "..."]:
    """Returns uniform integers in [0, 2**16), one for each position of `shape`.

    Let k be the position along `axis` and row the row-major index over the other axes. The number is half
    k % 8 (low half first) of the words of Philox(counter=(k // 8, row, 0, 0), key=key_words(key, use)). So
    transposing `axis` keeps the bits, and a tile or shard needs only its own offsets.
    """
    axis = normalize_axis_index(axis, len(shape))
    length = shape[axis]
    grid = (*shape[:axis], (length + PER_COUNTER - 1) // PER_COUNTER, *shape[axis + 1 :])
    places = key.places if isinstance(key, KeyWords) else None

    def position(i: int) -> Word:
        if places is None or i:
            return lax.broadcasted_iota(jnp.uint32, grid, i)
        first = places[::PER_COUNTER] // PER_COUNTER if axis == 0 else places
        return lax.broadcast_in_dim(first.astype(jnp.uint32), grid, (0,))

    row = jnp.zeros(grid, jnp.uint32)
    for i, n in enumerate(shape):
        if i != axis:
            row = row * jnp.uint32(n) + position(i)
    zero = jnp.zeros(grid, jnp.uint32)
    k0, k1 = key_words(key, use)
    counter = (position(axis), row, zero, zero)
    # Without the barriers XLA fuses the generator into its users, once for each of the 8 halves.
    words = lax.optimization_barrier(philox_4x32(counter, (k0, k1)))
    halves = jnp.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], axis=axis + 1)
    halves = halves.astype(jnp.uint16)
    numbers = halves.reshape(*grid[:axis], grid[axis] * PER_COUNTER, *grid[axis + 1 :])
    return lax.optimization_barrier(lax.slice_in_dim(numbers, 0, length, axis=axis))
