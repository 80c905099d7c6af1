"""A forecast of what cells cost, made before they run, from the error of their gradients.

python -m benchmarks.study forecast   # writes docs/results/study/forecast.json
"""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.laws import (
    ALONE,
    BASE,
    BESIDE,
    GROUP,
    LAWS,
    LEAST_CELLS,
    Cells,
    costs,
    families,
    family_of,
    fit,
)
from benchmarks.study.laws import statistics as measured_statistics
from benchmarks.study.studies import STUDIES
from benchmarks.study.tables import interval, number
from mxjax.tables import table
from training.files import write_atomically
from training.paired_statistics import rank_correlation, t_interval

FILE = "forecast.json"


def make(cells: Cells, record: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """Returns the forecasts of every law for the cells of `rules-60m` that have no run."""
    waiting = [cell for cell in STUDIES["rules-60m"] if cell.name not in cells]
    made: dict[str, Any] = {"commit": commit, "diagnosis": record["commit"], "fitted": {}, "forecasts": {}}
    for family, chosen in families(cells, record).items():
        made["fitted"][family] = [cell.name for cell in chosen]
        fits = {law: fit(cells, chosen, record, law) for law in LAWS}
        mean = statistics.fmean(cost for cell in chosen for cost in costs(cells, cell))
        for cell in waiting:
            if family_of(cell.policy, cell.rules) != family:
                continue
            label = f"{cell.policy} {cell.rules}"
            found = {law: fits[law].of(measured_statistics(label, record, law)) for law in LAWS}
            numbers = {name: round(value, 4) for name, value in ({"mean": mean} | found).items()}
            made["forecasts"][cell.name] = {"family": family} | numbers
    return made


def forecast(cells: Cells, made: Mapping[str, Any] | None) -> str:
    """Returns the forecasts beside what the runs gave, and how far they lie from it."""
    if made is None or BASE not in cells:
        return "Not made yet."
    rows, known = [], []
    for name, found in made["forecasts"].items():
        gaps = t_interval(costs(cells, cells[name]) if name in cells else [])
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
    if len(known) < LEAST_CELLS:
        return f"{len(known)} of them have run; the score needs {LEAST_CELLS}."
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
