"""Spike detection: losses far above the recent median are reported with their batch.

Nothing else happens. PaLM (arXiv 2204.02311, section 5.1) restarted before a spike without its batches.
"""

import collections
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from training.metrics import SPIKES, MetricsLog, read_records
from training.processes import is_first_process

_RECENT, _FEWEST = 100, 20  # losses compared with, and how many of them are needed


class SpikeDetector:
    """Compares each loss with the recent ones and writes spikes to spikes.jsonl. A context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        factor: float,
        batch_of: Callable[[int], tuple[np.ndarray, Mapping[str, Any]]],
        show: Callable[[str], None],
        start: int,
    ):
        """Continues the run in `folder`, whose metrics.jsonl holds the recent losses.

        Args:
          folder: where the run writes.
          factor: a loss above this multiple of the recent median is a spike; infinity reports none.
          batch_of: returns the batch of a step and its origin in the data.
          show: prints a line.
          start: the last step taken.
        """
        self._factor, self._batch_of, self._show = factor, batch_of, show
        finite = [
            record["loss"]
            for record in read_records(folder)
            if math.isfinite(record.get("loss", math.nan)) and not record.get("skipped")
        ]
        self._recent = collections.deque(finite, _RECENT)
        path = folder / SPIKES if is_first_process() else None  # one file for all processes
        self._log = MetricsLog(path, keep_steps=start)

    def __enter__(self) -> "SpikeDetector":
        return self

    def __exit__(self, *exception) -> None:
        self._log.__exit__(*exception)

    def check(self, step: int, loss: float) -> None:
        """Reports the loss of a step if it is a spike; the loss must be finite."""
        if len(self._recent) >= _FEWEST and math.isfinite(self._factor):
            median = statistics.median(self._recent)
            if loss > self._factor * median:
                self._show(f"step {step}: loss {loss:.4f} is {loss / median:.2f} times the recent median")
                self._log.write(step=step, loss=loss, median=median, batch=self._batch_of(step)[1])
        self._recent.append(loss)
