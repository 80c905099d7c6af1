"""Generation with a decoder: one token at a time, with the keys and values of earlier ones in a cache.

Shapes in names as in `models.decoder`; T is the length of a block's cache, at most its window. A GEMM sees
one token instead of a sequence, so a policy whose operands share scales between tokens (per-tensor FP8,
NVFP4, 2-D blocks of x) gives slightly other numbers than without a cache. Policies with scales along d_in
alone give the same.
With one sequence, a policy that splits off the token mean (`averis`) quantizes nothing after the prompt: one
token is its own mean, which is multiplied in float32.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from models import decoder
from models.attention.causal import rope_of
from models.attention.documents import Documents, document_starts, first_keys, visible_keys
from models.block import block_graph, part, slice_stack
from models.configs import DecoderConfig
from models.gemms import BlockGemms, attend, block_keys
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation


class Options(NamedTuple):
    """Arguments of a model; hashable. See `models.decoder.Decoder.hidden`."""

    policies: LayerPolicies
    implementation: Implementation | None = None
    dtype: Any = jnp.bfloat16
    documents: Documents | None = None


class Cache(NamedTuple):
    """Keys and values of the tokens that were read, for later ones.

    Attributes:
      blocks: the keys and values of consecutive blocks that keep as many tokens, by `cached_tokens`; zero
        where no token has been read. A token at position p of a block with a window is at p modulo T.
      start_B: the first position of the document to which the next token belongs.
    """

    blocks: list[tuple[Float[Array, "l B T G H"], Float[Array, "l B T G H"]]]
    start_B: Int[Array, " B"]


class _CachedGemms(BlockGemms):
    """The GEMMs of one block, with attention to the cache, to which it adds the keys and values it gets."""

    def __init__(self, policies, key, implementation, cached, start, is_window):
        super().__init__(policies, key, implementation)
        self.cached, self._start, self._is_window = cached, start, is_window

    def attend(self, q_BSNH, k_BSGH, v_BSGH, first_key_BS=None, sinks_N=None):
        S, T = q_BSNH.shape[1], self.cached[0].shape[1]
        position_S = self._start + jnp.arange(S)
        if self._is_window and S > 1:  # new tokens replace some that the first of them see
            key_U = jnp.concatenate([_positions_before(self._start, T), position_S])
            both = zip(self.cached, (k_BSGH, v_BSGH), strict=True)
            k_BUGH, v_BUGH = (jnp.concatenate(parts, axis=1) for parts in both)
            visible_BSU = visible_keys(position_S, key_U, first_key_BS)
            last_T = slice(max(S - T, 0), None)
            self.cached = tuple(
                old.at[:, position_S[last_T] % T].set(new[:, last_T])
                for old, new in zip(self.cached, (k_BSGH, v_BSGH), strict=True)
            )
            return attend(q_BSNH, k_BUGH, v_BUGH, self, visible_BSU, sinks_N=sinks_N)
        at = (0, self._start % T if self._is_window else self._start, 0, 0)
        self.cached = tuple(
            jax.lax.dynamic_update_slice(old, new, at)
            for old, new in zip(self.cached, (k_BSGH, v_BSGH), strict=True)
        )
        key_T = _positions_before(self._start + 1, T) if self._is_window else jnp.arange(T)
        visible_BST = visible_keys(position_S, key_T, first_key_BS)
        k_BTGH, v_BTGH = self.cached
        return attend(q_BSNH, k_BTGH, v_BTGH, self, visible_BST, sinks_N=sinks_N)


def _positions_before(stop, T: int) -> Int[Array, " T"]:
    """Returns the position of each token of a window's cache after `stop` tokens; negative without one."""
    return stop - 1 - (stop - 1 - jnp.arange(T)) % T


def cached_tokens(config: DecoderConfig, length: int) -> list[int]:
    """Returns how many of `length` tokens each block keeps keys and values of: a window's at most."""
    return [min(window or length, length) for window in config.windows or (0,) * config.n_layers]


def cache_bytes(config: DecoderConfig, length: int) -> int:
    """Returns the bytes of the keys and values of a sequence in bfloat16."""
    return 4 * sum(cached_tokens(config, length)) * config.n_kv_heads * config.head_dim


def empty_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.bfloat16) -> Cache:
    """Returns a cache for `length` tokens of each sequence."""

    def empty(blocks: int, tokens: int) -> Array:
        return jnp.zeros((blocks, batch, tokens, config.n_kv_heads, config.head_dim), dtype)

    alike = [(len([*group]), T) for T, group in itertools.groupby(cached_tokens(config, length))]
    return Cache([(empty(n, T), empty(n, T)) for n, T in alike], jnp.zeros(batch, jnp.int32))


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
      cache: holds the `start` tokens before, and has room for these.
      start: position of the first of the tokens.
      key: random bits for policies that draw any; each call needs its own.
    """
    model = nnx.merge(decoder.graph(config), params)
    position_BS, starts_BS, start_B = _positions(tokens_BS, options.documents, cache.start_B, start)
    rope = rope_of(position_BS, config)
    blocks = nnx.to_pure_dict(nnx.state(model.blocks))
    rotated = decoder.rotated_blocks(config)
    x_BSD, parts = model.embedding[...][tokens_BS].astype(options.dtype), [[] for _ in cache.blocks]
    for group, first, begin, end, policies in _runs(config, options.policies, cache):
        T = cache.blocks[group][0].shape[2]
        is_window = bool(config.windows) and config.windows[first] == T
        has_mask = is_window or options.documents is not None
        first_key_BS = first_keys(starts_BS, T if is_window else None, start) if has_mask else None

        def run(x_BSD, layer, policies=policies, is_window=is_window, first_key_BS=first_key_BS, begin=begin):
            keys, weights, cached, rotates = layer
            gemms = _CachedGemms(policies, keys, options.implementation, cached, start, is_window)
            block = nnx.merge(block_graph(config, begin), weights)
            return block(x_BSD, rope.in_block(rotates), gemms, first_key_BS), gemms.cached

        cached = slice_stack(cache.blocks[group], begin - first, end - first)
        keys, weights = block_keys(key, begin, end, len(policies)), part(config, blocks, begin, end)
        x_BSD, kept = jax.lax.scan(run, x_BSD, (keys, weights, cached, slice_stack(rotated, begin, end)))
        parts[group].append(kept)
    precision = {"policies": options.policies, "key": key, "implementation": options.implementation}
    logits_B1V = model.logits(model.norm(x_BSD[:, -1:]), **precision)
    kept = [jax.tree.map(lambda *a: jnp.concatenate(a), *of_group) for of_group in parts]
    return logits_B1V[:, 0], Cache(kept, start_B)


def _runs(
    config: DecoderConfig, policies: LayerPolicies, cache: Cache
) -> Iterator[tuple[int, int, int, int, Any]]:
    """Yields consecutive blocks that are alike in their policies and in what they keep.

    As (index in `cache.blocks`, the first block there, first block, end, policies by layer).
    """
    first = 0
    for group, (k_lBTGH, _) in enumerate(cache.blocks):
        stop = first + len(k_lBTGH)
        for begin, end, of_run in decoder.runs(policies, config.n_layers):
            if max(first, begin) < min(stop, end):
                yield group, first, max(first, begin), min(stop, end), of_run
        first = stop


def _positions(tokens_BS, documents: Documents | None, start_B, start):
    """Returns the tokens' positions for RoPE, the starts of their documents, and that of the next token."""
    position_BS = start + jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
    if documents is None:
        return position_BS, jnp.zeros_like(position_BS), start_B
    starts_BS = document_starts(tokens_BS, documents.end, start_B, start)
    start_B = jnp.where(tokens_BS[:, -1] == documents.end, position_BS[:, -1] + 1, starts_BS[:, -1])
    return position_BS - starts_BS if documents.restart_positions else position_BS, starts_BS, start_B


@functools.partial(jax.jit, static_argnums=(2, 3))
def choose(
    logits: Float32[Array, "*B V"], key: jax.Array, temperature: float = 1.0, top_p: float = 1.0
) -> Int[Array, "*B"]:
    """Returns a random token by softmax(logits / temperature) among the most probable ones.

    Args:
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
