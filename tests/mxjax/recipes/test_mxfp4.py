"""The policies `tetrajet` and `amazon`, against their authors' code (tests/golden/make_mxfp4_recipes.py)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.dots import PRODUCTS, assert_near, with_gradients
from support.marks import parametrize
from support.recipes import golden, nearest, with_signs

import mxjax
from mxjax import Gemm, Operand, Policy

GOLDEN = golden("mxfp4_recipes")
DRAWS = 64


def run(policy, implementation, key=None):
    dot = functools.partial(mxjax.dot, policy=policy, implementation=implementation, key=key)
    found = with_gradients(dot, GOLDEN["x"], GOLDEN["w"], dy=GOLDEN["dy"])
    return dict(zip(PRODUCTS, found, strict=True))


def assert_agrees(found, name, kinds):
    assert_near([found[kind] for kind in kinds], [GOLDEN[f"{name}/{kind}"] for kind in kinds], 2e-6, 1e-5)


@parametrize("implementation", "xla", slow=["fp8_carriers"], exhaustive=["reference"])
def test_the_layer_of_tetrajet_rounded_to_nearest_is_that_of_the_repository(implementation):
    found = run(nearest(mxjax.get_policy("tetrajet")), implementation)
    assert_agrees(found, "tetrajet", ("y", "dx", "dw"))


def test_backward_gemms_of_amazon_without_stochastic_rounding_are_those_of_the_repository():
    """With its signs; none of these tensors has a tie, which it rounds away from zero."""
    policy = mxjax.get_policy("amazon_no_sr")
    signs = np.asarray(GOLDEN["amazon_no_sr/signs"], int)
    assert set(signs.flat) == {-1, 1}
    dgrad, wgrad = map(with_signs, (policy.dgrad, policy.wgrad), signs)
    assert_agrees(run(Policy(policy.fprop, dgrad, wgrad), "xla"), "amazon_no_sr", ("dx", "dw"))
    name = "amazon_no_hadamard_no_sr"
    assert_agrees(run(mxjax.get_policy(name), "xla"), name, ("dx", "dw"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tetrajet", "amazon"])
def test_stochastic_rounding_draws_the_values_of_the_repository_with_its_probabilities(name):
    operand = mxjax.get_policy(name).dgrad.lhs
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.vmap(lambda key: mxjax.dequantize(mxjax.quantize(GOLDEN["x"], operand, key=key)))(keys)
    low, high, mean = (np.asarray(GOLDEN[f"drawn/{name}/{kind}"]) for kind in ("low", "high", "mean"))
    drawn = np.asarray(drawn)
    both = (low < high) & (drawn.min(0) < drawn.max(0))  # a rare neighbour may be drawn by one of the two
    assert both.mean() > 0.85
    np.testing.assert_allclose(drawn.min(0)[both], low[both], rtol=2e-7)
    np.testing.assert_allclose(drawn.max(0)[both], high[both], rtol=2e-7)
    p, theirs = ((m - low)[both] / (high - low)[both] for m in (drawn.mean(0), mean))
    assert abs(np.mean(p - theirs)) < 4 * (0.5 / DRAWS / both.sum()) ** 0.5
    assert np.std(p - theirs) < (0.5 / DRAWS) ** 0.5


@parametrize("name", slow=["tetrajet", "amazon"], exhaustive=["amazon_no_hadamard"])
def test_means_and_noise_of_the_gradients_are_those_of_the_repository(name):
    """Means agree with the repository's, and with GEMMs of the values that it rounds."""
    policy = mxjax.get_policy(name)
    fp32 = Operand("fp32")
    seen = dataclasses.replace(fp32, source=policy.wgrad.lhs.source)
    expected = run(Policy(policy.fprop, Gemm(fp32, seen), Gemm(seen, fp32)), "reference")
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(jax.vmap(lambda key: {k: v for k, v in run(policy, "xla", key).items() if k != "y"}))(
        keys
    )
    for kind, ours in drawn.items():
        deviation = np.asarray(GOLDEN[f"{name}/std/{kind}"], np.float32)
        for mean in (GOLDEN[f"{name}/mean/{kind}"], np.mean(ours, axis=0)):
            z = np.asarray(mean - expected[kind]) / deviation * DRAWS**0.5
            assert abs(np.mean(z)) < 0.2  # elements of a row share draws
            assert 0.8 < np.std(z) < 1.25
        assert 0.97 < np.mean(np.std(ours, axis=0, ddof=1)) / np.mean(deviation) < 1.03
