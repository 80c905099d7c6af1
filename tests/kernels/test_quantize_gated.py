"""SwiGLU within Hopper's quantizer kernel, beside XLA's SwiGLU and the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import gated_product
from mxjax.gated import Gated, GatedGradient, swiglu
from mxjax.gated_product import fused_mlp
from mxjax.gemm_input import GemmInput
from mxjax.kernels.quantize.gated import quantize_gated
from mxjax.kmajor import pack_by_definition
from mxjax.policy import Rotation
from mxjax.product import Product

ROWS = GemmInput(-1)
COLUMNS = [GemmInput(-2), GemmInput(-2, rotation=Rotation(4)), GemmInput(-2, rotation=Rotation(16))]


def draw_product(rng, r, n, scale=1.0):
    raw = jnp.asarray(scale * rng.standard_normal((r, n)), jnp.bfloat16)
    rows, columns = (jnp.asarray(np.exp2(rng.integers(-3, 4, size)), jnp.float32) for size in (r, n))
    return Product(raw, (rows, columns))


def draw_operand(kind, r, c, seed=0):
    rng = np.random.default_rng(seed)
    product = draw_product(rng, r, 2 * c)
    return Gated(product) if kind == "result" else GatedGradient(product, draw_product(rng, r, c, 2.0**-9))


def differing(x, columns):
    """Returns the share of bytes unlike those of the values that XLA computes."""
    wrong = total = 0
    for how, got in zip((ROWS, columns), quantize_gated(x, ROWS, columns), strict=True):
        wanted = pack_by_definition(x.value(), how)
        for a, b in ((got.elements, wanted.elements), (got.scales, wanted.scales)):
            assert a.shape == b.shape
            wrong, total = wrong + int(jnp.sum(a != b)), total + a.size
    return wrong / total


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["result", "gradient"])
def test_it_quantizes_what_xla_computes(on_hopper, kind, columns):
    """Edges on both axes: rows end within a group, a block and a tile, columns within a tile."""
    assert differing(draw_operand(kind, 37, 160), columns) < 1e-3


def mlp(policy, seen):
    """Returns a gated MLP's loss by x and its weights, in one policy; `seen` gets which way it took."""

    def loss(x, gate_up, down):
        common = {"implementation": "triton"}
        y = fused_mlp(
            x, (gate_up, down), policies=[policy] * 2, keys=[None] * 2, layouts=[None] * 2, **common
        )
        seen.append(y is not None)
        if y is None:
            hidden = swiglu(mxjax.dot(x, gate_up, policy=policy, preferred_element_type=x.dtype, **common))
            y = mxjax.dot(hidden, down, policy=policy, preferred_element_type=x.dtype, **common)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def test_a_gated_mlp_has_the_result_and_the_gradients_of_two_products(on_hopper, monkeypatch):
    rng, policy = np.random.default_rng(2), mxjax.get_policy("wgrad_hadamard")
    x = jnp.asarray(rng.standard_normal((2, 40, 64)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((64, 192), (96, 64))]
    results, seen = [], []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(gated_product, "_fuses", lambda *_: False)
        run = jax.jit(jax.value_and_grad(mlp(policy, seen), (0, 1, 2), has_aux=True))
        (_, y), gradients = run(x, *weights)
        results.append([y, *gradients])
    assert seen == [True, False]
    for fused, apart in zip(*results, strict=True):
        fused, apart = (np.asarray(t, np.float32) for t in (fused, apart))
        assert np.linalg.norm(fused - apart) <= 2e-3 * np.linalg.norm(apart)
