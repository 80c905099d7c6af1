"""Experts in place of a block's MLP: a router sends each token to a few of them. No token is dropped.

Assignments, pairs of a token and one of its experts, are sorted by expert, so that the products are
`mxjax.ragged_dot`'s under the policies of "mlp.gate_up" and "mlp.down". The router, "mlp.router", is a layer
of its own, in float32 unless a rule names it. On a mesh, sums and sorting are over all devices' tokens, and
with the axis `expert` tokens travel to their experts' devices (`models.experts.parallel`).

Shapes in names as in `models.decoder`; T tokens, E experts, K active ones, A = T K assignments.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

import mxjax
from models.configs import ClampedSwiGLU, DecoderConfig, ExpertsConfig
from models.embedding import lookup
from models.experts.order import Order, sort_by_expert
from models.experts.parallel import Exchange, exchange_on_mesh
from models.gemms import BlockGemms, random_matrix, residual_std, zeros
from models.sharding import after_gradients
from mxjax.operands.computed import Norm, rms_norm, swiglu
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation
from mxjax.products.ragged import check_on_mesh
from mxjax.runtime.remat import recomputed


class Routing(NamedTuple):
    """Statistics of routers over a batch, of one block or stacked.

    Attributes:
      load: tokens that arrived at each expert, as a fraction of all; the sum is the number of active experts.
      entropy: the mean over tokens of the router's entropy in nats; at most log E.
      balance: the load-balancing loss E sum(load * mean score), where scores are normalized; K if even.
        Source: Switch Transformers, arXiv 2101.03961, equation 4, for K experts a token.
      z: the router's z-loss, the mean squared logsumexp of the logits. Source: ST-MoE, arXiv 2202.08906,
        equation 5.
    """

    load: Float32[Array, "*L E"]
    entropy: Float32[Array, "*L"]
    balance: Float32[Array, "*L"]
    z: Float32[Array, "*L"]


class Experts(nnx.Module):
    """Gated MLPs, of which each token has a few; each `gate_up` holds the gate's columns first."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config = e = config.experts
        width, inner, std = config.d_model, config.d_ff, config.init_std
        down_std = residual_std(config)
        self.router = random_matrix(rngs, width, e.n, std=std)
        self.gate_up = random_matrix(rngs, e.n, width, 2 * inner, std=std)
        self.down = random_matrix(rngs, e.n, inner, width, std=down_std)
        shared = (e.shared or 0) * inner
        self.shared_gate_up = random_matrix(rngs, width, 2 * shared, std=std) if shared else None
        self.shared_down = random_matrix(rngs, shared, width, std=down_std) if shared else None
        self.router_bias = zeros(e.n) if e.biased else None
        self.gate_up_bias = zeros(e.n, 2 * inner) if e.biased else None
        self.down_bias = zeros(e.n, width) if e.biased else None
        self.balance_bias = zeros(e.n) if e.balance_rate else None

    def __call__(self, x: Float[Array, "B S D"], norm: Norm, gemms: BlockGemms) -> Float[Array, "B S D"]:
        """Returns the weighted sum of each token's experts of x after the norm, and of the shared ones."""
        x, down = after_gradients(x, self.down[...])
        x_TD = rms_norm(x, norm).reshape(-1, x.shape[-1])
        logits_TE = gemms.dot("mlp.router", x_TD, self.router[...], dtype=jnp.float32)
        if self.router_bias is not None:
            logits_TE += self.router_bias[...][None]
        balance = None if self.balance_bias is None else self.balance_bias[...]
        experts_TK, gates_TK, routing = route(self.config, logits_TE, balance)
        policies = gemms.policies["mlp.gate_up"], gemms.policies["mlp.down"]
        order = exchange_on_mesh(experts_TK, self.config.n, policies, gemms.traffic)
        order = sort_by_expert(experts_TK, self.config.n) if order is None else order
        load_E = order.arrived.astype(jnp.float32) / len(x_TD)
        gemms.routing = routing._replace(load=load_E)
        y_TKD = order.collect(self._mlp(order.spread(x_TD), down, order, gemms), self.config.active)
        y_TD = jnp.sum(gates_TK[..., None] * y_TKD.astype(jnp.float32), axis=1)
        y = y_TD.astype(x.dtype).reshape(x.shape)
        if self.shared_gate_up is None or self.shared_down is None:
            return y
        names = "mlp.shared_gate_up", "mlp.shared_down"
        return y + gemms.gated_mlp(x, norm, self.shared_gate_up[...], self.shared_down[...], names)

    def _mlp(self, x_AD, down, order: Order | Exchange, gemms: BlockGemms) -> Float[Array, "A D"]:
        clamped = self.config.clamped
        activation = swiglu if clamped is None else functools.partial(clamped_swiglu, config=clamped)
        y_AN = gemms.ragged_dot("mlp.gate_up", x_AD, self.gate_up[...], order)
        gated_AF = recomputed(activation)(_biased(y_AN, self.gate_up_bias, order))
        y_AD = gemms.ragged_dot("mlp.down", gated_AF, down, order)
        return _biased(y_AD, self.down_bias, order)


def _biased(y: Float[Array, "A N"], bias: nnx.Param | None, order: Order | Exchange) -> Float[Array, "A N"]:
    if bias is None:
        return y
    biases = lookup(bias[...], order.experts[None])[0].astype(y.dtype)
    return y + (biases if order.used is None else jnp.where(order.used[:, None], biases, 0))


def route(
    config: ExpertsConfig, logits_TE: Float32[Array, "T E"], balance_E: Float32[Array, " E"] | None = None
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"], Routing]:
    """Returns each token's experts, their weights, and the statistics of the batch.

    `balance_E` is added to the scores for the choice alone, as in "Auxiliary-loss-free load balancing",
    arXiv 2408.15664, section 2. Of equal scores the first expert's wins. A token with a NaN among its logits
    has NaN weights.
    """
    scores_TE = jax.nn.softmax(logits_TE) if config.scores == "softmax" else jax.nn.sigmoid(logits_TE)
    biased_TE = scores_TE if balance_E is None else scores_TE + balance_E[None]
    experts_TK = jax.lax.top_k(jax.lax.stop_gradient(biased_TE), config.active)[1]
    gates_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if config.renormalized:
        gates_TK /= jnp.sum(gates_TK, axis=-1, keepdims=True)
    share_TE = scores_TE
    if config.scores == "sigmoid":
        share_TE = scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
    counts_E = jnp.zeros(config.n, jnp.int32).at[experts_TK].add(1)
    load_E = counts_E.astype(jnp.float32) / len(logits_TE)
    routing = Routing(
        load=load_E,
        entropy=jnp.mean(jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(share_TE)), axis=-1)),
        balance=config.n * jnp.sum(load_E * jnp.mean(share_TE, axis=0)),
        z=jnp.mean(jax.nn.logsumexp(logits_TE, axis=-1) ** 2),
    )
    return experts_TK, gates_TK, routing


def auxiliary_loss(config: ExpertsConfig, routing: Routing) -> Float32[Array, ""]:
    """Returns the losses that a training step adds to the cross-entropy, in means over the blocks."""
    balance, z = (jnp.mean(loss) for loss in (routing.balance, routing.z))
    return (config.balance_loss or 0.0) * balance + (config.z_loss or 0.0) * z


def check_policies(
    config: DecoderConfig, policies: LayerPolicies, implementation: Implementation | None, owners: int = 1
) -> None:
    """Raises ValueError if `mxjax.ragged_dot` cannot multiply by the policy of an expert's layer.

    Among several owners, by the mesh axis `expert`, every one has some experts.
    """
    if owners > 1 and config.experts is None:
        raise ValueError(f"--mesh expert={owners} shards experts and the model has none; use another axis")
    # Without rows no kernel is traced, which would be compiled with the program's.
    shapes = (((0, 1), "f4"), ((1, 1, 1), "f4"), ((1,), "i4"))
    x, w, size = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    def product(policy, x, w, size):
        key = jax.random.key(0)
        if owners > 1:
            check_on_mesh(policy)
        return mxjax.ragged_dot(x, w, size, policy=policy, key=key, implementation=implementation)

    layers = dict(policies.items())
    routed = [name.removesuffix("router") for name in layers if name.endswith("mlp.router")]
    names = [block + layer for block in routed for layer in ("gate_up", "down")]
    for policy, name in {layers[name]: name for name in names}.items():
        try:
            jax.eval_shape(functools.partial(product, policy), x, w, size)
        except NotImplementedError as error:
            why = str(error).split("; use")[0]
            rules = "'blocks.*.mlp.gate_up=POLICY' 'blocks.*.mlp.down=POLICY'"
            advice = f"choose another --policy, or one of such layers by --layers {rules}"
            if " implementation " in f" {why}":
                advice = "leave --implementation out"
            raise ValueError(f"experts cannot run {name}: {why}; {advice}") from None


def summary(config: ExpertsConfig, routing: Routing) -> dict[str, float]:
    """Returns a step's numbers for its log: means over blocks, and extremes over blocks and experts.

    Loads count as multiples of an even one; `dropped` is the fraction of assignments that no expert got.
    """
    load_LE, entropy, balance, z = (np.asarray(part, np.float64) for part in routing)
    values = {
        "router_entropy": entropy.mean(),
        "router_balance": balance.mean(),
        "router_z": z.mean(),
        "load_max": load_LE.max() * config.n / config.active,
        "load_min": load_LE.min() * config.n / config.active,
        "dropped": max(0.0, 1 - load_LE.sum(axis=-1).min() / config.active),
    }
    return {name: round(float(value), 6) for name, value in values.items()}


def routing_by_layer(routing: Routing, blocks: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns nested dicts of numbers, keyed by the router of each of `blocks`: "blocks.0.mlp.router"."""
    loads, *means = (np.asarray(part).tolist() for part in routing)
    return {
        f"blocks.{i}.mlp.router": dict(zip(Routing._fields[1:], values, strict=True))
        | {"load": {str(expert): value for expert, value in enumerate(load)}}
        for i, load, *values in zip(blocks, loads, *means, strict=True)
    }


def clamped_swiglu(gate_up: Float[Array, "*B two_F"], config: ClampedSwiGLU) -> Float[Array, "*B F"]:
    """Returns gpt-oss's activation of [gate, up], computed in float32; see `ClampedSwiGLU`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gate = jnp.minimum(gate, config.limit)
    up = jnp.clip(up, -config.limit, config.limit)
    return (gate * jax.nn.sigmoid(config.alpha * gate) * (up + 1)).astype(gate_up.dtype)
