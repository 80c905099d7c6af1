"""Tables as CSV, and the style of figures, for the reports of studies."""

import csv
import io
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
"""The style of all figures under docs/. The same numbers give the same files."""


def save(figure: Figure, path: pathlib.Path, creator: str) -> None:
    """Writes a figure on white, which dark pages show too, without the date."""
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": creator})


def as_csv(markdown: str) -> str:
    """Returns the Markdown tables of a text as one table of CSV.

    If there are several, the line above each is the first column. Where their columns differ, the header of
    each is a row of its own that begins with "table".
    """
    tables, caption, inside = list[tuple[str, list[list[str]]]](), "", False
    for line in markdown.splitlines():
        if not line.startswith("|"):
            caption, inside = line.strip().rstrip(":").replace("`", "") or caption, False
        elif not set(line) <= set("|-: "):
            if not inside:
                tables.append((caption, []))
            tables[-1][1].append([cell.strip() for cell in line.strip("|").replace("`", "").split(" | ")])
            inside = True
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    alike = all(rows[0] == tables[0][1][0] for _, rows in tables)
    for i, (name, (header, *rows)) in enumerate(tables):
        several = len(tables) > 1
        if i == 0 or not alike:
            writer.writerow(["table"] * several + header)
        writer.writerows([name] * several + row for row in rows)
    return file.getvalue()
