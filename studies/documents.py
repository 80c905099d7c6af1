"""Tables as CSV, the style of figures, and numbers in prose, for the reports of studies.

Numbers in prose come from tables: they are links to them, and filled by the report.

    H16 takes [0.028 (0.020 to 0.037)][h16] off the loss.

    [h16]: results/study/effects.csv "-H16 takes off loss | both"

A reader sees a number that leads to its table, and which row and column it is. The title is a row, as the
cells that begin it joined by " > ", then " | " and a column. The link's numbers are the cell's, in order: an
estimate and the ends of its interval, which may also stand in the next column, "95 %". They keep the decimals
that they have in the text. A minus before the row negates them, for a text that says "takes off".
"""

import csv
import io
import pathlib
import re
from typing import Any

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mxjax",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""The style of all figures under docs/. The same numbers give the same files."""


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


_DEFINITION = re.compile(r'^\[([^\]]+)\]: (\S+\.csv) "(-?)(.+) \| (.+)"$', re.M)
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_BARE = re.compile(r"(?<![\w.])[+-]?\d+\.\d+(?!\w|\.\d)")
_NO_PROSE = re.compile(
    r"^```.*?^```|^\|.*?$|^\[[^\]]+\]: .*?$|`[^`]*`|!?\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])", re.M | re.S
)
_NAMES = re.compile(r"(?:Llama|MLPerf) \d\.\d")


def fill(text: str, folder: pathlib.Path) -> str:
    """Returns the page with the numbers of all quotes as its tables have them.

    Args:
      folder: where its links begin.
    Raises:
      ValueError: a quote has no table, row or column, or more numbers than the cell.
    """
    for name, path, minus, row, column in _DEFINITION.findall(text):
        try:
            values = _cell(folder / path, row.split(" > "), column)
            quote = re.compile(rf"\[([^\[\]]+)\]\[{re.escape(name)}\]")
            text = quote.sub(
                lambda found, v=values, m=minus, n=name: f"[{_quoted(found[1], v, m)}][{n}]", text
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"[{name}]: {error}") from error
    return text


def bare_numbers(text: str) -> list[str]:
    """Returns the numbers with decimals in a page's prose that no link leads from, except in names."""
    return _BARE.findall(_NAMES.sub("", _NO_PROSE.sub("", text)))


def undefined(text: str) -> set[str]:
    """Returns the references that the page does not define, and the definitions that nothing refers to."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    used = set(re.findall(r"\]\[([^\]]+)\]", prose))
    return used ^ set(re.findall(r"^\[([^\]]+)\]: ", prose, re.M))


def _cell(path: pathlib.Path, row: list[str], column: str) -> list[float]:
    """Returns the numbers of a cell, and those of the next one if it holds their interval."""
    header, cells = list[str](), list[str]()
    with path.open(newline="") as file:
        for cells in csv.reader(file):
            if not header or cells[0] == header[0]:  # tables whose columns differ have headers of their own
                header = cells
            elif cells[: len(row)] == row:
                break
        else:
            raise ValueError(f"{path.name} has no row {' > '.join(row)}")
    if column not in header:
        raise ValueError(f"{path.name} has no column {column}, only {', '.join(header)}")
    at = header.index(column)
    parts = cells[at : at + (2 if header[at + 1 : at + 2] == ["95 %"] else 1)]
    return [float(x) for part in parts for x in re.findall(_NUMBER, part)]


def _quoted(text: str, values: list[float], minus: str) -> str:
    """Returns the text of a link with these values, the ends of an interval in ascending order."""
    shown = [-x for x in (values[:1] + values[:0:-1])] if minus else values
    numbers = iter(shown)

    def put(found: re.Match[str]) -> str:
        value = next(numbers, None)
        if value is None:
            raise ValueError(f"the text {text!r} has more numbers than its cell, {values}")
        decimals = len(found[0].partition(".")[2])
        return f"{round(value, decimals) + 0.0:{'+' if found[0][0] == '+' else ''}.{decimals}f}"

    return re.sub(_NUMBER, put, text)
