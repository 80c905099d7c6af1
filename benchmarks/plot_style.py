"""The style of all figures under docs/. The same numbers give the same files."""

import pathlib
from typing import Any

from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mxjax",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(figure: Figure, path: pathlib.Path, creator: str) -> None:
    """Writes a figure on white, without the date."""
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": creator})
