"""Zeros, NaN, infinities and subnormals, and how far each of them reaches."""

import contextlib
import itertools
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from support import oracles, tensors
from support.marks import parametrize
from support.tensors import E2M1, KEY, assert_parts, elements, gaussian, scale_bytes, subnormal_range

import mxjax
from mxjax.numerics.rounding import Rounding
from mxjax.numerics.scales import ScaleRule


def test_a_zero_block_has_scale_byte_zero_and_keeps_signs():
    x = np.zeros((1, 64), np.float32)
    x[0, ::2] = -0.0
    q = mxjax.quantize(x)
    assert_parts(q, np.zeros((1, 2)), x)
    np.testing.assert_array_equal(oracles.bits(mxjax.dequantize(q)), oracles.bits(x))


@pytest.mark.parametrize(
    ("shape", "bad", "options"),
    [
        *(((2, 96), np.nan, {"format": name}) for name in tensors.MX_ELEMENTS),
        ((40, 96), np.inf, {"block_shape": (32, 32)}),
        ((2, 96), np.nan, {"rounding": "stochastic", "key": KEY}),
        # XLA's CPU backend reduces large tensors by other code than small ones.
        *(((rows, 96), bad, {}) for rows in (2, 64) for bad in (-np.nan, np.inf, -np.inf)),
        ((64, 96), np.nan, {}),
    ],
    ids=str,
)
def test_a_bad_value_makes_its_block_nan_and_no_other(shape, bad, options):
    x, spoilt = gaussian(*shape), np.zeros(shape, bool)
    expected = np.asarray(mxjax.dequantize(mxjax.quantize(x, **options)))
    x[1, 40] = bad
    rows, _ = options.get("block_shape", (1, 32))
    spoilt[1 // rows * rows : 1 // rows * rows + rows, 32:64] = True
    q = mxjax.quantize(x, **options)
    np.testing.assert_array_equal(scale_bytes(q) == 255, spoilt[::rows, ::32])
    assert np.all(elements(q)[spoilt] == 0)
    np.testing.assert_array_equal(mxjax.dequantize(q), np.where(spoilt, np.nan, expected))


@pytest.mark.parametrize("rows", [3, 64])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_a_bad_value_spoils_the_tensor_under_a_tensor_scale(name, bad, rows):
    x = gaussian(rows, 64)
    x[1, 40] = bad
    assert np.isnan(mxjax.dequantize(mxjax.quantize(x, name))).all()


def test_subnormal_bfloat16_blocks_survive():
    patterns = np.random.default_rng(0).integers(0, 0x100, (8, 70), np.uint16)
    x = patterns.view(ml_dtypes.bfloat16)
    assert_parts(mxjax.quantize(x), *oracles.quantize(x.astype(np.float32), E2M1))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("tiny", np.float32([0, 2.0**-98]))
def test_a_tensor_scale_serves_tiny_and_zero_tensors_alike(name, tiny):
    x = gaussian(8, 64)
    expected = mxjax.dequantize(mxjax.quantize(x, name))
    np.testing.assert_array_equal(mxjax.dequantize(mxjax.quantize(x * tiny, name)), expected * tiny)


@pytest.mark.parametrize("name", ["fp4_vector", "fp4_e1m2"])
def test_a_float32_scale_serves_tiny_blocks_alike(name):
    x = gaussian(8, 64)
    x /= np.abs(x).max(axis=1, keepdims=True)  # vectors of 64 elements with largest magnitude 1
    x.reshape(8, 4, 16)[..., 0] = 1  # and blocks of 16
    tiny = np.float32(2.0**-121)  # at which inputs that do not round to zero are normal
    expected = mxjax.dequantize(mxjax.quantize(x, name))
    np.testing.assert_array_equal(mxjax.dequantize(mxjax.quantize(x * tiny, name)), expected * tiny)


@pytest.mark.parametrize("prescale", [0.75, 0.5, 1.0])
def test_a_prescale_keeps_values_that_are_subnormal_times_it(prescale):
    q = mxjax.quantize(subnormal_range(), prescale=prescale)
    elements = np.asarray(q.elements, np.float32) * np.float32(1 / prescale)
    expected = np.ldexp(elements.astype(np.float64), scale_bytes(q).astype(int) - 127).astype(np.float32)
    np.testing.assert_array_equal(oracles.bits(mxjax.dequantize(q)), oracles.bits(expected))
    assert np.any(expected != 0)


def test_a_prescale_may_round_the_largest_numbers_up_to_infinity():
    largest = np.full((1, 32), np.finfo(np.float32).max)
    assert np.all(np.isfinite(mxjax.dequantize(mxjax.quantize(largest))))
    assert np.all(np.isinf(mxjax.dequantize(mxjax.quantize(largest, prescale=0.75))))


def _extremes():
    """Blocks with magnitudes at the ends of float32's and bfloat16's ranges, small ones beside."""
    info, subnormal = np.finfo(np.float32), np.finfo(np.float32).smallest_subnormal
    largest = [info.max, ml_dtypes.finfo(ml_dtypes.bfloat16).max, 2.98e38, 2.0**126, 2.0**62, 1.0, info.tiny]
    rows = []
    for m in np.float32([*largest, info.tiny / 2, 3 * subnormal, subnormal]):
        rows += [np.full(128, m), np.where(np.arange(128) % 2, m, -m)]
        rows += [np.where(np.arange(128) == 5, m, other) for other in np.float32([0, subnormal, info.tiny])]
    return np.float32(rows)


def _operands():
    """Every format with every rule, rounding, prescale and choice of minifloat scales that it takes."""
    scales = [{}, {"four_over_six": "mse"}, {"four_over_six": "mae"}, {"eden": 128}]
    for name, rule, rounding, prescale, more in itertools.product(
        mxjax.FORMATS, get_args(ScaleRule), get_args(Rounding), (None, 0.75), scales
    ):
        f = mxjax.FORMATS[name]
        if rule != "floor" and f.scale != "e8m0":
            continue
        with contextlib.suppress(ValueError):  # a combination that is refused
            yield mxjax.Operand(name, None, rule, rounding, prescale, **more)


_FEW = [mxjax.Operand(scale_rule="quest"), mxjax.Operand("fp4_e1m2"), mxjax.Operand("fp4_vector")]


@parametrize("operand", *_FEW, exhaustive=[o for o in _operands() if o not in _FEW], ids=str)
def test_finite_numbers_never_become_nan(operand):
    x = _extremes()
    for part in (x, x[10:15], x[-10:]):
        q = mxjax.quantize(part, operand, key=KEY)
        assert not np.isnan(elements(q)).any()
        assert q.scales is None or np.isfinite(np.float32(q.scales)).all()
        assert not np.isnan(mxjax.dequantize(q)).any()


def test_a_float32_scale_serves_the_largest_blocks_alike():
    x = np.float32([np.linspace(-1, 1, 16)])
    q, expected = (mxjax.quantize(x * np.float32(m), "fp4_e1m2") for m in (np.finfo(np.float32).max, 1))
    np.testing.assert_array_equal(elements(q), elements(expected))
    np.testing.assert_allclose(q.scales * 3.5, np.finfo(np.float32).max, rtol=1e-6)
