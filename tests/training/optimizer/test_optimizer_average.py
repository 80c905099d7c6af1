"""The average of the parameters, the z-loss, and weight decay by pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mxjax
from models import decoder
from models.configs import DecoderConfig
from models.loss import Head, mean_loss
from mxjax.policy.layers import resolve
from training.optimizer.average import average_of
from training.optimizer.config import OptimizerConfig
from training.optimizer.optimizers import check_no_decay, decayed, name_of, optimizer_of

MODEL = DecoderConfig(16, 8, 1, 2, 1, 4, 12)
LAYERS = resolve(["head"], mxjax.get_policy("bf16"))


@pytest.mark.parametrize(("decay", "master"), [(0.9, "float32"), (0.9999, "float32"), (0.0, "bfloat16")])
def test_an_average_weighs_steps_by_powers_of_the_decay(decay, master):
    config = OptimizerConfig(optimizer="sgd", ema=decay, master=master)
    optimizer = optimizer_of(config, MODEL, None, LAYERS)
    params = {"embedding": jnp.ones((3, 5), jnp.dtype(master))}
    state, seen = optimizer.init(params), []
    assert average_of(state)["embedding"].dtype == jnp.float32
    for i in range(7):
        g = {"embedding": jax.random.normal(jax.random.key(i), (3, 5))}
        updates, state = optimizer.update(g, state, params, learning_rate=0.5, key=jax.random.key(i))
        params = optax.apply_updates(params, updates)
        seen.append(np.float64(params["embedding"]))
    weights = np.float64(decay) ** np.arange(6, -1, -1)
    expected = np.tensordot(weights / weights.sum(), np.stack(seen), axes=1)
    np.testing.assert_allclose(average_of(state)["embedding"], expected, rtol=1e-5)


def test_a_state_without_an_average_has_none():
    optimizer = optimizer_of(OptimizerConfig(), MODEL, None, LAYERS)
    assert average_of(optimizer.init({"embedding": jnp.ones(3)})) is None


@pytest.mark.parametrize("z_loss", [0.3, 1e-4])
def test_a_z_loss_and_its_gradients_against_float64(z_loss, monkeypatch):
    """In three pieces, of which the last is padded."""
    monkeypatch.setattr("models.loss.LOSS_TOKENS", 8)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 11, 8)), rng.normal(size=(8, 17))
    targets = rng.integers(0, 17, (2, 11))
    head = Head(mxjax.get_policy("fp32"), z_loss=z_loss)

    def loss(x, w):
        total, z = mean_loss(head, x, w, jnp.asarray(targets), None)
        return 3 * total, (total, z)

    gradients, (total, z) = jax.grad(loss, (0, 1), has_aux=True)(jnp.float32(x), jnp.float32(w))
    logits = x @ w
    normalizer = np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    own = normalizer - np.take_along_axis(logits, targets[..., None], axis=-1)
    np.testing.assert_allclose(z, np.mean(normalizer**2), rtol=1e-6)
    np.testing.assert_allclose(total, np.mean(own + z_loss * normalizer**2), rtol=1e-6)
    softmax, one_hot = np.exp(logits - normalizer), np.eye(17)[targets]
    d_logits = 3 * (softmax * (1 + 2 * z_loss * normalizer) - one_hot) / targets.size
    np.testing.assert_allclose(gradients[0], d_logits @ w.T, atol=1e-5)
    np.testing.assert_allclose(gradients[1], np.einsum("bsd,bsv->dv", x, d_logits), atol=1e-5)


def test_losses_on_record_leave_the_z_loss_out():
    params, batch = decoder.init(MODEL, jax.random.key(0)), jnp.arange(12).reshape(2, 6)
    policies = decoder.layer_policies(MODEL, mxjax.get_policy("bf16"))
    total, measured = decoder.measured_loss(MODEL, params, batch, policies=policies, z_loss=0.5)
    plain = decoder.mean_loss(MODEL, params, batch, policies=policies)
    np.testing.assert_allclose(measured.cross_entropy, plain, rtol=1e-6)
    assert total > plain + 0.5


def test_parameters_that_patterns_name_do_not_decay():
    config = OptimizerConfig(no_decay=("embedding", "blocks.*.attention.*"))
    check_no_decay(config, MODEL)
    flat = jax.tree.leaves_with_path(decayed(decoder.abstract_params(MODEL), config.no_decay))
    assert {name_of(path) for path, decays in flat if decays} == {
        *("blocks.*.mlp.gate_up", "blocks.*.mlp.down", "head"),
    }
    params = jax.tree.map(jnp.ones_like, decoder.init(MODEL, jax.random.key(0)))
    for name in ("adamw", "muon", "sgd"):
        config = OptimizerConfig(optimizer=name, no_decay=("head",), weight_decay=0.5)
        optimizer = optimizer_of(config, MODEL, None, LAYERS)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, learning_rate=0.1)
        np.testing.assert_array_equal(updates["head"], 0)
        np.testing.assert_allclose(updates["embedding"], -0.05, rtol=1e-6)
        np.testing.assert_allclose(updates["blocks"]["mlp"]["down"], -0.05, rtol=1e-6)
    with pytest.raises(ValueError, match=r"--no-decay 'norm.scale' matches none of blocks\.\*\.attention"):
        check_no_decay(OptimizerConfig(no_decay=("norm.scale",)), MODEL)
