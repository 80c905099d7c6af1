"""Claims of the text about the cells, as differences of final losses, and their tests as Markdown tables.

Those about scale rules, grids, hard regimes and other sizes are frozen: their runs are finished.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from analysis.statistics import detectable, holm, standard_deviation, t_interval
from mxjax.runtime.tables import table
from studies.ladder.cells import PROTOCOLS
from studies.ladder.results import CellResult
from studies.ladder.tables import interval, number

Cells = Mapping[str, CellResult]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A difference of final losses that the text speaks of: cell `ours` minus cell `base`.

    Attributes:
      ours, base: policy and rules, such as "wgrad.floor"; of a claim that `at` returns, names of cells.
      beside: another pair of cells. The claim is then about the first difference minus theirs.
    """

    text: str
    ours: str
    base: str
    beside: tuple[str, str] | None = None

    def at(self, protocol: str, model: str = "60m") -> "Claim":
        """Returns the claim about cells of a model in a protocol; here they are named by policy and rules."""
        ours, base, *beside = (f"{cell}.{model}.{protocol}" for cell in self.cells)
        return Claim(f"{self.text} ({protocol})", ours, base, (beside[0], beside[1]) if beside else None)

    @property
    def cells(self) -> tuple[str, ...]:
        """The names of all its cells."""
        return (self.ours, self.base, *(self.beside or ()))


LADDERS = ("decay", "tuned-60m")
"""The protocols of the ladder at `60m`: peak rates 1e-3 and 3e-3."""
CLAIMS = (
    Claim("MXFP4 in all three GEMMs costs loss", "wgrad.floor", "fp8.own"),
    Claim("Wgrad costs loss beyond Fprop and Dgrad", "wgrad.floor", "fprop_dgrad.floor"),
    Claim("H16 on Wgrad takes off loss", "wgrad_hadamard.floor", "wgrad.floor"),
    Claim("with H16 on Wgrad a cost remains", "wgrad_hadamard.floor", "fp8.own"),
    Claim("stochastic rounding of Wgrad changes the loss", "wgrad_sr.floor", "wgrad.floor"),
    Claim("redrawn signs differ from H16", "wgrad_rht.floor", "wgrad_hadamard.floor"),
    Claim("without rotation, rule even differs from floor", "wgrad.even", "wgrad.floor"),
    Claim("rule even without rotation differs from floor with H16", "wgrad.even", "wgrad_hadamard.floor"),
    Claim(
        "Wgrad costs more under floor than under even",
        "wgrad.floor",
        "fprop_dgrad.floor",
        ("wgrad.even", "fprop_dgrad.even"),
    ),
    Claim(
        "H16 on Wgrad takes off more under floor than under even",
        "wgrad_hadamard.floor",
        "wgrad.floor",
        ("wgrad_hadamard.even", "wgrad.even"),
    ),
)
"""Tested in each of LADDERS, and over both."""
SEEN = (
    Claim(
        "Fprop costs more than Wgrad, floor", "fprop.floor", "fp8.own", ("wgrad.floor", "fprop_dgrad.floor")
    ),
    Claim("Dgrad beyond Fprop, floor", "fprop_dgrad.floor", "fprop.floor"),
    Claim("Dgrad beyond Fprop, even", "fprop_dgrad.even", "fprop.even"),
    Claim("Wgrad beyond Fprop and Dgrad, even", "wgrad.even", "fprop_dgrad.even"),
    Claim("H16 on Wgrad, even", "wgrad_hadamard.even", "wgrad.even"),
    Claim("H16 on Wgrad - Fprop alone, floor", "wgrad_hadamard.floor", "fprop.floor"),
    Claim("H16 on Wgrad - Fprop and Dgrad alone, floor", "wgrad_hadamard.floor", "fprop_dgrad.floor"),
    Claim("redrawn signs on Wgrad - none, floor", "wgrad_rht.floor", "wgrad.floor"),
    Claim("stochastic rounding of Wgrad, even", "wgrad_sr.even", "wgrad.even"),
    Claim("redrawn signs on Wgrad - none, even", "wgrad_rht.even", "wgrad.even"),
    Claim("redrawn signs - H16, on Wgrad, even", "wgrad_rht.even", "wgrad_hadamard.even"),
    Claim("redrawn signs - H16, all GEMMs, floor", "full_rht.floor", "full_hadamard.floor"),
    Claim("redrawn signs - H16, all GEMMs, even", "full_rht.even", "full_hadamard.even"),
    Claim("stochastic - nearest, all GEMMs, floor", "full_sr.floor", "wgrad.floor"),
    Claim("stochastic - nearest, all GEMMs, even", "full_sr.even", "wgrad.even"),
    Claim("H16 on all GEMMs - on Wgrad, floor", "full_hadamard.floor", "wgrad_hadamard.floor"),
    Claim("H16 on all GEMMs - on Wgrad, even", "full_hadamard.even", "wgrad_hadamard.even"),
    Claim("H16 on all GEMMs - Fprop alone, floor", "full_hadamard.floor", "fprop.floor"),
    Claim("H16 on all GEMMs - Fprop alone, even", "full_hadamard.even", "fprop.even"),
    Claim("H16 on all GEMMs - fp8, even", "full_hadamard.even", "fp8.own"),
    Claim("H32 on all GEMMs - fp8, floor", "full_hadamard32.floor", "fp8.own"),
    Claim("H32 - H16, all GEMMs, floor", "full_hadamard32.floor", "full_hadamard.floor"),
    Claim("H32 on all GEMMs - H16 on Wgrad, floor", "full_hadamard32.floor", "wgrad_hadamard.floor"),
    Claim("H32 on all GEMMs - Fprop alone, floor", "full_hadamard32.floor", "fprop.floor"),
)
"""Differences that the text mentions and that were chosen after the losses were known."""
_RATES = " | ".join(f"at {PROTOCOLS[protocol].lr:g}" for protocol in LADDERS)
_BOTH = f"{{}} | {_RATES} | mean | 95 % | detectable"


def claims(cells: Cells) -> str:
    """Returns the tests of the claims in each protocol, corrected together."""
    return table_of_tests(cells, [claim.at(protocol) for protocol in LADDERS for claim in CLAIMS])


def both(cells: Cells) -> str:
    """Returns the tests of the claims over both protocols, corrected together."""
    found = [(claim, _of_both(cells, claim)) for claim in CLAIMS]
    corrected = holm([t_interval(_means(differences)).p for _, differences in found])
    rows = [
        [*_row(claim, differences), number(p, ".2g"), len(differences)]
        for (claim, differences), p in zip(found, corrected, strict=True)
        if differences
    ]
    return table(f"{_BOTH.format('claim')} | p (Holm) | seeds", rows)


def seen(cells: Cells) -> str:
    """Returns differences that were chosen after the losses were known; nothing is corrected."""
    found = [(claim, _of_both(cells, claim)) for claim in SEEN]
    rows = [[*_row(claim, differences), len(differences)] for claim, differences in found if differences]
    return table(f"{_BOTH.format('comparison')} | seeds", rows)


def table_of_tests(cells: Cells, tested: Sequence[Claim], seen: Sequence[Claim] = ()) -> str:
    """Returns a table of claims; those of `tested` are corrected together, those of `seen` have no p.

    Tests that wait for runs count, so that these can only lower the corrected p of the others.
    """
    shown = [*tested, *seen]
    found = [list(by_seed(cells, claim).values()) for claim in shown]
    p_values = [t_interval(pairs).p for pairs in found[: len(tested)]]
    corrected = holm([1.0 if math.isnan(p) else p for p in p_values]) + [math.nan] * len(seen)
    rows = [
        [claim.text, *_estimate(pairs), number(p if len(pairs) > 1 else math.nan, ".2g"), len(pairs)]
        for claim, pairs, p in zip(shown, found, corrected, strict=True)
        if pairs
    ]
    text = table("claim | difference | 95 % | detectable | p (Holm) | pairs", rows)
    return text + "".join(_missing(cells, shown))


def _missing(cells: Cells, shown: Sequence[Claim]) -> Iterator[str]:
    """Yields paragraphs about claims that wait for runs, and about runs without pairs, which diverged."""
    if waiting := [claim.text for claim in shown if not set(claim.cells) <= cells.keys()]:
        yield f"\n\nCells have not run: {'; '.join(waiting)}."
    names = dict.fromkeys(name for claim in shown for name in claim.cells if name in cells)
    if diverged := [f"{n} of {name}" for name in names if (n := cells[name].n_diverged)]:
        yield f"\n\nRuns that diverged, without pairs: {', '.join(diverged)}."


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
