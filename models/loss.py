"""The head and the cross-entropy loss, one piece of the tokens at a time.

The logits of a large vocabulary are the largest tensors of a training step: for LOSS_TOKENS tokens and Llama
3's vocabulary 1 GB of float32. So only the logits of one piece exist at a time. Shapes in names as in
`models.decoder`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

import mxjax
from models.cross_entropy import cross_entropy, cross_entropy_and_z
from models.fp8_head import Pieces, fp8_uses, losses_and_gradients
from models.sharding import constrain, gather, is_data_parallel, row_parts, spec, sum_over_rows
from mxjax.policy import Policy
from mxjax.products.draws import PolicyUses
from mxjax.products.implementations import Implementation
from mxjax.runtime.mesh import Layout, as_stored

LOSS_TOKENS = 2048
"""Tokens a device whose logits exist at once in training."""
FP8_LOGITS = 2**27
"""Logits a device that `models.fp8_head` may compute at once, of more tokens if the vocabulary is small: the
kernels of small pieces are short beside the gaps between them."""


def piece_tokens(policy: Policy, implementation: Implementation | None, vocabulary: int) -> int:
    """Returns the number of tokens a device whose logits exist at once in training."""
    in_fp8 = fp8_uses(policy, implementation) is not None
    return max(LOSS_TOKENS, FP8_LOGITS // vocabulary) if in_fp8 else LOSS_TOKENS


class Head(NamedTuple):
    """The policy, implementation and weight layout of the head's GEMM, and its vocabulary; hashable.

    Columns of the weight beyond `vocab_size` are filler, whose logits are minus infinity. None has none. If
    `tied`, the weight is the transposed embedding. `z_loss` is the coefficient of the z-loss in training.
    """

    policy: Policy
    implementation: Implementation | None = None
    layout: Layout | None = None
    vocab_size: int | None = None
    tied: bool = False
    z_loss: float = 0.0

    def logits(self, x: Float[Array, "*B D"], w_DV: Float[Array, "D V"], key) -> Float32[Array, "*B V"]:
        """Returns x @ w_DV."""
        logits = mxjax.dot(
            x,
            w_DV,
            policy=self.policy,
            key=key,
            implementation=self.implementation,
            preferred_element_type=jnp.float32,
            layout=self.layout,
        )
        logits = constrain(logits, "rows", *(None for _ in logits.shape[2:]), "vocab")
        if self.vocab_size in (None, w_DV.shape[1]):
            return logits
        token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(token < self.vocab_size, logits, -jnp.inf)

    @property
    def is_bfloat16(self) -> bool:
        """Whether all three GEMMs multiply bfloat16, so that tokens are independent of each other."""
        gemms = self.policy.gemms.values()
        return all(not g.rotation and g.lhs.format == g.rhs.format == "bf16" for g in gemms)

    def fp8_uses(self, w_DV: Float[Array, "D V"]) -> PolicyUses | None:
        """Returns how `models.fp8_head` reads each operand; None if `losses` computes the loss."""
        filled = self.vocab_size not in (None, w_DV.shape[1])
        if filled or self.z_loss or (self.layout is not None and not is_data_parallel()):
            return None
        return fp8_uses(self.policy, self.implementation)

    def losses(self, x: Float[Array, "*B D"], w_DV, targets: Int[Array, "*B"], key) -> Float32[Array, "*B"]:
        """Returns the cross-entropy of each token, in nats."""
        return cross_entropy(self.logits(x, w_DV, key), targets)


def token_losses(
    head: Head,
    x_BSD: Float[Array, "B S D"],
    w_DV: Float[Array, "D V"],
    targets_BS: Int[Array, "B S"],
    key: jax.Array | None,
) -> Float32[Array, "B S"]:
    """Returns the cross-entropy of each token, in nats. A backward pass recomputes the logits."""
    S = targets_BS.shape[1]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # unnecessary inside a loop
    def next_piece(_, piece):
        index, x, targets, _ = piece
        return None, head.losses(x, w_DV, targets, _fold(key, index))

    _, losses = jax.lax.scan(next_piece, None, _pieces(x_BSD, targets_BS, LOSS_TOKENS))
    return _whole(losses, S)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mean_loss(
    head: Head,
    x_BSD: Float[Array, "B S D"],
    w_DV: Float[Array, "D V"],
    targets_BS: Int[Array, "B S"],
    key: jax.Array | None,
) -> Float32[Array, "*parts"]:
    """Returns the mean cross-entropy of all tokens, in nats.

    With the head's z-loss two numbers: the mean of the sum of both, and that of logsumexp(logits)**2 alone,
    which has no gradient of its own.

    Differentiate it: the forward pass computes the gradients while a piece's logits exist, and the backward
    pass multiplies them by the gradient of the result. So no logits are computed twice.
    """
    if head.z_loss:
        return _mean_loss_fwd(head, x_BSD, w_DV, targets_BS, key)[0]
    return jnp.mean(token_losses(head, x_BSD, w_DV, targets_BS, key))


def _mean_loss_fwd(head: Head, x_BSD, w_DV, targets_BS, key):
    weight = 1 / targets_BS.size
    if (uses := head.fp8_uses(w_DV)) is not None:
        tokens = piece_tokens(head.policy, head.implementation, w_DV.shape[1])
        pieces = Pieces(*_pieces(x_BSD, targets_BS, tokens)[1:])
        loss, dx, dw_DV = losses_and_gradients(uses, weight, pieces, w_DV, head.tied, head.layout)
        dx_BSD = _whole(dx, targets_BS.shape[1])
    elif head.is_bfloat16 and is_data_parallel():
        loss, dx_BSD, dw_DV = _by_device(head, weight, x_BSD, w_DV, targets_BS, key)
    else:
        zero = as_stored(jnp.zeros_like(w_DV), head.layout)
        loss, dx_BSD, dw_DV = _over_pieces(head, weight, x_BSD, w_DV, targets_BS, key, zero)
    return loss, (dx_BSD, dw_DV)


def _over_pieces(head: Head, weight: float, x_BSD, w_DV, targets_BS, key, zero):
    """Returns the weighted sum of the losses and its gradients; `zero` is the initial dw."""
    rounded = w_DV.astype(jnp.bfloat16) if head.is_bfloat16 else w_DV  # once, not for each piece

    def as_summed(dw):  # in the embedding's order, which spares transposing the sum
        return dw.T if head.tied else dw

    def next_piece(total, piece):
        index, x, targets, is_token = piece

        def weighted(x, w_DV):
            return jnp.sum(weight * is_token * head.losses(x, w_DV, targets, _fold(key, index)))

        def with_z(x, w_DV):
            logits = head.logits(x, w_DV, _fold(key, index))
            loss, z = (jnp.sum(weight * is_token * a) for a in cross_entropy_and_z(logits, targets))
            return loss + head.z_loss * z, z

        value_and_grad = functools.partial(jax.value_and_grad, argnums=(0, 1))
        if head.z_loss:
            found, gradients = value_and_grad(with_z, has_aux=True)(x, rounded.astype(w_DV.dtype))
            loss = jnp.stack(found)
        else:
            loss, gradients = value_and_grad(weighted)(x, rounded.astype(w_DV.dtype))
        return total + as_summed(gradients[1]), (loss, gradients[0])

    total, (losses, dx) = jax.lax.scan(next_piece, as_summed(zero), _pieces(x_BSD, targets_BS, LOSS_TOKENS))
    return jnp.sum(losses, axis=0), _whole(dx, targets_BS.shape[1]), as_summed(total)


def _by_device(head: Head, weight: float, x_BSD, w_DV, targets_BS, key):
    """Runs `_over_pieces` on each device's tokens: gathers the head and sums its gradient once."""

    def of_device(x_BSD, w_DV, targets_BS, key):
        w_DV = gather(w_DV.astype(jnp.bfloat16), "embed", axis=0).astype(w_DV.dtype)
        alone = head._replace(layout=None)
        loss, dx, dw = _over_pieces(alone, weight, x_BSD, w_DV, targets_BS, key, jnp.zeros_like(w_DV))
        return sum_over_rows(loss), dx, sum_over_rows(dw, scattered="embed", axis=0)

    rows, stored = spec(("rows",)), spec(("embed", None))
    run = jax.shard_map(
        of_device,
        in_specs=(rows, stored, rows, spec(())),
        out_specs=(spec(()), rows, stored),
        check_vma=False,
    )
    return run(x_BSD, w_DV, targets_BS, key)


def _mean_loss_bwd(head: Head, gradients, dy):
    dy = dy[0] if head.z_loss else dy
    dx_BSD, dw_DV = gradients
    return dx_BSD * dy.astype(dx_BSD.dtype), dw_DV * dy.astype(dw_DV.dtype), None, None


mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


def _pieces(x_BSD, targets_BS, tokens: int):
    """Returns the stacked pieces of the sequences: numbers, x, targets, and a mask that is 1 for tokens.

    A piece has about `tokens` a device, but at least one of each sequence. The last piece is padded with
    zeros.
    """
    B, S = targets_BS.shape
    length = -(-S // min(-(-B * S // (tokens * row_parts())), S))
    pieces = -(-S // length)

    def split(a):
        a = jnp.pad(a, ((0, 0), (0, pieces * length - S), *((0, 0),) * (a.ndim - 2)))
        a = a.reshape(B, pieces, length, *a.shape[2:]).swapaxes(0, 1)
        return constrain(a, None, "rows", *(None for _ in a.shape[2:]))

    return jnp.arange(pieces), split(x_BSD), split(targets_BS), split(jnp.ones((B, S), jnp.float32))


def _whole(pieces: Array, S: int) -> Array:
    """Concatenates pieces to whole sequences: the inverse of `_pieces`."""
    pieces = pieces.swapaxes(0, 1)
    return pieces.reshape(pieces.shape[0], -1, *pieces.shape[3:])[:, :S]


def _fold(key: jax.Array | None, index) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, index)
