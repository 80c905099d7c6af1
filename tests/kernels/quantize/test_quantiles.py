"""The kernel that finds the quantiles of rows, beside the definition and beside numpy's sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.quantize.quantiles import LONGEST_ROW, quantiles, takes
from mxjax.operands import split
from mxjax.runtime.devices import Target

DTYPES = ("bfloat16", "float16", "float32")


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def check(x, quantile):
    """Compares values with numpy's sort, which has no order of zeros, and bits with the definition."""
    found = jax.jit(quantiles, static_argnums=1)(x, quantile)
    ordered, n = np.sort(np.asarray(x, np.float32), axis=-1), x.shape[-1]
    ranks = int((1 - quantile) * n), min(int(quantile * n), n - 1)
    for got, defined, rank in zip(
        found, jax.jit(split.quantiles, static_argnums=1)(x, quantile), ranks, strict=True
    ):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(bits(got), bits(defined))
        np.testing.assert_array_equal(np.asarray(got, np.float32), ordered[..., rank : rank + 1])


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape[-1])), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "quantile"),
    [
        ((2, 5, 2048), 0.99),
        ((9, 200), 0.97),
        ((3, 1000), 0.98),
        ((4, 96), 0.6),
        ((3, 7), 0.99),
        ((2, 1), 0.9),
    ],
)
def test_elements_of_the_sorted_row(shape, quantile, dtype):
    check(draw(shape, dtype), quantile)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_and_ties(dtype):
    """A rank may fall on any NaN, on infinity, on either zero, and among equal elements."""
    x, largest = np.array(draw((12, 400), dtype)), jnp.finfo(dtype).max
    x[0, :9] = np.nan
    x[1, :9], x[1, 9:18] = np.inf, -np.inf
    x[2] = 0.0
    x[3, ::2], x[3, 1::2] = -0.0, 0.0
    x[4] = -x[4, 0]
    x[5, :200] = x[5, 200:]
    x[6] = np.nan
    x[7, ::2] = np.inf
    x[8] = np.clip(x[8].astype(np.float32), -1, 1)
    x[9, :9], x[9, 9:18] = largest, -largest
    x[10] = np.arange(400) * float(jnp.finfo(dtype).smallest_subnormal)
    x.view(f"i{x.itemsize}")[11, :9] = -1  # NaN with a sign and another payload
    check(jnp.asarray(x), 0.98)


@pytest.mark.parametrize("order", ["rising", "falling", "in one group"])
def test_the_largest_elements_may_lie_in_few_groups(order):
    x = np.random.default_rng(0).permutation(1024).astype(np.float32)
    if order == "in one group":
        x.reshape(8, 128)[:, :4] += 5000
    else:
        x = np.sort(x) if order == "rising" else -np.sort(-x)
    check(jnp.asarray(np.stack([x, -x])), 0.97)


def test_the_longest_row_and_mapped_calls():
    check(draw((1, LONGEST_ROW - 8), "bfloat16"), 0.99)
    x = draw((3, 4, 64), "bfloat16")
    mapped = jax.vmap(lambda x: quantiles(x, 0.9))(x)
    for got, wanted in zip(mapped, quantiles(x, 0.9), strict=True):
        np.testing.assert_array_equal(bits(got), bits(wanted))


def test_what_it_takes():
    hopper = Target("cuda", "sm_90")
    assert takes(jnp.zeros((2, 3), jnp.bfloat16), hopper)
    assert not takes(jnp.zeros((2, 3), jnp.bfloat16), None)
    assert not takes(jnp.zeros((2, 3), jnp.bfloat16), Target("hip", "gfx950"))
    assert not takes(jnp.zeros((0, 3)), hopper)
    assert not takes(jnp.zeros((2, LONGEST_ROW + 1), jnp.bfloat16), hopper)
