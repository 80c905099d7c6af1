"""Step metrics, fetched one step late: while step n runs, step n - 1 is reported."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from training import throughput
from training.device_memory import memory_use
from training.display import Display
from training.metrics import MetricsLog
from training.nonfinite import NonFiniteGuard
from training.spikes import SpikeDetector
from training.step import StepMetrics

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
