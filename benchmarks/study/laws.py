"""How far the error of a policy's gradients tells what it costs, as Markdown tables.

A law gives a cell's final loss minus fp8's, in the mean over the seeds, as a constant plus slopes times
features, by least squares over cells. Intervals are over the cells, so that they hold what the law misses.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from analysis.statistics import CONFIDENCE, differences, t_interval
from benchmarks.study.cells import WGRAD_KINDS, WGRAD_ONLY, Cell, policy_of
from benchmarks.study.results import CellResult
from benchmarks.study.studies import RULES
from benchmarks.study.tables import interval, number
from mxjax.policy import OPERANDS, Gemm, Policy
from mxjax.runtime.tables import table

Cells = Mapping[str, CellResult]
GROUP = "60m.tuned-60m"
BASE = f"fp8.own.{GROUP}"
ALONE, BESIDE = "Wgrad alone", "Wgrad beside `even`"
"""Families of cells that differ in Wgrad: Fprop and Dgrad are in FP8, or in MXFP4 with the rule even."""
LAWS = {"error": "squared error", "split": "noise and repeating error", "remedy": "mean of its remedy"}
"""What the laws go by. The last one takes the mean over the rules of cells with the same remedy of Wgrad."""
LEAST_CELLS = 6


class Fit(NamedTuple):
    """A law fitted to cells.

    Attributes:
      coefficients: the constant, and the slopes.
      halves: half of each one's 95 % interval.
      errors: what each cell costs beyond the law.
      explained, crossed: share of the variance of the costs that it explains, and of cells left out.
    """

    coefficients: np.ndarray
    halves: np.ndarray
    errors: np.ndarray
    explained: float
    crossed: float

    def of(self, features: Sequence[float]) -> float:
        """Returns the cost of a cell with these features."""
        return float(self.coefficients @ [1.0, *features])


def laws(cells: Cells, record: Mapping[str, Any] | None) -> str:
    """Returns the laws of each family and of all cells, also within cells of one Fprop."""
    if record is None or BASE not in cells:
        return "Not measured yet."
    found = measured(cells, record)
    groups = {name: chosen for name, chosen in families(found).items() if len(chosen) >= LEAST_CELLS}
    rows = [
        _row(name, chosen, law, fit(cells, chosen, record, law))
        for name, chosen in groups.items()
        for law in LAWS
    ]
    if len(groups) == 2:
        name, chosen = "both, within each", [cell for of_family in groups.values() for cell in of_family]
        by = [family_of(cell.policy, cell.rules) for cell in chosen]
        rows += [_row(name, chosen, law, within(cells, chosen, record, law, by)) for law in LAWS]
    if len(found) >= LEAST_CELLS:
        rows += [_row("all", found, law, fit(cells, found, record, law)) for law in ("error", "split")]
        by = [str(_policy(cell).fprop) for cell in found]
        rows.append(_row("all, within one Fprop", found, "error", within(cells, found, record, "error", by)))
    slopes = (
        "slope of the error or its noise, relative to a batch's gradient | "
        "of the repeating part, relative to the expected gradient"
    )
    return table(f"cells | number | law by | constant | {slopes} | explained | left out", rows)


def _row(name: str, chosen: Sequence[CellResult], law: str, found: Fit) -> list[object]:
    shown = [_shown(found, i) for i in range(len(found.coefficients))] if law != "remedy" else []
    numbers = (shown + [""] * 3)[:3]
    return [
        name,
        len(chosen),
        LAWS[law],
        *numbers,
        number(found.explained, ".2f"),
        number(found.crossed, ".2f"),
    ]


def beyond(cells: Cells, record: Mapping[str, Any] | None) -> str:
    """Returns what cells cost beyond the law of the error over all cells, by their remedies."""
    if record is None or BASE not in cells or len(chosen := measured(cells, record)) < LEAST_CELLS:
        return "Not measured yet."
    groups = defaultdict(list)
    for cell, error in zip(chosen, fit(cells, chosen, record, "error").errors, strict=True):
        groups[_where(_policy(cell))].append(float(error))
    rows = []
    for name, errors in sorted(groups.items()):
        e = t_interval(errors)
        rows.append([name, len(errors), number(e.mean, "+.4f"), interval(e.low, e.high)])
    return table("remedy | cells | cost beyond the law | 95 % over cells", rows)


def parts(cells: Cells, record: Mapping[str, Any] | None) -> str:
    """Returns what noise and repeating error make of the cost of each kind of Wgrad, by the law within the
    families. All are means over the cells, minus those of their family."""
    if record is None or BASE not in cells:
        return "Not measured yet."
    chosen = [c for of_family in families(measured(cells, record)).values() for c in of_family]
    if len(chosen) < LEAST_CELLS:
        return "Not measured yet."
    by = [family_of(cell.policy, cell.rules) for cell in chosen]
    law = within(cells, chosen, record, "split", by)
    found = law.coefficients[1:] * [features(c.policy, c.rules, record, "split") for c in chosen]
    costs = np.array([cost(cells, cell) for cell in chosen])
    shown = np.column_stack([costs, found, law.errors])
    for family in set(by):
        members = [of == family for of in by]
        shown[members] -= shown[members].mean(0)
    groups = defaultdict(list)
    for cell, row in zip(chosen, shown, strict=True):
        groups[cell.policy.removeprefix(WGRAD_ONLY)].append(row)
    rows = []
    for kind, of_kind in groups.items():
        e = t_interval([float(row[-1]) for row in of_kind])
        means = (number(x, "+.4f") for x in np.mean(of_kind, axis=0))
        rows.append([kind, len(of_kind), *means, interval(e.low, e.high)])
    return table("Wgrad | cells | cost | by noise | by repeating error | beyond both | 95 % over cells", rows)


def remedies(cell: CellResult) -> str:
    """Returns the remedies that a cell's policy has in any GEMM."""
    policy = _policy(cell)
    found = {kind for name in OPERANDS for kind in _kinds(getattr(policy, name))}
    return " and ".join(sorted(found)) or "none"


def fit(cells: Cells, chosen: Sequence[CellResult], record: Mapping[str, Any], law: str) -> Fit:
    """Fits a law to the costs of cells."""
    x = np.array([[1.0, *features(cell.policy, cell.rules, record, law)] for cell in chosen])
    y = np.array([cost(cells, cell) for cell in chosen])
    return _least_squares(x, y, y - y.mean())


def within(
    cells: Cells, chosen: Sequence[CellResult], record: Mapping[str, Any], law: str, groups: Sequence[object]
) -> Fit:
    """Fits a law with a constant for each group of cells; the result has NaN in their place.

    Shares are of what the costs vary within the groups. Groups of one cell add nothing.
    """
    member = np.array([[group == g for g in sorted(set(groups), key=str)] for group in groups], float)
    slopes = np.array([features(cell.policy, cell.rules, record, law) for cell in chosen])
    y = np.array([cost(cells, cell) for cell in chosen])
    found = _least_squares(np.hstack([slopes, member]), y, y - member @ (member.T @ y / member.sum(0)))
    kept = ([math.nan, *values[: slopes.shape[1]]] for values in (found.coefficients, found.halves))
    return found._replace(**dict(zip(("coefficients", "halves"), map(np.array, kept), strict=True)))


def families(found: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Returns the cells of each family."""
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


def cost(cells: Cells, cell: CellResult) -> float:
    """Returns a cell's final loss minus fp8's, in the mean over the seeds that both have."""
    return float(np.mean(differences(cell.losses, cells[BASE].losses)))


def features(policy: str, rules: str, record: Mapping[str, Any], law: str) -> list[float]:
    """Returns what a law multiplies: squared norms, or 1 for the cell's remedy of Wgrad.

    Those of the error and its noise are relative to the gradient of one batch of the diagnosis, that of the
    error that repeats to the expected gradient, whose norm is the smaller.
    """
    if law == "remedy":
        return [float(policy.removeprefix(WGRAD_ONLY) == kind) for kind in list(WGRAD_KINDS)[1:]]
    split = record["cells"][f"{policy} {rules}".strip()]
    error = split["error"]["mean"] ** 2
    if law == "error":
        return [error]
    return [error * (1 - split["repeating_share"]["mean"]), split["across"]["mean"] ** 2]


def _least_squares(x: np.ndarray, y: np.ndarray, varied: np.ndarray) -> Fit:
    """Fits y by x; `varied` is y minus what counts as no law."""
    inverse = np.linalg.pinv(x.T @ x)
    coefficients = inverse @ x.T @ y
    errors = y - x @ coefficients
    free = len(y) - np.linalg.matrix_rank(x)
    variance = float(np.sum(errors**2)) / free if free > 0 else math.nan
    halves = stats.t.ppf((1 + CONFIDENCE) / 2, max(free, 1)) * np.sqrt(variance * np.diag(inverse))
    kept = 1 - np.einsum("ij,jk,ik->i", x, inverse, x)
    left_out = errors / np.where(kept > 1e-9, kept, 1)  # as if fitted without the cell; alone in its group: 0
    total = float(np.sum(varied**2))
    explained, crossed = (1 - float(np.sum(e**2)) / total for e in (errors, left_out))
    return Fit(coefficients, halves, errors, explained, crossed)


def _policy(cell: CellResult) -> Policy:
    return policy_of(Cell(cell.policy, cell.rules, cell.model, "tuned-60m", 1))


def _kinds(gemm: Gemm) -> list[str]:
    """Returns the remedies of a GEMM."""
    found = []
    if gemm.rotation is not None:
        found.append("redrawn signs" if gemm.rotation.signs == "redrawn" else "H16 or H32")
    if "stochastic" in (gemm.lhs.rounding, gemm.rhs.rounding):
        found.append("stochastic rounding")
    return found


def _where(policy: Policy) -> str:
    """Returns a policy's remedies and the GEMMs that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in OPERANDS:
        if kinds := _kinds(getattr(policy, name)):
            found[" and ".join(kinds)].append(name.capitalize())
    parts = (f"{kinds}: {'all three' if len(g) == 3 else ', '.join(g)}" for kinds, g in found.items())
    return "; ".join(parts) or "none"


def _shown(found: Fit, i: int) -> str:
    value, half = found.coefficients[i], found.halves[i]
    if math.isnan(value):
        return ""
    return f"{number(value, '+.3f')} ({interval(value - half, value + half, '+.3f')})"
