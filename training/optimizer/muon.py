"""Muon for the matrices of the blocks of `models.decoder`, each orthogonalized by itself.

Parameters are stacked over layers, and some hold several matrices side by side: qkv those of query, key and
value, grouped by key/value head, and gate_up those of gate and up projection. A matrix is what multiplies a
token's vector: each of these in each layer, and of each expert. Moments have the shapes of the parameters, so
that they are sharded like them.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, by
`optax.contrib.scale_by_muon`; for the consistent root mean square arXiv 2502.16982, section 2.2.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from models.configs import DecoderConfig
from models.gemms import WEIGHT_AXES
from training.memory import device_bytes, in_float32

_MATRICES = tuple(f"blocks.{name}" for name in WEIGHT_AXES if name != "mlp.router")


def is_matrix(path: Any) -> bool:
    """Returns whether Muon takes a parameter: the blocks' matrices, without routers, norms and biases."""
    return ".".join(str(part.key) for part in path) in _MATRICES


def muon(model: DecoderConfig, momentum: float, consistent_rms: float | None) -> optax.GradientTransformation:
    """Returns the direction of an update of parameters that `is_matrix` accepts, before the learning rate.

    It is U V^T of the momentum U S V^T of each matrix, as far as five Newton-Schulz iterations go, times
    `sqrt(max(d_in, d_out)) * consistent_rms`, which has about that root mean square, or without it times
    `sqrt(max(1, d_out / d_in))`. The momentum is Nesterov's and corrected for its beginning at zero.
    """
    inner = optax.contrib.scale_by_muon(
        beta=momentum,
        weight_dimension_numbers=lambda parts: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), parts
        ),
    )

    def split(tree):
        return jax.tree.map_with_path(lambda path, x: split_matrices(model, path, x), tree)

    def merge(tree, like):
        return jax.tree.map_with_path(lambda path, _, parts: _merge(model, path, parts), like, tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        new: Any
        directions, new = inner.update(split(updates), state._replace(mu=split(state.mu)))
        scaled = jax.tree.map(lambda x: _scale(x.shape, consistent_rms) * x, directions)
        return merge(scaled, updates), new._replace(mu=merge(new.mu, updates))

    return optax.GradientTransformation(inner.init, update)


def split_matrices(
    model: DecoderConfig, path: Any, x: Float[Array, "*B d_in d_out"]
) -> tuple[Float[Array, "..."], ...]:
    """Returns the matrices in a parameter, in their order: query, key and value, gate and up, or itself."""
    if path[-1].key.endswith("gate_up"):
        return tuple(jnp.split(x, 2, axis=-1))
    if path[-1].key == "qkv":
        queries = model.n_heads // model.n_kv_heads
        grouped = x.reshape(*x.shape[:-1], model.n_kv_heads, queries + 2, model.head_dim)
        parts = jnp.split(grouped, [queries, queries + 1], axis=-2)
        return tuple(part.reshape(*x.shape[:-1], -1) for part in parts)
    return (x,)


def _merge(model: DecoderConfig, path: Any, parts: tuple[Array, ...]) -> Array:
    """Returns the parameter whose matrices these are: the inverse of `split_matrices`."""
    if path[-1].key == "qkv":
        heads = [p.reshape(*p.shape[:-1], model.n_kv_heads, -1, model.head_dim) for p in parts]
        return jnp.concatenate(heads, axis=-2).reshape(*parts[0].shape[:-1], model.qkv_size)
    return jnp.concatenate(parts, axis=-1)


def working_bytes(params: Any) -> int:
    """Returns the temporary bytes of an update on one device: all directions, four times the largest."""
    named = jax.tree.leaves_with_path(in_float32(params))
    sizes = [device_bytes(x) for path, x in named if is_matrix(path)]
    return sum(sizes) + 4 * max(sizes, default=0)


def _scale(shape: tuple[int, ...], consistent_rms: float | None) -> float:
    d_in, d_out = shape[-2:]
    if consistent_rms is None:
        return math.sqrt(max(1, d_out / d_in))
    return math.sqrt(max(d_in, d_out)) * consistent_rms
