"""The study's tables, as Markdown, from its finished runs."""

import csv
import math
import pathlib
import statistics
from collections.abc import Mapping

from analysis.statistics import Estimate, paired_difference, standard_deviation
from mxjax.runtime.tables import table
from studies.ladder.cells import FRESH, MUON_RATE
from studies.ladder.results import CellResult, baseline, by_group
from studies.ladder.studies import STUDIES

Cells = Mapping[str, CellResult]
GROUPS: Mapping[tuple[str, str], str] = {
    ("60m", "tuned-60m"): "60m, seeds 0-7",
    ("60m", FRESH): "60m, seeds 16-23",
    ("60m", "constant-60m"): "60m, constant rate",
    ("60m", "tuned-60m-4epochs"): "60m, four epochs",
    ("60m", f"{FRESH}-muon-lr{MUON_RATE}"): "60m, Muon",
    ("125m", "tuned-125m"): "125m",
    ("350m", "tuned-350m"): "350m",
}
"""Models and protocols of the runs that stand side by side, and their names in tables and figures."""


def number(x: float, form: str = ".4f") -> str:
    """Returns a number, or "-" for NaN."""
    return "-" if math.isnan(x) else format(x, form)


def interval(low: float, high: float, form: str = "+.4f") -> str:
    """Returns an interval, or "-" without one."""
    return "-" if math.isnan(low) else f"{low:{form}} to {high:{form}}"


def with_interval(e: Estimate, form: str) -> str:
    """Returns an estimate with its interval in brackets."""
    return f"{number(e.mean, form)} ({interval(e.low, e.high, form)})"


def beside(cell: CellResult, base: CellResult | None) -> list[object]:
    """Returns a cell's label, runs, diverged runs, mean loss, and difference to `base` with the interval."""
    losses, difference = list(cell.losses.values()), ["-", "-"]
    if base is not None and base is not cell:
        d = paired_difference(cell.losses, base.losses)
        difference = [number(d.mean, "+.4f"), interval(d.low, d.high)]
    mean = number(statistics.mean(losses)) if losses else "-"
    return [cell.label, len(cell.runs), cell.n_diverged, mean, *difference]


def progress(cells: Cells) -> str:
    """Returns the finished and missing runs of each study."""
    rows = []
    for study, wanted in STUDIES.items():
        if study.startswith("recipes"):  # docs/recipes.md
            continue
        runs = {c: cells[c.name].runs if c.name in cells else {} for c in wanted}
        left = {c: sum(seed not in runs[c] for seed in c.seed_numbers) for c in wanted}
        missing = [c for c in wanted if left[c] > 0]
        total = sum(c.seeds for c in wanted)
        rows.append([study, len(wanted), total, total - sum(left[c] for c in missing), len(missing)])
    return table("study | cells | runs | finished | cells with runs missing", rows)


def tuned_rates(cells: Cells) -> str:
    """Returns the losses of fp8 and of policies with MXFP4 in Wgrad by learning rate, warm-up 150 steps."""
    policies = ("fp8.own", "wgrad.floor", "wgrad_hadamard.floor", "wgrad_sr.floor")
    rows = []
    for rate in ("1e-3", "2e-3", "3e-3", "4e-3", "6e-3"):
        names = {"3e-3": ("tuned-60m",), "6e-3": ("tuned-60m-lr2x",)}.get(rate, (f"decay-w150-lr{rate}",))
        found = [
            [cells[key].losses for name in names if (key := f"{p}.60m.{name}") in cells] for p in policies
        ]
        seeds = [sorted({seed for losses in each for seed in losses if seed < 3}) for each in found]
        means = [
            number(statistics.mean(each[0][seed] for seed in of)) if of else ""
            for each, of in zip(found, seeds, strict=True)
        ]
        rows.append([rate, *means])
    return table("learning rate | fp8 | wgrad floor | wgrad_hadamard floor | wgrad_sr floor", rows)


def final_losses(cells: Cells) -> str:
    """Returns the losses of each group of cells that has fp8 and another policy."""
    parts = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        if base is None or len(group) < 2:
            continue
        rows = []
        for cell in group:
            *runs, difference, between = beside(cell, base)
            deviation = number(standard_deviation(list(cell.losses.values())))
            rows.append([*runs, deviation, difference, between, cell.devices])
        header = "policy, rules | runs | diverged | loss | sd | minus fp8 | 95 % | device"
        parts.append(f"`{model}`, protocol `{protocol}`:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


PAPER_COLUMNS = "MXFP4 in | rule | round to nearest | stochastic rounding | random-sign H16 | H16"
PAPER_ROWS = (
    ("Fprop", ("fprop",)),
    ("Fprop, Dgrad", ("fprop_dgrad",)),
    ("Fprop, Dgrad, Wgrad; remedy on Wgrad", ("wgrad", "wgrad_sr", "wgrad_rht", "wgrad_hadamard")),
    ("the same; remedy on all three", ("", "full_sr", "full_rht", "full_hadamard")),
)


def paper_rows(shown: Mapping[str, str]) -> list[list[str]]:
    """Returns the rows of the paper's table that have something to show; what they lack is blank."""
    rows = []
    for rule in ("floor", "even"):
        for name, policies in PAPER_ROWS:
            chosen = [shown.get(f"{policy} {rule}", "") for policy in (*policies, "", "", "")[:4]]
            if any(chosen):
                rows.append([name, f"`{rule}`", *chosen])
    return rows


SLOPES = pathlib.Path(__file__).parents[2] / "docs" / "results" / "study" / "slopes.csv"
PAPER: Mapping[str, tuple[str, tuple[float, float] | None]] = {
    "Fprop": ("fprop", (0.08, 0.09)),
    "Fprop, Dgrad": ("fprop_dgrad", (0.10, 0.11)),
    "all three": ("wgrad", (0.26, 0.27)),
    "all three, H16 on Wgrad": ("wgrad_hadamard", (0.08, 0.09)),
    "all three, random-sign H16 on Wgrad": ("wgrad_rht", None),
    "all three, stochastic rounding of Wgrad": ("wgrad_sr", None),
}
"""The paper's table: the GEMMs in MXFP4, our policy, and tokens beyond FP8; None does not converge.

arXiv 2605.09825 counts tokens beyond FP8 to a loss of 3.3, of Llama 3.1 8B. The slopes of published curves of
that model near this loss turn them into nats.
"""


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
