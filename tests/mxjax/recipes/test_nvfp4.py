"""The NVFP4 recipes against their public implementations, whose results are in tests/golden/nvfp4.npz."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import PRODUCTS, assert_near, products
from support.marks import parametrize

import mxjax
from mxjax import Operand
from mxjax.policy import map_operands

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "nvfp4.npz")
TILE = (16, 16)
DRAWS = 256


@functools.cache
def inputs():
    """x, w and dy of golden/make_nvfp4.py."""
    rng = np.random.RandomState(0)
    draw = lambda: rng.standard_normal((128, 128)) * np.exp(rng.standard_normal((128, 128)))  # noqa: E731
    return [draw().astype(np.float32) for _ in range(3)]


def quantized(operand: Operand, x=None):
    return mxjax.quantize(inputs()[0] if x is None else x, operand)


def four_over_six(error, scale_max=256, block_shape=None):
    return Operand("nvfp4", block_shape, four_over_six=error, scale_max=scale_max)


OPERANDS = {
    "fouroversix/mse/1d": four_over_six("mse"),
    "fouroversix/mae/1d": four_over_six("mae"),
    "fouroversix/mse/2d": four_over_six("mse", block_shape=TILE),
    "fouroversix/mae/2d": four_over_six("mae", block_shape=TILE),
    "te/mse-256": four_over_six("mse"),
    "te/mae-256": four_over_six("mae"),
    "te/mse-448": four_over_six("mse", 448),
    "te/mae-448": four_over_six("mae", 448),
    "te/1d": Operand("nvfp4"),
    "te/2d": Operand("nvfp4", TILE),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_codes_and_scales_are_those_of_fouroversix_and_transformer_engine(name):
    q = quantized(OPERANDS[name])
    np.testing.assert_array_equal(np.asarray(q.scales).view(np.uint8), GOLDEN[f"{name}/scales"])
    np.testing.assert_array_equal(mxjax.pack(q), GOLDEN[f"{name}/codes"])


@parametrize(
    ("golden", "name", "implementation"),
    *(("fouroversix", "four_over_six", "reference"), ("te", "nvfp4_te", "xla")),
    exhaustive=[("fouroversix", "four_over_six", "xla"), ("te", "nvfp4_te", "reference")],
)
def test_forward_and_gradients_are_those_of_the_public_layer(golden, name, implementation):
    """With gradients rounded to nearest, as its references can; up to the order of float32 sums."""
    policy = map_operands(
        mxjax.get_policy(name), lambda o: dataclasses.replace(o, rounding="nearest", scale_target=None)
    )
    x, w, dy = inputs()
    expected = [GOLDEN[f"{golden}/{product}"] for product in PRODUCTS]
    found = products(x, w, dy, policy=policy, implementation=implementation)
    assert_near([t[: len(e)] for t, e in zip(found, expected, strict=True)], expected, 1e-6)


def test_the_signs_are_those_of_transformer_engine():
    rotation = mxjax.get_policy("nvfp4_te").wgrad.rotation
    assert rotation is not None
    np.testing.assert_array_equal(rotation.values, GOLDEN["te/signs"])


def draws(x, operand: Operand) -> np.ndarray:
    draw = jax.jit(jax.vmap(lambda key: mxjax.dequantize(mxjax.quantize(x, operand, key=key))[:16]))
    return np.asarray(draw(jax.random.split(jax.random.key(0), DRAWS)))


def test_ms_eden_draws_the_values_of_quartet2_with_its_probabilities():
    rotated = mxjax.rotate(inputs()[0], 128, signs=jnp.asarray(GOLDEN["quartet/signs"]))
    found = draws(rotated, mxjax.get_policy("quartet2").dgrad.lhs)
    expected = [GOLDEN[f"quartet/{key}"] for key in ("low", "high", "mean")]
    up = check_draws(found, *expected)
    blocks = up.reshape(16, 8, 16)[..., 0]  # elements of a block share a draw
    assert abs(blocks.mean()) < 4 / np.sqrt(blocks.size)


def check_draws(found, low, high, mean) -> np.ndarray:
    """Checks both values of each element and their probabilities; returns the deviations of these."""
    step = np.where(high > low, high - low, 1)
    up, expected_up = (found.mean(0) - low) / step, (mean - low) / step
    # Where both were drawn often, the two values are theirs.
    both = (expected_up > 0.05) & (expected_up < 0.95)
    assert both.mean() > 0.7
    np.testing.assert_allclose(found.min(0)[both], low[both], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(found.max(0)[both], high[both], rtol=1e-6, atol=1e-12)
    deviation = np.where(high > low, up - expected_up, 0) / np.sqrt(2 * 0.25 / DRAWS)  # at most 1 each
    assert np.abs(deviation).max() < 4.5
    return deviation


def test_tetrajet_v2_has_the_values_of_its_fake_quantization():
    policy = mxjax.get_policy("tetrajet_v2")
    x, w, _ = inputs()
    found = np.asarray(mxjax.dequantize(quantized(policy.fprop.lhs)))[:16]
    np.testing.assert_allclose(found, GOLDEN["tetrajet/nearest"], rtol=1e-6)
    for implementation in ("reference", "xla"):
        y = mxjax.dot(x, w, policy=policy, implementation=implementation, key=jax.random.key(0))[:16]
        expected = GOLDEN["tetrajet/y"]
        assert np.abs(y - expected).max() < 1e-6 * np.abs(expected).max()


def test_tetrajet_v2_draws_the_values_of_its_fake_quantization_with_its_probabilities():
    found = draws(inputs()[0], mxjax.get_policy("tetrajet_v2").dgrad.lhs)
    check_draws(found, *(GOLDEN[f"tetrajet/{key}"] for key in ("low", "high", "mean")))


def test_unbiased_stochastic_rounding_has_the_mean_of_fouroversix():
    operand = mxjax.get_policy("nvfp4_unclipped").dgrad.lhs
    x = inputs()[0]
    found, expected = draws(x, operand).mean(0), GOLDEN["fouroversix/unbiased"]
    q = mxjax.quantize(x, dataclasses.replace(operand, rounding="nearest"))
    step = np.asarray(q.scales.astype(jnp.float32) * q.tensor_scale).repeat(16, 1)[:16]
    # Elements are at most 2 apart, so a draw's standard deviation is at most a step of 1.
    deviation = (found - expected) / (step * np.sqrt(2 / DRAWS))
    assert np.abs(deviation).max() < 5
    assert abs(deviation.mean()) < 4 / np.sqrt(deviation.size)


def test_quartet2_corrects_by_run_as_its_code_or_by_block_as_the_paper():
    x = mxjax.rotate(inputs()[0], 128, signs=jnp.asarray(GOLDEN["quartet/signs"]))
    operand = mxjax.get_policy("quartet2").dgrad.lhs
    for run in (16, 128):
        mean = draws(x, dataclasses.replace(operand, eden=run)).mean(0)
        assert abs(np.vdot(mean, x[:16]) / np.vdot(x[:16], x[:16]) - 1) < 0.003


def gradients_of(policy, x, w, dy, keys):
    def gradients(key):
        dot = functools.partial(mxjax.dot, policy=policy, key=key, implementation="reference")
        return jax.vjp(dot, x, w)[1](jnp.asarray(dy))

    run = jax.jit(functools.partial(jax.lax.map, gradients))
    return [np.asarray(t, np.float64) for t in run(jax.random.split(jax.random.key(1), keys))]


@pytest.mark.slow
def test_the_layer_of_quartet2_has_its_forward_and_the_mean_and_noise_of_its_gradients():
    policy, draws = mxjax.get_policy("quartet2"), 64
    x, w, dy = inputs()
    y = mxjax.dot(x, w, policy=policy, key=jax.random.key(0), implementation="reference")
    assert np.abs(y[:16] - GOLDEN["quartet/y"]).max() < 1e-6 * np.abs(GOLDEN["quartet/y"]).max()
    for name, found in zip(("dx", "dw"), gradients_of(policy, x, w, dy, draws), strict=True):
        mean = found.mean(0)
        noise = np.mean(np.sum((found - mean) ** 2, (1, 2))) / np.sum(mean**2)
        assert noise == pytest.approx(GOLDEN[f"quartet/{name}_noise"], rel=0.05)
        error = found.std(0)[:16] * np.sqrt(2 / draws)  # of a difference of two means
        deviation = (mean[:16] - GOLDEN[f"quartet/{name}"]) / error
        assert np.abs(deviation).max() < 6
        assert np.mean(deviation**2) == pytest.approx(1, abs=0.25)


def test_gradients_of_ue5m3_are_unbiased():
    """The mean of dx and dw over keys, against the products of the forward operands that the policy sees."""
    policy = mxjax.get_policy("ue5m3")
    x, w, dy = (t[:64, :64] / 16 for t in inputs())

    def values(t, operand, axis):
        return np.asarray(mxjax.dequantize(mxjax.quantize(t, operand, axis=axis)), np.float64)

    dx, dw = gradients_of(policy, x, w, dy, 128)
    exact = dy @ values(w, policy.dgrad.rhs, -1).T, values(x, policy.wgrad.lhs, -2).T @ dy
    for found, expected in zip((dx, dw), exact, strict=True):
        slope = np.tensordot(found, expected, 2) / np.vdot(expected, expected)
        assert abs(slope.mean() - 1) < 0.008  # its scales are rounded to nearest
