"""Policies that change with the step: `wgrad_hadamard; fp8 from 0.82`.

A phase is the steps that run in one policy. A change of phase touches no part of the training state: it is
what stopping after a step and resuming in the other policy would be.
"""

import itertools
import re
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mxjax.layers import LayerPolicies, Rules
from mxjax.policy import Policy
from mxjax.recipes import get_policy
from training.config import PrecisionConfig

SCHEDULES: Mapping[str, str] = types.MappingProxyType(
    # The tail in higher precision heals; 0.82 is where arXiv 2509.25149 switches: 8.2 of 10 trillion tokens.
    {"heal": "full_hadamard; fp8 from 0.82"}
)
"""Schedules by name."""
_LATER = re.compile(r"(\S+)\s+from\s+(\S+)")


class Phase(NamedTuple):
    """The policies from a step on. Steps are counted from 1."""

    first_step: int
    policy: str
    layers: LayerPolicies


def parse_schedule(text: str, steps: int) -> tuple[tuple[int, str], ...]:
    """Returns the first step and the name of each policy that a schedule names, in order.

    Args:
      text: `POLICY`, or `POLICY; POLICY from WHEN; ...`, or a name of SCHEDULES. WHEN is the first step in
        that policy, or, if it lies between 0 and 1, the part of the run before it.
      steps: of the whole run.
    Raises:
      ValueError: text of another form, an unknown policy, or phases that are not in order or lie outside the
        run.
    """
    first, *rest = (part.strip() for part in SCHEDULES.get(text.strip(), text).split(";"))
    phases = [(1, first)]
    for part in rest:
        if (later := _LATER.fullmatch(part)) is None:
            raise ValueError(
                f"--policy {text!r}: {part!r} is no later policy; write 'POLICY; POLICY from WHEN', "
                "e.g. 'wgrad_hadamard; fp8 from 0.82'"
            )
        phases.append((_first_step(later[2], steps, text), later[1]))
    try:
        for _, name in phases:
            get_policy(name)
    except ValueError as error:
        raise ValueError(
            f"--policy {text!r}: {error}; there is also the schedule {', '.join(SCHEDULES)}"
        ) from None
    for (before, _), (after, name) in itertools.pairwise(phases):
        if not before < after <= steps:
            raise ValueError(
                f"--policy {text!r}: {name} begins at step {after}; of --steps {steps}, it must begin at one "
                f"from {before + 1} to {steps}"
            )
    return tuple(phases)


def phases_of(
    precision: PrecisionConfig, steps: int, layer_policies: Callable[[Policy, Rules], LayerPolicies]
) -> tuple[Phase, ...]:
    """Returns the phases of a run, each with the policy of every layer.

    Args:
      precision: its exceptions by layer hold in every phase; so does its scale rule, where there is MXFP4.
      steps: of the whole run.
      layer_policies: the model's layers in a policy, with exceptions.
    Raises:
      ValueError: as `parse_schedule`; or a pattern matches no layer, or the scale rule no operand.
    """
    phases, rule = [], precision.scale_rule
    for first_step, name in parse_schedule(precision.policy, steps):
        phases.append(Phase(first_step, name, layer_policies(get_policy(name), precision.rules())))
    if rule is None:
        return tuple(phases)
    has_mxfp4 = [any(policy.has_mxfp4 for policy in phase.layers.policies) for phase in phases]
    if not any(has_mxfp4):
        phases[0].layers.with_scale_rule(rule)  # raises
    return tuple(
        phase._replace(layers=phase.layers.with_scale_rule(rule)) if has else phase
        for phase, has in zip(phases, has_mxfp4, strict=True)
    )


def phase_at(phases: tuple[Phase, ...], step: int) -> Phase:
    """Returns the phase of a step; of step 0, before the first, it is the first."""
    return [phase for phase in phases if phase.first_step <= max(step, 1)][-1]


def _first_step(when: str, steps: int, text: str) -> int:
    if when.isdecimal() and int(when) >= 1:
        return int(when)
    if re.fullmatch(r"0?\.\d+", when) and float(when) > 0:
        return round(float(when) * steps) + 1
    raise ValueError(
        f"--policy {text!r}: 'from {when}' must be a step, 1 or more, or a part of the run between 0 and 1"
    )
