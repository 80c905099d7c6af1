"""Where a weight lies on a mesh with Auto axes: cut up while it is stored, put together for each product.

Without a word from here the partitioner may move the float32 master weights, and quantize what has arrived.
"""

from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped


class Layout(NamedTuple):
    """How a weight [d_in, d_out] is cut up, by axes of the mesh that `jax.set_mesh` has set.

    Attributes:
      stored: of the weight itself and of its gradient.
      multiplied: of what a GEMM reads of it. An axis that only `stored` names is gathered, after
        quantization: packed elements and scales, FP8 or bfloat16, never the master weights.
    """

    stored: PartitionSpec
    multiplied: PartitionSpec

    @property
    def transposed(self) -> "Layout":
        """The layout of the weight's transpose."""
        return Layout(*(PartitionSpec(*spec[::-1]) for spec in self))


def to_multiply(x: Shaped[Array, "*shape"], layout: Layout | None) -> Shaped[Array, "*shape"]:
    """Returns x, an operand or its scales made of a weight of this layout, as the GEMM reads it."""
    if layout is None:
        return x
    # The first constraint keeps what made x where the weight is stored.
    return lax.with_sharding_constraint(lax.with_sharding_constraint(x, layout.stored), layout.multiplied)


def as_stored(gradient: jax.Array, layout: Layout | None) -> jax.Array:
    """Returns a weight's gradient cut up as the weight is."""
    return gradient if layout is None else lax.with_sharding_constraint(gradient, layout.stored)
