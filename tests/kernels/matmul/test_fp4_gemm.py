import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

from mxjax.kernels.cases import shapes
from mxjax.kernels.matmul import scaled_blocks
from mxjax.kernels.matmul.fp4_gemm import matmul
from mxjax.kernels.matmul.tiles import choose_tiles, table_of
from mxjax.runtime.devices import Target, current_target, use_target

GFX950 = Target("hip", "gfx950")
HERE = None  # what the kernels run on: a GPU, or the interpreter with the tiles meant for it
each_target = pytest.mark.parametrize("target", [HERE, GFX950], ids=["here", "gfx950"])


def built_for(target):
    """Returns a context in which kernels are those for target, which only the interpreter runs anywhere."""
    if target is HERE:
        return contextlib.nullcontext()
    if current_target().backend != "interpreter":
        pytest.skip(f"{target.arch} is not here")
    return use_target(target)


def multiplied(target, *arrays, dtype=jnp.float32):
    with built_for(target):
        return matmul(*arrays, dtype=dtype)


def draw(rng, batch, rows, k, low=126, high=128):
    """Returns packed random elements, every code among them, and scale bytes from low to high."""
    elements = rng.integers(0, 256, (*batch, rows, k // 2), np.uint8)
    scales = rng.integers(low, high, (*batch, rows, k // 32), np.uint8, endpoint=True)
    return elements, scales


def decode(elements, scales):
    """Returns the values in float64, by ml_dtypes."""
    codes = np.stack([elements & 15, elements >> 4], -1).reshape(*elements.shape[:-1], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return values * np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=-1)


def product(lhs, lhs_scales, rhs, rhs_scales):
    """Returns the product in float64."""
    return decode(lhs, lhs_scales) @ decode(rhs, rhs_scales).swapaxes(-1, -2)


def operands(seed, batch, m, n, k, low=126, high=128):
    rng = np.random.default_rng(seed)
    return (*draw(rng, batch, m, k, low, high), *draw(rng, batch, n, k, low, high))


@pytest.mark.parametrize("shape", shapes.EDGE_GEMMS, ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("target", "dtype"),
    [(HERE, jnp.float32), (HERE, jnp.bfloat16), (GFX950, jnp.float32)],
    ids=["here", "here, bfloat16", "gfx950"],
)
def test_products_of_like_scales_are_exact(shape, target, dtype):
    """Every partial sum is a multiple of 2**-4 below 2**20, so that float32 holds it in any order."""
    arrays = operands(0, (shape.batch,), shape.m, shape.n, shape.k)
    out = multiplied(target, *arrays, dtype=dtype)
    np.testing.assert_array_equal(out, product(*arrays).astype(dtype))


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(1, 20),
    st.sampled_from([HERE, GFX950]),
    st.integers(0, 2**32 - 1),
)
def test_any_shape(batch, m, n, blocks, target, seed):
    arrays = operands(seed, batch, m, n, 32 * blocks)
    np.testing.assert_array_equal(multiplied(target, *arrays), product(*arrays).astype(np.float32))


@each_target
def test_scales_far_apart(target):
    """Within the error of float32 sums where products span 2**120."""
    arrays = operands(1, (2,), 40, 50, 320, low=97, high=157)
    out = multiplied(target, *arrays)
    magnitude = np.abs(decode(*arrays[:2])) @ np.abs(decode(*arrays[2:])).swapaxes(-1, -2)
    assert np.all(np.abs(out - product(*arrays)) <= 320 * 2.0**-24 * magnitude)


@each_target
def test_nan_scales_reach_their_row_and_column_only(target):
    lhs, lhs_scales, rhs, rhs_scales = operands(2, (2,), 70, 40, 288)
    lhs_scales[0, 3, 8] = 255  # in the remainder of k
    rhs_scales[1, 39, 0] = 255
    out = multiplied(target, lhs, lhs_scales, rhs, rhs_scales)
    expected = np.zeros(out.shape, bool)
    expected[0, 3] = True
    expected[1, :, 39] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


@each_target
@pytest.mark.parametrize(("left", "right"), [(0, 254), (254, 0), (0, 127 + 60), (254, 127 - 60), (127, 0)])
def test_smallest_and_largest_scales(left, right, target):
    """Byte 0 is 2**-127, a subnormal of float32; 254 is 2**127, where elements of 2 are beyond float32."""
    lhs, lhs_scales, rhs, rhs_scales = operands(3, (1,), 64, 64, 64)
    lhs, rhs = lhs & 0xBB, rhs & 0xBB  # elements up to 1.5
    lhs_scales[:], rhs_scales[:] = left, right
    with built_for(target):
        out = matmul(lhs, lhs_scales, rhs, rhs_scales, dtype=jnp.float32)
        if not knobs.runtime.interpret and table_of(current_target()) == "other":
            # Multiplied in bfloat16 by matrix units that take subnormals for zero.
            lhs = np.where(np.repeat(lhs_scales == 0, 16, axis=-1), 0, lhs)
            rhs = np.where(np.repeat(rhs_scales == 0, 16, axis=-1), 0, rhs)
    np.testing.assert_array_equal(out, product(lhs, lhs_scales, rhs, rhs_scales).astype(np.float32))


def test_under_jit_and_vmap():
    arrays = operands(4, (3, 2), 20, 30, 64)
    expected = product(*arrays).astype(np.float32)
    multiply = jax.jit(lambda *x: matmul(*x, dtype=jnp.float32))
    np.testing.assert_array_equal(jax.vmap(multiply)(*arrays), expected)
    rhs_fixed = jax.vmap(multiply, in_axes=(0, 0, None, None))
    out = rhs_fixed(arrays[0], arrays[1], arrays[2][1], arrays[3][1])
    np.testing.assert_array_equal(
        out, product(arrays[0], arrays[1], arrays[2][1][None], arrays[3][1][None]).astype(np.float32)
    )


def test_no_elements_give_zeros():
    out = matmul(*(jnp.zeros(s, jnp.uint8) for s in [(2, 3, 0), (2, 3, 0), (2, 4, 0), (2, 4, 0)]))
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4)))


@pytest.mark.parametrize(
    ("lhs", "lhs_scales", "rhs", "rhs_scales", "dtype"),
    [
        ((4, 16), (4, 1), (5, 32), (5, 2), jnp.float32),
        ((4, 24), (4, 1), (5, 24), (5, 1), jnp.float32),
        ((4, 16), (4, 2), (5, 16), (5, 1), jnp.float32),
        ((4, 16), (4, 1), (5, 16), (1, 1), jnp.float32),
        ((4, 16), (4, 1), (5, 16), (5, 1), jnp.float16),
        ((1, 2**20), (1, 2**16), (1, 2**20), (1, 2**16), jnp.float32),
    ],
)
def test_refuses_what_does_not_fit(lhs, lhs_scales, rhs, rhs_scales, dtype):
    arrays = (jnp.zeros(s, jnp.uint8) for s in (lhs, lhs_scales, rhs, rhs_scales))
    with pytest.raises(ValueError, match="matmul needs"):
        matmul(*arrays, dtype=dtype)


@pytest.mark.parametrize("tokens", shapes.TOKENS)
def test_llama_shapes_take_tiles_that_divide_them(tokens):
    for shape in shapes.gemms(tokens):
        tiles = choose_tiles(shape.m, shape.n, shape.k, 1, GFX950)
        assert tiles.exact
        assert shape.m % tiles.m == shape.n % tiles.n == shape.k % tiles.k == 0


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [((), 130, 70, 288), ((2,), 40, 128, 128), ((), 128, 200, 32)]
)
def test_scales_of_runs_multiply(batch, m, n, k):
    """Of operands with a float32 scale for each run, against float64."""
    rng = np.random.default_rng(0)
    runs = -(-k // 128)

    def draw_runs(rows):
        elements = rng.choice([0, 0.5, 1, -1.5, 2, 3, -4, 6], (*batch, rows, k)) * rng.integers(
            8, 16, (*batch, rows, 1)
        )
        scales = np.exp(3 * rng.standard_normal((*batch, runs, rows))).astype(np.float32)
        wide = np.repeat(scales.swapaxes(-1, -2), 128, axis=-1)[..., :k].astype(np.float64)
        return jnp.asarray(elements, jnp.bfloat16), jnp.asarray(scales), elements * wide

    (lhs, lhs_scales, left), (rhs, rhs_scales, right) = draw_runs(m), draw_runs(n)
    expected = left @ right.swapaxes(-1, -2)
    size = np.abs(left) @ np.abs(right).swapaxes(-1, -2)
    for dtype, error in ((jnp.float32, 0), (jnp.bfloat16, 2.0**-8)):
        y = jax.jit(lambda *a, d=dtype: scaled_blocks.matmul(*a, d))(lhs, lhs_scales, rhs, rhs_scales)
        assert y.dtype == dtype
        bound = error * np.abs(expected) + 2.0**-16 * size  # matrix units cut off bits of 128 products
        assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
