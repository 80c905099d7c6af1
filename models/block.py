"""A block of a decoder: attention, and an MLP or experts.

Shapes in names as in `models.decoder`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.attention.causal import Rope, apply_rope
from models.attention.documents import FirstKey
from models.configs import DecoderConfig
from models.experts.layer import Experts
from models.gemms import BlockGemms, random_matrix, residual_std, zeros
from models.sharding import after_gradients, constrain, joined
from mxjax.operands.computed import Norm, rms_norm


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

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = c = config
        inner = c.n_heads * c.head_dim
        self.qkv = random_matrix(rngs, c.d_model, c.qkv_size, std=c.init_std)
        self.out = random_matrix(rngs, inner, c.d_model, std=residual_std(c))
        self.qkv_bias = zeros(c.qkv_size) if c.qkv_bias else None
        self.out_bias = zeros(c.d_model) if c.out_bias else None
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None for _ in range(2))
        self.sinks = zeros(c.n_heads) if c.sinks else None

    def __call__(
        self, x, norm: Norm, rope: Rope, gemms: BlockGemms, first_key_BS: FirstKey | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the attention of x after the norm."""
        c = self.config
        groups, rest = c.n_kv_heads, c.n_heads // c.n_kv_heads
        x, out_weight = after_gradients(x, self.out[...])
        y = _biased(gemms.dot("attention.qkv", x, self.qkv[...], norm), self.qkv_bias)
        y = y.reshape(*x.shape[:2], groups, rest + 2, c.head_dim)
        q_BSGRH, k_BSG1H, v_BSG1H = split_heads(y)
        q_BSNH, k_BSGH = q_BSGRH.reshape(*x.shape[:2], c.n_heads, c.head_dim), k_BSG1H[..., 0, :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH, k_BSGH = self.q_norm(q_BSNH), self.k_norm(k_BSGH)
        q_BSNH, k_BSGH = (apply_rope(t, rope) for t in (q_BSNH, k_BSGH))
        sinks_N = None if self.sinks is None else self.sinks[...]
        out_BSNH = gemms.attend(q_BSNH, k_BSGH, v_BSG1H[..., 0, :], first_key_BS, sinks_N)
        out = out_BSNH.reshape(*x.shape[:2], c.n_heads * c.head_dim).astype(x.dtype)
        return _biased(gemms.dot("attention.out", out, out_weight), self.out_bias)


@jax.custom_vjp
def split_heads(
    y_BSGUH: Float[Array, "B S G U H"],
) -> tuple[Float[Array, "B S G R H"], Float[Array, "B S G 1 H"], Float[Array, "B S G 1 H"]]:
    """Returns the query heads, the key and the value of each key/value head.

    Their gradients are joined by `models.sharding.joined`; slices would be padded with zeros and added.
    """
    queries = y_BSGUH.shape[3] - 2
    q_BSGRH, k_BSG1H, v_BSG1H = jnp.split(y_BSGUH, [queries, queries + 1], axis=3)
    return q_BSGRH, k_BSG1H, v_BSG1H


split_heads.defvjp(lambda y: (split_heads(y), None), lambda _, parts: (joined(parts, 3),))


def _biased(y: Array, bias: nnx.Param | None) -> Array:
    return y if bias is None else y + jnp.broadcast_to(bias[...], y.shape).astype(y.dtype)


class Mlp(nnx.Module):
    """The gated MLP (SwiGLU); `gate_up` holds the gate's columns, then the up projection's."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate_up = random_matrix(rngs, config.d_model, 2 * config.d_ff, std=config.init_std)
        self.down = random_matrix(rngs, config.d_ff, config.d_model, std=residual_std(config))

    def __call__(self, x: Float[Array, "B S D"], norm: Norm, gemms: BlockGemms) -> Float[Array, "B S D"]:
        """Returns the MLP of x after the norm."""
        x, down = after_gradients(x, self.down[...])
        return gemms.gated_mlp(x, norm, self.gate_up[...], down)


class Block(nnx.Module):
    """One layer: attention, and an MLP or experts, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = Mlp(config, rngs) if config.experts is None else Experts(config, rngs)

    def __call__(
        self, x: Float[Array, "B S D"], rope: Rope, gemms: BlockGemms, first_key_BS: FirstKey | None = None
    ) -> Float[Array, "B S D"]:
        attention = self.attention(x, self.attention_norm.norm, rope, gemms, first_key_BS)
        x = constrain(x + attention, "rows", None, None)
        return constrain(x + self.mlp(x, self.mlp_norm.norm, gemms), "rows", None, None)
