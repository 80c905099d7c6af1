"""Markdown tables: the one way in which statistics, benchmarks and kernels' tools show their numbers."""

import re
from collections.abc import Mapping, Sequence


def table(header: str, rows: Sequence[Sequence[object]], padded: bool = False) -> str:
    """Returns a Markdown table whose first column is text and whose others are aligned to the right.

    Args:
      header: the columns' names, joined by " | ".
      padded: align the columns for a terminal.
    """
    names = header.split(" | ")
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *([str(cell) for cell in row] for row in rows)]
    if padded:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines[1] = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
        lines = [
            [
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            for line in lines
        ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def insert(text: str, named: Mapping[str, str]) -> str:
    """Replaces the text between each pair of markers `<!-- NAME -->` and `<!-- end NAME -->` in a page.

    Raises:
      ValueError: the page has not one pair of markers of a name.
    """
    for name, content in named.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        made = f"{start}\n{content}\n{end}"
        text, count = re.subn(f"{start}.*?{end}", lambda _, made=made: made, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"insert needs one pair of markers {name!r}, the document has {count}")
    return text
