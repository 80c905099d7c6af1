"""The training step and the evaluation loop, on a model small enough to check by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.llamas import SMALL, layer_policies

from models import decoder
from mxjax.products import linear
from training.config import OptimizerConfig
from training.optimizer.optimizers import keeps_finite, make_optimizer
from training.step import evaluate, init_state, largest_values, layer_names, make_eval_step, make_train_step


def bigram(params, batch, key, noise=0.0):
    logits = params["table"][batch[:, :-1]] + noise
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


def noisy(params, batch, key):
    return bigram(params, batch, key, jax.random.normal(key, (*batch[:, 1:].shape, 4)))


def mean_bigram(params, batch, key):
    return bigram(params, batch, key).mean()


def mean_noisy(params, batch, key):
    return noisy(params, batch, key).mean()


@pytest.fixture
def params():
    return {"table": jnp.arange(16, dtype=jnp.float32).reshape(4, 4) / 8}


BATCH = np.array([[0, 1, 2], [3, 0, 1]], np.int32)
WITHOUT_3 = np.array([[0, 1, 2]], np.int32)
KEY = jax.random.key(0)


def one_step(loss, params, batch=BATCH, optimizer=None, rate=None, **options):
    """Returns the state and the metrics after a step from a copy of these parameters."""
    optimizer = optimizer or optax.sgd(0.5)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    return make_train_step(loss, optimizer, **options)(state, batch, KEY, rate)


def test_a_step_is_the_optimizer_applied_to_the_mean_loss(params):
    gradient = jax.grad(lambda p: bigram(p, BATCH, None).mean())(params)
    expected = params["table"] - 0.5 * gradient["table"]
    state, metrics = one_step(mean_bigram, params)
    np.testing.assert_allclose(state.params["table"], expected, rtol=1e-6)
    assert int(state.step) == 1
    assert bool(metrics.finite)


def test_accumulated_gradients_are_those_of_the_whole_batch(params):
    batch = np.random.default_rng(0).integers(0, 4, (6, 5), np.int32)
    found = []
    for accumulate in (1, 2, 3):
        state, metrics = one_step(mean_bigram, params, batch, accumulate=accumulate)
        found.append((state.params["table"], metrics.loss, metrics.grad_norm))
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_random_bits_depend_on_seed_and_step(params):
    def losses(seed):
        step, state, found = make_train_step(mean_noisy, optax.sgd(0.0)), None, []
        state = init_state(jax.tree.map(jnp.copy, params), optax.sgd(0.0))
        for _ in range(3):
            state, metrics = step(state, BATCH, jax.random.key(seed))
            found.append(float(metrics.loss))
        return found

    assert losses(0) == losses(0)
    assert len(set(losses(0) + losses(1))) == 6


@pytest.mark.slow
def test_every_operand_of_every_layer_step_and_part_draws_bits_of_its_own(monkeypatch):
    """Six operands in each of the layers of all blocks, and in the head, as the compiled steps draw them."""
    found, uses_of_policy = [], linear.uses_of_policy

    def spy(*arguments):
        uses = uses_of_policy(*arguments)
        words = jnp.stack([operand.key.words[0] for gemm in uses for operand in gemm])
        jax.debug.callback(lambda words: found.extend(map(tuple, np.asarray(words).tolist())), words)
        return uses

    monkeypatch.setattr(linear, "uses_of_policy", spy)
    policies = layer_policies(SMALL, "full_sr", [("head", "full_sr")])
    optimizer = optax.sgd(0.0)
    step = make_train_step(
        lambda params, batch, key: decoder.mean_loss(SMALL, params, batch, policies=policies, key=key),
        optimizer,
        accumulate=2,
    )
    state = init_state(decoder.init(SMALL, KEY), optimizer)
    for _ in range(2):
        state, _ = step(state, np.zeros((4, 20), np.int32), KEY)  # sizes that no other test traces
    jax.effects_barrier()
    assert len(set(found)) == 2 * 2 * (4 * SMALL.n_layers + 1) * 6


def nan_at_token_3(params, batch, key):
    return mean_bigram(params, batch, key) * jnp.where(jnp.any(batch == 3), jnp.nan, 1.0)


def test_after_a_step_that_is_not_finite_the_state_stays(params):
    step = make_train_step(nan_at_token_3, optax.sgd(0.5))
    state, metrics = step(init_state(params, optax.sgd(0.5)), WITHOUT_3, KEY)
    assert bool(metrics.finite)
    before = np.asarray(state.params["table"])
    for batch in (BATCH, WITHOUT_3):
        state, metrics = step(state, batch, KEY)
        assert not bool(metrics.finite)
        assert int(state.step) == 1
        np.testing.assert_array_equal(state.params["table"], before)


def test_a_skipped_step_changes_only_what_is_counted(params):
    optimizer = optax.adam(0.5)
    step = make_train_step(nan_at_token_3, optimizer, skip_nonfinite=True)
    state = init_state(params, optimizer)
    before = jax.tree.map(np.asarray, state)
    state, metrics = step(state, BATCH, KEY)
    assert not bool(metrics.finite)
    assert (int(state.step), int(state.skipped), bool(state.finite)) == (1, 1, True)
    jax.tree.map(np.testing.assert_array_equal, state[1:3], before[1:3])
    state, metrics = step(state, WITHOUT_3, KEY)
    assert bool(metrics.finite)
    assert (int(state.step), int(state.skipped), int(metrics.skipped)) == (2, 1, 1)
    assert not np.array_equal(state.params["table"], before.params["table"])


@pytest.mark.parametrize("skip", [False, True])
def test_an_update_that_is_not_finite_is_not_made(params, skip):
    """Without epsilon, Adam divides 0 by 0 where the gradient is zero: in the rows of absent tokens."""
    optimizer = optax.adam(0.5, eps=0.0)
    before = init_state(params, optimizer)
    state, metrics = one_step(mean_bigram, params, WITHOUT_3, optimizer, skip_nonfinite=skip)
    assert np.isfinite([metrics.loss, metrics.grad_norm]).all()
    assert not bool(metrics.finite)
    assert (int(state.step), int(state.skipped), bool(state.finite)) == (skip, skip, skip)
    jax.tree.map(np.testing.assert_array_equal, state[1:3], before[1:3])
    np.testing.assert_array_equal(metrics.largest[1], [15 / 8])


def test_an_update_that_is_finite_for_certain_is_made_as_one_that_is_checked(params):
    config = OptimizerConfig(lr=0.1)
    for loss, is_finite in ((mean_bigram, True), (nan_at_token_3, False)):
        found = []
        for certain in (None, keeps_finite(config)):
            optimizer = make_optimizer(config)
            state = init_state(jax.tree.map(jnp.copy, params), optimizer)
            step = make_train_step(loss, optimizer, keeps_finite=certain)
            for _ in range(2):
                state, metrics = step(state, BATCH, KEY, jnp.float32(0.1))
            assert bool(metrics.finite) == is_finite
            found.append((state, metrics))
        jax.tree.map(np.testing.assert_array_equal, *found)
        assert bool(found[0][1].largest.any()) != is_finite


@pytest.mark.parametrize("certain", [False, True])
def test_only_an_update_that_is_not_finite_for_certain_is_checked(params, certain):
    options = {"keeps_finite": lambda rate: jnp.array(certain), "rate": jnp.float32(1)}
    state, metrics = one_step(mean_bigram, params, optimizer=optax.sgd(jnp.inf), **options)
    assert bool(metrics.finite) == certain
    assert np.isfinite(state.params["table"]).all() != certain


def test_the_largest_values_of_a_step_that_is_not_finite_are_those_of_gradients_and_parameters(params):
    expected = jax.grad(lambda p: bigram(p, BATCH, None).mean())(params)["table"]
    for offset, wanted in ((jnp.inf, [[abs(expected).max()], [15 / 8]]), (0.0, [[0], [0]])):
        _, metrics = one_step(lambda *given, offset=offset: mean_bigram(*given) + offset, params)
        np.testing.assert_allclose(metrics.largest, wanted, rtol=1e-6)


def test_blocks_are_told_apart():
    tree = {"blocks": {"mlp": {"up": jnp.array([[[1.0, -3.0]], [[2.0, 0.0]]])}}, "head": -jnp.ones((2, 2))}
    assert layer_names(tree) == ["blocks.0.mlp.up", "blocks.1.mlp.up", "head"]
    np.testing.assert_array_equal(largest_values(tree), [3, 2, 1])


def test_evaluation_averages_over_tokens_not_batches(params):
    batches = [BATCH, BATCH[:1]]
    all_losses = [bigram(params, b, None) for b in batches]
    expected = np.concatenate([np.asarray(x).ravel() for x in all_losses]).mean()
    found = evaluate(make_eval_step(bigram), params, batches)
    np.testing.assert_allclose(found["eval_loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["eval_perplexity"], np.exp(expected), rtol=1e-6)
    assert found["eval_tokens"] == 6
    assert abs(found["eval_loss"] - np.mean([np.mean(x) for x in all_losses])) > 1e-4


def test_evaluation_draws_the_same_bits_every_time(params):
    step = make_eval_step(noisy)
    assert evaluate(step, params, [BATCH]) == evaluate(step, params, [BATCH])
