"""Errors of the GEMMs inside a model, measured during its forward and backward pass.

A probe returns its product unchanged. In the backward pass, where x, w and dy are available, it measures
their errors and returns them as the gradient of its slot, an argument of zeros that changes nothing. So
`scan` stacks the measures of layers as it stacks gradients, without keeping any layer's tensors.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from mxjax.policy.policy import OPERANDS, Policy
from mxjax.products.implementations import Implementation
from mxjax.recipes import get_policy
from mxjax.stats.measures import DotErrors, gemms

MAX_TOKENS = 2048
"""The largest number of tokens measured."""


class Amax(NamedTuple):
    """The largest magnitude of each tensor of a linear layer; a slot of it is filled with these alone."""

    x: Float32[Array, "*layers"]
    w: Float32[Array, "*layers"]
    dy: Float32[Array, "*layers"]


class Measures(NamedTuple):
    """A probe's measures: `mxjax.stats.gemms` of its tensors, and their largest magnitudes."""

    errors: DotErrors
    amax: Amax


class Tensors(NamedTuple):
    """A slot that a probe fills with the tensors themselves, in the slot's dtype.

    Attributes:
      x: the layer's input.
      dy: the gradient of its output.
    """

    x: Float[Array, "*layers_and_batch d_in"]
    dy: Float[Array, "*layers_and_batch d_out"]


def empty_slots(names: Sequence[str], n_layers: int) -> dict[str, Measures]:
    """Returns a slot of zeros for each name, stacked for n_layers layers."""
    tensor = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    like = jax.eval_shape(lambda x, w, dy: measure(x, w, dy, get_policy("fp32")), tensor, tensor, tensor)
    return {name: jax.tree.map(lambda leaf: jnp.zeros((n_layers, *leaf.shape)), like) for name in names}


def measure(
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "d_in d_out"],
    dy: Float[Array, "*batch d_out"],
    policy: Policy,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> Measures:
    """Returns the measures of `dot(x, w, policy=...)` with the output gradient dy."""
    errors = gemms(x, w, dy, policy=policy, key=key, implementation=implementation)
    return Measures(errors, _amax(x, w, dy))


def _amax(x, w, dy, *_) -> Amax:
    return Amax(*(jnp.max(jnp.abs(t.astype(jnp.float32))) for t in (x, w, dy)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def probe(
    policy: Policy,
    implementation: Implementation | None,
    y: Float[Array, "*batch d_out"],
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "*experts d_in d_out"],
    key: jax.Array | None,
    slot: Measures | Tensors | Amax,
) -> Float[Array, "*batch d_out"]:
    """Returns y, the product of x and w; the gradient of `slot` is what it takes from its three GEMMs.

    Experts' weights, of which each row of x meets one, have no measures but an `Amax`.
    """
    return y


def _probe_fwd(policy, implementation, y, x, w, key, slot):
    takes = {Tensors: _take_tensors, Amax: _amax, Measures: measure}
    return y, (x, w, key, jax.tree_util.Partial(takes[type(slot)]))


def _probe_bwd(policy, implementation, residuals, dy):
    x, w, key, take = residuals
    return dy, None, None, None, take(x, w, dy, policy, key, implementation)


def _take_tensors(x, w, dy, policy, key, implementation) -> Tensors:
    return Tensors(x, dy)


probe.defvjp(_probe_fwd, _probe_bwd)


def make_layer_stats(
    mean_loss,
    empty: dict[str, Measures],
    seed: int,
    tokens_a_step: int,
    batch_parts: int = 1,
    unit: int = 1,
    compiler_options: dict[str, Any] | None = None,
):
    """Returns a jitted function `layer_stats(params, batch, step)`, which returns every probe's measures.

    Output gradients are those of the mean loss over a step's tokens. At most MAX_TOKENS tokens are measured:
    the batch's first sequences, or the beginning of one. Random bits are those of the training step.

    Args:
      mean_loss: function of parameters, sequences, key and slots.
      empty: the model's slots.
      tokens_a_step: number of tokens over which a step takes the mean.
      batch_parts: number of the batch's shards on the mesh; each gets equally many sequences.
      unit: number of tokens of which a sequence must have a multiple.
      compiler_options: `jax.jit`'s; the products are also multiplied in float32.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def layer_stats(params, batch, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        length = max(min(batch.shape[1] - 1, MAX_TOKENS // batch_parts) // unit, 1) * unit
        part = batch[: max(1, MAX_TOKENS // (length * batch_parts)) * batch_parts, : length + 1]

        def loss(filled):
            return mean_loss(params, part, key, filled) * (part[:, 1:].size / tokens_a_step)

        return jax.grad(loss)(empty)

    return layer_stats


def by_layer(measures: dict[str, Measures]) -> dict[str, dict[str, Any]]:
    """Returns nested dicts of numbers, keyed by layer: "blocks.0.NAME" and so on.

    Each layer has "fprop", "dgrad" and "wgrad", and "amax" of "x", "w" and "dy". Each GEMM has "sqnr_db" of
    its product against float32 and the fractions "clipped" and "flushed" of both operands.
    """
    found = jax.device_get(measures)
    n_layers = len(jax.tree.leaves(found)[0])
    return {
        f"blocks.{i}.{name}": _numbers(jax.tree.map(lambda leaf, i=i: float(leaf[i]), stacked))
        for i in range(n_layers)
        for name, stacked in found.items()
    }


def _numbers(m: Measures) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, gemm in m.errors._asdict().items():
        sides = zip(OPERANDS[name], (gemm.lhs, gemm.rhs), strict=True)
        result[name] = {"sqnr_db": gemm.product.sqnr_db} | {
            side: {"clipped": error.clipped, "flushed": error.flushed} for side, error in sides
        }
    return result | {"amax": m.amax._asdict()}
