"""FP8 operands with one scale a tensor: the cast of both orientations from one read, on NVIDIA GPUs.

A tensor times the inverse of its scale is rounded as `mxjax.quantize` defines. For a current scale XLA finds
the largest magnitude before, where it can in the pass that computes the tensor; for a delayed one the kernel
finds it in the same read. Elements are written K-major, as FP8 GEMMs read them.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxtyping import Array, Float, Float32

from mxjax.kernels.device.elements import encode_fp8, largest, widen
from mxjax.kernels.device.loads import column_groups, join_tensors, store_inside
from mxjax.kernels.launch import MOST_PROGRAMS, ceil_div, triton_call
from mxjax.kernels.lowering import TYPES
from mxjax.kernels.mesh import RuleAxes, batched_by_vmap, partitioned
from mxjax.kernels.quantize.launches import LONGEST_AXIS, Tile
from mxjax.numerics.blocks import magnitude_bits
from mxjax.numerics.float_scales import divide, tensor_max
from mxjax.numerics.formats import get_format
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target

UNIT = 16
"""Both axes are multiples of it: FP8 GEMMs need that, and words hold whole columns."""
TILE = Tile(128, 64, 4, 8)

Sides = tuple[str | None, str | None]
"""The dtypes of the elements along rows (axis -1) and along columns (axis -2); None is not wanted."""
Axes = tuple[str, ...]


def takes(uses: Sequence[OperandUse], target: Target | None, shape: tuple[int, ...]) -> bool:
    """Whether the kernel casts a tensor [..., r, c] of this shape for these uses."""
    if target is None or target.backend != "cuda" or not target.has_fp8:
        return False
    *batch, r, c = shape
    fits = max(r, c) < LONGEST_AXIS and max(ceil_div(r, TILE.rows), math.prod(batch)) <= MOST_PROGRAMS
    return fits and 0 not in shape and not r % UNIT and not c % UNIT and all(map(_is_plain, uses))


def _is_plain(use: OperandUse) -> bool:
    o = use.operand
    is_cast = o.rounding == "nearest" and o.split == "none" and not o.prescale and use.rotation is None
    return is_cast and o.format in ("fp8_e4m3", "fp8_e5m2")


def quantize_fp8(x: Float[Array, "*b r c"], uses: Sequence[OperandUse]) -> list[KernelOperand]:
    """Returns x in FP8 for each use, at most one for each of the last two axes, from one read by a kernel.

    The bits are those of `mxjax.quantize`. NaN or infinity makes a current scale and all elements with it
    NaN. By a delayed scale NaN stays by itself, infinity becomes the largest element, and the operands have
    `amax`.

    Args:
      uses: of a tensor that `takes` accepts.
    """
    *batch, r, c = x.shape
    x = x if x.dtype.name in TYPES else x.astype(jnp.float32)  # float64, as the definition does
    delayed = all(use.scale is not None for use in uses)
    x, per_unit = (x, [use.scale for use in uses]) if delayed else _scaled_now(x, uses)
    factors = {use.axis: factor for use, factor in zip(uses, per_unit, strict=True)}
    by_axis = {use.axis: jnp.dtype(get_format(use.operand.format).dtype).name for use in uses}
    rows, columns = both = by_axis.get(-1), by_axis.get(-2)
    v = math.prod(batch)
    run = _caster((rows, columns), delayed)
    given = (jnp.broadcast_to(factors.get(axis, jnp.float32(1)), (v,)) for axis in (-1, -2))
    written = run(x.reshape(v, r, c), *given)
    amax = lax.bitcast_convert_type(jnp.max(written.pop(), initial=0), jnp.float32) if delayed else None
    made = {}
    for axis, dtype in zip((-1, -2), both, strict=True):
        if dtype is not None:
            elements = written.pop(0)
            elements = elements.reshape(*batch, *elements.shape[1:])
            made[axis] = KernelOperand(elements, None, None, 1 / factors[axis], amax=amax)
    return [made[use.axis] for use in uses]


def _scaled_now(
    x: Float[Array, "*b r c"], uses: Sequence[OperandUse]
) -> tuple[jax.Array, list[Float32[Array, ""]]]:
    """Returns x and the factor of each use: its delayed scale, or x's own."""
    # A row's largest magnitude first: XLA fuses that with what computes x, if both are behind one barrier,
    # but no reduction to a scalar. A float32 x is a weight, of whose stack XLA copies a slice for a barrier.
    of_rows = jnp.max(magnitude_bits(x.astype(jnp.float32)), axis=-1)
    if x.dtype == jnp.float32:
        of_rows = lax.optimization_barrier(of_rows)
    else:
        x, of_rows = lax.optimization_barrier((x, of_rows))
    amax = tensor_max(lax.bitcast_convert_type(of_rows, jnp.float32))
    elements = [get_format(use.operand.format).element for use in uses]
    return x, [
        divide(jnp.float32(element.max if element else 1.0), amax) if use.scale is None else use.scale
        for use, element in zip(uses, elements, strict=True)
    ]


@functools.cache
def _caster(sides: Sides, maxima: bool):
    """Returns a function of x [v, r, c] and two factors [v], of rows and columns; vmap grows v.

    With `maxima` the last result is the bits of x's largest magnitudes, int32 [v]. A mesh may shard it along
    all axes of x, between whole words.
    """

    def run(x, *factors):
        axes = RuleAxes()
        r_axis, c_axis = axes.compound("r", x.shape[1], UNIT), axes.compound("c", x.shape[2], UNIT)
        results = ((f"v {r_axis} {c_axis}", sides[0]), (f"v {c_axis} {r_axis}", sides[1]), ("v", maxima))
        rule = f"v {r_axis} {c_axis}, v, v -> " + ", ".join(term for term, wanted in results if wanted)
        first = [re.findall(r"\w+", axis)[0] for axis in (r_axis, c_axis)]
        call = functools.partial(launch_cast, sides, maxima)
        return partitioned(call, rule, axes.sizes, axes.whole, reduced=first)(x, *factors)

    return batched_by_vmap(run)


def launch_cast(
    sides: Sides, maxima: bool, x: jax.Array, rows: jax.Array, columns: jax.Array, sharding: Axes
) -> list[jax.Array]:
    """Runs the kernel on x, or on a shard of it by these mesh axes."""
    v, r, c = x.shape
    row_dtype, column_dtype = sides
    unused = jax.ShapeDtypeStruct((1,), jnp.int32)
    grid = grid_of(v, r, c)
    row_words, column_words, tiles = triton_call(
        cast_kernel,
        x,
        rows,
        columns,
        out=[
            jax.ShapeDtypeStruct((v, r, c // 4), jnp.int32) if row_dtype else unused,
            jax.ShapeDtypeStruct((v, c, r // 4), jnp.int32) if column_dtype else unused,
            jax.ShapeDtypeStruct(grid[::-1], jnp.int32) if maxima else unused,
        ],
        grid=grid,
        num_warps=TILE.warps,
        **constants_of(sides, r, c, maxima),
    )
    pairs = ((row_words, row_dtype), (column_words, column_dtype))
    results = [in_fp8(words, dtype) for words, dtype in pairs if dtype is not None]
    if maxima:
        found = jnp.max(tiles, axis=(1, 2))
        results.append(lax.pmax(found, sharding) if sharding else found)
    return results


def grid_of(v: int, r: int, c: int) -> tuple[int, int, int]:
    """Returns the kernel's programs for a tensor [v, r, c]."""
    return ceil_div(c, TILE.columns), ceil_div(r, TILE.rows), v


def constants_of(sides: Sides, r: int, c: int, maxima: bool = False) -> dict[str, Any]:
    """Returns the kernel's arguments after the pointers for a tensor [v, r, c]."""
    row_dtype, column_dtype = sides
    return {
        "R": r,
        "C": c,
        "BLOCK_R": TILE.rows,
        "BLOCK_C": TILE.columns,
        "GROUP": TILE.group,
        "EXACT": r % TILE.rows == 0 and c % TILE.columns == 0,
        "ROW_E5M2": None if row_dtype is None else row_dtype == "float8_e5m2",
        "COLUMN_E5M2": None if column_dtype is None else column_dtype == "float8_e5m2",
        "MAXIMA": maxima,
    }


def in_fp8(words: jax.Array, dtype: str) -> jax.Array:
    """Returns the elements in int32 words."""
    elements = lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return elements.reshape(*words.shape[:-1], -1)


@triton.jit
def cast_kernel(
    x, row_factor, column_factor, row_words, column_words, maxima, R, C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, ROW_E5M2: tl.constexpr,
    COLUMN_E5M2: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts x [V, R, C] times row_factor [V] to row_words [V, R, C / 4], and for columns [V, C, R / 4].

    Words are int32 of four elements in E4M3 or E5M2, saturated. R and C are multiples of 16. The grid is
    (tiles along C, tiles along R, V), from the last rows to the first: the L2 cache still has the last.

    Args:
      GROUP: rows in a thread, 8 or 16.
      ROW_E5M2, COLUMN_E5M2: whether elements are in E5M2; None if the side is not wanted.
      MAXIMA: whether to write the bits of each tile's largest magnitude in x, int32 [V, tiles along R, tiles
        along C].
    """
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    v = tl.program_id(2).to(tl.int64)
    first = v * R + r0
    xs = column_groups(x + first * C + c0, R - r0, C - c0, C, GROUP, GROUPS, BLOCK_C, EXACT)
    factors, out, place = (row_factor, column_factor), (row_words, column_words, maxima), (v, r0, c0)
    cast_tile(xs, factors, out, place, R, C, C, BLOCK_R, BLOCK_C, GROUP, EXACT, ROW_E5M2, COLUMN_E5M2, MAXIMA)


@triton.jit
def cast_tile(
    xs, factors, out, place, R, C: tl.constexpr, c_end, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, EXACT: tl.constexpr, ROW_E5M2: tl.constexpr, COLUMN_E5M2: tl.constexpr,
    MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts the tile at a place (matrix, row, column) of a tensor [V, R, C].

    Args:
      xs: the tile, as `column_groups` returns it.
      factors, out: pointers to the factors of rows and columns, and to the words of both and the maxima.
      c_end: the column at which the tiles end.
      Others: see `cast_kernel`.
    """
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    row_factor, column_factor = factors
    row_words, column_words, maxima = out
    v, r0, c0 = place
    first, columns = v * R + r0, c_end - c0
    if MAXIMA:
        wide = ()
        for i in tl.static_range(GROUP):
            wide = wide + (widen(xs[i]),)
        tile = (v * tl.num_programs(1) + r0 // BLOCK_R) * tl.num_programs(0) + tl.program_id(0)
        tl.store(maxima + tile, tl.max(largest(wide, GROUP)))
    if COLUMN_E5M2 is not None:
        factor = tl.load(column_factor + v)
        words = ()
        for i in tl.static_range(0, GROUP, 8):
            eight = ()
            for k in tl.static_range(8):
                eight = eight + (widen(xs[i + k]) * factor,)
            words = words + encode_fp8(eight, COLUMN_E5M2, True)
        word = tl.reshape(join_tensors(words, GROUP // 4), [GROUPS, BLOCK_C, GROUP // 4])
        word = tl.reshape(tl.permute(word, [0, 2, 1]), [BLOCK_R // 4, BLOCK_C])
        at, column = tl.arange(0, BLOCK_R // 4)[:, None], tl.arange(0, BLOCK_C)[None, :]
        pointers = column_words + (v * C + c0) * (R // 4) + r0 // 4 + (column.to(tl.int64) * (R // 4) + at)
        store_inside(pointers, word, (at < (R - r0) // 4) & (column < columns), EXACT)
    if ROW_E5M2 is not None:
        factor = tl.load(row_factor + v)
        row, at = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, BLOCK_C // 4)[None, :]
        for i in tl.static_range(GROUP):
            word = _row_words(widen(xs[i]) * factor, GROUPS, BLOCK_C, ROW_E5M2)
            pointers = row_words + (first + i) * (C // 4) + c0 // 4 + (row * (C // 4) + at)
            store_inside(pointers, word, (row + i < R - r0) & (at < columns // 4), EXACT)


@triton.jit
def _row_words(y, GROUPS: tl.constexpr, WIDTH: tl.constexpr, E5M2: tl.constexpr):
    """Returns rows [GROUPS, WIDTH] as words of four neighbours [GROUPS, WIDTH / 4]."""
    even, odd = tl.split(tl.reshape(y, [GROUPS, WIDTH // 8, 2, 2, 2]))
    y0, y2 = tl.split(even)
    y1, y3 = tl.split(odd)
    y0, y4 = tl.split(y0)
    y1, y5 = tl.split(y1)
    y2, y6 = tl.split(y2)
    y3, y7 = tl.split(y3)
    low, high = encode_fp8((y0, y1, y2, y3, y4, y5, y6, y7), E5M2, True)
    return tl.reshape(tl.join(low, high), [GROUPS, WIDTH // 4])
