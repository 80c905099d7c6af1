"""`dot` under vmap: bit for bit the call with a batch, also nested, in loops, under grad and remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.dots import ASSORTED, NEAREST, assert_same, draw, jitted_products, with_gradients
from support.marks import parametrize

import mxjax
from mxjax.operands.product import contract

KEY = jax.random.key(0)
X, W, DY = draw(6, 8, 40, seed=1), draw(40, 24, seed=2), draw(6, 8, 24, seed=3)
POLICIES = [mxjax.get_policy("wgrad_hadamard"), ASSORTED]  # ASSORTED draws random bits and has tensor scales
IDS = ["wgrad_hadamard", "assorted"]


def dot(x, w, key=KEY, policy=NEAREST):
    return mxjax.dot(x, w, policy=policy, key=key)


y_and_gradients = jax.jit(lambda f, x, w, dy: with_gradients(f, x, w, dy=dy), static_argnums=0)


def rows(x, w, policy=NEAREST):
    """Returns x @ w by a vmap over the first axis, in which each call has one of x's rows."""
    return jax.vmap(lambda row: dot(row, w, policy=policy))(x)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_mapped_rows_are_tokens_of_one_product(policy):
    nested = jax.vmap(functools.partial(rows, policy=policy), (0, None))
    expected = jitted_products(X, W, DY, KEY, policy=policy)
    assert_same(y_and_gradients(nested, X, W, DY), expected)


def test_the_mapped_axis_may_be_any_axis_of_x():
    columns = jax.vmap(lambda x, w: dot(x, w), (1, None), 1)
    swapped = jitted_products(X.swapaxes(0, 1), W, DY.swapaxes(0, 1), policy=NEAREST)
    y, dx, dw = y_and_gradients(columns, X, W, DY)
    assert_same((y.swapaxes(0, 1), dx.swapaxes(0, 1), dw), swapped)


@parametrize(("x_axis", "policy"), (None, POLICIES[0]), slow=[(0, POLICIES[1]), (None, POLICIES[1])])
def test_where_w_is_mapped_the_axis_is_a_batch_axis(x_axis, policy):
    ws = draw(6, 40, 24, seed=4)
    x = X if x_axis == 0 else X[0]
    mapped = jax.vmap(functools.partial(dot, policy=policy), (x_axis, 0))

    def batched(x, w):
        x = jnp.broadcast_to(x, X.shape)
        return mxjax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))), policy=policy, key=KEY)

    assert_same(y_and_gradients(mapped, x, ws, DY), y_and_gradients(batched, x, ws, DY))


def test_rows_of_a_batch_of_products_join_the_tokens_of_each():
    ws = draw(6, 40, 24, seed=4)
    mapped = jax.vmap(lambda x, w: jax.vmap(dot, (0, None))(x, w))
    outside = jax.vmap(jax.vmap(dot, (0, 0)), (1, None), 1)  # the rows are the outer axis
    expected = y_and_gradients(jax.vmap(dot), X, ws, DY)
    assert_same(y_and_gradients(mapped, X, ws, DY), expected)
    assert_same(y_and_gradients(outside, X, ws, DY), expected)


@pytest.mark.slow
def test_mapped_keys_draw_bits_of_their_own():
    keys, policy = jax.random.split(KEY, 6), mxjax.get_policy("wgrad_sr")
    mapped = jax.vmap(functools.partial(dot, policy=policy), (0, None, 0))
    run = y_and_gradients(lambda x, w: mapped(x, w, keys), X, W, DY)
    each = [jitted_products(x, W, dy, key, policy=policy) for x, dy, key in zip(X, DY, keys, strict=True)]
    y, dx, dw = (jnp.stack(t) for t in zip(*each, strict=True))
    assert_same(run[:2], (y, dx))
    np.testing.assert_allclose(run[2], dw.sum(0), rtol=1e-5, atol=1e-5)


def test_vmap_of_a_gradient_has_a_wgrad_for_each_example():
    policy = mxjax.get_policy("wgrad_hadamard")
    gradient = jax.grad(lambda w, x, dy: jnp.vdot(dot(x, w, policy=policy), dy))
    each = [jitted_products(x, W, dy, policy=policy)[2] for x, dy in zip(X, DY, strict=True)]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(gradient, (None, 0, 0)))(W, X, DY), jnp.stack(each), rtol=1e-5, atol=1e-5
    )


@parametrize(
    ("batch", "axes"),
    *(((), axes) for axes in [(None, 0), (1, 2), (0, 0)]),
    ((2,), (0, None)),
    ((2,), (1, 2)),
    exhaustive=[((), (0, None)), ((2,), (None, 0)), ((2,), (0, 0))],
    ids=str,
)
def test_mapped_contractions_in_bfloat16_run_on_the_cpu(axes, batch):
    """XLA for CPUs cannot run a product of bfloat16 into which it has folded a transpose."""
    contracted = [(lhs, rhs) for lhs in (-1, -2) for rhs in (-1, -2)]

    def operand(axis, free, mapped, seed):
        shape = [*batch, *((free, 16) if axis == -1 else (16, free))]
        if mapped is not None:
            shape.insert(mapped, 3)
        return jnp.round(4 * draw(*shape, seed=seed)).astype(jnp.bfloat16)  # sums are exact

    operands = [(operand(a, 8, axes[0], 1), operand(b, 24, axes[1], 2)) for a, b in contracted]

    def mapped(one):
        pairs = zip(operands, contracted, strict=True)
        return [jax.vmap(functools.partial(one, a, b), axes)(x, w) for (x, w), (a, b) in pairs]

    def plain(a, b, x, w):
        x, w = (t.astype(jnp.float32).swapaxes(-1, axis) for t, axis in ((x, a), (w, b)))
        return x @ w.swapaxes(-1, -2)

    assert_same(jax.jit(lambda: mapped(lambda a, b, x, w: contract(x, a, w, b, None)))(), mapped(plain))


@parametrize("policy", "lumen", slow=["nvfp4"])
def test_gradients_mapped_over_keys_in_bfloat16_are_those_of_each_key(policy):
    keys, (x, w, dy) = jax.random.split(KEY, 2), (t.astype(jnp.bfloat16) for t in (X[0], W, DY[0]))
    mapped = jax.jit(jax.vmap(lambda key: jitted_products(x, w, dy, key, policy=policy)))(keys)
    for i, key in enumerate(keys):
        for m, one in zip(mapped, jitted_products(x, w, dy, key, policy=policy), strict=True):
            np.testing.assert_allclose(m[i].astype(float), one.astype(float), rtol=2**-7, atol=1e-6)


def test_rows_in_a_scan_under_remat_are_tokens():
    ws = draw(2, 40, 40, seed=5) / 8

    def loss(ws, layer):
        def body(x, w):
            return jax.checkpoint(lambda x, w: jnp.tanh(layer(x, w)))(x, w), None

        return jnp.sum(jax.lax.scan(body, X[0], ws)[0] ** 2)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_same(jax.tree.leaves(run(ws, rows)), jax.tree.leaves(run(ws, dot)))


def test_rows_of_a_shard_are_its_tokens():
    mesh, spec = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")

    def sharded(layer):
        return jax.shard_map(layer, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)

    arrays = X[0], W, DY[0]
    assert_same(y_and_gradients(sharded(rows), *arrays), y_and_gradients(sharded(dot), *arrays))


def test_mapped_rows_cost_what_the_batch_costs():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 64), (64, 64), (256, 64))]
    policy = mxjax.get_policy("wgrad_hadamard")

    def cost(layer):
        compiled = y_and_gradients.lower(functools.partial(layer, policy=policy), *shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]

    assert cost(rows) == cost(dot)
