"""What a policy costs by the error of its gradients, as Markdown tables.

A law gives a cell's final loss minus fp8's as a constant plus slopes times statistics of the diagnosis. The
slopes are least squares over the cells of a family, for each seed by itself, so that the seeds show how far
the runs determine them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.study.cells import WGRAD_KINDS, WGRAD_ONLY, Cell, policy_of
from benchmarks.study.results import CellResult
from benchmarks.study.studies import RULES
from benchmarks.study.tables import interval, number
from mxjax.tables import table
from training.paired_statistics import Estimate, differences, t_interval

Cells = Mapping[str, CellResult]
GROUP = "60m.tuned-60m"
BASE = f"fp8.own.{GROUP}"
ALONE, BESIDE = "Wgrad alone", "Wgrad beside `even`"
"""Families of cells that differ in Wgrad: Fprop and Dgrad are in FP8, or in MXFP4 with the rule even."""
LAWS = {"error": ("noise + repeating",), "split": ("noise", "across")}
"""The laws by name: the squared error as a whole; its noise and its repeating part across the gradient."""
LEAST_CELLS = 6


class Fit(NamedTuple):
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
    if record is None or BASE not in cells:
        return "Not measured yet."
    rows = []
    for family, chosen in {**families(cells, record), "all": measured(cells, record)}.items():
        if len(chosen) < LEAST_CELLS:
            continue
        row = [family, len(chosen)]
        for law in LAWS:
            found = fit(cells, chosen, record, law)
            row += [_shown(t_interval(list(column)), "+.2f") for column in found.coefficients.T[1:]]
            row += [number(found.explained, ".2f"), number(found.crossed, ".2f")]
        rows.append(row)
    quality = "explained | cell left out"
    return table(f"cells | number | error | {quality} | noise | repeating | {quality}", rows)


def beyond(cells: Cells, record: Mapping[str, Any] | None) -> str:
    """Returns what cells cost beyond the law of the error over all cells, by the remedies of their GEMMs."""
    if record is None or BASE not in cells or len(chosen := measured(cells, record)) < LEAST_CELLS:
        return "Not measured yet."
    coefficients = fit(cells, chosen, record, "error").coefficients
    groups: dict[str, list[np.ndarray]] = {}
    for cell in chosen:
        expected = coefficients @ [1.0, *statistics(cell.label, record, "error")]
        groups.setdefault(remedies(cell), []).append(np.array(costs(cells, cell)) - expected)
    rows = [
        [kind, len(found), _shown(t_interval(np.mean(found, 0).tolist()), "+.4f")]
        for kind, found in sorted(groups.items())
    ]
    return table("remedies | cells | cost beyond the law", rows)


def remedies(cell: CellResult) -> str:
    """Returns the remedies that a cell's policy has in any GEMM."""
    policy = policy_of(Cell(cell.policy, cell.rules, cell.model, "tuned-60m", 1))
    found = set()
    for gemm in (policy.fprop, policy.dgrad, policy.wgrad):
        if gemm.rotation is not None:
            found.add("redrawn signs" if gemm.rotation.signs == "redrawn" else "H16 or H32")
        if "stochastic" in (gemm.lhs.rounding, gemm.rhs.rounding):
            found.add("stochastic rounding")
    return " and ".join(sorted(found)) or "none"


def fit(cells: Cells, chosen: Sequence[CellResult], record: Mapping[str, Any], law: str) -> Fit:
    """Fits a law to the costs of cells."""
    x = np.array([[1.0, *statistics(cell.label, record, law)] for cell in chosen])
    y = np.array([costs(cells, cell) for cell in chosen])
    coefficients = np.linalg.lstsq(x, y, rcond=None)[0]
    mean = y.mean(1)
    errors = mean - x @ coefficients.mean(1)
    left_out = errors / (1 - np.einsum("ij,ji->i", x, np.linalg.pinv(x)))  # as if fitted without the cell
    total = float(np.sum((mean - mean.mean()) ** 2))
    explained, crossed = (1 - float(np.sum(e**2)) / total for e in (errors, left_out))
    return Fit(coefficients.T, explained, crossed)


def families(cells: Cells, record: Mapping[str, Any]) -> dict[str, list[CellResult]]:
    """Returns the cells of each family that can be fitted."""
    found = measured(cells, record)
    return {name: [c for c in found if family_of(c.policy, c.rules) == name] for name in (ALONE, BESIDE)}


def family_of(policy: str, rules: str) -> str | None:
    """Returns the family of a cell, None if it is in neither."""
    if policy.removeprefix(WGRAD_ONLY) not in WGRAD_KINDS:
        return None
    if policy.startswith(WGRAD_ONLY):
        return ALONE
    return BESIDE if rules in ("even", *(f"even-even-{rule}" for rule in RULES)) else None


def measured(cells: Cells, record: Mapping[str, Any]) -> list[CellResult]:
    """Returns the cells that the diagnosis has and whose losses have all seeds of fp8's."""
    return [
        cell
        for name, cell in cells.items()
        if name.endswith(f".{GROUP}") and name != BASE and cell.label in record["cells"]
        if cell.losses.keys() == cells[BASE].losses.keys()
    ]


def costs(cells: Cells, cell: CellResult) -> list[float]:
    """Returns a cell's final loss minus fp8's by seed."""
    return differences(cell.losses, cells[BASE].losses)


def statistics(label: str, record: Mapping[str, Any], law: str) -> list[float]:
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


def _shown(e: Estimate, form: str) -> str:
    return f"{number(e.mean, form)} ({interval(e.low, e.high, form)})"
