"""Delayed scales in a run: the histories of all linear layers, as the last part of the optimizer.

A step's loss takes the scales as slots, whose gradients are the largest magnitudes of this step, over all
devices and parts of the batch. The optimizer's update writes them into the histories, so that they are
checkpointed with its state, and stay as they are in a step that is not finite. Evaluations and measures
have no history: their scales are those of the tensors themselves.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from models.configs import DecoderConfig
from models.gemms import linear_layers
from mxjax.numerics.delayed import History, Scales, first_history, updated
from mxjax.numerics.formats import get_format
from mxjax.policy.layers import LayerPolicies
from mxjax.policy.policy import with_current_scales


class DelayedState(NamedTuple):
    """The histories of x, w and dy of the linear layers of all blocks: arrays [names, 3, blocks, ...]."""

    histories: History


def with_histories(
    optimizer: optax.GradientTransformationExtraArgs,
    model: DecoderConfig,
    phases: Sequence[LayerPolicies],
    layers: LayerPolicies,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, with histories in its state if a policy of any phase has delayed scales.

    Its `update` takes `amax=`, by name as `scales_of` returns the scales; None keeps the histories.

    Args:
      layers: the policies of the present phase, whose formats decide the scales.
    """
    if not any(is_delayed(each) for each in phases):
        return optimizer
    names = linear_layers(model)

    def init(params):
        return DelayedState(first_history(len(names), len(Scales._fields), model.n_layers))

    def update(updates, state, params=None, *, amax: Mapping[str, Scales] | None = None, **extra):
        if amax is None:
            return updates, state
        found = jnp.stack([jnp.stack(amax[name]) for name in names])
        return updates, DelayedState(updated(state.histories, found, _largest(layers, names, model.n_layers)))

    return optax.chain(optimizer, optax.GradientTransformationExtraArgs(init, update))


def scales_of(opt_state: Any, model: DecoderConfig) -> dict[str, Scales]:
    """Returns the scales of each linear layer, stacked over blocks, in the state of `with_histories`."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, DelayedState))
    [state] = [part for part in parts if isinstance(part, DelayedState)]
    return dict(zip(linear_layers(model), (Scales(*each) for each in state.histories.scale), strict=True))


def has_scales(slots: Mapping[str, Any] | None) -> bool:
    """Whether a loss is given delayed scales."""
    return any(isinstance(slot, Scales) for slot in (slots or {}).values())


def is_delayed(layers: LayerPolicies) -> bool:
    """Whether any layer has a delayed scale."""
    return any(policy.delayed for policy in layers.policies)


def without_histories(layers: LayerPolicies) -> LayerPolicies:
    """Returns the policies with current scales in place of delayed ones."""
    return LayerPolicies(layers.names, tuple(map(with_current_scales, layers.policies)))


def check_delayed(model: DecoderConfig, layers: LayerPolicies) -> None:
    """Raises ValueError if a layer that has no histories has a delayed scale."""
    have = {f"blocks.{i}.{name}" for i in range(model.n_layers) for name in linear_layers(model)}
    if others := [name for name, policy in layers.items() if policy.delayed and name not in have]:
        patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in others)
        raise ValueError(
            f"{others[0]} has scaling='delayed', and only {', '.join(linear_layers(model))} have histories; "
            f"give current scales: --layers {' '.join(f"'{pattern}=fp8'" for pattern in patterns)}"
        )


def _largest(layers: LayerPolicies, names: Sequence[str], blocks: int) -> Float32[Array, "names 3 blocks"]:
    """Returns the largest magnitude of each tensor's format; one where it has no delayed scale."""

    def largest(policy, tensor: str) -> float:
        element = get_format(policy.delayed[tensor]).element if tensor in policy.delayed else None
        return element.max if element else 1.0

    each = [
        [[largest(layers[f"blocks.{i}.{name}"], tensor) for i in range(blocks)] for tensor in Scales._fields]
        for name in names
    ]
    return jnp.array(each, jnp.float32)
