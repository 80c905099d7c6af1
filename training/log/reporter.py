"""The records of a run: metrics, terminal, traces, MLPerf's log, evidence of bad steps."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from models.block import block_numbers
from models.experts.layer import summary
from training.config import ObserveConfig
from training.data.evaluation_sets import losses_of
from training.log import throughput
from training.log.display import Display
from training.log.health import NonFiniteError, NonFiniteGuard
from training.log.metrics import METRICS, MetricsLog, Sink, in_words
from training.log.mlperf import MLLOG, MLPerfLog, settings_of
from training.log.sinks import EventFiles, WandbRun
from training.log.spikes import SpikeDetector
from training.memory import memory_use
from training.optimizer.schedule import learning_rate
from training.plan import Plan
from training.process.together import is_first_process, together
from training.step import StepMetrics, TrainState, layer_names

_RECENT_STEPS = 10  # averaged for the speed


class Work(NamedTuple):
    """The work of each step.

    Attributes:
      sequences, tokens, flops: of a step, over all devices.
      learning_rate: a function of the number of earlier updates.
      details: returns more numbers for the log from a step's `aux`, which has its cross-entropy.
    """

    sequences: int
    tokens: int
    flops: float
    learning_rate: Callable[[int], Any]
    details: Callable[[Any], Mapping[str, float]] = lambda aux: {}


def work_of(plan: Plan) -> Work:
    """Returns the work of a run's steps."""
    config, experts = plan.config, plan.model.experts
    tokens = config.data.tokens_a_step
    flops = tokens * plan.model.flops_per_token(config.data.seq_len, config.lora is not None)
    # On the host: it must not wait for the device.
    schedule = learning_rate(config.optimizer, config.steps, np)
    work = Work(config.data.batch_size, tokens, flops, schedule)
    return work if experts is None else work._replace(details=lambda aux: summary(experts, aux.routing))


class RunLog:
    """Everything that a run reports; `open_log` opens it.

    A step is reported after the next one has been dispatched, so that the device never waits.
    """

    def __init__(
        self,
        log: MetricsLog,
        display: Display,
        nonfinite: NonFiniteGuard,
        spikes: SpikeDetector,
        mlperf: MLPerfLog,
        work: Work,
        traces: pathlib.Path,
        traced_steps: range,
    ):
        """Reports the work of steps to the first five, and traces some of them into a folder."""
        self.display, self.nonfinite, self.step_times = display, nonfinite, list[float]()
        self._log, self._spikes, self._mlperf, self._work = log, spikes, mlperf, work
        self._traces, self._traced_steps, self._tracing = traces, traced_steps, False
        self._pending: tuple[int, StepMetrics] | None = None
        self._clock = time.monotonic()
        self._switched = False

    def switch(self, step: int, policy: str) -> None:
        """Says that a step begins a phase, whose programs compile in that step."""
        self.flush()
        self._log.write(step=step, policy=policy)
        self.display.line(f"step {step:6d}  policy {policy} from here on, compiling it first")
        self._switched = True

    def layers(self, step: int, policy: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Records what `measure` returns: the error of each layer's GEMMs in the coming step."""
        with self.pause():
            self._log.write(step=step, policy=policy, layers=measure())

    def traced(self, step: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns function(*arguments), the work of a step, and traces it if --profile says so."""
        if step in self._traced_steps and not self._tracing:
            with self.pause():
                jax.profiler.start_trace(self._traces)
                self._tracing = True
        annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        with annotation if self._tracing else contextlib.nullcontext():
            result = function(*arguments)
        if self._switched:
            self._clock = time.monotonic()  # the new program is compiled by now
            self._switched = False
        return result

    def step(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
        """Takes the metrics of a step just dispatched and reports the step before it.

        Raises:
          NonFiniteError: the loss or gradient of the step before was not finite; see `NonFiniteGuard.check`.
        """
        self.flush()
        self._pending = (step, metrics)
        if self._tracing and step == self._traced_steps[-1]:
            with self.pause():
                jax.block_until_ready(state)
                self.stop_trace()

    def stop_trace(self) -> None:
        """Writes the trace if one has begun."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def flush(self) -> None:
        """Waits for the last step taken and reports it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        loss = metrics.loss if metrics.aux is None else metrics.aux.cross_entropy
        values = {
            "loss": float(loss),
            "grad_norm": float(metrics.grad_norm),
            "lr": float(self._work.learning_rate(step - 1 - int(metrics.skipped))),
        }
        self.step_times.append(time.monotonic() - self._clock)
        self._clock = time.monotonic()
        recent = self.step_times[max(1, len(self.step_times) - _RECENT_STEPS) :]  # the first one compiles
        mean = sum(recent or self.step_times) / max(len(recent), 1)
        values |= throughput.speed(self._work.tokens, self._work.flops, mean, jax.devices())
        values |= {"step_s": self.step_times[-1]} | memory_use(jax.local_devices()[0])
        skipped = {"skipped": True} if self.nonfinite.skips and not metrics.finite else {}
        values_and_details = values | dict(self._work.details(metrics.aux)) | skipped
        self._log.write(step=step, tokens=step * self._work.tokens, **values_and_details)
        self.display.step(step, values | ({"mean_step_s": mean} if recent else {}))
        self.nonfinite.check(step, values["loss"], values["grad_norm"], metrics)
        if metrics.finite:
            self._spikes.check(step, values["loss"], values["grad_norm"])

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Reports the last step taken; the block's time does not count for the next step."""
        self.flush()
        yield
        self._clock = time.monotonic()

    def evaluation_starts(self, step: int) -> None:
        """Says that training pauses for an evaluation."""
        self._mlperf.evaluation_starts(step * self._work.sequences)

    def evaluation(self, step: int, found: Mapping[str, Any]) -> None:
        """Records an evaluation.

        Raises:
          NonFiniteError: the loss of a set is NaN or infinite.
        """
        self._log.write(step=step, tokens=step * self._work.tokens, **found)
        self.display.line(f"step {step:6d}  {in_words(found)}")
        for name, loss in losses_of(found).items():
            if not math.isfinite(loss):
                raise NonFiniteError(f"eval loss {loss}{f' on {name}' if name else ''} at step {step}", step)

    def evaluation_ends(self, step: int, loss: float, last: bool) -> None:
        """Says that training continues after an evaluation, unless it was the last."""
        self._mlperf.evaluation_ends(step * self._work.sequences, loss, last=last)

    def run_ends(self, step: int, success: bool) -> None:
        """Says in MLPerf's log that the run has ended, and whether it reached its target."""
        self._mlperf.run_ends(step * self._work.sequences, success)

    def sync(self) -> None:
        """Waits until every line of metrics.jsonl is on the disk."""
        self._log.sync()


@contextlib.contextmanager
def open_log(
    plan: Plan,
    folder: pathlib.Path,
    state: TrainState,
    *,
    began: float,
    check_place: Callable[[], None],
    description: Mapping[str, Any],
    writes_mllog: bool,
) -> Iterator[RunLog]:
    """Yields the log, continued after the state's step, and closes it; the first process alone writes.

    Args:
      began: the time, in seconds since 1970, at which the program started.
      check_place: raises an error if the folder is no longer this run's; called before each line.
      description: the values of config.json, for W&B.
    """
    config, start, writes, work = plan.config, int(state.step), is_first_process(), work_of(plan)
    with contextlib.ExitStack() as stack:
        with together():  # the others read metrics.jsonl, so the first trims it before
            log = MetricsLog(None)
            if writes:
                sinks = _sinks(config.observe, folder, start, description)
                log = MetricsLog(folder / METRICS, start, sinks, check_place)
            stack.enter_context(log)
        display = stack.enter_context(Display(config.steps, start, config.log_every, quiet=not writes))
        with together():
            path, sequences = folder / MLLOG if writes_mllog and writes else None, start * work.sequences
            mlperf = stack.enter_context(MLPerfLog(path, settings_of(plan), sequences, began))
            show, factor, skips = display.line, config.spike_factor, config.on_nonfinite == "skip"
            spikes = stack.enter_context(SpikeDetector(folder, factor, plan.batch_of, show, start))
            names = layer_names(state.params, block_numbers(plan.model))
            nonfinite = NonFiniteGuard(folder, skips, plan.batch_of, names, show)
        traced = config.observe.profiled_steps
        run_log = RunLog(log, display, nonfinite, spikes, mlperf, work, folder / "profile", traced)
        stack.callback(run_log.stop_trace)
        yield run_log


def _sinks(
    observe: ObserveConfig, folder: pathlib.Path, start: int, description: Mapping[str, Any]
) -> list[Sink]:
    """Returns where metrics go besides metrics.jsonl.

    W&B, which fails with a warning only, comes last: an error of the others leaves nothing open.
    """
    sinks = list[Sink]()
    if observe.tensorboard:
        sinks.append(EventFiles(folder, start))
    if observe.wandb:
        sinks.append(WandbRun(folder, {name: description[name] for name in ("config", "model", "data")}))
    return sinks
