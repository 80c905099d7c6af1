"""The study's tables of token overheads, as Markdown: P1 and P2 of `analysis.statistics`."""

import math
import re
from collections.abc import Mapping, Sequence

from analysis.statistics import Estimate, effective_multiple, overhead
from mxjax.runtime.tables import table
from studies.ladder.cells import BASELINE, LENGTHS, MAIN_PROTOCOLS, MULTIPLES
from studies.ladder.results import CellResult, baseline, by_group
from studies.ladder.tables import PAPER_COLUMNS, Cells, interval, number, paper_rows

_HEADER = "policy, rules | seeds | tokens of fp8 | 95 % | overhead"


def decay_tokens(cells: Cells) -> str:
    """Returns P2: effective-token multipliers under full decay, and their inverses as overheads."""
    rows, notes = [], []
    for (model, protocol), group in by_group(dict(cells)).items():
        lengths = lengths_of(cells, model, protocol)
        base = baseline(group)
        if base is None or not _has_lengths(protocol):
            continue
        absent = [f"{m:g}" for m in MULTIPLES if m not in lengths]
        if absent:
            notes.append(f"`{model}`, {protocol}: fp8 has not run at lengths {', '.join(absent)}.")
        if len(lengths) < 3:
            continue
        for cell in group:
            if cell is not base:
                rows.append([cell.label, *_multiple(effective_multiple(cell.losses, lengths), lengths)])
    if not rows:
        return "\n".join(notes) or "Not run yet: fp8 at other lengths (study `ladder-60m-tuned`)."
    return "\n\n".join([table(_HEADER, rows), *notes])


def paper_layout_in_tokens(cells: Cells) -> str:
    """Returns the overheads in the layout of the paper's table: P1 where the rate is constant, else P2."""
    parts = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base, lengths = baseline(group), lengths_of(cells, model, protocol)
        if base is None:
            continue
        if _has_lengths(protocol) and len(lengths) >= 3:
            found = {cell.label: effective_multiple(cell.losses, lengths) for cell in group}
            measure, shown = "P2", {name: overhead_with_interval(e) for name, e in found.items()}
        elif len(group) > 1 and is_constant(base):
            shown = {cell.label: reached_later(cell, base) for cell in group}
            measure = "P1"
        else:
            continue
        if rows := paper_rows(shown):
            layout = table(PAPER_COLUMNS, rows)
            parts.append(f"`{model}`, protocol `{protocol}`, tokens beyond fp8 ({measure}):\n\n{layout}")
    return "\n\n".join(parts) or "Not run yet: `constant-60m`, and fp8 at other lengths (`ladder-60m-tuned`)."


def length_tokens(cells: Cells) -> str:
    """Returns P2 on tokens without repetition, but at the first length, than which fp8 has no shorter."""
    groups, of_fp8 = by_group(dict(cells)), lengths_of(cells, "60m", min(LENGTHS))
    rows = []
    for protocol in [*LENGTHS][1:]:
        group = groups.get(("60m", protocol), [])
        base = baseline(group)
        lengths = {m / LENGTHS[protocol]: losses for m, losses in of_fp8.items()}
        if base is None or len(lengths) < 3:
            continue
        millions = f"{base.runs[min(base.runs)]['tokens'] / 1e6:.0f} million"
        for cell in group:
            if cell is not base:
                found = _multiple(effective_multiple(cell.losses, lengths), lengths)
                rows.append([f"{cell.label}, {millions}", *found])
    return table(_HEADER, rows) if rows else "Not run yet: fp8 at three lengths (study `length-60m`)."


def _has_lengths(protocol: str) -> bool:
    """Whether fp8 has other lengths in the protocol of this ladder: the tuned ones have."""
    return protocol.startswith("tuned-") and protocol in MAIN_PROTOCOLS


def lengths_of(cells: Cells, model: str, protocol: str) -> dict[float, Mapping[int, float]]:
    """Returns fp8's final losses by seed for each length that has run, 1 among them."""
    name = f"{BASELINE}.own.{model}.{protocol}"
    found = ((re.fullmatch(f"{re.escape(name)}(?:-x([\\d.]+))?", key), cell) for key, cell in cells.items())
    return {float(match[1] or 1): cell.losses for match, cell in found if match and cell.losses}


def _multiple(log: Estimate, lengths: Mapping[float, object]) -> list[object]:
    if math.isinf(log.mean):
        bound = f"< {min(lengths):g}" if log.mean < 0 else f"> {max(lengths):g}"
        return [log.n, bound, "-", "-"]
    low, high = math.exp(log.low), math.exp(log.high)
    if math.isnan(log.mean):
        return [log.n, "-", "-", "-"]
    of_fp8 = [number(math.exp(log.mean), ".3f"), interval(low, high, ".3f")]
    return [log.n, *of_fp8, overhead_with_interval(log)]


def overhead_with_interval(log: Estimate) -> str:
    """Returns P2's overhead and its interval, of `analysis.statistics.effective_multiple`, or "-"."""
    if not math.isfinite(log.mean):
        return "-"
    if math.isnan(log.low):
        return f"{_overhead_percent(log.mean):+.1f} %"
    low, high = _overhead_percent(log.high), _overhead_percent(log.low)
    return f"{_overhead_percent(log.mean):+.1f} % ({low:+.1f} to {high:+.1f})"


def _overhead_percent(log: float) -> float:
    """Returns the tokens beyond fp8's of a run whose loss fp8 reaches with exp(log) times its tokens."""
    return 100 * math.expm1(-log)


def is_constant(base: CellResult) -> bool:
    """Whether the cell's rate is all but constant after the warm-up."""
    return base.protocol["horizon"] is not None


def reached_later(cell: CellResult, base: CellResult) -> str:
    """Returns P1's overhead of a cell over fp8 with its interval, or the number of runs that it lacks."""
    found = overhead(_curves(cell), _curves(base))
    mean, low, high = (100 * math.expm1(x) for x in found.log_ratio[:3])
    percent = "-" if math.isnan(mean) else f"{found.bound}{mean:+.1f} %"
    span = interval(low, high, "+.1f")
    note = f"{found.not_reached} did not reach it" if found.not_reached else span
    return percent if note == "-" else f"{percent} ({note})"


def _curves(cell: CellResult) -> dict[int, Sequence[Sequence[float]]]:
    return {seed: run["evaluations"] if seed in cell.losses else [] for seed, run in cell.runs.items()}
