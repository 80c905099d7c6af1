"""The training loop: steps, evaluations and checkpoints, until the run's end, its target or an interruption.

What it runs is given to it: programs by phase, a state, a stream of batches. It knows nothing of the model.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grain
import jax
import numpy as np

from mxjax.layer_stats import by_layer
from training.anomalies import Watch
from training.checkpoint.checkpoints import Checkpoints
from training.config import Config
from training.interruption import Interrupted, Interruption, RunInterrupted
from training.mesh import global_batch
from training.metrics import Display, MetricsLog, NonFiniteError, StepReporter, in_words
from training.mllog import MLPerfLog
from training.profiling import StepTracer
from training.progress import (
    command_to_continue,
    is_done,
    is_on_target,
    owes_evaluation,
    reaches_target,
)
from training.schedule import Phase, phase_at
from training.step import TrainState, evaluate


class Programs(NamedTuple):
    """What is compiled for the policies of a phase, by `make_train_step`, `make_eval_step` (for the mesh, by
    `training.mesh.on_mesh`) and `make_layer_stats`."""

    train_step: Callable
    eval_step: Callable
    layer_stats: Callable


class Records(NamedTuple):
    """Where a run's numbers go. Each is a context manager."""

    log: MetricsLog
    display: Display
    tracer: StepTracer
    mllog: MLPerfLog
    watch: Watch


@dataclasses.dataclass
class Loop:
    """The steps of a run that remain after its state's.

    Attributes:
      folder: the run's, whose metrics.jsonl the log has opened.
      make_programs: returns the programs of a phase; each compiles when it is first called.
      state: the newest; each step donates the one before.
      stream: of the batches after the state's step, of this process's rows.
      held_out: the batches of an evaluation, whole in every process.
      reporter: writes to the records.
    """

    config: Config
    folder: pathlib.Path
    mesh: jax.sharding.Mesh
    phases: tuple[Phase, ...]
    make_programs: Callable[[Phase], Programs]
    state: TrainState
    stream: grain.DatasetIterator
    held_out: Sequence[np.ndarray]
    checkpoints: Checkpoints
    records: Records
    reporter: StepReporter
    interruption: Interruption

    def __post_init__(self):
        self._key = jax.random.key(self.config.seed)
        self._step = int(self.state.step)  # of the last step taken
        self._begin_phase(self._step)  # whose evaluation may be owed; the next may begin with the next step
        self._owes_evaluation = owes_evaluation(self.config, self.folder, self._step)
        self._done = is_done(self.config, self.folder, self._step)
        self._interrupted = False
        self._evaluation: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Runs the steps that remain; returns the last evaluation, or nothing if there was none to make.

        Raises:
          RunInterrupted: SIGINT or SIGTERM has ended the run after a checkpoint; the message says how to
            go on.
          NonFiniteError: a loss or gradient was NaN or infinite; what is needed to repeat it is saved.
          CheckpointError: a checkpoint could not be saved.
        """
        try:
            while self._owes_evaluation or not (self._done or self._step >= self.config.last_step):
                if not self._owes_evaluation:
                    self._train()
                self.checkpoints.check()
                if self._owes_evaluation or self._is_due(self.config.eval_every):
                    self._evaluate()
                self._interrupted = self._interrupted or self.interruption.requested()
                if self._is_due(self.config.checkpoint_every) or self._done or self._interrupted:
                    self._save()
                self._end_if_it_is_time()
        except NonFiniteError as error:
            self.records.mllog.run_ends(self._sequences(error.step), success=False)
            raise self._with_evidence(error) from None
        return self._evaluation

    @property
    def step(self) -> int:
        """The last step taken, by this loop or before it."""
        return self._step

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step, or reached its target, with nothing owed."""
        return self._done

    def _train(self) -> None:
        """Takes a step, and reports the one before."""
        self._step += 1
        switches = self._step > 1 and self._step == phase_at(self.phases, self._step).first_step
        if switches:
            self._switch_phase()
        batch = global_batch(self.mesh, next(self.stream))
        every = self.config.observe.stats_every
        if every is not None and self._step % every == 0:
            self._measure_layers(batch)
        tracer, pause = self.records.tracer, self.reporter.pause
        tracer.before(self._step, pause)
        self.state, metrics = tracer.run(self._step, self._programs.train_step, self.state, batch, self._key)
        if switches:
            self.reporter.restart_clock()  # compiled by now
        self.reporter.step(self._step, metrics)
        tracer.after(self._step, self.state, pause)

    def _begin_phase(self, step: int) -> None:
        self._phase = phase_at(self.phases, step)
        self._programs = self.make_programs(self._phase)

    def _switch_phase(self) -> None:
        """Goes on in the policies of the phase that begins with this step, and says so."""
        self.reporter.flush()
        self._begin_phase(self._step)
        self.records.log.write(step=self._step, policy=self._phase.policy)
        self.records.display.line(
            f"step {self._step:6d}  policy {self._phase.policy} from here on, which is compiled first"
        )

    def _measure_layers(self, batch: jax.Array) -> None:
        """Records the errors of each layer's GEMMs in the step to come."""
        with self.reporter.pause():
            measures = by_layer(self._programs.layer_stats(self.state.params, batch, self.state.step))
            self.records.log.write(step=self._step, policy=self._phase.policy, layers=measures)

    def _evaluate(self) -> None:
        """Evaluates, and finds out whether the run is done; or is interrupted, and leaves it to the next."""
        with self.reporter.pause():
            self.records.mllog.evaluation_starts(self._sequences(self._step))
            batches = self.interruption.guard(self.held_out)
            try:
                self._evaluation = evaluate(self._programs.eval_step, self.state.params, batches)
            except Interrupted:
                self._interrupted = True
            else:
                self._record_evaluation()
            self._owes_evaluation = False

    def _record_evaluation(self) -> None:
        step, loss = self._step, self._evaluation["eval_loss"]
        self.records.log.write(step=step, tokens=step * self.config.data.tokens_a_step, **self._evaluation)
        self.records.display.line(f"step {step:6d}  {in_words(self._evaluation)}")
        if not math.isfinite(loss):
            raise NonFiniteError(f"eval loss {loss} at step {step}", step)
        self.checkpoints.losses[step] = loss
        self._done = step >= self.config.steps or reaches_target(self.config, loss)
        self.records.mllog.evaluation_ends(self._sequences(step), loss, last=self._done)

    def _save(self) -> None:
        with self.reporter.pause():
            self.checkpoints.save(self.state, self.stream.get_state())

    def _end_if_it_is_time(self) -> None:
        """Says that the run is done, or ends the program if it was interrupted before."""
        if self._done:
            success = is_on_target(self.config, self.folder, self._step)
            self.records.mllog.run_ends(self._sequences(self._step), success)
        elif self._interrupted:
            self.checkpoints.wait()
            said = f"interrupted after step {self._step}; continue with: {command_to_continue(self.folder)}"
            self.records.display.line(said)
            raise RunInterrupted(said)

    def _with_evidence(self, error: NonFiniteError) -> NonFiniteError:
        """Saves what is needed to repeat a step or evaluation that was not finite; returns the error that
        says where."""
        policy, watch = phase_at(self.phases, error.step).policy, self.records.watch
        folder = watch.save_evidence(error.step, f"{error}\npolicy {policy}", error.amax)
        with Checkpoints(folder / "checkpoints") as checkpoints:
            finite = self.state._replace(finite=jax.numpy.array(True))
            checkpoints.save(finite, {"next_index": int(self.state.step)})
        advice = "begin a new run with a lower --lr or another --policy, from an earlier state with --init"
        saved = "The state that was evaluated is"
        if error.amax is not None:
            saved = "The last finite state and the step's batch are"
            if not watch.skips:
                advice += f", or continue with {command_to_continue(self.folder)} --on-nonfinite skip"
        return NonFiniteError(
            f"{error}, policy {policy}. {saved} in {folder}; {advice}", error.step, error.amax
        )

    def _is_due(self, every: int) -> bool:
        """Returns whether what happens every so many steps does after this one; it does after the last."""
        return self._step % every == 0 or self._step == self.config.last_step

    def _sequences(self, step: int) -> int:
        """Returns how many sequences have been trained on after a step."""
        return step * self.config.data.batch_size
