"""Measures of the GEMMs inside a model: against tensors taken out by other means; they change no training."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.dots import ASSORTED
from support.llamas import layer_policies
from support.runs import LAYERS, lines, weights

import mxjax
import train as training_program
from models import decoder
from models.attention.causal import rope_of
from models.configs import DecoderConfig
from models.gemms import BLOCK_LAYERS, LINEAR_LAYERS, BlockGemms
from mxjax.stats.layers import MAX_TOKENS, Amax, Measures, by_layer, empty_slots, make_layer_stats, probe
from training.command_line import parse

CONFIG = DecoderConfig(64, 64, 2, 2, 1, 32, 96, rope_theta=10_000.0)
TOKENS = jax.random.randint(jax.random.key(5), (2, 17), 0, 64)
SMALL = ["--batch-size", "2", "--seq-len", "32", "--eval-batches", "1", "--warmup-steps", "1", "--steps", "4"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_a_probe_measures_the_tensors_that_meet_in_the_backward_pass():
    """Two layers by scan; the output gradients to compare are those with respect to terms that are added."""
    x, weights, keys = normal(0, 32, 64), normal(1, 2, 64, 64) / 8, jax.random.split(jax.random.key(2), 2)

    def loss(slots, terms):
        def layer(x, inputs):
            w, key, slot, term = inputs
            y = mxjax.dot(x, w, policy=ASSORTED, key=key) + term
            return jnp.tanh(probe(ASSORTED, None, y, x, w, key, slot)), x

        last, inputs = jax.lax.scan(layer, x, (weights, keys, slots, terms))
        return jnp.sum(last**2), inputs

    empty = empty_slots(["layer"], 2)["layer"]
    (found, dy), xs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(empty, jnp.zeros((2, 32, 64)))
    gemms = jax.jit(functools.partial(mxjax.stats.gemms, policy=ASSORTED))
    for i in range(2):
        expected = gemms(xs[i], weights[i], dy[i], key=keys[i])
        of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], found)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6), of_layer.errors, expected
        )
        largest = [jnp.max(jnp.abs(t)) for t in (xs[i], weights[i], dy[i])]
        np.testing.assert_allclose(of_layer.amax, largest, rtol=1e-6)


def layer_stats(policies, dtype=jnp.float32, tokens=TOKENS, config=CONFIG):
    params = decoder.init(config, jax.random.key(0))

    def loss(params, batch, key, slots):
        return decoder.mean_loss(config, params, batch, policies=policies, key=key, dtype=dtype, slots=slots)

    empty = empty_slots(LINEAR_LAYERS, config.n_layers)
    run = make_layer_stats(loss, empty, seed=0, tokens_a_step=tokens[:, 1:].size)
    return params, by_layer(run(params, tokens, jnp.array(0)))


@pytest.fixture(scope="module")
def in_float32():
    """Returns a model's parameters and measures, with products in float32."""
    return layer_stats(layer_policies(CONFIG, "fp32", [("*", "fp32")]))


@pytest.mark.slow
def test_a_llama_s_measures_are_those_of_its_own_tensors(in_float32):
    params, found = in_float32
    assert sorted(found) == [f"blocks.{i}.{layer}" for i in range(2) for layer in sorted(LINEAR_LAYERS)]
    for i in range(2):
        w = params["blocks"]["mlp"]["gate_up"][i]
        assert found[f"blocks.{i}.mlp.gate_up"]["amax"]["w"] == pytest.approx(float(jnp.abs(w).max()))
    embedded = params["embedding"][TOKENS[:, :-1]]
    normed = embedded / jnp.sqrt(jnp.mean(embedded**2, -1, keepdims=True) + CONFIG.norm_eps)
    assert found["blocks.0.attention.qkv"]["amax"]["x"] == pytest.approx(
        float(jnp.abs(normed).max()), rel=1e-4
    )


def test_the_last_output_gradient_is_that_of_the_mean_loss(in_float32):
    params, found = in_float32
    model = nnx.merge(decoder.graph(CONFIG), params)
    graph, blocks = nnx.split(model.blocks)

    @jax.jit
    def output(x):
        for i in range(2):
            weights = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
            products = BlockGemms(dict.fromkeys(BLOCK_LAYERS, mxjax.get_policy("fp32")), None)
            x = nnx.merge(graph, weights)(x, rope_of(jnp.arange(16)[None], CONFIG), products)
        return x

    @jax.jit
    @jax.grad
    def gradient(x):
        logits = model.norm(x) @ params["head"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]))

    expected = float(jnp.abs(gradient(output(params["embedding"][TOKENS[:, :-1]]))).max())
    assert found["blocks.1.mlp.down"]["amax"]["dy"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_products_in_float32_have_no_error_and_policies_are_each_layer_s_own():
    rules = [("*", "fp32"), ("blocks[1].mlp.*", "wgrad")]
    _, found = layer_stats(layer_policies(CONFIG, "fp32", rules))
    for name, layer in found.items():
        for gemm in ("fprop", "dgrad", "wgrad"):
            quantized = name.startswith("blocks.1.mlp")
            assert math.isinf(layer[gemm]["sqnr_db"]) != quantized
            sides = [v for v in layer[gemm].values() if isinstance(v, dict)]
            assert len(sides) == 2
            assert any(side["flushed"] > 0 for side in sides) == quantized


@pytest.mark.slow
def test_no_more_tokens_than_the_limit_are_measured():
    config = DecoderConfig(8, 32, 1, 1, 1, 32, 32, rope_theta=10_000.0)
    policies = layer_policies(config, "bf16")
    tokens = jnp.zeros((2, MAX_TOKENS + 9), jnp.int32)
    shapes = []

    def loss(params, batch, key, slots):
        shapes.append(batch.shape)
        return decoder.mean_loss(config, params, batch, policies=policies, key=key, slots=slots)

    empty = empty_slots(LINEAR_LAYERS, 1)
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    for parts in (1, 4):  # in which a mesh cuts a batch
        run = make_layer_stats(loss, empty, 0, 1, parts)
        for batch in (tokens.repeat(2, 0), tokens[:, :1025].repeat(4, 0)):
            jax.eval_shape(run, params, batch, jnp.array(0))
    assert shapes == [(1, MAX_TOKENS + 1), (2, 1025), (4, MAX_TOKENS // 4 + 1), (4, MAX_TOKENS // 4 + 1)]


def test_by_layer_names_every_number():
    n = iter(range(100))
    measures = jax.tree.map(lambda _: jnp.array([float(next(n))]), empty_slots(["up"], 1))
    assert isinstance(measures["up"], Measures)
    assert isinstance(measures["up"].amax, Amax)
    found = by_layer(measures)["blocks.0.up"]
    errors = measures["up"].errors
    assert found["dgrad"]["sqnr_db"] == float(errors.dgrad.product.sqnr_db[0])
    assert found["dgrad"]["dy"]["clipped"] == float(errors.dgrad.lhs.clipped[0])
    assert found["wgrad"]["dy"]["flushed"] == float(errors.wgrad.rhs.flushed[0])
    assert found["amax"]["dy"] == float(measures["up"].amax.dy[0])


@pytest.mark.slow
def test_measuring_changes_no_training(text, tmp_path):
    found, states = {}, {}
    for name, flags in {"without": [], "with": ["--stats-every", "2", "--profile", "3:4"]}.items():
        out = tmp_path / name
        flags = [*flags, "--policy", "wgrad", "--layers", *LAYERS, "--data", str(text), "--out", str(out)]
        training_program.train(parse([*SMALL, *flags]))
        found[name], states[name] = lines(out), weights(out)
    jax.tree.map(np.testing.assert_array_equal, states["with"], states["without"])
    measured = [r for r in found["with"] if "layers" in r]
    rest = [r for r in found["with"] if "layers" not in r]
    same = ("step", "loss", "grad_norm", "eval_loss")
    assert [[r.get(k) for k in same] for r in rest] == [[r.get(k) for k in same] for r in found["without"]]
    assert [r["step"] for r in measured] == [2, 4]
    assert len(measured[0]["layers"]) == 4 * len(LINEAR_LAYERS)
    assert 10 < measured[0]["layers"]["blocks.3.mlp.down"]["wgrad"]["sqnr_db"] < 20
    assert list((tmp_path / "with" / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "10"], "--profile takes FIRST:LAST"),
        (["--profile", "15:10"], "--profile takes FIRST:LAST"),
        (["--profile", "0:3"], "--profile takes FIRST:LAST"),
        (["--profile", "2:5"], "--profile takes FIRST:LAST, from 1 to --steps 4, got '2:5'"),
    ],
)
def test_bad_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse([*SMALL, *flags])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
