"""The printed report of a run: an introduction before the first step, a summary after the last."""

import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from models.config_file import context_length
from models.configs import DecoderConfig
from models.experts.traffic import traffic_text
from mxjax.products.implementations import choose_implementation
from mxjax.recipes import get_policy
from training.config import Config
from training.files import HUGGINGFACE
from training.log.metrics import in_words
from training.memory import Memory, gib, memory_limit
from training.optimizer.config import decay_steps
from training.optimizer.deoscillation import parse_deoscillation
from training.optimizer.schedule import learning_rate
from training.phases import Phase
from training.plan import Plan

OVERFITTED = 0.02
"""A run has overfitted if its last evaluation is this many nats above its lowest: 2 % more perplexity."""


def command_to_continue(folder: pathlib.Path) -> str:
    """Returns the command that continues the run in a folder."""
    return f"python train.py --out {shlex.quote(str(folder))} --resume"


def introduction(plan: Plan, folder: pathlib.Path, memory: Memory) -> str:
    """Returns the introduction: model, data, policies, devices and the memory of a step."""
    config, model = plan.config, plan.model
    tokens = config.steps * config.data.tokens_a_step
    epochs = tokens / plan.corpus.train_tokens
    repeated = f", {epochs:.1f} epochs" if epochs >= 1.05 else ""
    return "\n".join(
        [
            f"model {config.model_name}: {model.n_params:,} parameters, {active(model)}{vocabulary(plan)}"
            f"{model.flops_per_token(config.data.seq_len, config.lora is not None):,.0f} FLOPs/token",
            f"data {plan.corpus.source}: {plan.corpus.train_tokens:,} tokens, {tokens:,} to train on "
            f"({tokens / model.n_params:.1f}/parameter{repeated})",
            attention_text(plan),
            *(line for phase in plan.phases for line in phase_lines(phase)),
            f"run {folder} on {mesh_text(plan.mesh)} {jax.devices()[0].device_kind}, "
            f"implementation {choose_implementation(config.precision.implementation)}",
            memory_text(memory, config.remat),
            *traffic_text(model, plan.mesh.shape, config.data.tokens_a_step, config.expert_traffic),
            *idle_policies(plan.phases),
            *late_flags(config),
            *low_learning_rate(config),
            *flat_learning_rate(config),
            *long_sequences(config),
        ]
    )


def attention_text(plan: Plan) -> str:
    """Returns the line that says whether attention crosses documents."""
    if (documents := plan.documents) is None:
        return "attention over whole sequences, across documents"
    counted = ", where positions restart" if documents.restart_positions else ""
    return f"attention within documents, which end with token {documents.end}{counted}"


def idle_policies(phases: Sequence[Phase]) -> list[str]:
    """Returns warnings of policies that quantize nothing, such as those that --layers replaces everywhere."""
    plain = {"bf16": get_policy("bf16"), "fp32": get_policy("fp32")}
    return [
        f"warning: {phase.policy} quantizes no layer: --layers and --set leave none to it"
        for phase in phases
        if phase.policy not in plain and {*phase.layers.policies} <= {*plain.values()}
    ]


def late_flags(config: Config) -> list[str]:
    """Returns warnings of flags whose effect begins after the last step."""
    if (text := config.precision.deoscillate) is None:
        return []
    setting = parse_deoscillation(text)
    if setting.first_snap <= config.steps:
        return []
    return [
        f"warning: --deoscillate {text} has no effect with --steps {config.steps}: its START is "
        f"{setting.start}, and weights are first snapped after step {setting.first_snap}"
    ]


def low_learning_rate(config: Config) -> list[str]:
    """Returns a warning if the run ends before its warm-up, with the highest learning rate it reaches."""
    warmup, steps = config.optimizer.warmup_steps, config.steps
    if warmup < steps:
        return []
    highest = np.asarray(learning_rate(config.optimizer, steps, np)(steps - 1))
    return [
        f"warning: --warmup-steps {warmup} does not end within --steps {steps}: the highest learning rate is "
        f"{highest:.4g}, not --lr {config.optimizer.lr:g}"
    ]


def flat_learning_rate(config: Config) -> list[str]:
    """Returns a line if the cosine ends before the run, as in one that was extended."""
    optimizer = config.optimizer
    ends = optimizer.warmup_steps + decay_steps(optimizer, config.steps)
    if optimizer.schedule != "cosine" or ends >= config.steps:
        return []
    lowest = optimizer.lr * optimizer.min_lr_ratio
    return [f"the cosine ends at step {ends}; the learning rate then stays at {lowest:.4g}"]


def long_sequences(config: Config) -> list[str]:
    """Returns a warning if sequences are longer than the model's file names, if it still exists.

    The file is that of --model-config, or the one that was imported into --init.
    """
    imported = None if config.init is None else config.init / HUGGINGFACE / "config.json"
    path, length = config.model_config or imported, config.data.seq_len
    longest = None if path is None else context_length(path)
    if longest is None or length <= longest:
        return []
    return [
        f"warning: --seq-len {length} is longer than the max_position_embeddings of {longest} in {path}, "
        "which sets no limit here"
    ]


def active(model: DecoderConfig) -> str:
    """Returns the number of parameters that a token meets, in words, if experts make it less than all."""
    return "" if model.experts is None else f"{model.n_active_params:,} active, "


def vocabulary(plan: Plan) -> str:
    """Returns the filler of the vocabulary in words, if there is any."""
    own, filled = plan.model.vocab_size, plan.filled_vocab_size
    return "" if filled == own else f"vocabulary {own:,} filled up to {filled:,} for --mesh, "


def mesh_text(mesh: jax.sharding.Mesh) -> str:
    """Returns the number of devices and the mesh axes that share them."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} x ({axes})" if axes else "1 x"


def phase_lines(phase: Phase) -> list[str]:
    """Returns lines with a phase's policy and that of each layer."""
    start = "" if phase.first_step == 1 else f" from step {phase.first_step}"
    return [f"policy {phase.policy}{start}:", *(f"  {line}" for line in str(phase.layers).splitlines())]


def memory_text(needed: Memory, remat: str) -> str:
    """Returns the memory of a step on a device, its share of the total, and advice if it is too much."""
    text = f"memory a device, estimated with --remat {remat}: {needed}"
    limit = memory_limit(jax.local_devices()[0])
    if limit is None:
        return text
    text += f", {100 * needed.total / limit:.0f} % of {gib(limit)} GiB"
    if needed.total > limit:
        text += "\nwarning: that is more than there is: lower --batch-size, raise --accumulate, or choose "
        text += "--remat dots, fp4 or full; --plan finds what fits"
    return text


def summary(
    plan: Plan,
    folder: pathlib.Path,
    step: int,
    done: bool,
    evaluation: Mapping[str, Any],
    step_times: Sequence[float],
) -> str:
    """Returns the summary: the last evaluation, the speed, and the commands that come next.

    Args:
      step: the last step taken.
      done: the run is complete.
      evaluation: the last evaluation; empty if there was nothing left to do.
      step_times: seconds of each step since this start.
    """
    config = plan.config
    if not evaluation:
        reached = "has reached its last step or its target" if done else f"stands after step {step} already"
        return f"nothing left to do: the run in {folder} {reached}"
    what = "final" if done else f"stopped after step {step} of {config.steps}:"
    lines = [f"{what} {in_words(evaluation)}"]
    if step_times:
        lines.append(times_in_words(step_times, config.data.tokens_a_step))
    if not done:
        lines.append(f"continue with: {command_to_continue(folder)}")
    return "\n".join([*lines, f"evaluate it with: python eval.py {shlex.quote(str(folder))}"])


def overfitting(folder: pathlib.Path, losses: Mapping[int, float], last: int, best: int | None) -> list[str]:
    """Returns a line with the lowest evaluation if the last one is clearly above it.

    Args:
      losses: the loss of every evaluation, by step.
      best: the step of the checkpoint with the lowest loss; None without any.
    """
    lowest = min(losses, key=lambda step: losses[step])
    if losses[last] <= losses[lowest] + OVERFITTED:
        return []
    found = f"the lowest eval loss was {losses[lowest]:.4f}, after step {lowest}"
    command = f"python eval.py {shlex.quote(str(folder))} --step best"
    if best == lowest:
        return [f"{found}; evaluate that checkpoint with: {command}"]
    if best is None or losses[best] >= losses[last]:
        return [f"{found}; no checkpoint better than the last one was kept"]
    return [f"{found}; the best checkpoint is of step {best}, with {losses[best]:.4f}: {command}"]


def times_in_words(step_times: Sequence[float], tokens_a_step: int) -> str:
    """Returns the printed form of step times; the first step compiles."""
    compiling, *later = step_times
    if not later:
        return f"first step after {compiling:.1f} s"
    median = statistics.median(later)
    speed = f"{median:.3f} s a step ({tokens_a_step / median:,.0f} tokens/s)"
    return f"first step after {compiling:.1f} s, then {speed}; all steps took {sum(step_times):.1f} s"
