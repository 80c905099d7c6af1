"""The study's tables of token overheads, as Markdown: P1 and P2 of `benchmarks.study.tokens`."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.study import tokens
from benchmarks.study.cells import BASELINE, MULTIPLES
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.tables import Cells, interval, number
from mxjax.kernels.tables import table
from training.paired_statistics import Estimate


def decay_tokens(cells: Cells) -> str:
    """Returns P2: effective-token multipliers under full decay."""
    rows, notes = [], []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        lengths = {m: cells.get(f"{BASELINE}.own.{model}.{protocol}-x{m:g}") for m in MULTIPLES}
        done = {m: cell.losses for m, cell in lengths.items() if cell is not None and cell.losses}
        if base is None or not protocol.startswith("tuned-") or protocol.count("-") > 1:
            continue
        absent = [f"{m:g}" for m in MULTIPLES if m not in done]
        if absent:
            notes.append(f"`{model}`, {protocol}: fp8 has not run at lengths {', '.join(absent)}.")
        if len(done) < 2:
            continue
        done[1.0] = base.losses
        for cell in group:
            if cell is not base:
                rows.append([cell.label, *_multiple(tokens.effective_multiple(cell.losses, done), done)])
    if not rows:
        return "\n".join(notes) or "Not run yet: fp8 at other lengths (study `ladder-60m-tuned`)."
    header = "policy, rules | seeds | tokens of fp8 | 95 % | p"
    return "\n\n".join([table(header, rows), *notes])


def _multiple(log: Estimate, lengths: Mapping[float, object]) -> list[object]:
    if math.isinf(log.mean):
        bound = f"< {min(lengths):g}" if log.mean < 0 else f"> {max(lengths):g}"
        return [log.n, bound, "-", "-"]
    low, high = math.exp(log.low), math.exp(log.high)
    return [log.n, number(math.exp(log.mean), ".3f"), interval(low, high, ".3f"), number(log.p, ".2g")]


def constant_tokens(cells: Cells) -> str:
    """Returns P1: token overheads under an all but constant learning rate."""
    rows = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        if base is None or base.protocol["horizon"] is None or len(group) < 2:
            continue
        for cell in group:
            if cell is not base:
                found = tokens.overhead(_curves(cell), _curves(base))
                rows.append([f"{cell.label}, {model} {protocol}", *_overhead(found)])
    if not rows:
        return "Not run yet: study `constant-60m`."
    return table("policy, rules | seeds | did not reach it | overhead | 95 % | p", rows)


def _overhead(found: tokens.Overhead) -> list[object]:
    ratio = found.log_ratio
    mean, low, high = (100 * math.expm1(x) for x in ratio[:3])
    bound = "> " if found.not_reached else ""
    return [
        ratio.n,
        found.not_reached,
        bound + number(mean, "+.1f") + (" %" if ratio.n else ""),
        interval(low, high, "+.1f"),
        number(ratio.p, ".2g"),
    ]


def _curves(cell: CellResult) -> dict[int, Sequence[Sequence[float]]]:
    """Returns the evaluations by seed, none of a run that diverged."""
    return {seed: run["evaluations"] if seed in cell.losses else [] for seed, run in cell.runs.items()}
