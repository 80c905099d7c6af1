"""Losses, gradients and updates that are NaN or infinite end the run or skip the step.

The evidence is saved. With --on-nonfinite skip such a step changes no parameter and no moment, as in
OLMo-core's SkipStepOptimizer.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from training.log.metrics import json_line, read_records
from training.process.together import is_first_process, together
from training.step import StepMetrics, TrainState, all_finite

MOST_SKIPS = 10
"""Consecutive steps that may be skipped before the run ends."""
_SAVED_BATCHES = 3  # skipped steps whose batch is saved

Largest = Mapping[str, Mapping[str, Any]]
"""The largest absolute values of gradients and parameters, by layer."""


class NonFiniteError(RuntimeError):
    """A loss, a gradient, or a parameter or moment that a step would write is NaN or infinite.

    Attributes:
      step: the step, or the step before the evaluation.
      largest: the largest gradients and parameters by layer; None if an evaluation failed.
    """

    def __init__(self, message: str, step: int, largest: Largest | None = None):
        super().__init__(message)
        self.step, self.largest = step, largest


def check_state(state: TrainState, origin: pathlib.Path) -> None:
    """Raises ValueError if a state that was read from `origin` is not finite."""
    if not jax.jit(all_finite)((state.params, state.opt_state)):
        raise ValueError(
            f"the state of step {state.step} in {origin} holds NaN or infinity; go on from an earlier one: "
            "rename that checkpoint, or name another --init"
        )


class NonFiniteGuard:
    """Checks the metrics of every step, skips bad steps or ends the run, and saves evidence."""

    def __init__(
        self,
        folder: pathlib.Path,
        skips: bool,
        batch_of: Callable[[int], tuple[np.ndarray, Mapping[str, Any]]],
        names: Sequence[str],
        show: Callable[[str], None],
    ):
        """Continues the run in `folder`, whose metrics.jsonl records the steps skipped so far.

        Args:
          skips: skip a bad step instead of ending the run.
          batch_of: returns the batch of a step and its origin in the data.
          names: the layers of `StepMetrics.largest`.
        """
        self.skips = skips
        self._folder, self._names, self._batch_of, self._show = folder, names, batch_of, show
        self._consecutive = self._skipped = 0
        for record in read_records(folder):
            if "loss" in record:
                skipped = record.get("skipped", False)
                self._consecutive = self._consecutive + 1 if skipped else 0
                self._skipped += skipped

    def check(self, step: int, loss: float, grad_norm: float, metrics: StepMetrics) -> None:
        """Checks the metrics of a step.

        Raises:
          NonFiniteError: they are not finite, and steps are not skipped or this is the tenth in a row.
        """
        if metrics.finite:
            self._consecutive = 0
            return
        message, largest = f"loss {loss}, gradient norm {grad_norm} at step {step}", self._largest(metrics)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            message += ", but parameters or moments would become NaN or infinite"
        if not self.skips:
            raise NonFiniteError(message, step, largest)
        self._consecutive, self._skipped = self._consecutive + 1, self._skipped + 1
        self._show(f"{message}: skipped")
        if self._consecutive == MOST_SKIPS:
            raise NonFiniteError(f"{message}, the {MOST_SKIPS}th in a row", step, largest)
        if self._skipped <= _SAVED_BATCHES:
            self.save_evidence(step, message, largest)

    def save_evidence(self, step: int, message: str, largest: Largest | None) -> pathlib.Path:
        """Saves the message and, for a step, its batch and the largest values; returns the folder.

        Without `largest` the evidence belongs to the evaluation after the step.
        """
        folder = self._folder / f"nonfinite-{'step' if largest is not None else 'evaluation'}-{step}"
        with together():
            if is_first_process():
                folder.mkdir(exist_ok=True)
                (folder / "error.txt").write_text(message + "\n")
                if largest is not None:
                    batch, origin = self._batch_of(step)
                    np.savez_compressed(folder / "batch.npz", batch=batch)
                    (folder / "batch.json").write_text(json_line(origin) + "\n")
                    (folder / "largest.json").write_text(json_line(largest) + "\n")
        return folder

    def _largest(self, metrics: StepMetrics) -> dict[str, dict[str, Any]]:
        values = np.asarray(metrics.largest).tolist()
        return {
            kind: dict(zip(self._names, row, strict=True))
            for kind, row in zip(("gradients", "parameters"), values, strict=True)
        }
