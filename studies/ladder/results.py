"""The study's finished runs, gathered by cell."""

import dataclasses
import json
import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from analysis.statistics import has_diverged
from models.configs import CONFIGS
from studies.ladder.cells import BASELINE

Run = dict[str, Any]
"""The record of one run; see `studies.ladder.train`."""


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The finished runs of one cell.

    Attributes:
      protocol: fields of `studies.ladder.cells.Protocol`, and its name.
      runs: records by seed.
    """

    name: str
    policy: str
    rules: str
    model: str
    protocol: dict[str, Any]
    runs: dict[int, Run]

    @property
    def group(self) -> tuple[str, str]:
        """The model and the protocol's name: cells of one group can be compared."""
        return self.model, self.protocol["name"]

    @property
    def label(self) -> str:
        """The policy and its scale rules."""
        return f"{self.policy} {self.rules}".strip()

    @property
    def losses(self) -> dict[int, float]:
        """Final losses by seed, without runs that diverged."""
        return {seed: run["final_loss"] for seed, run in self.runs.items() if not diverged(run)}

    @property
    def devices(self) -> str:
        """The names of the devices that trained the runs, with the number of runs if there are several."""
        found = Counter(map(short_name, self.runs.values()))
        counts = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        return counts[0][0] if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts)

    @property
    def n_diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(map(diverged, self.runs.values()))


def short_name(run: Run) -> str:
    """Returns the name of a run's device without maker and memory: H100 for NVIDIA H100 80GB HBM3."""
    return re.sub(r"^NVIDIA |(?<=\w) \d+GB.*$", "", run.get("device", "unknown"))


def diverged(run: Run) -> bool:
    """Whether a run has diverged."""
    return has_diverged(run["final_loss"], run["evaluations"])


def read_record(path: pathlib.Path) -> Run:
    """Reads the record of one run, in which a loss that is not finite may be a string.

    Raises:
      ValueError: the file holds no JSON.
    """
    return _parse(path.read_text(), path)


def _parse(text: str, path: pathlib.Path) -> Run:
    try:
        run = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no whole JSON file; remove it, and its run is trained again") from error
    if "final_loss" in run:
        run["final_loss"] = float(run["final_loss"])
    if "evaluations" in run:
        run["evaluations"] = [[tokens, float(loss)] for tokens, loss in run["evaluations"]]
    return run


def read_runs(source: pathlib.Path) -> list[Run]:
    """Reads the records of all runs in a folder, ordered by file name, or in a file with one a line.

    Raises:
      ValueError: there is no run, or a record is no record of a run.
    """
    if source.suffix == ".jsonl":
        runs = [_parse(line, source) for line in source.read_text().splitlines()]
    else:
        runs = [read_record(path) for path in sorted(source.glob("*.json"))]
    for run in runs:
        missing = {"cell", "policy", "seed", "final_loss", "evaluations", "protocol"} - set(run)
        if missing:
            raise ValueError(f"{source} holds no record of a run: it has no {', '.join(sorted(missing))}")
    if not runs:
        raise ValueError(f"{source} holds no run; train some with python -m studies.ladder run")
    return runs


def add_runs(folder: pathlib.Path, kept: pathlib.Path) -> int:
    """Adds the runs of a folder to a file with one a line, in the order of their names; returns their number.

    Runs that the file has already are not counted.

    Raises:
      ValueError: the file has another run of the same cell and seed.
    """
    found = {(run["cell"], run["seed"]): run for run in read_runs(folder)}
    runs = {(run["cell"], run["seed"]): run for run in read_runs(kept)}
    added = [key for key in found if key not in runs]
    if repeated := [key for key in found if key in runs and not _same(found[key], runs[key])]:
        cell, seed = repeated[0]
        raise ValueError(
            f"{kept} has {len(repeated)} other runs of the same cell and seed, such as {cell} seed {seed}; "
            f"keep repeats apart: remove them from {folder}"
        )
    runs |= found
    lines = [json.dumps(runs[key], separators=(",", ":")) + "\n" for key in sorted(runs)]
    kept.write_text("".join(lines))
    return len(added)


def _same(run: Run, other: Run) -> bool:
    """Whether two records are equal; NaN equals itself."""
    return json.dumps(run, sort_keys=True) == json.dumps(other, sort_keys=True)


def gather(runs: Sequence[Run]) -> dict[str, CellResult]:
    """Returns the runs by cell, in the order in which cells first appear."""
    found: dict[str, CellResult] = {}
    for run in runs:
        fields = (run["cell"], run["policy"], run["rules"], run["model"], run["protocol"])
        cell = found.setdefault(run["cell"], CellResult(*fields, runs={}))
        cell.runs[run["seed"]] = run
    return found


def by_group(cells: dict[str, CellResult]) -> dict[tuple[str, str], list[CellResult]]:
    """Returns the cells by model, smallest first, and protocol; in a group the lowest loss is first."""
    groups: dict[tuple[str, str], list[CellResult]] = defaultdict(list)
    for cell in cells.values():
        groups[cell.group].append(cell)
    in_order = sorted(groups, key=lambda group: (_size(groups[group][0]), group[1]))
    return {group: sorted(groups[group], key=_mean_loss) for group in in_order}


def baseline(group: Sequence[CellResult]) -> CellResult | None:
    """Returns the fp8 cell among cells of one group."""
    return next((cell for cell in group if cell.policy == BASELINE), None)


def _size(cell: CellResult) -> int:
    """Returns the model's number of parameters, or that on record for one of a file."""
    if cell.model in CONFIGS:
        return CONFIGS[cell.model].n_params
    return next(iter(cell.runs.values()))["parameters"]


def _mean_loss(cell: CellResult) -> float:
    losses = cell.losses
    return sum(losses.values()) / len(losses) if losses else math.inf
