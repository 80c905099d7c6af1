"""The rows of a mixture's experts: whose they are, and the runs that keep experts apart.

Each expert's rows begin a new run, and zeros fill up its last one, so that no block, no rotation and no tile
has rows of two experts. On a mesh each device has some experts, and some of their rows. Quantization is that
of one array of all rows; only the products run device by device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from mxjax.numerics.philox import KeyWords
from mxjax.operands.use import OperandUse
from mxjax.products.draws import GemmUses, PolicyUses
from mxjax.runtime.mesh import varying_as

CPU_RUN = 32
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


class Runs(NamedTuple):
    """The runs of all experts.

    Attributes:
      rows: rows of all experts, and of none.
      run: rows of a run.
      sizes: rows of each expert, `rows` in all at most.
      rest: whether there are runs for the rows of no expert too, after those of the experts.
    """

    rows: int
    run: int
    sizes: Int32[Array, " g"]
    rest: bool

    @property
    def number(self) -> int:
        """The number of runs that hold any distribution of the rows."""
        return runs_number(self.rows, self.run, self.sizes.size + self.rest)

    @property
    def starts(self) -> Int32[Array, " g_1"]:
        """The first run of each expert, and the end of the last."""
        return jnp.cumulative_sum(-(-self.sizes // self.run), dtype=jnp.int32, include_initial=True)

    @property
    def ends(self) -> Int32[Array, " g_2"]:
        """0, the end of each expert's rows, and the number of rows."""
        ends = jnp.cumulative_sum(self.sizes, dtype=jnp.int32, include_initial=True)
        return jnp.append(ends, jnp.asarray(self.rows, jnp.int32))

    @property
    def experts(self) -> Int32[Array, " runs"]:
        """The expert of each run, g for none."""
        run = jnp.arange(self.number, dtype=jnp.int32)
        return jnp.sum(self.starts[None, 1:] <= run[:, None], axis=1, dtype=jnp.int32)

    def filled(self, x: Shaped[Array, "m k"]) -> Shaped[Array, "p k"]:
        """Returns the rows of x in runs, without those of no expert."""
        length = self.number * self.run
        starts, ends = self.starts[:-1] * self.run, self.ends[:-2]
        return _rows_at(x, _shifted(starts, ends, self.sizes, length, self.rows))

    def by_row(self, y: Shaped[Array, "p n"]) -> Shaped[Array, "m n"]:
        """Returns the rows that `filled` put in runs, in x's order; those of no expert are zero."""
        starts, ends = self.starts[:-1] * self.run, self.ends[:-2]
        return _rows_at(y, _shifted(ends, starts, self.sizes, self.rows, y.shape[0]))


def runs_number(rows: int, run: int, groups: int) -> int:
    """Returns the number of runs that hold any distribution of rows among groups."""
    return (rows + groups * (run - 1)) // run


def runs_of(sizes: Int32[Array, " g"], rows: int, run: int, *, rest: bool) -> Runs:
    """Returns the runs of experts of `sizes` rows, of which those past `rows` count for nothing."""
    ends = jnp.minimum(jnp.cumsum(sizes), rows)
    return Runs(rows, run, jnp.diff(ends, prepend=0).astype(jnp.int32), rest)


def _shifted(starts, targets, sizes, length: int, missing: int) -> Int32[Array, " m"]:
    """Returns where each of `length` rows moves if groups move from `starts` to `targets`, else `missing`."""
    row = jnp.arange(length, dtype=jnp.int32)
    group = jnp.sum(starts[None] <= row[:, None], axis=1) - 1  # searchsorted, in one kernel
    offset = row - starts[group]
    return jnp.where(offset < sizes[group], targets[group] + offset, missing)


def _rows_at(x: Shaped[Array, "m k"], rows: Int32[Array, " p"]) -> Shaped[Array, "p k"]:
    """Returns rows of x, zeros past its end."""
    return x.at[rows].get(mode="fill", fill_value=0)


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
        runs = runs_of(sizes, lhs.shape[row_axis], CPU_RUN, rest=False)

        def in_runs(rows: jax.Array, axis: int) -> jax.Array:
            return runs.filled(jnp.moveaxis(rows, axis, 0)).reshape(runs.number, CPU_RUN, -1)

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
            return runs.by_row(y.reshape(runs.number * CPU_RUN, -1))
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
