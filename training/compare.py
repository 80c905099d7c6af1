"""Comparison of runs, also with MLPerf's published ones: `python eval.py compare RUN [RUN ...]`."""

import dataclasses
import itertools
import math
import os
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro

from training import mlperf
from training.compare_plot import plot
from training.compared_runs import (
    ComparedRun,
    Group,
    Losses,
    differing_settings,
    group_by_configuration,
    read_runs,
)
from training.display import text_table
from training.paired_statistics import (
    DIVERGED,
    detectable,
    differences,
    holm,
    standard_deviation,
    t_interval,
)
from training.run_config import from_json, read_run_config
from training.startup import output_errors


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """The runs to compare. Runs that differ in the seed alone are one group."""

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    """The runs' folders."""
    baseline: str | None = None
    """Compare with this group, pairing runs by seed. Default: the first group in fp8, or else the first."""
    mlperf: bool = False
    """Also show MLPerf's published runs of llama31_8b; runs of its preset always do. Sequences are then
    counted instead of tokens."""
    target: float | None = None
    """Report when this loss was reached, by a group's mean and by each of its runs. Default: the runs'
    --target-loss."""
    plot: tuple[pathlib.Path, ...] = ()
    """Also draw the curves into these files (.svg, .png, .pdf)."""
    json: bool = False
    """Print the result as one line of JSON and nothing else. A number that does not exist is null."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name the folder of at least one run")
        for path in self.plot:
            if not path.parent.exists():
                raise ValueError(
                    f"--plot {path}: there is no folder {path.parent}; make it: "
                    f"mkdir -p {shlex.quote(os.path.realpath(path.parent))}"
                )


def compare(arguments: CompareConfig) -> dict[str, Any]:
    """Prints tables of the losses and of the groups' differences, unless the result is to be JSON.

    Returns the curves by run, the unit of their keys, when each group's mean and each run reached the target,
    the groups, the settings in which they differ, and warnings.

    Raises:
      ValueError: a folder holds no run, a run has not been evaluated, or --baseline names no group.
    """
    configs = [from_json(read_run_config(folder)["config"]) for folder in arguments.runs]
    published = arguments.mlperf or any(config.preset is not None for config in configs)
    targets = (arguments.target, *(config.target_loss for config in configs))
    target = next((t for t in targets if t is not None), mlperf.TARGET_LOSS if published else None)
    runs = read_runs(arguments.runs, sequences=published)
    groups = group_by_configuration(runs)
    base = _baseline(groups, arguments.baseline)
    unit = "sequences" if published else "tokens"
    means: dict[str, Losses] = {group.name: group.curve("validation") for group in groups}
    reached = {} if target is None else {name: first_at(losses, target) for name, losses in means.items()}
    curves = {run.name: dict(run.validation) for run in runs}
    if published:
        references = {curve.name: dict(curve.losses) for curve in mlperf.PUBLISHED_CURVES}
        means, curves = means | references, curves | references
    settings, warnings = differing_settings(groups), list(_warnings(runs))
    said = [*(f"warning: {text}\n" for text in warnings), table(means, unit)]
    found = statistics_of(groups, base)
    if len(groups) > 1 or len(runs) > 1:
        said.append("\n" + statistics_table(found, base.name, unit))
    said += [f"  {name}: {text}" for name, text in settings.items()]
    if target is not None:
        said.append(f"\n{unit} until loss {target:g}")
        said += [f"  {group.name}: {_reached(group, reached[group.name], target)}" for group in groups]
    if published:
        for r in mlperf.PUBLISHED_RUNS.values():
            said.append(
                f"  reference bf16, {r.batch_size} sequences a step: {r.mean_sequences:,.0f} "
                f"({r.sequences[0]:,} to {r.sequences[-1]:,} in {len(r.sequences)} runs)"
            )
    for path in arguments.plot:
        plot(groups, {name: means[name] for name in list(means)[len(groups) :]}, target, unit, path)
    if not arguments.json:
        with output_errors():
            print("\n".join(said), flush=True)
    of_runs = {} if target is None else {run.name: first_at(run.validation, target) for run in runs}
    times = {"reached": reached, "reached_by_run": of_runs}
    also = {"settings": settings, "warnings": warnings}
    return {"target": target, "unit": unit, "curves": curves, **times, "groups": found, **also}


def _warnings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yields why losses of the runs may not be comparable."""
    if len({run.held_out for run in runs}) > 1:
        yield "the runs are evaluated on different tokens: see --data, --eval-data, --eval-batches"
    ends = {max(run.validation) for run in runs}
    if len(ends) > 1:
        yield (
            f"the runs' last evaluations are after {min(ends):,} to {max(ends):,}: a shorter run, or one "
            "that has not ended, is compared by its own last loss; with rates that decay, a longer one is "
            "higher while it trains"
        )


def first_at(losses: Losses, target: float) -> int | None:
    """Returns the point at which a loss is first at most the target; None if none is."""
    return next((n for n, loss in sorted(losses.items()) if loss <= target), None)


def _reached(group: Group, mean: int | None, target: float) -> str:
    """Returns in words when a group's mean reached the target, and how many of its runs did."""
    text = "not reached" if mean is None else f"{mean:,}"
    count = sum(first_at(run.validation, target) is not None for run in group.runs)
    return text if len(group.runs) == 1 else f"{text} by the mean, {count} of {len(group.runs)} runs reach it"


def table(curves: Mapping[str, Losses], unit: str) -> str:
    """Returns the losses as a table: a row for each point, a column for each curve."""
    points = sorted(set(itertools.chain.from_iterable(curves.values())))
    rows = [[f"{n:,}", *(f"{c[n]:.4f}" if n in c else "" for c in curves.values())] for n in points]
    return text_table([unit, *curves], rows)


def statistics_of(groups: Sequence[Group], base: Group) -> list[dict[str, Any]]:
    """Returns each group's losses and its difference to `base`, paired by seed.

    All losses are of the last evaluation that every run has that did not diverge, so that runs of different
    length can be compared. Intervals are 95 % t-intervals; p is corrected by Holm over the groups. What so
    few runs do not give, such as the interval of one, is None.
    """
    good = {group.name: [run for run in group.runs if not run.diverged] for group in groups}
    points = [set(run.validation) for runs in good.values() for run in runs]
    common = set.intersection(*points) if points else set()
    at = max(common, default=None)
    losses = {
        name: {run.config.seed: run.validation[at] for run in runs} if at is not None else {}
        for name, runs in good.items()
    }
    found = []
    for group in groups:
        own = losses[group.name]
        pairs = differences(own, losses[base.name]) if group is not base else []
        d = t_interval(pairs)
        found.append(
            {
                "group": group.name,
                "runs": [run.name for run in group.runs],
                "diverged": len(group.runs) - len(good[group.name]),
                "overfitted": sum(run.overfitted for run in group.runs),
                "at": at,
                "loss": t_interval(list(own.values())).mean,
                "sd": standard_deviation(list(own.values())),
                "train_loss": t_interval([run.last_train_loss(at) for run in good[group.name]]).mean,
                "difference": d.mean,
                "low": d.low,
                "high": d.high,
                "p": d.p,
                "pairs": d.n,
                "detectable": detectable(standard_deviation(pairs), len(pairs)),
            }
        )
    for row, p in zip(found, holm([row["p"] for row in found]), strict=True):
        row["p"] = p
    return [{key: None if _is_nan(value) else value for key, value in row.items()} for row in found]


def statistics_table(found: Sequence[dict[str, Any]], base: str, unit: str) -> str:
    """Returns `statistics_of` as a table."""

    def number(x: float | None, form: str = ".4f") -> str:
        return "" if x is None else format(x, form)

    rows = []
    for row in found:
        between = "" if row["low"] is None else f"{row['low']:+.4f} to {row['high']:+.4f}"
        numbers = [number(row[key]) for key in ("loss", "sd", "train_loss")]
        rows.append(
            [
                row["group"],
                str(len(row["runs"])),
                str(row["diverged"] or ""),
                str(row["overfitted"] or ""),
                *numbers,
                number(row["difference"], "+.4f"),
                between,
                number(row["p"], ".2g"),
                number(row["detectable"]),
            ]
        )
    at = found[0]["at"]
    columns = ["", "runs", "diverged", "overfitted", "loss", "sd", "train loss"]
    header = [*columns, f"- {base}", "95 %", "p (Holm)", "detectable"]
    filled = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    left = any(len(row["runs"]) > row["diverged"] for row in found)
    without = "the runs share no evaluation" if left else "every run has diverged"
    lines = [f"after {at:,} {unit}" if at is not None else without]
    lines.append(text_table([header[i] for i in filled], [[row[i] for i in filled] for row in rows]))
    if at is not None and max(len(row["runs"]) for row in found) < 2:
        lines.append("one seed each: no intervals; train more with --seed")
    if any(row["diverged"] or row["overfitted"] for row in found):
        lines.append(
            f"diverged, and left out: not finite, or the last evaluation is {DIVERGED:g} above the lowest; "
            "overfitted: likewise, but training ends below the lowest evaluation"
        )
    return "\n".join(lines)


def _baseline(groups: Sequence[Group], name: str | None) -> Group:
    if name is None:
        in_fp8 = (group for group in groups if group.runs[0].config.precision.label == "fp8")
        return next(in_fp8, groups[0])
    found = next((group for group in groups if group.name == name), None)
    if found is None:
        known = ", ".join(group.name for group in groups)
        raise ValueError(f"--baseline {name!r} is no group of these runs; they are {known}")
    return found


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
