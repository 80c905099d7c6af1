"""The training step and the evaluation loop, for any function from parameters and tokens to logits."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, Int32

Logits = Callable[[Any, Int32[Array, "batch length"], jax.Array], Float32[Array, "batch length vocab"]]


class TrainState(NamedTuple):
    """Everything that a step changes. `finite` is whether every loss and gradient so far was."""

    step: Int32[Array, ""]
    params: Any
    opt_state: Any
    finite: Bool[Array, ""]


class StepMetrics(NamedTuple):
    """What a step reports; the loss is that of the parameters before it."""

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    finite: Bool[Array, ""]


def init_state(params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.array(True))


def token_losses(
    logits: Float32[Array, "batch length vocab"], targets: Int32[Array, "batch length"]
) -> Float32[Array, "batch length"]:
    """Returns the cross-entropy of each token in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def make_train_step(logits: Logits, optimizer: optax.GradientTransformation, seed: int):
    """Returns the jitted `step(state, batch) -> (state, metrics)`; the state is donated.

    The random bits of a step are a function of the seed and the step's number. Once a loss or gradient
    is not finite, the state stays as it was before that step, so that the step can be looked into.
    """

    def loss(params, batch, key):
        return jnp.mean(token_losses(logits(params, batch[:, :-1], key), batch[:, 1:]))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Int32[Array, "batch length"]) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = state.finite & jnp.isfinite(value) & jnp.isfinite(grad_norm)
        new = (state.step + 1, params, opt_state)
        new = jax.tree.map(lambda n, old: jnp.where(finite, n, old), new, tuple(state[:3]))
        return TrainState(*new, finite=finite), StepMetrics(value, grad_norm, finite)

    return step


def make_eval_step(logits: Logits):
    """Returns the jitted `eval_step(params, batch, key) -> sum of the batch's token losses`."""

    @jax.jit
    def eval_step(params, batch: Int32[Array, "batch length"], key: jax.Array) -> Float32[Array, ""]:
        return jnp.sum(token_losses(logits(params, batch[:, :-1], key), batch[:, 1:]))

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
