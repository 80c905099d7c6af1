"""Llama 3.1 in Flax NNX, every matrix product through `mxjax.dot` in its own policy.

Shapes in names: B batch, S sequence, D d_model, G key/value heads, R query heads a key/value head,
H head_dim, F d_ff, V vocabulary. Parameters are float32 and stacked over layers; activations have the
dtype given to the call. Policies are arguments: one set of weights runs in any of them. Query, key and value
are one GEMM ("attention.qkv"), gate and up projection another ("mlp.gate_up"), each with one policy; the
embedding is a lookup and the norms are no GEMMs, so no policy applies to them.

Source: "The Llama 3 Herd of Models", arXiv 2407.21783.
"""

import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

import mxjax
from models import loss
from models.attention import causal_attention
from models.configs import LlamaConfig
from models.loss import Head, token_losses
from mxjax.layers import LayerPolicies, Rules, resolve
from mxjax.packed import on_gpu
from mxjax.plan import Implementation
from mxjax.policy import Policy
from mxjax.probes import Measures, probe
from mxjax.remat import Remat, keep_products, rematerialize
from mxjax.training.sharding import constrain, weight_layout, whole_units

# The GEMMs of a block, in the order in which they run.
BLOCK_LAYERS = (
    "attention.qkv",
    "attention.scores",
    "attention.values",
    "attention.out",
    "mlp.gate_up",
    "mlp.down",
)
LINEAR_LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
"""Those of them that multiply weights."""
# The logical axes of every parameter that is not a norm's scale, see `mxjax.training.sharding`.
_AXES = {
    "embedding": ("vocab", "embed"),
    "attention.qkv": ("embed", "heads"),
    "attention.out": ("heads", "embed"),
    "mlp.gate_up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
    "head": ("embed", "vocab"),
}
# What stays in bfloat16 unless a rule names it.
_HIGH_PRECISION: Rules = (
    ("blocks.*.attention.scores", "bf16"),
    ("blocks.*.attention.values", "bf16"),
    ("head", "bf16"),
)
_FUSED_ATTENTION = {mxjax.get_policy("bf16"): jnp.bfloat16, mxjax.get_policy("fp32"): jnp.float32}


def layer_policies(config: LlamaConfig, default: Policy | str, rules: Rules = ()) -> LayerPolicies:
    """Returns the policy of every GEMM: `default` for the linear layers of the blocks, then the rules.

    The head and the attention products stay in bfloat16 unless a rule names them. Quantizing
    "attention.values" is not causal: its blocks, along the sequence, share scales with later tokens.
    """
    names = [f"blocks.{i}.{layer}" for i in range(config.n_layers) for layer in BLOCK_LAYERS]
    return resolve([*names, "head"], default, (*_HIGH_PRECISION, *rules))


class RMSNorm(nnx.Module):
    """Root-mean-square normalization in float32."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return _rms_norm(x, self.scale[...], self.eps)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rms_norm(x, scale, eps: float):
    """Keeps x alone for the backward pass: the float32 tensors are soon made again."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    # Spread before it is cast, so that its gradient is summed in float32, over devices too.
    return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape).astype(x.dtype)


def _swiglu(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate_up.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention.

    The columns of `qkv` are grouped by key/value head: its R query heads, its key, its value.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        inner = config.n_heads * config.head_dim
        self.qkv = _matrix(rngs, config.d_model, config.qkv_size, config.init_std)
        self.out = _matrix(rngs, inner, config.d_model, _residual_std(config))

    def __call__(self, x, rope, policies: "BlockPolicies") -> Float[Array, "B S D"]:
        c = self.config
        groups, rest = c.n_kv_heads, c.n_heads // c.n_kv_heads
        y = policies.dot("attention.qkv", x, self.qkv[...])
        y = y.reshape(*x.shape[:2], groups, rest + 2, c.head_dim)
        # Split, whose gradient is concatenated: those of slices would be filled up with zeros and added.
        q_BSGRH, k_BSG1H, v_BSG1H = jnp.split(y, [rest, rest + 1], axis=3)
        q_BSNH = apply_rope(q_BSGRH.reshape(*x.shape[:2], c.n_heads, c.head_dim), rope)
        k_BSGH, v_BSGH = apply_rope(k_BSG1H[..., 0, :], rope), v_BSG1H[..., 0, :]
        out_BSNH = _attend(q_BSNH, k_BSGH, v_BSGH, policies)
        out = out_BSNH.reshape(*x.shape[:2], c.n_heads * c.head_dim).astype(x.dtype)
        return policies.dot("attention.out", out, self.out[...])


class Mlp(nnx.Module):
    """The gated MLP (SwiGLU); `gate_up` holds the gate's columns, then the up projection's."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.gate_up = _matrix(rngs, config.d_model, 2 * config.d_ff, config.init_std)
        self.down = _matrix(rngs, config.d_ff, config.d_model, _residual_std(config))

    def __call__(self, x: Float[Array, "B S D"], policies: "BlockPolicies") -> Float[Array, "B S D"]:
        gated = keep_products(lambda x, w: _swiglu(policies.dot("mlp.gate_up", x, w)))
        return policies.dot("mlp.down", gated(x, self.gate_up[...]), self.down[...])


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: Float[Array, "B S D"], rope, policies: "BlockPolicies") -> Float[Array, "B S D"]:
        x = constrain(x + self.attention(self.attention_norm(x), rope, policies), "batch", None, None)
        return constrain(x + self.mlp(self.mlp_norm(x), policies), "batch", None, None)


class Llama(nnx.Module):
    """The language model: embedding, stacked blocks, final norm, head."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = _matrix(rngs, config.vocab_size, config.d_model, config.init_std)
        self.blocks = _stack(config, rngs)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied else _matrix(rngs, config.d_model, config.vocab_size, config.init_std)

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
        **options,
    ) -> Float32[Array, "B S V"]:
        """Returns the logits of each next token; the arguments are those of `hidden`."""
        common: Any = {"policies": policies, "key": key, "implementation": implementation}
        return self.logits(self.hidden(tokens_BS, **common, **options), **common)

    def hidden(
        self,
        tokens_BS: Int[Array, "B S"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Remat = "none",
        implementation: Implementation | None = None,
        slots: dict[str, Measures] | None = None,
        unroll: int | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns what the head takes: the last block's output, normalized.

        Args:
          tokens_BS: token ids.
          policies: from `layer_policies`.
          key: for policies that draw random bits; fold the step into it.
          dtype: of the activations between layers.
          remat: what each block keeps for its backward pass, see `mxjax.remat`.
          implementation: of the products, see `mxjax.dot`.
          slots: of LINEAR_LAYERS, whose gradient is then their GEMMs' errors; see `mxjax.probes`.
          unroll: blocks that the compiled loop takes in a turn. All of them run fastest, since what is kept
            for the backward pass is then not copied into arrays of all layers, and take longest to compile;
            default, all on a GPU, one elsewhere.
        """
        rope = rope_angles(tokens_BS.shape[1], self.config)
        x_BSD = _embed(self.embedding[...], tokens_BS, dtype)
        graph, blocks = nnx.split(self.blocks)
        for start, stop, block_policies in _runs(policies, self.config.n_layers):
            run = functools.partial(_run_block, graph, block_policies, implementation, rope, key)
            turn = min(unroll or (stop if on_gpu() else 1), stop - start)
            run = rematerialize(run, remat, in_loop=stop - start > turn)
            layers = jnp.arange(start, stop)
            whole = stop - start == self.config.n_layers
            here = (blocks, slots) if whole else _slice((blocks, slots), start, stop)
            x_BSD, _ = jax.lax.scan(run, x_BSD, (layers, *here), unroll=turn)
        return self.norm(x_BSD)

    def logits(
        self,
        x_BSD: Float[Array, "B S D"],
        *,
        policies: LayerPolicies,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
    ) -> Float32[Array, "B S V"]:
        """Returns the head's product."""
        return _head(policies, implementation).logits(x_BSD, self.head_matrix(), self.head_key(key))

    def head_matrix(self) -> Float32[Array, "D V"]:
        """Returns the matrix of the head, which is the embedding's if they are tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def head_key(self, key: jax.Array | None) -> jax.Array | None:
        """Returns the key of the head's random bits."""
        return None if key is None else jax.random.fold_in(key, self.config.n_layers)


Params = dict[str, Any]  # the parameters as nested dicts of arrays


@functools.partial(jax.jit, static_argnums=0)
def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Returns float32 parameters: normal with std `init_std`, over sqrt(2 n_layers) for the matrices that
    write to the residual stream (Megatron's scaled initialization); ones for the norms."""
    return nnx.to_pure_dict(nnx.split(Llama(config, nnx.Rngs(params=key)))[1])


def parameter_axes(config: LlamaConfig) -> Params:
    """Returns the logical axes of every parameter, the layers' first."""

    def axes(name: str, x: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        own = _AXES.get(name.removeprefix("blocks."), ("norm",))
        return ("layers", *own) if name.startswith("blocks.") else own

    return _map_named(axes, abstract_params(config))


def parameter_units(config: LlamaConfig, policies: LayerPolicies) -> Params:
    """Returns how many elements along each axis of every parameter must stay on one device: a GEMM's blocks
    and rotations, and what belongs to a key/value head."""

    def units(name: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        name = "head" if config.tied and name == "embedding" else name.replace("blocks.", "blocks.*.")
        own = [p for layer, p in policies.items() if fnmatch.fnmatch(layer, name)]
        unit = math.lcm(*map(whole_units, own))
        axes = _AXES.get(name.removeprefix("blocks.*."), ("norm",))
        sizes = zip(x.shape[-len(axes) :], axes, strict=True)
        last = (math.lcm(unit, n // config.n_kv_heads) if axis == "heads" else unit for n, axis in sizes)
        return (*(1 for _ in x.shape[len(axes) :]), *last)

    return _map_named(units, abstract_params(config))


def abstract_params(config: LlamaConfig) -> Params:
    """Returns the shapes and dtypes of the parameters."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def _map_named(function: Callable[[str, Any], Any], params: Params) -> Params:
    return jax.tree.map_with_path(lambda path, x: function(".".join(str(p.key) for p in path), x), params)


def apply(
    config: LlamaConfig, params: Params, tokens: Int[Array, "B S"], **options
) -> Float32[Array, "B S V"]:
    """Returns the logits of the Llama with these parameters; options as `Llama.__call__`."""
    return nnx.merge(_graph(config), params)(tokens, **options)


def losses(
    config: LlamaConfig, params: Params, batch: Int[Array, "B S+1"], **options
) -> Float32[Array, "B S"]:
    """Returns the cross-entropy of each token but the first, in nats; options as `Llama.hidden`."""
    return token_losses(*_head_and_input(config, params, batch, **options))


def mean_loss(
    config: LlamaConfig, params: Params, batch: Int[Array, "B S+1"], **options
) -> Float32[Array, ""]:
    """Returns the mean of `losses`, for training: see `models.loss.mean_loss`."""
    return loss.mean_loss(*_head_and_input(config, params, batch, **options))


def _head(policies: LayerPolicies, implementation: Implementation | None) -> Head:
    return Head(policies["head"], implementation, weight_layout(_AXES["head"]))


def _head_and_input(config, params, batch, *, policies, key=None, implementation=None, **options):
    model = nnx.merge(_graph(config), params)
    x_BSD = model.hidden(batch[:, :-1], policies=policies, key=key, implementation=implementation, **options)
    head = _head(policies, implementation)
    return head, x_BSD, model.head_matrix(), batch[:, 1:], model.head_key(key)


@functools.cache
def _graph(config: LlamaConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(params=0))))[0]


class BlockPolicies:
    """The products of one block: `dot` and `dot_general` in the policy, and by the key, of a named layer."""

    def __init__(
        self,
        policies: Sequence[Policy],
        key: jax.Array | None,
        implementation: Implementation | None = None,
        slots: dict[str, Measures] | None = None,
    ):
        self.policies: dict[str, Policy] = dict(zip(BLOCK_LAYERS, policies, strict=True))
        self.key = key
        self.implementation: Implementation | None = implementation
        self.slots = slots

    def dot(self, name: str, x, w) -> Array:
        """Returns x @ w in x's dtype."""
        policy, key = self.policies[name], self._key(name)
        y = mxjax.dot(
            x,
            w,
            policy=policy,
            key=key,
            implementation=self.implementation,
            preferred_element_type=x.dtype,
            layout=weight_layout(_AXES[name]),
        )
        return y if self.slots is None else probe(policy, self.implementation, y, x, w, key, self.slots[name])

    def dot_general(self, name: str, lhs, rhs, dimension_numbers) -> Array:
        """Returns the product in float32."""
        return mxjax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type=jnp.float32,
            policy=self.policies[name],
            key=self._key(name),
            implementation=self.implementation,
        )

    def _key(self, name: str) -> jax.Array | None:
        return None if self.key is None else jax.random.fold_in(self.key, BLOCK_LAYERS.index(name))


def rope_angles(length: int, config: LlamaConfig) -> Float32[Array, "S half"]:
    """Returns the rotation angle of each position and pair of channels, with Llama 3.1's scaling if set."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if (s := config.rope_scaling) is not None:
        turns = s.original_context * frequency / (2 * math.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency


def apply_rope(x: Float[Array, "B S N H"], angles: Float32[Array, "S half"]) -> Float[Array, "B S N H"]:
    """Returns x with channels i and i + H/2 rotated by the angle of their position ("rotate half")."""
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _embed(embedding_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"], dtype) -> Float[Array, "B S D"]:
    """Returns the tokens' rows in dtype.

    On a mesh each device looks up its columns for all the tokens of its `fsdp` group and gives the others
    theirs: less to send than the table.
    """
    tokens_BS = constrain(tokens_BS, "data", None)
    x_BSD = constrain(embedding_VD[tokens_BS].astype(dtype), "data", None, "embed")
    return constrain(x_BSD, "batch", None, None)


def _attend(q_BSNH, k_BSGH, v_BSGH, policies: BlockPolicies) -> Float[Array, "B S N H"]:
    """Returns causal attention: fused if neither product is quantized, else through `dot_general`."""
    scores, values = policies.policies["attention.scores"], policies.policies["attention.values"]
    if scores == values and scores in _FUSED_ATTENTION:
        dtype = _FUSED_ATTENTION[scores]
        q, k, v = (t.astype(dtype) for t in (q_BSNH, k_BSGH, v_BSGH))
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            return causal_attention(q, k, v)
    B, S, N, H = q_BSNH.shape
    G = k_BSGH.shape[2]
    q_BSGRH = q_BSNH.reshape(B, S, G, N // G, H)
    scores_BGSRT = policies.dot_general(
        "attention.scores", q_BSGRH, k_BSGH, (((4,), (3,)), ((0, 2), (0, 2)))
    ) * (H**-0.5)
    visible_ST = jnp.tril(jnp.ones((S, S), bool))
    scores_BGSRT = jnp.where(visible_ST[:, None, :], scores_BGSRT, jnp.finfo(jnp.float32).min)
    weights_BGSRT = jax.nn.softmax(scores_BGSRT, axis=-1).astype(q_BSNH.dtype)
    out_BGSRH = policies.dot_general(
        "attention.values", weights_BGSRT, v_BSGH, (((4,), (1,)), ((0, 1), (0, 2)))
    )
    return out_BGSRH.transpose(0, 2, 1, 3, 4).reshape(B, S, N, H).astype(q_BSNH.dtype)


def _run_block(graph, policies, implementation, rope, key, x_BSD, layer):
    """The body of the scan over layers: one block, with its own weights and its own random bits."""
    index, weights, slots = layer
    key = None if key is None else jax.random.fold_in(key, index)
    products = BlockPolicies(policies, key, implementation, slots)
    return nnx.merge(graph, weights)(x_BSD, rope, products), None


def _runs(policies: LayerPolicies, n_layers: int) -> list[tuple[int, int, tuple[Policy, ...]]]:
    """Returns (start, stop, policies) of each run of consecutive blocks with the same policies."""
    blocks = [tuple(policies[f"blocks.{i}.{layer}"] for layer in BLOCK_LAYERS) for i in range(n_layers)]
    runs, start = [], 0
    for block, group in itertools.groupby(blocks):
        stop = start + len(list(group))
        runs.append((start, stop, block))
        start = stop
    return runs


def _slice(blocks, start: int, stop: int):
    return jax.tree.map(lambda a: a[start:stop], blocks)


def _stack(config: LlamaConfig, rngs: nnx.Rngs) -> Block:
    """Returns a Block whose parameters have a leading axis of n_layers."""

    @nnx.split_rngs(splits=config.n_layers)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs)

    return make(rngs)


def _matrix(rngs: nnx.Rngs, rows: int, columns: int, std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), (rows, columns), jnp.float32))


def _residual_std(config: LlamaConfig) -> float:
    return config.init_std / math.sqrt(2 * config.n_layers)
