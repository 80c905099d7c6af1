"""Random bits that `dot` draws from its key: signs of rotations and stochastic rounding."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dots
from support.dots import ASSORTED, FP32, RANDOM_FPROP, STOCHASTIC, assert_same, draw, gemm, inputs, products
from support.marks import parametrize

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.products.draws import uses_of


def test_implementations_agree_on_the_same_random_bits():
    x, w, dy = inputs()
    key = jax.random.key(3)
    run = functools.partial(products, x, w, dy, key, policy=ASSORTED)
    dots.assert_near(run(implementation="xla"), run(implementation="reference"), 1e-6)


@pytest.mark.parametrize("signs", ["none", "fixed", "redrawn"])
def test_only_redrawn_signs_depend_on_the_key(signs):
    x, w, _ = inputs()
    policy = dataclasses.replace(FP32, fprop=gemm(Operand(), Rotation(16, signs)))
    first, second = (mxjax.dot(x, w, policy=policy, key=jax.random.key(i)) for i in range(2))
    assert np.array_equal(first, second) == (signs != "redrawn")


def test_fixed_signs_depend_on_their_seed():
    x, w, _ = inputs()
    first, second = (
        mxjax.dot(x, w, policy=dots.everywhere(Operand(), Rotation(16, "fixed", seed))) for seed in (0, 1)
    )
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    "configuration",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_prng_impl("rbg"),
    ],
    ids=["x64", "threefry", "rbg"],
)
def test_fixed_signs_are_the_same_under_any_configuration_of_jax(configuration):
    expected = mxjax.random_signs(jax.random.key(5), 32)
    with configuration():
        uses = uses_of(gemm(Operand(), Rotation(32, "fixed", seed=5)), -1, -2, None)
        for use in uses:
            np.testing.assert_array_equal(use.signs, expected)


@pytest.mark.parametrize("operand", range(2), ids=["lhs", "rhs"])
def test_the_same_key_gives_the_same_bits_and_another_key_others(operand):
    x, w, _ = inputs()
    operands = [Operand("bf16"), Operand("bf16")]
    operands[operand] = STOCHASTIC
    policy = dataclasses.replace(FP32, fprop=Gemm(*operands))
    first, again, other = (mxjax.dot(x, w, policy=policy, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_raw_keys_work_too():
    x, w, dy = inputs()
    key = jax.random.key(0)
    raw = jax.random.key_data(key)
    assert_same(products(x, w, dy, raw, policy=RANDOM_FPROP), products(x, w, dy, key, policy=RANDOM_FPROP))


@parametrize(("policy", "impl"), slow=[("full_rht", "threefry2x32"), ("quartet2", "rbg")])
def test_jax_sees_no_key_that_is_used_twice(policy, impl):
    run = jax.jit(functools.partial(products, policy=policy))
    arguments = *inputs(), jax.random.key(0, impl=impl)
    wanted = run(*arguments)
    with jax.debug_key_reuse(True):
        assert_same(run(*arguments), wanted)


def z_scores(policy: Policy, draws: int = 512) -> np.ndarray:
    """Returns how many standard errors the mean over keys of y, dx and dw lies from the exact products.

    x, w and dy are one symmetric matrix, so that its elements meet themselves on the products' diagonals:
    if the operands of a GEMM drew the same random bits, their errors would be correlated there, and biased.
    """
    s = draw(32, 32, seed=6)
    s = (s + s.T) / 2

    @jax.jit
    def moments(s, key):
        keys = jax.random.split(key, draws)
        values = jax.vmap(lambda k: jnp.stack(products(s, s, s, k, policy=policy)))(keys)
        return jnp.mean(values, 0), jnp.std(values, 0, ddof=1)

    mean, std = (dots.float64(m) for m in moments(s, jax.random.key(1)))
    return (mean - dots.float64(s) @ dots.float64(s)) / (std / np.sqrt(draws) + 1e-6)


@pytest.mark.slow
def test_stochastic_rounding_without_clipping_has_unbiased_products():
    rceil = Operand("mxfp4", scale_rule="rceil", rounding="stochastic")
    z = z_scores(Policy(gemm(dots.AMAZON), gemm(dots.AMAZON, Rotation(64, "redrawn")), gemm(rceil)))
    # A normal number exceeds 5 once in 1.7 million; there are 3072 products.
    assert np.max(np.abs(z)) < 5
    np.testing.assert_allclose(np.std(z, axis=(1, 2)), 1, atol=0.12)


# An identity matrix in the other operand shows what was multiplied.
def test_dequantized_operands_are_those_of_the_same_forward_pass():
    bf16 = Operand("bf16")  # holds values of MXFP4 exactly
    policy = Policy(gemm(STOCHASTIC), Gemm(bf16, dots.DEQUANTIZED), Gemm(dots.DEQUANTIZED, bf16))
    t, eye = draw(32, 32, seed=4), jnp.eye(32)
    key = jax.random.key(0)
    w_multiplied, w_seen, _ = products(eye, t, eye, key, policy=policy)
    np.testing.assert_array_equal(w_seen.T, w_multiplied)
    x_multiplied, _, x_seen = products(t, eye, eye, key, policy=policy)
    np.testing.assert_array_equal(x_seen.T, x_multiplied)


@pytest.mark.parametrize(
    ("name", "draws"),
    [("wgrad_hadamard", False), ("primus_turbo", False), ("fp8", False), ("wgrad_sr", True)],
)
def test_random_bits_are_generated_where_they_are_needed(name, draws):
    text = dots.lowered(name, jnp.bfloat16, jax.random.key(0) if draws else None)
    assert bool(re.search("threefry|rng|random|philox|mulhi", text)) == draws
