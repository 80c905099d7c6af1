"""`DotGeneral`: a replacement for `jax.lax.dot_general` in layers of other libraries."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.numerics.operand import check_choice
from mxjax.policy.policy import Policy
from mxjax.products.dot import DimensionNumbers, check_axes, check_key, dot_general
from mxjax.products.implementations import Implementation
from mxjax.recipes import as_policy, policies
from mxjax.runtime.arguments import check_arrays

Side = Literal["lhs", "rhs"]
Key = jax.Array | Callable[[], jax.Array] | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DotGeneral:
    """A callable with the arguments of `jax.lax.dot_general`; `make_dot_general` makes it.

    Equal for equal arguments, hashable, and picklable if its key is. A JAX key is compared by value, a key
    that a transformation traces and a function by identity. As a pytree it is static, but for a function that
    draws keys and may have state, such as an NNX stream.
    """

    policy: Policy
    key: Key = None
    implementation: Implementation | None = None
    weight: Side | None = None

    def __call__(
        self,
        lhs: Shaped[Array | np.ndarray, "..."],
        rhs: Shaped[Array | np.ndarray, "..."],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Returns the product, as `jax.lax.dot_general` orders it.

        Raises:
          ValueError: it cannot be told which operand is the weight. Others as in `dot`.
        """
        check_arrays("the result of make_dot_general", lhs=lhs, rhs=rhs)
        check_axes(lhs, rhs, dimension_numbers)
        if self.weight is None and not is_linear(lhs, dimension_numbers):
            raise ValueError(
                f"make_dot_general cannot tell which operand of {lhs.shape} x {rhs.shape} along "
                f"{dimension_numbers} is the weight; use mxjax.einsum, or weight='rhs' or 'lhs'"
            )
        key = self.key
        if callable(key):
            key = key() if self.policy.needs_key else None  # no random stream is needed for nothing
        contract, batch = dimension_numbers
        swap = self.weight == "lhs"
        y = dot_general(
            *((rhs, lhs) if swap else (lhs, rhs)),
            (contract[::-1], batch[::-1]) if swap else dimension_numbers,
            precision,
            preferred_element_type,
            policy=self.policy,
            key=key,
            implementation=self.implementation,
        )
        if swap:  # the free axes of both change places
            first, free = len(batch[0]), rhs.ndim - len(contract[1])
            y = y.transpose(*range(first), *range(free, y.ndim), *range(first, free))
        return with_sharding(y, out_sharding)

    def _identity(self) -> tuple[Any, ...]:
        return self.policy, self.implementation, self.weight, _key_identity(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DotGeneral) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        names = [name for name, policy in policies().items() if policy == self.policy]
        more = {"key": self.key, "implementation": self.implementation, "weight": self.weight}
        said = [repr(names[0] if names else self.policy)]
        said += [
            f"{name}={' '.join(repr(value).split())}" for name, value in more.items() if value is not None
        ]
        return f"mxjax.make_dot_general({', '.join(said)})"


def _flatten(d: DotGeneral) -> tuple[tuple[Any, ...], DotGeneral]:
    return ((d.key,), dataclasses.replace(d, key=None)) if callable(d.key) else ((), d)


def _unflatten(d: DotGeneral, keys: tuple[Any, ...]) -> DotGeneral:
    return dataclasses.replace(d, key=keys[0]) if keys else d


jax.tree_util.register_pytree_node(DotGeneral, _flatten, _unflatten)


def make_dot_general(
    policy: Policy | str,
    *,
    key: Key = None,
    implementation: Implementation | None = None,
    weight: Side | None = None,
) -> DotGeneral:
    """Returns a `dot_general` for `flax.nnx.Linear(dot_general=...)` and `flax.linen.Dense(dot_general=...)`.

    Args:
      key: JAX key for policies that draw random bits, or a function that returns a new key at each call; it
        is called only if the policy draws any. A single key draws the same bits at every call. In Linen pass
        `lambda: self.make_rng("mxjax")`. In NNX pass `rngs.mxjax` and give the layer
        `dot_general=nnx.data(make_dot_general(...))`: the stream is then a part of the layer, so that it
        advances under nnx.jit and other transformations. Under nnx.vmap pass `rngs.mxjax.fork()`.
      weight: the operand that is the weight, "lhs" or "rhs"; the other one has the tokens that Wgrad
        contracts. None: rhs, in a linear layer's product of the last axes of lhs with the first of rhs; any
        other product is refused. For `jnp.einsum`, which may swap its operands, use `mxjax.einsum`.
      Others: see `dot`.
    Raises:
      ValueError: an unknown policy or side, or a policy that needs a key without one.

    A layer with `dtype=bfloat16` rounds its weights to bfloat16 before this function sees them.
    """
    resolved = as_policy(policy)
    if key is None and resolved.needs_key:
        raise ValueError(
            f"the policy draws random bits in {resolved.drawing} and needs key=, a function that returns a "
            "new key at each call; pass lambda: self.make_rng('mxjax') in Linen, and in NNX rngs.mxjax "
            "within nnx.data"
        )
    if not callable(key):
        check_key(resolved, key)
    if weight is not None:
        check_choice("weight", weight, Side)
    return DotGeneral(resolved, key, implementation, weight)


def is_linear(lhs: jax.Array | np.ndarray, dimension_numbers: DimensionNumbers) -> bool:
    """Whether the last axes of lhs are contracted with the first axes of rhs, in order."""
    (lhs_contract, rhs_contract), (lhs_batch, _) = dimension_numbers
    count = len(lhs_contract)
    last, first = range(lhs.ndim - count, lhs.ndim), range(count)
    return not lhs_batch and list(lhs_contract) == list(last) and list(rhs_contract) == list(first)


def with_sharding(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Returns y sharded as `out_sharding` says, the argument of `jax.lax.dot_general`; as it is for None.

    A sharding on an empty mesh is accepted as lax does; haliax passes it without a mesh.
    """
    mesh = getattr(out_sharding, "mesh", None)
    if out_sharding is None or (mesh is not None and mesh.empty):
        return y
    if jax.typeof(y).sharding.mesh.explicit_axes:
        return jax.sharding.reshard(y, out_sharding)
    return lax.with_sharding_constraint(y, out_sharding)


def _key_identity(key: Key) -> Any:
    if not isinstance(key, jax.Array | np.ndarray) or isinstance(key, Tracer):
        return key if key is None or callable(key) else id(key)
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return str(key.dtype), np.asarray(words).tobytes()
