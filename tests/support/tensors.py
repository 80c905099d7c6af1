"""Tensors to quantize, and comparisons of what they become, that the tests of `quantize` share."""

import jax
import numpy as np
import pytest

from mxjax.numerics import formats
from support import oracles

MX_ELEMENTS = {"mxfp4": "e2m1", "mxfp4_e3m0": "e3m0", "mxfp4_e1m2": "e1m2", "mxfp6_e2m3": "e2m3"}
MX_ELEMENTS |= {"mxfp6_e3m2": "e3m2", "mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2"}
ELEMENTS = (formats.E2M1, formats.E4M3, formats.E5M2, formats.E2M3, formats.E3M2, formats.E3M0, formats.E1M2)
each_element = pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
E2M1 = oracles.ELEMENT_INFO["e2m1"]
KEY = jax.random.key(0)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide_range(*shape, seed=0):
    """Returns values whose rows differ by up to 2**60 and whose elements within a row by up to 2**8."""
    rng = np.random.default_rng(seed)
    rows = 2.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * rows * 2.0 ** rng.integers(-8, 1, shape)).astype(np.float32)


def subnormal_range():
    """Returns blocks of both signs whose largest magnitudes go from some 2**-149 to 2**-124."""
    rng = np.random.default_rng(0)
    top = 2 ** np.arange(2, 26)[:, None]
    return oracles.floats(rng.integers(0, top, (24, 32)) | rng.integers(0, 2, (24, 32)) << 31)


def info(name):
    return oracles.ELEMENT_INFO[MX_ELEMENTS[name]]


def scale_bytes(q):
    return np.asarray(q.scales).view(np.uint8)


def elements(q):
    return np.asarray(q.elements, np.float32)


def assert_parts(q, scales, values):
    """Asserts q's scale bytes and, by their bits, its elements."""
    np.testing.assert_array_equal(scale_bytes(q), scales)
    np.testing.assert_array_equal(oracles.bits(elements(q)), oracles.bits(values))


def assert_same(a, b):
    assert (a.format, a.axis, a.block_shape, a.prescale) == (b.format, b.axis, b.block_shape, b.prescale)
    assert_parts(a, scale_bytes(b), elements(b))
