"""Trains a Llama in the precision that a policy names: `python train.py --policy=wgrad_hadamard`."""

import pathlib
import signal
import sys
import time

import grain
import jax
import numpy as np
import optax

from models import llama
from models.block import LINEAR_LAYERS
from models.sharding import batch_parts_of
from mxjax.layer_stats import empty_slots, make_layer_stats
from training import parameters
from training.anomalies import Watch
from training.checkpoint.checkpoints import CheckpointError, Checkpoints
from training.checkpoint.recovery import set_aside_damaged
from training.command_line import parse
from training.config import Config
from training.environment import disk_errors, enable_compilation_cache, input_errors
from training.interruption import Interruption, RunInterrupted
from training.layer_amax import amax_names
from training.loop import Loop, Programs, Records
from training.mesh import compiler_options, on_mesh, process_part
from training.metrics import Display, MetricsLog, NonFiniteError, StepReporter, evaluations
from training.mllog import MLPerfLog
from training.optimizer import learning_rate, make_optimizer
from training.processes import ProcessError, is_first_process, join_processes, together
from training.profiling import StepTracer
from training.progress import is_done
from training.report import introduction, summary
from training.setup import Run, mllog_settings, set_up, write_description
from training.step import Loss, Losses, TrainState, make_eval_step, make_train_step
from training.tensorboard import TensorBoardLog


def train(config: Config) -> dict[str, float]:
    """Trains, evaluates and checkpoints; returns the last evaluation.

    Raises:
      SystemExit: what the configuration asks for cannot be done; the message says so.
      RunInterrupted: SIGINT or SIGTERM has ended the run after a checkpoint.
      NonFiniteError: a loss or gradient was NaN or infinite; what is needed to repeat it is saved.
      CheckpointError: a checkpoint could not be saved.
      ProcessError: another process of the run has failed before its first step.
    """
    began = time.time()
    enable_compilation_cache()
    if config.distributed:
        with input_errors():
            join_processes()
    with Interruption() as interruption:
        with input_errors():
            with together():
                run = set_up(config)
                part = process_part(run.mesh, config.data.batch_size)
                stream = run.corpus.batches(config.data, config.seed, config.steps, shard=part)
            damage = set_aside_damaged(run.folder / "checkpoints")
        with disk_errors(run.folder), jax.set_mesh(run.mesh):
            with together():
                if is_first_process():
                    write_description(run)  # before what takes long: a run killed there can be resumed
            return begin_or_continue(run, stream, interruption, began, damage)


def begin_or_continue(
    run: Run, stream: grain.DatasetIterator, interruption: Interruption, began: float, damage: list[str]
) -> dict[str, float]:
    """Trains from the run's newest checkpoint on, if it has one, and returns the last evaluation."""
    config = run.config
    optimizer = make_optimizer(config.optimizer, config.steps)
    folder, eval_losses = run.folder / "checkpoints", evaluations(run.folder)
    with Checkpoints(folder, config.keep_checkpoints, eval_losses) as checkpoints:
        resumes = config.resume and checkpoints.latest is not None
        state, shardings = initial_state(run, optimizer, None if resumes else config.init)
        if resumes:
            with input_errors():
                state, position = checkpoints.restore(state)
            if position is not None:
                stream.set_state(position)
        records = open_records(run, state, began)
        with records.log, records.display, records.tracer, records.mllog, records.watch:
            if config.resume and not resumes:
                damage = [*damage, f"no checkpoint in {folder}: beginning at step 1"]
            records.display.line("\n".join([introduction(run, state), *damage]))
            reporter = make_reporter(run, records)
            loop = Loop(
                config=config,
                folder=run.folder,
                mesh=run.mesh,
                phases=run.phases,
                make_programs=lambda phase: make_programs(run._replace(phase=phase), optimizer, shardings),
                state=state,
                stream=stream,
                held_out=run.held_out,
                checkpoints=checkpoints,
                records=records,
                reporter=reporter,
                interruption=interruption,
            )
            evaluation = loop.run()
            records.display.line(summary(run, loop.step, loop.done, evaluation, reporter.step_times))
            return evaluation


def initial_state(
    run: Run, optimizer: optax.GradientTransformation, init: pathlib.Path | None
) -> tuple[TrainState, TrainState]:
    """Returns the state to begin with, made where it lies, and its shardings.

    The parameters are random, or the last of the run in `init`.
    """
    key = jax.random.fold_in(jax.random.key(run.config.seed), 2**32 - 1)  # the key of no step
    state, shardings = parameters.first_state(run.model, optimizer, run.mesh, key)
    if init is not None:
        with Checkpoints(init / "checkpoints") as checkpoints, input_errors():
            state = state._replace(params=checkpoints.restore_params(state.params))
    return state, shardings


def make_programs(run: Run, optimizer: optax.GradientTransformation, shardings: TrainState) -> Programs:
    """Returns the jitted functions of the running phase; each compiles when it is first called."""
    config = run.config
    loss, losses = make_losses(run)
    tokens_a_part = config.data.batch_size // config.accumulate * config.data.seq_len
    empty = empty_slots(LINEAR_LAYERS, run.model.n_layers)
    return Programs(
        make_train_step(
            loss,
            optimizer,
            accumulate=config.accumulate,
            skip_nonfinite=config.on_nonfinite == "skip",
            shardings=shardings,
            compiler_options=compiler_options(
                run.mesh, run.phase.layers.policies, config.precision.implementation
            ),
        ),
        on_mesh(run.mesh, make_eval_step(losses)),
        make_layer_stats(loss, empty, config.seed, tokens_a_part, batch_parts_of(run.mesh.shape)),
    )


def make_losses(run: Run) -> tuple[Loss, Losses]:
    """Returns the model's mean loss, to train on, and the losses of all tokens, to evaluate."""
    config = run.config
    options = {
        "policies": run.phase.layers,
        "remat": config.remat,
        "unroll": config.unroll,
        "implementation": config.precision.implementation,
    }

    def of(function):
        return lambda params, batch, key, slots=None: function(
            run.model, params, batch, key=key, slots=slots, **options
        )

    return of(llama.mean_loss), of(llama.losses)


def open_records(run: Run, state: TrainState, began: float) -> Records:
    """Opens what the run writes, to go on after the state's step; the first process alone writes."""
    config, start = run.config, int(state.step)
    writes = is_first_process()
    path = run.folder / "metrics.jsonl"
    open_log = TensorBoardLog if config.observe.tensorboard else MetricsLog
    with together():  # all read it
        log = open_log(path, keep_steps=start) if writes else MetricsLog(None)
    display = Display(config.steps, start, config.log_every, quiet=not writes)
    tracer = StepTracer(config.observe.profiled_steps, run.folder / "profile")
    with together():
        wanted = config.mlperf.mllog and writes and not is_done(config, run.folder, start)
        mllog = MLPerfLog(
            run.folder / "mllog.txt" if wanted else None,
            mllog_settings(run),
            start * config.data.batch_size,
            began,
        )
        skips, names = config.on_nonfinite == "skip", amax_names(state.params)
        watch = Watch(run.folder, skips, config.spike_factor, run.batch_of, names, display.line, start)
    return Records(log, display, tracer, mllog, watch)


def make_reporter(run: Run, records: Records) -> StepReporter:
    """Returns what writes the metrics of each step to the records."""
    data, model = run.config.data, run.model
    flops_a_step = data.tokens_a_step * model.flops_per_token(data.seq_len)
    # On the host: it would have to wait for the device.
    schedule = learning_rate(run.config.optimizer, run.config.steps, np)
    log, display, watch = records.log, records.display, records.watch
    return StepReporter(log, display, watch, data.tokens_a_step, flops_a_step, schedule)


if __name__ == "__main__":
    try:
        train(parse())
    except RunInterrupted:  # said already, and nothing is lost
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # that another process passes on once more
    except (NonFiniteError, CheckpointError, ProcessError) as error:
        sys.exit(f"train.py: error: {error}")
