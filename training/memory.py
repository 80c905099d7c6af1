"""Device memory as JAX reports it, and an estimate of what a training step takes on one device.

The estimate traces the step; nothing compiles.

T tokens of a batch part on a device, L layers, D d_model, N query heads times head_dim, Q width of the fused
query, key and value, F d_ff, V vocabulary, W = D Q + N D + 3 D F weights of a block. N, Q, F and V are a
device's share by the mesh axis `tensor`. In bytes:

    parameters, optimizer   as the state's arrays have them; 4 and 8 a parameter for AdamW in float32; of
                            weights that --lora freezes 17/32 if they are packed, 4 if not
    gradients               4 a parameter; 8 with --accumulate
    activations             what the forward pass keeps for the backward pass, counted in its jaxpr;
                            per block, by `mxjax.runtime.remat`'s modes:
      full                  2 T D, its input
      dots                  2 T (2 D + Q + N + 2 F)
      fp4                   2 T D + 17/32 (T (4 D + 2 N + F) + 2 W - D F) with all GEMMs in MXFP4
      none                  everything that the backward passes of policy and attention read
    working                 temporary arrays, the larger of
      a block               its activations of mode `none` if they are recomputed, 32 T F for SwiGLU
                            and its gradient in float32, 6 W for its gradients and bfloat16 weights, or
                            for its unpacked weights in float32 and bfloat16,
                            attention's scores unless they are fused (`models.attention.causal.score_bytes`)
      the logits            10 V a token of one piece (see `models.loss`), 6 D V for the head
      Muon's update         4 a parameter that it takes, four times as much of the largest array
                            and, of parameters in bfloat16, a float32 copy

Fused attention adds 2 T N and its statistics to `dots` and `fp4`. The compiler's own additions and
savings are left out: tests hold XLA's CPU, which computes bfloat16 in float32, to within a factor of two.
"""

import dataclasses
import functools
import math
import os
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from models import decoder, lora
from models.attention.causal import score_bytes
from models.attention.context import sequence_parts
from models.attention.documents import Documents
from models.attention.ring import ring_bytes
from models.configs import DecoderConfig
from models.decoder import abstract_params
from models.experts.parallel import shape_of
from models.loss import LOSS_TOKENS, piece_tokens
from models.sharding import MESH_AXES, parts_of
from mxjax.numerics.formats import BLOCK
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation
from mxjax.runtime.remat import Remat


def memory_use(device: Any) -> dict[str, int]:
    """Returns memory_bytes and memory_peak_bytes: a device's present and highest use; empty on CPUs."""
    stats = device.memory_stats() or {}
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    return {name: stats[theirs] for name, theirs in names.items() if theirs in stats}


def memory_limit(device: Any) -> int | None:
    """Returns the bytes that JAX may allocate on a device; None if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_there_is() -> float:
    """Returns the bytes that each device of this process may use: on CPUs an equal share of the host's."""
    limit = memory_limit(jax.local_devices()[0])
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host / jax.local_device_count() if limit is None else limit


def gib(size: float) -> str:
    """Returns bytes as GiB, with three significant digits."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


ONE_DEVICE: Mapping[str, int] = types.MappingProxyType(dict.fromkeys(MESH_AXES, 1))


class Memory(NamedTuple):
    """Bytes on one device, by the parts in the module's docstring."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)

    def __str__(self) -> str:
        """Returns the total and its parts in GiB."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self._asdict().items())
        return f"{gib(self.total)} GiB ({parts})"


def step_memory(
    config: DecoderConfig,
    policies: LayerPolicies,
    params: Any,
    opt_state: Any,
    *,
    frozen: Any = None,
    batch_size: int,
    seq_len: int,
    accumulate: int = 1,
    mesh: Mapping[str, int] = ONE_DEVICE,
    remat: Remat = "none",
    implementation: Implementation | None = None,
    documents: Documents | None = None,
    update: int = 0,
) -> Memory:
    """Returns the memory of a step on each device.

    Args:
      params, opt_state: arrays, whose shards on a device count, or their shapes and dtypes.
      frozen: those of the parameters to which `params` are adapters; None without --lora.
      batch_size: sequences a step, on all devices.
      accumulate: parts of a batch that run one after another.
      mesh: the size of each mesh axis.
      remat, implementation, documents: as in `decoder.mean_loss`.
      update: bytes of the optimizer's temporary arrays, when activations are gone.
    """
    parts = sequence_parts(mesh, batch_size // accumulate, seq_len)
    rows, length = -(-batch_size * parts // (accumulate * parts_of(mesh, "rows"))), seq_len // parts
    tokens = rows * length
    config = device_share(config, mesh, tokens)
    shapes = abstract_params(config) if frozen is None else params

    def kept(mode: Remat) -> int:
        options: dict[str, Any] = {"implementation": implementation, "documents": documents}
        loss = functools.partial(decoder.mean_loss, config, policies=policies, remat=mode, **options)
        head = 4 * config.d_model * config.vocab_size  # a gradient, though the forward pass computes it
        return kept_bytes(loss, shapes, (rows, length + 1), frozen) - head

    activations = kept(remat)
    queries = jax.ShapeDtypeStruct((rows, length, config.n_heads, config.head_dim), jnp.bfloat16)
    has_mask = documents is not None or any(0 < window < seq_len for window in config.windows)
    is_plain = not (has_mask or config.sinks)
    scores = score_bytes(queries, is_plain) if parts == 1 else ring_bytes(queries, config.n_kv_heads)
    block = max(_block_bytes(config.block(i), tokens) for i in range(config.n_layers)) + scores
    again = 0 if remat == "none" else max(kept("none") - activations, 0) // config.n_layers
    own, gradients = device_bytes(params), device_bytes(in_float32(params))
    by_dot = mesh["tensor"] > 1
    piece = LOSS_TOKENS if by_dot else piece_tokens(policies["head"], implementation, config.vocab_size)
    logits = (10 * min(tokens, piece) + 6 * config.d_model) * config.vocab_size
    largest = max(again + block, logits - gradients, update - activations)
    return Memory(
        parameters=own + device_bytes(frozen),
        optimizer=device_bytes(opt_state),
        gradients=gradients * (1 if accumulate == 1 else 2),
        activations=activations,
        # The logits are gone before a part's gradients fill up.
        working=largest + (gradients if own < gradients else 0),
    )


def device_share(config: DecoderConfig, mesh: Mapping[str, int], tokens: int) -> DecoderConfig:
    """Returns the model that one device of a mesh computes for so many tokens.

    Its share of the experts has as many rows as arrays have room for; see `models.experts.parallel`.
    """
    tensor, experts = mesh["tensor"], config.experts
    if experts is not None and mesh["expert"] > 1:
        rows = shape_of(mesh, tokens * parts_of(mesh, "rows"), experts.active, experts.n, BLOCK).capacity
        own = experts.n // mesh["expert"]
        experts = dataclasses.replace(experts, n=max(own, -(-rows // tokens)), active=-(-rows // tokens))
    return dataclasses.replace(
        config,
        experts=experts,
        n_heads=config.n_heads // tensor,
        n_kv_heads=config.n_kv_heads // tensor,
        d_ff=config.d_ff // tensor,
        dense_d_ff=tuple(width // tensor for width in config.dense_d_ff),
        vocab_size=-(-config.vocab_size // tensor),
    )


def kept_bytes(loss, params: Any, batch_shape: tuple[int, int], frozen: Any = None) -> int:
    """Returns the bytes that `loss(params, batch, key=)` keeps for its gradient besides params.

    With frozen parameters, params are adapters to them, and the loss takes both attached.
    """

    def backward(params, frozen, batch, key):
        whole = (lambda p: p) if frozen is None else functools.partial(lora.attach, frozen=frozen)
        return jax.vjp(lambda p: loss(whole(p), batch, key=key), params)[1]

    trees = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, frozen))
    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(backward)(*trees, jax.ShapeDtypeStruct(batch_shape, jnp.int32), key).jaxpr
    kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)} - set(jaxpr.invars)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)  # pyright: ignore


def in_float32(arrays: Any) -> Any:
    """Returns the shapes of arrays, with their shardings, in float32."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding), arrays)


def device_bytes(arrays: Any) -> int:
    """Returns the bytes that arrays, or their shapes and dtypes, take on one device."""

    def size(a) -> int:
        shape = a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)
        return math.prod(shape) * a.dtype.itemsize

    return sum(map(size, jax.tree.leaves(arrays)))


def _block_bytes(c: DecoderConfig, tokens: int) -> int:
    weights = c.d_model * (c.qkv_size + c.n_heads * c.head_dim) + c.mlp_size
    rows = tokens * (1 if c.experts is None else c.experts.active + (c.experts.shared or 0))
    return 32 * rows * c.d_ff + 6 * weights
