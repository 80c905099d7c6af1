"""The kernel for the gradient through a quantization that clips, against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantizer import draw_tensor

from mxjax.numerics.operand import Operand
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products.gradients import gradient_by_definition, through_quantization

SEEN = Operand(source="dequantized")


@pytest.mark.parametrize(
    ("axis", "shape", "size", "rule", "dtype"),
    [
        (-1, (2, 9, 544), 32, "quest", "bfloat16"),
        (-1, (8, 512), 32, "quest", "float32"),
        (-1, (33, 512), None, "even", "bfloat16"),
        (-2, (2, 96, 70), 32, "quest", "float32"),
        (-2, (64, 64), 16, "quest", "bfloat16"),
        (-2, (64, 70), None, "even", "float32"),
    ],
)
def test_clipped_gradients(axis, shape, size, rule, dtype):
    rng = np.random.default_rng(0)
    x = draw_tensor(rng, shape, "special", "bfloat16")
    raw = draw_tensor(rng, shape, "normal", "float32")
    factors = tuple(
        jnp.exp2(jnp.asarray(rng.integers(-9, 9, (*shape[:-2], n)), jnp.float32)) for n in shape[-2:]
    )
    use = OperandUse(axis, Operand(scale_rule=rule, gradient="clipped"), Rotation(size) if size else None)

    for product in (Product(raw), Product(raw, factors)):
        found = jax.jit(lambda p, x: through_quantization(p, x, use, SEEN, jnp.dtype(dtype)))(product, x)
        with jax.default_device(jax.devices("cpu")[0]):
            product, on_cpu = jax.tree.map(jnp.asarray, jax.device_get((product, x)))
            expected = jax.jit(lambda g, x: gradient_by_definition(g, x, use, SEEN).astype(dtype))
            expected = expected(product.value(jnp.float32), on_cpu)
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
        assert size or 0.001 < np.mean(np.asarray(found) == 0) < 0.6
