"""JAX's random keys: what is drawn and folded from many of them at once."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Key


def as_key(key: jax.Array) -> Key[Array, "*shape"]:
    """Returns keys as typed ones, also of `jax.random.PRNGKey`."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def check_one_key(key: object) -> None:
    """Raises TypeError unless `key` is one JAX key, typed or of `jax.random.PRNGKey`."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(
            f"key must be a JAX key, got {key!r}; pass jax.random.key(0), folded with the step and the layer"
        )
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if is_typed else 1) or not (is_typed or key.dtype == jnp.uint32):
        raise TypeError(
            f"key must be one JAX key, got an array {key.dtype}{list(key.shape)}; pass one of its keys, or "
            "use jax.vmap over them"
        )


def over_keys(
    function: Callable[..., jax.Array], keys: Key[Array, "*shape"], *arrays: jax.Array
) -> jax.Array:
    """Returns function(key, *elements) for every key of an array and the same elements of other arrays."""
    if str(jax.random.key_impl(keys)) == "threefry2x32":
        for _ in keys.shape:
            function = jax.vmap(function)
        return function(keys, *arrays)
    # Other generators draw otherwise under vmap.
    words, impl = jax.random.key_data(keys), jax.random.key_impl(keys)
    rows = words.reshape(-1, words.shape[-1]), *(a.reshape(-1) for a in arrays)
    each = [function(jax.random.wrap_key_data(row, impl=impl), *at) for row, *at in zip(*rows, strict=True)]
    return jnp.stack(each).reshape(*keys.shape, *each[0].shape)


def fold_each(keys: jax.Array, start: int, stop: int) -> Key[Array, "*shape n"]:
    """Returns `jax.random.fold_in(key, i)` for i from start to stop - 1, of every key in an array of keys.

    A barrier follows: otherwise XLA folds them again wherever one is used, and takes minutes to fuse a
    model's training step. It holds the keys' words: JAX counts keys in a barrier as consumed.
    """
    keys = as_key(keys)
    shape = *keys.shape, stop - start
    keys, numbers = (jnp.broadcast_to(a, shape) for a in (keys[..., None], jnp.arange(start, stop)))
    words = over_keys(lambda key, i: jax.random.key_data(jax.random.fold_in(key, i)), keys, numbers)
    return jax.random.wrap_key_data(lax.optimization_barrier(words), impl=jax.random.key_impl(keys))


def fold(key: jax.Array | None, *indices: int) -> jax.Array | None:
    """Returns the key with the indices folded in, or None without a key.

    Rematerialization draws the same bits again, because this is a pure function of the key.
    """
    if key is None:
        return None
    return functools.reduce(jax.random.fold_in, indices, key)
