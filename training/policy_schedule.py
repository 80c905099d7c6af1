"""Policies that change with the step: `wgrad_hadamard; fp8 from 0.82`.

A phase is a range of steps that run in one policy. A change of phase touches no part of the training state:
it equals stopping after a step and resuming in the other policy. Policy names are resolved here, once.
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
    # The last part in higher precision heals. arXiv 2509.25149 switches after 8.2 of 10 trillion tokens.
    {"heal": "full_hadamard; fp8 from 0.82"}
)
"""Schedules by name."""
_LATER = re.compile(r"(\S+)\s+from\s+(\S+)")


class ScheduledPolicy(NamedTuple):
    """A policy and the first step that runs in it. Steps are counted from 1."""

    first_step: int
    name: str
    policy: Policy


class Phase(NamedTuple):
    """The policy of every layer from a step on; `policy` is the name on the command line."""

    first_step: int
    policy: str
    layers: LayerPolicies


def parse_schedule(text: str, steps: int) -> tuple[ScheduledPolicy, ...]:
    """Returns the policies of a schedule, in order.

    Args:
      text: `POLICY`, or `POLICY; POLICY from WHEN; ...`, or a name of SCHEDULES. WHEN is the first step in
        that policy, or, between 0 and 1, the share of the run that precedes it.
      steps: length of the run.
    Raises:
      ValueError: malformed text, an unknown policy, or phases out of order or outside the run.
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
        schedule = tuple(ScheduledPolicy(step, name, get_policy(name)) for step, name in phases)
    except ValueError as error:
        raise ValueError(
            f"--policy {text!r}: {error}; there is also the schedule {', '.join(SCHEDULES)}"
        ) from None
    for before, after in itertools.pairwise(schedule):
        if not before.first_step < after.first_step <= steps:
            raise ValueError(
                f"--policy {text!r}: {after.name} begins at step {after.first_step}; with --steps {steps} it "
                f"must begin at one from {before.first_step + 1} to {steps}"
            )
    return schedule


def phases_of(
    precision: PrecisionConfig, steps: int, layer_policies: Callable[[Policy, Rules], LayerPolicies]
) -> tuple[Phase, ...]:
    """Returns the phases of a run, each with the policy of every layer.

    Args:
      precision: the schedule; its exceptions by layer and its scale rule hold in every phase.
      steps: length of the run.
      layer_policies: returns the policy of every layer of the model, from a default and exceptions.
    Raises:
      ValueError: see `parse_schedule`; or a pattern matches no layer, or the scale rule has no effect.
    """
    rules, rule = precision.rules(), precision.scale_rule
    phases = [
        Phase(first_step, name, layer_policies(policy, rules))
        for first_step, name, policy in parse_schedule(precision.policy, steps)
    ]
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
    """Returns the phase of a step; step 0 belongs to the first."""
    return [phase for phase in phases if phase.first_step <= max(step, 1)][-1]


def _first_step(when: str, steps: int, text: str) -> int:
    if when.isdecimal() and int(when) >= 1:
        return int(when)
    if re.fullmatch(r"0?\.\d+", when) and float(when) > 0:
        return round(float(when) * steps) + 1
    raise ValueError(
        f"--policy {text!r}: 'from {when}' must be a step, 1 or more, or a share of the run between 0 and 1"
    )
