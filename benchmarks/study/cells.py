"""The study's cells as plain data: policy, scale rules, model, protocol and seeds.

A cell's name has all of them: `wgrad_hadamard.floor.60m.decay` is the policy, the scale rule of all three
GEMMs (or `even-even-floor` for Fprop, Dgrad and Wgrad), the model and the protocol.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import cast

from mxjax.operand import Operand
from mxjax.policy import Gemm, Policy, Rotation, with_scale_rule
from mxjax.recipes import get_policy
from mxjax.scales import ScaleRule


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The training of a cell.

    Attributes:
      lr: peak learning rate.
      steps: optimizer steps of a run.
      horizon: steps over which the cosine decays to a tenth of the peak; None means `steps`.
      warmup: steps of linear warm-up.
      batch, seq: sequences a step, and tokens a sequence.
      evaluations: number of evaluations, evenly spaced, the last after the last step.
    """

    lr: float
    steps: int = 700
    horizon: int | None = None
    warmup: int = 50
    batch: int = 64
    seq: int = 512
    evaluations: int = 20

    @property
    def tokens(self) -> int:
        """Training tokens of a run."""
        return self.steps * self.batch * self.seq


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs that differ only in the seed.

    Attributes:
      rules: a scale rule, or one for each GEMM joined by "-", or "" for the policy's own.
    """

    policy: str
    rules: str
    model: str
    protocol: str
    seeds: int

    @property
    def name(self) -> str:
        """The cell's name, which begins the names of its files."""
        return f"{self.policy}.{self.rules or 'own'}.{self.model}.{self.protocol}"


_MULTIPLES = (0.8, 0.9, 1.1, 1.25, 1.5)
"""Lengths of further fp8 runs relative to a cell's: they convert a final loss to tokens."""


def _protocols() -> dict[str, Protocol]:
    """Returns the protocols; an epoch is 717 steps of 64 x 512 tokens at a vocabulary of 16,384."""
    decay = Protocol(lr=1e-3)
    found = {"decay": decay, "decay125m": dataclasses.replace(decay, lr=6e-4)}
    for lr in ("1e-3", "2e-3", "3e-3"):
        found[f"decay-w150-lr{lr}"] = dataclasses.replace(decay, lr=float(lr), warmup=150)
    for lr in ("2.5e-4", "5e-4", "1e-3", "1.5e-3", "2e-3", "4e-3"):
        found[f"decay-lr{lr}"] = dataclasses.replace(decay, lr=float(lr))
        found[f"constant-lr{lr}"] = dataclasses.replace(decay, lr=float(lr), horizon=70_000, evaluations=50)
    for multiple in _MULTIPLES:
        found[f"decay-x{multiple:g}"] = dataclasses.replace(decay, steps=round(multiple * decay.steps))
    return found


PROTOCOLS: Mapping[str, Protocol] = types.MappingProxyType(_protocols())

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

_WITHOUT_MXFP4 = ("fp8", "bf16")
_WGRAD_ONLY = "only_"
_UNCLIPPED = Operand(rounding="stochastic", prescale=0.75)
_WGRAD_KINDS: Mapping[str, Gemm] = types.MappingProxyType(
    {
        "wgrad": Gemm(),
        "wgrad_hadamard": Gemm(rotation=Rotation(16)),
        "wgrad_rht": Gemm(rotation=Rotation(16, "redrawn")),
        "wgrad_sr": Gemm(Operand(rounding="stochastic"), Operand(rounding="stochastic")),
        "wgrad_sr34": Gemm(_UNCLIPPED, _UNCLIPPED),
    }
)


def policy_of(cell: Cell) -> Policy:
    """Returns the cell's policy with its scale rules.

    The names are those of `mxjax.policies()`, `wgrad_sr34` (stochastic rounding with a prescale of 3/4, which
    does not clip), and `only_KIND` for every kind of Wgrad: Wgrad in MXFP4, the other two GEMMs in FP8.
    """
    name = cell.policy.removeprefix(_WGRAD_ONLY)
    if name in _WGRAD_KINDS:
        rest = get_policy("fp8" if cell.policy.startswith(_WGRAD_ONLY) else "wgrad")
        policy = dataclasses.replace(rest, wgrad=_WGRAD_KINDS[name])
    else:
        policy = get_policy(cell.policy)
    if not cell.rules:
        return policy
    rules = cell.rules.split("-")
    return policy_with_rules(policy, rules * 3 if len(rules) == 1 else rules)


def policy_with_rules(policy: Policy, rules: Sequence[str]) -> Policy:
    """Replaces the scale rules of the MXFP4 operands of Fprop, Dgrad and Wgrad."""
    changed = (
        with_scale_rule(policy, cast(ScaleRule, rule)) if policy.has_mxfp4 else policy for rule in rules
    )
    gemms = zip(("fprop", "dgrad", "wgrad"), changed, strict=True)
    return dataclasses.replace(policy, **{name: getattr(p, name) for name, p in gemms})


def _ladder_cells(model: str, protocol: str, rules: tuple[str, ...], seeds: int) -> list[Cell]:
    cells = []
    for policy in LADDER:
        for rule in ("",) if policy in _WITHOUT_MXFP4 else rules:
            cells.append(Cell(policy, rule, model, protocol, seeds))
    return cells


def _rule_cells() -> list[Cell]:
    """Returns cells that vary Wgrad's rule with Fprop and Dgrad fixed."""
    cells = []
    for kind in _WGRAD_KINDS:
        for rule in ("floor", "even", "uos", "rceil", "ceil"):
            cells.append(Cell(kind, f"even-even-{rule}", "60m", "decay", 8))
            cells.append(Cell(_WGRAD_ONLY + kind, rule, "60m", "decay", 8))
    return cells


def _tuning(model: str, protocol: str, rates: tuple[str, ...], seeds: int) -> tuple[Cell, ...]:
    return tuple(Cell("fp8", "", model, f"{protocol}-lr{lr}", seeds) for lr in rates)


STUDIES: Mapping[str, tuple[Cell, ...]] = types.MappingProxyType(
    {
        # They choose each size's learning rate: the lowest loss, then the highest rate at which seeds agree.
        "tune-60m": _tuning("60m", "decay", ("1e-3", "1.5e-3", "2e-3", "5e-4", "4e-3"), 3),
        "tune-60m-warmup": _tuning("60m", "decay-w150", ("1e-3", "2e-3", "3e-3"), 3),
        "tune-125m": _tuning("125m", "decay", ("5e-4", "1e-3", "2.5e-4"), 2),
        "ladder-60m": (
            *_ladder_cells("60m", "decay", ("floor", "even"), 8),
            *(Cell("fp8", "", "60m", f"decay-x{m:g}", 8) for m in _MULTIPLES),
        ),
        "rules-60m": tuple(_rule_cells()),
    }
)
"""The studies and their cells, in the order of training."""
