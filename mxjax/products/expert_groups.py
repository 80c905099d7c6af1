"""The rows of a mixture's experts as `mxjax.products.ragged` multiplies them: on one device, or on a mesh.

On a mesh each device has some experts, and some of their rows. Quantization is that of one array of all rows;
only the products run device by device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from mxjax.numerics.philox import KeyWords
from mxjax.operands.use import OperandUse
from mxjax.products.draws import GemmUses, PolicyUses


class Grid(NamedTuple):
    """The axes of the mesh that shard rows, slowest first, and the one of them that shards experts."""

    rows: tuple[str, ...]
    experts: str


class Groups(NamedTuple):
    """Rows sorted by expert, each expert's filled up with zeros to whole units.

    Attributes:
      sizes: rows of each of g experts; on a mesh those of each device, [devices, g / devices of experts].
      places: the position of each row that random bits count, as `KeyWords.places`; None is its own.
    """

    sizes: Int32[Array, "*devices g"]
    places: Int32[Array, " m"] | None = None

    def of(self, uses: PolicyUses) -> PolicyUses:
        """Returns the uses, whose random bits are those of the rows' places; weights have their own."""
        fprop, dgrad, wgrad = uses
        return PolicyUses(
            fprop._replace(lhs=self._placed(fprop.lhs)),
            dgrad._replace(lhs=self._placed(dgrad.lhs)),
            GemmUses(*map(self._placed, wgrad)),
        )

    def _placed(self, use: OperandUse) -> OperandUse:
        if use.reads is not None:
            use = use._replace(reads=self._placed(use.reads))
        if self.places is None or not isinstance(use.key, KeyWords):
            return use
        return use._replace(key=use.key._replace(places=self.places))


def multiply_groups(
    lhs: Float[Array, "m a"],
    rhs: Float[Array, "..."],
    groups: Groups,
    grid: Grid | None,
    dims: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
) -> Float[Array, "..."]:
    """Returns `jax.lax.ragged_dot_general` in float32, of each device's rows and experts on a grid.

    Where rhs is of rows too, the result is of experts, and devices with the same experts sum theirs.
    """

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, dims, precision, preferred_element_type=jnp.float32)

    if grid is None:
        return product(lhs, rhs, groups.sizes)
    by_row = bool(dims.rhs_group_dimensions)
    others = tuple(axis for axis in grid.rows if axis != grid.experts)

    def of_device(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        y = product(lhs, rhs, sizes[0])
        return y if by_row else lax.psum(y, others)

    rows, experts = PartitionSpec(grid.rows), PartitionSpec(grid.experts)
    run: Any = jax.shard_map(
        of_device,
        in_specs=(rows, experts if by_row else rows, rows),
        out_specs=rows if by_row else experts,
        axis_names=set(grid.rows),
        check_vma=False,
    )
    return run(lhs, rhs, groups.sizes)
