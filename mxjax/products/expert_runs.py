"""The rows of a mixture's experts in runs, so that no block, no rotation and no tile has rows of two experts.

Each expert's rows begin a new run, and zeros fill up its last one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped


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
        return jnp.cumulative_sum(-(-self.sizes // self.run), include_initial=True)

    @property
    def ends(self) -> Int32[Array, " g_2"]:
        """0, the end of each expert's rows, and the number of rows."""
        ends = jnp.cumulative_sum(self.sizes, include_initial=True)
        return jnp.append(ends, jnp.int32(self.rows))

    @property
    def experts(self) -> Int32[Array, " runs"]:
        """The expert of each run, g for none."""
        run = lax.iota(jnp.int32, self.number)
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
    row = lax.iota(jnp.int32, length)
    group = jnp.sum(starts[None] <= row[:, None], axis=1) - 1  # searchsorted, in one kernel
    offset = row - starts[group]
    return jnp.where(offset < sizes[group], targets[group] + offset, missing)


def _rows_at(x: Shaped[Array, "m k"], rows: Int32[Array, " p"]) -> Shaped[Array, "p k"]:
    """Returns rows of x, zeros past its end."""
    return x.at[rows].get(mode="fill", fill_value=0)
