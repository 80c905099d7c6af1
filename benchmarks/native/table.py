"""The Markdown table of the checks, from their JSON.

    python -m benchmarks.native.table docs/results/native-h100.json docs/results/native.md

writes it into a page, between the markers of `checks`.
"""

import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import insert
from mxjax import tables
from training.files import write_atomically

UNITS = {"gib": "GiB", "ms": "ms", "s": "s", "db": "dB"}


def table(results: Mapping[str, Any]) -> str:
    """Returns a row for each check: its outcome, seconds and figures; figures outside of bounds in bold."""
    rows = [
        (f"`{name}`", record["outcome"], f"{record['seconds']:.0f}", _figures(record))
        for name, record in results["checks"].items()
    ]
    lines = tables.table("check | outcome | seconds | figures", rows).splitlines()
    lines[1] = "| --- | --- | ---: | --- |"
    return "\n".join(lines)


def _figures(record: Mapping[str, Any]) -> str:
    parts = []
    for name, value in record["figures"].items():
        if value is not None:
            part = _in_words(name, value)
            is_broken = name in record.get("reason", "").replace(",", "").split()
            parts.append(f"**{part}**" if is_broken else part)
    return ", ".join(parts) or record.get("reason", "")


def _in_words(name: str, value: float) -> str:
    """Returns a figure with its name; the end of a name is a unit."""
    *words, last = name.split("_")
    if words and last in UNITS:
        return f"{' '.join(words)} {_number(value)} {UNITS[last]}"
    return f"{' '.join([*words, last])} {_number(value)}"


def _number(value: float) -> str:
    """Returns an integer in full, and other numbers with up to four digits."""
    return f"{int(value):,}" if math.isfinite(value) and value == int(value) else f"{value:.4g}"


def page(results: pathlib.Path, document: pathlib.Path) -> str:
    """Returns the document with the table of the results."""
    return insert(document.read_text(), {"checks": table(json.loads(results.read_text()))})


def main() -> None:
    """Writes the table into the page that the command line names."""
    results, document = map(pathlib.Path, sys.argv[1:])
    write_atomically(document, page(results, document))


if __name__ == "__main__":
    main()
