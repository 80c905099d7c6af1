"""The records of a run, written step by step: metrics, terminal, traces, MLPerf's log, evidence of bad steps.

Step metrics are fetched one step late: while step n runs, step n - 1 is reported.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from models.configs import to_dict
from training.log import throughput
from training.log.display import Display
from training.log.health import NonFiniteGuard, SpikeDetector
from training.log.metrics import FILE as METRICS
from training.log.metrics import MetricsLog, Sink, is_done
from training.log.mlperf import FILE as MLLOG
from training.log.mlperf import MLPerfLog
from training.log.profiling import StepTracer
from training.log.sinks import EventFiles, WandbRun
from training.memory import memory_use
from training.optimizer import learning_rate
from training.process.together import is_first_process, together
from training.run.record import to_json
from training.run.run import Run, mlperf_settings
from training.step import StepMetrics, TrainState, layer_names

_RECENT_STEPS = 10  # averaged for the speed


class StepReporter:
    """Reports a step after the next one has been dispatched, so that the device never waits."""

    def __init__(
        self,
        log: MetricsLog,
        display: Display,
        nonfinite: NonFiniteGuard,
        spikes: SpikeDetector,
        tokens_a_step: int,
        flops_a_step: float,
        learning_rate: Callable[[int], Any],
    ):
        """Reports to the first four.

        Args:
          log, display, nonfinite, spikes: where the metrics go.
          tokens_a_step: tokens of a step, over all devices.
          flops_a_step: model FLOPs of a step, over all devices.
          learning_rate: a function of the number of earlier updates.
        """
        self._log, self._display, self._nonfinite, self._spikes = log, display, nonfinite, spikes
        self._tokens_a_step, self._flops_a_step = tokens_a_step, flops_a_step
        self._learning_rate = learning_rate
        self._pending: tuple[int, StepMetrics] | None = None
        self._clock = time.monotonic()
        self.step_times: list[float] = []

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step just dispatched and reports the step before it.

        Raises:
          NonFiniteError: the loss or gradient of the step before was not finite; see `NonFiniteGuard.check`.
        """
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Waits for the last step taken and reports it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "lr": float(self._learning_rate(step - 1 - int(metrics.skipped))),
        }
        self.step_times.append(time.monotonic() - self._clock)
        self._clock = time.monotonic()
        recent = self.step_times[max(1, len(self.step_times) - _RECENT_STEPS) :]  # the first one compiles
        mean = sum(recent or self.step_times) / max(len(recent), 1)
        values |= throughput.speed(self._tokens_a_step, self._flops_a_step, mean, jax.devices())
        values |= {"step_s": self.step_times[-1]} | memory_use(jax.local_devices()[0])
        skipped = {"skipped": True} if self._nonfinite.skips and not metrics.finite else {}
        self._log.write(step=step, tokens=step * self._tokens_a_step, **values, **skipped)
        self._display.step(step, values | ({"mean_step_s": mean} if recent else {}))
        self._nonfinite.check(step, values["loss"], values["grad_norm"], metrics)
        if metrics.finite:
            self._spikes.check(step, values["loss"])

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Reports the last step taken; the block's time does not count for the next step."""
        self.flush()
        yield
        self.restart_clock()

    def restart_clock(self) -> None:
        """Starts the next step's time now."""
        self._clock = time.monotonic()


class Records(NamedTuple):
    """Everything that a run writes to; `open_records` closes it."""

    log: MetricsLog
    display: Display
    tracer: StepTracer
    mlperf_log: MLPerfLog
    nonfinite: NonFiniteGuard
    reporter: StepReporter


@contextlib.contextmanager
def open_records(run: Run, state: TrainState, began: float, check_place: Callable[[], None]):
    """Yields the records, continued after the state's step, and closes them; the first process alone writes.

    Args:
      run: the run.
      state: the state to continue from.
      began: the time, in seconds since 1970, at which the program started.
      check_place: raises an error if the folder is no longer this run's; called before each line.
    """
    config, start, writes = run.config, int(state.step), is_first_process()
    path = run.folder / METRICS
    with contextlib.ExitStack() as stack:
        with together():  # the others read metrics.jsonl, so the first trims it before
            log = MetricsLog(None)
            if writes:
                log = MetricsLog(path, start, _sinks(run, start), check_place)
            stack.enter_context(log)
        display = stack.enter_context(Display(config.steps, start, config.log_every, quiet=not writes))
        tracer = stack.enter_context(StepTracer(config.observe.profiled_steps, run.folder / "profile"))
        with together():
            wanted = config.mlperf.mllog and writes and not is_done(config, run.folder, start)
            mlperf_path = run.folder / MLLOG if wanted else None
            sequences = start * config.data.batch_size
            mlperf_log = stack.enter_context(MLPerfLog(mlperf_path, mlperf_settings(run), sequences, began))
            show, factor, skips = display.line, config.spike_factor, config.on_nonfinite == "skip"
            spikes = stack.enter_context(SpikeDetector(run.folder, factor, run.batch_of, show, start))
            names = layer_names(state.params)
            nonfinite = NonFiniteGuard(run.folder, skips, run.batch_of, names, show)
        data = config.data
        reporter = StepReporter(
            log,
            display,
            nonfinite,
            spikes,
            data.tokens_a_step,
            data.tokens_a_step * run.model.flops_per_token(data.seq_len),
            learning_rate(config.optimizer, config.steps, np),  # on the host: it must not wait for the device
        )
        yield Records(log, display, tracer, mlperf_log, nonfinite, reporter)


def _sinks(run: Run, start: int) -> list[Sink]:
    """Returns where metrics go besides metrics.jsonl.

    W&B, which fails with a warning only, comes last: an error of the others leaves nothing open.
    """
    observe, sinks = run.config.observe, list[Sink]()
    if observe.tensorboard:
        sinks.append(EventFiles(run.folder, start))
    if observe.wandb:
        values = {"config": to_json(run.config), "model": to_dict(run.model), "data": run.corpus.facts}
        sinks.append(WandbRun(run.folder, values))
    return sinks
