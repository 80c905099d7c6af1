"""Moments and parameters that are stored in bfloat16 and computed in float32.

They are rounded stochastically: to nearest, a change below half a unit in the last place, 1/512 of a value,
would be lost at every step. Bits are a function of the step's key, of the array and of an element's position,
by the generator of `mxjax.numerics.philox`, so that a resumed run and a mesh draw the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from mxjax.numerics.philox import random_uint16
from mxjax.runtime.keys import fold_each

_FOLD = 2**32 - 1  # of a step's key: no block, part of a batch or loss folds it in


def stochastic_round(x: Float32[Array, "*shape"], key: jax.Array) -> BFloat16[Array, "*shape"]:
    """Returns one of bfloat16's neighbours of each x, with x as their mean.

    Values of the grid do not move, nor do infinities and NaN. A finite value stays finite: beyond the largest
    one it is rounded towards zero.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = bits + random_uint16(key, x.shape).astype(jnp.uint32)
    is_finite = jnp.isfinite(lax.bitcast_convert_type(rounded, jnp.float32))
    kept = jnp.where(jnp.isfinite(x) & is_finite, rounded, bits) & jnp.uint32(0xFFFF_0000)
    # A NaN whose payload lies in the lower half would become an infinity.
    kept = jnp.where(jnp.isnan(x), jnp.uint32(0x7FC0_0000), kept)
    return lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)


def as_float32(tree: Any) -> Any:
    """Returns a tree with its arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def with_bfloat16_moments(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with every array of its state that belongs to a parameter in bfloat16.

    Its `update` takes `key=`, that of the step.
    """

    def convert(state, change):
        return optax.tree.map_params(
            inner,
            lambda x: x if isinstance(x, optax.MaskedNode) else change(x),
            state,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )

    def init(params):
        return convert(inner.init(params), lambda x: x.astype(jnp.bfloat16))

    def update(updates, state, params=None, **extra):
        updates, state = inner.update(updates, convert(state, as_float32), params, **extra)
        moments: list[Array] = []
        convert(state, moments.append)  # in the order of the next call
        rounded = iter(_rounded(moments, extra, _FOLD))
        return updates, convert(state, lambda _: next(rounded))

    return optax.GradientTransformationExtraArgs(init, update)


def with_bfloat16_parameters(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer for parameters in bfloat16, which it updates in float32.

    Its `update` takes `key=`, that of the step. Its updates are float32: added to a parameter they give the
    rounded one up to the rounding of that sum.
    """

    def init(params):
        return inner.init(as_float32(params))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("an optimizer that rounds parameters needs them: pass params to its update")
        wide = as_float32(params)
        updates, state = inner.update(updates, state, wide, **extra)
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.add, wide, updates))
        rounded = jax.tree.unflatten(structure, _rounded(leaves, extra, _FOLD - 1))
        return jax.tree.map(lambda new, old: new.astype(jnp.float32) - old, rounded, wide), state

    return optax.GradientTransformationExtraArgs(init, update)


def _rounded(arrays: list[Float[Array, "..."]], extra: dict[str, Any], fold: int) -> list[Array]:
    """Returns the arrays in bfloat16, each with bits of its own."""
    if (key := extra.get("key")) is None:
        raise ValueError("an optimizer that rounds needs the step's random bits; pass key= to its update")
    keys = fold_each(jax.random.fold_in(key, fold), 0, len(arrays))
    return [stochastic_round(x, key) for x, key in zip(arrays, keys, strict=True)]
