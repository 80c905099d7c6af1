"""AdamW as in MLPerf Training's llama31_8b: linear warm-up, cosine decay, clipping, no decay on norms."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, numpy: Any = jnp) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0, computed by `numpy`.

    With W = warmup_steps: `lr * (s + 1) / (W + 1)` while s <= W, then half a cosine from lr down to
    `min_lr_ratio * lr` at s = steps.

    Source: NVIDIA NeMo's CosineAnnealing, as used by MLPerf Training llama31_8b.
    """
    warmup, lowest = config.warmup_steps, config.min_lr_ratio * config.lr

    def schedule(step):
        rising = config.lr * (step + 1) / (warmup + 1)
        progress = numpy.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        falling = lowest + 0.5 * (config.lr - lowest) * (1 + numpy.cos(numpy.pi * progress))
        return numpy.where(step <= warmup, rising, falling)

    return schedule


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
    """Returns which parameters decay: all but the norms' scales, the only 1-D ones (stacked over layers)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
