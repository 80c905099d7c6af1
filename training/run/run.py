"""A run is one folder: its lock, configuration, checkpoints, metrics and records.

Nobody else opens, checks or repairs the files in it.
"""

import contextlib
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import jax

from training.config import Config
from training.data.evaluation_sets import Evaluation, evaluate_sets
from training.files import HUGGINGFACE
from training.log import mlperf, sinks
from training.log.health import NonFiniteError, check_state
from training.log.metrics import (
    METRICS,
    SPIKES,
    evaluations,
    parse_record,
    read_records,
    set_aside_if_damaged,
)
from training.log.report import command_to_continue, introduction, overfitting, summary
from training.log.reporter import RunLog, open_log
from training.memory import Memory
from training.phases import Phase, changed_files, phase_at
from training.plan import Plan
from training.process.environment import input_errors, memory_errors, path_errors, start_jax
from training.process.failure import failing_together
from training.process.interruption import Interrupted, Interruption, RunInterrupted
from training.process.together import ProcessError, gather, is_first_process, join_processes, together
from training.run.checkpoints import Checkpoints
from training.run.checksums import saved_steps, set_aside_damaged
from training.run.frozen import FROZEN, read_frozen
from training.run.lock import LOCK, locked
from training.run.record import CONFIG
from training.run.resume import branch_point
from training.run.setup import check_folder, check_same, description_of, must_agree, open_folder, set_up
from training.sharding import global_batch, process_part
from training.step import TrainState

SHARED = NonFiniteError, ProcessError, RunInterrupted
"""Errors that all processes raise at the same place."""


class Run:
    """An open run: `open` checks and locks its folder, `begin` opens its log.

    Attributes:
      plan: configuration, model, data, mesh and phases.
      checkpoints: the states saved so far, and the loss of each evaluation.
      log: where metrics go; there once the run has begun.
    """

    log: RunLog

    def __init__(
        self,
        plan: Plan,
        folder: "_Folder",
        stream: grain.DatasetIterator,
        checkpoints: Checkpoints,
        interruption: Interruption,
        stack: contextlib.ExitStack,
        began: float,
    ):
        """Takes what `open` has opened; the stack closes the log."""
        self.plan, self.checkpoints = plan, checkpoints
        self._folder, self._stream, self._interruption = folder, stream, interruption
        self._stack, self._began = stack, began
        self._n, self._interrupted = 0, False
        self._resumes = plan.config.resume and checkpoints.latest is not None

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config) -> Iterator["Run"]:
        """Joins the other processes, checks everything, locks the folder and writes config.json.

        Nothing is written before the checks have passed.
        """
        began = time.time()
        if config.distributed:
            with input_errors():
                join_processes()
        with failing_together(*SHARED), contextlib.ExitStack() as stack:
            with input_errors():
                start_jax(config.devices)
                interruption = stack.enter_context(Interruption())
                path = config.folder()
                with together():
                    plan = set_up(config, path)
                    had_folder, data = path.exists(), plan.config.data
                    shard = process_part(plan.mesh, data.batch_size)
                    stream = plan.corpus.batches(data, plan.config.seed, plan.config.steps, shard=shard)
                if config.distributed:
                    check_same(gather(lambda: must_agree(plan, path)))
                folder = _Folder(path, had_folder, plan.config.resume)
                with together():
                    if is_first_process():
                        folder.take(plan, stack)
                folder.notes += set_aside_damaged(path / "checkpoints")
            with path_errors(path), memory_errors(folder.clean_up), jax.set_mesh(plan.mesh):
                with together():
                    if is_first_process():
                        open_folder(plan, path)  # before anything slow: a run killed there can be resumed
                keep, losses = plan.config.keep_checkpoints, evaluations(path)
                with (
                    Checkpoints(path / "checkpoints", keep, losses, folder.check) as checkpoints,
                    failing_together(*SHARED),
                    contextlib.ExitStack() as log,
                ):
                    yield cls(plan, folder, stream, checkpoints, interruption, log, began)

    @property
    def is_new(self) -> bool:
        """Whether the run begins with random weights; a state that is read may be refused."""
        config = self.plan.config
        return not self._resumes and config.init is None and config.branch is None

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without any."""
        return self.checkpoints.latest or 0

    def restore(self, state: TrainState) -> TrainState:
        """Returns the newest saved state, or `state`, with what --init or --branch brings."""
        if self.plan.config.lora is None:
            return self._restored(state)
        with input_errors():
            frozen = read_frozen(self.plan.config, self.plan.model, self._folder.path)
        return self._restored(state)._replace(frozen=frozen)

    def _restored(self, state: TrainState) -> TrainState:
        folder, config = self._folder.path, self.plan.config
        if self._resumes:
            with input_errors():
                return self._whole_state(self.checkpoints, state, folder / "checkpoints")
        if config.resume:
            begins = "where it began" if config.branch else "at step 1"
            self._folder.notes.append(f"no checkpoint in {folder / 'checkpoints'}: beginning {begins}")
        try:
            if config.branch is not None:
                with input_errors():
                    source, step = branch_point(config.branch)
                    with Checkpoints(source / "checkpoints") as checkpoints:
                        found = self._whole_state(checkpoints, state, source, step)
                self._folder.notes.append(f"going on from step {step} of {source}")
                return found
            if config.init is not None and config.lora is None:
                with Checkpoints(config.init / "checkpoints") as checkpoints, input_errors():
                    params = checkpoints.restore_params(self.plan.unfilled(state.params))
                    state = state._replace(params=self.plan.filled(params))
                    check_state(state, config.init)
        except SystemExit:
            if not self.plan.config.resume:
                self._folder.remove_beginning()
            raise
        return state

    def _whole_state(
        self, checkpoints: Checkpoints, like: TrainState, origin: pathlib.Path, step: int | None = None
    ) -> TrainState:
        """Returns a whole saved state, by default the newest, and moves to its place in the data."""
        state, position = checkpoints.restore(self.plan.unfilled(like), step)
        check_state(state, origin)
        if position is not None:
            self._stream.set_state(position)
        return self.plan.filled(state)

    def begin(self, state: TrainState, memory: Memory) -> int:
        """Opens the log after the state's step, which is returned, and introduces the run."""
        plan, folder, self._n = self.plan, self._folder, int(state.step)
        for step in [step for step in self.checkpoints.losses if step > self._n]:
            del self.checkpoints.losses[step]  # its steps will be taken again, and its line is dropped
        self.log = self._stack.enter_context(
            open_log(
                plan,
                folder.path,
                state,
                began=self._began,
                check_place=folder.check,
                description=description_of(plan),
                writes_mllog=plan.config.mlperf.mllog and not self.is_done(self._n),
            )
        )
        self.log.display.line("\n".join([introduction(plan, folder.path, memory), *folder.notes]))
        return self._n

    def phases_from(self, n: int) -> Iterator[Phase]:
        """Yields the phases of the steps after step n, and says when one switches the policy."""
        while n < self.plan.config.last_step and not self.is_done(n):
            phase = phase_at(self.plan.phases, n + 1)
            if n + 1 == phase.first_step > 1:
                self.log.switch(n + 1, phase.policy)
            yield phase
            n = self._last_of(phase)

    def batches(self, phase: Phase) -> Iterator[tuple[int, jax.Array]]:
        """Yields the number and the batch of each step of a phase that is left."""
        while self._n < self._last_of(phase):
            self._n += 1
            yield self._n, global_batch(self.plan.mesh, next(self._stream))

    def phase_of(self, n: int) -> Phase:
        """Returns the phase of step n."""
        return phase_at(self.plan.phases, n)

    def measures_at(self, n: int) -> bool:
        """Returns whether the errors of step n's GEMMs are measured before it."""
        every = self.plan.config.observe.stats_every
        return every is not None and n % every == 0

    def owes_evaluation(self, n: int) -> bool:
        """Returns whether the evaluation after step n is missing because the run was interrupted in it."""
        regular = n % self.plan.config.eval_every == 0 or n == self.plan.config.steps
        return n > 0 and regular and n not in self.checkpoints.losses

    def evaluates_at(self, n: int) -> bool:
        """Returns whether an evaluation follows step n. A background save that failed ends the run here."""
        self.checkpoints.check()
        return self._is_due(n, self.plan.config.eval_every)

    def evaluate(self, n: int, evaluate: Callable[..., dict[str, float]]) -> Evaluation:
        """Records what `evaluate` returns for the batches of every set; nothing if a signal interrupts it."""
        with self.log.pause():
            self.log.evaluation_starts(n)
            try:
                found = evaluate_sets(
                    self.plan.held_out, lambda batches: evaluate(self._interruption.guard(batches))
                )
            except Interrupted:
                self._interrupted = True  # resuming repeats the evaluation
                return {}
            self.log.evaluation(n, found)
            self.checkpoints.losses[n] = found["eval_loss"]
            self.log.evaluation_ends(n, found["eval_loss"], last=self.is_done(n))
            return found

    def saves_at(self, n: int) -> bool:
        """Returns whether step n is saved. All processes ask once a step, and notice signals then."""
        self._interrupted = self._interrupted or self._interruption.requested()
        return self._is_due(n, self.plan.config.checkpoint_every) or self.is_done(n) or self._interrupted

    def save(self, state: TrainState) -> None:
        """Starts saving a state, once the metrics of its steps are on the disk."""
        with self.log.pause():
            self.log.sync()
            self.checkpoints.save(self.plan.unfilled(state), self._stream.get_state())

    def ends_at(self, n: int) -> bool:
        """Returns whether the run ends with step n: the last one, or its target.

        Raises:
          RunInterrupted: a signal ends it; its checkpoint is complete.
        """
        if self.is_done(n):
            self.log.run_ends(n, self.plan.config.target_loss is None or self._is_on_target(n))
        elif self._interrupted:
            self.checkpoints.wait()
            command = command_to_continue(self._folder.path)
            message = f"interrupted after step {n}; continue with: {command}"
            self.log.display.line(message)
            raise RunInterrupted(message)
        return self.is_done(n) or n >= self.plan.config.last_step

    def is_done(self, n: int) -> bool:
        """Returns whether step n is the schedule's last or reached the target, and owes no evaluation."""
        return not self.owes_evaluation(n) and (n >= self.plan.config.steps or self._is_on_target(n))

    def end(self, evaluation: Evaluation) -> Evaluation:
        """Says what was done and what comes next; returns the evaluation."""
        n, path, losses = self._n, self._folder.path, self.checkpoints.losses
        said = [summary(self.plan, path, n, self.is_done(n), evaluation, self.log.step_times)]
        if self.is_done(n) and evaluation:
            said += overfitting(path, losses, n, self.checkpoints.best)
        self.log.display.line("\n".join(said))
        return evaluation

    def with_evidence(self, error: NonFiniteError, state: TrainState) -> NonFiniteError:
        """Saves what repeats a bad step or evaluation; returns the error with the place and advice."""
        self.log.run_ends(error.step, success=False)
        policy, nonfinite = phase_at(self.plan.phases, error.step).policy, self.log.nonfinite
        folder = nonfinite.save_evidence(error.step, f"{error}\npolicy {policy}", error.largest)
        with Checkpoints(folder / "checkpoints") as checkpoints:
            finite = self.plan.unfilled(state)._replace(finite=jax.numpy.array(True))
            checkpoints.save(finite, {"next_index": int(state.step)})
        optimizer = self.plan.config.optimizer
        # Above 1 / lr, a step's decay alone turns the sign of every parameter.
        lower = "--weight-decay" if optimizer.weight_decay * min(optimizer.lr, 1) > 1 else "--lr"
        advice = f"begin a new run with a lower {lower}, a larger --eps or another --policy, "
        advice += "from an earlier state with --init"
        saved = "The state that was evaluated is"
        if error.largest is not None:
            saved = "The last finite state and the step's batch are"
            if not nonfinite.skips:
                advice += f", or continue with {command_to_continue(self._folder.path)} --on-nonfinite skip"
        return NonFiniteError(
            f"{error}, policy {policy}. {saved} in {folder}; {advice}", error.step, error.largest
        )

    def _is_on_target(self, n: int) -> bool:
        target = self.plan.config.target_loss
        return target is not None and self.checkpoints.losses.get(n, math.inf) <= target

    def _is_due(self, n: int, every: int) -> bool:
        """Returns whether a periodic action is due after step n; the last step makes all due."""
        return n % every == 0 or n == self.plan.config.last_step

    def _last_of(self, phase: Phase) -> int:
        later = (p.first_step - 1 for p in self.plan.phases if p.first_step > phase.first_step)
        return min(next(later, self.plan.config.steps), self.plan.config.last_step)


class _Folder:
    """The folder of a run: taken at the start, and cleaned up if no step was taken.

    Attributes:
      check: raises FolderLostError once the folder is no longer this run's; nothing in other processes.
      notes: messages about what was found there.
    """

    def __init__(self, path: pathlib.Path, had_folder: bool, resume: bool):
        self.path, self._had_folder, self._resume = path, had_folder, resume
        self.check: Callable[[], None] = lambda: None
        self.notes: list[str] = []

    def take(self, plan: Plan, stack: contextlib.ExitStack) -> None:
        """Locks the folder until the stack closes, and sets damaged records aside."""
        self.check = stack.enter_context(locked(self.path))
        check_folder(self._resume, self.path)  # once more: another run may have begun there meanwhile
        parsers: Mapping[str, Callable[[bytes], Any]]
        parsers = {METRICS: parse_record, SPIKES: parse_record, mlperf.MLLOG: mlperf.parse_event}
        for name, parse in parsers.items():
            self.notes += set_aside_if_damaged(self.path / name, parse)
        if self._resume:
            self.notes += changed_files(plan.policy_files)

    def clean_up(self) -> None:
        """Removes what a new run has written if it has no checkpoint and no step on record."""
        trained = saved_steps(self.path / "checkpoints") or any("loss" in r for r in read_records(self.path))
        if not (self._resume or trained):
            self.remove_beginning()

    def remove_beginning(self) -> None:
        """Removes what a run that ends before its first step has written, and nothing else."""
        if not is_first_process():
            return
        for name in (HUGGINGFACE, FROZEN, "profile", "wandb"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        names = CONFIG, LOCK, METRICS, SPIKES, mlperf.MLLOG, sinks.ID_FILE
        for path in (*(self.path / name for name in names), *self.path.glob(f"{sinks.PREFIX}*")):
            path.unlink(missing_ok=True)
        for path in (self.path / "checkpoints", *([] if self._had_folder else [self.path])):
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
