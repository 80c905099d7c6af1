"""Runs as their files describe them: config.json and metrics.jsonl."""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.records import Record, Series, Sqnr, evaluations_by_set, mean_sqnr, series, sqnr_by_step
from analysis.statistics import has_diverged
from training.config import Config
from training.log.metrics import read_records
from training.log.spikes import Spike, find_spikes
from training.phases import Phase, from_record
from training.run.record import from_json, read_run_config

LAST = 0.05
"""Share of a run whose numbers are averaged at its end."""


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedRun:
    """One run; curves are by the tokens trained on, or the sequences.

    Attributes:
      name: as few of the folder's last parts as tell the runs apart.
      saved: the values of config.json.
      records: the lines of metrics.jsonl.
      unit: tokens of a step, or its sequences.
    """

    folder: pathlib.Path
    name: str
    saved: Mapping[str, Any]
    config: Config
    records: Sequence[Record]
    unit: int

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The policies of every layer, by phase."""
        return from_record(self.saved) or ()

    @functools.cached_property
    def sets(self) -> Mapping[str, Mapping[int, Record]]:
        """The evaluations of each set by name and step."""
        return evaluations_by_set(self.records)

    @functools.cached_property
    def spikes(self) -> Sequence[Spike]:
        """The steps that stand out."""
        return find_spikes(self.records)

    @functools.cached_property
    def sqnr(self) -> Mapping[int, Sqnr]:
        """The SQNR of every GEMM by step, as --stats-every measured it."""
        return sqnr_by_step(self.records)

    @functools.cached_property
    def validation(self) -> Series:
        """The curve of the loss of each evaluation."""
        return self.curve("eval_loss")

    @functools.cached_property
    def train(self) -> Series:
        """The curve of the loss of each step."""
        return self.curve("loss")

    @property
    def held_out(self) -> str:
        """The identity of what the run is evaluated on: of its first set, wherever it lies."""
        config, facts = self.config, {**self.saved.get("data", {}), "source": None}
        evaluated = config.eval_sequences or config.eval_batches * config.data.batch_size
        if config.data.eval_data:  # then training data may differ
            name_of_data = pathlib.Path(next(iter(config.data.eval_paths.values()))).name
            facts = {"source": name_of_data, "tokens": facts.get("validation_tokens")}
        return json.dumps([facts, config.data.seq_len, evaluated], sort_keys=True)

    @property
    def last_step(self) -> int:
        """The last step on record."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def has_ended(self) -> bool:
        """Whether the run has been evaluated at its end."""
        return max(self.validation) >= self.tokens(self.config.steps)

    @property
    def diverged(self) -> bool:
        """Whether the run has diverged (see `analysis.statistics.DIVERGED`), and not overfitted."""
        return self._ends_high and not self.overfitted

    @property
    def overfitted(self) -> bool:
        """Whether evaluations, all finite, end as of a run that has diverged, but training below them all."""
        finite = all(map(math.isfinite, self.validation.values()))
        last = self.last_mean("loss")
        return finite and self._ends_high and last is not None and last < min(self.validation.values())

    @property
    def _ends_high(self) -> bool:
        points = sorted(self.validation.items())
        return has_diverged(points[-1][1], points)

    def tokens(self, step: int) -> int:
        """Returns the tokens, or sequences, that the run has trained on after a step."""
        return step * self.unit

    def curve(self, name: str) -> Series:
        """Returns a number of metrics.jsonl by the tokens trained on."""
        return {self.tokens(step): value for step, value in series(self.records, name).items()}

    def sqnr_curve(self, gemm: str) -> Series:
        """Returns the mean decibels of a GEMM over the layers by the tokens trained on."""
        return {self.tokens(step): mean_sqnr([found])[gemm] for step, found in self.sqnr.items()}

    def last_of(self, name: str) -> Record:
        """Returns the last evaluation of a set; empty without any."""
        evaluations = self.sets.get(name, {})
        return evaluations[max(evaluations)] if evaluations else {}

    def median(self, name: str) -> float | None:
        """Returns the median of a number over the steps but the first, which compiles; None without any."""
        values = [v for _, v in sorted(self.curve(name).items())][1:]
        values = [value for value in values if math.isfinite(value)]
        return statistics.median(values) if values else None

    def last_values(self, name: str, at: int | None = None, fewest: int = 1) -> Sequence[float]:
        """Returns a number at the last LAST of the steps up to `at` tokens, or at the last `fewest` steps."""
        values = [value for x, value in sorted(self.curve(name).items()) if at is None or x <= at]
        return values[-max(fewest, round(LAST * len(values))) :]

    def last_mean(self, name: str, at: int | None = None) -> float | None:
        """Returns the mean of `last_values`; None without any."""
        last = self.last_values(name, at)
        return math.fsum(last) / len(last) if last else None

    def largest(self, name: str) -> float | None:
        """Returns the largest of a number; None without any."""
        return max((v for v in self.curve(name).values() if math.isfinite(v)), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of a step over the median duration of a step."""
        seconds = self.median("step_s")
        return self.config.data.tokens_a_step / seconds if seconds else None


def read(folders: Sequence[pathlib.Path], sequences: bool = False) -> list[RecordedRun]:
    """Returns the runs in folders, whose curves count tokens, or sequences.

    Raises:
      ValueError: a folder holds no run or a damaged one, or is named twice.
    """
    found = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        saved = read_run_config(folder)
        config = from_json(saved["config"])
        unit = config.data.batch_size if sequences else config.data.tokens_a_step
        found.append(RecordedRun(folder, name, saved, config, read_records(folder), unit))
    return found


def short_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """Returns as many of the last parts of the folders' paths as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is named twice")
