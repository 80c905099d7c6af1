"""Every published recipe trains two blocks of the model `tiny` for 100 steps, with a smaller vocabulary.

Each linear layer of a block has a recipe of its own, so that four share what else there is to compile. A
recipe of a whole run trains one layer of each block, with its steps brought forward.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from support.llamas import layer_policies
from support.marks import parametrize

import mxjax
from models import decoder
from models.configs import get_config
from models.gemms import LINEAR_LAYERS
from mxjax.recipes.ladder import ladder
from mxjax.recipes.whole_runs import RECIPES
from training.config import Config, OptimizerConfig, PrecisionConfig
from training.optimizer.optimizers import optimizer_of
from training.optimizer.schedule import learning_rate
from training.phases import expand
from training.step import ScheduledStep, init_state, make_train_step

STEPS, BATCH, LENGTH, VOCABULARY = 100, 2, 32, 32
MODEL = dataclasses.replace(get_config("tiny"), vocab_size=VOCABULARY, n_layers=2)
PUBLISHED = sorted(mxjax.policies().keys() - ladder().keys())
GROUPS = list(itertools.batched(PUBLISHED, len(LINEAR_LAYERS)))


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
    return jax.jit(lambda key: decoder.init(MODEL, key))(jax.random.key(0))


def train(layers, precision=PrecisionConfig()):  # noqa: B008
    """Returns the losses of all steps."""
    config = Config(steps=STEPS, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=10), precision=precision)
    optimizer = optimizer_of(config.optimizer, MODEL, config.precision.deoscillate, layers)

    def loss(params, batch, key):
        return decoder.mean_loss(MODEL, params, batch, policies=layers, key=key, implementation="xla")

    step = ScheduledStep(make_train_step(loss, optimizer), learning_rate(config.optimizer, STEPS))

    def take(state, batch):
        state, metrics = step(state, batch, jax.random.key(1))
        return state, metrics.loss

    run = jax.jit(lambda state, batches: jax.lax.scan(take, state, batches))
    state, losses = run(init_state(first_params(), optimizer), batches())
    assert bool(state.finite)
    return losses


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=pytest.mark.slow if "nvfp4" in names else pytest.mark.exhaustive)
        for names in GROUPS
    ],
    ids=" ".join,
)
def test_recipes_train(names):
    rules = [(f"blocks.*.{layer}", name) for layer, name in zip(LINEAR_LAYERS, names, strict=False)]
    losses = train(layer_policies(MODEL, "bf16", rules))
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert losses[-10:].mean() < 0.7 * losses[0]


def layers_with(name, precision):
    return layer_policies(MODEL, "bf16", [(name, precision.policy)])


def expanded(name, **steps):
    """The precision that a recipe of a whole run stands for, with other steps."""
    return expand(Config(precision=PrecisionConfig(policy=name, **steps))).precision


@pytest.mark.slow
@parametrize(
    ("name", "deoscillate"),
    ("primus_deosc_qkvo", "3:20:10:bf16"),
    ("tetrajet_v2_reset", "8:20:30:5"),
    exhaustive=[("primus_deosc", "3:20:10")],
)
def test_a_recipe_that_snaps_weights_trains(name, deoscillate):
    """With earlier steps, in one layer: the table of `primus_deosc` has four blocks in BF16."""
    precision = expanded(name, deoscillate=deoscillate)
    losses = train(layers_with("blocks.*.mlp.down", precision), precision=precision)
    assert np.isfinite(losses).all()
    assert losses[-10:].mean() < 0.7 * losses[0]


def test_recipes_of_whole_runs_are_all_trained():
    """`heal` is a schedule of two policies of the ladder; the tests above have the others."""
    assert set(RECIPES) == {"heal", "primus_deosc", "primus_deosc_qkvo", "tetrajet_v2_reset"}
