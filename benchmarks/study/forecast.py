"""A forecast of what cells cost, made before they run.

python -m benchmarks.study forecast   # writes docs/results/study/forecast.json
"""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.statistics import differences, rank_correlation, t_interval
from benchmarks.study.laws import (
    ALONE,
    BASE,
    BESIDE,
    GROUP,
    LAWS,
    LEAST_CELLS,
    Cells,
    cost,
    families,
    family_of,
    features,
    fit,
    measured,
)
from benchmarks.study.studies import STUDIES
from benchmarks.study.tables import interval, number, with_interval
from mxjax.runtime.tables import table
from training.files import write_atomically

FILE = "forecast.json"
_NAMES = {"mean": "mean of its family"} | LAWS


def make(cells: Cells, record: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """Returns the forecasts of every law for the cells of `rules-60m` that have no run.

    Raises:
      ValueError: fp8 has no run.
    """
    if BASE not in cells:
        raise ValueError(f"a forecast is relative to {BASE}, which has no run")
    waiting = [cell for cell in STUDIES["rules-60m"] if cell.name not in cells]
    made: dict[str, Any] = {"commit": commit, "diagnosis": record["commit"], "fitted": {}, "forecasts": {}}
    for family, chosen in families(measured(cells, record)).items():
        if len(chosen) < LEAST_CELLS:
            continue
        made["fitted"][family] = [cell.name for cell in chosen]
        fits = {law: fit(cells, chosen, record, law) for law in LAWS}
        mean = statistics.fmean(cost(cells, cell) for cell in chosen)
        for cell in waiting:
            if (
                family_of(cell.policy, cell.rules) != family
                or f"{cell.policy} {cell.rules}" not in record["cells"]
            ):
                continue
            found = {law: fits[law].of(features(cell.policy, cell.rules, record, law)) for law in LAWS}
            numbers = {name: round(value, 4) for name, value in ({"mean": mean} | found).items()}
            made["forecasts"][cell.name] = {"family": family} | numbers
    return made


def forecast(cells: Cells, made: Mapping[str, Any] | None) -> str:
    """Returns the forecasts beside what the runs gave, and how far they lie from it."""
    if made is None or BASE not in cells:
        return "Not made yet."
    base, rows, known = cells[BASE].losses, [], []
    for name, found in made["forecasts"].items():
        losses = cells[name].losses if name in cells else {}
        gaps = t_interval(differences(losses, base))
        shown = [number(gaps.mean, "+.4f"), interval(gaps.low, gaps.high), gaps.n] if gaps.n else [""] * 3
        label = name.removesuffix(f".{GROUP}").replace(".", " ")
        rows.append([label, *(number(found[law], "+.4f") for law in _NAMES), *shown])
        if losses.keys() == base.keys():
            known.append((found, gaps.mean))
    text = table(f"cell | {' | '.join(_NAMES.values())} | measured | 95 % | seeds", rows)
    return text + "\n\n" + _score(known)


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the forecast in a folder, None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None


def write(folder: pathlib.Path, made: Mapping[str, Any]) -> None:
    """Writes a forecast.

    Raises:
      ValueError: the folder has one already, or there is nothing to forecast.
    """
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists, and a forecast is made once; remove it to make another")
    if not made["forecasts"]:
        raise ValueError(
            "there is nothing to forecast: every cell of rules-60m has run or is not in the diagnosis, or "
            "too few have run to fit a law"
        )
    write_atomically(folder / FILE, json.dumps(made, indent=1) + "\n")


def _score(known: Sequence[tuple[Mapping[str, Any], float]]) -> str:
    """Returns how far each law is from the cells that have run with all seeds."""
    if len(known) < LEAST_CELLS:
        return f"{len(known)} of them have run with all seeds; the score needs {LEAST_CELLS}."
    rows = []
    for law, name in _NAMES.items():
        far = float(np.mean([abs(found[law] - gap) for found, gap in known]))
        r = rank_correlation(*zip(*_within_families(known, law), strict=True))
        rank = "" if law == "mean" else with_interval(r, "+.2f")
        rows.append([name, number(far, ".4f"), rank])
    score = table("forecast by | nats off in the mean | rank correlation within families", rows)
    return f"Over the {len(known)} that have run with all seeds:\n\n{score}"


def _within_families(known: Sequence[tuple[Mapping[str, Any], float]], law: str) -> list[tuple[float, float]]:
    """Returns forecast and measured cost of each cell, both minus their means over the cell's family."""
    pairs = []
    for family in (ALONE, BESIDE):
        values = np.array([(f[law], gap) for f, gap in known if f["family"] == family]).reshape(-1, 2)
        pairs += (values - values.mean(0)).tolist() if len(values) else []
    return pairs
