"""Tables of a study from its runs' JSON files: final losses and differences to fp8, paired by seed."""

import json
import math
import pathlib
import statistics
from collections import defaultdict
from typing import Annotated, Any

import tyro

from benchmarks.study.statistics import detectable, has_diverged, holm, paired_difference
from mxjax.kernels.tables import table

BASELINE = "fp8"


def read_runs(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records of all runs in a folder, ordered by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def losses_by_cell(runs: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns the final losses by cell and seed; NaN for runs that diverged."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        diverged = has_diverged(run["final_loss"], run["evaluations"])
        found[run["cell"]][run["seed"]] = math.nan if diverged else run["final_loss"]
    return dict(found)


def report(runs: list[dict[str, Any]]) -> str:
    """Returns a Markdown table for each model and protocol, best cells first."""
    cells, losses = {run["cell"]: run for run in runs}, losses_by_cell(runs)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, run in cells.items():
        groups[run["model"], run["protocol"]["name"]].append(cell)
    parts = []
    for (model, protocol), names in sorted(groups.items()):
        parts.append(f"## {model}, {protocol}\n\n{_table(names, cells, losses)}")
    return "\n\n".join(parts)


def _table(names: list[str], cells: dict[str, dict[str, Any]], losses: dict[str, dict[int, float]]) -> str:
    base = next((losses[name] for name in names if cells[name]["policy"] == BASELINE), {})
    good = {name: {s: x for s, x in losses[name].items() if not math.isnan(x)} for name in names}
    differences = {name: paired_difference(good[name], base) for name in names}
    corrected = dict(zip(names, holm([differences[name].p for name in names]), strict=True))
    rows = []
    for name in sorted(names, key=lambda n: statistics.mean(good[n].values()) if good[n] else math.inf):
        d, values = differences[name], list(good[name].values())
        pairs = [good[name][s] - base[s] for s in good[name].keys() & base.keys()]
        rows.append(
            [
                f"{cells[name]['policy']} {cells[name]['rules']}".strip(),
                len(losses[name]),
                len(losses[name]) - len(values),
                f"{statistics.mean(values):.4f}" if values else "-",
                f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-",
                f"{d.mean:+.4f}",
                f"{d.low:+.4f} to {d.high:+.4f}",
                f"{corrected[name]:.2g}",
                f"{detectable(pairs):.4f}",
            ]
        )
    header = "policy, rules | runs | diverged | loss | sd | - fp8 | 95 % | p (Holm) | seen at 80 % power"
    return table(header, rows)


def main(folder: Annotated[pathlib.Path, tyro.conf.Positional]) -> None:
    """Prints the tables of the runs in a folder."""
    print(report(read_runs(folder)))
