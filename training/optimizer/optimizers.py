"""The optimizers: AdamW as in MLPerf Training's llama31_8b, Muon and SGD, by optax.

Gradients are clipped by their global norm, and vectors such as the scales of norms do not decay.
"""

import fnmatch
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from models.block import block_numbers
from models.configs import DecoderConfig
from models.decoder import abstract_params
from mxjax.policy.layers import LayerPolicies
from training.optimizer.average import averaging
from training.optimizer.bfloat16 import with_bfloat16_moments, with_bfloat16_parameters
from training.optimizer.config import OptimizerConfig
from training.optimizer.deoscillation import check_policies, parse_deoscillation, snap_oscillating
from training.optimizer.muon import is_matrix, muon

_VECTORS = ("scale", "bias", "sinks")
"""Ends of the names of parameters that are vectors in each block."""


def optimizer_of(
    config: OptimizerConfig, model: DecoderConfig, deoscillate: str | None, layers: LayerPolicies
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run while these policies hold.

    It is `make_optimizer`'s, then `--deoscillate`, then the biases that balance the experts' load, then what
    rounds and what averages the parameters.
    """
    optimizer = make_optimizer(config, model)
    parts: list[optax.GradientTransformation] = []
    if deoscillate is not None:
        parts.append(snap_oscillating(parse_deoscillation(deoscillate), layers, block_numbers(model)))
    if model.experts is not None and model.experts.balance_rate:
        parts.append(balance_experts(model.experts.balance_rate))
    optimizer = optax.chain(optimizer, *parts) if parts else optimizer
    if config.master == "bfloat16":
        optimizer = with_bfloat16_parameters(optimizer)
    return optimizer if config.ema is None else optax.chain(optimizer, averaging(config.ema))


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


def make_optimizer(
    config: OptimizerConfig, model: DecoderConfig | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns clipping by global norm, then the optimizer, for parameters of `models.decoder`.

    Its `update` takes `learning_rate=`, a scalar, and with moments in bfloat16 `key=`. Muon needs the model.
    """
    mask = functools.partial(decayed, no_decay=config.no_decay)
    if config.optimizer == "muon":
        if model is None:
            raise ValueError("muon splits the model's matrices; pass make_optimizer its DecoderConfig")
        direction = _muon(config, model)
    elif config.optimizer == "sgd":
        direction = _decaying(optax.trace(config.momentum), config)
    else:
        direction = optax.adamw(
            1.0, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=mask
        )
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip),
        direction,
        optax.GradientTransformationExtraArgs(optax.init_empty_state, _scale),
    )
    return with_bfloat16_moments(optimizer) if config.moments == "bfloat16" else optimizer


def _muon(config: OptimizerConfig, model: DecoderConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    parts: dict[Hashable, optax.GradientTransformation] = {
        "muon": _decaying(muon(model, config.momentum, config.consistent_rms), config),
        "adam": _decaying(adam, config, _adam_ratio(config)),
    }

    def labels(params):
        return jax.tree.map_with_path(lambda path, _: "muon" if is_matrix(path) else "adam", params)

    return optax.partition(parts, labels)


def _decaying(
    direction: optax.GradientTransformation, config: OptimizerConfig, factor: float = 1.0
) -> optax.GradientTransformation:
    """Returns the updates of a unit learning rate against a direction, with decoupled weight decay."""
    mask = functools.partial(decayed, no_decay=config.no_decay)
    return optax.chain(direction, optax.add_decayed_weights(config.weight_decay, mask), optax.scale(-factor))


def _adam_ratio(config: OptimizerConfig) -> float:
    """Returns the learning rate of what muon leaves to AdamW, as a multiple of --lr."""
    return 1.0 if config.adam_lr is None else config.adam_lr / config.lr


def keeps_finite(config: OptimizerConfig) -> Callable[[jax.Array], Bool[Array, ""]] | None:
    """Returns a function of the learning rate: whether an update certainly keeps a finite state finite.

    The update is `make_optimizer`'s, by gradients with a finite norm. Clipped, none of their elements exceeds
    `clip`, nor does a mean of them, or five times `clip` where moments are rounded. So no update before the
    learning rate exceeds such multiples of `clip / ((1 - b1) eps)` by AdamW, of `clip / (1 - momentum)` by
    SGD, and of its matrices' shape factor by Muon, whose singular values reach 1.2. Up to 1e30 that is less
    than half a unit in the last place of float32's largest values, and a rate from 0 to 1 makes it no more,
    while decay takes a parameter towards zero. None for settings without such a bound, among them no
    clipping.
    """
    least = float(jnp.finfo(jnp.float32).tiny)  # XLA takes less for 0
    slowest = 1 - 1e-6 if config.moments == "float32" else 0.99  # of a decay that outweighs rounding up
    bounded = least <= config.clip <= 1e15 and 0 <= config.weight_decay <= 0.5  # so that squares are finite
    if config.optimizer != "sgd":
        bounded &= config.eps >= least and all(0 <= b <= slowest for b in (config.b1, config.b2))
        bounded &= config.clip <= 1e30 * (1 - config.b1) * config.eps
    if config.optimizer != "adamw":
        bounded &= 0 <= config.momentum <= slowest and (config.consistent_rms or 1) <= 1e20
    highest = max(1.0, _adam_ratio(config)) if config.optimizer == "muon" else 1.0
    return (lambda rate: (rate >= 0) & (rate <= 1 / highest)) if bounded else None


def _scale(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Multiplies the updates by the learning rate."""
    if (rate := extra.get("learning_rate")) is None:
        raise ValueError("this optimizer's update needs learning_rate=; see training.step.ScheduledStep")
    return jax.tree.map(lambda update: rate * update, updates), state


def decayed(params: Any, no_decay: Sequence[str] = ()) -> Any:
    """Returns True for each parameter that decays: all but scales of norms, biases, sinks and `no_decay`."""

    # Stacked over layers, a norm's scale is 2-D, so the name decides and not the rank.
    def decays(path, _):
        is_vector = path[-1].key.endswith(_VECTORS)
        return not is_vector and not any(fnmatch.fnmatchcase(name_of(path), p) for p in no_decay)

    return jax.tree.map_with_path(decays, params)


def name_of(path: Any) -> str:
    """Returns the name of a parameter, such as blocks.*.mlp.down for those of all blocks."""
    return ".".join(str(key.key) for key in path).replace("blocks.", "blocks.*.", 1)


def check_no_decay(config: OptimizerConfig, model: DecoderConfig) -> None:
    """Raises ValueError if a pattern matches no parameter that decays."""
    flat = jax.tree.leaves_with_path(decayed(abstract_params(model)))
    names = [name_of(path) for path, decays in flat if decays]
    for pattern in config.no_decay:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--no-decay {pattern!r} matches none of {', '.join(names)}")
