"""The average of the parameters, states in bfloat16, the z-loss, and weight decay by pattern."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mxjax
from models import decoder
from models.configs import DecoderConfig
from models.loss import Head, mean_loss
from mxjax.policy.layers import resolve
from training.optimizer.average import average_of
from training.optimizer.bfloat16 import stochastic_round
from training.optimizer.config import OptimizerConfig, bytes_a_parameter
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
    found = {name_of(path) for path, decays in flat if decays}
    assert found == {*("blocks.*.mlp.gate_up", "blocks.*.mlp.down", "head")}
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


def test_rounding_is_unbiased_between_neighbours():
    n = 40_000
    x = np.float32([1.001, -1.00390626, 3.14159, 1e-3, -7.77e30, 1.9999, 1.2e-38, 3e-40, -65504.7])
    found = np.asarray(stochastic_round(jnp.tile(jnp.asarray(x)[:, None], n), jax.random.key(3)))
    assert found.dtype == ml_dtypes.bfloat16
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    found, share = np.float64(found), (np.float64(x) - below) / (np.float64(above) - below)
    assert np.all((found == below[:, None]) | (found == above[:, None]))
    error = np.mean(found == above[:, None], axis=1) - share
    assert np.all(np.abs(error) <= 5 * np.sqrt(share * (1 - share) / n))


def test_values_of_bfloat16_stay_and_finite_ones_stay_finite():
    grid = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    found = np.asarray(stochastic_round(jnp.asarray(grid.astype(np.float32)), jax.random.key(0)))
    is_nan = np.isnan(grid.astype(np.float32))
    np.testing.assert_array_equal(found.view(np.uint16)[~is_nan], grid.view(np.uint16)[~is_nan])
    assert np.isnan(found[is_nan].astype(np.float32)).all()
    lowest = np.asarray(stochastic_round(jnp.full(64, np.finfo(np.float32).min), jax.random.key(0)))
    assert np.all(lowest == ml_dtypes.finfo("bfloat16").min)


def draw(seed, like):
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), like)


@pytest.mark.slow
def test_rounded_moments_have_the_mean_of_whole_ones():
    """With Muon, whose state has AdamW's too."""
    whole, rounded = (
        optimizer_of(OptimizerConfig(optimizer="muon", moments=moments), MODEL, None, LAYERS)
        for moments in ("float32", "bfloat16")
    )
    params = decoder.init(MODEL, jax.random.key(0))
    grads = [draw(i, params) for i in (1, 2)]

    def moments(optimizer, key):
        state, updates = optimizer.init(params), []
        for i, g in enumerate(grads):
            step = {"learning_rate": jnp.float32(1), "key": jax.random.fold_in(key, i)}
            update, state = optimizer.update(g, state, params, **step)
            updates.append(update)
        return updates[0], [x for x in jax.tree.leaves(state) if x.size > 3]

    first, expected = jax.jit(lambda key: moments(whole, key))(jax.random.key(0))
    firsts, found = jax.jit(jax.lax.map, static_argnums=0)(
        lambda key: moments(rounded, key), jax.random.split(jax.random.key(1), 64)
    )
    for a, b in zip(*map(jax.tree.leaves, (firsts, first)), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6)  # moments were zero before it
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    for many, one in zip(found, expected, strict=True):
        errors = np.float64(many) - np.float64(one)
        noise = np.sqrt(np.mean(np.var(errors, axis=0)) / len(many))
        assert 0 < noise * np.sqrt(len(many)) < 2**-7 * np.max(np.abs(one))
        assert np.abs(np.mean(errors)) < 5 * noise / np.sqrt(one.size)
        assert np.sqrt(np.mean(np.mean(errors, axis=0) ** 2)) < 1.5 * noise


def test_updates_too_small_for_bfloat16_move_its_parameters_on_average():
    config = OptimizerConfig(optimizer="sgd", momentum=0.0, clip=np.inf, weight_decay=0.0, master="bfloat16")
    optimizer = optimizer_of(config, MODEL, None, LAYERS)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    state = optimizer.init(params)
    assert jax.tree.leaves(state)[0].dtype == jnp.float32

    @jax.jit
    def step(params, state, key):
        g = {"w": jnp.full((64, 64), 1e-4)}
        updates, state = optimizer.update(g, state, params, learning_rate=jnp.float32(1), key=key)
        return optax.apply_updates(params, updates), state

    for i in range(50):
        params, state = step(params, state, jax.random.fold_in(jax.random.key(0), i))
    w = np.float64(params["w"])
    assert params["w"].dtype == jnp.bfloat16
    assert np.mean(w) == pytest.approx(1 - 50e-4, abs=5 * np.std(w) / 64)
    with pytest.raises(ValueError, match="needs the step's random bits"):
        optimizer.update({"w": jnp.ones((64, 64))}, state, params, learning_rate=1.0)


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, 12), ({"moments": "bfloat16"}, 8), ({"master": "bfloat16"}, 10), ({"optimizer": "sgd"}, 8)],
)
def test_bytes_of_a_parameter_with_its_moments(options, size):
    assert bytes_a_parameter(OptimizerConfig(**options)) == size
