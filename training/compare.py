"""Runs side by side, and beside the runs that MLPerf publishes: `python eval.py compare RUN [RUN ...]`."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from training import mlperf
from training.metrics import evaluations
from training.run_config import from_json, read_description

Losses = Mapping[int, float]  # by sequences trained on


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Which runs to compare, by the losses of their evaluations."""

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    """The runs' folders."""
    mlperf: bool = False
    """Beside MLPerf's published runs of llama31_8b, as is done for runs of its preset anyway."""
    target: float | None = None
    """Say when this loss was reached. Default: the runs' --target-loss."""
    plot: pathlib.Path | None = None
    """Also draw the curves into this file (.svg, .png, .pdf); needs matplotlib."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name the folder of at least one run")


def compare(arguments: CompareConfig) -> dict[str, Any]:
    """Prints a table of the losses and returns the curves by name, and when each run reached the target.

    Raises:
      ValueError: a folder holds no run, or a run has not been evaluated.
    """
    curves, target, published = {}, arguments.target, arguments.mlperf
    for folder in arguments.runs:
        config = from_json(read_description(folder)["config"])
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
        curves |= {curve.name: dict(curve.losses) for curve in mlperf.CURVES}
    print(table(curves))
    if target is not None:
        print(f"\nsequences until loss {target:g}")
        for name, sequences in reached.items():
            print(f"  {name}: {'not reached' if sequences is None else f'{sequences:,}'}")
    if published:
        for r in mlperf.REFERENCES.values():
            print(
                f"  reference bf16, {r.batch_size} sequences a step: {r.mean_sequences:,.0f} "
                f"({r.sequences[0]:,} to {r.sequences[-1]:,} in {len(r.sequences)} runs)"
            )
    if arguments.plot is not None:
        plot(curves, target, arguments.plot)
    return {"target": target, "curves": curves, "reached": reached}


def first_at(losses: Losses, target: float) -> int | None:
    """Returns the sequences after which a loss was first at or under the target, None if never."""
    return next((n for n, loss in sorted(losses.items()) if loss <= target), None)


def table(curves: Mapping[str, Losses]) -> str:
    """Returns the losses as text: a row for each number of sequences, a column for each run."""
    points = sorted(set(itertools.chain.from_iterable(curves.values())))
    header = ["sequences", *curves]
    rows = [[f"{n:,}", *(f"{c[n]:.4f}" if n in c else "" for c in curves.values())] for n in points]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_line(row, widths) for row in [header, *rows])


def plot(curves: Mapping[str, Losses], target: float | None, path: pathlib.Path) -> None:
    """Draws the losses over the sequences into a file.

    Raises:
      ValueError: matplotlib is not installed, or does not write such a file.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(*zip(*sorted(losses.items()), strict=True), marker=".", label=name)
    if target is not None:
        axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    axes.set(xlabel="sequences", ylabel="validation loss, nats a token")
    axes.legend()
    figure.savefig(path)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
