"""SwiGLU within Hopper's quantizer kernel, beside XLA's SwiGLU and the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.quantizer import with_operand
from triton.runtime.interpreter import interpreter_builder

import mxjax
from mxjax.kernels.cases.quantize import _H16, _PLAIN, computed_build
from mxjax.kernels.quantize.quantizer import quantize_computed
from mxjax.kernels.selftest.kernels import run_build
from mxjax.operands.computed import Gated, GatedGradient, swiglu
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products import fused as gated_product
from mxjax.products.fused import fused_mlp
from mxjax.runtime.devices import Target, use_target
from mxjax.runtime.mesh import Layout

ROWS = OperandUse(-1)
COLUMNS = [OperandUse(-2), OperandUse(-2, rotation=Rotation(4)), OperandUse(-2, rotation=Rotation(16))]


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

    @jax.jit
    def both(x):
        # On GPUs XLA would quantize the float32 values before they are rounded to bfloat16.
        values = jax.lax.optimization_barrier(x.value())
        wanted = [pack_by_definition(values, use) for use in (ROWS, columns)]
        return jax.tree.leaves(quantize_computed(x, ROWS, columns)), jax.tree.leaves(wanted)

    pairs = list(zip(*both(x), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return sum(int(jnp.sum(a != b)) for a, b in pairs) / sum(a.size for a, _ in pairs)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["result", "gradient"])
def test_it_quantizes_what_xla_computes(on_hopper, kind, columns):
    """Edges on both axes: rows end within a group, a block and a tile, columns within a tile."""
    assert differing(draw_operand(kind, 37, 160), columns) < 1e-3


def mlp(policies, seen, implementation="fp8_carriers"):
    """Returns a gated MLP's loss by x and its weights; `seen` gets whether kernels compute SwiGLU."""

    def loss(x, gate_up, down):
        common = {"implementation": implementation}
        y = fused_mlp(x, (gate_up, down), policies=policies, keys=[None] * 2, layouts=[None] * 2, **common)
        seen.append(y is not None)
        if y is None:
            common["preferred_element_type"] = x.dtype
            hidden = swiglu(mxjax.dot(x, gate_up, policy=policies[0], **common))
            y = mxjax.dot(hidden, down, policy=policies[1], **common)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def draw_mlp(rng, tokens, d, width, spread=0):
    """Returns x and both weights; rows and columns span binades, for carriers to leave factors."""
    x = rng.standard_normal((*tokens, d)) * np.exp2(rng.integers(-spread, spread + 1, (*tokens, 1)))
    weights = [rng.standard_normal(shape) / 8 for shape in ((d, 2 * width), (width, d))]
    weights = [w * np.exp2(rng.integers(-spread, spread + 1, (1, w.shape[1]))) for w in weights]
    return jnp.asarray(x, jnp.bfloat16), *(jnp.asarray(w, jnp.float32) for w in weights)


@pytest.mark.parametrize("implementation", ["fp8_carriers", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_gated_mlp_has_the_result_and_the_gradients_of_two_products(on_hopper, monkeypatch, implementation):
    policies = [mxjax.get_policy("wgrad_hadamard"), mxjax.get_policy("wgrad")]
    arrays = draw_mlp(np.random.default_rng(2), (2, 40), 64, 96, spread=2)
    results, seen = [], []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(gated_product, "_fuses", lambda *_: False)
        run = jax.jit(jax.value_and_grad(mlp(policies, seen, implementation), (0, 1, 2), has_aux=True))
        (_, y), gradients = run(*arrays)
        results.append([y, *gradients])
    assert seen == [True, False]
    for fused, apart in zip(*results, strict=True):
        fused, apart = (np.asarray(t, np.float32) for t in (fused, apart))
        assert np.linalg.norm(fused - apart) <= 2e-3 * np.linalg.norm(apart)


@pytest.mark.parametrize("kind", ["result", "gradient"])
def test_whole_tiles(on_hopper, kind):
    assert differing(draw_operand(kind, 256, 128), COLUMNS[2]) < 2e-3


def test_gates_tiles_end_where_those_of_the_up_projection_begin(on_hopper, monkeypatch):
    """In reverse order the programs write the same: none writes what another does."""
    builder, x = interpreter_builder, draw_operand("gradient", 32, 160)
    wanted, place = quantize_computed(x, ROWS, COLUMNS[0]), builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z), raising=True
    )
    got = quantize_computed(x, ROWS, COLUMNS[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["normed", "gated", "gradient"])
def test_builds_name_what_the_kernels_write(on_hopper, kind):
    assert run_build(computed_build(kind, (200, 160), (_PLAIN, _H16))) == {}


@pytest.mark.slow
def test_a_mapped_mlp_is_two_products_whose_tokens_are_all_quantized_together(on_hopper):
    policies = [mxjax.get_policy("wgrad_hadamard")] * 2
    x, *weights = draw_mlp(np.random.default_rng(3), (2, 48), 64, 32)
    one = mlp(policies, [], "triton")
    together, mapped = one, jax.vmap(one, (0, None, None))
    wanted = jax.grad(lambda *weights: jnp.sum(together(x, *weights)[1].astype(jnp.float32)), (0, 1))(
        *weights
    )
    got = jax.grad(lambda *weights: jnp.sum(mapped(x, *weights)[1].astype(jnp.float32)), (0, 1))(*weights)
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


@pytest.mark.slow
def test_a_mapped_gradient_is_that_of_each(on_hopper):
    policies = [mxjax.get_policy("wgrad_hadamard")] * 2
    x, *weights = draw_mlp(np.random.default_rng(4), (3, 32), 32, 32)
    gradient = jax.jit(jax.grad(lambda *arrays: mlp(policies, [], "triton")(*arrays)[0], (0, 1, 2)))
    mapped = jax.vmap(gradient, (0, None, None))(x, *weights)
    for i in range(3):
        for one, every in zip(gradient(x[i], *weights), mapped, strict=True):
            np.testing.assert_array_equal(one, every[i])


H16 = mxjax.get_policy("wgrad_hadamard")


@pytest.mark.parametrize(
    ("changes", "fuses"),
    [
        ({}, True),
        ({"policies": ("wgrad", "wgrad")}, True),
        ({"policies": ("full_hadamard", "full_hadamard")}, False),  # rotated rows
        ({"policies": ("wgrad_sr", "wgrad_sr")}, False),
        ({"policies": ("fprop_dgrad", "fprop_dgrad")}, False),  # columns in bfloat16
        ({"policies": ("bf16", "wgrad_hadamard")}, False),
        ({"policies": ("wgrad_hadamard", "bf16")}, False),
        ({"policies": (H16, with_operand(H16, "fprop", "lhs", gradient="clipped"))}, False),
        ({"policies": (with_operand(H16, "fprop", "lhs", gradient="clipped"), H16)}, True),
        ({"policies": (H16, with_operand(H16, "wgrad", "lhs", source="dequantized"))}, False),
        ({"policies": (with_operand(H16, "dgrad", "lhs", scale_rule="even"), H16)}, False),
        ({"policies": (H16, with_operand(H16, "dgrad", "lhs", scale_rule="even"))}, True),
        ({"policies": (with_operand(H16, "fprop", "rhs", prescale=0.75), H16)}, False),
        ({"policies": (H16, with_operand(H16, "dgrad", "rhs", prescale=0.75))}, False),
        ({"policies": (H16, with_operand(H16, "fprop", "rhs", prescale=0.75))}, True),
        ({"implementation": "xla"}, False),
        ({"dtype": jnp.float32}, False),
        ({"width": 48}, False),  # gate and up share a block of the gradient's rows
        ({"tokens": 0}, False),
        ({"width": 0}, False),
        ({"layout": Layout(P(), P(), whole_sums=False)}, False),
        ({"target": Target("cuda", "sm_89")}, False),
        ({"target": Target("hip", "gfx950")}, False),
    ],
)
def test_where_kernels_compute_swiglu(changes, fuses):
    options = {"policies": (H16, H16), "implementation": "triton", "dtype": jnp.bfloat16, "layout": None}
    options |= {"tokens": 16, "width": 64, "target": Target("cuda", "sm_90")} | changes
    width, key = options["width"], jax.random.key(0)
    arguments = [
        jax.ShapeDtypeStruct((options["tokens"], 32), options["dtype"]),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 2 * width), (width, 32))),
    ]

    def run(x, *weights):
        return fused_mlp(
            x,
            weights,
            policies=[mxjax.get_policy(p) if isinstance(p, str) else p for p in options["policies"]],
            keys=[key] * 2,
            implementation=options["implementation"],
            layouts=[options["layout"]] * 2,
        )

    with use_target(options["target"]), jax.set_mesh(jax.make_mesh((1,), ("a",))):
        assert (jax.eval_shape(run, *arguments) is not None) == fuses


@pytest.mark.slow
def test_on_one_device_by_hand(on_hopper):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    x, *weights = draw_mlp(np.random.default_rng(5), (32,), 32, 32)
    seen = []

    def loss(x, *weights):
        return jax.lax.psum(mlp([H16] * 2, seen, "triton")(x, *weights)[0], "a")

    by_hand = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P())
    got = jax.jit(jax.grad(by_hand, (0, 1, 2)))(x, *weights)
    wanted = jax.grad(lambda *arrays: mlp([H16] * 2, [], "triton")(*arrays)[0], (0, 1, 2))(x, *weights)
    assert seen == [True]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": [None, None]}, ValueError, "needs key="),
        ({"keys": [1, 1]}, TypeError, "must be a JAX key"),
        ({"shape": (64, 66)}, ValueError, r"fused_mlp needs x \[..., d_in\]"),
    ],
)
def test_errors(options, error, message):
    x, gate_up = jnp.ones((16, 64), jnp.bfloat16), jnp.ones(options.get("shape", (64, 64)))
    drawn = with_operand(H16, "fprop", "rhs", rounding="stochastic")
    with pytest.raises(error, match=message):
        fused_mlp(
            x,
            (gate_up, jnp.ones((32, 64))),
            policies=[drawn] * 2,
            keys=options.get("keys", [jax.random.key(0)] * 2),
            implementation=None,
            layouts=[None] * 2,
        )


@pytest.mark.parametrize("kind", ["result", "gradient"])
def test_products_in_float32_are_refused(on_hopper, kind):
    x = jax.tree.map(lambda t: t.astype(jnp.float32), draw_operand(kind, 32, 32))
    with pytest.raises(TypeError, match="tensors in bfloat16"):
        quantize_computed(x, ROWS, COLUMNS[0])
