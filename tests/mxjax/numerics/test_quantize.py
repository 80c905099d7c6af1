"""Quantization bit for bit against gfloat, and numpy block by block."""

from typing import get_args

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support import oracles, tensors
from support.tensors import E2M1, assert_parts, assert_same, elements, info, scale_bytes, wide_range

import mxjax
from mxjax.numerics.scales import ScaleRule

RULES = [rule for rule in get_args(ScaleRule) if rule != "quest"]  # those of the largest magnitude
each_rule = pytest.mark.parametrize("rule", RULES)
each_format_and_rule = pytest.mark.parametrize(
    ("name", "rule"), [(f, r) for f in tensors.MX_ELEMENTS for r in RULES if r != "uos" or f == "mxfp4"]
)
FLOAT32_MAX = np.finfo(np.float32).max


# --- gfloat and numpy, live


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_floor_matches_gfloats_blocks(name):
    x = wide_range(16, 32)
    block_info = getattr(gfloat.formats, f"format_info_{name}" + "_e2m1" * (name == "mxfp4"))
    expected = [
        gfloat.quantize_block(block_info, block.astype(np.float64), gfloat.compute_scale_amax) for block in x
    ]
    q = mxjax.quantize(x, name)
    np.testing.assert_array_equal(mxjax.dequantize(q), np.float32(expected))
    scaled = x / 2.0 ** (scale_bytes(q).astype(int) - 127)
    codes = [
        list(gfloat.encode_block(block_info, 2.0 ** (int(s) - 127), block))
        for s, block in zip(scale_bytes(q)[:, 0], scaled, strict=True)
    ]
    theirs = gfloat.decode_ndarray(block_info.etype, np.array(codes)[:, 1:])
    assert_parts(q, np.array(codes)[:, :1], theirs)


@each_format_and_rule
def test_quantize_matches_numpy_for_each_rule(name, rule):
    largest = np.resize(np.float32([FLOAT32_MAX, -FLOAT32_MAX, 2.0**127, 1, 2.0**-149]), 32)
    x = np.concatenate([wide_range(15, 32), tensors.subnormal_range(), largest[None]])
    assert_parts(mxjax.quantize(x, name, scale_rule=rule), *oracles.quantize(x, info(name), rule))


@pytest.mark.parametrize(("length", "block"), [(1, 32), (31, 32), (33, 32), (70, 1), (70, 16), (70, 64)])
def test_blocks_of_any_length_the_last_may_be_short_and_one_dimension_is_enough(length, block):
    x = wide_range(3, length)
    q, row = (mxjax.quantize(t, block_shape=None if block == 32 else block) for t in (x, x[1]))
    assert_parts(q, *(expected := oracles.quantize(x, E2M1, block=(1, block))))
    assert_parts(row, *(part[1] for part in expected))


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_any_axis_can_be_blocked(axis):
    x = wide_range(40, 33, 35)
    q = mxjax.quantize(x, axis=axis)
    expected = mxjax.quantize(np.moveaxis(x, axis, -1))
    assert_parts(q, *(np.moveaxis(v, -1, axis) for v in (scale_bytes(expected), elements(expected))))
    values = np.moveaxis(np.asarray(mxjax.dequantize(expected)), -1, axis)
    np.testing.assert_array_equal(mxjax.dequantize(q), values)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_an_empty_tensor_stays_empty(shape):
    q = mxjax.quantize(np.zeros(shape, np.float32))
    assert mxjax.dequantize(q).shape == shape


def test_dequantize_is_exact_in_bfloat16():
    q = mxjax.quantize(wide_range(8, 70))
    in_bfloat16 = mxjax.dequantize(q, jnp.bfloat16)
    assert in_bfloat16.dtype == jnp.bfloat16
    np.testing.assert_array_equal(in_bfloat16.astype(np.float32), mxjax.dequantize(q))


# --- 2-D blocks

SHAPE_2D = (40, 70)  # ragged for blocks of 32 x 32 along both axes


@each_rule
def test_square_blocks_match_numpy(rule):
    x = wide_range(*SHAPE_2D)
    q = mxjax.quantize(x, block_shape=(32, 32), scale_rule=rule)
    assert_parts(q, *oracles.quantize(x, E2M1, rule, (32, 32)))


def test_the_second_size_of_a_block_is_along_the_axis():
    x = wide_range(*SHAPE_2D)
    scales, values = oracles.quantize(x.T, E2M1, block=(2, 16))
    q = mxjax.quantize(x, axis=0, block_shape=(2, 16))
    assert_parts(q, scales.T, values.T)
    assert_parts(mxjax.quantize(x.T, axis=1, block_shape=(2, 16)), scales, values)


def test_square_blocks_of_a_stack_are_those_of_each_matrix():
    x = wide_range(2, *SHAPE_2D)
    q = mxjax.quantize(x, block_shape=(32, 32))
    each = [oracles.quantize(v, E2M1, block=(32, 32)) for v in x]
    assert_parts(q, *(np.stack(v) for v in zip(*each, strict=True)))


# --- formats with a scale for the whole tensor, and those without scales


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_scales_the_largest_magnitude_to_the_largest_element(name):
    """Also at ties, which show where XLA divides by a product with the reciprocal."""
    element = oracles.ELEMENT_INFO[name[4:]]
    grid = oracles.grid(element)
    largest = np.random.default_rng(0).uniform(1, 2, 8).astype(np.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    ties = [np.append(middles / (np.float32(element.max) / amax), amax) for amax in largest]
    for x in (wide_range(8, 70), *np.float32(ties)):
        per_unit = np.float32(element.max) / np.abs(x).max()
        q = mxjax.quantize(x, name)
        expected = oracles.round_nearest(x * per_unit, element)
        assert q.scales is None
        assert q.tensor_scale == 1 / per_unit
        assert np.abs(expected).max() == element.max
        np.testing.assert_array_equal(oracles.bits(elements(q)), oracles.bits(expected))
        np.testing.assert_array_equal(mxjax.dequantize(q), expected * q.tensor_scale)


@pytest.mark.parametrize("seed", range(8))
def test_nvfp4_matches_numpy(seed):
    x = wide_range(8, 70, seed=seed) * np.float32([1, 1, 1, 1, 1, 1, 1, 0])[:, None]
    e4m3 = oracles.ELEMENT_INFO["e4m3"]
    tensor_scale = np.float32(np.abs(x).max() / np.float32(448 * 6))
    blocks = np.pad(x, [(0, 0), (0, 10)]).reshape(8, 5, 16)
    amax = np.abs(blocks).max(axis=-1)
    scales = oracles.round_nearest(amax / np.float32(6) / tensor_scale, e4m3)
    with np.errstate(divide="ignore"):
        per_unit = np.where(scales == 0, 0, np.float32(1) / tensor_scale / scales).astype(np.float32)
    values = oracles.round_nearest(blocks * per_unit[..., None], E2M1).reshape(8, 80)[:, :70]
    q = mxjax.quantize(x, "nvfp4")
    assert q.tensor_scale == tensor_scale
    np.testing.assert_array_equal(np.asarray(q.scales, np.float32), scales)
    np.testing.assert_array_equal(oracles.bits(elements(q)), oracles.bits(values))
    spread = np.repeat(scales, 16, axis=1)[:, :70]
    np.testing.assert_array_equal(mxjax.dequantize(q), values * spread * tensor_scale)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp32", np.float32)])
def test_baseline_formats_only_cast(name, dtype):
    x = wide_range(8, 70)
    q = mxjax.quantize(x, name)
    assert q.elements.dtype == dtype
    assert q.scales is q.tensor_scale is None
    np.testing.assert_array_equal(mxjax.dequantize(q), x.astype(dtype).astype(np.float32))


# --- inputs


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_equal_values_of_another_dtype_give_equal_results(dtype):
    # Seven bits of mantissa and exponents that float16 has as well, its subnormals among them.
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (8, 70)) * 2.0 ** rng.integers(-24, 3, (8, 70))
    narrow = x.astype(dtype)
    assert np.all(narrow.astype(np.float64) == x)
    assert_same(mxjax.quantize(narrow), mxjax.quantize(x.astype(np.float32)))


# --- properties


def test_gradients_are_zero_and_straight_through_as_documented():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 64)), jnp.float32)

    def values(x):
        return mxjax.dequantize(mxjax.quantize(x))

    def straight(x):
        return lax.stop_gradient(values(x)) + (x - lax.stop_gradient(x))

    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(values(x) ** 2))(x), 0)
    np.testing.assert_array_equal(straight(x), values(x))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(straight(x) ** 2))(x), 2 * values(x))
