"""The compiled programs of a run: training step, evaluation step, and statistics of layers."""

from collections.abc import Callable
from typing import NamedTuple

import optax

from models import llama
from models.block import LINEAR_LAYERS
from models.sharding import batch_parts_of
from mxjax.layer_stats import empty_slots, make_layer_stats
from training.learning_rate import learning_rate
from training.mesh import compiler_options, on_mesh
from training.policy_schedule import Phase
from training.setup import Run
from training.step import Loss, Losses, TrainState, make_eval_step, make_train_step, scheduled


class Programs(NamedTuple):
    """The programs for the policies of one phase; each compiles at its first call."""

    train_step: Callable
    eval_step: Callable
    layer_stats: Callable


def make_programs(
    run: Run, phase: Phase, optimizer: optax.GradientTransformation, shardings: TrainState
) -> Programs:
    """Returns the programs of a phase."""
    config = run.config
    loss, losses = make_losses(run, phase)
    tokens_a_part = config.data.batch_size // config.accumulate * config.data.seq_len
    empty = empty_slots(LINEAR_LAYERS, run.model.n_layers)
    train_step = make_train_step(
        loss,
        optimizer,
        accumulate=config.accumulate,
        skip_nonfinite=config.on_nonfinite == "skip",
        shardings=shardings,
        compiler_options=compiler_options(run.mesh, phase.layers.policies, config.precision.implementation),
    )
    return Programs(
        scheduled(train_step, learning_rate(config.optimizer, config.steps)),
        on_mesh(run.mesh, make_eval_step(losses)),
        make_layer_stats(loss, empty, config.seed, tokens_a_part, batch_parts_of(run.mesh.shape)),
    )


def make_losses(run: Run, phase: Phase) -> tuple[Loss, Losses]:
    """Returns the model's mean loss, for training, and its loss of every token, for evaluation."""
    config = run.config
    options = {
        "policies": phase.layers,
        "remat": config.remat,
        "unroll": config.unroll,
        "implementation": config.precision.implementation,
    }

    def with_options(function):
        return lambda params, batch, key, slots=None: function(
            run.model, params, batch, key=key, slots=slots, **options
        )

    return with_options(llama.mean_loss), with_options(llama.losses)
