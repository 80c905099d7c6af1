"""Block scales at every threshold and exponent, and scaling by every E8M0 byte, bit for bit."""

import functools
from typing import get_args

import jax
import numpy as np
import pytest
from support import oracles
from support.tensors import ELEMENTS, each_element

import mxjax
from mxjax.numerics import formats, scales

RULES = [rule for rule in get_args(scales.ScaleRule) if rule != "quest"]  # those of the largest magnitude
DEFINED = [(r, e) for r in RULES for e in ELEMENTS if r != "uos" or e is formats.E2M1]
BYTES = np.arange(256)
RNG = np.random.default_rng(0)

block_scale = jax.jit(scales.block_scale, static_argnums=(1, 2))


def divide_by_scale(x, byte):
    return np.asarray(jax.jit(scales.divide_by_scale)(*np.broadcast_arrays(x, np.int32(byte))))


def multiply_by_scale(x, byte):
    return np.asarray(jax.jit(scales.multiply_by_scale)(*np.broadcast_arrays(x, np.int32(byte))))


def around_thresholds():
    """Returns amax at, one ulp below and one ulp above each threshold of any rule, at every exponent.

    Also zeros, NaN and infinities.
    """
    thresholds = np.array([1, 1.5, 1.625, 1.75, 1.875, 1.9375], np.float32)
    mantissas = oracles.bits(thresholds) & 0x7F_FFFF
    exponents = np.arange(0, 255, dtype=np.uint32) << 23  # of subnormals too
    patterns = exponents[:, None, None] + mantissas[:, None] + np.array([-1, 0, 1], np.int64)
    specials = np.float32([-0.0, np.nan, -np.nan, np.inf, -np.inf])
    return np.append(oracles.floats(np.clip(patterns, 0, 0x7F7F_FFFF).ravel()), specials)


def ldexp(x, exponent):
    """Returns x * 2**exponent as float32, by way of float64, which neither rounds nor flushes it."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float64(x), exponent).astype(np.float32)


def assert_same_bits(ours, expected):
    np.testing.assert_array_equal(oracles.bits(ours), oracles.bits(expected))


NORMALS = oracles.floats(RNG.integers(0x0080_0000, 0x7F80_0000, 500) | RNG.integers(0, 2, 500) << 31)[:, None]
SUBNORMALS = oracles.floats(
    np.array([0, 1, 2, 3, 0x3F_FFFF, 0x40_0000, 0x40_0001, 0x7F_FFFF, 0x12_3456])[:, None]
    | np.array([0, 1 << 31])
).reshape(-1, 1)


@pytest.mark.parametrize(("rule", "element"), DEFINED, ids=lambda p: getattr(p, "name", p))
def test_block_scale_at_every_threshold_and_exponent(rule, element):
    amax = around_thresholds()
    expected = oracles.scale_byte(amax, rule, oracles.ELEMENT_INFO[element.name])
    np.testing.assert_array_equal(block_scale(amax, rule, element), expected)


def test_quest_is_the_power_of_two_below_its_multiple_of_the_standard_deviation():
    # Rows of every size and mantissa, zeros, NaN, infinity, and a short last block, which zeros fill up.
    x = (RNG.standard_normal((400, 50)) + RNG.uniform(-1, 1, (400, 1))) * 2.0 ** RNG.uniform(
        -40, 125, (400, 1)
    )
    x = np.concatenate([x, np.zeros((1, 50)), np.full((1, 50), 3.0), np.ones((2, 50))]).astype(np.float32)
    x[402, [5, 40]], x[403, [6, 41]] = np.nan, np.inf
    blocks = np.pad(x[:402].astype(np.float64), [(0, 0), (0, 14)]).reshape(-1, 2, 32)
    step = np.log2(2.92247856 / 6 * blocks.std(axis=-1) + 1e-8)
    clear = np.abs(step - np.rint(step)) > 1e-4  # float32 decides the others as it rounds
    q = mxjax.quantize(x, scale_rule="quest")
    found = np.asarray(q.scales).view(np.uint8)
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found[:402][clear], 127 + np.floor(step[clear]))
    np.testing.assert_array_equal(found[400], 100)
    np.testing.assert_array_equal(found[402:], 255)
    assert np.isnan(mxjax.dequantize(q)[402:]).all()


def test_divide_by_scale_is_exact_for_every_byte_of_a_block_scale():
    # block_scale gives no byte above 253 for any element, since emax is at least 2.
    byte = BYTES[:254]
    quotient = ldexp(NORMALS, 127 - byte)
    normal = np.abs(quotient) >= 2.0**-126
    assert_same_bits(np.where(normal, divide_by_scale(NORMALS, byte), 0), np.where(normal, quotient, 0))


def test_divide_by_scale_is_exact_for_subnormals_under_small_scales():
    # A block of subnormals alone has byte 0; beside larger values they meet larger scales.
    byte = BYTES[:105]
    assert_same_bits(divide_by_scale(SUBNORMALS, byte), ldexp(SUBNORMALS, 127 - byte))


def test_a_quotient_far_below_any_element_is_itself_or_zero():
    for x in (NORMALS, SUBNORMALS):
        quotient = ldexp(x, 127 - BYTES[:254])
        small = np.abs(quotient) < 2.0**-104
        ours = np.asarray(divide_by_scale(x, BYTES[:254]))[small]
        assert np.all((ours == 0) | (oracles.bits(ours) == oracles.bits(quotient[small])))


@each_element
def test_multiply_by_scale_is_exact_for_every_value_and_byte(element):
    grid = oracles.grid(oracles.ELEMENT_INFO[element.name]).astype(np.float32)
    x = np.concatenate([grid, -grid])[:, None]
    # No block has a larger scale: the largest element times it would pass float32's range.
    byte = BYTES[: 254 - element.emax]
    assert_same_bits(multiply_by_scale(x, byte), ldexp(x, byte - 127))


def test_multiply_by_scale_is_exact_for_any_normal_number_whose_product_fits():
    product = np.ldexp(np.float64(NORMALS), BYTES[:254] - 127)
    with np.errstate(over="ignore", under="ignore"):
        fits = product.astype(np.float32) == product
    ours = multiply_by_scale(NORMALS, BYTES[:254])
    assert_same_bits(np.where(fits, ours, 0), np.where(fits, product, 0))


def test_a_subnormal_product_is_rounded_to_nearest_where_asked():
    byte, x = np.int32(BYTES[:40]), oracles.floats(oracles.bits(NORMALS) & 0x807F_FFFF | 0x3F80_0000)
    rounded = jax.jit(functools.partial(scales.multiply_by_scale, rounds=True))
    assert_same_bits(rounded(*np.broadcast_arrays(x, byte)), ldexp(x, byte - 127))


def test_a_product_past_float32_is_infinite():
    """Quantization gives no such block, but an array from elsewhere may have one."""
    x = np.float32([[6], [-6], [1], [0]])
    found = multiply_by_scale(x, np.array([252, 253, 254], np.int32))
    assert_same_bits(found, ldexp(x, np.array([252, 253, 254]) - 127))
