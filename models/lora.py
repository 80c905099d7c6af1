"""LoRA: low-rank adapters beside the linear layers of the blocks, whose own weights are frozen.

A layer with weights W computes x W + x A B. x W runs in the layer's policy, A and B in bfloat16; only they
train. B begins at zero. Frozen weights are arrays, or packed MXFP4 of 4.25 bits each, which a layer unpacks
where it multiplies. Experts have no adapters.

Adapters are nested dicts as parameters are, such as {"blocks": {"mlp": {"down": {"a": A, "b": B}}}}, stacked
over layers. Packed weights are {"codes", "scales"} in place of an array [layers, d_in, d_out]: uint8
[layers, d_in / 2, d_out], element 2i in the low nibble, and uint8 [layers, d_in / 32, d_out], E8M0 bytes.

Source: "LoRA", arXiv 2106.09685, with alpha = r, which is PEFT's default: no factor before A B.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

import mxjax
from mxjax.numerics.array import MXArray
from mxjax.numerics.formats import BLOCK

Tree = dict[str, Any]
BYTES_PACKED = (1 + 2 / BLOCK) / 2
"""The memory of a packed weight: 4.25 bits."""
_MXFP4: dict[str, Any] = {"format": "mxfp4", "axis": -2, "block_shape": (1, BLOCK)}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["frozen", "a", "b"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A linear layer's weights [*layers, d_in, d_out] with an adapter, in place of a parameter.

    Attributes:
      frozen: the weights, an array or packed.
      a: [*layers, d_in, rank].
      b: [*layers, rank, d_out].
    """

    frozen: Any
    a: Array
    b: Array

    def __getitem__(self, index: Any) -> "Adapted":
        """Returns itself, as a parameter in Flax is read by `[...]`."""
        return self

    def values(self) -> Float32[Array, "*layers d_in d_out"]:
        """Returns the frozen weights in float32."""
        return dense(self.frozen)

    def product(self, x: Float[Array, "*B d_in"], dot: Callable[[Array, Any], Array]) -> Array:
        """Returns x W + x A B in the dtype of `dot`, which multiplies x by W."""

        @jax.checkpoint  # which keeps packed weights for the backward pass, not unpacked ones
        def frozen_product(x, frozen):
            return dot(x, _mxarray(frozen) if _is_packed(frozen) else jax.lax.stop_gradient(frozen))

        y = frozen_product(x, self.frozen)
        low = mxjax.dot(x, self.a, policy="bf16", preferred_element_type=x.dtype)
        return y + mxjax.dot(low, self.b, policy="bf16", preferred_element_type=y.dtype)


def adapters(weights: Mapping[str, Any], rank: int, key: jax.Array) -> Tree:
    """Returns adapters of weights [layers, d_in, d_out] by the layers' names, such as "mlp.down".

    A is uniform within 1 / sqrt(d_in), PEFT's initialization.
    """
    found: Tree = {}
    for i, (name, w) in enumerate(weights.items()):
        module, matrix = name.split(".")
        layers, d_in, d_out = w.shape
        bound = 1 / math.sqrt(d_in)
        a = jax.random.uniform(jax.random.fold_in(key, i), (layers, d_in, rank), minval=-bound, maxval=bound)
        b = jnp.zeros((layers, rank, d_out))
        found.setdefault(module, {})[matrix] = {"a": a, "b": b}
    return {"blocks": found}


def attach(adapters: Tree, frozen: Tree) -> Tree:
    """Returns parameters for `models.decoder`: frozen ones, with `Adapted` where there are adapters."""
    return _with_blocks(frozen, lambda old, new: Adapted(old, **_in_float32(new)), adapters["blocks"])


def merged(params: Tree) -> Tree:
    """Returns parameters in float32 arrays: W + A B where `attach` put both."""

    def of_leaf(w):
        if not isinstance(w, Adapted):
            return w
        product = jnp.matmul(w.a, w.b, precision="highest")
        return w.values() + product

    return jax.tree.map(of_leaf, params, is_leaf=lambda w: isinstance(w, Adapted))


def packed_layers(params: Tree) -> list[str]:
    """Returns the names of the layers whose weights are packed, such as "mlp.down"."""
    return [
        f"{module}.{name}"
        for module, weights in params.get("blocks", {}).items()
        for name, w in weights.items()
        if _is_packed(w)
    ]


def packed_like(params: Tree, layers: Collection[str]) -> Tree:
    """Returns shapes of parameters, with packed weights in the layers of these names."""

    def of_weights(w, _):
        *stacked, d_in, d_out = w.shape
        sizes = {"codes": d_in // 2, "scales": d_in // BLOCK}
        return {k: jax.ShapeDtypeStruct((*stacked, n, d_out), jnp.uint8) for k, n in sizes.items()}

    by_module: Tree = {}
    for layer in layers:
        module, name = layer.split(".")
        by_module.setdefault(module, {})[name] = None
    return _with_blocks(params, of_weights, by_module)


def part_of(params: Tree, part: str) -> Tree:
    """Returns parameters with "codes" or "scales" in place of packed weights."""
    return jax.tree.map(lambda w: w[part] if _is_packed(w) else w, params, is_leaf=_is_packed)


def unpacked(params: Tree) -> Tree:
    """Returns parameters with packed weights as float32 arrays."""
    return jax.tree.map(lambda w: dense(w) if _is_packed(w) else w, params, is_leaf=_is_packed)


def dense(weights: Any) -> Array:
    """Returns weights, an array or packed, as a float32 array of the same values."""
    if _is_packed(weights):
        return mxjax.dequantize(_mxarray(weights))
    return jnp.asarray(weights, jnp.float32)


def _mxarray(packed: Mapping[str, Array]) -> MXArray:
    scales = jax.lax.bitcast_convert_type(packed["scales"], jnp.float8_e8m0fnu)
    return MXArray(mxjax.unpack(packed["codes"], axis=-2), scales, None, **_MXFP4)


def _is_packed(weights: Any) -> bool:
    return isinstance(weights, Mapping) and "codes" in weights


def _in_float32(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: w.astype(jnp.float32) for name, w in arrays.items()}


def _with_blocks(params: Tree, change: Callable[[Any, Any], Any], by_module: Mapping[str, Any]) -> Tree:
    """Returns parameters with `change(old, other)` in place of the blocks' matrices that `by_module` has."""
    if not by_module:
        return params
    blocks = dict(params["blocks"])
    for module, others in by_module.items():
        blocks[module] = blocks[module] | {n: change(blocks[module][n], other) for n, other in others.items()}
    return params | {"blocks": blocks}
