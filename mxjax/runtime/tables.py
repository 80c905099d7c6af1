"""Markdown tables: the one way in which statistics, benchmarks and kernels' tools show their numbers."""

from collections.abc import Sequence


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
