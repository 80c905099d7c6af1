"""RMSNorm within Hopper's quantizer kernel, beside XLA's RMSNorm and the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.quantizer import with_operand

import mxjax
from mxjax.kernels.quantize.quantizer import quantize_computed
from mxjax.operands.computed import Norm, normed, rms_norm, swiglu
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products import fused as gated_product
from mxjax.products import fused as normed_product
from mxjax.products.fused import fused_mlp, normed_dot
from mxjax.runtime.devices import Target, use_target

ROWS = OperandUse(-1)
COLUMNS = [OperandUse(-2), OperandUse(-2, rotation=Rotation(4)), OperandUse(-2, rotation=Rotation(16))]
H16 = mxjax.get_policy("wgrad_hadamard")
EPS = 1e-5


def draw(*shape, seed=0):
    """Returns x, whose rows span binades, and a scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, (*shape[:-1], 1)))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(1 + rng.standard_normal(shape[-1]) / 4, jnp.float32)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("shape", [(37, 136), (128, 128)])
def test_it_quantizes_what_xla_computes(on_hopper, shape, columns):
    """Whole tiles, and edges on both axes: rows end within a group and a block, columns within a tile."""
    x, scale = draw(*shape)

    @jax.jit
    def both(x):
        # Without a barrier XLA leaves out roundings between the norm and the definition.
        value = jax.lax.optimization_barrier(x.value())
        wanted = [pack_by_definition(value, use) for use in (ROWS, columns)]
        return jax.tree.leaves(quantize_computed(x, ROWS, columns)), jax.tree.leaves(wanted)

    pairs = list(zip(*both(normed(x, Norm(scale, EPS))), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    assert sum(int(jnp.sum(a != b)) for a, b in pairs) / sum(a.size for a, _ in pairs) < 1e-3


def test_infinities_and_zeros(on_hopper):
    """A row of zeros stays zero. Infinity times its row's factor, 0, is NaN; the row's others are 0."""
    x, scale = draw(64, 32)
    x = x.at[3].set(0).at[40, 5].set(jnp.inf)
    rows, columns = quantize_computed(normed(x, Norm(scale, EPS)), ROWS, COLUMNS[0])
    assert not np.any(rows.elements[3])
    np.testing.assert_array_equal(rows.packed[1][:, 0] == 255, np.arange(64) == 40)
    assert np.argwhere(columns.packed[1] == 255).tolist() == [[5, 1]]


def product(seen, policy=H16, implementation="fp8_carriers"):
    """Returns the loss of a norm and a product; `seen` gets whether a kernel computes the norm."""
    common = {"policy": policy, "key": None, "implementation": implementation, "layout": None}

    def loss(x, scale, w):
        y = normed_dot(x, Norm(scale, EPS), w, **common)
        seen.append(y is not None)
        if y is None:
            y = mxjax.dot(rms_norm(x, Norm(scale, EPS)), w, preferred_element_type=x.dtype, **common)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def mlp(seen, policy=H16, implementation="fp8_carriers"):
    """The same of a gated MLP."""
    common = {"implementation": implementation}

    def loss(x, scale, gate_up, down):
        norm, more = Norm(scale, EPS), {"policies": [policy] * 2, "keys": [None] * 2, "layouts": [None] * 2}
        y = fused_mlp(x, (gate_up, down), norm=norm, **more, **common)
        seen.append(y is not None)
        if y is None:
            common["preferred_element_type"] = x.dtype
            hidden = swiglu(mxjax.dot(rms_norm(x, norm), gate_up, policy=policy, **common))
            y = mxjax.dot(hidden, down, policy=policy, **common)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def weights(*shapes):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.standard_normal(shape) / 8, jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [(product, [(64, 96)]), pytest.param(mlp, [(64, 64), (32, 64)], marks=pytest.mark.slow)],
    ids=["product", "mlp"],
)
def test_results_and_gradients_are_those_of_a_norm_and_products(on_hopper, monkeypatch, layer, shapes):
    arrays = *draw(2, 40, 64), *weights(*shapes)
    results, seen = [], []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(normed_product, "fuses_norm", lambda *_: False)
            monkeypatch.setattr(gated_product, "_fuses", lambda *_: False)
        run = jax.value_and_grad(layer(seen), tuple(range(len(arrays))), has_aux=True)
        (_, y), gradients = jax.jit(run)(*arrays)
        results.append([y, *gradients])
    assert seen == [True, False]
    for fused, apart in zip(*results, strict=True):
        assert fused.dtype == apart.dtype
        fused, apart = (np.asarray(t, np.float32) for t in (fused, apart))
        assert np.linalg.norm(fused - apart) <= 2e-3 * np.linalg.norm(apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shapes"), [(product, [(32, 32)]), (mlp, [(32, 64), (32, 32)])], ids=["product", "mlp"]
)
def test_mapped_layers(on_hopper, layer, shapes):
    """Under vmap of x its tokens join, and under vmap of the gradient each has its own."""
    x, *others = *draw(3, 32, 32), *weights(*shapes)
    layer = layer([], implementation="triton")
    mapped = jax.vmap(layer, (0, *(None for _ in others)))(x, *others)[1]
    np.testing.assert_array_equal(mapped, layer(x, *others)[1])
    gradient = jax.jit(jax.grad(lambda *arrays: layer(*arrays)[0], tuple(range(len(others) + 1))))
    every = jax.vmap(gradient, (0, *(None for _ in others)))(x, *others)
    for i in range(3):
        for one, mapped in zip(gradient(x[i], *others), every, strict=True):
            np.testing.assert_allclose(
                one.astype(jnp.float32), mapped[i].astype(jnp.float32), rtol=2e-2, atol=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("d_out", [32, 0])
def test_on_one_device_by_hand(on_hopper, d_out):
    """Under shard_map the gradients of the scale and of w, which are replicated, are summed."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    arrays, seen = (*draw(32, 32), *weights((32, d_out))), []

    def loss(*arrays):
        return jax.lax.psum(product(seen)(*arrays)[0], "a")

    by_hand = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P())
    got = jax.jit(jax.grad(by_hand, (0, 1, 2)))(*arrays)
    wanted = jax.grad(lambda *arrays: product([])(*arrays)[0], (0, 1, 2))(*arrays)
    assert seen == [True]
    for a, b in zip(got, wanted, strict=True):
        a, b = (np.asarray(t, np.float32) for t in (a, b))
        assert np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("changes", "fuses"),
    [
        ({}, True),
        ({"policy": mxjax.get_policy("wgrad")}, True),
        ({"policy": mxjax.get_policy("full_hadamard")}, False),  # rotated rows
        ({"policy": mxjax.get_policy("wgrad_sr")}, False),
        ({"policy": mxjax.get_policy("fprop_dgrad")}, False),  # columns in bfloat16
        ({"policy": mxjax.get_policy("bf16")}, False),
        ({"policy": with_operand(H16, "fprop", "lhs", gradient="clipped")}, False),
        ({"policy": with_operand(H16, "wgrad", "lhs", source="dequantized")}, False),
        ({"policy": with_operand(H16, "fprop", "lhs", scale_rule="even")}, False),
        ({"policy": with_operand(H16, "fprop", "rhs", prescale=0.75)}, True),
        ({"implementation": "xla"}, False),
        ({"dtype": jnp.float32}, False),
        ({"width": 36}, False),
        ({"tokens": 0}, False),
        ({"target": Target("cuda", "sm_89")}, False),
        ({"target": Target("hip", "gfx950")}, False),
    ],
)
def test_where_a_kernel_computes_the_norm(changes, fuses):
    options = {"policy": H16, "implementation": "triton", "dtype": jnp.bfloat16, "tokens": 16, "width": 40}
    options |= {"target": Target("cuda", "sm_90")} | changes
    width, seen = options["width"], []
    arguments = [jax.ShapeDtypeStruct((options["tokens"], width), options["dtype"])]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width,), (width, 32))]
    common = {"policy": options["policy"], "implementation": options["implementation"], "layout": None}

    def run(x, scale, w):
        y = normed_dot(x, Norm(scale, EPS), w, key=jax.random.key(0), **common)
        seen.append(y is not None)

    with use_target(options["target"]):
        jax.eval_shape(run, *arguments)
    assert seen == [fuses]


def test_an_mlp_whose_norm_no_kernel_computes(on_hopper):
    """SwiGLU may be computed by kernels where the norm is not: its policy has one operand in another way."""
    seen, policy = [], with_operand(H16, "fprop", "lhs", scale_rule="even")
    arrays = *draw(16, 32), *weights((32, 64), (32, 32))
    loss = jax.jit(lambda *arrays: mlp(seen, policy=policy)(*arrays)[0])
    assert jnp.isfinite(loss(*arrays))


@pytest.mark.parametrize("scale", [(), (1,), (48,)])
def test_a_scale_that_does_not_match_is_refused(scale):
    x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 32))
    for layer, weights in ((product, [w]), (mlp, [jnp.ones((32, 64)), w])):
        with pytest.raises(ValueError, match=r"needs a scale \(32,\)"):
            layer([])(x, jnp.ones(scale), *weights)


def test_weights_that_do_not_match_are_refused():
    scale, w = (32,), (48, 8)
    with pytest.raises(ValueError, match=r"normed_dot needs x \[\.\.\., d_in\]"):
        normed_dot(
            jnp.ones((4, 32), jnp.bfloat16),
            Norm(jnp.ones(scale), EPS),
            jnp.ones(w),
            policy=H16,
            key=None,
            implementation=None,
            layout=None,
        )
