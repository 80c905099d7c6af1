"""Scales that are minifloats: UE5M3, their targets, the choice between two, and the correction of EDEN."""

import dataclasses
import functools
import re

import gfloat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles

import mxjax
from mxjax import Operand
from mxjax.numerics import formats
from mxjax.numerics.float_scales import Rounded, block_errors, closer
from mxjax.numerics.rounding import round_nearest

NV = Operand("nvfp4")
SIX_OR_FOUR = dataclasses.replace(NV, four_over_six="mse", scale_max=256)
EDEN = dataclasses.replace(NV, scale_target=6 / (17 / 16 * 0.93), scale_max=255.99, eden=128)
UE5M3 = Operand("fp4_ue5m3")

# PTX ISA 9.4 names the format; of its 256 codes 255 is NaN.
UE5M3_INFO = oracles.format_info("ue5m3", k=8, precision=4, bias=15, is_signed=False, num_high_nans=1)


def tensor(*shape: int, seed: int = 0) -> jax.Array:
    """Normal numbers whose size varies from block to block."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.standard_normal((shape[0], shape[1] // 16))).repeat(16, 1)
    return jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)


X = tensor(32, 256)


def values(x, operand: Operand, draws: int) -> np.ndarray:
    """Returns the values of x quantized with each of several keys."""
    draw = jax.jit(jax.vmap(lambda key: mxjax.dequantize(mxjax.quantize(x, operand, key=key))))
    return np.asarray(draw(jax.random.split(jax.random.key(0), draws)))


def test_ue5m3_is_gfloats_format():
    grid = gfloat.decode_ndarray(UE5M3_INFO, np.arange(255)).astype(np.float32)
    assert grid[0] == 0
    assert grid[1] == 2.0**-17
    assert grid[-1] == formats.UE5M3.max
    between = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid * 1.01, [2e5]]).astype(np.float32)
    expected = oracles.round_nearest(between, UE5M3_INFO)
    np.testing.assert_array_equal(round_nearest(jnp.asarray(between), formats.UE5M3), expected)
    np.testing.assert_array_equal(jnp.asarray(grid, formats.UE5M3.dtype).astype(jnp.float32), grid)
    assert formats.UE5M3.bits == 8


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (1, 32)])
def test_a_ue5m3_block_has_amax_over_6_rounded(block):
    q = mxjax.quantize(X, Operand("fp4_ue5m3", block_shape=block))
    rows, length = block
    amax = np.abs(X).reshape(32 // rows, rows, 256 // length, length).max((1, 3))
    scale = oracles.round_nearest(amax / np.float32(6), UE5M3_INFO)
    np.testing.assert_array_equal(q.scales.astype(jnp.float32), scale)
    wide = scale.repeat(rows, 0).repeat(length, 1)
    elements = oracles.round_nearest(np.asarray(X) * (1 / wide), oracles.ELEMENT_INFO["e2m1"])
    np.testing.assert_array_equal(q.elements.astype(jnp.float32), elements)
    np.testing.assert_array_equal(mxjax.dequantize(q), elements * wide)
    assert q.tensor_scale is None


def test_a_ue5m3_scale_of_zero_is_one_and_stochastic_rounding_keeps_the_mean():
    x = jnp.full((1, 4096), 2.0**-17)  # a sixth of it rounds to scale zero
    q = mxjax.quantize(x, UE5M3)
    assert np.all(q.scales == 1)
    small = jnp.full((1, 65536), 2.0**-10)  # scale 2**-12.6, so one of the two neighbours each time
    drawn = values(small, dataclasses.replace(UE5M3, rounding="stochastic"), 4)
    assert abs(drawn.mean() / 2.0**-10 - 1) < 0.005


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_a_tensor_scale_nan_and_infinity_stay_in_their_block(bad):
    found = mxjax.dequantize(mxjax.quantize(X.at[3, 20].set(bad), UE5M3))
    expected = np.array(mxjax.dequantize(mxjax.quantize(X, UE5M3)))
    expected[3, 16:32] = np.nan
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("name", "largest"), [("nvfp4", 448), ("nvfp4", 256), ("fp4_ue5m3", 2048)])
def test_the_scale_of_the_largest_block_is_scale_max(name, largest):
    q = mxjax.quantize(X, Operand(name, scale_max=largest))
    assert q.scales.max() == largest
    np.testing.assert_allclose(q.tensor_scale, np.abs(X).max() / (6 * largest), rtol=1e-6)


def test_in_1x128_each_run_is_quantized_like_a_tensor_of_its_own():
    x = X.at[2, 150].set(jnp.nan)[:, :200]  # the last run is short
    found = mxjax.quantize(x.T, "nvfp4_1x128", axis=0)
    assert found.tensor_scale is not None
    assert found.tensor_scale.shape == (2, 32)
    runs = [[mxjax.quantize(run[None], "nvfp4") for run in (row[:128], row[128:])] for row in x]
    expected = [np.concatenate([mxjax.dequantize(q)[0] for q in row]) for row in runs]
    np.testing.assert_allclose(mxjax.dequantize(found).T, expected, rtol=1e-6)
    np.testing.assert_array_equal(found.tensor_scale.T, [[q.tensor_scale for q in row] for row in runs])


def test_of_equal_errors_the_first_is_chosen():
    zeros, ones = jnp.zeros((1, 16)), jnp.ones((1, 1))
    first, second = Rounded(ones, zeros, zeros), Rounded(2 * ones, zeros, zeros)
    assert closer(zeros, first, second, "mse", (1, 16), -1).scales == 1


@pytest.mark.parametrize("error", ["mse", "mae"])
def test_errors_are_rounded_alike_in_a_program_and_one_by_one(error):
    rounded = Rounded(tensor(32, 256, seed=2)[:, ::16] * 0 + 0.8125, X, jnp.rint(X))
    errors = functools.partial(block_errors, X, rounded, error, (1, 16), -1)
    with jax.disable_jit():
        one_by_one = errors()
    np.testing.assert_array_equal(jax.jit(errors)(), one_by_one)


def test_four_over_six_does_not_depend_on_the_unit():
    codes = mxjax.pack(mxjax.quantize(X, SIX_OR_FOUR))
    for exponent in (-40, 40):
        np.testing.assert_array_equal(codes, mxjax.pack(mxjax.quantize(X * 2.0**exponent, SIX_OR_FOUR)))


def test_an_operand_has_options_of_its_own():
    np.testing.assert_array_equal(mxjax.quantize(X, NV).elements, mxjax.quantize(X, "nvfp4").elements)
    with pytest.raises(ValueError, match="takes the options of the operand nvfp4"):
        mxjax.quantize(X, NV, prescale=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "mxfp4", "scale_target": 4.0}, "scale_target is for formats with E4M3 or UE5M3 scales"),
        ({"format": "fp8_e4m3", "scale_max": 256}, "scale_max is for formats with"),
        ({"format": "bf16", "eden": 128}, "eden is for formats with"),
        ({"scale_target": 0.0}, "scale_target must be from 0.5 to 12, got 0.0"),
        ({"scale_max": 500}, "scale_max must be from 0.00195 to 448, got 500"),
        ({"four_over_six": "max"}, "unknown four_over_six 'max'; use one of mse, mae"),
        ({"four_over_six": "mse", "prescale": 0.5}, "four_over_six and eden take no prescale"),
        ({"eden": 24}, "eden needs 1-D blocks and a multiple of their length, got eden 24 for blocks"),
        ({"eden": 128, "block_shape": (16, 16)}, "eden needs 1-D blocks"),
        ({"format": "nvfp4_1x128", "block_shape": (16, 16)}, "nvfp4_1x128 needs 1-D blocks whose length"),
        ({"eden": 128, "rounding": "stochastic"}, "eden rounds the scales stochastically, not the elements"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with oracles.types_unchecked(), pytest.raises(ValueError, match="^" + re.escape(message)):
        Operand(**{"format": "nvfp4"} | options)


def test_eden_needs_a_key():
    with pytest.raises(ValueError, match="needs key="):
        mxjax.quantize(X, EDEN)
