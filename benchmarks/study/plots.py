"""The study's plots from its finished runs. The same runs give the same files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.statistics import differences, t_interval
from benchmarks.study import laws, rules, sizes, tuning
from benchmarks.study.cells import MAIN_PROTOCOLS, WGRAD_KINDS, WGRAD_ONLY
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.studies import REMEDIES, RULES

_LINES: tuple[tuple[str, str, Any], ...] = (
    ("black", "o", "-"),
    ("#7f7f7f", "s", "--"),
    ("#404040", "^", ":"),
    ("#b0b0b0", "D", "-."),
    ("#595959", "v", (0, (6, 2, 1, 2, 1, 2))),
)
"""Color, marker and line of each curve; they differ without color."""
_KINDS = (("^", "black"), ("x", "#404040"), ("o", "#7f7f7f"), ("d", "#b0b0b0"), ("+", "black"))
"""Marker and color of each kind of remedies."""
_FEW = 3
"""Of fewer seeds the values are drawn instead of their interval, which would be wider than all others."""
_INTERVALS = f"95 % intervals; single seeds where there are fewer than {_FEW}"
_RANGE = 1.0
"""Range of the losses shown over the learning rate, in nats: what hardly learns is far above."""
_REMEDIES = {
    "wgrad_hadamard": "H16",
    "wgrad_sr": "stochastic rounding",
    "wgrad_rht": "redrawn signs",
    "wgrad_sr34": "stochastic rounding after 3/4",
}


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
        axes.plot(
            *zip(*means, strict=True), linestyle=line, color=color, marker=marker, markersize=3, label=label
        )
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="fp8's final validation loss, nats")
    axes.set_ylim(top=min(axes.get_ylim()[1], axes.get_ylim()[0] + _RANGE))
    axes.legend(frameon=False)
    return figure


def seeds(cells: Mapping[str, CellResult]) -> Figure:
    """Draws the final loss of every seed of each cell that is compared with fp8, a panel for each ladder."""
    groups = {
        name: group
        for name, group in by_group(dict(cells)).items()
        if name[1] in MAIN_PROTOCOLS and baseline(group) is not None and len(group) > 1
    }
    if not groups:
        return Figure(figsize=(7, 1))
    rows = [len(group) for group in groups.values()]
    figure = Figure(figsize=(7, 0.8 * len(rows) + 0.24 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(rows), squeeze=False, height_ratios=[n + 1 for n in rows])[:, 0]
    for axes, ((model, protocol), group) in zip(panels, groups.items(), strict=True):
        for y, cell in enumerate(group):
            losses = list(cell.losses.values())
            axes.plot(losses, [y] * len(losses), "o", color="black", markerfacecolor="none", markersize=4.5)
            mean = [sum(losses) / len(losses)] if losses else []
            axes.plot(mean, [y] * len(mean), "|", color="black", markersize=13, markeredgewidth=2)
        axes.set_yticks(range(len(group)), [cell.label for cell in group])
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.set_title(f"{model}, protocol {protocol}", loc="left")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    panels[-1].set_xlabel("final validation loss of each seed, and their mean, in nats")
    return figure


def remedies(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what each remedy of Wgrad changes beside Wgrad without one, wherever both have run."""
    groups = {name: group for name, group in by_group(dict(cells)).items() if name[1] in MAIN_PROTOCOLS}
    shown = [
        (f"{_named_alone(base)}, {protocol}", base, {cell.label: cell for cell in group})
        for (_, protocol), group in groups.items()
        for base in sorted(group, key=lambda cell: cell.label)
        if base.policy in ("wgrad", f"{WGRAD_ONLY}wgrad")
    ]
    shown = [row for row in shown if any(len(_changes(*row[1:], remedy)) > 1 for remedy in REMEDIES)]
    figure = Figure(figsize=(7, 1.1 + 0.3 * len(shown)), layout="constrained")
    panels = figure.subplots(1, len(REMEDIES), sharex=True, sharey=True)
    for axes, remedy in zip(panels, REMEDIES, strict=True):
        axes.axvline(0, color="#7f7f7f", linewidth=0.8)
        for y, (_, base, others) in enumerate(shown):
            _draw(axes, y, _changes(base, others, remedy))
        axes.set_title(_REMEDIES[remedy], loc="left", fontsize="medium")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    panels[0].set_yticks(range(len(shown)), [name for name, *_ in shown])
    panels[0].set_ylim(max(len(shown), 1) - 0.5, -0.5)
    panels[len(panels) // 2].set_xlabel(f"loss minus that without it, nats; {_INTERVALS}")
    return figure


def _draw(axes: Axes, y: float, values: Sequence[float], style: int = 0, label: str | None = None) -> None:
    """Draws the mean over seeds with its interval, or with the values if they are fewer than _FEW."""
    if not values:
        return
    (color, marker, line), d = _LINES[style], t_interval(values)
    axes.plot([d.mean], [y], marker, color=color, markersize=4, label=label)
    if d.n < _FEW:
        axes.plot(values, [y] * d.n, marker, color=color, markersize=6, markerfacecolor="none")
    else:
        axes.plot([d.low, d.high], [y, y], linestyle=line, color=color, linewidth=1.2)


def _changes(base: CellResult, others: Mapping[str, CellResult], remedy: str) -> list[float]:
    """Returns what a remedy changes by seed beside a cell without one; nothing if it has not run."""
    name = base.policy.removesuffix("wgrad") + remedy
    other = others.get(base.label.replace(base.policy, name, 1))
    return differences(other.losses if other else {}, base.losses)


def over_sizes(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what each policy costs beyond fp8 at each size of the model, and over more epochs."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#7f7f7f", linewidth=0.8)
    found = sizes.by_place(cells)
    for y, of_places in enumerate(found.values()):
        for i, (place, values) in enumerate(zip(sizes.NAMES, of_places, strict=True)):
            _draw(axes, y + 0.17 * (i - 1.5), values, i, place if y == 0 else None)
    axes.set_yticks(range(len(found)), [name.replace("`", "") for name in found])
    axes.set(ylim=(max(len(found), 1) - 0.5, -0.5), xlabel=f"loss minus fp8's, nats; {_INTERVALS}")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    if found:
        axes.legend(frameon=False, loc="upper right")
    return figure


def effects(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what each remedy of Wgrad changes in the mean over the rules, by what Fprop and Dgrad have."""
    parts = [
        ("both", rules.RESTS),
        *((f"beside {rest.name.replace('`', '')}", [rest]) for rest in rules.RESTS),
    ]
    remedies = list(WGRAD_KINDS)[1:]
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#7f7f7f", linewidth=0.8)
    for i, (name, rests) in enumerate(parts):
        for y, remedy in enumerate(remedies):
            found = list(rules.mean_by_seed(cells, rests, RULES, remedy, "wgrad").values())
            _draw(axes, y + 0.22 * (i - 1), found, i, name if y == 0 else None)
    axes.set_yticks(range(len(remedies)), [_REMEDIES[remedy] for remedy in remedies])
    axes.set(ylim=(len(remedies) - 0.5, -0.5), xlabel="loss minus that without it, nats; 95 % intervals")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower left")
    return figure


def law(cells: Mapping[str, CellResult], record: Mapping[str, Any] | None) -> Figure:
    """Draws what cells cost over the squared error of their gradients, and the law through all of them."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    if record is None or laws.BASE not in cells or len(chosen := laws.measured(cells, record)) < 2:
        return figure
    axes = figure.subplots()
    points = defaultdict(list)
    for cell in chosen:
        (error,) = laws.features(cell.policy, cell.rules, record, "error")
        points[laws.remedies(cell)].append((error, laws.cost(cells, cell)))
    for i, kind in enumerate(sorted(points)):
        marker, color = _KINDS[i % len(_KINDS)]
        axes.plot(*zip(*points[kind], strict=True), marker, color=color, markersize=5, label=kind)
    ends, found = axes.get_xlim(), laws.fit(cells, chosen, record, "error")
    axes.plot(ends, [found.of([x]) for x in ends], color="black", linewidth=0.8)
    axes.set(xlabel="squared relative error of the whole gradient", ylabel="final loss minus fp8's, nats")
    axes.legend(frameon=False)
    return figure


def _named_alone(cell: CellResult) -> str:
    return ("Wgrad alone, " if cell.policy.startswith(WGRAD_ONLY) else "") + cell.rules
