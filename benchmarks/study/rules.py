"""Wgrad's scale rule and remedy while Fprop and Dgrad stay as they are, as Markdown tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from analysis.statistics import detectable, paired_difference, standard_deviation, t_interval
from benchmarks.study.cells import WGRAD_KINDS, WGRAD_ONLY
from benchmarks.study.claims import Tests, corrected_together
from benchmarks.study.results import CellResult
from benchmarks.study.studies import RULES
from benchmarks.study.tables import interval, number, with_interval
from mxjax.runtime.tables import table

Cells = Mapping[str, CellResult]
_GROUP = "60m.tuned-60m"


class Rest(NamedTuple):
    """Fprop and Dgrad: how the names of their cells and rules begin, and the cell without MXFP4 in Wgrad."""

    name: str
    prefix: str
    rules: str
    without: str

    def cell(self, cells: Cells, kind: str | None, rule: str) -> CellResult | None:
        if kind is None:
            return cells.get(f"{self.without}.{_GROUP}")
        rules = rule if rule == "even" else self.rules + rule  # `even` is a cell of the ladder
        return cells.get(f"{self.prefix}{kind}.{rules}.{_GROUP}")


RESTS = (
    Rest("MXFP4, `even`", "", "even-even-", "fprop_dgrad.even"),
    Rest("FP8", WGRAD_ONLY, "", "fp8.own"),
)
UNCLIPPED = ("rceil", "ceil")
"""The rules that clip nothing."""
_EFFECTS = {
    "Wgrad costs loss": ("wgrad", None),
    "H16 takes off loss": ("wgrad_hadamard", "wgrad"),
    "redrawn signs take off loss": ("wgrad_rht", "wgrad"),
    "stochastic rounding takes off loss": ("wgrad_sr", "wgrad"),
    "stochastic rounding after 3/4 takes off loss": ("wgrad_sr34", "wgrad"),
    "with H16 a cost remains": ("wgrad_hadamard", None),
    "redrawn signs differ from H16": ("wgrad_rht", "wgrad_hadamard"),
    "stochastic rounding differs from H16": ("wgrad_sr", "wgrad_hadamard"),
    "stochastic rounding differs from redrawn signs": ("wgrad_sr", "wgrad_rht"),
    "stochastic rounding after 3/4 differs from stochastic rounding": ("wgrad_sr34", "wgrad_sr"),
}
"""Kinds of Wgrad, the second taken off from the first; None has no MXFP4 in Wgrad."""


def effects(cells: Cells) -> str:
    """Returns what Wgrad costs and its remedies take off in the mean over the rules, corrected together.

    A seed is one sample: the mean of its differences over the rules, and over what Fprop and Dgrad have.
    """
    clipping = [rule for rule in RULES if rule not in UNCLIPPED]
    rows = []
    for text, (kind, base) in _EFFECTS.items():
        halves = [mean_by_seed(cells, [rest], RULES, kind, base) for rest in RESTS]
        both, clipped, unclipped = (
            mean_by_seed(cells, RESTS, rules, kind, base) for rules in (RULES, clipping, UNCLIPPED)
        )
        more = {seed: x - clipped[seed] for seed, x in unclipped.items() if seed in clipped}
        parts = [t_interval(list(d.values())) for d in (*halves, both, clipped, unclipped, more)]
        shown = number(detectable(standard_deviation(list(both.values())), len(both)), ".3f")
        rows.append([text, *(with_interval(e, "+.3f") for e in parts), shown, len(both)])
    for row, p in zip(rows, corrected_together([p for _, p in tests(cells)]), strict=True):
        row.insert(-2, number(p, ".2g"))
    if not any(row[-1] for row in rows):
        return "Not run yet: `rules-60m`."
    beside = " | ".join(f"beside {rest.name}" for rest in RESTS)
    rules = f"{', '.join(clipping)} | {', '.join(UNCLIPPED)} | the latter minus the former"
    header = (
        f"mean over the rules | {beside} | both | {rules} | p of both (Holm) | detectable in both | seeds"
    )
    return table(header, [row for row in rows if row[-1]])


def tests(cells: Cells) -> Tests:
    """Returns the tests of the means over the rules, and over what Fprop and Dgrad have."""
    found = {text: mean_by_seed(cells, RESTS, RULES, *kinds) for text, kinds in _EFFECTS.items()}
    return [(text, t_interval(list(by_seed.values())).p) for text, by_seed in found.items()]


def mean_by_seed(
    cells: Cells, rests: Sequence[Rest], rules: Sequence[str], kind: str, base: str | None
) -> dict[int, float]:
    """Returns the mean difference of two kinds of Wgrad for the seeds that all cells have."""
    pairs = [[rest.cell(cells, k, rule) for k in (kind, base)] for rest in rests for rule in rules]
    losses = [[{} if cell is None else cell.losses for cell in pair] for pair in pairs]
    seeds = set.intersection(*(set(found) for pair in losses for found in pair))
    return {seed: statistics.fmean(a[seed] - b[seed] for a, b in losses) for seed in sorted(seeds)}


def rules(cells: Cells) -> str:
    """Returns each cell beside those without MXFP4 in Wgrad, without a remedy, and with rule even."""
    rows = []
    for rest in RESTS:
        for rule in RULES:
            for kind in WGRAD_KINDS:
                found = rest.cell(cells, kind, rule)
                if found is None or not found.losses:
                    continue
                bases = (
                    rest.cell(cells, None, rule),
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
