"""An exponential moving average of the parameters, in float32, beside which a run trains on."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from training.optimizer.bfloat16 import as_float32


class AverageState(NamedTuple):
    """The number of steps averaged, without skipped ones, and the average."""

    steps: Int32[Array, ""]
    average: Any


def averaging(decay: float) -> optax.GradientTransformation:
    """Returns the last part of an optimizer, which averages the parameters after each step.

    Step s of n weighs `decay**(n - s)`, and the weights sum to 1, so that the first parameters, which are
    random, have none. Adam's correction of a moment that begins at zero gives the same.
    """

    def init(params):
        return AverageState(jnp.zeros((), jnp.int32), as_float32(params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("an optimizer that averages parameters needs them: pass params to its update")
        steps = state.steps + 1
        new = as_float32(optax.apply_updates(params, updates))
        weight = jnp.float32(1.0)
        if decay:
            # 1 - decay**steps, in which a decay near 1 would lose its digits.
            weight = (1 - decay) / -jnp.expm1(steps.astype(jnp.float32) * math.log(decay))
        average = jax.tree.map(lambda old, w: old + weight * (w - old), state.average, new)
        return updates, AverageState(steps, average)

    return optax.GradientTransformation(init, update)


def average_of(opt_state: Any) -> Any:
    """Returns the average in an optimizer's state, as parameters; None if it has none."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, AverageState))
    return next((part.average for part in parts if isinstance(part, AverageState)), None)
