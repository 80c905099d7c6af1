"""Tests the laws of a policy's cost, and the forecast, on runs that follow a known law."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from scipy import stats

from benchmarks.study import forecast, laws
from benchmarks.study.cells import PROTOCOLS
from benchmarks.study.results import gather
from benchmarks.study.studies import STUDIES

RULES = STUDIES["rules-60m"]
KNOWN, WAITING = RULES[:20], RULES[20:]  # the first rules, and the others
LAW = (0.01, 2.0, 5.0)  # nats, and a unit of noise and of the repeating part


def _split(label: str) -> dict:
    rng = np.random.default_rng(sum(map(ord, label)))
    error, share, across = rng.uniform(0.1, 0.3), rng.uniform(0, 0.05), rng.uniform(0.04, 0.1)
    values = {"error": error, "repeating_share": share, "across": across}
    return {name: {"mean": float(value)} for name, value in values.items()}


LABELS = ["fp8", *(f"{cell.policy} {cell.rules}" for cell in RULES)]
RECORD = {"commit": "abc", "cells": {label: _split(label) for label in LABELS}}


def _cost(cell) -> float:
    split = RECORD["cells"][f"{cell.policy} {cell.rules}"]
    noise = split["error"]["mean"] ** 2 * (1 - split["repeating_share"]["mean"])
    return LAW[0] + LAW[1] * noise + LAW[2] * split["across"]["mean"] ** 2


def _run(policy: str, rules: str, seed: int, loss: float) -> dict:
    name = f"{policy}.{rules or 'own'}.60m.tuned-60m"
    protocol = {"name": "tuned-60m"} | dataclasses.asdict(PROTOCOLS["tuned-60m"])
    fields = {"cell": name, "policy": policy, "rules": rules, "model": "60m", "protocol": protocol}
    return fields | {"seed": seed, "final_loss": loss, "evaluations": [[1, loss]], "device": "NVIDIA H200"}


def _runs(cells, seeds: int = 4, scatter: float = 0.0):
    """Returns runs of cells that cost what the law says, with fp8's."""
    rng = np.random.default_rng(0)
    base = [2.5 + 0.1 * seed for seed in range(seeds)]
    runs = [_run("fp8", "", seed, base[seed]) for seed in range(seeds)]
    for cell in cells:
        noise = scatter * rng.standard_normal(seeds)
        runs += [_run(cell.policy, cell.rules, s, base[s] + _cost(cell) + noise[s]) for s in range(seeds)]
    return gather(runs)


def _rows(text: str) -> dict[str, list[str]]:
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


def test_laws_are_found() -> None:
    rows = _rows(laws.laws(_runs(KNOWN), RECORD))
    assert list(rows) == [laws.ALONE, laws.BESIDE, "all"]
    for row in rows.values():
        assert row[4:] == ["+2.00 (+2.00 to +2.00)", "+5.00 (+5.00 to +5.00)", "1.00", "1.00"]


def test_slope_and_shares_are_those_of_scipy() -> None:
    """One statistic is a straight line, which scipy fits; here each cell is left out in turn."""
    cells = _runs(KNOWN, scatter=0.02)
    row = _rows(laws.laws(cells, RECORD))[laws.ALONE]
    chosen = [c for c in KNOWN if c.policy.startswith("only_")]
    x = np.array([RECORD["cells"][f"{c.policy} {c.rules}"]["error"]["mean"] ** 2 for c in chosen])
    base = cells["fp8.own.60m.tuned-60m"].losses
    y = np.array([[cells[c.name].losses[s] - base[s] for s in base] for c in chosen])
    slopes = [stats.linregress(x, y[:, seed]).slope for seed in range(4)]
    low, high = stats.t.interval(0.95, 3, np.mean(slopes), stats.sem(slopes))
    found = stats.linregress(x, y.mean(1))
    left = []
    for i in range(len(x)):
        others = np.arange(len(x)) != i
        line = stats.linregress(x[others], y[others].mean(1))
        left.append(y[i].mean() - line.intercept - line.slope * x[i])
    crossed = 1 - np.sum(np.square(left)) / np.sum((y.mean(1) - y.mean()) ** 2)
    expected = f"{found.slope:+.2f} ({low:+.2f} to {high:+.2f})", f"{found.rvalue**2:.2f}", f"{crossed:.2f}"
    assert row[1:4] == list(expected)


def test_what_remedies_cost_beyond_the_law() -> None:
    """What the cells of a remedy lie off the line through all cells, which scipy fits, in the mean."""
    rows = _rows(laws.beyond(_runs(KNOWN), RECORD))
    assert list(rows) == ["H16 or H32", "none", "redrawn signs", "stochastic rounding"]
    assert [row[0] for row in rows.values()] == ["4", "4", "4", "8"]
    cells = _runs(KNOWN)
    chosen = [c for c in KNOWN if "hadamard" in c.policy]
    for cell in chosen:
        for run in cells[cell.name].runs.values():
            run["final_loss"] -= 0.5
    label = [f"{c.policy} {c.rules}" for c in KNOWN]
    x = np.array([RECORD["cells"][name]["error"]["mean"] ** 2 for name in label])
    y = np.array([_cost(c) - 0.5 * (c in chosen) for c in KNOWN])
    line = stats.linregress(x, y)
    off = np.mean([y[i] - line.intercept - line.slope * x[i] for i, c in enumerate(KNOWN) if c in chosen])
    rows = _rows(laws.beyond(cells, RECORD))
    assert rows["H16 or H32"][1] == f"{off:+.4f} ({off:+.4f} to {off:+.4f})"


def test_cells_without_all_seeds_are_not_fitted() -> None:
    cells = _runs(KNOWN)
    del cells[KNOWN[1].name].runs[2]
    assert _rows(laws.laws(cells, RECORD))[laws.ALONE][0] == "9"
    few = _runs(KNOWN[:3])
    assert _rows(laws.laws(few, RECORD)) == {}
    assert laws.laws(cells, None) == "Not measured yet."


def test_forecast_is_the_law_and_is_scored() -> None:
    cells = _runs(KNOWN)
    made = forecast.make(cells, RECORD, "commit")
    assert sorted(made["forecasts"]) == sorted(cell.name for cell in WAITING)
    fitted = itertools.chain(*made["fitted"].values())
    assert sorted(fitted) == sorted(cell.name for cell in KNOWN)
    for cell in WAITING:
        assert made["forecasts"][cell.name]["split"] == pytest.approx(_cost(cell), abs=1e-4)
    before = forecast.forecast(cells, made)
    assert "0 of them have run" in before
    after = forecast.forecast(_runs(RULES), made)
    row = _rows(after)[f"{WAITING[0].policy} {WAITING[0].rules}"]
    assert row[2] == row[3] == f"{_cost(WAITING[0]):+.4f}"
    assert row[5] == "4"
    assert re.search(r"split: 0\.0000 nats off in the mean; rank correlation within families \+1\.00", after)
    off = float(re.search(r"mean: (0\.\d+) nats", after)[1])
    by_family = {
        f: np.mean([_cost(c) for c in KNOWN if (c.policy[:5] == "only_") == f]) for f in (True, False)
    }
    expected = np.mean([abs(_cost(c) - by_family[c.policy[:5] == "only_"]) for c in WAITING])
    assert off == pytest.approx(expected, abs=1e-4)


def test_forecast_is_made_once(tmp_path) -> None:
    assert forecast.read(tmp_path) is None
    assert forecast.forecast({}, None) == "Not made yet."
    made = forecast.make(_runs(KNOWN), RECORD, "commit")
    forecast.write(tmp_path, made)
    assert forecast.read(tmp_path) == made
    with pytest.raises(ValueError, match="a forecast is made once"):
        forecast.write(tmp_path, made)
    with pytest.raises(ValueError, match="every cell of rules-60m has run"):
        forecast.write(tmp_path / "other", made | {"forecasts": {}})
