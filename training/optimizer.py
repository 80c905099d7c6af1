"""AdamW as in MLPerf Training's llama31_8b: gradient clipping, and no weight decay on norms.

The learning rate is an argument of the update, so that runs with other rates or lengths share a program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from mxjax.layers import LayerPolicies
from training.config import Config, OptimizerConfig
from training.deoscillation import deoscillation_hook, parse_deoscillation
from training.weight_hooks import with_hook


def optimizer_of(config: Config, layers: LayerPolicies) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run, with weight hooks, while these policies hold."""
    optimizer = make_optimizer(config.optimizer)
    if config.precision.deoscillate is None:
        return optimizer
    return with_hook(optimizer, deoscillation_hook(parse_deoscillation(config.precision.deoscillate), layers))


def keeps_finite_with_hooks(config: Config) -> Callable[[jax.Array], Bool[Array, ""]] | None:
    """Returns `keeps_finite` of `optimizer_of`'s optimizer: None if it has hooks."""
    return keeps_finite(config.optimizer) if config.precision.deoscillate is None else None


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns clipping by global norm, then AdamW, for parameters of `models.llama`.

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
    """Returns True for each parameter that decays: all except the scales of norms."""
    # Stacked over layers, a norm's scale is 2-D, so the name decides and not the rank.
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
