"""Trains a language model in the precision that a policy names: `python train.py --policy=wgrad_hadamard`."""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"train.py: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

    from training.command_line import check_flags

    check_flags()

import functools
import signal
import sys

from training.command_line import parse
from training.config import Config
from training.data.evaluation_sets import Evaluation
from training.log.health import NonFiniteError
from training.process.environment import enable_compilation_cache, input_errors, start_jax
from training.process.failure import telling_others
from training.process.interruption import RunInterrupted
from training.process.start import output_errors
from training.process.together import ProcessError
from training.run.checkpoints import CheckpointError
from training.run.forecast import forecast
from training.run.lock import FolderLostError
from training.run.run import Run
from training.step import TrainState
from training.trainer import Trainer


def train(config: Config) -> Evaluation:
    """Trains, evaluates and checkpoints; returns the last evaluation, or nothing if there was none to do.

    With `config.plan` it prints a plan and does nothing else.

    Raises:
      SystemExit: the configuration cannot be carried out; the message says why.
      RunInterrupted: SIGINT or SIGTERM ended the run after a checkpoint.
      NonFiniteError: a loss, gradient or update was NaN or infinite; the evidence is saved.
      CheckpointError: a checkpoint could not be saved.
      FolderLostError: the run's folder was moved, removed or replaced.
      ProcessError: another process of the run failed.
    """
    enable_compilation_cache()
    if config.plan:
        with input_errors(), output_errors():
            start_jax(config.devices)
            print(forecast(config))
        return {}
    with Run.open(config) as run:  # checks, locks and reads the folder; joins the other processes
        trainer = Trainer(run.plan)
        if run.is_new:
            trainer.start_compiling()
        memory = trainer.memory(run.newest)
        state = run.restore(trainer.init())
        n = run.begin(state, memory)
        return run.end(take_steps(run, trainer, state, n))


def take_steps(run: Run, trainer: Trainer, state: TrainState, n: int) -> Evaluation:
    """Takes the steps after step n; returns the last evaluation, or an empty dict.

    The host counts steps: `state.step` would wait for the device. Metrics are fetched one step late, so a
    NaN in a step raises in the next, with the state as it was before that step.
    """
    evaluation: Evaluation = {}
    log = run.log
    try:
        if run.owes_evaluation(n):  # killed between its last step and its evaluation
            trainer.compile(run.phase_of(n))
            evaluation = run.evaluate(n, functools.partial(trainer.evaluate, state))
            if run.saves_at(n):
                run.save(state)
            if run.ends_at(n):
                return evaluation
        for phase in run.phases_from(n):
            step = trainer.compile(phase)
            for n, batch in run.batches(phase):
                if run.measures_at(n):
                    log.layers(n, phase.policy, functools.partial(trainer.measure, state, batch))
                state, metrics = log.traced(n, step, state, batch)
                log.step(n, state, metrics)
                if run.evaluates_at(n):
                    evaluation = run.evaluate(n, functools.partial(trainer.evaluate, state)) or evaluation
                if run.saves_at(n):
                    run.save(state)
                if run.ends_at(n):
                    return evaluation
    except NonFiniteError as error:
        raise run.with_evidence(error, state) from None
    return evaluation


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
