"""The cross-entropy of logits, with a gradient of its own, and the logsumexp that it needs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from models.sharding import mesh_sizes
from mxjax.runtime.devices import on_gpu


@jax.custom_vjp
def cross_entropy(
    logits: Float32[Array, "*shape V"], targets: Int[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns -log softmax(logits)[target], in nats.

    The gradient, g (softmax(logits) - onehot(target)), is one pass over the logits. The gradient of a lookup
    would write a second array of their size.
    """
    return _cross_entropy_fwd(logits, targets)[0]


def _cross_entropy_fwd(logits, targets):
    normalizer = logsumexp(logits)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return normalizer - chosen, (logits, targets, normalizer)


def _cross_entropy_bwd(residuals, g):
    logits, targets, normalizer = residuals
    token = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    softmax = jnp.exp(logits - normalizer[..., None])
    return g[..., None] * jnp.where(token == targets[..., None], softmax - 1, softmax), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


@jax.custom_vjp
def cross_entropy_and_z(
    logits: Float32[Array, "*shape V"], targets: Int[Array, "*shape"]
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
    """Returns `cross_entropy` and logsumexp(logits)**2, whose gradient the same pass has.

    Source: PaLM, arXiv 2204.02311, section 5.
    """
    return _cross_entropy_and_z_fwd(logits, targets)[0]


def _cross_entropy_and_z_fwd(logits, targets):
    losses, residuals = _cross_entropy_fwd(logits, targets)
    return (losses, residuals[2] ** 2), residuals


def _cross_entropy_and_z_bwd(residuals, gradients):
    logits, targets, normalizer = residuals
    of_loss, of_z = gradients
    token = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    rest = (of_loss + 2 * of_z * normalizer)[..., None] * jnp.exp(logits - normalizer[..., None])
    return jnp.where(token == targets[..., None], rest - of_loss[..., None], rest), None


cross_entropy_and_z.defvjp(_cross_entropy_and_z_fwd, _cross_entropy_and_z_bwd)


def logsumexp(logits: Float32[Array, "*shape V"]) -> Float32[Array, "*shape"]:
    """Returns logsumexp over the vocabulary, on a GPU that has all of it by one pass over the logits."""
    if not on_gpu() or mesh_sizes().get("tensor", 1) > 1:
        return jax.nn.logsumexp(logits, axis=-1)
    return one_pass_logsumexp(logits)


def one_pass_logsumexp(logits: Float32[Array, "*shape V"]) -> Float32[Array, "*shape"]:
    """Returns logsumexp over the last axis: the largest and the sum of exponentials relative to it at once.

    NaN where an element is NaN; otherwise infinity where one is infinite, and minus infinity where all are
    minus infinity.
    Source: "Online normalizer calculation for softmax", arXiv 1805.02867, section 3.
    """
    operands, initial = (logits, jnp.ones_like(logits)), (-jnp.inf, 0.0)
    largest, total = jax.lax.reduce(operands, initial, _join_sums, (logits.ndim - 1,))
    return largest + jnp.log(total)


def _join_sums(left, right):
    """Returns the largest of both and the sum of both sums relative to it, by one exponential."""
    (a, of_a), (b, of_b) = left, right
    factor = jnp.exp(jnp.where(a == b, 0.0, -jnp.abs(a - b)))
    return jnp.maximum(a, b), jnp.where(a >= b, of_a + of_b * factor, of_a * factor + of_b)
