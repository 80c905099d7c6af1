"""The rows of a mixture's experts on one device, or on a mesh whose partitioner moves them.

Shapes in names as in `models.experts.layer`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num

import mxjax


class Order(NamedTuple):
    """The assignments in order of their experts.

    Attributes:
      forward, inverse: the permutation from tokens' order to experts', and back.
      experts: the expert of each row in the new order.
      sizes: the number of rows of each expert.
      used: None; every row has a token.
    """

    forward: Int32[Array, " A"]
    inverse: Int32[Array, " A"]
    experts: Int32[Array, " A"]
    sizes: Int32[Array, " E"]
    used: None = None

    @property
    def arrived(self) -> Int32[Array, " E"]:
        """The tokens of each expert: all, since none travels."""
        return self.sizes

    def spread(self, x_TD: Num[Array, "T D"]) -> Num[Array, "A D"]:
        """Returns the rows of the assignments."""
        return _spread(len(self.forward) // len(x_TD), x_TD, self.forward, self.inverse)

    def collect(self, y_AD: Float[Array, "A D"], active: int) -> Float[Array, "T K D"]:
        """Returns the rows of each token's experts."""
        return permute(y_AD, self.inverse, self.forward).reshape(-1, active, y_AD.shape[-1])

    def product(self, x: Float[Array, "A k"], w: Float[Array, "E k n"], **options) -> Float[Array, "A n"]:
        """Returns the products of the rows and their experts' weights; options as in `mxjax.ragged_dot`."""
        y: jax.Array = mxjax.ragged_dot(x, w, self.sizes, **options)
        return y


def sort_by_expert(experts_TK: Int32[Array, "T K"], n: int) -> Order:
    """Returns the order in which each expert's tokens are neighbours, and in their own order."""
    experts_A = experts_TK.reshape(-1)
    forward_A = jnp.argsort(experts_A, stable=True).astype(jnp.int32)
    places_A = jnp.arange(len(experts_A), dtype=jnp.int32)
    inverse_A = jnp.zeros_like(forward_A).at[forward_A].set(places_A, unique_indices=True)
    sizes_E = jnp.zeros(n, jnp.int32).at[experts_A].add(1)
    return Order(forward_A, inverse_A, experts_A[forward_A], sizes_E)


@jax.custom_vjp
def permute(
    x: Num[Array, "A D"], forward: Int32[Array, " A"], inverse: Int32[Array, " A"]
) -> Num[Array, "A D"]:
    """Returns x[forward]. Its gradient is a lookup too; XLA's would be a sum by atomic operations."""
    return x[forward]


permute.defvjp(
    lambda x, forward, inverse: (x[forward], inverse), lambda inverse, dy: (dy[inverse], None, None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(
    active: int, x: Num[Array, "T D"], forward: Int32[Array, " A"], inverse: Int32[Array, " A"]
) -> Num[Array, "A D"]:
    """Returns x's rows for `active` experts each, in the order `forward`; its gradient is a lookup too."""
    return x[forward // active]


_spread.defvjp(
    lambda active, x, forward, inverse: (_spread(active, x, forward, inverse), inverse),
    lambda active, inverse, dy: (
        lax.reduce_sum(dy[inverse].reshape(-1, active, dy.shape[1]), axes=(1,)),
        None,
        None,
    ),
)
