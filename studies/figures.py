"""Draws the figures of the README from the numbers under docs/results.

    python -m studies.figures [--out docs/figures]

ladder.svg: final validation loss of each policy against fp8, paired by seed. speed.svg: training tokens/s
on text against bfloat16. gradients.svg, gradient-values.svg: a real gradient's
errors and values. The same numbers give the same files, so run this after new results are committed.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from analysis.statistics import Estimate, paired_difference
from studies import gradients
from studies.documents import STYLE
from studies.ladder.cells import BASELINE
from studies.ladder.results import gather, read_runs
from studies.ladder.studies import LADDER

ROOT = pathlib.Path(__file__).parents[1]
RUNS = ROOT / "docs" / "results" / "study" / "runs.jsonl"
LADDER_GROUP = ("60m", "tuned-60m")
"""Model and protocol of the runs that the figure of the ladder shows."""
GRADIENTS = ROOT / "docs" / "results" / "gradients.json"
SPEEDS = {
    "60m, 64 x 512": "60m-2602f61.json",
    "125m, 64 x 512": "125m-2602f61.json",
    "350m, 64 x 512": "350m-2602f61.json",
    "Llama 3.2 1B, 4 x 4096": "llama3.2-1b-2602f61.json",
    "Llama 3.1 8B, 2 x 8192, two GPUs": "llama3.1-8b-2gpus-2602f61.json",
}
"""The file of each model and its tokens a step; lines are relative to bf16 there."""
LINES = {
    "PyTorch, autocast": ("PyTorch, bfloat16", "white", "///"),
    "wgrad_hadamard": ("wgrad_hadamard", "#17365d", ""),
    "wgrad_hadamard head=fp8": ("wgrad_hadamard, head=fp8", "#8db3e2", ""),
}
"""Label, color and hatch of each line's bars; the colors differ in brightness, for print in grey."""


class LadderPoint(NamedTuple):
    """A cell's distance to fp8, in nats.

    Attributes:
      rule: scale rule, "" for policies without MXFP4.
      diverged: runs that diverged; they do not count in the difference.
    """

    policy: str
    rule: str
    difference: Estimate
    diverged: int


def ladder_points(runs: Sequence[dict[str, Any]]) -> list[LadderPoint]:
    """Returns the points of the ladder's policies in LADDER_GROUP, in the ladder's order.

    A cell with fewer than two pairs has no point.
    """
    chosen = [run for run in runs if (run["model"], run["protocol"]["name"]) == LADDER_GROUP]
    cells = {(cell.policy, cell.rules): cell for cell in gather(chosen).values()}
    base = cells[BASELINE, ""].losses
    points = []
    for policy in LADDER:
        for rule in ("", "floor", "even"):
            if policy == BASELINE or (policy, rule) not in cells:
                continue
            cell = cells[policy, rule]
            difference = paired_difference(cell.losses, base)
            if difference.n < 2:
                continue
            points.append(LadderPoint(policy, rule, difference, cell.n_diverged))
    return points


def draw_ladder(points: Sequence[LadderPoint]) -> Figure:
    """Draws the differences to fp8 with their 95 % intervals, one row a policy, the lowest loss first."""
    ranked = sorted(points, key=lambda point: point.difference.mean)
    policies = list(dict.fromkeys(point.policy for point in ranked))
    figure = Figure(figsize=(7, 1.1 + 0.42 * len(policies)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    markers = {"": ("D", "#d0d4da", 0.0), "floor": ("o", "#17365d", -0.14), "even": ("s", "white", 0.14)}
    drawn = set()
    for point in points:
        marker, fill, offset = markers[point.rule]
        mean, low, high, *_ = point.difference
        y = policies.index(point.policy) + offset
        label = f"scale rule {point.rule}" if point.rule and point.rule not in drawn else None
        drawn.add(point.rule)
        if not math.isnan(low):
            axes.plot([low, high], [y, y], color="black", linewidth=1.2, zorder=2)
        style = {"markerfacecolor": fill, "markeredgecolor": "black", "linestyle": "none", "zorder": 3}
        axes.plot([mean], [y], marker=marker, label=label, **style)
        note = f"{mean:+.3f}" + (f", {point.diverged} diverged" if point.diverged else "")
        right = mean if math.isnan(high) else max(high, mean)
        axes.annotate(note, (right, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.set_xlabel("final validation loss minus fp8's, in nats\nmean and 95 % interval, paired by seed")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if drawn - {""}:
        figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return figure


def relative_speeds() -> dict[str, dict[str, float]]:
    """Returns tokens/s over mxjax's in bfloat16, by model and line, where a line was measured."""
    folder, found = ROOT / "docs" / "results" / "train-h200", {}
    for title, file in SPEEDS.items():
        lines = json.loads((folder / file).read_text())["lines"]
        speeds = {line["name"]: line["tokens_per_s"] for line in lines}
        found[title] = {name: speeds[name] / speeds["bf16"] for name in LINES if name in speeds}
    return found


def draw_speed(speeds: dict[str, dict[str, float]]) -> Figure:
    """Draws a group of bars for each model."""
    figure = Figure(figsize=(7, 0.9 + 0.7 * len(speeds)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    height = 0.8 / len(LINES)
    for i, (name, (label, color, hatch)) in enumerate(LINES.items()):
        rows = {row: measured[name] for row, measured in enumerate(speeds.values()) if name in measured}
        y = [row + height * ((len(LINES) - 1) / 2 - i) for row in rows]
        style = {"color": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.8}
        axes.barh(y, list(rows.values()), 0.94 * height, label=label, **style)
        for at, speed in zip(y, rows.values(), strict=True):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            note = {"textcoords": "offset points", "va": "center", "bbox": box, "fontsize": 8}
            axes.annotate(f"{speed:.2f}", (speed, at), (4, 0), **note)
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.set_ylim(len(speeds) - 0.5, -0.5)
    axes.set_xlim(0, 1.5)
    axes.set_xlabel("training tokens/s on text, mxjax in bf16 = 1", fontsize=10)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9, reverse=True)
    return figure


def write_figures(out: pathlib.Path) -> None:
    """Draws the figures into a folder."""
    measured = json.loads(GRADIENTS.read_text())
    with matplotlib.rc_context(STYLE):
        figures = {
            "ladder": draw_ladder(ladder_points(read_runs(RUNS))),
            "speed": draw_speed(relative_speeds()),
            "gradients": gradients.draw_errors(measured),
            "gradient-values": gradients.draw_values(measured),
        }
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            metadata = {"Date": None, "Creator": "studies.figures"}
            figure.savefig(out / f"{name}.svg", facecolor="white", metadata=metadata)  # also on dark pages


def main() -> None:
    """Draws the figures into the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m studies.figures", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "figures")
    write_figures(parser.parse_args().out)


if __name__ == "__main__":
    main()
