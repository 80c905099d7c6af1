"""The study's tables of token overheads, as Markdown: P1 and P2 of `benchmarks.study.tokens`."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.study import tokens
from benchmarks.study.cells import BASELINE, MULTIPLES
from benchmarks.study.claims import by_seed
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.studies import CLAIMS, CONSTANT, STUDIES, Claim
from benchmarks.study.tables import PAPER_COLUMNS, Cells, interval, is_variation, number, paper_rows
from mxjax.kernels.tables import table
from training.paired_statistics import Estimate, holm, t_interval


def decay_tokens(cells: Cells) -> str:
    """Returns P2: effective-token multipliers under full decay, and their inverses as overheads."""
    rows, notes = [], []
    for (model, protocol), group in by_group(dict(cells)).items():
        lengths = _lengths(cells, model, protocol)
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
                rows.append(
                    [cell.label, *_multiple(tokens.effective_multiple(cell.losses, lengths), lengths)]
                )
    if not rows:
        return "\n".join(notes) or "Not run yet: fp8 at other lengths (study `ladder-60m-tuned`)."
    header = "policy, rules | seeds | tokens of fp8 | 95 % | overhead"
    return "\n\n".join([table(header, rows), *notes])


def paper_layout_in_tokens(cells: Cells) -> str:
    """Returns the overheads in the layout of the paper's table: P1 where the rate is constant, else P2."""
    parts = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base, lengths = baseline(group), _lengths(cells, model, protocol)
        if base is None:
            continue
        if _is_constant(base) and len(group) > 1:
            measure, shown = "P1", {cell.label: _constant_overhead(cell, base) for cell in group}
        elif _has_lengths(protocol) and len(lengths) >= 3:
            found = {cell.label: tokens.effective_multiple(cell.losses, lengths) for cell in group}
            measure, shown = "P2", {name: _overhead_with_interval(e) for name, e in found.items()}
        else:
            continue
        if rows := paper_rows(shown):
            layout = table(PAPER_COLUMNS, rows)
            parts.append(f"`{model}`, protocol `{protocol}`, tokens beyond fp8 ({measure}):\n\n{layout}")
    return "\n\n".join(parts) or "Not run yet: `constant-60m`, and fp8 at other lengths (`ladder-60m-tuned`)."


def _constant_overhead(cell: CellResult, base: CellResult) -> str:
    _, not_reached, mean, span, _ = _overhead(tokens.overhead(_curves(cell), _curves(base)))
    return f"{mean} ({f'{not_reached} did not reach it' if not_reached else span})"


def _has_lengths(protocol: str) -> bool:
    """Whether fp8 has other lengths in the protocol of this ladder: the tuned ones have."""
    return protocol.startswith("tuned-") and not is_variation(protocol)


def _is_constant(base: CellResult) -> bool:
    return base.protocol["horizon"] is not None


def _lengths(cells: Cells, model: str, protocol: str) -> dict[float, Mapping[int, float]]:
    """Returns fp8's final losses by seed for each length that has run, 1 among them."""
    names = {m: f"{BASELINE}.own.{model}.{protocol}-x{m:g}" for m in MULTIPLES}
    names[1.0] = f"{BASELINE}.own.{model}.{protocol}"
    return {m: cells[name].losses for m, name in names.items() if name in cells and cells[name].losses}


def _multiple(log: Estimate, lengths: Mapping[float, object]) -> list[object]:
    if math.isinf(log.mean):
        bound = f"< {min(lengths):g}" if log.mean < 0 else f"> {max(lengths):g}"
        return [log.n, bound, "-", "-"]
    low, high = math.exp(log.low), math.exp(log.high)
    if math.isnan(log.mean):
        return [log.n, "-", "-", "-"]
    of_fp8 = [number(math.exp(log.mean), ".3f"), interval(low, high, ".3f")]
    return [log.n, *of_fp8, _overhead_with_interval(log)]


def _overhead_with_interval(log: Estimate) -> str:
    if not math.isfinite(log.mean):
        return "-"
    if math.isnan(log.low):
        return f"{_overhead_percent(log.mean):+.1f} %"
    low, high = _overhead_percent(log.high), _overhead_percent(log.low)
    return f"{_overhead_percent(log.mean):+.1f} % ({low:+.1f} to {high:+.1f})"


def _overhead_percent(log: float) -> float:
    """Returns the tokens beyond fp8's of a run whose loss fp8 reaches with exp(log) times its tokens."""
    return 100 * math.expm1(-log)


def constant_tokens(cells: Cells) -> str:
    """Returns P1: token overheads under an all but constant learning rate."""
    rows = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        if base is None or not _is_constant(base) or len(group) < 2:
            continue
        for cell in group:
            if cell is not base:
                found = tokens.overhead(_curves(cell), _curves(base))
                rows.append([f"{cell.label}, {model} {protocol}", *_overhead(found)])
    if not rows:
        return f"Not run yet: study `{CONSTANT}`."
    return table("policy, rules | seeds | did not reach it | overhead | 95 % | p", rows)


def constant_claims(cells: Cells) -> str:
    """Returns the tests of the claims whose cells have run under P1's protocol, corrected together.

    Tokens to reach fp8's loss are compared seed by seed, beside the final losses.
    """
    have = {cell.name for cell in STUDIES[CONSTANT]}
    tested = [claim for claim in CLAIMS if set(claim.at(CONSTANT).cells) <= have]
    rows, p = [], []
    for claim in tested:
        found, losses = _claimed(cells, claim.at(CONSTANT)), by_seed(cells, claim.at(CONSTANT))
        if not found.log_ratio.n:
            continue
        p.append(found.log_ratio.p)
        _, _, mean, span, _ = _overhead(found)
        d = t_interval(list(losses.values()))
        rows.append([claim.text, mean, span, number(d.mean, "+.4f"), interval(d.low, d.high), d.n])
    if not rows:
        return f"Not run yet: study `{CONSTANT}`."
    rows = [[*row[:3], number(q, ".2g"), *row[3:]] for row, q in zip(rows, holm(p), strict=True)]
    return table("claim | tokens | 95 % | p (Holm) | nats | 95 % | seeds", rows)


def _claimed(cells: Cells, claim: Claim) -> tokens.Overhead:
    """Returns the overhead of a claim's first cell over its second."""
    fp8 = cells.get(f"{BASELINE}.own.60m.{CONSTANT}")
    ours, base = (
        tokens.log_ratios(_curves(cells[name]), _curves(fp8)) if fp8 is not None and name in cells else {}
        for name in (claim.ours, claim.base)
    )
    return tokens.summary(
        [(ours[s][0] - base[s][0], ours[s][1] and base[s][1]) for s in sorted(ours.keys() & base.keys())]
    )


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
