"""A block of Llama: attention and MLP, where every GEMM runs through `mxjax.dot` in its own policy.

Shapes in names as in `models.llama`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import mxjax
from models.attention import apply_rope, causal_attention
from models.configs import LlamaConfig
from models.sharding import after_gradients, constrain, weight_layout
from mxjax.operands.computed import Norm, rms_norm, swiglu
from mxjax.policy import Policy
from mxjax.products.fused import fused_mlp, normed_dot
from mxjax.products.implementations import Implementation
from mxjax.runtime.keys import fold_each
from mxjax.runtime.remat import keep_products
from mxjax.stats.layers import Measures, Tensors, probe

BLOCK_LAYERS = (
    "attention.qkv",
    "attention.scores",
    "attention.values",
    "attention.out",
    "mlp.gate_up",
    "mlp.down",
)
"""The GEMMs of a block, in the order in which they run."""
LINEAR_LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
"""The GEMMs of a block that multiply weights."""
AXES = {
    "attention.qkv": ("embed", "heads"),
    "attention.out": ("heads", "embed"),
    "mlp.gate_up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
}
"""The logical axes of the weights; see `models.sharding`."""
_FUSED_ATTENTION = {mxjax.get_policy("bf16"): jnp.bfloat16, mxjax.get_policy("fp32"): jnp.float32}


def linear_weights(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights [layers, d_in, d_out] of LINEAR_LAYERS by name, from the blocks' parameters."""
    paths = {name: name.split(".") for name in LINEAR_LAYERS}
    return {name: blocks[module][matrix] for name, (module, matrix) in paths.items()}


class RMSNorm(nnx.Module):
    """Root-mean-square normalization in float32; see `mxjax.operands.computed`."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self.norm)

    @property
    def norm(self) -> Norm:
        """The norm's arguments."""
        return Norm(self.scale[...], self.eps)


class Attention(nnx.Module):
    """Causal grouped-query attention.

    The columns of `qkv` are grouped by key/value head: its R query heads, its key, its value.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        inner = config.n_heads * config.head_dim
        self.qkv = random_matrix(rngs, config.d_model, config.qkv_size, config.init_std)
        self.out = random_matrix(rngs, inner, config.d_model, _residual_std(config))

    def __call__(self, x, norm: Norm, rope, gemms: "BlockGemms") -> Float[Array, "B S D"]:
        """Returns the attention of x after the norm."""
        c = self.config
        groups, rest = c.n_kv_heads, c.n_heads // c.n_kv_heads
        x, out_weight = after_gradients(x, self.out[...])
        y = gemms.dot("attention.qkv", x, self.qkv[...], norm)
        y = y.reshape(*x.shape[:2], groups, rest + 2, c.head_dim)
        # The gradient of a split is one concatenation; slices would be padded with zeros and added.
        q_BSGRH, k_BSG1H, v_BSG1H = jnp.split(y, [rest, rest + 1], axis=3)
        q_BSNH = apply_rope(q_BSGRH.reshape(*x.shape[:2], c.n_heads, c.head_dim), rope)
        k_BSGH, v_BSGH = apply_rope(k_BSG1H[..., 0, :], rope), v_BSG1H[..., 0, :]
        out_BSNH = gemms.attend(q_BSNH, k_BSGH, v_BSGH)
        out = out_BSNH.reshape(*x.shape[:2], c.n_heads * c.head_dim).astype(x.dtype)
        return gemms.dot("attention.out", out, out_weight)


class Mlp(nnx.Module):
    """The gated MLP (SwiGLU); `gate_up` holds the gate's columns, then the up projection's."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.gate_up = random_matrix(rngs, config.d_model, 2 * config.d_ff, config.init_std)
        self.down = random_matrix(rngs, config.d_ff, config.d_model, _residual_std(config))

    def __call__(self, x: Float[Array, "B S D"], norm: Norm, gemms: "BlockGemms") -> Float[Array, "B S D"]:
        """Returns the MLP of x after the norm."""
        x, down = after_gradients(x, self.down[...])
        return gemms.gated_mlp(x, norm, self.gate_up[...], down)


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: Float[Array, "B S D"], rope, gemms: "BlockGemms") -> Float[Array, "B S D"]:
        x = constrain(x + self.attention(x, self.attention_norm.norm, rope, gemms), "batch", None, None)
        return constrain(x + self.mlp(x, self.mlp_norm.norm, gemms), "batch", None, None)


class BlockGemms:
    """The GEMMs of one block: each runs in the policy, and with the random bits, of its layer.

    `keys` [BLOCK_LAYERS] are from `block_keys`.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        keys: jax.Array | None,
        implementation: Implementation | None = None,
        slots: Mapping[str, Measures | Tensors] | None = None,
    ):
        self.policies = policies
        self.keys = keys
        self.implementation: Implementation | None = implementation
        self.slots = slots

    def dot(self, name: str, x, w, norm: Norm | None = None) -> Array:
        """Returns x @ w in x's dtype, for the linear layer `name`; x after the norm, if there is one."""
        policy, key = self.policies[name], self._key(name)
        options: dict[str, Any] = {
            "policy": policy,
            "key": key,
            "implementation": self.implementation,
            "layout": weight_layout(AXES[name]),
        }
        if norm is not None:
            if self.slots is None:
                y = normed_dot(x, norm, w, **options)
                if y is not None:
                    return y
            x = rms_norm(x, norm)
        y = mxjax.dot(x, w, preferred_element_type=x.dtype, **options)
        return y if self.slots is None else probe(policy, self.implementation, y, x, w, key, self.slots[name])

    def gated_mlp(self, x, norm: Norm, gate_up, down) -> Array:
        """Returns swiglu(x @ gate_up) @ down of x after the norm, for "mlp.gate_up" and "mlp.down"."""
        names = "mlp.gate_up", "mlp.down"
        if self.slots is None:
            y = fused_mlp(
                x,
                (gate_up, down),
                policies=[self.policies[name] for name in names],
                keys=[self._key(name) for name in names],
                implementation=self.implementation,
                layouts=[weight_layout(AXES[name]) for name in names],
                norm=norm,
            )
            if y is not None:
                return y
        x = rms_norm(x, norm)
        gated = keep_products(lambda x, w: swiglu(self.dot("mlp.gate_up", x, w)))
        return self.dot("mlp.down", gated(x, gate_up), down)

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

    def attend(self, q_BSNH, k_BSGH, v_BSGH) -> Float[Array, "B S N H"]:
        """Returns causal attention."""
        return attend(q_BSNH, k_BSGH, v_BSGH, self)

    def _key(self, name: str) -> jax.Array | None:
        return None if self.keys is None else self.keys[BLOCK_LAYERS.index(name)]


def block_keys(key: jax.Array | None, start: int, stop: int) -> jax.Array | None:
    """Returns keys [blocks, BLOCK_LAYERS] for `BlockGemms` of blocks start to stop - 1, None without one."""
    if key is None:
        return None
    return fold_each(fold_each(key, start, stop), 0, len(BLOCK_LAYERS))


def attend(q_BSNH, k_BTGH, v_BTGH, gemms: BlockGemms, visible_ST=None) -> Float[Array, "B S N H"]:
    """Returns attention: fused if its GEMMs are not quantized, else through `dot_general`.

    `visible_ST` says which keys each query sees; by default it is causal.
    """
    scores, values = gemms.policies["attention.scores"], gemms.policies["attention.values"]
    if scores == values and scores in _FUSED_ATTENTION:
        dtype = _FUSED_ATTENTION[scores]
        q, k, v = (t.astype(dtype) for t in (q_BSNH, k_BTGH, v_BTGH))
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            if visible_ST is None:
                return causal_attention(q, k, v)
            return jax.nn.dot_product_attention(q, k, v, mask=visible_ST[None, None], implementation="xla")
    B, S, N, H = q_BSNH.shape
    T, G = k_BTGH.shape[1:3]
    q_BSGRH = q_BSNH.reshape(B, S, G, N // G, H)
    scores_BGSRT = gemms.dot_general(
        "attention.scores", q_BSGRH, k_BTGH, (((4,), (3,)), ((0, 2), (0, 2)))
    ) * (H**-0.5)
    if visible_ST is None:
        visible_ST = jnp.tril(jnp.ones((S, T), bool))
    scores_BGSRT = jnp.where(visible_ST[None, None, :, None, :], scores_BGSRT, jnp.finfo(jnp.float32).min)
    weights_BGSRT = jax.nn.softmax(scores_BGSRT, axis=-1).astype(q_BSNH.dtype)
    out_BGSRH = gemms.dot_general("attention.values", weights_BGSRT, v_BTGH, (((4,), (1,)), ((0, 1), (0, 2))))
    return out_BGSRH.transpose(0, 2, 1, 3, 4).reshape(B, S, N, H).astype(q_BSNH.dtype)


def random_matrix(rngs: nnx.Rngs, rows: int, columns: int, std: float) -> nnx.Param:
    """Returns a parameter with normal entries of this standard deviation."""
    return nnx.Param(std * jax.random.normal(rngs.params(), (rows, columns), jnp.float32))


def _residual_std(config: LlamaConfig) -> float:
    return config.init_std / math.sqrt(2 * config.n_layers)
