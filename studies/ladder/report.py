"""The report: tables as CSV, figures, and the numbers of docs/study.md, from the committed runs alone.

Other files beside them are frozen: the code that made them was removed once their runs were finished.
"""

import io
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import matplotlib
import tyro
from matplotlib.figure import Figure

from mxjax.runtime.tables import insert
from studies.documents import STYLE, as_csv, fill
from studies.ladder import claims, plots, second_part, tables, token_tables
from studies.ladder.results import CellResult, Run, add_runs, gather, read_runs
from studies.ladder.studies import STUDIES
from training.process.environment import input_errors

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
FOLDER = RESULTS / "study"
RUNS = FOLDER / "runs.jsonl"
"""The finished runs, one a line."""
PAGE = RESULTS.parent / "study.md"
COMMAND = "python -m studies.ladder report"

TABLES = {
    "progress": tables.progress,
    "tuned rates": tables.tuned_rates,
    "final losses": tables.final_losses,
    "claims": claims.claims,
    "both": claims.both,
    "seen": claims.seen,
    "decay tokens": token_tables.decay_tokens,
    "paper layout in tokens": token_tables.paper_layout_in_tokens,
    "nats": tables.nats,
    "mechanism": second_part.mechanism,
    "mechanism even": second_part.mechanism_even,
    "length": second_part.length,
    "length tokens": token_tables.length_tokens,
    "local": second_part.local,
    "generators": second_part.generators,
    "new rates": second_part.rates,
}
"""The tables, which are files of these names with "-" for " "."""
SHOWN = ("both",)
"""Those that stand in the page, too, between markers."""
PLOTS: Mapping[str, Callable[[Mapping[str, CellResult]], Figure]] = {
    "costs.svg": plots.costs,
    "remedies.svg": plots.remedies,
    "mechanism.svg": plots.mechanism,
}
"""The figures, by the names of their files."""
_CELLS = {cell.name for name, cells in STUDIES.items() if not name.startswith("recipes") for cell in cells}


def tables_of(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the tables of runs as Markdown, by name."""
    cells = gather(runs)
    return {name: make(cells) for name, make in TABLES.items()}


def files_of(found: dict[str, str]) -> dict[str, str]:
    """Returns the CSV of tables by the names of their files, without those that wait for runs."""
    made = {f"{name.replace(' ', '-')}.csv": as_csv(text) for name, text in found.items()}
    return {name: text for name, text in made.items() if text}


def drawings(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the figures as SVG, by the names of their files."""
    cells, found = gather(runs), {}
    metadata = {"Date": None, "Creator": "studies.ladder", "Description": _identity(runs)}
    for name, draw in PLOTS.items():
        file = io.StringIO()
        with matplotlib.rc_context(STYLE):
            draw(cells).savefig(file, format="svg", facecolor="white", metadata=metadata)
        found[name] = file.getvalue()
    return found


def write(runs: Sequence[Run], page: pathlib.Path, folder: pathlib.Path = FOLDER) -> None:
    """Writes tables and figures into a folder, and shown tables and quoted numbers into the page."""
    found = tables_of(runs)
    for name, text in (files_of(found) | drawings(runs)).items():
        (folder / name).write_text(text)
    text = insert(page.read_text(), {name: found[name] for name in SHOWN})
    page.write_text(fill(text, page.parent))


def differences(runs: Sequence[Run], page: pathlib.Path, folder: pathlib.Path = FOLDER) -> list[str]:
    """Returns what the page, the tables and the figures show that the runs do not give.

    A figure is compared by its texts and by a checksum of the runs, because versions of matplotlib may place
    them differently.
    """
    found = tables_of(runs)
    wrong = [
        f"{folder / name} is not what the runs give"
        for name, text in files_of(found).items()
        if not (folder / name).exists() or (folder / name).read_text() != text
    ]
    for name in SHOWN:
        if insert(page.read_text(), {name: found[name]}) != page.read_text():
            wrong.append(f"{page}: the part {name!r} is not what the runs give")
    if fill(page.read_text(), page.parent) != page.read_text():
        wrong.append(f"{page}: a number in the text is not that of its table")
    for name, text in drawings(runs).items():
        path = folder / name
        if not path.exists() or _texts(path.read_text()) != _texts(text):
            wrong.append(f"{path} does not show what the runs give")
    return wrong


def main(
    folder: Annotated[pathlib.Path | None, tyro.conf.Positional] = None,
    *,
    page: pathlib.Path = PAGE,
    check: bool = False,
    add: bool = False,
) -> None:
    """Regenerates tables, figures and page from the committed runs, or prints the tables of other runs.

    Args:
      folder: runs whose tables to print; nothing is written. Default: the committed runs. Those of recipes
        are printed by `studies.ladder recipes`.
      page: document to write into.
      check: write nothing; fail if anything differs from what the runs give.
      add: add the runs of the folder to the committed ones first.
    """
    with input_errors():
        if add and (folder is None or check):
            raise ValueError("--add takes the folder of the runs to add, without --check")
        runs = read_runs(folder or RUNS)
        if folder is not None and not {run["cell"] for run in runs} & _CELLS:
            raise ValueError(f"{folder} holds no run of the study; studies.ladder recipes prints others")
        if folder is not None and check:
            raise ValueError("--check compares the page with the committed runs: leave out the folder")
        if folder is not None and not add:
            print("\n\n".join(f"## {name}\n\n{content}" for name, content in tables_of(runs).items()))
            return
        if folder is not None:
            print(f"{add_runs(folder, RUNS)} runs added to {RUNS}")
            runs = read_runs(RUNS)
        if not check:
            write(runs, page)
        elif found := differences(runs, page):
            raise ValueError("\n".join([*found, f"regenerate them with {COMMAND}"]))


def _identity(runs: Sequence[Run]) -> str:
    """Returns the number of runs and a checksum of their losses."""
    losses = sorted((run["cell"], run["seed"], run["final_loss"]) for run in runs)
    return f"{len(runs)} runs, {zlib.crc32(repr(losses).encode()):08x}"


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</(?:text|dc:description)>", svg)
