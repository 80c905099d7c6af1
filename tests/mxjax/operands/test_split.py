"""Operands of which a part is multiplied apart: the token mean, and outliers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_near, jitted_products

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.operands.split import product_apart, quantiles, split
from mxjax.operands.use import OperandUse, dequantize_use
from mxjax.products import prepare

BF16 = Operand("bf16")
MEAN, NEAREST = Operand(split="mean"), Operand()


def draw(*shape, seed):
    return jax.random.normal(jax.random.key(seed), shape)


@functools.cache
def tensors():
    """x and dy have a large mean over tokens, and outliers."""
    x, w, dy = draw(70, 96, seed=0), 0.05 * draw(96, 40, seed=1), draw(70, 40, seed=2)
    return x + 20 * draw(1, 96, seed=3), w, dy + 5 * draw(1, 40, seed=4)


def gradients(policy, implementation="reference"):
    return jitted_products(*tensors(), jax.random.key(9), policy=policy, implementation=implementation)


def quantized(x, axis):
    return np.asarray(mxjax.dequantize(mxjax.quantize(x, axis=axis)), np.float64)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("run", [None, 16])
def test_means_are_multiplied_beside_the_quantized_residual(run, implementation):
    """Against the formulas in float64.

    A mean of all tokens is kept in float32, and the cross terms of Wgrad vanish. Those of 16 neighbours are
    kept in bfloat16; the last 6 of 70 tokens share one with 10 zeros.
    """
    x, w, dy = (np.asarray(t, np.float64) for t in tensors())
    operand = Operand(split="mean", split_tokens=run)
    policy = Policy(Gemm(operand, NEAREST), Gemm(operand, NEAREST), Gemm(operand, operand))

    def means(t):
        if run is None:
            return np.float32(t).mean(axis=0, keepdims=True).repeat(70, axis=0)
        runs = np.pad(np.float32(t), ((0, 10), (0, 0))).reshape(5, 16, -1)
        rounded = np.asarray(jnp.asarray(runs.mean(axis=1)).astype(jnp.bfloat16), np.float64)
        return rounded.repeat(16, axis=0)[:70]

    x_rest, dy_rest = np.float32(x - means(x)), np.float32(dy - means(dy))
    apart = means(x).T @ (means(dy) if run is None else dy) + (0 if run is None else x_rest.T @ means(dy))
    expected = (
        quantized(x_rest, -1) @ quantized(tensors()[1], 0) + means(x) @ w,
        quantized(dy_rest, -1) @ quantized(tensors()[1], 1).T + means(dy) @ w.T,
        quantized(x_rest, 0).T @ quantized(dy_rest, 0) + apart,
    )
    assert_near(gradients(policy, implementation), expected, 2e-5, 1e-4)


def test_no_tokens_have_no_mean():
    found = split(jnp.zeros((0, 4)), MEAN)
    np.testing.assert_array_equal(found.rest, np.zeros((1, 4)))


@pytest.mark.parametrize(("lhs", "rhs"), [(MEAN, NEAREST), (NEAREST, MEAN), (MEAN, MEAN)])
def test_either_operand_of_wgrad_may_be_split(lhs, rhs):
    """part @ part + apart is the product, whatever is split."""
    x, _, dy = tensors()
    gemm = Gemm(lhs, rhs)
    parts = jnp.matmul(split(x, lhs).part.T, split(dy, rhs).part, precision="highest")
    np.testing.assert_allclose(parts + product_apart(x, -2, dy, -2, gemm), x.T @ dy, rtol=1e-4, atol=1e-2)


def test_the_backward_pass_sees_the_mean_too():
    """Wgrad reads x as the Fprop left it: the quantized residual and the mean, rotated."""
    x, _, dy = tensors()
    seen = Operand("fp32", source="dequantized")
    policy = Policy(Gemm(MEAN, NEAREST, Rotation(16)), Gemm(BF16, BF16), Gemm(seen, Operand("fp32")))
    y, _, dw = gradients(policy)
    residual = mxjax.rotate(x - x.mean(axis=0, keepdims=True))
    left = mxjax.rotate(quantized(residual, -1) + np.asarray(mxjax.rotate(x.mean(axis=0, keepdims=True))))
    np.testing.assert_allclose(dw, np.asarray(left, np.float64).T @ dy, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(y, gradients(dataclasses.replace(policy, wgrad=Gemm()))[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("largest", "dtype"), [(1.0, jnp.float32), (1000.0, jnp.float32), (1000.0, jnp.bfloat16)]
)
def test_on_gpus_outliers_are_multiplied_by_halves(largest, dtype, monkeypatch):
    """In as many products as they need, against float64; x is in bfloat16, and a column may be large."""
    monkeypatch.setattr("mxjax.operands.product.on_gpu", lambda: True)
    x, w, _ = tensors()
    x, outliers = x.at[:, 3].multiply(largest).astype(jnp.bfloat16), Operand(split="outliers", quantile=0.9)
    bounds, w = quantiles(x, 0.9), w.astype(dtype)
    y = jax.jit(lambda x, w: product_apart(x, -1, w, -2, Gemm(outliers, NEAREST), (bounds, None)))(x, w)
    rest = np.asarray(split(x, outliers).rest, np.float64)
    wanted = rest @ np.asarray(w, np.float64)
    size = np.linalg.norm(rest, axis=1)[:, None] * np.linalg.norm(np.asarray(w, np.float64), axis=0)
    assert np.all(np.abs(y - wanted) < 1e-6 * size)


def test_a_batch_of_tokens_under_vmap_has_one_mean():
    x, w, _ = tensors()
    dot = functools.partial(mxjax.dot, policy=Policy(fprop=Gemm(MEAN, NEAREST)))
    mapped = jax.vmap(lambda part: dot(part, w))(x.reshape(7, 10, 96))
    np.testing.assert_array_equal(mapped.reshape(70, 40), dot(x, w))


@pytest.mark.parametrize(
    ("format", "name"), [("fp8_e4m3", "dgrad.lhs"), ("fp8_e4m3", "wgrad.rhs"), ("nvfp4", "wgrad.lhs")]
)
def test_gradients_have_what_a_split_operand_multiplies_apart(format, name):
    """The implementations that keep operands of the forward pass keep the tensors here too."""
    policy = mxjax.set_fields(Policy(*[Gemm(Operand(format), Operand(format))] * 3), [f"{name}.split=mean"])
    found = gradients(policy, "xla" if format == "nvfp4" else "fp8_carriers")
    assert_near(found, gradients(policy), 1e-2, 1e-2)


def test_what_the_fprop_left_of_a_split_tensor_has_its_rest(monkeypatch):
    """A kernel that would take the tensor writes the quantized part alone."""
    monkeypatch.setattr(prepare, "_kernel_takes", lambda *_: True)
    x, _, _ = tensors()
    fprop = OperandUse(-1, Operand("nvfp4", split="mean"), form="bf16")
    found = prepare.as_read(x, OperandUse(-2, Operand("nvfp4"), reads=fprop))
    np.testing.assert_array_equal(found, dequantize_use(x, fprop))
