"""Every published recipe trains a small Llama for 100 steps.

Each linear layer of a block has a recipe of its own, so that four share what else there is to compile.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from support.llamas import layer_policies
from support.recipes import VARIANTS

import mxjax
from models import llama
from models.block import LINEAR_LAYERS
from models.configs import LlamaConfig
from mxjax.recipes.ladder import ladder
from training.config import OptimizerConfig
from training.deoscillation import Deoscillation, deoscillation_hook
from training.learning_rate import learning_rate
from training.optimizer import make_optimizer
from training.recipes import RECIPES
from training.step import init_state, make_train_step, scheduled
from training.weight_hooks import with_hook

STEPS, BATCH, LENGTH, VOCABULARY = 100, 4, 32, 32
MODEL = LlamaConfig(VOCABULARY, 64, 2, 2, 1, 32, 96, rope_theta=10_000.0)
PUBLISHED = {name for name in mxjax.policies() if name not in ladder() and not name.startswith("amazon_")}
MAIN = PUBLISHED - VARIANTS


def in_groups(names):
    """Returns the names in tuples, one for each linear layer of a block."""
    return itertools.batched(sorted(names), len(LINEAR_LAYERS))


@functools.cache
def batches():
    """Sequences in which every token has two successors, so that the best mean loss is log 2."""
    rng = np.random.default_rng(0)
    successors = rng.permuted(np.tile(np.arange(VOCABULARY), (VOCABULARY, 1)), axis=1)[:, :2]
    tokens = rng.integers(0, VOCABULARY, (STEPS, BATCH, 1))
    for _ in range(LENGTH):
        chosen = rng.integers(0, 2, tokens.shape[:2])
        tokens = np.concatenate([tokens, successors[tokens[..., -1], chosen][..., None]], axis=-1)
    return tokens.astype(np.int32)


@functools.cache
def first_params():
    return jax.jit(lambda key: llama.init(MODEL, key))(jax.random.key(0))


def train(policies, hook=None):
    """Returns the losses of all steps, which one program takes."""
    config = OptimizerConfig(lr=1e-2, warmup_steps=10)
    optimizer = make_optimizer(config)
    optimizer = optimizer if hook is None else with_hook(optimizer, hook)

    def loss(params, batch, key):
        return llama.mean_loss(MODEL, params, batch, policies=policies, key=key, implementation="xla")

    step = scheduled(make_train_step(loss, optimizer), learning_rate(config, STEPS))

    @jax.jit
    def run(params, key):
        def take(state, batch):
            state, metrics = step(state, batch, key)
            return state, metrics.loss

        return jax.lax.scan(take, init_state(params, optimizer), batches())

    state, losses = run(first_params(), jax.random.key(1))
    assert bool(state.finite)
    return np.asarray(losses)


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, marks=pytest.mark.slow) for names in in_groups(MAIN)),
        *(pytest.param(names, marks=pytest.mark.exhaustive) for names in in_groups(VARIANTS)),
    ],
    ids=" ".join,
)
def test_recipes_train(names):
    rules = [(f"blocks.*.{layer}", name) for layer, name in zip(LINEAR_LAYERS, names, strict=False)]
    losses = train(layer_policies(MODEL, "bf16", rules))
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert losses[-10:].mean() < 0.7 * losses[0]


@pytest.mark.slow
def test_a_recipe_with_a_hook_on_weights_trains():
    """`primus_deosc`: its own table leaves no block of four or fewer in MXFP4, and its period is longer."""
    layers = layer_policies(MODEL, "bf16", [("blocks[1].mlp.down", RECIPES["primus_deosc"].policy)])
    losses = train(layers, deoscillation_hook(Deoscillation(3.0, 20, 10), layers))
    assert np.isfinite(losses).all()
    assert losses[-10:].mean() < 0.7 * losses[0]
