"""Rounding at every value and tie of each element, and stochastic rounding's exact probabilities."""

import functools

import jax
import numpy as np
from support import oracles
from support.tensors import each_element

from mxjax.numerics import formats, rounding

round_nearest = jax.jit(rounding.round_nearest, static_argnums=1)
stochastic_round = jax.jit(rounding.stochastic_round, static_argnums=1)

FLOAT32_MAX = np.finfo(np.float32).max
# Fractions of the way from one value to the next: small, near one, ties, and on the steps of 2**-16.
FRACTIONS = (2.0**-20, 2.0**-16, 0.1, 1 / 3, 0.5, 0.75, 0.9, 1 - 2.0**-16, 1 - 2.0**-20)


def values(element):
    return oracles.grid(oracles.ELEMENT_INFO[element.name])


@functools.cache
def critical_points(element):
    """Returns both signs of every value and tie of the element, of their neighbours, and of the extremes."""
    grid = values(element)
    past = [element.max * 1.03125, element.max * 1.25, element.max * 2, 1e30]
    x = np.float32([*grid, *(grid[1:] + grid[:-1]) / 2, *past])
    x = np.concatenate([x, np.nextafter(x, np.float32(-1)), np.nextafter(x, FLOAT32_MAX)])
    x = np.append(x, [FLOAT32_MAX, np.inf, 2.0**-126]).astype(np.float32)
    return np.concatenate([x, -x])


def stochastic_numpy(x, element, random):
    """Returns the neighbour away from zero where (random + 1/2) / 2**16 is below x's distance, in steps."""
    grid = values(element)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), element.max)
    i = np.searchsorted(grid, magnitude, "right") - 1
    below, above = grid[i], grid[np.minimum(i + 1, len(grid) - 1)]
    away = (random + 0.5) / 2**16 * (above - below) < magnitude - below
    return np.copysign(np.where(away, above, below), x).astype(np.float32)


def uint16s(like, seed=0):
    return np.random.default_rng(seed).integers(0, 2**16, like.shape, np.uint16)


def cells(element):
    """Returns x, and the values below and above it, at each of FRACTIONS of each cell of the grid."""
    grid = values(element)
    below, above = (np.repeat(g, len(FRACTIONS)) for g in (grid[:-1], grid[1:]))
    x = np.float32(below + np.tile(FRACTIONS, len(grid) - 1) * (above - below))
    return x, below, above


@each_element
def test_round_nearest_matches_gfloat_at_every_value_and_tie(element):
    x = critical_points(element)
    expected = oracles.round_nearest(x, oracles.ELEMENT_INFO[element.name])
    np.testing.assert_array_equal(oracles.bits(round_nearest(x, element)), oracles.bits(expected))


@each_element
def test_both_roundings_pass_nan_through(element):
    nan = np.float32([np.nan, -np.nan])
    assert np.isnan(round_nearest(nan, element)).all()
    assert np.isnan(stochastic_round(nan, element, np.zeros(2, np.uint16))).all()


@each_element
def test_stochastic_round_compares_as_documented(element):
    x = np.concatenate([critical_points(element), *(s * cells(element)[0] for s in (1, -1))])
    random = uint16s(x)
    expected = stochastic_numpy(x, element, random)
    np.testing.assert_array_equal(oracles.bits(stochastic_round(x, element, random)), oracles.bits(expected))


def test_stochastic_round_stays_where_the_random_number_equals_the_distance():
    x = np.full(3, 2 + 1.5 / 2**16, np.float32)  # the step is 1
    rounded = stochastic_round(x, formats.E2M1, np.array([0, 1, 2], np.uint16))
    np.testing.assert_array_equal(rounded, [3, 2, 2])
