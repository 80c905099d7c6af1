"""`product_of`: `matmul` as a primitive, so that `jax.vmap` of it is one product, not many small ones.

Under vmap of x alone, the mapped axis joins the tokens, and Wgrad contracts, rotates and rounds all of them.
Where w is mapped too, the mapped axis is a batch axis. Both give the bits of the call without vmap. Where the
key is mapped, each call has random bits of its own, as in a loop.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.matmul import Options, Weight, matmul
from mxjax.primitive import as_primitive
from mxjax.quantize import MXArray


def product_of(options: Options, x: jax.Array, w: Weight | MXArray, key: jax.Array | None) -> jax.Array:
    """Returns `matmul(options, x, w, key)`."""
    if isinstance(w, MXArray):
        leaves, frozen = jax.tree.flatten(w)
        options, w = options._replace(frozen=frozen), tuple(leaves)
    return _matmul(options, x, w, key)


def _batch(options: Options, operands, axes) -> tuple[jax.Array, int]:
    x, w, key = operands
    x_axis, w_axis, _ = axes
    others = jax.tree.leaves(axes[1:])  # without those that are not mapped
    if not others:
        return _join_tokens(options, jnp.moveaxis(x, x_axis, -3), w, key)
    if options.frozen is not None or w_axis is None or len(others) > 1:
        mapped = jax.vmap(lambda x, w, key: matmul(options, x, w, key), axes)
        return mapped(x, w, key), 0
    size = w.shape[w_axis]
    return _stack(options, _mapped_first(x, x_axis, size), _mapped_first(w, w_axis, size), key)


_matmul = as_primitive("mxjax_matmul", matmul, _batch)


def _join_tokens(options: Options, x: jax.Array, w: Any, key: Any) -> tuple[jax.Array, int]:
    """Returns the product of x [*batch, mapped, m, k], and its mapped axis."""
    *batch, mapped, m, k = x.shape
    y = product_of(options, x.reshape(*batch, mapped * m, k), w, key)
    return y.reshape(*batch, mapped, m, y.shape[-1]), len(batch)


def _stack(options: Options, x: jax.Array, w: jax.Array, key: jax.Array | None) -> tuple[jax.Array, int]:
    """Returns the product of x [mapped, *batch, m, k] and w [mapped, *batch, k, n], and its mapped axis."""
    layout = options.gemms.layout
    if layout is not None:
        options = options._replace(gemms=options.gemms._replace(layout=layout.stacked))
    stack = x.shape[:-2]
    x, w = (t.reshape(math.prod(stack), *t.shape[-2:]) for t in (x, w))
    y = product_of(options, x, w, key)
    return y.reshape(*stack, *y.shape[-2:]), 0


def _mapped_first(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
