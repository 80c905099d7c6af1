"""Losses beside fp8's, as Markdown: in nats beside the paper's, along a run, and those of fp8 that runs miss.

arXiv 2605.09825 counts tokens beyond FP8 to a loss of 3.3, of Llama 3.1 8B. The slopes of published curves of
that model near this loss turn them into nats.
"""

import csv
import math
import pathlib
from collections.abc import Mapping

from analysis.statistics import Estimate, differences, loss_at, paired_difference, t_interval, tokens_to_reach
from mxjax.runtime.tables import table
from studies.ladder.cells import BASELINE
from studies.ladder.results import CellResult
from studies.ladder.studies import LADDER
from studies.ladder.tables import GROUPS, Cells, with_interval

CHANGES = {
    "none minus fp8": ("wgrad.floor", "fp8.own"),
    "H16 minus none": ("wgrad_hadamard.floor", "wgrad.floor"),
    "redrawn signs minus none": ("wgrad_rht.floor", "wgrad.floor"),
    "stochastic rounding minus none": ("wgrad_sr.floor", "wgrad.floor"),
}
SHARES = (0.8, 0.9, 0.95)
"""Shares of fp8's run whose loss the others may miss; the first is the paper's."""
_PARTS = 4


def along(cells: Cells) -> str:
    """Returns the differences of CHANGES after each quarter of a run."""
    rows = []
    for group, name in GROUPS.items():
        found = {text: change_along(cells, group, text) for text in CHANGES}
        steps = list(found["none minus fp8"])
        ends = {len(steps) * part // _PARTS for part in range(1, _PARTS + 1)} - {0}
        for tokens in [steps[end - 1] for end in sorted(ends)]:
            shown = [of.get(tokens) for of in found.values()]
            texts = ("" if e is None else with_interval(e, "+.4f") for e in shown)
            rows.append([name, f"{tokens / 1e6:.1f}", *texts, shown[0].n if shown[0] else 0])
    if not rows:
        return "Not run yet: `ladder-60m-tuned`."
    return table(f"model | million tokens | {' | '.join(CHANGES)} | seeds", rows)


def change_along(cells: Cells, group: tuple[str, str], text: str) -> dict[int, Estimate]:
    """Returns one of CHANGES by the tokens of an evaluation, paired by seed."""
    ours, base = (_losses_along(cells.get(f"{name}.{'.'.join(group)}")) for name in CHANGES[text])
    found = {n: t_interval(differences(ours[n], base[n])) for n in sorted(ours.keys() & base.keys())}
    return {n: estimate for n, estimate in found.items() if estimate.n}


def _losses_along(cell: CellResult | None) -> dict[int, dict[int, float]]:
    """Returns a cell's losses by tokens, then by seed, without runs that diverged."""
    found: dict[int, dict[int, float]] = {}
    for seed in cell.losses if cell else ():
        for tokens, loss in cell.runs[seed]["evaluations"] if cell else ():
            found.setdefault(int(tokens), {})[seed] = loss
    return found


def missed(cells: Cells) -> str:
    """Returns how many runs of each policy never reach the loss that fp8 has after each of SHARES."""
    parts = []
    for group, name in GROUPS.items():
        rows = []
        for policy in LADDER:
            for rule in ("floor", "even"):
                if (found := missed_by(cells, group, policy, rule)) is not None:
                    rows.append([f"{policy} {rule}", *(f"{n} of {of}" for n, of in found)])
        if rows:
            header = "policy, rules | " + " | ".join(f"at {share:.0%}".replace("%", " %") for share in SHARES)
            parts.append(f"{name}:\n\n{table(header, rows)}")
    return "\n\n".join(parts) or "Not run yet: `ladder-60m-tuned`."


def missed_by(cells: Cells, group: tuple[str, str], policy: str, rule: str) -> list[tuple[int, int]] | None:
    """Returns for each of SHARES the runs that miss fp8's loss and all runs; None if either has not run."""
    where = ".".join(group)
    cell, base = cells.get(f"{policy}.{rule}.{where}"), cells.get(f"{BASELINE}.own.{where}")
    if cell is None or base is None:
        return None
    seeds = sorted(cell.runs.keys() & base.losses.keys())
    found = []
    for share in SHARES:
        n = 0
        for seed in seeds:
            curve = base.runs[seed]["evaluations"]
            loss = loss_at(curve, share * curve[-1][0])
            n += seed not in cell.losses or tokens_to_reach(cell.runs[seed]["evaluations"], loss) is None
        found.append((n, len(seeds)))
    return found


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
