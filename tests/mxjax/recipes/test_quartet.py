"""The policy `quartet`, against what the authors' repository gives (tests/golden/make_quartet.py)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dots
from support.dots import assert_near, with_gradients
from support.recipes import golden, nearest

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.numerics.array import dequantize
from mxjax.operands.use import quantize_use, rotate_use
from mxjax.products.draws import uses_of
from mxjax.products.gradients import derivative
from mxjax.runtime.keys import fold

GOLDEN = golden("quartet")
QUARTET = mxjax.get_policy("quartet")
DRAWS = 64
CLIPPED = Operand(gradient="clipped")


def run(policy, implementation, key=None):
    dot = functools.partial(mxjax.dot, policy=policy, implementation=implementation, key=key)
    return with_gradients(dot, GOLDEN["x"], GOLDEN["w"], dy=GOLDEN["dy"])


def test_forward_operands_are_those_of_the_repository():
    x, w = uses_of(QUARTET.fprop, -1, -2, None)
    for name, use in (("x", x), ("w", w)):
        ours = jax.jit(lambda t, use=use: dequantize(quantize_use(t, use)))(GOLDEN[name])
        np.testing.assert_array_equal(ours, GOLDEN[f"forward/{name}"], err_msg=name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_the_layer_rounded_to_nearest_is_that_of_the_repository(implementation):
    """The repository flips signs after H, where they change nothing: its rotation is deterministic."""
    assert set(GOLDEN["signs"].tolist()) == {-1, 1}
    policy = nearest(QUARTET)
    gemms = {name: dataclasses.replace(policy.gemms[name], rotation=Rotation(32)) for name in policy.gemms}
    expected = [GOLDEN[name] for name in dots.PRODUCTS]
    assert_near(run(Policy(**gemms), implementation), expected, 2e-6, 1e-5)


@pytest.mark.slow
def test_means_of_stochastic_gradients_agree():
    """Both are unbiased, so the means over draws agree with each other and with exact backward GEMMs."""
    exact = Gemm(Operand("fp32"), Operand("fp32", source="dequantized"))
    swapped = Gemm(exact.rhs, exact.lhs)
    expected = run(dataclasses.replace(QUARTET, dgrad=exact, wgrad=swapped), "reference")[1:]
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(jax.vmap(lambda key: run(QUARTET, "xla", key)[1:]))(keys)
    for name, e, ours in zip(("dx", "dw"), expected, drawn, strict=True):
        theirs, deviation = GOLDEN[f"mean/{name}"], GOLDEN[f"std/{name}"] + 1e-12
        for mean in (theirs, np.mean(ours, axis=0)):
            z = (mean - np.asarray(e)) / deviation * DRAWS**0.5
            assert abs(np.mean(z)) < 5 / z.size**0.5 * 4  # elements of a row share draws
            assert np.abs(z).max() < 7
        # As noisy as theirs: the random rotation spreads what theirs leaves in place.
        assert 0.7 < np.mean(np.std(ours, axis=0)) / np.mean(deviation) < 1.3


def test_a_gradient_is_rotated_back_and_masked_in_the_rotated_space():
    """With float32 backward GEMMs, against JAX's gradient of the product of the rotated operands."""
    key = jax.random.key(3)
    fprop = dataclasses.replace(QUARTET.fprop, rotation=Rotation(32, "redrawn"))
    x_use, w_use = uses_of(fprop, -1, -2, fold(key, 0))

    def quantized(t, use):
        rotated = rotate_use(t, use)
        mask = derivative(rotated, use.operand, use.axis)
        return rotated * mask + jax.lax.stop_gradient(dequantize(quantize_use(t, use)) - rotated * mask)

    def product(x, w):
        return jnp.matmul(quantized(x, x_use), quantized(w, w_use), precision="highest")

    x, w, dy = (GOLDEN[name][:45, :50] for name in ("x", "w", "dy"))  # the rotation pads
    w, dy = GOLDEN["w"][:50], GOLDEN["dy"][:45]
    fp32 = Operand("fp32", source="dequantized")
    policy = Policy(fprop, Gemm(Operand("fp32"), fp32), Gemm(fp32, Operand("fp32")))
    dot = functools.partial(mxjax.dot, policy=policy, key=key, implementation="reference")
    found, expected = (jax.jit(with_gradients, static_argnums=0)(f, x, w, dy=dy) for f in (dot, product))
    assert_near(found, expected, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [QUARTET, Policy(fprop=Gemm(CLIPPED, CLIPPED))], ids=["quartet", "clipped"]
)
def test_packed_operands_give_the_products_of_the_definition(policy):
    """Dgrad and Wgrad may run on packed operands though the Fprop's estimate reads x and w."""
    key = jax.random.key(0)
    found, expected = (run(policy, implementation, key) for implementation in ("fp8_carriers", "reference"))
    assert_near(found, expected, 1e-5, 1e-4)
