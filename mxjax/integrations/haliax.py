"""haliax's `DotGeneralOp` by mxjax's policies, for Levanter and other models of `haliax.nn.Linear`.

A policy that draws random bits needs new ones at every step, and haliax passes no key. So `PolicyDotGeneral`
counts steps as haliax's FP8 ops keep their scales: the gradient of its state is the next state, which
`haliax.quantization.apply_updates` stores. Levanter's trainer calls it.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

from mxjax.policy.policy import Policy
from mxjax.products.dot import DimensionNumbers
from mxjax.products.dot_general import make_dot_general
from mxjax.products.implementations import Implementation
from mxjax.recipes import as_policy

try:
    import equinox as eqx
    import haliax.nn
    from haliax.quantization import CustomGradientAccumulation
    from haliax.util import ensure_tuple
except ImportError as error:
    raise ImportError(
        "mxjax.integrations.haliax needs marin-haliax 0.2.227 or newer; in a checkout of mxjax, "
        "pip install -e '.[integrations]'"
    ) from error

Rules = Sequence[tuple[str, Policy | str]]
"""Pairs of a regular expression and a policy; see `quantize_linear_layers`."""


class PolicyDotGeneral(CustomGradientAccumulation):
    """A `haliax.quantization.DotGeneralOp`, for `haliax.nn.Linear.init(..., dot_general=...)`.

    Attributes:
      policy: see `mxjax.dot`.
      state: the number of the layer and the steps done, from which a policy's random bits follow. None for a
        policy that draws none. A `Stacked` adds axes in front.
      seed: seed of the random bits.
      implementation: see `mxjax.dot`.
    """

    policy: Policy = eqx.field(static=True)
    state: Float32[Array, "*stack 2"] | None = None
    seed: int = eqx.field(static=True, default=0)
    implementation: Implementation | None = eqx.field(static=True, default=None)

    def __call__(
        self,
        lhs: Shaped[Array, "..."],
        rhs: Shaped[Array, "..."],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Returns the product of activations lhs and a weight rhs, as `jax.lax.dot_general` orders it.

        Raises:
          ValueError: the operands share batch axes, so that haliax may pass the weight first. Others as in
            `dot`.
        """
        if any(dimension_numbers[1]):
            raise ValueError(
                f"PolicyDotGeneral cannot tell the weight of {lhs.shape} x {rhs.shape}, which share batch "
                "axes; use mxjax.einsum in a layer of your own"
            )
        key = None
        if self.state is not None:
            layer, step = lax.stop_gradient(self.state).astype(jnp.int32)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), layer), step)
        multiply = make_dot_general(self.policy, key=key, implementation=self.implementation, weight="rhs")
        y = multiply(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
        return y if self.state is None else _count_step(y, self.state)

    def accumulate(self, other: Any) -> Any:
        """Returns the state after two microbatches of one step, which draw the same bits."""
        if self.state is None or other.state is None:
            return other
        return dataclasses.replace(other, state=jnp.maximum(self.state, other.state))


@jax.custom_vjp
def _count_step(y: jax.Array, state: jax.Array) -> jax.Array:
    """Returns y; the gradient of the state is the next state."""
    del state
    return y


_count_step.defvjp(lambda y, state: (y, state), lambda state, dy: (dy, state.at[1].add(1)))


def quantize_linear_layers[T](
    tree: T, rules: Rules, *, seed: int = 0, implementation: Implementation | None = None
) -> T:
    """Returns a tree of haliax modules whose `Linear` layers multiply by policies.

    Args:
      tree: a model. Layers in a `Stacked` have "stacked" in their path, and share a policy.
      rules: pairs of a policy and, before it, a regular expression that matches the whole path of a layer,
        such as "transformer.layers.*mlp.*". The first that matches decides; layers that none matches stay as
        they are.
      Others: see `PolicyDotGeneral`.
    Raises:
      ValueError: an unknown policy, or a rule that decides for no layer.
    """
    resolved = [(re.compile(pattern), as_policy(policy)) for pattern, policy in rules]
    nodes, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_linear)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in nodes]
    chosen = [
        _first_match(resolved, name) if _is_linear(node) else None
        for name, (_, node) in zip(names, nodes, strict=True)
    ]
    for i, (pattern, _) in enumerate(resolved):
        if i not in chosen:
            layers = ", ".join(name for name, (_, node) in zip(names, nodes, strict=True) if _is_linear(node))
            raise ValueError(f"rule {pattern.pattern!r} decides for no layer; the layers are {layers}")
    replaced, first = [], 0
    for i, (_, node) in zip(chosen, nodes, strict=True):
        if i is not None:
            policy = resolved[i][1]
            stack = _stack_of(node)
            state = _states(first, stack) if policy.needs_key else None
            op = PolicyDotGeneral(policy, state, seed, implementation)
            node = dataclasses.replace(node, dot_general=op)
            first += math.prod(stack)
        replaced.append(node)
    return jax.tree.unflatten(structure, replaced)


def _is_linear(x: object) -> bool:
    return isinstance(x, haliax.nn.Linear)


def _first_match(rules: Sequence[tuple[re.Pattern[str], Policy]], name: str) -> int | None:
    return next((i for i, (pattern, _) in enumerate(rules) if pattern.fullmatch(name)), None)


def _stack_of(layer: Any) -> tuple[int, ...]:
    """Returns the sizes of the axes along which a `Stacked` has stacked a layer."""
    own = {axis.name for spec in (layer.In, layer.Out) for axis in ensure_tuple(spec)}
    return tuple(axis.size for axis in layer.weight.axes if axis.name not in own)


def _states(first: int, stack: tuple[int, ...]) -> Float32[Array, "*stack 2"]:
    """Returns the states of a stack's layers, numbered from `first`."""
    layers = jnp.arange(first, first + math.prod(stack), dtype=jnp.float32).reshape(stack)
    return jnp.stack([layers, jnp.zeros_like(layers)], axis=-1)
