"""Generation with a decoder: one token at a time, with the keys and values of earlier ones in a cache.

Shapes in names as in `models.decoder`; T is the length of the cache. A GEMM sees one token instead of a
sequence, so a policy whose operands share scales between tokens (per-tensor FP8, NVFP4, 2-D blocks of x)
gives slightly other numbers than without a cache. Policies with scales along d_in alone give the same.
With one sequence, a policy that splits off the token mean (`averis`) quantizes nothing after the prompt: one
token is its own mean, which is multiplied in float32.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from models import decoder
from models.attention import block_windows, rope_angles
from models.configs import DecoderConfig
from models.documents import Documents, document_starts, first_keys, visible_keys
from models.gemms import BlockGemms, attend, block_keys
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation


class Options(NamedTuple):
    """How a model runs; hashable. See `models.decoder.Decoder.hidden`."""

    policies: LayerPolicies
    implementation: Implementation | None = None
    dtype: Any = jnp.bfloat16
    documents: Documents | None = None


class Cache(NamedTuple):
    """What reading tokens leaves for later ones.

    Attributes:
      k_LBTGH, v_LBTGH: the keys and values of every layer and position; zero where no token has been read.
      start_B: the first position of the document to which the next token belongs.
    """

    k_LBTGH: Float[Array, "L B T G H"]
    v_LBTGH: Float[Array, "L B T G H"]
    start_B: Int[Array, " B"]


class _CachedGemms(BlockGemms):
    """The GEMMs of one block, with attention to the cache, to which it adds the keys and values it gets."""

    def __init__(self, policies, key, implementation, k_BTGH, v_BTGH, start):
        super().__init__(policies, key, implementation)
        self.k_BTGH, self.v_BTGH, self._start = k_BTGH, v_BTGH, start

    def attend(self, q_BSNH, k_BSGH, v_BSGH, first_key_BS=None, sinks_N=None):
        at = (0, self._start, 0, 0)
        self.k_BTGH = jax.lax.dynamic_update_slice(self.k_BTGH, k_BSGH, at)
        self.v_BTGH = jax.lax.dynamic_update_slice(self.v_BTGH, v_BSGH, at)
        position_S = self._start + jnp.arange(q_BSNH.shape[1])
        visible_BST = visible_keys(position_S, jnp.arange(self.k_BTGH.shape[1]), first_key_BS)
        return attend(q_BSNH, self.k_BTGH, self.v_BTGH, self, visible_BST, sinks_N=sinks_N)


def empty_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.bfloat16) -> Cache:
    """Returns a cache for `length` tokens of each sequence."""
    shape = (config.n_layers, batch, length, config.n_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def read(
    config: DecoderConfig,
    options: Options,
    params: decoder.Params,
    tokens_BS: Int[Array, "B S"],
    cache: Cache,
    start: Int[Array, ""] | int,
    key: jax.Array | None = None,
) -> tuple[Float32[Array, "B V"], Cache]:
    """Reads tokens from position `start` on; returns the logits of the next token, and the cache with them.

    Args:
      config, params: the model.
      options: how it runs.
      tokens_BS: token ids.
      cache: holds the `start` tokens before, and has room for these.
      start: position of the first of the tokens.
      key: random bits for policies that draw any; each call needs its own.
    """
    model = nnx.merge(decoder.graph(config), params)
    starts_BS, start_B = jnp.zeros_like(tokens_BS), cache.start_B
    position_BS = start + jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
    if (documents := options.documents) is not None:
        starts_BS = document_starts(tokens_BS, documents.end, start_B, start)
        start_B = jnp.where(tokens_BS[:, -1] == documents.end, position_BS[:, -1] + 1, starts_BS[:, -1])
        if documents.restart_positions:
            position_BS -= starts_BS
    rope = rope_angles(position_BS, config)
    graph, blocks = nnx.split(model.blocks)
    windows = block_windows(config, cache.k_LBTGH.shape[2])
    x_BSD, parts = model.embedding[...][tokens_BS].astype(options.dtype), []
    for first, stop, policies in decoder.runs(options.policies, config.n_layers):

        def run(x_BSD, layer, policies=policies):
            keys, (weights, k, v, window) = layer
            gemms = _CachedGemms(policies, keys, options.implementation, k, v, start)
            x_BSD = nnx.merge(graph, weights)(x_BSD, rope, gemms, first_keys(starts_BS, window, start))
            return x_BSD, (gemms.k_BTGH, gemms.v_BTGH)

        stacked = (blocks, cache.k_LBTGH, cache.v_LBTGH, windows)
        here = jax.tree.map(lambda a, first=first, stop=stop: a[first:stop], stacked)
        x_BSD, part = jax.lax.scan(run, x_BSD, (block_keys(key, first, stop, len(policies)), here))
        parts.append(part)
    precision = {"policies": options.policies, "key": key, "implementation": options.implementation}
    logits_B1V = model.logits(model.norm(x_BSD[:, -1:]), **precision)
    k_LBTGH, v_LBTGH = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return logits_B1V[:, 0], Cache(k_LBTGH, v_LBTGH, start_B)


@functools.partial(jax.jit, static_argnums=(2, 3))
def choose(
    logits: Float32[Array, "*B V"], key: jax.Array, temperature: float = 1.0, top_p: float = 1.0
) -> Int[Array, "*B"]:
    """Returns a random token by softmax(logits / temperature) among the most probable ones.

    Args:
      logits: of each token.
      key: random key.
      temperature: 0, or less than float32's smallest normal number, takes the most probable token.
      top_p: draw among the fewest most probable tokens whose probabilities sum to at least this.
    Source: "The Curious Case of Neural Text Degeneration", arXiv 1904.09751, section 3.1.
    """
    if temperature < np.finfo(np.float32).tiny:
        return jnp.argmax(logits, axis=-1)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    return jax.random.categorical(key, jnp.where(is_in_nucleus(logits, top_p), logits, -jnp.inf))


def is_in_nucleus(logits: Float32[Array, "*B V"], top_p: float) -> Array:
    """Returns whether each token is among the fewest most probable ones that together have `top_p`."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probability = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keeps = (before < top_p).at[..., 0].set(True)
    return jnp.put_along_axis(jnp.zeros_like(keeps), order, keeps, axis=-1, inplace=False)


def generate(
    config: DecoderConfig,
    options: Options,
    params: decoder.Params,
    prompt_BS: Int[Array, "B S"],
    count: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Iterator[Int[Array, " B"]]:
    """Yields `count` tokens that continue each sequence, one after another.

    Args:
      config, params: the model.
      options: how it runs.
      prompt_BS: at least one token.
      count: tokens to generate.
      key: draws the tokens, and the policy's random bits.
      temperature, top_p: see `choose`.
    """
    length = prompt_BS.shape[1]
    cache = empty_cache(config, prompt_BS.shape[0], length + count, options.dtype)
    tokens, start = prompt_BS, 0
    for index in range(count):
        of_token, of_gemms = jax.random.split(jax.random.fold_in(key, index))
        logits, cache = read(config, options, params, tokens, cache, start, of_gemms)
        token = choose(logits, of_token, temperature, top_p)
        yield token
        start += tokens.shape[1]
        tokens = token[:, None]
