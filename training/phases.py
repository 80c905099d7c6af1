"""The phases of a run: policies that change with the step, `wgrad_hadamard; fp8 from 0.82`.

A phase is a range of steps that run in one policy. A change of phase touches no part of the training state:
it equals stopping after a step and resuming in the other policy. Policies are resolved here when a run
begins; from then on config.json holds them as data, so that a run keeps its precision whatever names mean
later. `phases` names the policy of every layer from a step on by its text; `policies` holds each text's
fields:

    "phases": [{"first_step": 1, "policy": "wgrad", "layers": {"head": "fprop bf16 x bf16 | ...", ...}}],
    "policies": {"fprop bf16 x bf16 | ...": {"fprop": {"lhs": {"format": "bf16", ...}, ...}, ...}}

The recipe of a whole run is a name that stands for flags.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mxjax.numerics.scales import ScaleRule
from mxjax.policy import Policy
from mxjax.policy.json import change_fields, policy_from_json, policy_to_json
from mxjax.policy.layers import LayerPolicies, Rules
from mxjax.recipes.whole_runs import RECIPES
from training.config import Config, PrecisionConfig
from training.files import MISSING, are_sums, problem, size_and_crc32
from training.flags.policy_source import check_sources, label, load_policy


def expand(config: Config) -> Config:
    """Returns the configuration with the flags of a recipe in place of its name."""
    precision = config.precision
    recipe = RECIPES.get(precision.policy.strip()) if isinstance(precision.policy, str) else None
    if recipe is None:
        return config
    begun = precision.layers[: len(recipe.layers)] == recipe.layers  # of a run to resume
    changed = dataclasses.replace(
        precision,
        policy=recipe.policy,
        layers=precision.layers if begun else (*recipe.layers, *precision.layers),
        deoscillate=precision.deoscillate or recipe.deoscillate,
    )
    return dataclasses.replace(config, precision=changed)


_LATER = re.compile(r"(\S.*?)\s+from\s+(\S+)")


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


def parse_schedule(
    policy: str | Policy, steps: int, changes: Sequence[str] = ()
) -> tuple[ScheduledPolicy, ...]:
    """Returns the policies of a schedule, in order.

    Args:
      policy: a policy; or `POLICY`, or `POLICY; POLICY from WHEN; ...`. POLICY is as `load_policy` takes it.
        WHEN is the first step in that policy, or, between 0 and 1, the share of the
        run that precedes it.
      changes: fields to change in every policy, as `mxjax.set_fields` takes them.
    Raises:
      ValueError: malformed text, an unknown policy or field, a change without an effect on any policy, or
        phases out of order or outside the run.
    """
    if isinstance(policy, Policy):
        return _changed([ScheduledPolicy(1, label(policy), check_sources(policy))], changes)
    text = policy
    try:
        schedule = tuple(
            ScheduledPolicy(step, name, load_policy(name)) for step, name in _phases_in(text, steps)
        )
    except ValueError as error:
        raise ValueError(f"--policy {text!r}: {error}") from None
    for before, after in itertools.pairwise(schedule):
        if not before.first_step < after.first_step <= steps:
            raise ValueError(
                f"--policy {text!r}: {after.name} begins at step {after.first_step}; with --steps {steps} it "
                f"must begin at one from {before.first_step + 1} to {steps}"
            )
    return _changed(schedule, changes)


def first_steps(policy: str | Policy, steps: int) -> list[int]:
    """Returns the first step of each part of a schedule, as `parse_schedule` takes it."""
    return [1] if isinstance(policy, Policy) else [step for step, _ in _phases_in(policy, steps)]


def phases_of(
    precision: PrecisionConfig, steps: int, layer_policies: Callable[[Policy, Rules], LayerPolicies]
) -> tuple[Phase, ...]:
    """Returns the phases of a run, each with the policy of every layer.

    Args:
      precision: the schedule; its exceptions by layer and its scale rule hold in every phase.
      layer_policies: returns the policy of every layer of the model, from a default and exceptions.
    Raises:
      ValueError: see `parse_schedule`; or a pattern matches no layer, or the scale rule has no effect.
    """
    rules, rule = precision.rules(), precision.scale_rule
    phases = [
        Phase(first_step, name, layer_policies(policy, rules))
        for first_step, name, policy in parse_schedule(precision.policy, steps, precision.set)
    ]
    return tuple(phases) if rule is None else with_scale_rule(phases, rule)


def with_scale_rule(phases: Sequence[Phase], rule: ScaleRule) -> tuple[Phase, ...]:
    """Returns the phases with `rule` for every operand in MXFP4.

    Raises:
      ValueError: unknown rule, or no operand of any phase is in MXFP4.
    """
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


def _phases_in(text: str, steps: int) -> list[tuple[int, str]]:
    first, *rest = (part.strip() for part in text.split(";"))
    if begins := _LATER.fullmatch(first):
        if "," in first:
            raise ValueError(f"{first!r}: policies of a schedule are separated by ';'")
        raise ValueError(f"the first policy begins at step 1; write {begins[1]!r} without 'from'")
    phases = [(1, first)]
    for part in rest:
        if (later := _LATER.fullmatch(part)) is None:
            raise ValueError(
                f"{part!r} is no later policy; write 'POLICY; POLICY from WHEN', "
                "e.g. 'wgrad_hadamard; fp8 from 0.82'"
            )
        phases.append((_first_step(later[2], steps), later[1]))
    return phases


def _changed(schedule: Sequence[ScheduledPolicy], changes: Sequence[str]) -> tuple[ScheduledPolicy, ...]:
    """Returns the schedule with fields of every policy changed; a change must have an effect on one.

    It does not reach the exceptions of `--layers`.
    """
    changed: list[ScheduledPolicy] = []
    idle: list[dict[str, str]] = []
    for part in schedule:
        try:
            policy, reasons = change_fields(part.policy, changes)
        except ValueError as error:
            raise ValueError(f"--set changes {part.name}: {error}") from None
        changed.append(part._replace(policy=policy))
        idle.append(reasons)
    for change in changes:
        if all(change in reasons for reasons in idle):
            raise ValueError(
                f"--set {change!r} has no effect: {idle[0][change]}; exceptions of --layers stay as they are"
            )
    return tuple(changed)


def _first_step(when: str, steps: int) -> int:
    if when.isdecimal() and int(when) >= 1:
        return int(when)
    if re.fullmatch(r"0?\.\d+", when) and float(when) > 0:
        return round(float(when) * steps) + 1
    raise ValueError(f"'from {when}' must be a step, 1 or more, or a share of the run between 0 and 1")


def to_record(phases: Sequence[Phase]) -> dict[str, Any]:
    """Returns the values `phases` and `policies` of config.json."""
    texts: dict[Policy, str] = {}
    for policy in (policy for phase in phases for policy in phase.layers.policies):
        if policy not in texts:
            text, others = str(policy), set(texts.values())
            while text in others:  # the text leaves out, for example, the seed of fixed signs
                text += "'"
            texts[policy] = text
    return {
        "phases": [
            phase._asdict() | {"layers": {name: texts[policy] for name, policy in phase.layers.items()}}
            for phase in phases
        ],
        "policies": {text: json.loads(policy_to_json(policy)) for policy, text in texts.items()},
    }


def files_of(precision: PrecisionConfig) -> dict[str, tuple[int, str]]:
    """Returns the size and CRC32 of each file that policies come from, by its path, for config.json."""
    return {str(path): size_and_crc32(path) for path in precision.files if path.is_file()}


def files_on_record(saved: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the checksums of `files_of` at the run's beginning; raises ValueError if they are malformed."""
    files = saved.get("policy_files", {})
    if not are_sums(files):
        raise ValueError(
            "config.json holds no policy_files of this version of mxjax; use the one that wrote it"
        )
    return files


def changed_files(recorded: Mapping[str, Any]) -> list[str]:
    """Returns a warning if a file of --policy or --layers is another than when the run began.

    It is compared and not read as a policy: it may be a Python file that a stranger's run names.

    Args:
      recorded: see `files_of`. Files that are gone are not missed.
    """
    problems = {name: problem(pathlib.Path(name), recorded[name]) for name in recorded}
    changed = [name for name, found in problems.items() if found not in (None, MISSING)]
    if not changed:
        return []
    return [
        f"warning: {', '.join(changed)} changed since the run began, which keeps its policies on record; "
        "begin a new run, with --init, to change them"
    ]


def phases_of_run(
    saved: Mapping[str, Any], config: Config, layer_policies: Callable[[Policy, Rules], LayerPolicies]
) -> tuple[Phase, ...]:
    """Returns the phases of a run to evaluate: those on record, or what an imported checkpoint names.

    Raises:
      ValueError: it names a file, which is not run: whoever made config.json may have made that too.
    """
    if (phases := from_record(saved)) is not None:
        return phases
    if config.precision.files:
        raise ValueError(
            f"config.json names {config.precision.files[0]} as a policy, and a file that a run names is not "
            "run; name it with --policy"
        )
    return phases_of(config.precision, config.steps, layer_policies)


def from_record(saved: Mapping[str, Any]) -> tuple[Phase, ...] | None:
    """Returns the phases in the values of config.json; None if it holds none, as an imported checkpoint's.

    Raises:
      ValueError: the phases are malformed, or a run that has begun has none.
    """
    if "phases" not in saved and "data" not in saved:
        return None
    try:
        policies = {text: policy_from_json(fields) for text, fields in saved["policies"].items()}
        steps = [phase["first_step"] for phase in saved["phases"]]
        if {*map(type, steps)} != {int} or steps[0] != 1 or steps != sorted(set(steps)):
            raise KeyError("first_step")
        if {type(phase["policy"]) for phase in saved["phases"]} != {str}:
            raise KeyError("policy")
        return tuple(
            Phase(
                phase["first_step"],
                phase["policy"],
                LayerPolicies(tuple(phase["layers"]), tuple(policies[t] for t in phase["layers"].values())),
            )
            for phase in saved["phases"]
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"config.json holds no policies of this version of mxjax ({type(error).__name__}: {error}); "
            "use the version that wrote it"
        ) from error
