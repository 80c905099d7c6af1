"""Matrices and permutations along the contracted axis: scipy's matrices, and products that stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
import scipy.linalg

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.numerics.rotations import rotation_matrix
from mxjax.products.draws import uses_of

ROTATIONS = (
    Rotation(1, order="fixed"),
    Rotation(64, "redrawn"),
    Rotation(16, "redrawn", order="redrawn"),
    Rotation(64, kind="sequency"),
    Rotation(16, "fixed", kind="dct", order="fixed"),
    Rotation(32, "redrawn", kind="haar"),
)


@pytest.mark.parametrize("n", [2, 16, 128])
def test_matrices_are_scipys_by_their_definitions(n):
    np.testing.assert_allclose(
        rotation_matrix("dct", n), scipy.fft.dct(np.eye(n), axis=0, norm="ortho"), atol=1e-6
    )
    natural = scipy.linalg.hadamard(n) / np.sqrt(n)
    np.testing.assert_allclose(rotation_matrix("hadamard", n), natural, rtol=1e-6)
    sequency = rotation_matrix("sequency", n)
    np.testing.assert_array_equal(np.count_nonzero(np.diff(np.sign(sequency)), axis=1), np.arange(n))
    assert {row.tobytes() for row in sequency} == {row.tobytes() for row in natural.astype(np.float32)}


def test_haar_is_that_of_four():
    r = np.sqrt(0.5)
    expected = [[0.5] * 4, [0.5, 0.5, -0.5, -0.5], [r, -r, 0, 0], [0, 0, r, -r]]
    np.testing.assert_allclose(rotation_matrix("haar", 4), expected, atol=1e-7)


@pytest.mark.parametrize("kind", ["dct", "haar", "sequency"])
def test_matrices_are_orthogonal_and_begin_with_the_mean(kind):
    matrix = np.asarray(rotation_matrix(kind, 64), np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=1e-6)
    np.testing.assert_allclose(matrix[0], 1 / 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("rotation", "source"),
    [*((rotation, "original") for rotation in ROTATIONS), *((r, "dequantized") for r in ROTATIONS[2::2])],
    ids=str,
)
def test_in_full_precision_a_product_and_its_gradients_stay(rotation, source):
    """Lengths that no size divides; with source "dequantized" gradients pass through the rotation back."""
    x, w = jax.random.normal(jax.random.key(0), (70, 45)), jax.random.normal(jax.random.key(1), (45, 40))
    exact, read = Operand("fp32"), Operand("fp32", source=source)
    fprop, backward = Gemm(exact, exact, rotation), Gemm(exact, read, rotation)
    policy = Policy(fprop, backward, Gemm(read, exact, rotation))
    dot = functools.partial(mxjax.dot, policy=policy, key=jax.random.key(2))
    y, vjp = jax.vjp(dot, x, w)
    expected, expected_vjp = jax.vjp(functools.partial(jnp.matmul, precision="highest"), x, w)
    for found, wanted in zip((y, *vjp(y)), (expected, *expected_vjp(y)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_permutation_is_the_same_for_both_operands_and_new_with_the_key():
    def order(key, signs, kind):
        lhs, rhs = uses_of(Gemm(rotation=Rotation(16, signs, order=kind)), -2, -2, key)
        assert lhs.order is rhs.order
        return jax.random.key_data(lhs.order).tolist()

    first, second = jax.random.key(0), jax.random.key(1)
    assert order(first, "none", "fixed") == order(second, "none", "fixed")
    assert order(first, "redrawn", "redrawn") == order(first, "none", "redrawn")
    assert order(first, "none", "redrawn") != order(second, "none", "redrawn")
