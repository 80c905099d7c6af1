"""AdamW as in MLPerf Training's llama31_8b: gradient clipping, and no weight decay on norms.

The learning rate is an argument of the update, so that runs with other rates or lengths share a program.
"""

from typing import Any

import jax
import optax

from models.configs import LlamaConfig
from mxjax.layers import LayerPolicies
from training.config import Config, OptimizerConfig
from training.deoscillation import deoscillation_hook, parse_deoscillation
from training.outliers import parse_outliers, with_outlier_channels
from training.weight_hooks import with_hook


def optimizer_of(
    config: Config, model: LlamaConfig, layers: LayerPolicies
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run, with weight hooks and outlier channels, while these policies hold."""
    optimizer, precision = make_optimizer(config.optimizer), config.precision
    if precision.deoscillate is not None:
        hook = deoscillation_hook(parse_deoscillation(precision.deoscillate), layers)
        optimizer = with_hook(optimizer, hook)
    if precision.outlier_channels is not None:
        optimizer = with_outlier_channels(optimizer, parse_outliers(precision.outlier_channels), model)
    return optimizer


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


def _scale(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Multiplies the updates by the learning rate."""
    if (rate := extra.get("learning_rate")) is None:
        raise ValueError("this optimizer's update needs learning_rate=; see training.step.scheduled")
    return jax.tree.map(lambda update: rate * update, updates), state


def decayed(params):
    """Returns True for each parameter that decays: all except the scales of norms."""
    # Stacked over layers, a norm's scale is 2-D, so the name decides and not the rank.
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
