"""The policies `uniform4`, `uniform4_fp32` and `averis`, without public code, against formulas in float64.

Rounding is gfloat's. Every operand is rounded to nearest; which ones the policies round stochastically,
tests/mxjax/recipes/test_recipes.py says.
"""

import functools

import numpy as np
import pytest
from scipy.linalg import hadamard
from support.dots import assert_near, with_gradients
from support.oracles import ELEMENT_INFO, quantize, round_nearest
from support.recipes import nearest, with_signs

import mxjax
from mxjax.policy import Policy

M, K, N = 64, 96, 32


@functools.cache
def tensors():
    """x and dy have a mean over tokens, and outliers."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_t(4, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    return x + np.float32(3) * x[:1], w, dy + np.float32(2) * dy[:1]


def assert_agrees(policy, expected):
    x, w, dy = tensors()
    dot = functools.partial(mxjax.dot, policy=policy, implementation="xla")
    assert_near(with_gradients(dot, x, w, dy=dy), expected, 2e-6, 1e-5)


def mx(t):
    """MX blocks of E1M2 along the last axis, dequantized, by scales at which nothing clips."""
    scales, elements = quantize(t, ELEMENT_INFO["e1m2"], "rceil")
    return elements * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)


def blocks_of_16(t):
    """Blocks of 16 of E1M2 along the last axis, dequantized, whose largest magnitudes become 3.5."""
    blocks = t.astype(np.float64).reshape(len(t), -1, 16)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 3.5
    return (round_nearest(blocks / scale, ELEMENT_INFO["e1m2"]) * scale).reshape(t.shape)


@pytest.mark.parametrize(("name", "quantized"), [("uniform4", mx), ("uniform4_fp32", blocks_of_16)])
def test_uniform4_multiplies_rotated_operands_on_a_uniform_grid(name, quantized):
    """Three products of quantized operands, each rotated with its own signs along what it contracts."""
    signs = np.random.default_rng(1).choice([-1, 1], (3, 16))
    gemms = nearest(mxjax.get_policy(name)).gemms.values()
    policy = Policy(*(with_signs(gemm, s) for gemm, s in zip(gemms, signs, strict=True)))

    def seen(t, s):
        """t [.., k] rotated and quantized along its last axis."""
        rotated = t.astype(np.float64).reshape(len(t), -1, 16) * s @ (hadamard(16) / 4)
        return quantized(rotated.reshape(t.shape).astype(np.float32))

    x, w, dy = tensors()
    fprop, dgrad, wgrad = signs
    assert_agrees(
        policy,
        (
            seen(x, fprop) @ seen(w.T, fprop).T,
            seen(dy, dgrad) @ seen(w, dgrad).T,
            seen(x.T, wgrad) @ seen(dy.T, wgrad).T,
        ),
    )


def test_the_uniform_grid_with_float32_scales():
    """Short blocks, zeros, NaN and both axes; every code occurs."""
    x = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
    x[2, :16], x[3, 20], x[4, 35] = 0, np.nan, np.inf
    for axis, t in ((1, x), (0, x.T)):
        q = mxjax.quantize(t, "fp4_e1m2", axis=axis)
        value = np.asarray(mxjax.dequantize(q)) if axis else np.asarray(mxjax.dequantize(q)).T
        assert q.scales is not None
        assert q.scales.dtype == np.float32
        with np.errstate(invalid="ignore"):
            e = blocks_of_16(np.pad(np.where(np.isfinite(x) & (x != 0), x, 1), ((0, 0), (0, 8))))[:, :40]
        plain = np.isin(np.arange(48), [2, 3, 4], invert=True)
        np.testing.assert_allclose(value[plain], e[plain], rtol=3e-7)
        np.testing.assert_array_equal(value[2, :16], 0)
        assert np.isnan(value[3, 16:32]).all()
        assert np.isnan(value[4, 32:]).all()
        assert np.isfinite(value[3, :16]).all()
    assert set(np.unique(np.asarray(q.elements, np.float32)[:, plain])) == set(np.arange(-7, 8) / 2)


def nvfp4(t, rows=1):
    """NVFP4 of t [.., k] along its last axis, dequantized: arXiv 2509.25149, section 2."""
    t = t.astype(np.float64)
    tensor_scale = np.abs(t).max() / (6 * 448)
    blocks = t.reshape(t.shape[0] // rows, rows, t.shape[1] // 16, 16)
    amax = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    scale = round_nearest(amax / 6 / tensor_scale, ELEMENT_INFO["e4m3"]).astype(np.float64) * tensor_scale
    return (round_nearest(blocks / scale, ELEMENT_INFO["e2m1"]) * scale).reshape(t.shape)


def test_averis_splits_the_means_of_x_and_dy_off():
    """The mean's products are exact. Wgrad has no cross terms: the rest's sum over tokens is zero."""
    x, w, dy = tensors()
    x_mean, dy_mean = (t.mean(axis=0, keepdims=True, dtype=np.float64) for t in (x, dy))
    x_rest, dy_rest = x - x_mean, dy - dy_mean
    assert_agrees(
        nearest(mxjax.get_policy("averis")),
        (
            nvfp4(x_rest) @ nvfp4(w.T, 16).T + x_mean @ w,
            nvfp4(dy_rest) @ nvfp4(w, 16).T + dy_mean @ w.T,
            nvfp4(x_rest.T) @ nvfp4(dy_rest.T).T + M * x_mean.T @ dy_mean,
        ),
    )
