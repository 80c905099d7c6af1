"""Wgrad's scale rule and remedy while Fprop and Dgrad stay as they are, as a Markdown table."""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.study.cells import WGRAD_KINDS, WGRAD_ONLY
from benchmarks.study.results import CellResult
from benchmarks.study.studies import RULES
from benchmarks.study.tables import interval, number
from mxjax.tables import table
from training.paired_statistics import paired_difference

Cells = Mapping[str, CellResult]
_GROUP = "60m.tuned-60m"


class _Rest(NamedTuple):
    """Fprop and Dgrad: how the names of their cells and rules begin, and the cell without MXFP4 in Wgrad."""

    name: str
    prefix: str
    rules: str
    without: str

    def cell(self, cells: Cells, kind: str, rule: str) -> CellResult | None:
        rules = rule if rule == "even" else self.rules + rule  # `even` is a cell of the ladder
        return cells.get(f"{self.prefix}{kind}.{rules}.{_GROUP}")


_RESTS = (
    _Rest("MXFP4, `even`", "", "even-even-", "fprop_dgrad.even"),
    _Rest("FP8", WGRAD_ONLY, "", "fp8.own"),
)


def rules(cells: Cells) -> str:
    """Returns each cell beside those without MXFP4 in Wgrad, without a remedy, and with rule even."""
    rows = []
    for rest in _RESTS:
        for rule in RULES:
            for kind in WGRAD_KINDS:
                found = rest.cell(cells, kind, rule)
                if found is None or not found.losses:
                    continue
                bases = (
                    cells.get(f"{rest.without}.{_GROUP}"),
                    rest.cell(cells, "wgrad", rule) if kind != "wgrad" else None,
                    rest.cell(cells, kind, "even") if rule != "even" else None,
                )
                mean = number(statistics.fmean(found.losses.values()))
                named = [rest.name, kind, f"`{rule}`", len(found.losses), mean]
                rows.append([*named, *(x for base in bases for x in _difference(found, base))])
    beside = ("no MXFP4 in Wgrad", "no remedy", "rule even")
    columns = " | ".join(f"minus {name} | 95 %" for name in beside)
    return table(f"Fprop, Dgrad | Wgrad | its rule | seeds | loss | {columns}", rows)


def _difference(cell: CellResult, base: CellResult | None) -> tuple[str, str]:
    """Returns the mean difference paired by seed and its interval, or blanks without a base."""
    d = paired_difference(cell.losses, base.losses) if base is not None else None
    if d is None or not d.n:
        return "", ""
    return number(d.mean, "+.4f"), interval(d.low, d.high)
