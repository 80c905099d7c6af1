"""Fused causal attention with its gradients: AMD's kernels where JAX has them, else the Triton kernels here.

The scores never reach memory. The forward pass keeps the result and, for each query, the logarithm of its sum
of exp(scores); the backward pass recomputes the weights from them. Meshes shard the batch and the heads.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from mxjax.kernels.attention import aiter, launches
from mxjax.kernels.attention.blocks import HEAD_SIZES
from mxjax.kernels.mesh import partitioned
from mxjax.runtime.devices import Target, current_target
from mxjax.runtime.mesh import on_auto_axes, varying_as
from mxjax.runtime.remat import tag_attention

_FORWARD_RULE = "b s g r h, b t g h, b t g h -> b s g r h, b g r s"
_BACKWARD_RULE = "b s g r h, b t g h, b t g h, b s g r h, b g r s, b s g r h -> b s g r h, b t g h, b t g h"
_WHOLE = ("s", "r", "h", "t")  # as they appear in the rules


def fused_attention(
    q: Float[Array, "B S N H"], k: Float[Array, "B S G H"], v: Float[Array, "B S G H"]
) -> Float[Array, "B S N H"]:
    """Returns softmax(q @ k.T / sqrt(H)) @ v, where each position sees itself and earlier ones.

    Query head n reads key and value head n // (N / G). The softmax is in float32; its weights are rounded to
    bfloat16 before they are multiplied. NaN in what a query sees makes its result NaN. Infinity or NaN in
    later keys and values may too, since they are multiplied by 0.

    Args:
      q, k, v: bfloat16; heads of 64 or 128; any length.

    Raises:
      ValueError: shapes that do not match, other heads or dtypes, a sequence of 2**31 elements or more.
    """
    check_operands(q, k, v)
    if 0 in (*q.shape, *k.shape):
        return jnp.zeros_like(q)
    return on_auto_axes(_attend, q, k, kept=(range(4), ()))(q, k, v)


def check_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raises ValueError unless the kernels take these arrays."""
    shapes = f"got q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}, v {v.dtype}{list(v.shape)}"
    if any(x.ndim != 4 for x in (q, k, v)) or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        raise ValueError(f"fused_attention needs q [B, S, N, H] and k, v [B, S, G, H], {shapes}")
    if q.shape[3] != k.shape[3] or q.shape[3] not in HEAD_SIZES or q.shape[2] % max(k.shape[2], 1):
        raise ValueError(
            f"fused_attention needs equal heads of {HEAD_SIZES[0]} or {HEAD_SIZES[1]}, "
            f"and N a multiple of G, {shapes}"
        )
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        raise ValueError(f"fused_attention needs bfloat16, {shapes}; cast them")
    if q.shape[1] * q.shape[2] * q.shape[3] >= 2**31:
        raise ValueError(f"fused_attention needs S N H below 2**31 for 32-bit offsets, {shapes}")


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    b, s, n, h = q.shape
    g = k.shape[2]
    q, k, v = (varying_as(x, q, k, v) for x in (q, k, v))
    target = current_target()
    out = _differentiable(aiter.is_available(target), target)(q.reshape(b, s, g, n // g, h), k, v)
    return out.reshape(b, s, n, h)


@functools.cache
def _differentiable(by_aiter: bool, target: Target | None) -> Callable[..., jax.Array]:
    """Returns attention with its gradients, a separate function for each target: JAX caches its trace."""
    kernels = aiter if by_aiter else launches
    forward = _on_shards(functools.partial(kernels.forward, target=target), _FORWARD_RULE)
    backward = _on_shards(functools.partial(kernels.backward, target=target), _BACKWARD_RULE)

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def attend_fwd(q, k, v):
        out, lse = tag_attention(tuple(forward(q, k, v)))
        return out, (q, k, v, out, lse)

    def attend_bwd(residuals, dout):
        return tuple(backward(*residuals, dout))

    attend.defvjp(attend_fwd, attend_bwd)
    return attend


def _on_shards(run: Callable[..., tuple[jax.Array, ...]], rule: str) -> Callable[..., list[jax.Array]]:
    """Returns `run` on meshes, where each device takes its shard; vmap enlarges the batch."""

    def part(*arrays):
        return list(run(*arrays))

    on_mesh = partitioned(part, rule, {}, _WHOLE)

    @custom_vmap
    def call(*arrays):
        return on_mesh(*arrays)

    @call.def_vmap
    def _(size, mapped, *arrays):
        arrays = [
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(arrays, mapped, strict=True)
        ]
        results = call(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        return [y.reshape(size, -1, *y.shape[1:]) for y in results], [True] * len(results)

    return call
