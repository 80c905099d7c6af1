"""The Markdown table of the checks, from their JSON."""

from collections.abc import Mapping
from typing import Any

from mxjax.kernels import tables


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
            part = f"{name.replace('_', ' ')} {_number(value)}"
            is_broken = name in record.get("reason", "").replace(",", "").split()
            parts.append(f"**{part}**" if is_broken else part)
    return ", ".join(parts) or record.get("reason", "")


def _number(value: float) -> str:
    """Returns an integer in full, and other numbers with up to four digits."""
    return f"{int(value):,}" if value == int(value) else f"{value:.4g}"
