"""The learning-rate schedule of MLPerf Training's llama31_8b: linear warm-up, then a cosine decay."""

from typing import Any

import jax.numpy as jnp
import optax

from training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, numpy: Any = jnp) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    With W = warmup_steps: `lr * (s + 1) / (W + 1)` while s <= W, then half a cosine from lr down to
    `min_lr_ratio * lr` at s = steps.

    Args:
      config: peak, warm-up and final ratio.
      steps: length of the schedule.
      numpy: the module that computes it; NumPy keeps the computation on the host.
    Source: NVIDIA NeMo's CosineAnnealing, as used by MLPerf Training llama31_8b.
    """
    # optax.warmup_cosine_decay_schedule gives the same curve, but 3 of 4 values differ in their last bits.
    warmup, lowest = config.warmup_steps, config.min_lr_ratio * config.lr

    def schedule(step):
        rising = config.lr * (step + 1) / (warmup + 1)
        progress = numpy.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        falling = lowest + 0.5 * (config.lr - lowest) * (1 + numpy.cos(numpy.pi * progress))
        return numpy.where(step <= warmup, rising, falling)

    return schedule
