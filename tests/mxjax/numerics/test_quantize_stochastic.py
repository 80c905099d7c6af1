"""Stochastic rounding's bits and mean, and the prescale that keeps it from clipping."""

import functools

import jax
import numpy as np
import pytest
from support import oracles
from support.tensors import E2M1, KEY, assert_parts, assert_same, elements, gaussian, wide_range

import mxjax

stochastic = functools.partial(mxjax.quantize, rounding="stochastic")


def test_nearest_rounding_ignores_the_key():
    x = gaussian(8, 64)
    assert_same(mxjax.quantize(x, key=KEY), mxjax.quantize(x))


# Scales are 1 for the former two and 2 for rceil: 7.9 clips to 6 in the first alone.
@pytest.mark.parametrize(
    ("rule", "prescale", "clips"), [("floor", None, True), ("floor", 0.75, False), ("rceil", None, False)]
)
def test_stochastic_mean_is_x_unless_it_clips(rule, prescale, clips):
    n = 4096
    x = np.linspace(-7.9, 7.9, 32, dtype=np.float32)
    draw = functools.partial(stochastic, x, scale_rule=rule, prescale=prescale)
    drawn = jax.vmap(lambda key: mxjax.dequantize(draw(key=key)))(jax.random.split(KEY, n))
    grid = oracles.grid(E2M1) * (2 if rule == "rceil" else 1 / (prescale or 1))
    below = np.searchsorted(grid, np.minimum(np.abs(x), grid[-1]), "right") - 1
    step = np.diff(grid, append=grid[-1])[below]
    p = (np.abs(x) - grid[below]) / np.where(step, step, 1)
    deviation = np.abs(np.float64(drawn).mean(axis=0) - x)
    # Five standard errors, and the probabilities' own 2**-17.
    unbiased = deviation <= 5 * step * np.sqrt(np.clip(p * (1 - p), 0, 1) / n) + step * 2.0**-17 + 1e-6
    np.testing.assert_array_equal(unbiased, np.abs(x) <= 6 if clips else True)


@pytest.mark.parametrize("prescale", [0.75, 0.5])
def test_prescale_shrinks_the_elements_and_not_the_scales(prescale):
    x = wide_range(8, 70)
    q = mxjax.quantize(x, prescale=prescale)
    scales, values = oracles.quantize(x, E2M1, prescale=prescale)
    assert_parts(q, scales, values)
    spread = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)[:, :70]
    np.testing.assert_allclose(mxjax.dequantize(q), values * spread / prescale, rtol=2.0**-23)


def test_prescale_works_with_a_tensor_scale():
    x = gaussian(8, 64)
    q = mxjax.quantize(x, "fp8_e4m3", prescale=0.5)
    assert np.abs(elements(q)).max() == 224
    np.testing.assert_allclose(mxjax.dequantize(q), mxjax.dequantize(mxjax.quantize(x, "fp8_e4m3")), rtol=0.1)
