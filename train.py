"""Trains a Llama in the precision that a policy names: `python train.py --policy=wgrad_hadamard`."""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"train.py: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

    from training.command_line import check_flags

    check_flags()

import contextlib
import functools
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from operator import attrgetter

import grain
import jax
import optax

from models import llama
from models.llama import Params
from training.command_line import parse
from training.config import Config
from training.log import mlperf
from training.log.health import NonFiniteError, check_state
from training.log.metrics import FILE, SPIKES, evaluations, parse_record, set_aside_if_damaged
from training.log.report import introduction, memory_estimate, overfitting, summary
from training.log.reporter import open_records
from training.optimizer import optimizer_of
from training.phases import Phase, changed_files, phase_at
from training.process.environment import enable_compilation_cache, input_errors, memory_errors, path_errors
from training.process.failure import failing_together, telling_others
from training.process.interruption import Interruption, RunInterrupted
from training.process.together import ProcessError, is_first_process, join_processes, together
from training.run.checkpoints import CheckpointError, Checkpoints
from training.run.checksums import set_aside_damaged
from training.run.lock import FolderLostError, check_place, locked
from training.run.run import (
    Run,
    check_agreement,
    check_folder,
    open_folder,
    remove_beginning,
    remove_without_steps,
    set_up,
)
from training.sharding import abstract_state, first_state, process_part, resize
from training.step import TrainState
from training.trainer import Loop, Programs, make_programs, start_compiling

SHARED = NonFiniteError, ProcessError, RunInterrupted
"""Errors that all processes raise at the same place."""


def train(config: Config) -> dict[str, float]:
    """Trains, evaluates and checkpoints; returns the last evaluation.

    Raises:
      SystemExit: the configuration cannot be carried out; the message says why.
      RunInterrupted: SIGINT or SIGTERM ended the run after a checkpoint.
      NonFiniteError: a loss, gradient or update was NaN or infinite; the evidence is saved.
      CheckpointError: a checkpoint could not be saved.
      FolderLostError: the run's folder was moved, removed or replaced.
      ProcessError: another process of the run failed.
    """
    began = time.time()
    enable_compilation_cache()
    if config.distributed:
        with input_errors():
            join_processes()
    with failing_together(*SHARED), Interruption() as interruption, contextlib.ExitStack() as stack:
        with input_errors():
            with together():
                run = set_up(config)
                shard = process_part(run.mesh, config.data.batch_size)
                stream = run.corpus.batches(config.data, config.seed, config.steps, shard=shard)
            if config.distributed:
                check_agreement(run)
            with together():
                check, notes = take_folder(run, stack) if is_first_process() else (lambda: None, [])
            notes += set_aside_damaged(run.folder / "checkpoints")
        clean_up = functools.partial(remove_without_steps, run)
        with path_errors(run.folder), memory_errors(clean_up), jax.set_mesh(run.mesh):
            with together():
                if is_first_process():
                    open_folder(run)  # before anything slow: a run killed there can be resumed
            return begin_or_resume(run, stream, interruption, began, check, notes)


def take_folder(run: Run, stack: contextlib.ExitStack) -> tuple[Callable[[], None], list[str]]:
    """Locks the run's folder until the stack closes, and sets aside damaged records.

    Returns a function that raises FolderLostError once the folder is no longer this run's, and messages.
    """
    check = functools.partial(check_place, stack.enter_context(locked(run.folder)))
    check_folder(run.config, run.folder)  # once more: another run may have begun there meanwhile
    records = {FILE: parse_record, SPIKES: parse_record, mlperf.FILE: mlperf.parse_event}
    notes = [
        line for name, parse in records.items() for line in set_aside_if_damaged(run.folder / name, parse)
    ]
    if run.config.resume:
        layer_policies = functools.partial(llama.layer_policies, run.model)
        notes += changed_files(run.config.precision, run.config.steps, run.phases, layer_policies)
    return check, notes


def begin_or_resume(
    run: Run,
    stream: grain.DatasetIterator,
    interruption: Interruption,
    began: float,
    check: Callable[[], None],
    notes: list[str],
) -> dict[str, float]:
    """Trains from the run's newest checkpoint, if there is one; returns the last evaluation.

    `check` and `notes` are from `take_folder`.
    """
    config, folder = run.config, run.folder / "checkpoints"
    optimizer = optimizer_of(config, run.phases[0].layers)
    with (
        Checkpoints(folder, config.keep_checkpoints, evaluations(run.folder), check) as checkpoints,
        failing_together(*SHARED),
    ):
        resumes = config.resume and checkpoints.latest is not None
        fill = functools.partial(resize, size=run.filled_vocab_size)
        shapes = abstract_state(run.model, optimizer, run.mesh, fill)
        programs_of = phase_programs(run, jax.tree.map(attrgetter("sharding"), shapes))
        compiling = None
        if not resumes and config.init is None:  # a state that is read may be refused, which must not wait
            compiling = start_compiling(run, programs_of(phase_at(run.phases, 1)), shapes)
        estimate = memory_estimate(run, shapes, checkpoints.latest or 0)
        try:
            state = initial_state(run, optimizer, fill, None if resumes else config.init)
        except SystemExit:
            if not config.resume:
                remove_beginning(run)
            raise
        if resumes:
            with input_errors():
                state, position = checkpoints.restore(run.unfilled(state))
                check_state(state, folder)
            state = run.filled(state)
            if position is not None:
                stream.set_state(position)
        elif config.resume:
            notes = [*notes, f"no checkpoint in {folder}: beginning at step 1"]
        with open_records(run, state, began, check) as records:
            records.display.line("\n".join([introduction(run, estimate), *notes]))
            if compiling is not None:
                compiling.join()
            loop = Loop(run, programs_of, state, stream, checkpoints, records, interruption)
            evaluation = loop.train()
            said = [summary(run, loop.step, loop.done, evaluation, records.reporter.step_times)]
            if loop.done and evaluation:
                said += overfitting(run.folder, checkpoints.losses, loop.step, checkpoints.best)
            records.display.line("\n".join(said))
            return evaluation


def phase_programs(run: Run, shardings: TrainState) -> Callable[[Phase], Programs]:
    """Returns a function that makes the programs of a phase, once."""

    @functools.lru_cache(maxsize=1)
    def programs_of(phase: Phase) -> Programs:
        return make_programs(run, phase, optimizer_of(run.config, phase.layers), shardings)

    return programs_of


def initial_state(
    run: Run,
    optimizer: optax.GradientTransformation,
    fill: Callable[[Params], Params],
    init: pathlib.Path | None,
) -> TrainState:
    """Returns the state to begin with.

    The parameters are random, or the last ones of the run in `init`, with a vocabulary that `fill` fills.
    Exits if those cannot be used.
    """
    key = jax.random.fold_in(jax.random.key(run.config.seed), 2**32 - 1)  # no step has this key
    state, _ = first_state(run.model, optimizer, run.mesh, key, fill)
    if init is not None:
        with Checkpoints(init / "checkpoints") as checkpoints, input_errors():
            params = checkpoints.restore_params(run.unfilled(state.params))
            state = state._replace(params=run.filled(params))
            check_state(state, init)
    return state


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; exits with a status other than 0 and one line if the run cannot go on."""
    try:
        with telling_others("--distributed" in (sys.argv if argv is None else argv)), input_errors():
            config = parse(argv)
        train(config)
    except RunInterrupted:  # already reported, and nothing is lost
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another process may send it once more
    except (NonFiniteError, CheckpointError, FolderLostError, ProcessError) as error:
        sys.exit(f"train.py: error: {error}")


if __name__ == "__main__":
    main()
