"""The largest absolute values of a model's arrays, by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def amax(tree: Any) -> Float32[Array, " layers"]:
    """Returns the largest absolute value in each array of a tree, of arrays in `blocks` for each layer."""
    parts = [_amax(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return jnp.concatenate(parts)


def amax_names(tree: Any) -> list[str]:
    """Returns what the values of `amax` are of, such as blocks.0.mlp.down.kernel."""
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(part.key) for part in path]
        if keys[0] == "blocks":
            names += [".".join(["blocks", str(i), *keys[1:]]) for i in range(leaf.shape[0])]
        else:
            names.append(".".join(keys))
    return names


def _amax(path: Any, leaf: Array) -> Float32[Array, " layers"]:
    axes = tuple(range(1 if path[0].key == "blocks" else 0, leaf.ndim))
    return jnp.atleast_1d(jnp.max(jnp.abs(leaf), axis=axes)).astype(jnp.float32)
