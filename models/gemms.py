"""The GEMMs of a block: each runs through `mxjax.dot` or `mxjax.ragged_dot` in the policy of its layer.

Shapes in names as in `models.decoder`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import mxjax
from models.attention.causal import attend_visible, causal_attention
from models.attention.context import cut, join
from models.attention.documents import visible_keys
from models.attention.ring import ring_attention
from models.configs import DecoderConfig
from models.experts.order import Order
from models.experts.parallel import Exchange
from models.experts.traffic import Traffic
from models.lora import Adapted
from models.sharding import weight_layout
from mxjax.numerics.delayed import Scales
from mxjax.operands.computed import Norm, rms_norm, swiglu
from mxjax.policy import Policy
from mxjax.products.fused import fused_mlp, normed_dot
from mxjax.products.implementations import Implementation
from mxjax.runtime.keys import fold_each
from mxjax.runtime.remat import keep_products, recomputed, tag_product
from mxjax.stats.layers import Amax, Measures, Tensors, probe

BLOCK_LAYERS = (
    "attention.qkv",
    "attention.scores",
    "attention.values",
    "attention.out",
    "mlp.gate_up",
    "mlp.down",
)
"""The GEMMs of a block with an MLP, in the order in which they run."""
LINEAR_LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
"""The GEMMs of a block that multiply weights, in every model; experts' are ragged."""
WEIGHT_AXES = {
    "attention.qkv": ("embed", "heads"),
    "attention.out": ("heads", "embed"),
    "mlp.gate_up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
    "mlp.router": ("embed", "norm"),
    "mlp.shared_gate_up": ("embed", "mlp"),
    "mlp.shared_down": ("mlp", "embed"),
    "dense_mlp.gate_up": ("embed", "mlp"),
    "dense_mlp.down": ("mlp", "embed"),
}
"""The logical axes of the weights, or of an expert's; see `models.sharding`."""
Slot = Measures | Tensors | Amax | Scales
"""An argument of a linear layer whose gradient is what a probe measures, or that of its delayed scales."""
_FUSED_ATTENTION = {mxjax.get_policy("bf16"): jnp.bfloat16, mxjax.get_policy("fp32"): jnp.float32}


def block_layers(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of the GEMMs of a block; `blocks.I.NAME` has a policy of its own."""
    if config.experts is None:
        return BLOCK_LAYERS
    shared = ("mlp.shared_gate_up", "mlp.shared_down") if config.experts.shared else ()
    return (*BLOCK_LAYERS, "mlp.router", *shared)


def linear_layers(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of LINEAR_LAYERS that have one weight a block, and not one an expert."""
    return LINEAR_LAYERS if config.experts is None else ("attention.qkv", "attention.out")


def linear_weights(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights [layers, d_in, d_out] of LINEAR_LAYERS by name, from the blocks' parameters.

    Experts' weights, which have another axis, are left out.
    """
    paths = {name: name.split(".") for name in LINEAR_LAYERS}
    found = {name: blocks[module][matrix] for name, (module, matrix) in paths.items()}
    return {name: w for name, w in found.items() if w.ndim == 3}


class BlockGemms:
    """The GEMMs of one block: each runs in the policy, and with the random bits, of its layer.

    `keys` [policies] are from `block_keys`. `parts` are the rows of a sequence, see
    `models.attention.context`, and `traffic` is how tokens travel to experts, see `models.experts.traffic`.
    `routing` is set by the block's experts, if it has any.
    """

    routing: Any = None

    def __init__(
        self,
        policies: Mapping[str, Policy],
        keys: jax.Array | None,
        implementation: Implementation | None = None,
        slots: Mapping[str, Slot] | None = None,
        parts: int = 1,
        traffic: Traffic | None = None,
    ):
        self.policies = policies
        self.keys = keys
        self.implementation: Implementation | None = implementation
        self.slots = slots
        self.parts = parts
        self.traffic: Traffic | None = traffic

    def dot(self, name: str, x, w, norm: Norm | None = None, dtype: Any = None) -> Array:
        """Returns x @ w for the linear layer `name`, in dtype or x's; x after the norm, if there is one."""
        if isinstance(w, Adapted):
            return self._adapted(name, x if norm is None else rms_norm(x, norm), w, dtype)
        policy, key = self.policies[name], self._key(name)
        slot, scales = None if self.slots is None else self.slots.get(name), self._scales(name)
        options: dict[str, Any] = {
            "policy": policy,
            "key": key,
            "implementation": self.implementation,
            "layout": weight_layout(WEIGHT_AXES[name]),
        }
        if norm is not None:
            if not self._is_probed:
                y = normed_dot(x, norm, w, scales=scales, **options)
                if y is not None:
                    return y
            x = rms_norm(x, norm)
        y = mxjax.dot(x, w, preferred_element_type=dtype or x.dtype, scales=scales, **options)
        return (
            y
            if slot is None or scales is not None
            else probe(policy, self.implementation, y, x, w, key, slot)
        )

    def _adapted(self, name: str, x, w: Adapted, dtype: Any) -> Array:
        """Returns `dot` of x and weights with an adapter."""
        if self._is_probed:  # statistics read the weights' values
            w = dataclasses.replace(w, frozen=w.values())
        return w.product(x, functools.partial(self.dot, name, dtype=dtype))

    def ragged_dot(self, name: str, x, w, order: Order | Exchange) -> Array:
        """Returns the products of each expert's rows in x's dtype, for the layer `name`.

        Only an `Amax`, of all experts, is measured.
        """
        policy, key = self.policies[name], self._key(name)
        y = order.product(
            x,
            w,
            policy=policy,
            key=key,
            implementation=self.implementation,
            preferred_element_type=x.dtype,
        )
        slot = None if self.slots is None else self.slots.get(name)
        measured = isinstance(slot, Amax)
        return tag_product(probe(policy, self.implementation, y, x, w, key, slot) if measured else y)

    def gated_mlp(self, x, norm: Norm, gate_up, down, names=("mlp.gate_up", "mlp.down")) -> Array:
        """Returns swiglu(x @ gate_up) @ down of x after the norm, for the layers `names`."""
        if not self._is_probed and not isinstance(gate_up, Adapted):
            y = fused_mlp(
                x,
                (gate_up, down),
                policies=[self.policies[name] for name in names],
                keys=[self._key(name) for name in names],
                implementation=self.implementation,
                layouts=[weight_layout(WEIGHT_AXES[name]) for name in names],
                norm=norm,
                scales=[self._scales(name) for name in names],
            )
            if y is not None:
                return y
        x = rms_norm(x, norm)
        if isinstance(gate_up, Adapted):  # else XLA's CPU writes out seven constants of the weights' shape
            hidden = keep_products(lambda x, w: swiglu(self.dot(names[0], x, w)))(x, gate_up)
        else:
            hidden = recomputed(swiglu)(self.dot(names[0], x, gate_up))
        return self.dot(names[1], hidden, down)

    def dot_general(self, name: str, lhs, rhs, dimension_numbers) -> Array:
        """Returns the product of two activations in float32, for the layer `name`."""
        return mxjax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type=jnp.float32,
            policy=self.policies[name],
            key=self._key(name),
            implementation=self.implementation,
        )

    def attend(self, q_BSNH, k_BSGH, v_BSGH, first_key_BS=None, sinks_N=None) -> Float[Array, "B S N H"]:
        """Returns causal attention; see `models.attention.causal.causal_attention`."""
        return attend(q_BSNH, k_BSGH, v_BSGH, self, None, first_key_BS, sinks_N)

    def _scales(self, name: str) -> Scales | None:
        slot = None if self.slots is None else self.slots.get(name)
        return slot if isinstance(slot, Scales) else None

    @property
    def _is_probed(self) -> bool:
        """Whether a probe may read the layers' inputs, which kernels would not store."""
        return any(not isinstance(slot, Scales) for slot in (self.slots or {}).values())

    def _key(self, name: str) -> jax.Array | None:
        return None if self.keys is None else self.keys[list(self.policies).index(name)]


def block_keys(key: jax.Array | None, start: int, stop: int, layers: int) -> jax.Array | None:
    """Returns keys [blocks, layers] for `BlockGemms` of blocks start to stop - 1, None without one."""
    if key is None:
        return None
    return fold_each(fold_each(key, start, stop), 0, layers)


def attend(
    q_BSNH, k_BTGH, v_BTGH, gemms: BlockGemms, visible_BST=None, first_key_BS=None, sinks_N=None
) -> Float[Array, "B S N H"]:
    """Returns attention: fused if its GEMMs are not quantized, else through `dot_general`.

    `visible_BST` says which keys each query sees; by default it is causal, from `first_key_BS` on.
    """
    scores, values = gemms.policies["attention.scores"], gemms.policies["attention.values"]
    if scores == values and scores in _FUSED_ATTENTION:
        dtype = _FUSED_ATTENTION[scores]
        q, k, v = (t.astype(dtype) for t in (q_BSNH, k_BTGH, v_BTGH))
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            if gemms.parts > 1:
                return ring_attention(q, k, v, first_key_BS, sinks_N, gemms.parts)
            if visible_BST is None:
                return causal_attention(q, k, v, first_key_BS, sinks_N)
            return attend_visible(q, k, v, visible_BST, sinks_N)
    if gemms.parts > 1:
        tensors = q_BSNH, k_BTGH, v_BTGH, first_key_BS
        q_BSNH, k_BTGH, v_BTGH, first_key_BS = jax.tree.map(lambda t: join(t, gemms.parts), tensors)
    B, S, N, H = q_BSNH.shape
    T, G = k_BTGH.shape[1:3]
    q_BSGRH = q_BSNH.reshape(B, S, G, N // G, H)
    scores_BGSRT = gemms.dot_general(
        "attention.scores", q_BSGRH, k_BTGH, (((4,), (3,)), ((0, 2), (0, 2)))
    ) * (H**-0.5)
    if visible_BST is None:
        visible_BST = visible_keys(jnp.arange(S), jnp.arange(T), first_key_BS)
    visible_B1S1T = visible_BST[:, None, :, None, :]
    scores_BGSRT = jnp.where(visible_B1S1T, scores_BGSRT, jnp.finfo(jnp.float32).min)
    weights_BGSRT = jax.nn.softmax(scores_BGSRT, axis=-1)
    if sinks_N is not None:
        normalizer_BSGR = jax.nn.logsumexp(scores_BGSRT, axis=-1).swapaxes(1, 2)
        share_BSN = jax.nn.sigmoid(normalizer_BSGR.reshape(B, S, N) - sinks_N[None, None])
        weights_BGSRT *= share_BSN.reshape(B, S, G, N // G, 1).swapaxes(1, 2)
    weights_BGSRT = weights_BGSRT.astype(q_BSNH.dtype)
    out_BGSRH = gemms.dot_general("attention.values", weights_BGSRT, v_BTGH, (((4,), (1,)), ((0, 1), (0, 2))))
    out_BSNH = out_BGSRH.transpose(0, 2, 1, 3, 4).reshape(B, S, N, H).astype(q_BSNH.dtype)
    return out_BSNH if gemms.parts == 1 else cut(out_BSNH, gemms.parts)


def random_matrix(rngs: nnx.Rngs, *shape: int, std: float) -> nnx.Param:
    """Returns a parameter with normal entries of this standard deviation."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def residual_std(config: DecoderConfig) -> float:
    """Returns the standard deviation of matrices that write to the residual stream."""
    return config.init_std / math.sqrt(2 * config.n_layers)


def zeros(*shape: int) -> nnx.Param:
    """Returns a parameter of zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))
