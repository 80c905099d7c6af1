"""The loss and its gradients of a head whose three GEMMs multiply FP8 tensors, with few passes over memory.

It quantizes as `mxjax.dot` of all tokens would, whose logits exist one piece at a time, with one difference.
The gradient of the logits is cast where it is computed, so that it is never written in float32; its scale is
known before it: softmax - onehot is at most one in magnitude, and a batch of text has tokens that come close.
`mxjax.dot` reads it from the values. Shapes in names as in `models.decoder`, with P pieces of N tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from models.cross_entropy import logsumexp
from models.sharding import spec, sum_over_rows
from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.use import OperandUse
from mxjax.policy import Policy
from mxjax.products.draws import PolicyUses, uses_of_policy
from mxjax.products.implementations import Implementation, implementations_of
from mxjax.products.multiply import multiply_fp8_tensors
from mxjax.products.prepare import prepare
from mxjax.runtime.devices import current_target
from mxjax.runtime.mesh import Layout, bytes_to_multiply


def fp8_uses(policy: Policy, implementation: Implementation | None) -> PolicyUses | None:
    """Returns the uses of the head's operands if all are FP8 tensors with a current scale, else None."""
    gemms = policy.gemms.values()
    plain = all(o == Operand(o.format) for gemm in gemms for o in (gemm.lhs, gemm.rhs))
    if not plain or any(gemm.rotation for gemm in gemms):
        return None
    implementations = implementations_of(policy, implementation)
    return uses_of_policy(policy, implementations, None) if set(implementations) == {"fp8_tensor"} else None


class Pieces(NamedTuple):
    """Pieces of sequences, of which only one has logits at a time; `mask` is 1 for tokens, 0 for filler."""

    x: Float[Array, "P B S D"]
    targets: Int[Array, "P B S"]
    mask: Float32[Array, "P B S"]


def losses_and_gradients(
    uses: PolicyUses,
    weight: float,
    pieces: Pieces,
    w_DV: Float[Array, "D V"],
    tied: bool,
    layout: Layout | None,
) -> tuple[Float32[Array, ""], Float[Array, "P B S D"], Float[Array, "D V"]]:
    """Returns the sum of all losses times `weight`, in nats, and its gradients by x and w.

    Args:
      weight: of each token.
      tied: whether w is a transposed embedding, in whose order its gradient is then summed.
      layout: of w, on a mesh that shards tokens, and weights by their first axis at most.
    """
    P = pieces.x.shape[0]
    x, targets, mask = (t.reshape(P, -1, *t.shape[3:]) for t in pieces)
    x_uses, w_uses = [uses.fprop.lhs, uses.wgrad.lhs], [uses.fprop.rhs, uses.dgrad.rhs]
    of_x = _in_fp8(x, x_uses)
    if tied:
        of_w = _in_fp8(w_DV.T, [use._replace(axis=-3 - use.axis) for use in w_uses])
    else:
        of_w = _in_fp8(w_DV, w_uses)
    run = _Run(uses, weight, tied, x.dtype, layout is not None)
    if layout is None:
        loss, dx, dw = run(of_x, of_w, targets, mask)
    else:
        layouts = layout.transposed, layout
        of_w = [_with(q, bytes_to_multiply(q.elements, to)) for q, to in zip(of_w, layouts, strict=True)]
        loss, dx, dw = _on_each_device(run, of_x, of_w, targets, mask)
    return loss, dx.reshape(pieces.x.shape), (dw.T if tied else dw).astype(w_DV.dtype)


class _Run(NamedTuple):
    """The loop over pieces, of operands of x [P, n, D] and [P, D, n], and of w [V, D] and [D, V]."""

    uses: PolicyUses
    weight: float
    tied: bool
    dtype: Any
    on_mesh: bool

    def __call__(self, of_x, of_w, targets_PN, mask_PN):
        (x_PND, x_PDN), (w_VD, w_DV) = of_x, of_w
        rows, columns = (q.elements.shape[0] for q in (w_VD, w_DV))
        zero = jnp.zeros((rows, columns) if self.tied else (columns, rows), jnp.float32)

        def next_piece(dw, piece):
            of_rows, of_columns, targets_N, mask_N = piece
            x_ND, x_DN = _with(x_PND, of_rows), _with(x_PDN, of_columns)
            logits_NV = multiply_fp8_tensors(x_ND, w_VD, jnp.float32).raw
            normalizer_N = logsumexp(logits_NV)
            chosen_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
            loss = jnp.sum(self.weight * mask_N * (normalizer_N - chosen_N))
            is_token = mask_N > 0
            normalizer_N = jnp.where(is_token, normalizer_N, jnp.inf)  # makes their softmax zero
            d_NV, d_VN = self.gradient(logits_NV, normalizer_N, jnp.where(is_token, targets_N, -1))
            dx_ND = multiply_fp8_tensors(d_NV, w_DV, self.dtype, whole_sums=self.on_mesh).value(self.dtype)
            pair = (d_VN, x_DN) if self.tied else (x_DN, d_VN)
            return dw + multiply_fp8_tensors(*pair, jnp.float32).raw, (loss, dx_ND)

        pieces = x_PND.elements, x_PDN.elements, targets_PN, mask_PN
        dw, (losses, dx_PND) = jax.lax.scan(next_piece, zero, pieces)
        return jnp.sum(losses), dx_PND, dw

    def gradient(self, logits_NV, normalizer_N, targets_N) -> list[KernelOperand]:
        """Returns the gradient of the logits, K-major along the vocabulary and along the tokens."""
        uses, target = (self.uses.dgrad.lhs, self.uses.wgrad.rhs), current_target()
        made = None
        if target is not None:
            from mxjax.kernels.quantize import fp8_logits

            made = fp8_logits.cast_gradient(logits_NV, normalizer_N, targets_N, self.weight, uses, target)
        return made or cast_by_definition(logits_NV, normalizer_N, targets_N, self.weight, uses)


def cast_by_definition(
    logits_NV: Float32[Array, "N V"],
    normalizer_N: Float32[Array, " N"],
    targets_N: Int[Array, " N"],
    weight: float,
    uses: tuple[OperandUse, OperandUse],
) -> list[KernelOperand]:
    """Returns weight * (exp(logits - normalizer) - onehot(target)) in FP8, the largest element `weight`."""
    is_target = jax.lax.broadcasted_iota(targets_N.dtype, logits_NV.shape, 1) == targets_N[:, None]
    softmax_NV = jnp.exp(logits_NV - normalizer_N[:, None])
    gradient_NV = jnp.where(is_target, softmax_NV - 1, softmax_NV)
    made = []
    for use in uses:
        element = get_format(use.operand.format).element
        assert element is not None
        operand = dataclasses.replace(use.operand, scaling="delayed")  # by the scale that is given
        [q] = _in_fp8(gradient_NV, [use._replace(operand=operand, scale=jnp.float32(element.max))])
        made.append(dataclasses.replace(q, tensor_scale=jnp.float32(weight / element.max), amax=None))
    return made


def _in_fp8(x: Float[Array, "..."], uses: Sequence[OperandUse]) -> list[KernelOperand]:
    made = [q for q in prepare(x, uses) if isinstance(q, KernelOperand)]
    assert len(made) == len(uses)
    return made


def _with(q: KernelOperand, elements: jax.Array) -> KernelOperand:
    return dataclasses.replace(q, elements=elements)


def _on_each_device(run: _Run, of_x, of_w, targets_PN, mask_PN):
    """Runs the loop on each device's tokens, and sums the gradient of the weight once."""

    def of_device(*arrays):
        loss, dx, dw = run(*arrays)
        return sum_over_rows(loss), dx, sum_over_rows(dw, scattered="embed", axis=int(run.tied))

    def sharded(q: KernelOperand, axis: int) -> Any:
        elements = spec((None,) * axis + ("rows",))
        return jax.tree.map(lambda t: elements if t is q.elements else spec(()), q)

    rows, whole = spec((None, "rows")), spec(())
    stored = (None, "embed") if run.tied else ("embed", None)
    x_ND, x_DN = of_x
    return jax.shard_map(
        of_device,
        in_specs=([sharded(x_ND, 1), sharded(x_DN, 2)], whole, rows, rows),
        out_specs=(whole, rows, spec(stored)),
        check_vma=False,
    )(of_x, of_w, targets_PN, mask_PN)
