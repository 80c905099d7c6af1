"""The study's figures from its finished runs. The same runs give the same file."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.statistics import Estimate, differences, t_interval
from studies.ladder.cells import FRESH, MAIN_PROTOCOLS, WGRAD_ONLY
from studies.ladder.kinds import ARRANGED
from studies.ladder.results import CellResult, by_group
from studies.ladder.studies import REMEDIES
from studies.ladder.tables import GROUPS, PAPER, beyond, in_nats

_FEW = 3
"""Of fewer seeds the values are drawn instead of their interval, which would be wider than all others."""
_INTERVALS = "95 % intervals, or single seeds"
_REMEDIES = {"wgrad_hadamard": "H16", "wgrad_sr": "stochastic rounding", "wgrad_rht": "redrawn signs"}
_MARKERS = ("o", "s", "D", "^", "v", "P")
_SHADES = ("black", "#2f6db3", "#c0504d", "#7f7f7f", "#e0a030", "#5a9e6f")
"""Of different brightness, for print in grey."""
_GRID = {"color": "#dddddd", "linewidth": 0.6}
_ARRANGEMENTS = {
    "": "tokens in order",
    "+anew": "permuted anew each step",
    "+once": "permuted once",
    "+means32": "means of 32 split off",
}
_KINDS = {
    "wgrad": "none",
    "wgrad_hadamard": "H16",
    "wgrad_fixed": "fixed signs",
    "wgrad_rht": "redrawn signs",
}


def costs(cells: Mapping[str, CellResult]) -> Figure:
    """Draws the final losses beyond fp8's, and beside them those of the paper's Llama 3.1 8B in nats."""
    names = list(PAPER)
    groups = [group for group in GROUPS if group[0] != "350m"]  # two seeds say nothing on this scale
    figure = Figure(figsize=(7, 1.3 + 0.62 * len(names)), layout="constrained")
    axes = figure.subplots()
    for y, (policy, tokens) in enumerate(PAPER.values()):
        if tokens is not None:
            low, high = in_nats(tokens)
            label = "the paper, in nats" if y == 0 else None
            axes.barh(y, high - low, 0.8, low, color="#c9d6e8", label=label)
        for i, group in enumerate(groups):
            found = beyond(cells, policy, group)
            at = y + 0.14 * (i - (len(groups) - 1) / 2)
            _interval(axes, found, at, _MARKERS[i], _SHADES[i], GROUPS[group] if y == 2 else None)
    labels = [name if of[1] else f"{name}\n(paper: does not converge)" for name, of in PAPER.items()]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(0, color="#7f7f7f", linewidth=0.8)
    axes.grid(axis="x", **_GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("final loss minus fp8's, in nats; 95 % intervals")
    _legend(figure, 3)
    return figure


def remedies(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what each remedy of Wgrad changes beside Wgrad without one, wherever both have run."""
    groups = {
        name: group for name, group in by_group(dict(cells)).items() if name[1] in (*MAIN_PROTOCOLS, FRESH)
    }
    shown = [
        (f"{prefix}{base.rules}, {protocol}", base, {cell.label: cell for cell in group})
        for (_, protocol), group in groups.items()
        for base in sorted(group, key=lambda cell: cell.label)
        for policy, prefix in (("wgrad", ""), (f"{WGRAD_ONLY}wgrad", "Wgrad alone, "))
        if base.policy == policy
    ]
    shown.sort(key=lambda row: row[0])
    shown = [row for row in shown if any(len(_changes(*row[1:], remedy)) > 1 for remedy in REMEDIES)]
    figure = Figure(figsize=(7, 1.1 + 0.3 * len(shown)), layout="constrained")
    panels = figure.subplots(1, len(REMEDIES), sharex=True, sharey=True)
    for axes, remedy in zip(panels, REMEDIES, strict=True):
        axes.axvline(0, color="#7f7f7f", linewidth=0.8)
        for y, (_, base, others) in enumerate(shown):
            _draw(axes, y, _changes(base, others, remedy))
        axes.set_title(_REMEDIES[remedy], loc="left", fontsize="medium")
        axes.grid(axis="x", **_GRID)
    panels[0].set_yticks(range(len(shown)), [name for name, *_ in shown])
    panels[0].set_ylim(max(len(shown), 1) - 0.5, -0.5)
    figure.supxlabel(f"loss minus that without the remedy, in nats; {_INTERVALS}", fontsize="medium")
    return figure


def mechanism(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what rotations change by the order of the tokens, against no rotation of tokens in order."""
    base = cells.get(f"wgrad.floor.60m.{FRESH}")
    figure = Figure(figsize=(7, 1.2 + 0.72 * len(_ARRANGEMENTS)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#7f7f7f", linewidth=0.8)
    for y, arrangement in enumerate(_ARRANGEMENTS):
        for i, kind in enumerate(ARRANGED):
            cell = cells.get(f"{kind}{arrangement}.floor.60m.{FRESH}")
            if cell is None or base is None or cell is base:
                continue
            found = t_interval(differences(cell.losses, base.losses))
            label = _KINDS[kind] if y == (1 if kind == "wgrad" else 0) else None
            _interval(axes, found, y + 0.17 * (i - 1.5), _MARKERS[i], _SHADES[i], label)
    axes.set_yticks(range(len(_ARRANGEMENTS)), list(_ARRANGEMENTS.values()))
    axes.set_ylim(len(_ARRANGEMENTS) - 0.5, -0.5)
    axes.grid(axis="x", **_GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("loss minus that without a rotation, tokens in order, in nats; 95 % intervals")
    _legend(figure, 4)
    return figure


def _legend(figure: Figure, columns: int) -> None:
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize=9)


def _interval(axes: Axes, found: Estimate, y: float, marker: str, color: str, label: str | None) -> None:
    """Draws a mean, and its interval if there are not too few values."""
    if not found.n:
        return
    if found.n >= _FEW:
        axes.plot([found.low, found.high], [y, y], color=color, linewidth=1.2)
    filled = color if found.n >= _FEW else "white"
    axes.plot([found.mean], [y], marker, color=color, markersize=4, markerfacecolor=filled, label=label)


def _draw(axes: Axes, y: float, values: Sequence[float]) -> None:
    """Draws the mean over seeds with its interval, or with the values if they are fewer than _FEW."""
    if not values:
        return
    d = t_interval(values)
    axes.plot([d.mean], [y], "o", color="black", markersize=4)
    if d.n < _FEW:
        axes.plot(values, [y] * d.n, "o", color="black", markersize=6, markerfacecolor="none")
    else:
        axes.plot([d.low, d.high], [y, y], color="black", linewidth=1.2)


def _changes(base: CellResult, others: Mapping[str, CellResult], remedy: str) -> list[float]:
    """Returns what a remedy changes by seed beside a cell without one; nothing if it has not run."""
    name = base.policy.removesuffix("wgrad") + remedy
    other = others.get(base.label.replace(base.policy, name, 1))
    return differences(other.losses if other else {}, base.losses)
