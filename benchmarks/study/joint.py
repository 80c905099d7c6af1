"""All tests of the study corrected together, for readers who count its families as one."""

from collections.abc import Callable

from benchmarks.study import claims, constant_rate, rules, sizes
from benchmarks.study.claim_lists import ELSEWHERE
from benchmarks.study.claims import Cells, Tests, corrected_together
from benchmarks.study.tables import number
from mxjax.runtime.tables import table

LEVEL = 0.05
FAMILIES: dict[str, Callable[[Cells], Tests]] = {
    "the ladder at both rates": lambda cells: claims.tests(cells, claims.of_ladders()),
    "the ladder, in the mean over both rates": claims.tests_of_both,
    "Wgrad alone in MXFP4": lambda cells: claims.tests(cells, claims.of_alone()),
    "a constant rate": constant_rate.tests,
    "a uniform grid": lambda cells: claims.tests(cells, claims.of_grid()),
    "remedies in the mean over Wgrad's rules": rules.tests,
    **{study: lambda cells, s=study: claims.tests(cells, claims.of_study(s)) for study in ELSEWHERE},
    "the ladder in the mean over three sizes": sizes.tests,
}
"""The tests by the family in which they are corrected."""


def joint(cells: Cells) -> str:
    """Returns the claims that are significant in their family, with p corrected over all tests too."""
    families = {family: of(cells) for family, of in FAMILIES.items()}
    tests = [(family, *test) for family, of_family in families.items() for test in of_family]
    whole = corrected_together([p for _, _, p in tests])
    own = [p for of_family in families.values() for p in corrected_together([p for _, p in of_family])]
    found = sorted(
        (p, of_family, family, text)
        for (family, text, _), of_family, p in zip(tests, own, whole, strict=True)
        if of_family < LEVEL
    )
    rows = [
        [text, family, number(of_family, ".2g"), number(p, ".2g")] for p, of_family, family, text in found
    ]
    return table(f"claim | family | p (Holm in its family) | p (Holm over all {len(tests)} tests)", rows)
