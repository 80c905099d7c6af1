"""The tests of the text's claims, as Markdown tables, from the finished runs."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from analysis.statistics import detectable, holm, standard_deviation, t_interval
from mxjax.runtime.tables import table
from studies.ladder.cells import PROTOCOLS
from studies.ladder.claim_lists import (
    ALONE,
    ALONE_SEEN,
    CLAIMS,
    ELSEWHERE,
    ELSEWHERE_SEEN,
    GRID,
    GRID_SEEN,
    HARD_EVEN_SEEN,
    HARD_SEEN,
    LADDERS,
    RCEIL_SEEN,
    RULE_CONTRASTS,
    SEEN,
    Claim,
)
from studies.ladder.results import CellResult
from studies.ladder.studies import HARD, HARD_EVEN, STUDIES, TOO_HIGH
from studies.ladder.tables import interval, number, with_interval

Cells = Mapping[str, CellResult]
_RATES = " | ".join(f"at {PROTOCOLS[protocol].lr:g}" for protocol in LADDERS)
_BOTH = f"{{}} | {_RATES} | mean | 95 % | detectable"


Tests = list[tuple[str, float]]
"""What is claimed, and p of its test before any correction: NaN if it waits for runs."""


def tests(cells: Cells, claims: Sequence[Claim]) -> Tests:
    """Returns the tests of claims, paired by seed."""
    return [(claim.text, t_interval(list(by_seed(cells, claim).values())).p) for claim in claims]


def of_ladders() -> list[Claim]:
    """Returns the claims of the ladder at both rates, which are corrected together."""
    return [claim.at(protocol) for protocol in LADDERS for claim in CLAIMS]


def of_alone() -> list[Claim]:
    """Returns the claims about Wgrad alone in MXFP4, which are corrected together."""
    return [claim.at(LADDERS[1]) for claim in ALONE]


def of_grid() -> list[Claim]:
    """Returns the claims about a uniform grid and E2M1, which are corrected together."""
    return [claim.at(LADDERS[1]) for claim in GRID]


def of_study(study: str) -> list[Claim]:
    """Returns the claims tested in a study of ELSEWHERE: those whose cells are planned there."""
    model, protocol = ELSEWHERE[study]
    planned = {cell.name for cell in STUDIES[study]}
    return [c for claim in CLAIMS if set((c := claim.at(protocol, model)).cells) <= planned]


def claims(cells: Cells) -> str:
    """Returns the tests of the claims in each protocol, corrected together."""
    return table_of_tests(cells, of_ladders())


def alone(cells: Cells) -> str:
    """Returns the tests of the claims about Wgrad alone in MXFP4, corrected together."""
    return table_of_tests(cells, of_alone(), [claim.at(LADDERS[1]) for claim in ALONE_SEEN])


def grid(cells: Cells) -> str:
    """Returns the tests of what rotations take off from a uniform grid and from E2M1, corrected together."""
    return table_of_tests(cells, of_grid(), [claim.at(LADDERS[1]) for claim in GRID_SEEN])


def rceil(cells: Cells) -> str:
    """Returns what the rule rceil changes in all three GEMMs; nothing is tested."""
    return table_of_tests(cells, [], [claim.at(LADDERS[1]) for claim in RCEIL_SEEN])


def hard(cells: Cells) -> str:
    """Returns what GEMMs cost and remedies take off in the hard regimes; nothing is tested."""
    return _regimes(cells, HARD_SEEN, HARD)


def hard_even(cells: Cells) -> str:
    """Returns what `hard` does, under `even`, for the regimes that also ran so."""
    return _regimes(cells, HARD_EVEN_SEEN, HARD_EVEN)


def _regimes(cells: Cells, claims: Sequence[Claim], regimes: Sequence[str]) -> str:
    """Returns the differences in each regime, and in the mean over those not in TOO_HIGH."""
    rows, averaged = [], [regime for regime in regimes if regime not in TOO_HIGH]
    for claim in claims:
        found = {regime: by_seed(cells, claim.at(f"tuned-60m-{regime}")) for regime in regimes}
        seeds = sorted(set.intersection(*(set(found[regime]) for regime in averaged)))
        means = [statistics.fmean(found[regime][seed] for regime in averaged) for seed in seeds]
        estimates = [t_interval(list(pairs)) for pairs in [*(found[r].values() for r in regimes), means]]
        if any(e.n for e in estimates):
            shown = number(detectable(standard_deviation(means), len(means)), ".3f")
            rows.append([claim.text, *(with_interval(e, "+.3f") for e in estimates), shown])
    if not rows:
        return "Not run yet: `hard-60m`."
    return table(f"difference | {' | '.join(regimes)} | mean of {', '.join(averaged)} | detectable", rows)


def elsewhere(cells: Cells) -> str:
    """Returns the tests of the claims in each study of ELSEWHERE with runs, corrected in each."""
    parts = []
    for study, (model, protocol) in ELSEWHERE.items():
        tested = of_study(study)
        later = [claim.at(protocol, model) for claim in ELSEWHERE_SEEN.get(study, ())]
        if any(by_seed(cells, claim) for claim in tested):
            parts.append(table_of_tests(cells, tested, later))
    return "\n\n".join(parts) or "Not run yet: " + ", ".join(f"`{study}`" for study in ELSEWHERE) + "."


def table_of_tests(cells: Cells, tested: Sequence[Claim], seen: Sequence[Claim] = ()) -> str:
    """Returns a table of claims; those of `tested` are corrected together, those of `seen` have no p."""
    shown = [*tested, *seen]
    found = [list(by_seed(cells, claim).values()) for claim in shown]
    corrected = corrected_together([p for _, p in tests(cells, tested)]) + [math.nan] * len(seen)
    rows = [
        [claim.text, *_estimate(pairs), number(p if len(pairs) > 1 else math.nan, ".2g"), len(pairs)]
        for claim, pairs, p in zip(shown, found, corrected, strict=True)
        if pairs
    ]
    text = table("claim | difference | 95 % | detectable | p (Holm) | pairs", rows)
    return text + "".join(_missing(cells, shown))


def corrected_together(p: Sequence[float]) -> list[float]:
    """Returns p by Holm; tests that wait for runs count, so that these can only lower p of the others."""
    return holm([1.0 if math.isnan(x) else x for x in p])


def _missing(cells: Cells, shown: Sequence[Claim]) -> Iterator[str]:
    """Yields paragraphs about claims that wait for runs, and about runs without pairs, which diverged."""
    if waiting := [claim.text for claim in shown if not set(claim.cells) <= cells.keys()]:
        yield f"\n\nCells have not run: {'; '.join(waiting)}."
    names = dict.fromkeys(name for claim in shown for name in claim.cells if name in cells)
    if diverged := [f"{n} of {name}" for name in names if (n := cells[name].n_diverged)]:
        yield f"\n\nRuns that diverged, without pairs: {', '.join(diverged)}."


def both(cells: Cells) -> str:
    """Returns the tests of the claims over both protocols, corrected together."""
    found = [(claim, _of_both(cells, claim)) for claim in CLAIMS]
    corrected = holm([p for _, p in tests_of_both(cells)])
    rows = [
        [*_row(claim, differences), number(p, ".2g"), len(differences)]
        for (claim, differences), p in zip(found, corrected, strict=True)
        if differences
    ]
    return table(f"{_BOTH.format('claim')} | p (Holm) | seeds", rows)


def tests_of_both(cells: Cells) -> Tests:
    """Returns the tests of the ladder's claims in the mean over both protocols."""
    return [(claim.text, t_interval(_means(_of_both(cells, claim))).p) for claim in CLAIMS]


def seen(cells: Cells) -> str:
    """Returns differences that were chosen after the losses were known; nothing is corrected."""
    found = [(claim, _of_both(cells, claim)) for claim in SEEN]
    rows = [[*_row(claim, differences), len(differences)] for claim, differences in found if differences]
    return table(f"{_BOTH.format('comparison')} | seeds", rows)


def rule_contrasts(cells: Cells) -> str:
    """Returns what rule floor costs beyond even in some of the GEMMs, in each protocol and over both."""
    rows = []
    for claim in RULE_CONTRASTS:
        at = [t_interval(list(by_seed(cells, claim.at(protocol)).values())) for protocol in LADDERS]
        parts = (("", "") if not e.n else (number(e.mean, "+.4f"), interval(e.low, e.high)) for e in at)
        means = _means(_of_both(cells, claim))
        rows.append(
            [claim.text, *(x for part in parts for x in part), *(_estimate(means) if means else [""] * 3)]
        )
    rates = _RATES.replace(" |", " | 95 % |")
    return table(f"floor - even in | {rates} | 95 % | mean | 95 % | detectable", rows)


def by_seed(cells: Cells, claim: Claim) -> dict[int, float]:
    """Returns a claim's difference by seed, for the seeds that have all its cells."""

    def between(ours: str, base: str) -> dict[int, float]:
        a, b = (cells[name].losses if name in cells else {} for name in (ours, base))
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}

    first = between(claim.ours, claim.base)
    if claim.beside is None:
        return first
    other = between(*claim.beside)
    return {seed: d - other[seed] for seed, d in first.items() if seed in other}


def _of_both(cells: Cells, claim: Claim) -> list[tuple[float, ...]]:
    """Returns the differences in each of LADDERS, of every seed that has all cells in all of them."""
    found = [by_seed(cells, claim.at(protocol)) for protocol in LADDERS]
    common = sorted(set.intersection(*(set(d) for d in found)))
    return [tuple(d[seed] for d in found) for seed in common]


def _means(differences: Sequence[tuple[float, ...]]) -> list[float]:
    """Returns the mean over the protocols of each seed, which is one sample: its batches are the same."""
    return [statistics.fmean(of_seed) for of_seed in differences]


def _row(claim: Claim, differences: Sequence[tuple[float, ...]]) -> list[str]:
    of_protocols = (number(statistics.fmean(column), "+.4f") for column in zip(*differences, strict=True))
    return [claim.text, *of_protocols, *_estimate(_means(differences))]


def _estimate(pairs: Sequence[float]) -> list[str]:
    """Returns the mean of the differences, its interval, and the mean that so many pairs can show."""
    d = t_interval(pairs)
    shown = detectable(standard_deviation(pairs), len(pairs))
    return [number(d.mean, "+.4f"), interval(d.low, d.high), number(shown)]
