"""Hooks: functions of the weights that run after each optimizer step and may change them.

A hook is a part of the optimizer, so that its state is saved, sharded and, in a skipped step, kept as Adam's
moments are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32


class Hook(NamedTuple):
    """A hook on the weights.

    Attributes:
      init: returns the state before the first step, from the parameters.
      apply: returns the changed parameters and the state, from the number of the step (from 1), the
        parameters before and after it, and the state.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Int32[Array, ""], Any, Any, Any], tuple[Any, Any]]


class HookState(NamedTuple):
    """The state of an optimizer with a hook; `step` counts the updates, without skipped steps."""

    optimizer: Any
    hook: Any
    step: Int32[Array, ""]


def with_hook(optimizer: optax.GradientTransformation, hook: Hook) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with a hook after each of its steps.

    Updates of elements that the hook leaves alone are the optimizer's, bit for bit. The others become what it
    says up to the rounding of one float32 addition, which is exact between half and twice the old value.
    """

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return HookState(optimizer.init(params), hook.init(params), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("an optimizer with a hook on weights needs them: pass params")
        updates, inner = optimizer.update(updates, state.optimizer, params, **extra)
        step = state.step + 1
        after = optax.apply_updates(params, updates)
        changed, hook_state = hook.apply(step, params, after, state.hook)
        updates = jax.tree.map(
            lambda u, before, a, c: jnp.where(c == a, u, c - before), updates, params, after, changed
        )
        return updates, HookState(inner, hook_state, step)

    return optax.GradientTransformationExtraArgs(init, update)
