"""Tables for documents, and documents that hold them between markers."""

import re
from typing import Any


def table(header: str, rows: list[list[Any]]) -> str:
    """Returns a Markdown table; the first column is text."""
    names = header.split(" | ")
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def insert(text: str, named: dict[str, str]) -> str:
    """Returns a document with the text between each pair of markers replaced."""
    for name, content in named.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        text, count = re.subn(
            f"{start}.*?{end}", lambda _, c=content, s=start, e=end: f"{s}\n{c}\n{e}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"the document has {count} pairs of markers named {name!r}")
    return text
