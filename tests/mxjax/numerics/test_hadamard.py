"""The blockwise Hadamard rotation: scipy's matrix, and a fixed order of float32 operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
import scipy.linalg
from support import oracles
from support.dots import assert_near, with_gradients
from support.tensors import gaussian

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.numerics.hadamard import SIZES, fixed_signs
from mxjax.numerics.rotations import rotation_matrix
from mxjax.products.draws import uses_of


def random_signs(size):
    return mxjax.random_signs(jax.random.key(1), size)


def butterfly(x, size):
    """Returns the rotated last axis, one pair after the other, in the order that `rotate` documents."""
    y = np.array(x, np.float32).reshape(-1, size)
    stride = 1
    while stride < size:
        for i in range(size):
            if not i & stride:
                a, b = y[:, i].copy(), y[:, i + stride].copy()
                y[:, i], y[:, i + stride] = a + b, a - b
        stride *= 2
    return (y * np.float32(size**-0.5)).reshape(np.shape(x))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**32 - 1])
def test_fixed_signs_are_those_that_jax_draws(seed, x64):
    with jax.enable_x64(x64):
        drawn = mxjax.random_signs(jax.random.key(seed, impl="threefry2x32"), 256)
    np.testing.assert_array_equal(fixed_signs(seed, 256), drawn)
    np.testing.assert_array_equal(fixed_signs(seed, 16), drawn[:16])


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_sylvesters(n):
    expected = scipy.linalg.hadamard(n) / np.sqrt(n)
    np.testing.assert_allclose(mxjax.hadamard_matrix(n), expected, rtol=2.0**-23)
    with oracles.types_unchecked():  # a NumPy integer is no int
        np.testing.assert_array_equal(mxjax.hadamard_matrix(np.int64(n)), mxjax.hadamard_matrix(n))


@pytest.mark.parametrize("size", SIZES)
def test_rotate_is_the_documented_butterfly_bit_for_bit(size):
    x = gaussian(3, 2 * size) * np.float32(2) ** np.random.default_rng(1).integers(-9, 9, (3, 2 * size))
    x = x.astype(np.float32)
    np.testing.assert_array_equal(oracles.bits(mxjax.rotate(x, size)), oracles.bits(butterfly(x, size)))


@pytest.mark.parametrize("size", [16, 256])
def test_rotate_is_the_matrix_times_each_run(size):
    x = gaussian(3, 2 * size)
    h = scipy.linalg.hadamard(size) / np.sqrt(size)
    expected = x.reshape(3, 2, size).astype(np.float64) @ h.T
    # log2(size) additions and one product, each off by at most half an ulp of what is near 4 at most.
    np.testing.assert_allclose(mxjax.rotate(x, size), expected.reshape(x.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_rotate_acts_along_its_axis(axis):
    x = gaussian(16, 32, 48)
    moved = mxjax.rotate(np.moveaxis(x, axis, -1), 16, signs=random_signs(16))
    ours = mxjax.rotate(x, 16, axis=axis, signs=random_signs(16))
    np.testing.assert_array_equal(oracles.bits(jnp.moveaxis(ours, axis, -1)), oracles.bits(moved))


def test_signs_multiply_every_run_before_the_rotation():
    x, signs = gaussian(3, 64), random_signs(16)
    expected = butterfly(x * np.tile(signs, 4), 16)
    np.testing.assert_array_equal(oracles.bits(mxjax.rotate(x, 16, signs=signs)), oracles.bits(expected))


def test_random_signs_are_balanced_and_follow_the_key():
    signs = np.asarray(mxjax.random_signs(jax.random.key(0), 10_000))
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.sum()) < 5 * 100  # five standard deviations
    assert np.any(signs[:100] != np.asarray(mxjax.random_signs(jax.random.key(1), 100)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rotate_computes_and_returns_float32(dtype):
    x = gaussian(3, 64).astype(dtype)
    rotated = mxjax.rotate(x, 16)
    assert rotated.dtype == jnp.float32
    np.testing.assert_array_equal(oracles.bits(rotated), oracles.bits(mxjax.rotate(x.astype(np.float32), 16)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_spoils_its_own_run_alone(bad):
    x = gaussian(3, 64)
    clean = np.asarray(mxjax.rotate(x, 16))
    x[1, 20] = bad
    rotated = np.asarray(mxjax.rotate(x, 16))
    spoilt = np.zeros(x.shape, bool)
    spoilt[1, 16:32] = True
    assert not np.isfinite(rotated[spoilt]).any()
    np.testing.assert_array_equal(rotated[~spoilt], clean[~spoilt])


X = np.ones((2, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mxjax.rotate([1.0, 2.0], 2), TypeError, "x to be an array, not list; pass jnp"),
        (lambda: mxjax.rotate(X.astype(np.int32)), TypeError, "floating-point tensor, got int32; cast it"),
        (lambda: mxjax.rotate(np.float32(1), 2), ValueError, "rotate needs an array with an axis"),
        *(
            (lambda size=size: mxjax.rotate(X, size), ValueError, f"size to be one of .*256.*, got {size}")
            for size in (0, 1, 3, 24, 512, 16.0)
        ),
        (lambda: mxjax.hadamard_matrix(3), ValueError, "hadamard_matrix needs n to be one of .*256.*, got 3"),
        (lambda: mxjax.rotate(X[:, :24], 16), ValueError, "axis that 16 divides, got 24; pad it"),
        (lambda: mxjax.rotate(X, 16, signs=np.ones(8, np.float32)), ValueError, r"shape \(16,\).*got \(8,\)"),
        (lambda: mxjax.rotate(X, 16, signs=[1.0] * 16), TypeError, r"pass jnp\.asarray\(signs\)"),
    ],
)
def test_other_arguments_are_refused(call, error, message):
    with oracles.types_unchecked(), pytest.raises(error, match=message):
        call()


# --- other matrices and permutations, along the contracted axis

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
    list(zip(ROTATIONS, 3 * ("original", "dequantized"), strict=True)),
    ids=str,
)
def test_in_full_precision_a_product_and_its_gradients_stay(rotation, source):
    """Lengths that no size divides; with source "dequantized" gradients pass through the rotation back."""
    x, w = jax.random.normal(jax.random.key(0), (70, 45)), jax.random.normal(jax.random.key(1), (45, 40))
    exact, read = Operand("fp32"), Operand("fp32", source=source)
    fprop, backward = Gemm(exact, exact, rotation), Gemm(exact, read, rotation)
    policy = Policy(fprop, backward, Gemm(read, exact, rotation))
    dot = functools.partial(mxjax.dot, policy=policy, key=jax.random.key(2))
    expected = with_gradients(functools.partial(jnp.matmul, precision="highest"), x, w)
    assert_near(with_gradients(dot, x, w), expected, 1e-5)


def test_a_permutation_is_the_same_for_both_operands_and_new_with_the_key():
    def order(key, signs, kind):
        lhs, rhs = uses_of(Gemm(rotation=Rotation(16, signs, order=kind)), -2, -2, key)
        assert lhs.order is rhs.order
        return jax.random.key_data(lhs.order).tolist()

    first, second = jax.random.key(0), jax.random.key(1)
    assert order(first, "none", "fixed") == order(second, "none", "fixed")
    assert order(first, "redrawn", "redrawn") == order(first, "none", "redrawn")
    assert order(first, "none", "redrawn") != order(second, "none", "redrawn")
