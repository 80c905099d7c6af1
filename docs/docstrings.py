"""Turns the docstrings, plain text with a little Markdown, into what napoleon takes.

Code is read more often than these pages, so its docstrings stay plain: single backquotes for code, indented
blocks, Markdown tables, and sections such as `Source:` whose text may begin on the line of their name.
"""

import itertools
import re

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
"""Napoleon's own sections."""
OUR_SECTIONS = ("Special values", "Sharding", "Gradients", "Source", "Sources")
_SECTION = re.compile(rf"({'|'.join(SECTIONS + OUR_SECTIONS)}):(?:\s+(.*))?")


def normalize(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrites the lines of a docstring in place; a handler of `autodoc-process-docstring`."""
    result: list[str] = []
    section = block = item = False
    for line in lines:
        indented = line.startswith(" ")
        found = _SECTION.fullmatch(line)
        if line and not indented:
            section, block, item = found is not None, False, line.startswith("- ")
        if found:
            result += ["", f"{found[1]}:"] + ([f"  {_inline(found[2])}"] if found[2] else [])
        elif indented and not section and not item:
            result += [line] if block else ["", "::", "", line]
            block = True
        elif block and not line:
            result.append(line)
        else:
            result.append(_inline(line))
    lines[:] = _tables(result)


def _inline(line: str) -> str:
    """Returns a line with its code as literals and all other markup characters escaped."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        f"`{part}`" if part.startswith("`") and len(part) > 2 else re.sub(r"([*|]|_\b)", r"\\\1", part)
        for part in parts
    )


def _tables(lines: list[str]) -> list[str]:
    """Returns the lines with Markdown tables as list-tables."""
    result: list[str] = []
    for is_table, group in itertools.groupby(lines, lambda line: line.startswith(r"\| ")):
        if not is_table:
            result += group
            continue
        rows = [re.split(r"\s*\\\|\s*", line.strip())[1:-1] for line in group]
        result += ["", ".. list-table::", "   :header-rows: 1", ""]
        for row in (row for row in rows if not set("".join(row)) <= set("-: ")):
            result += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(row)]
        result.append("")
    return result
