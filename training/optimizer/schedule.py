"""The learning rate of a step: a linear warm-up, then one of three schedules.

The rate is an argument of the update, so that runs with other rates or lengths share a program.
"""

from typing import Any

import jax.numpy as jnp
import optax

from training.optimizer.config import OptimizerConfig, decay_steps


def learning_rate(config: OptimizerConfig, steps: int, numpy: Any = jnp) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    With W = warmup_steps: `lr * (s + 1) / (W + 1)` while s <= W, then by schedule, down to
    `min_lr_ratio * lr`:
      cosine: half a cosine over `decay` steps, by default to s = steps.
      wsd: lr, and over the last `decay` steps a line, or lr at first and then less by the root of the share
        of the decay that is over ("1-sqrt").
      constant: lr, without an end.

    Args:
      numpy: the module that computes it; NumPy keeps the computation on the host.
    Source: NVIDIA NeMo's CosineAnnealing, as used by MLPerf Training llama31_8b; for wsd arXiv 2405.18392,
      equations 1 and 2.
    """
    # optax.warmup_cosine_decay_schedule gives the same curve, but 3 of 4 values differ in their last bits.
    warmup, lowest = config.warmup_steps, config.min_lr_ratio * config.lr
    decay = decay_steps(config, steps)
    begins = warmup if config.schedule == "cosine" else max(steps - decay, warmup)
    length = decay if config.schedule == "cosine" else max(steps - begins, 1)

    def schedule(step):
        rising = config.lr * (step + 1) / (warmup + 1)
        progress = numpy.clip((step - begins) / length, 0.0, 1.0)
        if config.schedule == "cosine":
            falling = lowest + 0.5 * (config.lr - lowest) * (1 + numpy.cos(numpy.pi * progress))
        elif config.schedule == "wsd":
            over = numpy.sqrt(progress) if config.decay_shape == "1-sqrt" else progress
            falling = numpy.where(step < begins, config.lr, lowest + (config.lr - lowest) * (1 - over))
        else:
            falling = config.lr
        return numpy.where(step <= warmup, rising, falling)

    return schedule
