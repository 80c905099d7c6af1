"""The policies of a run as data in config.json, so that a run keeps its precision whatever names mean later.

`phases` names the policy of every layer from a step on by its text; `policies` holds each text's fields:

    "phases": [{"first_step": 1, "policy": "wgrad", "layers": {"head": "fprop bf16 x bf16 | ...", ...}}],
    "policies": {"fprop bf16 x bf16 | ...": {"fprop": {"lhs": {"format": "bf16", ...}, ...}, ...}}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.layers import LayerPolicies, Rules
from mxjax.policy import Policy
from mxjax.policy_json import policy_from_json, policy_to_json
from training.config import PrecisionConfig
from training.policy_schedule import Phase, phases_of


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


def changed_files(
    precision: PrecisionConfig,
    steps: int,
    phases: Sequence[Phase],
    layer_policies: Callable[[Policy, Rules], LayerPolicies],
) -> list[str]:
    """Returns a warning if files that --policy and --layers name hold other policies now than the record.

    Args:
      precision: the flags.
      steps: length of the run.
      phases: the phases on record, which the run keeps; files that are gone are not missed.
      layer_policies: see `training.policy_schedule.phases_of`.
    """
    if not (files := precision.files) or not all(file.exists() for file in files):
        return []
    try:
        now = phases_of(precision, steps, layer_policies)
    except ValueError as error:
        return [f"warning: {error}; the run keeps its policies on record"]
    if [phase.layers for phase in now] == [phase.layers for phase in phases]:
        return []
    return [
        f"warning: the files of --policy {precision.label} hold other policies than the run has on record, "
        "which it keeps; begin a new run, with --init, to change them"
    ]


def from_record(saved: Mapping[str, Any]) -> tuple[Phase, ...] | None:
    """Returns the phases in the values of config.json; None if it holds none, as an imported checkpoint's.

    Raises:
      ValueError: the phases are malformed.
    """
    if "phases" not in saved:
        return None
    try:
        policies = {text: policy_from_json(fields) for text, fields in saved["policies"].items()}
        if not saved["phases"] or saved["phases"][0]["first_step"] != 1:
            raise KeyError("phases")
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
