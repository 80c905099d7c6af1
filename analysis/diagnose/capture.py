"""The tensors that a model's linear layers read during one forward and backward pass on a batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from models import decoder
from models.configs import DecoderConfig
from models.gemms import linear_weights
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation, compiler_options
from mxjax.stats.layers import Tensors

ACTIVATIONS = jnp.bfloat16
"""dtype of the activations, as in training."""


Gradients = Mapping[str, Float32[Array, "layers d_in d_out"]]
"""The weights' gradients by linear layer."""


class LossAndGradients(NamedTuple):
    """The mean loss of a batch, and the weights' gradients by linear layer."""

    loss: Float32[Array, ""]
    gradients: Gradients


class Pass(NamedTuple):
    """The tensors and gradients of one forward and backward pass over a batch.

    Attributes:
      tensors: inputs and output gradients [layers, batch, tokens, width] by linear layer.
      gradients: the weights' gradients by linear layer.
    """

    tensors: Mapping[str, Tensors]
    gradients: Gradients


def make_pass(
    model: DecoderConfig, policies: LayerPolicies, implementation: Implementation | None, **training: Any
) -> Callable[[decoder.Params, Int32[np.ndarray, "batch length"], jax.Array], Pass]:
    """Returns the jitted `run(params, batch, key)` for the mean loss of a batch under these policies.

    Args:
      training: what else the training's loss depends on, `documents` and `z_loss` of `decoder.measured_loss`.
    """
    loss = _loss(model, policies, implementation, training)

    @functools.partial(jax.jit, compiler_options=compiler_options(policies.policies, implementation))
    def run(params: decoder.Params, batch: Any, key: jax.Array) -> Pass:
        shape = (model.n_layers, batch.shape[0], batch.shape[1] - 1)
        slots = {
            name: Tensors(*(jnp.zeros((*shape, width), ACTIVATIONS) for width in w.shape[1:]))
            for name, w in linear_weights(params["blocks"]).items()
        }
        gradient = jax.grad(loss, argnums=(0, 1))
        blocks, tensors = gradient(params["blocks"], slots, params, batch, key)
        return Pass(tensors, linear_weights(blocks))

    return run


def make_gradients(
    model: DecoderConfig, policies: LayerPolicies, implementation: Implementation | None, **training: Any
) -> jax.stages.Wrapped:
    """Returns the jitted `run(params, batch, key)` for a pass's loss and gradients without its tensors.

    Arguments as in `make_pass`.
    """
    loss = _loss(model, policies, implementation, training)

    @functools.partial(jax.jit, compiler_options=compiler_options(policies.policies, implementation))
    def run(params: decoder.Params, batch: Any, key: jax.Array) -> LossAndGradients:
        value, blocks = jax.value_and_grad(loss)(params["blocks"], None, params, batch, key)
        return LossAndGradients(value, linear_weights(blocks))

    return run


def _loss(
    model: DecoderConfig,
    policies: LayerPolicies,
    implementation: Implementation | None,
    training: Mapping[str, Any],
) -> Callable:
    """Returns the mean loss of a batch as a function of the blocks' weights and the slots first."""

    def loss(
        blocks: Any, slots: Mapping[str, Tensors] | None, params: decoder.Params, batch: Any, key: jax.Array
    ) -> Float32[Array, ""]:
        options: dict[str, Any] = {"policies": policies, "key": key, "implementation": implementation}
        return decoder.mean_loss(
            model, params | {"blocks": blocks}, batch, slots=slots, **options, **training
        )

    return loss
