"""The compiled programs of a run, and the loop of steps, evaluations and checkpoints.

The loop ends at the last step, at the target or at an interruption.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import grain
import jax
import optax

from models import llama
from models.block import LINEAR_LAYERS
from models.sharding import batch_parts_of
from mxjax.recipes import get_policy
from mxjax.runtime.devices import on_gpu
from mxjax.stats.layers import by_layer, empty_slots, make_layer_stats
from training.log.health import NonFiniteError
from training.log.metrics import in_words, is_done, is_on_target, owes_evaluation, reaches_target
from training.log.reporter import Records
from training.optimizer import keeps_finite_of, learning_rate
from training.phases import Phase, phase_at
from training.process.interruption import Interrupted, Interruption, RunInterrupted
from training.run.checkpoints import Checkpoints
from training.run.resume import command_to_continue
from training.run.run import Run
from training.sharding import abstract_batch, compiler_options, global_batch, on_mesh
from training.step import Loss, Losses, ScheduledStep, TrainState, evaluate, make_eval_step, make_train_step


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


@dataclasses.dataclass
class Loop:
    """The remaining steps of a run.

    Attributes:
      run: configuration, mesh, data and phases.
      make_programs: returns the programs of a phase.
      state: the newest state; each step donates the one before.
      stream: this process's rows of the batches after the state's step.
      checkpoints: where states are saved.
      records: where metrics go.
      interruption: tells when to save and end.
    """

    run: Run
    make_programs: Callable[[Phase], Programs]
    state: TrainState
    stream: grain.DatasetIterator
    checkpoints: Checkpoints
    records: Records
    interruption: Interruption

    def __post_init__(self):
        self.config, self._folder = self.run.config, self.run.folder
        self._key = jax.random.key(self.config.seed)
        self._step = int(self.state.step)
        self._begin_phase(self._step)  # an owed evaluation belongs to the last step's phase
        self._owes_evaluation = owes_evaluation(self.config, self._folder, self._step)
        self._done = is_done(self.config, self._folder, self._step)
        self._interrupted = False
        self._evaluation: dict[str, float] = {}

    def train(self) -> dict[str, float]:
        """Takes the remaining steps; returns the last evaluation, or an empty dict if there was none.

        Raises:
          RunInterrupted: SIGINT or SIGTERM ended the run after a checkpoint; the message says how to resume.
          NonFiniteError: a loss, gradient or update was NaN or infinite; the evidence is saved.
          CheckpointError: a checkpoint could not be saved.
          FolderLostError: the run's folder was moved, removed or replaced.
        """
        try:
            while self._owes_evaluation or not (self._done or self._step >= self.config.last_step):
                if not self._owes_evaluation:
                    self._take_step()
                self.checkpoints.check()
                if self._owes_evaluation or self._is_due(self.config.eval_every):
                    self._evaluate()
                self._interrupted = self._interrupted or self.interruption.requested()
                if self._is_due(self.config.checkpoint_every) or self._done or self._interrupted:
                    self._save()
                self._end_if_done_or_interrupted()
        except NonFiniteError as error:
            self.records.mlperf_log.run_ends(self._sequences(error.step), success=False)
            raise self._with_evidence(error) from None
        return self._evaluation

    @property
    def step(self) -> int:
        """The last step taken, by this loop or before it."""
        return self._step

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step or reached its target, and owes no evaluation."""
        return self._done

    def _take_step(self) -> None:
        """Takes a step and reports the one before it."""
        self._step += 1
        switches = self._step > 1 and self._step == phase_at(self.run.phases, self._step).first_step
        if switches:
            self._switch_phase()
        batch = global_batch(self.run.mesh, next(self.stream))
        every = self.config.observe.stats_every
        if every is not None and self._step % every == 0:
            self._measure_layers(batch)
        tracer, reporter = self.records.tracer, self.records.reporter
        tracer.before(self._step, reporter.pause)
        self.state, metrics = tracer.run(self._step, self._programs.train_step, self.state, batch, self._key)
        if switches:
            reporter.restart_clock()  # the new program is compiled by now
        reporter.step(self._step, metrics)
        tracer.after(self._step, self.state, reporter.pause)

    def _begin_phase(self, step: int) -> None:
        self._phase = phase_at(self.run.phases, step)
        self._programs = self.make_programs(self._phase)

    def _switch_phase(self) -> None:
        """Switches to the policies of the phase that begins with this step, and says so."""
        self.records.reporter.flush()
        self._begin_phase(self._step)
        self.records.log.write(step=self._step, policy=self._phase.policy)
        self.records.display.line(
            f"step {self._step:6d}  policy {self._phase.policy} from here on, compiling it first"
        )

    def _measure_layers(self, batch: jax.Array) -> None:
        """Records the error of each layer's GEMMs in the coming step."""
        with self.records.reporter.pause():
            measures = by_layer(self._programs.layer_stats(self.state.params, batch, self.state.step))
            self.records.log.write(step=self._step, policy=self._phase.policy, layers=measures)

    def _evaluate(self) -> None:
        """Evaluates and decides whether the run is done; an interrupted evaluation is repeated on resume."""
        with self.records.reporter.pause():
            self.records.mlperf_log.evaluation_starts(self._sequences(self._step))
            batches = self.interruption.guard(self.run.held_out)
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
        self.records.mlperf_log.evaluation_ends(self._sequences(step), loss, last=self._done)

    def _save(self) -> None:
        with self.records.reporter.pause():
            self.records.log.sync()  # a checkpoint's steps are on the disk before it is
            self.checkpoints.save(self.run.unfilled(self.state), self.stream.get_state())

    def _end_if_done_or_interrupted(self) -> None:
        """Logs the end of a run that is done; ends the program if the run was interrupted."""
        if self._done:
            success = is_on_target(self.config, self._folder, self._step)
            self.records.mlperf_log.run_ends(self._sequences(self._step), success)
        elif self._interrupted:
            self.checkpoints.wait()
            command = command_to_continue(self._folder)
            message = f"interrupted after step {self._step}; continue with: {command}"
            self.records.display.line(message)
            raise RunInterrupted(message)

    def _with_evidence(self, error: NonFiniteError) -> NonFiniteError:
        """Saves what repeats a bad step or evaluation; returns the error with the place and advice."""
        policy, nonfinite = phase_at(self.run.phases, error.step).policy, self.records.nonfinite
        folder = nonfinite.save_evidence(error.step, f"{error}\npolicy {policy}", error.largest)
        with Checkpoints(folder / "checkpoints") as checkpoints:
            finite = self.run.unfilled(self.state)._replace(finite=jax.numpy.array(True))
            checkpoints.save(finite, {"next_index": int(self.state.step)})
        advice = "begin a new run with a lower --lr, a larger --eps or another --policy, "
        advice += "from an earlier state with --init"
        saved = "The state that was evaluated is"
        if error.largest is not None:
            saved = "The last finite state and the step's batch are"
            if not nonfinite.skips:
                advice += f", or continue with {command_to_continue(self._folder)} --on-nonfinite skip"
        return NonFiniteError(
            f"{error}, policy {policy}. {saved} in {folder}; {advice}", error.step, error.largest
        )

    def _is_due(self, every: int) -> bool:
        """Returns whether a periodic action is due after this step; the last step makes all due."""
        return self._step % every == 0 or self._step == self.config.last_step

    def _sequences(self, step: int) -> int:
        """Returns the number of sequences trained on after a step."""
        return step * self.config.data.batch_size
