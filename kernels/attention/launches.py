"""Launches of the attention kernels, on whole arrays or shards of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from mxjax.kernels.attention.backward import key_gradients_kernel, query_gradients_kernel
from mxjax.kernels.attention.blocks import OPTIONS, Blocks, candidates, table_of
from mxjax.kernels.attention.forward import forward_kernel
from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.runtime.devices import Target

Queries = Float[Array, "B S G R H"]
Keys = Float[Array, "B S G H"]
Rows = Float[Array, "B G R S"]
Mask = Int32[Array, "B S"]
Sinks = Float32[Array, "B G R"]

BLOCK_MULTIPLE = 128
"""Of all blocks' queries and keys."""


def forward(
    q: Queries,
    k: Keys,
    v: Keys,
    target: Target | None,
    blocks: Blocks | None = None,
    *,
    first_key: Mask | None = None,
    sinks: Sinks | None = None,
    causal: bool = True,
) -> tuple[Queries, Rows]:
    """Returns attention's result and the natural logarithm of each query's sum of exp(scores).

    The sum includes the head's sink. If not `causal`, queries see keys to the last, S is a multiple of
    BLOCK_MULTIPLE, and `first_key` is given and may be S: such a query sees none.
    """
    b, s, g, r, h = q.shape
    blocks = blocks or candidates(target, h).forward[0]
    out, lse = triton_call(
        forward_kernel,
        *(q, k, v, q if first_key is None else first_key, q if sinks is None else sinks),
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, g, r, s), jnp.float32)],
        grid=grid_of("forward", q.shape, blocks),
        SINKS=sinks is not None,
        **_arguments(q, blocks, target, first_key, causal),
    )
    return out, lse


def backward(
    q: Queries,
    k: Keys,
    v: Keys,
    out: Queries,
    lse: Rows,
    dout: Queries,
    target: Target | None,
    *,
    first_key: Mask | None = None,
    sinks: Sinks | None = None,
    causal: bool = True,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of q, k, v, and of `sinks` if they are given."""
    delta = row_products(out, dout)
    dk, dv = key_gradients(q, k, v, dout, lse, delta, target, first_key=first_key, causal=causal)
    dq = query_gradients(q, k, v, dout, lse, delta, target, first_key=first_key, causal=causal)
    if sinks is None:
        return dq, dk, dv
    # A sink's weight has the value 0, so only the softmax's sum passes its gradient on.
    return dq, dk, dv, -jnp.sum(jnp.exp(sinks[..., None] - lse) * delta, axis=-1)


def queries_end(first_key: Mask) -> Mask:
    """Returns for each key the first later query that no longer sees it, the length if all do."""

    def of_sequence(row):
        return jnp.cumsum(jnp.zeros_like(row).at[row].add(1, mode="drop"))

    return jax.vmap(of_sequence)(first_key)


def row_products(out: Queries, dout: Queries) -> Rows:
    """Returns the sum of out * dout over each row of a head, in float32."""
    products = out.astype(jnp.float32) * dout.astype(jnp.float32)
    return jnp.sum(products, axis=-1).transpose(0, 2, 3, 1)


def key_gradients(
    q: Queries,
    k: Keys,
    v: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    target: Target | None,
    blocks: Blocks | None = None,
    *,
    first_key: Mask | None = None,
    causal: bool = True,
) -> tuple[Keys, Keys]:
    """Returns the gradients of k and v."""
    blocks = blocks or candidates(target, q.shape[-1]).key_gradients[0]
    mask = (q, q) if first_key is None else (first_key, queries_end(first_key))
    dk, dv = triton_call(
        key_gradients_kernel,
        *(q, k, v, dout, lse, delta, *mask),
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        grid=grid_of("key_gradients", q.shape, blocks),
        **_arguments(q, blocks, target, first_key, causal),
    )
    return dk, dv


def query_gradients(
    q: Queries,
    k: Keys,
    v: Keys,
    dout: Queries,
    lse: Rows,
    delta: Rows,
    target: Target | None,
    blocks: Blocks | None = None,
    *,
    first_key: Mask | None = None,
    causal: bool = True,
) -> Queries:
    """Returns the gradient of q."""
    blocks = blocks or candidates(target, q.shape[-1]).query_gradients[0]
    [dq] = triton_call(
        query_gradients_kernel,
        *(q, k, v, dout, lse, delta, q if first_key is None else first_key),
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=grid_of("query_gradients", q.shape, blocks),
        **_arguments(q, blocks, target, first_key, causal),
    )
    return dq


def _arguments(
    q: jax.Array, blocks: Blocks, target: Target | None, first_key: Mask | None, causal: bool
) -> dict[str, Any]:
    """Returns a launch's arguments. A kernel does not read the pointers of what is not given: any will do."""
    return {
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "options": OPTIONS.get(table_of(target), {}),
        "multiplies": True,
        "CAUSAL": causal,
        "MASKED": first_key is not None,
        **dict(zip("BSGRH", q.shape, strict=True)),
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "XCDS": 8 if table_of(target) == "gfx950" else 1,
    }


def grid_of(which: str, shape: tuple[int, ...], blocks: Blocks) -> tuple[int]:
    """Returns the number of programs of a kernel, by its field in `blocks.Kernels`, for q of this shape."""
    b, s, g, r, _ = shape
    if which == "key_gradients":
        return (b * g * ceil_div(s, blocks.keys),)
    return (b * g * r * ceil_div(s, blocks.queries),)
