"""The rows of a mixture's experts in tiles, and the chunks of tiles that one GEMM multiplies.

Each expert's rows begin a new tile, and zeros fill up its last one. So the work follows the rows that exist,
however they are distributed, and no chunk holds the rows of two experts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

TILES, LONGEST = 4, 8
"""Tiles of the mean expert and of the longest chunk."""
ALIGNMENT = 128
"""Divides the rows of a tile, as those of an FP8 GEMM's tiles."""

Index = int | Int32[Array, ""]
Run = Callable[[int, Index, Index, jax.Array], jax.Array]
"""Takes the tiles of a chunk, its expert, its first tile, and the result so far."""


class Chunks(NamedTuple):
    """The chunks of all experts: of each a last one of 1 to `longest` tiles, and full ones before it.

    The shapes of a GEMM are static, so each length has a loop of its own, over the chunks that exist.

    Attributes:
      rows: rows of all experts.
      tile: rows of a tile.
      longest: tiles of the longest chunk.
      sizes: rows of each expert, `rows` in all at most. If they are a numpy array, the loops' bounds are
        static.
    """

    rows: int
    tile: int
    longest: int
    sizes: Int32[Array, " g"] | np.ndarray

    @property
    def tiles(self) -> int:
        """The number of tiles that hold any distribution of the rows."""
        return (self.rows + self.sizes.size * (self.tile - 1)) // self.tile

    def filled(self, x: Float[Array, "m k"]) -> Float[Array, "p k"]:
        """Returns the rows of x in tiles, without those of no expert."""
        return _rows_at(x, source_of(jnp.asarray(self.sizes), x.shape[0], self.tile, self.tiles * self.tile))

    def by_row(self, y: Float[Array, "p n"]) -> Float[Array, "m n"]:
        """Returns the rows that `filled` put in tiles, in x's order; those of no expert are zero."""
        return _rows_at(y, places_of(jnp.asarray(self.sizes), self.rows, self.tile, y.shape[0]))

    def each_last(self, run: Run, result: jax.Array) -> jax.Array:
        """Runs each expert's last chunk; returns the result."""
        xp, tiles, full = self._counted()
        lengths = tiles - full * self.longest
        experts = xp.argsort(lengths, stable=True)
        shorter = lengths[None] < xp.arange(self.longest + 2)[:, None]
        bounds = _static(xp.sum(shorter, axis=1))
        first = xp.cumsum(tiles) - lengths
        for length in range(1, self.longest + 1):

            def chunk(i, result, length=length):
                expert = jnp.asarray(experts)[i]
                return run(length, expert, jnp.asarray(first)[expert], result)

            result = _loop(bounds[length], bounds[length + 1], chunk, result)
        return result

    def each_full(self, run: Run, result: jax.Array) -> jax.Array:
        """Runs the full chunks before each expert's last; returns the result."""
        if self.rows <= self.longest * self.tile:
            return result
        xp, tiles, full = self._counted()
        ends, first = xp.cumsum(full), xp.cumsum(tiles) - tiles

        def chunk(i, result):
            expert = jnp.sum(jnp.asarray(ends) <= i)
            before = i - jnp.asarray(ends - full)[expert]  # full chunks of the expert
            return run(self.longest, expert, jnp.asarray(first)[expert] + before * self.longest, result)

        [count] = _static(ends[-1:])
        return _loop(0, count, chunk, result)

    def each_empty(self, run: Callable[[Index, jax.Array], jax.Array], result: jax.Array) -> jax.Array:
        """Runs each expert without rows; returns the result."""
        experts = jnp.argsort(jnp.asarray(self.sizes) > 0)
        [count] = _static(_module(self.sizes).sum(self.sizes == 0, keepdims=True))
        return _loop(0, count, lambda i, result: run(experts[i], result), result)

    def _counted(self) -> tuple[Any, Any, Any]:
        """Returns numpy or jax.numpy, each expert's tiles, and its full chunks before the last."""
        xp = _module(self.sizes)
        tiles = -(-self.sizes // self.tile)
        return xp, tiles, xp.maximum(tiles - 1, 0) // self.longest


def chunks_of(sizes: Int32[Array, " g"] | np.ndarray, rows: int, unit: int) -> Chunks:
    """Returns the chunks of experts of `sizes` rows.

    Args:
      sizes: numbers of rows; those past `rows` count for nothing. A numpy array is static.
      unit: number that divides the rows of a tile.
    """
    multiple, groups = math.lcm(unit, ALIGNMENT), max(sizes.size, 1)
    tile = max(-(-rows // (TILES * groups * multiple)), 1) * multiple
    xp = _module(sizes)
    ends = xp.minimum(xp.cumsum(sizes), rows).astype(xp.int32)
    sizes = xp.diff(ends, prepend=xp.zeros(1, xp.int32))
    return Chunks(rows, tile, max(min(LONGEST, -(-rows // tile)), 1), sizes)


def places_of(sizes: Int32[Array, " g"], rows: int, tile: int, length: int) -> Int32[Array, " m"]:
    """Returns each row's place in tiles, which is `length` for rows of no group."""
    filled = -(-sizes // tile) * tile
    return _shifted(jnp.cumsum(sizes) - sizes, jnp.cumsum(filled) - filled, sizes, rows, length)


def source_of(sizes: Int32[Array, " g"], rows: int, tile: int, length: int) -> Int32[Array, " p"]:
    """Returns the row at each of `length` places in tiles, which is `rows` for zeros."""
    filled = -(-sizes // tile) * tile
    return _shifted(jnp.cumsum(filled) - filled, jnp.cumsum(sizes) - sizes, sizes, length, rows)


def _shifted(starts, targets, sizes, length: int, missing: int) -> Int32[Array, " m"]:
    """Returns where each of `length` rows moves if groups move from `starts` to `targets`, else `missing`."""
    if not sizes.size:
        return jnp.full(length, missing, jnp.int32)
    row = lax.iota(jnp.int32, length)
    group = jnp.sum(starts[None] <= row[:, None], axis=1) - 1  # searchsorted, in one kernel
    offset = row - starts[group]
    return jnp.where(offset < sizes[group], targets[group] + offset, missing)


def _rows_at(x: Float[Array, "m k"], rows: Int32[Array, " p"]) -> Float[Array, "p k"]:
    """Returns rows of x, zeros past its end."""
    if not x.shape[0]:
        return jnp.zeros_like(x, shape=(rows.size, x.shape[1]))
    return x.at[rows].get(mode="fill", fill_value=0)


def _loop(start: Index, end: Index, body: Callable, result: jax.Array) -> jax.Array:
    if isinstance(start, int) and isinstance(end, int) and start >= end:
        return result
    return lax.fori_loop(start, end, body, result)


def _module(array: jax.Array | np.ndarray) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


def _static(bounds: jax.Array | np.ndarray) -> list[Index]:
    """Returns integers, of Python if the array is static."""
    return bounds.tolist() if isinstance(bounds, np.ndarray) else list(bounds)
