"""`transform` on models of each framework, and on a published one, bit for bit as written by hand.

Every framework's model is the same two layers, with the same parameters. The published model, ESM-2, has a
scan over stacked layers, vmap over rows and sequences, nested jit, and a head that is tied to the embedding.
"""

import dataclasses
import functools

import equinox as eqx
import esm2quinox
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from support.dots import assert_same, draw
from support.marks import parametrize

import mxjax

D_IN, D_HIDDEN, D_OUT = 40, 32, 24
X = draw(20, D_IN, seed=1)
W = [draw(D_IN, D_HIDDEN, seed=2) / 4, draw(D_HIDDEN, D_OUT, seed=3) / 4]
B = [jnp.ones(D_HIDDEN) / 2, jnp.ones(D_OUT)]
POLICY = "wgrad_hadamard"


def plain(dot=jnp.dot):
    def apply(params, x):
        for i, (w, b) in enumerate(params):
            x = dot(jax.nn.relu(x) if i else x, w) + b[None]
        return x

    return apply, list(zip(W, B, strict=True)), lambda params: [w for w, _ in params]


def in_linen():
    model = linen.Sequential([linen.Dense(D_HIDDEN), jax.nn.relu, linen.Dense(D_OUT)])
    layers = {f"layers_{2 * i}": {"kernel": W[i], "bias": B[i]} for i in (0, 1)}
    return model.apply, {"params": layers}, lambda v: [layer["kernel"] for layer in v["params"].values()]


def in_nnx():
    first, second = (nnx.Linear(w.shape[0], w.shape[1], rngs=nnx.Rngs(0)) for w in W)
    model = nnx.Sequential(first, jax.nn.relu, second)
    for layer, w, b in zip((first, second), W, B, strict=True):
        layer.kernel[...], layer.bias[...] = w, b
    graph, state = nnx.split(model)
    return (
        lambda state, x: nnx.merge(graph, state)(x),
        state,
        lambda s: [s["layers"][i]["kernel"][...] for i in (0, 2)],
    )


def in_equinox():
    model = eqx.nn.MLP(D_IN, D_OUT, D_HIDDEN, 1, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: [layer.weight for layer in m.layers], model, [w.T for w in W])
    model = eqx.tree_at(lambda m: [layer.bias for layer in m.layers], model, B)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return (
        lambda m, x: jax.vmap(eqx.combine(m, rest))(x),
        arrays,
        lambda m: [layer.weight.T for layer in m.layers],
    )


def in_haiku():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([D_HIDDEN, D_OUT])(x)))
    params = {f"mlp/~/linear_{i}": {"w": W[i], "b": B[i]} for i in (0, 1)}
    return model.apply, params, lambda params: [layer["w"] for layer in params.values()]


def loss_and_weight_gradients(apply, params, weights):
    def loss(params):
        return jnp.mean(apply(params, X) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return value, *weights(gradients)


@functools.cache
def expected():
    return loss_and_weight_gradients(*plain(functools.partial(mxjax.dot, policy=POLICY)))


@parametrize("framework", in_nnx, in_equinox, slow=[plain, in_linen, in_haiku])
def test_a_model_is_what_is_written_by_hand(framework):
    apply, params, weights = framework()
    transformed = mxjax.transform(apply, POLICY)
    with jax.numpy_rank_promotion("allow"):
        assert [len(found.paths) for found in transformed.report(params, X).products] == [1, 1]
        actual = loss_and_weight_gradients(transformed, params, weights)
    assert_same(actual, expected())


class Linear(eqx.Module):
    """`eqx.nn.Linear` by hand."""

    weight: jax.Array
    bias: jax.Array
    policy: mxjax.Policy = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        return mxjax.dot(x, self.weight.T, policy=self.policy) + self.bias


@pytest.mark.slow
def test_a_published_model_is_what_is_written_by_hand():
    """All GEMMs of the MLP's first layer are in MXFP4; of others the Fprop, which compiles faster."""
    mxfp4 = mxjax.get_policy("wgrad")
    fprop = dataclasses.replace(mxjax.get_policy("bf16"), fprop=mxfp4.fprop)
    model = esm2quinox.ESM2(2, 32, 2, token_dropout=True, key=jax.random.key(0))
    tokens = esm2quinox.tokenise(["SPIDERMAN", "SPUD#AN", "F"])

    def replaced(node):
        if not isinstance(node, eqx.nn.Linear) or node is model.logit_head.linear2:
            return node
        return Linear(node.weight, node.bias, mxfp4 if node is model.layers.linear1 else fprop)

    def loss(model, tokens):
        logits = jax.nn.log_softmax(jax.vmap(model)(tokens).logits)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    rules = [("layers.linear1.weight", mxfp4), ("logit_head.linear2.*", None)]
    transformed = mxjax.transform(loss, fprop, rules)
    by_hand = jax.tree.map(replaced, model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert len(transformed.report(model, tokens).products) == 7
        actual = eqx.filter_jit(eqx.filter_value_and_grad(transformed))(model, tokens)
        expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(by_hand, tokens)
    assert_same(*(jax.tree.leaves(result) for result in (actual, expected)))


class WithState(nnx.Module):
    """A layer whose normalization and dropout have state."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def test_updates_of_a_module_are_lost_with_a_warning():
    model, x = WithState(), jnp.ones((32, 64))
    transformed = mxjax.transform(lambda model, x: model(x), "wgrad_hadamard")
    with pytest.warns(UserWarning, match=r"loses what f writes .* here \S+ and \d more") as caught:
        transformed(model, x)
    assert caught[0].filename == __file__
    graph, state = nnx.split(model)

    def returned(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model, (nnx.BatchStat, nnx.RngState))

    mxjax.transform(returned, "wgrad_hadamard")(state, x)  # warnings are errors here
    model.eval()
    transformed(model, x)
