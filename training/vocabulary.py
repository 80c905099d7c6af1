"""The vocabulary on a mesh: filler in the embedding and the head, so that the axis `tensor` divides them.

Training states are filled. Checkpoints, evaluations of them and exports have the model's own vocabulary, so
that a run can resume on any mesh. Filler is zero and stays zero: no token looks it up, and the loss masks its
logits (`models.loss`).

Megatron fills likewise, to a multiple of 128 times the tensor-parallel size, and keeps it in checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from models.configs import LlamaConfig
from models.llama import AXES
from models.sharding import spec
from mxjax.layers import LayerPolicies
from training.parameter_sharding import weight_unit


def filled_size(sizes: Mapping[str, int], config: LlamaConfig, policies: Sequence[LayerPolicies]) -> int:
    """Returns the model's vocabulary, filled so that each device of a `tensor` group gets whole units.

    Args:
      sizes: the size of each mesh axis.
      config: the model.
      policies: the policies of all phases; the head's decide the unit, see `weight_unit`.
    """
    if sizes["tensor"] == 1:
        return config.vocab_size
    multiple = sizes["tensor"] * math.lcm(*(weight_unit(of_phase["head"]) for of_phase in policies))
    return -(-config.vocab_size // multiple) * multiple


def resize(tree: Any, size: int) -> Any:
    """Returns parameters, or a training state, whose vocabulary is cut, or filled with zeros, to `size`."""

    def of_leaf(path: Any, x: Array) -> Array:
        axes = _axes(path)
        return _resize(x, axes.index("vocab"), size) if "vocab" in axes else x

    return jax.tree.map_with_path(of_leaf, tree)


def resize_on(mesh: Mesh, tree: Any, size: int) -> Any:
    """Returns `resize` of arrays on a mesh, sharded over `tensor` if it divides `size`."""
    kept = {"vocab"} if size % mesh.shape["tensor"] else set()

    def of_leaf(path: Any, x: Array) -> Array:
        axes = _axes(path)
        if "vocab" not in axes or x.shape[axes.index("vocab")] == size:
            return x
        sharding = NamedSharding(mesh, spec([None if axis in kept else axis for axis in axes]))
        return jax.jit(_resize, static_argnums=(1, 2), out_shardings=sharding)(x, axes.index("vocab"), size)

    return jax.tree.map_with_path(of_leaf, tree)


def _axes(path: Any) -> tuple[str, ...]:
    """Returns the logical axes of an embedding or head, or of its moments; none for other arrays."""
    name = getattr(path[-1], "key", None)
    return AXES[name] if name in ("embedding", "head") else ()


def _resize(x: Array, axis: int, size: int) -> Array:
    if size <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
