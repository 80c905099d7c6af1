"""What is done about losses and gradients that are not finite, and about losses that leap.

With --on-nonfinite skip a step whose loss or gradient is NaN or infinite changes no parameter and no moment,
as by OLMo-core's SkipStepOptimizer. Losses that leap are only reported, with what of the data they were of:
PaLM (arXiv 2204.02311, section 5.1) went back to before a leap and left such batches out.
"""

import collections
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from training.metrics import MetricsLog, NonFiniteError, json_line
from training.processes import is_first_process, together
from training.step import StepMetrics

MOST_SKIPS = 10
"""Steps in a row that are skipped; then the run ends."""
_EVIDENCE = 3  # skipped steps of which the batch is saved
_RECENT, _FEWEST = 100, 20  # losses that a new one is compared with


class Watch:
    """Looks at every step's metrics. A context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        skips: bool,
        spike_factor: float,
        batch_of: Callable[[int], tuple[np.ndarray, Mapping[str, Any]]],
        names: Sequence[str],
        say: Callable[[str], None],
        start: int,
    ):
        """Goes on after step `start` of the run whose metrics.jsonl is in `folder`.

        Args:
          folder: of the run.
          skips: steps that are not finite are skipped, rather than end the run.
          spike_factor: of the recent losses' median, above which a loss is reported; infinity for none.
          batch_of: returns a step's batch, and what of the data it is.
          names: of the layers in `StepMetrics.amax`.
          say: shows a line.
          start: the last step of the state.
        """
        self.skips = skips
        self._folder, self._factor, self._names = folder, spike_factor, names
        self._batch_of, self._say = batch_of, say
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        self._row = 0
        for line in steps:
            self._row = self._row + 1 if line.get("skipped") else 0
        self._seen = sum(line.get("skipped", False) for line in steps)
        finite = [s["loss"] for s in steps if not isinstance(s["loss"], str) and not s.get("skipped")]
        self._recent = collections.deque(finite, _RECENT)
        path = folder / "spikes.jsonl" if is_first_process() else None  # one file for all processes
        self._log = MetricsLog(path, keep_steps=start)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception) -> None:
        self._log.close()

    def see(self, step: int, loss: float, grad_norm: float, metrics: StepMetrics) -> None:
        """Looks at the metrics of a step.

        Raises:
          NonFiniteError: the loss or gradient is not finite, and it is not skipped or the tenth in a row.
        """
        if metrics.finite:
            self._row = 0
            self._look_for_spike(step, loss)
            return
        message = f"loss {loss}, gradient norm {grad_norm} at step {step}"
        if not self.skips:
            raise NonFiniteError(message, step, self.amax(metrics))
        self._row, self._seen = self._row + 1, self._seen + 1
        self._say(f"{message}: skipped")
        if self._row == MOST_SKIPS:
            raise NonFiniteError(f"{message}, the {MOST_SKIPS}th in a row", step, self.amax(metrics))
        if self._seen <= _EVIDENCE:
            self.save_evidence(step, message, self.amax(metrics))

    def amax(self, metrics: StepMetrics) -> dict[str, Any]:
        """Returns the largest absolute values of each layer's gradients and parameters."""
        values = np.asarray(metrics.amax).tolist()
        return {
            of: dict(zip(self._names, row, strict=True))
            for of, row in zip(("gradients", "parameters"), values, strict=True)
        }

    def save_evidence(self, step: int, message: str, amax: Mapping[str, Any] | None) -> pathlib.Path:
        """Saves a step's batch, what of the data it is, and the layers' amax; without amax, of the evaluation
        after a step, the message alone. Returns the folder."""
        folder = self._folder / f"nonfinite-{'step' if amax is not None else 'evaluation'}-{step}"
        with together():
            if is_first_process():
                folder.mkdir(exist_ok=True)
                (folder / "error.txt").write_text(message + "\n")
                if amax is not None:
                    batch, indices = self._batch_of(step)
                    np.savez_compressed(folder / "batch.npz", batch=batch)
                    (folder / "batch.json").write_text(json_line(indices) + "\n")
                    (folder / "amax.json").write_text(json_line(amax) + "\n")
        return folder

    def _look_for_spike(self, step: int, loss: float) -> None:
        if len(self._recent) >= _FEWEST and math.isfinite(self._factor):
            median = statistics.median(self._recent)
            if loss > self._factor * median:
                self._say(f"step {step}: loss {loss:.4f} is {loss / median:.2f} times the recent median")
                self._log.write(step=step, loss=loss, median=median, batch=self._batch_of(step)[1])
        self._recent.append(loss)
