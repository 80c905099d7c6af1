"""The study's tables of P1, token overheads at an all but constant rate, and of the losses' slopes."""

import math
from collections.abc import Sequence

from analysis import statistics as token_ratios
from analysis.statistics import holm, paired_difference, t_interval
from benchmarks.study.cells import BASELINE
from benchmarks.study.claim_lists import CLAIMS, CONSTANT_SEEN, Claim
from benchmarks.study.claims import Tests, by_seed
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.studies import CONSTANT, STUDIES
from benchmarks.study.tables import Cells, interval, number
from mxjax.runtime.tables import table
from training import mlperf

NOT_RUN = f"Not run yet: study `{CONSTANT}`."
PAPERS = ("8.5 %", 1.085), ("26.5 %", 1.265)
"""The paper's overheads with H16 and without, in the middle of what it states. Source: arXiv 2605.09825."""
_FP8 = f"{BASELINE}.own.60m.{CONSTANT}"
_AROUND = 0.1  # of a run before and after the target of P1


def constant_tokens(cells: Cells) -> str:
    """Returns P1: token overheads under an all but constant learning rate."""
    rows = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        if base is None or not is_constant(base) or len(group) < 2:
            continue
        for cell in group:
            if cell is not base:
                found = token_ratios.overhead(_curves(cell), _curves(base))
                named = [f"{cell.label}, {model} {protocol}", found.log_ratio.n, found.not_reached]
                rows.append([*named, *_percent(found), number(found.log_ratio.p, ".2g")])
    if not rows:
        return NOT_RUN
    return table("policy, rules | seeds | did not reach it | overhead | 95 % | p", rows)


def constant_claims(cells: Cells) -> str:
    """Returns the tests of the claims whose cells have run under P1's protocol, corrected together.

    Tokens to reach fp8's loss are compared seed by seed, beside the final losses. CONSTANT_SEEN has no p.
    """
    tested = _tested()
    rows, p = [], []
    for claim in (*tested, *CONSTANT_SEEN):
        found = _claimed(cells, claim.at(CONSTANT))
        if not found.log_ratio.n:
            continue
        p.append(found.log_ratio.p if claim in tested else math.nan)
        d = t_interval(list(by_seed(cells, claim.at(CONSTANT)).values()))
        rows.append([claim.text, *_percent(found), number(d.mean, "+.4f"), interval(d.low, d.high), d.n])
    if not rows:
        return NOT_RUN
    rows = [[*row[:3], number(q, ".2g"), *row[3:]] for row, q in zip(rows, holm(p), strict=True)]
    return table("claim | tokens | 95 % | p (Holm) | nats | 95 % | seeds", rows)


def tests(cells: Cells) -> Tests:
    """Returns the tests of the ladder's claims in tokens."""
    return [(claim.text, _claimed(cells, claim.at(CONSTANT)).log_ratio.p) for claim in _tested()]


def _tested() -> list[Claim]:
    have = {cell.name for cell in STUDIES[CONSTANT]}
    return [claim for claim in CLAIMS if set(claim.at(CONSTANT).cells) <= have]


def _claimed(cells: Cells, claim: Claim) -> token_ratios.Overhead:
    """Returns the overhead of a claim's first cell over its second, less that of the pair beside."""
    fp8 = cells.get(_FP8)
    if fp8 is None or not set(claim.cells) <= cells.keys():
        return token_ratios.over_seeds([])
    ratios = [token_ratios.log_ratios(_curves(cells[name]), _curves(fp8)) for name in claim.cells]
    common = sorted(set.intersection(*(set(of_cell) for of_cell in ratios)))
    of_seeds = ([of_cell[seed] for of_cell in ratios] for seed in common)
    return token_ratios.over_seeds([token_ratios.difference(of_seed) for of_seed in of_seeds])


def overhead_with_interval(cell: CellResult, base: CellResult) -> str:
    """Returns P1's overhead of a cell over fp8 with its interval, or the number of runs that it lacks."""
    found = token_ratios.overhead(_curves(cell), _curves(base))
    mean, span = _percent(found)
    note = f"{found.not_reached} did not reach it" if found.not_reached else span
    return mean if note == "-" else f"{mean} ({note})"


def is_constant(base: CellResult) -> bool:
    """Whether the cell's rate is all but constant after the warm-up."""
    return base.protocol["horizon"] is not None


def slopes(cells: Cells) -> str:
    """Returns by how much losses fall with the logarithm of the tokens, and the paper's overheads in nats."""
    found = [(f"fp8, `{CONSTANT}`, around P1's target", _slope_of_fp8(cells))]
    for curve in mlperf.PUBLISHED_CURVES:
        (n0, before), (n1, last) = sorted(curve.losses.items())[-2:]
        name = f"{curve.name}, Llama 3.1 8B, {n0:,} to {n1:,} sequences"
        found.append((name, (last - before) / math.log(n1 / n0)))
    rows = [
        [name, number(slope, "+.2f"), *(number(-slope * math.log(ratio), ".3f") for _, ratio in PAPERS)]
        for name, slope in found
    ]
    columns = " | ".join(f"{text} more tokens, nats" for text, _ in PAPERS)
    return table(f"curve | nats an e-fold of tokens | {columns}", rows)


def costs(cells: Cells) -> str:
    """Returns each overhead at a constant rate in nats: by the slope of fp8's loss, and at the end."""
    slope, rows = _slope_of_fp8(cells), []
    fp8 = cells.get(_FP8)
    group = [] if fp8 is None else [c for c in cells.values() if c.group == fp8.group and c is not fp8]
    for cell in sorted(group, key=lambda c: c.label):
        found = token_ratios.overhead(_curves(cell), _curves(cells[_FP8]))
        d = paired_difference(cell.losses, cells[_FP8].losses)
        mean, low, high = (-slope * x for x in found.log_ratio[:3])
        at_target = [found.bound + number(mean, "+.3f"), interval(low, high, "+.3f")]
        rows.append([cell.label, *at_target, number(d.mean, "+.3f"), interval(d.low, d.high, "+.3f")])
    if not rows:
        return NOT_RUN
    return table("policy, rules | overhead times slope, nats | 95 % | at the end | 95 %", rows)


def _slope_of_fp8(cells: Cells) -> float:
    """Returns the slope of fp8's loss around P1's target, over seeds; NaN without runs."""
    fp8 = cells.get(_FP8)
    curves = [] if fp8 is None else [token_ratios.smooth(curve) for curve in _curves(fp8).values() if curve]
    of_seeds = [_slope(curve, token_ratios.SHARE - _AROUND, token_ratios.SHARE + _AROUND) for curve in curves]
    return t_interval(of_seeds).mean


def _slope(curve: Sequence[Sequence[float]], first: float, last: float) -> float:
    """Returns the slope over the logarithm of the tokens between two shares of a curve."""
    end = curve[-1][0]
    fall = token_ratios.loss_at(curve, last * end) - token_ratios.loss_at(curve, first * end)
    return fall / math.log(last / first)


def _percent(found: token_ratios.Overhead) -> list[str]:
    """Returns the mean overhead, as a bound if it is one, and its interval."""
    mean, low, high = (100 * math.expm1(x) for x in found.log_ratio[:3])
    percent = "-" if math.isnan(mean) else f"{found.bound}{mean:+.1f} %"
    return [percent, interval(low, high, "+.1f")]


def _curves(cell: CellResult) -> dict[int, Sequence[Sequence[float]]]:
    """Returns the evaluations by seed, none of a run that diverged."""
    return {seed: run["evaluations"] if seed in cell.losses else [] for seed, run in cell.runs.items()}
