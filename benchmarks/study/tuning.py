"""The choice of the learning rate, and of the number of seeds.

The rule: of the rates of fp8 that have LEAST_SEEDS finished runs, the one with the lowest mean loss; if a
lower rate is within one standard error of the difference, the lower one. If it is the highest or lowest rate
tried, the grid is too short and the choice is provisional.

The spread of the seeds is no part of the rule. Three runs bound a standard deviation to between half and six
times what they show; at 1e-3 three seeds spread over .011 and eight over .094. How many seeds a difference
needs follows instead from the scatter of the pairs (`analysis.statistics.seeds_needed`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from analysis.statistics import standard_deviation
from benchmarks.study.cells import BASELINE
from benchmarks.study.results import CellResult, size_of

LEAST_SEEDS = 3


class Setting(NamedTuple):
    """Everything of fp8's runs that a choice of learning rate leaves as it is."""

    model: str
    warmup: int
    constant: bool


class Choice(NamedTuple):
    """The chosen rate; `at_edge` if the grid ends there."""

    lr: float
    at_edge: bool


def candidates(cells: Iterable[CellResult]) -> dict[Setting, dict[float, list[CellResult]]]:
    """Returns the fp8 cells of runs of one epoch by setting and learning rate."""
    found: dict[Setting, dict[float, list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        p = cell.protocol
        plain = (p["steps"], p["batch"], p["seq"], p.get("outlier_channels", 0)) == (700, 64, 512, 0)
        if cell.policy == BASELINE and plain:
            found[Setting(cell.model, p["warmup"], p["horizon"] is not None)][p["lr"]].append(cell)
    return {
        setting: dict(sorted(found[setting].items()))
        for setting in sorted(found, key=lambda s: (size_of(s.model), s))
    }


def losses_of(cells: Iterable[CellResult]) -> list[float]:
    """Returns the final losses of all runs that did not diverge."""
    return [loss for cell in cells for loss in cell.losses.values()]


def choose(rates: dict[float, list[CellResult]]) -> Choice | None:
    """Returns the learning rate by the rule; None if no rate has enough runs."""
    losses = {lr: losses_of(cells) for lr, cells in rates.items()}
    usable = {lr: values for lr, values in losses.items() if len(values) >= LEAST_SEEDS}
    if not usable:
        return None
    means = {lr: math.fsum(values) / len(values) for lr, values in usable.items()}
    best = min(usable, key=lambda lr: means[lr])

    def squared_error(lr: float) -> float:
        return standard_deviation(usable[lr]) ** 2 / len(usable[lr])

    near = (
        lr for lr in usable if means[lr] - means[best] <= math.sqrt(squared_error(lr) + squared_error(best))
    )
    lr = min(near)
    return Choice(lr, lr in (min(usable), max(usable)))
