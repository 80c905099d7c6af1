"""Philox 4x32-10 gives Random123's numbers, laid out by position alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.philox import philox_4x32, random_uint16

random_uint16_jit = jax.jit(random_uint16, static_argnums=(1, 2))


def philox_numpy(counter, key):
    """Returns the words of Philox 4x32-10, from 64-bit products."""
    low = 0xFFFF_FFFF
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (int(k) for k in key)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def random_uint16_numpy(key, shape, axis):
    """Returns what the docstring of random_uint16 says, position by position along `axis` moved last."""
    *others, length = np.moveaxis(np.empty(shape), axis, -1).shape
    k = np.arange(length)
    row = np.arange(np.prod(others, dtype=int)).reshape(*others, 1)
    key_words = jax.random.bits(key, (2,), jnp.uint32)
    words = np.stack(np.broadcast_arrays(*philox_numpy((k // 8, row, 0, 0), key_words)))
    half = np.broadcast_to(k % 8, words.shape[1:])
    word = np.take_along_axis(words, half[None] // 2, 0)[0]
    numbers = (word >> (16 * (half % 2)).astype(np.uint64)) & 0xFFFF
    return np.moveaxis(numbers, -1, axis)


def words(*values):
    return tuple(jnp.array([v], jnp.uint32) for v in values)


# kat_vectors of Random123 1.14.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert [int(w[0]) for w in philox_4x32(words(*counter), words(*key))] == list(expected)


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 20), -1), ((20, 3), 0), ((5, 11, 4), 1), ((9,), 0), ((2, 3, 5, 8), -2)]
)
def test_numbers_are_laid_out_as_documented(shape, axis):
    key = jax.random.key(7)
    ours = random_uint16_jit(key, shape, axis)
    np.testing.assert_array_equal(ours, random_uint16_numpy(key, shape, axis))


@pytest.mark.parametrize("make_key", [jax.random.PRNGKey, functools.partial(jax.random.key, impl="rbg")])
def test_any_kind_of_key_will_do(make_key):
    key = make_key(7)
    np.testing.assert_array_equal(random_uint16_jit(key, (3, 20), -1), random_uint16_numpy(key, (3, 20), -1))
