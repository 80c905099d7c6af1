"""The tables of the study's second part, whose tests and predictions are in plans/."""

import statistics
from collections.abc import Sequence

from mxjax.runtime.tables import table
from studies.ladder.cells import FRESH, LENGTHS
from studies.ladder.claims import Cells, Claim, by_seed, table_of_tests
from studies.ladder.kinds import ARRANGED, LOCAL
from studies.ladder.studies import FIRST, SEEDS
from studies.ladder.tables import number

_NAMES = {"wgrad": "none", "wgrad_hadamard": "H16", "wgrad_fixed": "fixed", "wgrad_rht": "redrawn"}
_ARRANGEMENTS = {"anew": "permuted anew", "once": "permuted once", "means32": "means of 32 split off"}


def _lead(arrangement: str, signs: str = "wgrad_rht") -> tuple[str, str]:
    """Returns the cells of signs and of H16, whose difference is H16's lead."""
    return f"{signs}{arrangement}.floor", f"wgrad_hadamard{arrangement}.floor"


def _interaction(arrangement: str, text: str, signs: str = "wgrad_rht") -> Claim:
    return Claim(
        f"{text}: in order minus {_ARRANGEMENTS[arrangement]}",
        *_lead("", signs),
        _lead(f"+{arrangement}", signs),
    )


PRIMARY = (_interaction("anew", "redrawn signs minus H16"),)
SECONDARY = (
    Claim("H16: permuted anew minus in order", "wgrad_hadamard+anew.floor", "wgrad_hadamard.floor"),
    _interaction("once", "redrawn signs minus H16"),
    _interaction("means32", "redrawn signs minus H16"),
    Claim("redrawn signs: means of 32 split off minus not", "wgrad_rht+means32.floor", "wgrad_rht.floor"),
)
INTERVALS = (
    Claim("none minus fp8", "wgrad.floor", "fp8.own"),
    *(Claim(f"{_NAMES[kind]} minus none", f"{kind}.floor", "wgrad.floor") for kind in ARRANGED[1:]),
    Claim("redrawn signs minus H16", *_lead("")),
    Claim("fixed minus redrawn signs", "wgrad_fixed.floor", "wgrad_rht.floor"),
    *(_interaction(name, "fixed signs minus H16", "wgrad_fixed") for name in _ARRANGEMENTS),
    *(
        Claim(f"{_NAMES[kind]}: {text} minus in order", f"{kind}+{name}.floor", f"{kind}.floor")
        for name, text in _ARRANGEMENTS.items()
        for kind in ARRANGED
        if (kind, name) not in (("wgrad_hadamard", "anew"), ("wgrad_rht", "means32"))
    ),
)
OTHERS = (
    Claim("H16 on Fprop and Dgrad minus none", "fprop_dgrad_hadamard.floor", "wgrad_hadamard.floor"),
    Claim("redrawn signs minus H16", "fprop_dgrad_rht.floor", "fprop_dgrad_hadamard.floor"),
    Claim(
        "redrawn signs minus H16: in order minus permuted anew",
        "fprop_dgrad_rht.floor",
        "fprop_dgrad_hadamard.floor",
        ("fprop_dgrad_rht+anew.floor", "fprop_dgrad_hadamard+anew.floor"),
    ),
)
LOCALS = tuple(Claim(f"{kind} minus H16", f"{kind}.floor", "wgrad_hadamard.floor") for kind in LOCAL)


def mechanism(cells: Cells) -> str:
    """Returns what the order of tokens changes under `floor`: the primary test, the others, and intervals."""
    return _parts(
        cells,
        [
            ("Primary test", PRIMARY, ()),
            ("Secondary tests", SECONDARY, ()),
            ("Intervals", (), INTERVALS),
            ("Rotations of Fprop and Dgrad, beside H16 on Wgrad", (), OTHERS),
        ],
    )


def mechanism_even(cells: Cells) -> str:
    """Returns the same differences under `even`; nothing is tested."""
    claims = [under_even(claim) for claim in (*PRIMARY, *SECONDARY, *INTERVALS[1:])]
    return _parts(cells, [("Rule `even`", (), claims)])


def local(cells: Cells) -> str:
    """Returns the tests of rotations that gather what neighbouring tokens share, against H16."""
    return _parts(cells, [("Against H16", LOCALS, ())])


def length(cells: Cells) -> str:
    """Returns what more tokens change: the two tests, and each difference at every length."""
    short, *_, long = LENGTHS
    after, before = ((f"wgrad.floor.60m.{at}", f"wgrad_hadamard.floor.60m.{at}") for at in (long, short))
    tests = [
        Claim("gain of H16 at four times the tokens", *after),
        Claim("gain of H16, four times the tokens minus once", *after, before),
    ]
    seen = [
        Claim(f"{text} minus {other}", f"{kind}.floor", base).at(protocol)
        for kind, text, other, base in (
            ("wgrad", "none", "fp8", "fp8.own"),
            ("wgrad_hadamard", "H16", "fp8", "fp8.own"),
            ("wgrad_hadamard", "H16", "none", "wgrad.floor"),
            ("fprop_dgrad", "Fprop and Dgrad", "fp8", "fp8.own"),
            ("wgrad_rht", "redrawn signs", "none", "wgrad.floor"),
            ("wgrad_sr", "stochastic rounding", "none", "wgrad.floor"),
        )
        for protocol in LENGTHS
    ]
    if not any(by_seed(cells, claim) for claim in seen):
        return f"Not run yet: seeds from {FIRST + SEEDS}."
    return f"Tokens without repetition:\n\n{table_of_tests(cells, tests, seen)}"


def generators(cells: Cells) -> str:
    """Returns what defective random bits, other eps and gradients in bfloat16 change; the first is tested."""
    frozen, *others = generator_claims()
    return _parts(cells, [("Random bits and other settings", (frozen,), others)], at=None)


def generator_claims() -> list[Claim]:
    """Returns the differences of `generators`."""
    frozen = _between("frozen minus fresh bits", "wgrad_sr", "wgrad_sr", "-frozen", "")
    third = _between("a third frozen minus fresh bits", "wgrad_sr", "wgrad_sr", "-third", "")
    beside = [
        _between(f"{text} minus none", "wgrad_sr", "wgrad", suffix, "")
        for suffix, text in (("-frozen", "frozen bits"), ("-third", "a third frozen"))
    ]
    others = [
        _between(f"{_SUFFIXES[suffix]}: {text} minus none", kind, "wgrad", suffix, suffix)
        for suffix in _SUFFIXES
        for kind, text in (("wgrad_sr", "stochastic rounding"), ("wgrad_hadamard", "H16"))
        if (kind, suffix) != ("wgrad_hadamard", "")  # among INTERVALS
    ]
    return [frozen, third, *beside, *others]


_SUFFIXES = {"": "as ever", "-eps2e-4": "eps 2e-4", "-eps1e-8": "eps 1e-8", "-bf16": "gradients in bfloat16"}


def rates(cells: Cells) -> str:
    """Returns the mean losses by learning rate, over the seeds that all rates of a kind have."""
    kinds, suffixes = ("wgrad", "wgrad_hadamard", "wgrad_sr"), ("-lr2e-3", "", "-lr4e-3")
    names = {kind: [f"{kind}.floor.60m.{FRESH}{suffix}" for suffix in suffixes] for kind in kinds}
    rows = []
    for kind, of_rates in names.items():
        losses = [cells[name].losses if name in cells else {} for name in of_rates]
        seeds = sorted(set.intersection(*map(set, losses)))
        if seeds:
            means = (statistics.fmean(of[seed] for seed in seeds) for of in losses)
            rows.append([kind, *(number(mean) for mean in means), len(seeds)])
    return table("Wgrad | 2e-3 | 3e-3 | 4e-3 | seeds", rows) if rows else f"Not run yet: seeds from {FIRST}."


def _parts(
    cells: Cells, parts: Sequence[tuple[str, Sequence[Claim], Sequence[Claim]]], at: str | None = FRESH
) -> str:
    """Returns a table for each part: its caption, the claims tested together, and those that are not."""
    found = []
    for caption, tests, seen in parts:
        tests, seen = ([c.at(at) if at else c for c in claims] for claims in (tests, seen))
        if any(by_seed(cells, claim) for claim in (*tests, *seen)):
            found.append(f"{caption}:\n\n{table_of_tests(cells, tests, seen)}")
    return "\n\n".join(found) or f"Not run yet: seeds from {FIRST}."


def under_even(claim: Claim) -> Claim:
    ours, base, *beside = (name.replace(".floor", ".even") for name in claim.cells)
    return Claim(claim.text, ours, base, (beside[0], beside[1]) if beside else None)


def _between(text: str, ours: str, base: str, suffix: str, other: str, rule: str = "floor") -> Claim:
    """Returns a claim about cells in two protocols."""
    return Claim(text, f"{ours}.{rule}.60m.{FRESH}{suffix}", f"{base}.{rule}.60m.{FRESH}{other}")
