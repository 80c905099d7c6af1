"""Comparison of runs, also with MLPerf's published ones: `python eval.py compare RUN [RUN ...]`."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from training import mlperf
from training.display import text_table
from training.extras import require
from training.metrics import evaluations
from training.run_config import from_json, read_run_config

Losses = Mapping[int, float]
"""Validation losses by sequences trained on."""


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """The runs to compare by the losses of their evaluations."""

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    """The runs' folders."""
    mlperf: bool = False
    """Also show MLPerf's published runs of llama31_8b; runs of its preset always do."""
    target: float | None = None
    """Report when this loss was reached. Default: the runs' --target-loss."""
    plot: pathlib.Path | None = None
    """Also draw the curves into this file (.svg, .png, .pdf)."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name the folder of at least one run")


def compare(arguments: CompareConfig) -> dict[str, Any]:
    """Prints a table of the losses; returns the curves by name and when each run reached the target.

    Raises:
      ValueError: a folder holds no run, or a run has not been evaluated.
    """
    curves, target, published = {}, arguments.target, arguments.mlperf
    for folder in arguments.runs:
        config = from_json(read_run_config(folder)["config"])
        found = {step * config.data.batch_size: loss for step, loss in evaluations(folder).items()}
        if not found:
            raise ValueError(f"{folder} has no evaluation to compare")
        curves[str(folder)] = found
        target = config.target_loss if target is None else target
        published = published or config.preset is not None
    if published and target is None:
        target = mlperf.TARGET_LOSS
    reached = {} if target is None else {name: first_at(losses, target) for name, losses in curves.items()}
    if published:
        curves |= {curve.name: dict(curve.losses) for curve in mlperf.PUBLISHED_CURVES}
    print(table(curves))
    if target is not None:
        print(f"\nsequences until loss {target:g}")
        for name, sequences in reached.items():
            print(f"  {name}: {'not reached' if sequences is None else f'{sequences:,}'}")
    if published:
        for r in mlperf.PUBLISHED_RUNS.values():
            print(
                f"  reference bf16, {r.batch_size} sequences a step: {r.mean_sequences:,.0f} "
                f"({r.sequences[0]:,} to {r.sequences[-1]:,} in {len(r.sequences)} runs)"
            )
    if arguments.plot is not None:
        plot(curves, target, arguments.plot)
    return {"target": target, "curves": curves, "reached": reached}


def first_at(losses: Losses, target: float) -> int | None:
    """Returns the number of sequences until a loss is at most the target; None if none is."""
    return next((n for n, loss in sorted(losses.items()) if loss <= target), None)


def table(curves: Mapping[str, Losses]) -> str:
    """Returns the losses as a table: a row for each number of sequences, a column for each run."""
    points = sorted(set(itertools.chain.from_iterable(curves.values())))
    rows = [[f"{n:,}", *(f"{c[n]:.4f}" if n in c else "" for c in curves.values())] for n in points]
    return text_table(["sequences", *curves], rows)


def plot(curves: Mapping[str, Losses], target: float | None, path: pathlib.Path) -> None:
    """Draws the losses over the sequences into a file.

    Raises:
      MissingExtraError: matplotlib is not installed.
      ValueError: matplotlib cannot write this kind of file.
    """
    figure = require("plot", "--plot", "matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(*zip(*sorted(losses.items()), strict=True), marker=".", label=name)
    if target is not None:
        axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    axes.set(xlabel="sequences", ylabel="validation loss, nats a token")
    axes.legend()
    figure.savefig(path)
