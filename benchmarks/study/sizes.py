"""What policies cost at three sizes of the model and over four epochs, side by side, as Markdown tables."""

from collections.abc import Mapping

from benchmarks.study.cells import BASELINE, Cell
from benchmarks.study.claim_lists import CLAIMS, ELSEWHERE, LADDERS
from benchmarks.study.claims import by_seed
from benchmarks.study.results import CellResult
from benchmarks.study.studies import TELLING
from benchmarks.study.tables import number, with_interval
from mxjax.tables import table
from training.paired_statistics import differences, holm, mean_of_means, rank_correlation, t_interval

Cells = Mapping[str, CellResult]
PLACES = (("60m", LADDERS[1]), *ELSEWHERE.values())
"""Model and protocol of each column; the policies of TELLING ran in all."""
N_SIZES = sum(protocol == f"tuned-{model}" for model, protocol in PLACES)
"""The first columns: there a run sees each token once, at the rate tuned for its size."""
NAMES = tuple(model if protocol == f"tuned-{model}" else protocol for model, protocol in PLACES)
"""Names of the columns."""
_HEADER = " | ".join(f"`{name}`" for name in NAMES)


def by_place(cells: Cells) -> dict[str, list[list[float]]]:
    """Returns what each policy costs beyond fp8 by seed, for each of PLACES; the lowest mean is first."""
    baseline, *policies = (
        [cells.get(Cell(policy, rules, *place, 0).name) for place in PLACES] for policy, rules in TELLING
    )
    found = {
        f"{policy} `{rules}`": [
            differences(ours.losses if ours else {}, base.losses if base else {})
            for ours, base in zip(of_policy, baseline, strict=True)
        ]
        for (policy, rules), of_policy in zip(TELLING[1:], policies, strict=True)
    }
    found = {name: of_places for name, of_places in found.items() if any(of_places[1:])}
    return dict(sorted(found.items(), key=lambda item: t_interval(item[1][0]).mean))


def sizes(cells: Cells) -> str:
    """Returns what each policy costs in each column, and how far the others rank them as the first does."""
    found = {
        name: [t_interval(values) for values in of_places] for name, of_places in by_place(cells).items()
    }
    if not found:
        return "Not run yet."
    rows = [[name, *(with_interval(e, "+.3f") if e.n else "" for e in of)] for name, of in found.items()]
    first, *others = zip(*found.values(), strict=True)
    ranks = [[(x.mean, y.mean) for x, y in zip(first, other, strict=True) if x.n and y.n] for other in others]
    correlations = (rank_correlation([x for x, _ in pairs], [y for _, y in pairs]) for pairs in ranks)
    rows.append(["rank correlation with the first", "", *(with_interval(r, "+.2f") for r in correlations)])
    return table(f"minus {BASELINE} | {_HEADER}", rows)


def together(cells: Cells) -> str:
    """Returns the claims in the mean over the sizes, each of the same weight, corrected together."""
    planned = {f"{policy}.{rules or 'own'}" for policy, rules in TELLING}
    claims = [claim for claim in CLAIMS if set(claim.cells) <= planned]
    found = [
        [list(by_seed(cells, claim.at(protocol, model)).values()) for model, protocol in PLACES]
        for claim in claims
    ]
    means = [mean_of_means(pairs[:N_SIZES]) for pairs in found]
    corrected = holm([mean.p for mean in means])
    rows = []
    for claim, pairs, mean, p in zip(claims, found, means, corrected, strict=True):
        if all(pairs[:N_SIZES]):
            shown = (with_interval(e, "+.3f") for e in (*map(t_interval, pairs), mean))
            rows.append([claim.text, *shown, number(p, ".2g")])
    if not rows:
        return "Not run yet."
    return table(f"claim | {_HEADER} | mean of the {N_SIZES} sizes | p (Holm)", rows)
