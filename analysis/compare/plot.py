"""The plot of `eval.py compare`: losses, gradient norms and SQNR of groups of runs, legible in grey."""

import io
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.compare.runs import Group, Losses
from analysis.records import binned
from analysis.runs import RecordedRun
from mxjax.policy import OPERANDS
from training.files import write_atomically
from training.process.start import require

_COLORS = ("#000000", "#0b4f9e", "#c2410c", "#2f8f4e", "#8a8a8a", "#b58bd0")
"""From dark to light, so that they differ in grey."""
_LINES = ("-", "--", ":", "-.")
_MARKERS = "os^Dvx*"


def plot(
    groups: Sequence[Group],
    references: Mapping[str, Losses],
    target: float | None,
    unit: str,
    path: pathlib.Path,
) -> None:
    """Draws the mean curve of every group, and the range of its runs, into a file.

    Args:
      references: other validation losses, by label.
      unit: what the losses are counted by.
      path: file to write; its suffix names the format, see `check_format`.
    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    has_sqnr = any(run.sqnr for group in groups for run in group.runs)
    rows = 2 if has_sqnr else 1
    figure = require("plot", "--plot", "matplotlib.figure").Figure(
        figsize=(14, 1 + 4 * rows), layout="constrained"
    )
    panels = figure.subplots(rows, 3, squeeze=False)
    left, right, norms = panels[0]
    for group, style in zip(groups, _styles(), strict=False):
        line = style | {"marker": ""}
        _draw(left, [binned(run.train) for run in group.runs], line, group.name)
        _draw(right, [dict(sorted(run.validation.items())) for run in group.runs], style, group.name)
        _draw(norms, [binned(run.curve("grad_norm")) for run in group.runs], line, group.name)
        for axes, gemm in zip(panels[1] if has_sqnr else (), OPERANDS, strict=False):
            measured = [_sqnr(run, gemm) for run in group.runs if run.sqnr]
            _draw(axes, measured, style, group.name)
    for (name, losses), style in zip(
        references.items(), itertools.islice(_styles(), len(groups), None), strict=False
    ):
        _draw(right, [dict(sorted(losses.items()))], style, name)
    if target is not None:
        right.axhline(target, color="grey", linestyle=(0, (1, 3)), label=f"target {target:g}")
    formatter = require("plot", "--plot", "matplotlib.ticker").EngFormatter(sep="")
    labels = ["training loss, nats a token", "validation loss, nats a token", "gradient norm"]
    labels += [f"SQNR of {gemm}, dB, mean of layers" for gemm in OPERANDS]
    for axes, label in zip(panels.flat, labels, strict=False):
        axes.set(xlabel=unit, ylabel=label)
        axes.xaxis.set_major_formatter(formatter)
        axes.set_axisbelow(True)  # the grid runs behind the ranges
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    several = any(len(group.runs) > 1 for group in groups)
    title = "means, and ranges of the runs" if several else None
    handles, labels = right.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": "small", "title": title, "title_fontsize": "small"}
    # Below both panels: curves that fall leave no corner of a panel free for certain.
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), **style)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150, facecolor="white")
    write_atomically(path, drawn.getvalue())


def check_format(path: pathlib.Path) -> None:
    """Checks before anything is computed that a plot can be written.

    Raises:
      MissingExtraError: matplotlib is not installed.
      ValueError: the suffix names no format that matplotlib writes.
    """
    canvas = require("plot", "--plot", "matplotlib.backend_bases").FigureCanvasBase
    formats = canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        known = ", ".join(f".{name}" for name in sorted(formats))
        raise ValueError(f"--plot {path}: {path.suffix or 'no suffix'} is no image format; take {known}")


def _styles():
    """Yields line styles without end; color, line and marker change together."""
    for i in itertools.count():
        yield {
            "color": _COLORS[i % len(_COLORS)],
            "linestyle": _LINES[i % len(_LINES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4,
        }


def _draw(axes: Any, curves: Sequence[Losses], style: dict[str, Any], label: str) -> None:
    common = sorted(set(curves[0]).intersection(*curves)) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    axes.plot(common, [sum(v) / len(v) for v in values], label=label, **style)
    if len(curves) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(common, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _sqnr(run: RecordedRun, gemm: str) -> dict[int, float]:
    """Returns the mean SQNR of a GEMM over the layers, where it is finite."""
    return {x: value for x, value in sorted(run.sqnr_curve(gemm).items()) if math.isfinite(value)}
