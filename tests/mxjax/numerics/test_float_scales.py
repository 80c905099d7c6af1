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
from mxjax.numerics.float_scales import Rounded, block_errors, closer, eden_scales
from mxjax.numerics.rounding import round_nearest

NV = Operand("nvfp4")
UNCLIPPED = dataclasses.replace(NV, scale_target=6 * 16 / 17)
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


def test_with_a_target_of_6_times_16_17ths_nothing_clips():
    x = tensor(256, 256)

    def exceeding(operand):
        q = mxjax.quantize(x, operand)
        limit = 6 * q.scales.astype(jnp.float32).repeat(16, 1) * q.tensor_scale
        # A scale below E4M3's smallest normal number has a larger relative error.
        normal = q.scales.astype(jnp.float32).repeat(16, 1) >= 2.0**-6
        return np.mean((np.abs(x) > limit * (1 + 1e-6)) & normal)

    assert exceeding(UNCLIPPED) == 0
    assert exceeding(NV) > 0.02


def test_e4m3_scales_bias_stochastic_rounding_by_clipping():
    """The slope of E[q(x)] on x; arXiv 2601.22813, section 3."""
    x = jax.random.normal(jax.random.key(0), (256, 256))

    def slope(operand: Operand):
        mean = values(x, dataclasses.replace(operand, rounding="stochastic"), 16).mean(0)
        return np.vdot(mean, x) / np.vdot(x, x)

    assert 0.9955 < slope(NV) < 0.9985  # measured: .9970
    assert abs(slope(UNCLIPPED) - 1) < 0.0012


@pytest.mark.parametrize("error", ["mse", "mae"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_each_block_is_scaled_to_6_or_4_by_the_lower_error(error, block):
    operand = dataclasses.replace(SIX_OR_FOUR, four_over_six=error, block_shape=block)
    # Half of the columns are normal; in the others 4 is better, because 3/4 of it is an element.
    quarters = np.random.default_rng(1).integers(3, 5, X.shape) / 4
    x = jnp.where(np.arange(256) < 128, X, quarters)
    found = np.asarray(mxjax.dequantize(mxjax.quantize(x, operand)))
    six = dataclasses.replace(operand, four_over_six=None)
    # Scaled to 4 with scales of at most 384: the tensor scale is the same.
    four = dataclasses.replace(six, scale_target=4.0, scale_max=384)
    candidates = [np.asarray(mxjax.dequantize(mxjax.quantize(x, o))) for o in (six, four)]

    def errors(v):
        difference = (v.astype(np.float64) - x).reshape(32 // block[0], block[0], 256 // block[1], block[1])
        return (difference**2 if error == "mse" else np.abs(difference)).sum((1, 3))

    chosen = errors(candidates[1]) < errors(candidates[0])
    assert 0.1 < chosen.mean() < 0.9
    wide = chosen.repeat(block[0], 0).repeat(block[1], 1)
    np.testing.assert_allclose(found, np.where(wide, *candidates[::-1]), rtol=1e-6)


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


def test_eden_corrects_by_the_projection_of_the_run():
    scaled = np.asarray(tensor(4, 256, seed=1))
    elements = oracles.round_nearest(scaled, oracles.ELEMENT_INFO["e2m1"])
    elements[0, :128] = 0
    rounded = Rounded(jnp.full((4, 16), 2.0), jnp.asarray(scaled), jnp.asarray(elements))
    found = np.asarray(eden_scales(rounded, 128, (1, 16), -1))
    s, q = (t.astype(np.float64).reshape(4, 2, 128) for t in (scaled, elements))
    with np.errstate(divide="ignore"):
        expected = 2 * np.vecdot(s, s) / np.vecdot(s, q)
    expected[0, 0] = 2  # no element to correct
    np.testing.assert_allclose(found, expected.repeat(8, 1), rtol=1e-5)


def test_eden_rounds_scales_to_a_neighbour_with_the_right_mean():
    codes, scales = [], []
    for seed in range(64):
        q = mxjax.quantize(X, EDEN, key=jax.random.key(seed))
        codes.append(np.asarray(mxjax.pack(q)))
        scales.append(np.asarray(q.scales, np.float32))
    assert all(np.array_equal(codes[0], c) for c in codes)
    nearest = mxjax.quantize(X, dataclasses.replace(EDEN, eden=None))
    per_unit = nearest.scales.astype(jnp.float32) * nearest.tensor_scale
    scaled = X / per_unit.repeat(16, 1)
    elements = nearest.elements.astype(jnp.float32)
    exact = eden_scales(Rounded(nearest.scales.astype(jnp.float32), scaled, elements), 128, (1, 16), -1)
    low, high, mean = np.min(scales, 0), np.max(scales, 0), np.mean(scales, 0)
    assert np.all((low <= exact) & (exact <= high) | (high == low))
    step = np.maximum(2.0 ** np.floor(np.log2(exact)), 2.0**-6) / 8
    assert np.all(high - low <= step)
    error = (mean - exact) / (step / np.sqrt(64))
    assert np.abs(error).max() < 2.5  # a fair coin's standard deviation is half a step
    assert abs(error.mean()) < 0.08


@pytest.mark.slow
def test_eden_after_a_random_rotation_is_unbiased_with_less_noise_than_stochastic_rounding():
    x = np.asarray(tensor(4, 256, seed=3))

    def draw(key):
        signs = mxjax.random_signs(jax.random.fold_in(key, 1), 128)
        rotated = mxjax.rotate(x, 128, signs=signs)

        def back(operand):
            q = mxjax.quantize(rotated, operand, key=key)
            return mxjax.rotate(mxjax.dequantize(q), 128) * jnp.tile(signs, 2)[None]

        return back(EDEN), back(dataclasses.replace(UNCLIPPED, rounding="stochastic"))

    run = jax.jit(lambda keys: jax.lax.map(draw, keys))
    eden, stochastic = (np.asarray(t) for t in run(jax.random.split(jax.random.key(5), 512)))
    norm = np.vdot(x, x)
    assert abs(np.vdot(eden.mean(0), x) / norm - 1) < 0.003
    noise = [np.mean(np.sum((t - x) ** 2, (1, 2))) / norm for t in (eden, stochastic)]
    assert noise[0] < 0.5 * noise[1]
    # What remains of the noise after averaging is the noise of 512 draws, without a bias beside it.
    remaining = np.sum((eden.mean(0) - x) ** 2) / norm
    assert remaining < 1.5 * noise[0] / 512


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
        (
            {"eden": 24},
            "eden needs 1-D blocks and a multiple of their length, got eden 24 for blocks of 1x16",
        ),
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
