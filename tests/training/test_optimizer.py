"""The optimizer: MLPerf's schedule, and AdamW against a plain numpy version."""

import jax
import jax.numpy as jnp
import numpy as np

from models import llama
from models.configs import LlamaConfig
from training.config import OptimizerConfig
from training.learning_rate import learning_rate
from training.optimizer import decayed, make_optimizer


def test_warm_up_and_cosine():
    """Values by hand from the formulas of MLPerf's llama31_8b: peak 8e-4, W 128, 1,200,000 steps."""
    config = OptimizerConfig(lr=8e-4, warmup_steps=128)
    schedule = learning_rate(config, 1_200_000)
    np.testing.assert_allclose(schedule(0), 8e-4 / 129, rtol=1e-6)
    np.testing.assert_allclose(schedule(63), 8e-4 * 64 / 129, rtol=1e-6)
    np.testing.assert_allclose(schedule(128), 8e-4, rtol=1e-6)
    np.testing.assert_allclose(schedule(128 + (1_200_000 - 128) // 2), 4.4e-4, rtol=1e-5)
    np.testing.assert_allclose(schedule(1_200_000), 8e-5, rtol=1e-5)
    np.testing.assert_allclose(schedule(2_000_000), 8e-5, rtol=1e-5)
    on_host = learning_rate(config, 1_200_000, np)
    for step in (0, 63, 128, 5000, 1_200_000):
        np.testing.assert_allclose(on_host(step), schedule(step), rtol=1e-5)


def test_only_the_norms_do_not_decay():
    shapes = jax.eval_shape(lambda: llama.init(LlamaConfig(8, 8, 2, 2, 1, 4, 8), jax.random.key(0)))
    mask = decayed(shapes)
    flat = {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(mask)}
    assert {name for name, decays in flat.items() if not decays} == {
        "['blocks']['attention_norm']['scale']",
        "['blocks']['mlp_norm']['scale']",
        "['norm']['scale']",
    }


def test_two_steps_equal_adamw_in_numpy():
    config = OptimizerConfig(lr=1e-2, warmup_steps=1, clip=0.5)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "norm": {"scale": np.ones(4)}}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    grads = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params) for _ in range(2)
    ]

    optimizer, schedule = make_optimizer(config), learning_rate(config, 10)
    state, ours = optimizer.init(params), params
    for i, g in enumerate(grads):
        updates, state = optimizer.update(g, state, ours, learning_rate=schedule(i))
        ours = jax.tree.map(jnp.add, ours, updates)

    def adamw(p, gs, decay):
        p, m, v = np.float64(p), 0.0, 0.0
        for t, g in enumerate(gs, start=1):
            m, v = config.b1 * m + (1 - config.b1) * g, config.b2 * v + (1 - config.b2) * g**2
            unit = (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
            p = p - config.lr * t / 2 * (unit + decay * p)  # both steps are warm-up: 1/2, then 1
        return p

    clipped = [clip(g, config.clip) for g in grads]
    expected_w = adamw(params["w"], [g["w"] for g in clipped], config.weight_decay)
    expected_scale = adamw(params["norm"]["scale"], [g["norm"]["scale"] for g in clipped], 0.0)
    np.testing.assert_allclose(ours["w"], expected_w, rtol=1e-5)
    np.testing.assert_allclose(ours["norm"]["scale"], expected_scale, rtol=1e-5)


def clip(grads, largest):
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(grads)))
    assert norm > largest
    return jax.tree.map(lambda g: np.float64(g) * largest / norm, grads)
