"""A run's model at a checkpoint, in the precision of the run or in another."""

import dataclasses
import functools
import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tyro

from models import decoder
from models.attention.documents import Documents
from models.configs import DecoderConfig
from models.experts.layer import check_policies
from mxjax.numerics.scales import ScaleRule
from mxjax.products.implementations import Implementation, check_implementations
from training.config import Config, PrecisionConfig, parse_rules
from training.files import make_absolute
from training.log.metrics import best_step
from training.optimizer.delayed import without_histories
from training.phases import Phase, phase_at, phases_of, phases_of_run, with_scale_rule
from training.process.environment import start_jax
from training.process.start import program_name
from training.run.checkpoints import Checkpoints, Weights
from training.run.checksums import saved_steps
from training.run.frozen import restore_weights
from training.run.record import documents_of_run, from_json, model_of, read_run_config
from training.step import all_finite


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """A checkpoint of a run and its precision. A flag that is not given takes the run's value."""

    run: Annotated[pathlib.Path, tyro.conf.Positional]
    """The run's folder."""
    policy: str | None = None
    """Run the weights in this policy: a name, FILE.json or FILE.py:NAME. Default: the policies that the run
    had at the step of the checkpoint, with its --set, --scale-rule and --layers; others go without these."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Changes a field of --policy, as PATH=VALUE."""
    scale_rule: ScaleRule | None = None
    """Use this rule for MXFP4 scales instead of the policy's."""
    layers: tuple[str, ...] = ()
    """Exceptions by layer, as PATTERN=POLICY, besides those of the run unless --policy is given."""
    implementation: Implementation | None = None
    """Implementation of the GEMMs. Default: as in the run."""
    step: int | Literal["best"] | None = None
    """Take the checkpoint of this step, or best: where the --weights had the lowest evaluation loss. Default:
    the last."""
    weights: Weights | None = None
    """ema: the average of the parameters that --ema keeps, instead of them."""
    json: bool = False
    """Print the result as one line of JSON and nothing else."""

    def __post_init__(self):
        make_absolute(self)


class Restored(NamedTuple):
    """A run's configuration, and its model at a checkpoint."""

    config: Config
    model: DecoderConfig
    params: decoder.Params
    step: int | None
    phase: Phase
    implementation: Implementation | None
    documents: Documents | None = None


def restore(arguments: RunArguments) -> Restored:
    """Returns the model that the arguments name; a line says what --policy leaves out.

    Raises:
      ValueError: no such run, step or policy, the policy cannot run here, or the weights are not finite.
    """
    start_jax()
    saved = read_run_config(arguments.run)
    config, model, documents = from_json(saved["config"]), model_of(saved), documents_of_run(saved)
    implementation = arguments.implementation or config.precision.implementation
    phases = choose_phases(arguments, saved, config, model)
    phases = tuple(phase._replace(layers=without_histories(phase.layers)) for phase in phases)
    if (line := left_out(arguments, config)) is not None:
        print(f"{program_name()}: {line}", file=sys.stderr)
    for phase in phases:
        check_implementations(phase.layers.policies, implementation)
        check_policies(model, phase.layers, implementation)
    with Checkpoints(arguments.run / "checkpoints") as checkpoints:
        step = checkpoints.latest if arguments.step is None else arguments.step
        if step == "best":
            step = best_step(arguments.run, saved_steps(arguments.run / "checkpoints"), arguments.weights)
        params = restore_weights(arguments.run, config, model, checkpoints, step, arguments.weights)
        phase = phase_at(phases, step or 0)
    if not jax.jit(all_finite)(params):
        raise ValueError(
            f"the weights of step {step} in {arguments.run} hold NaN or infinity; name an earlier --step"
        )
    return Restored(config, model, params, step, phase, implementation, documents)


def describe(arguments: RunArguments, restored: Restored) -> dict[str, Any]:
    """Returns the run, step and policy for records, and the flags that change the policy if there are any.

    Without --policy these are the run's own too.
    """
    changes = _changes(arguments)
    if arguments.policy is None:
        own = _changes(restored.config.precision)
        changes = own | changes | {"layers": (*own.get("layers", ()), *arguments.layers)}
    changes = {name: value for name, value in changes.items() if value}
    weights = {} if arguments.weights is None else {"weights": arguments.weights}
    mask = getattr(arguments, "document_mask", None)
    found = {"run": str(arguments.run), "step": restored.step, "policy": restored.phase.policy}
    return found | weights | ({} if mask is None else {"document_mask": mask}) | changes


def in_words(described: Mapping[str, Any]) -> str:
    """Returns the policy of such a record and the flags that change it."""
    return " ".join([described["policy"], *_as_flags(described)])


def left_out(arguments: RunArguments, config: Config) -> str | None:
    """Returns a line that names the run's changes of its policy that another --policy does without."""
    given, own = _changes(arguments), _changes(config.precision)
    missing = {name: value for name, value in own.items() if name not in given}
    if arguments.policy is None or not missing:
        return None
    return f"without the run's {', '.join(_as_flags(missing))}; repeat them to keep them"


def _changes(flags: RunArguments | PrecisionConfig) -> dict[str, Any]:
    """Returns the values of the flags that change a policy, of those that are given."""
    values = {name: getattr(flags, name) for name in ("set", "scale_rule", "layers")}
    return {name: value for name, value in values.items() if value}


def _as_flags(changes: Mapping[str, Any]) -> list[str]:
    """Returns the changes as a command line has them."""
    found = [f"--set {shlex.quote(change)}" for change in changes.get("set", ())]
    found += [f"--scale-rule {changes['scale_rule']}"] if "scale_rule" in changes else []
    return found + ([f"--layers {shlex.join(changes['layers'])}"] if "layers" in changes else [])


def choose_phases(
    arguments: RunArguments, saved: Mapping[str, Any], config: Config, model: DecoderConfig
) -> tuple[Phase, ...]:
    """Returns the phases that the arguments name, or the run's own with the arguments' changes.

    The run's scale rule and exceptions by layer belong to its policy: another policy does without them.
    """
    layer_policies = functools.partial(decoder.layer_policies, model)
    rule = arguments.scale_rule
    if arguments.policy is not None:
        precision = PrecisionConfig(arguments.policy, rule, arguments.layers, arguments.set)
        return phases_of(precision, config.steps, layer_policies)
    if arguments.set:
        own = shlex.quote(str(config.precision.policy))
        raise ValueError(
            f"--set changes the fields of --policy: name the policy too, such as the run's: --policy {own}"
        )
    phases = phases_of_run(saved, config, layer_policies)
    rules = parse_rules(arguments.layers)
    phases = tuple(phase._replace(layers=phase.layers.with_rules(rules)) for phase in phases)
    return phases if rule is None else with_scale_rule(phases, rule)
