"""AdamW as in MLPerf Training's llama31_8b: gradient clipping, and no weight decay on norms."""

import jax
import optax

from mxjax.layers import LayerPolicies
from training.config import Config, OptimizerConfig
from training.deoscillation import deoscillation_hook, parse_deoscillation
from training.learning_rate import learning_rate
from training.weight_hooks import with_hook


def optimizer_of(config: Config, layers: LayerPolicies) -> optax.GradientTransformation:
    """Returns the optimizer of a run, with its weight hooks, while these policies hold."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    if config.precision.deoscillate is None:
        return optimizer
    return with_hook(optimizer, deoscillation_hook(parse_deoscillation(config.precision.deoscillate), layers))


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping by global norm, then AdamW, for parameters of `models.llama`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params):
    """Returns True for each parameter that decays: all except the scales of norms."""
    # Stacked over layers, a norm's scale is 2-D, so the name decides and not the rank.
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
