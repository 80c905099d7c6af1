"""Experts: routing against plain NumPy, the mixture against dense products, losses and balance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.llamas import layer_policies

import mxjax
from models import decoder
from models.configs import DecoderConfig, ExpertsConfig
from models.experts.layer import check_policies, route, summary
from models.experts.order import permute, sort_by_expert
from training.config import OptimizerConfig
from training.optimizer.optimizers import decayed, optimizer_of

CONFIG = DecoderConfig(64, 32, 2, 4, 2, 16, 32, experts=ExpertsConfig(6, 2, balance_loss=0.01, z_loss=1e-3))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 17)), jnp.int32)


def with_experts(**changes):
    assert CONFIG.experts is not None
    return dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, **changes))


def measured(config, params, policy="fp32", **options):
    policies = layer_policies(config, policy, [("head", "fp32"), ("*.attention.*", "fp32")])
    options |= {"policies": policies, "dtype": jnp.float32}
    return jax.jit(lambda p: decoder.measured_loss(config, p, TOKENS, **options))(params)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalized", [True, False])
def test_routing_is_what_its_formulas_say(scores, renormalized):
    config = ExpertsConfig(5, 2, scores=scores, renormalized=renormalized)
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(12, 5)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    experts, gates, routing = route(config, jnp.asarray(logits), jnp.asarray(bias))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = p if scores == "softmax" else 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(share + bias), axis=-1)[:, :2]
    expected = np.take_along_axis(share, chosen, -1)  # the bias decides the choice alone
    np.testing.assert_array_equal(experts, chosen)
    expected = expected / expected.sum(-1, keepdims=True) if renormalized else expected
    np.testing.assert_allclose(gates, expected, rtol=1e-6)
    share = share / share.sum(-1, keepdims=True)
    load = np.bincount(chosen.reshape(-1), minlength=5) / 12
    np.testing.assert_allclose(routing.load, load, rtol=1e-6)
    np.testing.assert_allclose(routing.balance, 5 * (load * share.mean(0)).sum(), rtol=1e-6)
    np.testing.assert_allclose(routing.entropy, -(share * np.log(share)).sum(-1).mean(), rtol=1e-6)
    np.testing.assert_allclose(routing.z, (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-5)


def test_a_permutation_s_gradient_is_its_inverse():
    order = sort_by_expert(jnp.asarray([[3, 0], [1, 3], [0, 2]]), 5)
    np.testing.assert_array_equal(order.sizes, [2, 1, 1, 2, 0])
    np.testing.assert_array_equal(order.experts, [0, 0, 1, 2, 3, 3])
    x = jnp.arange(12.0).reshape(6, 2)
    y, pull = jax.vjp(lambda x: permute(x, order.forward, order.inverse), x)
    np.testing.assert_array_equal(y, x[jnp.asarray([1, 4, 2, 5, 0, 3])])
    np.testing.assert_array_equal(pull(y)[0], x)


@pytest.mark.parametrize("changes", [{"shared": 2}, {"biased": True}], ids=str)
def test_all_experts_active_are_one_mlp(changes):
    """With even scores, results are those of an MLP of all experts' columns, whose result is a mean."""
    config = with_experts(active=6, **changes)
    params = decoder.init(config, jax.random.key(0))
    e, d, f = 6, config.d_model, config.d_ff
    mlp = params["blocks"]["mlp"]
    mlp["router"] = jnp.zeros_like(mlp["router"])
    gate, up = jnp.split(mlp["gate_up"], 2, axis=-1)
    down, shared = mlp["down"] / e, changes.get("shared", 0)
    gate, up = (w.swapaxes(1, 2).reshape(2, d, e * f) for w in (gate, up))
    down = down.reshape(2, e * f, d)
    if shared:
        more = jnp.split(mlp["shared_gate_up"], 2, axis=-1)
        gate, up = (jnp.concatenate(pair, axis=-1) for pair in zip((gate, up), more, strict=True))
        down = jnp.concatenate([down, mlp["shared_down"]], axis=1)
    plain = dataclasses.replace(config, experts=None, d_ff=(e + shared) * f)
    one = params | {
        "blocks": params["blocks"] | {"mlp": {"gate_up": jnp.concatenate([gate, up], -1), "down": down}}
    }
    value, found = measured(config, params)
    np.testing.assert_allclose(found.cross_entropy, measured(plain, one)[0], rtol=1e-6)
    np.testing.assert_allclose(found.routing.load, 1)
    np.testing.assert_allclose(found.routing.balance, 6, rtol=1e-6)
    extra = 0.01 * 6 + 1e-3 * float(np.mean(found.routing.z))
    np.testing.assert_allclose(value, found.cross_entropy + extra, rtol=1e-6)
    assert summary(config.experts, found.routing)["dropped"] == 0


@pytest.mark.slow
def test_experts_without_tokens_get_zeros_and_no_nan():
    """Two experts get all tokens; the first has an odd number, which blocks of 32 pad."""
    params = decoder.init(CONFIG, jax.random.key(0))
    params["blocks"]["mlp"]["router"] *= 0
    grads = jax.grad(lambda p: measured(CONFIG, p, "wgrad_hadamard")[0])(params)
    mlp = grads["blocks"]["mlp"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    for name in ("gate_up", "down"):  # of equal scores the first experts' win
        assert np.all(mlp[name][:, 2:] == 0)
        assert np.all(np.any(mlp[name][:, :2] != 0, axis=(2, 3)))
    assert np.any(mlp["router"] != 0)


@pytest.mark.slow
def test_biases_balance_the_load_without_a_gradient():
    config = with_experts(balance_rate=1e-2, balance_loss=None, z_loss=None)
    params = decoder.init(config, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.n_params
    params["blocks"]["mlp"]["router"] *= 20
    optimizer = optimizer_of(OptimizerConfig(), config, None, layer_policies(config, "bf16"))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss = jax.value_and_grad(lambda p: measured(config, p), has_aux=True)
        (_, aux), grads = loss(params)
        updates, state = optimizer.update(grads, state, params, learning_rate=0.0, aux=aux)
        return optax.apply_updates(params, updates), state, aux, grads

    spread = []
    for _ in range(25):
        old = params["blocks"]["mlp"]["balance_bias"]
        params, state, aux, grads = step(params, state)
        moved = params["blocks"]["mlp"]["balance_bias"] - old
        load = np.asarray(aux.routing.load)
        np.testing.assert_allclose(moved, 1e-2 * np.sign(2 / 6 - load), atol=1e-8)
        assert not np.any(grads["blocks"]["mlp"]["balance_bias"])
        spread.append(load.max(axis=-1) - load.min(axis=-1))
    assert np.all(np.mean(spread[-5:], axis=0) < 0.7 * spread[0])


def test_vectors_do_not_decay():
    config = with_experts(biased=True, balance_rate=1e-3)
    config = dataclasses.replace(config, qkv_bias=True, sinks=True, qk_norm=True)
    flags = jax.tree.leaves_with_path(decayed(decoder.abstract_params(config)))
    kept = {path[-1].key for path, decays in flags if not decays}
    biases = {f"{name}_bias" for name in ("qkv", "router", "gate_up", "down", "balance")}
    assert kept == {"scale", "sinks"} | biases


def test_the_router_is_in_float32_unless_a_rule_names_it():
    policies = layer_policies(CONFIG, "wgrad", [("blocks.1.*.router", "fp8"), ("blocks[0].*", "bf16")])
    assert policies["blocks.0.mlp.router"] == mxjax.get_policy("fp32")
    assert policies["blocks.1.mlp.router"] == mxjax.get_policy("fp8")
    assert policies["blocks.0.mlp.gate_up"] == mxjax.get_policy("bf16")
    assert policies["blocks.1.mlp.gate_up"] == mxjax.get_policy("wgrad")


def test_a_policy_that_experts_cannot_run_is_refused():
    check_policies(CONFIG, layer_policies(CONFIG, "nvfp4"), None)
    with pytest.raises(ValueError, match=r"cannot run blocks\.\d\.mlp\.\w+: .*; choose another --policy"):
        check_policies(CONFIG, layer_policies(CONFIG, "quartet"), None)
    with pytest.raises(ValueError, match="not 'scaled_dot'; leave --implementation out"):
        check_policies(CONFIG, layer_policies(CONFIG, "wgrad"), "scaled_dot")
