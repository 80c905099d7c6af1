"""Trains a Llama in the precision that a policy names: `python train.py --policy=wgrad_hadamard`."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import optax

from models import llama, memory
from models.configs import LlamaConfig, from_dict, get_config, to_dict
from mxjax.gemm import check_plans, choose_implementation
from mxjax.layers import LayerPolicies
from mxjax.probes import by_layer, empty_slots, make_layer_stats
from mxjax.remat import check_remat
from mxjax.training.amax import amax_names
from mxjax.training.checkpoint import CheckpointError, Checkpoints
from mxjax.training.config import (
    HUGGINGFACE,
    Config,
    check_resumable,
    from_json,
    parse,
    read_description,
    to_json,
)
from mxjax.training.damage import set_aside_damaged
from mxjax.training.data import Corpus, evaluation_batches, load_data
from mxjax.training.environment import disk_errors, enable_compilation_cache, facts, input_errors
from mxjax.training.interruption import Interrupted, Interruption
from mxjax.training.metrics import Display, MetricsLog, NonFiniteError, StepReporter, evaluations
from mxjax.training.mllog import MLPerfLog, settings
from mxjax.training.optimizer import learning_rate, make_optimizer
from mxjax.training.packed import PackedCorpus
from mxjax.training.profiling import StepTracer
from mxjax.training.rates import gib, memory_limit
from mxjax.training.schedule import Phase, phase_at, phases_of
from mxjax.training.step import (
    Loss,
    Losses,
    TrainState,
    evaluate,
    init_state,
    make_eval_step,
    make_train_step,
)
from mxjax.training.tensorboard import TensorBoardLog, check_installed
from mxjax.training.watch import Watch


class Run(NamedTuple):
    """What stays the same throughout a run, or a phase of it."""

    config: Config
    folder: pathlib.Path
    corpus: Corpus | PackedCorpus
    held_out: list[np.ndarray]
    model: LlamaConfig
    phases: tuple[Phase, ...]
    phase: Phase
    """The one that is running."""

    @property
    def policies(self) -> LayerPolicies:
        """The policy of every layer in this phase."""
        return self.phase.layers

    def at(self, step: int) -> "Run":
        """Returns the run in the phase of a step."""
        return self._replace(phase=phase_at(self.phases, step))


class Programs(NamedTuple):
    """What is compiled for the policies of a phase."""

    train_step: Callable
    eval_step: Callable
    layer_stats: Callable


def train(config: Config) -> dict[str, float]:
    """Trains, evaluates and checkpoints; returns the last evaluation.

    Raises:
      SystemExit: what the configuration asks for cannot be done, or SIGINT or SIGTERM has ended the run
        after a checkpoint; the message says so.
      NonFiniteError: a loss or gradient was NaN or infinite; the step's state and batch are saved.
      CheckpointError: a checkpoint could not be saved.
    """
    began = time.time()
    enable_compilation_cache()
    with Interruption() as interruption:
        with input_errors():
            run = set_up(config)
            stream = run.corpus.batches(config.data, config.seed, config.steps)
            damage = set_aside_damaged(run.folder / "checkpoints")
        with disk_errors(run.folder):
            write_description(run)  # before what takes long, so that a run killed there can be resumed
            return begin_or_continue(run, stream, interruption, began, damage)


def begin_or_continue(
    run: Run, stream: grain.DatasetIterator, interruption: Interruption, began: float, damage: list[str]
) -> dict[str, float]:
    """Opens what a run writes, trains from its newest checkpoint on, and returns the last evaluation."""
    config = run.config
    optimizer = make_optimizer(config.optimizer, config.steps)
    folder, eval_losses = run.folder / "checkpoints", evaluations(run.folder)
    with Checkpoints(folder, config.keep_checkpoints, eval_losses) as checkpoints:
        resumes = config.resume and checkpoints.latest is not None
        state = init_state(first_params(run, None if resumes else config.init), optimizer)
        if resumes:
            state, position = checkpoints.restore(state)
            if position is not None:
                stream.set_state(position)
        start = int(state.step)
        open_log = TensorBoardLog if config.observe.tensorboard else MetricsLog
        log = open_log(run.folder / "metrics.jsonl", keep_steps=start)
        display = Display(config.steps, start, config.log_every)
        tracer = StepTracer(config.observe.profiled_steps, run.folder / "profile")
        mllog, watch = open_mllog(run, start, began), make_watch(run, state, display)
        with log, display, tracer, mllog, watch:
            display.line("\n".join([introduction(run, state), *damage]))
            return loop(
                run, optimizer, state, stream, checkpoints, log, display, tracer, watch, mllog, interruption
            )


def loop(
    run: Run,
    optimizer,
    state: TrainState,
    stream: grain.DatasetIterator,
    checkpoints: Checkpoints,
    log: MetricsLog,
    display: Display,
    tracer: StepTracer,
    watch: Watch,
    mllog: MLPerfLog,
    interruption: Interruption,
) -> dict[str, float]:
    """Runs the steps that remain; returns the last evaluation."""
    config = run.config
    run = run.at(int(state.step) + 1)
    programs = make_programs(run, optimizer)
    tokens_a_step = config.data.batch_size * config.data.seq_len
    rate = learning_rate(config.optimizer, config.steps, np)  # on the host: the device would make it wait
    flops_a_step = tokens_a_step * run.model.flops_per_token(config.data.seq_len)
    reporter = StepReporter(log, display, watch, tokens_a_step, flops_a_step, rate)
    stop = config.last_step
    evaluation: dict[str, float] = {}
    step = int(state.step)
    owed = owes_evaluation(run, step)
    done = is_done(run, step)
    interrupted = False
    try:
        while owed or (not done and step < stop):
            if not owed:
                step += 1
                switches = step > 1 and step == run.at(step).phase.first_step
                if switches:
                    reporter.flush()
                    run = run.at(step)
                    programs = make_programs(run, optimizer)
                    log.write(step=step, policy=run.phase.policy)
                    display.line(
                        f"step {step:6d}  policy {run.phase.policy} from here on, which is compiled first"
                    )
                batch = next(stream)
                if (every := config.observe.stats_every) is not None and step % every == 0:
                    reporter.flush()
                    measures = by_layer(programs.layer_stats(state.params, batch, state.step))
                    log.write(step=step, policy=run.phase.policy, layers=measures)
                    reporter.restart_clock()
                state, metrics = tracer.run(step, programs.train_step, state, batch)
                if switches:
                    reporter.restart_clock()  # compiled by now
                reporter.step(step, metrics)
            checkpoints.check()
            if owed or step % config.eval_every == 0 or step == stop:
                reporter.flush()
                mllog.evaluation_starts(step * config.data.batch_size)
                try:
                    evaluation = evaluate(programs.eval_step, state.params, interruption.guard(run.held_out))
                except Interrupted:
                    interrupted = True
                else:
                    log.write(step=step, tokens=step * tokens_a_step, **evaluation)
                    display.line(f"step {step:6d}  {evaluation_text(evaluation)}")
                    check_finite(step, evaluation)
                    checkpoints.losses[step] = evaluation["eval_loss"]
                    done = is_done(run, step)
                    mllog.evaluation_ends(step * config.data.batch_size, evaluation["eval_loss"], last=done)
                owed = False
                reporter.restart_clock()
            interrupted = interrupted or interruption.requested()
            if step % config.checkpoint_every == 0 or step == stop or done or interrupted:
                reporter.flush()
                checkpoints.save(state, stream.get_state())
                reporter.restart_clock()
            if done:
                mllog.run_ends(step * config.data.batch_size, success=is_on_target(run, step))
            elif interrupted:
                checkpoints.wait()
                raise SystemExit(f"interrupted after step {step}; continue with: train.py {continuing(run)}")
    except NonFiniteError as error:
        mllog.run_ends(error.step * config.data.batch_size, success=False)
        evidence = save_evidence(run, error, state, watch)
        raise NonFiniteError(
            f"{error}, policy {run.at(error.step).phase.policy}. The last finite state and the step's batch "
            f"are in {evidence}; lower --lr, train in another --policy, or continue with {continuing(run)} "
            "--on-nonfinite skip",
            error.step,
        ) from None
    display.line(summary(run, evaluation, reporter.step_times))
    return evaluation


def owes_evaluation(run: Run, step: int) -> bool:
    """Returns whether the evaluation after a step is still to be made: the run was interrupted in it."""
    regular = step % run.config.eval_every == 0 or step == run.config.steps
    return step > 0 and regular and step not in evaluations(run.folder)


def make_watch(run: Run, state: TrainState, display: Display) -> Watch:
    """Returns what looks at the metrics of each step."""
    config = run.config

    def batch_of(step: int) -> tuple[np.ndarray, dict[str, list]]:
        arguments = config.data, config.seed, config.steps, step - 1
        return next(run.corpus.batches(*arguments)), run.corpus.batch_indices(*arguments)

    return Watch(
        run.folder,
        config.on_nonfinite == "skip",
        config.spike_factor,
        batch_of,
        amax_names(state.params),
        display.line,
        int(state.step),
    )


def is_on_target(run: Run, step: int) -> bool:
    """Returns whether the evaluation after a step reached the run's target; without a target it need not."""
    target = run.config.target_loss
    return target is None or evaluations(run.folder).get(step, math.inf) <= target


def is_done(run: Run, step: int) -> bool:
    """Returns whether nothing follows a step: it is the schedule's last, or the target is reached."""
    if owes_evaluation(run, step):
        return False
    return step >= run.config.steps or (run.config.target_loss is not None and is_on_target(run, step))


def check_finite(step: int, evaluation: dict[str, float]) -> None:
    """Raises NonFiniteError if an evaluation's loss is NaN or infinite."""
    if not math.isfinite(evaluation["eval_loss"]):
        raise NonFiniteError(f"eval loss {evaluation['eval_loss']} at step {step}", step)


def set_up(config: Config) -> Run:
    """Reads and checks all that a run needs, and opens its folder; ValueError before anything is computed."""
    folder = config.folder()
    if config.resume:
        check_same_run(config, folder)
    config, model = choose_model(config, folder)
    phases = phases_of(config.precision, config.steps, functools.partial(llama.layer_policies, model))
    for phase in phases:
        check_plans(phase.layers.policies, config.precision.implementation)
        check_remat(config.remat, phase.layers.policies, config.precision.implementation)
    if config.observe.tensorboard:
        check_installed()
    corpus = load_data(config.data, model.vocab_size)
    model = dataclasses.replace(model, vocab_size=corpus.vocab_size)
    n_batches, n_sequences = config.eval_batches, config.eval_sequences
    held_out = list(
        evaluation_batches(
            corpus.validation, config.data, n_batches, corpus.vocab_size, n_sequences=n_sequences
        )
    )
    run = Run(config, folder, corpus, held_out, model, phases, phases[0])
    mllog_settings(run)
    if config.resume:
        check_same_data(folder, corpus)
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty; add --resume to continue it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    if config.init is not None and (config.init / HUGGINGFACE).exists():
        shutil.copytree(config.init / HUGGINGFACE, folder / HUGGINGFACE, dirs_exist_ok=True)
    return run


def choose_model(config: Config, folder: pathlib.Path) -> tuple[Config, LlamaConfig]:
    """Returns the model: that of --init, of an imported run to continue, or else the one that --model names.

    Of the first two, the name and the vocabulary are put into the configuration that is returned; of the
    last, the data will say which vocabulary it has.
    """
    continues = config.resume and (folder / "config.json").exists()
    saved = read_description(folder) if continues else {}
    if config.init is None and "imported" not in saved:
        return config, get_config(config.model)
    source = folder if continues or config.init is None else config.init
    saved = read_description(source)
    model, name = from_dict(saved["model"]), saved["config"]["model"]
    if config.model not in (name, Config.model) or config.data.vocab_size not in (None, model.vocab_size):
        raise ValueError(
            f"{source} holds {name} with {model.vocab_size} tokens; leave out --model and --vocab-size"
        )
    if not continues and not any((source / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"{source} has no checkpoint to begin with")
    data = dataclasses.replace(config.data, vocab_size=model.vocab_size)
    return dataclasses.replace(config, model=name, data=data), model


def first_params(run: Run, init: pathlib.Path | None) -> llama.Params:
    """Returns the parameters to begin with: random ones, or the last of the run in `init`."""
    key = jax.random.fold_in(jax.random.key(run.config.seed), 2**32 - 1)  # the key of no step
    if init is None:
        return llama.init(run.model, key)
    with Checkpoints(init / "checkpoints") as checkpoints, input_errors():
        return checkpoints.restore_params(jax.eval_shape(lambda: llama.init(run.model, key)))


def mllog_settings(run: Run) -> dict[str, Any]:
    """Returns what MLPerf's log says of the run before it begins; nothing without --mllog."""
    if not run.config.mlperf.mllog:
        return {}
    sequences = sum(len(batch) for batch in run.held_out)
    layers = [layer for phase in run.phases for layer in phase.layers.items()]
    policies = LayerPolicies(*zip(*layers, strict=True))  # of all phases, for their lowest precision
    return settings(run.config, policies, sequences, jax.devices()[0].device_kind)


def open_mllog(run: Run, step: int, began: float) -> MLPerfLog:
    """Opens MLPerf's log of a run that goes on after `step`; one that writes nothing if it does not."""
    wanted = run.config.mlperf.mllog and not is_done(run, step)
    path = run.folder / "mllog.txt" if wanted else None
    return MLPerfLog(path, mllog_settings(run), step * run.config.data.batch_size, began)


def check_same_run(config: Config, folder: pathlib.Path) -> None:
    """Raises ValueError unless `folder` holds a run of this configuration, or an import not begun."""
    if not (folder / "config.json").exists():
        raise ValueError(f"--resume: {folder} holds no run; leave out --resume to start one there")
    saved = read_description(folder)
    if "data" in saved:
        check_resumable(config, from_json(saved["config"]), folder)


def check_same_data(folder: pathlib.Path, corpus: Corpus | PackedCorpus) -> None:
    """Raises ValueError if the run in `folder` began with other data."""
    began_with = read_description(folder).get("data", corpus.facts)
    if began_with != corpus.facts:
        raise ValueError(f"--resume: the data is {corpus.facts}, but the run began with {began_with}")


def make_losses(run: Run) -> tuple[Loss, Losses]:
    """Returns the model's mean loss, to train on, and the losses of all tokens, to evaluate."""
    config = run.config
    options = {
        "remat": config.remat,
        "unroll": config.unroll,
        "implementation": config.precision.implementation,
    }

    def of(function):
        return lambda params, batch, key, slots=None: function(
            run.model, params, batch, policies=run.policies, key=key, slots=slots, **options
        )

    return of(llama.mean_loss), of(llama.losses)


def make_programs(run: Run, optimizer: optax.GradientTransformation) -> Programs:
    """Returns the jitted functions of the running phase; each compiles when it is first called."""
    config = run.config
    loss, losses = make_losses(run)
    tokens_a_step = config.data.batch_size // config.accumulate * config.data.seq_len
    empty = empty_slots(llama.LINEAR_LAYERS, run.model.n_layers)
    return Programs(
        make_train_step(loss, optimizer, config.seed, config.accumulate, config.on_nonfinite == "skip"),
        make_eval_step(losses),
        make_layer_stats(loss, empty, config.seed, tokens_a_step),
    )


def write_description(run: Run) -> None:
    """Writes config.json: every resolved value, each layer's policy, the data's and the machine's facts."""
    description: dict[str, Any] = {
        "config": to_json(run.config),
        "model": to_dict(run.model),
        "phases": [
            phase._asdict() | {"layers": {name: str(policy) for name, policy in phase.layers.items()}}
            for phase in run.phases
        ],
        "data": run.corpus.facts,
        "implementation": choose_implementation(run.config.precision.implementation),
        "environment": facts(),
    }
    path = run.folder / "config.json"
    if path.exists() and "imported" in (before := read_description(run.folder)):
        description["imported"] = before["imported"]
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(description, indent=2) + "\n")
    partial.replace(path)


def introduction(run: Run, state: TrainState) -> str:
    """Returns what is worth knowing before the first step."""
    config, model = run.config, run.model
    tokens = config.steps * config.data.batch_size * config.data.seq_len
    return "\n".join(
        [
            f"model {config.model}: {model.n_params:,} parameters, "
            f"{model.flops_per_token(config.data.seq_len):,.0f} FLOPs/token",
            f"data {run.corpus.source}: {run.corpus.train_tokens:,} tokens, {tokens:,} to train on "
            f"({tokens / model.n_params:.1f}/parameter), unigram entropy {run.corpus.unigram_entropy():.4f}",
            *(line for phase in run.phases for line in phase_lines(phase)),
            f"run {run.folder} on {jax.devices()[0].device_kind}, "
            f"implementation {choose_implementation(config.precision.implementation)}",
            memory_estimate(run, state),
        ]
    )


def memory_estimate(run: Run, state: TrainState) -> str:
    """Returns what a step takes on a device, its share of what there is, and what to do if it is too much."""
    config = run.config
    needed = memory.step_memory(
        run.model,
        run.policies,
        state.params,
        state.opt_state,
        batch_size=config.data.batch_size,
        seq_len=config.data.seq_len,
        accumulate=config.accumulate,
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


def phase_lines(phase: Phase) -> list[str]:
    """Returns a phase's policy and what it is for each layer, in lines."""
    start = "" if phase.first_step == 1 else f" from step {phase.first_step}"
    return [f"policy {phase.policy}{start}:", *(f"  {line}" for line in str(phase.layers).splitlines())]


def summary(run: Run, evaluation: dict[str, float], step_times: list[float]) -> str:
    """Returns what is worth knowing after the last step."""
    if not step_times:
        return f"nothing left to do: the run in {run.folder} has reached its last step or its target"
    tokens = run.config.data.batch_size * run.config.data.seq_len
    return "\n".join(
        [
            f"final {evaluation_text(evaluation)} (unigram entropy {run.corpus.unigram_entropy():.4f})",
            f"first step after {step_times[0]:.1f} s, then {statistics.median(step_times):.3f} s a step "
            f"({tokens / statistics.median(step_times):,.0f} tokens/s), {sum(step_times):.1f} s in all",
            f"evaluate it with: python eval.py {run.folder}",
        ]
    )


def continuing(run: Run) -> str:
    """Returns the flags that continue a run."""
    return f"--out {run.folder} --resume"


def evaluation_text(evaluation: dict[str, float]) -> str:
    """Returns an evaluation in words."""
    return f"eval loss {evaluation['eval_loss']:.4f}  perplexity {evaluation['eval_perplexity']:.3f}"


def save_evidence(run: Run, error: NonFiniteError, state: TrainState, watch: Watch) -> pathlib.Path:
    """Saves what is needed to repeat a step that was not finite; returns the folder."""
    text = f"{error}\npolicy {run.at(error.step).phase.policy}"
    folder = watch.save_evidence(error.step, text, error.amax or {})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state._replace(finite=jax.numpy.array(True)), {"next_index": int(state.step)})
    return folder


if __name__ == "__main__":
    try:
        train(parse())
    except (NonFiniteError, CheckpointError) as error:
        sys.exit(f"train.py: error: {error}")
