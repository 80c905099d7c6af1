"""The largest absolute value of each array of a model, layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def largest_values(tree: Any) -> Float32[Array, " layers"]:
    """Returns the largest absolute value of each array; arrays under `blocks` give one value a layer."""
    parts = [_largest(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return jnp.concatenate(parts)


def layer_names(tree: Any) -> list[str]:
    """Returns the name of each of `largest_values`, such as blocks.0.mlp.down."""
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(part.key) for part in path]
        if keys[0] == "blocks":
            names += [".".join(["blocks", str(i), *keys[1:]]) for i in range(leaf.shape[0])]
        else:
            names.append(".".join(keys))
    return names


def _largest(path: Any, leaf: Array) -> Float32[Array, " layers"]:
    axes = tuple(range(1 if path[0].key == "blocks" else 0, leaf.ndim))
    return jnp.atleast_1d(jnp.max(jnp.abs(leaf), axis=axes)).astype(jnp.float32)
