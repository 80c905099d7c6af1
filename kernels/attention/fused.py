"""Fused causal attention with its gradients: AMD's kernels where there are any, else Triton's here.

The scores never reach memory. The forward pass keeps the result and, for each query, the logarithm of its sum
of exp(scores); the backward pass recomputes the weights from them. Meshes shard the batch and the heads.
Documents and sliding windows are one mask, `first_key`: the first key that each query sees.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mxjax.kernels.attention import aiter, launches
from mxjax.kernels.attention.blocks import HEAD_SIZES
from mxjax.kernels.mesh import batched_by_vmap, partitioned
from mxjax.runtime.devices import Target, current_target
from mxjax.runtime.mesh import on_auto_axes, varying_as
from mxjax.runtime.remat import tag_attention

_QUERIES, _KEYS, _ROWS, _MASK, _SINKS = "b s g r h", "b t g h", "b g r s", "b s", "b g r"
_WHOLE = ("s", "r", "h", "t")  # as they appear in the rules


def fused_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G H"],
    *,
    first_key: Int32[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q @ k.T / sqrt(H)) @ v, where each position sees itself and earlier ones.

    Query head n reads key and value head n // (N / G). The softmax is in float32; its weights are rounded to
    bfloat16 before they are multiplied. NaN in what a query sees makes its result NaN. Infinity or NaN in
    later keys and values may too, since they are multiplied by 0.

    Args:
      q, k, v: bfloat16; heads of 64 or 128; any length.
      first_key: the first key that each query sees, for documents and windows: between 0 and the query's own
        position, and never less than the query's before. Blocks of keys that no query of a block sees cost
        nothing. None is 0 everywhere.
      sinks: a logit of each query head that takes part in the softmax and has no value, as in gpt-oss.

    Raises:
      ValueError: shapes that do not match, other heads or dtypes, a sequence of 2**31 elements or more.
    """
    check_operands(q, k, v, first_key, sinks)
    if 0 in (*q.shape, *k.shape):
        return jnp.zeros_like(q)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), (q.shape[0], q.shape[2]))
    extra = [x for x in (first_key, sinks) if x is not None]
    attend = functools.partial(_attend, masked=first_key is not None)
    return on_auto_axes(attend, q, k, kept=(range(4), ()))(q, k, v, *extra)


def check_operands(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_key: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> None:
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
    if first_key is not None and (first_key.shape != q.shape[:2] or first_key.dtype != jnp.int32):
        raise ValueError(
            f"fused_attention needs first_key int32[B, S], got {first_key.dtype}{list(first_key.shape)}, "
            f"{shapes}"
        )
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"fused_attention needs sinks [N], got {list(sinks.shape)}, {shapes}")


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array, masked: bool) -> jax.Array:
    b, s, n, h = q.shape
    g = k.shape[2]
    q, k, v, *extra = (varying_as(x, q, k, v) for x in (q, k, v, *extra))
    if len(extra) > masked:
        extra[-1] = extra[-1].reshape(b, g, n // g)
    target = current_target()
    by_aiter = aiter.is_available(target, with_sinks=len(extra) > masked)
    attend = _differentiable(by_aiter, target, masked, len(extra) > masked)
    return attend(q.reshape(b, s, g, n // g, h), k, v, *extra).reshape(b, s, n, h)


@functools.cache
def _differentiable(
    by_aiter: bool, target: Target | None, masked: bool, with_sinks: bool
) -> Callable[..., jax.Array]:
    """Returns attention with its gradients.

    Its arguments are q, k, v, `first_key` if `masked` and sinks if `with_sinks`.
    """
    kernels = aiter if by_aiter else launches
    names = ["first_key"] * masked + ["sinks"] * with_sinks
    extra = [_MASK] * masked + [_SINKS] * with_sinks

    def by_name(run: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = len(arrays) - len(names)
        return run(*arrays[:given], target=target, **dict(zip(names, arrays[given:], strict=True)))

    forward = _on_shards(
        functools.partial(by_name, kernels.forward),
        f"{', '.join((_QUERIES, _KEYS, _KEYS, *extra))} -> {_QUERIES}, {_ROWS}",
    )
    backward = _on_shards(
        functools.partial(by_name, kernels.backward),
        f"{', '.join((_QUERIES, _KEYS, _KEYS, _QUERIES, _ROWS, _QUERIES, *extra))} -> "
        f"{', '.join((_QUERIES, _KEYS, _KEYS, *[_SINKS] * with_sinks))}",
    )

    @jax.custom_vjp
    def attend(q, k, v, *extra):
        return forward(q, k, v, *extra)[0]

    def attend_fwd(q, k, v, *extra):
        out, lse = tag_attention(tuple(forward(q, k, v, *extra)))
        return out, (q, k, v, out, lse, extra)

    def attend_bwd(residuals, dout):
        *residuals, extra = residuals
        dq, dk, dv, *d_sinks = backward(*residuals, dout, *extra)
        return dq, dk, dv, *[None] * masked, *d_sinks

    attend.defvjp(attend_fwd, attend_bwd)
    return attend


def _on_shards(run: Callable[..., tuple[jax.Array, ...]], rule: str) -> Callable[..., list[jax.Array]]:
    """Returns `run` on meshes, where each device takes its shard; vmap enlarges the batch."""

    def part(*arrays):
        return list(run(*arrays))

    return batched_by_vmap(partitioned(part, rule, {}, _WHOLE))
