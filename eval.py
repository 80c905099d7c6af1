"""Evaluates a run's checkpoint, in its own precision or another: `python eval.py RUN --policy=bf16`.

`python eval.py compare RUN [RUN ...]` compares the evaluations of several runs, `python eval.py diagnose RUN`
measures the errors of every GEMM of one.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from models import llama
from models.configs import LlamaConfig, from_dict
from mxjax.implementations import Implementation, check_implementations
from mxjax.scales import ScaleRule
from training.checkpoint.checkpoints import Checkpoints
from training.compare import CompareConfig, compare
from training.config import Config, PrecisionConfig, parse_rules
from training.data.load import load_data, load_held_out
from training.data.windows import evaluation_batches
from training.diagnosis.diagnose import diagnose
from training.diagnosis.plots import draw
from training.diagnosis.tables import summary
from training.environment import enable_compilation_cache, facts, input_errors
from training.extras import check_extra
from training.files import write_atomically
from training.metrics import evaluations, json_line
from training.policy_record import from_record
from training.policy_schedule import Phase, phase_at, phases_of, with_exceptions, with_scale_rule
from training.run_config import from_json, read_run_config
from training.step import evaluate, make_eval_step


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """An evaluation. A flag that is not given takes the run's value."""

    run: Annotated[pathlib.Path, tyro.conf.Positional]
    """The run's folder."""
    policy: str | None = None
    """Run the weights in this policy: a name, FILE.json or FILE.py:NAME. Default: the policies that the run
    had at the checkpoint's step."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Changes a field of --policy, as PATH=VALUE."""
    scale_rule: ScaleRule | None = None
    """Use this rule for MXFP4 scales instead of the policy's."""
    layers: tuple[str, ...] = ()
    """Exceptions by layer, as PATTERN=POLICY, besides those of the run unless --policy is given."""
    implementation: Implementation | None = None
    """Implementation of the GEMMs. Default: as in the run."""
    step: int | Literal["best"] | None = None
    """Evaluate the checkpoint of this step, or the best one by evaluation loss. Default: the last."""
    data: str | None = None
    """Evaluate on the validation part of this text or dataset PREFIX."""
    eval_data: str | None = None
    """Evaluate on all of this text or dataset PREFIX."""
    batches: int | None = None
    """Number of batches to read."""


@dataclasses.dataclass(frozen=True)
class DiagnoseConfig(EvalConfig):
    """A diagnosis of the errors of a model's GEMMs. A flag that is not given takes the run's value."""

    batches: int | None = 8
    """Number of batches, at least 3."""
    out: pathlib.Path | None = None
    """Also write diagnosis.json, heat maps by layer and histograms into this folder (extra plot)."""


class Restored(NamedTuple):
    """A run's model at a checkpoint, and the data to run it on."""

    model: LlamaConfig
    params: llama.Params
    step: int | None
    phase: Phase
    implementation: Implementation | None
    held_out: list[np.ndarray]


def main(arguments: EvalConfig) -> dict[str, float | str | int | None]:
    """Returns the run, step and policy, the mean loss over all tokens, and its perplexity."""
    enable_compilation_cache()
    with input_errors():
        model, params, step, phase, implementation, held_out = restore(arguments)

    def losses(params, batch, key):
        options = {"policies": phase.layers, "key": key, "implementation": implementation}
        return llama.losses(model, params, batch, **options)

    result = evaluate(make_eval_step(losses), params, held_out)
    return {"run": str(arguments.run), "step": step, "policy": phase.policy, **result}


def diagnose_run(arguments: DiagnoseConfig) -> dict[str, Any]:
    """Prints the diagnosis of a checkpoint and returns it; writes it and its plots with `out`."""
    enable_compilation_cache()
    with input_errors():
        if arguments.out is not None:
            check_extra("plot", "--out", "matplotlib")
        model, params, step, phase, implementation, batches = restore(arguments)
        found = diagnose(model, params, phase.layers, implementation, batches)
    described = {"run": str(arguments.run), "step": step, "policy": phase.policy}
    shape = {"batches": len(batches), "tokens": sum(batch[:, 1:].size for batch in batches)}
    found = described | shape | found | {"versions": facts()}
    print(summary(found))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.out / "diagnosis.json", json_line(found) + "\n")
        print("\n".join(str(path) for path in draw(found, arguments.out)))
    return found


def restore(arguments: EvalConfig) -> Restored:
    """Returns the model, parameters and data that the arguments name; raises ValueError for bad ones."""
    saved = read_run_config(arguments.run)
    config, model = from_json(saved["config"]), from_dict(saved["model"])
    implementation = arguments.implementation or config.precision.implementation
    phases = choose_phases(arguments, saved, config, model)
    for phase in phases:
        check_implementations(phase.layers.policies, implementation)
    n_batches = config.eval_batches if arguments.batches is None else arguments.batches
    if n_batches < 1:
        raise ValueError(f"--batches must be at least 1, got {n_batches}")
    n_sequences = config.eval_sequences if arguments.batches is None else None
    tokens = read_tokens(arguments, config, model.vocab_size)
    batches = evaluation_batches(tokens, config.data, n_batches, model.vocab_size, n_sequences=n_sequences)
    held_out = list(batches)
    eval_losses = evaluations(arguments.run)
    with Checkpoints(arguments.run / "checkpoints", losses=eval_losses) as checkpoints:
        step = checkpoints.latest if arguments.step is None else arguments.step
        if step == "best" and (step := checkpoints.best) is None:
            raise ValueError(f"--step best: {arguments.run} has no checkpoint at a step with an evaluation")
        params = checkpoints.restore_params(llama.abstract_params(model), step)
    return Restored(model, params, step, phase_at(phases, step or 0), implementation, held_out)


def choose_phases(
    arguments: EvalConfig, saved: Mapping[str, Any], config: Config, model: LlamaConfig
) -> tuple[Phase, ...]:
    """Returns the phases that the arguments name, or the run's own with the arguments' changes.

    The run's scale rule and exceptions by layer belong to its policy: another policy does without them.
    """
    layer_policies = functools.partial(llama.layer_policies, model)
    rule = arguments.scale_rule
    if arguments.policy is not None:
        precision = PrecisionConfig(arguments.policy, rule, arguments.layers, arguments.set)
        return phases_of(precision, config.steps, layer_policies)
    if arguments.set:
        raise ValueError("--set changes the fields of --policy: name the policy too")
    phases = from_record(saved) or phases_of(config.precision, config.steps, layer_policies)
    phases = tuple(with_exceptions(phase, parse_rules(arguments.layers)) for phase in phases)
    return phases if rule is None else with_scale_rule(phases, rule)


def read_tokens(arguments: EvalConfig, config: Config, vocab_size: int) -> np.ndarray:
    """Returns the tokens to evaluate on."""
    if arguments.data is not None and arguments.eval_data is not None:
        raise ValueError(
            "--data evaluates on the validation part and --eval-data on everything: give one of them"
        )
    if arguments.data is not None:
        return load_held_out(arguments.data, vocab_size, whole=False)
    if arguments.eval_data is not None:
        return load_held_out(arguments.eval_data, vocab_size, whole=True)
    return load_data(config.data, vocab_size).validation


def command(name: str, argv: list[str]) -> None:
    """Runs `eval.py compare` or `eval.py diagnose`, and prints its result as one line of JSON last."""
    if name == "compare":
        with input_errors():
            result = compare(tyro.cli(CompareConfig, args=argv, prog="eval.py compare"))
    else:
        result = diagnose_run(tyro.cli(DiagnoseConfig, args=argv, prog="eval.py diagnose"))
    print(json_line(result))


if __name__ == "__main__":
    if sys.argv[1:2] in (["compare"], ["diagnose"]):
        command(sys.argv[1], sys.argv[2:])
        sys.exit()
    result = main(tyro.cli(EvalConfig, description=__doc__))
    print(
        f"step {result['step']}  policy {result['policy']}  eval loss {result['eval_loss']:.4f}  "
        f"perplexity {result['eval_perplexity']:.3f}  over {result['eval_tokens']:,} tokens"
    )
    print(json_line(result))
