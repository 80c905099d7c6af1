"""The training step and the evaluation, for any function from parameters and sequences to losses."""

import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32

from models.sharding import constrain


def largest_values(tree: Any) -> Float32[Array, " layers"]:
    """Returns the largest absolute value of each array; arrays under `blocks` give one value a layer."""
    parts = [_largest(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return jnp.concatenate(parts)


def layer_names(tree: Any, numbers: Mapping[str, Sequence[int]] = types.MappingProxyType({})) -> list[str]:
    """Returns the name of each of `largest_values`, such as blocks.0.mlp.down.

    `numbers` are from `models.block.block_numbers`.
    """
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(part.key) for part in path]
        if keys[0] == "blocks":
            of_stack = numbers.get(keys[1], range(leaf.shape[0]))
            names += [".".join(["blocks", str(i), *keys[1:]]) for i in of_stack]
        else:
            names.append(".".join(keys))
    return names


def _largest(path: Any, leaf: Array) -> Float32[Array, " layers"]:
    axes = tuple(range(1 if path[0].key == "blocks" else 0, leaf.ndim))
    return jnp.atleast_1d(jnp.max(jnp.abs(leaf), axis=axes)).astype(jnp.float32)


Loss = Callable[[Any, Int32[Array, "batch length+1"], jax.Array], Float32[Array, ""]]
"""Maps parameters, sequences and a key to the mean cross-entropy of all tokens but the first, in nats."""
Losses = Callable[[Any, Int32[Array, "batch length+1"], jax.Array], Float32[Array, "batch length"]]
"""Maps the same to the cross-entropy of each token."""


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
      step: number of steps taken, skipped ones included.
      finite: whether every loss, gradient and update so far was finite, apart from those of skipped steps.
      skipped: number of skipped steps.
      frozen: parameters that no step changes and no checkpoint holds, of a run with --lora; else None.
    """

    step: Int32[Array, ""]
    params: Any
    opt_state: Any
    finite: Bool[Array, ""]
    skipped: Int32[Array, ""]
    frozen: Any = None

    @property
    def weights(self) -> Any:
        """The parameters of losses: a pair with the frozen ones if there are any."""
        return self.params if self.frozen is None else (self.params, self.frozen)


class StepMetrics(NamedTuple):
    """The metrics of a step.

    Attributes:
      loss: mean loss before the update.
      grad_norm: global norm of the gradient, before clipping.
      finite: whether the state has been updated.
      skipped: number of steps skipped before this one.
      aux: the loss's second result, if it has one.
      largest: `largest_values` of the gradients and of the parameters before the step; zeros if the step is
        finite.
    """

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    finite: Bool[Array, ""]
    skipped: Int32[Array, ""]
    largest: Float32[Array, "2 layers"]
    aux: Any = None


def init_state(params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), jnp.array(True), jnp.zeros_like(zero))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    skip_nonfinite: bool = False,
    shardings: TrainState | None = None,
    compiler_options: dict[str, Any] | None = None,
    keeps_finite: Callable[[jax.Array], Bool[Array, ""]] | None = None,
    scales_of: Callable[[Any], Any] | None = None,
):
    """Returns the jitted `step(state, batch, key, learning_rate) -> (state, metrics)`; the state is donated.

    The random bits of a step are a function of the run's key and the step's number. Once a loss, a gradient
    or an updated parameter or moment is not finite, the state stays as it was before that step, so that the
    step can be examined.

    Args:
      optimizer: computes the update from the gradients, and from the learning rate, the step's key and the
        loss's `aux` if it takes them.
      has_aux: whether the loss returns a pair, whose second part has arrays to report, as in `jax.grad`.
      accumulate: number of parts of a batch that run one after another; their gradients are averaged.
      skip_nonfinite: skip only the steps that are not finite, and count them.
      shardings: shardings of the state and gradients, from `training.sharding`.
      compiler_options: options for XLA, from `training.sharding.compiler_options`.
      keeps_finite: returns, from the learning rate, whether gradients with a finite norm certainly keep a
        finite state finite. Otherwise, or without it, the updated state's elements are checked too, which
        reads parameters, moments and gradients once more.
      scales_of: returns, from the optimizer's state, a fourth argument of the loss. Its gradients, maxima
        over the parts of a batch, are `amax=` of the optimizer's update; see `training.optimizer.delayed`.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    loss_and_grads = functools.partial(_loss_and_grads, loss, has_aux, accumulate, shardings)

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=None if shardings is None else (shardings, shardings.finite),
        compiler_options=compiler_options,
    )
    def step(
        state: TrainState,
        batch: Int32[Array, "batch length"],
        key: jax.Array,
        learning_rate: Float32[Array, ""] | None = None,
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        scales = None if scales_of is None else scales_of(state.opt_state)
        (value, aux), grads, amax = loss_and_grads(state, batch, key, scales)
        # Else every pass that reads gradients stacks those of all layers, in kernels of 13,000 instructions.
        grads = jax.lax.optimization_barrier(grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm) & state.finite
        keeps = keeps_finite(learning_rate) if keeps_finite and learning_rate is not None else None
        extra = {"learning_rate": learning_rate, "key": key} | ({"aux": aux} if has_aux else {})
        if scales is not None:
            finite, extra = finite & all_finite(amax), extra | {"amax": amax}
        update = functools.partial(optimizer.update, **extra)
        kept, finite, largest = _update_if_finite(finite, keeps, state, update, grads)
        metrics = StepMetrics(value, grad_norm, finite, state.skipped, largest, aux)
        taken = jnp.where(finite | skip_nonfinite, 1, 0)
        skipped = state.skipped + jnp.where(finite, 0, taken)
        counted = {"step": state.step + taken, "finite": finite | skip_nonfinite, "skipped": skipped}
        return state._replace(params=kept[0], opt_state=kept[1], **counted), metrics

    return step


def _update_if_finite(
    finite: Bool[Array, ""], keeps: Bool[Array, ""] | None, state: TrainState, update_of: Callable, grads
):
    """Returns the updated parameters and optimizer's state, unless they or `finite` are not finite.

    Returns ((parameters, optimizer's state), updated or else as before; whether all is finite; `largest` of
    the step's metrics).

    Args:
      keeps: whether gradients with a finite norm make a finite update for certain; None if that is unknown.
      update_of: the optimizer's update of gradients, its state and parameters.
    """

    def update(params, opt_state):
        updates, opt_state = update_of(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def examine(old):
        old = jax.lax.optimization_barrier(old)  # or XLA examines even where it need not
        found = finite & all_finite(update(*old))
        return found, _largest_unless(found, (grads, old[0]))

    old = (state.params, state.opt_state)
    if keeps is None:
        finite, largest = examine(old)
    else:
        finite, largest = jax.lax.cond(
            finite & keeps, lambda _: (jnp.array(True), _no_largest(grads)), examine, old
        )
    # The barrier has `examine` read the state before it can be overwritten, else XLA copies it. And the
    # update is computed again: that is less memory traffic than to keep it until all is checked.
    old, finite, largest = jax.lax.optimization_barrier((old, finite, largest))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(*old), old), finite, largest


class ScheduledStep:
    """`step(state, batch, key)` with the learning rate for the number of updates made before it.

    A program of its own computes the rate, on the device.
    """

    def __init__(self, step: Any, learning_rate: optax.Schedule):
        self._step = step
        self._rate = jax.jit(lambda state_step, skipped: learning_rate(state_step - skipped))

    def __call__(self, state: TrainState, batch: Int32[Array | np.ndarray, "batch length"], key: jax.Array):
        return self._step(state, batch, key, self._rate(state.step, state.skipped))

    def lower(self, state: TrainState, batch: jax.ShapeDtypeStruct, key: jax.Array) -> jax.stages.Lowered:
        """Returns the lowered step; once it is compiled, calls find it so.

        Args:
          state, batch: shapes, dtypes and shardings of what the step will be called with.
          key: a key like those that it will be called with.
        """
        rate = self._rate.lower(state.step, state.skipped)
        shape, sharding = rate.out_info, rate.compile().output_shardings
        rate = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        return self._step.lower(state, batch, key, rate)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Returns whether no element of any array is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _loss_and_grads(
    loss: Loss,
    has_aux: bool,
    accumulate: int,
    shardings: TrainState | None,
    state: TrainState,
    batch: Int32[Array, "batch length"],
    key: jax.Array,
    scales: Any,
):
    """Returns ((value, aux), gradients, amax) of the state's parameters, in float32.

    The first three are means over `accumulate` parts of the batch; aux is None unless the loss has one. amax,
    maxima over the parts, is None without scales.
    """
    params = jax.tree.map(lambda w: w.astype(jnp.float32), state.params)  # if they are stored in less
    own = loss if state.frozen is None else lambda params, *rest: loss((params, state.frozen), *rest)

    def of_part(sequences, key):
        arguments, wanted = (params, sequences, key), 0
        if scales is not None:
            arguments, wanted = (*arguments, scales), (0, 3)
        found, grads = jax.value_and_grad(own, wanted, has_aux=has_aux)(*arguments)
        grads, amax = (grads, None) if scales is None else grads
        value = found if has_aux else (found, None)
        if shardings is not None:
            grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        return value, grads, amax

    if accumulate == 1:
        return of_part(batch, key)
    parts = batch.reshape(accumulate, batch.shape[0] // accumulate, batch.shape[1])
    parts = constrain(parts, None, "batch", None)

    def add(total, part):
        index, sequences = part
        *found, amax = of_part(sequences, jax.random.fold_in(key, index))
        means = jax.tree.map(lambda t, f: t + f / accumulate, total[:2], tuple(found))
        return (*means, jax.tree.map(jnp.maximum, total[2], amax)), None

    aux = jax.eval_shape(of_part, parts[0], key)[0][1] if has_aux else None
    aux = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
    zero = (jnp.zeros(()), aux), *(jax.tree.map(jnp.zeros_like, tree) for tree in (params, scales))
    return jax.lax.scan(add, zero, (jnp.arange(accumulate), parts))[0]


def _largest_unless(finite: Bool[Array, ""], trees: tuple[Any, Any]) -> Float32[Array, "2 layers"]:
    """Returns `largest_values` of both, or zeros if `finite`: a pass over all of them takes time."""

    def find(trees):
        trees = jax.lax.optimization_barrier(trees)  # or XLA runs both branches
        return jnp.stack([largest_values(tree) for tree in trees])

    return jax.lax.cond(finite, lambda trees: _no_largest(trees[0]), find, trees)


def _no_largest(tree: Any) -> Float32[Array, "2 layers"]:
    shape = jax.eval_shape(largest_values, tree).shape
    return jnp.zeros((2, *shape), jnp.float32)


def make_eval_step(losses: Losses, compiler_options: dict[str, Any] | None = None):
    """Returns the jitted `eval_step(params, batch, key, weights) -> sum of the batch's token losses`.

    `weights` [batch] multiply the losses of each sequence; None weighs all by 1. `compiler_options` are those
    of `make_train_step`.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def eval_step(
        params, batch: Int32[Array, "batch length"], key: jax.Array, weights: Array | None = None
    ) -> Float32[Array, ""]:
        found = losses(params, batch, key)
        return jnp.sum(found if weights is None else found * weights[:, None])

    return eval_step


def evaluate(eval_step, params, batches: Iterable[Int32[np.ndarray, "batch length"]]) -> dict[str, float]:
    """Returns the mean loss over all tokens of all batches, its perplexity, and the number of tokens.

    A policy that draws random bits draws the same ones in every evaluation.
    """
    sums, tokens = [], 0
    for i, batch in enumerate(batches):
        sums.append(eval_step(params, batch, jax.random.fold_in(jax.random.key(0), i)))
        tokens += batch[:, 1:].size
    total = sum(float(x) for x in jax.device_get(sums))  # fetched last, so that the device does not wait
    loss = total / tokens
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_tokens": tokens}
