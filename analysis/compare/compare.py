"""Comparison of runs, also with MLPerf's published ones: `python eval.py compare RUN [RUN ...]`."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro

from analysis.compare.health import health_of, health_tables
from analysis.compare.losses import lengths_of, statistics_of, statistics_table, token_statistics, token_table
from analysis.compare.plot import check_format, plot
from analysis.compare.runs import Group, Losses, differing_settings, group_by_configuration, read_runs
from analysis.runs import RecordedRun
from training.files import check_parent, make_absolute
from training.flags import mlperf
from training.flags.ranges import FINITE, check_ranges
from training.log.display import text_table
from training.process.start import output_errors
from training.run.record import from_json, read_run_config


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """The runs to compare. Runs that differ in the seed alone are one group."""

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    """The runs' folders."""
    baseline: str | None = None
    """Compare with this group, or with the first in this policy, pairing runs by seed; of groups that differ
    in length, with one as long as another policy's. Default: fp8, or else the first group. If it also ran in
    two other lengths or more, the others' final losses are counted in tokens by these, which appear nowhere
    else."""
    mlperf: bool = False
    """Also show MLPerf's published runs of llama31_8b; runs of its preset always do. Sequences are then
    counted instead of tokens."""
    target: float | None = None
    """Report when this loss was reached, by a group's mean and by each of its runs. Default: the runs'
    --target-loss."""
    plot: tuple[pathlib.Path, ...] = ()
    """Also draw losses, gradient norms and SQNR into these files (.svg, .png, .pdf)."""
    json: bool = False
    """Print the result as one line of JSON and nothing else. A number that does not exist is null."""

    def __post_init__(self):
        make_absolute(self)
        check_ranges(vars(self), {"target": FINITE})
        if not self.runs:
            raise ValueError("name the folder of at least one run")
        for path in self.plot:
            check_parent("--plot", path)


def compare(arguments: CompareConfig) -> dict[str, Any]:
    """Prints tables of the losses and of the groups' differences, unless the result is to be JSON.

    Returns the curves by run, the unit of their keys, when each group's mean and each run reached the target,
    the groups, how many tokens they need beside the baseline's, the baseline's groups of other lengths, what
    `health_of` says, the settings in which groups differ, and warnings.

    Raises:
      ValueError: a folder holds no run, a run has not been evaluated, --baseline names no group, or --plot
        no image format.
    """
    for path in arguments.plot:
        check_format(path)
    configs = [from_json(read_run_config(folder)["config"]) for folder in arguments.runs]
    published = arguments.mlperf or any(config.preset is not None for config in configs)
    targets = (arguments.target, *(config.target_loss for config in configs))
    target = next((t for t in targets if t is not None), mlperf.TARGET_LOSS if published else None)
    runs = read_runs(arguments.runs, sequences=published)
    groups = group_by_configuration(runs)
    base = _baseline(groups, arguments.baseline)
    lengths = lengths_of(groups, base)
    compared = [group for group in groups if group not in lengths]
    means: dict[str, Losses] = {group.name: group.curve("validation") for group in groups}
    curves = mlperf.PUBLISHED_CURVES.items() if published else ()
    references = {name: dict(losses) for name, losses in curves}
    unit = "sequences" if published else "tokens"
    result = {
        "target": target,
        "unit": unit,
        "curves": {run.name: dict(run.validation) for run in runs} | references,
        "reached": {} if target is None else {name: first_at(of, target) for name, of in means.items()},
        "reached_by_run": {} if target is None else {r.name: first_at(r.validation, target) for r in runs},
        "groups": statistics_of(compared, base),
        "token_ratios": token_statistics(compared, base, lengths, target),
        "lengths": [group.name for group in lengths],
        "health": health_of(compared),
        "settings": differing_settings(groups),
        "warnings": list(_warnings(runs, compared, unit)),
    }
    for path in arguments.plot:
        plot(groups, references, target, unit, path)
    if not arguments.json:
        with output_errors():
            lines = [*_in_words(result, groups, base, means | references)]
            print("\n".join([*lines, *(_published_runs() if published else [])]), flush=True)
    return result


def _in_words(
    result: Mapping[str, Any], groups: Sequence[Group], base: Group, means: Mapping[str, Losses]
) -> Iterator[str]:
    """Yields the lines of a comparison; `means` are the curves of groups and of published runs."""
    unit, target, lengths = result["unit"], result["target"], result["lengths"]
    yield from (f"warning: {text}\n" for text in result["warnings"])
    yield table({name: losses for name, losses in means.items() if name not in lengths}, unit)
    if sum(len(group.runs) for group in groups) > 1:
        yield "\n" + statistics_table(result["groups"], base.name, unit)
    yield from (f"  {name}: {text}" for name, text in result["settings"].items())
    yield from token_table(result["token_ratios"], base.name, target, unit)
    if lengths:
        yield f"lengths of {base.name}, for final losses alone: {', '.join(lengths)}"
    if target is not None:
        yield f"\n{unit} until loss {target:g}"
        yield from (f"  {g.name}: {_reached(g, result['reached'][g.name], target)}" for g in groups)
    yield from health_tables(result["health"])


def _published_runs() -> list[str]:
    return [
        f"  reference bf16, {r.batch_size} sequences a step: {r.mean_sequences:,.0f} "
        f"({r.sequences[0]:,} to {r.sequences[-1]:,} in {len(r.sequences)} runs)"
        for r in mlperf.PUBLISHED_RUNS.values()
    ]


def _warnings(runs: Sequence[RecordedRun], compared: Sequence[Group], unit: str) -> Iterator[str]:
    """Yields why losses of the runs may not be comparable."""
    if len({run.held_out for run in runs}) > 1:
        yield "the runs are evaluated on different tokens: see --data, --eval-data, --eval-batches"
    ends = {max(run.validation) for group in compared for run in group.runs}
    if len(ends) > 1:
        yield (
            f"the runs' last evaluations are after {min(ends):,} to {max(ends):,} {unit}: a shorter run, "
            "or one that has not ended, is compared by its own last loss; with rates that decay, a longer "
            "one is higher while it trains"
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


def _baseline(groups: Sequence[Group], name: str | None) -> Group:
    found = next((group for group in groups if group.name == name), None)
    if found is None:
        policy = "fp8" if name is None else name
        alike = [group for group in groups if group.runs[0].config.precision.label == policy]
        lengths = {group.runs[0].config.steps for group in groups if group not in alike}
        as_long = (group for group in alike if group.runs[0].config.steps in lengths)
        found = next(as_long, alike[0] if alike else groups[0] if name is None else None)
    if found is None:
        known = ", ".join(group.name for group in groups)
        raise ValueError(f"--baseline {name!r} is no group of these runs; they are {known}")
    return found
