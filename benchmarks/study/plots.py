"""The study's plots from its finished runs. The same runs give the same files."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.study import tuning
from benchmarks.study.results import CellResult, baseline, by_group

_LINES = (("black", "o", "-"), ("#7f7f7f", "s", "--"), ("#404040", "^", ":"), ("#b0b0b0", "D", "-."))
"""Color, marker and line of each curve; they differ without color."""


def learning_rates(cells: Mapping[str, CellResult]) -> Figure:
    """Draws every final loss of fp8 over its learning rate, with a line through the means."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (setting, rates) in enumerate(tuning.candidates(cells.values()).items()):
        color, marker, line = _LINES[i % len(_LINES)]
        losses = {lr: tuning.losses_of(found) for lr, found in rates.items()}
        points = [(lr, loss) for lr, values in losses.items() for loss in values]
        axes.plot(*zip(*points, strict=True), marker, color=color, markerfacecolor="none", markersize=5)
        means = [(lr, sum(values) / len(values)) for lr, values in losses.items() if values]
        label = f"{setting.model}, warm-up {setting.warmup}" + (", constant" if setting.constant else "")
        axes.plot(*zip(*means, strict=True), line, color=color, marker=marker, markersize=3, label=label)
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="fp8's final validation loss, nats")
    axes.legend(frameon=False)
    return figure


def seeds(cells: Mapping[str, CellResult]) -> Figure:
    """Draws the final loss of every seed of each cell that is compared with fp8."""
    groups = [g for g in by_group(dict(cells)).values() if baseline(g) is not None and len(g) > 1]
    shown = [cell for group in groups for cell in group]
    figure = Figure(figsize=(7, 1 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for y, cell in enumerate(shown):
        losses = list(cell.losses.values())
        axes.plot(losses, [y] * len(losses), "o", color="black", markerfacecolor="none", markersize=5)
        axes.plot([sum(losses) / len(losses)], [y], "|", color="black", markersize=16, markeredgewidth=2)
    names = [f"{cell.label}, {cell.model} {cell.protocol['name']}" for cell in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("final validation loss of each seed, and their mean, in nats")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    return figure
