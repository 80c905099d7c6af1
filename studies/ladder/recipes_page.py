"""The table of docs/recipes.md: every recipe's loss, speed and memory, from its runs."""

import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from mxjax.runtime.tables import insert, table
from studies.ladder.report import RESULTS
from studies.ladder.results import CellResult, Run, baseline, by_group, gather, read_runs
from studies.ladder.tables import beside
from training.process.environment import input_errors

RUNS = RESULTS / "recipes.jsonl"
PAGE = RESULTS.parent / "recipes.md"
COMMAND = "python -m studies.ladder recipes"
_HEADER = "recipe | loss | minus fp8 | 95 % | tokens/s | GiB a step"


def recipes_table(runs: Sequence[Run]) -> str:
    """Returns a table of the cells of each model and protocol, from the lowest loss to the highest."""
    if not runs:
        return "Not measured yet."
    parts = []
    for (model, protocol), group in by_group(gather(runs)).items():
        base = baseline(group)
        most = max(len(cell.runs) for cell in group)
        rows = [_row(cell, base, most) for cell in group]
        devices = ", ".join(sorted({run["device"] for cell in group for run in cell.runs.values()}))
        where = f"`{model}`, protocol `{protocol}`, on {devices}, runs a recipe: {most}"
        parts.append(f"{where}\n\n{table(_HEADER, rows)}")
    return "\n\n".join(parts)


def _row(cell: CellResult, base: CellResult | None, most: int) -> list[object]:
    fastest = max(cell.runs.values(), key=lambda run: run["tokens"] / run["seconds"])
    memory = fastest.get("step_bytes")
    label, runs, diverged, *losses = beside(cell, base)
    fewer = f", runs: {runs}" if runs != most else ""
    return [
        f"{label}{fewer}{f', diverged: {diverged}' if diverged else ''}",
        *losses,
        f"{fastest['tokens'] / fastest['seconds']:,.0f}",
        f"{memory / 2**30:.2f}" if memory else "-",
    ]


def main(
    folder: Annotated[pathlib.Path | None, tyro.conf.Positional] = None,
    *,
    page: pathlib.Path = PAGE,
    check: bool = False,
) -> None:
    """Regenerates the page from the committed runs, or prints the table of other runs.

    Args:
      folder: runs whose table to print; nothing is written. Default: the committed runs.
      page: document to write into.
      check: write nothing; fail if the page differs from what the runs give.
    """
    with input_errors():
        if folder is not None:
            print(recipes_table(read_runs(folder)))
            return
        runs = read_runs(RUNS) if RUNS.exists() else []
        text = insert(page.read_text(), {"recipes": recipes_table(runs)})
        if not check:
            page.write_text(text)
        elif text != page.read_text():
            raise ValueError(f"{page} is not what the runs give; regenerate it with {COMMAND}")
