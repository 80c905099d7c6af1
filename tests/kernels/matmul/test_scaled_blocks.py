"""The product of operands with a scale for each run, against float64 of the dequantized operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.matmul import scaled_blocks


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [((), 130, 70, 288), ((2,), 40, 128, 128), ((), 128, 200, 32)]
)
def test_the_product_is_that_of_the_values(batch, m, n, k):
    rng = np.random.default_rng(0)
    runs = -(-k // 128)

    def draw(rows):
        elements = rng.choice([0, 0.5, 1, -1.5, 2, 3, -4, 6], (*batch, rows, k)) * rng.integers(
            8, 16, (*batch, rows, 1)
        )
        scales = np.exp(3 * rng.standard_normal((*batch, runs, rows))).astype(np.float32)
        wide = np.repeat(scales.swapaxes(-1, -2), 128, axis=-1)[..., :k].astype(np.float64)
        return jnp.asarray(elements, jnp.bfloat16), jnp.asarray(scales), elements * wide

    (lhs, lhs_scales, left), (rhs, rhs_scales, right) = draw(m), draw(n)
    expected = left @ right.swapaxes(-1, -2)
    size = np.abs(left) @ np.abs(right).swapaxes(-1, -2)
    for dtype, error in ((jnp.float32, 0), (jnp.bfloat16, 2.0**-8)):
        y = jax.jit(lambda *a, d=dtype: scaled_blocks.matmul(*a, d))(lhs, lhs_scales, rhs, rhs_scales)
        assert y.dtype == dtype
        bound = error * np.abs(expected) + 2.0**-16 * size  # matrix units cut off bits of 128 products
        assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
