"""What a policy costs by the error of its gradients, and a forecast for cells that have not run yet.

    python -m benchmarks.study forecast   # writes docs/results/study/forecast.json, before the runs

A law gives a cell's final loss minus fp8's as a constant plus slopes times statistics of the diagnosis. The
slopes are least squares over the cells of a family, for each seed by itself, so that the seeds show how far
the runs determine them.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.study.cells import WGRAD_KINDS, WGRAD_ONLY
from benchmarks.study.results import CellResult
from benchmarks.study.studies import RULES, STUDIES
from benchmarks.study.tables import interval, number
from mxjax.tables import table
from training.files import write_atomically
from training.paired_statistics import differences, rank_correlation, t_interval

Cells = Mapping[str, CellResult]
GROUP = "60m.tuned-60m"
FILE = "forecast.json"
ALONE, BESIDE = "Wgrad alone", "Wgrad beside `even`"
"""Families of cells that differ in Wgrad: Fprop and Dgrad are in FP8, or in MXFP4 with the rule even."""
LAWS = {"error": ("noise + repeating",), "split": ("noise", "across")}
"""The laws by name: the squared error as a whole; its noise and its repeating part across the gradient."""
_LEAST_CELLS = 6


class _Fit(NamedTuple):
    """A law fitted to cells.

    Attributes:
      coefficients: by seed, the constant first.
      explained, crossed: share of the variance of the cells' means that it explains, and of cells left out.
    """

    coefficients: np.ndarray
    explained: float
    crossed: float

    def of(self, statistics: Sequence[float]) -> float:
        """Returns the cost of a cell with these statistics."""
        return float(self.coefficients.mean(0) @ [1.0, *statistics])


def laws(cells: Cells, record: Mapping[str, Any] | None) -> str:
    """Returns the slopes of each law in each family, and over all cells."""
    if record is None or (base := cells.get(f"fp8.own.{GROUP}")) is None:
        return "Not measured yet."
    rows = []
    for family, chosen in {**_families(cells, record), "all": _measured(cells, record)}.items():
        if len(chosen) < _LEAST_CELLS:
            continue
        row = [family, len(chosen)]
        for law in LAWS:
            fit = _fit([_statistics(c.label, record, law) for c in chosen], [_costs(c, base) for c in chosen])
            slopes = [t_interval(list(column)) for column in fit.coefficients.T[1:]]
            row += [f"{number(s.mean, '+.2f')} ({interval(s.low, s.high, '+.2f')})" for s in slopes]
            row += [number(fit.explained, ".2f"), number(fit.crossed, ".2f")]
        rows.append(row)
    quality = "explained | cell left out"
    return table(f"cells | number | error | {quality} | noise | repeating | {quality}", rows)


def make(cells: Cells, record: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """Returns the forecasts of every law for the cells of `rules-60m` that have no run."""
    base = cells[f"fp8.own.{GROUP}"]
    waiting = [cell.name for cell in STUDIES["rules-60m"] if cell.name not in cells]
    made: dict[str, Any] = {"commit": commit, "diagnosis": record["commit"], "fitted": {}, "forecasts": {}}
    for family, chosen in _families(cells, record).items():
        gaps = [_costs(cell, base) for cell in chosen]
        fits = {law: _fit([_statistics(c.label, record, law) for c in chosen], gaps) for law in LAWS}
        made["fitted"][family] = [cell.name for cell in chosen]
        for name in waiting:
            policy, rules, *_ = name.split(".")
            if family == _family(policy, rules):
                label = f"{policy} {rules}"
                found = {law: round(fit.of(_statistics(label, record, law)), 4) for law, fit in fits.items()}
                made["forecasts"][name] = {"family": family, "mean": round(float(np.mean(gaps)), 4)} | found
    return made


def forecast(cells: Cells, made: Mapping[str, Any] | None) -> str:
    """Returns the forecasts beside what the runs gave, and how far they lie from it."""
    if made is None or (base := cells.get(f"fp8.own.{GROUP}")) is None:
        return "Not made yet."
    rows, known = [], []
    for name, found in made["forecasts"].items():
        gaps = t_interval(differences(cells[name].losses, base.losses) if name in cells else [])
        values = [number(found[law], "+.4f") for law in ("mean", *LAWS)]
        measured = [number(gaps.mean, "+.4f"), interval(gaps.low, gaps.high)] if gaps.n else ["", ""]
        rows.append([name.removesuffix(f".{GROUP}").replace(".", " "), *values, *measured, gaps.n or ""])
        if gaps.n:
            known.append((found, gaps.mean))
    text = table("cell | mean of its family | by the error | by both parts | measured | 95 % | seeds", rows)
    return text + "\n\n" + _score(known)


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the forecast in a folder, None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None


def write(folder: pathlib.Path, made: Mapping[str, Any]) -> None:
    """Writes a forecast.

    Raises:
      ValueError: the folder has one already, or no cell is without runs.
    """
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists, and a forecast is made once; remove it to make another")
    if not made["forecasts"]:
        raise ValueError("every cell of rules-60m has run, so there is nothing to forecast")
    write_atomically(folder / FILE, json.dumps(made, indent=1) + "\n")


def _score(known: Sequence[tuple[Mapping[str, Any], float]]) -> str:
    if len(known) < _LEAST_CELLS:
        return f"{len(known)} of them have run; the score needs {_LEAST_CELLS}."
    lines = []
    for law in ("mean", *LAWS):
        far = float(np.mean([abs(found[law] - gap) for found, gap in known]))
        r = rank_correlation(*zip(*_within_families(known, law), strict=True))
        rank = f"rank correlation within families {r.mean:+.2f}, p {r.p:.2g}"
        lines.append(f"- {law}: {far:.4f} nats off in the mean" + ("" if law == "mean" else f"; {rank}"))
    return "\n".join([f"Over the {len(known)} that have run:", "", *lines])


def _within_families(known: Sequence[tuple[Mapping[str, Any], float]], law: str) -> list[tuple[float, float]]:
    """Returns forecast and measured cost of each cell, both minus their means over the cell's family."""
    pairs = []
    for family in (ALONE, BESIDE):
        values = np.array([(f[law], gap) for f, gap in known if f["family"] == family]).reshape(-1, 2)
        pairs += (values - values.mean(0)).tolist() if len(values) else []
    return pairs


def _fit(statistics: Sequence[Sequence[float]], gaps: Sequence[Sequence[float]]) -> _Fit:
    """Fits a law to the statistics of cells and their costs by seed."""
    x = np.column_stack([np.ones(len(statistics)), np.array(statistics)])
    y = np.array(gaps)
    coefficients = np.linalg.lstsq(x, y, rcond=None)[0]
    mean = y.mean(1)
    hat = np.einsum("ij,ji->i", x, np.linalg.pinv(x))
    errors = mean - x @ coefficients.mean(1)
    total = np.sum((mean - mean.mean()) ** 2)
    return _Fit(
        coefficients.T,
        1 - float(np.sum(errors**2) / total),
        1 - float(np.sum((errors / (1 - hat)) ** 2) / total),
    )


def _families(cells: Cells, record: Mapping[str, Any]) -> dict[str, list[CellResult]]:
    """Returns the cells of each family that can be fitted."""
    measured = _measured(cells, record)
    return {f: [c for c in measured if _family(c.policy, c.rules) == f] for f in (ALONE, BESIDE)}


def _family(policy: str, rules: str) -> str | None:
    if policy.removeprefix(WGRAD_ONLY) not in WGRAD_KINDS:
        return None
    if policy.startswith(WGRAD_ONLY):
        return ALONE
    return BESIDE if rules in ("even", *(f"even-even-{rule}" for rule in RULES)) else None


def _measured(cells: Cells, record: Mapping[str, Any]) -> list[CellResult]:
    """Returns the cells that the diagnosis has and whose losses have all seeds of fp8's."""
    base = cells[f"fp8.own.{GROUP}"]
    return [
        cell
        for name, cell in cells.items()
        if name.endswith(f".{GROUP}") and cell.label in record["cells"]
        if cell is not base and cell.losses.keys() == base.losses.keys()
    ]


def _costs(cell: CellResult, base: CellResult) -> list[float]:
    return differences(cell.losses, base.losses)


def _statistics(label: str, record: Mapping[str, Any], law: str) -> list[float]:
    """Returns the statistics that a law multiplies: squared norms relative to the gradient's."""
    split = record["cells"][label]
    error = split["error"]["mean"] ** 2
    parts = {
        "noise + repeating": error,
        "noise": error * (1 - split["repeating_share"]["mean"]),
        "across": split["across"]["mean"] ** 2,
    }
    found = [parts[name] for name in LAWS[law]]
    return [0.0 if math.isnan(x) else x for x in found]
