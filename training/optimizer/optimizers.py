"""AdamW as in MLPerf Training's llama31_8b: gradient clipping, and no weight decay on norms."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from models.configs import ExpertsConfig
from mxjax.policy.layers import LayerPolicies
from training.deoscillation import check_policies, parse_deoscillation, snap_oscillating
from training.optimizer.config import OptimizerConfig

_VECTORS = ("scale", "bias", "sinks")
"""Ends of the names of parameters that are vectors in each block."""


def optimizer_of(
    config: OptimizerConfig,
    deoscillate: str | None,
    layers: LayerPolicies,
    experts: ExpertsConfig | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run while these policies hold.

    It is `make_optimizer`'s, then `--deoscillate`, then the biases that balance the experts' load.
    """
    optimizer = make_optimizer(config)
    parts: list[optax.GradientTransformation] = []
    if deoscillate is not None:
        parts.append(snap_oscillating(parse_deoscillation(deoscillate), layers))
    if experts is not None and experts.balance_rate:
        parts.append(balance_experts(experts.balance_rate))
    return optax.chain(optimizer, *parts) if parts else optimizer


def balance_experts(rate: float) -> optax.GradientTransformationExtraArgs:
    """Returns the last part of an optimizer, which moves each expert's bias by `rate` towards an even load.

    Its `update` takes `aux=`, a `models.decoder.Measured`. Biases of experts with less than the mean load
    grow, those of others shrink. No gradient reaches them.

    Source: "Auxiliary-loss-free load balancing", arXiv 2408.15664, algorithm 1.
    """

    def update(updates, state, params=None, **extra):
        load = extra["aux"].routing.load
        step = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        return jax.tree.map_with_path(
            lambda path, u: step if path[-1].key == "balance_bias" else u, updates
        ), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def check_optimizer(deoscillate: str | None, phases: Sequence[LayerPolicies]) -> None:
    """Raises ValueError unless a run can have its optimizer in all phases."""
    if deoscillate is not None:
        parse_deoscillation(deoscillate)
        check_policies(phases)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns clipping by global norm, then AdamW, for parameters of `models.decoder`.

    Its `update` takes `learning_rate=`, a scalar.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            1.0,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
        optax.GradientTransformationExtraArgs(optax.init_empty_state, _scale),
    )


def keeps_finite(config: OptimizerConfig) -> Callable[[jax.Array], Bool[Array, ""]] | None:
    """Returns a function of the learning rate: whether an update certainly keeps a finite state finite.

    The update is `make_optimizer`'s, by gradients with a finite norm. Clipped, none of their elements exceeds
    `clip`, nor does the first moment, a weighted mean of them, so that no update before the learning rate
    exceeds `clip / ((1 - b1) eps)`. Up to 1e30 that is less than half a unit in the last place of float32's
    largest values, and a rate from 0 to 1 makes it no more, while decay takes a parameter towards zero. None
    for settings without such a bound, among them no clipping.
    """
    decays, least = (config.b1, config.b2), float(jnp.finfo(jnp.float32).tiny)  # XLA takes less for 0
    bounded = (
        least <= config.clip <= 1e15  # so that squares are finite
        and config.eps >= least
        and all(0 <= b <= 1 - 1e-6 for b in decays)
        and config.clip <= 1e30 * (1 - config.b1) * config.eps
        and 0 <= config.weight_decay <= 0.5
    )
    return (lambda rate: (rate >= 0) & (rate <= 1)) if bounded else None


def _scale(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Multiplies the updates by the learning rate."""
    if (rate := extra.get("learning_rate")) is None:
        raise ValueError("this optimizer's update needs learning_rate=; see training.step.scheduled")
    return jax.tree.map(lambda update: rate * update, updates), state


def decayed(params):
    """Returns True for each parameter that decays: all except scales of norms, biases and sinks."""
    # Stacked over layers, a norm's scale is 2-D, so the name decides and not the rank.
    return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(_VECTORS), params)
