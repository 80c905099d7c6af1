"""What a run says of itself to people, before its first step and after its last."""

import statistics
from collections.abc import Sequence

import jax

from models.sharding import batch_parts_of
from mxjax.implementations import choose_implementation
from training import memory
from training.mesh import make_mesh
from training.metrics import in_words
from training.progress import command_to_continue
from training.rates import gib, memory_limit
from training.schedule import Phase
from training.setup import Run
from training.step import TrainState


def introduction(run: Run, state: TrainState) -> str:
    """Returns what is worth knowing before the first step."""
    config, model = run.config, run.model
    tokens = config.steps * config.data.tokens_a_step
    return "\n".join(
        [
            f"model {config.model}: {model.n_params:,} parameters, "
            f"{model.flops_per_token(config.data.seq_len):,.0f} FLOPs/token",
            f"data {run.corpus.source}: {run.corpus.train_tokens:,} tokens, {tokens:,} to train on "
            f"({tokens / model.n_params:.1f}/parameter), unigram entropy {run.corpus.unigram_entropy():.4f}",
            *(line for phase in run.phases for line in phase_lines(phase)),
            f"run {run.folder} on {mesh_text(run.mesh)} {jax.devices()[0].device_kind}, "
            f"implementation {choose_implementation(config.precision.implementation)}",
            memory_estimate(run, state),
        ]
    )


def mesh_text(mesh: jax.sharding.Mesh) -> str:
    """Returns how many devices there are and what each axis of the mesh has of them."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} x ({axes})" if axes else "1 x"


def phase_lines(phase: Phase) -> list[str]:
    """Returns a phase's policy and what it is for each layer, in lines."""
    start = "" if phase.first_step == 1 else f" from step {phase.first_step}"
    return [f"policy {phase.policy}{start}:", *(f"  {line}" for line in str(phase.layers).splitlines())]


def memory_estimate(run: Run, state: TrainState) -> str:
    """Returns what a step takes on a device, its share of what there is, and what to do if it is too much."""
    config = run.config
    with jax.set_mesh(make_mesh(devices=jax.local_devices()[:1])):  # traces what one device has
        needed = memory.step_memory(
            run.model,
            run.phase.layers,
            state.params,
            state.opt_state,
            batch_size=config.data.batch_size,
            seq_len=config.data.seq_len,
            accumulate=config.accumulate,
            batch_shards=batch_parts_of(run.mesh.shape),
            tensor=run.mesh.shape["tensor"],
            remat=config.remat,
            implementation=config.precision.implementation,
        )
    text = f"memory a device, estimated with --remat {config.remat}: {needed}"
    limit = memory_limit(jax.local_devices()[0])
    if limit is None:
        return text
    text += f", {100 * needed.total / limit:.0f} % of {gib(limit)} GiB"
    if needed.total > limit:
        text += "\nwarning: that is more than there is: lower --batch-size, raise --accumulate, or choose "
        text += "--remat dots, fp4 or full"
    return text


def summary(
    run: Run, step: int, done: bool, evaluation: dict[str, float], step_times: Sequence[float]
) -> str:
    """Returns what is worth knowing after the last step taken.

    Args:
      step: that one's.
      done: nothing of the run remains.
      evaluation: the last; nothing if this start of the run made none, since it had nothing to do.
      step_times: in seconds, of this start.
    """
    config = run.config
    if not evaluation:
        reached = "has reached its last step or its target" if done else f"stands after step {step} already"
        return f"nothing left to do: the run in {run.folder} {reached}"
    what = "final" if done else f"stopped after step {step} of {config.steps}:"
    lines = [f"{what} {in_words(evaluation)} (unigram entropy {run.corpus.unigram_entropy():.4f})"]
    if step_times:
        lines.append(times_in_words(step_times, config.data.tokens_a_step))
    if not done:
        lines.append(f"continue with: {command_to_continue(run.folder)}")
    return "\n".join([*lines, f"evaluate it with: python eval.py {run.folder}"])


def times_in_words(step_times: Sequence[float], tokens_a_step: int) -> str:
    """Returns what steps took, in seconds; the first one compiles."""
    compiling, *later = step_times
    then = ""
    if later:
        median = statistics.median(later)
        then = f"then {median:.3f} s a step ({tokens_a_step / median:,.0f} tokens/s), "
    return f"first step after {compiling:.1f} s, {then}{sum(step_times):.1f} s in all"
