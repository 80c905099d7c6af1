"""The report of a run, beside baseline runs: `python eval.py report RUN [BASELINE ...] --out report.html`."""

import dataclasses
import html
import os
import pathlib
import shlex
from typing import Annotated, Any

import tyro

from analysis.report import sections
from analysis.report.page import BEGINNING, page
from analysis.report.sections import comparison
from analysis.restore import restore
from analysis.runs import RecordedRun, read
from analysis.sample import SampleConfig, generate_text
from training.files import check_parent, make_absolute, write_atomically
from training.flags.ranges import COUNT, check_ranges
from training.log.metrics import METRICS
from training.process.start import output_errors


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """The run to report, and runs to compare it with."""

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    """The run's folder, then those of its baselines."""
    out: pathlib.Path
    """The HTML file to write."""
    prompts: tuple[str, ...] = ()
    """Continue these texts by the run's last checkpoint. Default: no samples."""
    tokens: int = 96
    """Largest number of tokens of a sample."""
    json: bool = False
    """Print the result as one line of JSON and nothing else."""

    def __post_init__(self):
        make_absolute(self)
        check_ranges(vars(self), {"tokens": COUNT})
        if not self.runs:
            raise ValueError("name the folder of a run")
        if self.tokens != ReportConfig.tokens and not self.prompts:
            raise ValueError(f"--tokens {self.tokens} is for samples: add --prompts TEXT, or leave it out")


def report(arguments: ReportConfig) -> dict[str, Any]:
    """Writes the report; returns its path, the runs, and the number of samples.

    Raises:
      ValueError: a folder holds no run, or one without steps; samples cannot be generated; or --out is a
        file that is no report, or has no folder.
    """
    _check_out(arguments.out)
    runs = read(arguments.runs)
    for run in runs:
        if not run.train:
            raise ValueError(f"{run.folder} has no step on record in {METRICS}: there is nothing to report")
    texts = _samples(arguments)
    write_atomically(arguments.out, render(runs, texts, arguments))
    if not arguments.json:
        with output_errors():
            print(arguments.out, flush=True)
    return {"out": str(arguments.out), "runs": [run.name for run in runs], "samples": len(texts)}


def _check_out(path: pathlib.Path) -> None:
    """Raises ValueError unless a report may be written here: where nothing is, or over a report."""
    if os.path.isdir(path):
        raise ValueError(f"--out {path} is a folder; name a file in it, as {path / 'report.html'}")
    check_parent("--out", path)
    if os.path.isfile(path):
        with path.open("rb") as file:
            if file.read(len(BEGINNING)) == BEGINNING.encode():
                return
    if os.path.lexists(path):
        raise ValueError(f"--out {path} exists and is no report; name another file")


def render(runs: list[RecordedRun], texts: list[tuple[str, str]], arguments: ReportConfig) -> str:
    """Returns the page of the first run, beside the others, with samples (prompt, continuation)."""
    run = runs[0]
    folder = shlex.quote(str(run.folder))
    asked = f"python eval.py report {folder} --out {shlex.quote(str(arguments.out))} --prompts TEXT"
    sampled = f"python eval.py sample {folder} --tokens {arguments.tokens} --prompt PROMPT"
    body = [
        sections.overview(runs),
        *([comparison(runs)] if len(runs) > 1 else []),
        sections.losses(runs),
        sections.gradients(runs),
        sections.sqnr(runs),
        sections.speed(runs),
        sections.samples(run, texts, sampled if texts else asked),
        sections.policies(run),
        sections.model_and_data(run),
        sections.repeat(run),
    ]
    version = run.saved.get("environment", {}).get("mxjax", "")
    return page(run.name, sections.lead(run), body, html.escape(f"mxjax {version}, {run.folder}"))


def _samples(arguments: ReportConfig) -> list[tuple[str, str]]:
    if not arguments.prompts:
        return []
    asked = [SampleConfig(arguments.runs[0], prompt=p, tokens=arguments.tokens) for p in arguments.prompts]
    restored = restore(asked[0])
    return [(one.prompt, generate_text(one, restored)["text"]) for one in asked]
