"""Tests the laws of a policy's cost, and the forecast, on runs that follow a known law."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy import stats

from benchmarks.study import forecast, laws, plots
from benchmarks.study.cells import PROTOCOLS, WGRAD_KINDS
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


def _laws(cells) -> dict[tuple[str, str], list[str]]:
    """Returns the table of laws by the cells and the law."""
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in laws.laws(cells, RECORD).splitlines()]
    return {(row[0], row[2]): row[1:2] + row[3:] for row in rows[2:]}


def test_laws_are_found() -> None:
    rows = _laws(_runs(KNOWN))
    assert list(dict.fromkeys(name for name, _ in rows)) == [
        laws.ALONE,
        laws.BESIDE,
        "both, within each",
        "all",
        "all, within one Fprop",
    ]
    slopes = ["+2.000 (+2.000 to +2.000)", "+5.000 (+5.000 to +5.000)"]
    for name in (laws.ALONE, laws.BESIDE, "both, within each", "all"):
        constant = "" if name == "both, within each" else "+0.010 (+0.010 to +0.010)"
        assert rows[name, "noise and repeating error"][1:] == [constant, *slopes, "1.00", "1.00"]


def test_a_law_within_families_is_scipys_line_of_what_is_left() -> None:
    """A constant for each family takes its mean off both the errors and the costs."""
    row = _laws(_runs(KNOWN))["both, within each", "squared error"]
    x, y = [], []
    for alone in (True, False):
        found = _line([c for c in KNOWN if c.policy.startswith("only_") == alone], _cost)[:2]
        for all_of, values in zip((x, y), found, strict=True):
            all_of += list(values - values.mean())
    line = stats.linregress(x, y)
    assert row[:2] == [str(len(KNOWN)), ""]
    assert row[2].startswith(f"{line.slope:+.3f} (")
    assert row[4] == f"{line.rvalue**2:.2f}"


def _line(chosen, gap):
    """Returns the squared errors and costs of cells, and scipy's line through them."""
    x = np.array([RECORD["cells"][f"{c.policy} {c.rules}"]["error"]["mean"] ** 2 for c in chosen])
    y = np.array([gap(c) for c in chosen])
    return x, y, stats.linregress(x, y)


def test_the_law_of_the_error_is_scipys_line() -> None:
    """One feature is a straight line, which scipy fits; here each cell is left out in turn."""
    cells = _runs(KNOWN, scatter=0.02)
    row = _laws(cells)[laws.ALONE, "squared error"]
    chosen = [c for c in KNOWN if c.policy.startswith("only_")]
    base = cells["fp8.own.60m.tuned-60m"].losses
    x, y, line = _line(chosen, lambda c: np.mean([cells[c.name].losses[s] - base[s] for s in base]))
    half = stats.t.ppf(0.975, len(x) - 2) * line.stderr
    assert row[2] == f"{line.slope:+.3f} ({line.slope - half:+.3f} to {line.slope + half:+.3f})"
    half = stats.t.ppf(0.975, len(x) - 2) * line.intercept_stderr
    assert row[1] == f"{line.intercept:+.3f} ({line.intercept - half:+.3f} to {line.intercept + half:+.3f})"
    left = []
    for i in range(len(x)):
        others = np.arange(len(x)) != i
        other = stats.linregress(x[others], y[others])
        left.append(y[i] - other.intercept - other.slope * x[i])
    crossed = 1 - np.sum(np.square(left)) / np.sum((y - y.mean()) ** 2)
    assert row[4:] == [f"{line.rvalue**2:.2f}", f"{crossed:.2f}"]


def test_the_law_of_the_remedy_is_the_mean_over_the_rules() -> None:
    cells = _runs(KNOWN)
    row = _laws(cells)[laws.ALONE, "mean of its remedy"]
    chosen = [c for c in KNOWN if c.policy.startswith("only_")]
    y = np.array([_cost(c) for c in chosen])
    means = np.array([np.mean([_cost(o) for o in chosen if o.policy == c.policy]) for c in chosen])
    assert row[4] == f"{1 - np.sum((y - means) ** 2) / np.sum((y - y.mean()) ** 2):.2f}"


def test_what_remedies_cost_beyond_the_law() -> None:
    """What the cells of a remedy lie off the line through all cells, which scipy fits, in the mean."""
    _, _, line = _line(KNOWN, _cost)
    rows = _rows(laws.beyond(_runs(KNOWN), RECORD))
    names = ["H16 or H32: Wgrad", "none", "redrawn signs: Wgrad", "stochastic rounding: Wgrad"]
    assert list(rows) == names
    assert [row[0] for row in rows.values()] == ["4", "4", "4", "8"]
    x, y, _ = _line([c for c in KNOWN if "hadamard" in c.policy], _cost)
    off = y - line.intercept - line.slope * x
    low, high = stats.t.interval(0.95, 3, off.mean(), stats.sem(off))
    assert rows[names[0]][1:] == [f"{off.mean():+.4f}", f"{low:+.4f} to {high:+.4f}"]


def test_the_cost_of_a_remedy_is_taken_apart() -> None:
    """The costs follow noise and repeating error exactly, so that nothing is left beyond both."""
    rows = _rows(laws.parts(_runs(KNOWN), RECORD))
    for kind, (n, total, noise, repeating, left, _) in rows.items():
        chosen = [c for c in KNOWN if c.policy.removeprefix("only_") == kind]
        family = [[c for c in KNOWN if c.policy.startswith("only_") == alone] for alone in (False, True)]
        means = [np.mean([_cost(c) for c in cells]) for cells in family]
        off = [_cost(c) - means[c.policy.startswith("only_")] for c in chosen]
        assert n == str(len(chosen))
        assert total == f"{np.mean(off):+.4f}"
        assert float(noise) + float(repeating) == pytest.approx(float(total), abs=2e-4)
        assert left.lstrip("+-") == "0.0000"
    assert list(rows) == list(WGRAD_KINDS)


def test_the_law_is_drawn_with_every_cell() -> None:
    axes = plots.law(_runs(KNOWN), RECORD).axes[0]
    labels = {line.get_label(): len(line.get_xdata()) for line in axes.lines[:-1]}
    assert labels == {"H16 or H32": 4, "none": 4, "redrawn signs": 4, "stochastic rounding": 8}
    assert not plots.law(_runs(KNOWN), None).axes


def test_cells_without_all_seeds_are_not_fitted() -> None:
    cells = _runs(KNOWN)
    del cells[KNOWN[1].name].runs[2]
    assert _laws(cells)[laws.ALONE, "squared error"][0] == "9"
    assert _laws(_runs(KNOWN[:3])) == {}
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
    assert row[2] == row[4] == f"{_cost(WAITING[0]):+.4f}"
    assert row[6] == "4"
    score = _rows(after.partition("with all seeds:")[2])
    assert score["noise and repeating error"] == ["0.0000", "+1.00 (+1.00 to +1.00)"]
    off = float(score["mean of its family"][0])
    by_family = {
        f: np.mean([_cost(c) for c in KNOWN if (c.policy[:5] == "only_") == f]) for f in (True, False)
    }
    expected = np.mean([abs(_cost(c) - by_family[c.policy[:5] == "only_"]) for c in WAITING])
    assert off == pytest.approx(expected, abs=1e-4)


def test_what_was_not_measured_is_not_forecast() -> None:
    cells = _runs(KNOWN)
    label = f"{WAITING[0].policy} {WAITING[0].rules}"
    without = RECORD | {"cells": {name: s for name, s in RECORD["cells"].items() if name != label}}
    assert len(forecast.make(cells, without, "commit")["forecasts"]) == len(WAITING) - 1
    assert forecast.make(_runs(KNOWN[:3]), RECORD, "commit")["forecasts"] == {}
    del cells["fp8.own.60m.tuned-60m"]
    with pytest.raises(ValueError, match=r"relative to fp8\.own\.60m\.tuned-60m, which has no run"):
        forecast.make(cells, RECORD, "commit")


def test_runs_of_a_part_of_the_seeds_are_shown_and_not_scored() -> None:
    made = forecast.make(_runs(KNOWN), RECORD, "commit")
    cells = _runs(RULES)
    del cells[WAITING[0].name].runs[3]
    after = forecast.forecast(cells, made)
    assert _rows(after)[f"{WAITING[0].policy} {WAITING[0].rules}"][6] == "3"
    assert f"Over the {len(WAITING) - 1} that have run with all seeds" in after


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
