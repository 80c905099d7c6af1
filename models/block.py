"""A block of a decoder: attention, and an MLP or experts; and the stacked blocks of a decoder.

Blocks may be of two kinds: with experts, and with a dense MLP. Parameters of attention and norms are stacked
over all blocks. `mlp` is stacked over the blocks with experts, and `dense_mlp` over the others; a decoder of
one kind has no `dense_mlp`. Consecutive blocks of one kind run as those of a decoder of this kind alone
(`DecoderConfig.block`). Shapes in names as in `models.decoder`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


DENSE = "dense_mlp"
"""The module of the MLPs in a decoder that has experts too; its layers are called "mlp"."""


class MixedBlocks(nnx.Module):
    """The parameters of blocks of two kinds, each module's stacked over the blocks that have it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        numbers, size = block_numbers(config), config.n_layers
        experts, dense = (config.block(numbers[name][0]) for name in ("mlp", DENSE))
        self.attention_norm = _stack(lambda _: RMSNorm(config.d_model, config.norm_eps), size, rngs)
        self.attention = _stack(lambda rngs: Attention(config, rngs), size, rngs)
        self.mlp_norm = _stack(lambda _: RMSNorm(config.d_model, config.norm_eps), size, rngs)
        self.mlp = _stack(lambda rngs: Experts(experts, rngs), len(numbers["mlp"]), rngs)
        self.dense_mlp = _stack(lambda rngs: Mlp(dense, rngs), len(numbers[DENSE]), rngs)


def stacked_blocks(config: DecoderConfig, rngs: nnx.Rngs) -> Block | MixedBlocks:
    """Returns blocks whose parameters have a leading axis of the blocks that have them."""
    if config.dense_d_ff:
        return MixedBlocks(config, rngs)
    return _stack(lambda rngs: Block(config, rngs), config.n_layers, rngs)


def _stack[T: nnx.Module](make: Callable[[nnx.Rngs], T], size: int, rngs: nnx.Rngs) -> T:
    found: Any = nnx.split_rngs(splits=size)(nnx.vmap(make))
    return found(rngs)


def block_numbers(config: DecoderConfig) -> Mapping[str, Sequence[int]]:
    """Returns the numbers of the blocks that have a module, for those that not all blocks have."""
    if not config.dense_d_ff:
        return {}
    found = {"mlp": [], DENSE: []}
    for i, width in enumerate(config.dense_d_ff):
        found[DENSE if width else "mlp"].append(i)
    return found


@functools.cache
def block_graph(config: DecoderConfig, i: int) -> nnx.GraphDef:
    """Returns the structure of block i, which `nnx.merge` completes with its part of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Block(config.block(i), nnx.Rngs(params=0))))[0]


def part(config: DecoderConfig, stacked: Mapping[str, Any], start: int, stop: int) -> Any:
    """Returns the parameters of consecutive blocks of one kind, stacked, by the names of that kind alone."""
    if not config.dense_d_ff:
        return slice_stack(stacked, start, stop)
    name = DENSE if config.dense_d_ff[start] else "mlp"
    first = list(block_numbers(config)[name]).index(start)
    shared = {key: stacked[key] for key in stacked if key not in ("mlp", DENSE)}
    return slice_stack(shared, start, stop) | {"mlp": slice_stack(stacked[name], first, first + stop - start)}


def slice_stack(stacked: Any, start: int, stop: int) -> Any:
    """Returns these entries of stacked arrays, which are views if the arrays are NumPy's."""
    return jax.tree.map(lambda a: a if stop - start == len(a) else a[start:stop], stacked)
