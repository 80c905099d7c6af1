"""The compiled programs of a run: training step, evaluation step, and statistics of layers."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from models import llama
from models.block import LINEAR_LAYERS
from models.sharding import batch_parts_of
from mxjax.devices import on_gpu
from mxjax.layer_stats import empty_slots, make_layer_stats
from mxjax.recipes import get_policy
from training.mesh import abstract_batch, compiler_options, on_mesh
from training.optimizer import keeps_finite_of, learning_rate
from training.policy_schedule import Phase
from training.setup import Run
from training.step import Loss, Losses, ScheduledStep, TrainState, make_eval_step, make_train_step


class Programs(NamedTuple):
    """The programs for the policies of one phase; each compiles at its first call or in `start_compiling`."""

    train_step: ScheduledStep
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
    options_for = functools.partial(
        compiler_options, run.mesh, implementation=config.precision.implementation
    )
    xla_options = options_for(phase.layers.policies)
    train_step = make_train_step(
        loss,
        optimizer,
        accumulate=config.accumulate,
        skip_nonfinite=config.on_nonfinite == "skip",
        shardings=shardings,
        compiler_options=xla_options,
        keeps_finite=keeps_finite_of(config),
    )
    return Programs(
        ScheduledStep(train_step, learning_rate(config.optimizer, config.steps)),
        on_mesh(run.mesh, make_eval_step(losses, xla_options)),
        make_layer_stats(
            loss,
            empty,
            config.seed,
            tokens_a_part,
            batch_parts_of(run.mesh.shape),
            options_for((*phase.layers.policies, get_policy("fp32"))),
        ),
    )


def start_compiling(run: Run, programs: Programs, state: TrainState) -> threading.Thread | None:
    """Lowers the training step and compiles it in a thread, which is returned.

    Tracing and lowering hold Python's lock, so that nothing runs beside them; XLA's compilation does not. An
    error is not raised here: the first step meets it again. Of several processes' programs only the kernels
    are compiled; XLA compiles together at the first step. Then, on a CPU, and after an error there is no
    thread.

    Args:
      state: shapes, dtypes and shardings.
    """
    if not on_gpu():  # where XLA would take the cores of what runs beside it
        return None
    data = run.config.data
    batch = abstract_batch(run.mesh, data.batch_size, data.seq_len + 1)
    try:
        lowered = programs.train_step.lower(state, batch, jax.random.key(run.config.seed))
    except Exception:
        return None
    if jax.process_count() > 1:
        return None

    def compile_step():
        with contextlib.suppress(Exception):
            lowered.compile()

    thread = threading.Thread(target=compile_step)
    thread.start()
    return thread


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
