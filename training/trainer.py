"""The computation of a run: its state, the programs of each phase, evaluations, memory. Knows no folder."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import decoder, lora
from models.attention.context import fewest_sequences
from models.attention.documents import Documents
from models.block import block_numbers
from models.configs import DecoderConfig
from models.decoder import Params
from models.experts.layer import routing_by_layer
from models.gemms import linear_layers, linear_weights
from mxjax.policy.layers import LayerPolicies
from mxjax.recipes import get_policy
from mxjax.runtime.devices import on_gpu
from mxjax.stats.layers import by_layer, empty_slots, make_layer_stats
from training.config import Config
from training.memory import Memory, step_memory
from training.optimizer.average import average_of
from training.optimizer.bfloat16 import as_float32
from training.optimizer.delayed import has_scales, is_delayed, scales_of, with_histories, without_histories
from training.optimizer.muon import working_bytes
from training.optimizer.optimizers import keeps_finite, optimizer_of
from training.optimizer.schedule import learning_rate
from training.phases import Phase, phase_at
from training.plan import Plan
from training.run.frozen import frozen_shapes
from training.sharding import (
    abstract_batch,
    abstract_state,
    compiler_options,
    first_state,
    make_mesh,
    on_mesh,
    resize,
)
from training.step import (
    Loss,
    Losses,
    ScheduledStep,
    StepMetrics,
    TrainState,
    evaluate,
    make_eval_step,
    make_train_step,
)


class Trainer:
    """The optimizer, shardings and programs of a plan."""

    def __init__(self, plan: Plan):
        """Traces the state's shapes; nothing is computed."""
        self._plan = plan
        self._fill = functools.partial(as_stored, config=plan.config, size=plan.filled_vocab_size)
        self._key = jax.random.key(plan.config.seed)
        self._optimizer = optimizer_of_phase(plan.config, plan.model, plan.phases, plan.phases[0])
        self._shapes = abstract_state(plan.model, self._optimizer, plan.mesh, self._fill)
        self._made: tuple[Phase, Programs] | None = None
        self._compiling: threading.Thread | None = None

    def memory(self, step: int) -> Memory:
        """Returns an estimate of the memory that a step takes on a device, in the policies of that step."""
        plan, config = self._plan, self._plan.config
        layers = phase_at(plan.phases, step).layers
        shapes = self._shapes._replace(frozen=frozen_shapes(config))
        return memory_of_run(config, plan.model, layers, shapes, plan.mesh.shape, plan.documents)

    def init(self) -> TrainState:
        """Returns the state before the first step, with random parameters."""
        plan = self._plan
        key = jax.random.fold_in(self._key, 2**32 - 1)  # no step has this key
        return first_state(plan.model, self._optimizer, plan.mesh, key, self._fill)[0]

    def start_compiling(self) -> None:
        """Lowers the first phase's step and compiles it in a thread, which `compile` waits for.

        Tracing and lowering hold Python's lock, so that nothing runs beside them; XLA's compilation does not.
        An error is not raised here: the first step meets it again. Of several processes' programs only the
        kernels are compiled; XLA compiles together at the first step.
        """
        if not on_gpu():  # where XLA would take the cores of what runs beside it
            return
        data = self._plan.config.data
        batch = abstract_batch(self._plan.mesh, data.batch_size, data.seq_len + 1)
        try:
            programs = self._programs_of(phase_at(self._plan.phases, 1))
            lowered = programs.train_step.lower(self._shapes, batch, self._key)
        except Exception:
            return
        if jax.process_count() > 1:
            return

        def compile_step():
            with contextlib.suppress(Exception):
                lowered.compile()

        self._compiling = threading.Thread(target=compile_step)
        self._compiling.start()

    def compile(self, phase: Phase) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
        """Returns the step in the policies of a phase; it compiles at its first call, unless it is compiled.

        `measure` and `evaluate` take the same policies from then on.
        """
        if self._compiling is not None:
            self._compiling.join()
            self._compiling = None
        programs = self._programs_of(phase)
        return lambda state, batch: programs.train_step(state, batch, self._key)

    def measure(self, state: TrainState, batch: jax.Array) -> dict[str, Any]:
        """Returns the error of each layer's GEMMs in a step, and what its routers do."""
        if self._plan.mesh.shape["context"] > 1:
            batch = batch[: shared_by_mesh(self._plan)[0]]  # devices may be unable to share a few more
        found = by_layer(self._programs.layer_stats(state.weights, batch, state.step))
        if self._plan.model.experts is None:
            return found
        found = {name: found[name] for name in measured_layers(self._plan.model)}
        model, key = self._plan.model, jax.random.fold_in(self._key, state.step)
        routed = block_numbers(model).get("mlp", range(model.n_layers))
        return found | routing_by_layer(self._programs.routing(state.weights, batch, key), routed)

    def evaluate(self, state: TrainState, batches: Iterable[np.ndarray]) -> dict[str, float]:
        """Returns the loss over the batches, its perplexity, the number of tokens, and the average's loss."""
        batches, again = itertools.tee(batches)
        found = evaluate(self._programs.eval_step, state.weights, batches)
        if (average := average_of(state.opt_state)) is None:
            return found
        averaged = evaluate(self._programs.eval_step, state._replace(params=average).weights, again)
        return found | {"ema_eval_loss": averaged["eval_loss"]}

    @property
    def _programs(self) -> "Programs":
        assert self._made is not None, "compile a phase first"
        return self._made[1]

    def _programs_of(self, phase: Phase) -> "Programs":
        if self._made is None or self._made[0] != phase:
            shardings = jax.tree.map(attrgetter("sharding"), self._shapes)
            plan = self._plan
            optimizer = optimizer_of_phase(plan.config, plan.model, plan.phases, phase)
            self._made = phase, make_programs(plan, phase, optimizer, shardings)
        return self._made[1]


def optimizer_of_phase(
    config: Config, model: DecoderConfig, phases: Sequence[Phase], phase: Phase
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer in one of a run's phases; its state is the same in all."""
    optimizer = optimizer_of(config.optimizer, model, config.precision.deoscillate, phase.layers)
    return with_histories(optimizer, model, [each.layers for each in phases], phase.layers)


def as_stored(params: Params, *, config: Config, size: int) -> Params:
    """Returns parameters as a state has them: in the dtype of --master, with a filled vocabulary.

    With --lora they are the adapters of these parameters.
    """
    if config.lora is not None:
        key = jax.random.fold_in(jax.random.key(config.seed), 2**32 - 1)  # as in `init`
        params = lora.adapters(linear_weights(params["blocks"]), config.lora, key)
    return jax.tree.map(lambda w: w.astype(jnp.dtype(config.optimizer.master)), resize(params, size))


class Programs(NamedTuple):
    """The programs for the policies of one phase; each compiles at its first call or ahead."""

    train_step: ScheduledStep
    eval_step: Callable
    layer_stats: Callable
    routing: Callable


def make_programs(
    plan: Plan, phase: Phase, optimizer: optax.GradientTransformation, shardings: TrainState
) -> Programs:
    """Returns the programs of a phase."""
    config = plan.config
    loss, losses = make_losses(plan, phase)
    tokens_a_part = config.data.batch_size // config.accumulate * config.data.seq_len
    names = dict.fromkeys(name.split(".", 2)[2] for name in measured_layers(plan.model))
    empty = empty_slots([*names], plan.model.n_layers)
    options_for = functools.partial(
        compiler_options, plan.mesh, implementation=config.precision.implementation
    )
    xla_options = options_for(phase.layers.policies)
    measured = _with_options(plan, phase, decoder.measured_loss, z_loss=config.optimizer.z_loss)
    has_aux = plan.model.experts is not None or config.optimizer.z_loss > 0
    train_step = make_train_step(
        measured if has_aux else loss,
        optimizer,
        has_aux=has_aux,
        accumulate=config.accumulate,
        skip_nonfinite=config.on_nonfinite == "skip",
        shardings=shardings,
        compiler_options=xla_options,
        keeps_finite=None if config.precision.deoscillate else keeps_finite(config.optimizer),
        scales_of=functools.partial(scales_of, model=plan.model) if is_delayed(phase.layers) else None,
    )
    return Programs(
        ScheduledStep(train_step, learning_rate(config.optimizer, config.steps)),
        on_mesh(plan.mesh, make_eval_step(losses, xla_options)),
        make_layer_stats(
            loss,
            empty,
            config.seed,
            tokens_a_part,
            *shared_by_mesh(plan),
            options_for((*phase.layers.policies, get_policy("fp32"))),
        ),
        jax.jit(lambda *arguments: measured(*arguments)[1].routing, compiler_options=xla_options),
    )


def measured_layers(model: DecoderConfig) -> list[str]:
    """Returns the names of the linear layers, without those of experts and routers."""
    return [f"blocks.{i}.{name}" for i in range(model.n_layers) for name in linear_layers(model.block(i))]


def shared_by_mesh(plan: Plan) -> tuple[int, int]:
    """Returns `fewest_sequences` of a part of a batch."""
    data = plan.config.data
    sequences = data.batch_size // plan.config.accumulate
    return fewest_sequences(plan.mesh.shape, sequences, data.seq_len)


def make_losses(plan: Plan, phase: Phase) -> tuple[Loss, Losses]:
    """Returns the model's mean loss, for training, and its loss of every token, for evaluation."""
    mean = _with_options(plan, phase, decoder.mean_loss, z_loss=plan.config.optimizer.z_loss)
    return mean, _with_options(plan, phase, decoder.losses)


def _with_options(plan: Plan, phase: Phase, function: Callable, **options: Any) -> Callable:
    """Returns `function` of parameters, sequences, a key and slots, in the phase's policies.

    Without delayed scales among the slots, tensors have their own scales.
    """
    config = plan.config
    options |= {
        "remat": config.remat,
        "unroll": config.unroll,
        "implementation": config.precision.implementation,
        "documents": plan.documents,
        "traffic": config.expert_traffic,
    }
    whole = as_float32 if config.lora is None else lambda params: lora.attach(*params)

    def run(params, batch, key, slots=None):
        layers = phase.layers if has_scales(slots) else without_histories(phase.layers)
        return function(plan.model, whole(params), batch, key=key, slots=slots, policies=layers, **options)

    return run


def memory_of_run(
    config: Config,
    model: DecoderConfig,
    policies: LayerPolicies,
    shapes: TrainState,
    mesh: Mapping[str, int],
    documents: Documents | None,
) -> Memory:
    """Returns the memory of a step on each device for a run's configuration and the shapes of its state.

    Args:
      mesh: the size of each mesh axis, which need not be that of the configuration.
    """
    muon = config.optimizer.optimizer == "muon"
    with jax.set_mesh(make_mesh(devices=jax.local_devices()[:1])):  # traces one device's share
        return step_memory(
            model,
            without_histories(policies),  # which keep as many bytes
            shapes.params,
            shapes.opt_state,
            frozen=shapes.frozen,
            batch_size=config.data.batch_size,
            seq_len=config.data.seq_len,
            accumulate=config.accumulate,
            mesh=mesh,
            remat=config.remat,
            implementation=config.precision.implementation,
            documents=documents,
            update=working_bytes(shapes.params) if muon else 0,
        )
