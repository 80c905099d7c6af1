"""Spikes: steps whose loss or gradient norm stands out; spikes.jsonl keeps their batches.

OLMo-core's SkipStepOptimizer takes 6 standard deviations above the mean of the last 128 steps for an outlier.
Here medians stand for both, so that a spike does not hide the next one, and the deviation is from differences
between neighbours, so that the fall of a young run hides none. PaLM (arXiv 2204.02311, section 5.1) restarted
before a spike without its batches.
"""

import collections
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from training.log.metrics import SPIKES, MetricsLog, read_records
from training.process.together import is_first_process

RECENT, FEWEST = 100, 20
"""Steps compared with, and how many of them are needed."""
DEVIATIONS = 6.0
"""A loss or gradient norm this many deviations above the median is a spike."""
_NORMAL = 1.4826  # standard deviation of normal numbers over the median of their magnitudes
_LOSS_SPREAD = 0.005  # smallest deviation of a loss, of its median: no spike is less than 3 % above it
_NORM_SPREAD = math.log(2) / DEVIATIONS  # and of a norm's logarithm: no spike is less than twice the median


class Spike(NamedTuple):
    """A step that stands out.

    Attributes:
      of: what stands out: "loss", "grad_norm" or both.
      loss_median, grad_norm_median: medians of the last RECENT steps.
      loss_deviations, grad_norm_deviations: distances from them, in deviations; of the norm's logarithm.
    """

    step: int
    of: tuple[str, ...]
    loss: float
    loss_median: float
    loss_deviations: float
    grad_norm: float
    grad_norm_median: float
    grad_norm_deviations: float


class RecentSteps:
    """The last steps, with which the next one is compared."""

    def __init__(self):
        self._losses: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._norms: collections.deque[float] = collections.deque(maxlen=RECENT)

    @property
    def loss_median(self) -> float:
        """The median of the losses; NaN while they are fewer than FEWEST."""
        return statistics.median(self._losses) if len(self._losses) >= FEWEST else math.nan

    def add(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Takes a step; returns it if it stands out from those before. One that is not finite is left out."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        found = self._compare(step, loss, grad_norm) if len(self._losses) >= FEWEST else None
        self._losses.append(loss)
        self._norms.append(grad_norm)
        return found

    def _compare(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        median = statistics.median(self._losses)
        of_loss = (loss - median) / max(_deviation(self._losses), _LOSS_SPREAD * abs(median))
        logs = [_log(norm) for norm in self._norms]
        of_norm = (_log(grad_norm) - statistics.median(logs)) / max(_deviation(logs), _NORM_SPREAD)
        distances = {"loss": of_loss, "grad_norm": of_norm}
        if of := tuple(name for name, distance in distances.items() if distance > DEVIATIONS):
            return Spike(step, of, loss, median, of_loss, grad_norm, statistics.median(self._norms), of_norm)
        return None


def _deviation(values: Iterable[float]) -> float:
    """Returns the standard deviation of the noise of a series, whatever its trend.

    It is that of normal numbers whose differences have the same median magnitude.
    """
    differences = (abs(b - a) for a, b in itertools.pairwise(values))
    return _NORMAL / math.sqrt(2) * statistics.median(differences)


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def find_spikes(records: Iterable[Mapping[str, Any]]) -> list[Spike]:
    """Returns the steps of a run's metrics.jsonl that stand out from those before them."""
    recent = RecentSteps()
    found = (recent.add(*values) for values in _steps(records))
    return [spike for spike in found if spike is not None]


def _steps(records: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, float, float]]:
    """Yields step, loss and gradient norm of every step that was not skipped."""
    for record in records:
        if "loss" in record and not record.get("skipped"):
            yield record["step"], record["loss"], record.get("grad_norm", math.nan)


class SpikeDetector:
    """Compares each step with the recent ones and writes spikes to spikes.jsonl. A context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        factor: float | None,
        batch_of: Callable[[int], tuple[np.ndarray, Mapping[str, Any]]],
        show: Callable[[str], None],
        start: int,
    ):
        """Continues the run in `folder`, whose metrics.jsonl holds the recent steps.

        Args:
          factor: instead, a loss above this multiple of the recent median is a spike; infinity reports none.
          batch_of: returns the batch of a step and its origin in the data.
          start: the last step taken.
        """
        self._factor, self._batch_of, self._show = factor, batch_of, show
        self._recent = RecentSteps()
        for values in _steps(read_records(folder)):
            self._recent.add(*values)
        path = folder / SPIKES if is_first_process() else None  # one file for all processes
        self._log = MetricsLog(path, keep_steps=start)

    def __enter__(self) -> "SpikeDetector":
        return self

    def __exit__(self, *exception) -> None:
        self._log.__exit__(*exception)

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Reports a step if it is a spike; its loss and gradient norm must be finite."""
        median = self._recent.loss_median
        spike = self._recent.add(step, loss, grad_norm)
        if self._factor is None and spike is not None:
            self._show(f"step {step}: spike: {in_words(spike)}")
            self._log.write(**spike._asdict(), batch=self._batch_of(step)[1])
        elif self._factor is not None and loss > self._factor * median:
            self._show(f"step {step}: loss {loss:.4f} is {loss / median:.2f} times the recent median")
            self._log.write(step=step, loss=loss, median=median, batch=self._batch_of(step)[1])


def in_words(spike: Spike) -> str:
    """Returns the loss and the gradient norm of a spike, and how far they are from the recent ones."""
    loss = (
        f"loss {spike.loss:.4f}, {spike.loss_deviations:+.1f} deviations from the recent median "
        f"{spike.loss_median:.4f}"
    )
    times = spike.grad_norm / spike.grad_norm_median
    norm = f"gradient norm {spike.grad_norm:.4g}, {times:.3g} times the recent median"
    by_loss = spike.loss_deviations >= DEVIATIONS
    return f"{loss}; {norm}" if by_loss else f"{norm}; {loss}"
