"""`dot` under jit, vmap, scan, remat and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dots
from support.dots import ASSORTED, NEAREST, RANDOM_FPROP, assert_same, inputs, products
from support.marks import parametrize
from support.oracles import types_unchecked

import mxjax


@pytest.mark.parametrize("policy", [NEAREST, ASSORTED], ids=["nearest", "assorted"])
def test_jit_and_eager_agree_bit_for_bit(policy):
    x, w, dy = inputs()
    key = jax.random.key(0)
    assert_same(dots.jitted_products(x, w, dy, key, policy=policy), products(x, w, dy, key, policy=policy))


@pytest.mark.parametrize(
    "policy", [mxjax.get_policy("wgrad_rht"), RANDOM_FPROP], ids=["wgrad_rht", "random fprop"]
)
def test_remat_replays_the_random_bits(policy):
    x, w, _ = inputs()

    # The slope of the last tanh needs y, which remat computes again.
    def block(x, w, key):
        return jnp.tanh(mxjax.dot(jnp.tanh(x), w, policy=policy, key=key))

    def gradients(block):
        return jax.grad(lambda x, w, key: jnp.sum(block(x, w, key) ** 2), argnums=(0, 1))

    remat, plain = gradients(jax.checkpoint(block)), gradients(block)
    key = jax.random.key(0)
    tanhs = [jax.jit(f).lower(x, w, key).as_text().count("stablehlo.tanh") for f in (remat, plain)]
    assert tanhs == [4, 2]
    assert_same(jax.jit(remat)(x, w, key), jax.jit(plain)(x, w, key))


@parametrize("policy", slow=[ASSORTED, mxjax.get_policy("quartet2")], ids=["assorted", "quartet2"])
def test_an_exported_program_takes_any_number_of_tokens(policy):
    """Each policy pads, rotates and rounds stochastically along the tokens."""
    key, (x, w, dy) = jax.random.key(0), inputs()

    @jax.jit
    def run(x, w, dy):
        return *products(x, w, dy, key, policy=policy), mxjax.dequantize(mxjax.quantize(x, axis=0))

    (tokens,) = jax.export.symbolic_shape("tokens")
    shapes = [(tokens, x.shape[1]), w.shape, (tokens, dy.shape[1])]
    with types_unchecked():  # a symbolic size is no int
        exported = jax.export.export(run)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert_same(exported.call(x[:33], w, dy[:33]), run(x[:33], w, dy[:33]))


@pytest.mark.parametrize("name", ["fp32", "wgrad"])
def test_a_second_derivative_raises(name):
    x, w, _ = inputs()

    def loss(x):
        return jnp.sum(mxjax.dot(x, w, policy=name) ** 2)

    with pytest.raises(NotImplementedError, match="have no second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)


@pytest.mark.parametrize(("tokens", "d_in", "d_out"), [(0, 33, 5), (4, 0, 5), (4, 33, 0)])
def test_empty_shards_have_gradients(tokens, d_in, d_out):
    """Their results vary over the mesh axis, as shard_map demands of gradients."""
    mesh, rows = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,)), jax.P("d")
    x, w, dy = jnp.ones((tokens, d_in)), jnp.ones((d_in, d_out)), jnp.ones((tokens, d_out))

    shard = functools.partial(products, policy="wgrad")
    run = jax.shard_map(shard, mesh=mesh, in_specs=(rows, jax.P(), rows), out_specs=(rows, rows, jax.P()))
    assert [t.shape for t in jax.eval_shape(run, x, w, dy)] == [dy.shape, x.shape, w.shape]


def test_a_transposed_result_runs_on_the_cpu():
    """XLA for CPUs cannot run a product of bfloat16 into whose result it has folded a transpose."""
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((8, 64), (64, 32))))
    y = jax.jit(lambda x, w: mxjax.dot(x, w, policy="bf16").T)(x, w)
    np.testing.assert_array_equal(y, mxjax.dot(x, w, policy="bf16").T)

    def loss(weights, x):  # layers that take columns
        return jnp.sum(weights[1] @ jax.nn.relu(weights[0] @ x))

    gradients = jax.jit(jax.grad(mxjax.transform(loss, "bf16")))([w.T, w], x.T)
    assert all(jnp.any(g != 0) for g in gradients)
