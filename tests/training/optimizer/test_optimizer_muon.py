"""Muon against optax's, applied to every matrix of every layer by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import decoder
from models.configs import DecoderConfig, ExpertsConfig
from training.optimizer.config import OptimizerConfig
from training.optimizer.optimizers import make_optimizer

DENSE = DecoderConfig(19, 24, 2, 6, 2, 4, 40, qkv_bias=True)
SPARSE = dataclasses.replace(DENSE, experts=ExpertsConfig(3, 2, shared=1), tied=True)


def by_hand(model, name, x):
    """Returns the matrices of an unstacked parameter, cut out column by column, and where they lie."""
    if name.endswith("gate_up"):
        half = x.shape[1] // 2
        return {"gate": np.arange(half), "up": np.arange(half, 2 * half)}
    if name == "qkv":
        columns = np.arange(x.shape[1])
        group, place = np.divmod(columns, (model.n_heads // model.n_kv_heads + 2) * model.head_dim)
        head = place // model.head_dim - model.n_heads // model.n_kv_heads
        assert np.all(group < model.n_kv_heads)
        return {"q": columns[head < 0], "k": columns[head == 0], "v": columns[head == 1]}
    return {"whole": np.arange(x.shape[1])}


def unstacked(model, params):
    """Yields (path, index of layer and expert, columns) of each matrix of the blocks."""
    for path, x in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        name = path[-1].key
        if name in ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down"):
            for index in np.ndindex(x.shape[:-2]):
                for columns in by_hand(model, name, np.asarray(x[index])).values():
                    yield path, index, columns


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rms"), [(DENSE, 0.2), (SPARSE, None)])
def test_updates_are_those_of_optax_s_muon_by_matrix(model, rms):
    config = OptimizerConfig(
        optimizer="muon", clip=1e9, weight_decay=0.3, consistent_rms=rms, lr=0.5, adam_lr=0.25
    )
    optimizer = make_optimizer(config, model)
    start = params = decoder.init(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    grads = [jax.tree.map(lambda p: jnp.float32(rng.normal(size=p.shape)), params) for _ in range(2)]
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(g, state, params, learning_rate=jnp.float32(0.5))
        params = optax.apply_updates(params, updates)

    places = list(unstacked(model, start))
    assert len(places) == 2 * (7 if model is DENSE else 4 + 3 * 3 + 3)

    def cut(tree):
        leaves = dict(jax.tree_util.tree_leaves_with_path(tree["blocks"]))
        return [leaves[path][index][:, columns] for path, index, columns in places]

    theirs = optax.contrib.muon(0.5, beta=0.95, weight_decay=0.3, consistent_rms=rms)
    matrices, theirs_state, update = cut(start), theirs.init(cut(start)), jax.jit(theirs.update)
    for g in grads:
        updates, theirs_state = update(cut(g), theirs_state, matrices)
        matrices = optax.apply_updates(matrices, updates)
    for found, expected in zip(cut(params), matrices, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)

    adamw = make_optimizer(dataclasses.replace(config, optimizer="adamw"))
    others, others_state, update = start, adamw.init(start), jax.jit(adamw.update)
    for g in grads:
        updates, others_state = update(g, others_state, others, learning_rate=jnp.float32(0.25))
        others = optax.apply_updates(others, updates)
    moved = {path for path, *_ in places}
    blocks = dict(jax.tree_util.tree_leaves_with_path(others["blocks"]))
    for path, found in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        if path not in moved:
            np.testing.assert_allclose(found, blocks[path], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(params["embedding"], others["embedding"], rtol=1e-6, atol=1e-7)


def test_a_step_of_sgd_by_hand():
    config = OptimizerConfig(optimizer="sgd", clip=1e9, weight_decay=0.1, momentum=0.5)
    params, g = {"w": jnp.float32([1, -2])}, {"w": jnp.float32([3, 4])}
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    for expected in ([-0.1 * 3.1, -0.1 * 3.8], [-0.1 * 4.6, -0.1 * 5.8]):
        updates, state = optimizer.update(g, state, params, learning_rate=0.1)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
