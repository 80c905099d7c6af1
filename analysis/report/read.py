"""A run as its files describe it: config.json and metrics.jsonl."""

import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.compare.runs import held_out_of, last_of, short_names
from analysis.records import (
    Record,
    Series,
    Sqnr,
    evaluations_by_set,
    mean_sqnr,
    series,
    sqnr_by_step,
)
from training.config import Config
from training.log.metrics import METRICS, read_records
from training.log.spikes import Spike, find_spikes
from training.phases import Phase, from_record
from training.run.record import from_json, read_run_config


class ReportedRun(NamedTuple):
    """One run.

    Attributes:
      name: as few of the folder's last parts as tell the runs apart.
      saved: the values of config.json.
      records: the lines of metrics.jsonl.
      sets: the evaluations of each set by name and step.
      sqnr: the SQNR of every GEMM by step.
      held_out: the identity of what the run is evaluated on.
    """

    folder: pathlib.Path
    name: str
    saved: Mapping[str, Any]
    config: Config
    phases: tuple[Phase, ...]
    records: Sequence[Record]
    sets: Mapping[str, Mapping[int, Record]]
    spikes: Sequence[Spike]
    sqnr: Mapping[int, Sqnr]
    held_out: str

    @property
    def last_step(self) -> int:
        """The last step on record."""
        return max((record["step"] for record in self.records), default=0)

    def tokens(self, step: int) -> int:
        """Returns the tokens that the run has trained on after a step."""
        return step * self.config.data.tokens_a_step

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
        values = [v for _, v in sorted(series(self.records, name).items())][1:]
        values = [value for value in values if math.isfinite(value)]
        return statistics.median(values) if values else None

    def last_mean(self, name: str) -> float | None:
        """Returns the mean of a number over the last LAST of the steps; None without any."""
        values = [value for _, value in sorted(series(self.records, name).items())]
        return math.fsum(last) / len(last) if (last := last_of(values)) else None

    def largest(self, name: str) -> float | None:
        """Returns the largest of a number; None without any."""
        return max((v for v in series(self.records, name).values() if math.isfinite(v)), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of a step over the median duration of a step."""
        seconds = self.median("step_s")
        return self.config.data.tokens_a_step / seconds if seconds else None


def read(folders: Sequence[pathlib.Path]) -> list[ReportedRun]:
    """Returns the runs in folders.

    Raises:
      ValueError: a folder holds no run, a damaged one, or one that has taken no step.
    """
    found = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        saved = read_run_config(folder)
        records = read_records(folder)
        if not any("loss" in record for record in records):
            raise ValueError(f"{folder} has no step on record in {METRICS}: there is nothing to report")
        config = from_json(saved["config"])
        found.append(
            ReportedRun(
                folder,
                name,
                saved,
                config,
                from_record(saved) or (),
                records,
                evaluations_by_set(records),
                find_spikes(records),
                sqnr_by_step(records),
                held_out_of(config, saved.get("data", {})),
            )
        )
    return found
