"""`dot_general` against that of lax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import dots
from support.dots import IMPLEMENTATIONS, NEAREST, assert_near, check_products, draw, with_gradients

import mxjax
from mxjax import Operand

# (lhs shape, rhs shape, dimension numbers) as jax.lax.dot_general takes them.
DIMENSION_NUMBERS = {
    "matrices": ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
    "transposed": ((5, 4), (6, 5), (((0,), (1,)), ((), ()))),
    "batch first": ((2, 4, 5), (2, 5, 6), (((2,), (1,)), ((0,), (0,)))),
    "batch in odd places": ((4, 2, 5, 3), (3, 6, 5, 2), (((2,), (2,)), ((1, 3), (3, 0)))),
    "batch in another order": ((4, 2, 5, 3), (3, 6, 5, 2), (((2,), (2,)), ((3, 1), (0, 3)))),
    "several contracting": ((4, 3, 5), (5, 6, 3), (((1, 2), (2, 0)), ((), ()))),
    "several contracting, in another order": ((4, 3, 5), (5, 6, 3), (((2, 1), (0, 2)), ((), ()))),
    "several free": ((4, 5, 2), (3, 5, 6), (((1,), (1,)), ((), ()))),
    "no free axes": ((5,), (5,), (((0,), (0,)), ((), ()))),
    "no free axes, batched": ((5, 2), (2, 5), (((0,), (1,)), ((1,), (0,)))),
    "no free axis on the left": ((5,), (5, 6), (((0,), (0,)), ((), ()))),
    "outer product": ((4,), (6,), (((), ()), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
}


@pytest.mark.parametrize("name", DIMENSION_NUMBERS)
def test_dot_general_is_that_of_lax(name):
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[name]
    lhs, rhs = draw(*lhs_shape, seed=7), draw(*rhs_shape, seed=8)

    run = jax.jit(with_gradients, static_argnums=0)
    actual = run(lambda *both: mxjax.dot_general(*both, dims, policy="fp32"), lhs, rhs)
    expected = run(lambda *both: lax.dot_general(*both, dims, precision="highest"), lhs, rhs)
    assert_near(actual, expected, 1e-6, 1e-6)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]


def test_dot_general_contracts_several_axes_as_one():
    lhs, rhs = draw(4, 3, 20, seed=7), draw(20, 6, 3, seed=8)
    actual = mxjax.dot_general(lhs, rhs, (((1, 2), (2, 0)), ((), ())), policy=NEAREST)
    flat = mxjax.dot(lhs.reshape(4, 60), rhs.transpose(2, 0, 1).reshape(60, 6), policy=NEAREST)
    np.testing.assert_array_equal(actual, flat)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dot_general_quantizes_each_matrix_of_a_batch(implementation):
    # Attention scores: q [batch, query, head, channel] and k [batch, key, head, channel].
    q, k, dy = draw(2, 37, 3, 40, seed=7), draw(2, 34, 3, 40, seed=8), draw(2, 3, 37, 34, seed=9)
    dims = (((3,), (3,)), ((0, 2), (0, 2)))
    policy = mxjax.get_policy("wgrad")

    def scores(q, k):
        return mxjax.dot_general(q, k, dims, policy=policy, implementation=implementation)

    def values(t, axis):
        return dots.float64(dots.operand_values(t, axis, Operand()))

    def product(equation, lhs, rhs):
        return np.einsum(equation, lhs, rhs), np.einsum(equation, np.abs(lhs), np.abs(rhs))

    expected = (
        product("bqhc,bkhc->bhqk", values(q, 3), values(k, 3)),
        product("bhqk,bkhc->bqhc", values(dy, 3), values(k, 1)),
        product("bqhc,bhqk->bkhc", values(q, 1), values(dy, 2)),
    )
    check_products(jax.jit(functools.partial(with_gradients, scores))(q, k, dy=dy), expected)


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "dims"),
    [
        ((4, 5), (4, 5), (((1,), (0,)), ((), ()))),
        ((2, 4, 5), (3, 5, 6), (((2,), (1,)), ((0,), (0,)))),
        ((2, 4, 5), (2, 5, 6), (((2,), (1, 2)), ((0,), (0,)))),
        # Equal products of unequal sizes.
        ((2, 3, 4), (3, 2, 4), (((2,), (2,)), ((0, 1), (0, 1)))),
        ((7, 2, 3), (3, 2, 4), (((1, 2), (0, 1)), ((), ()))),
    ],
    ids=["contracting", "batch", "numbers of axes", "batch axes swapped", "contracting axes swapped"],
)
def test_dot_general_of_shapes_that_do_not_match_raises(lhs_shape, rhs_shape, dims):
    with pytest.raises(ValueError, match="do not match along"):
        mxjax.dot_general(jnp.ones(lhs_shape), jnp.ones(rhs_shape), dims, policy="fp32")


def test_dot_general_passes_precision_to_the_products():
    dims = (((1,), (0,)), ((), ()))

    def run(x, precision):
        return mxjax.dot_general(x, x, dims, precision, policy="fp32")

    def dots(precision):
        text = jax.jit(run, static_argnums=1).lower(jnp.ones((4, 4)), precision).as_text()
        return [line for line in text.splitlines() if "stablehlo.dot_general" in line]

    assert all("precision = [DEFAULT, DEFAULT]" in line for line in dots(lax.Precision.DEFAULT))
    # float32 operands are there to be exact, unless told otherwise.
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots(None))
