"""The head and its cross-entropy, for a part of the tokens at a time.

Logits of a large vocabulary are the largest tensors of a training step: 1 GB of float32 for LOSS_TOKENS
tokens of Llama 3's. They exist for one piece at a time. Shapes in names as in `models.llama`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

import mxjax
from mxjax.gemm import Implementation
from mxjax.policy import Policy

LOSS_TOKENS = 2048
"""Tokens whose logits exist at once in training."""


class Head(NamedTuple):
    """How the head's GEMM runs; hashable."""

    policy: Policy
    implementation: Implementation | None = None

    def logits(self, x: Float[Array, "*B D"], w_DV: Float[Array, "D V"], key) -> Float32[Array, "*B V"]:
        """Returns x @ w_DV."""
        return mxjax.dot(
            x,
            w_DV,
            policy=self.policy,
            key=key,
            implementation=self.implementation,
            preferred_element_type=jnp.float32,
        )

    def losses(self, x: Float[Array, "*B D"], w_DV, targets: Int[Array, "*B"], key) -> Float32[Array, "*B"]:
        """Returns the cross-entropy of each token, in nats."""
        return cross_entropy(self.logits(x, w_DV, key), targets)


@jax.custom_vjp
def cross_entropy(
    logits: Float32[Array, "*shape V"], targets: Int[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns -log softmax(logits)[target], in nats.

    The gradient, g (softmax(logits) - onehot(target)), is one pass over the logits; that of a lookup would
    write a second array of their size.
    """
    return _cross_entropy_fwd(logits, targets)[0]


def _cross_entropy_fwd(logits, targets):
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return normalizer - chosen, (logits, targets, normalizer)


def _cross_entropy_bwd(residuals, g):
    logits, targets, normalizer = residuals
    token = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    softmax = jnp.exp(logits - normalizer[..., None])
    return g[..., None] * jnp.where(token == targets[..., None], softmax - 1, softmax), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def token_losses(
    head: Head,
    x_BSD: Float[Array, "B S D"],
    w_DV: Float[Array, "D V"],
    targets_BS: Int[Array, "B S"],
    key: jax.Array | None,
) -> Float32[Array, "B S"]:
    """Returns the cross-entropy of each token, in nats; its logits are computed again in a backward pass."""
    S = targets_BS.shape[1]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a loop, nothing undoes it
    def next_piece(_, piece):
        index, x, targets, _ = piece
        return None, head.losses(x, w_DV, targets, _fold(key, index))

    _, losses = jax.lax.scan(next_piece, None, _pieces(x_BSD, targets_BS))
    return _whole(losses, S)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mean_loss(
    head: Head,
    x_BSD: Float[Array, "B S D"],
    w_DV: Float[Array, "D V"],
    targets_BS: Int[Array, "B S"],
    key: jax.Array | None,
) -> Float32[Array, ""]:
    """Returns the mean cross-entropy of all tokens, in nats.

    To be differentiated: the gradients are made in the forward pass, while a piece's logits are there, and
    multiplied by the one of the result in the backward pass. So no logits are computed twice.
    """
    return jnp.mean(token_losses(head, x_BSD, w_DV, targets_BS, key))


def _mean_loss_fwd(head: Head, x_BSD, w_DV, targets_BS, key):
    S = targets_BS.shape[1]

    def next_piece(dw_DV, piece):
        index, x, targets, weights = piece

        def weighted(x, w_DV):
            return jnp.sum(weights * head.losses(x, w_DV, targets, _fold(key, index)))

        loss, gradients = jax.value_and_grad(weighted, argnums=(0, 1))(x, w_DV)
        return dw_DV + gradients[1], (loss, gradients[0])

    dw_DV, (losses, dx) = jax.lax.scan(next_piece, jnp.zeros_like(w_DV), _pieces(x_BSD, targets_BS))
    return jnp.sum(losses), (_whole(dx, S), dw_DV)


def _mean_loss_bwd(head: Head, gradients, dy):
    del head
    dx_BSD, dw_DV = gradients
    return dx_BSD * dy.astype(dx_BSD.dtype), dw_DV * dy.astype(dw_DV.dtype), None, None


mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


def _pieces(x_BSD, targets_BS):
    """Returns pieces of the sequences, stacked: their numbers, x, targets, and the weights of their losses.

    A piece has about LOSS_TOKENS tokens, or one of each sequence if these are more; the last is filled up
    with tokens of weight zero.
    """
    B, S = targets_BS.shape
    length = -(-S // min(-(-B * S // LOSS_TOKENS), S))
    pieces = -(-S // length)

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, pieces * length - S), *((0, 0),) * (a.ndim - 2)))
        return a.reshape(B, pieces, length, *a.shape[2:]).swapaxes(0, 1)

    weights_BS = jnp.full((B, S), 1 / (B * S), jnp.float32)
    return jnp.arange(pieces), cut(x_BSD), cut(targets_BS), cut(weights_BS)


def _whole(pieces: Array, S: int) -> Array:
    """Returns what `_pieces` cut, put together again."""
    pieces = pieces.swapaxes(0, 1)
    return pieces.reshape(pieces.shape[0], -1, *pieces.shape[3:])[:, :S]


def _fold(key: jax.Array | None, index) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, index)
