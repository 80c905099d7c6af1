"""What the text claims about the cells: differences of final losses, by when they were chosen.

`studies.ladder.claims` tests them.
"""

import dataclasses
import types
from collections.abc import Mapping

from studies.ladder.cells import UNIFORM


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
ELSEWHERE: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "scale-125m": ("125m", "tuned-125m"),
        "scale-350m": ("350m", "tuned-350m"),
        "epochs-60m": ("60m", "tuned-60m-4epochs"),
    }
)
"""The studies of other sizes and of more epochs: their model and protocol."""
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
"""Tested in each of LADDERS, and over both; those planned there also in each of ELSEWHERE."""
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
ELSEWHERE_SEEN: Mapping[str, tuple[Claim, ...]] = types.MappingProxyType(
    {
        "scale-125m": (
            Claim("redrawn signs take off loss, floor", "wgrad_rht.floor", "wgrad.floor"),
            Claim("H16 takes off loss, even", "wgrad_hadamard.even", "wgrad.even"),
            Claim("stochastic rounding differs from H16, floor", "wgrad_sr.floor", "wgrad_hadamard.floor"),
        )
    }
)
"""Beside CLAIMS at each of ELSEWHERE; chosen after the losses there were known, and not tested."""
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
HARD_EVEN_SEEN = tuple(
    Claim(claim.text, claim.ours.replace("floor", "even"), claim.base.replace("floor", "even"))
    for claim in HARD_SEEN
    if claim.beside is None
)
"""The same under `even`, in some of the regimes."""
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
