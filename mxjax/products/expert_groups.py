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
from mxjax.products.expert_runs import runs_of
from mxjax.runtime.mesh import varying_as

RUN = 32
"""Rows of one expert that a CPU multiplies at once: more fill up more, fewer cost more calls."""


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
        if self.places is None or not isinstance(use.key, KeyWords) or not use.operand.needs_key:
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

    if grid is None:
        return multiply_ragged(lhs, rhs, groups.sizes, dims, precision)
    by_row = bool(dims.rhs_group_dimensions)
    others = tuple(axis for axis in grid.rows if axis != grid.experts)

    def of_device(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        y = multiply_ragged(lhs, rhs, sizes[0], dims, precision)
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


def multiply_ragged(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    sizes: Int32[Array, " g"],
    dims: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
) -> Float[Array, "..."]:
    """Returns `jax.lax.ragged_dot_general` of matrices in float32, also of the rows of experts.

    For CPUs XLA multiplies all rows by all experts. There a loop multiplies each row once, in runs of rows of
    one expert, and a NaN in an expert's weights makes its own rows NaN alone.
    """

    def by_runs(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        (_, (rhs_axis,)), _ = dims.dot_dimension_numbers
        [row_axis] = dims.lhs_ragged_dimensions
        runs = runs_of(sizes, lhs.shape[row_axis], RUN, rest=False)

        def in_runs(rows: jax.Array, axis: int) -> jax.Array:
            return runs.filled(jnp.moveaxis(rows, axis, 0)).reshape(runs.number, RUN, -1)

        def of_run(_: None, run: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            x, expert = run
            return None, product(x, rhs[expert], 1, rhs_axis - 1)

        def add_run(sums: jax.Array, run: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, dy, expert = run
            return sums.at[expert].add(product(x, dy, 0, 0)), None

        def product(lhs: jax.Array, rhs: jax.Array, left: int, right: int) -> jax.Array:
            contracted = ((left,), (right,)), ((), ())
            y: jax.Array = lax.dot_general(lhs, rhs, contracted, precision, jnp.float32)
            return y

        x = in_runs(lhs, row_axis)
        if dims.rhs_group_dimensions:
            y: jax.Array = lax.scan(of_run, None, (x, runs.experts))[1]
            return runs.by_row(y.reshape(runs.number * RUN, -1))
        dy = in_runs(rhs, rhs_axis)
        sums = varying_as(jnp.zeros((len(sizes), x.shape[2], dy.shape[2]), jnp.float32), x, dy, sizes)
        y, _ = lax.scan(add_run, sums, (x, dy, runs.experts))
        return y

    def by_xla(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        y: jax.Array = lax.ragged_dot_general(
            lhs, rhs, sizes, dims, precision, preferred_element_type=jnp.float32
        )
        return y

    lhs, rhs, sizes = _mapped_together(lhs, rhs, sizes)
    y: jax.Array = lax.platform_dependent(lhs, rhs, sizes, cpu=by_runs, default=by_xla)
    return y


@jax.custom_batching.custom_vmap
def _mapped_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays, all mapped by `jax.vmap` along axis 0, as `lax.ragged_dot_general` needs them."""
    return arrays


@_mapped_together.def_vmap
def _(size: int, mapped: list[bool], *arrays: jax.Array):
    each = zip(arrays, mapped, strict=True)
    every = (x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in each)
    return _mapped_together(*every), (True,) * len(arrays)
