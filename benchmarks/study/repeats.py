"""What a seed leaves open: runs of one cell and seed that were trained twice, as Markdown tables."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from analysis.statistics import differences, t_interval
from benchmarks.study.claim_lists import CLAIMS, LADDERS
from benchmarks.study.claims import by_seed
from benchmarks.study.results import CellResult, Run, short_name
from benchmarks.study.tables import interval, number
from mxjax.runtime.tables import table

Cells = Mapping[str, CellResult]


def repeats(cells: Cells, again: Cells) -> str:
    """Returns the differences between runs of one seed: repeated, or of protocols that differ in name alone.

    Args:
      again: the runs under `repeats`, which no other table has.
    """
    pairs = [(f"{cell.label}, {cell.protocol['name']}: repeat", cell, cells[n]) for n, cell in again.items()]
    same: dict[tuple, list[CellResult]] = {}
    for cell in cells.values():
        p = {name: value for name, value in cell.protocol.items() if name != "name" and value}
        same.setdefault((cell.policy, cell.rules, cell.model, *sorted(p.items())), []).append(cell)
    for first, *others in same.values():
        for other in others:
            names = f"{other.protocol['name']} - {first.protocol['name']}"
            pairs.append((f"{first.label}: {names}", other, first))
    rows = []
    for name, other, first in pairs:
        if d := differences(other.losses, first.losses):
            rows.append([name, ", ".join(f"{x:+.4f}" for x in d), number(_of_one_run(d))])
    return table("same policy, protocol and seed in two processes | differences by seed | sd of a run", rows)


def devices(cells: Cells, again: Cells) -> str:
    """Returns the mean difference between a seed's two runs, by protocol and the devices that trained them.

    Between two devices it is that of the later name minus the earlier, else that of the repeat minus the run.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, cell in again.items():
        first = cells[name]
        for seed in cell.losses.keys() & first.losses.keys():
            ours, base = (short_name(runs[seed]) for runs in (cell.runs, first.runs))
            sign = 1 if ours >= base else -1
            key = cell.protocol["name"], f"{max(ours, base)} - {min(ours, base)}"
            found[key].append(sign * (cell.losses[seed] - first.losses[seed]))
    rows = []
    for key, d in sorted(found.items()):
        mean = t_interval(d)
        numbers = number(mean.mean, "+.4f"), interval(mean.low, mean.high), number(_of_one_run(d))
        rows.append([*key, len(d), *numbers])
    return table("protocol | devices | pairs | mean difference | 95 % | sd of a run", rows)


def averaged(cells: Cells, again: Cells) -> str:
    """Returns the claims whose cells have repeats, also with the mean of both runs as a seed's loss."""
    merged = {
        name: _with_repeats(cell, again[name]) if name in again else cell for name, cell in cells.items()
    }
    rows = []
    for claim in (claim.at(protocol) for protocol in LADDERS for claim in CLAIMS):
        twice = [name for name in claim.cells if name in again]
        if not twice:
            continue
        single, both = (t_interval(list(by_seed(c, claim).values())) for c in (cells, merged))
        rows.append(
            [
                claim.text,
                f"{len(twice)} of {len(claim.cells)}",
                *(x for e in (single, both) for x in (number(e.mean, "+.4f"), interval(e.low, e.high))),
            ]
        )
    return table("claim | cells with repeats | without them | 95 % | means with them | 95 %", rows)


def _with_repeats(cell: CellResult, again: CellResult) -> CellResult:
    """Returns the cell with the mean of both final losses for seeds that were trained twice."""

    def mean(seed: int, run: Run) -> Run:
        if seed not in cell.losses or seed not in again.losses:
            return run
        return run | {"final_loss": statistics.fmean((cell.losses[seed], again.losses[seed]))}

    return dataclasses.replace(cell, runs={seed: mean(seed, run) for seed, run in cell.runs.items()})


def _of_one_run(d: Sequence[float]) -> float:
    """Returns the standard deviation of one run, from differences between two."""
    return math.sqrt(statistics.fmean(x * x for x in d) / 2)
