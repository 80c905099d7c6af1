"""The report: every table and plot of docs/results/study.md, from committed JSON files alone."""

import io
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Annotated, Any

import matplotlib
import tyro

from analysis.diagnose import plots as heat_maps
from benchmarks.markdown import insert
from benchmarks.plot_style import STYLE
from benchmarks.study import (
    claims,
    constant_rate,
    diagnosis_file,
    diagnosis_tables,
    forecast,
    gemm_tables,
    joint,
    laws,
    layer_tables,
    outside,
    plots,
    repeats,
    rules,
    sizes,
    tables,
    token_tables,
)
from benchmarks.study.results import Run, gather, read_runs
from benchmarks.study.studies import STUDIES
from training.process.environment import input_errors

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
RUNS = RESULTS / "study" / "runs"
REPEATS = RESULTS / "study" / "repeats"
"""Second runs of the same cell and seed, which show how far a seed determines a run."""
PAGE = RESULTS / "study.md"
LAYERS = PAGE.with_suffix("") / "layers"
"""What eval.py diagnose wrote of a checkpoint."""
COMMAND = "python -m benchmarks.study report"

TABLES = {
    "progress": tables.progress,
    "learning rates": tables.learning_rates,
    "final losses": tables.final_losses,
    "paper layout": tables.paper_layout,
    "claims": claims.claims,
    "both": claims.both,
    "joint": joint.joint,
    "elsewhere": claims.elsewhere,
    "sizes": sizes.sizes,
    "sizes together": sizes.together,
    "alone": claims.alone,
    "grid": claims.grid,
    "rceil": claims.rceil,
    "hard": claims.hard,
    "hard even": claims.hard_even,
    "seen": claims.seen,
    "rules": rules.rules,
    "effects": rules.effects,
    "rule contrasts": claims.rule_contrasts,
    "power": tables.power,
    "averaging": tables.averaging,
    "constant tokens": constant_rate.constant_tokens,
    "constant claims": constant_rate.constant_claims,
    "slopes": constant_rate.slopes,
    "costs": constant_rate.costs,
    "decay tokens": token_tables.decay_tokens,
    "paper layout in tokens": token_tables.paper_layout_in_tokens,
}
"""The tables by the markers of the page between which they stand."""
_CELLS = {cell.name for name, cells in STUDIES.items() if not name.startswith("recipes") for cell in cells}
PLOTS = {
    "learning-rates.svg": plots.learning_rates,
    "seeds.svg": plots.seeds,
    "remedies.svg": plots.remedies,
    "effects.svg": plots.effects,
    "sizes.svg": plots.over_sizes,
    "law.svg": lambda cells: plots.law(cells, diagnosis_file.read(PAGE.with_suffix("") / "ladder")),
    "layers/gemms.svg": lambda _: heat_maps.gemms(_layers()),
    "layers/wgrad.svg": lambda _: heat_maps.wgrad(_layers()),
}


def _layers() -> dict[str, Any]:
    if (found := diagnosis_file.read(LAYERS)) is None:
        raise ValueError(f"{LAYERS} holds no diagnosis; eval.py diagnose RUN --out {LAYERS} makes one")
    return found


def tables_of(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the tables that runs alone give, by the page's markers."""
    cells = gather(runs)
    return {name: make(cells) for name, make in TABLES.items()}


def sections(runs: Sequence[Run]) -> dict[str, str]:
    """Returns every generated part of the page by its marker; what is not of `runs` is as committed."""
    again = {name: cell for name, cell in gather(read_runs(REPEATS)).items() if name in gather(runs)}
    cells = gather(runs)
    found = (diagnosis_file.read(PAGE.with_suffix("") / name) for name in ("ladder", "wgrad", "wgrad-end"))
    ladder, wgrad, wgrad_end = found
    layers = _layers()
    gemms = gemm_tables.read(PAGE.with_suffix("") / "gemms.json")
    return tables_of(runs) | {
        "repeats": repeats.repeats(cells, again),
        "devices": repeats.devices(cells, again),
        "averaged": repeats.averaged(cells, again),
        "published": outside.published(),
        "submissions": outside.submissions(PAGE.with_suffix("") / outside.FILE),
        "variants": diagnosis_tables.variants_table(wgrad),
        "compared": diagnosis_tables.compared_table(wgrad),
        "variants at the end": diagnosis_tables.variants_table(wgrad_end),
        "compared at the end": diagnosis_tables.compared_table(wgrad_end),
        "own": diagnosis_tables.own_table(diagnosis_file.read_all(PAGE.with_suffix("") / "own")),
        "gradients": diagnosis_tables.cells_table(ladder),
        "prediction": diagnosis_tables.prediction(cells, ladder),
        "wgrad operands": gemm_tables.wgrad_operands(gemms),
        "token mean": gemm_tables.token_mean(gemms),
        "layer operands": layer_tables.operands(layers),
        "layer repeating": layer_tables.repeating(layers),
        "gemm prediction": gemm_tables.gemm_prediction(cells, gemms),
        "laws": laws.laws(cells, ladder),
        "beyond": laws.beyond(cells, ladder),
        "parts": laws.parts(cells, ladder),
        "forecast": forecast.forecast(cells, forecast.read(PAGE.with_suffix(""))),
    }


def drawings(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the SVG of every plot by its file name."""
    cells, found = gather(runs), {}
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            file = io.StringIO()
            metadata = {"Date": None, "Creator": "benchmarks.study", "Description": _identity(runs)}
            draw(cells).savefig(file, format="svg", facecolor="white", metadata=metadata)
            found[name] = file.getvalue()
    return found


def write(runs: Sequence[Run], page: pathlib.Path) -> None:
    """Writes the tables into the page, and the plots into the folder of the same name beside it."""
    page.write_text(insert(page.read_text(), sections(runs)))
    folder = page.with_suffix("")
    for name, drawing in drawings(runs).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(drawing)


def differences(runs: Sequence[Run], page: pathlib.Path) -> list[str]:
    """Returns what the page and its plots show that the runs do not give.

    Plots are compared by their texts and by a checksum of the runs, because versions of matplotlib may place
    them differently.
    """
    found = [
        f"{page}: the part {name!r} is not what the runs give"
        for name, content in sections(runs).items()
        if insert(page.read_text(), {name: content}) != page.read_text()
    ]
    for name, drawing in drawings(runs).items():
        path = page.with_suffix("") / name
        if not path.exists() or _texts(path.read_text()) != _texts(drawing):
            found.append(f"{path} does not show what the runs give")
    return found


def main(
    folder: Annotated[pathlib.Path | None, tyro.conf.Positional] = None,
    *,
    page: pathlib.Path = PAGE,
    check: bool = False,
) -> None:
    """Regenerates the page and its plots from the committed runs, or prints the tables of other runs.

    Args:
      folder: runs whose tables to print; nothing is written. Default: the committed runs. Those of recipes
        are printed by `benchmarks.study recipes`.
      page: document to write into.
      check: write nothing; fail if the page or a plot differs from what the runs give.
    """
    with input_errors():
        runs = read_runs(folder or RUNS)
        if folder is not None:
            if check:
                raise ValueError("--check compares the page with the committed runs: leave out the folder")
            if not {run["cell"] for run in runs} & _CELLS:
                raise ValueError(
                    f"{folder} holds no run of the study; benchmarks.study recipes prints others"
                )
            print("\n\n".join(f"## {name}\n\n{content}" for name, content in tables_of(runs).items()))
        elif not check:
            write(runs, page)
        elif found := differences(runs, page):
            raise ValueError("\n".join([*found, f"regenerate them with {COMMAND}"]))


def _identity(runs: Sequence[Run]) -> str:
    """Returns the number of runs and a checksum of their losses."""
    losses = sorted((run["cell"], run["seed"], run["final_loss"]) for run in runs)
    return f"{len(runs)} runs, {zlib.crc32(repr(losses).encode()):08x}"


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</(?:text|dc:description)>", svg)
