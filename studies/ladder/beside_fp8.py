"""Costs beside the paper's, in nats.

arXiv 2605.09825 counts tokens beyond FP8 to a loss of 3.3, of Llama 3.1 8B. The slopes of published curves of
that model near this loss turn them into nats.
"""

import csv
import math
import pathlib
from collections.abc import Mapping

from analysis.statistics import Estimate, paired_difference
from mxjax.runtime.tables import table
from studies.ladder.tables import GROUPS, Cells, with_interval

SLOPES = pathlib.Path(__file__).parents[2] / "docs" / "results" / "study" / "slopes.csv"
PAPER: Mapping[str, tuple[str, tuple[float, float] | None]] = {
    "Fprop": ("fprop", (0.08, 0.09)),
    "Fprop, Dgrad": ("fprop_dgrad", (0.10, 0.11)),
    "all three": ("wgrad", (0.26, 0.27)),
    "all three, H16 on Wgrad": ("wgrad_hadamard", (0.08, 0.09)),
    "all three, random-sign H16 on Wgrad": ("wgrad_rht", None),
    "all three, stochastic rounding of Wgrad": ("wgrad_sr", None),
}
"""The paper's table: the GEMMs in MXFP4, our policy, and tokens beyond FP8; None does not converge."""


def nats(cells: Cells) -> str:
    """Returns the final losses beyond fp8's under `floor`, beside the paper's tokens and their nats."""
    rows = []
    for name, (policy, tokens) in PAPER.items():
        paper = ["does not converge"] * 2
        if tokens is not None:
            low, high = in_nats(tokens)
            paper = [f"{100 * tokens[0]:.0f} to {100 * tokens[1]:.0f} %", f"{low:.3f} to {high:.3f}"]
        found = (beyond(cells, policy, group) for group in GROUPS)
        rows.append([name, *paper, *("" if not e.n else with_interval(e, "+.4f") for e in found)])
    return table(f"MXFP4 in | paper, tokens | paper, nats | {' | '.join(GROUPS.values())}", rows)


def beyond(cells: Cells, policy: str, group: tuple[str, str]) -> Estimate:
    """Returns a policy's final loss beyond fp8's in a group."""
    where = ".".join(group)
    names = (f"{policy}.floor.{where}", f"fp8.own.{where}")
    ours, base = (cells[name].losses if name in cells else {} for name in names)
    return paired_difference(ours, base)


def in_nats(tokens: tuple[float, float]) -> tuple[float, float]:
    """Returns the least and the most nats that so many tokens are worth by the published curves."""
    with SLOPES.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "8B" in row["curve"]]
    slopes = [-float(row["nats an e-fold of tokens"]) for row in rows]
    return min(slopes) * math.log1p(tokens[0]), max(slopes) * math.log1p(tokens[1])
