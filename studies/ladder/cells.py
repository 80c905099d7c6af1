"""Cells and protocols as plain data: policy, scale rules, model, protocol and seeds.

A cell's name has all of them: `wgrad_hadamard.floor.60m.decay` is the policy, the scale rule of all three
GEMMs (or `even-even-floor` for Fprop, Dgrad and Wgrad), the model and the protocol.
"""

import dataclasses
import functools
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from models.config_file import load_config
from models.configs import DecoderConfig, get_config, to_dict
from mxjax.numerics.operand import Operand
from mxjax.numerics.scales import ScaleRule
from mxjax.policy import OPERANDS, Policy, map_operands, with_scale_rule
from mxjax.policy.json import policy_to_json
from mxjax.recipes import get_policy
from mxjax.recipes.whole_runs import RECIPES, RunRecipe
from studies.ladder.kinds import BESIDE, KINDS
from training.config import parse_rules
from training.flags.policy_source import load_policy

Bits = Literal["fresh", "frozen", "third"]


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
      outlier_channels: channels whose activations begin OUTLIER_FACTOR times as large; see
        `studies.ladder.programs.with_outliers`.
      eps: AdamW's.
      bits: the random bits of stochastic rounding: "fresh" at every step, "frozen" (the same at every step),
        or "third" (the same in a random third of the steps), as a defective generator gives them.
      bfloat16_gradients: gradients are rounded to bfloat16 before clipping.
      optimizer, moments, master: as `train.py --optimizer`, `--moments` and `--master`.
    """

    lr: float
    steps: int = 700
    horizon: int | None = None
    warmup: int = 50
    batch: int = 64
    seq: int = 512
    evaluations: int = 20
    outlier_channels: int = 0
    eps: float = 1e-5
    bits: Bits = "fresh"
    bfloat16_gradients: bool = False
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    moments: Literal["float32", "bfloat16"] = "float32"
    master: Literal["float32", "bfloat16"] = "float32"

    @property
    def tokens(self) -> int:
        """Training tokens of a run."""
        return self.steps * self.batch * self.seq


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs that differ only in the seed.

    Attributes:
      rules: a scale rule, or one for each GEMM joined by "-", or "" for the policy's own.
      seeds, first: number of seeds, and the first of them.
      recipe, training: the recipe and the protocol that these names stand for in a study of a file.
      model_config: the file of the model, if it is none of models/configs.py.
    """

    policy: str
    rules: str
    model: str
    protocol: str
    seeds: int
    first: int = 0
    recipe: RunRecipe | None = None
    training: Protocol | None = None
    model_config: pathlib.Path | None = None

    @property
    def seed_numbers(self) -> range:
        """The seeds themselves."""
        return range(self.first, self.first + self.seeds)

    @property
    def name(self) -> str:
        """The cell's name, which begins the names of its files."""
        return f"{self.policy}.{self.rules or 'own'}.{self.model}.{self.protocol}"

    @property
    def label(self) -> str:
        """The policy and its scale rules, as tables name them."""
        return f"{self.policy} {self.rules}".strip()


BASELINE = "fp8"
MULTIPLES = (0.65, 0.8, 0.9, 1.1, 1.25, 1.5)
"""Lengths of further fp8 runs relative to a cell's: they convert a final loss to tokens.

0.65 is there because the first gaps, of 0.1 nats, may exceed what 0.8 loses.
"""
RATES: Mapping[str, float] = types.MappingProxyType(
    {"60m": 3e-3, "125m": 3e-3, "350m": 2e-3, "60m-constant": 2e-3}
)
"""Peak learning rate of each size, with a warm-up of 150 steps.

All are tuned, and the report compares them with its choice.
"""
_HARD = {
    "lr2x": {"lr": 2 * RATES["60m"]},
    "lr3x": {"lr": 3 * RATES["60m"]},
    "lr4x": {"lr": 4 * RATES["60m"]},
    "batch16": {"batch": 16, "steps": 2800, "warmup": 600},
    "seq2048": {"batch": 16, "seq": 2048},
    "outliers": {"outlier_channels": 8},
}

MUON_RATES = ("1.5e-3", "3e-3", "6e-3", "1.2e-2")
"""Peak learning rates of Muon, around AdamW's: its updates have the same root mean square."""
MUON_RATE = "3e-3"
"""The tuned one: fp8 has its lowest mean there."""
FRESH = "fresh-60m"
"""The protocol `tuned-60m` under another name, for seeds that no claim of the first part has seen."""
_FRESH = {
    "": {},
    "-frozen": {"bits": "frozen"},
    "-third": {"bits": "third"},
    "-eps1e-8": {"eps": 1e-8},
    "-eps2e-4": {"eps": 2e-4},  # three times the gradient's root mean square, as 1e-5 is at 8B
    "-bf16": {"bfloat16_gradients": True},
    "-lr2e-3": {"lr": 2e-3},
    "-lr4e-3": {"lr": 4e-3},
    "-moments": {"moments": "bfloat16"},
    "-states": {"moments": "bfloat16", "master": "bfloat16"},
    **{f"-muon-lr{rate}": {"optimizer": "muon", "lr": float(rate)} for rate in MUON_RATES},
}
LENGTHS: Mapping[str, int] = types.MappingProxyType({"length-60m": 1, "length-60m-x2": 2, "length-60m-x4": 4})
"""Protocols that differ from `tuned-60m` in steps, on data without repetition; see plans/length.md."""


def _protocols() -> dict[str, Protocol]:
    """Returns the protocols; an epoch is 715 steps of 64 x 512 tokens at a vocabulary of 16,384."""
    decay = Protocol(lr=1e-3)
    found = {"decay": decay}
    for lr in ("5e-4", "1e-3", "1.5e-3", "2e-3", "4e-3"):  # the first tuning, with a warm-up of 50 steps
        found[f"decay-lr{lr}"] = dataclasses.replace(decay, lr=float(lr))
    for lr in ("5e-4", "1e-3", "2e-3", "3e-3", "4e-3", "6e-3"):
        tuned = dataclasses.replace(decay, lr=float(lr), warmup=150)
        found[f"decay-w150-lr{lr}"] = tuned
        found[f"constant-w150-lr{lr}"] = _constant(tuned)
    for model in ("60m", "125m", "350m"):
        found[f"tuned-{model}"] = dataclasses.replace(decay, lr=RATES[model], warmup=150)
    tuned = found["tuned-60m"]
    for multiple in MULTIPLES:
        found[f"tuned-60m-x{multiple:g}"] = dataclasses.replace(tuned, steps=round(multiple * tuned.steps))
    for name, changes in _HARD.items():
        found[f"tuned-60m-{name}"] = dataclasses.replace(tuned, **changes)
    found["tuned-60m-4epochs"] = dataclasses.replace(tuned, steps=4 * tuned.steps)
    for name, multiple in LENGTHS.items():
        found[name] = dataclasses.replace(tuned, steps=multiple * tuned.steps)
    for name, changes in _FRESH.items():
        found[f"{FRESH}{name}"] = dataclasses.replace(tuned, **changes)
    found["moe-100m"] = tuned  # not tuned again: the products of a token are those of 60m
    found["tiny"] = Protocol(lr=4e-3, steps=60, warmup=10, batch=8, seq=64, evaluations=3)
    found["constant-60m"] = _constant(dataclasses.replace(tuned, lr=RATES["60m-constant"]))
    return found


def _constant(protocol: Protocol) -> Protocol:
    """Returns the protocol with a cosine whose end the run never nears, and evaluations in closer steps."""
    return dataclasses.replace(protocol, horizon=70_000, evaluations=50)


PROTOCOLS: Mapping[str, Protocol] = types.MappingProxyType(_protocols())
MAIN_PROTOCOLS = ("decay", "tuned-60m", "tuned-125m", "tuned-350m", "constant-60m", "tiny")
"""The protocols that are no variation of another one in rate, length, batch or model."""


def protocol_of(cell: Cell) -> Protocol:
    """Returns the cell's protocol."""
    return cell.training or PROTOCOLS[cell.protocol]


def model_of(cell: Cell) -> DecoderConfig:
    """Returns the shape of the cell's model."""
    return get_config(cell.model) if cell.model_config is None else load_config(cell.model_config)


WGRAD_ONLY = "only_"
UNIFORM = "e1m2_"


@functools.cache
def policy_of(cell: Cell) -> Policy:
    """Returns the cell's policy with its scale rules.

    The names are those of `mxjax.policies()` and of `studies.ladder.kinds`, `only_KIND` for every kind of
    Wgrad (Wgrad in MXFP4, the other two GEMMs in FP8), and `e1m2_NAME` for a policy of the ladder on a
    uniform grid instead of E2M1. The policy of a recipe of whole runs (`mxjax.recipes.whole_runs`) is that of
    its first steps, of layers without exceptions, and so is that of a study's own recipe.
    """
    if cell.recipe is not None:
        return load_policy(cell.recipe.policy.partition(";")[0].strip())
    if cell.policy in RECIPES:
        return get_policy(RECIPES[cell.policy].policy.partition(";")[0])
    if cell.policy.startswith(UNIFORM):
        like = dataclasses.replace(cell, policy=cell.policy.removeprefix(UNIFORM))
        return map_operands(policy_of(like), _on_uniform_grid)
    name = cell.policy.removeprefix(WGRAD_ONLY)
    if name in KINDS:
        rest = get_policy("fp8" if cell.policy.startswith(WGRAD_ONLY) else "wgrad")
        policy = dataclasses.replace(rest, wgrad=KINDS[name])
    elif name in BESIDE:
        policy = Policy(BESIDE[name], BESIDE[name], KINDS["wgrad_hadamard"])
    else:
        policy = get_policy(cell.policy)
    if not cell.rules:
        return policy
    rules = cell.rules.split("-")
    return policy_with_rules(policy, rules * 3 if len(rules) == 1 else rules)


def recipe_of(cell: Cell) -> RunRecipe | None:
    """Returns the study's own recipe of the cell, or that of whole runs that its policy names, or None.

    What begins late in a published run of known length begins at the same part of this one; periods and
    windows keep their steps.
    """
    if cell.recipe is not None:
        return cell.recipe
    recipe, steps = RECIPES.get(cell.policy), protocol_of(cell).steps
    if recipe is None or recipe.steps is None or recipe.deoscillate is None:
        return recipe
    ratio, period, start, *window = recipe.deoscillate.split(":")
    start = str(round(int(start) * steps / recipe.steps))
    return recipe._replace(deoscillate=":".join([ratio, period, start, *window]), steps=steps)


def own_parts(cell: Cell) -> dict[str, Any]:
    """Returns, for the record of a run, what the files of a study of one's own hold of a cell now.

    "recipe" has the fields of every policy, "shape" the model's. A cell without them has neither.
    """
    found: dict[str, Any] = {}
    if (recipe := cell.recipe) is not None:
        parts = [part.partition(" from ") for part in recipe.policy.split(";")]
        found["recipe"] = {
            "policies": [[when.strip(), _fields(load_policy(text.strip()))] for text, _, when in parts],
            "layers": [[pattern, _fields(policy)] for pattern, policy in parse_rules(recipe.layers)],
            "deoscillate": recipe.deoscillate,
        }
    if cell.model_config is not None:
        found["shape"] = json.loads(json.dumps(to_dict(model_of(cell))))
    return found


def _fields(policy: Policy) -> dict[str, Any]:
    return json.loads(policy_to_json(policy))


def _on_uniform_grid(operand: Operand) -> Operand:
    return dataclasses.replace(operand, format="mxfp4_e1m2") if operand.format == "mxfp4" else operand


def policy_with_rules(policy: Policy, rules: Sequence[str]) -> Policy:
    """Replaces the scale rules of the MXFP4 operands of Fprop, Dgrad and Wgrad."""
    changed = (
        with_scale_rule(policy, cast(ScaleRule, rule)) if policy.has_mxfp4 else policy for rule in rules
    )
    gemms = zip(OPERANDS, changed, strict=True)
    return dataclasses.replace(policy, **{name: getattr(p, name) for name, p in gemms})
