"""Launches of the quantizer kernel: the operands wanted, as constants, tiles and programs."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mxjax.kernels.device.quest import QUEST
from mxjax.kernels.launch import MOST_PROGRAMS, ceil_div
from mxjax.kernels.quantize.draws import LARGEST_ROTATION
from mxjax.kernels.quantize.hopper import (
    quantize_gated_gradient_kernel,
    quantize_gated_kernel,
    quantize_normed_kernel,
    quantize_pairs_kernel,
)
from mxjax.kernels.quantize.hopper_tile import GROUP
from mxjax.kernels.quantize.kernel import Form, quantize_kernel, words_of
from mxjax.numerics.formats import BLOCK, E2M1, get_format
from mxjax.numerics.scales import rule_carry
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target

LONGEST_AXIS = 2**24  # axes are shorter, because offsets in a tile have 32 bits

Pair = tuple[OperandUse | None, OperandUse | None]
"""A tensor's uses along its rows (axis -1) and along its columns (axis -2), without their arrays.

If columns read what the quantized rows left, they have `OperandUse.reads`.
"""
ComputedKind = Literal["normed", "gated", "gradient"]
"""What a kernel computes where it quantizes it: `Normed`, `Gated` or `GatedGradient`."""


def check_use(use: OperandUse) -> None:
    """Raises NotImplementedError unless the quantizer kernel takes such an operand."""
    if not use.operand.is_packable:
        raise NotImplementedError(
            f"the quantizer kernel needs mxfp4 in blocks of 32 or 32x32, got {use.operand}; "
            "use mxjax.quantize"
        )
    if use.rotation_size > LARGEST_ROTATION:
        raise NotImplementedError(
            f"the quantizer kernel rotates by H{LARGEST_ROTATION} at most, got H{use.rotation_size}; "
            "use mxjax.rotate and mxjax.quantize"
        )


def fit(pair: Pair, form: Form, target: Target | None, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether the kernel takes a tensor [..., r, c]: its offsets, the grids of CUDA, and the rule `quest`.

    Nobody has run that on HIP.
    """
    *batch, r, c = shape
    if max(r, c) >= LONGEST_AXIS:
        return False
    if target is None or target.backend != "cuda":
        return target is None or target.backend != "hip" or not any(use and _is_quest(use) for use in pair)
    flat = (1, math.prod(batch), r, c)
    grids = (launch_of(part, form, target, flat, dtype).grid for part in launched_pairs(pair, target))
    return all(max(grid[1:]) <= MOST_PROGRAMS for grid in grids)


class Launch(NamedTuple):
    """A kernel with its outputs (of both sides, wanted or not), grid, warps and constants.

    The kernel also takes the stride of its scalars.
    """

    kernel: Any
    out: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    num_warps: int
    constants: dict[str, Any]


def launched_pairs(pair: Pair, target: Target | None) -> list[Pair]:
    """Returns the uses of each launch: both in one, but on CUDA one by one in three cases.

    Rows that draw random bits are alone if columns do too or are not rotated: on an H200 one launch for both
    takes 231 us instead of 211 (8192 x 14336, bfloat16), with the rotations of `amazon` 531 instead of 449. A
    kernel that rotates columns by H128 has too few registers for rows too, and one that rotates both by H64
    cannot have the tile of either.
    """
    rows, columns = pair
    if target is None or target.backend != "cuda" or rows is None or columns is None:
        return [pair]
    sizes = _rotation_sizes(pair)
    drawn_apart = _is_stochastic(rows) and (_is_stochastic(columns) or columns.rotation is None)
    if sizes[1] > 64 or min(sizes) > 32 or drawn_apart:
        return [(rows, None), (None, columns)]
    return [pair]


def _is_stochastic(use: OperandUse) -> bool:
    return use.operand.rounding == "stochastic"


def launch_of(
    pair: Pair,
    form: Form,
    target: Target | None,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    whole: tuple[int, int] | None = None,
) -> Launch:
    """Returns how x [vmapped, batch, r, c] of `shape` and `dtype` is quantized.

    Args:
      whole: rows and columns of the tensor of which x is a part; by default those of x.
    """
    v, b, r, c = shape
    out = _outputs(pair, form, (v, b), r, c)
    if form == "packed" and _hopper_takes(pair, target, c, dtype):
        tile = HOPPER_TILE
        kernel, constants = quantize_pairs_kernel, _pairs_constants(pair, b, r, c, whole or (r, c))
    else:
        tile = _with_whole_runs(_tile(target, pair, r, c * jnp.dtype(dtype).itemsize), pair)
        kernel, constants = quantize_kernel, _constants(pair, form, b, r, c, whole or (r, c))
        constants |= {"GROUP": tile.group, "CONVERT": conversion(target)}
    exact = r % tile.rows == 0 and c % tile.columns == 0
    tiles = (ceil_div(r, tile.rows), ceil_div(c, tile.columns))
    along_rows = _is_along_rows(pair, target, tiles[0])
    constants |= {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "EXACT": exact, "ALONG_ROWS": along_rows}
    return Launch(kernel, out, (*(tiles[::-1] if along_rows else tiles), v * b), tile.warps, constants)


def _is_along_rows(pair: Pair, target: Target | None, tiles: int) -> bool:
    """Whether neighbouring programs lie along rows, of which each reads a part.

    On H100 and H200 that takes up to 6 % less time than along columns, but where rows are rotated beside
    columns 3 to 6 % more.

    Args:
      tiles: tiles along axis -2.
    """
    rows, columns = pair
    if columns is None:
        return True
    on_cuda = target is not None and target.backend == "cuda"
    return on_cuda and tiles <= MOST_PROGRAMS and (rows is None or rows.rotation is None)


def takes_computed(pair: Pair, target: Target | None, r: int, c: int) -> bool:
    """Whether a kernel computes a tensor [..., r, c] where it quantizes it for both of these uses.

    Args:
      r, c: its size; of SwiGLU's result and its gradient the size of the latter, both parts of which have
        whole blocks.
    """
    if None in pair or max(r, c) >= LONGEST_AXIS or ceil_div(r, HOPPER_TILE.rows) > MOST_PROGRAMS:
        return False
    return _hopper_takes(pair, target, c, jnp.bfloat16)


def takes_twice(pair: Pair, target: Target | None, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether one launch packs a tensor along its rows, and along its columns what that left of it."""
    return _hopper_takes(pair, target, shape[-1], dtype) and fit(pair, "packed", target, shape, dtype)


def computed_launch_of(pair: Pair, kind: ComputedKind, shape: tuple[int, int, int]) -> Launch:
    """Returns how the result [v, r, c] of `shape` of a norm or of SwiGLU, or its gradient, is quantized.

    The gradient is that of a product [v, r, 2 c].
    """
    v, r, c = shape
    rows, columns = pair
    assert rows is not None
    assert columns is not None
    kernel = quantize_normed_kernel if kind == "normed" else quantize_gated_kernel
    tile, parts = HOPPER_TILE, 1
    if kind == "gradient":
        kernel, parts = quantize_gated_gradient_kernel, 2
        # With signs or a carry registers would leave room for one such program alone.
        if columns.rotation and not columns.has_signs and not carry_of(columns):
            tile = Tile(256, 128, 8, GROUP.value)
    constants = {
        "R": r,
        "C": c,
        "BLOCK_R": tile.rows,
        "BLOCK_C": tile.columns,
        "EXACT": r % tile.rows == 0 and c % tile.columns == 0,
        "ROW_LENGTH": rows.padded(parts * c),
        "COLUMN_LENGTH": columns.padded(r),
        "ROTATION": columns.rotation_size,
        "ROW_CARRY": carry_of(rows),
        "COLUMN_CARRY": carry_of(columns),
        "SEEN": columns.reads is not None,
    }
    grid = (parts * ceil_div(c, tile.columns), ceil_div(r, tile.rows), v)
    return Launch(kernel, _outputs(pair, "packed", (v,), r, parts * c), grid, tile.warps, constants)


def _outputs(pair: Pair, form: Form, batch: tuple[int, ...], r: int, c: int) -> list[jax.ShapeDtypeStruct]:
    """Returns words and scales of both sides of a tensor [*batch, r, c]."""
    rows, columns = pair
    out = []
    for use, length, other in ((rows, c, r), (columns, r, c)):
        if use is None:
            out += [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.uint8)]
        else:
            n = use.padded(length)
            out.append(jax.ShapeDtypeStruct((*batch, other, n // 8 * words_of(form)), jnp.int32))
            out.append(jax.ShapeDtypeStruct((*batch, other, n // BLOCK), jnp.uint8))
    return out


def _hopper_takes(pair: Pair, target: Target | None, c: int, dtype: DTypeLike) -> bool:
    """Whether Hopper's kernel can pack a tensor with c columns and this dtype for these uses."""
    rows, columns = pair
    if conversion(target) != "sm_90" or jnp.dtype(dtype) != jnp.bfloat16 or c % 8:
        return False
    wanted = [use for use in pair if use]
    if columns is None or any(_is_quest(u) or u.operand.prescale or u.operand.is_square for u in wanted):
        return False
    # Random bits of rows, or beside a rotation, need too many registers.
    if rows and (rows.rotation or _is_stochastic(rows)):
        return False
    # What the rows left is decoded by scales with a carry, where NaN has another byte than without one.
    if columns.reads and not (rows and carry_of(rows)):
        return False
    # Of rotated float32 the kernel reads upper halves, which suffice where the carry's lower half is 0.
    if columns.rotation and carry_of(columns) & 0xFFFF:
        return False
    return columns.rotation_size in ((1,) if _is_stochastic(columns) else (1, 4, 16))


def _is_quest(use: OperandUse) -> bool:
    return use.operand.scale_rule == "quest"


def carry_of(use: OperandUse) -> int:
    """Returns the kernels' constant CARRY for a use's scale rule."""
    return QUEST.value if _is_quest(use) else rule_carry(use.operand.scale_rule, E2M1)


def _pairs_constants(pair: Pair, b: int, r: int, c: int, whole: tuple[int, int]) -> dict[str, Any]:
    rows, columns = pair
    assert columns is not None
    drawn = _is_stochastic(columns)
    # Random bits alone depend on the place, and other kernels are the same for any.
    sizes = _sizes(b, r, c, whole) if drawn else _sizes(1, r, c, (r, c))
    return {
        **sizes,
        "ROW_LENGTH": rows.padded(c) if rows else 0,
        "COLUMN_LENGTH": columns.padded(r),
        "COLUMN_STOCHASTIC": drawn,
        "ROTATION": columns.rotation_size,
        "COLUMN_SIGNS": columns.has_signs,
        "ROW_CARRY": carry_of(rows) if rows else 0,
        "COLUMN_CARRY": carry_of(columns),
        "SEEN": columns.reads is not None,
    }


def _sizes(b: int, r: int, c: int, whole: tuple[int, int]) -> dict[str, Any]:
    return {"BATCH": b, "R": r, "C": c, "R_ALL": whole[0], "C_ALL": whole[1]}


def _constants(pair: Pair, form: Form, b: int, r: int, c: int, whole: tuple[int, int]) -> dict[str, Any]:
    constants = _sizes(b, r, c, whole)
    for name, use, length in zip(("ROW", "COLUMN"), pair, (c, r), strict=True):
        values = _use_constants(use, form, use.padded(length)) if use else _ABSENT
        constants |= {f"{name}_{k}": value for k, value in values.items()}
    return constants


_ABSENT: Mapping[str, object] = {
    "FORM": "",
    "LENGTH": 0,
    "ROTATION": 1,
    "SIGNS": False,
    "CARRY": 0,
    "SQUARE": False,
    "STOCHASTIC": False,
    "PRESCALE": 1,
    "FACTOR": 1.0,
}


def _use_constants(use: OperandUse, form: Form, length: int) -> dict[str, object]:
    """Returns the kernel's constants for a use whose contracted axis is `length` long when padded."""
    return {
        "FORM": form,
        "LENGTH": length,
        "ROTATION": use.rotation_size,
        "FACTOR": float(np.float32(use.rotation_size**-0.5)),
        "SIGNS": use.has_signs,
        "CARRY": carry_of(use),
        "SQUARE": use.operand.is_square,
        "STOCHASTIC": use.operand.rounding == "stochastic",
        "PRESCALE": use.operand.prescale or 1,
    }


def conversion(target: Target | None) -> str:
    """Returns the target whose instructions encode elements, or "software" for none."""
    if target is None or target.backend == "interpreter":
        return "software"
    if target.arch == "gfx950":
        return "gfx950"
    if target.backend != "cuda" or not target.has_fp8:
        return "software"
    capability = target.compute_capability or 0
    return "sm_100" if capability >= 100 else "sm_90" if capability >= 90 else "sm_89"


class Tile(NamedTuple):
    """A program's part of a tensor, its warps, and the elements along the blocked axis in each thread."""

    rows: int
    columns: int
    warps: int
    group: int


HOPPER_TILE = Tile(128, 128, 4, GROUP.value)


def block16_tile(pair: Pair, target: Target | None, shape: tuple[int, ...]) -> Tile:
    """Returns the tile in which `block16` quantizes a tensor of this shape, in groups of 32."""
    *_, r, c = shape
    tile = _with_whole_runs(_tile(target, pair, r, 2 * c)._replace(group=32), pair)
    alone = next((use for use in pair if use), None) if None in pair else None
    if alone and alone.operand.four_over_six and alone.rotation_size <= 32:
        # Rounding each element twice, a thread with two groups takes all registers there are.
        halved = "columns" if alone.axis == -1 else "rows"
        tile = tile._replace(**{halved: getattr(tile, halved) // 2})
        if tile[:2] == (16, 256):  # half of it takes 5 % less time
            tile = tile._replace(columns=128, warps=2)
    eden = [use.operand.eden or 1 if use else 1 for use in pair]
    tile = tile._replace(rows=max(tile.rows, eden[1]), columns=max(tile.columns, eden[0]))
    along_rows, along_columns = (get_format(use.operand.format).outer_block if use else 0 for use in pair)
    rows, columns = max(tile.rows, along_columns), max(tile.columns, along_rows)
    if None in pair:  # a thread has as many elements in a longer tile
        return tile._replace(
            rows=rows * tile.columns // columns if along_rows else rows,
            columns=columns * tile.rows // rows if along_columns else columns,
        )
    warps = tile.warps * rows * columns // (tile.rows * tile.columns)
    return Tile(rows, columns, warps, tile.group)


def _with_whole_runs(tile: Tile, pair: Pair) -> Tile:
    """Returns the tile with whole runs of H128, and as many elements in a thread.

    It is longer along a rotated axis, and shorter along the other one if runs there allow it.
    """
    along_rows, along_columns = _rotation_sizes(pair)
    rows, columns = max(tile.rows, along_columns), max(tile.columns, along_rows)
    if columns > tile.columns and along_columns <= rows // 2:
        rows //= 2
    if rows > tile.rows and along_rows <= columns // 2:
        columns //= 2
    warps = max(1, tile.warps * rows * columns // (tile.rows * tile.columns))
    return Tile(rows, columns, warps, tile.group)


def _rotation_sizes(pair: Pair) -> tuple[int, int]:
    """Returns the sizes of the rotations along rows and along columns; 1 is none."""
    rows, columns = pair
    return rows.rotation_size if rows else 1, columns.rotation_size if columns else 1


def _tile(target: Target | None, pair: Pair, r: int, row_bytes: int) -> Tile:
    """Returns the tile: on CUDA the fastest measured on an H200, on gfx950 one chosen from its assembly.

    Those for H64 and H128 of columns on CUDA are chosen from the machine code too. On gfx950 a thread has 64
    elements, or 32 if rows are not aligned to 16 bytes: loads of single elements need more registers.
    """
    if target is None or target.backend == "interpreter":
        return Tile(64, 64, 1, 8)
    along_rows, along_columns = _rotation_sizes(pair)
    if target.backend == "hip":
        if along_columns > 64 and along_rows <= 32:
            # The lanes of one wave exchange the groups of a run without barriers.
            return Tile(128, 32, 2 if row_bytes % 16 else 1, 8)
        return Tile(64 if row_bytes % 16 else 128, 64, 2, 8)
    rows, columns = pair
    if along_columns > 32 and along_rows <= 32:
        # A thread has 2 columns, so that the lanes of one warp exchange a run's groups, without barriers.
        square = columns and columns.operand.is_square  # a block has 32 columns
        if along_columns == 64 and rows is None and not square:
            return Tile(128, 32, 2, 64)  # a thread has a whole run
        return Tile(128, 32, 2, 32) if along_columns == 64 or square else Tile(256, 16, 2, 32)
    if rows and columns is None and _is_stochastic(rows) and rows.rotation:
        if along_rows == 64 and r <= 64 * MOST_PROGRAMS:
            return Tile(64, 128, 4, 64)  # a thread has a whole run
        return Tile(128, 64, 4, 32)
    if rows and columns is None and not rows.operand.is_square and r <= 16 * MOST_PROGRAMS:
        # Wide tiles write at least 16 scale bytes of a row at a time.
        lower = rows.rotation and row_bytes >= 2048 and r <= 4 * MOST_PROGRAMS
        return Tile(4, 1024, 2, 32) if lower else Tile(16, 512, 4, 32)
    rotated = any(use and use.rotation for use in pair)
    return Tile(128, 64, 4, 32 if rows is None or rotated else 8)
