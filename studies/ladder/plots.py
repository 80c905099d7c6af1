"""The study's plot from its finished runs. The same runs give the same file."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.statistics import differences, t_interval
from studies.ladder.cells import MAIN_PROTOCOLS, WGRAD_ONLY
from studies.ladder.results import CellResult, by_group
from studies.ladder.studies import REMEDIES

_FEW = 3
"""Of fewer seeds the values are drawn instead of their interval, which would be wider than all others."""
_INTERVALS = "95 % intervals, or single seeds"
_REMEDIES = {
    "wgrad_hadamard": "H16",
    "wgrad_sr": "stochastic rounding",
    "wgrad_rht": "redrawn signs",
}


def remedies(cells: Mapping[str, CellResult]) -> Figure:
    """Draws what each remedy of Wgrad changes beside Wgrad without one, wherever both have run."""
    groups = {name: group for name, group in by_group(dict(cells)).items() if name[1] in MAIN_PROTOCOLS}
    shown = [
        (f"{_named_alone(base)}, {protocol}", base, {cell.label: cell for cell in group})
        for (_, protocol), group in groups.items()
        for base in sorted(group, key=lambda cell: cell.label)
        if base.policy in ("wgrad", f"{WGRAD_ONLY}wgrad")
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
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    panels[0].set_yticks(range(len(shown)), [name for name, *_ in shown])
    panels[0].set_ylim(max(len(shown), 1) - 0.5, -0.5)
    figure.supxlabel(f"loss minus that without the remedy, in nats; {_INTERVALS}", fontsize="medium")
    return figure


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


def _named_alone(cell: CellResult) -> str:
    return ("Wgrad alone, " if cell.policy.startswith(WGRAD_ONLY) else "") + cell.rules
