"""Costs of policies at three sizes of the model and over four epochs, side by side, as Markdown tables."""

import math
from collections.abc import Mapping, Sequence

from analysis.statistics import Estimate, detectable_mean, mean_of_means, rank_correlation, t_interval
from benchmarks.study.cells import BASELINE
from benchmarks.study.claim_lists import CLAIMS, ELSEWHERE, LADDERS, Claim
from benchmarks.study.claims import Tests, by_seed, corrected_together
from benchmarks.study.results import CellResult
from benchmarks.study.studies import TELLING
from benchmarks.study.tables import number, with_interval
from mxjax.runtime.tables import table

Cells = Mapping[str, CellResult]
PLACES = (("60m", LADDERS[1]), *ELSEWHERE.values())
"""Model and protocol of each column; the policies of TELLING are planned in all."""
NAMES = tuple(model if protocol == f"tuned-{model}" else protocol for model, protocol in PLACES)
"""Names of the columns; those of sizes, where a run sees each token once, are the model's."""
SIZES = [i for i, (model, _) in enumerate(PLACES) if NAMES[i] == model]
_TELLING = [f"{policy}.{rules or 'own'}" for policy, rules in TELLING]
_APART = "full_sr"
"""Its cost, far above the others', makes part of any agreement of ranks."""
_HEADER = " | ".join(f"`{name}`" for name in NAMES)


def by_place(cells: Cells) -> dict[str, list[list[float]]]:
    """Returns what each policy costs beyond fp8 by seed, for each of PLACES; the lowest mean is first."""

    def mean(of_places: list[list[float]]) -> tuple[bool, float]:
        found = t_interval(of_places[0]).mean
        return math.isnan(found), found

    baseline, *others = _TELLING
    found = {
        name.replace(".", " `") + "`": _by_place(cells, Claim("costs loss", name, baseline))
        for name in others
    }
    found = {name: of_places for name, of_places in found.items() if any(of_places[1:])}
    return dict(sorted(found.items(), key=lambda item: mean(item[1])))


def sizes(cells: Cells) -> str:
    """Returns what each policy costs in each column, and how far the others rank them as the first does."""
    found = {
        name: [t_interval(values) for values in of_places] for name, of_places in by_place(cells).items()
    }
    if not found:
        return "Not run yet."
    rows = [[name, *(_shown(e, "+.3f") for e in estimates)] for name, estimates in found.items()]
    alike = {name: estimates for name, estimates in found.items() if not name.startswith(f"{_APART} ")}
    for text, chosen in (("all", found), (f"without {_APART}", alike)):
        first, *others = zip(*chosen.values(), strict=True)
        rows.append([f"rank correlation with the first, {text}", "", *(_ranks(first, x) for x in others)])
    return table(f"minus {BASELINE} | {_HEADER}", rows)


def _ranks(first: Sequence[Estimate], other: Sequence[Estimate]) -> str:
    pairs = [(x.mean, y.mean) for x, y in zip(first, other, strict=True) if x.n and y.n]
    return _shown(rank_correlation([x for x, _ in pairs], [y for _, y in pairs]), "+.2f")


def together(cells: Cells) -> str:
    """Returns the claims in the mean over the sizes, each of the same weight, corrected together."""
    claims = _claims()
    found = [_by_place(cells, claim) for claim in claims]
    of_sizes = [[pairs[i] for i in SIZES] for pairs in found]
    means = [mean_of_means(pairs) for pairs in of_sizes]
    own = [mean_of_means(pairs, pooled=False) for pairs in of_sizes]
    later = [mean_of_means(pairs[1:]) for pairs in of_sizes]
    rows = []
    for claim, pairs, mean, *rest in zip(
        claims, found, means, _corrected(means), _corrected(own), later, _corrected(later), strict=True
    ):
        if all(pairs[i] for i in SIZES):
            p, p_own, of_later, p_later = rest
            alone = [_shown(t_interval(x), "+.3f") for x in pairs]
            least = number(detectable_mean(mean, mean.n - len(SIZES)), ".3f")
            of_mean = [_shown(mean, "+.3f"), least, p, p_own]
            rows.append([claim.text, *alone, *of_mean, _shown(of_later, "+.3f"), p_later])
    if not rows:
        return "Not run yet."
    together = f"mean of the {len(SIZES)} sizes | detectable | p (Holm) | p, a variance for each size"
    return table(f"claim | {_HEADER} | {together} | mean without `{NAMES[0]}` | p (Holm)", rows)


def tests(cells: Cells) -> Tests:
    """Returns the tests of the ladder's claims in the mean over the sizes."""
    found = {claim.text: _by_place(cells, claim) for claim in _claims()}
    return [(text, mean_of_means([pairs[i] for i in SIZES]).p) for text, pairs in found.items()]


def _claims() -> list[Claim]:
    return [claim for claim in CLAIMS if set(claim.cells) <= set(_TELLING)]


def _by_place(cells: Cells, claim: Claim) -> list[list[float]]:
    """Returns the differences of a claim by seed, for each of PLACES."""
    return [list(by_seed(cells, claim.at(protocol, model)).values()) for model, protocol in PLACES]


def _corrected(estimates: Sequence[Estimate]) -> list[str]:
    return [number(p, ".2g") for p in corrected_together([e.p for e in estimates])]


def _shown(e: Estimate, form: str) -> str:
    """Returns an estimate with its interval or that it is of one seed; blank without any."""
    if not e.n:
        return ""
    return with_interval(e, form) if e.n > 1 else f"{number(e.mean, form)} (one seed)"
