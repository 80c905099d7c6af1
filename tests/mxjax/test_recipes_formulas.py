"""The policies `uniform4` and `averis`, which have no public code, against formulas in float64.

Rounding is gfloat's. Every operand is rounded to nearest; which ones the policies round stochastically,
tests/mxjax/test_recipes.py says.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy.linalg import hadamard
from support.oracles import ELEMENT_INFO, quantize, round_nearest

import mxjax
from mxjax.policy import Policy, map_operands

M, K, N = 64, 96, 32
IMPLEMENTATIONS = [pytest.param("reference", marks=pytest.mark.slow), "xla"]


@functools.cache
def tensors():
    """x and dy have a mean over tokens, and outliers."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_t(4, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    return x + np.float32(3) * x[:1], w, dy + np.float32(2) * dy[:1]


def agrees(policy, implementation, expected):
    x, w, dy = tensors()
    dot = functools.partial(mxjax.dot, policy=policy, implementation=implementation)
    y, vjp = jax.vjp(dot, x, w)
    for ours, e in zip((y, *vjp(dy)), expected, strict=True):
        np.testing.assert_allclose(ours, e, rtol=1e-5, atol=2e-6 * np.abs(e).max())


def with_signs(gemm, signs):
    return dataclasses.replace(
        gemm, rotation=dataclasses.replace(gemm.rotation, signs="fixed", values=tuple(map(int, signs)))
    )


def nearest(policy):
    return map_operands(policy, lambda operand: dataclasses.replace(operand, rounding="nearest"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uniform4_multiplies_rotated_operands_on_a_uniform_grid(implementation):
    """Three products of MX blocks of E1M2, each rotated by H16 with its own signs along what it contracts."""
    signs = np.random.default_rng(1).choice([-1, 1], (3, 16))
    gemms = nearest(mxjax.get_policy("uniform4")).gemms.values()
    policy = Policy(*(with_signs(gemm, s) for gemm, s in zip(gemms, signs, strict=True)))

    def seen(t, s):
        """t [.., k] rotated, quantized and dequantized along its last axis; nothing clips."""
        blocks = t.astype(np.float64).reshape(len(t), -1, 16) * s @ (hadamard(16) / 4)
        rotated = blocks.reshape(t.shape).astype(np.float32)
        scales, elements = quantize(rotated, ELEMENT_INFO["e1m2"], "rceil")
        assert set(np.unique(2 * np.abs(elements))) == set(range(8))
        return elements * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)

    x, w, dy = tensors()
    fprop, dgrad, wgrad = signs
    agrees(
        policy,
        implementation,
        (
            seen(x, fprop) @ seen(w.T, fprop).T,
            seen(dy, dgrad) @ seen(w, dgrad).T,
            seen(x.T, wgrad) @ seen(dy.T, wgrad).T,
        ),
    )


def nvfp4(t, rows=1):
    """NVFP4 of t [.., k] along its last axis, dequantized: arXiv 2509.25149, section 2."""
    t = t.astype(np.float64)
    tensor_scale = np.abs(t).max() / (6 * 448)
    blocks = t.reshape(t.shape[0] // rows, rows, t.shape[1] // 16, 16)
    amax = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    scale = round_nearest(amax / 6 / tensor_scale, ELEMENT_INFO["e4m3"]).astype(np.float64) * tensor_scale
    return (round_nearest(blocks / scale, ELEMENT_INFO["e2m1"]) * scale).reshape(t.shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_averis_splits_the_means_of_x_and_dy_off(implementation):
    """The mean's products are exact. Wgrad has no cross terms: the rest's sum over tokens is zero."""
    x, w, dy = tensors()
    x_mean, dy_mean = (t.mean(axis=0, keepdims=True, dtype=np.float64) for t in (x, dy))
    x_rest, dy_rest = x - x_mean, dy - dy_mean
    agrees(
        nearest(mxjax.get_policy("averis")),
        implementation,
        (
            nvfp4(x_rest) @ nvfp4(w.T, 16).T + x_mean @ w,
            nvfp4(dy_rest) @ nvfp4(w, 16).T + dy_mean @ w.T,
            nvfp4(x_rest.T) @ nvfp4(dy_rest.T).T + M * x_mean.T @ dy_mean,
        ),
    )
