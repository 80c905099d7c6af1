"""RMSNorm and SwiGLU within the kernels that cast to FP8 by delayed scales, beside float64 and XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.kernels.quantize.fp8_computed import quantize_fp8_computed
from mxjax.numerics.operand import Operand
from mxjax.operands.computed import Gated, GatedGradient, Norm, Normed, normed
from mxjax.operands.kernel_operand import fp8_by_definition
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse

SCALES = jnp.array([16.0, 5.0], jnp.float32)


def uses(scales):
    operands = [Operand(name, scaling="delayed") for name in ("fp8_e4m3", "fp8_e5m2")]
    return [OperandUse(-1 - i, operand, scale=scales[i]) for i, operand in enumerate(operands)]


def draw(kind, r, c, seed=0):
    rng = np.random.default_rng(seed)

    def product(n, factor):
        raw = jnp.asarray(rng.standard_normal((r, n)) * 2.0 ** rng.integers(-3, 3, (r, 1)), jnp.bfloat16)
        return Product(raw, tuple(jnp.array([f], jnp.float32) for f in (factor, 1.7)))

    if kind == "normed":
        x = jnp.asarray(rng.standard_normal((r, c)) * 2.0 ** rng.integers(-3, 3, (r, 1)), jnp.bfloat16)
        return normed(x, Norm(jnp.asarray(rng.standard_normal(c), jnp.float32), 1e-5))
    return (
        Gated(product(2 * c, 0.9)) if kind == "gated" else GatedGradient(product(2 * c, 0.9), product(c, 0.3))
    )


def in_bfloat16(x):
    """Returns values in float64, rounded to bfloat16."""
    return np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


def rounded(product):
    """Returns a product's value in bfloat16. XLA for GPUs leaves out this rounding where it fuses readers."""
    rows, columns = (np.asarray(factor) for factor in product.factors)
    return (np.asarray(product.raw, np.float32) * (rows * columns)).astype(ml_dtypes.bfloat16)


def defined(x):
    """Returns the values in float64 before their last rounding, and how far float32 may be from them."""
    if isinstance(x, Normed):
        y = (np.asarray(x.x, np.float32) * np.asarray(x.factors)[:, None]).astype(ml_dtypes.bfloat16)
        return y.astype(np.float64) * in_bfloat16(x.scale), 0.0
    gate, up = np.split(rounded(x.product).astype(np.float64), 2, axis=-1)
    logistic = 1 / (1 + np.exp(-gate))
    error = 2.0**-20 * (1 + abs(gate))  # an exponential's grows with its argument
    if isinstance(x, Gated):
        y = gate * logistic * up
        return y, error * abs(y)
    of_up = rounded(x.gradient).astype(np.float64) * gate * logistic
    of_gate = rounded(x.gradient).astype(np.float64) * up * logistic
    errors = [error * abs(of_gate) * (1 + abs(gate)), error * abs(of_up)]  # the gate's terms may cancel
    values = [of_gate * (1 + gate * (1 - logistic)), of_up]
    return np.concatenate(values, axis=-1), np.concatenate(errors, axis=-1)


# Edges of tiles on both axes, and whole tiles.
@pytest.mark.parametrize("shape", [(48, 80), (256, 128)])
@pytest.mark.parametrize("kind", ["normed", "gated", "gradient"])
def test_it_casts_the_values_of_the_definition(on_hopper, kind, shape):
    """Each element is the cast of a value within float32's errors of that of float64; nearly all are one."""
    x = draw(kind, *shape)
    got = jax.jit(lambda x: quantize_fp8_computed(x, *uses(SCALES)))(x)
    values, error = defined(x)
    amax = np.max(np.abs(in_bfloat16(values)))
    for q, use in zip(got, uses(SCALES), strict=True):
        low, high = (
            fp8_by_definition(jnp.asarray(in_bfloat16(v), jnp.bfloat16), use)
            for v in (values - error, values + error)
        )
        assert q.tensor_scale == low.tensor_scale
        assert q.elements.dtype == low.elements.dtype
        np.testing.assert_allclose(q.amax, amax, rtol=2**-8)
        low, q, high = (np.asarray(t.elements, np.float32) for t in (low, q, high))
        assert np.all((low <= q) & (q <= high))
        assert np.mean(low == high) > 0.998


def test_each_mapped_call_has_its_own_scale(on_hopper):
    each = [draw("gated", 16, 32, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *each)
    scales = jnp.stack([SCALES, 2 * SCALES])
    got = jax.vmap(lambda x, scales: quantize_fp8_computed(x, *uses(scales)))(stacked, scales)
    for i, x in enumerate(each):
        for a, b in zip(
            jax.tree.leaves(got), jax.tree.leaves(quantize_fp8_computed(x, *uses(scales[i]))), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a[i], np.float32), np.asarray(b, np.float32))


def test_what_is_not_in_bfloat16_is_refused(on_hopper):
    x = draw("gated", 16, 32)
    x = Gated(x.product._replace(raw=x.product.raw.astype(jnp.float32)))
    with pytest.raises(TypeError, match="needs tensors in bfloat16"):
        quantize_fp8_computed(x, *uses(SCALES))
