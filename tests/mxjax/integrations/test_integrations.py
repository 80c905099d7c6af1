"""`mxjax.integrations`: models of qwix's and haliax's users run by policies, with the bits of `mxjax.dot`."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support.dots import assert_same, draw
from support.oracles import types_unchecked

import mxjax

X = draw(2, 8, 32, seed=1)

# Both use names that Flax, JAX and Python have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")


@pytest.mark.parametrize(("name", "needs"), [("qwix", "qwix"), ("haliax", "haliax")])
def test_an_import_without_the_library_says_what_to_install(name, needs, monkeypatch):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"mxjax.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"pip install -e '.\[integrations\]'"):
        importlib.import_module(f"mxjax.integrations.{name}")


@pytest.fixture
def quantized():
    """Returns a function that quantizes a model by rules, and its provider."""
    qwix = pytest.importorskip("qwix")
    from mxjax.integrations.qwix import PolicyRule, Provider

    def quantized(model, *rules, **options):
        provider = Provider([PolicyRule(module_path=path, policy=policy) for path, policy in rules])
        return qwix.quantize_model(model, provider, **options), provider

    return quantized


class Network(linen.Module):
    """Its second layer multiplies as `dot_general` says; its last product has no parameter."""

    dot_general: object = None

    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(48, name="up")(x))
        x = linen.Dense(32, name="down", dot_general=self.dot_general)(x)
        return jnp.einsum("btd,bsd->bts", x, x)


def gradients(model, parameters, **options):
    return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, X, **options)))))(parameters)


def test_a_linen_model_has_the_gradients_of_one_with_a_dot_general(quantized):
    parameters = Network().init(jax.random.key(0), X)
    model, provider = quantized(Network(), ("down", "wgrad_hadamard"), ("up", None))
    expected = gradients(Network(mxjax.make_dot_general("wgrad_hadamard")), parameters)
    assert_same(jax.tree.leaves(gradients(model, parameters)), jax.tree.leaves(expected))
    assert provider.products == {
        "up: dot_general0": "as it is: its rule has no policy",
        "down: dot_general0": str(mxjax.get_policy("wgrad_hadamard")),
        ": einsum0": "as it is: no rule",
    }
    assert not provider.get_unused_rules()


def test_activations_of_the_weights_shape_are_no_weight(quantized):
    """qwix takes both operands for the parameter."""
    layer, x = linen.Dense(32, use_bias=False), draw(32, 32, seed=4)
    parameters = layer.init(jax.random.key(0), x)
    model, _ = quantized(layer, (".*", "fprop"))
    expected = mxjax.dot(x, parameters["params"]["kernel"], policy="fprop")
    assert_same([jax.jit(model.apply)(parameters, x)], [expected])


class Projections(nnx.Module):
    """Products by einsum with the weight on either side, and a ragged one."""

    def __init__(self):
        self.w = nnx.Param(draw(32, 2, 16, seed=2))
        self.experts = nnx.Param(draw(2, 32, 16, seed=3))

    def __call__(self, x):
        sizes = jnp.array([5, 11])
        return (
            jnp.einsum("btd,dhk->bhtk", x, self.w[...]),
            jnp.einsum("dhk,btd->bthk", self.w[...], x, precision="highest"),
            jax.lax.ragged_dot(x.reshape(-1, 32), self.experts[...], sizes),
            jnp.einsum("btd,bsd->bts", x, x),
        )


def test_an_nnx_model_has_the_products_of_einsum_and_ragged_dot(quantized):
    model = Projections()
    quantized_model, provider = quantized(model, (".*", "fprop"), x=X)
    w, policy = model.w[...], mxjax.get_policy("fprop")
    expected = (
        mxjax.einsum("btd,dhk->bhtk", X, w, policy=policy),
        mxjax.einsum("btd,dhk->bthk", X, w, policy=policy),
        mxjax.ragged_dot(X.reshape(-1, 32), model.experts[...], jnp.array([5, 11]), policy=policy),
        jnp.einsum("btd,bsd->bts", X, X),
    )
    assert_same(quantized_model(X), expected)
    assert provider.products[": einsum2"] == "as it is: no operand is a parameter"


@pytest.mark.slow
def test_random_bits_come_from_the_streams_of_flax(quantized):
    parameters = Network().init(jax.random.key(0), X)
    model, _ = quantized(Network(), (".*", "full_rht"))
    first, again, other = (gradients(model, parameters, rngs={"mxjax": jax.random.key(i)}) for i in (1, 1, 2))
    assert_same(jax.tree.leaves(first), jax.tree.leaves(again))
    assert not np.array_equal(*(g["params"]["down"]["kernel"] for g in (first, other)))
    with pytest.raises(ValueError, match="finds no stream 'mxjax'"):
        model.apply(parameters, X)
    layer, _ = quantized(nnx.Linear(32, 16, rngs=nnx.Rngs(0)), (".*", "full_rht"), inputs=X, rngs=nnx.Rngs(0))
    layer.set_attributes(qwix_rngs=nnx.Rngs(mxjax=0))
    assert not np.array_equal(layer(X), layer(X))


def test_rules_of_qwix_without_a_policy_are_refused(quantized):
    import qwix

    from mxjax.integrations.qwix import PolicyRule, Provider

    with types_unchecked(), pytest.raises(TypeError, match="needs PolicyRule, got QuantizationRule"):
        Provider([qwix.QuantizationRule(weight_qtype="int8")])
    with pytest.raises(ValueError, match="takes a policy, not dtypes"):
        Provider([PolicyRule(weight_qtype="int8", policy="fp8")])
    with pytest.raises(ValueError, match="unknown policy 'mxfp4'"):
        quantized(Network(), (".*", "mxfp4"))


@pytest.fixture(scope="module")
def haliax_model():
    """Returns haliax's modules, and a model of three stacked layers and one that is stored transposed."""
    eqx, hax = pytest.importorskip("equinox"), pytest.importorskip("haliax")
    pytest.importorskip("mxjax.integrations.haliax")
    width, layers = hax.Axis("width", 32), hax.Axis("layers", 3)
    hidden, heads = hax.Axis("hidden", 48), (hax.Axis("heads", 2), hax.Axis("head", 16))

    class Block(eqx.Module):
        up: hax.nn.Linear
        down: hax.nn.Linear

        @staticmethod
        def init(*, key):
            keys = jax.random.split(key)
            up = hax.nn.Linear.init(width, hidden, key=keys[0], out_first=True)
            return Block(up, hax.nn.Linear.init(hidden, width, key=keys[1], out_first=False))

        def __call__(self, x):
            return x + self.down(hax.nn.relu(self.up(x)))

    class Model(eqx.Module):
        blocks: hax.nn.Stacked
        head: hax.nn.Linear

        def __call__(self, x):
            return self.head(self.blocks.fold(x))

    keys = jax.random.split(jax.random.key(0), layers.size)
    head = hax.nn.Linear.init(width, heads, key=jax.random.key(1), use_bias=False)
    model = Model(hax.nn.Stacked.init(layers, Block)(key=keys), head)
    return model, hax.named(X, ("batch", "token", width))


@pytest.mark.slow
def test_a_haliax_model_has_the_products_of_dot(haliax_model):
    from mxjax.integrations.haliax import quantize_linear_layers

    model, x = haliax_model
    quantized = quantize_linear_layers(model, [(r"blocks\..*down", "fp8"), (r".*", "fprop")])
    y, block = X, model.blocks.stacked
    for i in range(3):
        up_bias, down_bias = (layer.bias.array[i][None, None] for layer in (block.up, block.down))
        hidden = mxjax.dot(y, block.up.weight.array[i].T, policy="fprop") + up_bias
        y += mxjax.dot(jax.nn.relu(hidden), block.down.weight.array[i], policy="fp8") + down_bias
    expected = mxjax.einsum("btd,hkd->bthk", y, model.head.weight.array, policy="fprop")
    np.testing.assert_allclose(quantized(x).array, expected, atol=1e-5)


@pytest.mark.slow
def test_each_step_of_a_haliax_model_draws_new_bits(haliax_model):
    eqx, hax = pytest.importorskip("equinox"), pytest.importorskip("haliax")
    from haliax.quantization import accumulate_gradients, apply_updates, partition_for_grad_overwrite

    from mxjax.integrations.haliax import quantize_linear_layers

    model, x = haliax_model
    quantized = quantize_linear_layers(model, [(r".*", "wgrad_rht")])

    @eqx.filter_jit
    def step(model):
        gradient = eqx.filter_grad(lambda model: hax.sum(model(x) ** 2).scalar())(model)
        overwrites, gradient = partition_for_grad_overwrite(accumulate_gradients(gradient, gradient))
        return apply_updates(model, jax.tree.map(jnp.zeros_like, gradient), overwrites), gradient

    after, first = step(quantized)
    _, second = step(after)
    assert after.blocks.stacked.down.dot_general.state.tolist() == [[3, 1], [4, 1], [5, 1]]
    assert after.head.dot_general.state.tolist() == [6, 1]
    weights = [g.blocks.stacked.down.weight.array for g in (first, second)]
    assert not np.array_equal(*weights)
    np.testing.assert_allclose(*weights, atol=0.2 * float(jnp.max(jnp.abs(weights[0]))))


def test_a_haliax_model_takes_a_seed_and_an_implementation(haliax_model):
    from mxjax.integrations.haliax import quantize_linear_layers

    model, x = haliax_model
    first, again, other = (
        quantize_linear_layers(model, [(r"head", "full_sr")], seed=seed, implementation="reference")
        for seed in (1, 1, 2)
    )
    assert first.head.dot_general.implementation == "reference"
    assert_same([first(x).array], [again(x).array])
    assert not np.array_equal(first(x).array, other(x).array)


def test_a_rule_for_no_layer_of_haliax_is_refused(haliax_model):
    from mxjax.integrations.haliax import quantize_linear_layers

    with pytest.raises(ValueError, match=r"'x' decides for no layer; the layers are blocks\.stacked\.up"):
        quantize_linear_layers(haliax_model[0], [("x", "fp8")])
