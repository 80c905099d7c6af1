"""The studies, each a list of cells, and the claims that they test.

A study whose learning rate is not tuned yet has the placeholder of `benchmarks.study.cells.RATES`.
"""

import dataclasses
import fnmatch
import types
from collections.abc import Mapping, Sequence

from benchmarks.study.cells import MULTIPLES, UNIFORM, WGRAD_KINDS, WGRAD_ONLY, Cell
from mxjax.recipes import policies
from mxjax.recipes.ladder import ladder
from mxjax.recipes.whole_runs import RECIPES

LADDER = (
    "fp8",
    "wgrad",
    "wgrad_hadamard",
    "wgrad_sr",
    "wgrad_rht",
    "fprop_dgrad",
    "fprop",
    "full_hadamard",
    "full_sr",
    "full_rht",
    "wgrad_hadamard32",
    "full_hadamard32",
    "amazon",
    "bf16",
)
"""The policies, the most informative first."""
RULES = ("floor", "even", "uos", "rceil", "ceil")
TELLING = (
    ("fp8", ""),
    ("wgrad", "floor"),
    ("wgrad_hadamard", "floor"),
    ("wgrad", "even"),
    ("wgrad_hadamard", "even"),
    ("wgrad_sr", "floor"),
    ("wgrad_rht", "floor"),
    ("fprop_dgrad", "floor"),
    ("full_hadamard", "floor"),
    ("full_sr", "floor"),
)
"""Policies and rules that are repeated at other sizes and lengths."""
CONSTANT = "constant-60m"
"""The study with an all but constant rate, for P1, and its protocol."""
REMEDIES = ("wgrad_hadamard", "wgrad_sr", "wgrad_rht")
HARD = ("lr2x", "lr4x", "batch16", "seq2048", "outliers")
"""The hard regimes, by the ends of their protocols' names."""
_WITHOUT_MXFP4 = ("fp8", "bf16")
_NOT_TINY = ("primus_deosc", "tetrajet_v2_full")
"""Recipes for larger models: all four blocks of `tiny` are among those in BF16, all 128 channels outliers."""


def _ladder(model: str, protocol: str, policies: tuple[str, ...], rules: tuple[str, ...], seeds: int):
    return [
        Cell(policy, rule, model, protocol, seeds)
        for policy in policies
        for rule in (("",) if policy in _WITHOUT_MXFP4 else rules)
    ]


def _telling(model: str, protocol: str, seeds: int) -> tuple[Cell, ...]:
    return tuple(Cell(policy, rules, model, protocol, seeds) for policy, rules in TELLING)


def _wgrad_rules() -> list[Cell]:
    """Returns cells that vary Wgrad's rule, with Fprop and Dgrad fixed in MXFP4, and in FP8."""
    cells = []
    for rule in RULES:
        rules = rule if rule == "even" else f"even-even-{rule}"  # `even` is a cell of the ladder
        for kind in WGRAD_KINDS:
            cells.append(Cell(kind, rules, "60m", "tuned-60m", 8))
            cells.append(Cell(WGRAD_ONLY + kind, rule, "60m", "tuned-60m", 8))
    return cells


def _hard_regimes() -> list[Cell]:
    policies = ("fp8", "fprop_dgrad", "wgrad", *REMEDIES)
    cells = []
    for regime in HARD:
        cells += _ladder("60m", f"tuned-60m-{regime}", policies, ("floor",), 3)
    return cells


def _grids() -> list[Cell]:
    """Returns cells of a uniform grid beside E2M1; arXiv 2606.20381 predicts that rotation helps it more."""
    rotations = ("wgrad", "full_hadamard", "full_rht")
    policies = ("fp8", *(grid + name for name in rotations for grid in ("", UNIFORM)))
    return _ladder("60m", "tuned-60m", policies, ("floor", "rceil"), 8)


def _recipes(model: str, protocol: str, seeds: int) -> tuple[Cell, ...]:
    published = (name for name in policies() if name not in ladder())
    names = ("fp8", "bf16", "wgrad", "wgrad_hadamard", *published, *RECIPES)
    return tuple(Cell(name, "", model, protocol, seeds) for name in names)


def _tuning(model: str, protocol: str, rates: tuple[str, ...], seeds: int) -> tuple[Cell, ...]:
    return tuple(Cell("fp8", "", model, f"{protocol}-lr{lr}", seeds) for lr in rates)


_RATES = ("1e-3", "2e-3", "3e-3", "4e-3", "6e-3")

STUDIES: Mapping[str, tuple[Cell, ...]] = types.MappingProxyType(
    {
        # Learning rates. `tune-60m` is history: it showed that its warm-up is too short.
        "tune-60m": _tuning("60m", "decay", ("1e-3", "1.5e-3", "2e-3", "5e-4", "4e-3"), 3),
        "tune-60m-warmup": _tuning("60m", "decay-w150", _RATES, 3),
        "tune-60m-constant": _tuning("60m", "constant-w150", _RATES[:4], 3),
        "tune-125m": _tuning("125m", "decay-w150", _RATES[:4], 3),
        "tune-350m": _tuning("350m", "decay-w150", ("5e-4", "1e-3", "2e-3", "3e-3"), 3),
        # A. The ladder, and fp8 at other lengths for P2. `ladder-60m` has the first tuning's rate.
        "ladder-60m": tuple(_ladder("60m", "decay", LADDER, ("floor", "even"), 8)),
        "ladder-60m-tuned": (
            *_ladder("60m", "tuned-60m", LADDER, ("floor", "even"), 8),
            *(Cell("fp8", "", "60m", f"tuned-60m-x{m:g}", 8) for m in MULTIPLES),
        ),
        # B. The rule and the remedy of Wgrad.
        "rules-60m": tuple(_wgrad_rules()),
        # C. Other sizes, more epochs, and P1.
        "scale-125m": _telling("125m", "tuned-125m", 4),
        "scale-350m": _telling("350m", "tuned-350m", 2),
        "epochs-60m": _telling("60m", "tuned-60m-4epochs", 3),
        CONSTANT: tuple(
            _ladder(
                "60m",
                CONSTANT,
                ("fp8", "bf16", "fprop", "fprop_dgrad", "wgrad", *REMEDIES),
                ("floor",),
                4,
            )
        ),
        # D. Regimes in which Wgrad may hurt or diverge.
        "hard-60m": tuple(_hard_regimes()),
        # E. A uniform grid beside E2M1, without and with rotation of all three GEMMs.
        "grid-60m": tuple(_grids()),
        # Every published recipe, for docs/results/recipes.md; the second tries the program on a CPU.
        "recipes": _recipes("60m", "tuned-60m", 4),
        "recipes-tiny": tuple(c for c in _recipes("tiny", "tiny", 2) if c.policy not in _NOT_TINY),
    }
)
"""The studies and their cells, in the order of training."""


def matching(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """Returns the cells whose name matches a pattern such as "wgrad.floor.*".

    Raises:
      ValueError: none does.
    """
    found = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, pattern)]
    if not found:
        names = ", ".join(cell.name for cell in cells)
        raise ValueError(f"no cell is called {pattern!r}; the cells are {names}")
    return found


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
LARGER = ("125m", "350m")
"""The other sizes, each with a study `scale-SIZE` in the protocol `tuned-SIZE`."""
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
"""Tested in each of LADDERS, and over both; those whose cells are planned there, also in each of LARGER."""
ALONE = (
    Claim("Wgrad costs loss, floor", "only_wgrad.floor", "fp8.own"),
    Claim("H16 takes off loss, floor", "only_wgrad_hadamard.floor", "only_wgrad.floor"),
    Claim("with H16 a cost remains, floor", "only_wgrad_hadamard.floor", "fp8.own"),
    Claim("redrawn signs take off loss, floor", "only_wgrad_rht.floor", "only_wgrad.floor"),
    Claim("Wgrad costs loss, even", "only_wgrad.even", "fp8.own"),
    Claim("H16 takes off loss, even", "only_wgrad_hadamard.even", "only_wgrad.even"),
    Claim("with H16 a cost remains, even", "only_wgrad_hadamard.even", "fp8.own"),
    Claim("without rotation, rule even differs from floor", "only_wgrad.even", "only_wgrad.floor"),
    Claim(
        "H16 takes off more under floor than under even",
        "only_wgrad_hadamard.floor",
        "only_wgrad.floor",
        ("only_wgrad_hadamard.even", "only_wgrad.even"),
    ),
)
"""Tested at the tuned rate: Wgrad alone in MXFP4, the other two GEMMs in FP8."""
ALONE_SEEN = (
    Claim("redrawn signs differ from H16, floor", "only_wgrad_rht.floor", "only_wgrad_hadamard.floor"),
    Claim("redrawn signs take off loss, even", "only_wgrad_rht.even", "only_wgrad.even"),
    Claim("redrawn signs differ from H16, even", "only_wgrad_rht.even", "only_wgrad_hadamard.even"),
    Claim("stochastic rounding takes off loss, floor", "only_wgrad_sr.floor", "only_wgrad.floor"),
    Claim("stochastic rounding takes off loss, even", "only_wgrad_sr.even", "only_wgrad.even"),
    Claim("stochastic rounding differs from H16, floor", "only_wgrad_sr.floor", "only_wgrad_hadamard.floor"),
    Claim("stochastic rounding differs from H16, even", "only_wgrad_sr.even", "only_wgrad_hadamard.even"),
    Claim("with stochastic rounding a cost remains, floor", "only_wgrad_sr.floor", "fp8.own"),
    Claim("with stochastic rounding a cost remains, even", "only_wgrad_sr.even", "fp8.own"),
    Claim(
        "stochastic rounding takes off more than beside MXFP4 in the other two, floor",
        "only_wgrad_sr.floor",
        "only_wgrad.floor",
        ("wgrad_sr.even-even-floor", "wgrad.even-even-floor"),
    ),
    Claim(
        "stochastic rounding takes off more than beside MXFP4 in the other two, even",
        "only_wgrad_sr.even",
        "only_wgrad.even",
        ("wgrad_sr.even", "wgrad.even"),
    ),
    Claim("Fprop alone costs more than Wgrad alone, floor", "fprop.floor", "only_wgrad.floor"),
    Claim("Fprop alone costs more than Wgrad alone, even", "fprop.even", "only_wgrad.even"),
)
"""Beside ALONE; chosen after the losses were known, and not tested."""
LARGER_SEEN: Mapping[str, tuple[Claim, ...]] = types.MappingProxyType(
    {
        "125m": (
            Claim("redrawn signs take off loss, floor", "wgrad_rht.floor", "wgrad.floor"),
            Claim("H16 takes off loss, even", "wgrad_hadamard.even", "wgrad.even"),
            Claim("stochastic rounding differs from H16, floor", "wgrad_sr.floor", "wgrad_hadamard.floor"),
        )
    }
)
"""Beside CLAIMS at each of LARGER; chosen after the losses there were known, and not tested."""
GRID = tuple(
    Claim(
        f"{text} off more from a uniform grid than from E2M1, {rule}",
        f"{UNIFORM}{remedy}.{rule}",
        f"{UNIFORM}wgrad.{rule}",
        (f"{remedy}.{rule}", f"wgrad.{rule}"),
    )
    for text, remedy in (("H16 takes", "full_hadamard"), ("redrawn signs take", "full_rht"))
    for rule in ("floor", "rceil")
)
"""A prediction of arXiv 2606.20381, tested at the tuned rate; made tests when most losses were known."""
_GRIDS_ALONE = (
    ("a uniform grid costs more", f"{UNIFORM}wgrad", "wgrad"),
    ("with H16 a uniform grid costs more", f"{UNIFORM}full_hadamard", "full_hadamard"),
    ("with redrawn signs a uniform grid costs more", f"{UNIFORM}full_rht", "full_rht"),
    ("H16 takes off loss, E2M1", "full_hadamard", "wgrad"),
    ("H16 takes off loss, uniform grid", f"{UNIFORM}full_hadamard", f"{UNIFORM}wgrad"),
    ("redrawn signs take off loss, E2M1", "full_rht", "wgrad"),
    ("redrawn signs take off loss, uniform grid", f"{UNIFORM}full_rht", f"{UNIFORM}wgrad"),
)
GRID_SEEN = tuple(
    Claim(f"{text}, {rule}", f"{ours}.{rule}", f"{base}.{rule}")
    for rule in ("floor", "rceil")
    for text, ours, base in _GRIDS_ALONE
)
"""Beside GRID; chosen after losses were known, and not tested."""
RCEIL_SEEN = (
    Claim("rceil costs more than even", "wgrad.rceil", "wgrad.even"),
    Claim("rceil costs more than floor", "wgrad.rceil", "wgrad.floor"),
    Claim("rceil costs more than even, H16 on all three", "full_hadamard.rceil", "full_hadamard.even"),
    Claim("rceil costs more than floor, H16 on all three", "full_hadamard.rceil", "full_hadamard.floor"),
)
"""The rule in all three GEMMs at the tuned rate; chosen after losses were known, and not tested."""
HARD_SEEN = (
    Claim("MXFP4 in all three GEMMs costs loss", "wgrad.floor", "fp8.own"),
    Claim("Fprop and Dgrad cost loss", "fprop_dgrad.floor", "fp8.own"),
    Claim("Wgrad costs loss beyond them", "wgrad.floor", "fprop_dgrad.floor"),
    Claim("H16 on Wgrad takes off loss", "wgrad_hadamard.floor", "wgrad.floor"),
    Claim("redrawn signs of Wgrad take off loss", "wgrad_rht.floor", "wgrad.floor"),
    Claim("stochastic rounding of Wgrad takes off loss", "wgrad_sr.floor", "wgrad.floor"),
    Claim("with H16 on Wgrad a cost remains", "wgrad_hadamard.floor", "fp8.own"),
    Claim("redrawn signs differ from H16", "wgrad_rht.floor", "wgrad_hadamard.floor"),
    Claim("stochastic rounding differs from H16", "wgrad_sr.floor", "wgrad_hadamard.floor"),
)
"""In each hard regime; chosen after losses were known, and not tested."""
CONSTANT_SEEN = (
    Claim("redrawn signs take off loss", "wgrad_rht.floor", "wgrad.floor"),
    Claim("Fprop costs more than Wgrad", "fprop.floor", "fp8.own", ("wgrad.floor", "fprop_dgrad.floor")),
)
"""Beside CLAIMS at a constant rate; chosen after the losses were known, and not tested."""
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
RULE_CONTRASTS = (
    Claim("all three GEMMs", "wgrad.floor", "wgrad.even"),
    Claim("all three GEMMs, H16 on Wgrad", "wgrad_hadamard.floor", "wgrad_hadamard.even"),
    Claim("Fprop and Dgrad, without MXFP4 in Wgrad", "fprop_dgrad.floor", "fprop_dgrad.even"),
    Claim("Fprop and Dgrad, Wgrad with floor", "wgrad.floor", "wgrad.even-even-floor"),
    Claim("Wgrad, Fprop and Dgrad with even", "wgrad.even-even-floor", "wgrad.even"),
    Claim(
        "Wgrad with H16, Fprop and Dgrad with even", "wgrad_hadamard.even-even-floor", "wgrad_hadamard.even"
    ),
    Claim("Wgrad, Fprop and Dgrad in FP8", "only_wgrad.floor", "only_wgrad.even"),
    Claim("Wgrad with H16, Fprop and Dgrad in FP8", "only_wgrad_hadamard.floor", "only_wgrad_hadamard.even"),
)
"""What the rule floor instead of even changes, by the GEMMs that have it."""
