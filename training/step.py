"""The training step and the evaluation loop, for any functions from parameters and sequences to losses."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32

from models.sharding import constrain
from training.layer_amax import amax

Loss = Callable[[Any, Int32[Array, "batch length+1"], jax.Array], Float32[Array, ""]]
"""From parameters, sequences and a key to the mean cross-entropy of the tokens but each first, in nats."""
Losses = Callable[[Any, Int32[Array, "batch length+1"], jax.Array], Float32[Array, "batch length"]]
"""The same, not averaged."""


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
      step: how many have been taken, those skipped included.
      finite: whether every loss and gradient so far was, apart from those of steps skipped.
      skipped: how many steps have been.
    """

    step: Int32[Array, ""]
    params: Any
    opt_state: Any
    finite: Bool[Array, ""]
    skipped: Int32[Array, ""]


class StepMetrics(NamedTuple):
    """What a step reports; the loss is that of the parameters before it.

    Attributes:
      finite: whether the state has taken the step.
      skipped: how many steps before this one were.
      amax: the layers' largest absolute gradient, and parameter before the step, see `amax_names`; zeros if
        the step is finite.
    """

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    finite: Bool[Array, ""]
    skipped: Int32[Array, ""]
    amax: Float32[Array, "2 layers"]


def init_state(params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), jnp.array(True), jnp.zeros_like(zero))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    skip_nonfinite: bool = False,
    shardings: TrainState | None = None,
    compiler_options: dict[str, Any] | None = None,
):
    """Returns the jitted `step(state, batch, key) -> (state, metrics)`; the state is donated.

    With `accumulate` the batch is taken in so many parts, one after another, whose gradients are added: every
    token weighs the same.
    With `shardings` the state stays cut up as they say, and so are the gradients: `state_shardings` of
    `training.mesh` makes them.
    With `compiler_options` XLA is told so, see `compiler_options` of `training.mesh`.

    The random bits of a step are a function of the run's key and the step's number. Once a loss or gradient
    is not finite, the state stays as it was before that step, so that the step can be looked into. With
    skip_nonfinite only that step leaves parameters and optimizer as they were, and is counted.
    """

    def of_part(params, batch, key):
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        return value, grads if shardings is None else jax.lax.with_sharding_constraint(
            grads, shardings.params
        )

    def loss_and_grads(params, batch, key):
        if accumulate == 1:
            return of_part(params, batch, key)
        parts = batch.reshape(accumulate, batch.shape[0] // accumulate, batch.shape[1])
        parts = constrain(parts, None, "batch", None)

        def add(total, part):
            index, sequences = part
            found = of_part(params, sequences, jax.random.fold_in(key, index))
            return jax.tree.map(lambda t, f: t + f / accumulate, total, found), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zero, (jnp.arange(accumulate), parts))[0]

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=None if shardings is None else (shardings, shardings.finite),
        compiler_options=compiler_options,
    )
    def step(
        state: TrainState, batch: Int32[Array, "batch length"], key: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        value, grads = loss_and_grads(state.params, batch, key)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm) & state.finite
        params, amax_params = _amax_unless(finite, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        updated = (optax.apply_updates(params, updates), opt_state)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, (params, state.opt_state))
        taken = jnp.where(finite | skip_nonfinite, 1, 0)
        new = TrainState(
            state.step + taken,
            *kept,
            finite=finite | skip_nonfinite,
            skipped=state.skipped + jnp.where(finite, 0, taken),
        )
        largest = jnp.stack([jnp.where(finite, 0, amax(grads)), amax_params])
        return new, StepMetrics(value, grad_norm, finite, state.skipped, largest)

    return step


def _amax_unless(finite: Bool[Array, ""], params) -> tuple[Any, Float32[Array, " layers"]]:
    """Returns the parameters and their `amax`, zeros if `finite`: only where it is looked at, since another
    pass over all parameters takes time.

    It is made before the parameters that are returned can be overwritten, which else are copied.
    """
    largest = jax.lax.cond(
        finite,
        lambda tree: jnp.zeros_like(amax(tree)),
        lambda tree: amax(jax.lax.optimization_barrier(tree)),  # XLA makes cheap branches whatever `finite`
        params,
    )
    return jax.lax.optimization_barrier((params, largest))


def make_eval_step(losses: Losses):
    """Returns the jitted `eval_step(params, batch, key, weights) -> sum of the batch's token losses`.

    With `weights` [batch] every sequence's losses are multiplied by its own.
    """

    @jax.jit
    def eval_step(
        params, batch: Int32[Array, "batch length"], key: jax.Array, weights: Array | None = None
    ) -> Float32[Array, ""]:
        found = losses(params, batch, key)
        return jnp.sum(found if weights is None else found * weights[:, None])

    return eval_step


def evaluate(eval_step, params, batches: Iterable[Int32[np.ndarray, "batch length"]]) -> dict[str, float]:
    """Returns the mean loss over all tokens of all batches, its perplexity, and the number of tokens.

    Random bits, where a policy draws any, are the same at every evaluation.
    """
    total, tokens = 0.0, 0
    for i, batch in enumerate(batches):
        total += float(eval_step(params, batch, jax.random.fold_in(jax.random.key(0), i)))
        tokens += batch[:, 1:].size
    loss = total / tokens
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_tokens": tokens}
