"""A decoder in Flax NNX, where every GEMM runs in its own policy; Llama 3.1 is one configuration of it.

Shapes in names: B batch, S sequence, D d_model, G key/value heads, R query heads a key/value head,
H head_dim, F d_ff, V vocabulary. Parameters are float32 and stacked over layers; activations have the dtype
that the call names. Policies are arguments, so that one set of weights runs in any of them. Query, key and
value are one GEMM ("attention.qkv"), gate and up projection another ("mlp.gate_up"), each with one policy.
The embedding is a lookup and norms are no GEMMs, so they have no policy. Embedding and head may have filler
beyond the vocabulary, which changes no result but the shape of logits (minus infinity).

Source: "The Llama 3 Herd of Models", arXiv 2407.21783.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from models import gemms, loss
from models.attention.causal import Rope, block_windows, rope_of
from models.attention.context import cut, join, sequence_parts
from models.attention.documents import Documents, document_starts, first_keys
from models.block import RMSNorm, block_graph, part, slice_stack, stacked_blocks
from models.configs import DecoderConfig
from models.embedding import lookup
from models.experts.layer import Routing, auxiliary_loss
from models.experts.traffic import Traffic
from models.gemms import BlockGemms, Slot, block_keys, block_layers, random_matrix
from models.loss import Head, token_losses
from models.sharding import constrain, mesh_sizes, row_parts, run_blocks, weight_layout
from mxjax.policy import Policy
from mxjax.policy.layers import LayerPolicies, Rules, resolve
from mxjax.products.implementations import Implementation, quantizes_by_xla
from mxjax.recipes import get_policy
from mxjax.runtime.devices import on_gpu
from mxjax.runtime.remat import Remat, rematerialize

PARAMETER_AXES = gemms.WEIGHT_AXES | {"embedding": ("vocab", "embed"), "head": ("embed", "vocab")}
"""The logical axes of every parameter except the scales of norms; see `models.sharding`."""
_HIGH_PRECISION = ("blocks.*.attention.scores", "blocks.*.attention.values", "head")
_BF16, _FP32 = get_policy("bf16"), get_policy("fp32")


def layer_policies(config: DecoderConfig, default: Policy, rules: Rules = ()) -> LayerPolicies:
    """Returns the policy of every GEMM: `default` for the linear layers of the blocks, then the rules.

    The head and the attention products stay in bfloat16 unless a rule names them, and routers in float32
    unless a rule says "router": recipes that keep blocks in bfloat16 keep their routers in float32.
    Quantizing "attention.values" is not causal: its blocks lie along the sequence and share scales with later
    tokens.
    """
    names = [f"blocks.{i}.{layer}" for i in range(config.n_layers) for layer in block_layers(config.block(i))]
    own = [(name, _BF16) for name in _HIGH_PRECISION]
    found = resolve([*names, "head"], default, (*own, *rules))
    if config.experts is None:
        return found
    of_routers = [(pattern, policy) for pattern, policy in rules if "router" in pattern]
    return found.with_rules([("blocks.*.mlp.router", _FP32), *of_routers])


class Decoder(nnx.Module):
    """The language model: embedding, stacked blocks, final norm, head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = random_matrix(rngs, config.vocab_size, config.d_model, std=config.init_std)
        self.blocks = stacked_blocks(config, rngs)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        head = config.d_model, config.vocab_size
        self.head = None if config.tied else random_matrix(rngs, *head, std=config.init_std)

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
        **options,
    ) -> Float32[Array, "B S V"]:
        """Returns the logits of each next token; arguments as in `hidden`."""
        common: Any = {"policies": policies, "key": key, "implementation": implementation}
        logits = self.logits(self.hidden(tokens_BS, **common, **options)[0], **common)
        return join(logits, len(logits) // len(tokens_BS))

    def hidden(
        self,
        tokens_BS: Int[Array, "B S"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Remat = "none",
        implementation: Implementation | None = None,
        slots: Mapping[str, Slot] | None = None,
        unroll: int | None = None,
        documents: Documents | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[Float[Array, "B S D"], Float32[Array, "D V"], Routing | None]:
        """Returns the input of the head, which is the last block's output, normalized; the head's matrix; and
        what the routers did, stacked over blocks. The input is in the rows of `models.attention.context`.

        Args:
          policies: the policy of every layer, from `layer_policies`.
          key: random bits for policies that draw any; fold the step into it.
          dtype: dtype of the activations between layers.
          remat: what each block keeps for its backward pass; see `mxjax.runtime.remat`.
          implementation: how the GEMMs run; see `mxjax.dot`.
          slots: arrays whose gradients are the errors of the linear layers' GEMMs, or the tensors that they
            read, see `mxjax.stats.layers`; or their `mxjax.numerics.delayed.Scales`.
          unroll: blocks in one iteration of the compiled loop. All blocks run fastest, because residuals are
            then not copied into arrays of all layers, and compile longest. Default: all on a GPU, but one
            elsewhere, and where XLA's operations quantize: to fuse those of all blocks takes XLA minutes.
          documents: what attention keeps apart; None is whole sequences.
          traffic: "fp4" packs tokens that travel to experts; see `models.experts.traffic`.
        """
        parts = sequence_parts(mesh_sizes(), *tokens_BS.shape)
        windows = block_windows(self.config, tokens_BS.shape[1])
        rope, starts_BS = _positions(self.config, tokens_BS, documents, windows is not None)
        if parts > 1:
            if starts_BS is not None:
                starts_BS = jnp.broadcast_to(starts_BS, tokens_BS.shape)
            angles = jnp.broadcast_to(rope.angles, (*tokens_BS.shape, rope.angles.shape[2]))
            rope = rope._replace(angles=cut(angles, parts))
            tokens_BS = cut(tokens_BS, parts)
        x_BSD, head = _embed(self.embedding[...], tokens_BS, dtype), self.head_matrix()
        common = _Common(implementation, rope, starts_BS, parts, traffic)
        blocks = nnx.to_pure_dict(nnx.state(self.blocks))
        rotated = rotated_blocks(self.config)
        routings = []
        for start, stop, block_policies in runs(policies, self.config.n_layers):
            run = functools.partial(_run_block, block_graph(self.config, start), block_policies, common)
            keys = block_keys(key, start, stop, len(block_policies))
            of_blocks = part(self.config, blocks, start, stop), slice_stack(slots, start, stop)
            layers = of_blocks, (keys, *slice_stack((windows, rotated), start, stop))
            slow = quantizes_by_xla(block_policies.values(), implementation)
            turn = min(unroll or (stop if on_gpu() and not slow else 1), stop - start)
            x_BSD, head, routing = _run_alike(run, x_BSD, head, layers, stop - start, turn, remat)
            routings.append(routing)
        routings = [routing for routing in routings if routing is not None] or [None]
        routing = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)
        return self.norm(x_BSD), head, routing

    def logits(
        self,
        x_BSD: Float[Array, "B S D"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
    ) -> Float32[Array, "B S V"]:
        """Returns the product of the head."""
        head = _head(self.config, policies, implementation)
        return head.logits(x_BSD, self.head_matrix(), self.head_key(key))

    def head_matrix(self) -> Float32[Array, "D V"]:
        """Returns the matrix of the head: the embedding's if they are tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def head_key(self, key: jax.Array | None) -> jax.Array | None:
        """Returns the key of the head's random bits."""
        return None if key is None else jax.random.fold_in(key, self.config.n_layers)


Params = dict[str, Any]
"""Parameters as nested dicts of arrays."""


@functools.partial(jax.jit, static_argnums=0)
def init(config: DecoderConfig, key: jax.Array) -> Params:
    """Returns random float32 parameters.

    Matrices are normal with standard deviation `init_std`, or `init_std / sqrt(2 n_layers)` if they write to
    the residual stream (Megatron's scaled initialization). Scales of norms are one.
    """
    return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(params=key)))[1])


def abstract_params(config: DecoderConfig) -> Params:
    """Returns the shapes and dtypes of the parameters."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def apply(
    config: DecoderConfig, params: Params, tokens: Int[Array, "B S"], **options
) -> Float32[Array, "B S V"]:
    """Returns the logits of the model with these parameters; options as in `Decoder.__call__`."""
    return nnx.merge(graph(config), params)(tokens, **options)


def losses(
    config: DecoderConfig, params: Params, batch: Int[Array, "B S+1"], **options
) -> Float32[Array, "B S"]:
    """Returns the cross-entropy of each token but the first, in nats; options as in `Decoder.hidden`."""
    found = token_losses(*_head_and_input(config, params, batch, **options)[0])
    return join(found, len(found) // len(batch))


def mean_loss(
    config: DecoderConfig, params: Params, batch: Int[Array, "B S+1"], **options
) -> Float32[Array, ""]:
    """Returns the loss to minimize: the mean of `losses`, `auxiliary_loss` and the z-loss.

    See `measured_loss` for its arguments, and `models.loss.mean_loss` for how to differentiate it.
    """
    return measured_loss(config, params, batch, **options)[0]


class Measured(NamedTuple):
    """A batch's mean cross-entropy, without other losses, and what its routers did, if there are any."""

    cross_entropy: Float32[Array, ""]
    routing: Routing | None


def measured_loss(
    config: DecoderConfig, params: Params, batch: Int[Array, "B S+1"], *, z_loss: float = 0.0, **options
) -> tuple[Float32[Array, ""], Measured | None]:
    """Returns `mean_loss` and, for a model with experts or with a z-loss, its parts.

    `z_loss` is the coefficient of the mean squared logsumexp of the logits.
    """
    (head, *inputs), routing = _head_and_input(config, params, batch, **options)
    value: Any = loss.mean_loss(head._replace(z_loss=z_loss), *inputs)
    cross_entropy = value
    if z_loss:
        value, z = value
        cross_entropy = jax.lax.stop_gradient(value - z_loss * z)
    if config.experts is None or routing is None:
        return value, Measured(cross_entropy, None) if z_loss else None
    return value + auxiliary_loss(config.experts, routing), Measured(cross_entropy, routing)


def _head(config: DecoderConfig, policies: LayerPolicies, implementation: Implementation | None) -> Head:
    layout = weight_layout(PARAMETER_AXES["head"])
    return Head(policies["head"], implementation, layout, config.vocab_size, config.tied)


def _head_and_input(config, params, batch, *, policies, key=None, implementation=None, **options):
    model = nnx.merge(graph(config), params)
    common: Any = {"policies": policies, "key": key, "implementation": implementation}
    x_BSD, matrix, routing = model.hidden(batch[:, :-1], **common, **options)
    head = _head(config, policies, implementation)
    targets_BS = batch[:, 1:].reshape(x_BSD.shape[:2])
    return (head, x_BSD, matrix, targets_BS, model.head_key(key)), routing


@functools.cache
def graph(config: DecoderConfig) -> nnx.GraphDef:
    """Returns the structure of the model, which `nnx.merge` completes with parameters."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))))[0]


def _embed(embedding_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"], dtype) -> Float[Array, "B S D"]:
    """Returns the tokens' rows of the embedding in dtype.

    On a mesh each device looks up its columns for all tokens of its `data` group, and an all-to-all sends the
    rows to their devices. That moves less than gathering the table.
    """
    tokens_BS = constrain(tokens_BS, "data", None)
    x_BSD = constrain(lookup(embedding_VD, tokens_BS).astype(dtype), "data", None, "embed")
    return constrain(x_BSD, "rows", None, None)


def _positions(config, tokens_BS, documents: Documents | None, has_mask: bool):
    """Returns the rotation, and the start of each token's document if attention has a mask."""
    position_1S = jnp.arange(tokens_BS.shape[1])[None]
    if documents is None:
        return rope_of(position_1S, config), jnp.zeros_like(position_1S) if has_mask else None
    starts_BS = constrain(document_starts(tokens_BS, documents.end), "batch", None)
    position_BS = position_1S - starts_BS if documents.restart_positions else position_1S
    return rope_of(position_BS, config), starts_BS


def rotated_blocks(config: DecoderConfig) -> Float32[Array, " L"] | None:
    """Returns whether each block rotates, 0 where it does not rotate; None if all blocks do."""
    return jnp.asarray(config.rope_layers, jnp.float32) if 0 in config.rope_layers else None


class _Common(NamedTuple):
    """Arguments that all blocks share, of `Decoder.hidden`; `parts` are the rows of a sequence."""

    implementation: Implementation | None
    rope: Rope
    starts_BS: Int[Array, "B S"] | None
    parts: int
    traffic: Traffic | None


def _run_alike(run, x_BSD, head, layers, n: int, turn: int, remat: Remat):
    """Returns (x_BSD, the head's matrix, routing) after n blocks of the same structure and policies.

    Args:
      run: runs one block.
      layers: what each block has of its own, stacked.
      turn: blocks in one iteration of the compiled loop.
    """
    run = rematerialize(run, remat, in_loop=n > turn)
    if turn == n:
        run = run if row_parts() > 1 else jax.jit(run)  # traced once for all blocks
        return run_blocks(run, x_BSD, layers, n, head)
    x_BSD, routing = jax.lax.scan(run, x_BSD, layers, length=n, unroll=turn)
    return x_BSD, head, routing


def _run_block(graph, policies, common: _Common, x_BSD, layer):
    """Runs one block with its own weights and random bits: the body of the scan over layers."""
    implementation, rope, starts_BS, parts, traffic = common
    (weights, slots), (keys, window, rotates) = layer
    of_block = BlockGemms(policies, keys, implementation, slots, parts, traffic)
    first_key_BS = None if starts_BS is None else first_keys(starts_BS, window)
    if parts > 1 and first_key_BS is not None:
        first_key_BS = cut(first_key_BS, parts)
    x_BSD = nnx.merge(graph, weights)(x_BSD, rope.in_block(rotates), of_block, first_key_BS)
    return x_BSD, of_block.routing


def runs(policies: LayerPolicies, n_layers: int) -> list[tuple[int, int, dict[str, Policy]]]:
    """Returns (start, stop, policies by layer) for each run of consecutive blocks with the same policies.

    Blocks of two kinds have other layers, so a run's blocks are of one kind.
    """
    blocks: list[dict[str, Policy]] = [{} for _ in range(n_layers)]
    for name, policy in policies.items():
        _, _, layer = name.partition("blocks.")
        if layer:
            number, _, layer = layer.partition(".")
            blocks[int(number)][layer] = policy
    runs, start = [], 0
    for of_block, group in itertools.groupby(blocks):
        stop = start + len(list(group))
        runs.append((start, stop, of_block))
        start = stop
    return runs
